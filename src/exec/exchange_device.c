/* exchange_device.c - runs between ranks whose arrays lie on a device.
 *
 *     ranks of the host       one kernel of the receiver reads the device memory of all senders
 *     where that fails        a kernel packs into a ring buffer or a message, another one unpacks
 *
 * Ring buffers and messages are pinned host memory, which kernels use directly, or memory of the device if the
 * transport takes it (exchange_rounds.c). A run waits for the work that was
 * queued in the caller's stream before it votes, since other ranks read this rank's arrays after the vote.
 */
#include "exchange_device.h"
#include "device_run.h"

#include <stdio.h>

/* Another rank of the host. */
struct device_peer {
    struct device_imports imports;
    bool segment_pinned, arena_pinned;
};

struct exchange_device {
    struct device_arrays arrays;
    struct device_exports exports;
    struct memory_queue *queue;
    struct device_ops ops;
    const void **addresses; /* of boxes that are packed or unpacked */
    size_t naddresses, addresses_capacity;
    const void **arrays_of_host; /* the arrays of this rank, then those of each rank of its host */
    size_t narrays_of_host;
    struct memory_program *all[MAX_STAGES]; /* all copies and sums of a stage */
    struct memory_program *own[MAX_STAGES]; /* copies that stay on this rank */
    struct memory_program **direct;         /* by channel: copies from arrays of its sender */
    struct device_peer *peers;              /* by index in the host */
    struct rounds *rounds;                  /* NULL: none */
    struct memory_buffer buffers, reducer;
    bool segment_pinned;
    bool was_idle;               /* the stream, when the run started: it waits for nothing */
    uint64_t before, stage_mark; /* marks: what the run waits for, and the launch of this stage */
    bool waits_stage;
    int32_t ndirect, npacked, nsent; /* channels of this run */
    char why[160];
    char note[400];
};

/* ---- life ---- */

/* Releases the memory of other ranks of the host. */
static void drop_peers(struct exchange *x)
{
    struct exchange_device *device = x->device;
    struct memory_device *by = device->arrays.device;
    for (int32_t i = 0; device->peers && i < x->host->n; i++) {
        struct device_peer *peer = &device->peers[i];
        device_imports_drop(&peer->imports);
        if (peer->segment_pinned)
            by->kind->unpin(by, x->host->ranks[i].segment.base);
        if (peer->arena_pinned)
            by->kind->unpin(by, x->host->ranks[i].arena.base);
    }
    if (device->segment_pinned)
        by->kind->unpin(by, x->host->segment.base);
    mem_free(device->peers);
}

void exchange_device_drop(struct exchange *x)
{
    struct exchange_device *device = x->device;
    if (!device)
        return;
    memory_queue_free(device->queue); /* waits */
    for (int32_t stage = 0; stage < MAX_STAGES; stage++) {
        memory_program_free(device->own[stage]);
        memory_program_free(device->all[stage]);
    }
    for (size_t i = 0; device->direct && i < x->nchannels; i++)
        memory_program_free(device->direct[i]);
    mem_free(device->direct);
    if (x->host)
        drop_peers(x);
    rounds_free(device->rounds, x->lost);
    if (!x->lost)
        memory_buffer_free(&device->buffers);
    memory_buffer_free(&device->reducer);
    device_exports_drop(&device->exports);
    device_arrays_drop(&device->arrays);
    device_ops_drop(&device->ops);
    mem_free(device->addresses);
    mem_free(device->arrays_of_host);
    mem_free(device);
    x->device = NULL;
}

/* Whether a buffer of a channel is in x->buffers, and has to be moved into pinned memory. */
static bool has_host_buffer(const struct channel *channel, int k)
{
    return channel->buffers[k].data && !channel->in_rounds && (!channel->host || !channel->sending);
}

/* Moves the buffers of messages into pinned memory. */
static rsd_status pin_buffers(struct exchange *x, struct exchange_device *device)
{
    struct memory_device *by = device->arrays.device;
    for (size_t i = 0; i < x->nchannels; i++)
        for (int k = 0; k < NBUFFERS; k++) {
            struct channel *channel = &x->channels[i];
            if (!has_host_buffer(channel, k))
                continue;
            if (!device->buffers.memory)
                TRY(by->kind->buffer_new(by, true, x->buffers_nbytes, &device->buffers));
            channel->buffers[k].data =
                device->buffers.memory + (channel->buffers[k].data - x->buffers);
        }
    return RSD_OK;
}

/* Moves the buffers of the reducer to the device. */
static rsd_status move_reducer(struct exchange *x, struct exchange_device *device)
{
    struct memory_device *by = device->arrays.device;
    size_t chunk = x->ncombined ? (size_t)reduce_chunk_nbytes(x) : 0;
    if (chunk == 0)
        return RSD_OK;
    TRY(by->kind->buffer_new(by, false, 2 * chunk, &device->reducer));
    mem_free(x->reducer.own_memory);
    x->reducer.own_memory = NULL;
    x->reducer.own = device->reducer.memory;
    x->reducer.result = x->reducer.own + chunk;
    return RSD_OK;
}

/* Pins the shared segments of all ranks of the host, in which their ring buffers are. */
static rsd_status pin_segments(struct exchange *x, struct exchange_device *device)
{
    struct memory_device *by = device->arrays.device;
    if (!x->host)
        return RSD_OK;
    device->peers = mem_new((size_t)x->host->n, sizeof *device->peers);
    if (!device->peers)
        return RSD_ENOMEM;
    TRY(by->kind->pin(by, x->host->segment.base, x->host->segment.nbytes));
    device->segment_pinned = true;
    for (int32_t i = 0; i < x->host->n; i++) {
        struct shared_segment *segment = &x->host->ranks[i].segment;
        if (!segment->base)
            continue;
        TRY(by->kind->pin(by, segment->base, segment->nbytes));
        device->peers[i].segment_pinned = true;
    }
    return RSD_OK;
}

/* ---- programs ---- */

/* Makes the list of the arrays of this rank and of all ranks of its host. */
static rsd_status add_host_arrays(struct exchange *x, struct exchange_device *device)
{
    int64_t n = x->host ? x->host->narrays : x->arrays.n;
    if (n > UINT32_MAX)
        return fail(RSD_ELIMIT, "more than 2^32 arrays for a device");
    device->narrays_of_host = (size_t)n;
    device->arrays_of_host = mem_new((size_t)n, sizeof *device->arrays_of_host);
    return device->arrays_of_host ? RSD_OK : RSD_ENOMEM;
}

/* Queues the copies of a stage from one sender; with RSD_EVERY_RANK all of them and the sums. The program of these is
 * made at its first use. */
static rsd_status queue_program(struct exchange *x, int32_t stage, int32_t sender,
                                struct memory_program **program, uint64_t *mark)
{
    struct exchange_device *device = x->device;
    struct memory_device *by = device->arrays.device;
    if (!*program) {
        device_ops_clear(&device->ops);
        TRY(device_add_stage(&device->ops, &x->program, stage, sender));
        TRY(by->kind->program_new(by, &device->ops, device->narrays_of_host, program));
    }
    TRY((*program)->kind->program_run(*program, device->queue, device->arrays_of_host));
    return device->queue->kind->mark(device->queue, mark);
}

/* ---- starting ---- */

/* Makes the device half of an exchange, at its first run with arrays on a device. */
static rsd_status start_exchange_device(struct exchange *x, struct memory_device *by)
{
    struct exchange_device *device = x->device = mem_new(1, sizeof *device);
    if (!device)
        return RSD_ENOMEM;
    rsd_status status = device_arrays_new(by, &x->arrays, &device->arrays);
    device->direct = mem_new(x->nchannels, sizeof(struct memory_program *));
    if (!status && !device->direct)
        status = RSD_ENOMEM;
    if (!status)
        status = by->kind->queue_new(by, &device->queue);
    if (!status)
        status = pin_segments(x, device);
    if (!status)
        status = add_host_arrays(x, device);
    if (!status)
        status = rounds_start(x, by, &device->rounds);
    if (!status)
        status = pin_buffers(x, device);
    if (!status)
        status = move_reducer(x, device);
    if (status)
        exchange_device_drop(x);
    return status;
}

/* ---- the start of a run ---- */

/* Opens the device of a transport that takes no other memory. *device stays as it is if there is none. */
static rsd_status open_transport_device(const struct exchange *x, struct memory_device **device)
{
    bool sends = false;
    for (size_t i = 0; i < x->nchannels; i++)
        sends = sends || !x->channels[i].host;
    int ordinal = sends ? peer_device(x->peer) : -1;
    return ordinal < 0 ? RSD_OK : memory_open_device(ordinal, device);
}

/* Counts the messages that the transport carries. */
static void count_carried(struct exchange *x)
{
    struct exchange_device *device = x->device;
    device->ndirect = device->npacked = device->nsent = 0;
    device->why[0] = '\0';
    for (size_t i = 0; i < x->nchannels; i++) {
        const struct channel *channel = &x->channels[i];
        if (channel->host || !channel->sending)
            continue;
        device->nsent += channel->in_rounds;
        device->npacked += !channel->in_rounds;
        if (!channel->in_rounds)
            snprintf(device->why, sizeof device->why, "%s",
                     peer_takes_device(x->peer) ? "terms of a reduction come in different rounds"
                                                : "the transport takes memory of the host only");
    }
}

rsd_status exchange_device_prepare(struct exchange *x)
{
    struct memory_device *by;
    x->on_device = false;
    TRY(device_arrays_choose(&x->arrays, &x->exec, &by));
    if (!by)
        TRY(open_transport_device(x, &by));
    if (!by && !x->device)
        return RSD_OK;
    if (!x->device)
        TRY(start_exchange_device(x, by));
    struct exchange_device *device = x->device;
    const struct memory_device *before = device->arrays.device;
    x->on_device =
        true; /* from the first such run on: its buffers are pinned, and kernels use any memory */
    if (by && by != before)
        return fail(RSD_EUNSUPPORTED, "arrays were on %s device %d, and now are on %s device %d",
                    before->kind->name, before->ordinal, by->kind->name, by->ordinal);
    count_carried(x);
    device->waits_stage = false;
    TRY(device_arrays_prepare(&device->arrays, &x->arrays));
    for (size_t i = 0; i < device->narrays_of_host; i++)
        device->arrays_of_host[i] = i < (size_t)x->arrays.n ? device->arrays.addresses[i] : NULL;
    TRY(device_export_arrays(x, &device->arrays, &device->exports));
    TRY(device->queue->kind->use_stream(device->queue, x->exec.stream));
    TRY(device->queue->kind->is_idle(device->queue, &device->was_idle));
    return device->was_idle ? RSD_OK : device->queue->kind->mark(device->queue, &device->before);
}

rsd_status exchange_device_ready(struct exchange *x, bool *ready)
{
    *ready = true;
    return x->device->was_idle ? RSD_OK : exchange_device_test(x, x->device->before, ready);
}

void exchange_device_end(struct exchange *x, rsd_status status)
{
    struct exchange_device *device = x->device;
    const struct memory_device *by = device->arrays.device;
    if (status)
        device->queue->kind->wait(device->queue); /* what was queued may still use the arrays */
    device_arrays_release(&device->arrays);
    snprintf(device->note, sizeof device->note,
             "%s device %d: %d messages read from device memory of other ranks, %d sent from "
             "device memory by the transport, %d packed through pinned memory%s%s",
             by->kind->name, by->ordinal, device->ndirect, device->nsent, device->npacked,
             device->why[0] ? ": " : "", device->why);
}

const char *exchange_device_note(const struct exchange *x)
{
    return x->device->note;
}

/* ---- stages ---- */

rsd_status exchange_device_copy_own(struct exchange *x, int32_t stage)
{
    x->device->waits_stage = true;
    return queue_program(x, stage, x->rank, &x->device->own[stage], &x->device->stage_mark);
}

rsd_status exchange_device_copy_all(struct exchange *x, int32_t stage)
{
    struct exchange_device *device = x->device;
    device->waits_stage = true;
    TRY(queue_program(x, stage, RSD_EVERY_RANK, &device->all[stage], &device->stage_mark));
    for (size_t i = 0; i < x->nchannels; i++) {
        struct channel *channel = &x->channels[i];
        if (channel->sending || channel->message->stage != stage)
            continue;
        channel->copying = true;
        channel->mark = device->stage_mark;
        device->ndirect++;
    }
    return RSD_OK;
}

rsd_status exchange_device_stage_done(struct exchange *x, bool *done)
{
    *done = true;
    if (x->device->waits_stage)
        TRY(exchange_device_test(x, x->device->stage_mark, done));
    x->device->waits_stage = !*done;
    return RSD_OK;
}

/* ---- messages on the device ---- */

void exchange_device_begin_stage(struct exchange *x)
{
    rounds_begin_stage(x->device->rounds);
}

rsd_status exchange_device_progress(struct exchange *x, bool *moved)
{
    return rounds_progress(x, x->device->rounds, moved);
}

void exchange_device_cancel(struct exchange *x)
{
    if (!rounds_cancel(x, x->device->rounds))
        x->lost = true;
}

/* ---- boxes between arrays and buffers ---- */

static rsd_status add_address(struct exchange_device *device, const void *address, uint32_t *number)
{
    TRY(GROW(device->addresses, device->addresses_capacity, device->naddresses + 1));
    *number = (uint32_t)device->naddresses;
    device->addresses[device->naddresses++] = address;
    return RSD_OK;
}

void exchange_device_begin_boxes(struct exchange *x)
{
    device_ops_clear(&x->device->ops);
    x->device->naddresses = 0;
}

rsd_status exchange_device_add_box(struct exchange *x, const struct array_box *box, bool sending,
                                   uint64_t at, size_t n, const char *packed)
{
    struct exchange_device *device = x->device;
    const struct packed_box *rows = &box->packed;
    const char *array = device->arrays.addresses[box->array];
    struct loop turned[RSD_MAX_DIMS];
    uint32_t array_number, packed_number;
    TRY(add_address(device, array, &array_number));
    TRY(add_address(device, packed, &packed_number));
    for (int32_t i = 0; i < rows->nloops; i++) {
        struct loop loop = x->loops[box->first_loop + (size_t)i];
        turned[i] = sending ? loop : (struct loop){loop.count, loop.dst_stride, loop.src_stride};
    }
    /* byte `at` of the packed rows is at `packed` */
    struct device_copy copy = {.src = sending ? array_number : packed_number,
                               .dst = sending ? packed_number : array_number,
                               .src_offset = sending ? box->offset : -(int64_t)at,
                               .dst_offset = sending ? -(int64_t)at : box->offset,
                               .element = sending ? rows->element : element_turned(rows->element),
                               .run = (int64_t)rows->run,
                               .begin = (int64_t)at / rows->element.dst_unit,
                               .end = (int64_t)(at + n) / rows->element.dst_unit,
                               .nloops = (uint32_t)rows->nloops};
    return device_ops_add_copy(&device->ops, &copy, turned);
}

rsd_status exchange_device_queue_boxes(struct exchange *x, uint64_t *mark)
{
    struct exchange_device *device = x->device;
    const struct memory_kind *kind = device->queue->kind;
    TRY(kind->run(device->queue, &device->ops, device->addresses, device->naddresses));
    return kind->mark(device->queue, mark);
}

rsd_status exchange_device_test(struct exchange *x, uint64_t mark, bool *done)
{
    return x->device->queue->kind->test_mark(x->device->queue, mark, done);
}

rsd_status exchange_device_pack_term(struct exchange *x, const struct array_box *box, uint64_t at,
                                     size_t n)
{
    uint64_t mark;
    exchange_device_begin_boxes(x);
    TRY(exchange_device_add_box(x, box, true, at, n, x->reducer.own));
    return exchange_device_queue_boxes(x, &mark);
}

/* A list runs its sums before its copies, so the result is stored by the same launch. */
rsd_status exchange_device_combine(struct exchange *x, const struct combined_box *box, size_t n)
{
    struct exchange_device *device = x->device;
    int64_t element = (int64_t)rsd_dtype_nbytes(box->reduction.dtype);
    struct loop loop = {.count = (int64_t)n / element, .dst_stride = element};
    uint64_t mark;
    uint32_t number;
    exchange_device_begin_boxes(x);
    TRY(add_address(device, x->reducer.result, &number));
    TRY(device_ops_add_sum(
        &device->ops, &(struct device_sum){.reduction = box->reduction, .dst = number, .nloops = 1},
        &loop));
    for (size_t i = 0; i < box->nterms; i++) {
        TRY(add_address(device, x->reducer.terms[i], &number));
        TRY(device_ops_add_term(&device->ops, number, 0, &element));
    }
    TRY(exchange_device_add_box(x, &box->to, false, x->reducer.at, n, x->reducer.result));
    TRY(exchange_device_queue_boxes(x, &mark));
    return device->queue->kind->wait_mark(device->queue, mark);
}

/* ---- arrays of other ranks ---- */

bool exchange_device_exports(const struct exchange *x, const struct message *message)
{
    for (size_t i = 0; i < message->nboxes; i++) {
        const struct array_box *box = &x->boxes[message->first_box + i];
        if (box->packed.nbytes && !device_exports_array(&x->device->exports, box->array))
            return false;
    }
    return true;
}

void exchange_device_count_packed(struct exchange *x)
{
    x->device->npacked++;
    if (x->device->exports.why[0])
        snprintf(x->device->why, sizeof x->device->why, "%s", x->device->exports.why);
}

/* Writes down the addresses of a sender's arrays, as kernels of this rank use them. */
static void list_addresses(struct exchange *x, const struct channel *channel)
{
    struct exchange_device *device = x->device;
    const struct host_rank *host = channel->host;
    const struct device_imports *imports = &device->peers[host - x->host->ranks].imports;
    for (int64_t i = 0; i < host->arrays.n; i++) {
        int64_t number = host->first_array + i;
        if (channel->direct == DIRECT_DEVICE && imports->addresses[i])
            device->arrays_of_host[number] = imports->addresses[i];
        else if (channel->direct == DIRECT_ARENA && host_rank_has(host, number))
            device->arrays_of_host[number] = host_rank_array(host, number);
    }
}

static rsd_status check_host_address(const struct exchange *x, const struct host_rank *host,
                                     int64_t number)
{
    if (x->device->arrays_of_host[number])
        return RSD_OK;
    return fail(RSD_EPEER, "rank %d exported no memory for array %lld", (int)host->rank,
                (long long)host->arrays.spans[number - host->first_array].index);
}

/* Returns EPEER if a sender has exported no memory for an array that is read. */
static rsd_status check_addresses(const struct exchange *x, const struct channel *channel)
{
    const struct host_rank *host = channel->host;
    for (size_t i = 0; i < channel->ndirect; i++)
        TRY(check_host_address(x, host, x->program.copies[channel->first_direct + i].src));
    for (size_t i = 0; channel->message->reduce && i < x->program.nterms; i++)
        if (x->program.terms[i].peer == host->rank)
            TRY(check_host_address(x, host, x->program.terms[i].src));
    return RSD_OK;
}

static rsd_status open_arena(struct exchange *x, int64_t index)
{
    struct memory_device *by = x->device->arrays.device;
    struct shared_segment *arena = &x->host->ranks[index].arena;
    if (x->device->peers[index].arena_pinned)
        return RSD_OK;
    TRY(by->kind->pin(by, arena->base, arena->nbytes));
    x->device->peers[index].arena_pinned = true;
    return RSD_OK;
}

rsd_status exchange_device_open(struct exchange *x, const struct channel *channel)
{
    struct exchange_device *device = x->device;
    int64_t index = channel->host - x->host->ranks;
    rsd_status status = channel->direct == DIRECT_DEVICE
                            ? device_import_arrays(channel->host, device->arrays.device,
                                                   &device->peers[index].imports)
                            : open_arena(x, index);
    if (!status) {
        list_addresses(x, channel);
        status = check_addresses(x, channel);
    }
    if (status)
        snprintf(device->why, sizeof device->why, "%s", rsd_error());
    return status;
}

rsd_status exchange_device_copy_direct(struct exchange *x, struct channel *channel)
{
    x->device->ndirect++;
    return queue_program(x, channel->message->stage, channel->message->peer,
                         &x->device->direct[channel - x->channels], &channel->mark);
}
