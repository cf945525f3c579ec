/* layout.h - layouts: which rank holds which elements of a tensor.
 *
 * A layout of mesh and placements is a product. Along each tensor dim, the mesh axes that cut the dim assign
 * every index to one coordinate, independently of the other dims. So a rank holds a list of spans per dim,
 * and every query is answered dim by dim:
 *
 *     dim 0:  |--span--|  |--span--|        the rank holds all pairs of a span of dim 0
 *     dim 1:     |-----span-----|           and a span of dim 1, as one dense array
 *
 * A layout of explicit boxes is a list of boxes, sorted by rank.
 *
 * This module does not know about addresses, data, communication or files.
 */
#ifndef LAYOUT_H
#define LAYOUT_H

#include "base.h"

#include <stdatomic.h>

/* The limit of extents and volumes. The sum of two of them does not overflow. */
#define MAX_EXTENT ((int64_t)1 << 62)

/* ---- box.c: boxes, as lo and len ---- */

/* Returns whether two boxes share an element, and if so the box that they share. */
bool box_overlap(int32_t ndim, const int64_t *lo_a, const int64_t *len_a, const int64_t *lo_b,
                 const int64_t *len_b, int64_t *lo, int64_t *len);
bool box_is_empty(int32_t ndim, const int64_t *len);

/* Returns the number of elements. Requires that the box lies in a tensor, so that the product fits. */
int64_t box_volume(int32_t ndim, const int64_t *len);
void box_set(rsd_box *box, int32_t ndim, const int64_t *lo, const int64_t *len);

/* Elements [begin, end) of a tensor in row-major order are at most 2 * ndim - 1 boxes, each of which has its
 * elements in that order. Finds the first of them, and returns how many elements it has. Requires that the
 * range is not empty and lies in the tensor. */
int64_t box_of_range(int32_t ndim, const int64_t *shape, int64_t begin, int64_t end, int64_t *lo,
                     int64_t *len);

/* Returns whether two elements of an array may have the same address. Requires that no stride is negative. */
bool strides_overlap(int32_t ndim, const int64_t *shape, const int64_t *strides);

/* Writes "[0:4, 8:16]" for messages, or "[]" without dims. Returns text. */
enum { BOX_TEXT_NCHARS = 256 };
const char *box_text(int32_t ndim, const int64_t *lo, const int64_t *len,
                     char text[BOX_TEXT_NCHARS]);

/* Writes "[4,8]" for messages. Returns text. */
enum { SHAPE_TEXT_NCHARS = RSD_MAX_DIMS * 21 + 3 };
const char *shape_text(int32_t ndim, const int64_t *shape, char text[SHAPE_TEXT_NCHARS]);

/* ---- mesh.c ---- */

struct rsd_mesh {
    atomic_int references;
    int32_t naxes;
    int64_t counts[RSD_MAX_AXES];
    int64_t strides[RSD_MAX_AXES]; /* positions between neighbours along an axis */
    char *names[RSD_MAX_AXES];     /* NULL: unnamed */
    int64_t nranks;
    int32_t base;    /* the rank at position 0, if ranks is NULL */
    int32_t *ranks;  /* by position; NULL: base, base + 1, ... */
    int32_t *sorted; /* positions by ascending rank; NULL if ranks is */
    int32_t *array;  /* by position: its index in sorted; NULL if ranks is */
};

/* The same as rsd_mesh_new, for ranks base, base + 1, ... */
rsd_status mesh_new_from(int32_t naxes, const int64_t *counts, const char *const *names,
                         int32_t base, rsd_mesh **mesh);
/* Returns -1 if the rank is not in the mesh. */
int64_t mesh_position_of(const rsd_mesh *mesh, int32_t rank);

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

/* One mesh axis that cuts a dim. Axes of one rank are left out. */
struct cut {
    rsd_kind kind;
    int32_t nsegments;
    int64_t count;       /* ranks along the axis, at least 2 */
    int64_t stride;      /* of the axis, in mesh positions */
    int64_t factor;      /* strided, cyclic */
    const int64_t *ends; /* segmented: where each segment ends in the global dim */
};

/* A dim and the mesh axes that cut it, in the order in which they apply. */
struct cuts {
    int64_t extent;
    int32_t ncuts;
    struct cut *cut;
};

/* Consecutive indices of a dim that one rank holds, consecutive in its array too. */
struct span {
    int64_t lo, len; /* in the global dim */
    int64_t at;      /* where it begins in the rank's array, along this dim */
    int64_t pos;     /* what the axes of this dim add to the rank's mesh position */
};

/* Returns the span that contains index, from index on. Requires index < extent. */
struct span cuts_span_at(const struct cuts *cuts, int64_t index);

/* Returns the span that contains index `at` of the array at a mesh position, from `at` on. */
struct span cuts_span_of(const struct cuts *cuts, int64_t position, int64_t at);

/* Returns the local extent of the array at a mesh position. */
int64_t cuts_extent_of(const struct cuts *cuts, int64_t position);

/* Returns what the axes that cut this dim add to a mesh position. */
int64_t cuts_part_of(const struct cuts *cuts, int64_t position);

/* Returns an upper bound of the number of spans of all ranks. */
int64_t cuts_nspans_bound(const struct cuts *cuts);

/* ---- layout.c, explicit.c ---- */

/* Mesh axes of one role (replicate, partial, ...), as the digits of a mixed-radix number. Initialize with
 * {.total = 1}. */
struct digits {
    int32_t ndigits;
    int64_t total; /* product of the counts */
    int64_t count[RSD_MAX_AXES], stride[RSD_MAX_AXES];
};

void digits_add(struct digits *digits, int64_t count, int64_t stride);

/* Returns what the digits of a number add to a mesh position. Requires index < total. */
int64_t digits_position(const struct digits *digits, int64_t index);

/* The inverse: returns the number at a mesh position. */
int64_t digits_index(const struct digits *digits, int64_t position);

/* Returns what these axes add to a mesh position: digits_position(digits_index(position)). */
int64_t digits_part(const struct digits *digits, int64_t position);

struct rsd_layout {
    atomic_int references;
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
    int64_t volume; /* elements of the whole tensor */

    /* Mesh and placements; mesh is NULL for explicit boxes. */
    rsd_mesh *mesh;
    rsd_placement *placements; /* one per axis, segments owned */
    bool ordered;              /* on some dim, axes do not apply in the order of the mesh */
    int32_t naxes_of[RSD_MAX_DIMS], axes_of[RSD_MAX_DIMS][RSD_MAX_AXES]; /* by dim, in order */
    struct cuts cuts[RSD_MAX_DIMS];
    struct cut *all_cuts;
    int64_t *all_ends;
    struct digits copies; /* axes that replicate */
    struct digits terms;  /* axes that are partial */
    struct digits others; /* axes that do not replicate */

    /* Explicit boxes, sorted by rank; those of one rank in the order of the caller. Box i is array i. */
    int64_t nboxes;
    int32_t *box_ranks;
    int64_t *box_lo, *box_len; /* nboxes * ndim each */
    int64_t *places;           /* of each box, its index in the caller's list; NULL: the same */
    int32_t *place_ranks;      /* ranks in the order of the caller; NULL if places is */
    bool from_file;            /* a file has the boxes, so they may overlap in few ways only */
};

/* Checks dtype and shape, and creates a layout that has nothing else yet. */
rsd_status layout_start(rsd_dtype dtype, int32_t ndim, const int64_t *shape, rsd_layout **layout);

static inline const int64_t *layout_box_lo(const rsd_layout *layout, int64_t box)
{
    return layout->box_lo + box * layout->ndim;
}

static inline const int64_t *layout_box_len(const rsd_layout *layout, int64_t box)
{
    return layout->box_len + box * layout->ndim;
}

/* Returns the rank that an array belongs to. */
static inline int32_t layout_array_rank(const rsd_layout *layout, int64_t array)
{
    if (layout->mesh)
        return mesh_rank_at(layout->mesh, mesh_position_of_array(layout->mesh, array));
    return layout->box_ranks[array];
}

/* Returns the local extents of an array. */
void layout_array_shape(const rsd_layout *layout, int64_t array, int64_t *shape);

/* Returns the same layout with Replicate in place of Partial. */
rsd_status layout_without_partial(const rsd_layout *layout, rsd_layout **out);

/* Returns EMISMATCH if the shapes differ. */
rsd_status layout_same_shape(const rsd_layout *src, const rsd_layout *dst);

void layout_hash(const rsd_layout *layout, struct hash *hash);

/* ---- scan.c: tokens of the notation, for parse.c ---- */

/* ASCII only, in any locale. */
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
    const char *text, *at; /* the whole, and the next character */
};

/* Every function skips spaces first. */
void scan_spaces(struct parser *p);

/* Returns the column of a character, counted from 1. */
int scan_column(const struct parser *p, const char *at);

/* Returns EINVAL: the error names the column, what was expected, and what is there. */
rsd_status scan_expected(const struct parser *p, const char *what);

/* Returns its argument. If that is an error, puts the column of `begin` in front of the error text. */
rsd_status scan_at(const struct parser *p, const char *begin, rsd_status status);

/* Return whether the token comes next; scan_take also skips it. */
bool scan_peek(struct parser *p, const char *token);
bool scan_take(struct parser *p, const char *token);

/* Skips the token, or returns EINVAL. */
rsd_status scan_need(struct parser *p, const char *token, const char *what);
bool scan_at_digit(struct parser *p);
rsd_status scan_number(struct parser *p, const char *what, int64_t *value);

/* Reads a name of letters, digits and underscores. Returns false if no name comes next, or a longer one. */
enum { NAME_NCHARS = 64 };
bool scan_name(struct parser *p, char out[NAME_NCHARS]);

/* ---- parse_placement.c ---- */

/* Reads a placement of a tensor with ndim dims. *list has its segments; the caller frees it, also on failure. */
rsd_status placement_parse(struct parser *p, int32_t ndim, rsd_placement *out, int64_t **list);

/* ---- box_tree.c: finds boxes by their position ---- */

struct box_tree {
    int32_t ndim;
    int64_t nboxes, nnodes;
    int64_t *order;  /* numbers of boxes; a leaf is a range of them */
    int64_t *boxes;  /* in that order: lo[ndim], hi[ndim] of each */
    int64_t *bounds; /* of each node: lo[ndim], hi[ndim] of the boxes below it */
};

rsd_status box_tree_build(struct box_tree *tree, int32_t ndim, int64_t nboxes, const int64_t *lo,
                          const int64_t *len);
void box_tree_drop(struct box_tree *tree);

/* Returns whether any two boxes share an element, and if so the numbers of two such boxes. */
bool box_tree_any_overlap(const struct box_tree *tree, int64_t *a, int64_t *b);

/* A search for the boxes that share an element with [lo, lo+len). Initialize with {0}. The order of what it
 * finds depends on the tree only. */
struct box_tree_search {
    bool started;
    int32_t depth;
    int64_t first, end; /* of the current leaf */
    struct {
        int64_t node, first, end;
    } path[64];
};

/* Returns the number of the next box, or -1 after the last. */
int64_t box_tree_next(const struct box_tree *tree, struct box_tree_search *search,
                      const int64_t *lo, const int64_t *len);

/* ---- box_groups.c, coverage.c: which arrays hold the same box, and whether boxes cover a region ---- */

/* The boxes of an explicit layout. A group is one box and all arrays that hold it (its holders). Empty
 * boxes are in no group. */
struct box_groups {
    int32_t ndim;
    int64_t ngroups;
    int64_t *lo, *len;     /* ngroups * ndim each */
    int64_t *first_holder; /* ngroups + 1 indices into holders */
    int64_t *holders;      /* numbers of arrays, ascending in each group */
    struct box_tree tree;
};

/* Groups equal boxes. With `disjoint`, boxes that overlap in part are cut until no two groups overlap. */
rsd_status box_groups_build(struct box_groups *groups, const rsd_layout *layout, bool disjoint);
void box_groups_drop(struct box_groups *groups);

/* Returns whether an element of [lo, lo+len) is in no group, and if so a box of such elements. Requires
 * that groups are disjoint. */
bool box_groups_find_hole(const struct box_groups *groups, const int64_t *lo, const int64_t *len,
                          int64_t *hole_lo, int64_t *hole_len);

#endif
