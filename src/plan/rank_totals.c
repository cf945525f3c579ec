/* part.c - counting one rank's part of a plan, and what one rank gives another.
 *
 * A rank's part of two formulas is a product of short lists, one per dim, and is counted from them:
 * a rank may have millions of pieces to get that nobody ever lists.
 */
#include "plan.h"

#include <stdlib.h>

/* ---- two formulas ---- */

struct io_stats {
    int64_t pieces, peers, volume;  /* in all */
    int64_t own_pieces, own_volume; /* of these, with the rank itself */
};

/* The mesh position of a holder as far as one dim decides it. */
static int64_t position_part(const struct cuts *cuts, int64_t position)
{
    int64_t part = 0;
    for (int32_t k = 0; k < cuts->ncuts; k++)
        part += position / cuts->cut[k].stride % cuts->cut[k].count * cuts->cut[k].stride;
    return part;
}

static int by_position(const void *a, const void *b)
{
    int64_t x = ((const struct span_overlap *)a)->other_pos,
            y = ((const struct span_overlap *)b)->other_pos;
    return (x > y) - (x < y);
}

/* Sorts the list, so call it last. Spans of one holder that are cut by plain shards meet every
 * other holder once, and need no look. */
static int64_t distinct_peers(const struct overlap *overlap, int32_t d)
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
    qsort(list, n, sizeof *list, by_position);
    int64_t distinct = 0;
    for (size_t i = 0; i < n; i++)
        distinct += i == 0 || list[i].other_pos != list[i - 1].other_pos;
    return distinct;
}

/* Counts the meetings of an own array; `self` is the rank's position on the other side, or -1. */
static struct io_stats tally_meetings(const struct overlap *overlap, int64_t self)
{
    struct io_stats tally = {1, 1, 1, self >= 0, self >= 0};
    for (int32_t d = 0; d < overlap->ndim; d++) {
        int64_t extent = 0, own_pieces = 0, own_extent = 0;
        int64_t part = self < 0 ? -1 : position_part(&overlap->other->cuts[d], self);
        for (size_t i = 0; i < overlap->dims[d].n; i++) {
            const struct span_overlap *meet = &overlap->dims[d].list[i];
            extent += meet->len;
            own_pieces += meet->other_pos == part;
            own_extent += meet->other_pos == part ? meet->len : 0;
        }
        tally.pieces *= (int64_t)overlap->dims[d].n;
        tally.volume *= extent;
        tally.own_pieces *= own_pieces;
        tally.own_volume *= own_extent;
        tally.peers *= distinct_peers(overlap, d);
    }
    return tally;
}

static rsd_status tally_array(const rsd_plan *plan, bool sends, int64_t array, int64_t self,
                              struct io_stats *tally)
{
    struct overlap overlap = {0};
    const rsd_layout *own = sends ? plan->src : plan->dst, *other = sends ? plan->dst : plan->src;
    rsd_status status = overlap_start(&overlap, own, array, NULL, NULL, other, NULL);
    *tally = (struct io_stats){0};
    if (!status && !overlap.exhausted)
        *tally = tally_meetings(&overlap, self);
    overlap_drop(&overlap);
    return status;
}

/* Whether a source position is the one that a destination array turns to for what it holds. */
static bool is_giver_of(const rsd_plan *plan, int64_t src_position, int64_t dst_array)
{
    const rsd_layout *src = plan->src;
    return plan_receiver(plan, dst_array).sender ==
           digits_part(&src->copies, src_position) + digits_part(&src->terms, src_position);
}

/* How many indices two holders have in common along a dim. */
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

int64_t plan_pair_volume(const rsd_plan *plan, int64_t src_position, int64_t dst_position)
{
    const rsd_layout *src = plan->src, *dst = plan->dst;
    if (src->volume == 0 ||
        !is_giver_of(plan, src_position, mesh_array_at(dst->mesh, dst_position)))
        return 0;
    int64_t volume = 1;
    for (int32_t d = 0; d < src->ndim && volume > 0; d++)
        volume *= common_extent(&src->cuts[d], src_position, &dst->cuts[d], dst_position);
    return volume;
}

static rsd_status too_much(int32_t rank)
{
    return fail(RSD_ELIMIT, "a total of rank %d does not fit into 63 bits", (int)rank);
}

static rsd_status count_formulas(const rsd_plan *plan, int32_t rank, rsd_rank_totals *totals)
{
    const rsd_mesh *src = plan->src->mesh, *dst = plan->dst->mesh;
    int64_t from = mesh_position_of(src, rank), to = mesh_position_of(dst, rank);
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(plan->src->dtype);
    bool own = from >= 0 && to >= 0 && is_giver_of(plan, from, mesh_array_at(dst, to));
    struct io_stats tally;
    if (to >= 0) {
        TRY(tally_array(plan, false, mesh_array_at(dst, to), own ? from : -1, &tally));
        totals->npieces_received = tally.pieces - tally.own_pieces;
        totals->nmessages_received = tally.peers - (tally.own_pieces > 0);
        totals->nbytes_received = (tally.volume - tally.own_volume) * element_nbytes;
        totals->npieces_kept = tally.own_pieces;
        totals->nbytes_kept = tally.own_volume * element_nbytes;
    }
    if (from >= 0) {
        TRY(tally_array(plan, true, mesh_array_at(src, from), own ? to : -1, &tally));
        int64_t copies = plan->dst->copies.total;
        if (!mul_i64(tally.volume * element_nbytes, copies, &totals->nbytes_sent))
            return too_much(rank);
        totals->nbytes_sent -= tally.own_volume * element_nbytes;
        totals->npieces_sent = tally.pieces * copies - tally.own_pieces;
        totals->nmessages_sent = tally.peers * copies - (tally.own_pieces > 0);
    }
    return RSD_OK;
}

/* ---- any plan, walked ---- */

static int by_rank(const void *a, const void *b)
{
    const struct rank_nbytes *x = a, *y = b;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

void rank_list_merge(struct rank_list *peers)
{
    size_t n = 0;
    if (peers->n > 1)
        qsort(peers->list, peers->n, sizeof *peers->list, by_rank);
    for (size_t i = 0; i < peers->n; i++)
        if (n > 0 && peers->list[n - 1].rank == peers->list[i].rank)
            peers->list[n - 1].nbytes += peers->list[i].nbytes;
        else
            peers->list[n++] = peers->list[i];
    peers->n = n;
}

/* A walk may have far more pieces than peers: a full list is united before it grows. */
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

static rsd_status walk_side(const rsd_plan *plan, int32_t rank, rsd_side side, int64_t *pieces,
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
            status = too_much(rank);
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

static rsd_status count_walked(const rsd_plan *plan, int32_t rank, rsd_rank_totals *totals)
{
    TRY(walk_side(plan, rank, RSD_RECEIVES, &totals->npieces_received, &totals->nmessages_received,
                  &totals->nbytes_received, totals));
    return walk_side(plan, rank, RSD_SENDS, &totals->npieces_sent, &totals->nmessages_sent,
                     &totals->nbytes_sent, totals);
}

/* ---- the windows ---- */

static rsd_status add_arrays(const rsd_layout *layout, int32_t rank, int64_t *nbytes)
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
        return fail(RSD_EINVAL, "rank %d of a plan: ranks count from 0", (int)rank);
    rsd_rank_totals counted = {0};
    bool formula = plan_is_direct(plan) && plan->src->copies.total == 1;
    TRY(formula ? count_formulas(plan, rank, &counted) : count_walked(plan, rank, &counted));
    TRY(add_arrays(plan->src, rank, &counted.nbytes_src));
    TRY(add_arrays(plan->dst, rank, &counted.nbytes_dst));
    report_copy(totals, &counted, sizeof counted);
    return RSD_OK;
}

rsd_status rsd_plan_nbytes(const rsd_plan *plan, int32_t from, int32_t to, int64_t *nbytes)
{
    if (from < 0 || to < 0)
        return fail(RSD_EINVAL, "rank %d of a plan: ranks count from 0",
                    (int)(from < 0 ? from : to));
    if (plan_is_direct(plan)) {
        int64_t at = mesh_position_of(plan->src->mesh, from),
                to_at = mesh_position_of(plan->dst->mesh, to);
        int64_t volume = at < 0 || to_at < 0 ? 0 : plan_pair_volume(plan, at, to_at);
        *nbytes = volume * (int64_t)rsd_dtype_nbytes(plan->src->dtype);
        return RSD_OK;
    }
    rsd_cursor *cursor;
    const rsd_piece *piece;
    int64_t sum = 0;
    TRY(rsd_plan_walk(plan, to, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece)
        if (piece->from == from && !add_i64(sum, piece->nbytes, &sum)) {
            status = too_much(to);
            break;
        }
    rsd_cursor_free(cursor);
    if (!status)
        *nbytes = sum;
    return status;
}
