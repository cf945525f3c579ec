/* emulator.c - libcuda.so.1 and libnvrtc.so.13 for tests on machines without a GPU.
 *
 * It is as strict as a GPU, or stricter:
 *
 *   - The CPU cannot use device memory: its addresses are reserved without access. Kernels use a second mapping.
 *   - Kernels cannot use pageable memory: CUDA_ERROR_ILLEGAL_ADDRESS, and everything fails from then on.
 *   - Work in a stream is done as late as possible: when something waits for it, or at the second query of an
 *     event behind it. So a missing wait is a wrong result.
 *   - Kernels are the C code that they share with the GPU (src/cuda/..._code.h), with the tables that are in
 *     memory at the time when they run.
 *
 * IPC handles and file descriptors work between processes of the host. There is one device.
 */
#include "driver.h"
#include "tables.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ILLEGAL_ADDRESS = 700, INVALID_VALUE = 1, INVALID_HANDLE = 400, MAX_RANGES = 1 << 12 };
enum { UNUSED, RESERVED, ON_DEVICE, HOST, MANAGED, MAPPED };

/* A range of addresses that CUDA knows. */
struct range {
    char *visible, *shadow; /* what callers see, and where the CPU finds it */
    size_t nbytes;
    int kind, fd;
    uint64_t id;
};

struct task {
    enum { LAUNCH, RECORD, WAIT, SET } kind;
    struct kernel_code *code;
    uint64_t parameters[8];
    struct event *event;
    uint64_t record;
    cu_address to;
    size_t nbytes;
    unsigned char value;
    struct task *next;
};

struct stream {
    struct task *first, *last;
    struct stream *next;
};

struct event {
    uint64_t records, done; /* recorded, and reached */
    struct stream *stream;  /* of the last record */
    int nqueries;
};

struct kernel_code {
    const char *name;
    void (*run)(const uint64_t *parameters);
    int nparameters;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[MAX_RANGES];
static size_t nranges;
static uint64_t next_id = 1;
static cu_result sticky;
static struct stream default_stream;
static bool initialised;
static pid_t initialised_by;

#define EXPORT __attribute__((visibility("default")))
#define ENTER                                                                                      \
    pthread_mutex_lock(&lock);                                                                     \
    cu_result result = sticky
#define LEAVE                                                                                      \
    pthread_mutex_unlock(&lock);                                                                   \
    return result

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
    ranges[i] = (struct range){visible, shadow, nbytes, kind, fd, 0};
    ranges[i].id = (uint64_t)getpid() << 32 | next_id++;
    return &ranges[i];
}

static size_t whole_pages(size_t nbytes)
{
    return (nbytes + 4095) / 4096 * 4096;
}

static cu_result map_device(size_t nbytes, int fd, struct range **out)
{
    size_t length = whole_pages(nbytes ? nbytes : 1);
    char *visible = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *shadow = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (visible == MAP_FAILED || shadow == MAP_FAILED)
        return CU_OUT_OF_MEMORY;
    *out = add_range(visible, shadow, nbytes, ON_DEVICE, fd);
    return CU_SUCCESS;
}

static char *for_kernel(uint64_t address)
{
    struct range *range = find_range(address);
    if (!range) {
        sticky = ILLEGAL_ADDRESS;
        return NULL;
    }
    return range->shadow + (address - (uint64_t)(uintptr_t)range->visible);
}

static void drop_range(struct range *range)
{
    if (range->kind == ON_DEVICE) {
        munmap(range->visible, whole_pages(range->nbytes));
        munmap(range->shadow, whole_pages(range->nbytes));
        close(range->fd);
    }
    *range = (struct range){0};
}

EXPORT cu_result cuMemAlloc_v2(cu_address *address, size_t nbytes)
{
    ENTER;
    struct range *range = NULL;
    int fd = memfd_create("device", 0);
    const char *limit = getenv("EMULATED_DEVICE_NBYTES");
    if (!result && limit && nbytes > strtoull(limit, NULL, 10))
        result = CU_OUT_OF_MEMORY;
    if (!result && (fd < 0 || ftruncate(fd, (off_t)whole_pages(nbytes ? nbytes : 1))))
        result = CU_OUT_OF_MEMORY;
    if (!result)
        result = map_device(nbytes, fd, &range);
    if (!result)
        *address = (cu_address)(uintptr_t)range->visible;
    LEAVE;
}

static void run_all(void);

EXPORT cu_result cuMemFree_v2(cu_address address)
{
    ENTER;
    run_all();
    struct range *range = find_range(address);
    if (!range || (cu_address)(uintptr_t)range->visible != address)
        result = INVALID_VALUE;
    else
        drop_range(range);
    LEAVE;
}

EXPORT cu_result cuMemHostAlloc(void **address, size_t nbytes, unsigned flags)
{
    ENTER;
    (void)flags;
    if (!result && posix_memalign(address, 4096, nbytes ? nbytes : 1))
        result = CU_OUT_OF_MEMORY;
    if (!result)
        add_range(*address, *address, nbytes, HOST, -1);
    LEAVE;
}

EXPORT cu_result cuMemFreeHost(void *address)
{
    ENTER;
    run_all();
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
    ENTER;
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
    ENTER;
    run_all();
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
    if (initialised && initialised_by != getpid())
        return CU_NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    struct range *range = find_range(address);
    for (unsigned i = 0; i < n; i++)
        switch (attributes[i]) {
        case CU_POINTER_MEMORY_TYPE:
            *(unsigned *)values[i] = !range ? 0 : range->kind == HOST ? CU_MEMORY_TYPE_HOST : 2;
            break;
        case CU_POINTER_DEVICE_ORDINAL:
            *(int *)values[i] = range ? 0 : -2;
            break;
        case CU_POINTER_IS_MANAGED:
            *(bool *)values[i] = range && range->kind == MANAGED;
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
    pthread_mutex_unlock(&lock);
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
    ENTER;
    run_all();
    result = sticky;
    char *source = result ? NULL : for_kernel(from);
    if (source)
        memcpy(to, source, nbytes);
    else
        result = ILLEGAL_ADDRESS;
    LEAVE;
}

EXPORT cu_result cuMemcpyHtoD_v2(cu_address to, const void *from, size_t nbytes)
{
    ENTER;
    run_all();
    result = sticky;
    char *target = result ? NULL : for_kernel(to);
    if (target)
        memcpy(target, from, nbytes);
    else
        result = ILLEGAL_ADDRESS;
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
    ENTER;
    struct ipc_handle made;
    struct range *range;
    char path[64];
    (void)flags;
    memcpy(&made, handle.bytes, sizeof made);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", made.pid, made.fd);
    int fd = getenv("EMULATED_IPC_FAILS") ? -1 : open(path, O_RDWR);
    if (fd < 0)
        result = INVALID_HANDLE;
    else
        result = map_device(made.nbytes, fd, &range);
    if (!result)
        *address = (cu_address)(uintptr_t)range->visible;
    LEAVE;
}

EXPORT cu_result cuIpcCloseMemHandle(cu_address address)
{
    return cuMemFree_v2(address);
}

/* An allocation of the virtual memory interface is a file descriptor. */
EXPORT cu_result cuMemCreate(uint64_t *handle, size_t nbytes, const void *properties,
                             uint64_t flags)
{
    int fd = memfd_create("block", 0);
    (void)properties;
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
        add_range((char *)(uintptr_t)address, shadow, nbytes, MAPPED, fd);
    LEAVE;
}

EXPORT cu_result cuMemUnmap(cu_address address, size_t nbytes)
{
    ENTER;
    run_all();
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

EXPORT cu_result cuMemSetAccess(cu_address address, size_t nbytes, const struct cu_access *access,
                                size_t naccess)
{
    (void)address;
    (void)nbytes;
    (void)access;
    (void)naccess;
    return CU_SUCCESS;
}

/* ---- kernels ---- */

/* A table without entries may begin where the memory ends. */
static void *find_table(uint64_t address)
{
    struct range *range = find_range(address);
    return range ? range->shadow + (address - (uint64_t)(uintptr_t)range->visible) : NULL;
}

#define PARAMETER(type, i) ((type)find_table(p[i]))

/* A kernel may cross from one mapped block to the next, so each unit is translated by itself. */
static void run_copy(const uint64_t *p)
{
    const struct gpu_copy *copies = PARAMETER(const struct gpu_copy *, 0);
    const struct gpu_loop *all = PARAMETER(const struct gpu_loop *, 2);
    const gpu_u64 *arrays = PARAMETER(const gpu_u64 *, 3);
    gpu_i64 ntiles = (gpu_i64)p[4];
    for (gpu_i64 number = 0; number < ntiles && !sticky; number++) {
        struct gpu_tile tile;
        const struct gpu_copy *copy = &copies[gpu_find_copy(copies, (gpu_u32)p[1], number)];
        const struct gpu_loop *loops = all + copy->first_loop;
        gpu_u64 src = arrays[copy->src], dst = arrays[copy->dst];
        bool cast = copy->from != 0;
        gpu_u32 word = gpu_word(src, dst, cast ? 1 : copy->align),
                in = cast ? gpu_nbytes(copy->from) : word, out = cast ? gpu_nbytes(copy->to) : word;
        gpu_copy_tile(copy, all, number - copy->first_tile, in, out, &tile);
        for (gpu_u32 unit = 0; unit < tile.nunits && !sticky; unit++) {
            gpu_i64 from, to;
            gpu_tile_unit(&tile, loops, unit, &from, &to);
            const char *source = for_kernel(src + (gpu_u64)from);
            char *target = source ? for_kernel(dst + (gpu_u64)to) : NULL;
            if (!target)
                return;
            if (cast)
                gpu_store_bits(target, out,
                               gpu_cast(copy->to, copy->from, gpu_load_bits(source, in)));
            else
                memcpy(target, source, word);
        }
    }
}

static void run_sums(const uint64_t *p)
{
    const struct gpu_sum *sums = PARAMETER(const struct gpu_sum *, 0);
    gpu_u64 *arrays = PARAMETER(gpu_u64 *, 5), shadows[4096];
    struct gpu_element element = {.loops = PARAMETER(const struct gpu_loop *, 2),
                                  .terms = PARAMETER(const struct gpu_term *, 3),
                                  .strides = PARAMETER(const gpu_i64 *, 4),
                                  .arrays = shadows};
    for (gpu_i64 number = 0; number < (gpu_i64)p[6] && !sticky; number++) {
        element.sum = sums + gpu_find_sum(sums, (gpu_u32)p[1], number);
        gpu_i64 first = element.sum->begin + (number - element.sum->first_tile) * GPU_SUM_TILE;
        shadows[element.sum->dst] = (gpu_u64)(uintptr_t)for_kernel(arrays[element.sum->dst]);
        for (gpu_u32 t = 0; t < element.sum->nterms; t++) {
            gpu_u32 src = element.terms[element.sum->first_term + t].src;
            shadows[src] = (gpu_u64)(uintptr_t)for_kernel(arrays[src]);
        }
        for (gpu_i64 i = first; i < first + GPU_SUM_TILE && i < element.sum->end && !sticky; i++) {
            gpu_element_start(&element, i);
            gpu_reduce_element(&element);
        }
    }
}

/* Row by row, with the table of powers that the library made. */
static void run_digests(const uint64_t *p)
{
    const struct gpu_digest *digests = PARAMETER(const struct gpu_digest *, 0);
    const struct gpu_loop *loops = PARAMETER(const struct gpu_loop *, 2);
    const gpu_u64 *arrays = PARAMETER(const gpu_u64 *, 3), *powers = PARAMETER(const gpu_u64 *, 4);
    gpu_u64 *results = PARAMETER(gpu_u64 *, 6);
    for (gpu_u32 i = 0; i < (gpu_u32)p[1] && !sticky; i++)
        for (gpu_i64 row = 0; row < digests[i].nrows && !sticky; row++) {
            gpu_i64 at, after;
            gpu_digest_row(&digests[i], loops, row, &at, &after);
            const char *bytes = for_kernel(arrays[digests[i].array] + (gpu_u64)at);
            for (int crc = 0; bytes && crc < GPU_NCRC; crc++)
                results[digests[i].result * GPU_NCRC + (gpu_u32)crc] ^=
                    gpu_shift(crc, powers, gpu_crc_bytes(crc, 0, bytes, (gpu_u32)digests[i].run),
                              (gpu_u64)after);
        }
}

static struct kernel_code codes[] = {{"rsd_copy", run_copy, 5},
                                     {"rsd_cast", run_copy, 5},
                                     {"rsd_reduce", run_sums, 7},
                                     {"rsd_digest", run_digests, 8}};

EXPORT cu_result cuModuleLoadData(cu_module *module, const void *image)
{
    *module = without_const(image);
    return CU_SUCCESS;
}

EXPORT cu_result cuModuleGetFunction(cu_function *function, cu_module module, const char *name)
{
    (void)module;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (strcmp(codes[i].name, name) == 0) {
            *function = &codes[i];
            return CU_SUCCESS;
        }
    return 500;
}

EXPORT cu_result cuFuncSetAttribute(cu_function function, int attribute, int value)
{
    (void)function;
    (void)attribute;
    (void)value;
    return CU_SUCCESS;
}

/* ---- streams ---- */

static struct stream *streams = &default_stream;

static struct stream *stream_of(cu_stream stream)
{
    return stream ? stream : &default_stream;
}

static void add_task(struct stream *stream, struct task task)
{
    struct task *copy = malloc(sizeof *copy);
    if (!copy)
        abort();
    *copy = task;
    if (stream->last)
        stream->last->next = copy;
    else
        stream->first = copy;
    stream->last = copy;
}

static void run_until(struct event *event, uint64_t record);

static void run_first(struct stream *stream)
{
    struct task *task = stream->first;
    stream->first = task->next;
    if (!task->next)
        stream->last = NULL;
    if (task->kind == LAUNCH && !sticky)
        task->code->run(task->parameters);
    else if (task->kind == RECORD)
        task->event->done = task->record;
    else if (task->kind == WAIT)
        run_until(task->event, task->record);
    else if (task->kind == SET && !sticky)
        memset(for_kernel(task->to), task->value, task->nbytes);
    free(task);
}

static void run_stream(struct stream *stream)
{
    while (stream->first)
        run_first(stream);
}

static void run_until(struct event *event, uint64_t record)
{
    while (event->done < record && event->stream->first)
        run_first(event->stream);
}

static void run_all(void)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        run_stream(stream);
}

EXPORT cu_result cuStreamCreate(cu_stream *stream, unsigned flags)
{
    ENTER;
    (void)flags;
    struct stream *made = calloc(1, sizeof *made);
    made->next = streams->next;
    streams->next = made;
    *stream = made;
    LEAVE;
}

EXPORT cu_result cuStreamDestroy_v2(cu_stream stream)
{
    ENTER;
    run_stream(stream);
    for (struct stream **at = &streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = (*at)->next;
            break;
        }
    free(stream);
    LEAVE;
}

EXPORT cu_result cuStreamSynchronize(cu_stream stream)
{
    ENTER;
    run_stream(stream_of(stream));
    result = sticky;
    LEAVE;
}

EXPORT cu_result cuEventCreate(cu_event *event, unsigned flags)
{
    (void)flags;
    *event = calloc(1, sizeof(struct event));
    return *event ? CU_SUCCESS : CU_OUT_OF_MEMORY;
}

EXPORT cu_result cuEventDestroy_v2(cu_event event)
{
    ENTER;
    struct event *destroyed = event;
    run_until(destroyed, destroyed->records);
    run_all();
    free(event);
    LEAVE;
}

EXPORT cu_result cuEventRecord(cu_event event, cu_stream stream)
{
    ENTER;
    struct event *recorded = event;
    recorded->stream = stream_of(stream);
    recorded->nqueries = 0;
    add_task(recorded->stream,
             (struct task){.kind = RECORD, .event = event, .record = ++recorded->records});
    LEAVE;
}

EXPORT cu_result cuStreamWaitEvent(cu_stream stream, cu_event event, unsigned flags)
{
    ENTER;
    (void)flags;
    add_task(
        stream_of(stream),
        (struct task){.kind = WAIT, .event = event, .record = ((struct event *)event)->records});
    LEAVE;
}

EXPORT cu_result cuEventSynchronize(cu_event event)
{
    ENTER;
    run_until(event, ((struct event *)event)->records);
    result = sticky;
    LEAVE;
}

EXPORT cu_result cuEventQuery(cu_event event)
{
    ENTER;
    struct event *queried = event;
    if (queried->done < queried->records && queried->nqueries++ == 0)
        result = result ? result : CU_NOT_READY;
    else
        run_until(queried, queried->records);
    if (sticky)
        result = sticky;
    LEAVE;
}

EXPORT cu_result cuLaunchKernel(cu_function function, unsigned grid_x, unsigned grid_y,
                                unsigned grid_z, unsigned block_x, unsigned block_y,
                                unsigned block_z, unsigned shared_nbytes, cu_stream stream,
                                void **parameters, void **extra)
{
    ENTER;
    struct kernel_code *code = function;
    struct task task = {.kind = LAUNCH, .code = code};
    (void)extra;
    if (!result && (grid_x < 1 || grid_y != 1 || grid_z != 1 || block_x > 1024 || block_y != 1 ||
                    block_z != 1 || shared_nbytes > 200 << 10))
        result = INVALID_VALUE;
    for (int i = 0; i < code->nparameters; i++) /* the second is a count of 32 bits */
        memcpy(&task.parameters[i], parameters[i], i == 1 ? 4 : 8);
    if (!result)
        add_task(stream_of(stream), task);
    LEAVE;
}

EXPORT cu_result cuMemsetD8Async(cu_address to, unsigned char value, size_t nbytes,
                                 cu_stream stream)
{
    ENTER;
    add_task(stream_of(stream),
             (struct task){.kind = SET, .to = to, .value = value, .nbytes = nbytes});
    LEAVE;
}

EXPORT cu_result cuMemcpyAsync(cu_address to, cu_address from, size_t nbytes, cu_stream stream)
{
    ENTER;
    run_stream(stream_of(stream));
    memcpy(for_kernel(to), for_kernel(from), nbytes);
    LEAVE;
}

/* ---- devices ---- */

EXPORT cu_result cuInit(unsigned flags)
{
    (void)flags;
    if (!initialised)
        initialised_by = getpid();
    initialised = true;
    return initialised_by == getpid() ? CU_SUCCESS : CU_NOT_INITIALIZED;
}

EXPORT cu_result cuDriverGetVersion(int *version)
{
    *version = 13000;
    return CU_SUCCESS;
}

EXPORT cu_result cuGetErrorName(cu_result error, const char **name)
{
    *name = error == ILLEGAL_ADDRESS    ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : error == CU_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                        : "CUDA_ERROR_OF_THE_EMULATOR";
    return CU_SUCCESS;
}

EXPORT cu_result cuGetErrorString(cu_result error, const char **text)
{
    (void)error;
    *text = "an emulated error";
    return CU_SUCCESS;
}

EXPORT cu_result cuDeviceGet(cu_device *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? CU_SUCCESS : 101;
}

EXPORT cu_result cuDeviceGetCount(int *count)
{
    *count = 1;
    return CU_SUCCESS;
}

EXPORT cu_result cuDeviceGetAttribute(int *value, int attribute, cu_device device)
{
    (void)device;
    *value = attribute == CU_DEVICE_MAJOR ? 9 : attribute == CU_DEVICE_MINOR ? 0 : 4;
    return CU_SUCCESS;
}

EXPORT cu_result cuDeviceGetUuid_v2(struct cu_uuid *uuid, cu_device device)
{
    (void)device;
    memset(uuid, 7, sizeof *uuid);
    return CU_SUCCESS;
}

EXPORT cu_result cuDeviceCanAccessPeer(int *can, cu_device from, cu_device to)
{
    (void)from;
    (void)to;
    *can = 0;
    return CU_SUCCESS;
}

EXPORT cu_result cuDevicePrimaryCtxRetain(cu_context *context, cu_device device)
{
    static int primary;
    (void)device;
    *context = &primary;
    return CU_SUCCESS;
}

EXPORT cu_result cuDevicePrimaryCtxRelease_v2(cu_device device)
{
    (void)device;
    return CU_SUCCESS;
}

EXPORT cu_result cuCtxPushCurrent_v2(cu_context context)
{
    (void)context;
    return CU_SUCCESS;
}

EXPORT cu_result cuCtxPopCurrent_v2(cu_context *context)
{
    *context = NULL;
    return CU_SUCCESS;
}

EXPORT cu_result cuCtxEnablePeerAccess(cu_context peer, unsigned flags)
{
    (void)peer;
    (void)flags;
    return CU_SUCCESS;
}

/* ---- NVRTC: it takes any source ---- */

static int program_of_nvrtc;

EXPORT int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return 0;
}

EXPORT int nvrtcCreateProgram(void **program, const char *source, const char *name, int nheaders,
                              const char *const *headers, const char *const *names)
{
    (void)source;
    (void)name;
    (void)nheaders;
    (void)headers;
    (void)names;
    *program = &program_of_nvrtc;
    return 0;
}

EXPORT int nvrtcDestroyProgram(void **program)
{
    *program = NULL;
    return 0;
}

EXPORT int nvrtcCompileProgram(void *program, int noptions, const char *const *options)
{
    (void)program;
    (void)noptions;
    (void)options;
    return getenv("EMULATED_NVRTC_FAILS") ? 6 : 0;
}

#define NVRTC_TEXT(size_name, name, text)                                                          \
    EXPORT int size_name(void *program, size_t *nbytes)                                            \
    {                                                                                              \
        (void)program;                                                                             \
        *nbytes = sizeof text;                                                                     \
        return 0;                                                                                  \
    }                                                                                              \
    EXPORT int name(void *program, char *out)                                                      \
    {                                                                                              \
        (void)program;                                                                             \
        memcpy(out, text, sizeof text);                                                            \
        return 0;                                                                                  \
    }
NVRTC_TEXT(nvrtcGetProgramLogSize, nvrtcGetProgramLog, "a log of the emulator")
NVRTC_TEXT(nvrtcGetCUBINSize, nvrtcGetCUBIN, "cubin")
NVRTC_TEXT(nvrtcGetPTXSize, nvrtcGetPTX, "ptx")

EXPORT int nvrtcGetNumSupportedArchs(int *count)
{
    *count = 1;
    return 0;
}

EXPORT int nvrtcGetSupportedArchs(int *archs)
{
    archs[0] = 90;
    return 0;
}

EXPORT const char *nvrtcGetErrorString(int result)
{
    return result ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS";
}
