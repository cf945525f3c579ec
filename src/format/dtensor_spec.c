/* dtensor_spec.c - finds out which boxes of a tensor one rank's file has.
 *
 *     DTensor        _local_tensor, and _spec: a device mesh and one placement per mesh axis
 *     ShardedTensor  a list of shards, each with its offsets and sizes
 *     Tensor         all of it
 *
 * The local tensor must have the shape that mesh, placements and coordinates demand.
 */
#include "dtensor.h"

#include <string.h>

enum { MAX_SPANS = 1 << 20 };
enum {
    SPAN_STEPS = 16,
    LISTED_STEPS = 16
}; /* to find a box and to add it; to read a shard of a list */

static const char DISTRIBUTED[] = "torch.distributed.";

/* ---- parts of the pickle ---- */

/* A tensor without a storage of its own: the parts of the call that makes it. */
struct wrapper_parts {
    pickle_node type, args, state;
};

/* Finds them inside of Parameters, if there are any. */
static bool find_wrapper(const struct pickle_tree *tree, pickle_node c, struct wrapper_parts *out)
{
    for (int depth = 0; depth < 4 && pickle_kind(tree, c) == NODE_CALL; depth++) {
        enum known known = pickle_known(tree, pickle_part(tree, c, NODE_WHAT));
        pickle_node args = pickle_part(tree, c, NODE_ARGS);
        uint32_t n = pickle_count(tree, args);
        if (known == KNOWN_REBUILD_FROM_TYPE && n >= 4) {
            *out = (struct wrapper_parts){pickle_item(tree, args, 1), pickle_item(tree, args, 2),
                                          pickle_item(tree, args, 3)};
            return pickle_known(tree, pickle_item(tree, args, 0)) == KNOWN_REBUILD_WRAPPER &&
                   pickle_kind(tree, out->args) == NODE_TUPLE;
        }
        if (known != KNOWN_REBUILD_PARAMETER || n < 1)
            return false;
        c = pickle_item(tree, args, 0);
    }
    return false;
}

/* Finds an attribute in a state: a dict, or a pair of dicts. */
static pickle_node find_in_state(const struct pickle_tree *tree, pickle_node state,
                                 const char *name)
{
    pickle_node found = PICKLE_ABSENT;
    if (pickle_kind(tree, state) != NODE_TUPLE)
        return pickle_find(tree, state, name);
    for (uint32_t i = 0; i < pickle_count(tree, state) && found == PICKLE_ABSENT; i++)
        found = pickle_find(tree, pickle_item(tree, state, i), name);
    return found;
}

/* Takes the dtype and the shape of the whole tensor from the arguments of the wrapper. */
static rsd_status take_wrapped_type(const struct pickle_tree *tree, pickle_node args,
                                    struct rank_tensor *out)
{
    char text[GLOBAL_TEXT_NCHARS];
    if (pickle_count(tree, args) < 3)
        return fail(RSD_EFORMAT, "distributed tensor has too few arguments");
    pickle_node dtype = pickle_item(tree, args, 1), shape = pickle_item(tree, args, 2);
    if (pickle_known(tree, dtype) == KNOWN_TORCH_NAME)
        out->dtype = dtype_from_torch(pickle_text(tree, pickle_part(tree, dtype, NODE_ARGS)));
    if (!out->dtype)
        return fail(RSD_EUNSUPPORTED, "dtype %s is not supported",
                    pickle_global_text(tree, dtype, text));
    return torch_take_shape(tree, shape, &out->ndim, out->shape);
}

static rsd_status add_rank_box(struct rank_tensor *tensor, size_t *capacity, const int64_t *lo,
                               const int64_t *len, const struct stored_array *array)
{
    if (box_is_empty(tensor->ndim, len))
        return RSD_OK;
    TRY(GROW(tensor->boxes, *capacity, tensor->nboxes + 1));
    struct rank_box *box = &tensor->boxes[tensor->nboxes++];
    *box = (struct rank_box){.array = *array};
    copy_i64s(box->lo, lo, tensor->ndim);
    copy_i64s(box->len, len, tensor->ndim);
    return RSD_OK;
}

static bool same_shape(int32_t ndim, const int64_t *a, int32_t mdim, const int64_t *b)
{
    return ndim == mdim && memcmp(a, b, (size_t)ndim * sizeof *a) == 0;
}

/* ---- placements ---- */

/* Reads a placement of torch. EUNSUPPORTED: it is not Replicate, Shard or _StridedShard. */
static rsd_status take_placement(const struct pickle_tree *tree, pickle_node c, int32_t ndim,
                                 rsd_placement *out)
{
    char text[GLOBAL_TEXT_NCHARS];
    int64_t dim = 0, factor = 1;
    *out = (rsd_placement){.kind = RSD_REPLICATE};
    if (pickle_is_instance(tree, c, DISTRIBUTED, "Replicate"))
        return RSD_OK;
    bool shard = pickle_is_instance(tree, c, DISTRIBUTED, "Shard"),
         strided = pickle_is_instance(tree, c, DISTRIBUTED, "_StridedShard");
    if (!shard && !strided) {
        enum pickle_kind kind = pickle_kind(tree, c);
        bool object = kind == NODE_CALL || kind == NODE_OBJECT;
        return fail(RSD_EUNSUPPORTED, "placement %s is not supported",
                    pickle_global_text(tree, object ? pickle_part(tree, c, NODE_WHAT) : c, text));
    }
    if (!pickle_as_i64(tree, pickle_attribute(tree, c, "dim"), &dim) || dim < 0 || dim >= ndim)
        return fail(RSD_EFORMAT, "placement shards a dim that the tensor does not have");
    if (strided && (!pickle_as_i64(tree, pickle_attribute(tree, c, "split_factor"), &factor) ||
                    factor < 1 || factor > MAX_SPANS))
        return fail(RSD_EFORMAT, "split factor of a strided shard is invalid");
    *out = (rsd_placement){
        .kind = strided ? RSD_STRIDED : RSD_SHARD, .dim = (int32_t)dim, .factor = factor};
    return RSD_OK;
}

/* The axes that cut each dim, in the order of cutting. */
struct cut_order {
    int32_t naxes[RSD_MAX_DIMS], axes[RSD_MAX_AXES];
    bool other; /* than the order of the mesh */
};

/* Takes shard_order: entries of a tensor dim and the mesh axes that cut it. */
static rsd_status take_cut_order(const struct pickle_tree *tree, pickle_node order, int32_t naxes,
                                 const rsd_placement *placements, int32_t ndim,
                                 struct cut_order *out)
{
    int32_t last = -1, total = 0, nshards = 0;
    *out = (struct cut_order){0};
    for (int32_t a = 0; a < naxes; a++) {
        nshards += placements[a].kind == RSD_SHARD;
        if (placements[a].kind == RSD_STRIDED) /* which say the order themselves */
            return RSD_OK;
    }
    if (pickle_kind(tree, order) != NODE_TUPLE)
        return RSD_OK;
    for (uint32_t i = 0; i < pickle_count(tree, order); i++) {
        pickle_node entry = pickle_item(tree, order, i);
        enum pickle_kind kind = pickle_kind(tree, entry);
        pickle_node pair =
            kind == NODE_CALL || kind == NODE_OBJECT ? pickle_part(tree, entry, NODE_ARGS) : entry;
        int64_t dim, axes[RSD_MAX_AXES];
        if (pickle_kind(tree, pair) != NODE_TUPLE || pickle_count(tree, pair) != 2 ||
            !pickle_as_i64(tree, pickle_item(tree, pair, 0), &dim) || dim <= last || dim >= ndim)
            return fail(RSD_EFORMAT, "shard_order is invalid");
        int32_t n = pickle_take_numbers(tree, pickle_item(tree, pair, 1), RSD_MAX_AXES, axes);
        for (int32_t k = 0; k < n; k++) {
            if (axes[k] >= naxes || placements[axes[k]].kind != RSD_SHARD ||
                placements[axes[k]].dim != dim || total == naxes)
                return fail(RSD_EFORMAT, "shard_order does not match the placements");
            out->other = out->other || (k > 0 && axes[k] < axes[k - 1]);
            out->axes[total++] = (int32_t)axes[k];
        }
        out->naxes[dim] = n < 0 ? 0 : n;
        last = (int32_t)dim;
    }
    if (out->other && total != nshards)
        return fail(RSD_EFORMAT, "shard_order does not match the placements");
    return RSD_OK;
}

/* Finds the order of cutting that strided shards state: each is cut after the later axes whose counts have its factor as
 * product. FSDP2 over tensor parallelism means that, also where sizes do not divide. Returns false if there is none. */
static bool find_strided_order(const struct rank_mesh *mesh, const rsd_placement *placements,
                               int32_t ndim, struct cut_order *out)
{
    bool strided = false;
    int32_t total = 0;
    *out = (struct cut_order){.other = true};
    for (int32_t d = 0; d < ndim; d++) {
        int32_t *order = out->axes + total, n = 0;
        for (int32_t a = mesh->naxes - 1; a >= 0; a--) {
            int64_t product = 1, factor = 1;
            int32_t at = 0;
            if (placements[a].kind == RSD_REPLICATE || placements[a].dim != d)
                continue;
            if (placements[a].kind == RSD_STRIDED) {
                factor = placements[a].factor;
                strided = true;
            }
            while (at < n && product < factor)
                product *= mesh->counts[order[at++]];
            if (product != factor)
                return false;
            memmove(order + at + 1, order + at, (size_t)(n - at) * sizeof *order);
            order[at] = a;
            n++;
        }
        out->naxes[d] = n;
        total += n;
    }
    return strided;
}

/* Makes the layout that mesh and placements describe, on ranks in row-major order of the mesh. *by_order: strided shards
 * may state an order of cutting; false after the call: they do not. */
static rsd_status make_spec_layout(const struct pickle_tree *tree, pickle_node spec,
                                   const struct rank_mesh *in, const struct rank_tensor *tensor,
                                   bool *by_order, rsd_layout **layout)
{
    pickle_node list = pickle_attribute(tree, spec, "placements");
    rsd_placement placements[RSD_MAX_AXES] = {{0}};
    struct cut_order order;
    rsd_mesh *mesh;
    if (pickle_kind(tree, list) != NODE_TUPLE || pickle_count(tree, list) != (uint32_t)in->naxes)
        return fail(RSD_EFORMAT, "number of placements is not that of the mesh's %d axes",
                    (int)in->naxes);
    for (int32_t a = 0; a < in->naxes; a++)
        TRY(take_placement(tree, pickle_item(tree, list, (uint32_t)a), tensor->ndim,
                           &placements[a]));
    TRY(take_cut_order(tree, pickle_attribute(tree, spec, "shard_order"), in->naxes, placements,
                       tensor->ndim, &order));
    if (in->naxes < 1)
        return dtensor_fail_mesh("has no axes");
    struct cut_order strided;
    *by_order = *by_order && find_strided_order(in, placements, tensor->ndim, &strided);
    if (*by_order)
        order = strided;
    TRY(rsd_mesh_new(in->naxes, in->counts, NULL, NULL, &mesh));
    rsd_status status =
        order.other
            ? rsd_layout_new_by_dim(tensor->dtype, tensor->ndim, tensor->shape, mesh, order.naxes,
                                    order.axes, layout)
            : rsd_layout_new(tensor->dtype, tensor->ndim, tensor->shape, mesh, placements, layout);
    rsd_mesh_free(mesh);
    return status == RSD_EINVAL ? RSD_EFORMAT : status; /* what is invalid was in the file */
}

/* ---- DTensors ---- */

rsd_status rank_tensor_add_boxes(struct rank_tensor *out, const rsd_layout *layout,
                                 int64_t position, const struct stored_array *array)
{
    int64_t nspans = 1, nshards;
    size_t capacity = 0;
    rsd_shard *shards;
    for (int32_t d = 0; d < layout->ndim; d++)
        if (!mul_i64(nspans, max_i64(cuts_nspans_bound(&layout->cuts[d]), 1), &nspans) ||
            nspans > MAX_SPANS)
            return fail(RSD_ELIMIT, "tensor is cut into more than %d boxes", (int)MAX_SPANS);
    if (!budget_take((uint64_t)nspans * SPAN_STEPS) ||
        !budget_take_memory((uint64_t)nspans * (sizeof *shards + sizeof *out->boxes)))
        return budget_fail();
    TRY(rsd_layout_boxes(layout, (int32_t)position, &shards, &nshards));
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < nshards && !status; i++) {
        struct stored_array one = *array;
        for (int32_t d = 0; d < layout->ndim; d++)
            one.base += shards[i].at[d] * array->strides[d];
        status = add_rank_box(out, &capacity, shards[i].box.lo, shards[i].box.len, &one);
    }
    rsd_free(shards);
    budget_return_memory((uint64_t)nspans * (sizeof *shards + sizeof *out->boxes));
    return status;
}

/* Checks that a shape which a file states once more is that of the whole tensor. */
static rsd_status check_stated_shape(const struct pickle_tree *tree, pickle_node shape,
                                     const char *where, const struct rank_tensor *tensor)
{
    int64_t stated[RSD_MAX_DIMS];
    int32_t ndim;
    char a[SHAPE_TEXT_NCHARS], b[SHAPE_TEXT_NCHARS];
    TRY(torch_take_shape(tree, shape, &ndim, stated));
    if (same_shape(ndim, stated, tensor->ndim, tensor->shape))
        return RSD_OK;
    return fail(RSD_EFORMAT, "tensor has the shape %s; its %s says %s",
                shape_text(tensor->ndim, tensor->shape, a), where, shape_text(ndim, stated, b));
}

/* Compares the shape in the tensor_meta of a spec, if it is there, with that of the tensor. */
static rsd_status check_tensor_meta(const struct pickle_tree *tree, pickle_node spec,
                                    const struct rank_tensor *tensor)
{
    pickle_node meta = pickle_attribute(tree, spec, "tensor_meta");
    if (!pickle_is_instance(tree, meta, DISTRIBUTED, "TensorMeta"))
        return RSD_OK;
    pickle_node args = pickle_part(tree, meta, NODE_ARGS);
    if (pickle_kind(tree, args) != NODE_TUPLE || pickle_count(tree, args) < 1)
        return RSD_OK;
    return check_stated_shape(tree, pickle_item(tree, args, 0), "tensor_meta", tensor);
}

/* Reads the boxes that the local part of a DTensor has. A rank outside of its mesh has none. */
static rsd_status read_dtensor(struct torch_file *file, pickle_node state, int64_t rank,
                               struct mesh_cache *cache, struct rank_tensor *out)
{
    const struct pickle_tree *tree = &file->tree;
    pickle_node local = find_in_state(tree, state, "_local_tensor"),
                spec = find_in_state(tree, state, "_spec");
    struct torch_view view;
    struct stored_array array;
    rsd_layout *layout;
    const struct rank_mesh *mesh;
    int64_t position = 0, all = 1;
    TRY(check_tensor_meta(tree, spec, out));
    TRY(dtensor_read_mesh(file, pickle_attribute(tree, spec, "mesh"), rank, cache, &mesh));
    if (!mesh->member)
        return RSD_OK;
    if (!torch_view_is_tensor(tree, local))
        return fail(RSD_EUNSUPPORTED, "local part of the DTensor is not a plain tensor");
    TRY(torch_file_find_tensor(file, local, &view, &array));
    if (view.dtype != out->dtype)
        return fail(RSD_EFORMAT, "local tensor has the dtype %s, and the DTensor %s",
                    rsd_dtype_name(view.dtype), rsd_dtype_name(out->dtype));
    out->place = array.offset + (uint64_t)array.base;
    for (int32_t a = 0; a < mesh->naxes; a++) {
        if (!mul_i64(all, mesh->counts[a], &all) || all > MAX_MESH_RANKS)
            return dtensor_fail_mesh("has too many ranks");
        position = position * mesh->counts[a] + mesh->coordinates[a];
    }
    bool by_order = true;
    int64_t demanded[RSD_MAX_DIMS];
    char a[SHAPE_TEXT_NCHARS], b[SHAPE_TEXT_NCHARS];
    TRY(make_spec_layout(tree, spec, mesh, out, &by_order, &layout));
    layout_array_shape(layout, position, demanded);
    if (by_order && !same_shape(view.ndim, view.shape, out->ndim, demanded)) {
        rsd_layout_free(layout);
        by_order = false;
        TRY(make_spec_layout(tree, spec, mesh, out, &by_order, &layout));
        layout_array_shape(layout, position, demanded);
    }
    rsd_status status;
    if (same_shape(view.ndim, view.shape, out->ndim, demanded))
        status = rank_tensor_add_boxes(out, layout, position, &array);
    else
        status = fail(RSD_EFORMAT, "local tensor has the shape %s; its placements demand %s",
                      shape_text(view.ndim, view.shape, a), shape_text(out->ndim, demanded, b));
    rsd_layout_free(layout);
    return status;
}

/* ---- ShardedTensors ---- */

/* Takes the offsets and sizes of a shard. Returns false if there are not as many as dims. */
static bool take_shard_box(const struct pickle_tree *tree, pickle_node meta, int32_t ndim,
                           int64_t *lo, int64_t *len)
{
    pickle_node offsets = pickle_attribute(tree, meta, "shard_offsets"),
                sizes = pickle_attribute(tree, meta, "shard_sizes");
    return pickle_take_numbers(tree, offsets, RSD_MAX_DIMS, lo) == ndim &&
           pickle_take_numbers(tree, sizes, RSD_MAX_DIMS, len) == ndim;
}

/* The shards of all ranks, as a file lists them, and the rank of the file: in the whole and in the group of the tensor. */
struct listed_shards {
    pickle_node shards;
    int64_t rank, group_rank;
};

/* Checks that the list, if there is one, has a shard, and places it on the rank of the file. */
static rsd_status check_listed_shard(const struct pickle_tree *tree,
                                     const struct listed_shards *list, int32_t ndim,
                                     const int64_t *lo, const int64_t *len)
{
    struct pickle_walk walk = pickle_walk(tree, list->shards);
    pickle_node meta;
    int64_t at[RSD_MAX_DIMS], sizes[RSD_MAX_DIMS];
    char text[BOX_TEXT_NCHARS];
    if (pickle_kind(tree, list->shards) != NODE_LIST)
        return RSD_OK;
    while (pickle_walk_next(&walk, &meta)) {
        int64_t rank = list->rank;
        TRY(budget_use(LISTED_STEPS));
        if (!take_shard_box(tree, meta, ndim, at, sizes) || !same_shape(ndim, at, ndim, lo) ||
            !same_shape(ndim, sizes, ndim, len))
            continue;
        pickle_node placement = pickle_attribute(tree, meta, "placement");
        pickle_as_i64(tree, pickle_attribute(tree, placement, "_rank"), &rank);
        if (rank == list->rank || rank == list->group_rank)
            return RSD_OK;
    }
    return fail(RSD_EFORMAT, "shard %s is not one that shards_metadata places on rank %lld",
                box_text(ndim, lo, len, text), (long long)list->rank);
}

/* Adds a shard of a ShardedTensor, whose tensor must have the sizes of its metadata. */
static rsd_status add_shard(struct torch_file *file, pickle_node shard,
                            const struct listed_shards *list, struct rank_tensor *out,
                            size_t *capacity)
{
    const struct pickle_tree *tree = &file->tree;
    pickle_node tensor = pickle_attribute(tree, shard, "tensor"),
                meta = pickle_attribute(tree, shard, "metadata");
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    struct torch_view view;
    struct stored_array array;
    if (!take_shard_box(tree, meta, out->ndim, lo, len))
        return fail(RSD_EFORMAT, "shard has invalid offsets or sizes");
    if (!torch_view_is_tensor(tree, tensor))
        return fail(RSD_EUNSUPPORTED, "shard is not a plain tensor");
    TRY(torch_file_find_tensor(file, tensor, &view, &array));
    if (view.dtype != out->dtype || !same_shape(view.ndim, view.shape, out->ndim, len))
        return fail(RSD_EFORMAT, "shard does not have the dtype and the sizes of its metadata");
    TRY(check_listed_shard(tree, list, out->ndim, lo, len));
    out->place = array.offset + (uint64_t)array.base;
    return add_rank_box(out, capacity, lo, len, &array);
}

/* Reads the local shards of a ShardedTensor. EMISMATCH: another rank saved it. */
static rsd_status read_sharded_tensor(struct torch_file *file, pickle_node state, int64_t rank,
                                      struct rank_tensor *out)
{
    const struct pickle_tree *tree = &file->tree;
    size_t capacity = 0;
    int64_t saved_rank;
    if (pickle_kind(tree, state) != NODE_TUPLE || pickle_count(tree, state) < 3 ||
        pickle_kind(tree, pickle_item(tree, state, 0)) != NODE_LIST)
        return fail(RSD_EFORMAT, "ShardedTensor has an invalid state");
    pickle_node group = pickle_item(tree, state, 2);
    if (pickle_as_i64(tree, pickle_attribute(tree, group, "global_rank"), &saved_rank) &&
        saved_rank != rank)
        return fail(RSD_EMISMATCH, "ShardedTensor was saved by rank %lld, not by rank %lld",
                    (long long)saved_rank, (long long)rank);
    pickle_node meta = pickle_item(tree, state, 1), size = pickle_attribute(tree, meta, "size");
    struct listed_shards list = {pickle_attribute(tree, meta, "shards_metadata"), rank, rank};
    pickle_as_i64(tree, pickle_attribute(tree, group, "local_rank"), &list.group_rank);
    if (size != PICKLE_ABSENT)
        TRY(check_stated_shape(tree, size, "metadata", out));
    struct pickle_walk walk = pickle_walk(tree, pickle_item(tree, state, 0));
    for (pickle_node shard; pickle_walk_next(&walk, &shard);)
        TRY(add_shard(file, shard, &list, out, &capacity));
    return RSD_OK;
}

/* ---- all kinds ---- */

/* Reads a tensor that is not distributed: one box, all of it. */
static rsd_status read_plain_tensor(struct torch_file *file, pickle_node c, struct rank_tensor *out)
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct torch_view view;
    struct stored_array array;
    size_t capacity = 0;
    TRY(torch_file_find_tensor(file, c, &view, &array));
    out->dtype = view.dtype;
    out->ndim = view.ndim;
    copy_i64s(out->shape, view.shape, view.ndim);
    out->place = array.offset + (uint64_t)array.base;
    return add_rank_box(out, &capacity, origin, view.shape, &array);
}

rsd_status rank_tensor_read(struct torch_file *file, pickle_node c, int64_t rank,
                            struct mesh_cache *cache, struct rank_tensor *out)
{
    const struct pickle_tree *tree = &file->tree;
    struct rank_tensor tensor = {0};
    struct wrapper_parts parts;
    char text[GLOBAL_TEXT_NCHARS];
    rsd_status status;
    if (!find_wrapper(tree, c, &parts)) {
        status = read_plain_tensor(file, c, &tensor);
    } else {
        tensor.sharded = true;
        status = take_wrapped_type(tree, parts.args, &tensor);
        if (!status && pickle_is_global(tree, parts.type, DISTRIBUTED, "DTensor"))
            status = read_dtensor(file, parts.state, rank, cache, &tensor);
        else if (!status && pickle_is_global(tree, parts.type, DISTRIBUTED, "ShardedTensor"))
            status = read_sharded_tensor(file, parts.state, rank, &tensor);
        else if (!status)
            status = fail(RSD_EUNSUPPORTED, "tensors of the class %s are not supported",
                          pickle_global_text(tree, parts.type, text));
    }
    if (status)
        rank_tensor_drop(&tensor);
    else
        *out = tensor;
    return status;
}

void rank_tensor_drop_boxes(struct rank_tensor *tensor)
{
    mem_free(tensor->boxes);
    tensor->boxes = NULL;
    tensor->nboxes = 0;
}

void rank_tensor_drop(struct rank_tensor *tensor)
{
    rank_tensor_drop_boxes(tensor);
    *tensor = (struct rank_tensor){0};
}

rsd_status dtensor_find_local(const struct pickle_tree *tree, pickle_node c, pickle_node *local,
                              int32_t *ndim, int64_t *shape)
{
    struct rank_tensor whole = {0};
    struct wrapper_parts parts;
    char text[GLOBAL_TEXT_NCHARS];
    pickle_node shards = PICKLE_ABSENT, shard;
    if (!find_wrapper(tree, c, &parts))
        return fail(RSD_EFORMAT, "distributed tensor is invalid");
    TRY(take_wrapped_type(tree, parts.args, &whole));
    *local = find_in_state(tree, parts.state, "_local_tensor");
    if (pickle_kind(tree, parts.state) == NODE_TUPLE && pickle_count(tree, parts.state) > 0)
        shards = pickle_item(tree, parts.state, 0);
    struct pickle_walk walk = pickle_walk(tree, shards);
    if (pickle_kind(tree, shards) == NODE_LIST && pickle_count(tree, shards) == 1 &&
        pickle_walk_next(&walk, &shard))
        *local = pickle_attribute(tree, shard, "tensor");
    if (!torch_view_is_tensor(tree, *local))
        return fail(RSD_EUNSUPPORTED,
                    "tensors of the class %s without one local tensor are not "
                    "supported",
                    pickle_global_text(tree, parts.type, text));
    *ndim = whole.ndim;
    copy_i64s(shape, whole.shape, whole.ndim);
    return RSD_OK;
}
