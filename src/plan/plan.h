/* plan.h - plans: which rank sends which box to which rank, so that one layout becomes another.
 *
 * What a rank receives is computed from its own destination boxes. overlap.c finds their overlaps with the
 * source layout, sender.c the rank that sends each of them, and split.c the parts of overlaps that several
 * ranks want. Everything else walks or counts the result:
 *
 *     layouts --overlap--> overlaps --sender, split--> parts --walk--> pieces
 *
 * This module does not know about memory or communication.
 */
#ifndef PLAN_H
#define PLAN_H

#include "layout.h"

/* Partial axes that stay partial: digit i of the source is digit i of the destination. */
struct kept_terms {
    int32_t n;
    int64_t count[RSD_MAX_AXES], src_stride[RSD_MAX_AXES], dst_stride[RSD_MAX_AXES];
};

struct rsd_plan {
    atomic_int references;
    rsd_layout *src, *dst;

    /* Explicit boxes. Source groups are disjoint; destination groups may overlap. */
    struct box_groups src_groups, dst_groups;
    int64_t *src_group_of;    /* the groups in each source array, array by array */
    int64_t *first_src_group; /* of each source array, an index into src_group_of, and the end */
    int64_t *dst_group_of;    /* of each destination array; -1: the array is empty */

    bool cast;          /* the layouts may have different dtypes */
    rsd_dtype narrower; /* of both dtypes; the source's if they are equally wide */
    int32_t *node_of;   /* NULL: no node map */
    int64_t nranks;     /* how many ranks node_of lists */

    struct digits reduced; /* partial source axes that are combined; total 1: the plan is a copy */
    struct kept_terms kept;
    rsd_reduce reduce;
    int64_t divisor; /* of averages: the sum is divided by it at the end */
};

/* Returns whether both sides are meshes and every receiver receives each overlap whole from one sender. Such
 * plans are counted without a walk, and compiled into loops over repeated pieces. */
static inline bool plan_is_direct(const rsd_plan *plan)
{
    return plan->src->mesh && plan->dst->mesh && !plan->node_of && plan->reduced.total == 1;
}

/* Returns the dtype in which a piece travels: terms are combined in that of the source, what is forwarded has been
 * converted before, and everything else has the narrower one, so that it is converted once, by one of both ranks. */
static inline rsd_dtype plan_sent_dtype(const rsd_plan *plan, const rsd_piece *piece)
{
    return piece->reduce             ? plan->src->dtype
           : piece->from_destination ? plan->dst->dtype
                                     : plan->narrower;
}

/* ---- overlap.c: the overlaps of one array with the other layout ---- */

/* The overlap of a span of the own layout with a span of the other layout, along one dim. */
struct span_overlap {
    int64_t lo, len;
    int64_t own_at, other_at; /* where it begins in the own array, and in the other */
    int64_t other_pos;        /* what this dim adds to the other mesh position */
};

/* An iterator over the overlaps of one array (or box) of the own layout with the other layout. If the other
 * layout is a mesh, they are the product of one list per dim; if not, they are found in its groups. */
struct overlap {
    const rsd_layout *own, *other;
    const struct box_groups *groups; /* of the other side, if explicit */
    int32_t ndim;
    struct {
        struct span *own; /* spans of the own array */
        struct span_overlap *list;
        size_t nown, own_capacity, n, capacity;
        size_t at; /* the current entry of the product */
    } dims[RSD_MAX_DIMS];
    struct box_tree_search search;
    bool searching, exhausted;

    /* The current overlap. */
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t own_at[RSD_MAX_DIMS];
    int64_t other_at[RSD_MAX_DIMS]; /* if the other layout is a mesh */
    int64_t other_position;         /* the mesh position without copies and terms, or the group */
};

/* Initialize with {0}. An iterator may be started again, which keeps its memory. `groups` are those of `other`.
 * lo and len are NULL, or a box inside of an explicit array. */
rsd_status overlap_start(struct overlap *overlap, const rsd_layout *own, int64_t array,
                         const int64_t *lo, const int64_t *len, const rsd_layout *other,
                         const struct box_groups *groups);

/* Moves to the next overlap. Returns false after the last. */
bool overlap_next(struct overlap *overlap);
void overlap_drop(struct overlap *overlap);

/* Indices of one dim that two mesh positions have in common. The positions are those that the axes of this dim
 * decide. */
struct common_span {
    int32_t own_pos, other_pos;
    int64_t len;
};
struct common_spans {
    struct common_span *list;
    size_t n, capacity;
};

/* Lists the overlaps of all spans of two meshes along one dim, in order. Starts as {0}. The caller frees the list,
 * also on failure. */
rsd_status overlap_sweep_dim(const struct cuts *own, const struct cuts *other,
                             struct common_spans *spans);

/* Returns ELIMIT if a dim is cut into more spans than can be listed. */
rsd_status overlap_check_nspans(const struct cuts *cuts, int32_t d);

/* ---- sender.c: which rank sends an overlap ---- */

/* A destination array. */
struct receiver {
    int32_t rank;
    int64_t array;
    int64_t group; /* of arrays that receive the same: mesh position without copies, or box group */
    int64_t sender_offset; /* mesh sources: the sender's position minus that of the overlap */
};

struct receiver plan_receiver(const rsd_plan *plan, int64_t dst_array);

/* A group of destination arrays that receive the same: its size, the array of a member, and the inverse. */
int64_t plan_group_count(const rsd_plan *plan, int64_t group);
int64_t plan_group_array(const rsd_plan *plan, int64_t group, int64_t i);
int64_t plan_group_index(const rsd_plan *plan, int64_t group, int64_t array);

/* Returns the group that receives an overlap of a source array. `other` is the overlap's other_position. */
int64_t plan_group_of_overlap(const rsd_plan *plan, int64_t src_array, int64_t other);

/* Returns the source array that sends a whole overlap. `source` is the overlap's other_position. Requires a
 * plan without a reduction. */
int64_t plan_choose_sender(const rsd_plan *plan, const struct receiver *receiver, int64_t source);

/* Returns whether a rank on the receiver's node holds an overlap. Requires a node map. */
bool plan_node_holds(const rsd_plan *plan, const struct receiver *receiver, int64_t source);

/* Returns whether the rank of a destination array holds a term of what the receiver receives. */
bool plan_holds_term(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                     int64_t dst_array);

/* ---- split.c: overlaps that several ranks want, split into parts ---- */

/* A part of an overlap, and the array that sends it. */
struct split_part {
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t array; /* of the source, or of the destination with from_destination */
    int64_t order; /* among the terms of a box */
    int32_t stage;
    bool from_destination, reduce;
};

/* The parts that were chosen last, and what is known of the group they belong to. Initialize with
 * {.group = -1}. */
struct split {
    struct split_part *list;
    size_t n, capacity;
    int64_t group; /* the group that the rest describes; -1: none */
    int64_t *members;
    size_t nmembers, members_capacity;
    int64_t *by_node; /* the members, sorted by node */
    size_t by_node_capacity;
    int64_t led_source; /* the overlap that leaders belong to; -1: none */
    int64_t *leaders, *leader_index;
    size_t nleaders, leaders_capacity, leader_index_capacity;
};

struct sender {
    int64_t array;
    bool from_destination;
};

/* Finds the parts of an overlap that a receiver receives; if `only` is not NULL, those that it sends. */
rsd_status split_choose(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                        const int64_t *lo, const int64_t *len, const struct sender *only,
                        struct split *split);

/* Finds the members of a group. */
rsd_status split_load(const rsd_plan *plan, int64_t group, struct split *split);

/* Finds the members on the node of an array, itself included, and returns their number. Requires a node map. */
int64_t split_node_members(const rsd_plan *plan, const struct split *split, int64_t array,
                           const int64_t **members);

/* Finds whether the receiver leads the reduction of an overlap. */
rsd_status split_leads(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                       struct split *split, bool *leads);
void split_drop(struct split *split);

/* ---- bounds.c: lower bounds of the bytes that any plan moves ---- */

rsd_status plan_bound_moved(const rsd_plan *plan, int64_t *bound);

/* The bound of bytes that cross nodes; -1 if it is not known. */
rsd_status plan_bound_crossed(const rsd_plan *plan, int64_t *bound);

/* ---- rank_totals.c ---- */

/* Returns whether a source position sends to a destination position what both hold. Requires plan_is_direct. */
bool plan_sends_to(const rsd_plan *plan, int64_t src_position, int64_t dst_position);

/* Ranks, and the bytes exchanged with each. Initialize with {0}. */
struct rank_list {
    struct rank_nbytes {
        int32_t rank;
        int64_t nbytes;
    } * list;
    size_t n, capacity;
};
rsd_status rank_list_add(struct rank_list *ranks, int32_t rank, int64_t nbytes);

/* Sorts the list and adds up the bytes of each rank. */
void rank_list_merge(struct rank_list *ranks);

#endif
