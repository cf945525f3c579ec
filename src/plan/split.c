/* split.c - splits an overlap that several ranks want into parts, one for each leader.
 *
 * Two kinds of overlaps are split. Leaders receive their parts first, and then forward them:
 *
 *     a reduction            each leader combines the terms of its part
 *     a copy to a node       each receiver on the node is a leader, so each part crosses nodes once
 *
 *              whole box                 stage 0                       stage 1
 *        +-------------------+     leader 0 receives part 0      0 -> 1, 0 -> 2
 *        | part 0 | 1  |  2  |     leader 1 receives part 1      1 -> 0, 1 -> 2
 *        +-------------------+     leader 2 receives part 2      2 -> 0, 2 -> 1
 *
 * Leaders are receivers themselves, so the parts are combined and received in the destination arrays, and no
 * other memory is needed. If some receivers hold a term, only these lead a reduction, which makes it move the
 * least (docs/planning.md).
 *
 * A sender evaluates the same rule for every receiver. It passes itself as `only`, so that only the parts
 * that it sends are listed.
 */
#include "plan.h"

#include <assert.h>
#include <stdlib.h>

static int32_t node_of_dst(const rsd_plan *plan, int64_t array)
{
    return plan->node_of[layout_array_rank(plan->dst, array)];
}

/* ---- members of a group ---- */

struct node_member {
    int32_t node;
    int64_t order, array;
};

static int compare_node_members(const void *a, const void *b)
{
    const struct node_member *x = a, *y = b;
    if (x->node != y->node)
        return x->node < y->node ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Sorts the members of the group by node, and by number on each node. */
static rsd_status sort_members_by_node(const rsd_plan *plan, struct split *split)
{
    size_t n = split->nmembers;
    TRY(GROW(split->by_node, split->by_node_capacity, n));
    struct node_member *sorted = mem_new(n, sizeof *sorted);
    if (!sorted)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        int64_t array = split->members[i];
        sorted[i] = (struct node_member){node_of_dst(plan, array), (int64_t)i, array};
    }
    qsort(sorted, n, sizeof *sorted, compare_node_members);
    for (size_t i = 0; i < n; i++)
        split->by_node[i] = sorted[i].array;
    mem_free(sorted);
    return RSD_OK;
}

rsd_status split_load(const rsd_plan *plan, int64_t group, struct split *split)
{
    if (split->group == group)
        return RSD_OK;
    split->group = -1;
    split->led_source = -1;
    size_t n = (size_t)plan_group_count(plan, group);
    TRY(GROW(split->members, split->members_capacity, n));
    split->nmembers = n;
    for (size_t i = 0; i < n; i++)
        split->members[i] = plan_group_array(plan, group, (int64_t)i);
    if (plan->node_of)
        TRY(sort_members_by_node(plan, split));
    split->group = group;
    return RSD_OK;
}

int64_t split_node_members(const rsd_plan *plan, const struct split *split, int64_t array,
                           const int64_t **members)
{
    int32_t node = node_of_dst(plan, array);
    size_t lo = 0;
    for (size_t hi = split->nmembers; lo < hi;) {
        size_t middle = lo + (hi - lo) / 2;
        if (node_of_dst(plan, split->by_node[middle]) < node)
            lo = middle + 1;
        else
            hi = middle;
    }
    size_t end = lo;
    while (end < split->nmembers && node_of_dst(plan, split->by_node[end]) == node)
        end++;
    *members = split->by_node + lo;
    return (int64_t)(end - lo);
}

/* ---- leaders ---- */

/* Finds the leaders of the reduction of an overlap. leader_index is -1 for members that do not lead. */
static rsd_status find_leaders(const rsd_plan *plan, const struct receiver *receiver,
                               int64_t source, struct split *split)
{
    if (split->led_source == source)
        return RSD_OK;
    split->led_source = -1;
    TRY(GROW(split->leaders, split->leaders_capacity, split->nmembers));
    TRY(GROW(split->leader_index, split->leader_index_capacity, split->nmembers));
    bool all = true;
    for (size_t i = 0; i < split->nmembers && all; i++)
        all = !plan_holds_term(plan, receiver, source, split->members[i]);
    split->nleaders = 0;
    for (size_t i = 0; i < split->nmembers; i++) {
        bool leads = all || plan_holds_term(plan, receiver, source, split->members[i]);
        split->leader_index[i] = leads ? (int64_t)split->nleaders : -1;
        if (leads)
            split->leaders[split->nleaders++] = split->members[i];
    }
    split->led_source = source;
    return RSD_OK;
}

static int64_t find_leader_index(const rsd_plan *plan, const struct split *split, int64_t array)
{
    return split->leader_index[plan_group_index(plan, split->group, array)];
}

rsd_status split_leads(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                       struct split *split, bool *leads)
{
    TRY(find_leaders(plan, receiver, source, split));
    *leads = find_leader_index(plan, split, receiver->array) >= 0;
    return RSD_OK;
}

/* ---- parts ---- */

/* The arguments of split_choose. */
struct split_query {
    const rsd_plan *plan;
    const struct receiver *receiver;
    int64_t source;
    const struct sender *only;
    struct split *split;
};

static bool matches_sender(const struct split_query *q, const struct split_part *part)
{
    return !q->only ||
           (part->array == q->only->array && part->from_destination == q->only->from_destination);
}

/* Adds a part to the list, unless only the parts of another sender are listed. */
static rsd_status add_split_part(const struct split_query *q, const int64_t *lo, const int64_t *len,
                                 struct split_part part)
{
    struct split *split = q->split;
    if (!matches_sender(q, &part))
        return RSD_OK;
    TRY(GROW(split->list, split->capacity, split->n + 1));
    copy_i64s(part.lo, lo, q->plan->src->ndim);
    copy_i64s(part.len, len, q->plan->src->ndim);
    split->list[split->n++] = part;
    return RSD_OK;
}

/* A box that is cut along its longest dim into n parts. */
struct box_parts {
    int32_t ndim, dim;
    const int64_t *lo, *len;
    int64_t chunk, n;
};

/* Cuts a box into at most n parts. Requires that the box is not empty. */
static struct box_parts cut_box(int32_t ndim, const int64_t *lo, const int64_t *len, int64_t n)
{
    assert(n > 0);
    struct box_parts parts = {.ndim = ndim, .lo = lo, .len = len, .chunk = 1, .n = 1};
    for (int32_t d = 1; d < ndim; d++)
        if (len[d] > len[parts.dim])
            parts.dim = d;
    if (ndim > 0) {
        parts.chunk = ceil_div(len[parts.dim], n);
        parts.n = ceil_div(len[parts.dim], parts.chunk);
    }
    return parts;
}

static void set_part_box(const struct box_parts *parts, int64_t i, int64_t *lo, int64_t *len)
{
    copy_i64s(lo, parts->lo, parts->ndim);
    copy_i64s(len, parts->len, parts->ndim);
    if (parts->ndim == 0)
        return;
    lo[parts->dim] = parts->lo[parts->dim] + i * parts->chunk;
    len[parts->dim] = min_i64(parts->chunk, parts->len[parts->dim] - i * parts->chunk);
}

/* Adds the parts of a box that one array sends to the receiver. If the sender is on another node, the box is
 * split among the receivers on the receiver's node, so that it crosses once. */
static rsd_status add_delivery(const struct split_query *q, struct split_part from,
                               const int64_t *lo, const int64_t *len)
{
    const rsd_plan *plan = q->plan;
    int32_t rank = layout_array_rank(from.from_destination ? plan->dst : plan->src, from.array);
    const int64_t *members = NULL;
    int64_t nmembers = 1;
    if (plan->node_of && plan->node_of[rank] != plan->node_of[q->receiver->rank])
        nmembers = split_node_members(plan, q->split, q->receiver->array, &members);
    if (nmembers < 2)
        return add_split_part(q, lo, len, from);
    struct box_parts parts = cut_box(plan->src->ndim, lo, len, nmembers);
    for (int64_t i = 0; i < parts.n; i++) {
        int64_t part_lo[RSD_MAX_DIMS], part_len[RSD_MAX_DIMS];
        struct split_part part = from;
        if (members[i] != q->receiver->array)
            part = (struct split_part){
                .array = members[i], .stage = from.stage + 1, .from_destination = true};
        set_part_box(&parts, i, part_lo, part_len);
        TRY(add_split_part(q, part_lo, part_len, part));
    }
    return RSD_OK;
}

static int compare_split_order(const void *a, const void *b)
{
    const struct split_part *x = a, *y = b;
    return (x->order > y->order) - (x->order < y->order);
}

/* Adds all terms of a box, which the receiver combines in ascending rank of their first copies. So the result
 * has the same bits, whichever copies of the terms a receiver receives. */
static rsd_status add_terms(const struct split_query *q, const int64_t *lo, const int64_t *len)
{
    const rsd_plan *plan = q->plan;
    const rsd_mesh *mesh = plan->src->mesh;
    int64_t copy = digits_part(&plan->src->copies, q->receiver->sender_offset);
    int64_t term = q->source + q->receiver->sender_offset - copy;
    if (q->only) {
        int64_t position =
            q->only->from_destination ? -1 : mesh_position_of_array(mesh, q->only->array);
        if (position < 0 || position - digits_part(&plan->reduced, position) != term + copy)
            return RSD_OK;
        return add_split_part(q, lo, len,
                              (struct split_part){.array = q->only->array, .reduce = true});
    }
    size_t first = q->split->n;
    for (int64_t t = 0; t < plan->reduced.total; t++) {
        int64_t position = term + digits_position(&plan->reduced, t);
        TRY(add_split_part(q, lo, len,
                           (struct split_part){.array = mesh_array_at(mesh, position + copy),
                                               .order = mesh_array_at(mesh, position),
                                               .reduce = true}));
    }
    qsort(q->split->list + first, q->split->n - first, sizeof *q->split->list, compare_split_order);
    return RSD_OK;
}

/* Adds the part of one leader: its terms if the leader is the receiver, else what the leader forwards. */
static rsd_status add_leader_part(const struct split_query *q, const struct box_parts *parts,
                                  int64_t i)
{
    const struct split *split = q->split;
    int64_t part_lo[RSD_MAX_DIMS], part_len[RSD_MAX_DIMS];
    if (i < 0 || i >= parts->n)
        return RSD_OK;
    set_part_box(parts, i, part_lo, part_len);
    if (split->leaders[i] == q->receiver->array)
        return add_terms(q, part_lo, part_len);
    struct split_part from = {.array = split->leaders[i], .stage = 1, .from_destination = true};
    return add_delivery(q, from, part_lo, part_len);
}

/* Adds the parts of all leaders of a reduction that the receiver receives. */
static rsd_status add_leader_parts(const struct split_query *q, const int64_t *lo,
                                   const int64_t *len)
{
    const rsd_plan *plan = q->plan;
    TRY(find_leaders(plan, q->receiver, q->source, q->split));
    struct box_parts parts = cut_box(plan->src->ndim, lo, len, (int64_t)q->split->nleaders);
    /* As a holder of a term, one sender sends only to the receiver's own part, and as a leader only its own
     * part. Only a sender on the receiver's node may forward the parts of all leaders. */
    if (q->only && !q->only->from_destination)
        return add_leader_part(q, &parts, find_leader_index(plan, q->split, q->receiver->array));
    if (q->only &&
        !(plan->node_of && node_of_dst(plan, q->only->array) == plan->node_of[q->receiver->rank]))
        return add_leader_part(q, &parts, find_leader_index(plan, q->split, q->only->array));
    for (int64_t i = 0; i < parts.n; i++)
        TRY(add_leader_part(q, &parts, i));
    return RSD_OK;
}

rsd_status split_choose(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                        const int64_t *lo, const int64_t *len, const struct sender *only,
                        struct split *split)
{
    struct split_query q = {plan, receiver, source, only, split};
    split->n = 0;
    TRY(split_load(plan, receiver->group, split));
    if (plan->reduced.total == 1)
        return add_delivery(
            &q, (struct split_part){.array = plan_choose_sender(plan, receiver, source)}, lo, len);
    if (split->nmembers == 1)
        return add_terms(&q, lo, len);
    return add_leader_parts(&q, lo, len);
}

void split_drop(struct split *split)
{
    mem_free(split->list);
    mem_free(split->members);
    mem_free(split->by_node);
    mem_free(split->leaders);
    mem_free(split->leader_index);
    *split = (struct split){.group = -1};
}
