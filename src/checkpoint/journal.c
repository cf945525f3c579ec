/* journal.c - what of an output is complete, so that a stopped run can be resumed.
 *
 *     reshard-journal 1
 *     source 0123...            sizes and times of the files that are read
 *     target 4567...            names, boxes and offsets of what is written
 *     item 12 4096 350          compressed: offset and length of an item
 *     value 2 4446 80           compressed: the same of a value
 *     done 12                   an item is complete, in a file that is not
 *     file 3 123456             a file is complete, with its length
 *     redo 3                    a file is not complete any more: it is written again
 *
 * A line is added after the bytes are on disk. A last line without its end was not written completely, and is
 * ignored. A resumed run compares the lengths: a file that is missing or has another length is written again.
 *
 * Rank 0 has the journal, and each other rank its own, reshard-journal.RANK.
 */
#include "checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static rsd_status fail_in_journal(const struct store_output *dest)
{
    return fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
}

/* ---- adding ---- */

/* Appends text to the journal, all of it. */
static rsd_status append_chars(const struct store_output *dest, const char *chars, size_t n)
{
    while (n > 0) {
        ssize_t written = write(dest->journal_fd, chars, n);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return fail_in_journal(dest);
        chars += written;
        n -= (size_t)written;
    }
    return RSD_OK;
}

/* Appends a text, and frees it. */
static rsd_status append_text(const struct store_output *dest, struct text *text)
{
    char *chars;
    rsd_status status = text_take(text, &chars);
    if (!status) {
        status = append_chars(dest, chars, strlen(chars));
        rsd_free(chars);
    }
    text_drop(text);
    return status;
}

/* Appends a line that a resumed run must find. */
static rsd_status append_note(struct store_output *dest, struct text *text)
{
    TRY(append_text(dest, text));
    return store_sync_journal(dest);
}

rsd_status journal_start(struct store_output *dest, const char *source, const char *target)
{
    struct text text = {0};
    text_add(&text, "reshard-journal 1\nsource %s\ntarget %s\n", source, target);
    return append_note(dest, &text);
}

static void add_extent_line(struct text *text, const char *kind, size_t index,
                            const struct extent *extent)
{
    text_add(text, "%s %zu %llu %llu\n", kind, index, (unsigned long long)extent->offset,
             (unsigned long long)extent->nbytes);
}

rsd_status journal_add_file(struct store_output *dest, const struct writer *writer, uint32_t file)
{
    const struct manifest *manifest = writer->manifest;
    const struct catalog *catalog = &manifest->catalog;
    struct text text = {0};
    for (size_t i = 0; i < catalog->nextents && manifest->compress; i++)
        if (catalog->extents[i].file == file)
            add_extent_line(&text, "item", i, &catalog->extents[i]);
    for (size_t i = 0; i < catalog->nvalues && manifest->compress; i++)
        if (catalog->values[i].extent.file == file)
            add_extent_line(&text, "value", i, &catalog->values[i].extent);
    text_add(&text, "file %lu %llu\n", (unsigned long)file,
             (unsigned long long)manifest->files[file].nbytes);
    return append_note(dest, &text);
}

rsd_status journal_add_items(const struct store_output *dest, const size_t *extents, size_t n)
{
    struct text text = {0};
    for (size_t i = 0; i < n; i++)
        text_add(&text, "done %zu\n", extents[i]);
    return append_text(dest, &text);
}

rsd_status journal_redo_file(struct store_output *dest, uint32_t file)
{
    struct text text = {0};
    text_add(&text, "redo %lu\n", (unsigned long)file);
    TRY(append_note(dest, &text));
    return fsync(dest->journal_fd) == 0 ? RSD_OK : fail_in_journal(dest);
}

/* ---- reading ---- */

/* Reads the first n bytes of a journal. */
static rsd_status read_journal(const struct store_output *dest, int fd, char *out, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t got = pread(fd, out + at, n - at, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail_in_journal(dest);
        if (got == 0)
            return fail(RSD_EIO, "%s/%s became shorter while it was read", dest->store->path,
                        JOURNAL_NAME);
        at += (size_t)got;
    }
    return RSD_OK;
}

static rsd_status fail_long_journal(const struct store_output *dest, const char *name, size_t limit)
{
    return fail(RSD_EIO,
                "%s/%s is longer than %zu bytes, the most that a journal of this output has; "
                "remove this directory to start again",
                dest->store->path, name, limit);
}

/* Reads all whole lines of a journal, and returns the length of its file too. */
static rsd_status read_lines(const struct store_output *dest, int fd, size_t limit, char **text,
                             size_t *n, size_t *file_nbytes)
{
    struct stat about;
    if (fstat(fd, &about) != 0)
        return fail_in_journal(dest);
    if ((uint64_t)about.st_size > limit)
        return fail_long_journal(dest, JOURNAL_NAME, limit);
    size_t all = (size_t)about.st_size;
    char *chars = mem_new(all + 1, 1);
    rsd_status status = chars ? read_journal(dest, fd, chars, all) : RSD_ENOMEM;
    if (status) {
        mem_free(chars);
        return status;
    }
    *file_nbytes = all;
    while (all > 0 && chars[all - 1] != '\n')
        all--;
    *text = chars;
    *n = all;
    return RSD_OK;
}

/* ---- the journals of other ranks ---- */

typedef rsd_status visit_journal(const struct store_output *dest, const char *name, size_t limit);

/* Calls a function for the journal of each other rank, and writes the directory to disk. */
static rsd_status visit_journals(const struct store_output *dest, visit_journal *visit,
                                 size_t limit)
{
    static const char prefix[] = JOURNAL_NAME ".";
    if (!dest->store->ops->random_write)
        return RSD_OK; /* the store has taken them itself */
    struct store_listing listing;
    rsd_status status = store_list(dest->store, "", &listing);
    if (status)
        return fail_in(status, "%s: ", dest->store->path);
    for (size_t i = 0; i < listing.n && !status; i++)
        if (strncmp(listing.entries[i].name, prefix, sizeof prefix - 1) == 0)
            status = visit(dest, listing.entries[i].name, limit);
    store_listing_drop(&listing);
    return status ? status : store_sync_names(dest->store);
}

static rsd_status remove_journal(const struct store_output *dest, const char *name, size_t limit)
{
    (void)limit;
    return store_remove(dest->store, name);
}

rsd_status journal_clear(const struct store_output *dest)
{
    return visit_journals(dest, remove_journal, 0);
}

/* Appends the complete lines of the journal of another rank. */
static rsd_status append_journal(const struct store_output *dest, const char *name, size_t limit)
{
    uint32_t file;
    char *text;
    size_t n;
    TRY(store_add_file(dest->store, (struct slice){name, strlen(name)}, &file));
    rsd_status status = store_load(dest->store, file, limit, &text, &n);
    if (status == RSD_ELIMIT)
        return fail_long_journal(dest, name, limit);
    if (status)
        return store_fail_in(dest->store, file, status);
    while (n > 0 && text[n - 1] != '\n')
        n--;
    status = append_chars(dest, text, n);
    mem_free(text);
    return status;
}

/* Cuts the incomplete last line off, and appends the journals of other ranks. They stay until they are in the journal
 * on disk: a run that is stopped in between appends them again, which does no harm. */
static rsd_status merge_journals(const struct store_output *dest, size_t limit)
{
    char *text;
    size_t n, file_nbytes, nlines = 0;
    TRY(read_lines(dest, dest->journal_fd, limit, &text, &n, &file_nbytes));
    for (size_t i = 0; i < n; i++)
        nlines += text[i] == '\n';
    mem_free(text);
    if (nlines < 3) /* stopped before it began: nothing in other journals counts */
        n = 0;
    if (n < file_nbytes && ftruncate(dest->journal_fd, (off_t)n) != 0)
        return fail_in_journal(dest);
    if (n > 0) {
        TRY(visit_journals(dest, append_journal, limit));
        if (fsync(dest->journal_fd) != 0)
            return fail_in_journal(dest);
    }
    return journal_clear(dest);
}

/* ---- loading ---- */

/* Checks one of the first three lines. EMISMATCH: the earlier run had other sources or targets. */
static rsd_status check_line(const struct store_output *dest, const char *line, size_t number,
                             const char *source, const char *target)
{
    static const char *const changes[] = {"had another version",
                                          "read other files, or they were changed since",
                                          "was to write something else"};
    char expected[64];
    if (number == 0)
        snprintf(expected, sizeof expected, "reshard-journal 1");
    else
        snprintf(expected, sizeof expected, number == 1 ? "source %s" : "target %s",
                 number == 1 ? source : target);
    if (strcmp(line, expected) == 0)
        return RSD_OK;
    return fail(RSD_EMISMATCH, "%s: the earlier run %s; remove this directory to start again",
                dest->store->path, changes[number]);
}

rsd_status journal_load(const struct store_output *dest, const char *source, const char *target,
                        size_t limit, char **entries, size_t *nchars)
{
    char *text, *end;
    size_t n, file_nbytes, number = 0;
    *entries = NULL;
    TRY(merge_journals(dest, limit));
    TRY(read_lines(dest, dest->journal_fd, limit, &text, &n, &file_nbytes));
    char *line = text;
    rsd_status status = RSD_OK;
    for (; !status && number < 3 && line < text + n; line = end + 1, number++) {
        end = memchr(line, '\n', (size_t)(text + n - line)); /* the last line has one */
        *end = '\0';
        status = check_line(dest, line, number, source, target);
    }
    if (!status && number == 3) {
        *nchars = (size_t)(text + n - line);
        memmove(text, line, *nchars);
        *entries = text;
        return RSD_OK;
    }
    mem_free(text);
    return status;
}
