/* out_file.c - a file that the command writes: under another name first, and renamed when it is complete.
 *
 * Links are never followed: the directory is opened once, and both names are relative to it. What is at the
 * other name is removed only if it is a regular file with one name, as a killed run leaves it. The file is locked, so
 * that another process finds out that this one writes it.
 */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

int64_t out_file_space(const char *path)
{
    struct statvfs about; /* of the nearest directory above the path that exists */
    char *above = cli_text("%s", path);
    while (statvfs(*above ? above : ".", &about) != 0) {
        char *slash = strrchr(above, '/');
        if (!*above || strcmp(above, "/") == 0)
            return 0;
        *(!slash ? above : slash == above ? slash + 1 : slash) = '\0';
    }
    return (int64_t)(about.f_bavail * about.f_frsize);
}

const char *out_file_error(void)
{
    return errno == EWOULDBLOCK ? "another process is writing it" : strerror(errno);
}

/* Removes what a killed run left at the other name. Returns false and sets errno if something else is there, or another
 * process writes it. Not every file system has locks, and NFS has none for files that are only read. */
static bool remove_staged(const struct out_file *file)
{
    struct stat found;
    int fd = openat(file->directory_fd, file->staged,
                    O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) {
        errno = errno == ELOOP || errno == ENXIO ? EEXIST : errno;
        return errno == ENOENT;
    }
    bool own = fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_nlink == 1;
    if (!own)
        errno = EEXIST;
    bool locked = own && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    bool removed = own && !locked && unlinkat(file->directory_fd, file->staged, 0) == 0;
    int error = errno;
    close(fd);
    errno = error;
    return removed;
}

/* Creates the file under its other name. Returns -1 and sets errno on failure. */
static int create_staged(const struct out_file *file)
{
    if (!remove_staged(file))
        return -1;
    int fd = openat(file->directory_fd, file->staged,
                    O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd >= 0)
        flock(fd, LOCK_EX | LOCK_NB);
    return fd;
}

/* Whether the file still has its other name. */
static bool is_staged_file(const struct out_file *file)
{
    struct stat opened, named;
    return fstat(fileno(file->stream), &opened) == 0 &&
           fstatat(file->directory_fd, file->staged, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

bool out_file_open_in(struct out_file *file, int directory_fd, const char *name, bool replace)
{
    struct stat found;
    *file = (struct out_file){.directory_fd = directory_fd, .replace = replace};
    file->name = cli_text("%s", name);
    file->staged = cli_text("%s.reshard-part", name);
    if (directory_fd < 0)
        return false;
    if (fstatat(directory_fd, name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
        (!replace || S_ISDIR(found.st_mode))) {
        errno = replace ? EISDIR : EEXIST;
        return false;
    }
    int fd = create_staged(file);
    file->stream = fd < 0 ? NULL : fdopen(fd, "wb");
    if (fd >= 0 && !file->stream)
        close(fd);
    return file->stream != NULL;
}

bool out_file_open(struct out_file *file, const char *path, bool replace)
{
    const char *slash = strrchr(path, '/');
    char *directory = cli_text("%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return out_file_open_in(file, fd, slash ? slash + 1 : path, replace);
}

int out_file_open_directory(const char *path)
{
    char *plain = cli_text("%s", path);
    for (size_t n = strlen(plain); n > 1 && plain[n - 1] == '/';)
        plain[--n] = '\0'; /* behind which a link is followed */
    return open(plain, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* Puts a file that is complete at its path. */
static bool move_staged(const struct out_file *file)
{
    unsigned flags = file->replace ? 0 : RENAME_NOREPLACE;
    int moved = renameat2(file->directory_fd, file->staged, file->directory_fd, file->name, flags);
    if (moved != 0 && errno == EINVAL && flags) /* not every file system has the flag */
        moved = renameat(file->directory_fd, file->staged, file->directory_fd, file->name);
    return moved == 0;
}

bool out_file_close(struct out_file *file, bool complete)
{
    bool opened = file->stream != NULL, own = opened && is_staged_file(file);
    int lock_fd = -1, error = errno;
    complete = complete && opened;
    if (opened) {
        lock_fd = dup(fileno(file->stream)); /* the lock ends when the file is at its path */
        bool fine = !ferror(file->stream);
        complete = fclose(file->stream) == 0 && fine && complete;
        errno = fine ? errno : error;
    }
    if (complete && !own) {
        errno = EWOULDBLOCK;
        complete = false;
    }
    complete = complete && move_staged(file);
    error = errno;
    if (own && !complete)
        unlinkat(file->directory_fd, file->staged, 0);
    if (lock_fd >= 0)
        close(lock_fd);
    if (file->directory_fd >= 0)
        close(file->directory_fd);
    errno = error;
    return complete;
}
