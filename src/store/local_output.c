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
 *     it has neither              an old checkpoint that was exchanged and not removed yet
 */
#include "local.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define COMPLETE_NAME  "reshard-complete"
#define RETIRED_NAME   "reshard-retired"
#define STAGING_SUFFIX ".reshard-part"
#define OLD_SUFFIX     ".reshard-old"

struct local_output {
    struct store_output base;
    struct output_options options;
    char *staging; /* the directory */
    bool moved;    /* the staging directory may be in place, or be the old checkpoint: it is kept */
};

/* ---- paths ---- */

static char *join_path(const char *a, const char *separator, const char *b)
{
    size_t n = strlen(a) + strlen(separator) + strlen(b) + 1;
    char *joined = mem_new(n, 1);
    if (joined)
        snprintf(joined, n, "%s%s%s", a, separator, b);
    return joined;
}

static rsd_status fail_at(const char *path)
{
    return fail(RSD_EIO, "%s: %s", path, strerror(errno));
}

static rsd_status set_paths(struct local_output *output, const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    const char *last = path + n;
    while (last > path && last[-1] != '/')
        last--;
    struct slice name = {last, (size_t)(path + n - last)};
    if (name.nbytes == 0 || slice_is(name, ".") || slice_is(name, ".."))
        return fail(RSD_EINVAL, "'%s' is not a valid output path", path);
    output->base.path = mem_new(n + 1, 1);
    if (!output->base.path)
        return RSD_ENOMEM;
    memcpy(output->base.path, path, n);
    output->staging = join_path(output->base.path, "", STAGING_SUFFIX);
    return output->staging ? RSD_OK : RSD_ENOMEM;
}

static bool exists_at(const char *path)
{
    struct stat found;
    return lstat(path, &found) == 0;
}

static bool exists_in(const char *directory, const char *name)
{
    char *path = join_path(directory, "/", name);
    bool found = path && exists_at(path);
    mem_free(path);
    return found;
}

static rsd_status rename_in(const char *directory, const char *from, const char *to)
{
    char *old = join_path(directory, "/", from), *new = join_path(directory, "/", to);
    rsd_status status = old && new ? RSD_OK : RSD_ENOMEM;
    if (!status && rename(old, new) != 0)
        status = fail_at(old);
    mem_free(old);
    mem_free(new);
    return status;
}

/* ---- entries of a directory ---- */

typedef rsd_status visit_entry(void *context, int directory_fd, const char *name);

static rsd_status visit_directory(const char *path, visit_entry *visit, void *context)
{
    DIR *directory = opendir(path);
    if (!directory)
        return fail_at(path);
    rsd_status status = RSD_OK;
    for (struct dirent *entry; !status && (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = visit(context, dirfd(directory), entry->d_name);
    closedir(directory);
    return status;
}

static rsd_status note_entry(void *context, int directory_fd, const char *name)
{
    (void)directory_fd, (void)name;
    *(bool *)context = true;
    return RSD_OK;
}

/* Removes an entry; but not the one whose name is the context, if there is one. */
static rsd_status remove_entry(void *context, int directory_fd, const char *name)
{
    const char *kept = context;
    if (kept && strcmp(name, kept) == 0)
        return RSD_OK;
    return unlinkat(directory_fd, name, 0) == 0 ? RSD_OK : fail_at(name);
}

static rsd_status remove_entries(const char *path, const char *kept)
{
    return visit_directory(path, remove_entry, without_const(kept));
}

/* ---- an old checkpoint ---- */

/* The files that belong to an old checkpoint, and the directory for all others. */
struct retirement {
    struct name_list owned;
    int new_fd;
};

static rsd_status move_entry(void *context, int directory_fd, const char *name)
{
    const struct retirement *retirement = context;
    bool owned = strcmp(name, COMPLETE_NAME) == 0;
    for (size_t i = 0; i < retirement->owned.n && !owned; i++)
        owned = strcmp(retirement->owned.list[i].bytes, name) == 0;
    if (owned || faccessat(retirement->new_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return RSD_OK; /* also if the new checkpoint has a file of this name */
    return renameat(directory_fd, name, retirement->new_fd, name) == 0 ? RSD_OK : fail_at(name);
}

/* Moves what does not belong to the old checkpoint, and then marks that the rest may be removed. */
static rsd_status move_other_files(const struct local_output *output, const char *old)
{
    struct retirement retirement = {.new_fd = -1};
    rsd_status status = output->options.list_owned(old, NULL, &retirement.owned);
    if (!status) {
        retirement.new_fd = open(output->base.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        status = retirement.new_fd < 0 ? fail_at(output->base.path)
                                       : visit_directory(old, move_entry, &retirement);
    }
    if (retirement.new_fd >= 0)
        close(retirement.new_fd);
    name_list_drop(&retirement.owned);
    TRY(status);
    char *mark = join_path(old, "/", RETIRED_NAME);
    if (!mark)
        return RSD_ENOMEM;
    int fd = open(mark, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0 || close(fd) != 0)
        status = fail_at(mark);
    mem_free(mark);
    return status;
}

/* Removes an old checkpoint that is no longer at its path. The mark goes last. */
static rsd_status retire_old(const struct local_output *output, const char *old)
{
    if (!exists_in(old, RETIRED_NAME))
        TRY(move_other_files(output, old));
    TRY(remove_entries(old, RETIRED_NAME));
    TRY(remove_entries(old, NULL));
    return rmdir(old) == 0 ? RSD_OK : fail_at(old);
}

/* ---- what is at the path already ---- */

static rsd_status check_directory(const struct local_output *output)
{
    const char *path = output->base.path;
    struct name_list owned = {0};
    bool any = false;
    TRY(visit_directory(path, note_entry, &any));
    if (!any)
        return RSD_OK; /* an empty directory is as good as none */
    if (!output->options.overwrite)
        return fail(RSD_EEXIST, "%s already exists; set overwrite to replace it", path);
    rsd_status status = output->options.list_owned(path, NULL, &owned);
    name_list_drop(&owned);
    return status ? fail(RSD_EEXIST,
                         "%s exists and is not a checkpoint; not replaced. Remove it or choose "
                         "another path",
                         path)
                  : RSD_OK;
}

static rsd_status check_path(const struct local_output *output)
{
    const struct output_options *options = &output->options;
    const char *path = output->base.path;
    struct stat found;
    if (lstat(path, &found) != 0)
        return errno == ENOENT ? RSD_OK : fail_at(path);
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

/* Finishes what a killed run left between two renames. */
static rsd_status recover_output(const struct local_output *output)
{
    const char *path = output->base.path, *staging = output->staging;
    bool any = false;
    char *aside = join_path(path, "", OLD_SUFFIX);
    if (!aside)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    if (exists_at(aside) && exists_at(path))
        status = retire_old(output, aside);
    else if (exists_at(aside) && rename(aside, path) != 0)
        status = fail_at(aside);
    mem_free(aside);
    TRY(status);
    if (!exists_at(staging) || output->options.one_file)
        return RSD_OK;
    if (exists_in(staging, COMPLETE_NAME)) /* an output that can be resumed */
        return rename_in(staging, COMPLETE_NAME, output->options.journal);
    TRY(visit_directory(staging, note_entry, &any));
    if (!any || exists_in(staging, output->options.journal))
        return RSD_OK;
    if (exists_at(path) && retire_old(output, staging) == RSD_OK)
        return RSD_OK;
    return fail(RSD_EEXIST, "%s was not created by reshard; move it away", staging);
}

/* ---- opening ---- */

/* Says whether the file that was locked is still the one at its path. */
static bool is_same_file(int fd, const char *path)
{
    struct stat locked, named;
    return fstat(fd, &locked) == 0 && stat(path, &named) == 0 && locked.st_dev == named.st_dev &&
           locked.st_ino == named.st_ino;
}

static rsd_status open_journal(struct local_output *output)
{
    enum output_mode mode = output->options.mode;
    if (!output->options.journal)
        return RSD_OK;
    char *path = join_path(output->staging, "/", output->options.journal);
    if (!path)
        return RSD_ENOMEM;
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    int lock = (mode == OUTPUT_SHARED ? LOCK_SH : LOCK_EX) | LOCK_NB;
    rsd_status status = fd < 0 ? fail_at(path) : RSD_OK;
    if (!status && mode != OUTPUT_JOIN && (flock(fd, lock) != 0 || !is_same_file(fd, path)))
        status = fail(RSD_EEXIST, "%s is locked by another process", output->staging);
    output->base.journal_fd = fd;
    mem_free(path);
    return status;
}

/* Makes the staging directory, or takes the one that an earlier run left. */
static rsd_status make_staging(struct local_output *output)
{
    enum output_mode mode = output->options.mode;
    struct stat found;
    bool any = false;
    if (mode == OUTPUT_FINISH && stat(output->staging, &found) != 0)
        return fail_at(output->staging);
    bool made = mkdir(output->staging, 0777) == 0;
    if (!made && errno != EEXIST)
        return fail_at(output->staging);
    if (!made && mode == OUTPUT_NEW)
        TRY(visit_directory(output->staging, note_entry, &any));
    if (any)
        return fail(RSD_EEXIST,
                    "%s was left by a run that did not finish; resume it or remove the directory",
                    output->staging);
    TRY(open_journal(output));
    output->base.resumed =
        mode == OUTPUT_RESUME && fstat(output->base.journal_fd, &found) == 0 && found.st_size;
    if (made || (mode != OUTPUT_REPLACE && mode != OUTPUT_RESUME) || output->base.resumed)
        return RSD_OK;
    if (ftruncate(output->base.journal_fd, 0) != 0)
        return fail_at(output->staging);
    return remove_entries(output->staging, output->options.journal);
}

static rsd_status open_staging(struct local_output *output, const char *path)
{
    enum output_mode mode = output->options.mode;
    if (mode == OUTPUT_IN_PLACE) {
        output->staging = join_path(path, "", "");
        return output->staging ? RSD_OK : RSD_ENOMEM;
    }
    TRY(set_paths(output, path));
    if (mode == OUTPUT_JOIN)
        return open_journal(output);
    if (mode != OUTPUT_SHARED && mode != OUTPUT_FINISH)
        TRY(recover_output(output));
    TRY(check_path(output));
    return make_staging(output);
}

rsd_status local_open_output(const char *path, const struct output_options *options,
                             struct store_output **out)
{
    struct local_output *output = mem_new(1, sizeof *output);
    if (!output)
        return RSD_ENOMEM;
    output->base = (struct store_output){.ops = &local_store, .journal_fd = -1};
    output->options = *options;
    rsd_status status = open_staging(output, path);
    if (!status) {
        status =
            local_open_directory(output->staging, strlen(output->staging), &output->base.store);
        if (status == RSD_ENOENT)
            status = RSD_EIO; /* it is not an input that is missing */
    }
    if (status) {
        local_close_output(&output->base, true);
        return status;
    }
    output->base.store->writable = true;
    *out = &output->base;
    return RSD_OK;
}

rsd_status local_check_output(const char *path, const struct output_options *options)
{
    struct local_output output = {.options = *options};
    rsd_status status = set_paths(&output, path);
    if (!status)
        status = check_path(&output);
    mem_free(output.base.path);
    mem_free(output.staging);
    return status;
}

void local_close_output(struct store_output *base, bool keep)
{
    struct local_output *output = (struct local_output *)(void *)base;
    store_close(base->store);
    if (!keep && base->journal_fd >= 0 && !output->moved) {
        remove_entries(output->staging, NULL);
        rmdir(output->staging);
    }
    if (base->journal_fd >= 0)
        close(base->journal_fd);
    mem_free(base->path);
    mem_free(output->staging);
    mem_free(output);
}

/* ---- into place ---- */

static rsd_status sync_parent(const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) + (slash == path) : 0;
    char *parent = mem_new(n + 2, 1);
    if (!parent)
        return RSD_ENOMEM;
    memcpy(parent, n ? path : ".", n ? n : 1);
    int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rsd_status status = fd >= 0 && fsync(fd) == 0 ? RSD_OK : fail_at(parent);
    if (fd >= 0)
        close(fd);
    mem_free(parent);
    return status;
}

static rsd_status remove_mark(const char *path)
{
    char *mark = join_path(path, "/", COMPLETE_NAME);
    if (!mark)
        return RSD_ENOMEM;
    rsd_status status = unlink(mark) == 0 ? RSD_OK : fail_at(mark);
    mem_free(mark);
    return status;
}

/* For file systems that cannot exchange two directories. For a moment nothing is at the path. */
static rsd_status replace_in_steps(const struct local_output *output)
{
    const char *path = output->base.path;
    char *aside = join_path(path, "", OLD_SUFFIX);
    if (!aside)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    if (rename(path, aside) != 0)
        status = fail_at(path);
    else if (rename(output->staging, path) != 0) {
        status = fail_at(output->staging);
        rename(aside, path);
    } else
        status = retire_old(output, aside);
    mem_free(aside);
    return status;
}

static rsd_status commit_directory(struct local_output *output)
{
    const char *path = output->base.path, *staging = output->staging;
    /* From here on the output is complete, and only its place is wrong. */
    TRY(rename_in(staging, output->options.journal, COMPLETE_NAME));
    if (rename(staging, path) == 0) { /* nothing was there, or an empty directory */
        output->moved = true;
        return remove_mark(path);
    }
    if (errno != ENOTEMPTY && errno != EEXIST)
        return fail_at(path);
    if (!output->options.overwrite)
        return fail(RSD_EEXIST, "%s was created by another process during the run; not replaced",
                    path);
    output->moved = true;
    if (renameat2(AT_FDCWD, staging, AT_FDCWD, path, RENAME_EXCHANGE) == 0) {
        TRY(remove_mark(path));
        return retire_old(output, staging);
    }
    if (errno != EINVAL && errno != ENOSYS)
        return fail_at(path);
    TRY(replace_in_steps(output));
    return remove_mark(path);
}

/* The only file of an output, besides the journal. */
struct only_file {
    const char *journal;
    char *name;
};

static rsd_status find_only_file(void *context, int directory_fd, const char *name)
{
    struct only_file *only = context;
    (void)directory_fd;
    if (strcmp(name, only->journal) == 0)
        return RSD_OK;
    if (only->name)
        return fail(RSD_EIO, "%s: staging directory has a second file; expected one", name);
    only->name = join_path(name, "", "");
    return only->name ? RSD_OK : RSD_ENOMEM;
}

static rsd_status commit_file(const struct local_output *output)
{
    const char *path = output->base.path, *staging = output->staging;
    struct only_file only = {.journal = output->options.journal};
    char *from = NULL;
    rsd_status status = visit_directory(staging, find_only_file, &only);
    if (!status && only.name) {
        from = join_path(staging, "/", only.name);
        status = from ? RSD_OK : RSD_ENOMEM;
    }
    if (!status && from) {
        unsigned flags = output->options.overwrite ? 0 : RENAME_NOREPLACE;
        int moved = renameat2(AT_FDCWD, from, AT_FDCWD, path, flags);
        if (moved != 0 && errno == EINVAL && flags) /* not every file system has the flag */
            moved = rename(from, path);
        status = moved == 0 ? RSD_OK : fail_at(path);
    }
    if (!status)
        status = remove_entries(staging, NULL); /* the journal */
    if (!status && rmdir(staging) != 0)
        status = fail_at(staging);
    mem_free(only.name);
    mem_free(from);
    return status;
}

rsd_status local_commit(struct store_output *base)
{
    struct local_output *output = (struct local_output *)(void *)base;
    TRY(output->options.one_file ? commit_file(output) : commit_directory(output));
    return sync_parent(base->path);
}
