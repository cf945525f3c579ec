/* emit.c - pickles, written: bytes that grow, and the opcodes that all writers use.
 *
 * Integers take the shortest form, as Python's own pickler does.
 */
#include "codec.h"

#include <string.h>

void bytes_put(struct bytes *out, const void *data, size_t n)
{
    if (out->failed)
        return;
    if (GROW(out->data, out->room, out->n + n)) {
        out->failed = true;
        return;
    }
    if (n)
        memcpy(out->data + out->n, data, n);
    out->n += n;
}

void bytes_drop(struct bytes *bytes)
{
    mem_free(bytes->data);
    *bytes = (struct bytes){0};
}

void emit_op(struct bytes *out, const char *op)
{
    bytes_put(out, op, strlen(op));
}

void emit_number(struct bytes *out, uint64_t value, int nbytes)
{
    unsigned char bytes[8];
    for (int i = 0; i < nbytes; i++, value >>= 8)
        bytes[i] = (unsigned char)value;
    bytes_put(out, bytes, (size_t)nbytes);
}

void emit_int(struct bytes *out, int64_t value)
{
    if (value >= 0 && value < 256) {
        emit_op(out, "K");
        emit_number(out, (uint64_t)value, 1);
    } else if (value >= 0 && value < 65536) {
        emit_op(out, "M");
        emit_number(out, (uint64_t)value, 2);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
        emit_op(out, "J");
        emit_number(out, (uint64_t)value, 4);
    } else {
        int n = 5;
        while (n < 8 && value >> (8 * n - 1) != 0 && value >> (8 * n - 1) != -1)
            n++;
        emit_op(out, "\x8a");
        emit_number(out, (uint64_t)n, 1);
        emit_number(out, (uint64_t)value, n);
    }
}

void emit_float(struct bytes *out, double value)
{
    uint64_t bits;
    unsigned char bytes[8];
    memcpy(&bits, &value, sizeof bits);
    for (int i = 8; i-- > 0; bits >>= 8) /* the one number that is big-endian */
        bytes[i] = (unsigned char)bits;
    emit_op(out, "G");
    bytes_put(out, bytes, sizeof bytes);
}

void emit_text(struct bytes *out, struct slice text)
{
    emit_op(out, "X");
    emit_number(out, text.nbytes, 4);
    bytes_put(out, text.bytes, text.nbytes);
}

void emit_global(struct bytes *out, const char *module, const char *name)
{
    emit_op(out, "c");
    emit_op(out, module);
    emit_op(out, "\n");
    emit_op(out, name);
    emit_op(out, "\n");
}

/* ---- from JSON ---- */

enum { MOST_DEPTH = 64 };

static rsd_status emit_number_of(struct bytes *out, struct json *j)
{
    double value;
    int64_t integer;
    bool whole;
    TRY(json_number(j, &value, &integer, &whole));
    if (whole)
        emit_int(out, integer);
    else
        emit_float(out, value);
    return RSD_OK;
}

static rsd_status emit_value(struct bytes *out, struct json *j, int depth);

static rsd_status emit_list(struct bytes *out, struct json *j, int depth)
{
    bool more;
    TRY(json_enter(j, '['));
    emit_op(out, "](");
    for (;;) {
        TRY(json_next_item(j, &more));
        if (!more)
            break;
        TRY(emit_value(out, j, depth + 1));
    }
    emit_op(out, "e");
    return RSD_OK;
}

static rsd_status emit_dict(struct bytes *out, struct json *j, int depth)
{
    bool more;
    struct slice key;
    TRY(json_enter(j, '{'));
    emit_op(out, "}(");
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            break;
        emit_text(out, key);
        TRY(emit_value(out, j, depth + 1));
    }
    emit_op(out, "u");
    return RSD_OK;
}

static rsd_status emit_value(struct bytes *out, struct json *j, int depth)
{
    struct slice text;
    if (depth > MOST_DEPTH)
        return json_fail(j, "nested too deeply");
    switch (json_peek(j)) {
    case '[':
        return emit_list(out, j, depth);
    case '{':
        return emit_dict(out, j, depth);
    case '"':
        TRY(json_string(j, &text));
        emit_text(out, text);
        return RSD_OK;
    case 'n':
    case 't':
    case 'f':
        emit_op(out, json_peek(j) == 'n' ? "N" : json_peek(j) == 't' ? "\x88" : "\x89");
        return json_skip(j);
    default:
        return emit_number_of(out, j);
    }
}

rsd_status json_to_pickle(const char *text, struct bytes *out)
{
    struct json j;
    json_start(&j, text, strlen(text));
    emit_op(out, "\x80\x02");
    rsd_status status = emit_value(out, &j, 0);
    if (!status)
        status = json_end(&j);
    json_drop(&j);
    emit_op(out, ".");
    if (!status && out->failed)
        status = fail(RSD_ENOMEM, "no memory for a value");
    return status;
}

rsd_status json_to_path(const char *text, struct bytes *out)
{
    struct json j;
    bool more = false;
    json_start(&j, text, strlen(text));
    rsd_status status = json_enter(&j, '[');
    emit_op(out, "(");
    while (!status && !(status = json_next_item(&j, &more)) && more) {
        char next = json_peek(&j);
        if (next != '"' && (next < '0' || next > '9'))
            status = json_fail(&j, "a path has texts and numbers");
        else
            status = emit_value(out, &j, 0);
    }
    if (!status)
        status = json_end(&j);
    json_drop(&j);
    emit_op(out, "t");
    return status;
}
