/* tiling.c - the transfer of one tensor from its sources to its sinks, tile by tile.
 *
 * A tile is a slab of the tensor: some indices of one dim, single ones of the dims before it, and all of
 * the dims behind it. The overlap of a slab and any box is one run of bytes in the array of the box, so slabs are
 * read and written in large runs whatever the layouts on both sides, and each byte once:
 *
 *        sources, cut by columns                tile                  sinks, cut by rows
 *        +-----+-----+-----+          +-------------------+          +-------------------+
 *        |=====|=====|=====|   ->     |===================|    ->    |===================|
 *        |     |     |     |          +-------------------+          +-------------------+
 *        |     |     |     |           three reads, one write        |                   |
 *        +-----+-----+-----+                                         +-------------------+
 *
 * Bytes in the same order on both sides are not copied in between. Tiles are as small as possible with large
 * reads and writes, so that they stay in the cache.
 *
 * Invariants:
 *   (1) Pieces cover each sink exactly once (they come from a plan).
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
    TRY(GROW(transfer->piece_lo, transfer->lo_capacity, (n + 1) * ndim + 1));
    TRY(GROW(transfer->piece_len, transfer->len_capacity, (n + 1) * ndim + 1));
    transfer->pieces[n] =
        (struct transfer_piece){(size_t)piece->from_array, (size_t)piece->to_array, false};
    copy_i64s(transfer->piece_lo + n * ndim, piece->box.lo, transfer->ndim);
    copy_i64s(transfer->piece_len + n * ndim, piece->box.len, transfer->ndim);
    transfer->npieces++;
    transfer->nbytes += piece->nbytes;
    return RSD_OK;
}

/* Adds all pieces of a plan. */
static rsd_status list_pieces(struct transfer *transfer, const rsd_plan *plan)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    TRY(rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece)
        if ((status = add_piece(transfer, piece)))
            break;
    rsd_cursor_free(cursor);
    return status;
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

/* Returns the fewest bytes that one index of dim k has in any array, 0 without arrays. */
static int64_t smallest_row(const struct transfer *transfer, int32_t k)
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

/* Returns whether some source runs in another order, and is too large to be kept. */
static bool any_runs_across(const struct transfer *transfer)
{
    for (size_t i = 0; i < transfer->nsources; i++)
        if (transfer->sources[i].array.nbytes > transfer->max_kept &&
            source_runs_across(&transfer->sources[i]))
            return true;
    return false;
}

/* Finds the first dim of which a tile has several indices, and how many. */
static void choose_tiles(struct transfer *transfer, uint64_t max_nbytes)
{
    int64_t row = max_i64((int64_t)transfer->element_nbytes, 1),
            most = (int64_t)(max_nbytes < INT64_MAX ? max_nbytes : INT64_MAX);
    int32_t k = transfer->ndim - 1;
    for (int32_t d = 0; d < transfer->ndim; d++)
        transfer->tile[d] = 1;
    while (k > 0 && row * max_i64(transfer->len[k], 1) <= most) {
        transfer->tile[k] = max_i64(transfer->len[k], 1);
        row *= transfer->tile[k--];
    }
    if (k >= 0) {
        int64_t narrow = max_i64(smallest_row(transfer, k), 1);
        int64_t rows = max_i64(TILE_NBYTES / row, ceil_div(BLOCK_NBYTES, narrow));
        if (any_runs_across(transfer)) /* more rows at a time make its runs longer */
            rows = most / row;
        transfer->tile[k] = clamp_i64(min_i64(rows, most / row), 1, max_i64(transfer->len[k], 1));
    }
    transfer->ntiles = transfer->npieces > 0;
    for (int32_t d = 0; d < transfer->ndim; d++)
        transfer->ntiles *= ceil_div(transfer->len[d], transfer->tile[d]);
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

static int by_number(const void *a, const void *b)
{
    const size_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* Sorts numbers, and keeps each once. */
static size_t sort_unique(size_t *numbers, size_t n)
{
    size_t kept = 0;
    qsort(numbers, n, sizeof *numbers, by_number);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || numbers[i] != numbers[i - 1])
            numbers[kept++] = numbers[i];
    return kept;
}

/* Opens the boxes that some piece comes from. Pieces then name sources instead of boxes. */
static rsd_status open_sources(struct transfer *transfer, rsd_checkpoint *checkpoint)
{
    size_t *boxes = mem_new(transfer->npieces + 1, sizeof *boxes);
    if (!boxes)
        return RSD_ENOMEM;
    for (size_t i = 0; i < transfer->npieces; i++)
        boxes[i] = transfer->pieces[i].source;
    size_t n = sort_unique(boxes, transfer->npieces);
    transfer->sources = mem_new(n, sizeof *transfer->sources);
    rsd_status status = transfer->sources ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        status = source_open(&transfer->sources[i], checkpoint, transfer->tensor, boxes[i]);
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

static void count_wanted(struct transfer *transfer)
{
    for (size_t i = 0; i < transfer->npieces; i++) {
        const int64_t *len = transfer->piece_len + i * (size_t)transfer->ndim;
        transfer->sources[transfer->pieces[i].source].wanted +=
            (uint64_t)box_volume(transfer->ndim, len) * transfer->element_nbytes;
    }
    for (size_t i = 0; i < transfer->nsources; i++) /* bytes that are read twice do not add up */
        if (transfer->sources[i].wanted < transfer->sources[i].array.nbytes)
            transfer->sources[i].checkable = false;
}

/* ---- what is open at a time ---- */

/* The first and the last tile that read a source. */
struct source_span {
    int64_t tile;
    bool ends;
    size_t source;
};

static int64_t tile_at(const struct transfer *transfer, const int64_t *at)
{
    int64_t index = 0;
    for (int32_t d = 0; d < transfer->ndim; d++)
        index = index * ceil_div(transfer->len[d], transfer->tile[d]) +
                (at[d] - transfer->lo[d]) / transfer->tile[d];
    return index;
}

/* A source that ends in a tile is still open when others begin there. */
static int by_tile(const void *a, const void *b)
{
    const struct source_span *x = a, *y = b;
    if (x->tile != y->tile)
        return x->tile < y->tile ? -1 : 1;
    return x->ends - y->ends;
}

/* Finds the tiles in which the pieces of each source begin and end. spans: two for each source. */
static void find_spans(const struct transfer *transfer, struct source_span *spans)
{
    size_t ndim = (size_t)transfer->ndim;
    for (size_t i = 0; i < transfer->nsources; i++) {
        spans[2 * i] = (struct source_span){INT64_MAX, false, i};
        spans[2 * i + 1] = (struct source_span){-1, true, i};
    }
    for (size_t i = 0; i < transfer->npieces; i++) {
        const int64_t *lo = transfer->piece_lo + i * ndim, *len = transfer->piece_len + i * ndim;
        struct source_span *span = &spans[2 * transfer->pieces[i].source];
        int64_t last[RSD_MAX_DIMS];
        for (int32_t d = 0; d < transfer->ndim; d++)
            last[d] = lo[d] + len[d] - 1;
        span[0].tile = min_i64(span[0].tile, tile_at(transfer, lo));
        span[1].tile = max_i64(span[1].tile, tile_at(transfer, last));
    }
}

/* Counts the sources that are open at a time, at most, and the memory of their streams. */
static rsd_status count_open(struct transfer *transfer, size_t *nopen)
{
    struct source_span *spans = mem_new(2 * transfer->nsources, sizeof *spans);
    uint64_t nbytes = 0;
    size_t n = 0, nstreams = 0;
    if (!spans)
        return RSD_ENOMEM;
    find_spans(transfer, spans);
    qsort(spans, 2 * transfer->nsources, sizeof *spans, by_tile);
    for (size_t i = 0; i < 2 * transfer->nsources; i++) {
        const struct stored_array *array = &transfer->sources[spans[i].source].array;
        size_t streams = array->stream ? 1 : 0;
        uint64_t stream_nbytes = array->stream ? array->stream_nbytes : 0;
        if (spans[i].ends) {
            n--;
            nstreams -= streams;
            nbytes -= stream_nbytes;
            continue;
        }
        n++;
        nstreams += streams;
        nbytes += stream_nbytes;
        *nopen = n > *nopen ? n : *nopen;
        if (nbytes > transfer->stream_nbytes) {
            transfer->stream_nbytes = nbytes;
            transfer->nstreams = nstreams;
        }
    }
    mem_free(spans);
    return RSD_OK;
}

/* Whether a source is a stream, or may be kept whole: then what is open at a time takes memory. */
static bool any_takes_memory(const struct transfer *transfer)
{
    bool any = false;
    for (size_t i = 0; i < transfer->nsources && !any; i++)
        any = transfer->sources[i].array.stream || source_runs_across(&transfer->sources[i]);
    return any && transfer->npieces > 0;
}

/* Cuts tiles. The records that are kept at a time have max_nbytes together. */
static rsd_status choose_tiles_and_kept(struct transfer *transfer, uint64_t max_nbytes)
{
    size_t nopen = 1; /* at least one source is open */
    choose_tiles(transfer, max_nbytes);
    if (!any_takes_memory(transfer))
        return RSD_OK;
    TRY(count_open(transfer, &nopen));
    transfer->max_kept /= nopen;
    /* Records that are not kept have longer runs in larger tiles. */
    choose_tiles(transfer, max_nbytes);
    return count_open(transfer, &nopen);
}

/* The last step of opening, when pieces and sources are known. */
static rsd_status cut_tiles(struct transfer *transfer, uint64_t max_nbytes)
{
    count_wanted(transfer);
    if (transfer->in_order) /* the other half is for the streams */
        max_nbytes /= 2;
    for (size_t i = 0; i < transfer->nsinks; i++) {
        const struct sink *sink = &transfer->sinks[i];
        size_t nbytes = rsd_dtype_nbytes(sink->dtype);
        if (sink->dtype != transfer->dtype && nbytes > transfer->cast_nbytes)
            transfer->cast_nbytes = nbytes;
    }
    transfer->max_kept = max_nbytes;
    if (transfer->cast_nbytes > transfer->element_nbytes) /* wider elements need larger buffers */
        max_nbytes /= transfer->cast_nbytes / transfer->element_nbytes;
    TRY(box_tree_build(&transfer->tree, transfer->ndim, (int64_t)transfer->npieces,
                       transfer->piece_lo, transfer->piece_len));
    bound_pieces(transfer);
    return choose_tiles_and_kept(transfer, max_nbytes > 0 ? max_nbytes : 1);
}

/* ---- opening ---- */

rsd_status transfer_start(struct transfer *transfer, const struct catalog *catalog, size_t index,
                          size_t nsinks)
{
    const struct stored_tensor *tensor = &catalog->tensors[index];
    *transfer = (struct transfer){.tensor = index,
                                  .name = tensor->name,
                                  .dtype = tensor->dtype,
                                  .element_nbytes = rsd_dtype_nbytes(tensor->dtype),
                                  .ndim = tensor->ndim};
    transfer->sinks = mem_new(nsinks, sizeof *transfer->sinks);
    return transfer->sinks ? RSD_OK : RSD_ENOMEM;
}

void transfer_add_sink(struct transfer *transfer, const struct sink *sink)
{
    transfer->sinks[transfer->nsinks++] = *sink;
    if (sink->device)
        transfer->device = sink->device;
}

/* Makes the layout of all sinks. */
static rsd_status layout_sinks(const struct transfer *transfer, const int64_t *shape,
                               rsd_layout **layout)
{
    size_t ndim = (size_t)transfer->ndim, n = transfer->nsinks;
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        copy_i64s(lo + i * ndim, transfer->sinks[i].lo, transfer->ndim);
        copy_i64s(len + i * ndim, transfer->sinks[i].len, transfer->ndim);
    }
    if (!status)
        status = catalog_boxes_layout(transfer->dtype, transfer->ndim, shape, n, lo, len, layout);
    mem_free(lo);
    mem_free(len);
    return status;
}

rsd_status transfer_plan(struct transfer *transfer, const struct catalog *catalog)
{
    const struct stored_tensor *tensor = &catalog->tensors[transfer->tensor];
    rsd_layout *src = NULL, *dst = NULL;
    rsd_plan *plan = NULL;
    rsd_status status = catalog_tensor_layout(catalog, tensor, false, &src);
    if (!status)
        status = layout_sinks(transfer, tensor_shape(catalog, tensor), &dst);
    if (!status)
        status = rsd_plan_new(src, dst, NULL, &plan);
    if (!status)
        status = list_pieces(transfer, plan);
    rsd_plan_free(plan);
    rsd_layout_free(src);
    rsd_layout_free(dst);
    return status;
}

rsd_status transfer_open_files(struct transfer *transfer, rsd_checkpoint *checkpoint,
                               uint64_t max_nbytes)
{
    enum { DEVICE_TILE_NBYTES = 2 << 20 }; /* its CRC is computed while it is in the cache */
    TRY(open_sources(transfer, checkpoint));
    if (transfer->device && max_nbytes > DEVICE_TILE_NBYTES)
        max_nbytes = DEVICE_TILE_NBYTES;
    return cut_tiles(transfer, max_nbytes);
}

rsd_status transfer_open_whole(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t index,
                               struct sink sink, uint64_t max_nbytes)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    sink.kind = SINK_BLOCKS;
    sink.ndim = tensor->ndim;
    copy_i64s(sink.len, tensor_shape(catalog, tensor), tensor->ndim);
    TRY(transfer_start(transfer, catalog, index, 1));
    transfer_add_sink(transfer, &sink);
    TRY(transfer_plan(transfer, catalog));
    return transfer_open_files(transfer, checkpoint, max_nbytes);
}

/* One source, all of which goes to the only sink. */
static rsd_status add_only_piece(struct transfer *transfer, uint64_t max_nbytes)
{
    const struct sink *sink = &transfer->sinks[0];
    rsd_piece piece = {.nbytes = box_volume(transfer->ndim, sink->len) *
                                 (int64_t)transfer->element_nbytes};
    const struct stored_array *array = &transfer->sources[0].array;
    bool read =
        !array->memory || array->stream; /* a fill value may be that of any number of elements */
    transfer->nsources = 1;
    if (piece.nbytes > 0 && read) {
        box_set(&piece.box, transfer->ndim, sink->lo, sink->len);
        TRY(add_piece(transfer, &piece));
    }
    return cut_tiles(transfer, max_nbytes);
}

rsd_status transfer_open_box(struct transfer *transfer, rsd_checkpoint *checkpoint, size_t box,
                             uint64_t max_nbytes)
{
    transfer->sources = mem_new(1, sizeof *transfer->sources);
    if (!transfer->sources)
        return RSD_ENOMEM;
    TRY(source_open(&transfer->sources[0], checkpoint, transfer->tensor, box));
    transfer->in_order = transfer->sources[0].array.stream;
    return add_only_piece(transfer, max_nbytes);
}

rsd_status transfer_open_memory(struct transfer *transfer, const char *memory,
                                const int64_t *strides, uint64_t max_nbytes)
{
    const struct sink *sink = &transfer->sinks[0];
    transfer->sources = mem_new(1, sizeof *transfer->sources);
    if (!transfer->sources)
        return RSD_ENOMEM;
    source_in_memory(&transfer->sources[0], transfer->dtype, transfer->ndim, sink->lo, sink->len,
                     memory, strides);
    TRY(memory_find_device(memory, &transfer->device));
    transfer->sources[0].device = transfer->device;
    return add_only_piece(transfer, max_nbytes);
}

/* ---- running ---- */

rsd_status transfer_run_tile(const struct transfer *transfer, int64_t index,
                             struct scratch *scratch, struct io_stats *stats)
{
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    transfer_tile_box(transfer, index, lo, len);
    return transfer_run_box(transfer, lo, len, scratch, stats);
}

rsd_status transfer_check_sources(const struct transfer *transfer, struct io_stats *stats)
{
    for (size_t i = 0; i < transfer->nsources; i++)
        if (!transfer->sources[i].memory && transfer->sources[i].wanted)
            TRY(source_check(&transfer->sources[i], stats));
    return RSD_OK;
}

void transfer_drop(struct transfer *transfer)
{
    for (size_t i = 0; i < transfer->nsources; i++)
        source_close(&transfer->sources[i]);
    mem_free(transfer->sources);
    mem_free(transfer->sinks);
    mem_free(transfer->pieces);
    mem_free(transfer->piece_lo);
    mem_free(transfer->piece_len);
    box_tree_drop(&transfer->tree);
    *transfer = (struct transfer){0};
}
