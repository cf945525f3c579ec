/* host.c - what the host says of itself: which one it is, and how much memory can still be had.
 *
 * What cannot be read is taken for no limit: the kernel then decides, as it does for everybody.
 */
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_TEXT = 16384 };

/* All of a small file; "": it cannot be read. */
static const char *read_text(const char *path, char text[MOST_TEXT])
{
    size_t used = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    for (ssize_t n = fd < 0 ? 0 : 1; n > 0;) {
        n = read(fd, text + used, MOST_TEXT - 1 - used);
        used += n > 0 ? (size_t)n : 0;
    }
    if (fd >= 0)
        close(fd);
    text[used] = 0;
    return text;
}

/* ---- which one ---- */

static char boot[64];

/* Read when the library is loaded, which takes a descriptor itself: later there may be none left, and a rank
 * that could not read it would seem to be on another host. */
__attribute__((constructor)) static void learn_boot(void)
{
    char text[MOST_TEXT];
    snprintf(boot, sizeof boot, "%.60s", read_text("/proc/sys/kernel/random/boot_id", text));
}

/* Two processes with the same name of the host and the same boot are on one host, as far as they want to
 * be: containers with names of their own are not. */
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

/* The number behind a name at the start of a line. */
static bool find_number(const char *text, const char *name, uint64_t *number)
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

static uint64_t left_on_machine(const char *meminfo)
{
    char text[MOST_TEXT];
    uint64_t memory, swap = 0;
    read_text(meminfo, text);
    if (!find_number(text, "MemAvailable:", &memory))
        return UINT64_MAX;
    find_number(text, "SwapFree:", &swap);
    return (memory + swap) * 1024;
}

static const char *read_in(const char *folder, const char *name, char text[MOST_TEXT])
{
    char path[4096 + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return read_text(path, text);
}

/* Pages of files count as used there, though they go when room is needed. */
static uint64_t left_in_group(const char *folder)
{
    char text[MOST_TEXT];
    uint64_t most, used, active = 0, inactive = 0;
    if (!find_number(read_in(folder, "memory.max", text), "", &most) ||
        !find_number(read_in(folder, "memory.current", text), "", &used))
        return UINT64_MAX;
    read_in(folder, "memory.stat", text);
    find_number(text, "active_file", &active);
    find_number(text, "inactive_file", &inactive);
    used -= active + inactive < used ? active + inactive : used;
    return used < most ? most - used : 0;
}

uint64_t memory_available(const char *meminfo, const char *cgroup, const char *groups)
{
    char text[MOST_TEXT], folder[4096];
    uint64_t left = left_on_machine(meminfo);
    const char *own = strstr(read_text(cgroup, text), "0::/");
    if (!own || (own > text && own[-1] != '\n'))
        return left;
    int n = snprintf(folder, sizeof folder, "%s%.*s", groups, (int)strcspn(own + 3, "\n"), own + 3);
    if (n < 0 || (size_t)n >= sizeof folder)
        return left;
    for (char *end = folder + n; end; end = strrchr(folder + strlen(groups), '/')) {
        *end = 0; /* a group above may allow less */
        uint64_t here = left_in_group(folder);
        left = here < left ? here : left;
    }
    return left;
}
