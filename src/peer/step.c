/* step.c - collective steps: all ranks work, and return the same status.
 *
 *     rank 0   work ...... finished | receives all  merges  sends the result |
 *     rank 1   work .. finished     | sends its payload             receives |
 *     rank 2   work ......... finished  sends its payload           receives |
 *
 * Rank 0 exchanges messages with every rank, the others with rank 0 only. The work runs in a separate thread, while
 * the calling thread sends heartbeats. So a slow rank is distinguished from a dead one. If a rank fails or is
 * cancelled, the others stop at once.
 *
 * Invariant: both sides of a pair know the sequence of its messages (heartbeats, the last heartbeat, its payload). So
 * a step that ends with an agreed status leaves nothing in the transport.
 */
#include "peer_state.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

enum { UP_TAG, UP_PAYLOAD_TAG, DOWN_TAG, DOWN_PAYLOAD_TAG, NTAGS }; /* up: to rank 0 */
_Static_assert((int)TAG_STEP + (int)NTAGS <= (int)TAG_END, "a transport has 64 tags");

enum { MESSAGE_NCHARS = 1024 };
static const double beat_seconds = 0.2, progress_seconds = 0.05;
static const double farewell_seconds = 2; /* time to notify the others that a rank is lost */

enum beat_kind {
    BEAT_WORKING,  /* the rank is alive */
    BEAT_FINISHED, /* up: its work is done */
    BEAT_FAILED,   /* up: its work failed, all may stop */
    BEAT_CLOSE,    /* down: stop or finish, and send the last heartbeat */
    BEAT_LAST      /* the payload follows */
};

struct heartbeat {
    int64_t kind, status, stopped; /* stopped: the work failed only because it was told to stop */
    int64_t nbytes_done, nbytes_total;
    uint64_t npayload;
};

/* Another rank that this rank exchanges messages with. */
struct member {
    int32_t rank;
    struct heartbeat in, out, latest; /* being received, being sent, and the last one received */
    struct peer_request in_request, out_request;
    struct chunked_payload in_payload, out_payload;
    struct payload payload; /* that followed its last heartbeat */
    double received_at, sent_at;
    bool last_started; /* sending the last heartbeat has started */
    bool complete;     /* everything that it sends was received */
};

/* The state of this rank in a step. It is allocated, since a transport may still use it after a failure. */
struct step_run {
    struct peer peer; /* for its transport, tags and time-out */
    struct peer_step *step;
    pthread_t thread;
    bool threaded, joined, cancelled;
    _Atomic bool finished;
    rsd_status returned, status; /* of the thread; of this rank, and at the end of all ranks */
    char message[MESSAGE_NCHARS], result_message[MESSAGE_NCHARS]; /* of the work; of all */
    bool closing;
    double progress_at;
    int64_t members_done, members_total; /* bytes */
    int32_t nmembers;
    struct member members[]; /* on rank 0 all others, else rank 0 */
};

/* ---- the work ---- */

static void *work_in_thread(void *context)
{
    struct step_run *run = context;
    run->returned = run->step->work(run->step->context);
    if (run->returned)
        snprintf(run->message, sizeof run->message, "%s", rsd_error());
    atomic_store(&run->finished, true);
    return NULL;
}

/* Starts the work in a thread, or takes its status if it is done already. */
static void start_work(struct step_run *run)
{
    if (!run->step->work) {
        run->joined = true;
        run->status = run->step->already;
        snprintf(run->message, sizeof run->message, "%s", rsd_error());
        return;
    }
    run->threaded = pthread_create(&run->thread, NULL, work_in_thread, run) == 0;
    if (!run->threaded) /* no thread could be started: the work runs without heartbeats */
        work_in_thread(run);
}

static void join_work(struct step_run *run)
{
    if (run->joined)
        return;
    if (run->threaded)
        pthread_join(run->thread, NULL);
    run->joined = true;
    run->status = run->returned;
}

/* Work that finished before it could be stopped counts as cancelled too. */
static void note_cancelled(struct step_run *run)
{
    if (!run->cancelled || !run->joined || run->status)
        return;
    run->status = RSD_ECANCELLED;
    snprintf(run->message, sizeof run->message, "stopped after %lld of %lld bytes",
             (long long)atomic_load(&run->step->nbytes_done),
             (long long)atomic_load(&run->step->nbytes_total));
}

/* Returns whether the work failed only because it was told to stop. */
static bool was_stopped(const struct step_run *run)
{
    return run->status == RSD_ECANCELLED && !run->cancelled && run->closing;
}

/* Returns the kind of the next heartbeat of this rank. */
static int64_t own_kind(const struct step_run *run)
{
    if (!run->joined)
        return BEAT_WORKING;
    return run->status && !was_stopped(run) ? BEAT_FAILED : BEAT_FINISHED;
}

/* Calls on_progress with the sums of all ranks, at most every progress_seconds unless `finally`. Cancels the step
 * if it returns non-zero. */
static void report_step_progress(struct step_run *run, double now, bool finally)
{
    struct peer_step *step = run->step;
    if (!step->on_progress || run->cancelled || run->closing)
        return;
    if (!finally && now - run->progress_at < progress_seconds)
        return;
    run->progress_at = now;
    rsd_progress progress = {.struct_nbytes = sizeof progress};
    progress.nbytes_done = atomic_load(&step->nbytes_done);
    progress.nbytes_total = atomic_load(&step->nbytes_total);
    if (run->peer.transport.rank > 0) { /* the sums of rank 0, which are older */
        const struct heartbeat *all = &run->members[0].latest;
        progress.nbytes_done = max_i64(progress.nbytes_done, all->nbytes_done);
        progress.nbytes_total = max_i64(progress.nbytes_total, all->nbytes_total);
    } else {
        for (int32_t i = 0; i < run->nmembers; i++) {
            progress.nbytes_done += run->members[i].latest.nbytes_done;
            progress.nbytes_total += run->members[i].latest.nbytes_total;
        }
    }
    if (step->on_progress(step->progress_context, &progress)) {
        run->cancelled = true;
        atomic_store(&step->stop, true);
        note_cancelled(run);
    }
}

/* Makes the next heartbeat to every member due at once. */
static void send_beats_now(struct step_run *run)
{
    for (int32_t i = 0; i < run->nmembers; i++)
        run->members[i].sent_at = 0;
}

/* Joins the thread when the work is finished, and reports progress. If the state of this rank changed, the next
 * heartbeat is sent at once. */
static void check_work(struct step_run *run, double now)
{
    if (!run->joined && atomic_load(&run->finished)) {
        join_work(run);
        note_cancelled(run);
        if (!run->status)
            report_step_progress(run, now, true);
        send_beats_now(run);
    }
    int64_t before = own_kind(run);
    report_step_progress(run, now, false);
    if (own_kind(run) != before)
        send_beats_now(run);
}

/* ---- messages with one member ---- */

/* Whether this rank is one of those that rank 0 collects. */
static bool is_member(const struct step_run *run)
{
    return run->peer.transport.rank > 0;
}

/* Starts to send a heartbeat. The payload follows the last one. */
static rsd_status send_beat(struct step_run *run, struct member *member, int64_t kind, double now)
{
    const struct peer_step *step = run->step;
    member->out = (struct heartbeat){.kind = kind,
                                     .status = run->status,
                                     .stopped = was_stopped(run),
                                     .nbytes_done = atomic_load(&step->nbytes_done),
                                     .nbytes_total = atomic_load(&step->nbytes_total),
                                     .npayload = member->out_payload.nbytes};
    if (!is_member(run)) {
        member->out.nbytes_done += run->members_done;
        member->out.nbytes_total += run->members_total;
    }
    member->sent_at = now;
    TRY(peer_send(&run->peer, member->rank, is_member(run) ? UP_TAG : DOWN_TAG, &member->out,
                  sizeof member->out, &member->out_request));
    member->last_started = kind == BEAT_LAST;
    return RSD_OK;
}

/* Whether a heartbeat or a part of the payload is not sent yet. */
static bool is_sending(const struct member *member)
{
    bool unsent = member->last_started && member->out_payload.done < member->out_payload.nbytes;
    return member->out_request.active || unsent;
}

/* Completes the heartbeat that is being sent. After the last one, sends the payload. */
static rsd_status progress_outgoing(struct step_run *run, struct member *member, bool *moved)
{
    TRY(peer_test(&run->peer, &member->out_request, moved));
    if (member->out_request.active || !member->last_started)
        return RSD_OK;
    int32_t tag = is_member(run) ? UP_PAYLOAD_TAG : DOWN_PAYLOAD_TAG;
    return payload_send_chunk(&run->peer, member->rank, tag, &member->out_payload, moved);
}

/* Checks a heartbeat that arrived. After the last one, prepares to receive the payload. Counts of all ranks can be
 * added. */
static rsd_status read_beat(const struct step_run *run, struct member *member)
{
    int64_t most = INT64_MAX / run->peer.transport.nranks;
    member->latest = member->in;
    member->latest.status = status_received(member->in.status);
    member->latest.nbytes_done = clamp_i64(member->in.nbytes_done, 0, most);
    member->latest.nbytes_total = clamp_i64(member->in.nbytes_total, 0, most);
    if (member->in.kind != BEAT_LAST)
        return RSD_OK;
    if (member->in.npayload > (uint64_t)1 << 40)
        return fail(RSD_EPEER, "rank %d announces %llu bytes; the limit is 2^40", (int)member->rank,
                    (unsigned long long)member->in.npayload);
    member->in_payload = (struct chunked_payload){.nbytes = (size_t)member->in.npayload};
    return RSD_OK;
}

/* Receives heartbeats and the payload of a member, without waiting. */
static rsd_status progress_incoming(struct step_run *run, struct member *member, double now,
                                    bool *moved)
{
    bool arrived = false;
    if (member->latest.kind == BEAT_LAST) {
        int32_t tag = is_member(run) ? DOWN_PAYLOAD_TAG : UP_PAYLOAD_TAG;
        TRY(payload_recv_chunk(&run->peer, member->rank, tag, &member->in_payload, &member->payload,
                               &arrived));
        member->complete = member->in_payload.done == member->in_payload.nbytes;
    } else if (!member->in_request.active) {
        TRY(peer_recv(&run->peer, member->rank, is_member(run) ? DOWN_TAG : UP_TAG, &member->in,
                      sizeof member->in, &member->in_request));
    } else {
        TRY(peer_test(&run->peer, &member->in_request, &arrived));
        if (arrived)
            TRY(read_beat(run, member));
    }
    if (arrived) {
        member->received_at = now;
        *moved = true;
    }
    return RSD_OK;
}

/* Turns a failure of the transport into EPEER, which names the member. */
static rsd_status fail_transport_in(rsd_status status, const struct member *member)
{
    return status ? fail_in(RSD_EPEER,
                            "transport failed with %s at rank %d: ", rsd_status_name(status),
                            (int)member->rank)
                  : RSD_OK;
}

/* Sends and receives what is due between this rank and a member. ETIMEOUT: no heartbeat arrived in time. */
static rsd_status serve_member(struct step_run *run, struct member *member, int64_t kind,
                               double now, bool *moved)
{
    rsd_status status = member->complete ? RSD_OK : progress_incoming(run, member, now, moved);
    bool busy = member->out_request.active || member->last_started;
    if (!status && !busy && now - member->sent_at >= beat_seconds)
        status = send_beat(run, member, kind, now);
    if (!status)
        status = progress_outgoing(run, member, moved);
    TRY(fail_transport_in(status, member));
    if (now - member->received_at <= run->peer.timeout || member->complete)
        return RSD_OK;
    return fail(RSD_ETIMEOUT, "timed out: no heartbeat from rank %d for %g s", (int)member->rank,
                run->peer.timeout);
}

/* Sleeps longer while nothing moves. */
static void pause_loop(bool moved, int *nidle)
{
    *nidle = moved ? 0 : *nidle + 1;
    if (*nidle < 20) {
        sched_yield();
        return;
    }
    struct timespec pause = {.tv_nsec = *nidle < 200 ? 50000 : 1000000};
    nanosleep(&pause, NULL);
}

/* Sets the message of a rank that failed, which is its payload. */
static rsd_status fail_as_member(rsd_status status, const struct member *member)
{
    size_t n = member->payload.n < MESSAGE_NCHARS ? member->payload.n : MESSAGE_NCHARS - 1;
    if (n == 0 || !member->payload.bytes[0])
        return fail(status, "no message");
    return fail(status, "%.*s", (int)n, member->payload.bytes);
}

/* ---- all ranks but 0 ---- */

/* Starts to send the last heartbeat of this rank; its payload, or the message of its failure, follows. */
static rsd_status send_last_beat(struct step_run *run, struct member *lead, double now)
{
    const struct payload *own = &run->step->own;
    if (!run->status)
        lead->out_payload = (struct chunked_payload){.data = own->bytes, .nbytes = own->n};
    else if (!was_stopped(run))
        lead->out_payload =
            (struct chunked_payload){.data = run->message, .nbytes = strlen(run->message)};
    return fail_transport_in(send_beat(run, lead, BEAT_LAST, now), lead);
}

/* Runs the step on a rank other than 0, until rank 0 has sent the result. */
static rsd_status run_as_member(struct step_run *run)
{
    struct member *lead = &run->members[0];
    double ended = 0;
    for (int nidle = 0; !lead->complete || is_sending(lead);) {
        bool moved = false;
        double now = seconds_now();
        check_work(run, now);
        TRY(serve_member(run, lead, own_kind(run), now, &moved));
        if (lead->latest.kind == BEAT_CLOSE || lead->latest.kind == BEAT_LAST) {
            run->closing = true;
            atomic_store(&run->step->stop, true);
        }
        ended = lead->complete && ended == 0 ? now : ended;
        if (lead->complete && (!lead->last_started || now - ended > farewell_seconds))
            break; /* rank 0 continued without this rank */
        if (run->closing && run->joined && !lead->out_request.active && !lead->last_started)
            TRY(send_last_beat(run, lead, now));
        pause_loop(moved, &nidle);
    }
    rsd_status status = (rsd_status)lead->latest.status;
    if (status)
        return fail_as_member(status, lead);
    if (!lead->last_started || run->status)
        return fail(RSD_EPEER, "rank 0 ended the step before rank %d",
                    (int)run->peer.transport.rank);
    run->step->result = lead->payload;
    lead->payload = (struct payload){0};
    return RSD_OK;
}

/* ---- rank 0 ---- */

/* Returns whether all members are complete. */
static bool count_members(struct step_run *run, int64_t *nfinished)
{
    bool complete = true;
    run->members_done = run->members_total = 0;
    *nfinished = own_kind(run) == BEAT_FINISHED;
    if (own_kind(run) == BEAT_FAILED)
        run->closing = true;
    for (int32_t i = 0; i < run->nmembers; i++) {
        const struct member *member = &run->members[i];
        run->members_done += member->latest.nbytes_done;
        run->members_total += member->latest.nbytes_total;
        *nfinished += member->latest.kind == BEAT_FINISHED || member->latest.kind == BEAT_LAST;
        if (member->latest.kind == BEAT_FAILED)
            run->closing = true;
        complete = complete && member->complete;
    }
    return complete;
}

/* Waits until every rank has sent its last heartbeat and its payload. */
static rsd_status collect_members(struct step_run *run)
{
    for (int nidle = 0;;) {
        bool moved = false, before = run->closing;
        double now = seconds_now();
        int64_t nfinished;
        check_work(run, now);
        bool complete = count_members(run, &nfinished);
        run->closing = run->closing || nfinished == run->peer.transport.nranks;
        if (run->closing)
            atomic_store(&run->step->stop, true);
        if (run->closing && !before)
            send_beats_now(run);
        for (int32_t i = 0; i < run->nmembers; i++) {
            TRY(serve_member(run, &run->members[i], run->closing ? BEAT_CLOSE : BEAT_WORKING, now,
                             &moved));
            complete = complete && !run->members[i].out_request.active;
        }
        if (complete && run->joined)
            return RSD_OK;
        pause_loop(moved, &nidle);
    }
}

/* Whether a member failed with the status and the message of rank 0. */
static bool same_failure(const struct step_run *run, const struct member *member)
{
    return member->latest.status == run->status && member->payload.n == strlen(run->message) &&
           memcmp(member->payload.bytes, run->message, member->payload.n) == 0;
}

/* Returns the status of the step: that of the first rank that failed by itself. EFORMAT is about a file, which any
 * rank may have read, so the error does not name the rank. */
static rsd_status find_failure(const struct step_run *run)
{
    bool all_same = true;
    int32_t stopped = run->status ? 0 : -1;
    for (int32_t i = 0; i < run->nmembers; i++)
        all_same = all_same && same_failure(run, &run->members[i]);
    if (run->status && !was_stopped(run)) {
        bool plain = all_same || run->step->lead || run->status == RSD_EFORMAT;
        return fail(run->status, "%s%s", plain ? "" : "rank 0: ", run->message);
    }
    for (int32_t i = 0; i < run->nmembers; i++) {
        const struct member *member = &run->members[i];
        rsd_status status = (rsd_status)member->latest.status;
        if (status && member->latest.stopped)
            stopped = member->rank;
        if (!status || member->latest.stopped)
            continue;
        fail_as_member(status, member);
        return status == RSD_EFORMAT ? status : fail_in(status, "rank %d: ", (int)member->rank);
    }
    if (stopped >= 0)
        return fail(RSD_EPEER, "rank %d was stopped, but no rank failed", (int)stopped);
    return RSD_OK;
}

/* Merges the payloads of all ranks into the result, on rank 0. */
static rsd_status merge_payloads(struct step_run *run)
{
    struct peer_step *step = run->step;
    struct payload *all = mem_new((size_t)run->peer.transport.nranks, sizeof *all);
    if (!all)
        return RSD_ENOMEM;
    all[0] = step->own;
    for (int32_t i = 0; i < run->nmembers; i++)
        all[i + 1] = run->members[i].payload;
    rsd_status status = step->merge ? step->merge(step->context, all, &step->result) : RSD_OK;
    mem_free(all);
    return status;
}

/* Sends the result to all ranks. If a rank is lost, waits only farewell_seconds for the others. */
static rsd_status send_result(struct step_run *run, rsd_status status, bool lost)
{
    struct chunked_payload payload = {.data = run->step->result.bytes,
                                      .nbytes = run->step->result.n};
    snprintf(run->result_message, sizeof run->result_message, "%s", rsd_error());
    if (status)
        payload = (struct chunked_payload){.data = run->result_message,
                                           .nbytes = strlen(run->result_message)};
    run->status = status;
    for (int32_t i = 0; i < run->nmembers; i++)
        run->members[i].out_payload = payload;
    double began = seconds_now(), limit = lost ? farewell_seconds : run->peer.timeout;
    for (int nidle = 0, left = 1; left > 0;) {
        bool moved = false;
        double now = seconds_now();
        left = 0;
        for (int32_t i = 0; i < run->nmembers; i++) {
            struct member *member = &run->members[i];
            rsd_status pushed = RSD_OK;
            if (!member->out_request.active && !member->last_started)
                pushed = send_beat(run, member, BEAT_LAST, now);
            if (!pushed)
                pushed = progress_outgoing(run, member, &moved);
            if (pushed && !lost)
                return fail_transport_in(pushed, member);
            left += !pushed && (!member->last_started || is_sending(member));
        }
        if (left > 0 && now - began > limit)
            break;
        pause_loop(moved, &nidle);
    }
    return status ? fail(status, "%s", run->result_message) : RSD_OK;
}

/* Runs the step on rank 0: collects all ranks, merges, and sends the result. */
static rsd_status run_as_lead(struct step_run *run)
{
    rsd_status status = collect_members(run);
    if (status) {
        atomic_store(&run->step->stop, true);
        return send_result(run, status, true);
    }
    status = find_failure(run);
    if (!status)
        status = merge_payloads(run);
    return send_result(run, status, false);
}

/* ---- all ranks ---- */

/* Creates the state of a step. Rank 0 has all others as members, the others rank 0. */
static rsd_status open_run(const rsd_transport *transport, double timeout, struct peer_step *step,
                           struct step_run **run)
{
    int32_t n = transport->rank == 0 ? transport->nranks - 1 : 1;
    struct step_run *made = mem_new(1, sizeof *made + (size_t)n * sizeof *made->members);
    if (!made)
        return RSD_ENOMEM;
    made->peer = (struct peer){.transport = *transport,
                               .timeout = timeout > 0 ? timeout : DEFAULT_TIMEOUT,
                               .first_tag = TAG_STEP};
    made->step = step;
    made->nmembers = n;
    for (int32_t i = 0; i < n; i++) {
        made->members[i].rank = transport->rank == 0 ? i + 1 : 0;
        made->members[i].received_at = seconds_now();
    }
    *run = made;
    return RSD_OK;
}

/* Memory that the transport may still use is never freed, not even a payload, which the caller would drop. */
static void close_run(struct step_run *run)
{
    bool unused = true, payloads_unused = true;
    for (int32_t i = 0; i < run->nmembers; i++) {
        struct member *member = &run->members[i];
        bool in = peer_cancel(&run->peer, &member->in_request),
             out = peer_cancel(&run->peer, &member->out_request),
             in_payload = peer_cancel(&run->peer, &member->in_payload.request),
             out_payload = peer_cancel(&run->peer, &member->out_payload.request);
        if (in_payload)
            payload_drop(&member->payload);
        payloads_unused = payloads_unused && out_payload;
        unused = unused && in && out && in_payload && out_payload;
    }
    if (!payloads_unused) {
        const struct payload sent = run->step->result;
        run->step->own = run->step->result = (struct payload){0};
        payload_put(&run->step->result, sent.bytes, sent.n); /* rank 0 may have succeeded */
    }
    if (unused)
        mem_free(run);
}

static rsd_status step_alone(struct peer_step *step)
{
    TRY(step->work ? step->work(step->context) : step->already);
    return step->merge ? step->merge(step->context, &step->own, &step->result) : RSD_OK;
}

rsd_status peer_step(const rsd_transport *transport, double timeout, struct peer_step *step)
{
    struct step_run *run;
    if (transport->nranks == 1)
        return step_alone(step);
    TRY(open_run(transport, timeout, step, &run));
    start_work(run);
    rsd_status status = transport->rank == 0 ? run_as_lead(run) : run_as_member(run);
    atomic_store(&step->stop, true);
    if (!run->joined) { /* a rank is lost, so the work is useless */
        char message[MESSAGE_NCHARS];
        snprintf(message, sizeof message, "%s", rsd_error());
        join_work(run);
        error_set("%s", message);
    }
    close_run(run);
    return status;
}
