/* rules_match.c - expressions that select names, and substitutions that change them.
 *
 * Expressions are POSIX extended, unless the caller of the rules matches them itself.
 */
#include "rules.h"

/* ---- expressions ---- */

/* Returns the first construct that other dialects have and glibc accepts with another meaning; NULL: none. */
static const char *find_foreign_syntax(const char *text)
{
    static const char *const constructs[] = {"\\d", "\\D", "\\w", "\\W", "\\s",
                                             "\\S", "\\b", "(?",  NULL};
    for (const char *c = text; *c; c++) {
        for (const char *const *construct = constructs; *construct; construct++)
            if (strncmp(c, *construct, 2) == 0)
                return *construct;
        if (*c == '\\' && c[1])
            c++;
    }
    return NULL;
}

/* Compiles an expression. EINVAL: it is invalid, or has syntax that POSIX expressions lack. */
static rsd_status compile_regex(struct expression *expression)
{
    const char *foreign = find_foreign_syntax(expression->text);
    if (foreign)
        return fail(RSD_EINVAL,
                    "'%s': %s is not POSIX extended syntax; write [0-9] for digits, [A-Za-z0-9_] "
                    "for letters",
                    expression->text, foreign);
    struct text pattern = {0};
    char *chars;
    text_add(&pattern, expression->whole ? "^(%s)$" : "%s", expression->text);
    TRY(text_take(&pattern, &chars));
    rsd_status status = regex_compile(chars, 0, &expression->regex);
    mem_free(chars);
    expression->posix = !status;
    return status ? fail_in(status, "'%.300s' ", expression->text) : RSD_OK;
}

rsd_status expression_open(struct expression *expression, struct slice text, bool whole, bool posix)
{
    struct text copy = {0};
    *expression = (struct expression){.whole = whole};
    text_add(&copy, "%.*s", (int)text.nbytes, text.bytes);
    TRY(text_take(&copy, &expression->text));
    rsd_status status = posix ? compile_regex(expression) : RSD_OK;
    if (status)
        expression_drop(expression);
    return status;
}

/* The time to match a name grows with the square of its length, and names come from files. */
static rsd_status check_name_length(const char *name)
{
    enum { MAX_MATCHED_NBYTES = 2000 };
    return strnlen(name, MAX_MATCHED_NBYTES + 1) <= MAX_MATCHED_NBYTES
               ? RSD_OK
               : fail(RSD_ELIMIT, "name of more than %d bytes cannot be matched: %.60s...",
                      (int)MAX_MATCHED_NBYTES, name);
}

rsd_status expression_match(const struct expression *expression, const rsd_rules_options *options,
                            const char *name, bool *matches)
{
    if (!expression->posix) {
        int32_t answer = 0;
        TRY(options->match(options->context, expression->text, expression->whole, name, &answer));
        *matches = answer != 0;
        return RSD_OK;
    }
    TRY(check_name_length(name));
    int error = regexec(&expression->regex, name, 0, NULL, 0);
    if (error && error != REG_NOMATCH)
        return fail(RSD_ENOMEM, "no memory to match '%s'", expression->text);
    *matches = error == 0;
    return RSD_OK;
}

void expression_drop(struct expression *expression)
{
    if (expression->posix)
        regfree(&expression->regex);
    mem_free(expression->text);
    *expression = (struct expression){0};
}

/* ---- substitutions ---- */

/* Copies the text up to the next separator without a backslash before it, and moves *at behind that
 * separator. *part is NULL if there is no separator. */
static rsd_status take_until_separator(const char **at, char separator, char **part)
{
    struct text copy = {0};
    const char *c = *at;
    *part = NULL;
    for (; *c && *c != separator; c++) {
        if (*c == '\\' && c[1] == separator)
            c++;
        else if (*c == '\\' && c[1])
            text_add(&copy, "%c", *c++);
        text_add(&copy, "%c", *c);
    }
    if (!*c) {
        text_drop(&copy);
        return RSD_OK;
    }
    *at = c + 1;
    return text_take(&copy, part);
}

rsd_status substitution_split(const char *text, char **old, char **replacement, bool *everywhere)
{
    const char *at = text + 2;
    rsd_status status = RSD_OK;
    *old = *replacement = NULL;
    if (text[0] == 's' && text[1] && text[1] != '\\' && text[1] != '\n')
        status = take_until_separator(&at, text[1], old);
    if (!status && *old)
        status = take_until_separator(&at, text[1], replacement);
    if (!status && (!*replacement || (*at && strcmp(at, "g") != 0)))
        status = fail(RSD_EINVAL, "rename '%s' must be s/OLD/NEW/ or s/OLD/NEW/g", text);
    *everywhere = !status && *at == 'g';
    if (status) {
        mem_free(*old);
        mem_free(*replacement);
    }
    return status;
}

/* Appends a replacement as sed does: & and \0 are the match, \1 to \9 its groups. */
static void add_replacement(struct text *out, const char *replacement, const char *name,
                            const regmatch_t *groups)
{
    for (const char *c = replacement; *c; c++) {
        int group = *c == '&' ? 0 : *c == '\\' && c[1] >= '0' && c[1] <= '9' ? c[1] - '0' : -1;
        if (group >= 0 && groups[group].rm_so >= 0)
            text_add(out, "%.*s", (int)(groups[group].rm_eo - groups[group].rm_so),
                     name + groups[group].rm_so);
        if (*c == '\\' && c[1])
            c++;
        if (group < 0)
            text_add(out, "%c", *c);
    }
}

rsd_status substitution_apply(const struct expression *expression, const char *replacement,
                              bool everywhere, char **name)
{
    enum { NGROUPS = 10 };
    regmatch_t groups[NGROUPS];
    struct text out = {0};
    const char *at = *name;
    int error = 0;
    TRY(check_name_length(at));
    for (int flags = 0; (error = regexec(&expression->regex, at, NGROUPS, groups, flags)) == 0;
         flags = REG_NOTBOL) {
        size_t start = (size_t)groups[0].rm_so, end = (size_t)groups[0].rm_eo;
        bool empty = start == end;
        text_add(&out, "%.*s", (int)start, at);
        add_replacement(&out, replacement, at, groups);
        if (empty &&
            at[end]) /* An empty match consumes one character, or it would be found again. */
            text_add(&out, "%c", at[end++]);
        at += end;
        if (!everywhere || (empty && !*at))
            break;
    }
    text_add(&out, "%s", at);
    if (error && error != REG_NOMATCH) {
        text_drop(&out);
        return fail(RSD_ENOMEM, "no memory to match '%s'", expression->text);
    }
    char *renamed;
    TRY(text_take(&out, &renamed));
    mem_free(*name);
    *name = renamed;
    return RSD_OK;
}
