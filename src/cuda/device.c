/* device.c - the devices of this process: their contexts, their kernels, and which address is whose.
 *
 * A device is opened once and stays open: its primary context is retained, and each kernel is compiled
 * at its first use, in a tenth of a second.
 */
#include "device.h"

#include <errno.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MAX_DEVICES = 64 };

static struct {
    pthread_mutex_t lock;
    struct cuda_device *list[MAX_DEVICES];
} devices = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- addresses ---- */

bool cuda_is_loaded(void)
{
    return driver_if_loaded() != NULL;
}

/* The driver does not answer in the child of a fork, where memory of devices cannot be read. */
static bool is_readable(const void *address)
{
    char byte;
    struct iovec here = {&byte, 1}, there = {without_const(address), 1};
    return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1 || errno != EFAULT;
}

struct cuda_place cuda_find_place(const void *address)
{
    const struct driver *cu = driver_if_loaded();
    unsigned type = 0;
    int ordinal = -1;
    uint64_t managed = 0; /* how many bytes of it are written depends on the driver */
    uint64_t number = 0;
    int attributes[] = {CU_POINTER_MEMORY_TYPE, CU_POINTER_DEVICE_ORDINAL, CU_POINTER_IS_MANAGED,
                        CU_POINTER_BUFFER_ID};
    void *values[] = {&type, &ordinal, &managed, &number};
    cu_result result =
        cu ? cu->cuPointerGetAttributes(4, attributes, values, (cu_address)(uintptr_t)address) : 0;
    if (!cu || result || type == 0)
        return (struct cuda_place){
            .device = -1, .for_host = !result || !driver_is_forked() || is_readable(address)};
    bool pinned = type == CU_MEMORY_TYPE_HOST && !managed;
    return (struct cuda_place){.device = pinned ? -1 : ordinal,
                               .for_kernels = true,
                               .for_host = pinned || managed,
                               .allocation = number};
}

/* ---- devices ---- */

/* Reads what is needed to know of a device, and retains its primary context. */
static rsd_status open_context(const struct driver *cu, int ordinal, struct cuda_device *device)
{
    device->cu = cu;
    device->ordinal = ordinal;
    pthread_mutex_init(&device->lock, NULL);
    CU_TRY(cuDeviceGet, &device->device, ordinal);
    CU_TRY(cuDeviceGetAttribute, &device->major, CU_DEVICE_MAJOR, device->device);
    CU_TRY(cuDeviceGetAttribute, &device->minor, CU_DEVICE_MINOR, device->device);
    CU_TRY(cuDeviceGetAttribute, &device->nprocessors, CU_DEVICE_MULTIPROCESSORS, device->device);
    CU_TRY(cuDevicePrimaryCtxRetain, &device->context, device->device);
    return RSD_OK;
}

rsd_status cuda_open_device(int ordinal, struct cuda_device **out)
{
    const struct driver *cu;
    TRY(driver_open(&cu));
    if (ordinal < 0 || ordinal >= MAX_DEVICES)
        return fail(RSD_ELIMIT, "CUDA device %d: at most %d devices are supported", ordinal,
                    MAX_DEVICES);
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&devices.lock);
    if (!devices.list[ordinal]) {
        struct cuda_device *device = mem_new(1, sizeof *device);
        status = device ? open_context(cu, ordinal, device) : RSD_ENOMEM;
        if (status)
            mem_free(device);
        else
            devices.list[ordinal] = device;
    }
    *out = devices.list[ordinal];
    pthread_mutex_unlock(&devices.lock);
    return status;
}

rsd_status device_enter(const struct cuda_device *device)
{
    return driver_check(device->cu->cuCtxPushCurrent(device->context), "cuCtxPushCurrent");
}

void device_leave(const struct cuda_device *device)
{
    cu_context context;
    device->cu->cuCtxPopCurrent(&context);
}

rsd_status device_upload(const struct cuda_device *device, cu_address to, const void *from,
                         size_t nbytes)
{
    const struct driver *cu = device->cu;
    CU_TRY(cuMemcpyHtoD, to, from, nbytes);
    CU_TRY(cuStreamSynchronize, NULL);
    return RSD_OK;
}

rsd_status cuda_enable_peer(struct cuda_device *device, int other, bool *can)
{
    const struct driver *cu = device->cu;
    struct cuda_device *peer;
    int possible = 1;
    *can = true;
    if (other == device->ordinal)
        return RSD_OK;
    TRY(cuda_open_device(other, &peer));
    CU_TRY(cuDeviceCanAccessPeer, &possible, device->device, peer->device);
    *can = possible != 0;
    if (!possible)
        return RSD_OK;
    TRY(device_enter(device));
    cu_result result = cu->cuCtxEnablePeerAccess(peer->context, 0);
    device_leave(device);
    return result == CU_PEER_ACCESS_ALREADY_ENABLED ? RSD_OK
                                                    : driver_check(result, "cuCtxEnablePeerAccess");
}

rsd_status cuda_memory_new(struct cuda_device *device, size_t nbytes, char **memory)
{
    cu_address address = 0;
    TRY(device_enter(device));
    cu_result result = device->cu->cuMemAlloc(&address, nbytes);
    device_leave(device);
    if (result == CU_OUT_OF_MEMORY)
        return fail(RSD_ENOMEM, "CUDA device %d has no memory for buffers of %zu bytes",
                    device->ordinal, nbytes);
    TRY(driver_check(result, "cuMemAlloc"));
    *memory = (char *)(uintptr_t)address;
    return RSD_OK;
}

void cuda_memory_free(struct cuda_device *device, char *memory)
{
    if (!memory || device_enter(device))
        return;
    device->cu->cuMemFree((cu_address)(uintptr_t)memory);
    device_leave(device);
}

/* ---- kernels ---- */

/* Compiles a kernel for the device, and loads it. Requires the context of the device. */
static rsd_status load_kernel(struct cuda_device *device, enum kernel_id id)
{
    const struct driver *cu = device->cu;
    void *image;
    cu_module module;
    TRY(nvrtc_compile(kernels[id].source, device->major, device->minor, &image));
    rsd_status status = driver_check(cu->cuModuleLoadData(&module, image), "cuModuleLoadData");
    mem_free(image);
    TRY(status);
    CU_TRY(cuModuleGetFunction, &device->functions[id], module, kernels[id].name);
    return RSD_OK;
}

/* In the context of the device. */
rsd_status device_kernel(struct cuda_device *device, enum kernel_id id, cu_function *function)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&device->lock);
    if (!device->functions[id])
        status = load_kernel(device, id);
    *function = device->functions[id];
    pthread_mutex_unlock(&device->lock);
    return status;
}
