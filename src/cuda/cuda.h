/* cuda.h - tensors in the memory of CUDA devices: the functions of the row in the table of memory kinds. Private to cuda;
 * memory.h has their contracts.
 *
 * Nothing of CUDA is needed to build, and a process that does not use CUDA never loads it. All calls
 * work in the primary context of a device, which is the one that PyTorch and the CUDA runtime use.
 */
#ifndef CUDA_H
#define CUDA_H

#include "memory.h"

extern const struct memory_kind cuda_kind;

/* ---- device.c: addresses and devices ---- */

bool cuda_is_loaded(void);
bool cuda_find_place(const void *address, struct memory_place *place);
rsd_status cuda_open_device(int ordinal, struct memory_device **device);
rsd_status cuda_open_stream_device(void *stream, int ordinal, struct memory_device **device);
rsd_status cuda_enable_access(struct memory_device *device, int other, const void *address,
                              size_t nbytes);

/* ---- buffers.c: memory of devices, and host memory that kernels use directly ---- */

rsd_status cuda_buffer_new(struct memory_device *device, bool pinned, size_t nbytes,
                           struct memory_buffer *buffer);
void cuda_buffer_free(struct memory_buffer *buffer);
rsd_status cuda_pin(struct memory_device *device, void *memory, size_t nbytes);
void cuda_unpin(struct memory_device *device, void *memory);

/* ---- queue.c: work in the order of a stream ---- */

rsd_status cuda_queue_new(struct memory_device *device, struct memory_queue **queue);
void cuda_queue_free(struct memory_queue *queue);
rsd_status cuda_queue_use_stream(struct memory_queue *queue, void *stream);
rsd_status cuda_queue_follow(struct memory_queue *queue, void *stream);
rsd_status cuda_queue_is_idle(struct memory_queue *queue, bool *idle);
rsd_status cuda_queue_wait(struct memory_queue *queue);
rsd_status cuda_queue_mark(struct memory_queue *queue, uint64_t *mark);
rsd_status cuda_queue_test_mark(struct memory_queue *queue, uint64_t mark, bool *done);
rsd_status cuda_queue_wait_mark(struct memory_queue *queue, uint64_t mark);
rsd_status cuda_queue_run(struct memory_queue *queue, const struct device_ops *ops,
                          const void *const *arrays, size_t narrays);
rsd_status cuda_program_new(struct memory_device *device, const struct device_ops *ops,
                            size_t narrays, struct memory_program **program);
rsd_status cuda_program_run(struct memory_program *program, struct memory_queue *queue,
                            const void *const *arrays);
void cuda_program_free(struct memory_program *program);

/* ---- share.c: device memory of other processes of the host ---- */

rsd_status cuda_export(struct memory_device *device, const void *address, size_t nbytes,
                       struct memory_pieces *pieces, uint64_t *offset);
void cuda_unexport(const struct memory_piece *pieces, size_t n);
rsd_status cuda_import(struct memory_device *device, const struct memory_piece *pieces, size_t n,
                       struct memory_mapping **mapping);
void cuda_unmap(struct memory_mapping *mapping);

/* ---- device_digest.c ---- */

rsd_status cuda_digest(struct memory_queue *queue, const struct digest_rows *rows, size_t n,
                       uint64_t (*results)[2], size_t nresults);

#endif
