/* status.c - what went wrong: a code to return and one line per thread with the values. */
#include "base.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { ERROR_NCHARS = 1024 };

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

/* Names in messages come from files: they may not break the line, nor tell a terminal what to do. */
static void keep_to_one_line(void)
{
    for (char *c = last_error; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
}

void error_set(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    keep_to_one_line();
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
    int length = vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    if (length >= 0 && (size_t)length < sizeof last_error)
        snprintf(last_error + length, sizeof last_error - (size_t)length, "%s", before);
    keep_to_one_line();
}

static size_t struct_nbytes_of(const void *given)
{
    size_t nbytes;
    memcpy(&nbytes, given, sizeof nbytes);
    return nbytes;
}

rsd_status report_check(const char *name, const void *given)
{
    size_t nbytes = struct_nbytes_of(given);
    if (nbytes < 2 * sizeof nbytes || nbytes > 1 << 16)
        return fail(RSD_EINVAL, "%s.struct_nbytes is %zu, should be sizeof(%s)", name, nbytes,
                    name);
    return RSD_OK;
}

rsd_status options_copy(const char *name, const void *given, void *ours, size_t ours_nbytes)
{
    memset(ours, 0, ours_nbytes);
    if (!given)
        return RSD_OK;
    TRY(report_check(name, given));
    size_t nbytes = struct_nbytes_of(given);
    for (size_t i = ours_nbytes; i < nbytes; i++)
        if (((const char *)given)[i])
            return fail(RSD_EUNSUPPORTED, "%s has options that this version of the library lacks",
                        name);
    memcpy(ours, given, nbytes < ours_nbytes ? nbytes : ours_nbytes);
    return RSD_OK;
}

void report_copy(void *given, const void *ours, size_t ours_nbytes)
{
    size_t nbytes = struct_nbytes_of(given), start = sizeof nbytes;
    size_t end = nbytes < ours_nbytes ? nbytes : ours_nbytes;
    memcpy((char *)given + start, (const char *)ours + start, end - start);
}
