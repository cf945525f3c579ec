/* elements.h - arrays whose elements are computed from their global index, so that each rank can check its own result.
 * Results of reductions (P) and casts have other elements, and would count as wrong. */
#ifndef ELEMENTS_H
#define ELEMENTS_H

#include "reshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void or_die(rsd_status status)
{
    if (status != RSD_OK) {
        fprintf(stderr, "%s: %s\n", rsd_status_name(status), rsd_error());
        exit(1);
    }
}

static inline void *zeroed(size_t nbytes)
{
    void *memory = calloc(nbytes ? nbytes : 1, 1);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", nbytes);
        exit(1);
    }
    return memory;
}

/* Allocates the arrays of one rank: one, or one for each explicit box. Sets *count to their number. */
static inline void **new_arrays(const rsd_layout *layout, int32_t rank, int64_t *count)
{
    int64_t first;
    rsd_layout_arrays_of(layout, rank, &first, count);
    void **arrays = zeroed((size_t)*count * sizeof *arrays);
    for (int64_t i = 0; i < *count; i++) {
        rsd_array array;
        or_die(rsd_layout_array(layout, first + i, &array));
        arrays[i] = zeroed(array.nbytes);
    }
    return arrays;
}

static inline void free_arrays(void **arrays, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        free(arrays[i]);
    free(arrays);
}

/* Writes the element of a global index to an address, or compares it. Returns 1 if it differs. */
static inline int put_element(char *address, size_t nbytes, int64_t index, int fill)
{
    uint64_t value[2], hash = (uint64_t)index;
    hash = (hash ^ hash >> 31) * 0x9e3779b97f4a7c15u;
    value[0] = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9u;
    value[1] = ~value[0];
    if (fill)
        memcpy(address, value, nbytes);
    return memcmp(address, value, nbytes) != 0;
}

/* Fills all elements of one rank (fill is 1), or compares them. Adds their number to *nelements, and returns the number of
 * elements that are wrong. */
static inline int64_t put_elements(const rsd_layout *layout, int32_t rank, void **arrays, int fill,
                                   int64_t *nelements)
{
    const int64_t *shape = rsd_layout_shape(layout);
    size_t nbytes = rsd_dtype_nbytes(rsd_layout_dtype(layout));
    int64_t wrong = 0, first, count, nshards;
    rsd_shard *shards;
    rsd_layout_arrays_of(layout, rank, &first, &count);
    or_die(rsd_layout_boxes(layout, rank, &shards, &nshards));
    for (int64_t k = 0; k < nshards; k++) {
        const rsd_box *box = &shards[k].box;
        int64_t at[RSD_MAX_DIMS] = {0}, n = 1;
        rsd_array array;
        or_die(rsd_layout_array(layout, shards[k].array, &array));
        for (int32_t d = 0; d < box->ndim; d++)
            n *= box->len[d];
        for (int64_t i = 0; i < n; i++) {
            int64_t index = 0, offset = 0;
            for (int32_t d = 0; d < box->ndim; d++) {
                index = index * shape[d] + box->lo[d] + at[d];
                offset = offset * array.shape[d] + shards[k].at[d] + at[d];
            }
            char *address = (char *)arrays[shards[k].array - first] + (size_t)offset * nbytes;
            wrong += put_element(address, nbytes, index, fill);
            for (int32_t d = box->ndim - 1; d >= 0 && ++at[d] == box->len[d]; d--)
                at[d] = 0;
        }
        *nelements += n;
    }
    rsd_free(shards);
    return wrong;
}

#endif
