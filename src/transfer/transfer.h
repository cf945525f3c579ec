/* transfer.h - moves tensors between storage and memory in tiles, within a budget. */
#ifndef TRANSFER_H
#define TRANSFER_H

#include "format.h"
#include "memory.h"
#include "plan.h"

#include <pthread.h>

/* ---- source.c: a stored box that can be read ---- */

/* What a transfer has read; each thread counts for itself. */
struct io_stats {
    uint64_t nbytes_read, nbytes_unchecked, again;
    int64_t nbytes_memory; /* of all threads together */
};

struct source {
    const char *memory; /* of the box's first element, if it is there and not in a file */
    rsd_checkpoint *checkpoint;
    size_t tensor, box;
    uint32_t file;
    const char *name; /* of the tensor */
    rsd_dtype dtype;
    size_t element_nbytes; /* bytes of an element */
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS]; /* the box */
    struct stored_array array;                   /* where its bytes are; in memory, the strides */
    bool checkable;
    uint64_t wanted; /* bytes of the box that are wanted, set by whoever reads */

    pthread_mutex_t lock; /* for what follows */
    uint64_t crc_sum, seen;
    pthread_mutex_t keeping;
    char *kept; /* the whole record */

    struct stored_stream *stream; /* while it is read, by one thread */
    uint64_t stream_at, stream_crc;
};

void source_in_memory(struct source *source, rsd_dtype dtype, int32_t ndim, const int64_t *lo,
                      const int64_t *len, const char *memory, const int64_t *strides);
rsd_status source_open(struct source *source, rsd_checkpoint *checkpoint, size_t tensor,
                       size_t box);
void source_close(struct source *source);

/* Reads a region of the box, packed row by row. Records of up to keep_most bytes may be kept whole. */
rsd_status source_read(struct source *source, const int64_t *lo, const int64_t *len, char *out,
                       uint64_t keep_most, struct io_stats *stats);

/* Tells the store which bytes of a region will be read. */
void source_prefetch(struct source *source, const int64_t *lo, const int64_t *len);

/* Whether a region is one run of bytes in the record, and where. */
bool source_find_run(const struct source *source, const int64_t *lo, const int64_t *len,
                     uint64_t *at, uint64_t *n);

/* When everything is read: EFORMAT if the CRC-32 is wrong; counts what could not be checked. */
rsd_status source_check(struct source *source, struct io_stats *stats);

/* Whether its rows run another way than the tensor's, as those of a transposed one do. */
bool source_runs_across(const struct source *source);

/* ---- haul.c: one tensor from its sources to its sinks ---- */

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

struct transfer_piece {
    size_t source, sink;
    bool done; /* it is where it belongs already */
};

struct transfer {
    const char *name;
    rsd_dtype dtype; /* of the sources */
    size_t element_nbytes;
    int32_t ndim;
    struct source *sources;
    size_t nsources;
    struct sink *sinks;
    size_t nsinks;
    size_t cast_each;   /* the longest element that one is cast to; 0: none is */
    bool in_order;      /* tiles have to be done one after the other */
    bool stream;        /* sinks in memory are large: stores go past the cache */
    uint64_t keep_most; /* records up to this may be kept whole */

    struct transfer_piece *pieces;
    int64_t *coordinates; /* lo and len of each piece */
    size_t npieces, pieces_capacity, coordinates_capacity;
    struct box_tree tree;
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
    size_t in_capacity, out_capacity, cast_capacity;
    struct tile_part *parts;
    struct staged *staged;
    const void *user; /* for whoever takes blocks */
    size_t parts_capacity, staged_capacity;
};
rsd_status scratch_reserve(char **bytes, size_t *capacity, size_t need);
void scratch_drop(struct scratch *scratch);

/* Plans how boxes are filled from a stored tensor. EMISMATCH: no file has some element of them. */
rsd_status transfer_plan(const struct catalog *catalog, const struct stored_tensor *tensor,
                         size_t n, const int64_t *lo, const int64_t *len, rsd_plan **plan);

/* A haul of one tensor: start it, add its sinks, and say where they are filled from. Tiles are of at most
 * so many bytes. */
rsd_status transfer_start(struct transfer *transfer, const struct catalog *catalog, size_t tensor,
                          size_t nsinks);
void transfer_add_sink(struct transfer *transfer, const struct sink *sink);
rsd_status transfer_from_files(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t tensor,
                               uint64_t most_nbytes);
rsd_status transfer_whole(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t tensor,
                          sink_take *take, void *context,
                          uint64_t most_nbytes); /* all of it, into one sink */
rsd_status transfer_from_box(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t tensor,
                             size_t box,
                             uint64_t most_nbytes); /* its only sink, from this box alone */
rsd_status transfer_from_memory(struct transfer *transfer, const char *memory,
                                const int64_t *strides, uint64_t most_nbytes); /* its only sink */

void transfer_tile_box(const struct transfer *transfer, int64_t index, int64_t *lo, int64_t *len);
rsd_status transfer_run_tile(const struct transfer *transfer, int64_t index,
                             struct scratch *scratch, struct io_stats *stats);
rsd_status transfer_run_box(const struct transfer *transfer, const int64_t *lo, const int64_t *len,
                            struct scratch *scratch, struct io_stats *stats);
void transfer_drop(struct transfer *transfer); /* closes its sources */

/* ---- transfer.c: many hauls on many threads ---- */

/* What one rank does of a job: bytes [from, to) of `of`, rounded to tiles. */
struct job_part {
    size_t job;
    int64_t from, to, of;
};
static inline bool job_part_is_whole(const struct job_part *part)
{
    return part->from == 0 && part->to == part->of;
}

/* What of a source was read by a rank that had only a portion of it. */
struct partial_crc {
    size_t job;
    int64_t side, source, file, checkable;
    uint32_t crc;
    uint64_t wanted, nbytes, data, sum, seen; /* as in struct source */
};
struct partial_crc_list {
    struct partial_crc *list;
    size_t n, capacity;
    pthread_mutex_t lock;
};

/* The portions of this rank in jobs of so many bytes. splits: which may be split; NULL: none. */
struct partition {
    struct job_part *list;
    int64_t *nbytes;
    size_t n, capacity, nbytes_capacity;
};
rsd_status partition_jobs(int32_t rank, int32_t nranks, const int64_t *nbytes, const bool *splits,
                          size_t njobs, struct partition *mine);
void partition_drop(struct partition *parts);
int64_t partition_tile(const struct job_part *part, int64_t at, int64_t ntiles);
bool partition_can_split(const struct catalog *catalog, const struct stored_tensor *tensor);

/* Adds up what all ranks have seen of each source. The error of a damaged one is set, and what damaged
 * returns ends it. */
typedef rsd_status partial_crc_damaged(void *context, const struct partial_crc *seen,
                                       rsd_status status);
void partial_crcs_open(struct partial_crc_list *seen);
void partial_crcs_close(struct partial_crc_list *seen);
rsd_status partial_crcs_add(struct partial_crc_list *seen, const struct job_part *part,
                            int64_t side, struct transfer *transfer);
rsd_status partial_crcs_check(struct partial_crc *list, size_t n, rsd_report *report,
                              partial_crc_damaged *damaged, void *context);

/* Jobs are numbered, those of one lane in a row. A job is opened, hauled and closed. */
struct batch {
    rsd_pool *pool;
    const size_t *first_job; /* of each lane, and one more */
    size_t nlanes;
    bool one_per_lane;             /* only one thread at a time may be at a lane */
    const struct job_part *parts;  /* of each job; NULL: all of it */
    struct partial_crc_list *seen; /* gets the sources of those that are not whole */
    /* For reading ahead: the tensor of `from` that a job reads whole, or SIZE_MAX. from: NULL: not used. */
    rsd_checkpoint *from;
    size_t (*whole_tensor)(void *context, size_t job);
    rsd_status (*open)(void *context, size_t job, struct transfer *transfer);
    rsd_status (*close)(void *context, size_t job,
                        struct transfer *transfer);                /* when all of it is done */
    bool (*forgive)(void *context, size_t job, rsd_status status); /* NULL: a failure ends it all */
    void *context;
    rsd_on_progress *on_progress;
    void *progress_context;
    int64_t nbytes_total;
    struct io_stats stats; /* set by the run */
};
rsd_status batch_run(struct batch *batch);

/* Runs jobs of so many bytes that may be done in any order: one lane a thread, about equal. */
rsd_status batch_run_evenly(struct batch *batch, const int64_t *nbytes, size_t njobs);

/* ---- prefetch.c: what is read ahead ---- */

/* Tells the store what the jobs from `job` to `end` will read, as far ahead as is of use. *next: the first of
 * which it was not told. */
void prefetch_jobs(const struct batch *batch, size_t job, size_t end, size_t *next);

/* The same of tiles [first, end) of a transfer. */
void prefetch_tiles(const struct transfer *transfer, int64_t first, int64_t end);

uint64_t tile_limit(int64_t max_nbytes, const rsd_pool *pool); /* for each thread */
void report_add_stats(rsd_report *report, const struct io_stats *stats);

#endif
