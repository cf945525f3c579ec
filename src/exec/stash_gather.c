/* gather.c - slices become whole again, one buffer after the other.
 *
 *     asked for:  fetch -> fetch -> fetch        the first is at work; when it is waited for and done,
 *                   ^                            the next one starts
 *
 * Invariants:
 *   (1) Fetches start and end at the same calls on all ranks, so whatever waits for all ranks in between
 *       (a bind) finds them there, and messages of two gathers never meet.
 *   (2) What is bound depends on the order of fetches alone, so all ranks have the same gathers, and use
 *       and forget them together.
 *   (3) Once something failed that left bytes on their way, the channel is broken and no fetch starts.
 */
#include "stash.h"

#include <stdio.h>

enum { GATHERS_KEPT = 32 };

/* ---- bound plans ---- */

rsd_status gathers_open(rsd_stash *stash)
{
    stash->last = &stash->first;
    stash->gathers = mem_new(GATHERS_KEPT, sizeof *stash->gathers);
    return stash->gathers ? RSD_OK : RSD_ENOMEM;
}

static void drop_gather(rsd_stash *stash, struct gather *gather)
{
    rsd_exec_free(gather->exec);
    slicing_release(&stash->slicings, gather->slicing);
    *gather = stash->gathers[--stash->ngathers];
}

void gathers_close(rsd_stash *stash)
{
    while (stash->ngathers > 0)
        drop_gather(stash, &stash->gathers[stash->ngathers - 1]);
    mem_free(stash->gathers);
    stash->gathers = NULL;
}

static struct gather *find_gather(const rsd_stash *stash, const struct fetch *fetch)
{
    const struct slicing *slicing = fetch->entry->slicing;
    for (size_t i = 0; i < stash->ngathers; i++) {
        struct gather *gather = &stash->gathers[i];
        if (gather->slicing == slicing &&
            memcmp(gather->strides, fetch->strides, sizeof fetch->strides) == 0)
            return gather;
    }
    return NULL;
}

static void forget_oldest(rsd_stash *stash)
{
    struct gather *oldest = &stash->gathers[0];
    for (size_t i = 1; i < stash->ngathers; i++)
        if (stash->gathers[i].last_used < oldest->last_used)
            oldest = &stash->gathers[i];
    drop_gather(stash, oldest);
}

static rsd_status bind_exec(rsd_stash *stash, const struct fetch *fetch, rsd_exec **exec)
{
    const rsd_plan *plan = fetch->entry->slicing->plan;
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(plan->dst->dtype), strides[RSD_MAX_DIMS];
    int64_t needed = 2 * (int64_t)fetch->entry->slicing->nbytes_whole; /* given and got at once */
    for (int32_t d = 0; d < plan->dst->ndim; d++)
        strides[d] = fetch->strides[d] / element_nbytes;
    rsd_bind_options how = {.struct_nbytes = sizeof how, .dst_strides = strides};
    rsd_exchange_options options = {.struct_nbytes = sizeof options,
                                    .max_nbytes = min_i64(gather_budget(&stash->options), needed),
                                    .timeout = stash->channel.timeout};
    return rsd_bind_transport(1, &plan, &how, &stash->channel.for_execs, &options, exec);
}

/* Whether all ranks have it: one may have failed after the others had bound. */
static rsd_status agree_bound(rsd_stash *stash, const struct fetch *fetch, rsd_status status)
{
    struct notice own = {.status = (int32_t)status, .kind = NOTICE_BIND, .id = fetch->id};
    struct notices *notices;
    if (stash->channel.broken)
        return status;
    rsd_status posted = notices_post(&stash->channel, &own, &notices);
    if (posted)
        return status ? status : posted;
    if (!status)
        status = (rsd_status)notices->own.status;
    rsd_status heard = notices_wait(&stash->channel, notices);
    if (!heard && !status)
        heard = notices_compare(&stash->channel, notices, false);
    notices_end(&stash->channel, notices);
    return status ? status : heard;
}

/* Before anybody binds, all have to be about the same. */
static rsd_status bind_gather(rsd_stash *stash, const struct fetch *fetch, struct gather **gather)
{
    rsd_exec *exec = NULL;
    rsd_status status = notices_wait(&stash->channel, fetch->notices);
    if (!status)
        status =
            channel_break(&stash->channel, notices_compare(&stash->channel, fetch->notices, false));
    TRY(status);
    if (stash->ngathers == GATHERS_KEPT)
        forget_oldest(stash);
    status = bind_exec(stash, fetch, &exec);
    if (status == RSD_ETIMEOUT)
        channel_break(&stash->channel, status);
    status = agree_bound(stash, fetch, status);
    if (status) {
        rsd_exec_free(exec);
        return status;
    }
    exchange_listen(exec, notices_hear, &stash->channel);
    struct gather *made = &stash->gathers[stash->ngathers++];
    *made = (struct gather){.slicing = fetch->entry->slicing, .exec = exec};
    copy_i64s(made->strides, fetch->strides, RSD_MAX_DIMS);
    made->slicing->references++;
    *gather = made;
    return RSD_OK;
}

/* ---- fetches ---- */

static rsd_status start_exec(rsd_stash *stash, struct fetch *fetch)
{
    const struct slicing *slicing = fetch->entry->slicing;
    const void *slices[2 * RSD_MAX_DIMS];
    void *out = fetch->out;
    const char *at = fetch->entry->slice;
    struct gather *gather = find_gather(stash, fetch);
    if (!gather)
        TRY(bind_gather(stash, fetch, &gather));
    gather->last_used = ++stash->nstarted;
    for (int64_t i = 0; i < slicing->nboxes; i++) {
        slices[i] = at;
        at += box_volume(slicing->boxes[i].ndim, slicing->boxes[i].len) *
              (int64_t)rsd_dtype_nbytes(slicing->whole->dtype);
    }
    TRY(channel_break(&stash->channel, rsd_exec_start(gather->exec, slices, &out)));
    fetch->exec = gather->exec;
    return RSD_OK;
}

/* The first fetch is over, one way or the other. */
static void end_first(rsd_stash *stash, rsd_status status)
{
    struct fetch *fetch = stash->first;
    stash->first = fetch->next;
    if (!stash->first)
        stash->last = &stash->first;
    fetch->next = NULL;
    fetch->done = true;
    fetch->status = status;
    if (status)
        snprintf(fetch->message, sizeof fetch->message, "%s", rsd_error());
    notices_end(&stash->channel, fetch->notices);
    fetch->notices = NULL;
}

/* Until one is at work, or none is left. */
static void start_first(rsd_stash *stash)
{
    while (stash->first) {
        rsd_status status = stash->channel.broken
                                ? fail(stash->channel.broken, "%s", stash->channel.why)
                                : start_exec(stash, stash->first);
        if (!status)
            return;
        end_first(stash, status);
    }
}

void fetch_poke(rsd_stash *stash)
{
    if (stash->first)
        exchange_poke(stash->first->exec);
}

static void finish_first(rsd_stash *stash)
{
    struct fetch *fetch = stash->first;
    struct channel *channel = &stash->channel;
    rsd_status status = rsd_exec_wait(fetch->exec);
    if (!status)
        status = notices_wait(channel, fetch->notices);
    if (!status)
        status = notices_compare(channel, fetch->notices, false);
    if (!channel_break(channel, status))
        stash->report.nbytes_received +=
            (int64_t)(fetch->entry->slicing->nbytes_whole - fetch->entry->slicing->nbytes);
    end_first(stash, status);
    start_first(stash);
}

/* Says that it cannot be done here. If the others could, bytes are on their way that nobody takes. */
static rsd_status tell_failure(rsd_stash *stash, struct notices *notices, rsd_status status)
{
    rsd_status heard = notices_wait(&stash->channel, notices);
    if (!heard && notices_split(&stash->channel, notices))
        channel_break(&stash->channel, status);
    notices_end(&stash->channel, notices);
    return status;
}

rsd_status fetch_start(rsd_stash *stash, rsd_status status, int64_t id, const struct entry *entry,
                       const int64_t *strides, char *out, struct fetch **fetch)
{
    struct notice own = {.kind = NOTICE_GET, .id = id};
    struct notices *notices;
    if (stash->channel.broken)
        return fail(RSD_EINVAL, "a get failed before (%s): the stash can only be freed",
                    rsd_status_name(stash->channel.broken));
    struct fetch *made = status ? NULL : mem_new(1, sizeof *made);
    if (!status && !made)
        status = RSD_ENOMEM;
    if (!status) {
        slicing_hash(entry->slicing, &own.about);
        hash_i64s(&own.about, strides, (size_t)entry->slicing->whole->ndim);
    }
    own.status = (int32_t)status;
    rsd_status posted = notices_post(&stash->channel, &own, &notices);
    if (!posted && !status)
        status = (rsd_status)notices->own.status;
    if (posted || status) {
        mem_free(made);
        return posted ? posted : tell_failure(stash, notices, status);
    }
    made->id = id;
    made->entry = entry;
    made->out = out;
    made->notices = notices;
    copy_i64s(made->strides, strides, entry->slicing->whole->ndim);
    bool alone = !stash->first;
    *stash->last = made;
    stash->last = &made->next;
    if (alone)
        start_first(stash);
    *fetch = made;
    return RSD_OK;
}

rsd_status fetch_finish(rsd_stash *stash, struct fetch *fetch)
{
    while (!fetch->done)
        finish_first(stash);
    rsd_status status = fetch->status;
    if (status)
        error_set("%s", fetch->message);
    mem_free(fetch);
    return status;
}
