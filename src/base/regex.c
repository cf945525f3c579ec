/* regex.c - POSIX extended expressions, whose size is limited before they are compiled.
 *
 * regcomp copies what is repeated: (a{255}){255} has 65025 copies of a, and each + doubles what is before it. It calls
 * itself for each group in a group. So a short expression could take all memory, or the whole stack.
 */
#include "base.h"

#include <stdlib.h>

enum { MAX_GROUP_DEPTH = 100, MAX_COPIES = 5000 };

/* Returns the end of a bracket expression, such as [^]a-z[:digit:]]: its last character. */
static const char *skip_brackets(const char *c)
{
    c += c[1] == '^' ? 2 : 1;
    c += *c == ']';
    while (*c && *c != ']') {
        const char kind = *c == '[' ? c[1] : 0;
        c++;
        if (kind != ':' && kind != '.' && kind != '=')
            continue;
        for (c++; *c && !(*c == kind && c[1] == ']'); c++)
            continue;
        c += *c ? 2 : 0;
    }
    return *c ? c : c - 1;
}

static uint64_t read_repeat_count(const char *c, char **end)
{
    uint64_t count = strtoul(c, end, 10);
    return count < MAX_COPIES ? count : MAX_COPIES;
}

/* Returns how often {m}, {m,} or {m,n} copies what is before it, and sets *end to its last character. */
static uint64_t read_interval(const char *c, const char **end)
{
    char *next;
    uint64_t count = read_repeat_count(c + 1, &next);
    if (*next == ',' && next[1] == '}') {
        count++;
        next++;
    } else if (*next == ',') {
        count = read_repeat_count(next + 1, &next);
    }
    *end = *next == '}' ? next : c; /* c: regcomp refuses it */
    return count;
}

/* ELIMIT: groups are nested too deeply, or repeated so often that there are many more characters than in the text. */
static rsd_status check_repeats(const char *text)
{
    uint64_t copies[MAX_GROUP_DEPTH + 1] = {0}; /* of characters, in each open group */
    uint64_t last = 0;                          /* of what was last, a character or a group */
    size_t depth = 0;
    const uint64_t most = MAX_COPIES + strlen(text);
    for (const char *c = text; *c; c++) {
        uint64_t more = 1;
        if (*c == '(') {
            if (depth == MAX_GROUP_DEPTH)
                return fail(RSD_ELIMIT, "has more than %d groups in each other", MAX_GROUP_DEPTH);
            copies[++depth] = last = 0;
        } else if (*c == ')' && depth > 0) {
            more = last = copies[depth--] + 1;
        } else if (*c == '+') {
            more = last;
            last *= 2;
        } else if (*c == '{') {
            uint64_t count = read_interval(c, &c);
            more = last * count;
            last = more;
        } else if (*c != '*' && *c != '?') {
            c = *c == '[' ? skip_brackets(c) : *c == '\\' && c[1] ? c + 1 : c;
            last = 1;
        }
        copies[depth] += more;
        if (copies[depth] > most)
            return fail(RSD_ELIMIT, "repeats more than %llu characters", (unsigned long long)most);
    }
    return RSD_OK;
}

rsd_status regex_compile(const char *text, int flags, regex_t *regex)
{
    char reason[256];
    TRY(check_repeats(text));
    int error = regcomp(regex, text, REG_EXTENDED | flags);
    if (!error)
        return RSD_OK;
    regerror(error, regex, reason, sizeof reason);
    return fail(error == REG_ESPACE ? RSD_ENOMEM : RSD_EINVAL, "is not a regular expression: %s",
                reason);
}
