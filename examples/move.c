/* move.c - a minimal program: moves a tensor between two layouts in one process.
 *
 *     build/examples/move 'f32[4096,4096] : 4:S0 -> 2x2:S0,S1'
 *
 * Every element is computed from its global index, so each rank can check its result. Introduces: rsd_problem_parse,
 * rsd_layout_array, rsd_layout_boxes, rsd_reshard.
 */
#include "reshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void or_die(rsd_status status)
{
    if (status != RSD_OK) {
        fprintf(stderr, "%s: %s\n", rsd_status_name(status), rsd_error());
        exit(1);
    }
}

static void *memory(size_t nbytes)
{
    void *memory = calloc(nbytes ? nbytes : 1, 1);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", nbytes);
        exit(1);
    }
    return memory;
}

/* Allocates one array for each rank, or for each explicit box. */
static void **allocate(const rsd_layout *layout)
{
    int64_t n = rsd_layout_narrays(layout);
    void **arrays = memory((size_t)n * sizeof *arrays);
    for (int64_t i = 0; i < n; i++) {
        rsd_array array;
        or_die(rsd_layout_array(layout, i, &array));
        arrays[i] = memory(array.nbytes);
    }
    return arrays;
}

static void give_back(const rsd_layout *layout, void **arrays)
{
    for (int64_t i = 0; i < rsd_layout_narrays(layout); i++)
        free(arrays[i]);
    free(arrays);
}

static int sums_up(const rsd_layout *layout)
{
    const rsd_mesh *mesh = rsd_layout_mesh(layout);
    for (int32_t axis = 0; mesh && axis < rsd_mesh_naxes(mesh); axis++) {
        rsd_placement placement;
        or_die(rsd_layout_placement(layout, axis, &placement));
        if (placement.kind == RSD_PARTIAL)
            return 1;
    }
    return 0;
}

static uint64_t value_of(uint64_t index)
{
    index = (index ^ index >> 31) * 0x9e3779b97f4a7c15u;
    return (index ^ index >> 29) * 0xbf58476d1ce4e5b9u;
}

/* Fills every element of a layout, or returns the number of elements that are wrong. */
static int64_t for_each_element(const rsd_layout *layout, void **arrays, int fill,
                                int64_t *nelements)
{
    const int64_t *shape = rsd_layout_shape(layout);
    size_t each = rsd_dtype_nbytes(rsd_layout_dtype(layout));
    int64_t wrong = 0, nboxes;
    for (int64_t place = 0; place < rsd_layout_nplaces(layout); place++) {
        rsd_shard *held;
        int32_t rank;
        int64_t first;
        or_die(rsd_layout_rank_at(layout, place, &rank));
        or_die(rsd_layout_position(layout, rank, &first));
        if (first != place) /* a rank may have several boxes */
            continue;
        or_die(rsd_layout_boxes(layout, rank, &held, &nboxes));
        for (int64_t k = 0; k < nboxes; k++) {
            const rsd_box *box = &held[k].box;
            rsd_array array;
            int64_t at[RSD_MAX_DIMS] = {0}, n = 1;
            or_die(rsd_layout_array(layout, held[k].array, &array));
            for (int32_t d = 0; d < box->ndim; d++)
                n *= box->len[d];
            for (int64_t i = 0; i < n; i++) {
                int64_t index = 0, offset = 0;
                for (int32_t d = 0; d < box->ndim; d++) {
                    index = index * shape[d] + box->lo[d] + at[d];
                    offset = offset * array.shape[d] + held[k].at[d] + at[d];
                }
                uint64_t value[2] = {value_of((uint64_t)index), value_of(~(uint64_t)index)};
                char *element = (char *)arrays[held[k].array] + (size_t)offset * each;
                if (fill)
                    memcpy(element, value, each);
                else
                    wrong += memcmp(element, value, each) != 0;
                for (int32_t d = box->ndim - 1; d >= 0 && ++at[d] == box->len[d]; d--)
                    at[d] = 0;
            }
            *nelements += n;
        }
        rsd_free(held);
    }
    return wrong;
}

int main(int argc, char **argv)
{
    const char *problem = argc > 1 ? argv[1] : "f32[4096,4096] : 4:S0 -> 2x2:S0,S1";
    rsd_layout *from, *to;
    int64_t filled = 0, checked = 0;
    or_die(rsd_problem_parse(problem, &from, &to));
    if (sums_up(from)) {
        fprintf(stderr, "this example fills whole values: it has no partial ones to reduce\n");
        return 1;
    }
    void **src = allocate(from), **dst = allocate(to);
    for_each_element(from, src, 1, &filled);
    or_die(rsd_reshard(from, to, (const void *const *)src, dst));
    int64_t wrong = for_each_element(to, dst, 0, &checked);
    printf("%lld elements on %lld ranks -> %lld elements on %lld ranks: %lld are wrong\n",
           (long long)filled, (long long)rsd_layout_nranks(from), (long long)checked,
           (long long)rsd_layout_nranks(to), (long long)wrong);
    give_back(from, src);
    give_back(to, dst);
    rsd_layout_free(from);
    rsd_layout_free(to);
    return wrong != 0 || fflush(stdout) != 0;
}
