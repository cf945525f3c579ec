/* pickle_json.c - plain values: pickled nodes as JSON to read, and as a pickle to write again.
 *
 * Plain are None, booleans, numbers, strings, bytes, and lists, tuples, sets and dicts of plain values.
 * Any other part (a tensor, an object of some class) makes the whole value opaque: it can only be copied as
 * it is. Nodes may form cycles and share parts, so depth and length are limited: a value that becomes many
 * times as long as its nodes is opaque too.
 *
 * In JSON, tuples and sets are lists, keys of dicts are text, bytes are {"bytes": "hex digits"}, and
 * floats that JSON lacks are the strings "nan", "inf" and "-inf".
 */
#include "pickle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64, MAX_NODES = 1 << 20, MAX_DIGIT_BYTES = 256 };
enum { MAX_GROWTH = 8, START_NBYTES = 1 << 16 };   /* bytes written for each byte of nodes */
enum { FLOAT_STEPS = 128, SUBNORMAL_STEPS = 512 }; /* to print a float */
enum { MAX_ESCAPED = 6 };                          /* \u0001 */

struct plain_writer {
    const struct pickle_tree *tree;
    int64_t left;   /* nodes that may still be written */
    uint64_t limit; /* of the bytes written */
    struct text *json;
    struct bytes *pickle;
};

static struct plain_writer start_writer(const struct pickle_tree *tree)
{
    uint64_t nbytes = tree->next * sizeof(uint32_t);
    return (struct plain_writer){
        .tree = tree, .left = MAX_NODES, .limit = START_NBYTES + nbytes * MAX_GROWTH};
}

/* Returns whether n bytes may be added to what is `written`. */
static bool may_grow(const struct plain_writer *w, size_t written, size_t n)
{
    return written <= w->limit && n <= w->limit - written && budget_take(1);
}

/* Finds the text in _codecs.encode(text, 'latin1'), which is how protocol 2 writes bytes. */
static bool find_encoded_bytes(const struct pickle_tree *tree, pickle_node c, struct slice *text)
{
    if (pickle_kind(tree, c) != NODE_CALL ||
        pickle_known(tree, pickle_part(tree, c, NODE_WHAT)) != KNOWN_ENCODE)
        return false;
    pickle_node args = pickle_part(tree, c, NODE_ARGS);
    if (pickle_count(tree, args) != 2 ||
        pickle_kind(tree, pickle_item(tree, args, 0)) != NODE_STRING ||
        !slice_is(pickle_text(tree, pickle_item(tree, args, 1)), "latin1"))
        return false;
    *text = pickle_text(tree, pickle_item(tree, args, 0));
    return true;
}

/* ---- numbers ---- */

/* Adds a whole number of any length, little-endian two's complement, in decimal. */
static bool add_decimal(struct slice number, struct text *out)
{
    uint32_t limbs[MAX_DIGIT_BYTES / 4 + 1] = {0};
    char digits[MAX_DIGIT_BYTES * 3 + 2];
    size_t n = number.nbytes, nlimbs = n / 4 + 1, at = sizeof digits;
    if (n == 0 || n > MAX_DIGIT_BYTES || !budget_take(n * n / STEP_NBYTES))
        return false;
    bool negative = (unsigned char)number.bytes[n - 1] >> 7;
    uint32_t carry = negative;
    for (size_t i = 0; i < 4 * nlimbs; i++) {
        uint32_t byte = i < n ? (unsigned char)number.bytes[i] : negative ? 255 : 0;
        if (negative) {
            byte = (byte ^ 255) + carry;
            carry = byte >> 8;
        }
        limbs[i / 4] |= (byte & 255) << 8 * (i % 4);
    }
    digits[--at] = '\0';
    bool more = true;
    while (more) {
        uint64_t rest = 0;
        more = false;
        for (size_t i = nlimbs; i-- > 0;) {
            rest = rest << 32 | limbs[i];
            limbs[i] = (uint32_t)(rest / 10);
            more = more || limbs[i];
            rest %= 10;
        }
        digits[--at] = (char)('0' + rest);
    }
    text_add(out, "%s%s", negative ? "-" : "", digits + at);
    return true;
}

static double node_float(const struct pickle_tree *tree, pickle_node c)
{
    double value = 0;
    memcpy(&value, pickle_text(tree, c).bytes, sizeof value);
    return value;
}

/* ---- JSON ---- */

static bool add_json_value(struct plain_writer *w, pickle_node c, int depth);

/* Adds the key of a dict as JSON text. Returns false if it is not a string, number, boolean or None. */
static bool add_json_key(struct plain_writer *w, pickle_node key)
{
    struct slice text = pickle_text(w->tree, key);
    struct text plain = {0};
    struct plain_writer inner = {.tree = w->tree, .left = 1, .limit = w->limit, .json = &plain};
    switch (pickle_kind(w->tree, key)) {
    case NODE_STRING:
        if (!may_grow(w, w->json->length, text.nbytes * MAX_ESCAPED))
            return false;
        json_add_string(w->json, text.bytes, text.nbytes);
        return true;
    case NODE_INT:
    case NODE_FLOAT:
    case NODE_ATOM:
        if (!add_json_value(&inner, key, 0) || plain.failed) {
            text_drop(&plain);
            return false;
        }
        json_add_string(w->json, plain.chars, plain.length);
        text_drop(&plain);
        return true;
    default:
        return false;
    }
}

/* Adds a dict, list or tuple. */
static bool add_json_items(struct plain_writer *w, pickle_node container, int depth)
{
    enum pickle_kind kind = pickle_kind(w->tree, container);
    bool dict = kind != NODE_LIST && kind != NODE_TUPLE;
    struct pickle_walk walk =
        dict ? pickle_walk_dict(w->tree, container) : pickle_walk(w->tree, container);
    pickle_node item;
    text_add(w->json, dict ? "{" : "[");
    for (bool first = true; pickle_walk_next(&walk, &item); first = false) {
        text_add(w->json, "%s", first ? "" : ", ");
        if (dict) {
            if (!add_json_key(w, item) || !pickle_walk_next(&walk, &item))
                return false;
            text_add(w->json, ": ");
        }
        if (!add_json_value(w, item, depth + 1))
            return false;
    }
    text_add(w->json, dict ? "}" : "]");
    return true;
}

/* Adds bytes as hex digits. With `latin1` they were written as text, one character up to 255 for each. Returns
 * false for a text with other characters. */
static bool add_json_bytes(struct text *out, struct slice bytes, bool latin1)
{
    static const char digits[] = "0123456789abcdef";
    char hex[128];
    size_t nhex = 0;
    text_add(out, "{\"bytes\": \"");
    for (size_t i = 0; i < bytes.nbytes; i++) {
        unsigned c = (unsigned char)bytes.bytes[i];
        if (latin1 && c >= 0xc4)
            return false;
        if (latin1 && c >= 0xc2) /* two bytes of UTF-8, which were checked */
            c = (c & 3) << 6 | ((unsigned char)bytes.bytes[++i] & 0x3f);
        hex[nhex++] = digits[c >> 4];
        hex[nhex++] = digits[c & 15];
        if (nhex == sizeof hex || i + 1 == bytes.nbytes) {
            text_add(out, "%.*s", (int)nhex, hex);
            nhex = 0;
        }
    }
    text_add(out, "\"}");
    return true;
}

/* Writes a value. Returns false if it is not plain, or if it is too deep, too long or too much work. */
static bool add_json_value(struct plain_writer *w, pickle_node c, int depth)
{
    const struct pickle_tree *tree = w->tree;
    struct slice text = pickle_text(tree, c);
    int64_t number;
    if (depth > MAX_DEPTH || w->left-- <= 0 || w->json->failed ||
        !may_grow(w, w->json->length, text.nbytes * MAX_ESCAPED))
        return false;
    switch (pickle_kind(tree, c)) {
    case NODE_ATOM:
        text_add(w->json, "%s", c == PICKLE_NONE ? "null" : c == PICKLE_TRUE ? "true" : "false");
        return true;
    case NODE_INT:
        if (!pickle_as_i64(tree, c, &number))
            return add_decimal(text, w->json);
        text_add(w->json, "%lld", (long long)number);
        return true;
    case NODE_FLOAT:
        if (!budget_take(isnormal(node_float(tree, c)) ? FLOAT_STEPS : SUBNORMAL_STEPS))
            return false;
        json_add_float(w->json, node_float(tree, c));
        return true;
    case NODE_STRING:
        json_add_string(w->json, text.bytes, text.nbytes);
        return true;
    case NODE_BYTES:
        return add_json_bytes(w->json, text, false);
    case NODE_TUPLE:
    case NODE_LIST:
    case NODE_DICT:
        return add_json_items(w, c, depth);
    case NODE_CALL:
    case NODE_OBJECT:
        if (pickle_is_dict(tree, c))
            return add_json_items(w, c, depth);
        return find_encoded_bytes(tree, c, &text) &&
               may_grow(w, w->json->length, text.nbytes * 2) && add_json_bytes(w->json, text, true);
    default:
        return false;
    }
}

rsd_status pickle_to_json(const struct pickle_tree *tree, pickle_node c, char **json)
{
    struct text text = {0};
    struct plain_writer w = start_writer(tree);
    w.json = &text;
    *json = NULL;
    if (add_json_value(&w, c, 0))
        return text_take(&text, json);
    bool failed = text.failed;
    text_drop(&text);
    return failed ? fail(RSD_ENOMEM, "no memory for a value") : RSD_OK;
}

/* ---- as a pickle of protocol 2, which torch.load takes with weights_only too ---- */

static bool add_pickle_value(struct plain_writer *w, pickle_node c, int depth);

/* Writes an integer, also one of more than 64 bits. Returns false if it has more than 255 bytes. */
static bool add_pickle_number(struct plain_writer *w, pickle_node c)
{
    int64_t number;
    struct slice text = pickle_text(w->tree, c);
    if (pickle_as_i64(w->tree, c, &number)) {
        pickle_write_int(w->pickle, number);
        return true;
    }
    if (text.nbytes > 255)
        return false;
    pickle_write_op(w->pickle, "\x8a");
    bytes_put_number(w->pickle, text.nbytes, 1);
    bytes_put(w->pickle, text.bytes, text.nbytes);
    return true;
}

/* Adds a dict, list or tuple. */
static bool add_pickle_items(struct plain_writer *w, pickle_node container, int depth)
{
    enum pickle_kind kind = pickle_kind(w->tree, container);
    bool dict = kind != NODE_LIST && kind != NODE_TUPLE;
    struct pickle_walk walk =
        dict ? pickle_walk_dict(w->tree, container) : pickle_walk(w->tree, container);
    pickle_node item;
    pickle_write_op(w->pickle, kind == NODE_TUPLE ? "(" : kind == NODE_LIST ? "](" : "}(");
    while (pickle_walk_next(&walk, &item))
        if (!add_pickle_value(w, item, depth + 1))
            return false;
    pickle_write_op(w->pickle, kind == NODE_TUPLE ? "t" : kind == NODE_LIST ? "e" : "u");
    return true;
}

/* Adds bytes as protocol 2 has them: a text with one character for each. */
static void add_pickle_encoded(struct plain_writer *w, struct slice text)
{
    pickle_write_global(w->pickle, "_codecs", "encode");
    pickle_write_text(w->pickle, text);
    pickle_write_string(w->pickle, "latin1");
    pickle_write_op(w->pickle, "\x86R");
}

static void add_pickle_bytes(struct plain_writer *w, struct slice bytes)
{
    struct bytes text = {0};
    for (size_t i = 0; i < bytes.nbytes; i++) {
        unsigned char c = (unsigned char)bytes.bytes[i];
        const unsigned char pair[2] = {(unsigned char)(0xc0 | c >> 6),
                                       (unsigned char)(0x80 | (c & 0x3f))};
        bytes_put(&text, c < 0x80 ? &c : pair, c < 0x80 ? 1 : 2);
    }
    w->pickle->failed = w->pickle->failed || text.failed;
    add_pickle_encoded(w, (struct slice){(const char *)text.data, text.n});
    bytes_drop(&text);
}

/* Writes a value. Returns false if it is not plain, or if it is too deep, too long or too much work. */
static bool add_pickle_value(struct plain_writer *w, pickle_node c, int depth)
{
    const struct pickle_tree *tree = w->tree;
    struct slice text = pickle_text(tree, c);
    if (depth > MAX_DEPTH || w->left-- <= 0 || w->pickle->failed ||
        !may_grow(w, w->pickle->n, text.nbytes * 2))
        return false;
    switch (pickle_kind(tree, c)) {
    case NODE_ATOM:
        pickle_write_op(w->pickle, c == PICKLE_NONE ? "N" : c == PICKLE_TRUE ? "\x88" : "\x89");
        return true;
    case NODE_INT:
        return add_pickle_number(w, c);
    case NODE_FLOAT:
        pickle_write_float(w->pickle, node_float(tree, c));
        return true;
    case NODE_STRING:
        pickle_write_text(w->pickle, text);
        return true;
    case NODE_BYTES:
        add_pickle_bytes(w, text);
        return true;
    case NODE_TUPLE:
    case NODE_LIST:
    case NODE_DICT:
        return add_pickle_items(w, c, depth);
    case NODE_CALL:
    case NODE_OBJECT:
        if (pickle_is_dict(tree, c))
            return add_pickle_items(w, c, depth);
        if (!find_encoded_bytes(tree, c, &text) || !may_grow(w, w->pickle->n, text.nbytes))
            return false;
        add_pickle_encoded(w, text);
        return true;
    default:
        return false;
    }
}

rsd_status pickle_to_plain_pickle(const struct pickle_tree *tree, pickle_node c, struct bytes *out,
                                  bool *plain)
{
    struct plain_writer w = start_writer(tree);
    w.pickle = out;
    bytes_put(out, "\x80\x02", 2);
    *plain = add_pickle_value(&w, c, 0);
    pickle_write_op(w.pickle, ".");
    return out->failed ? fail(RSD_ENOMEM, "no memory for a value") : RSD_OK;
}
