/* run_arrays.h - the arrays of a run. Private to exec. */
#ifndef RUN_ARRAYS_H
#define RUN_ARRAYS_H

#include "exec.h"

/* The bytes from the first to the last element of an array. */
struct array_span {
    uint64_t nbytes;
    bool dense; /* the array has no gaps */
    bool used;  /* by a run, so that it must not be NULL */
    bool sent;  /* to other ranks; used by exchanges */
};

/* The arrays of an exec, numbered through all of its plans. Initialize with {0}. */
struct run_arrays {
    int64_t nsrc, ndst;
    const char **src; /* of the current run */
    char **dst;
    struct array_span *src_spans, *dst_spans;
    size_t src_capacity, dst_capacity;
    int64_t *order; /* all arrays by address; destination i has the number nsrc + i */
};

/* The span and the address of an array by its number: sources, then destinations. */
static inline const struct array_span *run_arrays_span(const struct run_arrays *arrays,
                                                       int64_t number)
{
    return number < arrays->nsrc ? &arrays->src_spans[number]
                                 : &arrays->dst_spans[number - arrays->nsrc];
}
static inline const char *run_arrays_address(const struct run_arrays *arrays, int64_t number)
{
    return number < arrays->nsrc ? arrays->src[number] : arrays->dst[number - arrays->nsrc];
}

/* The address of the array that a copy or a box reads, which may be a destination. */
static inline const char *run_arrays_source(const struct run_arrays *arrays, int64_t array,
                                            bool from_destination)
{
    return from_destination ? arrays->dst[array] : arrays->src[array];
}

/* Add n arrays of a layout, from number `first` of the layout on. Strides are in bytes, array by array. ELIMIT: a
 * stride is negative, or an extent overflows. */
rsd_status run_arrays_add_src(struct run_arrays *arrays, const rsd_layout *layout, int64_t first,
                              int64_t n, const int64_t *strides);
rsd_status run_arrays_add_dst(struct run_arrays *arrays, const rsd_layout *layout, int64_t first,
                              int64_t n, const int64_t *strides);
/* Completes the list. Requires that all arrays are added. */
rsd_status run_arrays_finish(struct run_arrays *arrays);
void run_arrays_drop(struct run_arrays *arrays);

/* Sets the pointers of a run. A NULL list stands for NULL pointers. Allocates nothing. EINVAL: an array that is used
 * is NULL, or a destination overlaps a source where that is detected without comparing all elements. */
rsd_status run_arrays_set(struct run_arrays *arrays, const void *const *src, void *const *dst);

#endif
