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
 * The size of the catalog is limited by the length of the pickles: otherwise a short pickle could refer to
 * one list many times.
 */
#include "pickle.h"
#include "rows.h"
#include "torch_item.h"

#include <stdlib.h>
#include <string.h>

enum { START_PATH_NBYTES = 1 << 16, MAX_GROWTH = 64, MAX_PATH_STEPS = 1000 };

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
    struct metadata_part *parts;
    size_t nparts;
    uint64_t boxes_left;            /* that may still be added */
    uint64_t path_nbytes_left;      /* that paths may still take */
    struct string_map names;        /* to ordinals */
    struct string_map paths;        /* to numbers of files */
    struct string_map unknown;      /* names of transforms, to their numbers */
    struct metadata_entry *entries; /* by ordinal, then part */
    size_t nentries, entries_capacity;
    size_t *number;  /* of the tensor or value in the catalog, by ordinal */
    int64_t *sorted; /* boxes of one tensor by offset, made when an index is wrong */
    size_t sorted_ordinal;
};

/* ---- parts of the pickle ---- */

static rsd_status check_metadata(bool holds, const char *what)
{
    return holds ? RSD_OK : fail(RSD_EFORMAT, "%s", what);
}

/* Returns the state of an instance of a known class; PICKLE_ABSENT for any other value. */
static pickle_node object_state(const struct pickle_tree *tree, pickle_node c, enum known known)
{
    if (pickle_kind(tree, c) != NODE_OBJECT ||
        pickle_known(tree, pickle_part(tree, c, NODE_WHAT)) != known)
        return PICKLE_ABSENT;
    return pickle_part(tree, c, NODE_STATE);
}

static bool take_sizes(const struct pickle_tree *tree, pickle_node tuple, int32_t ndim,
                       int64_t *out)
{
    if (pickle_kind(tree, tuple) != NODE_TUPLE || pickle_count(tree, tuple) != (uint32_t)ndim)
        return false;
    for (int32_t d = 0; d < ndim; d++)
        if (!pickle_as_i64(tree, pickle_item(tree, tuple, (uint32_t)d), &out[d]) || out[d] < 0 ||
            out[d] > MAX_EXTENT)
            return false;
    return true;
}

/* Takes the dtype from (dtype, layout, requires_grad, memory format, pinned [, strides]). */
static rsd_status take_metadata_dtype(const struct pickle_tree *tree, pickle_node properties,
                                      rsd_dtype *dtype)
{
    pickle_node state = object_state(tree, properties, KNOWN_TENSOR_PROPERTIES);
    char text[GLOBAL_TEXT_NCHARS];
    TRY(check_metadata(pickle_kind(tree, state) == NODE_TUPLE && pickle_count(tree, state) >= 5,
                       "properties of the tensor are invalid"));
    pickle_node name = pickle_item(tree, state, 0);
    *dtype = (rsd_dtype)0;
    if (pickle_known(tree, name) == KNOWN_TORCH_NAME)
        *dtype = dtype_from_torch(pickle_text(tree, pickle_part(tree, name, NODE_ARGS)));
    return *dtype ? RSD_OK
                  : fail(RSD_EUNSUPPORTED, "dtype %s is not supported",
                         pickle_global_text(tree, name, text));
}

/* ---- entries ---- */

/* Adds a tensor or value of one part to the list of entries. */
static rsd_status add_metadata_entry(struct metadata_reader *reader, size_t part, pickle_node name,
                                     pickle_node meta)
{
    const struct pickle_tree *tree = &reader->parts[part].tree;
    struct metadata_entry entry = {.part = part, .name = name, .meta = meta};
    struct slice text = pickle_text(tree, name);
    TRY(check_metadata(pickle_kind(tree, name) == NODE_STRING && text.nbytes > 0,
                       "tensor name is empty or not a string"));
    bool object = pickle_kind(tree, meta) == NODE_OBJECT;
    enum known known = object ? pickle_known(tree, pickle_part(tree, meta, NODE_WHAT)) : KNOWN_NOT;
    entry.value = known == KNOWN_BYTES_STORAGE;
    if (!entry.value && known != KNOWN_TENSOR_STORAGE)
        return fail(RSD_EFORMAT, "%.*s is neither a tensor nor a value",
                    (int)(text.nbytes < 300 ? text.nbytes : 300), text.bytes);
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

/* Lists the tensors and values of all parts, by name and part. */
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

static rsd_status add_chunks(struct metadata_reader *reader, size_t part, pickle_node chunks,
                             int32_t ndim)
{
    const struct pickle_tree *tree = &reader->parts[part].tree;
    const struct extent nowhere = {.kind = EXTENT_NONE, .file = reader->parts[part].file};
    struct pickle_walk walk = pickle_walk(tree, chunks);
    pickle_node chunk;
    TRY(check_metadata(pickle_kind(tree, chunks) == NODE_LIST, "chunks are not a list"));
    while (pickle_walk_next(&walk, &chunk)) {
        int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
        pickle_node state = object_state(tree, chunk, KNOWN_CHUNK);
        TRY(check_metadata(reader->boxes_left-- > 0, "metadata has more chunks than bytes"));
        TRY(check_metadata(take_sizes(tree, pickle_find(tree, state, "offsets"), ndim, lo) &&
                               take_sizes(tree, pickle_find(tree, state, "sizes"), ndim, len),
                           "chunk has invalid offsets or sizes"));
        TRY(catalog_add_box(reader->catalog, lo, len, nowhere));
    }
    return RSD_OK;
}

static rsd_status take_metadata_tensor(const struct pickle_tree *tree, pickle_node meta,
                                       rsd_dtype *dtype, int32_t *ndim, int64_t *shape)
{
    pickle_node state = pickle_part(tree, meta, NODE_STATE),
                size = pickle_find(tree, state, "size");
    uint32_t n = pickle_count(tree, size);
    if (n > RSD_MAX_DIMS && pickle_kind(tree, size) == NODE_TUPLE)
        return fail(RSD_EUNSUPPORTED, "tensor has %u dims; the limit is %d", n, (int)RSD_MAX_DIMS);
    TRY(check_metadata(take_sizes(tree, size, (int32_t)n, shape), "size of the tensor is invalid"));
    *ndim = (int32_t)n;
    return take_metadata_dtype(tree, pickle_find(tree, state, "properties"), dtype);
}

/* Adds one tensor, from its entries in all parts. */
static rsd_status add_metadata_tensor(struct metadata_reader *reader,
                                      struct metadata_entry *entries, size_t n)
{
    const struct pickle_tree *tree = &reader->parts[entries[0].part].tree;
    rsd_dtype dtype, other_dtype;
    int32_t ndim, other_ndim;
    int64_t shape[RSD_MAX_DIMS] = {0}, other[RSD_MAX_DIMS] = {0};
    TRY(take_metadata_tensor(tree, entries[0].meta, &dtype, &ndim, shape));
    TRY(catalog_add_tensor(reader->catalog, pickle_text(tree, entries[0].name), dtype, ndim,
                           shape));
    struct stored_tensor *tensor = &reader->catalog->tensors[reader->catalog->ntensors - 1];
    for (size_t i = 0; i < n; i++) {
        tree = &reader->parts[entries[i].part].tree;
        TRY(take_metadata_tensor(tree, entries[i].meta, &other_dtype, &other_ndim, other));
        TRY(check_metadata(other_dtype == dtype && other_ndim == ndim &&
                               memcmp(shape, other, (size_t)ndim * sizeof *shape) == 0,
                           "ranks disagree on the dtype or shape"));
        entries[i].first_box = tensor->nboxes;
        pickle_node state = pickle_part(tree, entries[i].meta, NODE_STATE);
        TRY(add_chunks(reader, entries[i].part, pickle_find(tree, state, "chunks"), ndim));
    }
    return RSD_OK;
}

/* Adds the tensor or value that has these entries, one per part. */
static rsd_status add_metadata_group(struct metadata_reader *reader, struct slice name,
                                     struct metadata_entry *entries, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        TRY(check_metadata(entries[i].part != entries[i - 1].part, "name is not unique"));
        TRY(check_metadata(entries[i].value == entries[0].value,
                           "name is a tensor on one rank and a value on another"));
    }
    if (!entries[0].value)
        return add_metadata_tensor(reader, entries, n);
    return catalog_add_value(reader->catalog, name, (struct extent){.kind = EXTENT_NONE}, NULL);
}

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
            return fail_in(status, "%.*s: ", (int)(name.nbytes < 300 ? name.nbytes : 300),
                           name.bytes);
    }
    return RSD_OK;
}

/* ---- storage ---- */

static rsd_status find_data_file(struct metadata_reader *reader, struct slice path, uint32_t *file)
{
    size_t number;
    if (!string_map_find(&reader->paths, path, &number)) {
        TRY(store_add_file(reader->store, path, file));
        number = *file;
        TRY(string_map_add(&reader->paths, path, number));
    }
    *file = (uint32_t)number;
    return RSD_OK;
}

/* Marks an extent whose item went through an unknown transform. */
static rsd_status take_unknown_transform(struct metadata_reader *reader, struct slice name,
                                         struct extent *extent)
{
    struct catalog *catalog = reader->catalog;
    size_t number;
    if (!string_map_find(&reader->unknown, name, &number)) {
        const char *kept;
        number = catalog->ntransforms;
        TRY(catalog_add_name(catalog, name, &kept));
        TRY(GROW(catalog->transforms, catalog->transforms_capacity, number + 1));
        TRY(string_map_add(&reader->unknown, (struct slice){kept, name.nbytes}, number));
        catalog->transforms[catalog->ntransforms++] = kept;
    }
    extent->unknown = 1;
    extent->detail = (uint32_t)number;
    return RSD_OK;
}

/* Takes a list with "stream.zstd/1" for each compression; an item with another name cannot be read. */
static rsd_status take_transforms(struct metadata_reader *reader, const struct pickle_tree *tree,
                                  pickle_node list, struct extent *extent)
{
    struct pickle_walk walk = pickle_walk(tree, list);
    pickle_node item;
    TRY(check_metadata(list == PICKLE_ABSENT || list == PICKLE_NONE ||
                           pickle_kind(tree, list) == NODE_LIST,
                       "transforms are not a list"));
    while (pickle_walk_next(&walk, &item)) {
        struct slice name = pickle_text(tree, item);
        TRY(check_metadata(pickle_kind(tree, item) == NODE_STRING,
                           "name of a transform is not a string"));
        if (slice_is(name, "stream.zstd/1") || slice_is(name, "stream.zstd")) {
            TRY(check_metadata(extent->nzstd++ < 8, "item was compressed more than 8 times"));
            continue;
        }
        TRY(take_unknown_transform(reader, name, extent));
    }
    return RSD_OK;
}

static rsd_status take_storage_info(struct metadata_reader *reader, const struct pickle_tree *tree,
                                    pickle_node info, struct extent *extent)
{
    pickle_node state = object_state(tree, info, KNOWN_STORAGE_INFO);
    pickle_node path = pickle_find(tree, state, "relative_path");
    int64_t offset, length;
    TRY(check_metadata(pickle_as_i64(tree, pickle_find(tree, state, "offset"), &offset) &&
                           offset >= 0 &&
                           pickle_as_i64(tree, pickle_find(tree, state, "length"), &length) &&
                           length >= 0 && pickle_kind(tree, path) == NODE_STRING,
                       "storage information is invalid"));
    *extent = (struct extent){
        .kind = EXTENT_ITEM, .offset = (uint64_t)offset, .nbytes = (uint64_t)length};
    TRY(take_transforms(reader, tree, pickle_find(tree, state, "transform_descriptors"), extent));
    return find_data_file(reader, pickle_text(tree, path), &extent->file);
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
    if (reader->sorted && reader->sorted_ordinal == ordinal)
        return RSD_OK;
    mem_free(reader->sorted);
    reader->sorted = mem_new(tensor->nboxes * width, sizeof *reader->sorted);
    if (!reader->sorted)
        return RSD_ENOMEM;
    reader->sorted_ordinal = ordinal;
    for (size_t i = 0; i < tensor->nboxes; i++) {
        copy_i64s(reader->sorted + i * width, tensor_box_lo(reader->catalog, tensor, i), ndim);
        reader->sorted[i * width + (size_t)ndim] = (int64_t)i;
    }
    qsort_r(reader->sorted, tensor->nboxes, width * sizeof *reader->sorted, by_box_offset, &ndim);
    return RSD_OK;
}

/* Finds the box of a tensor that begins at lo; *box is nboxes if there is none. */
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
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (by_box_offset(reader->sorted + middle * width, lo, &ndim) < 0)
            first = middle + 1;
        else
            end = middle;
    }
    bool found =
        first < tensor->nboxes && by_box_offset(reader->sorted + first * width, lo, &ndim) == 0;
    *box = found ? (size_t)reader->sorted[first * width + (size_t)ndim] : tensor->nboxes;
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
        struct stored_value *value = &reader->catalog->values[reader->number[ordinal]];
        if (value->extent.kind == EXTENT_NONE)
            value->extent = extent;
        return RSD_OK;
    }
    const struct stored_tensor *tensor = &reader->catalog->tensors[reader->number[ordinal]];
    if (offset != PICKLE_ABSENT && offset != PICKLE_NONE)
        TRY(check_metadata(take_sizes(tree, offset, tensor->ndim, lo),
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
    pickle_node state = object_state(tree, key, KNOWN_INDEX), fqn = pickle_find(tree, state, "fqn");
    struct slice name = pickle_text(tree, fqn);
    struct extent extent;
    size_t ordinal;
    TRY(check_metadata(pickle_kind(tree, fqn) == NODE_STRING, "storage index has no name"));
    rsd_status status = take_storage_info(reader, tree, info, &extent);
    const struct metadata_entry *entry = string_map_find(&reader->names, name, &ordinal)
                                             ? find_metadata_entry(reader, ordinal, part)
                                             : NULL;
    if (!status && entry) /* else no tensor or value refers to it */
        status = place_item(reader, part, state, ordinal, entry, extent);
    return status
               ? fail_in(status, "%.*s: ", (int)(name.nbytes < 300 ? name.nbytes : 300), name.bytes)
               : RSD_OK;
}

static rsd_status add_storages(struct metadata_reader *reader)
{
    for (size_t part = 0; part < reader->nparts; part++) {
        const struct pickle_tree *tree = &reader->parts[part].tree;
        struct pickle_walk walk = pickle_walk(tree, reader->parts[part].storage);
        pickle_node key, info;
        TRY(check_metadata(pickle_kind(tree, reader->parts[part].storage) == NODE_DICT,
                           "storage_data is missing"));
        while (pickle_walk_next_pair(&walk, &key, &info))
            TRY(add_storage(reader, part, key, info));
    }
    return RSD_OK;
}

/* ---- paths in the nested state dict ---- */

/* Says whether a path is a tuple of texts and numbers. */
static bool is_plain_path(const struct pickle_tree *tree, pickle_node path)
{
    bool fine = pickle_kind(tree, path) == NODE_TUPLE && pickle_count(tree, path) <= MAX_PATH_STEPS;
    for (uint32_t i = 0; fine && i < pickle_count(tree, path); i++) {
        enum pickle_kind kind = pickle_kind(tree, pickle_item(tree, path, i));
        fine = kind == NODE_STRING || kind == NODE_INT;
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
    rsd_status status = check_metadata(n <= reader->path_nbytes_left,
                                       "paths are more than 64 times as long as the metadata");
    if (!status)
        status = catalog_add_name(reader->catalog, (struct slice){json, n}, &kept);
    mem_free(json);
    TRY(status);
    reader->path_nbytes_left -= n;
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

/* Fails, and names the global that the pickle would have called. */
static rsd_status fail_without_metadata(const struct pickle_tree *tree, pickle_node root)
{
    enum pickle_kind kind = pickle_kind(tree, root);
    pickle_node what =
        kind == NODE_CALL || kind == NODE_OBJECT ? pickle_part(tree, root, NODE_WHAT) : root;
    if (pickle_kind(tree, what) != NODE_GLOBAL)
        return check_metadata(false,
                              "state_dict_metadata is missing; the pickle is not metadata of DCP");
    struct slice module = pickle_text(tree, pickle_part(tree, what, NODE_WHAT));
    struct slice name = pickle_text(tree, pickle_part(tree, what, NODE_ARGS));
    return fail(RSD_EFORMAT, "pickle is not metadata of DCP: it calls %.*s.%.*s, which is refused",
                (int)(module.nbytes < 100 ? module.nbytes : 100), module.bytes,
                (int)(name.nbytes < 100 ? name.nbytes : 100), name.bytes);
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
        reader->path_nbytes_left += START_PATH_NBYTES + nbytes * MAX_GROWTH;
        pickle_node state = object_state(&part->tree, root, KNOWN_METADATA);
        part->tensors = pickle_find(&part->tree, state, "state_dict_metadata");
        part->storage = pickle_find(&part->tree, state, "storage_data");
        part->planner = pickle_find(&part->tree, state, "planner_data");
        if (pickle_kind(&part->tree, part->tensors) != NODE_DICT)
            status = fail_without_metadata(&part->tree, root);
    }
    return status ? store_fail_in(reader->store, file, status) : RSD_OK;
}

rsd_status dcp_open(struct store *store, struct catalog *catalog)
{
    struct metadata_reader reader = {.catalog = catalog, .store = store};
    size_t n = store->names.n;
    reader.parts = mem_new(n, sizeof *reader.parts);
    rsd_status status = reader.parts ? RSD_OK : RSD_ENOMEM;
    for (uint32_t i = 0; i < n && !status; i++)
        status = load_metadata_part(&reader, i, &reader.parts[i]);
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
        status = store_fail_in(store, 0, status);
    for (size_t i = 0; i < reader.nparts; i++)
        pickle_tree_drop(&reader.parts[i].tree);
    mem_free(reader.parts);
    mem_free(reader.entries);
    mem_free(reader.number);
    mem_free(reader.sorted);
    string_map_drop(&reader.names);
    string_map_drop(&reader.paths);
    string_map_drop(&reader.unknown);
    return status;
}
