/* megatron_stacks.c - derives the tensors that the options ask for from those of Megatron's checkpoints.
 *
 *     decoder.layers.mlp.linear_fc2.weight [4, 16, 16]        ->  decoder.layers.0.mlp.linear_fc2.weight [16, 16]
 *                                                                 ... 1, 2, 3
 *     optimizer.state.exp_avg.decoder.layers.mlp.(...)        ->  optimizer.state.decoder.layers.0.mlp.(...).exp_avg
 *     embedding.word_embeddings.weight [32, 16], padded       ->  [29, 16]
 */
#include "rows.h"

#include <stdio.h>
#include <string.h>

enum { MAX_NAME_NBYTES = 4096 };

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
        !string_map_find(params, slice_of(dot + 1), &number))
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

/* What tensors are derived. */
struct stack_change {
    rsd_checkpoint *checkpoint;
    const struct catalog *stored;
    struct string_map params; /* names of stored tensors */
    int64_t vocab_size;
    bool unstack;
};

/* Derives a tensor of one layer; layer -1: of a tensor that is not stacked. */
static rsd_status derive_layer(struct stack_change *change, size_t index, int64_t layer)
{
    const struct catalog *stored = change->stored;
    const struct stored_tensor *tensor = &stored->tensors[index];
    struct catalog *catalog = &change->checkpoint->catalog;
    struct derived_region region = {.tensor = index, .front = layer >= 0 ? -1 : 0};
    char name[MAX_NAME_NBYTES];
    const char *text = tensor->name;
    int32_t first = layer >= 0 ? 1 : 0;
    int64_t rows;
    copy_i64s(region.len, tensor_shape(stored, tensor), tensor->ndim);
    if (layer >= 0) {
        region.lo[0] = layer;
        region.len[0] = 1;
    } else if (tensor->ndim > 0) {
        TRY(count_rows(stored, tensor, change->vocab_size, &rows));
        region.len[0] = rows;
    }
    if (change->unstack) {
        TRY(make_layer_name(tensor->name, layer, &change->params, name));
        text = name;
    }
    TRY(catalog_add_tensor(catalog, slice_of(text), tensor->dtype, tensor->ndim - first,
                           region.len + first));
    catalog->tensors[catalog->ntensors - 1].path = change->unstack ? NULL : tensor->path;
    return derive_add_region(change->checkpoint, &region);
}

/* Derives one tensor per layer from a stacked tensor, or the tensor itself from any other. */
static rsd_status derive_layers(struct stack_change *change, size_t index)
{
    const struct stored_tensor *tensor = &change->stored->tensors[index];
    if (!change->unstack || !is_stacked(change->stored, tensor))
        return derive_layer(change, index, -1);
    int64_t nlayers = tensor_shape(change->stored, tensor)[0];
    if (nlayers > (int64_t)tensor->nboxes)
        return fail(RSD_EFORMAT, "%.300s: %lld layers are in %zu boxes", tensor->name,
                    (long long)nlayers, tensor->nboxes);
    for (int64_t i = 0; i < nlayers; i++)
        TRY(derive_layer(change, index, i));
    return RSD_OK;
}

rsd_status megatron_change_tensors(rsd_checkpoint *checkpoint, const rsd_open_options *options)
{
    struct stack_change change = {.checkpoint = checkpoint,
                                  .vocab_size = options->vocab_size,
                                  .unstack = options->unstack || options->names};
    rsd_status status = RSD_OK;
    if (options->vocab_size < 0)
        return fail(RSD_EINVAL, "vocab_size is %lld; expected at least 1",
                    (long long)options->vocab_size);
    TRY(derive_start(checkpoint));
    change.stored = derive_stored(checkpoint);
    for (size_t i = 0; i < change.stored->ntensors && !status; i++) {
        const char *name = change.stored->tensors[i].name;
        status = string_map_add(&change.params, slice_of(name), i);
    }
    for (size_t i = 0; i < change.stored->ntensors && !status; i++)
        status = derive_layers(&change, i);
    string_map_drop(&change.params);
    return status ? status : catalog_finish(&checkpoint->catalog);
}
