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
    struct tile_part *parts; /* sorted by source, then by lo; while sinks are filled, by sink */
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

static int by_sink(const void *a, const void *b)
{
    const struct tile_part *x = a, *y = b;
    return x->sink != y->sink ? (x->sink < y->sink ? -1 : 1) : by_source(a, b);
}

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
        const int64_t *lo = transfer->coordinates + (size_t)i * 2 * ndim;
        *part = (struct tile_part){.source = transfer->pieces[i].source,
                                   .sink = transfer->pieces[i].sink};
        box_overlap(transfer->ndim, tile->lo, tile->len, lo, lo + ndim, part->lo, part->len);
        n++;
    }
    tile->parts = scratch->parts;
    tile->nparts = n;
    if (n > 1)
        qsort(tile->parts, n, sizeof *tile->parts, by_source);
    return RSD_OK;
}

static void copy_part(const struct tile *tile, const struct tile_part *part, size_t element_nbytes,
                      const char *src, const int64_t *src_strides, char *dst,
                      const int64_t *dst_strides)
{
    box_copy(&tile->scratch->copier, tile->transfer->stream, tile->transfer->ndim, part->len,
             element_nbytes, src, src_strides, dst, dst_strides);
}

/* The address of a part in the memory of its sink. */
static char *sink_address(const struct transfer *transfer, const struct tile_part *part)
{
    const struct sink *sink = &transfer->sinks[part->sink];
    return sink->memory + box_offset(transfer->ndim, part->lo, sink->lo, sink->strides);
}

/* Reads straight into memory what lies there as it lies in the source. */
static rsd_status read_straight(const struct tile *tile, struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    int64_t packed[RSD_MAX_DIMS];
    if (sink->kind != SINK_MEMORY || sink->dtype != transfer->dtype)
        return RSD_OK;
    box_packed_strides(transfer->ndim, part->len, transfer->element_nbytes, packed);
    if (box_loops(transfer->ndim, part->len, transfer->element_nbytes, packed, sink->strides).n > 0)
        return RSD_OK;
    part->done = true;
    return source_read(&transfer->sources[part->source], part->lo, part->len,
                       sink_address(transfer, part), transfer->keep_most, tile->stats);
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
    box_packed_strides(transfer->ndim, len, transfer->element_nbytes, staged->strides);
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

static const char *staged_address(const struct tile *tile, const struct tile_part *part)
{
    const struct staged *from = staged_of(tile, part);
    return from->bytes + box_offset(tile->transfer->ndim, part->lo, from->lo, from->strides);
}

/* Copies the n parts of one sink into a dense block that begins at lo. */
static void gather(const struct tile *tile, const struct tile_part *parts, size_t n,
                   const int64_t *lo, const int64_t *strides, char *block)
{
    const struct transfer *transfer = tile->transfer;
    for (size_t i = 0; i < n; i++)
        copy_part(tile, &parts[i], transfer->element_nbytes, staged_address(tile, &parts[i]),
                  staged_of(tile, &parts[i])->strides,
                  block + box_offset(transfer->ndim, parts[i].lo, lo, strides), strides);
}

/* Returns the address of a block that is one part and contiguous there, or NULL. */
static const char *in_place(const struct tile *tile, const struct tile_part *part,
                            const int64_t *strides, int64_t volume)
{
    const struct transfer *transfer = tile->transfer;
    if (box_volume(transfer->ndim, part->len) != volume)
        return NULL;
    const int64_t *from = staged_of(tile, part)->strides;
    if (box_loops(transfer->ndim, part->len, transfer->element_nbytes, from, strides).n > 0)
        return NULL;
    return staged_address(tile, part);
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
        gather(tile, parts, n, lo, strides, tile->scratch->out);
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
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype);
    int64_t packed[RSD_MAX_DIMS];
    box_packed_strides(transfer->ndim, part->len, transfer->element_nbytes, packed);
    copy_part(tile, part, transfer->element_nbytes, staged_address(tile, part),
              staged_of(tile, part)->strides, tile->scratch->out, packed);
    const char *block = tile->scratch->out;
    TRY(cast_block(tile, sink, box_volume(transfer->ndim, part->len), &block));
    box_packed_strides(transfer->ndim, part->len, element_nbytes, packed);
    copy_part(tile, part, element_nbytes, block, packed, sink_address(transfer, part),
              sink->strides);
    return RSD_OK;
}

static rsd_status fill_memory(const struct tile *tile, const struct tile_part *part)
{
    const struct transfer *transfer = tile->transfer;
    const struct sink *sink = &transfer->sinks[part->sink];
    if (sink->dtype != transfer->dtype)
        return fill_cast_memory(tile, part);
    copy_part(tile, part, transfer->element_nbytes, staged_address(tile, part),
              staged_of(tile, part)->strides, sink_address(transfer, part), sink->strides);
    return RSD_OK;
}

static rsd_status fill_sinks(const struct tile *tile)
{
    if (tile->nparts > 1)
        qsort(tile->parts, tile->nparts, sizeof *tile->parts, by_sink);
    for (size_t first = 0, end = 0; first < tile->nparts; first = end) {
        const struct tile_part *parts = &tile->parts[first];
        enum sink_kind kind = tile->transfer->sinks[parts[0].sink].kind;
        while (end < tile->nparts && tile->parts[end].sink == parts[0].sink)
            end++;
        if (kind == SINK_BLOCKS)
            TRY(fill_block(tile, parts, end - first));
        for (size_t i = first; i < end && kind == SINK_MEMORY; i++)
            if (!tile->parts[i].done)
                TRY(fill_memory(tile, &tile->parts[i]));
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
