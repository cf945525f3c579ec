/* dcp.c - opens PyTorch's distributed checkpoints: what their metadata says, turned into contents.
 *
 *     Metadata
 *       state_dict_metadata   name -> TensorStorageMetadata(properties, size, chunks), or bytes
 *       storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
 *       planner_data          name -> where it was in the nested state dict
 *
 * The metadata is one pickle, or one per rank if it was saved without collectives; those are joined.
 * Offsets that it gives are trusted, never derived from placements, but every box must lie inside its
 * tensor. Which chunk an entry of storage_data belongs to is found by the hint that torch writes with it,
 * or else by its offset.
 *
 * What is made is bounded by the length of the pickles: a list that is referred to many times would
 * otherwise make much out of little.
 */
#include "pickle.h"
#include "rows.h"
#include "torch_item.h"

#include <stdlib.h>
#include <string.h>

enum { START_PATHS = 1 << 16, MOST_GROWTH = 64, MOST_PATH = 1000 };

/* What one rank says, or all of them together. */
struct rank_part {
    struct pickle_tree tree;
    pickle_node tensors, storage, planner;
    uint32_t file;
};

/* A tensor or value in one part. */
struct entry {
    size_t ordinal; /* of its name, by first appearance */
    size_t part;
    pickle_node name, meta;
    size_t first_box; /* of this part's boxes in the tensor */
    bool value;
};

struct loading {
    struct catalog *catalog;
    struct store *store;
    struct rank_part *parts;
    size_t nparts;
    uint64_t budget;           /* boxes that may still be made */
    uint64_t capacity;         /* bytes that paths may still take */
    struct string_map names;   /* to ordinals */
    struct string_map paths;   /* to numbers of files */
    struct string_map unknown; /* names of transforms, to their numbers */
    struct entry *entries;     /* by ordinal, then part */
    size_t nentries, entries_capacity;
    size_t *number;  /* by ordinal: of the tensor, or of the value */
    int64_t *sorted; /* boxes of one tensor by place, made when hints are wrong */
    size_t sorted_ordinal;
};

/* ---- parts of the pickle ---- */

static rsd_status expect(bool holds, const char *what)
{
    return holds ? RSD_OK : fail(RSD_EFORMAT, "the metadata has %s", what);
}

/* The state of an instance of a class that we know. PICKLE_ABSENT: it is none. */
static pickle_node state_of(const struct pickle_tree *tree, pickle_node c, enum known known)
{
    if (pickle_kind(tree, c) != NODE_OBJECT ||
        pickle_known(tree, pickle_part(tree, c, NODE_WHAT)) != known)
        return PICKLE_ABSENT;
    return pickle_part(tree, c, NODE_STATE);
}

static bool take_extents(const struct pickle_tree *tree, pickle_node tuple, int32_t ndim,
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

/* The dtype in (dtype, layout, requires_grad, memory format, pinned [, strides]). */
static rsd_status take_dtype(const struct pickle_tree *tree, pickle_node properties,
                             rsd_dtype *dtype)
{
    pickle_node state = state_of(tree, properties, KNOWN_TENSOR_PROPERTIES);
    char text[GLOBAL_TEXT_NCHARS];
    TRY(expect(pickle_kind(tree, state) == NODE_TUPLE && pickle_count(tree, state) >= 5,
               "properties that are none"));
    pickle_node name = pickle_item(tree, state, 0);
    *dtype = (rsd_dtype)0;
    if (pickle_known(tree, name) == KNOWN_TORCH_NAME)
        *dtype = dtype_from_torch(pickle_text(tree, pickle_part(tree, name, NODE_ARGS)));
    return *dtype ? RSD_OK
                  : fail(RSD_EUNSUPPORTED, "a tensor of the dtype %s, which is not known here",
                         pickle_global_text(tree, name, text));
}

/* ---- entries ---- */

static rsd_status add_entry(struct loading *l, size_t part, pickle_node name, pickle_node meta)
{
    const struct pickle_tree *tree = &l->parts[part].tree;
    struct entry entry = {.part = part, .name = name, .meta = meta};
    struct slice text = pickle_text(tree, name);
    TRY(expect(pickle_kind(tree, name) == NODE_STRING && text.nbytes > 0,
               "a name that is no text"));
    bool object = pickle_kind(tree, meta) == NODE_OBJECT;
    enum known known = object ? pickle_known(tree, pickle_part(tree, meta, NODE_WHAT)) : KNOWN_NOT;
    entry.value = known == KNOWN_BYTES_STORAGE;
    if (!entry.value && known != KNOWN_TENSOR_STORAGE)
        return fail(RSD_EFORMAT, "%.*s is neither a tensor nor a value",
                    (int)(text.nbytes < 300 ? text.nbytes : 300), text.bytes);
    if (!string_map_find(&l->names, text, &entry.ordinal)) {
        entry.ordinal = l->names.n;
        TRY(string_map_add(&l->names, text, entry.ordinal));
    }
    TRY(GROW(l->entries, l->entries_capacity, l->nentries + 1));
    l->entries[l->nentries++] = entry;
    return RSD_OK;
}

static int by_ordinal_then_part(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->ordinal != y->ordinal)
        return x->ordinal < y->ordinal ? -1 : 1;
    return (x->part > y->part) - (x->part < y->part);
}

static rsd_status find_entries(struct loading *l)
{
    for (size_t part = 0; part < l->nparts; part++) {
        struct pickle_walk walk = pickle_walk(&l->parts[part].tree, l->parts[part].tensors);
        pickle_node name, meta;
        while (pickle_walk_next_pair(&walk, &name, &meta))
            TRY(add_entry(l, part, name, meta));
    }
    if (l->nentries != l->names.n) /* else they are in order already */
        qsort(l->entries, l->nentries, sizeof *l->entries, by_ordinal_then_part);
    l->number = mem_new(l->names.n, sizeof *l->number);
    return l->number ? RSD_OK : RSD_ENOMEM;
}

/* ---- tensors and values ---- */

static rsd_status add_chunks(struct loading *l, size_t part, pickle_node chunks, int32_t ndim)
{
    const struct pickle_tree *tree = &l->parts[part].tree;
    const struct extent nowhere = {.kind = EXTENT_NONE, .file = l->parts[part].file};
    struct pickle_walk walk = pickle_walk(tree, chunks);
    pickle_node chunk;
    TRY(expect(pickle_kind(tree, chunks) == NODE_LIST, "chunks that are no list"));
    while (pickle_walk_next(&walk, &chunk)) {
        int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
        pickle_node state = state_of(tree, chunk, KNOWN_CHUNK);
        TRY(expect(l->budget-- > 0, "more chunks than it has bytes"));
        TRY(expect(take_extents(tree, pickle_find(tree, state, "offsets"), ndim, lo) &&
                       take_extents(tree, pickle_find(tree, state, "sizes"), ndim, len),
                   "a chunk that is none"));
        TRY(catalog_add_box(l->catalog, lo, len, nowhere));
    }
    return RSD_OK;
}

static rsd_status take_tensor(const struct pickle_tree *tree, pickle_node meta, rsd_dtype *dtype,
                              int32_t *ndim, int64_t *shape)
{
    pickle_node state = pickle_part(tree, meta, NODE_STATE),
                size = pickle_find(tree, state, "size");
    uint32_t n = pickle_count(tree, size);
    if (n > RSD_MAX_DIMS && pickle_kind(tree, size) == NODE_TUPLE)
        return fail(RSD_EUNSUPPORTED, "%u dims, at most %d are possible", n, (int)RSD_MAX_DIMS);
    TRY(expect(take_extents(tree, size, (int32_t)n, shape), "a size that is none"));
    *ndim = (int32_t)n;
    return take_dtype(tree, pickle_find(tree, state, "properties"), dtype);
}

/* One tensor, from what all parts say about it. */
static rsd_status add_tensor(struct loading *l, struct entry *entries, size_t n)
{
    const struct pickle_tree *tree = &l->parts[entries[0].part].tree;
    rsd_dtype dtype, other_dtype;
    int32_t ndim, other_ndim;
    int64_t shape[RSD_MAX_DIMS] = {0}, other[RSD_MAX_DIMS] = {0};
    TRY(take_tensor(tree, entries[0].meta, &dtype, &ndim, shape));
    TRY(catalog_add_tensor(l->catalog, pickle_text(tree, entries[0].name), dtype, ndim, shape));
    struct stored_tensor *tensor = &l->catalog->tensors[l->catalog->ntensors - 1];
    for (size_t i = 0; i < n; i++) {
        tree = &l->parts[entries[i].part].tree;
        TRY(take_tensor(tree, entries[i].meta, &other_dtype, &other_ndim, other));
        TRY(expect(other_dtype == dtype && other_ndim == ndim &&
                       memcmp(shape, other, (size_t)ndim * sizeof *shape) == 0,
                   "a tensor on which the ranks do not agree"));
        entries[i].first_box = tensor->nboxes;
        pickle_node state = pickle_part(tree, entries[i].meta, NODE_STATE);
        TRY(add_chunks(l, entries[i].part, pickle_find(tree, state, "chunks"), ndim));
    }
    return RSD_OK;
}

static rsd_status add_group(struct loading *l, struct slice name, struct entry *entries, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        TRY(expect(entries[i].part != entries[i - 1].part, "the same name twice"));
        TRY(expect(entries[i].value == entries[0].value,
                   "a name that is a tensor on one rank and a value on another"));
    }
    if (!entries[0].value)
        return add_tensor(l, entries, n);
    return catalog_add_value(l->catalog, name, (struct extent){.kind = EXTENT_NONE}, NULL);
}

static rsd_status add_all(struct loading *l)
{
    for (size_t i = 0, n; i < l->nentries; i += n) {
        struct entry *entries = &l->entries[i];
        for (n = 1; i + n < l->nentries && entries[n].ordinal == entries[0].ordinal; n++)
            continue;
        struct slice name = pickle_text(&l->parts[entries[0].part].tree, entries[0].name);
        struct catalog *catalog = l->catalog;
        l->number[entries[0].ordinal] = entries[0].value ? catalog->nvalues : catalog->ntensors;
        rsd_status status = add_group(l, name, entries, n);
        if (status)
            return fail_in(status, "%.*s: ", (int)(name.nbytes < 300 ? name.nbytes : 300),
                           name.bytes);
    }
    return RSD_OK;
}

/* ---- where the bytes are ---- */

static rsd_status find_file(struct loading *l, struct slice path, uint32_t *file)
{
    size_t number;
    if (!string_map_find(&l->paths, path, &number)) {
        TRY(store_add_file(l->store, path, file));
        number = *file;
        TRY(string_map_add(&l->paths, path, number));
    }
    *file = (uint32_t)number;
    return RSD_OK;
}

static rsd_status take_unknown(struct loading *l, struct slice name, struct extent *extent)
{
    struct catalog *catalog = l->catalog;
    size_t number;
    if (!string_map_find(&l->unknown, name, &number)) {
        const char *kept;
        number = catalog->ntransforms;
        TRY(catalog_add_name(catalog, name, &kept));
        TRY(GROW(catalog->transforms, catalog->transforms_capacity, number + 1));
        TRY(string_map_add(&l->unknown, (struct slice){kept, name.nbytes}, number));
        catalog->transforms[catalog->ntransforms++] = kept;
    }
    extent->unknown = 1;
    extent->detail = (uint32_t)number;
    return RSD_OK;
}

/* "stream.zstd/1" as often as it was applied; any other name makes an item that cannot be read. */
static rsd_status take_transforms(struct loading *l, const struct pickle_tree *tree,
                                  pickle_node list, struct extent *extent)
{
    struct pickle_walk walk = pickle_walk(tree, list);
    pickle_node item;
    TRY(expect(list == PICKLE_ABSENT || list == PICKLE_NONE || pickle_kind(tree, list) == NODE_LIST,
               "transforms that are no list"));
    while (pickle_walk_next(&walk, &item)) {
        struct slice name = pickle_text(tree, item);
        TRY(expect(pickle_kind(tree, item) == NODE_STRING, "a transform whose name is no text"));
        if (slice_is(name, "stream.zstd/1") || slice_is(name, "stream.zstd")) {
            TRY(expect(extent->nzstd++ < 8, "an item that was compressed too often"));
            continue;
        }
        TRY(take_unknown(l, name, extent));
    }
    return RSD_OK;
}

static rsd_status take_info(struct loading *l, const struct pickle_tree *tree, pickle_node info,
                            struct extent *extent)
{
    pickle_node state = state_of(tree, info, KNOWN_STORAGE_INFO);
    pickle_node path = pickle_find(tree, state, "relative_path");
    int64_t offset, length;
    TRY(expect(pickle_as_i64(tree, pickle_find(tree, state, "offset"), &offset) && offset >= 0 &&
                   pickle_as_i64(tree, pickle_find(tree, state, "length"), &length) &&
                   length >= 0 && pickle_kind(tree, path) == NODE_STRING,
               "storage information that is none"));
    *extent = (struct extent){
        .kind = EXTENT_ITEM, .offset = (uint64_t)offset, .nbytes = (uint64_t)length};
    TRY(take_transforms(l, tree, pickle_find(tree, state, "transform_descriptors"), extent));
    return find_file(l, pickle_text(tree, path), &extent->file);
}

static int by_lo(const void *a, const void *b, void *ndim)
{
    const int64_t *x = a, *y = b; /* lo, then the number of the box */
    for (int32_t d = 0; d < *(const int32_t *)ndim; d++)
        if (x[d] != y[d])
            return x[d] < y[d] ? -1 : 1;
    return 0;
}

static rsd_status sort_boxes(struct loading *l, size_t ordinal, const struct stored_tensor *tensor)
{
    int32_t ndim = tensor->ndim;
    size_t width = (size_t)ndim + 1;
    if (l->sorted && l->sorted_ordinal == ordinal)
        return RSD_OK;
    mem_free(l->sorted);
    l->sorted = mem_new(tensor->nboxes * width, sizeof *l->sorted);
    if (!l->sorted)
        return RSD_ENOMEM;
    l->sorted_ordinal = ordinal;
    for (size_t i = 0; i < tensor->nboxes; i++) {
        copy_i64s(l->sorted + i * width, tensor_box_lo(l->catalog, tensor, i), ndim);
        l->sorted[i * width + (size_t)ndim] = (int64_t)i;
    }
    qsort_r(l->sorted, tensor->nboxes, width * sizeof *l->sorted, by_lo, &ndim);
    return RSD_OK;
}

/* The box of a tensor that begins at lo; nboxes: there is none. */
static rsd_status find_box(struct loading *l, size_t ordinal, const struct stored_tensor *tensor,
                           size_t hint, const int64_t *lo, size_t *box)
{
    int32_t ndim = tensor->ndim;
    size_t width = (size_t)ndim + 1, first = 0, end = tensor->nboxes;
    *box = hint;
    if (hint < tensor->nboxes && by_lo(tensor_box_lo(l->catalog, tensor, hint), lo, &ndim) == 0)
        return RSD_OK;
    TRY(sort_boxes(l, ordinal, tensor));
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (by_lo(l->sorted + middle * width, lo, &ndim) < 0)
            first = middle + 1;
        else
            end = middle;
    }
    bool found = first < tensor->nboxes && by_lo(l->sorted + first * width, lo, &ndim) == 0;
    *box = found ? (size_t)l->sorted[first * width + (size_t)ndim] : tensor->nboxes;
    return RSD_OK;
}

static const struct entry *find_entry(const struct loading *l, size_t ordinal, size_t part)
{
    const struct entry key = {.ordinal = ordinal, .part = part};
    if (l->nparts == 1 && l->nentries == l->names.n)
        return &l->entries[ordinal];
    return bsearch(&key, l->entries, l->nentries, sizeof key, by_ordinal_then_part);
}

static rsd_status place_item(struct loading *l, size_t part, pickle_node state, size_t ordinal,
                             const struct entry *entry, struct extent extent)
{
    const struct pickle_tree *tree = &l->parts[part].tree;
    pickle_node offset = pickle_find(tree, state, "offset");
    int64_t lo[RSD_MAX_DIMS] = {0}, index = 0;
    size_t box;
    if (entry->value) {
        struct stored_value *value = &l->catalog->values[l->number[ordinal]];
        if (value->extent.kind == EXTENT_NONE)
            value->extent = extent;
        return RSD_OK;
    }
    const struct stored_tensor *tensor = &l->catalog->tensors[l->number[ordinal]];
    if (offset != PICKLE_ABSENT && offset != PICKLE_NONE)
        TRY(expect(take_extents(tree, offset, tensor->ndim, lo), "an offset that is none"));
    bool hinted = pickle_as_i64(tree, pickle_find(tree, state, "index"), &index) && index >= 0;
    TRY(find_box(l, ordinal, tensor, hinted ? entry->first_box + (size_t)index : SIZE_MAX, lo,
                 &box));
    if (box < tensor->nboxes)
        l->catalog->extents[tensor->first_extent + box] = extent;
    return RSD_OK;
}

static rsd_status add_storage(struct loading *l, size_t part, pickle_node key, pickle_node info)
{
    const struct pickle_tree *tree = &l->parts[part].tree;
    pickle_node state = state_of(tree, key, KNOWN_INDEX), fqn = pickle_find(tree, state, "fqn");
    struct slice name = pickle_text(tree, fqn);
    struct extent extent;
    size_t ordinal;
    TRY(expect(pickle_kind(tree, fqn) == NODE_STRING, "an index without a name"));
    rsd_status status = take_info(l, tree, info, &extent);
    const struct entry *entry =
        string_map_find(&l->names, name, &ordinal) ? find_entry(l, ordinal, part) : NULL;
    if (!status && entry) /* else it is storage that nothing refers to */
        status = place_item(l, part, state, ordinal, entry, extent);
    return status
               ? fail_in(status, "%.*s: ", (int)(name.nbytes < 300 ? name.nbytes : 300), name.bytes)
               : RSD_OK;
}

static rsd_status add_storages(struct loading *l)
{
    for (size_t part = 0; part < l->nparts; part++) {
        const struct pickle_tree *tree = &l->parts[part].tree;
        struct pickle_walk walk = pickle_walk(tree, l->parts[part].storage);
        pickle_node key, info;
        TRY(expect(pickle_kind(tree, l->parts[part].storage) == NODE_DICT, "no storage_data"));
        while (pickle_walk_next_pair(&walk, &key, &info))
            TRY(add_storage(l, part, key, info));
    }
    return RSD_OK;
}

/* ---- where things were in the nested state dict ---- */

/* A tuple of texts and numbers. */
static bool is_path(const struct pickle_tree *tree, pickle_node path)
{
    bool fine = pickle_kind(tree, path) == NODE_TUPLE && pickle_count(tree, path) <= MOST_PATH;
    for (uint32_t i = 0; fine && i < pickle_count(tree, path); i++) {
        enum pickle_kind kind = pickle_kind(tree, pickle_item(tree, path, i));
        fine = kind == NODE_STRING || kind == NODE_INT;
    }
    return fine;
}

static rsd_status add_path(struct loading *l, size_t part, pickle_node name, pickle_node path)
{
    const struct pickle_tree *tree = &l->parts[part].tree;
    size_t ordinal;
    char *json;
    const char *kept;
    if (pickle_kind(tree, name) != NODE_STRING || !is_path(tree, path) ||
        !string_map_find(&l->names, pickle_text(tree, name), &ordinal))
        return RSD_OK;
    const struct entry *entry = find_entry(l, ordinal, part);
    TRY(pickle_to_json(tree, path, &json));
    size_t n = json ? strlen(json) : 0;
    if (!entry || !json) {
        mem_free(json);
        return RSD_OK;
    }
    rsd_status status = expect(n <= l->capacity, "paths many times as long as itself");
    if (!status)
        status = catalog_add_name(l->catalog, (struct slice){json, n}, &kept);
    mem_free(json);
    TRY(status);
    l->capacity -= n;
    if (entry->value)
        l->catalog->values[l->number[ordinal]].path = kept;
    else
        l->catalog->tensors[l->number[ordinal]].path = kept;
    return RSD_OK;
}

static rsd_status add_paths(struct loading *l)
{
    for (size_t part = 0; part < l->nparts; part++) {
        struct pickle_walk walk = pickle_walk(&l->parts[part].tree, l->parts[part].planner);
        pickle_node name, path;
        while (pickle_walk_next_pair(&walk, &name, &path))
            TRY(add_path(l, part, name, path));
    }
    return RSD_OK;
}

/* ---- the whole ---- */

/* A pickle of something else. What it would have made is named, and was not made. */
static rsd_status no_metadata(const struct pickle_tree *tree, pickle_node root)
{
    enum pickle_kind kind = pickle_kind(tree, root);
    pickle_node what =
        kind == NODE_CALL || kind == NODE_OBJECT ? pickle_part(tree, root, NODE_WHAT) : root;
    if (pickle_kind(tree, what) != NODE_GLOBAL)
        return expect(false, "no state_dict_metadata: this pickle is something else");
    struct slice module = pickle_text(tree, pickle_part(tree, what, NODE_WHAT));
    struct slice name = pickle_text(tree, pickle_part(tree, what, NODE_ARGS));
    return fail(RSD_EFORMAT, "no metadata: the pickle asks for %.*s.%.*s, which is refused",
                (int)(module.nbytes < 100 ? module.nbytes : 100), module.bytes,
                (int)(name.nbytes < 100 ? name.nbytes : 100), name.bytes);
}

static rsd_status load_part(struct loading *l, uint32_t file, struct rank_part *part)
{
    struct store_range range = {.store = l->store, .file = file};
    uint64_t nbytes, used;
    pickle_node root;
    part->file = file;
    rsd_status status = store_stat(l->store, file, &nbytes, NULL);
    if (!status)
        status = pickle_read(store_range_read, &range, nbytes, &part->tree, &root, &used);
    if (!status) {
        l->nparts++;
        l->budget += nbytes;
        l->capacity += START_PATHS + nbytes * MOST_GROWTH;
        pickle_node state = state_of(&part->tree, root, KNOWN_METADATA);
        part->tensors = pickle_find(&part->tree, state, "state_dict_metadata");
        part->storage = pickle_find(&part->tree, state, "storage_data");
        part->planner = pickle_find(&part->tree, state, "planner_data");
        if (pickle_kind(&part->tree, part->tensors) != NODE_DICT)
            status = no_metadata(&part->tree, root);
    }
    return status ? store_fail_in(l->store, file, status) : RSD_OK;
}

rsd_status dcp_open(struct store *store, struct catalog *catalog)
{
    struct loading l = {.catalog = catalog, .store = store};
    size_t n = store->names.n;
    l.parts = mem_new(n, sizeof *l.parts);
    rsd_status status = l.parts ? RSD_OK : RSD_ENOMEM;
    for (uint32_t i = 0; i < n && !status; i++)
        status = load_part(&l, i, &l.parts[i]);
    bool parsed = !status;
    if (!status)
        status = find_entries(&l);
    if (!status)
        status = add_all(&l);
    if (!status)
        status = add_storages(&l);
    if (!status)
        status = add_paths(&l);
    if (status && parsed)
        status = store_fail_in(store, 0, status);
    for (size_t i = 0; i < l.nparts; i++)
        pickle_tree_drop(&l.parts[i].tree);
    mem_free(l.parts);
    mem_free(l.entries);
    mem_free(l.number);
    mem_free(l.sorted);
    string_map_drop(&l.names);
    string_map_drop(&l.paths);
    string_map_drop(&l.unknown);
    return status;
}
