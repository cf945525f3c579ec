/* cuda.h - tensors in the memory of CUDA devices: which addresses are there, queues that copy, cast and
 * reduce there, pinned buffers, and memory of other processes.
 *
 * Nothing of CUDA is needed to build, and a process that does not use CUDA never loads it. All calls
 * work in the primary context of a device, which is the one that PyTorch and the CUDA runtime use.
 */
#ifndef CUDA_H
#define CUDA_H

#include "base.h"

/* ---- device.c: addresses and devices ---- */

struct cuda_place {
    int device;          /* the device whose memory it is; -1: memory of the host */
    bool for_kernels;    /* kernels may use it: device memory, managed and pinned memory */
    bool for_host;       /* the CPU may use it: everything but device memory */
    uint64_t allocation; /* a number of the allocation that is never used again; 0: not CUDA's */
};

/* Where an address lies. Memory that CUDA does not know is the host's. */
struct cuda_place cuda_find_place(const void *address);

struct cuda_device;

/* The device of an ordinal, with its primary context retained for the rest of the process. */
rsd_status cuda_open_device(int ordinal, struct cuda_device **device);

/* 16 bytes that tell one GPU from another in all processes. */
void cuda_device_uuid(const struct cuda_device *device, unsigned char uuid[16]);

/* Whether kernels of one device may use memory of another, which this makes possible. */
rsd_status cuda_enable_peer(struct cuda_device *device, int other, bool *can);

/* ---- pinned.c: host memory that kernels use directly ---- */

struct cuda_pinned {
    char *memory; /* NULL: none */
    size_t nbytes;
};

/* ENOMEM: the system does not pin so much. */
rsd_status cuda_pinned_new(struct cuda_device *device, size_t nbytes, struct cuda_pinned *pinned);

/* Keeps the buffer for the next user. Nothing may still be queued that uses it. */
void cuda_pinned_free(struct cuda_device *device, struct cuda_pinned *pinned);

/* ---- queue.c: work in the order of a stream ---- */

struct cuda_queue;

/* A queue with a stream of its own; one thread at a time may use it. */
rsd_status cuda_queue_new(struct cuda_device *device, struct cuda_queue **queue);
void cuda_queue_free(struct cuda_queue *queue);

/* Work that follows is ordered in this stream of the caller's (0: the default stream of the device). */
rsd_status cuda_queue_use_stream(struct cuda_queue *queue, void *stream);

/* Waits until everything queued so far is done. */
rsd_status cuda_queue_wait(struct cuda_queue *queue);

/* Marks this point of the queue. The mark is done when everything queued before it is done. A queue
 * remembers at least its last 64 marks; older ones are done. */
rsd_status cuda_queue_mark(struct cuda_queue *queue, uint64_t *mark);
rsd_status cuda_queue_test_mark(struct cuda_queue *queue, uint64_t mark, bool *done);
rsd_status cuda_queue_wait_mark(struct cuda_queue *queue, uint64_t mark);

/* What a launch works on. Arrays are addresses, to which the tables refer by number. Entries of a
 * table are in the order of their first tiles, which cuda_number_tiles sets. */
struct gpu_copy;
struct gpu_sum;
struct gpu_loop;
struct gpu_term;

struct cuda_tables {
    struct gpu_copy *copies, *casts;
    struct gpu_sum *sums;
    const struct gpu_loop *loops;
    const struct gpu_term *terms;
    const int64_t *strides;
    const void *const *arrays;
    size_t ncopies, ncasts, nsums, nloops, nterms, nstrides, narrays;
};

/* Queues the copies, casts and reductions of the tables, one launch for each that is not empty. The
 * tables are copied. */
rsd_status cuda_queue_run(struct cuda_queue *queue, const struct cuda_tables *tables);

/* The same for tables that are run again and again with other arrays: they stay on the device. */
struct cuda_program;
rsd_status cuda_program_new(struct cuda_device *device, const struct cuda_tables *tables,
                            struct cuda_program **program);
rsd_status cuda_program_run(struct cuda_program *program, struct cuda_queue *queue,
                            const void *const *arrays);
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

/* EIO, EUNSUPPORTED: memory that cannot be shared, such as that of a pool. */
rsd_status cuda_export(struct cuda_device *device, const void *address, size_t nbytes,
                       struct cuda_piece_list *list);
void cuda_piece_list_drop(struct cuda_piece_list *list);

/* Maps the pieces of another process's range for kernels of a device. */
struct cuda_mapping;
rsd_status cuda_import(struct cuda_device *device, const struct cuda_piece *pieces, size_t n,
                       struct cuda_mapping **mapping);
const char *cuda_mapping_base(const struct cuda_mapping *mapping);

/* Nothing may still be queued that uses it. */
void cuda_mapping_free(struct cuda_mapping *mapping);

/* ---- digest.c ---- */

struct gpu_digest;

/* Adds the remainders of rows in device memory to results, which are pairs of ECMA and Jones. Waits.
 * A digest's loops are in the list, and its array is a number of an address. */
rsd_status cuda_digest(struct cuda_queue *queue, struct gpu_digest *digests, size_t n,
                       const struct gpu_loop *loops, size_t nloops, const void *const *arrays,
                       size_t narrays, uint64_t (*results)[2], size_t nresults);

#endif
