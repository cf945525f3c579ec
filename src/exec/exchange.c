/* exchange.c - the carrier between processes.
 *
 * A run agrees that everybody is ready, then goes through the stages of its plans. In a stage all parcels move
 * on independently of each other (lanes.c), and so do the sums of a reduction: for each part of a box all
 * terms are brought together, combined in the order of the plan, and stored.
 *
 * A rank never waits for one peer alone: it goes round everything that could move, and if nothing has moved
 * for the time-out, it gives up and names who is late.
 */
#include "exec.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

enum { LEAST_CHUNK = 4096, MOST_CHUNK = 4 << 20 };
static const int64_t default_budget = (int64_t)256 << 20;

/* ---- reductions ---- */

/* Where each term of the part at hand is; false if one is not there yet. */
static rsd_status collect(struct exchange *x, const struct gathered_sum *sum, size_t n, bool *all)
{
    struct reducer *r = &x->reducer;
    *all = true;
    for (size_t i = 0; i < sum->nterms && *all; i++) {
        const struct gathered_term *term = &x->terms[sum->first_term + i];
        if (term->lane) {
            TRY(lane_front(x, term->lane, &term->op, r->at, n, &r->terms[i]));
            *all = r->terms[i] != NULL;
        } else {
            op_pack(x, &term->op, x->src[term->op.array], r->at, n, r->own);
            r->terms[i] = r->own;
        }
    }
    return RSD_OK;
}

static void combine(struct exchange *x, const struct gathered_sum *sum, size_t nbytes)
{
    struct reducer *r = &x->reducer;
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(sum->reduction.dtype),
            n = (int64_t)nbytes / element_nbytes;
    struct accumulators sums;
    for (int64_t at = 0; at < n; at += REDUCE_BATCH) {
        int64_t some = min_i64(n - at, REDUCE_BATCH);
        reduce_first(&sum->reduction, &sums, some, r->terms[0] + at * element_nbytes,
                     element_nbytes);
        for (size_t i = 1; i < sum->nterms; i++)
            reduce_next(&sum->reduction, &sums, some, r->terms[i] + at * element_nbytes,
                        element_nbytes);
        reduce_store(&sum->reduction, &sums, some, r->result + at * element_nbytes, element_nbytes);
    }
    op_unpack(x, &sum->to, r->at, nbytes, r->result);
}

static rsd_status push_reducer(struct exchange *x, bool *moved)
{
    struct reducer *r = &x->reducer;
    bool all;
    if (r->sum == x->nsums)
        return RSD_OK;
    const struct gathered_sum *sum = &x->sums[r->sum];
    uint64_t rest = sum->to.nbytes - r->at, most = reduce_chunk(x);
    size_t n = (size_t)(rest < most ? rest : most);
    TRY(collect(x, sum, n, &all));
    if (!all)
        return RSD_OK;
    *moved = true;
    combine(x, sum, n);
    for (size_t i = 0; i < sum->nterms; i++)
        if (x->terms[sum->first_term + i].lane)
            lane_pop(x, x->terms[sum->first_term + i].lane, n);
    r->at += n;
    if (r->at == sum->to.nbytes) {
        r->sum++;
        r->at = 0;
    }
    return RSD_OK;
}

/* ---- a run ---- */

/* What a rank keeps is copied before anything is waited for. */
static void keep(struct exchange *x, int32_t stage)
{
    for (size_t i = 0; i < x->nests.nnests; i++) {
        const struct nest *nest = &x->nests.nests[i];
        if (nest->stage != stage || nest->peer != x->transport.rank)
            continue;
        const char *from = nest->from_destination ? x->dst[nest->src] : x->src[nest->src];
        copy_block(&x->copier, x->stream, &nest->block, from + nest->src_offset,
                   x->dst[nest->dst] + nest->dst_offset, 0, nest->block.nrows);
    }
}

static rsd_status push_stage(struct exchange *x, bool *moved, bool *done)
{
    *done = true;
    for (size_t i = 0; i < x->nlanes; i++) {
        struct lane *lane = &x->lanes[i];
        if (lane->parcel->stage != x->stage)
            continue;
        TRY(lane_push(x, lane, moved));
        *done = *done && lane_finished(lane);
    }
    if (x->stage == 0)
        TRY(push_reducer(x, moved));
    *done = *done && (x->stage > 0 || x->reducer.sum == x->nsums);
    return RSD_OK;
}

/* Does what can be done now. */
static rsd_status push(struct exchange *x, bool *moved, bool *done)
{
    bool passed = false;
    *done = x->stage == x->nstages;
    if (*done)
        return RSD_OK;
    if (x->stage < 0)
        TRY(meeting_push(x, moved, &passed));
    else
        TRY(push_stage(x, moved, &passed));
    if (!passed)
        return RSD_OK;
    *moved = true;
    if (++x->stage == x->nstages)
        *done = true;
    else
        keep(x, x->stage);
    return RSD_OK;
}

/* Whether a neighbour still has to do something for this run; one that has not may end as it likes. */
static bool is_needed(const struct exchange *x, const struct neighbour *near)
{
    if (x->stage < 0)
        return !all_are_near(x) || !neighbour_has_come(x, near);
    return lane_is_open(x, near->rank, x->nstages);
}

/* A neighbour that is no more will not come: no need to wait for the time-out. What it did at last is found
 * before it is looked for again. */
static rsd_status look_for_the_dead(struct exchange *x)
{
    const struct neighbour *gone = NULL;
    for (int32_t i = 0; x->near && i < x->near->n && !gone; i++) {
        const struct neighbour *near = &x->near->list[i];
        if (is_needed(x, near) && kill(near->pid, 0) && errno == ESRCH)
            gone = near;
    }
    if (gone && gone == x->gone) {
        rollcall_tell(x, gone->rank);
        return fail(RSD_EPEER, "rank %d (process %d) is gone", (int)gone->rank, (int)gone->pid);
    }
    x->gone = gone;
    return RSD_OK;
}

static rsd_status idle(struct exchange *x, double *looked)
{
    double now = seconds_now(), waited = now - x->since;
    if (x->listen)
        TRY(x->listen(x->listener));
    if (now - *looked > 0.1) {
        *looked = now;
        TRY(look_for_the_dead(x));
        bool over = waited > x->timeout / 2;
        neighbours_beat(x, over && !x->half_time);
        x->half_time = over;
        if (over)
            rollcall_start(x, -1);
        TRY(rollcall_push(x));
    }
    if (waited > x->timeout) {
        TRY(rollcall_push(x));
        return say_who_is_late(x);
    }
    sched_yield();
    return RSD_OK;
}

/* After a failure nobody waits for these any more. */
static void give_up(struct exchange *x)
{
    for (size_t i = 0; i < x->nlanes; i++)
        lane_cancel(x, &x->lanes[i]);
    meeting_cancel(x);
    x->broken = true;
}

static rsd_status check_arrays(const struct exchange *x)
{
    for (int64_t i = 0; i < x->nsrc; i++)
        if (x->src_used[i] && !x->src[i])
            return fail(RSD_EINVAL, "source array %lld is NULL", (long long)i);
    for (int64_t i = 0; i < x->ndst; i++)
        if (x->dst_used[i] && !x->dst[i])
            return fail(RSD_EINVAL, "destination array %lld is NULL", (long long)i);
    return RSD_OK;
}

static rsd_status start(rsd_exec *exec, const void *const *src, void *const *dst)
{
    struct exchange *x = (struct exchange *)exec;
    if (x->broken)
        return fail(RSD_EINVAL, "a run failed before: the exec can only be freed");
    for (int64_t i = 0; i < x->nsrc; i++)
        x->src[i] = src ? src[i] : NULL;
    for (int64_t i = 0; i < x->ndst; i++)
        x->dst[i] = dst ? dst[i] : NULL;
    for (size_t i = 0; i < x->nlanes; i++)
        lane_rewind(x, &x->lanes[i]);
    x->reducer.sum = 0;
    x->reducer.at = 0;
    x->run++;
    x->stage = -1;
    x->refused = false;
    meeting_start(x, check_arrays(x));
    x->early = RSD_OK;
    exchange_poke(exec);
    return RSD_OK;
}

/* What goes wrong is told by wait, as everything else. */
void exchange_poke(rsd_exec *exec)
{
    struct exchange *x = (struct exchange *)exec;
    bool moved = true, done = false;
    while (!x->early && moved && !done) {
        moved = false;
        x->early = push(x, &moved, &done);
    }
}

void exchange_listen(rsd_exec *exec, rsd_status (*listen)(void *context), void *context)
{
    struct exchange *x = (struct exchange *)exec;
    x->listen = listen;
    x->listener = context;
}

static rsd_status wait(rsd_exec *exec)
{
    struct exchange *x = (struct exchange *)exec;
    bool done = false;
    double looked = seconds_now();
    rsd_status status = x->early;
    x->since = looked; /* what the caller did before is no waiting */
    x->half_time = false;
    x->gone = NULL;
    while (!status && !done) {
        bool moved = false;
        status = push(x, &moved, &done);
        if (moved)
            x->since = seconds_now();
        else if (!status && !done)
            status = idle(x, &looked);
    }
    rollcall_drop(x);
    if (status && !x->refused) /* else all have agreed not to begin */
        give_up(x);
    return status;
}

static rsd_status run(rsd_exec *exec, const void *const *src, void *const *dst)
{
    TRY(start(exec, src, dst));
    return wait(exec);
}

static const char *note(const rsd_exec *exec)
{
    return ((const struct exchange *)exec)->note;
}

static void exchange_free(rsd_exec *exec)
{
    struct exchange *x = (struct exchange *)exec;
    neighbours_drop(x);
    if (x->transport.release)
        x->transport.release(x->transport.context);
    for (int64_t i = 0; x->labels && i < x->nplans; i++)
        mem_free(x->labels[i]);
    mem_free(x->labels);
    nests_drop(&x->nests);
    mem_free(x->direct);
    mem_free(x->ops);
    mem_free(x->loops);
    mem_free(x->sends);
    mem_free(x->receives);
    mem_free(x->sums);
    mem_free(x->terms);
    mem_free(x->strides);
    mem_free(x->src);
    mem_free(x->dst);
    mem_free(x->src_used);
    mem_free(x->dst_used);
    mem_free(x->node_of);
    mem_free(x->lanes);
    mem_free(x->reducer.own);
    mem_free(x->reducer.terms);
    if (x->lost)
        return; /* a message may still be read from its buffer: that and the meeting stay */
    mem_free(x->buffers);
    mem_free(x);
}

static const struct carrier carrier = {start, wait, run, exchange_free, exchange_poke, note};

/* ---- binding ---- */

static void mark(struct exchange *x, const struct op *op, bool giving)
{
    if (op->nbytes == 0)
        return;
    (giving && !op->from_destination ? x->src_used : x->dst_used)[op->array] = true;
}

static rsd_status mark_used(struct exchange *x)
{
    x->src = mem_new((size_t)x->nsrc, sizeof *x->src);
    x->dst = mem_new((size_t)x->ndst, sizeof *x->dst);
    x->src_used = mem_new((size_t)x->nsrc, sizeof *x->src_used);
    x->dst_used = mem_new((size_t)x->ndst, sizeof *x->dst_used);
    if (!x->src || !x->dst || !x->src_used || !x->dst_used)
        return RSD_ENOMEM;
    for (size_t i = 0; i < x->nsends; i++)
        for (size_t k = 0; k < x->sends[i].nops; k++)
            mark(x, &x->ops[x->sends[i].first_op + k], true);
    for (size_t i = 0; i < x->nreceives; i++)
        for (size_t k = 0; k < x->receives[i].nops; k++)
            mark(x, &x->ops[x->receives[i].first_op + k], false);
    for (size_t i = 0; i < x->nests.nnests; i++) {
        (x->nests.nests[i].from_destination ? x->dst_used : x->src_used)[x->nests.nests[i].src] =
            true;
        x->dst_used[x->nests.nests[i].dst] = true;
    }
    for (size_t i = 0; i < x->nsums; i++)
        mark(x, &x->sums[i].to, false);
    for (size_t i = 0; i < x->nterms; i++)
        if (x->terms[i].peer == x->transport.rank)
            mark(x, &x->terms[i].op, true);
    return RSD_OK;
}

static rsd_status label_plans(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                              const char *const *names)
{
    x->nplans = nplans;
    x->labels = mem_new((size_t)nplans, sizeof *x->labels);
    if (!x->labels)
        return RSD_ENOMEM;
    for (int64_t i = 0; i < nplans; i++) {
        struct text text = {0};
        if (names && names[i]) {
            text_add(&text, "%s", names[i]);
        } else {
            text_add(&text, "tensor %lld, %s[", (long long)i, rsd_dtype_name(plans[i]->src->dtype));
            for (int32_t d = 0; d < plans[i]->src->ndim; d++)
                text_add(&text, "%s%lld", d ? "," : "",
                         (long long)rsd_layout_shape(plans[i]->src)[d]);
            text_add(&text, "]");
        }
        TRY(text_take(&text, &x->labels[i]));
    }
    return RSD_OK;
}

/* Those that come straight from neighbours, by peer and stage: a lane's are then one after the other. */
static int by_peer_and_stage(const void *a, const void *b, void *context)
{
    const struct nest *nests = context;
    size_t i = *(const size_t *)a, k = *(const size_t *)b;
    const struct nest *x = &nests[i], *y = &nests[k];
    if (x->peer != y->peer)
        return x->peer < y->peer ? -1 : 1;
    if (x->stage != y->stage)
        return x->stage < y->stage ? -1 : 1;
    return (i > k) - (i < k);
}

static void find_direct(struct exchange *x, struct lane *lane)
{
    size_t n = x->nests.nnests, first = 0;
    while (first < n && (x->nests.nests[x->direct[first]].peer != lane->parcel->peer ||
                         x->nests.nests[x->direct[first]].stage != lane->parcel->stage))
        first++;
    lane->first_direct = first;
    while (first < n && x->nests.nests[x->direct[first]].peer == lane->parcel->peer &&
           x->nests.nests[x->direct[first]].stage == lane->parcel->stage)
        first++;
    lane->ndirect = first - lane->first_direct;
}

static rsd_status sort_direct(struct exchange *x)
{
    size_t n = x->nests.nnests;
    nests_finish(&x->nests);
    x->direct = mem_new(n, sizeof *x->direct);
    if (!x->direct)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++)
        x->direct[i] = i;
    if (n > 1)
        qsort_r(x->direct, n, sizeof *x->direct, by_peer_and_stage, x->nests.nests);
    return RSD_OK;
}

static rsd_status add_lane(struct exchange *x, const struct parcel *parcel, bool sending)
{
    if (parcel->nbytes == 0)
        return RSD_OK;
    struct lane *lane = &x->lanes[x->nlanes];
    *lane =
        (struct lane){.parcel = parcel, .sending = sending, .near = neighbour_of(x, parcel->peer)};
    lane->chunk = lane_chunk(x, parcel, lane->near != NULL);
    if (lane->near && sending) {
        struct neighbour own = {.segment = x->near->own};
        lane->berth = &x->near->berths[parcel - x->sends];
        for (uint64_t i = 0; i < NSLOTS; i++)
            lane->slots[i].data = neighbour_slot(&own, lane->berth, i, lane->chunk);
    } else if (lane->near) {
        lane->berth = neighbour_berth(x, lane->near, parcel);
        if (!lane->berth)
            return fail(RSD_EPEER, "rank %d shows no place for what it gives", (int)parcel->peer);
        find_direct(x, lane);
    }
    x->nlanes++;
    return RSD_OK;
}

/* Buffers of a lane: two for messages; of a reduction from a neighbour's arena one to pack into. */
static size_t nbuffers_of(const struct lane *lane)
{
    return !lane->near ? NSLOTS : !lane->sending && lane->parcel->reduce ? 1 : 0;
}

static rsd_status add_buffers(struct exchange *x)
{
    size_t nbytes = 0;
    for (size_t i = 0; i < x->nlanes; i++)
        nbytes += nbuffers_of(&x->lanes[i]) * x->lanes[i].chunk;
    x->buffers = mem_new(nbytes, 1);
    if (!x->buffers)
        return RSD_ENOMEM;
    char *next = x->buffers;
    for (size_t i = 0; i < x->nlanes; i++)
        for (size_t k = 0; k < nbuffers_of(&x->lanes[i]); k++, next += x->lanes[i].chunk)
            x->lanes[i].slots[k].data = next;
    return RSD_OK;
}

static rsd_status add_reducer(struct exchange *x)
{
    size_t most = 0, chunk = (size_t)reduce_chunk(x);
    struct lane **lane_of = mem_new((size_t)x->transport.nranks, sizeof(struct lane *));
    if (!lane_of)
        return RSD_ENOMEM;
    for (size_t i = 0; i < x->nlanes; i++)
        if (!x->lanes[i].sending && x->lanes[i].parcel->reduce)
            lane_of[x->lanes[i].parcel->peer] = &x->lanes[i];
    for (size_t i = 0; i < x->nterms; i++)
        x->terms[i].lane = lane_of[x->terms[i].peer];
    mem_free(lane_of);
    for (size_t i = 0; i < x->nsums; i++)
        most = x->sums[i].nterms > most ? x->sums[i].nterms : most;
    x->reducer.own = mem_new(x->nsums ? 2 * chunk : 0, 1);
    x->reducer.result = x->reducer.own + (x->nsums ? chunk : 0);
    x->reducer.terms = mem_new(most, sizeof *x->reducer.terms);
    return x->reducer.own && x->reducer.terms ? RSD_OK : RSD_ENOMEM;
}

static rsd_status make_lanes(struct exchange *x)
{
    int64_t nbytes = 0;
    TRY(sort_direct(x));
    x->lanes = mem_new(x->nsends + x->nreceives, sizeof *x->lanes);
    if (!x->lanes)
        return RSD_ENOMEM;
    for (size_t i = 0; i < x->nreceives; i++) {
        TRY(add_lane(x, &x->receives[i], false));
        nbytes += (int64_t)x->receives[i].nbytes;
    }
    for (size_t i = 0; i < x->nsends; i++)
        TRY(add_lane(x, &x->sends[i], true));
    for (size_t i = 0; i < x->nests.nnests; i++)
        if (x->nests.nests[i].peer == x->transport.rank)
            nbytes += x->nests.nests[i].block.nrows * (int64_t)x->nests.nests[i].block.run;
    x->stream = nbytes >= STREAM_MIN_TOTAL;
    TRY(add_buffers(x));
    return add_reducer(x);
}

/* So much for each slot. */
static int64_t share_of(const struct exchange *x, int64_t budget)
{
    int64_t n = NSLOTS * (int64_t)(x->nsends + x->nreceives) + 2;
    return clamp_i64((budget ? budget : default_budget) / n / 64 * 64, LEAST_CHUNK, MOST_CHUNK);
}

rsd_status check_transport(const rsd_transport *transport)
{
    if (transport->rank < 0 || transport->rank >= transport->nranks)
        return fail(RSD_EINVAL, "rank %d of %d", (int)transport->rank, (int)transport->nranks);
    if (!transport->send || !transport->recv || !transport->test || !transport->cancel ||
        !transport->allgather)
        return fail(RSD_EINVAL, "a transport without all of its functions");
    return RSD_OK;
}

static rsd_status prepare(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                          const rsd_exchange_options *options)
{
    x->exec.carrier = &carrier;
    x->copier = copier_best();
    return label_plans(x, nplans, plans, options->names);
}

/* Once it is known that all have the same plans. */
static rsd_status compile(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                          const rsd_bind_options *bind, int64_t budget)
{
    int64_t chunk = 0;
    rsd_status status = exchange_compile(x, nplans, plans, bind);
    if (!status)
        status = mark_used(x);
    status = meet_again(x, status, share_of(x, budget), &chunk);
    x->chunk = (uint64_t)chunk;
    return status;
}

rsd_status rsd_bind_transport(int64_t nplans, const rsd_plan *const *plans,
                              const rsd_bind_options *bind, const rsd_transport *given,
                              const rsd_exchange_options *given_options, rsd_exec **exec)
{
    rsd_transport transport;
    rsd_exchange_options options;
    TRY(options_copy("rsd_transport", given, &transport, sizeof transport));
    TRY(check_transport(&transport)); /* else there is nobody to talk to */
    rsd_status status =
        options_copy("rsd_exchange_options", given_options, &options, sizeof options);
    double timeout = !status && options.timeout > 0 ? options.timeout : DEFAULT_TIMEOUT;
    struct exchange *x = mem_new(1, sizeof *x);
    if (!x) {
        meet_to_bind(NULL, RSD_ENOMEM, &transport, timeout, nplans, plans, 0, false);
        return RSD_ENOMEM;
    }
    x->transport = transport;
    x->timeout = timeout;
    if (!status)
        status = prepare(x, nplans, plans, &options);
    status = meet_to_bind(x, status, &transport, timeout, nplans, plans, options.node,
                          prefers_columns(nplans, plans, bind, transport.rank));
    if (!status)
        status = compile(x, nplans, plans, bind, options.max_nbytes);
    if (!status)
        status = neighbours_meet(x, nplans, plans, options.arena);
    if (!status)
        status = meet_again(x, make_lanes(x), 0, NULL);
    if (!status) {
        *exec = &x->exec;
    } else {
        x->transport.release = NULL; /* the transport stays the caller's */
        exchange_free(&x->exec);
    }
    return status;
}
