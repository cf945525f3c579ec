/* emulator_memory.c - memory of the emulator. */
#include "emulator.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_RANGES = 1 << 12 };
enum { UNUSED, RESERVED, ON_DEVICE, HOST, MANAGED, MAPPED };

/* A range of addresses that CUDA knows. */
struct range {
    char *visible, *shadow; /* what callers see, and where the CPU finds it */
    size_t nbytes;
    int kind, fd;
    uint64_t id;
    int device;
    bool own; /* allocated by this process */
    unsigned
        accessible; /* a bit for each device whose kernels may use it, whatever their contexts allow */
};

static struct range ranges[MAX_RANGES];
static size_t nranges;
static uint64_t next_id = 1;

/* ---- memory ---- */

static struct range *find_range(cu_address address)
{
    static struct range *recent = ranges; /* most accesses follow others */
    if (recent->visible && recent->kind > RESERVED &&
        address - (cu_address)(uintptr_t)recent->visible < recent->nbytes)
        return recent;
    for (size_t i = nranges; i-- > 0;) {
        struct range *range = &ranges[i];
        if (range->visible && range->kind > RESERVED &&
            address - (cu_address)(uintptr_t)range->visible < range->nbytes)
            return recent = range;
    }
    return NULL;
}

static struct range *add_range(char *visible, char *shadow, size_t nbytes, int kind, int fd)
{
    size_t i = 0;
    while (i < nranges && ranges[i].kind != UNUSED)
        i++;
    if (i == MAX_RANGES)
        abort();
    nranges += i == nranges;
    ranges[i] = (struct range){.visible = visible,
                               .shadow = shadow,
                               .nbytes = nbytes,
                               .kind = kind,
                               .fd = fd,
                               .accessible = kind == HOST || kind == MANAGED ? ~0u : 0};
    ranges[i].id = (uint64_t)getpid() << 32 | next_id++;
    return &ranges[i];
}

static size_t whole_pages(size_t nbytes)
{
    return (nbytes + 4095) / 4096 * 4096;
}

/* The name of a memory file ends with the device that it stands for. */
static int new_memory_file(int device)
{
    char name[] = "device 0";
    name[sizeof name - 2] += (char)device;
    return memfd_create(name, 0);
}

static int device_of_file(int fd)
{
    char path[64], name[64] = {0};
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, name, sizeof name - 1); /* /memfd:device 0 (deleted) */
    const char *word = n > 0 ? strstr(name, "device ") : NULL;
    if (!word)
        abort();
    return word[7] - '0';
}

/* Makes device memory of a file, which kernels of this device use. */
static cu_result map_device(size_t nbytes, int fd, int device, struct range **out)
{
    size_t length = whole_pages(nbytes ? nbytes : 1);
    char *visible = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *shadow = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (visible == MAP_FAILED || shadow == MAP_FAILED)
        return CU_OUT_OF_MEMORY;
    *out = add_range(visible, shadow, nbytes, ON_DEVICE, fd);
    (*out)->device = device_of_file(fd);
    (*out)->accessible = 1u << device;
    return CU_SUCCESS;
}

/* Whether kernels of a device may use a range. Access that contexts enable is to memory of this process. */
static bool is_accessible(const struct range *range, int device)
{
    return range->accessible >> device & 1 || (range->kind == ON_DEVICE && range->own &&
                                               context_of(device)->peers >> range->device & 1);
}

char *memory_for_kernel(int device, uint64_t address)
{
    struct range *range = find_range(address);
    if (!range || !is_accessible(range, device)) {
        emulator_failed = ILLEGAL_ADDRESS;
        return NULL;
    }
    return range->shadow + (address - (uint64_t)(uintptr_t)range->visible);
}

char *memory_find(uint64_t address)
{
    struct range *range = find_range(address);
    return range ? range->shadow + (address - (uint64_t)(uintptr_t)range->visible) : NULL;
}

static void drop_range(struct range *range)
{
    if (range->kind == ON_DEVICE) {
        munmap(range->visible, whole_pages(range->nbytes));
        munmap(range->shadow, whole_pages(range->nbytes));
        close(range->fd);
    }
    if (range->kind == MANAGED)
        free(range->visible);
    *range = (struct range){0};
}

EXPORT cu_result cuMemAlloc_v2(cu_address *address, size_t nbytes)
{
    ENTER_CONTEXT;
    struct range *range = NULL;
    int fd = new_memory_file(context ? context->device : 0);
    const char *limit = getenv("EMULATED_DEVICE_NBYTES");
    if (!result && limit && nbytes > strtoull(limit, NULL, 10))
        result = CU_OUT_OF_MEMORY;
    if (!result && (fd < 0 || ftruncate(fd, (off_t)whole_pages(nbytes ? nbytes : 1))))
        result = CU_OUT_OF_MEMORY;
    if (!result)
        result = map_device(nbytes, fd, context->device, &range);
    if (!result) {
        range->own = true;
        *address = (cu_address)(uintptr_t)range->visible;
    }
    LEAVE;
}

EXPORT cu_result cuMemFree_v2(cu_address address)
{
    ENTER_CONTEXT;
    streams_run_all();
    struct range *range = find_range(address);
    if (!range || (cu_address)(uintptr_t)range->visible != address)
        result = INVALID_VALUE;
    else
        drop_range(range);
    LEAVE;
}

EXPORT cu_result cuMemHostAlloc(void **address, size_t nbytes, unsigned flags)
{
    ENTER_CONTEXT;
    (void)flags;
    if (!result && posix_memalign(address, 4096, nbytes ? nbytes : 1))
        result = CU_OUT_OF_MEMORY;
    if (!result)
        add_range(*address, *address, nbytes, HOST, -1);
    LEAVE;
}

EXPORT cu_result cuMemFreeHost(void *address)
{
    ENTER_CONTEXT;
    streams_run_all();
    struct range *range = find_range((cu_address)(uintptr_t)address);
    if (range)
        drop_range(range);
    free(address);
    LEAVE;
}

EXPORT cu_result cuMemAllocManaged(cu_address *address, size_t nbytes, unsigned flags)
{
    void *memory;
    (void)flags;
    if (posix_memalign(&memory, 4096, nbytes ? nbytes : 1))
        return CU_OUT_OF_MEMORY;
    ENTER;
    add_range(memory, memory, nbytes, MANAGED, -1);
    *address = (cu_address)(uintptr_t)memory;
    LEAVE;
}

EXPORT cu_result cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags)
{
    ENTER_CONTEXT;
    (void)flags;
    if (!result && (find_range((cu_address)(uintptr_t)address) ||
                    find_range((cu_address)(uintptr_t)address + nbytes - 1)))
        result = 712; /* CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED */
    if (!result)
        add_range(address, address, nbytes, HOST, -1);
    LEAVE;
}

EXPORT cu_result cuMemHostUnregister(void *address)
{
    ENTER_CONTEXT;
    streams_run_all();
    struct range *range = find_range((cu_address)(uintptr_t)address);
    if (!range)
        result = 713;
    else
        *range = (struct range){0};
    LEAVE;
}

EXPORT cu_result cuPointerGetAttributes(unsigned n, int *attributes, void **values,
                                        cu_address address)
{
    if (emulator_process && emulator_process != getpid())
        return CU_NOT_INITIALIZED;
    pthread_mutex_lock(&emulator_lock);
    struct range *range = find_range(address);
    for (unsigned i = 0; i < n; i++)
        switch (attributes[i]) {
        case CU_POINTER_MEMORY_TYPE:
            *(unsigned *)values[i] = !range ? 0 : range->kind == HOST ? CU_MEMORY_TYPE_HOST : 2;
            break;
        case CU_POINTER_DEVICE_ORDINAL:
            *(int *)values[i] = range ? range->device : -2;
            break;
        case CU_POINTER_IS_MANAGED:
            *(bool *)values[i] = range && range->kind == MANAGED;
            break;
        case CU_POINTER_HAS_IPC_HANDLE:
            *(bool *)values[i] = range && range->kind == ON_DEVICE;
            break;
        case 18: /* the size of a mapping */
            *(size_t *)values[i] = range ? range->nbytes : 0;
            break;
        case 19: /* its base */
            *(cu_address *)values[i] = range ? (cu_address)(uintptr_t)range->visible : 0;
            break;
        default: /* the numbers of buffers and blocks */
            *(uint64_t *)values[i] = range ? range->id : 0;
        }
    pthread_mutex_unlock(&emulator_lock);
    return CU_SUCCESS;
}

EXPORT cu_result cuMemGetAddressRange_v2(cu_address *begin, size_t *nbytes, cu_address address)
{
    ENTER;
    struct range *range = find_range(address);
    if (!range) {
        result = INVALID_VALUE;
    } else {
        *begin = (cu_address)(uintptr_t)range->visible;
        *nbytes = range->nbytes;
    }
    LEAVE;
}

EXPORT cu_result cuMemcpyDtoH_v2(void *to, cu_address from, size_t nbytes)
{
    ENTER_CONTEXT;
    streams_run_all();
    result = result ? result : emulator_failed;
    char *source = result ? NULL : memory_find(from);
    if (source)
        memcpy(to, source, nbytes);
    else
        result = result ? result : ILLEGAL_ADDRESS;
    LEAVE;
}

EXPORT cu_result cuMemcpyHtoD_v2(cu_address to, const void *from, size_t nbytes)
{
    ENTER_CONTEXT;
    streams_run_all();
    result = result ? result : emulator_failed;
    char *target = result ? NULL : memory_find(to);
    if (target)
        memcpy(target, from, nbytes);
    else
        result = result ? result : ILLEGAL_ADDRESS;
    LEAVE;
}

/* ---- memory of other processes ---- */

struct ipc_handle {
    int pid, fd;
    uint64_t nbytes;
};

EXPORT cu_result cuIpcGetMemHandle(struct cu_ipc_handle *handle, cu_address address)
{
    ENTER;
    struct range *range = find_range(address);
    if (!range || range->kind != ON_DEVICE)
        result = INVALID_VALUE;
    struct ipc_handle made = {getpid(), range ? range->fd : -1, range ? range->nbytes : 0};
    memset(handle, 0, sizeof *handle);
    memcpy(handle->bytes, &made, sizeof made);
    LEAVE;
}

EXPORT cu_result cuIpcOpenMemHandle_v2(cu_address *address, struct cu_ipc_handle handle,
                                       unsigned flags)
{
    ENTER_CONTEXT;
    struct ipc_handle made;
    struct range *range;
    char path[64];
    memcpy(&made, handle.bytes, sizeof made);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", made.pid, made.fd);
    int fd = getenv("EMULATED_IPC_FAILS") ? -1 : open(path, O_RDWR);
    if (!result && fd < 0)
        result = INVALID_HANDLE;
    else if (!result && !(flags & CU_IPC_LAZY_PEER_ACCESS
                              ? devices_are_peers(context->device, device_of_file(fd))
                              : context->device == device_of_file(fd)))
        result = PEER_ACCESS_UNSUPPORTED;
    if (!result)
        result = map_device(made.nbytes, fd, context->device, &range);
    if (!result)
        *address = (cu_address)(uintptr_t)range->visible;
    LEAVE;
}

EXPORT cu_result cuIpcCloseMemHandle(cu_address address)
{
    return cuMemFree_v2(address);
}

/* The beginning of what describes an allocation of the virtual memory interface. */
struct block_properties {
    int type, handle_types;
    struct cu_location location;
};

/* An allocation of the virtual memory interface is a file descriptor. */
EXPORT cu_result cuMemCreate(uint64_t *handle, size_t nbytes, const void *properties,
                             uint64_t flags)
{
    const struct block_properties *wanted = properties;
    int fd = new_memory_file(wanted->location.id);
    (void)flags;
    *handle = (uint64_t)fd;
    return fd < 0 || ftruncate(fd, (off_t)nbytes) ? CU_OUT_OF_MEMORY : CU_SUCCESS;
}

EXPORT cu_result cuMemRelease(uint64_t handle)
{
    close((int)handle);
    return CU_SUCCESS;
}

EXPORT cu_result cuMemRetainAllocationHandle(uint64_t *handle, void *address)
{
    ENTER;
    struct range *range = find_range((cu_address)(uintptr_t)address);
    if (!range || range->kind != MAPPED)
        result = INVALID_VALUE;
    else
        *handle = (uint64_t)dup(range->fd);
    LEAVE;
}

EXPORT cu_result cuMemExportToShareableHandle(void *shareable, uint64_t handle, int type,
                                              uint64_t flags)
{
    (void)type;
    (void)flags;
    *(int *)shareable = dup((int)handle);
    return CU_SUCCESS;
}

EXPORT cu_result cuMemImportFromShareableHandle(uint64_t *handle, void *shareable, int type)
{
    (void)type;
    if (getenv("EMULATED_IPC_FAILS"))
        return INVALID_HANDLE;
    *handle = (uint64_t)dup((int)(uintptr_t)shareable);
    return CU_SUCCESS;
}

EXPORT cu_result cuMemAddressReserve(cu_address *address, size_t nbytes, size_t alignment,
                                     cu_address hint, uint64_t flags)
{
    ENTER;
    (void)alignment;
    (void)hint;
    (void)flags;
    void *visible = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *shadow = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (visible == MAP_FAILED || shadow == MAP_FAILED) {
        result = CU_OUT_OF_MEMORY;
    } else {
        add_range(visible, shadow, nbytes, RESERVED, -1);
        *address = (cu_address)(uintptr_t)visible;
    }
    LEAVE;
}

static struct range *find_reserved(cu_address address)
{
    for (size_t i = 0; i < nranges; i++)
        if (ranges[i].kind == RESERVED && ranges[i].visible &&
            address - (cu_address)(uintptr_t)ranges[i].visible < ranges[i].nbytes)
            return &ranges[i];
    return NULL;
}

EXPORT cu_result cuMemAddressFree(cu_address address, size_t nbytes)
{
    ENTER;
    struct range *range = find_reserved(address);
    if (!range || range->nbytes != nbytes) {
        result = INVALID_VALUE;
    } else {
        munmap(range->visible, nbytes);
        munmap(range->shadow, nbytes);
        *range = (struct range){0};
    }
    LEAVE;
}

EXPORT cu_result cuMemMap(cu_address address, size_t nbytes, size_t offset, uint64_t handle,
                          uint64_t flags)
{
    ENTER;
    struct range *range = find_reserved(address);
    int fd = dup((int)handle);
    (void)flags;
    char *shadow = range ? range->shadow + (address - (cu_address)(uintptr_t)range->visible) : NULL;
    if (!range || mmap(shadow, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                       (off_t)offset) == MAP_FAILED)
        result = INVALID_VALUE;
    else
        add_range((char *)(uintptr_t)address, shadow, nbytes, MAPPED, fd)->device =
            device_of_file(fd);
    LEAVE;
}

EXPORT cu_result cuMemUnmap(cu_address address, size_t nbytes)
{
    ENTER;
    streams_run_all();
    for (size_t i = 0; i < nranges; i++)
        if (ranges[i].kind == MAPPED &&
            (cu_address)(uintptr_t)ranges[i].visible - address < nbytes) {
            mmap(ranges[i].shadow, ranges[i].nbytes, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            close(ranges[i].fd);
            ranges[i] = (struct range){0};
        }
    LEAVE;
}

EXPORT cu_result cuMemGetAccess(uint64_t *flags, const struct cu_location *location,
                                cu_address address)
{
    ENTER;
    const struct range *range = find_range(address);
    if (!range || range->kind != MAPPED)
        result = INVALID_VALUE;
    else
        *flags = range->accessible >> location->id & 1 ? 3 : 0;
    LEAVE;
}

EXPORT cu_result cuMemSetAccess(cu_address address, size_t nbytes, const struct cu_access *access,
                                size_t naccess)
{
    ENTER;
    for (size_t i = 0; i < nranges; i++) {
        struct range *range = &ranges[i];
        if (range->kind != MAPPED || (cu_address)(uintptr_t)range->visible - address >= nbytes)
            continue;
        for (size_t k = 0; k < naccess && !result; k++)
            if (devices_are_peers(access[k].location.id, range->device))
                range->accessible |= 1u << access[k].location.id;
            else
                result = PEER_ACCESS_UNSUPPORTED;
    }
    LEAVE;
}
