/* arrays.c - tensors in the caller's memory, as boxes with an address and strides. */
#include "checkpoint.h"

/* Adds a box of a rank, with the address and the strides of its memory. first_array is the first array of the
 * caller. */
static rsd_status add_array_slice(struct array_slices *boxes, const rsd_tensor *tensor,
                                  const rsd_shard *shard, int64_t first_array, bool written)
{
    const rsd_layout *layout = tensor->layout;
    size_t given = (size_t)(shard->array - first_array);
    TRY(GROW(boxes->list, boxes->capacity, boxes->n + 1));
    struct array_slice *box = &boxes->list[boxes->n++];
    *box = (struct array_slice){.box = shard->box, .dtype = layout->dtype};
    const int64_t *strides =
        tensor->strides ? tensor->strides + given * (size_t)layout->ndim : NULL;
    TRY(array_strides(layout, shard->array, strides, tensor->column_major != 0, written,
                      box->strides));
    if (box_volume(layout->ndim, shard->box.len) == 0)
        return RSD_OK;
    if (!tensor->arrays || !tensor->arrays[given])
        return fail(RSD_EINVAL, "array %zu of rank %d is NULL", given,
                    (int)layout_array_rank(layout, shard->array));
    box->memory = tensor->arrays[given];
    for (int32_t d = 0; d < layout->ndim; d++)
        box->memory += shard->at[d] * box->strides[d];
    return RSD_OK;
}

/* Adds all boxes of a rank. */
static rsd_status add_rank_slices(struct array_slices *boxes, const rsd_tensor *tensor,
                                  int32_t rank, int64_t first_array, bool written)
{
    rsd_shard *shards;
    int64_t n;
    TRY(rsd_layout_boxes(tensor->layout, rank, &shards, &n));
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < n && !status; i++) {
        status = add_array_slice(boxes, tensor, &shards[i], first_array, written);
        if (!status) {
            boxes->list[boxes->n - 1].rank = rank;
            boxes->list[boxes->n - 1].order = (uint32_t)i;
        }
    }
    rsd_free(shards);
    return status;
}

rsd_status arrays_list_slices(const rsd_tensor *tensor, bool written, struct array_slices *boxes)
{
    const rsd_layout *layout = tensor->layout;
    int64_t first = 0, count = rsd_layout_narrays(layout);
    if (tensor->rank != RSD_EVERY_RANK) {
        rsd_layout_arrays_of(layout, tensor->rank, &first, &count);
        return count ? add_rank_slices(boxes, tensor, tensor->rank, first, written) : RSD_OK;
    }
    for (int64_t array = 0, n; array < count; array += n) {
        int32_t rank = layout_array_rank(layout, array);
        int64_t own;
        rsd_layout_arrays_of(layout, rank, &own, &n);
        TRY(add_rank_slices(boxes, tensor, rank, 0, written));
    }
    return RSD_OK;
}

void arrays_drop_slices(struct array_slices *boxes)
{
    mem_free(boxes->list);
    *boxes = (struct array_slices){0};
}

rsd_status arrays_take_tensor(const rsd_tensor *given, int64_t index, rsd_tensor *out)
{
    /* A caller of another version has structs of another size, which lie that size apart. */
    size_t step = index > 0 ? given->struct_nbytes : 0;
    const char *at = (const char *)given + (size_t)index * step;
    TRY(options_copy("rsd_tensor", at, out, sizeof *out));
    if (!out->name || !out->layout)
        return fail(RSD_EINVAL, "tensor %lld has no %s", (long long)index,
                    out->name ? "layout" : "name");
    if (out->rank < RSD_EVERY_RANK)
        return fail(RSD_EINVAL, "%s: invalid rank %d", out->name, (int)out->rank);
    return RSD_OK;
}
