/* cuda.h - tensors in the memory of CUDA devices: which addresses are there, queues that copy, cast and
 * reduce there, pinned buffers, and memory of other processes.
 *
 * Nothing of CUDA is needed to build, and a process that does not use CUDA never loads it. All calls
 * work in the primary context of a device, which is the one that PyTorch and the CUDA runtime use.
 */
#ifndef CUDA_H
#define CUDA_H

#include "memory.h"

/* ---- device.c: addresses and devices ---- */

/* Whether this process has loaded libcuda. If not, no address is CUDA's. Never loads it. */
bool cuda_is_loaded(void);

struct cuda_place {
    int device; /* the device whose memory it is, or that manages it; -1: memory of the host */
    bool for_kernels;    /* kernels may use it: device memory, managed and pinned memory */
    bool for_host;       /* the CPU may use it: everything but device memory */
    uint64_t allocation; /* a number of the allocation that is never used again; 0: not CUDA's */
};

/* Where an address lies. Memory that CUDA does not know is the host's. Device memory of the parent of a fork is for
 * neither kernels nor the CPU. */
struct cuda_place cuda_find_place(const void *address);

struct cuda_device;

/* The device of an ordinal, with its primary context retained for the rest of the process. */
rsd_status cuda_open_device(int ordinal, struct cuda_device **device);

/* Whether kernels of one device may use memory of another, which this makes possible. */
rsd_status cuda_enable_peer(struct cuda_device *device, int other, bool *can);

/* Memory of the device. ENOMEM: it has too little. Nothing may still be queued that uses memory that is freed. */
rsd_status cuda_memory_new(struct cuda_device *device, size_t nbytes, char **memory);
void cuda_memory_free(struct cuda_device *device, char *memory); /* accepts NULL */

/* ---- pinned.c: host memory that kernels use directly ---- */

struct cuda_pinned {
    char *memory; /* NULL: none */
    size_t nbytes;
};

/* ENOMEM: the system does not pin so much. */
rsd_status cuda_pinned_new(struct cuda_device *device, size_t nbytes, struct cuda_pinned *pinned);

/* Keeps the buffer for the next user. Nothing may still be queued that uses it. */
void cuda_pinned_free(struct cuda_device *device, struct cuda_pinned *pinned);

/* ---- ops.c: lists of copies, casts and reductions ---- */

struct cuda_ops;

rsd_status cuda_ops_new(struct cuda_ops **ops);
void cuda_ops_free(struct cuda_ops *ops); /* accepts NULL */
void cuda_ops_clear(struct cuda_ops *ops);
bool cuda_ops_is_empty(const struct cuda_ops *ops);

/* Units [begin, end) of rows of `run` units, which are numbered through all loops, outermost first. Units are bytes, or
 * numbers that are converted. Arrays are numbers of addresses that a launch is given. */
struct cuda_copy {
    uint32_t src, dst;
    int64_t src_offset, dst_offset; /* bytes */
    struct element element;
    int64_t run, begin, end;
    const struct loop *loops;
    int32_t nloops;
};
rsd_status cuda_ops_add_copy(struct cuda_ops *ops, const struct cuda_copy *copy);

/* A box that is combined from terms. Its loops count elements, and only their dst_stride is used. Its terms
 * must be added next, each with one stride per loop. */
struct cuda_sum {
    struct reduction reduction;
    uint32_t dst;
    int64_t dst_offset;
    const struct loop *loops;
    int32_t nloops;
};
rsd_status cuda_ops_add_sum(struct cuda_ops *ops, const struct cuda_sum *sum);
rsd_status cuda_ops_add_term(struct cuda_ops *ops, uint32_t src, int64_t offset,
                             const int64_t *strides, int32_t nstrides);

/* Makes pageable memory of the caller's usable by kernels until it is unregistered. Requires whole pages.
 * EUNSUPPORTED: the system does not pin it. */
rsd_status cuda_register(struct cuda_device *device, void *memory, size_t nbytes);
/* Nothing may still be queued that uses it. */
void cuda_unregister(struct cuda_device *device, void *memory);

/* ---- queue.c: work in the order of a stream ---- */

struct cuda_queue;

/* A queue with a stream of its own, for one thread at a time. Queues that are freed are kept for the next user. */
rsd_status cuda_queue_new(struct cuda_device *device, struct cuda_queue **queue);
void cuda_queue_free(struct cuda_queue *queue);

/* Work that follows is ordered in this stream of the caller's (0: the default stream of the device). */
rsd_status cuda_queue_use_stream(struct cuda_queue *queue, void *stream);

/* Work that follows begins after the work that a stream has now (NULL: the default stream). */
rsd_status cuda_queue_follow(struct cuda_queue *queue, void *stream);

/* Whether the stream of the queue has no work that is not done, also work of the caller's. */
rsd_status cuda_queue_is_idle(struct cuda_queue *queue, bool *idle);

/* Waits until everything queued so far is done. */
rsd_status cuda_queue_wait(struct cuda_queue *queue);

/* Marks this point of the queue. The mark is done when everything queued before it is done. A queue
 * remembers at least its last 64 marks; older ones are done. */
rsd_status cuda_queue_mark(struct cuda_queue *queue, uint64_t *mark);
rsd_status cuda_queue_test_mark(struct cuda_queue *queue, uint64_t mark, bool *done);
rsd_status cuda_queue_wait_mark(struct cuda_queue *queue, uint64_t mark);

/* Queues the copies, casts and reductions of a list, one launch for each kind that is not empty. The list and
 * the addresses are copied. */
rsd_status cuda_queue_run(struct cuda_queue *queue, const struct cuda_ops *ops,
                          const void *const *arrays, size_t narrays);

/* The same for a list that is run many times with other addresses: its tables stay on the device. */
struct cuda_program;
rsd_status cuda_program_new(struct cuda_device *device, const struct cuda_ops *ops, size_t narrays,
                            struct cuda_program **program);
rsd_status cuda_program_run(struct cuda_program *program, struct cuda_queue *queue,
                            const void *const *arrays);
/* Requires that no run is still queued. Accepts NULL. */
void cuda_program_free(struct cuda_program *program);

/* ---- share.c: device memory of other processes of the host ---- */

/* What another process needs to map a piece of memory; plain bytes that may be sent. */
struct cuda_piece {
    uint64_t id;     /* of the allocation, never used again in its process */
    uint64_t nbytes; /* of the piece */
    int32_t pid, fd; /* fd: the descriptor of the piece; -1: the handle is used */
    char handle[64];
};

/* The pieces of a range of memory, and where in the first of them it begins. Starts as {0}. */
struct cuda_piece_list {
    struct cuda_piece *list;
    size_t n, capacity;
    uint64_t offset;
};

/* EIO, EUNSUPPORTED: memory that cannot be shared, such as that of a pool. Pieces may keep memory allocated, until
 * each is passed to cuda_unexport once. No process may still want to map them then. */
rsd_status cuda_export(struct cuda_device *device, const void *address, size_t nbytes,
                       struct cuda_piece_list *list);
void cuda_unexport(const struct cuda_piece *pieces, size_t n);
/* Frees the list only. */
void cuda_piece_list_drop(struct cuda_piece_list *list);

/* Maps the pieces of another process's range for kernels of a device. */
struct cuda_mapping;
rsd_status cuda_import(struct cuda_device *device, const struct cuda_piece *pieces, size_t n,
                       struct cuda_mapping **mapping);
const char *cuda_mapping_base(const struct cuda_mapping *mapping);

/* Nothing may still be queued that uses it. */
void cuda_mapping_free(struct cuda_mapping *mapping);

/* ---- device_digest.c ---- */

/* Rows of device memory. A loop's dst_stride is that of its rows in the bytes of the whole tensor, row-major;
 * `after` bytes of the tensor follow the end of the first row. */
struct cuda_rows {
    const char *address;
    int64_t run, after;
    const struct loop *loops;
    int32_t nloops;
    uint32_t result;
};

/* Adds the remainders of rows to results, which are pairs of ECMA and Jones (codec/crc.h). Waits. */
rsd_status cuda_digest(struct cuda_queue *queue, const struct cuda_rows *rows, size_t n,
                       uint64_t (*results)[2], size_t nresults);

#endif
