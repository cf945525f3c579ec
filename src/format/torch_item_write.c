/* torch_item_write.c - one tensor or value as torch.save writes it: a small archive around the bytes.
 *
 *     head | bytes of the tensor | tail
 *
 * The head depends on dtype and shape alone. The tail has the CRC-32 of the bytes. So the bytes may be
 * written first, in any order and by several threads. The result is what torch 2.7 and later write for a
 * dense tensor on the CPU, byte for byte.
 *
 * The last record is an id that torch makes from names and CRCs. Its part that comes from the names is a
 * constant for each set of records, since it depends on the order of a hash table.
 */
#include "torch_item.h"

#include "crc.h"

#include <stdio.h>
#include <string.h>

enum { ALIGNMENT = 64, NRECORDS = 7 };

/* ---- the pickle of a tensor ---- */

static void memoize_item(struct bytes *out, int *memo)
{
    pickle_write_op(out, "q");
    bytes_put_number(out, (uint64_t)(*memo)++, 1);
}

static void put_pickle_text(struct bytes *out, const char *text, int *memo)
{
    pickle_write_text(out, (struct slice){text, strlen(text)});
    memoize_item(out, memo);
}

static void put_pickle_global(struct bytes *out, const char *module, const char *name, int *memo)
{
    pickle_write_global(out, module, name);
    memoize_item(out, memo);
}

static void put_pickle_tuple(struct bytes *out, int32_t n, const int64_t *values, int *memo)
{
    static const char *const close[] = {")", "\x85", "\x86", "\x87"};
    if (n > 3)
        pickle_write_op(out, "(");
    for (int32_t i = 0; i < n; i++)
        pickle_write_int(out, values[i]);
    pickle_write_op(out, n > 3 ? "t" : close[n]);
    if (n > 0)
        memoize_item(out, memo);
}

/* Adds the pickle that torch.save writes for a dense tensor, or one with the given strides. */
static void put_pickle_tensor(struct bytes *out, rsd_dtype dtype, int32_t ndim,
                              const int64_t *shape, const int64_t *strides)
{
    int64_t dense[RSD_MAX_DIMS], stride = 1, volume = box_volume(ndim, shape);
    int memo = 0;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        dense[d] = stride;
        stride *= max_i64(shape[d], 1);
    }
    bool typed = dtype_to_storage(dtype) != NULL;
    bytes_put(out, "\x80\x02", 2);
    put_pickle_global(out, "torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3",
                      &memo);
    pickle_write_op(out, "((");
    put_pickle_text(out, "storage", &memo);
    if (typed)
        put_pickle_global(out, "torch", dtype_to_storage(dtype), &memo);
    else
        put_pickle_global(out, "torch.storage", "UntypedStorage", &memo);
    put_pickle_text(out, "0", &memo);
    put_pickle_text(out, "cpu", &memo);
    pickle_write_int(out, typed ? volume : volume * (int64_t)rsd_dtype_nbytes(dtype));
    pickle_write_op(out, "t");
    memoize_item(out, &memo);
    bytes_put(out, "QK\0", 3);
    put_pickle_tuple(out, ndim, shape, &memo);
    put_pickle_tuple(out, ndim, strides ? strides : dense, &memo);
    pickle_write_op(out, "\x89");
    put_pickle_global(out, "collections", "OrderedDict", &memo);
    pickle_write_op(out, ")R");
    memoize_item(out, &memo);
    if (!typed)
        put_pickle_global(out, "torch", dtype_to_torch(dtype), &memo);
    pickle_write_op(out, "t");
    memoize_item(out, &memo);
    pickle_write_op(out, "R");
    memoize_item(out, &memo);
    pickle_write_op(out, ".");
}

/* ---- the archive ---- */

struct archive_entry {
    const char *name;
    uint64_t header, nbytes;
    uint32_t crc;
};

struct archive_writer {
    struct bytes *out;
    uint64_t base; /* offset of `out` in the archive */
    struct archive_entry entries[NRECORDS];
    int n;
    uint64_t id; /* of all CRCs */
};

static const uint64_t large = 0xffffffffu;

static bool is_large(const struct archive_entry *entry)
{
    return entry->nbytes >= large || entry->header >= large;
}

/* Returns the length of the field for sizes and offsets that do not fit into 32 bits. */
static size_t zip64_nbytes(const struct archive_entry *entry)
{
    if (!is_large(entry))
        return 0;
    return (size_t)4 + (entry->nbytes >= large ? 16u : 0u) + (entry->header >= large ? 8u : 0u);
}

static void put_zip64(struct bytes *out, const struct archive_entry *entry, uint64_t stored)
{
    size_t n = zip64_nbytes(entry);
    if (n == 0)
        return;
    bytes_put_number(out, 1, 2);
    bytes_put_number(out, n - 4, 2);
    if (entry->nbytes >= large) {
        bytes_put_number(out, entry->nbytes, 8);
        bytes_put_number(out, stored, 8);
    }
    if (entry->header >= large)
        bytes_put_number(out, entry->header, 8);
}

static void fold_id(struct archive_writer *archive, uint64_t value)
{
    uint64_t id = archive->id;
    archive->id = id ^ (value + 0x9e3779b9u + (id << 6) + (id >> 2));
}

/* Adds the header of a record, padded so that its bytes begin at a multiple of ALIGNMENT. */
static void put_record_header(struct archive_writer *archive, const char *name, uint64_t nbytes)
{
    struct bytes *out = archive->out;
    struct archive_entry *entry = &archive->entries[archive->n++];
    *entry =
        (struct archive_entry){.name = name, .header = archive->base + out->n, .nbytes = nbytes};
    size_t extra = zip64_nbytes(entry);
    uint64_t data = entry->header + 30 + strlen(name) + extra + 4;
    size_t padding = (size_t)(-data & (ALIGNMENT - 1));
    bytes_put_text(out, "PK\3\4");
    bytes_put_number(out, 0, 2);
    bytes_put_number(out, nbytes ? 0x0808 : 0x0800, 2);
    for (int i = 0; i < 9; i++) /* method, time, date, CRC and both sizes: known at the end */
        bytes_put_number(out, 0, 2);
    bytes_put_number(out, strlen(name), 2);
    bytes_put_number(out, extra + 4 + padding, 2);
    bytes_put_text(out, name);
    put_zip64(out, entry, 0);
    bytes_put_text(out, "FB");
    bytes_put_number(out, padding, 2);
    for (size_t i = 0; i < padding; i++)
        bytes_put_text(out, "Z");
}

/* Adds the CRC-32 and the size behind the last record. */
static void put_descriptor(struct archive_writer *archive, uint32_t crc)
{
    struct archive_entry *entry = &archive->entries[archive->n - 1];
    entry->crc = crc;
    if (entry->nbytes == 0)
        return;
    int width = is_large(entry) ? 8 : 4;
    bytes_put_text(archive->out, "PK\7\x08");
    bytes_put_number(archive->out, crc, 4);
    bytes_put_number(archive->out, entry->nbytes, width);
    bytes_put_number(archive->out, entry->nbytes, width);
    fold_id(archive, crc);
}

/* Does as torch, which takes the first bytes of a record for a descriptor if they look like one. */
static void fold_lookalike(struct archive_writer *archive, const unsigned char *first,
                           uint64_t nbytes)
{
    if (nbytes >= 8 && memcmp(first, "PK\7\x08", 4) == 0)
        fold_id(archive, (uint32_t)first[4] | (uint32_t)first[5] << 8 | (uint32_t)first[6] << 16 |
                             (uint32_t)first[7] << 24);
}

static void put_record(struct archive_writer *archive, const char *name, const void *data, size_t n)
{
    put_record_header(archive, name, n);
    bytes_put(archive->out, data, n);
    put_descriptor(archive, crc32_of(data, n));
}

/* Adds the directory of an archive and its end records. */
static void put_archive_directory(struct archive_writer *archive)
{
    struct bytes *out = archive->out;
    uint64_t at = archive->base + out->n;
    for (int i = 0; i < archive->n; i++) {
        const struct archive_entry *entry = &archive->entries[i];
        uint64_t nbytes = entry->nbytes < large ? entry->nbytes : large;
        bytes_put_text(out, "PK\1\2");
        bytes_put_number(out, 0, 4); /* versions */
        bytes_put_number(out, entry->nbytes ? 0x0808 : 0x0800, 2);
        bytes_put_number(out, 0, 6); /* method, time, date */
        bytes_put_number(out, entry->crc, 4);
        bytes_put_number(out, nbytes, 4);
        bytes_put_number(out, nbytes, 4);
        bytes_put_number(out, strlen(entry->name), 2);
        bytes_put_number(out, zip64_nbytes(entry), 2);
        bytes_put_number(out, 0, 8); /* comment, disk, attributes */
        bytes_put_number(out, 0, 2);
        bytes_put_number(out, entry->header < large ? entry->header : large, 4);
        bytes_put_text(out, entry->name);
        put_zip64(out, entry, entry->nbytes);
    }
    uint64_t end = archive->base + out->n, nbytes = end - at;
    bytes_put_text(out, "PK\6\6");
    bytes_put_number(out, 44, 8);
    bytes_put_number(out, 0x031e, 2);
    bytes_put_number(out, 0x002d, 2);
    bytes_put_number(out, 0, 8); /* disks */
    bytes_put_number(out, (uint64_t)archive->n, 8);
    bytes_put_number(out, (uint64_t)archive->n, 8);
    bytes_put_number(out, nbytes, 8);
    bytes_put_number(out, at, 8);
    bytes_put_text(out, "PK\6\7");
    bytes_put_number(out, 0, 4);
    bytes_put_number(out, end, 8);
    bytes_put_number(out, 1, 4);
    bytes_put_text(out, "PK\5\6");
    bytes_put_number(out, 0, 4);
    bytes_put_number(out, (uint64_t)archive->n, 2);
    bytes_put_number(out, (uint64_t)archive->n, 2);
    bytes_put_number(out, nbytes < large ? nbytes : large, 4);
    bytes_put_number(out, at < large ? at : large, 4);
    bytes_put_number(out, 0, 2);
}

static void put_last_records(struct archive_writer *archive, const char *names_id)
{
    char id[41];
    put_record(archive, "archive/version", "3\n", 2);
    snprintf(id, sizeof id, "%s%020llu", names_id, (unsigned long long)archive->id);
    put_record(archive, "archive/.data/serialization_id", id, 40);
    put_archive_directory(archive);
}

static void put_first_records(struct archive_writer *archive, const struct bytes *pickle)
{
    put_record(archive, "archive/data.pkl", pickle->data, pickle->n);
    put_record(archive, "archive/.format_version", "1", 1);
    put_record(archive, "archive/.storage_alignment", "64", 2);
    put_record(archive, "archive/byteorder", "little", 6);
}

static rsd_status fail_item(struct bytes *out)
{
    bytes_drop(out);
    return fail(RSD_ENOMEM, "no memory for an item");
}

/* ---- items ---- */

rsd_status torch_item_frame(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                            const int64_t *strides, uint32_t crc, const unsigned char first[8],
                            struct bytes *head, struct bytes *tail)
{
    uint64_t nbytes = (uint64_t)box_volume(ndim, shape) * rsd_dtype_nbytes(dtype);
    struct bytes pickle = {0};
    struct archive_writer archive = {.out = head};
    put_pickle_tensor(&pickle, dtype, ndim, shape, strides);
    if (!pickle.failed)
        put_first_records(&archive, &pickle);
    head->failed = head->failed || pickle.failed;
    bytes_drop(&pickle);
    put_record_header(&archive, "archive/data/0", nbytes);
    archive.base = head->n + nbytes;
    archive.out = tail;
    fold_lookalike(&archive, first, nbytes);
    put_descriptor(&archive, crc);
    put_last_records(&archive, "15728199511854643026");
    if (!head->failed && !tail->failed)
        return RSD_OK;
    bytes_drop(head);
    return fail_item(tail);
}

rsd_status torch_item_from_pickle(const struct bytes *pickle, struct bytes *out)
{
    struct archive_writer archive = {.out = out};
    put_first_records(&archive, pickle);
    put_last_records(&archive, "02908468677762923104");
    return out->failed ? fail_item(out) : RSD_OK;
}
