/* megatron_values.c - the values of Megatron's checkpoints: the arguments of the run, the iteration, schedules.
 *
 * The format torch has them in the file of the first rank, beside the model. The format torch_dist, which is
 * DCP, has them in common.pt, and says in metadata.json that Megatron wrote it.
 */
#include "megatron.h"

#include "json.h"

#include <stdio.h>
#include <string.h>

enum { MAX_JSON_NBYTES = 1 << 20 };

/* Says whether a key of a file is the model, or differs between ranks. */
static bool skips_key(const char *key, bool ranks, bool *random, bool *optimizer, pickle_node value)
{
    int64_t number;
    bool rng = strcmp(key, "rng_state") == 0;
    bool state = ranks && strcmp(key, "optimizer") == 0 && value != PICKLE_NONE;
    *random = *random || rng;
    *optimizer = *optimizer || state;
    return rng || state || strcmp(key, "model") == 0 || name_has_form(key, "model#", &number);
}

rsd_status megatron_add_values(struct torch_visit *visit, bool ranks, bool optimizer)
{
    const struct pickle_tree *tree = &visit->file->tree;
    struct pickle_walk walk = pickle_walk_dict(tree, visit->file->root);
    pickle_node key, value;
    bool random = false;
    visit->on_tensor = NULL;
    visit->on_value = NULL;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        char text[TORCH_MAX_NAME_NBYTES];
        struct slice name = pickle_text(tree, key);
        snprintf(text, sizeof text, "%.*s", slice_width(name, 100), name.bytes);
        if (pickle_kind(tree, key) != NODE_STRING ||
            skips_key(text, ranks, &random, &optimizer, value))
            continue;
        if (strcmp(text, "args") == 0 && pickle_kind(tree, value) == NODE_OBJECT)
            value = pickle_part(tree, value, NODE_STATE);
        if (strcmp(text, "optimizer") == 0 && pickle_is_dict(tree, value) &&
            pickle_is_dict(tree, pickle_find(tree, value, "optimizer")))
            value = pickle_find(tree, value, "optimizer");
        TRY(torch_visit_part(visit, name, value));
    }
    if (random)
        TRY(catalog_add_note(visit->catalog,
                             "the states of random numbers were not read: each rank has its own"));
    if (optimizer)
        TRY(catalog_add_note(visit->catalog,
                             "the optimizer state was not read: Megatron's format torch numbers "
                             "parameters and does not name them"));
    return RSD_OK;
}

/* ---- torch_dist ---- */

/* Finds out by "sharded_backend" of metadata.json whether Megatron wrote the checkpoint. */
static rsd_status take_backend(struct json *j, void *context)
{
    struct catalog *catalog = context;
    struct slice key, value;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        if (!slice_is(key, "sharded_backend") || json_peek(j) != '"') {
            TRY(json_skip(j));
            continue;
        }
        TRY(json_string(j, &value));
        catalog->megatron = slice_is(value, "torch_dist");
    }
}

static rsd_status load_backend(struct store *store, const char *name, struct catalog *catalog)
{
    uint32_t file;
    TRY(store_add_file(store, slice_of(name), &file));
    return format_parse_json(store, file, MAX_JSON_NBYTES, take_backend, catalog);
}

static rsd_status add_common_values(struct torch_visit *visit)
{
    if (!pickle_is_dict(&visit->file->tree, visit->file->root))
        return fail(RSD_EFORMAT, "file is not a dict");
    return megatron_add_values(visit, false, false);
}

/* Adds the values of common.pt. */
static rsd_status load_common(struct store *store, const char *name, struct catalog *catalog)
{
    struct torch_visit visit = {.catalog = catalog};
    size_t first = catalog->nvalues;
    uint32_t index;
    TRY(store_add_file(store, slice_of(name), &index));
    TRY(torch_visit_file(&visit, store, index, add_common_values));
    for (size_t i = first; i < catalog->nvalues; i++)
        catalog->values[i].beside = true;
    return RSD_OK;
}

static const char *find_beside(const struct store_listing *listing, const char *base)
{
    for (size_t i = 0; i < listing->n; i++)
        if (!listing->entries[i].directory && strcmp(listing->entries[i].base, base) == 0)
            return listing->entries[i].name;
    return NULL;
}

rsd_status megatron_read_common(struct store *store, const char *directory, struct catalog *catalog)
{
    struct store_listing listing;
    for (size_t i = 0; i < catalog->ntensors; i++)
        if (strstr(catalog->tensors[i].name, "optimizer.distributed.dp_group_idx_")) {
            TRY(catalog_add_note(catalog,
                                 "optimizer.distributed.dp_group_idx_*: buckets of Megatron's "
                                 "distributed optimizer do not name their parameters; they are "
                                 "kept as they are"));
            break;
        }
    TRY(store_list(store, directory, &listing));
    const char *json = find_beside(&listing, "metadata.json"),
               *common = find_beside(&listing, "common.pt");
    rsd_status status = json ? load_backend(store, json, catalog) : RSD_OK;
    if (!status && catalog->megatron && common)
        status = load_common(store, common, catalog);
    store_listing_drop(&listing);
    return status;
}
