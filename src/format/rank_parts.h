/* rank_parts.h - tensors that are put together from the files of several ranks. Private to format. */
#ifndef RANK_PARTS_H
#define RANK_PARTS_H

#include "dtensor.h"
#include "rows.h"

/* A tensor as the ranks have it. */
struct joint_tensor {
    struct slice name; /* owned by the catalog */
    rsd_dtype dtype;
    int32_t ndim;
    bool sharded, unruled;                 /* as those of struct rank_tensor */
    int64_t first_rank, last_rank, nranks; /* that have it */
    size_t shape;                          /* into the coordinates */
    const char *path;                      /* as that of struct stored_tensor */
};

/* A box of one rank. */
struct joint_box {
    size_t tensor;
    int32_t rank;
    uint32_t file;
    size_t coordinates; /* lo and len */
    struct stored_array array;
};

/* All tensors of all ranks. Starts with a catalog, a store and options. */
struct rank_parts {
    struct catalog *catalog;
    struct store *store;
    bool take_rank_0;
    struct string_map names; /* to tensors */
    struct joint_tensor *tensors;
    struct joint_box *boxes;
    int64_t *coordinates;
    size_t ntensors, tensors_capacity, nboxes, boxes_capacity, ncoordinates, coordinates_capacity;
};

/* Adds a tensor of one rank. EMISMATCH: another rank has a tensor of this name with another dtype or shape.
 * path may be NULL. */
rsd_status rank_parts_add(struct rank_parts *parts, struct slice name, const char *path,
                          int64_t rank, uint32_t file, const struct rank_tensor *tensor);

/* Adds all tensors to the catalog: each box once. EMISMATCH: copies differ. EFORMAT: boxes overlap in part.
 * *hole is the first tensor of which an element is in no box, and *box says where; SIZE_MAX: all are there. */
rsd_status rank_parts_finish(struct rank_parts *parts, size_t *hole, char box[BOX_TEXT_NCHARS]);
void rank_parts_drop(struct rank_parts *parts);

#endif
