/* transfer.h - moves tensors between storage and memory in tiles, within a budget. */
#ifndef TRANSFER_H
#define TRANSFER_H

#include "format.h"
#include "memory.h"
#include "plan.h"

#include <pthread.h>

/* ---- source.c: a box that can be read, from a file or from memory ---- */

/* What was read. Each thread counts for itself. */
struct io_stats {
    uint64_t nbytes_read, nbytes_unchecked, nbytes_decoded_again;
    int64_t nbytes_memory; /* of the buffers of all threads */
};

struct source {
    const char *memory;           /* of the first element of the box; NULL: it is in a file */
    struct memory_device *device; /* that has the memory; NULL: none does */
    rsd_checkpoint *checkpoint;
    size_t tensor, box;
    uint32_t file;
    const char *name; /* of the tensor */
    rsd_dtype dtype;
    size_t element_nbytes;
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS]; /* the box */
    struct stored_array array;                   /* where its bytes are; in memory, the strides */
    bool checkable;                              /* its CRC-32 can be compared */
    bool scattered;  /* its rows are short and apart, and what is between them may be read too */
    bool checked;    /* its record was read whole elsewhere, and its CRC-32 is right */
    bool unchecked;  /* the caller does not want its record to be read only for its CRC-32 */
    uint64_t wanted; /* bytes of the box that the transfer reads */

    pthread_mutex_t lock;         /* protects the next line */
    uint64_t crc_sum, crc_nbytes; /* of the bytes that were read so far */
    pthread_mutex_t keeping;      /* protects the next line */
    char *kept;                   /* the whole record, while it is used */
    size_t nkeepers;              /* threads that copy from it */
    uint64_t ncopied;             /* bytes that were copied from it */

    struct stored_stream *stream; /* while it is read, by one thread */
    uint64_t stream_at, stream_crc;
    bool ended;         /* the stream was read to its end, and what is behind it was checked */
    uint64_t delivered; /* bytes of the box that were read from the stream */
};

void source_in_memory(struct source *source, rsd_dtype dtype, int32_t ndim, const int64_t *lo,
                      const int64_t *len, const char *memory, const int64_t *strides);
rsd_status source_open(struct source *source, rsd_checkpoint *checkpoint, size_t tensor,
                       size_t box);
void source_close(struct source *source);

/* Reads a region of a box in a file, packed row by row. Records of up to max_kept bytes may be kept whole. */
rsd_status source_read(struct source *source, const int64_t *lo, const int64_t *len, char *out,
                       uint64_t max_kept, struct io_stats *stats);

/* Tells the store which bytes of a region will be read. */
void source_prefetch(struct source *source, const int64_t *lo, const int64_t *len);

/* Whether a region is one run of bytes in the record, and where. */
bool source_find_run(const struct source *source, const int64_t *lo, const int64_t *len,
                     uint64_t *at, uint64_t *n);

/* Returns EFORMAT: the record has another CRC-32 than it should. */
rsd_status source_fail_damaged(const struct source *source, uint32_t crc, uint32_t expected);

/* Names the file and the tensor in the last error. If the file is too short for the tensor, that is the error. */
rsd_status source_fail_in(const struct source *source, rsd_status status);

/* When everything is read: EFORMAT if the CRC-32 is wrong. Counts what could not be checked. The second adds
 * the file and the tensor to the error. */
rsd_status source_compare_crc(const struct source *source, struct io_stats *stats);
rsd_status source_check(const struct source *source, struct io_stats *stats);

/* Returns whether the rows of a record run in another order than those of its tensor, as in a transposed one. */
bool source_runs_across(const struct source *source);

/* ---- records.c: records that are not read whole ---- */

/* The records that were checked, or are being checked by one of the threads. */
struct record_set {
    pthread_mutex_t lock; /* protects everything here */
    pthread_cond_t changed;
    struct string_map map; /* from what a record is to its check */
    struct record_check *checks;
    size_t n, capacity;
};
void record_set_open(struct record_set *set);
void record_set_close(struct record_set *set);

/* Reads the whole record of a source and checks its CRC-32, unless the set has it. EFORMAT: it is wrong. All
 * sources of a record get the same status and message. */
rsd_status record_set_check(struct record_set *set, struct source *source);

/* Checks the records of a transfer that were not read whole. Those of which other ranks read a part are added
 * up: `whole` is false if they do. */
struct transfer;
rsd_status transfer_check_records(struct transfer *transfer, struct record_set *records,
                                  bool whole);

/* ---- tiling.c: one tensor from its sources to its sinks ---- */

enum sink_kind { SINK_MEMORY, SINK_BLOCKS, SINK_DISCARD };

struct sink;
struct scratch;
typedef rsd_status sink_take(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                             const int64_t *len, const char *block);

/* Where a box goes. */
struct sink {
    enum sink_kind kind;
    const char *name; /* of the tensor, for the messages of `take` */
    rsd_dtype dtype;
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    char *memory;                  /* SINK_MEMORY: of the first element of the box */
    struct memory_device *device;  /* that has the memory; NULL: none does */
    int64_t strides[RSD_MAX_DIMS]; /* bytes */
    sink_take *take; /* SINK_BLOCKS: takes blocks of the box, each dense and row-major */
    void *context;
    size_t index; /* for `take` */
};

/* Returns the bytes of a box of a sink, and where a block begins in its array. Blocks are whole rows, so each is
 * one run of the array. */
static inline uint64_t sink_nbytes(const struct sink *sink, const int64_t *len)
{
    return (uint64_t)box_volume(sink->ndim, len) * rsd_dtype_nbytes(sink->dtype);
}

static inline uint64_t sink_offset(const struct sink *sink, const int64_t *lo)
{
    int64_t index = 0;
    for (int32_t d = 0; d < sink->ndim; d++)
        index = index * sink->len[d] + (lo[d] - sink->lo[d]);
    return (uint64_t)index * rsd_dtype_nbytes(sink->dtype);
}

struct transfer_piece {
    size_t source, sink;
    bool done; /* it is where it belongs already */
};

struct transfer {
    size_t tensor; /* in its catalog */
    const char *name;
    rsd_dtype dtype; /* of the sources */
    size_t element_nbytes;
    int32_t ndim;
    struct source *sources;
    size_t nsources;
    struct sink *sinks;
    size_t nsinks;
    size_t cast_nbytes; /* of the widest element that sinks convert to; 0: none converts */
    bool in_order;      /* tiles must be done one after the other */
    bool stream;        /* sinks in memory are large: stores bypass the cache */
    struct memory_device *device; /* that has an array of the caller; NULL: none does */
    uint64_t max_kept;            /* records up to this may be kept whole */
    uint64_t stream_nbytes;       /* memory of the streams that are open at a time, at most */
    size_t nstreams;              /* how many these are */

    struct transfer_piece *pieces; /* before sources are open, they name boxes of the tensor */
    int64_t *piece_lo, *piece_len; /* of each piece in turn */
    size_t npieces, pieces_capacity, lo_capacity, len_capacity;
    struct box_tree tree;
    int64_t nbytes;                              /* of all pieces */
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS]; /* around all pieces */
    int64_t tile[RSD_MAX_DIMS], ntiles;
};

/* Starts a transfer of one tensor; then its sinks are added. */
rsd_status transfer_start(struct transfer *transfer, const struct catalog *catalog, size_t tensor,
                          size_t nsinks);
void transfer_add_sink(struct transfer *transfer, const struct sink *sink);

/* Finds the pieces that fill all sinks. EMISMATCH: no file has some element. */
rsd_status transfer_plan(struct transfer *transfer, const struct catalog *catalog);

/* Opens the sources, and cuts tiles of at most max_nbytes: the boxes of the planned pieces; one box, for the only
 * sink; or memory, for the only sink. */
rsd_status transfer_open_files(struct transfer *transfer, rsd_checkpoint *checkpoint,
                               uint64_t max_nbytes);
rsd_status transfer_open_box(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t box,
                             uint64_t max_nbytes);
rsd_status transfer_open_memory(struct transfer *transfer, const char *memory,
                                const int64_t *strides, uint64_t max_nbytes);

/* All of the above for a whole tensor that goes to one sink as blocks. The sink has a dtype, `take` and what that needs;
 * its box is set here. */
rsd_status transfer_open_whole(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t tensor,
                               struct sink sink, uint64_t max_nbytes);

void transfer_tile_box(const struct transfer *transfer, int64_t index, int64_t *lo, int64_t *len);
rsd_status transfer_run_tile(const struct transfer *transfer, int64_t index,
                             struct scratch *scratch, struct io_stats *stats);

/* When all tiles are done: checks the CRC-32 of each source. */
rsd_status transfer_check_sources(const struct transfer *transfer, struct io_stats *stats);
void transfer_drop(struct transfer *transfer); /* closes its sources */

/* ---- tile.c: one tile ---- */

/* The part of a piece that lies in the tile. */
struct tile_part {
    size_t source, sink;
    size_t staged; /* its index in the staged boxes of the scratch */
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    bool done;
};

/* What a tile has of a source: in memory, as an array with strides that begins at lo. */
struct staged_box {
    const char *bytes;
    int64_t lo[RSD_MAX_DIMS], strides[RSD_MAX_DIMS];
};

/* The buffers of a thread. Starts as {.copier = copier_best()}. */
struct scratch {
    struct copier copier;
    char *in, *cast; /* in: for what is read, then for a block */
    size_t in_capacity, cast_capacity;
    struct tile_part *parts;
    struct staged_box *staged;
    const void *user;           /* for `take` */
    void *stream;               /* of the caller, behind which work on devices begins */
    struct tile_device *device; /* NULL: no device was used yet */
    size_t parts_capacity, staged_capacity;
};
void scratch_drop(struct scratch *scratch);

rsd_status transfer_run_box(const struct transfer *transfer, const int64_t *lo, const int64_t *len,
                            struct scratch *scratch, struct io_stats *stats);

/* ---- tile_device.c: arrays on devices ---- */

/* Reserves pinned buffers of a thread: one to read into, which the last two calls do not share, and one to write
 * from. Waits for the kernels that use them. */
rsd_status tile_device_reserve(struct scratch *scratch, struct memory_device *device,
                               size_t in_nbytes, size_t out_nbytes, char **in, char **out);

/* Queues the copy of a box between an array and a pinned buffer, converted if dtypes differ. */
rsd_status tile_device_copy(struct scratch *scratch, struct memory_device *device, int32_t ndim,
                            const int64_t *len, rsd_dtype from, const char *src,
                            const int64_t *src_strides, rsd_dtype to, char *dst,
                            const int64_t *dst_strides);

/* Waits for what was queued since the last tile_device_reserve; or for everything. */
rsd_status tile_device_wait(struct scratch *scratch);
rsd_status tile_device_finish(struct scratch *scratch);
void tile_device_drop(struct scratch *scratch);

/* Copies an array of a device into dense memory of the host, and waits. */
rsd_status tile_device_read_array(struct scratch *scratch, struct memory_device *device,
                                  int32_t ndim, const int64_t *len, size_t element_nbytes,
                                  const char *array, const int64_t *strides, char *out);

/* ---- partition.c: which rank does what ---- */

/* A job of a batch. A rank does bytes [from, to) of `of`, rounded to tiles. */
struct batch_job {
    size_t id, queue;
    int64_t from, to, of;
    bool can_split;
    const struct stored_tensor *whole; /* that it reads whole, for reading ahead; NULL: none */
};
struct job_list {
    struct batch_job *list;
    size_t n, capacity;
};

/* Adds a job, of which [from, to) is set to all. */
rsd_status job_list_add(struct job_list *jobs, struct batch_job job);
void job_list_drop(struct job_list *jobs);

/* Keeps what one rank does of these jobs. */
void job_list_partition(struct job_list *jobs, int32_t rank, int32_t nranks);

static inline bool batch_job_is_whole(const struct batch_job *job)
{
    return job->from == 0 && job->to == job->of;
}

/* Returns the first tile of a job that begins at byte `at` or behind it. */
int64_t batch_job_tile(const struct batch_job *job, int64_t at, int64_t ntiles);

/* Returns whether several ranks can read parts of a tensor. */
bool tensor_can_split(const struct catalog *catalog, const struct stored_tensor *tensor);

/* What one rank has read of a source of which it read a part. */
struct partial_crc {
    size_t job, tensor;
    int64_t side, source, file, checkable;
    uint32_t crc;
    uint64_t wanted, nbytes, offset, crc_sum, crc_nbytes; /* as in struct source */
};
struct partial_crc_list {
    struct partial_crc *list;
    size_t n, capacity;
    pthread_mutex_t lock;
};
void partial_crcs_open(struct partial_crc_list *crcs);
void partial_crcs_close(struct partial_crc_list *crcs);

/* Adds the sources of a transfer. Any thread. */
rsd_status partial_crcs_add(struct partial_crc_list *crcs, const struct batch_job *job,
                            int64_t side, const struct transfer *transfer);

/* Combines the lists of all ranks, and checks each source. `damaged` is called for a wrong CRC-32, whose error is
 * set; a status that it returns ends the check. */
typedef rsd_status partial_crc_damaged(void *context, const struct partial_crc *crc,
                                       rsd_status status);
rsd_status partial_crcs_check(struct partial_crc_list *crcs, struct io_stats *stats,
                              partial_crc_damaged *damaged, void *context);

/* ---- batch.c: many transfers on many threads ---- */

/* The jobs of a queue are started in the order of their ids. */
struct batch {
    rsd_pool *pool;
    struct job_list jobs; /* of the caller; the run sorts them */
    size_t nqueues;       /* 0: any order, in one queue per thread */
    bool one_per_queue;   /* at most one thread works on a queue */
    rsd_checkpoint
        *from; /* that has the tensors which jobs read whole; NULL: nothing is read ahead */
    rsd_status (*open)(void *context, const struct batch_job *job, struct transfer *transfer);
    /* Called when all tiles of a job are done and its sources are checked. NULL: nothing to do. */
    rsd_status (*close)(void *context, const struct batch_job *job, struct transfer *transfer);
    /* Returns whether the other jobs continue after a failure. NULL: they do not. */
    bool (*forgive)(void *context, const struct batch_job *job, rsd_status status);
    void *context;
    rsd_on_progress *on_progress;
    void *progress_context;
    void *stream; /* of the caller, if arrays are on a device */

    struct partial_crc_list *partial_crcs; /* takes the sources of jobs that are not whole */
    int32_t max_threads;                   /* 0: those of the pool */
    uint64_t max_stream_nbytes;            /* memory of the streams that all threads read */
    bool check_records;         /* records that no transfer reads whole are read once more */
    struct record_set *records; /* that were checked */

    struct io_stats stats; /* set by the run */
    int64_t nbytes_total;
};
rsd_status batch_run(struct batch *batch);

/* Returns how many bytes a tile may have, if buffers of all threads may have max_nbytes. */
uint64_t batch_tile_limit(int64_t max_nbytes, const rsd_pool *pool);

/* Returns how many bytes the streams of all threads may have. */
uint64_t batch_stream_limit(int64_t max_nbytes);

/* ---- prefetch.c: what is read ahead ---- */

/* Tells the store what the jobs from `job` to `end` will read, as far ahead as is of use. *next: the first of
 * which it was not told. */
void prefetch_jobs(const struct batch *batch, size_t job, size_t end, size_t *next);

/* The same of tiles [first, end) of a transfer. */
void prefetch_tiles(const struct transfer *transfer, int64_t first, int64_t end);

#endif
