/* stash.c - buffers that are the same on all ranks, kept as one slice per rank. */
#include "stash.h"

/* ---- making one ---- */

/* What every rank tells the others at first. */
struct greeting {
    int64_t status;
    struct hash options;
};

static rsd_status agree(const rsd_transport *t, double timeout, const rsd_stash_options *options,
                        rsd_status status)
{
    struct greeting own = {.status = status};
    size_t n = (size_t)t->nranks;
    hash_start(&own.options, "stash options 1");
    hash_i64(&own.options, options->check != 0);
    hash_i64(&own.options, options->keep_differing != 0);
    hash_i64(&own.options, options->keep_nbytes);
    hash_i64(&own.options, gather_budget(options));
    struct greeting *all = mem_new(n, sizeof *all);
    if (!all)
        return RSD_ENOMEM;
    rsd_status met = t->allgather(t->context, &own, sizeof own, all, timeout);
    for (size_t i = 0; i < n && !met; i++)
        if (all[i].status && (int32_t)i != t->rank)
            met = fail(RSD_EPEER, "rank %zu could not make a stash: %s", i,
                       rsd_status_name((rsd_status)all[i].status));
        else if (all[i].options.a != all[0].options.a || all[i].options.b != all[0].options.b)
            met = fail(RSD_EMISMATCH, "rank %zu makes a stash with other options than rank 0", i);
    mem_free(all);
    return status ? status : met;
}

static void stash_drop(rsd_stash *stash)
{
    gathers_close(stash);
    for (size_t i = 0; i < stash->nentries; i++) {
        mem_free(stash->entries[i]->slice);
        mem_free(stash->entries[i]);
    }
    mem_free(stash->entries);
    slicings_drop(&stash->slicings);
    channel_close(&stash->channel);
    mem_free(stash);
}

rsd_status rsd_stash_new(const rsd_transport *transport, const rsd_stash_options *given,
                         rsd_stash **stash)
{
    rsd_transport t;
    rsd_stash_options options;
    TRY(options_copy("rsd_transport", transport, &t, sizeof t));
    TRY(check_transport(&t));
    rsd_status status = options_copy("rsd_stash_options", given, &options, sizeof options);
    double timeout = !status && options.timeout > 0 ? options.timeout : DEFAULT_TIMEOUT;
    rsd_stash *made = status ? NULL : mem_new(1, sizeof *made);
    if (!status && !made)
        status = RSD_ENOMEM;
    if (!status)
        status = channel_open(&made->channel, &t, timeout);
    if (!status)
        status = gathers_open(made);
    status = agree(&t, timeout, &options, status);
    if (!made)
        return status;
    if (status) {
        stash_drop(made);
        return status;
    }
    made->options = options;
    *stash = made;
    return RSD_OK;
}

void rsd_stash_free(rsd_stash *stash)
{
    if (!stash)
        return;
    for (size_t i = 0; i < stash->nentries; i++)
        if (stash->entries[i]->fetch)
            fetch_finish(stash, stash->entries[i]->fetch);
    rsd_transport t = stash->channel.transport;
    stash_drop(stash);
    if (t.release)
        t.release(t.context);
}

/* ---- entries ---- */

/* Where an id is, or would be. */
static size_t place_of(const rsd_stash *stash, int64_t id)
{
    size_t lo = 0, hi = stash->nentries;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (stash->entries[mid]->id < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static rsd_status find_entry(const rsd_stash *stash, int64_t id, struct entry **entry)
{
    size_t at = place_of(stash, id);
    if (at == stash->nentries || stash->entries[at]->id != id)
        return fail(RSD_EINVAL, "the stash has no buffer %lld", (long long)id);
    *entry = stash->entries[at];
    return RSD_OK;
}

static void count(rsd_stash *stash, const struct entry *entry, int64_t sign)
{
    rsd_stash_report *r = &stash->report;
    r->nbuffers += sign;
    r->nwhole += entry->slicing->sliced ? 0 : sign;
    r->nbytes_held += sign * (int64_t)entry->slicing->nbytes;
    r->nbytes_whole += sign * (int64_t)entry->slicing->nbytes_whole;
    r->nbytes_most_held = max_i64(r->nbytes_most_held, r->nbytes_held);
    r->nbytes_most_whole = max_i64(r->nbytes_most_whole, r->nbytes_whole);
}

static void entry_free(rsd_stash *stash, struct entry *entry)
{
    if (entry->slicing)
        slicing_release(&stash->slicings, entry->slicing);
    mem_free(entry->slice);
    mem_free(entry);
}

/* ---- put ---- */

/* A copy of this rank's slice. */
static rsd_status make_entry(rsd_stash *stash, const struct description *d, const int64_t *given,
                             const char *data, int64_t *strides, struct entry **entry)
{
    const rsd_transport *t = &stash->channel.transport;
    struct entry *made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    rsd_status status = slicing_find(&stash->slicings, d, t->rank, t->nranks, &made->slicing);
    if (!status)
        status = slicing_strides(made->slicing, given, false, strides);
    if (!status && !data && made->slicing->nbytes_whole > 0)
        status = fail(RSD_EINVAL, "the buffer is NULL");
    if (!status)
        made->slice = mem_new(made->slicing->nbytes, 1);
    if (!status && !made->slice)
        status = RSD_ENOMEM;
    if (status) {
        entry_free(stash, made);
        return status;
    }
    slicing_take(made->slicing, data, strides, made->slice);
    *entry = made;
    return RSD_OK;
}

/* With check: are all ranks about the same buffer? */
static rsd_status compare(rsd_stash *stash, rsd_status status, int64_t id,
                          const struct entry *entry, const char *data, const int64_t *strides,
                          bool *differ)
{
    struct notice own = {.status = (int32_t)status, .kind = NOTICE_PUT, .id = id};
    struct channel *channel = &stash->channel;
    struct notices *notices;
    if (!status) {
        slicing_hash(entry->slicing, &own.about);
        if (entry->slicing->sliced)
            slicing_hash_values(entry->slicing, data, strides, &own.values);
    }
    rsd_status posted = notices_post(channel, &own, &notices);
    if (posted)
        return status ? status : posted;
    if (!status)
        status = (rsd_status)notices->own.status;
    rsd_status heard = notices_wait(channel, notices);
    if (!heard && !status) {
        heard = notices_compare(channel, notices, true);
        *differ = heard == RSD_EMISMATCH && notices_same_id(channel, notices);
    }
    notices_end(channel, notices);
    return status ? status : heard;
}

static rsd_status put(rsd_stash *stash, const rsd_stash_buffer *given, const char *data, int64_t id,
                      struct entry **entry)
{
    struct description d;
    rsd_stash_buffer buffer;
    struct entry *made = NULL;
    int64_t strides[RSD_MAX_DIMS] = {0};
    bool differ = false;
    rsd_status status = options_copy("rsd_stash_buffer", given, &buffer, sizeof buffer);
    if (!status)
        status = describe(&buffer, stash->channel.transport.nranks, stash->options.keep_nbytes, &d);
    if (!status)
        status = mem_grow(&stash->entries, &stash->entries_capacity, stash->nentries + 1,
                          sizeof(struct entry *));
    if (!status)
        status = make_entry(stash, &d, buffer.strides, data, strides, &made);
    if (stash->options.check && stash->channel.transport.nranks > 1)
        status = compare(stash, status, id, made, data, strides, &differ);
    if (differ && stash->options.keep_differing) {
        entry_free(stash, made);
        made = NULL;
        d.dim = WHOLE;
        status = make_entry(stash, &d, buffer.strides, data, strides, &made);
    }
    if (status && made)
        entry_free(stash, made);
    TRY(status);
    *entry = made;
    return RSD_OK;
}

rsd_status rsd_stash_put(rsd_stash *stash, const rsd_stash_buffer *buffer, const void *data,
                         int64_t *id)
{
    struct entry *entry;
    if (stash->options.check && stash->channel.broken)
        return fail(RSD_EINVAL, "the stash failed before (%s): it can only be freed",
                    rsd_status_name(stash->channel.broken));
    fetch_poke(stash);
    int64_t number = stash->next_id++; /* also where it fails, so that ranks stay in step */
    TRY(put(stash, buffer, data, number, &entry));
    entry->id = number;
    stash->entries[stash->nentries++] = entry;
    count(stash, entry, 1);
    *id = number;
    return RSD_OK;
}

/* ---- get ---- */

static rsd_status check_out(const struct entry *entry, const int64_t *given, const void *out,
                            int64_t *strides)
{
    if (!out && entry->slicing->nbytes_whole > 0)
        return fail(RSD_EINVAL, "there is nowhere to put buffer %lld: out is NULL",
                    (long long)entry->id);
    rsd_status status = slicing_strides(entry->slicing, given, true, strides);
    return status ? fail_in(status, "buffer %lld: ", (long long)entry->id) : RSD_OK;
}

/* What is kept whole is given at once: such a fetch is done when it starts. */
static rsd_status give_whole(const struct entry *entry, const int64_t *strides, void *out,
                             struct fetch **fetch)
{
    struct fetch *made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    slicing_give(entry->slicing, entry->slice, out, strides);
    made->out = out;
    made->done = true;
    *fetch = made;
    return RSD_OK;
}

/* A rank that fails here still tells the others, unless there is nothing that they would wait for. Without an
 * entry it fails, and why has been said. */
static rsd_status begin(rsd_stash *stash, int64_t id, const int64_t *given, void *out,
                        struct entry *entry, struct fetch **fetch)
{
    int64_t strides[RSD_MAX_DIMS] = {0};
    rsd_status status = entry ? check_out(entry, given, out, strides) : RSD_EINVAL;
    if (entry && !entry->slicing->sliced)
        return status ? status : give_whole(entry, strides, out, fetch);
    return fetch_start(stash, status, id, entry, strides, out, fetch);
}

rsd_status rsd_stash_prefetch(rsd_stash *stash, int64_t id, const int64_t *strides, void *out)
{
    struct entry *entry = NULL;
    struct fetch *fetch;
    fetch_poke(stash);
    find_entry(stash, id, &entry);
    if (entry && entry->fetch)
        return fail(RSD_EINVAL, "buffer %lld was asked for before", (long long)id);
    rsd_status status = begin(stash, id, strides, out, entry, &fetch);
    if (!status && entry)
        entry->fetch = fetch;
    return status;
}

rsd_status rsd_stash_get(rsd_stash *stash, int64_t id, const int64_t *strides, void *out)
{
    struct entry *entry = NULL;
    find_entry(stash, id, &entry);
    struct fetch *fetch = entry ? entry->fetch : NULL;
    if (!fetch)
        TRY(begin(stash, id, strides, out, entry, &fetch));
    else
        entry->fetch = NULL;
    bool elsewhere = out && out != fetch->out;
    TRY(fetch_finish(stash, fetch));
    if (elsewhere)
        return fail(RSD_EINVAL, "buffer %lld was prefetched to another place", (long long)id);
    return RSD_OK;
}

/* ---- the rest ---- */

rsd_status rsd_stash_drop(rsd_stash *stash, int64_t id)
{
    struct entry *entry;
    rsd_status status = RSD_OK;
    fetch_poke(stash);
    TRY(find_entry(stash, id, &entry));
    if (entry->fetch)
        status = fetch_finish(stash, entry->fetch);
    size_t at = place_of(stash, id);
    count(stash, entry, -1);
    entry_free(stash, entry);
    stash->nentries--;
    memmove(stash->entries + at, stash->entries + at + 1,
            (stash->nentries - at) * sizeof(struct entry *));
    return status;
}

rsd_status rsd_stash_look(const rsd_stash *stash, int64_t id, rsd_stashed *stashed)
{
    struct entry *entry;
    TRY(report_check("rsd_stashed", stashed));
    TRY(find_entry(stash, id, &entry));
    const struct slicing *slicing = entry->slicing;
    rsd_stashed answer = {.whole = !slicing->sliced,
                          .dim = slicing->dim >= 0 ? slicing->dim : RSD_STASH_ANY_DIM,
                          .nbytes_held = (int64_t)slicing->nbytes,
                          .nbytes_whole = (int64_t)slicing->nbytes_whole};
    report_copy(stashed, &answer, sizeof answer);
    return RSD_OK;
}

rsd_status rsd_stash_ask(const rsd_stash *stash, rsd_stash_report *report)
{
    TRY(report_check("rsd_stash_report", report));
    report_copy(report, &stash->report, sizeof stash->report);
    return RSD_OK;
}
