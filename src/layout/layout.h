/* layout.h - the door of layout: where does every element live?
 *
 * A layout of mesh and placements is a product: along each tensor dim the mesh axes that cut it
 * give every index to one coordinate, independently of the other dims. So a rank's part is a list
 * of spans per dim, and everything about it is answered dim by dim:
 *
 *     dim 0:  |--span--|  |--span--|        the rank holds all pairs of a span of dim 0
 *     dim 1:     |-----span-----|           and a span of dim 1, as one dense array
 *
 * A layout of explicit boxes is just its boxes, sorted by rank.
 *
 * Layout knows no pointers, no bytes of tensors, no communication and no files.
 */
#ifndef LAYOUT_H
#define LAYOUT_H

#include "base.h"

#include <stdatomic.h>

/* Extents and volumes stay below this, so that sums of two never overflow. */
#define MAX_EXTENT ((int64_t)1 << 62)

/* ---- box.c: arithmetic on boxes given as lo and len ---- */

bool box_overlap(int32_t ndim, const int64_t *lo_a, const int64_t *len_a, const int64_t *lo_b,
                 const int64_t *len_b, int64_t *lo, int64_t *len);
bool box_is_empty(int32_t ndim, const int64_t *len);
int64_t box_volume(int32_t ndim, const int64_t *len); /* of one that lies in a tensor: it fits */
void box_set(rsd_box *box, int32_t ndim, const int64_t *lo, const int64_t *len);

/* Whether strides, none negative, may let two elements of an array share a place. */
bool strides_overlap(int32_t ndim, const int64_t *shape, const int64_t *strides);

/* "[0:4, 8:16]", for messages; "[]" without dims. */
enum { BOX_TEXT_NCHARS = 256 };
const char *box_text(int32_t ndim, const int64_t *lo, const int64_t *len,
                     char text[BOX_TEXT_NCHARS]);

/* "[4,8]" */
enum { SHAPE_TEXT_NCHARS = RSD_MAX_DIMS * 21 + 3 };
const char *shape_text(int32_t ndim, const int64_t *shape, char text[SHAPE_TEXT_NCHARS]);

/* ---- mesh.c ---- */

struct rsd_mesh {
    atomic_int references;
    int32_t naxes;
    int64_t counts[RSD_MAX_AXES];
    int64_t strides[RSD_MAX_AXES]; /* of one step along an axis, in positions */
    char *names[RSD_MAX_AXES];     /* NULL: none */
    int64_t nranks;
    int32_t base;    /* the rank at position 0 when ranks just count up */
    int32_t *ranks;  /* by position; NULL: base, base + 1, ... */
    int32_t *sorted; /* positions by ascending rank; NULL likewise */
    int32_t *array;  /* by position: its place in sorted; NULL likewise */
};

/* As rsd_mesh_new, for ranks that count up from base. */
rsd_status mesh_new_from(int32_t naxes, const int64_t *counts, const char *const *names,
                         int32_t base, rsd_mesh **mesh);
int64_t mesh_position_of(const rsd_mesh *mesh, int32_t rank); /* -1: not in the mesh */

static inline int32_t mesh_rank_at(const rsd_mesh *mesh, int64_t position)
{
    return mesh->ranks ? mesh->ranks[position] : (int32_t)(mesh->base + position);
}

static inline int64_t mesh_array_at(const rsd_mesh *mesh, int64_t position)
{
    return mesh->array ? mesh->array[position] : position;
}

static inline int64_t mesh_position_of_array(const rsd_mesh *mesh, int64_t array)
{
    return mesh->sorted ? mesh->sorted[array] : array;
}

static inline int64_t mesh_coord(const rsd_mesh *mesh, int64_t position, int32_t axis)
{
    return position / mesh->strides[axis] % mesh->counts[axis];
}

/* ---- cut.c: how mesh axes cut one dim ---- */

/* One axis cutting a dim. An axis of one rank cuts nothing and is left out. */
struct cut {
    rsd_kind kind;
    int32_t nsegments;
    int64_t count;       /* ranks along the axis, at least 2 */
    int64_t stride;      /* of the axis, in mesh positions */
    int64_t factor;      /* strided, cyclic */
    const int64_t *ends; /* segmented: where each segment ends in the global dim */
};

/* A dim and the axes that cut it, first to last. */
struct cuts {
    int64_t extent;
    int32_t ncuts;
    struct cut *cut;
};

/* A run of indices that one coordinate holds next to each other. */
struct span {
    int64_t lo, len; /* in the global dim */
    int64_t at;      /* where it begins in the holder's array, along this dim */
    int64_t pos;     /* mesh position of the holder, as far as this dim's axes decide it */
};

/* The rest of the span that index belongs to, from index on; index < extent. */
struct span cuts_span_at(const struct cuts *cuts, int64_t index);

/* The rest of a span of the holder at a mesh position, from place `at` of its array on. */
struct span cuts_span_of(const struct cuts *cuts, int64_t position, int64_t at);

/* How many indices the holder at a mesh position has along this dim. */
int64_t cuts_extent_of(const struct cuts *cuts, int64_t position);

/* An upper bound on the number of spans of the whole dim, for limits. */
int64_t cuts_nspans_bound(const struct cuts *cuts);

/* ---- layout.c, explicit.c ---- */

/* Mesh axes of one role, as digits of a mixed-radix number of mesh positions. */
struct digits {
    int32_t ndigits;
    int64_t total; /* product of counts; 1 without digits */
    int64_t count[RSD_MAX_AXES], stride[RSD_MAX_AXES];
};

void digits_add(struct digits *digits, int64_t count, int64_t stride); /* total starts at 1 */
int64_t digits_position(const struct digits *digits, int64_t index);   /* index < total */
int64_t digits_part(const struct digits *digits, int64_t position); /* what these axes add to it */
int64_t digits_index(const struct digits *digits,
                     int64_t position); /* inverse of digits_position */

struct rsd_layout {
    atomic_int references;
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
    int64_t volume; /* elements of the whole tensor */

    /* Mesh and placements; mesh is NULL for explicit boxes. */
    rsd_mesh *mesh;
    rsd_placement *placements; /* one per axis, segments owned */
    bool ordered;              /* some dim is cut in another order than the mesh's */
    int32_t naxes_of[RSD_MAX_DIMS], axes_of[RSD_MAX_DIMS][RSD_MAX_AXES]; /* first to last */
    struct cuts cuts[RSD_MAX_DIMS];
    struct cut *all_cuts;
    int64_t *all_ends;
    struct digits copies; /* axes that replicate */
    struct digits terms;  /* axes that are partial */
    struct digits others; /* axes that do not replicate */

    /* Explicit boxes, sorted by rank, each rank's in the order given: box i is array i. */
    int64_t nboxes;
    int32_t *box_ranks;
    int64_t *box_lo, *box_len; /* nboxes * ndim each */
    int64_t *places;           /* of each box, in the order given; NULL if sorted already */
    int32_t *place_ranks;      /* ranks in the order given; NULL likewise */
};

/* Checks dtype, shape and their products, and starts a layout with them. */
rsd_status layout_start(rsd_dtype dtype, int32_t ndim, const int64_t *shape, rsd_layout **layout);

static inline const int64_t *layout_box_lo(const rsd_layout *layout, int64_t box)
{
    return layout->box_lo + box * layout->ndim;
}

static inline const int64_t *layout_box_len(const rsd_layout *layout, int64_t box)
{
    return layout->box_len + box * layout->ndim;
}

/* The rank and local extents of an array. */
static inline int32_t layout_array_rank(const rsd_layout *layout, int64_t array)
{
    if (layout->mesh)
        return mesh_rank_at(layout->mesh, mesh_position_of_array(layout->mesh, array));
    return layout->box_ranks[array];
}
void layout_array_shape(const rsd_layout *layout, int64_t array, int64_t *shape);

/* The layout with every Partial turned into Replicate; shares what it can. */
rsd_status layout_without_partial(const rsd_layout *layout, rsd_layout **out);

/* EMISMATCH if dtype or shape differ. */
rsd_status layout_same_tensor(const rsd_layout *src, const rsd_layout *dst);

void layout_hash(const rsd_layout *layout, struct hash *hash);

/* ---- scan.c: the characters of the notation, for parse.c ---- */

/* ASCII alone, whatever the locale. */
static inline bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static inline bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static inline bool is_name_start(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

struct parser {
    const char *text, *at;
};

void scan_spaces(struct parser *p);
int scan_column(const struct parser *p, const char *at);
rsd_status scan_expected(const struct parser *p, const char *what);

/* Puts the column in front of what a constructor said about the part that began there. */
rsd_status scan_at(const struct parser *p, const char *begin, rsd_status status);

bool scan_peek(struct parser *p, const char *token);
bool scan_take(struct parser *p, const char *token);
rsd_status scan_need(struct parser *p, const char *token, const char *what);
bool scan_at_digit(struct parser *p);
rsd_status scan_number(struct parser *p, const char *what, int64_t *value);

/* A name of letters, digits and underscores; false if there is none, or it is too long. */
enum { NAME_NCHARS = 64 };
bool scan_name(struct parser *p, char out[NAME_NCHARS]);

/* ---- tree.c: boxes found by place ---- */

/* A tree over boxes: each node bounds its part of them. */
struct box_tree {
    int32_t ndim;
    int64_t nboxes, nnodes;
    int64_t *order;  /* box numbers; a leaf is a run of them */
    int64_t *boxes;  /* in that order: lo[ndim], hi[ndim] of each */
    int64_t *bounds; /* per node: lo[ndim], hi[ndim] of the boxes below */
};

rsd_status box_tree_build(struct box_tree *tree, int32_t ndim, int64_t nboxes, const int64_t *lo,
                          const int64_t *len);
void box_tree_drop(struct box_tree *tree);

/* Whether any two boxes share an element; such boxes into a and b. */
bool box_tree_any_overlap(const struct box_tree *tree, int64_t *a, int64_t *b);

/* Finds the boxes that share an element with [lo, lo+len), in an order that depends on the tree
 * alone. Start with {0}; returns -1 after the last. */
struct box_tree_search {
    bool started;
    int32_t depth;
    int64_t first, end; /* of the leaf at hand */
    struct {
        int64_t node, first, end;
    } path[64];
};
int64_t box_tree_next(const struct box_tree *tree, struct box_tree_search *search,
                      const int64_t *lo, const int64_t *len);

/* ---- cells.c, cover.c: which explicit boxes are the same, and do they cover ---- */

/* The boxes of an explicit layout by what they hold. Equal boxes are one cell with several holders;
 * where boxes overlap in part, they are cut until no two cells overlap. Empty boxes are in none. */
struct box_groups {
    int32_t ndim;
    int64_t ngroups;
    int64_t *lo, *len;     /* ncells * ndim each */
    int64_t *first_holder; /* ncells + 1: into holders */
    int64_t *holders;      /* array numbers, ascending */
    struct box_tree tree;
};

/* Groups equal boxes; with `disjoint`, also cuts those that overlap in part. */
rsd_status box_groups_build(struct box_groups *groups, const rsd_layout *layout, bool disjoint);
void box_groups_drop(struct box_groups *groups);

/* Whether some of [lo, lo+len) is in no cell of disjoint ones; such a box into hole_lo, hole_len.
 */
bool box_groups_find_hole(const struct box_groups *groups, const int64_t *lo, const int64_t *len,
                          int64_t *hole_lo, int64_t *hole_len);

#endif
