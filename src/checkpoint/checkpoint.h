/* checkpoint.h - the calls on checkpoints.
 *
 *     options -> jobs -> all ranks agree -> each rank runs its jobs -> rank 0 merges
 *
 * Every call has this one path. With one rank, each step between ranks returns at once.
 */
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

/* Checks the CRC-32 of every record in the item of a value. An error names the file and the value. */
rsd_status checkpoint_check_value(rsd_checkpoint *checkpoint, const struct stored_value *value);

/* Reads the item of a value, which has one, and checks it so. */
rsd_status checkpoint_read_value(rsd_checkpoint *checkpoint, const struct stored_value *value,
                                 struct bytes *item);

/* Opens an output that is complete and not at its path yet. */
rsd_status checkpoint_open_staged(const struct store_output *output, const char *file,
                                  rsd_checkpoint **checkpoint);

/* Adds to the error about a missing tensor what names have in the checkpoint, if only a start differs. Returns
 * EMISMATCH. */
rsd_status catalog_explain_missing(const struct catalog *catalog, const char *name);

/* Adds the file and the name of a value, or of a tensor, to the last error. */
rsd_status checkpoint_fail_in(const rsd_checkpoint *checkpoint, uint32_t file, const char *name,
                              rsd_status status);

/* Return EMISMATCH unless a layout covers its tensor, whose ranks are of the kind `holder`, "rank" or "file"; unless it
 * has this shape; unless the files of a checkpoint cover a tensor, which the error names. */
rsd_status layout_check_coverage(const rsd_layout *layout, const char *holder);
rsd_status layout_check_shape(const rsd_layout *layout, int32_t ndim, const int64_t *shape);
rsd_status tensor_check_coverage(const struct catalog *catalog, size_t tensor);

/* Returns the tensor that an extent belongs to. */
size_t tensor_of_extent(const struct catalog *catalog, size_t extent);

/* The box whose bytes are in an extent. */
struct extent_box {
    size_t index; /* of the tensor in its catalog */
    const struct stored_tensor *tensor;
    size_t box; /* among the boxes of the tensor */
    const int64_t *lo, *len;
    uint64_t nbytes;
};
struct extent_box extent_find_box(const struct catalog *catalog, size_t extent);

/* ---- names_apply.c ---- */

/* Derives the tensors of a checkpoint under the names of the other column of a map, as rsd_open_options.names says. */
rsd_status names_apply(rsd_checkpoint *checkpoint, const rsd_open_options *options);

/* ---- head_counts.c ---- */

/* Attention heads, and those of keys and values; 0: not known. */
struct head_counts {
    int64_t all, keys;
};

/* Reads the counts in a config.json of Hugging Face. */
rsd_status head_counts_parse(struct head_counts *heads, const char *text, size_t n);

/* Finds the counts of a checkpoint: those of the caller, else of Megatron's arguments, else of a config.json. */
rsd_status head_counts_find(struct head_counts *heads, rsd_checkpoint *checkpoint,
                            const rsd_open_options *options);

/* ---- overlaps.c ---- */

/* How often boxes may be found to overlap in part, and what it may cost to compare them, in all tensors. */
struct overlap_budget {
    uint64_t nfound, nbytes;
};

/* Compares boxes of a tensor that overlap. Returns EFORMAT if two of them have different bytes there, or if the
 * budget, from which it takes, is used up. */
rsd_status overlaps_check(rsd_checkpoint *checkpoint, size_t tensor, uint64_t tile_limit,
                          struct overlap_budget *budget);

/* ---- operation.c: one call, on one rank or on many ---- */

struct operation {
    rsd_io io;
    rsd_transport transport;              /* a copy of io.transport */
    int32_t rank, nranks;                 /* nranks is 1 without a transport */
    uint64_t tile_limit;                  /* bytes of a tile */
    rsd_report report;                    /* of this rank; after operation_run, of all ranks */
    struct partial_crc_list partial_crcs; /* of this rank */
    struct record_set records;            /* that this rank has checked */
    double began;
    _Atomic(struct peer_step *) step; /* in progress; NULL: none */
};

/* Opens an operation with the options of the caller. `report` is the caller's, or NULL: its size is checked
 * before anything is done. */
rsd_status operation_open(struct operation *operation, const rsd_io *io, const rsd_report *report);

/* Closes an operation, and copies its report to the caller's on success. Returns `status`. */
rsd_status operation_close(struct operation *operation, rsd_status status, rsd_report *report);

/* Collective. The first step of a call, with the status of its preparation. EMISMATCH: ranks pass different
 * arguments, of which `arguments` is the hash. Sets the smallest tile limit of all ranks. */
rsd_status operation_agree(struct operation *operation, rsd_status status, struct hash arguments);

/* Adds the tensors of a catalog, and where they are stored, to a hash of arguments. */
void hash_catalog(struct hash *hash, const struct catalog *catalog);

/* What the ranks of a call do together. Each function but work may be NULL. */
struct operation_call {
    const rsd_checkpoint
        *from[2]; /* that ranks read in part; the second is side 1 of a comparison */
    rsd_status (*work)(void *context);
    rsd_status (*put)(void *context, struct payload *own); /* what this rank sends to rank 0 */

    /* On rank 0: takes what another rank sent; goes on after damage that ranks found together in a job, whose error is
     * set (NULL: the call fails); and puts what all ranks receive. */
    rsd_status (*take)(void *context, const struct payload *sent, size_t *at);
    rsd_status (*damaged)(void *context, size_t job);
    rsd_status (*put_result)(void *context, struct payload *result);

    rsd_status (*take_result)(void *context, const struct payload *result, size_t *at);
    void *context;
};
/* Collective. Returns the same on all ranks, which then have the report of all. */
rsd_status operation_run(struct operation *operation, const struct operation_call *call);

/* Collective. Only rank 0 works; then all ranks have its status, its report and its `state` (NULL: none). */
rsd_status operation_lead(struct operation *operation, rsd_status (*work)(void *context),
                          void *context, struct payload *state);

/* Runs a batch of this rank, unless `status`, that of listing its jobs, is a failure. Adds what was read to the report,
 * and drops the jobs. */
rsd_status operation_run_batch(struct operation *operation, struct batch *batch, rsd_status status);

/* The same for jobs of all ranks together: runs this rank's part of them. */
rsd_status operation_run_part(struct operation *operation, struct batch *batch, rsd_status status);

/* Lists in a payload. What is taken is added to the list. */
rsd_status payload_put_list(struct payload *payload, const void *list, size_t n,
                            size_t element_nbytes);
rsd_status payload_take_list(const struct payload *payload, size_t *at, void *list_pointer,
                             size_t *n, size_t *capacity, size_t element_nbytes);

/* ---- arrays.c: tensors in the caller's memory ---- */

/* A box of an array of the caller. */
struct array_slice {
    rsd_box box;
    int32_t rank;
    uint32_t order; /* among the boxes of its rank */
    rsd_dtype dtype;
    char *memory;                  /* of its first element; NULL if it is empty */
    int64_t strides[RSD_MAX_DIMS]; /* bytes */
};
struct array_slices {
    struct array_slice *list;
    size_t n, capacity;
};

/* Copies struct `index` of a list of the caller, and checks it. */
rsd_status arrays_take_tensor(const rsd_tensor *given, int64_t index, rsd_tensor *out);

/* Adds the boxes of all arrays of a tensor. */
rsd_status arrays_list_slices(const rsd_tensor *tensor, bool written, struct array_slices *boxes);
void arrays_drop_slices(struct array_slices *boxes);

/* ---- dedup.c: which rank writes which box ---- */

/* A tensor that is written. */
struct target {
    const char *name, *path; /* in a nested state dict; NULL: not known */
    rsd_dtype dtype;         /* in the file; that of the layout does not matter */
    const rsd_layout *layout;
    size_t source; /* converting: the tensor of the input */
    size_t file;   /* if files have whole tensors */
};

/* Adds a tensor without boxes to a manifest. */
rsd_status target_add_tensor(const struct target *target, struct manifest *manifest);

/* Which of the ranks that hold a box write it: the one with the fewest bytes so far, the lowest, or all of them. */
enum dedup_mode { DEDUP_EVENLY, DEDUP_TO_LOWEST, DEDUP_KEEP_ALL };

struct dedup_input {
    const struct target *targets;
    size_t ntargets, nvalues;
    int64_t nranks;
    enum dedup_mode mode;
};

/* Adds all targets to a manifest, each box to the file of the rank that writes it. The caller frees the list of the
 * ranks that write the values. */
rsd_status dedup_add_tensors(struct manifest *manifest, const struct dedup_input *input,
                             int32_t **value_ranks);

/* Sets *nranks to the number of ranks that the layouts name, if it is 0. EINVAL: they name more. */
rsd_status dedup_count_ranks(size_t ntargets, const struct target *targets, int64_t *nranks);

/* ---- journal.c: what of an output is complete ---- */

#define JOURNAL_NAME "reshard-journal" /* in a directory that is not a checkpoint yet */

struct writer;

/* Starts a journal. `source` and `target` are hashes of what is read and written. */
rsd_status journal_start(struct store_output *dest, const char *source, const char *target);

/* Appends the journals of other ranks to that of an earlier run, and returns its lines behind the first three, each with
 * its end. The caller frees them; NULL: that run was stopped before it wrote three. EMISMATCH: it had another source or
 * target. EIO: a journal is longer than `limit`. */
rsd_status journal_load(const struct store_output *dest, const char *source, const char *target,
                        size_t limit, char **entries, size_t *nchars);

/* Reads the journals of an earlier run, and marks the files and items of the writer that are complete (journal_resume.c).
 * EMISMATCH: that run had another source or target. */
rsd_status journal_resume(struct store_output *dest, const char *source, const char *target,
                          struct writer *writer);

/* Add lines, after the bytes are on disk: a file is complete; items are; a complete file is written again. */
rsd_status journal_add_file(struct store_output *dest, const struct writer *writer, uint32_t file);
rsd_status journal_add_items(const struct store_output *dest, const size_t *extents, size_t n);
rsd_status journal_redo_file(struct store_output *dest, uint32_t file);

/* Removes the journals of other ranks, which rank 0 has taken over. */
rsd_status journal_clear(const struct store_output *dest);

/* ---- writer.c: files that are being written ---- */

struct writer_file {
    struct writer *writer;
    uint32_t file;
    bool created, done;
    bool touched;             /* by this process */
    bool noted;               /* the journal of an earlier run has it, or an item of it */
    uint64_t noted_nbytes;    /* its length there, if it was complete */
    size_t left;              /* items that are not complete */
    uint64_t end;             /* compressed: where the next item begins */
    struct zstd_writer *zstd; /* of the item in progress */
};

/* Bytes of a file that are shared with the input, and not written. */
struct cloned_range {
    uint64_t lo, hi;
};
struct cloned_ranges {
    struct cloned_range *list;
    size_t n, capacity;
};

struct writer {
    struct manifest *manifest;
    struct store_output *dest;
    rsd_checkpoint *from; /* of values that are copied */
    int32_t only;         /* the only file that this process writes; -1: all */
    bool journal;
    bool shared;         /* rank 0 creates and completes the files, all ranks write to them */
    bool unsynced;       /* nothing waits for the disk */
    struct store *store; /* of dest; its first files are those of the manifest */
    struct writer_file *files;
    pthread_mutex_t lock;
    _Atomic uint64_t nbytes_written; /* by this process, in this run */
    int64_t nfiles_written;
    _Atomic int reflink;          /* enum rsd_reflink */
    bool unchecked;               /* what is shared need not be read */
    struct cloned_ranges *cloned; /* by extent; NULL: nothing is shared */
    _Atomic uint64_t nbytes_shared;
    size_t *pending; /* extents that are complete and not in the journal yet */
    size_t npending, pending_capacity;
    uint64_t pending_nbytes;
};

/* Opens a writer for the files of a manifest, or for one of them. Nothing is created yet. `from` may be NULL if no value
 * is copied. */
rsd_status writer_open(struct writer *writer, struct manifest *manifest, struct store_output *dest,
                       rsd_checkpoint *from, int32_t only);
void writer_close(struct writer *writer); /* frees its memory, also of one that was not opened */

/* Return whether this process has still to write a file, or the item of an extent. */

static inline bool writer_wants_file(const struct writer *writer, uint32_t file)
{
    return !writer->files[file].done && (writer->only < 0 || (uint32_t)writer->only == file);
}

static inline bool writer_wants_item(const struct writer *writer, size_t extent)
{
    return writer_wants_file(writer, writer->manifest->catalog.extents[extent].file) &&
           !writer->manifest->items[extent].done;
}

/* Begins the item of an extent, and makes the sink that writes its blocks. The item is ended after the last block. */
rsd_status writer_begin_item(struct writer *writer, size_t extent, struct sink *sink);
rsd_status writer_end_item(struct writer *writer, size_t extent);

/* Writes complete items to disk and to the journal, so that a stopped run can be resumed from there. */
rsd_status writer_save_items(struct writer *writer);

/* Completes files without items, and writes the names of directories to disk. */
rsd_status writer_finish(struct writer *writer);

/* Moves the counts of what this process wrote to a report. */
void writer_report(struct writer *writer, rsd_report *report);

/* Shared: rank 0 creates all files; each rank writes its bytes to disk; rank 0 ends the items that were split. */
rsd_status writer_create_files(struct writer *writer);
rsd_status writer_flush(struct writer *writer);
rsd_status writer_end_split_items(struct writer *writer);

/* Puts the state of all files, and where the compressed items of complete files lie, into a payload; and takes it.
 * With `own`, only of files that this process has completed. */
rsd_status writer_put_files(const struct writer *writer, bool own, struct payload *payload);
rsd_status writer_take_files(struct writer *writer, const struct payload *payload, size_t *at);

/* ---- reflink.c: what is shared with the input ---- */

/* Makes a writer share blocks with its input, if the store can. `unchecked`: what is shared need not be read. */
rsd_status writer_start_cloning(struct writer *writer, enum rsd_reflink reflink, bool unchecked);

/* Shares what can be shared of the pieces of a transfer, before its first block is written. EUNSUPPORTED: sharing is
 * required, and the file system cannot. */
rsd_status reflink_share(struct writer *writer, struct transfer *transfer);
void writer_drop_cloned(struct writer *writer);

/* Moves *at to the next byte before `end` that is not shared. Returns how many follow that are not. */
uint64_t writer_find_uncloned(const struct writer *writer, size_t extent, uint64_t *at,
                              uint64_t end);

/* ---- save_manifest.c, save.c: from memory ---- */

/* The memory that an extent is written from. */
struct extent_memory {
    const char *memory;
    int64_t strides[RSD_MAX_DIMS];
};

/* A manifest whose tensors are in memory. */
struct memory_manifest {
    struct manifest manifest;
    struct extent_memory *memory; /* by extent */
    int32_t only;                 /* the only file that this process writes; -1: all */
};

/* Lists what a save writes, where, and from which memory. */
rsd_status save_prepare(struct memory_manifest *items, int64_t ntensors, const rsd_tensor *tensors,
                        const rsd_save_options *options);

/* Writes the files of an open writer, and reports what was written. */
rsd_status save_write_files(struct operation *operation, const struct memory_manifest *items,
                            struct writer *writer);
void memory_manifest_drop(struct memory_manifest *items);

/* ---- digest.c, digest_tensors.c ---- */

/* The remainders of the bytes of a tensor that were added so far. Starts as {0}. */
struct digest {
    _Atomic uint64_t ecma, jones;
};

/* Adds n bytes, behind which `after` bytes of the tensor follow. Any thread. */
void digest_add_bytes(struct digest *digest, const char *bytes, size_t n, uint64_t after);
void digest_format(const struct digest *digest, rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                   char text[RSD_DIGEST_NCHARS]);

/* Digests that ranks compute together. A call that does so has a context that begins with one. */
struct digest_list {
    struct digest *list;
    size_t n;
};

/* Functions of such an operation_call: each rank puts its digests, rank 0 adds those of others, and the sums replace the
 * digests of all ranks. */
rsd_status digest_list_put(void *context, struct payload *payload);
rsd_status digest_list_add(void *context, const struct payload *sent, size_t *at);
rsd_status digest_list_replace(void *context, const struct payload *result, size_t *at);

/* Adds rows in device memory, after the work of a stream of the caller, and waits. */
rsd_status digest_add_device_rows(struct memory_device *device, void *stream,
                                  const struct digest_rows *rows, size_t n,
                                  struct digest_list *digests);

/* ---- convert_manifest.c, convert.c: from files ---- */

struct conversion_run {
    struct operation operation;
    rsd_checkpoint *in;
    const char *out;
    rsd_convert_options options;
    bool one_file; /* the output is a file, not a directory */
    struct manifest manifest;
    size_t *source_of; /* by tensor of the manifest: the tensor of the input */
    int64_t nleft_out;
    struct store_output *dest;
    struct writer writer;
    bool item_jobs;        /* a job is an item, else a tensor */
    char journal_name[40]; /* of this rank */
    struct payload state;  /* what an earlier run has completed, for the other ranks */
    _Atomic int64_t nbytes_needed;
    struct split_item *split; /* under the lock of the partial CRCs */
    size_t nsplit, split_capacity;
};

/* An item of which this rank wrote a part. */
struct split_item {
    uint64_t extent, crc;
    unsigned char first[8];
};

/* Everything before the output is opened: options, targets, files, coverage, side files. */
rsd_status convert_prepare(struct conversion_run *conversion);

/* Marks the files of the input that are read. The caller frees the list. */
rsd_status convert_find_read_files(const struct conversion_run *conversion, bool **read_files);

/* Opens the directory of a side file, which must be a regular file. */
rsd_status convert_open_side_file(const struct conversion_run *conversion, const char *path,
                                  struct store **store, uint32_t *file);

/* ---- convert_ranks.c: which rank converts what, and what ranks send each other ---- */

/* Lists the jobs of this rank. Their ids are tensors, or extents if the output is compressed. */
rsd_status convert_list_jobs(struct conversion_run *conversion, struct batch *batch);

/* What an earlier run has completed: rank 0 puts it, the other ranks take it. */
rsd_status convert_put_state(struct conversion_run *conversion);
rsd_status convert_take_state(struct conversion_run *conversion);

/* What a rank has written: each rank puts it, rank 0 takes it. */
rsd_status convert_put_written(void *conversion, struct payload *own);
rsd_status convert_take_written(void *conversion, const struct payload *sent, size_t *at);

#endif
