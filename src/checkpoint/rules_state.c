/* rules_state.c - finds the parameter that a tensor of optimizer state belongs to.
 *
 * ANY.state.FQN.SLOT, or state.FQN.SLOT, belongs to the one tensor that is called FQN or ends in .FQN. Names
 * are sorted by their ends, so that all names with one end are neighbours:
 *
 *     optim.state.up.weight.exp_avg      FQN = up.weight
 *           model.down.weight
 *             model.up.weight   <-       the only name that ends in .up.weight
 */
#include "rules.h"

#include <stdlib.h>

struct named_tensor {
    const char *name; /* of the checkpoint */
    int64_t index;
};

/* Compares texts from their ends. */
static int compare_ends(struct slice a, struct slice b)
{
    size_t na = a.nbytes, nb = b.nbytes;
    for (; na > 0 && nb > 0; na--, nb--)
        if (a.bytes[na - 1] != b.bytes[nb - 1])
            return (unsigned char)a.bytes[na - 1] < (unsigned char)b.bytes[nb - 1] ? -1 : 1;
    return (na > 0) - (nb > 0);
}

static int by_name_end(const void *a, const void *b)
{
    return compare_ends(slice_of(((const struct named_tensor *)a)->name),
                        slice_of(((const struct named_tensor *)b)->name));
}

rsd_status parameter_index_open(struct parameter_index *index, const rsd_checkpoint *checkpoint)
{
    size_t n = (size_t)rsd_checkpoint_ntensors(checkpoint);
    struct named_tensor *list = mem_new(n, sizeof *list);
    if (!list)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++)
        list[i] = (struct named_tensor){checkpoint->catalog.tensors[i].name, (int64_t)i};
    if (n > 1)
        qsort(list, n, sizeof *list, by_name_end);
    *index = (struct parameter_index){list, n};
    return RSD_OK;
}

void parameter_index_drop(struct parameter_index *index)
{
    mem_free(index->list);
    *index = (struct parameter_index){0};
}

/* Returns how many names have this end, counted up to 2, and the last of them. whole: names that are it. */
static int count_names(const struct parameter_index *index, struct slice end, bool whole,
                       int64_t *found)
{
    size_t lo = 0, hi = index->n;
    int count = 0;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (compare_ends(slice_of(index->list[middle].name), end) < 0)
            lo = middle + 1;
        else
            hi = middle;
    }
    for (; lo < index->n && count < 2; lo++, count++) {
        struct slice name = slice_of(index->list[lo].name);
        if (name.nbytes < end.nbytes || (whole && name.nbytes != end.nbytes) ||
            memcmp(name.bytes + name.nbytes - end.nbytes, end.bytes, end.nbytes) != 0)
            break;
        *found = index->list[lo].index;
    }
    return count;
}

bool state_name_split(const char *state, struct slice *parameter)
{
    const char *dot = strncmp(state, "state.", 6) == 0 ? state : strstr(state, ".state.");
    const char *begin = dot ? strchr(dot + 1, '.') + 1 : NULL;
    const char *end = begin ? strrchr(begin, '.') : NULL;
    if (!end || end == begin)
        return false;
    *parameter = (struct slice){begin, (size_t)(end - begin)};
    return true;
}

bool parameter_index_find(const struct parameter_index *index, const char *state,
                          int64_t *parameter)
{
    struct slice name;
    if (!state_name_split(state, &name))
        return false;
    struct slice with_dot = {name.bytes - 1, name.nbytes + 1};
    int count = count_names(index, name, true, parameter);
    count += count_names(index, with_dot, false, parameter);
    return count == 1;
}
