/* orbax_read.c - opens Orbax checkpoints, the arrays of JAX.
 *
 *     ITEM/_METADATA, manifest.ocdbt, d/...     a tree of arrays, in an OCDBT database
 *     ITEM/_METADATA, NAME/.zarray, NAME/0.0    the same in files
 *     STEP/ITEM/...                             the items of a step, one for each thing that was saved
 *     ROOT/STEP/ITEM/...                        the steps of a CheckpointManager
 *
 * The path may name any of them. Of several steps the last one is read. If a step has several trees, the
 * names of tensors and values begin with the name of the item. An item in JSON is a value.
 */
#include "orbax.h"

#include <stdlib.h>

enum { MAX_JSON_NBYTES = 1 << 24 };

static const char unfinished[] = ".orbax-checkpoint-tmp";

/* What a directory has in it. */
struct directory_signs {
    bool tree, manifest, processes, strings, json, step, msgpack;
};

/* Returns which files of Orbax a directory has. */
static struct directory_signs find_signs(const struct store_listing *listing)
{
    struct directory_signs signs = {0};
    for (size_t i = 0; i < listing->n; i++) {
        const char *base = listing->entries[i].base;
        if (listing->entries[i].directory)
            signs.processes = signs.processes || strncmp(base, "ocdbt.process_", 14) == 0;
        else if (strcmp(base, "_METADATA") == 0)
            signs.tree = true;
        else if (strcmp(base, "manifest.ocdbt") == 0)
            signs.manifest = true;
        else if (strcmp(base, "_strings.json") == 0)
            signs.strings = true;
        else if (strcmp(base, "metadata") == 0)
            signs.json = true;
        else if (strcmp(base, "_CHECKPOINT_METADATA") == 0)
            signs.step = true;
        else if (strcmp(base, "checkpoint") == 0)
            signs.msgpack = true;
    }
    return signs;
}

/* ---- an item ---- */

static rsd_status check_item_signs(const struct directory_signs *signs)
{
    if (signs->processes && !signs->manifest)
        return fail(RSD_EFORMAT, "checkpoint is not finished: the databases of the processes were "
                                 "not merged into manifest.ocdbt");
    if (signs->msgpack && !signs->tree)
        return fail(RSD_EUNSUPPORTED,
                    "file 'checkpoint' is msgpack, from an Orbax before _METADATA; "
                    "restore and save it with a newer Orbax");
    return RSD_OK;
}

/* Adds the tensors and values of an item, of any layout. */
static rsd_status add_item_files(struct orbax_item *item, const struct directory_signs *signs)
{
    struct key_list *keys = &item->keys;
    uint32_t tree, strings = UINT32_MAX;
    if (signs->tree) {
        TRY(format_add_file(keys->store, keys->directory, slice_of("_METADATA"), &tree));
        TRY(orbax_tree_read(item, tree));
    }
    if (signs->strings)
        TRY(format_add_file(keys->store, keys->directory, slice_of("_strings.json"), &strings));
    TRY(signs->manifest ? ocdbt_read_keys(keys, item->catalog) : key_list_add_directory(keys));
    TRY(orbax_add_arrays(item));
    return orbax_add_tree_values(item, strings);
}

/* Reads the tree of arrays in a directory. name: what its names begin with, or "". */
static rsd_status read_item(struct store *store, struct catalog *catalog, const char *directory,
                            const char *name)
{
    struct store_listing listing;
    struct orbax_tree tree = {0};
    struct orbax_item item = {.catalog = catalog, .name = name, .tree = &tree};
    rsd_status status = store_list(store, directory, &listing);
    struct directory_signs signs = find_signs(&listing);
    store_listing_drop(&listing);
    if (!status)
        status = check_item_signs(&signs);
    if (status)
        return fail_in(status, "%s%s%s: ", store->path, *directory ? "/" : "", directory);
    key_list_start(&item.keys, store, directory);
    status = add_item_files(&item, &signs);
    key_list_drop(&item.keys);
    orbax_tree_drop(&tree);
    return status;
}

/* ---- steps ---- */

/* Returns the last part of the path of a store. */
static const char *last_name(const struct store *store)
{
    const char *slash = strrchr(store->path, '/');
    return slash && slash[1] ? slash + 1 : store->path;
}

static bool ends_in_digit(const char *name)
{
    size_t n = strlen(name);
    while (n > 0 && name[n - 1] == '/')
        n--;
    return n > 0 && name[n - 1] >= '0' && name[n - 1] <= '9';
}

enum directory_kind { DIRECTORY_OTHER, DIRECTORY_ITEM, DIRECTORY_STEP };

static bool may_descend(const struct store_entry *entry)
{
    return entry->directory && entry->base[0] != '.' && !strstr(entry->base, unfinished);
}

static struct directory_signs look_into(struct store *store, const char *directory)
{
    struct store_listing listing;
    struct directory_signs signs = {0};
    if (store_list(store, directory, &listing))
        return signs;
    signs = find_signs(&listing);
    store_listing_drop(&listing);
    return signs;
}

static bool is_item(const struct directory_signs *signs)
{
    return signs->tree || signs->manifest;
}

/* Says what a directory is. name: its own, which is a number in a directory of steps. */
static enum directory_kind find_kind(struct store *store, const char *name,
                                     const struct store_listing *listing)
{
    struct directory_signs signs = find_signs(listing);
    if (is_item(&signs))
        return DIRECTORY_ITEM;
    for (size_t i = 0; i < listing->n && (signs.step || ends_in_digit(name)); i++) {
        if (!may_descend(&listing->entries[i]))
            continue;
        struct directory_signs below = look_into(store, listing->entries[i].name);
        if (is_item(&below))
            return DIRECTORY_STEP;
    }
    return DIRECTORY_OTHER;
}

/* Finds the last step below a directory: its kind, and its place in the listing. Numbers in names are
 * sorted as numbers. */
static enum directory_kind find_last_step(struct store *store, const struct store_listing *listing,
                                          size_t *index)
{
    for (size_t i = listing->n; i-- > 0;) {
        const struct store_entry *entry = &listing->entries[i];
        struct store_listing below;
        if (!may_descend(entry) || !ends_in_digit(entry->base) ||
            store_list(store, entry->name, &below))
            continue;
        enum directory_kind kind = find_kind(store, entry->base, &below);
        store_listing_drop(&below);
        *index = i;
        if (kind != DIRECTORY_OTHER)
            return kind;
    }
    return DIRECTORY_OTHER;
}

/* Adds an item that is not a tree of arrays: JSON, or something that only its own program can read. */
static rsd_status add_other_item(struct store *store, struct catalog *catalog,
                                 const struct store_entry *entry, bool is_json)
{
    struct orbax_item item = {.catalog = catalog, .name = ""};
    struct slice name = slice_of(entry->base);
    struct json j;
    uint32_t file;
    char *text = NULL;
    size_t n = 0;
    if (!is_json)
        return orbax_add_value(&item, name, NULL, NULL);
    TRY(format_add_file(store, entry->name, slice_of("metadata"), &file));
    rsd_status status = store_load(store, file, MAX_JSON_NBYTES, &text, &n);
    if (!status) {
        json_start(&j, text, n);
        status = json_skip(&j);
        status = status ? status : json_end(&j);
        json_drop(&j);
    }
    if (!status) {
        status = orbax_add_value(&item, name, NULL, text);
        text = NULL;
    }
    mem_free(text);
    return status ? store_fail_in(store, file, status) : RSD_OK;
}

/* Reads all items of a step. If several are trees, their names begin the names of tensors. */
static rsd_status read_step(struct store *store, struct catalog *catalog,
                            const struct store_listing *listing)
{
    size_t ntrees = 0;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < listing->n; i++) {
            const struct store_entry *entry = &listing->entries[i];
            if (!may_descend(entry))
                continue;
            struct directory_signs signs = look_into(store, entry->name);
            bool tree = is_item(&signs) || signs.processes;
            if (pass == 0)
                ntrees += tree;
            else if (tree)
                TRY(read_item(store, catalog, entry->name, ntrees > 1 ? entry->base : ""));
            else
                TRY(add_other_item(store, catalog, entry, signs.json));
        }
    return RSD_OK;
}

/* Reads an item, a step, or the last step of a directory of steps. */
static rsd_status read_orbax_directory(struct store *store, struct catalog *catalog,
                                       const struct store_listing *listing)
{
    struct store_listing below;
    size_t last;
    enum directory_kind kind = find_kind(store, last_name(store), listing);
    if (kind == DIRECTORY_STEP)
        return read_step(store, catalog, listing);
    if (kind == DIRECTORY_OTHER && !find_signs(listing).processes)
        kind = find_last_step(store, listing, &last);
    else
        return read_item(store, catalog, "", "");
    if (kind == DIRECTORY_OTHER)
        return fail(RSD_EFORMAT, "%s has neither _METADATA nor manifest.ocdbt", store->path);
    if (kind == DIRECTORY_ITEM)
        return read_item(store, catalog, listing->entries[last].name, "");
    TRY(store_list(store, listing->entries[last].name, &below));
    rsd_status status = read_step(store, catalog, &below);
    store_listing_drop(&below);
    return status;
}

/* ---- the row ---- */

static int orbax_probe(const struct store_listing *listing, const struct store_entry *entry,
                       struct slice start)
{
    (void)listing, (void)start;
    if (entry->directory)
        return strncmp(entry->base, "ocdbt.process_", 14) == 0 ? SURE_OF_PROCESS : NOT_SURE;
    bool known =
        strcmp(entry->base, "_METADATA") == 0 || strcmp(entry->base, "manifest.ocdbt") == 0;
    return known ? SURE_OF_ORBAX : NOT_SURE;
}

static bool orbax_probe_below(struct store *store, const struct store_listing *listing)
{
    size_t last;
    if (strstr(store->path, unfinished) && find_signs(listing).step)
        return true; /* so that the error says so */
    return find_kind(store, last_name(store), listing) != DIRECTORY_OTHER ||
           find_last_step(store, listing, &last) != DIRECTORY_OTHER;
}

static rsd_status orbax_open(struct store *store, struct catalog *catalog,
                             const rsd_open_options *options)
{
    (void)options;
    struct store_listing listing;
    if (strstr(store->path, unfinished))
        return fail(RSD_EFORMAT, "%s is not finished, as its name says", store->path);
    rsd_status status = store_list(store, "", &listing);
    if (status)
        return fail_in(status, "%s: ", store->path);
    status = read_orbax_directory(store, catalog, &listing);
    store_listing_drop(&listing);
    return status;
}

const struct format format_orbax = {.id = RSD_FORMAT_ORBAX,
                                    .name = "orbax",
                                    .probe = orbax_probe,
                                    .probe_below = orbax_probe_below,
                                    .open = orbax_open,
                                    .locate = orbax_locate,
                                    .open_stream = orbax_open_stream};
