/* choose.c - who gives a meeting to a getter: a closed form that every rank evaluates alike.
 *
 * A plain copy is taken whole from one holder: the getter itself, else one on its node, else the
 * holder that sits where the getter sits along the axes that replicate (so replicas of a mesh serve
 * their own group), else, for a getter outside of the source mesh, by the getter's number.
 *
 * Where many get the same, two things are shared out among leaders, and handed on from there:
 *
 *     a reduction            each leader combines its part of the box, the others get it from there
 *     a crossing of hosts    each getter of the host fetches its part, the others get it from there
 *
 *              whole box                 stage 0                     stage 1
 *        +-------------------+     leader 0 gets part 0        0 -> 1, 0 -> 2
 *        | part 0 | 1  |  2  |     leader 1 gets part 1        1 -> 0, 1 -> 2
 *        +-------------------+     leader 2 gets part 2        2 -> 0, 2 -> 1
 *
 * Leaders always are getters, so parts are combined and fetched in place: no memory but the
 * destination's is needed. Those that hold a term themselves lead a reduction if there are any,
 * which makes it move as little as possible (docs/planning.md).
 */
#include "plan.h"

#include <stdlib.h>

/* ---- getters and their groups ---- */

/* The getter's place among all getters: the copy it is of its boxes, and where those lie. Getters
 * of one source box get different numbers, so that its holders are used in turn. */
static int64_t number_of(const rsd_plan *plan, int64_t dst_array)
{
    const rsd_layout *dst = plan->dst;
    if (!dst->mesh)
        return dst_array;
    int64_t position = mesh_position_of_array(dst->mesh, dst_array), along = 0;
    for (int32_t d = 0; d < dst->ndim; d++) {
        int64_t coord = 0;
        for (int32_t k = 0; k < dst->cuts[d].ncuts; k++) {
            const struct cut *cut = &dst->cuts[d].cut[k];
            coord = coord * cut->count + position / cut->stride % cut->count;
        }
        along += coord;
    }
    return digits_index(&dst->copies, position) + dst->copies.total * along;
}

/* What kept terms and the choice among copies add to the position of the giver. */
static int64_t giver_offset(const rsd_plan *plan, int32_t rank, int64_t dst_array)
{
    const struct kept_terms *kept = &plan->kept;
    int64_t offset = 0;
    for (int32_t i = 0; i < kept->n; i++) {
        int64_t position = mesh_position_of_array(plan->dst->mesh, dst_array);
        offset += position / kept->dst_stride[i] % kept->count[i] * kept->src_stride[i];
    }
    const struct digits *copies = &plan->src->copies;
    if (copies->total == 1)
        return offset;
    int64_t in_src = mesh_position_of(plan->src->mesh, rank);
    if (in_src >= 0)
        return offset + digits_part(copies, in_src);
    return offset + digits_position(copies, number_of(plan, dst_array) % copies->total);
}

struct getter getter_of(const rsd_plan *plan, int64_t dst_array)
{
    const rsd_layout *dst = plan->dst;
    struct getter getter = {.rank = layout_array_rank(dst, dst_array), .array = dst_array};
    if (dst->mesh) {
        int64_t position = mesh_position_of_array(dst->mesh, dst_array);
        getter.group = position - digits_part(&dst->copies, position);
    } else {
        getter.group = plan->dst_cell_of[dst_array];
    }
    if (plan->src->mesh)
        getter.giver = giver_offset(plan, getter.rank, dst_array);
    return getter;
}

int64_t group_count(const rsd_plan *plan, int64_t group)
{
    if (plan->dst->mesh)
        return plan->dst->copies.total;
    return plan->dst_cells.first_holder[group + 1] - plan->dst_cells.first_holder[group];
}

int64_t group_member(const rsd_plan *plan, int64_t group, int64_t i)
{
    if (plan->dst->mesh)
        return mesh_array_at(plan->dst->mesh, group + digits_position(&plan->dst->copies, i));
    return plan->dst_cells.holders[plan->dst_cells.first_holder[group] + i];
}

int64_t group_of_meeting(const rsd_plan *plan, int64_t src_array, int64_t other)
{
    const struct kept_terms *kept = &plan->kept;
    for (int32_t i = 0; i < kept->n; i++) {
        int64_t position = mesh_position_of_array(plan->src->mesh, src_array);
        other += position / kept->src_stride[i] % kept->count[i] * kept->dst_stride[i];
    }
    return other;
}

/* ---- holders of a meeting ---- */

static int32_t node_of(const rsd_plan *plan, int32_t rank)
{
    return plan->node_of[rank];
}

static int64_t nholders(const rsd_plan *plan, int64_t source)
{
    if (plan->src->mesh)
        return plan->src->copies.total;
    return plan->src_cells.first_holder[source + 1] - plan->src_cells.first_holder[source];
}

/* The array of the i-th holder; on a mesh, of the getter's term. */
static int64_t holder(const rsd_plan *plan, const struct getter *getter, int64_t source, int64_t i)
{
    if (!plan->src->mesh)
        return plan->src_cells.holders[plan->src_cells.first_holder[source] + i];
    const struct digits *copies = &plan->src->copies;
    int64_t kept = getter->giver - digits_part(copies, getter->giver);
    return mesh_array_at(plan->src->mesh, source + kept + digits_position(copies, i));
}

static int64_t holder_of_same_rank(const rsd_plan *plan, const struct getter *getter,
                                   int64_t source)
{
    const int64_t *holders = plan->src_cells.holders;
    int64_t lo = plan->src_cells.first_holder[source],
            end = plan->src_cells.first_holder[source + 1];
    for (int64_t hi = end; lo < hi;) {
        int64_t middle = lo + (hi - lo) / 2;
        if (plan->src->box_ranks[holders[middle]] < getter->rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < end && plan->src->box_ranks[holders[lo]] == getter->rank ? holders[lo] : -1;
}

static int64_t holder_anywhere(const rsd_plan *plan, const struct getter *getter, int64_t source)
{
    if (plan->src->mesh)
        return mesh_array_at(plan->src->mesh, source + getter->giver);
    int64_t own = holder_of_same_rank(plan, getter, source);
    if (own >= 0)
        return own;
    return holder(plan, getter, source, number_of(plan, getter->array) % nholders(plan, source));
}

/* A holder on the getter's node, spread by its number; -1: none. */
static int64_t holder_on_node(const rsd_plan *plan, const struct getter *getter, int64_t source)
{
    int64_t n = nholders(plan, source), near = 0;
    int32_t node = node_of(plan, getter->rank);
    for (int64_t i = 0; i < n; i++)
        near +=
            node_of(plan, layout_array_rank(plan->src, holder(plan, getter, source, i))) == node;
    if (near == 0)
        return -1;
    int64_t wanted = number_of(plan, getter->array) % near;
    for (int64_t i = 0; i < n; i++) {
        int64_t array = holder(plan, getter, source, i);
        if (node_of(plan, layout_array_rank(plan->src, array)) == node && wanted-- == 0)
            return array;
    }
    return -1;
}

bool held_on_node(const rsd_plan *plan, const struct getter *getter, int64_t source)
{
    return holder_on_node(plan, getter, source) >= 0;
}

int64_t choose_giver(const rsd_plan *plan, const struct getter *getter, int64_t source)
{
    int64_t array = holder_anywhere(plan, getter, source);
    if (!plan->node_of || layout_array_rank(plan->src, array) == getter->rank)
        return array;
    int64_t near = holder_on_node(plan, getter, source);
    return near >= 0 ? near : array;
}

/* ---- shares ---- */

static rsd_status reserve(int64_t **list, size_t *room, size_t need)
{
    void *memory = *list;
    rsd_status status = mem_reserve(&memory, room, need, sizeof **list);
    *list = memory;
    return status;
}

static rsd_status add_share(struct shares *shares, int32_t ndim, const int64_t *lo,
                            const int64_t *len, struct share share)
{
    void *memory = shares->list;
    rsd_status status = mem_reserve(&memory, &shares->room, shares->n + 1, sizeof share);
    shares->list = memory;
    TRY(status);
    copy_i64s(share.lo, lo, ndim);
    copy_i64s(share.len, len, ndim);
    shares->list[shares->n++] = share;
    return RSD_OK;
}

/* Part i of n of a box, cut along its longest dim; false if it is empty. */
static bool part_of(int32_t ndim, const int64_t *lo, const int64_t *len, int64_t i, int64_t n,
                    int64_t *part_lo, int64_t *part_len)
{
    copy_i64s(part_lo, lo, ndim);
    copy_i64s(part_len, len, ndim);
    if (ndim == 0)
        return i == 0;
    int32_t longest = 0;
    for (int32_t d = 1; d < ndim; d++)
        if (len[d] > len[longest])
            longest = d;
    int64_t chunk = ceil_div(len[longest], n), begin = min_i64(i * chunk, len[longest]);
    part_lo[longest] = lo[longest] + begin;
    part_len[longest] = min_i64(chunk, len[longest] - begin);
    return part_len[longest] > 0;
}

struct noded {
    int32_t node;
    int64_t order, array;
};

static int by_node_then_order(const void *a, const void *b)
{
    const struct noded *x = a, *y = b;
    if (x->node != y->node)
        return x->node < y->node ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

static rsd_status sort_by_node(const rsd_plan *plan, struct shares *shares)
{
    size_t n = shares->nmembers;
    TRY(reserve(&shares->by_node, &shares->room_by_node, n));
    struct noded *sorted = mem_new(n, sizeof *sorted);
    if (!sorted)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        int64_t array = shares->members[i];
        sorted[i] =
            (struct noded){node_of(plan, layout_array_rank(plan->dst, array)), (int64_t)i, array};
    }
    qsort(sorted, n, sizeof *sorted, by_node_then_order);
    for (size_t i = 0; i < n; i++)
        shares->by_node[i] = sorted[i].array;
    mem_free(sorted);
    return RSD_OK;
}

static rsd_status load_group(const rsd_plan *plan, int64_t group, struct shares *shares)
{
    if (shares->group == group)
        return RSD_OK;
    shares->group = -1;
    size_t n = (size_t)group_count(plan, group);
    TRY(reserve(&shares->members, &shares->room_members, n));
    shares->nmembers = n;
    for (size_t i = 0; i < n; i++)
        shares->members[i] = group_member(plan, group, (int64_t)i);
    if (plan->node_of)
        TRY(sort_by_node(plan, shares));
    shares->group = group;
    return RSD_OK;
}

/* The members of the getter's group on its node. */
static void mates_of(const rsd_plan *plan, const struct getter *getter, const struct shares *shares,
                     const int64_t **mates, int64_t *n)
{
    int32_t node = node_of(plan, getter->rank);
    size_t lo = 0;
    for (size_t hi = shares->nmembers; lo < hi;) {
        size_t middle = lo + (hi - lo) / 2;
        if (node_of(plan, layout_array_rank(plan->dst, shares->by_node[middle])) < node)
            lo = middle + 1;
        else
            hi = middle;
    }
    size_t end = lo;
    while (end < shares->nmembers &&
           node_of(plan, layout_array_rank(plan->dst, shares->by_node[end])) == node)
        end++;
    *mates = shares->by_node + lo;
    *n = (int64_t)(end - lo);
}

/* Hands a box from one array to the getter: straight, or over a host boundary once for all mates.
 */
static rsd_status deliver(const rsd_plan *plan, const struct getter *getter, struct share from,
                          const int64_t *lo, const int64_t *len, struct shares *shares)
{
    int32_t ndim = plan->src->ndim;
    int32_t rank = layout_array_rank(from.from_dst ? plan->dst : plan->src, from.array);
    const int64_t *mates = NULL;
    int64_t nmates = 1;
    if (plan->node_of && node_of(plan, rank) != node_of(plan, getter->rank))
        mates_of(plan, getter, shares, &mates, &nmates);
    if (nmates < 2)
        return add_share(shares, ndim, lo, len, from);
    for (int64_t i = 0; i < nmates; i++) {
        int64_t part_lo[RSD_MAX_DIMS], part_len[RSD_MAX_DIMS];
        if (!part_of(ndim, lo, len, i, nmates, part_lo, part_len))
            continue;
        struct share share = from;
        if (mates[i] != getter->array)
            share = (struct share){.array = mates[i], .stage = from.stage + 1, .from_dst = true};
        TRY(add_share(shares, ndim, part_lo, part_len, share));
    }
    return RSD_OK;
}

static int by_giver_rank(const void *a, const void *b)
{
    const struct share *x = a, *y = b; /* arrays ascend with ranks */
    return (x->array > y->array) - (x->array < y->array);
}

/* All terms of a box, combined at the getter in ascending rank. */
static rsd_status combine(const rsd_plan *plan, const struct getter *getter, int64_t source,
                          const int64_t *lo, const int64_t *len, struct shares *shares)
{
    size_t first = shares->n;
    for (int64_t t = 0; t < plan->reduced.total; t++) {
        int64_t position = source + getter->giver + digits_position(&plan->reduced, t);
        struct share share = {.array = mesh_array_at(plan->src->mesh, position), .reduce = true};
        TRY(add_share(shares, plan->src->ndim, lo, len, share));
    }
    qsort(shares->list + first, shares->n - first, sizeof *shares->list, by_giver_rank);
    return RSD_OK;
}

bool holds_term(const rsd_plan *plan, const struct getter *getter, int64_t source,
                int64_t dst_array)
{
    const rsd_layout *src = plan->src;
    int64_t position = mesh_position_of(src->mesh, layout_array_rank(plan->dst, dst_array));
    if (position < 0)
        return false;
    int64_t kept = getter->giver - digits_part(&src->copies, getter->giver);
    return position - digits_part(&src->copies, position) - digits_part(&plan->reduced, position) ==
           source + kept;
}

static rsd_status find_leaders(const rsd_plan *plan, const struct getter *getter, int64_t source,
                               struct shares *shares)
{
    TRY(reserve(&shares->leaders, &shares->room_leaders, shares->nmembers));
    shares->nleaders = 0;
    for (size_t i = 0; i < shares->nmembers; i++)
        if (holds_term(plan, getter, source, shares->members[i]))
            shares->leaders[shares->nleaders++] = shares->members[i];
    if (shares->nleaders == 0) {
        copy_i64s(shares->leaders, shares->members, (int64_t)shares->nmembers);
        shares->nleaders = shares->nmembers;
    }
    return RSD_OK;
}

static rsd_status combine_at_leaders(const rsd_plan *plan, const struct getter *getter,
                                     int64_t source, const int64_t *lo, const int64_t *len,
                                     struct shares *shares)
{
    TRY(find_leaders(plan, getter, source, shares));
    int64_t n = (int64_t)shares->nleaders;
    for (int64_t i = 0; i < n; i++) {
        int64_t part_lo[RSD_MAX_DIMS], part_len[RSD_MAX_DIMS];
        if (!part_of(plan->src->ndim, lo, len, i, n, part_lo, part_len))
            continue;
        struct share from = {.array = shares->leaders[i], .stage = 1, .from_dst = true};
        if (from.array == getter->array)
            TRY(combine(plan, getter, source, part_lo, part_len, shares));
        else
            TRY(deliver(plan, getter, from, part_lo, part_len, shares));
    }
    return RSD_OK;
}

rsd_status choose_shares(const rsd_plan *plan, const struct getter *getter, int64_t source,
                         const int64_t *lo, const int64_t *len, struct shares *shares)
{
    shares->n = 0;
    if (plan->node_of || plan->reduced.total > 1)
        TRY(load_group(plan, getter->group, shares));
    if (plan->reduced.total == 1) {
        struct share from = {.array = choose_giver(plan, getter, source)};
        return deliver(plan, getter, from, lo, len, shares);
    }
    if (shares->nmembers == 1)
        return combine(plan, getter, source, lo, len, shares);
    return combine_at_leaders(plan, getter, source, lo, len, shares);
}

void shares_drop(struct shares *shares)
{
    mem_free(shares->list);
    mem_free(shares->members);
    mem_free(shares->by_node);
    mem_free(shares->leaders);
    *shares = (struct shares){.group = -1};
}
