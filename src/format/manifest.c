/* draft.c - a checkpoint that is going to be written: what will be in which file, and where.
 *
 * Sizes are known before anything is written (but for compressed items), so offsets are too: threads then
 * write where they like, in any order, and processes that draft the same need not talk to each other.
 *
 *     DCP            | value | value | head bytes tail | head bytes tail | ...
 *     safetensors    | header | bytes | bytes | ...
 */
#include "checkpoint.h"

#include <string.h>

rsd_status manifest_add_file(struct manifest *manifest, const char *name)
{
    TRY(GROW(manifest->files, manifest->files_capacity, manifest->nfiles + 1));
    char *copy = mem_copy(name, strlen(name) + 1, 1);
    if (!copy)
        return RSD_ENOMEM;
    manifest->files[manifest->nfiles++] = (struct out_file){.name = copy};
    return RSD_OK;
}

rsd_status manifest_add_boxes(struct manifest *manifest, const struct dedup *dedup, size_t tensor,
                              size_t *next)
{
    int32_t ndim = manifest->catalog.tensors[manifest->catalog.ntensors - 1].ndim;
    for (; *next < dedup->n && dedup->list[*next].tensor == tensor; ++*next) {
        const struct dedup_box *dealt = &dedup->list[*next];
        const int64_t *lo = dedup->coordinates + dealt->coordinates;
        struct extent extent = {.file = (uint32_t)dealt->rank,
                                .kind =
                                    manifest->format == RSD_FORMAT_DCP ? EXTENT_ITEM : EXTENT_DENSE,
                                .nzstd = manifest->compress != 0,
                                .detail = dealt->order};
        TRY(catalog_add_box(&manifest->catalog, lo, lo + ndim, extent));
        TRY(GROW(manifest->ats, manifest->ats_capacity, manifest->nats + (size_t)ndim));
        copy_i64s(manifest->ats + manifest->nats, lo + 2 * ndim, ndim);
        manifest->nats += (size_t)ndim;
    }
    return RSD_OK;
}

/* ---- names ---- */

static rsd_status check_written_name(const struct manifest *manifest, const char *name)
{
    if (!json_is_utf8(name, strlen(name)))
        return fail(RSD_EINVAL, "%s: a name has to be UTF-8", name);
    if (manifest->format == RSD_FORMAT_SAFETENSORS && strcmp(name, "__metadata__") == 0)
        return fail(RSD_EINVAL, "safetensors cannot have a tensor called %s", name);
    return RSD_OK;
}

rsd_status manifest_check(struct manifest *manifest)
{
    struct catalog *catalog = &manifest->catalog;
    for (size_t i = 0; i < catalog->ntensors; i++)
        TRY(check_written_name(manifest, catalog->tensors[i].name));
    for (size_t i = 0; i < catalog->nvalues; i++)
        TRY(check_written_name(manifest, catalog->values[i].name));
    rsd_status status = catalog_finish(catalog); /* finds names that are there twice */
    return status == RSD_EFORMAT ? RSD_EINVAL : status;
}

/* ---- places ---- */

static rsd_status place_values(struct manifest *manifest)
{
    for (size_t i = 0; i < manifest->catalog.nvalues; i++) {
        struct extent *extent = &manifest->catalog.values[i].extent;
        const struct out_value *value = &manifest->values[i];
        struct out_file *file = &manifest->files[extent->file];
        extent->nzstd = manifest->compress != 0;
        extent->offset = file->nbytes;
        extent->nbytes = value->from ? value->from->extent.nbytes : value->item.n;
        file->nbytes += extent->nbytes;
        file->nvalues++;
    }
    return RSD_OK;
}

static rsd_status place_items(struct manifest *manifest)
{
    struct catalog *catalog = &manifest->catalog;
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        for (size_t box = 0; box < tensor->nboxes; box++) {
            size_t i = tensor->first_extent + box;
            struct extent *extent = &catalog->extents[i];
            struct out_file *file = &manifest->files[extent->file];
            TRY(torch_item_nbytes(tensor->dtype, tensor->ndim, tensor_box_len(catalog, tensor, box),
                                  NULL, &manifest->items[i].head, &extent->nbytes));
            extent->offset = file->nbytes;
            file->nbytes += extent->nbytes;
            file->nitems++;
        }
    }
    return RSD_OK;
}

rsd_status manifest_place(struct manifest *manifest)
{
    manifest->items = mem_new(manifest->catalog.nextents, sizeof *manifest->items);
    if (!manifest->items)
        return RSD_ENOMEM;
    if (manifest->format == RSD_FORMAT_SAFETENSORS)
        return safetensors_place(manifest);
    TRY(place_values(manifest));
    return place_items(manifest);
}

/* ---- the rest ---- */

/* Of an item that is copied only the name and the length: it is told apart by the file it comes from. */
static void hash_values(const struct manifest *manifest, struct hash *hash)
{
    for (size_t i = 0; i < manifest->catalog.nvalues; i++) {
        const struct stored_value *value = &manifest->catalog.values[i];
        hash_string(hash, value->name);
        hash_string(hash, value->path ? value->path : "");
        hash_bytes(hash, manifest->values[i].item.data, manifest->values[i].item.n);
    }
}

void manifest_hash(const struct manifest *manifest, struct hash *hash)
{
    const struct catalog *catalog = &manifest->catalog;
    hash_start(hash, "draft 2");
    hash_i64(hash, manifest->format);
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

void manifest_drop(struct manifest *manifest)
{
    for (size_t i = 0; i < manifest->nfiles; i++) {
        mem_free(manifest->files[i].name);
        bytes_drop(&manifest->files[i].header);
    }
    for (size_t i = 0; manifest->values && i < manifest->catalog.nvalues; i++)
        bytes_drop(&manifest->values[i].item);
    mem_free(manifest->values);
    mem_free(manifest->items);
    mem_free(manifest->ats);
    mem_free(manifest->places);
    mem_free(manifest->files);
    catalog_drop(&manifest->catalog);
    *manifest = (struct manifest){0};
}
