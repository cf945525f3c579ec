/* threads.c - the carrier of one process: a pool moves nests between the arrays of all ranks.
 *
 * Nests are cut into units of about equal size: several small ones together, or some rows of a
 * large one. Threads take units in order. A unit of a later stage waits until all units of the
 * stage before are done; those were taken earlier, so someone is at them.
 */
#include "exec.h"

#include <sched.h>
#include <stdatomic.h>

/* Below this many bytes, waking a thread takes longer than the work. */
#define ALONE_MAX_TOTAL ((int64_t)256 << 10)
#define UNIT_MIN_NBYTES ((int64_t)128 << 10)
#define UNIT_MAX_NBYTES ((int64_t)2 << 20)
enum { UNITS_PER_THREAD = 16, MAX_STAGES = 4 };

struct unit {
    int64_t first, end;       /* nests, or sums */
    int64_t first_row, nrows; /* of the one nest or sum; nrows 0: all rows of all */
    int32_t stage;
    bool sums;
};

struct threads_exec {
    rsd_exec exec;
    rsd_pool *pool;
    struct copier copier;
    bool stream;
    struct nests nests;
    int64_t nsrc, ndst;
    const char **src;
    char **dst;
    bool *src_used, *dst_used; /* which arrays a run touches: these may not be NULL */
    struct unit *units;
    size_t nunits, units_capacity;
    int64_t stage_nunits[MAX_STAGES];
    _Atomic int64_t stage_done[MAX_STAGES];
    struct pool_job job;
};

/* ---- units ---- */

static rsd_status add_unit(struct threads_exec *x, struct unit unit)
{
    TRY(GROW(x->units, x->units_capacity, x->nunits + 1));
    x->units[x->nunits++] = unit;
    x->stage_nunits[unit.stage]++;
    return RSD_OK;
}

/* Cuts one nest or sum into parts of about unit_nbytes each. */
static rsd_status add_parts(struct threads_exec *x, struct unit unit, int64_t nrows, int64_t nbytes,
                            int64_t unit_nbytes)
{
    int64_t nparts = min_i64(nrows, ceil_div(nbytes, unit_nbytes));
    for (int64_t part = 0; part < nparts; part++) {
        /* nrows * part may not fit: whole rows per part, and one more for the first ones */
        int64_t element_nbytes = nrows / nparts, more = nrows % nparts;
        unit.first_row = element_nbytes * part + min_i64(part, more);
        unit.nrows = element_nbytes + (part < more);
        TRY(add_unit(x, unit));
    }
    return RSD_OK;
}

static rsd_status unite_nests(struct threads_exec *x, int32_t stage, int64_t unit_nbytes)
{
    struct unit open = {.stage = stage};
    int64_t gathered = 0;
    for (int64_t i = 0; i < (int64_t)x->nests.nnests; i++) {
        const struct nest *nest = &x->nests.nests[i];
        int64_t nrows = nest->block.nrows, nbytes = nrows * (int64_t)nest->block.run;
        bool here = nest->stage == stage, large = nbytes >= unit_nbytes;
        if (gathered > 0 && (!here || large || gathered + nbytes > unit_nbytes)) {
            open.end = i;
            TRY(add_unit(x, open));
            gathered = 0;
        }
        if (here && large)
            TRY(add_parts(x, (struct unit){.first = i, .end = i + 1, .stage = stage}, nrows, nbytes,
                          unit_nbytes));
        else if (here) {
            open.first = gathered > 0 ? open.first : i;
            gathered += nbytes;
        }
    }
    open.end = (int64_t)x->nests.nnests;
    return gathered > 0 ? add_unit(x, open) : RSD_OK;
}

/* The rows of a sum are batches of its innermost loop. */
static int64_t sum_inner(const struct threads_exec *x, const struct sum *sum)
{
    return sum->nloops ? x->nests.loops[sum->first_loop + sum->nloops - 1].count : 1;
}

static int64_t sum_nrows(const struct threads_exec *x, const struct sum *sum)
{
    int64_t nrows = ceil_div(sum_inner(x, sum), REDUCE_BATCH);
    for (int32_t i = 0; i + 1 < sum->nloops; i++)
        nrows *= x->nests.loops[sum->first_loop + i].count;
    return nrows;
}

static rsd_status unite_sums(struct threads_exec *x, int64_t unit_nbytes)
{
    for (int64_t i = 0; i < (int64_t)x->nests.nsums; i++) {
        const struct sum *sum = &x->nests.sums[i];
        int64_t nrows = sum_nrows(x, sum);
        int64_t row_nbytes = min_i64(REDUCE_BATCH, sum_inner(x, sum)) *
                             (int64_t)rsd_dtype_nbytes(sum->reduction.dtype);
        TRY(add_parts(x, (struct unit){.first = i, .end = i + 1, .sums = true}, nrows,
                      nrows * row_nbytes, unit_nbytes));
    }
    return RSD_OK;
}

static rsd_status make_units(struct threads_exec *x)
{
    int64_t share = x->nests.nbytes / (pool_nthreads(x->pool) * UNITS_PER_THREAD);
    int64_t unit_nbytes = clamp_i64(share, UNIT_MIN_NBYTES, UNIT_MAX_NBYTES);
    TRY(unite_sums(x, unit_nbytes));
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        TRY(unite_nests(x, stage, unit_nbytes));
    return RSD_OK;
}

/* ---- working ---- */

static void run_nest(struct threads_exec *x, const struct nest *nest, int64_t first_row,
                     int64_t nrows)
{
    const char *src = nest->from_destination ? x->dst[nest->src] : x->src[nest->src];
    copy_block(&x->copier, x->stream, &nest->block, src + nest->src_offset,
               x->dst[nest->dst] + nest->dst_offset, first_row, nrows ? nrows : nest->block.nrows);
}

static void run_sum_row(struct threads_exec *x, const struct sum *sum, int64_t row)
{
    const struct nests *nests = &x->nests;
    const struct loop *loops = nests->loops + sum->first_loop;
    const struct term *terms = nests->terms + sum->first_term;
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
        const int64_t *strides = nests->strides + terms[t].first_stride;
        const char *term = x->src[terms[t].src] + terms[t].offset;
        for (int32_t i = 0; i <= inner; i++)
            term += index[i] * strides[i];
        (t ? reduce_next : reduce_first)(&sum->reduction, &sums, n, term,
                                         inner >= 0 ? strides[inner] : 0);
    }
    char *dst = x->dst[sum->dst] + sum->dst_offset;
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

static void run_unit(void *context, int64_t index)
{
    struct threads_exec *x = context;
    const struct unit *unit = &x->units[index];
    for (int32_t stage = 0; stage < unit->stage; stage++)
        wait_for_stage(x, stage);
    for (int64_t i = unit->first; i < unit->end; i++)
        if (unit->sums)
            for (int64_t row = unit->first_row; row < unit->first_row + unit->nrows; row++)
                run_sum_row(x, &x->nests.sums[i], row);
        else if (x->nests.nests[i].stage == unit->stage)
            run_nest(x, &x->nests.nests[i], unit->first_row, unit->nrows);
    atomic_fetch_add_explicit(&x->stage_done[unit->stage], 1, memory_order_release);
}

/* ---- the carrier ---- */

static void forget_progress(struct threads_exec *x)
{
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        atomic_store_explicit(&x->stage_done[stage], 0, memory_order_relaxed);
}

static rsd_status take_pointers(struct threads_exec *x, const void *const *src, void *const *dst)
{
    for (int64_t i = 0; i < x->nsrc; i++) {
        if (x->src_used[i] && !src[i])
            return fail(RSD_EINVAL, "source array %lld is not empty, and its pointer is NULL",
                        (long long)i);
        x->src[i] = src[i];
    }
    for (int64_t i = 0; i < x->ndst; i++) {
        if (x->dst_used[i] && !dst[i])
            return fail(RSD_EINVAL, "destination array %lld is not empty, and its pointer is NULL",
                        (long long)i);
        x->dst[i] = dst[i];
    }
    forget_progress(x);
    return RSD_OK;
}

static rsd_status threads_run(rsd_exec *exec, const void *const *src, void *const *dst)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    TRY(take_pointers(x, src, dst));
    rsd_pool *pool = x->nests.nbytes > ALONE_MAX_TOTAL ? x->pool : NULL;
    pool_run(pool, (int64_t)x->nunits, run_unit, x);
    return RSD_OK;
}

static rsd_status threads_start(rsd_exec *exec, const void *const *src, void *const *dst)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    TRY(take_pointers(x, src, dst));
    pool_start(x->pool, &x->job, (int64_t)x->nunits, run_unit, x);
    return RSD_OK;
}

static rsd_status threads_wait(rsd_exec *exec)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    if (!pool_wait(x->pool, &x->job)) {
        /* A child after fork, whose memory was copied at some point of the run: all again. */
        forget_progress(x);
        pool_run(NULL, (int64_t)x->nunits, run_unit, x);
    }
    return RSD_OK;
}

static void threads_free(rsd_exec *exec)
{
    struct threads_exec *x = (struct threads_exec *)exec;
    nests_drop(&x->nests);
    mem_free(x->src);
    mem_free(x->dst);
    mem_free(x->src_used);
    mem_free(x->dst_used);
    mem_free(x->units);
    rsd_pool_free(x->pool);
    mem_free(x);
}

static const struct carrier threads = {threads_start, threads_wait, threads_run,
                                       threads_free,  NULL,         NULL};

/* ---- binding ---- */

static void mark_used(struct threads_exec *x)
{
    for (size_t i = 0; i < x->nests.nnests; i++) {
        const struct nest *nest = &x->nests.nests[i];
        *(nest->from_destination ? &x->dst_used[nest->src] : &x->src_used[nest->src]) = true;
        x->dst_used[nest->dst] = true;
    }
    for (size_t i = 0; i < x->nests.nterms; i++)
        x->src_used[x->nests.terms[i].src] = true;
    for (size_t i = 0; i < x->nests.nsums; i++)
        x->dst_used[x->nests.sums[i].dst] = true;
}

static rsd_status bind(struct threads_exec *x, int64_t nplans, const rsd_plan *const *plans,
                       const rsd_bind_options *options)
{
    /* A caller of another version has structs of another size: they are one size apart. */
    const char *given = (const char *)options;
    for (int64_t i = 0; i < nplans; i++) {
        rsd_status status = nests_add(&x->nests, plans[i], (const void *)given, x->nsrc, x->ndst);
        if (given)
            given += options->struct_nbytes;
        if (status)
            return nplans > 1 ? fail_in(status, "plan %lld: ", (long long)i) : status;
        x->nsrc += rsd_layout_narrays(plans[i]->src);
        x->ndst += rsd_layout_narrays(plans[i]->dst);
    }
    x->src = mem_new((size_t)x->nsrc, sizeof *x->src);
    x->dst = mem_new((size_t)x->ndst, sizeof *x->dst);
    x->src_used = mem_new((size_t)x->nsrc, sizeof *x->src_used);
    x->dst_used = mem_new((size_t)x->ndst, sizeof *x->dst_used);
    if (!x->src || !x->dst || !x->src_used || !x->dst_used)
        return RSD_ENOMEM;
    nests_finish(&x->nests);
    mark_used(x);
    x->stream = x->nests.nbytes >= STREAM_MIN_TOTAL;
    return make_units(x);
}

rsd_status rsd_bind_threads_many(int64_t nplans, const rsd_plan *const *plans,
                                 const rsd_bind_options *options, rsd_pool *pool, rsd_exec **exec)
{
    if (nplans < 0)
        return fail(RSD_EINVAL, "%lld plans", (long long)nplans);
    struct threads_exec *x = mem_new(1, sizeof *x);
    if (!x)
        return RSD_ENOMEM;
    x->exec.carrier = &threads;
    x->pool = pool_share(pool);
    x->copier = copier_best();
    rsd_status status = bind(x, nplans, plans, options);
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
