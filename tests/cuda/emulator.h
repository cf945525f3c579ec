/* emulator.h - libcuda.so.1 and libnvrtc.so.13 for tests on machines without a GPU.
 *
 * It is as strict as a GPU, or stricter:
 *
 *   - The CPU cannot use device memory: its addresses are reserved without access. Kernels use a second mapping.
 *   - Kernels cannot use pageable memory: CUDA_ERROR_ILLEGAL_ADDRESS, and everything fails from then on.
 *   - Work in a stream is done as late as possible: when something waits for it, or at the second query of an
 *     event behind it. So a missing wait is a wrong result.
 *   - Kernels are the C code that they share with the GPU (src/cuda/..._code.h), with the tables that are in
 *     memory at the time when they run.
 *   - A call that needs a context fails if the thread has none. Streams, events and kernels belong to the context in
 *     which they were made, and cannot be used in another one.
 *   - Kernels use memory of another device only if access to it was enabled. Access between contexts does not extend
 *     to memory of the virtual memory interface, which has its own.
 *
 * IPC handles and file descriptors work between processes of the host. There are three devices: 0 and 1 can access each
 * other, 2 is alone.
 *
 *     emulator_memory.c    memory, and that of other processes
 *     emulator_streams.c   kernels, streams and events
 *     emulator.c           devices and NVRTC
 */
#ifndef EMULATOR_H
#define EMULATOR_H

#include "driver.h"

#include <pthread.h>

enum { ILLEGAL_ADDRESS = 700, INVALID_VALUE = 1, INVALID_HANDLE = 400 };
enum { INVALID_DEVICE = 101, INVALID_CONTEXT = 201, PEER_ACCESS_UNSUPPORTED = 217 };
enum { NDEVICES = 3 };

/* The primary context of a device. */
struct context {
    int device;
    unsigned peers; /* a bit for each device whose memory kernels may use */
};
struct context *context_current(void); /* of the calling thread; NULL: none */
struct context *context_of(int device);
bool devices_are_peers(int from, int to);

extern pthread_mutex_t emulator_lock;
extern cu_result emulator_failed; /* an error after which everything fails; 0: none */
extern pid_t emulator_process;    /* that called cuInit; 0: none yet */

/* The functions are found by their names, so they have no prototypes. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

#define EXPORT __attribute__((visibility("default")))
#define ENTER                                                                                      \
    pthread_mutex_lock(&emulator_lock);                                                            \
    cu_result result = emulator_failed
#define ENTER_CONTEXT                                                                              \
    ENTER;                                                                                         \
    struct context *context = context_current();                                                   \
    if (!result && !context)                                                                       \
    result = INVALID_CONTEXT
#define LEAVE                                                                                      \
    pthread_mutex_unlock(&emulator_lock);                                                          \
    return result

/* Where the CPU finds memory that a kernel of a device uses. NULL: the kernel cannot use it, which is an error from then
 * on. */
char *memory_for_kernel(int device, uint64_t address);
/* The same without an error. */
char *memory_find(uint64_t address);

/* Does all work that is queued. */
void streams_run_all(void);

#endif
