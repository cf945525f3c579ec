/* local_file.c - the files of a directory, opened and read.
 *
 * Files are opened when they are needed, and closed when too many are open. Names come from inside other
 * files, so store_check_name keeps them inside the directory. A link may not lead out of it (local_link.c).
 * A file that is read must be a regular file and may not change: its size and times must stay what they
 * were at first. Bytes are read with pread and never mapped, so that a file that is cut short is an error
 * and not a signal.
 */
#include "local.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

enum { MIN_OPEN = 2, MAX_OPEN = 200 };

struct local_directory *local_directory_of(struct store *store)
{
    return (struct local_directory *)(void *)store;
}

rsd_status local_fail_open(int error)
{
    if (error == EXDEV)
        return fail(RSD_EFORMAT, "link leads out of the checkpoint; not followed unless links are "
                                 "allowed (--follow-links)");
    return fail(error == ENOENT ? RSD_ENOENT : RSD_EIO, "%s", strerror(error));
}

rsd_status local_fail_errno(void)
{
    return fail(RSD_EIO, "%s", strerror(errno));
}

/* ---- the directory ---- */

/* Whether a file system lets one thread at a time write to a file. Those of networks need not. */
static bool has_one_writer(int directory_fd)
{
    struct statfs system;
    if (fstatfs(directory_fd, &system) != 0)
        return false;
    return system.f_type == TMPFS_MAGIC || system.f_type == EXT4_SUPER_MAGIC ||
           system.f_type == XFS_SUPER_MAGIC || system.f_type == BTRFS_SUPER_MAGIC;
}

/* Returns how many files a store may have open: a quarter of what the process may, for there are others. */
static size_t count_max_open(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 4 > MAX_OPEN)
        return MAX_OPEN;
    return limit.rlim_cur / 4 < MIN_OPEN ? (size_t)MIN_OPEN : (size_t)(limit.rlim_cur / 4);
}

rsd_status local_adopt_directory(int fd, const char *path, size_t n, struct store **out)
{
    struct local_directory *directory = mem_new(1, sizeof *directory);
    char *copy = slice_copy((struct slice){path, n});
    if (!directory || !copy) {
        mem_free(directory);
        mem_free(copy);
        close(fd);
        return RSD_ENOMEM;
    }
    directory->fd = fd;
    directory->max_open = count_max_open();
    directory->base =
        (struct store){.ops = &local_store, .path = copy, .one_writer = has_one_writer(fd)};
    pthread_mutex_init(&directory->lock, NULL);
    pthread_cond_init(&directory->unpinned, NULL);
    *out = &directory->base;
    return RSD_OK;
}

/* Opens the directory at a path of n bytes; an empty path is the current directory. */
static rsd_status open_directory(const char *path, size_t n, struct store **out)
{
    char *copy = slice_copy((struct slice){path, n});
    if (!copy)
        return RSD_ENOMEM;
    int fd = open(n ? copy : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rsd_status status = RSD_OK;
    if (fd < 0) {
        status = local_fail_open(errno);
        status = fail_in(status, "%s: ", copy);
    }
    mem_free(copy);
    return status ? status : local_adopt_directory(fd, path, n, out);
}

/* Opens a directory, or the directory of a file, and sets *file then. */
static rsd_status local_open(const char *path, rsd_storage *storage, struct store **store,
                             const char **file)
{
    (void)storage;
    struct stat found;
    const char *slash = strrchr(path, '/');
    *file = NULL;
    if (stat(path, &found) != 0) {
        rsd_status status = local_fail_open(errno);
        return fail_in(status, "%s: ", path);
    }
    if (S_ISDIR(found.st_mode))
        return open_directory(path, strlen(path), store);
    if (!S_ISREG(found.st_mode))
        return fail(RSD_EFORMAT, "%s is neither a regular file nor a directory", path);
    TRY(open_directory(path, slash ? (size_t)(slash - path) + (slash == path) : 0, store));
    local_directory_of(*store)->named = true;
    *file = slash ? slash + 1 : path;
    return RSD_OK;
}

static void local_close(struct store *store)
{
    struct local_directory *directory = local_directory_of(store);
    for (size_t i = 0; i < store->names.n; i++)
        for (int k = 0; k < LOCAL_NSLOTS; k++)
            if (directory->files[i].slots[k].fd >= 0)
                close(directory->files[i].slots[k].fd);
    mem_free(directory->files);
    mem_free(directory->open);
    string_map_drop(&directory->known_identities);
    name_list_drop(&directory->identities);
    close(directory->fd);
    pthread_cond_destroy(&directory->unpinned);
    pthread_mutex_destroy(&directory->lock);
    mem_free(directory);
}

static rsd_status local_add(struct store *store)
{
    struct local_directory *directory = local_directory_of(store);
    TRY(GROW(directory->files, directory->files_capacity, store->names.n + 1));
    struct local_file *file = &directory->files[store->names.n];
    *file = (struct local_file){0};
    for (int k = 0; k < LOCAL_NSLOTS; k++)
        file->slots[k].fd = -1;
    return RSD_OK;
}

/* Opens a file or directory of the directory to read it. */
static int open_reading(const struct local_directory *directory, const char *name, int flags,
                        bool named)
{
    flags |= O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    return named || directory->base.follow_links ? openat(directory->fd, name, flags)
                                                 : local_open_inside(directory->fd, name, flags);
}

/* Says whether an entry is a directory, or a link to one. */
static bool is_directory(int fd, const struct dirent *entry)
{
    struct stat found;
    if (entry->d_type != DT_UNKNOWN && entry->d_type != DT_LNK)
        return entry->d_type == DT_DIR;
    return fstatat(fd, entry->d_name, &found, 0) == 0 && S_ISDIR(found.st_mode);
}

/* Lists a directory below the store; an empty name is the store itself. */
static rsd_status local_list(struct store *store, const char *name, struct store_listing *out)
{
    int fd = open_reading(local_directory_of(store), *name ? name : ".", O_DIRECTORY, false);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream) {
        rsd_status status = local_fail_open(errno);
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

/* Closes the slot that was not used for the longest time. Returns false if all open slots are in use. */
static bool close_least_used(struct local_directory *directory)
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
        return false;
    close(least->fd);
    least->fd = -1;
    directory->open[at] = directory->open[--directory->nopen];
    return true;
}

static int64_t in_nanoseconds(struct timespec time)
{
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Finds out whether a file that is new is another name of one that is known. */
static rsd_status note_identity(struct local_directory *directory, struct local_file *file,
                                const struct stat *found)
{
    const uint64_t numbers[] = {(uint64_t)found->st_dev, (uint64_t)found->st_ino,
                                (uint64_t)found->st_size, (uint64_t)in_nanoseconds(found->st_ctim)};
    struct slice identity = {(const char *)numbers, sizeof numbers};
    struct name_list *identities = &directory->identities;
    size_t ignored;
    file->repeated = string_map_find(&directory->known_identities, identity, &ignored);
    if (file->repeated)
        return RSD_OK;
    TRY(name_list_add(identities, identity));
    return string_map_add(&directory->known_identities, identities->list[identities->n - 1], 0);
}

/* Checks that a file is a regular file, and has not changed since it was first opened. */
static rsd_status check_version(struct local_directory *directory, struct local_file *file,
                                const struct stat *found)
{
    int64_t version = in_nanoseconds(found->st_mtim), changed = in_nanoseconds(found->st_ctim);
    if (!S_ISREG(found->st_mode))
        return fail(RSD_EIO, "not a regular file");
    if (file->known && (file->nbytes != (uint64_t)found->st_size || file->version != version ||
                        file->changed != changed))
        return fail(RSD_EIO, "file changed while it was read");
    if (!file->known && !directory->base.writable)
        TRY(note_identity(directory, file, found));
    file->known = true;
    file->nbytes = (uint64_t)found->st_size;
    file->version = version;
    file->changed = changed;
    return RSD_OK;
}

/* Checks that a file to be written is a regular file with no other name. */
rsd_status local_check_own(const struct stat *found)
{
    if (S_ISREG(found->st_mode) && found->st_nlink == 1)
        return RSD_OK;
    return fail(RSD_EIO, "not a regular file, or a file with several names; not written");
}

/* As local_close_idle, with the lock. */
static bool close_idle_file(struct local_directory *directory)
{
    int error = errno;
    bool closed = (error == EMFILE || error == ENFILE) && close_least_used(directory);
    errno = error;
    return closed;
}

bool local_close_idle(struct store *store)
{
    struct local_directory *directory = local_directory_of(store);
    pthread_mutex_lock(&directory->lock);
    bool closed = close_idle_file(directory);
    pthread_mutex_unlock(&directory->lock);
    return closed;
}

/* Opens a file; if the process has too many files open, after it has closed others. */
static int open_file(struct local_directory *directory, uint32_t index)
{
    const struct store *store = &directory->base;
    const char *name = store_file_name(store, index);
    for (;;) {
        int fd = store->writable
                     ? openat(directory->fd, name,
                              O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)
                     : open_reading(directory, name, 0,
                                    directory->named && index == 0 && !store->links_checked);
        if (fd >= 0 || !close_idle_file(directory))
            return fd;
    }
}

/* Opens a file again in one of its slots. EIO: it is not the version that was opened first. */
static rsd_status open_slot(struct local_directory *directory, uint32_t index,
                            struct local_slot *slot)
{
    bool writable = directory->base.writable;
    struct stat found;
    TRY(GROW(directory->open, directory->open_capacity, directory->nopen + 1));
    int fd = open_file(directory, index);
    if (fd < 0)
        return local_fail_open(errno);
    rsd_status status = RSD_OK;
    if (fstat(fd, &found) != 0)
        status = local_fail_errno();
    else
        status = writable ? local_check_own(&found)
                          : check_version(directory, &directory->files[index], &found);
    if (!status && !writable)
        posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
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
    for (int k = 0; k < LOCAL_NSLOTS; k++) {
        struct local_slot *slot = &file->slots[k];
        if (slot->fd >= 0 && slot->next == offset)
            return slot;
        bool idle = slot->fd >= 0 && slot->nusers == 0;
        if (!best || (best->nusers > 0 && slot->nusers < best->nusers) || (best->fd < 0 && idle))
            best = slot;
    }
    return best;
}

static struct local_slot *find_open_slot(struct local_file *file)
{
    for (int k = 0; k < LOCAL_NSLOTS; k++)
        if (file->slots[k].fd >= 0)
            return &file->slots[k];
    return NULL;
}

/* Chooses a slot of a file, and opens it. If as many are open as may be, shares one of the file, or waits
 * until a slot of another file is idle. */
static rsd_status take_slot(struct local_directory *directory, uint32_t index, uint64_t offset,
                            struct local_slot **out)
{
    for (;;) {
        struct local_slot *slot = choose_slot(&directory->files[index], offset);
        if (slot->fd < 0 && directory->nopen >= directory->max_open &&
            !close_least_used(directory)) {
            struct local_slot *shared = find_open_slot(&directory->files[index]);
            if (!shared) {
                pthread_cond_wait(&directory->unpinned, &directory->lock);
                continue;
            }
            slot = shared;
        }
        *out = slot;
        return slot->fd >= 0 ? RSD_OK : open_slot(directory, index, slot);
    }
}

rsd_status local_pin_slot(struct store *store, uint32_t index, uint64_t offset, uint64_t n,
                          struct local_slot **out)
{
    struct local_directory *directory = local_directory_of(store);
    struct local_slot *slot;
    pthread_mutex_lock(&directory->lock);
    rsd_status status = take_slot(directory, index, offset, &slot);
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

void local_unpin_slot(struct store *store, struct local_slot *slot)
{
    struct local_directory *directory = local_directory_of(store);
    pthread_mutex_lock(&directory->lock);
    if (--slot->nusers == 0)
        pthread_cond_signal(&directory->unpinned);
    pthread_mutex_unlock(&directory->lock);
}

/* ---- reading ---- */

/* Reads the size and times of a file that is not open. */
static rsd_status stat_file(struct local_directory *directory, uint32_t index, struct stat *found)
{
    const char *name = store_file_name(&directory->base, index);
    int result = fstatat(directory->fd, name, found, AT_SYMLINK_NOFOLLOW);
    if (directory->base.writable || (result == 0 && S_ISREG(found->st_mode) && !strchr(name, '/')))
        return result == 0 ? RSD_OK : local_fail_open(errno);
    int fd = open_file(directory, index);
    if (fd < 0)
        return local_fail_open(errno);
    rsd_status status = fstat(fd, found) == 0 ? RSD_OK : local_fail_errno();
    close(fd);
    return status;
}

/* Returns the length and the version of a file. Those of a file that is read are kept. The version is the time that no
 * user can set back, so a run is not resumed with other bytes. */
static rsd_status local_stat(struct store *store, uint32_t index, uint64_t *nbytes,
                             int64_t *version)
{
    struct local_directory *directory = local_directory_of(store);
    struct local_file *file = &directory->files[index];
    struct stat found;
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&directory->lock);
    if (store->writable)
        file->known = false;
    if (!file->known) {
        status = stat_file(directory, index, &found);
        if (!status)
            status = check_version(directory, file, &found);
    }
    if (!status) {
        *nbytes = file->nbytes;
        *version = file->changed;
    }
    pthread_mutex_unlock(&directory->lock);
    return status;
}

static bool local_repeats(struct store *store, uint32_t index)
{
    struct local_directory *directory = local_directory_of(store);
    pthread_mutex_lock(&directory->lock);
    bool repeated = directory->files[index].repeated;
    pthread_mutex_unlock(&directory->lock);
    return repeated;
}

/* Reads n bytes. EIO: the file has fewer. */
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

/* Checks a file that was read once more: bytes of two versions must not come together. */
static rsd_status check_unchanged(struct store *store, uint32_t index, int fd)
{
    struct local_directory *directory = local_directory_of(store);
    struct stat found;
    if (fstat(fd, &found) != 0)
        return local_fail_errno();
    pthread_mutex_lock(&directory->lock);
    rsd_status status = check_version(directory, &directory->files[index], &found);
    pthread_mutex_unlock(&directory->lock);
    return status;
}

enum {
    JOINED_NBYTES = 4096
}; /* a file has them in one page, which a read of one byte brings too */

/* Reads the first run, and with it those behind it that are close to it. Returns how many in *nread. */
static rsd_status read_close_runs(int fd, const struct store_run *runs, size_t nruns, size_t *nread)
{
    char joined[JOINED_NBYTES];
    const uint64_t begin = runs[0].offset;
    uint64_t nbytes = runs[0].n;
    size_t n = 1;
    for (; n < nruns && nbytes <= sizeof joined && runs[n].offset >= begin; n++) {
        uint64_t end = runs[n].offset - begin + runs[n].n;
        if (end > sizeof joined)
            break;
        nbytes = end > nbytes ? end : nbytes;
    }
    *nread = n;
    if (n == 1)
        return read_all(fd, begin, runs[0].out, runs[0].n);
    TRY(read_all(fd, begin, joined, (size_t)nbytes));
    for (size_t i = 0; i < n; i++)
        memcpy(runs[i].out, joined + (runs[i].offset - begin), runs[i].n);
    return RSD_OK;
}

/* Checks that the file has not changed once, behind the last run: that takes half as long as to read 4 KiB. */
static rsd_status local_read_runs(struct store *store, uint32_t index, const struct store_run *runs,
                                  size_t nruns)
{
    struct local_slot *slot;
    uint64_t begin = UINT64_MAX, end = 0;
    for (size_t i = 0; i < nruns; i++) {
        uint64_t run_end = runs[i].offset + runs[i].n;
        begin = runs[i].offset < begin ? runs[i].offset : begin;
        end = run_end > end ? run_end : end;
    }
    TRY(local_pin_slot(store, index, begin, end - begin, &slot));
    rsd_status status = RSD_OK;
    for (size_t i = 0, n; i < nruns && !status; i += n)
        status = read_close_runs(slot->fd, runs + i, nruns - i, &n);
    if (!status && !store->writable)
        status = check_unchanged(store, index, slot->fd);
    local_unpin_slot(store, slot);
    return status;
}

static rsd_status local_read(struct store *store, uint32_t index, uint64_t offset, void *out,
                             size_t n)
{
    return local_read_runs(store, index, &(struct store_run){offset, out, n}, 1);
}

const struct store_ops local_store = {.random_write = true,
                                      .open = local_open,
                                      .close = local_close,
                                      .add = local_add,
                                      .list = local_list,
                                      .stat = local_stat,
                                      .repeats = local_repeats,
                                      .read = local_read,
                                      .read_runs = local_read_runs,
                                      .create = local_create,
                                      .reserve = local_reserve,
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
