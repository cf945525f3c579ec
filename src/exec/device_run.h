/* device_run.h - runs in one process by kernels of a CUDA device. Private to exec. */
#ifndef DEVICE_RUN_H
#define DEVICE_RUN_H

#include "cuda.h"
#include "program.h"

/* Returns the device whose kernels must do a run, or -1 if the CPU can do it. With `ordered`, the run belongs
 * into a stream, so managed memory is left to kernels too. */
int device_run_choose(const struct run_arrays *arrays, bool ordered);

/* What an exec keeps between its runs on a device. */
struct device_run;

/* Queues a run. Sets *pageable if an array lies in pageable memory: then the caller must wait before the memory
 * is used. *run starts as NULL. EUNSUPPORTED: a library is missing, or the device cannot use an array. */
rsd_status device_run_start(struct device_run **run, int device, const struct program *program,
                            const struct run_arrays *arrays, void *stream, bool *pageable);
rsd_status device_run_wait(struct device_run *run);
void device_run_free(struct device_run *run); /* accepts NULL */

#endif
