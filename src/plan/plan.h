/* plan.h - the door of plan: who gives what to whom?
 *
 * A plan is where two layouts meet. What a rank gets is found from its own side: its boxes, met
 * with the other layout (overlap.c), and for each meeting the one who gives it (choose.c).
 * Everything else walks or counts that:
 *
 *     layouts --overlap--> meetings --choose--> shares --walk--> pieces --loops--> loops of bytes
 *
 * Plan knows no memory and no MPI.
 */
#ifndef PLAN_H
#define PLAN_H

#include "layout.h"

/* Partial axes that stay partial: digit i of the source goes with digit i of the destination. */
struct kept_terms {
    int32_t n;
    int64_t count[RSD_MAX_AXES], src_stride[RSD_MAX_AXES], dst_stride[RSD_MAX_AXES];
};

struct rsd_plan {
    atomic_int references;
    rsd_layout *src, *dst;

    /* Explicit sides: the source's boxes cut so that none overlap, the destination's as they are.
     */
    struct box_groups src_groups, dst_groups;
    int64_t *first_src_group,
        *src_group_of;     /* the cells in each source array: first_src_group[array] on */
    int64_t *dst_group_of; /* of each destination array; -1: empty */

    int32_t *node_of; /* NULL: no node map */
    int64_t nranks;   /* that it lists */

    struct digits reduced; /* partial source axes that are combined; total 1: none, a plain copy */
    struct kept_terms kept;
    rsd_reduce reduce;
    int64_t divisor; /* of averages: the sum is divided by it in the end */
};

/* Both sides are formulas and every getter takes each meeting whole from one giver: the case that
 * is counted without walking, and carried as families. */
static inline bool plan_is_direct(const rsd_plan *plan)
{
    return plan->src->mesh && plan->dst->mesh && !plan->node_of && plan->reduced.total == 1;
}

/* ---- overlap.c: where one rank's boxes meet the other layout ---- */

/* A meeting of one of our spans with one of the other side's, along one dim. */
struct span_overlap {
    int64_t lo, len;
    int64_t own_at, other_at; /* where it begins in our array, in theirs */
    int64_t other_pos;        /* their mesh position, as far as this dim decides it */
};

/* Meetings of one of our boxes (or arrays) with the other layout. If that is a formula, they are
 * the product of one list per dim; if it is explicit, they are found in its cells. */
struct overlap {
    const rsd_layout *own, *other;
    const struct box_groups *groups; /* of the other side, if explicit */
    int32_t ndim;
    struct {
        struct span *own; /* our spans */
        struct span_overlap *list;
        size_t nown, own_capacity, n, capacity;
        size_t at; /* where the product stands */
    } dims[RSD_MAX_DIMS];
    struct box_tree_search search;
    bool searching, exhausted;

    /* The meeting at hand. */
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t own_at[RSD_MAX_DIMS];
    int64_t other_at[RSD_MAX_DIMS]; /* if the other side is a formula */
    int64_t other_position;         /* mesh position as decided by its cuts, or cell */
};

/* Starts with {0}; may be started again and again, keeping its memory. `cells` are those of
 * `other`. The own side is an array, or with lo and len a box of an explicit one. */
rsd_status overlap_start(struct overlap *overlap, const rsd_layout *own, int64_t array,
                         const int64_t *lo, const int64_t *len, const rsd_layout *other,
                         const struct box_groups *groups);
bool overlap_next(struct overlap *overlap);
void overlap_drop(struct overlap *overlap);

/* Who meets whom along a whole dim of two formulas, in order. */
struct sweep {
    int64_t own_pos, other_pos;
};
rsd_status overlap_sweep_dim(const struct cuts *own, const struct cuts *other, struct sweep **list,
                             size_t *n);

/* ELIMIT if a dim is cut into more runs than can be listed. */
rsd_status overlap_check_nspans(const struct cuts *cuts, int32_t d);

/* ---- choose.c: who gives ---- */

/* One who gets: a destination array. */
struct receiver {
    int32_t rank;
    int64_t array;
    int64_t group; /* who else gets the same: mesh position without copies, or cell */
    int64_t
        sender; /* for sources on a mesh: what to add to a meeting to get the giver's position */
};

struct receiver plan_receiver(const rsd_plan *plan, int64_t dst_array);

/* How many get the same as a group, and the array of the i-th of them. */
int64_t plan_group_count(const rsd_plan *plan, int64_t group);
int64_t plan_group_array(const rsd_plan *plan, int64_t group, int64_t i);
int64_t plan_group_index(const rsd_plan *plan, int64_t group,
                         int64_t array); /* inverse of plan_group_array */

/* The group that gets a meeting seen from a source array. */
int64_t plan_group_of_overlap(const rsd_plan *plan, int64_t src_array, int64_t other);

/* The source array that gives a meeting when it is taken whole; `source` is its mesh position or
 * cell. The common case of split_choose, without a list. */
int64_t plan_choose_sender(const rsd_plan *plan, const struct receiver *receiver, int64_t source);

/* Whether someone on the getter's node holds a meeting. There must be a node map. */
bool plan_held_on_node(const rsd_plan *plan, const struct receiver *receiver, int64_t source);

/* Whether a destination array's rank holds a term of a meeting that the getter gets. */
bool plan_holds_term(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                     int64_t dst_array);

/* ---- shares.c: parts of a meeting, where many want the same ---- */

/* A part of a meeting and where a getter takes it from. */
struct split_part {
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t array; /* the giver's: a source array, or with from_destination a destination array */
    int64_t order; /* among the terms of a box */
    int32_t stage;
    bool from_destination, reduce;
};

/* The shares last chosen, and what was found out about a group on the way. Starts as
 * {.group = -1}. */
struct split {
    struct split_part *list;
    size_t n, capacity;
    int64_t group; /* the group that the rest is about; -1: none yet */
    int64_t *members;
    size_t nmembers, members_capacity;
    int64_t *by_node; /* the members, sorted by node */
    size_t by_node_capacity;
    int64_t led_source; /* the meeting that leaders are about; -1: none yet */
    int64_t *leaders, *leader_index;
    size_t nleaders, leaders_capacity, leader_index_capacity;
};

struct sender {
    int64_t array;
    bool from_destination;
};

/* Everything that a getter takes of one meeting with `source`; with `only`, what that giver gives. */
rsd_status split_choose(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                        const int64_t *lo, const int64_t *len, const struct sender *only,
                        struct split *shares);

/* Finds the members of a group; their arrays are in shares->members then. */
rsd_status split_load(const rsd_plan *plan, int64_t group, struct split *shares);

/* The members on an array's node, itself included; returns how many. There must be a node map. */
int64_t split_node_members(const rsd_plan *plan, const struct split *shares, int64_t array,
                           const int64_t **mates);

/* Whether a member of the group leads the reduction of a meeting. */
rsd_status split_leads(const rsd_plan *plan, const struct receiver *receiver, int64_t source,
                       struct split *shares, bool *leads);
void split_drop(struct split *shares);

/* ---- bounds.c: what any plan has to move, and to bring across nodes ---- */

rsd_status plan_bound_moved(const rsd_plan *plan, int64_t *bound);
rsd_status plan_bound_crossed(const rsd_plan *plan, int64_t *bound); /* -1: not known */

/* ---- part.c ---- */

/* Elements that a source position gives to a destination position of a direct plan. */
int64_t plan_pair_volume(const rsd_plan *plan, int64_t src_position, int64_t dst_position);

/* The ranks that one rank meets on a walk, and what it exchanges with each. Starts as {0}. */
struct rank_list {
    struct rank_nbytes {
        int32_t rank;
        int64_t nbytes;
    } * list;
    size_t n, capacity;
};
rsd_status rank_list_add(struct rank_list *peers, int32_t rank, int64_t nbytes);
void rank_list_merge(struct rank_list *peers); /* sorts them; each rank is there once then */

#endif
