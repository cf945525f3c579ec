/* local_entries.c - the entries of a directory: whether they exist, what they are, and how they are removed. Names are
 * relative to the descriptor of the directory, and links are never followed. */
#include "local.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

bool local_exists(int directory_fd, const char *name)
{
    struct stat found;
    return fstatat(directory_fd, name, &found, AT_SYMLINK_NOFOLLOW) == 0;
}

bool local_is_at(int fd, int directory_fd, const char *name)
{
    struct stat opened, named;
    return fstat(fd, &opened) == 0 &&
           fstatat(directory_fd, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

int local_open_real(int directory_fd, const char *name)
{
    return openat(directory_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

rsd_status local_visit(int directory_fd, local_visit_entry *visit, void *context)
{
    int fd = openat(directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) {
        rsd_status status = fail(RSD_EIO, "cannot list the directory: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return status;
    }
    rsd_status status = RSD_OK;
    for (struct dirent *entry; !status && (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = visit(context, fd, entry->d_name);
    closedir(directory);
    return status;
}

rsd_status local_note_entry(void *context, int directory_fd, const char *name)
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
    return unlinkat(directory_fd, name, 0) == 0 ? RSD_OK : local_fail_at(name);
}

rsd_status local_remove_entries(int directory_fd, const char *kept)
{
    return local_visit(directory_fd, remove_entry, without_const(kept));
}

static rsd_status fail_locked(const char *path)
{
    return fail(RSD_EEXIST, "%s is locked by another process, which is still running", path);
}

rsd_status local_open_mark(int directory_fd, const char *name, int flags, int lock,
                           const char *path, int *out)
{
    struct stat found;
    int fd = openat(directory_fd, name, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0)
        return errno == ELOOP || errno == ENXIO ? local_fail_foreign(path) : local_fail_at(path);
    rsd_status status = RSD_OK;
    if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode) || found.st_nlink != 1)
        status = local_fail_foreign(path);
    else if (lock && (flock(fd, lock | LOCK_NB) != 0 || !local_is_at(fd, directory_fd, name)))
        status = fail_locked(path);
    if (status)
        close(fd);
    else
        *out = fd;
    return status;
}
