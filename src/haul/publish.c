/* publish.c - the folder in which an output is built, and how it gets into place.
 *
 *     OUT.reshard-part/   data files, the journal (locked by whoever is at work)
 *          |  everything complete and on disk, the journal removed
 *          v  one rename
 *     OUT/
 *
 * Where there is a checkpoint already, the two folders change places in one step; so a reader finds the
 * old one or the new one. What is not part of the old checkpoint (somebody's notes, a tokenizer) then
 * moves over, and the old files go.
 */
#include "haul.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

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
    if (n == 0)
        return fail(RSD_EINVAL, "no path to write to");
    part->path = mem_new(n + 1, 1);
    if (!part->path)
        return RSD_ENOMEM;
    memcpy(part->path, path, n);
    part->folder = join(part->path, ".reshard-part");
    return part->folder ? RSD_OK : RSD_ENOMEM;
}

/* ---- what is in a folder ---- */

typedef rsd_status each_entry(void *context, int folder_fd, const char *name);

static rsd_status for_each(const char *path, each_entry *each, void *context)
{
    DIR *folder = opendir(path);
    if (!folder)
        return failed(path);
    rsd_status status = RSD_OK;
    for (struct dirent *entry; !status && (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = each(context, dirfd(folder), entry->d_name);
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

/* ---- opening ---- */

static rsd_status open_journal(struct part *part, enum part_mode mode)
{
    char *name = join(part->folder, "/" JOURNAL_NAME);
    if (!name)
        return RSD_ENOMEM;
    part->journal_fd = open(name, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    rsd_status status = part->journal_fd < 0 ? failed(name) : RSD_OK;
    mem_free(name);
    if (!status &&
        flock(part->journal_fd, (mode == PART_SHARED ? LOCK_SH : LOCK_EX) | LOCK_NB) != 0)
        status = fail(RSD_EEXIST, "%s: another process is at work in it", part->folder);
    return status;
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
    TRY(for_each(part->folder, unlink_one, NULL)); /* the journal is held open all the same */
    close(part->journal_fd);
    return open_journal(part, mode);
}

rsd_status part_open(struct part *part, const char *path, enum part_mode mode, bool overwrite,
                     bool one_file)
{
    *part = (struct part){.journal_fd = -1, .overwrite = overwrite, .one_file = one_file};
    rsd_status status = set_names(part, path);
    if (!status)
        status = check_place(part);
    if (!status)
        status = open_folder(part, mode);
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
    if (part->folder && part->journal_fd >= 0) {
        for_each(part->folder, unlink_one, NULL);
        rmdir(part->folder);
    }
    part_close(part);
}

rsd_status part_write(const struct part *part, const char *name, const void *data, size_t n)
{
    struct files files;
    char temporary[256];
    uint32_t index;
    snprintf(temporary, sizeof temporary, "%s.tmp", name);
    TRY(files_open(&files, part->folder));
    rsd_status status = files_add(&files, (struct slice){temporary, strlen(temporary)}, &index);
    if (!status)
        status = file_create(&files, index, 0);
    if (!status)
        status = file_write(&files, index, 0, data, n);
    if (!status)
        status = file_sync(&files, index);
    if (!status && renameat(files.folder_fd, temporary, files.folder_fd, name) != 0)
        status = failed(name);
    if (!status)
        status = folder_sync(&files);
    files_close(&files);
    return status;
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
    if (is_data_file(name))
        return true; /* also those of ranks that had nothing to write */
    const struct files *files = &retiring->old->files;
    for (size_t i = 0; i < files->n; i++)
        if (strcmp(files->list[i].name, name) == 0)
            return true;
    return false;
}

static rsd_status retire_one(void *context, int folder_fd, const char *name)
{
    const struct retiring *retiring = context;
    if (belongs(retiring, name))
        return unlinkat(folder_fd, name, 0) == 0 ? RSD_OK : failed(name);
    if (renameat2(folder_fd, name, retiring->new_fd, name, RENAME_NOREPLACE) == 0)
        return RSD_OK;
    if (errno == EEXIST) /* the new checkpoint has one of its own */
        return unlinkat(folder_fd, name, 0) == 0 ? RSD_OK : failed(name);
    return failed(name);
}

/* The old folder lies where the new one was built. */
static rsd_status retire(const struct part *part, const char *where)
{
    struct retiring retiring = {.new_fd = -1};
    TRY(rsd_checkpoint_open(where, NULL, &retiring.old));
    retiring.new_fd = open(part->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rsd_status status = retiring.new_fd < 0 ? failed(part->path) : RSD_OK;
    if (!status)
        status = for_each(where, retire_one, &retiring);
    if (!status && rmdir(where) != 0)
        status = failed(where);
    if (retiring.new_fd >= 0)
        close(retiring.new_fd);
    rsd_checkpoint_close(retiring.old);
    return status;
}

/* Some file systems cannot exchange. For a moment there is then nothing at the path. */
static rsd_status replace_in_steps(const struct part *part)
{
    char *aside = join(part->path, ".reshard-old");
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

static rsd_status remove_journal(const struct part *part)
{
    char *name = join(part->folder, "/" JOURNAL_NAME);
    if (!name)
        return RSD_ENOMEM;
    rsd_status status = unlink(name) == 0 ? RSD_OK : failed(name);
    mem_free(name);
    return status;
}

static rsd_status publish_folder(const struct part *part)
{
    if (rename(part->folder, part->path) == 0) /* nothing there, or an empty folder */
        return RSD_OK;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return failed(part->path);
    if (!part->overwrite)
        return fail(RSD_EEXIST, "%s: something was put there meanwhile", part->path);
    if (renameat2(AT_FDCWD, part->folder, AT_FDCWD, part->path, RENAME_EXCHANGE) == 0)
        return retire(part, part->folder);
    return errno == EINVAL || errno == ENOSYS ? replace_in_steps(part) : failed(part->path);
}

static rsd_status find_only(void *context, int folder_fd, const char *name)
{
    (void)folder_fd;
    char **found = context;
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
    if (!status && rmdir(part->folder) != 0)
        status = failed(part->folder);
    mem_free(name);
    mem_free(path);
    return status;
}

rsd_status part_publish(struct part *part)
{
    TRY(remove_journal(part));
    TRY(part->one_file ? publish_file(part) : publish_folder(part));
    return sync_above(part->path);
}
