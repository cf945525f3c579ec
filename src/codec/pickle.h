/* pickle.h - pickles as data, read and written. */
#ifndef PICKLE_H
#define PICKLE_H

#include "json.h"

/* ---- nodes.c: pickled values as data ---- */

typedef uint32_t cell;

#define CELL_NONE        ((cell)2)
#define CELL_TRUE        ((cell)6)
#define CELL_FALSE       ((cell)10)
#define CELL_EMPTY_TUPLE ((cell)14)
#define CELL_NOTHING     ((cell)18) /* no value at all */

enum node_kind {
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

enum node_part { NODE_WHAT = 1, NODE_ARGS, NODE_STATE, NODE_ITEMS };

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

struct nodes {
    int shift; /* words of a segment, as a power of two */
    uint32_t **segments, **owned;
    size_t nsegments, room_segments, nowned, room_owned;
    uint64_t next, end; /* free words of the last segment */
};

void nodes_start(struct nodes *nodes,
                 uint64_t nbytes); /* of the stream, for the size of segments */
void nodes_drop(struct nodes *nodes);

rsd_status node_i64(struct nodes *nodes, int64_t value, cell *out);
rsd_status node_bytes(struct nodes *nodes, enum node_kind kind, uint64_t n, cell *out,
                      void **bytes);
rsd_status node_tuple(struct nodes *nodes, const cell *items, size_t n, cell *out);
rsd_status node_container(struct nodes *nodes, enum node_kind kind, cell *out);
rsd_status node_append(struct nodes *nodes, cell container, const cell *items, size_t n);
rsd_status node_global(struct nodes *nodes, cell module, cell name, cell *out);
rsd_status node_call(struct nodes *nodes, enum node_kind kind, cell what, cell args, cell *out);
rsd_status node_persistent(struct nodes *nodes, cell id, cell *out);

enum node_kind node_kind(const struct nodes *nodes, cell c);
uint32_t node_count(const struct nodes *nodes, cell c); /* items, entries or bytes */
cell node_part(const struct nodes *nodes, cell c,
               enum node_part part); /* of a call, object or global */
void node_set_part(struct nodes *nodes, cell c, enum node_part part, cell value);
cell node_item(const struct nodes *nodes, cell tuple, uint32_t i);
bool node_as_i64(const struct nodes *nodes, cell c, int64_t *out);
struct slice node_text(const struct nodes *nodes,
                       cell c); /* of strings, bytes, large ints, floats */
enum known node_known(const struct nodes *nodes, cell c);              /* of a global */
cell node_find(const struct nodes *nodes, cell dict, const char *key); /* CELL_NOTHING: not there */

/* "torch.qint8", for messages; "(no global)" of what is none. */
enum { GLOBAL_TEXT_NCHARS = 200 };
const char *global_text(const struct nodes *nodes, cell c, char text[GLOBAL_TEXT_NCHARS]);

/* Through the items of a list, or the keys and values of a dict. */
struct node_walk {
    const struct nodes *nodes;
    cell batch;
    uint32_t at;
};
struct node_walk node_walk(const struct nodes *nodes, cell container);
bool node_next(struct node_walk *walk, cell *item);
bool node_next_pair(struct node_walk *walk, cell *key, cell *value);

enum known known_global(struct slice module, struct slice name);

/* ---- pickle.c ---- */

/* Reads n bytes of the stream at a place. */
typedef rsd_status pickle_read(void *context, uint64_t at, void *out, size_t n);

/* Reads a pickle of at most nbytes; *used is how many it took. nodes_drop gives the values back. */
rsd_status pickle_load(pickle_read *read, void *context, uint64_t nbytes, struct nodes *nodes,
                       cell *root, uint64_t *used);
rsd_status pickle_load_memory(const void *bytes, size_t nbytes, struct nodes *nodes, cell *root,
                              uint64_t *used);

/* ---- emit.c: pickles, written ---- */

void emit_op(struct bytes *out, const char *op);
void emit_number(struct bytes *out, uint64_t value, int nbytes); /* little-endian, no opcode */
void emit_int(struct bytes *out, int64_t value);
void emit_float(struct bytes *out, double value);
void emit_text(struct bytes *out, struct slice text);
void emit_global(struct bytes *out, const char *module, const char *name);

rsd_status json_to_pickle(const char *text, struct bytes *out);
rsd_status json_to_path(const char *text,
                        struct bytes *out); /* a list as a tuple, no opcode before */

/* ---- values.c: plain values ---- */

/* *json is NULL if the value is not plain. */
rsd_status value_to_json(const struct nodes *nodes, cell c, char **json);
rsd_status value_to_pickle(const struct nodes *nodes, cell c, struct bytes *out, bool *plain);

bool value_is_dict(const struct nodes *nodes, cell c); /* or an OrderedDict */
cell value_dict(const struct nodes *nodes, cell c);    /* its entries; CELL_NOTHING: it has none */

#endif
