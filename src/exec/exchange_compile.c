/* exchange_compile.c - compiles what one rank sends and receives, for its own arrays.
 *
 * A message has all pieces that one rank sends to another in one stage, packed one after the other, each row by row.
 * Both ranks walk the plan in the same order, so a message needs no header.
 */
#include "exchange.h"

#include <stdlib.h>
#include <string.h>

/* The plan that is being compiled. */
struct rank_compiler {
    struct exchange *x;
    const rsd_plan *plan;
    int32_t rank;
    int32_t number;                           /* of the plan */
    int64_t first_src, nsrc, first_dst, ndst; /* arrays of this rank, as the layouts number them */
    int64_t src_base, dst_base;               /* the first, as the exchange numbers them */
    const int64_t *src_strides, *dst_strides;
};

/* ---- packed boxes ---- */

/* Appends the loops of a box to the list of the exchange. The list may be reallocated, so the box has an index. */
static rsd_status fill_loops(struct exchange *x, struct array_box *box, int32_t ndim,
                             const int64_t *len, const int64_t *strides, struct element element)
{
    struct loop loops[RSD_MAX_DIMS];
    box->packed = box_packed(ndim, len, element, strides, x->by_columns, loops);
    box->packed.loops = NULL;
    box->first_loop = x->nloops;
    TRY(GROW(x->loops, x->loops_capacity, x->nloops + (size_t)box->packed.nloops));
    for (int32_t i = 0; i < box->packed.nloops; i++)
        x->loops[x->nloops++] = loops[i];
    return RSD_OK;
}

/* Sets where a piece lies in the array of this rank, as sender or receiver. */
static rsd_status fill_box(struct rank_compiler *c, const rsd_piece *piece, bool sending,
                           struct array_box *box)
{
    const rsd_layout *layout = sending && !piece->from_destination ? c->plan->src : c->plan->dst;
    bool in_dst = !sending || piece->from_destination;
    int64_t number = sending ? piece->from_array : piece->to_array;
    int64_t own = number - (in_dst ? c->first_dst : c->first_src);
    const int64_t *at = sending ? piece->from_at : piece->to_at;
    const int64_t *strides = (in_dst ? c->dst_strides : c->src_strides) + own * layout->ndim;
    *box = (struct array_box){.array = own + (in_dst ? c->dst_base : c->src_base),
                              .plan = c->number,
                              .from_destination = sending && piece->from_destination};
    for (int32_t d = 0; d < layout->ndim; d++)
        box->offset += at[d] * strides[d];
    return fill_loops(c->x, box, layout->ndim, piece->box.len, strides,
                      element_of(layout->dtype, plan_sent_dtype(c->plan, piece)));
}

void array_box_pack(const struct exchange *x, const struct array_box *box, const char *base,
                    uint64_t at, size_t n, char *out)
{
    struct packed_box packed = box->packed;
    packed.loops = x->loops + box->first_loop;
    box_pack(&x->copier, &packed, base + box->offset, at, n, out);
}

void array_box_unpack(const struct exchange *x, const struct array_box *box, uint64_t at, size_t n,
                      const char *in)
{
    struct packed_box packed = box->packed;
    packed.loops = x->loops + box->first_loop;
    box_unpack(&x->copier, x->stream, &packed, in, at, n, x->arrays.dst[box->array] + box->offset);
}

/* ---- pieces ---- */

/* A piece before pieces are sorted into messages. */
struct piece_box {
    struct array_box box;
    int32_t peer, stage;
    bool reduce;
    size_t number_nbytes; /* of the numbers of a message that are converted; 0: none are */
    size_t order;
};

struct piece_list {
    struct piece_box *list;
    size_t n, capacity;
};

/* Numbers that are converted must not be cut by the end of a chunk, so the widest come first: chunks consist of
 * multiples of 64 bytes. Chunks of terms begin with a box. */
static int compare_outgoing(const void *a, const void *b)
{
    const struct piece_box *x = a, *y = b;
    if (x->stage != y->stage)
        return x->stage < y->stage ? -1 : 1;
    if (x->peer != y->peer)
        return x->peer < y->peer ? -1 : 1;
    if (x->reduce != y->reduce)
        return x->reduce ? 1 : -1;
    if (x->number_nbytes != y->number_nbytes && !x->reduce)
        return x->number_nbytes > y->number_nbytes ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Sorts pieces by stage and peer, and groups them into messages. */
static rsd_status make_messages(struct exchange *x, struct piece_list *pieces,
                                struct message **messages, size_t *nmessages, size_t *capacity)
{
    if (pieces->n > 1)
        qsort(pieces->list, pieces->n, sizeof *pieces->list, compare_outgoing);
    for (size_t i = 0; i < pieces->n; i++) {
        const struct piece_box *one = &pieces->list[i];
        const struct piece_box *before = i ? one - 1 : NULL;
        if (!before || before->stage != one->stage || before->peer != one->peer ||
            before->reduce != one->reduce) {
            TRY(GROW(*messages, *capacity, *nmessages + 1));
            (*messages)[(*nmessages)++] = (struct message){.peer = one->peer,
                                                           .stage = one->stage,
                                                           .reduce = one->reduce,
                                                           .first_box = x->nboxes};
        }
        struct message *message = &(*messages)[*nmessages - 1];
        TRY(GROW(x->boxes, x->boxes_capacity, x->nboxes + 1));
        x->boxes[x->nboxes++] = one->box;
        message->nboxes++;
        message->nbytes += one->box.packed.nbytes;
    }
    return RSD_OK;
}

/* Adds a piece to the list of pieces to send or receive. */
static rsd_status append_piece(struct rank_compiler *c, struct piece_list *pieces,
                               const struct array_box *box, int32_t peer, const rsd_piece *piece)
{
    bool casts = c->plan->src->dtype != c->plan->dst->dtype;
    TRY(GROW(pieces->list, pieces->capacity, pieces->n + 1));
    pieces->list[pieces->n] = (struct piece_box){
        .box = *box,
        .peer = peer,
        .stage = piece->stage,
        .reduce = piece->reduce,
        .number_nbytes = casts ? rsd_dtype_nbytes(plan_sent_dtype(c->plan, piece)) : 0,
        .order = pieces->n};
    pieces->n++;
    return RSD_OK;
}

/* Adds a term. The walk returns the terms of one box consecutively. */
static rsd_status add_combined_term(struct rank_compiler *c, const rsd_piece *piece)
{
    struct exchange *x = c->x;
    struct array_box to;
    TRY(fill_box(c, piece, false, &to));
    struct combined_box *last = x->ncombined ? &x->combined[x->ncombined - 1] : NULL;
    if (!last || last->nterms == (size_t)last->reduction.nterms) {
        TRY(GROW(x->combined, x->combined_capacity, x->ncombined + 1));
        last = &x->combined[x->ncombined++];
        *last =
            (struct combined_box){.reduction = {.dtype = c->plan->src->dtype,
                                                .to = c->plan->src->dtype, /* the box converts it */
                                                .reduce = c->plan->reduce,
                                                .divisor = c->plan->divisor,
                                                .nterms = c->plan->reduced.total},
                                  .to = to,
                                  .first_term = x->nterms};
    }
    struct combined_term term = {.peer = piece->from};
    if (piece->from == c->rank)
        TRY(fill_box(c, piece, true, &term.box));
    TRY(GROW(x->terms, x->terms_capacity, x->nterms + 1));
    x->terms[x->nterms++] = term;
    last->nterms++;
    return RSD_OK;
}

static rsd_status add_own_copy(struct rank_compiler *c, const rsd_piece *piece)
{
    int32_t ndim = c->plan->dst->ndim;
    int64_t from = piece->from_array - (piece->from_destination ? c->first_dst : c->first_src);
    int64_t to = piece->to_array - c->first_dst;
    return program_add_piece(
        &c->x->program, c->plan, piece,
        (piece->from_destination ? c->dst_strides : c->src_strides) + from * ndim,
        c->dst_strides + to * ndim, from + (piece->from_destination ? c->dst_base : c->src_base),
        to + c->dst_base);
}

/* Adds a piece to the messages, the own copies or the terms of a combined box. */
static rsd_status compile_piece(struct rank_compiler *c, const rsd_piece *piece, rsd_side side,
                                struct piece_list *pieces)
{
    struct array_box box;
    bool own = piece->from == piece->to;
    if (piece->stage >= MAX_STAGES)
        return fail(RSD_ELIMIT, "stage %d of a plan is out of range (0 to %d)", (int)piece->stage,
                    MAX_STAGES - 1);
    if (piece->stage >= c->x->nstages)
        c->x->nstages = piece->stage + 1;
    if (side == RSD_RECEIVES && piece->reduce)
        TRY(add_combined_term(c, piece));
    if (own)
        return side == RSD_RECEIVES && !piece->reduce ? add_own_copy(c, piece) : RSD_OK;
    TRY(fill_box(c, piece, side == RSD_SENDS, &box));
    return append_piece(c, pieces, &box, side == RSD_SENDS ? piece->to : piece->from, piece);
}

/* Adds all pieces that this rank sends or receives in a plan. */
static rsd_status compile_side(struct rank_compiler *c, rsd_side side, struct piece_list *pieces)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    rsd_status status;
    TRY(rsd_plan_walk(c->plan, c->rank, side, &cursor));
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece)
        if ((status = compile_piece(c, piece, side, pieces)))
            break;
    rsd_cursor_free(cursor);
    return status;
}

/* ---- plans ---- */

/* Appends the strides of this rank's arrays of a layout. */
static rsd_status add_own_strides(struct exchange *x, const rsd_layout *layout, int64_t first,
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

/* Adds a plan and its arrays to the exchange. */
static rsd_status compile_plan(struct exchange *x, int32_t number, const rsd_plan *plan,
                               const rsd_bind_options *bind, struct piece_list *sends,
                               struct piece_list *receives)
{
    struct rank_compiler c = {.x = x,
                              .plan = plan,
                              .number = number,
                              .rank = x->rank,
                              .src_base = x->arrays.nsrc,
                              .dst_base = x->arrays.ndst};
    rsd_bind_options how;
    size_t first = x->nstrides;
    TRY(bind_options_copy(bind, &how));
    rsd_layout_arrays_of(plan->src, c.rank, &c.first_src, &c.nsrc);
    rsd_layout_arrays_of(plan->dst, c.rank, &c.first_dst, &c.ndst);
    TRY(add_own_strides(x, plan->src, c.first_src, c.nsrc, how.src_strides,
                        how.src_column_major != 0, false));
    TRY(add_own_strides(x, plan->dst, c.first_dst, c.ndst, how.dst_strides,
                        how.dst_column_major != 0, true));
    c.src_strides = x->strides + first;
    c.dst_strides = c.src_strides + c.nsrc * plan->src->ndim;
    TRY(compile_side(&c, RSD_SENDS, sends));
    TRY(compile_side(&c, RSD_RECEIVES, receives));
    TRY(run_arrays_add_src(&x->arrays, plan->src, c.first_src, c.nsrc, c.src_strides));
    return run_arrays_add_dst(&x->arrays, plan->dst, c.first_dst, c.ndst, c.dst_strides);
}

/* Returns whether the first dim of all arrays of this rank has the smallest stride. */
static bool are_column_major(const rsd_layout *layout, int32_t rank, const int64_t *strides)
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

bool compile_prefers_columns(int64_t nplans, const rsd_plan *const *plans,
                             const rsd_bind_options *bind, int32_t rank)
{
    const char *given = (const char *)bind;
    for (int64_t i = 0; i < nplans; i++, given += bind->struct_nbytes) {
        rsd_bind_options how;
        if (!bind || options_copy("rsd_bind_options", given, &how, sizeof how))
            return false;
        if (how.src_strides ? !are_column_major(plans[i]->src, rank, how.src_strides)
                            : !how.src_column_major)
            return false;
        if (how.dst_strides ? !are_column_major(plans[i]->dst, rank, how.dst_strides)
                            : !how.dst_column_major)
            return false;
    }
    return nplans > 0;
}

/* ---- arrays that a run uses ---- */

/* Marks the array of a box, which is read or written, and perhaps sent to another rank. */
static void mark_box(struct exchange *x, const struct array_box *box, bool read, bool sent)
{
    bool in_src = read && !box->from_destination;
    struct array_span *span = (in_src ? x->arrays.src_spans : x->arrays.dst_spans) + box->array;
    if (box->packed.nbytes == 0)
        return;
    span->used = true;
    span->sent = span->sent || sent;
}

static void mark_messages(struct exchange *x, const struct message *messages, size_t n,
                          bool sending)
{
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < messages[i].nboxes; k++)
            mark_box(x, &x->boxes[messages[i].first_box + k], sending, sending);
}

/* Marks the arrays that a run reads or writes. */
static void mark_used_arrays(struct exchange *x)
{
    mark_messages(x, x->sends, x->nsends, true);
    mark_messages(x, x->receives, x->nreceives, false);
    program_mark_arrays(&x->program, &x->arrays);
    for (size_t i = 0; i < x->ncombined; i++)
        mark_box(x, &x->combined[i].to, false, false);
    for (size_t i = 0; i < x->nterms; i++)
        if (x->terms[i].peer == x->rank)
            mark_box(x, &x->terms[i].box, true, false);
}

/* ---- reductions ---- */

bool compile_terms_align(const struct exchange *x)
{
    size_t *nboxes = mem_new((size_t)x->nranks, sizeof *nboxes); /* with a term of each rank */
    bool align = nboxes != NULL;
    for (size_t i = 0; i < x->ncombined && align; i++)
        for (size_t k = 0; k < x->combined[i].nterms && align; k++) {
            int32_t peer = x->terms[x->combined[i].first_term + k].peer;
            align = peer == x->rank || nboxes[peer]++ == i;
        }
    for (size_t i = 0; i < x->nreceives && align; i++)
        align = !x->receives[i].reduce || nboxes[x->receives[i].peer] == x->ncombined;
    mem_free(nboxes);
    return align;
}

/* ---- all plans ---- */

rsd_status compile_plans(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                         const rsd_bind_options *bind)
{
    struct piece_list sends = {0}, receives = {0};
    const char *given = (const char *)bind;
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < nplans && !status; i++) {
        int64_t world = max_i64(rsd_layout_world(plans[i]->src), rsd_layout_world(plans[i]->dst));
        if (world > x->nranks)
            status = fail(RSD_EMISMATCH, "a layout names rank %lld, but the transport has %d ranks",
                          (long long)world - 1, (int)x->nranks);
        else
            status = compile_plan(x, (int32_t)i, plans[i], (const void *)given, &sends, &receives);
        if (status && nplans > 1)
            status = fail_in(status, "plan %lld: ", (long long)i);
        if (given)
            given += bind->struct_nbytes;
    }
    if (!status)
        status = make_messages(x, &sends, &x->sends, &x->nsends, &x->sends_capacity);
    if (!status)
        status = make_messages(x, &receives, &x->receives, &x->nreceives, &x->receives_capacity);
    mem_free(sends.list);
    mem_free(receives.list);
    if (!status)
        status = run_arrays_finish(&x->arrays);
    if (!status)
        mark_used_arrays(x);
    return status;
}

void compile_drop(struct exchange *x)
{
    program_drop(&x->program);
    run_arrays_drop(&x->arrays);
    mem_free(x->boxes);
    mem_free(x->loops);
    mem_free(x->sends);
    mem_free(x->receives);
    mem_free(x->combined);
    mem_free(x->terms);
    mem_free(x->strides);
}

/* ---- copies from arrays of ranks on this host ---- */

/* Returns the strides of the array of another rank that contains a piece, and its number on that rank. */
static const int64_t *host_strides(const struct rank_compiler *c, const struct host_rank *host,
                                   const rsd_piece *piece, int64_t *array)
{
    int64_t first_src, nsrc, first_dst, ndst;
    rsd_layout_arrays_of(c->plan->src, host->rank, &first_src, &nsrc);
    rsd_layout_arrays_of(c->plan->dst, host->rank, &first_dst, &ndst);
    const int64_t *strides = host->strides + host->next_stride;
    int64_t own = piece->from_array - (piece->from_destination ? first_dst : first_src);
    *array = own + (piece->from_destination ? host->dst_base : host->src_base);
    return strides + (own + (piece->from_destination ? nsrc : 0)) * c->plan->src->ndim;
}

/* Adds a copy directly from an array of another rank of this host, or sets where a term lies there. */
static rsd_status compile_host_piece(struct rank_compiler *c, const struct host_rank *host,
                                     const rsd_piece *piece, struct combined_term *term)
{
    struct exchange *x = c->x;
    int32_t ndim = c->plan->src->ndim;
    int64_t array;
    const int64_t *there = host_strides(c, host, piece, &array);
    if (!term)
        return program_add_piece(&x->program, c->plan, piece, there,
                                 c->dst_strides + (piece->to_array - c->first_dst) * ndim, array,
                                 piece->to_array - c->first_dst + c->dst_base);
    term->box = (struct array_box){
        .array = array, .plan = c->number, .from_destination = piece->from_destination != 0};
    for (int32_t d = 0; d < ndim; d++)
        term->box.offset += piece->from_at[d] * there[d];
    return fill_loops(x, &term->box, ndim, piece->box.len, there,
                      element_of(c->plan->src->dtype, c->plan->src->dtype));
}

/* Whether every term of a reduction lies in an array of this rank, or of one on its host. */
static bool terms_are_local(const struct exchange *x)
{
    for (size_t i = 0; i < x->nterms; i++)
        if (x->terms[i].peer != x->rank && !host_data_rank(x, x->terms[i].peer))
            return false;
    return true;
}

/* Adds a term to the sums that a device computes. */
static rsd_status add_host_term(struct rank_compiler *c, const struct host_rank *host,
                                const rsd_piece *piece, int64_t *missing)
{
    int32_t ndim = c->plan->src->ndim;
    int64_t array = piece->from_array - c->first_src, to = piece->to_array - c->first_dst;
    const int64_t *from_strides = c->src_strides + array * ndim;
    array += c->src_base;
    if (host)
        from_strides = host_strides(c, host, piece, &array);
    return program_add_term(&c->x->program, c->plan, piece, from_strides,
                            c->dst_strides + to * ndim, array, to + c->dst_base, missing);
}

/* Adds the direct copies of one plan, and with `sums` the terms of its sums. */
static rsd_status compile_host_plan(struct rank_compiler *c, bool sums, size_t *next_term)
{
    struct exchange *x = c->x;
    rsd_cursor *cursor;
    const rsd_piece *piece;
    int64_t missing = 0;
    TRY(rsd_plan_walk(c->plan, c->rank, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        struct combined_term *term = piece->reduce ? &x->terms[(*next_term)++] : NULL;
        const struct host_rank *host = host_data_rank(x, piece->from);
        if (host)
            status = compile_host_piece(c, host, piece, term);
        if (!status && term && sums)
            status = add_host_term(c, host, piece, &missing);
        if (status)
            break;
    }
    rsd_cursor_free(cursor);
    return status;
}

/* Advances to the next plan in the strides that a rank exported: every rank lists them plan by plan. */
static void skip_host_plan(struct exchange *x, const rsd_plan *plan)
{
    for (int32_t i = 0; i < x->host->n; i++) {
        struct host_rank *host = &x->host->ranks[i];
        int64_t first, nsrc, ndst;
        rsd_layout_arrays_of(plan->src, host->rank, &first, &nsrc);
        rsd_layout_arrays_of(plan->dst, host->rank, &first, &ndst);
        host->next_stride += (size_t)((nsrc + ndst) * plan->src->ndim);
        host->src_base += nsrc;
        host->dst_base += ndst;
    }
}

rsd_status compile_host_copies(struct exchange *x, int64_t nplans, const rsd_plan *const *plans)
{
    bool sums = terms_are_local(x);
    size_t next_term = 0;
    struct rank_compiler c = {.x = x, .rank = x->rank, .src_strides = x->strides};
    for (int64_t i = 0; i < nplans; i++) {
        c.plan = plans[i];
        c.number = (int32_t)i;
        rsd_layout_arrays_of(c.plan->src, c.rank, &c.first_src, &c.nsrc);
        rsd_layout_arrays_of(c.plan->dst, c.rank, &c.first_dst, &c.ndst);
        c.dst_strides = c.src_strides + c.nsrc * c.plan->src->ndim;
        TRY(compile_host_plan(&c, sums, &next_term));
        c.src_base += c.nsrc;
        c.dst_base += c.ndst;
        c.src_strides = c.dst_strides + c.ndst * c.plan->dst->ndim;
        skip_host_plan(x, c.plan);
    }
    return RSD_OK;
}
