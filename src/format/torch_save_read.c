/* torchsave.c - opens plain torch.save files: tensors in nested dicts and lists, found without running
 * their pickle.
 *
 * Names are the keys on the way to a tensor, joined by dots. A list or tuple is gone into if there is a
 * tensor or dict in it; anything else is a value. Objects of classes that are not known stay opaque, and
 * whatever is in them is not looked at. What is referred to many times is there as often, so what is made
 * is bounded by the length of the pickle.
 *
 * There are two containers. Since torch 1.6 a file is an archive with the pickle in data.pkl and each
 * storage in data/KEY. Before that it was five pickles one after the other (a magic number, a protocol,
 * facts about the system, the object, the keys of the storages) and then the storages, each with its
 * number of elements in front.
 */
#include "rows.h"
#include "torch_item.h"

#include <stdio.h>
#include <string.h>

enum { MOST_DEPTH = 64, MOST_NAME = 2000 };
enum { MOST_VISITS = 8, MOST_GROWTH = 64, START_NBYTES = 1 << 18 }; /* the first two: per byte */

struct storage {
    uint64_t data, nbytes;
    uint32_t crc;
};

/* One part of a name: where it is, and whether it is a place in a list. */
struct step {
    size_t begin, end;
    bool number;
};

struct loading {
    struct store *store;
    struct catalog *catalog;
    uint32_t file;
    uint64_t base; /* where the pickle at hand begins in the file */
    struct zip zip;
    bool archive, big_endian;
    struct pickle_tree tree;
    uint64_t budget;        /* nodes that may still be looked at */
    uint64_t capacity;      /* bytes that may still be made of them */
    struct string_map keys; /* of storages, in files without an archive */
    struct storage *storages;
    char name[MOST_NAME]; /* of what is looked at, with a zero behind it */
    size_t name_nbytes;
    struct step steps[MOST_DEPTH + 1];
    size_t nsteps;
};

static rsd_status read_file(void *context, uint64_t at, void *out, size_t n)
{
    struct loading *l = context;
    return store_read(l->store, l->file, l->base + at, out, n);
}

static void set_limits(struct loading *l, uint64_t pickle_nbytes)
{
    l->budget = START_NBYTES + pickle_nbytes * MOST_VISITS;
    l->capacity = START_NBYTES + pickle_nbytes * MOST_GROWTH;
}

static rsd_status make_room(struct loading *l, uint64_t nbytes)
{
    if (nbytes > l->capacity)
        return fail(RSD_EFORMAT, "the values are many times as long as their pickle");
    l->capacity -= nbytes;
    return RSD_OK;
}

/* ---- tensors ---- */

static rsd_status find_storage(struct loading *l, struct slice key, struct storage *out)
{
    char name[300];
    struct zip_record *record;
    size_t number;
    if (!l->archive) {
        if (!string_map_find(&l->keys, key, &number))
            return fail(RSD_EFORMAT, "storage %.*s is missing", (int)key.nbytes, key.bytes);
        *out = l->storages[number];
        return RSD_OK;
    }
    snprintf(name, sizeof name, "data/%.*s", (int)(key.nbytes < 200 ? key.nbytes : 200), key.bytes);
    TRY(zip_find(&l->zip, name, &record));
    if (!record)
        return fail(RSD_EFORMAT, "record %s is missing", name);
    *out = (struct storage){record->data, record->nbytes, record->crc};
    return RSD_OK;
}

/* Where the value at hand was: its keys as JSON texts, its places in lists as numbers. */
static rsd_status add_path(struct loading *l, const char **out)
{
    struct text text = {0};
    char *json;
    if (l->nsteps == 0)
        return RSD_OK;
    text_add(&text, "[");
    for (size_t i = 0; i < l->nsteps; i++) {
        const struct step *step = &l->steps[i];
        size_t n = step->end - step->begin;
        text_add(&text, i ? ", " : "");
        if (step->number)
            text_add(&text, "%.*s", (int)n, l->name + step->begin);
        else
            json_add_string(&text, l->name + step->begin, n);
    }
    text_add(&text, "]");
    TRY(text_take(&text, &json));
    rsd_status status = make_room(l, strlen(json));
    if (!status)
        status = catalog_copy_text(l->catalog, json, out);
    rsd_free(json);
    return status;
}

/* A key may have a zero in it, which then is no proper name. */
static struct slice name_of(const struct loading *l)
{
    return (struct slice){l->name, l->name_nbytes};
}

static rsd_status add_tensor(struct loading *l, pickle_node c)
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct catalog *catalog = l->catalog;
    struct torch_view view;
    struct storage storage;
    TRY(make_room(l, l->name_nbytes + sizeof(struct stored_array) + sizeof(struct stored_tensor)));
    TRY(torch_view_read(&l->tree, c, &view));
    TRY(find_storage(l, view.key, &storage));
    TRY(torch_view_check(&view, storage.nbytes));
    struct stored_array array = {.offset = storage.data,
                                 .nbytes = storage.nbytes,
                                 .crc = storage.crc,
                                 .big_endian = l->big_endian};
    array.has_crc = l->archive && (storage.crc || !storage.nbytes); /* 0: it was not computed */
    torch_view_set_array(&view, &array);
    TRY(catalog_add_tensor(catalog, name_of(l), view.dtype, view.ndim, view.shape));
    TRY(add_path(l, &catalog->tensors[catalog->ntensors - 1].path));
    return catalog_add_array(catalog, origin, view.shape, l->file, &array);
}

/* ---- values ---- */

static rsd_status add_value(struct loading *l, pickle_node c)
{
    struct catalog *catalog = l->catalog;
    struct bytes pickle = {0};
    char *json = NULL;
    bool plain;
    rsd_status status = pickle_to_json(&l->tree, c, &json);
    if (!status)
        status = pickle_to_plain_pickle(&l->tree, c, &pickle, &plain);
    if (!status)
        status = make_room(l, l->name_nbytes + sizeof(struct stored_value) + pickle.n +
                                  (json ? strlen(json) : 0));
    if (!status)
        status = catalog_add_value(catalog, name_of(l), (struct extent){.kind = EXTENT_NONE}, json);
    if (status) {
        mem_free(json);
        bytes_drop(&pickle);
        return status;
    }
    if (plain)
        catalog->values[catalog->nvalues - 1].pickle = pickle;
    else
        bytes_drop(&pickle);
    return add_path(l, &catalog->values[catalog->nvalues - 1].path);
}

/* ---- going through ---- */

/* Whether a list or tuple has something in it that has to be looked at one by one. */
static bool has_parts(struct loading *l, pickle_node c, int depth)
{
    const struct pickle_tree *tree = &l->tree;
    bool tuple = pickle_kind(tree, c) == NODE_TUPLE;
    struct pickle_walk walk = pickle_walk(tree, c);
    pickle_node item;
    for (uint32_t i = 0; tuple ? i < pickle_count(tree, c) : pickle_walk_next(&walk, &item); i++) {
        pickle_node one = tuple ? pickle_item(tree, c, i) : item;
        enum pickle_kind kind = pickle_kind(tree, one);
        if (l->budget == 0 || depth > MOST_DEPTH)
            return false;
        l->budget--;
        if (torch_view_is_tensor(tree, one) || pickle_is_dict(tree, one) ||
            ((kind == NODE_LIST || kind == NODE_TUPLE) && has_parts(l, one, depth + 1)))
            return true;
    }
    return false;
}

static rsd_status visit(struct loading *l, pickle_node c, size_t length, int depth);

static rsd_status visit_named(struct loading *l, struct slice name, bool number, pickle_node c,
                              size_t length, int depth)
{
    size_t need = name.nbytes + (length ? 1 : 0);
    if (length + need >= sizeof l->name)
        return fail(RSD_ELIMIT, "a name of more than %d bytes", (int)MOST_NAME);
    if (length)
        l->name[length++] = '.';
    memcpy(l->name + length, name.bytes, name.nbytes);
    l->name[length + name.nbytes] = '\0';
    if (l->nsteps == sizeof l->steps / sizeof *l->steps)
        return fail(RSD_EFORMAT, "%.300s: nested too deeply", l->name);
    l->steps[l->nsteps++] = (struct step){length, length + name.nbytes, number};
    rsd_status status = visit(l, c, length + name.nbytes, depth + 1);
    l->nsteps--;
    return status;
}

static rsd_status visit_dict(struct loading *l, pickle_node dict, size_t length, int depth)
{
    struct pickle_walk walk = pickle_walk(&l->tree, dict);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        char digits[24];
        int64_t number;
        struct slice name = pickle_text(&l->tree, key);
        if (pickle_as_i64(&l->tree, key, &number)) {
            snprintf(digits, sizeof digits, "%lld", (long long)number);
            name = (struct slice){digits, strlen(digits)};
        } else if (pickle_kind(&l->tree, key) != NODE_STRING) {
            continue; /* a key that is neither text nor a number names nothing */
        }
        TRY(visit_named(l, name, false, value, length, depth));
    }
    return RSD_OK;
}

static rsd_status visit_list(struct loading *l, pickle_node list, size_t length, int depth)
{
    bool tuple = pickle_kind(&l->tree, list) == NODE_TUPLE;
    struct pickle_walk walk = pickle_walk(&l->tree, list);
    pickle_node item;
    for (uint32_t i = 0; tuple ? i < pickle_count(&l->tree, list) : pickle_walk_next(&walk, &item);
         i++) {
        char digits[24];
        snprintf(digits, sizeof digits, "%u", i);
        TRY(visit_named(l, (struct slice){digits, strlen(digits)}, true,
                        tuple ? pickle_item(&l->tree, list, i) : item, length, depth));
    }
    return RSD_OK;
}

static rsd_status visit(struct loading *l, pickle_node c, size_t length, int depth)
{
    enum pickle_kind kind = pickle_kind(&l->tree, c);
    if (depth > MOST_DEPTH)
        return fail(RSD_EFORMAT, "%.300s: nested too deeply", l->name);
    if (l->budget == 0)
        return fail(RSD_EFORMAT, "%.300s: more values than the pickle has bytes", l->name);
    l->budget--;
    if (pickle_is_dict(&l->tree, c))
        return visit_dict(l, pickle_dict_items(&l->tree, c), length, depth);
    if ((kind == NODE_LIST || kind == NODE_TUPLE) && has_parts(l, c, depth))
        return visit_list(l, c, length, depth);
    l->name_nbytes = length;
    if (length == 0) /* the whole file is one tensor, or one value */
        l->name_nbytes = (size_t)snprintf(l->name, sizeof l->name, "%s",
                                          torch_view_is_tensor(&l->tree, c) ? "tensor" : "value");
    rsd_status status = torch_view_is_tensor(&l->tree, c) ? add_tensor(l, c) : add_value(l, c);
    return status == RSD_OK ? RSD_OK : fail_in(status, "%.300s: ", l->name);
}

/* ---- archives ---- */

static rsd_status check_byteorder(struct loading *l)
{
    struct zip_record *record;
    char text[8] = "";
    TRY(zip_find(&l->zip, "byteorder", &record));
    if (!record)
        return RSD_OK;
    size_t n = record->nbytes < sizeof text - 1 ? (size_t)record->nbytes : sizeof text - 1;
    TRY(store_read(l->store, l->file, record->data, text, n));
    l->big_endian = strcmp(text, "big") == 0;
    if (!l->big_endian && strcmp(text, "little") != 0)
        return fail(RSD_EFORMAT, "record byteorder says '%s'", text);
    return RSD_OK;
}

static rsd_status load_archive(struct loading *l, uint64_t nbytes, pickle_node *root)
{
    struct zip_record *pickle, *script;
    TRY(zip_open(&l->zip, read_file, l, nbytes));
    l->archive = true;
    TRY(zip_find(&l->zip, "constants.pkl", &script));
    if (script)
        return fail(RSD_EUNSUPPORTED, "a TorchScript archive, which has its tensors in code");
    TRY(zip_find(&l->zip, "data.pkl", &pickle));
    if (!pickle)
        return fail(RSD_EFORMAT, "no record data.pkl: not what torch.save writes");
    TRY(check_byteorder(l));
    set_limits(l, pickle->nbytes);
    return zip_read_pickle(&l->zip, pickle, &l->tree, root);
}

/* ---- before archives ---- */

static rsd_status skip_pickle(struct loading *l, uint64_t nbytes, bool magic)
{
    static const char number[] = "\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    TRY(pickle_read(read_file, l, nbytes - l->base, &tree, &root, &used));
    struct slice text = pickle_text(&tree, root);
    bool fine = !magic || (text.nbytes == 10 && memcmp(text.bytes, number, 10) == 0);
    pickle_tree_drop(&tree);
    l->base += used;
    return fine ? RSD_OK : fail(RSD_EFORMAT, "a pickle, but not what torch.save writes");
}

/* How large a storage is, is said where it is used: here all uses are looked up by key. */
static rsd_status find_element_nbytes(struct loading *l, pickle_node c, int depth,
                                      struct string_map *sizes)
{
    const struct pickle_tree *tree = &l->tree;
    struct torch_view view;
    size_t known;
    if (depth > MOST_DEPTH || l->budget == 0)
        return RSD_OK;
    l->budget--;
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
        TRY(find_element_nbytes(l, tuple ? pickle_item(tree, c, i) : item, depth + 1, sizes));
    return RSD_OK;
}

static rsd_status place_storages(struct loading *l, const struct pickle_tree *list,
                                 pickle_node keys, uint64_t nbytes, const struct string_map *sizes)
{
    struct pickle_walk walk = pickle_walk(list, keys);
    pickle_node key;
    size_t n = 0, element_nbytes;
    uint64_t at = l->base;
    if (pickle_kind(list, keys) != NODE_LIST)
        return fail(RSD_EFORMAT, "the keys of its storages are no list");
    l->storages = mem_new(pickle_count(list, keys), sizeof *l->storages);
    if (!l->storages)
        return RSD_ENOMEM;
    for (l->base = 0; pickle_walk_next(&walk, &key); n++) {
        unsigned char raw[8];
        uint64_t count = 0, length;
        const char *kept;
        TRY(store_read(l->store, l->file, at, raw, sizeof raw));
        for (int i = 7; i >= 0; i--)
            count = count << 8 | raw[i];
        /* A storage that no tensor uses has a size that cannot be known, and nothing after it a place. */
        if (!string_map_find(sizes, pickle_text(list, key), &element_nbytes))
            return fail(RSD_EUNSUPPORTED, "a storage that belongs to no tensor that is known here");
        if (__builtin_mul_overflow(count, (uint64_t)element_nbytes, &length) ||
            length > nbytes - at - 8)
            return fail(RSD_EFORMAT, "byte %llu: a storage that reaches beyond the file",
                        (unsigned long long)at);
        l->storages[n] = (struct storage){at + 8, length, 0};
        TRY(catalog_add_name(l->catalog, pickle_text(list, key), &kept));
        TRY(string_map_add(&l->keys, (struct slice){kept, strlen(kept)}, n));
        at += 8 + length;
    }
    return RSD_OK;
}

static rsd_status load_pickles(struct loading *l, uint64_t nbytes, pickle_node *root)
{
    struct pickle_tree list;
    struct string_map sizes = {0};
    pickle_node keys;
    uint64_t used;
    TRY(skip_pickle(l, nbytes, true));
    TRY(skip_pickle(l, nbytes, false));
    TRY(skip_pickle(l, nbytes, false));
    TRY(pickle_read(read_file, l, nbytes - l->base, &l->tree, root, &used));
    l->base += used;
    TRY(pickle_read(read_file, l, nbytes - l->base, &list, &keys, &used));
    l->base += used;
    uint64_t pickled = l->base;
    set_limits(l, pickled);
    rsd_status status = find_element_nbytes(l, *root, 0, &sizes);
    if (!status)
        status = place_storages(l, &list, keys, nbytes, &sizes);
    set_limits(l, pickled);
    string_map_drop(&sizes);
    pickle_tree_drop(&list);
    return status;
}

/* ---- the whole ---- */

static rsd_status add_file(struct store *store, struct catalog *catalog, uint32_t file)
{
    struct loading l = {.store = store, .catalog = catalog, .file = file};
    unsigned char start[2] = {0};
    uint64_t nbytes;
    pickle_node root = PICKLE_ABSENT;
    rsd_status status = store_stat(store, file, &nbytes, NULL);
    if (!status && nbytes >= sizeof start)
        status = store_read(store, file, 0, start, sizeof start);
    if (!status)
        status =
            start[0] == 0x80 ? load_pickles(&l, nbytes, &root) : load_archive(&l, nbytes, &root);
    if (!status)
        status = visit(&l, root, 0, 0);
    pickle_tree_drop(&l.tree);
    zip_close(&l.zip);
    string_map_drop(&l.keys);
    mem_free(l.storages);
    return status ? store_fail_in(store, file, status) : RSD_OK;
}

/* ---- the row ---- */

static bool is_index(const char *name)
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
    if (is_index(name))
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
    bool index = is_index(store_file_name(store, 0));
    if (n > 1 && index)
        return fail(RSD_EFORMAT, "%s: there are %zu indices", store->path, n);
    if (n > 1)
        return fail(RSD_EFORMAT,
                    "%s: there are %zu torch.save files and no index: name one of them",
                    store->path, n);
    if (index)
        TRY(index_add_files(store, 0));
    for (uint32_t file = index ? 1 : 0; file < store->names.n; file++)
        TRY(add_file(store, catalog, file));
    return RSD_OK;
}

const struct format format_torch_save = {.id = RSD_FORMAT_TORCH_SAVE,
                                         .name = "torch.save",
                                         .probe = torch_save_probe,
                                         .open = torch_save_open,
                                         .locate = catalog_locate};
