/* ops.h - private to cuda: the tables of copies, casts and reductions. */
#ifndef OPS_H
#define OPS_H

#include "tables.h"

/* The tables of a launch. Entries of a table are in the order of their first tiles. */
struct cuda_ops {
    struct gpu_copy *copies, *casts;
    struct gpu_sum *sums;
    struct gpu_loop *loops;
    struct gpu_term *terms;
    int64_t *strides;
    size_t ncopies, ncasts, nsums, nloops, nterms, nstrides;
    size_t copies_capacity, casts_capacity, sums_capacity, loops_capacity, terms_capacity,
        strides_capacity;
};

#endif
