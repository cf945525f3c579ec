/* local_file.c - the files of a directory, read and written in place.
 *
 * Files are opened when they are needed, and closed when too many are open. Names come from inside other
 * files, so store_check_name keeps them inside the directory; a name may be a link, as in a cache of
 * downloads. A file that is read must be a regular file and may not change: its size and time must stay
 * what they were at first. Bytes are read with pread and never mapped, so that a file that is cut short is
 * an error and not a signal.
 */
#include "local.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

enum { NSLOTS = 4, MAX_OPEN = 200, FLUSH_NBYTES = 32 << 20 };

/* An open descriptor. A file has several, because the kernel reads ahead for each of them: one for each
 * run of reads in which the next begins where the last ended. */
struct local_slot {
    int fd; /* -1: not open */
    int nusers;
    uint64_t next; /* where the last read or write ended */
    uint64_t used_at;
};

struct local_file {
    bool known; /* its size and version below were read */
    uint64_t nbytes;
    int64_t version; /* time of the last change, in nanoseconds */
    _Atomic uint64_t unflushed;
    struct local_slot slots[NSLOTS];
};

/* A slot that has an open descriptor. */
struct open_slot {
    uint32_t file;
    int slot;
};

struct local_directory {
    struct store base;
    int fd;
    pthread_mutex_t lock; /* for what follows, and for slots and sizes of files */
    struct local_file *files;
    size_t files_capacity;
    struct open_slot *open; /* so that one of many files is found without a look at all */
    size_t nopen, open_capacity;
    uint64_t clock;
};

static struct local_directory *directory_of(struct store *store)
{
    return (struct local_directory *)(void *)store;
}

static rsd_status fail_open(int error)
{
    return fail(error == ENOENT ? RSD_ENOENT : RSD_EIO, "%s", strerror(error));
}

static rsd_status fail_errno(void)
{
    return fail(RSD_EIO, "%s", strerror(errno));
}

/* ---- the directory ---- */

rsd_status local_open_directory(const char *path, size_t n, struct store **out)
{
    struct local_directory *directory = mem_new(1, sizeof *directory);
    char *copy = mem_new(n + 1, 1);
    if (!directory || !copy) {
        mem_free(directory);
        mem_free(copy);
        return RSD_ENOMEM;
    }
    memcpy(copy, path, n);
    directory->fd = open(n ? copy : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory->fd < 0) {
        rsd_status status = fail_open(errno);
        status = fail_in(status, "%s: ", copy);
        mem_free(directory);
        mem_free(copy);
        return status;
    }
    directory->base = (struct store){.ops = &local_store, .path = copy};
    pthread_mutex_init(&directory->lock, NULL);
    *out = &directory->base;
    return RSD_OK;
}

static rsd_status local_open(const char *path, rsd_storage *storage, struct store **store,
                             const char **file)
{
    (void)storage;
    struct stat found;
    const char *slash = strrchr(path, '/');
    *file = NULL;
    if (stat(path, &found) != 0) {
        rsd_status status = fail_open(errno);
        return fail_in(status, "%s: ", path);
    }
    if (S_ISDIR(found.st_mode))
        return local_open_directory(path, strlen(path), store);
    if (!S_ISREG(found.st_mode))
        return fail(RSD_EFORMAT, "%s is neither a regular file nor a directory", path);
    *file = slash ? slash + 1 : path;
    return local_open_directory(path, slash ? (size_t)(slash - path) + (slash == path) : 0, store);
}

static void local_close(struct store *store)
{
    struct local_directory *directory = directory_of(store);
    for (size_t i = 0; i < store->names.n; i++)
        for (int k = 0; k < NSLOTS; k++)
            if (directory->files[i].slots[k].fd >= 0)
                close(directory->files[i].slots[k].fd);
    mem_free(directory->files);
    mem_free(directory->open);
    close(directory->fd);
    pthread_mutex_destroy(&directory->lock);
    mem_free(directory);
}

static rsd_status local_add(struct store *store)
{
    struct local_directory *directory = directory_of(store);
    TRY(GROW(directory->files, directory->files_capacity, store->names.n + 1));
    struct local_file *file = &directory->files[store->names.n];
    *file = (struct local_file){0};
    for (int k = 0; k < NSLOTS; k++)
        file->slots[k].fd = -1;
    return RSD_OK;
}

/* Says whether an entry is a directory, or a link to one. */
static bool is_directory(int fd, const struct dirent *entry)
{
    struct stat found;
    if (entry->d_type != DT_UNKNOWN && entry->d_type != DT_LNK)
        return entry->d_type == DT_DIR;
    return fstatat(fd, entry->d_name, &found, 0) == 0 && S_ISDIR(found.st_mode);
}

static rsd_status local_list(struct store *store, const char *name, struct store_listing *out)
{
    int fd =
        openat(directory_of(store)->fd, *name ? name : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream) {
        rsd_status status = fail_open(errno);
        if (fd >= 0)
            close(fd);
        return status;
    }
    rsd_status status = RSD_OK;
    for (struct dirent *entry; !status && (entry = readdir(stream));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = store_listing_add(out, name, entry->d_name, is_directory(fd, entry));
    closedir(stream);
    return status;
}

/* ---- descriptors; the directory is locked ---- */

static void close_least_used(struct local_directory *directory)
{
    struct local_slot *least = NULL;
    size_t at = 0;
    for (size_t i = 0; i < directory->nopen; i++) {
        const struct open_slot *open = &directory->open[i];
        struct local_slot *slot = &directory->files[open->file].slots[open->slot];
        if (slot->nusers == 0 && (!least || slot->used_at < least->used_at)) {
            least = slot;
            at = i;
        }
    }
    if (!least)
        return;
    close(least->fd);
    least->fd = -1;
    directory->open[at] = directory->open[--directory->nopen];
}

/* Checks that a file is a regular file, and has not changed since it was first opened. */
static rsd_status check_version(struct local_file *file, const struct stat *found)
{
    int64_t version = (int64_t)found->st_mtim.tv_sec * 1000000000 + found->st_mtim.tv_nsec;
    if (!S_ISREG(found->st_mode))
        return fail(RSD_EIO, "not a regular file");
    if (file->known && (file->nbytes != (uint64_t)found->st_size || file->version != version))
        return fail(RSD_EIO, "file changed while it was read");
    file->known = true;
    file->nbytes = (uint64_t)found->st_size;
    file->version = version;
    return RSD_OK;
}

static rsd_status open_slot(struct local_directory *directory, uint32_t index,
                            struct local_slot *slot)
{
    const struct store *store = &directory->base;
    struct stat found;
    if (directory->nopen >= MAX_OPEN)
        close_least_used(directory);
    TRY(GROW(directory->open, directory->open_capacity, directory->nopen + 1));
    int how = store->writable ? O_RDWR | O_NOFOLLOW : O_RDONLY;
    int fd = openat(directory->fd, store_file_name(store, index),
                    how | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return fail_open(errno);
    rsd_status status = RSD_OK;
    if (!store->writable) {
        status =
            fstat(fd, &found) != 0 ? fail_errno() : check_version(&directory->files[index], &found);
        posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    if (status) {
        close(fd);
        return status;
    }
    slot->fd = fd;
    directory->open[directory->nopen++] =
        (struct open_slot){index, (int)(slot - directory->files[index].slots)};
    return RSD_OK;
}

/* The slot that ended where this read begins; else one that is open and idle; else one that is not open. */
static struct local_slot *choose_slot(struct local_file *file, uint64_t offset)
{
    struct local_slot *best = NULL;
    for (int k = 0; k < NSLOTS; k++) {
        struct local_slot *slot = &file->slots[k];
        if (slot->fd >= 0 && slot->next == offset)
            return slot;
        bool idle = slot->fd >= 0 && slot->nusers == 0;
        if (!best || (best->nusers > 0 && slot->nusers < best->nusers) || (best->fd < 0 && idle))
            best = slot;
    }
    return best;
}

/* Opens a file for n bytes from an offset on, and keeps it open until unpin_slot. */
static rsd_status pin_slot(struct store *store, uint32_t index, uint64_t offset, uint64_t n,
                           struct local_slot **out)
{
    struct local_directory *directory = directory_of(store);
    pthread_mutex_lock(&directory->lock);
    struct local_slot *slot = choose_slot(&directory->files[index], offset);
    rsd_status status = slot->fd >= 0 ? RSD_OK : open_slot(directory, index, slot);
    if (!status && !store->writable)
        status = store_check_bounds(offset, n, directory->files[index].nbytes);
    if (!status) {
        slot->nusers++;
        slot->next = offset + n;
        slot->used_at = ++directory->clock;
        *out = slot;
    }
    pthread_mutex_unlock(&directory->lock);
    return status;
}

static void unpin_slot(struct store *store, struct local_slot *slot)
{
    pthread_mutex_lock(&directory_of(store)->lock);
    slot->nusers--;
    pthread_mutex_unlock(&directory_of(store)->lock);
}

/* ---- reading ---- */

static rsd_status local_stat(struct store *store, uint32_t index, uint64_t *nbytes,
                             int64_t *version)
{
    struct local_directory *directory = directory_of(store);
    struct local_file *file = &directory->files[index];
    struct stat found;
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&directory->lock);
    if (store->writable)
        file->known = false;
    if (!file->known) {
        int flags = store->writable ? AT_SYMLINK_NOFOLLOW : 0;
        status = fstatat(directory->fd, store_file_name(store, index), &found, flags) != 0
                     ? fail_open(errno)
                     : check_version(file, &found);
    }
    if (!status) {
        *nbytes = file->nbytes;
        *version = file->version;
    }
    pthread_mutex_unlock(&directory->lock);
    return status;
}

static rsd_status read_all(int fd, uint64_t offset, char *out, size_t n)
{
    while (n > 0) {
        ssize_t some = pread(fd, out, n, (off_t)offset);
        if (some < 0 && errno == EINTR)
            continue;
        if (some < 0)
            return fail(RSD_EIO, "byte %llu: %s", (unsigned long long)offset, strerror(errno));
        if (some == 0)
            return fail(RSD_EIO, "byte %llu: file was truncated while it was read",
                        (unsigned long long)offset);
        out += some;
        offset += (uint64_t)some;
        n -= (size_t)some;
    }
    return RSD_OK;
}

static rsd_status local_read(struct store *store, uint32_t index, uint64_t offset, void *out,
                             size_t n)
{
    struct local_slot *slot;
    TRY(pin_slot(store, index, offset, n, &slot));
    rsd_status status = read_all(slot->fd, offset, out, n);
    unpin_slot(store, slot);
    return status;
}

/* ---- writing ---- */

/* Reserves space on a disk, so that a full one is noticed early and the file lies in one piece. A file in
 * memory would only have its pages filled twice. */
static rsd_status reserve_space(int fd, uint64_t nbytes)
{
    struct statfs system;
    if (nbytes == 0 || fstatfs(fd, &system) != 0 || system.f_type == TMPFS_MAGIC)
        return RSD_OK;
    if (fallocate(fd, 0, 0, (off_t)nbytes) != 0 && (errno == ENOSPC || errno == EFBIG))
        return fail(RSD_EIO, "cannot reserve %llu bytes: %s", (unsigned long long)nbytes,
                    strerror(errno));
    return RSD_OK;
}

/* Cuts a file to its first bytes, which must exist. */
static rsd_status cut_file(int fd, uint64_t kept)
{
    struct stat found;
    if (fstat(fd, &found) != 0)
        return fail_errno();
    if ((uint64_t)found.st_size < kept)
        return fail(RSD_EMISMATCH, "file has %lld bytes, fewer than the %llu to be kept",
                    (long long)found.st_size, (unsigned long long)kept);
    return ftruncate(fd, (off_t)kept) == 0 ? RSD_OK : fail_errno();
}

static rsd_status local_create(struct store *store, uint32_t index, uint64_t kept, uint64_t nbytes)
{
    int new = kept ? 0 : O_CREAT | O_TRUNC;
    int fd = openat(directory_of(store)->fd, store_file_name(store, index),
                    O_RDWR | new | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
        return fail_errno();
    rsd_status status = kept ? cut_file(fd, kept) : RSD_OK;
    if (!status)
        status = reserve_space(fd, nbytes);
    if (close(fd) != 0 && !status)
        status = fail_errno();
    return status;
}

static rsd_status write_all(int fd, uint64_t offset, const char *data, size_t n)
{
    while (n > 0) {
        ssize_t some = pwrite(fd, data, n, (off_t)offset);
        if (some < 0 && errno == EINTR)
            continue;
        if (some <= 0)
            return fail(RSD_EIO, "byte %llu: %s", (unsigned long long)offset,
                        some < 0 ? strerror(errno) : "no byte was written");
        data += some;
        offset += (uint64_t)some;
        n -= (size_t)some;
    }
    return RSD_OK;
}

static rsd_status local_write(struct store *store, uint32_t index, uint64_t offset,
                              const void *data, size_t n)
{
    struct local_file *file = &directory_of(store)->files[index];
    struct local_slot *slot;
    TRY(pin_slot(store, index, offset, n, &slot));
    rsd_status status = write_all(slot->fd, offset, data, n);
    if (!status && !store->unsynced && atomic_fetch_add(&file->unflushed, n) + n >= FLUSH_NBYTES) {
        /* The disk starts now, so that store_sync waits less. */
        sync_file_range(slot->fd, 0, 0, SYNC_FILE_RANGE_WRITE);
        atomic_store(&file->unflushed, 0);
    }
    unpin_slot(store, slot);
    return status;
}

static rsd_status local_clone(struct store *store, uint32_t index, uint64_t offset,
                              struct store *from, uint32_t from_index, uint64_t from_offset,
                              uint64_t n)
{
    struct local_slot *slot, *from_slot;
    TRY(pin_slot(from, from_index, from_offset, n, &from_slot));
    rsd_status status = pin_slot(store, index, offset, n, &slot);
    if (!status) {
        struct file_clone_range range = {.src_fd = from_slot->fd,
                                         .src_offset = from_offset,
                                         .src_length = n,
                                         .dest_offset = offset};
        if (ioctl(slot->fd, FICLONERANGE, &range) != 0)
            status =
                errno == ENOSPC || errno == EIO || errno == EDQUOT
                    ? fail(RSD_EIO, "byte %llu: %s", (unsigned long long)offset, strerror(errno))
                    : fail(RSD_EUNSUPPORTED, "%s and %s cannot share extents: %s", from->path,
                           store->path, strerror(errno));
        unpin_slot(store, slot);
    }
    unpin_slot(from, from_slot);
    return status;
}

static rsd_status local_sync(struct store *store, uint32_t index)
{
    struct local_slot *slot;
    TRY(pin_slot(store, index, 0, 0, &slot));
    rsd_status status = fsync(slot->fd) == 0 ? RSD_OK : fail_errno();
    unpin_slot(store, slot);
    return status;
}

static rsd_status local_sync_names(struct store *store)
{
    if (fsync(directory_of(store)->fd) == 0)
        return RSD_OK;
    return fail(RSD_EIO, "%s: %s", store->path, strerror(errno));
}

/* Writes under another name first, so that no reader sees a part of the file. */
static rsd_status local_put(struct store *store, const char *name, const void *data, size_t n)
{
    int directory = directory_of(store)->fd;
    char temporary[256];
    snprintf(temporary, sizeof temporary, "%s.tmp", name);
    int fd =
        openat(directory, temporary, O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
        return fail_errno();
    rsd_status status = write_all(fd, 0, data, n);
    if (!status && fsync(fd) != 0)
        status = fail_errno();
    if (close(fd) != 0 && !status)
        status = fail_errno();
    if (!status && (renameat(directory, temporary, directory, name) != 0 || fsync(directory) != 0))
        status = fail_errno();
    return status;
}

static rsd_status local_rename(struct store *store, const char *from, const char *to)
{
    int fd = directory_of(store)->fd;
    return renameat(fd, from, fd, to) == 0 ? RSD_OK : fail_errno();
}

static rsd_status local_remove(struct store *store, const char *name)
{
    return unlinkat(directory_of(store)->fd, name, 0) == 0 ? RSD_OK : fail_open(errno);
}

const struct store_ops local_store = {.random_write = true,
                                      .open = local_open,
                                      .close = local_close,
                                      .add = local_add,
                                      .list = local_list,
                                      .stat = local_stat,
                                      .read = local_read,
                                      .create = local_create,
                                      .write = local_write,
                                      .clone = local_clone,
                                      .sync = local_sync,
                                      .sync_names = local_sync_names,
                                      .put = local_put,
                                      .rename = local_rename,
                                      .remove = local_remove,
                                      .open_output = local_open_output,
                                      .check_output = local_check_output,
                                      .commit = local_commit,
                                      .close_output = local_close_output};
