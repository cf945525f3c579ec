/* query.c - queries of layouts: properties, places, arrays, equality and hash. */
#include "layout.h"

#include <string.h>

rsd_dtype rsd_layout_dtype(const rsd_layout *layout)
{
    return layout->dtype;
}

int32_t rsd_layout_ndim(const rsd_layout *layout)
{
    return layout->ndim;
}

const int64_t *rsd_layout_shape(const rsd_layout *layout)
{
    return layout->shape;
}

const rsd_mesh *rsd_layout_mesh(const rsd_layout *layout)
{
    return layout->mesh;
}

int64_t rsd_layout_world(const rsd_layout *layout)
{
    int64_t narrays = rsd_layout_narrays(layout);
    return narrays ? (int64_t)layout_array_rank(layout, narrays - 1) + 1 : 0;
}

int64_t rsd_layout_nranks(const rsd_layout *layout)
{
    if (layout->mesh)
        return layout->mesh->nranks;
    int64_t nranks = 0;
    for (int64_t i = 0; i < layout->nboxes; i++)
        nranks += i == 0 || layout->box_ranks[i] != layout->box_ranks[i - 1];
    return nranks;
}

rsd_status rsd_layout_placement(const rsd_layout *layout, int32_t axis, rsd_placement *placement)
{
    if (!layout->mesh)
        return fail(RSD_EINVAL, "a layout of explicit boxes has no placements");
    if (axis < 0 || axis >= layout->mesh->naxes)
        return fail(RSD_EINVAL, "axis %d out of range: the mesh has %d axes", (int)axis,
                    (int)layout->mesh->naxes);
    *placement = layout->placements[axis];
    return RSD_OK;
}

int32_t rsd_layout_axes(const rsd_layout *layout, int32_t dim, int32_t *axes)
{
    dim += dim < 0 ? layout->ndim : 0;
    if (dim < 0 || dim >= layout->ndim)
        return 0;
    for (int32_t k = 0; k < layout->naxes_of[dim]; k++)
        axes[k] = layout->axes_of[dim][k];
    return layout->naxes_of[dim];
}

/* ---- places ---- */

int64_t rsd_layout_nplaces(const rsd_layout *layout)
{
    return layout->mesh ? layout->mesh->nranks : layout->nboxes;
}

rsd_status rsd_layout_rank_at(const rsd_layout *layout, int64_t position, int32_t *rank)
{
    int64_t nplaces = rsd_layout_nplaces(layout);
    if (position < 0 || position >= nplaces)
        return fail(RSD_EINVAL, "position %lld out of range: the layout has %lld places",
                    (long long)position, (long long)nplaces);
    if (layout->mesh)
        *rank = mesh_rank_at(layout->mesh, position);
    else
        *rank = (layout->place_ranks ? layout->place_ranks : layout->box_ranks)[position];
    return RSD_OK;
}

rsd_status rsd_layout_position(const rsd_layout *layout, int32_t rank, int64_t *position)
{
    int64_t found = -1;
    if (layout->mesh) {
        found = mesh_position_of(layout->mesh, rank);
    } else {
        const int32_t *ranks = layout->place_ranks ? layout->place_ranks : layout->box_ranks;
        for (int64_t i = 0; i < layout->nboxes && found < 0; i++)
            if (ranks[i] == rank)
                found = i;
    }
    if (found < 0)
        return fail(RSD_EINVAL, "rank %d is not in the layout", (int)rank);
    *position = found;
    return RSD_OK;
}

/* ---- arrays ---- */

int64_t rsd_layout_narrays(const rsd_layout *layout)
{
    return layout->mesh ? layout->mesh->nranks : layout->nboxes;
}

void layout_array_shape(const rsd_layout *layout, int64_t array, int64_t *shape)
{
    if (!layout->mesh) {
        for (int32_t d = 0; d < layout->ndim; d++)
            shape[d] = layout_box_len(layout, array)[d];
        return;
    }
    int64_t position = mesh_position_of_array(layout->mesh, array);
    for (int32_t d = 0; d < layout->ndim; d++)
        shape[d] = cuts_extent_of(&layout->cuts[d], position);
}

rsd_status rsd_layout_array(const rsd_layout *layout, int64_t index, rsd_array *array)
{
    int64_t narrays = rsd_layout_narrays(layout);
    if (index < 0 || index >= narrays)
        return fail(RSD_EINVAL, "array %lld out of range: the layout has %lld arrays",
                    (long long)index, (long long)narrays);
    *array = (rsd_array){.rank = layout_array_rank(layout, index), .ndim = layout->ndim};
    array->place = layout->mesh     ? mesh_position_of_array(layout->mesh, index)
                   : layout->places ? layout->places[index]
                                    : index;
    layout_array_shape(layout, index, array->shape);
    array->nbytes =
        (size_t)box_volume(layout->ndim, array->shape) * rsd_dtype_nbytes(layout->dtype);
    return RSD_OK;
}

/* Returns the first box whose rank is at least this. */
static int64_t lower_bound_box(const rsd_layout *layout, int32_t rank)
{
    int64_t lo = 0, hi = layout->nboxes;
    while (lo < hi) {
        int64_t middle = lo + (hi - lo) / 2;
        if (layout->box_ranks[middle] < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

rsd_status rsd_layout_local(const rsd_layout *layout, int32_t rank, rsd_array *array)
{
    int64_t first, count;
    rsd_layout_arrays_of(layout, rank, &first, &count);
    if (count == 0)
        return fail(RSD_EINVAL, "rank %d has no array in the layout", (int)rank);
    if (count > 1)
        return fail(RSD_EINVAL,
                    "rank %d has %lld arrays in the layout; use rsd_layout_arrays_of and "
                    "rsd_layout_array",
                    (int)rank, (long long)count);
    return rsd_layout_array(layout, first, array);
}

void rsd_layout_arrays_of(const rsd_layout *layout, int32_t rank, int64_t *first, int64_t *count)
{
    *first = *count = 0;
    if (rank < 0)
        return;
    if (layout->mesh) {
        int64_t position = mesh_position_of(layout->mesh, rank);
        if (position >= 0) {
            *first = mesh_array_at(layout->mesh, position);
            *count = 1;
        }
        return;
    }
    *first = lower_bound_box(layout, rank);
    int64_t end = *first;
    while (end < layout->nboxes && layout->box_ranks[end] == rank)
        end++;
    *count = end - *first;
}

/* ---- equality ---- */

rsd_status layout_same_shape(const rsd_layout *src, const rsd_layout *dst)
{
    if (src->ndim != dst->ndim)
        return fail(RSD_EMISMATCH, "number of dims differs: source %d, destination %d",
                    (int)src->ndim, (int)dst->ndim);
    for (int32_t d = 0; d < src->ndim; d++)
        if (src->shape[d] != dst->shape[d])
            return fail(RSD_EMISMATCH, "shape differs in dim %d: source %lld, destination %lld",
                        (int)d, (long long)src->shape[d], (long long)dst->shape[d]);
    return RSD_OK;
}

static bool placements_equal(const rsd_placement *a, const rsd_placement *b)
{
    return a->kind == b->kind && a->dim == b->dim && a->reduce == b->reduce &&
           a->factor == b->factor && a->nsegments == b->nsegments &&
           (a->nsegments == 0 ||
            memcmp(a->segments, b->segments, (size_t)a->nsegments * sizeof *a->segments) == 0);
}

static bool meshes_equal(const rsd_mesh *a, const rsd_mesh *b)
{
    size_t nranks = (size_t)a->nranks * sizeof *a->ranks;
    return a == b || (a->naxes == b->naxes && a->base == b->base &&
                      memcmp(a->counts, b->counts, (size_t)a->naxes * sizeof *a->counts) == 0 &&
                      (a->ranks && b->ranks ? memcmp(a->ranks, b->ranks, nranks) == 0
                                            : a->ranks == b->ranks));
}

static bool mesh_layouts_equal(const rsd_layout *a, const rsd_layout *b)
{
    if (!meshes_equal(a->mesh, b->mesh))
        return false;
    for (int32_t axis = 0; axis < a->mesh->naxes; axis++)
        if (!placements_equal(&a->placements[axis], &b->placements[axis]))
            return false;
    for (int32_t d = 0; d < a->ndim; d++)
        if (memcmp(a->axes_of[d], b->axes_of[d], (size_t)a->naxes_of[d] * sizeof(int32_t)) != 0)
            return false;
    return true;
}

static bool box_layouts_equal(const rsd_layout *a, const rsd_layout *b)
{
    size_t coordinates = (size_t)a->nboxes * (size_t)a->ndim * sizeof(int64_t);
    return a->nboxes == b->nboxes &&
           memcmp(a->box_ranks, b->box_ranks, (size_t)a->nboxes * sizeof *a->box_ranks) == 0 &&
           memcmp(a->box_lo, b->box_lo, coordinates) == 0 &&
           memcmp(a->box_len, b->box_len, coordinates) == 0;
}

int rsd_layout_equal(const rsd_layout *a, const rsd_layout *b)
{
    if (a == b)
        return 1;
    if (a->dtype != b->dtype || a->ndim != b->ndim || !a->mesh != !b->mesh ||
        memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return 0;
    return a->mesh ? mesh_layouts_equal(a, b) : box_layouts_equal(a, b);
}

void layout_hash(const rsd_layout *layout, struct hash *hash)
{
    hash_i64(hash, layout->dtype);
    hash_i64(hash, layout->ndim);
    hash_i64s(hash, layout->shape, (size_t)layout->ndim);
    hash_i64(hash, layout->mesh ? layout->mesh->naxes : 0);
    if (!layout->mesh) {
        size_t coordinates = (size_t)layout->nboxes * (size_t)layout->ndim;
        hash_i64(hash, layout->nboxes);
        hash_i32s(hash, layout->box_ranks, (size_t)layout->nboxes);
        hash_i64s(hash, layout->box_lo, coordinates);
        hash_i64s(hash, layout->box_len, coordinates);
        return;
    }
    const rsd_mesh *mesh = layout->mesh;
    hash_i64s(hash, mesh->counts, (size_t)mesh->naxes);
    hash_i64(hash, mesh->base);
    hash_i64(hash, mesh->ranks != NULL);
    if (mesh->ranks)
        hash_i32s(hash, mesh->ranks, (size_t)mesh->nranks);
    for (int32_t a = 0; a < mesh->naxes; a++) {
        const rsd_placement *one = &layout->placements[a];
        const int64_t fields[] = {one->kind, one->dim, one->reduce, one->factor, one->nsegments};
        hash_i64s(hash, fields, sizeof fields / sizeof *fields);
        hash_i64s(hash, one->segments, (size_t)one->nsegments);
    }
    for (int32_t d = 0; d < layout->ndim; d++)
        hash_i32s(hash, layout->axes_of[d], (size_t)layout->naxes_of[d]);
}
