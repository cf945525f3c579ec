/* mesh.c - an n-dimensional array of ranks with named axes.
 *
 * A position is the row-major index into the array. Ranks are base + position, unless the caller listed
 * them in another order; then lists map in both directions.
 */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

/* Checks and sets the counts of all axes, and computes their strides. */
static rsd_status set_axis_counts(rsd_mesh *mesh, const int64_t *counts)
{
    mesh->nranks = 1;
    for (int32_t a = 0; a < mesh->naxes; a++) {
        if (counts[a] < 1)
            return fail(RSD_EINVAL, "mesh axis %d has %lld ranks, but must have at least 1", (int)a,
                        (long long)counts[a]);
        if (!mul_i64(mesh->nranks, counts[a], &mesh->nranks) || mesh->nranks > INT32_MAX)
            return fail(RSD_ELIMIT, "the mesh has more than 2^31 - 1 ranks");
        mesh->counts[a] = counts[a];
    }
    int64_t stride = 1;
    for (int32_t a = mesh->naxes - 1; a >= 0; a--) {
        mesh->strides[a] = stride;
        stride *= counts[a];
    }
    return RSD_OK;
}

static bool is_axis_name(const char *name)
{
    if (!is_name_start(*name))
        return false;
    for (; *name; name++)
        if (!is_name_start(*name) && !is_digit(*name))
            return false;
    return true;
}

/* Checks and copies the names of axes. An axis may have no name. */
static rsd_status set_axis_names(rsd_mesh *mesh, const char *const *names)
{
    for (int32_t a = 0; a < mesh->naxes; a++) {
        if (!names[a])
            continue;
        if (!is_axis_name(names[a]) || strlen(names[a]) >= NAME_NCHARS ||
            strcmp(names[a], "ranks") == 0)
            return fail(RSD_EINVAL, "invalid name of a mesh axis '%.40s'", names[a]);
        for (int32_t b = 0; b < a; b++)
            if (names[b] && strcmp(names[a], names[b]) == 0)
                return fail(RSD_EINVAL, "two mesh axes have the name '%.40s'", names[a]);
        mesh->names[a] = text_copy(names[a]);
        if (!mesh->names[a])
            return RSD_ENOMEM;
    }
    return RSD_OK;
}

static int compare_mesh_ranks(const void *a, const void *b)
{
    const int32_t *x = a, *y = b; /* {rank, position} */
    return (x[0] > y[0]) - (x[0] < y[0]);
}

/* Sets the ranks of a mesh. If they do not count up from the first, builds lists that map in both directions. */
static rsd_status set_mesh_ranks(rsd_mesh *mesh, const int32_t *ranks)
{
    size_t n = (size_t)mesh->nranks;
    bool counts_up = true;
    for (size_t i = 0; i < n; i++) {
        if (ranks[i] < 0)
            return fail(RSD_EINVAL, "mesh has invalid rank %d", (int)ranks[i]);
        counts_up = counts_up && ranks[i] - (int64_t)i == ranks[0];
    }
    mesh->base = ranks[0];
    if (counts_up)
        return RSD_OK;
    int32_t(*pairs)[2] = mem_new(n, sizeof *pairs);
    mesh->ranks = mem_copy(ranks, n, sizeof *ranks);
    mesh->sorted = mem_new(n, sizeof *mesh->sorted);
    mesh->array = mem_new(n, sizeof *mesh->array);
    if (!pairs || !mesh->ranks || !mesh->sorted || !mesh->array) {
        mem_free(pairs);
        return RSD_ENOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        pairs[i][0] = ranks[i];
        pairs[i][1] = (int32_t)i;
    }
    qsort(pairs, n, sizeof *pairs, compare_mesh_ranks);
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < n; i++) {
        if (i && pairs[i][0] == pairs[i - 1][0])
            status = fail(RSD_EINVAL, "mesh has rank %d twice", (int)pairs[i][0]);
        mesh->sorted[i] = pairs[i][1];
        mesh->array[pairs[i][1]] = (int32_t)i;
    }
    mem_free(pairs);
    return status;
}

rsd_status rsd_mesh_new(int32_t naxes, const int64_t *counts, const char *const *names,
                        const int32_t *ranks, rsd_mesh **out)
{
    if (naxes < 1 || naxes > RSD_MAX_AXES)
        return fail(RSD_EINVAL, "invalid number of mesh axes %d (1 to %d)", (int)naxes,
                    (int)RSD_MAX_AXES);
    rsd_mesh *mesh = mem_new(1, sizeof *mesh);
    if (!mesh)
        return RSD_ENOMEM;
    atomic_init(&mesh->references, 1);
    mesh->naxes = naxes;
    rsd_status status = set_axis_counts(mesh, counts);
    if (!status && names)
        status = set_axis_names(mesh, names);
    if (!status && ranks)
        status = set_mesh_ranks(mesh, ranks);
    if (status) {
        rsd_mesh_free(mesh);
        return status;
    }
    *out = mesh;
    return RSD_OK;
}

rsd_status mesh_new_from(int32_t naxes, const int64_t *counts, const char *const *names,
                         int32_t base, rsd_mesh **out)
{
    rsd_mesh *mesh;
    TRY(rsd_mesh_new(naxes, counts, names, NULL, &mesh));
    int64_t nranks = mesh->nranks;
    if (base > INT32_MAX - (nranks - 1)) {
        rsd_mesh_free(mesh);
        return fail(RSD_ELIMIT, "mesh of %lld ranks from %d on exceeds rank 2^31 - 1",
                    (long long)nranks, (int)base);
    }
    mesh->base = base;
    *out = mesh;
    return RSD_OK;
}

rsd_mesh *rsd_mesh_share(const rsd_mesh *mesh)
{
    rsd_mesh *shared = without_const(mesh);
    atomic_fetch_add(&shared->references, 1);
    return shared;
}

void rsd_mesh_free(rsd_mesh *mesh)
{
    if (!mesh || atomic_fetch_sub(&mesh->references, 1) > 1)
        return;
    for (int32_t a = 0; a < mesh->naxes; a++)
        mem_free(mesh->names[a]);
    mem_free(mesh->ranks);
    mem_free(mesh->sorted);
    mem_free(mesh->array);
    mem_free(mesh);
}

int64_t mesh_position_of(const rsd_mesh *mesh, int32_t rank)
{
    if (!mesh->sorted)
        return rank >= mesh->base && rank - mesh->base < mesh->nranks ? rank - mesh->base : -1;
    int64_t lo = 0, hi = mesh->nranks;
    while (lo < hi) {
        int64_t middle = lo + (hi - lo) / 2;
        int32_t found = mesh->ranks[mesh->sorted[middle]];
        if (found == rank)
            return mesh->sorted[middle];
        if (found < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return -1;
}

int32_t rsd_mesh_naxes(const rsd_mesh *mesh)
{
    return mesh->naxes;
}

int64_t rsd_mesh_count(const rsd_mesh *mesh, int32_t axis)
{
    return axis >= 0 && axis < mesh->naxes ? mesh->counts[axis] : 0;
}

const char *rsd_mesh_name(const rsd_mesh *mesh, int32_t axis)
{
    return axis >= 0 && axis < mesh->naxes ? mesh->names[axis] : NULL;
}

int64_t rsd_mesh_nranks(const rsd_mesh *mesh)
{
    return mesh->nranks;
}

rsd_status rsd_mesh_coords(const rsd_mesh *mesh, int32_t rank, int64_t *coords)
{
    int64_t position = mesh_position_of(mesh, rank);
    if (position < 0)
        return fail(RSD_EINVAL, "rank %d is not in the mesh", (int)rank);
    for (int32_t a = 0; a < mesh->naxes; a++)
        coords[a] = mesh_coord(mesh, position, a);
    return RSD_OK;
}

rsd_status rsd_mesh_rank(const rsd_mesh *mesh, const int64_t *coords, int32_t *rank)
{
    int64_t position = 0;
    for (int32_t a = 0; a < mesh->naxes; a++) {
        if (coords[a] < 0 || coords[a] >= mesh->counts[a])
            return fail(RSD_EINVAL, "coordinate %lld out of range: mesh axis %d has %lld ranks",
                        (long long)coords[a], (int)a, (long long)mesh->counts[a]);
        position += coords[a] * mesh->strides[a];
    }
    *rank = mesh_rank_at(mesh, position);
    return RSD_OK;
}
