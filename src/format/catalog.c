/* catalog.c - what a checkpoint holds: tensors as lists of boxes with their extents, and values.
 *
 * A reader adds tensors, boxes and values in the order of its files. catalog_finish then sorts their names.
 * Names, shapes and boxes are in pools, so a million boxes are a few arrays and not a million allocations.
 *
 *     tensors      name, dtype, shape, first box, how many
 *     coordinates  lo and len of each box of a tensor, one after the other
 *     extents      where the bytes of each box are
 */
#include "rows.h"

#include "pickle.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAMES_BLOCK = 1 << 16 };

/* ---- pools ---- */

/* Adds a name, which never moves. */
rsd_status catalog_add_name(struct catalog *catalog, struct slice name, const char **out)
{
    size_t need = name.nbytes + 1;
    if (!budget_take_text(need) || !budget_take_memory(need))
        return budget_fail();
    if (catalog->names_left < need) {
        size_t capacity = need > NAMES_BLOCK ? need : NAMES_BLOCK;
        TRY(GROW(catalog->names, catalog->names_capacity, catalog->nnames + 1));
        char *block = mem_new(capacity, 1);
        if (!block)
            return RSD_ENOMEM;
        catalog->names[catalog->nnames++] = block;
        catalog->next_name = block;
        catalog->names_left = capacity;
    }
    char *copy = catalog->next_name;
    memcpy(copy, name.bytes, name.nbytes);
    copy[name.nbytes] = '\0';
    catalog->next_name += need;
    catalog->names_left -= need;
    *out = copy;
    return RSD_OK;
}

rsd_status catalog_copy_text(struct catalog *catalog, const char *text, const char **out)
{
    return text ? catalog_add_name(catalog, slice_of(text), out) : RSD_OK;
}

static rsd_status add_catalog_coordinates(struct catalog *catalog, const int64_t *values, int32_t n)
{
    TRY(budget_use_memory((uint64_t)n * sizeof *values));
    TRY(GROW(catalog->coordinates, catalog->coordinates_capacity,
             catalog->ncoordinates + (size_t)n + 1)); /* one more: never NULL */
    copy_i64s(catalog->coordinates + catalog->ncoordinates, values, n);
    catalog->ncoordinates += (size_t)n;
    return RSD_OK;
}

/* ---- adding ---- */

static rsd_status check_tensor_name(struct slice name)
{
    if (name.nbytes == 0 || memchr(name.bytes, '\0', name.nbytes))
        return fail(RSD_EFORMAT, "name of a tensor or value is empty or contains NUL");
    return RSD_OK;
}

/* Adds a tensor without boxes. EFORMAT: its name is empty or has a NUL. EINVAL or ELIMIT: dtype or shape is invalid. */
rsd_status catalog_add_tensor(struct catalog *catalog, struct slice name, rsd_dtype dtype,
                              int32_t ndim, const int64_t *shape)
{
    rsd_layout *checked; /* only its checks are needed */
    struct stored_tensor tensor = {.dtype = dtype, .ndim = ndim};
    TRY(check_tensor_name(name));
    TRY(budget_use_memory(sizeof tensor));
    TRY(layout_start(dtype, ndim, shape, &checked));
    rsd_layout_free(checked);
    TRY(catalog_add_name(catalog, name, &tensor.name));
    TRY(GROW(catalog->tensors, catalog->tensors_capacity, catalog->ntensors + 1));
    tensor.shape = catalog->ncoordinates;
    TRY(add_catalog_coordinates(catalog, shape, ndim));
    tensor.boxes = catalog->ncoordinates;
    tensor.first_extent = catalog->nextents;
    catalog->tensors[catalog->ntensors++] = tensor;
    return RSD_OK;
}

rsd_status catalog_add_box(struct catalog *catalog, const int64_t *lo, const int64_t *len,
                           struct extent extent)
{
    struct stored_tensor *tensor = &catalog->tensors[catalog->ntensors - 1];
    const int64_t *shape = tensor_shape(catalog, tensor);
    char text[BOX_TEXT_NCHARS];
    bool empty = box_is_empty(tensor->ndim, len);
    for (int32_t d = 0; d < tensor->ndim; d++)
        if (lo[d] < 0 || len[d] < 0 || (!empty && (lo[d] > shape[d] || len[d] > shape[d] - lo[d])))
            return fail(RSD_EFORMAT, "box %s lies outside the tensor",
                        box_text(tensor->ndim, lo, len, text));
    TRY(budget_use_memory(sizeof extent));
    TRY(GROW(catalog->extents, catalog->extents_capacity, catalog->nextents + 1));
    TRY(add_catalog_coordinates(catalog, lo, tensor->ndim));
    TRY(add_catalog_coordinates(catalog, len, tensor->ndim));
    catalog->extents[catalog->nextents++] = extent;
    tensor->nboxes++;
    return RSD_OK;
}

rsd_status catalog_add_array(struct catalog *catalog, const int64_t *lo, const int64_t *len,
                             uint32_t file, const struct stored_array *array)
{
    TRY(budget_use_memory(sizeof *array));
    TRY(GROW(catalog->arrays, catalog->arrays_capacity, catalog->narrays + 1));
    catalog->arrays[catalog->narrays++] = *array;
    return catalog_add_box(catalog, lo, len,
                           (struct extent){.kind = EXTENT_ARRAY,
                                           .file = file,
                                           .offset = array->offset,
                                           .nbytes = array->nbytes,
                                           .detail = (uint32_t)(catalog->narrays - 1)});
}

rsd_status catalog_add_range(struct catalog *catalog, int64_t begin, int64_t count, uint32_t file,
                             uint32_t array, int64_t at)
{
    size_t last = catalog->ntensors - 1;
    int32_t ndim = catalog->tensors[last].ndim;
    int64_t shape[RSD_MAX_DIMS], lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(catalog->tensors[last].dtype), n;
    uint64_t first = catalog->arrays[array].offset + (uint64_t)catalog->arrays[array].base;
    copy_i64s(shape, tensor_shape(catalog, &catalog->tensors[last]), ndim);
    for (int64_t done = 0; done < count; done += n) {
        n = box_of_range(ndim, shape, begin + done, begin + count, lo, len);
        TRY(catalog_add_box(
            catalog, lo, len,
            (struct extent){.kind = EXTENT_RANGE,
                            .file = file,
                            .offset = first + (uint64_t)((at + done) * element_nbytes),
                            .nbytes = (uint64_t)(n * element_nbytes),
                            .detail = array}));
    }
    return RSD_OK;
}

rsd_status catalog_add_value(struct catalog *catalog, struct slice name, struct extent extent,
                             char *json)
{
    struct stored_value value = {.extent = extent, .json = json};
    TRY(check_tensor_name(name));
    TRY(budget_use_memory(sizeof value));
    TRY(catalog_add_name(catalog, name, &value.name));
    TRY(GROW(catalog->values, catalog->values_capacity, catalog->nvalues + 1));
    catalog->values[catalog->nvalues++] = value;
    return RSD_OK;
}

rsd_status catalog_add_json(struct catalog *catalog, struct slice name, const char *path,
                            char *json)
{
    struct bytes pickle = {0};
    rsd_status status = json ? pickle_write_json(json, &pickle) : RSD_OK;
    if (!status)
        status = catalog_add_value(catalog, name, (struct extent){.kind = EXTENT_NONE}, json);
    if (status) {
        mem_free(json);
        bytes_drop(&pickle);
        return status;
    }
    catalog->values[catalog->nvalues - 1].pickle = pickle;
    catalog->values[catalog->nvalues - 1].path = path;
    return RSD_OK;
}

rsd_status catalog_add_note(struct catalog *catalog, const char *format, ...)
{
    char text[1000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    TRY(GROW(catalog->notes, catalog->notes_capacity, catalog->nnotes + 1));
    TRY(catalog_copy_text(catalog, text, &catalog->notes[catalog->nnotes]));
    catalog->nnotes++;
    return RSD_OK;
}

rsd_status catalog_check_transforms(const struct catalog *catalog, const struct extent *extent)
{
    if (!extent->unknown)
        return RSD_OK;
    return fail(RSD_EUNSUPPORTED, "item was stored through the unknown transform '%s'",
                catalog->transforms[extent->detail].unknown);
}

/* ---- where bytes are ---- */

void stored_array_set_dense(struct stored_array *array, rsd_dtype dtype, int32_t ndim,
                            const int64_t *len, uint64_t offset)
{
    int64_t stride = (int64_t)rsd_dtype_nbytes(dtype);
    *array = (struct stored_array){.offset = offset};
    if (box_is_empty(ndim, len)) /* its other extents may be any number */
        return;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        array->strides[d] = len[d] > 1 ? stride : 0;
        stride *= len[d];
    }
    array->nbytes = (uint64_t)stride;
}

rsd_status catalog_locate(const rsd_checkpoint *checkpoint, size_t index, size_t box,
                          struct stored_array *array)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    const struct extent *extent = &catalog->extents[tensor->first_extent + box];
    if (extent->kind == EXTENT_ARRAY) {
        *array = catalog->arrays[extent->detail];
        return RSD_OK;
    }
    stored_array_set_dense(array, tensor->dtype, tensor->ndim, tensor_box_len(catalog, tensor, box),
                           extent->offset);
    if (extent->kind == EXTENT_RANGE) {
        const struct stored_array *record = &catalog->arrays[extent->detail];
        array->base = (int64_t)(extent->offset - record->offset);
        array->offset = record->offset;
        array->nbytes = record->nbytes;
        array->crc = record->crc;
        array->has_crc = record->has_crc;
        array->big_endian = record->big_endian;
    }
    return RSD_OK;
}

/* ---- finding ---- */

static int by_catalog_name(const void *a, const void *b)
{
    return strcmp(((const struct catalog_name *)a)->name, ((const struct catalog_name *)b)->name);
}

/* Checks that no name occurs twice in both lists together. */
static rsd_status check_catalog_names(const struct catalog *catalog)
{
    const struct catalog_name *tensors = catalog->tensor_names, *values = catalog->value_names;
    for (size_t i = 1; i < catalog->ntensors; i++)
        if (by_catalog_name(&tensors[i - 1], &tensors[i]) == 0)
            return fail(RSD_EFORMAT, "two tensors have the name %s", tensors[i].name);
    for (size_t i = 1; i < catalog->nvalues; i++)
        if (by_catalog_name(&values[i - 1], &values[i]) == 0)
            return fail(RSD_EFORMAT, "two values have the name %s", values[i].name);
    for (size_t i = 0, k = 0; i < catalog->ntensors && k < catalog->nvalues;) {
        int order = by_catalog_name(&tensors[i], &values[k]);
        if (order == 0)
            return fail(RSD_EFORMAT, "%s is both a tensor and a value", tensors[i].name);
        i += order < 0;
        k += order > 0;
    }
    return RSD_OK;
}

rsd_status catalog_finish(struct catalog *catalog)
{
    catalog->tensor_names = mem_new(catalog->ntensors, sizeof(struct catalog_name));
    catalog->value_names = mem_new(catalog->nvalues, sizeof(struct catalog_name));
    if (!catalog->tensor_names || !catalog->value_names)
        return RSD_ENOMEM;
    for (size_t i = 0; i < catalog->ntensors; i++)
        catalog->tensor_names[i] = (struct catalog_name){catalog->tensors[i].name, i};
    for (size_t i = 0; i < catalog->nvalues; i++)
        catalog->value_names[i] = (struct catalog_name){catalog->values[i].name, i};
    qsort(catalog->tensor_names, catalog->ntensors, sizeof(struct catalog_name), by_catalog_name);
    qsort(catalog->value_names, catalog->nvalues, sizeof(struct catalog_name), by_catalog_name);
    return check_catalog_names(catalog);
}

static size_t find_name(const struct catalog_name *names, size_t n, const char *name)
{
    const struct catalog_name key = {name, 0};
    const struct catalog_name *found =
        n ? bsearch(&key, names, n, sizeof key, by_catalog_name) : NULL;
    return found ? found->index : SIZE_MAX;
}

size_t catalog_find_tensor(const struct catalog *catalog, const char *name)
{
    return find_name(catalog->tensor_names, catalog->ntensors, name);
}

size_t catalog_find_value(const struct catalog *catalog, const char *name)
{
    return find_name(catalog->value_names, catalog->nvalues, name);
}

void catalog_drop(struct catalog *catalog)
{
    for (size_t i = 0; i < catalog->nnames; i++)
        mem_free(catalog->names[i]);
    for (size_t i = 0; i < catalog->nvalues; i++) {
        mem_free(catalog->values[i].json);
        bytes_drop(&catalog->values[i].pickle);
    }
    mem_free(catalog->names);
    mem_free(catalog->transforms);
    mem_free(catalog->notes);
    mem_free(catalog->tensors);
    mem_free(catalog->coordinates);
    mem_free(catalog->extents);
    mem_free(catalog->values);
    mem_free(catalog->arrays);
    mem_free(catalog->tensor_names);
    mem_free(catalog->value_names);
    *catalog = (struct catalog){0};
}

/* ---- as layouts ---- */

rsd_status catalog_boxes_layout(rsd_dtype dtype, int32_t ndim, const int64_t *shape, size_t n,
                                const int64_t *lo, const int64_t *len, rsd_layout **out)
{
    int32_t *ranks = mem_new(n, sizeof *ranks);
    if (!ranks)
        return RSD_ENOMEM;
    rsd_status status = rsd_layout_new_boxes(dtype, ndim, shape, (int64_t)n, ranks, lo, len, out);
    if (!status)
        (*out)->from_file = true;
    mem_free(ranks);
    return status;
}

rsd_status catalog_tensor_layout(const struct catalog *catalog, const struct stored_tensor *tensor,
                                 bool by_file, rsd_layout **out)
{
    size_t n = tensor->nboxes, ndim = (size_t)tensor->ndim;
    int32_t *ranks = mem_new(n, sizeof *ranks);
    int64_t *lo = mem_new(n * ndim, sizeof *lo), *len = mem_new(n * ndim, sizeof *len);
    rsd_status status = ranks && lo && len ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        if (by_file)
            ranks[i] = (int32_t)catalog->extents[tensor->first_extent + i].file;
        copy_i64s(lo + i * ndim, tensor_box_lo(catalog, tensor, i), tensor->ndim);
        copy_i64s(len + i * ndim, tensor_box_len(catalog, tensor, i), tensor->ndim);
    }
    if (!status)
        status = rsd_layout_new_boxes(tensor->dtype, tensor->ndim, tensor_shape(catalog, tensor),
                                      (int64_t)n, ranks, lo, len, out);
    if (!status)
        (*out)->from_file = true;
    mem_free(ranks);
    mem_free(lo);
    mem_free(len);
    return status;
}
