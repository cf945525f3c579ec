/* archives.h - torch.save archives around any pickle, for fuzz targets of formats that consist of such files. */
#ifndef ARCHIVES_H
#define ARCHIVES_H

#include "base.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

/* Writes an archive with a pickle, and the storages 0 (16 bytes), 1 (32 bytes) and ranks01 (8 bytes). */
static void write_archive(const char *path, const void *pickle, size_t n)
{
    static const float values[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const int32_t ranks[] = {0, 1};
    struct bytes out = {0}, directory = {0};
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
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out.failed || directory.failed || fd < 0 || write(fd, out.data, out.n) != (ssize_t)out.n ||
        close(fd) != 0)
        abort();
    bytes_drop(&out);
    bytes_drop(&directory);
}

#endif
