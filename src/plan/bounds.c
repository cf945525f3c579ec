/* bounds.c - lower bounds of the bytes that any plan moves (docs/planning.md has the proofs).
 *
 * A copy: every rank must receive once what it wants and does not hold. The same argument over nodes
 * instead of ranks bounds what crosses nodes.
 *
 * A reduction of p terms to r ranks: until the first rank has the whole value, at least p - 1 moves combine
 * terms, or p if that rank holds no term. After that, each of the other r - 1 ranks must receive
 * something more. So each element needs p + r - 2 moves, or p + r - 1 if no rank that wants it holds a term.
 * Of these, r - 1 may have the narrower dtype of a plan that casts.
 *
 * Boxes that ranks want may overlap, so bounds are summed over regions that the same ranks want: the groups
 * of a mesh, or disjoint box groups.
 */
#include "plan.h"

#include <stdlib.h>

/* A destination array that wants a region, and its rank or node. */
struct wanter {
    int32_t where;
    int64_t array;
};

struct wanted_region {
    const int64_t *lo, *len; /* NULL: the whole array of a mesh */
    struct wanter *wanters;  /* one for each rank or node */
    int64_t n;
};

/* The least number of moves of each element of an overlap, for all wanters together. */
struct least_moves {
    int64_t terms, values;
};
typedef struct least_moves count_moves_fn(const rsd_plan *plan, const struct wanted_region *region,
                                          int64_t source);

static struct least_moves count_moves_to_ranks(const rsd_plan *plan,
                                               const struct wanted_region *region, int64_t source)
{
    int64_t moves = 0;
    for (int64_t i = 0; i < region->n; i++) {
        struct receiver receiver = plan_receiver(plan, region->wanters[i].array);
        moves += layout_array_rank(plan->src, plan_choose_sender(plan, &receiver, source)) !=
                 receiver.rank;
    }
    return (struct least_moves){.values = moves};
}

static struct least_moves count_moves_to_nodes(const rsd_plan *plan,
                                               const struct wanted_region *region, int64_t source)
{
    int64_t moves = 0;
    for (int64_t i = 0; i < region->n; i++) {
        struct receiver receiver = plan_receiver(plan, region->wanters[i].array);
        moves += !plan_node_holds(plan, &receiver, source);
    }
    return (struct least_moves){.values = moves};
}

static struct least_moves count_moves_to_reduce(const rsd_plan *plan,
                                                const struct wanted_region *region, int64_t source)
{
    struct receiver receiver = plan_receiver(plan, region->wanters[0].array);
    bool has_term = false;
    for (int64_t i = 0; i < region->n && !has_term; i++)
        has_term = plan_holds_term(plan, &receiver, source, region->wanters[i].array);
    return (struct least_moves){.terms = plan->reduced.total - has_term, .values = region->n - 1};
}

static rsd_status fail_on_bound(void)
{
    return fail(RSD_ELIMIT, "a lower bound of the plan exceeds 2^63 - 1 bytes");
}

static int compare_wanters(const void *a, const void *b)
{
    const struct wanter *x = a, *y = b;
    if (x->where != y->where)
        return x->where < y->where ? -1 : 1;
    return (x->array > y->array) - (x->array < y->array);
}

/* Keeps one wanter of each rank or node. */
static void merge_wanters(const rsd_plan *plan, bool nodes, struct wanted_region *region)
{
    int64_t n = 0;
    for (int64_t i = 0; i < region->n; i++) {
        int32_t rank = layout_array_rank(plan->dst, region->wanters[i].array);
        region->wanters[i].where = nodes ? plan->node_of[rank] : rank;
    }
    qsort(region->wanters, (size_t)region->n, sizeof *region->wanters, compare_wanters);
    for (int64_t i = 0; i < region->n; i++)
        if (i == 0 || region->wanters[i].where != region->wanters[n - 1].where)
            region->wanters[n++] = region->wanters[i];
    region->n = n;
}

/* Adds the bytes that any plan must move for one region to *bound. */
static rsd_status add_region(const rsd_plan *plan, bool nodes, count_moves_fn *moves,
                             struct wanted_region *region, struct overlap *overlap, int64_t *bound)
{
    int64_t term_nbytes = (int64_t)rsd_dtype_nbytes(plan->src->dtype),
            value_nbytes = (int64_t)rsd_dtype_nbytes(plan->narrower);
    int64_t array = region->wanters[0].array;
    merge_wanters(plan, nodes, region);
    TRY(overlap_start(overlap, plan->dst, array, region->lo, region->len, plan->src,
                      &plan->src_groups));
    while (overlap_next(overlap)) {
        struct least_moves least = moves(plan, region, overlap->other_position);
        int64_t volume = box_volume(plan->src->ndim, overlap->len), terms, values;
        if (!mul_i64(volume * term_nbytes, least.terms, &terms) ||
            !mul_i64(volume * value_nbytes, least.values, &values) ||
            !add_i64(*bound, terms, bound) || !add_i64(*bound, values, bound))
            return fail_on_bound();
    }
    return RSD_OK;
}

/* Adds the regions of a destination mesh: one for each group of arrays that receive the same. */
static rsd_status add_mesh_regions(const rsd_plan *plan, bool nodes, count_moves_fn *moves,
                                   struct wanter *wanters, struct overlap *overlap, int64_t *bound)
{
    for (int64_t array = 0; array < plan->dst->mesh->nranks; array++) {
        int64_t group = plan_receiver(plan, array).group;
        struct wanted_region region = {.wanters = wanters, .n = plan_group_count(plan, group)};
        if (plan_group_array(plan, group, 0) != array)
            continue;
        for (int64_t i = 0; i < region.n; i++)
            wanters[i].array = plan_group_array(plan, group, i);
        TRY(add_region(plan, nodes, moves, &region, overlap, bound));
    }
    return RSD_OK;
}

/* Adds the regions of explicit destination boxes, cut until they do not overlap. */
static rsd_status add_box_regions(const rsd_plan *plan, bool nodes, count_moves_fn *moves,
                                  struct wanter *wanters, struct overlap *overlap, int64_t *bound)
{
    struct box_groups groups;
    TRY(box_groups_build(&groups, plan->dst, true));
    rsd_status status = RSD_OK;
    for (int64_t c = 0; c < groups.ngroups && !status; c++) {
        int64_t first = groups.first_holder[c];
        struct wanted_region region = {.lo = groups.lo + c * groups.ndim,
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

/* Sets *bound to the sum over all regions. With `nodes`, counts moves between nodes instead of ranks. */
static rsd_status sum_regions(const rsd_plan *plan, bool nodes, count_moves_fn *moves,
                              int64_t *bound)
{
    struct overlap overlap = {0};
    struct wanter *wanters = mem_new((size_t)rsd_layout_narrays(plan->dst), sizeof *wanters);
    if (!wanters)
        return RSD_ENOMEM;
    *bound = 0;
    rsd_status status = (plan->dst->mesh ? add_mesh_regions : add_box_regions)(
        plan, nodes, moves, wanters, &overlap, bound);
    overlap_drop(&overlap);
    mem_free(wanters);
    return status;
}

rsd_status plan_bound_moved(const rsd_plan *plan, int64_t *bound)
{
    return sum_regions(
        plan, false, plan->reduced.total > 1 ? count_moves_to_reduce : count_moves_to_ranks, bound);
}

rsd_status plan_bound_crossed(const rsd_plan *plan, int64_t *bound)
{
    *bound = plan->node_of ? -1 : 0;
    if (!plan->node_of || plan->reduced.total > 1)
        return RSD_OK;
    return sum_regions(plan, true, count_moves_to_nodes, bound);
}
