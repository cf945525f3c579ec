/* dtensor_mesh.c - the device mesh of a DTensor, and where the rank of a file is in it.
 *
 * A device mesh is pickled in two ways. Up to torch 2.8 it has its ranks as a tensor of its shape. Later it
 * has a list of ranks and a layout, whose axes are shapes and strides in that list. The coordinates that the
 * file claims for its rank must be those that the mesh has for it.
 */
#include "dtensor.h"

#include <string.h>

enum { MAX_AXIS_PARTS = 16 };

/* One axis of a mesh as shapes and strides in the list of ranks; an axis that was flattened has several. */
struct mesh_axis {
    int32_t n;
    int64_t shape[MAX_AXIS_PARTS], stride[MAX_AXIS_PARTS];
};

/* Takes a number, or a tuple of numbers. */
static int32_t take_axis_numbers(const struct pickle_tree *tree, pickle_node c, int64_t *out)
{
    if (pickle_as_i64(tree, c, out))
        return *out >= 0 && *out <= MAX_EXTENT ? 1 : -1;
    return pickle_take_numbers(tree, c, MAX_AXIS_PARTS, out);
}

static bool take_axis(const struct pickle_tree *tree, pickle_node shape, pickle_node stride,
                      struct mesh_axis *out)
{
    out->n = take_axis_numbers(tree, shape, out->shape);
    return out->n >= 0 && take_axis_numbers(tree, stride, out->stride) == out->n;
}

static pickle_node item_or_self(const struct pickle_tree *tree, pickle_node c, uint32_t i)
{
    bool tuple = pickle_kind(tree, c) == NODE_TUPLE;
    if (!tuple)
        return i == 0 ? c : PICKLE_NONE;
    return i < pickle_count(tree, c) ? pickle_item(tree, c, i) : PICKLE_NONE;
}

/* Takes the axes of a layout: axes with shape and stride each, or a shape and a stride of all. */
static int32_t take_layout_axes(const struct pickle_tree *tree, pickle_node layout,
                                struct mesh_axis axes[RSD_MAX_AXES])
{
    pickle_node list = pickle_attribute(tree, layout, "axes"),
                shape = pickle_attribute(tree, layout, "shape"),
                stride = pickle_attribute(tree, layout, "stride");
    bool split = pickle_kind(tree, list) == NODE_TUPLE;
    uint32_t n = split ? pickle_count(tree, list) : pickle_count(tree, shape);
    if (!split && pickle_kind(tree, shape) != NODE_TUPLE)
        n = 1;
    if (n > RSD_MAX_AXES)
        return -1;
    for (uint32_t i = 0; i < n; i++) {
        pickle_node one = split ? pickle_item(tree, list, i) : PICKLE_NONE;
        if (!take_axis(
                tree, split ? pickle_attribute(tree, one, "shape") : item_or_self(tree, shape, i),
                split ? pickle_attribute(tree, one, "stride") : item_or_self(tree, stride, i),
                &axes[i]))
            return -1;
    }
    return (int32_t)n;
}

/* Looks for a rank in the bytes of a record: *index is its place in row-major order of the view. */
static bool search_rank(const struct torch_view *view, const struct stored_array *array,
                        const unsigned char *record, int64_t n, int64_t rank, int64_t *index)
{
    size_t width = rsd_dtype_nbytes(view->dtype);
    int64_t at[RSD_MAX_DIMS] = {0};
    for (*index = 0; *index < n; ++*index) {
        const unsigned char *bytes = record + array->base;
        uint64_t value = 0;
        for (int32_t d = 0; d < view->ndim; d++)
            bytes += at[d] * array->strides[d];
        for (size_t k = 0; k < width; k++)
            value |= (uint64_t)bytes[k] << 8 * k;
        if (value == (uint64_t)rank)
            return true;
        for (int32_t d = view->ndim - 1; d >= 0 && ++at[d] == view->shape[d]; d--)
            at[d] = 0;
    }
    return false;
}

/* Finds a rank among the ranks of a mesh. */
static rsd_status find_mesh_rank(struct torch_file *file, pickle_node tensor, int64_t rank,
                                 struct torch_view *view, int64_t *index, bool *found)
{
    struct stored_array array;
    int64_t n = 1;
    TRY(torch_file_find_tensor(file, tensor, view, &array));
    if ((view->dtype != RSD_I32 && view->dtype != RSD_I64) || file->big_endian)
        return dtensor_fail_mesh("has ranks that are not int32 or int64, little-endian");
    for (int32_t d = 0; d < view->ndim; d++)
        if (!mul_i64(n, view->shape[d], &n) || n > MAX_MESH_RANKS ||
            array.nbytes > MAX_MESH_RANKS * sizeof(int64_t))
            return dtensor_fail_mesh("has too many ranks");
    unsigned char *record = mem_new((size_t)array.nbytes + 1, 1);
    if (!record)
        return RSD_ENOMEM;
    rsd_status status =
        store_read(file->store, file->index, array.offset, record, (size_t)array.nbytes);
    if (!status && !budget_take((uint64_t)n))
        status = budget_fail();
    if (!status)
        *found = search_rank(view, &array, record, n, rank, index);
    mem_free(record);
    return status;
}

/* Up to torch 2.8: a tensor of ranks has the shape of the mesh. */
static rsd_status read_rank_tensor(struct torch_file *file, pickle_node tensor, int64_t rank,
                                   struct rank_mesh *out)
{
    struct torch_view view;
    int64_t index = 0;
    TRY(find_mesh_rank(file, tensor, rank, &view, &index, &out->member));
    if (view.ndim > RSD_MAX_AXES)
        return dtensor_fail_mesh("has too many axes");
    out->naxes = view.ndim;
    out->whole = true;
    for (int32_t a = view.ndim - 1; a >= 0; a--) {
        out->counts[a] = view.shape[a];
        out->coordinates[a] = view.shape[a] ? index % view.shape[a] : 0;
        index = view.shape[a] ? index / view.shape[a] : 0;
    }
    return RSD_OK;
}

/* In later versions of torch, a layout has shapes and strides in a list of ranks. */
static rsd_status read_mesh_layout(struct torch_file *file, pickle_node layout, pickle_node ranks,
                                   int64_t rank, struct rank_mesh *out)
{
    struct mesh_axis axes[RSD_MAX_AXES] = {{0}};
    struct torch_view view;
    int64_t index = 0, all = 1;
    out->naxes = take_layout_axes(&file->tree, layout, axes);
    if (out->naxes < 0)
        return dtensor_fail_mesh("has an invalid layout");
    if (!torch_view_is_tensor(&file->tree, ranks))
        return dtensor_fail_mesh("has no ranks");
    TRY(find_mesh_rank(file, ranks, rank, &view, &index, &out->member));
    for (int32_t a = 0; a < out->naxes; a++) {
        out->counts[a] = 1;
        out->coordinates[a] = 0;
        for (int32_t i = 0; i < axes[a].n; i++) {
            int64_t count = axes[a].shape[i], stride = axes[a].stride[i];
            if (count < 1 || stride < 1 || !mul_i64(out->counts[a], count, &out->counts[a]) ||
                out->counts[a] > MAX_MESH_RANKS)
                return dtensor_fail_mesh("has an invalid layout");
            out->coordinates[a] = out->coordinates[a] * count + index / stride % count;
        }
        if (!mul_i64(all, out->counts[a], &all) || all > MAX_MESH_RANKS)
            return dtensor_fail_mesh("has too many ranks");
    }
    out->whole = all == box_volume(view.ndim, view.shape);
    return RSD_OK;
}

/* Compares the coordinates that the file claims with those of the mesh. None: the rank is not in it. */
static rsd_status check_coordinates(const struct pickle_tree *tree, pickle_node mesh, int64_t rank,
                                    struct rank_mesh *out)
{
    pickle_node claimed = pickle_attribute(tree, mesh, "_coordinate_on_dim");
    int64_t coordinates[RSD_MAX_AXES];
    if (claimed == PICKLE_ABSENT)
        return RSD_OK;
    if (claimed == PICKLE_NONE) {
        if (out->member && out->whole)
            return fail(RSD_EMISMATCH, "device mesh has rank %lld, and no coordinates for it",
                        (long long)rank);
        out->member = false;
        return RSD_OK;
    }
    int32_t n = pickle_take_numbers(tree, claimed, RSD_MAX_AXES, coordinates);
    if (n != out->naxes || !out->member ||
        memcmp(coordinates, out->coordinates, (size_t)n * sizeof *coordinates) != 0)
        return fail(RSD_EMISMATCH,
                    "coordinates in the device mesh are not those of rank %lld; the file belongs "
                    "to another rank",
                    (long long)rank);
    return RSD_OK;
}

rsd_status dtensor_read_mesh(struct torch_file *file, pickle_node mesh, int64_t rank,
                             struct mesh_cache *cache, const struct rank_mesh **found)
{
    const struct pickle_tree *tree = &file->tree;
    struct rank_mesh out = {.node = mesh, .known = true};
    for (size_t i = 0; i < MESH_CACHE_N; i++) {
        *found = &cache->meshes[i];
        if (cache->meshes[i].known && cache->meshes[i].node == mesh)
            return RSD_OK;
    }
    pickle_node ranks = pickle_attribute(tree, mesh, "mesh"),
                layout = pickle_attribute(tree, mesh, "_layout");
    if (layout != PICKLE_ABSENT)
        TRY(read_mesh_layout(file, layout, pickle_attribute(tree, mesh, "_rank_map"), rank, &out));
    else if (torch_view_is_tensor(tree, ranks))
        TRY(read_rank_tensor(file, ranks, rank, &out));
    else
        return dtensor_fail_mesh("has neither ranks nor a layout");
    TRY(check_coordinates(tree, mesh, rank, &out));
    *found = &cache->meshes[cache->next];
    cache->meshes[cache->next] = out;
    cache->next = (cache->next + 1) % MESH_CACHE_N;
    return RSD_OK;
}
