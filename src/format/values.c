/* values.c - the items of values in DCP: what torch.save wrote for a number, a text, a list, an object. */
#include "rows.h"

#include "zip.h"
#include "zstd_stream.h"

#include <string.h>

/* Limits of a value, and of its growth when it is decompressed. */
enum { MAX_VALUE_NBYTES = 1 << 28, MAX_GROWTH = 1024, START_NBYTES = 1 << 20 };

static rsd_status fail_too_long(uint64_t nbytes, uint64_t most)
{
    return fail(RSD_ELIMIT, "value of %llu bytes or more exceeds the limit of %llu bytes",
                (unsigned long long)nbytes, (unsigned long long)most);
}

/* Reads all of a stream, whose length is not known. */
static rsd_status decompress_value(struct zstd_reader *zstd, uint64_t stored, struct bytes *out)
{
    char block[1 << 14];
    uint64_t most = stored < MAX_VALUE_NBYTES / MAX_GROWTH ? START_NBYTES + stored * MAX_GROWTH
                                                           : (uint64_t)MAX_VALUE_NBYTES;
    for (size_t n = sizeof block; n == sizeof block;) {
        TRY(zstd_reader_read_some(zstd, block, &n));
        bytes_put(out, block, n);
        if (out->failed)
            return RSD_ENOMEM;
        if (out->n > most)
            return fail_too_long(out->n, most);
    }
    return RSD_OK;
}

rsd_status dcp_read_item(const rsd_checkpoint *checkpoint, const struct stored_value *value,
                         struct bytes *item)
{
    const struct extent *extent = &value->extent;
    TRY(catalog_check_transforms(&checkpoint->catalog, extent));
    TRY(store_check_range(checkpoint->store, extent->file, extent->offset, extent->nbytes));
    if (extent->nzstd) {
        struct store_range range = {checkpoint->store, extent->file, extent->offset};
        struct zstd_reader *zstd;
        TRY(zstd_reader_open(store_range_read, &range, extent->nbytes, extent->nzstd, &zstd));
        rsd_status status = decompress_value(zstd, extent->nbytes, item);
        zstd_reader_close(zstd);
        return status;
    }
    if (extent->nbytes > MAX_VALUE_NBYTES)
        return fail_too_long(extent->nbytes, MAX_VALUE_NBYTES);
    TRY(GROW(item->data, item->capacity, (size_t)extent->nbytes + 1));
    item->n = (size_t)extent->nbytes;
    return store_read(checkpoint->store, extent->file, extent->offset, item->data, item->n);
}

/* ---- as JSON ---- */

static rsd_status copy_item(void *context, uint64_t at, void *out, size_t n)
{
    const struct bytes *item = context;
    if (at > item->n || n > item->n - at)
        return fail(RSD_EFORMAT, "byte %llu of the archive: archive ends before it",
                    (unsigned long long)at);
    memcpy(out, item->data + at, n);
    return RSD_OK;
}

static rsd_status read_zip_json(struct zip *zip, char **json)
{
    struct zip_record *record;
    struct pickle_tree tree;
    pickle_node root;
    TRY(zip_find(zip, "data.pkl", &record));
    if (!record)
        return fail(RSD_EFORMAT, "record data.pkl is missing; not a torch.save archive");
    TRY(zip_read_pickle(zip, record, &tree, &root));
    rsd_status status = pickle_to_json(&tree, root, json);
    pickle_tree_drop(&tree);
    return status;
}

rsd_status value_read_json(const rsd_checkpoint *checkpoint, const struct stored_value *value,
                           char **json)
{
    struct bytes item = {0};
    struct zip zip;
    rsd_status status = checkpoint->format->read_item(checkpoint, value, &item);
    if (!status)
        status = zip_open(&zip, copy_item, &item, item.n);
    if (!status) {
        status = read_zip_json(&zip, json);
        zip_close(&zip);
    }
    bytes_drop(&item);
    return status;
}
