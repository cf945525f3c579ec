/* json.c - a strict pull parser: the caller requests what must come next, and receives it or an error that
 * names the byte.
 *
 *     json_enter(&j, '{');
 *     while (json_next_key(&j, &key, &more) == RSD_OK && more)
 *         json_u64(&j, &number);              or json_string, json_enter again, json_skip
 *
 * A string is UTF-8 without escapes. Its slice points into the text, or into the parser's memory if there
 * were escapes, and is valid until the next string. Nothing is built, so memory is that of the longest
 * string.
 */
#include "json.h"

#include <errno.h>
#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

rsd_status json_fail(const struct json *j, const char *what)
{
    return fail(RSD_EFORMAT, "byte %zu: %s", j->at, what);
}

void json_start(struct json *j, const char *text, size_t nbytes)
{
    *j = (struct json){.text = text, .nbytes = nbytes};
}

void json_drop(struct json *j)
{
    mem_free(j->scratch);
    *j = (struct json){0};
}

static void skip_space(struct json *j)
{
    while (j->at < j->nbytes && (j->text[j->at] == ' ' || j->text[j->at] == '\n' ||
                                 j->text[j->at] == '\r' || j->text[j->at] == '\t'))
        j->at++;
}

char json_peek(struct json *j)
{
    skip_space(j);
    return j->at < j->nbytes ? j->text[j->at] : '\0';
}

rsd_status json_end(struct json *j)
{
    skip_space(j);
    return j->at == j->nbytes ? RSD_OK : json_fail(j, "unexpected text behind the value");
}

/* ---- objects and lists ---- */

rsd_status json_enter(struct json *j, char bracket)
{
    if (json_peek(j) != bracket)
        return json_fail(j, bracket == '{' ? "expected an object" : "expected a list");
    if (++j->depth > MAX_DEPTH)
        return json_fail(j, "nesting exceeds 64 levels");
    j->at++;
    j->fresh = true;
    return RSD_OK;
}

/* Moves to the next member of an object or an array. *more is false at its end, which is skipped. */
static rsd_status next_json_member(struct json *j, char close, bool *more)
{
    char c = json_peek(j);
    bool first = j->fresh;
    j->fresh = false;
    *more = c != close;
    if (c == close) {
        j->at++;
        j->depth--;
        return RSD_OK;
    }
    if (first)
        return RSD_OK;
    if (c != ',')
        return json_fail(j, close == '}' ? "expected ',' or '}'" : "expected ',' or ']'");
    j->at++;
    if (json_peek(j) == close)
        return json_fail(j, "unexpected ',' before the end");
    return RSD_OK;
}

rsd_status json_next_item(struct json *j, bool *more)
{
    return next_json_member(j, ']', more);
}

rsd_status json_next_key(struct json *j, struct slice *key, bool *more)
{
    TRY(next_json_member(j, '}', more));
    if (!*more)
        return RSD_OK;
    TRY(json_string(j, key));
    if (json_peek(j) != ':')
        return json_fail(j, "expected ':'");
    j->at++;
    return RSD_OK;
}

/* ---- strings ---- */

/* Returns the length of the UTF-8 character at p; 0 for overlong forms, surrogates, numbers beyond 10ffff
 * and other bytes that are not a character. */
static size_t utf8_length(const unsigned char *p, size_t left)
{
    static const struct {
        unsigned char first_lo, first_hi, second_lo, second_hi;
        size_t length;
    } forms[] = {
        {0x00, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (p[0] < forms[i].first_lo || p[0] > forms[i].first_hi)
            continue;
        if (left < forms[i].length ||
            (forms[i].length > 1 && (p[1] < forms[i].second_lo || p[1] > forms[i].second_hi)))
            return 0;
        for (size_t k = 2; k < forms[i].length; k++)
            if ((p[k] & 0xc0) != 0x80)
                return 0;
        return forms[i].length;
    }
    return 0;
}

bool json_is_utf8(const char *text, size_t nbytes)
{
    for (size_t at = 0; at < nbytes;) {
        size_t length = utf8_length((const unsigned char *)text + at, nbytes - at);
        if (length == 0)
            return false;
        at += length;
    }
    return true;
}

static rsd_status add_scratch(struct json *j, const char *bytes, size_t n)
{
    TRY(GROW(j->scratch, j->capacity, j->used + n));
    memcpy(j->scratch + j->used, bytes, n);
    j->used += n;
    return RSD_OK;
}

/* Reads the four digits of \u0041. */
static rsd_status take_hex_digits(struct json *j, uint32_t *value)
{
    *value = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        char c = j->at < j->nbytes ? j->text[j->at] : '\0';
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                : 16;
        if (digit > 15)
            return json_fail(j, "expected four hex digits");
        *value = *value << 4 | digit;
    }
    return RSD_OK;
}

/* Reads what follows \u, and adds the character as UTF-8. Characters beyond U+FFFF are pairs of escapes. */
static rsd_status take_unicode_escape(struct json *j)
{
    uint32_t c, low;
    TRY(take_hex_digits(j, &c));
    if (c >= 0xd800 && c < 0xdc00) { /* the first half of a pair */
        if (j->nbytes - j->at < 2 || j->text[j->at] != '\\' || j->text[j->at + 1] != 'u')
            return json_fail(j, "unpaired surrogate");
        j->at += 2;
        TRY(take_hex_digits(j, &low));
        if (low < 0xdc00 || low > 0xdfff)
            return json_fail(j, "unpaired surrogate");
        c = 0x10000 + ((c - 0xd800) << 10 | (low - 0xdc00));
    } else if (c >= 0xdc00 && c < 0xe000) {
        return json_fail(j, "unpaired surrogate");
    }
    if (c == 0)
        return json_fail(j, "string contains NUL");
    char bytes[4];
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, c >>= 6)
        bytes[i] = (char)(0x80 | (c & 0x3f));
    static const unsigned char first[] = {0, 0x00, 0xc0, 0xe0, 0xf0};
    bytes[0] = (char)(first[n] | c);
    return add_scratch(j, bytes, n);
}

/* Reads an escape, such as \n, and adds its character. */
static rsd_status take_escape(struct json *j)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (++j->at >= j->nbytes)
        return json_fail(j, "string is not terminated");
    char c = j->text[j->at++];
    if (c == 'u')
        return take_unicode_escape(j);
    const char *known = c ? strchr(from, c) : NULL;
    if (!known)
        return json_fail(j, "invalid escape");
    return add_scratch(j, &to[known - from], 1);
}

rsd_status json_string(struct json *j, struct slice *out)
{
    if (json_peek(j) != '"')
        return json_fail(j, "expected a string");
    size_t run = ++j->at; /* characters from here on are not in the scratch yet */
    bool escaped = false;
    j->used = 0;
    while (j->at < j->nbytes && j->text[j->at] != '"') {
        unsigned char c = (unsigned char)j->text[j->at];
        if (c == '\\') {
            TRY(add_scratch(j, j->text + run, j->at - run));
            TRY(take_escape(j));
            run = j->at;
            escaped = true;
            continue;
        }
        size_t length =
            c < 0x80 ? 1 : utf8_length((const unsigned char *)j->text + j->at, j->nbytes - j->at);
        if (c < 0x20 || length == 0)
            return json_fail(j, "string contains an invalid character");
        j->at += length;
    }
    if (j->at >= j->nbytes)
        return json_fail(j, "string is not terminated");
    *out = (struct slice){j->text + run, j->at - run};
    if (escaped) {
        TRY(add_scratch(j, j->text + run, j->at - run));
        *out = (struct slice){j->scratch, j->used};
    }
    j->at++;
    return RSD_OK;
}

/* ---- numbers and the rest ---- */

rsd_status json_u64(struct json *j, uint64_t *out)
{
    uint64_t value = 0;
    json_peek(j);
    size_t start = j->at;
    while (j->at < j->nbytes && j->text[j->at] >= '0' && j->text[j->at] <= '9') {
        if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(j->text[j->at] - '0'), &value))
            return json_fail(j, "number does not fit into 64 bits");
        j->at++;
    }
    if (j->at == start)
        return json_fail(j, "expected an integer of 0 or more");
    if (j->text[start] == '0' && j->at - start > 1)
        return json_fail(j, "number has leading zeros");
    if (j->at < j->nbytes && strchr(".eE", j->text[j->at]))
        return json_fail(j, "expected an integer of 0 or more");
    *out = value;
    return RSD_OK;
}

static bool skip_one_of(struct json *j, const char *characters)
{
    bool found = j->at < j->nbytes && j->text[j->at] && strchr(characters, j->text[j->at]);
    j->at += found;
    return found;
}

static size_t skip_digits(struct json *j)
{
    size_t start = j->at;
    while (skip_one_of(j, "0123456789"))
        continue;
    return j->at - start;
}

/* Skips a number. Checks the syntax of JSON, which is stricter than that of strtod. */
static rsd_status skip_number(struct json *j)
{
    size_t start = j->at;
    skip_one_of(j, "-");
    bool zero = skip_one_of(j, "0");
    size_t ndigits = skip_digits(j);
    if (zero && ndigits > 0)
        return json_fail(j, "number has leading zeros");
    if (!zero && ndigits == 0) {
        j->at = start;
        return json_fail(j, "expected a value");
    }
    if (skip_one_of(j, ".") && skip_digits(j) == 0)
        return json_fail(j, "number is incomplete");
    if (skip_one_of(j, "eE")) {
        skip_one_of(j, "+-");
        if (skip_digits(j) == 0)
            return json_fail(j, "number is incomplete");
    }
    return RSD_OK;
}

rsd_status json_number(struct json *j, double *value, int64_t *integer, bool *whole)
{
    char digits[64], *end;
    json_peek(j);
    size_t start = j->at;
    TRY(skip_number(j));
    size_t n = j->at - start;
    if (n >= sizeof digits)
        return json_fail(j, "number has more than 63 characters");
    memcpy(digits, j->text + start, n);
    digits[n] = '\0';
    *whole = !strpbrk(digits, ".eE");
    errno = 0;
    if (*whole) {
        *integer = strtoll(digits, &end, 10);
    } else { /* in any locale of the program */
        locale_t plain = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
        *value = plain ? strtod_l(digits, &end, plain) : strtod(digits, &end);
        if (plain)
            freelocale(plain);
    }
    if (*end || (*whole && errno == ERANGE))
        return json_fail(j, "number does not fit into 64 bits");
    return RSD_OK;
}

/* Skips true, false, null or a number. */
static rsd_status skip_word(struct json *j)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t n = strlen(words[i]);
        if (j->nbytes - j->at >= n && memcmp(j->text + j->at, words[i], n) == 0) {
            j->at += n;
            return RSD_OK;
        }
    }
    return skip_number(j);
}

rsd_status json_skip(struct json *j)
{
    struct slice ignored;
    bool more;
    char first = json_peek(j);
    if (first == '"')
        return json_string(j, &ignored);
    if (first != '{' && first != '[')
        return skip_word(j);
    TRY(json_enter(j, first));
    for (;;) {
        TRY(first == '{' ? json_next_key(j, &ignored, &more) : json_next_item(j, &more));
        if (!more)
            return RSD_OK;
        TRY(json_skip(j));
    }
}

/* ---- writing ---- */

void json_add_string(struct text *text, const char *string, size_t nbytes)
{
    size_t run = 0, at = 0; /* characters that need no escape, from run to at */
    text->failed = text->failed || !budget_take_text(nbytes);
    text_add(text, "\"");
    while (at < nbytes && !text->failed) {
        unsigned char c = (unsigned char)string[at];
        size_t length = c < 0x80 ? 1 : utf8_length((const unsigned char *)string + at, nbytes - at);
        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f && length > 0) {
            at += length;
            continue;
        }
        text_add(text, "%.*s", (int)(at - run), string + run);
        if (c == '"' || c == '\\')
            text_add(text, "\\%c", c);
        else /* a byte that is not UTF-8 becomes the character of its number */
            text_add(text, "\\u%04x", c);
        run = ++at;
    }
    text_add(text, "%.*s\"", (int)(at - run), string + run);
}

/* Returns how many digits the shortest decimal has that reads as the value. If 15 digits read as it, this is
 * their number without zeros at the end: no two decimals of 15 digits read as one normal number. */
static int shortest_precision(double value)
{
    char digits[40];
    for (int precision = isnormal(value) ? DBL_DIG : 1; precision < DBL_DECIMAL_DIG; precision++) {
        snprintf(digits, sizeof digits, "%.*e", precision - 1, value);
        if (strtod(digits, NULL) != value)
            continue;
        const char *end = strchr(digits, 'e');
        while (precision > 1 && *--end == '0')
            precision--;
        return precision;
    }
    return DBL_DECIMAL_DIG;
}

void json_add_float(struct text *out, double value)
{
    size_t begin = out->length;
    if (isnan(value) || isinf(value)) {
        text_add(out, "\"%s\"", isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
        return;
    }
    text_add(out, "%.*g", shortest_precision(value), value);
    if (!out->failed && !strpbrk(out->chars + begin, ".e"))
        text_add(out, ".0");
}
