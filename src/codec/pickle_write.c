/* emit.c - pickles, written: bytes that grow, and the opcodes that all writers use.
 *
 * Integers take the shortest form, as Python's own pickler does.
 */
#include "pickle.h"

#include <string.h>

void pickle_write_op(struct bytes *out, const char *op)
{
    bytes_put(out, op, strlen(op));
}

void pickle_write_number(struct bytes *out, uint64_t value, int nbytes)
{
    unsigned char bytes[8];
    for (int i = 0; i < nbytes; i++, value >>= 8)
        bytes[i] = (unsigned char)value;
    bytes_put(out, bytes, (size_t)nbytes);
}

/* Numbers of n bytes, with their sign, go up to this. */
static int64_t reach_of(int n)
{
    return INT64_C(1) << (8 * n - 1);
}

void pickle_write_int(struct bytes *out, int64_t value)
{
    if (value >= 0 && value < 256) {
        pickle_write_op(out, "K");
        pickle_write_number(out, (uint64_t)value, 1);
    } else if (value >= 0 && value < 65536) {
        pickle_write_op(out, "M");
        pickle_write_number(out, (uint64_t)value, 2);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
        pickle_write_op(out, "J");
        pickle_write_number(out, (uint64_t)value, 4);
    } else {
        int n = 5;
        while (n < 8 && (value >= reach_of(n) || value < -reach_of(n)))
            n++;
        pickle_write_op(out, "\x8a");
        pickle_write_number(out, (uint64_t)n, 1);
        pickle_write_number(out, (uint64_t)value, n);
    }
}

void pickle_write_float(struct bytes *out, double value)
{
    uint64_t bits;
    unsigned char bytes[8];
    memcpy(&bits, &value, sizeof bits);
    for (int i = 8; i-- > 0; bits >>= 8) /* the one number that is big-endian */
        bytes[i] = (unsigned char)bits;
    pickle_write_op(out, "G");
    bytes_put(out, bytes, sizeof bytes);
}

void pickle_write_text(struct bytes *out, struct slice text)
{
    pickle_write_op(out, "X");
    pickle_write_number(out, text.nbytes, 4);
    bytes_put(out, text.bytes, text.nbytes);
}

void pickle_write_global(struct bytes *out, const char *module, const char *name)
{
    pickle_write_op(out, "c");
    pickle_write_op(out, module);
    pickle_write_op(out, "\n");
    pickle_write_op(out, name);
    pickle_write_op(out, "\n");
}

/* ---- from JSON, as torch.save pickles the same value ---- */

enum { MOST_DEPTH = 64, BATCH = 1000 };

struct from_json {
    struct bytes *out;
    struct json json;
    uint32_t memo;
};

static void remember(struct from_json *from)
{
    pickle_write_op(from->out, from->memo < 256 ? "q" : "r");
    pickle_write_number(from->out, from->memo, from->memo < 256 ? 1 : 4);
    from->memo++;
}

static rsd_status emit_number_of(struct from_json *from)
{
    double value;
    int64_t integer;
    bool whole;
    TRY(json_number(&from->json, &value, &integer, &whole));
    if (whole)
        pickle_write_int(from->out, integer);
    else
        pickle_write_float(from->out, value);
    return RSD_OK;
}

static void emit_text_of(struct from_json *from, struct slice text)
{
    pickle_write_text(from->out, text);
    remember(from);
}

static rsd_status emit_value(struct from_json *from, int depth);

static rsd_status emit_member(struct from_json *from, bool dict, int depth, bool *more)
{
    struct slice key;
    if (dict)
        TRY(json_next_key(&from->json, &key, more));
    else
        TRY(json_next_item(&from->json, more));
    if (*more && dict)
        emit_text_of(from, key);
    return *more ? emit_value(from, depth + 1) : RSD_OK;
}

/* Members in batches; a batch of one has a shorter form, which is known when the next does not come. */
static rsd_status emit_members(struct from_json *from, bool dict, int depth)
{
    struct bytes *out = from->out;
    bool more = true;
    TRY(json_enter(&from->json, dict ? '{' : '['));
    pickle_write_op(out, dict ? "}" : "]");
    remember(from);
    while (more) {
        size_t mark = out->n;
        int n = 0;
        pickle_write_op(out, "(");
        while (n < BATCH) {
            TRY(emit_member(from, dict, depth, &more));
            if (!more)
                break;
            n++;
        }
        if (n > 1) {
            pickle_write_op(out, dict ? "u" : "e");
        } else if (!out->failed) { /* without the mark */
            memmove(out->data + mark, out->data + mark + 1, out->n - mark - 1);
            out->n--;
            if (n == 1)
                pickle_write_op(out, dict ? "s" : "a");
        }
    }
    return RSD_OK;
}

static rsd_status emit_value(struct from_json *from, int depth)
{
    struct slice text;
    char first = json_peek(&from->json);
    if (depth > MOST_DEPTH)
        return json_fail(&from->json, "nested too deeply");
    switch (first) {
    case '[':
    case '{':
        return emit_members(from, first == '{', depth);
    case '"':
        TRY(json_string(&from->json, &text));
        emit_text_of(from, text);
        return RSD_OK;
    case 'n':
    case 't':
    case 'f':
        pickle_write_op(from->out, first == 'n' ? "N" : first == 't' ? "\x88" : "\x89");
        return json_skip(&from->json);
    default:
        return emit_number_of(from);
    }
}

rsd_status pickle_write_json(const char *text, struct bytes *out)
{
    struct from_json from = {.out = out};
    json_start(&from.json, text, strlen(text));
    pickle_write_op(out, "\x80\x02");
    rsd_status status = emit_value(&from, 0);
    if (!status)
        status = json_end(&from.json);
    json_drop(&from.json);
    pickle_write_op(out, ".");
    if (!status && out->failed)
        status = fail(RSD_ENOMEM, "no memory for a value");
    return status;
}

/* Texts and numbers, without a memo: they are short. */
static rsd_status emit_step(struct bytes *out, struct json *j)
{
    struct from_json from = {.out = out};
    struct slice text;
    char next = json_peek(j);
    if (next == '"') {
        TRY(json_string(j, &text));
        pickle_write_text(out, text);
        return RSD_OK;
    }
    if (next < '0' || next > '9')
        return json_fail(j, "a path has texts and numbers");
    from.json = *j;
    rsd_status status = emit_number_of(&from);
    *j = from.json;
    return status;
}

rsd_status pickle_write_path(const char *text, struct bytes *out)
{
    struct json j;
    bool more = false;
    json_start(&j, text, strlen(text));
    rsd_status status = json_enter(&j, '[');
    pickle_write_op(out, "(");
    while (!status && !(status = json_next_item(&j, &more)) && more)
        status = emit_step(out, &j);
    if (!status)
        status = json_end(&j);
    json_drop(&j);
    pickle_write_op(out, "t");
    return status;
}
