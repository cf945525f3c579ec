/* view.c - a tensor as torch pickles it: a view of a storage, with shape, strides and offset.
 *
 *     _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks [, metadata])
 *     _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype [, metadata])
 *     storage = persistent id ('storage', class, key, location, number of elements)
 *
 * v3 is for dtypes that have no storage class: its class is UntypedStorage, and elements are bytes. A
 * Parameter is a view wrapped once more. Nothing else is a tensor here: quantized, sparse, conjugated and
 * subclassed ones are refused by name.
 */
#include "format.h"

#include <string.h>

static rsd_status not_a_tensor(const char *what)
{
    return fail(RSD_EFORMAT, "a pickled tensor %s", what);
}

static rsd_status not_known(const struct nodes *nodes, const char *what, cell global)
{
    char text[GLOBAL_TEXT_NCHARS];
    return fail(RSD_EUNSUPPORTED, "%s %s, which is not known here", what,
                global_text(nodes, global, text));
}

static rsd_status take_extents(const struct nodes *nodes, cell tuple, int32_t *ndim, int64_t *out)
{
    uint32_t n = node_count(nodes, tuple);
    if (node_kind(nodes, tuple) != NODE_TUPLE)
        return not_a_tensor("has a shape or strides that are no tuple");
    if (n > RSD_MAX_DIMS)
        return fail(RSD_EUNSUPPORTED, "a tensor of %u dims, at most %d are possible", n,
                    (int)RSD_MAX_DIMS);
    for (uint32_t d = 0; d < n; d++)
        if (!node_as_i64(nodes, node_item(nodes, tuple, d), &out[d]) || out[d] < 0 ||
            out[d] > MAX_EXTENT)
            return not_a_tensor("has an extent or stride that is no whole number up to 2^62");
    *ndim = (int32_t)n;
    return RSD_OK;
}

static rsd_status take_storage(const struct nodes *nodes, cell persistent, struct view *view,
                               cell *class)
{
    if (node_kind(nodes, persistent) != NODE_PERSISTENT)
        return not_a_tensor("has no storage");
    cell id = node_part(nodes, persistent, NODE_WHAT);
    int64_t count;
    if (node_kind(nodes, id) != NODE_TUPLE || node_count(nodes, id) < 5 ||
        !slice_is(node_text(nodes, node_item(nodes, id, 0)), "storage") ||
        !node_as_i64(nodes, node_item(nodes, id, 4), &count) || count < 0)
        return not_a_tensor("has a storage that is none");
    view->key = node_text(nodes, node_item(nodes, id, 2));
    view->storage_count = (uint64_t)count;
    *class = node_item(nodes, id, 1);
    return RSD_OK;
}

/* v2 has the dtype in the class of its storage, v3 as an argument, with a storage of bytes. */
static rsd_status take_dtype(const struct nodes *nodes, cell given, bool v3, struct view *view)
{
    enum known known = node_known(nodes, given);
    struct slice name = {"", 0};
    if (known == (v3 ? KNOWN_TORCH_NAME : KNOWN_STORAGE_CLASS))
        name = node_text(nodes, node_part(nodes, given, NODE_ARGS));
    view->untyped = v3;
    view->dtype = v3 ? dtype_from_torch(name) : dtype_from_storage(name);
    if (view->dtype)
        return RSD_OK;
    return not_known(nodes, v3 ? "a tensor of the dtype" : "a tensor with the storage", given);
}

/* A lazily conjugated or negated tensor has values that are not those stored. */
static rsd_status refuse_lazy(const struct nodes *nodes, cell metadata)
{
    if (node_kind(nodes, metadata) == NODE_DICT &&
        (node_find(nodes, metadata, "conj") == CELL_TRUE ||
         node_find(nodes, metadata, "neg") == CELL_TRUE))
        return fail(RSD_EUNSUPPORTED, "a tensor that is conjugated or negated when it is used");
    return RSD_OK;
}

static rsd_status take_view(const struct nodes *nodes, cell args, bool v3, struct view *view)
{
    uint32_t n = node_count(nodes, args), least = v3 ? 7 : 6;
    int32_t nstrides;
    cell class;
    if (n < least || n > least + 1)
        return not_a_tensor("has too few or too many arguments");
    TRY(take_storage(nodes, node_item(nodes, args, 0), view, &class));
    if (!node_as_i64(nodes, node_item(nodes, args, 1), &view->offset) || view->offset < 0)
        return not_a_tensor("has an offset that is none");
    TRY(take_extents(nodes, node_item(nodes, args, 2), &view->ndim, view->shape));
    TRY(take_extents(nodes, node_item(nodes, args, 3), &nstrides, view->strides));
    if (nstrides != view->ndim)
        return not_a_tensor("has not as many strides as dims");
    TRY(take_dtype(nodes, v3 ? node_item(nodes, args, 6) : class, v3, view));
    return n > least ? refuse_lazy(nodes, node_item(nodes, args, least)) : RSD_OK;
}

bool view_is_tensor(const struct nodes *nodes, cell c)
{
    if (node_kind(nodes, c) != NODE_CALL)
        return false;
    enum known known = node_known(nodes, node_part(nodes, c, NODE_WHAT));
    return known == KNOWN_REBUILD_TENSOR_V2 || known == KNOWN_REBUILD_TENSOR_V3 ||
           known == KNOWN_REBUILD_PARAMETER;
}

rsd_status view_take(const struct nodes *nodes, cell c, struct view *out)
{
    struct view view = {0};
    for (int wrapped = 0; wrapped < 2; wrapped++) {
        if (!view_is_tensor(nodes, c))
            return node_kind(nodes, c) == NODE_CALL
                       ? not_known(nodes, "a tensor made by", node_part(nodes, c, NODE_WHAT))
                       : not_a_tensor("is none");
        cell args = node_part(nodes, c, NODE_ARGS);
        enum known known = node_known(nodes, node_part(nodes, c, NODE_WHAT));
        if (known != KNOWN_REBUILD_PARAMETER) {
            TRY(take_view(nodes, args, known == KNOWN_REBUILD_TENSOR_V3, &view));
            *out = view;
            return RSD_OK;
        }
        if (node_count(nodes, args) < 1)
            return not_a_tensor("is a parameter of nothing");
        c = node_item(nodes, args, 0);
    }
    return not_a_tensor("is a parameter of a parameter");
}

rsd_status view_check(const struct view *view, uint64_t record_nbytes)
{
    int64_t each = (int64_t)rsd_dtype_nbytes(view->dtype), last = view->offset, step, nbytes;
    bool empty = false;
    if (!mul_i64((int64_t)view->storage_count, view->untyped ? 1 : each, &nbytes) ||
        (uint64_t)nbytes != record_nbytes)
        return fail(RSD_EFORMAT, "a storage of %llu elements in a record of %llu bytes",
                    (unsigned long long)view->storage_count, (unsigned long long)record_nbytes);
    for (int32_t d = 0; d < view->ndim; d++)
        empty = empty || view->shape[d] == 0;
    if (empty)
        return RSD_OK;
    for (int32_t d = 0; d < view->ndim; d++)
        if (!mul_i64(view->shape[d] - 1, view->strides[d], &step) || !add_i64(last, step, &last))
            return not_a_tensor("reaches beyond its storage");
    if (last >= nbytes / each)
        return fail(RSD_EFORMAT, "a tensor that reaches to element %lld of a storage of %lld",
                    (long long)last, (long long)(nbytes / each));
    if (strides_overlap(view->ndim, view->shape, view->strides))
        return not_a_tensor("has strides that let elements share a place");
    return RSD_OK;
}
