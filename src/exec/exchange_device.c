/* exchange_device.c - runs between ranks whose arrays lie on a CUDA device.
 *
 *     a rank of the host      a kernel of the receiver reads the device memory of the sender
 *     where that fails        a kernel packs into a ring buffer or a message, another one unpacks
 *
 * Ring buffers and messages are pinned host memory, which kernels use directly. A run waits for the work that was
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
    struct cuda_queue *queue;
    struct cuda_ops *ops;
    const void **addresses; /* of the launch that is put together */
    size_t naddresses, addresses_capacity;
    struct cuda_program *own[MAX_STAGES]; /* copies that stay on this rank */
    struct cuda_program **direct;         /* by channel: copies from arrays of its sender */
    struct device_peer *peers;            /* by index in the host */
    struct cuda_pinned buffers, reducer;
    bool segment_pinned;
    uint64_t before, own_mark; /* marks: what the run waits for, and the copies of this stage */
    bool waits_own;
    int32_t ndirect, npacked; /* channels of this run */
    char why[160];
    char note[320];
};

/* ---- life ---- */

static void drop_peers(struct exchange *x)
{
    struct exchange_device *device = x->device;
    for (int32_t i = 0; device->peers && i < x->host->n; i++) {
        struct device_peer *peer = &device->peers[i];
        device_imports_drop(&peer->imports);
        if (peer->segment_pinned)
            cuda_unregister(device->arrays.device, x->host->ranks[i].segment.base);
        if (peer->arena_pinned)
            cuda_unregister(device->arrays.device, x->host->ranks[i].arena.base);
    }
    if (device->segment_pinned)
        cuda_unregister(device->arrays.device, x->host->segment.base);
    mem_free(device->peers);
}

void exchange_device_drop(struct exchange *x)
{
    struct exchange_device *device = x->device;
    if (!device)
        return;
    cuda_queue_free(device->queue); /* waits */
    for (int32_t stage = 0; stage < MAX_STAGES; stage++)
        cuda_program_free(device->own[stage]);
    for (size_t i = 0; device->direct && i < x->nchannels; i++)
        cuda_program_free(device->direct[i]);
    mem_free(device->direct);
    if (x->host)
        drop_peers(x);
    if (!x->lost)
        cuda_pinned_free(device->arrays.device, &device->buffers);
    cuda_pinned_free(device->arrays.device, &device->reducer);
    device_exports_drop(&device->exports);
    device_arrays_drop(&device->arrays);
    cuda_ops_free(device->ops);
    mem_free(device->addresses);
    mem_free(device);
    x->device = NULL;
}

/* Moves the buffers of messages and of the reducer into pinned memory. */
static rsd_status pin_buffers(struct exchange *x, struct exchange_device *device)
{
    size_t chunk = x->ncombined ? (size_t)reduce_chunk_nbytes(x) : 0;
    if (x->buffers_nbytes) {
        TRY(cuda_pinned_new(device->arrays.device, x->buffers_nbytes, &device->buffers));
        for (size_t i = 0; i < x->nchannels; i++)
            for (int k = 0; k < NBUFFERS; k++) {
                char **data = &x->channels[i].buffers[k].data;
                if (*data && (!x->channels[i].host || !x->channels[i].sending))
                    *data = device->buffers.memory + (*data - x->buffers);
            }
    }
    if (chunk) {
        TRY(cuda_pinned_new(device->arrays.device, 2 * chunk, &device->reducer));
        mem_free(x->reducer.own_memory);
        x->reducer.own_memory = NULL;
        x->reducer.own = device->reducer.memory;
        x->reducer.result = x->reducer.own + chunk;
    }
    return RSD_OK;
}

static rsd_status pin_segments(struct exchange *x, struct exchange_device *device)
{
    if (!x->host)
        return RSD_OK;
    device->peers = mem_new((size_t)x->host->n, sizeof *device->peers);
    if (!device->peers)
        return RSD_ENOMEM;
    TRY(cuda_register(device->arrays.device, x->host->segment.base, x->host->segment.nbytes));
    device->segment_pinned = true;
    for (int32_t i = 0; i < x->host->n; i++) {
        struct shared_segment *segment = &x->host->ranks[i].segment;
        if (!segment->base)
            continue;
        TRY(cuda_register(device->arrays.device, segment->base, segment->nbytes));
        device->peers[i].segment_pinned = true;
    }
    return RSD_OK;
}

static rsd_status make_own_programs(struct exchange *x, struct exchange_device *device)
{
    size_t narrays = (size_t)(x->arrays.nsrc + x->arrays.ndst);
    for (int32_t stage = 0; stage < x->nstages; stage++) {
        cuda_ops_clear(device->ops);
        for (size_t i = 0; i < x->program.ncopies; i++) {
            const struct copy_op *op = &x->program.copies[i];
            if (op->stage == stage && op->peer == x->rank)
                TRY(device_add_copy(device->ops, &x->program, op, x->arrays.nsrc, x->arrays.nsrc));
        }
        if (!cuda_ops_is_empty(device->ops))
            TRY(cuda_program_new(device->arrays.device, device->ops, narrays, &device->own[stage]));
    }
    return RSD_OK;
}

static rsd_status start_device(struct exchange *x, int ordinal)
{
    struct exchange_device *device = x->device = mem_new(1, sizeof *device);
    if (!device)
        return RSD_ENOMEM;
    rsd_status status = device_arrays_new(ordinal, &x->arrays, &device->arrays);
    device->direct = mem_new(x->nchannels, sizeof(struct cuda_program *));
    if (!status && !device->direct)
        status = RSD_ENOMEM;
    if (!status)
        status = cuda_queue_new(device->arrays.device, &device->queue);
    if (!status)
        status = cuda_ops_new(&device->ops);
    if (!status)
        status = pin_segments(x, device);
    if (!status)
        status = make_own_programs(x, device);
    if (!status)
        status = pin_buffers(x, device); /* last: what it moves stays moved */
    if (status)
        exchange_device_drop(x);
    return status;
}

/* ---- the start of a run ---- */

rsd_status exchange_device_prepare(struct exchange *x)
{
    int ordinal = device_arrays_choose(&x->arrays, x->exec.has_stream);
    x->on_device = false;
    if (ordinal < 0 && !x->device)
        return RSD_OK;
    if (!x->device)
        TRY(start_device(x, ordinal));
    struct exchange_device *device = x->device;
    x->on_device =
        true; /* from the first such run on: its buffers are pinned, and kernels use any memory */
    if (ordinal >= 0 && ordinal != device->arrays.ordinal)
        return fail(RSD_EUNSUPPORTED, "arrays were on CUDA device %d, and now are on device %d",
                    device->arrays.ordinal, ordinal);
    device->ndirect = device->npacked = 0;
    device->waits_own = false;
    device->why[0] = '\0';
    TRY(device_arrays_prepare(&device->arrays, &x->arrays));
    TRY(device_export_arrays(x, &device->arrays, &device->exports));
    TRY(cuda_queue_use_stream(device->queue, x->exec.stream));
    return cuda_queue_mark(device->queue, &device->before);
}

rsd_status exchange_device_ready(struct exchange *x, bool *ready)
{
    return cuda_queue_test_mark(x->device->queue, x->device->before, ready);
}

void exchange_device_end(struct exchange *x, rsd_status status)
{
    struct exchange_device *device = x->device;
    if (status)
        cuda_queue_wait(device->queue); /* what was queued may still use the arrays */
    device_arrays_release(&device->arrays);
    snprintf(device->note, sizeof device->note,
             "CUDA device %d: %d messages read from device memory of other ranks, %d packed "
             "through pinned memory%s%s",
             device->arrays.ordinal, device->ndirect, device->npacked, device->why[0] ? ": " : "",
             device->why);
}

const char *exchange_device_note(const struct exchange *x)
{
    return x->device->note;
}

/* ---- copies that stay on this rank ---- */

rsd_status exchange_device_copy_own(struct exchange *x, int32_t stage)
{
    struct exchange_device *device = x->device;
    if (!device->own[stage])
        return RSD_OK;
    TRY(cuda_program_run(device->own[stage], device->queue, device->arrays.addresses));
    device->waits_own = true;
    return cuda_queue_mark(device->queue, &device->own_mark);
}

rsd_status exchange_device_own_done(struct exchange *x, bool *done)
{
    *done = true;
    if (x->device->waits_own)
        TRY(cuda_queue_test_mark(x->device->queue, x->device->own_mark, done));
    x->device->waits_own = !*done;
    return RSD_OK;
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
    cuda_ops_clear(x->device->ops);
    x->device->naddresses = 0;
}

rsd_status exchange_device_add_box(struct exchange *x, const struct array_box *box, bool sending,
                                   uint64_t at, size_t n, const char *packed)
{
    struct exchange_device *device = x->device;
    const struct packed_box *rows = &box->packed;
    bool in_src = sending && !box->from_destination;
    const char *array = device->arrays.addresses[box->array + (in_src ? 0 : x->arrays.nsrc)];
    struct loop turned[RSD_MAX_DIMS];
    uint32_t array_number, packed_number;
    TRY(add_address(device, array, &array_number));
    TRY(add_address(device, packed, &packed_number));
    for (int32_t i = 0; i < rows->nloops; i++) {
        struct loop loop = x->loops[box->first_loop + (size_t)i];
        turned[i] = sending ? loop : (struct loop){loop.count, loop.dst_stride, loop.src_stride};
    }
    /* byte `at` of the packed rows is at `packed` */
    struct cuda_copy copy = {.src = sending ? array_number : packed_number,
                             .dst = sending ? packed_number : array_number,
                             .src_offset = sending ? box->offset : -(int64_t)at,
                             .dst_offset = sending ? -(int64_t)at : box->offset,
                             .run = (int64_t)rows->run,
                             .begin = (int64_t)at,
                             .end = (int64_t)(at + n),
                             .loops = turned,
                             .nloops = rows->nloops};
    return cuda_ops_add_copy(device->ops, &copy);
}

rsd_status exchange_device_queue_boxes(struct exchange *x, uint64_t *mark)
{
    struct exchange_device *device = x->device;
    TRY(cuda_queue_run(device->queue, device->ops, device->addresses, device->naddresses));
    return cuda_queue_mark(device->queue, mark);
}

rsd_status exchange_device_test(struct exchange *x, uint64_t mark, bool *done)
{
    return cuda_queue_test_mark(x->device->queue, mark, done);
}

rsd_status exchange_device_copy_box(struct exchange *x, const struct array_box *box, bool sending,
                                    uint64_t at, size_t n, const char *packed)
{
    uint64_t mark;
    exchange_device_begin_boxes(x);
    TRY(exchange_device_add_box(x, box, sending, at, n, packed));
    TRY(exchange_device_queue_boxes(x, &mark));
    return cuda_queue_wait_mark(x->device->queue, mark);
}

/* ---- arrays of other ranks ---- */

bool exchange_device_exports(const struct exchange *x, const struct message *message)
{
    for (size_t i = 0; i < message->nboxes; i++) {
        const struct array_box *box = &x->boxes[message->first_box + i];
        int64_t number = box->array + (box->from_destination ? x->arrays.nsrc : 0);
        if (box->packed.nbytes && !device_exports_array(&x->device->exports, number))
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

/* The addresses of a sender's arrays, as kernels of this rank see them, then those of this rank's destinations. */
static rsd_status list_addresses(struct exchange *x, const struct channel *channel)
{
    struct exchange_device *device = x->device;
    const struct host_rank *host = channel->host;
    struct device_peer *peer = &device->peers[host - x->host->ranks];
    int64_t nsrc = host->arrays.nsrc, nthere = nsrc + host->arrays.ndst;
    uint32_t number;
    device->naddresses = 0;
    for (int64_t i = 0; i < nthere; i++)
        TRY(add_address(
            device, channel->direct == DIRECT_DEVICE ? peer->imports.addresses[i] : NULL, &number));
    for (size_t i = 0; i < channel->ndirect; i++) {
        const struct copy_op *op = &x->program.copies[channel->first_direct + i];
        const void **address = &device->addresses[op->src + (op->from_destination ? nsrc : 0)];
        if (channel->direct == DIRECT_ARENA && !*address)
            *address = host_rank_array(host, op->src, op->from_destination);
        if (!*address)
            return fail(RSD_EPEER, "rank %d exported no device memory for array %lld",
                        (int)host->rank, (long long)op->src);
    }
    for (int64_t i = 0; i < x->arrays.ndst; i++)
        TRY(add_address(device, x->arrays.dst[i], &number));
    return RSD_OK;
}

static rsd_status make_direct_program(struct exchange *x, const struct channel *channel,
                                      struct cuda_program **program)
{
    struct exchange_device *device = x->device;
    int64_t nsrc = channel->host->arrays.nsrc, nthere = nsrc + channel->host->arrays.ndst;
    cuda_ops_clear(device->ops);
    for (size_t i = 0; i < channel->ndirect; i++)
        TRY(device_add_copy(device->ops, &x->program, &x->program.copies[channel->first_direct + i],
                            nsrc, nthere));
    return cuda_program_new(device->arrays.device, device->ops, (size_t)(nthere + x->arrays.ndst),
                            program);
}

rsd_status exchange_device_open(struct exchange *x, struct channel *channel)
{
    struct exchange_device *device = x->device;
    int64_t index = channel->host - x->host->ranks;
    struct device_peer *peer = &device->peers[index];
    struct shared_segment *arena = &x->host->ranks[index].arena;
    if (channel->direct == DIRECT_DEVICE) {
        rsd_status status =
            device_import_arrays(channel->host, device->arrays.device, &peer->imports);
        if (status)
            snprintf(device->why, sizeof device->why, "%s", rsd_error());
        return status;
    }
    if (!peer->arena_pinned) {
        TRY(cuda_register(device->arrays.device, arena->base, arena->nbytes));
        peer->arena_pinned = true;
    }
    return RSD_OK;
}

rsd_status exchange_device_copy_direct(struct exchange *x, struct channel *channel)
{
    struct exchange_device *device = x->device;
    struct cuda_program **program = &device->direct[channel - x->channels];
    TRY(list_addresses(x, channel));
    if (!*program)
        TRY(make_direct_program(x, channel, program));
    device->ndirect++;
    TRY(cuda_program_run(*program, device->queue, device->addresses));
    return cuda_queue_mark(device->queue, &channel->mark);
}
