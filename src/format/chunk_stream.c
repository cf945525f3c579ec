/* chunk_stream.c - the bytes of a zarr chunk that is compressed or has a CRC-32C, from its start to its end.
 *
 *     stored   = bytes, or zstd of them, then perhaps a CRC-32C of that
 *     bytes    = the elements, then perhaps a CRC-32C of them
 *
 * A small chunk is decoded when it is opened, because a decoder needs more memory than the chunk.
 */
#include "orbax.h"

#include "crc.h"
#include "zstd_stream.h"

enum { SMALL_NBYTES = 1 << 18, CRC_NBYTES = 4 };

struct chunk_stream {
    struct stored_stream base;
    struct store *store;
    const char *memory; /* the stored bytes, if they are in memory */
    uint32_t file;
    uint64_t offset, nbytes;   /* of the stored bytes, without their CRC-32C */
    uint64_t at;               /* of the stored bytes that were read */
    uint64_t outside, inside;  /* the CRC-32Cs so far */
    uint8_t crc32c;            /* enum extent_crc32c */
    struct zstd_reader *zstd;  /* NULL: the bytes are not compressed */
    char *decoded;             /* all elements of a small chunk; else NULL */
    uint64_t next, all_nbytes; /* of the elements */
};

static struct chunk_stream *chunk_of(struct stored_stream *stream)
{
    return (struct chunk_stream *)(void *)stream;
}

/* Reads stored bytes, each once and in order. */
static rsd_status read_stored(void *context, uint64_t at, void *out, size_t n)
{
    struct chunk_stream *chunk = context;
    if (at > chunk->nbytes || n > chunk->nbytes - at)
        return fail(RSD_EFORMAT, "chunk ends early");
    if (chunk->memory)
        memcpy(out, chunk->memory + at, n);
    else
        TRY(store_read(chunk->store, chunk->file, chunk->offset + at, out, n));
    if (chunk->crc32c & CRC32C_OUTSIDE)
        chunk->outside = crc_update(CRC_CASTAGNOLI, chunk->outside, out, n);
    chunk->at = at + n;
    return RSD_OK;
}

static rsd_status decode_bytes(struct chunk_stream *chunk, void *out, size_t n)
{
    return chunk->zstd ? zstd_reader_read(chunk->zstd, out, n)
                       : read_stored(chunk, chunk->at, out, n);
}

/* The read of the stream: the next n bytes of the elements. */
static rsd_status read_chunk(struct stored_stream *stream, void *out, size_t n)
{
    struct chunk_stream *chunk = chunk_of(stream);
    if (n > chunk->all_nbytes - chunk->next)
        return fail(RSD_EFORMAT, "chunk ends early");
    if (chunk->decoded)
        memcpy(out, chunk->decoded + chunk->next, n);
    else
        TRY(decode_bytes(chunk, out, n));
    if (!chunk->decoded && chunk->crc32c & CRC32C_INSIDE)
        chunk->inside = crc_update(CRC_CASTAGNOLI, chunk->inside, out, n);
    chunk->next += n;
    return RSD_OK;
}

static rsd_status check_crc32c(uint64_t state, const unsigned char *stored)
{
    uint32_t crc = (uint32_t)state ^ 0xffffffffu;
    uint32_t expected = (uint32_t)little_endian(stored, CRC_NBYTES);
    return crc == expected ? RSD_OK
                           : fail(RSD_EFORMAT, "chunk is damaged: CRC-32C is %08x, expected %08x",
                                  crc, expected);
}

/* Checks what is behind the last element. */
static rsd_status end_chunk(struct stored_stream *stream, bool *has_crc, uint32_t *crc)
{
    struct chunk_stream *chunk = chunk_of(stream);
    unsigned char stored[CRC_NBYTES];
    size_t more = 1;
    *has_crc = false;
    *crc = 0;
    if (chunk->decoded)
        return RSD_OK;
    if (chunk->crc32c & CRC32C_INSIDE) {
        TRY(decode_bytes(chunk, stored, sizeof stored));
        TRY(check_crc32c(chunk->inside, stored));
    }
    if (chunk->zstd)
        TRY(zstd_reader_read_some(chunk->zstd, stored, &more));
    if (chunk->zstd ? more > 0 : chunk->at != chunk->nbytes)
        return fail(RSD_EFORMAT, "chunk has more than %llu bytes",
                    (unsigned long long)chunk->all_nbytes);
    if (!(chunk->crc32c & CRC32C_OUTSIDE))
        return RSD_OK;
    uint64_t state = chunk->outside;
    chunk->nbytes += CRC_NBYTES;
    TRY(read_stored(chunk, chunk->nbytes - CRC_NBYTES, stored, sizeof stored));
    return check_crc32c(state, stored);
}

static void close_chunk(struct stored_stream *stream)
{
    struct chunk_stream *chunk = chunk_of(stream);
    zstd_reader_close(chunk->zstd);
    mem_free(chunk->decoded);
    mem_free(chunk);
}

/* Decodes all of a chunk at once, and checks its CRCs. */
static rsd_status decode_small(struct chunk_stream *chunk)
{
    bool has_crc;
    uint32_t crc;
    char *decoded = mem_new((size_t)chunk->all_nbytes, 1);
    if (!decoded)
        return RSD_ENOMEM;
    rsd_status status = read_chunk(&chunk->base, decoded, (size_t)chunk->all_nbytes);
    if (!status)
        status = end_chunk(&chunk->base, &has_crc, &crc);
    zstd_reader_close(chunk->zstd);
    chunk->zstd = NULL;
    chunk->decoded = decoded;
    chunk->next = 0;
    return status;
}

rsd_status chunk_stream_memory(struct store *store, const struct extent *extent,
                               const struct stored_array *array, uint64_t *nbytes)
{
    unsigned char start[ZSTD_START_NBYTES];
    size_t n = extent->nbytes < sizeof start ? (size_t)extent->nbytes : sizeof start;
    *nbytes = sizeof(struct chunk_stream) + array->nbytes;
    if (array->nbytes <= SMALL_NBYTES)
        return RSD_OK;
    *nbytes = sizeof(struct chunk_stream);
    if (!extent->nzstd)
        return RSD_OK;
    if (array->memory)
        memcpy(start, array->memory, n);
    else
        TRY(store_read(store, extent->file, extent->offset, start, n));
    *nbytes += zstd_memory_from_start(start, n, array->nbytes);
    return RSD_OK;
}

rsd_status chunk_stream_open(struct store *store, const struct extent *extent,
                             const struct stored_array *array, struct stored_stream **out)
{
    struct chunk_stream *chunk = mem_new(1, sizeof *chunk);
    if (!chunk)
        return RSD_ENOMEM;
    *chunk = (struct chunk_stream){
        .base = {.read = read_chunk, .end = end_chunk, .close = close_chunk, .checks_itself = true},
        .store = store,
        .memory = array->memory,
        .file = extent->file,
        .offset = extent->offset,
        .nbytes = extent->nbytes,
        .outside = 0xffffffffu,
        .inside = 0xffffffffu,
        .crc32c = extent->crc32c,
        .all_nbytes = array->nbytes};
    rsd_status status = RSD_OK;
    if (extent->crc32c & CRC32C_OUTSIDE) {
        if (extent->nbytes < CRC_NBYTES)
            status = fail(RSD_EFORMAT, "chunk ends early");
        else
            chunk->nbytes -= CRC_NBYTES;
    }
    if (!status && extent->nzstd)
        status = zstd_reader_open(read_stored, chunk, chunk->nbytes, 1, &chunk->zstd);
    if (!status && array->nbytes <= SMALL_NBYTES)
        status = decode_small(chunk);
    if (status)
        close_chunk(&chunk->base);
    else
        *out = &chunk->base;
    return status;
}
