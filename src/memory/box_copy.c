/* box_copy.c - copies boxes: between two strided arrays, or between an array and the packed form of the box.
 *
 *     array                      packed form: rows in the order of the box, without gaps
 *     . . . . . .
 *     . a b c . .                a b c d e f       bytes [at, at + n) of it are part of a row,
 *     . d e f . .                    [-----)       then whole rows, then part of a row
 *     . . . . . .
 *
 * The packed form may have another dtype than the array. Then elements are converted on the way.
 */
#include "memory.h"

#include <string.h>

void box_packed_strides(int32_t ndim, const int64_t *len, size_t element_nbytes, int64_t *strides)
{
    int64_t stride = (int64_t)element_nbytes;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= len[d];
    }
}

int64_t box_offset(int32_t ndim, const int64_t *at, const int64_t *lo, const int64_t *strides)
{
    int64_t offset = 0;
    for (int32_t d = 0; d < ndim; d++)
        offset += (at[d] - lo[d]) * strides[d];
    return offset;
}

struct loops box_loops(int32_t ndim, const int64_t *len, struct element element,
                       const int64_t *src_strides, const int64_t *dst_strides)
{
    struct loops loops = {0};
    for (int32_t d = 0; d < ndim; d++)
        loops_add(&loops, len[d], src_strides[d], dst_strides[d]);
    loops_finish(&loops, element);
    return loops;
}

void box_copy(const struct copier *copier, bool stream, int32_t ndim, const int64_t *len,
              size_t element_nbytes, const char *src, const int64_t *src_strides, char *dst,
              const int64_t *dst_strides)
{
    struct loops loops =
        box_loops(ndim, len, element_of_bytes(element_nbytes), src_strides, dst_strides);
    copy_loops(copier, stream, &loops, src, dst);
}

/* ---- the packed form ---- */

struct packed_box box_packed(int32_t ndim, const int64_t *len, struct element element,
                             const int64_t *strides, bool column_major,
                             struct loop loops[RSD_MAX_DIMS])
{
    struct packed_box box = {.run = (size_t)element.nunits, .element = element, .loops = loops};
    int64_t packed = (int64_t)element.nunits * element.dst_unit;
    struct loop inner[RSD_MAX_DIMS]; /* innermost first */
    int32_t n = 0;
    for (int32_t i = 0; i < ndim; i++) {
        int32_t d = column_major ? i : ndim - 1 - i;
        if (len[d] == 1)
            continue;
        if (n == 0 && strides[d] == (int64_t)box.run * element.src_unit)
            box.run *= (size_t)len[d];
        else if (n > 0 && strides[d] == inner[n - 1].count * inner[n - 1].src_stride)
            inner[n - 1].count *= len[d];
        else
            inner[n++] = (struct loop){len[d], strides[d], packed};
        packed *= len[d];
    }
    box.nbytes = (uint64_t)packed;
    box.nloops = n;
    for (int32_t i = 0; i < n; i++)
        loops[i] = inner[n - 1 - i];
    return box;
}

/* Returns the offset in the array of a unit of the packed form. */
static int64_t unit_offset(const struct packed_box *box, uint64_t unit)
{
    int64_t row = (int64_t)(unit / box->run);
    int64_t offset = (int64_t)(unit % box->run) * box->element.src_unit;
    for (int32_t i = box->nloops; i-- > 0;) {
        offset += row % box->loops[i].count * box->loops[i].src_stride;
        row /= box->loops[i].count;
    }
    return offset;
}

/* Returns how many of units [at, at + n) lie in the row that contains `at`, or 0 if that row lies in them whole. */
static size_t partial_row(const struct packed_box *box, uint64_t at, size_t n)
{
    size_t rest = box->run - (size_t)(at % box->run);
    if (rest == box->run && n >= box->run)
        return 0;
    return rest < n ? rest : n;
}

static void copy_units(struct element element, const char *src, char *dst, size_t n)
{
    if (element.from)
        cast_rows(element, dst, 0, src, 0, (int64_t)n, 1);
    else
        memcpy(dst, src, n);
}

void box_pack(const struct copier *copier, const struct packed_box *box, const char *array,
              uint64_t at, size_t n, char *packed)
{
    struct block block = copy_block_of(box->run, box->element, box->nloops, box->loops);
    block.across = -1; /* a range of rows is copied in order */
    uint64_t unit = at / (uint64_t)box->element.dst_unit;
    for (n /= (size_t)box->element.dst_unit; n > 0;) {
        int64_t nrows = (int64_t)(n / box->run);
        size_t some = partial_row(box, unit, n);
        if (some) {
            copy_units(box->element, array + unit_offset(box, unit), packed, some);
        } else {
            copy_block(copier, false, &block, array, packed - at, (int64_t)(unit / box->run),
                       nrows);
            some = (size_t)nrows * box->run;
        }
        packed += some * (size_t)box->element.dst_unit;
        at += some * (size_t)box->element.dst_unit;
        unit += some;
        n -= some;
    }
}

void box_unpack(const struct copier *copier, bool stream, const struct packed_box *box,
                const char *packed, uint64_t at, size_t n, char *array)
{
    struct element element = element_turned(box->element);
    struct loop loops[RSD_MAX_DIMS];
    for (int32_t i = 0; i < box->nloops; i++)
        loops[i] =
            (struct loop){box->loops[i].count, box->loops[i].dst_stride, box->loops[i].src_stride};
    struct block block = copy_block_of(box->run, element, box->nloops, loops);
    block.across = -1;
    uint64_t unit = at / (uint64_t)element.src_unit;
    for (n /= (size_t)element.src_unit; n > 0;) {
        int64_t nrows = (int64_t)(n / box->run);
        size_t some = partial_row(box, unit, n);
        if (some) {
            copy_units(element, packed, array + unit_offset(box, unit), some);
        } else {
            copy_block(copier, stream, &block, packed - at, array, (int64_t)(unit / box->run),
                       nrows);
            some = (size_t)nrows * box->run;
        }
        packed += some * (size_t)element.src_unit;
        at += some * (size_t)element.src_unit;
        unit += some;
        n -= some;
    }
}
