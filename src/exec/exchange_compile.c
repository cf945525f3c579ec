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
    int32_t number;            /* of the plan */
    struct plan_arrays arrays; /* of this rank */
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

/* Sets where a piece lies in an array of its sender, or of its receiver. `arrays` are those of that rank. */
static rsd_status fill_box(struct rank_compiler *c, const struct plan_arrays *arrays,
                           const rsd_piece *piece, bool sending, struct array_box *box)
{
    bool is_dst = !sending || piece->from_destination;
    const rsd_layout *layout = is_dst ? c->plan->dst : c->plan->src;
    int64_t array = sending ? piece->from_array : piece->to_array;
    const int64_t *at = sending ? piece->from_at : piece->to_at;
    const int64_t *strides = plan_array_strides(arrays, array, is_dst);
    *box = (struct array_box){.array = plan_array_number(arrays, array, is_dst), .plan = c->number};
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
    box_unpack(&x->copier, x->stream, &packed, in, at, n,
               x->arrays.addresses[box->array] + box->offset);
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
    TRY(fill_box(c, &c->arrays, piece, false, &to));
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
    if (piece->from == x->rank)
        TRY(fill_box(c, &c->arrays, piece, true, &term.box));
    TRY(GROW(x->terms, x->terms_capacity, x->nterms + 1));
    x->terms[x->nterms++] = term;
    last->nterms++;
    return RSD_OK;
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
        return side == RSD_RECEIVES && !piece->reduce
                   ? program_add_piece(&c->x->program, c->plan, piece, &c->arrays, &c->arrays)
                   : RSD_OK;
    TRY(fill_box(c, &c->arrays, piece, side == RSD_SENDS, &box));
    return append_piece(c, pieces, &box, side == RSD_SENDS ? piece->to : piece->from, piece);
}

/* Adds all pieces that this rank sends or receives in a plan. */
static rsd_status compile_side(struct rank_compiler *c, rsd_side side, struct piece_list *pieces)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    rsd_status status;
    TRY(rsd_plan_walk(c->plan, c->x->rank, side, &cursor));
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece)
        if ((status = compile_piece(c, piece, side, pieces)))
            break;
    rsd_cursor_free(cursor);
    return status;
}

/* ---- plans ---- */

/* Adds a plan and its arrays to the exchange. */
static rsd_status compile_plan(struct exchange *x, const struct bind_request *request, int64_t i,
                               struct piece_list *sends, struct piece_list *receives)
{
    const rsd_plan *plan = request->plans[i];
    struct plan_arrays before = {.number = x->arrays.n};
    struct rank_compiler c = {.x = x,
                              .plan = plan,
                              .number = (int32_t)i,
                              .arrays = plan_arrays_next(&before, plan, x->rank)};
    rsd_bind_options options;
    int64_t world = max_i64(rsd_layout_world(plan->src), rsd_layout_world(plan->dst));
    if (world > x->nranks)
        return fail(RSD_EMISMATCH, "a layout names rank %lld, but the transport has %d ranks",
                    (long long)world - 1, (int)x->nranks);
    TRY(bind_options_copy(request->bind, i, &options));
    size_t first = x->nstrides, n = plan_arrays_nstrides(&c.arrays);
    TRY(GROW(x->strides, x->strides_capacity, first + n));
    x->nstrides += n;
    c.arrays.strides = x->strides + first;
    TRY(plan_arrays_fill_strides(&c.arrays, plan, &options, x->strides + first));
    TRY(compile_side(&c, RSD_SENDS, sends));
    TRY(compile_side(&c, RSD_RECEIVES, receives));
    return run_arrays_add(&x->arrays, plan, &c.arrays);
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

bool compile_prefers_columns(const struct bind_request *request, int32_t rank)
{
    for (int64_t i = 0; i < request->nplans; i++) {
        const rsd_plan *plan = request->plans[i];
        rsd_bind_options options;
        if (!request->bind || bind_options_copy(request->bind, i, &options))
            return false;
        if (options.src_strides ? !are_column_major(plan->src, rank, options.src_strides)
                                : !options.src_column_major)
            return false;
        if (options.dst_strides ? !are_column_major(plan->dst, rank, options.dst_strides)
                                : !options.dst_column_major)
            return false;
    }
    return request->nplans > 0;
}

/* ---- arrays that a run uses ---- */

/* Marks the array of a box as used, and perhaps as sent to another rank. */
static void mark_box(struct exchange *x, const struct array_box *box, bool sent)
{
    struct array_span *span = &x->arrays.spans[box->array];
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
            mark_box(x, &x->boxes[messages[i].first_box + k], sending);
}

/* Marks the arrays that a run reads or writes. */
static void mark_used_arrays(struct exchange *x)
{
    mark_messages(x, x->sends, x->nsends, true);
    mark_messages(x, x->receives, x->nreceives, false);
    program_mark_arrays(&x->program, &x->arrays);
    for (size_t i = 0; i < x->ncombined; i++)
        mark_box(x, &x->combined[i].to, false);
    for (size_t i = 0; i < x->nterms; i++)
        if (x->terms[i].peer == x->rank)
            mark_box(x, &x->terms[i].box, false);
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

rsd_status compile_plans(struct exchange *x, const struct bind_request *request)
{
    struct piece_list sends = {0}, receives = {0};
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < request->nplans && !status; i++) {
        status = compile_plan(x, request, i, &sends, &receives);
        if (status && request->nplans > 1)
            status = fail_in(status, "plan %lld: ", (long long)i);
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

/* Whether every term of a reduction lies in an array of this rank, or of one on its host. */
static bool terms_are_local(const struct exchange *x)
{
    for (size_t i = 0; i < x->nterms; i++)
        if (x->terms[i].peer != x->rank && !host_data_rank(x, x->terms[i].peer))
            return false;
    return true;
}

/* Adds a copy directly from an array of another rank of this host, or sets where a term lies there. With `sums`, adds
 * a term of any rank to the sums that a device computes. */
static rsd_status compile_host_piece(struct rank_compiler *c, const rsd_piece *piece, bool sums,
                                     struct combined_term *term)
{
    const struct host_rank *host = host_data_rank(c->x, piece->from);
    const struct plan_arrays *from = host ? &host->current : &c->arrays;
    struct program *program = &c->x->program;
    if (!term)
        return host ? program_add_piece(program, c->plan, piece, from, &c->arrays) : RSD_OK;
    if (host)
        TRY(fill_box(c, from, piece, true, &term->box));
    return sums ? program_add_term(program, c->plan, piece, from, &c->arrays) : RSD_OK;
}

/* Adds the direct copies of one plan, and with `sums` the terms of its sums. */
static rsd_status compile_host_plan(struct rank_compiler *c, bool sums, size_t *next_term)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    TRY(rsd_plan_walk(c->plan, c->x->rank, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        struct combined_term *term = piece->reduce ? &c->x->terms[(*next_term)++] : NULL;
        if ((status = compile_host_piece(c, piece, sums, term)))
            break;
    }
    rsd_cursor_free(cursor);
    return status;
}

rsd_status compile_host_copies(struct exchange *x, const struct bind_request *request)
{
    bool sums = terms_are_local(x);
    size_t next_term = 0;
    struct rank_compiler c = {.x = x, .arrays = {.strides = x->strides}};
    for (int32_t k = 0; k < x->host->n; k++) {
        struct host_rank *host = &x->host->ranks[k];
        host->current = (struct plan_arrays){.number = host->first_array, .strides = host->strides};
    }
    for (int64_t i = 0; i < request->nplans; i++) {
        c.plan = request->plans[i];
        c.number = (int32_t)i;
        c.arrays = plan_arrays_next(&c.arrays, c.plan, x->rank);
        for (int32_t k = 0; k < x->host->n; k++) {
            struct host_rank *host = &x->host->ranks[k];
            host->current = plan_arrays_next(&host->current, c.plan, host->rank);
        }
        TRY(compile_host_plan(&c, sums, &next_term));
    }
    return RSD_OK;
}
