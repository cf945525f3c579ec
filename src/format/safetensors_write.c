/* safetensors_write.c - writes safetensors files and their index.
 *
 *     | header | bytes | bytes | ...
 *
 * A header has one array per name. If a rank holds several boxes of a tensor (a fused weight, cut segment by
 * segment), they are packed in one array, as in its memory. A shard has its offset twice: for torch, which
 * knows one offset per array, and for this library, together with the shape of the tensor.
 */
#include "json.h"
#include "pickle.h"
#include "safetensors.h"
#include "torch_item.h"

#include <stdio.h>
#include <string.h>

enum { ALIGNMENT = 8 };

/* An array: one box of a tensor, or several of one rank. */
struct array_place {
    const struct stored_tensor *tensor;
    size_t extent, box, nboxes;
    int64_t shape[RSD_MAX_DIMS];
    const int64_t *ats; /* of several: where each begins in the array */
};

/* The arrays of one file, in their order. */
struct file_places {
    struct array_place *list;
    size_t n, capacity;
};

static void add_extents(struct text *out, int32_t ndim, const int64_t *values)
{
    text_add(out, "[");
    for (int32_t d = 0; d < ndim; d++)
        text_add(out, "%s%lld", d ? "," : "", (long long)values[d]);
    text_add(out, "]");
}

static void add_json_name(struct text *out, const char *name)
{
    json_add_string(out, name, strlen(name));
}

static bool is_whole_tensor(const struct catalog *catalog, const struct array_place *place)
{
    for (int32_t d = 0; d < place->tensor->ndim; d++)
        if (place->shape[d] != tensor_shape(catalog, place->tensor)[d])
            return false;
    return place->nboxes == 1;
}

static uint64_t array_nbytes(const struct array_place *place)
{
    return (uint64_t)box_volume(place->tensor->ndim, place->shape) *
           rsd_dtype_nbytes(place->tensor->dtype);
}

/* ---- offsets of shards ---- */

/* Adds lo, len and offset in the array of each box, in one list. */
static void add_piece_list(struct text *out, const struct catalog *catalog,
                           const struct array_place *place)
{
    const struct stored_tensor *tensor = place->tensor;
    size_t ndim = (size_t)tensor->ndim;
    text_add(out, "[");
    for (size_t i = 0; i < place->nboxes; i++) {
        const int64_t *lists[] = {tensor_box_lo(catalog, tensor, place->box + i),
                                  tensor_box_len(catalog, tensor, place->box + i),
                                  place->ats + i * ndim};
        for (size_t k = 0; k < 3 * ndim; k++)
            text_add(out, "%s%lld", i + k ? "," : "", (long long)lists[k / ndim][k % ndim]);
    }
    text_add(out, "]");
}

/* Adds an object that maps names to the positions of their shards: of torch, or with `ours` of this library. */
static void add_places(struct text *out, const struct catalog *catalog,
                       const struct file_places *places, bool ours)
{
    text_add(out, "{");
    for (size_t i = 0; i < places->n; i++) {
        const struct array_place *place = &places->list[i];
        const struct stored_tensor *tensor = place->tensor;
        text_add(out, i ? "," : "");
        add_json_name(out, tensor->name);
        text_add(out, place->nboxes > 1 ? ":{\"pieces\":"
                      : ours            ? ":{\"lo\":"
                                        : ":{\"saved_offsets\":");
        if (place->nboxes > 1)
            add_piece_list(out, catalog, place);
        else
            add_extents(out, tensor->ndim, tensor_box_lo(catalog, tensor, place->box));
        if (ours) {
            text_add(out, ",\"shape\":");
            add_extents(out, tensor->ndim, tensor_shape(catalog, tensor));
        }
        text_add(out, "}");
    }
    text_add(out, "}");
}

/* Adds JSON as a text in JSON. */
static rsd_status add_nested(struct text *out, const char *key, struct text *nested)
{
    char *chars;
    TRY(text_take(nested, &chars));
    text_add(out, ",\"%s\":", key);
    json_add_string(out, chars, strlen(chars));
    rsd_free(chars);
    return RSD_OK;
}

/* Adds the positions of shards to the metadata of a header, for torch and for this library. */
static rsd_status add_sharding(struct text *out, const struct catalog *catalog,
                               const struct file_places *places)
{
    struct text torch = {0}, ours = {0};
    rsd_status status = RSD_OK;
    bool simple = true; /* torch knows only arrays of one box */
    for (size_t i = 0; i < places->n; i++)
        simple = simple && places->list[i].nboxes == 1;
    if (simple) {
        add_places(&torch, catalog, places, false);
        status = add_nested(out, "DCP_SHARDING_INFO", &torch);
        text_add(out, ",\"DCP_VERSION\":\"1.0\"");
    }
    text_add(&ours, "{\"version\":1,\"tensors\":");
    add_places(&ours, catalog, places, true);
    text_add(&ours, "}");
    if (!status)
        status = add_nested(out, "reshard", &ours);
    text_drop(&torch);
    text_drop(&ours);
    return status;
}

/* ---- one header ---- */

/* Adds one array to a header. Returns an error for a name or dtype that the format does not have. */
static rsd_status add_header_entry(struct text *out, const struct array_place *place,
                                   uint64_t begin, uint64_t nbytes)
{
    const struct stored_tensor *tensor = place->tensor;
    const char *dtype = dtype_to_safetensors(tensor->dtype);
    int64_t shape[RSD_MAX_DIMS] = {0};
    if (strcmp(tensor->name, "__metadata__") == 0)
        return fail(RSD_EINVAL, "%s: safetensors reserves this name", tensor->name);
    if (!dtype)
        return fail(RSD_EUNSUPPORTED, "%s: safetensors has no dtype %s", tensor->name,
                    rsd_dtype_name(tensor->dtype));
    copy_i64s(shape, place->shape, tensor->ndim);
    if (tensor->dtype == RSD_F4X2 && tensor->ndim > 0)
        shape[tensor->ndim - 1] *= 2; /* two elements a byte; in the file, extents count elements */
    text_add(out, ",");
    add_json_name(out, tensor->name);
    text_add(out, ":{\"dtype\":\"%s\",\"shape\":", dtype);
    add_extents(out, tensor->ndim, shape);
    text_add(out, ",\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
             (unsigned long long)(begin + nbytes));
    return RSD_OK;
}

/* Returns whether the arrays of a file begin at whole blocks: some of them are large. */
static bool is_aligned(const struct manifest *manifest, const struct file_places *places)
{
    bool large = false;
    for (size_t i = 0; i < places->n; i++)
        large = large || array_nbytes(&places->list[i]) >= ALIGNED_LEAST;
    return manifest->aligned && large;
}

/* Puts arrays of whole blocks first. There are no gaps in the format, so others would shift all that follow. */
static rsd_status order_places(struct file_places *places)
{
    size_t n = 0;
    struct array_place *list = mem_new(places->n, sizeof *list);
    if (!list)
        return RSD_ENOMEM;
    for (int rest = 0; rest < 2; rest++)
        for (size_t i = 0; i < places->n; i++)
            if ((array_nbytes(&places->list[i]) % ALIGNED_NBYTES != 0) == (rest == 1))
                list[n++] = places->list[i];
    if (n)
        memcpy(places->list, list, n * sizeof *list);
    mem_free(list);
    return RSD_OK;
}

/* Makes the header of a file, and sets the offsets of its tensors. Spaces at its end align the data. */
static rsd_status make_header(struct manifest *manifest, struct manifest_file *file,
                              const struct file_places *places)
{
    struct catalog *catalog = &manifest->catalog;
    struct text text = {0};
    uint64_t at = 0;
    bool whole = true;
    for (size_t i = 0; i < places->n; i++)
        whole = whole && is_whole_tensor(catalog, &places->list[i]) &&
                places->list[i].tensor->nboxes == 1;
    text_add(&text, "{\"__metadata__\":{\"format\":\"pt\"");
    rsd_status status = whole ? RSD_OK : add_sharding(&text, catalog, places);
    text_add(&text, "}");
    for (size_t i = 0; i < places->n && !status; i++) {
        const struct array_place *place = &places->list[i];
        uint64_t nbytes = array_nbytes(place);
        status = add_header_entry(&text, place, at, nbytes);
        for (size_t k = 0; k < place->nboxes; k++) {
            catalog->extents[place->extent + k].offset = at;
            catalog->extents[place->extent + k].nbytes = nbytes;
        }
        at += nbytes;
    }
    text_add(&text, "}");
    uint64_t alignment = is_aligned(manifest, places) ? ALIGNED_NBYTES : ALIGNMENT;
    while ((text.length + 8) % alignment && !text.failed)
        text_add(&text, " ");
    if (!status && text.length > MAX_HEADER_NBYTES)
        status = fail(RSD_ELIMIT, "%s: header of %zu bytes exceeds the limit of %d bytes",
                      file->name, text.length, (int)MAX_HEADER_NBYTES);
    bytes_put_number(&file->header, text.length, 8);
    bytes_put(&file->header, text.chars, text.length);
    if (!status && (text.failed || file->header.failed))
        status = fail(RSD_ENOMEM, "no memory for a header");
    text_drop(&text);
    for (size_t i = 0; i < places->n; i++) {
        for (size_t k = 0; k < places->list[i].nboxes; k++)
            catalog->extents[places->list[i].extent + k].offset += file->header.n;
        file->nitems += places->list[i].nboxes;
    }
    file->nbytes = file->header.n + at;
    return status;
}

/* ---- all headers ---- */

/* Finds the shape of the array that packs the boxes of one rank, which must fill it. */
static rsd_status pack_boxes(struct manifest *manifest, struct array_place *place)
{
    const struct catalog *catalog = &manifest->catalog;
    const struct stored_tensor *tensor = place->tensor;
    size_t ndim = (size_t)tensor->ndim;
    int64_t volume = 0;
    for (size_t i = 0; i < place->nboxes; i++) {
        const int64_t *len = tensor_box_len(catalog, tensor, place->box + i);
        for (size_t d = 0; d < ndim; d++)
            place->shape[d] = max_i64(place->shape[d], place->ats[i * ndim + d] + len[d]);
        volume += box_volume(tensor->ndim, len);
    }
    if (volume != box_volume(tensor->ndim, place->shape))
        return fail(RSD_EUNSUPPORTED,
                    "%s: a rank writes only some boxes of its array, and safetensors has one array "
                    "per name",
                    tensor->name);
    for (size_t i = 0; i < place->nboxes; i++) {
        TRY(GROW(manifest->places, manifest->places_capacity, manifest->nplaces + 2 * ndim + 1));
        manifest->nplaces += manifest->nplaces == 0; /* 0 means none */
        manifest->items[place->extent + i].at = manifest->nplaces;
        copy_i64s(manifest->places + manifest->nplaces, place->ats + i * ndim, tensor->ndim);
        copy_i64s(manifest->places + manifest->nplaces + ndim, place->shape, tensor->ndim);
        manifest->nplaces += 2 * ndim;
    }
    return RSD_OK;
}

/* Adds the arrays of a tensor to the lists of their files. Boxes of one rank are in a row. */
static rsd_status place_tensor(struct manifest *manifest, const struct stored_tensor *tensor,
                               const int64_t *ats, struct file_places *places)
{
    const struct catalog *catalog = &manifest->catalog;
    for (size_t box = 0, n; box < tensor->nboxes; box += n) {
        size_t extent = tensor->first_extent + box;
        struct file_places *own = &places[catalog->extents[extent].file];
        for (n = 1; box + n < tensor->nboxes &&
                    catalog->extents[extent + n].file == catalog->extents[extent].file;)
            n++;
        TRY(GROW(own->list, own->capacity, own->n + 1));
        struct array_place *place = &own->list[own->n++];
        *place = (struct array_place){.tensor = tensor, .extent = extent, .box = box, .nboxes = n};
        if (n > 1 && ats) {
            place->ats = ats + box * (size_t)tensor->ndim;
            TRY(pack_boxes(manifest, place));
        } else {
            copy_i64s(place->shape, tensor_box_len(catalog, tensor, box), tensor->ndim);
        }
    }
    return RSD_OK;
}

/* Lists the arrays of each file, and makes the headers. */
static rsd_status safetensors_place(struct manifest *manifest)
{
    const struct catalog *catalog = &manifest->catalog;
    const int64_t *ats = manifest->ats;
    struct file_places *places = mem_new(manifest->nfiles, sizeof *places);
    rsd_status status = places ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < catalog->ntensors && !status; t++) {
        status = place_tensor(manifest, &catalog->tensors[t], ats, places);
        if (ats)
            ats += catalog->tensors[t].nboxes * (size_t)catalog->tensors[t].ndim;
    }
    for (size_t i = 0; i < manifest->nfiles && !status; i++) {
        if (is_aligned(manifest, &places[i]))
            status = order_places(&places[i]);
        if (!status)
            status = make_header(manifest, &manifest->files[i], &places[i]);
    }
    for (size_t i = 0; places && i < manifest->nfiles; i++)
        mem_free(places[i].list);
    mem_free(places);
    return status;
}

/* ---- the writer ---- */

static rsd_status safetensors_check(const rsd_convert_options *options)
{
    return options->compress ? fail(RSD_EINVAL, "safetensors output cannot be compressed") : RSD_OK;
}

static void safetensors_name_file(const struct manifest *manifest, size_t file, size_t nfiles,
                                  char name[FILE_NAME_NCHARS])
{
    if (manifest->files_of == FILES_OF_RANKS)
        snprintf(name, FILE_NAME_NCHARS, "shard-%05zu-model-00001-of-00001.safetensors", file + 1);
    else if (manifest->files_of == FILES_OF_HOLDERS)
        snprintf(name, FILE_NAME_NCHARS, "rank-%05zu-of-%05zu.safetensors", file, nfiles);
    else if (nfiles == 1)
        snprintf(name, FILE_NAME_NCHARS, "%smodel.safetensors",
                 manifest->adapter ? "adapter_" : "");
    else
        snprintf(name, FILE_NAME_NCHARS, "model-%05zu-of-%05zu.safetensors", file + 1, nfiles);
}

/* Writes an index if whole tensors are in several files. Shards need none. */
static rsd_status safetensors_finish(const struct manifest *manifest, struct store *store)
{
    return manifest->files_of == FILES_OF_TENSORS && manifest->nfiles > 1
               ? index_write(manifest, store, safetensors_writer.marker)
               : RSD_OK;
}

static const char *const suffixes[] = {".safetensors", NULL};

const struct format_writer safetensors_writer = {.marker = "model.safetensors.index.json",
                                                 .file_suffixes = suffixes,
                                                 .suffix_until_complete = ".part",
                                                 .wide_first = true,
                                                 .fills_files = true,
                                                 .check = safetensors_check,
                                                 .name_file = safetensors_name_file,
                                                 .place = safetensors_place,
                                                 .finish = safetensors_finish};
