/* torch_item.h - tensors and values as torch.save writes them. Private to format. */
#ifndef TORCH_ITEM_H
#define TORCH_ITEM_H

#include "format.h"
#include "zip.h"

/* ---- torch_names.c ---- */

/* Return 0 for a name that is not a dtype, and NULL for a dtype that has no such name. */
rsd_dtype dtype_from_storage(struct slice name);
rsd_dtype dtype_from_safetensors(struct slice name);
const char *dtype_to_storage(rsd_dtype dtype);
const char *dtype_to_safetensors(rsd_dtype dtype);

/* ---- torch_item_read.c: a tensor as torch pickles it ---- */

struct torch_view {
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS], strides[RSD_MAX_DIMS], offset; /* in elements */
    struct slice key;       /* of its storage; it points into the pickle's tree */
    uint64_t storage_count; /* elements of the storage, or bytes if it is untyped */
    bool untyped;
};

/* Takes a shape. EFORMAT: it is not one. EUNSUPPORTED: it has more than RSD_MAX_DIMS dims. */
rsd_status torch_take_shape(const struct pickle_tree *tree, pickle_node c, int32_t *ndim,
                            int64_t *shape);

/* Of a tensor with a storage. Attributes, Parameters and subclasses around it do not matter. */
bool torch_view_is_tensor(const struct pickle_tree *tree, pickle_node c);
rsd_status torch_view_read(const struct pickle_tree *tree, pickle_node c, struct torch_view *out);

/* Returns whether a node is a tensor without a storage of its own: a DTensor, a ShardedTensor or another
 * subclass that wraps tensors. */
bool torch_is_sharded(const struct pickle_tree *tree, pickle_node c);

/* Returns whether a node is a tensor of a kind that cannot be read (quantized, sparse), or a bare storage. */
bool torch_is_odd_tensor(const struct pickle_tree *tree, pickle_node c);

/* Returns EFORMAT unless the view lies inside a storage of record_nbytes. EUNSUPPORTED: elements share bytes,
 * and there are too many of them. */
rsd_status torch_view_check(const struct torch_view *view, uint64_t record_nbytes);

/* Sets the base and strides of a view that torch_view_check accepts. */
void torch_view_set_array(const struct torch_view *view, struct stored_array *array);

/* Reads the byte order of an archive, which is little-endian if it has none. The second takes the text of its record. */
rsd_status torch_read_byteorder(struct zip *zip, bool *big_endian);
rsd_status torch_take_byteorder(struct slice text, bool *big_endian);

/* Find records of an archive: data.pkl, and the storage of a key, of which *array gets offset, length and CRC.
 * EFORMAT: the archive lacks the record. */
rsd_status torch_find_pickle(struct zip *zip, struct zip_record **pickle);
rsd_status torch_find_storage(struct zip *zip, struct slice key, struct stored_array *array);

/* Finds the tensor in an item of torch.save. */
rsd_status torch_item_locate(struct store *store, const struct extent *extent,
                             struct torch_view *view, struct stored_array *array);

/* The same, and a large item is parsed once in the life of a checkpoint. */
rsd_status archive_locate(const rsd_checkpoint *checkpoint, const struct extent *extent,
                          struct torch_view *view, struct stored_array *array);

/* ---- torch_item_stream.c: the same in a compressed item ---- */

/* Finds the tensor. The stream is left at its first byte. */
rsd_status torch_item_open_stream(struct store *store, const struct extent *extent,
                                  struct torch_view *view, struct stored_array *array,
                                  struct stored_stream **stream);

/* ---- torch_file.c: a file of torch.save ---- */

enum { TORCH_MAX_DEPTH = 64 }; /* of nested dicts and lists that are visited */

struct torch_storage {
    uint64_t offset, nbytes; /* in the file */
};

struct torch_file {
    struct pickle_tree tree;
    pickle_node root; /* the object that was saved */
    struct store *store;
    uint32_t index; /* of the file in the store */
    bool big_endian;

    /* Private to torch_file.c. */
    struct store_range range; /* the file; before torch 1.6, from the current pickle on */
    bool archive;
    struct zip zip;
    struct pickle_tree keys_tree; /* before torch 1.6: the keys of the storages, and the storages */
    struct string_map keys;
    struct torch_storage *storages;
};

/* Reads the pickle of a file. The caller closes the file, except on failure. */
rsd_status torch_file_open(struct torch_file *file, struct store *store, uint32_t index);
void torch_file_close(struct torch_file *file);

/* Finds the bytes of a tensor of the tree, for which torch_view_is_tensor is true. */
rsd_status torch_file_find_tensor(struct torch_file *file, pickle_node tensor,
                                  struct torch_view *view, struct stored_array *array);

/* ---- torch_tree.c: what is nested in a file ---- */

enum { TORCH_MAX_NAME_NBYTES = 2000 };

/* One part of a name: a key, or an index of a list. */
struct torch_step {
    size_t begin, end;
    bool number;
    bool module; /* the names of modules, one below the other, which are one key of a state dict */
};

/* Visits what is below a node of a file. The functions are called for every tensor and every value; NULL:
 * it is added to the catalog under the name that torch_visit_name returns. */
struct torch_visit {
    struct torch_file *file;
    struct catalog *catalog;
    rsd_status (*on_tensor)(struct torch_visit *visit, pickle_node c);
    rsd_status (*on_value)(struct torch_visit *visit, pickle_node c);
    void *context;

    /* Private to torch_tree.c. */
    struct torch_file opened;         /* by torch_visit_file */
    char name[TORCH_MAX_NAME_NBYTES]; /* of the current node, with a zero behind it */
    size_t name_nbytes, nsteps, ncontainers;
    struct torch_step steps[TORCH_MAX_DEPTH + 1];
    pickle_node containers[TORCH_MAX_DEPTH + 1]; /* in which the current node is */
    unsigned char *without_tensor;               /* a bit for each node; NULL: no one asked */
};

/* Opens a file, calls `run`, which visits nodes of it, and closes the file. The visit starts with everything but the
 * file. An error names the file. */
rsd_status torch_visit_file(struct torch_visit *visit, struct store *store, uint32_t index,
                            rsd_status (*run)(struct torch_visit *visit));

/* Frees what a visit of an open file has. */
void torch_visit_end(struct torch_visit *visit);

/* Adds a part to the front of all names until it is left again. */
rsd_status torch_visit_enter(struct torch_visit *visit, struct slice part);
void torch_visit_leave(struct torch_visit *visit);

/* Visits a node and what is below it; the second adds a part to the front of the names. */
rsd_status torch_visit_run(struct torch_visit *visit, pickle_node c);
rsd_status torch_visit_part(struct torch_visit *visit, struct slice part, pickle_node c);

/* For functions that are called: the name of the current node (in which a key may have put a zero), and what
 * is done without them. */
struct slice torch_visit_name(const struct torch_visit *visit);
rsd_status torch_visit_path(struct torch_visit *visit, const char **out); /* JSON, in the catalog */
rsd_status torch_visit_add_tensor(struct torch_visit *visit, pickle_node c);
rsd_status torch_visit_add_value(struct torch_visit *visit, pickle_node c);

/* Adds a tensor that cannot be read, for the reason of the last error. */
rsd_status torch_visit_add_refused(struct torch_visit *visit);

/* ---- torch_item_write.c ---- */

/* Adds what is before and behind the bytes of a dense tensor to head and tail. crc is the CRC-32 of the
 * bytes, and `first` has the first eight of them; neither changes a length. Strides, in elements, are those
 * that the item states; NULL: row-major. */
rsd_status torch_item_frame(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                            const int64_t *strides, uint32_t crc, const unsigned char first[8],
                            struct bytes *head, struct bytes *tail);

/* Makes the item of a value from its pickle. */
rsd_status torch_item_from_pickle(const struct bytes *pickle, struct bytes *out);

#endif
