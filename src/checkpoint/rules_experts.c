/* rules_experts.c - presets distribute experts that are tensors of their own, such as experts.3.w1.weight.
 *
 * Over the axis named ep, each rank has an equal number of experts, as chunks of their numbers. The other axes cut an
 * expert as they cut any other tensor: its layout is one on the ranks that have the expert.
 */
#include "rules.h"

/* Finds the number in "experts.NUMBER." in a name. Returns false if there is none. */
static bool find_expert(const char *name, int64_t *number)
{
    static const char word[] = "experts.";
    for (const char *at = name; (at = strstr(at, word)); at++) {
        const char *digit = at + sizeof word - 1;
        int64_t value = 0;
        if ((at > name && at[-1] != '.') || !is_digit(*digit))
            continue;
        while (is_digit(*digit) && value < INT32_MAX)
            value = 10 * value + (*digit++ - '0');
        if (*digit != '.')
            continue;
        *number = value;
        return true;
    }
    return false;
}

int64_t experts_count(const rsd_checkpoint *checkpoint)
{
    const struct catalog *catalog = &checkpoint->catalog;
    int64_t count = 0, number;
    for (size_t i = 0; i < catalog->ntensors; i++)
        if (find_expert(catalog->tensors[i].name, &number))
            count = max_i64(count, number + 1);
    return count;
}

/* Makes the mesh of the ranks at one coordinate of an axis, without that axis. */
static rsd_status make_slice(const rsd_mesh *mesh, int32_t axis, int64_t coordinate,
                             rsd_mesh **slice)
{
    int64_t counts[RSD_MAX_AXES] = {1}, count = mesh->counts[axis], stride = mesh->strides[axis];
    const char *names[RSD_MAX_AXES] = {NULL};
    int32_t naxes = 0;
    int64_t nranks = mesh->nranks / count;
    int32_t *ranks = mem_new((size_t)nranks, sizeof *ranks);
    if (!ranks)
        return RSD_ENOMEM;
    for (int32_t a = 0; a < rsd_mesh_naxes(mesh); a++)
        if (a != axis) {
            names[naxes] = rsd_mesh_name(mesh, a);
            counts[naxes++] = rsd_mesh_count(mesh, a);
        }
    for (int64_t i = 0; i < nranks; i++) /* axes before this one, this one, axes behind it */
        ranks[i] = mesh_rank_at(mesh, (i / stride * count + coordinate) * stride + i % stride);
    rsd_status status = rsd_mesh_new(naxes ? naxes : 1, counts, names, ranks, slice);
    mem_free(ranks);
    return status;
}

rsd_status experts_make_mesh(const rsd_rules *rules, const struct rule *rule, const char *name,
                             rsd_mesh **mesh)
{
    int64_t number = 0, count = rsd_mesh_count(rules->mesh, rule->axis);
    if (!find_expert(name, &number))
        return fail(RSD_EINVAL, "the name has no number of an expert");
    int64_t chunk = (max_i64(rules->nexperts, number + 1) + count - 1) / count;
    return make_slice(rules->mesh, rule->axis, number / chunk, mesh);
}
