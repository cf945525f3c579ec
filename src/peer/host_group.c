/* host_group.c - votes and gathers of the ranks of one host, through shared memory.
 *
 * The lowest rank of a host creates one segment with a slot per rank:
 *
 *     slot of a rank   | ballot and bytes of calls with even numbers | of those with odd numbers |
 *
 * A rank enters the next call only when all have entered the current one. So no rank is two calls ahead, and a ballot
 * stays until all ranks have read it. Only its owner writes to a slot. Data is copied from a slot before it is used.
 */
#include "peer_state.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

struct host_slot {
    struct host_ballot {
        _Alignas(64) _Atomic uint64_t call; /* the call that the fields below belong to */
        struct ballot ballot;
        char data[HOST_PIECE_NBYTES];
    } ballots[2];
};

struct host_group {
    struct shared_segment segment;
    struct host_slot *slots;
    int32_t n, own;        /* number of ranks; index of this rank */
    int32_t *ranks, *pids; /* in ascending order of ranks */
};

/* The data that a rank sends to the others when memory is set up. */
struct host_offer {
    struct shared_segment_name segment; /* of the lowest rank of a host */
    int32_t pid, status;
    char why[ERROR_TEXT_NCHARS];
};

/* ---- opening ---- */

/* Returns whether any two ranks are on one host. The result is the same on every rank. */
static bool any_share_host(const int64_t *host_of, int32_t nranks)
{
    for (int32_t i = 1; i < nranks; i++)
        for (int32_t k = 0; k < i; k++)
            if (host_of[i] == host_of[k])
                return true;
    return false;
}

/* Creates the group of the ranks of this host, without its segment. */
static rsd_status new_group(const struct peer *peer, const int64_t *host_of,
                            struct host_group **group)
{
    int32_t rank = peer->transport.rank, nranks = peer->transport.nranks;
    struct host_group *made = mem_new(1, sizeof *made);
    if (made)
        made->ranks = mem_new(2 * (size_t)nranks, sizeof *made->ranks);
    if (!made || !made->ranks) {
        mem_free(made);
        return RSD_ENOMEM;
    }
    made->pids = made->ranks + nranks;
    for (int32_t i = 0; i < nranks; i++) {
        if (i == rank)
            made->own = made->n;
        if (host_of[i] == host_of[rank])
            made->ranks[made->n++] = i;
    }
    *group = made;
    return RSD_OK;
}

static void drop_group(struct host_group *group)
{
    if (!group)
        return;
    shared_segment_drop(&group->segment);
    mem_free(group->ranks);
    mem_free(group);
}

static void record_failure(struct host_offer *own, rsd_status status)
{
    own->status = (int32_t)status;
    snprintf(own->why, sizeof own->why, "%s", status ? rsd_error() : "");
}

/* Creates the segment. Called on the lowest rank of the host. */
static rsd_status make_segment(struct host_group *group, struct host_offer *own)
{
    if (group->own > 0 || group->n == 1)
        return RSD_OK;
    TRY(shared_segment_new((size_t)group->n * sizeof *group->slots, &group->segment));
    own->segment = shared_segment_name(&group->segment);
    return RSD_OK;
}

/* Opens the segment. Called on the other ranks. */
static rsd_status open_segment(struct host_group *group, const struct host_offer *offers)
{
    int32_t lowest = group->ranks[0];
    if (group->n == 1)
        return RSD_OK;
    if (group->own > 0)
        TRY(shared_segment_open(&offers[lowest].segment, &group->segment));
    if (shared_segment_capacity(&group->segment) < (uint64_t)group->n * sizeof *group->slots)
        return fail(RSD_EPEER, "rank %d: shared memory is too small", (int)lowest);
    group->slots = (void *)shared_segment_data(&group->segment);
    for (int32_t i = 0; i < group->n; i++)
        group->pids[i] = offers[group->ranks[i]].pid;
    return RSD_OK;
}

/* Returns whether a rank of this host failed. If so, writes it to the note. */
static bool any_failed(struct peer *peer, const struct host_group *group,
                       const struct host_offer *offers)
{
    for (int32_t i = 0; i < group->n; i++) {
        const struct host_offer *offer = &offers[group->ranks[i]];
        if (!offer->status)
            continue;
        snprintf(peer->host_note, sizeof peer->host_note, "rank %d: %.*s", (int)group->ranks[i],
                 (int)sizeof offer->why - 1, offer->why);
        return true;
    }
    return false;
}

/* Collective. Creates and opens the segment. If a rank of this host fails, the peer stays without shared memory. */
static rsd_status share_segment(struct peer *peer, rsd_status status, struct host_group *group,
                                struct host_offer *offers)
{
    struct peer_call offering = peer_call_named("sharing memory"),
                     opening = peer_call_named("opening shared memory");
    struct host_offer own;
    memset(&own, 0, sizeof own); /* all bytes are sent */
    own.pid = (int32_t)getpid();
    if (!status)
        record_failure(&own, make_segment(group, &own));
    TRY(peer_gather(peer, status, &offering, &own, sizeof own, offers));
    assert(group && offers); /* else the gather failed */
    if (!any_failed(peer, group, offers))
        record_failure(&own, open_segment(group, offers));
    TRY(peer_gather(peer, RSD_OK, &opening, &own, sizeof own, offers));
    if (group->n == 1)
        snprintf(peer->host_note, sizeof peer->host_note, "no other rank is on this host");
    else if (!any_failed(peer, group, offers))
        peer->host = group;
    return RSD_OK;
}

rsd_status peer_share_host(struct peer *peer, const int64_t *host_of)
{
    struct host_group *group = NULL;
    if (peer->hosts_known)
        return RSD_OK;
    peer->any_host_shared = any_share_host(host_of, peer->transport.nranks);
    if (!peer->any_host_shared) {
        snprintf(peer->host_note, sizeof peer->host_note, "each rank is on a host of its own");
        peer->hosts_known = true;
        return RSD_OK;
    }
    struct host_offer *offers = mem_new((size_t)peer->transport.nranks, sizeof *offers);
    rsd_status status = offers ? new_group(peer, host_of, &group) : RSD_ENOMEM;
    status = share_segment(peer, status, group, offers);
    peer->hosts_known = !status;
    mem_free(offers);
    if (!peer->host)
        drop_group(group);
    return status;
}

bool peer_any_host_shared(const struct peer *peer)
{
    return peer->any_host_shared;
}

void host_close(struct peer *peer)
{
    drop_group(peer->host);
    peer->host = NULL;
}

/* ---- voting ---- */

bool host_has_all(const struct peer *peer)
{
    return peer->host && peer->host->n == peer->transport.nranks;
}

static struct host_ballot *host_ballot_of(const struct peer *peer, int32_t index)
{
    return &peer->host->slots[index].ballots[peer->call % 2];
}

void host_enter(struct peer *peer, const void *data, size_t n)
{
    if (!peer->host)
        return;
    struct host_ballot *own = host_ballot_of(peer, peer->host->own);
    own->ballot = peer->result;
    if (n > 0)
        memcpy(own->data, data, n);
    atomic_store_explicit(&own->call, peer->call, memory_order_release);
}

bool host_has_entered(const struct peer *peer, int32_t index)
{
    return atomic_load_explicit(&host_ballot_of(peer, index)->call, memory_order_acquire) ==
           peer->call;
}

bool host_poll(struct peer *peer)
{
    for (int32_t i = 0; i < peer->host->n; i++)
        if (!host_has_entered(peer, i))
            return false;
    bool agreed = true;
    for (int32_t i = 0; i < peer->host->n && agreed; i++)
        agreed = ballot_agrees(&peer->result, &host_ballot_of(peer, i)->ballot);
    for (int32_t i = 0; i < peer->host->n && !agreed; i++) {
        struct ballot other = host_ballot_of(peer, i)->ballot;
        ballot_merge(&peer->result, &other);
    }
    return true;
}

void host_read(const struct peer *peer, int32_t index, void *data, size_t n)
{
    if (n > 0)
        memcpy(data, host_ballot_of(peer, index)->data, n);
}

int32_t host_pid(const struct peer *peer, int32_t index)
{
    return peer->host->pids[index];
}

/* ---- for other modules ---- */

int32_t peer_host_nranks(const struct peer *peer)
{
    return peer->host ? peer->host->n : 0;
}

int32_t peer_host_rank(const struct peer *peer, int32_t index)
{
    return peer->host->ranks[index];
}

int32_t peer_host_index(const struct peer *peer, int32_t rank)
{
    int32_t lo = 0, hi = peer_host_nranks(peer);
    while (lo < hi) {
        int32_t middle = lo + (hi - lo) / 2;
        if (peer->host->ranks[middle] < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < peer_host_nranks(peer) && peer->host->ranks[lo] == rank ? lo : -1;
}

const char *peer_host_note(const struct peer *peer)
{
    return peer->host_note;
}
