/* meeting.c - how ranks agree, and who is late.
 *
 * At bind, everybody tells everybody what it has: a rank that failed, or that has other plans, is named by
 * all. At the start of each run the same is done for what can go wrong there. Ranks of one host read it from
 * each other's boards; others send it, in each round twice as far as before:
 *
 *     round 0   0->1->2->3->4->0        round 1   0->2->4->1->3->0        round 2   0->4->3->2->1->0
 *
 * so that after a few rounds all know the worst of all. When nothing has moved for half of the time-out, a rank
 * says to all others that it is there; whoever has not said so when the time is over is late. Whoever finds that
 * a process of its host is gone says that too.
 */
#include "exec.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- at bind ---- */

enum { FEW = 64 }; /* no memory is needed to say that there is none */

struct greeting {
    struct hash plans;
    int64_t nplans, number, node;
    int32_t status, columns;
    char message[120];
};

static void speak(struct greeting *own, rsd_status status)
{
    memset(own, 0, sizeof *own); /* all bytes travel */
    own->status = (int32_t)status;
    snprintf(own->message, sizeof own->message, "%s", status ? rsd_error() : "");
}

/* All see the same greetings, so all come to the same end; who failed keeps its own words. */
static rsd_status hear(const rsd_transport *t, rsd_status own, struct greeting *all)
{
    for (int32_t i = 0; i < t->nranks && !own; i++) {
        all[i].message[sizeof all[i].message - 1] = 0;
        if (all[i].status)
            return fail(RSD_EPEER, "rank %d: %s: %s", (int)i,
                        rsd_status_name((rsd_status)all[i].status), all[i].message);
    }
    return own;
}

static rsd_status greet(const rsd_transport *t, double timeout, const struct greeting *own,
                        struct greeting *few, struct greeting **all)
{
    *all = t->nranks <= FEW ? few : mem_new((size_t)t->nranks, sizeof **all);
    if (!*all)
        return RSD_ENOMEM;
    rsd_status status = t->allgather(t->context, own, sizeof *own, *all, timeout);
    if (status && *all != few)
        mem_free(*all);
    return status;
}

rsd_status meet_again(const struct exchange *x, rsd_status status, int64_t number, int64_t *least)
{
    const rsd_transport *t = &x->transport;
    struct greeting own, few[FEW], *all;
    speak(&own, status);
    own.number = number;
    TRY(greet(t, x->timeout, &own, few, &all));
    status = hear(t, status, all);
    for (int32_t i = 0; least && i < t->nranks; i++)
        *least = i == 0 ? all[i].number : min_i64(*least, all[i].number);
    if (all != few)
        mem_free(all);
    return status;
}

/* What the first `count` plans are. */
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

/* The first rank that differs from rank 0, or -1. */
static int32_t who_differs(const rsd_transport *t, const struct greeting *all)
{
    for (int32_t i = 1; i < t->nranks; i++)
        if (all[i].nplans != all[0].nplans || all[i].plans.a != all[0].plans.a ||
            all[i].plans.b != all[0].plans.b)
            return i;
    return -1;
}

/* Halves the plans until the first that differs is found, and lets both say what they have. */
static rsd_status name_difference(const struct exchange *x, int64_t nplans,
                                  const rsd_plan *const *plans, int32_t rank, struct greeting *all)
{
    const rsd_transport *t = &x->transport;
    int64_t same = 0,
            other = nplans; /* so many at the beginning agree; among so many one does not */
    struct greeting own;
    while (other - same > 1) {
        int64_t middle = same + (other - same) / 2;
        speak(&own, RSD_OK);
        own.plans = hash_plans(middle, plans);
        TRY(t->allgather(t->context, &own, sizeof own, all, x->timeout));
        if (who_differs(t, all) < 0) {
            same = middle;
        } else {
            other = middle;
            rank = who_differs(t, all);
        }
    }
    char *problem = NULL;
    speak(&own, RSD_OK);
    if (rsd_problem_print(plans[same]->src, plans[same]->dst, &problem) == RSD_OK)
        snprintf(own.message, sizeof own.message, "%s", problem);
    rsd_free(problem);
    TRY(t->allgather(t->context, &own, sizeof own, all, x->timeout));
    all[0].message[sizeof all[0].message - 1] = all[rank].message[sizeof all[0].message - 1] = 0;
    return fail(RSD_EMISMATCH, "rank %d has another plan %lld than rank 0: %s, and rank 0 has %s",
                (int)rank, (long long)same, all[rank].message, all[0].message);
}

static rsd_status compare(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                          struct greeting *all)
{
    const rsd_transport *t = &x->transport;
    int32_t rank = who_differs(t, all);
    if (rank < 0) {
        x->columns = true;
        for (int32_t i = 0; i < t->nranks; i++) {
            x->columns = x->columns && all[i].columns;
            x->node_of[i] = all[i].node < 0 ? -1 - i : all[i].node;
        }
        return RSD_OK;
    }
    if (all[rank].nplans != all[0].nplans)
        return fail(RSD_EMISMATCH, "rank %d has %lld plans, rank 0 has %lld", (int)rank,
                    (long long)all[rank].nplans, (long long)all[0].nplans);
    return name_difference(x, nplans, plans, rank, all);
}

/* x is NULL if there was no memory for it. */
rsd_status meet_to_bind(struct exchange *x, rsd_status status, const rsd_transport *transport,
                        double timeout, int64_t nplans, const rsd_plan *const *plans, int64_t node,
                        bool columns)
{
    struct greeting own, few[FEW], *all;
    if (!status) {
        x->node_of = mem_new((size_t)transport->nranks, sizeof *x->node_of);
        status = x->node_of ? RSD_OK : RSD_ENOMEM;
    }
    speak(&own, status);
    own.node = node ? node : host_number();
    own.nplans = nplans;
    own.columns = columns;
    if (!status)
        own.plans = hash_plans(nplans, plans);
    TRY(greet(transport, timeout, &own, few, &all));
    status = hear(transport, status, all);
    if (!status)
        status = compare(x, nplans, plans, all);
    if (all != few)
        mem_free(all);
    return status;
}

rsd_status rsd_transport_nodes(const rsd_transport *given, int32_t *node_of)
{
    rsd_transport t;
    struct greeting own, few[FEW], *all;
    TRY(options_copy("rsd_transport", given, &t, sizeof t));
    speak(&own, RSD_OK);
    own.node = host_number();
    TRY(greet(&t, DEFAULT_TIMEOUT, &own, few, &all));
    for (int32_t i = 0; i < t.nranks; i++) {
        int32_t first = 0; /* a host has the number of its first rank */
        while (all[first].node != all[i].node)
            first++;
        node_of[i] = first;
    }
    if (all != few)
        mem_free(all);
    return RSD_OK;
}

/* ---- at the start of a run ---- */

void meeting_start(struct exchange *x, rsd_status status)
{
    struct meeting *m = &x->meeting;
    memset(m, 0, sizeof *m);
    m->worst.run = x->run;
    m->worst.rank = x->transport.rank;
    m->worst.status = (int32_t)status;
    snprintf(m->worst.message, sizeof m->worst.message, "%s", status ? rsd_error() : "");
    m->distance = 1;
    neighbours_enter(x, &m->worst);
}

static rsd_status settle(const struct exchange *x)
{
    const struct verdict *worst = &x->meeting.worst;
    if (!worst->status)
        return RSD_OK;
    if (worst->rank == x->transport.rank)
        return fail((rsd_status)worst->status, "%s", worst->message);
    return fail(RSD_EPEER, "rank %d: %s: %s", (int)worst->rank,
                rsd_status_name((rsd_status)worst->status), worst->message);
}

/* Who tells us in this round what it knows. */
static int32_t teller(const struct exchange *x)
{
    int32_t n = x->transport.nranks, step = (int32_t)(x->meeting.distance % n);
    return (x->transport.rank - step + n) % n;
}

static rsd_status start_round(struct exchange *x)
{
    const rsd_transport *t = &x->transport;
    struct meeting *m = &x->meeting;
    int32_t to = (t->rank + (int32_t)m->distance) % t->nranks;
    m->out = m->worst;
    TRY(t->recv(t->context, teller(x), MEET_TAG, &m->in, sizeof m->in, &m->recv));
    m->receiving = true;
    TRY(t->send(t->context, to, MEET_TAG, &m->out, sizeof m->out, &m->send));
    m->sending = true;
    return RSD_OK;
}

static rsd_status test(const struct exchange *x, void *request, bool *under_way, bool *moved)
{
    int32_t done = 0;
    if (!*under_way)
        return RSD_OK;
    TRY(x->transport.test(x->transport.context, request, &done));
    if (done) {
        *under_way = false;
        *moved = true;
    }
    return RSD_OK;
}

static rsd_status push_round(struct exchange *x, bool *moved)
{
    struct meeting *m = &x->meeting;
    if (!m->sending && !m->receiving) {
        *moved = true;
        return start_round(x);
    }
    TRY(test(x, m->send, &m->sending, moved));
    TRY(test(x, m->recv, &m->receiving, moved));
    if (m->sending || m->receiving)
        return RSD_OK;
    m->in.message[sizeof m->in.message - 1] = 0;
    if (m->in.status && (!m->worst.status || m->in.rank < m->worst.rank))
        m->worst = m->in;
    m->distance *= 2;
    return RSD_OK;
}

rsd_status meeting_push(struct exchange *x, bool *moved, bool *done)
{
    if (x->transport.nranks == 1) {
        *done = true;
    } else if (all_are_near(x)) {
        *done = neighbours_heard(x, &x->meeting.worst);
        *moved = *moved || *done;
    } else {
        TRY(push_round(x, moved));
        *done = x->meeting.distance >= x->transport.nranks;
    }
    x->refused = *done && x->meeting.worst.status;
    return *done ? settle(x) : RSD_OK;
}

void meeting_cancel(struct exchange *x)
{
    const rsd_transport *t = &x->transport;
    struct meeting *m = &x->meeting;
    if (m->sending)
        t->cancel(t->context, m->send);
    if (m->receiving)
        t->cancel(t->context, m->recv);
    x->lost = x->lost || m->sending || m->receiving;
    m->sending = m->receiving = false;
}

/* ---- who is late ---- */

static void listen_to(struct exchange *x, int32_t rank)
{
    const rsd_transport *t = &x->transport;
    struct rollcall *r = x->rollcall;
    r->receiving[rank] = t->recv(t->context, rank, ROLL_TAG, &r->heard[rank], sizeof *r->heard,
                                 &r->recvs[rank]) == RSD_OK;
}

static void rollcall_free(struct rollcall *r)
{
    mem_free(r->heard);
    mem_free(r->sends);
    mem_free(r->sending);
    mem_free(r);
}

/* Without memory for it nobody is called: the time-out then names whom we wait for. */
void rollcall_start(struct exchange *x, int32_t gone)
{
    const rsd_transport *t = &x->transport;
    size_t n = (size_t)t->nranks;
    if (x->rollcall || all_are_near(x) || n == 1)
        return;
    struct rollcall *r = mem_new(1, sizeof *r);
    if (!r)
        return;
    r->own = (struct word){x->run, gone};
    r->gone = -1;
    r->heard = mem_new(n, sizeof *r->heard);
    r->sends = mem_new(2 * n, sizeof *r->sends);
    r->sending = mem_new(4 * n, sizeof *r->sending);
    if (!r->heard || !r->sends || !r->sending) {
        rollcall_free(r);
        return;
    }
    x->rollcall = r;
    r->recvs = r->sends + n;
    r->receiving = r->sending + n;
    r->present = r->receiving + n;
    r->behind = r->present + n;
    r->present[t->rank] = true;
    for (int32_t i = 0; i < t->nranks; i++) {
        if (i == t->rank)
            continue;
        listen_to(x, i);
        r->sending[i] =
            t->send(t->context, i, ROLL_TAG, &r->own, sizeof r->own, &r->sends[i]) == RSD_OK;
    }
}

static void hear_word(struct exchange *x, int32_t rank)
{
    struct rollcall *r = x->rollcall;
    const struct word *word = &r->heard[rank];
    if (word->run >= x->run)
        r->present[rank] = true;
    else /* it waits in an earlier run, or did so once, and that went well in the end */
        r->behind[rank] = true;
    if (word->run >= x->run && word->gone >= 0 && word->gone < x->transport.nranks) {
        r->gone = (int32_t)word->gone;
        r->witness = rank;
    }
}

/* Fails if somebody has found a rank to be no more. */
rsd_status rollcall_push(struct exchange *x)
{
    struct rollcall *r = x->rollcall;
    bool moved = false;
    for (int32_t i = 0; r && i < x->transport.nranks; i++) {
        bool was = r->receiving[i];
        test(x, r->sends[i], &r->sending[i], &moved);
        test(x, r->recvs[i], &r->receiving[i], &moved);
        if (!was || r->receiving[i])
            continue;
        hear_word(x, i);
        listen_to(x, i); /* it may have more to say */
    }
    return r && r->gone >= 0
               ? fail(RSD_EPEER, "rank %d is gone, says rank %d", (int)r->gone, (int)r->witness)
               : RSD_OK;
}

/* The neighbours of a rank see at once that it is no more; others would only see that those left. */
void rollcall_tell(struct exchange *x, int32_t gone)
{
    const rsd_transport *t = &x->transport;
    struct rollcall *r = x->rollcall;
    rollcall_start(x, gone);
    rollcall_push(x);
    if (r)
        r->last = (struct word){x->run, gone};
    for (int32_t i = 0; r && i < t->nranks; i++) /* they have heard from us before */
        if (i != t->rank && !r->sending[i])
            r->sending[i] =
                t->send(t->context, i, ROLL_TAG, &r->last, sizeof r->last, &r->sends[i]) == RSD_OK;
    rollcall_push(x);
}

void rollcall_drop(struct exchange *x)
{
    const rsd_transport *t = &x->transport;
    struct rollcall *r = x->rollcall;
    bool sent = true;
    for (int32_t i = 0; r && i < t->nranks; i++) {
        if (r->receiving[i])
            t->cancel(t->context, r->recvs[i]);
        if (r->sending[i])
            t->cancel(t->context, r->sends[i]);
        sent = sent && !r->sending[i] && !r->receiving[i];
    }
    x->rollcall = NULL;
    if (r && sent) /* else a transport may still read and write there */
        rollcall_free(r);
}

/* A tensor that is exchanged with a rank, for messages. */
static const char *label_of(const struct exchange *x, int32_t rank, bool *sending)
{
    for (size_t i = 0; i < x->nlanes; i++) {
        const struct lane *lane = &x->lanes[i];
        *sending = lane->sending;
        if (lane->parcel->peer == rank && !lane_finished(lane))
            return x->labels[x->ops[lane->here.op].plan];
    }
    return NULL;
}

static rsd_status name_late(const struct exchange *x, int32_t rank, const char *what)
{
    bool sending = false;
    const char *label = label_of(x, rank, &sending);
    return label
               ? fail(RSD_ETIMEOUT, "nothing moved for %g s: rank %d %s (%s %s rank %d)",
                      x->timeout, (int)rank, what, label,
                      sending ? "goes to it from" : "is to come from it to", (int)x->transport.rank)
               : fail(RSD_ETIMEOUT, "nothing moved for %g s: rank %d %s", x->timeout, (int)rank,
                      what);
}

/* Whether a rank has not begun this run, and whether it does not even wait: then it is the one that others
 * wait for too, however far they are. */
static bool has_not_come(const struct exchange *x, int32_t rank)
{
    const struct neighbour *near = neighbour_of(x, rank);
    if (near)
        return !neighbour_has_come(x, near);
    return x->rollcall && !x->rollcall->present[rank];
}

static bool is_silent(const struct exchange *x, int32_t rank)
{
    const struct neighbour *near = neighbour_of(x, rank);
    if (near)
        return neighbour_is_silent(near);
    return x->rollcall && !x->rollcall->present[rank] && !x->rollcall->behind[rank];
}

/* First those that are silent, and of these and of the others first those that did not come at all; beginning
 * with whom this round waits for. */
rsd_status say_who_is_late(struct exchange *x)
{
    int32_t n = x->transport.nranks, first = teller(x);
    for (int level = 0; level < 4; level++)
        for (int32_t k = 0; k < n; k++) {
            int32_t rank = (first + k) % n;
            bool absent = level % 2 == 0;
            if (rank == x->transport.rank || (level < 2 && !is_silent(x, rank)))
                continue;
            if (absent && has_not_come(x, rank))
                return name_late(x, rank, "did not come");
            if (!absent && (x->stage < 0 || lane_is_open(x, rank, x->stage)))
                return name_late(x, rank, "stopped");
        }
    return fail(RSD_ETIMEOUT, "nothing moved for %g s", x->timeout);
}
