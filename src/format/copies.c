/* copies.c - compares two stored copies of one array.
 *
 * Copies with one CRC-32, one length and one place in their records are equal, and are not read. torch pads
 * storages with bytes that mean nothing, so records that differ are compared element by element.
 */
#include "rows.h"

#include <string.h>

enum { BLOCK_NBYTES = 1 << 16 };

/* Two copies, and an index that goes through the runs that both have in one piece. */
struct copy_pair {
    struct store *store;
    uint32_t files[2];
    const struct stored_array *arrays[2];
    int32_t ndim; /* of the index: the dims behind it are inside a run */
    int64_t len[RSD_MAX_DIMS], strides[2][RSD_MAX_DIMS]; /* in the order of comparing */
    uint64_t run_nbytes;
};

static bool same_record(const struct stored_array *a, const struct stored_array *b, int32_t ndim)
{
    return a->has_crc && b->has_crc && a->crc == b->crc && a->nbytes == b->nbytes &&
           a->base == b->base && a->big_endian == b->big_endian &&
           memcmp(a->strides, b->strides, (size_t)ndim * sizeof *a->strides) == 0;
}

/* Puts dims with small strides last, so that both copies are read from their first byte to their last. */
static void sort_dims(struct copy_pair *pair, int32_t ndim, const int64_t *len)
{
    for (int32_t i = 0; i < ndim; i++) {
        int64_t stride = pair->arrays[0]->strides[i];
        int32_t at = i;
        for (; at > 0 && pair->strides[0][at - 1] < stride; at--) {
            pair->len[at] = pair->len[at - 1];
            pair->strides[0][at] = pair->strides[0][at - 1];
            pair->strides[1][at] = pair->strides[1][at - 1];
        }
        pair->strides[0][at] = stride;
        pair->strides[1][at] = pair->arrays[1]->strides[i];
        pair->len[at] = stride || pair->strides[1][at] ? len[i] : 1; /* 0: all have one element */
    }
}

/* Takes the last dims into a run, as long as both copies have them in one piece. */
static void find_run(struct copy_pair *pair, int32_t ndim, size_t element_nbytes)
{
    int64_t stride = (int64_t)element_nbytes;
    for (pair->ndim = ndim; pair->ndim > 0; pair->ndim--) {
        int32_t d = pair->ndim - 1;
        if (pair->len[d] > 1 && (pair->strides[0][d] != stride || pair->strides[1][d] != stride))
            break;
        stride *= pair->len[d];
    }
    pair->run_nbytes = (uint64_t)stride;
}

static rsd_status read_copy(const struct copy_pair *pair, int side, const int64_t *index,
                            uint64_t at, void *out, size_t n)
{
    const struct stored_array *array = pair->arrays[side];
    int64_t offset = array->base;
    for (int32_t d = 0; d < pair->ndim; d++)
        offset += index[d] * pair->strides[side][d];
    rsd_status status =
        store_read(pair->store, pair->files[side], array->offset + (uint64_t)offset + at, out, n);
    return status ? store_fail_in(pair->store, pair->files[side], status) : RSD_OK;
}

/* Compares one run of both copies, block by block. */
static rsd_status compare_run(const struct copy_pair *pair, const int64_t *index, char *blocks,
                              bool *equal)
{
    for (uint64_t at = 0; at < pair->run_nbytes && *equal; at += BLOCK_NBYTES) {
        uint64_t left = pair->run_nbytes - at;
        size_t n = left < BLOCK_NBYTES ? (size_t)left : BLOCK_NBYTES;
        TRY(read_copy(pair, 0, index, at, blocks, n));
        TRY(read_copy(pair, 1, index, at, blocks + BLOCK_NBYTES, n));
        *equal = memcmp(blocks, blocks + BLOCK_NBYTES, n) == 0;
    }
    return RSD_OK;
}

/* Steps to the next index. Returns false behind the last. */
static bool next_index(const struct copy_pair *pair, int64_t *index)
{
    for (int32_t d = pair->ndim - 1; d >= 0; d--) {
        if (++index[d] < pair->len[d])
            return true;
        index[d] = 0;
    }
    return false;
}

rsd_status copies_compare(struct store *store, rsd_dtype dtype, int32_t ndim, const int64_t *len,
                          const uint32_t files[2], const struct stored_array *a,
                          const struct stored_array *b, bool *equal)
{
    struct copy_pair pair = {.store = store, .files = {files[0], files[1]}, .arrays = {a, b}};
    int64_t index[RSD_MAX_DIMS] = {0};
    *equal = true;
    if (same_record(a, b, ndim) || box_is_empty(ndim, len))
        return RSD_OK;
    if (a->stream || b->stream || a->big_endian != b->big_endian)
        return fail(RSD_EUNSUPPORTED, "copies are compressed or have different byte orders");
    char *blocks = mem_new(2, BLOCK_NBYTES);
    if (!blocks)
        return RSD_ENOMEM;
    sort_dims(&pair, ndim, len);
    find_run(&pair, ndim, rsd_dtype_nbytes(dtype));
    rsd_status status;
    do
        status = compare_run(&pair, index, blocks, equal);
    while (!status && *equal && next_index(&pair, index));
    mem_free(blocks);
    return status;
}
