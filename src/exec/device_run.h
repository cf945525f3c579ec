/* device_run.h - runs in one process by kernels of a device. Private to exec. */
#ifndef DEVICE_RUN_H
#define DEVICE_RUN_H

#include "device_arrays.h"
#include "program.h"

/* The numbers of the first source and the first destination of a rank, in the addresses of a launch. */
struct array_bases {
    int64_t src, dst;
};
typedef struct array_bases array_bases_of(const void *context, int32_t rank);

/* Adds a copy or a sum of a program, whose destination is array first_dst + dst. */
rsd_status device_add_copy(struct device_ops *ops, const struct program *program,
                           const struct copy_op *op, struct array_bases from, int64_t first_dst);
rsd_status device_add_sum(struct device_ops *ops, const struct program *program,
                          const struct sum_op *sum, array_bases_of *bases_of, const void *context,
                          int64_t first_dst);

/* What an exec keeps between its runs on a device. */
struct device_run;

/* Queues a run. Sets *pageable if an array lies in pageable memory: then the caller must wait before the memory
 * is used. *run starts as NULL. EUNSUPPORTED: a library is missing, or the device cannot use an array. */
rsd_status device_run_start(struct device_run **run, struct memory_device *device,
                            const struct program *program, const struct run_arrays *arrays,
                            void *stream, bool *pageable);
rsd_status device_run_wait(struct device_run *run);
void device_run_free(struct device_run *run); /* accepts NULL */

#endif
