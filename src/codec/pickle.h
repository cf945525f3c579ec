/* pickle.h - pickles as data, read and written. */
#ifndef PICKLE_H
#define PICKLE_H

#include "json.h"

/* ---- nodes.c: pickled values as data ---- */

typedef uint32_t pickle_node;

#define PICKLE_NONE        ((pickle_node)2)
#define PICKLE_TRUE        ((pickle_node)6)
#define PICKLE_FALSE       ((pickle_node)10)
#define PICKLE_EMPTY_TUPLE ((pickle_node)14)
#define PICKLE_ABSENT      ((pickle_node)18) /* no value at all */

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
    NODE_CALL,   /* what a call would have returned */
    NODE_OBJECT, /* what a class would have made */
    NODE_PERSISTENT
};

enum pickle_part { NODE_WHAT = 1, NODE_ARGS, NODE_STATE, NODE_ITEMS };

/* Globals that readers know. */
enum known {
    KNOWN_NOT,
    KNOWN_TORCH_SIZE,
    KNOWN_ORDERED_DICT,
    KNOWN_REBUILD_TENSOR_V2,
    KNOWN_REBUILD_TENSOR_V3,
    KNOWN_REBUILD_PARAMETER,
    KNOWN_GET_LAYOUT,
    KNOWN_UNTYPED_STORAGE,
    KNOWN_STORAGE_CLASS, /* torch.FloatStorage and the like */
    KNOWN_TORCH_NAME,    /* anything else in torch: a dtype, perhaps */
    KNOWN_ENCODE,
    KNOWN_GETATTR,
    KNOWN_SET,
    KNOWN_COMPLEX,
    KNOWN_BYTEARRAY,
    KNOWN_METADATA,
    KNOWN_TENSOR_STORAGE,
    KNOWN_TENSOR_PROPERTIES,
    KNOWN_MEM_FORMAT,
    KNOWN_CHUNK,
    KNOWN_BYTES_STORAGE,
    KNOWN_INDEX,
    KNOWN_STORAGE_META,
    KNOWN_STORAGE_INFO
};

struct pickle_tree {
    int shift; /* words of a segment, as a power of two */
    uint32_t **segments, **owned;
    size_t nsegments, segments_capacity, nowned, owned_capacity;
    uint64_t next, end; /* free words of the last segment */
};

void pickle_tree_start(struct pickle_tree *tree,
                       uint64_t nbytes); /* of the stream, for the size of segments */
void pickle_tree_drop(struct pickle_tree *tree);

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
uint32_t pickle_count(const struct pickle_tree *tree, pickle_node c); /* items, entries or bytes */
pickle_node pickle_part(const struct pickle_tree *tree, pickle_node c,
                        enum pickle_part part); /* of a call, object or global */
void pickle_set_part(struct pickle_tree *tree, pickle_node c, enum pickle_part part,
                     pickle_node value);
pickle_node pickle_item(const struct pickle_tree *tree, pickle_node tuple, uint32_t i);
bool pickle_as_i64(const struct pickle_tree *tree, pickle_node c, int64_t *out);
struct slice pickle_text(const struct pickle_tree *tree,
                         pickle_node c); /* of strings, bytes, large ints, floats */
enum known pickle_known(const struct pickle_tree *tree, pickle_node c); /* of a global */
pickle_node pickle_find(const struct pickle_tree *tree, pickle_node dict,
                        const char *key); /* PICKLE_ABSENT: not there */

/* "torch.qint8", for messages; "(no global)" of what is none. */
enum { GLOBAL_TEXT_NCHARS = 200 };
const char *pickle_global_text(const struct pickle_tree *tree, pickle_node c,
                               char text[GLOBAL_TEXT_NCHARS]);

/* Through the items of a list, or the keys and values of a dict. */
struct pickle_walk {
    const struct pickle_tree *tree;
    pickle_node batch;
    uint32_t at;
};
struct pickle_walk pickle_walk(const struct pickle_tree *tree, pickle_node container);
bool pickle_walk_next(struct pickle_walk *walk, pickle_node *item);
bool pickle_walk_next_pair(struct pickle_walk *walk, pickle_node *key, pickle_node *value);

enum known pickle_known_global(struct slice module, struct slice name);

/* ---- pickle.c ---- */

/* Reads a pickle of at most nbytes; *used is how many it took. pickle_tree_drop gives the values back. */
rsd_status pickle_read(read_at *read, void *context, uint64_t nbytes, struct pickle_tree *tree,
                       pickle_node *root, uint64_t *used);
rsd_status pickle_read_memory(const void *bytes, size_t nbytes, struct pickle_tree *tree,
                              pickle_node *root, uint64_t *used);

/* ---- emit.c: pickles, written ---- */

void pickle_write_op(struct bytes *out, const char *op);
void pickle_write_number(struct bytes *out, uint64_t value,
                         int nbytes); /* little-endian, no opcode */
void pickle_write_int(struct bytes *out, int64_t value);
void pickle_write_float(struct bytes *out, double value);
void pickle_write_text(struct bytes *out, struct slice text);
void pickle_write_global(struct bytes *out, const char *module, const char *name);

rsd_status pickle_write_json(const char *text, struct bytes *out);
rsd_status pickle_write_path(const char *text,
                             struct bytes *out); /* a list as a tuple, no opcode before */

/* ---- values.c: plain values ---- */

/* *json is NULL if the value is not plain. */
rsd_status pickle_to_json(const struct pickle_tree *tree, pickle_node c, char **json);
rsd_status pickle_to_plain_pickle(const struct pickle_tree *tree, pickle_node c, struct bytes *out,
                                  bool *plain);

bool pickle_is_dict(const struct pickle_tree *tree, pickle_node c); /* or an OrderedDict */
pickle_node pickle_dict_items(const struct pickle_tree *tree,
                              pickle_node c); /* its entries; PICKLE_ABSENT: it has none */

#endif
