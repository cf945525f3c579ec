/* dcp_read.c - opens PyTorch's distributed checkpoints: turns their metadata into a catalog.
 *
 *     Metadata
 *       state_dict_metadata   name -> TensorStorageMetadata(properties, size, chunks), or bytes
 *       storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
 *       planner_data          name -> where it was in the nested state dict
 *
 * The metadata is one pickle, or one per rank if it was saved without collectives; those are joined.
 * Offsets of chunks are used as they are, never derived from placements, but every box must lie inside its
 * tensor. An entry of storage_data is matched to its chunk by the index that torch writes with it, or else
 * by its offset.
 *
 * The number of boxes is limited by the length of the pickles: otherwise a short pickle could refer to one
 * list many times. All other work is limited by the budget of the call.
 */
#include "dcp_nodes.h"
#include "torch_item.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_PATH_STEPS = 1000 };
enum { SORT_STEPS = 32 }; /* to sort one box among many */

/* The metadata of one rank, or of all. */
struct metadata_part {
    struct pickle_tree tree;
    pickle_node tensors, storage, planner;
    uint32_t file;
};

/* A tensor or value of one part. */
struct metadata_entry {
    size_t ordinal; /* of its name, by first appearance */
    size_t part;
    pickle_node name, meta;
    size_t first_box; /* of this part's boxes in the tensor */
    bool value;
};

struct metadata_reader {
    struct catalog *catalog;
    struct store *store;
    const char *directory; /* of the metadata and of the data files, in the store */
    struct metadata_part *parts;
    size_t nparts;
    uint64_t boxes_left;            /* that may still be added */
    struct string_map names;        /* to ordinals */
    struct string_map unknown;      /* lists of transforms, to their numbers */
    struct metadata_entry *entries; /* by ordinal, then part */
    size_t nentries, entries_capacity;
    size_t *number;   /* of the tensor or value in the catalog, by ordinal */
    int64_t **sorted; /* by ordinal: boxes of the tensor by offset, made when an index is wrong */
};

/* ---- entries ---- */

/* Adds a tensor or value of one part to the list of entries. */
static rsd_status add_metadata_entry(struct metadata_reader *reader, size_t part, pickle_node name,
                                     pickle_node meta)
{
    const struct pickle_tree *tree = &reader->parts[part].tree;
    struct metadata_entry entry = {.part = part, .name = name, .meta = meta};
    struct slice text = pickle_text(tree, name);
    TRY(metadata_check(pickle_kind(tree, name) == NODE_STRING && text.nbytes > 0,
                       "tensor name is empty or not a string"));
    bool object = pickle_kind(tree, meta) == NODE_OBJECT;
    enum known known = object ? pickle_known(tree, pickle_part(tree, meta, NODE_WHAT)) : KNOWN_NOT;
    entry.value = known == KNOWN_BYTES_STORAGE;
    if (!entry.value && known != KNOWN_TENSOR_STORAGE)
        return fail(RSD_EFORMAT, "%.*s is neither a tensor nor a value", slice_width(text, 300),
                    text.bytes);
    if (!string_map_find(&reader->names, text, &entry.ordinal)) {
        entry.ordinal = reader->names.n;
        TRY(string_map_add(&reader->names, text, entry.ordinal));
    }
    TRY(GROW(reader->entries, reader->entries_capacity, reader->nentries + 1));
    reader->entries[reader->nentries++] = entry;
    return RSD_OK;
}

static int by_ordinal_and_part(const void *a, const void *b)
{
    const struct metadata_entry *x = a, *y = b;
    if (x->ordinal != y->ordinal)
        return x->ordinal < y->ordinal ? -1 : 1;
    return (x->part > y->part) - (x->part < y->part);
}

/* Sets reader->entries: the tensors and values of all parts, by name and part. Allocates their numbers. */
static rsd_status find_metadata_entries(struct metadata_reader *reader)
{
    for (size_t part = 0; part < reader->nparts; part++) {
        struct pickle_walk walk =
            pickle_walk(&reader->parts[part].tree, reader->parts[part].tensors);
        pickle_node name, meta;
        while (pickle_walk_next_pair(&walk, &name, &meta))
            TRY(add_metadata_entry(reader, part, name, meta));
    }
    if (reader->nentries != reader->names.n) /* else they are sorted already */
        qsort(reader->entries, reader->nentries, sizeof *reader->entries, by_ordinal_and_part);
    reader->number = mem_new(reader->names.n, sizeof *reader->number);
    return reader->number ? RSD_OK : RSD_ENOMEM;
}

/* ---- tensors and values ---- */

/* Adds the boxes of a tensor, whose bytes are not located yet. */
static rsd_status add_chunks(struct metadata_reader *reader, size_t part, pickle_node chunks,
                             int32_t ndim)
{
    const struct pickle_tree *tree = &reader->parts[part].tree;
    const struct extent nowhere = {.kind = EXTENT_NONE, .file = reader->parts[part].file};
    struct pickle_walk walk = pickle_walk(tree, chunks);
    pickle_node chunk;
    TRY(metadata_check(pickle_kind(tree, chunks) == NODE_LIST, "chunks are not a list"));
    while (pickle_walk_next(&walk, &chunk)) {
        int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
        pickle_node state = metadata_state(tree, chunk, KNOWN_CHUNK);
        TRY(metadata_check(reader->boxes_left-- > 0, "metadata has more chunks than bytes"));
        TRY(metadata_check(
            pickle_take_numbers(tree, pickle_find(tree, state, "offsets"), ndim, lo) == ndim &&
                pickle_take_numbers(tree, pickle_find(tree, state, "sizes"), ndim, len) == ndim,
            "chunk has invalid offsets or sizes"));
        TRY(catalog_add_box(reader->catalog, lo, len, nowhere));
    }
    return RSD_OK;
}

/* Reads the dtype and the shape of a tensor from the state of its TensorStorageMetadata. */
static rsd_status take_metadata_tensor(const struct pickle_tree *tree, pickle_node state,
                                       rsd_dtype *dtype, int32_t *ndim, int64_t *shape)
{
    TRY(torch_take_shape(tree, pickle_find(tree, state, "size"), ndim, shape));
    return metadata_take_dtype(tree, pickle_find(tree, state, "properties"), dtype);
}

/* Adds one tensor, from its entries in all parts. */
static rsd_status add_metadata_tensor(struct metadata_reader *reader,
                                      struct metadata_entry *entries, size_t n)
{
    struct catalog *catalog = reader->catalog;
    for (size_t i = 0; i < n; i++) {
        const struct pickle_tree *tree = &reader->parts[entries[i].part].tree;
        pickle_node state = pickle_part(tree, entries[i].meta, NODE_STATE);
        rsd_dtype dtype;
        int32_t ndim;
        int64_t shape[RSD_MAX_DIMS] = {0};
        TRY(take_metadata_tensor(tree, state, &dtype, &ndim, shape));
        if (i == 0)
            TRY(catalog_add_tensor(catalog, pickle_text(tree, entries[0].name), dtype, ndim,
                                   shape));
        const struct stored_tensor *tensor = &catalog->tensors[catalog->ntensors - 1];
        TRY(metadata_check(
            dtype == tensor->dtype && ndim == tensor->ndim &&
                memcmp(shape, tensor_shape(catalog, tensor), (size_t)ndim * sizeof *shape) == 0,
            "ranks disagree on the dtype or shape"));
        entries[i].first_box = tensor->nboxes;
        TRY(add_chunks(reader, entries[i].part, pickle_find(tree, state, "chunks"), ndim));
    }
    return RSD_OK;
}

/* Adds the tensor or value that has these entries, one per part. */
static rsd_status add_metadata_group(struct metadata_reader *reader, struct slice name,
                                     struct metadata_entry *entries, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        TRY(metadata_check(entries[i].part != entries[i - 1].part, "name is not unique"));
        TRY(metadata_check(entries[i].value == entries[0].value,
                           "name is a tensor on one rank and a value on another"));
    }
    if (!entries[0].value)
        return add_metadata_tensor(reader, entries, n);
    return catalog_add_value(reader->catalog, name, (struct extent){.kind = EXTENT_NONE}, NULL);
}

/* Adds all tensors and values. The entries of one name, one for each part of the metadata, are a group. */
static rsd_status add_metadata_groups(struct metadata_reader *reader)
{
    for (size_t i = 0, n; i < reader->nentries; i += n) {
        struct metadata_entry *entries = &reader->entries[i];
        for (n = 1; i + n < reader->nentries && entries[n].ordinal == entries[0].ordinal; n++)
            continue;
        struct slice name = pickle_text(&reader->parts[entries[0].part].tree, entries[0].name);
        struct catalog *catalog = reader->catalog;
        reader->number[entries[0].ordinal] =
            entries[0].value ? catalog->nvalues : catalog->ntensors;
        rsd_status status = add_metadata_group(reader, name, entries, n);
        if (status)
            return fail_in(status, "%.*s: ", slice_width(name, 300), name.bytes);
    }
    return RSD_OK;
}

/* ---- storage ---- */

/* Keeps the names of an item's transforms, one of which is unknown. Equal lists are kept once. */
static rsd_status keep_transforms(struct metadata_reader *reader, struct slice unknown,
                                  struct slice names, struct extent *extent)
{
    struct catalog *catalog = reader->catalog;
    struct stored_transforms kept;
    size_t number;
    if (!string_map_find(&reader->unknown, names, &number)) {
        number = catalog->ntransforms;
        TRY(catalog_add_name(catalog, unknown, &kept.unknown));
        TRY(catalog_add_name(catalog, names, &kept.names));
        TRY(GROW(catalog->transforms, catalog->transforms_capacity, number + 1));
        TRY(string_map_add(&reader->unknown, (struct slice){kept.names, names.nbytes}, number));
        catalog->transforms[catalog->ntransforms++] = kept;
    }
    extent->unknown = 1;
    extent->detail = (uint32_t)number;
    return RSD_OK;
}

/* Reads how an item is encoded. An unknown transform is kept for the error of a read. */
static rsd_status take_transforms(struct metadata_reader *reader, const struct pickle_tree *tree,
                                  pickle_node list, struct extent *extent)
{
    struct slice unknown = {0};
    struct text names = {0};
    if (list == PICKLE_ABSENT || list == PICKLE_NONE)
        return RSD_OK;
    TRY(metadata_check(pickle_kind(tree, list) == NODE_LIST, "transforms are not a list"));
    rsd_status status = metadata_take_transforms(tree, list, extent, &unknown, &names);
    if (!status && unknown.bytes)
        status =
            keep_transforms(reader, unknown, (struct slice){names.chars, names.length}, extent);
    text_drop(&names);
    return status;
}

/* Reads where an item is stored: the file, the offset, the length and the transforms. */
static rsd_status take_storage_info(struct metadata_reader *reader, const struct pickle_tree *tree,
                                    pickle_node info, struct extent *extent)
{
    pickle_node state = metadata_state(tree, info, KNOWN_STORAGE_INFO);
    pickle_node path = pickle_find(tree, state, "relative_path");
    int64_t offset, length;
    TRY(metadata_check(pickle_as_i64(tree, pickle_find(tree, state, "offset"), &offset) &&
                           offset >= 0 &&
                           pickle_as_i64(tree, pickle_find(tree, state, "length"), &length) &&
                           length >= 0 && pickle_kind(tree, path) == NODE_STRING,
                       "storage information is invalid"));
    *extent = (struct extent){
        .kind = EXTENT_ITEM, .offset = (uint64_t)offset, .nbytes = (uint64_t)length};
    TRY(take_transforms(reader, tree, pickle_find(tree, state, "transform_descriptors"), extent));
    return format_add_file(reader->store, reader->directory, pickle_text(tree, path),
                           &extent->file);
}

static int by_box_offset(const void *a, const void *b, void *ndim)
{
    const int64_t *x = a, *y = b; /* lo, then the number of the box */
    for (int32_t d = 0; d < *(const int32_t *)ndim; d++)
        if (x[d] != y[d])
            return x[d] < y[d] ? -1 : 1;
    return 0;
}

/* Sorts the boxes of a tensor by offset, unless it is done already. */
static rsd_status sort_tensor_boxes(struct metadata_reader *reader, size_t ordinal,
                                    const struct stored_tensor *tensor)
{
    int32_t ndim = tensor->ndim;
    size_t width = (size_t)ndim + 1;
    if (!reader->sorted)
        reader->sorted = mem_new(reader->names.n, sizeof *reader->sorted);
    if (!reader->sorted)
        return RSD_ENOMEM;
    if (reader->sorted[ordinal])
        return RSD_OK;
    if (!budget_take(tensor->nboxes * SORT_STEPS) ||
        !budget_take_memory(tensor->nboxes * width * sizeof **reader->sorted))
        return budget_fail();
    int64_t *sorted = mem_new(tensor->nboxes * width, sizeof *sorted);
    if (!sorted)
        return RSD_ENOMEM;
    reader->sorted[ordinal] = sorted;
    for (size_t i = 0; i < tensor->nboxes; i++) {
        copy_i64s(sorted + i * width, tensor_box_lo(reader->catalog, tensor, i), ndim);
        sorted[i * width + (size_t)ndim] = (int64_t)i;
    }
    qsort_r(sorted, tensor->nboxes, width * sizeof *sorted, by_box_offset, &ndim);
    return RSD_OK;
}

/* Finds the box of a tensor that begins at lo; *box is nboxes if no box does. */
static rsd_status find_tensor_box(struct metadata_reader *reader, size_t ordinal,
                                  const struct stored_tensor *tensor, size_t hint,
                                  const int64_t *lo, size_t *box)
{
    int32_t ndim = tensor->ndim;
    size_t width = (size_t)ndim + 1, first = 0, end = tensor->nboxes;
    *box = hint;
    if (hint < tensor->nboxes &&
        by_box_offset(tensor_box_lo(reader->catalog, tensor, hint), lo, &ndim) == 0)
        return RSD_OK;
    TRY(sort_tensor_boxes(reader, ordinal, tensor));
    const int64_t *sorted = reader->sorted[ordinal];
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (by_box_offset(sorted + middle * width, lo, &ndim) < 0)
            first = middle + 1;
        else
            end = middle;
    }
    bool found = first < tensor->nboxes && by_box_offset(sorted + first * width, lo, &ndim) == 0;
    *box = found ? (size_t)sorted[first * width + (size_t)ndim] : tensor->nboxes;
    return RSD_OK;
}

static const struct metadata_entry *find_metadata_entry(const struct metadata_reader *reader,
                                                        size_t ordinal, size_t part)
{
    const struct metadata_entry key = {.ordinal = ordinal, .part = part};
    if (reader->nparts == 1 && reader->nentries == reader->names.n)
        return &reader->entries[ordinal];
    return bsearch(&key, reader->entries, reader->nentries, sizeof key, by_ordinal_and_part);
}

/* Sets the extent of a value, or of the box of a tensor that a storage index names. */
static rsd_status place_item(struct metadata_reader *reader, size_t part, pickle_node state,
                             size_t ordinal, const struct metadata_entry *entry,
                             struct extent extent)
{
    const struct pickle_tree *tree = &reader->parts[part].tree;
    pickle_node offset = pickle_find(tree, state, "offset");
    int64_t lo[RSD_MAX_DIMS] = {0}, index = 0;
    size_t box;
    if (entry->value) {
        reader->catalog->values[reader->number[ordinal]].extent = extent;
        return RSD_OK; /* of two entries with one index, the last one counts, as in Python */
    }
    const struct stored_tensor *tensor = &reader->catalog->tensors[reader->number[ordinal]];
    if (offset != PICKLE_ABSENT && offset != PICKLE_NONE)
        TRY(metadata_check(pickle_take_numbers(tree, offset, tensor->ndim, lo) == tensor->ndim,
                           "offset of the chunk is invalid"));
    bool hinted = pickle_as_i64(tree, pickle_find(tree, state, "index"), &index) && index >= 0;
    TRY(find_tensor_box(reader, ordinal, tensor,
                        hinted ? entry->first_box + (size_t)index : SIZE_MAX, lo, &box));
    if (box < tensor->nboxes)
        reader->catalog->extents[tensor->first_extent + box] = extent;
    return RSD_OK;
}

/* Reads one entry of storage_data: an index and where its bytes are. */
static rsd_status add_storage(struct metadata_reader *reader, size_t part, pickle_node key,
                              pickle_node info)
{
    const struct pickle_tree *tree = &reader->parts[part].tree;
    pickle_node state = metadata_state(tree, key, KNOWN_INDEX),
                fqn = pickle_find(tree, state, "fqn");
    struct slice name = pickle_text(tree, fqn);
    struct extent extent;
    size_t ordinal;
    TRY(metadata_check(pickle_kind(tree, fqn) == NODE_STRING, "storage index has no name"));
    rsd_status status = take_storage_info(reader, tree, info, &extent);
    const struct metadata_entry *entry = string_map_find(&reader->names, name, &ordinal)
                                             ? find_metadata_entry(reader, ordinal, part)
                                             : NULL;
    if (!status && entry) /* else no tensor or value refers to it */
        status = place_item(reader, part, state, ordinal, entry, extent);
    return status ? fail_in(status, "%.*s: ", slice_width(name, 300), name.bytes) : RSD_OK;
}

/* Locates the bytes of all boxes and values. */
static rsd_status add_storages(struct metadata_reader *reader)
{
    for (size_t part = 0; part < reader->nparts; part++) {
        const struct pickle_tree *tree = &reader->parts[part].tree;
        struct pickle_walk walk = pickle_walk(tree, reader->parts[part].storage);
        pickle_node key, info;
        TRY(metadata_check(pickle_kind(tree, reader->parts[part].storage) == NODE_DICT,
                           "storage_data is missing"));
        while (pickle_walk_next_pair(&walk, &key, &info))
            TRY(add_storage(reader, part, key, info));
    }
    return RSD_OK;
}

/* ---- paths in the nested state dict ---- */

/* Says whether a path is a tuple of keys, which are texts without NUL, and of indices. */
static bool is_plain_path(const struct pickle_tree *tree, pickle_node path)
{
    bool fine = pickle_kind(tree, path) == NODE_TUPLE &&
                pickle_count(tree, path) <= MAX_PATH_STEPS && budget_take(pickle_count(tree, path));
    for (uint32_t i = 0; fine && i < pickle_count(tree, path); i++) {
        pickle_node step = pickle_item(tree, path, i);
        int64_t index;
        if (pickle_kind(tree, step) == NODE_STRING) {
            struct slice key = pickle_text(tree, step);
            fine = budget_take(1 + key.nbytes / 64) && !memchr(key.bytes, 0, key.nbytes);
        } else
            fine = pickle_kind(tree, step) == NODE_INT && pickle_as_i64(tree, step, &index) &&
                   index >= 0;
    }
    return fine;
}

/* Sets the path of a tensor or value in the nested state dict. Ignores a path that is not plain. */
static rsd_status add_metadata_path(struct metadata_reader *reader, size_t part, pickle_node name,
                                    pickle_node path)
{
    const struct pickle_tree *tree = &reader->parts[part].tree;
    size_t ordinal;
    char *json;
    const char *kept;
    if (pickle_kind(tree, name) != NODE_STRING || !is_plain_path(tree, path) ||
        !string_map_find(&reader->names, pickle_text(tree, name), &ordinal))
        return RSD_OK;
    const struct metadata_entry *entry = find_metadata_entry(reader, ordinal, part);
    TRY(pickle_to_json(tree, path, &json));
    size_t n = json ? strlen(json) : 0;
    if (!entry || !json) {
        mem_free(json);
        return RSD_OK;
    }
    rsd_status status = catalog_add_name(reader->catalog, (struct slice){json, n}, &kept);
    mem_free(json);
    TRY(status);
    if (entry->value)
        reader->catalog->values[reader->number[ordinal]].path = kept;
    else
        reader->catalog->tensors[reader->number[ordinal]].path = kept;
    return RSD_OK;
}

static rsd_status add_metadata_paths(struct metadata_reader *reader)
{
    for (size_t part = 0; part < reader->nparts; part++) {
        struct pickle_walk walk =
            pickle_walk(&reader->parts[part].tree, reader->parts[part].planner);
        pickle_node name, path;
        while (pickle_walk_next_pair(&walk, &name, &path))
            TRY(add_metadata_path(reader, part, name, path));
    }
    return RSD_OK;
}

/* ---- opening ---- */

/* Takes the id that the writer assigned to the save, if there is one. */
static rsd_status take_save_id(struct metadata_reader *reader, const struct pickle_tree *tree,
                               pickle_node storage_meta)
{
    pickle_node id =
        pickle_find(tree, metadata_state(tree, storage_meta, KNOWN_STORAGE_META), "save_id");
    struct slice text = pickle_text(tree, id);
    if (pickle_kind(tree, id) != NODE_STRING || memchr(text.bytes, '\0', text.nbytes))
        return RSD_OK;
    return catalog_add_name(reader->catalog, text, &reader->catalog->save_id);
}

/* Reads the pickle of one metadata file, and finds its three parts. */
static rsd_status load_metadata_part(struct metadata_reader *reader, uint32_t file,
                                     struct metadata_part *part)
{
    struct store_range range = {.store = reader->store, .file = file};
    uint64_t nbytes, used;
    pickle_node root;
    part->file = file;
    rsd_status status = store_stat(reader->store, file, &nbytes, NULL);
    if (!status)
        status = pickle_read(store_range_read, &range, nbytes, &part->tree, &root, &used);
    if (!status) {
        reader->nparts++;
        reader->boxes_left += nbytes;
        pickle_node state = metadata_state(&part->tree, root, KNOWN_METADATA);
        part->tensors = pickle_find(&part->tree, state, "state_dict_metadata");
        part->storage = pickle_find(&part->tree, state, "storage_data");
        part->planner = pickle_find(&part->tree, state, "planner_data");
        if (pickle_kind(&part->tree, part->tensors) != NODE_DICT)
            status = metadata_fail_without(&part->tree, root);
        else
            status =
                take_save_id(reader, &part->tree, pickle_find(&part->tree, state, "storage_meta"));
    }
    return status ? store_fail_in(reader->store, file, status) : RSD_OK;
}

rsd_status dcp_open_from(struct store *store, uint32_t first, struct catalog *catalog)
{
    const char *name = store_file_name(store, first), *slash = strrchr(name, '/');
    char *directory = slice_copy((struct slice){name, slash ? (size_t)(slash - name) : 0});
    struct metadata_reader reader = {.catalog = catalog, .store = store, .directory = directory};
    uint32_t n = (uint32_t)store->names.n - first;
    reader.parts = mem_new(n, sizeof *reader.parts);
    rsd_status status = reader.parts && directory ? RSD_OK : RSD_ENOMEM;
    for (uint32_t i = 0; i < n && !status; i++)
        status = load_metadata_part(&reader, first + i, &reader.parts[i]);
    bool parsed = !status;
    if (!status)
        status = find_metadata_entries(&reader);
    if (!status)
        status = add_metadata_groups(&reader);
    if (!status)
        status = add_storages(&reader);
    if (!status)
        status = add_metadata_paths(&reader);
    if (status && parsed)
        status = store_fail_in(store, first, status);
    if (!status && pickle_kind(&reader.parts[0].tree, reader.parts[0].planner) != NODE_DICT)
        status = megatron_read_common(store, directory, catalog);
    for (size_t i = 0; i < reader.nparts; i++)
        pickle_tree_drop(&reader.parts[i].tree);
    mem_free(directory);
    mem_free(reader.parts);
    mem_free(reader.entries);
    mem_free(reader.number);
    for (size_t i = 0; reader.sorted && i < reader.names.n; i++)
        mem_free(reader.sorted[i]);
    mem_free(reader.sorted);
    string_map_drop(&reader.names);
    string_map_drop(&reader.unknown);
    return status;
}

rsd_status dcp_open(struct store *store, struct catalog *catalog, const rsd_open_options *options)
{
    (void)options;
    return dcp_open_from(store, 0, catalog);
}
