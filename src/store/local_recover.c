/* local_recover.c - removes a checkpoint that was replaced, and finishes what a killed run left. */
#include "local.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- an old checkpoint ---- */

/* The files that belong to an old checkpoint, and the directory for all others. */
struct retirement {
    struct name_list owned;
    int new_fd;
};

/* Called by local_visit: moves an entry that neither belongs to the old checkpoint nor has its name in the new one. */
static rsd_status move_entry(void *context, int directory_fd, const char *name)
{
    const struct retirement *retirement = context;
    bool owned = strcmp(name, COMPLETE_NAME) == 0 || strcmp(name, REPLACED_NAME) == 0;
    for (size_t i = 0; i < retirement->owned.n && !owned; i++)
        owned = strcmp(retirement->owned.list[i].bytes, name) == 0;
    if (owned || local_exists(retirement->new_fd, name))
        return RSD_OK; /* also if the new checkpoint has a file of this name */
    return renameat(directory_fd, name, retirement->new_fd, name) == 0 ? RSD_OK
                                                                       : local_fail_at(name);
}

/* Moves what does not belong to the old checkpoint, and then marks that the rest may be removed. */
static rsd_status move_other_files(const struct local_output *output, int old_fd, int new_fd)
{
    struct retirement retirement = {.new_fd = new_fd};
    rsd_status status = local_list_owned(output, old_fd, &retirement.owned);
    if (!status)
        status = local_visit(old_fd, move_entry, &retirement);
    name_list_drop(&retirement.owned);
    TRY(status);
    int fd = openat(old_fd, RETIRED_NAME, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return fd >= 0 && close(fd) == 0 ? RSD_OK : local_fail_at(RETIRED_NAME);
}

/* Removes an old checkpoint that is at `name` now. The marks go last. */
static rsd_status empty_old(const struct local_output *output, int old_fd, int new_fd,
                            const char *name)
{
    if (!local_exists(old_fd, RETIRED_NAME))
        TRY(move_other_files(output, old_fd, new_fd));
    TRY(local_remove_entries(old_fd, RETIRED_NAME));
    TRY(local_remove_entries(old_fd, NULL));
    return unlinkat(output->parent_fd, name, AT_REMOVEDIR) == 0 ? RSD_OK : local_fail_at(name);
}

rsd_status local_retire_old(const struct local_output *output, int old_fd, int new_fd,
                            const char *name)
{
    int mark_fd;
    TRY(local_open_mark(old_fd, REPLACED_NAME, O_RDWR | O_CREAT, LOCK_EX, name, &mark_fd));
    rsd_status status = RSD_OK;
    if (unlinkat(new_fd, COMPLETE_NAME, 0) != 0 && errno != ENOENT)
        status = local_fail_at(COMPLETE_NAME);
    if (!status)
        status = empty_old(output, old_fd, new_fd, name);
    close(mark_fd);
    return status ? fail_in(status, "%.*s%s: ", (int)output->nparent, output->base.path, name)
                  : RSD_OK;
}

/* ---- what a killed run left ---- */

/* Makes an output that is complete and not in place one that can be resumed. */
static rsd_status reopen_complete(const struct local_output *output, int staging_fd)
{
    int fd;
    TRY(local_open_mark(staging_fd, COMPLETE_NAME, O_RDWR, LOCK_EX, output->staging, &fd));
    rsd_status status = RSD_OK;
    if (renameat(staging_fd, COMPLETE_NAME, staging_fd, output->options.journal) != 0)
        status = local_fail_at(output->staging);
    close(fd);
    return status;
}

/* Finishes what a run left in the staging directory, or says that no run made it. out_fd is the directory
 * at the path of the output; -1: none. */
static rsd_status recover_staging(const struct local_output *output, int staging_fd, int out_fd)
{
    const char *journal = output->options.journal;
    bool any = false;
    if (local_exists(staging_fd, COMPLETE_NAME))
        return reopen_complete(output, staging_fd);
    rsd_status status = local_visit(staging_fd, local_note_entry, &any);
    if (status)
        return fail_in(status, "%s: ", output->staging);
    if (!any || local_exists(staging_fd, journal))
        return RSD_OK;
    if (out_fd >= 0 &&
        (local_exists(staging_fd, REPLACED_NAME) || local_exists(staging_fd, RETIRED_NAME) ||
         local_exists(out_fd, COMPLETE_NAME)))
        return local_retire_old(output, staging_fd, out_fd, local_staging_name(output));
    return local_fail_foreign(output->staging);
}

/* Finishes what a run left between the two renames of replace_in_steps. */
static rsd_status recover_old(const struct local_output *output, int old_fd, const char *old,
                              int staging_fd, int out_fd)
{
    const char *path = output->base.path;
    bool retired = local_exists(old_fd, REPLACED_NAME) || local_exists(old_fd, RETIRED_NAME);
    if (out_fd >= 0 && (retired || local_exists(out_fd, COMPLETE_NAME)))
        return local_retire_old(output, old_fd, out_fd, old);
    if (out_fd < 0 && staging_fd >= 0 && local_exists(staging_fd, COMPLETE_NAME)) {
        unsigned keep = RENAME_NOREPLACE;
        const char *name = local_output_name(output);
        int moved = renameat2(output->parent_fd, old, output->parent_fd, name, keep);
        if (moved != 0 && errno == EINVAL) /* not every file system has the flag */
            moved = renameat(output->parent_fd, old, output->parent_fd, name);
        return moved == 0 ? RSD_OK : local_fail_at(path);
    }
    return fail(RSD_EEXIST, "%.*s%s was not created by reshard; move it away", (int)output->nparent,
                path, old);
}

/* Says whether a directory was put by another user where everyone may, as in /tmp. That user could change its files
 * at any time. */
static bool is_planted(int parent_fd, int fd)
{
    struct stat parent, found;
    if (fstat(parent_fd, &parent) != 0 || fstat(fd, &found) != 0)
        return true;
    bool open_to_all = parent.st_mode & S_ISVTX && parent.st_mode & S_IWOTH;
    return open_to_all && found.st_uid != geteuid() && found.st_uid != parent.st_uid;
}

rsd_status local_open_made(const struct local_output *output, const char *name, bool ours, int *out)
{
    int n = (int)output->nparent, fd = local_open_real(output->parent_fd, name);
    const char *path = output->base.path;
    *out = -1;
    if (fd < 0 && errno == ENOENT)
        return RSD_OK;
    if (fd < 0 && (errno == ENOTDIR || errno == ELOOP))
        return fail(RSD_EEXIST, "%.*s%s was not created by reshard; move it away", n, path, name);
    if (fd < 0)
        return fail(RSD_EIO, "%.*s%s: %s", n, path, name, strerror(errno));
    if (!ours && is_planted(output->parent_fd, fd)) {
        close(fd);
        return fail(RSD_EEXIST,
                    "%.*s%s belongs to another user; move it away or choose another path", n, path,
                    name);
    }
    *out = fd;
    return RSD_OK;
}

/* Completes or undoes what a stopped run left. `old` is the name that it moved an old checkpoint to. */
static rsd_status recover_with(const struct local_output *output, const char *old)
{
    int old_fd, staging_fd = -1;
    int out_fd = local_open_real(output->parent_fd, local_output_name(output));
    rsd_status status = local_open_made(output, old, false, &old_fd);
    if (!status)
        status = local_open_made(output, local_staging_name(output), false, &staging_fd);
    if (!status && old_fd >= 0 && !output->options.one_file) {
        status = recover_old(output, old_fd, old, staging_fd, out_fd);
        if (out_fd < 0) /* the old one may be at its path again */
            out_fd = local_open_real(output->parent_fd, local_output_name(output));
    }
    if (!status && staging_fd >= 0)
        status = recover_staging(output, staging_fd, out_fd);
    if (old_fd >= 0)
        close(old_fd);
    if (staging_fd >= 0)
        close(staging_fd);
    if (out_fd >= 0)
        close(out_fd);
    return status;
}

rsd_status local_recover(const struct local_output *output)
{
    char *old = local_join(local_output_name(output), "", OLD_SUFFIX);
    if (!old)
        return RSD_ENOMEM;
    rsd_status status = recover_with(output, old);
    mem_free(old);
    return status;
}
