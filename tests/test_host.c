/* test_host.c - the available memory of the host, arenas that exceed it, the number of the host when no file
 * descriptor is free, and files that are not shared memory. */
#include "folder.h"
#include "memory.h"
#include "tap.h"

#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

static void put(const char *name, const char *text)
{
    FILE *file = fopen(path_in(folder, name), "w");
    if (CHECK(file != NULL, "%s", name)) {
        fputs(text, file);
        fclose(file);
    }
}

static uint64_t left(void)
{
    return memory_available(path_in(folder, "meminfo"), path_in(folder, "cgroup"), folder);
}

static void machine(void)
{
    CASE("the memory and the swap of the machine");
    CHECK(left() == UINT64_MAX);
    put("meminfo", "MemTotal:       900 kB\nMemFree:        100 kB\n");
    CHECK(left() == UINT64_MAX);
    put("meminfo", "MemTotal:       900 kB\nMemAvailable:   300 kB\nSwapTotal:  50 kB\n");
    CHECK(left() == 300 * 1024);
    put("meminfo", "MemAvailable:   300 kB\nSwapFree:         20 kB\n");
    CHECK(left() == 320 * 1024);
}

static void groups(void)
{
    CASE("a cgroup of the process, or a parent of it, may have a lower limit");
    mkdir(path_in(folder, "a"), 0700);
    mkdir(path_in(folder, "a/b"), 0700);
    put("cgroup", "4:memory:/x\n0::/a/b\n");
    CHECK(left() == 320 * 1024);
    put("a/b/memory.max", "max\n");
    put("a/b/memory.current", "5000\n");
    CHECK(left() == 320 * 1024);
    put("a/b/memory.max", "7000\n");
    CHECK(left() == 2000, "%llu", (unsigned long long)left());
    put("a/b/memory.stat", "anon 3000\nfile 2000\ninactive_file 700\nactive_file 1000\n");
    CHECK(left() == 3700, "%llu", (unsigned long long)left());
    put("a/memory.max", "6000\n");
    put("a/memory.current", "6100\n");
    CHECK(left() == 0);
    put("cgroup", "0::/elsewhere\n");
    CHECK(left() == 320 * 1024);
    put("memory.max", "100\n");
    put("memory.current", "30\n");
    CHECK(left() == 70);
    put("cgroup", "0::/\n");
    CHECK(left() == 70);
    put("cgroup", "10::/a\n");
    CHECK(left() == 320 * 1024);
}

/* Arenas that exceed the memory are refused before anything is allocated. */
static void arenas(void)
{
    CASE("an arena larger than the memory is refused, and the error has both sizes");
    rsd_arena *arena = NULL;
    if (memory_available("/proc/meminfo", "", "") > (uint64_t)1 << 49)
        return;
    FAILS(RSD_ENOMEM, "cannot allocate 1125899906846720 bytes of shared memory: ",
          rsd_arena_new((int64_t)1 << 50, &arena));
    FAILS(RSD_ENOMEM, " available", rsd_arena_new(INT64_MAX / 2, &arena));
    CHECK(arena == NULL);
    OK(rsd_arena_new(1000, &arena));
    rsd_arena_free(arena);
}

static void no_descriptors(void)
{
    CASE("without a free descriptor the host has the same number, and the error names the cause");
    struct rlimit before, none;
    rsd_arena *arena = NULL;
    int64_t node = host_number();
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = (struct rlimit){0, before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK(host_number() == node);
    FAILS(RSD_EIO, "memfd_create: Too many open files", rsd_arena_new(1000, &arena));
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

/* The name of a segment comes from another rank, which may name any of its files. */
static void other_files(void)
{
    CASE("a file that could be shortened is not opened as shared memory");
    struct shared_segment segment = {0};
    uint64_t first[512] = {7, sizeof first};
    FILE *file = fopen(path_in(folder, "segment"), "w+b");
    if (!CHECK(file != NULL))
        return;
    CHECK(fwrite(first, sizeof first, 1, file) == 1 && fflush(file) == 0);
    struct shared_segment_name name = {
        .number = 7, .nbytes = sizeof first, .pid = (int32_t)getpid(), .fd = fileno(file)};
    FAILS(RSD_EPEER, "the file is not the shared memory that was announced",
          shared_segment_open(&name, &segment));
    CHECK(segment.base == NULL);
    fclose(file);
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("host"));
    machine();
    groups();
    arenas();
    no_descriptors();
    other_files();
    folder_remove(folder);
    return tap_end();
}
