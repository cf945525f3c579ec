/* pickle_tree.c - pickled values as data, in a heap of 32-bit words.
 *
 * A pickle_node is a small integer, an atom such as None, or the offset of a record. A record has its kind
 * and a count, and then its parts:
 *
 *     int, float, string, bytes   | kind, nbytes | the bytes ...
 *     tuple                       | kind, n | node | node ...
 *     list, dict                  | kind, n | first batch | last batch |
 *     batch                       | kind, n | next batch | node | node ...      keys and values in turn
 *     global                      | kind, known | module | name |
 *     call, object                | kind | what | args | state | items |
 *     persistent                  | kind | id |
 *
 * The metadata of a million chunks has tens of millions of values. So words are half as wide as pointers,
 * and segments are never moved or copied.
 *
 * Invariants:
 *   (1) A node refers to a complete record of the same heap.
 *   (2) Nodes may form cycles: a caller that walks them must limit the depth.
 */
#include "pickle.h"

#include <stdio.h>
#include <string.h>

enum { TAG_INT = 0, TAG_NODE = 1 };

/* ---- the heap ---- */

static uint32_t *words_at(const struct pickle_tree *tree, uint64_t place)
{
    return tree->segments[place >> tree->shift] + (place & (((uint64_t)1 << tree->shift) - 1));
}

static uint32_t *node_of(const struct pickle_tree *tree, pickle_node c)
{
    return words_at(tree, c >> 2);
}

static uint32_t count_of(const uint32_t *node)
{
    return *node & 0xfffffff;
}

void pickle_tree_start(struct pickle_tree *tree, uint64_t nbytes)
{
    *tree = (struct pickle_tree){.shift = nbytes < 1 << 12 ? 9 : nbytes < 1 << 18 ? 14 : 19};
}

void pickle_tree_drop(struct pickle_tree *tree)
{
    for (size_t i = 0; i < tree->nowned; i++)
        mem_free(tree->owned[i]);
    mem_free(tree->owned);
    mem_free(tree->segments);
    *tree = (struct pickle_tree){0};
}

/* Adds contiguous segments for nwords. */
static rsd_status add_segments(struct pickle_tree *tree, uint64_t nwords)
{
    uint64_t segment = (uint64_t)1 << tree->shift, n = (nwords + segment - 1) / segment;
    uint64_t begin = (uint64_t)tree->nsegments << tree->shift;
    if (begin + n * segment > (uint64_t)1 << 30)
        return fail(RSD_ELIMIT, "values of the pickle exceed 4 GiB");
    TRY(budget_use_memory(n * segment * sizeof(uint32_t)));
    TRY(GROW(tree->segments, tree->segments_capacity, tree->nsegments + (size_t)n));
    TRY(GROW(tree->owned, tree->owned_capacity, tree->nowned + 1));
    uint32_t *words = mem_new((size_t)(n * segment), sizeof *words);
    if (!words)
        return RSD_ENOMEM;
    tree->owned[tree->nowned++] = words;
    for (uint64_t i = 0; i < n; i++)
        tree->segments[tree->nsegments++] = words + i * segment;
    tree->next = begin;
    tree->end = begin + n * segment;
    return RSD_OK;
}

/* Adds a node of nwords words to the tree. `count` is the number of its parts or bytes. */
static rsd_status new_node(struct pickle_tree *tree, enum pickle_kind kind, uint64_t count,
                           uint64_t nwords, pickle_node *out)
{
    if (count >= (uint64_t)1 << 28)
        return fail(RSD_EFORMAT, "pickled value has 2^28 parts or more");
    if (tree->end - tree->next < nwords)
        TRY(add_segments(tree, nwords));
    *words_at(tree, tree->next) = (uint32_t)kind << 28 | (uint32_t)count;
    *out = (pickle_node)(tree->next << 2 | TAG_NODE);
    tree->next += nwords;
    return RSD_OK;
}

/* ---- known globals ---- */

/* A module that ends with a dot stands for all modules below it. */
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
    {"torch._tensor", "_rebuild_from_type", KNOWN_REBUILD_FROM_TYPE},
    {"torch._tensor", "_rebuild_from_type_v2", KNOWN_REBUILD_FROM_TYPE},
    {"torch._utils", "_rebuild_wrapper_subclass", KNOWN_REBUILD_WRAPPER},
    {"torch.storage", "UntypedStorage", KNOWN_UNTYPED_STORAGE},
    {"_codecs", "encode", KNOWN_ENCODE},
    {"torch.distributed.", "Metadata", KNOWN_METADATA},
    {"torch.distributed.", "TensorStorageMetadata", KNOWN_TENSOR_STORAGE},
    {"torch.distributed.", "TensorProperties", KNOWN_TENSOR_PROPERTIES},
    {"torch.distributed.", "ChunkStorageMetadata", KNOWN_CHUNK},
    {"torch.distributed.", "BytesStorageMetadata", KNOWN_BYTES_STORAGE},
    {"torch.distributed.", "MetadataIndex", KNOWN_INDEX},
    {"torch.distributed.", "StorageMeta", KNOWN_STORAGE_META},
    {"torch.distributed.", "_StorageInfo", KNOWN_STORAGE_INFO},
};

/* Returns which known global has this module and name; KNOWN_NOT: none of them. */
static enum known find_known_global(struct slice module, struct slice name)
{
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++) {
        const char *known = globals[i].module;
        bool below = known[strlen(known) - 1] == '.';
        if (slice_is(name, globals[i].name) &&
            (below ? slice_begins(module, known) : slice_is(module, known)))
            return globals[i].known;
    }
    if (!slice_is(module, "torch"))
        return KNOWN_NOT;
    bool storage = name.nbytes > 7 && memcmp(name.bytes + name.nbytes - 7, "Storage", 7) == 0;
    return storage ? KNOWN_STORAGE_CLASS : KNOWN_TORCH_NAME;
}

/* ---- adding nodes ---- */

rsd_status pickle_add_i64(struct pickle_tree *tree, int64_t value, pickle_node *out)
{
    if (value >= -((int64_t)1 << 29) && value < (int64_t)1 << 29) {
        *out = (uint32_t)((uint64_t)value << 2) | TAG_INT;
        return RSD_OK;
    }
    TRY(new_node(tree, NODE_INT, sizeof value, 3, out));
    memcpy(node_of(tree, *out) + 1, &value, sizeof value);
    return RSD_OK;
}

rsd_status pickle_add_bytes(struct pickle_tree *tree, enum pickle_kind kind, uint64_t n,
                            pickle_node *out, void **bytes)
{
    TRY(new_node(tree, kind, n, 1 + (n + 3) / 4, out));
    *bytes = node_of(tree, *out) + 1;
    return RSD_OK;
}

rsd_status pickle_add_tuple(struct pickle_tree *tree, const pickle_node *items, size_t n,
                            pickle_node *out)
{
    *out = PICKLE_EMPTY_TUPLE;
    if (n == 0)
        return RSD_OK;
    TRY(new_node(tree, NODE_TUPLE, n, 1 + n, out));
    memcpy(node_of(tree, *out) + 1, items, n * sizeof *items);
    return RSD_OK;
}

rsd_status pickle_add_container(struct pickle_tree *tree, enum pickle_kind kind, pickle_node *out)
{
    TRY(new_node(tree, kind, 0, 3, out));
    node_of(tree, *out)[1] = node_of(tree, *out)[2] = PICKLE_ABSENT;
    return RSD_OK;
}

rsd_status pickle_append(struct pickle_tree *tree, pickle_node container, const pickle_node *items,
                         size_t n)
{
    if (n == 0)
        return RSD_OK;
    bool pairs = pickle_kind(tree, container) == NODE_DICT;
    uint64_t count = count_of(node_of(tree, container)) + (uint64_t)(pairs ? n / 2 : n);
    if (count >= (uint64_t)1 << 28)
        return fail(RSD_EFORMAT, "pickled container has 2^28 entries or more");
    pickle_node batch;
    TRY(new_node(tree, NODE_BATCH, n, 2 + n, &batch));
    uint32_t *words = node_of(tree, batch), *node = node_of(tree, container);
    words[1] = PICKLE_ABSENT;
    memcpy(words + 2, items, n * sizeof *items);
    if (node[1] == PICKLE_ABSENT)
        node[1] = batch;
    else
        node_of(tree, node[2])[1] = batch;
    node[2] = batch;
    *node = (*node & 0xf0000000) | (uint32_t)count;
    return RSD_OK;
}

rsd_status pickle_add_global(struct pickle_tree *tree, pickle_node module, pickle_node name,
                             pickle_node *out)
{
    enum known known = find_known_global(pickle_text(tree, module), pickle_text(tree, name));
    TRY(new_node(tree, NODE_GLOBAL, (uint64_t)known, 3, out));
    node_of(tree, *out)[1] = module;
    node_of(tree, *out)[2] = name;
    return RSD_OK;
}

rsd_status pickle_add_call(struct pickle_tree *tree, enum pickle_kind kind, pickle_node what,
                           pickle_node args, pickle_node *out)
{
    /* A torch.Size becomes the tuple that it is made of, which saves a good part of the memory. */
    if (kind == NODE_CALL && pickle_known(tree, what) == KNOWN_TORCH_SIZE &&
        pickle_count(tree, args) == 1 &&
        pickle_kind(tree, pickle_item(tree, args, 0)) == NODE_TUPLE) {
        *out = pickle_item(tree, args, 0);
        return RSD_OK;
    }
    TRY(new_node(tree, kind, 0, 5, out));
    uint32_t *node = node_of(tree, *out);
    node[NODE_WHAT] = what;
    node[NODE_ARGS] = args;
    node[NODE_STATE] = node[NODE_ITEMS] = PICKLE_ABSENT;
    return RSD_OK;
}

rsd_status pickle_add_persistent(struct pickle_tree *tree, pickle_node id, pickle_node *out)
{
    TRY(new_node(tree, NODE_PERSISTENT, 0, 2, out));
    node_of(tree, *out)[1] = id;
    return RSD_OK;
}

/* ---- reading nodes ---- */

enum pickle_kind pickle_kind(const struct pickle_tree *tree, pickle_node c)
{
    if ((c & 3) == TAG_INT)
        return NODE_INT;
    if ((c & 3) == TAG_NODE)
        return (enum pickle_kind)(*node_of(tree, c) >> 28);
    return c == PICKLE_EMPTY_TUPLE ? NODE_TUPLE : NODE_ATOM;
}

bool pickle_is_built(const struct pickle_tree *tree, pickle_node c)
{
    enum pickle_kind kind = pickle_kind(tree, c);
    return kind == NODE_CALL || kind == NODE_OBJECT;
}

uint32_t pickle_count(const struct pickle_tree *tree, pickle_node c)
{
    return (c & 3) == TAG_NODE ? count_of(node_of(tree, c)) : 0;
}

pickle_node pickle_part(const struct pickle_tree *tree, pickle_node c, enum pickle_part part)
{
    return node_of(tree, c)[part];
}

void pickle_set_part(struct pickle_tree *tree, pickle_node c, enum pickle_part part,
                     pickle_node value)
{
    node_of(tree, c)[part] = value;
}

pickle_node pickle_item(const struct pickle_tree *tree, pickle_node tuple, uint32_t i)
{
    return node_of(tree, tuple)[1 + i];
}

bool pickle_as_i64(const struct pickle_tree *tree, pickle_node c, int64_t *out)
{
    if ((c & 3) == TAG_INT) {
        *out = (int32_t)c >> 2;
        return true;
    }
    if (pickle_kind(tree, c) != NODE_INT || count_of(node_of(tree, c)) != sizeof *out)
        return false;
    memcpy(out, node_of(tree, c) + 1, sizeof *out);
    return true;
}

struct slice pickle_text(const struct pickle_tree *tree, pickle_node c)
{
    enum pickle_kind kind = pickle_kind(tree, c);
    if ((c & 3) != TAG_NODE ||
        (kind != NODE_STRING && kind != NODE_BYTES && kind != NODE_INT && kind != NODE_FLOAT))
        return slice_of("");
    return (struct slice){(const char *)(node_of(tree, c) + 1), count_of(node_of(tree, c))};
}

enum known pickle_known(const struct pickle_tree *tree, pickle_node c)
{
    return pickle_kind(tree, c) == NODE_GLOBAL ? (enum known)count_of(node_of(tree, c)) : KNOWN_NOT;
}

struct pickle_walk pickle_walk(const struct pickle_tree *tree, pickle_node container)
{
    enum pickle_kind kind = pickle_kind(tree, container);
    struct pickle_walk walk = {tree, PICKLE_ABSENT, 0};
    if (kind == NODE_LIST || kind == NODE_DICT)
        walk.batch = node_of(tree, container)[1];
    else if (kind == NODE_TUPLE && container != PICKLE_EMPTY_TUPLE)
        walk.batch = container;
    return walk;
}

bool pickle_is_dict(const struct pickle_tree *tree, pickle_node c)
{
    if (!pickle_is_built(tree, c))
        return pickle_kind(tree, c) == NODE_DICT;
    pickle_node items = pickle_part(tree, c, NODE_ITEMS); /* an empty OrderedDict has none */
    return items == PICKLE_ABSENT
               ? pickle_known(tree, pickle_part(tree, c, NODE_WHAT)) == KNOWN_ORDERED_DICT
               : pickle_kind(tree, items) == NODE_DICT;
}

struct pickle_walk pickle_walk_dict(const struct pickle_tree *tree, pickle_node dict)
{
    if (!pickle_is_dict(tree, dict))
        return pickle_walk(tree, PICKLE_ABSENT);
    return pickle_walk(tree,
                       pickle_is_built(tree, dict) ? pickle_part(tree, dict, NODE_ITEMS) : dict);
}

bool pickle_walk_next(struct pickle_walk *walk, pickle_node *item)
{
    while (walk->batch != PICKLE_ABSENT) {
        const uint32_t *node = node_of(walk->tree, walk->batch);
        bool tuple = pickle_kind(walk->tree, walk->batch) == NODE_TUPLE;
        if (walk->at < count_of(node)) {
            *item = node[(tuple ? 1 : 2) + walk->at++];
            return budget_take(1);
        }
        walk->batch = tuple ? PICKLE_ABSENT : node[1];
        walk->at = 0;
        if (!budget_take(1))
            break;
    }
    return false;
}

bool pickle_walk_next_pair(struct pickle_walk *walk, pickle_node *key, pickle_node *value)
{
    return pickle_walk_next(walk, key) && pickle_walk_next(walk, value);
}

pickle_node pickle_find(const struct pickle_tree *tree, pickle_node dict, const char *key)
{
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    pickle_node name, value, found = PICKLE_ABSENT;
    while (pickle_walk_next_pair(&walk, &name, &value))
        if (pickle_kind(tree, name) == NODE_STRING && slice_is(pickle_text(tree, name), key))
            found = value; /* the last one wins, as in Python */
    return found;
}

int32_t pickle_take_numbers(const struct pickle_tree *tree, pickle_node c, int32_t most,
                            int64_t *out)
{
    struct pickle_walk walk = pickle_walk(tree, c);
    pickle_node item;
    int32_t n = 0;
    if (pickle_kind(tree, c) != NODE_TUPLE && pickle_kind(tree, c) != NODE_LIST)
        return -1;
    for (; pickle_walk_next(&walk, &item); n++)
        if (n == most || !pickle_as_i64(tree, item, &out[n]) || out[n] < 0 ||
            out[n] > INT64_C(1) << 62)
            return -1;
    return n;
}

const char *pickle_global_text(const struct pickle_tree *tree, pickle_node c,
                               char text[GLOBAL_TEXT_NCHARS])
{
    if (pickle_kind(tree, c) != NODE_GLOBAL)
        return "(not a global)";
    struct slice module = pickle_text(tree, pickle_part(tree, c, NODE_WHAT));
    struct slice name = pickle_text(tree, pickle_part(tree, c, NODE_ARGS));
    const int most = GLOBAL_TEXT_NCHARS / 2 - 1;
    snprintf(text, GLOBAL_TEXT_NCHARS, "%.*s.%.*s", slice_width(module, most), module.bytes,
             slice_width(name, most), name.bytes);
    return text;
}

bool pickle_is_global(const struct pickle_tree *tree, pickle_node c, const char *prefix,
                      const char *name)
{
    return pickle_kind(tree, c) == NODE_GLOBAL &&
           slice_is(pickle_text(tree, pickle_part(tree, c, NODE_ARGS)), name) &&
           slice_begins(pickle_text(tree, pickle_part(tree, c, NODE_WHAT)), prefix);
}

bool pickle_is_instance(const struct pickle_tree *tree, pickle_node c, const char *prefix,
                        const char *name)
{
    return pickle_is_built(tree, c) &&
           pickle_is_global(tree, pickle_part(tree, c, NODE_WHAT), prefix, name);
}

pickle_node pickle_attribute(const struct pickle_tree *tree, pickle_node c, const char *name)
{
    if (!pickle_is_built(tree, c))
        return PICKLE_ABSENT;
    pickle_node state = pickle_part(tree, c, NODE_STATE);
    if (pickle_kind(tree, state) != NODE_TUPLE || pickle_count(tree, state) != 2)
        return pickle_find(tree, state, name);
    pickle_node found = pickle_find(tree, pickle_item(tree, state, 0), name);
    return found != PICKLE_ABSENT ? found : pickle_find(tree, pickle_item(tree, state, 1), name);
}
