/* index_json.c - files of JSON, and the index of a checkpoint in several files, as Hugging Face writes it.
 *
 *     {"metadata": {"total_size": 28}, "weight_map": {"a": "model-00001-of-00002.safetensors", ...}}
 *
 * Only the names of the files are used, each once. Each file says itself which tensors it has.
 */
#include "rows.h"

#include "json.h"

#include <string.h>

enum { MAX_INDEX_NBYTES = 1 << 30 };

rsd_status format_parse_json(struct store *store, uint32_t file, uint64_t limit,
                             rsd_status (*parse)(struct json *j, void *context), void *context)
{
    struct json j;
    char *text;
    size_t n;
    rsd_status status = store_load(store, file, limit, &text, &n);
    if (!status) {
        json_start(&j, text, n);
        status = parse(&j, context);
        if (!status)
            status = json_end(&j);
        json_drop(&j);
        mem_free(text);
    }
    return status ? store_fail_in(store, file, status) : RSD_OK;
}

/* ---- reading ---- */

/* Adds the files that a weight_map names. */
static rsd_status add_weight_map_files(struct json *j, struct store *store)
{
    struct slice key, name;
    bool more;
    uint32_t file;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        TRY(json_string(j, &name));
        rsd_status status = store_add_file(store, name, &file);
        if (status)
            return fail_in(status, "byte %zu: ", j->at);
    }
}

/* Reads an index. The context is the store. */
static rsd_status take_index_file(struct json *j, void *context)
{
    struct slice key;
    bool more, mapped = false;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return mapped ? RSD_OK : fail(RSD_EFORMAT, "index has no weight_map");
        bool map = slice_is(key, "weight_map");
        TRY(map ? add_weight_map_files(j, context) : json_skip(j));
        mapped = mapped || map;
    }
}

rsd_status index_add_files(struct store *store, uint32_t index)
{
    return format_parse_json(store, index, MAX_INDEX_NBYTES, take_index_file, store);
}

/* ---- writing ---- */

/* Makes the text of an index: the file of each tensor, and the bytes of all. */
static rsd_status make_index(const struct manifest *manifest, struct text *out)
{
    const struct catalog *catalog = &manifest->catalog;
    uint64_t total = 0;
    bool first = true;
    for (size_t t = 0; t < catalog->ntensors; t++)
        for (size_t box = 0; box < catalog->tensors[t].nboxes; box++)
            total += box_nbytes(catalog, &catalog->tensors[t], box);
    text_add(out, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
             (unsigned long long)total);
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        if (tensor->nboxes == 0)
            continue;
        text_add(out, "%s\n    ", first ? "" : ",");
        json_add_string(out, tensor->name, strlen(tensor->name));
        text_add(out, ": ");
        const char *file = manifest->files[catalog->extents[tensor->first_extent].file].name;
        json_add_string(out, file, strlen(file));
        first = false;
    }
    text_add(out, "\n  }\n}\n");
    return out->failed ? fail(RSD_ENOMEM, "no memory for an index") : RSD_OK;
}

rsd_status index_write(const struct manifest *manifest, struct store *store, const char *name)
{
    struct text text = {0};
    rsd_status status = make_index(manifest, &text);
    if (!status)
        status = store_put(store, name, text.chars, text.length);
    text_drop(&text);
    return status;
}
