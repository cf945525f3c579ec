/* shared.c - memory that the processes of a host share.
 *
 * A segment is a memfd: it needs no space in /dev/shm, has no name that could be left behind, and vanishes with its
 * last user. Its pages are allocated when it is made, so that a later write cannot fail. It is sealed, so that no
 * process can shorten it while another reads. Another process opens it through /proc, and recognizes it by the number
 * on its first page.
 *
 *     | first page: number, length | data ...
 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = 4096 };

struct first_page {
    uint64_t number, nbytes;
};

/* ---- segments ---- */

static rsd_status fail_system_call(const char *what)
{
    return fail(RSD_EIO, "%s: %s", what, strerror(errno));
}

/* Undoes a segment that could not be made or opened. */
static void undo_segment(struct shared_segment *segment)
{
    if (segment->base)
        munmap(segment->base, segment->nbytes);
    close(segment->fd);
    *segment = (struct shared_segment){0};
}

static rsd_status map_segment(int fd, size_t nbytes, struct shared_segment *segment)
{
    void *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED)
        return fail_system_call("mmap");
    segment->base = base;
    segment->nbytes = nbytes;
    return RSD_OK;
}

/* The kernel would grant more than it has, and kill a process later. */
static rsd_status check_available(size_t nbytes)
{
    uint64_t available = memory_available("/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup");
    if (nbytes <= available)
        return RSD_OK;
    return fail(RSD_ENOMEM, "cannot allocate %zu bytes of shared memory: %llu available", nbytes,
                (unsigned long long)available);
}

/* Allocates, seals and maps a new segment, and writes its first page. */
static rsd_status fill_segment_file(struct shared_segment *segment, size_t nbytes)
{
    uint64_t number;
    int error = posix_fallocate(segment->fd, 0, (off_t)nbytes);
    if (error) {
        errno = error;
        return fail(RSD_ENOMEM, "cannot allocate %zu bytes of shared memory: %s", nbytes,
                    strerror(error));
    }
    if (fcntl(segment->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return fail_system_call("fcntl(F_ADD_SEALS)");
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number)
        return fail_system_call("getrandom");
    TRY(map_segment(segment->fd, nbytes, segment));
    *(struct first_page *)(void *)segment->base = (struct first_page){number, nbytes};
    return RSD_OK;
}

rsd_status shared_segment_new(size_t nbytes, struct shared_segment *segment)
{
    if (nbytes > INT64_MAX - 2 * PAGE)
        return fail(RSD_ELIMIT, "%zu bytes are too many for shared memory", nbytes);
    nbytes = PAGE + (nbytes + PAGE - 1) / PAGE * PAGE;
    TRY(check_available(nbytes));
    *segment =
        (struct shared_segment){.fd = memfd_create("reshard", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    if (segment->fd < 0)
        return fail_system_call("memfd_create");
    rsd_status status = fill_segment_file(segment, nbytes);
    if (status)
        undo_segment(segment);
    return status;
}

struct shared_segment_name shared_segment_name(const struct shared_segment *segment)
{
    struct shared_segment_name name = {0};
    if (!segment->base)
        return name;
    const struct first_page *first = (const void *)segment->base;
    return (struct shared_segment_name){.number = first->number,
                                        .nbytes = segment->nbytes,
                                        .pid = (int32_t)getpid(),
                                        .fd = segment->fd};
}

/* Maps a segment of another process. EPEER: it is not the one that was announced. */
static rsd_status check_segment(const struct shared_segment_name *name,
                                struct shared_segment *segment)
{
    struct stat stat;
    int seals = fcntl(segment->fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) /* else a read could end this process */
        return fail(RSD_EPEER, "the file is not the shared memory that was announced");
    if (fstat(segment->fd, &stat) || stat.st_size < PAGE || (uint64_t)stat.st_size != name->nbytes)
        return fail(RSD_EPEER, "shared memory has another length than announced");
    TRY(map_segment(segment->fd, (size_t)stat.st_size, segment));
    const struct first_page *first = (const void *)segment->base;
    if (first->number != name->number)
        return fail(RSD_EPEER, "the file is not the shared memory that was announced");
    return RSD_OK;
}

rsd_status shared_segment_open(const struct shared_segment_name *name,
                               struct shared_segment *segment)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)name->pid, (int)name->fd);
    *segment = (struct shared_segment){.fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK)};
    if (segment->fd < 0)
        return fail_system_call(path);
    rsd_status status = check_segment(name, segment);
    if (status) {
        undo_segment(segment);
        return status;
    }
    close(segment->fd); /* the mapping is enough */
    segment->fd = -1;
    return RSD_OK;
}

void shared_segment_drop(struct shared_segment *segment)
{
    if (!segment->base)
        return;
    munmap(segment->base, segment->nbytes);
    if (segment->fd >= 0)
        close(segment->fd);
    *segment = (struct shared_segment){0};
}

char *shared_segment_data(const struct shared_segment *segment)
{
    return segment->base + PAGE;
}

uint64_t shared_segment_capacity(const struct shared_segment *segment)
{
    return segment->base ? segment->nbytes - PAGE : 0;
}

/* ---- arenas ---- */

struct rsd_arena {
    struct shared_segment segment;
    size_t used;
};

rsd_status rsd_arena_new(int64_t nbytes, rsd_arena **arena)
{
    if (nbytes < 0)
        return fail(RSD_EINVAL, "invalid size of an arena: %lld bytes", (long long)nbytes);
    rsd_arena *made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    rsd_status status = shared_segment_new((size_t)nbytes, &made->segment);
    if (status)
        mem_free(made);
    else
        *arena = made;
    return status;
}

rsd_status rsd_arena_alloc(rsd_arena *arena, int64_t nbytes, void **memory)
{
    uint64_t capacity = shared_segment_capacity(&arena->segment) - arena->used;
    if (nbytes < 0)
        return fail(RSD_EINVAL, "invalid size of an array: %lld bytes", (long long)nbytes);
    if ((uint64_t)nbytes > capacity)
        return fail(RSD_ENOMEM, "the arena is full: %llu bytes left, %lld requested",
                    (unsigned long long)capacity, (long long)nbytes);
    *memory = shared_segment_data(&arena->segment) + arena->used;
    arena->used += (size_t)min_i64((nbytes + 63) / 64 * 64, (int64_t)capacity);
    return RSD_OK;
}

void rsd_arena_clear(rsd_arena *arena)
{
    arena->used = 0;
}

void rsd_arena_free(rsd_arena *arena)
{
    if (!arena)
        return;
    shared_segment_drop(&arena->segment);
    mem_free(arena);
}

const struct shared_segment *arena_segment(const rsd_arena *arena)
{
    return &arena->segment;
}
