/* checkpoint.h - the calls on checkpoints. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "crc.h"
#include "peer.h"
#include "pickle.h"
#include "transfer.h"
#include "zstd_stream.h"

/* ---- checkpoint.c ---- */

/* Lists the files that belong to the checkpoint at a path. */
rsd_status checkpoint_list_owned(const char *path, rsd_storage *storage, struct name_list *owned);

/* ---- spread.c: one call, many ranks ---- */

struct operation {
    rsd_transport transport;
    int32_t rank, nranks; /* 1: this process alone */
    double timeout, began;
    rsd_on_progress *on_progress;
    void *context;
    struct peer_step *step; /* at hand */
};
rsd_status operation_open(struct operation *operation, const rsd_transport *given, double timeout,
                          rsd_on_progress *on_progress, void *context);
void operation_follow(struct operation *operation, struct batch *batch); /* sets its on_progress */

/* Collective, and at once for a process alone: does the work, merges what all said, returns one status. */
rsd_status operation_step(struct operation *operation, struct peer_step *step);

/* Rank 0 alone works, and all hear how it went; with a step, also what it said. */
rsd_status operation_lead(struct operation *operation, rsd_status (*work)(void *context),
                          void *context);
rsd_status operation_lead_step(struct operation *operation, struct peer_step *step);

/* The first step of a call: how preparing went, that all call for the same, and the least tile limit. */
rsd_status operation_agree(struct operation *operation, rsd_status status, struct hash what,
                           uint64_t *tile_limit);
void catalog_hash(const struct catalog *catalog, struct hash *hash);

/* Lists and reports, as they are said and heard. What is heard is added to the list or the sum. */
rsd_status payload_put_list(struct payload *payload, const void *list, size_t n,
                            size_t element_nbytes);
rsd_status payload_take_list(const struct payload *payload, size_t *at, void *list_pointer,
                             size_t *n, size_t *capacity, size_t element_nbytes);
rsd_status payload_put_report(const struct operation *operation, struct payload *payload,
                              rsd_report *report); /* with the seconds up to now */
struct extent_update {                             /* where something compressed came to lie */
    uint64_t value, index, offset, nbytes;
};
rsd_status payload_take_extent(const struct payload *payload, size_t *at, struct catalog *catalog);
rsd_status payload_take_report(const struct payload *payload, size_t *at, rsd_report *sum);
rsd_status merge_reports(const struct operation *operation, const struct payload *all,
                         struct payload *result);

/* ---- local.c: tensors in the caller's memory ---- */

struct local_box {
    rsd_box box;
    int32_t rank;
    uint32_t order; /* among the boxes of its rank */
    rsd_dtype dtype;
    char *memory;                  /* of its first element */
    int64_t strides[RSD_MAX_DIMS]; /* bytes */
};
struct local_boxes {
    struct local_box *list;
    size_t n, capacity;
};
rsd_status take_local(const rsd_tensor *given, int64_t index, rsd_tensor *out);
rsd_status local_boxes(const rsd_tensor *local, bool written, struct local_boxes *out);
void local_boxes_drop(struct local_boxes *boxes);

/* ---- deal.c: who writes which box ---- */

enum dedup_mode { DEDUP_EVENLY, DEDUP_TO_LOWEST, DEDUP_KEEP_ALL };

struct dedup_box {
    size_t tensor;
    int32_t rank;
    uint32_t order;     /* among the boxes that the rank holds */
    size_t coordinates; /* of its lo, its len, and where it is in its first holder's array */
};
struct dedup {
    struct dedup_box *list; /* by tensor, then rank */
    int64_t *coordinates;
    int32_t *value_ranks;
    size_t n, ncoordinates, coordinates_capacity;
};
/* widths: bytes of an element of each; NULL: as the layouts say. */
rsd_status dedup_assign(struct dedup *dedup, size_t ntensors, const rsd_layout *const *layouts,
                        const size_t *widths, const char *const *names, int64_t nranks,
                        size_t nvalues, enum dedup_mode to);
void dedup_drop(struct dedup *dedup);

/* Adds the boxes of a tensor to the last tensor of a manifest; *next goes through the list. */
rsd_status dedup_add_boxes(const struct dedup *dedup, size_t tensor, size_t *next,
                           struct manifest *manifest);

/* ---- journal.c: what of an output is complete ---- */

/* In a directory that is being written; nothing there is a checkpoint yet. */
#define JOURNAL_NAME "reshard-journal"

struct output;
rsd_status journal_start(struct store_output *dest, const char *source, const char *target);
rsd_status journal_resume(struct store_output *dest, const char *source, const char *target,
                          struct output *output);
rsd_status journal_add(struct store_output *dest, const struct output *output, uint32_t file);
rsd_status journal_redo(struct store_output *dest, uint32_t file);
rsd_status journal_add_items(const struct store_output *dest, const size_t *extents, size_t n);
rsd_status journal_clear(const struct store_output *dest); /* what ranks noted, each by itself */

/* ---- output.c: files that are being written ---- */

struct out_state {
    struct output *output;
    uint32_t file;
    bool created, done;
    bool touched; /* by this process */
    bool noted;   /* the journal said once that it is complete, with this length */
    uint64_t noted_nbytes;
    size_t left;              /* items that are not complete */
    uint64_t cursor;          /* compressed: where the next item goes */
    struct zstd_writer *zstd; /* of the item at hand */
};

/* Bytes of a file that are shared with the input, and not written. */
struct cloned_range {
    uint64_t lo, hi;
};
struct cloned_ranges {
    struct cloned_range *list;
    size_t n, capacity;
};

struct output {
    struct manifest *manifest;
    struct store_output *dest;
    rsd_checkpoint *from; /* of values that are copied */
    int32_t only;         /* the only file that is written; -1: all */
    bool journal;
    bool shared;   /* files are made by rank 0, written by all ranks, and completed by rank 0 */
    bool unsynced; /* nobody waits for the disk */
    struct store *store; /* of dest; its first files are those of the manifest */
    struct out_state *states;
    pthread_mutex_t lock;
    _Atomic uint64_t nbytes_written; /* by this process, in this run */
    int64_t nfiles_written;
    _Atomic int reflink;          /* enum rsd_reflink */
    bool unchecked;               /* what is shared need not be read */
    struct cloned_ranges *cloned; /* by extent; NULL: nothing is shared */
    uint64_t nbytes_shared;
    size_t *pending; /* extents that are complete and not noted yet */
    size_t npending, pending_capacity;
    uint64_t pending_nbytes;
};

rsd_status output_open(struct output *output, struct manifest *manifest, struct store_output *dest,
                       rsd_checkpoint *from, int32_t only);
void output_close(struct output *output);
static inline bool output_wants(const struct output *output, uint32_t file)
{
    return !output->states[file].done && (output->only < 0 || (uint32_t)output->only == file);
}

static inline bool output_wants_item(const struct output *output, size_t extent)
{
    return output_wants(output, output->manifest->catalog.extents[extent].file) &&
           !output->manifest->items[extent].done;
}

/* Brings what is complete to disk and notes it, so that a run that is stopped can go on from there. */
rsd_status output_note(struct output *output);

/* A sink for one box; its item is begun before the first block and ended after the last. */
void output_sink(struct output *output, size_t tensor, size_t box, struct sink *sink);
rsd_status output_begin(struct output *output, size_t tensor, size_t box);
rsd_status output_end(struct output *output, size_t tensor, size_t box);

/* What is left when all items are written: files without any, and the names of directories on disk. */
rsd_status output_finish(struct output *output);

/* ---- reflink.c: what is shared with the input ---- */

/* Shares what can be shared of the pieces of a transfer. */
rsd_status reflink_share(struct output *output, struct transfer *transfer);
rsd_status output_note_cloned(struct output *output, size_t extent, uint64_t lo, uint64_t hi);
void output_drop_cloned(struct output *output);

/* Moves *at to the next byte before `end` that is not shared. Returns how many follow that are not. */
uint64_t output_find_uncloned(const struct output *output, size_t extent, uint64_t *at,
                              uint64_t end);

/* Shared: rank 0 makes all files, all bring what they wrote to disk, and rank 0 ends what was split. */
rsd_status output_make_files(struct output *output);
rsd_status output_flush(struct output *output);
rsd_status output_end_split(struct output *output);

/* ---- save_draft.c, save.c: from memory ---- */

/* The memory that an extent is written from. */
struct origin {
    const char *memory;
    int64_t strides[RSD_MAX_DIMS];
};

struct rsd_async_save {
    rsd_save_options options;
    char *path;
    struct manifest manifest;
    struct hash drafted;    /* of the draft, before it is written */
    struct origin *origins; /* by extent */
    char *staged;           /* copies, if there are any */
    struct output output;
    size_t *jobs;      /* extents, by file */
    size_t *tensor_of; /* by extent */
    size_t *first_job; /* of each file, and one more */
    size_t njobs;
    uint64_t tile_limit;
    int64_t nbytes;
    pthread_t thread;
    rsd_report report;
    rsd_status status;
    char *message;
    struct operation operation;
    struct store_output *dest; /* of many ranks, and below */
    bool published, threadless;
};

/* Everything but the writing: who writes what, where, and from which memory. Jobs are listed last. */
rsd_status save_list_jobs(rsd_async_save *saving);
rsd_status save_prepare(rsd_async_save *saving, int64_t nlocals, const rsd_tensor *locals);

void save_drop(rsd_async_save *saving);

static inline bool save_is_mine(const rsd_async_save *saving, size_t extent)
{
    return !saving->options.one_rank ||
           saving->manifest.catalog.extents[extent].file == (uint32_t)saving->options.rank;
}

rsd_status save_open_output(const char *path, enum output_mode mode, bool overwrite,
                            rsd_storage *storage, struct store_output **dest);
rsd_status save_write_files(rsd_async_save *saving);

/* ---- save_spread.c: by many ranks ---- */

rsd_status save_as_one_rank(rsd_async_save *saving);
rsd_status save_meet(rsd_async_save *saving, rsd_status status);
rsd_status save_own_part(void *saving);
rsd_status save_together(rsd_async_save *saving,
                         rsd_status (*work)(void *saving)); /* which is save_own_part, or waits */
void save_drop_together(rsd_async_save *saving);

/* ---- convert_draft.c, convert.c: from files ---- */

struct chosen {
    size_t source; /* tensor of the input */
    const char *name;
    rsd_dtype dtype;
    rsd_layout *layout; /* of the target's dtype */
    size_t file;        /* safetensors with whole tensors */
};

/* An item of which one rank wrote a part. */
struct split_item {
    uint64_t extent, crc;
    unsigned char first[8];
};

struct converting {
    rsd_checkpoint *in;
    rsd_convert_options options;
    bool whole;           /* no tensor is cut: files are filled one after the other */
    struct catalog names; /* of what was chosen */
    struct chosen *chosen;
    size_t nchosen;
    struct manifest manifest;
    size_t *source_of; /* by tensor of the draft */
    bool *read_files;  /* by file of the source */
    struct store_output *dest;
    char journal_name[40]; /* of this rank */
    struct output output;
    struct convert_job *jobs; /* lane by lane */
    struct job_part *parts;   /* by job */
    size_t njobs, jobs_capacity;
    size_t *first_job; /* of each lane, and one more */
    size_t nlanes;
    uint64_t tile_limit;
    int64_t nbytes, nleft_out;
    _Atomic int64_t nbytes_needed;

    struct operation operation;
    struct peer_step open, transfer, finish; /* the steps of a conversion */
    struct partial_crc_list seen;            /* its lock is that of the split items too */
    struct split_item *split;
    size_t nsplit, split_capacity;
    const char *out;
    bool one_file;
    rsd_report report;
};

/* A tensor with all its boxes that are not there yet, or one box of it. */
struct convert_job {
    size_t tensor, lane;
    size_t box; /* SIZE_MAX: all */
    struct job_part part;
};

/* ---- convert_jobs.c: what this rank hauls ---- */

rsd_status convert_list_jobs(struct converting *converting);

/* ---- convert_spread.c: what ranks tell each other ---- */

rsd_status convert_say_state(struct converting *converting);
rsd_status convert_hear_state(struct converting *converting);
rsd_status convert_say_written(struct converting *converting);
rsd_status convert_merge(void *converting, const struct payload *all, struct payload *result);

/* Opens the directory of a side file, which must be a regular file. */
rsd_status convert_open_side_file(const char *path, rsd_storage *storage, struct store **store,
                                  uint32_t *file);

/* Everything but the writing. */
rsd_status convert_prepare(struct converting *converting, bool one_file);
void convert_drop(struct converting *converting);

#endif
