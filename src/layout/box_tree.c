/* box_tree.c - finds boxes by their position, in a binary tree whose nodes bound the boxes below them.
 *
 * Boxes are sorted along a Z-order curve: by the bits of their centers, interleaved over the dims in which
 * centers differ. So consecutive boxes lie close together. The tree halves that order. Nodes are numbered
 * as in a heap, so only their bounds are stored.
 *
 *     order   . . . . . . . . . . . . . . . .
 *     node 0  |-----------------------------|
 *     1, 2    |-------------| |-------------|
 *     3 .. 6  |-----| |-----| |-----| |-----|      a node of at most LEAF boxes is a leaf
 */
#include "layout.h"

#include <string.h>

enum { LEAF = 8, RADIX_BITS = 11, RADIX = 1 << RADIX_BITS };

struct keyed_box {
    uint64_t key;
    int64_t box;
};

/* Sorts by key, least significant digit first. Digits that are the same in all keys are skipped. */
static void sort_keys(struct keyed_box *keys, struct keyed_box *spare, int64_t n)
{
    struct keyed_box *from = keys, *to = spare;
    for (int shift = 0; shift < 64; shift += RADIX_BITS) {
        int64_t start[RADIX] = {0};
        for (int64_t i = 0; i < n; i++)
            start[from[i].key >> shift & (RADIX - 1)]++;
        if (start[from[0].key >> shift & (RADIX - 1)] == n)
            continue;
        int64_t sum = 0;
        for (int digit = 0; digit < RADIX; digit++) {
            int64_t count = start[digit];
            start[digit] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++)
            to[start[from[i].key >> shift & (RADIX - 1)]++] = from[i];
        struct keyed_box *swap = from;
        from = to;
        to = swap;
    }
    if (from != keys)
        memcpy(keys, from, (size_t)n * sizeof *keys);
}

/* The curve: for each dim in which centers differ, the least center, and how many low bits to drop so that
 * the keys of all dims fit into 64 bits. */
struct curve {
    int32_t ndims, bits;
    int32_t dim[RSD_MAX_DIMS], shift[RSD_MAX_DIMS];
    int64_t origin[RSD_MAX_DIMS];
};

/* The boxes of the caller. */
struct given_boxes {
    int32_t ndim;
    int64_t n;
    const int64_t *lo, *len;
};

static int64_t box_center(const struct given_boxes *given, int64_t box, int32_t d)
{
    return given->lo[box * given->ndim + d] + given->len[box * given->ndim + d] / 2;
}

/* Chooses the dims of the curve, in which centers differ, and how many bits of each are used. */
static struct curve choose_curve(const struct given_boxes *given)
{
    struct curve curve = {0};
    int32_t width[RSD_MAX_DIMS] = {0};
    for (int32_t d = 0; d < given->ndim; d++) {
        int64_t least = INT64_MAX, most = 0;
        for (int64_t i = 0; i < given->n; i++) {
            int64_t c = box_center(given, i, d);
            least = min_i64(least, c);
            most = max_i64(most, c);
        }
        if (least >= most)
            continue;
        curve.dim[curve.ndims] = d;
        curve.origin[curve.ndims] = least;
        width[curve.ndims++] = 64 - __builtin_clzll((unsigned long long)(most - least));
    }
    curve.bits = curve.ndims ? 64 / curve.ndims : 0;
    for (int32_t k = 0; k < curve.ndims; k++)
        curve.shift[k] = (int32_t)max_i64(0, width[k] - curve.bits);
    return curve;
}

/* Returns the position of a box along the curve. */
static uint64_t curve_key(const struct given_boxes *given, const struct curve *curve, int64_t box)
{
    if (curve->ndims == 1)
        return (uint64_t)(box_center(given, box, curve->dim[0]) - curve->origin[0]);
    uint64_t key = 0, along[RSD_MAX_DIMS];
    for (int32_t k = 0; k < curve->ndims; k++)
        along[k] =
            (uint64_t)(box_center(given, box, curve->dim[k]) - curve->origin[k]) >> curve->shift[k];
    for (int32_t bit = curve->bits - 1; bit >= 0; bit--)
        for (int32_t k = 0; k < curve->ndims; k++)
            key = key << 1 | (along[k] >> bit & 1);
    return key;
}

static int64_t *bounds_of_node(const struct box_tree *tree, int64_t node)
{
    return tree->bounds + node * 2 * tree->ndim;
}

static int64_t *bounds_of_box(const struct box_tree *tree, int64_t place)
{
    return tree->boxes + place * 2 * tree->ndim;
}

static void widen_bounds(int32_t ndim, int64_t *bounds, const int64_t *lo, const int64_t *hi)
{
    for (int32_t d = 0; d < ndim; d++) {
        bounds[d] = min_i64(bounds[d], lo[d]);
        bounds[ndim + d] = max_i64(bounds[ndim + d], hi[d]);
    }
}

/* Sets the bounds of a node and of all nodes below it. The node has the boxes [first, end) of the order. */
static void set_bounds(const struct box_tree *tree, int64_t node, int64_t first, int64_t end)
{
    int32_t ndim = tree->ndim;
    int64_t *bounds = bounds_of_node(tree, node);
    for (int32_t d = 0; d < ndim; d++) {
        bounds[d] = INT64_MAX;
        bounds[ndim + d] = 0;
    }
    if (end - first > LEAF) {
        int64_t middle = first + (end - first) / 2;
        for (int64_t child = 2 * node + 1; child <= 2 * node + 2; child++) {
            bool left = child == 2 * node + 1;
            set_bounds(tree, child, left ? first : middle, left ? middle : end);
            const int64_t *below = bounds_of_node(tree, child);
            widen_bounds(ndim, bounds, below, below + ndim);
        }
        return;
    }
    for (int64_t i = first; i < end; i++)
        widen_bounds(ndim, bounds, bounds_of_box(tree, i), bounds_of_box(tree, i) + ndim);
}

/* Sorts the boxes along the curve and sets all bounds. `spare` is memory for the sort. */
static void fill_tree(struct box_tree *tree, const struct given_boxes *given,
                      struct keyed_box *keys, struct keyed_box *spare)
{
    struct curve curve = choose_curve(given);
    for (int64_t i = 0; i < given->n; i++)
        keys[i] = (struct keyed_box){curve_key(given, &curve, i), i};
    sort_keys(keys, spare, given->n);
    for (int64_t i = 0; i < given->n; i++) {
        int64_t box = tree->order[i] = keys[i].box, *bounds = bounds_of_box(tree, i);
        for (int32_t d = 0; d < given->ndim; d++) {
            bounds[d] = given->lo[box * given->ndim + d];
            bounds[given->ndim + d] = bounds[d] + given->len[box * given->ndim + d];
        }
    }
    set_bounds(tree, 0, 0, given->n);
}

rsd_status box_tree_build(struct box_tree *tree, int32_t ndim, int64_t nboxes, const int64_t *lo,
                          const int64_t *len)
{
    *tree = (struct box_tree){.ndim = ndim, .nboxes = nboxes, .nnodes = 1};
    for (int64_t n = nboxes; n > LEAF; n = n - n / 2)
        tree->nnodes = 2 * tree->nnodes + 1;
    size_t n = (size_t)nboxes, corners = 2 * (size_t)ndim;
    struct keyed_box *keys = mem_new(n, sizeof *keys), *spare = mem_new(n, sizeof *spare);
    tree->order = mem_new(n, sizeof *tree->order);
    tree->boxes = mem_new(n * corners, sizeof *tree->boxes);
    tree->bounds = mem_new((size_t)tree->nnodes * corners, sizeof *tree->bounds);
    rsd_status status =
        keys && spare && tree->order && tree->boxes && tree->bounds ? RSD_OK : RSD_ENOMEM;
    if (!status && nboxes > 0) {
        struct given_boxes given = {ndim, nboxes, lo, len};
        fill_tree(tree, &given, keys, spare);
    }
    mem_free(keys);
    mem_free(spare);
    if (status)
        box_tree_drop(tree);
    return status;
}

void box_tree_drop(struct box_tree *tree)
{
    mem_free(tree->order);
    mem_free(tree->boxes);
    mem_free(tree->bounds);
    *tree = (struct box_tree){0};
}

/* ---- overlaps between boxes of the tree ---- */

struct subtree {
    int64_t node, first, end;
};

static struct subtree subtree_half(struct subtree tree, bool right)
{
    int64_t middle = tree.first + (tree.end - tree.first) / 2;
    if (right)
        return (struct subtree){2 * tree.node + 2, middle, tree.end};
    return (struct subtree){2 * tree.node + 1, tree.first, middle};
}

static bool corners_overlap(int32_t ndim, const int64_t *a, const int64_t *b)
{
    for (int32_t d = 0; d < ndim; d++)
        if (a[d] >= b[ndim + d] || b[d] >= a[ndim + d])
            return false;
    return true;
}

/* Returns whether a box of one subtree overlaps a box of the other, and if so their indices. Requires that
 * the subtrees are the same or have no box in common. */
static bool any_pair_overlaps(const struct box_tree *tree, struct subtree a, struct subtree b,
                              int64_t found[2])
{
    bool same = a.node == b.node;
    int64_t na = a.end - a.first, nb = b.end - b.first;
    if (!same &&
        !corners_overlap(tree->ndim, bounds_of_node(tree, a.node), bounds_of_node(tree, b.node)))
        return false;
    if (na > LEAF && same)
        return any_pair_overlaps(tree, subtree_half(a, false), subtree_half(a, false), found) ||
               any_pair_overlaps(tree, subtree_half(a, true), subtree_half(a, true), found) ||
               any_pair_overlaps(tree, subtree_half(a, false), subtree_half(a, true), found);
    if (na > LEAF && na >= nb)
        return any_pair_overlaps(tree, subtree_half(a, false), b, found) ||
               any_pair_overlaps(tree, subtree_half(a, true), b, found);
    if (nb > LEAF)
        return any_pair_overlaps(tree, a, subtree_half(b, false), found) ||
               any_pair_overlaps(tree, a, subtree_half(b, true), found);
    for (int64_t i = a.first; i < a.end; i++)
        for (int64_t j = same ? i + 1 : b.first; j < b.end; j++)
            if (corners_overlap(tree->ndim, bounds_of_box(tree, i), bounds_of_box(tree, j))) {
                found[0] = i;
                found[1] = j;
                return true;
            }
    return false;
}

bool box_tree_any_overlap(const struct box_tree *tree, int64_t *a, int64_t *b)
{
    struct subtree all = {0, 0, tree->nboxes};
    int64_t found[2];
    if (!any_pair_overlaps(tree, all, all, found))
        return false;
    *a = tree->order[found[0]];
    *b = tree->order[found[1]];
    return true;
}

/* ---- search ---- */

static bool bounds_overlap(int32_t ndim, const int64_t *bounds, const int64_t *lo,
                           const int64_t *len)
{
    for (int32_t d = 0; d < ndim; d++)
        if (lo[d] >= bounds[ndim + d] || lo[d] + len[d] <= bounds[d])
            return false;
    return true;
}

static void push_tree_node(struct box_tree_search *search, int64_t node, int64_t first, int64_t end)
{
    search->path[search->depth].node = node;
    search->path[search->depth].first = first;
    search->path[search->depth++].end = end;
}

int64_t box_tree_next(const struct box_tree *tree, struct box_tree_search *search,
                      const int64_t *lo, const int64_t *len)
{
    int32_t ndim = tree->ndim;
    if (!search->started) {
        search->started = true;
        if (tree->nboxes > 0)
            push_tree_node(search, 0, 0, tree->nboxes);
    }
    for (;;) {
        while (search->first < search->end) {
            int64_t place = search->first++;
            if (bounds_overlap(ndim, bounds_of_box(tree, place), lo, len))
                return tree->order[place];
        }
        if (search->depth == 0)
            return -1;
        search->depth--;
        int64_t node = search->path[search->depth].node;
        int64_t first = search->path[search->depth].first, end = search->path[search->depth].end;
        if (!bounds_overlap(ndim, bounds_of_node(tree, node), lo, len))
            continue;
        if (end - first <= LEAF) {
            search->first = first;
            search->end = end;
            continue;
        }
        int64_t middle = first + (end - first) / 2;
        push_tree_node(search, 2 * node + 2, middle, end);
        push_tree_node(search, 2 * node + 1, first, middle);
    }
}
