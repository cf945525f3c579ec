/* digest_tensors.c - the digests of tensors in memory, of the host or of devices.
 *
 * It is a save that writes nothing: the manifest lists each box once, with the rank and the array that would write it.
 * Each rank adds the remainders of its boxes, so that nothing is gathered. Arrays on a device are read there.
 */
#include "checkpoint.h"

#include <string.h>

struct tensor_digests {
    struct digest_list digests; /* by tensor of the manifest */
    struct operation operation;
    struct memory_manifest items;
    struct memory_device **devices; /* by extent: that digests it; NULL: the CPU, or another rank */
};

/* Whether this rank adds an extent. */
static bool is_own_extent(const struct tensor_digests *d, size_t extent)
{
    const struct catalog *catalog = &d->items.manifest.catalog;
    return d->items.memory[extent].memory &&
           (d->items.only < 0 || catalog->extents[extent].file == (uint32_t)d->items.only);
}

/* ---- boxes in memory ---- */

/* A box of a tensor in the bytes of the tensor: its loops, from strides in memory to those of the tensor. Returns
 * how many bytes of the tensor follow its first row. */
static int64_t box_in_tensor(const struct catalog *catalog, const struct extent_box *box,
                             const int64_t *strides, struct loops *loops)
{
    const struct stored_tensor *tensor = box->tensor;
    size_t element_nbytes = rsd_dtype_nbytes(tensor->dtype);
    int64_t whole[RSD_MAX_DIMS], zeros[RSD_MAX_DIMS] = {0};
    box_packed_strides(tensor->ndim, tensor_shape(catalog, tensor), element_nbytes, whole);
    *loops = box_loops(tensor->ndim, box->len, element_of_bytes(element_nbytes), strides, whole);
    return tensor_nbytes(catalog, tensor) - box_offset(tensor->ndim, box->lo, zeros, whole) -
           (int64_t)loops->run;
}

/* ---- boxes on devices ---- */

/* Rows that one call of a device reads. The loops of row i begin at loops[MAX_LOOPS * i]. */
struct device_rows {
    struct digest_rows *list;
    struct loop *loops;
    size_t n, capacity, loops_capacity;
};

/* Adds the rows of a box in device memory. */
static rsd_status add_device_box(struct tensor_digests *d, struct device_rows *rows, size_t extent)
{
    const struct catalog *catalog = &d->items.manifest.catalog;
    const struct extent_memory *memory = &d->items.memory[extent];
    struct extent_box box = extent_find_box(catalog, extent);
    struct loops loops;
    int64_t after = box_in_tensor(catalog, &box, memory->strides, &loops);
    TRY(GROW(rows->list, rows->capacity, rows->n + 1));
    TRY(GROW(rows->loops, rows->loops_capacity, (rows->n + 1) * MAX_LOOPS));
    memcpy(rows->loops + rows->n * MAX_LOOPS, loops.loop, sizeof loops.loop);
    rows->list[rows->n++] = (struct digest_rows){.address = memory->memory,
                                                 .run = (int64_t)loops.run,
                                                 .after = after,
                                                 .nloops = loops.n,
                                                 .result = (uint32_t)box.index};
    return RSD_OK;
}

/* Finds the devices of the boxes of this rank. */
static rsd_status find_box_devices(struct tensor_digests *d)
{
    size_t nextents = d->items.manifest.catalog.nextents;
    d->devices = mem_new(nextents, sizeof(struct memory_device *));
    if (!d->devices)
        return RSD_ENOMEM;
    for (size_t i = 0; i < nextents; i++)
        if (is_own_extent(d, i))
            TRY(memory_find_device(d->items.memory[i].memory, &d->devices[i]));
    return RSD_OK;
}

/* Lists the boxes of one device, from extent `first` on, and digests them in one call. */
static rsd_status digest_device(struct tensor_digests *d, size_t first, struct device_rows *rows)
{
    const struct catalog *catalog = &d->items.manifest.catalog;
    struct memory_device *device = d->devices[first];
    for (size_t i = first; i < catalog->nextents; i++) {
        if (d->devices[i] != device)
            continue;
        TRY(add_device_box(d, rows, i));
        d->devices[i] = NULL;
    }
    for (size_t i = 0; i < rows->n; i++)
        rows->list[i].loops = rows->loops + i * MAX_LOOPS;
    return digest_add_device_rows(device, d->operation.io.stream, rows->list, rows->n, &d->digests);
}

/* Digests the boxes on each device that has some. */
static rsd_status digest_devices(struct tensor_digests *d)
{
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < d->items.manifest.catalog.nextents && !status; i++) {
        struct device_rows rows = {0};
        if (d->devices[i])
            status = digest_device(d, i, &rows);
        mem_free(rows.list);
        mem_free(rows.loops);
    }
    return status;
}

/* ---- all boxes ---- */

/* Digests one extent, if this rank holds it and it is in host memory. Any thread. */
static void digest_extent(void *context, int64_t index)
{
    struct tensor_digests *d = context;
    const struct catalog *catalog = &d->items.manifest.catalog;
    size_t extent = (size_t)index;
    const struct extent_memory *memory = &d->items.memory[extent];
    struct extent_box box = extent_find_box(catalog, extent);
    struct loops loops;
    int64_t at[MAX_LOOPS] = {0}, from = 0, to = 0;
    if (!is_own_extent(d, extent) || d->devices[extent])
        return;
    int64_t after = box_in_tensor(catalog, &box, memory->strides, &loops);
    do
        digest_add_bytes(&d->digests.list[box.index], memory->memory + from, loops.run,
                         (uint64_t)(after - to));
    while (loops_next(&loops, at, &from, &to));
}

/* Boxes in host memory are digested by all threads, then those of each device by the device. */
static rsd_status digest_extents(void *context)
{
    struct tensor_digests *d = context;
    TRY(find_box_devices(d));
    pool_run(d->operation.io.pool, (int64_t)d->items.manifest.catalog.nextents, digest_extent, d);
    return digest_devices(d);
}

/* ---- the call ---- */

/* Lists the boxes of all tensors, as a save would. Copies of a box are digested by their lowest rank. */
static rsd_status list_boxes(struct tensor_digests *d, int64_t n, const rsd_tensor *tensors,
                             struct hash *arguments)
{
    rsd_save_options options = {.struct_nbytes = sizeof options, .to_lowest_rank = 1};
    d->items.only = d->operation.nranks > 1 ? d->operation.rank : -1;
    if (d->operation.nranks > 1)
        options.nranks = d->operation.nranks;
    TRY(save_prepare(&d->items, n, tensors, &options));
    manifest_hash(&d->items.manifest, arguments);
    d->digests.n = d->items.manifest.catalog.ntensors;
    d->digests.list = mem_new(d->digests.n, sizeof *d->digests.list);
    return d->digests.list ? RSD_OK : RSD_ENOMEM;
}

/* Writes the digests in the order of the caller's list, in which a tensor may occur several times. */
static rsd_status format_tensor_digests(const struct tensor_digests *d, int64_t n,
                                        const rsd_tensor *given, char (*texts)[RSD_DIGEST_NCHARS])
{
    const struct catalog *catalog = &d->items.manifest.catalog;
    for (int64_t i = 0; i < n; i++) {
        rsd_tensor tensor;
        TRY(arrays_take_tensor(given, i, &tensor));
        size_t index = catalog_find_tensor(catalog, tensor.name);
        const struct stored_tensor *stored = &catalog->tensors[index];
        digest_format(&d->digests.list[index], stored->dtype, stored->ndim,
                      tensor_shape(catalog, stored), texts[i]);
    }
    return RSD_OK;
}

rsd_status rsd_digest_tensors(int64_t n, const rsd_tensor *tensors, const rsd_io *io,
                              char (*digests)[RSD_DIGEST_NCHARS])
{
    struct tensor_digests d = {.items.only = -1};
    struct operation_call call = {.work = digest_extents,
                                  .put = digest_list_put,
                                  .take = digest_list_add,
                                  .put_result = digest_list_put,
                                  .take_result = digest_list_replace,
                                  .context = &d};
    struct hash arguments = {0};
    TRY(operation_open(&d.operation, io, NULL));
    rsd_status status = list_boxes(&d, n, tensors, &arguments);
    status = operation_agree(&d.operation, status, arguments);
    if (!status)
        status = operation_run(&d.operation, &call);
    if (!status)
        status = format_tensor_digests(&d, n, tensors, digests);
    mem_free(d.digests.list);
    mem_free(d.devices);
    memory_manifest_drop(&d.items);
    return operation_close(&d.operation, status, NULL);
}
