/* notice.c - what ranks tell each other: each sends every other one the same few bytes, and reads theirs.
 *
 * A rank that cannot do its part says so here, and one that is about something else is found out, before
 * anybody takes bytes for what they are not. Nobody waits for one rank alone, and not for ever. Execs that
 * are at work hear of bad news too. Their transport is ours, with tags of their own.
 */
#include "stash.h"

#include <sched.h>
#include <stdio.h>

/* Execs use tags 0 to 14 of what they take for their transport. */
enum { EXEC_TAGS = 16, NOTICE_TAG = 31 };

/* ---- memory ---- */

static rsd_status new_notices(const struct channel *channel, struct notices **made)
{
    size_t n = (size_t)channel->transport.nranks;
    struct notices *notices = mem_new(1, sizeof *notices);
    if (!notices)
        return RSD_ENOMEM;
    notices->all = mem_new(n, sizeof *notices->all);
    notices->requests = mem_new(2 * n, sizeof *notices->requests);
    if (!notices->all || !notices->requests) {
        mem_free(notices->all);
        mem_free(notices->requests);
        mem_free(notices);
        return RSD_ENOMEM;
    }
    *made = notices;
    return RSD_OK;
}

/* ---- telling ---- */

static rsd_status start_all(const rsd_transport *t, struct notices *notices)
{
    for (int32_t i = 0; i < t->nranks; i++) {
        if (i == t->rank)
            continue;
        TRY(t->recv(t->context, i, NOTICE_TAG, &notices->all[i], sizeof notices->all[i],
                    &notices->requests[i]));
        notices->nmoving++;
        TRY(t->send(t->context, i, NOTICE_TAG, &notices->own, sizeof notices->own,
                    &notices->requests[t->nranks + i]));
        notices->nmoving++;
    }
    return RSD_OK;
}

rsd_status notices_post(struct channel *channel, const struct notice *own, struct notices **notices)
{
    struct notices *made = channel->spare;
    struct notices **last = &channel->moving;
    bool only = made && !made->next;
    if (made)
        channel->spare = made->next;
    if (only && new_notices(channel, &channel->spare)) {
        channel->spare = NULL; /* until this one comes back */
        made->own = *own;
        made->own.status = own->status ? own->status : RSD_ENOMEM;
    } else if (made) {
        made->own = *own;
    } else {
        return RSD_ENOMEM;
    }
    made->all[channel->transport.rank] = made->own;
    made->nmoving = 0;
    made->next = NULL;
    made->fine = false;
    while (*last)
        last = &(*last)->next;
    *last = made;
    rsd_status status = start_all(&channel->transport, made);
    if (status) {
        channel_break(channel, status);
        notices_end(channel, made);
        return status;
    }
    *notices = made;
    return RSD_OK;
}

/* Whatever can be done now: from and to each rank in the order of posting, since one tag serves all. */
static rsd_status push(struct channel *channel, bool *moved)
{
    const rsd_transport *t = &channel->transport;
    for (int32_t i = 0; i < 2 * t->nranks; i++)
        for (struct notices *notices = channel->moving; notices; notices = notices->next) {
            int32_t done = 0;
            if (!notices->requests[i])
                continue;
            TRY(t->test(t->context, notices->requests[i], &done));
            if (!done)
                break;
            notices->requests[i] = NULL;
            notices->nmoving--;
            *moved = true;
        }
    return RSD_OK;
}

static rsd_status late(const struct channel *channel, const struct notices *notices)
{
    static const char *const doing[] = {"", "put", "gathered", "bound"};
    for (int32_t i = 0; i < 2 * channel->transport.nranks; i++)
        if (notices->requests[i])
            return fail(RSD_ETIMEOUT,
                        "nothing moved for %g s: rank %d has not come to where buffer %lld is %s",
                        channel->timeout, (int)(i % channel->transport.nranks),
                        (long long)notices->own.id, doing[notices->own.kind]);
    return RSD_OK;
}

rsd_status notices_wait(struct channel *channel, struct notices *notices)
{
    double since = seconds_now();
    while (notices->nmoving > 0) {
        bool moved = false;
        rsd_status status = push(channel, &moved);
        if (!status && moved)
            since = seconds_now();
        else if (!status && seconds_now() - since > channel->timeout)
            status = late(channel, notices);
        TRY(channel_break(channel, status));
        if (!moved)
            sched_yield();
    }
    return RSD_OK;
}

void notices_end(struct channel *channel, struct notices *notices)
{
    const rsd_transport *t = &channel->transport;
    for (int32_t i = 0; i < 2 * t->nranks; i++)
        if (notices->requests[i]) {
            t->cancel(t->context, notices->requests[i]);
            notices->requests[i] = NULL;
        }
    struct notices **at = &channel->moving;
    while (*at != notices)
        at = &(*at)->next;
    *at = notices->next;
    notices->next = channel->spare;
    channel->spare = notices;
}

/* ---- what it comes to ---- */

static bool hash_differs(struct hash x, struct hash y)
{
    return x.a != y.a || x.b != y.b;
}

static bool differs(const struct notice *x, const struct notice *y, bool with_values)
{
    return hash_differs(x->about, y->about) || (with_values && hash_differs(x->values, y->values));
}

/* The rank whose notice most ranks have, the first of them. */
static int32_t usual(const struct notices *notices, int32_t nranks, bool with_values)
{
    int32_t best = 0, most = 0;
    for (int32_t i = 0; i < nranks && most <= nranks / 2; i++) {
        int32_t n = 0;
        for (int32_t k = 0; k < nranks; k++)
            n += !differs(&notices->all[i], &notices->all[k], with_values);
        if (n > most) {
            most = n;
            best = i;
        }
    }
    return best;
}

bool notices_split(const struct channel *channel, const struct notices *notices)
{
    int32_t nfailed = 0;
    for (int32_t i = 0; i < channel->transport.nranks; i++)
        nfailed += notices->all[i].status != RSD_OK;
    return nfailed > 0 && nfailed < channel->transport.nranks;
}

bool notices_same_id(const struct channel *channel, const struct notices *notices)
{
    const struct notice *all = notices->all;
    for (int32_t i = 1; i < channel->transport.nranks; i++)
        if (all[i].kind != all[0].kind || all[i].id != all[0].id)
            return false;
    return true;
}

rsd_status notices_compare(const struct channel *channel, const struct notices *notices,
                           bool with_values)
{
    static const char *const verbs[] = {"", "puts", "asks for", "binds"};
    static const char *const could[] = {"", "put", "give", "bind the gather of"};
    int32_t n = channel->transport.nranks;
    const struct notice *all = notices->all;
    for (int32_t i = 0; i < n; i++)
        if (all[i].status && i != channel->transport.rank)
            return fail(RSD_EPEER, "rank %d could not %s buffer %lld: %s", (int)i,
                        could[all[i].kind & 3], (long long)all[i].id,
                        rsd_status_name((rsd_status)all[i].status));
    for (int32_t i = 1; i < n; i++)
        if (all[i].kind != all[0].kind || all[i].id != all[0].id)
            return fail(RSD_EMISMATCH, "rank %d %s buffer %lld, rank 0 %s buffer %lld", (int)i,
                        verbs[all[i].kind & 3], (long long)all[i].id, verbs[all[0].kind & 3],
                        (long long)all[0].id);
    int32_t like = usual(notices, n, with_values);
    for (int32_t i = 0; i < n; i++)
        if (differs(&all[i], &all[like], false))
            return fail(
                RSD_EMISMATCH,
                "buffer %lld: rank %d has another dtype, shape, cut or strides than rank %d",
                (long long)all[i].id, (int)i, (int)like);
    for (int32_t i = 0; with_values && i < n; i++)
        if (differs(&all[i], &all[like], true))
            return fail(RSD_EMISMATCH, "buffer %lld: rank %d has other values than rank %d",
                        (long long)all[i].id, (int)i, (int)like);
    return RSD_OK;
}

rsd_status channel_break(struct channel *channel, rsd_status status)
{
    if (status && !channel->broken) {
        channel->broken = status;
        snprintf(channel->why, sizeof channel->why, "%s", rsd_error());
    }
    return status;
}

/* Bad news end the wait for bytes that will not come, also if they are about a later buffer: who fails does
 * not go on with earlier ones. */
rsd_status notices_hear(void *context)
{
    struct channel *channel = context;
    bool moved = false;
    if (channel->broken)
        return fail(channel->broken, "%s", channel->why);
    rsd_status status = push(channel, &moved);
    for (struct notices *notices = channel->moving; notices && !status; notices = notices->next) {
        if (notices->nmoving > 0 || notices->fine)
            continue;
        status = notices_compare(channel, notices, false);
        notices->fine = !status;
    }
    return channel_break(channel, status);
}

/* ---- the transport of execs ---- */

static rsd_status exec_send(void *context, int32_t to, int32_t tag, const void *data, size_t nbytes,
                            void **request)
{
    const rsd_transport *t = &((struct channel *)context)->transport;
    return t->send(t->context, to, tag + EXEC_TAGS, data, nbytes, request);
}

static rsd_status exec_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                            void **request)
{
    const rsd_transport *t = &((struct channel *)context)->transport;
    return t->recv(t->context, from, tag + EXEC_TAGS, data, nbytes, request);
}

static rsd_status exec_test(void *context, void *request, int32_t *done)
{
    const rsd_transport *t = &((struct channel *)context)->transport;
    return t->test(t->context, request, done);
}

static void exec_cancel(void *context, void *request)
{
    const rsd_transport *t = &((struct channel *)context)->transport;
    t->cancel(t->context, request);
}

static rsd_status exec_allgather(void *context, const void *own, size_t nbytes, void *all,
                                 double timeout)
{
    const rsd_transport *t = &((struct channel *)context)->transport;
    return t->allgather(t->context, own, nbytes, all, timeout);
}

/* ---- the channel ---- */

rsd_status channel_open(struct channel *channel, const rsd_transport *transport, double timeout)
{
    channel->transport = *transport;
    channel->timeout = timeout;
    channel->for_execs = (rsd_transport){.struct_nbytes = sizeof(rsd_transport),
                                         .context = channel,
                                         .rank = transport->rank,
                                         .nranks = transport->nranks,
                                         .send = exec_send,
                                         .recv = exec_recv,
                                         .test = exec_test,
                                         .cancel = exec_cancel,
                                         .allgather = exec_allgather};
    return new_notices(channel, &channel->spare);
}

void channel_close(struct channel *channel)
{
    while (channel->spare) {
        struct notices *notices = channel->spare;
        channel->spare = notices->next;
        mem_free(notices->all);
        mem_free(notices->requests);
        mem_free(notices);
    }
}
