/* fuzz_ocdbt.c - any bytes as an OCDBT database: the body of its manifest, and the bodies of nodes.
 *
 *     length, body of the manifest, length, body of a node, ...       lengths have two bytes
 *
 * The frames around the bodies are made here, so that their CRC-32Cs are right. The nodes follow each other
 * in the file d/0, from byte 32 on, behind the bytes of a chunk. */
#include "crc.h"
#include "opened.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { CHUNK_NBYTES = 32, HEAD_NBYTES = 14 };

static char folder[64];

static void write_bytes(int fd, const void *bytes, size_t n)
{
    if (write(fd, bytes, n) != (ssize_t)n)
        abort();
}

static int create_file(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        abort();
    return fd;
}

static void remove_folder(void)
{
    static const char *const names[] = {"manifest.ocdbt", "d/0", "d", ""};
    char path[128];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        remove(path);
    }
}

static void make_folder(void)
{
    char path[128];
    make_input_directory(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/d", folder);
    if (mkdir(path, 0700) != 0)
        abort();
    atexit(remove_folder);
}

/* Writes the next body as a frame, and steps over it. */
static void write_frame(int fd, const uint8_t **data, size_t *n, uint32_t magic)
{
    static unsigned char frame[HEAD_NBYTES + 65536 + 4];
    size_t length = *n >= 2 ? (size_t)((*data)[0] | (*data)[1] << 8) : 0, skip = *n >= 2 ? 2 : *n;
    length = length < *n - skip ? length : *n - skip;
    size_t all = HEAD_NBYTES + length + 4;
    for (int i = 0; i < 4; i++)
        frame[i] = (unsigned char)(magic >> (24 - 8 * i));
    for (int i = 0; i < 8; i++)
        frame[4 + i] = (unsigned char)((uint64_t)all >> 8 * i);
    frame[12] = frame[13] = 0;
    for (size_t i = 0; i < length; i++)
        frame[HEAD_NBYTES + i] = (*data)[skip + i];
    uint32_t crc = crc32c_of(frame, all - 4);
    for (size_t i = 0; i < 4; i++)
        frame[all - 4 + i] = (unsigned char)(crc >> 8 * i);
    write_bytes(fd, frame, all);
    *data += skip + length;
    *n -= skip + length;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const unsigned char chunk[CHUNK_NBYTES];
    rsd_checkpoint *checkpoint;
    if (!*folder)
        make_folder();
    int fd = create_file("manifest.ocdbt");
    write_frame(fd, &data, &n, 0x0cdb3a2a);
    close(fd);
    fd = create_file("d/0");
    write_bytes(fd, chunk, sizeof chunk);
    while (n > 0)
        write_frame(fd, &data, &n, 0x0cdb20de);
    close(fd);
    if (!rsd_checkpoint_open(folder, NULL, &checkpoint)) {
        ask_everything(checkpoint);
        rsd_checkpoint_close(checkpoint);
    }
    return 0;
}
