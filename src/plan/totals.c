/* totals.c - counts the pieces, messages and bytes of a plan.
 *
 * If both sides are meshes and each overlap is sent whole, pieces and messages are products over the dims,
 * and nothing is walked. Only what ranks keep is counted rank by rank, since the rank numbers connect the
 * dims. Every other plan is walked.
 */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

static rsd_status fail_on_total(void)
{
    return fail(RSD_ELIMIT, "a total of the plan exceeds 2^63 - 1");
}

static rsd_status multiply_total(int64_t *product, int64_t factor)
{
    return mul_i64(*product, factor, product) ? RSD_OK : fail_on_total();
}

static rsd_status add_to_total(int64_t *sum, int64_t summand)
{
    return add_i64(*sum, summand, sum) ? RSD_OK : fail_on_total();
}

/* Counts the bytes of all destination arrays, if they have elements of a dtype. */
static rsd_status count_dst_nbytes(const rsd_plan *plan, rsd_dtype dtype, int64_t *nbytes)
{
    const rsd_layout *dst = plan->dst;
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(dtype);
    *nbytes = 0;
    if (dst->mesh) {
        *nbytes = dst->volume * element_nbytes;
        TRY(multiply_total(nbytes, dst->copies.total));
        return multiply_total(nbytes, dst->terms.total);
    }
    for (int64_t i = 0; i < dst->nboxes; i++)
        TRY(add_to_total(nbytes, box_volume(dst->ndim, layout_box_len(dst, i)) * element_nbytes));
    return RSD_OK;
}

/* ---- two meshes ---- */

static int compare_sweeps(const void *a, const void *b)
{
    const struct sweep *x = a, *y = b;
    if (x->own_pos != y->own_pos)
        return x->own_pos < y->own_pos ? -1 : 1;
    return (x->other_pos > y->other_pos) - (x->other_pos < y->other_pos);
}

static int64_t count_distinct_pairs(struct sweep *list, size_t n)
{
    qsort(list, n, sizeof *list, compare_sweeps);
    int64_t distinct = n > 0;
    for (size_t i = 1; i < n; i++)
        distinct += compare_sweeps(&list[i], &list[i - 1]) != 0;
    return distinct;
}

/* Ranks that have a source and a destination array keep what is in both. */
static rsd_status count_kept(const rsd_plan *plan, rsd_totals *totals, int64_t *nkeepers)
{
    const rsd_mesh *src = plan->src->mesh, *dst = plan->dst->mesh;
    const rsd_mesh *fewer = src->nranks < dst->nranks ? src : dst;
    for (int64_t p = 0; p < fewer->nranks; p++) {
        int32_t rank = mesh_rank_at(fewer, p);
        int64_t from = mesh_position_of(src, rank), to = mesh_position_of(dst, rank);
        int64_t volume = from < 0 || to < 0 ? 0 : plan_pair_volume(plan, from, to);
        *nkeepers += volume > 0;
        TRY(add_to_total(&totals->nbytes_kept, volume * (int64_t)rsd_dtype_nbytes(plan->narrower)));
    }
    return RSD_OK;
}

/* Counts a plan between two meshes without a walk. Requires plan_is_direct. */
static rsd_status count_meshes(const rsd_plan *plan, rsd_totals *totals)
{
    const rsd_layout *src = plan->src, *dst = plan->dst;
    int64_t nkeepers = 0, needed;
    TRY(count_dst_nbytes(plan, dst->dtype, &totals->nbytes_total));
    TRY(count_dst_nbytes(plan, plan->narrower, &needed));
    if (dst->volume == 0)
        return RSD_OK;
    totals->npieces = totals->nmessages = dst->copies.total * dst->terms.total;
    for (int32_t d = 0; d < dst->ndim; d++) {
        struct sweep *list;
        size_t n;
        TRY(overlap_sweep_dim(&dst->cuts[d], &src->cuts[d], &list, &n));
        rsd_status status = multiply_total(&totals->npieces, (int64_t)n);
        if (!status)
            status = multiply_total(&totals->nmessages, count_distinct_pairs(list, n));
        mem_free(list);
        TRY(status);
    }
    TRY(count_kept(plan, totals, &nkeepers));
    totals->nmessages -= nkeepers;
    totals->nstages = 1;
    totals->nbytes_moved = totals->nbytes_least = needed - totals->nbytes_kept;
    return RSD_OK;
}

/* ---- any plan, by a walk ---- */

static rsd_status count_piece(const rsd_plan *plan, const rsd_piece *piece, rsd_totals *totals)
{
    totals->npieces++;
    totals->nstages = max_i64(totals->nstages, piece->stage + 1);
    if (plan->node_of && plan->node_of[piece->from] != plan->node_of[piece->to])
        TRY(add_to_total(&totals->nbytes_crossed, piece->nbytes));
    return add_to_total(piece->from == piece->to ? &totals->nbytes_kept : &totals->nbytes_moved,
                        piece->nbytes);
}

/* Adds the senders of one receiver to the number of messages, and clears the list. */
static void count_messages(struct rank_list *senders, rsd_totals *totals)
{
    rank_list_merge(senders);
    totals->nmessages += (int64_t)senders->n;
    senders->n = 0;
}

/* Counts any plan by a walk over all pieces. */
static rsd_status count_by_walk(const rsd_plan *plan, rsd_totals *totals)
{
    struct rank_list senders = {0};
    rsd_cursor *cursor;
    const rsd_piece *piece;
    int32_t receiver = -1;
    TRY(count_dst_nbytes(plan, plan->dst->dtype, &totals->nbytes_total));
    TRY(rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        if (piece->to != receiver)
            count_messages(&senders, totals);
        receiver = piece->to;
        status = count_piece(plan, piece, totals);
        if (!status && piece->from != piece->to)
            status = rank_list_add(&senders, piece->from, 0);
        if (status)
            break;
    }
    count_messages(&senders, totals);
    mem_free(senders.list);
    rsd_cursor_free(cursor);
    return status;
}

rsd_status rsd_plan_totals(const rsd_plan *plan, rsd_totals *totals)
{
    TRY(report_check("rsd_totals", totals));
    rsd_totals counted = {0};
    if (plan_is_direct(plan)) {
        TRY(count_meshes(plan, &counted));
    } else {
        TRY(count_by_walk(plan, &counted));
        TRY(plan_bound_moved(plan, &counted.nbytes_least));
        TRY(plan_bound_crossed(plan, &counted.nbytes_crossed_least));
    }
    report_copy(totals, &counted, sizeof counted);
    return RSD_OK;
}
