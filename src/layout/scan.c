/* scan.c - reads tokens, numbers and names of the notation. Errors name their column. */
#include "layout.h"

#include <string.h>

void scan_spaces(struct parser *p)
{
    while (is_space(*p->at))
        p->at++;
}

int scan_column(const struct parser *p, const char *at)
{
    return (int)(at - p->text) + 1;
}

rsd_status scan_expected(const struct parser *p, const char *what)
{
    unsigned char c = (unsigned char)*p->at;
    if (!c)
        return fail(RSD_EINVAL, "column %d: expected %s, found the end", scan_column(p, p->at),
                    what);
    if (c < 0x20 || c > 0x7e) /* not printable */
        return fail(RSD_EINVAL, "column %d: expected %s, found byte %02x", scan_column(p, p->at),
                    what, c);
    return fail(RSD_EINVAL, "column %d: expected %s, found '%c'", scan_column(p, p->at), what, c);
}

rsd_status scan_at(const struct parser *p, const char *begin, rsd_status status)
{
    return status ? fail_in(status, "column %d: ", scan_column(p, begin)) : RSD_OK;
}

bool scan_peek(struct parser *p, const char *token)
{
    scan_spaces(p);
    return strncmp(p->at, token, strlen(token)) == 0;
}

bool scan_take(struct parser *p, const char *token)
{
    if (!scan_peek(p, token))
        return false;
    p->at += strlen(token);
    return true;
}

rsd_status scan_need(struct parser *p, const char *token, const char *what)
{
    return scan_take(p, token) ? RSD_OK : scan_expected(p, what);
}

rsd_status scan_number(struct parser *p, const char *what, int64_t *value)
{
    scan_spaces(p);
    const char *begin = p->at;
    if (!is_digit(*p->at))
        return scan_expected(p, what);
    int64_t result = 0;
    for (; is_digit(*p->at); p->at++)
        if (!mul_i64(result, 10, &result) || !add_i64(result, *p->at - '0', &result))
            return fail(RSD_ELIMIT, "column %d: number exceeds 2^63 - 1", scan_column(p, begin));
    *value = result;
    return RSD_OK;
}

bool scan_name(struct parser *p, char out[NAME_NCHARS])
{
    scan_spaces(p);
    size_t length = 0;
    if (is_name_start(*p->at))
        while (is_name_start(p->at[length]) || is_digit(p->at[length]))
            length++;
    if (length == 0 || length >= NAME_NCHARS)
        return false;
    memcpy(out, p->at, length);
    out[length] = '\0';
    p->at += length;
    return true;
}

bool scan_at_digit(struct parser *p)
{
    scan_spaces(p);
    return is_digit(*p->at);
}
