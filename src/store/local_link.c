/* local_link.c - opens files by names that come from inside other files, and keeps links from leading out.
 *
 * A directory may come from anyone, and a link in it may name any file of this machine. So a link is
 * followed in two cases only: its target is in the directory too, or the directory is a snapshot in a cache
 * of Hugging Face and the target is a blob of the same cache:
 *
 *     CACHE/snapshots/REVISION/model.safetensors -> CACHE/blobs/HASH
 *
 * The target is then opened without following links once more, so a link that is swapped in between is
 * refused too.
 */
#include "local.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Opens a name without following any link. Returns -1 and sets errno on failure: ELOOP or ENOTDIR if a part
 * of the name may be a link. */
static int open_without_links(int directory_fd, const char *name, int flags)
{
    int at = directory_fd;
    for (const char *slash; (slash = strchr(name, '/')); name = slash + 1) {
        char part[NAME_MAX + 1];
        size_t n = (size_t)(slash - name);
        int next = -1;
        if (n < sizeof part) {
            memcpy(part, name, n);
            part[n] = '\0';
            next = openat(at, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        } else {
            errno = ENAMETOOLONG;
        }
        int error = errno;
        if (at != directory_fd)
            close(at);
        errno = error;
        if (next < 0)
            return -1;
        at = next;
    }
    int fd = openat(at, name, flags | O_NOFOLLOW | O_CLOEXEC);
    int error = errno;
    if (at != directory_fd)
        close(at);
    errno = error;
    return fd;
}

/* Returns the part of a path behind a prefix and a slash; NULL if the path has another prefix. */
static const char *path_below(const char *path, const char *prefix, size_t n)
{
    bool below = strncmp(path, prefix, n) == 0 && path[n] == '/' && path[n + 1];
    return below ? path + n + 1 : NULL;
}

/* Finds the cache in whose snapshots a directory is; *n is the length of its path, 0 if there is none. */
static void find_cache(const char *directory, size_t *n)
{
    static const char snapshots[] = "/snapshots/";
    *n = 0;
    for (const char *at = directory; (at = strstr(at, snapshots)); at++)
        *n = (size_t)(at - directory);
}

/* Opens a target that is a blob of the cache. */
static int open_blob(const char *directory, const char *target, int flags)
{
    char cache[PATH_MAX];
    size_t n;
    find_cache(directory, &n);
    const char *below = n > 0 && n < sizeof cache ? path_below(target, directory, n) : NULL;
    if (!below || strncmp(below, "blobs/", 6) != 0 || !below[6] || strchr(below + 6, '/')) {
        errno = EXDEV;
        return -1;
    }
    memcpy(cache, directory, n);
    cache[n] = '\0';
    int cache_fd = open(cache, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (cache_fd < 0)
        return -1;
    int fd = open_without_links(cache_fd, below, flags);
    int error = errno;
    close(cache_fd);
    errno = error;
    return fd;
}

/* Opens what a name with a link in it leads to. */
static int open_target(int directory_fd, const char *name, int flags)
{
    char self[40], directory[PATH_MAX], path[2 * PATH_MAX], target[PATH_MAX];
    snprintf(self, sizeof self, "/proc/self/fd/%d", directory_fd);
    if (!realpath(self, directory))
        return -1;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (!realpath(path, target))
        return -1;
    const char *below = path_below(target, directory, strlen(directory));
    return below ? open_without_links(directory_fd, below, flags)
                 : open_blob(directory, target, flags);
}

int local_open_inside(int directory_fd, const char *name, int flags)
{
    int fd = open_without_links(directory_fd, name, flags);
    if (fd >= 0 || (errno != ELOOP && errno != ENOTDIR))
        return fd;
    return open_target(directory_fd, name, flags);
}
