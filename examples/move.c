/* move.c - a minimal program: moves a tensor between two layouts in one process.
 *
 *     build/examples/move 'f32[4096,4096] : 4:S0 -> 2x2:S0,S1'
 *
 * Introduces: rsd_problem_parse, rsd_layout_rank_at, rsd_reshard.
 */
#include "elements.h"

/* The arrays of all ranks, in the order of rsd_layout_array. */
struct arrays {
    int64_t count;
    void **list;
};

/* Returns the ranks of a layout in ascending order. Sets *nranks to their number. */
static int32_t *sorted_ranks(const rsd_layout *layout, int64_t *nranks)
{
    *nranks = 0;
    int32_t *ranks = zeroed((size_t)rsd_layout_nranks(layout) * sizeof *ranks);
    for (int32_t rank = 0; rank < rsd_layout_world(layout); rank++) {
        int64_t position;
        if (rsd_layout_position(layout, rank, &position) == RSD_OK)
            ranks[(*nranks)++] = rank;
    }
    return ranks;
}

/* Fills the arrays of all ranks, which it allocates if there are none, or compares them. */
static int64_t put_all(const rsd_layout *layout, struct arrays *arrays, int fill,
                       int64_t *nelements)
{
    int64_t wrong = 0, nranks, first, count;
    int32_t *ranks = sorted_ranks(layout, &nranks);
    if (!arrays->list)
        arrays->list = zeroed((size_t)rsd_layout_narrays(layout) * sizeof *arrays->list);
    for (int64_t i = 0; i < nranks; i++) {
        rsd_layout_arrays_of(layout, ranks[i], &first, &count);
        if (first >= arrays->count) {
            void **own = new_arrays(layout, ranks[i], &count);
            memcpy(arrays->list + first, own, (size_t)count * sizeof *own);
            free(own);
            arrays->count = first + count;
        }
        if (nelements)
            wrong += put_elements(layout, ranks[i], arrays->list + first, fill, nelements);
    }
    free(ranks);
    return wrong;
}

static int has_partial(const rsd_layout *layout)
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

int main(int argc, char **argv)
{
    const char *problem = argc > 1 ? argv[1] : "f32[4096,4096] : 4:S0 -> 2x2:S0,S1";
    rsd_layout *from, *to;
    struct arrays src = {0}, dst = {0};
    int64_t filled = 0, checked = 0;
    or_die(rsd_problem_parse(problem, &from, &to));
    if (has_partial(from)) {
        fprintf(stderr, "this example fills whole values: it has no partial ones to reduce\n");
        return 1;
    }
    put_all(from, &src, 1, &filled);
    put_all(to, &dst, 0, NULL);
    or_die(rsd_reshard(from, to, (const void *const *)src.list, dst.list));
    int64_t wrong = put_all(to, &dst, 0, &checked);
    printf("%lld elements on %lld ranks -> %lld elements on %lld ranks: %lld are wrong\n",
           (long long)filled, (long long)rsd_layout_nranks(from), (long long)checked,
           (long long)rsd_layout_nranks(to), (long long)wrong);
    free_arrays(src.list, src.count);
    free_arrays(dst.list, dst.count);
    rsd_layout_free(from);
    rsd_layout_free(to);
    return wrong != 0 || fflush(stdout) != 0;
}
