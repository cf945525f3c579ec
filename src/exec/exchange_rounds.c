/* exchange_rounds.c - messages in the memory of a device, by a transport that takes it.
 *
 * In a round, each message of the stage sends its next chunk. All chunks of a round are packed by one launch, sent and
 * received as one group of the transport, and unpacked by one launch. Two rounds are in progress at a time, each with
 * its own buffers. Rounds need no agreement: every message has a chunk in each round until it ends, so two ranks have
 * the same messages between them in the same round. That is the order that NCCL needs.
 *
 *     round 0    | pack | exchange | unpack |
 *     round 1           | pack |   exchange   | unpack |
 *     round 2                  | pack |           exchange ...
 */
#include "exchange_device.h"

struct round_group {
    struct peer_request request;
    uint64_t pack_mark;
};

struct rounds {
    struct round_group groups[NBUFFERS];
    /* rounds of this stage: those that are packed, started, received, and whose unpacking began and ended */
    uint64_t packed, started, finished, unpacked, cleared;
    uint64_t unpack_mark;
    rsd_device_message *messages; /* one per channel */
    struct memory_buffer buffers;
};

/* ---- life ---- */

/* Returns whether a message goes by rounds: to another host, and its terms are whole elements. */
static bool joins_rounds(const struct exchange *x, const struct channel *channel)
{
    return !channel->host && (!channel->message->reduce || x->terms_align);
}

rsd_status rounds_start(struct exchange *x, struct memory_device *device, struct rounds **out)
{
    size_t n = 0;
    for (size_t i = 0; peer_takes_device(x->peer) && i < x->nchannels; i++)
        n += joins_rounds(x, &x->channels[i]);
    if (n == 0)
        return RSD_OK;
    struct rounds *rounds = mem_new(1, sizeof *rounds);
    if (!rounds)
        return RSD_ENOMEM;
    rounds->messages = mem_new(n, sizeof *rounds->messages);
    rsd_status status = rounds->messages ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = device->kind->buffer_new(device, false, x->buffers_nbytes, &rounds->buffers);
    if (status) {
        rounds_free(rounds, false);
        return status;
    }
    for (size_t i = 0; i < x->nchannels; i++) {
        struct channel *channel = &x->channels[i];
        channel->in_rounds = joins_rounds(x, channel);
        for (int k = 0; channel->in_rounds && k < NBUFFERS; k++)
            channel->buffers[k].data =
                rounds->buffers.memory + (channel->buffers[k].data - x->buffers);
    }
    *out = rounds;
    return RSD_OK;
}

void rounds_free(struct rounds *rounds, bool lost)
{
    if (!rounds)
        return;
    if (!lost)
        memory_buffer_free(&rounds->buffers);
    mem_free(rounds->messages);
    mem_free(rounds);
}

void rounds_begin_stage(struct rounds *rounds)
{
    if (rounds)
        rounds->packed = rounds->started = rounds->finished = rounds->unpacked = rounds->cleared =
            0;
}

bool rounds_cancel(struct exchange *x, struct rounds *rounds)
{
    bool ended = true;
    for (int k = 0; rounds && k < NBUFFERS; k++)
        ended = peer_cancel(x->peer, &rounds->groups[k].request) && ended;
    return ended;
}

/* ---- the channels of a stage ---- */

/* Returns the next channel of the current stage that goes by rounds, from number *i on, and advances *i. NULL: none. */
static struct channel *next_in_rounds(struct exchange *x, size_t *i, bool sending)
{
    while (*i < x->nchannels) {
        struct channel *channel = &x->channels[(*i)++];
        if (channel->in_rounds && channel->sending == sending &&
            channel->message->stage == x->stage)
            return channel;
    }
    return NULL;
}

/* Whether a message has chunks that are not packed yet. */
static bool has_more_to_pack(struct exchange *x)
{
    const struct channel *channel;
    for (size_t i = 0; (channel = next_in_rounds(x, &i, true));)
        if (channel->here.left > 0)
            return true;
    return false;
}

/* ---- the steps of a round ---- */

/* Packs the next chunk of every message into buffers that no group uses. */
static rsd_status pack_round(struct exchange *x, struct rounds *rounds, bool *moved)
{
    uint64_t number = rounds->packed;
    struct channel *channel;
    if (number >= rounds->finished + NBUFFERS || !has_more_to_pack(x))
        return RSD_OK;
    exchange_device_begin_boxes(x);
    for (size_t i = 0; (channel = next_in_rounds(x, &i, true));) {
        struct chunk_buffer *buffer = &channel->buffers[number % NBUFFERS];
        if (channel->here.left == 0)
            continue;
        buffer->nbytes = channel_next_chunk(x, channel, &channel->here);
        TRY(channel_copy_boxes(x, channel, buffer->data, buffer->nbytes));
        channel->end++;
    }
    TRY(exchange_device_queue_boxes(x, &rounds->groups[number % NBUFFERS].pack_mark));
    rounds->packed++;
    *moved = true;
    return RSD_OK;
}

/* Whether the chunks that a round sends are packed, and the buffers that it receives into are free. */
static rsd_status is_round_ready(struct exchange *x, struct rounds *rounds, bool *ready)
{
    uint64_t number = rounds->started;
    const struct channel *channel;
    *ready = number < rounds->packed || !has_more_to_pack(x);
    for (size_t i = 0; (channel = next_in_rounds(x, &i, false));)
        if (channel->posted.left > 0 && channel->end - channel->first == NBUFFERS)
            *ready = false;
    if (*ready && number < rounds->packed)
        TRY(exchange_device_test(x, rounds->groups[number % NBUFFERS].pack_mark, ready));
    return RSD_OK;
}

/* Lists the chunks that this round sends and receives, in the order of the channels, and returns their number. */
static size_t list_messages(struct exchange *x, struct rounds *rounds)
{
    uint64_t number = rounds->started;
    struct channel *channel;
    size_t n = 0;
    for (size_t i = 0; (channel = next_in_rounds(x, &i, false));) {
        struct chunk_buffer *buffer = &channel->buffers[number % NBUFFERS];
        if (channel->posted.left == 0)
            continue;
        buffer->nbytes = channel_next_chunk(x, channel, &channel->posted);
        channel_move_position(x, &channel->posted, buffer->nbytes);
        channel->end++;
        rounds->messages[n++] = channel_device_message(channel, buffer);
    }
    for (size_t i = 0; (channel = next_in_rounds(x, &i, true));)
        if (channel->end > number)
            rounds->messages[n++] =
                channel_device_message(channel, &channel->buffers[number % NBUFFERS]);
    return n;
}

/* Starts the messages of the next round, if its buffers are free and packed. */
static rsd_status exchange_round(struct exchange *x, struct rounds *rounds, bool *moved)
{
    bool ready;
    if (rounds->started >= rounds->finished + NBUFFERS)
        return RSD_OK;
    TRY(is_round_ready(x, rounds, &ready));
    size_t n = ready ? list_messages(x, rounds) : 0;
    if (n == 0)
        return RSD_OK;
    TRY(peer_exchange(x->peer, n, rounds->messages,
                      &rounds->groups[rounds->started % NBUFFERS].request));
    rounds->started++;
    *moved = true;
    return RSD_OK;
}

/* Finds whether the oldest round in progress is sent and received. */
static rsd_status receive_round(struct exchange *x, struct rounds *rounds, bool *moved)
{
    struct round_group *group = &rounds->groups[rounds->finished % NBUFFERS];
    struct channel *channel;
    if (rounds->finished == rounds->started)
        return RSD_OK;
    TRY(peer_test(x->peer, &group->request, moved));
    if (group->request.active)
        return RSD_OK;
    rounds->finished++;
    for (size_t i = 0; (channel = next_in_rounds(x, &i, true));)
        channel->first = channel->end < rounds->finished ? channel->end : rounds->finished;
    for (size_t i = 0; (channel = next_in_rounds(x, &i, false));)
        channel->arrived = channel->end < rounds->finished ? channel->end : rounds->finished;
    return RSD_OK;
}

/* Unpacks what a round received, except terms, which the reducer combines. */
static rsd_status unpack_round(struct exchange *x, struct rounds *rounds, bool *moved)
{
    uint64_t number = rounds->unpacked;
    struct channel *channel;
    if (number == rounds->finished || number != rounds->cleared)
        return RSD_OK;
    exchange_device_begin_boxes(x);
    for (size_t i = 0; (channel = next_in_rounds(x, &i, false));) {
        const struct chunk_buffer *buffer = &channel->buffers[number % NBUFFERS];
        if (!channel->message->reduce && channel->arrived > number)
            TRY(channel_copy_boxes(x, channel, buffer->data, buffer->nbytes));
    }
    TRY(exchange_device_queue_boxes(x, &rounds->unpack_mark));
    rounds->unpacked++;
    *moved = true;
    return RSD_OK;
}

/* Frees the buffers of a round whose chunks are unpacked. */
static rsd_status clear_round(struct exchange *x, struct rounds *rounds, bool *moved)
{
    bool done;
    struct channel *channel;
    if (rounds->cleared == rounds->unpacked)
        return RSD_OK;
    TRY(exchange_device_test(x, rounds->unpack_mark, &done));
    if (!done)
        return RSD_OK;
    rounds->cleared++;
    *moved = true;
    for (size_t i = 0; (channel = next_in_rounds(x, &i, false));)
        if (!channel->message->reduce)
            channel->first = channel->end < rounds->cleared ? channel->end : rounds->cleared;
    return RSD_OK;
}

rsd_status rounds_progress(struct exchange *x, struct rounds *rounds, bool *moved)
{
    if (!rounds)
        return RSD_OK;
    TRY(pack_round(x, rounds, moved));
    TRY(exchange_round(x, rounds, moved));
    TRY(receive_round(x, rounds, moved));
    TRY(unpack_round(x, rounds, moved));
    return clear_round(x, rounds, moved);
}
