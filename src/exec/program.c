/* nests.c - a plan compiled into nests of loops over bytes, for arrays with given strides.
 *
 * Two formulas meet in families: along each dim, the meetings with one holder often repeat at a
 * constant distance (a block-cyclic layout is made of them) and then are one progression:
 *
 *     |--len--|       |--len--|       |--len--|        count times, own_step and other_step apart
 *
 * A combination of one progression per dim is one nest: at most two loops per dim, however many
 * pieces it stands for. All other plans are compiled piece by piece.
 */
#include "exec.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists ---- */

static rsd_status add_nest(struct nests *nests, struct nest nest, const struct loops *loops)
{
    TRY(GROW(nests->nests, nests->nests_capacity, nests->nnests + 1));
    nest.first_loop = nests->nloops;
    nest.block = (struct block){.run = loops->run, .nloops = loops->n};
    int64_t nbytes = (int64_t)loops->run;
    TRY(GROW(nests->loops, nests->loops_capacity, nests->nloops + (size_t)loops->n));
    for (int32_t i = 0; i < loops->n; i++) {
        nests->loops[nests->nloops++] = loops->loop[i];
        nbytes *= loops->loop[i].count;
    }
    nests->nests[nests->nnests++] = nest;
    nests->nbytes += nbytes;
    return RSD_OK;
}

/* Runs so long that their bytes should be shared out are cut into rows and a rest. */
static rsd_status add_any_nest(struct nests *nests, struct nest nest, struct loops *loops)
{
    enum { ROW = 1 << 16 };
    if (loops->run < 4 * ROW)
        return add_nest(nests, nest, loops);
    struct loops rest = *loops;
    int64_t nrows = (int64_t)(loops->run / ROW);
    loops->run = ROW;
    loops_add(loops, nrows, ROW, ROW);
    TRY(add_nest(nests, nest, loops));
    rest.run %= ROW;
    if (rest.run == 0)
        return RSD_OK;
    nest.src_offset += nrows * ROW;
    nest.dst_offset += nrows * ROW;
    return add_nest(nests, nest, &rest);
}

void nests_finish(struct nests *nests)
{
    for (size_t i = 0; i < nests->nnests; i++) {
        struct block *block = &nests->nests[i].block;
        *block =
            copy_block_of(block->run, block->nloops, nests->loops + nests->nests[i].first_loop);
    }
}

void nests_drop(struct nests *nests)
{
    mem_free(nests->nests);
    mem_free(nests->sums);
    mem_free(nests->loops);
    mem_free(nests->terms);
    mem_free(nests->strides);
    *nests = (struct nests){0};
}

/* ---- strides ---- */

/* Strides in bytes of all arrays of a layout: narrays * ndim. */
static rsd_status all_strides(const rsd_layout *layout, const int64_t *given, bool column_major,
                              bool written, int64_t **out)
{
    int64_t narrays = rsd_layout_narrays(layout);
    size_t ndim = (size_t)layout->ndim;
    int64_t *strides = mem_new((size_t)narrays * ndim, sizeof *strides);
    rsd_status status = strides ? RSD_OK : RSD_ENOMEM;
    for (int64_t array = 0; array < narrays && !status; array++)
        status = array_strides(layout, array, given ? given + (size_t)array * ndim : NULL,
                               column_major, written, strides + (size_t)array * ndim);
    if (status)
        mem_free(strides);
    else
        *out = strides;
    return status;
}

/* ---- a plan at hand ---- */

struct compiler {
    struct nests *nests;
    const rsd_plan *plan;
    int64_t *src_strides, *dst_strides;
    int64_t first_src, first_dst;
};

static const int64_t *src_strides_of(const struct compiler *c, int64_t array)
{
    return c->src_strides + array * c->plan->src->ndim;
}

static const int64_t *dst_strides_of(const struct compiler *c, int64_t array)
{
    return c->dst_strides + array * c->plan->dst->ndim;
}

/* ---- families ---- */

struct progression {
    int64_t pos;            /* of the giver, as far as this dim decides it */
    int64_t src_at, dst_at; /* of the first */
    int64_t len, count, src_step, dst_step;
};

struct family {
    struct progression *list;
    size_t n, capacity;
};

static int by_position_then_place(const void *a, const void *b)
{
    const struct span_overlap *x = a, *y = b;
    if (x->other_pos != y->other_pos)
        return x->other_pos < y->other_pos ? -1 : 1;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* How many meetings from the first on repeat at its distance to the second. */
static size_t repeats(const struct span_overlap *list, size_t n)
{
    size_t count = 1;
    while (count < n && list[count].other_pos == list[0].other_pos &&
           list[count].len == list[0].len &&
           list[count].own_at - list[count - 1].own_at == list[1].own_at - list[0].own_at &&
           list[count].other_at - list[count - 1].other_at == list[1].other_at - list[0].other_at)
        count++;
    return count;
}

static rsd_status find_progressions(struct span_overlap *list, size_t n, struct family *family)
{
    family->n = 0;
    if (n > 1)
        qsort(list, n, sizeof *list, by_position_then_place);
    for (size_t i = 0; i < n;) {
        size_t count = repeats(list + i, n - i);
        struct progression one = {.pos = list[i].other_pos,
                                  .src_at = list[i].other_at,
                                  .dst_at = list[i].own_at,
                                  .len = list[i].len,
                                  .count = (int64_t)count};
        if (count > 1) {
            one.src_step = list[i + 1].other_at - list[i].other_at;
            one.dst_step = list[i + 1].own_at - list[i].own_at;
        }
        TRY(GROW(family->list, family->capacity, family->n + 1));
        family->list[family->n++] = one;
        i += count;
    }
    return RSD_OK;
}

static rsd_status add_combination(const struct compiler *c, const struct receiver *receiver,
                                  const struct family *families, const size_t *at)
{
    const rsd_plan *plan = c->plan;
    int32_t ndim = plan->src->ndim;
    int64_t position = receiver->sender_offset;
    for (int32_t d = 0; d < ndim; d++) {
        assert(families[d].list);
        position += families[d].list[at[d]].pos;
    }
    int64_t src = mesh_array_at(plan->src->mesh, position);
    const int64_t *src_strides = src_strides_of(c, src);
    const int64_t *dst_strides = dst_strides_of(c, receiver->array);
    struct nest nest = {.src = c->first_src + src, .dst = c->first_dst + receiver->array};
    struct loops loops = {0};
    for (int32_t d = 0; d < ndim; d++) {
        const struct progression *one = &families[d].list[at[d]];
        nest.src_offset += one->src_at * src_strides[d];
        nest.dst_offset += one->dst_at * dst_strides[d];
        loops_add(&loops, one->len, src_strides[d], dst_strides[d]);
        loops_add(&loops, one->count, one->src_step * src_strides[d],
                  one->dst_step * dst_strides[d]);
    }
    loops_finish(&loops, rsd_dtype_nbytes(plan->src->dtype));
    return add_any_nest(c->nests, nest, &loops);
}

static rsd_status add_array(const struct compiler *c, int64_t array, struct overlap *overlap,
                            struct family *families)
{
    const rsd_plan *plan = c->plan;
    int32_t ndim = plan->src->ndim, d = 0;
    size_t at[RSD_MAX_DIMS] = {0};
    struct receiver receiver = plan_receiver(plan, array);
    TRY(overlap_start(overlap, plan->dst, array, NULL, NULL, plan->src, NULL));
    if (overlap->exhausted)
        return RSD_OK;
    for (d = 0; d < ndim; d++)
        TRY(find_progressions(overlap->dims[d].list, overlap->dims[d].n, &families[d]));
    do {
        TRY(add_combination(c, &receiver, families, at));
        for (d = ndim - 1; d >= 0 && ++at[d] == families[d].n; d--)
            at[d] = 0;
    } while (d >= 0);
    return RSD_OK;
}

static rsd_status add_families(const struct compiler *c)
{
    struct overlap overlap = {0};
    struct family families[RSD_MAX_DIMS] = {{0}};
    rsd_status status = RSD_OK;
    int64_t narrays = rsd_layout_narrays(c->plan->dst);
    for (int64_t array = 0; array < narrays && !status; array++)
        status = add_array(c, array, &overlap, families);
    overlap_drop(&overlap);
    for (int32_t d = 0; d < RSD_MAX_DIMS; d++)
        mem_free(families[d].list);
    return status;
}

/* ---- piece by piece ---- */

static int64_t offset_of(int32_t ndim, const int64_t *at, const int64_t *strides)
{
    int64_t offset = 0;
    for (int32_t d = 0; d < ndim; d++)
        offset += at[d] * strides[d];
    return offset;
}

rsd_status nests_add_piece(struct nests *nests, const rsd_piece *piece, size_t element_nbytes,
                           const int64_t *from_strides, const int64_t *to_strides, int64_t src,
                           int64_t dst)
{
    int32_t ndim = piece->box.ndim;
    struct nest nest = {.src = src,
                        .dst = dst,
                        .src_offset = offset_of(ndim, piece->from_at, from_strides),
                        .dst_offset = offset_of(ndim, piece->to_at, to_strides),
                        .stage = piece->stage,
                        .peer = piece->from,
                        .from_destination = piece->from_destination != 0};
    struct loops loops = {0};
    for (int32_t d = 0; d < ndim; d++)
        loops_add(&loops, piece->box.len[d], from_strides[d], to_strides[d]);
    loops_finish(&loops, element_nbytes);
    return add_any_nest(nests, nest, &loops);
}

static rsd_status add_copy(const struct compiler *c, const rsd_piece *piece)
{
    const int64_t *from = piece->from_destination ? dst_strides_of(c, piece->from_array)
                                                  : src_strides_of(c, piece->from_array);
    return nests_add_piece(c->nests, piece, rsd_dtype_nbytes(c->plan->src->dtype), from,
                           dst_strides_of(c, piece->to_array),
                           (piece->from_destination ? c->first_dst : c->first_src) +
                               piece->from_array,
                           c->first_dst + piece->to_array);
}

/* Begins a sum: the loops of its destination, innermost last, without those of one element. */
static rsd_status start_sum(const struct compiler *c, const rsd_piece *piece)
{
    struct nests *nests = c->nests;
    const rsd_plan *plan = c->plan;
    const int64_t *to = dst_strides_of(c, piece->to_array);
    struct sum sum = {
        .dst = c->first_dst + piece->to_array,
        .dst_offset = offset_of(plan->dst->ndim, piece->to_at, to),
        .first_loop = (int64_t)nests->nloops,
        .first_term = (int64_t)nests->nterms,
        .reduction = {plan->src->dtype, plan->reduce, plan->divisor, plan->reduced.total}};
    TRY(GROW(nests->loops, nests->loops_capacity, nests->nloops + RSD_MAX_DIMS));
    for (int32_t d = 0; d < plan->dst->ndim; d++)
        if (piece->box.len[d] > 1) {
            nests->loops[nests->nloops++] =
                (struct loop){.count = piece->box.len[d], .dst_stride = to[d]};
            sum.nloops++;
        }
    TRY(GROW(nests->sums, nests->sums_capacity, nests->nsums + 1));
    nests->sums[nests->nsums++] = sum;
    nests->nbytes += piece->nbytes;
    return RSD_OK;
}

static rsd_status add_term(const struct compiler *c, const rsd_piece *piece)
{
    struct nests *nests = c->nests;
    int32_t ndim = c->plan->src->ndim;
    const int64_t *from = src_strides_of(c, piece->from_array);
    struct term term = {.src = c->first_src + piece->from_array,
                        .offset = offset_of(ndim, piece->from_at, from),
                        .first_stride = (int64_t)nests->nstrides};
    TRY(GROW(nests->terms, nests->terms_capacity, nests->nterms + 1));
    TRY(GROW(nests->strides, nests->strides_capacity, nests->nstrides + (size_t)ndim));
    for (int32_t d = 0; d < ndim; d++)
        if (piece->box.len[d] > 1)
            nests->strides[nests->nstrides++] = from[d];
    nests->terms[nests->nterms++] = term;
    return RSD_OK;
}

/* A batch goes along the innermost loop: if that is short, a longer one takes its place. */
static void put_longest_inside(struct nests *nests, struct sum *sum)
{
    struct loop *loops = nests->loops + sum->first_loop, *last = loops + sum->nloops - 1;
    int32_t longest = sum->nloops - 1;
    if (sum->nloops < 2 || last->count >= 32)
        return;
    for (int32_t i = 0; i < sum->nloops; i++)
        if (loops[i].count > loops[longest].count)
            longest = i;
    struct loop swapped = *last;
    *last = loops[longest];
    loops[longest] = swapped;
    for (int64_t t = 0; t < sum->reduction.nterms; t++) {
        int64_t *strides = nests->strides + nests->terms[sum->first_term + t].first_stride;
        int64_t stride = strides[sum->nloops - 1];
        strides[sum->nloops - 1] = strides[longest];
        strides[longest] = stride;
    }
}

/* Joins the loops of a finished sum where every array just goes on, from the innermost out. */
static void merge_sum(struct nests *nests)
{
    struct sum *sum = &nests->sums[nests->nsums - 1];
    struct loop *loops = nests->loops + sum->first_loop;
    struct term *terms = nests->terms + sum->first_term;
    int32_t n = sum->nloops;
    for (int32_t i = n - 2; i >= 0; i--) {
        int64_t inner = loops[i + 1].count;
        bool joins = loops[i].dst_stride == inner * loops[i + 1].dst_stride;
        for (int64_t t = 0; t < sum->reduction.nterms && joins; t++) {
            const int64_t *strides = nests->strides + terms[t].first_stride;
            joins = strides[i] == inner * strides[i + 1];
        }
        if (!joins)
            continue;
        loops[i + 1].count *= loops[i].count;
        memmove(loops + i, loops + i + 1, (size_t)(n - i - 1) * sizeof *loops);
        for (int64_t t = 0; t < sum->reduction.nterms; t++) {
            int64_t *strides = nests->strides + terms[t].first_stride;
            memmove(strides + i, strides + i + 1, (size_t)(n - i - 1) * sizeof *strides);
        }
        n--;
    }
    sum->nloops = n;
    put_longest_inside(nests, sum);
}

static rsd_status add_pieces(const struct compiler *c)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    int64_t missing = 0; /* terms of the sum at hand */
    TRY(rsd_plan_walk(c->plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        if (!piece->reduce) {
            status = add_copy(c, piece);
        } else {
            if (missing == 0) {
                status = start_sum(c, piece);
                missing = c->plan->reduced.total;
            }
            if (!status)
                status = add_term(c, piece);
            if (!status && --missing == 0)
                merge_sum(c->nests);
        }
        if (status)
            break;
    }
    rsd_cursor_free(cursor);
    return status;
}

rsd_status nests_add(struct nests *nests, const rsd_plan *plan, const rsd_bind_options *given,
                     int64_t first_src, int64_t first_dst)
{
    struct compiler c = {
        .nests = nests, .plan = plan, .first_src = first_src, .first_dst = first_dst};
    rsd_bind_options options;
    TRY(options_copy("rsd_bind_options", given, &options, sizeof options));
    if ((options.src_strides && options.src_column_major) ||
        (options.dst_strides && options.dst_column_major))
        return fail(RSD_EINVAL, "both strides and column_major say how arrays lie");
    rsd_status status = all_strides(plan->src, options.src_strides, options.src_column_major != 0,
                                    false, &c.src_strides);
    if (!status)
        status = all_strides(plan->dst, options.dst_strides, options.dst_column_major != 0, true,
                             &c.dst_strides);
    if (!status)
        status = plan_is_direct(plan) ? add_families(&c) : add_pieces(&c);
    mem_free(c.src_strides);
    mem_free(c.dst_strides);
    return status;
}
