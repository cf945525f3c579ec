/* explicit.c - layouts of explicit boxes, and torch's sharding specs that are made of boxes.
 *
 * Boxes are sorted by rank; those of one rank keep the order of the caller. The caller's order of all boxes
 * is kept too: it is the placement order, which can be queried.
 */
#include "layout.h"

#include <stdlib.h>

/* Checks a box of the caller: its rank, and that it lies in the tensor. An empty box may lie anywhere. */
static rsd_status check_box(const rsd_layout *layout, int64_t i, int32_t rank, const int64_t *lo,
                            const int64_t *len)
{
    char text[BOX_TEXT_NCHARS], shape[SHAPE_TEXT_NCHARS];
    bool empty = false, outside = false;
    if (rank < 0)
        return fail(RSD_EINVAL, "box %lld has invalid rank %d", (long long)i, (int)rank);
    for (int32_t d = 0; d < layout->ndim; d++) {
        if (lo[d] < 0 || len[d] < 0)
            return fail(
                RSD_EINVAL,
                "box %lld of rank %d has lo %lld and len %lld in dim %d; both must be at least 0",
                (long long)i, (int)rank, (long long)lo[d], (long long)len[d], (int)d);
        empty = empty || len[d] == 0;
        outside = outside || lo[d] > layout->shape[d] || len[d] > layout->shape[d] - lo[d];
    }
    if (outside && !empty)
        return fail(RSD_EINVAL, "box %s of rank %d lies outside of the tensor of shape %s",
                    box_text(layout->ndim, lo, len, text), (int)rank,
                    shape_text(layout->ndim, layout->shape, shape));
    return RSD_OK;
}

/* An empty box may lie anywhere; it is moved inside of the tensor. */
static void store_box(rsd_layout *layout, int64_t i, int32_t rank, const int64_t *lo,
                      const int64_t *len)
{
    layout->box_ranks[i] = rank;
    for (int32_t d = 0; d < layout->ndim; d++) {
        int64_t begin = min_i64(lo[d], layout->shape[d]);
        layout->box_lo[i * layout->ndim + d] = begin;
        layout->box_len[i * layout->ndim + d] = min_i64(len[d], layout->shape[d] - begin);
    }
}

struct ranked_box {
    int32_t rank;
    int64_t box;
};

static int compare_ranked_boxes(const void *a, const void *b)
{
    const struct ranked_box *x = a, *y = b;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->box > y->box) - (x->box < y->box);
}

static bool ranks_ascend(int64_t nboxes, const int32_t *ranks)
{
    for (int64_t i = 1; i < nboxes; i++)
        if (ranks[i] < ranks[i - 1])
            return false;
    return true;
}

/* Checks and copies the boxes of the caller, sorted by rank. If that changes their order, keeps the order of the
 * caller in places. */
static rsd_status store_boxes(rsd_layout *layout, int64_t nboxes, const int32_t *ranks,
                              const int64_t *lo, const int64_t *len)
{
    size_t n = (size_t)nboxes, ndim = (size_t)layout->ndim;
    layout->nboxes = nboxes;
    layout->box_ranks = mem_new(n, sizeof *layout->box_ranks);
    layout->box_lo = mem_new(n * ndim, sizeof *layout->box_lo);
    layout->box_len = mem_new(n * ndim, sizeof *layout->box_len);
    if (!layout->box_ranks || !layout->box_lo || !layout->box_len)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++)
        TRY(check_box(layout, (int64_t)i, ranks[i], lo + i * ndim, len + i * ndim));
    if (ranks_ascend(nboxes, ranks)) {
        for (size_t i = 0; i < n; i++)
            store_box(layout, (int64_t)i, ranks[i], lo + i * ndim, len + i * ndim);
        return RSD_OK;
    }
    layout->places = mem_new(n, sizeof *layout->places);
    layout->place_ranks = mem_copy(ranks, n, sizeof *ranks);
    struct ranked_box *order = mem_new(n, sizeof *order);
    if (!layout->places || !layout->place_ranks || !order) {
        mem_free(order);
        return RSD_ENOMEM;
    }
    for (size_t i = 0; i < n; i++)
        order[i] = (struct ranked_box){ranks[i], (int64_t)i};
    qsort(order, n, sizeof *order, compare_ranked_boxes);
    for (size_t i = 0; i < n; i++) {
        size_t from = (size_t)order[i].box * ndim;
        store_box(layout, (int64_t)i, order[i].rank, lo + from, len + from);
        layout->places[i] = order[i].box;
    }
    mem_free(order);
    return RSD_OK;
}

rsd_status rsd_layout_new_boxes(rsd_dtype dtype, int32_t ndim, const int64_t *shape, int64_t nboxes,
                                const int32_t *ranks, const int64_t *lo, const int64_t *len,
                                rsd_layout **out)
{
    rsd_layout *layout;
    TRY(layout_start(dtype, ndim, shape, &layout));
    int64_t fits;
    rsd_status status;
    if (nboxes < 0)
        status = fail(RSD_EINVAL, "invalid number of boxes %lld", (long long)nboxes);
    else if (!mul_i64(nboxes, (int64_t)sizeof(int64_t) * RSD_MAX_DIMS, &fits))
        status =
            fail(RSD_ELIMIT, "number of boxes %lld exceeds the address space", (long long)nboxes);
    else
        status = store_boxes(layout, nboxes, ranks, lo, len);
    if (status) {
        rsd_layout_free(layout);
        return status;
    }
    *out = layout;
    return RSD_OK;
}

/* Returns an error unless every element is in exactly one box. */
static rsd_status check_partition(const rsd_layout *layout, const struct box_groups *groups)
{
    static const int64_t origin[RSD_MAX_DIMS];
    int32_t ndim = layout->ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS], a = 0, b = 0;
    char text[BOX_TEXT_NCHARS];
    while (a < groups->ngroups && groups->first_holder[a + 1] - groups->first_holder[a] == 1)
        a++;
    if (a < groups->ngroups)
        b = a;
    if (a < groups->ngroups || box_tree_any_overlap(&groups->tree, &a, &b)) {
        box_overlap(ndim, groups->lo + a * ndim, groups->len + a * ndim, groups->lo + b * ndim,
                    groups->len + b * ndim, lo, len);
        return fail(RSD_EINVAL, "%s is in more than one box", box_text(ndim, lo, len, text));
    }
    if (box_groups_find_hole(groups, origin, layout->shape, lo, len))
        return fail(RSD_EMISMATCH, "%s is in no box", box_text(ndim, lo, len, text));
    return RSD_OK;
}

rsd_status rsd_layout_new_enumerable(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                                     int64_t nboxes, const int32_t *ranks, const int64_t *lo,
                                     const int64_t *len, rsd_layout **out)
{
    rsd_layout *layout;
    struct box_groups groups;
    TRY(rsd_layout_new_boxes(dtype, ndim, shape, nboxes, ranks, lo, len, &layout));
    rsd_status status = box_groups_build(&groups, layout, false);
    if (!status) {
        status = check_partition(layout, &groups);
        box_groups_drop(&groups);
    }
    if (status) {
        rsd_layout_free(layout);
        return status;
    }
    *out = layout;
    return RSD_OK;
}

/* Creates the layout of a chunk spec as explicit boxes, for ranks that a mesh cannot have twice. */
static rsd_status chunks_as_boxes(rsd_dtype dtype, int32_t ndim, const int64_t *shape, int32_t dim,
                                  int64_t nplaces, const int32_t *ranks, rsd_layout **out)
{
    size_t n = (size_t)nplaces, dims = (size_t)ndim;
    int64_t *lo = mem_new(n * dims, sizeof *lo), *len = mem_new(n * dims, sizeof *len);
    rsd_status status = lo && len ? RSD_OK : RSD_ENOMEM;
    int64_t chunk = ceil_div(shape[dim], nplaces);
    for (size_t i = 0; i < n && !status; i++) {
        copy_i64s(len + i * dims, shape, ndim);
        int64_t begin = min_i64(shape[dim], chunk * (int64_t)i);
        lo[i * dims + (size_t)dim] = begin;
        len[i * dims + (size_t)dim] = min_i64(chunk, shape[dim] - begin);
    }
    if (!status)
        status = rsd_layout_new_boxes(dtype, ndim, shape, nplaces, ranks, lo, len, out);
    mem_free(lo);
    mem_free(len);
    return status;
}

static int compare_ranks(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Sets *repeated if a rank occurs twice in the list. */
static rsd_status find_repeated_rank(int64_t n, const int32_t *ranks, bool *repeated)
{
    int32_t *sorted = mem_copy(ranks, (size_t)n, sizeof *ranks);
    if (!sorted)
        return RSD_ENOMEM;
    qsort(sorted, (size_t)n, sizeof *sorted, compare_ranks);
    *repeated = false;
    for (int64_t i = 1; i < n; i++)
        *repeated = *repeated || sorted[i] == sorted[i - 1];
    mem_free(sorted);
    return RSD_OK;
}

/* If no rank has several chunks, the layout is a mesh of one axis with its ranks listed. */
rsd_status rsd_layout_new_chunks(rsd_dtype dtype, int32_t ndim, const int64_t *shape, int32_t dim,
                                 int64_t nplaces, const int32_t *ranks, rsd_layout **out)
{
    if (nplaces < 1 || nplaces > INT32_MAX)
        return fail(RSD_EINVAL, "invalid number of chunks %lld (1 to 2^31 - 1)",
                    (long long)nplaces);
    rsd_layout *checked; /* only checks the shape */
    TRY(layout_start(dtype, ndim, shape, &checked));
    rsd_layout_free(checked);
    int32_t from_start = dim < 0 ? dim + ndim : dim;
    if (from_start < 0 || from_start >= ndim)
        return fail(RSD_EINVAL, "dim %d out of range: the tensor has %d dims", (int)dim, (int)ndim);
    bool repeated;
    TRY(find_repeated_rank(nplaces, ranks, &repeated));
    if (repeated)
        return chunks_as_boxes(dtype, ndim, shape, from_start, nplaces, ranks, out);
    rsd_mesh *mesh;
    TRY(rsd_mesh_new(1, &nplaces, NULL, ranks, &mesh));
    rsd_placement placement = {.kind = RSD_SHARD, .dim = from_start};
    rsd_status status = rsd_layout_new(dtype, ndim, shape, mesh, &placement, out);
    rsd_mesh_free(mesh);
    return status;
}
