/* contents.c - what a checkpoint holds: tensors as lists of boxes with their extents, and values.
 *
 * Formats add tensors, boxes and values in the order they find them; after that, both can be found by
 * name. Names, shapes and boxes lie in pools, so a million boxes are a few arrays and not a million
 * allocations.
 *
 *     tensors      name, dtype, shape, first box, how many
 *     coordinates  lo and len of each box of a tensor, one after the other
 *     extents      where the bytes of each box are
 */
#include "format.h"

#include <stdlib.h>
#include <string.h>

enum { NAMES_BLOCK = 1 << 16 };

/* ---- pools ---- */

/* Names never move, so that pointers to them stay. */
rsd_status contents_name(struct contents *contents, struct slice name, const char **out)
{
    size_t need = name.nbytes + 1;
    if (contents->names_left < need) {
        size_t room = need > NAMES_BLOCK ? need : NAMES_BLOCK;
        TRY(GROW(contents->names, contents->room_names, contents->nnames + 1));
        char *block = mem_new(room, 1);
        if (!block)
            return RSD_ENOMEM;
        contents->names[contents->nnames++] = block;
        contents->next_name = block;
        contents->names_left = room;
    }
    char *copy = contents->next_name;
    memcpy(copy, name.bytes, name.nbytes);
    copy[name.nbytes] = '\0';
    contents->next_name += need;
    contents->names_left -= need;
    *out = copy;
    return RSD_OK;
}

rsd_status contents_copy_text(struct contents *contents, const char *text, const char **out)
{
    return text ? contents_name(contents, (struct slice){text, strlen(text)}, out) : RSD_OK;
}

static rsd_status add_coordinates(struct contents *contents, const int64_t *values, int32_t n)
{
    TRY(GROW(contents->coordinates, contents->room_coordinates,
             contents->ncoordinates + (size_t)n));
    copy_i64s(contents->coordinates + contents->ncoordinates, values, n);
    contents->ncoordinates += (size_t)n;
    return RSD_OK;
}

/* ---- adding ---- */

static rsd_status check_tensor_name(struct slice name)
{
    if (name.nbytes == 0 || memchr(name.bytes, '\0', name.nbytes))
        return fail(RSD_EFORMAT, "a tensor or value without a proper name");
    return RSD_OK;
}

rsd_status contents_add_tensor(struct contents *contents, struct slice name, rsd_dtype dtype,
                               int32_t ndim, const int64_t *shape)
{
    rsd_layout *checked; /* for the shape alone */
    struct tensor tensor = {.dtype = dtype, .ndim = ndim};
    TRY(check_tensor_name(name));
    TRY(layout_start(dtype, ndim, shape, &checked));
    rsd_layout_free(checked);
    TRY(contents_name(contents, name, &tensor.name));
    TRY(GROW(contents->tensors, contents->room_tensors, contents->ntensors + 1));
    tensor.shape = contents->ncoordinates;
    TRY(add_coordinates(contents, shape, ndim));
    tensor.boxes = contents->ncoordinates;
    tensor.first_extent = contents->nextents;
    contents->tensors[contents->ntensors++] = tensor;
    return RSD_OK;
}

rsd_status contents_add_box(struct contents *contents, const int64_t *lo, const int64_t *len,
                            struct extent extent)
{
    struct tensor *tensor = &contents->tensors[contents->ntensors - 1];
    const int64_t *shape = contents->coordinates + tensor->shape;
    char text[BOX_TEXT_NCHARS];
    bool empty = box_is_empty(tensor->ndim, len);
    for (int32_t d = 0; d < tensor->ndim; d++)
        if (lo[d] < 0 || len[d] < 0 || (!empty && (lo[d] > shape[d] || len[d] > shape[d] - lo[d])))
            return fail(RSD_EFORMAT, "box %s lies outside the tensor",
                        box_text(tensor->ndim, lo, len, text));
    TRY(GROW(contents->extents, contents->room_extents, contents->nextents + 1));
    TRY(add_coordinates(contents, lo, tensor->ndim));
    TRY(add_coordinates(contents, len, tensor->ndim));
    contents->extents[contents->nextents++] = extent;
    tensor = &contents->tensors[contents->ntensors - 1];
    tensor->nboxes++;
    return RSD_OK;
}

rsd_status contents_add_value(struct contents *contents, struct slice name, struct extent extent,
                              char *json)
{
    struct value value = {.extent = extent, .json = json};
    TRY(check_tensor_name(name));
    TRY(contents_name(contents, name, &value.name));
    TRY(GROW(contents->values, contents->room_values, contents->nvalues + 1));
    contents->values[contents->nvalues++] = value;
    return RSD_OK;
}

rsd_status check_transforms(const struct contents *contents, const struct extent *extent)
{
    if (!extent->unknown)
        return RSD_OK;
    return fail(RSD_EUNSUPPORTED, "stored through the transform '%s', which is not known here",
                contents->transforms[extent->detail]);
}

/* ---- finding ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct named *)a)->name, ((const struct named *)b)->name);
}

/* Each name is there once, in both lists together. */
static rsd_status check_names(const struct contents *contents)
{
    const struct named *tensors = contents->tensor_names, *values = contents->value_names;
    for (size_t i = 1; i < contents->ntensors; i++)
        if (by_name(&tensors[i - 1], &tensors[i]) == 0)
            return fail(RSD_EFORMAT, "there are two tensors %s", tensors[i].name);
    for (size_t i = 1; i < contents->nvalues; i++)
        if (by_name(&values[i - 1], &values[i]) == 0)
            return fail(RSD_EFORMAT, "there are two values %s", values[i].name);
    for (size_t i = 0, k = 0; i < contents->ntensors && k < contents->nvalues;) {
        int order = by_name(&tensors[i], &values[k]);
        if (order == 0)
            return fail(RSD_EFORMAT, "%s is a tensor and a value", tensors[i].name);
        i += order < 0;
        k += order > 0;
    }
    return RSD_OK;
}

rsd_status contents_finish(struct contents *contents)
{
    contents->tensor_names = mem_new(contents->ntensors, sizeof(struct named));
    contents->value_names = mem_new(contents->nvalues, sizeof(struct named));
    if (!contents->tensor_names || !contents->value_names)
        return RSD_ENOMEM;
    for (size_t i = 0; i < contents->ntensors; i++)
        contents->tensor_names[i] = (struct named){contents->tensors[i].name, i};
    for (size_t i = 0; i < contents->nvalues; i++)
        contents->value_names[i] = (struct named){contents->values[i].name, i};
    qsort(contents->tensor_names, contents->ntensors, sizeof(struct named), by_name);
    qsort(contents->value_names, contents->nvalues, sizeof(struct named), by_name);
    return check_names(contents);
}

static size_t find(const struct named *names, size_t n, const char *name)
{
    const struct named key = {name, 0};
    const struct named *found = n ? bsearch(&key, names, n, sizeof key, by_name) : NULL;
    return found ? found->index : SIZE_MAX;
}

size_t contents_find(const struct contents *contents, const char *name)
{
    return find(contents->tensor_names, contents->ntensors, name);
}

size_t contents_find_value(const struct contents *contents, const char *name)
{
    return find(contents->value_names, contents->nvalues, name);
}

void contents_drop(struct contents *contents)
{
    for (size_t i = 0; i < contents->nnames; i++)
        mem_free(contents->names[i]);
    for (size_t i = 0; i < contents->nvalues; i++) {
        mem_free(contents->values[i].json);
        bytes_drop(&contents->values[i].pickle);
    }
    mem_free(contents->names);
    mem_free(contents->transforms);
    mem_free(contents->tensors);
    mem_free(contents->coordinates);
    mem_free(contents->extents);
    mem_free(contents->values);
    mem_free(contents->views);
    mem_free(contents->tensor_names);
    mem_free(contents->value_names);
    *contents = (struct contents){0};
}

/* ---- as layouts ---- */

rsd_status boxes_layout(rsd_dtype dtype, int32_t ndim, const int64_t *shape, size_t n,
                        const int64_t *lo, const int64_t *len, rsd_layout **out)
{
    int32_t *ranks = mem_new(n, sizeof *ranks);
    if (!ranks)
        return RSD_ENOMEM;
    rsd_status status = rsd_layout_new_boxes(dtype, ndim, shape, (int64_t)n, ranks, lo, len, out);
    mem_free(ranks);
    return status;
}

rsd_status tensor_layout(const struct contents *contents, const struct tensor *tensor, bool by_file,
                         rsd_layout **out)
{
    size_t n = tensor->nboxes, ndim = (size_t)tensor->ndim;
    int32_t *ranks = mem_new(n, sizeof *ranks);
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = ranks && lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        if (by_file)
            ranks[i] = (int32_t)contents->extents[tensor->first_extent + i].file;
        copy_i64s(lo + i * ndim, tensor_box_lo(contents, tensor, i), tensor->ndim);
        copy_i64s(len + i * ndim, tensor_box_len(contents, tensor, i), tensor->ndim);
    }
    if (!status)
        status = rsd_layout_new_boxes(tensor->dtype, tensor->ndim, tensor_shape(contents, tensor),
                                      (int64_t)n, ranks, lo, len, out);
    mem_free(ranks);
    mem_free(lo);
    mem_free(len);
    return status;
}

rsd_status tensor_plan(const struct contents *contents, const struct tensor *tensor, size_t n,
                       const int64_t *lo, const int64_t *len, rsd_plan **plan)
{
    rsd_layout *src = NULL, *dst = NULL;
    rsd_status status = tensor_layout(contents, tensor, false, &src);
    if (!status)
        status = boxes_layout(tensor->dtype, tensor->ndim, tensor_shape(contents, tensor), n, lo,
                              len, &dst);
    if (!status)
        status = rsd_plan_new(src, dst, NULL, plan);
    rsd_layout_free(src);
    rsd_layout_free(dst);
    return status;
}
