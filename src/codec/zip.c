/* zip.c - archives as torch.save writes them: uncompressed records, one after the other.
 *
 *     | header, name, padding | data | descriptor | header ... | directory | zip64 end | locator | end |
 *                              ^ at a multiple of 64
 *
 * An archive is read from its end: the directory has the offset and the CRC-32 of each record. Only the
 * directory and the headers of requested records are read.
 *
 * A record must lie inside the archive, be neither compressed nor encrypted, and share no byte with another.
 * A number that stands in two places must be the same in both. All numbers are little-endian.
 */
#include "zip.h"

#include "crc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOCAL = 30, CENTRAL = 46, END = 22, END64 = 56, LOCATOR = 20 }; /* lengths of headers */
enum { MAX_DIRECTORY_NBYTES = 1 << 30, MAX_NAME_NBYTES = 512 };

static rsd_status fail_zip(uint64_t at, const char *what)
{
    return fail(RSD_EFORMAT, "byte %llu of the archive: %s", (unsigned long long)at, what);
}

/* ---- the directory ---- */

struct zip_directory {
    uint64_t at, nbytes, count;
};

/* Says whether the end and the zip64 end agree, wherever a number fits into the end. */
static bool ends_agree(const struct zip_directory *narrow, const struct zip_directory *wide)
{
    return (narrow->at == wide->at || narrow->at == 0xffffffff) &&
           (narrow->nbytes == wide->nbytes || narrow->nbytes == 0xffffffff) &&
           (narrow->count == wide->count || narrow->count == 0xffff);
}

/* Reads the zip64 end record that a locator refers to. It replaces the directory that *out has, and *end_at is
 * where it begins. Requires that the locator ends at *end_at. */
static rsd_status read_zip64_end(const struct zip *zip, const unsigned char *locator,
                                 uint64_t *end_at, struct zip_directory *out)
{
    unsigned char end[END64];
    const struct zip_directory narrow = *out;
    uint64_t at = little_endian(locator + 8, 8), locator_at = *end_at - LOCATOR;
    if (locator_at < END64 || at > locator_at - END64)
        return fail_zip(locator_at, "zip64 end record lies outside the archive");
    TRY(zip->read(zip->context, at, end, sizeof end));
    if (memcmp(end, "PK\6\6", 4) != 0)
        return fail_zip(at, "not a zip64 end record");
    *out = (struct zip_directory){little_endian(end + 48, 8), little_endian(end + 40, 8),
                                  little_endian(end + 32, 8)};
    if (!ends_agree(&narrow, out))
        return fail_zip(at, "zip64 end record differs from the end record");
    *end_at = at;
    return RSD_OK;
}

/* Finds the directory by the end record, which must be the last bytes of the archive. */
static rsd_status find_directory(const struct zip *zip, struct zip_directory *out)
{
    unsigned char end[END], locator[LOCATOR];
    if (zip->nbytes < END)
        return fail_zip(0, "too few bytes for an archive");
    uint64_t at = zip->nbytes - END;
    TRY(zip->read(zip->context, at, end, sizeof end));
    if (memcmp(end, "PK\5\6", 4) != 0)
        return fail_zip(at, "end record not found; the bytes are truncated or not an archive");
    if (little_endian(end + 20, 2) != 0)
        return fail_zip(at, "comment is missing");
    *out = (struct zip_directory){little_endian(end + 16, 4), little_endian(end + 12, 4),
                                  little_endian(end + 10, 2)};
    if (at >= LOCATOR) {
        TRY(zip->read(zip->context, at - LOCATOR, locator, sizeof locator));
        if (memcmp(locator, "PK\6\7", 4) == 0)
            TRY(read_zip64_end(zip, locator, &at, out));
    }
    if (out->at > at || out->nbytes > at - out->at)
        return fail_zip(at, "directory lies outside the archive");
    return RSD_OK;
}

/* Takes sizes and offsets that do not fit into 32 bits from the extra field of zip64, in this order. */
static rsd_status take_zip64(const unsigned char *extra, size_t n, uint64_t at, uint64_t *size,
                             uint64_t *stored, uint64_t *header)
{
    uint64_t *wide[3], count = 0;
    if (*size == 0xffffffff)
        wide[count++] = size;
    if (*stored == 0xffffffff)
        wide[count++] = stored;
    if (*header == 0xffffffff)
        wide[count++] = header;
    while (n >= 4 && count > 0) {
        size_t length = (size_t)little_endian(extra + 2, 2);
        if (length > n - 4)
            return fail_zip(at, "extra field is truncated");
        if (little_endian(extra, 2) == 1) {
            if (length < 8 * count)
                return fail_zip(at, "zip64 field is truncated");
            for (uint64_t i = 0; i < count; i++)
                *wide[i] = little_endian(extra + 4 + 8 * i, 8);
            return RSD_OK;
        }
        extra += 4 + length;
        n -= 4 + length;
    }
    return count ? fail_zip(at, "zip64 field is missing") : RSD_OK;
}

/* Adds the record of the directory entry at *offset, and moves *offset behind the entry. */
static rsd_status add_zip_record(struct zip *zip, const struct zip_directory *directory,
                                 size_t *offset)
{
    const unsigned char *entry = zip->directory + *offset;
    uint64_t at = directory->at + *offset, left = directory->nbytes - *offset;
    if (left < CENTRAL || memcmp(entry, "PK\1\2", 4) != 0)
        return fail_zip(at, "not a directory entry");
    size_t name = (size_t)little_endian(entry + 28, 2),
           extra = (size_t)little_endian(entry + 30, 2);
    size_t comment = (size_t)little_endian(entry + 32, 2);
    if (left - CENTRAL < name + extra + comment)
        return fail_zip(at, "directory entry is truncated");
    uint64_t stored = little_endian(entry + 20, 4), size = little_endian(entry + 24, 4),
             header = little_endian(entry + 42, 4);
    TRY(take_zip64(entry + CENTRAL + name, extra, at, &size, &stored, &header));
    if (little_endian(entry + 8, 2) & 1)
        return fail_zip(at, "record is encrypted");
    if (little_endian(entry + 10, 2) != 0)
        return fail(RSD_EUNSUPPORTED,
                    "byte %llu of the archive: record is compressed, which torch.save never does",
                    (unsigned long long)at);
    if (size != stored)
        return fail_zip(at, "stored record has two sizes");
    if (header > directory->at || directory->at - header < LOCAL ||
        size > directory->at - header - LOCAL)
        return fail_zip(at, "record lies outside the archive");
    struct slice text = {(const char *)entry + CENTRAL, name};
    if (memchr(text.bytes, '\0', name) || !json_is_utf8(text.bytes, name))
        return fail_zip(at, "name of a record contains NUL or is not UTF-8");
    zip->records[zip->nrecords++] =
        (struct zip_record){text, header, 0, size, (uint32_t)little_endian(entry + 16, 4)};
    *offset += CENTRAL + name + extra + comment;
    return RSD_OK;
}

static int by_header_offset(const void *a, const void *b)
{
    const struct zip_record *x = a, *y = b;
    return (x->header > y->header) - (x->header < y->header);
}

/* Sorts the records, and checks that none begins before the one in front of it ends. */
static rsd_status check_overlaps(struct zip *zip)
{
    qsort(zip->records, zip->nrecords, sizeof *zip->records, by_header_offset);
    for (size_t i = 1; i < zip->nrecords; i++) {
        const struct zip_record *before = &zip->records[i - 1], *record = &zip->records[i];
        if (record->header - before->header < LOCAL + before->name.nbytes + before->nbytes)
            return fail_zip(record->header, "record overlaps the one before it");
    }
    return RSD_OK;
}

static int by_record_name(const void *a, const void *b)
{
    struct slice x = ((const struct zip_name *)a)->record->name;
    struct slice y = ((const struct zip_name *)b)->record->name;
    int order = memcmp(x.bytes, y.bytes, x.nbytes < y.nbytes ? x.nbytes : y.nbytes);
    return order ? order : (x.nbytes > y.nbytes) - (x.nbytes < y.nbytes);
}

/* Makes the index of records by name. EFORMAT: two records have the same name. */
static rsd_status sort_by_name(struct zip *zip)
{
    zip->by_name = mem_new(zip->nrecords, sizeof *zip->by_name);
    if (!zip->by_name)
        return RSD_ENOMEM;
    for (size_t i = 0; i < zip->nrecords; i++)
        zip->by_name[i].record = &zip->records[i];
    qsort(zip->by_name, zip->nrecords, sizeof *zip->by_name, by_record_name);
    for (size_t i = 1; i < zip->nrecords; i++)
        if (by_record_name(&zip->by_name[i - 1], &zip->by_name[i]) == 0)
            return fail_zip(zip->by_name[i].record->header, "name of the record is not unique");
    return RSD_OK;
}

rsd_status zip_open(struct zip *zip, read_at *read, void *context, uint64_t nbytes)
{
    struct zip_directory directory;
    *zip = (struct zip){.read = read, .context = context, .nbytes = nbytes};
    TRY(find_directory(zip, &directory));
    if (directory.nbytes > MAX_DIRECTORY_NBYTES || directory.count > directory.nbytes / CENTRAL)
        return fail_zip(directory.at, "directory is too short for its entries");
    zip->directory_at = directory.at;
    zip->directory = mem_new((size_t)directory.nbytes + 1, 1);
    zip->records = mem_new((size_t)directory.count, sizeof *zip->records);
    rsd_status status = zip->directory && zip->records ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = read(context, directory.at, zip->directory, (size_t)directory.nbytes);
    size_t offset = 0;
    for (uint64_t i = 0; i < directory.count && !status; i++)
        status = add_zip_record(zip, &directory, &offset);
    if (!status && offset != directory.nbytes)
        status = fail_zip(directory.at + offset, "directory is longer than its entries");
    if (!status)
        status = check_overlaps(zip);
    if (!status)
        status = sort_by_name(zip);
    if (status)
        zip_close(zip);
    return status;
}

void zip_close(struct zip *zip)
{
    mem_free(zip->directory);
    mem_free(zip->records);
    mem_free(zip->by_name);
    *zip = (struct zip){0};
}

/* ---- records ---- */

/* The directory that all records are in: the first name up to its first slash. */
static struct slice zip_prefix(const struct zip *zip)
{
    if (zip->nrecords == 0)
        return slice_of("");
    struct slice name = zip->records[0].name;
    const char *slash = memchr(name.bytes, '/', name.nbytes);
    return (struct slice){name.bytes, slash ? (size_t)(slash - name.bytes) : 0};
}

rsd_status zip_find(struct zip *zip, const char *name, struct zip_record **out)
{
    char full[MAX_NAME_NBYTES];
    struct slice prefix = zip_prefix(zip);
    int n = snprintf(full, sizeof full, "%.*s/%s", (int)prefix.nbytes, prefix.bytes, name);
    *out = NULL;
    if (n < 0 || (size_t)n >= sizeof full)
        return RSD_OK;
    struct zip_record wanted = {.name = {full, (size_t)n}};
    const struct zip_name key = {&wanted};
    const struct zip_name *found =
        bsearch(&key, zip->by_name, zip->nrecords, sizeof key, by_record_name);
    if (!found)
        return RSD_OK;
    *out = found->record;
    return zip_locate(zip, *out);
}

rsd_status zip_locate(const struct zip *zip, struct zip_record *record)
{
    unsigned char header[LOCAL + MAX_NAME_NBYTES];
    size_t name = record->name.nbytes;
    if (record->data)
        return RSD_OK;
    if (name > MAX_NAME_NBYTES)
        return fail_zip(record->header, "name of the record exceeds 512 bytes");
    TRY(zip->read(zip->context, record->header, header, LOCAL + name));
    if (memcmp(header, "PK\3\4", 4) != 0)
        return fail_zip(record->header, "not a record header");
    if (little_endian(header + 26, 2) != name ||
        memcmp(header + LOCAL, record->name.bytes, name) != 0)
        return fail_zip(record->header,
                        "name of the record differs from its name in the directory");
    if (little_endian(header + 6, 2) & 1 || little_endian(header + 8, 2) != 0)
        return fail_zip(record->header,
                        "record is compressed or encrypted, but not in the directory");
    uint64_t data = record->header + LOCAL + name + little_endian(header + 28, 2);
    const struct zip_record *next = record + 1;
    uint64_t end = next < zip->records + zip->nrecords ? next->header : zip->directory_at;
    if (data > end || record->nbytes > end - data)
        return fail_zip(record->header, "record overlaps what follows it");
    record->data = data;
    return RSD_OK;
}

/* ---- pickles in records ---- */

struct checked_record {
    const struct zip *zip;
    uint64_t data;
    uint64_t at, crc; /* of the bytes that were read from the start on */
};

static rsd_status read_checked(void *context, uint64_t at, void *out, size_t n)
{
    struct checked_record *checked = context;
    TRY(checked->zip->read(checked->zip->context, checked->data + at, out, n));
    if (at == checked->at) {
        checked->crc = crc_update(CRC_ZIP, checked->crc, out, n);
        checked->at += n;
    }
    return RSD_OK;
}

static rsd_status compare_crc(const struct zip_record *record, uint64_t raw)
{
    uint32_t crc = crc32_from_raw(raw, record->nbytes);
    if (crc == record->crc)
        return RSD_OK;
    return fail(RSD_EFORMAT,
                "byte %llu of the archive: %.*s is damaged: CRC-32 is %08x, expected %08x",
                (unsigned long long)record->data, (int)record->name.nbytes, record->name.bytes, crc,
                record->crc);
}

rsd_status zip_read_pickle(const struct zip *zip, const struct zip_record *record,
                           struct pickle_tree *tree, pickle_node *root)
{
    struct checked_record checked = {.zip = zip, .data = record->data};
    uint64_t used;
    rsd_status status = pickle_read(read_checked, &checked, record->nbytes, tree, root, &used);
    /* torch writes 0 if its user has disabled CRCs. */
    if (record->crc == 0 || checked.at != record->nbytes || (status && status != RSD_EFORMAT))
        return status;
    rsd_status damaged = compare_crc(record, checked.crc);
    if (damaged && !status)
        pickle_tree_drop(tree);
    return damaged ? damaged : status;
}

rsd_status zip_check(const struct zip *zip, struct zip_record *record)
{
    char block[1 << 14];
    uint64_t crc = 0;
    TRY(zip_locate(zip, record));
    for (uint64_t at = 0; at < record->nbytes && record->crc; at += sizeof block) {
        uint64_t left = record->nbytes - at;
        size_t n = left < sizeof block ? (size_t)left : sizeof block;
        TRY(zip->read(zip->context, record->data + at, block, n));
        crc = crc_update(CRC_ZIP, crc, block, n);
    }
    return record->crc ? compare_crc(record, crc) : RSD_OK; /* 0: torch did not compute it */
}
