/* tile.c - one tile of a haul: what of it each source has is read, and given to the sinks.
 *
 * A source that is in memory is used where it is. What lies in a file as it will lie in memory is read
 * straight to its place; the rest is read into a buffer, source by source, and copied from there.
 */
#include "transfer.h"

#include <stdlib.h>
#include <string.h>

enum { GAP_NBYTES = 1 << 16 };

struct tile {
    const struct transfer *transfer;
    struct scratch *scratch;
    struct io_stats *stats;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    struct tile_part *parts; /* by source, then by where they begin */
    size_t nparts;
};

static int by_source(const void *a, const void *b)
{
    const struct tile_part *x = a, *y = b;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    if (x->lo[0] != y->lo[0])
        return x->lo[0] < y->lo[0] ? -1 : 1;
    return (x->sink > y->sink) - (x->sink < y->sink);
}

static rsd_status find_parts(struct tile *tile)
{
    const struct transfer *transfer = tile->transfer;
    struct scratch *scratch = tile->scratch;
    struct box_tree_search search = {0};
    size_t n = 0, ndim = (size_t)transfer->ndim;
    for (int64_t i; (i = box_tree_next(&transfer->tree, &search, tile->lo, tile->len)) >= 0; n++) {
        TRY(GROW(scratch->parts, scratch->parts_capacity, n + 1));
        struct tile_part *part = &scratch->parts[n];
        const int64_t *lo = transfer->coordinates + (size_t)i * 2 * ndim;
        *part = (struct tile_part){.source = transfer->pieces[i].source,
                                   .sink = transfer->pieces[i].sink};
        box_overlap(transfer->ndim, tile->lo, tile->len, lo, lo + ndim, part->lo, part->len);
    }
    tile->parts = scratch->parts;
    tile->nparts = n;
    if (n > 1)
        qsort(tile->parts, n, sizeof *tile->parts, by_source);
    return RSD_OK;
}

static int64_t offset_in(int32_t ndim, const int64_t *lo, const int64_t *base,
                         const int64_t *strides)
{
    int64_t offset = 0;
    for (int32_t d = 0; d < ndim; d++)
        offset += (lo[d] - base[d]) * strides[d];
    return offset;
}

static void packed_strides(int32_t ndim, const int64_t *len, size_t element_nbytes,
                           int64_t *strides)
{
    int64_t stride = (int64_t)element_nbytes;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= len[d];
    }
}

static struct loops part_loops(const struct transfer *transfer, const struct tile_part *part,
                               const int64_t *src_strides, const int64_t *dst_strides)
{
    struct loops loops = {0};
    for (int32_t d = 0; d < transfer->ndim; d++)
        loops_add(&loops, part->len[d], src_strides[d], dst_strides[d]);
    loops_finish(&loops, transfer->element_nbytes);
    return loops;
}

static void copy_part(const struct tile *tile, const struct loops *loops, const char *src,
                      char *dst)
{
    copy_loops(&tile->scratch->copier, tile->transfer->stream, loops, src, dst);
}

/* Reads straight into memory what lies there as it lies in the source. */
static rsd_status read_straight(const struct tile *tile, struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    int64_t packed[RSD_MAX_DIMS];
    if (sink->kind != SINK_MEMORY || sink->dtype != transfer->dtype)
        return RSD_OK;
    packed_strides(transfer->ndim, part->len, transfer->element_nbytes, packed);
    struct loops loops = part_loops(transfer, part, packed, sink->strides);
    if (loops.n > 0)
        return RSD_OK;
    part->done = true;
    return source_read(&transfer->sources[part->source], part->lo, part->len,
                       sink->memory + offset_in(transfer->ndim, part->lo, sink->lo, sink->strides),
                       transfer->keep_most, tile->stats);
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

/* Makes n parts of one source readable: in place if it is in memory, else read into the scratch, from
 * *at on. */
static rsd_status stage(const struct tile *tile, struct tile_part *parts, size_t n, size_t *at,
                        struct staged *staged)
{
    const struct transfer *transfer = tile->transfer;
    struct scratch *scratch = tile->scratch;
    struct source *source = &transfer->sources[parts[0].source];
    int64_t len[RSD_MAX_DIMS] = {0};
    if (source->memory) {
        staged->bytes = source->memory;
        copy_i64s(staged->lo, source->lo, transfer->ndim);
        copy_i64s(staged->strides, source->array.strides, transfer->ndim);
        return RSD_OK;
    }
    if (n == 1)
        TRY(read_straight(tile, parts));
    if (parts[0].done)
        return RSD_OK;
    bound_parts(transfer->ndim, parts, n, staged->lo, len);
    packed_strides(transfer->ndim, len, transfer->element_nbytes, staged->strides);
    staged->bytes = scratch->in + *at;
    TRY(source_read(source, staged->lo, len, scratch->in + *at, transfer->keep_most, tile->stats));
    *at += (size_t)box_volume(transfer->ndim, len) * transfer->element_nbytes;
    return RSD_OK;
}

/* How many parts are read at once: those of one source that follow each other, up to a gap that is cheaper
 * to leave out than to read. What comes after it begins after it, so nothing is read twice. */
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

/* Room for all that the tile reads: usually as much as the tile has, more if sources overlap. */
static rsd_status make_room(const struct tile *tile)
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
    TRY(scratch_reserve(&scratch->in, &scratch->in_capacity, need));
    size_t volume = (size_t)box_volume(transfer->ndim, tile->len);
    TRY(scratch_reserve(&scratch->out, &scratch->out_capacity, volume * transfer->element_nbytes));
    return scratch_reserve(&scratch->cast, &scratch->cast_capacity, volume * transfer->cast_each);
}

static rsd_status stage_all(const struct tile *tile)
{
    struct staged *staged = tile->scratch->staged;
    size_t at = 0;
    for (size_t i = 0, n; i < tile->nparts; i += n) {
        n = parts_of_source(tile, i);
        TRY(stage(tile, &tile->parts[i], n, &at, &staged[tile->parts[i].staged]));
    }
    return RSD_OK;
}

/* ---- into sinks ---- */

static const struct staged *staged_of(const struct tile *tile, const struct tile_part *part)
{
    const struct staged *list = tile->scratch->staged;
    return &list[part->staged];
}

/* All parts of one sink that lie in the tile, as a dense block: what is written, or cast. */
static rsd_status gather(const struct tile *tile, size_t sink_index, const int64_t *lo,
                         const int64_t *strides, char *block)
{
    const struct transfer *transfer = tile->transfer;
    for (size_t i = 0; i < tile->nparts; i++) {
        const struct tile_part *part = &tile->parts[i];
        if (part->sink != sink_index)
            continue;
        const struct staged *from = staged_of(tile, part);
        struct loops loops = part_loops(transfer, part, from->strides, strides);
        copy_part(tile, &loops,
                  from->bytes + offset_in(transfer->ndim, part->lo, from->lo, from->strides),
                  block + offset_in(transfer->ndim, part->lo, lo, strides));
    }
    return RSD_OK;
}

/* The bytes of a block that come from one part, as they lie there: NULL if they have to be gathered. */
static const char *in_place(const struct tile *tile, size_t sink_index, const int64_t *strides,
                            int64_t volume)
{
    const struct transfer *transfer = tile->transfer;
    for (size_t i = 0; i < tile->nparts; i++) {
        const struct tile_part *part = &tile->parts[i];
        if (part->sink != sink_index)
            continue;
        if (box_volume(transfer->ndim, part->len) != volume)
            return NULL;
        const struct staged *from = staged_of(tile, part);
        struct loops loops = part_loops(transfer, part, from->strides, strides);
        if (loops.n > 0)
            return NULL;
        return from->bytes + offset_in(transfer->ndim, part->lo, from->lo, from->strides);
    }
    return NULL;
}

static rsd_status cast_block(const struct tile *tile, const struct sink *sink, int64_t volume,
                             const char **block)
{
    const struct transfer *transfer = tile->transfer;
    if (sink->dtype == transfer->dtype)
        return RSD_OK;
    cast_elements(sink->dtype, tile->scratch->cast, transfer->dtype, *block, volume);
    *block = tile->scratch->cast;
    return RSD_OK;
}

static rsd_status fill_blocks(const struct tile *tile, size_t index)
{
    const struct transfer *transfer = tile->transfer;
    struct sink *sink = &transfer->sinks[index];
    int64_t lo[RSD_MAX_DIMS] = {0}, len[RSD_MAX_DIMS] = {0}, strides[RSD_MAX_DIMS];
    box_overlap(transfer->ndim, tile->lo, tile->len, sink->lo, sink->len, lo, len);
    packed_strides(transfer->ndim, len, transfer->element_nbytes, strides);
    int64_t volume = box_volume(transfer->ndim, len);
    const char *block = in_place(tile, index, strides, volume);
    if (!block) {
        TRY(gather(tile, index, lo, strides, tile->scratch->out));
        block = tile->scratch->out;
    }
    TRY(cast_block(tile, sink, volume, &block));
    return sink->take(sink, tile->scratch, lo, len, block);
}

/* Memory of another dtype is filled from a block that was cast. */
static rsd_status fill_cast_memory(const struct tile *tile, const struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    const struct staged *from = staged_of(tile, part);
    int64_t packed[RSD_MAX_DIMS];
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype);
    packed_strides(transfer->ndim, part->len, transfer->element_nbytes, packed);
    struct loops loops = part_loops(transfer, part, from->strides, packed);
    copy_part(tile, &loops,
              from->bytes + offset_in(transfer->ndim, part->lo, from->lo, from->strides),
              tile->scratch->out);
    const char *block = tile->scratch->out;
    TRY(cast_block(tile, sink, box_volume(transfer->ndim, part->len), &block));
    packed_strides(transfer->ndim, part->len, element_nbytes, packed);
    loops = (struct loops){0};
    for (int32_t d = 0; d < transfer->ndim; d++)
        loops_add(&loops, part->len[d], packed[d], sink->strides[d]);
    loops_finish(&loops, element_nbytes);
    copy_part(tile, &loops, block,
              sink->memory + offset_in(transfer->ndim, part->lo, sink->lo, sink->strides));
    return RSD_OK;
}

static rsd_status fill_memory(const struct tile *tile, const struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    const struct staged *from = staged_of(tile, part);
    if (sink->dtype != transfer->dtype)
        return fill_cast_memory(tile, part);
    struct loops loops = part_loops(transfer, part, from->strides, sink->strides);
    copy_part(tile, &loops,
              from->bytes + offset_in(transfer->ndim, part->lo, from->lo, from->strides),
              sink->memory + offset_in(transfer->ndim, part->lo, sink->lo, sink->strides));
    return RSD_OK;
}

static rsd_status fill_sinks(const struct tile *tile)
{
    const struct transfer *transfer = tile->transfer;
    for (size_t i = 0; i < tile->nparts; i++) {
        const struct tile_part *part = &tile->parts[i];
        if (part->done || transfer->sinks[part->sink].kind == SINK_DISCARD)
            continue;
        if (transfer->sinks[part->sink].kind == SINK_MEMORY) {
            TRY(fill_memory(tile, part));
            continue;
        }
        bool first = true; /* blocks are made once, of all parts */
        for (size_t k = 0; k < i && first; k++)
            first = tile->parts[k].sink != part->sink;
        if (first)
            TRY(fill_blocks(tile, part->sink));
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
    TRY(make_room(&tile));
    TRY(stage_all(&tile));
    return fill_sinks(&tile);
}

/* ---- scratch ---- */

rsd_status scratch_reserve(char **bytes, size_t *capacity, size_t need)
{
    if (need <= *capacity)
        return RSD_OK;
    char *larger = mem_new(need, 1);
    if (!larger)
        return RSD_ENOMEM;
    mem_free(*bytes);
    *bytes = larger;
    *capacity = need;
    return RSD_OK;
}

void scratch_drop(struct scratch *scratch)
{
    mem_free(scratch->in);
    mem_free(scratch->out);
    mem_free(scratch->cast);
    mem_free(scratch->parts);
    mem_free(scratch->staged);
    *scratch = (struct scratch){0};
}
