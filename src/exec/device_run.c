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

static rsd_status translate_copy(struct device_ops *ops, const struct program *program,
                                 const struct copy_op *op)
{
    return device_ops_add_copy(
        ops,
        &(struct device_copy){.src = (uint32_t)op->src,
                              .dst = (uint32_t)op->dst,
                              .src_offset = op->src_offset,
                              .dst_offset = op->dst_offset,
                              .element = op->block.element,
                              .run = (int64_t)op->block.run,
                              .end = op->block.nrows * (int64_t)op->block.run,
                              .nloops = (uint32_t)op->block.nloops},
        program->loops + op->first_loop);
}

static rsd_status translate_sum(struct device_ops *ops, const struct program *program,
                                const struct sum_op *sum)
{
    TRY(device_ops_add_sum(ops,
                           &(struct device_sum){.reduction = sum->reduction,
                                                .dst = (uint32_t)sum->dst,
                                                .dst_offset = sum->dst_offset,
                                                .nloops = (uint32_t)sum->nloops},
                           program->loops + sum->first_loop));
    for (int64_t t = 0; t < sum->reduction.nterms; t++) {
        const struct sum_term *term = &program->terms[sum->first_term + t];
        TRY(device_ops_add_term(ops, (uint32_t)term->src, term->offset,
                                program->strides + term->first_stride));
    }
    return RSD_OK;
}

rsd_status device_add_stage(struct device_ops *ops, const struct program *program, int32_t stage,
                            int32_t sender)
{
    bool all = sender == RSD_EVERY_RANK;
    for (size_t i = 0; all && stage == 0 && i < program->nsums; i++)
        TRY(translate_sum(ops, program, &program->sums[i]));
    for (size_t i = 0; i < program->ncopies; i++) {
        const struct copy_op *op = &program->copies[i];
        if (op->stage == stage && (all || op->peer == sender))
            TRY(translate_copy(ops, program, op));
    }
    return RSD_OK;
}

/* Makes one device program for each stage that has something to do. */
static rsd_status translate_program(struct device_run *run, const struct program *program,
                                    const struct run_arrays *arrays)
{
    struct memory_device *device = run->arrays.device;
    struct device_ops ops = {0};
    rsd_status status = RSD_OK;
    for (int32_t stage = 0; stage < MAX_STAGES && !status; stage++) {
        device_ops_clear(&ops);
        status = device_add_stage(&ops, program, stage, RSD_EVERY_RANK);
        if (!status && ops.ncopies + ops.nsums > 0)
            status =
                device->kind->program_new(device, &ops, (size_t)arrays->n, &run->stages[stage]);
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

/* Queues all stages in the order of a stream, and a mark behind them. */
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
