/* coverage.c - whether a layout covers its tensor, and if not, a box that is missing.
 *
 * Groups do not overlap, so a region is covered exactly if the volumes of its overlaps with groups add up to
 * its own. A region that is not covered is halved until a part overlaps no group. That part is then grown
 * until it touches groups on every side, so that the error names the box that a user expects.
 */
#include "layout.h"

/* Returns how many elements of [lo, lo+len) are in some group. Requires that groups are disjoint. */
static int64_t covered_volume(const struct box_groups *groups, const int64_t *lo,
                              const int64_t *len)
{
    int64_t volume = 0, group, overlap_lo[RSD_MAX_DIMS], overlap_len[RSD_MAX_DIMS];
    struct box_tree_search search = {0};
    while ((group = box_tree_next(&groups->tree, &search, lo, len)) >= 0) {
        box_overlap(groups->ndim, lo, len, groups->lo + group * groups->ndim,
                    groups->len + group * groups->ndim, overlap_lo, overlap_len);
        volume += box_volume(groups->ndim, overlap_len);
    }
    return volume;
}

/* Grows a hole inside of [lo, lo+len) along dim d, in both directions. */
static void grow_hole(const struct box_groups *groups, const int64_t *lo, const int64_t *len,
                      int32_t d, int64_t *hole_lo, int64_t *hole_len)
{
    int64_t begin = lo[d], end = lo[d] + len[d], group;
    int64_t old_begin = hole_lo[d], old_end = hole_lo[d] + hole_len[d];
    hole_lo[d] = begin;
    hole_len[d] = end - begin;
    struct box_tree_search search = {0};
    while ((group = box_tree_next(&groups->tree, &search, hole_lo, hole_len)) >= 0) {
        int64_t group_lo = groups->lo[group * groups->ndim + d];
        int64_t group_hi = group_lo + groups->len[group * groups->ndim + d];
        if (group_lo >= old_end)
            end = min_i64(end, group_lo);
        else if (group_hi <= old_begin)
            begin = max_i64(begin, group_hi);
    }
    hole_lo[d] = begin;
    hole_len[d] = end - begin;
}

bool box_groups_find_hole(const struct box_groups *groups, const int64_t *lo, const int64_t *len,
                          int64_t *hole_lo, int64_t *hole_len)
{
    int32_t ndim = groups->ndim;
    if (covered_volume(groups, lo, len) == box_volume(ndim, len))
        return false;
    copy_i64s(hole_lo, lo, ndim);
    copy_i64s(hole_len, len, ndim);
    while (covered_volume(groups, hole_lo, hole_len) > 0) {
        int32_t longest = 0;
        for (int32_t d = 1; d < ndim; d++)
            if (hole_len[d] > hole_len[longest])
                longest = d;
        int64_t whole = hole_len[longest];
        hole_len[longest] = whole / 2;
        if (covered_volume(groups, hole_lo, hole_len) == box_volume(ndim, hole_len)) {
            hole_lo[longest] += whole / 2;
            hole_len[longest] = whole - whole / 2;
        }
    }
    for (int32_t d = ndim - 1; d >= 0; d--)
        grow_hole(groups, lo, len, d, hole_lo, hole_len);
    return true;
}

/* Sets the kind of coverage, and the number of copies or a box that shows it. Requires disjoint groups. */
static void classify_coverage(const rsd_layout *layout, const struct box_groups *groups,
                              rsd_coverage *coverage)
{
    static const int64_t origin[RSD_MAX_DIMS];
    coverage->box.ndim = layout->ndim;
    if (box_groups_find_hole(groups, origin, layout->shape, coverage->box.lo, coverage->box.len)) {
        coverage->kind = RSD_MISSES;
        return;
    }
    int64_t least = INT64_MAX, most = 0, fullest = 0;
    for (int64_t c = 0; c < groups->ngroups; c++) {
        int64_t holders = groups->first_holder[c + 1] - groups->first_holder[c];
        least = min_i64(least, holders);
        if (holders > most) {
            most = holders;
            fullest = c;
        }
    }
    if (least < most) {
        coverage->kind = RSD_COVERS_UNEVENLY;
        box_set(&coverage->box, layout->ndim, groups->lo + fullest * layout->ndim,
                groups->len + fullest * layout->ndim);
        return;
    }
    coverage->kind = most > 1 ? RSD_COVERS_EVENLY : RSD_COVERS_ONCE;
    coverage->copies = most;
}

rsd_status rsd_layout_coverage(const rsd_layout *layout, rsd_coverage *coverage)
{
    TRY(report_check("rsd_coverage", coverage));
    rsd_coverage result = {.kind = RSD_COVERS_ONCE, .copies = 1};
    if (layout->mesh) {
        result.copies = layout->copies.total;
        if (result.copies > 1)
            result.kind = RSD_COVERS_EVENLY;
    } else if (layout->volume > 0) {
        struct box_groups groups;
        TRY(box_groups_build(&groups, layout, true));
        result.copies = 0;
        classify_coverage(layout, &groups, &result);
        box_groups_drop(&groups);
    }
    report_copy(coverage, &result, sizeof result);
    return RSD_OK;
}
