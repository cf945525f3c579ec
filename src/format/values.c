/* values.c - the items of values in DCP: what torch.save wrote for a number, a text, a list, an object. */
#include "rows.h"

#include "torch_item.h"
#include "zstd_stream.h"

#include <stdatomic.h>
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

/* Reads all of an item, decompressed. */
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

/* ---- archives ---- */

static rsd_status copy_item(void *context, uint64_t at, void *out, size_t n)
{
    const struct bytes *item = context;
    if (at > item->n || n > item->n - at)
        return fail(RSD_EFORMAT, "byte %llu of the archive: archive ends before it",
                    (unsigned long long)at);
    memcpy(out, item->data + at, n);
    return RSD_OK;
}

/* Reads the object of an archive as JSON; NULL: it is not plain. */
static rsd_status read_zip_json(struct zip *zip, char **json)
{
    struct zip_record *pickle;
    struct pickle_tree tree;
    pickle_node root;
    TRY(torch_find_pickle(zip, &pickle));
    TRY(zip_read_pickle(zip, pickle, &tree, &root));
    rsd_status status = pickle_to_json(&tree, root, json);
    pickle_tree_drop(&tree);
    return status;
}

/* Checks the CRC-32 of each record. */
static rsd_status check_archive(struct zip *zip)
{
    struct zip_record *pickle;
    TRY(torch_find_pickle(zip, &pickle));
    for (size_t i = 0; i < zip->nrecords; i++)
        TRY(zip_check(zip, &zip->records[i]));
    return RSD_OK;
}

/* Checks an item that was read. */
static rsd_status check_read_item(struct bytes *item)
{
    struct zip zip;
    TRY(zip_open(&zip, copy_item, item, item->n));
    rsd_status status = check_archive(&zip);
    zip_close(&zip);
    return status;
}

/* Reads the archive of a value as JSON; json NULL: checks it. An archive of any length can be checked, so it is
 * not read into memory for that, unless it is compressed. */
static rsd_status read_value_archive(const rsd_checkpoint *checkpoint,
                                     const struct stored_value *value, char **json)
{
    const struct extent *extent = &value->extent;
    struct store_range range = {checkpoint->store, extent->file, extent->offset};
    bool in_file = !json && !extent->nzstd;
    struct bytes item = {0};
    struct zip zip;
    rsd_status status = catalog_check_transforms(&checkpoint->catalog, extent);
    if (!status)
        status = in_file ? store_check_range(checkpoint->store, extent->file, extent->offset,
                                             extent->nbytes)
                         : checkpoint->format->read_item(checkpoint, value, &item);
    if (!status)
        status = in_file ? zip_open(&zip, store_range_read, &range, extent->nbytes)
                         : zip_open(&zip, copy_item, &item, item.n);
    if (!status) {
        status = json ? read_zip_json(&zip, json) : check_archive(&zip);
        zip_close(&zip);
    }
    bytes_drop(&item);
    return status;
}

/* ---- within a budget ---- */

/* Starts a budget for one value. Many values may refer to one item, so all of them share what they may take
 * besides the work for the bytes that they read. */
static void begin_value(rsd_checkpoint *checkpoint, struct budget *budget)
{
    budget_begin(budget, atomic_load(&checkpoint->spare_steps), false);
}

static rsd_status end_value(rsd_checkpoint *checkpoint, struct budget *budget, rsd_status status)
{
    int64_t spare;
    status = budget_end(budget, status, &spare);
    atomic_fetch_sub(&checkpoint->spare_steps, budget->spare - spare);
    return status;
}

rsd_status value_read_item(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           struct bytes *item)
{
    struct budget budget;
    TRY(format_check_values(checkpoint));
    begin_value(checkpoint, &budget);
    rsd_status status = checkpoint->format->read_item(checkpoint, value, item);
    if (!status)
        status = check_read_item(item);
    return end_value(checkpoint, &budget, status);
}

rsd_status value_read_json(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           char **json)
{
    struct budget budget;
    *json = NULL;
    TRY(format_check_values(checkpoint));
    begin_value(checkpoint, &budget);
    rsd_status status = end_value(checkpoint, &budget, read_value_archive(checkpoint, value, json));
    if (status) {
        mem_free(*json);
        *json = NULL;
    }
    return status;
}

rsd_status value_check(rsd_checkpoint *checkpoint, const struct stored_value *value)
{
    struct budget budget;
    TRY(format_check_values(checkpoint));
    begin_value(checkpoint, &budget);
    return end_value(checkpoint, &budget, read_value_archive(checkpoint, value, NULL));
}
