/* shares.c - what a getter takes of one meeting when many want the same: parts, from leaders.
 *
 * Two things are shared out among leaders, and handed on from there:
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
 * destination's is needed. Those that hold a term themselves lead a reduction if there are any, which
 * makes it move as little as possible (docs/planning.md).
 *
 * A giver asks the same on behalf of every getter, and names itself: then only its own shares are
 * found, without going through those of everybody else.
 */
#include "plan.h"

#include <assert.h>
#include <stdlib.h>

static int32_t node_of_dst(const rsd_plan *plan, int64_t array)
{
    return plan->node_of[layout_array_rank(plan->dst, array)];
}

/* ---- a group ---- */

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

static rsd_status sort_by_node(const rsd_plan *plan, struct split *shares)
{
    size_t n = shares->nmembers;
    TRY(GROW(shares->by_node, shares->by_node_capacity, n));
    struct noded *sorted = mem_new(n, sizeof *sorted);
    if (!sorted)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        int64_t array = shares->members[i];
        sorted[i] = (struct noded){node_of_dst(plan, array), (int64_t)i, array};
    }
    qsort(sorted, n, sizeof *sorted, by_node_then_order);
    for (size_t i = 0; i < n; i++)
        shares->by_node[i] = sorted[i].array;
    mem_free(sorted);
    return RSD_OK;
}

rsd_status split_load(const rsd_plan *plan, int64_t group, struct split *shares)
{
    if (shares->group == group)
        return RSD_OK;
    shares->group = -1;
    shares->led_source = -1;
    size_t n = (size_t)plan_group_count(plan, group);
    TRY(GROW(shares->members, shares->members_capacity, n));
    shares->nmembers = n;
    for (size_t i = 0; i < n; i++)
        shares->members[i] = plan_group_array(plan, group, (int64_t)i);
    if (plan->node_of)
        TRY(sort_by_node(plan, shares));
    shares->group = group;
    return RSD_OK;
}

int64_t split_node_members(const rsd_plan *plan, const struct split *shares, int64_t array,
                           const int64_t **mates)
{
    int32_t node = node_of_dst(plan, array);
    size_t lo = 0;
    for (size_t hi = shares->nmembers; lo < hi;) {
        size_t middle = lo + (hi - lo) / 2;
        if (node_of_dst(plan, shares->by_node[middle]) < node)
            lo = middle + 1;
        else
            hi = middle;
    }
    size_t end = lo;
    while (end < shares->nmembers && node_of_dst(plan, shares->by_node[end]) == node)
        end++;
    *mates = shares->by_node + lo;
    return (int64_t)(end - lo);
}

/* ---- leaders ---- */

/* Finds who leads the reduction of a meeting; leader_index is theirs by member, -1 for others. */
static rsd_status find_leaders(const rsd_plan *plan, const struct receiver *receiver,
                               int64_t source, struct split *shares)
{
    if (shares->led_source == source)
        return RSD_OK;
    shares->led_source = -1;
    TRY(GROW(shares->leaders, shares->leaders_capacity, shares->nmembers));
    TRY(GROW(shares->leader_index, shares->leader_index_capacity, shares->nmembers));
    bool all = true;
    for (size_t i = 0; i < shares->nmembers && all; i++)
        all = !plan_holds_term(plan, receiver, source, shares->members[i]);
    shares->nleaders = 0;
    for (size_t i = 0; i < shares->nmembers; i++) {
        bool leads = all || plan_holds_term(plan, receiver, source, shares->members[i]);
        shares->leader_index[i] = leads ? (int64_t)shares->nleaders : -1;
        if (leads)
            shares->leaders[shares->nleaders++] = shares->members[i];
    }
    shares->led_source = source;
    return RSD_OK;
}

static int64_t leader_index(const rsd_plan *plan, const struct split *shares, int64_t array)
{
    return shares->leader_index[plan_group_index(plan, shares->group, array)];
}

rsd_status split_leads(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                       struct split *shares, bool *leads)
{
    TRY(find_leaders(plan, receiver, source, shares));
    *leads = leader_index(plan, shares, receiver->array) >= 0;
    return RSD_OK;
}

/* ---- shares ---- */

/* One question: what does the getter take of a meeting, from anyone or only from one giver? */
struct question {
    const rsd_plan *plan;
    const struct receiver *receiver;
    int64_t source;
    const struct sender *only;
    struct split *shares;
};

static bool wanted(const struct question *q, const struct split_part *share)
{
    return !q->only ||
           (share->array == q->only->array && share->from_destination == q->only->from_destination);
}

static rsd_status add_share(const struct question *q, const int64_t *lo, const int64_t *len,
                            struct split_part share)
{
    struct split *shares = q->shares;
    if (!wanted(q, &share))
        return RSD_OK;
    TRY(GROW(shares->list, shares->capacity, shares->n + 1));
    copy_i64s(share.lo, lo, q->plan->src->ndim);
    copy_i64s(share.len, len, q->plan->src->ndim);
    shares->list[shares->n++] = share;
    return RSD_OK;
}

/* A box, not empty, that n share: cut along its longest dim into n parts or fewer. */
struct parts {
    int32_t ndim, dim;
    const int64_t *lo, *len;
    int64_t chunk, n;
};

static struct parts parts_of(int32_t ndim, const int64_t *lo, const int64_t *len, int64_t n)
{
    assert(n > 0);
    struct parts parts = {.ndim = ndim, .lo = lo, .len = len, .chunk = 1, .n = 1};
    for (int32_t d = 1; d < ndim; d++)
        if (len[d] > len[parts.dim])
            parts.dim = d;
    if (ndim > 0) {
        parts.chunk = ceil_div(len[parts.dim], n);
        parts.n = ceil_div(len[parts.dim], parts.chunk);
    }
    return parts;
}

static void part_at(const struct parts *parts, int64_t i, int64_t *lo, int64_t *len)
{
    copy_i64s(lo, parts->lo, parts->ndim);
    copy_i64s(len, parts->len, parts->ndim);
    if (parts->ndim == 0)
        return;
    lo[parts->dim] = parts->lo[parts->dim] + i * parts->chunk;
    len[parts->dim] = min_i64(parts->chunk, parts->len[parts->dim] - i * parts->chunk);
}

/* Hands a box from one array to the getter: straight, or over a host boundary once for all mates. */
static rsd_status deliver(const struct question *q, struct split_part from, const int64_t *lo,
                          const int64_t *len)
{
    const rsd_plan *plan = q->plan;
    int32_t rank = layout_array_rank(from.from_destination ? plan->dst : plan->src, from.array);
    const int64_t *mates = NULL;
    int64_t nmates = 1;
    if (plan->node_of && plan->node_of[rank] != plan->node_of[q->receiver->rank])
        nmates = split_node_members(plan, q->shares, q->receiver->array, &mates);
    if (nmates < 2)
        return add_share(q, lo, len, from);
    struct parts parts = parts_of(plan->src->ndim, lo, len, nmates);
    for (int64_t i = 0; i < parts.n; i++) {
        int64_t part_lo[RSD_MAX_DIMS], part_len[RSD_MAX_DIMS];
        struct split_part share = from;
        if (mates[i] != q->receiver->array)
            share = (struct split_part){
                .array = mates[i], .stage = from.stage + 1, .from_destination = true};
        part_at(&parts, i, part_lo, part_len);
        TRY(add_share(q, part_lo, part_len, share));
    }
    return RSD_OK;
}

static int by_order(const void *a, const void *b)
{
    const struct split_part *x = a, *y = b;
    return (x->order > y->order) - (x->order < y->order);
}

/* All terms of a box, combined at the getter in ascending rank of their first copies: whichever copy a
 * getter takes its terms from, the bits of the result are the same. */
static rsd_status combine(const struct question *q, const int64_t *lo, const int64_t *len)
{
    const rsd_plan *plan = q->plan;
    const rsd_mesh *mesh = plan->src->mesh;
    int64_t copy = digits_part(&plan->src->copies, q->receiver->sender);
    int64_t term = q->source + q->receiver->sender - copy;
    if (q->only) {
        int64_t position =
            q->only->from_destination ? -1 : mesh_position_of_array(mesh, q->only->array);
        if (position < 0 || position - digits_part(&plan->reduced, position) != term + copy)
            return RSD_OK;
        return add_share(q, lo, len, (struct split_part){.array = q->only->array, .reduce = true});
    }
    size_t first = q->shares->n;
    for (int64_t t = 0; t < plan->reduced.total; t++) {
        int64_t position = term + digits_position(&plan->reduced, t);
        TRY(add_share(q, lo, len,
                      (struct split_part){.array = mesh_array_at(mesh, position + copy),
                                          .order = mesh_array_at(mesh, position),
                                          .reduce = true}));
    }
    qsort(q->shares->list + first, q->shares->n - first, sizeof *q->shares->list, by_order);
    return RSD_OK;
}

/* The part of one leader: combined if that is the getter, else handed on by it. */
static rsd_status from_leader(const struct question *q, const struct parts *parts, int64_t i)
{
    const struct split *shares = q->shares;
    int64_t part_lo[RSD_MAX_DIMS], part_len[RSD_MAX_DIMS];
    if (i < 0 || i >= parts->n)
        return RSD_OK;
    part_at(parts, i, part_lo, part_len);
    if (shares->leaders[i] == q->receiver->array)
        return combine(q, part_lo, part_len);
    struct split_part from = {.array = shares->leaders[i], .stage = 1, .from_destination = true};
    return deliver(q, from, part_lo, part_len);
}

static rsd_status combine_at_leaders(const struct question *q, const int64_t *lo,
                                     const int64_t *len)
{
    const rsd_plan *plan = q->plan;
    TRY(find_leaders(plan, q->receiver, q->source, q->shares));
    struct parts parts = parts_of(plan->src->ndim, lo, len, (int64_t)q->shares->nleaders);
    /* One giver: as a holder of a term it serves the getter's own part, as a leader its own part;
     * only a mate of the getter may have to do with the parts of all leaders. */
    if (q->only && !q->only->from_destination)
        return from_leader(q, &parts, leader_index(plan, q->shares, q->receiver->array));
    if (q->only &&
        !(plan->node_of && node_of_dst(plan, q->only->array) == plan->node_of[q->receiver->rank]))
        return from_leader(q, &parts, leader_index(plan, q->shares, q->only->array));
    for (int64_t i = 0; i < parts.n; i++)
        TRY(from_leader(q, &parts, i));
    return RSD_OK;
}

rsd_status split_choose(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                        const int64_t *lo, const int64_t *len, const struct sender *only,
                        struct split *shares)
{
    struct question q = {plan, receiver, source, only, shares};
    shares->n = 0;
    TRY(split_load(plan, receiver->group, shares));
    if (plan->reduced.total == 1)
        return deliver(&q, (struct split_part){.array = plan_choose_sender(plan, receiver, source)},
                       lo, len);
    if (shares->nmembers == 1)
        return combine(&q, lo, len);
    return combine_at_leaders(&q, lo, len);
}

void split_drop(struct split *shares)
{
    mem_free(shares->list);
    mem_free(shares->members);
    mem_free(shares->by_node);
    mem_free(shares->leaders);
    mem_free(shares->leader_index);
    *shares = (struct split){.group = -1};
}
