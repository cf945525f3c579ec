/* dedup.c - which rank writes which box.
 *
 * Every rank that holds a box could write it; one does. torch assigns boxes in the order in which ranks list them
 * (all boxes of rank 0, then the others of rank 1, and so on), each to the holder with the fewest bytes so far,
 * and counts the whole tensor each time. This writes the same files, so it does the same.
 *
 *     rank 0   a b c         a: on 0 and 1 -> 0 (no rank has bytes yet)
 *     rank 1   a b d         b: on 0 and 1 -> 1
 *                            c: on 0       -> 0         d: on 1 -> 1
 *
 * Boxes are identified by where they begin, as in torch's metadata. Empty boxes of different ranks that begin at
 * the same place are one box.
 */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 1 << 17 }; /* each has a file */

struct box_holder {
    int32_t rank;
    uint32_t order; /* among the boxes of the rank */
};

/* A box of one rank, while the holders of one tensor are sorted. */
struct rank_shard {
    const rsd_shard *shard;
    struct box_holder holder;
};

/* A box and all ranks that hold it. */
struct box_copies {
    size_t tensor;
    size_t coordinates; /* of its lo, its len, and where it is in the array of its first holder */
    size_t first_holder, nholders;
    struct box_holder writer; /* first the lowest holder, then the one that writes */
};

struct dedup_state {
    const struct dedup_input *input;
    struct box_holder *holders;
    struct box_copies *boxes;
    int64_t *coordinates;
    size_t nholders, holders_capacity, nboxes, boxes_capacity, ncoordinates, coordinates_capacity;
    uint64_t *nbytes; /* assigned to each rank */
};

/* ---- the boxes of one tensor ---- */

static int compare_places(const struct rank_shard *x, const struct rank_shard *y)
{
    for (int32_t d = 0; d < x->shard->box.ndim; d++)
        if (x->shard->box.lo[d] != y->shard->box.lo[d])
            return x->shard->box.lo[d] < y->shard->box.lo[d] ? -1 : 1;
    return 0;
}

static int compare_holders(const struct box_holder *x, const struct box_holder *y)
{
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

static int64_t shard_volume(const rsd_shard *shard)
{
    return box_volume(shard->box.ndim, shard->box.len);
}

/* By place; the largest first, then by rank. */
static int by_place(const void *a, const void *b)
{
    const struct rank_shard *x = a, *y = b;
    int places = compare_places(x, y);
    int64_t volume = shard_volume(x->shard), other = shard_volume(y->shard);
    if (places)
        return places;
    if (volume != other)
        return volume > other ? -1 : 1;
    return compare_holders(&x->holder, &y->holder);
}

/* Adds a box of a tensor, without holders. */
static rsd_status add_box(struct dedup_state *state, size_t tensor, const rsd_shard *shard)
{
    size_t ndim = (size_t)shard->box.ndim, n = state->ncoordinates;
    TRY(GROW(state->boxes, state->boxes_capacity, state->nboxes + 1));
    TRY(GROW(state->coordinates, state->coordinates_capacity, n + 3 * ndim));
    copy_i64s(state->coordinates + n, shard->box.lo, shard->box.ndim);
    copy_i64s(state->coordinates + n + ndim, shard->box.len, shard->box.ndim);
    copy_i64s(state->coordinates + n + 2 * ndim, shard->at, shard->box.ndim);
    state->ncoordinates += 3 * ndim;
    state->boxes[state->nboxes++] =
        (struct box_copies){.tensor = tensor, .coordinates = n, .first_holder = state->nholders};
    return RSD_OK;
}

/* Compares two boxes that begin at one place. Only one can be stored, so `a` must contain `b`: EINVAL. *same is
 * whether they are equal, or both empty. */
static rsd_status compare_lengths(const struct rank_shard *a, const struct rank_shard *b,
                                  bool *same)
{
    char one[BOX_TEXT_NCHARS], other[BOX_TEXT_NCHARS];
    const rsd_box *x = &a->shard->box, *y = &b->shard->box;
    bool empty = shard_volume(b->shard) == 0;
    *same = empty && shard_volume(a->shard) == 0;
    if (empty)
        return RSD_OK;
    *same = true;
    for (int32_t d = 0; d < x->ndim; d++) {
        *same = *same && x->len[d] == y->len[d];
        if (x->len[d] < y->len[d])
            return fail(
                RSD_EINVAL,
                "boxes %s of rank %d and %s of rank %d begin at the same place, and neither "
                "contains the other",
                box_text(x->ndim, x->lo, x->len, one), (int)a->holder.rank,
                box_text(y->ndim, y->lo, y->len, other), (int)b->holder.rank);
    }
    return RSD_OK;
}

/* Adds each box of a tensor once, with its holders; or each box of each rank. */
static rsd_status group_boxes(struct dedup_state *state, size_t tensor, struct rank_shard *list,
                              size_t n)
{
    const struct rank_shard *first = NULL;
    bool keep_all = state->input->mode == DEDUP_KEEP_ALL;
    if (n > 1)
        qsort(list, n, sizeof *list, by_place);
    for (size_t i = 0; i < n; i++) {
        bool new_place = !first || compare_places(first, &list[i]) != 0, same = true;
        if (!new_place && !keep_all)
            TRY(compare_lengths(first, &list[i], &same));
        if (!same)
            continue;
        if (new_place || keep_all) {
            first = &list[i];
            TRY(add_box(state, tensor, first->shard));
        }
        struct box_copies *box = &state->boxes[state->nboxes - 1];
        if (box->nholders > 0 && state->holders[state->nholders - 1].rank == list[i].holder.rank)
            continue; /* the rank holds it twice */
        TRY(GROW(state->holders, state->holders_capacity, state->nholders + 1));
        state->holders[state->nholders++] = list[i].holder;
        box->nholders++;
    }
    return RSD_OK;
}

/* The boxes of every rank: pointers into the lists of rsd_layout_boxes, which the caller frees. */
struct rank_shards {
    struct shard_list {
        rsd_shard *shards;
    } * lists;
    struct rank_shard *boxes;
    size_t nlists, lists_capacity, nboxes, boxes_capacity;
};

static rsd_status list_rank_boxes(struct rank_shards *all, const rsd_layout *layout, int32_t rank)
{
    int64_t n;
    TRY(GROW(all->lists, all->lists_capacity, all->nlists + 1));
    TRY(rsd_layout_boxes(layout, rank, &all->lists[all->nlists].shards, &n));
    const rsd_shard *shards = all->lists[all->nlists++].shards;
    TRY(GROW(all->boxes, all->boxes_capacity, all->nboxes + (size_t)n));
    for (int64_t i = 0; i < n; i++)
        all->boxes[all->nboxes++] = (struct rank_shard){&shards[i], {rank, (uint32_t)i}};
    return RSD_OK;
}

/* Adds the boxes of all ranks of a tensor, each box once with its holders. */
static rsd_status dedup_tensor(struct dedup_state *state, size_t tensor)
{
    const rsd_layout *layout = state->input->targets[tensor].layout;
    if (layout->terms.ndigits > 0)
        return fail(RSD_EINVAL, "a Partial layout cannot be saved: its values are not known yet");
    TRY(layout_check_coverage(layout, "rank"));
    struct rank_shards all = {0};
    rsd_status status = RSD_OK;
    for (int64_t array = 0, n; array < rsd_layout_narrays(layout) && !status; array += n) {
        int32_t rank = layout_array_rank(layout, array);
        int64_t first;
        rsd_layout_arrays_of(layout, rank, &first, &n);
        status = list_rank_boxes(&all, layout, rank);
    }
    if (!status)
        status = group_boxes(state, tensor, all.boxes, all.nboxes);
    for (size_t i = 0; i < all.nlists; i++)
        rsd_free(all.lists[i].shards);
    mem_free(all.lists);
    mem_free(all.boxes);
    return status;
}

/* ---- choosing ---- */

/* In torch's order: by the first rank that holds a box, then as that rank lists it. */
static int by_appearance(const void *a, const void *b)
{
    const struct box_copies *x = a, *y = b;
    if (x->writer.rank != y->writer.rank)
        return x->writer.rank < y->writer.rank ? -1 : 1;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return (x->writer.order > y->writer.order) - (x->writer.order < y->writer.order);
}

static void choose_writer(struct dedup_state *state, struct box_copies *box)
{
    const struct box_holder *holders = state->holders + box->first_holder;
    const struct target *target = &state->input->targets[box->tensor];
    uint64_t nbytes = (uint64_t)target->layout->volume * rsd_dtype_nbytes(target->dtype);
    for (size_t i = 1; i < box->nholders; i++)
        if (state->nbytes[holders[i].rank] < state->nbytes[box->writer.rank])
            box->writer = holders[i];
    state->nbytes[box->writer.rank] += nbytes ? nbytes : 1;
}

/* All ranks have the values. So rank 0 lists them, behind its tensors. */
static void choose_value_writers(struct dedup_state *state, int32_t *value_ranks)
{
    for (size_t i = 0; i < state->input->nvalues; i++) {
        int32_t least = 0;
        for (int32_t rank = 1; rank < state->input->nranks; rank++)
            if (state->nbytes[rank] < state->nbytes[least])
                least = rank;
        state->nbytes[least]++;
        value_ranks[i] = least;
    }
}

/* Sets the writers of boxes and values; values that no rank was chosen for stay with rank 0. */
static void choose_writers(struct dedup_state *state, int32_t *value_ranks)
{
    bool evenly = state->input->mode == DEDUP_EVENLY, values_chosen = false;
    for (size_t i = 0; i < state->nboxes; i++)
        state->boxes[i].writer = state->holders[state->boxes[i].first_holder];
    if (state->nboxes > 1)
        qsort(state->boxes, state->nboxes, sizeof *state->boxes, by_appearance);
    for (size_t i = 0; i < state->nboxes && evenly; i++) {
        if (!values_chosen && state->boxes[i].writer.rank > 0) {
            choose_value_writers(state, value_ranks);
            values_chosen = true;
        }
        choose_writer(state, &state->boxes[i]);
    }
    if (evenly && !values_chosen)
        choose_value_writers(state, value_ranks);
}

/* ---- the manifest ---- */

static int by_tensor_and_writer(const void *a, const void *b)
{
    const struct box_copies *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return compare_holders(&x->writer, &y->writer);
}

rsd_status target_add_tensor(const struct target *target, struct manifest *manifest)
{
    struct catalog *catalog = &manifest->catalog;
    struct slice name = {target->name, strlen(target->name)};
    size_t i = catalog->ntensors;
    TRY(catalog_add_tensor(catalog, name, target->dtype, target->layout->ndim,
                           target->layout->shape));
    return catalog_copy_text(catalog, target->path, &catalog->tensors[i].path);
}

/* Adds the tensors and their boxes to the manifest, in the file of the rank that writes each box. */
static rsd_status add_tensors(struct dedup_state *state, struct manifest *manifest)
{
    if (state->nboxes > 1)
        qsort(state->boxes, state->nboxes, sizeof *state->boxes, by_tensor_and_writer);
    for (size_t i = 0, next = 0; i < state->input->ntargets; i++) {
        const struct target *target = &state->input->targets[i];
        TRY(target_add_tensor(target, manifest));
        for (; next < state->nboxes && state->boxes[next].tensor == i; next++) {
            const struct box_copies *box = &state->boxes[next];
            const int64_t *lo = state->coordinates + box->coordinates;
            const int64_t *len = lo + target->layout->ndim, *at = len + target->layout->ndim;
            TRY(manifest_add_box(manifest, lo, len, at, (uint32_t)box->writer.rank,
                                 box->writer.order));
        }
    }
    return RSD_OK;
}

rsd_status dedup_count_ranks(size_t ntargets, const struct target *targets, int64_t *nranks)
{
    int64_t world = 1;
    for (size_t i = 0; i < ntargets; i++)
        world = max_i64(world, rsd_layout_world(targets[i].layout));
    if (*nranks == 0)
        *nranks = world;
    if (*nranks > MAX_RANKS)
        return fail(RSD_ELIMIT, "%lld ranks need as many files; at most %d are written",
                    (long long)*nranks, (int)MAX_RANKS);
    if (*nranks < world)
        return fail(RSD_EINVAL, "nranks is %lld, but the layouts name %lld ranks",
                    (long long)*nranks, (long long)world);
    return RSD_OK;
}

rsd_status dedup_add_tensors(struct manifest *manifest, const struct dedup_input *input,
                             int32_t **out)
{
    struct dedup_state state = {.input = input};
    int32_t *value_ranks = mem_new(input->nvalues, sizeof *value_ranks);
    state.nbytes = mem_new((size_t)input->nranks, sizeof *state.nbytes);
    rsd_status status = state.nbytes && value_ranks ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < input->ntargets && !status; i++) {
        status = dedup_tensor(&state, i);
        if (status)
            status = fail_in(status, "%s: ", input->targets[i].name);
    }
    if (!status) {
        choose_writers(&state, value_ranks);
        status = add_tensors(&state, manifest);
    }
    mem_free(state.nbytes);
    mem_free(state.holders);
    mem_free(state.boxes);
    mem_free(state.coordinates);
    if (status)
        mem_free(value_ranks);
    else
        *out = value_ranks;
    return status;
}
