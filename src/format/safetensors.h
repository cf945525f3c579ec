/* safetensors.h - what the headers of safetensors files say. Private to format. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "rows.h"

enum { MAX_HEADER_NBYTES = 100000000 }; /* as other readers have it */

/* A tensor as one file has it. */
struct header_tensor {
    size_t ordinal; /* of its name, by first appearance */
    uint32_t file;
    rsd_dtype dtype;
    int32_t ndim;
    uint64_t begin, end; /* of its bytes, in the file */
    int64_t shape[RSD_MAX_DIMS], lo[RSD_MAX_DIMS];
    int64_t whole[RSD_MAX_DIMS]; /* the shape of the whole tensor, if whole_known */
    bool placed, whole_known;
    size_t first_piece, npieces; /* an array that is several boxes: lo, len and at of each */
    const char *name;
};

/* The tensors of several headers. Starts with a catalog, which owns the names, and a store. */
struct header_set {
    struct catalog *catalog;
    struct store *store;
    struct string_map names;
    struct header_tensor *list;
    size_t *places; /* in the list, by ordinal: of the last file that has it */
    int64_t *pieces;
    size_t n, capacity, places_capacity, npieces, pieces_capacity;
};

/* Adds the tensors of a file. */
rsd_status header_set_add_file(struct header_set *set, uint32_t file);

/* Adds the tensors of a blob that begins at an offset of a file; *data is where their bytes begin. */
rsd_status header_set_add_blob(struct header_set *set, uint32_t file, uint64_t at, uint64_t *data);

/* Returns a tensor of the only blob; NULL: it has no tensor of this name. */
const struct header_tensor *header_set_find(struct header_set *set, const char *name);

/* Checks that a tensor has as many bytes as its shape and dtype need. */
rsd_status header_tensor_check(const struct header_tensor *tensor);
void header_set_drop(struct header_set *set);

/* ---- item_cache.c ---- */

/* Finds a tensor of a blob that begins at an offset of a file, and where its bytes begin in the file. */
rsd_status blob_find_tensor(const rsd_checkpoint *checkpoint, uint32_t file, uint64_t at,
                            const char *name, struct header_tensor *tensor, uint64_t *begin);

#endif
