/* tree.c - finds boxes by place: a binary tree whose nodes bound the boxes below them.
 *
 * Boxes are sorted along a curve that visits neighbours one after the other (the bits of their
 * centres, interleaved over the dims in which they differ), so a run of the order is compact in
 * space. Halving that order gives the tree; nodes are numbered like a heap, so nothing but their
 * bounds is stored.
 *
 *     order   . . . . . . . . . . . . . . . .
 *     node 0  |-----------------------------|
 *     1, 2    |-------------| |-------------|
 *     3 .. 6  |-----| |-----| |-----| |-----|      a node of at most LEAF boxes is a leaf
 */
#include "layout.h"

#include <string.h>

enum { LEAF = 8, RADIX_BITS = 11, RADIX = 1 << RADIX_BITS };

struct keyed {
    uint64_t key;
    int64_t box;
};

/* Least significant digit first, skipping digits that all keys share. */
static void sort_keys(struct keyed *keys, struct keyed *spare, int64_t n)
{
    struct keyed *from = keys, *to = spare;
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
        struct keyed *swap = from;
        from = to;
        to = swap;
    }
    if (from != keys)
        memcpy(keys, from, (size_t)n * sizeof *keys);
}

/* For each dim in which centres differ: where they begin, and how far to shift so that as many
 * leading bits as each dim can have remain. */
struct curve {
    int32_t ndims, bits;
    int32_t dim[RSD_MAX_DIMS], shift[RSD_MAX_DIMS];
    int64_t origin[RSD_MAX_DIMS];
};

/* Boxes as they were given. */
struct given {
    int32_t ndim;
    int64_t n;
    const int64_t *lo, *len;
};

static int64_t centre(const struct given *given, int64_t box, int32_t d)
{
    return given->lo[box * given->ndim + d] + given->len[box * given->ndim + d] / 2;
}

static struct curve curve_over(const struct given *given)
{
    struct curve curve = {0};
    int32_t width[RSD_MAX_DIMS] = {0};
    for (int32_t d = 0; d < given->ndim; d++) {
        int64_t least = INT64_MAX, most = 0;
        for (int64_t i = 0; i < given->n; i++) {
            int64_t c = centre(given, i, d);
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

static uint64_t curve_key(const struct given *given, const struct curve *curve, int64_t box)
{
    if (curve->ndims == 1)
        return (uint64_t)(centre(given, box, curve->dim[0]) - curve->origin[0]);
    uint64_t key = 0, along[RSD_MAX_DIMS];
    for (int32_t k = 0; k < curve->ndims; k++)
        along[k] =
            (uint64_t)(centre(given, box, curve->dim[k]) - curve->origin[k]) >> curve->shift[k];
    for (int32_t bit = curve->bits - 1; bit >= 0; bit--)
        for (int32_t k = 0; k < curve->ndims; k++)
            key = key << 1 | (along[k] >> bit & 1);
    return key;
}

static int64_t *node_bounds(const struct box_tree *tree, int64_t node)
{
    return tree->bounds + node * 2 * tree->ndim;
}

static int64_t *box_bounds(const struct box_tree *tree, int64_t place)
{
    return tree->boxes + place * 2 * tree->ndim;
}

static void widen(int32_t ndim, int64_t *bounds, const int64_t *lo, const int64_t *hi)
{
    for (int32_t d = 0; d < ndim; d++) {
        bounds[d] = min_i64(bounds[d], lo[d]);
        bounds[ndim + d] = max_i64(bounds[ndim + d], hi[d]);
    }
}

static void set_bounds(const struct box_tree *tree, int64_t node, int64_t first, int64_t end)
{
    int32_t ndim = tree->ndim;
    int64_t *bounds = node_bounds(tree, node);
    for (int32_t d = 0; d < ndim; d++) {
        bounds[d] = INT64_MAX;
        bounds[ndim + d] = 0;
    }
    if (end - first > LEAF) {
        int64_t middle = first + (end - first) / 2;
        for (int64_t child = 2 * node + 1; child <= 2 * node + 2; child++) {
            bool left = child == 2 * node + 1;
            set_bounds(tree, child, left ? first : middle, left ? middle : end);
            const int64_t *below = node_bounds(tree, child);
            widen(ndim, bounds, below, below + ndim);
        }
        return;
    }
    for (int64_t i = first; i < end; i++)
        widen(ndim, bounds, box_bounds(tree, i), box_bounds(tree, i) + ndim);
}

static void fill(struct box_tree *tree, const struct given *given, struct keyed *keys,
                 struct keyed *spare)
{
    struct curve curve = curve_over(given);
    for (int64_t i = 0; i < given->n; i++)
        keys[i] = (struct keyed){curve_key(given, &curve, i), i};
    sort_keys(keys, spare, given->n);
    for (int64_t i = 0; i < given->n; i++) {
        int64_t box = tree->order[i] = keys[i].box, *bounds = box_bounds(tree, i);
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
    struct keyed *keys = mem_new(n, sizeof *keys), *spare = mem_new(n, sizeof *spare);
    tree->order = mem_new(n, sizeof *tree->order);
    tree->boxes = mem_new(n * corners, sizeof *tree->boxes);
    tree->bounds = mem_new((size_t)tree->nnodes * corners, sizeof *tree->bounds);
    rsd_status status =
        keys && spare && tree->order && tree->boxes && tree->bounds ? RSD_OK : RSD_ENOMEM;
    if (!status && nboxes > 0) {
        struct given given = {ndim, nboxes, lo, len};
        fill(tree, &given, keys, spare);
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

/* ---- does any box overlap another? ---- */

struct subtree {
    int64_t node, first, end;
};

static struct subtree half_of(struct subtree of, bool right)
{
    int64_t middle = of.first + (of.end - of.first) / 2;
    if (right)
        return (struct subtree){2 * of.node + 2, middle, of.end};
    return (struct subtree){2 * of.node + 1, of.first, middle};
}

static bool corners_meet(int32_t ndim, const int64_t *a, const int64_t *b)
{
    for (int32_t d = 0; d < ndim; d++)
        if (a[d] >= b[ndim + d] || b[d] >= a[ndim + d])
            return false;
    return true;
}

/* Two subtrees that are the same, or have no box in common; the places of two boxes that meet. */
static bool any_pair_meets(const struct box_tree *tree, struct subtree a, struct subtree b,
                           int64_t places[2])
{
    bool same = a.node == b.node;
    int64_t na = a.end - a.first, nb = b.end - b.first;
    if (!same && !corners_meet(tree->ndim, node_bounds(tree, a.node), node_bounds(tree, b.node)))
        return false;
    if (na > LEAF && same)
        return any_pair_meets(tree, half_of(a, false), half_of(a, false), places) ||
               any_pair_meets(tree, half_of(a, true), half_of(a, true), places) ||
               any_pair_meets(tree, half_of(a, false), half_of(a, true), places);
    if (na > LEAF && na >= nb)
        return any_pair_meets(tree, half_of(a, false), b, places) ||
               any_pair_meets(tree, half_of(a, true), b, places);
    if (nb > LEAF)
        return any_pair_meets(tree, a, half_of(b, false), places) ||
               any_pair_meets(tree, a, half_of(b, true), places);
    for (int64_t i = a.first; i < a.end; i++)
        for (int64_t j = same ? i + 1 : b.first; j < b.end; j++)
            if (corners_meet(tree->ndim, box_bounds(tree, i), box_bounds(tree, j))) {
                places[0] = i;
                places[1] = j;
                return true;
            }
    return false;
}

bool box_tree_any_overlap(const struct box_tree *tree, int64_t *a, int64_t *b)
{
    struct subtree all = {0, 0, tree->nboxes};
    int64_t places[2];
    if (!any_pair_meets(tree, all, all, places))
        return false;
    *a = tree->order[places[0]];
    *b = tree->order[places[1]];
    return true;
}

/* ---- search ---- */

static bool bounds_meet(int32_t ndim, const int64_t *bounds, const int64_t *lo, const int64_t *len)
{
    for (int32_t d = 0; d < ndim; d++)
        if (lo[d] >= bounds[ndim + d] || lo[d] + len[d] <= bounds[d])
            return false;
    return true;
}

static void push(struct box_tree_search *search, int64_t node, int64_t first, int64_t end)
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
            push(search, 0, 0, tree->nboxes);
    }
    for (;;) {
        while (search->first < search->end) {
            int64_t place = search->first++;
            if (bounds_meet(ndim, box_bounds(tree, place), lo, len))
                return tree->order[place];
        }
        if (search->depth == 0)
            return -1;
        search->depth--;
        int64_t node = search->path[search->depth].node;
        int64_t first = search->path[search->depth].first, end = search->path[search->depth].end;
        if (!bounds_meet(ndim, node_bounds(tree, node), lo, len))
            continue;
        if (end - first <= LEAF) {
            search->first = first;
            search->end = end;
            continue;
        }
        int64_t middle = first + (end - first) / 2;
        push(search, 2 * node + 2, middle, end);
        push(search, 2 * node + 1, first, middle);
    }
}
