/* strides.c - the strides in bytes of the arrays of a layout: those of the caller, or of a dense array. */
#include "memory.h"

#include <string.h>

/* Returns the strides in bytes of an array of a layout without gaps. */
static void dense_strides(const rsd_layout *layout, int64_t array, bool column_major,
                          int64_t *strides)
{
    int64_t shape[RSD_MAX_DIMS], stride = (int64_t)rsd_dtype_nbytes(layout->dtype);
    layout_array_shape(layout, array, shape);
    if (box_volume(layout->ndim, shape) == 0) { /* products of the other extents may overflow */
        memset(strides, 0, (size_t)layout->ndim * sizeof *strides);
        return;
    }
    for (int32_t i = 0; i < layout->ndim; i++) {
        int32_t d = column_major ? i : layout->ndim - 1 - i;
        strides[d] = stride;
        stride *= shape[d];
    }
}

/* Checks that the array spans fewer than 2^63 bytes and, if it is written, that no two elements have the same
 * address. */
static rsd_status check_strides(const rsd_layout *layout, int64_t array, const int64_t *strides,
                                bool written)
{
    int64_t shape[RSD_MAX_DIMS], reach = 0, step;
    layout_array_shape(layout, array, shape);
    if (box_volume(layout->ndim, shape) == 0)
        return RSD_OK;
    for (int32_t d = 0; d < layout->ndim; d++) {
        if (strides[d] < 0)
            return fail(RSD_EINVAL, "array %lld has negative stride %lld in dim %d",
                        (long long)array, (long long)strides[d], (int)d);
        if (!mul_i64(shape[d] - 1, strides[d], &step) || !add_i64(reach, step, &reach) ||
            reach > INT64_MAX / 16 - 1)
            return fail(RSD_ELIMIT, "array %lld spans 2^63 bytes or more", (long long)array);
    }
    if (written && strides_overlap(layout->ndim, shape, strides))
        return fail(RSD_EINVAL, "strides of destination array %lld map two elements to one address",
                    (long long)array);
    return RSD_OK;
}

rsd_status array_strides(const rsd_layout *layout, int64_t array, const int64_t *given,
                         bool column_major, bool written, int64_t *out)
{
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(layout->dtype);
    if (!given) {
        dense_strides(layout, array, column_major, out);
        return RSD_OK;
    }
    TRY(check_strides(layout, array, given, written));
    for (int32_t d = 0; d < layout->ndim; d++)
        if (!mul_i64(given[d], element_nbytes, &out[d]))
            out[d] = 0; /* the dim has at most one index */
    return RSD_OK;
}
