/* walk.c - a cursor over the pieces of a plan, which are computed as it goes.
 *
 * What a rank gets is read off its destination arrays: meetings with the source, and for each the
 * shares that are its own. What a rank gives is found by asking the same on behalf of everyone who may
 * get it, naming this rank as the giver:
 *
 *     receives   own destination array  x  source        -> my shares
 *     sends      own source array       x  destination   -> for each member of the group: what I give
 *                own destination array  x  source        -> the same, for what is handed on
 *
 * Pieces of two formulas that are taken whole come in the order of their boxes, on both sides. Those of
 * any other plan are sorted when one rank is walked, so that both sides of a pair agree there too.
 */
#include "plan.h"

#include <stdlib.h>

enum phase { RECEIVING, GIVING, HANDING_ON };

struct rsd_cursor {
    rsd_plan *plan;
    enum phase phase;
    bool from_every_rank;
    int32_t rank;
    bool whole; /* every meeting is taken whole from one giver: no shares */
    int64_t element_nbytes;

    int64_t next_array, end_array; /* own arrays still to come, as array_at knows them */
    int64_t array;                 /* the own array at hand */
    int64_t next_cell, end_cell; /* giving from explicit boxes: cells of the array still to come */

    struct overlap overlap;
    int64_t source; /* of the meeting: mesh position without copies and terms, or cell */
    int64_t group, member, nmembers;
    const int64_t *members; /* those who may get the meeting; NULL: the whole group */
    struct receiver receiver;
    struct split shares;
    size_t share;
    rsd_piece piece;
    rsd_status failed;

    bool sorted; /* all pieces were found beforehand, and are read from here */
    struct record *records;
    int64_t *coordinates;
    size_t nrecords, records_capacity, coordinates_capacity, next_record;
};

/* A piece in the list: its coordinates are box.lo, box.len, from_at and to_at. */
struct record {
    int32_t from, to, stage;
    bool from_destination, reduce;
    int64_t from_array, to_array, nbytes;
    size_t found; /* as which one it was found */
    const int64_t *coordinates;
};

/* ---- pieces ---- */

/* The box [lo, lo+len), a part of the meeting at hand, from one array to the getter's. */
static void set_piece(rsd_cursor *cursor, const int64_t *lo, const int64_t *len, int64_t from_array,
                      bool from_destination)
{
    const rsd_layout *src = cursor->plan->src, *dst = cursor->plan->dst;
    const struct overlap *overlap = &cursor->overlap;
    rsd_piece *piece = &cursor->piece;
    bool giving = cursor->phase == GIVING;
    const int64_t *src_at = giving ? overlap->own_at : overlap->other_at;
    const int64_t *dst_at = giving ? overlap->other_at : overlap->own_at;
    const int64_t *src_lo = src->mesh || from_destination ? NULL : layout_box_lo(src, from_array);
    const int64_t *dst_lo = dst->mesh ? NULL : layout_box_lo(dst, cursor->receiver.array);
    int64_t nbytes = cursor->element_nbytes;
    for (int32_t d = 0; d < cursor->piece.box.ndim; d++) {
        int64_t shift = lo[d] - overlap->lo[d];
        piece->box.lo[d] = lo[d];
        piece->box.len[d] = len[d];
        piece->to_at[d] = dst_lo ? lo[d] - dst_lo[d] : dst_at[d] + shift;
        if (from_destination) /* members of a group have the same array: the same place */
            piece->from_at[d] = piece->to_at[d];
        else
            piece->from_at[d] = src_lo ? lo[d] - src_lo[d] : src_at[d] + shift;
        nbytes *= len[d];
    }
    piece->from = layout_array_rank(from_destination ? dst : src, from_array);
    piece->from_array = from_array;
    piece->from_destination = from_destination;
    piece->to = cursor->receiver.rank;
    piece->to_array = cursor->receiver.array;
    piece->nbytes = nbytes;
}

static void set_whole_piece(rsd_cursor *cursor, int64_t src_array)
{
    set_piece(cursor, cursor->overlap.lo, cursor->overlap.len, src_array, false);
}

static void set_shared_piece(rsd_cursor *cursor, const struct split_part *share)
{
    set_piece(cursor, share->lo, share->len, share->array, share->from_destination);
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

/* Arrays come as they are numbered; those of every rank of a destination mesh come group by group if
 * shares are chosen, so that what is found out about a group serves all its members. */
static int64_t array_at(const rsd_cursor *cursor, int64_t i)
{
    const rsd_layout *own = own_layout(cursor);
    if (cursor->whole || !cursor->from_every_rank || cursor->phase == GIVING || !own->mesh)
        return i;
    int64_t copies = own->copies.total;
    return mesh_array_at(own->mesh, digits_position(&own->others, i / copies) +
                                        digits_position(&own->copies, i % copies));
}

static rsd_status start_cell(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    const struct box_groups *groups = &plan->src_groups;
    int64_t group = cursor->source = plan->src_group_of[cursor->next_cell++];
    return overlap_start(&cursor->overlap, plan->src, cursor->array,
                         groups->lo + group * groups->ndim, groups->len + group * groups->ndim,
                         plan->dst, &plan->dst_groups);
}

static rsd_status start_array(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    int64_t array = cursor->array = array_at(cursor, cursor->next_array++);
    if (cursor->phase != GIVING) {
        cursor->receiver = plan_receiver(plan, array);
        return overlap_start(&cursor->overlap, plan->dst, array, NULL, NULL, plan->src,
                             &plan->src_groups);
    }
    if (!plan->src->mesh) {
        cursor->next_cell = plan->first_src_group[array];
        cursor->end_cell = plan->first_src_group[array + 1];
        return RSD_OK;
    }
    int64_t position = mesh_position_of_array(plan->src->mesh, array);
    cursor->source = position - digits_part(&plan->src->copies, position) -
                     digits_part(&plan->src->terms, position);
    return overlap_start(&cursor->overlap, plan->src, array, NULL, NULL, plan->dst,
                         &plan->dst_groups);
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

static rsd_status next_received(rsd_cursor *cursor, bool *more)
{
    if (cursor->whole) {
        TRY(next_meeting(cursor, more));
        if (*more)
            set_whole_piece(cursor, plan_choose_sender(cursor->plan, &cursor->receiver,
                                                       cursor->overlap.other_position));
        return RSD_OK;
    }
    while (cursor->share == cursor->shares.n) {
        TRY(next_meeting(cursor, more));
        if (!*more)
            return RSD_OK;
        cursor->share = 0;
        TRY(split_choose(cursor->plan, &cursor->receiver, cursor->overlap.other_position,
                         cursor->overlap.lo, cursor->overlap.len, NULL, &cursor->shares));
    }
    set_shared_piece(cursor, &cursor->shares.list[cursor->share++]);
    *more = true;
    return RSD_OK;
}

/* ---- sends ---- */

/* Who may get the meeting at hand from the own array: the group; but what is handed on goes to the
 * mates on the own node, unless this is a reduction that the own rank leads. */
static rsd_status find_members(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    struct split *shares = &cursor->shares;
    cursor->member = 0;
    cursor->members = NULL;
    if (cursor->phase == GIVING) {
        cursor->group = plan_group_of_overlap(plan, cursor->array, cursor->overlap.other_position);
        cursor->nmembers = plan_group_count(plan, cursor->group);
        return RSD_OK;
    }
    struct receiver own = plan_receiver(plan, cursor->array);
    bool leads = false;
    cursor->source = cursor->overlap.other_position;
    cursor->group = own.group;
    cursor->nmembers = plan_group_count(plan, cursor->group);
    TRY(split_load(plan, cursor->group, shares));
    if (plan->reduced.total > 1)
        TRY(split_leads(plan, &own, cursor->source, shares, &leads));
    if (!leads)
        cursor->nmembers =
            plan->node_of ? split_node_members(plan, shares, cursor->array, &cursor->members) : 0;
    return RSD_OK;
}

/* The next one who may get something, going to the next meeting when all have been asked. */
static rsd_status next_member(rsd_cursor *cursor, bool *more)
{
    while (cursor->member == cursor->nmembers) {
        TRY(next_meeting(cursor, more));
        if (!*more)
            return RSD_OK;
        TRY(find_members(cursor));
    }
    int64_t member = cursor->member++;
    cursor->receiver = plan_receiver(
        cursor->plan, cursor->members ? cursor->members[member]
                                      : plan_group_array(cursor->plan, cursor->group, member));
    *more = true;
    return RSD_OK;
}

static rsd_status next_whole_given(rsd_cursor *cursor, bool *more)
{
    do {
        TRY(next_member(cursor, more));
        if (!*more)
            return RSD_OK;
    } while (plan_choose_sender(cursor->plan, &cursor->receiver, cursor->source) != cursor->array);
    set_whole_piece(cursor, cursor->array);
    return RSD_OK;
}

static rsd_status next_given(rsd_cursor *cursor, bool *more)
{
    if (cursor->whole)
        return next_whole_given(cursor, more);
    while (cursor->share == cursor->shares.n) {
        TRY(next_member(cursor, more));
        if (!*more && cursor->phase == HANDING_ON)
            return RSD_OK;
        if (!*more) {
            enter_phase(cursor, HANDING_ON);
            continue;
        }
        struct sender own = {cursor->array, cursor->phase == HANDING_ON};
        cursor->share = 0;
        TRY(split_choose(cursor->plan, &cursor->receiver, cursor->source, cursor->overlap.lo,
                         cursor->overlap.len, &own, &cursor->shares));
    }
    set_shared_piece(cursor, &cursor->shares.list[cursor->share++]);
    *more = true;
    return RSD_OK;
}

static rsd_status next_piece(rsd_cursor *cursor, bool *more)
{
    return cursor->phase == RECEIVING ? next_received(cursor, more) : next_given(cursor, more);
}

/* ---- sorted ---- */

static rsd_status add_record(rsd_cursor *cursor)
{
    const rsd_piece *piece = &cursor->piece;
    size_t ndim = (size_t)piece->box.ndim, n = cursor->nrecords;
    TRY(GROW(cursor->records, cursor->records_capacity, n + 1));
    TRY(GROW(cursor->coordinates, cursor->coordinates_capacity, (n + 1) * 4 * ndim));
    cursor->records[n] = (struct record){.from = piece->from,
                                         .to = piece->to,
                                         .stage = piece->stage,
                                         .from_destination = piece->from_destination != 0,
                                         .reduce = piece->reduce != 0,
                                         .from_array = piece->from_array,
                                         .to_array = piece->to_array,
                                         .nbytes = piece->nbytes,
                                         .found = n};
    int64_t *coordinates = cursor->coordinates + n * 4 * ndim;
    copy_i64s(coordinates, piece->box.lo, piece->box.ndim);
    copy_i64s(coordinates + ndim, piece->box.len, piece->box.ndim);
    copy_i64s(coordinates + 2 * ndim, piece->from_at, piece->box.ndim);
    copy_i64s(coordinates + 3 * ndim, piece->to_at, piece->box.ndim);
    cursor->nrecords++;
    return RSD_OK;
}

static int compare(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

/* By stage, destination and box; the terms of one box as they were found. */
static int by_place(const void *a, const void *b, void *ndim)
{
    const struct record *x = a, *y = b;
    int order = compare(x->stage, y->stage);
    if (!order)
        order = compare(x->to_array, y->to_array);
    for (int32_t d = 0; d < *(const int32_t *)ndim && !order; d++)
        order = compare(x->coordinates[d], y->coordinates[d]);
    return order ? order : (x->found > y->found) - (x->found < y->found);
}

static rsd_status sort_pieces(rsd_cursor *cursor)
{
    int32_t ndim = cursor->piece.box.ndim;
    bool more;
    for (;;) {
        TRY(next_piece(cursor, &more));
        if (!more)
            break;
        TRY(add_record(cursor));
    }
    for (size_t i = 0; i < cursor->nrecords; i++)
        cursor->records[i].coordinates = cursor->coordinates + i * 4 * (size_t)ndim;
    if (cursor->nrecords > 1)
        qsort_r(cursor->records, cursor->nrecords, sizeof *cursor->records, by_place, &ndim);
    cursor->sorted = true;
    return RSD_OK;
}

static bool next_sorted(rsd_cursor *cursor)
{
    if (cursor->next_record == cursor->nrecords)
        return false;
    const struct record *record = &cursor->records[cursor->next_record++];
    rsd_piece *piece = &cursor->piece;
    int32_t ndim = piece->box.ndim;
    piece->from = record->from;
    piece->to = record->to;
    piece->stage = record->stage;
    piece->from_destination = record->from_destination;
    piece->reduce = record->reduce;
    piece->from_array = record->from_array;
    piece->to_array = record->to_array;
    piece->nbytes = record->nbytes;
    copy_i64s(piece->box.lo, record->coordinates, ndim);
    copy_i64s(piece->box.len, record->coordinates + ndim, ndim);
    copy_i64s(piece->from_at, record->coordinates + 2 * (int64_t)ndim, ndim);
    copy_i64s(piece->to_at, record->coordinates + 3 * (int64_t)ndim, ndim);
    return true;
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
    cursor->plan = rsd_plan_share(plan);
    cursor->rank = rank;
    cursor->from_every_rank = rank == RSD_EVERY_RANK;
    cursor->whole = !plan->node_of && plan->reduced.total == 1;
    cursor->element_nbytes = (int64_t)rsd_dtype_nbytes(plan->src->dtype);
    cursor->shares.group = -1;
    cursor->piece.box.ndim = plan->src->ndim;
    enter_phase(cursor, side == RSD_RECEIVES ? RECEIVING : GIVING);
    rsd_status status =
        cursor->from_every_rank || plan_is_direct(plan) ? RSD_OK : sort_pieces(cursor);
    if (status)
        rsd_cursor_free(cursor);
    else
        *out = cursor;
    return status;
}

rsd_status rsd_cursor_next(rsd_cursor *cursor, const rsd_piece **piece)
{
    bool more;
    *piece = NULL;
    if (cursor->failed)
        return fail(cursor->failed, "this walk has failed before");
    if (cursor->sorted)
        more = next_sorted(cursor);
    else
        TRY(cursor->failed = next_piece(cursor, &more));
    *piece = more ? &cursor->piece : NULL;
    return RSD_OK;
}

void rsd_cursor_free(rsd_cursor *cursor)
{
    if (!cursor)
        return;
    overlap_drop(&cursor->overlap);
    split_drop(&cursor->shares);
    mem_free(cursor->records);
    mem_free(cursor->coordinates);
    rsd_plan_free(cursor->plan);
    mem_free(cursor);
}
