/* copies.c - compares two stored copies of one array.
 *
 * Copies with one CRC-32, one length and one place in their records are equal, and are not read. torch pads
 * storages with bytes that mean nothing, so records that differ are compared element by element.
 */
#include "rows.h"

#include "memory.h"

#include <string.h>

enum { BLOCK_NBYTES = 1 << 16 };

static bool same_record(const struct stored_array *a, const struct stored_array *b, int32_t ndim)
{
    return a->has_crc && b->has_crc && a->crc == b->crc && a->nbytes == b->nbytes &&
           a->base == b->base && a->big_endian == b->big_endian &&
           memcmp(a->strides, b->strides, (size_t)ndim * sizeof *a->strides) == 0;
}

/* Compares nbytes of two files, which begin at the offsets; *equal stays true if they are equal. `blocks` has
 * memory for a block of each. An error names the file. */
static rsd_status compare_run(struct store *store, const uint32_t files[2],
                              const uint64_t offsets[2], uint64_t nbytes, char *blocks, bool *equal)
{
    for (uint64_t at = 0; at < nbytes && *equal; at += BLOCK_NBYTES) {
        size_t n = nbytes - at < BLOCK_NBYTES ? (size_t)(nbytes - at) : BLOCK_NBYTES;
        for (int i = 0; i < 2; i++) {
            rsd_status status =
                store_read(store, files[i], offsets[i] + at, blocks + i * BLOCK_NBYTES, n);
            if (status)
                return store_fail_in(store, files[i], status);
        }
        *equal = memcmp(blocks, blocks + BLOCK_NBYTES, n) == 0;
    }
    return RSD_OK;
}

rsd_status copies_compare(struct store *store, rsd_dtype dtype, int32_t ndim, const int64_t *len,
                          const uint32_t files[2], const struct stored_array *a,
                          const struct stored_array *b, bool *equal)
{
    int64_t counts[RSD_MAX_DIMS], index[MAX_LOOPS] = {0}, in_a = a->base, in_b = b->base;
    *equal = true;
    if (same_record(a, b, ndim) || box_is_empty(ndim, len))
        return RSD_OK;
    if (a->stream || b->stream || a->big_endian != b->big_endian)
        return fail(RSD_EUNSUPPORTED, "copies are compressed or have different byte orders");
    char *blocks = mem_new(2, BLOCK_NBYTES);
    if (!blocks)
        return RSD_ENOMEM;
    for (int32_t d = 0; d < ndim; d++) /* along a dim without strides, all elements are one */
        counts[d] = a->strides[d] || b->strides[d] ? len[d] : 1;
    struct loops loops =
        box_loops(ndim, counts, element_of_bytes(rsd_dtype_nbytes(dtype)), a->strides, b->strides);
    rsd_status status;
    do {
        const uint64_t offsets[2] = {a->offset + (uint64_t)in_a, b->offset + (uint64_t)in_b};
        status = compare_run(store, files, offsets, loops.run, blocks, equal);
    } while (!status && *equal && loops_next(&loops, index, &in_a, &in_b));
    mem_free(blocks);
    return status;
}
