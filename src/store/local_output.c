/* local_output.c - the staging directory in which an output is built, and how it is put into place.
 *
 *     OUT.reshard-part/   the output's files, and the journal, which is locked by the process that writes
 *          |  every file is on disk: the journal is renamed to reshard-complete
 *          v  one rename
 *     OUT/                reshard-complete is removed
 *
 * If OUT is a checkpoint already, the two directories are exchanged in one step, so a reader finds the old
 * one or the new one. Files that do not belong to the old checkpoint (notes, a tokenizer) are then moved
 * into the new directory, and the old files are removed. Whenever a run is killed, the state of its staging
 * directory can be told:
 *
 *     it has a journal            an output that is being built
 *     it has reshard-complete     an output that is complete and not in place yet
 *     it has reshard-replaced     an old checkpoint that was exchanged and not removed yet
 *     OUT has reshard-complete    likewise, but the mark is not set yet
 *     none of these               not a directory of this library: it is never touched
 *
 * Another process may change the path at any time. So directories are opened once, without following links,
 * and all names are relative to their descriptors.
 */
#include "local.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

/* ---- paths ---- */

char *local_join(const char *a, const char *separator, const char *b)
{
    size_t n = strlen(a) + strlen(separator) + strlen(b) + 1;
    char *joined = mem_new(n, 1);
    if (joined)
        snprintf(joined, n, "%s%s%s", a, separator, b);
    return joined;
}

rsd_status local_fail_at(const char *path)
{
    return fail(RSD_EIO, "%s: %s", path, strerror(errno));
}

rsd_status local_fail_foreign(const char *path)
{
    return fail(RSD_EEXIST, "%s was not created by reshard; move it away", path);
}

/* Returns the name of the output in its parent directory. */
const char *local_output_name(const struct local_output *output)
{
    return output->base.path + output->nparent;
}

const char *local_staging_name(const struct local_output *output)
{
    return output->staging + output->nparent;
}

/* Sets the paths of the output and of its staging directory. EINVAL: the last part is empty, . or .. */
static rsd_status set_paths(struct local_output *output, const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    const char *last = path + n;
    while (last > path && last[-1] != '/')
        last--;
    struct slice name = {last, (size_t)(path + n - last)};
    if (strcmp(path, "-") == 0)
        return fail(RSD_EINVAL, "'-' is not a path, and a checkpoint cannot be written to standard "
                                "output; write ./- if a directory of this name is meant");
    if (name.nbytes == 0 || slice_is(name, ".") || slice_is(name, ".."))
        return fail(RSD_EINVAL, "'%s' is not a valid output path", path);
    output->nparent = (size_t)(last - path);
    output->base.path = slice_copy((struct slice){path, n});
    if (!output->base.path)
        return RSD_ENOMEM;
    output->staging = local_join(output->base.path, "", STAGING_SUFFIX);
    return output->staging ? RSD_OK : RSD_ENOMEM;
}

/* Opens the directory in which the output appears. */
static rsd_status open_parent(struct local_output *output)
{
    char *parent = mem_new(output->nparent + 2, 1);
    if (!parent)
        return RSD_ENOMEM;
    memcpy(parent, output->nparent ? output->base.path : ".",
           output->nparent ? output->nparent : 1);
    output->parent_fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rsd_status status = RSD_OK;
    if (output->parent_fd < 0 && errno == ENOENT)
        status = fail(RSD_EIO, "%s: the directory %.*s does not exist; create it first",
                      output->base.path, (int)output->nparent - 1, parent);
    else if (output->parent_fd < 0)
        status = local_fail_at(output->staging);
    mem_free(parent);
    return status;
}

/* Whether files of a file system can share extents: btrfs, XFS, bcachefs. */
static bool can_share_extents(int directory_fd)
{
    struct statfs about;
    if (fstatfs(directory_fd, &about) != 0)
        return true;
    return about.f_type == 0x9123683e || about.f_type == 0x58465342 || about.f_type == 0xca451a4e;
}

/* Fails if a new output is known to need more bytes than are free. */
static rsd_status check_space(const struct local_output *output)
{
    const struct output_options *options = &output->options;
    struct statvfs about;
    if (options->mode != OUTPUT_NEW || !options->nbytes ||
        (options->may_share && can_share_extents(output->parent_fd)) ||
        fstatvfs(output->parent_fd, &about) != 0 || about.f_flag & ST_RDONLY)
        return RSD_OK;
    uint64_t available = (uint64_t)about.f_bavail * about.f_frsize;
    return options->nbytes <= available
               ? RSD_OK
               : fail(RSD_ELIMIT, "%s needs %llu bytes, but its file system has %llu free",
                      output->base.path, (unsigned long long)options->nbytes,
                      (unsigned long long)available);
}

/* ---- what is at the path already ---- */

rsd_status local_list_owned(const struct local_output *output, int directory_fd,
                            struct name_list *owned)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", directory_fd);
    return output->options.list_owned(path, NULL, owned);
}

/* Checks that a directory has none of the marks that only a staging directory may have. A mark that came with its
 * files would say that all of them may be removed. */
static rsd_status check_unmarked(const struct local_output *output, int fd)
{
    static const char *const marks[] = {REPLACED_NAME, RETIRED_NAME, COMPLETE_NAME};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        struct stat found;
        bool there = fstatat(fd, marks[i], &found, AT_SYMLINK_NOFOLLOW) == 0;
        bool left = i == 2 && there && S_ISREG(found.st_mode); /* by a run that was killed */
        if (there && !left)
            return fail(RSD_EEXIST, "%s/%s was not created by reshard; move it away",
                        output->base.path, marks[i]);
    }
    return RSD_OK;
}

/* Checks that an open directory at the path may be replaced: it is empty, or a checkpoint with overwrite set. */
static rsd_status check_replaced(const struct local_output *output, int fd)
{
    const char *path = output->base.path;
    struct name_list owned = {0};
    bool any = false;
    rsd_status status = local_visit(fd, local_note_entry, &any);
    if (status)
        return fail_in(status, "%s: ", path);
    if (!any)
        return RSD_OK;
    if (!output->options.overwrite)
        return fail(RSD_EEXIST, "%s already exists; set overwrite to replace it", path);
    if (local_list_owned(output, fd, &owned))
        status = fail(RSD_EEXIST,
                      "%s exists and is not a checkpoint; not replaced. Remove it or choose "
                      "another path",
                      path);
    name_list_drop(&owned);
    return status ? status : check_unmarked(output, fd);
}

/* Checks that the directory at the path may be replaced. */
static rsd_status check_directory(const struct local_output *output)
{
    int fd = local_open_real(output->parent_fd, local_output_name(output));
    if (fd < 0)
        return local_fail_at(output->base.path);
    rsd_status status = check_replaced(output, fd);
    close(fd);
    return status;
}

/* Checks that the output may appear at its path. */
static rsd_status check_path(const struct local_output *output)
{
    const struct output_options *options = &output->options;
    const char *path = output->base.path;
    struct stat found;
    if (fstatat(output->parent_fd, local_output_name(output), &found, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? RSD_OK : local_fail_at(path);
    if (S_ISDIR(found.st_mode) && !options->one_file)
        return check_directory(output);
    if (S_ISDIR(found.st_mode) || !options->one_file || !S_ISREG(found.st_mode))
        return fail(RSD_EEXIST,
                    "%s exists and is not a %s; not replaced. Remove it or choose another path",
                    path, options->one_file ? "regular file" : "directory");
    return options->overwrite
               ? RSD_OK
               : fail(RSD_EEXIST, "%s already exists; set overwrite to replace it", path);
}

/* ---- opening ---- */

/* Opens and locks the file of the caller in the staging directory, if the caller has named one. */
static rsd_status open_journal(struct local_output *output)
{
    enum output_mode mode = output->options.mode;
    int lock = mode == OUTPUT_JOIN ? 0 : LOCK_EX;
    if (!output->options.journal)
        return RSD_OK;
    return local_open_mark(output->staging_fd, output->options.journal, O_RDWR | O_CREAT | O_APPEND,
                           lock, output->staging, &output->base.journal_fd);
}

/* Fails because the staging directory is not empty: another process writes, or wrote, the same output. */
static rsd_status fail_not_empty(struct local_output *output)
{
    if (local_exists(output->staging_fd, output->options.journal))
        TRY(open_journal(output)); /* fails if the other process is alive */
    return fail(RSD_EEXIST,
                "%s was left by a run that did not finish; resume it or remove the directory",
                output->staging);
}

/* Fails unless the directory in which the output was built has this name. */
static rsd_status check_staging_at(const struct local_output *output, const char *name)
{
    if (local_is_at(output->staging_fd, output->parent_fd, name))
        return RSD_OK;
    return fail(RSD_EIO, "%.*s%s was moved or replaced by another process during the run",
                (int)output->nparent, output->base.path, name);
}

/* Fails if another run has put the directory into place before this one had locked the journal. Then the journal is a
 * new one, in a complete output. */
static rsd_status check_locked(const struct local_output *output)
{
    struct stat found;
    rsd_status status = check_staging_at(output, local_staging_name(output));
    if (status && fstat(output->base.journal_fd, &found) == 0 && found.st_size == 0)
        unlinkat(output->staging_fd, output->options.journal, 0);
    return status;
}

/* Makes the staging directory, or takes the one that an earlier run left. */
static rsd_status make_staging(struct local_output *output)
{
    enum output_mode mode = output->options.mode;
    struct stat found;
    bool any = false, made = false;
    if (mode != OUTPUT_JOIN)
        made = mkdirat(output->parent_fd, local_staging_name(output), 0777) == 0;
    if (!made && mode != OUTPUT_JOIN && errno != EEXIST)
        return local_fail_at(output->staging);
    bool ours = made || mode == OUTPUT_JOIN; /* the process that commits has made or checked it */
    TRY(local_open_made(output, local_staging_name(output), ours, &output->staging_fd));
    if (output->staging_fd < 0)
        return fail(RSD_EIO, "%s was removed by another process", output->staging);
    if (!made && mode == OUTPUT_NEW)
        TRY(local_visit(output->staging_fd, local_note_entry, &any));
    if (any)
        return fail_not_empty(output);
    TRY(open_journal(output));
    if (mode != OUTPUT_JOIN)
        TRY(check_locked(output));
    output->base.resumed =
        mode == OUTPUT_RESUME && fstat(output->base.journal_fd, &found) == 0 && found.st_size;
    if (made || (mode != OUTPUT_REPLACE && mode != OUTPUT_RESUME) || output->base.resumed)
        return RSD_OK;
    if (ftruncate(output->base.journal_fd, 0) != 0)
        return local_fail_at(output->staging);
    return local_remove_entries(output->staging_fd, output->options.journal);
}

static rsd_status open_in_place(struct local_output *output, const char *path)
{
    output->staging = local_join(path, "", "");
    if (!output->staging)
        return RSD_ENOMEM;
    output->staging_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return output->staging_fd >= 0 ? RSD_OK : local_fail_at(path);
}

/* Opens the staging directory. The process that commits first recovers from earlier runs, and checks path and
 * space. */
static rsd_status open_staging(struct local_output *output, const char *path)
{
    enum output_mode mode = output->options.mode;
    if (mode == OUTPUT_IN_PLACE)
        return open_in_place(output, path);
    TRY(set_paths(output, path));
    TRY(open_parent(output));
    if (mode != OUTPUT_JOIN) {
        TRY(local_recover(output));
        TRY(check_path(output));
        TRY(check_space(output));
    }
    return make_staging(output);
}

/* The store has a descriptor of its own, which it closes. */
static rsd_status open_output_store(struct local_output *output)
{
    int fd = openat(output->staging_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return local_fail_at(output->staging);
    TRY(local_adopt_directory(fd, output->staging, strlen(output->staging), &output->base.store));
    output->base.store->writable = true;
    return RSD_OK;
}

rsd_status local_open_output(const char *path, const struct output_options *options,
                             struct store_output **out)
{
    struct local_output *output = mem_new(1, sizeof *output);
    if (!output)
        return RSD_ENOMEM;
    output->base = (struct store_output){.ops = &local_store, .journal_fd = -1};
    output->options = *options;
    output->parent_fd = output->staging_fd = -1;
    rsd_status status = open_staging(output, path);
    if (!status)
        status = open_output_store(output);
    if (status) {
        local_close_output(&output->base, true);
        return status;
    }
    *out = &output->base;
    return RSD_OK;
}

rsd_status local_check_output(const char *path, const struct output_options *options)
{
    struct local_output output = {.options = *options, .parent_fd = -1};
    rsd_status status = set_paths(&output, path);
    if (!status)
        status = open_parent(&output);
    if (!status)
        status = check_path(&output);
    if (output.parent_fd >= 0)
        close(output.parent_fd);
    mem_free(output.base.path);
    mem_free(output.staging);
    return status;
}

void local_close_output(struct store_output *base, bool keep)
{
    struct local_output *output = (struct local_output *)(void *)base;
    store_close(base->store);
    if (!keep && base->journal_fd >= 0 && !output->moved) {
        local_remove_entries(output->staging_fd, NULL);
        if (local_is_at(output->staging_fd, output->parent_fd, local_staging_name(output)))
            unlinkat(output->parent_fd, local_staging_name(output), AT_REMOVEDIR);
    }
    if (base->journal_fd >= 0)
        close(base->journal_fd);
    if (output->staging_fd >= 0)
        close(output->staging_fd);
    if (output->parent_fd >= 0)
        close(output->parent_fd);
    mem_free(base->path);
    mem_free(output->staging);
    mem_free(output);
}

/* ---- into place ---- */

static rsd_status remove_complete_mark(const struct local_output *output)
{
    if (unlinkat(output->staging_fd, COMPLETE_NAME, 0) == 0)
        return RSD_OK;
    return fail(RSD_EIO, "%s/%s: %s", output->base.path, COMPLETE_NAME, strerror(errno));
}

static rsd_status fail_swapped(const struct local_output *output)
{
    return fail(RSD_EIO, "%s was replaced by another process during the run", output->base.path);
}

/* For file systems that cannot exchange two directories. For a moment nothing is at the path. */
static rsd_status replace_in_steps(const struct local_output *output, int old_fd)
{
    const char *name = local_output_name(output), *staging = local_staging_name(output);
    int parent = output->parent_fd;
    char *old = local_join(name, "", OLD_SUFFIX);
    if (!old)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    bool away = false;
    if (local_exists(parent, old))
        status = fail(RSD_EEXIST, "%s%s was not created by reshard; move it away",
                      output->base.path, OLD_SUFFIX);
    else if (renameat(parent, name, parent, old) != 0)
        status = local_fail_at(output->base.path);
    else
        away = true;
    if (away && !local_is_at(old_fd, parent, old))
        status = fail_swapped(output);
    else if (away && renameat(parent, staging, parent, name) != 0)
        status = local_fail_at(output->staging);
    if (away && status)
        renameat(parent, old, parent, name);
    else if (away)
        status = local_retire_old(output, old_fd, output->staging_fd, old);
    mem_free(old);
    return status;
}

/* Exchanges the staging directory with an old checkpoint, and removes the old one. */
static rsd_status replace_directory(struct local_output *output, int old_fd)
{
    const char *name = local_output_name(output), *staging = local_staging_name(output);
    int parent = output->parent_fd;
    TRY(check_replaced(output, old_fd));
    output->moved = true;
    if (renameat2(parent, staging, parent, name, RENAME_EXCHANGE) == 0) {
        if (local_is_at(old_fd, parent, staging))
            return local_retire_old(output, old_fd, output->staging_fd, staging);
        renameat2(parent, staging, parent, name, RENAME_EXCHANGE);
        return fail_swapped(output);
    }
    if (errno != EINVAL && errno != ENOSYS)
        return local_fail_at(output->base.path);
    return replace_in_steps(output, old_fd);
}

/* Marks the output as complete, and renames the staging directory to its path. */
static rsd_status commit_directory(struct local_output *output)
{
    const char *path = output->base.path, *name = local_output_name(output);
    int parent = output->parent_fd, staging = output->staging_fd;
    TRY(check_staging_at(output, local_staging_name(output)));
    /* From here on the output is complete, and only its place is wrong. */
    if (renameat(staging, output->options.journal, staging, COMPLETE_NAME) != 0)
        return local_fail_at(output->staging);
    if (renameat(parent, local_staging_name(output), parent, name) == 0) {
        output->moved = true; /* nothing was there, or an empty directory */
        TRY(check_staging_at(output, name));
        return remove_complete_mark(output);
    }
    if (errno != ENOTEMPTY && errno != EEXIST)
        return local_fail_at(path);
    if (!output->options.overwrite)
        return fail(RSD_EEXIST, "%s was created by another process during the run; not replaced",
                    path);
    int old_fd = local_open_real(parent, name);
    if (old_fd < 0)
        return local_fail_at(path);
    rsd_status status = replace_directory(output, old_fd);
    close(old_fd);
    TRY(status);
    return check_staging_at(output, name);
}

/* The only file of an output, besides the journal. */
struct only_file {
    const char *journal;
    char *name;
};

/* Called by local_visit. EIO: the staging directory has a second file. */
static rsd_status find_only_file(void *context, int directory_fd, const char *name)
{
    struct only_file *only = context;
    (void)directory_fd;
    if (strcmp(name, only->journal) == 0)
        return RSD_OK;
    if (only->name)
        return fail(RSD_EIO, "%s: staging directory has a second file; expected one", name);
    only->name = local_join(name, "", "");
    return only->name ? RSD_OK : RSD_ENOMEM;
}

/* Moves the only file of an output from the staging directory to its path. */
static rsd_status move_only_file(const struct local_output *output, const char *from)
{
    const char *name = local_output_name(output);
    unsigned flags = output->options.overwrite ? 0 : RENAME_NOREPLACE;
    int parent = output->parent_fd, staging = output->staging_fd;
    int moved = renameat2(staging, from, parent, name, flags);
    if (moved != 0 && errno == EINVAL && flags) { /* not every file system has the flag */
        errno = EEXIST;
        moved = local_exists(parent, name) ? -1 : renameat(staging, from, parent, name);
    }
    return moved == 0 ? RSD_OK : local_fail_at(output->base.path);
}

/* Puts an output of one file at its path, and removes the staging directory. */
static rsd_status commit_file(const struct local_output *output)
{
    struct only_file only = {.journal = output->options.journal};
    rsd_status status = local_visit(output->staging_fd, find_only_file, &only);
    if (!status && only.name)
        status = move_only_file(output, only.name);
    if (!status)
        status = local_remove_entries(output->staging_fd, NULL); /* the journal */
    if (!status)
        status = check_staging_at(output, local_staging_name(output));
    if (!status && unlinkat(output->parent_fd, local_staging_name(output), AT_REMOVEDIR) != 0)
        status = local_fail_at(output->staging);
    mem_free(only.name);
    return status;
}

rsd_status local_commit(struct store_output *base)
{
    struct local_output *output = (struct local_output *)(void *)base;
    TRY(output->options.one_file ? commit_file(output) : commit_directory(output));
    return fsync(output->parent_fd) == 0 ? RSD_OK : local_fail_at(base->path);
}
