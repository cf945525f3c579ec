/* torch_file.c - a file of torch.save: its pickle, and the storages that the tensors in it are views of.
 *
 * There are two containers. Since torch 1.6 a file is an archive with the pickle in data.pkl and each
 * storage in data/KEY. Before, it was five pickles (a magic number, a protocol, facts about the system, the
 * object, the keys of the storages) and then the storages, each behind its number of elements.
 */
#include "torch_item.h"

#include <stdio.h>

enum { MAX_SEARCH_DEPTH = 400 };
enum { FIND_STEPS = 32 }; /* to read the call that makes a tensor, and to find its record */

/* ---- archives ---- */

/* Reads the pickle of an archive, as torch.save writes it since 1.6. */
static rsd_status load_archive(struct torch_file *file, uint64_t nbytes)
{
    struct zip_record *pickle, *script;
    TRY(zip_open(&file->zip, store_range_read, &file->range, nbytes));
    file->archive = true;
    TRY(zip_find(&file->zip, "constants.pkl", &script));
    if (script)
        return fail(RSD_EUNSUPPORTED, "TorchScript archives are not supported");
    TRY(torch_find_pickle(&file->zip, &pickle));
    TRY(torch_read_byteorder(&file->zip, &file->big_endian));
    return zip_read_pickle(&file->zip, pickle, &file->tree, &file->root);
}

/* ---- files before torch 1.6 ---- */

/* Reads a pickle and drops it. With `magic`, it must be the magic number of torch.save. */
static rsd_status skip_pickle(struct torch_file *file, uint64_t nbytes, bool magic)
{
    static const char number[] = "\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    TRY(pickle_read(store_range_read, &file->range, nbytes - file->range.offset, &tree, &root,
                    &used));
    struct slice text = pickle_text(&tree, root);
    bool fine = !magic || (text.nbytes == 10 && memcmp(text.bytes, number, 10) == 0);
    pickle_tree_drop(&tree);
    file->range.offset += used;
    return fine ? RSD_OK : fail(RSD_EFORMAT, "pickle is not a torch.save file");
}

/* Returns the size of the elements of a class of storages; 0: it is not known. */
static size_t storage_element_nbytes(const struct pickle_tree *tree, pickle_node class)
{
    static const struct {
        const char *name;
        size_t nbytes;
    } others[] = {{"QInt8Storage", 1},    {"QUInt8Storage", 1}, {"QUInt4x2Storage", 1},
                  {"QUInt2x4Storage", 1}, {"QInt32Storage", 4}, {NULL, 0}};
    enum known known = pickle_known(tree, class);
    if (known == KNOWN_UNTYPED_STORAGE)
        return 1;
    if (known != KNOWN_STORAGE_CLASS)
        return 0;
    struct slice name = pickle_text(tree, pickle_part(tree, class, NODE_ARGS));
    for (size_t i = 0; others[i].name; i++)
        if (slice_is(name, others[i].name))
            return others[i].nbytes;
    rsd_dtype dtype = dtype_from_storage(name);
    return dtype ? rsd_dtype_nbytes(dtype) : 0;
}

/* Adds the size of the elements of a storage, which is in the persistent id, unless the key is known. */
static rsd_status add_element_size(const struct pickle_tree *tree, pickle_node id,
                                   struct string_map *sizes)
{
    size_t known;
    if (pickle_kind(tree, id) != NODE_TUPLE || pickle_count(tree, id) < 5)
        return RSD_OK;
    struct slice key = pickle_text(tree, pickle_item(tree, id, 2));
    size_t nbytes = storage_element_nbytes(tree, pickle_item(tree, id, 1));
    if (nbytes == 0 || string_map_find(sizes, key, &known))
        return RSD_OK;
    return string_map_add(sizes, key, nbytes);
}

/* Finds the size of the elements of each storage, by key. It is in the references to the storage only. */
static rsd_status find_element_sizes(const struct pickle_tree *tree, pickle_node c, int depth,
                                     struct string_map *sizes)
{
    static const enum pickle_part parts[] = {NODE_ARGS, NODE_STATE, NODE_ITEMS};
    if (depth > MAX_SEARCH_DEPTH)
        return RSD_OK;
    TRY(budget_use(1));
    if (pickle_kind(tree, c) == NODE_PERSISTENT)
        return add_element_size(tree, pickle_part(tree, c, NODE_WHAT), sizes);
    for (int i = 0; i < 3 && pickle_is_built(tree, c); i++)
        TRY(find_element_sizes(tree, pickle_part(tree, c, parts[i]), depth + 1, sizes));
    struct pickle_walk walk = pickle_walk(tree, c);
    for (pickle_node item; pickle_walk_next(&walk, &item);)
        TRY(find_element_sizes(tree, item, depth + 1, sizes));
    return RSD_OK;
}

/* Finds the storages of a file of torch before 1.6: they follow the pickles, each with its number of elements in
 * front. */
static rsd_status place_storages(struct torch_file *file, pickle_node keys, uint64_t nbytes,
                                 const struct string_map *sizes)
{
    const struct pickle_tree *list = &file->keys_tree;
    struct pickle_walk walk = pickle_walk(list, keys);
    pickle_node key;
    size_t n = 0, element_nbytes;
    uint64_t at = file->range.offset;
    if (pickle_kind(list, keys) != NODE_LIST)
        return fail(RSD_EFORMAT, "keys of the storages are not a list");
    file->storages = mem_new(pickle_count(list, keys), sizeof *file->storages);
    if (!file->storages)
        return RSD_ENOMEM;
    for (; pickle_walk_next(&walk, &key); n++) {
        unsigned char raw[8];
        TRY(store_read(file->store, file->index, at, raw, sizeof raw));
        uint64_t count = little_endian(raw, sizeof raw), length;
        /* The size of a storage that no tensor uses is unknown, and so is the offset of the next one. */
        if (!string_map_find(sizes, pickle_text(list, key), &element_nbytes))
            return fail(RSD_EUNSUPPORTED, "storage belongs to no supported tensor");
        if (__builtin_mul_overflow(count, (uint64_t)element_nbytes, &length) ||
            length > nbytes - at - 8)
            return fail(RSD_EFORMAT, "byte %llu: storage reaches beyond the file",
                        (unsigned long long)at);
        file->storages[n] = (struct torch_storage){at + 8, length};
        TRY(string_map_add(&file->keys, pickle_text(list, key), n));
        at += 8 + length;
    }
    return RSD_OK;
}

/* Reads the five pickles of a file of torch before 1.6, and finds its storages. */
static rsd_status load_pickles(struct torch_file *file, uint64_t nbytes)
{
    struct store_range *range = &file->range;
    struct string_map sizes = {0};
    pickle_node keys;
    uint64_t used;
    TRY(skip_pickle(file, nbytes, true));
    TRY(skip_pickle(file, nbytes, false));
    TRY(skip_pickle(file, nbytes, false));
    TRY(pickle_read(store_range_read, range, nbytes - range->offset, &file->tree, &file->root,
                    &used));
    range->offset += used;
    TRY(pickle_read(store_range_read, range, nbytes - range->offset, &file->keys_tree, &keys,
                    &used));
    range->offset += used;
    rsd_status status = find_element_sizes(&file->tree, file->root, 0, &sizes);
    if (!status)
        status = place_storages(file, keys, nbytes, &sizes);
    string_map_drop(&sizes);
    return status;
}

/* ---- both ---- */

rsd_status torch_file_open(struct torch_file *file, struct store *store, uint32_t index)
{
    unsigned char start[2] = {0};
    uint64_t nbytes;
    *file = (struct torch_file){
        .store = store, .index = index, .range = {store, index, 0}, .root = PICKLE_ABSENT};
    TRY(store_stat(store, index, &nbytes, NULL));
    if (nbytes >= sizeof start)
        TRY(store_read(store, index, 0, start, sizeof start));
    rsd_status status = start[0] == 0x80 ? load_pickles(file, nbytes) : load_archive(file, nbytes);
    if (status)
        torch_file_close(file);
    return status;
}

void torch_file_close(struct torch_file *file)
{
    pickle_tree_drop(&file->tree);
    pickle_tree_drop(&file->keys_tree);
    zip_close(&file->zip);
    string_map_drop(&file->keys);
    mem_free(file->storages);
    file->storages = NULL;
}

/* Finds the bytes of a storage by its key. */
static rsd_status find_storage(struct torch_file *file, struct slice key, struct stored_array *out)
{
    size_t number;
    if (file->archive)
        return torch_find_storage(&file->zip, key, out);
    if (!string_map_find(&file->keys, key, &number))
        return fail(RSD_EFORMAT, "storage %.*s is missing", slice_width(key, 200), key.bytes);
    out->offset = file->storages[number].offset;
    out->nbytes = file->storages[number].nbytes;
    return RSD_OK;
}

rsd_status torch_file_find_tensor(struct torch_file *file, pickle_node tensor,
                                  struct torch_view *view, struct stored_array *array)
{
    *array = (struct stored_array){.big_endian = file->big_endian};
    TRY(budget_use(FIND_STEPS));
    TRY(torch_view_read(&file->tree, tensor, view));
    TRY(find_storage(file, view->key, array));
    TRY(torch_view_check(view, array->nbytes));
    torch_view_set_array(view, array);
    return RSD_OK;
}
