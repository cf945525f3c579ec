/* journal_resume.c - what the journal of an earlier run says of the files and items of an output.
 *
 * The journal may be damaged, and the files may have changed since. A line counts only if it is exactly as it was written
 * and fits the output; what it says complete must be there. Whatever does not count is written again.
 */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

/* Returns how long a journal may be. A run adds two lines for each item, value and file; an output may be stopped and
 * resumed many times. */
static size_t find_limit(const struct manifest *manifest)
{
    const size_t least = 1 << 20, each = 4096, most = INT32_MAX;
    size_t n = manifest->catalog.nextents + manifest->catalog.nvalues + manifest->nfiles;
    return n < (most - least) / each ? least + n * each : most;
}

/* What follows the first three lines. */
enum entry_kind { ENTRY_ITEM, ENTRY_VALUE, ENTRY_DONE, ENTRY_FILE, ENTRY_REDO, ENTRY_KINDS };

struct entry {
    enum entry_kind kind;
    uint64_t numbers[3]; /* what is complete, and its offset and length where the line has them */
};

/* Parses numbers as they are written: a space and decimal digits each, and nothing behind the last. */
static bool parse_numbers(const char *at, const char *end, int n, uint64_t *out)
{
    for (int i = 0; i < n; i++) {
        if (end - at < 2 || *at++ != ' ' || (*at == '0' && end - at > 1 && at[1] != ' '))
            return false;
        for (out[i] = 0; at < end && *at != ' '; at++) {
            uint64_t digit = (uint64_t)(unsigned char)*at - '0';
            if (digit > 9 || out[i] > (UINT64_MAX - digit) / 10)
                return false;
            out[i] = out[i] * 10 + digit;
        }
    }
    return at == end;
}

/* Parses a line exactly as it is written. Any other line is not an entry: a disk may have lost part of it. */
static bool parse_entry(const char *line, const char *end, struct entry *entry)
{
    static const struct {
        char word[6];
        int nnumbers;
    } kinds[ENTRY_KINDS] = {[ENTRY_ITEM] = {"item", 3},
                            [ENTRY_VALUE] = {"value", 3},
                            [ENTRY_DONE] = {"done", 1},
                            [ENTRY_FILE] = {"file", 2},
                            [ENTRY_REDO] = {"redo", 1}};
    for (int kind = 0; kind < ENTRY_KINDS; kind++) {
        size_t n = strlen(kinds[kind].word);
        if ((size_t)(end - line) < n || memcmp(line, kinds[kind].word, n) != 0)
            continue;
        entry->kind = (enum entry_kind)kind;
        return parse_numbers(line + n, end, kinds[kind].nnumbers, entry->numbers);
    }
    return false;
}

/* What the journal has of a file. */
struct noted_file {
    size_t redone;   /* where the lines begin that count: behind the last `redo` */
    bool complete;   /* with its length, in writer_file */
    size_t nitems;   /* that are complete, if the file is not */
    uint64_t end;    /* of the last of these */
    bool incomplete; /* it is too short for them */
};

/* Where the journal has a compressed item or value. */
struct noted_item {
    uint64_t offset, nbytes; /* 0, 0: it does not have it */
    struct extent *extent;
};

struct resumption {
    struct writer *writer;
    struct noted_file *files;
    struct noted_item *items; /* compressed: extents, then values */
    size_t nitems;
};

/* Finds the file that an entry is about. Returns false if this output has no such entry. */
static bool find_entry_file(const struct manifest *manifest, const struct entry *entry,
                            uint32_t *file)
{
    const struct catalog *catalog = &manifest->catalog;
    uint64_t index = entry->numbers[0];
    switch (entry->kind) {
    case ENTRY_ITEM:
    case ENTRY_DONE:
        if (index >= catalog->nextents || (entry->kind == ENTRY_ITEM) != (manifest->compress != 0))
            return false;
        *file = catalog->extents[index].file;
        return true;
    case ENTRY_VALUE:
        if (index >= catalog->nvalues || !manifest->compress)
            return false;
        *file = catalog->values[index].extent.file;
        return true;
    default:
        *file = (uint32_t)index;
        return index < manifest->nfiles;
    }
}

static void take_entry(struct resumption *r, const struct entry *entry, uint32_t file)
{
    const struct manifest *manifest = r->writer->manifest;
    size_t index = (size_t)entry->numbers[0];
    switch (entry->kind) {
    case ENTRY_VALUE:
        index += manifest->catalog.nextents;
        /* fall through */
    case ENTRY_ITEM:
        r->items[index].offset = entry->numbers[1];
        r->items[index].nbytes = entry->numbers[2];
        return;
    case ENTRY_DONE:
        manifest->items[index].done = true;
        break;
    case ENTRY_FILE:
        if (!manifest->compress && entry->numbers[1] != manifest->files[file].nbytes)
            return;
        r->files[file].complete = true;
        r->writer->files[file].noted_nbytes = entry->numbers[1];
        break;
    default:
        return;
    }
    r->writer->files[file].noted = true;
}

/* Takes all lines of the journal from `text` to `end`. Ignores those that are invalid, so that more is written again. */
static void take_lines(struct resumption *r, const char *text, const char *end)
{
    struct entry entry;
    uint32_t file;
    for (int take = 0; take < 2; take++) /* first, finds which lines count */
        for (const char *line = text, *next; line < end; line = next + 1) {
            next = memchr(line, '\n', (size_t)(end - line)); /* the last line has one */
            if (!parse_entry(line, next, &entry) ||
                !find_entry_file(r->writer->manifest, &entry, &file))
                continue;
            if (!take && entry.kind == ENTRY_REDO)
                r->files[file].redone = (size_t)(line - text);
            else if (take && (size_t)(line - text) >= r->files[file].redone)
                take_entry(r, &entry, file);
        }
}

static int compare_noted(const void *a, const void *b)
{
    const struct noted_item *one = a, *other = b;
    if (one->extent->file != other->extent->file)
        return one->extent->file < other->extent->file ? -1 : 1;
    return one->offset < other->offset ? -1 : one->offset > other->offset;
}

/* Compressed: takes the offsets and lengths in complete files. The items and values of such a file lie one behind the
 * other from its beginning to its end. If the journal says otherwise, the file is not complete. */
static void take_compressed(struct resumption *r)
{
    struct noted_item *items = r->items;
    if (r->nitems)
        qsort(items, r->nitems, sizeof *items, compare_noted);
    for (size_t i = 0, end = 0; i < r->nitems; i = end) {
        uint32_t file = items[i].extent->file;
        uint64_t at = r->writer->manifest->files[file].kept;
        const uint64_t nbytes = r->writer->files[file].noted_nbytes;
        bool whole = r->files[file].complete && at <= nbytes;
        for (; end < r->nitems && items[end].extent->file == file; end++) {
            whole = whole && items[end].offset == at && items[end].nbytes > 0 &&
                    items[end].nbytes <= nbytes - at;
            at += whole ? items[end].nbytes : 0;
        }
        r->files[file].complete = whole && at == nbytes;
        for (; i < end && r->files[file].complete; i++) {
            items[i].extent->offset = items[i].offset;
            items[i].extent->nbytes = items[i].nbytes;
        }
    }
}

/* Checks that a complete file exists, perhaps under its final name. */
static bool has_complete_file(struct writer *writer, uint32_t file)
{
    const char *name = store_file_name(writer->store, file);
    const char *final_name = writer->manifest->files[file].name;
    uint64_t nbytes;
    if (store_stat(writer->store, file, &nbytes, NULL) == RSD_ENOENT &&
        strcmp(name, final_name) != 0)
        store_rename(writer->store, final_name, name);
    return store_stat(writer->store, file, &nbytes, NULL) == RSD_OK &&
           nbytes == writer->files[file].noted_nbytes;
}

/* Finds which items are complete in files that are not. A store without random writes knows them itself, whatever was
 * noted; what is around them is written anew. */
static void find_items(struct resumption *r)
{
    const struct writer *writer = r->writer;
    const struct manifest *manifest = writer->manifest;
    for (size_t i = 0; i < manifest->catalog.nextents; i++) {
        const struct extent *extent = &manifest->catalog.extents[i];
        struct noted_file *file = &r->files[extent->file];
        bool *done = &manifest->items[i].done;
        if (writer->files[extent->file].done)
            continue;
        if (!writer->store->ops->random_write)
            *done = store_has(writer->store, extent->file, extent->offset, extent->nbytes);
        else if (file->complete && !manifest->compress)
            *done = true; /* what a format writes behind the items may be missing */
        if (!*done)
            continue;
        uint64_t end = extent->offset + extent->nbytes;
        file->end = end > file->end ? end : file->end;
        file->nitems++;
    }
}

/* Checks what was noted against the files. A file that is not complete is continued if it is long enough for all of its
 * items that are. */
static void check_noted_files(struct resumption *r)
{
    struct writer *writer = r->writer;
    const struct manifest *manifest = writer->manifest;
    uint64_t nbytes;
    for (uint32_t i = 0; i < manifest->nfiles; i++) {
        writer->files[i].done = r->files[i].complete && has_complete_file(writer, i);
        if (writer->files[i].done)
            manifest->files[i].nbytes = writer->files[i].noted_nbytes;
    }
    find_items(r);
    for (uint32_t i = 0; i < manifest->nfiles; i++) {
        struct noted_file *file = &r->files[i];
        if (file->nitems == 0)
            continue;
        if (writer->store->ops->random_write) {
            file->incomplete =
                store_stat(writer->store, i, &nbytes, NULL) != RSD_OK || nbytes < file->end;
            writer->files[i].created = !file->incomplete;
        }
        writer->files[i].left -= file->incomplete ? 0 : file->nitems;
    }
    for (size_t i = 0; i < manifest->catalog.nextents; i++)
        if (r->files[manifest->catalog.extents[i].file].incomplete)
            manifest->items[i].done = false;
}

static rsd_status start_resumption(struct resumption *r, struct writer *writer)
{
    struct catalog *catalog = &writer->manifest->catalog;
    *r = (struct resumption){.writer = writer};
    r->files = mem_new(writer->manifest->nfiles, sizeof *r->files);
    if (!r->files)
        return RSD_ENOMEM;
    if (!writer->manifest->compress)
        return RSD_OK;
    r->nitems = catalog->nextents + catalog->nvalues;
    r->items = mem_new(r->nitems, sizeof *r->items);
    if (!r->items)
        return RSD_ENOMEM;
    for (size_t i = 0; i < r->nitems; i++)
        r->items[i].extent = i < catalog->nextents ? &catalog->extents[i]
                                                   : &catalog->values[i - catalog->nextents].extent;
    return RSD_OK;
}

static void end_resumption(struct resumption *r)
{
    mem_free(r->files);
    mem_free(r->items);
}

rsd_status journal_resume(struct store_output *dest, const char *source, const char *target,
                          struct writer *writer)
{
    char *text;
    size_t n;
    struct resumption r;
    TRY(journal_load(dest, source, target, find_limit(writer->manifest), &text, &n));
    if (!text) /* stopped before it began */
        return journal_start(dest, source, target);
    rsd_status status = start_resumption(&r, writer);
    if (!status) {
        take_lines(&r, text, text + n);
        take_compressed(&r);
        check_noted_files(&r);
    }
    end_resumption(&r);
    mem_free(text);
    return status;
}
