/* pickle_write.c - opcodes of pickles, and pickles from JSON. */
#include "pickle.h"

#include <string.h>

void pickle_write_op(struct bytes *out, const char *op)
{
    bytes_put(out, op, strlen(op));
}

/* Returns the first value that does not fit into n bytes, with its sign. */
static int64_t reach_of(int n)
{
    return INT64_C(1) << (8 * n - 1);
}

void pickle_write_int(struct bytes *out, int64_t value)
{
    if (value >= 0 && value < 256) {
        pickle_write_op(out, "K");
        bytes_put_number(out, (uint64_t)value, 1);
    } else if (value >= 0 && value < 65536) {
        pickle_write_op(out, "M");
        bytes_put_number(out, (uint64_t)value, 2);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
        pickle_write_op(out, "J");
        bytes_put_number(out, (uint64_t)value, 4);
    } else {
        int n = 5;
        while (n < 8 && (value >= reach_of(n) || value < -reach_of(n)))
            n++;
        pickle_write_op(out, "\x8a");
        bytes_put_number(out, (uint64_t)n, 1);
        bytes_put_number(out, (uint64_t)value, n);
    }
}

void pickle_write_float(struct bytes *out, double value)
{
    uint64_t bits;
    unsigned char bytes[8];
    memcpy(&bits, &value, sizeof bits);
    for (int i = 8; i-- > 0; bits >>= 8) /* floats alone are big-endian */
        bytes[i] = (unsigned char)bits;
    pickle_write_op(out, "G");
    bytes_put(out, bytes, sizeof bytes);
}

void pickle_write_text(struct bytes *out, struct slice text)
{
    pickle_write_op(out, "X");
    bytes_put_number(out, text.nbytes, 4);
    bytes_put(out, text.bytes, text.nbytes);
}

void pickle_write_string(struct bytes *out, const char *string)
{
    pickle_write_text(out, slice_of(string));
}

void pickle_write_global(struct bytes *out, const char *module, const char *name)
{
    pickle_write_op(out, "c");
    pickle_write_op(out, module);
    pickle_write_op(out, "\n");
    pickle_write_op(out, name);
    pickle_write_op(out, "\n");
}

void pickle_write_memo(struct bytes *out, uint32_t entry)
{
    pickle_write_op(out, entry < 256 ? "q" : "r");
    bytes_put_number(out, entry, entry < 256 ? 1 : 4);
}

void pickle_write_recall(struct bytes *out, uint32_t entry)
{
    pickle_write_op(out, entry < 256 ? "h" : "j");
    bytes_put_number(out, entry, entry < 256 ? 1 : 4);
}

/* ---- from JSON, as torch.save pickles the same value ---- */

enum { BATCH = 1000 };

struct json_pickler {
    struct bytes *out;
    struct json json;
    uint32_t nmemo;
};

/* Writes a number as an int if it is whole, else as a float. */
static rsd_status write_json_number(struct json *j, struct bytes *out)
{
    double value;
    int64_t integer;
    bool whole;
    TRY(json_number(j, &value, &integer, &whole));
    if (whole)
        pickle_write_int(out, integer);
    else
        pickle_write_float(out, value);
    return RSD_OK;
}

static void write_json_text(struct json_pickler *pickler, struct slice text)
{
    pickle_write_text(pickler->out, text);
    pickle_write_memo(pickler->out, pickler->nmemo++);
}

static rsd_status write_json_value(struct json_pickler *pickler);

/* Writes the next member of a dict or list; *more is false at its end. */
static rsd_status write_json_member(struct json_pickler *pickler, bool dict, bool *more)
{
    struct slice key;
    if (dict)
        TRY(json_next_key(&pickler->json, &key, more));
    else
        TRY(json_next_item(&pickler->json, more));
    if (*more && dict)
        write_json_text(pickler, key);
    return *more ? write_json_value(pickler) : RSD_OK;
}

/* Writes members in batches. A batch of one has a shorter form, which is written when no second follows. */
static rsd_status write_json_members(struct json_pickler *pickler, bool dict)
{
    struct bytes *out = pickler->out;
    bool more = true;
    TRY(json_enter(&pickler->json, dict ? '{' : '['));
    pickle_write_op(out, dict ? "}" : "]");
    pickle_write_memo(out, pickler->nmemo++);
    while (more) {
        size_t mark = out->n;
        int n = 0;
        pickle_write_op(out, "(");
        while (n < BATCH) {
            TRY(write_json_member(pickler, dict, &more));
            if (!more)
                break;
            n++;
        }
        if (n > 1) {
            pickle_write_op(out, dict ? "u" : "e");
        } else if (!out->failed) { /* removes the mark */
            memmove(out->data + mark, out->data + mark + 1, out->n - mark - 1);
            out->n--;
            if (n == 1)
                pickle_write_op(out, dict ? "s" : "a");
        }
    }
    return RSD_OK;
}

/* Writes the value that comes next. The parser limits how deep values are nested. */
static rsd_status write_json_value(struct json_pickler *pickler)
{
    struct slice text;
    char first = json_peek(&pickler->json);
    switch (first) {
    case '[':
    case '{':
        return write_json_members(pickler, first == '{');
    case '"':
        TRY(json_string(&pickler->json, &text));
        write_json_text(pickler, text);
        return RSD_OK;
    case 'n':
    case 't':
    case 'f':
        pickle_write_op(pickler->out, first == 'n' ? "N" : first == 't' ? "\x88" : "\x89");
        return json_skip(&pickler->json);
    default:
        return write_json_number(&pickler->json, pickler->out);
    }
}

rsd_status pickle_write_json(const char *text, struct bytes *out)
{
    struct json_pickler pickler = {.out = out};
    json_start(&pickler.json, text, strlen(text));
    pickle_write_op(out, "\x80\x02");
    rsd_status status = write_json_value(&pickler);
    if (!status)
        status = json_end(&pickler.json);
    json_drop(&pickler.json);
    pickle_write_op(out, ".");
    if (!status && out->failed)
        status = fail(RSD_ENOMEM, "no memory for a value");
    return status;
}

/* Writes a text or number without a memo entry, because they are short. */
static rsd_status write_path_step(struct json *j, struct bytes *out)
{
    struct slice text;
    char next = json_peek(j);
    if (next >= '0' && next <= '9')
        return write_json_number(j, out);
    if (next != '"')
        return json_fail(j, "path element is neither a text nor an integer of 0 or more");
    TRY(json_string(j, &text));
    pickle_write_text(out, text);
    return RSD_OK;
}

rsd_status pickle_write_path(const char *text, struct bytes *out)
{
    struct json j;
    bool more = false;
    json_start(&j, text, strlen(text));
    rsd_status status = json_enter(&j, '[');
    pickle_write_op(out, "(");
    while (!status && !(status = json_next_item(&j, &more)) && more)
        status = write_path_step(&j, out);
    if (!status)
        status = json_end(&j);
    json_drop(&j);
    pickle_write_op(out, "t");
    return status;
}
