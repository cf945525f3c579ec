/* items.c - items into a data file whose plan and metadata are somebody else's.
 *
 *     | what is kept | item | item | item | ...
 *
 * It is a save of one file: a draft with a place for each item, and the jobs of a save that fill it. A
 * tensor whose dims are stored in another order is written as the dense array that it is, and its item
 * says the shape and strides that make it what it was.
 */
#include "checkpoint.h"

#include <string.h>

/* Sorts the dims of a tensor by falling strides, and says whether it is dense then. */
static bool dense_order(int32_t ndim, const int64_t *shape, const int64_t *strides, int32_t *order)
{
    int64_t next = 1;
    for (int32_t i = 0; i < ndim; i++) {
        int32_t at = i;
        for (; at > 0 && strides[order[at - 1]] < strides[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (int32_t i = ndim - 1; i >= 0; i--) {
        if (shape[order[i]] == 1)
            continue;
        if (strides[order[i]] != next)
            return false;
        next *= shape[order[i]];
    }
    return true;
}

static rsd_status check_item(const rsd_item *item, const char *name)
{
    int64_t nbytes = (int64_t)rsd_dtype_nbytes(item->dtype);
    if (item->dtype == 0)
        return item->nbytes > 0 && !item->data ? fail(RSD_EINVAL, "%s: no data", name) : RSD_OK;
    if (nbytes == 0)
        return fail(RSD_EINVAL, "%s: %d is no dtype", name, (int)item->dtype);
    if (item->ndim < 0 || item->ndim > RSD_MAX_DIMS)
        return fail(RSD_EINVAL, "%s: %d dims: 0 to %d are possible", name, (int)item->ndim,
                    (int)RSD_MAX_DIMS);
    for (int32_t d = 0; d < item->ndim; d++) {
        if (item->shape[d] < 0)
            return fail(RSD_EINVAL, "%s: dim %d of %lld elements", name, (int)d,
                        (long long)item->shape[d]);
        if (item->strides && item->strides[d] < 0)
            return fail(RSD_EINVAL, "%s: stride %lld of dim %d", name, (long long)item->strides[d],
                        (int)d);
    }
    for (int32_t d = 0; d < item->ndim; d++)
        if (!mul_i64(nbytes, max_i64(item->shape[d], 1), &nbytes))
            return fail(RSD_ELIMIT, "%s: more than 2^63 bytes", name);
    if (box_volume(item->ndim, item->shape) > 0 && !item->data)
        return fail(RSD_EINVAL, "%s: no data", name);
    return RSD_OK;
}

/* ---- the draft ---- */

struct drafting {
    rsd_async_save *saving;
    int64_t *forms; /* shape and strides of each tensor, one behind the other */
    size_t nforms;
    uint64_t at;
    size_t *value_of; /* by item: its value, or SIZE_MAX */
    size_t *extent_of;
};

static rsd_status add_bytes(struct drafting *drafting, const rsd_item *item, struct slice name)
{
    struct manifest *manifest = &drafting->saving->manifest;
    size_t i = manifest->catalog.nvalues;
    struct extent extent = {.offset = drafting->at, .nbytes = item->nbytes, .kind = EXTENT_ITEM};
    TRY(catalog_add_value(&manifest->catalog, name, extent, NULL));
    bytes_put(&manifest->values[i].item, item->data, (size_t)item->nbytes);
    if (manifest->values[i].item.failed)
        return fail(RSD_ENOMEM, "no memory for an item");
    manifest->files[0].nvalues++;
    drafting->at += item->nbytes;
    return RSD_OK;
}

static rsd_status add_tensor(struct drafting *drafting, const rsd_item *item, struct slice name)
{
    struct manifest *manifest = &drafting->saving->manifest;
    struct catalog *catalog = &manifest->catalog;
    int64_t shape[RSD_MAX_DIMS] = {0}, zeros[RSD_MAX_DIMS] = {0}, strides[RSD_MAX_DIMS] = {0};
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(item->dtype), next = 1;
    int32_t order[RSD_MAX_DIMS], n = item->ndim;
    size_t i = catalog->nextents;
    bool empty = box_volume(n, item->shape) == 0;
    bool dense = item->strides && !empty && dense_order(n, item->shape, item->strides, order);
    for (int32_t d = 0; d < n; d++)
        shape[d] = item->shape[dense ? order[d] : d];
    for (int32_t d = n - 1; d >= 0; d--) {
        strides[d] = element_nbytes * (item->strides && !dense ? item->strides[d] : next);
        next *= max_i64(shape[d], 1);
    }
    TRY(catalog_add_tensor(catalog, name, item->dtype, n, shape));
    TRY(catalog_add_box(catalog, zeros, shape,
                        (struct extent){.offset = drafting->at,
                                        .kind = EXTENT_ITEM,
                                        .nzstd = manifest->compress != 0}));
    int64_t *form = NULL;
    if (dense || (item->strides && empty)) {
        form = drafting->forms + drafting->nforms;
        copy_i64s(form, item->shape, n);
        copy_i64s(form + n, item->strides, n);
        drafting->nforms += 2 * (size_t)n;
    }
    manifest->items[i].form = form;
    drafting->saving->origins[i].memory = item->data;
    copy_i64s(drafting->saving->origins[i].strides, strides, n);
    TRY(manifest_item_nbytes(manifest, catalog->ntensors - 1, 0, &manifest->items[i].head,
                             &catalog->extents[i].nbytes));
    drafting->at += catalog->extents[i].nbytes;
    manifest->files[0].nitems++;
    return RSD_OK;
}

static rsd_status add_items(struct drafting *drafting, int64_t nitems, const rsd_item *given)
{
    const char *at = (const char *)given;
    struct catalog *catalog = &drafting->saving->manifest.catalog;
    for (int64_t i = 0; i < nitems; i++) {
        rsd_item item;
        TRY(options_copy("rsd_item", at, &item, sizeof item));
        at += given->struct_nbytes;
        const char *name = item.name ? item.name : "an item";
        TRY(check_item(&item, name));
        drafting->value_of[i] = item.dtype ? SIZE_MAX : catalog->nvalues;
        drafting->extent_of[i] = catalog->nextents;
        struct slice slice = {name, strlen(name)};
        TRY(item.dtype ? add_tensor(drafting, &item, slice) : add_bytes(drafting, &item, slice));
    }
    return RSD_OK;
}

static rsd_status draft_items(struct drafting *drafting, int64_t nitems, const rsd_item *items,
                              const char *file, uint64_t offset)
{
    struct manifest *manifest = &drafting->saving->manifest;
    size_t n = (size_t)nitems;
    drafting->saving->origins = mem_new(n, sizeof *drafting->saving->origins);
    drafting->forms = mem_new(n, 2 * RSD_MAX_DIMS * sizeof *drafting->forms);
    drafting->value_of = mem_new(n, sizeof *drafting->value_of);
    drafting->extent_of = mem_new(n, sizeof *drafting->extent_of);
    manifest->values = mem_new(n, sizeof *manifest->values);
    manifest->items = mem_new(n, sizeof *manifest->items);
    if (!drafting->saving->origins || !drafting->forms || !drafting->value_of ||
        !drafting->extent_of || !manifest->values || !manifest->items)
        return RSD_ENOMEM;
    TRY(manifest_add_file(manifest, file));
    manifest->files[0].kept = drafting->at = offset;
    TRY(add_items(drafting, nitems, items));
    manifest->files[0].nbytes = drafting->at;
    return save_list_jobs(drafting->saving);
}

/* ---- writing ---- */

static rsd_status write_drafted(rsd_async_save *saving, const char *folder, bool sync)
{
    struct output_options options = {.mode = OUTPUT_IN_PLACE, .storage = saving->options.storage};
    struct store_output *dest;
    double began = seconds_now();
    TRY(store_open_output(folder, &options, &dest));
    rsd_status status = output_open(&saving->output, &saving->manifest, dest, NULL, -1);
    if (!status) {
        saving->output.unsynced = dest->store->unsynced = !sync;
        status = save_write_files(saving);
        output_close(&saving->output);
    }
    store_close_output(dest, true);
    saving->report.seconds = seconds_now() - began;
    return status;
}

static void tell_places(const struct drafting *drafting, int64_t nitems, uint64_t *places)
{
    const struct catalog *catalog = &drafting->saving->manifest.catalog;
    for (int64_t i = 0; i < nitems; i++) {
        size_t value = drafting->value_of[i];
        const struct extent *extent = value == SIZE_MAX ? &catalog->extents[drafting->extent_of[i]]
                                                        : &catalog->values[value].extent;
        places[2 * i] = extent->offset;
        places[2 * i + 1] = extent->nbytes;
    }
}

static rsd_status write_items(struct drafting *drafting, const char *path, int64_t nitems,
                              const rsd_item *items, const rsd_items_options *options,
                              uint64_t *places)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    const char *name = slash ? slash + 1 : path;
    TRY(store_check_name((struct slice){name, strlen(name)}));
    char *folder = mem_new(n + 2, 1);
    if (!folder)
        return RSD_ENOMEM;
    memcpy(folder, slash == path ? "/" : path, slash == path ? 1 : n);
    rsd_status status = draft_items(drafting, nitems, items, name, options->offset);
    if (!status)
        status = write_drafted(drafting->saving, folder, options->sync != 0);
    if (!status)
        tell_places(drafting, nitems, places);
    mem_free(folder);
    return status;
}

rsd_status rsd_dcp_write_items(const char *path, int64_t nitems, const rsd_item *items,
                               const rsd_items_options *given, uint64_t *places, rsd_report *report)
{
    rsd_items_options options;
    struct drafting drafting = {0};
    TRY(options_copy("rsd_items_options", given, &options, sizeof options));
    if (report)
        TRY(report_check("rsd_report", report));
    if (nitems < 0)
        return fail(RSD_EINVAL, "%lld items", (long long)nitems);
    drafting.saving = mem_new(1, sizeof *drafting.saving);
    if (!drafting.saving)
        return RSD_ENOMEM;
    drafting.saving->options = (rsd_save_options){.pool = options.pool,
                                                  .on_progress = options.on_progress,
                                                  .context = options.context,
                                                  .storage = options.storage};
    drafting.saving->tile_limit = tile_limit(options.max_nbytes, options.pool);
    rsd_status status =
        operation_open(&drafting.saving->operation, NULL, 0, options.on_progress, options.context);
    if (!status)
        status = manifest_start(&drafting.saving->manifest, RSD_FORMAT_DCP, options.compress);
    if (!status)
        status = write_items(&drafting, path, nitems, items, &options, places);
    if (!status && report)
        report_copy(report, &drafting.saving->report, sizeof drafting.saving->report);
    mem_free(drafting.forms);
    mem_free(drafting.value_of);
    mem_free(drafting.extent_of);
    save_drop(drafting.saving);
    return status;
}
