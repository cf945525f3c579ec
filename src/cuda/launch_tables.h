/* launch_tables.h - private to cuda: lists of copies, casts and reductions as tables that kernels read. */
#ifndef LAUNCH_TABLES_H
#define LAUNCH_TABLES_H

#include "driver.h"
#include "memory.h"

/* Where the tables of a launch lie, for kernels, and how many entries and tiles each kernel has. */
struct launch {
    cu_address copies, casts, sums, loops, terms, strides, arrays;
    uint32_t ncopies, ncasts, nsums;
    int64_t copy_tiles, cast_tiles, sum_tiles;
};

/* A whole number of the widest words that kernels read. */
static inline size_t padded_nbytes(size_t nbytes)
{
    return (nbytes + 15) & ~(size_t)15;
}

/* Returns the bytes of the tables of a list. */
size_t launch_tables_nbytes(const struct device_ops *ops);

/* Writes the tables of a list one after the other to `at`, which kernels find at `device_at`. Sets all of *launch but
 * the addresses of arrays. */
void launch_put_tables(const struct device_ops *ops, char *at, cu_address device_at,
                       struct launch *launch);

#endif
