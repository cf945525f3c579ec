/* rows.h - the rows of the table of formats, and what readers use of each other. Private to format. */
#ifndef ROWS_H
#define ROWS_H

#include "format.h"

extern const struct format format_dcp, format_safetensors, format_torch_save, format_dtensor,
    format_zero, format_megatron, format_orbax;
extern const struct format_writer dcp_writer, safetensors_writer, torch_save_writer, dtensor_writer;

/* How sure a format is that a file belongs to it. The best sign in a directory decides. */
enum sureness {
    NOT_SURE,
    SURE_OF_SUFFIX, /* the user named the file, and its bytes say nothing */
    SURE_OF_BYTES,  /* the user named the file, and its first bytes are those of the format */
    SURE_OF_TORCH_FILE,
    SURE_OF_MEGATRON_TAG,  /* latest_checkpointed_iteration.txt */
    SURE_OF_MEGATRON_RANK, /* a directory mp_rank_00 */
    SURE_OF_ZERO_TAG,      /* DeepSpeed: latest */
    SURE_OF_ZERO_FILE,     /* DeepSpeed: mp_rank_00_model_states.pt */
    SURE_OF_TORCH_INDEX,
    SURE_OF_RANK_METADATA, /* __0.metadata */
    SURE_OF_SAFETENSORS,
    SURE_OF_SAFETENSORS_INDEX,
    SURE_OF_PROCESS,   /* ocdbt.process_0, a part of an Orbax checkpoint */
    SURE_OF_ORBAX,     /* _METADATA, manifest.ocdbt */
    SURE_OF_METADATA,  /* .metadata */
    SURE_OF_RANK_FILES /* model_world_size_N_rank_R.pt */
};

/* ---- index_json.c ---- */

/* Reads a file of at most `limit` bytes with `parse`, which takes the one value that it has. An error names the file. */
struct json;
rsd_status format_parse_json(struct store *store, uint32_t file, uint64_t limit,
                             rsd_status (*parse)(struct json *j, void *context), void *context);

/* Adds the files that an index.json names to the store, each once. */
rsd_status index_add_files(struct store *store, uint32_t index);

/* Writes the index of whole tensors in several files. */
rsd_status index_write(const struct manifest *manifest, struct store *store, const char *name);

/* ---- catalog.c ---- */

/* The locate of formats whose extents are EXTENT_DENSE, EXTENT_ARRAY or EXTENT_RANGE. */
rsd_status catalog_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                          struct stored_array *array);

/* ---- copies.c ---- */

/* Says whether two arrays of one dtype and shape have the same elements. Those with equal CRC-32s are not read.
 * An error names the file. */
rsd_status copies_compare(struct store *store, rsd_dtype dtype, int32_t ndim, const int64_t *len,
                          const uint32_t files[2], const struct stored_array *a,
                          const struct stored_array *b, bool *equal);

/* ---- dcp_read.c ---- */

/* Reads metadata, of all ranks or one file each, that the store has as its first files. */
rsd_status dcp_open(struct store *store, struct catalog *catalog, const rsd_open_options *options);

/* The same, for the files from `first` on. Data files are in the directory of the first of them. */
rsd_status dcp_open_from(struct store *store, uint32_t first, struct catalog *catalog);

/* ---- dcp_item.c ---- */

/* The locate and open_stream of the format, for items in data files. */
rsd_status dcp_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                      struct stored_array *array);
rsd_status dcp_open_stream(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                           struct stored_stream **stream);

/* ---- megatron_values.c ---- */

/* Finds out whether Megatron wrote the DCP in a directory, and adds the values of its common.pt. */
rsd_status megatron_read_common(struct store *store, const char *directory,
                                struct catalog *catalog);

/* ---- megatron_stacks.c ---- */

/* Derives the tensors of a checkpoint of Megatron that the options ask for: stacked layers become tensors of their
 * own, and the vocabulary loses its padding. */
rsd_status megatron_change_tensors(rsd_checkpoint *checkpoint, const rsd_open_options *options);

/* ---- values.c ---- */

rsd_status dcp_read_item(const rsd_checkpoint *checkpoint, const struct stored_value *value,
                         struct bytes *item);

/* ---- rank_files.c: names with numbers in them ---- */

/* Returns whether a name has the form of a pattern, in which # stands for a decimal number below 2^31 and * for
 * any text. numbers[i] is that of the i-th #. */
bool name_has_form(const char *name, const char *pattern, int64_t *numbers);

/* Adds a file of a directory of the store; "" is the store itself. */
rsd_status format_add_file(struct store *store, const char *directory, struct slice name,
                           uint32_t *file);

/* The files of a directory that have one form, by the number of their rank. Starts as {0}. */
struct rank_files {
    uint32_t *files; /* UINT32_MAX: the rank has no file */
    int64_t nranks;
};

/* Adds the files of a listing whose names have the form "..._#_..._#...": the number of ranks, and the rank.
 * Files of another number of ranks do not count. Files are added to the store. */
rsd_status rank_files_add(struct rank_files *ranks, struct store *store,
                          const struct store_listing *listing, const char *pattern, int64_t nranks);
void rank_files_drop(struct rank_files *ranks);

static inline bool has_suffix(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return n > m && strcmp(name + n - m, suffix) == 0;
}

#endif
