/* error.c - the last error of each thread, and the checks of structs that begin with their size. */
#include "base.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { ERROR_NCHARS = 1024, MAX_CONTEXT_NCHARS = 600 };

static _Thread_local char last_error[ERROR_NCHARS];

const char *rsd_error(void)
{
    return last_error;
}

const char *rsd_version(void)
{
    return RSD_VERSION;
}

const char *rsd_status_name(rsd_status status)
{
    switch (status) {
    case RSD_OK:
        return "OK";
    case RSD_EINVAL:
        return "EINVAL";
    case RSD_EMISMATCH:
        return "EMISMATCH";
    case RSD_ELIMIT:
        return "ELIMIT";
    case RSD_EEXIST:
        return "EEXIST";
    case RSD_ECANCELLED:
        return "ECANCELLED";
    case RSD_ENOMEM:
        return "ENOMEM";
    case RSD_EIO:
        return "EIO";
    case RSD_ENOENT:
        return "ENOENT";
    case RSD_EFORMAT:
        return "EFORMAT";
    case RSD_EUNSUPPORTED:
        return "EUNSUPPORTED";
    case RSD_EPEER:
        return "EPEER";
    case RSD_ETIMEOUT:
        return "ETIMEOUT";
    }
    return "unknown status";
}

/* Returns whether a character must not reach a terminal: a control character, or one that has no width or changes
 * the direction of text. */
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

/* Returns the length of a character if it is hidden, else 0. */
static size_t hidden_nbytes(const unsigned char *c)
{
    size_t n = *c < 0x80 ? 1 : *c >> 5 == 6 ? 2 : *c >> 4 == 14 ? 3 : *c >> 3 == 30 ? 4 : 0;
    uint32_t code = n == 1 ? *c : *c & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (c[i] >> 6 != 2)
            return 0;
        code = code << 6 | (c[i] & 0x3fu);
    }
    return n && is_hidden_code(code) ? n : 0;
}

/* Names in messages come from files, so what could break the line, control a terminal or hide is escaped. */
static void escape_hidden(void)
{
    char plain[ERROR_NCHARS];
    size_t n = 0;
    bool any = false;
    for (const unsigned char *c = (const unsigned char *)last_error; *c;) {
        size_t hidden = hidden_nbytes(c);
        any = any || hidden;
        for (size_t i = 0; i < hidden && n + 5 < sizeof plain; i++)
            n += (size_t)snprintf(plain + n, sizeof plain - n, "\\x%02x", c[i]);
        if (!hidden && n + 1 < sizeof plain)
            plain[n++] = (char)*c;
        c += hidden ? hidden : 1;
    }
    plain[n] = '\0';
    if (any)
        memcpy(last_error, plain, n + 1);
}

void error_set(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    text_format(last_error, sizeof last_error, format, args);
    va_end(args);
    escape_hidden();
}

rsd_status rsd_set_error(rsd_status status, const char *message)
{
    return fail(status, "%s", message);
}

void error_add_context(const char *format, ...)
{
    char before[ERROR_NCHARS];
    memcpy(before, last_error, sizeof before);
    va_list args;
    va_start(args, format);
    int length = text_format(last_error, sizeof last_error, format, args);
    va_end(args);
    if (length > MAX_CONTEXT_NCHARS) /* so that the cause is there, however long a name is */
        length = MAX_CONTEXT_NCHARS + snprintf(last_error + MAX_CONTEXT_NCHARS, 6, "...: ");
    if (length >= 0)
        snprintf(last_error + length, sizeof last_error - (size_t)length, "%s", before);
    escape_hidden();
}

static size_t read_struct_nbytes(const void *given)
{
    size_t nbytes;
    memcpy(&nbytes, given, sizeof nbytes);
    return nbytes;
}

rsd_status report_check(const char *name, const void *given)
{
    size_t nbytes = read_struct_nbytes(given);
    if (nbytes < 2 * sizeof nbytes || nbytes > 1 << 16)
        return fail(RSD_EINVAL, "%s.struct_nbytes is %zu; initialize the struct with RSD_INIT(%s)",
                    name, nbytes, name);
    return RSD_OK;
}

rsd_status options_copy(const char *name, const void *given, void *ours, size_t ours_nbytes)
{
    memset(ours, 0, ours_nbytes);
    if (!given)
        return RSD_OK;
    TRY(report_check(name, given));
    size_t nbytes = read_struct_nbytes(given);
    for (size_t i = ours_nbytes; i < nbytes; i++)
        if (((const char *)given)[i])
            return fail(RSD_EUNSUPPORTED, "%s sets options that library version %s does not have",
                        name, RSD_VERSION);
    memcpy(ours, given, nbytes < ours_nbytes ? nbytes : ours_nbytes);
    return RSD_OK;
}

void report_copy(void *given, const void *ours, size_t ours_nbytes)
{
    size_t nbytes = read_struct_nbytes(given), start = sizeof nbytes;
    size_t end = nbytes < ours_nbytes ? nbytes : ours_nbytes;
    memcpy((char *)given + start, (const char *)ours + start, end - start);
}
