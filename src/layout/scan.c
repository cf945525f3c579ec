/* scan.c - the characters of the notation: tokens, numbers and names, and errors with their column.
 */
#include "layout.h"

#include <ctype.h>
#include <string.h>

void skip_spaces(struct parser *p)
{
    while (isspace((unsigned char)*p->at))
        p->at++;
}

int column(const struct parser *p, const char *at)
{
    return (int)(at - p->text) + 1;
}

rsd_status expected(const struct parser *p, const char *what)
{
    unsigned char c = (unsigned char)*p->at;
    if (!c)
        return fail(RSD_EINVAL, "column %d: expected %s, found the end", column(p, p->at), what);
    if (c < 0x20 || c > 0x7e) /* not for a terminal */
        return fail(RSD_EINVAL, "column %d: expected %s, found byte %02x", column(p, p->at), what,
                    c);
    return fail(RSD_EINVAL, "column %d: expected %s, found '%c'", column(p, p->at), what, c);
}

/* Puts the column in front of what a constructor said about the part that began there. */
rsd_status at_column(const struct parser *p, const char *begin, rsd_status status)
{
    return status ? fail_in(status, "column %d: ", column(p, begin)) : RSD_OK;
}

bool peek(struct parser *p, const char *token)
{
    skip_spaces(p);
    return strncmp(p->at, token, strlen(token)) == 0;
}

bool take(struct parser *p, const char *token)
{
    if (!peek(p, token))
        return false;
    p->at += strlen(token);
    return true;
}

rsd_status need(struct parser *p, const char *token, const char *what)
{
    return take(p, token) ? RSD_OK : expected(p, what);
}

rsd_status number(struct parser *p, const char *what, int64_t *value)
{
    skip_spaces(p);
    const char *begin = p->at;
    if (!isdigit((unsigned char)*p->at))
        return expected(p, what);
    int64_t result = 0;
    for (; isdigit((unsigned char)*p->at); p->at++)
        if (!mul_i64(result, 10, &result) || !add_i64(result, *p->at - '0', &result))
            return fail(RSD_ELIMIT, "column %d: the number does not fit into 63 bits",
                        column(p, begin));
    *value = result;
    return RSD_OK;
}

/* A name of letters, digits and underscores; false if there is none, or it is too long. */
bool name(struct parser *p, char out[NAME_NCHARS])
{
    skip_spaces(p);
    size_t length = 0;
    if (isalpha((unsigned char)*p->at) || *p->at == '_')
        while (isalnum((unsigned char)p->at[length]) || p->at[length] == '_')
            length++;
    if (length == 0 || length >= NAME_NCHARS)
        return false;
    memcpy(out, p->at, length);
    out[length] = '\0';
    p->at += length;
    return true;
}

bool at_digit(struct parser *p)
{
    skip_spaces(p);
    return isdigit((unsigned char)*p->at);
}
