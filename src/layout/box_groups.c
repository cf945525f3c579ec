/* box_groups.c - groups the explicit boxes of a layout: equal boxes become one group with several holders,
 * and boxes that overlap in part are cut until no two groups overlap.
 *
 *     +-----+                 +--+--+
 *     |  a  |                 |a |  |          groups for what only a holds,
 *     |  +--+--+      ->      +--+--+--+       a group for what both hold,
 *     +--+--+  |              +--+ab|  |       groups for what only b holds;
 *        |  b  |                 +--+--+       the rest of a box is cut into slabs
 *        +-----+                 |  b  |
 *                                +-----+
 *
 * Invariants:
 *   (1) No group is empty. Groups that were cut do not overlap, and each lies inside or outside of every
 *       box.
 *   (2) The order of groups and of their holders depends on the layout only.
 */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

/* ---- lists that grow ---- */

/* Groups while they are built: the capacities of their lists. */
struct group_builder {
    struct box_groups *groups;
    size_t lo_capacity, len_capacity, first_capacity, holders_capacity;
};

static int64_t *group_lo(const struct box_groups *groups, int64_t group)
{
    return groups->lo + group * groups->ndim;
}

static int64_t *group_len(const struct box_groups *groups, int64_t group)
{
    return groups->len + group * groups->ndim;
}

/* Adds a group without holders. */
static rsd_status add_group(struct group_builder *builder, const int64_t *lo, const int64_t *len)
{
    struct box_groups *groups = builder->groups;
    size_t ndim = (size_t)groups->ndim, n = (size_t)groups->ngroups;
    TRY(GROW(groups->lo, builder->lo_capacity, (n + 1) * ndim));
    TRY(GROW(groups->len, builder->len_capacity, (n + 1) * ndim));
    TRY(GROW(groups->first_holder, builder->first_capacity, n + 2));
    if (n == 0)
        groups->first_holder[0] = 0;
    copy_i64s(groups->lo + n * ndim, lo, groups->ndim);
    copy_i64s(groups->len + n * ndim, len, groups->ndim);
    groups->first_holder[n + 1] = groups->first_holder[n];
    groups->ngroups++;
    return RSD_OK;
}

/* Adds holders to the last group. */
static rsd_status add_holders(struct group_builder *builder, const int64_t *arrays, int64_t count)
{
    struct box_groups *groups = builder->groups;
    int64_t *end = &groups->first_holder[groups->ngroups];
    TRY(GROW(groups->holders, builder->holders_capacity, (size_t)(*end + count)));
    copy_i64s(groups->holders + *end, arrays, count);
    *end += count;
    return RSD_OK;
}

/* ---- equal boxes ---- */

static uint64_t box_key(int32_t ndim, const int64_t *lo, const int64_t *len)
{
    uint64_t key = 0x9e3779b97f4a7c15u;
    for (int32_t d = 0; d < ndim; d++) {
        key = (key ^ (uint64_t)lo[d]) * 0xd6e8feb86659fd93u;
        key = (key ^ key >> 32 ^ (uint64_t)len[d]) * 0xa0761d6478bd642fu;
        key ^= key >> 29;
    }
    return key;
}

static bool is_group_of(const struct box_groups *groups, int64_t group, const int64_t *lo,
                        const int64_t *len)
{
    for (int32_t d = 0; d < groups->ndim; d++)
        if (group_lo(groups, group)[d] != lo[d] || group_len(groups, group)[d] != len[d])
            return false;
    return true;
}

/* Finds the group of each box, in order of first appearance; -1 for empty boxes. */
static rsd_status find_equal_boxes(const rsd_layout *layout, struct group_builder *builder,
                                   int64_t *group_of)
{
    struct box_groups *groups = builder->groups;
    size_t slots = 16;
    while (slots < (size_t)layout->nboxes * 2)
        slots *= 2;
    int64_t *table = mem_new(slots, sizeof *table); /* group + 1; 0: free */
    if (!table)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < layout->nboxes && !status; i++) {
        const int64_t *lo = layout_box_lo(layout, i), *len = layout_box_len(layout, i);
        group_of[i] = -1;
        if (box_volume(layout->ndim, len) == 0)
            continue;
        size_t slot = box_key(layout->ndim, lo, len) & (slots - 1);
        while (table[slot] && !is_group_of(groups, table[slot] - 1, lo, len))
            slot = (slot + 1) & (slots - 1);
        if (!table[slot]) {
            status = add_group(builder, lo, len);
            table[slot] = groups->ngroups;
        }
        group_of[i] = table[slot] - 1;
    }
    mem_free(table);
    return status;
}

/* Builds one group for each set of equal boxes, with all arrays that hold them. */
static rsd_status group_equal_boxes(const rsd_layout *layout, struct box_groups *groups)
{
    struct group_builder builder = {.groups = groups};
    int64_t *group_of = mem_new((size_t)layout->nboxes, sizeof *group_of);
    if (!group_of)
        return RSD_ENOMEM;
    rsd_status status = find_equal_boxes(layout, &builder, group_of);
    if (!status)
        status = GROW(groups->first_holder, builder.first_capacity, (size_t)groups->ngroups + 2);
    if (!status)
        status = GROW(groups->holders, builder.holders_capacity, (size_t)layout->nboxes + 1);
    if (!status) {
        /* Counts are stored one index too far; filling the lists then moves each start to its index. */
        int64_t *start = groups->first_holder;
        memset(start, 0, ((size_t)groups->ngroups + 2) * sizeof *start);
        for (int64_t i = 0; i < layout->nboxes; i++)
            if (group_of[i] >= 0)
                start[group_of[i] + 2]++;
        for (int64_t c = 0; c < groups->ngroups; c++)
            start[c + 2] += start[c + 1];
        for (int64_t i = 0; i < layout->nboxes; i++)
            if (group_of[i] >= 0)
                groups->holders[start[group_of[i] + 1]++] = i;
    }
    mem_free(group_of);
    return status;
}

/* ---- boxes that overlap in part ---- */

/* A part of a group that is being cut. */
struct group_part {
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t next;   /* the first of the other groups that it was not compared with yet */
    int64_t inside; /* index into links: the other groups that it lies in; -1: none */
};

struct group_cutter {
    const struct box_groups *whole; /* the groups of equal boxes */
    int64_t group;                  /* the one that is cut */
    int64_t *others;                /* groups that overlap it, ascending */
    size_t nothers, others_capacity;
    struct group_part *parts;
    size_t nparts, parts_capacity;
    struct {
        int64_t other, before;
    } * links;
    size_t nlinks, links_capacity;
    int64_t max_groups; /* limit of the number of groups, and of the number of holders */
    int64_t ncompares;  /* how many more comparisons are allowed */
};

enum { FILE_COMPARES = 256 }; /* for each box of a file */

static rsd_status fail_on_overlaps(void)
{
    return fail(RSD_ELIMIT, "explicit boxes overlap in too many ways to be planned");
}

static rsd_status push_part(struct group_cutter *cutter, const struct group_part *part)
{
    TRY(GROW(cutter->parts, cutter->parts_capacity, cutter->nparts + 1));
    cutter->parts[cutter->nparts++] = *part;
    return RSD_OK;
}

/* Pushes the slabs of `part` outside of [lo, lo+len). Requires that [lo, lo+len) lies inside of it. */
static rsd_status push_slabs(struct group_cutter *cutter, const struct group_part *part,
                             const int64_t *lo, const int64_t *len)
{
    struct group_part rest = *part;
    for (int32_t d = 0; d < cutter->whole->ndim; d++) {
        struct group_part slab = rest;
        slab.len[d] = lo[d] - rest.lo[d];
        if (slab.len[d] > 0)
            TRY(push_part(cutter, &slab));
        slab = rest;
        slab.lo[d] = lo[d] + len[d];
        slab.len[d] = rest.lo[d] + rest.len[d] - slab.lo[d];
        if (slab.len[d] > 0)
            TRY(push_part(cutter, &slab));
        rest.lo[d] = lo[d];
        rest.len[d] = len[d];
    }
    return RSD_OK;
}

static rsd_status push_inside(struct group_cutter *cutter, const struct group_part *part,
                              int64_t other)
{
    TRY(GROW(cutter->links, cutter->links_capacity, cutter->nlinks + 1));
    cutter->links[cutter->nlinks].other = other;
    cutter->links[cutter->nlinks].before = part->inside;
    struct group_part inner = *part;
    inner.inside = (int64_t)cutter->nlinks++;
    return push_part(cutter, &inner);
}

static int compare_numbers(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void sort_ascending(int64_t *numbers, int64_t n)
{
    if (n > 1)
        qsort(numbers, (size_t)n, sizeof *numbers, compare_numbers);
}

/* Adds a part as a group. Its holders are those of its group and of all other groups that it lies in. */
static rsd_status add_part(struct group_cutter *cutter, const struct group_part *part,
                           struct group_builder *builder)
{
    const struct box_groups *whole = cutter->whole;
    struct box_groups *groups = builder->groups;
    if (groups->ngroups >= cutter->max_groups ||
        (groups->ngroups && groups->first_holder[groups->ngroups] >= cutter->max_groups))
        return fail_on_overlaps();
    TRY(add_group(builder, part->lo, part->len));
    int64_t first = groups->first_holder[groups->ngroups - 1];
    int64_t link = part->inside, holder = cutter->group;
    for (;;) {
        const int64_t *range = &whole->first_holder[holder];
        TRY(add_holders(builder, whole->holders + range[0], range[1] - range[0]));
        if (link < 0)
            break;
        holder = cutter->links[link].other;
        link = cutter->links[link].before;
    }
    sort_ascending(groups->holders + first, groups->first_holder[groups->ngroups] - first);
    return RSD_OK;
}

/* Groups before this one contain what they share with it, so the rest is cut at the groups after it. */
static rsd_status cut_group(struct group_cutter *cutter, struct group_builder *builder)
{
    const struct box_groups *whole = cutter->whole;
    int32_t ndim = whole->ndim;
    struct group_part start = {.inside = -1};
    copy_i64s(start.lo, group_lo(whole, cutter->group), ndim);
    copy_i64s(start.len, group_len(whole, cutter->group), ndim);
    cutter->nparts = cutter->nlinks = 0;
    TRY(push_part(cutter, &start));
    while (cutter->nparts > 0) {
        struct group_part part = cutter->parts[--cutter->nparts];
        int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS], other = -1;
        while (part.next < (int64_t)cutter->nothers && other < 0) {
            other = cutter->others[part.next++];
            cutter->ncompares--;
            if (!box_overlap(ndim, part.lo, part.len, group_lo(whole, other),
                             group_len(whole, other), lo, len))
                other = -1;
        }
        if (cutter->ncompares < 0)
            return fail_on_overlaps();
        if (other < 0) {
            TRY(add_part(cutter, &part, builder));
            continue;
        }
        TRY(push_slabs(cutter, &part, lo, len));
        if (other > cutter->group) {
            copy_i64s(part.lo, lo, ndim);
            copy_i64s(part.len, len, ndim);
            TRY(push_inside(cutter, &part, other));
        }
    }
    return RSD_OK;
}

/* Lists the groups that overlap the current one. ELIMIT: there are too many in total. */
static rsd_status find_overlapping(struct group_cutter *cutter)
{
    const struct box_groups *whole = cutter->whole;
    const int64_t *lo = group_lo(whole, cutter->group), *len = group_len(whole, cutter->group);
    struct box_tree_search search = {0};
    cutter->nothers = 0;
    for (int64_t other; (other = box_tree_next(&whole->tree, &search, lo, len)) >= 0;) {
        if (other == cutter->group)
            continue;
        if (--cutter->ncompares < 0)
            return fail_on_overlaps();
        TRY(GROW(cutter->others, cutter->others_capacity, cutter->nothers + 1));
        cutter->others[cutter->nothers++] = other;
    }
    sort_ascending(cutter->others, (int64_t)cutter->nothers);
    return RSD_OK;
}

/* Replaces groups of equal boxes by groups that do not overlap. */
static rsd_status cut_overlaps(struct box_groups *groups, bool from_file)
{
    const int64_t file_compares = FILE_COMPARES * (groups->first_holder[groups->ngroups] + 16);
    struct box_groups cut = {.ndim = groups->ndim};
    struct group_builder builder = {.groups = &cut};
    struct group_cutter cutter = {.whole = groups,
                                  .max_groups =
                                      64 * groups->first_holder[groups->ngroups] + (1 << 22),
                                  .ncompares = from_file ? file_compares : (int64_t)1 << 31};
    rsd_status status = RSD_OK;
    for (cutter.group = 0; cutter.group < groups->ngroups && !status; cutter.group++) {
        status = find_overlapping(&cutter);
        if (!status)
            status = cut_group(&cutter, &builder);
    }
    mem_free(cutter.others);
    mem_free(cutter.parts);
    mem_free(cutter.links);
    if (!status)
        status = box_tree_build(&cut.tree, cut.ndim, cut.ngroups, cut.lo, cut.len);
    if (status) {
        box_groups_drop(&cut);
        return status;
    }
    box_groups_drop(groups);
    *groups = cut;
    return RSD_OK;
}

rsd_status box_groups_build(struct box_groups *groups, const rsd_layout *layout, bool disjoint)
{
    *groups = (struct box_groups){.ndim = layout->ndim};
    rsd_status status = group_equal_boxes(layout, groups);
    if (!status)
        status =
            box_tree_build(&groups->tree, groups->ndim, groups->ngroups, groups->lo, groups->len);
    int64_t a, b;
    if (!status && disjoint && box_tree_any_overlap(&groups->tree, &a, &b))
        status = cut_overlaps(groups, layout->from_file);
    if (status)
        box_groups_drop(groups);
    return status;
}

void box_groups_drop(struct box_groups *groups)
{
    box_tree_drop(&groups->tree);
    mem_free(groups->lo);
    mem_free(groups->len);
    mem_free(groups->first_holder);
    mem_free(groups->holders);
    *groups = (struct box_groups){0};
}
