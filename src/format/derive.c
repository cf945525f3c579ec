/* derive.c - tensors that consist of regions of stored ones.
 *
 *     stored     qkv [96, 64] in two boxes            w.0 [8, 8], w.1 [8, 8]
 *     derived    q [64, 64], k [16, 64], v [16, 64]   w [2, 8, 8]
 *
 * A checkpoint with derived tensors has the stored one inside. Each derived box is a region of one stored box, so
 * its bytes are found by asking for those of the stored box. Nothing is copied, and every call on a checkpoint
 * works on derived tensors as on stored ones.
 */
#include "format.h"

#include <string.h>

/* What a derived box is in the stored checkpoint. */
struct derived_box {
    size_t tensor, box; /* of the stored checkpoint; tensor SIZE_MAX: the elements are 0 */
    size_t start;       /* into `starts`: where the region begins in the stored box */
    int32_t front;      /* dims that the derived tensor has more in front: -1, 0 or 1 */
};

struct derivation {
    rsd_checkpoint stored;
    struct derived_box *boxes; /* by extent of the derived catalog */
    int64_t *starts;
    size_t nboxes, boxes_capacity, nstarts, starts_capacity;
};

rsd_status derive_start(rsd_checkpoint *checkpoint)
{
    struct derivation *derivation = mem_new(1, sizeof *derivation);
    if (!derivation)
        return RSD_ENOMEM;
    struct catalog *stored = &derivation->stored.catalog, *catalog = &checkpoint->catalog;
    derivation->stored.format = checkpoint->format;
    derivation->stored.store = checkpoint->store;
    derivation->stored.items = checkpoint->items;
    derivation->stored.derivation = checkpoint->derivation;
    *stored = *catalog;
    *catalog = (struct catalog){.megatron = stored->megatron,
                                .save_id = stored->save_id,
                                .values = stored->values,
                                .nvalues = stored->nvalues,
                                .values_capacity = stored->values_capacity,
                                .notes = stored->notes,
                                .nnotes = stored->nnotes,
                                .notes_capacity = stored->notes_capacity,
                                .transforms = stored->transforms,
                                .ntransforms = stored->ntransforms,
                                .transforms_capacity = stored->transforms_capacity};
    stored->values = NULL;
    stored->nvalues = stored->values_capacity = 0;
    stored->notes = NULL;
    stored->nnotes = stored->notes_capacity = 0;
    checkpoint->derivation = derivation;
    return RSD_OK;
}

const struct catalog *derive_stored(const rsd_checkpoint *checkpoint)
{
    return &checkpoint->derivation->stored.catalog;
}

void derive_drop(struct derivation *derivation)
{
    if (!derivation)
        return;
    derive_drop(derivation->stored.derivation);
    derivation->stored.catalog.transforms = NULL; /* the derived catalog has them */
    catalog_drop(&derivation->stored.catalog);
    mem_free(derivation->boxes);
    mem_free(derivation->starts);
    mem_free(derivation);
}

/* ---- adding ---- */

/* Adds a box to the current derived tensor. `start` is where it begins in its stored box. */
static rsd_status add_derived_box(rsd_checkpoint *checkpoint, struct derived_box box,
                                  const int64_t *start, int32_t ndim, const int64_t *lo,
                                  const int64_t *len, struct extent extent)
{
    struct derivation *derivation = checkpoint->derivation;
    TRY(budget_use_memory(sizeof box + (uint64_t)ndim * sizeof *start));
    TRY(GROW(derivation->boxes, derivation->boxes_capacity, derivation->nboxes + 1));
    TRY(GROW(derivation->starts, derivation->starts_capacity,
             derivation->nstarts + (size_t)ndim + 1));
    TRY(catalog_add_box(&checkpoint->catalog, lo, len, extent));
    box.start = derivation->nstarts;
    copy_i64s(derivation->starts + derivation->nstarts, start, ndim);
    derivation->nstarts += (size_t)ndim;
    derivation->boxes[derivation->nboxes++] = box;
    return RSD_OK;
}

rsd_status derive_add_region(rsd_checkpoint *checkpoint, const struct derived_region *region)
{
    const struct catalog *stored = derive_stored(checkpoint);
    const struct stored_tensor *tensor = &stored->tensors[region->tensor];
    int32_t ndim = tensor->ndim, front = region->front, dropped = front < 0 ? 1 : 0;
    struct derived_box derived = {.tensor = region->tensor, .front = front};
    for (derived.box = 0; derived.box < tensor->nboxes; derived.box++) {
        const int64_t *box = tensor_box_lo(stored, tensor, derived.box);
        struct extent extent = stored->extents[tensor->first_extent + derived.box];
        int64_t start[RSD_MAX_DIMS], both[2][RSD_MAX_DIMS],
            to[RSD_MAX_DIMS + 1] = {region->index}, len[RSD_MAX_DIMS + 1] = {1};
        TRY(budget_use(1));
        if (!box_overlap(ndim, box, box + ndim, region->lo, region->len, both[0], both[1]))
            continue;
        for (int32_t d = 0; d < ndim; d++)
            start[d] = both[0][d] - box[d];
        for (int32_t d = dropped; d < ndim; d++) {
            to[d + front] = both[0][d] - region->lo[d] + region->to[d];
            len[d + front] = both[1][d];
        }
        TRY(add_derived_box(checkpoint, derived, start, ndim, to, len, extent));
    }
    return RSD_OK;
}

rsd_status derive_add_zeros(rsd_checkpoint *checkpoint, const int64_t *lo, const int64_t *len)
{
    static const int64_t origin[RSD_MAX_DIMS];
    int32_t ndim = checkpoint->catalog.tensors[checkpoint->catalog.ntensors - 1].ndim;
    return add_derived_box(checkpoint, (struct derived_box){.tensor = SIZE_MAX}, origin, ndim, lo,
                           len, (struct extent){.kind = EXTENT_DENSE});
}

/* ---- where bytes are ---- */

static const struct derived_box *find_derived_box(const rsd_checkpoint *checkpoint, size_t tensor,
                                                  size_t box)
{
    size_t extent = checkpoint->catalog.tensors[tensor].first_extent + box;
    return &checkpoint->derivation->boxes[extent];
}

rsd_status derive_locate(const rsd_checkpoint *checkpoint, size_t index, size_t box,
                         struct stored_array *array)
{
    static const char zeros[32];
    const struct derivation *derivation = checkpoint->derivation;
    const struct derived_box *derived = find_derived_box(checkpoint, index, box);
    const struct stored_tensor *tensor = &checkpoint->catalog.tensors[index];
    const int64_t *len = tensor_box_len(&checkpoint->catalog, tensor, box);
    if (derived->tensor == SIZE_MAX) { /* every stride is 0: one element stands for all */
        *array = (struct stored_array){.memory = zeros, .nbytes = rsd_dtype_nbytes(tensor->dtype)};
        return RSD_OK;
    }
    TRY(format_locate(&derivation->stored, derived->tensor, derived->box, array));
    const int64_t *start = derivation->starts + derived->start;
    int32_t ndim = derivation->stored.catalog.tensors[derived->tensor].ndim;
    int64_t strides[RSD_MAX_DIMS] = {0};
    for (int32_t d = 0; d < ndim; d++)
        array->base += start[d] * array->strides[d];
    for (int32_t d = derived->front < 0 ? 1 : 0; d < ndim; d++)
        if (len[d + derived->front] > 1)
            strides[d + derived->front] = array->strides[d];
    memcpy(array->strides, strides, sizeof strides);
    return RSD_OK;
}

rsd_status derive_open_stream(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                              struct stored_stream **stream)
{
    const struct derived_box *derived = find_derived_box(checkpoint, tensor, box);
    return format_open_stream(&checkpoint->derivation->stored, derived->tensor, derived->box,
                              stream);
}

const struct catalog *derive_find_stored(const rsd_checkpoint *checkpoint, size_t *tensor,
                                         size_t *box)
{
    while (checkpoint->derivation) {
        const struct derived_box *derived = find_derived_box(checkpoint, *tensor, *box);
        *tensor = derived->tensor;
        *box = derived->box;
        checkpoint = &checkpoint->derivation->stored;
    }
    return &checkpoint->catalog;
}
