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

bool cuda_find_place(const void *address, struct memory_place *place)
{
    const struct driver *cu = driver_if_loaded();
    unsigned type = 0;
    int ordinal = -1;
    uint64_t managed = 0; /* how many bytes of it are written depends on the driver */
    uint64_t number = 0;
    int attributes[] = {CU_POINTER_MEMORY_TYPE, CU_POINTER_DEVICE_ORDINAL, CU_POINTER_IS_MANAGED,
                        CU_POINTER_BUFFER_ID};
    void *values[] = {&type, &ordinal, &managed, &number};
    if (!cu)
        return false;
    cu_result result =
        cu->cuPointerGetAttributes(4, attributes, values, (cu_address)(uintptr_t)address);
    if (result || type == 0) /* of a parent's memory only the kind is known */
        return result && driver_is_forked() && !is_readable(address);
    bool pinned = type == CU_MEMORY_TYPE_HOST && !managed;
    place->device = pinned ? -1 : ordinal;
    place->for_kernels = true;
    place->for_host = pinned || managed;
    place->allocation = number;
    return true;
}

/* ---- devices ---- */

/* Reads what is needed to know of a device, and retains its primary context. */
static rsd_status open_context(const struct driver *cu, int ordinal, struct cuda_device *device)
{
    device->base = (struct memory_device){&cuda_kind, ordinal};
    device->cu = cu;
    pthread_mutex_init(&device->lock, NULL);
    CU_TRY(cuDeviceGet, &device->device, ordinal);
    CU_TRY(cuDeviceGetAttribute, &device->major, CU_DEVICE_MAJOR, device->device);
    CU_TRY(cuDeviceGetAttribute, &device->minor, CU_DEVICE_MINOR, device->device);
    CU_TRY(cuDeviceGetAttribute, &device->nprocessors, CU_DEVICE_MULTIPROCESSORS, device->device);
    CU_TRY(cuDevicePrimaryCtxRetain, &device->context, device->device);
    return RSD_OK;
}

rsd_status cuda_open_device(int ordinal, struct memory_device **out)
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
    if (!status)
        *out = &devices.list[ordinal]->base;
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

/* Requires the lock of the device. */
static rsd_status enable_peer(struct cuda_device *device, int other)
{
    const struct driver *cu = device->cu;
    struct memory_device *opened;
    int possible;
    TRY(cuda_open_device(other, &opened));
    const struct cuda_device *peer = cuda_device_of(opened);
    CU_TRY(cuDeviceCanAccessPeer, &possible, device->device, peer->device);
    if (!possible)
        return fail(RSD_EUNSUPPORTED, "CUDA device %d cannot access the memory of device %d",
                    device->base.ordinal, other);
    TRY(device_enter(device));
    cu_result result = cu->cuCtxEnablePeerAccess(peer->context, 0);
    device_leave(device);
    return result == CU_PEER_ACCESS_ALREADY_ENABLED ? RSD_OK
                                                    : driver_check(result, "cuCtxEnablePeerAccess");
}

rsd_status cuda_enable_access(struct memory_device *base, int other, const void *address,
                              size_t nbytes)
{
    struct cuda_device *device = cuda_device_of(base);
    rsd_status status = RSD_OK;
    if (other == base->ordinal)
        return RSD_OK;
    pthread_mutex_lock(&device->lock);
    if (other >= MAX_DEVICES || !(device->accessible >> other & 1))
        status = enable_peer(device, other);
    if (!status)
        device->accessible |= (uint64_t)1 << other;
    pthread_mutex_unlock(&device->lock);
    return status ? status : device_allow_mapped(device, (cu_address)(uintptr_t)address, nbytes);
}

/* ---- streams ---- */

rsd_status cuda_open_stream_device(void *stream, int ordinal, struct memory_device **out)
{
    const struct driver *cu;
    cu_context context;
    cu_device device;
    if ((uintptr_t)stream <=
        CU_STREAM_PER_THREAD) /* of every device, and perhaps none is current */
        return cuda_open_device(ordinal, out);
    TRY(driver_open(&cu));
    CU_TRY(cuStreamGetCtx, stream, &context);
    CU_TRY(cuCtxPushCurrent, context);
    cu_result result = cu->cuCtxGetDevice(&device);
    cu->cuCtxPopCurrent(&context);
    TRY(driver_check(result, "cuCtxGetDevice"));
    return cuda_open_device(device, out); /* a device is its ordinal */
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
