/* emulator_streams.c - kernels, streams and events of the emulator. */
#include "emulator.h"
#include "tables.h"

#include <stdlib.h>
#include <string.h>

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
    int device;
    bool is_default;
    bool
        blocking; /* the default stream waits for its work, and it for that of the default stream */
};

struct event {
    int device;
    uint64_t records, done; /* recorded, and reached */
    struct stream *stream;  /* of the last record */
    int nqueries;
};

struct kernel_code {
    const char *name;
    void (*run)(const uint64_t *parameters);
    int nparameters;
    int device;
};

static int running; /* the device whose task runs */

/* ---- kernels ---- */

/* A table without entries may begin where the memory ends. */
#define PARAMETER(type, i) ((type)(void *)memory_find(p[i]))

/* A kernel may cross from one mapped block to the next, so each unit is translated by itself. */
static void run_copy(const uint64_t *p)
{
    const struct gpu_copy *copies = PARAMETER(const struct gpu_copy *, 0);
    const struct gpu_loop *all = PARAMETER(const struct gpu_loop *, 2);
    const gpu_u64 *arrays = PARAMETER(const gpu_u64 *, 3);
    gpu_i64 ntiles = (gpu_i64)p[4];
    for (gpu_i64 number = 0; number < ntiles && !emulator_failed; number++) {
        struct gpu_tile tile;
        const struct gpu_copy *copy =
            &copies[gpu_find_entry(copies, sizeof *copies, (gpu_u32)p[1], number)];
        const struct gpu_loop *loops = all + copy->first_loop;
        gpu_u64 src = arrays[copy->src], dst = arrays[copy->dst];
        bool cast = copy->from != 0;
        gpu_u32 word = gpu_word(src, dst, cast ? 1 : copy->align),
                in = cast ? gpu_nbytes(copy->from) : word, out = cast ? gpu_nbytes(copy->to) : word;
        gpu_copy_tile(copy, all, number - copy->first_tile, in, out, &tile);
        for (gpu_u32 unit = 0; unit < tile.nunits && !emulator_failed; unit++) {
            gpu_i64 from, to;
            gpu_tile_unit(&tile, loops, unit, &from, &to);
            const char *source = memory_for_kernel(running, src + (gpu_u64)from);
            char *target = source ? memory_for_kernel(running, dst + (gpu_u64)to) : NULL;
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
    gpu_u64 *arrays = PARAMETER(gpu_u64 *, 5), shadows[4096], bases[GPU_NBASES + 1];
    gpu_i64 outer[GPU_MAX_LOOPS];
    struct gpu_element element = {.loops = PARAMETER(const struct gpu_loop *, 2),
                                  .terms = PARAMETER(const struct gpu_term *, 3),
                                  .strides = PARAMETER(const gpu_i64 *, 4),
                                  .arrays = shadows,
                                  .bases = bases,
                                  .outer = outer};
    for (gpu_i64 number = 0; number < (gpu_i64)p[6] && !emulator_failed; number++) {
        element.sum = sums + gpu_find_entry(sums, sizeof *sums, (gpu_u32)p[1], number);
        gpu_i64 first = element.sum->begin + (number - element.sum->first_tile) * GPU_SUM_TILE;
        shadows[element.sum->dst] =
            (gpu_u64)(uintptr_t)memory_for_kernel(running, arrays[element.sum->dst]);
        for (gpu_u32 t = 0; t < element.sum->nterms; t++) {
            gpu_u32 src = element.terms[element.sum->first_term + t].src;
            shadows[src] = (gpu_u64)(uintptr_t)memory_for_kernel(running, arrays[src]);
        }
        for (gpu_u32 i = 0; i <= GPU_NBASES; i++)
            bases[i] = gpu_base_of(&element, i);
        for (gpu_i64 i = first;
             i < first + GPU_SUM_TILE && i < element.sum->end && !emulator_failed;
             i += element.sum->neighbours) {
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
    for (gpu_u32 i = 0; i < (gpu_u32)p[1] && !emulator_failed; i++)
        for (gpu_i64 row = 0; row < digests[i].nrows && !emulator_failed; row++) {
            gpu_i64 at, after;
            gpu_digest_row(&digests[i], loops, row, &at, &after);
            const char *bytes = memory_for_kernel(running, arrays[digests[i].array] + (gpu_u64)at);
            for (int crc = 0; bytes && crc < GPU_NCRC; crc++)
                results[digests[i].result * GPU_NCRC + (gpu_u32)crc] ^=
                    gpu_shift(crc, powers, gpu_crc_bytes(crc, 0, bytes, (gpu_u32)digests[i].run),
                              (gpu_u64)after);
        }
}

static const struct kernel_code codes[] = {{"rsd_copy", run_copy, 5, 0},
                                           {"rsd_cast", run_copy, 5, 0},
                                           {"rsd_reduce", run_sums, 7, 0},
                                           {"rsd_digest", run_digests, 8, 0}};
enum { NCODES = sizeof codes / sizeof *codes };

/* A module is what a context has loaded. */
static struct kernel_code loaded[NDEVICES][NCODES];

EXPORT cu_result cuModuleLoadData(cu_module *module, const void *image)
{
    ENTER_CONTEXT;
    (void)image;
    for (int i = 0; i < NCODES && !result; i++) {
        loaded[context->device][i] = codes[i];
        loaded[context->device][i].device = context->device;
    }
    if (!result)
        *module = loaded[context->device];
    LEAVE;
}

EXPORT cu_result cuModuleGetFunction(cu_function *function, cu_module module, const char *name)
{
    for (struct kernel_code *code = module; code < (struct kernel_code *)module + NCODES; code++)
        if (strcmp(code->name, name) == 0) {
            *function = code;
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

/* The default streams, then those that were made. */
static struct stream defaults[NDEVICES] = {{.next = &defaults[1], .device = 0, .is_default = true},
                                           {.next = &defaults[2], .device = 1, .is_default = true},
                                           {.device = 2, .is_default = true}};
static struct stream *streams = defaults;

static struct stream *new_stream(int device, bool blocking)
{
    struct stream *made = calloc(1, sizeof *made);
    if (!made)
        abort();
    made->device = device;
    made->blocking = blocking;
    made->next = streams->next;
    streams->next = made;
    return made;
}

/* NULL and CU_STREAM_LEGACY are the default stream of the current context, CU_STREAM_PER_THREAD is a stream of the
 * thread in it. */
static struct stream *stream_of(cu_stream stream)
{
    static _Thread_local struct stream *of_thread[NDEVICES];
    const struct context *context = context_current();
    int device = context ? context->device : 0;
    if ((uintptr_t)stream == CU_STREAM_PER_THREAD)
        return of_thread[device] ? of_thread[device]
                                 : (of_thread[device] = new_stream(device, true));
    return (uintptr_t)stream > CU_STREAM_LEGACY ? stream : &defaults[device];
}

static void run_stream(struct stream *stream);

/* Does the work that must be done before what is added to a stream next. */
static void run_before(struct stream *stream)
{
    for (struct stream *one = streams; one; one = one->next)
        if (one->device == stream->device &&
            (stream->is_default ? one->blocking : stream->blocking && one->is_default))
            run_stream(one);
}

static void add_task(struct stream *stream, struct task task)
{
    run_before(stream);
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
    int before = running;
    running = stream->device;
    stream->first = task->next;
    if (!task->next)
        stream->last = NULL;
    if (task->kind == LAUNCH && getenv("EMULATED_LAUNCH_FAILS"))
        emulator_failed = ILLEGAL_ADDRESS;
    if (task->kind == LAUNCH && !emulator_failed)
        task->code->run(task->parameters);
    else if (task->kind == RECORD)
        task->event->done = task->record;
    else if (task->kind == WAIT)
        run_until(task->event, task->record);
    else if (task->kind == SET && !emulator_failed && memory_for_kernel(running, task->to))
        memset(memory_for_kernel(running, task->to), task->value, task->nbytes);
    running = before;
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

void streams_run_all(void)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        run_stream(stream);
}

EXPORT cu_result cuStreamCreate(cu_stream *stream, unsigned flags)
{
    ENTER_CONTEXT;
    *stream = new_stream(context ? context->device : 0, !(flags & CU_STREAM_NON_BLOCKING));
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

EXPORT cu_result cuStreamGetCtx(cu_stream stream, cu_context *found)
{
    ENTER;
    if (!result && (uintptr_t)stream <= CU_STREAM_PER_THREAD && !context_current())
        result = INVALID_CONTEXT;
    if (!result)
        *found = context_of(stream_of(stream)->device);
    LEAVE;
}

EXPORT cu_result cuStreamSynchronize(cu_stream stream)
{
    ENTER_CONTEXT;
    run_before(stream_of(stream));
    run_stream(stream_of(stream));
    result = result ? result : emulator_failed;
    LEAVE;
}

EXPORT cu_result cuStreamQuery(cu_stream stream)
{
    ENTER_CONTEXT;
    struct stream *queried = stream_of(stream);
    if (queried->is_default)
        run_before(queried);
    if (!result && queried->first)
        result = CU_NOT_READY;
    LEAVE;
}

EXPORT cu_result cuEventCreate(cu_event *event, unsigned flags)
{
    ENTER_CONTEXT;
    (void)flags;
    struct event *made = calloc(1, sizeof *made);
    made->device = context ? context->device : 0;
    *event = made;
    LEAVE;
}

EXPORT cu_result cuEventDestroy_v2(cu_event event)
{
    ENTER;
    struct event *destroyed = event;
    run_until(destroyed, destroyed->records);
    streams_run_all();
    free(event);
    LEAVE;
}

EXPORT cu_result cuEventRecord(cu_event event, cu_stream stream)
{
    ENTER_CONTEXT;
    struct event *recorded = event;
    if (!result && recorded->device != stream_of(stream)->device)
        result = INVALID_HANDLE;
    if (!result) {
        recorded->stream = stream_of(stream);
        recorded->nqueries = 0;
        add_task(recorded->stream,
                 (struct task){.kind = RECORD, .event = event, .record = ++recorded->records});
    }
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
    result = emulator_failed;
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
    if (emulator_failed)
        result = emulator_failed;
    LEAVE;
}

EXPORT cu_result cuLaunchKernel(cu_function function, unsigned grid_x, unsigned grid_y,
                                unsigned grid_z, unsigned block_x, unsigned block_y,
                                unsigned block_z, unsigned shared_nbytes, cu_stream stream,
                                void **parameters, void **extra)
{
    ENTER_CONTEXT;
    struct kernel_code *code = function;
    struct task task = {.kind = LAUNCH, .code = code};
    (void)extra;
    if (!result && (grid_x < 1 || grid_y != 1 || grid_z != 1 || block_x > 1024 || block_y != 1 ||
                    block_z != 1 || shared_nbytes > 200 << 10))
        result = INVALID_VALUE;
    if (!result && (code->device != context->device || stream_of(stream)->device != code->device))
        result = INVALID_HANDLE;
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
    ENTER_CONTEXT;
    struct stream *at = stream_of(stream);
    run_stream(at);
    if (!result)
        memcpy(memory_for_kernel(at->device, to), memory_for_kernel(at->device, from), nbytes);
    LEAVE;
}
