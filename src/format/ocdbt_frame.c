/* ocdbt_frame.c - the frame that the manifest and the nodes of an OCDBT database have, and what is in it.
 *
 *     magic | length | version | compression |  body, possibly compressed  | CRC-32C of all before it
 *
 * A body lists its entries column by column. It begins with a table of files, in which each path shares its
 * first bytes with the one before it.
 */
#include "ocdbt.h"

#include "crc.h"
#include "zstd_stream.h"

enum { MIN_FRAME_NBYTES = 18, BODY_START_NBYTES = 1 << 16 };

/* ---- bodies ---- */

rsd_status body_fail(const struct frame_body *body, const char *what)
{
    return fail(RSD_EFORMAT, "byte %zu of the body: %s", body->at, what);
}

rsd_status body_take_slice(struct frame_body *body, uint64_t n, struct slice *out)
{
    if (n > body->bytes.n - body->at)
        return body_fail(body, "body ends early");
    *out = (struct slice){(const char *)body->bytes.data + body->at, (size_t)n};
    body->at += (size_t)n;
    return RSD_OK;
}

rsd_status body_take_byte(struct frame_body *body, unsigned *out)
{
    struct slice one;
    TRY(body_take_slice(body, 1, &one));
    *out = (unsigned char)one.bytes[0];
    return RSD_OK;
}

rsd_status body_take_varint(struct frame_body *body, uint64_t *out)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        unsigned byte;
        TRY(body_take_byte(body, &byte));
        if (shift == 63 && byte > 1)
            break;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *out = value;
            return RSD_OK;
        }
    }
    return body_fail(body, "number does not fit into 64 bits");
}

rsd_status body_take_count(struct frame_body *body, size_t *out)
{
    uint64_t n;
    TRY(body_take_varint(body, &n));
    if (n > body->bytes.n - body->at)
        return body_fail(body, "body has fewer bytes than entries");
    *out = (size_t)n;
    return RSD_OK;
}

rsd_status body_take_column(struct frame_body *body, size_t n, uint64_t *out)
{
    for (size_t i = 0; i < n; i++)
        TRY(body_take_varint(body, &out[i]));
    return RSD_OK;
}

rsd_status body_skip_column(struct frame_body *body, size_t n)
{
    uint64_t ignored;
    for (size_t i = 0; i < n; i++)
        TRY(body_take_varint(body, &ignored));
    return RSD_OK;
}

/* ---- frames ---- */

static rsd_status read_memory(void *context, uint64_t at, void *out, size_t n)
{
    const unsigned char *bytes = context;
    memcpy(out, bytes + at, n);
    return RSD_OK;
}

/* Decompresses a body. ELIMIT: it grows more than any real one does. */
static rsd_status inflate_body(unsigned char *bytes, size_t n, struct bytes *out)
{
    struct zstd_reader *zstd;
    uint64_t most = n < MAX_BODY_NBYTES / MAX_BODY_GROWTH
                        ? BODY_START_NBYTES + (uint64_t)n * MAX_BODY_GROWTH
                        : (uint64_t)MAX_BODY_NBYTES;
    char block[1 << 14];
    TRY(zstd_reader_open(read_memory, bytes, n, 1, &zstd));
    rsd_status status = RSD_OK;
    for (size_t some = sizeof block; some == sizeof block && !status;) {
        status = zstd_reader_read_some(zstd, block, &some);
        if (!status)
            bytes_put(out, block, some);
        if (!status && out->n > most)
            status = fail(RSD_ELIMIT, "body of more than %llu bytes in %zu compressed bytes",
                          (unsigned long long)most, n);
        if (!status && out->failed)
            status = RSD_ENOMEM;
    }
    zstd_reader_close(zstd);
    return status;
}

rsd_status frame_open(unsigned char *frame, size_t n, uint32_t magic, struct frame_body *body)
{
    if (n < MIN_FRAME_NBYTES)
        return fail(RSD_EFORMAT, "%zu bytes are too few", n);
    uint32_t found = (uint32_t)frame[0] << 24 | (uint32_t)frame[1] << 16 | (uint32_t)frame[2] << 8 |
                     (uint32_t)frame[3];
    uint32_t expected = (uint32_t)little_endian(frame + n - 4, 4), crc = crc32c_of(frame, n - 4);
    if (found != magic)
        return fail(RSD_EFORMAT, "magic number is %08x, expected %08x", found, magic);
    if (little_endian(frame + 4, 8) != n)
        return fail(RSD_EFORMAT, "length is %llu, expected %zu",
                    (unsigned long long)little_endian(frame + 4, 8), n);
    if (crc != expected)
        return fail(RSD_EFORMAT, "bytes are damaged: CRC-32C is %08x, expected %08x", crc,
                    expected);
    if (frame[12] != 0)
        return fail(RSD_EUNSUPPORTED, "version %u of the format is not supported", frame[12]);
    if (frame[13] > 1)
        return fail(RSD_EUNSUPPORTED, "compression %u is not supported", frame[13]);
    if (frame[13] == 1)
        return inflate_body(frame + 14, n - MIN_FRAME_NBYTES, &body->bytes);
    bytes_put(&body->bytes, frame + 14, n - MIN_FRAME_NBYTES);
    return body->bytes.failed ? RSD_ENOMEM : RSD_OK;
}

/* ---- the table of files ---- */

void file_table_drop(struct file_table *table)
{
    if (table->paths)
        budget_return_memory(table->n * sizeof *table->paths);
    mem_free(table->paths);
    bytes_drop(&table->texts);
}

/* Each path shares its first bytes with the path before it. */
static rsd_status join_paths(struct frame_body *body, const uint64_t *shared,
                             const uint64_t *suffix, const uint64_t *base, struct file_table *table)
{
    for (size_t i = 0; i < table->n; i++) {
        struct table_path *path = &table->paths[i];
        const struct table_path *before = i ? path - 1 : path;
        char text[MAX_KEY_NBYTES];
        struct slice rest;
        if (shared[i] > before->nbytes || suffix[i] > MAX_KEY_NBYTES - shared[i])
            return body_fail(body, "path of a file is too long");
        TRY(body_take_slice(body, suffix[i], &rest));
        *path =
            (struct table_path){table->texts.n, (size_t)(shared[i] + suffix[i]), (size_t)base[i]};
        if (base[i] > path->nbytes)
            return body_fail(body, "base of a path is longer than the path");
        size_t n = 0;
        ocdbt_append_bytes(text, &n, table->texts.data + before->text, (size_t)shared[i]);
        ocdbt_append_bytes(text, &n, rest.bytes, rest.nbytes);
        bytes_put(&table->texts, text, n);
        if (table->texts.failed)
            return RSD_ENOMEM;
    }
    return RSD_OK;
}

rsd_status file_table_take(struct frame_body *body, struct file_table *table)
{
    TRY(body_take_count(body, &table->n));
    size_t n = table->n;
    const uint64_t columns_nbytes = (3 * n + 1) * sizeof(uint64_t);
    if (!budget_take_memory(columns_nbytes + n * sizeof *table->paths))
        return budget_fail();
    uint64_t *columns = mem_new(3 * n + 1, sizeof *columns);
    table->paths = mem_new(n, sizeof *table->paths);
    rsd_status status = columns && table->paths ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = GROW(table->texts.data, table->texts.capacity, 1); /* paths may all be empty */
    if (!status && n > 0)
        status = body_take_column(body, n - 1, columns + 1); /* the first path shares nothing */
    if (!status)
        status = body_take_column(body, 2 * n, columns + n);
    if (!status)
        status = join_paths(body, columns, columns + n, columns + 2 * n, table);
    mem_free(columns);
    budget_return_memory(columns_nbytes);
    return status;
}
