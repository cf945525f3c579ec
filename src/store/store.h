/* store.h - the door of store: carry a plan through files.
 *
 * A checkpoint is a layout whose ranks are files: each tensor is a list of boxes, and each box an extent
 * of bytes. Formats find these boxes (dcp.c, safetensors.c, torchsave.c) and know how to write them; the
 * transfer moves bytes between extents and memory without knowing what format they are in.
 *
 *     path --open--> tensors, boxes, extents --plan--> pieces --transfer--> memory, or other files
 *
 * Every byte of a file is hostile: lengths are checked against the file before they are used, names may
 * not leave the folder, and nothing is ever built that a file names. Store knows no MPI.
 */
#ifndef STORE_H
#define STORE_H

#include "codec.h"
#include "move.h"

#include <pthread.h>
#include <sys/stat.h>

/* ---- file.c ---- */

enum { FILE_SLOTS = 4 };
struct file_slot {
    int fd; /* -1: not open now */
    int users;
    uint64_t used_at;
    _Atomic uint64_t unflushed;
};

struct one_file {
    char *name; /* in the folder */
    bool writable;
    bool known; /* it was seen, with this size and time of change */
    uint64_t nbytes;
    int64_t changed; /* nanoseconds */
    struct file_slot slots[FILE_SLOTS];
};

/* The files of one folder that a checkpoint is made of. Threads may read at once. */
struct files {
    char *folder;
    int folder_fd;
    pthread_mutex_t lock;
    struct one_file *list;
    size_t n, room;
    int nopen;
    uint64_t clock;
};

/* EFORMAT for a name that is absolute, has empty parts, "." or "..", or no name at all. */
rsd_status check_name(struct slice name);

rsd_status files_open(struct files *files, const char *folder);
void files_close(struct files *files);
rsd_status files_add(struct files *files, struct slice name,
                     uint32_t *index); /* does not open it */
rsd_status file_nbytes(struct files *files, uint32_t index, uint64_t *nbytes);
rsd_status file_read(struct files *files, uint32_t index, uint64_t at, void *out, size_t n);

/* The whole file, with a zero behind it; ELIMIT if it is longer than `most`. */
rsd_status file_load(struct files *files, uint32_t index, uint64_t most, char **bytes, size_t *n);

/* Makes a file of the list anew, with room for so many bytes. */
rsd_status file_create(struct files *files, uint32_t index, uint64_t nbytes);
rsd_status file_write(struct files *files, uint32_t index, uint64_t at, const void *data, size_t n);
rsd_status file_sync(struct files *files, uint32_t index);
rsd_status folder_sync(const struct files *files);

/* Puts the path of a file in front of the last error. */
rsd_status file_error(const struct files *files, uint32_t index, rsd_status status);

/* ---- contents.c: what a checkpoint holds ---- */

enum item_kind {
    ITEM_NONE,  /* nothing says where the bytes are */
    ITEM_PLAIN, /* the bytes of a dense row-major array, little-endian */
    ITEM_SAVED, /* what torch.save writes, or a safetensors blob with the tensor in it */
    ITEM_VIEW,  /* a view of a storage, in an archive */
};

/* Where the bytes of a box or value are. */
struct extent {
    uint64_t offset, nbytes; /* in the file */
    uint32_t file;
    uint8_t kind;    /* enum item_kind */
    uint8_t nzstd;   /* how many times the item was compressed */
    uint8_t unknown; /* 1: it went through a transform that is not known, by the number below */
    uint32_t detail; /* ITEM_VIEW: which view; drafts: which box of its rank */
};

/* A tensor of a torch.save file: where its storage lies and how it looks at it. */
struct stored_view {
    struct view view;
    uint64_t data, nbytes; /* of the storage, in the file */
    uint32_t crc;
    bool has_crc, big_endian;
};

struct tensor {
    const char *name;
    rsd_dtype dtype;
    int32_t ndim;
    size_t shape, boxes; /* into coordinates: the shape; lo and len of each box in turn */
    size_t first_extent, nboxes;
    const char *path; /* where it was in a nested state dict, as JSON; NULL: not known */
};

struct value {
    const char *name, *path;
    struct extent extent;
    char *json;          /* the value, if it has no item of its own and is plain; else NULL */
    struct bytes pickle; /* likewise, to be written */
};

struct named {
    const char *name;
    size_t index;
};

struct contents {
    struct tensor *tensors;
    int64_t *coordinates;
    struct extent *extents;
    struct value *values;
    struct stored_view *views;
    char **names; /* blocks of names */
    char *next_name;
    struct named *tensor_names, *value_names; /* sorted */
    size_t ntensors, room_tensors, ncoordinates, room_coordinates, nextents, room_extents, nvalues,
        room_values, nviews, room_views, nnames, room_names, names_left;
};

rsd_status contents_name(struct contents *contents, struct slice name, const char **out);
rsd_status contents_add_tensor(struct contents *contents, struct slice name, rsd_dtype dtype,
                               int32_t ndim, const int64_t *shape);
rsd_status contents_add_box(struct contents *contents, const int64_t *lo, const int64_t *len,
                            struct extent extent); /* to the last tensor */
rsd_status contents_add_value(struct contents *contents, struct slice name, struct extent extent,
                              char *json); /* takes json over on success */
rsd_status contents_finish(struct contents *contents);
rsd_status contents_copy_text(struct contents *contents, const char *text, const char **out);
void contents_drop(struct contents *contents);

/* As explicit boxes, in their order: all of rank 0, or of the rank that is the number of their file. */
rsd_status tensor_layout(const struct contents *contents, const struct tensor *tensor, bool by_file,
                         rsd_layout **out);
rsd_status boxes_layout(rsd_dtype dtype, int32_t ndim, const int64_t *shape, size_t n,
                        const int64_t *lo, const int64_t *len, rsd_layout **out);
rsd_status tensor_plan(const struct contents *contents, const struct tensor *tensor, size_t n,
                       const int64_t *lo, const int64_t *len, rsd_plan **plan);

size_t contents_find(const struct contents *contents, const char *name); /* SIZE_MAX: not there */
size_t contents_find_value(const struct contents *contents, const char *name);

static inline const int64_t *tensor_shape(const struct contents *contents,
                                          const struct tensor *tensor)
{
    return contents->coordinates + tensor->shape;
}

static inline const int64_t *tensor_box_lo(const struct contents *contents,
                                           const struct tensor *tensor, size_t box)
{
    return contents->coordinates + tensor->boxes + 2 * (size_t)tensor->ndim * box;
}

static inline const int64_t *tensor_box_len(const struct contents *contents,
                                            const struct tensor *tensor, size_t box)
{
    return tensor_box_lo(contents, tensor, box) + tensor->ndim;
}

static inline int64_t tensor_nbytes(const struct contents *contents, const struct tensor *tensor)
{
    return box_volume(tensor->ndim, tensor_shape(contents, tensor)) *
           (int64_t)rsd_dtype_nbytes(tensor->dtype);
}

/* ---- checkpoint.c: finding out what a path is ---- */

/* Names that are owned. Starts as {0}. */
struct name_list {
    struct slice *list;
    size_t n, room;
};
rsd_status name_list_add(struct name_list *names, struct slice name);
void name_list_drop(struct name_list *names);

struct rsd_checkpoint {
    rsd_format format;
    struct files files;
    struct contents contents;
    const char *unknown_transform; /* the name of one that some items went through; NULL: none */
};

/* ---- dcp.c, safetensors.c, torchsave.c: the formats ---- */

/* Each adds what it finds in some files of the checkpoint's folder to its contents. */
rsd_status dcp_open(rsd_checkpoint *checkpoint, const struct slice *metadata, size_t n);
rsd_status safetensors_open(rsd_checkpoint *checkpoint, const struct slice *names, size_t n);
rsd_status torchsave_open(rsd_checkpoint *checkpoint, const struct slice *names, size_t n);

/* The files that an index.json names. */
rsd_status index_files(struct files *files, uint32_t index, struct name_list *out);

/* A tensor of a blob that begins at a byte of a file: what it is, and where its bytes are. */
rsd_status safetensors_find(struct files *files, uint32_t file, uint64_t at, const char *name,
                            rsd_dtype *dtype, int32_t *ndim, int64_t *shape, uint64_t *begin);

/* ---- inflate.c: zstd streams ---- */

struct inflate;
rsd_status inflate_open(struct files *files, uint32_t file, uint64_t offset, uint64_t nbytes,
                        int nlayers, struct inflate **out);
void inflate_close(struct inflate *inflate);
rsd_status inflate_read(struct inflate *inflate, void *out, size_t n);  /* the next n bytes */
rsd_status inflate_some(struct inflate *inflate, void *out, size_t *n); /* fewer at the end */

struct deflate;
typedef rsd_status deflate_write(void *context, const void *data, size_t n);
rsd_status deflate_open(int level, deflate_write *write, void *context, struct deflate **out);
void deflate_close(struct deflate *deflate);
rsd_status deflate_put(struct deflate *deflate, const void *data, size_t n);
rsd_status deflate_end(struct deflate *deflate);
int deflate_default_level(void);

/* ---- saved.c: the tensor in an item of torch.save ---- */

/* In an archive on disk; data is its place in the file. */
rsd_status saved_find(struct files *files, const struct extent *extent, struct stored_view *out);

/* In a stream, which is left just before the tensor's bytes, but for those in *rest (to be freed). */
rsd_status saved_inflate(struct inflate *inflate, struct stored_view *out, unsigned char **rest,
                         size_t *nrest);

/* ---- stored_value.c ---- */

/* The item of a value, decompressed. */
rsd_status value_bytes(rsd_checkpoint *checkpoint, const struct value *value, struct bytes *out);
rsd_status value_load(rsd_checkpoint *checkpoint, const struct value *value, char **json);

/* ---- source.c: a stored box that can be read ---- */

/* What a transfer has read; each thread counts for itself. */
struct tally {
    uint64_t nbytes_read, nbytes_unchecked, again;
    int64_t nbytes_memory; /* of all threads together */
};

struct source {
    const char *memory; /* of the box's first element, if it is there and not in a file */
    struct files *files;
    struct extent extent;
    rsd_dtype dtype;
    size_t each; /* bytes of an element */
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS]; /* the box */
    uint64_t data, nbytes;                       /* of the record, in the file or in the stream */
    int64_t base, strides[RSD_MAX_DIMS];         /* of the box in the record, bytes */
    bool swap, has_crc, checkable;
    uint32_t crc;
    uint64_t wanted; /* bytes of the box that are wanted, set by whoever reads */

    pthread_mutex_t lock; /* for what follows */
    uint64_t crc_sum, seen;
    char *kept; /* the whole record */

    struct inflate *inflate; /* of a compressed item; only one thread reads it */
    unsigned char *rest;
    size_t nrest, rest_at;
    uint64_t stream_at, stream_crc;
};

void source_in_memory(struct source *source, rsd_dtype dtype, int32_t ndim, const int64_t *lo,
                      const int64_t *len, const char *memory, const int64_t *strides);
rsd_status source_open(struct source *source, rsd_checkpoint *checkpoint, size_t tensor,
                       size_t box);
void source_close(struct source *source);

/* Reads a region of the box, packed row by row. Records of up to keep_most bytes may be kept whole. */
rsd_status source_read(struct source *source, const int64_t *lo, const int64_t *len, char *out,
                       uint64_t keep_most, struct tally *tally);

/* When everything is read: EFORMAT if the CRC-32 is wrong; counts what could not be checked. */
rsd_status source_check(struct source *source, struct tally *tally);

/* Whether its rows run another way than the tensor's, and the record may be kept. */
bool source_is_awkward(const struct source *source, uint64_t most);

/* ---- haul.c: one tensor from its sources to its sinks ---- */

enum sink_kind { SINK_MEMORY, SINK_BLOCKS, SINK_DISCARD };

struct sink;
struct scratch;
typedef rsd_status sink_take(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                             const int64_t *len, const char *block);

/* Where a box goes. */
struct sink {
    enum sink_kind kind;
    rsd_dtype dtype;
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    char *memory;                  /* of the box's first element */
    int64_t strides[RSD_MAX_DIMS]; /* bytes */
    sink_take *take; /* SINK_BLOCKS: takes blocks of the box, each dense and row-major */
    void *context;
    size_t index; /* for whoever takes */
};

/* Where a block begins in the array of its box. Blocks are whole rows, so they are one run there. */
static inline uint64_t offset_in_box(const struct sink *sink, const int64_t *lo)
{
    int64_t index = 0;
    for (int32_t d = 0; d < sink->ndim; d++)
        index = index * sink->len[d] + (lo[d] - sink->lo[d]);
    return (uint64_t)index * rsd_dtype_nbytes(sink->dtype);
}

struct haul_piece {
    size_t source, sink;
};

struct haul {
    const char *name;
    rsd_dtype dtype; /* of the sources */
    size_t each;
    int32_t ndim;
    struct source *sources;
    size_t nsources;
    struct sink *sinks;
    size_t nsinks;
    size_t cast_each;   /* the longest element that one is cast to; 0: none is */
    bool in_order;      /* tiles have to be done one after the other */
    bool stream;        /* sinks in memory are large: stores go past the cache */
    uint64_t keep_most; /* records up to this may be kept whole */

    struct haul_piece *pieces;
    int64_t *coordinates; /* lo and len of each piece */
    size_t npieces, room_pieces, room_coordinates;
    struct tree tree;
    int64_t nbytes;                              /* to be filled in all sinks */
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS]; /* around all pieces */
    int64_t tile[RSD_MAX_DIMS], ntiles;
    size_t tile_nbytes;
};

/* The part of a piece that lies in the tile. */
struct tile_part {
    size_t source, sink;
    size_t staged; /* where the source is readable, in the scratch */
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    bool done;
};

/* What a tile has of a source: in memory, as an array with strides that begins at lo. */
struct staged {
    const char *bytes;
    int64_t lo[RSD_MAX_DIMS], strides[RSD_MAX_DIMS];
};

/* What a thread works with. Starts as {.copier = copier_best()}. */
struct scratch {
    struct copier copier;
    char *in, *out, *cast;
    size_t room_in, room_out, room_cast;
    struct tile_part *parts;
    struct staged *staged;
    const void *user; /* for whoever takes blocks */
    size_t room_parts, room_staged;
};
rsd_status scratch_reserve(char **bytes, size_t *room, size_t need);
void scratch_drop(struct scratch *scratch);

/* A haul of one tensor: start it, add its sinks, and say where they are filled from. Tiles are of at most
 * so many bytes. */
rsd_status haul_start(struct haul *haul, const struct contents *contents, size_t tensor,
                      size_t nsinks);
void haul_add_sink(struct haul *haul, const struct sink *sink);
rsd_status haul_from_files(struct haul *haul, rsd_checkpoint *checkpoint, size_t tensor,
                           uint64_t most_nbytes);
rsd_status haul_whole(struct haul *haul, rsd_checkpoint *checkpoint, size_t tensor, sink_take *take,
                      void *context, uint64_t most_nbytes); /* all of it, into one sink */
rsd_status haul_from_box(struct haul *haul, rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                         uint64_t most_nbytes); /* its only sink, from this box alone */
rsd_status haul_from_memory(struct haul *haul, const char *memory, const int64_t *strides,
                            uint64_t most_nbytes); /* its only sink */

rsd_status haul_tile(const struct haul *haul, int64_t index, struct scratch *scratch,
                     struct tally *tally);
rsd_status haul_box(const struct haul *haul, const int64_t *lo, const int64_t *len,
                    struct scratch *scratch, struct tally *tally);
void haul_drop(struct haul *haul); /* closes its sources */

/* ---- transfer.c: many hauls on many threads ---- */

/* Jobs are numbered, those of one lane in a row. A job is opened, hauled and closed. */
struct transfer {
    rsd_pool *pool;
    const size_t *first_job; /* of each lane, and one more */
    size_t nlanes;
    bool one_per_lane; /* only one thread at a time may be at a lane */
    rsd_status (*open)(void *context, size_t job, struct haul *haul);
    rsd_status (*close)(void *context, size_t job, struct haul *haul); /* when all of it is done */
    bool (*forgive)(void *context, size_t job, rsd_status status); /* NULL: a failure ends it all */
    void *context;
    rsd_on_progress *on_progress;
    void *progress_context;
    int64_t nbytes_total;
    struct tally tally; /* set by the run */
};
rsd_status transfer_run(struct transfer *transfer);

/* Runs jobs of so many bytes that may be done in any order: one lane a thread, about equal. */
rsd_status transfer_run_evenly(struct transfer *transfer, const int64_t *nbytes, size_t njobs);

double seconds_now(void);
uint64_t tile_limit(int64_t max_nbytes, const rsd_pool *pool); /* for each thread */
void report_tally(rsd_report *report, const struct tally *tally);

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
    size_t n, room;
};
rsd_status take_local(const rsd_local *given, int64_t index, rsd_local *out);
rsd_status local_boxes(const rsd_local *local, bool written, struct local_boxes *out);
void local_boxes_drop(struct local_boxes *boxes);

/* ---- deal.c: who writes which box ---- */

enum deal_to { DEAL_EVENLY, DEAL_TO_LOWEST, DEAL_TO_EVERYONE };

struct dealt {
    size_t tensor;
    int32_t rank;
    uint32_t order;     /* among the boxes that the rank holds */
    size_t coordinates; /* of its lo, then its len */
};
struct deal {
    struct dealt *list; /* by tensor, then rank */
    int64_t *coordinates;
    int32_t *value_ranks;
    size_t n, ncoordinates, room_coordinates;
};
rsd_status deal_out(struct deal *deal, size_t ntensors, const rsd_layout *const *layouts,
                    const char *const *names, int64_t nranks, size_t nvalues, enum deal_to to);
void deal_drop(struct deal *deal);

/* ---- draft.c: what will be written ---- */

/* Beside each extent of the contents. */
struct out_item {
    uint64_t head;        /* bytes before the tensor's */
    _Atomic uint64_t crc; /* of what was written so far, raw */
    unsigned char first[8];
};

struct out_value {
    const struct value *from; /* an item that is copied as it is; NULL: the bytes below */
    struct bytes item;
};

struct out_file {
    char *name;
    struct bytes header; /* safetensors: what comes first, written last */
    uint64_t nbytes;     /* of the whole file, if that is known */
    size_t nitems;       /* tensors in it */
    size_t nvalues;
};

struct draft {
    rsd_format format;
    int32_t compress;
    struct contents contents; /* what the new checkpoint will hold, and where */
    struct out_item *items;   /* by extent */
    struct out_value *values; /* by value */
    struct out_file *files;
    size_t nfiles, room_files;
};

rsd_status draft_add_file(struct draft *draft, const char *name);
rsd_status draft_add_boxes(struct draft *draft, const struct deal *deal, size_t tensor,
                           size_t *next); /* to the last tensor; *next goes through the deal */

/* Once everything is in: where each item lies in its file. */
rsd_status draft_place(struct draft *draft);
void draft_hash(const struct draft *draft, struct hash *hash);
void draft_drop(struct draft *draft);

static inline uint64_t box_nbytes(const struct contents *contents, const struct tensor *tensor,
                                  size_t box)
{
    return (uint64_t)box_volume(tensor->ndim, tensor_box_len(contents, tensor, box)) *
           rsd_dtype_nbytes(tensor->dtype);
}

/* ---- dcp_out.c, safetensors_out.c ---- */

/* The pickle of .metadata. */
rsd_status dcp_metadata(const struct contents *contents, const struct files *files,
                        struct bytes *out);

/* The headers of all files, and where the tensors lie behind them. */
rsd_status safetensors_place(struct draft *draft);
rsd_status safetensors_index(const struct draft *draft, struct text *out);

/* ---- part.c: the folder in which an output is built, and how it gets into place ---- */

enum part_mode { PART_NEW, PART_RESUME, PART_REPLACE, PART_SHARED, PART_JOIN };

struct part {
    char *path;   /* what is built */
    char *folder; /* path.reshard-part */
    int journal_fd;
    bool one_file;  /* the path is a file, not a folder */
    bool overwrite; /* what is at the path may be replaced */
    bool resumed;   /* the journal has something in it */
};
#define JOURNAL_NAME "reshard-journal"

rsd_status part_open(struct part *part, const char *path, enum part_mode mode, bool overwrite,
                     bool one_file);
rsd_status part_publish(struct part *part); /* everything in it is on disk */
void part_close(struct part *part);         /* keeps what is there */
void part_remove(struct part *part);        /* closes, and removes what is there */

/* ---- journal.c: what of an output is complete ---- */

struct output;
rsd_status journal_start(const struct part *part, const char *source, const char *target);
rsd_status journal_resume(const struct part *part, const char *source, const char *target,
                          struct output *output);
rsd_status journal_add(const struct part *part, const struct output *output, uint32_t file);

/* ---- output.c: files that are being written ---- */

struct out_state {
    struct output *output;
    uint32_t file;
    bool created, done;
    size_t left;             /* items that are not complete */
    uint64_t cursor;         /* compressed: where the next item goes */
    struct deflate *deflate; /* of the item at hand */
};

struct output {
    struct draft *draft;
    struct part *part;
    rsd_checkpoint *from; /* of values that are copied */
    int32_t only;         /* the only file that is written; -1: all */
    bool journal;
    struct files files; /* by the numbers of the draft */
    struct out_state *states;
    pthread_mutex_t lock;
    uint64_t nbytes_written;
    int64_t nfiles_written;
};

rsd_status output_open(struct output *output, struct draft *draft, struct part *part,
                       rsd_checkpoint *from, int32_t only);
void output_close(struct output *output);
static inline bool output_wants(const struct output *output, uint32_t file)
{
    return !output->states[file].done && (output->only < 0 || (uint32_t)output->only == file);
}

/* A sink for one box; its item is begun before the first block and ended after the last. */
void output_sink(struct output *output, size_t tensor, size_t box, struct sink *sink);
rsd_status output_begin(struct output *output, size_t tensor, size_t box);
rsd_status output_end(struct output *output, size_t tensor, size_t box);

/* What is left when all items are written: files without any, and the names of directories on disk. */
rsd_status output_finish(struct output *output);

/* Writes a file of the part folder whole, under another name until it is on disk. */
rsd_status part_write(const struct part *part, const char *name, const void *data, size_t n);

/* ---- save_draft.c, save.c: from memory ---- */

/* The memory that an extent is written from. */
struct origin {
    const char *memory;
    int64_t strides[RSD_MAX_DIMS];
};

struct rsd_saving {
    rsd_save_options options;
    char *path;
    struct draft draft;
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
};

/* Everything but the writing: who writes what, where, and from which memory. */
rsd_status save_prepare(rsd_saving *saving, int64_t nlocals, const rsd_local *locals);

static inline bool save_is_mine(const rsd_saving *saving, size_t extent)
{
    return !saving->options.one_rank ||
           saving->draft.contents.extents[extent].file == (uint32_t)saving->options.rank;
}

/* ---- convert_draft.c, convert.c: from files ---- */

struct chosen {
    size_t source; /* tensor of the input */
    const char *name;
    rsd_dtype dtype;
    rsd_layout *layout; /* of the target's dtype */
    size_t file;        /* safetensors with whole tensors */
};

struct converting {
    rsd_checkpoint *in;
    rsd_convert_options options;
    bool whole;            /* no tensor is cut: files are filled one after the other */
    struct contents names; /* of what was chosen */
    struct chosen *chosen;
    size_t nchosen;
    struct draft draft;
    size_t *source_of; /* by tensor of the draft */
    struct output output;
    struct convert_job *jobs; /* lane by lane */
    size_t njobs, room_jobs;
    size_t *first_job; /* of each lane, and one more */
    size_t nlanes;
    uint64_t tile_limit;
    int64_t nbytes, nleft_out;
};

/* A tensor with all its boxes that are not there yet, or one box of it. */
struct convert_job {
    size_t tensor, lane;
    size_t box; /* SIZE_MAX: all */
};

/* Everything but the writing. */
rsd_status convert_prepare(struct converting *converting, bool one_file);
void convert_drop(struct converting *converting);

#endif
