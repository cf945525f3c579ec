/* memory.h - strided bytes in memory: copies, reductions, casts, shared memory. */
#ifndef MEMORY_H
#define MEMORY_H

#include "layout.h"

/* ---- loops.c: a copy as the shortest strided loop nest over bytes ---- */

enum { MAX_LOOPS = 2 * RSD_MAX_DIMS + 1 };

struct loops {
    size_t run; /* contiguous bytes on both sides */
    int32_t n;  /* loops, outermost first */
    int64_t count[MAX_LOOPS];
    int64_t src_stride[MAX_LOOPS], dst_stride[MAX_LOOPS]; /* bytes */
};

/* Adds a loop; order does not matter. */
static inline void loops_add(struct loops *loops, int64_t count, int64_t src_stride,
                             int64_t dst_stride)
{
    if (count == 1)
        return;
    loops->count[loops->n] = count;
    loops->src_stride[loops->n] = src_stride;
    loops->dst_stride[loops->n++] = dst_stride;
}

/* Sorts loops so that the destination is written in order, and merges what stays contiguous. */
void loops_finish(struct loops *loops, size_t element_nbytes);

/* ---- strides.c ---- */

/* Strides in bytes of one array, from strides in elements (NULL: dense). EINVAL, ELIMIT: strides that
 * cannot be; those of an array that is written may not let two elements share a place. */
rsd_status array_strides(const rsd_layout *layout, int64_t array, const int64_t *given,
                         bool column_major, bool written, int64_t *out);

/* ---- copy.c ---- */

/* One loop of a nest, in bytes. */
struct loop {
    int64_t count, src_stride, dst_stride;
};

/* Copies `count` rows of `run` bytes. */
typedef void copy_rows_fn(char *dst, int64_t dst_stride, const char *src, int64_t src_stride,
                          size_t run, int64_t count);

/* How to copy: ordinary stores, and stores that go past the cache for large destinations. */
struct copier {
    copy_rows_fn *rows, *stream;
};

/* The best this machine has; level 0 is plain C, and levels up to copier_nlevels() - 1 exist for
 * tests. */
struct copier copier_best(void);
int copier_nlevels(void);
struct copier copier_level(int level);

/* A block that moves: loops outermost first around a run of bytes. The rows of a block are counted
 * through all its loops, so that parts of it can be given to different threads. */
struct block {
    size_t run;
    int64_t nrows;
    const struct loop *loops;
    int32_t nloops;
    int32_t across; /* the loop along which the source runs, if rows are best taken across it; -1 */
};

struct block copy_block_of(size_t run, int32_t nloops, const struct loop *loops);
void copy_block(const struct copier *copier, bool stream, const struct block *block,
                const char *src, char *dst, int64_t first_row, int64_t nrows);

/* The same for loops of a plan. */
void copy_loops(const struct copier *copier, bool stream, const struct loops *loops,
                const char *src, char *dst);

/* Destinations from here on would not stay in the cache anyway. */
#define STREAM_MIN_TOTAL ((int64_t)8 << 20)

/* ---- reduce.c ---- */

/* How partial values become one. */
struct reduction {
    rsd_dtype dtype;
    rsd_reduce reduce;
    int64_t divisor; /* sums are divided by it in the end */
    int64_t nterms;
};

/* Up to REDUCE_BATCH elements on their way: the first term, each further term in its turn, and the
 * result. Strides in bytes. */
enum { REDUCE_BATCH = 256 };
struct accumulators {
    double capacity[2 * REDUCE_BATCH]; /* enough for the widest, two f64 */
};
void reduce_first(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  const char *term, int64_t stride);
void reduce_next(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                 const char *term, int64_t stride);
void reduce_store(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  char *dst, int64_t stride);

/* ---- cast.c ---- */

/* Whether elements of one dtype can become another's, and does it for n of them. */
bool cast_supported(rsd_dtype to, rsd_dtype from);
void cast_elements(rsd_dtype to, void *out, rsd_dtype from, const void *in, int64_t n);

/* ---- shared.c: memory that the processes of a host share ---- */

struct shared_segment {
    char *base; /* NULL: none */
    size_t nbytes;
    int fd;
};

/* What another process needs to open it. */
struct shared_segment_name {
    uint64_t number, nbytes;
    int32_t pid, fd;
};

rsd_status shared_segment_new(size_t nbytes, struct shared_segment *segment);
struct shared_segment_name shared_segment_name(const struct shared_segment *segment);
rsd_status shared_segment_open(const struct shared_segment_name *name,
                               struct shared_segment *segment);
void shared_segment_drop(struct shared_segment *segment);
char *shared_segment_data(const struct shared_segment *segment);
uint64_t shared_segment_capacity(const struct shared_segment *segment);
const struct shared_segment *arena_segment(const rsd_arena *arena);

/* ---- available.c: the host, and its memory ---- */

/* Returns a number for this host, never 0 or -1. */
int64_t host_number(void);

/* Returns the bytes that can still be allocated, as /proc/meminfo and the groups of /proc/self/cgroup (version 2,
 * in directories under `groups`) say; UINT64_MAX if that is not known. The paths are parameters for tests. */
uint64_t memory_available(const char *meminfo, const char *cgroup, const char *groups);

#endif
