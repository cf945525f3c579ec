/* fuzz_ranks.c - any bytes as the pickles of per-rank files: those of two ranks' models, and of an optimizer.
 *
 *     2 bytes   the length of the first pickle, little-endian
 *     2 bytes   the length of the second
 *     ...       the pickles; the third has what is left, and is that of rank 0's optimizer
 *
 * The storages beside them do not change. The model of rank 0 is opened alone too.
 */
#include "base.h"
#include "opened.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static char folder[64];
static const char *const names[] = {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt",
                                    "optim_world_size_2_rank_0.pt"};

enum { NFILES = 3 };

static void put_u16(struct bytes *out, unsigned value)
{
    const unsigned char bytes[2] = {(unsigned char)value, (unsigned char)(value >> 8)};
    bytes_put(out, bytes, sizeof bytes);
}

static void put_u32(struct bytes *out, size_t value)
{
    put_u16(out, value & 0xffff);
    put_u16(out, value >> 16 & 0xffff);
}

/* Adds a record to an archive and to its directory. The CRC-32 is 0, which means that it is not known. */
static void put_record(struct bytes *out, struct bytes *directory, const char *name,
                       const void *data, size_t n)
{
    size_t at = out->n;
    bytes_put(out, "PK\3\4\0\0\0\0\0\0\0\0\0\0", 14);
    put_u32(out, 0);
    put_u32(out, n);
    put_u32(out, n);
    put_u16(out, (unsigned)strlen(name));
    put_u16(out, 0);
    bytes_put(out, name, strlen(name));
    bytes_put(out, data, n);
    bytes_put(directory, "PK\1\2\0\0\0\0\0\0\0\0\0\0\0\0", 16);
    put_u32(directory, 0);
    put_u32(directory, n);
    put_u32(directory, n);
    put_u16(directory, (unsigned)strlen(name));
    bytes_put(directory, "\0\0\0\0\0\0\0\0\0\0\0\0", 12);
    put_u32(directory, at);
    bytes_put(directory, name, strlen(name));
}

static void write_archive(const char *name, const void *pickle, size_t n)
{
    static const float values[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const int32_t ranks[] = {0, 1};
    struct bytes out = {0}, directory = {0};
    char path[128];
    put_record(&out, &directory, "archive/data.pkl", pickle, n);
    put_record(&out, &directory, "archive/data/0", values, sizeof values / 2);
    put_record(&out, &directory, "archive/data/1", values, sizeof values);
    put_record(&out, &directory, "archive/data/ranks01", ranks, sizeof ranks);
    size_t at = out.n;
    bytes_put(&out, directory.data, directory.n);
    bytes_put(&out, "PK\5\6\0\0\0\0\4\0\4\0", 12);
    put_u32(&out, directory.n);
    put_u32(&out, at);
    put_u16(&out, 0);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out.failed || directory.failed || fd < 0 || write(fd, out.data, out.n) != (ssize_t)out.n ||
        close(fd) != 0)
        abort();
    bytes_drop(&out);
    bytes_drop(&directory);
}

static void remove_folder(void)
{
    char path[128];
    for (size_t i = 0; i < NFILES; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

static void try_open(const char *path, const rsd_open_options *options)
{
    rsd_checkpoint *checkpoint;
    if (rsd_checkpoint_open(path, options, &checkpoint))
        return;
    ask_everything(checkpoint);
    rsd_checkpoint_close(checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char path[128];
    const char *above = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    if (n < 4)
        return 0;
    if (!*folder) {
        snprintf(folder, sizeof folder, "%s/reshard-fuzz-ranks-%d", above, (int)getpid());
        if (mkdir(folder, 0700) != 0)
            abort();
        atexit(remove_folder);
    }
    size_t first = data[0] | (size_t)data[1] << 8, second = data[2] | (size_t)data[3] << 8;
    data += 4;
    n -= 4;
    first = first < n ? first : n;
    second = second < n - first ? second : n - first;
    write_archive(names[0], data, first);
    write_archive(names[1], data + first, second);
    snprintf(path, sizeof path, "%s/%s", folder, names[2]);
    unlink(path);
    if (n > first + second)
        write_archive(names[2], data + first + second, n - first - second);
    try_open(folder, &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options)});
    try_open(folder,
             &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options), .take_rank_0 = 1});
    snprintf(path, sizeof path, "%s/%s", folder, names[0]);
    try_open(path, &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options), .as_is = 1});
    return 0;
}
