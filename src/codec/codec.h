/* codec.h - the door of codec: what bytes in files mean.
 *
 * Pickles, archives, JSON, checksums, the names of dtypes and the items of torch.save, read and written.
 * Bytes come from a function or from memory; codec has never heard of files, and of tensors it knows
 * only dtypes and shapes.
 *
 * Every byte is hostile: nothing is built that a pickle names, lengths are checked before they are used,
 * and memory stays in proportion to what was read.
 */
#ifndef CODEC_H
#define CODEC_H

#include "layout.h"

struct slice {
    const char *bytes;
    size_t nbytes;
};

/* ---- crc.c: remainders of bytes, raw and linear ---- */

enum crc_kind { CRC_ZIP, CRC_ECMA, CRC_JONES };

/* Goes on from a state; 0 to start with. */
uint64_t crc_update(enum crc_kind kind, uint64_t state, const void *data, size_t n);

/* The remainder of a string whose first part has this one, when nbytes zeros follow. */
uint64_t crc_shift(enum crc_kind kind, uint64_t state, uint64_t nbytes);

uint32_t crc32_of(const void *data, size_t n);          /* as zip wants it */
uint32_t crc32_from_raw(uint64_t raw, uint64_t nbytes); /* the same, from a raw remainder */

int crc_nlevels(void); /* for tests: ways to compute, best last */
uint64_t crc_at_level(int level, enum crc_kind kind, uint64_t state, const void *data, size_t n);

/* ---- json.c: a strict pull parser ---- */

struct json {
    const char *text;
    size_t nbytes, at;
    int depth;
    bool fresh; /* just entered: no comma is due */
    char *scratch;
    size_t used, room;
};

void json_start(struct json *j, const char *text, size_t nbytes);
void json_drop(struct json *j);
rsd_status json_fail(const struct json *j, const char *what);
char json_peek(struct json *j); /* the first character of what comes next; '\0' at the end */
rsd_status json_enter(struct json *j, char bracket);
rsd_status json_next_key(struct json *j, struct slice *key, bool *more);
rsd_status json_next_item(struct json *j, bool *more);
rsd_status json_string(struct json *j, struct slice *out);
rsd_status json_u64(struct json *j, uint64_t *out);
rsd_status json_number(struct json *j, double *value, int64_t *integer, bool *whole);
rsd_status json_skip(struct json *j);
rsd_status json_end(struct json *j);

void json_add_string(struct text *text, const char *string, size_t nbytes);
bool is_utf8(const char *text, size_t nbytes);

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
bool slice_is(struct slice slice, const char *text);

/* ---- pickle.c ---- */

/* Reads n bytes of the stream at a place. */
typedef rsd_status pickle_read(void *context, uint64_t at, void *out, size_t n);

/* Reads a pickle of at most nbytes; *used is how many it took. nodes_drop gives the values back. */
rsd_status pickle_load(pickle_read *read, void *context, uint64_t nbytes, struct nodes *nodes,
                       cell *root, uint64_t *used);
rsd_status pickle_load_memory(const void *bytes, size_t nbytes, struct nodes *nodes, cell *root,
                              uint64_t *used);

/* ---- zip.c ---- */

typedef rsd_status zip_read(void *context, uint64_t at, void *out, size_t n);

struct zip_record {
    struct slice name;
    uint64_t header; /* where its header begins in the archive */
    uint64_t data;   /* and its bytes, once located; 0: not yet */
    uint64_t nbytes;
    uint32_t crc;
};

struct zip_name {
    struct zip_record *record;
};

struct zip {
    zip_read *read;
    void *context;
    uint64_t nbytes;
    uint64_t directory_at;
    unsigned char *directory;
    struct zip_record *records; /* by place */
    struct zip_name *by_name;
    size_t nrecords;
};

rsd_status zip_open(struct zip *zip, zip_read *read, void *context, uint64_t nbytes);
void zip_close(struct zip *zip);
struct slice zip_folder(const struct zip *zip);

/* A record by its name without the folder, located; NULL: there is none. */
rsd_status zip_find(struct zip *zip, const char *name, struct zip_record **out);
rsd_status zip_locate(const struct zip *zip, struct zip_record *record);

/* The values of a located record that is a pickle; EFORMAT if its CRC-32 is wrong. */
rsd_status zip_pickle(const struct zip *zip, const struct zip_record *record, struct nodes *nodes,
                      cell *root);

/* ---- names.c ---- */

/* 0 for a name that is no dtype we know; NULL for a dtype that has no such name. */
rsd_dtype dtype_from_torch(struct slice name);
rsd_dtype dtype_from_storage(struct slice name);
rsd_dtype dtype_from_safetensors(struct slice name);
const char *dtype_to_torch(rsd_dtype dtype);
const char *dtype_to_storage(rsd_dtype dtype);
const char *dtype_to_safetensors(rsd_dtype dtype);

/* ---- view.c: a tensor as torch pickles it ---- */

struct view {
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS], strides[RSD_MAX_DIMS], offset; /* in elements */
    struct slice key;                                           /* of its storage, in the nodes */
    uint64_t storage_count; /* elements of the storage, or bytes if it is untyped */
    bool untyped;
};

bool view_is_tensor(const struct nodes *nodes, cell c);
rsd_status view_take(const struct nodes *nodes, cell c, struct view *out);

/* EFORMAT unless the view lies inside a storage of so many bytes, with no two elements in one place. */
rsd_status view_check(const struct view *view, uint64_t record_nbytes);

/* ---- emit.c: pickles, written ---- */

/* Starts as {0}. The first failure is kept. */
struct bytes {
    unsigned char *data;
    size_t n, room;
    bool failed;
};
void bytes_put(struct bytes *out, const void *data, size_t n);
void bytes_drop(struct bytes *bytes);

void emit_op(struct bytes *out, const char *op);
void emit_number(struct bytes *out, uint64_t value, int nbytes); /* little-endian, no opcode */
void emit_int(struct bytes *out, int64_t value);
void emit_float(struct bytes *out, double value);
void emit_text(struct bytes *out, struct slice text);
void emit_global(struct bytes *out, const char *module, const char *name);

rsd_status json_to_pickle(const char *text, struct bytes *out);
rsd_status json_to_path(const char *text,
                        struct bytes *out); /* a list as a tuple, no opcode before */

/* ---- item.c: tensors and values as torch.save writes them ---- */

/* What comes before the bytes of a dense tensor, and after: for the latter, their CRC-32 and the first
 * eight of them. Strides, in elements, are what the item says of itself; NULL: rows, the last dim fastest. */
rsd_status item_head(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const int64_t *strides,
                     struct bytes *head);
rsd_status item_tail(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const int64_t *strides,
                     uint32_t crc, const unsigned char first[8], struct bytes *tail);
rsd_status item_nbytes(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const int64_t *strides,
                       uint64_t *head_nbytes, uint64_t *nbytes);

/* A value, given as its pickle. */
rsd_status item_of_pickle(const struct bytes *pickle, struct bytes *out);

/* ---- values.c: plain values ---- */

/* *json is NULL if the value is not plain. */
rsd_status value_to_json(const struct nodes *nodes, cell c, char **json);
rsd_status value_to_pickle(const struct nodes *nodes, cell c, struct bytes *out, bool *plain);

bool value_is_dict(const struct nodes *nodes, cell c); /* or an OrderedDict */
cell value_dict(const struct nodes *nodes, cell c);    /* its entries; CELL_NOTHING: it has none */

/* ---- intern.c: names to numbers ---- */

struct interned {
    struct slice name; /* must stay where it is */
    size_t number;
};
struct intern {
    struct interned *slots;
    size_t n, room;
};
bool intern_find(const struct intern *intern, struct slice name, size_t *number);
rsd_status intern_add(struct intern *intern, struct slice name, size_t number);
void intern_drop(struct intern *intern);

/* ---- cast.c ---- */

/* Whether elements of one dtype can become another's, and does it for n of them. */
bool can_cast(rsd_dtype to, rsd_dtype from);
void cast_elements(rsd_dtype to, void *out, rsd_dtype from, const void *in, int64_t n);

#endif
