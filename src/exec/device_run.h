/* device_run.h - runs in one process by kernels of a CUDA device. Private to exec. */
#ifndef DEVICE_RUN_H
#define DEVICE_RUN_H

#include "device_arrays.h"
#include "program.h"

/* Adds a copy of a program. Its source is array op->src of the sources, or nsrc + op->src of the destinations that
 * follow them; its destination is array first_dst + op->dst. */
rsd_status device_add_copy(struct cuda_ops *ops, const struct program *program,
                           const struct copy_op *op, int64_t nsrc, int64_t first_dst);

/* What an exec keeps between its runs on a device. */
struct device_run;

/* Queues a run. Sets *pageable if an array lies in pageable memory: then the caller must wait before the memory
 * is used. *run starts as NULL. EUNSUPPORTED: a library is missing, or the device cannot use an array. */
rsd_status device_run_start(struct device_run **run, int device, const struct program *program,
                            const struct run_arrays *arrays, void *stream, bool *pageable);
rsd_status device_run_wait(struct device_run *run);
void device_run_free(struct device_run *run); /* accepts NULL */

#endif
