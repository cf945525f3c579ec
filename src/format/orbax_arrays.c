/* orbax_arrays.c - the zarr arrays among the keys of an item, as tensors whose boxes are the chunks.
 *
 *     a.kernel/.zarray or a.kernel/zarr.json    the shape, the grid of chunks and how they are stored
 *     a.kernel/0.1     or a.kernel/c/0/1        the chunk (0, 1) of the grid, or a shard of chunks
 *
 * A scalar of Python is an array without dims, and becomes a value.
 */
#include "orbax.h"

#include <stdlib.h>

enum { MAX_TEXT_NBYTES = 1 << 20 };

struct array_reader {
    struct orbax_item *item;
    struct orbax_array *arrays;
    size_t narrays, arrays_capacity;
    struct chunk_key *chunks;
    size_t nchunks, chunks_capacity;
    struct string_map names; /* of arrays */
};

/* ---- metadata ---- */

/* Reads the metadata of an array. *is_array is false for that of a group. */
static rsd_status read_array_text(struct key_list *keys, size_t index, bool v3,
                                  struct orbax_array *array, bool *is_array)
{
    const struct stored_key *key = &keys->list[index];
    TRY(key_list_find_value(keys, index));
    if (key->value_nbytes > MAX_TEXT_NBYTES)
        return fail(RSD_ELIMIT, "%llu bytes of metadata exceed the limit of %d",
                    (unsigned long long)key->value_nbytes, (int)MAX_TEXT_NBYTES);
    size_t n = (size_t)key->value_nbytes;
    char *text = mem_new(n + 1, 1);
    if (!text)
        return RSD_ENOMEM;
    rsd_status status = key_list_read(keys, index, 0, text, n);
    if (!status)
        status = zarr_read(text, n, v3, &array->zarr, is_array);
    mem_free(text);
    array->file = key->file;
    return status;
}

/* Adds the array of a key, if the key has the metadata of one. */
static rsd_status add_array(struct array_reader *reader, size_t index)
{
    struct key_list *keys = &reader->item->keys;
    struct slice text = key_list_text(keys, index);
    const char *slash = memrchr(text.bytes, '/', text.nbytes);
    struct slice base = text, name = {text.bytes, 0};
    struct orbax_array array = {0};
    bool is_array = false;
    size_t known;
    if (slash) {
        name.nbytes = (size_t)(slash - text.bytes);
        base = (struct slice){slash + 1, text.nbytes - name.nbytes - 1};
    }
    bool v3 = slice_is(base, "zarr.json");
    if (!v3 && !slice_is(base, ".zarray"))
        return RSD_OK;
    rsd_status status = read_array_text(keys, index, v3, &array, &is_array);
    if (!status && is_array && string_map_find(&reader->names, name, &known))
        status = fail(RSD_EFORMAT, "array has both .zarray and zarr.json");
    if (status)
        return key_list_fail_in(keys, index, status);
    if (!is_array)
        return RSD_OK;
    array.name = name;
    array.complete = reader->item->tree->complete;
    TRY(GROW(reader->arrays, reader->arrays_capacity, reader->narrays + 1));
    reader->arrays[reader->narrays] = array;
    return string_map_add(&reader->names, name, reader->narrays++);
}

/* ---- keys of chunks ---- */

/* Takes a number without leading zeros. */
static bool take_index(struct slice text, size_t *at, int64_t below, int64_t *out)
{
    size_t start = *at;
    int64_t value = 0;
    for (; *at < text.nbytes && text.bytes[*at] >= '0' && text.bytes[*at] <= '9'; ++*at) {
        value = value * 10 + (text.bytes[*at] - '0');
        if (value >= below)
            return false;
    }
    *out = value;
    return *at > start && (*at == start + 1 || text.bytes[start] != '0');
}

/* Finds the place in the grid that the rest of a key names. Returns false if it is not that of a chunk. */
static bool find_grid_index(const struct zarr_array *zarr, struct slice rest, int64_t *out)
{
    size_t at = 0;
    int64_t index = 0, one;
    if (zarr->prefixed && (rest.nbytes == 0 || rest.bytes[at++] != 'c'))
        return false;
    if (zarr->ndim == 0 && !zarr->prefixed && (rest.nbytes == 0 || rest.bytes[at++] != '0'))
        return false;
    for (int32_t d = 0; d < zarr->ndim; d++) {
        bool separated = d > 0 || zarr->prefixed;
        if (separated && (at >= rest.nbytes || rest.bytes[at++] != zarr->separator))
            return false;
        if (!take_index(rest, &at, zarr_grid_count(zarr, d), &one) ||
            !mul_i64(index, zarr_grid_count(zarr, d), &index) || !add_i64(index, one, &index))
            return false;
    }
    *out = index;
    return at == rest.nbytes;
}

/* Notes the array of which a key has a chunk. The name of the array is the longest that fits, and is empty
 * if the tree is one array. */
static rsd_status add_chunk_key(struct array_reader *reader, size_t index)
{
    struct slice text = key_list_text(&reader->item->keys, index), name = text;
    for (int parts = 0; parts < RSD_MAX_DIMS + 1 && name.nbytes > 0 && reader->arrays; parts++) {
        const char *slash = memrchr(name.bytes, '/', name.nbytes);
        size_t end = slash ? (size_t)(slash - text.bytes) : 0, skip = slash ? end + 1 : 0, array;
        struct slice rest = {text.bytes + skip, text.nbytes - skip};
        struct chunk_key chunk = {.key = index};
        name.nbytes = end;
        if (!string_map_find(&reader->names, name, &array) ||
            !find_grid_index(&reader->arrays[array].zarr, rest, &chunk.index))
            continue;
        chunk.array = array;
        TRY(GROW(reader->chunks, reader->chunks_capacity, reader->nchunks + 1));
        reader->chunks[reader->nchunks++] = chunk;
        return RSD_OK;
    }
    return RSD_OK;
}

static int by_array_and_index(const void *a, const void *b)
{
    const struct chunk_key *x = a, *y = b;
    if (x->array != y->array)
        return x->array < y->array ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

/* ---- tensors ---- */

/* Adds one box that cannot be read, because something of the array is not supported. */
static rsd_status add_refused_box(struct catalog *catalog, const struct orbax_array *array)
{
    static const int64_t origin[RSD_MAX_DIMS];
    const struct zarr_array *zarr = &array->zarr;
    struct extent extent = {.kind = EXTENT_ITEM,
                            .file = array->file,
                            .unknown = 1,
                            .detail = (uint32_t)catalog->ntransforms};
    struct slice refused = slice_of(zarr->refused);
    TRY(GROW(catalog->transforms, catalog->transforms_capacity, catalog->ntransforms + 1));
    TRY(catalog_add_name(catalog, refused, &catalog->transforms[catalog->ntransforms].unknown));
    catalog->transforms[catalog->ntransforms].names = "[]";
    catalog->ntransforms++;
    return catalog_add_box(catalog, origin, zarr->shape, extent);
}

/* Adds an array as the last tensor. */
static rsd_status add_array_tensor(struct array_reader *reader, struct orbax_array *array,
                                   const struct tree_entry *entry, const struct chunk_key *chunks,
                                   size_t n)
{
    struct catalog *catalog = reader->item->catalog;
    const struct zarr_array *zarr = &array->zarr;
    struct text text = {0};
    char *name;
    orbax_add_name(reader->item, array->name, &text);
    TRY(text_take(&text, &name));
    rsd_status status =
        catalog_add_tensor(catalog, slice_of(name), zarr->dtype, zarr->ndim, zarr->shape);
    if (status)
        status = fail_in(status, "%s: %.300s: ", reader->item->keys.store->path, name);
    rsd_free(name);
    TRY(status);
    catalog->tensors[catalog->ntensors - 1].path = entry ? entry->path : NULL;
    return *zarr->refused ? add_refused_box(catalog, array)
                          : orbax_add_boxes(catalog, &reader->item->keys, array, chunks, n);
}

/* ---- scalars ---- */

/* Reads the only element of the last tensor, as it is in memory. */
static rsd_status read_element(const struct orbax_item *item, unsigned char *out)
{
    const rsd_checkpoint checkpoint = {.store = item->keys.store, .catalog = *item->catalog};
    size_t tensor = item->catalog->ntensors - 1;
    size_t n = rsd_dtype_nbytes(item->catalog->tensors[tensor].dtype);
    const struct extent *extent =
        &item->catalog->extents[item->catalog->tensors[tensor].first_extent];
    struct stored_array array;
    struct stored_stream *stream;
    rsd_status status;
    if (extent->kind == EXTENT_NONE)
        return fail(RSD_EFORMAT, "chunk is missing");
    TRY(orbax_locate(&checkpoint, tensor, 0, &array));
    if (array.stream) {
        TRY(orbax_open_stream(&checkpoint, tensor, 0, &stream));
        status = stream->read(stream, out, n);
        stored_stream_close(stream);
        TRY(status);
    } else if (array.memory) {
        memcpy(out, array.memory, n);
    } else {
        TRY(store_read(checkpoint.store, extent->file, array.offset, out, n));
    }
    for (size_t i = 0; array.big_endian && i < n / 2; i++) {
        unsigned char byte = out[i];
        out[i] = out[n - 1 - i];
        out[n - 1 - i] = byte;
    }
    return RSD_OK;
}

/* Writes one element as JSON. */
static void add_element_json(rsd_dtype dtype, const unsigned char *element, struct text *out)
{
    double number;
    size_t n = rsd_dtype_nbytes(dtype), unused = n > 0 && n < 8 ? 64 - 8 * n : 0;
    uint64_t bits = little_endian(element, (int)n);
    memcpy(&number, &bits, sizeof number);
    if (dtype == RSD_BOOL)
        text_add(out, "%s", bits ? "true" : "false");
    else if (dtype == RSD_F64)
        json_add_float(out, number);
    else if (dtype == RSD_F32)
        json_add_float(out, (double)float_of((uint32_t)bits));
    else if (dtype == RSD_BF16)
        json_add_float(out, (double)f32_from_bf16((uint16_t)bits));
    else if (dtype == RSD_F16)
        json_add_float(out, (double)f32_from_f16((uint16_t)bits));
    else if (dtype >= RSD_U64 && dtype <= RSD_U8)
        text_add(out, "%llu", (unsigned long long)bits);
    else /* the sign is the highest bit of the element */
        text_add(out, "%lld", (long long)((int64_t)(bits << unused) >> unused));
}

/* Turns the last tensor, which has one element, into a value. */
static rsd_status make_scalar_value(struct orbax_item *item, struct slice name, const char *path,
                                    const struct catalog *before)
{
    struct catalog *catalog = item->catalog;
    rsd_dtype dtype = catalog->tensors[catalog->ntensors - 1].dtype;
    unsigned char element[16] = {0};
    struct text text = {0};
    char *json;
    rsd_status status = read_element(item, element);
    if (status)
        return fail_in(status, "%s: %.300s: ", item->keys.store->path,
                       catalog->tensors[catalog->ntensors - 1].name);
    catalog->ntensors = before->ntensors;
    catalog->nextents = before->nextents;
    catalog->ncoordinates = before->ncoordinates;
    catalog->narrays = before->narrays;
    add_element_json(dtype, element, &text);
    TRY(text_take(&text, &json));
    return orbax_add_value(item, name, path, json);
}

static bool is_plain_scalar(const struct orbax_array *array, const struct tree_entry *entry)
{
    rsd_dtype dtype = array->zarr.dtype;
    return entry && entry->kind == TREE_SCALAR && array->zarr.ndim == 0 && !*array->zarr.refused &&
           (dtype <= RSD_BF16 || (dtype >= RSD_I64 && dtype <= RSD_BOOL));
}

/* ---- all arrays ---- */

/* Adds all arrays: first their metadata, then their chunks, sorted, then the tensors. */
static rsd_status add_all_arrays(struct array_reader *reader)
{
    struct orbax_item *item = reader->item;
    size_t nkeys = item->keys.n;
    for (size_t i = 0; i < nkeys; i++)
        TRY(add_array(reader, i));
    for (size_t i = 0; i < nkeys; i++)
        TRY(add_chunk_key(reader, i));
    if (reader->nchunks > 1)
        qsort(reader->chunks, reader->nchunks, sizeof *reader->chunks, by_array_and_index);
    for (size_t i = 0, first = 0, n; i < reader->narrays; i++, first += n) {
        struct orbax_array *array = &reader->arrays[i];
        struct tree_entry *entry = orbax_tree_find(item->tree, array->name);
        struct catalog before = *item->catalog;
        for (n = 0; first + n < reader->nchunks && reader->chunks[first + n].array == i; n++)
            continue;
        TRY(add_array_tensor(reader, array, entry, n ? reader->chunks + first : NULL, n));
        if (is_plain_scalar(array, entry))
            TRY(make_scalar_value(item, array->name, entry->path, &before));
        if (entry)
            entry->found = true;
    }
    return RSD_OK;
}

rsd_status orbax_add_arrays(struct orbax_item *item)
{
    struct array_reader reader = {.item = item};
    rsd_status status = add_all_arrays(&reader);
    mem_free(reader.arrays);
    mem_free(reader.chunks);
    string_map_drop(&reader.names);
    return status;
}
