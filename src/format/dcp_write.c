/* dcp_write.c - writes PyTorch's distributed checkpoints.
 *
 *     __R_0.distcp   | value | value | head bytes tail | head bytes tail | ...
 *     .metadata      a pickle that torch 2.3 to 2.13 read
 *
 * Whatever the metadata has several times (classes, keys, names, file names) is written once and memoized.
 * The fields are those that all these versions know: storage_meta and version are left out, because they
 * have defaults, and only compressed items have transforms.
 */
#include "crc.h"
#include "pickle.h"
#include "rows.h"
#include "torch_item.h"

#include <stdio.h>
#include <string.h>

#define METADATA_MODULE "torch.distributed.checkpoint.metadata"

/* What is memoized. */
enum memoized {
    METADATA_CLASS,
    TENSOR_CLASS,
    PROPERTIES_CLASS,
    CHUNK_CLASS,
    BYTES_CLASS,
    INDEX_CLASS,
    INFO_CLASS,
    SIZE_CLASS,
    KEY_OFFSETS,
    KEY_SIZES,
    KEY_FQN,
    KEY_INDEX,
    KEY_OFFSET,
    KEY_PATH,
    KEY_LENGTH,
    KEY_TRANSFORMS,
    TRANSFORMS,
    KEY_PROPERTIES,
    KEY_SIZE,
    KEY_CHUNKS,
    LAYOUT,
    MEM_FORMAT,
    FIRST_DTYPE,
    NMEMOIZED = FIRST_DTYPE + RSD_C32 + 1
};

struct metadata_pickler {
    struct bytes *out;
    uint32_t memo;             /* entries so far */
    uint32_t known[NMEMOIZED]; /* memo entry plus one, here and below; 0: not written yet */
    uint32_t *tensor_names, *value_names, *file_names;
};

/* ---- memo ---- */

/* Stores the last value in the memo, and returns its entry plus one. */
static uint32_t memoize_entry(struct metadata_pickler *p)
{
    pickle_write_memo(p->out, p->memo);
    return ++p->memo;
}

/* Adds a value from the memo. Returns false if it was not written yet. */
static bool recall_entry(struct metadata_pickler *p, uint32_t entry)
{
    if (entry > 0)
        pickle_write_recall(p->out, entry - 1);
    return entry > 0;
}

static void put_class(struct metadata_pickler *p, enum memoized which, const char *module,
                      const char *name)
{
    if (recall_entry(p, p->known[which]))
        return;
    pickle_write_global(p->out, module, name);
    p->known[which] = memoize_entry(p);
}

static void put_text(struct metadata_pickler *p, uint32_t *entry, const char *text)
{
    if (recall_entry(p, *entry))
        return;
    pickle_write_string(p->out, text);
    *entry = memoize_entry(p);
}

static void put_key(struct metadata_pickler *p, enum memoized which, const char *key)
{
    put_text(p, &p->known[which], key);
}

/* ---- parts ---- */

static void put_size(struct metadata_pickler *p, int32_t ndim, const int64_t *values)
{
    put_class(p, SIZE_CLASS, "torch", "Size");
    pickle_write_op(p->out, "((");
    for (int32_t d = 0; d < ndim; d++)
        pickle_write_int(p->out, values[d]);
    pickle_write_op(p->out, "ttR");
}

/* (dtype, layout, requires_grad, memory format, pin_memory) */
static void put_properties(struct metadata_pickler *p, rsd_dtype dtype)
{
    put_class(p, PROPERTIES_CLASS, METADATA_MODULE, "TensorProperties");
    pickle_write_op(p->out, ")\x81(");
    put_class(p, (enum memoized)(FIRST_DTYPE + (int)dtype), "torch", dtype_to_torch(dtype));
    if (!recall_entry(p, p->known[LAYOUT])) {
        pickle_write_global(p->out, "torch.serialization", "_get_layout");
        pickle_write_string(p->out, "torch.strided");
        pickle_write_op(p->out, "\x85R");
        p->known[LAYOUT] = memoize_entry(p);
    }
    pickle_write_op(p->out, "\x89");
    if (!recall_entry(p, p->known[MEM_FORMAT])) {
        pickle_write_global(p->out, METADATA_MODULE, "_MEM_FORMAT_ENCODING");
        pickle_write_int(p->out, 0);
        pickle_write_op(p->out, "\x85R");
        p->known[MEM_FORMAT] = memoize_entry(p);
    }
    pickle_write_op(p->out, "\x89tb");
}

static void put_chunk(struct metadata_pickler *p, int32_t ndim, const int64_t *lo,
                      const int64_t *len)
{
    put_class(p, CHUNK_CLASS, METADATA_MODULE, "ChunkStorageMetadata");
    pickle_write_op(p->out, ")\x81}(");
    put_key(p, KEY_OFFSETS, "offsets");
    put_size(p, ndim, lo);
    put_key(p, KEY_SIZES, "sizes");
    put_size(p, ndim, len);
    pickle_write_op(p->out, "ub");
}

/* Adds what state_dict_metadata has of a tensor: properties, size and chunks. */
static void put_tensor(struct metadata_pickler *p, const struct catalog *catalog,
                       const struct stored_tensor *tensor)
{
    put_class(p, TENSOR_CLASS, METADATA_MODULE, "TensorStorageMetadata");
    pickle_write_op(p->out, ")\x81}(");
    put_key(p, KEY_PROPERTIES, "properties");
    put_properties(p, tensor->dtype);
    put_key(p, KEY_SIZE, "size");
    put_size(p, tensor->ndim, tensor_shape(catalog, tensor));
    put_key(p, KEY_CHUNKS, "chunks");
    pickle_write_op(p->out, "](");
    for (size_t box = 0; box < tensor->nboxes; box++)
        put_chunk(p, tensor->ndim, tensor_box_lo(catalog, tensor, box),
                  tensor_box_len(catalog, tensor, box));
    pickle_write_op(p->out, "eub");
}

/* Adds state_dict_metadata: every tensor and value by its name. */
static void put_state_dict(struct metadata_pickler *p, const struct catalog *catalog)
{
    pickle_write_string(p->out, "state_dict_metadata");
    pickle_write_op(p->out, "}(");
    for (size_t i = 0; i < catalog->ntensors; i++) {
        put_text(p, &p->tensor_names[i], catalog->tensors[i].name);
        put_tensor(p, catalog, &catalog->tensors[i]);
    }
    for (size_t i = 0; i < catalog->nvalues; i++) {
        put_text(p, &p->value_names[i], catalog->values[i].name);
        put_class(p, BYTES_CLASS, METADATA_MODULE, "BytesStorageMetadata");
        pickle_write_op(p->out, ")\x81");
    }
    pickle_write_op(p->out, "u");
}

static rsd_status put_path(struct metadata_pickler *p, uint32_t *name_entry, const char *name,
                           const char *path)
{
    put_text(p, name_entry, name);
    if (path)
        return pickle_write_path(path, p->out);
    put_text(p, name_entry, name);
    pickle_write_op(p->out, "\x85");
    return RSD_OK;
}

static rsd_status put_planner_data(struct metadata_pickler *p, const struct catalog *catalog)
{
    pickle_write_string(p->out, "planner_data");
    pickle_write_op(p->out, "}(");
    for (size_t i = 0; i < catalog->ntensors; i++)
        TRY(put_path(p, &p->tensor_names[i], catalog->tensors[i].name, catalog->tensors[i].path));
    for (size_t i = 0; i < catalog->nvalues; i++)
        TRY(put_path(p, &p->value_names[i], catalog->values[i].name, catalog->values[i].path));
    pickle_write_op(p->out, "u");
    return RSD_OK;
}

/* Adds the storage info of an item: file, offset, length and transforms. */
static void put_info(struct metadata_pickler *p, const struct extent *extent,
                     const struct name_list *files)
{
    put_class(p, INFO_CLASS, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    pickle_write_op(p->out, ")\x81}(");
    put_key(p, KEY_PATH, "relative_path");
    put_text(p, &p->file_names[extent->file], files->list[extent->file].bytes);
    put_key(p, KEY_OFFSET, "offset");
    pickle_write_int(p->out, (int64_t)extent->offset);
    put_key(p, KEY_LENGTH, "length");
    pickle_write_int(p->out, (int64_t)extent->nbytes);
    if (extent->nzstd) {
        put_key(p, KEY_TRANSFORMS, "transform_descriptors");
        if (!recall_entry(p, p->known[TRANSFORMS])) {
            pickle_write_op(p->out, "](");
            for (int i = 0; i < extent->nzstd; i++)
                pickle_write_string(p->out, "stream.zstd/1");
            pickle_write_op(p->out, "e");
            p->known[TRANSFORMS] = memoize_entry(p);
        }
    }
    pickle_write_op(p->out, "ub");
}

/* Adds the start of the storage index of a value (index -1) or of a box. The caller adds the offset and the end. */
static void put_index(struct metadata_pickler *p, uint32_t *name_entry, const char *name,
                      int64_t index)
{
    put_class(p, INDEX_CLASS, METADATA_MODULE, "MetadataIndex");
    pickle_write_op(p->out, ")\x81}(");
    put_key(p, KEY_FQN, "fqn");
    put_text(p, name_entry, name);
    put_key(p, KEY_INDEX, "index");
    if (index >= 0)
        pickle_write_int(p->out, index);
    else
        pickle_write_op(p->out, "N");
}

/* Adds storage_data: an index and an info for every value and box. */
static void put_storage(struct metadata_pickler *p, const struct catalog *catalog,
                        const struct name_list *files)
{
    pickle_write_string(p->out, "storage_data");
    pickle_write_op(p->out, "}(");
    for (size_t i = 0; i < catalog->nvalues; i++) {
        put_index(p, &p->value_names[i], catalog->values[i].name, -1);
        pickle_write_op(p->out, "ub");
        put_info(p, &catalog->values[i].extent, files);
    }
    for (size_t i = 0; i < catalog->ntensors; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[i];
        for (size_t box = 0; box < tensor->nboxes; box++) {
            put_index(p, &p->tensor_names[i], tensor->name, (int64_t)box);
            put_key(p, KEY_OFFSET, "offset");
            put_size(p, tensor->ndim, tensor_box_lo(catalog, tensor, box));
            pickle_write_op(p->out, "ub");
            put_info(p, &catalog->extents[tensor->first_extent + box], files);
        }
    }
    pickle_write_op(p->out, "u");
}

static rsd_status put_metadata(struct metadata_pickler *p, const struct catalog *catalog,
                               const struct name_list *files)
{
    pickle_write_op(p->out, "\x80\x02");
    put_class(p, METADATA_CLASS, METADATA_MODULE, "Metadata");
    pickle_write_op(p->out, ")\x81}(");
    put_state_dict(p, catalog);
    TRY(put_planner_data(p, catalog));
    put_storage(p, catalog, files);
    pickle_write_op(p->out, "ub.");
    return p->out->failed ? fail(RSD_ENOMEM, "no memory for the metadata") : RSD_OK;
}

/* Makes the bytes of .metadata. EUNSUPPORTED: torch lacks a dtype. */
static rsd_status make_metadata(const struct catalog *catalog, const struct name_list *files,
                                struct bytes *out)
{
    struct metadata_pickler p = {.out = out};
    for (size_t i = 0; i < catalog->ntensors; i++)
        if (!dtype_to_torch(catalog->tensors[i].dtype))
            return fail(RSD_EUNSUPPORTED, "%s: torch has no dtype %s", catalog->tensors[i].name,
                        rsd_dtype_name(catalog->tensors[i].dtype));
    p.tensor_names = mem_new(catalog->ntensors, sizeof *p.tensor_names);
    p.value_names = mem_new(catalog->nvalues, sizeof *p.value_names);
    p.file_names = mem_new(files->n, sizeof *p.file_names);
    rsd_status status = p.tensor_names && p.value_names && p.file_names ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = put_metadata(&p, catalog, files);
    mem_free(p.tensor_names);
    mem_free(p.value_names);
    mem_free(p.file_names);
    return status;
}

/* ---- the writer ---- */

static rsd_status dcp_check(const rsd_convert_options *options)
{
    if (options->every_replica || options->max_shard_nbytes)
        return fail(RSD_EINVAL, "%s applies to safetensors output only",
                    options->every_replica ? "every_replica" : "max_shard_nbytes");
    return RSD_OK;
}

static void dcp_name_file(const struct manifest *manifest, size_t file, size_t nfiles,
                          char name[FILE_NAME_NCHARS])
{
    (void)manifest, (void)nfiles;
    snprintf(name, FILE_NAME_NCHARS, "__%zu_0.distcp", file);
}

/* Places values first in their file, then tensors. Where an item begins, the metadata says, so that there may be
 * gaps. */
static rsd_status dcp_place(struct manifest *manifest)
{
    struct catalog *catalog = &manifest->catalog;
    for (size_t i = 0; i < catalog->nvalues; i++) {
        struct extent *extent = &catalog->values[i].extent;
        const struct manifest_value *value = &manifest->values[i];
        struct manifest_file *file = &manifest->files[extent->file];
        extent->nzstd = manifest->compress != 0;
        extent->offset = file->nbytes;
        extent->nbytes = value->from ? value->from->extent.nbytes : value->item.n;
        file->nbytes += extent->nbytes;
        file->nvalues++;
    }
    for (size_t t = 0; t < catalog->ntensors; t++)
        for (size_t box = 0; box < catalog->tensors[t].nboxes; box++) {
            size_t i = catalog->tensors[t].first_extent + box;
            struct extent *extent = &catalog->extents[i];
            struct manifest_file *file = &manifest->files[extent->file];
            TRY(manifest_item_nbytes(manifest, t, box, &manifest->items[i].head, &extent->nbytes));
            extent->offset = file->nbytes;
            if (manifest->aligned && extent->nbytes >= ALIGNED_LEAST) /* a gap before it */
                manifest->items[i].gap = -(file->nbytes + manifest->items[i].head) % ALIGNED_NBYTES;
            extent->offset += manifest->items[i].gap;
            file->nbytes = extent->offset + extent->nbytes;
            file->nitems++;
        }
    return RSD_OK;
}

static rsd_status dcp_frame(const struct manifest *manifest, size_t index, size_t box,
                            struct bytes *head, struct bytes *tail)
{
    const struct catalog *catalog = &manifest->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    const struct manifest_item *item = &manifest->items[tensor->first_extent + box];
    const int64_t *shape = item->form ? item->form : tensor_box_len(catalog, tensor, box);
    const int64_t *strides = item->form ? item->form + tensor->ndim : NULL;
    uint32_t crc = crc32_from_raw(item->crc, box_nbytes(catalog, tensor, box));
    return torch_item_frame(tensor->dtype, tensor->ndim, shape, strides, crc, item->first, head,
                            tail);
}

static rsd_status dcp_finish(const struct manifest *manifest, struct store *store)
{
    struct bytes pickle = {0};
    rsd_status status = make_metadata(&manifest->catalog, &store->names, &pickle);
    if (!status)
        status = store_put(store, dcp_writer.marker, pickle.data, pickle.n);
    bytes_drop(&pickle);
    return status;
}

const struct format_writer dcp_writer = {.marker = ".metadata",
                                         .suffix_until_complete = "",
                                         .check = dcp_check,
                                         .name_file = dcp_name_file,
                                         .place = dcp_place,
                                         .frame = dcp_frame,
                                         .make_value = torch_item_from_pickle,
                                         .finish = dcp_finish};
