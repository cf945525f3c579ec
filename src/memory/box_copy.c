/* box_copy.c - copies boxes: between two strided arrays, or between an array and the packed form of the box.
 *
 *     array                      packed form: rows in the order of the box, without gaps
 *     . . . . . .
 *     . a b c . .                a b c d e f       bytes [at, at + n) of it are part of a row,
 *     . d e f . .                    [-----)       then whole rows, then part of a row
 *     . . . . . .
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

struct loops box_loops(int32_t ndim, const int64_t *len, size_t element_nbytes,
                       const int64_t *src_strides, const int64_t *dst_strides)
{
    struct loops loops = {0};
    for (int32_t d = 0; d < ndim; d++)
        loops_add(&loops, len[d], src_strides[d], dst_strides[d]);
    loops_finish(&loops, element_nbytes);
    return loops;
}

void box_copy(const struct copier *copier, bool stream, int32_t ndim, const int64_t *len,
              size_t element_nbytes, const char *src, const int64_t *src_strides, char *dst,
              const int64_t *dst_strides)
{
    struct loops loops = box_loops(ndim, len, element_nbytes, src_strides, dst_strides);
    copy_loops(copier, stream, &loops, src, dst);
}

/* ---- the packed form ---- */

struct packed_box box_packed(int32_t ndim, const int64_t *len, size_t element_nbytes,
                             const int64_t *strides, bool column_major,
                             struct loop loops[RSD_MAX_DIMS])
{
    struct packed_box box = {.run = element_nbytes, .loops = loops};
    int64_t packed = (int64_t)element_nbytes;
    struct loop inner[RSD_MAX_DIMS]; /* innermost first */
    int32_t n = 0;
    for (int32_t i = 0; i < ndim; i++) {
        int32_t d = column_major ? i : ndim - 1 - i;
        if (len[d] == 1)
            continue;
        if (n == 0 && strides[d] == (int64_t)box.run)
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

/* Returns the offset in the array of a row of the packed form. */
static int64_t row_offset(const struct packed_box *box, int64_t row)
{
    int64_t offset = 0;
    for (int32_t i = box->nloops; i-- > 0;) {
        offset += row % box->loops[i].count * box->loops[i].src_stride;
        row /= box->loops[i].count;
    }
    return offset;
}

/* Returns how many of bytes [at, at + n) lie in the row that contains `at`, or 0 if that row lies in them whole. */
static size_t partial_row(const struct packed_box *box, uint64_t at, size_t n)
{
    size_t rest = box->run - (size_t)(at % box->run);
    if (rest == box->run && n >= box->run)
        return 0;
    return rest < n ? rest : n;
}

void box_pack(const struct copier *copier, const struct packed_box *box, const char *array,
              uint64_t at, size_t n, char *packed)
{
    struct block block = copy_block_of(box->run, box->nloops, box->loops);
    block.across = -1; /* a range of rows is copied in order */
    while (n > 0) {
        int64_t row = (int64_t)(at / box->run), nrows = (int64_t)(n / box->run);
        size_t some = partial_row(box, at, n);
        if (some) {
            memcpy(packed, array + row_offset(box, row) + at % box->run, some);
        } else {
            copy_block(copier, false, &block, array, packed - at, row, nrows);
            some = (size_t)nrows * box->run;
        }
        packed += some;
        at += some;
        n -= some;
    }
}

void box_unpack(const struct copier *copier, bool stream, const struct packed_box *box,
                const char *packed, uint64_t at, size_t n, char *array)
{
    struct loop loops[RSD_MAX_DIMS];
    for (int32_t i = 0; i < box->nloops; i++)
        loops[i] =
            (struct loop){box->loops[i].count, box->loops[i].dst_stride, box->loops[i].src_stride};
    struct block block = copy_block_of(box->run, box->nloops, loops);
    block.across = -1;
    while (n > 0) {
        int64_t row = (int64_t)(at / box->run), nrows = (int64_t)(n / box->run);
        size_t some = partial_row(box, at, n);
        if (some) {
            memcpy(array + row_offset(box, row) + at % box->run, packed, some);
        } else {
            copy_block(copier, stream, &block, packed - at, array, row, nrows);
            some = (size_t)nrows * box->run;
        }
        packed += some;
        at += some;
        n -= some;
    }
}
