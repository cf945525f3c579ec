/* share.c - device memory that other processes of the host map.
 *
 * Memory of cudaMalloc has one IPC handle for the whole allocation. Memory of the virtual memory interface
 * (PyTorch's expandable segments) consists of pieces, each of which is exported as a file descriptor; the
 * importer takes the descriptors out of the exporter's process and maps the pieces one after the other.
 *
 *     exporter   |  piece 0  |  piece 1  |  piece 2  |        one address range
 *     importer   |  piece 0  |  piece 1  |  piece 2  |        the same, at another address
 *
 * A mapping keeps the exporter's memory allocated, so mappings are released as soon as nothing uses them.
 */
#include "device.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    CU_POINTER_MAPPING_SIZE = 18,
    CU_POINTER_MAPPING_BASE = 19,
    CU_POINTER_MEMORY_BLOCK_ID = 20,
    CU_HANDLE_POSIX_FD = 1,
    CU_LOCATION_DEVICE = 1,
    CU_ACCESS_READ_WRITE = 3,
    CU_INVALID_VALUE = 1
};

/* ---- exporting ---- */

/* Pieces that are exported as descriptors, each once. A descriptor keeps its memory allocated, so it is closed when
 * no list names it any more. */
struct exported {
    uint64_t id;
    size_t nlists;
    int fd;
};

static struct {
    pthread_mutex_t lock;
    struct exported *list; /* by id, ascending */
    size_t n, capacity;
} exports = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The handles of allocations that were exported last. A number of an allocation is never used again, so a handle
 * that is remembered is right. */
enum { NREMEMBERED = 256 };
struct remembered {
    uint64_t id;
    cu_address base;
    size_t nbytes;
    struct cu_ipc_handle handle;
};
static struct remembered remembered[NREMEMBERED]; /* with the lock of exports */

static rsd_status export_descriptor(const struct driver *cu, cu_address base, int *fd)
{
    uint64_t handle;
    CU_TRY(cuMemRetainAllocationHandle, &handle, (void *)(uintptr_t)base);
    cu_result result = cu->cuMemExportToShareableHandle(fd, handle, CU_HANDLE_POSIX_FD, 0);
    cu->cuMemRelease(handle);
    return driver_check(result, "cuMemExportToShareableHandle");
}

/* Returns the index of the first exported piece with at least this id. Requires the lock. */
static size_t find_exported(uint64_t id)
{
    size_t lo = 0, hi = exports.n;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (exports.list[middle].id < id)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

/* Returns the descriptor of a piece, which one more list names. Requires the lock. */
static rsd_status use_descriptor(const struct driver *cu, cu_address base, uint64_t id, int *fd)
{
    size_t at = find_exported(id);
    if (at == exports.n || exports.list[at].id != id) {
        TRY(GROW(exports.list, exports.capacity, exports.n + 1));
        TRY(export_descriptor(cu, base, fd));
        memmove(exports.list + at + 1, exports.list + at,
                (exports.n++ - at) * sizeof *exports.list);
        exports.list[at] = (struct exported){.id = id, .fd = *fd};
    }
    exports.list[at].nlists++;
    *fd = exports.list[at].fd;
    return RSD_OK;
}

void cuda_unexport(const struct memory_piece *pieces, size_t n)
{
    pthread_mutex_lock(&exports.lock);
    for (size_t i = 0; i < n; i++) {
        size_t at = pieces[i].fd < 0 ? exports.n : find_exported(pieces[i].id);
        if (at == exports.n || exports.list[at].id != pieces[i].id || --exports.list[at].nlists)
            continue;
        close(exports.list[at].fd);
        memmove(exports.list + at, exports.list + at + 1,
                (--exports.n - at) * sizeof *exports.list);
    }
    pthread_mutex_unlock(&exports.lock);
}

/* The mapping that has an address. */
static rsd_status find_mapping(const struct driver *cu, cu_address address, cu_address *base,
                               size_t *nbytes, uint64_t *id)
{
    int attributes[] = {CU_POINTER_MAPPING_BASE, CU_POINTER_MAPPING_SIZE,
                        CU_POINTER_MEMORY_BLOCK_ID};
    void *values[] = {base, nbytes, id};
    CU_TRY(cuPointerGetAttributes, 3, attributes, values, address);
    if (!*base || *nbytes == 0)
        return fail(RSD_EUNSUPPORTED,
                    "the driver does not say which mapping a device address is in");
    return RSD_OK;
}

/* Lets kernels of a device use one mapping. */
static rsd_status allow_mapping(const struct cuda_device *device, cu_address base, size_t nbytes)
{
    const struct driver *cu = device->cu;
    struct cu_access access = {{CU_LOCATION_DEVICE, device->base.ordinal}, CU_ACCESS_READ_WRITE};
    uint64_t flags = 0;
    CU_TRY(cuMemGetAccess, &flags, &access.location, base);
    if (flags != CU_ACCESS_READ_WRITE)
        CU_TRY(cuMemSetAccess, base, nbytes, &access, 1);
    return RSD_OK;
}

rsd_status device_allow_mapped(const struct cuda_device *device, cu_address address, size_t nbytes)
{
    const struct driver *cu = device->cu;
    uint64_t has_handle = 0, id; /* how many bytes of it are written depends on the driver */
    int attribute = CU_POINTER_HAS_IPC_HANDLE;
    void *value = &has_handle;
    CU_TRY(cuPointerGetAttributes, 1, &attribute, &value, address);
    for (cu_address at = address; !has_handle && at - address < nbytes;) {
        cu_address base;
        size_t length;
        TRY(find_mapping(cu, at, &base, &length, &id));
        if (allow_mapping(device, base, length))
            return fail(RSD_EUNSUPPORTED, "CUDA device %d has no access to mapped memory: %s",
                        device->base.ordinal, rsd_error());
        at = base + length;
    }
    return RSD_OK;
}

/* Exports the mappings of the virtual memory interface that a range lies in, as descriptors. */
static rsd_status export_pieces(const struct driver *cu, cu_address address, size_t nbytes,
                                struct memory_pieces *pieces, uint64_t *offset)
{
    cu_address at = address;
    while (at < address + nbytes || at == address) {
        cu_address base;
        size_t length;
        struct memory_piece piece = {.pid = getpid()};
        TRY(GROW(pieces->list, pieces->capacity, pieces->n + 1));
        TRY(find_mapping(cu, at, &base, &length, &piece.id));
        pthread_mutex_lock(&exports.lock);
        rsd_status status = use_descriptor(cu, base, piece.id, &piece.fd);
        pthread_mutex_unlock(&exports.lock);
        TRY(status);
        piece.nbytes = length;
        if (at == address)
            *offset = address - base;
        pieces->list[pieces->n++] = piece;
        at = base + length;
    }
    return RSD_OK;
}

/* Finds the allocation of an address, and its handle. *has_handle is false if it consists of pieces. */
static rsd_status find_handle(const struct driver *cu, cu_address address, struct remembered *found,
                              bool *has_handle)
{
    int attribute = CU_POINTER_BUFFER_ID;
    void *value = &found->id;
    *has_handle = true;
    CU_TRY(cuPointerGetAttributes, 1, &attribute, &value, address);
    struct remembered *kept = &remembered[found->id % NREMEMBERED];
    pthread_mutex_lock(&exports.lock);
    bool known = kept->nbytes && kept->id == found->id;
    if (known)
        *found = *kept;
    pthread_mutex_unlock(&exports.lock);
    if (known)
        return RSD_OK;
    CU_TRY(cuMemGetAddressRange, &found->base, &found->nbytes, address);
    cu_result result = cu->cuIpcGetMemHandle(&found->handle, found->base);
    *has_handle = result != CU_INVALID_VALUE;
    if (!*has_handle)
        return RSD_OK;
    TRY(driver_check(result, "cuIpcGetMemHandle"));
    pthread_mutex_lock(&exports.lock);
    *kept = *found;
    pthread_mutex_unlock(&exports.lock);
    return RSD_OK;
}

/* Exports the allocation that a range lies in, or its mappings if it has no handle. */
static rsd_status export_range(const struct driver *cu, cu_address address, size_t nbytes,
                               struct memory_pieces *pieces, uint64_t *offset)
{
    struct memory_piece piece = {.pid = getpid(), .fd = -1};
    struct remembered found = {.id = 0};
    bool has_handle;
    TRY(find_handle(cu, address, &found, &has_handle));
    if (!has_handle)
        return export_pieces(cu, address, nbytes, pieces, offset);
    TRY(GROW(pieces->list, pieces->capacity, pieces->n + 1));
    memcpy(piece.handle, found.handle.bytes, sizeof piece.handle);
    piece.id = found.id;
    piece.nbytes = found.nbytes;
    *offset = address - found.base;
    pieces->list[pieces->n++] = piece;
    return RSD_OK;
}

rsd_status cuda_export(struct memory_device *base, const void *address, size_t nbytes,
                       struct memory_pieces *pieces, uint64_t *offset)
{
    const struct cuda_device *device = cuda_device_of(base);
    size_t before = pieces->n;
    pieces->kind = &cuda_kind;
    TRY(device_enter(device));
    rsd_status status =
        export_range(device->cu, (cu_address)(uintptr_t)address, nbytes, pieces, offset);
    device_leave(device);
    if (status) {
        cuda_unexport(pieces->list + before, pieces->n - before);
        pieces->n = before;
    }
    return status;
}

/* ---- importing ---- */

struct cuda_mapping {
    struct memory_mapping base;
    struct cuda_device *device;
    cu_address address;
    size_t nbytes;  /* reserved; 0: an IPC handle */
    size_t nmapped; /* bytes of it that are mapped */
};

/* A copy of a descriptor of another process. */
static int copy_descriptor(int32_t pid, int32_t fd)
{
    int process = (int)syscall(SYS_pidfd_open, pid, 0);
    if (process < 0)
        return -1;
    int copied = (int)syscall(SYS_pidfd_getfd, process, fd, 0);
    int error = errno;
    close(process);
    errno = error;
    return copied;
}

/* Maps a descriptor of another process behind the pieces that are mapped already. */
static rsd_status map_piece(struct cuda_mapping *mapping, const struct memory_piece *piece)
{
    const struct driver *cu = mapping->device->cu;
    uint64_t handle;
    int fd = copy_descriptor(piece->pid, piece->fd);
    if (fd < 0)
        return fail(RSD_EPEER, "cannot take device memory from pid %d: %s", (int)piece->pid,
                    strerror(errno));
    cu_result result =
        cu->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd, CU_HANDLE_POSIX_FD);
    close(fd);
    TRY(driver_check(result, "cuMemImportFromShareableHandle"));
    result = cu->cuMemMap(mapping->address + mapping->nmapped, piece->nbytes, 0, handle, 0);
    cu->cuMemRelease(handle);
    TRY(driver_check(result, "cuMemMap"));
    mapping->nmapped += piece->nbytes;
    return RSD_OK;
}

/* Maps all pieces of a range one after the other, so that its addresses are contiguous. */
static rsd_status map_pieces(struct cuda_mapping *mapping, const struct memory_piece *pieces,
                             size_t n)
{
    const struct driver *cu = mapping->device->cu;
    struct cu_access access = {{CU_LOCATION_DEVICE, mapping->device->base.ordinal},
                               CU_ACCESS_READ_WRITE};
    size_t nbytes = 0;
    for (size_t i = 0; i < n; i++)
        if (__builtin_add_overflow(nbytes, pieces[i].nbytes, &nbytes))
            return fail(RSD_EPEER, "pid %d exports pieces of more than 2^64 bytes",
                        (int)pieces[i].pid);
    CU_TRY(cuMemAddressReserve, &mapping->address, nbytes, 0, 0, 0);
    mapping->nbytes = nbytes;
    for (size_t i = 0; i < n; i++)
        TRY(map_piece(mapping, &pieces[i]));
    CU_TRY(cuMemSetAccess, mapping->address, nbytes, &access, 1);
    return RSD_OK;
}

static rsd_status open_handle(struct cuda_mapping *mapping, const struct memory_piece *piece)
{
    const struct driver *cu = mapping->device->cu;
    struct cu_ipc_handle handle;
    memcpy(handle.bytes, piece->handle, sizeof handle.bytes);
    CU_TRY(cuIpcOpenMemHandle, &mapping->address, handle, CU_IPC_LAZY_PEER_ACCESS);
    return RSD_OK;
}

rsd_status cuda_import(struct memory_device *base, const struct memory_piece *pieces, size_t n,
                       struct memory_mapping **out)
{
    struct cuda_device *device = cuda_device_of(base);
    struct cuda_mapping *mapping = mem_new(1, sizeof *mapping);
    if (!mapping)
        return RSD_ENOMEM;
    mapping->device = device;
    rsd_status status = device_enter(device);
    if (!status) {
        status = n == 1 && pieces[0].fd < 0 ? open_handle(mapping, pieces)
                                            : map_pieces(mapping, pieces, n);
        device_leave(device);
    }
    mapping->base = (struct memory_mapping){&cuda_kind, (const char *)(uintptr_t)mapping->address};
    if (status)
        cuda_unmap(&mapping->base);
    else
        *out = &mapping->base;
    return status;
}

void cuda_unmap(struct memory_mapping *base)
{
    struct cuda_mapping *mapping = (struct cuda_mapping *)(void *)base;
    const struct driver *cu = mapping->device->cu;
    if (mapping->address && !device_enter(mapping->device)) {
        if (mapping->nmapped)
            cu->cuMemUnmap(mapping->address, mapping->nmapped);
        if (mapping->nbytes)
            cu->cuMemAddressFree(mapping->address, mapping->nbytes);
        else
            cu->cuIpcCloseMemHandle(mapping->address);
        device_leave(mapping->device);
    }
    mem_free(mapping);
}
