/* deal.c - who writes which box.
 *
 * Every holder of a box could write it; one does. torch deals boxes out in the order in which ranks list
 * them (all of rank 0's, then what rank 1 has beyond that, and so on), each to the holder that has been
 * given the fewest bytes so far, counted as if it wrote the whole tensor each time. To write the same
 * files, so does this.
 *
 *     rank 0   a b c         a: 0 and 1 have it -> 0 (nobody has anything yet)
 *     rank 1   a b d         b: 0 and 1         -> 1
 *                            c: 0               -> 0         d: 1 -> 1
 *
 * Boxes are told apart by where they begin, as in torch's metadata. Empty ones of different ranks that
 * begin at the same place are one.
 */
#include "checkpoint.h"

#include <stdlib.h>

/* A box of one rank, while the holders of one tensor are sorted. */
struct held_by {
    const rsd_shard *held;
    int32_t rank;
    uint32_t order; /* among the boxes of the rank */
};

struct holder {
    int32_t rank;
    uint32_t order;
};

/* A box and all that hold it. */
struct group {
    size_t tensor, coordinates;
    size_t first_holder, nholders;
    struct holder winner;
};

struct dealing {
    struct dedup *dedup;
    struct holder *holders;
    struct group *groups;
    size_t nholders, holders_capacity, ngroups, groups_capacity;
    uint64_t *given; /* bytes by rank */
};

/* ---- the boxes of one tensor ---- */

static int compare_boxes(const struct held_by *x, const struct held_by *y)
{
    for (int32_t d = 0; d < x->held->box.ndim; d++)
        if (x->held->box.lo[d] != y->held->box.lo[d])
            return x->held->box.lo[d] < y->held->box.lo[d] ? -1 : 1;
    return 0;
}

/* By place; the largest first, then by rank. */
static int by_place(const void *a, const void *b)
{
    const struct held_by *x = a, *y = b;
    int places = compare_boxes(x, y);
    int64_t volume = box_volume(x->held->box.ndim, x->held->box.len),
            other = box_volume(y->held->box.ndim, y->held->box.len);
    if (places)
        return places;
    if (volume != other)
        return volume > other ? -1 : 1;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

static rsd_status add_coordinates(struct dedup *dedup, const rsd_shard *held)
{
    size_t ndim = (size_t)held->box.ndim, n = dedup->ncoordinates;
    TRY(GROW(dedup->coordinates, dedup->coordinates_capacity, n + 3 * ndim));
    copy_i64s(dedup->coordinates + n, held->box.lo, held->box.ndim);
    copy_i64s(dedup->coordinates + n + ndim, held->box.len, held->box.ndim);
    copy_i64s(dedup->coordinates + n + 2 * ndim, held->at, held->box.ndim);
    dedup->ncoordinates += 3 * ndim;
    return RSD_OK;
}

static rsd_status add_group(struct dealing *dealing, size_t tensor, const struct held_by *first)
{
    TRY(GROW(dealing->groups, dealing->groups_capacity, dealing->ngroups + 1));
    dealing->groups[dealing->ngroups++] =
        (struct group){.tensor = tensor,
                       .coordinates = dealing->dedup->ncoordinates,
                       .first_holder = dealing->nholders};
    return add_coordinates(dealing->dedup, first->held);
}

/* Of boxes that begin at one place only one can be stored: the one that has all the others in it. */
static rsd_status compare_lengths(const struct held_by *a, const struct held_by *b, bool *same)
{
    char one[BOX_TEXT_NCHARS], other[BOX_TEXT_NCHARS];
    int32_t ndim = a->held->box.ndim;
    bool empty = box_volume(ndim, b->held->box.len) == 0;
    *same = empty && box_volume(ndim, a->held->box.len) == 0;
    if (empty)
        return RSD_OK;
    *same = true;
    for (int32_t d = 0; d < ndim; d++) {
        *same = *same && a->held->box.len[d] == b->held->box.len[d];
        if (a->held->box.len[d] < b->held->box.len[d])
            return fail(RSD_EINVAL, "ranks %d and %d have %s and %s, which begin at one place",
                        (int)a->rank, (int)b->rank,
                        box_text(ndim, a->held->box.lo, a->held->box.len, one),
                        box_text(ndim, b->held->box.lo, b->held->box.len, other));
    }
    return RSD_OK;
}

static rsd_status group_boxes(struct dealing *dealing, size_t tensor, struct held_by *list,
                              size_t n, bool every)
{
    const struct held_by *first = NULL;
    if (n > 1)
        qsort(list, n, sizeof *list, by_place);
    for (size_t i = 0; i < n; i++) {
        bool new_place = !first || compare_boxes(first, &list[i]) != 0, same = true;
        if (!new_place && !every)
            TRY(compare_lengths(first, &list[i], &same));
        if (!same)
            continue;
        if (new_place || every) {
            first = &list[i];
            TRY(add_group(dealing, tensor, first));
        }
        struct group *group = &dealing->groups[dealing->ngroups - 1];
        if (group->nholders > 0 && dealing->holders[dealing->nholders - 1].rank == list[i].rank)
            continue; /* a rank that has it twice */
        TRY(GROW(dealing->holders, dealing->holders_capacity, dealing->nholders + 1));
        dealing->holders[dealing->nholders++] = (struct holder){list[i].rank, list[i].order};
        group->nholders++;
    }
    return RSD_OK;
}

struct held_list {
    rsd_shard *boxes;
};

/* The boxes of every rank: lists of rsd_layout_boxes, which hold the boxes, and pointers into them. */
struct gathered {
    struct held_list *lists;
    struct held_by *boxes;
    size_t nlists, lists_capacity, nboxes, boxes_capacity;
};

static void drop_gathered(struct gathered *gathered)
{
    for (size_t i = 0; i < gathered->nlists; i++)
        rsd_free(gathered->lists[i].boxes);
    mem_free(gathered->lists);
    mem_free(gathered->boxes);
}

static rsd_status gather(struct gathered *gathered, const rsd_layout *layout, int32_t rank)
{
    int64_t n;
    TRY(GROW(gathered->lists, gathered->lists_capacity, gathered->nlists + 1));
    TRY(rsd_layout_boxes(layout, rank, &gathered->lists[gathered->nlists].boxes, &n));
    const rsd_shard *held = gathered->lists[gathered->nlists++].boxes;
    TRY(GROW(gathered->boxes, gathered->boxes_capacity, gathered->nboxes + (size_t)n));
    for (int64_t i = 0; i < n; i++)
        gathered->boxes[gathered->nboxes++] = (struct held_by){&held[i], rank, (uint32_t)i};
    return RSD_OK;
}

/* What is written has to be all of it. */
static rsd_status check_cover(const rsd_layout *layout)
{
    rsd_coverage check = {.struct_nbytes = sizeof check};
    char text[BOX_TEXT_NCHARS];
    TRY(rsd_layout_coverage(layout, &check));
    if (check.kind == RSD_MISSES)
        return fail(RSD_EMISMATCH, "no rank has %s",
                    box_text(check.box.ndim, check.box.lo, check.box.len, text));
    return RSD_OK;
}

static rsd_status deal_tensor(struct dealing *dealing, size_t tensor, const rsd_layout *layout,
                              int64_t nranks, bool every)
{
    if (layout->terms.ndigits > 0)
        return fail(RSD_EINVAL, "a Partial layout cannot be saved: its values are not known yet");
    if (rsd_layout_world(layout) > nranks)
        return fail(RSD_EINVAL, "the layout names rank %lld of %lld",
                    (long long)rsd_layout_world(layout) - 1, (long long)nranks);
    TRY(check_cover(layout));
    struct gathered gathered = {0};
    rsd_status status = RSD_OK;
    for (int64_t array = 0, n; array < rsd_layout_narrays(layout) && !status; array += n) {
        int32_t rank = layout_array_rank(layout, array);
        int64_t first;
        rsd_layout_arrays_of(layout, rank, &first, &n);
        status = gather(&gathered, layout, rank);
    }
    if (!status)
        status = group_boxes(dealing, tensor, gathered.boxes, gathered.nboxes, every);
    drop_gathered(&gathered);
    return status;
}

/* ---- choosing ---- */

/* In the order in which torch meets them: by the first rank that has it, then as that rank lists it. */
static int by_appearance(const void *a, const void *b)
{
    const struct group *x = a, *y = b;
    if (x->winner.rank != y->winner.rank)
        return x->winner.rank < y->winner.rank ? -1 : 1;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return (x->winner.order > y->winner.order) - (x->winner.order < y->winner.order);
}

static void choose(struct dealing *dealing, struct group *group, uint64_t tensor_nbytes)
{
    const struct holder *holders = dealing->holders + group->first_holder;
    group->winner = holders[0];
    for (size_t i = 1; i < group->nholders; i++)
        if (dealing->given[holders[i].rank] < dealing->given[group->winner.rank])
            group->winner = holders[i];
    dealing->given[group->winner.rank] += tensor_nbytes ? tensor_nbytes : 1;
}

static int by_tensor(const void *a, const void *b)
{
    const struct dedup_box *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Everyone has the values, so rank 0 lists them, behind its tensors. */
static void choose_values(struct dealing *dealing, int64_t nranks, size_t nvalues)
{
    for (size_t i = 0; i < nvalues; i++) {
        int32_t least = 0;
        for (int32_t rank = 1; rank < nranks; rank++)
            if (dealing->given[rank] < dealing->given[least])
                least = rank;
        dealing->given[least]++;
        dealing->dedup->value_ranks[i] = least;
    }
}

static rsd_status choose_all(struct dealing *dealing, const rsd_layout *const *layouts,
                             const size_t *widths, int64_t nranks, size_t nvalues,
                             enum dedup_mode to)
{
    struct dedup *dedup = dealing->dedup;
    bool values_chosen = to != DEDUP_EVENLY; /* else the lowest rank has them all */
    dedup->list = mem_new(dealing->ngroups, sizeof *dedup->list);
    dedup->value_ranks = mem_new(nvalues, sizeof *dedup->value_ranks);
    if (!dedup->list || !dedup->value_ranks)
        return RSD_ENOMEM;
    for (size_t i = 0; i < dealing->ngroups; i++)
        dealing->groups[i].winner = dealing->holders[dealing->groups[i].first_holder];
    if (dealing->ngroups > 1)
        qsort(dealing->groups, dealing->ngroups, sizeof *dealing->groups, by_appearance);
    for (size_t i = 0; i < dealing->ngroups; i++) {
        struct group *group = &dealing->groups[i];
        const rsd_layout *layout = layouts[group->tensor];
        if (!values_chosen && group->winner.rank > 0) {
            choose_values(dealing, nranks, nvalues);
            values_chosen = true;
        }
        if (to == DEDUP_EVENLY)
            choose(dealing, group,
                   (uint64_t)box_volume(layout->ndim, layout->shape) *
                       (widths ? widths[group->tensor] : rsd_dtype_nbytes(layout->dtype)));
        dedup->list[dedup->n++] = (struct dedup_box){.tensor = group->tensor,
                                                     .rank = group->winner.rank,
                                                     .order = group->winner.order,
                                                     .coordinates = group->coordinates};
    }
    if (!values_chosen)
        choose_values(dealing, nranks, nvalues);
    if (dedup->n > 1)
        qsort(dedup->list, dedup->n, sizeof *dedup->list, by_tensor);
    return RSD_OK;
}

rsd_status dedup_assign(struct dedup *dedup, size_t ntensors, const rsd_layout *const *layouts,
                        const size_t *widths, const char *const *names, int64_t nranks,
                        size_t nvalues, enum dedup_mode to)
{
    struct dealing dealing = {.dedup = dedup};
    dealing.given = mem_new((size_t)nranks, sizeof *dealing.given);
    rsd_status status = dealing.given ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < ntensors && !status; i++) {
        status = deal_tensor(&dealing, i, layouts[i], nranks, to == DEDUP_KEEP_ALL);
        if (status)
            status = fail_in(status, "%s: ", names[i]);
    }
    if (!status)
        status = choose_all(&dealing, layouts, widths, nranks, nvalues, to);
    mem_free(dealing.given);
    mem_free(dealing.holders);
    mem_free(dealing.groups);
    if (status)
        dedup_drop(dedup);
    return status;
}

rsd_status dedup_add_boxes(const struct dedup *dedup, size_t tensor, size_t *next,
                           struct manifest *manifest)
{
    int32_t ndim = manifest->catalog.tensors[manifest->catalog.ntensors - 1].ndim;
    for (; *next < dedup->n && dedup->list[*next].tensor == tensor; ++*next) {
        const struct dedup_box *box = &dedup->list[*next];
        const int64_t *lo = dedup->coordinates + box->coordinates;
        TRY(manifest_add_box(manifest, lo, lo + ndim, lo + 2 * ndim, (uint32_t)box->rank,
                             box->order));
    }
    return RSD_OK;
}

void dedup_drop(struct dedup *dedup)
{
    mem_free(dedup->list);
    mem_free(dedup->coordinates);
    mem_free(dedup->value_ranks);
    *dedup = (struct dedup){0};
}
