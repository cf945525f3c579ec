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
#include "transfer.h"

#include <stdlib.h>
#include <string.h>

enum { TILE_NBYTES = 1 << 20, BLOCK_NBYTES = 1 << 16 };

/* ---- pieces ---- */

static rsd_status add_piece(struct transfer *transfer, const rsd_piece *piece)
{
    size_t n = transfer->npieces, ndim = (size_t)transfer->ndim;
    TRY(GROW(transfer->pieces, transfer->pieces_capacity, n + 1));
    TRY(GROW(transfer->coordinates, transfer->coordinates_capacity, (n + 1) * 2 * ndim));
    transfer->pieces[n] =
        (struct transfer_piece){(size_t)piece->from_array, (size_t)piece->to_array, false};
    copy_i64s(transfer->coordinates + n * 2 * ndim, piece->box.lo, transfer->ndim);
    copy_i64s(transfer->coordinates + n * 2 * ndim + ndim, piece->box.len, transfer->ndim);
    transfer->npieces++;
    transfer->nbytes += piece->nbytes;
    return RSD_OK;
}

/* lo and len of all pieces, each in a list of its own, for the tree. */
static rsd_status index_pieces(struct transfer *transfer)
{
    size_t n = transfer->npieces, ndim = (size_t)transfer->ndim;
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        copy_i64s(lo + i * ndim, transfer->coordinates + i * 2 * ndim, transfer->ndim);
        copy_i64s(len + i * ndim, transfer->coordinates + i * 2 * ndim + ndim, transfer->ndim);
    }
    if (!status)
        status = box_tree_build(&transfer->tree, transfer->ndim, (int64_t)n, lo, len);
    mem_free(lo);
    mem_free(len);
    return status;
}

static rsd_status list_pieces(struct transfer *transfer, const rsd_plan *plan)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    TRY(rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece && !status)
        if ((status = add_piece(transfer, piece)))
            break;
    rsd_cursor_free(cursor);
    return status ? status : index_pieces(transfer);
}

/* ---- tiles ---- */

static void bound_pieces(struct transfer *transfer)
{
    const int64_t *bounds = transfer->tree.bounds; /* of the root: all pieces */
    for (int32_t d = 0; d < transfer->ndim; d++) {
        transfer->lo[d] = transfer->npieces ? bounds[d] : 0;
        transfer->len[d] = transfer->npieces ? bounds[transfer->ndim + d] - bounds[d] : 0;
    }
}

/* The least bytes that one index of dim k has in any array: 0 if no array is there. */
static int64_t least_row(const struct transfer *transfer, int32_t k)
{
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < transfer->nsources + transfer->nsinks; i++) {
        const int64_t *len = i < transfer->nsources ? transfer->sources[i].len
                                                    : transfer->sinks[i - transfer->nsources].len;
        if (box_is_empty(transfer->ndim, len)) /* its other extents may be any number */
            continue;
        least = min_i64(least, (int64_t)transfer->element_nbytes *
                                   box_volume(transfer->ndim - k - 1, len + k + 1));
    }
    return least == INT64_MAX ? 0 : least;
}

/* Whether some source has to be read across, and is too large to be kept. */
static bool runs_across(const struct transfer *transfer)
{
    for (size_t i = 0; i < transfer->nsources; i++)
        if (transfer->sources[i].array.nbytes > transfer->keep_most &&
            source_runs_across(&transfer->sources[i]))
            return true;
    return false;
}

/* The first dim of which single indices are small enough to be taken several at a time, and how many. */
static void choose_tiles(struct transfer *transfer, uint64_t most_nbytes)
{
    int64_t row = max_i64((int64_t)transfer->element_nbytes, 1),
            most = (int64_t)(most_nbytes < INT64_MAX ? most_nbytes : INT64_MAX);
    int32_t k = transfer->ndim - 1;
    for (int32_t d = 0; d < transfer->ndim; d++)
        transfer->tile[d] = 1;
    while (k >= 0 && row * max_i64(transfer->len[k], 1) <= most && k > 0) {
        transfer->tile[k] = max_i64(transfer->len[k], 1);
        row *= transfer->tile[k--];
    }
    if (k >= 0) {
        int64_t narrow = max_i64(least_row(transfer, k), 1);
        int64_t rows = max_i64(TILE_NBYTES / row, ceil_div(BLOCK_NBYTES, narrow));
        if (runs_across(transfer)) /* more rows at a time make its runs longer */
            rows = most / row;
        transfer->tile[k] = clamp_i64(min_i64(rows, most / row), 1, max_i64(transfer->len[k], 1));
    }
    transfer->ntiles = transfer->npieces > 0;
    transfer->tile_nbytes = transfer->element_nbytes;
    for (int32_t d = 0; d < transfer->ndim; d++) {
        transfer->ntiles *= ceil_div(transfer->len[d], transfer->tile[d]);
        transfer->tile_nbytes *= (size_t)transfer->tile[d];
    }
}

void transfer_tile_box(const struct transfer *transfer, int64_t index, int64_t *lo, int64_t *len)
{
    for (int32_t d = transfer->ndim - 1; d >= 0; d--) {
        int64_t count = ceil_div(transfer->len[d], transfer->tile[d]), i = index % count;
        index /= count;
        lo[d] = transfer->lo[d] + i * transfer->tile[d];
        len[d] = min_i64(transfer->tile[d], transfer->lo[d] + transfer->len[d] - lo[d]);
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
static rsd_status open_sources(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t tensor)
{
    size_t *boxes = mem_new(transfer->npieces + 1, sizeof *boxes);
    if (!boxes)
        return RSD_ENOMEM;
    for (size_t i = 0; i < transfer->npieces; i++)
        boxes[i] = transfer->pieces[i].source;
    size_t n = drop_doubles(boxes, transfer->npieces);
    transfer->sources = mem_new(n, sizeof *transfer->sources);
    rsd_status status = transfer->sources ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        status = source_open(&transfer->sources[i], checkpoint, tensor, boxes[i]);
        transfer->nsources += !status;
        if (!status && transfer->sources[i].array.stream)
            transfer->in_order = true;
    }
    for (size_t i = 0; i < transfer->npieces && !status; i++) {
        const size_t *at = bsearch(&transfer->pieces[i].source, boxes, n, sizeof *boxes, by_number);
        transfer->pieces[i].source = (size_t)(at - boxes);
    }
    mem_free(boxes);
    return status;
}

static void finish(struct transfer *transfer, uint64_t most_nbytes)
{
    for (size_t i = 0; i < transfer->npieces; i++)
        transfer->sources[transfer->pieces[i].source].wanted +=
            (uint64_t)box_volume(transfer->ndim,
                                 transfer->coordinates + (2 * i + 1) * (size_t)transfer->ndim) *
            transfer->element_nbytes;
    for (size_t i = 0; i < transfer->nsources;
         i++) /* a part that is read twice cannot be added up */
        if (transfer->sources[i].wanted < transfer->sources[i].array.nbytes)
            transfer->sources[i].checkable = false;
    for (size_t i = 0; i < transfer->nsinks; i++)
        if (transfer->sinks[i].dtype != transfer->dtype && transfer->sinks[i].kind != SINK_DISCARD)
            transfer->cast_each = (size_t)max_i64(
                (int64_t)transfer->cast_each, (int64_t)rsd_dtype_nbytes(transfer->sinks[i].dtype));
    transfer->keep_most = most_nbytes;
    if (transfer->cast_each >
        transfer->element_nbytes) /* what is cast takes more room than what is read */
        most_nbytes /= transfer->cast_each / transfer->element_nbytes;
    bound_pieces(transfer);
    choose_tiles(transfer, most_nbytes > 0 ? most_nbytes : 1);
}

rsd_status transfer_plan(const struct catalog *catalog, const struct stored_tensor *tensor,
                         size_t n, const int64_t *lo, const int64_t *len, rsd_plan **plan)
{
    rsd_layout *src = NULL, *dst = NULL;
    rsd_status status = catalog_tensor_layout(catalog, tensor, false, &src);
    if (!status)
        status = catalog_boxes_layout(tensor->dtype, tensor->ndim, tensor_shape(catalog, tensor), n,
                                      lo, len, &dst);
    if (!status)
        status = rsd_plan_new(src, dst, NULL, plan);
    rsd_layout_free(src);
    rsd_layout_free(dst);
    return status;
}

static rsd_status plan_sinks(const struct transfer *transfer, const struct catalog *catalog,
                             const struct stored_tensor *tensor, rsd_plan **plan)
{
    size_t ndim = (size_t)transfer->ndim, n = transfer->nsinks;
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        copy_i64s(lo + i * ndim, transfer->sinks[i].lo, transfer->ndim);
        copy_i64s(len + i * ndim, transfer->sinks[i].len, transfer->ndim);
    }
    if (!status)
        status = transfer_plan(catalog, tensor, n, lo, len, plan);
    mem_free(lo);
    mem_free(len);
    return status;
}

rsd_status transfer_start(struct transfer *transfer, const struct catalog *catalog, size_t index,
                          size_t nsinks)
{
    const struct stored_tensor *tensor = &catalog->tensors[index];
    *transfer = (struct transfer){.name = tensor->name,
                                  .dtype = tensor->dtype,
                                  .element_nbytes = rsd_dtype_nbytes(tensor->dtype),
                                  .ndim = tensor->ndim};
    transfer->sinks = mem_new(nsinks, sizeof *transfer->sinks);
    return transfer->sinks ? RSD_OK : RSD_ENOMEM;
}

void transfer_add_sink(struct transfer *transfer, const struct sink *sink)
{
    transfer->sinks[transfer->nsinks++] = *sink;
}

rsd_status transfer_from_files(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t index,
                               uint64_t most_nbytes)
{
    const struct catalog *catalog = &checkpoint->catalog;
    rsd_plan *plan;
    TRY(plan_sinks(transfer, catalog, &catalog->tensors[index], &plan));
    rsd_status status = list_pieces(transfer, plan);
    rsd_plan_free(plan);
    TRY(status);
    TRY(open_sources(transfer, checkpoint, index));
    finish(transfer, most_nbytes);
    return RSD_OK;
}

rsd_status transfer_whole(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t index,
                          sink_take *take, void *context, uint64_t most_nbytes)
{
    const struct stored_tensor *tensor = &checkpoint->catalog.tensors[index];
    struct sink sink = {.kind = SINK_BLOCKS,
                        .dtype = tensor->dtype,
                        .ndim = tensor->ndim,
                        .take = take,
                        .context = context};
    copy_i64s(sink.len, tensor_shape(&checkpoint->catalog, tensor), tensor->ndim);
    TRY(transfer_start(transfer, &checkpoint->catalog, index, 1));
    transfer_add_sink(transfer, &sink);
    return transfer_from_files(transfer, checkpoint, index, most_nbytes);
}

/* One source, all of which goes to the only sink. */
static rsd_status add_only_piece(struct transfer *transfer, uint64_t most_nbytes)
{
    const struct sink *sink = &transfer->sinks[0];
    rsd_piece piece = {.nbytes = box_volume(transfer->ndim, sink->len) *
                                 (int64_t)transfer->element_nbytes};
    transfer->nsources = 1;
    if (piece.nbytes > 0) {
        box_set(&piece.box, transfer->ndim, sink->lo, sink->len);
        TRY(add_piece(transfer, &piece));
    }
    TRY(index_pieces(transfer));
    finish(transfer, most_nbytes);
    return RSD_OK;
}

rsd_status transfer_from_box(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t tensor,
                             size_t box, uint64_t most_nbytes)
{
    transfer->sources = mem_new(1, sizeof *transfer->sources);
    if (!transfer->sources)
        return RSD_ENOMEM;
    TRY(source_open(&transfer->sources[0], checkpoint, tensor, box));
    transfer->in_order = transfer->sources[0].array.stream;
    return add_only_piece(transfer, most_nbytes);
}

rsd_status transfer_from_memory(struct transfer *transfer, const char *memory,
                                const int64_t *strides, uint64_t most_nbytes)
{
    const struct sink *sink = &transfer->sinks[0];
    transfer->sources = mem_new(1, sizeof *transfer->sources);
    if (!transfer->sources)
        return RSD_ENOMEM;
    source_in_memory(&transfer->sources[0], transfer->dtype, transfer->ndim, sink->lo, sink->len,
                     memory, strides);
    return add_only_piece(transfer, most_nbytes);
}

void transfer_drop(struct transfer *transfer)
{
    for (size_t i = 0; i < transfer->nsources; i++)
        source_close(&transfer->sources[i]);
    mem_free(transfer->sources);
    mem_free(transfer->sinks);
    mem_free(transfer->pieces);
    mem_free(transfer->coordinates);
    box_tree_drop(&transfer->tree);
    *transfer = (struct transfer){0};
}

rsd_status transfer_run_tile(const struct transfer *transfer, int64_t index,
                             struct scratch *scratch, struct io_stats *stats)
{
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    transfer_tile_box(transfer, index, lo, len);
    return transfer_run_box(transfer, lo, len, scratch, stats);
}
