/* exchange_bind.c - what one rank gives and gets, compiled for its own arrays.
 *
 * A message between two ranks is their pieces of one stage, packed one after the other, each row by row in
 * the order of its box. Both sides walk the plan in the same order, so nothing but bytes has to be sent.
 */
#include "exec.h"

#include <stdlib.h>
#include <string.h>

/* One plan while it is compiled. */
struct compiling {
    struct exchange *x;
    const rsd_plan *plan;
    int32_t rank;
    int32_t number; /* of the plan */
    /* our arrays: in the layout's numbers, and how many; and in the exchange's numbers */
    int64_t first_src, nsrc, first_dst, ndst;
    int64_t src_base, dst_base;
    const int64_t *src_strides, *dst_strides;
};

/* ---- ops ---- */

/* Rows in the order of the box, or of its columns; dims that are packed in the array too become part of the
 * run. */
static rsd_status make_loops(struct exchange *x, struct op *op, int32_t ndim, const int64_t *len,
                             const int64_t *strides, size_t element_nbytes)
{
    int64_t packed = (int64_t)element_nbytes;
    struct loop list[RSD_MAX_DIMS];
    int32_t n = 0;
    op->run = element_nbytes;
    for (int32_t i = 0; i < ndim; i++) { /* innermost first */
        int32_t d = x->columns ? i : ndim - 1 - i;
        bool joins = n == 0 && strides[d] == (int64_t)op->run;
        if (len[d] == 1)
            continue;
        if (joins)
            op->run *= (size_t)len[d];
        else if (n > 0 && strides[d] == list[n - 1].count * list[n - 1].dst_stride)
            list[n - 1].count *= len[d];
        else
            list[n++] = (struct loop){len[d], packed, strides[d]};
        packed *= len[d];
    }
    TRY(GROW(x->loops, x->loops_capacity, x->nloops + (size_t)n));
    op->first_loop = x->nloops;
    op->nloops = n;
    op->nrows = 1;
    for (int32_t i = n - 1; i >= 0; i--) {
        x->loops[x->nloops++] = list[i];
        op->nrows *= list[i].count;
    }
    op->nbytes = (uint64_t)op->nrows * op->run;
    return RSD_OK;
}

static rsd_status make_op(struct compiling *c, const rsd_piece *piece, bool giving, struct op *op)
{
    const rsd_layout *layout = giving && !piece->from_destination ? c->plan->src : c->plan->dst;
    bool in_dst = !giving || piece->from_destination;
    int64_t number = giving ? piece->from_array : piece->to_array;
    int64_t own = number - (in_dst ? c->first_dst : c->first_src);
    const int64_t *at = giving ? piece->from_at : piece->to_at;
    const int64_t *strides = (in_dst ? c->dst_strides : c->src_strides) + own * layout->ndim;
    *op = (struct op){.array = own + (in_dst ? c->dst_base : c->src_base),
                      .plan = c->number,
                      .from_destination = giving && piece->from_destination};
    for (int32_t d = 0; d < layout->ndim; d++)
        op->offset += at[d] * strides[d];
    return make_loops(c->x, op, layout->ndim, piece->box.len, strides,
                      rsd_dtype_nbytes(layout->dtype));
}

/* Moves bytes [at, at + n) of the packed rows: part of a row, whole rows, part of a row. */
static void move_rows(const struct exchange *x, const struct op *op, uint64_t at, size_t n,
                      char *array, char *packed, bool out)
{
    const struct loop *loops = x->loops + op->first_loop;
    while (n > 0) {
        int64_t row = (int64_t)(at / op->run), rest = row, offset = 0;
        size_t skip = (size_t)(at % op->run), some = op->run - skip;
        if (skip == 0 && n >= op->run) { /* whole rows, as many as there are */
            int64_t nrows = (int64_t)(n / op->run);
            struct loop nest[RSD_MAX_DIMS];
            for (int32_t i = 0; i < op->nloops; i++)
                nest[i] =
                    out ? (struct loop){loops[i].count, loops[i].dst_stride, loops[i].src_stride}
                        : loops[i];
            struct block block = copy_block_of(op->run, op->nloops, nest);
            block.across = -1; /* rows in order: a part of them is asked for */
            char *base = packed - (uint64_t)row * op->run;
            copy_block(&x->copier, x->stream && !out, &block, out ? array : base,
                       out ? base : array, row, nrows);
            some = (size_t)nrows * op->run;
        } else {
            some = some < n ? some : n;
            for (int32_t i = op->nloops; i-- > 0;) {
                offset += rest % loops[i].count * loops[i].dst_stride;
                rest /= loops[i].count;
            }
            char *place = array + offset + skip;
            memcpy(out ? packed : place, out ? place : packed, some);
        }
        packed += some;
        at += some;
        n -= some;
    }
}

void op_pack(const struct exchange *x, const struct op *op, const char *base, uint64_t at, size_t n,
             char *out)
{
    move_rows(x, op, at, n, without_const(base + op->offset), out, true);
}

void op_unpack(const struct exchange *x, const struct op *op, uint64_t at, size_t n, const char *in)
{
    move_rows(x, op, at, n, x->dst[op->array] + op->offset, without_const(in), false);
}

/* ---- pieces ---- */

/* A piece with its op, before it is sorted into parcels. */
struct sorted {
    struct op op;
    int32_t peer, stage;
    bool reduce;
    size_t order;
};

struct sorting {
    struct sorted *list;
    size_t n, capacity;
};

static int by_parcel(const void *a, const void *b)
{
    const struct sorted *x = a, *y = b;
    if (x->stage != y->stage)
        return x->stage < y->stage ? -1 : 1;
    if (x->peer != y->peer)
        return x->peer < y->peer ? -1 : 1;
    if (x->reduce != y->reduce)
        return x->reduce ? 1 : -1;
    return (x->order > y->order) - (x->order < y->order);
}

static rsd_status make_parcels(struct exchange *x, struct sorting *sorting, struct parcel **parcels,
                               size_t *nparcels, size_t *capacity)
{
    if (sorting->n > 1)
        qsort(sorting->list, sorting->n, sizeof *sorting->list, by_parcel);
    for (size_t i = 0; i < sorting->n; i++) {
        const struct sorted *one = &sorting->list[i];
        const struct sorted *before = i ? one - 1 : NULL;
        if (!before || before->stage != one->stage || before->peer != one->peer ||
            before->reduce != one->reduce) {
            TRY(GROW(*parcels, *capacity, *nparcels + 1));
            (*parcels)[(*nparcels)++] = (struct parcel){
                .peer = one->peer, .stage = one->stage, .reduce = one->reduce, .first_op = x->nops};
        }
        struct parcel *parcel = &(*parcels)[*nparcels - 1];
        TRY(GROW(x->ops, x->ops_capacity, x->nops + 1));
        x->ops[x->nops++] = one->op;
        parcel->nops++;
        parcel->nbytes += one->op.nbytes;
    }
    return RSD_OK;
}

static rsd_status sort_in(struct sorting *sorting, const struct op *op, int32_t peer,
                          const rsd_piece *piece)
{
    TRY(GROW(sorting->list, sorting->capacity, sorting->n + 1));
    sorting->list[sorting->n] = (struct sorted){.op = *op,
                                                .peer = peer,
                                                .stage = piece->stage,
                                                .reduce = piece->reduce,
                                                .order = sorting->n};
    sorting->n++;
    return RSD_OK;
}

/* The terms of one box come one after the other. */
static rsd_status add_term(struct compiling *c, const rsd_piece *piece)
{
    struct exchange *x = c->x;
    struct op to;
    TRY(make_op(c, piece, false, &to));
    struct gathered_sum *last = x->nsums ? &x->sums[x->nsums - 1] : NULL;
    if (!last || last->nterms == (size_t)last->reduction.nterms) {
        TRY(GROW(x->sums, x->sums_capacity, x->nsums + 1));
        last = &x->sums[x->nsums++];
        *last = (struct gathered_sum){.reduction = {.dtype = c->plan->src->dtype,
                                                    .reduce = c->plan->reduce,
                                                    .divisor = c->plan->divisor,
                                                    .nterms = c->plan->reduced.total},
                                      .to = to,
                                      .first_term = x->nterms};
    }
    struct gathered_term term = {.peer = piece->from};
    if (piece->from == c->rank)
        TRY(make_op(c, piece, true, &term.op));
    TRY(GROW(x->terms, x->terms_capacity, x->nterms + 1));
    x->terms[x->nterms++] = term;
    last->nterms++;
    return RSD_OK;
}

static rsd_status add_kept(struct compiling *c, const rsd_piece *piece)
{
    int32_t ndim = c->plan->dst->ndim;
    int64_t from = piece->from_array - (piece->from_destination ? c->first_dst : c->first_src);
    int64_t to = piece->to_array - c->first_dst;
    return nests_add_piece(
        &c->x->nests, piece, rsd_dtype_nbytes(c->plan->src->dtype),
        (piece->from_destination ? c->dst_strides : c->src_strides) + from * ndim,
        c->dst_strides + to * ndim, from + (piece->from_destination ? c->dst_base : c->src_base),
        to + c->dst_base);
}

static rsd_status take_piece(struct compiling *c, const rsd_piece *piece, rsd_side side,
                             struct sorting *sorting)
{
    struct op op;
    bool own = piece->from == piece->to;
    if (piece->stage + 1 > c->x->nstages)
        c->x->nstages = piece->stage + 1;
    if (side == RSD_RECEIVES && piece->reduce)
        TRY(add_term(c, piece));
    if (own)
        return side == RSD_RECEIVES && !piece->reduce ? add_kept(c, piece) : RSD_OK;
    TRY(make_op(c, piece, side == RSD_SENDS, &op));
    return sort_in(sorting, &op, side == RSD_SENDS ? piece->to : piece->from, piece);
}

static rsd_status walk_side(struct compiling *c, rsd_side side, struct sorting *sorting)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    rsd_status status = rsd_plan_walk(c->plan, c->rank, side, &cursor);
    if (status)
        return status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece)
        if ((status = take_piece(c, piece, side, sorting)))
            break;
    rsd_cursor_free(cursor);
    return status;
}

/* ---- plans ---- */

/* Those of all our arrays of a layout, at the end of the list. */
static rsd_status add_strides(struct exchange *x, const rsd_layout *layout, int64_t first,
                              int64_t n, const int64_t *given, bool column_major, bool written)
{
    size_t ndim = (size_t)layout->ndim;
    TRY(GROW(x->strides, x->strides_capacity, x->nstrides + (size_t)n * ndim));
    for (int64_t i = 0; i < n; i++) {
        TRY(array_strides(layout, first + i, given ? given + (size_t)i * ndim : NULL, column_major,
                          written, x->strides + x->nstrides));
        x->nstrides += ndim;
    }
    return RSD_OK;
}

static rsd_status compile_plan(struct exchange *x, int32_t number, const rsd_plan *plan,
                               const rsd_bind_options *bind, struct sorting *sends,
                               struct sorting *receives)
{
    struct compiling c = {.x = x,
                          .plan = plan,
                          .number = number,
                          .rank = x->transport.rank,
                          .src_base = x->nsrc,
                          .dst_base = x->ndst};
    rsd_bind_options how;
    size_t first = x->nstrides;
    TRY(options_copy("rsd_bind_options", bind, &how, sizeof how));
    rsd_layout_arrays_of(plan->src, c.rank, &c.first_src, &c.nsrc);
    rsd_layout_arrays_of(plan->dst, c.rank, &c.first_dst, &c.ndst);
    TRY(add_strides(x, plan->src, c.first_src, c.nsrc, how.src_strides, how.src_column_major != 0,
                    false));
    TRY(add_strides(x, plan->dst, c.first_dst, c.ndst, how.dst_strides, how.dst_column_major != 0,
                    true));
    c.src_strides = x->strides + first;
    c.dst_strides = c.src_strides + c.nsrc * plan->src->ndim;
    TRY(walk_side(&c, RSD_SENDS, sends));
    TRY(walk_side(&c, RSD_RECEIVES, receives));
    x->nsrc += c.nsrc;
    x->ndst += c.ndst;
    return RSD_OK;
}

/* Whether all of a layout's arrays here run along their first dim. */
static bool runs_along_columns(const rsd_layout *layout, int32_t rank, const int64_t *strides)
{
    int64_t first, n;
    int32_t ndim = layout->ndim;
    rsd_layout_arrays_of(layout, rank, &first, &n);
    for (int64_t i = 0; i < n && ndim > 1; i++, strides += ndim) {
        int64_t shape[RSD_MAX_DIMS];
        layout_array_shape(layout, first + i, shape);
        if (box_volume(ndim, shape) > 0 && strides[0] > strides[ndim - 1])
            return false;
    }
    return true;
}

bool prefers_columns(int64_t nplans, const rsd_plan *const *plans, const rsd_bind_options *bind,
                     int32_t rank)
{
    const char *given = (const char *)bind;
    for (int64_t i = 0; i < nplans; i++, given += bind->struct_nbytes) {
        rsd_bind_options how;
        if (!bind || options_copy("rsd_bind_options", given, &how, sizeof how))
            return false;
        if (how.src_strides ? !runs_along_columns(plans[i]->src, rank, how.src_strides)
                            : !how.src_column_major)
            return false;
        if (how.dst_strides ? !runs_along_columns(plans[i]->dst, rank, how.dst_strides)
                            : !how.dst_column_major)
            return false;
    }
    return nplans > 0;
}

rsd_status exchange_compile(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                            const rsd_bind_options *bind)
{
    struct sorting sends = {0}, receives = {0};
    const char *given = (const char *)bind;
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < nplans && !status; i++) {
        int64_t world = max_i64(rsd_layout_world(plans[i]->src), rsd_layout_world(plans[i]->dst));
        if (world > x->transport.nranks)
            status = fail(RSD_EMISMATCH, "layouts name rank %lld, and there are %d ranks",
                          (long long)world - 1, (int)x->transport.nranks);
        else
            status = compile_plan(x, (int32_t)i, plans[i], (const void *)given, &sends, &receives);
        if (status && nplans > 1)
            status = fail_in(status, "plan %lld: ", (long long)i);
        if (given)
            given += bind->struct_nbytes;
    }
    if (!status)
        status = make_parcels(x, &sends, &x->sends, &x->nsends, &x->sends_capacity);
    if (!status)
        status = make_parcels(x, &receives, &x->receives, &x->nreceives, &x->receives_capacity);
    mem_free(sends.list);
    mem_free(receives.list);
    return status;
}

/* ---- straight from neighbours ---- */

/* The piece as the neighbour has it: its array, in its numbers, and that array's strides. */
static const int64_t *strides_there(const struct compiling *c, const struct neighbour *near,
                                    const rsd_piece *piece, int64_t *array)
{
    int64_t first_src, nsrc, first_dst, ndst;
    rsd_layout_arrays_of(c->plan->src, near->rank, &first_src, &nsrc);
    rsd_layout_arrays_of(c->plan->dst, near->rank, &first_dst, &ndst);
    const int64_t *strides = near->strides + near->next_stride;
    int64_t own = piece->from_array - (piece->from_destination ? first_dst : first_src);
    *array = own + (piece->from_destination ? near->dst_base : near->src_base);
    return strides + (own + (piece->from_destination ? nsrc : 0)) * c->plan->src->ndim;
}

static rsd_status take_near_piece(struct compiling *c, const struct neighbour *near,
                                  const rsd_piece *piece, struct gathered_term *term)
{
    struct exchange *x = c->x;
    size_t element_nbytes = rsd_dtype_nbytes(c->plan->src->dtype);
    int32_t ndim = c->plan->src->ndim;
    int64_t array;
    const int64_t *there = strides_there(c, near, piece, &array);
    if (!term)
        return nests_add_piece(&x->nests, piece, element_nbytes, there,
                               c->dst_strides + (piece->to_array - c->first_dst) * ndim, array,
                               piece->to_array - c->first_dst + c->dst_base);
    term->op = (struct op){
        .array = array, .plan = c->number, .from_destination = piece->from_destination != 0};
    for (int32_t d = 0; d < ndim; d++)
        term->op.offset += piece->from_at[d] * there[d];
    return make_loops(x, &term->op, ndim, piece->box.len, there, element_nbytes);
}

static rsd_status compile_near_plan(struct compiling *c, size_t *next_term)
{
    struct exchange *x = c->x;
    rsd_cursor *cursor;
    const rsd_piece *piece;
    TRY(rsd_plan_walk(c->plan, c->rank, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        struct gathered_term *term = piece->reduce ? &x->terms[(*next_term)++] : NULL;
        const struct neighbour *near = neighbour_of(x, piece->from);
        if (near && (status = take_near_piece(c, near, piece, term)))
            break;
    }
    rsd_cursor_free(cursor);
    return status;
}

/* Each neighbour's strides are listed as ours are. */
static void next_plan(struct exchange *x, const rsd_plan *plan)
{
    for (int32_t i = 0; i < x->near->n; i++) {
        struct neighbour *near = &x->near->list[i];
        int64_t first, nsrc, ndst;
        rsd_layout_arrays_of(plan->src, near->rank, &first, &nsrc);
        rsd_layout_arrays_of(plan->dst, near->rank, &first, &ndst);
        near->next_stride += (size_t)((nsrc + ndst) * plan->src->ndim);
        near->src_base += nsrc;
        near->dst_base += ndst;
    }
}

rsd_status exchange_compile_near(struct exchange *x, int64_t nplans, const rsd_plan *const *plans)
{
    size_t next_term = 0;
    struct compiling c = {.x = x, .rank = x->transport.rank, .src_strides = x->strides};
    for (int64_t i = 0; i < nplans; i++) {
        c.plan = plans[i];
        c.number = (int32_t)i;
        rsd_layout_arrays_of(c.plan->src, c.rank, &c.first_src, &c.nsrc);
        rsd_layout_arrays_of(c.plan->dst, c.rank, &c.first_dst, &c.ndst);
        c.dst_strides = c.src_strides + c.nsrc * c.plan->src->ndim;
        TRY(compile_near_plan(&c, &next_term));
        c.src_base += c.nsrc;
        c.dst_base += c.ndst;
        c.src_strides = c.dst_strides + c.ndst * c.plan->dst->ndim;
        next_plan(x, c.plan);
    }
    return RSD_OK;
}
