/* names_map.c - reads maps of names, and finds the line of a tensor.
 *
 *     decoder.layers.*.mlp.linear_fc1.weight  model.layers.*.mlp.{gate,up}_proj.weight  rows
 */
#include "names.h"
#include "rules.h"

static const struct {
    const char *word;
    enum name_kind kind;
    size_t least, most; /* parts */
} kinds[] = {{"", NAME_PLAIN, 1, 1},
             {"vocab", NAME_VOCAB, 1, 1},
             {"rows", NAME_ROWS, 2, NAME_MAX_PARTS},
             {"qkv", NAME_QKV, 3, 3},
             {"qkv-rows", NAME_QKV_ROWS, 3, 3}};

enum { NKINDS = sizeof kinds / sizeof *kinds, MAX_WORDS = 3 };

/* ---- lines ---- */

static size_t count_stars(const char *pattern)
{
    size_t n = 0;
    for (; *pattern; pattern++)
        if (*pattern == '*') {
            n++;
            pattern += pattern[1] == '*';
        }
    return n;
}

/* Adds a pattern with {a,b} once for each text in the braces. */
static rsd_status add_parts(struct name_line *line, const char *pattern)
{
    const char *open = strchr(pattern, '{'), *close = open ? strchr(open, '}') : NULL;
    if (!open)
        close = open = pattern + strlen(pattern);
    else if (!close)
        return fail(RSD_EINVAL, "'%s' has no closing brace", pattern);
    for (const char *at = open;; at++) {
        struct text text = {0};
        const char *begin = at + (*open == '{' && at == open);
        size_t n = strcspn(begin, ",}");
        if (line->nparts == NAME_MAX_PARTS)
            return fail(RSD_EINVAL, "'%s' has more than %d parts", pattern, (int)NAME_MAX_PARTS);
        text_add(&text, "%.*s%.*s%s", (int)(open - pattern), pattern, (int)(*open ? n : 0), begin,
                 *close ? close + 1 : "");
        TRY(text_take(&text, &line->parts[line->nparts]));
        line->nparts++;
        at = begin + n;
        if (*at != ',')
            return RSD_OK;
    }
}

/* Checks that a line has the parts that its kind needs, and as many stars on both sides. */
static rsd_status check_map_line(const struct name_line *line, size_t least, size_t most)
{
    size_t nstars = count_stars(line->whole ? line->whole : line->nparts ? line->parts[0] : "");
    if (!line->whole && !line->nparts)
        return fail(RSD_EINVAL, "both sides are -");
    if (nstars > NAME_MAX_CAPTURES)
        return fail(RSD_EINVAL, "name has more than %d stars", (int)NAME_MAX_CAPTURES);
    if (!line->whole || !line->nparts)
        return RSD_OK;
    if (line->nparts < least || line->nparts > most)
        return fail(RSD_EINVAL,
                    "the right side has %zu tensors; rows, qkv or qkv-rows must say how "
                    "they make up the one on the left",
                    line->nparts);
    for (size_t i = 0; i < line->nparts; i++)
        if (count_stars(line->parts[i]) != nstars)
            return fail(RSD_EINVAL, "both sides must have as many stars");
    return RSD_OK;
}

/* Fills in a line from its words: the whole, the parts, and perhaps a kind. */
static rsd_status parse_line(struct name_line *line, char *const words[MAX_WORDS])
{
    size_t kind = 0;
    while (kind < NKINDS && strcmp(kinds[kind].word, words[2] ? words[2] : "") != 0)
        kind++;
    if (kind == NKINDS)
        return fail(RSD_EINVAL, "'%s' must be vocab, rows, qkv or qkv-rows", words[2]);
    line->kind = kinds[kind].kind;
    if (!words[1])
        return fail(RSD_EINVAL, "a line must have a name on each side");
    if (strcmp(words[1], "-") != 0)
        TRY(add_parts(line, words[1]));
    if (strcmp(words[0], "-") != 0) {
        line->whole = text_copy(words[0]);
        if (!line->whole)
            return RSD_ENOMEM;
    }
    return check_map_line(line, kinds[kind].least, kinds[kind].most);
}

/* Adds one line, which is changed. */
static rsd_status add_map_line(struct name_map *map, int number, char *text)
{
    char *words[MAX_WORDS + 1] = {0}, *rest;
    size_t n = 0;
    text[strcspn(text, "#")] = '\0';
    for (char *word = strtok_r(text, " \t\r", &rest); word && n <= MAX_WORDS;
         word = strtok_r(NULL, " \t\r", &rest))
        words[n++] = word;
    if (n == 0)
        return RSD_OK;
    TRY(GROW(map->lines, map->capacity, map->n + 1));
    map->lines[map->n] = (struct name_line){0};
    rsd_status status = RSD_OK;
    if (n > MAX_WORDS)
        status = fail(RSD_EINVAL, "unexpected '%s' at the end of the line", words[MAX_WORDS]);
    else
        status = parse_line(&map->lines[map->n], words);
    map->n++;
    return status == RSD_EINVAL ? fail_in(status, "%s:%d: ", map->title, number) : status;
}

rsd_status name_map_open(struct name_map *map, const char *title)
{
    const char *text = name_map_text(title);
    struct bytes content = {0};
    rsd_status status = RSD_OK;
    *map = (struct name_map){.title = title};
    if (text)
        bytes_put(&content, text, strlen(text) + 1);
    else
        status = rules_read_file(title, &content);
    if (content.failed)
        status = RSD_ENOMEM;
    char *line = (char *)content.data;
    for (int number = 1; !status && line; number++) {
        char *end = strchr(line, '\n');
        if (end)
            *end++ = '\0';
        status = add_map_line(map, number, line);
        line = end;
    }
    bytes_drop(&content);
    if (status)
        name_map_close(map);
    return status;
}

void name_map_close(struct name_map *map)
{
    for (size_t i = 0; i < map->n; i++) {
        mem_free(map->lines[i].whole);
        for (size_t k = 0; k < map->lines[i].nparts; k++)
            rsd_free(map->lines[i].parts[k]);
    }
    mem_free(map->lines);
    *map = (struct name_map){0};
}

/* ---- matching ---- */

/* Returns whether a name matches a pattern. * stands for characters without a dot, ** for any; both are captured. */
static bool match_pattern(const char *pattern, const char *name, struct slice *captures)
{
    while (*pattern && *pattern != '*')
        if (*pattern++ != *name++)
            return false;
    if (!*pattern)
        return !*name;
    bool dots = pattern[1] == '*';
    const char *rest = pattern + (dots ? 2 : 1);
    size_t most = dots ? strlen(name) : strcspn(name, ".");
    for (size_t n = most; n > 0; n--) {
        *captures = (struct slice){name, n};
        if (match_pattern(rest, name + n, captures + 1))
            return true;
    }
    return false;
}

bool name_map_find(const struct name_map *map, bool left, const char *name,
                   struct name_match *match)
{
    for (size_t i = 0; i < map->n; i++) {
        const struct name_line *line = &map->lines[i];
        size_t n = left ? line->whole != NULL : line->nparts;
        for (size_t part = 0; part < n; part++)
            if (match_pattern(left ? line->whole : line->parts[part], name, match->captures)) {
                match->line = line;
                match->part = part;
                return true;
            }
    }
    return false;
}

void name_match_expand(const struct name_match *match, const char *pattern, struct text *text)
{
    const struct slice *capture = match->captures;
    for (const char *at = pattern; *at; at++) {
        if (*at != '*') {
            text_add(text, "%c", *at);
            continue;
        }
        text_add(text, "%.*s", (int)capture->nbytes, capture->bytes);
        capture++;
        at += at[1] == '*';
    }
}
