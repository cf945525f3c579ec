/* bounds.c - what any plan has to move at the least, whatever it is like.
 *
 * A copy: what some rank needs and does not hold has to come to it once. Taken over nodes instead
 * of ranks, the same says what has to cross.
 *
 * A reduction of p terms to r ranks: the first rank to have the whole value has taken part in p - 1
 * moves that brought terms together, or p if it had none of its own; after that, each of the other
 * r - 1 has to get something more. So p + r - 2 moves of each byte, or p + r - 1 if none of the
 * ranks that want it holds a term.
 *
 * Ranks may want overlapping boxes, so all is summed over regions in which the same ranks want the
 * same: the groups of a mesh, or the disjoint cells of explicit boxes.
 */
#include "plan.h"

#include <stdlib.h>

/* Someone who wants a region: where (a rank or a node), and as which array. */
struct wanter {
    int32_t where;
    int64_t array;
};

struct region {
    const int64_t *lo, *len; /* NULL: the whole array of a mesh */
    struct wanter *wanters;  /* one for each where */
    int64_t n;
};

/* The moves that one byte of a meeting costs at the least, summed over the wanters. */
typedef int64_t moves_fn(const rsd_plan *plan, const struct region *region, int64_t source);

static int64_t moves_to_ranks(const rsd_plan *plan, const struct region *region, int64_t source)
{
    int64_t moves = 0;
    for (int64_t i = 0; i < region->n; i++) {
        struct receiver receiver = plan_receiver(plan, region->wanters[i].array);
        moves += layout_array_rank(plan->src, plan_choose_sender(plan, &receiver, source)) !=
                 receiver.rank;
    }
    return moves;
}

static int64_t moves_to_nodes(const rsd_plan *plan, const struct region *region, int64_t source)
{
    int64_t moves = 0;
    for (int64_t i = 0; i < region->n; i++) {
        struct receiver receiver = plan_receiver(plan, region->wanters[i].array);
        moves += !plan_held_on_node(plan, &receiver, source);
    }
    return moves;
}

static int64_t moves_to_reduce(const rsd_plan *plan, const struct region *region, int64_t source)
{
    struct receiver receiver = plan_receiver(plan, region->wanters[0].array);
    for (int64_t i = 0; i < region->n; i++)
        if (plan_holds_term(plan, &receiver, source, region->wanters[i].array))
            return plan->reduced.total + region->n - 2;
    return plan->reduced.total + region->n - 1;
}

static rsd_status too_much(void)
{
    return fail(RSD_ELIMIT, "a bound of this plan does not fit into 63 bits");
}

static int by_where(const void *a, const void *b)
{
    const struct wanter *x = a, *y = b;
    if (x->where != y->where)
        return x->where < y->where ? -1 : 1;
    return (x->array > y->array) - (x->array < y->array);
}

/* Keeps one wanter of each where. */
static void unite_wanters(const rsd_plan *plan, bool nodes, struct region *region)
{
    int64_t n = 0;
    for (int64_t i = 0; i < region->n; i++) {
        int32_t rank = layout_array_rank(plan->dst, region->wanters[i].array);
        region->wanters[i].where = nodes ? plan->node_of[rank] : rank;
    }
    qsort(region->wanters, (size_t)region->n, sizeof *region->wanters, by_where);
    for (int64_t i = 0; i < region->n; i++)
        if (i == 0 || region->wanters[i].where != region->wanters[n - 1].where)
            region->wanters[n++] = region->wanters[i];
    region->n = n;
}

static rsd_status add_region(const rsd_plan *plan, bool nodes, moves_fn *moves,
                             struct region *region, struct overlap *overlap, int64_t *bound)
{
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(plan->src->dtype), nbytes;
    int64_t array = region->wanters[0].array;
    unite_wanters(plan, nodes, region);
    TRY(overlap_start(overlap, plan->dst, array, region->lo, region->len, plan->src,
                      &plan->src_groups));
    while (overlap_next(overlap)) {
        nbytes = box_volume(plan->src->ndim, overlap->len) * element_nbytes;
        if (!mul_i64(nbytes, moves(plan, region, overlap->other_position), &nbytes) ||
            !add_i64(*bound, nbytes, bound))
            return too_much();
    }
    return RSD_OK;
}

static rsd_status over_groups(const rsd_plan *plan, bool nodes, moves_fn *moves,
                              struct wanter *wanters, struct overlap *overlap, int64_t *bound)
{
    for (int64_t array = 0; array < plan->dst->mesh->nranks; array++) {
        int64_t group = plan_receiver(plan, array).group;
        struct region region = {.wanters = wanters, .n = plan_group_count(plan, group)};
        if (plan_group_array(plan, group, 0) != array)
            continue;
        for (int64_t i = 0; i < region.n; i++)
            wanters[i].array = plan_group_array(plan, group, i);
        TRY(add_region(plan, nodes, moves, &region, overlap, bound));
    }
    return RSD_OK;
}

static rsd_status over_cells(const rsd_plan *plan, bool nodes, moves_fn *moves,
                             struct wanter *wanters, struct overlap *overlap, int64_t *bound)
{
    struct box_groups groups;
    TRY(box_groups_build(&groups, plan->dst, true));
    rsd_status status = RSD_OK;
    for (int64_t c = 0; c < groups.ngroups && !status; c++) {
        int64_t first = groups.first_holder[c];
        struct region region = {.lo = groups.lo + c * groups.ndim,
                                .len = groups.len + c * groups.ndim,
                                .wanters = wanters,
                                .n = groups.first_holder[c + 1] - first};
        for (int64_t i = 0; i < region.n; i++)
            wanters[i].array = groups.holders[first + i];
        status = add_region(plan, nodes, moves, &region, overlap, bound);
    }
    box_groups_drop(&groups);
    return status;
}

static rsd_status over_regions(const rsd_plan *plan, bool nodes, moves_fn *moves, int64_t *bound)
{
    struct overlap overlap = {0};
    struct wanter *wanters = mem_new((size_t)rsd_layout_narrays(plan->dst), sizeof *wanters);
    if (!wanters)
        return RSD_ENOMEM;
    *bound = 0;
    rsd_status status =
        (plan->dst->mesh ? over_groups : over_cells)(plan, nodes, moves, wanters, &overlap, bound);
    overlap_drop(&overlap);
    mem_free(wanters);
    return status;
}

rsd_status plan_bound_moved(const rsd_plan *plan, int64_t *bound)
{
    return over_regions(plan, false, plan->reduced.total > 1 ? moves_to_reduce : moves_to_ranks,
                        bound);
}

rsd_status plan_bound_crossed(const rsd_plan *plan, int64_t *bound)
{
    *bound = plan->node_of ? -1 : 0;
    if (!plan->node_of || plan->reduced.total > 1)
        return RSD_OK;
    return over_regions(plan, true, moves_to_nodes, bound);
}
