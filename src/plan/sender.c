/* sender.c - which rank sends an overlap to a receiver. The rule is a formula that all ranks evaluate to the
 * same result.
 *
 * A copy comes from one of its holders:
 *   (1) from the receiver itself;
 *   (2) else from a holder on its node;
 *   (3) else, if the receiver is in the source mesh, from the holder with the same coordinates on the axes
 *       that replicate, so that replicas serve their own group;
 *   (4) else from the holders in turn, by the receiver's number.
 */
#include "plan.h"

/* ---- receivers and their groups ---- */

/* Returns the number of a receiver: which copy of its boxes it is, and where they lie. Receivers of one
 * source box have different numbers, so that its holders are used in turn. */
static int64_t receiver_number(const rsd_plan *plan, int64_t dst_array)
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

/* Returns what kept terms and the choice among copies add to the position of the sender. */
static int64_t find_sender_offset(const rsd_plan *plan, int32_t rank, int64_t dst_array)
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
    return offset + digits_position(copies, receiver_number(plan, dst_array) % copies->total);
}

struct receiver plan_receiver(const rsd_plan *plan, int64_t dst_array)
{
    const rsd_layout *dst = plan->dst;
    struct receiver receiver = {.rank = layout_array_rank(dst, dst_array), .array = dst_array};
    if (dst->mesh) {
        int64_t position = mesh_position_of_array(dst->mesh, dst_array);
        receiver.group = position - digits_part(&dst->copies, position);
    } else {
        receiver.group = plan->dst_group_of[dst_array];
    }
    if (plan->src->mesh)
        receiver.sender_offset = find_sender_offset(plan, receiver.rank, dst_array);
    return receiver;
}

int64_t plan_group_count(const rsd_plan *plan, int64_t group)
{
    if (plan->dst->mesh)
        return plan->dst->copies.total;
    return plan->dst_groups.first_holder[group + 1] - plan->dst_groups.first_holder[group];
}

int64_t plan_group_array(const rsd_plan *plan, int64_t group, int64_t i)
{
    if (plan->dst->mesh)
        return mesh_array_at(plan->dst->mesh, group + digits_position(&plan->dst->copies, i));
    return plan->dst_groups.holders[plan->dst_groups.first_holder[group] + i];
}

int64_t plan_group_index(const rsd_plan *plan, int64_t group, int64_t array)
{
    if (plan->dst->mesh)
        return digits_index(&plan->dst->copies, mesh_position_of_array(plan->dst->mesh, array));
    const int64_t *holders = plan->dst_groups.holders + plan->dst_groups.first_holder[group];
    int64_t lo = 0;
    for (int64_t hi = plan_group_count(plan, group); lo < hi;) {
        int64_t middle = lo + (hi - lo) / 2;
        if (holders[middle] < array)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

int64_t plan_group_of_overlap(const rsd_plan *plan, int64_t src_array, int64_t other)
{
    const struct kept_terms *kept = &plan->kept;
    for (int32_t i = 0; i < kept->n; i++) {
        int64_t position = mesh_position_of_array(plan->src->mesh, src_array);
        other += position / kept->src_stride[i] % kept->count[i] * kept->dst_stride[i];
    }
    return other;
}

/* ---- holders of an overlap ---- */

static int64_t count_holders(const rsd_plan *plan, int64_t source)
{
    if (plan->src->mesh)
        return plan->src->copies.total;
    return plan->src_groups.first_holder[source + 1] - plan->src_groups.first_holder[source];
}

/* Returns the array of the i-th holder; on a mesh, of the receiver's term. */
static int64_t holder_at(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                         int64_t i)
{
    if (!plan->src->mesh)
        return plan->src_groups.holders[plan->src_groups.first_holder[source] + i];
    const struct digits *copies = &plan->src->copies;
    int64_t kept = receiver->sender_offset - digits_part(copies, receiver->sender_offset);
    return mesh_array_at(plan->src->mesh, source + kept + digits_position(copies, i));
}

/* Returns the array of the receiver's own rank, or -1. Requires explicit boxes. */
static int64_t holder_on_rank(const rsd_plan *plan, const struct receiver *receiver, int64_t source)
{
    const int64_t *holders = plan->src_groups.holders;
    int64_t lo = plan->src_groups.first_holder[source],
            end = plan->src_groups.first_holder[source + 1];
    for (int64_t hi = end; lo < hi;) {
        int64_t middle = lo + (hi - lo) / 2;
        if (plan->src->box_ranks[holders[middle]] < receiver->rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < end && plan->src->box_ranks[holders[lo]] == receiver->rank ? holders[lo] : -1;
}

static int64_t holder_anywhere(const rsd_plan *plan, const struct receiver *receiver,
                               int64_t source)
{
    if (plan->src->mesh)
        return mesh_array_at(plan->src->mesh, source + receiver->sender_offset);
    int64_t own = holder_on_rank(plan, receiver, source);
    if (own >= 0)
        return own;
    return holder_at(plan, receiver, source,
                     receiver_number(plan, receiver->array) % count_holders(plan, source));
}

static int32_t node_of_src(const rsd_plan *plan, int64_t array)
{
    return plan->node_of[layout_array_rank(plan->src, array)];
}

/* Returns a holder on the receiver's node, chosen by the receiver's number, or -1. */
static int64_t holder_on_node(const rsd_plan *plan, const struct receiver *receiver, int64_t source)
{
    int64_t n = count_holders(plan, source), on_node = 0;
    int32_t node = plan->node_of[receiver->rank];
    for (int64_t i = 0; i < n; i++)
        on_node += node_of_src(plan, holder_at(plan, receiver, source, i)) == node;
    if (on_node == 0)
        return -1;
    int64_t wanted = receiver_number(plan, receiver->array) % on_node;
    for (int64_t i = 0; i < n; i++) {
        int64_t array = holder_at(plan, receiver, source, i);
        if (node_of_src(plan, array) == node && wanted-- == 0)
            return array;
    }
    return -1;
}

bool plan_node_holds(const rsd_plan *plan, const struct receiver *receiver, int64_t source)
{
    return holder_on_node(plan, receiver, source) >= 0;
}

int64_t plan_choose_sender(const rsd_plan *plan, const struct receiver *receiver, int64_t source)
{
    int64_t array = holder_anywhere(plan, receiver, source);
    if (!plan->node_of || layout_array_rank(plan->src, array) == receiver->rank)
        return array;
    int64_t on_node = holder_on_node(plan, receiver, source);
    return on_node >= 0 ? on_node : array;
}

bool plan_holds_term(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                     int64_t dst_array)
{
    const rsd_layout *src = plan->src;
    int64_t position = mesh_position_of(src->mesh, layout_array_rank(plan->dst, dst_array));
    if (position < 0)
        return false;
    int64_t kept = receiver->sender_offset - digits_part(&src->copies, receiver->sender_offset);
    return position - digits_part(&src->copies, position) - digits_part(&plan->reduced, position) ==
           source + kept;
}
