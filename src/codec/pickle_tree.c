/* nodes.c - values as data: a heap of 32-bit words in which every pickled value has its place.
 *
 * A cell is a small integer, an atom such as None, or the place of a node. A node is its kind and a count,
 * and then its parts:
 *
 *     int, float, string, bytes   | kind, nbytes | the bytes ...
 *     tuple                       | kind, n | cell | cell ...
 *     list, dict                  | kind, n | first batch | last batch |
 *     batch                       | kind, n | next batch | cell | cell ...      keys and values in turn
 *     global                      | kind, known | module | name |
 *     call, object                | kind | what | args | state | items |
 *     persistent                  | kind | id |
 *
 * Checkpoints of a million chunks have tens of millions of values, so words are half as wide as pointers
 * and segments are never moved or copied.
 *
 * Invariants:
 *   (1) Cells refer to complete nodes of the same heap.
 *   (2) Nodes may form cycles: whoever walks them bounds the depth.
 */
#include "pickle.h"

#include <stdio.h>
#include <string.h>

enum { TAG_INT = 0, TAG_NODE = 1 };

/* ---- the heap ---- */

static uint32_t *words_at(const struct nodes *nodes, uint64_t place)
{
    return nodes->segments[place >> nodes->shift] + (place & (((uint64_t)1 << nodes->shift) - 1));
}

static uint32_t *node_of(const struct nodes *nodes, cell c)
{
    return words_at(nodes, c >> 2);
}

static uint32_t count_of(const uint32_t *node)
{
    return *node & 0xfffffff;
}

void nodes_start(struct nodes *nodes, uint64_t nbytes)
{
    *nodes = (struct nodes){.shift = nbytes < 1 << 12 ? 9 : nbytes < 1 << 18 ? 14 : 19};
}

void nodes_drop(struct nodes *nodes)
{
    for (size_t i = 0; i < nodes->nowned; i++)
        mem_free(nodes->owned[i]);
    mem_free(nodes->owned);
    mem_free(nodes->segments);
    *nodes = (struct nodes){0};
}

/* Adds segments so that nwords fit in a row; a node larger than a segment gets several in one piece. */
static rsd_status add_segments(struct nodes *nodes, uint64_t nwords)
{
    uint64_t each = (uint64_t)1 << nodes->shift, n = (nwords + each - 1) / each;
    uint64_t begin = (uint64_t)nodes->nsegments << nodes->shift;
    if (begin + n * each > (uint64_t)1 << 30)
        return fail(RSD_ELIMIT, "a pickle with more than 4 GB of values");
    TRY(GROW(nodes->segments, nodes->room_segments, nodes->nsegments + (size_t)n));
    TRY(GROW(nodes->owned, nodes->room_owned, nodes->nowned + 1));
    uint32_t *words = mem_new((size_t)(n * each), sizeof *words);
    if (!words)
        return RSD_ENOMEM;
    nodes->owned[nodes->nowned++] = words;
    for (uint64_t i = 0; i < n; i++)
        nodes->segments[nodes->nsegments++] = words + i * each;
    nodes->next = begin;
    nodes->end = begin + n * each;
    return RSD_OK;
}

static rsd_status new_node(struct nodes *nodes, enum node_kind kind, uint64_t count,
                           uint64_t nwords, cell *out)
{
    if (count >= (uint64_t)1 << 28)
        return fail(RSD_EFORMAT, "a pickled value of 2^28 parts or more");
    if (nodes->end - nodes->next < nwords)
        TRY(add_segments(nodes, nwords));
    *words_at(nodes, nodes->next) = (uint32_t)kind << 28 | (uint32_t)count;
    *out = (cell)(nodes->next << 2 | TAG_NODE);
    nodes->next += nwords;
    return RSD_OK;
}

/* ---- making nodes ---- */

rsd_status node_i64(struct nodes *nodes, int64_t value, cell *out)
{
    if (value >= -((int64_t)1 << 29) && value < (int64_t)1 << 29) {
        *out = (uint32_t)((uint64_t)value << 2) | TAG_INT;
        return RSD_OK;
    }
    TRY(new_node(nodes, NODE_INT, sizeof value, 3, out));
    memcpy(node_of(nodes, *out) + 1, &value, sizeof value);
    return RSD_OK;
}

rsd_status node_bytes(struct nodes *nodes, enum node_kind kind, uint64_t n, cell *out, void **bytes)
{
    TRY(new_node(nodes, kind, n, 1 + (n + 3) / 4, out));
    *bytes = node_of(nodes, *out) + 1;
    return RSD_OK;
}

rsd_status node_tuple(struct nodes *nodes, const cell *items, size_t n, cell *out)
{
    *out = CELL_EMPTY_TUPLE;
    if (n == 0)
        return RSD_OK;
    TRY(new_node(nodes, NODE_TUPLE, n, 1 + n, out));
    memcpy(node_of(nodes, *out) + 1, items, n * sizeof *items);
    return RSD_OK;
}

rsd_status node_container(struct nodes *nodes, enum node_kind kind, cell *out)
{
    TRY(new_node(nodes, kind, 0, 3, out));
    node_of(nodes, *out)[1] = node_of(nodes, *out)[2] = CELL_NOTHING;
    return RSD_OK;
}

rsd_status node_append(struct nodes *nodes, cell container, const cell *items, size_t n)
{
    if (n == 0)
        return RSD_OK;
    bool pairs = node_kind(nodes, container) == NODE_DICT;
    uint64_t count = count_of(node_of(nodes, container)) + (uint64_t)(pairs ? n / 2 : n);
    if (count >= (uint64_t)1 << 28)
        return fail(RSD_EFORMAT, "a pickled container of 2^28 entries or more");
    cell batch;
    TRY(new_node(nodes, NODE_BATCH, n, 2 + n, &batch));
    uint32_t *words = node_of(nodes, batch), *node = node_of(nodes, container);
    words[1] = CELL_NOTHING;
    memcpy(words + 2, items, n * sizeof *items);
    if (node[1] == CELL_NOTHING)
        node[1] = batch;
    else
        node_of(nodes, node[2])[1] = batch;
    node[2] = batch;
    *node = (*node & 0xf0000000) | (uint32_t)count;
    return RSD_OK;
}

rsd_status node_global(struct nodes *nodes, cell module, cell name, cell *out)
{
    enum known known = known_global(node_text(nodes, module), node_text(nodes, name));
    TRY(new_node(nodes, NODE_GLOBAL, (uint64_t)known, 3, out));
    node_of(nodes, *out)[1] = module;
    node_of(nodes, *out)[2] = name;
    return RSD_OK;
}

rsd_status node_call(struct nodes *nodes, enum node_kind kind, cell what, cell args, cell *out)
{
    /* torch.Size is a tuple of its own; taking it for a plain one saves a good part of the memory. */
    if (kind == NODE_CALL && node_known(nodes, what) == KNOWN_TORCH_SIZE &&
        node_count(nodes, args) == 1 && node_kind(nodes, node_item(nodes, args, 0)) == NODE_TUPLE) {
        *out = node_item(nodes, args, 0);
        return RSD_OK;
    }
    TRY(new_node(nodes, kind, 0, 5, out));
    uint32_t *node = node_of(nodes, *out);
    node[NODE_WHAT] = what;
    node[NODE_ARGS] = args;
    node[NODE_STATE] = node[NODE_ITEMS] = CELL_NOTHING;
    return RSD_OK;
}

rsd_status node_persistent(struct nodes *nodes, cell id, cell *out)
{
    TRY(new_node(nodes, NODE_PERSISTENT, 0, 2, out));
    node_of(nodes, *out)[1] = id;
    return RSD_OK;
}

/* ---- looking at nodes ---- */

enum node_kind node_kind(const struct nodes *nodes, cell c)
{
    if ((c & 3) == TAG_INT)
        return NODE_INT;
    if ((c & 3) == TAG_NODE)
        return (enum node_kind)(*node_of(nodes, c) >> 28);
    return c == CELL_EMPTY_TUPLE ? NODE_TUPLE : NODE_ATOM;
}

uint32_t node_count(const struct nodes *nodes, cell c)
{
    return (c & 3) == TAG_NODE ? count_of(node_of(nodes, c)) : 0;
}

cell node_part(const struct nodes *nodes, cell c, enum node_part part)
{
    return node_of(nodes, c)[part];
}

void node_set_part(struct nodes *nodes, cell c, enum node_part part, cell value)
{
    node_of(nodes, c)[part] = value;
}

cell node_item(const struct nodes *nodes, cell tuple, uint32_t i)
{
    return node_of(nodes, tuple)[1 + i];
}

bool node_as_i64(const struct nodes *nodes, cell c, int64_t *out)
{
    if ((c & 3) == TAG_INT) {
        *out = (int32_t)c >> 2;
        return true;
    }
    if (node_kind(nodes, c) != NODE_INT || count_of(node_of(nodes, c)) != sizeof *out)
        return false;
    memcpy(out, node_of(nodes, c) + 1, sizeof *out);
    return true;
}

struct slice node_text(const struct nodes *nodes, cell c)
{
    enum node_kind kind = node_kind(nodes, c);
    if ((c & 3) != TAG_NODE ||
        (kind != NODE_STRING && kind != NODE_BYTES && kind != NODE_INT && kind != NODE_FLOAT))
        return (struct slice){"", 0};
    return (struct slice){(const char *)(node_of(nodes, c) + 1), count_of(node_of(nodes, c))};
}

enum known node_known(const struct nodes *nodes, cell c)
{
    return node_kind(nodes, c) == NODE_GLOBAL ? (enum known)count_of(node_of(nodes, c)) : KNOWN_NOT;
}

struct node_walk node_walk(const struct nodes *nodes, cell container)
{
    enum node_kind kind = node_kind(nodes, container);
    struct node_walk walk = {nodes, CELL_NOTHING, 0};
    if (kind == NODE_LIST || kind == NODE_DICT)
        walk.batch = node_of(nodes, container)[1];
    return walk;
}

bool node_next(struct node_walk *walk, cell *item)
{
    while (walk->batch != CELL_NOTHING) {
        const uint32_t *batch = node_of(walk->nodes, walk->batch);
        if (walk->at < count_of(batch)) {
            *item = batch[2 + walk->at++];
            return true;
        }
        walk->batch = batch[1];
        walk->at = 0;
    }
    return false;
}

bool node_next_pair(struct node_walk *walk, cell *key, cell *value)
{
    return node_next(walk, key) && node_next(walk, value);
}

cell node_find(const struct nodes *nodes, cell dict, const char *key)
{
    struct node_walk walk = node_walk(nodes, dict);
    cell name, value, found = CELL_NOTHING;
    while (node_kind(nodes, dict) == NODE_DICT && node_next_pair(&walk, &name, &value))
        if (node_kind(nodes, name) == NODE_STRING && slice_is(node_text(nodes, name), key))
            found = value; /* the last one counts, as in Python */
    return found;
}

const char *global_text(const struct nodes *nodes, cell c, char text[GLOBAL_TEXT_NCHARS])
{
    if (node_kind(nodes, c) != NODE_GLOBAL)
        return "(no global)";
    struct slice module = node_text(nodes, node_part(nodes, c, NODE_WHAT));
    struct slice name = node_text(nodes, node_part(nodes, c, NODE_ARGS));
    const size_t most = GLOBAL_TEXT_NCHARS / 2 - 1;
    snprintf(text, GLOBAL_TEXT_NCHARS, "%.*s.%.*s",
             (int)(module.nbytes < most ? module.nbytes : most), module.bytes,
             (int)(name.nbytes < most ? name.nbytes : most), name.bytes);
    return text;
}

/* ---- globals we know ---- */

static const struct {
    const char *module, *name;
    enum known known;
} globals[] = {
    {"torch", "Size", KNOWN_TORCH_SIZE},
    {"collections", "OrderedDict", KNOWN_ORDERED_DICT},
    {"torch._utils", "_rebuild_tensor_v2", KNOWN_REBUILD_TENSOR_V2},
    {"torch._utils", "_rebuild_tensor_v3", KNOWN_REBUILD_TENSOR_V3},
    {"torch._utils", "_rebuild_parameter", KNOWN_REBUILD_PARAMETER},
    {"torch._utils", "_rebuild_parameter_with_state", KNOWN_REBUILD_PARAMETER},
    {"torch.serialization", "_get_layout", KNOWN_GET_LAYOUT},
    {"torch.storage", "UntypedStorage", KNOWN_UNTYPED_STORAGE},
    {"_codecs", "encode", KNOWN_ENCODE},
    {"builtins", "getattr", KNOWN_GETATTR},
    {"builtins", "set", KNOWN_SET},
    {"__builtin__", "set", KNOWN_SET},
    {"builtins", "complex", KNOWN_COMPLEX},
    {"builtins", "bytearray", KNOWN_BYTEARRAY},
};

/* Classes of checkpoint metadata, whatever module of torch.distributed they lived in. */
static const struct {
    const char *name;
    enum known known;
} metadata_classes[] = {
    {"Metadata", KNOWN_METADATA},
    {"TensorStorageMetadata", KNOWN_TENSOR_STORAGE},
    {"TensorProperties", KNOWN_TENSOR_PROPERTIES},
    {"_MEM_FORMAT_ENCODING", KNOWN_MEM_FORMAT},
    {"MEM_FORMAT_ENCODING", KNOWN_MEM_FORMAT},
    {"ChunkStorageMetadata", KNOWN_CHUNK},
    {"BytesStorageMetadata", KNOWN_BYTES_STORAGE},
    {"MetadataIndex", KNOWN_INDEX},
    {"StorageMeta", KNOWN_STORAGE_META},
    {"_StorageInfo", KNOWN_STORAGE_INFO},
};

static bool starts_with(struct slice slice, const char *prefix)
{
    size_t n = strlen(prefix);
    return slice.nbytes >= n && memcmp(slice.bytes, prefix, n) == 0;
}

enum known known_global(struct slice module, struct slice name)
{
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
        if (slice_is(module, globals[i].module) && slice_is(name, globals[i].name))
            return globals[i].known;
    if (starts_with(module, "torch.distributed."))
        for (size_t i = 0; i < sizeof metadata_classes / sizeof *metadata_classes; i++)
            if (slice_is(name, metadata_classes[i].name))
                return metadata_classes[i].known;
    if (slice_is(module, "torch")) {
        if (name.nbytes > 7 && memcmp(name.bytes + name.nbytes - 7, "Storage", 7) == 0)
            return KNOWN_STORAGE_CLASS;
        return KNOWN_TORCH_NAME; /* a dtype, perhaps */
    }
    return KNOWN_NOT;
}
