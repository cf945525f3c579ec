/* launch_tables.c - lists of copies, casts and reductions as tables that kernels read.
 *
 *     | copies | casts | sums | loops | terms | strides |
 *
 * Kernels find the entry of a tile by its number: entries are in the order of their first tiles.
 */
#include "launch_tables.h"
#include "tables.h"

#include <assert.h>

/* These have the same bytes in a list and in a table. */
static_assert(sizeof(struct loop) == sizeof(struct gpu_loop) &&
                  offsetof(struct loop, src_stride) == offsetof(struct gpu_loop, src_stride) &&
                  offsetof(struct loop, dst_stride) == offsetof(struct gpu_loop, dst_stride),
              "a loop");
static_assert(sizeof(struct device_term) == sizeof(struct gpu_term) &&
                  offsetof(struct device_term, src) == offsetof(struct gpu_term, src) &&
                  offsetof(struct device_term, first_stride) ==
                      offsetof(struct gpu_term, first_stride),
              "a term");

static bool is_cast(const struct device_copy *copy)
{
    return copy->element.from != 0;
}

static size_t count_casts(const struct device_ops *ops)
{
    size_t n = 0;
    for (size_t i = 0; i < ops->ncopies; i++)
        n += is_cast(&ops->copies[i]);
    return n;
}

/* The widest word that divides all numbers of a copy, up to 16 bytes. */
static uint32_t common_alignment(const struct device_copy *copy, const struct loop *loops)
{
    int64_t bits = copy->src_offset | copy->dst_offset | copy->run | copy->begin | copy->end;
    uint32_t align = 16;
    for (uint32_t i = 0; i < copy->nloops; i++)
        bits |= loops[i].src_stride | loops[i].dst_stride;
    while (bits & (align - 1))
        align /= 2;
    return align;
}

/* Writes the entries of copies, or of casts, and returns the number of their tiles. */
static int64_t put_copies(const struct device_ops *ops, bool casts, struct gpu_copy *entry)
{
    int64_t next = 0;
    for (size_t i = 0; i < ops->ncopies; i++) {
        const struct device_copy *copy = &ops->copies[i];
        if (is_cast(copy) != casts)
            continue;
        *entry = (struct gpu_copy){
            .first_tile = next,
            .src_offset = copy->src_offset,
            .dst_offset = copy->dst_offset,
            .run = copy->run,
            .begin = copy->begin,
            .end = copy->end,
            .src = copy->src,
            .dst = copy->dst,
            .first_loop = copy->first_loop,
            .nloops = copy->nloops,
            .align = casts ? 0 : common_alignment(copy, ops->loops + copy->first_loop),
            .from = (gpu_u32)copy->element.from,
            .to = (gpu_u32)copy->element.to};
        next += gpu_copy_ntiles(entry++);
    }
    return next;
}

/* Returns how many neighbours a thread combines at once: several if they are contiguous in the result and in all
 * terms. */
static uint32_t count_neighbours(const struct device_ops *ops, const struct device_sum *sum)
{
    rsd_dtype dtype = sum->reduction.dtype;
    if (sum->nloops == 0 || dtype == RSD_C64 || dtype == RSD_C128)
        return 1;
    const struct loop *inner = &ops->loops[sum->first_loop + sum->nloops - 1];
    if (inner->dst_stride != (int64_t)rsd_dtype_nbytes(sum->reduction.to) ||
        inner->count % GPU_MAX_PARTS != 0)
        return 1;
    for (int64_t i = 0; i < sum->reduction.nterms; i++) {
        const struct device_term *term = &ops->terms[sum->first_term + i];
        if (ops->strides[term->first_stride + sum->nloops - 1] != (int64_t)rsd_dtype_nbytes(dtype))
            return 1;
    }
    return GPU_MAX_PARTS;
}

/* Writes the entries of sums, and returns the number of their tiles. */
static int64_t put_sums(const struct device_ops *ops, struct gpu_sum *entries)
{
    int64_t next = 0;
    for (size_t i = 0; i < ops->nsums; i++) {
        const struct device_sum *sum = &ops->sums[i];
        int64_t nelements = 1;
        for (uint32_t k = 0; k < sum->nloops; k++)
            nelements *= ops->loops[sum->first_loop + k].count;
        entries[i] = (struct gpu_sum){.first_tile = next,
                                      .dst_offset = sum->dst_offset,
                                      .end = nelements,
                                      .divisor = sum->reduction.divisor,
                                      .dst = sum->dst,
                                      .first_loop = sum->first_loop,
                                      .nloops = sum->nloops,
                                      .first_term = sum->first_term,
                                      .nterms = (gpu_u32)sum->reduction.nterms,
                                      .dtype = (gpu_u32)sum->reduction.dtype,
                                      .to = (gpu_u32)sum->reduction.to,
                                      .reduce = (gpu_u32)sum->reduction.reduce,
                                      .neighbours = count_neighbours(ops, sum)};
        next += ceil_div(nelements, GPU_SUM_TILE);
    }
    return next;
}

/* The offsets of the tables, in their order, and of their end. */
struct table_offsets {
    size_t casts, sums, loops, terms, strides, end;
};

static struct table_offsets offsets_of_tables(const struct device_ops *ops)
{
    struct table_offsets at;
    size_t ncasts = count_casts(ops);
    at.casts = padded_nbytes((ops->ncopies - ncasts) * sizeof(struct gpu_copy));
    at.sums = at.casts + padded_nbytes(ncasts * sizeof(struct gpu_copy));
    at.loops = at.sums + padded_nbytes(ops->nsums * sizeof(struct gpu_sum));
    at.terms = at.loops + padded_nbytes(ops->nloops * sizeof(struct gpu_loop));
    at.strides = at.terms + padded_nbytes(ops->nterms * sizeof(struct gpu_term));
    at.end = at.strides + padded_nbytes(ops->nstrides * sizeof *ops->strides);
    return at;
}

size_t launch_tables_nbytes(const struct device_ops *ops)
{
    return offsets_of_tables(ops).end;
}

static void put_list(char *at, const void *list, size_t nbytes)
{
    if (nbytes)
        memcpy(at, list, nbytes);
}

void launch_put_tables(const struct device_ops *ops, char *at, cu_address device_at,
                       struct launch *launch)
{
    struct table_offsets offsets = offsets_of_tables(ops);
    size_t ncasts = count_casts(ops);
    *launch = (struct launch){.copies = device_at,
                              .casts = device_at + offsets.casts,
                              .sums = device_at + offsets.sums,
                              .loops = device_at + offsets.loops,
                              .terms = device_at + offsets.terms,
                              .strides = device_at + offsets.strides,
                              .ncopies = (uint32_t)(ops->ncopies - ncasts),
                              .ncasts = (uint32_t)ncasts,
                              .nsums = (uint32_t)ops->nsums};
    launch->copy_tiles = put_copies(ops, false, (void *)at);
    launch->cast_tiles = put_copies(ops, true, (void *)(at + offsets.casts));
    launch->sum_tiles = put_sums(ops, (void *)(at + offsets.sums));
    put_list(at + offsets.loops, ops->loops, ops->nloops * sizeof *ops->loops);
    put_list(at + offsets.terms, ops->terms, ops->nterms * sizeof *ops->terms);
    put_list(at + offsets.strides, ops->strides, ops->nstrides * sizeof *ops->strides);
}
