/* shared.c - memory that the other processes of a host can see.
 *
 * A segment is a memfd: it needs no room in /dev/shm, has no name that could be left behind, and vanishes
 * with its last user. Its pages are allocated when it is made, so that a write never meets a full machine,
 * and it is sealed, so that nobody can shorten it under a reader. A peer opens it through /proc, and knows
 * by the number on its first page that it is the right one.
 *
 *     | first page: number, length | what the owner puts there ...
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

static rsd_status refuse(const char *what)
{
    return fail(RSD_EIO, "%s: %s", what, strerror(errno));
}

/* A segment that did not come about. */
static void abandon(struct shared_segment *segment)
{
    if (segment->base)
        munmap(segment->base, segment->nbytes);
    close(segment->fd);
    *segment = (struct shared_segment){0};
}

static rsd_status map(int fd, size_t nbytes, struct shared_segment *segment)
{
    void *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED)
        return refuse("mmap of shared memory");
    segment->base = base;
    segment->nbytes = nbytes;
    return RSD_OK;
}

/* The kernel would promise more than there is, and then kill somebody. */
static rsd_status check_room(size_t nbytes)
{
    uint64_t left = memory_available("/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup");
    if (nbytes <= left)
        return RSD_OK;
    return fail(RSD_ENOMEM, "%zu bytes of shared memory, and %llu are left", nbytes,
                (unsigned long long)left);
}

static rsd_status fill_new(struct shared_segment *segment, size_t nbytes)
{
    uint64_t number;
    int error = posix_fallocate(segment->fd, 0, (off_t)nbytes);
    if (error) {
        errno = error;
        return fail(RSD_ENOMEM, "%zu bytes of shared memory: %s", nbytes, strerror(error));
    }
    if (fcntl(segment->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return refuse("sealing shared memory");
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number)
        return refuse("getrandom");
    TRY(map(segment->fd, nbytes, segment));
    *(struct first_page *)(void *)segment->base = (struct first_page){number, nbytes};
    return RSD_OK;
}

rsd_status shared_segment_new(size_t nbytes, struct shared_segment *segment)
{
    if (nbytes > INT64_MAX - 2 * PAGE)
        return fail(RSD_ELIMIT, "%zu bytes of shared memory are too many", nbytes);
    nbytes = PAGE + (nbytes + PAGE - 1) / PAGE * PAGE;
    TRY(check_room(nbytes));
    *segment =
        (struct shared_segment){.fd = memfd_create("reshard", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    if (segment->fd < 0)
        return refuse("memfd_create");
    rsd_status status = fill_new(segment, nbytes);
    if (status)
        abandon(segment);
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

static rsd_status open_checked(const struct shared_segment_name *name,
                               struct shared_segment *segment)
{
    struct stat stat;
    if (fstat(segment->fd, &stat) || stat.st_size < PAGE || (uint64_t)stat.st_size != name->nbytes)
        return fail(RSD_EPEER, "its shared memory has not the length it says");
    TRY(map(segment->fd, (size_t)stat.st_size, segment));
    const struct first_page *first = (const void *)segment->base;
    if (first->number != name->number)
        return fail(RSD_EPEER, "what is at the place of its shared memory is something else");
    return RSD_OK;
}

rsd_status shared_segment_open(const struct shared_segment_name *name,
                               struct shared_segment *segment)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)name->pid, (int)name->fd);
    *segment = (struct shared_segment){.fd = open(path, O_RDWR | O_CLOEXEC)};
    if (segment->fd < 0)
        return refuse(path);
    rsd_status status = open_checked(name, segment);
    if (status) {
        abandon(segment);
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
        return fail(RSD_EINVAL, "an arena of %lld bytes", (long long)nbytes);
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
        return fail(RSD_EINVAL, "%lld bytes of an arena", (long long)nbytes);
    if ((uint64_t)nbytes > capacity)
        return fail(RSD_ENOMEM, "the arena has %llu bytes left, %lld are asked for",
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
