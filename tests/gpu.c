/* gpu.c - see gpu.h. Functions of the driver are found by their names. */
#include "gpu.h"
#include "driver.h"

#include <dlfcn.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK_NBYTES = 2 << 20, NBLOCKED = 4096 };

static void *library;

/* A failure of the driver ends the test: nothing can be concluded then. */
static void need(int result, const char *call)
{
    if (result == 0)
        return;
    printf("Bail out! %s failed: %d\n", call, result);
    exit(1);
}

static void *find(const char *name)
{
    void *function = library ? dlsym(library, name) : NULL;
    if (!function)
        need(-1, name);
    return function;
}

#define CALL(name, types, ...)                                                                     \
    do {                                                                                           \
        int(*function_) types;                                                                     \
        *(void **)(void *)&function_ = find(name);                                                 \
        need(function_(__VA_ARGS__), name);                                                        \
    } while (0)

bool gpu_is_emulated(void)
{
    return !getenv("RESHARD_GPU");
}

bool gpu_open(char **argv)
{
    char path[4096], *self = realpath("/proc/self/exe", NULL);
    if (gpu_is_emulated() && self) {
        char *directory = dirname(self); /* of the test, or of those over MPI below it */
        snprintf(path, sizeof path, "%s/emulator", directory);
        if (access(path, F_OK) != 0)
            snprintf(path, sizeof path, "%s/../emulator", directory);
        const char *now = getenv("LD_LIBRARY_PATH");
        if (!now || strcmp(now, path) != 0) {
            setenv("LD_LIBRARY_PATH", path, 1);
            execv("/proc/self/exe", argv);
        }
    }
    free(self);
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library != NULL;
}

static _Thread_local int current = -1; /* the device of this thread */

void gpu_start(void)
{
    CALL("cuInit", (unsigned), 0);
    gpu_use_device(0);
}

int gpu_ndevices(void)
{
    int count = 0;
    CALL("cuDeviceGetCount", (int *), &count);
    return count;
}

void gpu_use_device(int ordinal)
{
    void *context;
    int device;
    if (ordinal == current)
        return;
    if (current >= 0)
        CALL("cuCtxPopCurrent_v2", (void **), &context);
    CALL("cuDeviceGet", (int *, int), &device, ordinal);
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, device);
    CALL("cuCtxPushCurrent_v2", (void *), context);
    current = ordinal;
}

/* ---- memory ---- */

/* An address range that is mapped block by block, as PyTorch's expandable segments are. */
static struct blocked {
    uint64_t address;
    size_t nbytes;
} blocked[NBLOCKED];

/* What cuMemCreate expects. */
struct block_properties {
    int type, handle_types;
    struct {
        int type, id;
    } location;
    void *meta;
    unsigned char flags[32];
};

static void *new_blocks(size_t nbytes)
{
    struct block_properties properties = {.type = 1, .handle_types = 1, .location = {1, current}};
    struct {
        int type, id, flags;
    } access = {1, current, 3};
    size_t length = (nbytes + BLOCK_NBYTES - 1) / BLOCK_NBYTES * BLOCK_NBYTES;
    uint64_t address, handle;
    length = length ? length : BLOCK_NBYTES;
    CALL("cuMemAddressReserve", (uint64_t *, size_t, size_t, uint64_t, uint64_t), &address, length,
         0, 0, 0);
    for (size_t at = 0; at < length; at += BLOCK_NBYTES) {
        CALL("cuMemCreate", (uint64_t *, size_t, const void *, uint64_t), &handle, BLOCK_NBYTES,
             &properties, 0);
        CALL("cuMemMap", (uint64_t, size_t, size_t, uint64_t, uint64_t), address + at, BLOCK_NBYTES,
             0, handle, 0);
        CALL("cuMemRelease", (uint64_t), handle);
    }
    CALL("cuMemSetAccess", (uint64_t, size_t, const void *, size_t), address, length, &access, 1);
    for (size_t i = 0; i < NBLOCKED; i++)
        if (!blocked[i].address) {
            blocked[i] = (struct blocked){address, length};
            break;
        }
    return (void *)(uintptr_t)address;
}

static void free_blocks(void *address)
{
    for (size_t i = 0; i < NBLOCKED; i++)
        if (blocked[i].address == (uint64_t)(uintptr_t)address) {
            CALL("cuMemUnmap", (uint64_t, size_t), blocked[i].address, blocked[i].nbytes);
            CALL("cuMemAddressFree", (uint64_t, size_t), blocked[i].address, blocked[i].nbytes);
            blocked[i] = (struct blocked){0};
            return;
        }
}

void *gpu_new(enum gpu_kind kind, size_t nbytes)
{
    void *host = NULL;
    uint64_t address = 0;
    if (kind == PAGEABLE)
        return malloc(nbytes ? nbytes : 1);
    if (kind == ON_BLOCKS)
        return new_blocks(nbytes);
    if (kind == PINNED) {
        CALL("cuMemHostAlloc", (void **, size_t, unsigned), &host, nbytes ? nbytes : 1, 0);
        return host;
    }
    if (kind == ON_MANAGED)
        CALL("cuMemAllocManaged", (uint64_t *, size_t, unsigned), &address, nbytes ? nbytes : 1, 1);
    else
        CALL("cuMemAlloc_v2", (uint64_t *, size_t), &address, nbytes ? nbytes : 1);
    return (void *)(uintptr_t)address;
}

void gpu_free(enum gpu_kind kind, void *address)
{
    if (kind == PAGEABLE)
        free(address);
    else if (kind == PINNED)
        CALL("cuMemFreeHost", (void *), address);
    else if (kind == ON_BLOCKS)
        free_blocks(address);
    else
        CALL("cuMemFree_v2", (uint64_t), (uint64_t)(uintptr_t)address);
}

static bool is_on_device(enum gpu_kind kind)
{
    return kind == ON_GPU || kind == ON_BLOCKS;
}

void gpu_put(enum gpu_kind kind, void *to, const void *from, size_t nbytes)
{
    if (nbytes == 0)
        return;
    if (is_on_device(kind))
        CALL("cuMemcpyHtoD_v2", (uint64_t, const void *, size_t), (uint64_t)(uintptr_t)to, from,
             nbytes);
    else
        memcpy(to, from, nbytes);
}

void gpu_get(enum gpu_kind kind, void *to, const void *from, size_t nbytes)
{
    if (nbytes == 0)
        return;
    if (is_on_device(kind))
        CALL("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), to, (uint64_t)(uintptr_t)from, nbytes);
    else
        memcpy(to, from, nbytes);
}

/* ---- streams ---- */

void *gpu_stream_new(void)
{
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    return stream;
}

void *gpu_blocking_stream_new(void)
{
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 0);
    return stream;
}

void gpu_stream_wait(void *stream)
{
    CALL("cuStreamSynchronize", (void *), stream);
}

void gpu_fill_async(void *to, int value, size_t nbytes, void *stream)
{
    CALL("cuMemsetD8Async", (uint64_t, unsigned char, size_t, void *), (uint64_t)(uintptr_t)to,
         (unsigned char)value, nbytes, stream);
}

bool gpu_is_device_memory(const void *address)
{
    enum { MEMORY_TYPE = 2, IS_MANAGED = 8, TYPE_DEVICE = 2 };
    unsigned type = 0;
    uint64_t managed = 0;
    int attributes[] = {MEMORY_TYPE, IS_MANAGED};
    void *values[] = {&type, &managed};
    CALL("cuPointerGetAttributes", (unsigned, int *, void **, uint64_t), 2, attributes, values,
         (uint64_t)(uintptr_t)address);
    return type == TYPE_DEVICE && !managed;
}

void gpu_copy_async(void *to, const void *from, size_t nbytes, void *stream)
{
    CALL("cuMemcpyAsync", (uint64_t, uint64_t, size_t, void *), (uint64_t)(uintptr_t)to,
         (uint64_t)(uintptr_t)from, nbytes, stream);
}

/* ---- kernels ---- */

void *gpu_kernel_new(const char *source, const char *name)
{
    const char *sources[] = {source, NULL};
    void *image = NULL, *module = NULL, *kernel = NULL;
    int device = 0, major = 0, minor = 0;
    CALL("cuDeviceGet", (int *, int), &device, 0);
    CALL("cuDeviceGetAttribute", (int *, int, int), &major, 75, device);
    CALL("cuDeviceGetAttribute", (int *, int, int), &minor, 76, device);
    need((int)nvrtc_compile(sources, major, minor, &image), rsd_error());
    CALL("cuModuleLoadData", (void **, const void *), &module, image);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &kernel, module, name);
    rsd_free(image);
    return kernel;
}

void gpu_launch(void *kernel, unsigned nblocks, void **parameters, void *stream)
{
    CALL("cuLaunchKernel",
         (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
          void **, void **),
         kernel, nblocks, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
}

/* ---- no memory ---- */

enum { NTAKEN = 1 << 20, SMALLEST = 256 };
static uint64_t *taken;
static size_t ntaken;

void gpu_take_memory(void)
{
    int (*alloc)(uint64_t *, size_t);
    if (gpu_is_emulated()) {
        setenv("EMULATED_DEVICE_NBYTES", "1", 1);
        return;
    }
    *(void **)(void *)&alloc = find("cuMemAlloc_v2");
    taken = calloc(NTAKEN, sizeof *taken);
    for (size_t nbytes = (size_t)64 << 30; taken && nbytes >= SMALLEST; nbytes /= 2)
        while (ntaken < NTAKEN && alloc(&taken[ntaken], nbytes) == 0)
            ntaken++;
}

void gpu_release_memory(void)
{
    unsetenv("EMULATED_DEVICE_NBYTES");
    while (ntaken > 0)
        CALL("cuMemFree_v2", (uint64_t), taken[--ntaken]);
    free(taken);
    taken = NULL;
}

/* ---- arrays of the oracle ---- */

struct gpu_memory gpu_memory_of(const struct memory *memory, enum gpu_kind (*choose)(void *),
                                void *context)
{
    size_t n = (size_t)memory->narrays;
    struct gpu_memory made = {memory->narrays, calloc(n + 1, sizeof(void *)),
                              calloc(n + 1, sizeof(size_t)), calloc(n + 1, sizeof(enum gpu_kind)),
                              calloc(n + 1, sizeof(int))};
    if (!made.array || !made.nbytes || !made.kinds || !made.devices)
        need(-1, "calloc");
    for (size_t i = 0; i < n; i++) {
        made.nbytes[i] = memory->nbytes[i];
        made.kinds[i] = choose(context);
        made.devices[i] = current;
        made.array[i] = memory->array[i] ? gpu_new(made.kinds[i], made.nbytes[i]) : NULL;
    }
    return made;
}

void gpu_memory_put(struct gpu_memory *to, const struct memory *from)
{
    for (int64_t i = 0; i < to->narrays; i++)
        if (to->array[i])
            gpu_put(to->kinds[i], to->array[i], from->array[i], to->nbytes[i]);
}

void gpu_memory_get(struct memory *to, const struct gpu_memory *from)
{
    for (int64_t i = 0; i < to->narrays; i++)
        if (from->array[i])
            gpu_get(from->kinds[i], to->array[i], from->array[i], from->nbytes[i]);
}

void gpu_memory_free(struct gpu_memory *memory)
{
    for (int64_t i = 0; i < memory->narrays; i++)
        if (memory->array[i])
            gpu_free(memory->kinds[i], memory->array[i]);
    free(memory->array);
    free(memory->nbytes);
    free(memory->kinds);
    free(memory->devices);
}
