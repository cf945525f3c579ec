/* totals.c - counts the pieces, messages and bytes of a plan.
 *
 * If both sides are meshes and each overlap is sent whole, pieces and messages are products over the dims,
 * and nothing is walked. Only what ranks keep is counted rank by rank, since the rank numbers connect the
 * dims; what two positions have in common along a dim is looked up. Every other plan is walked.
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

static int compare_common_spans(const void *a, const void *b)
{
    const struct common_span *x = a, *y = b;
    if (x->own_pos != y->own_pos)
        return x->own_pos < y->own_pos ? -1 : 1;
    return (x->other_pos > y->other_pos) - (x->other_pos < y->other_pos);
}

/* Sorts the list by positions, and adds up the lengths of each pair of positions. */
static void merge_common_spans(struct common_spans *spans)
{
    size_t n = 0;
    qsort(spans->list, spans->n, sizeof *spans->list, compare_common_spans);
    for (size_t i = 0; i < spans->n; i++)
        if (n > 0 && compare_common_spans(&spans->list[n - 1], &spans->list[i]) == 0)
            spans->list[n - 1].len += spans->list[i].len;
        else
            spans->list[n++] = spans->list[i];
    spans->n = n;
}

/* Returns how many indices of dim d a source and a destination position have in common. `spans` are merged. */
static int64_t find_common_len(const rsd_plan *plan, int32_t d, const struct common_spans *spans,
                               int64_t from, int64_t to)
{
    struct common_span key = {.own_pos = (int32_t)cuts_part_of(&plan->dst->cuts[d], to),
                              .other_pos = (int32_t)cuts_part_of(&plan->src->cuts[d], from)};
    const struct common_span *found =
        bsearch(&key, spans->list, spans->n, sizeof key, compare_common_spans);
    return found ? found->len : 0;
}

/* Ranks that have a source and a destination array keep what is in both. `spans` has one merged list per dim. */
static rsd_status count_kept(const rsd_plan *plan, const struct common_spans *spans,
                             rsd_totals *totals)
{
    const rsd_mesh *src = plan->src->mesh, *dst = plan->dst->mesh;
    const rsd_mesh *fewer = src->nranks < dst->nranks ? src : dst;
    for (int64_t p = 0; p < fewer->nranks; p++) {
        int32_t rank = mesh_rank_at(fewer, p);
        int64_t from = mesh_position_of(src, rank), to = mesh_position_of(dst, rank);
        int64_t volume = from >= 0 && to >= 0 && plan_sends_to(plan, from, to);
        for (int32_t d = 0; d < plan->dst->ndim && volume > 0; d++)
            volume *= find_common_len(plan, d, &spans[d], from, to);
        totals->nmessages -= volume > 0;
        TRY(add_to_total(&totals->nbytes_kept, volume * (int64_t)rsd_dtype_nbytes(plan->narrower)));
    }
    return RSD_OK;
}

/* Counts pieces, messages and what is kept, with the spans that the meshes have in common along each dim. */
static rsd_status count_common_spans(const rsd_plan *plan, struct common_spans *spans,
                                     rsd_totals *totals)
{
    const rsd_layout *src = plan->src, *dst = plan->dst;
    totals->npieces = totals->nmessages = dst->copies.total * dst->terms.total;
    for (int32_t d = 0; d < dst->ndim; d++) {
        TRY(overlap_sweep_dim(&dst->cuts[d], &src->cuts[d], &spans[d]));
        TRY(multiply_total(&totals->npieces, (int64_t)spans[d].n));
        merge_common_spans(&spans[d]);
        TRY(multiply_total(&totals->nmessages, (int64_t)spans[d].n));
    }
    return count_kept(plan, spans, totals);
}

/* Counts a plan between two meshes without a walk. Requires plan_is_direct. */
static rsd_status count_meshes(const rsd_plan *plan, rsd_totals *totals)
{
    struct common_spans spans[RSD_MAX_DIMS] = {{0}};
    int64_t needed;
    TRY(count_dst_nbytes(plan, plan->dst->dtype, &totals->nbytes_total));
    TRY(count_dst_nbytes(plan, plan->narrower, &needed));
    if (plan->dst->volume == 0)
        return RSD_OK;
    rsd_status status = count_common_spans(plan, spans, totals);
    for (int32_t d = 0; d < plan->dst->ndim; d++)
        mem_free(spans[d].list);
    totals->nstages = 1;
    totals->nbytes_moved = totals->nbytes_least = needed - totals->nbytes_kept;
    return status;
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
