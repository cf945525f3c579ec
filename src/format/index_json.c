/* index.c - the index of a checkpoint in several files, as Hugging Face writes it: which file has which tensor.
 *
 *     {"metadata": {"total_size": 28}, "weight_map": {"a": "model-00001-of-00002.safetensors", ...}}
 *
 * Only the names of the files are taken, each once; what is in them, they say themselves.
 */
#include "format.h"

enum { MOST_INDEX = 1 << 30 };

static rsd_status take_weight_map(struct json *j, struct string_map *seen, struct name_list *out)
{
    struct slice key, file;
    bool more;
    size_t number;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        TRY(json_string(j, &file));
        rsd_status status = store_check_name(file);
        if (status)
            return fail_in(status, "byte %zu: ", j->at);
        if (string_map_find(seen, file, &number))
            continue;
        TRY(name_list_add(out, file));
        TRY(string_map_add(seen, out->list[out->n - 1], out->n));
    }
}

rsd_status index_read_files(struct store *store, uint32_t index, struct name_list *out)
{
    char *text;
    size_t n;
    struct json j;
    struct slice key;
    bool more, mapped = false;
    struct string_map seen = {0};
    rsd_status status = store_load(store, index, MOST_INDEX, &text, &n);
    if (status)
        return store_fail_in(store, index, status);
    json_start(&j, text, n);
    status = json_enter(&j, '{');
    while (!status && !(status = json_next_key(&j, &key, &more)) && more) {
        bool map = slice_is(key, "weight_map");
        status = map ? take_weight_map(&j, &seen, out) : json_skip(&j);
        mapped = mapped || map;
    }
    if (!status)
        status = json_end(&j);
    if (!status && !mapped)
        status = fail(RSD_EFORMAT, "an index without a weight_map");
    json_drop(&j);
    mem_free(text);
    string_map_drop(&seen);
    return status ? store_fail_in(store, index, status) : RSD_OK;
}
