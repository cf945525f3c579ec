/* device_ops.c - lists of copies, casts and reductions that a device does in one launch. */
#include "memory.h"

void device_ops_clear(struct device_ops *ops)
{
    ops->ncopies = ops->nsums = ops->nloops = ops->nterms = ops->nstrides = 0;
}

void device_ops_drop(struct device_ops *ops)
{
    mem_free(ops->copies);
    mem_free(ops->sums);
    mem_free(ops->loops);
    mem_free(ops->terms);
    mem_free(ops->strides);
    *ops = (struct device_ops){0};
}

/* The entries of lists refer to each other by numbers of 32 bits. */
static rsd_status check_counts(const struct device_ops *ops)
{
    if (ops->nloops > UINT32_MAX || ops->nterms > UINT32_MAX || ops->nstrides > UINT32_MAX)
        return fail(RSD_ELIMIT, "more than 2^32 loops for a device");
    return RSD_OK;
}

static rsd_status add_loops(struct device_ops *ops, const struct loop *loops, uint32_t n)
{
    TRY(GROW(ops->loops, ops->loops_capacity, ops->nloops + n));
    if (n)
        memcpy(ops->loops + ops->nloops, loops, n * sizeof *loops);
    ops->nloops += n;
    return check_counts(ops);
}

rsd_status device_ops_add_copy(struct device_ops *ops, const struct device_copy *copy,
                               const struct loop *loops)
{
    if (copy->begin == copy->end)
        return RSD_OK;
    TRY(GROW(ops->copies, ops->copies_capacity, ops->ncopies + 1));
    ops->copies[ops->ncopies] = *copy;
    ops->copies[ops->ncopies].first_loop = (uint32_t)ops->nloops;
    TRY(add_loops(ops, loops, copy->nloops));
    ops->ncopies++;
    return RSD_OK;
}

rsd_status device_ops_add_sum(struct device_ops *ops, const struct device_sum *sum,
                              const struct loop *loops)
{
    TRY(GROW(ops->sums, ops->sums_capacity, ops->nsums + 1));
    ops->sums[ops->nsums] = *sum;
    ops->sums[ops->nsums].first_loop = (uint32_t)ops->nloops;
    ops->sums[ops->nsums].first_term = (uint32_t)ops->nterms;
    TRY(add_loops(ops, loops, sum->nloops));
    ops->nsums++;
    return RSD_OK;
}

rsd_status device_ops_add_term(struct device_ops *ops, uint32_t src, int64_t offset,
                               const int64_t *strides)
{
    size_t nstrides = ops->sums[ops->nsums - 1].nloops;
    TRY(GROW(ops->terms, ops->terms_capacity, ops->nterms + 1));
    TRY(GROW(ops->strides, ops->strides_capacity, ops->nstrides + nstrides));
    ops->terms[ops->nterms++] =
        (struct device_term){.offset = offset, .src = src, .first_stride = (uint32_t)ops->nstrides};
    for (size_t i = 0; i < nstrides; i++)
        ops->strides[ops->nstrides++] = strides[i];
    return check_counts(ops);
}
