/* run_arrays.h - the arrays of a run. Private to exec. */
#ifndef RUN_ARRAYS_H
#define RUN_ARRAYS_H

#include "exec.h"

/* The bytes from the first to the last element of an array. */
struct array_span {
    uint64_t nbytes;
    bool dense; /* all of them belong to the array */
    bool used;  /* by a run: it must not be NULL */
};

/* Starts as {0}. Arrays are numbered through all plans of an exec. */
struct run_arrays {
    int64_t nsrc, ndst;
    const char **src; /* of the current run */
    char **dst;
    struct array_span *src_spans, *dst_spans;
    size_t src_capacity, dst_capacity;
    int64_t *order; /* by address: destinations come after sources in the numbers used here */
};

/* Adds n arrays of a layout, from number `first` of the layout on; strides in bytes, array by array. ELIMIT: strides
 * that are negative or overflow. */
rsd_status run_arrays_add_src(struct run_arrays *arrays, const rsd_layout *layout, int64_t first,
                              int64_t n, const int64_t *strides);
rsd_status run_arrays_add_dst(struct run_arrays *arrays, const rsd_layout *layout, int64_t first,
                              int64_t n, const int64_t *strides);
/* Requires that all arrays are added. */
rsd_status run_arrays_finish(struct run_arrays *arrays);
void run_arrays_drop(struct run_arrays *arrays);

/* Takes the pointers of a run; a NULL list is one of NULL pointers. Allocates nothing. EINVAL: an array that is used
 * is NULL, or a destination overlaps a source where that is detected without comparing all elements. */
rsd_status run_arrays_set(struct run_arrays *arrays, const void *const *src, void *const *dst);

#endif
