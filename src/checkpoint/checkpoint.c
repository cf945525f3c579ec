/* checkpoint.c - opens a checkpoint, and answers what is in it. */
#include "checkpoint.h"

#include <string.h>

/* ---- opening ---- */

static rsd_status check_finished(const struct store_listing *listing)
{
    for (size_t i = 0; i < listing->n; i++)
        if (strcmp(listing->entries[i].base, JOURNAL_NAME) == 0)
            return fail(RSD_EFORMAT, "output is not finished; resume its run");
    return RSD_OK;
}

/* file: the name of the one file that the path names; NULL: the path is a directory. */
static rsd_status open_files(rsd_checkpoint *checkpoint, const char *path, const char *file,
                             const rsd_open_options *options)
{
    struct store_listing listing = {0};
    rsd_status status = RSD_OK;
    if (file)
        status = store_listing_add(&listing, "", file, false);
    else if (!options->metadata)
        status = store_list(checkpoint->store, "", &listing);
    if (!status)
        status = check_finished(&listing);
    if (status)
        status = fail_in(status, "%s: ", path);
    else
        status = format_open(checkpoint, path, &listing, file != NULL, options);
    store_listing_drop(&listing);
    return status;
}

rsd_status rsd_checkpoint_open(const char *path, const rsd_open_options *given,
                               rsd_checkpoint **out)
{
    rsd_open_options options;
    const char *file;
    TRY(options_copy("rsd_open_options", given, &options, sizeof options));
    rsd_checkpoint *checkpoint = mem_new(1, sizeof *checkpoint);
    if (!checkpoint)
        return RSD_ENOMEM;
    rsd_status status = store_open(path, options.storage, &checkpoint->store, &file);
    if (!status)
        status = open_files(checkpoint, path, file, &options);
    if (status)
        rsd_checkpoint_close(checkpoint);
    else
        *out = checkpoint;
    return status;
}

void rsd_checkpoint_close(rsd_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    store_close(checkpoint->store);
    catalog_drop(&checkpoint->catalog);
    mem_free(checkpoint);
}

rsd_status checkpoint_list_owned(const char *path, rsd_storage *storage, struct name_list *owned)
{
    rsd_open_options options = {.struct_nbytes = sizeof options, .storage = storage};
    rsd_checkpoint *checkpoint;
    struct store_listing listing;
    TRY(rsd_checkpoint_open(path, &options, &checkpoint));
    const struct format *format = checkpoint->format;
    rsd_status status = store_list(checkpoint->store, "", &listing);
    for (size_t i = 0; i < checkpoint->store->names.n && !status; i++)
        status = name_list_add(owned, checkpoint->store->names.list[i]);
    for (size_t i = 0; i < listing.n && !status; i++) {
        const char *name = listing.entries[i].name;
        if (format->owns && format->owns(name))
            status = name_list_add(owned, (struct slice){name, strlen(name)});
    }
    store_listing_drop(&listing);
    rsd_checkpoint_close(checkpoint);
    return status;
}

/* ---- questions of other files ---- */

rsd_status checkpoint_fail_in(const rsd_checkpoint *checkpoint, uint32_t file, const char *name,
                              rsd_status status)
{
    return store_fail_in(checkpoint->store, file, fail_in(status, "%.300s: ", name));
}

rsd_status layout_check_coverage(const rsd_layout *layout, const char *holder)
{
    rsd_coverage coverage = {.struct_nbytes = sizeof coverage};
    char text[BOX_TEXT_NCHARS];
    TRY(rsd_layout_coverage(layout, &coverage));
    if (coverage.kind != RSD_MISSES)
        return RSD_OK;
    const rsd_box *box = &coverage.box;
    return fail(RSD_EMISMATCH, "no %s has %s", holder,
                box_text(box->ndim, box->lo, box->len, text));
}

rsd_status tensor_check_coverage(const struct catalog *catalog, size_t tensor)
{
    rsd_layout *layout;
    TRY(catalog_tensor_layout(catalog, &catalog->tensors[tensor], true, &layout));
    rsd_status status = layout_check_coverage(layout, "file");
    rsd_layout_free(layout);
    return status ? fail_in(status, "%s: ", catalog->tensors[tensor].name) : RSD_OK;
}

size_t tensor_of_extent(const struct catalog *catalog, size_t extent)
{
    size_t low = 0, high = catalog->ntensors; /* the last tensor that begins there or before */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (catalog->tensors[middle].first_extent <= extent)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* ---- queries ---- */

rsd_format rsd_checkpoint_format(const rsd_checkpoint *checkpoint)
{
    return checkpoint->format->id;
}

int64_t rsd_checkpoint_ntensors(const rsd_checkpoint *checkpoint)
{
    return (int64_t)checkpoint->catalog.ntensors;
}

static rsd_status tensor_at(const rsd_checkpoint *checkpoint, int64_t index,
                            const struct stored_tensor **tensor)
{
    if (index < 0 || (uint64_t)index >= checkpoint->catalog.ntensors)
        return fail(RSD_EINVAL, "invalid tensor %lld: the checkpoint has %zu", (long long)index,
                    checkpoint->catalog.ntensors);
    *tensor = &checkpoint->catalog.tensors[index];
    return RSD_OK;
}

rsd_status rsd_checkpoint_tensor(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_tensor_info *out)
{
    const struct stored_tensor *tensor;
    TRY(report_check("rsd_tensor_info", out));
    TRY(tensor_at(checkpoint, index, &tensor));
    const int64_t *shape = tensor_shape(&checkpoint->catalog, tensor);
    rsd_tensor_info result = {.name = tensor->name,
                              .dtype = tensor->dtype,
                              .ndim = tensor->ndim,
                              .nboxes = (int64_t)tensor->nboxes,
                              .path = tensor->path};
    copy_i64s(result.shape, shape, tensor->ndim);
    result.nbytes = box_volume(tensor->ndim, shape) * (int64_t)rsd_dtype_nbytes(tensor->dtype);
    report_copy(out, &result, sizeof result);
    return RSD_OK;
}

rsd_status rsd_checkpoint_find(const rsd_checkpoint *checkpoint, const char *name, int64_t *index)
{
    size_t found = catalog_find_tensor(&checkpoint->catalog, name);
    if (found == SIZE_MAX)
        return fail(RSD_EMISMATCH, "%s: the checkpoint has no such tensor", name);
    *index = (int64_t)found;
    return RSD_OK;
}

rsd_status rsd_checkpoint_layout(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_layout **layout)
{
    const struct stored_tensor *tensor;
    const struct catalog *catalog = &checkpoint->catalog;
    TRY(tensor_at(checkpoint, index, &tensor));
    return catalog_tensor_layout(catalog, tensor, true, layout);
}

int64_t rsd_checkpoint_nfiles(const rsd_checkpoint *checkpoint)
{
    return (int64_t)checkpoint->store->names.n;
}

const char *rsd_checkpoint_file(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool there = index >= 0 && (uint64_t)index < checkpoint->store->names.n;
    return there ? checkpoint->store->names.list[index].bytes : NULL;
}

rsd_status rsd_checkpoint_box(const rsd_checkpoint *checkpoint, int64_t index, int64_t box,
                              rsd_extent *out)
{
    const struct stored_tensor *tensor;
    const struct catalog *catalog = &checkpoint->catalog;
    TRY(report_check("rsd_extent", out));
    TRY(tensor_at(checkpoint, index, &tensor));
    if (box < 0 || (uint64_t)box >= tensor->nboxes)
        return fail(RSD_EINVAL, "%s: invalid box %lld: the tensor has %zu", tensor->name,
                    (long long)box, tensor->nboxes);
    const struct extent *extent = &catalog->extents[tensor->first_extent + (size_t)box];
    rsd_extent result = {.file = extent->kind == EXTENT_NONE ? -1 : (int64_t)extent->file,
                         .offset = extent->offset,
                         .nbytes = extent->nbytes};
    box_set(&result.box, tensor->ndim, tensor_box_lo(catalog, tensor, (size_t)box),
            tensor_box_len(catalog, tensor, (size_t)box));
    report_copy(out, &result, sizeof result);
    return RSD_OK;
}

int64_t rsd_checkpoint_nvalues(const rsd_checkpoint *checkpoint)
{
    return (int64_t)checkpoint->catalog.nvalues;
}

const char *rsd_checkpoint_value_name(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool there = index >= 0 && (uint64_t)index < checkpoint->catalog.nvalues;
    return there ? checkpoint->catalog.values[index].name : NULL;
}

const char *rsd_checkpoint_value_path(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool there = index >= 0 && (uint64_t)index < checkpoint->catalog.nvalues;
    return there ? checkpoint->catalog.values[index].path : NULL;
}

static rsd_status value_at(const rsd_checkpoint *checkpoint, int64_t index,
                           const struct stored_value **value)
{
    if (index < 0 || (uint64_t)index >= checkpoint->catalog.nvalues)
        return fail(RSD_EINVAL, "invalid value %lld: the checkpoint has %zu", (long long)index,
                    checkpoint->catalog.nvalues);
    *value = &checkpoint->catalog.values[index];
    return RSD_OK;
}

rsd_status rsd_checkpoint_value(rsd_checkpoint *checkpoint, int64_t index, char **json)
{
    const struct stored_value *value;
    TRY(value_at(checkpoint, index, &value));
    if (value->extent.kind != EXTENT_NONE) {
        rsd_status status = value_read_json(checkpoint, value, json);
        return status ? checkpoint_fail_in(checkpoint, value->extent.file, value->name, status)
                      : RSD_OK;
    }
    char *copy = value->json ? mem_copy(value->json, strlen(value->json) + 1, 1) : NULL;
    if (value->json && !copy)
        return RSD_ENOMEM;
    *json = copy;
    return RSD_OK;
}

rsd_status rsd_checkpoint_value_item(rsd_checkpoint *checkpoint, int64_t index, void **item,
                                     size_t *nbytes)
{
    const struct stored_value *value;
    struct bytes bytes = {0};
    TRY(value_at(checkpoint, index, &value));
    rsd_status status = RSD_OK;
    if (value->extent.kind != EXTENT_NONE)
        status = checkpoint->format->read_item(checkpoint, value, &bytes);
    if (status) {
        bytes_drop(&bytes);
        return checkpoint_fail_in(checkpoint, value->extent.file, value->name, status);
    }
    *item = bytes.data;
    *nbytes = bytes.n;
    return RSD_OK;
}
