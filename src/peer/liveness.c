/* liveness.c - finds ranks that are late or dead.
 *
 * A rank that waits checks whether the processes of its host exist. When nothing has moved for half of the time-out,
 * it starts a liveness check: it sends the number of its current call to every other rank, and receives theirs. When
 * the time-out is over, a rank that has not sent its number is late. A rank that finds a process of its host dead
 * reports it to the ranks of other hosts in the same way.
 */
#include "peer_state.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static const double check_seconds = 0.1; /* or a tenth of a shorter time-out */

struct liveness_check {
    struct alive {
        uint64_t call; /* that it is in */
        int64_t dead;  /* a rank that it knows to be dead; -1: none */
    } own, news, *received;
    struct peer_request *sends, *recvs;
    bool *entered; /* in this call, or a later one */
    bool *waiting; /* in this call, or in the one before it */
    int32_t dead, reporter;
};

/* ---- liveness checks ---- */

/* A rank that cannot be reached counts as unresponsive. */
static void receive_alive(struct peer *peer, int32_t rank)
{
    struct liveness_check *check = peer->liveness_check;
    (void)peer_recv(peer, rank, TAG_ALIVE, &check->received[rank], sizeof *check->received,
                    &check->recvs[rank]);
}

/* `alive` must stay until the message is sent or cancelled. */
static void send_alive(struct peer *peer, int32_t rank, const struct alive *alive)
{
    (void)peer_send(peer, rank, TAG_ALIVE, alive, sizeof *alive,
                    &peer->liveness_check->sends[rank]);
}

static void free_liveness_check(struct liveness_check *check)
{
    mem_free(check->received);
    mem_free(check->sends);
    mem_free(check->entered);
    mem_free(check);
}

/* Returns a check without messages. NULL: no memory. */
static struct liveness_check *new_liveness_check(size_t nranks)
{
    struct liveness_check *check = mem_new(1, sizeof *check);
    if (!check)
        return NULL;
    check->received = mem_new(nranks, sizeof *check->received);
    check->sends = mem_new(2 * nranks, sizeof *check->sends);
    check->entered = mem_new(2 * nranks, sizeof *check->entered);
    if (!check->received || !check->sends || !check->entered) {
        free_liveness_check(check);
        return NULL;
    }
    check->recvs = check->sends + nranks;
    check->waiting = check->entered + nranks;
    check->dead = -1;
    return check;
}

/* Without memory no check is started. The time-out then names a rank that this rank waits for. */
static void start_liveness_check(struct peer *peer, int32_t dead)
{
    if (peer->liveness_check || peer->transport.nranks == 1)
        return;
    struct liveness_check *check = peer->liveness_check =
        new_liveness_check((size_t)peer->transport.nranks);
    if (!check)
        return;
    check->own = (struct alive){peer->call, dead};
    for (int32_t i = 0; i < peer->transport.nranks; i++) {
        if (i == peer->transport.rank)
            continue;
        receive_alive(peer, i);
        send_alive(peer, i, &check->own);
    }
}

/* A rank enters a call only when all have entered the previous one. So smaller numbers are left over and ignored. */
static void note_alive(struct peer *peer, int32_t rank)
{
    struct liveness_check *check = peer->liveness_check;
    struct alive alive = check->received[rank];
    if (alive.call >= peer->call)
        check->entered[rank] = true;
    if (alive.call + 1 >= peer->call)
        check->waiting[rank] = true;
    if (alive.call >= peer->call && alive.dead >= 0 && alive.dead < peer->transport.nranks) {
        check->dead = (int32_t)alive.dead;
        check->reporter = rank;
    }
}

/* EPEER: another rank reports a dead one. */
static rsd_status poll_liveness_check(struct peer *peer)
{
    struct liveness_check *check = peer->liveness_check;
    for (int32_t i = 0; check && i < peer->transport.nranks; i++) {
        bool sent = false, received = false;
        peer_test(peer, &check->sends[i], &sent);
        peer_test(peer, &check->recvs[i], &received);
        if (!received)
            continue;
        note_alive(peer, i);
        receive_alive(peer, i); /* it may report a dead rank later */
    }
    return check && check->dead >= 0 ? fail(RSD_EPEER, "rank %d terminated (reported by rank %d)",
                                            (int)check->dead, (int)check->reporter)
                                     : RSD_OK;
}

/* Reports a dead rank to ranks of other hosts, which cannot detect it. A check that starts here includes the report.
 * So the pointer is read before: only an older check needs a second message. */
static void report_dead(struct peer *peer, int32_t dead)
{
    struct liveness_check *check = peer->liveness_check;
    if (host_has_all(peer))
        return;
    start_liveness_check(peer, dead);
    poll_liveness_check(peer);
    if (check)
        check->news = (struct alive){peer->call, dead};
    for (int32_t i = 0; check && i < peer->transport.nranks; i++)
        if (i != peer->transport.rank && !check->sends[i].active)
            send_alive(peer, i, &check->news);
    poll_liveness_check(peer);
}

/* Cancels the messages of the current check, if there is one. */
static void end_liveness_check(struct peer *peer)
{
    struct liveness_check *check = peer->liveness_check;
    bool unused = true;
    for (int32_t i = 0; check && i < peer->transport.nranks; i++) {
        bool received = peer_cancel(peer, &check->recvs[i]),
             sent = peer_cancel(peer, &check->sends[i]);
        unused = unused && received && sent;
    }
    peer->liveness_check = NULL;
    if (check && unused) /* else the transport may still use its memory */
        free_liveness_check(check);
}

/* ---- late ranks ---- */

/* Whether a rank has entered the current call, as far as this rank can know. */
static bool has_entered(const struct peer *peer, int32_t rank)
{
    int32_t index = peer_host_index(peer, rank);
    if (index >= 0)
        return host_has_entered(peer, index);
    return !peer->liveness_check || peer->liveness_check->entered[rank];
}

/* Whether a rank waits neither in this call nor in the previous one. Then the other ranks wait for it. */
static bool is_unresponsive(const struct peer *peer, int32_t rank)
{
    return peer->liveness_check && !peer->liveness_check->waiting[rank];
}

/* Whether this rank needs something of another one to continue: a message, or its entry into a vote. */
static bool is_waited_for(const struct peer *peer, int32_t rank, peer_waits_for *waits_for,
                          void *context)
{
    char what[ERROR_TEXT_NCHARS];
    if (waits_for && !peer->voting)
        return waits_for(context, rank, what, sizeof what);
    return !host_has_all(peer) || !has_entered(peer, rank);
}

/* Returns ETIMEOUT. The error names the rank, its problem, and the tensor that this rank waits for. */
static rsd_status fail_late_rank(const struct peer *peer, int32_t rank, const char *problem,
                                 peer_waits_for *waits_for, void *context)
{
    char what[ERROR_TEXT_NCHARS] = "";
    bool known = waits_for && waits_for(context, rank, what, sizeof what);
    return fail(RSD_ETIMEOUT, "timed out after %g s: rank %d %s%s%s%s", peer->timeout, (int)rank,
                problem, known ? " (" : "", what, known ? ")" : "");
}

/* Searches unresponsive ranks first, then the others; in both cases, ranks that have not entered the call first. The
 * search starts with the rank that the current round waits for. */
static rsd_status find_late(const struct peer *peer, peer_waits_for *waits_for, void *context)
{
    int32_t n = peer->transport.nranks, first = round_source(peer);
    for (int level = 0; level < 4; level++)
        for (int32_t k = 0; k < n; k++) {
            int32_t rank = (first + k) % n;
            bool unresponsive = level < 2, absent = level % 2 == 0;
            if (rank == peer->transport.rank || (unresponsive && !is_unresponsive(peer, rank)))
                continue;
            if (absent && !has_entered(peer, rank))
                return fail_late_rank(peer, rank, "has not entered the call", waits_for, context);
            if (!absent && (peer->voting || is_waited_for(peer, rank, waits_for, context)))
                return fail_late_rank(peer, rank, "stopped responding", waits_for, context);
        }
    return fail(RSD_ETIMEOUT, "timed out after %g s", peer->timeout);
}

/* ---- dead ranks ---- */

/* A process counts as dead if two checks in a row do not find it: its last messages are received in between. A rank
 * that nothing is expected from may end. */
static rsd_status find_dead(struct peer *peer, peer_waits_for *waits_for, void *context)
{
    int32_t dead = -1, pid = 0;
    for (int32_t i = 0; i < peer_host_nranks(peer) && dead < 0; i++) {
        int32_t rank = peer_host_rank(peer, i);
        pid = host_pid(peer, i);
        if (rank != peer->transport.rank && is_waited_for(peer, rank, waits_for, context) &&
            kill(pid, 0) && errno == ESRCH)
            dead = rank;
    }
    bool again = dead >= 0 && dead == peer->suspect;
    peer->suspect = dead;
    if (!again)
        return RSD_OK;
    report_dead(peer, dead);
    return fail(RSD_EPEER, "rank %d (pid %d) terminated", (int)dead, (int)pid);
}

/* ---- waiting ---- */

void peer_wait_start(struct peer *peer)
{
    peer->since = peer->checked = seconds_now();
    peer->suspect = -1;
}

void peer_moved(struct peer *peer)
{
    peer->since = seconds_now();
}

void peer_wait_end(struct peer *peer)
{
    end_liveness_check(peer);
}

rsd_status peer_idle(struct peer *peer, peer_waits_for *waits_for, void *context)
{
    double now = seconds_now(), waited = now - peer->since;
    if (now - peer->checked > check_seconds || now - peer->checked > peer->timeout / 10) {
        peer->checked = now;
        TRY(find_dead(peer, waits_for, context));
        if (waited > peer->timeout / 2)
            start_liveness_check(peer, -1);
        TRY(poll_liveness_check(peer));
    }
    if (waited > peer->timeout) {
        TRY(poll_liveness_check(peer));
        return find_late(peer, waits_for, context);
    }
    sched_yield();
    return RSD_OK;
}
