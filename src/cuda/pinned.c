/* pinned.c - buffers in pinned host memory, made once and kept.
 *
 * To pin memory takes tens of milliseconds for each GiB, so buffers that are released are kept for the next
 * user, up to KEEP_NBYTES in all. Kernels of every device read and write them directly.
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

rsd_status cuda_pinned_new(struct cuda_device *device, size_t nbytes, struct cuda_pinned *out)
{
    out->memory = take_kept(nbytes, &out->nbytes);
    if (out->memory)
        return RSD_OK;
    TRY(device_enter(device));
    void *memory = NULL;
    cu_result result = device->cu->cuMemHostAlloc(&memory, nbytes, PORTABLE);
    device_leave(device);
    if (result == CU_OUT_OF_MEMORY)
        return fail(RSD_ENOMEM, "cannot pin %zu bytes of host memory", nbytes);
    TRY(driver_check(result, "cuMemHostAlloc"));
    *out = (struct cuda_pinned){memory, nbytes};
    return RSD_OK;
}

void cuda_pinned_free(struct cuda_device *device, struct cuda_pinned *pinned)
{
    if (pinned->memory && !keep_buffer(pinned->memory, pinned->nbytes) && !device_enter(device)) {
        device->cu->cuMemFreeHost(pinned->memory);
        device_leave(device);
    }
    *pinned = (struct cuda_pinned){0};
}

rsd_status cuda_register(struct cuda_device *device, void *memory, size_t nbytes)
{
    TRY(device_enter(device));
    cu_result result = device->cu->cuMemHostRegister(memory, nbytes, PORTABLE);
    if (result) /* a source may be memory that must not be written */
        result = device->cu->cuMemHostRegister(memory, nbytes, PORTABLE | READ_ONLY);
    device_leave(device);
    if (result == CU_OUT_OF_MEMORY)
        return fail(RSD_ENOMEM, "cannot pin %zu bytes of host memory", nbytes);
    return driver_check(result, "cuMemHostRegister");
}

void cuda_unregister(struct cuda_device *device, void *memory)
{
    if (device_enter(device))
        return;
    device->cu->cuMemHostUnregister(memory);
    device_leave(device);
}
