/* exchange.c - runs of an exec between ranks.
 *
 * A run starts with a vote whether all ranks are ready. Then it executes the stages of its plans one after the other.
 * In a stage, all channels and the reducer progress independently. For each chunk of a combined box, the reducer
 * collects all terms, combines them in the order of the plan and stores the result.
 *
 * A rank that waits progresses everything that can move. If nothing moves for the time-out, the run fails and names
 * the rank that is late.
 */
#include "exchange.h"

#include <stdio.h>

/* ---- reductions ---- */

/* Finds the terms of the current chunk. *all is false if one has not arrived. */
static rsd_status collect_terms(struct exchange *x, const struct combined_box *box, size_t n,
                                bool *all)
{
    struct reducer *r = &x->reducer;
    *all = true;
    for (size_t i = 0; i < box->nterms && *all; i++) {
        const struct combined_term *term = &x->terms[box->first_term + i];
        r->terms[i] = r->own;
        if (term->channel)
            TRY(channel_peek(x, term->channel, &term->box, r->at, n, &r->terms[i]));
        *all = r->terms[i] != NULL;
    }
    for (size_t i = 0; i < box->nterms && *all; i++) { /* the term of this rank */
        const struct combined_term *term = &x->terms[box->first_term + i];
        if (term->channel)
            continue;
        if (x->on_device)
            TRY(exchange_device_pack_term(x, &term->box, r->at, n));
        else
            array_box_pack(x, &term->box, x->arrays.addresses[term->box.array], r->at, n, r->own);
    }
    return RSD_OK;
}

/* Combines the terms of a chunk in the order of the plan, and writes the result to its destination array. */
static rsd_status combine_terms(struct exchange *x, const struct combined_box *box, size_t nbytes)
{
    struct reducer *r = &x->reducer;
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(box->reduction.dtype),
            n = (int64_t)nbytes / element_nbytes;
    struct accumulators sums;
    if (x->on_device)
        return exchange_device_combine(x, box, nbytes);
    for (int64_t at = 0; at < n; at += REDUCE_BATCH) {
        int64_t some = min_i64(n - at, REDUCE_BATCH), offset = at * element_nbytes;
        reduce_first(&box->reduction, &sums, some, r->terms[0] + offset, element_nbytes);
        for (size_t i = 1; i < box->nterms; i++)
            reduce_next(&box->reduction, &sums, some, r->terms[i] + offset, element_nbytes);
        reduce_store(&box->reduction, &sums, some, r->result + offset, element_nbytes);
    }
    array_box_unpack(x, &box->to, r->at, nbytes, r->result);
    return RSD_OK;
}

/* Whether all boxes are combined, or a launch combines them. */
static bool reducer_is_done(const struct exchange *x)
{
    return x->reducer.box == x->ncombined || x->sums_on_device;
}

/* Combines the next chunk, if all of its terms have arrived. */
static rsd_status progress_reducer(struct exchange *x, bool *moved)
{
    struct reducer *r = &x->reducer;
    bool all;
    if (reducer_is_done(x))
        return RSD_OK;
    const struct combined_box *box = &x->combined[r->box];
    uint64_t rest = box->to.packed.nbytes - r->at, most = reduce_chunk_nbytes(x);
    size_t n = (size_t)(rest < most ? rest : most);
    TRY(collect_terms(x, box, n, &all));
    if (!all)
        return RSD_OK;
    *moved = true;
    TRY(combine_terms(x, box, n));
    for (size_t i = 0; i < box->nterms; i++)
        if (x->terms[box->first_term + i].channel)
            channel_advance(x, x->terms[box->first_term + i].channel, n);
    r->at += n;
    if (r->at == box->to.packed.nbytes) {
        r->box++;
        r->at = 0;
    }
    return RSD_OK;
}

/* ---- running ---- */

/* Begins the current stage. What stays on this rank is copied before it waits for anything; on a device, when it is
 * decided how. */
static void begin_stage(struct exchange *x)
{
    x->decided = !x->on_device;
    if (x->on_device) {
        exchange_device_begin_stage(x);
        return;
    }
    for (size_t i = 0; i < x->program.ncopies; i++) {
        const struct copy_op *op = &x->program.copies[i];
        if (op->stage != x->stage || op->peer != x->rank)
            continue;
        copy_block(&x->copier, x->stream, &op->block, x->arrays.addresses[op->src] + op->src_offset,
                   x->arrays.addresses[op->dst] + op->dst_offset, 0, op->block.nrows);
    }
}

/* On a device: one launch for all receives of the stage if possible, else each by itself. */
static rsd_status decide_stage(struct exchange *x, bool *moved)
{
    bool together;
    if (!channels_decide(x, x->stage, &together))
        return RSD_OK;
    x->decided = *moved = true;
    if (!together)
        return exchange_device_copy_own(x, x->stage);
    x->sums_on_device = x->stage == 0;
    return exchange_device_copy_all(x, x->stage);
}

/* Progresses all channels of the current stage, and the reducer. *done is set if the stage is complete. */
static rsd_status progress_stage(struct exchange *x, bool *moved, bool *done)
{
    if (!x->decided)
        TRY(decide_stage(x, moved));
    if (x->on_device)
        TRY(exchange_device_progress(x, moved));
    *done = x->decided;
    for (size_t i = 0; i < x->nchannels; i++) {
        struct channel *channel = &x->channels[i];
        if (channel->message->stage != x->stage || !(x->decided || channel->sending))
            continue;
        TRY(channel_progress(x, channel, moved));
        *done = *done && channel_is_finished(channel);
    }
    if (x->stage == 0 && x->decided) {
        TRY(progress_reducer(x, moved));
        *done = *done && reducer_is_done(x);
    }
    return *done && x->on_device ? exchange_device_stage_done(x, done) : RSD_OK;
}

/* Progresses the vote or the current stage, without waiting. Starts the next stage when one is complete. */
static rsd_status progress_run(struct exchange *x, bool *moved, bool *done)
{
    bool passed = false;
    *done = x->stage == x->nstages;
    if (*done)
        return RSD_OK;
    if (x->stage == -2) {
        TRY(exchange_device_ready(x, &passed));
        if (passed)
            peer_vote_start(x->peer, RSD_OK, &x->call);
    } else if (x->stage < 0) {
        rsd_status status = peer_vote_poll(x->peer, moved, &passed);
        x->refused = status && passed;
        TRY(status);
    } else {
        TRY(progress_stage(x, moved, &passed));
    }
    if (!passed)
        return RSD_OK;
    *moved = true;
    if (++x->stage == x->nstages)
        *done = true;
    else if (x->stage >= 0)
        begin_stage(x);
    return RSD_OK;
}

/* Returns whether this rank waits for another in the current stage, and writes the tensor to `what`. During the vote,
 * all stages count. Of type peer_waits_for. */
static bool waits_for_rank(void *context, int32_t rank, char *what, size_t n)
{
    const struct exchange *x = context;
    for (size_t i = 0; i < x->nchannels; i++) {
        const struct channel *channel = &x->channels[i];
        if (channel->message->peer != rank || channel_is_finished(channel) ||
            (x->stage >= 0 && channel->message->stage > x->stage))
            continue;
        const char *label = x->labels[x->boxes[channel->here.box].plan];
        snprintf(what, n, "%.80s, rank %d to rank %d", label, channel->sending ? x->rank : rank,
                 channel->sending ? rank : x->rank);
        return true;
    }
    return false;
}

/* Errors are kept for exchange_wait. */
static void exchange_progress(rsd_exec *exec)
{
    struct exchange *x = (struct exchange *)exec;
    bool moved = true, done = false;
    while (!x->early && moved && !done) {
        moved = false;
        x->early = progress_run(x, &moved, &done);
        if (x->early)
            snprintf(x->error, sizeof x->error, "%s", rsd_error());
    }
}

/* Starts a run. Its status is part of the vote, so a failure of this rank is reported by exchange_wait on all
 * ranks. */
static rsd_status exchange_start(rsd_exec *exec, const void *const *src, void *const *dst)
{
    struct exchange *x = (struct exchange *)exec;
    TRY(peer_check_usable(x->peer));
    rsd_status status = run_arrays_set(&x->arrays, src, dst);
    for (size_t i = 0; i < x->nchannels; i++)
        channel_rewind(x, &x->channels[i]);
    x->reducer.box = 0;
    x->reducer.at = 0;
    x->sums_on_device = false;
    x->refused = false;
    host_data_publish(x);
    if (!status)
        status = exchange_device_prepare(x);
    x->stage = status || !x->on_device ? -1 : -2;
    if (x->stage == -1)
        peer_vote_start(x->peer, status, &x->call);
    x->early = RSD_OK;
    exchange_progress(exec);
    return RSD_OK;
}

/* Progresses a run to its end. After a failure that ranks have not agreed on, the exec can only be freed. */
static rsd_status exchange_wait(rsd_exec *exec)
{
    struct exchange *x = (struct exchange *)exec;
    bool done = false;
    rsd_status status = x->early;
    if (status)
        error_set("%s", x->error);
    peer_wait_start(x->peer); /* the time since exchange_start does not count as waiting */
    while (!status && !done) {
        bool moved = false;
        status = progress_run(x, &moved, &done);
        if (moved)
            peer_moved(x->peer);
        else if (!status && !done)
            status = peer_idle(x->peer, waits_for_rank, x);
    }
    peer_wait_end(x->peer);
    if (status && !x->refused) {
        for (size_t i = 0; i < x->nchannels; i++)
            channel_cancel(x, &x->channels[i]);
        if (x->device)
            exchange_device_cancel(x);
        peer_break(x->peer);
    }
    if (x->on_device)
        exchange_device_end(x, status);
    return status;
}

static rsd_status exchange_run(rsd_exec *exec, const void *const *src, void *const *dst)
{
    TRY(exchange_start(exec, src, dst));
    return exchange_wait(exec);
}

static const char *exchange_describe(const rsd_exec *exec)
{
    const struct exchange *x = (const struct exchange *)exec;
    return x->on_device ? exchange_device_note(x) : x->note;
}

/* Frees an exec between ranks, but memory that the transport may still use. */
static void exchange_free(rsd_exec *exec)
{
    struct exchange *x = (struct exchange *)exec;
    exchange_device_drop(x);
    host_data_drop(x);
    compile_drop(x);
    for (int64_t i = 0; x->labels && i < x->nplans; i++)
        mem_free(x->labels[i]);
    mem_free(x->labels);
    mem_free(x->channels);
    mem_free(x->reducer.own_memory);
    mem_free(x->reducer.terms);
    if (!x->lost) /* else the transport may still use them */
        mem_free(x->buffers);
    if (x->owns_peer)
        peer_close(x->peer);
    if (x->transport.release)
        x->transport.release(x->transport.context);
    mem_free(x);
}

const struct backend exchange_backend = {exchange_start, exchange_wait,     exchange_run,
                                         exchange_free,  exchange_progress, exchange_describe};

void exchange_set_call(struct exchange *x, const struct peer_call *call)
{
    x->call = *call;
}
