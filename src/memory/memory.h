/* memory.h - strided bytes in memory: copies, reductions and casts, memory of devices, and memory that processes share.
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

/* ---- device_ops.c: what a device does in one launch ---- */

/* Units [begin, end) of rows of `run` units, which are numbered through all loops, outermost first. Units are bytes, or
 * numbers that are converted. Arrays are numbers of addresses that a launch is given. */
struct device_copy {
    uint32_t src, dst;
    int64_t src_offset, dst_offset; /* bytes */
    struct element element;
    int64_t run, begin, end;
    uint32_t first_loop, nloops; /* in device_ops.loops */
};

/* A box that is combined from terms. Its loops count elements, and only their dst_stride is used. */
struct device_sum {
    struct reduction reduction;
    uint32_t dst;
    int64_t dst_offset;
    uint32_t first_loop, nloops;
    uint32_t first_term; /* in device_ops.terms, reduction.nterms of them */
};
struct device_term {
    int64_t offset;
    uint32_t src;
    uint32_t first_stride; /* in device_ops.strides, one per loop of the sum */
};

/* Copies, casts and reductions. Sums come before copies, which may read their results. Starts as {0}. */
struct device_ops {
    struct device_copy *copies;
    struct device_sum *sums;
    struct loop *loops;
    struct device_term *terms;
    int64_t *strides;
    size_t ncopies, nsums, nloops, nterms, nstrides;
    size_t copies_capacity, sums_capacity, loops_capacity, terms_capacity, strides_capacity;
};

void device_ops_clear(struct device_ops *ops);
void device_ops_drop(struct device_ops *ops);

/* Adds a copy of nloops loops, if it has units. */
rsd_status device_ops_add_copy(struct device_ops *ops, const struct device_copy *copy,
                               const struct loop *loops);
/* Adds a sum of nloops loops. Its terms must be added next, each with one stride per loop. */
rsd_status device_ops_add_sum(struct device_ops *ops, const struct device_sum *sum,
                              const struct loop *loops);
rsd_status device_ops_add_term(struct device_ops *ops, uint32_t src, int64_t offset,
                               const int64_t *strides);

/* ---- kinds.c: kinds of memory that belong to devices ---- */

/* Where an address lies. */
struct memory_place {
    const struct memory_kind *kind; /* that knows the address; NULL: plain memory of the host */
    int device; /* the device whose memory it is, or that manages it; -1: memory of the host */
    bool for_kernels;    /* kernels may use it: device memory, managed and pinned memory */
    bool for_host;       /* the CPU may use it: everything but device memory */
    uint64_t allocation; /* a number of the allocation that is never used again; 0: plain memory */
};

/* What a kind makes begins with one of these structs. */
struct memory_device {
    const struct memory_kind *kind;
    int ordinal;
};
struct memory_queue {
    const struct memory_kind *kind;
};
struct memory_program {
    const struct memory_kind *kind;
};
struct memory_mapping {
    const struct memory_kind *kind;
    const char *base; /* the address of the first piece, for kernels */
};

/* Memory of a device, or pinned memory of the host, which its kernels use too. Starts as {0}. */
struct memory_buffer {
    struct memory_device *device;
    bool pinned;
    char *memory; /* NULL: none */
    size_t nbytes;
};

/* What another process needs to map a piece of memory; plain bytes that may be sent. */
struct memory_piece {
    uint64_t id;     /* of the allocation, never used again in its process */
    uint64_t nbytes; /* of the piece */
    int32_t pid, fd; /* fd: the descriptor of the piece; -1: the handle is used */
    char handle[64];
};
/* Starts as {0}. */
struct memory_pieces {
    const struct memory_kind *kind;
    struct memory_piece *list;
    size_t n, capacity;
};

/* Rows of device memory. A loop's dst_stride is that of its rows in the bytes of the whole tensor, row-major;
 * `after` bytes of the tensor follow the end of the first row. */
struct digest_rows {
    const char *address;
    int64_t run, after;
    const struct loop *loops;
    int32_t nloops;
    uint32_t result;
};

/* A kind of memory: one row of the table in kinds.c. */
struct memory_kind {
    const char *name; /* for messages, as in "CUDA device 0" */

    /* Whether this process uses the kind. If not, no address is of it. Never loads a library. */
    bool (*is_used)(void);
    /* Sets where an address lies, except place->kind. Returns false if it is plain memory of the host. Device memory of
     * the parent of a fork is for neither kernels nor the CPU. */
    bool (*find_place)(const void *address, struct memory_place *place);
    /* The device of an ordinal, which stays open for the rest of the process. */
    rsd_status (*open_device)(int ordinal, struct memory_device **device);
    /* The device of a stream of the caller's. NULL, or a handle that every device has: the device of this ordinal. */
    rsd_status (*open_stream_device)(void *stream, int ordinal, struct memory_device **device);
    /* Lets kernels of a device use a range of memory of this process that lies on a device of the kind.
     * EUNSUPPORTED: they cannot. */
    rsd_status (*enable_access)(struct memory_device *device, int other, const void *address,
                                size_t nbytes);

    /* ENOMEM: the device has too little memory, or the system does not pin so much. */
    rsd_status (*buffer_new)(struct memory_device *device, bool pinned, size_t nbytes,
                             struct memory_buffer *buffer);
    /* Pinned buffers are kept for the next user. Nothing may still be queued that uses the buffer. */
    void (*buffer_free)(struct memory_buffer *buffer);
    /* Makes pageable memory of the caller's usable by kernels until it is unpinned. Requires whole pages.
     * EUNSUPPORTED: the system does not pin it. */
    rsd_status (*pin)(struct memory_device *device, void *memory, size_t nbytes);
    /* Nothing may still be queued that uses it. */
    void (*unpin)(struct memory_device *device, void *memory);

    /* A queue with a stream of its own, for one thread at a time. Queues that are freed are kept for the next user. */
    rsd_status (*queue_new)(struct memory_device *device, struct memory_queue **queue);
    void (*queue_free)(struct memory_queue *queue); /* waits */
    /* Work that follows is ordered in this stream of the caller's, which must be of the device (NULL: its default
     * stream). */
    rsd_status (*use_stream)(struct memory_queue *queue, void *stream);
    /* Work that follows begins after the work that a stream of any device has now (NULL: the default stream of the
     * device). */
    rsd_status (*follow_stream)(struct memory_queue *queue, void *stream);
    /* Whether the stream of the queue has no work that is not done, also work of the caller's. */
    rsd_status (*is_idle)(struct memory_queue *queue, bool *idle);
    /* Waits until everything queued so far is done. */
    rsd_status (*wait)(struct memory_queue *queue);
    /* Marks this point of the queue. The mark is done when everything queued before it is done. A queue
     * remembers at least its last 64 marks; older ones are done. */
    rsd_status (*mark)(struct memory_queue *queue, uint64_t *mark);
    rsd_status (*test_mark)(struct memory_queue *queue, uint64_t mark, bool *done);
    rsd_status (*wait_mark)(struct memory_queue *queue, uint64_t mark);
    /* Queues a list, one launch for each of sums, copies and casts. The list and the addresses are copied. */
    rsd_status (*run)(struct memory_queue *queue, const struct device_ops *ops,
                      const void *const *arrays, size_t narrays);

    /* The same for a list that is run many times with other addresses: its tables stay on the device. */
    rsd_status (*program_new)(struct memory_device *device, const struct device_ops *ops,
                              size_t narrays, struct memory_program **program);
    rsd_status (*program_run)(struct memory_program *program, struct memory_queue *queue,
                              const void *const *arrays);
    /* Requires that no run is still queued. */
    void (*program_free)(struct memory_program *program);

    /* Adds the pieces of a range of memory to a list, and sets where in the first of them it begins. EIO, EUNSUPPORTED:
     * memory that cannot be exported, such as that of a pool; nothing is added. */
    rsd_status (*export_range)(struct memory_device *device, const void *address, size_t nbytes,
                               struct memory_pieces *pieces, uint64_t *offset);
    /* Pieces keep memory allocated until then. No process may still want to map them. */
    void (*unexport)(const struct memory_piece *pieces, size_t n);
    /* Maps the pieces of another process's range one after the other, for kernels of a device. */
    rsd_status (*import_range)(struct memory_device *device, const struct memory_piece *pieces,
                               size_t n, struct memory_mapping **mapping);
    /* Nothing may still be queued that uses it. */
    void (*unmap)(struct memory_mapping *mapping);

    /* Adds the remainders of rows to results, which are pairs of ECMA and Jones (codec/crc.h). Waits. */
    rsd_status (*digest)(struct memory_queue *queue, const struct digest_rows *rows, size_t n,
                         uint64_t (*results)[2], size_t nresults);
};

/* Whether this process uses a kind. If not, all addresses are plain memory of the host. */
bool memory_has_devices(void);

struct memory_place memory_find_place(const void *address);

/* Opens the device whose kernels must use an address. *device is NULL if the CPU can use it, or if it is NULL. */
rsd_status memory_find_device(const void *address, struct memory_device **device);

/* Opens the device of a transport, which says its ordinal only: it is of the first kind. */
rsd_status memory_open_device(int ordinal, struct memory_device **device);

/* These accept NULL, and buffers and lists that are {0}. */
void memory_queue_free(struct memory_queue *queue);
void memory_program_free(struct memory_program *program);
void memory_buffer_free(struct memory_buffer *buffer);
void memory_pieces_drop(struct memory_pieces *pieces);

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
