/* write_items.c - items in a data file whose plan and metadata another program makes.
 *
 *     | bytes that are kept | item | item | item | ...
 *
 * It is a save of one file: a manifest with an offset for each item, and its memory. A tensor whose dims have
 * another order in memory is written as the dense array that it is, and its item states the shape and strides that
 * it had. Plain items are the elements of safetensors, whose header the caller passes as bytes.
 */
#include "checkpoint.h"

#include "reshard_experimental.h"

#include <string.h>

/* Sorts the dims of a tensor by falling strides, and returns whether it is dense in that order. */
static bool find_dense_order(int32_t ndim, const int64_t *shape, const int64_t *strides,
                             int32_t *order)
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

/* Checks that no stride is negative, and that those that count fit in bytes. */
static rsd_status check_item_strides(const rsd_item *item)
{
    int64_t nbytes;
    for (int32_t d = 0; item->strides && d < item->ndim; d++) {
        if (item->strides[d] < 0)
            return fail(RSD_EINVAL, "invalid stride %lld of dim %d", (long long)item->strides[d],
                        (int)d);
        if (item->shape[d] > 1 &&
            !mul_i64(item->strides[d], (int64_t)rsd_dtype_nbytes(item->dtype), &nbytes))
            return fail(RSD_ELIMIT, "stride %lld of dim %d is 2^63 bytes or more",
                        (long long)item->strides[d], (int)d);
    }
    return RSD_OK;
}

/* Checks the shape, the strides and the pointer of an item. */
static rsd_status check_item(const rsd_item *item)
{
    rsd_layout *checked;
    uint64_t nbytes = item->nbytes;
    if (item->dtype) {
        TRY(layout_start(item->dtype, item->ndim, item->shape, &checked));
        nbytes = (uint64_t)checked->volume;
        rsd_layout_free(checked);
        TRY(check_item_strides(item));
    }
    return nbytes > 0 && !item->data ? fail(RSD_EINVAL, "data is NULL") : RSD_OK;
}

/* ---- the manifest ---- */

struct item_list {
    struct memory_manifest items;
    int64_t *forms; /* shape and strides of tensors, one behind the other */
    size_t nforms;
    uint64_t end;      /* of the last item, in the file */
    size_t *extent_of; /* by item: its extent; of bytes, the value behind all extents */
};

/* Adds an item of bytes, which is copied. */
static rsd_status add_bytes_item(struct item_list *list, const rsd_item *item, struct slice name)
{
    struct manifest *manifest = &list->items.manifest;
    struct bytes *bytes = &manifest->values[manifest->catalog.nvalues].item;
    struct extent extent = {.offset = list->end, .nbytes = item->nbytes, .kind = EXTENT_ITEM};
    TRY(catalog_add_value(&manifest->catalog, name, extent, NULL));
    bytes_put(bytes, item->data, (size_t)item->nbytes);
    if (bytes->failed)
        return fail(RSD_ENOMEM, "no memory for an item");
    manifest->files[0].nvalues++;
    list->end += item->nbytes;
    return RSD_OK;
}

/* Adds a tensor. If its memory is dense in some order of dims, an item of torch.save has that order, and its strides. */
static rsd_status add_tensor_item(struct item_list *list, const rsd_item *item, struct slice name)
{
    struct manifest *manifest = &list->items.manifest;
    struct catalog *catalog = &manifest->catalog;
    size_t i = catalog->nextents;
    struct extent_memory *memory = &list->items.memory[i];
    struct extent extent = {
        .offset = list->end, .kind = EXTENT_ITEM, .nzstd = manifest->compress != 0};
    int64_t shape[RSD_MAX_DIMS] = {0}, zeros[RSD_MAX_DIMS] = {0}, stride = 1;
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(item->dtype);
    int32_t order[RSD_MAX_DIMS] = {0}, n = item->ndim;
    bool empty = box_volume(n, item->shape) == 0;
    bool framed = manifest->format->writer->frame != NULL; /* else there is no place for strides */
    bool dense =
        framed && item->strides && !empty && find_dense_order(n, item->shape, item->strides, order);
    for (int32_t d = 0; d < n; d++)
        shape[d] = item->shape[dense ? order[d] : d];
    for (int32_t d = n - 1; d >= 0 && !empty; d--) {
        if (shape[d] > 1) /* else any stride will do */
            memory->strides[d] =
                element_nbytes * (item->strides && !dense ? item->strides[d] : stride);
        stride *= shape[d];
    }
    memory->memory = item->data;
    TRY(catalog_add_tensor(catalog, name, item->dtype, n, shape));
    TRY(catalog_add_box(catalog, zeros, shape, extent));
    if (dense || (framed && item->strides && empty)) {
        int64_t *form = list->forms + list->nforms;
        copy_i64s(form, item->shape, n);
        copy_i64s(form + n, item->strides, n);
        list->nforms += 2 * (size_t)n;
        manifest->items[i].form = form;
    }
    TRY(manifest_item_nbytes(manifest, catalog->ntensors - 1, 0, &manifest->items[i].head,
                             &catalog->extents[i].nbytes));
    list->end += catalog->extents[i].nbytes;
    manifest->files[0].nitems++;
    return RSD_OK;
}

/* Lists the items, which follow each other in the file from `offset` on. */
static rsd_status list_items(struct item_list *list, size_t n, const rsd_item *given,
                             const char *file, uint64_t offset)
{
    const char *at = (const char *)given;
    struct manifest *manifest = &list->items.manifest;
    list->items.memory = mem_new(n, sizeof *list->items.memory);
    list->forms = mem_new(n, 2 * RSD_MAX_DIMS * sizeof *list->forms);
    list->extent_of = mem_new(n, sizeof *list->extent_of);
    manifest->values = mem_new(n, sizeof *manifest->values);
    manifest->items = mem_new(n, sizeof *manifest->items);
    if (!list->items.memory || !list->forms || !list->extent_of || !manifest->values ||
        !manifest->items)
        return RSD_ENOMEM;
    TRY(manifest_add_file(manifest, file));
    manifest->files[0].kept = list->end = offset;
    for (size_t i = 0; i < n; i++) {
        rsd_item item;
        TRY(options_copy("rsd_item", at, &item, sizeof item));
        at += given->struct_nbytes;
        struct slice name = {item.name ? item.name : "item", 0};
        name.nbytes = strlen(name.bytes);
        rsd_status status = check_item(&item);
        if (status)
            return fail_in(status, "%s: ", name.bytes);
        list->extent_of[i] =
            item.dtype ? manifest->catalog.nextents : n + manifest->catalog.nvalues;
        TRY(item.dtype ? add_tensor_item(list, &item, name) : add_bytes_item(list, &item, name));
    }
    manifest->files[0].nbytes = list->end;
    return RSD_OK;
}

/* ---- writing ---- */

/* Writes the items into a file of the directory, in place. */
static rsd_status write_listed_items(struct operation *operation, struct item_list *list,
                                     const char *directory, bool sync)
{
    struct output_options options = {.mode = OUTPUT_IN_PLACE, .storage = operation->io.storage};
    struct writer writer = {0};
    struct store_output *dest;
    TRY(store_open_output(directory, &options, &dest));
    rsd_status status = writer_open(&writer, &list->items.manifest, dest, NULL, -1);
    if (!status) {
        writer.unsynced = dest->store->unsynced = !sync;
        status = save_write_files(operation, &list->items, &writer);
    }
    writer_close(&writer);
    store_close_output(dest, true);
    return status;
}

static void copy_extents(const struct item_list *list, size_t n, uint64_t *places)
{
    const struct catalog *catalog = &list->items.manifest.catalog;
    for (size_t i = 0; i < n; i++) {
        size_t index = list->extent_of[i];
        const struct extent *extent =
            index < n ? &catalog->extents[index] : &catalog->values[index - n].extent;
        places[2 * i] = extent->offset;
        places[2 * i + 1] = extent->nbytes;
    }
}

/* Checks the arguments, lists the items and writes them. */
static rsd_status write_items(struct operation *operation, struct item_list *list, const char *path,
                              int64_t n, const rsd_item *items, const rsd_items_options *options)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (operation->io.transport)
        return fail(RSD_EINVAL, "rsd_dcp_write_items does not take a transport");
    if (n < 0)
        return fail(RSD_EINVAL, "invalid number of items %lld", (long long)n);
    if (options->plain && options->compress)
        return fail(RSD_EINVAL, "plain items cannot be compressed");
    TRY(store_check_name((struct slice){name, strlen(name)}));
    TRY(manifest_start(&list->items.manifest,
                       options->plain ? RSD_FORMAT_SAFETENSORS : RSD_FORMAT_DCP,
                       options->compress));
    TRY(list_items(list, (size_t)n, items, name, options->offset));
    size_t directory_n = slash == path ? 1 : slash ? (size_t)(slash - path) : 0;
    char *directory = mem_new(directory_n + 1, 1);
    if (!directory)
        return RSD_ENOMEM;
    memcpy(directory, path, directory_n);
    rsd_status status = write_listed_items(operation, list, directory, options->sync != 0);
    mem_free(directory);
    return status;
}

rsd_status rsd_dcp_write_items(const char *path, int64_t n, const rsd_item *items,
                               const rsd_items_options *given, uint64_t *places, rsd_report *report)
{
    rsd_items_options options;
    struct operation operation;
    struct item_list list = {.items.only = -1};
    TRY(options_copy("rsd_items_options", given, &options, sizeof options));
    TRY(operation_open(&operation, options.io, report));
    rsd_status status = write_items(&operation, &list, path, n, items, &options);
    if (!status)
        copy_extents(&list, (size_t)n, places);
    memory_manifest_drop(&list.items);
    mem_free(list.forms);
    mem_free(list.extent_of);
    return operation_close(&operation, status, report);
}

/* ---- files ---- */

rsd_status rsd_dcp_list_files(const char *path, rsd_storage *storage, rsd_on_name *on_name,
                              void *context)
{
    struct store *store = NULL;
    struct store_listing listing = {0};
    const char *file = NULL;
    rsd_status status = store_open(path, storage, &store, &file);
    if (status == RSD_ENOENT)
        return RSD_OK;
    if (!status && file)
        status = fail(RSD_EINVAL, "%s is a file, not a directory", path);
    if (!status)
        status = store_list(store, "", &listing);
    for (size_t i = 0; i < listing.n && !status; i++)
        if (!listing.entries[i].directory)
            status = on_name(context, listing.entries[i].name);
    store_listing_drop(&listing);
    store_close(store);
    return status == RSD_ENOENT ? RSD_OK : status;
}

rsd_status rsd_dcp_remove_files(const char *path, rsd_storage *storage, int64_t nnames,
                                const char *const *names)
{
    struct output_options options = {.mode = OUTPUT_IN_PLACE, .storage = storage};
    struct store_output *output;
    TRY(store_open_output(path, &options, &output));
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < nnames && !status; i++) {
        status = store_check_name((struct slice){names[i], strlen(names[i])});
        if (!status)
            status = store_remove(output->store, names[i]);
        status = status == RSD_ENOENT ? RSD_OK : status;
    }
    store_close_output(output, true);
    return status;
}
