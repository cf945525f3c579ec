/* megatron_stacks.c - changes the tensors of Megatron's torch_dist checkpoints, which are DCP, where asked.
 *
 *     decoder.layers.mlp.linear_fc2.weight [4, 16, 16]        ->  decoder.layers.0.mlp.linear_fc2.weight [16, 16]
 *                                                                 ... 1, 2, 3
 *     optimizer.state.exp_avg.decoder.layers.mlp.(...)        ->  optimizer.state.decoder.layers.0.mlp.(...).exp_avg
 *     embedding.word_embeddings.weight [32, 16], padded       ->  [29, 16]
 *
 * Boxes keep their items. The catalog says that an item has one more dim, or more rows, than its box.
 */
#include "rows.h"

#include "json.h"

#include <stdio.h>
#include <string.h>

enum { MAX_NAME_NBYTES = 4096, MAX_JSON_NBYTES = 1 << 20 };

/* ---- which DCP is Megatron's ---- */

/* Reads "sharded_backend" of metadata.json. */
static rsd_status read_backend(const char *text, size_t n, bool *megatron)
{
    struct json json;
    struct slice key, value;
    bool more;
    json_start(&json, text, n);
    rsd_status status = json_enter(&json, '{');
    while (!status && !(status = json_next_key(&json, &key, &more)) && more) {
        bool backend = slice_is(key, "sharded_backend") && json_peek(&json) == '"';
        status = backend ? json_string(&json, &value) : json_skip(&json);
        if (!status && backend)
            *megatron = slice_is(value, "torch_dist");
    }
    json_drop(&json);
    return status;
}

static rsd_status load_backend(struct store *store, const char *name, bool *megatron)
{
    uint32_t file;
    char *text;
    size_t n;
    TRY(store_add_file(store, (struct slice){name, strlen(name)}, &file));
    rsd_status status = store_load(store, file, MAX_JSON_NBYTES, &text, &n);
    if (!status) {
        status = read_backend(text, n, megatron);
        mem_free(text);
    }
    return status ? store_fail_in(store, file, status) : RSD_OK;
}

/* Says whether a metadata.json of Megatron is beside the metadata. */
static rsd_status find_backend(struct store *store, uint32_t metadata, bool *megatron)
{
    char directory[MAX_NAME_NBYTES];
    const char *name = store_file_name(store, metadata), *slash = strrchr(name, '/');
    struct store_listing listing;
    snprintf(directory, sizeof directory, "%.*s", slash ? (int)(slash - name) : 0, name);
    TRY(store_list(store, directory, &listing));
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < listing.n && !status; i++)
        if (!listing.entries[i].directory && strcmp(listing.entries[i].base, "metadata.json") == 0)
            status = load_backend(store, listing.entries[i].name, megatron);
    store_listing_drop(&listing);
    return status;
}

/* ---- the vocabulary ---- */

static bool has_vocabulary(const char *name)
{
    static const char *const ends[] = {"word_embeddings.weight", "output_layer.weight",
                                       "output_layer.bias", "word_embeddings_for_head.weight"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (strcmp(name, ends[i]) == 0 ||
            (has_suffix(name, ends[i]) && name[strlen(name) - strlen(ends[i]) - 1] == '.'))
            return true;
    return false;
}

/* Returns how many rows a tensor keeps. */
static rsd_status count_rows(const struct catalog *catalog, const struct stored_tensor *tensor,
                             int64_t vocab_size, int64_t *rows)
{
    *rows = tensor->ndim > 0 ? tensor_shape(catalog, tensor)[0] : 1;
    if (vocab_size == 0 || tensor->ndim == 0 || !has_vocabulary(tensor->name))
        return RSD_OK;
    if (*rows < vocab_size)
        return fail(RSD_EINVAL, "vocab_size is %lld; %.300s has %lld rows", (long long)vocab_size,
                    tensor->name, (long long)*rows);
    *rows = vocab_size;
    return RSD_OK;
}

/* ---- stacked layers ---- */

/* Returns where the number of a layer belongs in a name: behind "layers.", if none is there; 0: nowhere. */
static size_t find_layer_place(const char *name)
{
    for (const char *at = strstr(name, "layers."); at; at = strstr(at + 1, "layers.")) {
        const char *behind = at + strlen("layers.");
        if ((at == name || at[-1] == '.') && (*behind < '0' || *behind > '9'))
            return (size_t)(behind - name);
    }
    return 0;
}

/* A tensor is stacked if its name says so, and each box has one layer. */
static bool is_stacked(const struct catalog *catalog, const struct stored_tensor *tensor)
{
    bool stacked = tensor->ndim > 0 && tensor->nboxes > 0 && find_layer_place(tensor->name) > 0;
    for (size_t i = 0; i < tensor->nboxes && stacked; i++)
        stacked = tensor_box_len(catalog, tensor, i)[0] == 1;
    return stacked;
}

/* Moves the key of optimizer state behind the name of its parameter: optimizer.state.KEY.NAME has the length
 * of optimizer.state.NAME.KEY. */
static void reorder_state_name(char *name, const struct string_map *params)
{
    char key[128];
    size_t number;
    char *start = strstr(name, "optimizer.state.");
    if (!start || (start > name && start[-1] != '.'))
        return;
    start += strlen("optimizer.state.");
    char *dot = strchr(start, '.');
    if (!dot || (size_t)(dot - start) >= sizeof key ||
        !string_map_find(params, (struct slice){dot + 1, strlen(dot + 1)}, &number))
        return;
    size_t nkey = (size_t)(dot - start), nparam = strlen(dot + 1);
    memcpy(key, start, nkey);
    memmove(start, dot + 1, nparam);
    start[nparam] = '.';
    memcpy(start + nparam + 1, key, nkey);
}

/* Writes the name of a layer; layer -1: of a tensor that is not stacked. */
static rsd_status make_layer_name(const char *stacked, int64_t layer,
                                  const struct string_map *params, char name[MAX_NAME_NBYTES])
{
    char plain[MAX_NAME_NBYTES];
    size_t n = strlen(stacked);
    if (n + 24 >= sizeof plain)
        return fail(RSD_ELIMIT, "%.300s: name exceeds %zu bytes", stacked, sizeof plain - 25);
    memcpy(plain, stacked, n + 1);
    reorder_state_name(plain, params);
    size_t at = find_layer_place(plain);
    if (layer >= 0)
        snprintf(name, MAX_NAME_NBYTES, "%.*s%lld.%s", (int)at, plain, (long long)layer,
                 plain + at);
    else
        memcpy(name, plain, n + 1);
    return RSD_OK;
}

/* A catalog that is made anew from the tensors of an older one. Both have the same arrays and values. */
struct new_catalog {
    struct catalog *catalog;
    const struct catalog *old;
    struct string_map params; /* names of the older one */
    int64_t vocab_size;
    bool unstack;
};

/* Adds a box, with no more than `rows` rows. Drops its first dim if it is of a layer. */
static rsd_status add_layer_box(struct new_catalog *new, const struct stored_tensor *tensor,
                                size_t index, int32_t first, int64_t rows)
{
    int64_t box[2 * RSD_MAX_DIMS], *lo = box + first, *len = box + tensor->ndim + first;
    struct extent extent = new->old->extents[tensor->first_extent + index];
    copy_i64s(box, tensor_box_lo(new->old, tensor, index), 2 * tensor->ndim);
    if (tensor->ndim > first && !first && lo[0] + len[0] > rows) {
        if (lo[0] >= rows)
            return RSD_OK;
        len[0] = rows - lo[0];
        if (extent.kind == EXTENT_ARRAY && len[0] == 1)
            new->catalog->arrays[extent.detail].strides[0] = 0;
    }
    return catalog_add_box(new->catalog, lo, len, extent);
}

/* Adds a tensor with the boxes of one layer; layer -1: all boxes of a tensor that is not stacked. */
static rsd_status add_layer(struct new_catalog *new, const struct stored_tensor *tensor,
                            int64_t layer)
{
    char name[MAX_NAME_NBYTES];
    const char *text = tensor->name;
    int64_t shape[RSD_MAX_DIMS], rows;
    int32_t first = layer >= 0 ? 1 : 0;
    TRY(count_rows(new->old, tensor, new->vocab_size, &rows));
    copy_i64s(shape, tensor_shape(new->old, tensor), tensor->ndim);
    bool cut = tensor->ndim > 0 && rows < shape[0];
    if (cut)
        shape[0] = rows;
    if (new->unstack) {
        TRY(make_layer_name(tensor->name, layer, &new->params, name));
        text = name;
    }
    TRY(catalog_add_tensor(new->catalog, (struct slice){text, strlen(text)}, tensor->dtype,
                           tensor->ndim - first, shape + first));
    struct stored_tensor *added = &new->catalog->tensors[new->catalog->ntensors - 1];
    added->unstacked = layer >= 0;
    added->rows_cut = cut || tensor->rows_cut;
    added->path = new->unstack ? NULL : tensor->path;
    for (size_t i = 0; i < tensor->nboxes; i++)
        if (layer < 0 || tensor_box_lo(new->old, tensor, i)[0] == layer)
            TRY(add_layer_box(new, tensor, i, first, rows));
    return RSD_OK;
}

static rsd_status add_layers(struct new_catalog *new, const struct stored_tensor *tensor)
{
    if (!new->unstack || !is_stacked(new->old, tensor))
        return add_layer(new, tensor, -1);
    int64_t nlayers = tensor_shape(new->old, tensor)[0];
    if (nlayers > (int64_t)tensor->nboxes)
        return fail(RSD_EFORMAT, "%.300s: %lld layers are in %zu boxes", tensor->name,
                    (long long)nlayers, tensor->nboxes);
    for (int64_t i = 0; i < nlayers; i++) {
        if (!budget_take(tensor->nboxes))
            return budget_fail();
        TRY(add_layer(new, tensor, i));
    }
    return RSD_OK;
}

/* Makes the tensors of a catalog anew. */
static rsd_status change_tensors(struct catalog *catalog, int64_t vocab_size, bool unstack)
{
    struct catalog old = *catalog;
    struct new_catalog new = {
        .catalog = catalog, .old = &old, .vocab_size = vocab_size, .unstack = unstack};
    rsd_status status = RSD_OK;
    catalog->tensors = NULL;
    catalog->coordinates = NULL;
    catalog->extents = NULL;
    catalog->ntensors = catalog->tensors_capacity = catalog->ncoordinates = 0;
    catalog->coordinates_capacity = catalog->nextents = catalog->extents_capacity = 0;
    for (size_t i = 0; i < old.ntensors && !status; i++) {
        const char *name = old.tensors[i].name;
        status = string_map_add(&new.params, (struct slice){name, strlen(name)}, i);
    }
    for (size_t i = 0; i < old.ntensors && !status; i++)
        status = add_layers(&new, &old.tensors[i]);
    mem_free(old.tensors);
    mem_free(old.coordinates);
    mem_free(old.extents);
    string_map_drop(&new.params);
    return status;
}

rsd_status megatron_cut_vocabulary(struct catalog *catalog, const rsd_open_options *options)
{
    if (options->vocab_size < 0)
        return fail(RSD_EINVAL, "vocab_size is %lld; expected at least 1",
                    (long long)options->vocab_size);
    return options->vocab_size > 0 ? change_tensors(catalog, options->vocab_size, false) : RSD_OK;
}

/* ---- both ---- */

rsd_status megatron_finish_stacks(struct store *store, uint32_t metadata, struct catalog *catalog,
                                  const rsd_open_options *options)
{
    bool megatron = false, buckets = false;
    for (size_t i = 0; i < catalog->ntensors && !buckets; i++)
        buckets = strstr(catalog->tensors[i].name, "optimizer.distributed.dp_group_idx_") != NULL;
    if (buckets)
        TRY(catalog_add_note(catalog, "optimizer.distributed.dp_group_idx_*: buckets of Megatron's "
                                      "distributed optimizer do not name their parameters; they "
                                      "are kept as they are"));
    if (!options->unstack && !options->vocab_size)
        return RSD_OK;
    TRY(find_backend(store, metadata, &megatron));
    if (!megatron)
        return RSD_OK;
    TRY(megatron_cut_vocabulary(catalog, options));
    return options->unstack ? change_tensors(catalog, 0, true) : RSD_OK;
}
