/* pattern.c - regular expressions, POSIX extended: names that match, and what they become. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

/* What other dialects have, and glibc would quietly take for something else. */
static const char *foreign_part(const char *text)
{
    static const char *const parts[] = {"\\d", "\\D", "\\w", "\\W", "\\s",
                                        "\\S", "\\b", "(?",  NULL};
    for (const char *c = text; *c; c++) {
        for (const char *const *part = parts; *part; part++)
            if (strncmp(c, *part, 2) == 0)
                return *part;
        if (*c == '\\' && c[1])
            c++;
    }
    return NULL;
}

bool pattern_compile(const char *verb, const char *text, bool whole, struct pattern *pattern)
{
    const char *foreign = foreign_part(text);
    if (foreign) {
        complain(verb, EXIT_USAGE,
                 "'%s': %s is not of POSIX extended regular expressions; write [0-9] for digits, "
                 "[A-Za-z0-9_] for letters",
                 text, foreign);
        return false;
    }
    char *full = whole ? need_text("^(%s)$", text) : need_text("%s", text);
    int error = regcomp(&pattern->regex, full, REG_EXTENDED);
    free(full);
    if (error) {
        char why[256];
        regerror(error, &pattern->regex, why, sizeof why);
        complain(verb, EXIT_USAGE, "'%s' is no regular expression: %s", text, why);
        return false;
    }
    pattern->text = need_text("%s", text);
    return true;
}

bool pattern_matches(const struct pattern *pattern, const char *name)
{
    return regexec(&pattern->regex, name, 0, NULL, 0) == 0;
}

void pattern_free(struct pattern *pattern)
{
    if (!pattern->text)
        return;
    regfree(&pattern->regex);
    free(pattern->text);
    pattern->text = NULL;
}

/* ---- s/a/b/ ---- */

/* The part up to the next separator that is not behind a backslash; NULL: there is none. */
static char *take_part(const char **at, char separator)
{
    char *part = need_memory(calloc(strlen(*at) + 1, 1));
    size_t n = 0;
    for (const char *c = *at; *c; c++) {
        if (*c == separator) {
            *at = c + 1;
            return part;
        }
        if (*c == '\\' && c[1] == separator)
            c++;
        else if (*c == '\\' && c[1])
            part[n++] = *c++;
        part[n++] = *c;
    }
    free(part);
    return NULL;
}

bool substitution_parse(const char *verb, const char *text, struct substitution *substitution)
{
    const char *at = text + 2;
    *substitution = (struct substitution){0};
    bool starts = text[0] == 's' && text[1] && !strchr("\\\n", text[1]);
    char *from = starts ? take_part(&at, text[1]) : NULL;
    substitution->with = from ? take_part(&at, text[1]) : NULL;
    bool ends = substitution->with && (!*at || strcmp(at, "g") == 0);
    if (!ends)
        complain(verb, EXIT_USAGE, "--rename '%s': s/OLD/NEW/ is needed, or s/OLD/NEW/g", text);
    substitution->all = ends && *at == 'g';
    bool fine = ends && pattern_compile(verb, from, false, &substitution->pattern);
    free(from);
    if (!fine)
        substitution_free(substitution);
    return fine;
}

static void add_text(char **out, size_t *n, const char *text, size_t length)
{
    *out = need_memory(realloc(*out, *n + length + 1));
    memcpy(*out + *n, text, length);
    *n += length;
    (*out)[*n] = '\0';
}

static void add_replacement(char **out, size_t *n, const char *with, const char *name,
                            const regmatch_t *groups)
{
    for (const char *c = with; *c; c++) {
        int group = *c == '&' ? 0 : *c == '\\' && c[1] >= '0' && c[1] <= '9' ? c[1] - '0' : -1;
        if (group >= 0 && groups[group].rm_so >= 0)
            add_text(out, n, name + groups[group].rm_so,
                     (size_t)(groups[group].rm_eo - groups[group].rm_so));
        if (*c == '\\' && c[1])
            c++;
        if (group < 0)
            add_text(out, n, c, 1);
    }
}

char *substitution_apply(const struct substitution *s, const char *name)
{
    enum { NGROUPS = 10 };
    regmatch_t groups[NGROUPS];
    char *out = NULL;
    size_t n = 0;
    const char *at = name;
    add_text(&out, &n, "", 0);
    for (int flags = 0; regexec(&s->pattern.regex, at, NGROUPS, groups, flags) == 0;
         flags = REG_NOTBOL) {
        size_t before = (size_t)groups[0].rm_so, end = (size_t)groups[0].rm_eo;
        add_text(&out, &n, at, before);
        add_replacement(&out, &n, s->with, at, groups);
        if (end == before && at[end])
            add_text(&out, &n, at + end, 1);
        at += end + (end == before && at[end]);
        if (!s->all || (end == before && !*at))
            break;
    }
    add_text(&out, &n, at, strlen(at));
    return out;
}

void substitution_free(struct substitution *substitution)
{
    pattern_free(&substitution->pattern);
    free(substitution->with);
    substitution->with = NULL;
}
