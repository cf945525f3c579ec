/* checkpoint.c - opens a checkpoint, and answers what is in it. */
#include "rules.h"

#include <stdio.h>
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
                             const rsd_open_options *options, bool staged)
{
    struct store_listing listing = {0};
    rsd_status status = RSD_OK;
    if (file)
        status = store_listing_add(&listing, "", file, false);
    else if (!options->metadata)
        status = store_list(checkpoint->store, "", &listing);
    if (!status && !staged)
        status = check_finished(&listing);
    if (status)
        status = fail_in(status, "%s: ", path);
    else if (options->from && !file)
        status = rules_open_joined(checkpoint, &listing, options);
    else
        status = format_open(checkpoint, path, &listing, file != NULL, options);
    store_listing_drop(&listing);
    TRY(status);
    status = format_derive_tensors(checkpoint, options);
    if (!status && options->names)
        status = names_apply(checkpoint, options);
    return status ? fail_in(status, "%s: ", path) : RSD_OK;
}

/* Opens the files of a store within a budget, which is in proportion to what is read of them. */
static rsd_status open_within_budget(rsd_checkpoint *checkpoint, const char *path, const char *file,
                                     const rsd_open_options *options, bool staged)
{
    struct budget budget;
    checkpoint->spare_steps = START_STEPS;
    checkpoint->store->follow_links = options->follow_links != 0;
    budget_begin(&budget, START_STEPS, true);
    rsd_status status =
        budget_end(&budget, open_files(checkpoint, path, file, options, staged), NULL);
    if (budget.exceeded && !budget.reported && status == RSD_EFORMAT)
        status = fail_in(status, "%s: ", path);
    return status;
}

/* Opens the checkpoint at a path, within a budget of work. `staged`: it is complete and not at its path yet. */
static rsd_status open_path(const char *path, const rsd_open_options *options, bool staged,
                            rsd_checkpoint **out)
{
    const char *file;
    rsd_checkpoint *checkpoint = mem_new(1, sizeof *checkpoint);
    if (!checkpoint)
        return RSD_ENOMEM;
    rsd_status status = item_cache_open(&checkpoint->items);
    if (!status)
        status = store_open(path, options->storage, &checkpoint->store, &file);
    if (!status)
        status = open_within_budget(checkpoint, path, file, options, staged);
    if (status)
        rsd_checkpoint_close(checkpoint);
    else
        *out = checkpoint;
    return status;
}

rsd_status rsd_checkpoint_open(const char *path, const rsd_open_options *given,
                               rsd_checkpoint **out)
{
    rsd_open_options options;
    TRY(options_copy("rsd_open_options", given, &options, sizeof options));
    if ((options.nheads || options.nkv_heads) && !options.names)
        return fail(RSD_EINVAL, "nheads and nkv_heads (--heads) need names (--names)");
    return open_path(path, &options, false, out);
}

rsd_status checkpoint_open_staged(const struct store_output *output, const char *file,
                                  rsd_checkpoint **checkpoint)
{
    const rsd_open_options options = {.struct_nbytes = sizeof options};
    struct text text = {0};
    char *path;
    text_add(&text, "%s%s%s", output->store->path, file ? "/" : "", file ? file : "");
    TRY(text_take(&text, &path));
    rsd_status status = open_path(path, &options, true, checkpoint);
    rsd_free(path);
    return status;
}

void rsd_checkpoint_close(rsd_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    store_close(checkpoint->store);
    item_cache_close(checkpoint->items);
    derive_drop(checkpoint->derivation);
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

rsd_status layout_check_shape(const rsd_layout *layout, int32_t ndim, const int64_t *shape)
{
    char one[SHAPE_TEXT_NCHARS], other[SHAPE_TEXT_NCHARS];
    bool same = layout->ndim == ndim;
    for (int32_t d = 0; d < ndim && same; d++)
        same = layout->shape[d] == shape[d];
    return same
               ? RSD_OK
               : fail(RSD_EMISMATCH, "shape differs: tensor %s, layout %s",
                      shape_text(ndim, shape, one), shape_text(layout->ndim, layout->shape, other));
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

struct extent_box extent_find_box(const struct catalog *catalog, size_t extent)
{
    size_t index = tensor_of_extent(catalog, extent);
    const struct stored_tensor *tensor = &catalog->tensors[index];
    size_t box = extent - tensor->first_extent;
    return (struct extent_box){.index = index,
                               .tensor = tensor,
                               .box = box,
                               .lo = tensor_box_lo(catalog, tensor, box),
                               .len = tensor_box_len(catalog, tensor, box),
                               .nbytes = box_nbytes(catalog, tensor, box)};
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

/* Returns whether a name is `longer` without something in front that ends in a dot. */
static bool is_end_of_name(const char *longer, const char *name)
{
    size_t n = strlen(longer), m = strlen(name);
    return n > m + 1 && longer[n - m - 1] == '.' && strcmp(longer + n - m, name) == 0;
}

rsd_status catalog_explain_missing(const struct catalog *catalog, const char *name)
{
    char error[2048];
    snprintf(error, sizeof error, "%s", rsd_error());
    for (size_t i = 0; i < catalog->ntensors; i++) {
        const char *stored = catalog->tensors[i].name;
        if (is_end_of_name(stored, name))
            return fail(RSD_EMISMATCH, "%s; names here begin with %.*s", error,
                        (int)(strlen(stored) - strlen(name)), stored);
        if (is_end_of_name(name, stored))
            return fail(RSD_EMISMATCH, "%s; names here lack %.*s", error,
                        (int)(strlen(name) - strlen(stored)), name);
    }
    const char *nearest = NULL;
    for (size_t i = 0; i < catalog->ntensors; i++) {
        const char *words[] = {nearest ? nearest : "", catalog->tensors[i].name};
        nearest = rsd_nearest_word(name, 2, words);
    }
    return nearest ? fail(RSD_EMISMATCH, "%s; did you mean %s?", error, nearest) : RSD_EMISMATCH;
}

rsd_status rsd_checkpoint_find(const rsd_checkpoint *checkpoint, const char *name, int64_t *index)
{
    size_t found = catalog_find_tensor(&checkpoint->catalog, name);
    size_t value = found == SIZE_MAX ? catalog_find_value(&checkpoint->catalog, name) : SIZE_MAX;
    if (value != SIZE_MAX && checkpoint->catalog.values[value].refused)
        return fail(RSD_EUNSUPPORTED, "%s: %s", name, checkpoint->catalog.values[value].refused);
    if (found == SIZE_MAX) {
        error_set("%s: the checkpoint has no such tensor", name);
        return catalog_explain_missing(&checkpoint->catalog, name);
    }
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

rsd_status rsd_checkpoint_check_claims(rsd_checkpoint *checkpoint)
{
    return format_check_claims(checkpoint);
}

const char *rsd_checkpoint_note(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool known = index >= 0 && (uint64_t)index < checkpoint->catalog.nnotes;
    return known ? checkpoint->catalog.notes[index] : NULL;
}

const char *rsd_checkpoint_file(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool there = index >= 0 && (uint64_t)index < checkpoint->store->names.n;
    return there ? checkpoint->store->names.list[index].bytes : NULL;
}

/* Returns the names of the transforms of an item as JSON; NULL: none. */
static const char *transform_names(const struct catalog *catalog, const struct extent *extent)
{
#define ZSTD_NAME "\"stream.zstd/1\""
    static const char *const compressed[] = {
        NULL, "[" ZSTD_NAME "]", "[" ZSTD_NAME ", " ZSTD_NAME "]",
        "[" ZSTD_NAME ", " ZSTD_NAME ", " ZSTD_NAME "]",
        "[" ZSTD_NAME ", " ZSTD_NAME ", " ZSTD_NAME ", " ZSTD_NAME "]"};
    if (extent->unknown)
        return catalog->transforms[extent->detail].names;
    size_t most = sizeof compressed / sizeof *compressed - 1;
    return compressed[extent->nzstd < most ? extent->nzstd : most]; /* more are only counted */
}

static rsd_extent make_extent(const struct catalog *catalog, const struct extent *extent)
{
    return (rsd_extent){.file = extent->kind == EXTENT_NONE ? -1 : (int64_t)extent->file,
                        .offset = extent->offset,
                        .nbytes = extent->nbytes,
                        .transforms = transform_names(catalog, extent)};
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
    rsd_extent result = make_extent(catalog, extent);
    box_set(&result.box, tensor->ndim, tensor_box_lo(catalog, tensor, (size_t)box),
            tensor_box_len(catalog, tensor, (size_t)box));
    report_copy(out, &result, sizeof result);
    return RSD_OK;
}

const char *rsd_checkpoint_save_id(const rsd_checkpoint *checkpoint)
{
    return checkpoint->catalog.save_id;
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
    if (value->refused)
        return fail(RSD_EUNSUPPORTED, "%.300s: %s", value->name, value->refused);
    if (value->extent.kind != EXTENT_NONE) {
        rsd_status status = value_read_json(checkpoint, value, json);
        return status ? checkpoint_fail_in(checkpoint, value->extent.file, value->name, status)
                      : RSD_OK;
    }
    char *copy = value->json ? text_copy(value->json) : NULL;
    if (value->json && !copy)
        return RSD_ENOMEM;
    *json = copy;
    return RSD_OK;
}

rsd_status rsd_checkpoint_value_extent(const rsd_checkpoint *checkpoint, int64_t index,
                                       rsd_extent *out)
{
    const struct stored_value *value;
    TRY(report_check("rsd_extent", out));
    TRY(value_at(checkpoint, index, &value));
    rsd_extent result = make_extent(&checkpoint->catalog, &value->extent);
    report_copy(out, &result, sizeof result);
    return RSD_OK;
}

rsd_status checkpoint_check_value(rsd_checkpoint *checkpoint, const struct stored_value *value)
{
    if (value->extent.kind == EXTENT_NONE)
        return RSD_OK;
    rsd_status status = value_check(checkpoint, value);
    return status ? checkpoint_fail_in(checkpoint, value->extent.file, value->name, status)
                  : RSD_OK;
}

rsd_status checkpoint_read_value(rsd_checkpoint *checkpoint, const struct stored_value *value,
                                 struct bytes *item)
{
    rsd_status status = value_read_item(checkpoint, value, item);
    if (!status)
        return RSD_OK;
    bytes_drop(item);
    return checkpoint_fail_in(checkpoint, value->extent.file, value->name, status);
}

rsd_status rsd_checkpoint_value_item(rsd_checkpoint *checkpoint, int64_t index, void **item,
                                     size_t *nbytes)
{
    const struct stored_value *value;
    struct bytes bytes = {0};
    TRY(value_at(checkpoint, index, &value));
    if (value->extent.kind != EXTENT_NONE)
        TRY(checkpoint_read_value(checkpoint, value, &bytes));
    *item = bytes.data;
    *nbytes = bytes.n;
    return RSD_OK;
}
