/* channel.c - sends or receives one message, in one of three ways:
 *
 *     over the transport        pack -> buffer -> send ... recv -> buffer -> unpack
 *     through shared memory     pack -> ring buffer -> unpack
 *     from the sender's arena   the receiver copies from the sender's array to its own
 *
 * Two buffers are used in turn. No function here waits.
 */
#include "exchange.h"

#include <stdatomic.h>

/* Small enough that a chunk is still in the cache when it is unpacked or combined. */
enum { SHARED_CHUNK_NBYTES = 512 << 10, REDUCE_CHUNK_NBYTES = 256 << 10 };

static uint64_t lesser_of(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint64_t reduce_chunk_nbytes(const struct exchange *x)
{
    return lesser_of(x->chunk, REDUCE_CHUNK_NBYTES);
}

/* Sender and receiver compute the same value, since it depends on the message only. */
uint64_t channel_chunk_nbytes(const struct exchange *x, const struct message *message, bool shared)
{
    uint64_t most = message->reduce ? reduce_chunk_nbytes(x)
                    : shared        ? lesser_of(x->chunk, SHARED_CHUNK_NBYTES)
                                    : x->chunk;
    return lesser_of(most, (message->nbytes + 63) / 64 * 64);
}

/* ---- positions ---- */

/* Returns the bytes of the next chunk: as many as fit, and for a reduction at most the rest of one box. */
static size_t next_chunk(const struct exchange *x, const struct channel *channel,
                         const struct position *position)
{
    uint64_t most = position->left;
    if (channel->message->reduce)
        most = x->boxes[position->box].packed.nbytes - position->at;
    return (size_t)lesser_of(most, channel->chunk);
}

static void move_position(const struct exchange *x, struct position *position, size_t n)
{
    position->left -= n;
    position->at += n;
    while (position->left && position->at >= x->boxes[position->box].packed.nbytes)
        position->at -= x->boxes[position->box++].packed.nbytes;
}

/* Packs or unpacks the next n bytes, and advances channel->here. */
static void copy_chunk(const struct exchange *x, struct channel *channel, char *packed, size_t n)
{
    struct position *here = &channel->here;
    while (n > 0) {
        const struct array_box *box = &x->boxes[here->box];
        size_t some = (size_t)lesser_of(box->packed.nbytes - here->at, n);
        if (channel->sending)
            array_box_pack(x, box,
                           box->from_destination ? x->arrays.dst[box->array]
                                                 : x->arrays.src[box->array],
                           here->at, some, packed);
        else
            array_box_unpack(x, box, here->at, some, packed);
        packed += some;
        n -= some;
        move_position(x, here, some);
    }
}

void channel_rewind(const struct exchange *x, struct channel *channel)
{
    const struct message *message = channel->message;
    channel->here = (struct position){.box = message->first_box, .left = message->nbytes};
    move_position(x, &channel->here, 0); /* skips boxes without bytes */
    channel->posted = channel->here;
    channel->before += channel->end;
    channel->first = channel->end = 0;
    channel->opened = channel->direct = false;
}

bool channel_is_finished(const struct channel *channel)
{
    return channel->here.left == 0 && channel->first == channel->end;
}

/* ---- messages ---- */

static int32_t message_tag(const struct message *message)
{
    _Static_assert(TAG_DATA + MAX_STAGES <= TAG_REDUCE && TAG_REDUCE < TAG_VOTE,
                   "reductions are in stage 0 only, and have one tag");
    return message->reduce ? TAG_REDUCE : TAG_DATA + message->stage;
}

static rsd_status progress_send(struct exchange *x, struct channel *channel, bool *moved)
{
    if (channel->first < channel->end) {
        struct chunk_buffer *oldest = &channel->buffers[channel->first % NBUFFERS];
        TRY(peer_test(x->peer, &oldest->request, moved));
        channel->first += !oldest->request.active;
    }
    if (channel->here.left == 0 || channel->end - channel->first == NBUFFERS)
        return RSD_OK;
    struct chunk_buffer *buffer = &channel->buffers[channel->end % NBUFFERS];
    buffer->nbytes = next_chunk(x, channel, &channel->here);
    copy_chunk(x, channel, buffer->data, buffer->nbytes);
    TRY(peer_send(x->peer, channel->message->peer, message_tag(channel->message), buffer->data,
                  buffer->nbytes, &buffer->request));
    channel->end++;
    *moved = true;
    return RSD_OK;
}

static rsd_status post_receives(struct exchange *x, struct channel *channel, bool *moved)
{
    while (channel->posted.left > 0 && channel->end - channel->first < NBUFFERS) {
        struct chunk_buffer *buffer = &channel->buffers[channel->end % NBUFFERS];
        buffer->nbytes = next_chunk(x, channel, &channel->posted);
        TRY(peer_recv(x->peer, channel->message->peer, message_tag(channel->message), buffer->data,
                      buffer->nbytes, &buffer->request));
        move_position(x, &channel->posted, buffer->nbytes);
        channel->end++;
        *moved = true;
    }
    return RSD_OK;
}

/* Returns the buffer of the first chunk in progress, or NULL if it has not arrived. */
static rsd_status first_arrived(struct exchange *x, struct channel *channel,
                                struct chunk_buffer **buffer)
{
    struct chunk_buffer *first = &channel->buffers[channel->first % NBUFFERS];
    bool moved = false;
    *buffer = NULL;
    if (channel->first == channel->end)
        return RSD_OK;
    TRY(peer_test(x->peer, &first->request, &moved));
    if (!first->request.active)
        *buffer = first;
    return RSD_OK;
}

static rsd_status progress_receive(struct exchange *x, struct channel *channel, bool *moved)
{
    struct chunk_buffer *buffer;
    TRY(post_receives(x, channel, moved));
    if (channel->message->reduce) /* the reducer reads them with channel_peek */
        return RSD_OK;
    TRY(first_arrived(x, channel, &buffer));
    if (!buffer)
        return RSD_OK;
    copy_chunk(x, channel, buffer->data, buffer->nbytes);
    channel->first++;
    *moved = true;
    return RSD_OK;
}

/* ---- shared memory ---- */

static uint64_t load_counter(const struct channel *channel, _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_acquire) - channel->before;
}

static void store_counter(const struct channel *channel, _Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, channel->before + value, memory_order_release);
}

static void write_ring(struct exchange *x, struct channel *channel, bool *moved)
{
    if (!channel->opened) {
        channel->opened = true;
        channel->direct = host_data_is_direct(x, channel->message);
        channel->ring->direct = channel->direct;
        if (channel->direct) {
            channel->here.left = 0;
            store_counter(channel, &channel->ring->written, ++channel->end);
        }
        *moved = true;
    }
    uint64_t nread = load_counter(channel, &channel->ring->read);
    if (nread > channel->first && nread <= channel->end) {
        channel->first = nread;
        *moved = true;
    }
    if (channel->here.left == 0 || channel->end - channel->first == NBUFFERS)
        return;
    struct chunk_buffer *buffer = &channel->buffers[channel->end % NBUFFERS];
    copy_chunk(x, channel, buffer->data, next_chunk(x, channel, &channel->here));
    store_counter(channel, &channel->ring->written, ++channel->end);
    *moved = true;
}

/* Returns whether a chunk can be read. The first time, also reads whether the sender's arrays are in its arena. */
static bool has_chunk(struct channel *channel)
{
    uint64_t nwritten = load_counter(channel, &channel->ring->written);
    if (nwritten == 0 || nwritten > NBUFFERS + channel->end ||
        (!channel->direct && nwritten == channel->end))
        return false;
    if (!channel->opened)
        channel->direct = channel->ring->direct != 0;
    channel->opened = true;
    return true;
}

static void count_read(struct channel *channel)
{
    channel->first = ++channel->end;
    store_counter(channel, &channel->ring->read, channel->end);
}

static rsd_status copy_direct(struct exchange *x, struct channel *channel)
{
    for (size_t i = 0; i < channel->ndirect; i++) {
        const struct copy_op *op = &x->program.copies[channel->first_direct + i];
        const char *array = host_rank_array(channel->host, op->src, op->from_destination);
        if (!array)
            return RSD_EPEER;
        copy_block(&x->copier, x->stream, &op->block, array + op->src_offset,
                   x->arrays.dst[op->dst] + op->dst_offset, 0, op->block.nrows);
    }
    channel->here.left = 0;
    count_read(channel);
    return RSD_OK;
}

static rsd_status next_ring_buffer(const struct channel *channel, char **data)
{
    *data = ring_buffer(&channel->host->segment, channel->ring, channel->end, channel->chunk);
    return *data ? RSD_OK
                 : fail(RSD_EPEER, "rank %d: ring buffer lies outside its shared memory",
                        (int)channel->host->rank);
}

static rsd_status read_ring(struct exchange *x, struct channel *channel, bool *moved)
{
    char *data;
    if (channel->here.left == 0 || channel->message->reduce || !has_chunk(channel))
        return RSD_OK;
    *moved = true;
    if (channel->direct)
        return copy_direct(x, channel);
    TRY(next_ring_buffer(channel, &data));
    copy_chunk(x, channel, data, next_chunk(x, channel, &channel->here));
    count_read(channel);
    return RSD_OK;
}

/* ---- all kinds ---- */

rsd_status channel_progress(struct exchange *x, struct channel *channel, bool *moved)
{
    if (!channel->host)
        return channel->sending ? progress_send(x, channel, moved)
                                : progress_receive(x, channel, moved);
    if (!channel->sending)
        return read_ring(x, channel, moved);
    write_ring(x, channel, moved);
    return RSD_OK;
}

rsd_status channel_peek(struct exchange *x, struct channel *channel, const struct array_box *box,
                        uint64_t at, size_t n, const char **data)
{
    struct chunk_buffer *buffer = NULL;
    char *shared;
    *data = NULL;
    if (!channel->host) {
        TRY(first_arrived(x, channel, &buffer));
        *data = buffer ? buffer->data : NULL;
        return RSD_OK;
    }
    if (!has_chunk(channel))
        return RSD_OK;
    if (!channel->direct) {
        TRY(next_ring_buffer(channel, &shared));
        *data = shared;
        return RSD_OK;
    }
    const char *array = host_rank_array(channel->host, box->array, box->from_destination);
    if (!array)
        return RSD_EPEER;
    array_box_pack(x, box, array, at, n, channel->buffers[0].data);
    *data = channel->buffers[0].data;
    return RSD_OK;
}

void channel_advance(struct exchange *x, struct channel *channel, size_t n)
{
    move_position(x, &channel->here, n);
    if (!channel->host)
        channel->first++;
    else if (!channel->direct || channel->here.left == 0)
        count_read(channel);
}

void channel_cancel(struct exchange *x, struct channel *channel)
{
    for (; !channel->host && channel->first < channel->end; channel->first++)
        if (!peer_cancel(x->peer, &channel->buffers[channel->first % NBUFFERS].request))
            x->lost = true;
}
