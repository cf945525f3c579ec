/* agree.c - steps that all ranks take together, and end with one status.
 *
 *     rank 0   work ...... finished | hears all  merges  tells all |
 *     rank 1   work .. finished     | says                    hears|
 *     rank 2   work ......... finished says                   hears|
 *
 * Rank 0 hears everybody and everybody hears rank 0. The work is done by a thread of its own, while the
 * calling thread talks: a rank that is at work says so again and again, so one that is slow is told from
 * one that is dead. Who fails or is cancelled says so at once, and the others stop.
 *
 * Invariant: messages of one pair are a sequence that both sides know (beats, a last beat, its words), so a
 * step that ended in any agreed status leaves nothing behind in the transport.
 */
#include "peer.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { UP_TAG = 60, UP_WORDS_TAG = 61, DOWN_TAG = 62, DOWN_WORDS_TAG = 63, CHUNK = 1 << 24 };
enum { MESSAGE_NCHARS = 1024 };
static const double beat_seconds = 0.2, tell_seconds = 0.05;
static const double farewell_seconds = 2; /* for telling that somebody is lost */

enum beat_kind {
    BEAT_WORKING,  /* up: I am here. Down: so am I */
    BEAT_FINISHED, /* up: my work is done */
    BEAT_FAILED,   /* up: it failed, everyone may stop */
    BEAT_CLOSE,    /* down: stop or be done, and say your last */
    BEAT_LAST      /* the words follow */
};

struct beat {
    int64_t kind, status, stopped; /* stopped: it failed only because others did */
    int64_t nbytes_done, nbytes_total;
    uint64_t nwords;
};

/* One message on its way, in chunks. */
struct post {
    char *data;
    size_t nbytes, at, some;
    void *request;
    bool moving;
};

/* What is known of the rank at the other end. */
struct other {
    int32_t rank;
    struct beat result, told; /* being received, being sent */
    struct post in, out, in_words, out_words;
    struct payload payload; /* the words of the last beat */
    int64_t kind, status, stopped, nbytes_done, nbytes_total;
    double heard_at, told_at;
    bool telling, tell_words, last_told, complete; /* complete: all it had to say is heard */
};

/* This rank in a step. */
struct taking {
    const rsd_transport *t;
    double timeout;
    struct peer_step *step;
    pthread_t thread;
    bool threaded, joined, cancelled;
    _Atomic bool finished;
    rsd_status worked, status; /* what the thread returned, and what that means */
    char message[MESSAGE_NCHARS];
    struct other *peers; /* of rank 0: all others; of others: rank 0 */
    int32_t npeers;
    bool closing;
    double progress_at;
    int64_t all_done, all_total; /* of the peers of rank 0 */
};

/* ---- words ---- */

rsd_status payload_put(struct payload *payload, const void *bytes, size_t n)
{
    if (n == 0)
        return RSD_OK;
    TRY(GROW(payload->bytes, payload->capacity, payload->n + n));
    memcpy(payload->bytes + payload->n, bytes, n);
    payload->n += n;
    return RSD_OK;
}

rsd_status payload_take(const struct payload *payload, size_t *at, void *out, size_t n)
{
    if (n > payload->n - *at)
        return fail(RSD_EPEER, "a rank said %zu bytes, and more were expected", payload->n);
    if (n > 0)
        memcpy(out, payload->bytes + *at, n);
    *at += n;
    return RSD_OK;
}

void payload_drop(struct payload *payload)
{
    mem_free(payload->bytes);
    *payload = (struct payload){0};
}

/* ---- one message ---- */

/* True when all of it has gone, or come. */
static rsd_status push_post(const rsd_transport *t, struct post *post, int32_t peer, int32_t tag,
                            bool sending, bool *moved, bool *done)
{
    int32_t tested = 0;
    rsd_status status = RSD_OK;
    *done = post->at == post->nbytes;
    if (*done)
        return RSD_OK;
    if (!post->moving) {
        size_t left = post->nbytes - post->at;
        post->some = left < CHUNK ? left : CHUNK;
        status =
            sending
                ? t->send(t->context, peer, tag, post->data + post->at, post->some, &post->request)
                : t->recv(t->context, peer, tag, post->data + post->at, post->some, &post->request);
        post->moving = !status;
    } else {
        status = t->test(t->context, post->request, &tested);
        if (status || tested)
            post->moving = false;
        *moved = *moved || tested;
        post->at += tested && !status ? post->some : 0;
        *done = post->at == post->nbytes;
    }
    if (status)
        return fail(RSD_EPEER, "the transport failed at rank %d, with %s", (int)peer,
                    rsd_status_name(status));
    return RSD_OK;
}

static void drop_post(const rsd_transport *t, struct post *post)
{
    if (post->moving)
        t->cancel(t->context, post->request);
    post->moving = false;
}

/* ---- the work ---- */

static void *work_in_thread(void *context)
{
    struct taking *taking = context;
    taking->worked = taking->step->work(taking->step->context);
    if (taking->worked)
        memcpy(taking->message, rsd_error(), strnlen(rsd_error(), MESSAGE_NCHARS - 1) + 1);
    atomic_store(&taking->finished, true);
    return NULL;
}

static void start_work(struct taking *taking)
{
    if (!taking->step->work) {
        taking->joined = true;
        taking->status = taking->step->already;
        snprintf(taking->message, sizeof taking->message, "%s", rsd_error());
        return;
    }
    taking->threaded = pthread_create(&taking->thread, NULL, work_in_thread, taking) == 0;
    if (!taking->threaded) /* then without talking meanwhile */
        work_in_thread(taking);
}

static void join_work(struct taking *taking)
{
    if (taking->joined)
        return;
    if (taking->threaded)
        pthread_join(taking->thread, NULL);
    taking->joined = true;
    taking->status = taking->worked;
}

/* Also what was done before it could be stopped is stopped. */
static void note_cancelled(struct taking *taking)
{
    if (!taking->cancelled || !taking->joined || taking->status)
        return;
    taking->status = RSD_ECANCELLED;
    snprintf(taking->message, sizeof taking->message, "stopped after %lld of %lld bytes",
             (long long)atomic_load(&taking->step->nbytes_done),
             (long long)atomic_load(&taking->step->nbytes_total));
}

/* Whether it failed by itself, and not because it was told to stop. */
static bool is_stopped(const struct taking *taking)
{
    return taking->status == RSD_ECANCELLED && !taking->cancelled && taking->closing;
}

static int64_t own_kind(const struct taking *taking)
{
    if (!taking->joined)
        return BEAT_WORKING;
    return taking->status && !is_stopped(taking) ? BEAT_FAILED : BEAT_FINISHED;
}

/* What the caller wants to hear, at most so often. */
static void tell_caller(struct taking *taking, double now, bool finally)
{
    struct peer_step *step = taking->step;
    if (!step->on_progress || taking->cancelled || taking->closing)
        return;
    if (!finally && now - taking->progress_at < tell_seconds)
        return;
    taking->progress_at = now;
    rsd_progress progress = {.struct_nbytes = sizeof progress};
    progress.nbytes_done = atomic_load(&step->nbytes_done);
    progress.nbytes_total = atomic_load(&step->nbytes_total);
    if (taking->t->rank > 0) { /* what rank 0 added up, which is older */
        progress.nbytes_done = max_i64(progress.nbytes_done, taking->peers[0].nbytes_done);
        progress.nbytes_total = max_i64(progress.nbytes_total, taking->peers[0].nbytes_total);
    } else {
        for (int32_t i = 0; i < taking->npeers; i++) {
            progress.nbytes_done += taking->peers[i].nbytes_done;
            progress.nbytes_total += taking->peers[i].nbytes_total;
        }
    }
    if (step->on_progress(step->progress_context, &progress)) {
        taking->cancelled = true;
        atomic_store(&step->stop, true);
        note_cancelled(taking);
    }
}

static void look_at_work(struct taking *taking, double now)
{
    if (!taking->joined && atomic_load(&taking->finished)) {
        join_work(taking);
        note_cancelled(taking);
        if (!taking->status)
            tell_caller(taking, now, true);
        for (int32_t i = 0; i < taking->npeers; i++)
            taking->peers[i].told_at = 0; /* at once */
    }
    int64_t before = own_kind(taking);
    tell_caller(taking, now, false);
    for (int32_t i = 0; i < taking->npeers && own_kind(taking) != before; i++)
        taking->peers[i].told_at = 0;
}

/* ---- talking to one peer ---- */

static void tell(struct taking *taking, struct other *peer, int64_t kind, double now)
{
    const struct peer_step *step = taking->step;
    peer->told = (struct beat){.kind = kind,
                               .status = taking->status,
                               .stopped = is_stopped(taking),
                               .nbytes_done = atomic_load(&step->nbytes_done),
                               .nbytes_total = atomic_load(&step->nbytes_total),
                               .nwords = peer->out_words.nbytes};
    if (taking->t->rank == 0) {
        peer->told.nbytes_done += taking->all_done;
        peer->told.nbytes_total += taking->all_total;
    }
    peer->out = (struct post){.data = (char *)&peer->told, .nbytes = sizeof peer->told};
    peer->telling = true;
    peer->told_at = now;
    peer->last_told = kind == BEAT_LAST;
}

static rsd_status push_out(struct taking *taking, struct other *peer, bool *moved)
{
    bool done, up = taking->t->rank > 0;
    if (peer->telling) {
        TRY(push_post(taking->t, &peer->out, peer->rank, up ? UP_TAG : DOWN_TAG, true, moved,
                      &done));
        peer->telling = !done;
        peer->tell_words = done && peer->last_told;
    }
    if (!peer->tell_words)
        return RSD_OK;
    TRY(push_post(taking->t, &peer->out_words, peer->rank, up ? UP_WORDS_TAG : DOWN_WORDS_TAG, true,
                  moved, &done));
    peer->tell_words = !done;
    return RSD_OK;
}

static rsd_status take_beat(struct other *peer)
{
    const struct beat *result = &peer->result;
    peer->kind = result->kind;
    peer->status = result->status;
    peer->stopped = result->stopped;
    peer->nbytes_done = result->nbytes_done;
    peer->nbytes_total = result->nbytes_total;
    if (result->kind != BEAT_LAST)
        return RSD_OK;
    if (result->nwords > (uint64_t)1 << 40)
        return fail(RSD_EPEER, "rank %d says %llu bytes", (int)peer->rank,
                    (unsigned long long)result->nwords);
    peer->payload = (struct payload){0};
    TRY(GROW(peer->payload.bytes, peer->payload.capacity, (size_t)result->nwords + 1));
    peer->payload.n = (size_t)result->nwords;
    peer->in_words = (struct post){.data = peer->payload.bytes, .nbytes = peer->payload.n};
    return RSD_OK;
}

static rsd_status push_in(struct taking *taking, struct other *peer, double now, bool *moved)
{
    bool done, up = taking->t->rank > 0;
    if (peer->complete)
        return RSD_OK;
    if (peer->kind == BEAT_LAST) {
        TRY(push_post(taking->t, &peer->in_words, peer->rank, up ? DOWN_WORDS_TAG : UP_WORDS_TAG,
                      false, moved, &peer->complete));
        peer->heard_at = *moved ? now : peer->heard_at;
        return RSD_OK;
    }
    if (!peer->in.data)
        peer->in = (struct post){.data = (char *)&peer->result, .nbytes = sizeof peer->result};
    TRY(push_post(taking->t, &peer->in, peer->rank, up ? DOWN_TAG : UP_TAG, false, moved, &done));
    if (!done)
        return RSD_OK;
    peer->in = (struct post){0};
    peer->heard_at = now;
    return take_beat(peer);
}

static rsd_status late(const struct taking *taking, const struct other *peer)
{
    return fail(RSD_ETIMEOUT, "nothing was heard of rank %d for %g seconds", (int)peer->rank,
                taking->timeout);
}

/* Waits a little, longer and longer while nothing moves. */
static void nap(bool moved, int *idle)
{
    *idle = moved ? 0 : *idle + 1;
    if (*idle < 20) {
        sched_yield();
        return;
    }
    struct timespec pause = {.tv_nsec = *idle < 200 ? 50000 : 1000000};
    nanosleep(&pause, NULL);
}

static rsd_status talk(struct taking *taking, struct other *peer, int64_t kind, double now,
                       bool *moved)
{
    TRY(push_in(taking, peer, now, moved));
    bool busy = peer->telling || peer->tell_words || peer->last_told;
    if (!busy && now - peer->told_at >= beat_seconds)
        tell(taking, peer, kind, now);
    TRY(push_out(taking, peer, moved));
    return now - peer->heard_at > taking->timeout && !peer->complete ? late(taking, peer) : RSD_OK;
}

/* ---- all but rank 0 ---- */

static void say_last(struct taking *taking, struct other *lead, double now)
{
    const struct payload *own = &taking->step->own;
    lead->out_words = (struct post){0};
    if (!taking->status)
        lead->out_words = (struct post){.data = own->bytes, .nbytes = own->n};
    else if (!is_stopped(taking))
        lead->out_words = (struct post){.data = taking->message, .nbytes = strlen(taking->message)};
    tell(taking, lead, BEAT_LAST, now);
}

static rsd_status take_as_member(struct taking *taking)
{
    struct other *lead = &taking->peers[0];
    double ended = 0;
    for (int idle = 0; !lead->complete || lead->telling || lead->tell_words;) {
        bool moved = false;
        double now = seconds_now();
        look_at_work(taking, now);
        TRY(talk(taking, lead, own_kind(taking), now, &moved));
        if (lead->kind == BEAT_CLOSE || lead->kind == BEAT_LAST) {
            taking->closing = true;
            atomic_store(&taking->step->stop, true);
        }
        ended = lead->complete && ended == 0 ? now : ended;
        if (lead->complete && (!lead->last_told || now - ended > farewell_seconds))
            break; /* it went on without this rank */
        if (taking->closing && taking->joined && !lead->telling && !lead->last_told)
            say_last(taking, lead, now);
        nap(moved, &idle);
    }
    rsd_status status = (rsd_status)lead->status;
    if (status) /* the words are the message */
        return fail(status, "%.*s", (int)lead->payload.n, lead->payload.bytes);
    taking->step->result = lead->payload;
    lead->payload = (struct payload){0};
    return RSD_OK;
}

/* ---- rank 0 ---- */

static bool hear_all(struct taking *taking, int64_t *nfinished)
{
    bool complete = true;
    taking->all_done = taking->all_total = 0;
    *nfinished = own_kind(taking) == BEAT_FINISHED;
    if (own_kind(taking) == BEAT_FAILED)
        taking->closing = true;
    for (int32_t i = 0; i < taking->npeers; i++) {
        const struct other *peer = &taking->peers[i];
        taking->all_done += peer->nbytes_done;
        taking->all_total += peer->nbytes_total;
        *nfinished += peer->kind == BEAT_FINISHED;
        if (peer->kind == BEAT_FAILED)
            taking->closing = true;
        complete = complete && peer->complete;
    }
    return complete;
}

/* Goes on until every rank has said its last. */
static rsd_status hear_out(struct taking *taking)
{
    for (int idle = 0;;) {
        bool moved = false, before = taking->closing;
        double now = seconds_now();
        int64_t nfinished;
        look_at_work(taking, now);
        bool complete = hear_all(taking, &nfinished);
        taking->closing = taking->closing || nfinished == taking->t->nranks;
        if (taking->closing)
            atomic_store(&taking->step->stop, true);
        for (int32_t i = 0; i < taking->npeers; i++) {
            if (taking->closing && !before)
                taking->peers[i].told_at = 0;
            TRY(talk(taking, &taking->peers[i], taking->closing ? BEAT_CLOSE : BEAT_WORKING, now,
                     &moved));
            complete = complete && !taking->peers[i].telling;
        }
        if (complete && taking->joined)
            return RSD_OK;
        nap(moved, &idle);
    }
}

static bool same_message(const struct taking *taking, const struct other *peer)
{
    return peer->status == taking->status && peer->payload.n == strlen(taking->message) &&
           memcmp(peer->payload.bytes, taking->message, peer->payload.n) == 0;
}

/* The status of all: that of the first rank which failed by itself. Damage is that of a file, whoever read
 * it. */
static rsd_status judge(const struct taking *taking)
{
    bool all_same = true;
    for (int32_t i = 0; i < taking->npeers; i++)
        all_same = all_same && same_message(taking, &taking->peers[i]);
    if (taking->status && !is_stopped(taking)) {
        bool plain = all_same || taking->step->lead || taking->status == RSD_EFORMAT;
        return fail(taking->status, "%s%s", plain ? "" : "rank 0: ", taking->message);
    }
    for (int32_t i = 0; i < taking->npeers; i++) {
        const struct other *peer = &taking->peers[i];
        if (!peer->status || peer->stopped)
            continue;
        error_set("%.*s", (int)peer->payload.n, peer->payload.bytes);
        return peer->status == RSD_EFORMAT
                   ? RSD_EFORMAT
                   : fail_in((rsd_status)peer->status, "rank %d: ", (int)peer->rank);
    }
    return RSD_OK;
}

static rsd_status merge(struct taking *taking)
{
    struct peer_step *step = taking->step;
    struct payload *all = mem_new((size_t)taking->t->nranks, sizeof *all);
    if (!all)
        return RSD_ENOMEM;
    all[0] = step->own;
    for (int32_t i = 0; i < taking->npeers; i++)
        all[i + 1] = taking->peers[i].payload;
    rsd_status status = step->merge ? step->merge(step->context, all, &step->result) : RSD_OK;
    mem_free(all);
    return status;
}

/* Tells all how it ended. With `lost`, those that still listen, for a moment. */
static rsd_status tell_all(struct taking *taking, rsd_status status, bool lost)
{
    char message[MESSAGE_NCHARS];
    snprintf(message, sizeof message, "%s", rsd_error());
    struct post words = {.data = taking->step->result.bytes, .nbytes = taking->step->result.n};
    if (status)
        words = (struct post){.data = message, .nbytes = strlen(message)};
    taking->status = status;
    for (int32_t i = 0; i < taking->npeers; i++)
        taking->peers[i].out_words = words;
    double began = seconds_now(), limit = lost ? farewell_seconds : taking->timeout;
    for (int idle = 0, left = 1; left > 0;) {
        bool moved = false;
        double now = seconds_now();
        left = 0;
        for (int32_t i = 0; i < taking->npeers; i++) {
            struct other *peer = &taking->peers[i];
            if (!peer->telling && !peer->last_told)
                tell(taking, peer, BEAT_LAST, now);
            rsd_status pushed = push_out(taking, peer, &moved);
            if (pushed && !lost)
                return pushed;
            left += !pushed && (peer->telling || peer->tell_words);
        }
        if (left > 0 && now - began > limit)
            break;
        nap(moved, &idle);
    }
    return status ? fail(status, "%s", message) : RSD_OK;
}

static rsd_status take_as_lead(struct taking *taking)
{
    rsd_status status = hear_out(taking);
    if (status) {
        atomic_store(&taking->step->stop, true);
        return tell_all(taking, status, true);
    }
    status = judge(taking);
    if (!status)
        status = merge(taking);
    return tell_all(taking, status, false);
}

/* ---- all ---- */

static rsd_status open_peers(struct taking *taking)
{
    int32_t n = taking->t->rank == 0 ? taking->t->nranks - 1 : 1;
    taking->peers = mem_new((size_t)n, sizeof *taking->peers);
    if (!taking->peers)
        return RSD_ENOMEM;
    taking->npeers = n;
    for (int32_t i = 0; i < n; i++)
        taking->peers[i] = (struct other){.rank = taking->t->rank == 0 ? i + 1 : 0,
                                          .kind = BEAT_WORKING,
                                          .heard_at = seconds_now()};
    return RSD_OK;
}

static void close_peers(struct taking *taking)
{
    for (int32_t i = 0; i < taking->npeers; i++) {
        struct other *peer = &taking->peers[i];
        drop_post(taking->t, &peer->in);
        drop_post(taking->t, &peer->out);
        drop_post(taking->t, &peer->in_words);
        drop_post(taking->t, &peer->out_words);
        payload_drop(&peer->payload);
    }
    mem_free(taking->peers);
}

rsd_status peer_step(const rsd_transport *transport, double timeout, struct peer_step *step)
{
    struct taking taking = {
        .t = transport, .timeout = timeout > 0 ? timeout : DEFAULT_TIMEOUT, .step = step};
    TRY(open_peers(&taking));
    start_work(&taking);
    rsd_status status = transport->rank == 0 ? take_as_lead(&taking) : take_as_member(&taking);
    atomic_store(&step->stop, true);
    if (!taking.joined) { /* somebody is lost, and the work is in vain */
        char message[MESSAGE_NCHARS];
        snprintf(message, sizeof message, "%s", rsd_error());
        join_work(&taking);
        error_set("%s", message);
    }
    close_peers(&taking);
    return status;
}
