/* torch_save_read.c - opens torch.save files: finds tensors in nested dicts and lists without running the
 * pickle.
 *
 * The name of a tensor is its keys, joined by dots. A list or tuple with a tensor or dict in it is visited
 * too; anything else is a value. Objects of unknown classes are opaque, and what is in them is not visited.
 * A node that is referred to several times is visited as often, so the visits are limited by the length of
 * the pickle.
 *
 * There are two containers. Since torch 1.6 a file is an archive with the pickle in data.pkl and each
 * storage in data/KEY. Before, it was five pickles (a magic number, a protocol, facts about the system, the
 * object, the keys of the storages) and then the storages, each behind its number of elements.
 */
#include "rows.h"
#include "torch_item.h"

#include <stdio.h>
#include <string.h>

enum { MAX_DEPTH = 64, MAX_NAME_NBYTES = 2000 };
enum {
    MAX_VISITS = 8,
    MAX_GROWTH = 64,
    START_NBYTES = 1 << 18
}; /* the first two: for each byte of the pickle */

struct torch_storage {
    uint64_t data, nbytes;
    uint32_t crc;
};

/* One part of a name, and whether it is an index of a list. */
struct name_step {
    size_t begin, end;
    bool number;
};

struct torch_reader {
    struct store *store;
    struct catalog *catalog;
    uint32_t file;
    uint64_t base; /* offset of the current pickle in the file */
    struct zip zip;
    bool archive, big_endian;
    struct pickle_tree tree;
    uint64_t nodes_left;    /* that may still be visited */
    uint64_t nbytes_left;   /* that may still be made of them */
    struct string_map keys; /* of storages, in files without an archive */
    struct torch_storage *storages;
    char name[MAX_NAME_NBYTES]; /* of the current node, with a zero behind it */
    size_t name_nbytes;
    struct name_step steps[MAX_DEPTH + 1];
    size_t nsteps;
};

static rsd_status read_pickle_bytes(void *context, uint64_t at, void *out, size_t n)
{
    struct torch_reader *reader = context;
    return store_read(reader->store, reader->file, reader->base + at, out, n);
}

static void set_limits(struct torch_reader *reader, uint64_t pickle_nbytes)
{
    reader->nodes_left = START_NBYTES + pickle_nbytes * MAX_VISITS;
    reader->nbytes_left = START_NBYTES + pickle_nbytes * MAX_GROWTH;
}

static rsd_status reserve_nbytes(struct torch_reader *reader, uint64_t nbytes)
{
    if (nbytes > reader->nbytes_left)
        return fail(RSD_EFORMAT, "values are more than 64 times as long as their pickle");
    reader->nbytes_left -= nbytes;
    return RSD_OK;
}

/* ---- tensors ---- */

static rsd_status find_storage(struct torch_reader *reader, struct slice key,
                               struct torch_storage *out)
{
    char name[300];
    struct zip_record *record;
    size_t number;
    if (!reader->archive) {
        if (!string_map_find(&reader->keys, key, &number))
            return fail(RSD_EFORMAT, "storage %.*s is missing", (int)key.nbytes, key.bytes);
        *out = reader->storages[number];
        return RSD_OK;
    }
    snprintf(name, sizeof name, "data/%.*s", (int)(key.nbytes < 200 ? key.nbytes : 200), key.bytes);
    TRY(zip_find(&reader->zip, name, &record));
    if (!record)
        return fail(RSD_EFORMAT, "record %s is missing", name);
    *out = (struct torch_storage){record->data, record->nbytes, record->crc};
    return RSD_OK;
}

/* Adds the path of the current node: its keys as JSON texts, its indices as numbers. */
static rsd_status add_torch_path(struct torch_reader *reader, const char **out)
{
    struct text text = {0};
    char *json;
    if (reader->nsteps == 0)
        return RSD_OK;
    text_add(&text, "[");
    for (size_t i = 0; i < reader->nsteps; i++) {
        const struct name_step *step = &reader->steps[i];
        size_t n = step->end - step->begin;
        text_add(&text, i ? ", " : "");
        if (step->number)
            text_add(&text, "%.*s", (int)n, reader->name + step->begin);
        else
            json_add_string(&text, reader->name + step->begin, n);
    }
    text_add(&text, "]");
    TRY(text_take(&text, &json));
    rsd_status status = reserve_nbytes(reader, strlen(json));
    if (!status)
        status = catalog_copy_text(reader->catalog, json, out);
    rsd_free(json);
    return status;
}

/* Returns the name of the current node, in which a key may have put a zero. */
static struct slice current_name(const struct torch_reader *reader)
{
    return (struct slice){reader->name, reader->name_nbytes};
}

static rsd_status add_torch_tensor(struct torch_reader *reader, pickle_node c)
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct catalog *catalog = reader->catalog;
    struct torch_view view;
    struct torch_storage storage;
    TRY(reserve_nbytes(reader, reader->name_nbytes + sizeof(struct stored_array) +
                                   sizeof(struct stored_tensor)));
    TRY(torch_view_read(&reader->tree, c, &view));
    TRY(find_storage(reader, view.key, &storage));
    TRY(torch_view_check(&view, storage.nbytes));
    struct stored_array array = {.offset = storage.data,
                                 .nbytes = storage.nbytes,
                                 .crc = storage.crc,
                                 .big_endian = reader->big_endian};
    array.has_crc =
        reader->archive && (storage.crc || !storage.nbytes); /* 0: torch did not compute it */
    torch_view_set_array(&view, &array);
    TRY(catalog_add_tensor(catalog, current_name(reader), view.dtype, view.ndim, view.shape));
    TRY(add_torch_path(reader, &catalog->tensors[catalog->ntensors - 1].path));
    return catalog_add_array(catalog, origin, view.shape, reader->file, &array);
}

/* ---- values ---- */

static rsd_status add_torch_value(struct torch_reader *reader, pickle_node c)
{
    struct catalog *catalog = reader->catalog;
    struct bytes pickle = {0};
    char *json = NULL;
    bool plain;
    rsd_status status = pickle_to_json(&reader->tree, c, &json);
    if (!status)
        status = pickle_to_plain_pickle(&reader->tree, c, &pickle, &plain);
    if (!status)
        status = reserve_nbytes(reader, reader->name_nbytes + sizeof(struct stored_value) +
                                            pickle.n + (json ? strlen(json) : 0));
    if (!status)
        status = catalog_add_value(catalog, current_name(reader),
                                   (struct extent){.kind = EXTENT_NONE}, json);
    if (status) {
        mem_free(json);
        bytes_drop(&pickle);
        return status;
    }
    if (plain)
        catalog->values[catalog->nvalues - 1].pickle = pickle;
    else
        bytes_drop(&pickle);
    return add_torch_path(reader, &catalog->values[catalog->nvalues - 1].path);
}

/* ---- nodes ---- */

/* Says whether a list or tuple has a tensor or dict in it, at any depth. */
static bool has_parts(struct torch_reader *reader, pickle_node c, int depth)
{
    const struct pickle_tree *tree = &reader->tree;
    bool tuple = pickle_kind(tree, c) == NODE_TUPLE;
    struct pickle_walk walk = pickle_walk(tree, c);
    pickle_node item;
    for (uint32_t i = 0; tuple ? i < pickle_count(tree, c) : pickle_walk_next(&walk, &item); i++) {
        pickle_node one = tuple ? pickle_item(tree, c, i) : item;
        enum pickle_kind kind = pickle_kind(tree, one);
        if (reader->nodes_left == 0 || depth > MAX_DEPTH)
            return false;
        reader->nodes_left--;
        if (torch_view_is_tensor(tree, one) || pickle_is_dict(tree, one) ||
            ((kind == NODE_LIST || kind == NODE_TUPLE) && has_parts(reader, one, depth + 1)))
            return true;
    }
    return false;
}

static rsd_status visit_node(struct torch_reader *reader, pickle_node c, size_t length, int depth);

static rsd_status visit_named_node(struct torch_reader *reader, struct slice name, bool number,
                                   pickle_node c, size_t length, int depth)
{
    size_t need = name.nbytes + (length ? 1 : 0);
    if (length + need >= sizeof reader->name)
        return fail(RSD_ELIMIT, "name exceeds %d bytes", (int)MAX_NAME_NBYTES);
    if (length)
        reader->name[length++] = '.';
    memcpy(reader->name + length, name.bytes, name.nbytes);
    reader->name[length + name.nbytes] = '\0';
    if (reader->nsteps == sizeof reader->steps / sizeof *reader->steps)
        return fail(RSD_EFORMAT, "%.300s: nesting exceeds %d levels", reader->name, (int)MAX_DEPTH);
    reader->steps[reader->nsteps++] = (struct name_step){length, length + name.nbytes, number};
    rsd_status status = visit_node(reader, c, length + name.nbytes, depth + 1);
    reader->nsteps--;
    return status;
}

static rsd_status visit_dict(struct torch_reader *reader, pickle_node dict, size_t length,
                             int depth)
{
    struct pickle_walk walk = pickle_walk(&reader->tree, dict);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        char digits[24];
        int64_t number;
        struct slice name = pickle_text(&reader->tree, key);
        if (pickle_as_i64(&reader->tree, key, &number)) {
            snprintf(digits, sizeof digits, "%lld", (long long)number);
            name = (struct slice){digits, strlen(digits)};
        } else if (pickle_kind(&reader->tree, key) != NODE_STRING) {
            continue; /* any other key names nothing */
        }
        TRY(visit_named_node(reader, name, false, value, length, depth));
    }
    return RSD_OK;
}

static rsd_status visit_list(struct torch_reader *reader, pickle_node list, size_t length,
                             int depth)
{
    bool tuple = pickle_kind(&reader->tree, list) == NODE_TUPLE;
    struct pickle_walk walk = pickle_walk(&reader->tree, list);
    pickle_node item;
    for (uint32_t i = 0;
         tuple ? i < pickle_count(&reader->tree, list) : pickle_walk_next(&walk, &item); i++) {
        char digits[24];
        snprintf(digits, sizeof digits, "%u", i);
        TRY(visit_named_node(reader, (struct slice){digits, strlen(digits)}, true,
                             tuple ? pickle_item(&reader->tree, list, i) : item, length, depth));
    }
    return RSD_OK;
}

static rsd_status visit_node(struct torch_reader *reader, pickle_node c, size_t length, int depth)
{
    enum pickle_kind kind = pickle_kind(&reader->tree, c);
    if (depth > MAX_DEPTH)
        return fail(RSD_EFORMAT, "%.300s: nesting exceeds %d levels", reader->name, (int)MAX_DEPTH);
    if (reader->nodes_left == 0)
        return fail(RSD_EFORMAT, "%.300s: too many values for the length of the pickle",
                    reader->name);
    reader->nodes_left--;
    if (pickle_is_dict(&reader->tree, c))
        return visit_dict(reader, pickle_dict_items(&reader->tree, c), length, depth);
    if ((kind == NODE_LIST || kind == NODE_TUPLE) && has_parts(reader, c, depth))
        return visit_list(reader, c, length, depth);
    reader->name_nbytes = length;
    if (length == 0) /* the file is one tensor or one value */
        reader->name_nbytes =
            (size_t)snprintf(reader->name, sizeof reader->name, "%s",
                             torch_view_is_tensor(&reader->tree, c) ? "tensor" : "value");
    rsd_status status = torch_view_is_tensor(&reader->tree, c) ? add_torch_tensor(reader, c)
                                                               : add_torch_value(reader, c);
    return status == RSD_OK ? RSD_OK : fail_in(status, "%.300s: ", reader->name);
}

/* ---- archives ---- */

static rsd_status load_archive(struct torch_reader *reader, uint64_t nbytes, pickle_node *root)
{
    struct zip_record *pickle, *script;
    TRY(zip_open(&reader->zip, read_pickle_bytes, reader, nbytes));
    reader->archive = true;
    TRY(zip_find(&reader->zip, "constants.pkl", &script));
    if (script)
        return fail(RSD_EUNSUPPORTED, "TorchScript archives are not supported");
    TRY(zip_find(&reader->zip, "data.pkl", &pickle));
    if (!pickle)
        return fail(RSD_EFORMAT, "record data.pkl is missing; not a torch.save archive");
    TRY(torch_read_byteorder(&reader->zip, &reader->big_endian));
    set_limits(reader, pickle->nbytes);
    return zip_read_pickle(&reader->zip, pickle, &reader->tree, root);
}

/* ---- files before torch 1.6 ---- */

static rsd_status skip_pickle(struct torch_reader *reader, uint64_t nbytes, bool magic)
{
    static const char number[] = "\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    TRY(pickle_read(read_pickle_bytes, reader, nbytes - reader->base, &tree, &root, &used));
    struct slice text = pickle_text(&tree, root);
    bool fine = !magic || (text.nbytes == 10 && memcmp(text.bytes, number, 10) == 0);
    pickle_tree_drop(&tree);
    reader->base += used;
    return fine ? RSD_OK : fail(RSD_EFORMAT, "pickle is not a torch.save file");
}

/* Finds the size of the elements of each storage, by key. Only the tensors that use a storage have it. */
static rsd_status find_element_sizes(struct torch_reader *reader, pickle_node c, int depth,
                                     struct string_map *sizes)
{
    const struct pickle_tree *tree = &reader->tree;
    struct torch_view view;
    size_t known;
    if (depth > MAX_DEPTH || reader->nodes_left == 0)
        return RSD_OK;
    reader->nodes_left--;
    if (torch_view_is_tensor(tree, c)) {
        TRY(torch_view_read(tree, c, &view));
        if (!string_map_find(sizes, view.key, &known))
            TRY(string_map_add(sizes, view.key, view.untyped ? 1 : rsd_dtype_nbytes(view.dtype)));
        return RSD_OK;
    }
    pickle_node container = pickle_is_dict(tree, c) ? pickle_dict_items(tree, c) : c;
    bool tuple = pickle_kind(tree, c) == NODE_TUPLE;
    struct pickle_walk walk = pickle_walk(tree, container);
    pickle_node item;
    for (uint32_t i = 0; tuple ? i < pickle_count(tree, c) : pickle_walk_next(&walk, &item); i++)
        TRY(find_element_sizes(reader, tuple ? pickle_item(tree, c, i) : item, depth + 1, sizes));
    return RSD_OK;
}

static rsd_status place_storages(struct torch_reader *reader, const struct pickle_tree *list,
                                 pickle_node keys, uint64_t nbytes, const struct string_map *sizes)
{
    struct pickle_walk walk = pickle_walk(list, keys);
    pickle_node key;
    size_t n = 0, element_nbytes;
    uint64_t at = reader->base;
    if (pickle_kind(list, keys) != NODE_LIST)
        return fail(RSD_EFORMAT, "keys of the storages are not a list");
    reader->storages = mem_new(pickle_count(list, keys), sizeof *reader->storages);
    if (!reader->storages)
        return RSD_ENOMEM;
    for (reader->base = 0; pickle_walk_next(&walk, &key); n++) {
        unsigned char raw[8];
        uint64_t count = 0, length;
        const char *kept;
        TRY(store_read(reader->store, reader->file, at, raw, sizeof raw));
        for (int i = 7; i >= 0; i--)
            count = count << 8 | raw[i];
        /* The size of a storage that no tensor uses is unknown, and so is the offset of the next one. */
        if (!string_map_find(sizes, pickle_text(list, key), &element_nbytes))
            return fail(RSD_EUNSUPPORTED, "storage belongs to no supported tensor");
        if (__builtin_mul_overflow(count, (uint64_t)element_nbytes, &length) ||
            length > nbytes - at - 8)
            return fail(RSD_EFORMAT, "byte %llu: storage reaches beyond the file",
                        (unsigned long long)at);
        reader->storages[n] = (struct torch_storage){at + 8, length, 0};
        TRY(catalog_add_name(reader->catalog, pickle_text(list, key), &kept));
        TRY(string_map_add(&reader->keys, (struct slice){kept, strlen(kept)}, n));
        at += 8 + length;
    }
    return RSD_OK;
}

static rsd_status load_pickles(struct torch_reader *reader, uint64_t nbytes, pickle_node *root)
{
    struct pickle_tree list;
    struct string_map sizes = {0};
    pickle_node keys;
    uint64_t used;
    TRY(skip_pickle(reader, nbytes, true));
    TRY(skip_pickle(reader, nbytes, false));
    TRY(skip_pickle(reader, nbytes, false));
    TRY(pickle_read(read_pickle_bytes, reader, nbytes - reader->base, &reader->tree, root, &used));
    reader->base += used;
    TRY(pickle_read(read_pickle_bytes, reader, nbytes - reader->base, &list, &keys, &used));
    reader->base += used;
    uint64_t pickled = reader->base;
    set_limits(reader, pickled);
    rsd_status status = find_element_sizes(reader, *root, 0, &sizes);
    if (!status)
        status = place_storages(reader, &list, keys, nbytes, &sizes);
    set_limits(reader, pickled);
    string_map_drop(&sizes);
    pickle_tree_drop(&list);
    return status;
}

/* ---- files ---- */

static rsd_status add_torch_file(struct store *store, struct catalog *catalog, uint32_t file)
{
    struct torch_reader reader = {.store = store, .catalog = catalog, .file = file};
    unsigned char start[2] = {0};
    uint64_t nbytes;
    pickle_node root = PICKLE_ABSENT;
    rsd_status status = store_stat(store, file, &nbytes, NULL);
    if (!status && nbytes >= sizeof start)
        status = store_read(store, file, 0, start, sizeof start);
    if (!status)
        status = start[0] == 0x80 ? load_pickles(&reader, nbytes, &root)
                                  : load_archive(&reader, nbytes, &root);
    if (!status)
        status = visit_node(&reader, root, 0, 0);
    pickle_tree_drop(&reader.tree);
    zip_close(&reader.zip);
    string_map_drop(&reader.keys);
    mem_free(reader.storages);
    return status ? store_fail_in(store, file, status) : RSD_OK;
}

/* ---- the row ---- */

static bool is_torch_index(const char *name)
{
    return has_suffix(name, ".bin.index.json");
}

static int torch_save_probe(const struct store_listing *listing, const struct store_entry *entry,
                            struct slice start)
{
    (void)listing;
    const char *name = entry->base, *bytes = start.bytes;
    bool named = has_suffix(name, ".pt") || has_suffix(name, ".pth") || has_suffix(name, ".bin");
    if (entry->directory)
        return NOT_SURE;
    if (is_torch_index(name))
        return SURE_OF_TORCH_INDEX;
    if (!bytes)
        return named ? SURE_OF_TORCH_FILE : NOT_SURE;
    bool archive = start.nbytes >= 4 && memcmp(bytes, "PK\3\4", 4) == 0;
    bool safetensors = start.nbytes > 8 && bytes[8] == '{';
    bool pickle = start.nbytes >= 2 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5;
    if (archive || (pickle && !safetensors))
        return SURE_OF_BYTES;
    return named ? SURE_OF_SUFFIX : NOT_SURE;
}

static rsd_status torch_save_open(struct store *store, struct catalog *catalog)
{
    size_t n = store->names.n;
    bool index = is_torch_index(store_file_name(store, 0));
    if (n > 1 && index)
        return fail(RSD_EFORMAT, "%s: found %zu index files; name one of them", store->path, n);
    if (n > 1)
        return fail(RSD_EFORMAT, "%s: found %zu torch.save files and no index; name one of them",
                    store->path, n);
    if (index)
        TRY(index_add_files(store, 0));
    for (uint32_t file = index ? 1 : 0; file < store->names.n; file++)
        TRY(add_torch_file(store, catalog, file));
    return RSD_OK;
}

const struct format format_torch_save = {.id = RSD_FORMAT_TORCH_SAVE,
                                         .name = "torch.save",
                                         .probe = torch_save_probe,
                                         .open = torch_save_open,
                                         .locate = catalog_locate};
