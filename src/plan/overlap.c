/* overlap.c - the overlaps of the boxes of one array with another layout.
 *
 * Two meshes overlap dim by dim: spans of one are compared with spans of the other in one sweep. The overlaps
 * of boxes are all combinations over the dims.
 *
 *     own       |---------|     |---------|
 *     other    |---|-----|---|-----|---|-----|     dim 0 has 3 + 3 overlaps and dim 1 has m: in all 6 * m,
 *     overlaps  |--|-----|-|     |-|---|---|       of which only 6 + m are stored
 *
 * If the other layout has explicit boxes, its groups are searched for each own box.
 */
#include "plan.h"

#include <assert.h>

/* The limit of spans along one dim: they are listed in memory. */
#define MAX_SPANS ((int64_t)1 << 26)

rsd_status overlap_check_nspans(const struct cuts *cuts, int32_t d)
{
    int64_t nspans = cuts_nspans_bound(cuts);
    if (nspans > MAX_SPANS)
        return fail(RSD_ELIMIT, "dim %d is cut into about %lld spans (at most 2^26)", (int)d,
                    (long long)nspans);
    return RSD_OK;
}

/* ---- spans of the own array ---- */

/* Adds a span of the own array along a dim, or extends the last one if they are adjacent. */
static rsd_status add_own_span(struct overlap *overlap, int32_t d, struct span span)
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

/* Lists the spans of the own array along each dim. lo and len, if not NULL, limit an explicit array to a box. */
static rsd_status list_own_spans(struct overlap *overlap, int64_t array, const int64_t *lo,
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
                TRY(add_own_span(overlap, d, (struct span){lo[d], len[d], at, 0}));
            continue;
        }
        assert(own->mesh);
        const struct cuts *cuts = &own->cuts[d];
        TRY(overlap_check_nspans(cuts, d));
        int64_t position = mesh_position_of_array(own->mesh, array);
        int64_t extent = cuts_extent_of(cuts, position);
        for (int64_t at = 0; at < extent;) {
            struct span span = cuts_span_of(cuts, position, at);
            TRY(add_own_span(overlap, d, span));
            at += span.len;
        }
    }
    return RSD_OK;
}

/* ---- overlaps with a mesh ---- */

/* Consecutive overlaps of the same two arrays are consecutive in both arrays, so they become one. */
static rsd_status add_span_overlap(struct overlap *overlap, int32_t d, struct span_overlap span)
{
    size_t *n = &overlap->dims[d].n;
    struct span_overlap *last = *n ? &overlap->dims[d].list[*n - 1] : NULL;
    if (last && last->other_pos == span.other_pos && last->lo + last->len == span.lo) {
        last->len += span.len;
        return RSD_OK;
    }
    TRY(GROW(overlap->dims[d].list, overlap->dims[d].capacity, *n + 1));
    overlap->dims[d].list[(*n)++] = span;
    return RSD_OK;
}

/* Lists the overlaps of the own spans with the spans of the other mesh, along each dim. */
static rsd_status list_span_overlaps(struct overlap *overlap)
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
                TRY(add_span_overlap(
                    overlap, d,
                    (struct span_overlap){own.lo + done, len, own.at + done, other.at, other.pos}));
                done += len;
            }
        }
    }
    return RSD_OK;
}

/* ---- the iterator ---- */

rsd_status overlap_start(struct overlap *overlap, const rsd_layout *own, int64_t array,
                         const int64_t *lo, const int64_t *len, const rsd_layout *other,
                         const struct box_groups *groups)
{
    overlap->own = own;
    overlap->other = other;
    overlap->groups = groups;
    overlap->ndim = own->ndim;
    overlap->searching = overlap->exhausted = false;
    TRY(list_own_spans(overlap, array, lo, len));
    for (int32_t d = 0; d < overlap->ndim; d++) {
        overlap->dims[d].at = 0;
        overlap->exhausted = overlap->exhausted || overlap->dims[d].nown == 0;
    }
    return other->mesh && !overlap->exhausted ? list_span_overlaps(overlap) : RSD_OK;
}

/* Moves to the next combination, the last dim first. Returns the first dim that changed, or -1 at the end. */
static int32_t step_product(struct overlap *overlap, bool with_mesh)
{
    for (int32_t d = overlap->ndim - 1; d >= 0; d--) {
        if (++overlap->dims[d].at < (with_mesh ? overlap->dims[d].n : overlap->dims[d].nown))
            return d;
        overlap->dims[d].at = 0;
    }
    return -1;
}

/* Sets the current overlap from the current entry of each dim. Dims before first_changed have not changed. */
static void set_from_product(struct overlap *overlap, int32_t first_changed)
{
    for (int32_t d = first_changed; d < overlap->ndim; d++) {
        const struct span_overlap *span = &overlap->dims[d].list[overlap->dims[d].at];
        overlap->lo[d] = span->lo;
        overlap->len[d] = span->len;
        overlap->own_at[d] = span->own_at;
        overlap->other_at[d] = span->other_at;
    }
    overlap->other_position = 0;
    for (int32_t d = 0; d < overlap->ndim; d++)
        overlap->other_position += overlap->dims[d].list[overlap->dims[d].at].other_pos;
}

/* Moves to the next overlap with a mesh. Returns false after the last. */
static bool next_in_product(struct overlap *overlap)
{
    int32_t changed = 0;
    if (overlap->searching) {
        changed = step_product(overlap, true);
        if (changed < 0) {
            overlap->exhausted = true;
            return false;
        }
    }
    overlap->searching = true;
    set_from_product(overlap, changed);
    return true;
}

/* Moves to the next overlap with explicit boxes: searches their groups for each own box. Returns false after the
 * last. */
static bool next_in_groups(struct overlap *overlap)
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
        if (step_product(overlap, false) < 0) {
            overlap->exhausted = true;
            return false;
        }
    }
}

bool overlap_next(struct overlap *overlap)
{
    if (overlap->exhausted)
        return false;
    return overlap->other->mesh ? next_in_product(overlap) : next_in_groups(overlap);
}

void overlap_drop(struct overlap *overlap)
{
    for (int32_t d = 0; d < RSD_MAX_DIMS; d++) {
        mem_free(overlap->dims[d].own);
        mem_free(overlap->dims[d].list);
    }
    *overlap = (struct overlap){0};
}

/* ---- all spans of a dim ---- */

rsd_status overlap_sweep_dim(const struct cuts *own, const struct cuts *other,
                             struct common_spans *spans)
{
    struct span own_span = {0}, other_span = {0};
    for (int64_t x = 0, end; x < own->extent; x = end) {
        if (x >= own_span.lo + own_span.len)
            own_span = cuts_span_at(own, x);
        if (x >= other_span.lo + other_span.len)
            other_span = cuts_span_at(other, x);
        end = min_i64(own_span.lo + own_span.len, other_span.lo + other_span.len);
        struct common_span *last = spans->n ? &spans->list[spans->n - 1] : NULL;
        if (last && last->own_pos == own_span.pos && last->other_pos == other_span.pos) {
            last->len += end - x;
            continue;
        }
        TRY(GROW(spans->list, spans->capacity, spans->n + 1));
        spans->list[spans->n++] =
            (struct common_span){(int32_t)own_span.pos, (int32_t)other_span.pos, end - x};
    }
    return RSD_OK;
}
