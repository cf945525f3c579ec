/* run_arrays.c - the arrays of a run: pointers, extents in bytes, and the check that they do not overlap. */
#include "run_arrays.h"

/* ---- the arrays of one plan ---- */

struct plan_arrays plan_arrays_next(const struct plan_arrays *before, const rsd_plan *plan,
                                    int32_t rank)
{
    struct plan_arrays next = {.number = before->number + before->nsrc + before->ndst,
                               .strides = before->strides,
                               .ndim = plan->src->ndim,
                               .nsrc = rsd_layout_narrays(plan->src),
                               .ndst = rsd_layout_narrays(plan->dst)};
    if (next.strides)
        next.strides += plan_arrays_nstrides(before);
    if (rank != RSD_EVERY_RANK) {
        rsd_layout_arrays_of(plan->src, rank, &next.first_src, &next.nsrc);
        rsd_layout_arrays_of(plan->dst, rank, &next.first_dst, &next.ndst);
    }
    return next;
}

size_t plan_arrays_nstrides(const struct plan_arrays *arrays)
{
    return (size_t)((arrays->nsrc + arrays->ndst) * arrays->ndim);
}

rsd_status plan_arrays_fill_strides(const struct plan_arrays *arrays, const rsd_plan *plan,
                                    const rsd_bind_options *options, int64_t *strides)
{
    int32_t ndim = arrays->ndim;
    for (int64_t i = 0; i < arrays->nsrc; i++, strides += ndim)
        TRY(array_strides(plan->src, arrays->first_src + i,
                          options->src_strides ? options->src_strides + i * ndim : NULL,
                          options->src_column_major != 0, false, strides));
    for (int64_t i = 0; i < arrays->ndst; i++, strides += ndim)
        TRY(array_strides(plan->dst, arrays->first_dst + i,
                          options->dst_strides ? options->dst_strides + i * ndim : NULL,
                          options->dst_column_major != 0, true, strides));
    return RSD_OK;
}

/* ---- the arrays of all plans ---- */

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

rsd_status run_arrays_add(struct run_arrays *arrays, const rsd_plan *plan,
                          const struct plan_arrays *added)
{
    int64_t n = added->nsrc + added->ndst, ndst = arrays->n - arrays->nsrc;
    TRY(GROW(arrays->spans, arrays->capacity, (size_t)(arrays->n + n)));
    for (int64_t i = 0; i < n; i++) {
        bool is_dst = i >= added->nsrc;
        int64_t array = is_dst ? added->first_dst + i - added->nsrc : added->first_src + i;
        struct array_span *span = &arrays->spans[arrays->n + i];
        if (!measure_span(is_dst ? plan->dst : plan->src, array, added->strides + i * added->ndim,
                          span))
            return fail(RSD_ELIMIT, "array %lld: negative strides, or more than 2^63 bytes",
                        (long long)array);
        span->is_dst = is_dst;
        span->index = is_dst ? ndst + i - added->nsrc : arrays->nsrc + i;
    }
    arrays->n += n;
    arrays->nsrc += added->nsrc;
    return RSD_OK;
}

rsd_status run_arrays_finish(struct run_arrays *arrays)
{
    arrays->addresses = mem_new((size_t)arrays->n, sizeof(char *));
    arrays->order = mem_new((size_t)arrays->n, sizeof *arrays->order);
    if (!arrays->addresses || !arrays->order)
        return RSD_ENOMEM;
    for (int64_t i = 0; i < arrays->n; i++)
        arrays->order[i] = i;
    return RSD_OK;
}

void run_arrays_drop(struct run_arrays *arrays)
{
    mem_free(arrays->spans);
    mem_free(arrays->addresses);
    mem_free(arrays->order);
    *arrays = (struct run_arrays){0};
}

/* ---- a run ---- */

/* Most runs have the same arrays as the previous run. Then this is one pass. */
static void sort_by_address(struct run_arrays *arrays)
{
    int64_t *order = arrays->order;
    for (int64_t i = 1; i < arrays->n; i++) {
        int64_t number = order[i], at = i;
        uintptr_t address = (uintptr_t)arrays->addresses[number];
        for (; at > 0 && (uintptr_t)arrays->addresses[order[at - 1]] > address; at--)
            order[at] = order[at - 1];
        order[at] = number;
    }
}

static const char *side_name(bool is_dst)
{
    return is_dst ? "destination" : "source";
}

/* Returns EINVAL if a source and a destination overlap: one begins inside of the other, which is dense, or both begin
 * at the same address. Strided arrays that interleave are allowed. */
static rsd_status check_overlap(struct run_arrays *arrays)
{
    uintptr_t start[2] = {0},
              dense_end[2] = {0}; /* of the sources [0] and destinations [1] so far */
    sort_by_address(arrays);
    for (int64_t i = 0; i < arrays->n; i++) {
        const struct array_span *span = &arrays->spans[arrays->order[i]];
        uintptr_t address = (uintptr_t)arrays->addresses[arrays->order[i]];
        bool dst = span->is_dst;
        if (!span->used || span->nbytes == 0)
            continue;
        if (address == start[!dst] || address < dense_end[!dst])
            return fail(RSD_EINVAL, "%s array %lld overlaps a %s array", side_name(dst),
                        (long long)span->index, side_name(!dst));
        start[dst] = address;
        if (span->dense && address + span->nbytes > dense_end[dst])
            dense_end[dst] = address + span->nbytes;
    }
    return RSD_OK;
}

/* Returns EINVAL if an array of a side is used and NULL. */
static rsd_status check_given(const struct run_arrays *arrays, bool is_dst)
{
    for (int64_t i = 0; i < arrays->n; i++) {
        const struct array_span *span = &arrays->spans[i];
        if (span->is_dst == is_dst && span->used && !arrays->addresses[i])
            return fail(RSD_EINVAL, "%s array %lld is NULL", side_name(is_dst),
                        (long long)span->index);
    }
    return RSD_OK;
}

rsd_status run_arrays_set(struct run_arrays *arrays, const void *const *src, void *const *dst)
{
    for (int64_t i = 0; i < arrays->n; i++) {
        const struct array_span *span = &arrays->spans[i];
        if (span->is_dst)
            arrays->addresses[i] = dst ? dst[span->index] : NULL;
        else
            arrays->addresses[i] = src ? without_const(src[span->index]) : NULL;
    }
    TRY(check_given(arrays, false));
    TRY(check_given(arrays, true));
    return check_overlap(arrays);
}
