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

/* ---- exchange_bind.c, exchange.c: between processes, over a transport ---- */

/* A piece in one of our arrays, as rows of bytes in the order of its box. */
struct op {
    int64_t array, offset; /* among our arrays; bytes */
    size_t first_loop; /* into the exchange's loops: outermost first, packed side and array side */
    int32_t nloops;
    bool from_dst;
    size_t run;
    int64_t nrows;
    uint64_t nbytes;
};

/* Pieces that go to one peer, or come from it, in one stage: packed one after the other. */
struct parcel {
    int32_t peer, stage;
    bool reduce; /* each piece by itself, since the receiver combines it with others */
    size_t first_op, nops;
    uint64_t nbytes;
};

/* A box that is combined from terms: ours is an op, those of others come in their parcels. */
struct gathered_sum {
    struct reduction reduction;
    struct op to;
    size_t first_term, nterms;
};
struct gathered_term {
    int32_t peer; /* our own rank: the op */
    struct op op;
};

struct exchange {
    rsd_exec exec;
    rsd_transport transport;
    double timeout;
    uint64_t chunk; /* bytes of one message at most, the same on all ranks */
    int32_t nstages;
    struct op *ops;
    struct loop *loops; /* src_stride: packed side; dst_stride: array side */
    struct parcel *sends, *receives;
    struct op *keeps; /* pairs: from our source (or destination) to our destination */
    int32_t *keep_stages;
    struct gathered_sum *sums;
    struct gathered_term *terms;
    size_t nops, room_ops, nloops, room_loops, nsends, room_sends, nreceives, room_receives, nkeeps,
        room_keeps, room_keep_stages, nsums, room_sums, nterms, room_terms;
    int64_t nsrc, ndst;
    const char **src;
    char **dst;
    bool *src_used, *dst_used;
    struct copier copier;
    char *buffers; /* all that is on its way */
    struct lane *lanes;
    size_t nlanes;
    struct reducer *reducer;
    bool broken;
};

/* Finds what this rank gives and gets in all plans. */
rsd_status exchange_compile(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                            const rsd_bind_options *bind);

/* Bytes [at, at + n) of a packed op, out of its array or into it. */
void op_pack(const struct exchange *x, const struct op *op, uint64_t at, size_t n, char *out);
void op_unpack(const struct exchange *x, const struct op *op, uint64_t at, size_t n,
               const char *in);

#endif
