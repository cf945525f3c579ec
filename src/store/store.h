/* store.h - the door of store: what is in files.
 *
 * A checkpoint is a layout whose ranks are files: each tensor is a list of boxes, and each box an extent
 * of bytes. Formats find these boxes (dcp.c, safetensors.c, torchsave.c); a source reads any region of one,
 * without anyone knowing what format it is in.
 *
 *     path --open--> tensors, boxes, extents --source--> bytes
 *
 * Every byte of a file is hostile: lengths are checked against the file before they are used, names may
 * not leave the folder, and nothing is ever built that a file names.
 */
#ifndef STORE_H
#define STORE_H

#include "codec.h"
#include "move.h"

#include <pthread.h>
#include <sys/stat.h>

/* ---- file.c ---- */

enum { FILE_SLOTS = 4 };
struct file_slot {
    int fd; /* -1: not open now */
    int users;
    uint64_t used_at;
    _Atomic uint64_t unflushed;
};

struct one_file {
    char *name; /* in the folder */
    bool writable;
    bool known; /* it was seen, with this size and time of change */
    uint64_t nbytes;
    int64_t changed; /* nanoseconds */
    struct file_slot slots[FILE_SLOTS];
};

/* The files of one folder that a checkpoint is made of. Threads may read at once. */
struct files {
    char *folder;
    int folder_fd;
    pthread_mutex_t lock;
    struct one_file *list;
    size_t n, room;
    bool unsynced; /* nobody will wait for the disk, so it need not begin at once */
    int nopen;
    uint64_t clock;
};

/* EFORMAT for a name that is absolute, has empty parts, "." or "..", or no name at all. */
rsd_status check_name(struct slice name);

rsd_status files_open(struct files *files, const char *folder);
void files_close(struct files *files);
rsd_status files_add(struct files *files, struct slice name,
                     uint32_t *index);                            /* does not open it */
rsd_status file_there(const struct files *files, uint32_t index); /* without opening it */
rsd_status file_nbytes(struct files *files, uint32_t index, uint64_t *nbytes);
rsd_status file_check(struct files *files, uint32_t index, uint64_t at,
                      uint64_t n); /* EFORMAT unless it has these bytes */
rsd_status file_read(struct files *files, uint32_t index, uint64_t at, void *out, size_t n);

/* The whole file, with a zero behind it; ELIMIT if it is longer than `most`. */
rsd_status file_load(struct files *files, uint32_t index, uint64_t most, char **bytes, size_t *n);

/* Makes a file of the list anew, but for the first bytes that are kept, with room for so many. */
rsd_status file_create(struct files *files, uint32_t index, uint64_t kept, uint64_t nbytes);
rsd_status file_write(struct files *files, uint32_t index, uint64_t at, const void *data, size_t n);
rsd_status file_sync(struct files *files, uint32_t index);
rsd_status folder_sync(const struct files *files);

/* Puts the path of a file in front of the last error, or the path and a name, unless the path is there. */
rsd_status file_error(const struct files *files, uint32_t index, rsd_status status);
rsd_status file_error_about(const struct files *files, uint32_t index, const char *name,
                            rsd_status status);

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
    struct view view;
    uint64_t data, nbytes; /* of the storage, in the file */
    uint32_t crc;
    bool has_crc, big_endian;
};

struct tensor {
    const char *name;
    rsd_dtype dtype;
    int32_t ndim;
    size_t shape, boxes; /* into coordinates: the shape; lo and len of each box in turn */
    size_t first_extent, nboxes;
    const char *path; /* where it was in a nested state dict, as JSON; NULL: not known */
};

struct value {
    const char *name, *path;
    struct extent extent;
    char *json;          /* the value, if it has no item of its own and is plain; else NULL */
    struct bytes pickle; /* likewise, to be written */
};

struct named {
    const char *name;
    size_t index;
};

struct contents {
    struct tensor *tensors;
    int64_t *coordinates;
    struct extent *extents;
    struct value *values;
    struct stored_view *views;
    const char **transforms; /* names of those that are not known */
    char **names;            /* blocks of names */
    char *next_name;
    struct named *tensor_names, *value_names; /* sorted */
    size_t ntensors, room_tensors, ncoordinates, room_coordinates, nextents, room_extents, nvalues,
        room_values, nviews, room_views, ntransforms, room_transforms, nnames, room_names,
        names_left;
};

rsd_status contents_name(struct contents *contents, struct slice name, const char **out);
rsd_status contents_add_tensor(struct contents *contents, struct slice name, rsd_dtype dtype,
                               int32_t ndim, const int64_t *shape);
rsd_status contents_add_box(struct contents *contents, const int64_t *lo, const int64_t *len,
                            struct extent extent); /* to the last tensor */
rsd_status contents_add_value(struct contents *contents, struct slice name, struct extent extent,
                              char *json); /* takes json over on success */
rsd_status contents_finish(struct contents *contents);

/* EUNSUPPORTED for an item that went through a transform that is not known. */
rsd_status check_transforms(const struct contents *contents, const struct extent *extent);
rsd_status contents_copy_text(struct contents *contents, const char *text, const char **out);
void contents_drop(struct contents *contents);

/* As explicit boxes, in their order: all of rank 0, or of the rank that is the number of their file. */
rsd_status tensor_layout(const struct contents *contents, const struct tensor *tensor, bool by_file,
                         rsd_layout **out);
rsd_status boxes_layout(rsd_dtype dtype, int32_t ndim, const int64_t *shape, size_t n,
                        const int64_t *lo, const int64_t *len, rsd_layout **out);
rsd_status tensor_plan(const struct contents *contents, const struct tensor *tensor, size_t n,
                       const int64_t *lo, const int64_t *len, rsd_plan **plan);

size_t contents_find(const struct contents *contents, const char *name); /* SIZE_MAX: not there */
size_t contents_find_value(const struct contents *contents, const char *name);

static inline const int64_t *tensor_shape(const struct contents *contents,
                                          const struct tensor *tensor)
{
    return contents->coordinates + tensor->shape;
}

static inline const int64_t *tensor_box_lo(const struct contents *contents,
                                           const struct tensor *tensor, size_t box)
{
    return contents->coordinates + tensor->boxes + 2 * (size_t)tensor->ndim * box;
}

static inline const int64_t *tensor_box_len(const struct contents *contents,
                                            const struct tensor *tensor, size_t box)
{
    return tensor_box_lo(contents, tensor, box) + tensor->ndim;
}

static inline int64_t tensor_nbytes(const struct contents *contents, const struct tensor *tensor)
{
    return box_volume(tensor->ndim, tensor_shape(contents, tensor)) *
           (int64_t)rsd_dtype_nbytes(tensor->dtype);
}

/* ---- checkpoint.c: finding out what a path is ---- */

/* In a folder that is being written; nothing there is a checkpoint yet. */
#define JOURNAL_NAME "reshard-journal"

/* Names that are owned. Starts as {0}. */
struct name_list {
    struct slice *list;
    size_t n, room;
};
rsd_status name_list_add(struct name_list *names, struct slice name);
void name_list_drop(struct name_list *names);

struct rsd_checkpoint {
    rsd_format format;
    struct files files;
    struct contents contents;
};

/* ---- dcp.c, safetensors.c, torchsave.c: the formats ---- */

/* Each adds what it finds in some files of the checkpoint's folder to its contents. */
rsd_status dcp_open(rsd_checkpoint *checkpoint, const struct slice *metadata, size_t n);
rsd_status safetensors_open(rsd_checkpoint *checkpoint, const struct slice *names, size_t n);
rsd_status torchsave_open(rsd_checkpoint *checkpoint, const struct slice *names, size_t n);

/* The files that an index.json names. */
rsd_status index_files(struct files *files, uint32_t index, struct name_list *out);

/* A tensor of a blob that begins at a byte of a file: what it is, and where its bytes are. */
rsd_status safetensors_find(struct files *files, uint32_t file, uint64_t at, const char *name,
                            rsd_dtype *dtype, int32_t *ndim, int64_t *shape, uint64_t *begin);

/* ---- inflate.c: zstd streams ---- */

struct inflate;
rsd_status inflate_open(struct files *files, uint32_t file, uint64_t offset, uint64_t nbytes,
                        int nlayers, struct inflate **out);
void inflate_close(struct inflate *inflate);
rsd_status inflate_read(struct inflate *inflate, void *out, size_t n);  /* the next n bytes */
rsd_status inflate_some(struct inflate *inflate, void *out, size_t *n); /* fewer at the end */

struct deflate;
typedef rsd_status deflate_write(void *context, const void *data, size_t n);
rsd_status deflate_open(int level, uint64_t nbytes, deflate_write *write, void *context,
                        struct deflate **out); /* of so many bytes in all */
void deflate_close(struct deflate *deflate);
rsd_status deflate_put(struct deflate *deflate, const void *data, size_t n);
rsd_status deflate_end(struct deflate *deflate);
int deflate_default_level(void);

/* ---- saved.c: the tensor in an item of torch.save ---- */

/* In an archive on disk; data is its place in the file. */
rsd_status saved_find(struct files *files, const struct extent *extent, struct stored_view *out);

/* In a stream, which is left just before the tensor's bytes, but for those in *rest (to be freed). */
rsd_status saved_inflate(struct inflate *inflate, struct stored_view *out, unsigned char **rest,
                         size_t *nrest);

/* ---- stored_value.c ---- */

/* The item of a value, decompressed. */
rsd_status value_bytes(rsd_checkpoint *checkpoint, const struct value *value, struct bytes *out);
rsd_status value_load(rsd_checkpoint *checkpoint, const struct value *value, char **json);

/* ---- source.c: a stored box that can be read ---- */

/* What a transfer has read; each thread counts for itself. */
struct tally {
    uint64_t nbytes_read, nbytes_unchecked, again;
    int64_t nbytes_memory; /* of all threads together */
};

struct source {
    const char *memory; /* of the box's first element, if it is there and not in a file */
    struct files *files;
    struct extent extent;
    rsd_dtype dtype;
    size_t each; /* bytes of an element */
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS]; /* the box */
    uint64_t data, nbytes;                       /* of the record, in the file or in the stream */
    int64_t base, strides[RSD_MAX_DIMS];         /* of the box in the record, bytes */
    bool swap, has_crc, checkable;
    uint32_t crc;
    uint64_t wanted; /* bytes of the box that are wanted, set by whoever reads */

    pthread_mutex_t lock; /* for what follows */
    uint64_t crc_sum, seen;
    pthread_mutex_t keeping;
    char *kept; /* the whole record */

    bool compressed;
    struct inflate *inflate; /* while it is read, by one thread */
    unsigned char *rest;
    size_t nrest, rest_at;
    uint64_t stream_at, stream_crc;
};

void source_in_memory(struct source *source, rsd_dtype dtype, int32_t ndim, const int64_t *lo,
                      const int64_t *len, const char *memory, const int64_t *strides);
rsd_status source_open(struct source *source, rsd_checkpoint *checkpoint, size_t tensor,
                       size_t box);
void source_close(struct source *source);

/* Reads a region of the box, packed row by row. Records of up to keep_most bytes may be kept whole. */
rsd_status source_read(struct source *source, const int64_t *lo, const int64_t *len, char *out,
                       uint64_t keep_most, struct tally *tally);

/* When everything is read: EFORMAT if the CRC-32 is wrong; counts what could not be checked. */
rsd_status source_check(struct source *source, struct tally *tally);

/* Whether its rows run another way than the tensor's, as those of a transposed one do. */
bool source_runs_across(const struct source *source);

#endif
