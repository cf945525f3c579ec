/* gpu.h - memory of all kinds for tests with a GPU, or with the emulator of one. */
#ifndef GPU_H
#define GPU_H

#include "oracle.h"

enum gpu_kind { PAGEABLE, PINNED, ON_MANAGED, ON_GPU, ON_BLOCKS, NGPU_KINDS };

/* Loads libcuda and makes a context. Starts the program again with the emulator's libraries, unless the
 * environment has RESHARD_GPU=1. Must be the first call of main. Returns false if there is no GPU. */
bool gpu_open(char **argv);
bool gpu_is_emulated(void);

/* Loads libcuda only: the child of a fork may do it. */
void gpu_start(void);

/* How many devices there are. The emulator has three: 0 and 1 can access each other's memory, 2 is alone. */
int gpu_ndevices(void);

/* Chooses the device of what this thread allocates and makes from now on. After gpu_start it is 0. */
void gpu_use_device(int ordinal);

void *gpu_new(enum gpu_kind kind, size_t nbytes);
void gpu_free(enum gpu_kind kind, void *address);
void gpu_put(enum gpu_kind kind, void *to, const void *from, size_t nbytes);
void gpu_get(enum gpu_kind kind, void *to, const void *from, size_t nbytes);

void *gpu_stream_new(void);
/* A stream whose work the default stream waits for. */
void *gpu_blocking_stream_new(void);
void gpu_stream_wait(void *stream);
/* Queues bytes of one value in the order of a stream. */
void gpu_fill_async(void *to, int value, size_t nbytes, void *stream);

/* Whether an address is on a device, where the CPU cannot use it. */
bool gpu_is_device_memory(const void *address);

void gpu_copy_async(void *to, const void *from, size_t nbytes, void *stream);

/* A kernel of this source, which NVRTC compiles, and a launch of it with 256 threads per block. Not emulated. */
void *gpu_kernel_new(const char *source, const char *name);
void gpu_launch(void *kernel, unsigned nblocks, void **parameters, void *stream);

/* Takes all memory of the device, and releases it. */
void gpu_take_memory(void);
void gpu_release_memory(void);

/* Arrays of the same sizes as those of the oracle, each of the kind that a bit pattern chooses. */
struct gpu_memory {
    int64_t narrays;
    void **array;
    size_t *nbytes;
    enum gpu_kind *kinds;
    int *devices; /* that were current when they were made */
};
struct gpu_memory gpu_memory_of(const struct memory *memory, enum gpu_kind (*choose)(void *),
                                void *context);
void gpu_memory_put(struct gpu_memory *to, const struct memory *from);
void gpu_memory_get(struct memory *to, const struct gpu_memory *from);
void gpu_memory_free(struct gpu_memory *memory);

#endif
