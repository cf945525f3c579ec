/* buffers.c - buffers in device memory and in pinned host memory, and memory of the caller that is pinned.
 *
 * To pin memory takes tens of milliseconds for each GiB, so pinned buffers that are released are kept for the next
 * user, up to keep_nbytes in all. Kernels of every device read and write them directly.
 */
#include "device.h"

enum { PORTABLE = 1, READ_ONLY = 8, NKEPT = 256 };
static const size_t keep_nbytes = (size_t)256 << 20;

struct pinned_buffer {
    void *memory;
    size_t nbytes;
};

static struct {
    pthread_mutex_t lock;
    struct pinned_buffer kept[NKEPT];
    size_t n, nbytes;
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- pinned buffers that are kept ---- */

/* Takes the smallest kept buffer of at least nbytes, and at most twice as many; NULL: none. */
static void *take_kept(size_t nbytes, size_t *capacity)
{
    size_t best = NKEPT;
    void *memory = NULL;
    pthread_mutex_lock(&cache.lock);
    for (size_t i = 0; i < cache.n; i++)
        if (cache.kept[i].nbytes >= nbytes && cache.kept[i].nbytes / 2 <= nbytes &&
            (best == NKEPT || cache.kept[i].nbytes < cache.kept[best].nbytes))
            best = i;
    if (best < NKEPT) {
        memory = cache.kept[best].memory;
        *capacity = cache.kept[best].nbytes;
        cache.nbytes -= *capacity;
        cache.kept[best] = cache.kept[--cache.n];
    }
    pthread_mutex_unlock(&cache.lock);
    return memory;
}

/* Returns whether a buffer is kept for the next user: if few and small ones are. */
static bool keep_buffer(void *memory, size_t nbytes)
{
    pthread_mutex_lock(&cache.lock);
    bool keep = cache.n < NKEPT && cache.nbytes + nbytes <= keep_nbytes;
    if (keep) {
        cache.kept[cache.n++] = (struct pinned_buffer){memory, nbytes};
        cache.nbytes += nbytes;
    }
    pthread_mutex_unlock(&cache.lock);
    return keep;
}

/* ---- buffers ---- */

static rsd_status allocate_pinned(const struct cuda_device *device, size_t nbytes, void **memory)
{
    cu_result result = device->cu->cuMemHostAlloc(memory, nbytes, PORTABLE);
    if (result == CU_OUT_OF_MEMORY)
        return fail(RSD_ENOMEM, "cannot pin %zu bytes of host memory", nbytes);
    return driver_check(result, "cuMemHostAlloc");
}

static rsd_status allocate_device(const struct cuda_device *device, size_t nbytes, void **memory)
{
    cu_address address = 0;
    cu_result result = device->cu->cuMemAlloc(&address, nbytes);
    if (result == CU_OUT_OF_MEMORY)
        return fail(RSD_ENOMEM, "CUDA device %d has no memory for buffers of %zu bytes",
                    device->base.ordinal, nbytes);
    *memory = (void *)(uintptr_t)address;
    return driver_check(result, "cuMemAlloc");
}

rsd_status cuda_buffer_new(struct memory_device *base, bool pinned, size_t nbytes,
                           struct memory_buffer *out)
{
    const struct cuda_device *device = cuda_device_of(base);
    rsd_status status = RSD_OK;
    void *memory = pinned ? take_kept(nbytes, &nbytes) : NULL;
    if (!memory) {
        TRY(device_enter(device));
        status = pinned ? allocate_pinned(device, nbytes, &memory)
                        : allocate_device(device, nbytes, &memory);
        device_leave(device);
    }
    if (!status)
        *out = (struct memory_buffer){base, pinned, memory, nbytes};
    return status;
}

void cuda_buffer_free(struct memory_buffer *buffer)
{
    const struct cuda_device *device = cuda_device_of(buffer->device);
    if ((buffer->pinned && keep_buffer(buffer->memory, buffer->nbytes)) || device_enter(device))
        return;
    if (buffer->pinned)
        device->cu->cuMemFreeHost(buffer->memory);
    else
        device->cu->cuMemFree((cu_address)(uintptr_t)buffer->memory);
    device_leave(device);
}

/* ---- memory of the caller ---- */

rsd_status cuda_pin(struct memory_device *base, void *memory, size_t nbytes)
{
    const struct cuda_device *device = cuda_device_of(base);
    TRY(device_enter(device));
    cu_result result = device->cu->cuMemHostRegister(memory, nbytes, PORTABLE);
    if (result) /* a source may be memory that must not be written */
        result = device->cu->cuMemHostRegister(memory, nbytes, PORTABLE | READ_ONLY);
    device_leave(device);
    if (result == CU_OUT_OF_MEMORY)
        return fail(RSD_ENOMEM, "cannot pin %zu bytes of host memory", nbytes);
    return driver_check(result, "cuMemHostRegister");
}

void cuda_unpin(struct memory_device *base, void *memory)
{
    const struct cuda_device *device = cuda_device_of(base);
    if (device_enter(device))
        return;
    device->cu->cuMemHostUnregister(memory);
    device_leave(device);
}
