/* peer.c - a group of ranks over a transport, and messages between them. */
#include "peer_state.h"

_Static_assert((int)TAG_DATA + (int)MAX_STAGES <= (int)TAG_REDUCE, "a stage has a tag of its own");
_Static_assert((int)TAG_NEXT <= (int)TAG_STASH, "tags of execs are not those of a stash");
_Static_assert((int)TAG_STASH + (int)TAG_NEXT <= (int)TAG_STEP, "nor are those those of steps");

rsd_status peer_check_transport(const rsd_transport *given, rsd_transport *transport)
{
    TRY(options_copy("rsd_transport", given, transport, sizeof *transport));
    if (transport->rank < 0 || transport->rank >= transport->nranks)
        return fail(RSD_EINVAL, "rank %d is out of range: the transport has %d ranks",
                    (int)transport->rank, (int)transport->nranks);
    if (!transport->send || !transport->recv || !transport->test || !transport->cancel)
        return fail(RSD_EINVAL, "transport lacks send, recv, test or cancel");
    return RSD_OK;
}

rsd_status peer_open(const rsd_transport *transport, double timeout, int32_t first_tag,
                     struct peer **peer)
{
    struct peer *made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    made->transport = *transport;
    made->timeout = timeout > 0 ? timeout : DEFAULT_TIMEOUT;
    made->first_tag = first_tag;
    made->distance = 1;
    made->suspect = -1;
    *peer = made;
    return RSD_OK;
}

void peer_close(struct peer *peer)
{
    if (!peer)
        return;
    peer_break(peer);
    host_close(peer);
    if (!peer->lost)
        mem_free(peer);
}

int32_t peer_rank(const struct peer *peer)
{
    return peer->transport.rank;
}

int32_t peer_nranks(const struct peer *peer)
{
    return peer->transport.nranks;
}

/* ---- messages ---- */

rsd_status peer_send(const struct peer *peer, int32_t to, int32_t tag, const void *data,
                     size_t nbytes, struct peer_request *request)
{
    const rsd_transport *t = &peer->transport;
    TRY(t->send(t->context, to, peer->first_tag + tag, data, nbytes, &request->request));
    request->active = true;
    return RSD_OK;
}

rsd_status peer_recv(const struct peer *peer, int32_t from, int32_t tag, void *data, size_t nbytes,
                     struct peer_request *request)
{
    const rsd_transport *t = &peer->transport;
    TRY(t->recv(t->context, from, peer->first_tag + tag, data, nbytes, &request->request));
    request->active = true;
    return RSD_OK;
}

bool peer_takes_device(const struct peer *peer)
{
    return peer->transport.exchange != NULL;
}

int peer_device(const struct peer *peer)
{
    return peer->transport.exchange ? (int)peer->transport.device : -1;
}

rsd_status peer_exchange(const struct peer *peer, size_t n, rsd_device_message *messages,
                         struct peer_request *request)
{
    const rsd_transport *t = &peer->transport;
    for (size_t i = 0; i < n; i++)
        messages[i].tag += peer->first_tag;
    TRY(t->exchange(t->context, n, messages, &request->request));
    request->active = true;
    return RSD_OK;
}

rsd_status peer_test(const struct peer *peer, struct peer_request *request, bool *moved)
{
    const rsd_transport *t = &peer->transport;
    int32_t done = 0;
    if (!request->active)
        return RSD_OK;
    TRY(t->test(t->context, request->request, &done));
    if (done) {
        request->active = false;
        *moved = true;
    }
    return RSD_OK;
}

bool peer_cancel(const struct peer *peer, struct peer_request *request)
{
    const rsd_transport *t = &peer->transport;
    if (!request->active)
        return true;
    request->active = false;
    return t->cancel(t->context, request->request) != 0;
}

void peer_break(struct peer *peer)
{
    bool sent = peer_cancel(peer, &peer->send), received = peer_cancel(peer, &peer->recv);
    peer->lost = peer->lost || !sent || !received;
    peer->broken = true;
    peer_wait_end(peer);
}

rsd_status status_received(int64_t number)
{
    bool known = number == (int32_t)number &&
                 strcmp(rsd_status_name((rsd_status)number), "unknown status") != 0;
    return known ? (rsd_status)number : RSD_EPEER;
}

rsd_status peer_check_usable(const struct peer *peer)
{
    return peer->broken ? fail(RSD_EINVAL, "an earlier call failed: this can only be freed")
                        : RSD_OK;
}
