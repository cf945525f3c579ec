/* channel.c - sends or receives one message, in one of three ways:
 *
 *     messages                pack -> buffer -> send ... recv -> buffer -> unpack
 *     a rank of the host      pack -> ring buffer in shared memory -> unpack
 *     its arena, its device   copied from its array to ours: the sender only waits
 *
 * Device memory is offered first, and packed if the receiver cannot read it. The offer counts as a chunk.
 * Two buffers take turns. A channel never waits: channel_progress does what can be done now.
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

size_t channel_next_chunk(const struct exchange *x, const struct channel *channel,
                          const struct position *position)
{
    uint64_t most = position->left;
    if (channel->message->reduce)
        most = x->boxes[position->box].packed.nbytes - position->at;
    return (size_t)lesser_of(most, channel->chunk);
}

void channel_move_position(const struct exchange *x, struct position *position, size_t n)
{
    position->left -= n;
    position->at += n;
    while (position->left && position->at >= x->boxes[position->box].packed.nbytes)
        position->at -= x->boxes[position->box++].packed.nbytes;
}

rsd_status channel_copy_boxes(struct exchange *x, struct channel *channel, char *packed, size_t n)
{
    struct position *here = &channel->here;
    while (n > 0) {
        const struct array_box *box = &x->boxes[here->box];
        size_t some = (size_t)lesser_of(box->packed.nbytes - here->at, n);
        if (x->on_device)
            TRY(exchange_device_add_box(x, box, channel->sending, here->at, some, packed));
        else if (channel->sending)
            array_box_pack(x, box, x->arrays.addresses[box->array], here->at, some, packed);
        else
            array_box_unpack(x, box, here->at, some, packed);
        packed += some;
        n -= some;
        channel_move_position(x, here, some);
    }
    return RSD_OK;
}

/* Packs the next n bytes, or unpacks them. On a device that takes until chunk_is_copied. */
static rsd_status copy_chunk(struct exchange *x, struct channel *channel, char *packed, size_t n)
{
    if (!x->on_device)
        return channel_copy_boxes(x, channel, packed, n);
    exchange_device_begin_boxes(x);
    TRY(channel_copy_boxes(x, channel, packed, n));
    channel->copying = true;
    return exchange_device_queue_boxes(x, &channel->mark);
}

/* Whether what was begun last is complete. */
static rsd_status chunk_is_copied(struct exchange *x, struct channel *channel, bool *copied)
{
    *copied = true;
    if (channel->copying)
        TRY(exchange_device_test(x, channel->mark, copied));
    channel->copying = !*copied;
    return RSD_OK;
}

void channel_rewind(const struct exchange *x, struct channel *channel)
{
    const struct message *message = channel->message;
    channel->here = (struct position){.box = message->first_box, .left = message->nbytes};
    channel_move_position(x, &channel->here, 0); /* skips boxes without bytes */
    channel->posted = channel->here;
    channel->before += channel->end;
    channel->first = channel->end = channel->arrived = 0;
    channel->opened = channel->offered = channel->copying = false;
    channel->direct = PACKED;
}

bool channel_is_finished(const struct channel *channel)
{
    return channel->here.left == 0 && channel->first == channel->end && !channel->copying;
}

/* ---- messages ---- */

static int32_t message_tag(const struct message *message)
{
    _Static_assert(TAG_DATA + MAX_STAGES <= TAG_REDUCE && TAG_REDUCE < TAG_VOTE,
                   "reductions are in stage 0 only, and have one tag");
    return message->reduce ? TAG_REDUCE : TAG_DATA + message->stage;
}

rsd_device_message channel_device_message(const struct channel *channel,
                                          const struct chunk_buffer *buffer)
{
    return (rsd_device_message){.peer = channel->message->peer,
                                .tag = message_tag(channel->message),
                                .sends = channel->sending,
                                .data = buffer->data,
                                .nbytes = buffer->nbytes};
}

static rsd_status send_buffer(struct exchange *x, struct channel *channel, bool *moved)
{
    struct chunk_buffer *buffer = &channel->buffers[channel->end % NBUFFERS];
    TRY(peer_send(x->peer, channel->message->peer, message_tag(channel->message), buffer->data,
                  buffer->nbytes, &buffer->request));
    channel->end++;
    *moved = true;
    return RSD_OK;
}

/* Sends the next chunk of a message, without waiting: copies it into a free buffer, and sends that. */
static rsd_status progress_send(struct exchange *x, struct channel *channel, bool *moved)
{
    bool was_copying = channel->copying, copied;
    if (channel->first < channel->end) {
        struct chunk_buffer *oldest = &channel->buffers[channel->first % NBUFFERS];
        TRY(peer_test(x->peer, &oldest->request, moved));
        channel->first += !oldest->request.active;
    }
    if (!was_copying) {
        if (channel->here.left == 0 || channel->end - channel->first == NBUFFERS)
            return RSD_OK;
        struct chunk_buffer *buffer = &channel->buffers[channel->end % NBUFFERS];
        buffer->nbytes = channel_next_chunk(x, channel, &channel->here);
        TRY(copy_chunk(x, channel, buffer->data, buffer->nbytes));
    }
    TRY(chunk_is_copied(x, channel, &copied));
    return copied ? send_buffer(x, channel, moved) : RSD_OK;
}

/* Posts a receive for each free buffer. */
static rsd_status post_receives(struct exchange *x, struct channel *channel, bool *moved)
{
    while (channel->posted.left > 0 && channel->end - channel->first < NBUFFERS) {
        struct chunk_buffer *buffer = &channel->buffers[channel->end % NBUFFERS];
        buffer->nbytes = channel_next_chunk(x, channel, &channel->posted);
        TRY(peer_recv(x->peer, channel->message->peer, message_tag(channel->message), buffer->data,
                      buffer->nbytes, &buffer->request));
        channel_move_position(x, &channel->posted, buffer->nbytes);
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
    if (channel->in_rounds && channel->first < channel->arrived)
        *buffer = first;
    if (channel->in_rounds || channel->first == channel->end)
        return RSD_OK;
    TRY(peer_test(x->peer, &first->request, &moved));
    if (!first->request.active)
        *buffer = first;
    return RSD_OK;
}

/* Receives the chunks of a message, without waiting, and copies them to their arrays. */
static rsd_status progress_receive(struct exchange *x, struct channel *channel, bool *moved)
{
    struct chunk_buffer *buffer;
    bool copied;
    TRY(post_receives(x, channel, moved));
    if (channel->message->reduce) /* the reducer reads them with channel_peek */
        return RSD_OK;
    if (!channel->copying) {
        TRY(first_arrived(x, channel, &buffer));
        if (!buffer)
            return RSD_OK;
        TRY(copy_chunk(x, channel, buffer->data, buffer->nbytes));
    }
    TRY(chunk_is_copied(x, channel, &copied));
    channel->first += copied;
    *moved = *moved || copied;
    return RSD_OK;
}

/* ---- shared memory ---- */

/* Counters of a ring, as numbers of chunks of this run. */
static uint64_t load_counter(const struct channel *channel, _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_acquire) - channel->before;
}

static void store_counter(const struct channel *channel, _Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, channel->before + value, memory_order_release);
}

/* Says how the receiver gets the message. */
static void open_ring(struct exchange *x, struct channel *channel)
{
    channel->opened = true;
    if (host_data_is_direct(x, channel->message))
        channel->direct = DIRECT_ARENA;
    else if (x->on_device && !channel->was_refused && exchange_device_exports(x, channel->message))
        channel->direct = DIRECT_DEVICE;
    else if (x->on_device)
        exchange_device_count_packed(x);
    channel->ring->direct = (int32_t)channel->direct;
    channel->offered = channel->direct == DIRECT_DEVICE;
    if (channel->direct == DIRECT_ARENA)
        channel->here.left = 0;
    if (channel->direct)
        store_counter(channel, &channel->ring->written, ++channel->end);
}

/* The receiver has read the device memory that was offered, or refused it. */
static void end_offer(struct exchange *x, struct channel *channel)
{
    channel->offered = false;
    channel->was_refused = load_counter(channel, &channel->ring->refused) == channel->end;
    if (!channel->was_refused) {
        channel->here.left = 0;
        return;
    }
    channel->direct = PACKED;
    exchange_device_count_packed(x);
}

/* Writes the next chunk to a ring buffer, without waiting. An offer of device memory has no chunks. */
static rsd_status write_ring(struct exchange *x, struct channel *channel, bool *moved)
{
    bool copied;
    if (!channel->opened) {
        open_ring(x, channel);
        *moved = true;
    }
    uint64_t nread = load_counter(channel, &channel->ring->read);
    if (nread > channel->first && nread <= channel->end) {
        channel->first = nread;
        *moved = true;
        if (channel->offered)
            end_offer(x, channel);
    }
    if (!channel->copying) {
        if (channel->offered || channel->here.left == 0 ||
            channel->end - channel->first == NBUFFERS)
            return RSD_OK;
        TRY(copy_chunk(x, channel, channel->buffers[channel->end % NBUFFERS].data,
                       channel_next_chunk(x, channel, &channel->here)));
    }
    TRY(chunk_is_copied(x, channel, &copied));
    if (copied) {
        store_counter(channel, &channel->ring->written, ++channel->end);
        *moved = true;
    }
    return RSD_OK;
}

/* Whether a chunk can be read; the first time, also whether it has to be copied from the sender's arrays. */
static bool has_chunk(struct channel *channel)
{
    uint64_t nwritten = load_counter(channel, &channel->ring->written);
    if (nwritten == 0 || nwritten > NBUFFERS + channel->end ||
        (!channel->direct && nwritten == channel->end))
        return false;
    if (!channel->opened) {
        int32_t direct = channel->ring->direct;
        channel->direct = direct == DIRECT_DEVICE ? DIRECT_DEVICE : direct ? DIRECT_ARENA : PACKED;
    }
    channel->opened = true;
    return true;
}

static void count_read(struct channel *channel)
{
    channel->first = ++channel->end;
    store_counter(channel, &channel->ring->read, channel->end);
}

/* The offer of device memory counts as read; the next chunks are packed. */
static void refuse_device(struct channel *channel)
{
    channel->direct = PACKED;
    store_counter(channel, &channel->ring->refused, channel->end + 1);
    count_read(channel);
}

/* Copies from arrays in an arena. */
static rsd_status copy_from_arena(struct exchange *x, struct channel *channel)
{
    for (size_t i = 0; i < channel->ndirect; i++) {
        const struct copy_op *op = &x->program.copies[channel->first_direct + i];
        const char *array = host_rank_array(channel->host, op->src);
        if (!array)
            return RSD_EPEER;
        copy_block(&x->copier, x->stream, &op->block, array + op->src_offset,
                   x->arrays.addresses[op->dst] + op->dst_offset, 0, op->block.nrows);
    }
    return RSD_OK;
}

/* Copies from the arrays of the sender, if this rank can read them. */
static rsd_status copy_direct(struct exchange *x, struct channel *channel)
{
    if (!x->on_device)
        return copy_from_arena(x, channel);
    TRY(exchange_device_open(x, channel));
    channel->copying = true;
    return exchange_device_copy_direct(x, channel);
}

/* Whether device memory that is offered can be read; if not, it is refused. The reducer reads packed terms. */
static bool takes_offer(struct exchange *x, struct channel *channel)
{
    if (channel->direct != DIRECT_DEVICE ||
        (x->on_device && !channel->message->reduce && exchange_device_open(x, channel) == RSD_OK))
        return true;
    refuse_device(channel);
    return false;
}

static rsd_status next_ring_buffer(const struct channel *channel, char **data)
{
    *data = ring_buffer(&channel->host->segment, channel->ring, channel->end, channel->chunk);
    return *data ? RSD_OK
                 : fail(RSD_EPEER, "rank %d: ring buffer lies outside its shared memory",
                        (int)channel->host->rank);
}

/* Begins to copy from the sender's arrays or from the next ring buffer. chunk_is_copied says when it is done. */
static rsd_status begin_reading(struct exchange *x, struct channel *channel)
{
    char *data;
    if (channel->direct)
        return copy_direct(x, channel);
    TRY(next_ring_buffer(channel, &data));
    return copy_chunk(x, channel, data, channel_next_chunk(x, channel, &channel->here));
}

/* Reads the next chunk from a ring buffer, or takes an offer of device memory, without waiting. */
static rsd_status read_ring(struct exchange *x, struct channel *channel, bool *moved)
{
    bool copied;
    if (channel->message->reduce && !x->sums_on_device) /* the reducer takes them */
        return RSD_OK;
    if (!channel->copying) {
        if (channel->here.left == 0 || !has_chunk(channel))
            return RSD_OK;
        *moved = true;
        if (!takes_offer(x, channel))
            return RSD_OK;
        TRY(begin_reading(x, channel));
    }
    TRY(chunk_is_copied(x, channel, &copied));
    if (!copied)
        return RSD_OK;
    if (channel->direct)
        channel->here.left = 0;
    count_read(channel);
    *moved = true;
    return RSD_OK;
}

bool channels_decide(struct exchange *x, int32_t stage, bool *together)
{
    *together =
        stage > 0 || x->ncombined == 0 || x->program.nsums > 0; /* else terms of other hosts */
    for (size_t i = 0; i < x->nchannels && *together; i++) {
        struct channel *channel = &x->channels[i];
        if (channel->sending || channel->message->stage != stage)
            continue;
        if (channel->host && !has_chunk(channel))
            return false;
        *together = channel->host && channel->direct;
    }
    for (size_t i = 0; i < x->nchannels && *together; i++) {
        const struct channel *channel = &x->channels[i];
        if (!channel->sending && channel->message->stage == stage)
            *together = exchange_device_open(x, channel) == RSD_OK;
    }
    return true;
}

/* ---- all kinds ---- */

rsd_status channel_progress(struct exchange *x, struct channel *channel, bool *moved)
{
    if (channel->in_rounds) /* exchange_device_progress does them together */
        return RSD_OK;
    if (!channel->host)
        return channel->sending ? progress_send(x, channel, moved)
                                : progress_receive(x, channel, moved);
    return channel->sending ? write_ring(x, channel, moved) : read_ring(x, channel, moved);
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
    if (!has_chunk(channel) || !takes_offer(x, channel))
        return RSD_OK;
    if (!channel->direct) {
        TRY(next_ring_buffer(channel, &shared));
        *data = shared;
        return RSD_OK;
    }
    const char *array = host_rank_array(channel->host, box->array);
    if (!array)
        return RSD_EPEER;
    array_box_pack(x, box, array, at, n, channel->buffers[0].data);
    *data = channel->buffers[0].data;
    return RSD_OK;
}

void channel_advance(struct exchange *x, struct channel *channel, size_t n)
{
    channel_move_position(x, &channel->here, n);
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
