/* dcp_item.c - the row of PyTorch's distributed checkpoints, and the bytes of one tensor in a data file.
 *
 * An item is what torch.save writes for a tensor, or a safetensors blob with the tensor in it. Either may
 * be compressed as a whole, and then its bytes are a stream.
 */
#include "safetensors.h"
#include "torch_item.h"

/* Checks that the tensor in an item has the dtype and the shape that the metadata states. */
static rsd_status check_stored(const struct stored_tensor *tensor, const int64_t *len,
                               const struct torch_view *view)
{
    char stored[SHAPE_TEXT_NCHARS], expected[SHAPE_TEXT_NCHARS];
    if (view->dtype != tensor->dtype)
        return fail(RSD_EFORMAT, "dtype is %s in the item, but %s in the metadata",
                    rsd_dtype_name(view->dtype), rsd_dtype_name(tensor->dtype));
    bool same = view->ndim == tensor->ndim;
    for (int32_t d = 0; d < tensor->ndim && same; d++)
        same = view->shape[d] == len[d];
    if (!same)
        return fail(RSD_EFORMAT, "shape is %s in the item, but %s in the metadata",
                    shape_text(view->ndim, view->shape, stored),
                    shape_text(tensor->ndim, len, expected));
    return RSD_OK;
}

/* Finds the tensor in an item that is not compressed. */
static rsd_status locate_plain(const rsd_checkpoint *checkpoint, const struct extent *extent,
                               const char *name, struct torch_view *view,
                               struct stored_array *array)
{
    struct store *store = checkpoint->store;
    struct header_tensor tensor;
    unsigned char start[9]; /* of a blob: the length of its header, and the header's first brace */
    uint64_t begin;
    TRY(store_read(store, extent->file, extent->offset, start, sizeof start));
    if (memcmp(start, "PK\3\4", 4) == 0)
        return archive_locate(checkpoint, extent, view, array);
    if (start[8] != '{')
        return fail(RSD_EFORMAT, "byte %llu: item is neither a torch.save archive nor safetensors",
                    (unsigned long long)extent->offset);
    *view = (struct torch_view){0};
    TRY(blob_find_tensor(checkpoint, extent->file, extent->offset, name, &tensor, &begin));
    view->dtype = tensor.dtype;
    view->ndim = tensor.ndim;
    copy_i64s(view->shape, tensor.shape, tensor.ndim);
    stored_array_set_dense(array, view->dtype, view->ndim, view->shape, begin);
    return RSD_OK;
}

/* Finds the bytes of a box; those of a compressed item are left in *stream. */
static rsd_status open_item(const rsd_checkpoint *checkpoint, size_t index, size_t box,
                            struct stored_array *array, struct stored_stream **stream)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    const struct extent *extent = &catalog->extents[tensor->first_extent + box];
    struct store *store = checkpoint->store;
    struct torch_view view;
    *stream = NULL;
    TRY(catalog_check_transforms(catalog, extent));
    TRY(store_check_range(store, extent->file, extent->offset, extent->nbytes));
    if (extent->nzstd)
        TRY(torch_item_open_stream(store, extent, &view, array, stream));
    else
        TRY(locate_plain(checkpoint, extent, tensor->name, &view, array));
    rsd_status status = check_stored(tensor, tensor_box_len(catalog, tensor, box), &view);
    if (status)
        stored_stream_close(*stream);
    return status;
}

/* A stream is closed again: many boxes may wait, each would have its window, and one is read at a time. */
rsd_status dcp_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                      struct stored_array *array)
{
    struct stored_stream *stream;
    TRY(open_item(checkpoint, tensor, box, array, &stream));
    stored_stream_close(stream);
    return RSD_OK;
}

rsd_status dcp_open_stream(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                           struct stored_stream **stream)
{
    struct stored_array array;
    return open_item(checkpoint, tensor, box, &array, stream);
}

/* ---- the row ---- */

static int dcp_probe(const struct store_listing *listing, const struct store_entry *entry,
                     struct slice start)
{
    (void)listing, (void)start;
    int64_t rank;
    if (entry->directory)
        return NOT_SURE;
    if (strcmp(entry->base, ".metadata") == 0)
        return SURE_OF_METADATA;
    return name_has_form(entry->base, "__#.metadata", &rank) ? SURE_OF_RANK_METADATA : NOT_SURE;
}

/* Ranks that have nothing to write leave a data file too, which no metadata mentions. */
static bool dcp_owns(const char *name)
{
    int64_t numbers[2];
    return name_has_form(name, "__#_#.distcp", numbers);
}

const struct format format_dcp = {.id = RSD_FORMAT_DCP,
                                  .name = "dcp",
                                  .probe = dcp_probe,
                                  .open = dcp_open,
                                  .locate = dcp_locate,
                                  .open_stream = dcp_open_stream,
                                  .read_item = dcp_read_item,
                                  .owns = dcp_owns,
                                  .writer = &dcp_writer};
