/* tile.c - one tile of a transfer: reads its part of each source, and passes it to the sinks.
 *
 * A source in memory is used in place. Bytes that have the same order in a file and in an array are read directly
 * into the array. The others are read into a buffer, source by source, and copied from there. Arrays on a
 * device are copied by tile_device.c.
 */
#include "transfer.h"

#include <stdlib.h>
#include <string.h>

enum { GAP_NBYTES = 1 << 16, LARGE_NBYTES = 2 << 20, ALIGN_NBYTES = 64 };

struct tile {
    const struct transfer *transfer;
    struct scratch *scratch;
    struct io_stats *stats;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    struct tile_part *parts; /* sorted by source, then by lo; while sinks are filled, by sink */
    char *in, *out;          /* buffers: for what is read, and for a block */
    size_t nparts;
};

/* ---- buffers ---- */

/* Makes a buffer at least `need` bytes long. Its contents are lost. */
static rsd_status reserve_bytes(char **bytes, size_t *capacity, size_t need)
{
    if (need <= *capacity)
        return RSD_OK;
    size_t rounded = (need + LARGE_NBYTES - 1) / LARGE_NBYTES * LARGE_NBYTES;
    if (rounded - need <= need / 8) /* so that it lies on large pages */
        need = rounded;
    char *larger = mem_new_buffer(need);
    if (!larger)
        return RSD_ENOMEM;
    mem_free_buffer(*bytes, *capacity);
    *bytes = larger;
    *capacity = need;
    return RSD_OK;
}

void scratch_drop(struct scratch *scratch)
{
    mem_free_buffer(scratch->in, scratch->in_capacity);
    mem_free_buffer(scratch->cast, scratch->cast_capacity);
    mem_free(scratch->parts);
    mem_free(scratch->staged);
    tile_device_drop(scratch);
    *scratch = (struct scratch){0};
}

/* ---- parts ---- */

static int by_source_and_lo(const void *a, const void *b)
{
    const struct tile_part *x = a, *y = b;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    if (x->lo[0] != y->lo[0])
        return x->lo[0] < y->lo[0] ? -1 : 1;
    return (x->sink > y->sink) - (x->sink < y->sink);
}

static int by_sink(const void *a, const void *b)
{
    const struct tile_part *x = a, *y = b;
    return x->sink != y->sink ? (x->sink < y->sink ? -1 : 1) : by_source_and_lo(a, b);
}

/* Lists the pieces of the transfer in this tile, by source and position. */
static rsd_status find_parts(struct tile *tile)
{
    const struct transfer *transfer = tile->transfer;
    struct scratch *scratch = tile->scratch;
    struct box_tree_search search = {0};
    size_t n = 0, ndim = (size_t)transfer->ndim;
    for (int64_t i; (i = box_tree_next(&transfer->tree, &search, tile->lo, tile->len)) >= 0;) {
        if (transfer->pieces[i].done)
            continue;
        TRY(GROW(scratch->parts, scratch->parts_capacity, n + 1));
        struct tile_part *part = &scratch->parts[n];
        const int64_t *lo = transfer->piece_lo + (size_t)i * ndim;
        *part = (struct tile_part){.source = transfer->pieces[i].source,
                                   .sink = transfer->pieces[i].sink};
        box_overlap(transfer->ndim, tile->lo, tile->len, lo, transfer->piece_len + (size_t)i * ndim,
                    part->lo, part->len);
        n++;
    }
    tile->parts = scratch->parts;
    tile->nparts = n;
    if (n > 1)
        qsort(tile->parts, n, sizeof *tile->parts, by_source_and_lo);
    return RSD_OK;
}

/* ---- arrays of the caller ---- */

/* Returns the address of a part in the array of its sink. */
static char *sink_address(const struct transfer *transfer, const struct tile_part *part)
{
    const struct sink *sink = &transfer->sinks[part->sink];
    return sink->memory + box_offset(transfer->ndim, part->lo, sink->lo, sink->strides);
}

/* Reads a part directly into the array of its sink, if its bytes have the same order there. */
static rsd_status read_into_array(const struct tile *tile, struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    int64_t packed[RSD_MAX_DIMS];
    if (sink->kind != SINK_MEMORY || sink->device || sink->dtype != transfer->dtype)
        return RSD_OK;
    box_packed_strides(transfer->ndim, part->len, transfer->element_nbytes, packed);
    if (box_loops(transfer->ndim, part->len, element_of_bytes(transfer->element_nbytes), packed,
                  sink->strides)
            .n > 0)
        return RSD_OK;
    part->done = true;
    return source_read(&transfer->sources[part->source], part->lo, part->len,
                       sink_address(transfer, part), transfer->max_kept, tile->stats);
}

/* The box around n parts of one source. */
static void bound_parts(int32_t ndim, const struct tile_part *parts, size_t n, int64_t *lo,
                        int64_t *len)
{
    for (int32_t d = 0; d < ndim; d++) {
        int64_t begin = INT64_MAX, end = 0;
        for (size_t i = 0; i < n; i++) {
            begin = min_i64(begin, parts[i].lo[d]);
            end = max_i64(end, parts[i].lo[d] + parts[i].len[d]);
        }
        lo[d] = begin;
        len[d] = end - begin;
    }
}

/* Makes n parts of one source readable: an array in place, a file in the scratch from *at on. */
static rsd_status stage_parts(const struct tile *tile, struct tile_part *parts, size_t n,
                              size_t *at, struct staged_box *staged)
{
    const struct transfer *transfer = tile->transfer;
    struct source *source = &transfer->sources[parts[0].source];
    int64_t len[RSD_MAX_DIMS] = {0};
    if (source->memory) {
        staged->bytes = source->memory;
        copy_i64s(staged->lo, source->lo, transfer->ndim);
        copy_i64s(staged->strides, source->array.strides, transfer->ndim);
        return RSD_OK;
    }
    if (n == 1)
        TRY(read_into_array(tile, parts));
    if (parts[0].done)
        return RSD_OK;
    bound_parts(transfer->ndim, parts, n, staged->lo, len);
    box_packed_strides(transfer->ndim, len, transfer->element_nbytes, staged->strides);
    staged->bytes = tile->in + *at;
    TRY(source_read(source, staged->lo, len, tile->in + *at, transfer->max_kept, tile->stats));
    *at += (size_t)box_volume(transfer->ndim, len) * transfer->element_nbytes;
    return RSD_OK;
}

/* Returns how many parts are read at once: those of one source that follow each other, up to a gap that is
 * cheaper to skip than to read. The parts behind the gap begin behind it, so nothing is read twice. */
static size_t parts_of_source(const struct tile *tile, size_t first)
{
    const struct transfer *transfer = tile->transfer;
    const struct tile_part *parts = tile->parts + first;
    const struct source *source = &transfer->sources[parts[0].source];
    int64_t end = parts[0].lo[0] + parts[0].len[0], row = (int64_t)transfer->element_nbytes;
    size_t n = 1;
    for (int32_t d = 1; d < transfer->ndim; d++)
        row *= min_i64(tile->len[d], source->len[d]);
    for (; first + n < tile->nparts && parts[n].source == parts[0].source; n++) {
        if ((parts[n].lo[0] - end) * row > GAP_NBYTES)
            break;
        end = max_i64(end, parts[n].lo[0] + parts[n].len[0]);
    }
    return n;
}

/* Reserves buffers for what the tile reads: usually its size, more if sources overlap. */
static rsd_status reserve_buffers(struct tile *tile)
{
    const struct transfer *transfer = tile->transfer;
    struct scratch *scratch = tile->scratch;
    size_t need = 0, ngroups = 0;
    for (size_t i = 0, n; i < tile->nparts; i += n, ngroups++) {
        int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
        n = parts_of_source(tile, i);
        for (size_t k = 0; k < n; k++)
            tile->parts[i + k].staged = ngroups;
        if (transfer->sources[tile->parts[i].source].memory)
            continue;
        bound_parts(transfer->ndim, &tile->parts[i], n, lo, len);
        need += (size_t)box_volume(transfer->ndim, len) * transfer->element_nbytes;
    }
    TRY(GROW(scratch->staged, scratch->staged_capacity, ngroups));
    size_t volume = (size_t)box_volume(transfer->ndim, tile->len);
    TRY(reserve_bytes(&scratch->cast, &scratch->cast_capacity, volume * transfer->cast_nbytes));
    if (transfer->device)
        return tile_device_reserve(scratch, transfer->device, need,
                                   volume * (transfer->cast_nbytes > transfer->element_nbytes
                                                 ? transfer->cast_nbytes
                                                 : transfer->element_nbytes),
                                   &tile->in, &tile->out);
    need = (need + ALIGN_NBYTES - 1) / ALIGN_NBYTES * ALIGN_NBYTES;
    TRY(reserve_bytes(&scratch->in, &scratch->in_capacity,
                      need + volume * transfer->element_nbytes));
    tile->in = scratch->in;
    tile->out = scratch->in + need;
    return RSD_OK;
}

static rsd_status stage_all(const struct tile *tile)
{
    struct staged_box *staged = tile->scratch->staged;
    size_t at = 0;
    for (size_t i = 0, n; i < tile->nparts; i += n) {
        n = parts_of_source(tile, i);
        TRY(stage_parts(tile, &tile->parts[i], n, &at, &staged[tile->parts[i].staged]));
    }
    return RSD_OK;
}

/* ---- into sinks ---- */

static const struct staged_box *staged_of(const struct tile *tile, const struct tile_part *part)
{
    const struct staged_box *list = tile->scratch->staged;
    return &list[part->staged];
}

static const char *staged_address(const struct tile *tile, const struct tile_part *part)
{
    const struct staged_box *from = staged_of(tile, part);
    return from->bytes + box_offset(tile->transfer->ndim, part->lo, from->lo, from->strides);
}

/* Copies a part of a source on a device into a block, and waits. */
static rsd_status gather_from_device(const struct tile *tile, const struct tile_part *part,
                                     const int64_t *strides, char *block)
{
    const struct transfer *transfer = tile->transfer;
    TRY(tile_device_copy(tile->scratch, transfer->sources[part->source].device, transfer->ndim,
                         part->len, transfer->dtype, staged_address(tile, part),
                         staged_of(tile, part)->strides, transfer->dtype, block, strides));
    return tile_device_wait(tile->scratch);
}

/* Copies the n parts of one sink into a dense block that begins at lo. */
static rsd_status gather_parts(const struct tile *tile, const struct tile_part *parts, size_t n,
                               const int64_t *lo, const int64_t *strides, char *block)
{
    const struct transfer *transfer = tile->transfer;
    for (size_t i = 0; i < n; i++)
        if (transfer->sources[parts[i].source].device)
            TRY(gather_from_device(tile, &parts[i], strides,
                                   block + box_offset(transfer->ndim, parts[i].lo, lo, strides)));
        else
            box_copy(&tile->scratch->copier, false, transfer->ndim, parts[i].len,
                     transfer->element_nbytes, staged_address(tile, &parts[i]),
                     staged_of(tile, &parts[i])->strides,
                     block + box_offset(transfer->ndim, parts[i].lo, lo, strides), strides);
    return RSD_OK;
}

/* Returns the address of a block that is one part and contiguous there, or NULL. */
static const char *in_place(const struct tile *tile, const struct tile_part *part,
                            const int64_t *strides, int64_t volume)
{
    const struct transfer *transfer = tile->transfer;
    if (box_volume(transfer->ndim, part->len) != volume || transfer->sources[part->source].device)
        return NULL;
    const int64_t *from = staged_of(tile, part)->strides;
    if (box_loops(transfer->ndim, part->len, element_of_bytes(transfer->element_nbytes), from,
                  strides)
            .n > 0)
        return NULL;
    return staged_address(tile, part);
}

/* Converts a block to the dtype of its sink. Returns where it is then. */
static const char *cast_block(const struct tile *tile, const struct sink *sink, int64_t volume,
                              const char *block)
{
    const struct transfer *transfer = tile->transfer;
    if (sink->dtype == transfer->dtype)
        return block;
    cast_elements(sink->dtype, tile->scratch->cast, transfer->dtype, block, volume);
    return tile->scratch->cast;
}

/* Passes the block that the n parts of one sink are to the sink. */
static rsd_status fill_block(const struct tile *tile, const struct tile_part *parts, size_t n)
{
    const struct transfer *transfer = tile->transfer;
    struct sink *sink = &transfer->sinks[parts[0].sink];
    int64_t lo[RSD_MAX_DIMS] = {0}, len[RSD_MAX_DIMS] = {0}, strides[RSD_MAX_DIMS];
    box_overlap(transfer->ndim, tile->lo, tile->len, sink->lo, sink->len, lo, len);
    box_packed_strides(transfer->ndim, len, transfer->element_nbytes, strides);
    int64_t volume = box_volume(transfer->ndim, len);
    const char *block = in_place(tile, parts, strides, volume);
    if (!block) {
        TRY(gather_parts(tile, parts, n, lo, strides, tile->out));
        block = tile->out;
    }
    return sink->take(sink, tile->scratch, lo, len, cast_block(tile, sink, volume, block));
}

/* Writes a part to the array of its sink. To convert it, packs it first. */
static rsd_status fill_array(const struct tile *tile, const struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype);
    const char *from = staged_address(tile, part);
    const int64_t *strides = staged_of(tile, part)->strides;
    int64_t packed[RSD_MAX_DIMS];
    if (sink->dtype != transfer->dtype) {
        box_packed_strides(transfer->ndim, part->len, transfer->element_nbytes, packed);
        TRY(gather_parts(tile, part, 1, part->lo, packed, tile->out));
        from = cast_block(tile, sink, box_volume(transfer->ndim, part->len), tile->out);
        box_packed_strides(transfer->ndim, part->len, element_nbytes, packed);
        strides = packed;
    }
    box_copy(&tile->scratch->copier, transfer->stream, transfer->ndim, part->len, element_nbytes,
             from, strides, sink_address(transfer, part), sink->strides);
    return RSD_OK;
}

/* Queues the copy of a part to an array on a device. */
static rsd_status fill_device(const struct tile *tile, const struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    return tile_device_copy(tile->scratch, sink->device, transfer->ndim, part->len, transfer->dtype,
                            staged_address(tile, part), staged_of(tile, part)->strides, sink->dtype,
                            sink_address(transfer, part), sink->strides);
}

/* Passes the parts of the tile to their sinks: copied to memory, or as blocks. */
static rsd_status fill_sinks(const struct tile *tile)
{
    if (tile->nparts > 1)
        qsort(tile->parts, tile->nparts, sizeof *tile->parts, by_sink);
    for (size_t first = 0, end = 0; first < tile->nparts; first = end) {
        const struct tile_part *parts = &tile->parts[first];
        enum sink_kind kind = tile->transfer->sinks[parts[0].sink].kind;
        bool on_device = tile->transfer->sinks[parts[0].sink].device;
        while (end < tile->nparts && tile->parts[end].sink == parts[0].sink)
            end++;
        if (kind == SINK_BLOCKS)
            TRY(fill_block(tile, parts, end - first));
        for (size_t i = first; i < end && kind == SINK_MEMORY; i++)
            if (!tile->parts[i].done)
                TRY(on_device ? fill_device(tile, &tile->parts[i])
                              : fill_array(tile, &tile->parts[i]));
    }
    return RSD_OK;
}

rsd_status transfer_run_box(const struct transfer *transfer, const int64_t *lo, const int64_t *len,
                            struct scratch *scratch, struct io_stats *stats)
{
    struct tile tile = {.transfer = transfer, .scratch = scratch, .stats = stats};
    copy_i64s(tile.lo, lo, transfer->ndim);
    copy_i64s(tile.len, len, transfer->ndim);
    TRY(find_parts(&tile));
    TRY(reserve_buffers(&tile));
    TRY(stage_all(&tile));
    return fill_sinks(&tile);
}
