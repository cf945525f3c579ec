/* ops.c - lists of copies, casts and reductions, as the tables that kernels read. */
#include "ops.h"

rsd_status cuda_ops_new(struct cuda_ops **out)
{
    struct cuda_ops *ops = mem_new(1, sizeof *ops);
    if (!ops)
        return RSD_ENOMEM;
    *out = ops;
    return RSD_OK;
}

void cuda_ops_clear(struct cuda_ops *ops)
{
    ops->ncopies = ops->ncasts = ops->nsums = ops->nloops = ops->nterms = ops->nstrides = 0;
}

bool cuda_ops_is_empty(const struct cuda_ops *ops)
{
    return ops->ncopies + ops->ncasts + ops->nsums == 0;
}

void cuda_ops_free(struct cuda_ops *ops)
{
    if (!ops)
        return;
    mem_free(ops->copies);
    mem_free(ops->casts);
    mem_free(ops->sums);
    mem_free(ops->loops);
    mem_free(ops->terms);
    mem_free(ops->strides);
    mem_free(ops);
}

/* The entries of tables refer to each other by numbers of 32 bits. */
static rsd_status check_counts(const struct cuda_ops *ops)
{
    if (ops->nloops > UINT32_MAX || ops->nterms > UINT32_MAX || ops->nstrides > UINT32_MAX)
        return fail(RSD_ELIMIT, "more than 2^32 loops for a GPU");
    return RSD_OK;
}

static rsd_status add_loops(struct cuda_ops *ops, const struct loop *loops, int32_t n)
{
    TRY(GROW(ops->loops, ops->loops_capacity, ops->nloops + (size_t)n));
    for (int32_t i = 0; i < n; i++)
        ops->loops[ops->nloops++] =
            (struct gpu_loop){loops[i].count, loops[i].src_stride, loops[i].dst_stride};
    return check_counts(ops);
}

/* The widest word that divides all of these, up to 16 bytes. */
static uint32_t common_alignment(const struct cuda_copy *copy)
{
    int64_t bits = copy->src_offset | copy->dst_offset | copy->run | copy->begin | copy->end;
    uint32_t align = 16;
    for (int32_t i = 0; i < copy->nloops; i++)
        bits |= copy->loops[i].src_stride | copy->loops[i].dst_stride;
    while (bits & (align - 1))
        align /= 2;
    return align;
}

/* Returns the entry of a copy, whose loops are added next. */
static struct gpu_copy table_entry(const struct cuda_ops *ops, const struct cuda_copy *copy)
{
    return (struct gpu_copy){.src_offset = copy->src_offset,
                             .dst_offset = copy->dst_offset,
                             .run = copy->run,
                             .begin = copy->begin,
                             .end = copy->end,
                             .src = copy->src,
                             .dst = copy->dst,
                             .first_loop = (gpu_u32)ops->nloops,
                             .nloops = (gpu_u32)copy->nloops};
}

static rsd_status add_cast(struct cuda_ops *ops, const struct cuda_copy *cast)
{
    TRY(GROW(ops->casts, ops->casts_capacity, ops->ncasts + 1));
    struct gpu_copy *entry = &ops->casts[ops->ncasts];
    *entry = table_entry(ops, cast);
    entry->from = (gpu_u32)cast->element.from;
    entry->to = (gpu_u32)cast->element.to;
    TRY(add_loops(ops, cast->loops, cast->nloops));
    ops->ncasts++;
    return RSD_OK;
}

rsd_status cuda_ops_add_copy(struct cuda_ops *ops, const struct cuda_copy *copy)
{
    if (copy->begin == copy->end)
        return RSD_OK;
    if (copy->element.from)
        return add_cast(ops, copy);
    TRY(GROW(ops->copies, ops->copies_capacity, ops->ncopies + 1));
    struct gpu_copy *entry = &ops->copies[ops->ncopies];
    *entry = table_entry(ops, copy);
    entry->align = common_alignment(copy);
    TRY(add_loops(ops, copy->loops, copy->nloops));
    ops->ncopies++;
    return RSD_OK;
}

/* Returns how many neighbours a thread combines at once: several if they are contiguous in the result. */
static uint32_t count_neighbours(const struct cuda_sum *sum)
{
    const struct loop *inner = sum->nloops ? &sum->loops[sum->nloops - 1] : NULL;
    rsd_dtype dtype = sum->reduction.dtype;
    bool contiguous = inner && inner->dst_stride == (int64_t)rsd_dtype_nbytes(sum->reduction.to) &&
                      inner->count % GPU_MAX_PARTS == 0;
    return contiguous && dtype != RSD_C64 && dtype != RSD_C128 ? GPU_MAX_PARTS : 1;
}

rsd_status cuda_ops_add_sum(struct cuda_ops *ops, const struct cuda_sum *sum)
{
    int64_t nelements = 1;
    for (int32_t i = 0; i < sum->nloops; i++)
        nelements *= sum->loops[i].count;
    TRY(GROW(ops->sums, ops->sums_capacity, ops->nsums + 1));
    ops->sums[ops->nsums] = (struct gpu_sum){.dst_offset = sum->dst_offset,
                                             .end = nelements,
                                             .divisor = sum->reduction.divisor,
                                             .dst = sum->dst,
                                             .first_loop = (gpu_u32)ops->nloops,
                                             .nloops = (gpu_u32)sum->nloops,
                                             .first_term = (gpu_u32)ops->nterms,
                                             .nterms = (gpu_u32)sum->reduction.nterms,
                                             .dtype = (gpu_u32)sum->reduction.dtype,
                                             .to = (gpu_u32)sum->reduction.to,
                                             .reduce = (gpu_u32)sum->reduction.reduce,
                                             .neighbours = count_neighbours(sum)};
    TRY(add_loops(ops, sum->loops, sum->nloops));
    ops->nsums++;
    return RSD_OK;
}

rsd_status cuda_ops_add_term(struct cuda_ops *ops, uint32_t src, int64_t offset,
                             const int64_t *strides, int32_t nstrides)
{
    TRY(GROW(ops->terms, ops->terms_capacity, ops->nterms + 1));
    TRY(GROW(ops->strides, ops->strides_capacity, ops->nstrides + (size_t)nstrides));
    ops->terms[ops->nterms++] =
        (struct gpu_term){.offset = offset, .src = src, .first_stride = (gpu_u32)ops->nstrides};
    for (int32_t i = 0; i < nstrides; i++)
        ops->strides[ops->nstrides++] = strides[i];
    struct gpu_sum *sum = &ops->sums[ops->nsums - 1];
    if (nstrides > 0 && strides[nstrides - 1] != (int64_t)rsd_dtype_nbytes((rsd_dtype)sum->dtype))
        sum->neighbours = 1;
    return check_counts(ops);
}
