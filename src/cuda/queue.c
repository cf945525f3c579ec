/* queue.c - copies, casts and reductions in the order of a stream.
 *
 * Small tables travel in a ring of pinned memory that kernels read directly: no copy is queued for
 * them. A part of the ring is used again when the mark behind the launch that reads it is done. Tables
 * that are run many times stay in device memory instead, and only their addresses change.
 *
 *     ring   | tables of launch 1 | tables of launch 2 |      free      |
 */
#include "queue.h"
#include "launch_tables.h"

enum { NTHREADS = 256, BLOCKS_PER_PROCESSOR = 8 };

/* ---- life ---- */

static rsd_status start_queue(struct cuda_queue *queue)
{
    const struct driver *cu = queue->device->cu;
    CU_TRY(cuStreamCreate, &queue->own, CU_STREAM_NON_BLOCKING);
    queue->stream = queue->own;
    for (int i = 0; i < NMARKS; i++)
        CU_TRY(cuEventCreate, &queue->events[i], CU_EVENT_DISABLE_TIMING);
    CU_TRY(cuMemHostAlloc, (void **)&queue->ring, RING_NBYTES, 0);
    queue->ring_nbytes = RING_NBYTES;
    return RSD_OK;
}

/* Frees a queue that is not kept for the next user. */
static void destroy_queue(struct cuda_queue *queue)
{
    const struct driver *cu = queue->device->cu;
    if (!device_enter(queue->device)) {
        for (int i = 0; i < NMARKS && queue->events[i]; i++)
            cu->cuEventDestroy(queue->events[i]);
        if (queue->ring)
            cu->cuMemFreeHost(queue->ring);
        if (queue->own)
            cu->cuStreamDestroy(queue->own);
        device_leave(queue->device);
    }
    mem_free(queue);
}

rsd_status cuda_queue_new(struct memory_device *base, struct memory_queue **out)
{
    struct cuda_device *device = cuda_device_of(base);
    pthread_mutex_lock(&device->lock);
    struct cuda_queue *queue = device->kept;
    if (queue)
        device->kept = queue->next;
    pthread_mutex_unlock(&device->lock);
    if (queue) {
        *out = &queue->base;
        return RSD_OK;
    }
    queue = mem_new(1, sizeof *queue);
    if (!queue)
        return RSD_ENOMEM;
    queue->base.kind = &cuda_kind;
    queue->device = device;
    rsd_status status = device_enter(device);
    if (!status) {
        status = start_queue(queue);
        device_leave(device);
    }
    if (status)
        destroy_queue(queue);
    else
        *out = &queue->base;
    return status;
}

static rsd_status wait_for_all(struct cuda_queue *queue)
{
    if (queue->unmarked)
        return cuda_queue_wait(&queue->base);
    return queue->nmarks ? cuda_queue_wait_mark(&queue->base, queue->nmarks - 1) : RSD_OK;
}

/* A queue that failed is not kept: its stream may be unusable. */
void cuda_queue_free(struct memory_queue *base)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    struct cuda_device *device = queue->device;
    if (wait_for_all(queue)) {
        destroy_queue(queue);
        return;
    }
    queue->stream = queue->own;
    pthread_mutex_lock(&device->lock);
    queue->next = device->kept;
    device->kept = queue;
    pthread_mutex_unlock(&device->lock);
}

/* ---- marks ---- */

static rsd_status make_mark(struct cuda_queue *queue, uint64_t *mark)
{
    const struct driver *cu = queue->device->cu;
    cu_event event = queue->events[queue->nmarks % NMARKS];
    if (queue->nmarks >= NMARKS)
        CU_TRY(cuEventSynchronize, event);
    CU_TRY(cuEventRecord, event, queue->stream);
    queue->unmarked = false;
    *mark = queue->nmarks++;
    return RSD_OK;
}

static bool is_forgotten(const struct cuda_queue *queue, uint64_t mark)
{
    return mark + NMARKS < queue->nmarks;
}

rsd_status cuda_queue_mark(struct memory_queue *base, uint64_t *mark)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    TRY(device_enter(queue->device));
    rsd_status status = make_mark(queue, mark);
    device_leave(queue->device);
    return status;
}

rsd_status cuda_queue_test_mark(struct memory_queue *base, uint64_t mark, bool *done)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    *done = true;
    if (is_forgotten(queue, mark))
        return RSD_OK;
    TRY(device_enter(queue->device));
    cu_result result = queue->device->cu->cuEventQuery(queue->events[mark % NMARKS]);
    device_leave(queue->device);
    *done = result != CU_NOT_READY;
    return *done ? driver_check(result, "cuEventQuery") : RSD_OK;
}

rsd_status cuda_queue_wait_mark(struct memory_queue *base, uint64_t mark)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    if (is_forgotten(queue, mark))
        return RSD_OK;
    TRY(device_enter(queue->device));
    cu_result result = queue->device->cu->cuEventSynchronize(queue->events[mark % NMARKS]);
    device_leave(queue->device);
    return driver_check(result, "cuEventSynchronize");
}

rsd_status cuda_queue_wait(struct memory_queue *base)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    TRY(device_enter(queue->device));
    cu_result result = queue->device->cu->cuStreamSynchronize(queue->stream);
    device_leave(queue->device);
    return driver_check(result, "cuStreamSynchronize");
}

rsd_status cuda_queue_is_idle(struct memory_queue *base, bool *idle)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    *idle = false;
    TRY(device_enter(queue->device));
    cu_result result = queue->device->cu->cuStreamQuery(queue->stream);
    device_leave(queue->device);
    *idle = result == CU_SUCCESS;
    return result == CU_NOT_READY ? RSD_OK : driver_check(result, "cuStreamQuery");
}

/* What was queued in the stream before is ordered before what is queued in the next. A stream of the caller's may
 * be destroyed once its work is marked, so it is not used again then. */
static rsd_status change_stream(struct cuda_queue *queue, cu_stream next)
{
    const struct driver *cu = queue->device->cu;
    uint64_t mark;
    if (queue->unmarked)
        TRY(make_mark(queue, &mark));
    if (queue->nmarks)
        CU_TRY(cuStreamWaitEvent, next, queue->events[(queue->nmarks - 1) % NMARKS], 0);
    queue->stream = next;
    return RSD_OK;
}

rsd_status cuda_queue_use_stream(struct memory_queue *base, void *stream)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    /* Another thread may have used the handle before, which was another stream then. */
    if (stream == queue->stream && (uintptr_t)stream != CU_STREAM_PER_THREAD)
        return RSD_OK;
    TRY(device_enter(queue->device));
    rsd_status status = change_stream(queue, stream);
    device_leave(queue->device);
    return status;
}

/* An event can only be recorded in a stream of its context, so a stream of another device needs one of its own. */
static rsd_status follow_other(struct cuda_queue *queue, cu_stream stream, cu_context context)
{
    const struct driver *cu = queue->device->cu;
    cu_event event = NULL;
    CU_TRY(cuCtxPushCurrent, context);
    cu_result result = cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (!result)
        result = cu->cuEventRecord(event, stream);
    cu->cuCtxPopCurrent(&context);
    if (!result)
        result = cu->cuStreamWaitEvent(queue->stream, event, 0);
    if (event)
        cu->cuEventDestroy(event); /* what waits for it still does */
    return driver_check(result, "cuEventRecord");
}

static rsd_status follow_stream(struct cuda_queue *queue, cu_stream stream)
{
    const struct driver *cu = queue->device->cu;
    cu_context context = queue->device->context;
    if (stream)
        CU_TRY(cuStreamGetCtx, stream, &context);
    if (context != queue->device->context)
        return follow_other(queue, stream, context);
    cu_event event = queue->events[queue->nmarks % NMARKS];
    if (queue->nmarks >= NMARKS)
        CU_TRY(cuEventSynchronize, event);
    queue->nmarks++; /* the event is used up, like that of a mark */
    CU_TRY(cuEventRecord, event, stream);
    CU_TRY(cuStreamWaitEvent, queue->stream, event, 0);
    return RSD_OK;
}

rsd_status cuda_queue_follow(struct memory_queue *base, void *stream)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    TRY(device_enter(queue->device));
    rsd_status status = follow_stream(queue, stream);
    device_leave(queue->device);
    return status;
}

/* ---- launches ---- */

/* Launches a kernel over so many tiles; 0: nothing is launched. */
static rsd_status launch_kernel(struct cuda_queue *queue, enum kernel_id id, int64_t ntiles,
                                void **parameters)
{
    struct cuda_device *device = queue->device;
    const struct driver *cu = device->cu;
    cu_function function;
    int64_t most = (int64_t)device->nprocessors * BLOCKS_PER_PROCESSOR;
    if (ntiles == 0)
        return RSD_OK;
    TRY(device_kernel(device, id, &function));
    CU_TRY(cuLaunchKernel, function, (unsigned)min_i64(ntiles, most), 1, 1, NTHREADS, 1, 1, 0,
           queue->stream, parameters, NULL);
    queue->unmarked = true;
    return RSD_OK;
}

static rsd_status launch_all(struct cuda_queue *queue, struct launch *l)
{
    void *copies[] = {&l->copies, &l->ncopies, &l->loops, &l->arrays, &l->copy_tiles};
    void *casts[] = {&l->casts, &l->ncasts, &l->loops, &l->arrays, &l->cast_tiles};
    void *sums[] = {&l->sums,    &l->nsums,  &l->loops,    &l->terms,
                    &l->strides, &l->arrays, &l->sum_tiles};
    TRY(launch_kernel(queue, KERNEL_REDUCE, l->sum_tiles, sums));
    TRY(launch_kernel(queue, KERNEL_COPY, l->copy_tiles, copies));
    return launch_kernel(queue, KERNEL_CAST, l->cast_tiles, casts);
}

/* Replaces the ring by one whose halves have at least nbytes bytes. */
static rsd_status grow_ring(struct cuda_queue *queue, size_t nbytes)
{
    const struct driver *cu = queue->device->cu;
    size_t half = queue->ring_nbytes / 2;
    char *ring;
    while (half < nbytes)
        half *= 2;
    CU_TRY(cuMemHostAlloc, (void **)&ring, 2 * half, 0);
    CU_TRY(cuStreamSynchronize, queue->stream);
    CU_TRY(cuMemFreeHost, queue->ring);
    queue->ring = ring;
    queue->ring_nbytes = 2 * half;
    queue->ring_at = 0;
    queue->ring_used[0] = queue->ring_used[1] = false;
    return RSD_OK;
}

rsd_status queue_take_ring(struct cuda_queue *queue, size_t nbytes, char **out)
{
    if (nbytes > queue->ring_nbytes / 2)
        TRY(grow_ring(queue, nbytes));
    size_t half_nbytes = queue->ring_nbytes / 2, half = queue->ring_at >= half_nbytes;
    if (queue->ring_at + nbytes > (half + 1) * half_nbytes) {
        TRY(make_mark(queue, &queue->ring_mark[half]));
        queue->ring_used[half] = true;
        half = 1 - half;
        queue->ring_at = half * half_nbytes;
        if (queue->ring_used[half] && !is_forgotten(queue, queue->ring_mark[half]))
            TRY(driver_check(queue->device->cu->cuEventSynchronize(
                                 queue->events[queue->ring_mark[half] % NMARKS]),
                             "cuEventSynchronize"));
    }
    *out = queue->ring + queue->ring_at;
    queue->ring_at += nbytes;
    return RSD_OK;
}

/* Copies tables and addresses into the ring of pinned memory, and launches what they list. */
static rsd_status run_from_ring(struct cuda_queue *queue, const struct device_ops *ops,
                                const void *const *arrays, size_t narrays)
{
    struct launch launch;
    char *at;
    size_t nbytes = launch_tables_nbytes(ops);
    TRY(queue_take_ring(queue, nbytes + padded_nbytes(narrays * sizeof *arrays), &at));
    launch_put_tables(ops, at, (cu_address)(uintptr_t)at, &launch);
    if (narrays)
        memcpy(at + nbytes, arrays, narrays * sizeof *arrays);
    launch.arrays = (cu_address)(uintptr_t)(at + nbytes);
    return launch_all(queue, &launch);
}

rsd_status cuda_queue_run(struct memory_queue *base, const struct device_ops *ops,
                          const void *const *arrays, size_t narrays)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    TRY(device_enter(queue->device));
    rsd_status status = run_from_ring(queue, ops, arrays, narrays);
    device_leave(queue->device);
    return status;
}

/* ---- programs ---- */

struct cuda_program {
    struct memory_program base;
    struct cuda_device *device;
    cu_address tables;
    struct launch launch;
    size_t narrays;
};

static struct cuda_program *cuda_program_of(struct memory_program *program)
{
    return (struct cuda_program *)(void *)program;
}

/* Copies the tables of a program to the device, where they stay. */
static rsd_status upload_tables(struct cuda_program *program, const struct device_ops *ops)
{
    const struct driver *cu = program->device->cu;
    size_t nbytes = launch_tables_nbytes(ops);
    if (nbytes == 0)
        return RSD_OK;
    char *copy = mem_new(nbytes, 1);
    if (!copy)
        return RSD_ENOMEM;
    rsd_status status = driver_check(cu->cuMemAlloc(&program->tables, nbytes), "cuMemAlloc");
    if (!status) {
        launch_put_tables(ops, copy, program->tables, &program->launch);
        status = device_upload(program->device, program->tables, copy, nbytes);
    }
    mem_free(copy);
    return status;
}

rsd_status cuda_program_new(struct memory_device *base, const struct device_ops *ops,
                            size_t narrays, struct memory_program **out)
{
    struct cuda_device *device = cuda_device_of(base);
    struct cuda_program *program = mem_new(1, sizeof *program);
    if (!program)
        return RSD_ENOMEM;
    program->base.kind = &cuda_kind;
    program->device = device;
    program->narrays = narrays;
    rsd_status status = device_enter(device);
    if (!status) {
        status = upload_tables(program, ops);
        device_leave(device);
    }
    if (status)
        cuda_program_free(&program->base);
    else
        *out = &program->base;
    return status;
}

void cuda_program_free(struct memory_program *base)
{
    struct cuda_program *program = cuda_program_of(base);
    if (program->tables && !device_enter(program->device)) {
        program->device->cu->cuMemFree(program->tables);
        device_leave(program->device);
    }
    mem_free(program);
}

/* The addresses change with every run, so they travel in the ring. */
static rsd_status run_program(const struct cuda_program *program, struct cuda_queue *queue,
                              const void *const *arrays)
{
    struct launch launch = program->launch;
    size_t nbytes = program->narrays * sizeof *arrays;
    char *at;
    TRY(queue_take_ring(queue, padded_nbytes(nbytes), &at));
    if (nbytes)
        memcpy(at, arrays, nbytes);
    launch.arrays = (cu_address)(uintptr_t)at;
    return launch_all(queue, &launch);
}

rsd_status cuda_program_run(struct memory_program *program, struct memory_queue *base,
                            const void *const *arrays)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    TRY(device_enter(queue->device));
    rsd_status status = run_program(cuda_program_of(program), queue, arrays);
    device_leave(queue->device);
    return status;
}
