/* local.c - tensors in the caller's memory, as boxes with an address and strides. */
#include "checkpoint.h"

static rsd_status add_boxes(struct local_boxes *out, const rsd_tensor *local, int32_t rank,
                            int64_t first_array, bool written)
{
    const rsd_layout *layout = local->layout;
    rsd_shard *held;
    int64_t nheld;
    TRY(rsd_layout_boxes(layout, rank, &held, &nheld));
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < nheld && !status; i++) {
        size_t given = (size_t)(held[i].array - first_array);
        status = GROW(out->list, out->capacity, out->n + 1);
        if (status)
            break;
        struct local_box *box = &out->list[out->n++];
        *box = (struct local_box){
            .box = held[i].box, .rank = rank, .order = (uint32_t)i, .dtype = layout->dtype};
        const int64_t *strides =
            local->strides ? local->strides + given * (size_t)layout->ndim : NULL;
        status = array_strides(layout, held[i].array, strides, local->column_major != 0, written,
                               box->strides);
        bool empty = box_volume(layout->ndim, held[i].box.len) == 0;
        if (!status && !empty && (!local->arrays || !local->arrays[given]))
            status = fail(RSD_EINVAL, "array %lld of rank %d is NULL", (long long)given, (int)rank);
        if (!status && !empty) {
            box->memory = local->arrays[given];
            for (int32_t d = 0; d < layout->ndim; d++)
                box->memory += held[i].at[d] * box->strides[d];
        }
    }
    rsd_free(held);
    return status;
}

rsd_status local_boxes(const rsd_tensor *local, bool written, struct local_boxes *out)
{
    const rsd_layout *layout = local->layout;
    int64_t first = 0, count = rsd_layout_narrays(layout);
    if (local->rank != RSD_EVERY_RANK) {
        rsd_layout_arrays_of(layout, local->rank, &first, &count);
        return count ? add_boxes(out, local, local->rank, first, written) : RSD_OK;
    }
    for (int64_t array = 0, n; array < count; array += n) {
        int32_t rank = layout_array_rank(layout, array);
        int64_t own;
        rsd_layout_arrays_of(layout, rank, &own, &n);
        TRY(add_boxes(out, local, rank, 0, written));
    }
    return RSD_OK;
}

void local_boxes_drop(struct local_boxes *boxes)
{
    mem_free(boxes->list);
    *boxes = (struct local_boxes){0};
}

rsd_status take_local(const rsd_tensor *given, int64_t index, rsd_tensor *out)
{
    /* A caller of another version has structs of another size: they are one size apart. */
    size_t step = index > 0 ? given->struct_nbytes : 0;
    const char *at = (const char *)given + (size_t)index * step;
    TRY(options_copy("rsd_tensor", at, out, sizeof *out));
    if (!out->name || !out->layout)
        return fail(RSD_EINVAL, "local %lld has no %s", (long long)index,
                    out->name ? "layout" : "name");
    if (out->rank < RSD_EVERY_RANK)
        return fail(RSD_EINVAL, "%s: rank %d", out->name, (int)out->rank);
    return RSD_OK;
}
