/* format.h - what the files of each format hold. */
#ifndef FORMAT_H
#define FORMAT_H

#include "crc.h"
#include "json.h"
#include "layout.h"
#include "pickle.h"
#include "store.h"
#include "zip.h"
#include "zstd_stream.h"

/* ---- view.c: a tensor as torch pickles it ---- */

struct torch_view {
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS], strides[RSD_MAX_DIMS], offset; /* in elements */
    struct slice key;                                           /* of its storage, in the nodes */
    uint64_t storage_count; /* elements of the storage, or bytes if it is untyped */
    bool untyped;
};

bool torch_view_is_tensor(const struct pickle_tree *tree, pickle_node c);
rsd_status torch_view_read(const struct pickle_tree *tree, pickle_node c, struct torch_view *out);

/* EFORMAT unless the view lies inside a storage of so many bytes, with no two elements in one place. */
rsd_status torch_view_check(const struct torch_view *view, uint64_t record_nbytes);

/* ---- contents.c: what a checkpoint holds ---- */

enum item_kind {
    ITEM_NONE,  /* nothing says where the bytes are */
    ITEM_PLAIN, /* the bytes of a dense row-major array, little-endian */
    ITEM_SAVED, /* what torch.save writes, or a safetensors blob with the tensor in it */
    ITEM_VIEW,  /* a view of a storage, in an archive */
};

/* Where the bytes of a box or value are. */
struct extent {
    uint64_t offset, nbytes; /* in the file */
    uint32_t file;
    uint8_t kind;    /* enum item_kind */
    uint8_t nzstd;   /* how many times the item was compressed */
    uint8_t unknown; /* 1: it went through a transform that is not known, by the number below */
    uint32_t detail; /* ITEM_VIEW: which view; drafts: which box of its rank */
};

/* A tensor of a torch.save file: where its storage lies and how it looks at it. */
struct stored_view {
    struct torch_view view;
    uint64_t data, nbytes; /* of the storage, in the file */
    uint32_t crc;
    bool has_crc, big_endian;
};

struct stored_tensor {
    const char *name;
    rsd_dtype dtype;
    int32_t ndim;
    size_t shape, boxes; /* into coordinates: the shape; lo and len of each box in turn */
    size_t first_extent, nboxes;
    const char *path; /* where it was in a nested state dict, as JSON; NULL: not known */
};

struct stored_value {
    const char *name, *path;
    struct extent extent;
    char *json;          /* the value, if it has no item of its own and is plain; else NULL */
    struct bytes pickle; /* likewise, to be written */
};

struct named {
    const char *name;
    size_t index;
};

struct catalog {
    struct stored_tensor *tensors;
    int64_t *coordinates;
    struct extent *extents;
    struct stored_value *values;
    struct stored_view *views;
    const char **transforms; /* names of those that are not known */
    char **names;            /* blocks of names */
    char *next_name;
    struct named *tensor_names, *value_names; /* sorted */
    size_t ntensors, tensors_capacity, ncoordinates, coordinates_capacity, nextents,
        extents_capacity, nvalues, values_capacity, nviews, views_capacity, ntransforms,
        transforms_capacity, nnames, names_capacity, names_left;
};

rsd_status catalog_add_name(struct catalog *catalog, struct slice name, const char **out);
rsd_status catalog_add_tensor(struct catalog *catalog, struct slice name, rsd_dtype dtype,
                              int32_t ndim, const int64_t *shape);
rsd_status catalog_add_box(struct catalog *catalog, const int64_t *lo, const int64_t *len,
                           struct extent extent); /* to the last tensor */
rsd_status catalog_add_value(struct catalog *catalog, struct slice name, struct extent extent,
                             char *json); /* takes json over on success */
rsd_status catalog_finish(struct catalog *catalog);

/* EUNSUPPORTED for an item that went through a transform that is not known. */
rsd_status catalog_check_transforms(const struct catalog *catalog, const struct extent *extent);
rsd_status catalog_copy_text(struct catalog *catalog, const char *text, const char **out);
void catalog_drop(struct catalog *catalog);

/* As explicit boxes, in their order: all of rank 0, or of the rank that is the number of their file. */
rsd_status catalog_tensor_layout(const struct catalog *catalog, const struct stored_tensor *tensor,
                                 bool by_file, rsd_layout **out);
rsd_status catalog_boxes_layout(rsd_dtype dtype, int32_t ndim, const int64_t *shape, size_t n,
                                const int64_t *lo, const int64_t *len, rsd_layout **out);
rsd_status catalog_tensor_plan(const struct catalog *catalog, const struct stored_tensor *tensor,
                               size_t n, const int64_t *lo, const int64_t *len, rsd_plan **plan);

size_t catalog_find_tensor(const struct catalog *catalog,
                           const char *name); /* SIZE_MAX: not there */
size_t catalog_find_value(const struct catalog *catalog, const char *name);

static inline const int64_t *tensor_shape(const struct catalog *catalog,
                                          const struct stored_tensor *tensor)
{
    return catalog->coordinates + tensor->shape;
}

static inline const int64_t *tensor_box_lo(const struct catalog *catalog,
                                           const struct stored_tensor *tensor, size_t box)
{
    return catalog->coordinates + tensor->boxes + 2 * (size_t)tensor->ndim * box;
}

static inline const int64_t *tensor_box_len(const struct catalog *catalog,
                                            const struct stored_tensor *tensor, size_t box)
{
    return tensor_box_lo(catalog, tensor, box) + tensor->ndim;
}

static inline int64_t tensor_nbytes(const struct catalog *catalog,
                                    const struct stored_tensor *tensor)
{
    return box_volume(tensor->ndim, tensor_shape(catalog, tensor)) *
           (int64_t)rsd_dtype_nbytes(tensor->dtype);
}

/* ---- checkpoint.c: finding out what a path is ---- */

/* In a folder that is being written; nothing there is a checkpoint yet. */
#define JOURNAL_NAME "reshard-journal"

/* Names that are owned. Starts as {0}. */
struct name_list {
    struct slice *list;
    size_t n, capacity;
};
rsd_status name_list_add(struct name_list *names, struct slice name);
void name_list_drop(struct name_list *names);

struct rsd_checkpoint {
    rsd_format format;
    struct files files;
    struct catalog catalog;
};

/* ---- names.c ---- */

/* 0 for a name that is no dtype we know; NULL for a dtype that has no such name. */
rsd_dtype dtype_from_torch(struct slice name);
rsd_dtype dtype_from_storage(struct slice name);
rsd_dtype dtype_from_safetensors(struct slice name);
const char *dtype_to_torch(rsd_dtype dtype);
const char *dtype_to_storage(rsd_dtype dtype);
const char *dtype_to_safetensors(rsd_dtype dtype);

/* ---- item.c: tensors and values as torch.save writes them ---- */

/* What comes before the bytes of a dense tensor, and after: for the latter, their CRC-32 and the first
 * eight of them. Strides, in elements, are what the item says of itself; NULL: rows, the last dim fastest. */
rsd_status torch_item_head(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                           const int64_t *strides, struct bytes *head);
rsd_status torch_item_tail(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                           const int64_t *strides, uint32_t crc, const unsigned char first[8],
                           struct bytes *tail);
rsd_status torch_item_nbytes(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                             const int64_t *strides, uint64_t *head_nbytes, uint64_t *nbytes);

/* A value, given as its pickle. */
rsd_status torch_item_from_pickle(const struct bytes *pickle, struct bytes *out);

/* ---- dcp.c, safetensors.c, torchsave.c: the formats ---- */

/* Each adds what it finds in some files of the checkpoint's folder to its contents. */
rsd_status dcp_read(rsd_checkpoint *checkpoint, const struct slice *metadata, size_t n);
rsd_status safetensors_open(rsd_checkpoint *checkpoint, const struct slice *names, size_t n);
rsd_status torch_save_open(rsd_checkpoint *checkpoint, const struct slice *names, size_t n);

/* The files that an index.json names. */
rsd_status index_read_files(struct files *files, uint32_t index, struct name_list *out);

/* A tensor of a blob that begins at a byte of a file: what it is, and where its bytes are. */
rsd_status safetensors_find_tensor(struct files *files, uint32_t file, uint64_t at,
                                   const char *name, rsd_dtype *dtype, int32_t *ndim,
                                   int64_t *shape, uint64_t *begin);

/* ---- saved.c: the tensor in an item of torch.save ---- */

/* In an archive on disk; data is its place in the file. */
rsd_status torch_item_locate(struct files *files, const struct extent *extent,
                             struct stored_view *out);

/* In a stream, which is left just before the tensor's bytes, but for those in *rest (to be freed). */
rsd_status torch_item_locate_stream(struct zstd_reader *zstd, struct stored_view *out,
                                    unsigned char **rest, size_t *nrest);

/* ---- stored_value.c ---- */

/* The item of a value, decompressed. */
rsd_status value_read_item(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           struct bytes *out);
rsd_status value_read_json(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           char **json);

#endif
