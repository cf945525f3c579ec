/* cover.c - does a layout cover its tensor, and if not, which box is missing?
 *
 * Cells do not overlap, so a region is covered exactly when the volumes of its meetings with cells
 * add up to its own. A region that is not is halved until a part meets no cell at all; that part is
 * then grown until it touches cells on every side, so that the box named is one a person expects.
 */
#include "layout.h"

static int64_t covered_volume(const struct box_groups *groups, const int64_t *lo,
                              const int64_t *len)
{
    int64_t volume = 0, group, meet_lo[RSD_MAX_DIMS], meet_len[RSD_MAX_DIMS];
    struct box_tree_search search = {0};
    while ((group = box_tree_next(&groups->tree, &search, lo, len)) >= 0) {
        box_overlap(groups->ndim, lo, len, groups->lo + group * groups->ndim,
                    groups->len + group * groups->ndim, meet_lo, meet_len);
        volume += box_volume(groups->ndim, meet_len);
    }
    return volume;
}

/* Grows an uncovered box inside [lo, lo+len) along dim d, both ways. */
static void grow(const struct box_groups *groups, const int64_t *lo, const int64_t *len, int32_t d,
                 int64_t *hole_lo, int64_t *hole_len)
{
    int64_t begin = lo[d], end = lo[d] + len[d], group;
    int64_t old_begin = hole_lo[d], old_end = hole_lo[d] + hole_len[d];
    hole_lo[d] = begin;
    hole_len[d] = end - begin;
    struct box_tree_search search = {0};
    while ((group = box_tree_next(&groups->tree, &search, hole_lo, hole_len)) >= 0) {
        int64_t cell_lo = groups->lo[group * groups->ndim + d];
        int64_t cell_hi = cell_lo + groups->len[group * groups->ndim + d];
        if (cell_lo >= old_end)
            end = min_i64(end, cell_lo);
        else if (cell_hi <= old_begin)
            begin = max_i64(begin, cell_hi);
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
        grow(groups, lo, len, d, hole_lo, hole_len);
    return true;
}

static void judge(const rsd_layout *layout, const struct box_groups *groups, rsd_coverage *check)
{
    static const int64_t origin[RSD_MAX_DIMS];
    check->box.ndim = layout->ndim;
    if (box_groups_find_hole(groups, origin, layout->shape, check->box.lo, check->box.len)) {
        check->cover = RSD_MISSES;
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
        check->cover = RSD_COVERS_UNEVENLY;
        box_set(&check->box, layout->ndim, groups->lo + fullest * layout->ndim,
                groups->len + fullest * layout->ndim);
        return;
    }
    check->cover = most > 1 ? RSD_COVERS_EVENLY : RSD_COVERS_ONCE;
    check->copies = most;
}

rsd_status rsd_layout_coverage(const rsd_layout *layout, rsd_coverage *check)
{
    TRY(report_check("rsd_coverage", check));
    rsd_coverage result = {.cover = RSD_COVERS_ONCE, .copies = 1};
    if (layout->mesh) {
        result.copies = layout->copies.total;
        if (result.copies > 1)
            result.cover = RSD_COVERS_EVENLY;
    } else if (layout->volume > 0) {
        struct box_groups groups;
        TRY(box_groups_build(&groups, layout, true));
        result.copies = 0;
        judge(layout, &groups, &result);
        box_groups_drop(&groups);
    }
    report_copy(check, &result, sizeof result);
    return RSD_OK;
}
