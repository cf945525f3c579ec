/* haul.c - one tensor on its way from its sources to its sinks, tile by tile.
 *
 * A tile is a slab of the tensor: some indices of one dim, single ones of the dims before it, and all of
 * the dims behind it. What a slab shares with any box is one run of bytes in the box's array, so slabs are
 * read and written in large pieces whatever the layouts on both sides, and each byte once:
 *
 *        sources, cut by columns                tile                  sinks, cut by rows
 *        +-----+-----+-----+          +-------------------+          +-------------------+
 *        |=====|=====|=====|   ->     |===================|    ->    |===================|
 *        |     |     |     |          +-------------------+          +-------------------+
 *        |     |     |     |           three reads, one write        |                   |
 *        +-----+-----+-----+                                         +-------------------+
 *
 * What lies the same way on both sides goes straight from one to the other. Tiles are as small as reads
 * and writes stay large, so that they pass through the cache.
 *
 * Invariants:
 *   (1) Pieces cover what is wanted of each sink exactly once (they come from a plan).
 *   (2) Tiles in ascending order read and write every array in ascending order, so streams can be used.
 */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

enum { TILE_NBYTES = 1 << 20, BLOCK_NBYTES = 1 << 16 };

/* ---- pieces ---- */

static rsd_status add_piece(struct haul *haul, const rsd_piece *piece)
{
    size_t n = haul->npieces, ndim = (size_t)haul->ndim;
    TRY(GROW(haul->pieces, haul->room_pieces, n + 1));
    TRY(GROW(haul->coordinates, haul->room_coordinates, (n + 1) * 2 * ndim));
    haul->pieces[n] = (struct haul_piece){(size_t)piece->from_array, (size_t)piece->to_array};
    copy_i64s(haul->coordinates + n * 2 * ndim, piece->box.lo, haul->ndim);
    copy_i64s(haul->coordinates + n * 2 * ndim + ndim, piece->box.len, haul->ndim);
    haul->npieces++;
    haul->nbytes += piece->nbytes;
    return RSD_OK;
}

/* lo and len of all pieces, each in a list of its own, for the tree. */
static rsd_status index_pieces(struct haul *haul)
{
    size_t n = haul->npieces, ndim = (size_t)haul->ndim;
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        copy_i64s(lo + i * ndim, haul->coordinates + i * 2 * ndim, haul->ndim);
        copy_i64s(len + i * ndim, haul->coordinates + i * 2 * ndim + ndim, haul->ndim);
    }
    if (!status)
        status = tree_build(&haul->tree, haul->ndim, (int64_t)n, lo, len);
    mem_free(lo);
    mem_free(len);
    return status;
}

static rsd_status list_pieces(struct haul *haul, const rsd_plan *plan)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    TRY(rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece && !status)
        if ((status = add_piece(haul, piece)))
            break;
    rsd_cursor_free(cursor);
    return status ? status : index_pieces(haul);
}

/* ---- tiles ---- */

static void bound_pieces(struct haul *haul)
{
    const int64_t *bounds = haul->tree.bounds; /* of the root: all pieces */
    for (int32_t d = 0; d < haul->ndim; d++) {
        haul->lo[d] = haul->npieces ? bounds[d] : 0;
        haul->len[d] = haul->npieces ? bounds[haul->ndim + d] - bounds[d] : 0;
    }
}

/* The least bytes that one index of dim k has in any array: 0 if no array is there. */
static int64_t least_row(const struct haul *haul, int32_t k)
{
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < haul->nsources + haul->nsinks; i++) {
        const int64_t *len =
            i < haul->nsources ? haul->sources[i].len : haul->sinks[i - haul->nsources].len;
        int64_t row = (int64_t)haul->each * box_volume(haul->ndim - k - 1, len + k + 1);
        if (box_volume(haul->ndim, len) > 0)
            least = min_i64(least, row);
    }
    return least == INT64_MAX ? 0 : least;
}

/* Whether some source has to be read across, and is too large to be kept. */
static bool runs_across(const struct haul *haul)
{
    for (size_t i = 0; i < haul->nsources; i++)
        if (haul->sources[i].nbytes > haul->keep_most && source_runs_across(&haul->sources[i]))
            return true;
    return false;
}

/* The first dim of which single indices are small enough to be taken several at a time, and how many. */
static void choose_tiles(struct haul *haul, uint64_t most_nbytes)
{
    int64_t row = max_i64((int64_t)haul->each, 1),
            most = (int64_t)(most_nbytes < INT64_MAX ? most_nbytes : INT64_MAX);
    int32_t k = haul->ndim - 1;
    for (int32_t d = 0; d < haul->ndim; d++)
        haul->tile[d] = 1;
    while (k >= 0 && row * max_i64(haul->len[k], 1) <= most && k > 0) {
        haul->tile[k] = max_i64(haul->len[k], 1);
        row *= haul->tile[k--];
    }
    if (k >= 0) {
        int64_t narrow = max_i64(least_row(haul, k), 1);
        int64_t rows = max_i64(TILE_NBYTES / row, ceil_div(BLOCK_NBYTES, narrow));
        if (runs_across(haul)) /* more rows at a time make its runs longer */
            rows = most / row;
        haul->tile[k] = clamp_i64(min_i64(rows, most / row), 1, max_i64(haul->len[k], 1));
    }
    haul->ntiles = haul->npieces > 0;
    haul->tile_nbytes = haul->each;
    for (int32_t d = 0; d < haul->ndim; d++) {
        haul->ntiles *= ceil_div(haul->len[d], haul->tile[d]);
        haul->tile_nbytes *= (size_t)haul->tile[d];
    }
}

static void tile_box(const struct haul *haul, int64_t index, int64_t *lo, int64_t *len)
{
    for (int32_t d = haul->ndim - 1; d >= 0; d--) {
        int64_t count = ceil_div(haul->len[d], haul->tile[d]), i = index % count;
        index /= count;
        lo[d] = haul->lo[d] + i * haul->tile[d];
        len[d] = min_i64(haul->tile[d], haul->lo[d] + haul->len[d] - lo[d]);
    }
}

/* ---- sources ---- */

/* Numbers of boxes, each once. */
static int by_number(const void *a, const void *b)
{
    const size_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static size_t drop_doubles(size_t *numbers, size_t n)
{
    size_t kept = 0;
    qsort(numbers, n, sizeof *numbers, by_number);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || numbers[i] != numbers[i - 1])
            numbers[kept++] = numbers[i];
    return kept;
}

/* Opens the boxes that some piece comes from; pieces then name sources instead of boxes. */
static rsd_status open_sources(struct haul *haul, rsd_checkpoint *checkpoint, size_t tensor)
{
    size_t *boxes = mem_new(haul->npieces + 1, sizeof *boxes);
    if (!boxes)
        return RSD_ENOMEM;
    for (size_t i = 0; i < haul->npieces; i++)
        boxes[i] = haul->pieces[i].source;
    size_t n = drop_doubles(boxes, haul->npieces);
    haul->sources = mem_new(n, sizeof *haul->sources);
    rsd_status status = haul->sources ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        status = source_open(&haul->sources[i], checkpoint, tensor, boxes[i]);
        haul->nsources += !status;
        if (!status && haul->sources[i].compressed)
            haul->in_order = true;
    }
    for (size_t i = 0; i < haul->npieces && !status; i++) {
        const size_t *at = bsearch(&haul->pieces[i].source, boxes, n, sizeof *boxes, by_number);
        haul->pieces[i].source = (size_t)(at - boxes);
    }
    mem_free(boxes);
    return status;
}

static void finish(struct haul *haul, uint64_t most_nbytes)
{
    for (size_t i = 0; i < haul->npieces; i++)
        haul->sources[haul->pieces[i].source].wanted +=
            (uint64_t)box_volume(haul->ndim, haul->coordinates + (2 * i + 1) * (size_t)haul->ndim) *
            haul->each;
    for (size_t i = 0; i < haul->nsources; i++) /* a part that is read twice cannot be added up */
        if (haul->sources[i].wanted < haul->sources[i].nbytes)
            haul->sources[i].checkable = false;
    for (size_t i = 0; i < haul->nsinks; i++)
        if (haul->sinks[i].dtype != haul->dtype && haul->sinks[i].kind != SINK_DISCARD)
            haul->cast_each = (size_t)max_i64((int64_t)haul->cast_each,
                                              (int64_t)rsd_dtype_nbytes(haul->sinks[i].dtype));
    haul->keep_most = most_nbytes;
    if (haul->cast_each > haul->each) /* what is cast takes more room than what is read */
        most_nbytes /= haul->cast_each / haul->each;
    bound_pieces(haul);
    choose_tiles(haul, most_nbytes > 0 ? most_nbytes : 1);
}

static rsd_status plan_sinks(const struct haul *haul, const struct contents *contents,
                             const struct tensor *tensor, rsd_plan **plan)
{
    size_t ndim = (size_t)haul->ndim, n = haul->nsinks;
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        copy_i64s(lo + i * ndim, haul->sinks[i].lo, haul->ndim);
        copy_i64s(len + i * ndim, haul->sinks[i].len, haul->ndim);
    }
    if (!status)
        status = tensor_plan(contents, tensor, n, lo, len, plan);
    mem_free(lo);
    mem_free(len);
    return status;
}

rsd_status haul_start(struct haul *haul, const struct contents *contents, size_t index,
                      size_t nsinks)
{
    const struct tensor *tensor = &contents->tensors[index];
    *haul = (struct haul){.name = tensor->name,
                          .dtype = tensor->dtype,
                          .each = rsd_dtype_nbytes(tensor->dtype),
                          .ndim = tensor->ndim};
    haul->sinks = mem_new(nsinks, sizeof *haul->sinks);
    return haul->sinks ? RSD_OK : RSD_ENOMEM;
}

void haul_add_sink(struct haul *haul, const struct sink *sink)
{
    haul->sinks[haul->nsinks++] = *sink;
}

rsd_status haul_from_files(struct haul *haul, rsd_checkpoint *checkpoint, size_t index,
                           uint64_t most_nbytes)
{
    const struct contents *contents = &checkpoint->contents;
    rsd_plan *plan;
    TRY(plan_sinks(haul, contents, &contents->tensors[index], &plan));
    rsd_status status = list_pieces(haul, plan);
    rsd_plan_free(plan);
    TRY(status);
    TRY(open_sources(haul, checkpoint, index));
    finish(haul, most_nbytes);
    return RSD_OK;
}

rsd_status haul_whole(struct haul *haul, rsd_checkpoint *checkpoint, size_t index, sink_take *take,
                      void *context, uint64_t most_nbytes)
{
    const struct tensor *tensor = &checkpoint->contents.tensors[index];
    struct sink sink = {.kind = SINK_BLOCKS,
                        .dtype = tensor->dtype,
                        .ndim = tensor->ndim,
                        .take = take,
                        .context = context};
    copy_i64s(sink.len, tensor_shape(&checkpoint->contents, tensor), tensor->ndim);
    TRY(haul_start(haul, &checkpoint->contents, index, 1));
    haul_add_sink(haul, &sink);
    return haul_from_files(haul, checkpoint, index, most_nbytes);
}

/* One source, all of which goes to the only sink. */
static rsd_status add_only_piece(struct haul *haul, uint64_t most_nbytes)
{
    const struct sink *sink = &haul->sinks[0];
    rsd_piece piece = {.nbytes = box_volume(haul->ndim, sink->len) * (int64_t)haul->each};
    haul->nsources = 1;
    if (piece.nbytes > 0) {
        box_set(&piece.box, haul->ndim, sink->lo, sink->len);
        TRY(add_piece(haul, &piece));
    }
    TRY(index_pieces(haul));
    finish(haul, most_nbytes);
    return RSD_OK;
}

rsd_status haul_from_box(struct haul *haul, rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                         uint64_t most_nbytes)
{
    haul->sources = mem_new(1, sizeof *haul->sources);
    if (!haul->sources)
        return RSD_ENOMEM;
    TRY(source_open(&haul->sources[0], checkpoint, tensor, box));
    haul->in_order = haul->sources[0].compressed;
    return add_only_piece(haul, most_nbytes);
}

rsd_status haul_from_memory(struct haul *haul, const char *memory, const int64_t *strides,
                            uint64_t most_nbytes)
{
    const struct sink *sink = &haul->sinks[0];
    haul->sources = mem_new(1, sizeof *haul->sources);
    if (!haul->sources)
        return RSD_ENOMEM;
    source_in_memory(&haul->sources[0], haul->dtype, haul->ndim, sink->lo, sink->len, memory,
                     strides);
    return add_only_piece(haul, most_nbytes);
}

void haul_drop(struct haul *haul)
{
    for (size_t i = 0; i < haul->nsources; i++)
        source_close(&haul->sources[i]);
    mem_free(haul->sources);
    mem_free(haul->sinks);
    mem_free(haul->pieces);
    mem_free(haul->coordinates);
    tree_drop(&haul->tree);
    *haul = (struct haul){0};
}

rsd_status haul_tile(const struct haul *haul, int64_t index, struct scratch *scratch,
                     struct tally *tally)
{
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    tile_box(haul, index, lo, len);
    return haul_box(haul, lo, len, scratch, tally);
}
