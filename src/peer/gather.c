/* gather.c - votes and small gathers.
 *
 * A vote finds the lowest rank that failed, and the lowest rank whose call differs from that of rank 0. In each round
 * a rank sends its ballot twice as far as in the previous round, and merges the one that it receives:
 *
 *     round 0   0->1->2->3->4->0        round 1   0->2->4->1->3->0        round 2   0->4->3->2->1->0
 *
 * A gather starts with a vote, which also detects different lengths. Then it sends the bytes of all ranks in the same
 * rounds. If all ranks share memory, they read ballots and bytes there instead.
 */
#include "peer_state.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>

enum { GATHER_NBYTES = 1 << 24 }; /* most bytes of all ranks that are gathered at a time */

struct peer_call peer_call_named(const char *format, ...)
{
    struct peer_call call;
    va_list args;
    memset(&call, 0, sizeof call); /* all bytes are compared and sent */
    va_start(args, format);
    vsnprintf(call.name, sizeof call.name, format, args);
    va_end(args);
    hash_start(&call.arguments, "call");
    return call;
}

/* ---- ballots ---- */

static void fill_ballot(struct ballot *ballot, int32_t rank, rsd_status status,
                        const struct peer_call *call)
{
    memset(ballot, 0, sizeof *ballot); /* all bytes are sent */
    ballot->failed = ballot->lowest = rank;
    ballot->status = (int32_t)status;
    snprintf(ballot->message, sizeof ballot->message, "%s", status ? rsd_error() : "");
    ballot->differs = -1;
    ballot->call = *call;
}

static bool same_call(const struct peer_call *x, const struct peer_call *y)
{
    return memcmp(x->name, y->name, sizeof x->name) == 0 && x->arguments.a == y->arguments.a &&
           x->arguments.b == y->arguments.b;
}

bool ballot_agrees(const struct ballot *ballot, const struct ballot *other)
{
    return !ballot->status && !other->status && same_call(&ballot->call, &other->call);
}

/* Records a rank whose call differs, if it is lower than the one that was recorded. */
static void note_difference(struct ballot *ballot, int32_t rank, const struct peer_call *call)
{
    if (rank < 0 || (ballot->differs >= 0 && ballot->differs <= rank))
        return;
    ballot->differs = rank;
    ballot->other_call = *call;
}

void ballot_merge(struct ballot *ballot, const struct ballot *other)
{
    bool other_is_lower = other->lowest < ballot->lowest;
    struct ballot low = other_is_lower ? *other : *ballot;
    const struct ballot *high = other_is_lower ? ballot : other;
    if (same_call(&low.call, &high->call))
        note_difference(&low, high->differs, &high->other_call);
    else
        note_difference(&low, high->lowest, &high->call);
    if (high->status && (!low.status || high->failed < low.failed)) {
        low.failed = high->failed;
        low.status = high->status;
        memcpy(low.message, high->message, sizeof low.message);
    }
    *ballot = low;
}

/* Returns the result of a vote, which is the same on all ranks. The bytes may come from a hostile rank. */
static rsd_status settle_vote(struct ballot *ballot)
{
    rsd_status status = status_received(ballot->status);
    ballot->message[sizeof ballot->message - 1] = 0;
    ballot->call.name[CALL_NAME_NCHARS - 1] = ballot->other_call.name[CALL_NAME_NCHARS - 1] = 0;
    if (status)
        return fail(status, "rank %d: %s", (int)ballot->failed, ballot->message);
    if (ballot->differs < 0)
        return RSD_OK;
    if (strcmp(ballot->call.name, ballot->other_call.name) != 0)
        return fail(RSD_EMISMATCH, "rank %d called %s, rank 0 called %s", (int)ballot->differs,
                    ballot->other_call.name, ballot->call.name);
    return fail(RSD_EMISMATCH, "rank %d passed different arguments than rank 0 to %s",
                (int)ballot->differs, ballot->call.name);
}

/* ---- rounds ---- */

int32_t round_source(const struct peer *peer)
{
    int32_t n = peer->transport.nranks, step = (int32_t)(peer->distance % n);
    return (peer->transport.rank - step + n) % n;
}

/* Starts to send `out` as far as this round goes, and to receive as many bytes into `in`. */
static rsd_status start_round(struct peer *peer, const void *out, void *in, size_t nbytes)
{
    int32_t to = (int32_t)((peer->transport.rank + peer->distance) % peer->transport.nranks);
    TRY(peer_recv(peer, round_source(peer), TAG_VOTE, in, nbytes, &peer->recv));
    return peer_send(peer, to, TAG_VOTE, out, nbytes, &peer->send);
}

/* Sets *done if both messages of the round are complete, and *moved if one of them is since the last call. */
static rsd_status test_round(struct peer *peer, bool *moved, bool *done)
{
    TRY(peer_test(peer, &peer->send, moved));
    TRY(peer_test(peer, &peer->recv, moved));
    *done = !peer->send.active && !peer->recv.active;
    return RSD_OK;
}

/* Sends a copy of what is known so far, since it may change while the message is sent. */
static rsd_status start_ballot_round(struct peer *peer)
{
    peer->out = peer->result;
    return start_round(peer, &peer->out, &peer->in, sizeof peer->in);
}

/* Progresses the rounds of a vote, without waiting. *done is set after the last round. */
static rsd_status poll_rounds(struct peer *peer, bool *moved, bool *done)
{
    bool over = false;
    if (!peer->send.active && !peer->recv.active) {
        *moved = true;
        return start_ballot_round(peer);
    }
    TRY(test_round(peer, moved, &over));
    if (!over)
        return RSD_OK;
    ballot_merge(&peer->result, &peer->in);
    peer->distance *= 2;
    *done = peer->distance >= peer->transport.nranks;
    return RSD_OK;
}

/* ---- votes ---- */

/* Starts the next call: a vote, with n bytes beside the ballot that ranks of this host can read. */
static void start_vote(struct peer *peer, rsd_status status, const struct peer_call *call,
                       const void *data, size_t n)
{
    peer->call++;
    peer->voting = true;
    peer->distance = 1;
    fill_ballot(&peer->result, peer->transport.rank, status, call);
    host_enter(peer, data, n);
}

void peer_vote_start(struct peer *peer, rsd_status status, const struct peer_call *call)
{
    start_vote(peer, status, call, NULL, 0);
}

rsd_status peer_vote_poll(struct peer *peer, bool *moved, bool *done)
{
    bool alone = peer->transport.nranks == 1;
    *done = alone || (host_has_all(peer) && host_poll(peer));
    if (!alone && !host_has_all(peer))
        TRY(poll_rounds(peer, moved, done));
    if (!*done)
        return RSD_OK;
    *moved = true;
    peer->voting = false;
    if (alone && peer->result.status) /* without the number of the rank */
        return fail((rsd_status)peer->result.status, "%s", peer->result.message);
    return settle_vote(&peer->result);
}

/* Waits for a vote that was started. A failure that ranks have not agreed on breaks the peer. */
static rsd_status finish_vote(struct peer *peer)
{
    bool done = false;
    rsd_status status = RSD_OK;
    peer_wait_start(peer);
    while (!status && !done) {
        bool moved = false;
        status = peer_vote_poll(peer, &moved, &done);
        if (moved)
            peer_moved(peer);
        else if (!status)
            status = peer_idle(peer, NULL, NULL);
    }
    peer_wait_end(peer);
    if (!done)
        peer_break(peer);
    return status;
}

rsd_status peer_vote(struct peer *peer, rsd_status status, const struct peer_call *call)
{
    TRY(peer_check_usable(peer));
    if (peer->transport.nranks == 1)
        return status;
    start_vote(peer, status, call, NULL, 0);
    return finish_vote(peer);
}

/* ---- gathers ---- */

/* Gathers through shared memory, in pieces of HOST_PIECE_NBYTES. Each piece is a vote of its own. */
static rsd_status gather_on_host(struct peer *peer, rsd_status status, const struct peer_call *call,
                                 const char *own, size_t nbytes, char *all)
{
    for (size_t at = 0, n; at == 0 || at < nbytes; at += n) {
        n = nbytes - at < HOST_PIECE_NBYTES ? nbytes - at : HOST_PIECE_NBYTES;
        start_vote(peer, status, call, own + at, n);
        TRY(finish_vote(peer));
        for (int32_t i = 0; i < peer->transport.nranks; i++)
            host_read(peer, i, all + (size_t)i * nbytes + at, n);
        if (n == 0)
            break;
    }
    return RSD_OK;
}

/* Waits until the messages of the current round are complete. */
static rsd_status finish_round(struct peer *peer)
{
    for (bool done = false; !done;) {
        bool moved = false;
        TRY(test_round(peer, &moved, &done));
        if (moved)
            peer_moved(peer);
        else if (!done)
            TRY(peer_idle(peer, NULL, NULL));
    }
    return RSD_OK;
}

/* Gathers n bytes of every rank. Afterwards blocks[i] is the block of the i-th rank below this one, cyclically. */
static rsd_status gather_blocks(struct peer *peer, char *blocks, size_t n)
{
    int64_t nranks = peer->transport.nranks;
    for (peer->distance = 1; peer->distance < nranks; peer->distance *= 2) {
        size_t nblocks = (size_t)min_i64(peer->distance, nranks - peer->distance);
        TRY(start_round(peer, blocks, blocks + (size_t)peer->distance * n, nblocks * n));
        TRY(finish_round(peer));
    }
    return RSD_OK;
}

/* Gathers in rounds, at most `most` bytes of each rank at a time. `blocks` is memory for these. */
static rsd_status gather_by_messages(struct peer *peer, const char *own, size_t nbytes, char *all,
                                     char *blocks, size_t most)
{
    int32_t rank = peer->transport.rank, nranks = peer->transport.nranks;
    for (size_t at = 0, n; at < nbytes; at += n) {
        n = nbytes - at < most ? nbytes - at : most;
        memcpy(blocks, own + at, n);
        TRY(gather_blocks(peer, blocks, n));
        for (int32_t i = 0; i < nranks; i++)
            memcpy(all + (size_t)((rank - i + nranks) % nranks) * nbytes + at,
                   blocks + (size_t)i * n, n);
    }
    return RSD_OK;
}

/* Votes, and then gathers by messages. */
static rsd_status vote_and_gather(struct peer *peer, rsd_status status,
                                  const struct peer_call *call, const void *own, size_t nbytes,
                                  void *all)
{
    size_t nranks = (size_t)peer->transport.nranks, most = GATHER_NBYTES / nranks + 1;
    most = nbytes < most ? nbytes : most;
    char *blocks = mem_new(nranks * most, 1);
    if (!blocks && !status)
        status = RSD_ENOMEM;
    status = peer_vote(peer, status, call);
    bool voted = !status;
    if (voted) {
        assert(blocks && (all || nbytes == 0)); /* else the vote failed */
        peer_wait_start(peer);
        status = gather_by_messages(peer, own, nbytes, all, blocks, most);
        peer_wait_end(peer);
    }
    if (voted && status)
        peer_break(peer);
    if (!voted || !peer->lost) /* else the transport may still use them */
        mem_free(blocks);
    return status;
}

rsd_status peer_gather(struct peer *peer, rsd_status status, const struct peer_call *call,
                       const void *own, size_t nbytes, void *all)
{
    struct peer_call sized = *call;
    TRY(peer_check_usable(peer));
    if (peer->transport.nranks == 1) {
        if (!status && nbytes > 0)
            memcpy(all, own, nbytes);
        return status;
    }
    hash_i64(&sized.arguments, (int64_t)nbytes);
    return host_has_all(peer) ? gather_on_host(peer, status, &sized, own, nbytes, all)
                              : vote_and_gather(peer, status, &sized, own, nbytes, all);
}

/* ---- public ---- */

static rsd_status gather_once(const rsd_transport *transport, double timeout, rsd_status status,
                              const struct peer_call *call, const void *own, size_t nbytes,
                              void *all)
{
    struct peer *peer;
    TRY(peer_open(transport, timeout, TAG_DATA, &peer));
    status = peer_gather(peer, status, call, own, nbytes, all);
    peer_close(peer);
    return status;
}

rsd_status rsd_gather(const rsd_transport *given, const void *own, size_t nbytes, void *all,
                      double timeout)
{
    rsd_transport transport;
    struct peer_call call = peer_call_named("rsd_gather of %zu bytes", nbytes);
    TRY(peer_check_transport(given, &transport));
    return gather_once(&transport, timeout, RSD_OK, &call, own, nbytes, all);
}

rsd_status rsd_transport_nodes(const rsd_transport *given, int32_t *node_of)
{
    rsd_transport transport;
    struct peer_call call = peer_call_named("rsd_transport_nodes");
    int64_t own = host_number();
    TRY(peer_check_transport(given, &transport));
    int64_t *all = mem_new((size_t)transport.nranks, sizeof *all);
    rsd_status status =
        gather_once(&transport, 0, all ? RSD_OK : RSD_ENOMEM, &call, &own, sizeof own, all);
    assert(status || all);
    for (int32_t i = 0; i < transport.nranks && !status; i++) {
        int32_t first = 0; /* the number of a host is its lowest rank */
        while (all[first] != all[i])
            first++;
        node_of[i] = first;
    }
    mem_free(all);
    return status;
}
