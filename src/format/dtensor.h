/* dtensor.h - what one rank's file says of a tensor that is distributed over ranks. Private to format. */
#ifndef DTENSOR_H
#define DTENSOR_H

#include "torch_item.h"

/* A box of the whole tensor, and where one rank's file has its elements. */
struct rank_box {
    int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    struct stored_array array;
};

struct rank_tensor {
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS]; /* of the whole tensor */
    bool sharded;                /* a DTensor or a ShardedTensor; false: the file has all of it */
    bool
        unruled; /* it is not known to be sharded: all ranks must have the same, even if rank 0's is taken */
    uint64_t place;         /* of its first element in the file; 0: it has none */
    struct rank_box *boxes; /* that are not empty */
    size_t nboxes;
};

/* A device mesh, and where the rank of the file is in it. */
struct rank_mesh {
    pickle_node node;
    bool known, member; /* member: the rank is in the list of ranks */
    bool whole;         /* the mesh has all ranks of the list */
    int32_t naxes;
    int64_t counts[RSD_MAX_AXES], coordinates[RSD_MAX_AXES];
};

/* The last meshes that were read, because tensors of one file share a few of them. Starts as {0}. */
enum { MESH_CACHE_N = 8 };
struct mesh_cache {
    struct rank_mesh meshes[MESH_CACHE_N];
    size_t next;
};

/* ---- dtensor_mesh.c ---- */

enum { MAX_MESH_RANKS = 1 << 17 };

/* Finds a mesh among those that were read, or reads it. */
rsd_status dtensor_read_mesh(struct torch_file *file, pickle_node mesh, int64_t rank,
                             struct mesh_cache *cache, const struct rank_mesh **found);
static inline rsd_status dtensor_fail_mesh(const char *what)
{
    return fail(RSD_EFORMAT, "device mesh %s", what);
}

/* ---- dtensor_spec.c ---- */

/* Reads a tensor of any kind from the file of a rank. The caller drops it. EMISMATCH: what the file says of the
 * rank is not so. */
rsd_status rank_tensor_read(struct torch_file *file, pickle_node c, int64_t rank,
                            struct mesh_cache *cache, struct rank_tensor *out);
void rank_tensor_drop(struct rank_tensor *tensor);
void rank_tensor_drop_boxes(struct rank_tensor *tensor); /* the rest stays */

/* Adds the boxes that a position of a layout has, to a tensor without boxes. All of them lie in its local array. */
rsd_status rank_tensor_add_boxes(struct rank_tensor *out, const rsd_layout *layout,
                                 int64_t position, const struct stored_array *array);

/* Finds the part of a distributed tensor that a file has, as a plain tensor, and the shape of the whole. EUNSUPPORTED:
 * there is no part, or several. */
rsd_status dtensor_find_local(const struct pickle_tree *tree, pickle_node c, pickle_node *local,
                              int32_t *ndim, int64_t *shape);

#endif
