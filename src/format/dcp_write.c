/* dcp_out.c - the metadata of a DCP checkpoint, as a pickle that torch 2.3 to 2.13 read.
 *
 * Everything that appears again and again (classes, keys, names, file names) is written once and referred
 * to. Only what all these versions know is written: no storage_meta and no version, which have defaults,
 * and transforms only for compressed items.
 */
#include "checkpoint.h"

#include <string.h>

#define METADATA_MODULE "torch.distributed.checkpoint.metadata"

/* What is referred to: the number of the memo entry, plus one; 0: not written yet. */
enum remembered {
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
    NREMEMBERED = FIRST_DTYPE + RSD_C32 + 1
};

struct pickler {
    struct bytes *out;
    uint32_t memo; /* entries so far */
    uint32_t known[NREMEMBERED];
    uint32_t *tensor_names, *value_names, *file_names; /* likewise */
};

/* ---- memo ---- */

static uint32_t remember(struct pickler *p)
{
    emit_op(p->out, p->memo < 256 ? "q" : "r");
    emit_number(p->out, p->memo, p->memo < 256 ? 1 : 4);
    return ++p->memo;
}

static bool recall(struct pickler *p, uint32_t entry)
{
    if (entry == 0)
        return false;
    emit_op(p->out, entry - 1 < 256 ? "h" : "j");
    emit_number(p->out, entry - 1, entry - 1 < 256 ? 1 : 4);
    return true;
}

static void put_class(struct pickler *p, enum remembered which, const char *module,
                      const char *name)
{
    if (recall(p, p->known[which]))
        return;
    emit_global(p->out, module, name);
    p->known[which] = remember(p);
}

static void put_text(struct pickler *p, uint32_t *entry, const char *text)
{
    if (recall(p, *entry))
        return;
    emit_text(p->out, (struct slice){text, strlen(text)});
    *entry = remember(p);
}

static void put_key(struct pickler *p, enum remembered which, const char *key)
{
    put_text(p, &p->known[which], key);
}

/* ---- parts ---- */

static void put_size(struct pickler *p, int32_t ndim, const int64_t *values)
{
    put_class(p, SIZE_CLASS, "torch", "Size");
    emit_op(p->out, "((");
    for (int32_t d = 0; d < ndim; d++)
        emit_int(p->out, values[d]);
    emit_op(p->out, "ttR");
}

/* (dtype, layout, requires_grad, memory format, pin_memory) */
static void put_properties(struct pickler *p, rsd_dtype dtype)
{
    put_class(p, PROPERTIES_CLASS, METADATA_MODULE, "TensorProperties");
    emit_op(p->out, ")\x81(");
    put_class(p, (enum remembered)(FIRST_DTYPE + (int)dtype), "torch", dtype_to_torch(dtype));
    if (!recall(p, p->known[LAYOUT])) {
        emit_global(p->out, "torch.serialization", "_get_layout");
        emit_text(p->out, (struct slice){"torch.strided", 13});
        emit_op(p->out, "\x85R");
        p->known[LAYOUT] = remember(p);
    }
    emit_op(p->out, "\x89");
    if (!recall(p, p->known[MEM_FORMAT])) {
        emit_global(p->out, METADATA_MODULE, "_MEM_FORMAT_ENCODING");
        emit_int(p->out, 0);
        emit_op(p->out, "\x85R");
        p->known[MEM_FORMAT] = remember(p);
    }
    emit_op(p->out, "\x89tb");
}

static void put_chunk(struct pickler *p, int32_t ndim, const int64_t *lo, const int64_t *len)
{
    put_class(p, CHUNK_CLASS, METADATA_MODULE, "ChunkStorageMetadata");
    emit_op(p->out, ")\x81}(");
    put_key(p, KEY_OFFSETS, "offsets");
    put_size(p, ndim, lo);
    put_key(p, KEY_SIZES, "sizes");
    put_size(p, ndim, len);
    emit_op(p->out, "ub");
}

static void put_tensor(struct pickler *p, const struct contents *contents,
                       const struct tensor *tensor)
{
    put_class(p, TENSOR_CLASS, METADATA_MODULE, "TensorStorageMetadata");
    emit_op(p->out, ")\x81}(");
    put_key(p, KEY_PROPERTIES, "properties");
    put_properties(p, tensor->dtype);
    put_key(p, KEY_SIZE, "size");
    put_size(p, tensor->ndim, tensor_shape(contents, tensor));
    put_key(p, KEY_CHUNKS, "chunks");
    emit_op(p->out, "](");
    for (size_t box = 0; box < tensor->nboxes; box++)
        put_chunk(p, tensor->ndim, tensor_box_lo(contents, tensor, box),
                  tensor_box_len(contents, tensor, box));
    emit_op(p->out, "eub");
}

static void put_state_dict(struct pickler *p, const struct contents *contents)
{
    emit_text(p->out, (struct slice){"state_dict_metadata", 19});
    emit_op(p->out, "}(");
    for (size_t i = 0; i < contents->ntensors; i++) {
        put_text(p, &p->tensor_names[i], contents->tensors[i].name);
        put_tensor(p, contents, &contents->tensors[i]);
    }
    for (size_t i = 0; i < contents->nvalues; i++) {
        put_text(p, &p->value_names[i], contents->values[i].name);
        put_class(p, BYTES_CLASS, METADATA_MODULE, "BytesStorageMetadata");
        emit_op(p->out, ")\x81");
    }
    emit_op(p->out, "u");
}

static rsd_status put_path(struct pickler *p, uint32_t *name_entry, const char *name,
                           const char *path)
{
    put_text(p, name_entry, name);
    if (path)
        return json_to_path(path, p->out);
    put_text(p, name_entry, name);
    emit_op(p->out, "\x85");
    return RSD_OK;
}

static rsd_status put_planner_data(struct pickler *p, const struct contents *contents)
{
    emit_text(p->out, (struct slice){"planner_data", 12});
    emit_op(p->out, "}(");
    for (size_t i = 0; i < contents->ntensors; i++)
        TRY(put_path(p, &p->tensor_names[i], contents->tensors[i].name, contents->tensors[i].path));
    for (size_t i = 0; i < contents->nvalues; i++)
        TRY(put_path(p, &p->value_names[i], contents->values[i].name, contents->values[i].path));
    emit_op(p->out, "u");
    return RSD_OK;
}

static void put_info(struct pickler *p, const struct extent *extent, const struct files *files)
{
    put_class(p, INFO_CLASS, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    emit_op(p->out, ")\x81}(");
    put_key(p, KEY_PATH, "relative_path");
    put_text(p, &p->file_names[extent->file], files->list[extent->file].name);
    put_key(p, KEY_OFFSET, "offset");
    emit_int(p->out, (int64_t)extent->offset);
    put_key(p, KEY_LENGTH, "length");
    emit_int(p->out, (int64_t)extent->nbytes);
    if (extent->nzstd) {
        put_key(p, KEY_TRANSFORMS, "transform_descriptors");
        if (!recall(p, p->known[TRANSFORMS])) {
            emit_op(p->out, "](");
            for (int i = 0; i < extent->nzstd; i++)
                emit_text(p->out, (struct slice){"stream.zstd/1", 13});
            emit_op(p->out, "e");
            p->known[TRANSFORMS] = remember(p);
        }
    }
    emit_op(p->out, "ub");
}

static void put_index(struct pickler *p, uint32_t *name_entry, const char *name, int64_t index)
{
    put_class(p, INDEX_CLASS, METADATA_MODULE, "MetadataIndex");
    emit_op(p->out, ")\x81}(");
    put_key(p, KEY_FQN, "fqn");
    put_text(p, name_entry, name);
    put_key(p, KEY_INDEX, "index");
    if (index >= 0)
        emit_int(p->out, index);
    else
        emit_op(p->out, "N");
}

static void put_storage(struct pickler *p, const struct contents *contents,
                        const struct files *files)
{
    emit_text(p->out, (struct slice){"storage_data", 12});
    emit_op(p->out, "}(");
    for (size_t i = 0; i < contents->nvalues; i++) {
        put_index(p, &p->value_names[i], contents->values[i].name, -1);
        emit_op(p->out, "ub");
        put_info(p, &contents->values[i].extent, files);
    }
    for (size_t i = 0; i < contents->ntensors; i++) {
        const struct tensor *tensor = &contents->tensors[i];
        for (size_t box = 0; box < tensor->nboxes; box++) {
            put_index(p, &p->tensor_names[i], tensor->name, (int64_t)box);
            put_key(p, KEY_OFFSET, "offset");
            put_size(p, tensor->ndim, tensor_box_lo(contents, tensor, box));
            emit_op(p->out, "ub");
            put_info(p, &contents->extents[tensor->first_extent + box], files);
        }
    }
    emit_op(p->out, "u");
}

static rsd_status put_metadata(struct pickler *p, const struct contents *contents,
                               const struct files *files)
{
    emit_op(p->out, "\x80\x02");
    put_class(p, METADATA_CLASS, METADATA_MODULE, "Metadata");
    emit_op(p->out, ")\x81}(");
    put_state_dict(p, contents);
    TRY(put_planner_data(p, contents));
    put_storage(p, contents, files);
    emit_op(p->out, "ub.");
    return p->out->failed ? fail(RSD_ENOMEM, "no memory for the metadata") : RSD_OK;
}

rsd_status dcp_metadata(const struct contents *contents, const struct files *files,
                        struct bytes *out)
{
    struct pickler p = {.out = out};
    for (size_t i = 0; i < contents->ntensors; i++)
        if (!dtype_to_torch(contents->tensors[i].dtype))
            return fail(RSD_EUNSUPPORTED, "%s: torch has no dtype for %s",
                        contents->tensors[i].name, rsd_dtype_name(contents->tensors[i].dtype));
    p.tensor_names = mem_new(contents->ntensors, sizeof *p.tensor_names);
    p.value_names = mem_new(contents->nvalues, sizeof *p.value_names);
    p.file_names = mem_new(files->n, sizeof *p.file_names);
    rsd_status status = p.tensor_names && p.value_names && p.file_names ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = put_metadata(&p, contents, files);
    mem_free(p.tensor_names);
    mem_free(p.value_names);
    mem_free(p.file_names);
    return status;
}
