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

/* Names in messages come from files, so what could break the line, control a terminal or hide is escaped. */
static void escape_hidden(void)
{
    char plain[ERROR_NCHARS];
    size_t n = 0;
    bool any = false;
    for (const char *c = last_error; *c;) {
        uint32_t code;
        int32_t hidden, nbytes = rsd_text_char(c, &code, &hidden);
        any = any || hidden;
        for (nbytes += !nbytes; nbytes > 0; nbytes--, c++)
            if (hidden && n + 5 < sizeof plain)
                n += (size_t)snprintf(plain + n, sizeof plain - n, "\\x%02x", (unsigned char)*c);
            else if (!hidden && n + 1 < sizeof plain)
                plain[n++] = *c;
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
