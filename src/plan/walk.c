/* walk.c - a cursor over the pieces of a plan. Pieces are computed while the cursor moves.
 *
 * What a rank receives is computed from its destination arrays: for each overlap with the source, the parts
 * that it receives. What a rank sends is found by computing the same for every rank that may receive from it:
 *
 *     receives   own destination array  x  source        -> parts that this rank receives
 *     sends      own source array       x  destination   -> for each receiver, parts that this rank sends
 *                own destination array  x  source        -> for each receiver, parts that this rank forwards
 *
 * If overlaps are sent whole between two meshes, pieces come in the order of their boxes on both sides. The
 * pieces of any other plan are sorted when one rank is walked, so that both ranks of a pair see one order.
 */
#include "plan.h"

#include <stdlib.h>

enum walk_phase { RECEIVING, SENDING, FORWARDING };

struct rsd_cursor {
    rsd_plan *plan;
    enum walk_phase phase;
    bool from_every_rank;
    int32_t rank;
    bool whole; /* every overlap is sent whole by one rank: nothing is split */

    int64_t next_array, end_array; /* own arrays that follow, as indices for array_at */
    int64_t array;                 /* the current own array */
    int64_t next_group, end_group; /* sending explicit boxes: groups of the array that follow */

    struct overlap overlap;
    int64_t source; /* of the overlap: mesh position without copies and terms, or box group */
    int64_t group, member, nmembers;
    const int64_t *members; /* arrays that may receive the overlap; NULL: the whole group */
    struct receiver receiver;
    struct split split;
    size_t next_part;
    rsd_piece piece;
    rsd_status failed;

    bool sorted; /* all pieces were listed and sorted at the start */
    struct piece_record *records;
    int64_t *coordinates;
    size_t nrecords, records_capacity, coordinates_capacity, next_record;
};

/* A piece in the sorted list. Its coordinates are box.lo, box.len, from_at and to_at. */
struct piece_record {
    int32_t from, to, stage;
    bool from_destination, reduce;
    int64_t from_array, to_array, nbytes;
    size_t number; /* in the order in which pieces were listed */
    const int64_t *coordinates;
};

/* ---- pieces ---- */

/* Sets the piece: the box [lo, lo+len) of the current overlap, from an array to the receiver's array. */
static void set_piece(rsd_cursor *cursor, const int64_t *lo, const int64_t *len, int64_t from_array,
                      bool from_destination, bool reduce)
{
    const rsd_layout *src = cursor->plan->src, *dst = cursor->plan->dst;
    const struct overlap *overlap = &cursor->overlap;
    rsd_piece *piece = &cursor->piece;
    bool sending = cursor->phase == SENDING;
    const int64_t *src_at = sending ? overlap->own_at : overlap->other_at;
    const int64_t *dst_at = sending ? overlap->other_at : overlap->own_at;
    const int64_t *src_lo = src->mesh || from_destination ? NULL : layout_box_lo(src, from_array);
    const int64_t *dst_lo = dst->mesh ? NULL : layout_box_lo(dst, cursor->receiver.array);
    int64_t volume = 1;
    for (int32_t d = 0; d < cursor->piece.box.ndim; d++) {
        int64_t shift = lo[d] - overlap->lo[d];
        piece->box.lo[d] = lo[d];
        piece->box.len[d] = len[d];
        piece->to_at[d] = dst_lo ? lo[d] - dst_lo[d] : dst_at[d] + shift;
        if (from_destination) /* the arrays of a group are the same */
            piece->from_at[d] = piece->to_at[d];
        else
            piece->from_at[d] = src_lo ? lo[d] - src_lo[d] : src_at[d] + shift;
        volume *= len[d];
    }
    piece->from = layout_array_rank(from_destination ? dst : src, from_array);
    piece->from_array = from_array;
    piece->from_destination = from_destination;
    piece->to = cursor->receiver.rank;
    piece->to_array = cursor->receiver.array;
    piece->reduce = reduce;
    piece->nbytes = volume * (int64_t)rsd_dtype_nbytes(plan_sent_dtype(cursor->plan, piece));
}

static void set_whole_piece(rsd_cursor *cursor, int64_t src_array)
{
    set_piece(cursor, cursor->overlap.lo, cursor->overlap.len, src_array, false, false);
}

static void set_split_piece(rsd_cursor *cursor, const struct split_part *part)
{
    set_piece(cursor, part->lo, part->len, part->array, part->from_destination, part->reduce);
    cursor->piece.stage = part->stage;
}

/* ---- own arrays ---- */

static const rsd_layout *own_layout(const rsd_cursor *cursor)
{
    return cursor->phase == SENDING ? cursor->plan->src : cursor->plan->dst;
}

/* Starts a phase of the walk, at its first own array. */
static void enter_phase(rsd_cursor *cursor, enum walk_phase phase)
{
    cursor->phase = phase;
    const rsd_layout *own = own_layout(cursor);
    int64_t first = 0, count = rsd_layout_narrays(own);
    if (!cursor->from_every_rank)
        rsd_layout_arrays_of(own, cursor->rank, &first, &count);
    cursor->next_array = first;
    cursor->end_array = first + count;
    cursor->next_group = cursor->end_group = 0;
    cursor->member = cursor->nmembers = 0;
    cursor->next_part = cursor->split.n = 0;
    cursor->overlap.exhausted = true;
}

/* Returns the i-th array of the walk. Arrays come in the order of their numbers. Only in a walk of every rank of
 * a destination mesh with splits, they come group by group, so that each group is loaded once. */
static int64_t array_at(const rsd_cursor *cursor, int64_t i)
{
    const rsd_layout *own = own_layout(cursor);
    if (cursor->whole || !cursor->from_every_rank || cursor->phase == SENDING || !own->mesh)
        return i;
    int64_t copies = own->copies.total;
    return mesh_array_at(own->mesh, digits_position(&own->others, i / copies) +
                                        digits_position(&own->copies, i % copies));
}

static rsd_status start_group(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    const struct box_groups *groups = &plan->src_groups;
    int64_t group = cursor->source = plan->src_group_of[cursor->next_group++];
    return overlap_start(&cursor->overlap, plan->src, cursor->array,
                         groups->lo + group * groups->ndim, groups->len + group * groups->ndim,
                         plan->dst, &plan->dst_groups);
}

/* Moves to the next own array, and starts its overlaps. */
static rsd_status start_array(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    int64_t array = cursor->array = array_at(cursor, cursor->next_array++);
    if (cursor->phase != SENDING) {
        cursor->receiver = plan_receiver(plan, array);
        return overlap_start(&cursor->overlap, plan->dst, array, NULL, NULL, plan->src,
                             &plan->src_groups);
    }
    if (!plan->src->mesh) {
        cursor->next_group = plan->first_src_group[array];
        cursor->end_group = plan->first_src_group[array + 1];
        return RSD_OK;
    }
    int64_t position = mesh_position_of_array(plan->src->mesh, array);
    cursor->source = position - digits_part(&plan->src->copies, position) -
                     digits_part(&plan->src->terms, position);
    return overlap_start(&cursor->overlap, plan->src, array, NULL, NULL, plan->dst,
                         &plan->dst_groups);
}

/* Moves to the next overlap of any own array. *more is false after the last. */
static rsd_status next_overlap(rsd_cursor *cursor, bool *more)
{
    for (;;) {
        *more = overlap_next(&cursor->overlap);
        if (*more)
            return RSD_OK;
        if (cursor->next_group < cursor->end_group)
            TRY(start_group(cursor));
        else if (cursor->next_array < cursor->end_array)
            TRY(start_array(cursor));
        else
            return RSD_OK;
    }
}

/* ---- receives ---- */

/* Sets the next piece that the rank receives. *more is false after the last. */
static rsd_status next_received(rsd_cursor *cursor, bool *more)
{
    if (cursor->whole) {
        TRY(next_overlap(cursor, more));
        if (*more)
            set_whole_piece(cursor, plan_choose_sender(cursor->plan, &cursor->receiver,
                                                       cursor->overlap.other_position));
        return RSD_OK;
    }
    while (cursor->next_part == cursor->split.n) {
        TRY(next_overlap(cursor, more));
        if (!*more)
            return RSD_OK;
        cursor->next_part = 0;
        TRY(split_choose(cursor->plan, &cursor->receiver, cursor->overlap.other_position,
                         cursor->overlap.lo, cursor->overlap.len, NULL, &cursor->split));
    }
    set_split_piece(cursor, &cursor->split.list[cursor->next_part++]);
    *more = true;
    return RSD_OK;
}

/* ---- sends ---- */

/* Finds the arrays that may receive the current overlap from the own array: its group. What is forwarded goes
 * only to the own node, unless the own rank leads a reduction. */
static rsd_status find_receivers(rsd_cursor *cursor)
{
    const rsd_plan *plan = cursor->plan;
    struct split *split = &cursor->split;
    cursor->member = 0;
    cursor->members = NULL;
    if (cursor->phase == SENDING) {
        cursor->group = plan_group_of_overlap(plan, cursor->array, cursor->overlap.other_position);
        cursor->nmembers = plan_group_count(plan, cursor->group);
        return RSD_OK;
    }
    struct receiver own = plan_receiver(plan, cursor->array);
    bool leads = false;
    cursor->source = cursor->overlap.other_position;
    cursor->group = own.group;
    cursor->nmembers = plan_group_count(plan, cursor->group);
    TRY(split_load(plan, cursor->group, split));
    if (plan->reduced.total > 1)
        TRY(split_leads(plan, &own, cursor->source, split, &leads));
    if (!leads)
        cursor->nmembers =
            plan->node_of ? split_node_members(plan, split, cursor->array, &cursor->members) : 0;
    return RSD_OK;
}

/* Moves to the next array that may receive something, and to the next overlap after the last array. */
static rsd_status next_receiver(rsd_cursor *cursor, bool *more)
{
    while (cursor->member == cursor->nmembers) {
        TRY(next_overlap(cursor, more));
        if (!*more)
            return RSD_OK;
        TRY(find_receivers(cursor));
    }
    int64_t member = cursor->member++;
    cursor->receiver = plan_receiver(
        cursor->plan, cursor->members ? cursor->members[member]
                                      : plan_group_array(cursor->plan, cursor->group, member));
    *more = true;
    return RSD_OK;
}

static rsd_status next_whole_sent(rsd_cursor *cursor, bool *more)
{
    do {
        TRY(next_receiver(cursor, more));
        if (!*more)
            return RSD_OK;
    } while (plan_choose_sender(cursor->plan, &cursor->receiver, cursor->source) != cursor->array);
    set_whole_piece(cursor, cursor->array);
    return RSD_OK;
}

/* Sets the next piece that the rank sends: first from its source arrays, then what it forwards. */
static rsd_status next_sent(rsd_cursor *cursor, bool *more)
{
    if (cursor->whole)
        return next_whole_sent(cursor, more);
    while (cursor->next_part == cursor->split.n) {
        TRY(next_receiver(cursor, more));
        if (!*more && cursor->phase == FORWARDING)
            return RSD_OK;
        if (!*more) {
            enter_phase(cursor, FORWARDING);
            continue;
        }
        struct sender own = {cursor->array, cursor->phase == FORWARDING};
        cursor->next_part = 0;
        TRY(split_choose(cursor->plan, &cursor->receiver, cursor->source, cursor->overlap.lo,
                         cursor->overlap.len, &own, &cursor->split));
    }
    set_split_piece(cursor, &cursor->split.list[cursor->next_part++]);
    *more = true;
    return RSD_OK;
}

static rsd_status next_piece(rsd_cursor *cursor, bool *more)
{
    return cursor->phase == RECEIVING ? next_received(cursor, more) : next_sent(cursor, more);
}

/* ---- sorted ---- */

/* Adds a copy of the current piece to the list of pieces. */
static rsd_status add_piece_record(rsd_cursor *cursor)
{
    const rsd_piece *piece = &cursor->piece;
    size_t ndim = (size_t)piece->box.ndim, n = cursor->nrecords;
    TRY(GROW(cursor->records, cursor->records_capacity, n + 1));
    TRY(GROW(cursor->coordinates, cursor->coordinates_capacity, (n + 1) * 4 * ndim));
    cursor->records[n] = (struct piece_record){.from = piece->from,
                                               .to = piece->to,
                                               .stage = piece->stage,
                                               .from_destination = piece->from_destination != 0,
                                               .reduce = piece->reduce != 0,
                                               .from_array = piece->from_array,
                                               .to_array = piece->to_array,
                                               .nbytes = piece->nbytes,
                                               .number = n};
    int64_t *coordinates = cursor->coordinates + n * 4 * ndim;
    copy_i64s(coordinates, piece->box.lo, piece->box.ndim);
    copy_i64s(coordinates + ndim, piece->box.len, piece->box.ndim);
    copy_i64s(coordinates + 2 * ndim, piece->from_at, piece->box.ndim);
    copy_i64s(coordinates + 3 * ndim, piece->to_at, piece->box.ndim);
    cursor->nrecords++;
    return RSD_OK;
}

static int compare_i64(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

/* Sorts by stage, destination and box. The terms of one box keep their order. */
static int compare_records(const void *a, const void *b, void *ndim)
{
    const struct piece_record *x = a, *y = b;
    int order = compare_i64(x->stage, y->stage);
    if (!order)
        order = compare_i64(x->to_array, y->to_array);
    for (int32_t d = 0; d < *(const int32_t *)ndim && !order; d++)
        order = compare_i64(x->coordinates[d], y->coordinates[d]);
    return order ? order : (x->number > y->number) - (x->number < y->number);
}

/* Walks all pieces, and sorts them into the order that both ranks of a pair see. */
static rsd_status sort_pieces(rsd_cursor *cursor)
{
    int32_t ndim = cursor->piece.box.ndim;
    bool more;
    for (;;) {
        TRY(next_piece(cursor, &more));
        if (!more)
            break;
        TRY(add_piece_record(cursor));
    }
    for (size_t i = 0; i < cursor->nrecords; i++)
        cursor->records[i].coordinates = cursor->coordinates + i * 4 * (size_t)ndim;
    if (cursor->nrecords > 1)
        qsort_r(cursor->records, cursor->nrecords, sizeof *cursor->records, compare_records, &ndim);
    cursor->sorted = true;
    return RSD_OK;
}

/* Sets the next piece of the sorted list. Returns false after the last. */
static bool next_sorted(rsd_cursor *cursor)
{
    if (cursor->next_record == cursor->nrecords)
        return false;
    const struct piece_record *record = &cursor->records[cursor->next_record++];
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

/* ---- public functions ---- */

rsd_status rsd_plan_walk(const rsd_plan *plan, int32_t rank, rsd_side side, rsd_cursor **out)
{
    if (rank < RSD_EVERY_RANK)
        return fail(RSD_EINVAL, "invalid rank %d", (int)rank);
    if (side != RSD_RECEIVES && side != RSD_SENDS)
        return fail(RSD_EINVAL, "invalid side %d", (int)side);
    rsd_cursor *cursor = mem_new(1, sizeof *cursor);
    if (!cursor)
        return RSD_ENOMEM;
    cursor->plan = rsd_plan_share(plan);
    cursor->rank = rank;
    cursor->from_every_rank = rank == RSD_EVERY_RANK;
    cursor->whole = !plan->node_of && plan->reduced.total == 1;
    cursor->split.group = -1;
    cursor->piece.box.ndim = plan->src->ndim;
    enter_phase(cursor, side == RSD_RECEIVES ? RECEIVING : SENDING);
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
        return fail(cursor->failed, "an earlier call with this cursor failed");
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
    split_drop(&cursor->split);
    mem_free(cursor->records);
    mem_free(cursor->coordinates);
    rsd_plan_free(cursor->plan);
    mem_free(cursor);
}
