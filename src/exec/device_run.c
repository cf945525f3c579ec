/* device_run.c - runs in one process by kernels of a CUDA device: one launch per stage for all arrays.
 *
 * The program of the exec is translated at the first run, and its tables stay on the device. Later runs only pass
 * the addresses of their arrays. Kernels use memory of this device, of devices that it can access, managed and
 * pinned memory. Pageable arrays are pinned for the time of the run.
 */
#include "device_run.h"

#include <unistd.h>

/* Whole pages of pageable memory. */
struct page_range {
    char *begin;
    size_t nbytes;
};

struct device_run {
    int ordinal;
    struct cuda_device *device;
    struct cuda_queue *queue;
    struct cuda_program *stages[MAX_STAGES]; /* NULL: nothing to do in a stage */
    uint64_t accessible;                     /* a bit for each device that this one can access */
    const void **addresses;                  /* sources, then destinations */
    struct page_range *pinned;               /* of the current run */
    size_t npinned;
    uint64_t mark; /* behind the current run */
};

/* ---- choosing a device ---- */

static const void *array_address(const struct run_arrays *arrays, int64_t number)
{
    return number < arrays->nsrc ? (const void *)arrays->src[number]
                                 : arrays->dst[number - arrays->nsrc];
}

static const struct array_span *array_span_of(const struct run_arrays *arrays, int64_t number)
{
    return number < arrays->nsrc ? &arrays->src_spans[number]
                                 : &arrays->dst_spans[number - arrays->nsrc];
}

static bool is_used(const struct run_arrays *arrays, int64_t number)
{
    const struct array_span *span = array_span_of(arrays, number);
    return span->used && span->nbytes > 0;
}

int device_run_choose(const struct run_arrays *arrays, bool ordered)
{
    if (!cuda_is_loaded())
        return -1;
    for (int64_t i = 0; i < arrays->nsrc + arrays->ndst; i++) {
        if (!is_used(arrays, i))
            continue;
        struct cuda_place place = cuda_find_place(array_address(arrays, i));
        if (!place.for_host || (ordered && place.device >= 0))
            return place.device < 0 ? 0 : place.device;
    }
    return -1;
}

/* ---- translating the program ---- */

static rsd_status add_copy_op(struct cuda_ops *ops, const struct program *program,
                              const struct copy_op *op, int64_t nsrc)
{
    int64_t nbytes = op->block.nrows * (int64_t)op->block.run;
    return cuda_ops_add_copy(
        ops, &(struct cuda_copy){.src = (uint32_t)(op->src + (op->from_destination ? nsrc : 0)),
                                 .dst = (uint32_t)(op->dst + nsrc),
                                 .src_offset = op->src_offset,
                                 .dst_offset = op->dst_offset,
                                 .run = (int64_t)op->block.run,
                                 .end = nbytes,
                                 .loops = program->loops + op->first_loop,
                                 .nloops = op->block.nloops});
}

static rsd_status add_sum_op(struct cuda_ops *ops, const struct program *program,
                             const struct sum_op *sum, int64_t nsrc)
{
    TRY(cuda_ops_add_sum(ops, &(struct cuda_sum){.reduction = sum->reduction,
                                                 .dst = (uint32_t)(sum->dst + nsrc),
                                                 .dst_offset = sum->dst_offset,
                                                 .loops = program->loops + sum->first_loop,
                                                 .nloops = sum->nloops}));
    for (int64_t t = 0; t < sum->reduction.nterms; t++) {
        const struct sum_term *term = &program->terms[sum->first_term + t];
        TRY(cuda_ops_add_term(ops, (uint32_t)term->src, term->offset,
                              program->strides + term->first_stride, sum->nloops));
    }
    return RSD_OK;
}

static rsd_status add_stage_ops(struct cuda_ops *ops, const struct program *program, int32_t stage,
                                int64_t nsrc)
{
    for (size_t i = 0; stage == 0 && i < program->nsums; i++)
        TRY(add_sum_op(ops, program, &program->sums[i], nsrc));
    for (size_t i = 0; i < program->ncopies; i++)
        if (program->copies[i].stage == stage)
            TRY(add_copy_op(ops, program, &program->copies[i], nsrc));
    return RSD_OK;
}

static rsd_status translate_program(struct device_run *run, const struct program *program,
                                    const struct run_arrays *arrays)
{
    struct cuda_ops *ops;
    size_t narrays = (size_t)(arrays->nsrc + arrays->ndst);
    if (narrays > UINT32_MAX)
        return fail(RSD_ELIMIT, "more than 2^32 arrays for a GPU");
    TRY(cuda_ops_new(&ops));
    rsd_status status = RSD_OK;
    for (int32_t stage = 0; stage < MAX_STAGES && !status; stage++) {
        cuda_ops_clear(ops);
        status = add_stage_ops(ops, program, stage, arrays->nsrc);
        if (!status && !cuda_ops_is_empty(ops))
            status = cuda_program_new(run->device, ops, narrays, &run->stages[stage]);
    }
    cuda_ops_free(ops);
    return status;
}

/* ---- life ---- */

static void unpin_pages(struct device_run *run)
{
    while (run->npinned > 0)
        cuda_unregister(run->device, run->pinned[--run->npinned].begin);
}

void device_run_free(struct device_run *run)
{
    if (!run)
        return;
    cuda_queue_free(run->queue); /* waits */
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        cuda_program_free(run->stages[stage]);
    mem_free(run->addresses);
    mem_free(run->pinned);
    mem_free(run);
}

static rsd_status new_device_run(int ordinal, const struct program *program,
                                 const struct run_arrays *arrays, struct device_run **out)
{
    size_t narrays = (size_t)(arrays->nsrc + arrays->ndst);
    struct device_run *run = mem_new(1, sizeof *run);
    if (!run)
        return RSD_ENOMEM;
    run->ordinal = ordinal;
    run->addresses = mem_new(narrays, sizeof *run->addresses);
    run->pinned = mem_new(narrays, sizeof *run->pinned);
    rsd_status status = run->addresses && run->pinned ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = cuda_open_device(ordinal, &run->device);
    if (!status)
        status = cuda_queue_new(run->device, &run->queue);
    if (!status)
        status = translate_program(run, program, arrays);
    if (status)
        device_run_free(run);
    else
        *out = run;
    return status;
}

/* ---- the arrays of a run ---- */

static rsd_status check_access(struct device_run *run, int other)
{
    bool can = true;
    if (other < 0 || other == run->ordinal || run->accessible & (uint64_t)1 << other)
        return RSD_OK;
    TRY(cuda_enable_peer(run->device, other, &can));
    if (!can)
        return fail(RSD_EUNSUPPORTED, "CUDA device %d cannot access the memory of device %d",
                    run->ordinal, other);
    run->accessible |= (uint64_t)1 << other;
    return RSD_OK;
}

/* Adds the pages of an array. Arrays come in the order of their addresses. */
static void add_pages(struct device_run *run, const void *address, uint64_t nbytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    char *begin = (char *)without_const(address) - (uintptr_t)address % page;
    size_t n = ((uintptr_t)address + nbytes - (uintptr_t)begin + page - 1) / page * page;
    struct page_range *last = run->npinned ? &run->pinned[run->npinned - 1] : NULL;
    if (!last || begin >= last->begin + last->nbytes)
        run->pinned[run->npinned++] = (struct page_range){begin, n};
    else if (begin + n > last->begin + last->nbytes)
        last->nbytes = (size_t)(begin + n - last->begin);
}

static rsd_status pin_pages(struct device_run *run)
{
    for (size_t i = 0; i < run->npinned; i++) {
        rsd_status status = cuda_register(run->device, run->pinned[i].begin, run->pinned[i].nbytes);
        if (status) {
            run->npinned = i;
            unpin_pages(run);
            return fail_in(status, "an array in pageable memory: ");
        }
    }
    return RSD_OK;
}

static rsd_status prepare_arrays(struct device_run *run, const struct run_arrays *arrays)
{
    run->npinned = 0;
    for (int64_t i = 0; i < arrays->nsrc + arrays->ndst; i++) {
        int64_t number = arrays->order[i];
        const void *address = array_address(arrays, number);
        run->addresses[number] = address;
        if (!is_used(arrays, number))
            continue;
        struct cuda_place place = cuda_find_place(address);
        TRY(check_access(run, place.device));
        if (!place.for_kernels)
            add_pages(run, address, array_span_of(arrays, number)->nbytes);
    }
    return pin_pages(run);
}

/* ---- running ---- */

static rsd_status queue_stages(struct device_run *run, void *stream)
{
    TRY(cuda_queue_use_stream(run->queue, stream));
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        if (run->stages[stage])
            TRY(cuda_program_run(run->stages[stage], run->queue, run->addresses));
    return cuda_queue_mark(run->queue, &run->mark);
}

rsd_status device_run_start(struct device_run **kept, int device, const struct program *program,
                            const struct run_arrays *arrays, void *stream, bool *pageable)
{
    if (*kept && (*kept)->ordinal != device) {
        device_run_free(*kept);
        *kept = NULL;
    }
    if (!*kept)
        TRY(new_device_run(device, program, arrays, kept));
    struct device_run *run = *kept;
    TRY(prepare_arrays(run, arrays));
    *pageable = run->npinned > 0;
    rsd_status status = queue_stages(run, stream);
    if (status)
        unpin_pages(run);
    return status;
}

rsd_status device_run_wait(struct device_run *run)
{
    rsd_status status = cuda_queue_wait_mark(run->queue, run->mark);
    unpin_pages(run);
    return status;
}
