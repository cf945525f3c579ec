/* device_run.c - runs in one process by kernels of a device: one launch per stage for all arrays.
 *
 * The program of the exec is translated at the first run, and its tables stay on the device. Later runs only pass
 * the addresses of their arrays.
 */
#include "device_run.h"

struct device_run {
    struct device_arrays arrays;
    struct memory_queue *queue;
    struct memory_program *stages[MAX_STAGES]; /* NULL: nothing to do in a stage */
    uint64_t mark;                             /* behind the current run */
};

/* ---- translating the program ---- */

rsd_status device_add_copy(struct device_ops *ops, const struct program *program,
                           const struct copy_op *op, struct array_bases from, int64_t first_dst)
{
    return device_ops_add_copy(
        ops,
        &(struct device_copy){
            .src = (uint32_t)(op->src + (op->from_destination ? from.dst : from.src)),
            .dst = (uint32_t)(op->dst + first_dst),
            .src_offset = op->src_offset,
            .dst_offset = op->dst_offset,
            .element = op->block.element,
            .run = (int64_t)op->block.run,
            .end = op->block.nrows * (int64_t)op->block.run,
            .nloops = (uint32_t)op->block.nloops},
        program->loops + op->first_loop);
}

rsd_status device_add_sum(struct device_ops *ops, const struct program *program,
                          const struct sum_op *sum, array_bases_of *bases_of, const void *context,
                          int64_t first_dst)
{
    TRY(device_ops_add_sum(ops,
                           &(struct device_sum){.reduction = sum->reduction,
                                                .dst = (uint32_t)(sum->dst + first_dst),
                                                .dst_offset = sum->dst_offset,
                                                .nloops = (uint32_t)sum->nloops},
                           program->loops + sum->first_loop));
    for (int64_t t = 0; t < sum->reduction.nterms; t++) {
        const struct sum_term *term = &program->terms[sum->first_term + t];
        TRY(device_ops_add_term(ops, (uint32_t)(bases_of(context, term->peer).src + term->src),
                                term->offset, program->strides + term->first_stride));
    }
    return RSD_OK;
}

/* In one process, the arrays of all ranks are numbered together. */
static struct array_bases bases_of_process(const void *context, int32_t rank)
{
    (void)rank;
    return (struct array_bases){.dst = ((const struct run_arrays *)context)->nsrc};
}

/* Adds the copies of a stage, and in stage 0 all sums. */
static rsd_status add_stage_ops(struct device_ops *ops, const struct program *program,
                                int32_t stage, const struct run_arrays *arrays)
{
    struct array_bases bases = bases_of_process(arrays, 0);
    for (size_t i = 0; stage == 0 && i < program->nsums; i++)
        TRY(device_add_sum(ops, program, &program->sums[i], bases_of_process, arrays,
                           arrays->nsrc));
    for (size_t i = 0; i < program->ncopies; i++)
        if (program->copies[i].stage == stage)
            TRY(device_add_copy(ops, program, &program->copies[i], bases, arrays->nsrc));
    return RSD_OK;
}

/* Makes one device program for each stage that has something to do. */
static rsd_status translate_program(struct device_run *run, const struct program *program,
                                    const struct run_arrays *arrays)
{
    struct memory_device *device = run->arrays.device;
    struct device_ops ops = {0};
    size_t narrays = (size_t)(arrays->nsrc + arrays->ndst);
    rsd_status status = RSD_OK;
    for (int32_t stage = 0; stage < MAX_STAGES && !status; stage++) {
        device_ops_clear(&ops);
        status = add_stage_ops(&ops, program, stage, arrays);
        if (!status && ops.ncopies + ops.nsums > 0)
            status = device->kind->program_new(device, &ops, narrays, &run->stages[stage]);
    }
    device_ops_drop(&ops);
    return status;
}

/* ---- running ---- */

void device_run_free(struct device_run *run)
{
    if (!run)
        return;
    memory_queue_free(run->queue); /* waits */
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        memory_program_free(run->stages[stage]);
    device_arrays_drop(&run->arrays);
    mem_free(run);
}

/* Makes what is kept between runs: arrays, a queue, and the programs of all stages. */
static rsd_status new_device_run(struct memory_device *device, const struct program *program,
                                 const struct run_arrays *arrays, struct device_run **out)
{
    struct device_run *run = mem_new(1, sizeof *run);
    if (!run)
        return RSD_ENOMEM;
    rsd_status status = device_arrays_new(device, arrays, &run->arrays);
    if (!status)
        status = device->kind->queue_new(device, &run->queue);
    if (!status)
        status = translate_program(run, program, arrays);
    if (status)
        device_run_free(run);
    else
        *out = run;
    return status;
}

static rsd_status queue_stages(struct device_run *run, void *stream)
{
    const struct memory_kind *kind = run->queue->kind;
    TRY(kind->use_stream(run->queue, stream));
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        if (run->stages[stage])
            TRY(kind->program_run(run->stages[stage], run->queue, run->arrays.addresses));
    return kind->mark(run->queue, &run->mark);
}

rsd_status device_run_start(struct device_run **kept, struct memory_device *device,
                            const struct program *program, const struct run_arrays *arrays,
                            void *stream, bool *pageable)
{
    if (*kept && (*kept)->arrays.device != device) {
        device_run_free(*kept);
        *kept = NULL;
    }
    if (!*kept)
        TRY(new_device_run(device, program, arrays, kept));
    struct device_run *run = *kept;
    TRY(device_arrays_prepare(&run->arrays, arrays));
    *pageable = run->arrays.npinned > 0;
    rsd_status status = queue_stages(run, stream);
    if (status)
        device_arrays_release(&run->arrays);
    return status;
}

rsd_status device_run_wait(struct device_run *run)
{
    rsd_status status = run->queue->kind->wait_mark(run->queue, run->mark);
    device_arrays_release(&run->arrays);
    return status;
}
