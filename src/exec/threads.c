/* threads.c - the backend of one process: a pool copies between the arrays of all ranks.
 *
 * Copies and sums are cut into units of about equal size: several small ones, or some rows of a large one. Threads
 * take units in order. A unit of a later stage waits until all units of the previous stage are done. Those were taken
 * earlier, so a thread is working on each of them.
 */
#include "device_run.h"

#include <sched.h>
#include <stdatomic.h>

/* Up to this size the calling thread works alone: waking a thread would take longer. */
#define ALONE_MAX_TOTAL ((int64_t)256 << 10)
#define UNIT_MIN_NBYTES ((int64_t)128 << 10)
#define UNIT_MAX_NBYTES ((int64_t)2 << 20)
enum { UNITS_PER_THREAD = 16 };

struct work_unit {
    int64_t first, end;       /* range of copies or sums */
    int64_t first_row, nrows; /* range of rows of one copy or sum; nrows 0: all rows of the range */
    int32_t stage;
    bool sums;
};

struct threads_exec {
    rsd_exec exec;
    rsd_pool *pool;
    struct copier copier;
    bool stream;
    struct program program;
    struct run_arrays arrays;
    struct work_unit *units;
    size_t nunits, units_capacity;
    int64_t stage_nunits[MAX_STAGES];
    _Atomic int64_t stage_done[MAX_STAGES];
    struct pool_job job;
    struct device_run *device; /* NULL: no run was done by a device yet */
    bool on_device;            /* the current run */
};

/* ---- units ---- */

static rsd_status add_unit(struct threads_exec *x, struct work_unit unit)
{
    TRY(GROW(x->units, x->units_capacity, x->nunits + 1));
    x->units[x->nunits++] = unit;
    x->stage_nunits[unit.stage]++;
    return RSD_OK;
}

/* Cuts one copy or sum into units of about unit_nbytes each. */
static rsd_status add_part_units(struct threads_exec *x, struct work_unit unit, int64_t nrows,
                                 int64_t nbytes, int64_t unit_nbytes)
{
    int64_t nparts = min_i64(nrows, ceil_div(nbytes, unit_nbytes));
    for (int64_t part = 0; part < nparts; part++) {
        /* nrows * part may overflow, so every part has the quotient, and the first parts one row more */
        int64_t quotient = nrows / nparts, more = nrows % nparts;
        unit.first_row = quotient * part + min_i64(part, more);
        unit.nrows = quotient + (part < more);
        TRY(add_unit(x, unit));
    }
    return RSD_OK;
}

/* Adds the units of the copies of a stage: several small copies each, or some rows of a large one. */
static rsd_status add_copy_units(struct threads_exec *x, int32_t stage, int64_t unit_nbytes)
{
    struct work_unit open = {.stage = stage};
    int64_t gathered = 0;
    for (int64_t i = 0; i < (int64_t)x->program.ncopies; i++) {
        const struct copy_op *op = &x->program.copies[i];
        int64_t nrows = op->block.nrows, nbytes = block_nbytes(&op->block);
        bool here = op->stage == stage, large = nbytes >= unit_nbytes;
        if (gathered > 0 && (!here || large || gathered + nbytes > unit_nbytes)) {
            open.end = i;
            TRY(add_unit(x, open));
            gathered = 0;
        }
        if (here && large)
            TRY(add_part_units(x, (struct work_unit){.first = i, .end = i + 1, .stage = stage},
                               nrows, nbytes, unit_nbytes));
        else if (here) {
            open.first = gathered > 0 ? open.first : i;
            gathered += nbytes;
        }
    }
    open.end = (int64_t)x->program.ncopies;
    return gathered > 0 ? add_unit(x, open) : RSD_OK;
}

/* Returns the extent of the innermost loop. A row of a sum is one batch along it. */
static int64_t sum_inner(const struct threads_exec *x, const struct sum_op *sum)
{
    return sum->nloops ? x->program.loops[sum->first_loop + sum->nloops - 1].count : 1;
}

static int64_t sum_nrows(const struct threads_exec *x, const struct sum_op *sum)
{
    int64_t nrows = ceil_div(sum_inner(x, sum), REDUCE_BATCH);
    for (int32_t i = 0; i + 1 < sum->nloops; i++)
        nrows *= x->program.loops[sum->first_loop + i].count;
    return nrows;
}

/* Divides the sums into units of about unit_nbytes. */
static rsd_status add_sum_units(struct threads_exec *x, int64_t unit_nbytes)
{
    for (int64_t i = 0; i < (int64_t)x->program.nsums; i++) {
        const struct sum_op *sum = &x->program.sums[i];
        int64_t nrows = sum_nrows(x, sum);
        int64_t row_nbytes = min_i64(REDUCE_BATCH, sum_inner(x, sum)) *
                             (int64_t)rsd_dtype_nbytes(sum->reduction.dtype);
        TRY(add_part_units(x, (struct work_unit){.first = i, .end = i + 1, .sums = true}, nrows,
                           nrows * row_nbytes, unit_nbytes));
    }
    return RSD_OK;
}

/* Cuts the whole program into units: sums, then the copies of each stage. */
static rsd_status make_units(struct threads_exec *x)
{
    int64_t share = x->program.nbytes / (pool_nthreads(x->pool) * UNITS_PER_THREAD);
    int64_t unit_nbytes = clamp_i64(share, UNIT_MIN_NBYTES, UNIT_MAX_NBYTES);
    TRY(add_sum_units(x, unit_nbytes));
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        TRY(add_copy_units(x, stage, unit_nbytes));
    return RSD_OK;
}

/* ---- running ---- */

static void run_copy(struct threads_exec *x, const struct copy_op *op, int64_t first_row,
                     int64_t nrows)
{
    char *const *arrays = x->arrays.addresses;
    copy_block(&x->copier, x->stream, &op->block, arrays[op->src] + op->src_offset,
               arrays[op->dst] + op->dst_offset, first_row, nrows ? nrows : op->block.nrows);
}

/* Computes one row of a sum: combines a batch of elements of all terms. */
static void run_sum_row(struct threads_exec *x, const struct sum_op *sum, int64_t row)
{
    const struct program *program = &x->program;
    const struct loop *loops = program->loops + sum->first_loop;
    const struct sum_term *terms = program->terms + sum->first_term;
    int32_t inner = sum->nloops - 1;
    int64_t extent = sum_inner(x, sum), nbatches = ceil_div(extent, REDUCE_BATCH);
    int64_t index[RSD_MAX_DIMS] = {0};
    int64_t begin = row % nbatches * REDUCE_BATCH, n = min_i64(REDUCE_BATCH, extent - begin);
    row /= nbatches;
    for (int32_t i = inner - 1; i >= 0; i--) {
        index[i] = row % loops[i].count;
        row /= loops[i].count;
    }
    if (inner >= 0)
        index[inner] = begin;

    struct accumulators sums = {{0}};
    for (int64_t t = 0; t < sum->reduction.nterms; t++) {
        const int64_t *strides = program->strides + terms[t].first_stride;
        const char *term = x->arrays.addresses[terms[t].src] + terms[t].offset;
        for (int32_t i = 0; i <= inner; i++)
            term += index[i] * strides[i];
        (t ? reduce_next : reduce_first)(&sum->reduction, &sums, n, term,
                                         inner >= 0 ? strides[inner] : 0);
    }
    char *dst = x->arrays.addresses[sum->dst] + sum->dst_offset;
    for (int32_t i = 0; i <= inner; i++)
        dst += index[i] * loops[i].dst_stride;
    reduce_store(&sum->reduction, &sums, n, dst, inner >= 0 ? loops[inner].dst_stride : 0);
}

static void wait_for_stage(struct threads_exec *x, int32_t stage)
{
    while (atomic_load_explicit(&x->stage_done[stage], memory_order_acquire) <
           x->stage_nunits[stage])
        sched_yield();
}

/* Does one unit, after all units of earlier stages. Any thread. */
static void run_unit(void *context, int64_t index)
{
    struct threads_exec *x = context;
    const struct work_unit *unit = &x->units[index];
    for (int32_t stage = 0; stage < unit->stage; stage++)
        wait_for_stage(x, stage);
    for (int64_t i = unit->first; i < unit->end; i++)
        if (unit->sums)
            for (int64_t row = unit->first_row; row < unit->first_row + unit->nrows; row++)
                run_sum_row(x, &x->program.sums[i], row);
        else if (x->program.copies[i].stage == unit->stage)
            run_copy(x, &x->program.copies[i], unit->first_row, unit->nrows);
    atomic_fetch_add_explicit(&x->stage_done[unit->stage], 1, memory_order_release);
}

/* ---- the backend ---- */

static void reset_stages(struct threads_exec *x)
{
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        atomic_store_explicit(&x->stage_done[stage], 0, memory_order_relaxed);
}

/* Queues the run if kernels must do it. */
static rsd_status start_on_device(struct threads_exec *x, bool *pageable)
{
    struct memory_device *device;
    TRY(device_arrays_choose(&x->arrays, &x->exec, &device));
    x->on_device = device != NULL;
    if (!x->on_device)
        return RSD_OK;
    return device_run_start(&x->device, device, &x->program, &x->arrays, x->exec.stream, pageable);
}

/* Runs, and waits unless a stream of the caller orders the run. */
static rsd_status threads_run(rsd_exec *exec, const void *const *src, void *const *dst)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    bool pageable = false;
    TRY(run_arrays_set(&x->arrays, src, dst));
    TRY(start_on_device(x, &pageable));
    if (x->on_device)
        return exec->has_stream && !pageable ? RSD_OK : device_run_wait(x->device);
    reset_stages(x);
    rsd_pool *pool = x->program.nbytes > ALONE_MAX_TOTAL ? x->pool : NULL;
    pool_run(pool, (int64_t)x->nunits, run_unit, x);
    return RSD_OK;
}

/* Starts a run on the threads of the pool, or on a device. */
static rsd_status threads_start(rsd_exec *exec, const void *const *src, void *const *dst)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    bool pageable;
    TRY(run_arrays_set(&x->arrays, src, dst));
    TRY(start_on_device(x, &pageable));
    if (x->on_device)
        return RSD_OK;
    reset_stages(x);
    pool_start(x->pool, &x->job, (int64_t)x->nunits, run_unit, x);
    return RSD_OK;
}

/* Waits for the run that threads_start has started. */
static rsd_status threads_wait(rsd_exec *exec)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    if (x->on_device)
        return device_run_wait(x->device);
    if (!pool_wait(x->pool, &x->job)) {
        /* This is a child process after a fork during the run. The run starts again. */
        reset_stages(x);
        pool_run(NULL, (int64_t)x->nunits, run_unit, x);
    }
    return RSD_OK;
}

static void threads_free(rsd_exec *exec)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    device_run_free(x->device);
    program_drop(&x->program);
    run_arrays_drop(&x->arrays);
    mem_free(x->units);
    rsd_pool_free(x->pool);
    mem_free(x);
}

static const struct backend threads_backend = {threads_start, threads_wait, threads_run,
                                               threads_free,  NULL,         NULL};

/* ---- binding ---- */

/* Compiles all plans into one program. */
static rsd_status bind_plans(struct threads_exec *x, int64_t nplans, const rsd_plan *const *plans,
                             const rsd_bind_options *given)
{
    for (int64_t i = 0; i < nplans; i++) {
        rsd_bind_options options;
        rsd_status status = bind_options_copy(given, i, &options);
        if (!status)
            status = program_add_plan(&x->program, &x->arrays, plans[i], &options);
        if (status)
            return nplans > 1 ? fail_in(status, "plan %lld: ", (long long)i) : status;
    }
    TRY(run_arrays_finish(&x->arrays));
    program_finish(&x->program);
    program_mark_arrays(&x->program, &x->arrays);
    x->stream = x->program.nbytes >= STREAM_MIN_TOTAL;
    return make_units(x);
}

rsd_status rsd_bind_threads_many(int64_t nplans, const rsd_plan *const *plans,
                                 const rsd_bind_options *options, rsd_pool *pool, rsd_exec **exec)
{
    if (nplans < 0)
        return fail(RSD_EINVAL, "invalid number of plans %lld", (long long)nplans);
    struct threads_exec *x = mem_new(1, sizeof *x);
    if (!x)
        return RSD_ENOMEM;
    x->exec.backend = &threads_backend;
    x->pool = pool_share(pool);
    x->copier = copier_best();
    rsd_status status = bind_plans(x, nplans, plans, options);
    if (status)
        threads_free(&x->exec);
    else
        *exec = &x->exec;
    return status;
}

rsd_status rsd_bind_threads(const rsd_plan *plan, rsd_pool *pool, rsd_exec **exec)
{
    return rsd_bind_threads_many(1, &plan, NULL, pool, exec);
}

rsd_status rsd_reshard(const rsd_layout *src_layout, const rsd_layout *dst_layout,
                       const void *const *src, void *const *dst)
{
    rsd_plan *plan;
    rsd_exec *exec;
    TRY(rsd_plan_new(src_layout, dst_layout, NULL, &plan));
    rsd_status status = rsd_bind_threads(plan, NULL, &exec);
    if (!status) {
        status = rsd_exec_run(exec, src, dst);
        rsd_exec_free(exec);
    }
    rsd_plan_free(plan);
    return status;
}
