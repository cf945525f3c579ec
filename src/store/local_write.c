/* local_write.c - the files of a directory, created and written in place. */
#include "local.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

enum { FLUSH_NBYTES = 32 << 20 };

/* Reserves space for bytes of a file, but not in memory, where pages would only be filled twice. EIO: too little space
 * is left. A file system that cannot reserve is not an error. */
static rsd_status reserve_space(int fd, uint64_t offset, uint64_t nbytes)
{
    struct statfs system;
    if (nbytes == 0 || fstatfs(fd, &system) != 0 || system.f_type == TMPFS_MAGIC)
        return RSD_OK;
    if (fallocate(fd, 0, (off_t)offset, (off_t)nbytes) != 0 && (errno == ENOSPC || errno == EFBIG))
        return fail(RSD_EIO, "cannot reserve %llu bytes: %s", (unsigned long long)nbytes,
                    strerror(errno));
    return RSD_OK;
}

rsd_status local_reserve(struct store *store, uint32_t index, uint64_t offset, uint64_t nbytes)
{
    struct local_slot *slot;
    TRY(local_pin_slot(store, index, offset, 0, &slot));
    rsd_status status = reserve_space(slot->fd, offset, nbytes);
    local_unpin_slot(store, slot);
    return status;
}

/* Cuts a file to its first bytes, which must exist. */
static rsd_status cut_file(int fd, uint64_t kept)
{
    struct stat found;
    if (fstat(fd, &found) != 0)
        return local_fail_errno();
    TRY(local_check_own(&found));
    if ((uint64_t)found.st_size < kept)
        return fail(RSD_EMISMATCH, "file has %lld bytes, fewer than the %llu to be kept",
                    (long long)found.st_size, (unsigned long long)kept);
    return ftruncate(fd, (off_t)kept) == 0 ? RSD_OK : local_fail_errno();
}

/* Makes a new file, in the place of any other of its name. Returns -1 and sets errno on failure. */
static int make_file(struct store *store, const char *name)
{
    int directory_fd = local_directory_of(store)->fd, fd;
    if (unlinkat(directory_fd, name, 0) != 0 && errno != ENOENT)
        return -1;
    do
        fd = openat(directory_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    while (fd < 0 && local_close_idle(store));
    return fd;
}

rsd_status local_create(struct store *store, uint32_t index, uint64_t kept, uint64_t nbytes)
{
    (void)nbytes;
    const char *name = store_file_name(store, index);
    int fd = kept ? openat(local_directory_of(store)->fd, name,
                           O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)
                  : make_file(store, name);
    if (fd < 0)
        return local_fail_errno();
    rsd_status status = kept ? cut_file(fd, kept) : RSD_OK;
    if (close(fd) != 0 && !status)
        status = local_fail_errno();
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

rsd_status local_write(struct store *store, uint32_t index, uint64_t offset, const void *data,
                       size_t n)
{
    struct local_file *file = &local_directory_of(store)->files[index];
    struct local_slot *slot;
    TRY(local_pin_slot(store, index, offset, n, &slot));
    rsd_status status = write_all(slot->fd, offset, data, n);
    if (!status && !store->unsynced && atomic_fetch_add(&file->unflushed, n) + n >= FLUSH_NBYTES) {
        /* The disk starts now, so that store_sync waits less. */
        sync_file_range(slot->fd, 0, 0, SYNC_FILE_RANGE_WRITE);
        atomic_store(&file->unflushed, 0);
    }
    local_unpin_slot(store, slot);
    return status;
}

rsd_status local_clone(struct store *store, uint32_t index, uint64_t offset, struct store *from,
                       uint32_t from_index, uint64_t from_offset, uint64_t n)
{
    struct local_slot *slot, *from_slot;
    TRY(local_pin_slot(from, from_index, from_offset, n, &from_slot));
    rsd_status status = local_pin_slot(store, index, offset, n, &slot);
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
        local_unpin_slot(store, slot);
    }
    local_unpin_slot(from, from_slot);
    return status;
}

rsd_status local_sync(struct store *store, uint32_t index)
{
    struct local_slot *slot;
    TRY(local_pin_slot(store, index, 0, 0, &slot));
    rsd_status status = fsync(slot->fd) == 0 ? RSD_OK : local_fail_errno();
    local_unpin_slot(store, slot);
    return status;
}

rsd_status local_sync_names(struct store *store)
{
    if (fsync(local_directory_of(store)->fd) == 0)
        return RSD_OK;
    return fail(RSD_EIO, "%s: %s", store->path, strerror(errno));
}

/* Writes under another name first, so that no reader sees a part of the file. */
rsd_status local_put(struct store *store, const char *name, const void *data, size_t n)
{
    int directory = local_directory_of(store)->fd;
    char temporary[256];
    snprintf(temporary, sizeof temporary, "%s.tmp", name);
    int fd = make_file(store, temporary);
    if (fd < 0)
        return local_fail_errno();
    rsd_status status = write_all(fd, 0, data, n);
    if (!status && fsync(fd) != 0)
        status = local_fail_errno();
    if (close(fd) != 0 && !status)
        status = local_fail_errno();
    if (!status && (renameat(directory, temporary, directory, name) != 0 || fsync(directory) != 0))
        status = local_fail_errno();
    return status;
}

rsd_status local_rename(struct store *store, const char *from, const char *to)
{
    int fd = local_directory_of(store)->fd;
    return renameat(fd, from, fd, to) == 0 ? RSD_OK : local_fail_errno();
}

rsd_status local_remove(struct store *store, const char *name)
{
    return unlinkat(local_directory_of(store)->fd, name, 0) == 0 ? RSD_OK : local_fail_open(errno);
}
