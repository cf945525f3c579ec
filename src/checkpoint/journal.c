/* journal.c - what of an output is complete, for a run that goes on where another was stopped.
 *
 *     reshard-journal 1
 *     source 0123...            sizes and times of the files that are read
 *     target 4567...            names, boxes and places of what is written
 *     item 12 4096 350          compressed: where an item lies, and how long it is
 *     done 12                   an item that is complete, in a file that is not
 *     file 3 123456             a file that is complete, with its length
 *     redo 3                    no: it is made anew
 *
 * A file is noted after its bytes are on disk. A line without its end was not written to the end, and does
 * not count. What is noted is looked at again: a file that is gone or has another length is made anew.
 *
 * Of many ranks, rank 0 has the journal, and each other notes by itself in reshard-journal.RANK.
 */
#include "checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static rsd_status append(const struct store_output *dest, const char *text, size_t n)
{
    while (n > 0) {
        ssize_t put = write(dest->journal_fd, text, n);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
        text += put;
        n -= (size_t)put;
    }
    return RSD_OK;
}

static rsd_status append_text(const struct store_output *dest, struct text *text)
{
    char *chars;
    TRY(text_take(text, &chars));
    rsd_status status = append(dest, chars, strlen(chars));
    rsd_free(chars);
    return status;
}

/* Appends what a run that goes on must find. */
static rsd_status append_note(struct store_output *dest, struct text *text)
{
    TRY(append_text(dest, text));
    return store_sync_journal(dest);
}

rsd_status journal_start(struct store_output *dest, const char *source, const char *target)
{
    struct text text = {0};
    text_add(&text, "reshard-journal 1\nsource %s\ntarget %s\n", source, target);
    rsd_status status = append_note(dest, &text);
    text_drop(&text);
    return status;
}

rsd_status journal_add(struct store_output *dest, const struct output *output, uint32_t file)
{
    const struct catalog *catalog = &output->manifest->catalog;
    struct text text = {0};
    if (output->manifest->compress) {
        for (size_t i = 0; i < catalog->nextents; i++)
            if (catalog->extents[i].file == file)
                text_add(&text, "item %zu %llu %llu\n", i,
                         (unsigned long long)catalog->extents[i].offset,
                         (unsigned long long)catalog->extents[i].nbytes);
        for (size_t i = 0; i < catalog->nvalues; i++)
            if (catalog->values[i].extent.file == file)
                text_add(&text, "value %zu %llu %llu\n", i,
                         (unsigned long long)catalog->values[i].extent.offset,
                         (unsigned long long)catalog->values[i].extent.nbytes);
    }
    text_add(&text, "file %lu %llu\n", (unsigned long)file,
             (unsigned long long)output->manifest->files[file].nbytes);
    rsd_status status = append_note(dest, &text);
    text_drop(&text);
    return status;
}

rsd_status journal_add_items(const struct store_output *dest, const size_t *extents, size_t n)
{
    struct text text = {0};
    for (size_t i = 0; i < n; i++)
        text_add(&text, "done %zu\n", extents[i]);
    rsd_status status = append_text(dest, &text);
    text_drop(&text);
    return status;
}

rsd_status journal_redo(struct store_output *dest, uint32_t file)
{
    struct text text = {0};
    text_add(&text, "redo %lu\n", (unsigned long)file);
    rsd_status status = append_note(dest, &text);
    text_drop(&text);
    if (!status && fsync(dest->journal_fd) != 0)
        status = fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
    return status;
}

/* ---- going on ---- */

static rsd_status load(const struct store_output *dest, char **text, size_t *n)
{
    struct stat found;
    if (fstat(dest->journal_fd, &found) != 0 || found.st_size > INT32_MAX)
        return fail(RSD_EIO, "%s/%s cannot be read", dest->store->path, JOURNAL_NAME);
    *text = mem_new((size_t)found.st_size + 1, 1);
    if (!*text)
        return RSD_ENOMEM;
    ssize_t got = pread(dest->journal_fd, *text, (size_t)found.st_size, 0);
    *n = got < 0 ? 0 : (size_t)got;
    if (got >= 0)
        return RSD_OK;
    mem_free(*text);
    return fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
}

static rsd_status check_line(const struct store_output *dest, const char *line,
                             const char *expected, const char *what)
{
    if (strcmp(line, expected) == 0)
        return RSD_OK;
    return fail(RSD_EMISMATCH, "%s: the earlier run %s: remove this folder to begin anew",
                dest->store->path, what);
}

static void note_place(struct output *output, const char *line)
{
    struct catalog *catalog = &output->manifest->catalog;
    size_t index;
    unsigned long long offset, nbytes;
    struct extent *extent = NULL;
    if (sscanf(line, "item %zu %llu %llu", &index, &offset, &nbytes) == 3)
        extent = index < catalog->nextents ? &catalog->extents[index] : NULL;
    else if (sscanf(line, "value %zu %llu %llu", &index, &offset, &nbytes) == 3)
        extent = index < catalog->nvalues ? &catalog->values[index].extent : NULL;
    if (extent) {
        extent->offset = offset;
        extent->nbytes = nbytes;
    }
}

static void forget_items(struct output *output, uint32_t file)
{
    for (size_t i = 0; i < output->manifest->catalog.nextents; i++)
        if (output->manifest->catalog.extents[i].file == file)
            output->manifest->items[i].done = false;
}

static void note_item(struct output *output, const char *line)
{
    size_t extent;
    if (sscanf(line, "done %zu", &extent) != 1 || extent >= output->manifest->catalog.nextents)
        return;
    output->manifest->items[extent].done = true;
    output->states[output->manifest->catalog.extents[extent].file].noted = true;
}

static void note_file(struct output *output, const char *line)
{
    unsigned long file;
    unsigned long long nbytes;
    if (sscanf(line, "redo %lu", &file) == 1 && file < output->manifest->nfiles) {
        output->states[file].done = false;
        forget_items(output, (uint32_t)file);
    }
    if (sscanf(line, "file %lu %llu", &file, &nbytes) != 2 || file >= output->manifest->nfiles)
        return;
    output->states[file].noted = true;
    output->states[file].done = true;
    output->states[file].noted_nbytes = nbytes;
}

/* How long so many lines are, whose ends became NULs. */
static size_t lines_nbytes(const char *text, size_t n, size_t nlines)
{
    size_t at = 0;
    for (size_t i = 0; i < nlines && at < n; i++)
        at += strlen(text + at) + 1;
    return at;
}

/* Items whose bytes the store has are complete, whatever was noted. What is around them is written anew. */
static void find_written_items(struct output *output, uint32_t file)
{
    const struct catalog *catalog = &output->manifest->catalog;
    for (size_t i = 0; i < catalog->nextents; i++) {
        const struct extent *extent = &catalog->extents[i];
        if (extent->file != file)
            continue;
        bool there = store_has(output->store, file, extent->offset, extent->nbytes);
        output->manifest->items[i].done = there;
        output->states[file].left -= there;
    }
}

/* A file that is not complete goes on being written, if all of its items that are noted can be in it. */
static void check_items(struct output *output, uint32_t file)
{
    const struct catalog *catalog = &output->manifest->catalog;
    struct out_state *state = &output->states[file];
    uint64_t reach = 0, nbytes;
    size_t n = 0;
    if (!output->store->ops->random_write) {
        find_written_items(output, file);
        return;
    }
    for (size_t i = 0; i < catalog->nextents; i++)
        if (catalog->extents[i].file == file && output->manifest->items[i].done) {
            uint64_t end = catalog->extents[i].offset + catalog->extents[i].nbytes;
            reach = end > reach ? end : reach;
            n++;
        }
    if (n == 0)
        return;
    if (store_stat(output->store, file, &nbytes, NULL) || nbytes < reach) {
        forget_items(output, file);
        return;
    }
    state->created = true;
    state->left -= n;
}

/* Is a noted file really there? It may have got its last name already. */
static void check_file(struct output *output, uint32_t file)
{
    struct out_state *state = &output->states[file];
    struct manifest_file *about = &output->manifest->files[file];
    const char *name = store_file_name(output->store, file);
    uint64_t nbytes;
    if (!state->done) {
        check_items(output, file);
        return;
    }
    if (store_stat(output->store, file, &nbytes, NULL) == RSD_ENOENT &&
        strcmp(name, about->name) != 0)
        store_rename(output->store, about->name, name);
    state->done =
        store_stat(output->store, file, &nbytes, NULL) == RSD_OK && nbytes == state->noted_nbytes;
    if (state->done)
        about->nbytes = state->noted_nbytes;
    else if (!output->store->ops->random_write)
        check_items(output, file);
}

/* ---- what ranks noted, each by itself ---- */

typedef rsd_status each_journal(const struct store_output *dest, int folder_fd, const char *name);

static rsd_status for_each_journal(const struct store_output *dest, each_journal *element_nbytes)
{
    static const char before[] = JOURNAL_NAME ".";
    if (!dest->store->ops->random_write)
        return RSD_OK; /* the store has taken them itself */
    DIR *folder = opendir(dest->store->path);
    if (!folder)
        return fail(RSD_EIO, "%s: %s", dest->store->path, strerror(errno));
    rsd_status status = RSD_OK;
    for (struct dirent *entry; !status && (entry = readdir(folder));)
        if (strncmp(entry->d_name, before, sizeof before - 1) == 0)
            status = element_nbytes(dest, dirfd(folder), entry->d_name);
    if (!status && fsync(dirfd(folder)) != 0)
        status = fail(RSD_EIO, "%s: %s", dest->store->path, strerror(errno));
    closedir(folder);
    return status;
}

static rsd_status remove_one(const struct store_output *dest, int folder_fd, const char *name)
{
    if (unlinkat(folder_fd, name, 0) != 0)
        return fail(RSD_EIO, "%s/%s: %s", dest->store->path, name, strerror(errno));
    return RSD_OK;
}

rsd_status journal_clear(const struct store_output *dest)
{
    return for_each_journal(dest, remove_one);
}

/* Its whole lines, behind ours. */
static rsd_status append_one(const struct store_output *dest, int folder_fd, const char *name)
{
    struct store_output other = {.store = dest->store};
    char *text;
    size_t n;
    other.journal_fd = openat(folder_fd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (other.journal_fd < 0)
        return fail(RSD_EIO, "%s/%s: %s", dest->store->path, name, strerror(errno));
    rsd_status status = load(&other, &text, &n);
    close(other.journal_fd);
    TRY(status);
    while (n > 0 && text[n - 1] != '\n')
        n--;
    status = append(dest, text, n);
    mem_free(text);
    return status;
}

/* Ranks that worked together have each left notes: they become part of the journal, whoever goes on. Until
 * they are in it, on disk, they stay where they are; to add them twice does no harm. */
static rsd_status absorb(const struct store_output *dest)
{
    char *text;
    size_t n, nlines = 0, whole = 0;
    TRY(load(dest, &text, &n));
    for (size_t i = 0; i < n; i++)
        if (text[i] == '\n') {
            nlines++;
            whole = i + 1;
        }
    mem_free(text);
    if (whole < n && ftruncate(dest->journal_fd, (off_t)whole) != 0)
        return fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
    if (nlines >= 3) { /* else there was nothing yet that notes could be about */
        TRY(for_each_journal(dest, append_one));
        if (fsync(dest->journal_fd) != 0)
            return fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
    }
    return journal_clear(dest);
}

rsd_status journal_resume(struct store_output *dest, const char *source, const char *target,
                          struct output *output)
{
    char *text, *next, expected[64];
    size_t n, number = 0;
    TRY(absorb(dest));
    TRY(load(dest, &text, &n));
    rsd_status status = RSD_OK;
    for (char *line = text; !status && (next = strchr(line, '\n')); line = next + 1, number++) {
        *next = '\0';
        if (number == 0) {
            status = check_line(dest, line, "reshard-journal 1", "was of another version");
        } else if (number == 1) {
            snprintf(expected, sizeof expected, "source %s", source);
            status =
                check_line(dest, line, expected, "read other files, or they were changed since");
        } else if (number == 2) {
            snprintf(expected, sizeof expected, "target %s", target);
            status = check_line(dest, line, expected, "was to write something else");
        } else {
            note_place(output, line);
            note_item(output, line);
            note_file(output, line);
        }
    }
    for (uint32_t file = 0; !status && file < output->manifest->nfiles; file++)
        check_file(output, file);
    size_t whole = status ? n : lines_nbytes(text, n, number);
    mem_free(text);
    if (!status && whole < n && ftruncate(dest->journal_fd, (off_t)whole) != 0)
        return fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
    if (!status && number < 3) { /* stopped before it began: begin now */
        if (ftruncate(dest->journal_fd, 0) != 0)
            return fail(RSD_EIO, "%s/%s: %s", dest->store->path, JOURNAL_NAME, strerror(errno));
        return journal_start(dest, source, target);
    }
    return status;
}
