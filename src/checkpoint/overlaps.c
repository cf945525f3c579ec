/* overlaps.c - finds boxes of a tensor that overlap and have different bytes there.
 *
 * A reader takes each element from one box only, so it would not notice that another box has another value.
 * Boxes that are equal are copies: each is compared with the first of them, by its CRC-32 if both have one.
 * Other boxes that overlap are compared in pairs.
 */
#include "checkpoint.h"

#include <stdlib.h>

enum { ROW_COST = 8192 }; /* bytes that could be read instead of going to another row */

struct overlap_search {
    rsd_checkpoint *checkpoint;
    size_t tensor;
    uint64_t tile_limit;
    struct overlap_budget *budget;
    bool over;     /* the budget is used up */
    size_t *order; /* numbers of boxes, sorted by their coordinates */
    size_t ndistinct;
    size_t *distinct; /* the first box of each kind */
    char *bytes[2];
};

static const struct stored_tensor *searched_tensor(const struct overlap_search *search)
{
    return &search->checkpoint->catalog.tensors[search->tensor];
}

static const int64_t *box_coordinates(const struct overlap_search *search, size_t box)
{
    return tensor_box_lo(&search->checkpoint->catalog, searched_tensor(search), box);
}

/* ---- two boxes ---- */

/* Returns whether both boxes are all of their records, in one order, with one CRC-32. */
static bool have_same_crc(const struct source *a, const struct source *b)
{
    bool same = a->checkable && b->checkable && !a->array.stream && !b->array.stream &&
                a->array.crc == b->array.crc && a->array.nbytes == b->array.nbytes &&
                a->array.big_endian == b->array.big_endian;
    for (int32_t d = 0; d < a->ndim && same; d++)
        same = a->array.strides[d] == b->array.strides[d] && a->lo[d] == b->lo[d];
    return same;
}

/* Compares a region that fits into the buffers; *same stays true if it is equal. */
static rsd_status compare_block_of(struct overlap_search *search, struct source *sources,
                                   const int64_t *lo, const int64_t *len, bool *same)
{
    struct io_stats stats = {0};
    size_t n = (size_t)box_volume(sources->ndim, len) * sources->element_nbytes;
    for (int i = 0; i < 2; i++) {
        if (!search->bytes[i])
            search->bytes[i] = mem_new((size_t)search->tile_limit, 1);
        if (!search->bytes[i])
            return RSD_ENOMEM;
        TRY(source_read(&sources[i], lo, len, search->bytes[i], search->tile_limit, &stats));
    }
    *same = memcmp(search->bytes[0], search->bytes[1], n) == 0;
    return RSD_OK;
}

/* Compares a region in slabs, in ascending order: some indices of dim k, single ones of the dims before. */
static rsd_status compare_region(struct overlap_search *search, struct source *sources,
                                 const int64_t *lo, const int64_t *len, bool *same)
{
    int32_t ndim = sources->ndim, k = ndim - 1;
    int64_t at[RSD_MAX_DIMS], slab[RSD_MAX_DIMS], row = (int64_t)sources->element_nbytes;
    int64_t most = max_i64((int64_t)search->tile_limit, row);
    *same = true;
    if (ndim == 0)
        return compare_block_of(search, sources, lo, len, same);
    for (; k > 0 && row <= most / len[k]; k--)
        row *= len[k];
    copy_i64s(at, lo, ndim);
    for (int32_t d = 0; d < ndim; d++)
        slab[d] = d < k ? 1 : len[d];
    slab[k] = clamp_i64(most / row, 1, len[k]);
    for (;;) {
        int64_t part[RSD_MAX_DIMS];
        int32_t d = k;
        copy_i64s(part, slab, ndim);
        part[k] = min_i64(slab[k], lo[k] + len[k] - at[k]);
        TRY(compare_block_of(search, sources, at, part, same));
        for (at[k] += slab[k]; d > 0 && at[d] >= lo[d] + len[d]; at[--d]++)
            at[d] = lo[d];
        if (!*same || at[0] >= lo[0] + len[0])
            return RSD_OK;
    }
}

/* Returns what it costs to read a region of a box, in bytes. A stream is read from its start. */
static uint64_t region_cost(const struct source *source, const int64_t *len)
{
    int64_t packed[RSD_MAX_DIMS];
    uint64_t nrows = 1;
    if (source->array.stream)
        return source->array.nbytes;
    box_packed_strides(source->ndim, len, source->element_nbytes, packed);
    struct loops loops = box_loops(source->ndim, len, element_of_bytes(source->element_nbytes),
                                   source->array.strides, packed);
    for (int32_t i = 0; i < loops.n; i++)
        nrows *= (uint64_t)loops.loop[i].count;
    return nrows > UINT64_MAX / (ROW_COST + loops.run) / 2 ? UINT64_MAX / 2
                                                           : nrows * (ROW_COST + loops.run);
}

/* Takes the cost of a pair from what all pairs may cost. Returns false if it is too much. */
static bool take_pair(struct overlap_search *search, const struct source *sources,
                      const int64_t *len)
{
    struct overlap_budget *budget = search->budget;
    uint64_t cost = region_cost(&sources[0], len) + region_cost(&sources[1], len);
    bool enough = cost <= budget->nbytes;
    budget->nbytes -= enough ? cost : 0;
    return enough;
}

static rsd_status fail_budget(const struct overlap_search *search)
{
    return fail(RSD_EFORMAT,
                "%s: %.300s: too many boxes overlap in part; they were not all compared",
                search->checkpoint->store->path, searched_tensor(search)->name);
}

/* Compares two boxes where they overlap. */
static rsd_status compare_boxes(struct overlap_search *search, size_t a, size_t b, bool *same)
{
    const struct catalog *catalog = &search->checkpoint->catalog;
    const struct stored_tensor *tensor = searched_tensor(search);
    const struct extent *in_a = &catalog->extents[tensor->first_extent + a];
    const struct extent *in_b = &catalog->extents[tensor->first_extent + b];
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    struct source sources[2];
    const size_t boxes[2] = {a, b};
    const int64_t *one = box_coordinates(search, a), *other = box_coordinates(search, b);
    int n = 0;
    *same = true;
    bool equal = memcmp(one, other, 2 * (size_t)tensor->ndim * sizeof *one) == 0;
    if (equal && in_a->file == in_b->file && in_a->offset == in_b->offset &&
        in_a->nbytes == in_b->nbytes && in_a->kind == in_b->kind && in_a->detail == in_b->detail)
        return RSD_OK; /* the same bytes */
    box_overlap(tensor->ndim, one, one + tensor->ndim, other, other + tensor->ndim, lo, len);
    if (in_a->kind == EXTENT_NONE || in_b->kind == EXTENT_NONE)
        return RSD_OK; /* reported elsewhere */
    rsd_status status = RSD_OK;
    for (; n < 2 && !status; n += !status) {
        status = source_open(&sources[n], search->checkpoint, search->tensor, boxes[n]);
        sources[n].wanted = (uint64_t)box_volume(tensor->ndim, len) * sources[n].element_nbytes;
    }
    if (!status && !equal && !take_pair(search, sources, len)) {
        search->over = true;
        status = fail_budget(search);
    }
    if (!status && !have_same_crc(&sources[0], &sources[1]))
        status = compare_region(search, sources, lo, len, same);
    for (int i = 0; i < n; i++)
        source_close(&sources[i]);
    return status;
}

/* Compares two boxes. Returns EFORMAT if they differ. Boxes that cannot be read are reported elsewhere. */
static rsd_status check_pair(struct overlap_search *search, size_t a, size_t b)
{
    const struct stored_tensor *tensor = searched_tensor(search);
    const int64_t *one = box_coordinates(search, a), *other = box_coordinates(search, b);
    char text[2][BOX_TEXT_NCHARS];
    bool same;
    rsd_status status = compare_boxes(search, a, b, &same);
    if (status == RSD_ENOMEM || (!status && same))
        return status;
    if (status)
        return search->over ? status : RSD_OK;
    return fail(RSD_EFORMAT, "%s: %.300s: boxes %s and %s overlap with different bytes",
                search->checkpoint->store->path, tensor->name,
                box_text(tensor->ndim, one, one + tensor->ndim, text[0]),
                box_text(tensor->ndim, other, other + tensor->ndim, text[1]));
}

/* ---- all boxes ---- */

static int by_coordinates(const void *a, const void *b, void *context)
{
    const struct overlap_search *search = context;
    const int64_t *x = box_coordinates(search, *(const size_t *)a);
    const int64_t *y = box_coordinates(search, *(const size_t *)b);
    for (int32_t d = 0; d < 2 * searched_tensor(search)->ndim; d++)
        if (x[d] != y[d])
            return x[d] < y[d] ? -1 : 1;
    return 0;
}

/* Compares copies, and lists the boxes of which they are copies. */
static rsd_status check_copies(struct overlap_search *search)
{
    const struct stored_tensor *tensor = searched_tensor(search);
    for (size_t i = 0; i < tensor->nboxes; i++)
        search->order[i] = i;
    qsort_r(search->order, tensor->nboxes, sizeof *search->order, by_coordinates, search);
    for (size_t i = 0; i < tensor->nboxes; i++) {
        size_t last = search->ndistinct ? search->distinct[search->ndistinct - 1] : 0;
        size_t box = search->order[i];
        if (box_is_empty(tensor->ndim, box_coordinates(search, box) + tensor->ndim))
            continue;
        if (search->ndistinct && by_coordinates(&last, &box, search) == 0)
            TRY(check_pair(search, last, box));
        else
            search->distinct[search->ndistinct++] = box;
    }
    return RSD_OK;
}

/* Compares each box with those behind it in the list that overlap it. EFORMAT: too many overlap. */
static rsd_status check_overlapping(struct overlap_search *search, const struct box_tree *tree)
{
    const struct stored_tensor *tensor = searched_tensor(search);
    for (size_t i = 0; i < search->ndistinct; i++) {
        const int64_t *lo = box_coordinates(search, search->distinct[i]);
        struct box_tree_search tree_search = {0};
        for (int64_t k; (k = box_tree_next(tree, &tree_search, lo, lo + tensor->ndim)) >= 0;) {
            if ((size_t)k == i)
                continue;
            if (search->budget->nfound == 0)
                return fail_budget(search);
            search->budget->nfound--;
            if ((size_t)k > i)
                TRY(check_pair(search, search->distinct[i], search->distinct[k]));
        }
    }
    return RSD_OK;
}

/* Compares the boxes that are not copies of each other, which a tree finds. */
static rsd_status check_distinct(struct overlap_search *search)
{
    size_t ndim = (size_t)searched_tensor(search)->ndim, n = search->ndistinct;
    struct box_tree tree = {0};
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        const int64_t *box = box_coordinates(search, search->distinct[i]);
        copy_i64s(lo + i * ndim, box, (int64_t)ndim);
        copy_i64s(len + i * ndim, box + ndim, (int64_t)ndim);
    }
    if (!status)
        status = box_tree_build(&tree, (int32_t)ndim, (int64_t)n, lo, len);
    mem_free(lo);
    mem_free(len);
    if (!status)
        status = check_overlapping(search, &tree);
    box_tree_drop(&tree);
    return status;
}

rsd_status overlaps_check(rsd_checkpoint *checkpoint, size_t index, uint64_t tile_limit,
                          struct overlap_budget *budget)
{
    const struct stored_tensor *tensor = &checkpoint->catalog.tensors[index];
    size_t element_nbytes = rsd_dtype_nbytes(tensor->dtype);
    struct overlap_search search = {.checkpoint = checkpoint,
                                    .tensor = index,
                                    .budget = budget,
                                    .tile_limit = tile_limit > 1 << 20 ? 1 << 20 : tile_limit};
    if (tensor->nboxes < 2)
        return RSD_OK;
    if (search.tile_limit < element_nbytes)
        search.tile_limit = element_nbytes;
    search.order = mem_new(tensor->nboxes, sizeof *search.order);
    search.distinct = mem_new(tensor->nboxes, sizeof *search.distinct);
    rsd_status status = search.order && search.distinct ? check_copies(&search) : RSD_ENOMEM;
    if (!status && search.ndistinct > 1)
        status = check_distinct(&search);
    mem_free(search.order);
    mem_free(search.distinct);
    mem_free(search.bytes[0]);
    mem_free(search.bytes[1]);
    return status;
}
