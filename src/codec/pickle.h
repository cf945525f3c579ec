/* pickle.h - pickles as data, read and written. */
#ifndef PICKLE_H
#define PICKLE_H

#include "json.h"

/* ---- pickle_tree.c: pickled values as data ---- */

typedef uint32_t pickle_node; /* a value of a tree */

#define PICKLE_NONE        ((pickle_node)2)
#define PICKLE_TRUE        ((pickle_node)6)
#define PICKLE_FALSE       ((pickle_node)10)
#define PICKLE_EMPTY_TUPLE ((pickle_node)14)
#define PICKLE_ABSENT      ((pickle_node)18) /* not a value: a key, argument or attribute is missing */

enum pickle_kind {
    NODE_ATOM, /* None, True, False */
    NODE_INT,
    NODE_FLOAT,
    NODE_STRING,
    NODE_BYTES,
    NODE_TUPLE,
    NODE_LIST,
    NODE_DICT,
    NODE_BATCH,
    NODE_GLOBAL,
    NODE_CALL,   /* a call of a global, which was not made */
    NODE_OBJECT, /* an instance of a class, which was not made */
    NODE_PERSISTENT
};

enum pickle_part { NODE_WHAT = 1, NODE_ARGS, NODE_STATE, NODE_ITEMS };

/* Globals that readers know; KNOWN_NOT is any other. */
enum known {
    KNOWN_NOT,
    KNOWN_TORCH_SIZE,
    KNOWN_ORDERED_DICT,
    KNOWN_REBUILD_TENSOR_V2,
    KNOWN_REBUILD_TENSOR_V3,
    KNOWN_REBUILD_PARAMETER,
    KNOWN_REBUILD_FROM_TYPE, /* of a tensor with attributes, or of a subclass */
    KNOWN_REBUILD_WRAPPER,   /* of a subclass that has no storage of its own, such as DTensor */
    KNOWN_UNTYPED_STORAGE,
    KNOWN_STORAGE_CLASS, /* torch.FloatStorage and the like */
    KNOWN_TORCH_NAME,    /* any other name in torch, such as a dtype */
    KNOWN_ENCODE,
    KNOWN_METADATA,
    KNOWN_TENSOR_STORAGE,
    KNOWN_TENSOR_PROPERTIES,
    KNOWN_CHUNK,
    KNOWN_BYTES_STORAGE,
    KNOWN_INDEX,
    KNOWN_STORAGE_META,
    KNOWN_STORAGE_INFO
};

struct pickle_tree {
    int shift; /* log2 of the words of a segment */
    uint32_t **segments, **owned;
    size_t nsegments, segments_capacity, nowned, owned_capacity;
    uint64_t next, end; /* free words of the last segment */
};

/* Starts a tree for a stream of nbytes, which set the size of its segments. */
void pickle_tree_start(struct pickle_tree *tree, uint64_t nbytes);
void pickle_tree_drop(struct pickle_tree *tree);

/* Each adds a value to the tree. *bytes is where the caller writes the n bytes of the value. pickle_append adds
 * items to a list, or keys and values in turn to a dict. */
rsd_status pickle_add_i64(struct pickle_tree *tree, int64_t value, pickle_node *out);
rsd_status pickle_add_bytes(struct pickle_tree *tree, enum pickle_kind kind, uint64_t n,
                            pickle_node *out, void **bytes);
rsd_status pickle_add_tuple(struct pickle_tree *tree, const pickle_node *items, size_t n,
                            pickle_node *out);
rsd_status pickle_add_container(struct pickle_tree *tree, enum pickle_kind kind, pickle_node *out);
rsd_status pickle_append(struct pickle_tree *tree, pickle_node container, const pickle_node *items,
                         size_t n);
rsd_status pickle_add_global(struct pickle_tree *tree, pickle_node module, pickle_node name,
                             pickle_node *out);
rsd_status pickle_add_call(struct pickle_tree *tree, enum pickle_kind kind, pickle_node what,
                           pickle_node args, pickle_node *out);
rsd_status pickle_add_persistent(struct pickle_tree *tree, pickle_node id, pickle_node *out);

enum pickle_kind pickle_kind(const struct pickle_tree *tree, pickle_node c);

/* Returns whether a value is a call or an object: it has all parts of enum pickle_part. */
bool pickle_is_built(const struct pickle_tree *tree, pickle_node c);

/* Returns the number of items, entries or bytes; 0 of values that have none. */
uint32_t pickle_count(const struct pickle_tree *tree, pickle_node c);

/* The node must be a call, object, persistent id or global; of a global, NODE_WHAT is the module and
 * NODE_ARGS the name. */
pickle_node pickle_part(const struct pickle_tree *tree, pickle_node c, enum pickle_part part);
void pickle_set_part(struct pickle_tree *tree, pickle_node c, enum pickle_part part,
                     pickle_node value);
pickle_node pickle_item(const struct pickle_tree *tree, pickle_node tuple, uint32_t i);

/* Returns false for a value that is not an integer of 64 bits. */
bool pickle_as_i64(const struct pickle_tree *tree, pickle_node c, int64_t *out);

/* Returns the bytes of a string, bytes, a large integer or a float; none of any other value. */
struct slice pickle_text(const struct pickle_tree *tree, pickle_node c);

/* Returns KNOWN_NOT for a value that is not a global. */
enum known pickle_known(const struct pickle_tree *tree, pickle_node c);

/* Takes the numbers of a list or tuple, each from 0 to 2^62. Returns how many there are; -1: it has more than `most`
 * items, or others, or is neither. */
int32_t pickle_take_numbers(const struct pickle_tree *tree, pickle_node c, int32_t most,
                            int64_t *out);

/* Returns whether a value is a dict: also an OrderedDict, or an instance of a class that was given entries. */
bool pickle_is_dict(const struct pickle_tree *tree, pickle_node c);

/* Returns PICKLE_ABSENT if the dict has no such key, or is not a dict. */
pickle_node pickle_find(const struct pickle_tree *tree, pickle_node dict, const char *key);

/* Returns whether a value is a global of this name, in a module whose name begins with the prefix. */
bool pickle_is_global(const struct pickle_tree *tree, pickle_node c, const char *prefix,
                      const char *name);

/* Returns whether a value is a call of such a global, or an instance of it. */
bool pickle_is_instance(const struct pickle_tree *tree, pickle_node c, const char *prefix,
                        const char *name);

/* Returns the attribute of an instance. Its state is a dict, or a pair of dicts (the second has the slots).
 * PICKLE_ABSENT: it has no such attribute, or is not an instance. */
pickle_node pickle_attribute(const struct pickle_tree *tree, pickle_node c, const char *name);

/* Returns "torch.qint8", for messages; "(not a global)" for any other value. */
enum { GLOBAL_TEXT_NCHARS = 200 };
const char *pickle_global_text(const struct pickle_tree *tree, pickle_node c,
                               char text[GLOBAL_TEXT_NCHARS]);

/* Walks the items of a list or tuple; pickle_walk_dict walks the keys and values of what pickle_is_dict accepts. Any
 * other value has none. The steps return false at the end, or if the budget is exceeded. */
struct pickle_walk {
    const struct pickle_tree *tree;
    pickle_node batch; /* or the tuple; PICKLE_ABSENT at the end */
    uint32_t at;
};
struct pickle_walk pickle_walk(const struct pickle_tree *tree, pickle_node container);
struct pickle_walk pickle_walk_dict(const struct pickle_tree *tree, pickle_node dict);
bool pickle_walk_next(struct pickle_walk *walk, pickle_node *item);
bool pickle_walk_next_pair(struct pickle_walk *walk, pickle_node *key, pickle_node *value);

/* ---- pickle_read.c ---- */

/* Reads a pickle of at most nbytes; *used is its length. The caller drops the tree. */
rsd_status pickle_read(read_at *read, void *context, uint64_t nbytes, struct pickle_tree *tree,
                       pickle_node *root, uint64_t *used);
rsd_status pickle_read_memory(const void *bytes, size_t nbytes, struct pickle_tree *tree,
                              pickle_node *root, uint64_t *used);

/* ---- pickle_write.c ---- */

/* Each adds one or several opcodes. An integer has its shortest form, as in Python's own pickler. */
void pickle_write_op(struct bytes *out, const char *op);
void pickle_write_int(struct bytes *out, int64_t value);
void pickle_write_float(struct bytes *out, double value);
void pickle_write_text(struct bytes *out, struct slice text);
void pickle_write_string(struct bytes *out, const char *string); /* the same, up to its NUL */
void pickle_write_global(struct bytes *out, const char *module, const char *name);
void pickle_write_memo(struct bytes *out, uint32_t entry);   /* stores the last value */
void pickle_write_recall(struct bytes *out, uint32_t entry); /* adds a stored value */

/* Writes the pickle that torch.save makes of a JSON value. */
rsd_status pickle_write_json(const char *text, struct bytes *out);

/* Writes a JSON list of texts and numbers as a tuple, without the opcodes of a whole pickle. */
rsd_status pickle_write_path(const char *text, struct bytes *out);

/* ---- pickle_json.c: plain values ---- */

/* *json is NULL if the value is not plain. */
rsd_status pickle_to_json(const struct pickle_tree *tree, pickle_node c, char **json);
rsd_status pickle_to_plain_pickle(const struct pickle_tree *tree, pickle_node c, struct bytes *out,
                                  bool *plain);

#endif
