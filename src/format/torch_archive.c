/* torch_archive.c - the archive that torch.save writes: records that begin at multiples of 64 bytes, each with
 * a descriptor behind it, and the directory.
 *
 * The last record is an id that torch makes from names and CRCs. Its part that comes from the names is a
 * constant for each set of records, since it depends on the order of a hash table.
 */
#include "torch_archive.h"

#include "crc.h"

#include <stdio.h>
#include <string.h>

enum { ALIGNMENT = 64 };

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

/* Writes the extra field of a record whose length or place needs 64 bits. */
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

void archive_fold_id(struct archive_writer *archive, uint64_t value)
{
    uint64_t id = archive->id;
    archive->id = id ^ (value + 0x9e3779b9u + (id << 6) + (id >> 2));
}

void archive_add_header(struct archive_writer *archive, const char *name, uint64_t nbytes)
{
    struct bytes *out = archive->out;
    struct archive_entry *entry = &archive->entries[archive->n++];
    *entry = (struct archive_entry){.header = archive->base + out->n, .nbytes = nbytes};
    snprintf(entry->name, sizeof entry->name, "%s", name);
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

void archive_add_descriptor(struct archive_writer *archive, uint32_t crc)
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
    archive_fold_id(archive, crc);
}

void archive_add_record(struct archive_writer *archive, const char *name, const void *data,
                        size_t n)
{
    archive_add_header(archive, name, n);
    bytes_put(archive->out, data, n);
    archive_add_descriptor(archive, crc32_of(data, n));
}

/* Writes the directory of an archive, and the three records at its end. */
static void put_archive_directory(struct archive_writer *archive)
{
    struct bytes *out = archive->out;
    uint64_t at = archive->base + out->n;
    for (size_t i = 0; i < archive->n; i++) {
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
    bytes_put_number(out, archive->n, 8);
    bytes_put_number(out, archive->n, 8);
    bytes_put_number(out, nbytes, 8);
    bytes_put_number(out, at, 8);
    bytes_put_text(out, "PK\6\7");
    bytes_put_number(out, 0, 4);
    bytes_put_number(out, end, 8);
    bytes_put_number(out, 1, 4);
    bytes_put_text(out, "PK\5\6");
    bytes_put_number(out, 0, 4);
    bytes_put_number(out, archive->n < 0xffff ? archive->n : 0xffff, 2);
    bytes_put_number(out, archive->n < 0xffff ? archive->n : 0xffff, 2);
    bytes_put_number(out, nbytes < large ? nbytes : large, 4);
    bytes_put_number(out, at < large ? at : large, 4);
    bytes_put_number(out, 0, 2);
}

void archive_add_last(struct archive_writer *archive, const char *names_id)
{
    char id[41];
    archive_add_record(archive, "archive/version", "3\n", 2);
    snprintf(id, sizeof id, "%s%020llu", names_id, (unsigned long long)archive->id);
    archive_add_record(archive, "archive/.data/serialization_id", id, 40);
    put_archive_directory(archive);
}

void archive_add_first(struct archive_writer *archive, const struct bytes *pickle)
{
    archive_add_record(archive, "archive/data.pkl", pickle->data, pickle->n);
    archive_add_record(archive, "archive/.format_version", "1", 1);
    archive_add_record(archive, "archive/.storage_alignment", "64", 2);
    archive_add_record(archive, "archive/byteorder", "little", 6);
}
