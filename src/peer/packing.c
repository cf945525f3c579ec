/* packing.c - packs values into the payload of a step, sends and receives it in chunks, and unpacks them. */
#include "peer_state.h"

enum { CHUNK_NBYTES = 1 << 24 };

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
        return fail(RSD_EPEER, "a rank sent %zu bytes where at least %zu were expected", payload->n,
                    *at + n);
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

/* ---- messages ---- */

/* Tests the chunk in progress, and counts its bytes as done. Sets *moved if it is. */
static rsd_status test_chunk(const struct peer *peer, struct chunked_payload *payload, bool *moved)
{
    bool done = false;
    TRY(peer_test(peer, &payload->request, &done));
    payload->done += done ? payload->chunk : 0;
    *moved = *moved || done;
    return RSD_OK;
}

/* Returns the bytes of the next chunk. 0: there is none. */
static size_t start_chunk(struct chunked_payload *payload)
{
    size_t left = payload->nbytes - payload->done;
    return payload->chunk = left < CHUNK_NBYTES ? left : CHUNK_NBYTES;
}

rsd_status payload_send_chunk(const struct peer *peer, int32_t to, int32_t tag,
                              struct chunked_payload *payload, bool *moved)
{
    if (payload->request.active)
        return test_chunk(peer, payload, moved);
    if (start_chunk(payload) == 0)
        return RSD_OK;
    return peer_send(peer, to, tag, payload->data + payload->done, payload->chunk,
                     &payload->request);
}

rsd_status payload_recv_chunk(const struct peer *peer, int32_t from, int32_t tag,
                              struct chunked_payload *payload, struct payload *received,
                              bool *moved)
{
    if (payload->request.active) {
        TRY(test_chunk(peer, payload, moved));
        received->n = payload->done;
        return RSD_OK;
    }
    size_t n = start_chunk(payload);
    TRY(GROW(received->bytes, received->capacity, payload->done + n + 1));
    payload->data = received->bytes;
    return n == 0 ? RSD_OK
                  : peer_recv(peer, from, tag, payload->data + payload->done, n, &payload->request);
}
