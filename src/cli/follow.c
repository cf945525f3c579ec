/* follow.c - which parameter a tensor of optimizer state belongs to.
 *
 * ANY.state.FQN.SLOT belongs to the one tensor that is called FQN or ends in .FQN. Names are kept sorted by
 * their ends, so that those with one end lie together:
 *
 *     optim.state.up.weight.exp_avg      FQN = up.weight
 *           model.down.weight
 *             model.up.weight   <-       the only one that ends in .up.weight
 */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

/* Compares texts from their ends. */
static int compare_ends(const char *a, size_t na, const char *b, size_t nb)
{
    for (; na > 0 && nb > 0; na--, nb--)
        if (a[na - 1] != b[nb - 1])
            return (unsigned char)a[na - 1] < (unsigned char)b[nb - 1] ? -1 : 1;
    return (na > 0) - (nb > 0);
}

static int by_end(const void *a, const void *b)
{
    const char *x = ((const struct named *)a)->name, *y = ((const struct named *)b)->name;
    return compare_ends(x, strlen(x), y, strlen(y));
}

void names_sort(struct names *names, const rsd_checkpoint *checkpoint)
{
    size_t n = (size_t)rsd_checkpoint_ntensors(checkpoint);
    names->list = need_memory(calloc(n + 1, sizeof *names->list));
    for (size_t i = 0; i < n; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        if (rsd_checkpoint_tensor(checkpoint, (int64_t)i, &tensor) == RSD_OK)
            names->list[names->n++] = (struct named){tensor.name, (int64_t)i};
    }
    if (names->n > 1)
        qsort(names->list, names->n, sizeof *names->list, by_end);
}

void names_free(struct names *names)
{
    free(names->list);
    *names = (struct names){0};
}

/* The first name that does not come before those that end in `end`. */
static size_t first_with(const struct names *names, const char *end, size_t n)
{
    size_t lo = 0, hi = names->n;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        const char *name = names->list[middle].name;
        if (compare_ends(name, strlen(name), end, n) < 0)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

/* How many names are `end` (whole) or end in it, counted up to 2; the last of them. */
static int count_with(const struct names *names, const char *end, size_t n, bool whole,
                      int64_t *found)
{
    int count = 0;
    for (size_t i = first_with(names, end, n); i < names->n && count < 2; i++) {
        size_t length = strlen(names->list[i].name);
        if (length < n || memcmp(names->list[i].name + length - n, end, n) != 0 ||
            (whole && length != n))
            break;
        *found = names->list[i].index;
        count++;
    }
    return count;
}

bool find_parameter(const struct names *names, const char *state, int64_t *index)
{
    const char *begin = strstr(state, ".state."), *slot = strrchr(state, '.');
    if (strncmp(state, "state.", 6) == 0)
        begin = state + 6;
    else if (begin)
        begin += 7;
    if (!begin || !slot || slot <= begin)
        return false;
    size_t n = (size_t)(slot - begin);
    char *dotted = need_text(".%.*s", (int)n, begin);
    int count = count_with(names, dotted + 1, n, true, index);
    count += count_with(names, dotted, n + 1, false, index);
    free(dotted);
    return count == 1;
}
