/* liveness.c - which rank is late, and which is dead.
 *
 * A rank that waits looks for the processes of its host. When nothing has moved for half of the time-out, it sends
 * every other rank the number of the call that it is in (a roll call), and receives theirs: a rank that has not
 * sent its own when the time is over is the one that the others wait for. A rank that finds a process of its host
 * dead tells the ranks of other hosts in the same way.
 */
#include "peer_state.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static const double check_seconds = 0.1; /* or a tenth of a shorter time-out */

struct roll_call {
    struct alive {
        uint64_t call; /* that it is in */
        int64_t dead;  /* a rank that it knows to be dead; -1: none */
    } own, news, *received;
    struct peer_request *sends, *recvs;
    bool *entered; /* in this call, or a later one */
    bool *waiting; /* in this call, or in the one before it */
    int32_t dead, reporter;
};

/* ---- roll calls ---- */

/* A rank that cannot be reached counts as unresponsive. */
static void receive_alive(struct peer *peer, int32_t rank)
{
    struct roll_call *roll = peer->roll_call;
    (void)peer_recv(peer, rank, TAG_ALIVE, &roll->received[rank], sizeof *roll->received,
                    &roll->recvs[rank]);
}

static void send_alive(struct peer *peer, int32_t rank, const struct alive *alive)
{
    (void)peer_send(peer, rank, TAG_ALIVE, alive, sizeof *alive, &peer->roll_call->sends[rank]);
}

static void free_roll_call(struct roll_call *roll)
{
    mem_free(roll->received);
    mem_free(roll->sends);
    mem_free(roll->entered);
    mem_free(roll);
}

static struct roll_call *new_roll_call(size_t nranks)
{
    struct roll_call *roll = mem_new(1, sizeof *roll);
    if (!roll)
        return NULL;
    roll->received = mem_new(nranks, sizeof *roll->received);
    roll->sends = mem_new(2 * nranks, sizeof *roll->sends);
    roll->entered = mem_new(2 * nranks, sizeof *roll->entered);
    if (!roll->received || !roll->sends || !roll->entered) {
        free_roll_call(roll);
        return NULL;
    }
    roll->recvs = roll->sends + nranks;
    roll->waiting = roll->entered + nranks;
    roll->dead = -1;
    return roll;
}

/* Without memory there is no roll call: the time-out then names a rank that this one waits for. */
static void start_roll_call(struct peer *peer, int32_t dead)
{
    if (peer->roll_call || peer->transport.nranks == 1)
        return;
    struct roll_call *roll = peer->roll_call = new_roll_call((size_t)peer->transport.nranks);
    if (!roll)
        return;
    roll->own = (struct alive){peer->call, dead};
    for (int32_t i = 0; i < peer->transport.nranks; i++) {
        if (i == peer->transport.rank)
            continue;
        receive_alive(peer, i);
        send_alive(peer, i, &roll->own);
    }
}

/* A rank enters a call when all have entered the one before: older numbers were left over. */
static void note_alive(struct peer *peer, int32_t rank)
{
    struct roll_call *roll = peer->roll_call;
    struct alive alive = roll->received[rank];
    if (alive.call >= peer->call)
        roll->entered[rank] = true;
    if (alive.call + 1 >= peer->call)
        roll->waiting[rank] = true;
    if (alive.call >= peer->call && alive.dead >= 0 && alive.dead < peer->transport.nranks) {
        roll->dead = (int32_t)alive.dead;
        roll->reporter = rank;
    }
}

/* EPEER: another rank reports a dead one. */
static rsd_status poll_roll_call(struct peer *peer)
{
    struct roll_call *roll = peer->roll_call;
    for (int32_t i = 0; roll && i < peer->transport.nranks; i++) {
        bool sent = false, received = false;
        peer_test(peer, &roll->sends[i], &sent);
        peer_test(peer, &roll->recvs[i], &received);
        if (!received)
            continue;
        note_alive(peer, i);
        receive_alive(peer, i); /* it may report a dead rank later */
    }
    return roll && roll->dead >= 0 ? fail(RSD_EPEER, "rank %d terminated (reported by rank %d)",
                                          (int)roll->dead, (int)roll->reporter)
                                   : RSD_OK;
}

/* Only ranks of its host see at once that a rank is dead. A roll call that starts here carries the news itself:
 * so the pointer is read before. */
static void report_dead(struct peer *peer, int32_t dead)
{
    struct roll_call *roll = peer->roll_call;
    if (host_has_all(peer))
        return;
    start_roll_call(peer, dead);
    poll_roll_call(peer);
    if (roll)
        roll->news = (struct alive){peer->call, dead};
    for (int32_t i = 0; roll && i < peer->transport.nranks; i++)
        if (i != peer->transport.rank && !roll->sends[i].active)
            send_alive(peer, i, &roll->news);
    poll_roll_call(peer);
}

static void end_roll_call(struct peer *peer)
{
    struct roll_call *roll = peer->roll_call;
    bool unused = true;
    for (int32_t i = 0; roll && i < peer->transport.nranks; i++) {
        bool received = peer_cancel(peer, &roll->recvs[i]),
             sent = peer_cancel(peer, &roll->sends[i]);
        unused = unused && received && sent;
    }
    peer->roll_call = NULL;
    if (roll && unused) /* else the transport may still use its memory */
        free_roll_call(roll);
}

/* ---- late ranks ---- */

static bool has_entered(const struct peer *peer, int32_t rank)
{
    int32_t index = peer_host_index(peer, rank);
    if (index >= 0)
        return host_has_entered(peer, index);
    return !peer->roll_call || peer->roll_call->entered[rank];
}

/* Whether a rank waits neither in this call nor in the one before: then the others wait for it, in whichever call. */
static bool is_unresponsive(const struct peer *peer, int32_t rank)
{
    return peer->roll_call && !peer->roll_call->waiting[rank];
}

static bool is_waited_for(const struct peer *peer, int32_t rank, peer_waits_for *waits_for,
                          void *context)
{
    char what[ERROR_TEXT_NCHARS];
    if (waits_for && !peer->voting)
        return waits_for(context, rank, what, sizeof what);
    return !host_has_all(peer) || !has_entered(peer, rank);
}

static rsd_status name_late(const struct peer *peer, int32_t rank, const char *problem,
                            peer_waits_for *waits_for, void *context)
{
    char what[ERROR_TEXT_NCHARS] = "";
    bool known = waits_for && waits_for(context, rank, what, sizeof what);
    return fail(RSD_ETIMEOUT, "timed out after %g s: rank %d %s%s%s%s", peer->timeout, (int)rank,
                problem, known ? " (" : "", what, known ? ")" : "");
}

/* First looks for unresponsive ranks, then for others; of both first for those that have not entered the call, beginning
 * with the rank that the current round waits for. */
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
                return name_late(peer, rank, "has not entered the call", waits_for, context);
            if (!absent && (peer->voting || is_waited_for(peer, rank, waits_for, context)))
                return name_late(peer, rank, "stopped responding", waits_for, context);
        }
    return fail(RSD_ETIMEOUT, "timed out after %g s", peer->timeout);
}

/* ---- dead ranks ---- */

/* What a process did last is received before it is looked for again: only then it counts as dead. A rank that has
 * done its part may end. */
static rsd_status look_for_dead(struct peer *peer, peer_waits_for *waits_for, void *context)
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
    end_roll_call(peer);
}

rsd_status peer_idle(struct peer *peer, peer_waits_for *waits_for, void *context)
{
    double now = seconds_now(), waited = now - peer->since;
    if (now - peer->checked > check_seconds || now - peer->checked > peer->timeout / 10) {
        peer->checked = now;
        TRY(look_for_dead(peer, waits_for, context));
        if (waited > peer->timeout / 2)
            start_roll_call(peer, -1);
        TRY(poll_roll_call(peer));
    }
    if (waited > peer->timeout) {
        TRY(poll_roll_call(peer));
        return find_late(peer, waits_for, context);
    }
    sched_yield();
    return RSD_OK;
}
