/* text.c - text and bytes that grow, for output without a fixed length; words that users type; characters. */
#include "base.h"

#include <ctype.h>
#include <locale.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { FORMAT_STEPS = 6 }; /* of one call of vsnprintf */

/* Grows a list of characters or bytes, at most to twice what is needed, and takes that from the budget. */
static bool grow_chars(void *list, size_t *capacity, size_t need)
{
    return (need <= *capacity || budget_take_memory(2 * (uint64_t)need - *capacity)) &&
           mem_grow(list, capacity, need, 1) == RSD_OK;
}

static locale_t plain_locale; /* with a decimal point */
static pthread_once_t plain_locale_once = PTHREAD_ONCE_INIT;

static void make_plain_locale(void)
{
    plain_locale = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
}

int text_format(char *chars, size_t capacity, const char *format, va_list args)
{
    pthread_once(&plain_locale_once, make_plain_locale);
    locale_t before = plain_locale ? uselocale(plain_locale) : (locale_t)0;
    int length = vsnprintf(chars, capacity, format, args);
    if (before)
        uselocale(before);
    return length;
}

void text_add(struct text *text, const char *format, ...)
{
    text->failed = text->failed || !budget_take(FORMAT_STEPS);
    if (text->failed)
        return;
    for (;;) {
        size_t capacity = text->capacity - text->length;
        va_list args;
        va_start(args, format);
        int length =
            text_format(capacity ? text->chars + text->length : NULL, capacity, format, args);
        va_end(args);
        if (length >= 0 && (size_t)length < capacity) {
            text->length += (size_t)length;
            return;
        }
        if (length < 0 ||
            !grow_chars(&text->chars, &text->capacity, text->length + (size_t)length + 1)) {
            text->failed = true;
            return;
        }
    }
}

rsd_status text_take(struct text *text, char **chars)
{
    text_add(text, "%s", "");
    if (text->failed) {
        text_drop(text);
        return fail(RSD_ENOMEM, "out of memory");
    }
    *chars = text->chars;
    *text = (struct text){0};
    return RSD_OK;
}

void text_drop(struct text *text)
{
    budget_return_memory(text->capacity);
    mem_free(text->chars);
    *text = (struct text){0};
}

bool slice_is(struct slice slice, const char *text)
{
    return slice.nbytes == strlen(text) && memcmp(slice.bytes, text, slice.nbytes) == 0;
}

bool slice_begins(struct slice slice, const char *text)
{
    size_t n = strlen(text);
    return slice.nbytes >= n && memcmp(slice.bytes, text, n) == 0;
}

bool slice_equal(struct slice a, struct slice b)
{
    return a.nbytes == b.nbytes && (a.nbytes == 0 || memcmp(a.bytes, b.bytes, a.nbytes) == 0);
}

char *text_copy(const char *text)
{
    return slice_copy(slice_of(text));
}

char *slice_copy(struct slice slice)
{
    char *copy = mem_new(slice.nbytes + 1, 1);
    if (copy && slice.nbytes)
        memcpy(copy, slice.bytes, slice.nbytes);
    return copy;
}

enum {
    MAX_WORD = 40,   /* characters that are compared, besides what both texts begin and end with */
    MAX_EDITS = 3,   /* in a text that is similar */
    MAX_LISTED = 22, /* words in an error */
};

/* Returns the number of characters to insert, remove, replace or swap with the next that turn one text into the
 * other. */
static size_t count_edits(const char *a, const char *b)
{
    size_t rows[3][MAX_WORD + 1] = {0}, na = strlen(a), nb = strlen(b);
    while (na && nb && tolower((unsigned char)*a) == tolower((unsigned char)*b))
        a++, b++, na--, nb--;
    while (na && nb && tolower((unsigned char)a[na - 1]) == tolower((unsigned char)b[nb - 1]))
        na--, nb--;
    if (na > MAX_WORD || nb > MAX_WORD)
        return SIZE_MAX;
    for (size_t j = 0; j <= nb; j++)
        rows[0][j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t *row = rows[i % 3], *last = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            int x = tolower((unsigned char)a[i - 1]), y = tolower((unsigned char)b[j - 1]);
            size_t replaced = last[j - 1] + (x != y);
            row[j] = (last[j] < row[j - 1] ? last[j] : row[j - 1]) + 1;
            row[j] = replaced < row[j] ? replaced : row[j];
            if (i > 1 && j > 1 && x == tolower((unsigned char)b[j - 2]) &&
                y == tolower((unsigned char)a[i - 2]) && before[j - 2] + 1 < row[j])
                row[j] = before[j - 2] + 1;
        }
    }
    return rows[na % 3][nb];
}

const char *rsd_nearest_word(const char *text, size_t nwords, const char *const *words)
{
    const char *nearest = NULL;
    size_t fewest = SIZE_MAX;
    for (size_t i = 0; i < nwords; i++) {
        size_t edits = count_edits(text, words[i]);
        if (edits < fewest && edits <= MAX_EDITS && 3 * edits <= strlen(words[i])) {
            nearest = words[i];
            fewest = edits;
        }
    }
    return nearest;
}

rsd_status text_unknown(const char *what, const char *text, size_t nwords, const char *const *words)
{
    const char *nearest = rsd_nearest_word(text, nwords, words);
    struct text list = {0};
    for (size_t i = 0; i < nwords && i < MAX_LISTED; i++)
        text_add(&list, "%s%s", i ? ", " : "", words[i]);
    if (nearest)
        error_set("unknown %s '%.40s'; did you mean '%s'?", what, text, nearest);
    else if (nwords && !list.failed)
        error_set("unknown %s '%.40s'; use one of %s", what, text, list.chars);
    else
        error_set("unknown %s '%.40s'", what, text);
    text_drop(&list);
    return RSD_EINVAL;
}

const char *text_find_equals(const char *text)
{
    int depth = 0;
    for (const char *c = text + strlen(text); c-- > text;) {
        depth += (*c == ')') - (*c == '(');
        if (*c == '=' && depth <= 0)
            return c;
    }
    return NULL;
}

void bytes_put(struct bytes *out, const void *data, size_t n)
{
    if (out->failed)
        return;
    if (!budget_take_text(n) || !grow_chars(&out->data, &out->capacity, out->n + n)) {
        out->failed = true;
        return;
    }
    if (n)
        memcpy(out->data + out->n, data, n);
    out->n += n;
}

void bytes_put_text(struct bytes *out, const char *text)
{
    bytes_put(out, text, strlen(text));
}

void bytes_put_number(struct bytes *out, uint64_t value, int nbytes)
{
    unsigned char bytes[8];
    for (int i = 0; i < nbytes; i++, value >>= 8)
        bytes[i] = (unsigned char)value;
    bytes_put(out, bytes, (size_t)nbytes);
}

void bytes_drop(struct bytes *bytes)
{
    budget_return_memory(bytes->capacity);
    mem_free(bytes->data);
    *bytes = (struct bytes){0};
}

/* ---- characters ---- */

static bool is_hidden_code(uint32_t code)
{
    static const struct {
        uint32_t first, last;
    } ranges[] = {
        {0, 0x1f},          {0x7f, 0x9f},       {0xad, 0xad},       {0x34f, 0x34f},
        {0x61c, 0x61c},     {0x115f, 0x1160},   {0x17b4, 0x17b5},   {0x180b, 0x180f},
        {0x200b, 0x200f},   {0x2028, 0x202e},   {0x2060, 0x206f},   {0x3164, 0x3164},
        {0xfe00, 0xfe0f},   {0xfeff, 0xfeff},   {0xffa0, 0xffa0},   {0xfff0, 0xfffb},
        {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (code >= ranges[i].first && code <= ranges[i].last)
            return true;
    return false;
}

int32_t rsd_text_char(const char *text, uint32_t *code, int32_t *hidden)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000}; /* of each length */
    const unsigned char *c = (const unsigned char *)text;
    int32_t n = *c < 0x80 ? 1 : *c >> 5 == 6 ? 2 : *c >> 4 == 14 ? 3 : *c >> 3 == 30 ? 4 : 0;
    uint32_t value = n == 1 ? *c : *c & (0x7fu >> n);
    bool valid = n > 0;
    for (int32_t i = 1; i < n && valid; i++) {
        valid = c[i] >> 6 == 2;
        value = value << 6 | (c[i] & 0x3fu);
    }
    valid = valid && value >= least[n] && value <= 0x10ffff && (value < 0xd800 || value > 0xdfff);
    *code = value;
    *hidden = !valid || is_hidden_code(value);
    return valid ? n : 0;
}
