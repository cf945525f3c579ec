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
    struct cells src_cells, dst_cells;
    int64_t *first_src_cell,
        *src_cell_of;     /* the cells in each source array: first_src_cell[array] on */
    int64_t *dst_cell_of; /* of each destination array; -1: empty */

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
struct meet {
    int64_t lo, len;
    int64_t own_at, other_at; /* where it begins in our array, in theirs */
    int64_t other_pos;        /* their mesh position, as far as this dim decides it */
};

/* Meetings of one of our boxes (or arrays) with the other layout. If that is a formula, they are
 * the product of one list per dim; if it is explicit, they are found in its cells. */
struct overlap {
    const rsd_layout *own, *other;
    const struct cells *cells; /* of the other side, if explicit */
    int32_t ndim;
    struct {
        struct span *own; /* our spans */
        struct meet *list;
        size_t nown, room_own, n, room;
        size_t at; /* where the product stands */
    } dims[RSD_MAX_DIMS];
    struct tree_search search;
    bool searching, exhausted;

    /* The meeting at hand. */
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t own_at[RSD_MAX_DIMS];
    int64_t other_at[RSD_MAX_DIMS]; /* if the other side is a formula */
    int64_t whom;                   /* mesh position as decided by its cuts, or cell */
};

/* Starts with {0}; may be started again and again, keeping its memory. `cells` are those of
 * `other`. The own side is an array, or with lo and len a box of an explicit one. */
rsd_status overlap_start(struct overlap *overlap, const rsd_layout *own, int64_t array,
                         const int64_t *lo, const int64_t *len, const rsd_layout *other,
                         const struct cells *cells);
bool overlap_next(struct overlap *overlap);
void overlap_drop(struct overlap *overlap);

/* Who meets whom along a whole dim of two formulas, in order. */
struct sweep {
    int64_t own_pos, other_pos;
};
rsd_status sweep_dim(const struct cuts *own, const struct cuts *other, struct sweep **list,
                     size_t *n);

/* ELIMIT if a dim is cut into more runs than can be listed. */
rsd_status check_nspans(const struct cuts *cuts, int32_t d);

/* ---- choose.c: who gives ---- */

/* One who gets: a destination array. */
struct getter {
    int32_t rank;
    int64_t array;
    int64_t group; /* who else gets the same: mesh position without copies, or cell */
    int64_t giver; /* for sources on a mesh: what to add to a meeting to get the giver's position */
};

struct getter getter_of(const rsd_plan *plan, int64_t dst_array);

/* How many get the same as a group, and the array of the i-th of them. */
int64_t group_count(const rsd_plan *plan, int64_t group);
int64_t group_array(const rsd_plan *plan, int64_t group, int64_t i);
int64_t group_index(const rsd_plan *plan, int64_t group,
                    int64_t array); /* inverse of group_array */

/* The group that gets a meeting seen from a source array. */
int64_t group_of_meeting(const rsd_plan *plan, int64_t src_array, int64_t other);

/* The source array that gives a meeting when it is taken whole; `source` is its mesh position or
 * cell. The common case of choose_shares, without a list. */
int64_t choose_giver(const rsd_plan *plan, const struct getter *getter, int64_t source);

/* Whether someone on the getter's node holds a meeting. There must be a node map. */
bool held_on_node(const rsd_plan *plan, const struct getter *getter, int64_t source);

/* Whether a destination array's rank holds a term of a meeting that the getter gets. */
bool holds_term(const rsd_plan *plan, const struct getter *getter, int64_t source,
                int64_t dst_array);

/* ---- shares.c: parts of a meeting, where many want the same ---- */

/* A part of a meeting and where a getter takes it from. */
struct share {
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t array; /* the giver's: a source array, or with from_dst a destination array */
    int64_t order; /* among the terms of a box */
    int32_t stage;
    bool from_dst, reduce;
};

/* The shares last chosen, and what was found out about a group on the way. Starts as
 * {.group = -1}. */
struct shares {
    struct share *list;
    size_t n, room;
    int64_t group; /* the group that the rest is about; -1: none yet */
    int64_t *members;
    size_t nmembers, room_members;
    int64_t *by_node; /* the members, sorted by node */
    size_t room_by_node;
    int64_t led_source; /* the meeting that leaders are about; -1: none yet */
    int64_t *leaders, *leader_index;
    size_t nleaders, room_leaders, room_leader_index;
};

struct giver {
    int64_t array;
    bool from_dst;
};

/* Everything that a getter takes of one meeting with `source`; with `only`, what that giver gives. */
rsd_status choose_shares(const rsd_plan *plan, const struct getter *getter, int64_t source,
                         const int64_t *lo, const int64_t *len, const struct giver *only,
                         struct shares *shares);

/* Finds the members of a group; their arrays are in shares->members then. */
rsd_status shares_load(const rsd_plan *plan, int64_t group, struct shares *shares);

/* The members on an array's node, itself included; returns how many. There must be a node map. */
int64_t shares_mates(const rsd_plan *plan, const struct shares *shares, int64_t array,
                     const int64_t **mates);

/* Whether a member of the group leads the reduction of a meeting. */
rsd_status shares_lead(const rsd_plan *plan, const struct getter *getter, int64_t source,
                       struct shares *shares, bool *leads);
void shares_drop(struct shares *shares);

/* ---- bounds.c: what any plan has to move, and to bring across nodes ---- */

rsd_status bound_moved(const rsd_plan *plan, int64_t *bound);
rsd_status bound_crossed(const rsd_plan *plan, int64_t *bound); /* -1: not known */

/* ---- part.c ---- */

/* Elements that a source position gives to a destination position of a direct plan. */
int64_t pair_volume(const rsd_plan *plan, int64_t src_position, int64_t dst_position);

/* The ranks that one rank meets on a walk, and what it exchanges with each. Starts as {0}. */
struct peers {
    struct peer {
        int32_t rank;
        int64_t nbytes;
    } * list;
    size_t n, room;
};
rsd_status peers_add(struct peers *peers, int32_t rank, int64_t nbytes);
void peers_unite(struct peers *peers); /* sorts them; each rank is there once then */

#endif
