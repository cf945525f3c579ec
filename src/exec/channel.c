/* lanes.c - one parcel on its way from one rank to another.
 *
 *     messages        pack -> slot -> send ... recv -> slot -> unpack
 *     a neighbour     pack -> slot in shared memory -> unpack
 *     its arena       copied straight from its array to ours: the giver only waits
 *
 * Two slots take turns. A lane never waits: pushing it does what can be done now.
 */
#include "exec.h"

#include <stdatomic.h>

/* A chunk in shared memory should still be in the cache when it is unpacked, and so should one of a sum. */
enum { NEAR_CHUNK = 512 << 10, REDUCE_CHUNK = 256 << 10 };

uint64_t reduce_chunk(const struct exchange *x)
{
    return x->chunk < REDUCE_CHUNK ? x->chunk : REDUCE_CHUNK;
}

uint64_t lane_chunk(const struct exchange *x, const struct parcel *parcel, bool near)
{
    if (parcel->reduce)
        return reduce_chunk(x);
    return near && x->chunk > NEAR_CHUNK ? NEAR_CHUNK : x->chunk;
}

/* ---- going through a parcel ---- */

static void start_progress(struct progress *progress, const struct parcel *parcel)
{
    *progress = (struct progress){.op = parcel->first_op, .left = parcel->nbytes};
}

/* How long the next chunk is: as much as fits, and of a reduction no more than one piece. */
static size_t next_chunk(const struct exchange *x, const struct lane *lane,
                         const struct progress *progress)
{
    uint64_t most = progress->left;
    if (lane->parcel->reduce)
        most = x->ops[progress->op].nbytes - progress->at;
    return (size_t)(most < lane->chunk ? most : lane->chunk);
}

static void go_on(const struct exchange *x, struct progress *progress, size_t n)
{
    progress->left -= n;
    progress->at += n;
    while (progress->left && progress->at >= x->ops[progress->op].nbytes)
        progress->at -= x->ops[progress->op++].nbytes;
}

static void pack_chunk(const struct exchange *x, struct lane *lane, char *packed, size_t n)
{
    struct progress *here = &lane->here;
    while (n > 0) {
        const struct op *op = &x->ops[here->op];
        uint64_t rest = op->nbytes - here->at;
        size_t some = rest < n ? (size_t)rest : n;
        if (lane->sending)
            op_pack(x, op, op->from_destination ? x->dst[op->array] : x->src[op->array], here->at,
                    some, packed);
        else
            op_unpack(x, op, here->at, some, packed);
        packed += some;
        n -= some;
        go_on(x, here, some);
    }
}

void lane_rewind(const struct exchange *x, struct lane *lane)
{
    start_progress(&lane->here, lane->parcel);
    start_progress(&lane->asked, lane->parcel);
    go_on(x, &lane->here, 0); /* past pieces without bytes */
    go_on(x, &lane->asked, 0);
    lane->before += lane->end;
    lane->first = lane->end = 0;
    lane->opened = lane->direct = false;
}

bool lane_finished(const struct lane *lane)
{
    return lane->here.left == 0 && lane->first == lane->end;
}

bool lane_is_open(const struct exchange *x, int32_t rank, int32_t stage)
{
    for (size_t i = 0; i < x->nlanes; i++) {
        const struct lane *lane = &x->lanes[i];
        if (lane->parcel->peer == rank && lane->parcel->stage <= stage && !lane_finished(lane))
            return true;
    }
    return false;
}

/* ---- messages ---- */

static int32_t tag_of(const struct parcel *parcel)
{
    return parcel->stage + (parcel->reduce ? REDUCE_TAG : COPY_TAG);
}

static rsd_status push_sends(struct exchange *x, struct lane *lane, bool *moved)
{
    const rsd_transport *t = &x->transport;
    int32_t done = 0;
    if (lane->first < lane->end) {
        TRY(t->test(t->context, lane->slots[lane->first % NSLOTS].request, &done));
        lane->first += done != 0;
        *moved = *moved || done;
    }
    if (lane->here.left == 0 || lane->end - lane->first == NSLOTS)
        return RSD_OK;
    struct slot *slot = &lane->slots[lane->end % NSLOTS];
    slot->nbytes = next_chunk(x, lane, &lane->here);
    pack_chunk(x, lane, slot->data, slot->nbytes);
    TRY(t->send(t->context, lane->parcel->peer, tag_of(lane->parcel), slot->data, slot->nbytes,
                &slot->request));
    lane->end++;
    *moved = true;
    return RSD_OK;
}

static rsd_status ask(struct exchange *x, struct lane *lane, bool *moved)
{
    const rsd_transport *t = &x->transport;
    while (lane->asked.left > 0 && lane->end - lane->first < NSLOTS) {
        struct slot *slot = &lane->slots[lane->end % NSLOTS];
        slot->nbytes = next_chunk(x, lane, &lane->asked);
        TRY(t->recv(t->context, lane->parcel->peer, tag_of(lane->parcel), slot->data, slot->nbytes,
                    &slot->request));
        go_on(x, &lane->asked, slot->nbytes);
        lane->end++;
        *moved = true;
    }
    return RSD_OK;
}

/* Whether the first chunk has arrived; its request is then used up. */
static rsd_status arrived(struct exchange *x, struct lane *lane, bool *answer)
{
    const rsd_transport *t = &x->transport;
    int32_t done = 1;
    *answer = false;
    if (lane->first == lane->end)
        return RSD_OK;
    struct slot *slot = &lane->slots[lane->first % NSLOTS];
    if (slot->request)
        TRY(t->test(t->context, slot->request, &done));
    if (done)
        slot->request = NULL;
    *answer = done != 0;
    return RSD_OK;
}

static rsd_status push_receives(struct exchange *x, struct lane *lane, bool *moved)
{
    bool there;
    TRY(ask(x, lane, moved));
    if (lane->parcel->reduce) /* taken by whoever combines */
        return RSD_OK;
    TRY(arrived(x, lane, &there));
    if (!there)
        return RSD_OK;
    struct slot *slot = &lane->slots[lane->first % NSLOTS];
    pack_chunk(x, lane, slot->data, slot->nbytes);
    lane->first++;
    *moved = true;
    return RSD_OK;
}

/* ---- neighbours ---- */

static uint64_t counted(const struct lane *lane, _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_acquire) - lane->before;
}

static void count(const struct lane *lane, _Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, lane->before + value, memory_order_release);
}

static void give(struct exchange *x, struct lane *lane, bool *moved)
{
    if (!lane->opened) {
        lane->opened = true;
        lane->direct = parcel_is_direct(x, lane->parcel);
        lane->berth->direct = lane->direct;
        if (lane->direct) {
            lane->here.left = 0;
            count(lane, &lane->berth->sent, ++lane->end);
        }
        *moved = true;
    }
    uint64_t taken = counted(lane, &lane->berth->taken);
    if (taken > lane->first && taken <= lane->end) {
        lane->first = taken;
        *moved = true;
    }
    if (lane->here.left == 0 || lane->end - lane->first == NSLOTS)
        return;
    struct slot *slot = &lane->slots[lane->end % NSLOTS];
    size_t n = next_chunk(x, lane, &lane->here);
    pack_chunk(x, lane, slot->data, n);
    count(lane, &lane->berth->sent, ++lane->end);
    *moved = true;
}

/* Whether something new was put there; the first time, whether we are to take it ourselves. */
static bool offered(struct lane *lane)
{
    uint64_t sent = counted(lane, &lane->berth->sent);
    if (sent == 0 || sent > NSLOTS + lane->end || (!lane->direct && sent == lane->end))
        return false;
    if (!lane->opened)
        lane->direct = lane->berth->direct != 0;
    lane->opened = true;
    return true;
}

static void taken(struct lane *lane)
{
    lane->end++;
    lane->first = lane->end;
    count(lane, &lane->berth->taken, lane->end);
}

static rsd_status copy_directly(struct exchange *x, struct lane *lane)
{
    for (size_t i = 0; i < lane->ndirect; i++) {
        const struct nest *nest = &x->nests.nests[x->direct[lane->first_direct + i]];
        const char *array = neighbour_array(lane->near, nest->src, nest->from_destination);
        if (!array)
            return RSD_EPEER;
        copy_block(&x->copier, x->stream, &nest->block, array + nest->src_offset,
                   x->dst[nest->dst] + nest->dst_offset, 0, nest->block.nrows);
    }
    lane->here.left = 0;
    taken(lane);
    return RSD_OK;
}

static rsd_status take(struct exchange *x, struct lane *lane, bool *moved)
{
    if (lane->here.left == 0 || lane->parcel->reduce || !offered(lane))
        return RSD_OK;
    *moved = true;
    if (lane->direct)
        return copy_directly(x, lane);
    size_t n = next_chunk(x, lane, &lane->here);
    char *data = neighbour_slot(lane->near, lane->berth, lane->end, lane->chunk);
    if (!data)
        return fail(RSD_EPEER, "rank %d: its berth moved", (int)lane->near->rank);
    pack_chunk(x, lane, data, n);
    taken(lane);
    return RSD_OK;
}

/* ---- all kinds ---- */

rsd_status lane_push(struct exchange *x, struct lane *lane, bool *moved)
{
    if (lane->near && lane->sending)
        give(x, lane, moved);
    else if (lane->near)
        return take(x, lane, moved);
    else if (lane->sending)
        return push_sends(x, lane, moved);
    else
        return push_receives(x, lane, moved);
    return RSD_OK;
}

rsd_status lane_front(struct exchange *x, struct lane *lane, const struct op *op, uint64_t at,
                      size_t n, const char **data)
{
    bool there;
    *data = NULL;
    if (!lane->near) {
        TRY(arrived(x, lane, &there));
        if (there)
            *data = lane->slots[lane->first % NSLOTS].data;
        return RSD_OK;
    }
    if (!offered(lane))
        return RSD_OK;
    if (!lane->direct) {
        *data = neighbour_slot(lane->near, lane->berth, lane->end, lane->chunk);
        return *data ? RSD_OK : fail(RSD_EPEER, "rank %d: its berth moved", (int)lane->near->rank);
    }
    const char *array = neighbour_array(lane->near, op->array, op->from_destination);
    if (!array)
        return RSD_EPEER;
    op_pack(x, op, array, at, n, lane->slots[0].data);
    *data = lane->slots[0].data;
    return RSD_OK;
}

void lane_pop(struct exchange *x, struct lane *lane, size_t n)
{
    go_on(x, &lane->here, n);
    if (!lane->near)
        lane->first++;
    else if (!lane->direct || lane->here.left == 0)
        taken(lane);
}

void lane_cancel(struct exchange *x, struct lane *lane)
{
    const rsd_transport *t = &x->transport;
    if (lane->near)
        return;
    for (; lane->first < lane->end; lane->first++) {
        struct slot *slot = &lane->slots[lane->first % NSLOTS];
        if (slot->request) {
            t->cancel(t->context, slot->request);
            x->lost = true;
        }
    }
}
