/* tile_device.c - tiles between files and arrays on CUDA devices.
 *
 *     load   read -> pinned buffer -> kernel: strides, conversion -> array on the device
 *     save   array on the device -> kernel: strides -> pinned buffer -> write
 *
 * Each thread has two buffers to read into, so that it reads while a kernel empties the other one. Its work goes into
 * a queue of its own per device, which begins behind the work that the caller's stream had at the start.
 */
#include "transfer.h"

enum { MAX_DEVICES = 64, NSLOTS = 2, COPY_NBYTES = 16 << 20 };

struct device_queue {
    struct cuda_device *device;
    struct cuda_queue *queue; /* NULL: not used yet */
    uint64_t mark[NSLOTS];    /* behind the last launch that uses a buffer */
    bool marked[NSLOTS];
};

struct tile_device {
    struct device_queue queues[MAX_DEVICES];
    struct cuda_device *pinned_by;
    struct cuda_pinned in[NSLOTS], out;
    struct cuda_ops *ops;
    const void *addresses[2];
    int slot;
};

bool tile_device_has(const void *address, int *device)
{
    if (!address || !cuda_is_loaded())
        return false;
    struct cuda_place place = cuda_find_place(address);
    *device = place.device < 0 ? 0 : place.device;
    return !place.for_host;
}

/* ---- queues ---- */

static rsd_status open_tile_device(struct scratch *scratch)
{
    if (scratch->device)
        return RSD_OK;
    scratch->device = mem_new(1, sizeof *scratch->device);
    return scratch->device ? cuda_ops_new(&scratch->device->ops) : RSD_ENOMEM;
}

/* Returns the queue of this thread on a device, and opens it at its first use. */
static rsd_status open_device_queue(struct scratch *scratch, int ordinal, struct device_queue **out)
{
    TRY(open_tile_device(scratch));
    struct device_queue *queue = &scratch->device->queues[ordinal];
    if (!queue->queue) {
        TRY(cuda_open_device(ordinal, &queue->device));
        TRY(cuda_queue_new(queue->device, &queue->queue));
        TRY(cuda_queue_follow(queue->queue, scratch->stream));
    }
    *out = queue;
    return RSD_OK;
}

static rsd_status wait_for_slot(struct tile_device *device, int slot)
{
    for (int i = 0; i < MAX_DEVICES; i++) {
        struct device_queue *queue = &device->queues[i];
        if (queue->marked[slot])
            TRY(cuda_queue_wait_mark(queue->queue, queue->mark[slot]));
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
    for (int i = 0; i < MAX_DEVICES; i++)
        cuda_queue_free(device->queues[i].queue); /* waits */
    for (int slot = 0; slot < NSLOTS; slot++)
        cuda_pinned_free(device->pinned_by, &device->in[slot]);
    cuda_pinned_free(device->pinned_by, &device->out);
    cuda_ops_free(device->ops);
    mem_free(device);
    scratch->device = NULL;
}

/* ---- buffers ---- */

static rsd_status reserve_pinned(struct tile_device *device, struct cuda_pinned *pinned,
                                 size_t need)
{
    if (need <= pinned->nbytes)
        return RSD_OK;
    cuda_pinned_free(device->pinned_by, pinned);
    return cuda_pinned_new(device->pinned_by, need, pinned);
}

rsd_status tile_device_reserve(struct scratch *scratch, int ordinal, size_t in_nbytes,
                               size_t out_nbytes, char **in, char **out)
{
    struct device_queue *queue;
    TRY(open_device_queue(scratch, ordinal, &queue));
    struct tile_device *device = scratch->device;
    if (!device->pinned_by)
        device->pinned_by = queue->device;
    device->slot = 1 - device->slot;
    TRY(wait_for_slot(device, device->slot));
    TRY(reserve_pinned(device, &device->in[device->slot], in_nbytes));
    TRY(reserve_pinned(device, &device->out, out_nbytes));
    *in = device->in[device->slot].memory;
    *out = device->out.memory;
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

rsd_status tile_device_copy(struct scratch *scratch, int ordinal, int32_t ndim, const int64_t *len,
                            rsd_dtype from, const char *src, const int64_t *src_strides,
                            rsd_dtype to, char *dst, const int64_t *dst_strides)
{
    struct device_queue *queue;
    struct loops loops = box_loops(ndim, len, element_of(from, to), src_strides, dst_strides);
    TRY(open_device_queue(scratch, ordinal, &queue));
    struct tile_device *device = scratch->device;
    cuda_ops_clear(device->ops);
    TRY(cuda_ops_add_copy(device->ops,
                          &(struct cuda_copy){.dst = 1,
                                              .element = loops.element,
                                              .run = (int64_t)loops.run,
                                              .end = (int64_t)loops.run * rows_of(&loops),
                                              .loops = loops.loop,
                                              .nloops = loops.n}));
    device->addresses[0] = src;
    device->addresses[1] = dst;
    TRY(cuda_queue_run(queue->queue, device->ops, device->addresses, 2));
    TRY(cuda_queue_mark(queue->queue, &queue->mark[device->slot]));
    queue->marked[device->slot] = true;
    return RSD_OK;
}

rsd_status tile_device_wait(struct scratch *scratch)
{
    return wait_for_slot(scratch->device, scratch->device->slot);
}

/* ---- whole arrays ---- */

rsd_status tile_device_read_array(struct scratch *scratch, int ordinal, int32_t ndim,
                                  const int64_t *len, size_t element_nbytes, const char *array,
                                  const int64_t *strides, char *out)
{
    struct device_queue *queue;
    struct loop rows[RSD_MAX_DIMS];
    struct packed_box box =
        box_packed(ndim, len, element_of_bytes(element_nbytes), strides, false, rows);
    char *in, *buffer;
    for (uint64_t at = 0, n; at < box.nbytes; at += n) {
        n = box.nbytes - at < COPY_NBYTES ? box.nbytes - at : COPY_NBYTES;
        TRY(tile_device_reserve(scratch, ordinal, 0, COPY_NBYTES, &in, &buffer));
        TRY(open_device_queue(scratch, ordinal, &queue));
        struct tile_device *device = scratch->device;
        struct cuda_copy copy = {.dst = 1,
                                 .dst_offset = -(int64_t)at,
                                 .element = box.element,
                                 .run = (int64_t)box.run,
                                 .begin = (int64_t)at,
                                 .end = (int64_t)(at + n),
                                 .loops = rows,
                                 .nloops = box.nloops};
        cuda_ops_clear(device->ops);
        TRY(cuda_ops_add_copy(device->ops, &copy));
        device->addresses[0] = array;
        device->addresses[1] = buffer;
        TRY(cuda_queue_run(queue->queue, device->ops, device->addresses, 2));
        TRY(cuda_queue_wait(queue->queue));
        memcpy(out + at, buffer, n);
    }
    return RSD_OK;
}
