/* available.c - which host this is, and how much memory it has available.
 *
 * What cannot be read counts as no limit: the kernel then decides.
 */
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_TEXT_NBYTES = 16384 };

/* Returns all of a small file, or "" if it cannot be read. */
static const char *read_small_file(const char *path, char text[MAX_TEXT_NBYTES])
{
    size_t used = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    for (ssize_t n = fd < 0 ? 0 : 1; n > 0;) {
        n = read(fd, text + used, MAX_TEXT_NBYTES - 1 - used);
        used += n > 0 ? (size_t)n : 0;
    }
    if (fd >= 0)
        close(fd);
    text[used] = 0;
    return text;
}

/* ---- the host ---- */

static char boot[64];

/* Reads it when the library is loaded: later there may be no free file descriptor, and a rank that could not read it
 * would seem to be on another host. */
__attribute__((constructor)) static void read_boot_id(void)
{
    char text[MAX_TEXT_NBYTES];
    snprintf(boot, sizeof boot, "%.60s", read_small_file("/proc/sys/kernel/random/boot_id", text));
}

/* Processes with the same host name and the same boot are on one host. Containers with their own host names are not. */
int64_t host_number(void)
{
    char name[256] = "";
    struct hash hash;
    gethostname(name, sizeof name - 1);
    hash_start(&hash, "host");
    hash_string(&hash, name);
    hash_string(&hash, boot);
    return (int64_t)(hash.a >> 1) | 1;
}

/* ---- memory ---- */

/* Finds the number after a name at the start of a line. */
static bool find_line_number(const char *text, const char *name, uint64_t *number)
{
    size_t n = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n'), line += line != NULL) {
        char *end;
        if (strncmp(line, name, n) != 0)
            continue;
        *number = strtoull(line + n, &end, 10);
        return end > line + n;
    }
    return false;
}

static uint64_t available_on_machine(const char *meminfo)
{
    char text[MAX_TEXT_NBYTES];
    uint64_t memory, swap = 0;
    read_small_file(meminfo, text);
    if (!find_line_number(text, "MemAvailable:", &memory))
        return UINT64_MAX;
    find_line_number(text, "SwapFree:", &swap);
    return (memory + swap) * 1024;
}

static const char *read_group_file(const char *directory, const char *name,
                                   char text[MAX_TEXT_NBYTES])
{
    char path[4096 + 64];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return read_small_file(path, text);
}

/* The page cache counts as used, but the kernel frees it when memory is needed. */
static uint64_t available_in_group(const char *directory)
{
    char text[MAX_TEXT_NBYTES];
    uint64_t most, used, active = 0, inactive = 0;
    if (!find_line_number(read_group_file(directory, "memory.max", text), "", &most) ||
        !find_line_number(read_group_file(directory, "memory.current", text), "", &used))
        return UINT64_MAX;
    read_group_file(directory, "memory.stat", text);
    find_line_number(text, "active_file", &active);
    find_line_number(text, "inactive_file", &inactive);
    used -= active + inactive < used ? active + inactive : used;
    return used < most ? most - used : 0;
}

uint64_t memory_available(const char *meminfo, const char *cgroup, const char *groups)
{
    char text[MAX_TEXT_NBYTES], directory[4096];
    uint64_t available = available_on_machine(meminfo);
    const char *own = strstr(read_small_file(cgroup, text), "0::/");
    if (!own || (own > text && own[-1] != '\n'))
        return available;
    int n = snprintf(directory, sizeof directory, "%s%.*s", groups, (int)strcspn(own + 3, "\n"),
                     own + 3);
    if (n < 0 || (size_t)n >= sizeof directory)
        return available;
    for (char *end = directory + n; end; end = strrchr(directory + strlen(groups), '/')) {
        *end = 0; /* a parent group may allow less */
        uint64_t here = available_in_group(directory);
        available = here < available ? here : available;
    }
    return available;
}
