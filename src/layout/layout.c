/* layout.c - layouts of mesh and placements.
 *
 * Each mesh axis has one role: it cuts a dim, replicates, or is partial. A mesh position is the sum of what
 * its axes add to it, so the ranks that hold a box are found by addition:
 *
 *     position = axes that cut dim 0 + axes that cut dim 1 + ... + copies + partial terms
 *
 * Invariants:
 *   (1) A layout does not change after it is returned; plans and callers share it by reference count.
 *   (2) The numbers of elements and of bytes of the whole tensor fit into 63 bits.
 */
#include "layout.h"

rsd_status layout_start(rsd_dtype dtype, int32_t ndim, const int64_t *shape, rsd_layout **out)
{
    if (!rsd_dtype_name(dtype))
        return fail(RSD_EINVAL, "invalid dtype %d", (int)dtype);
    if (ndim < 0 || ndim > RSD_MAX_DIMS)
        return fail(RSD_EINVAL, "invalid number of dims %d (0 to %d)", (int)ndim,
                    (int)RSD_MAX_DIMS);
    int64_t volume = 1, nbytes;
    bool empty = false, fits = true;
    for (int32_t d = 0; d < ndim; d++) {
        if (shape[d] < 0)
            return fail(RSD_EINVAL, "dim %d has negative extent %lld", (int)d, (long long)shape[d]);
        if (shape[d] > MAX_EXTENT)
            return fail(RSD_ELIMIT, "dim %d has extent %lld, which exceeds 2^62", (int)d,
                        (long long)shape[d]);
        empty = empty || shape[d] == 0;
        fits = fits && mul_i64(volume, shape[d], &volume);
    }
    if (empty)
        volume = 0;
    else if (!fits || !mul_i64(volume, (int64_t)rsd_dtype_nbytes(dtype), &nbytes))
        return fail(RSD_ELIMIT, "the tensor has 2^63 bytes or more");
    else if (volume > MAX_EXTENT)
        return fail(RSD_ELIMIT, "the tensor has more than 2^62 elements");

    rsd_layout *layout = mem_new(1, sizeof *layout);
    if (!layout)
        return RSD_ENOMEM;
    atomic_init(&layout->references, 1);
    layout->dtype = dtype;
    layout->ndim = ndim;
    layout->volume = volume;
    for (int32_t d = 0; d < ndim; d++)
        layout->shape[d] = shape[d];
    *out = layout;
    return RSD_OK;
}

rsd_layout *rsd_layout_share(const rsd_layout *layout)
{
    rsd_layout *shared = without_const(layout);
    atomic_fetch_add(&shared->references, 1);
    return shared;
}

void rsd_layout_free(rsd_layout *layout)
{
    if (!layout || atomic_fetch_sub(&layout->references, 1) > 1)
        return;
    if (layout->placements)
        for (int32_t a = 0; a < layout->mesh->naxes; a++)
            mem_free(without_const(layout->placements[a].segments));
    mem_free(layout->placements);
    rsd_mesh_free(layout->mesh);
    mem_free(layout->all_cuts);
    mem_free(layout->all_ends);
    mem_free(layout->box_ranks);
    mem_free(layout->box_lo);
    mem_free(layout->box_len);
    mem_free(layout->places);
    mem_free(layout->place_ranks);
    mem_free(layout);
}

/* ---- digits ---- */

void digits_add(struct digits *digits, int64_t count, int64_t stride)
{
    if (count < 2)
        return;
    digits->count[digits->ndigits] = count;
    digits->stride[digits->ndigits++] = stride;
    digits->total *= count;
}

int64_t digits_position(const struct digits *digits, int64_t index)
{
    int64_t position = 0;
    for (int32_t i = digits->ndigits - 1; i >= 0; i--) {
        position += index % digits->count[i] * digits->stride[i];
        index /= digits->count[i];
    }
    return position;
}

int64_t digits_part(const struct digits *digits, int64_t position)
{
    int64_t part = 0;
    for (int32_t i = 0; i < digits->ndigits; i++)
        part += position / digits->stride[i] % digits->count[i] * digits->stride[i];
    return part;
}

int64_t digits_index(const struct digits *digits, int64_t position)
{
    int64_t index = 0;
    for (int32_t i = 0; i < digits->ndigits; i++)
        index = index * digits->count[i] + position / digits->stride[i] % digits->count[i];
    return index;
}

/* ---- placements ---- */

static bool cuts_a_dim(rsd_kind kind)
{
    return kind != RSD_REPLICATE && kind != RSD_PARTIAL;
}

/* Checks that the segments of a placement add up to the extent of its dim. */
static rsd_status check_segments(const rsd_layout *layout, const rsd_placement *placement)
{
    int64_t extent = layout->shape[placement->dim], sum = 0;
    if (placement->nsegments < 1 || !placement->segments)
        return fail(RSD_EINVAL, "segmented shard of dim %d has no segments", (int)placement->dim);
    if (placement->nsegments > RSD_MAX_SEGMENTS)
        return fail(RSD_ELIMIT, "segmented shard has %d segments (1 to %d)",
                    (int)placement->nsegments, (int)RSD_MAX_SEGMENTS);
    for (int32_t s = 0; s < placement->nsegments; s++)
        if (placement->segments[s] < 0 || placement->segments[s] > extent - sum)
            return fail(
                RSD_EINVAL,
                "segment %d has length %lld, which exceeds the rest of dim %d (extent %lld)",
                (int)s, (long long)placement->segments[s], (int)placement->dim, (long long)extent);
        else
            sum += placement->segments[s];
    if (sum != extent)
        return fail(RSD_EINVAL, "segments add up to %lld, but dim %d has extent %lld",
                    (long long)sum, (int)placement->dim, (long long)extent);
    return RSD_OK;
}

/* Checks a placement. A dim that was counted from the end becomes one from the start. */
static rsd_status check_placement(const rsd_layout *layout, rsd_placement *placement)
{
    if (placement->kind < RSD_REPLICATE || placement->kind > RSD_PARTIAL)
        return fail(RSD_EINVAL, "invalid placement kind %d", (int)placement->kind);
    if (placement->kind == RSD_PARTIAL &&
        (placement->reduce < RSD_REDUCE_SUM || placement->reduce > RSD_REDUCE_BXOR))
        return fail(RSD_EINVAL, "invalid reduction %d", (int)placement->reduce);
    if (!cuts_a_dim(placement->kind))
        return RSD_OK;
    int32_t dim = placement->dim < 0 ? placement->dim + layout->ndim : placement->dim;
    if (dim < 0 || dim >= layout->ndim)
        return fail(RSD_EINVAL, "dim %d out of range: the tensor has %d dims", (int)placement->dim,
                    (int)layout->ndim);
    placement->dim = dim;
    if ((placement->kind == RSD_STRIDED || placement->kind == RSD_CYCLIC) && placement->factor < 1)
        return fail(RSD_EINVAL, "%s is %lld, but must be at least 1",
                    placement->kind == RSD_CYCLIC ? "block" : "split factor",
                    (long long)placement->factor);
    return placement->kind == RSD_SEGMENTED ? check_segments(layout, placement) : RSD_OK;
}

/* All partial axes of a layout are reduced together, so they must have one reduction. Sums and averages
 * can be combined. */
static rsd_status check_reductions(const rsd_placement *placements, int32_t naxes)
{
    const rsd_placement *first = NULL;
    for (int32_t a = 0; a < naxes; a++) {
        const rsd_placement *one = &placements[a];
        if (one->kind != RSD_PARTIAL)
            continue;
        if (first && one->reduce != first->reduce &&
            (one->reduce > RSD_REDUCE_AVG || first->reduce > RSD_REDUCE_AVG))
            return fail(RSD_EINVAL, "mesh axis %d is P(%s), but an axis before it is P(%s)", (int)a,
                        rsd_reduce_name(one->reduce), rsd_reduce_name(first->reduce));
        first = first ? first : one;
    }
    return RSD_OK;
}

/* Checks the placements and copies the fields that each kind uses, so that equal layouts have equal fields. */
static rsd_status copy_placements(rsd_layout *layout, const rsd_placement *placements)
{
    int32_t naxes = layout->mesh->naxes;
    layout->placements = mem_new((size_t)naxes, sizeof *layout->placements);
    if (!layout->placements)
        return RSD_ENOMEM;
    for (int32_t a = 0; a < naxes; a++) {
        rsd_placement one = placements[a];
        TRY(check_placement(layout, &one));
        rsd_placement *copy = &layout->placements[a];
        copy->kind = one.kind;
        if (one.kind == RSD_PARTIAL)
            copy->reduce = one.reduce;
        if (cuts_a_dim(one.kind))
            copy->dim = one.dim;
        if (one.kind == RSD_STRIDED || one.kind == RSD_CYCLIC)
            copy->factor = one.factor;
        if (one.kind == RSD_SEGMENTED) {
            copy->segments = mem_copy(one.segments, (size_t)one.nsegments, sizeof *one.segments);
            if (!copy->segments)
                return RSD_ENOMEM;
            copy->nsegments = one.nsegments;
        }
    }
    return check_reductions(layout->placements, naxes);
}

/* Compiles placements and the order of axes on each dim into cuts and digits. */
static rsd_status compile_placements(rsd_layout *layout)
{
    const rsd_mesh *mesh = layout->mesh;
    size_t nends = 0;
    for (int32_t a = 0; a < mesh->naxes; a++)
        nends += (size_t)layout->placements[a].nsegments;
    layout->all_cuts = mem_new((size_t)mesh->naxes, sizeof *layout->all_cuts);
    layout->all_ends = mem_new(nends, sizeof *layout->all_ends);
    if (!layout->all_cuts || !layout->all_ends)
        return RSD_ENOMEM;

    layout->copies.total = layout->terms.total = layout->others.total = 1;
    for (int32_t a = 0; a < mesh->naxes; a++) {
        rsd_kind kind = layout->placements[a].kind;
        digits_add(kind == RSD_REPLICATE ? &layout->copies : &layout->others, mesh->counts[a],
                   mesh->strides[a]);
        if (kind == RSD_PARTIAL)
            digits_add(&layout->terms, mesh->counts[a], mesh->strides[a]);
    }

    struct cut *cut = layout->all_cuts;
    int64_t *end = layout->all_ends;
    for (int32_t d = 0; d < layout->ndim; d++) {
        struct cuts *cuts = &layout->cuts[d];
        *cuts = (struct cuts){.extent = layout->shape[d], .cut = cut};
        for (int32_t k = 0; k < layout->naxes_of[d]; k++) {
            int32_t axis = layout->axes_of[d][k];
            const rsd_placement *placement = &layout->placements[axis];
            if (mesh->counts[axis] < 2)
                continue;
            *cut = (struct cut){.kind = placement->kind,
                                .count = mesh->counts[axis],
                                .stride = mesh->strides[axis],
                                .factor = placement->factor,
                                .nsegments = placement->nsegments,
                                .ends = end};
            for (int32_t s = 0; s < placement->nsegments; s++, end++)
                *end = placement->segments[s] + (s ? end[-1] : 0);
            cut++;
            cuts->ncuts++;
        }
    }
    return RSD_OK;
}

/* Sets the order of axes on each dim: as in naxes and axes, or that of the mesh if naxes is NULL. */
static void set_axis_order(rsd_layout *layout, const int32_t *naxes, const int32_t *axes)
{
    if (!naxes) {
        for (int32_t a = 0; a < layout->mesh->naxes; a++)
            if (cuts_a_dim(layout->placements[a].kind)) {
                int32_t d = layout->placements[a].dim;
                layout->axes_of[d][layout->naxes_of[d]++] = a;
            }
        return;
    }
    for (int32_t d = 0; d < layout->ndim; d++)
        for (int32_t k = 0; k < naxes[d]; k++, axes++) {
            layout->ordered = layout->ordered || (k && axes[0] < axes[-1]);
            layout->axes_of[d][layout->naxes_of[d]++] = *axes;
        }
}

/* Creates a layout on a mesh. naxes and axes are the order of axes on each dim, or NULL for the order of the mesh. */
static rsd_status new_on_mesh(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                              const rsd_mesh *mesh, const rsd_placement *placements,
                              const int32_t *naxes, const int32_t *axes, rsd_layout **out)
{
    rsd_layout *layout = NULL;
    TRY(layout_start(dtype, ndim, shape, &layout));
    layout->mesh = rsd_mesh_share(mesh);
    rsd_status status = copy_placements(layout, placements);
    if (!status) {
        set_axis_order(layout, naxes, axes);
        status = compile_placements(layout);
    }
    if (status) {
        rsd_layout_free(layout);
        return status;
    }
    *out = layout;
    return RSD_OK;
}

rsd_status rsd_layout_new(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const rsd_mesh *mesh,
                          const rsd_placement *placements, rsd_layout **out)
{
    return new_on_mesh(dtype, ndim, shape, mesh, placements, NULL, NULL, out);
}

rsd_status rsd_layout_new_by_dim(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                                 const rsd_mesh *mesh, const int32_t *naxes, const int32_t *axes,
                                 rsd_layout **out)
{
    if (ndim < 0 || ndim > RSD_MAX_DIMS)
        return fail(RSD_EINVAL, "invalid number of dims %d (0 to %d)", (int)ndim,
                    (int)RSD_MAX_DIMS);
    rsd_placement placements[RSD_MAX_AXES] = {{.kind = RSD_REPLICATE}};
    const int32_t *axis = axes;
    for (int32_t d = 0; d < ndim; d++) {
        if (naxes[d] < 0)
            return fail(RSD_EINVAL, "naxes[%d] is %d, but must be at least 0", (int)d,
                        (int)naxes[d]);
        for (int32_t k = 0; k < naxes[d]; k++, axis++) {
            if (*axis < 0 || *axis >= mesh->naxes)
                return fail(RSD_EINVAL, "dim %d: axis %d out of range: the mesh has %d axes",
                            (int)d, (int)*axis, (int)mesh->naxes);
            if (placements[*axis].kind == RSD_SHARD)
                return fail(RSD_EINVAL, "mesh axis %d is used twice", (int)*axis);
            placements[*axis] = (rsd_placement){.kind = RSD_SHARD, .dim = d};
        }
    }
    return new_on_mesh(dtype, ndim, shape, mesh, placements, naxes, axes, out);
}

rsd_status layout_without_partial(const rsd_layout *layout, rsd_layout **out)
{
    if (!layout->mesh || layout->terms.ndigits == 0) {
        *out = rsd_layout_share(layout);
        return RSD_OK;
    }
    rsd_placement placements[RSD_MAX_AXES];
    int32_t naxes[RSD_MAX_DIMS] = {0}, axes[RSD_MAX_AXES] = {0}, n = 0;
    for (int32_t a = 0; a < layout->mesh->naxes; a++) {
        placements[a] = layout->placements[a];
        if (placements[a].kind == RSD_PARTIAL)
            placements[a].kind = RSD_REPLICATE;
    }
    for (int32_t d = 0; d < layout->ndim; d++) {
        naxes[d] = layout->naxes_of[d];
        for (int32_t k = 0; k < naxes[d]; k++)
            axes[n++] = layout->axes_of[d][k];
    }
    return new_on_mesh(layout->dtype, layout->ndim, layout->shape, layout->mesh, placements, naxes,
                       axes, out);
}
