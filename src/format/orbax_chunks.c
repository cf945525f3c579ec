/* orbax_chunks.c - the chunks of a zarr array as boxes of a tensor.
 *
 * Chunks at the edge are stored whole, and what is outside of the tensor is not part of the box. A chunk
 * that is not stored has the fill value in all elements, unless _METADATA says that all were stored: then it
 * is lost. Such chunks become boxes too, as few as possible, since the grid may be far larger than the
 * checkpoint.
 *
 * A shard is a grid of chunks with an index: the offset and length of each chunk, and a CRC-32C.
 */
#include "orbax.h"

#include "crc.h"

enum { INDEX_ENTRY_NBYTES = 16 };

/* ---- boxes ---- */

static uint64_t chunk_nbytes(const struct zarr_array *zarr)
{
    return (uint64_t)box_volume(zarr->ndim, zarr->inner) * rsd_dtype_nbytes(zarr->dtype);
}

/* How elements lie in a chunk, after it was decoded. */
static struct stored_array describe_chunk(const struct zarr_array *zarr)
{
    struct stored_array array = {.nbytes = chunk_nbytes(zarr),
                                 .big_endian = zarr->big_endian,
                                 .stream = zarr->zstd || zarr->crc_inside || zarr->crc_outside};
    int64_t stride = (int64_t)rsd_dtype_nbytes(zarr->dtype);
    array.has_crc = array.stream; /* so that what is behind the elements is checked */
    for (int32_t i = 0; i < zarr->ndim; i++) {
        int32_t d = zarr->column_major ? i : zarr->ndim - 1 - i;
        array.strides[d] = stride;
        stride *= zarr->inner[d];
    }
    return array;
}

static rsd_status add_described(struct catalog *catalog, const struct stored_array *described,
                                uint32_t *index)
{
    if (catalog->narrays >= UINT32_MAX)
        return fail(RSD_ELIMIT, "checkpoint has more than 2^32 arrays");
    TRY(GROW(catalog->arrays, catalog->arrays_capacity, catalog->narrays + 1));
    *index = (uint32_t)catalog->narrays;
    catalog->arrays[catalog->narrays++] = *described;
    return RSD_OK;
}

/* Describes the fill value as an array whose strides are 0: its only element is everywhere. */
static rsd_status add_fill_array(struct catalog *catalog, struct orbax_array *array)
{
    struct stored_array fill = {.nbytes = rsd_dtype_nbytes(array->zarr.dtype)};
    struct slice bytes = {(const char *)array->zarr.fill, (size_t)fill.nbytes};
    if (!array->zarr.fill_known)
        return fail(RSD_EUNSUPPORTED, "chunks are missing, and the fill value is not supported");
    if (array->fill != UINT32_MAX)
        return RSD_OK;
    TRY(catalog_add_name(catalog, bytes, &fill.memory));
    return add_described(catalog, &fill, &array->fill);
}

/* Cuts a box to the tensor. Returns false if nothing is left of it. */
static bool clip_box(const struct zarr_array *zarr, const int64_t *lo, int64_t *len)
{
    for (int32_t d = 0; d < zarr->ndim; d++) {
        if (lo[d] >= zarr->shape[d])
            return false;
        len[d] = min_i64(len[d], zarr->shape[d] - lo[d]);
    }
    return true;
}

/* Adds the chunks [from, to) of a grid, which have no bytes: in each step as many as are a box. */
static rsd_status add_fill_boxes(struct catalog *catalog, struct orbax_array *array,
                                 const int64_t *origin, const int64_t *count, const int64_t *chunk,
                                 int64_t from, int64_t to)
{
    const struct zarr_array *zarr = &array->zarr;
    while (from < to) {
        int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS], step = 1, nchunks = 1, index = from;
        int32_t k =
            zarr->ndim - 1; /* the box has some indices of dim k, and all of the dims behind it */
        for (; k > 0 && from % (step * count[k]) == 0 && step * count[k] <= to - from; k--)
            step *= count[k];
        for (int32_t d = zarr->ndim - 1; d >= 0; index /= count[d--]) {
            int64_t at = index % count[d];
            if (d == k)
                nchunks = min_i64(count[d] - at, (to - from) / step);
            lo[d] = origin[d] + at * chunk[d];
            len[d] = chunk[d] * (d > k ? count[d] : d == k ? nchunks : 1);
        }
        from += step * nchunks;
        if (!clip_box(zarr, lo, len))
            continue;
        struct extent extent = {.kind = EXTENT_NONE, .file = array->file};
        if (!array->complete) {
            TRY(add_fill_array(catalog, array));
            extent.kind = EXTENT_ARRAY;
            extent.detail = array->fill;
        }
        TRY(catalog_add_box(catalog, lo, len, extent));
    }
    return RSD_OK;
}

/* Adds the chunk at lo, which is n bytes from an offset of a value on. */
static rsd_status add_chunk_box(struct catalog *catalog, struct orbax_array *array,
                                const struct stored_key *key, const int64_t *lo, uint64_t at,
                                uint64_t n)
{
    const struct zarr_array *zarr = &array->zarr;
    int64_t len[RSD_MAX_DIMS];
    struct extent extent = {.kind = EXTENT_ARRAY,
                            .file = key->file,
                            .offset = key->offset + at,
                            .nbytes = n,
                            .nzstd = zarr->zstd,
                            .crc32c = (uint8_t)((zarr->crc_inside ? CRC32C_INSIDE : 0) |
                                                (zarr->crc_outside ? CRC32C_OUTSIDE : 0)),
                            .detail = array->chunks};
    copy_i64s(len, zarr->inner, zarr->ndim);
    if (!clip_box(zarr, lo, len))
        return RSD_OK;
    uint64_t expected = chunk_nbytes(zarr) + (zarr->crc_inside ? 4 : 0);
    if (!zarr->zstd && n != expected)
        return fail(RSD_EFORMAT, "chunk has %llu bytes, expected %llu", (unsigned long long)n,
                    (unsigned long long)expected);
    if (key->memory) {
        struct stored_array inside = catalog->arrays[array->chunks];
        inside.memory = key->memory + at;
        TRY(add_described(catalog, &inside, &extent.detail));
    }
    return catalog_add_box(catalog, lo, len, extent);
}

/* ---- shards ---- */

static uint64_t index_number(const unsigned char *bytes, bool big_endian)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | bytes[big_endian ? i : 7 - i];
    return value;
}

/* Reads the index of a shard: offset and length of each chunk. The caller frees it. */
static rsd_status load_index(struct key_list *keys, size_t index, const struct zarr_array *zarr,
                             int64_t n, unsigned char **out)
{
    const struct stored_key *key = &keys->list[index];
    uint64_t crc_nbytes = zarr->index_has_crc ? 4 : 0, nbytes;
    if (__builtin_mul_overflow((uint64_t)n, (uint64_t)INDEX_ENTRY_NBYTES, &nbytes) ||
        nbytes > key->value_nbytes || key->value_nbytes - nbytes < crc_nbytes)
        return fail(RSD_EFORMAT, "shard of %llu bytes is too short for the index of %lld chunks",
                    (unsigned long long)key->value_nbytes, (long long)n);
    nbytes += crc_nbytes;
    unsigned char *bytes = mem_new((size_t)nbytes, 1);
    if (!bytes)
        return RSD_ENOMEM;
    rsd_status status = key_list_read(
        keys, index, zarr->index_first ? 0 : key->value_nbytes - nbytes, bytes, (size_t)nbytes);
    if (!status && crc_nbytes) {
        const unsigned char *stored = bytes + nbytes - 4;
        uint32_t crc = crc32c_of(bytes, (size_t)nbytes - 4);
        uint32_t expected = (uint32_t)little_endian(stored, 4);
        if (crc != expected)
            status =
                fail(RSD_EFORMAT, "index of the shard is damaged: CRC-32C is %08x, expected %08x",
                     crc, expected);
    }
    if (status)
        mem_free(bytes);
    else
        *out = bytes;
    return status;
}

/* Adds chunk i of a shard that begins at origin. *filled is the first of the chunks before i that have no
 * bytes, which are added when one with bytes follows. */
static rsd_status add_shard_chunk(struct catalog *catalog, struct orbax_array *array,
                                  const struct stored_key *key, const int64_t *origin,
                                  const int64_t *count, int64_t i, const unsigned char *entry,
                                  int64_t *filled)
{
    const struct zarr_array *zarr = &array->zarr;
    uint64_t offset = index_number(entry, zarr->index_big_endian);
    uint64_t nbytes = index_number(entry + 8, zarr->index_big_endian);
    int64_t lo[RSD_MAX_DIMS], rest = i;
    if (offset == UINT64_MAX && nbytes == UINT64_MAX)
        return RSD_OK;
    if (offset > key->value_nbytes || nbytes > key->value_nbytes - offset)
        return fail(RSD_EFORMAT, "chunk %lld exceeds the shard of %llu bytes", (long long)i,
                    (unsigned long long)key->value_nbytes);
    TRY(add_fill_boxes(catalog, array, origin, count, zarr->inner, *filled, i));
    *filled = i + 1;
    for (int32_t d = zarr->ndim - 1; d >= 0; d--) {
        lo[d] = origin[d] + rest % count[d] * zarr->inner[d];
        rest /= count[d];
    }
    return add_chunk_box(catalog, array, key, lo, offset, nbytes);
}

/* Adds the boxes of a shard: one for each chunk in its index, and fill values for the others. */
static rsd_status add_orbax_shard(struct catalog *catalog, struct key_list *keys, size_t key,
                                  struct orbax_array *array, const int64_t *origin)
{
    const struct zarr_array *zarr = &array->zarr;
    int64_t count[RSD_MAX_DIMS], n = 1, filled = 0;
    unsigned char *index;
    for (int32_t d = 0; d < RSD_MAX_DIMS; d++) {
        count[d] = d < zarr->ndim ? zarr->chunk[d] / zarr->inner[d] : 1;
        n *= count[d];
    }
    TRY(load_index(keys, key, zarr, n, &index));
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < n && !status; i++)
        status = add_shard_chunk(catalog, array, &keys->list[key], origin, count, i,
                                 index + i * INDEX_ENTRY_NBYTES, &filled);
    if (!status)
        status = add_fill_boxes(catalog, array, origin, count, zarr->inner, filled, n);
    mem_free(index);
    return status;
}

/* ---- all boxes ---- */

/* Adds the boxes of a chunk, or of all chunks of a shard. */
static rsd_status add_key_boxes(struct catalog *catalog, struct key_list *keys,
                                struct orbax_array *array, const struct chunk_key *chunk,
                                const int64_t *count)
{
    const struct zarr_array *zarr = &array->zarr;
    int64_t lo[RSD_MAX_DIMS], rest = chunk->index;
    for (int32_t d = zarr->ndim - 1; d >= 0; d--) {
        lo[d] = rest % count[d] * zarr->chunk[d];
        rest /= count[d];
    }
    TRY(key_list_find_value(keys, chunk->key));
    if (zarr->sharded)
        return add_orbax_shard(catalog, keys, chunk->key, array, lo);
    const struct stored_key *key = &keys->list[chunk->key];
    return add_chunk_box(catalog, array, key, lo, 0, key->value_nbytes);
}

/* Adds the chunks [from, to) of an array that no key has. */
static rsd_status add_absent_chunks(struct catalog *catalog, const struct key_list *keys,
                                    struct orbax_array *array, const int64_t *count, int64_t from,
                                    int64_t to)
{
    static const int64_t origin[RSD_MAX_DIMS];
    rsd_status status = add_fill_boxes(catalog, array, origin, count, array->zarr.chunk, from, to);
    return status ? fail_in(status, "%s: %.*s: ", keys->store->path, (int)array->name.nbytes,
                            array->name.bytes)
                  : RSD_OK;
}

rsd_status orbax_add_boxes(struct catalog *catalog, struct key_list *keys,
                           struct orbax_array *array, const struct chunk_key *chunks, size_t n)
{
    static const int64_t origin[RSD_MAX_DIMS];
    const struct zarr_array *zarr = &array->zarr;
    struct stored_array described = describe_chunk(zarr);
    int64_t count[RSD_MAX_DIMS], all = 1, next = 0;
    TRY(add_described(catalog, &described, &array->chunks));
    array->fill = UINT32_MAX;
    if (box_is_empty(zarr->ndim, zarr->shape)) {
        struct extent empty = {.kind = EXTENT_ARRAY, .file = array->file, .detail = array->chunks};
        return catalog_add_box(catalog, origin, zarr->shape, empty);
    }
    for (int32_t d = 0; d < RSD_MAX_DIMS; d++)
        all *= count[d] = d < zarr->ndim ? zarr_grid_count(zarr, d) : 1;
    for (size_t i = 0; i < n; i++) {
        TRY(add_absent_chunks(catalog, keys, array, count, next, chunks[i].index));
        next = chunks[i].index + 1;
        rsd_status status = add_key_boxes(catalog, keys, array, &chunks[i], count);
        if (status)
            return key_list_fail_in(keys, chunks[i].key, status);
    }
    return add_absent_chunks(catalog, keys, array, count, next, all);
}

/* ---- where bytes are ---- */

rsd_status orbax_locate(const rsd_checkpoint *checkpoint, size_t index, size_t box,
                        struct stored_array *array)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct extent *extent = &catalog->extents[catalog->tensors[index].first_extent + box];
    if (extent->unknown)
        return fail(RSD_EUNSUPPORTED,
                    "%s is not supported; exclude the tensor (--exclude) to read the others",
                    catalog->transforms[extent->detail].unknown);
    *array = catalog->arrays[extent->detail];
    if (!array->stream && !array->memory)
        array->offset = extent->offset;
    return array->stream
               ? chunk_stream_memory(checkpoint->store, extent, array, &array->stream_nbytes)
               : RSD_OK;
}

rsd_status orbax_open_stream(const rsd_checkpoint *checkpoint, size_t index, size_t box,
                             struct stored_stream **stream)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct extent *extent = &catalog->extents[catalog->tensors[index].first_extent + box];
    return chunk_stream_open(checkpoint->store, extent, &catalog->arrays[extent->detail], stream);
}
