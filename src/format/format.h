/* format.h - one file pair per format, and one table.
 *
 * A reader fills a catalog and says where the bytes of each box are. A writer places the items of a manifest
 * and says what is around their bytes. The modules above know no more of a format.
 */
#ifndef FORMAT_H
#define FORMAT_H

#include "layout.h"
#include "store.h"

/* ---- catalog.c: what a checkpoint holds ---- */

enum extent_kind {
    EXTENT_NONE,  /* no file is known to hold the bytes */
    EXTENT_DENSE, /* a dense row-major array, little-endian */
    EXTENT_ARRAY, /* an array of the catalog describes the bytes */
    EXTENT_RANGE, /* the same as EXTENT_DENSE, in the record of an array of the catalog */
    EXTENT_ITEM,  /* the format finds the bytes inside */
};

/* Where a CRC-32C follows the bytes of an item, which is a chunk. */
enum extent_crc32c { CRC32C_INSIDE = 1, /* of what was compressed */ CRC32C_OUTSIDE = 2 };

/* Where the bytes of a box or value are. */
struct extent {
    uint64_t offset, nbytes; /* in the file */
    uint32_t file;
    uint8_t kind;    /* enum extent_kind */
    uint8_t nzstd;   /* how often the item was compressed */
    uint8_t unknown; /* 1: it went through an unknown transform, whose number is `detail` */
    uint8_t crc32c;  /* enum extent_crc32c */
    uint32_t
        detail; /* of EXTENT_ARRAY and EXTENT_RANGE the array; in manifests the box of its rank */
};

/* How the bytes of a stored box lie in their record, which is a run of bytes with one CRC-32. */
struct stored_array {
    uint64_t offset, nbytes;       /* of the record, in its file; a stream begins at 0 */
    int64_t base;                  /* of the box's first element, bytes from the record's start */
    int64_t strides[RSD_MAX_DIMS]; /* bytes; 0 where the box has one index or is empty */
    uint32_t crc;
    bool has_crc, big_endian;
    bool stream;            /* the record is compressed, and is read from its start */
    uint64_t stream_nbytes; /* memory of the stream while it is open, at most */
    const char *memory;     /* the record itself, if it is in memory and not in a file; else NULL */
};

/* Describes a dense row-major array that begins at an offset of its file. */
void stored_array_set_dense(struct stored_array *array, rsd_dtype dtype, int32_t ndim,
                            const int64_t *len, uint64_t offset);

struct stored_tensor {
    const char *name;
    rsd_dtype dtype;
    int32_t ndim;
    size_t shape, boxes; /* into coordinates: the shape; lo and len of each box in turn */
    size_t first_extent, nboxes;
    const char *path; /* in a nested state dict, as JSON; NULL: not known */
};

struct stored_value {
    const char *name, *path;
    struct extent extent;
    char *json;          /* of a plain value without an extent; else NULL */
    struct bytes pickle; /* likewise */
    bool beside;         /* in a file beside the checkpoint, which is copied as it is */
    const char *refused; /* a tensor that cannot be read: why; NULL: a value */
};

/* The transforms of an item, if one of them is unknown. */
struct stored_transforms {
    const char *unknown; /* the first unknown one */
    const char *names;   /* of all, as a JSON list */
};

struct catalog_name {
    const char *name;
    size_t index;
};

struct catalog {
    struct stored_tensor *tensors;
    int64_t *coordinates;
    struct extent *extents;
    struct stored_value *values;
    struct stored_array *arrays;          /* of extents of EXTENT_ARRAY */
    struct stored_transforms *transforms; /* lists with an unknown one */
    const char *save_id;                  /* that the writer assigned to the save; NULL: none */
    bool megatron;                        /* Megatron wrote the checkpoint */
    const char **notes;                   /* what a user should know of what was read */
    char **names;                         /* blocks of names */
    char *next_name;
    struct catalog_name *tensor_names, *value_names; /* sorted */
    size_t ntensors, tensors_capacity, ncoordinates, coordinates_capacity, nextents,
        extents_capacity, nvalues, values_capacity, narrays, arrays_capacity, ntransforms,
        transforms_capacity, nnotes, notes_capacity, nnames, names_capacity, names_left;
};

rsd_status catalog_add_name(struct catalog *catalog, struct slice name, const char **out);
rsd_status catalog_add_tensor(struct catalog *catalog, struct slice name, rsd_dtype dtype,
                              int32_t ndim, const int64_t *shape);
rsd_status catalog_add_box(struct catalog *catalog, const int64_t *lo, const int64_t *len,
                           struct extent extent); /* to the last tensor */
rsd_status catalog_add_array(struct catalog *catalog, const int64_t *lo, const int64_t *len,
                             uint32_t file, const struct stored_array *array); /* likewise */

/* Adds elements [begin, begin + count) of the last tensor, in row-major order. In the file they follow each
 * other, from element `at` on of an array of the catalog. */
rsd_status catalog_add_range(struct catalog *catalog, int64_t begin, int64_t count, uint32_t file,
                             uint32_t array, int64_t at);
rsd_status catalog_add_value(struct catalog *catalog, struct slice name, struct extent extent,
                             char *json); /* takes json over on success */

/* Adds a value without an extent, and takes its JSON over, also on failure. NULL: the value is not plain. path: in the
 * catalog, or NULL. */
rsd_status catalog_add_json(struct catalog *catalog, struct slice name, const char *path,
                            char *json);

/* Adds a sentence about what the checkpoint has and the catalog does not. It names the file. */
rsd_status catalog_add_note(struct catalog *catalog, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
rsd_status catalog_finish(struct catalog *catalog);

/* Returns EUNSUPPORTED for an item that went through an unknown transform. */
rsd_status catalog_check_transforms(const struct catalog *catalog, const struct extent *extent);
rsd_status catalog_copy_text(struct catalog *catalog, const char *text,
                             const char **out); /* of NULL: *out stays as it is */
void catalog_drop(struct catalog *catalog);

/* Makes a layout of explicit boxes, in their order. Their rank is 0, or the number of their file. */
rsd_status catalog_tensor_layout(const struct catalog *catalog, const struct stored_tensor *tensor,
                                 bool by_file, rsd_layout **out);
rsd_status catalog_boxes_layout(rsd_dtype dtype, int32_t ndim, const int64_t *shape, size_t n,
                                const int64_t *lo, const int64_t *len, rsd_layout **out);
size_t catalog_find_tensor(const struct catalog *catalog,
                           const char *name); /* SIZE_MAX: not found */
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

/* ---- manifest.c: what will be written ---- */

enum { MAX_ZSTD_LEVEL = 19 }; /* a higher one needs more memory than readers allow a stream */

/* Beside each extent of the catalog. */
struct manifest_item {
    uint64_t head;          /* bytes before the tensor's */
    uint64_t gap;           /* zeros before the item, less than ALIGNED_NBYTES */
    _Atomic uint64_t crc;   /* of the bytes that were written so far, raw */
    unsigned char first[8]; /* of these bytes */
    _Atomic bool reserved;  /* space for it is reserved: its first block was read */
    bool done;              /* complete, and known to be on disk */
    bool split;             /* several ranks write it, and rank 0 completes it */
    size_t at;              /* into `places` if its array has other boxes too; else 0 */
    const int64_t *form;    /* shape and strides that the item states, if not those of its box */
};

struct manifest_value {
    const struct stored_value *from; /* its item is copied; NULL: the bytes below */
    struct bytes item;
};

struct manifest_file {
    char *name;
    struct bytes header; /* what comes first in the file and is written last */
    uint64_t nbytes;     /* of the whole file, if that is known */
    uint64_t kept;       /* bytes of an existing file that stay in front; 0: the file is new */
    size_t nitems;       /* tensors in it */
    size_t nvalues;
};

/* How tensors are distributed to files. */
enum manifest_files {
    FILES_OF_RANKS,   /* one per rank, each box in one of them */
    FILES_OF_HOLDERS, /* one per rank, with all boxes of the rank */
    FILES_OF_TENSORS  /* whole tensors, file by file */
};

/* Arrays of ALIGNED_LEAST bytes and more begin at whole blocks of file systems, so that files can share them. */
#define ALIGNED_NBYTES ((uint64_t)4096)
#define ALIGNED_LEAST  ((uint64_t)128 << 10)

/* A checkpoint that is going to be written. */
struct manifest {
    const struct format *format;
    bool aligned;     /* large arrays are; else as torch places them */
    bool adapter;     /* the file is named as that of an adapter of PEFT */
    int32_t compress; /* a level of zstd; 0: not compressed */
    enum manifest_files files_of;
    int64_t nranks;                /* that the output is for */
    struct catalog catalog;        /* what the checkpoint will hold, and where */
    rsd_layout **layouts;          /* by tensor, if the format states them; else NULL */
    struct manifest_item *items;   /* by extent */
    struct manifest_value *values; /* by value */
    struct manifest_file *files;
    size_t nfiles, files_capacity;
    int64_t *ats; /* by extent: where its box begins in the array of its rank */
    size_t nats, ats_capacity;
    int64_t *places; /* of boxes that share an array: where they begin in it, and its shape */
    size_t nplaces, places_capacity;
};

/* Starts a manifest. EUNSUPPORTED: the format cannot be written. EINVAL: no such level. */
rsd_status manifest_start(struct manifest *manifest, rsd_format format, int32_t compress);

rsd_status manifest_add_file(struct manifest *manifest, const char *name);
rsd_status manifest_add_files(struct manifest *manifest, size_t n); /* as the format names them */

/* Adds a box to the last tensor. `order` is its number among the boxes of its rank, and `at` is where it
 * begins in the array of that rank. */
rsd_status manifest_add_box(struct manifest *manifest, const int64_t *lo, const int64_t *len,
                            const int64_t *at, uint32_t file, uint32_t order);

/* Once everything is added: checks the names, and places each item in its file. */
rsd_status manifest_check(struct manifest *manifest);
rsd_status manifest_place(struct manifest *manifest);

/* Finds the uncompressed length of an item, and how much of it is before its tensor. */
rsd_status manifest_item_nbytes(const struct manifest *manifest, size_t tensor, size_t box,
                                uint64_t *head_nbytes, uint64_t *nbytes);

void manifest_hash(const struct manifest *manifest, struct hash *hash);
void manifest_drop(struct manifest *manifest);

static inline uint64_t box_nbytes(const struct catalog *catalog, const struct stored_tensor *tensor,
                                  size_t box)
{
    return (uint64_t)box_volume(tensor->ndim, tensor_box_len(catalog, tensor, box)) *
           rsd_dtype_nbytes(tensor->dtype);
}

/* ---- formats.c: the table ---- */

struct rsd_checkpoint {
    const struct format *format;
    struct store *store;
    struct catalog catalog;
    _Atomic int64_t spare_steps;    /* of the budgets of its values */
    _Atomic bool values_plausible;  /* format_check_values has accepted them */
    _Atomic uint64_t nbytes_loaded; /* by all calls */
    _Atomic bool claims_plausible;  /* format_check_claims has accepted them */
    struct item_cache *items;
    struct derivation *derivation; /* of derived tensors; NULL: the catalog is that of the files */
};

/* What was parsed of items that many tensors may refer to. */
rsd_status item_cache_open(struct item_cache **cache);
void item_cache_close(struct item_cache *cache); /* accepts NULL */

/* A record that must be read from its start. A format puts it first in a struct of its own. */
struct stored_stream {
    rsd_status (*read)(struct stored_stream *stream, void *out, size_t n); /* the next n bytes */

    /* Reads the CRC-32 behind the last byte of the record; *has_crc is false without one. */
    rsd_status (*end)(struct stored_stream *stream, bool *has_crc, uint32_t *crc);
    void (*close)(struct stored_stream *stream);
    bool checks_itself; /* `end` never has a CRC-32, so nobody needs to compute one */
};
static inline void stored_stream_close(struct stored_stream *stream) /* accepts NULL */
{
    if (stream)
        stream->close(stream);
}

/* One row per format. Errors name the byte or the tensor; the caller adds the path of the file. Only open
 * adds paths itself, because it works on several files. */
struct format {
    rsd_format id;
    const char *name;

    /* Returns how sure the format is that an entry of a directory belongs to it, 0 if it does not. `start`
     * has the first bytes of the file if the user named that file, and is empty in a directory. */
    int (*probe)(const struct store_listing *listing, const struct store_entry *entry,
                 struct slice start);

    /* Says whether directories below the one that is listed make up one checkpoint. It is called if no format
     * has a sign in the directory itself. NULL: they never do. */
    bool (*probe_below)(struct store *store, const struct store_listing *listing);

    /* Reads what the checkpoint holds. The store has the files of which probe was surest. */
    rsd_status (*open)(struct store *store, struct catalog *catalog,
                       const rsd_open_options *options);

    /* Finds the bytes of a box; its extent is not EXTENT_NONE. */
    rsd_status (*locate)(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                         struct stored_array *array);

    /* Opens a record that locate called a stream, at its first byte. NULL: the format has no streams. */
    rsd_status (*open_stream)(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                              struct stored_stream **stream);

    /* Reads the item of a value, which torch.save wrote. NULL: no value has one. */
    rsd_status (*read_item)(const rsd_checkpoint *checkpoint, const struct stored_value *value,
                            struct bytes *item);

    /* Says whether a file of this name belongs to a checkpoint that does not mention it. NULL: none. */
    bool (*owns)(const char *name);

    const struct format_writer *writer; /* NULL: the format can only be read */
};

enum { FILE_NAME_NCHARS = 96 };

/* How a format is written. */
struct format_writer {
    const char *marker;                /* the file that finish writes */
    const char *suffix_until_complete; /* of file names, if readers need no marker; else "" */
    const char *const *file_suffixes;  /* of outputs that are one file; NULL: none */
    bool wide_first;  /* tensors of a file are sorted: the widest elements first, then by name */
    bool fills_files; /* tensors that are not cut fill one file after the other */
    bool every_rank;  /* files per rank, with all boxes of the rank and the layouts of tensors */

    /* Returns EINVAL for options that the format cannot follow. */
    rsd_status (*check)(const rsd_convert_options *options);

    void (*name_file)(const struct manifest *manifest, size_t file, size_t nfiles,
                      char name[FILE_NAME_NCHARS]);

    /* Sets the offset and length of every item, and the headers and lengths of the files. */
    rsd_status (*place)(struct manifest *manifest);

    /* Adds what is before and behind the bytes of a box. The lengths do not depend on the bytes.
     * NULL: the format adds nothing, and needs no CRC-32. */
    rsd_status (*frame)(const struct manifest *manifest, size_t tensor, size_t box,
                        struct bytes *head, struct bytes *tail);

    /* Makes the item of a value from its pickle. NULL: the format holds no values. */
    rsd_status (*make_value)(const struct bytes *pickle, struct bytes *item);

    /* Says whether the format holds a value of this name. All values are then made from plain pickles. NULL: it
     * holds any value. */
    bool (*holds_value)(const struct manifest *manifest, const char *name);

    /* Writes the marker, last. The first files of the store are those of the manifest. */
    rsd_status (*finish)(const struct manifest *manifest, struct store *store);
};

const struct format *format_find(rsd_format id); /* NULL: unknown */
bool format_is_marker(const char *name);         /* of any format */

/* Returns whether an output path names one file of the format, by its suffix. */
bool format_names_file(rsd_format id, const char *path);

/* Returns EINVAL if an output path is named like a file of another format, for which readers would take it. */
rsd_status format_check_output_name(const struct format *format, const char *path);

/* Finds the format of the files at a path, and reads what they hold. `listing` is that of the directory, or
 * has the one file that the path names. */
rsd_status format_open(rsd_checkpoint *checkpoint, const char *path,
                       const struct store_listing *listing, bool one_file,
                       const rsd_open_options *options);

/* Derives the tensors that the options ask for: single layers, and a vocabulary without its padding. EINVAL: the
 * format has none of them. */
rsd_status format_derive_tensors(rsd_checkpoint *checkpoint, const rsd_open_options *options);

/* Says how a tensor of the first file is placed on the mesh. Called first with SIZE_MAX, for all of them. */
typedef rsd_status joined_places(void *context, const rsd_checkpoint *first, size_t tensor,
                                 rsd_placement *placements);

/* Opens the files of several ranks, of which no file says how they are put together: file r has the parts of
 * the r-th rank of the mesh. */
rsd_status format_open_joined(rsd_checkpoint *checkpoint, const struct store_listing *listing,
                              const rsd_open_options *options, const rsd_mesh *mesh,
                              joined_places *places, void *context);

/* As in struct format. EFORMAT: no file is known to hold the bytes of the box. */
rsd_status format_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                         struct stored_array *array);

/* Opens a record that format_locate called a stream, at its first byte. */
rsd_status format_open_stream(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                              struct stored_stream **stream);

/* ---- wrong_file.c ---- */

/* If a file of the store is known to be something else than a part of a checkpoint, says so instead of the error
 * that it had. */
rsd_status format_explain_failure(struct store *store, rsd_status status);

/* Returns where an extent ends in its file; 0: that is not known before the file is read. */
uint64_t extent_end(const struct extent *extent);

/* Finds how many bytes each file of the store must have at least. The caller frees the list. */
rsd_status format_find_ends(const rsd_checkpoint *checkpoint, uint64_t **ends);

/* Fails if a file does not exist, or has fewer bytes than `end`. The error has the cause, such as a pointer of Git LFS,
 * and names what is lost. */
rsd_status format_check_file(const rsd_checkpoint *checkpoint, uint32_t file, uint64_t end);

/* Fails if a directory has data files of DCP, which need a .metadata. */
rsd_status format_fail_without_metadata(const struct store *store,
                                        const struct store_listing *listing);

/* Returns EFORMAT if the tensors claim far more bytes than the files can have, and ENOENT if a file that may have them
 * is missing. To read them all would take time out of proportion to the files. */
rsd_status format_check_claims(rsd_checkpoint *checkpoint);

/* The same, once all loads together take many bytes, or decode many, or there are many. A small part of any tensor
 * can be loaded: nbytes are loaded of this one. */
rsd_status format_check_loaded(rsd_checkpoint *checkpoint, const struct stored_tensor *tensor,
                               uint64_t nbytes);

rsd_status format_check_values(rsd_checkpoint *checkpoint); /* likewise of the items of values */

/* ---- derive.c: tensors that consist of regions of stored ones ---- */

/* Moves the catalog of a checkpoint into the stored checkpoint inside, and starts one without tensors. Values and
 * notes stay. Tensors are added with catalog_add_tensor, and their boxes with the functions below. */
rsd_status derive_start(rsd_checkpoint *checkpoint);
const struct catalog *derive_stored(const rsd_checkpoint *checkpoint);
void derive_drop(struct derivation *derivation); /* accepts NULL */

/* A region of a stored tensor, and where it begins in the derived tensor. */
struct derived_region {
    size_t tensor;
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS], to[RSD_MAX_DIMS]; /* by dim of the stored tensor */
    int32_t front; /* dims that the derived tensor has more in front: -1, 0 or 1 */
    int64_t index; /* front 1: the index of the region there */
};

/* Adds the boxes of a region to the last tensor. */
rsd_status derive_add_region(rsd_checkpoint *checkpoint, const struct derived_region *region);
rsd_status derive_add_zeros(rsd_checkpoint *checkpoint, const int64_t *lo, const int64_t *len);

/* As format_locate and format_open_stream, for a derived tensor. */
rsd_status derive_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                         struct stored_array *array);
rsd_status derive_open_stream(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                              struct stored_stream **stream);

/* Finds the stored box that a box is a region of, and returns the catalog of the files. The box is not one of zeros. */
const struct catalog *derive_find_stored(const rsd_checkpoint *checkpoint, size_t *tensor,
                                         size_t *box);

/* ---- torch_names.c ---- */

/* Removes the parts that wrappers add to the name of a parameter: of FSDP, of torch.compile and of activation
 * checkpoints. */
void torch_strip_wrappers(char *name);

/* ---- values.c ---- */

/* Reads the item of a value, and checks it as value_check does, within a budget. */
rsd_status value_read_item(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           struct bytes *item);

/* Reads a value that has an item as JSON; *json is NULL if it is not plain. */
rsd_status value_read_json(rsd_checkpoint *checkpoint, const struct stored_value *value,
                           char **json);

/* Checks the item of a value: it is an archive of torch.save, and the CRC-32 of every record is right. */
rsd_status value_check(rsd_checkpoint *checkpoint, const struct stored_value *value);

#endif
