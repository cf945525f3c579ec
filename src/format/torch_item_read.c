/* torch_item_read.c - finds the bytes of a tensor in what torch.save wrote for it.
 *
 * A tensor is pickled as a view of a storage, with shape, strides and offset:
 *
 *     _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks [, metadata])
 *     _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype [, metadata])
 *     storage = persistent id ('storage', class, key, location, number of elements)
 *
 * v3 is for dtypes without a storage class: its class is UntypedStorage, and its elements are bytes. A
 * Parameter wraps a view once more, and so does _rebuild_from_type_v2, which adds attributes or a subclass.
 * Expanded tensors have stride 0. Quantized, sparse and conjugated tensors are refused, and the error names what they are made by.
 *
 * An item in a file is an archive, read from its directory. torch_item_stream.c reads compressed items.
 */
#include "torch_item.h"

#include <stdio.h>
#include <string.h>

enum { WINDOW_NBYTES = 4096, MAX_WRAPPED = 8, MAX_EXPANDED_NBYTES = 1 << 30 };

/* ---- a pickled tensor ---- */

static rsd_status fail_view(const char *what)
{
    return fail(RSD_EFORMAT, "tensor %s", what);
}

static rsd_status fail_unknown(const struct pickle_tree *tree, const char *what, pickle_node global)
{
    char text[GLOBAL_TEXT_NCHARS];
    return fail(RSD_EUNSUPPORTED, "%s %s is not supported", what,
                pickle_global_text(tree, global, text));
}

rsd_status torch_take_shape(const struct pickle_tree *tree, pickle_node c, int32_t *ndim,
                            int64_t *shape)
{
    if (pickle_kind(tree, c) == NODE_TUPLE && pickle_count(tree, c) > RSD_MAX_DIMS)
        return fail(RSD_EUNSUPPORTED, "tensor has %u dims; the limit is %d", pickle_count(tree, c),
                    (int)RSD_MAX_DIMS);
    *ndim = pickle_take_numbers(tree, c, RSD_MAX_DIMS, shape);
    return *ndim >= 0 ? RSD_OK
                      : fail(RSD_EFORMAT, "shape is not a tuple of integers from 0 to 2^62");
}

/* Reads the reference to a storage: its key, its class and its number of elements. */
static rsd_status take_view_storage(const struct pickle_tree *tree, pickle_node persistent,
                                    struct torch_view *view, pickle_node *class)
{
    if (pickle_kind(tree, persistent) != NODE_PERSISTENT)
        return fail_view("has no storage");
    pickle_node id = pickle_part(tree, persistent, NODE_WHAT);
    int64_t count;
    if (pickle_kind(tree, id) != NODE_TUPLE || pickle_count(tree, id) < 5 ||
        !slice_is(pickle_text(tree, pickle_item(tree, id, 0)), "storage") ||
        !pickle_as_i64(tree, pickle_item(tree, id, 4), &count) || count < 0)
        return fail_view("has an invalid storage");
    view->key = pickle_text(tree, pickle_item(tree, id, 2));
    view->storage_count = (uint64_t)count;
    *class = pickle_item(tree, id, 1);
    return RSD_OK;
}

/* Takes the dtype: of v2 from the class of its storage, of v3 from an argument. */
static rsd_status take_view_dtype(const struct pickle_tree *tree, pickle_node global, bool v3,
                                  struct torch_view *view)
{
    enum known known = pickle_known(tree, global);
    struct slice name = slice_of("");
    if (known == (v3 ? KNOWN_TORCH_NAME : KNOWN_STORAGE_CLASS))
        name = pickle_text(tree, pickle_part(tree, global, NODE_ARGS));
    view->untyped = v3;
    view->dtype = v3 ? dtype_from_torch(name) : dtype_from_storage(name);
    if (view->dtype)
        return RSD_OK;
    return fail_unknown(tree, v3 ? "dtype" : "storage class", global);
}

/* Refuses a lazily conjugated or negated tensor, whose values are not those in the storage. */
static rsd_status refuse_lazy(const struct pickle_tree *tree, pickle_node metadata)
{
    if (pickle_kind(tree, metadata) == NODE_DICT &&
        (pickle_find(tree, metadata, "conj") == PICKLE_TRUE ||
         pickle_find(tree, metadata, "neg") == PICKLE_TRUE))
        return fail(RSD_EUNSUPPORTED, "lazily conjugated or negated tensors are not supported");
    return RSD_OK;
}

/* Reads the arguments of _rebuild_tensor_v2 or _v3. */
static rsd_status take_view_args(const struct pickle_tree *tree, pickle_node args, bool v3,
                                 struct torch_view *view)
{
    uint32_t n = pickle_count(tree, args), least = v3 ? 7 : 6;
    pickle_node class;
    if (n < least || n > least + 1)
        return fail_view("has a wrong number of arguments");
    TRY(take_view_storage(tree, pickle_item(tree, args, 0), view, &class));
    if (!pickle_as_i64(tree, pickle_item(tree, args, 1), &view->offset) || view->offset < 0)
        return fail_view("has an invalid offset");
    TRY(torch_take_shape(tree, pickle_item(tree, args, 2), &view->ndim, view->shape));
    if (pickle_take_numbers(tree, pickle_item(tree, args, 3), view->ndim, view->strides) !=
        view->ndim)
        return fail(RSD_EFORMAT, "strides are not one integer from 0 to 2^62 for each of %d dims",
                    (int)view->ndim);
    TRY(take_view_dtype(tree, v3 ? pickle_item(tree, args, 6) : class, v3, view));
    return n > least ? refuse_lazy(tree, pickle_item(tree, args, least)) : RSD_OK;
}

static rsd_status fail_not_tensor(const struct pickle_tree *tree, pickle_node c)
{
    if (pickle_kind(tree, c) == NODE_PERSISTENT)
        return fail(RSD_EUNSUPPORTED, "storages without a tensor are not supported");
    if (pickle_kind(tree, c) != NODE_CALL)
        return fail(RSD_EFORMAT, "item is not a tensor");
    char text[GLOBAL_TEXT_NCHARS];
    return fail(RSD_EUNSUPPORTED, "tensors made by %s are not supported",
                pickle_global_text(tree, pickle_part(tree, c, NODE_WHAT), text));
}

/* Steps from a tensor to what it wraps: the data of a Parameter, or the call that makes a tensor with
 * attributes. *what and *args are those of the innermost call. Returns false for any other value. */
static bool unwrap_tensor(const struct pickle_tree *tree, pickle_node c, pickle_node *what,
                          pickle_node *args)
{
    if (pickle_kind(tree, c) != NODE_CALL)
        return false;
    *what = pickle_part(tree, c, NODE_WHAT);
    *args = pickle_part(tree, c, NODE_ARGS);
    for (int depth = 0; depth < MAX_WRAPPED; depth++) {
        enum known known = pickle_known(tree, *what);
        uint32_t n = pickle_count(tree, *args);
        if (depth > 0 && !budget_take(1))
            return false;
        pickle_node first = n > 0 ? pickle_item(tree, *args, 0) : PICKLE_NONE;
        if (known == KNOWN_REBUILD_PARAMETER && pickle_kind(tree, first) == NODE_CALL) {
            *what = pickle_part(tree, first, NODE_WHAT);
            *args = pickle_part(tree, first, NODE_ARGS);
        } else if (known == KNOWN_REBUILD_FROM_TYPE && n >= 3 &&
                   pickle_kind(tree, pickle_item(tree, *args, 2)) == NODE_TUPLE) {
            *what = first;
            *args = pickle_item(tree, *args, 2);
        } else {
            return true;
        }
    }
    return false;
}

bool torch_view_is_tensor(const struct pickle_tree *tree, pickle_node c)
{
    pickle_node what, args;
    if (!unwrap_tensor(tree, c, &what, &args))
        return false;
    enum known known = pickle_known(tree, what);
    return known == KNOWN_REBUILD_TENSOR_V2 || known == KNOWN_REBUILD_TENSOR_V3 ||
           known == KNOWN_REBUILD_PARAMETER;
}

bool torch_is_odd_tensor(const struct pickle_tree *tree, pickle_node c)
{
    pickle_node what, args;
    if (pickle_kind(tree, c) == NODE_PERSISTENT)
        return true;
    if (!unwrap_tensor(tree, c, &what, &args) || pickle_kind(tree, what) != NODE_GLOBAL)
        return false;
    struct slice module = pickle_text(tree, pickle_part(tree, what, NODE_WHAT)),
                 name = pickle_text(tree, pickle_part(tree, what, NODE_ARGS));
    return slice_is(module, "torch._utils") && slice_begins(name, "_rebuild");
}

bool torch_is_sharded(const struct pickle_tree *tree, pickle_node c)
{
    pickle_node what, args;
    return unwrap_tensor(tree, c, &what, &args) &&
           pickle_known(tree, what) == KNOWN_REBUILD_WRAPPER;
}

rsd_status torch_view_read(const struct pickle_tree *tree, pickle_node c, struct torch_view *out)
{
    struct torch_view view = {0};
    pickle_node what, args;
    if (!torch_view_is_tensor(tree, c) || !unwrap_tensor(tree, c, &what, &args))
        return fail_not_tensor(tree, c);
    enum known known = pickle_known(tree, what);
    if (known == KNOWN_REBUILD_PARAMETER)
        return fail_view("is a Parameter without data");
    TRY(take_view_args(tree, args, known == KNOWN_REBUILD_TENSOR_V3, &view));
    *out = view;
    return RSD_OK;
}

/* Elements of an expanded tensor share bytes. What a few bytes may stand for is limited. */
static rsd_status check_expanded(const struct torch_view *view)
{
    int64_t n = (int64_t)rsd_dtype_nbytes(view->dtype);
    if (!strides_overlap(view->ndim, view->shape, view->strides))
        return RSD_OK;
    for (int32_t d = 0; d < view->ndim; d++)
        if (!mul_i64(n, view->shape[d], &n) || n > MAX_EXPANDED_NBYTES)
            return fail(RSD_EUNSUPPORTED,
                        "tensor whose elements share bytes exceeds the limit of %d bytes",
                        (int)MAX_EXPANDED_NBYTES);
    return RSD_OK;
}

rsd_status torch_view_check(const struct torch_view *view, uint64_t record_nbytes)
{
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(view->dtype), last = view->offset, step,
            nbytes;
    if (!mul_i64((int64_t)view->storage_count, view->untyped ? 1 : element_nbytes, &nbytes) ||
        (uint64_t)nbytes != record_nbytes)
        return fail(RSD_EFORMAT, "storage of %llu elements does not match its record of %llu bytes",
                    (unsigned long long)view->storage_count, (unsigned long long)record_nbytes);
    if (box_is_empty(view->ndim, view->shape))
        return RSD_OK;
    for (int32_t d = 0; d < view->ndim; d++)
        if (!mul_i64(view->shape[d] - 1, view->strides[d], &step) || !add_i64(last, step, &last))
            return fail_view("reaches beyond its storage");
    if (last >= nbytes / element_nbytes)
        return fail(RSD_EFORMAT, "tensor reaches element %lld of a storage of %lld elements",
                    (long long)last, (long long)(nbytes / element_nbytes));
    return check_expanded(view);
}

void torch_view_set_array(const struct torch_view *view, struct stored_array *array)
{
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(view->dtype);
    if (box_is_empty(view->ndim, view->shape)) /* its offset and strides may be any number */
        return;
    array->base = view->offset * element_nbytes;
    if (strides_overlap(view->ndim, view->shape, view->strides))
        array->has_crc = false;              /* no byte of the record is read exactly once */
    for (int32_t d = 0; d < view->ndim; d++) /* so may the stride of a single index */
        array->strides[d] = view->shape[d] > 1 ? view->strides[d] * element_nbytes : 0;
}

/* ---- an archive in a file ---- */

/* The first and last bytes of an item, which have everything but the tensor. */
struct item_windows {
    struct store_range range;
    uint64_t nbytes;
    uint64_t head_end, tail_begin; /* between them, bytes are in the file only */
    unsigned char head[WINDOW_NBYTES], tail[WINDOW_NBYTES];
};

/* Reads from the start or the end of an item in memory, or else from the file. */
static rsd_status read_windows(void *context, uint64_t at, void *out, size_t n)
{
    struct item_windows *item = context;
    if (at > item->nbytes || n > item->nbytes - at)
        return fail(RSD_EFORMAT, "byte %llu of the archive: archive ends before it",
                    (unsigned long long)at);
    if (at + n > item->head_end && at < item->tail_begin)
        return store_range_read(&item->range, at, out, n);
    memcpy(out, at + n <= item->head_end ? item->head + at : item->tail + (at - item->tail_begin),
           n);
    return RSD_OK;
}

static rsd_status load_windows(struct item_windows *item)
{
    item->head_end = item->nbytes < WINDOW_NBYTES ? item->nbytes : WINDOW_NBYTES;
    uint64_t left = item->nbytes - item->head_end;
    item->tail_begin = item->nbytes - (left < WINDOW_NBYTES ? left : WINDOW_NBYTES);
    TRY(store_range_read(&item->range, 0, item->head, (size_t)item->head_end));
    return store_range_read(&item->range, item->tail_begin, item->tail,
                            (size_t)(item->nbytes - item->tail_begin));
}

rsd_status torch_find_pickle(struct zip *zip, struct zip_record **pickle)
{
    TRY(zip_find(zip, "data.pkl", pickle));
    return *pickle ? RSD_OK
                   : fail(RSD_EFORMAT, "record data.pkl is missing; not a torch.save archive");
}

rsd_status torch_find_storage(struct zip *zip, struct slice key, struct stored_array *array)
{
    char name[1000]; /* of a longer name, zip_find finds no record */
    struct zip_record *record;
    snprintf(name, sizeof name, "data/%.*s", (int)key.nbytes, key.bytes);
    TRY(zip_find(zip, name, &record));
    if (!record)
        return fail(RSD_EFORMAT, "record %.200s is missing", name);
    array->offset = record->data;
    array->nbytes = record->nbytes;
    array->crc = record->crc;
    array->has_crc = record->crc || !record->nbytes; /* 0: torch did not compute it */
    return RSD_OK;
}

rsd_status torch_take_byteorder(struct slice text, bool *big_endian)
{
    *big_endian = slice_is(text, "big");
    if (!*big_endian && !slice_is(text, "little"))
        return fail(RSD_EFORMAT, "record byteorder has '%.*s'; expected little or big",
                    slice_width(text, 8), text.bytes);
    return RSD_OK;
}

rsd_status torch_read_byteorder(struct zip *zip, bool *big_endian)
{
    struct zip_record *record;
    char text[8] = "";
    *big_endian = false;
    TRY(zip_find(zip, "byteorder", &record));
    if (!record)
        return RSD_OK;
    size_t n = record->nbytes < sizeof text - 1 ? (size_t)record->nbytes : sizeof text - 1;
    TRY(zip->read(zip->context, record->data, text, n));
    return torch_take_byteorder(slice_of(text), big_endian);
}

/* Finds the only tensor of an archive: its view, and where its bytes are. */
static rsd_status find_item_tensor(struct zip *zip, struct torch_view *view,
                                   struct stored_array *out)
{
    struct pickle_tree tree;
    struct zip_record *pickle;
    pickle_node root;
    TRY(torch_read_byteorder(zip, &out->big_endian));
    TRY(torch_find_pickle(zip, &pickle));
    TRY(zip_read_pickle(zip, pickle, &tree, &root));
    rsd_status status = torch_view_read(&tree, root, view);
    if (!status)
        status = torch_find_storage(zip, view->key, out);
    view->key = slice_of(""); /* it was in the tree */
    pickle_tree_drop(&tree);
    TRY(status);
    TRY(torch_view_check(view, out->nbytes));
    torch_view_set_array(view, out);
    return RSD_OK;
}

rsd_status torch_item_locate(struct store *store, const struct extent *extent,
                             struct torch_view *view, struct stored_array *array)
{
    struct item_windows *item = mem_new(1, sizeof *item);
    struct zip zip;
    if (!item)
        return RSD_ENOMEM;
    item->range = (struct store_range){store, extent->file, extent->offset};
    item->nbytes = extent->nbytes;
    *array = (struct stored_array){0};
    rsd_status status = load_windows(item);
    if (!status && !(status = zip_open(&zip, read_windows, item, item->nbytes))) {
        status = find_item_tensor(&zip, view, array);
        zip_close(&zip);
    }
    array->offset += extent->offset;
    mem_free(item);
    return status;
}
