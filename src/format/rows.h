/* rows.h - the rows of the table of formats, and what readers use of each other. Private to format. */
#ifndef ROWS_H
#define ROWS_H

#include "format.h"

extern const struct format format_dcp, format_safetensors, format_torch_save, format_orbax;
extern const struct format_writer dcp_writer, safetensors_writer;

/* How sure a format is that a file belongs to it. The best sign in a directory decides. */
enum sureness {
    NOT_SURE,
    SURE_OF_SUFFIX, /* the user named the file, and its bytes say nothing */
    SURE_OF_BYTES,  /* the user named the file, and its first bytes are those of the format */
    SURE_OF_TORCH_FILE,
    SURE_OF_TORCH_INDEX,
    SURE_OF_RANK_METADATA, /* __0.metadata */
    SURE_OF_SAFETENSORS,
    SURE_OF_SAFETENSORS_INDEX,
    SURE_OF_PROCESS, /* ocdbt.process_0, a part of an Orbax checkpoint */
    SURE_OF_ORBAX,   /* _METADATA, manifest.ocdbt */
    SURE_OF_METADATA /* .metadata */
};

/* ---- index_json.c ---- */

/* Adds the files that an index.json names to the store, each once. */
rsd_status index_add_files(struct store *store, uint32_t index);

/* ---- catalog.c ---- */

/* The locate of formats whose extents are EXTENT_DENSE or EXTENT_ARRAY. */
rsd_status catalog_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                          struct stored_array *array);

/* ---- dcp_read.c ---- */

/* Reads metadata, of all ranks or one file each, that the store has as its first files. */
rsd_status dcp_open(struct store *store, struct catalog *catalog);

/* ---- values.c ---- */

rsd_status dcp_read_item(const rsd_checkpoint *checkpoint, const struct stored_value *value,
                         struct bytes *item);

/* ---- safetensors_read.c ---- */

/* Finds a tensor of a blob that begins at an offset of a file: its dtype and shape, and where its bytes
 * begin in the file. */
rsd_status safetensors_find_tensor(struct store *store, uint32_t file, uint64_t at,
                                   const char *name, rsd_dtype *dtype, int32_t *ndim,
                                   int64_t *shape, uint64_t *begin);

static inline bool has_suffix(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return n > m && strcmp(name + n - m, suffix) == 0;
}

#endif
