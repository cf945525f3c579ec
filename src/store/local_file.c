/* file.c - files of a checkpoint, read and written in place: opened when needed, closed when too many are.
 *
 * Names come from inside other files, so they may not leave the folder; what they lead to on disk may be
 * a link, as in a cache of downloads. A file is a regular one, and its size is what it was when it was
 * first seen: every read is checked against that before it is made. Bytes are read with pread, never
 * mapped, so that a file that is cut short is an error and not a signal.
 */
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/statfs.h>
#include <unistd.h>

enum { MOST_OPEN = 200, FLUSH_NBYTES = 32 << 20, PATH_NCHARS = 600, ERROR_NCHARS = 1024 };

rsd_status check_name(struct slice name)
{
    bool fine = name.nbytes > 0 && name.nbytes < 4096 && !memchr(name.bytes, '\0', name.nbytes);
    for (size_t at = 0; fine && at <= name.nbytes;) {
        const char *slash = memchr(name.bytes + at, '/', name.nbytes - at);
        size_t end = slash ? (size_t)(slash - name.bytes) : name.nbytes;
        struct slice part = {name.bytes + at, end - at};
        fine = part.nbytes > 0 && !slice_is(part, ".") && !slice_is(part, "..");
        at = end + 1;
    }
    if (!fine)
        return fail(RSD_EFORMAT, "'%.*s' is no name of a file in this folder",
                    (int)(name.nbytes < 200 ? name.nbytes : 200), name.bytes);
    return RSD_OK;
}

/* ---- the list ---- */

rsd_status files_open(struct files *files, const char *folder)
{
    *files = (struct files){.folder_fd = -1};
    files->folder = mem_copy(folder, strlen(folder) + 1, 1);
    if (!files->folder)
        return RSD_ENOMEM;
    files->folder_fd = open(*folder ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (files->folder_fd < 0) {
        int error = errno;
        mem_free(files->folder);
        *files = (struct files){.folder_fd = -1};
        return fail(RSD_EIO, "%s: %s", folder, strerror(error));
    }
    pthread_mutex_init(&files->lock, NULL);
    return RSD_OK;
}

void files_close(struct files *files)
{
    if (!files->folder)
        return;
    for (size_t i = 0; i < files->n; i++) {
        for (int k = 0; k < FILE_SLOTS; k++)
            if (files->list[i].slots[k].fd >= 0)
                close(files->list[i].slots[k].fd);
        mem_free(files->list[i].name);
    }
    mem_free(files->list);
    close(files->folder_fd);
    mem_free(files->folder);
    pthread_mutex_destroy(&files->lock);
    *files = (struct files){0};
}

rsd_status files_add(struct files *files, struct slice name, uint32_t *index)
{
    TRY(check_name(name));
    if (files->n >= UINT32_MAX)
        return fail(RSD_ELIMIT, "more than 2^32 files");
    TRY(GROW(files->list, files->capacity, files->n + 1));
    char *copy = mem_new(name.nbytes + 1, 1);
    if (!copy)
        return RSD_ENOMEM;
    memcpy(copy, name.bytes, name.nbytes);
    *index = (uint32_t)files->n;
    struct one_file *file = &files->list[files->n++];
    *file = (struct one_file){.name = copy};
    for (int k = 0; k < FILE_SLOTS; k++)
        file->slots[k].fd = -1;
    return RSD_OK;
}

static void path_of(const struct files *files, uint32_t index, char path[PATH_NCHARS])
{
    size_t n = strlen(files->folder);
    const char *slash = n == 0 || files->folder[n - 1] == '/' ? "" : "/";
    snprintf(path, PATH_NCHARS, "%s%s%s: ", files->folder, slash, files->list[index].name);
}

rsd_status file_error(const struct files *files, uint32_t index, rsd_status status)
{
    char path[PATH_NCHARS];
    path_of(files, index, path);
    if (strncmp(rsd_error(), path, strlen(path)) == 0)
        return status; /* it was said where it was found */
    return fail_in(status, "%s", path);
}

rsd_status file_error_about(const struct files *files, uint32_t index, const char *name,
                            rsd_status status)
{
    char path[PATH_NCHARS], said[ERROR_NCHARS];
    path_of(files, index, path);
    size_t n = strncmp(rsd_error(), path, strlen(path)) == 0 ? strlen(path) : 0;
    snprintf(said, sizeof said, "%s", rsd_error() + n);
    return fail(status, "%s%.300s: %s", path, name, said);
}

/* ---- opening and closing ---- */

static rsd_status open_failed(int error)
{
    return fail(error == ENOENT ? RSD_ENOENT : RSD_EIO, "%s", strerror(error));
}

/* Threads have descriptors of their own, so that the kernel sees each of them read straight on. */
static int slot_of_thread(void)
{
    static _Atomic unsigned next;
    static _Thread_local int slot = -1;
    if (slot < 0)
        slot = (int)(next++ % FILE_SLOTS);
    return slot;
}

static void close_least_used(struct files *files)
{
    struct file_slot *least = NULL;
    for (size_t i = 0; i < files->n; i++)
        for (int k = 0; k < FILE_SLOTS; k++) {
            struct file_slot *slot = &files->list[i].slots[k];
            if (slot->fd >= 0 && slot->users == 0 && (!least || slot->used_at < least->used_at))
                least = slot;
        }
    if (!least)
        return;
    close(least->fd);
    least->fd = -1;
    files->nopen--;
}

/* The size and time of a file that is read may not change while it is. */
static rsd_status know(struct one_file *file, int fd)
{
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode))
        return fail(RSD_EIO, "no regular file");
    int64_t changed = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
    if (file->known && (file->nbytes != (uint64_t)status.st_size || file->changed != changed))
        return fail(RSD_EIO, "the file was changed while it was read");
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    file->known = true;
    file->nbytes = (uint64_t)status.st_size;
    file->changed = changed;
    return RSD_OK;
}

static rsd_status open_slot(struct files *files, struct one_file *file, struct file_slot *slot)
{
    if (files->nopen >= MOST_OPEN)
        close_least_used(files);
    int how = file->writable ? O_RDWR | O_NOFOLLOW : O_RDONLY;
    int fd = openat(files->folder_fd, file->name, how | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return open_failed(errno);
    rsd_status status = file->writable ? RSD_OK : know(file, fd);
    if (status) {
        close(fd);
        return status;
    }
    slot->fd = fd;
    files->nopen++;
    return RSD_OK;
}

static rsd_status pin(struct files *files, uint32_t index, struct file_slot **out, int *fd,
                      uint64_t *nbytes)
{
    pthread_mutex_lock(&files->lock);
    struct one_file *file = &files->list[index];
    struct file_slot *slot = &file->slots[slot_of_thread()];
    rsd_status status = slot->fd >= 0 ? RSD_OK : open_slot(files, file, slot);
    if (!status) {
        slot->users++;
        slot->used_at = ++files->clock;
        *fd = slot->fd;
        *nbytes = file->nbytes;
        *out = slot;
    }
    pthread_mutex_unlock(&files->lock);
    return status ? file_error(files, index, status) : RSD_OK;
}

static void unpin(struct files *files, struct file_slot *slot)
{
    pthread_mutex_lock(&files->lock);
    slot->users--;
    pthread_mutex_unlock(&files->lock);
}

rsd_status file_nbytes(struct files *files, uint32_t index, uint64_t *nbytes)
{
    struct file_slot *slot;
    int fd;
    TRY(pin(files, index, &slot, &fd, nbytes));
    unpin(files, slot);
    return RSD_OK;
}

rsd_status file_there(const struct files *files, uint32_t index)
{
    struct stat found;
    if (fstatat(files->folder_fd, files->list[index].name, &found, 0) != 0)
        return file_error(files, index, open_failed(errno));
    return RSD_OK;
}

/* ---- reading ---- */

static rsd_status read_all(int fd, uint64_t at, char *out, size_t n)
{
    while (n > 0) {
        ssize_t got = pread(fd, out, n, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail(RSD_EIO, "byte %llu: %s", (unsigned long long)at, strerror(errno));
        if (got == 0)
            return fail(RSD_EIO, "byte %llu: the file ends here, it was cut short",
                        (unsigned long long)at);
        out += got;
        at += (uint64_t)got;
        n -= (size_t)got;
    }
    return RSD_OK;
}

static rsd_status check_range(uint64_t at, uint64_t n, uint64_t nbytes)
{
    if (at <= nbytes && n <= nbytes - at)
        return RSD_OK;
    return fail(RSD_EFORMAT, "bytes %llu to %llu are wanted, the file has %llu",
                (unsigned long long)at, (unsigned long long)(at + n), (unsigned long long)nbytes);
}

rsd_status file_check(struct files *files, uint32_t index, uint64_t at, uint64_t n)
{
    uint64_t nbytes;
    TRY(file_nbytes(files, index, &nbytes));
    rsd_status status = check_range(at, n, nbytes);
    return status ? file_error(files, index, status) : RSD_OK;
}

rsd_status file_read(struct files *files, uint32_t index, uint64_t at, void *out, size_t n)
{
    struct file_slot *slot;
    int fd;
    uint64_t nbytes;
    TRY(pin(files, index, &slot, &fd, &nbytes));
    rsd_status status = check_range(at, n, nbytes);
    if (!status)
        status = read_all(fd, at, out, n);
    unpin(files, slot);
    return status ? file_error(files, index, status) : RSD_OK;
}

rsd_status file_range_read(void *context, uint64_t at, void *out, size_t n)
{
    const struct file_range *range = context;
    return file_read(range->files, range->file, range->offset + at, out, n);
}

rsd_status file_load(struct files *files, uint32_t index, uint64_t most, char **bytes, size_t *n)
{
    uint64_t nbytes;
    TRY(file_nbytes(files, index, &nbytes));
    if (nbytes > most)
        return file_error(files, index,
                          fail(RSD_ELIMIT, "%llu bytes, at most %llu are read",
                               (unsigned long long)nbytes, (unsigned long long)most));
    char *memory = mem_new((size_t)nbytes + 1, 1);
    if (!memory)
        return RSD_ENOMEM;
    rsd_status status = file_read(files, index, 0, memory, (size_t)nbytes);
    if (status) {
        mem_free(memory);
        return status;
    }
    *bytes = memory;
    *n = (size_t)nbytes;
    return RSD_OK;
}

/* ---- writing ---- */

/* Room on a disk is taken at once, so that a full one is noticed early and the file lies in one piece. In
 * memory that would only fill the pages twice. */
static rsd_status reserve(int fd, uint64_t nbytes)
{
    struct statfs system;
    if (nbytes == 0 || fstatfs(fd, &system) != 0 || system.f_type == TMPFS_MAGIC)
        return RSD_OK;
    if (fallocate(fd, 0, 0, (off_t)nbytes) != 0 && (errno == ENOSPC || errno == EFBIG))
        return fail(RSD_EIO, "%s: %llu bytes are needed", strerror(errno),
                    (unsigned long long)nbytes);
    return RSD_OK;
}

/* Cuts a file to its first bytes, which have to be there. */
static rsd_status keep_start(int fd, uint64_t kept)
{
    struct stat about;
    if (fstat(fd, &about) != 0)
        return fail(RSD_EIO, "%s", strerror(errno));
    if ((uint64_t)about.st_size < kept)
        return fail(RSD_EMISMATCH, "%lld bytes, not %llu that could be kept",
                    (long long)about.st_size, (unsigned long long)kept);
    if (ftruncate(fd, (off_t)kept) != 0)
        return fail(RSD_EIO, "%s", strerror(errno));
    return RSD_OK;
}

rsd_status file_create(struct files *files, uint32_t index, uint64_t kept, uint64_t nbytes)
{
    struct one_file *file = &files->list[index];
    int new = kept ? 0 : O_CREAT | O_TRUNC;
    int fd = openat(files->folder_fd, file->name, O_RDWR | new | O_NOFOLLOW | O_CLOEXEC, 0666);
    rsd_status status = RSD_OK;
    if (fd < 0)
        status = fail(RSD_EIO, "%s", strerror(errno));
    else if (kept)
        status = keep_start(fd, kept);
    if (!status)
        status = reserve(fd, nbytes);
    if (fd >= 0 && close(fd) != 0 && !status)
        status = fail(RSD_EIO, "%s", strerror(errno));
    file->writable = true;
    return status ? file_error(files, index, status) : RSD_OK;
}

static rsd_status write_all(int fd, uint64_t at, const char *data, size_t n)
{
    while (n > 0) {
        ssize_t put = pwrite(fd, data, n, (off_t)at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return fail(RSD_EIO, "byte %llu: %s", (unsigned long long)at,
                        put < 0 ? strerror(errno) : "nothing could be written");
        data += put;
        at += (uint64_t)put;
        n -= (size_t)put;
    }
    return RSD_OK;
}

rsd_status file_write(struct files *files, uint32_t index, uint64_t at, const void *data, size_t n)
{
    struct file_slot *slot;
    int fd;
    uint64_t nbytes;
    TRY(pin(files, index, &slot, &fd, &nbytes));
    rsd_status status = write_all(fd, at, data, n);
    if (!status && !files->unsynced && atomic_fetch_add(&slot->unflushed, n) + n >= FLUSH_NBYTES) {
        /* The disk begins now; who waits for it in the end waits less. */
        sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
        atomic_store(&slot->unflushed, 0);
    }
    unpin(files, slot);
    return status ? file_error(files, index, status) : RSD_OK;
}

rsd_status file_sync(struct files *files, uint32_t index)
{
    struct file_slot *slot;
    int fd;
    uint64_t nbytes;
    TRY(pin(files, index, &slot, &fd, &nbytes));
    rsd_status status = fsync(fd) == 0 ? RSD_OK : fail(RSD_EIO, "%s", strerror(errno));
    unpin(files, slot);
    return status ? file_error(files, index, status) : RSD_OK;
}

rsd_status folder_sync(const struct files *files)
{
    if (fsync(files->folder_fd) != 0)
        return fail(RSD_EIO, "%s: %s", files->folder, strerror(errno));
    return RSD_OK;
}
