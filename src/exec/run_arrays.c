/* run_arrays.c - the arrays of a run: pointers, extents in bytes, and the check that they do not overlap. */
#include "run_arrays.h"

/* Computes the bytes from the first to the last element of an array. Returns false if strides are negative or
 * overflow. */
static bool measure_span(const rsd_layout *layout, int64_t array, const int64_t *strides,
                         struct array_span *span)
{
    int64_t shape[RSD_MAX_DIMS], step, element_nbytes = (int64_t)rsd_dtype_nbytes(layout->dtype);
    int64_t nbytes = element_nbytes;
    *span = (struct array_span){0};
    layout_array_shape(layout, array, shape);
    int64_t volume = box_volume(layout->ndim, shape);
    if (volume == 0)
        return true;
    for (int32_t d = 0; d < layout->ndim; d++)
        if (strides[d] < 0 || !mul_i64(shape[d] - 1, strides[d], &step) ||
            !add_i64(nbytes, step, &nbytes))
            return false;
    span->nbytes = (uint64_t)nbytes;
    span->dense = nbytes == volume * element_nbytes;
    return true;
}

/* Adds the spans of n arrays of a layout to a list. */
static rsd_status add_spans(struct array_span **spans, size_t *capacity, int64_t *count,
                            const rsd_layout *layout, int64_t first, int64_t n,
                            const int64_t *strides)
{
    TRY(mem_grow(spans, capacity, (size_t)(*count + n), sizeof **spans));
    for (int64_t i = 0; i < n; i++)
        if (!measure_span(layout, first + i, strides + i * layout->ndim, &(*spans)[*count + i]))
            return fail(RSD_ELIMIT, "array %lld: negative strides, or more than 2^63 bytes",
                        (long long)(first + i));
    *count += n;
    return RSD_OK;
}

rsd_status run_arrays_add_src(struct run_arrays *arrays, const rsd_layout *layout, int64_t first,
                              int64_t n, const int64_t *strides)
{
    return add_spans(&arrays->src_spans, &arrays->src_capacity, &arrays->nsrc, layout, first, n,
                     strides);
}

rsd_status run_arrays_add_dst(struct run_arrays *arrays, const rsd_layout *layout, int64_t first,
                              int64_t n, const int64_t *strides)
{
    return add_spans(&arrays->dst_spans, &arrays->dst_capacity, &arrays->ndst, layout, first, n,
                     strides);
}

rsd_status run_arrays_finish(struct run_arrays *arrays)
{
    arrays->src = mem_new((size_t)arrays->nsrc, sizeof *arrays->src);
    arrays->dst = mem_new((size_t)arrays->ndst, sizeof *arrays->dst);
    arrays->order = mem_new((size_t)(arrays->nsrc + arrays->ndst), sizeof *arrays->order);
    if (!arrays->src || !arrays->dst || !arrays->order)
        return RSD_ENOMEM;
    for (int64_t i = 0; i < arrays->nsrc + arrays->ndst; i++)
        arrays->order[i] = i;
    return RSD_OK;
}

void run_arrays_drop(struct run_arrays *arrays)
{
    mem_free(arrays->src);
    mem_free(arrays->dst);
    mem_free(arrays->src_spans);
    mem_free(arrays->dst_spans);
    mem_free(arrays->order);
    *arrays = (struct run_arrays){0};
}

/* ---- overlap ---- */

/* Most runs have the same arrays as the previous run. Then this is one pass. */
static void sort_by_address(struct run_arrays *arrays)
{
    int64_t *order = arrays->order;
    for (int64_t i = 1; i < arrays->nsrc + arrays->ndst; i++) {
        int64_t number = order[i], at = i;
        uintptr_t address = (uintptr_t)run_arrays_address(arrays, number);
        for (; at > 0 && (uintptr_t)run_arrays_address(arrays, order[at - 1]) > address; at--)
            order[at] = order[at - 1];
        order[at] = number;
    }
}

/* Returns EINVAL if a source and a destination overlap: one begins inside of the other, which is dense, or both begin
 * at the same address. Strided arrays that interleave are allowed. */
static rsd_status check_overlap(struct run_arrays *arrays)
{
    uintptr_t start[2] = {0},
              dense_end[2] = {0}; /* of the sources [0] and destinations [1] so far */
    sort_by_address(arrays);
    for (int64_t i = 0; i < arrays->nsrc + arrays->ndst; i++) {
        int64_t number = arrays->order[i];
        bool dst = number >= arrays->nsrc;
        const struct array_span *span = run_arrays_span(arrays, number);
        uintptr_t address = (uintptr_t)run_arrays_address(arrays, number);
        if (!span->used || span->nbytes == 0)
            continue;
        if (address == start[!dst] || address < dense_end[!dst])
            return fail(
                RSD_EINVAL, "%s array %lld overlaps a %s array", dst ? "destination" : "source",
                (long long)(dst ? number - arrays->nsrc : number), dst ? "source" : "destination");
        start[dst] = address;
        if (span->dense && address + span->nbytes > dense_end[dst])
            dense_end[dst] = address + span->nbytes;
    }
    return RSD_OK;
}

rsd_status run_arrays_set(struct run_arrays *arrays, const void *const *src, void *const *dst)
{
    for (int64_t i = 0; i < arrays->nsrc; i++)
        arrays->src[i] = src ? src[i] : NULL;
    for (int64_t i = 0; i < arrays->ndst; i++)
        arrays->dst[i] = dst ? dst[i] : NULL;
    for (int64_t i = 0; i < arrays->nsrc; i++)
        if (arrays->src_spans[i].used && !arrays->src[i])
            return fail(RSD_EINVAL, "source array %lld is NULL", (long long)i);
    for (int64_t i = 0; i < arrays->ndst; i++)
        if (arrays->dst_spans[i].used && !arrays->dst[i])
            return fail(RSD_EINVAL, "destination array %lld is NULL", (long long)i);
    return check_overlap(arrays);
}
