/* orbax.h - what the files that read Orbax checkpoints share. Private to format. */
#ifndef ORBAX_H
#define ORBAX_H

#include "json.h"
#include "rows.h"

/* ---- key_list.c: the keys of a checkpoint ---- */

enum { MAX_KEY_NBYTES = 4096 };

/* A key and where its value is. */
struct stored_key {
    size_t text, nbytes;           /* the key, in the texts of the list */
    uint64_t offset, value_nbytes; /* of the value, in its file */
    const char *memory; /* the value, if it is in memory; it lives as long as the catalog */
    uint32_t file;
    bool
        by_name; /* the value is the file that has the name of the key; the rest is not known yet */
};

struct key_list {
    struct store *store;
    const char *directory; /* in the store; "": the store itself */
    struct stored_key *list;
    size_t n, capacity;
    struct bytes texts;
    uint64_t *used; /* by file: bytes that were read of it */
    size_t used_capacity;
};

void key_list_start(struct key_list *keys, struct store *store, const char *directory);
void key_list_drop(struct key_list *keys);

/* Counts the bytes that are read of a file while the checkpoint is opened. Returns EFORMAT if they are more
 * than the file has: something refers to the same bytes again and again. */
rsd_status key_list_use(struct key_list *keys, uint32_t file, uint64_t nbytes);

rsd_status key_list_add(struct key_list *keys, struct slice key, const struct stored_key *value);

/* Adds the files below the directory. Their names below it are the keys. */
rsd_status key_list_add_directory(struct key_list *keys);

/* Finds the value of a key, which may be a file that was not looked at yet. */
rsd_status key_list_find_value(struct key_list *keys, size_t index);

/* Reads n bytes of a value that was found and has them. */
rsd_status key_list_read(struct key_list *keys, size_t index, uint64_t at, void *out, size_t n);

/* Puts the key in front of the last error. */
rsd_status key_list_fail_in(const struct key_list *keys, size_t index, rsd_status status);

static inline struct slice key_list_text(const struct key_list *keys, size_t index)
{
    return (struct slice){(const char *)keys->texts.data + keys->list[index].text,
                          keys->list[index].nbytes};
}

/* ---- ocdbt.c ---- */

/* Adds the keys of the database whose manifest is in the directory. */
rsd_status ocdbt_read_keys(struct key_list *keys, struct catalog *catalog);

/* ---- zarr.c: what .zarray and zarr.json say of an array ---- */

struct zarr_array {
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
    int64_t chunk[RSD_MAX_DIMS]; /* the shape of what a key has: a chunk, or a shard of chunks */
    int64_t inner
        [RSD_MAX_DIMS]; /* the shape of the chunks of a shard; without shards that of a chunk */
    bool sharded;
    bool index_first, index_big_endian, index_has_crc; /* of a shard */
    bool column_major, big_endian, zstd;
    bool crc_inside,
        crc_outside;        /* a CRC-32C follows the bytes before or after they are compressed */
    bool prefixed;          /* keys of chunks begin with c */
    char separator;         /* of the numbers in such a key */
    unsigned char fill[16]; /* the value of elements that no chunk has */
    bool fill_known;
    char refused[80]; /* what of the array is not supported; "": nothing */
};

/* Reads such a text. *is_array is false if it describes something else, such as a group. */
rsd_status zarr_read(const char *text, size_t nbytes, bool v3, struct zarr_array *out,
                     bool *is_array);

/* ---- zarr_fill.c ---- */

/* Takes the fill value. One that the dtype cannot have is not known. */
rsd_status zarr_take_fill_value(struct json *j, struct zarr_array *array);

/* ---- chunk_stream.c ---- */

/* Opens the chunk of an extent. The array says how many bytes become of it, and has it if it is in memory. */
rsd_status chunk_stream_open(struct store *store, const struct extent *extent,
                             const struct stored_array *array, struct stored_stream **out);

/* Finds the memory of such a stream while it is open, at most. */
rsd_status chunk_stream_memory(struct store *store, const struct extent *extent,
                               const struct stored_array *array, uint64_t *nbytes);

/* ---- orbax_chunks.c: the boxes of an array ---- */

struct orbax_array {
    struct slice name;     /* the directory of its keys */
    uint32_t file;         /* with its metadata */
    uint32_t chunks, fill; /* arrays of the catalog: of its chunks, of its fill value */
    bool complete;         /* every chunk was stored, so one that is not there is lost */
    struct zarr_array zarr;
};

/* A key that has a chunk or shard of an array. */
struct chunk_key {
    size_t array, key;
    int64_t index; /* in the grid, row-major */
};

/* Returns how many chunks or shards the grid has along a dim. */
static inline int64_t zarr_grid_count(const struct zarr_array *zarr, int32_t d)
{
    return ceil_div(zarr->shape[d], zarr->chunk[d]);
}

/* Adds all boxes of an array to the last tensor. The chunks are sorted by index. */
rsd_status orbax_add_boxes(struct catalog *catalog, struct key_list *keys,
                           struct orbax_array *array, const struct chunk_key *chunks, size_t n);

/* The locate and open_stream of the format. */
rsd_status orbax_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                        struct stored_array *array);
rsd_status orbax_open_stream(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                             struct stored_stream **stream);

/* ---- orbax_arrays.c ---- */

/* One directory with a tree of arrays. */
struct orbax_item {
    struct catalog *catalog;
    const char *name; /* goes in front of all names; "": nothing does */
    struct key_list keys;
    struct orbax_tree *tree;
};

/* Adds the arrays among the keys as tensors, and those that are scalars in the tree as values. */
rsd_status orbax_add_arrays(struct orbax_item *item);

/* ---- orbax_tree.c: what _METADATA says of an item ---- */

enum tree_kind {
    TREE_ARRAY,
    TREE_SCALAR,
    TREE_STRING,
    TREE_EMPTY,  /* an empty container or None, as `json` */
    TREE_SKIPPED /* a leaf that was not saved */
};

struct tree_entry {
    const char *name, *path; /* the path is that of the tensor or value, as JSON */
    const char *json;
    enum tree_kind kind;
    bool found; /* the tensor or value was added */
};

/* Starts as {0}, which is the tree of an item without _METADATA. */
struct orbax_tree {
    struct tree_entry *list;
    size_t n, capacity;
    struct string_map names;
    bool complete; /* chunks that have nothing but the fill value were stored too */
};

rsd_status orbax_tree_read(struct orbax_item *item, uint32_t file);
struct tree_entry *orbax_tree_find(const struct orbax_tree *tree, struct slice name); /* or NULL */
void orbax_tree_drop(struct orbax_tree *tree);

/* Adds the values of the tree that are not arrays. strings: number of the file with texts; UINT32_MAX: no
 * such file. EFORMAT: an array of the tree was not found. */
rsd_status orbax_add_tree_values(struct orbax_item *item, uint32_t strings);

/* Adds a value, and takes json over. path may be NULL. */
rsd_status orbax_add_value(struct orbax_item *item, struct slice name, const char *path,
                           char *json);

/* Adds the name of a tensor or value to a text: that of the item, and its own. */
void orbax_add_name(const struct orbax_item *item, struct slice name, struct text *text);

#endif
