/* stored_value.c - the items of values: what torch.save wrote for a number, a text, a list, an object. */
#include "format.h"

#include <string.h>

/* Values are small, and do not become much larger than they are on disk. */
enum { MOST_NBYTES = 1 << 28, MOST_GROWTH = 1024, START_NBYTES = 1 << 20 };

static rsd_status too_long(uint64_t nbytes, uint64_t most)
{
    return fail(RSD_ELIMIT, "a value of %llu bytes or more: %llu are the most",
                (unsigned long long)nbytes, (unsigned long long)most);
}

/* All of a stream whose length nobody knows. */
static rsd_status decompress_value(struct zstd_reader *zstd, uint64_t stored, struct bytes *out)
{
    char block[1 << 14];
    uint64_t most = stored < MOST_NBYTES / MOST_GROWTH ? START_NBYTES + stored * MOST_GROWTH
                                                       : (uint64_t)MOST_NBYTES;
    for (size_t n = sizeof block; n == sizeof block;) {
        TRY(zstd_reader_read_some(zstd, block, &n));
        bytes_put(out, block, n);
        if (out->failed)
            return RSD_ENOMEM;
        if (out->n > most)
            return too_long(out->n, most);
    }
    return RSD_OK;
}

rsd_status value_read_item(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           struct bytes *out)
{
    const struct extent *extent = &value->extent;
    TRY(catalog_check_transforms(&checkpoint->catalog, extent));
    TRY(file_check(&checkpoint->files, extent->file, extent->offset, extent->nbytes));
    if (extent->nzstd) {
        struct file_range range = {&checkpoint->files, extent->file, extent->offset};
        struct zstd_reader *zstd;
        TRY(zstd_reader_open(file_range_read, &range, extent->nbytes, extent->nzstd, &zstd));
        rsd_status status = decompress_value(zstd, extent->nbytes, out);
        zstd_reader_close(zstd);
        return status;
    }
    if (extent->nbytes > MOST_NBYTES)
        return too_long(extent->nbytes, MOST_NBYTES);
    TRY(GROW(out->data, out->capacity, (size_t)extent->nbytes + 1));
    out->n = (size_t)extent->nbytes;
    return file_read(&checkpoint->files, extent->file, extent->offset, out->data, out->n);
}

/* ---- looking into one ---- */

static rsd_status read_item(void *context, uint64_t at, void *out, size_t n)
{
    const struct bytes *item = context;
    if (at > item->n || n > item->n - at)
        return fail(RSD_EFORMAT, "byte %llu of an archive: it ends before that",
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
        return fail(RSD_EFORMAT, "an archive without data.pkl");
    TRY(zip_read_pickle(zip, record, &tree, &root));
    rsd_status status = pickle_to_json(&tree, root, json);
    pickle_tree_drop(&tree);
    return status;
}

rsd_status value_read_json(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           char **json)
{
    struct bytes item = {0};
    struct zip zip;
    rsd_status status = value_read_item(checkpoint, value, &item);
    if (!status)
        status = zip_open(&zip, read_item, &item, item.n);
    if (!status) {
        status = read_zip_json(&zip, json);
        zip_close(&zip);
    }
    bytes_drop(&item);
    return status;
}
