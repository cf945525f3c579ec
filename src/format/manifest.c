/* manifest.c - a checkpoint that is going to be written: what will be in which file, and where.
 *
 * Sizes are known before anything is written, except those of compressed items, and so are offsets. Threads
 * then write in any order, and processes that make the same manifest need not exchange it.
 */
#include "format.h"

#include "json.h"

#include <string.h>

rsd_status manifest_start(struct manifest *manifest, rsd_format id, int32_t compress)
{
    const struct format *format = format_find(id);
    if (!format || !format->writer)
        return fail(RSD_EUNSUPPORTED, "format %s cannot be written",
                    format ? format->name : "that is not known");
    if (compress < 0 || compress > MAX_ZSTD_LEVEL)
        return fail(RSD_EINVAL, "zstd level %d out of range (1 to %d)", (int)compress,
                    (int)MAX_ZSTD_LEVEL);
    manifest->format = format;
    manifest->compress = compress;
    return RSD_OK;
}

/* ---- adding ---- */

rsd_status manifest_add_file(struct manifest *manifest, const char *name)
{
    TRY(GROW(manifest->files, manifest->files_capacity, manifest->nfiles + 1));
    char *copy = text_copy(name);
    if (!copy)
        return RSD_ENOMEM;
    manifest->files[manifest->nfiles++] = (struct manifest_file){.name = copy};
    return RSD_OK;
}

rsd_status manifest_add_files(struct manifest *manifest, size_t n)
{
    char name[FILE_NAME_NCHARS];
    for (size_t i = 0; i < n; i++) {
        manifest->format->writer->name_file(manifest, i, n, name);
        TRY(manifest_add_file(manifest, name));
    }
    return RSD_OK;
}

rsd_status manifest_add_box(struct manifest *manifest, const int64_t *lo, const int64_t *len,
                            const int64_t *at, uint32_t file, uint32_t order)
{
    struct catalog *catalog = &manifest->catalog;
    int32_t ndim = catalog->tensors[catalog->ntensors - 1].ndim;
    struct extent extent = {
        .kind = EXTENT_ITEM, .file = file, .nzstd = manifest->compress != 0, .detail = order};
    TRY(catalog_add_box(catalog, lo, len, extent));
    TRY(GROW(manifest->ats, manifest->ats_capacity, manifest->nats + (size_t)ndim + 1));
    copy_i64s(manifest->ats + manifest->nats, at, ndim);
    manifest->nats += (size_t)ndim;
    return RSD_OK;
}

/* ---- names ---- */

static rsd_status check_written_name(const char *name)
{
    return json_is_utf8(name, strlen(name)) ? RSD_OK
                                            : fail(RSD_EINVAL, "%s: name is not UTF-8", name);
}

rsd_status manifest_check(struct manifest *manifest)
{
    struct catalog *catalog = &manifest->catalog;
    for (size_t i = 0; i < catalog->ntensors; i++)
        TRY(check_written_name(catalog->tensors[i].name));
    for (size_t i = 0; i < catalog->nvalues; i++)
        TRY(check_written_name(catalog->values[i].name));
    rsd_status status = catalog_finish(catalog); /* finds names that are there twice */
    return status == RSD_EFORMAT ? RSD_EINVAL : status;
}

/* ---- places ---- */

rsd_status manifest_item_nbytes(const struct manifest *manifest, size_t tensor, size_t box,
                                uint64_t *head_nbytes, uint64_t *nbytes)
{
    const struct catalog *catalog = &manifest->catalog;
    struct bytes head = {0}, tail = {0};
    rsd_status status = RSD_OK;
    if (manifest->format->writer->frame)
        status = manifest->format->writer->frame(manifest, tensor, box, &head, &tail);
    *head_nbytes = head.n;
    *nbytes = head.n + box_nbytes(catalog, &catalog->tensors[tensor], box) + tail.n;
    bytes_drop(&head);
    bytes_drop(&tail);
    return status;
}

rsd_status manifest_place(struct manifest *manifest)
{
    manifest->items = mem_new(manifest->catalog.nextents, sizeof *manifest->items);
    return manifest->items ? manifest->format->writer->place(manifest) : RSD_ENOMEM;
}

/* ---- the rest ---- */

/* Hashes the names, paths and bytes of values. The bytes of an item that is copied are not known here. */
static void hash_values(const struct manifest *manifest, struct hash *hash)
{
    for (size_t i = 0; i < manifest->catalog.nvalues; i++) {
        const struct stored_value *value = &manifest->catalog.values[i];
        hash_string(hash, value->name);
        hash_string(hash, value->path ? value->path : "");
        hash_bytes(hash, manifest->values[i].item.data, manifest->values[i].item.n);
    }
}

/* Hashes what the output will have: files, tensors with their boxes, and values. Offsets follow from it. */
void manifest_hash(const struct manifest *manifest, struct hash *hash)
{
    const struct catalog *catalog = &manifest->catalog;
    hash_start(hash, "draft 2");
    hash_i64(hash, manifest->format->id);
    hash_i64(hash, manifest->compress);
    for (size_t i = 0; i < manifest->nfiles; i++) {
        hash_string(hash, manifest->files[i].name);
        hash_i64(hash, (int64_t)manifest->files[i].nbytes);
    }
    for (size_t i = 0; i < catalog->ntensors; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[i];
        hash_string(hash, tensor->name);
        hash_string(hash, tensor->path ? tensor->path : "");
        hash_i64(hash, tensor->dtype);
        hash_i64(hash, tensor->ndim);
        hash_i64s(hash, tensor_shape(catalog, tensor), (size_t)tensor->ndim);
        hash_i64s(hash, catalog->coordinates + tensor->boxes,
                  2 * (size_t)tensor->ndim * tensor->nboxes);
        for (size_t box = 0; box < tensor->nboxes; box++)
            hash_i64(hash, catalog->extents[tensor->first_extent + box].file);
    }
    hash_values(manifest, hash);
}

/* Frees what the manifest has, in whatever state it is. */
void manifest_drop(struct manifest *manifest)
{
    for (size_t i = 0; i < manifest->nfiles; i++) {
        mem_free(manifest->files[i].name);
        bytes_drop(&manifest->files[i].header);
    }
    for (size_t i = 0; manifest->values && i < manifest->catalog.nvalues; i++)
        bytes_drop(&manifest->values[i].item);
    for (size_t i = 0; manifest->layouts && i < manifest->catalog.ntensors; i++)
        rsd_layout_free(manifest->layouts[i]);
    mem_free(manifest->layouts);
    mem_free(manifest->values);
    mem_free(manifest->items);
    mem_free(manifest->ats);
    mem_free(manifest->places);
    mem_free(manifest->files);
    catalog_drop(&manifest->catalog);
    *manifest = (struct manifest){0};
}
