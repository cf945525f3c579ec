/* fuzz_item.c - any bytes as an item of a distributed checkpoint: what torch.save writes, plain or
 * compressed, a blob of safetensors, or a value. The file is in memory. */
#include "checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void try_plain(rsd_checkpoint *checkpoint, const struct extent *extent)
{
    struct stored_view stored;
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
    uint64_t begin;
    if (!torch_item_locate(&checkpoint->files, extent, &stored) &&
        (stored.data > extent->nbytes || stored.nbytes > extent->nbytes - stored.data))
        abort();
    if (!safetensors_find_tensor(&checkpoint->files, 0, 0, "w", &dtype, &ndim, shape, &begin) &&
        begin > extent->nbytes)
        abort();
}

static void try_compressed(rsd_checkpoint *checkpoint, const struct extent *extent)
{
    struct file_range range = {&checkpoint->files, 0, 0};
    struct zstd_reader *zstd;
    struct stored_view stored;
    unsigned char *rest;
    size_t nrest;
    if (zstd_reader_open(file_range_read, &range, extent->nbytes, extent->nzstd, &zstd))
        return;
    if (!torch_item_locate_stream(zstd, &stored, &rest, &nrest))
        mem_free(rest);
    zstd_reader_close(zstd);
}

static void try_value(rsd_checkpoint *checkpoint, struct extent extent)
{
    const struct stored_value value = {.name = "v", .extent = extent};
    char *json = NULL;
    if (!value_read_json(checkpoint, &value, &json))
        rsd_free(json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static int fd = -1;
    char name[16];
    uint32_t index;
    rsd_checkpoint checkpoint = {0};
    struct extent extent = {.kind = ITEM_SAVED, .nbytes = n};
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, n, 0) != (ssize_t)n)
        abort();
    int length = snprintf(name, sizeof name, "%d", fd);
    if (files_open(&checkpoint.files, "/proc/self/fd") ||
        files_add(&checkpoint.files, (struct slice){name, (size_t)length}, &index))
        abort();
    try_plain(&checkpoint, &extent);
    try_value(&checkpoint, extent);
    for (extent.nzstd = 1; extent.nzstd <= 2; extent.nzstd++) {
        try_compressed(&checkpoint, &extent);
        try_value(&checkpoint, extent);
    }
    files_close(&checkpoint.files);
    return 0;
}
