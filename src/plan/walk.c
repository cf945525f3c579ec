/* walk.c - a cursor over the pieces of a plan, which are computed as it goes.
 *
 * What a rank gets is read off its destination arrays: meetings with the source, and for each the
 * shares that choose.c gives it. What a rank gives is found by asking the same on behalf of
 * everyone who may get it, and keeping the answers that name this rank:
 *
 *     receives   own destination array  x  source        -> my shares
 *     sends      own source array       x  destination   -> for each member of the group: its
 * shares own destination array  x  source        -> the same, for what is handed on
 */
#include "plan.h"

enum phase { RECEIVING, GIVING, HANDING_ON };

struct rsd_cursor {
    rsd_plan *plan;
    enum phase phase;
    bool from_every_rank;
    int32_t rank;
    bool whole; /* every meeting is taken whole from one giver: no shares */
    int64_t element_nbytes;

    int64_t next_array, end_array; /* own arrays still to come */
    int64_t array;                 /* the own array at hand */
    int64_t next_cell, end_cell; /* giving from explicit boxes: cells of the array still to come */

    struct overlap overlap;
    int64_t source; /* of the meeting: mesh position without copies and terms, or cell */
    int64_t group, member, nmembers;
    struct getter getter;
    struct shares shares;
    size_t share;
    rsd_piece piece;
};

/* ---- pieces ---- */

/* The box [lo, lo+len), a part of the meeting at hand, from one array to the getter's. */
static void set_piece(rsd_cursor *cursor, const int64_t *lo, const int64_t *len, int64_t from_array,
                      bool from_dst)
{
    const rsd_layout *src = cursor->plan->src, *dst = cursor->plan->dst;
    const struct overlap *overlap = &cursor->overlap;
    rsd_piece *piece = &cursor->piece;
    bool giving = cursor->phase == GIVING;
    const int64_t *src_at = giving ? overlap->own_at : overlap->other_at;
    const int64_t *dst_at = giving ? overlap->other_at : overlap->own_at;
    const int64_t *src_lo = src->mesh || from_dst ? NULL : layout_box_lo(src, from_array);
    const int64_t *dst_lo = dst->mesh ? NULL : layout_box_lo(dst, cursor->getter.array);
    int64_t nbytes = cursor->element_nbytes;
    for (int32_t d = 0; d < cursor->piece.box.ndim; d++) {
        int64_t shift = lo[d] - overlap->lo[d];
        piece->box.lo[d] = lo[d];
        piece->box.len[d] = len[d];
        piece->to_at[d] = dst_lo ? lo[d] - dst_lo[d] : dst_at[d] + shift;
        if (from_dst) /* members of a group have the same array: the same place */
            piece->from_at[d] = piece->to_at[d];
        else
            piece->from_at[d] = src_lo ? lo[d] - src_lo[d] : src_at[d] + shift;
        nbytes *= len[d];
    }
    piece->from = layout_array_rank(from_dst ? dst : src, from_array);
    piece->from_array = from_array;
    piece->from_dst = from_dst;
    piece->to = cursor->getter.rank;
    piece->to_array = cursor->getter.array;
    piece->nbytes = nbytes;
}

static void set_whole_piece(rsd_cursor *cursor, int64_t src_array)
{
    set_piece(cursor, cursor->overlap.lo, cursor->overlap.len, src_array, false);
}

static void set_shared_piece(rsd_cursor *cursor, const struct share *share)
{
    set_piece(cursor, share->lo, share->len, share->array, share->from_dst);
    cursor->piece.stage = share->stage;
    cursor->piece.reduce = share->reduce;
}

/* ---- own arrays ---- */

static const rsd_layout *own_layout(const rsd_cursor *cursor)
{
    return cursor->phase == GIVING ? cursor->plan->src : cursor->plan->dst;
}

static void enter_phase(rsd_cursor *cursor, enum phase phase)
{
    cursor->phase = phase;
    const rsd_layout *own = own_layout(cursor);
    int64_t first = 0, count = rsd_layout_narrays(own);
    if (!cursor->from_every_rank)
        rsd_layout_arrays_of(own, cursor->rank, &first, &count);
    cursor->next_array = first;
    cursor->end_array = first + count;
    cursor->next_cell = cursor->end_cell = 0;
    cursor->member = cursor->nmembers = 0;
    cursor->share = cursor->shares.n = 0;
    cursor->overlap.exhausted = true;
}

static rsd_status start_cell(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    const struct cells *cells = &plan->src_cells;
    int64_t cell = cursor->source = plan->src_cell_of[cursor->next_cell++];
    return overlap_start(&cursor->overlap, plan->src, cursor->array, cells->lo + cell * cells->ndim,
                         cells->len + cell * cells->ndim, plan->dst, &plan->dst_cells);
}

static rsd_status start_array(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    int64_t array = cursor->array = cursor->next_array++;
    if (cursor->phase != GIVING) {
        cursor->getter = getter_of(plan, array);
        return overlap_start(&cursor->overlap, plan->dst, array, NULL, NULL, plan->src,
                             &plan->src_cells);
    }
    if (!plan->src->mesh) {
        cursor->next_cell = plan->first_src_cell[array];
        cursor->end_cell = plan->first_src_cell[array + 1];
        return RSD_OK;
    }
    int64_t position = mesh_position_of_array(plan->src->mesh, array);
    cursor->source = position - digits_part(&plan->src->copies, position) -
                     digits_part(&plan->src->terms, position);
    return overlap_start(&cursor->overlap, plan->src, array, NULL, NULL, plan->dst,
                         &plan->dst_cells);
}

/* The next meeting of any own array; *more is false after the last. */
static rsd_status next_meeting(rsd_cursor *cursor, bool *more)
{
    for (;;) {
        *more = overlap_next(&cursor->overlap);
        if (*more)
            return RSD_OK;
        if (cursor->next_cell < cursor->end_cell)
            TRY(start_cell(cursor));
        else if (cursor->next_array < cursor->end_array)
            TRY(start_array(cursor));
        else
            return RSD_OK;
    }
}

/* ---- receives ---- */

static rsd_status next_received(rsd_cursor *cursor, const rsd_piece **piece)
{
    bool more;
    if (cursor->whole) {
        TRY(next_meeting(cursor, &more));
        if (more)
            set_whole_piece(cursor,
                            choose_giver(cursor->plan, &cursor->getter, cursor->overlap.whom));
        *piece = more ? &cursor->piece : NULL;
        return RSD_OK;
    }
    while (cursor->share == cursor->shares.n) {
        TRY(next_meeting(cursor, &more));
        if (!more) {
            *piece = NULL;
            return RSD_OK;
        }
        cursor->share = 0;
        TRY(choose_shares(cursor->plan, &cursor->getter, cursor->overlap.whom, cursor->overlap.lo,
                          cursor->overlap.len, &cursor->shares));
    }
    set_shared_piece(cursor, &cursor->shares.list[cursor->share++]);
    *piece = &cursor->piece;
    return RSD_OK;
}

/* ---- sends ---- */

/* The next member of the group that may get the meeting at hand, going to the next meeting when all
 * have been asked. */
static rsd_status next_member(rsd_cursor *cursor, bool *more)
{
    const rsd_plan *plan = cursor->plan;
    while (cursor->member == cursor->nmembers) {
        TRY(next_meeting(cursor, more));
        if (!*more)
            return RSD_OK;
        cursor->member = 0;
        if (cursor->phase == GIVING) {
            cursor->group = group_of_meeting(plan, cursor->array, cursor->overlap.whom);
        } else {
            cursor->group = getter_of(plan, cursor->array).group;
            cursor->source = cursor->overlap.whom;
        }
        cursor->nmembers = group_count(plan, cursor->group);
    }
    cursor->getter = getter_of(plan, group_member(plan, cursor->group, cursor->member++));
    *more = true;
    return RSD_OK;
}

static bool is_mine(const rsd_cursor *cursor, const struct share *share)
{
    return share->array == cursor->array && share->from_dst == (cursor->phase == HANDING_ON);
}

static rsd_status next_given(rsd_cursor *cursor, const rsd_piece **piece)
{
    bool more;
    *piece = NULL;
    for (;;) {
        while (cursor->share < cursor->shares.n) {
            const struct share *share = &cursor->shares.list[cursor->share++];
            if (is_mine(cursor, share)) {
                set_shared_piece(cursor, share);
                *piece = &cursor->piece;
                return RSD_OK;
            }
        }
        TRY(next_member(cursor, &more));
        if (!more && (cursor->phase == HANDING_ON || cursor->whole))
            return RSD_OK;
        if (!more) {
            enter_phase(cursor, HANDING_ON);
            continue;
        }
        if (cursor->whole) {
            if (choose_giver(cursor->plan, &cursor->getter, cursor->source) != cursor->array)
                continue;
            set_whole_piece(cursor, cursor->array);
            *piece = &cursor->piece;
            return RSD_OK;
        }
        cursor->share = 0;
        TRY(choose_shares(cursor->plan, &cursor->getter, cursor->source, cursor->overlap.lo,
                          cursor->overlap.len, &cursor->shares));
    }
}

/* ---- the window ---- */

rsd_status rsd_plan_walk(const rsd_plan *plan, int32_t rank, rsd_side side, rsd_cursor **out)
{
    if (rank < RSD_EVERY_RANK)
        return fail(RSD_EINVAL, "rank %d of a plan: ranks count from 0", (int)rank);
    if (side != RSD_RECEIVES && side != RSD_SENDS)
        return fail(RSD_EINVAL, "%d is no side of a plan", (int)side);
    rsd_cursor *cursor = mem_new(1, sizeof *cursor);
    if (!cursor)
        return RSD_ENOMEM;
    cursor->plan = plan_share(plan);
    cursor->rank = rank;
    cursor->from_every_rank = rank == RSD_EVERY_RANK;
    cursor->whole = !plan->node_of && plan->reduced.total == 1;
    cursor->element_nbytes = (int64_t)rsd_dtype_nbytes(plan->src->dtype);
    cursor->shares.group = -1;
    cursor->piece.box.ndim = plan->src->ndim;
    enter_phase(cursor, side == RSD_RECEIVES ? RECEIVING : GIVING);
    *out = cursor;
    return RSD_OK;
}

rsd_status rsd_cursor_next(rsd_cursor *cursor, const rsd_piece **piece)
{
    return cursor->phase == RECEIVING ? next_received(cursor, piece) : next_given(cursor, piece);
}

void rsd_cursor_free(rsd_cursor *cursor)
{
    if (!cursor)
        return;
    overlap_drop(&cursor->overlap);
    shares_drop(&cursor->shares);
    rsd_plan_free(cursor->plan);
    mem_free(cursor);
}
