/* remote_text.c - the texts of HTTP and S3: URLs, hex, base64, times, and XML. */
#include "remote.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- URLs ---- */

static bool is_unreserved(char c)
{
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.' || c == '_' || c == '~';
}

void url_add_encoded(struct text *text, const char *from, size_t n, bool slashes)
{
    for (size_t i = 0; i < n; i++)
        if (is_unreserved(from[i]) || (slashes && from[i] == '/'))
            text_add(text, "%c", from[i]);
        else
            text_add(text, "%%%02X", (unsigned)(unsigned char)from[i]);
}

void url_add_parameter(struct text *query, const char *name, const char *value)
{
    text_add(query, "%s%s=", query->length ? "&" : "", name);
    url_add_encoded(query, value, strlen(value), false);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool url_decode(char *text)
{
    char *to = text;
    for (const char *from = text; *from; from++, to++) {
        if (*from != '%') {
            *to = *from == '+' ? ' ' : *from;
            continue;
        }
        int high = hex_digit(from[1]), low = high < 0 ? -1 : hex_digit(from[2]);
        if (low < 0 || high * 16 + low == 0)
            return false;
        *to = (char)(high * 16 + low);
        from += 2;
    }
    *to = '\0';
    return true;
}

/* ---- copies ---- */

rsd_status remote_set_text(char **out, const char *text)
{
    mem_free(*out);
    *out = text_copy(text);
    return *out ? RSD_OK : RSD_ENOMEM;
}

void remote_fit_text(char *out, size_t out_nbytes, const char *text)
{
    size_t n = strlen(text);
    bool fits = n < out_nbytes;
    memcpy(out, fits ? text : "", fits ? n + 1 : 1);
}

/* ---- bytes as text ---- */

void hex_write(const unsigned char *bytes, size_t n, char *hex)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        hex[2 * i] = digits[bytes[i] >> 4];
        hex[2 * i + 1] = digits[bytes[i] & 15];
    }
    hex[2 * n] = '\0';
}

static const char base64_digits[] =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void base64_write(const unsigned char *bytes, size_t n, char *chars)
{
    for (size_t i = 0; i < n; i += 3) {
        uint32_t three = (uint32_t)bytes[i] << 16 | (i + 1 < n ? (uint32_t)bytes[i + 1] << 8 : 0) |
                         (i + 2 < n ? bytes[i + 2] : 0);
        *chars++ = base64_digits[three >> 18];
        *chars++ = base64_digits[three >> 12 & 63];
        *chars++ = i + 1 < n ? base64_digits[three >> 6 & 63] : '=';
        *chars++ = i + 2 < n ? base64_digits[three & 63] : '=';
    }
    *chars = '\0';
}

bool base64_read(const char *chars, unsigned char *bytes, size_t n)
{
    size_t nchars = (n * 8 + 5) / 6, done = 0;
    uint32_t bits = 0;
    int nbits = 0;
    for (size_t i = 0; i < nchars; i++) {
        const char *digit = chars[i] ? strchr(base64_digits, chars[i]) : NULL;
        if (!digit)
            return false;
        bits = bits << 6 | (uint32_t)(digit - base64_digits);
        nbits += 6;
        if (nbits >= 8 && done < n) {
            nbits -= 8;
            bytes[done++] = (unsigned char)(bits >> nbits);
        }
    }
    return done == n && (chars[nchars] == '=' || chars[nchars] == '\0');
}

/* ---- times ---- */

/* Returns seconds since 1970, or 0 if a field is out of range. Months count from 0. */
static int64_t time_from_fields(int year, int month, int day, int hour, int minute, int second)
{
    struct tm fields = {.tm_year = year - 1900,
                        .tm_mon = month,
                        .tm_mday = day,
                        .tm_hour = hour,
                        .tm_min = minute,
                        .tm_sec = second};
    bool valid = year >= 1970 && year < 10000 && month >= 0 && month < 12 && day >= 1 &&
                 day <= 31 && hour >= 0 && hour < 24 && minute >= 0 && minute < 60 && second >= 0 &&
                 second <= 60;
    return valid ? (int64_t)timegm(&fields) : 0;
}

int64_t time_read_http(const char *text)
{
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    char month[4] = "";
    int day, year, hour, minute, second;
    if (sscanf(text, "%*3s, %2d %3s %4d %2d:%2d:%2d GMT", &day, month, &year, &hour, &minute,
               &second) != 6)
        return 0;
    const char *found = strlen(month) == 3 ? strstr(months, month) : NULL;
    if (!found || (found - months) % 3 != 0)
        return 0;
    return time_from_fields(year, (int)(found - months) / 3, day, hour, minute, second);
}

int64_t time_read_iso(const char *text)
{
    int day, month, year, hour, minute, second;
    if (sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d", &year, &month, &day, &hour, &minute, &second) != 6)
        return 0;
    return time_from_fields(year, month - 1, day, hour, minute, second);
}

/* ---- XML ---- */

static const struct {
    const char *name;
    char character;
} entities[] = {{"amp;", '&'}, {"lt;", '<'}, {"gt;", '>'}, {"quot;", '"'}, {"apos;", '\''}};

/* Adds the character of an entity, behind its &. Returns where it ends; NULL: it is invalid. */
static const char *read_entity(struct xml_reader *reader, const char *at)
{
    size_t left = (size_t)(reader->end - at);
    for (size_t i = 0; i < sizeof entities / sizeof *entities; i++) {
        size_t n = strlen(entities[i].name);
        if (left >= n && memcmp(at, entities[i].name, n) == 0) {
            text_add(&reader->text, "%c", entities[i].character);
            return at + n;
        }
    }
    if (left < 3 || at[0] != '#')
        return NULL;
    int base = at[1] == 'x' ? 16 : 10;
    unsigned code = 0;
    at += base == 16 ? 2 : 1;
    for (int digit; at < reader->end && *at != ';'; at++) {
        digit = hex_digit(*at);
        if (digit < 0 || digit >= base || code > 127)
            return NULL;
        code = code * (unsigned)base + (unsigned)digit;
    }
    if (at == reader->end || code == 0 || code > 127) /* others come as they are */
        return NULL;
    text_add(&reader->text, "%c", (int)code);
    return at + 1;
}

/* Reads text up to the next tag, with its entities. */
static enum xml_step read_text(struct xml_reader *reader)
{
    while (reader->at < reader->end && *reader->at != '<') {
        const char *stop = reader->at;
        while (stop < reader->end && *stop != '<' && *stop != '&')
            stop++;
        text_add(&reader->text, "%.*s", (int)(stop - reader->at), reader->at);
        if (memchr(reader->at, '\0', (size_t)(stop - reader->at)))
            return XML_BROKEN;
        if (stop < reader->end && *stop == '&' && !(stop = read_entity(reader, stop + 1)))
            return XML_BROKEN;
        reader->at = stop;
    }
    return XML_NEXT;
}

/* Reads one tag, whose < is at reader->at. */
static enum xml_step read_xml_tag(struct xml_reader *reader)
{
    const char *at = reader->at + 1, *end = memchr(at, '>', (size_t)(reader->end - at));
    if (!end || *at == '!')
        return XML_BROKEN;
    reader->at = end + 1;
    reader->entered = *at != '/';
    bool alone = end[-1] == '/' && reader->entered;
    at += !reader->entered;
    size_t n = strcspn(at, " \t\r\n/>");
    if (n == 0 || n >= sizeof reader->name)
        return XML_BROKEN;
    memcpy(reader->name, at, n);
    reader->name[n] = '\0';
    if (reader->entered)
        reader->text.length = 0;
    if (reader->text.chars && reader->entered)
        reader->text.chars[0] = '\0';
    if (alone) /* <Name/> is an element without text */
        reader->entered = false;
    else
        reader->depth += reader->entered ? 1 : -1;
    return reader->depth < 0 || reader->depth > 16 ? XML_BROKEN : XML_NEXT;
}

/* Goes past <?xml ...?>, if it is next. */
static bool skip_instruction(struct xml_reader *reader)
{
    const char *at = reader->at;
    if (reader->end - at < 2 || at[0] != '<' || at[1] != '?')
        return false;
    const char *end = memchr(at, '>', (size_t)(reader->end - at));
    reader->at = end ? end + 1 : reader->end;
    return true;
}

enum xml_step xml_read_next(struct xml_reader *reader)
{
    do {
        if (read_text(reader) != XML_NEXT || reader->text.failed)
            return XML_BROKEN;
    } while (skip_instruction(reader));
    if (reader->at == reader->end)
        return reader->depth == 0 ? XML_END : XML_BROKEN;
    return read_xml_tag(reader);
}

void xml_reader_drop(struct xml_reader *reader)
{
    text_drop(&reader->text);
}

bool xml_find_text(const void *document, size_t n, const char *name, char *out, size_t out_nbytes)
{
    struct xml_reader reader = {.at = document, .end = (const char *)document + n};
    bool found = false;
    while (n > 0 && !found && xml_read_next(&reader) == XML_NEXT)
        if (!reader.entered && strcmp(reader.name, name) == 0 && reader.text.length < out_nbytes) {
            memcpy(out, reader.text.chars ? reader.text.chars : "", reader.text.length + 1);
            found = true;
        }
    xml_reader_drop(&reader);
    return found;
}
