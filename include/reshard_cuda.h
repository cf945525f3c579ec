/* reshard_cuda.h - tensors in the memory of CUDA devices.
 *
 * Arrays of a run, a load, a save and a digest may lie in pageable, pinned or managed host memory, or in the
 * memory of a CUDA device, in any combination. The library finds out from the address. It loads libcuda.so.1 and
 * NVRTC at run time, and only if the process uses CUDA. It works in the primary context of the device, which is
 * the one of the CUDA runtime and of PyTorch. docs/gpu.md says what is copied by which way.
 */
#ifndef RESHARD_CUDA_H
#define RESHARD_CUDA_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Orders the next runs of an exec in a CUDA stream (a CUstream or cudaStream_t; NULL: the default stream). A run
 * begins after the work that was queued in the stream before it. Without this call the default stream is used.
 * cudaStreamLegacy and cudaStreamPerThread are streams of the device of the first array on a device, and the second is
 * that of the thread that calls rsd_exec_run.
 *
 * After this call, rsd_exec_run of an exec in one process returns when its work is queued, and later work of the
 * stream follows it. It still waits if an array lies in pageable memory. rsd_exec_wait always waits. Runs between
 * processes return when all data has arrived. Since 0.2. */
rsd_status rsd_exec_set_stream(rsd_exec *exec, void *stream);

#ifdef __cplusplus
}
#endif

#endif
