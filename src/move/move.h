/* move.h - the door of move: carry a plan through memory.
 *
 *     plan --bind--> nests of loops over bytes --run--> memory
 *
 * Copies know no dtype: they see runs of bytes and strides (copy.c). Only reductions look at values
 * (reduce.c). Move knows no file formats and no MPI.
 */
#ifndef MOVE_H
#define MOVE_H

#include "plan.h"

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

struct block block_of(size_t run, int32_t nloops, const struct loop *loops);
void copy_block(const struct copier *copier, bool stream, const struct block *block,
                const char *src, char *dst, int64_t first_row, int64_t nrows);

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
    double room[2 * REDUCE_BATCH]; /* enough for the widest, two f64 */
};
void reduce_first(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  const char *term, int64_t stride);
void reduce_next(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                 const char *term, int64_t stride);
void reduce_store(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  char *dst, int64_t stride);

/* ---- nests.c: a plan compiled for the arrays it will meet ---- */

/* A block that one array gives another. Arrays are numbered through all plans of an exec. */
struct nest {
    int64_t src, dst;               /* arrays; src is a destination array with from_dst */
    int64_t src_offset, dst_offset; /* bytes */
    size_t first_loop;              /* into nests.loops, which move while they grow */
    struct block block;
    int32_t stage;
    bool from_dst;
};

/* A block that is combined from the terms of several arrays. Loops count elements of the
 * destination; each term has strides of its own. */
struct sum {
    int64_t dst, dst_offset;
    int64_t first_loop; /* into nests.loops; src_stride is not used */
    int64_t first_term; /* into nests.terms, reduction.nterms of them */
    int32_t nloops;
    struct reduction reduction;
};

struct term {
    int64_t src, offset;
    int64_t first_stride; /* into nests.strides: one per loop */
};

struct nests {
    struct nest *nests;
    struct sum *sums; /* all in stage 0 */
    struct loop *loops;
    struct term *terms;
    int64_t *strides;
    size_t nnests, room_nests, nsums, room_sums, nloops, room_loops, nterms, room_terms, nstrides,
        room_strides;
    int64_t nbytes; /* written in all */
};

/* Strides in bytes of one array, from strides in elements (NULL: dense). EINVAL, ELIMIT: strides that
 * cannot be; those of an array that is written may not let two elements share a place. */
rsd_status array_strides(const rsd_layout *layout, int64_t array, const int64_t *given,
                         bool column_major, bool written, int64_t *out);

/* Adds a plan whose first source and destination arrays have these numbers. */
rsd_status nests_add(struct nests *nests, const rsd_plan *plan, const rsd_bind_options *options,
                     int64_t first_src, int64_t first_dst);
void nests_drop(struct nests *nests);

/* Once all plans are added, before anything is run. */
void nests_finish(struct nests *nests);

/* ---- exec.c: what every carrier's exec begins with ---- */

struct carrier {
    rsd_status (*start)(rsd_exec *exec, const void *const *src, void *const *dst);
    rsd_status (*wait)(rsd_exec *exec);
    rsd_status (*run)(rsd_exec *exec, const void *const *src, void *const *dst);
    void (*free)(rsd_exec *exec);
};

struct rsd_exec {
    const struct carrier *carrier;
    bool started;
};

#endif
