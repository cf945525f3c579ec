/* dtensor_write.h - how the files of FSDP are written. Private to format. */
#ifndef DTENSOR_WRITE_H
#define DTENSOR_WRITE_H

#include "torch_saved.h"

enum { MAX_PICKLED_MESHES = 256 };

/* The pickle of one rank's file, while it is written. */
struct dtensor_pickle {
    const struct manifest *manifest;
    const rsd_mesh *mesh; /* of all tensors; NULL: there is none, and all tensors are plain */
    uint32_t sharding;    /* axes that shard some tensor */
    int32_t rank;
    struct bytes *out;
    uint32_t meshes[MAX_PICKLED_MESHES]; /* axes of the meshes that are memoized, by number */
    size_t nmeshes;
};

/* ---- dtensor_write.c ---- */

/* Writes a tensor of the manifest, as the rank has it. */
void dtensor_put_tensor(struct dtensor_pickle *pickle, size_t tensor);

/* ---- optimizer_write.c ---- */

/* Returns whether a tensor is in the files of the optimizer. */
bool optimizer_has_tensor(const char *name);

/* The holds_value of the format. */
bool optimizer_holds_value(const struct manifest *manifest, const char *name);

/* Writes the dict of the optimizer: {state: {0: {...}, ...}, param_groups: [...]}. EUNSUPPORTED: a state belongs to no
 * parameter, or nothing is known of the groups. */
rsd_status optimizer_put_dict(struct dtensor_pickle *pickle);

/* Writes the file of each rank with the learning rate. */
rsd_status optimizer_put_extra_files(const struct manifest *manifest, struct store *store);

#endif
