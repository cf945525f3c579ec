/* overlap.c - where the boxes of one rank meet another layout.
 *
 * Two formulas meet dim by dim: our spans are swept against theirs, and the meetings of the boxes
 * are all combinations.
 *
 *     ours     |---------|     |---------|
 *     theirs  |---|-----|---|-----|---|-----|      dim 0: 3 + 3 meetings, dim 1: m; in all 6 * m,
 *     meets    |--|-----|-|     |-|---|---|        of which only 6 + m are ever stored
 *
 * Explicit boxes on the other side are searched for in its cells, for each of our boxes.
 */
#include "plan.h"

#include <assert.h>

/* More spans along one dim than this are not planned: a list of them would not fit anywhere. */
#define MAX_SPANS ((int64_t)1 << 26)

rsd_status overlap_check_nspans(const struct cuts *cuts, int32_t d)
{
    int64_t nspans = cuts_nspans_bound(cuts);
    if (nspans > MAX_SPANS)
        return fail(RSD_ELIMIT, "dim %d is cut into about %lld runs, at most 2^26 can be planned",
                    (int)d, (long long)nspans);
    return RSD_OK;
}

/* ---- our side ---- */

static rsd_status add_span(struct overlap *overlap, int32_t d, struct span span)
{
    size_t *n = &overlap->dims[d].nown;
    struct span *last = *n ? &overlap->dims[d].own[*n - 1] : NULL;
    if (last && last->lo + last->len == span.lo) {
        last->len += span.len;
        return RSD_OK;
    }
    TRY(GROW(overlap->dims[d].own, overlap->dims[d].own_capacity, *n + 1));
    overlap->dims[d].own[(*n)++] = span;
    return RSD_OK;
}

static rsd_status list_own(struct overlap *overlap, int64_t array, const int64_t *lo,
                           const int64_t *len)
{
    const rsd_layout *own = overlap->own;
    if (!own->mesh && !lo) {
        lo = layout_box_lo(own, array);
        len = layout_box_len(own, array);
    }
    for (int32_t d = 0; d < overlap->ndim; d++) {
        overlap->dims[d].nown = 0;
        if (lo) {
            int64_t at = lo[d] - layout_box_lo(own, array)[d];
            if (len[d] > 0)
                TRY(add_span(overlap, d, (struct span){lo[d], len[d], at, 0}));
            continue;
        }
        assert(own->mesh);
        const struct cuts *cuts = &own->cuts[d];
        TRY(overlap_check_nspans(cuts, d));
        int64_t position = mesh_position_of_array(own->mesh, array);
        int64_t extent = cuts_extent_of(cuts, position);
        for (int64_t at = 0; at < extent;) {
            struct span span = cuts_span_of(cuts, position, at);
            TRY(add_span(overlap, d, span));
            at += span.len;
        }
    }
    return RSD_OK;
}

/* ---- the other side as a formula ---- */

/* Neighbours of the same two holders are neighbours in both arrays too, which ascend: one meeting.
 */
static rsd_status add_meet(struct overlap *overlap, int32_t d, struct span_overlap meet)
{
    size_t *n = &overlap->dims[d].n;
    struct span_overlap *last = *n ? &overlap->dims[d].list[*n - 1] : NULL;
    if (last && last->other_pos == meet.other_pos && last->lo + last->len == meet.lo) {
        last->len += meet.len;
        return RSD_OK;
    }
    TRY(GROW(overlap->dims[d].list, overlap->dims[d].capacity, *n + 1));
    overlap->dims[d].list[(*n)++] = meet;
    return RSD_OK;
}

static rsd_status list_meets(struct overlap *overlap)
{
    for (int32_t d = 0; d < overlap->ndim; d++) {
        const struct cuts *cuts = &overlap->other->cuts[d];
        TRY(overlap_check_nspans(cuts, d));
        overlap->dims[d].n = overlap->dims[d].at = 0;
        for (size_t i = 0; i < overlap->dims[d].nown; i++) {
            struct span own = overlap->dims[d].own[i];
            for (int64_t done = 0; done < own.len;) {
                struct span other = cuts_span_at(cuts, own.lo + done);
                int64_t len = min_i64(other.len, own.len - done);
                TRY(add_meet(
                    overlap, d,
                    (struct span_overlap){own.lo + done, len, own.at + done, other.at, other.pos}));
                done += len;
            }
        }
    }
    return RSD_OK;
}

/* ---- going through the meetings ---- */

rsd_status overlap_start(struct overlap *overlap, const rsd_layout *own, int64_t array,
                         const int64_t *lo, const int64_t *len, const rsd_layout *other,
                         const struct box_groups *groups)
{
    overlap->own = own;
    overlap->other = other;
    overlap->groups = groups;
    overlap->ndim = own->ndim;
    overlap->searching = overlap->exhausted = false;
    TRY(list_own(overlap, array, lo, len));
    for (int32_t d = 0; d < overlap->ndim; d++) {
        overlap->dims[d].at = 0;
        overlap->exhausted = overlap->exhausted || overlap->dims[d].nown == 0;
    }
    return other->mesh && !overlap->exhausted ? list_meets(overlap) : RSD_OK;
}

/* Steps the product, the last dim first; returns the first dim that changed, -1 at the end. */
static int32_t step(struct overlap *overlap, bool meets)
{
    for (int32_t d = overlap->ndim - 1; d >= 0; d--) {
        if (++overlap->dims[d].at < (meets ? overlap->dims[d].n : overlap->dims[d].nown))
            return d;
        overlap->dims[d].at = 0;
    }
    return -1;
}

static void set_from_meets(struct overlap *overlap, int32_t first_changed)
{
    for (int32_t d = first_changed; d < overlap->ndim; d++) {
        const struct span_overlap *meet = &overlap->dims[d].list[overlap->dims[d].at];
        overlap->lo[d] = meet->lo;
        overlap->len[d] = meet->len;
        overlap->own_at[d] = meet->own_at;
        overlap->other_at[d] = meet->other_at;
    }
    overlap->other_position = 0;
    for (int32_t d = 0; d < overlap->ndim; d++)
        overlap->other_position += overlap->dims[d].list[overlap->dims[d].at].other_pos;
}

static bool next_in_product(struct overlap *overlap)
{
    int32_t changed = 0;
    if (overlap->searching) {
        changed = step(overlap, true);
        if (changed < 0) {
            overlap->exhausted = true;
            return false;
        }
    }
    overlap->searching = true;
    set_from_meets(overlap, changed);
    return true;
}

static bool next_in_cells(struct overlap *overlap)
{
    const struct box_groups *groups = overlap->groups;
    int32_t ndim = overlap->ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    for (;;) {
        if (!overlap->searching) {
            overlap->search.started = false;
            overlap->search.depth = 0;
            overlap->search.first = overlap->search.end = 0;
            overlap->searching = true;
        }
        for (int32_t d = 0; d < ndim; d++) {
            lo[d] = overlap->dims[d].own[overlap->dims[d].at].lo;
            len[d] = overlap->dims[d].own[overlap->dims[d].at].len;
        }
        int64_t group = box_tree_next(&groups->tree, &overlap->search, lo, len);
        if (group >= 0) {
            overlap->other_position = group;
            box_overlap(ndim, lo, len, groups->lo + group * ndim, groups->len + group * ndim,
                        overlap->lo, overlap->len);
            for (int32_t d = 0; d < ndim; d++)
                overlap->own_at[d] =
                    overlap->dims[d].own[overlap->dims[d].at].at + overlap->lo[d] - lo[d];
            return true;
        }
        overlap->searching = false;
        if (step(overlap, false) < 0) {
            overlap->exhausted = true;
            return false;
        }
    }
}

bool overlap_next(struct overlap *overlap)
{
    if (overlap->exhausted)
        return false;
    return overlap->other->mesh ? next_in_product(overlap) : next_in_cells(overlap);
}

void overlap_drop(struct overlap *overlap)
{
    for (int32_t d = 0; d < RSD_MAX_DIMS; d++) {
        mem_free(overlap->dims[d].own);
        mem_free(overlap->dims[d].list);
    }
    *overlap = (struct overlap){0};
}

/* ---- a whole dim ---- */

rsd_status overlap_sweep_dim(const struct cuts *own, const struct cuts *other, struct sweep **out,
                             size_t *n)
{
    struct sweep *list = NULL;
    size_t capacity = 0, count = 0;
    struct span ours = {0}, theirs = {0};
    rsd_status status = RSD_OK;
    for (int64_t x = 0; x < own->extent && !status;) {
        if (x >= ours.lo + ours.len)
            ours = cuts_span_at(own, x);
        if (x >= theirs.lo + theirs.len)
            theirs = cuts_span_at(other, x);
        const struct sweep *last = count ? &list[count - 1] : NULL;
        if (!last || last->own_pos != ours.pos || last->other_pos != theirs.pos) {
            status = GROW(list, capacity, count + 1);
            if (!status)
                list[count++] = (struct sweep){ours.pos, theirs.pos};
        }
        x = min_i64(ours.lo + ours.len, theirs.lo + theirs.len);
    }
    if (status) {
        mem_free(list);
        return status;
    }
    *out = list;
    *n = count;
    return RSD_OK;
}
