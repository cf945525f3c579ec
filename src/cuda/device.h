/* device.h - private to cuda: a device, its context and its kernels. */
#ifndef DEVICE_H
#define DEVICE_H

#include "cuda.h"
#include "driver.h"
#include "kernels.h"

#include <pthread.h>

struct cuda_device {
    struct memory_device base;
    const struct driver *cu;
    int major, minor, nprocessors;
    cu_device device;
    cu_context context;
    pthread_mutex_t lock; /* of what follows */
    uint64_t accessible;  /* a bit for each other device whose memory kernels may use */
    cu_function functions[NKERNELS];
    struct cuda_queue *kept;  /* queues for the next user */
    cu_address digest_tables; /* powers, then nibbles; 0: not made yet */
};

static inline struct cuda_device *cuda_device_of(struct memory_device *device)
{
    return (struct cuda_device *)(void *)device;
}

/* Makes the context of the device current until device_leave. */
rsd_status device_enter(const struct cuda_device *device);
void device_leave(const struct cuda_device *device);

/* Lets kernels of the device use memory of the virtual memory interface that lies on another device: it has its own
 * list of devices that may. Does nothing for other memory. EUNSUPPORTED: memory of a pool. */
rsd_status device_allow_mapped(const struct cuda_device *device, cu_address address, size_t nbytes);

/* Copies bytes to the device, and waits: for small copies the driver returns before the bytes are there, and kernels of
 * other streams would not wait for them. Requires device_enter. */
rsd_status device_upload(const struct cuda_device *device, cu_address to, const void *from,
                         size_t nbytes);

/* A kernel, compiled at its first use. Requires device_enter. */
rsd_status device_kernel(struct cuda_device *device, enum kernel_id id, cu_function *function);

#endif
