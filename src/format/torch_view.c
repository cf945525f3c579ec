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

static rsd_status not_known(const struct pickle_tree *tree, const char *what, pickle_node global)
{
    char text[GLOBAL_TEXT_NCHARS];
    return fail(RSD_EUNSUPPORTED, "%s %s, which is not known here", what,
                pickle_global_text(tree, global, text));
}

static rsd_status take_extents(const struct pickle_tree *tree, pickle_node tuple, int32_t *ndim,
                               int64_t *out)
{
    uint32_t n = pickle_count(tree, tuple);
    if (pickle_kind(tree, tuple) != NODE_TUPLE)
        return not_a_tensor("has a shape or strides that are no tuple");
    if (n > RSD_MAX_DIMS)
        return fail(RSD_EUNSUPPORTED, "a tensor of %u dims, at most %d are possible", n,
                    (int)RSD_MAX_DIMS);
    for (uint32_t d = 0; d < n; d++)
        if (!pickle_as_i64(tree, pickle_item(tree, tuple, d), &out[d]) || out[d] < 0 ||
            out[d] > MAX_EXTENT)
            return not_a_tensor("has an extent or stride that is no whole number up to 2^62");
    *ndim = (int32_t)n;
    return RSD_OK;
}

static rsd_status take_storage(const struct pickle_tree *tree, pickle_node persistent,
                               struct torch_view *view, pickle_node *class)
{
    if (pickle_kind(tree, persistent) != NODE_PERSISTENT)
        return not_a_tensor("has no storage");
    pickle_node id = pickle_part(tree, persistent, NODE_WHAT);
    int64_t count;
    if (pickle_kind(tree, id) != NODE_TUPLE || pickle_count(tree, id) < 5 ||
        !slice_is(pickle_text(tree, pickle_item(tree, id, 0)), "storage") ||
        !pickle_as_i64(tree, pickle_item(tree, id, 4), &count) || count < 0)
        return not_a_tensor("has a storage that is none");
    view->key = pickle_text(tree, pickle_item(tree, id, 2));
    view->storage_count = (uint64_t)count;
    *class = pickle_item(tree, id, 1);
    return RSD_OK;
}

/* v2 has the dtype in the class of its storage, v3 as an argument, with a storage of bytes. */
static rsd_status take_dtype(const struct pickle_tree *tree, pickle_node given, bool v3,
                             struct torch_view *view)
{
    enum known known = pickle_known(tree, given);
    struct slice name = {"", 0};
    if (known == (v3 ? KNOWN_TORCH_NAME : KNOWN_STORAGE_CLASS))
        name = pickle_text(tree, pickle_part(tree, given, NODE_ARGS));
    view->untyped = v3;
    view->dtype = v3 ? dtype_from_torch(name) : dtype_from_storage(name);
    if (view->dtype)
        return RSD_OK;
    return not_known(tree, v3 ? "a tensor of the dtype" : "a tensor with the storage", given);
}

/* A lazily conjugated or negated tensor has values that are not those stored. */
static rsd_status refuse_lazy(const struct pickle_tree *tree, pickle_node metadata)
{
    if (pickle_kind(tree, metadata) == NODE_DICT &&
        (pickle_find(tree, metadata, "conj") == PICKLE_TRUE ||
         pickle_find(tree, metadata, "neg") == PICKLE_TRUE))
        return fail(RSD_EUNSUPPORTED, "a tensor that is conjugated or negated when it is used");
    return RSD_OK;
}

static rsd_status take_view(const struct pickle_tree *tree, pickle_node args, bool v3,
                            struct torch_view *view)
{
    uint32_t n = pickle_count(tree, args), least = v3 ? 7 : 6;
    int32_t nstrides;
    pickle_node class;
    if (n < least || n > least + 1)
        return not_a_tensor("has too few or too many arguments");
    TRY(take_storage(tree, pickle_item(tree, args, 0), view, &class));
    if (!pickle_as_i64(tree, pickle_item(tree, args, 1), &view->offset) || view->offset < 0)
        return not_a_tensor("has an offset that is none");
    TRY(take_extents(tree, pickle_item(tree, args, 2), &view->ndim, view->shape));
    TRY(take_extents(tree, pickle_item(tree, args, 3), &nstrides, view->strides));
    if (nstrides != view->ndim)
        return not_a_tensor("has not as many strides as dims");
    TRY(take_dtype(tree, v3 ? pickle_item(tree, args, 6) : class, v3, view));
    return n > least ? refuse_lazy(tree, pickle_item(tree, args, least)) : RSD_OK;
}

bool torch_view_is_tensor(const struct pickle_tree *tree, pickle_node c)
{
    if (pickle_kind(tree, c) != NODE_CALL)
        return false;
    enum known known = pickle_known(tree, pickle_part(tree, c, NODE_WHAT));
    return known == KNOWN_REBUILD_TENSOR_V2 || known == KNOWN_REBUILD_TENSOR_V3 ||
           known == KNOWN_REBUILD_PARAMETER;
}

rsd_status torch_view_read(const struct pickle_tree *tree, pickle_node c, struct torch_view *out)
{
    struct torch_view view = {0};
    for (int wrapped = 0; wrapped < 2; wrapped++) {
        if (!torch_view_is_tensor(tree, c))
            return pickle_kind(tree, c) == NODE_CALL
                       ? not_known(tree, "a tensor made by", pickle_part(tree, c, NODE_WHAT))
                       : not_a_tensor("is none");
        pickle_node args = pickle_part(tree, c, NODE_ARGS);
        enum known known = pickle_known(tree, pickle_part(tree, c, NODE_WHAT));
        if (known != KNOWN_REBUILD_PARAMETER) {
            TRY(take_view(tree, args, known == KNOWN_REBUILD_TENSOR_V3, &view));
            *out = view;
            return RSD_OK;
        }
        if (pickle_count(tree, args) < 1)
            return not_a_tensor("is a parameter of nothing");
        c = pickle_item(tree, args, 0);
    }
    return not_a_tensor("is a parameter of a parameter");
}

rsd_status torch_view_check(const struct torch_view *view, uint64_t record_nbytes)
{
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(view->dtype), last = view->offset, step,
            nbytes;
    bool empty = false;
    if (!mul_i64((int64_t)view->storage_count, view->untyped ? 1 : element_nbytes, &nbytes) ||
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
    if (last >= nbytes / element_nbytes)
        return fail(RSD_EFORMAT, "a tensor that reaches to element %lld of a storage of %lld",
                    (long long)last, (long long)(nbytes / element_nbytes));
    if (strides_overlap(view->ndim, view->shape, view->strides))
        return not_a_tensor("has strides that let elements share a place");
    return RSD_OK;
}
