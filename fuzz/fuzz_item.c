/* fuzz_item.c - any bytes as an item of a distributed checkpoint: what torch.save writes, plain or
 * compressed, a blob of safetensors, or a value. The file is in memory. */
#include "rows.h"
#include "safetensors.h"
#include "torch_item.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void try_plain(const rsd_checkpoint *checkpoint, const struct extent *extent)
{
    struct torch_view view;
    struct stored_array array;
    struct header_tensor tensor;
    uint64_t begin;
    if (!torch_item_locate(checkpoint->store, extent, &view, &array) &&
        (array.offset > extent->nbytes || array.nbytes > extent->nbytes - array.offset ||
         array.base < 0 || (uint64_t)array.base > array.nbytes))
        abort();
    if (!blob_find_tensor(checkpoint, 0, 0, "w", &tensor, &begin) && begin > extent->nbytes)
        abort();
}

static void try_compressed(struct store *store, const struct extent *extent)
{
    struct torch_view view;
    struct stored_array array;
    struct stored_stream *stream;
    char bytes[64];
    if (torch_item_open_stream(store, extent, &view, &array, &stream))
        return;
    stream->read(stream, bytes, array.nbytes < sizeof bytes ? array.nbytes : sizeof bytes);
    stored_stream_close(stream);
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
    const char *none;
    uint32_t index;
    rsd_checkpoint checkpoint = {.format = format_find(RSD_FORMAT_DCP)};
    struct extent extent = {.kind = EXTENT_ITEM, .nbytes = n};
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, n, 0) != (ssize_t)n)
        abort();
    int length = snprintf(name, sizeof name, "%d", fd);
    if (store_open("/proc/self/fd", NULL, &checkpoint.store, &none) ||
        store_add_file(checkpoint.store, (struct slice){name, (size_t)length}, &index))
        abort();
    checkpoint.store->follow_links = true;
    if (item_cache_open(&checkpoint.items))
        abort();
    try_plain(&checkpoint, &extent);
    try_value(&checkpoint, extent);
    for (extent.nzstd = 1; extent.nzstd <= 2; extent.nzstd++) {
        try_compressed(checkpoint.store, &extent);
        try_value(&checkpoint, extent);
    }
    item_cache_close(checkpoint.items);
    store_close(checkpoint.store);
    return 0;
}
