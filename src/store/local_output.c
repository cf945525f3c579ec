/* publish.c - the folder in which an output is built, and how it gets into place.
 *
 *     OUT.reshard-part/   data files, and the journal, locked by whoever is at work
 *          |  everything is on disk: the journal is renamed to reshard-complete
 *          v  one rename
 *     OUT/                reshard-complete is removed
 *
 * Where there is a checkpoint already, the two folders change places in one step; so a reader finds the
 * old one or the new one. What is not part of the old checkpoint (somebody's notes, a tokenizer) then
 * moves over, and the old files go. A part folder can be told what it is, whenever the run was killed:
 *
 *     it has a journal            an output that is being built
 *     it has reshard-complete     one that is complete, and not in place yet
 *     it has neither              an old checkpoint that changed places and was not cleared away
 */
#include "checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define COMPLETE_NAME "reshard-complete"
#define RETIRED_NAME  "reshard-retired"
#define OLD_SUFFIX    ".reshard-old"

/* ---- names ---- */

static char *join(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    char *joined = mem_new(n + m + 1, 1);
    if (joined)
        snprintf(joined, n + m + 1, "%s%s", a, b);
    return joined;
}

static rsd_status failed(const char *path)
{
    return fail(RSD_EIO, "%s: %s", path, strerror(errno));
}

static rsd_status set_names(struct part *part, const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    const char *last = path + n;
    while (last > path && last[-1] != '/')
        last--;
    size_t length = (size_t)(path + n - last);
    if (length == 0 || (length == 1 && last[0] == '.') ||
        (length == 2 && memcmp(last, "..", 2) == 0))
        return fail(RSD_EINVAL, "'%s' is no path that something can be put at", path);
    part->path = mem_new(n + 1, 1);
    if (!part->path)
        return RSD_ENOMEM;
    memcpy(part->path, path, n);
    part->folder = join(part->path, ".reshard-part");
    return part->folder ? RSD_OK : RSD_ENOMEM;
}

/* ---- what is in a folder ---- */

typedef rsd_status each_entry(void *context, int folder_fd, const char *name);

static rsd_status for_each(const char *path, each_entry *element_nbytes, void *context)
{
    DIR *folder = opendir(path);
    if (!folder)
        return failed(path);
    rsd_status status = RSD_OK;
    for (struct dirent *entry; !status && (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = element_nbytes(context, dirfd(folder), entry->d_name);
    closedir(folder);
    return status;
}

static rsd_status find_any(void *context, int folder_fd, const char *name)
{
    (void)folder_fd, (void)name;
    *(bool *)context = true;
    return RSD_OK;
}

static rsd_status unlink_one(void *context, int folder_fd, const char *name)
{
    (void)context;
    return unlinkat(folder_fd, name, 0) == 0 ? RSD_OK : failed(name);
}

/* ---- what is at the path already ---- */

static rsd_status check_folder(const struct part *part)
{
    bool any = false;
    TRY(for_each(part->path, find_any, &any));
    if (!any)
        return RSD_OK; /* an empty folder is as good as none */
    if (!part->overwrite)
        return fail(RSD_EEXIST, "%s: there is something already", part->path);
    rsd_checkpoint *old;
    if (rsd_checkpoint_open(part->path, NULL, &old))
        return fail(RSD_EEXIST, "%s: there is something that is no checkpoint, it is not replaced",
                    part->path);
    rsd_checkpoint_close(old);
    return RSD_OK;
}

static rsd_status check_place(const struct part *part)
{
    struct stat found;
    if (lstat(part->path, &found) != 0)
        return errno == ENOENT ? RSD_OK : failed(part->path);
    if (S_ISDIR(found.st_mode) && !part->one_file)
        return check_folder(part);
    if (S_ISDIR(found.st_mode) || !part->one_file || !S_ISREG(found.st_mode))
        return fail(RSD_EEXIST, "%s: there is something of another kind, it is not replaced",
                    part->path);
    return part->overwrite ? RSD_OK
                           : fail(RSD_EEXIST, "%s: there is something already", part->path);
}

static rsd_status retire(const struct part *part, const char *where);

/* ---- opening ---- */

/* Whether the file that was locked is still the one under its name. */
static bool is_same_file(int fd, const char *name)
{
    struct stat held, named;
    return fstat(fd, &held) == 0 && stat(name, &named) == 0 && held.st_dev == named.st_dev &&
           held.st_ino == named.st_ino;
}

static rsd_status open_journal(struct part *part, enum part_mode mode)
{
    char *name = join(part->folder, "/" JOURNAL_NAME);
    if (!name)
        return RSD_ENOMEM;
    part->journal_fd = open(name, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    rsd_status status = part->journal_fd < 0 ? failed(name) : RSD_OK;
    int how = (mode == PART_SHARED ? LOCK_SH : LOCK_EX) | LOCK_NB;
    if (!status && (flock(part->journal_fd, how) != 0 || !is_same_file(part->journal_fd, name)))
        status = fail(RSD_EEXIST, "%s: another process is at work in it", part->folder);
    mem_free(name);
    return status;
}

static bool is_in(const char *folder, const char *name)
{
    struct stat found;
    char *path = join(folder, name);
    bool there = path && lstat(path, &found) == 0;
    mem_free(path);
    return there;
}

static rsd_status unlink_but_journal(void *context, int folder_fd, const char *name)
{
    return strcmp(name, JOURNAL_NAME) == 0 ? RSD_OK : unlink_one(context, folder_fd, name);
}

/* Finishes what a killed run left between two renames. */
static rsd_status recover(const struct part *part)
{
    struct stat found;
    bool any = false;
    char *aside = join(part->path, OLD_SUFFIX);
    if (!aside)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    bool old = lstat(aside, &found) == 0, out = lstat(part->path, &found) == 0;
    if (old && !out && rename(aside, part->path) != 0)
        status = failed(aside);
    else if (old && out)
        status = retire(part, aside);
    mem_free(aside);
    TRY(status);
    if (lstat(part->folder, &found) != 0 || part->one_file)
        return RSD_OK;
    if (is_in(part->folder, "/" COMPLETE_NAME)) { /* it is an output that can be resumed */
        char *from = join(part->folder, "/" COMPLETE_NAME),
             *to = join(part->folder, "/" JOURNAL_NAME);
        status = from && to ? RSD_OK : RSD_ENOMEM;
        if (!status && rename(from, to) != 0)
            status = failed(from);
        mem_free(from);
        mem_free(to);
        return status;
    }
    TRY(for_each(part->folder, find_any, &any));
    if (!any || is_in(part->folder, "/" JOURNAL_NAME))
        return RSD_OK;
    if (lstat(part->path, &found) == 0 && retire(part, part->folder) == RSD_OK)
        return RSD_OK;
    return fail(RSD_EEXIST, "%s: there is something that no run left: move it away", part->folder);
}

/* The folder, made now or left by an earlier run. */
static rsd_status open_folder(struct part *part, enum part_mode mode)
{
    struct stat there;
    if (mode == PART_JOIN && stat(part->folder, &there) != 0)
        return failed(part->folder);
    bool made = mkdir(part->folder, 0777) == 0, any = false;
    if (!made && errno != EEXIST)
        return failed(part->folder);
    if (!made && mode == PART_NEW) {
        TRY(for_each(part->folder, find_any, &any));
        if (any)
            return fail(RSD_EEXIST,
                        "%s: an earlier run did not finish: resume it, or remove this folder",
                        part->folder);
    }
    TRY(open_journal(part, mode));
    struct stat found;
    part->resumed = mode == PART_RESUME && fstat(part->journal_fd, &found) == 0 && found.st_size;
    bool stale = !made && (mode == PART_REPLACE || (mode == PART_RESUME && !part->resumed));
    if (!stale)
        return RSD_OK;
    if (ftruncate(part->journal_fd, 0) != 0)
        return failed(part->folder);
    return for_each(part->folder, unlink_but_journal, NULL);
}

rsd_status part_check(const char *path, bool overwrite, bool one_file)
{
    struct part part = {.journal_fd = -1, .overwrite = overwrite, .one_file = one_file};
    rsd_status status = set_names(&part, path);
    if (!status)
        status = check_place(&part);
    part_close(&part);
    return status;
}

rsd_status part_open(struct part *part, const char *path, enum part_mode mode, bool overwrite,
                     bool one_file)
{
    *part = (struct part){.journal_fd = -1, .overwrite = overwrite, .one_file = one_file};
    rsd_status status = set_names(part, path);
    if (!status && mode != PART_SHARED && mode != PART_JOIN)
        status = recover(part);
    if (!status)
        status = check_place(part);
    if (!status)
        status = open_folder(part, mode);
    if (status)
        part_close(part);
    return status;
}

rsd_status part_join(struct part *part, const char *path, int32_t rank)
{
    char name[64];
    *part = (struct part){.journal_fd = -1};
    snprintf(name, sizeof name, "/" JOURNAL_NAME ".%d", (int)rank);
    rsd_status status = set_names(part, path);
    char *journal = status || rank < 0 ? NULL : join(part->folder, name);
    if (!status && rank >= 0 && !journal)
        status = RSD_ENOMEM;
    if (journal)
        part->journal_fd =
            open(journal, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (journal && part->journal_fd < 0)
        status = failed(journal);
    mem_free(journal);
    if (status)
        part_close(part);
    return status;
}

void part_close(struct part *part)
{
    if (part->journal_fd >= 0)
        close(part->journal_fd);
    mem_free(part->path);
    mem_free(part->folder);
    *part = (struct part){.journal_fd = -1};
}

void part_remove(struct part *part)
{
    if (part->folder && part->journal_fd >= 0 && !part->moved) {
        for_each(part->folder, unlink_one, NULL);
        rmdir(part->folder);
    }
    part_close(part);
}

/* ---- the old checkpoint ---- */

struct retiring {
    rsd_checkpoint *old;
    int new_fd;
};

static bool is_data_file(const char *name)
{
    int rank, number, end = 0;
    return sscanf(name, "__%d_%d.distcp%n", &rank, &number, &end) == 2 && end > 0 && !name[end];
}

static bool belongs(const struct retiring *retiring, const char *name)
{
    if (is_data_file(name) || strcmp(name, COMPLETE_NAME) == 0)
        return true; /* also those of ranks that had nothing to write */
    const struct name_list *files = &retiring->old->store->names;
    for (size_t i = 0; i < files->n; i++)
        if (strcmp(files->list[i].bytes, name) == 0)
            return true;
    return false;
}

static rsd_status move_over(void *context, int folder_fd, const char *name)
{
    const struct retiring *retiring = context;
    if (belongs(retiring, name))
        return RSD_OK;
    if (faccessat(retiring->new_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return RSD_OK; /* the new checkpoint has one of its own */
    return renameat(folder_fd, name, retiring->new_fd, name) == 0 ? RSD_OK : failed(name);
}

static rsd_status unlink_but_mark(void *context, int folder_fd, const char *name)
{
    return strcmp(name, RETIRED_NAME) == 0 ? RSD_OK : unlink_one(context, folder_fd, name);
}

/* What others put there goes into the new folder. Then it is marked that the rest may go. */
static rsd_status keep_others(const struct part *part, const char *where)
{
    struct retiring retiring = {.new_fd = -1};
    TRY(rsd_checkpoint_open(where, NULL, &retiring.old));
    retiring.new_fd = open(part->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rsd_status status = retiring.new_fd < 0 ? failed(part->path) : RSD_OK;
    if (!status)
        status = for_each(where, move_over, &retiring);
    if (retiring.new_fd >= 0)
        close(retiring.new_fd);
    rsd_checkpoint_close(retiring.old);
    char *mark = join(where, "/" RETIRED_NAME);
    int fd = status || !mark ? -1 : open(mark, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (!status && (fd < 0 || close(fd) != 0))
        status = mark ? failed(mark) : RSD_ENOMEM;
    mem_free(mark);
    return status;
}

/* Clears away an old folder, which lies where the new one was built, or aside. */
static rsd_status retire(const struct part *part, const char *where)
{
    if (!is_in(where, "/" RETIRED_NAME))
        TRY(keep_others(part, where));
    TRY(for_each(where, unlink_but_mark, NULL));
    TRY(for_each(where, unlink_one, NULL));
    return rmdir(where) == 0 ? RSD_OK : failed(where);
}

/* Some file systems cannot exchange. For a moment there is then nothing at the path. */
static rsd_status replace_in_steps(const struct part *part)
{
    char *aside = join(part->path, OLD_SUFFIX);
    if (!aside)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    if (rename(part->path, aside) != 0)
        status = failed(part->path);
    else if (rename(part->folder, part->path) != 0) {
        status = failed(part->folder);
        rename(aside, part->path);
    } else
        status = retire(part, aside);
    mem_free(aside);
    return status;
}

/* ---- into place ---- */

static rsd_status sync_above(const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) + (slash == path) : 0;
    char *above = mem_new(n + 2, 1);
    if (!above)
        return RSD_ENOMEM;
    memcpy(above, n ? path : ".", n ? n : 1);
    int fd = open(above, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rsd_status status = fd >= 0 && fsync(fd) == 0 ? RSD_OK : failed(above);
    if (fd >= 0)
        close(fd);
    mem_free(above);
    return status;
}

/* From here on it is complete, and only its place is wrong. */
static rsd_status mark_complete(const struct part *part)
{
    char *from = join(part->folder, "/" JOURNAL_NAME), *to = join(part->folder, "/" COMPLETE_NAME);
    rsd_status status = from && to ? RSD_OK : RSD_ENOMEM;
    if (!status && rename(from, to) != 0)
        status = failed(from);
    mem_free(from);
    mem_free(to);
    return status;
}

static rsd_status unmark(const struct part *part)
{
    char *name = join(part->path, "/" COMPLETE_NAME);
    if (!name)
        return RSD_ENOMEM;
    rsd_status status = unlink(name) == 0 ? RSD_OK : failed(name);
    mem_free(name);
    return status;
}

static rsd_status publish_folder(struct part *part)
{
    TRY(mark_complete(part));
    if (rename(part->folder, part->path) == 0) { /* nothing there, or an empty folder */
        part->moved = true;
        return unmark(part);
    }
    if (errno != ENOTEMPTY && errno != EEXIST)
        return failed(part->path);
    if (!part->overwrite)
        return fail(RSD_EEXIST, "%s: something was put there meanwhile", part->path);
    part->moved = true;
    if (renameat2(AT_FDCWD, part->folder, AT_FDCWD, part->path, RENAME_EXCHANGE) == 0) {
        TRY(unmark(part));
        return retire(part, part->folder);
    }
    if (errno != EINVAL && errno != ENOSYS)
        return failed(part->path);
    TRY(replace_in_steps(part));
    return unmark(part);
}

static rsd_status find_only(void *context, int folder_fd, const char *name)
{
    (void)folder_fd;
    char **found = context;
    if (strcmp(name, JOURNAL_NAME) == 0)
        return RSD_OK;
    if (*found)
        return fail(RSD_EIO, "%s: a second file where there should be one", name);
    *found = join("/", name);
    return *found ? RSD_OK : RSD_ENOMEM;
}

static rsd_status publish_file(const struct part *part)
{
    char *name = NULL, *path = NULL;
    rsd_status status = for_each(part->folder, find_only, &name);
    if (!status && name)
        path = join(part->folder, name);
    if (!status && path) {
        unsigned flags = part->overwrite ? 0 : RENAME_NOREPLACE;
        int moved = renameat2(AT_FDCWD, path, AT_FDCWD, part->path, flags);
        if (moved != 0 && errno == EINVAL && flags) /* not every file system knows the flag */
            moved = rename(path, part->path);
        status = moved == 0 ? RSD_OK : failed(part->path);
    }
    if (!status)
        status = for_each(part->folder, unlink_one, NULL); /* the journal */
    if (!status && rmdir(part->folder) != 0)
        status = failed(part->folder);
    mem_free(name);
    mem_free(path);
    return status;
}

rsd_status part_publish(struct part *part)
{
    TRY(part->one_file ? publish_file(part) : publish_folder(part));
    return sync_above(part->path);
}
