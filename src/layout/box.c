/* box.c - arithmetic on boxes.
 *
 *          lo[1]
 *            |<- len[1] ->|
 *   lo[0] -  +------------+
 *         |  |     a      |          The overlap c of two boxes a and b is a box again,
 * len[0]  |  |      +-----|---+      so a plan is a list of boxes.
 *         |  |      |  c  |   |
 *         -  +------|-----+   |
 *                   |    b    |
 *                   +---------+
 *
 * Invariants:
 *   (1) 0 <= ndim <= RSD_MAX_DIMS. A box without dims is one element.
 *   (2) lo and len are not negative, and lo + len is at most MAX_EXTENT.
 *   (3) A box with a len of 0 is empty; its lo has no meaning.
 */
#include "layout.h"

#include <stdio.h>

bool box_overlap(int32_t ndim, const int64_t *lo_a, const int64_t *len_a, const int64_t *lo_b,
                 const int64_t *len_b, int64_t *lo, int64_t *len)
{
    for (int32_t d = 0; d < ndim; d++) {
        int64_t begin = max_i64(lo_a[d], lo_b[d]);
        int64_t end = min_i64(lo_a[d] + len_a[d], lo_b[d] + len_b[d]);
        if (begin >= end)
            return false;
        lo[d] = begin;
        len[d] = end - begin;
    }
    return true;
}

bool box_is_empty(int32_t ndim, const int64_t *len)
{
    for (int32_t d = 0; d < ndim; d++)
        if (len[d] == 0)
            return true;
    return false;
}

int64_t box_volume(int32_t ndim, const int64_t *len)
{
    int64_t volume = 1;
    if (box_is_empty(ndim, len))
        return 0;
    for (int32_t d = 0; d < ndim; d++)
        volume *= len[d];
    return volume;
}

void box_set(rsd_box *box, int32_t ndim, const int64_t *lo, const int64_t *len)
{
    box->ndim = ndim;
    for (int32_t d = 0; d < ndim; d++) {
        box->lo[d] = lo[d];
        box->len[d] = len[d];
    }
}

/* The box begins in the outermost dim in which the range covers whole indices. */
int64_t box_of_range(int32_t ndim, const int64_t *shape, int64_t begin, int64_t end, int64_t *lo,
                     int64_t *len)
{
    int64_t inner = 1, volume = 1, before = begin;
    bool whole = true; /* the range begins at a whole index of the current dim */
    for (int32_t d = ndim - 1; d >= 0; d--) {
        int64_t index = before % shape[d], count = (end - begin) / inner;
        before /= shape[d];
        lo[d] = index;
        len[d] = 1;
        if (whole && count > 0) {
            for (int32_t k = d + 1; k < ndim; k++)
                len[k] = shape[k];
            len[d] = min_i64(shape[d] - index, count);
            volume = len[d] * inner;
        }
        whole = whole && index == 0;
        inner *= shape[d];
    }
    return volume;
}

/* In ascending order, each stride must exceed the offset of the last element that the smaller ones reach. */
bool strides_overlap(int32_t ndim, const int64_t *shape, const int64_t *strides)
{
    int32_t order[RSD_MAX_DIMS], n = 0;
    int64_t reach = 0, step;
    if (box_is_empty(ndim, shape))
        return false;
    for (int32_t d = 0; d < ndim; d++) {
        if (shape[d] < 2)
            continue;
        int32_t i = n++;
        for (; i > 0 && strides[order[i - 1]] > strides[d]; i--)
            order[i] = order[i - 1];
        order[i] = d;
    }
    for (int32_t i = 0; i < n; i++) {
        if (strides[order[i]] <= reach)
            return true;
        if (!mul_i64(shape[order[i]] - 1, strides[order[i]], &step) ||
            !add_i64(reach, step, &reach))
            return false; /* larger than any address: no two elements can be the same */
    }
    return false;
}

const char *box_text(int32_t ndim, const int64_t *lo, const int64_t *len,
                     char text[BOX_TEXT_NCHARS])
{
    size_t at = (size_t)snprintf(text, BOX_TEXT_NCHARS, "[");
    for (int32_t d = 0; d < ndim; d++) {
        int64_t end; /* may overflow: messages show invalid boxes too */
        if (!add_i64(lo[d], len[d], &end))
            end = INT64_MAX;
        int added = snprintf(text + at, BOX_TEXT_NCHARS - at, "%s%lld:%lld", d ? ", " : "",
                             (long long)lo[d], (long long)end);
        if ((size_t)added + 8 > BOX_TEXT_NCHARS - at) {
            snprintf(text + at, BOX_TEXT_NCHARS - at, "...");
            at += 3;
            break;
        }
        at += (size_t)added;
    }
    snprintf(text + at, BOX_TEXT_NCHARS - at, "]");
    return text;
}

const char *shape_text(int32_t ndim, const int64_t *shape, char text[SHAPE_TEXT_NCHARS])
{
    size_t at = (size_t)snprintf(text, SHAPE_TEXT_NCHARS, "[");
    for (int32_t d = 0; d < ndim; d++)
        at += (size_t)snprintf(text + at, SHAPE_TEXT_NCHARS - at, "%s%lld", d ? "," : "",
                               (long long)shape[d]);
    snprintf(text + at, SHAPE_TEXT_NCHARS - at, "]");
    return text;
}

static bool is_valid_box(const rsd_box *box)
{
    if (box->ndim < 0 || box->ndim > RSD_MAX_DIMS)
        return false;
    for (int32_t d = 0; d < box->ndim; d++)
        if (box->lo[d] < 0 || box->len[d] < 0 || box->lo[d] > MAX_EXTENT - box->len[d])
            return false;
    return true;
}

int rsd_box_overlaps(const rsd_box *a, const rsd_box *b)
{
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    return is_valid_box(a) && is_valid_box(b) && a->ndim == b->ndim &&
           box_overlap(a->ndim, a->lo, a->len, b->lo, b->len, lo, len);
}

rsd_status rsd_box_overlap(const rsd_box *saved, const rsd_box *wanted, rsd_region *region)
{
    if (saved->ndim != wanted->ndim)
        return fail(RSD_EINVAL, "number of dims differs: saved box %d, wanted box %d",
                    (int)saved->ndim, (int)wanted->ndim);
    if (!is_valid_box(saved) || !is_valid_box(wanted))
        return fail(RSD_EINVAL, "invalid box: ndim must be 0 to %d, lo and len 0 to 2^62",
                    (int)RSD_MAX_DIMS);
    rsd_region overlap = {.ndim = saved->ndim};
    for (int32_t d = 0; d < saved->ndim; d++) {
        int64_t begin = max_i64(saved->lo[d], wanted->lo[d]);
        int64_t end = min_i64(saved->lo[d] + saved->len[d], wanted->lo[d] + wanted->len[d]);
        overlap.len[d] = max_i64(0, end - begin);
        overlap.in_saved[d] = min_i64(begin - saved->lo[d], saved->len[d]);
        overlap.in_wanted[d] = min_i64(begin - wanted->lo[d], wanted->len[d]);
    }
    *region = overlap;
    return RSD_OK;
}
