/* run_arrays.h - the arrays of a run. Private to exec.
 *
 * An exec numbers its arrays plan by plan: the sources of a plan, then its destinations. The exec of one process has
 * the arrays of all ranks, an exec between ranks those of its own rank. Everywhere in this module the number of an
 * array is this one; what layouts call an array is converted with plan_array_number.
 */
#ifndef RUN_ARRAYS_H
#define RUN_ARRAYS_H

#include "exec.h"

/* ---- the arrays of one plan ---- */

struct plan_arrays {
    int64_t first_src, nsrc, first_dst, ndst; /* as the layouts number them */
    int64_t number;                           /* of the first source */
    const int64_t *strides;                   /* in bytes, array by array */
    int32_t ndim;
};

/* Returns the arrays of a rank in a plan, or of all ranks with RSD_EVERY_RANK. Their numbers and strides follow those of
 * the previous plan. */
struct plan_arrays plan_arrays_next(const struct plan_arrays *before, const rsd_plan *plan,
                                    int32_t rank);
size_t plan_arrays_nstrides(const struct plan_arrays *arrays);
/* Writes the strides of arrays with these options, all of them. EINVAL, ELIMIT: those of the caller are invalid. */
rsd_status plan_arrays_fill_strides(const struct plan_arrays *arrays, const rsd_plan *plan,
                                    const rsd_bind_options *options, int64_t *strides);

/* The number and the strides of an array, which a layout numbers: that of the sources, or of the destinations. */
static inline int64_t plan_array_number(const struct plan_arrays *arrays, int64_t array,
                                        bool is_dst)
{
    return arrays->number +
           (is_dst ? arrays->nsrc + array - arrays->first_dst : array - arrays->first_src);
}
static inline const int64_t *plan_array_strides(const struct plan_arrays *arrays, int64_t array,
                                                bool is_dst)
{
    return arrays->strides +
           (plan_array_number(arrays, array, is_dst) - arrays->number) * arrays->ndim;
}

/* ---- the arrays of all plans ---- */

/* The bytes from the first to the last element of an array. */
struct array_span {
    uint64_t nbytes;
    int64_t index; /* in the list of sources, or of destinations, that the caller passes */
    bool is_dst;
    bool dense; /* the array has no gaps */
    bool used;  /* by a run, so that it must not be NULL */
    bool sent;  /* to other ranks; used by exchanges */
};

/* Initialize with {0}. */
struct run_arrays {
    int64_t n, nsrc;
    struct array_span *spans;
    size_t capacity;
    char **addresses; /* of the current run; sources are only read */
    int64_t *order;   /* all arrays by address */
};

/* Adds the arrays of the next plan. ELIMIT: a stride is negative, or an extent overflows. */
rsd_status run_arrays_add(struct run_arrays *arrays, const rsd_plan *plan,
                          const struct plan_arrays *added);
/* Completes the list. Requires that all arrays are added. */
rsd_status run_arrays_finish(struct run_arrays *arrays);
void run_arrays_drop(struct run_arrays *arrays);

/* Sets the pointers of a run. A NULL list stands for NULL pointers. Allocates nothing. EINVAL: an array that is used
 * is NULL, or a destination overlaps a source where that is detected without comparing all elements. */
rsd_status run_arrays_set(struct run_arrays *arrays, const void *const *src, void *const *dst);

#endif
