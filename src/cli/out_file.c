/* out_file.c - a file that the command writes: under another name first, and renamed when it is complete.
 *
 * Links are never followed: the directory is opened once, and both names are relative to it. What is at the
 * other name is removed only if it is a regular file with one name, as a killed run leaves it.
 */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
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

static bool is_regular_own(const struct stat *found)
{
    return S_ISREG(found->st_mode) && found->st_nlink == 1;
}

/* Creates the file under its other name. Returns -1 and sets errno on failure. */
static int create_staged(const struct out_file *file)
{
    struct stat found;
    if (fstatat(file->directory_fd, file->staged, &found, AT_SYMLINK_NOFOLLOW) == 0) {
        if (!is_regular_own(&found)) {
            errno = EEXIST;
            return -1;
        }
        if (unlinkat(file->directory_fd, file->staged, 0) != 0)
            return -1;
    }
    return openat(file->directory_fd, file->staged,
                  O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
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

bool out_file_close(struct out_file *file, bool complete)
{
    bool opened = file->stream != NULL;
    if (opened) {
        bool fine = !ferror(file->stream);
        int error = errno;
        complete = fclose(file->stream) == 0 && fine && complete;
        if (!fine)
            errno = error;
    }
    if (opened && complete) {
        unsigned flags = file->replace ? 0 : RENAME_NOREPLACE;
        int moved =
            renameat2(file->directory_fd, file->staged, file->directory_fd, file->name, flags);
        if (moved != 0 && errno == EINVAL && flags) /* not every file system has the flag */
            moved = renameat(file->directory_fd, file->staged, file->directory_fd, file->name);
        complete = moved == 0;
    }
    int error = errno;
    if (opened && !complete)
        unlinkat(file->directory_fd, file->staged, 0);
    if (file->directory_fd >= 0)
        close(file->directory_fd);
    errno = error;
    return opened && complete;
}
