/* safetensors_out.c - the headers of safetensors files, and their index.
 *
 * The header has one array per name, so a rank can have one box of a tensor. Shards carry where they lie
 * twice: for torch, which wants offsets, and for this library, which wants to know the whole shape too.
 */
#include "haul.h"

#include <stdio.h>
#include <string.h>

enum { ALIGNMENT = 8 };

struct place {
    const struct tensor *tensor;
    size_t extent, box;
};

/* The tensors of one file in their order. */
struct file_places {
    struct place *list;
    size_t n, room;
};

static void add_list(struct text *out, int32_t ndim, const int64_t *values)
{
    text_add(out, "[");
    for (int32_t d = 0; d < ndim; d++)
        text_add(out, "%s%lld", d ? "," : "", (long long)values[d]);
    text_add(out, "]");
}

static void add_name(struct text *out, const char *name)
{
    json_add_string(out, name, strlen(name));
}

static bool is_whole(const struct contents *contents, const struct place *place)
{
    const int64_t *len = tensor_box_len(contents, place->tensor, place->box);
    for (int32_t d = 0; d < place->tensor->ndim; d++)
        if (len[d] != tensor_shape(contents, place->tensor)[d])
            return false;
    return true;
}

/* ---- where shards lie ---- */

static void add_places(struct text *out, const struct contents *contents,
                       const struct file_places *places, bool ours)
{
    text_add(out, "{");
    for (size_t i = 0; i < places->n; i++) {
        const struct place *place = &places->list[i];
        const struct tensor *tensor = place->tensor;
        text_add(out, i ? "," : "");
        add_name(out, tensor->name);
        text_add(out, ours ? ":{\"lo\":" : ":{\"saved_offsets\":");
        add_list(out, tensor->ndim, tensor_box_lo(contents, tensor, place->box));
        if (ours) {
            text_add(out, ",\"shape\":");
            add_list(out, tensor->ndim, tensor_shape(contents, tensor));
        }
        text_add(out, "}");
    }
    text_add(out, "}");
}

/* JSON inside a JSON text. */
static rsd_status add_nested(struct text *out, const char *key, struct text *nested)
{
    char *chars;
    TRY(text_take(nested, &chars));
    text_add(out, ",\"%s\":", key);
    json_add_string(out, chars, strlen(chars));
    rsd_free(chars);
    return RSD_OK;
}

static rsd_status add_sharding(struct text *out, const struct contents *contents,
                               const struct file_places *places)
{
    struct text torch = {0}, ours = {0};
    add_places(&torch, contents, places, false);
    rsd_status status = add_nested(out, "DCP_SHARDING_INFO", &torch);
    text_add(out, ",\"DCP_VERSION\":\"1.0\"");
    text_add(&ours, "{\"version\":1,\"tensors\":");
    add_places(&ours, contents, places, true);
    text_add(&ours, "}");
    if (!status)
        status = add_nested(out, "reshard", &ours);
    text_drop(&torch);
    text_drop(&ours);
    return status;
}

/* ---- one header ---- */

static rsd_status add_tensor(struct text *out, const struct contents *contents,
                             const struct place *place, uint64_t begin, uint64_t nbytes)
{
    const struct tensor *tensor = place->tensor;
    const char *dtype = dtype_to_safetensors(tensor->dtype);
    int64_t shape[RSD_MAX_DIMS] = {0};
    if (!dtype)
        return fail(RSD_EUNSUPPORTED, "%s: safetensors has no dtype for %s", tensor->name,
                    rsd_dtype_name(tensor->dtype));
    copy_i64s(shape, tensor_box_len(contents, tensor, place->box), tensor->ndim);
    if (tensor->dtype == RSD_F4X2 && tensor->ndim > 0)
        shape[tensor->ndim - 1] *= 2; /* two elements a byte; there, extents count elements */
    text_add(out, ",");
    add_name(out, tensor->name);
    text_add(out, ":{\"dtype\":\"%s\",\"shape\":", dtype);
    add_list(out, tensor->ndim, shape);
    text_add(out, ",\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
             (unsigned long long)(begin + nbytes));
    return RSD_OK;
}

static rsd_status check_places(const struct file_places *places)
{
    for (size_t i = 1; i < places->n; i++)
        if (places->list[i].tensor == places->list[i - 1].tensor)
            return fail(RSD_EUNSUPPORTED,
                        "%s: one rank holds several boxes of it, a safetensors file can hold one",
                        places->list[i].tensor->name);
    return RSD_OK;
}

static rsd_status write_header(struct draft *draft, struct out_file *file,
                               const struct file_places *places)
{
    struct contents *contents = &draft->contents;
    struct text text = {0};
    uint64_t at = 0;
    bool whole = true;
    TRY(check_places(places));
    for (size_t i = 0; i < places->n; i++)
        whole = whole && is_whole(contents, &places->list[i]);
    text_add(&text, "{\"__metadata__\":{\"format\":\"pt\"");
    rsd_status status = whole ? RSD_OK : add_sharding(&text, contents, places);
    text_add(&text, "}");
    for (size_t i = 0; i < places->n && !status; i++) {
        const struct place *place = &places->list[i];
        uint64_t nbytes = box_nbytes(contents, place->tensor, place->box);
        status = add_tensor(&text, contents, place, at, nbytes);
        contents->extents[place->extent].offset = at;
        contents->extents[place->extent].nbytes = nbytes;
        at += nbytes;
    }
    text_add(&text, "}");
    while (text.length % ALIGNMENT && !text.failed)
        text_add(&text, " ");
    emit_number(&file->header, text.length, 8);
    bytes_put(&file->header, text.chars, text.length);
    if (!status && (text.failed || file->header.failed))
        status = fail(RSD_ENOMEM, "no memory for a header");
    text_drop(&text);
    for (size_t i = 0; i < places->n; i++)
        contents->extents[places->list[i].extent].offset += file->header.n;
    file->nbytes = file->header.n + at;
    file->nitems = places->n;
    return status;
}

/* ---- all of them ---- */

rsd_status safetensors_place(struct draft *draft)
{
    const struct contents *contents = &draft->contents;
    struct file_places *places = mem_new(draft->nfiles, sizeof *places);
    rsd_status status = places ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < contents->ntensors && !status; t++) {
        const struct tensor *tensor = &contents->tensors[t];
        for (size_t box = 0; box < tensor->nboxes && !status; box++) {
            size_t extent = tensor->first_extent + box;
            struct file_places *own = &places[contents->extents[extent].file];
            status = GROW(own->list, own->room, own->n + 1);
            if (!status)
                own->list[own->n++] = (struct place){tensor, extent, box};
        }
    }
    for (size_t i = 0; i < draft->nfiles && !status; i++)
        status = write_header(draft, &draft->files[i], &places[i]);
    for (size_t i = 0; places && i < draft->nfiles; i++)
        mem_free(places[i].list);
    mem_free(places);
    return status;
}

rsd_status safetensors_index(const struct draft *draft, struct text *out)
{
    const struct contents *contents = &draft->contents;
    uint64_t total = 0;
    bool first = true;
    for (size_t t = 0; t < contents->ntensors; t++)
        for (size_t box = 0; box < contents->tensors[t].nboxes; box++)
            total += box_nbytes(contents, &contents->tensors[t], box);
    text_add(out, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
             (unsigned long long)total);
    for (size_t t = 0; t < contents->ntensors; t++) {
        const struct tensor *tensor = &contents->tensors[t];
        if (tensor->nboxes == 0)
            continue;
        text_add(out, "%s\n    ", first ? "" : ",");
        add_name(out, tensor->name);
        text_add(out, ": ");
        add_name(out, draft->files[contents->extents[tensor->first_extent].file].name);
        first = false;
    }
    text_add(out, "\n  }\n}\n");
    return out->failed ? fail(RSD_ENOMEM, "no memory for an index") : RSD_OK;
}
