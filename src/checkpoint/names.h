/* names.h - maps between the names that two programs have for the tensors of one model. Private to checkpoint. */
#ifndef NAMES_H
#define NAMES_H

#include "checkpoint.h"

enum { NAME_MAX_PARTS = 4, NAME_MAX_CAPTURES = 4 };

/* What a line of a map says besides names. */
enum name_kind {
    NAME_PLAIN,
    NAME_VOCAB,   /* rows may be padding of the vocabulary */
    NAME_ROWS,    /* equal parts, one behind the other */
    NAME_QKV,     /* queries, keys and values, group by group */
    NAME_QKV_ROWS /* all queries, then all keys, then all values */
};

/* One line: a tensor of the left column, and what it consists of in the right one. */
struct name_line {
    char *whole;                 /* NULL: the parts are left out */
    char *parts[NAME_MAX_PARTS]; /* nparts 0: the whole is left out */
    size_t nparts;
    enum name_kind kind;
};

struct name_map {
    const char *title; /* for messages */
    struct name_line *lines;
    size_t n, capacity;
};

/* ---- names_map.c ---- */

/* Reads a built-in map by its name, or a file by its path. `title` must outlive the map. */
rsd_status name_map_open(struct name_map *map, const char *title);
void name_map_close(struct name_map *map);

/* A name that matched a pattern, and the texts that its stars stand for. */
struct name_match {
    const struct name_line *line;
    size_t part; /* of the line; 0 for the left column */
    struct slice captures[NAME_MAX_CAPTURES];
};

/* Finds the first line that has a name in one column: `left`, or the right one. */
bool name_map_find(const struct name_map *map, bool left, const char *name,
                   struct name_match *match);

/* Adds a pattern to a text, with the captures of a match in place of its stars. */
void name_match_expand(const struct name_match *match, const char *pattern, struct text *text);

/* ---- names_maps.c ---- */

const char *name_map_text(const char *name); /* NULL: unknown */

#endif
