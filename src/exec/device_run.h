/* device_run.h - runs in one process by kernels of a device. Private to exec. */
#ifndef DEVICE_RUN_H
#define DEVICE_RUN_H

#include "device_arrays.h"
#include "program.h"

/* Adds the copies of a stage from the arrays of one rank; with RSD_EVERY_RANK all of them, and in stage 0 all sums. */
rsd_status device_add_stage(struct device_ops *ops, const struct program *program, int32_t stage,
                            int32_t sender);

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
