/* zip.c - archives as torch.save writes them: records stored as they are, one after the other.
 *
 *     | header, name, padding | data | descriptor | header ... | directory | zip64 end | locator | end |
 *                              ^ at a multiple of 64
 *
 * An archive is an extent of a file. It is read from its end: the directory says where each record lies
 * and what its CRC-32 is. Only the directory and the headers of records that are asked for are read.
 *
 * A reader accepts what is inside the archive, stored and not encrypted, without two records that share
 * a byte, and with everything that is said twice said the same way. All numbers are little-endian.
 */
#include "zip.h"

#include "crc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOCAL = 30, CENTRAL = 46, END = 22, END64 = 56, LOCATOR = 20, MOST_DIRECTORY = 1 << 30 };
enum { MOST_NAME = 512 };

static uint64_t get(const unsigned char *bytes, int n)
{
    uint64_t value = 0;
    for (int i = n - 1; i >= 0; i--)
        value = value << 8 | bytes[i];
    return value;
}

static rsd_status broken(uint64_t at, const char *what)
{
    return fail(RSD_EFORMAT, "byte %llu of an archive: %s", (unsigned long long)at, what);
}

/* ---- the directory ---- */

struct directory {
    uint64_t at, nbytes, count;
};

/* What the end says, where it fits there, and what the zip64 end says. */
static bool agree(const struct directory *narrow, const struct directory *wide)
{
    return (narrow->at == wide->at || narrow->at == 0xffffffff) &&
           (narrow->nbytes == wide->nbytes || narrow->nbytes == 0xffffffff) &&
           (narrow->count == wide->count || narrow->count == 0xffff);
}

static rsd_status read_zip64_end(const struct zip *zip, uint64_t end_at, struct directory *out)
{
    unsigned char locator[LOCATOR], end[END64];
    if (end_at < LOCATOR + END64)
        return broken(end_at, "there is no zip64 end before the end");
    TRY(zip->read(zip->context, end_at - LOCATOR, locator, sizeof locator));
    if (memcmp(locator, "PK\6\7", 4) != 0)
        return broken(end_at - LOCATOR, "no zip64 locator");
    uint64_t at = get(locator + 8, 8);
    if (at > end_at - LOCATOR - END64)
        return broken(end_at - LOCATOR, "a zip64 end that lies outside");
    TRY(zip->read(zip->context, at, end, sizeof end));
    if (memcmp(end, "PK\6\6", 4) != 0)
        return broken(at, "no zip64 end");
    const struct directory narrow = *out;
    *out = (struct directory){get(end + 48, 8), get(end + 40, 8), get(end + 32, 8)};
    if (!agree(&narrow, out))
        return broken(at, "a zip64 end that says something else than the end");
    if (out->at > at || out->nbytes > at - out->at)
        return broken(at, "a directory that lies outside");
    return RSD_OK;
}

static rsd_status find_directory(const struct zip *zip, struct directory *out)
{
    unsigned char end[END], locator[4];
    if (zip->nbytes < END)
        return broken(0, "too short for an archive");
    uint64_t at = zip->nbytes - END;
    TRY(zip->read(zip->context, at, end, sizeof end));
    if (memcmp(end, "PK\5\6", 4) != 0)
        return broken(at, "no end of an archive");
    if (get(end + 20, 2) != 0)
        return broken(at, "a comment that is not there");
    *out = (struct directory){get(end + 16, 4), get(end + 12, 4), get(end + 10, 2)};
    if (at >= LOCATOR) {
        TRY(zip->read(zip->context, at - LOCATOR, locator, sizeof locator));
        if (memcmp(locator, "PK\6\7", 4) == 0)
            return read_zip64_end(zip, at, out);
    }
    if (out->at > at || out->nbytes > at - out->at)
        return broken(at, "a directory that lies outside");
    return RSD_OK;
}

/* Sizes and offsets that do not fit stand in the extra field of zip64, in this order. */
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
        size_t length = (size_t)get(extra + 2, 2);
        if (length > n - 4)
            return broken(at, "an extra field that is cut short");
        if (get(extra, 2) == 1) {
            if (length < 8 * count)
                return broken(at, "a zip64 field that is cut short");
            for (uint64_t i = 0; i < count; i++)
                *wide[i] = get(extra + 4 + 8 * i, 8);
            return RSD_OK;
        }
        extra += 4 + length;
        n -= 4 + length;
    }
    return count ? broken(at, "a size that does not fit, and no zip64 field") : RSD_OK;
}

static rsd_status add_record(struct zip *zip, const struct directory *directory, size_t *offset)
{
    const unsigned char *entry = zip->directory + *offset;
    uint64_t at = directory->at + *offset, left = directory->nbytes - *offset;
    if (left < CENTRAL || memcmp(entry, "PK\1\2", 4) != 0)
        return broken(at, "no entry of a directory");
    size_t name = (size_t)get(entry + 28, 2), extra = (size_t)get(entry + 30, 2);
    size_t comment = (size_t)get(entry + 32, 2);
    if (left - CENTRAL < name + extra + comment)
        return broken(at, "an entry that is cut short");
    uint64_t stored = get(entry + 20, 4), size = get(entry + 24, 4), header = get(entry + 42, 4);
    TRY(take_zip64(entry + CENTRAL + name, extra, at, &size, &stored, &header));
    if (get(entry + 8, 2) & 1)
        return broken(at, "an encrypted record");
    if (get(entry + 10, 2) != 0)
        return fail(RSD_EUNSUPPORTED, "byte %llu of an archive: a compressed record",
                    (unsigned long long)at);
    if (size != stored)
        return broken(at, "a stored record of two sizes");
    if (header > directory->at || directory->at - header < LOCAL ||
        size > directory->at - header - LOCAL)
        return broken(at, "a record that lies outside");
    struct slice text = {(const char *)entry + CENTRAL, name};
    if (memchr(text.bytes, '\0', name) || !json_is_utf8(text.bytes, name))
        return broken(at, "a name that is no text");
    zip->records[zip->nrecords++] =
        (struct zip_record){text, header, 0, size, (uint32_t)get(entry + 16, 4)};
    *offset += CENTRAL + name + extra + comment;
    return RSD_OK;
}

static int by_header(const void *a, const void *b)
{
    const struct zip_record *x = a, *y = b;
    return (x->header > y->header) - (x->header < y->header);
}

/* Records lie one after the other; the space between them is headers, padding and descriptors. */
static rsd_status check_overlaps(struct zip *zip)
{
    qsort(zip->records, zip->nrecords, sizeof *zip->records, by_header);
    for (size_t i = 1; i < zip->nrecords; i++) {
        const struct zip_record *before = &zip->records[i - 1], *record = &zip->records[i];
        if (record->header - before->header < LOCAL + before->name.nbytes + before->nbytes)
            return broken(record->header, "records that overlap");
    }
    return RSD_OK;
}

static int compare_names(struct slice a, struct slice b)
{
    int order = memcmp(a.bytes, b.bytes, a.nbytes < b.nbytes ? a.nbytes : b.nbytes);
    return order ? order : (a.nbytes > b.nbytes) - (a.nbytes < b.nbytes);
}

static int by_name(const void *a, const void *b)
{
    const struct zip_name *x = a, *y = b;
    return compare_names(x->record->name, y->record->name);
}

static rsd_status sort_by_name(struct zip *zip)
{
    zip->by_name = mem_new(zip->nrecords, sizeof *zip->by_name);
    if (!zip->by_name)
        return RSD_ENOMEM;
    for (size_t i = 0; i < zip->nrecords; i++)
        zip->by_name[i].record = &zip->records[i];
    qsort(zip->by_name, zip->nrecords, sizeof *zip->by_name, by_name);
    for (size_t i = 1; i < zip->nrecords; i++)
        if (by_name(&zip->by_name[i - 1], &zip->by_name[i]) == 0)
            return broken(zip->by_name[i].record->header, "two records of one name");
    return RSD_OK;
}

rsd_status zip_open(struct zip *zip, read_at *read, void *context, uint64_t nbytes)
{
    struct directory directory;
    *zip = (struct zip){.read = read, .context = context, .nbytes = nbytes};
    TRY(find_directory(zip, &directory));
    if (directory.nbytes > MOST_DIRECTORY || directory.count > directory.nbytes / CENTRAL)
        return broken(directory.at, "a directory with more entries than fit");
    zip->directory_at = directory.at;
    zip->directory = mem_new((size_t)directory.nbytes + 1, 1);
    zip->records = mem_new((size_t)directory.count, sizeof *zip->records);
    rsd_status status = zip->directory && zip->records ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = read(context, directory.at, zip->directory, (size_t)directory.nbytes);
    size_t offset = 0;
    for (uint64_t i = 0; i < directory.count && !status; i++)
        status = add_record(zip, &directory, &offset);
    if (!status && offset != directory.nbytes)
        status = broken(directory.at + offset, "a directory that is longer than its entries");
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

/* The folder that all records are in: what the first one's name has before its first slash. */
static struct slice zip_prefix(const struct zip *zip)
{
    if (zip->nrecords == 0)
        return (struct slice){"", 0};
    struct slice name = zip->records[0].name;
    const char *slash = memchr(name.bytes, '/', name.nbytes);
    return (struct slice){name.bytes, slash ? (size_t)(slash - name.bytes) : 0};
}

rsd_status zip_find(struct zip *zip, const char *name, struct zip_record **out)
{
    char full[MOST_NAME];
    struct slice folder = zip_prefix(zip);
    int n = snprintf(full, sizeof full, "%.*s/%s", (int)folder.nbytes, folder.bytes, name);
    size_t lo = 0, hi = zip->nrecords;
    *out = NULL;
    if (n < 0 || (size_t)n >= sizeof full)
        return RSD_OK;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        int order =
            compare_names(zip->by_name[middle].record->name, (struct slice){full, (size_t)n});
        if (order == 0) {
            *out = zip->by_name[middle].record;
            return zip_locate(zip, *out);
        }
        if (order < 0)
            lo = middle + 1;
        else
            hi = middle;
    }
    return RSD_OK;
}

rsd_status zip_locate(const struct zip *zip, struct zip_record *record)
{
    unsigned char header[LOCAL + MOST_NAME];
    size_t name = record->name.nbytes;
    if (record->data)
        return RSD_OK;
    if (name > MOST_NAME)
        return broken(record->header, "a record with too long a name");
    TRY(zip->read(zip->context, record->header, header, LOCAL + name));
    if (memcmp(header, "PK\3\4", 4) != 0)
        return broken(record->header, "no header of a record");
    if (get(header + 26, 2) != name || memcmp(header + LOCAL, record->name.bytes, name) != 0)
        return broken(record->header, "a record that is called otherwise in the directory");
    if (get(header + 6, 2) & 1 || get(header + 8, 2) != 0)
        return broken(record->header, "a record that the directory says is stored, and is not");
    uint64_t data = record->header + LOCAL + name + get(header + 28, 2);
    const struct zip_record *next = record + 1;
    uint64_t end = next < zip->records + zip->nrecords ? next->header : zip->directory_at;
    if (data > end || record->nbytes > end - data)
        return broken(record->header, "a record that reaches into what follows it");
    record->data = data;
    return RSD_OK;
}

/* ---- pickles in records ---- */

struct checked {
    const struct zip *zip;
    uint64_t data;
    uint64_t at, crc; /* of what was read from the start on */
};

static rsd_status read_checked(void *context, uint64_t at, void *out, size_t n)
{
    struct checked *checked = context;
    TRY(checked->zip->read(checked->zip->context, checked->data + at, out, n));
    if (at == checked->at) {
        checked->crc = crc_update(CRC_ZIP, checked->crc, out, n);
        checked->at += n;
    }
    return RSD_OK;
}

rsd_status zip_read_pickle(const struct zip *zip, const struct zip_record *record,
                           struct pickle_tree *tree, pickle_node *root)
{
    struct checked checked = {.zip = zip, .data = record->data};
    uint64_t used;
    rsd_status status = pickle_read(read_checked, &checked, record->nbytes, tree, root, &used);
    /* torch can be told not to compute it, and then writes 0. */
    if (record->crc == 0 || checked.at != record->nbytes || (status && status != RSD_EFORMAT))
        return status;
    uint32_t crc = crc32_from_raw(checked.crc, record->nbytes);
    if (crc == record->crc)
        return status;
    if (!status)
        pickle_tree_drop(tree);
    return fail(RSD_EFORMAT,
                "byte %llu of an archive: %.*s has CRC-32 %08x, should have %08x: it is "
                "damaged",
                (unsigned long long)record->data, (int)record->name.nbytes, record->name.bytes, crc,
                record->crc);
}
