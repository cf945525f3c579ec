/* memory.h - strided bytes in memory: copies, reductions and casts, and memory that processes share.
 *
 *     box between two arrays --box_copy--> loops --copy--> rows of bytes
 *
 * Most copies do not know dtypes: they copy bytes. A copy that converts elements, and a reduction, read values.
 * Strides are in bytes everywhere.
 */
#ifndef MEMORY_H
#define MEMORY_H

#include "layout.h"

/* ---- cast.c: elements, and their conversion from one dtype to another ---- */

/* How an element is copied: byte by byte, or by the conversion of a number, or of the two numbers of a complex one. */
struct element {
    rsd_dtype from, to;         /* of the numbers; 0: bytes are copied */
    int32_t nunits;             /* bytes or numbers of an element */
    int32_t src_unit, dst_unit; /* bytes of a unit on each side */
};

static inline struct element element_of_bytes(size_t nbytes)
{
    return (struct element){.nunits = (int32_t)nbytes, .src_unit = 1, .dst_unit = 1};
}

/* The element of an array of one dtype that is copied to an array of another. Requires dtype_casts. */
struct element element_of(rsd_dtype from, rsd_dtype to);

/* The same for a copy in the other direction. */
static inline struct element element_turned(struct element element)
{
    return (struct element){element.to, element.from, element.nunits, element.dst_unit,
                            element.src_unit};
}

/* Converts `count` rows of `run` numbers. Requires element.from. */
void cast_rows(struct element element, char *dst, int64_t dst_stride, const char *src,
               int64_t src_stride, int64_t run, int64_t count);

/* Converts n elements. Requires dtype_casts. */
void cast_elements(rsd_dtype to, void *out, rsd_dtype from, const void *in, int64_t n);

/* ---- loops.c: a strided copy as the shortest nest of loops ---- */

enum { MAX_LOOPS = 2 * RSD_MAX_DIMS + 1 };

struct loop {
    int64_t count, src_stride, dst_stride;
};

/* Loops around a run of contiguous units, which are bytes unless elements are converted. Outermost first. Initialize
 * with {0}. */
struct loops {
    size_t run;
    struct element element;
    int32_t n;
    struct loop loop[MAX_LOOPS];
};

/* Adds a loop. The order of additions does not matter. */
static inline void loops_add(struct loops *loops, int64_t count, int64_t src_stride,
                             int64_t dst_stride)
{
    if (count != 1)
        loops->loop[loops->n++] = (struct loop){count, src_stride, dst_stride};
}

/* Sorts the loops by the order of the destination, and merges what is contiguous on both sides. */
void loops_finish(struct loops *loops, struct element element);

/* Moves both offsets to the next run. Initialize index with {0}. Returns false after the last run, with the
 * offsets of the first. */
bool loops_next(const struct loops *loops, int64_t index[MAX_LOOPS], int64_t *src, int64_t *dst);

/* ---- strides.c ---- */

/* Returns the strides in bytes of one array of a layout, from strides in elements (NULL: a dense array). Returns
 * EINVAL or ELIMIT if strides are invalid. With `written`, no two elements may have the same address. */
rsd_status array_strides(const rsd_layout *layout, int64_t array, const int64_t *given,
                         bool column_major, bool written, int64_t *out);

/* ---- copy.c ---- */

/* Copies `count` rows of `run` bytes. */
typedef void copy_rows_fn(char *dst, int64_t dst_stride, const char *src, int64_t src_stride,
                          size_t run, int64_t count);

/* How to copy rows: with ordinary stores, and with stores that bypass the cache. */
struct copier {
    copy_rows_fn *rows, *stream;
};

/* Returns the fastest copier of this machine. Tests use the others: level 0 is plain C, and levels go up to
 * copier_nlevels() - 1. */
struct copier copier_best(void);
int copier_nlevels(void);
struct copier copier_level(int level);

/* Rows to copy: loops around a run of units, outermost first. Rows are numbered through all loops, so that
 * threads can copy ranges of them. */
struct block {
    size_t run;
    struct element element;
    int64_t nrows;
    const struct loop *loops;
    int32_t nloops;
    int32_t across; /* a loop to copy in tiles with the innermost one; -1: copy rows in order */
};

struct block copy_block_of(size_t run, struct element element, int32_t nloops,
                           const struct loop *loops);

/* Returns the bytes that the rows of a block write. */
static inline int64_t block_nbytes(const struct block *block)
{
    return block->nrows * (int64_t)block->run * block->element.dst_unit;
}

/* Copies rows [first_row, first_row + nrows). `stream` allows stores that bypass the cache. */
void copy_block(const struct copier *copier, bool stream, const struct block *block,
                const char *src, char *dst, int64_t first_row, int64_t nrows);

/* Copies all rows of the loops. */
void copy_loops(const struct copier *copier, bool stream, const struct loops *loops,
                const char *src, char *dst);

/* Destinations of this size and more do not stay in the cache. */
#define STREAM_MIN_TOTAL ((int64_t)8 << 20)

/* ---- box_copy.c: boxes between arrays, and between an array and packed rows ---- */

/* Returns the strides of a dense row-major array of shape len. */
void box_packed_strides(int32_t ndim, const int64_t *len, size_t element_nbytes, int64_t *strides);

/* Returns the offset of the element `at` in an array whose first element is `lo`. */
int64_t box_offset(int32_t ndim, const int64_t *at, const int64_t *lo, const int64_t *strides);

/* Returns the loops that copy a box of shape len. If n is 0, the box is contiguous on both sides. Requires that
 * the box is not empty. */
struct loops box_loops(int32_t ndim, const int64_t *len, struct element element,
                       const int64_t *src_strides, const int64_t *dst_strides);

/* Copies a box of shape len. src and dst are the addresses of its first element. Requires that the box is not
 * empty, and that source and destination do not overlap. */
void box_copy(const struct copier *copier, bool stream, int32_t ndim, const int64_t *len,
              size_t element_nbytes, const char *src, const int64_t *src_strides, char *dst,
              const int64_t *dst_strides);

/* A box in an array, and its packed form: its elements in row-major (or column-major) order without gaps, perhaps of
 * another dtype. A row is a run of units that is contiguous in the array too. */
struct packed_box {
    size_t run;             /* units of a row */
    struct element element; /* from the array to the packed form */
    uint64_t nbytes;        /* of all rows, in the packed form */
    int32_t nloops;         /* loops over the rows */
    const struct loop
        *loops; /* outermost first; src_stride in the array, dst_stride in the packed form */
};

/* Returns the packed form of a box of shape len in an array. It refers to `loops`, which the caller may copy
 * elsewhere. Requires that the box is not empty. */
struct packed_box box_packed(int32_t ndim, const int64_t *len, struct element element,
                             const int64_t *strides, bool column_major,
                             struct loop loops[RSD_MAX_DIMS]);

/* Copies bytes [at, at + n) of the packed form, out of the array or into it. `array` is the address of the box's
 * first element, `packed` that of byte `at`. Requires whole units. */
void box_pack(const struct copier *copier, const struct packed_box *box, const char *array,
              uint64_t at, size_t n, char *packed);
void box_unpack(const struct copier *copier, bool stream, const struct packed_box *box,
                const char *packed, uint64_t at, size_t n, char *array);

/* ---- reduce.c ---- */

/* How partial values are combined. */
struct reduction {
    rsd_dtype dtype; /* of the terms, in which they are combined */
    rsd_dtype to;    /* that the result is converted to; the same: it is not */
    rsd_reduce reduce;
    int64_t divisor; /* the result is divided by it; 1: it is not */
    int64_t nterms;
};

/* Up to REDUCE_BATCH elements while they are combined: call reduce_first with the first term, reduce_next with
 * every further term in order, then reduce_store. */
enum { REDUCE_BATCH = 256 };
struct accumulators {
    double values[2 * REDUCE_BATCH]; /* space for the widest element, two f64 */
};
void reduce_first(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  const char *term, int64_t stride);
void reduce_next(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                 const char *term, int64_t stride);
void reduce_store(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  char *dst, int64_t stride);

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
