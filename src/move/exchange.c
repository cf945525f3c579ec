/* exchange.c - the carrier between processes: packed messages over a transport, in rounds.
 *
 *     arrays --pack--> chunk --send ... recv--> chunk --unpack--> arrays
 *
 * Every parcel has one chunk on its way at a time, in a buffer of its own; chunks are at most as long as the
 * budget allows, the same length on both sides, so a parcel of any size goes in rounds. All parcels of a
 * stage move on independently of each other, and so do the sums of a reduction: for each part of a box all
 * terms are brought together, combined in the order of the plan, and stored.
 *
 * A rank never waits for one peer alone: it goes round everything that could move, and if nothing has moved
 * for the time-out, it gives up and names who is late.
 */
#include "move.h"

#include <sched.h>
#include <string.h>
#include <time.h>

enum { LEAST_CHUNK = 4096, MOST_CHUNK = 1 << 26, COPY_TAG = 0, REDUCE_TAG = 32 };
static const int64_t default_budget = (int64_t)256 << 20;

/* One chunk of a parcel on its way. */
struct lane {
    const struct parcel *parcel;
    bool sending, moving;
    size_t op;      /* at hand */
    uint64_t op_at; /* bytes of it that are done */
    uint64_t left;  /* bytes of the parcel that are not done */
    size_t nbytes;  /* on the way */
    char *buffer;
    void *request;
};

/* One part of a box that is combined: all terms on their way at once. */
struct reducer {
    size_t sum;  /* at hand */
    uint64_t at; /* bytes of it that are done */
    size_t nbytes, nmoving;
    char *terms; /* one chunk each */
    char *result;
    void **requests;
    bool *moving;
    size_t most_terms;
};

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- parcels ---- */

/* How long the next chunk is: as much as fits, and of a reduction no more than one piece. */
static size_t next_chunk(const struct exchange *x, const struct lane *lane)
{
    uint64_t most = lane->left;
    if (lane->parcel->reduce)
        most = x->ops[lane->op].nbytes - lane->op_at;
    return (size_t)(most < x->chunk ? most : x->chunk);
}

/* Goes through the ops of n bytes, packing or unpacking them, or neither. */
static void go_through(const struct exchange *x, struct lane *lane, size_t n, bool move)
{
    char *packed = lane->buffer;
    lane->left -= n;
    while (n > 0) {
        const struct op *op = &x->ops[lane->op];
        uint64_t rest = op->nbytes - lane->op_at;
        size_t some = rest < n ? (size_t)rest : n;
        if (move && lane->sending)
            op_pack(x, op, lane->op_at, some, packed);
        else if (move)
            op_unpack(x, op, lane->op_at, some, packed);
        packed += some;
        n -= some;
        lane->op_at += some;
        if (lane->op_at == op->nbytes) {
            lane->op++;
            lane->op_at = 0;
        }
    }
}

static rsd_status start_chunk(struct exchange *x, struct lane *lane)
{
    const rsd_transport *t = &x->transport;
    int32_t tag = lane->parcel->stage + (lane->parcel->reduce ? REDUCE_TAG : COPY_TAG);
    lane->nbytes = next_chunk(x, lane);
    if (lane->sending) {
        go_through(x, lane, lane->nbytes, true);
        TRY(t->send(t->context, lane->parcel->peer, tag, lane->buffer, lane->nbytes,
                    &lane->request));
    } else {
        TRY(t->recv(t->context, lane->parcel->peer, tag, lane->buffer, lane->nbytes,
                    &lane->request));
    }
    lane->moving = true;
    return RSD_OK;
}

static rsd_status push_lane(struct exchange *x, struct lane *lane, bool *moved)
{
    int32_t done = 0;
    if (!lane->moving && lane->left > 0) {
        *moved = true;
        return start_chunk(x, lane);
    }
    if (!lane->moving)
        return RSD_OK;
    TRY(x->transport.test(x->transport.context, lane->request, &done));
    if (!done)
        return RSD_OK;
    *moved = true;
    lane->moving = false;
    if (!lane->sending)
        go_through(x, lane, lane->nbytes, true);
    return RSD_OK;
}

/* ---- reductions ---- */

static rsd_status start_terms(struct exchange *x, struct reducer *r)
{
    const struct gathered_sum *sum = &x->sums[r->sum];
    uint64_t rest = sum->to.nbytes - r->at;
    r->nbytes = (size_t)(rest < x->chunk ? rest : x->chunk);
    for (size_t i = 0; i < sum->nterms; i++) {
        const struct gathered_term *term = &x->terms[sum->first_term + i];
        char *buffer = r->terms + i * x->chunk;
        if (term->peer == x->transport.rank) {
            op_pack(x, &term->op, r->at, r->nbytes, buffer);
            continue;
        }
        TRY(x->transport.recv(x->transport.context, term->peer, REDUCE_TAG, buffer, r->nbytes,
                              &r->requests[i]));
        r->moving[i] = true;
        r->nmoving++;
    }
    return RSD_OK;
}

static void combine_terms(struct exchange *x, struct reducer *r)
{
    const struct gathered_sum *sum = &x->sums[r->sum];
    int64_t each = (int64_t)rsd_dtype_nbytes(sum->reduction.dtype), n = (int64_t)r->nbytes / each;
    struct accumulators sums;
    for (int64_t at = 0; at < n; at += REDUCE_BATCH) {
        int64_t some = min_i64(n - at, REDUCE_BATCH);
        reduce_first(&sum->reduction, &sums, some, r->terms + at * each, each);
        for (size_t i = 1; i < sum->nterms; i++)
            reduce_next(&sum->reduction, &sums, some, r->terms + i * x->chunk + (size_t)(at * each),
                        each);
        reduce_store(&sum->reduction, &sums, some, r->result + at * each, each);
    }
    op_unpack(x, &sum->to, r->at, r->nbytes, r->result);
}

static rsd_status push_reducer(struct exchange *x, bool *moved)
{
    struct reducer *r = x->reducer;
    if (r->sum == x->nsums)
        return RSD_OK;
    const struct gathered_sum *sum = &x->sums[r->sum];
    if (r->nbytes == 0) {
        *moved = true;
        return start_terms(x, r);
    }
    for (size_t i = 0; i < sum->nterms; i++) {
        int32_t done = 0;
        if (!r->moving[i])
            continue;
        TRY(x->transport.test(x->transport.context, r->requests[i], &done));
        if (!done)
            continue;
        *moved = true;
        r->moving[i] = false;
        r->nmoving--;
    }
    if (r->nmoving > 0)
        return RSD_OK;
    *moved = true;
    combine_terms(x, r);
    r->at += r->nbytes;
    r->nbytes = 0;
    if (r->at == sum->to.nbytes) {
        r->sum++;
        r->at = 0;
    }
    return RSD_OK;
}

/* ---- a stage ---- */

static void keep(struct exchange *x, int32_t stage)
{
    for (size_t i = 0; i < x->nkeeps; i++) {
        const struct op *from = &x->keeps[2 * i], *to = &x->keeps[2 * i + 1];
        if (x->keep_stages[i] != stage)
            continue;
        for (uint64_t at = 0; at < from->nbytes; at += LEAST_CHUNK) {
            char block[LEAST_CHUNK]; /* small enough to stay in the cache */
            uint64_t rest = from->nbytes - at;
            size_t n = rest < LEAST_CHUNK ? (size_t)rest : LEAST_CHUNK;
            op_pack(x, from, at, n, block);
            op_unpack(x, to, at, n, block);
        }
    }
}

static rsd_status late(struct exchange *x, int32_t stage)
{
    for (size_t i = 0; i < x->nlanes; i++) {
        const struct lane *lane = &x->lanes[i];
        if (lane->parcel->stage == stage && (lane->left > 0 || lane->moving))
            return fail(RSD_ETIMEOUT,
                        "nothing moved for %g s: rank %d has not %s rank %d, %llu bytes are left",
                        x->timeout, (int)lane->parcel->peer,
                        lane->sending ? "received from" : "sent to", (int)x->transport.rank,
                        (unsigned long long)lane->left);
    }
    const struct reducer *r = x->reducer;
    for (size_t i = 0; r->sum < x->nsums && i < x->sums[r->sum].nterms; i++)
        if (r->moving[i])
            return fail(RSD_ETIMEOUT, "nothing moved for %g s: rank %d has not sent its term",
                        x->timeout, (int)x->terms[x->sums[r->sum].first_term + i].peer);
    return fail(RSD_ETIMEOUT, "nothing moved for %g s", x->timeout);
}

static rsd_status run_stage(struct exchange *x, int32_t stage)
{
    double since = seconds();
    keep(x, stage);
    for (;;) {
        bool moved = false, left = stage == 0 && x->reducer->sum < x->nsums;
        for (size_t i = 0; i < x->nlanes; i++) {
            struct lane *lane = &x->lanes[i];
            if (lane->parcel->stage != stage)
                continue;
            TRY(push_lane(x, lane, &moved));
            left = left || lane->left > 0 || lane->moving;
        }
        if (stage == 0)
            TRY(push_reducer(x, &moved));
        if (!left)
            return RSD_OK;
        if (moved) {
            since = seconds();
        } else if (seconds() - since > x->timeout) {
            return late(x, stage);
        } else {
            sched_yield();
        }
    }
}

/* Nobody waits for these any more. */
static void cancel_all(struct exchange *x)
{
    const rsd_transport *t = &x->transport;
    for (size_t i = 0; i < x->nlanes; i++) {
        if (x->lanes[i].moving)
            t->cancel(t->context, x->lanes[i].request);
        x->lanes[i].moving = false;
    }
    for (size_t i = 0; x->reducer->nmoving > 0 && i < x->sums[x->reducer->sum].nterms; i++)
        if (x->reducer->moving[i]) {
            t->cancel(t->context, x->reducer->requests[i]);
            x->reducer->moving[i] = false;
            x->reducer->nmoving--;
        }
}

/* ---- the carrier ---- */

static void rewind_lanes(struct exchange *x)
{
    for (size_t i = 0; i < x->nlanes; i++) {
        struct lane *lane = &x->lanes[i];
        lane->op = lane->parcel->first_op;
        lane->op_at = 0;
        lane->left = lane->parcel->nbytes;
        lane->moving = false;
    }
    x->reducer->sum = 0;
    x->reducer->at = 0;
    x->reducer->nbytes = 0;
    x->reducer->nmoving = 0;
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

static rsd_status run(rsd_exec *exec, const void *const *src, void *const *dst)
{
    struct exchange *x = (struct exchange *)exec;
    if (x->broken)
        return fail(RSD_EINVAL, "a run failed before: the exec can only be freed");
    for (int64_t i = 0; i < x->nsrc; i++)
        x->src[i] = src[i];
    for (int64_t i = 0; i < x->ndst; i++)
        x->dst[i] = dst[i];
    TRY(check_arrays(x));
    rewind_lanes(x);
    for (int32_t stage = 0; stage < x->nstages; stage++) {
        rsd_status status = run_stage(x, stage);
        x->broken = status != RSD_OK;
        if (status)
            cancel_all(x);
        TRY(status);
    }
    return RSD_OK;
}

/* There is no thread behind it that could go on alone. */
static rsd_status start(rsd_exec *exec, const void *const *src, void *const *dst)
{
    return run(exec, src, dst);
}

static rsd_status wait(rsd_exec *exec)
{
    (void)exec;
    return RSD_OK;
}

static void exchange_free(rsd_exec *exec)
{
    struct exchange *x = (struct exchange *)exec;
    if (x->transport.release)
        x->transport.release(x->transport.context);
    if (x->reducer) {
        mem_free(x->reducer->requests);
        mem_free(x->reducer->moving);
    }
    mem_free(x->reducer);
    mem_free(x->ops);
    mem_free(x->loops);
    mem_free(x->sends);
    mem_free(x->receives);
    mem_free(x->keeps);
    mem_free(x->keep_stages);
    mem_free(x->sums);
    mem_free(x->terms);
    mem_free(x->src);
    mem_free(x->dst);
    mem_free(x->src_used);
    mem_free(x->dst_used);
    mem_free(x->buffers);
    mem_free(x->lanes);
    mem_free(x);
}

static const struct carrier carrier = {start, wait, run, exchange_free};

/* ---- binding ---- */

static void mark(struct exchange *x, const struct op *op, bool giving)
{
    if (op->nbytes == 0)
        return;
    (giving && !op->from_dst ? x->src_used : x->dst_used)[op->array] = true;
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
    for (size_t i = 0; i < 2 * x->nkeeps; i++)
        mark(x, &x->keeps[i], i % 2 == 0);
    for (size_t i = 0; i < x->nsums; i++)
        mark(x, &x->sums[i].to, false);
    for (size_t i = 0; i < x->nterms; i++)
        if (x->terms[i].peer == x->transport.rank)
            mark(x, &x->terms[i].op, true);
    return RSD_OK;
}

static size_t most_terms(const struct exchange *x)
{
    size_t most = 0;
    for (size_t i = 0; i < x->nsums; i++)
        most = x->sums[i].nterms > most ? x->sums[i].nterms : most;
    return most;
}

/* Buffers that are in use at the same time: one for each parcel of a stage, and the terms of one sum. */
static size_t nbuffers(const struct exchange *x)
{
    return x->nsends + x->nreceives + (x->nsums ? most_terms(x) + 1 : 0);
}

static rsd_status make_buffers(struct exchange *x)
{
    size_t n = nbuffers(x), next = 0, terms = most_terms(x);
    x->buffers = mem_new(n, x->chunk);
    x->lanes = mem_new(x->nsends + x->nreceives, sizeof *x->lanes);
    x->reducer = mem_new(1, sizeof *x->reducer);
    if (!x->buffers || !x->lanes || !x->reducer)
        return RSD_ENOMEM;
    for (size_t i = 0; i < x->nreceives; i++)
        x->lanes[x->nlanes++] =
            (struct lane){.parcel = &x->receives[i], .buffer = x->buffers + next++ * x->chunk};
    for (size_t i = 0; i < x->nsends; i++)
        x->lanes[x->nlanes++] = (struct lane){
            .parcel = &x->sends[i], .sending = true, .buffer = x->buffers + next++ * x->chunk};
    x->reducer->result = x->buffers + next++ * x->chunk;
    x->reducer->terms = x->buffers + next * x->chunk;
    x->reducer->requests = mem_new(terms, sizeof(void *));
    x->reducer->moving = mem_new(terms, sizeof *x->reducer->moving);
    return x->reducer->requests && x->reducer->moving ? RSD_OK : RSD_ENOMEM;
}

/* What every rank tells the others at bind. */
struct greeting {
    int32_t status;
    int64_t nplans;
    int64_t chunk; /* the longest it can do */
    struct hash plans;
};

static void greet(struct greeting *own, rsd_status status, int64_t nplans,
                  const rsd_plan *const *plans, int64_t budget, const struct exchange *x)
{
    memset(own, 0, sizeof *own); /* all bytes travel */
    own->status = (int32_t)status;
    own->nplans = nplans;
    own->chunk = status ? LEAST_CHUNK
                        : clamp_i64(budget / (int64_t)max_i64((int64_t)nbuffers(x), 1) / 16 * 16,
                                    LEAST_CHUNK, MOST_CHUNK);
    hash_start(&own->plans, "plans");
    for (int64_t i = 0; i < nplans; i++) {
        char digest[RSD_DIGEST_NCHARS];
        rsd_plan_digest(plans[i], digest);
        hash_string(&own->plans, digest);
    }
}

/* All ranks see the same greetings, so all come to the same end. */
static rsd_status agree(struct exchange *x, const struct greeting *own)
{
    size_t n = (size_t)x->transport.nranks;
    struct greeting *all = mem_new(n, sizeof *all);
    rsd_status status = all ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = x->transport.allgather(x->transport.context, own, sizeof *own, all);
    x->chunk = (uint64_t)own->chunk;
    for (size_t i = 0; i < n && !status; i++) {
        if (all[i].status && (int32_t)i != x->transport.rank)
            status = fail(RSD_EPEER, "rank %zu could not bind: %s", i,
                          rsd_status_name((rsd_status)all[i].status));
        else if (all[i].nplans != all[0].nplans || all[i].plans.a != all[0].plans.a ||
                 all[i].plans.b != all[0].plans.b)
            status = fail(RSD_EMISMATCH, "rank %zu has other plans than rank 0", i);
        if ((uint64_t)all[i].chunk < x->chunk)
            x->chunk = (uint64_t)all[i].chunk;
    }
    mem_free(all);
    return status;
}

static rsd_status check_transport(const rsd_transport *transport)
{
    if (transport->rank < 0 || transport->rank >= transport->nranks)
        return fail(RSD_EINVAL, "rank %d of %d", (int)transport->rank, (int)transport->nranks);
    if (!transport->send || !transport->recv || !transport->test || !transport->cancel ||
        !transport->allgather)
        return fail(RSD_EINVAL, "a transport without all of its functions");
    return RSD_OK;
}

rsd_status rsd_bind_transport(int64_t nplans, const rsd_plan *const *plans,
                              const rsd_bind_options *bind, const rsd_transport *transport,
                              const rsd_exchange_options *given, rsd_exec **exec)
{
    rsd_exchange_options options;
    struct greeting own;
    TRY(take_options("rsd_exchange_options", given, &options, sizeof options));
    struct exchange *x = mem_new(1, sizeof *x);
    if (!x)
        return RSD_ENOMEM;
    x->exec.carrier = &carrier;
    x->copier = copier_best();
    x->timeout = options.timeout > 0 ? options.timeout : 300;
    rsd_status status =
        take_options("rsd_transport", transport, &x->transport, sizeof x->transport);
    if (!status)
        status = check_transport(&x->transport);
    if (status) { /* there is nobody to talk to */
        x->transport.release = NULL;
        exchange_free(&x->exec);
        return status;
    }
    status = exchange_compile(x, nplans, plans, bind);
    if (!status)
        status = mark_used(x);
    greet(&own, status, nplans, plans, options.max_nbytes ? options.max_nbytes : default_budget, x);
    rsd_status agreed = agree(x, &own);
    if (!status)
        status = agreed;
    if (!status)
        status = make_buffers(x);
    if (status) {
        x->transport.release = NULL; /* the transport stays the caller's */
        exchange_free(&x->exec);
    } else {
        *exec = &x->exec;
    }
    return status;
}
