/* tile_device.c - tiles between files and arrays on devices.
 *
 *     load   read -> pinned buffer -> kernel: strides, conversion -> array on the device
 *     save   array on the device -> kernel: strides -> pinned buffer -> write
 *
 * Each thread has two buffers to read into, so that it reads while a kernel empties the other one. Its work goes into
 * a queue of its own per device, which begins behind the work that the caller's stream had at the start.
 */
#include "transfer.h"

enum { NSLOTS = 2, COPY_NBYTES = 16 << 20 };

struct device_queue {
    struct memory_device *device;
    struct memory_queue *queue;
    uint64_t mark[NSLOTS]; /* behind the last launch that uses a buffer */
    bool marked[NSLOTS];
};

struct tile_device {
    struct device_queue *queues; /* one for each device that was used */
    size_t nqueues, queues_capacity;
    struct memory_buffer in[NSLOTS], out;
    struct device_ops ops;
    int slot;
};

/* ---- queues ---- */

/* Returns the queue of this thread on a device, and makes it at its first use. */
static rsd_status open_device_queue(struct scratch *scratch, struct memory_device *device,
                                    struct device_queue **out)
{
    if (!scratch->device)
        scratch->device = mem_new(1, sizeof *scratch->device);
    struct tile_device *here = scratch->device;
    if (!here)
        return RSD_ENOMEM;
    for (size_t i = 0; i < here->nqueues; i++)
        if (here->queues[i].device == device) {
            *out = &here->queues[i];
            return RSD_OK;
        }
    TRY(GROW(here->queues, here->queues_capacity, here->nqueues + 1));
    struct device_queue *queue = &here->queues[here->nqueues];
    *queue = (struct device_queue){.device = device};
    TRY(device->kind->queue_new(device, &queue->queue));
    here->nqueues++;
    *out = queue;
    return device->kind->follow_stream(queue->queue, scratch->stream);
}

/* Waits for the launches that use a buffer. */
static rsd_status wait_for_slot(struct tile_device *device, int slot)
{
    for (size_t i = 0; i < device->nqueues; i++) {
        struct device_queue *queue = &device->queues[i];
        if (queue->marked[slot])
            TRY(queue->queue->kind->wait_mark(queue->queue, queue->mark[slot]));
        queue->marked[slot] = false;
    }
    return RSD_OK;
}

rsd_status tile_device_finish(struct scratch *scratch)
{
    rsd_status status = RSD_OK;
    for (int slot = 0; slot < NSLOTS && scratch->device; slot++) {
        rsd_status one = wait_for_slot(scratch->device, slot);
        status = status ? status : one;
    }
    return status;
}

void tile_device_drop(struct scratch *scratch)
{
    struct tile_device *device = scratch->device;
    if (!device)
        return;
    for (size_t i = 0; i < device->nqueues; i++)
        memory_queue_free(device->queues[i].queue); /* waits */
    for (int slot = 0; slot < NSLOTS; slot++)
        memory_buffer_free(&device->in[slot]);
    memory_buffer_free(&device->out);
    device_ops_drop(&device->ops);
    mem_free(device->queues);
    mem_free(device);
    scratch->device = NULL;
}

/* ---- buffers ---- */

static rsd_status reserve_pinned(struct memory_device *device, size_t need,
                                 struct memory_buffer *buffer)
{
    if (need <= buffer->nbytes)
        return RSD_OK;
    memory_buffer_free(buffer);
    return device->kind->buffer_new(device, true, need, buffer);
}

rsd_status tile_device_reserve(struct scratch *scratch, struct memory_device *device,
                               size_t in_nbytes, size_t out_nbytes, char **in, char **out)
{
    struct device_queue *queue;
    TRY(open_device_queue(scratch, device, &queue));
    struct tile_device *here = scratch->device;
    here->slot = 1 - here->slot;
    TRY(wait_for_slot(here, here->slot));
    TRY(reserve_pinned(device, in_nbytes, &here->in[here->slot]));
    TRY(reserve_pinned(device, out_nbytes, &here->out));
    *in = here->in[here->slot].memory;
    *out = here->out.memory;
    return RSD_OK;
}

/* ---- copies ---- */

static int64_t rows_of(const struct loops *loops)
{
    int64_t nrows = 1;
    for (int32_t i = 0; i < loops->n; i++)
        nrows *= loops->loop[i].count;
    return nrows;
}

/* Queues one copy, from array 0 to array 1. */
static rsd_status queue_copy(struct tile_device *here, struct memory_queue *queue,
                             const struct device_copy *copy, const struct loop *loops,
                             const char *src, const char *dst)
{
    const void *addresses[2] = {src, dst};
    device_ops_clear(&here->ops);
    TRY(device_ops_add_copy(&here->ops, copy, loops));
    return queue->kind->run(queue, &here->ops, addresses, 2);
}

rsd_status tile_device_copy(struct scratch *scratch, struct memory_device *device, int32_t ndim,
                            const int64_t *len, rsd_dtype from, const char *src,
                            const int64_t *src_strides, rsd_dtype to, char *dst,
                            const int64_t *dst_strides)
{
    struct device_queue *queue;
    struct loops loops = box_loops(ndim, len, element_of(from, to), src_strides, dst_strides);
    struct device_copy copy = {.dst = 1,
                               .element = loops.element,
                               .run = (int64_t)loops.run,
                               .end = (int64_t)loops.run * rows_of(&loops),
                               .nloops = (uint32_t)loops.n};
    TRY(open_device_queue(scratch, device, &queue));
    struct tile_device *here = scratch->device;
    TRY(queue_copy(here, queue->queue, &copy, loops.loop, src, dst));
    TRY(device->kind->mark(queue->queue, &queue->mark[here->slot]));
    queue->marked[here->slot] = true;
    return RSD_OK;
}

rsd_status tile_device_wait(struct scratch *scratch)
{
    return wait_for_slot(scratch->device, scratch->device->slot);
}

/* ---- whole arrays ---- */

rsd_status tile_device_read_array(struct scratch *scratch, struct memory_device *device,
                                  int32_t ndim, const int64_t *len, size_t element_nbytes,
                                  const char *array, const int64_t *strides, char *out)
{
    struct device_queue *queue;
    struct loop rows[RSD_MAX_DIMS];
    struct packed_box box =
        box_packed(ndim, len, element_of_bytes(element_nbytes), strides, false, rows);
    char *in, *buffer;
    for (uint64_t at = 0, n; at < box.nbytes; at += n) {
        n = box.nbytes - at < COPY_NBYTES ? box.nbytes - at : COPY_NBYTES;
        TRY(tile_device_reserve(scratch, device, 0, COPY_NBYTES, &in, &buffer));
        TRY(open_device_queue(scratch, device, &queue));
        struct device_copy copy = {.dst = 1,
                                   .dst_offset = -(int64_t)at,
                                   .element = box.element,
                                   .run = (int64_t)box.run,
                                   .begin = (int64_t)at,
                                   .end = (int64_t)(at + n),
                                   .nloops = (uint32_t)box.nloops};
        TRY(queue_copy(scratch->device, queue->queue, &copy, rows, array, buffer));
        TRY(device->kind->wait(queue->queue));
        memcpy(out + at, buffer, n);
    }
    return RSD_OK;
}
