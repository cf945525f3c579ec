/* exchange_bind.c - binds plans to an exec between ranks, in these steps:
 *
 *     1. Each rank compiles its part of the plans.
 *     2. All ranks compare their plans, and agree on the order of packed boxes and on the size of messages.
 *     3. Ranks of one host export arrays and ring buffers to each other. If that fails, the transport is used.
 *     4. Each rank creates its channels.
 */
#include "exchange.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

enum { MIN_CHUNK_NBYTES = 4096, MAX_CHUNK_NBYTES = 4 << 20, TEXT_NCHARS = 120 };
static const int64_t default_budget = DEFAULT_MAX_NBYTES;

/* ---- channels ---- */

/* Sorts by sender and stage, so that the copies of a channel are consecutive. */
static int compare_copies(const void *a, const void *b)
{
    const struct copy_op *x = a, *y = b;
    if (x->peer != y->peer)
        return x->peer < y->peer ? -1 : 1;
    if (x->stage != y->stage)
        return x->stage < y->stage ? -1 : 1;
    return (x->first_loop > y->first_loop) - (x->first_loop < y->first_loop);
}

/* Finds the copies of a channel in the program, where they are consecutive. */
static void find_direct(struct exchange *x, struct channel *channel)
{
    const struct copy_op *copies = x->program.copies;
    for (size_t i = 0; i < x->program.ncopies; i++) {
        if (copies[i].peer != channel->message->peer || copies[i].stage != channel->message->stage)
            continue;
        if (channel->ndirect++ == 0)
            channel->first_direct = i;
    }
}

/* Adds a channel for a message that is not empty, through shared memory if its peer exports any. */
static rsd_status add_channel(struct exchange *x, const struct message *message, bool sending)
{
    if (message->nbytes == 0)
        return RSD_OK;
    struct channel *channel = &x->channels[x->nchannels];
    *channel = (struct channel){
        .message = message, .sending = sending, .host = host_data_rank(x, message->peer)};
    channel->chunk = channel_chunk_nbytes(x, message, channel->host != NULL);
    if (channel->host && sending) {
        channel->ring = &x->host->rings[message - x->sends];
        for (uint64_t i = 0; i < NBUFFERS; i++)
            channel->buffers[i].data =
                ring_buffer(&x->host->segment, channel->ring, i, channel->chunk);
    } else if (channel->host) {
        channel->ring = host_data_ring(x, channel->host, message);
        if (!channel->ring)
            return fail(RSD_EPEER, "rank %d exported no buffer for this message",
                        (int)message->peer);
        find_direct(x, channel);
    }
    x->nchannels++;
    return RSD_OK;
}

/* Over the transport two; to pack a term from another rank's arena one. */
static size_t nbuffers_of(const struct channel *channel)
{
    bool reduces = !channel->sending && channel->message->reduce;
    return !channel->host ? NBUFFERS : reduces ? 1 : 0;
}

/* Allocates the buffers of all channels in one block. */
static rsd_status add_buffers(struct exchange *x)
{
    size_t nbytes = 0;
    for (size_t i = 0; i < x->nchannels; i++)
        nbytes += nbuffers_of(&x->channels[i]) * x->channels[i].chunk;
    mem_free(x->buffers);
    x->buffers = mem_new(nbytes, 1);
    x->buffers_nbytes = nbytes;
    if (!x->buffers)
        return RSD_ENOMEM;
    char *next = x->buffers;
    for (size_t i = 0; i < x->nchannels; i++)
        for (size_t k = 0; k < nbuffers_of(&x->channels[i]); k++, next += x->channels[i].chunk)
            x->channels[i].buffers[k].data = next;
    return RSD_OK;
}

/* Connects terms to their channels, and allocates the buffers of the reducer. */
static rsd_status add_reducer(struct exchange *x)
{
    size_t most = 0, chunk = x->ncombined ? (size_t)reduce_chunk_nbytes(x) : 0;
    struct channel **channel_of = mem_new((size_t)x->nranks, sizeof(struct channel *));
    if (!channel_of)
        return RSD_ENOMEM;
    for (size_t i = 0; i < x->nchannels; i++)
        if (!x->channels[i].sending && x->channels[i].message->reduce)
            channel_of[x->channels[i].message->peer] = &x->channels[i];
    for (size_t i = 0; i < x->nterms; i++)
        x->terms[i].channel = channel_of[x->terms[i].peer];
    mem_free(channel_of);
    for (size_t i = 0; i < x->ncombined; i++)
        most = x->combined[i].nterms > most ? x->combined[i].nterms : most;
    mem_free(x->reducer.own_memory);
    mem_free(x->reducer.terms);
    x->reducer.own = x->reducer.own_memory = mem_new(2 * chunk, 1);
    x->reducer.terms = mem_new(most, sizeof *x->reducer.terms);
    if (!x->reducer.own || !x->reducer.terms)
        return RSD_ENOMEM;
    x->reducer.result = x->reducer.own + chunk;
    return RSD_OK;
}

/* Creates all channels, or creates them again without shared memory. */
static rsd_status make_channels(struct exchange *x)
{
    int64_t nbytes = 0;
    program_finish(&x->program);
    if (x->program.ncopies > 1)
        qsort(x->program.copies, x->program.ncopies, sizeof *x->program.copies, compare_copies);
    mem_free(x->channels);
    x->nchannels = 0;
    x->channels = mem_new(x->nsends + x->nreceives, sizeof *x->channels);
    if (!x->channels)
        return RSD_ENOMEM;
    for (size_t i = 0; i < x->nreceives; i++) {
        TRY(add_channel(x, &x->receives[i], false));
        nbytes += (int64_t)x->receives[i].nbytes;
    }
    for (size_t i = 0; i < x->nsends; i++)
        TRY(add_channel(x, &x->sends[i], true));
    for (size_t i = 0; i < x->program.ncopies; i++) {
        const struct copy_op *op = &x->program.copies[i];
        if (op->peer == x->rank)
            nbytes += block_nbytes(&op->block);
    }
    x->stream = nbytes >= STREAM_MIN_TOTAL;
    TRY(add_buffers(x));
    return add_reducer(x);
}

/* ---- shared memory ---- */

/* The names of a rank's shared memory, and whether it could be exported and imported. */
struct data_offer {
    struct host_data_names names;
    int32_t status;
    char why[TEXT_NCHARS];
};

/* Records in the offer whether this rank could do its part, and why not. */
static void note_offer(struct data_offer *own, rsd_status status)
{
    own->status = (int32_t)status;
    snprintf(own->why, sizeof own->why, "%s", status ? rsd_error() : "");
}

/* Makes the shared memory of this rank, if it shares any, and names it in the offer. */
static rsd_status export_data(struct exchange *x, const rsd_arena *arena, struct data_offer *own)
{
    if (peer_host_nranks(x->peer) == 0)
        return RSD_OK;
    TRY(host_data_make(x, arena));
    own->names = host_data_export(x);
    return RSD_OK;
}

/* Opens what the ranks of this host offer, and makes the channels of this rank. */
static rsd_status import_data(struct exchange *x, const struct bind_request *request,
                              const struct data_offer *offers)
{
    for (int32_t i = 0; x->host && i < x->host->n; i++)
        TRY(host_data_open(x, i, &offers[peer_host_rank(x->peer, i)].names, request));
    if (x->host)
        TRY(compile_host_copies(x, request));
    return make_channels(x);
}

/* Returns whether this rank, or one that shares memory with it, failed. Then they use the transport. */
static bool any_offer_failed(struct exchange *x, const struct data_offer *offers)
{
    int32_t n = peer_host_nranks(x->peer);
    for (int32_t i = 0; i == 0 || i < n; i++) {
        int32_t rank = n > 0 ? peer_host_rank(x->peer, i) : x->rank;
        if (!offers[rank].status)
            continue;
        snprintf(x->note, sizeof x->note, "messages only: rank %d: %.*s", (int)rank,
                 TEXT_NCHARS - 1, offers[rank].why);
        return true;
    }
    return false;
}

/* Forgets what was imported, and the channels that use it. */
static void unshare_data(struct exchange *x)
{
    host_data_drop(x);
    mem_free(x->channels);
    x->channels = NULL;
}

/* Collective. Exports data on every host, and makes the channels of this rank. If a rank of its host cannot share data,
 * it has none yet. Sets *all if every rank has its channels. If status is not RSD_OK, x may be NULL. */
static rsd_status share_data(struct peer *peer, rsd_status status, struct exchange *x,
                             const struct bind_request *request, bool *all)
{
    struct peer_call exporting = peer_call_named("exporting arrays"),
                     importing = peer_call_named("importing arrays");
    struct data_offer own, *offers = mem_new((size_t)peer_nranks(peer), sizeof *offers);
    memset(&own, 0, sizeof own); /* all bytes are sent */
    if (!offers && !status)
        status = RSD_ENOMEM;
    if (!status)
        note_offer(&own, export_data(x, request->options->arena, &own));
    status = peer_gather(peer, status, &exporting, &own, sizeof own, offers);
    assert(status || (x && offers));
    if (!status && !any_offer_failed(x, offers))
        note_offer(&own, import_data(x, request, offers));
    if (!status)
        status = peer_gather(peer, RSD_OK, &importing, &own, sizeof own, offers);
    *all = !status;
    for (int32_t i = 0; *all && i < peer_nranks(peer); i++)
        *all = !offers[i].status;
    if (!status && any_offer_failed(x, offers))
        unshare_data(x);
    mem_free(offers);
    return status;
}

/* Collective. Creates the channels. If status is not RSD_OK, x may be NULL, and all ranks return that status. */
static rsd_status connect_ranks(struct peer *peer, rsd_status status, struct exchange *x,
                                const struct bind_request *request)
{
    struct peer_call call = peer_call_named("making channels");
    bool all = false;
    assert(status || x);
    if (!status)
        snprintf(x->note, sizeof x->note, "messages only: %s", peer_host_note(peer));
    if (peer_any_host_shared(peer))
        TRY(share_data(peer, status, x, request, &all));
    assert(status || x);
    if (!status && x->host)
        snprintf(x->note, sizeof x->note, "%d of %d ranks through shared memory", (int)x->host->n,
                 (int)x->nranks);
    if (!status && !x->channels)
        status = make_channels(x);
    return all ? status : peer_vote(peer, status, &call);
}

/* ---- plans of all ranks ---- */

/* The facts that each rank sends to all others. */
struct bind_facts {
    struct hash plans;
    int64_t nplans, node, by_columns, terms_align, chunk;
};

static struct hash hash_plans(int64_t count, const rsd_plan *const *plans)
{
    struct hash hash;
    hash_start(&hash, "plans");
    for (int64_t i = 0; i < count; i++) {
        char digest[RSD_DIGEST_NCHARS];
        rsd_plan_digest(plans[i], digest);
        hash_string(&hash, digest);
    }
    return hash;
}

/* A plan as text, for the error that names a difference. */
struct plan_text {
    struct hash hash;
    char text[TEXT_NCHARS];
};

static struct plan_text describe_plan(const rsd_plan *plan)
{
    struct plan_text own;
    char *problem = NULL;
    memset(&own, 0, sizeof own); /* all bytes are sent */
    own.hash = hash_plans(1, &plan);
    if (!rsd_problem_print(plan->src, plan->dst, &problem))
        snprintf(own.text, sizeof own.text, "%s", problem);
    rsd_free(problem);
    return own;
}

/* Collective. Returns EMISMATCH for the first plan that differs between ranks. */
static rsd_status find_different_plan(struct peer *peer, const rsd_plan *const *plans,
                                      int64_t nplans, struct plan_text *all)
{
    struct peer_call call = peer_call_named("comparing plans");
    rsd_status status = all ? RSD_OK : RSD_ENOMEM;
    for (int64_t i = 0; i < nplans; i++) {
        struct plan_text own = describe_plan(plans[i]);
        TRY(peer_gather(peer, status, &call, &own, sizeof own, all));
        assert(all); /* else the gather failed */
        for (int32_t rank = 1; rank < peer_nranks(peer); rank++)
            if (all[rank].hash.a != all[0].hash.a || all[rank].hash.b != all[0].hash.b)
                return fail(RSD_EMISMATCH, "plan %lld differs: rank 0 has %.*s, rank %d has %.*s",
                            (long long)i, TEXT_NCHARS - 1, all[0].text, (int)rank, TEXT_NCHARS - 1,
                            all[rank].text);
    }
    return RSD_OK;
}

/* Collective if plans differ. Returns EMISMATCH if the plans of the ranks differ. EPEER: buffers of that size do not
 * exist. */
static rsd_status compare_facts(struct peer *peer, const rsd_plan *const *plans,
                                const struct bind_facts *all)
{
    bool different = false;
    for (int32_t i = 0; i < peer_nranks(peer); i++)
        if (all[i].chunk < MIN_CHUNK_NBYTES || all[i].chunk > MAX_CHUNK_NBYTES)
            return fail(RSD_EPEER, "rank %d has buffers of %lld bytes (%d to %d are possible)",
                        (int)i, (long long)all[i].chunk, MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES);
    for (int32_t i = 1; i < peer_nranks(peer); i++) {
        if (all[i].nplans != all[0].nplans)
            return fail(RSD_EMISMATCH, "rank %d has %lld plans, rank 0 has %lld", (int)i,
                        (long long)all[i].nplans, (long long)all[0].nplans);
        different =
            different || all[i].plans.a != all[0].plans.a || all[i].plans.b != all[0].plans.b;
    }
    if (!different)
        return RSD_OK;
    struct plan_text *texts = mem_new((size_t)peer_nranks(peer), sizeof *texts);
    rsd_status status = find_different_plan(peer, plans, all[0].nplans, texts);
    mem_free(texts);
    return status;
}

/* ---- the exec ---- */

/* Sets the text by which errors name each plan. */
static rsd_status label_plans(struct exchange *x, const struct bind_request *request)
{
    const char *const *names = request->options->names;
    x->labels = mem_new((size_t)request->nplans, sizeof *x->labels);
    if (!x->labels)
        return RSD_ENOMEM;
    x->nplans = request->nplans;
    for (int64_t i = 0; i < x->nplans; i++) {
        const rsd_layout *src = request->plans[i]->src;
        struct text text = {0};
        if (names && names[i]) {
            text_add(&text, "%s", names[i]);
        } else {
            text_add(&text, "tensor %lld, %s[", (long long)i, rsd_dtype_name(src->dtype));
            for (int32_t d = 0; d < src->ndim; d++)
                text_add(&text, "%s%lld", d ? "," : "", (long long)rsd_layout_shape(src)[d]);
            text_add(&text, "]");
        }
        TRY(text_take(&text, &x->labels[i]));
    }
    return RSD_OK;
}

/* Creates an exec without channels: compiles what this rank sends and receives. */
static rsd_status compile_exchange(struct peer *peer, const struct bind_request *request,
                                   bool by_columns, struct exchange **exchange)
{
    struct exchange *x = mem_new(1, sizeof *x);
    if (!x)
        return RSD_ENOMEM;
    x->exec.backend = &exchange_backend;
    x->peer = peer;
    x->rank = peer_rank(peer);
    x->nranks = peer_nranks(peer);
    x->by_columns = by_columns;
    x->copier = copier_best();
    x->call = peer_call_named("rsd_exec_run");
    x->call.arguments = hash_plans(request->nplans, request->plans);
    rsd_status status = label_plans(x, request);
    if (!status)
        status = compile_plans(x, request);
    if (status)
        exchange_backend.free(&x->exec);
    else
        *exchange = x;
    return status;
}

/* Returns the bytes of each buffer if all buffers of this rank have `budget` bytes together. */
static int64_t chunk_of_budget(const struct exchange *x, int64_t budget)
{
    int64_t n = NBUFFERS * (int64_t)(x->nsends + x->nreceives) + 2;
    return clamp_i64((budget ? budget : default_budget) / n / 64 * 64, MIN_CHUNK_NBYTES,
                     MAX_CHUNK_NBYTES);
}

/* Collective. Compares the plans, and computes the facts that hold on all ranks. */
static rsd_status agree_on_facts(struct peer *peer, rsd_status status, const struct exchange *x,
                                 const struct bind_request *request, struct bind_facts *agreed,
                                 int64_t *host_of)
{
    const rsd_exchange_options *options = request->options;
    struct peer_call call = peer_call_named("rsd_bind_transport");
    struct bind_facts own = {.by_columns = false},
                      *all = mem_new((size_t)peer_nranks(peer), sizeof *all);
    if (!all && !status)
        status = RSD_ENOMEM;
    if (!status)
        own = (struct bind_facts){.plans = x->call.arguments,
                                  .nplans = x->nplans,
                                  .node = options->node ? options->node : host_number(),
                                  .by_columns = x->by_columns,
                                  .terms_align = compile_terms_align(x),
                                  .chunk = chunk_of_budget(x, options->max_nbytes)};
    status = peer_gather(peer, status, &call, &own, sizeof own, all);
    assert(status || (all && host_of));
    if (!status)
        status = compare_facts(peer, request->plans, all);
    for (int32_t i = 0; i < peer_nranks(peer) && !status; i++) {
        agreed->by_columns = all[i].by_columns && (i == 0 || agreed->by_columns);
        agreed->terms_align = all[i].terms_align && (i == 0 || agreed->terms_align);
        agreed->chunk = i == 0 ? all[i].chunk : min_i64(agreed->chunk, all[i].chunk);
        host_of[i] = all[i].node < 0 ? -1 - i : all[i].node;
    }
    mem_free(all);
    return status;
}

rsd_status exchange_bind(struct peer *peer, rsd_status status, const struct bind_request *request,
                         struct exchange **exchange)
{
    struct exchange *x = NULL;
    struct bind_facts agreed = {.by_columns = false};
    int64_t *host_of = mem_new((size_t)peer_nranks(peer), sizeof *host_of);
    rsd_status prepared = RSD_OK;
    bool by_columns = !status && compile_prefers_columns(request, peer_rank(peer));
    if (!host_of && !status)
        status = RSD_ENOMEM;
    if (!status)
        status = compile_exchange(peer, request, by_columns, &x);
    status = agree_on_facts(peer, status, x, request, &agreed, host_of);
    if (!status)
        status = peer_share_host(peer, host_of);
    mem_free(host_of);
    if (!status && by_columns != agreed.by_columns) { /* another rank packs by rows */
        exchange_backend.free(&x->exec);
        x = NULL;
        prepared = compile_exchange(peer, request, false, &x);
    }
    if (x) {
        x->chunk = (uint64_t)agreed.chunk;
        x->terms_align = agreed.terms_align != 0;
    }
    if (!status)
        status = connect_ranks(peer, prepared, x, request);
    if (!status)
        *exchange = x;
    else if (x)
        exchange_backend.free(&x->exec);
    return status;
}

rsd_status rsd_bind_transport(int64_t nplans, const rsd_plan *const *plans,
                              const rsd_bind_options *bind, const rsd_transport *given,
                              const rsd_exchange_options *given_options, rsd_exec **exec)
{
    rsd_transport transport;
    rsd_exchange_options options;
    struct peer *peer;
    TRY(peer_check_transport(given,
                             &transport)); /* without a transport, no other rank can be notified */
    rsd_status status =
        options_copy("rsd_exchange_options", given_options, &options, sizeof options);
    if (!status && nplans < 0)
        status = fail(RSD_EINVAL, "invalid number of plans %lld", (long long)nplans);
    TRY(peer_open(&transport, status ? 0 : options.timeout, TAG_DATA, &peer));
    struct exchange *x = NULL;
    struct bind_request request = {
        .nplans = nplans, .plans = plans, .bind = bind, .options = &options};
    status = exchange_bind(peer, status, &request, &x);
    if (status || !x) { /* the caller keeps the transport */
        peer_close(peer);
        return status;
    }
    x->owns_peer = true;
    x->transport = transport;
    *exec = &x->exec;
    return RSD_OK;
}
