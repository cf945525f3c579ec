/* packing.c - packs values into the payload of a step, and unpacks them. */
#include "peer.h"

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
