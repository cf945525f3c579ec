/* stash.c - buffers that are the same on all ranks, kept as one slice per rank.
 *
 * A get is a run of a plan that gathers the slices. Plans are bound once for each number of bytes, and share one peer.
 * The vote of a run compares the id and the size of the buffer, so a difference between ranks is detected before data
 * moves.
 *
 * At most one get is in progress. Gets start and end in the same calls on all ranks, so their votes, binds and
 * messages never mix, and all ranks bind and drop the same plans.
 */
#include "exchange.h"

#include "reshard_experimental.h"

#include <assert.h>
#include <stdio.h>

enum { PLANS_KEPT = 32, STASH_MAX_NBYTES = 16 << 20, STASH_ERROR_NCHARS = 200 };

struct stash_entry {
    int64_t id;
    size_t nbytes; /* of the whole buffer */
    char *slice;
    enum { ENTRY_IDLE, ENTRY_RUNNING, ENTRY_FETCHED } state;
    char *out; /* of a prefetch, and its status */
    rsd_status status;
    char error[STASH_ERROR_NCHARS];
};

/* A plan that gathers buffers of one size. */
struct stash_plan {
    size_t nbytes;
    struct exchange *exchange;
    int64_t last_used; /* the number of the last get that used it */
};

struct rsd_stash {
    rsd_stash_options options;
    rsd_transport transport;
    struct peer *peer;
    struct stash_entry **entries; /* by id */
    size_t nentries, entries_capacity;
    int64_t next_id;
    struct stash_plan plans[PLANS_KEPT];
    size_t nplans;
    int64_t nstarted;            /* gets so far */
    struct stash_entry *running; /* the get in progress; NULL: none */
    rsd_exec *exec;              /* that runs it */
    rsd_stash_usage usage;
};

/* ---- stashes ---- */

static rsd_status agree_on_options(rsd_stash *stash, rsd_status status)
{
    struct peer_call call = peer_call_named("rsd_stash_new");
    hash_i64(&call.arguments, stash->options.check != 0);
    hash_i64(&call.arguments, stash->options.max_nbytes);
    return peer_vote(stash->peer, status, &call);
}

rsd_status rsd_stash_new(const rsd_transport *given, const rsd_stash_options *options,
                         rsd_stash **stash)
{
    rsd_transport transport;
    TRY(peer_check_transport(given, &transport));
    rsd_stash *made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    made->transport = transport;
    rsd_status checked =
        options_copy("rsd_stash_options", options, &made->options, sizeof made->options);
    if (made->options.max_nbytes <= 0)
        made->options.max_nbytes = STASH_MAX_NBYTES;
    rsd_status status =
        peer_open(&transport, checked ? 0 : made->options.timeout, TAG_STASH, &made->peer);
    if (!status)
        status = agree_on_options(made, checked);
    if (status) {
        peer_close(made->peer);
        mem_free(made);
        return status;
    }
    *stash = made;
    return RSD_OK;
}

static void free_entry(struct stash_entry *entry)
{
    if (entry)
        mem_free(entry->slice);
    mem_free(entry);
}

/* Returns the index of the first entry whose id is not below `id`. */
static size_t entry_index(const rsd_stash *stash, int64_t id)
{
    size_t lo = 0, hi = stash->nentries;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (stash->entries[middle]->id < id)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

/* Returns NULL and sets the error text if the stash does not have the buffer. */
static struct stash_entry *find_buffer(const rsd_stash *stash, int64_t id)
{
    size_t at = entry_index(stash, id);
    if (at < stash->nentries && stash->entries[at]->id == id)
        return stash->entries[at];
    error_set("the stash has no buffer %lld", (long long)id);
    return NULL;
}

/* Returns the length of this rank's slice, and its start. The first slices may have one byte more than the others. */
static size_t slice_nbytes(const rsd_stash *stash, size_t nbytes, size_t *start)
{
    size_t n = (size_t)peer_nranks(stash->peer), rank = (size_t)peer_rank(stash->peer);
    size_t longer = nbytes % n;
    *start = nbytes / n * rank + (rank < longer ? rank : longer);
    return nbytes / n + (rank < longer);
}

/* Adds an entry to the statistics (sign 1), or removes it (sign -1). */
static void count_entry(rsd_stash *stash, const struct stash_entry *entry, int64_t sign)
{
    rsd_stash_usage *u = &stash->usage;
    size_t start;
    u->nbuffers += sign;
    u->nbytes_kept += sign * (int64_t)slice_nbytes(stash, entry->nbytes, &start);
    u->nbytes_total += sign * (int64_t)entry->nbytes;
    u->nbytes_kept_most = max_i64(u->nbytes_kept_most, u->nbytes_kept);
    u->nbytes_total_most = max_i64(u->nbytes_total_most, u->nbytes_total);
}

/* ---- gets ---- */

/* The call that ranks compare at a get: with `bound` in the vote of the run, else before its plan is bound. */
static struct peer_call get_call(int64_t id, size_t nbytes, bool bound)
{
    struct peer_call call = peer_call_named("rsd_stash_get of buffer %lld", (long long)id);
    hash_i64(&call.arguments, id);
    hash_i64(&call.arguments, (int64_t)nbytes);
    hash_i64(&call.arguments, bound);
    return call;
}

static struct stash_plan *find_plan(rsd_stash *stash, size_t nbytes)
{
    for (size_t i = 0; i < stash->nplans; i++)
        if (stash->plans[i].nbytes == nbytes)
            return &stash->plans[i];
    return NULL;
}

/* Returns the entry for a new plan. If the list is full, frees the plan that was used least recently. */
static struct stash_plan *reuse_plan(rsd_stash *stash)
{
    struct stash_plan *oldest = &stash->plans[0];
    if (stash->nplans < PLANS_KEPT)
        return &stash->plans[stash->nplans++];
    for (size_t i = 1; i < PLANS_KEPT; i++)
        if (stash->plans[i].last_used < oldest->last_used)
            oldest = &stash->plans[i];
    rsd_exec_free(&oldest->exchange->exec);
    return oldest;
}

/* Creates the plan that gathers a buffer of nbytes from the slices of all ranks. */
static rsd_status make_gather(const rsd_stash *stash, size_t nbytes, rsd_plan **plan)
{
    int nranks = peer_nranks(stash->peer);
    rsd_layout *slices, *whole;
    char problem[120];
    snprintf(problem, sizeof problem, "u8[%zu] : %d:B0 -> %d:R", nbytes, nranks, nranks);
    TRY(rsd_problem_parse(problem, &slices, &whole));
    rsd_status status = rsd_plan_new(slices, whole, NULL, plan);
    rsd_layout_free(slices);
    rsd_layout_free(whole);
    return status;
}

/* Collective. Binds a plan for the size of a buffer, after ranks have compared id and size. */
static rsd_status bind_plan(rsd_stash *stash, const struct stash_entry *entry,
                            struct stash_plan **bound)
{
    struct peer_call call = get_call(entry->id, entry->nbytes, false);
    rsd_plan *plan = NULL;
    struct exchange *exchange = NULL;
    rsd_exchange_options options = {.struct_nbytes = sizeof options};
    options.max_nbytes = min_i64(stash->options.max_nbytes, 2 * (int64_t)entry->nbytes + 1);
    TRY(peer_vote(stash->peer, RSD_OK, &call));
    rsd_status status = make_gather(stash, entry->nbytes, &plan);
    struct bind_request request = {
        .nplans = 1, .plans = (const rsd_plan *const *)&plan, .options = &options};
    status = exchange_bind(stash->peer, status, &request, &exchange);
    rsd_plan_free(plan);
    TRY(status);
    *bound = reuse_plan(stash);
    **bound = (struct stash_plan){.nbytes = entry->nbytes, .exchange = exchange};
    return RSD_OK;
}

/* Waits for the get in progress. Its status is kept for rsd_stash_get. */
static void finish_get(rsd_stash *stash)
{
    struct stash_entry *entry = stash->running;
    size_t start;
    if (!entry)
        return;
    stash->running = NULL;
    entry->state = ENTRY_FETCHED;
    entry->status = rsd_exec_wait(stash->exec);
    snprintf(entry->error, sizeof entry->error, "%s", entry->status ? rsd_error() : "");
    if (!entry->status)
        stash->usage.nbytes_received +=
            (int64_t)(entry->nbytes - slice_nbytes(stash, entry->nbytes, &start));
}

/* Collective. Starts a get, after an earlier one is complete. */
static rsd_status start_get(rsd_stash *stash, struct stash_entry *entry, void *out)
{
    struct peer_call call = get_call(entry->id, entry->nbytes, true);
    const void *slice = entry->slice;
    finish_get(stash);
    TRY(peer_check_usable(stash->peer));
    struct stash_plan *plan = find_plan(stash, entry->nbytes);
    if (!plan)
        TRY(bind_plan(stash, entry, &plan));
    plan->last_used = ++stash->nstarted;
    exchange_set_call(plan->exchange, &call);
    TRY(rsd_exec_start(&plan->exchange->exec, &slice, &out));
    stash->exec = &plan->exchange->exec;
    stash->running = entry;
    entry->state = ENTRY_RUNNING;
    entry->out = out;
    return RSD_OK;
}

/* Collective. Fails the get on all ranks, because this rank cannot start it. Requires that rsd_error is set. */
static rsd_status refuse_get(rsd_stash *stash, int64_t id)
{
    struct peer_call call = get_call(id, 0, false);
    char error[STASH_ERROR_NCHARS];
    snprintf(error, sizeof error, "%s", rsd_error());
    finish_get(stash);
    error_set("%s", error);
    return peer_vote(stash->peer, RSD_EINVAL, &call);
}

static bool can_start(const struct stash_entry *entry, const void *out)
{
    if (entry->state != ENTRY_IDLE)
        error_set("buffer %lld was prefetched already", (long long)entry->id);
    else if (!out && entry->nbytes > 0)
        error_set("buffer %lld: out is NULL", (long long)entry->id);
    else
        return true;
    return false;
}

rsd_status rsd_stash_prefetch(rsd_stash *stash, int64_t id, void *out)
{
    struct stash_entry *entry = find_buffer(stash, id);
    if (!entry || !can_start(entry, out))
        return refuse_get(stash, id);
    return start_get(stash, entry, out);
}

rsd_status rsd_stash_get(rsd_stash *stash, int64_t id, void *out)
{
    struct stash_entry *entry = find_buffer(stash, id);
    if (!entry || (entry->state == ENTRY_IDLE && !can_start(entry, out)))
        return refuse_get(stash, id);
    if (entry->state == ENTRY_IDLE)
        TRY(start_get(stash, entry, out));
    if (entry->state == ENTRY_RUNNING)
        finish_get(stash);
    entry->state = ENTRY_IDLE;
    if (entry->status)
        return fail(entry->status, "%s", entry->error);
    if (out && out != entry->out)
        return fail(RSD_EINVAL, "buffer %lld was prefetched to another address", (long long)id);
    return RSD_OK;
}

/* ---- puts ---- */

/* Creates an entry with a copy of this rank's slice. It is not in the list yet. */
static rsd_status make_entry(rsd_stash *stash, const void *data, size_t nbytes,
                             struct stash_entry **entry)
{
    if (!data && nbytes > 0)
        return fail(RSD_EINVAL, "data is NULL");
    if (nbytes > INT64_MAX / 4)
        return fail(RSD_ELIMIT, "%zu bytes are too many for one buffer", nbytes);
    TRY(mem_grow(&stash->entries, &stash->entries_capacity, stash->nentries + 1,
                 sizeof(struct stash_entry *)));
    size_t start, n = slice_nbytes(stash, nbytes, &start);
    struct stash_entry *made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    made->nbytes = nbytes;
    made->slice = mem_new(n, 1);
    if (!made->slice) {
        mem_free(made);
        return RSD_ENOMEM;
    }
    if (data && n > 0)
        memcpy(made->slice, (const char *)data + start, n);
    *entry = made;
    return RSD_OK;
}

static rsd_status compare_buffers(rsd_stash *stash, rsd_status status, int64_t id, const void *data,
                                  size_t nbytes)
{
    struct peer_call call = peer_call_named("rsd_stash_put of buffer %lld", (long long)id);
    if (!status)
        hash_bytes(&call.arguments, data, nbytes);
    return peer_vote(stash->peer, status, &call);
}

rsd_status rsd_stash_put(rsd_stash *stash, const void *data, size_t nbytes, int64_t *id)
{
    struct stash_entry *entry = NULL;
    int64_t number = stash->next_id++; /* also on failure, so that ids stay equal on all ranks */
    if (stash->options.check)
        finish_get(stash); /* votes must have the same order on all ranks */
    else if (stash->running)
        rsd_exec_progress(stash->exec);
    rsd_status status = make_entry(stash, data, nbytes, &entry);
    if (stash->options.check)
        status = compare_buffers(stash, status, number, data, nbytes);
    if (status) {
        free_entry(entry);
        return status;
    }
    assert(entry); /* else the vote failed */
    entry->id = number;
    stash->entries[stash->nentries++] = entry;
    count_entry(stash, entry, 1);
    *id = number;
    return RSD_OK;
}

/* ---- drops and statistics ---- */

rsd_status rsd_stash_drop(rsd_stash *stash, int64_t id)
{
    struct stash_entry *entry = find_buffer(stash, id);
    if (!entry)
        return RSD_EINVAL;
    if (entry->state == ENTRY_RUNNING)
        finish_get(stash);
    rsd_status status = entry->state == ENTRY_FETCHED && entry->status
                            ? fail(entry->status, "%s", entry->error)
                            : RSD_OK;
    size_t at = entry_index(stash, id);
    count_entry(stash, entry, -1);
    free_entry(entry);
    stash->nentries--;
    memmove(stash->entries + at, stash->entries + at + 1,
            (stash->nentries - at) * sizeof(struct stash_entry *));
    return status;
}

void rsd_stash_free(rsd_stash *stash)
{
    if (!stash)
        return;
    finish_get(stash);
    for (size_t i = 0; i < stash->nplans; i++)
        rsd_exec_free(&stash->plans[i].exchange->exec);
    for (size_t i = 0; i < stash->nentries; i++)
        free_entry(stash->entries[i]);
    mem_free(stash->entries);
    peer_close(stash->peer);
    if (stash->transport.release)
        stash->transport.release(stash->transport.context);
    mem_free(stash);
}

rsd_status rsd_stash_stats(const rsd_stash *stash, rsd_stash_usage *usage)
{
    TRY(report_check("rsd_stash_usage", usage));
    report_copy(usage, &stash->usage, sizeof stash->usage);
    return RSD_OK;
}
