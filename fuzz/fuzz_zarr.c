/* fuzz_zarr.c - any bytes as the metadata of an Orbax checkpoint in files, and as a chunk.
 *
 *     kind, length of the metadata (two bytes), the metadata, the chunk
 *
 * The kind says of which file the metadata is: .zarray, zarr.json, _METADATA or _strings.json. The others
 * are right. The chunk is the value of every key that the first chunk may have. */
#include "opened.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { NKINDS = 4 };

static char folder[64];

static const char *const files[NKINDS] = {"w/.zarray", "w/zarr.json", "_METADATA", "_strings.json"};
static const char *const keys[] = {"w/0", "w/0.0", "w/c/0/0", "w/c.0.0"};
static const char *const directories[] = {"w/c/0", "w/c", "w", ""};

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *data, size_t n)
{
    int fd = open(path_of(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, n) != (ssize_t)n || close(fd) != 0)
        abort();
}

static void remove_folder(void)
{
    for (size_t i = 0; i < NKINDS; i++)
        remove(path_of(files[i]));
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        remove(path_of(keys[i]));
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
        remove(path_of(directories[i]));
}

static void make_folder(void)
{
    make_input_directory(folder, sizeof folder);
    for (size_t i = sizeof directories / sizeof *directories - 1; i-- > 0;) /* the last is there */
        if (mkdir(path_of(directories[i]), 0700) != 0)
            abort();
    atexit(remove_folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char good[] = "{\"shape\": [2, 4], \"chunks\": [2, 4], \"dtype\": \"<f4\"}";
    rsd_checkpoint *checkpoint;
    if (n < 3)
        return 0;
    if (!*folder)
        make_folder();
    size_t kind = data[0] % NKINDS, length = (size_t)(data[1] | data[2] << 8);
    length = length < n - 3 ? length : n - 3;
    for (size_t i = 0; i < NKINDS; i++)
        unlink(path_of(files[i]));
    write_file("_METADATA", "{}", 2);
    if (kind != 1)
        write_file("w/.zarray", good, sizeof good - 1);
    write_file(files[kind], data + 3, length);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        write_file(keys[i], data + 3 + length, n - 3 - length);
    if (!rsd_checkpoint_open(folder, NULL, &checkpoint)) {
        ask_everything(checkpoint);
        rsd_checkpoint_close(checkpoint);
    }
    return 0;
}
