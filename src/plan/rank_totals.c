/* rank_totals.c - counts what one rank sends and receives, and what one rank sends to another.
 *
 * If both sides are meshes, the overlaps of one array are a product of short lists, one per dim. They are
 * counted from those lists, since a rank may have millions of pieces.
 */
#include "plan.h"

#include <stdlib.h>

/* ---- two meshes ---- */

struct overlap_counts {
    int64_t pieces, peers, volume;  /* of all ranks */
    int64_t own_pieces, own_volume; /* of the rank itself */
};

static int compare_positions(const void *a, const void *b)
{
    int64_t x = ((const struct span_overlap *)a)->other_pos,
            y = ((const struct span_overlap *)b)->other_pos;
    return (x > y) - (x < y);
}

/* Returns the number of different positions that overlap along dim d. May sort the list, so it is called
 * last. One span that is cut by S or B overlaps every position once. */
static int64_t count_peers(const struct overlap *overlap, int32_t d)
{
    struct span_overlap *list = overlap->dims[d].list;
    size_t n = overlap->dims[d].n;
    bool plain = overlap->dims[d].nown == 1;
    for (int32_t k = 0; k < overlap->other->cuts[d].ncuts; k++) {
        rsd_kind kind = overlap->other->cuts[d].cut[k].kind;
        plain = plain && (kind == RSD_SHARD || kind == RSD_BALANCED);
    }
    if (plain)
        return (int64_t)n;
    qsort(list, n, sizeof *list, compare_positions);
    int64_t distinct = 0;
    for (size_t i = 0; i < n; i++)
        distinct += i == 0 || list[i].other_pos != list[i - 1].other_pos;
    return distinct;
}

/* Counts the overlaps of an own array. `self` is the rank's position in the other mesh, or -1. */
static struct overlap_counts count_overlaps(const struct overlap *overlap, int64_t self)
{
    struct overlap_counts counts = {1, 1, 1, self >= 0, self >= 0};
    for (int32_t d = 0; d < overlap->ndim; d++) {
        int64_t extent = 0, own_pieces = 0, own_extent = 0;
        int64_t part = self < 0 ? -1 : cuts_part_of(&overlap->other->cuts[d], self);
        for (size_t i = 0; i < overlap->dims[d].n; i++) {
            const struct span_overlap *span = &overlap->dims[d].list[i];
            extent += span->len;
            own_pieces += span->other_pos == part;
            own_extent += span->other_pos == part ? span->len : 0;
        }
        counts.pieces *= (int64_t)overlap->dims[d].n;
        counts.volume *= extent;
        counts.own_pieces *= own_pieces;
        counts.own_volume *= own_extent;
        counts.peers *= count_peers(overlap, d);
    }
    return counts;
}

/* Counts the overlaps of one array. `self` is the position of its rank in the other mesh, or -1. */
static rsd_status count_array(const rsd_plan *plan, bool sends, int64_t array, int64_t self,
                              struct overlap_counts *counts)
{
    struct overlap overlap = {0};
    const rsd_layout *own = sends ? plan->src : plan->dst, *other = sends ? plan->dst : plan->src;
    rsd_status status = overlap_start(&overlap, own, array, NULL, NULL, other, NULL);
    *counts = (struct overlap_counts){0};
    if (!status && !overlap.exhausted)
        *counts = count_overlaps(&overlap, self);
    overlap_drop(&overlap);
    return status;
}

bool plan_sends_to(const rsd_plan *plan, int64_t src_position, int64_t dst_position)
{
    const rsd_layout *src = plan->src;
    int64_t dst_array = mesh_array_at(plan->dst->mesh, dst_position);
    return plan_receiver(plan, dst_array).sender_offset ==
           digits_part(&src->copies, src_position) + digits_part(&src->terms, src_position);
}

/* Returns how many indices of a dim two positions have in common. */
static int64_t common_extent(const struct cuts *a, int64_t position_a, const struct cuts *b,
                             int64_t position_b)
{
    int64_t extent_a = cuts_extent_of(a, position_a), extent_b = cuts_extent_of(b, position_b);
    int64_t at_a = 0, at_b = 0, common = 0;
    while (at_a < extent_a && at_b < extent_b) {
        struct span x = cuts_span_of(a, position_a, at_a), y = cuts_span_of(b, position_b, at_b);
        int64_t end_x = x.lo + x.len, end_y = y.lo + y.len;
        common += max_i64(0, min_i64(end_x, end_y) - max_i64(x.lo, y.lo));
        if (end_x <= end_y)
            at_a += x.len;
        else
            at_b += y.len;
    }
    return common;
}

/* Returns the number of elements that one mesh position sends to another. Requires plan_is_direct. */
static int64_t pair_volume(const rsd_plan *plan, int64_t src_position, int64_t dst_position)
{
    const rsd_layout *src = plan->src, *dst = plan->dst;
    if (src->volume == 0 || !plan_sends_to(plan, src_position, dst_position))
        return 0;
    int64_t volume = 1;
    for (int32_t d = 0; d < src->ndim && volume > 0; d++)
        volume *= common_extent(&src->cuts[d], src_position, &dst->cuts[d], dst_position);
    return volume;
}

static rsd_status fail_on_rank_total(int32_t rank)
{
    return fail(RSD_ELIMIT, "a total of rank %d exceeds 2^63 - 1", (int)rank);
}

/* Counts what a rank sends, receives and keeps, without a walk. Requires plan_is_direct. */
static rsd_status count_rank_of_meshes(const rsd_plan *plan, int32_t rank, rsd_rank_totals *totals)
{
    const rsd_mesh *src = plan->src->mesh, *dst = plan->dst->mesh;
    int64_t from = mesh_position_of(src, rank), to = mesh_position_of(dst, rank);
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(plan->narrower);
    bool own = from >= 0 && to >= 0 && plan_sends_to(plan, from, to);
    struct overlap_counts counts;
    if (to >= 0) {
        TRY(count_array(plan, false, mesh_array_at(dst, to), own ? from : -1, &counts));
        totals->npieces_received = counts.pieces - counts.own_pieces;
        totals->nmessages_received = counts.peers - (counts.own_pieces > 0);
        totals->nbytes_received = (counts.volume - counts.own_volume) * element_nbytes;
        totals->npieces_kept = counts.own_pieces;
        totals->nbytes_kept = counts.own_volume * element_nbytes;
    }
    if (from >= 0) {
        TRY(count_array(plan, true, mesh_array_at(src, from), own ? to : -1, &counts));
        int64_t copies = plan->dst->copies.total;
        if (!mul_i64(counts.volume * element_nbytes, copies, &totals->nbytes_sent))
            return fail_on_rank_total(rank);
        totals->nbytes_sent -= counts.own_volume * element_nbytes;
        totals->npieces_sent = counts.pieces * copies - counts.own_pieces;
        totals->nmessages_sent = counts.peers * copies - (counts.own_pieces > 0);
    }
    return RSD_OK;
}

/* ---- any plan, by a walk ---- */

static int compare_rank_nbytes(const void *a, const void *b)
{
    const struct rank_nbytes *x = a, *y = b;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

void rank_list_merge(struct rank_list *peers)
{
    size_t n = 0;
    if (peers->n > 1)
        qsort(peers->list, peers->n, sizeof *peers->list, compare_rank_nbytes);
    for (size_t i = 0; i < peers->n; i++)
        if (n > 0 && peers->list[n - 1].rank == peers->list[i].rank)
            peers->list[n - 1].nbytes += peers->list[i].nbytes;
        else
            peers->list[n++] = peers->list[i];
    peers->n = n;
}

/* A walk may have many more pieces than peers, so a full list is merged before it grows. */
rsd_status rank_list_add(struct rank_list *peers, int32_t rank, int64_t nbytes)
{
    if (peers->n && peers->list[peers->n - 1].rank == rank) {
        peers->list[peers->n - 1].nbytes += nbytes;
        return RSD_OK;
    }
    if (peers->n && peers->n == peers->capacity)
        rank_list_merge(peers);
    TRY(GROW(peers->list, peers->capacity, peers->n + peers->n / 2 + 1));
    peers->list[peers->n++] = (struct rank_nbytes){rank, nbytes};
    return RSD_OK;
}

/* Counts what a rank sends or receives by a walk. What it keeps is counted with RSD_RECEIVES only. */
static rsd_status count_side(const rsd_plan *plan, int32_t rank, rsd_side side, int64_t *pieces,
                             int64_t *messages, int64_t *nbytes, rsd_rank_totals *totals)
{
    struct rank_list peers = {0};
    rsd_cursor *cursor;
    const rsd_piece *piece;
    TRY(rsd_plan_walk(plan, rank, side, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        bool kept = piece->from == piece->to;
        if (kept && side == RSD_SENDS)
            continue;
        int64_t *sum = kept ? &totals->nbytes_kept : nbytes;
        *(kept ? &totals->npieces_kept : pieces) += 1;
        if (!add_i64(*sum, piece->nbytes, sum))
            status = fail_on_rank_total(rank);
        else if (!kept)
            status = rank_list_add(&peers, side == RSD_RECEIVES ? piece->from : piece->to,
                                   piece->nbytes);
        if (status)
            break;
    }
    rank_list_merge(&peers);
    *messages = (int64_t)peers.n;
    mem_free(peers.list);
    rsd_cursor_free(cursor);
    return status;
}

static rsd_status count_rank_walked(const rsd_plan *plan, int32_t rank, rsd_rank_totals *totals)
{
    TRY(count_side(plan, rank, RSD_RECEIVES, &totals->npieces_received, &totals->nmessages_received,
                   &totals->nbytes_received, totals));
    return count_side(plan, rank, RSD_SENDS, &totals->npieces_sent, &totals->nmessages_sent,
                      &totals->nbytes_sent, totals);
}

/* ---- public functions ---- */

/* Adds the bytes of all arrays of a rank. */
static rsd_status add_array_nbytes(const rsd_layout *layout, int32_t rank, int64_t *nbytes)
{
    int64_t first, count;
    rsd_layout_arrays_of(layout, rank, &first, &count);
    for (int64_t i = first; i < first + count; i++) {
        rsd_array array;
        TRY(rsd_layout_array(layout, i, &array));
        if (!add_i64(*nbytes, (int64_t)array.nbytes, nbytes))
            return fail(RSD_ELIMIT, "the arrays of rank %d have 2^63 bytes or more", (int)rank);
    }
    return RSD_OK;
}

rsd_status rsd_plan_rank_totals(const rsd_plan *plan, int32_t rank, rsd_rank_totals *totals)
{
    TRY(report_check("rsd_rank_totals", totals));
    if (rank < 0)
        return fail(RSD_EINVAL, "invalid rank %d", (int)rank);
    rsd_rank_totals counted = {0};
    bool formula = plan_is_direct(plan) && plan->src->copies.total == 1;
    TRY(formula ? count_rank_of_meshes(plan, rank, &counted)
                : count_rank_walked(plan, rank, &counted));
    TRY(add_array_nbytes(plan->src, rank, &counted.nbytes_src));
    TRY(add_array_nbytes(plan->dst, rank, &counted.nbytes_dst));
    report_copy(totals, &counted, sizeof counted);
    return RSD_OK;
}

rsd_status rsd_plan_nbytes(const rsd_plan *plan, int32_t from, int32_t to, int64_t *nbytes)
{
    if (from < 0 || to < 0)
        return fail(RSD_EINVAL, "invalid rank %d", (int)(from < 0 ? from : to));
    if (plan_is_direct(plan)) {
        int64_t at = mesh_position_of(plan->src->mesh, from),
                to_at = mesh_position_of(plan->dst->mesh, to);
        int64_t volume = at < 0 || to_at < 0 ? 0 : pair_volume(plan, at, to_at);
        *nbytes = volume * (int64_t)rsd_dtype_nbytes(plan->narrower);
        return RSD_OK;
    }
    rsd_cursor *cursor;
    const rsd_piece *piece;
    int64_t sum = 0;
    TRY(rsd_plan_walk(plan, to, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece)
        if (piece->from == from && !add_i64(sum, piece->nbytes, &sum)) {
            status = fail_on_rank_total(to);
            break;
        }
    rsd_cursor_free(cursor);
    if (!status)
        *nbytes = sum;
    return status;
}
