/* json.h - a strict pull parser. */
#ifndef JSON_H
#define JSON_H

#include "base.h"

struct json {
    const char *text;
    size_t nbytes, at;
    int depth;
    bool fresh; /* just entered: the next member has no comma before it */
    char *scratch;
    size_t used, capacity;
};

/* Starts to parse a text, which must outlive the parser. */
void json_start(struct json *j, const char *text, size_t nbytes);
void json_drop(struct json *j);

/* Returns EFORMAT, with an error that names the byte. */
rsd_status json_fail(const struct json *j, const char *what);

/* Returns the first character of what comes next; '\0' at the end. */
char json_peek(struct json *j);

/* Each takes what comes next, or fails if it is something else. json_next_key and json_next_item set *more
 * to false at the end of the object or list. */
rsd_status json_enter(struct json *j, char bracket);
rsd_status json_next_key(struct json *j, struct slice *key, bool *more);
rsd_status json_next_item(struct json *j, bool *more);
rsd_status json_string(struct json *j, struct slice *out);
rsd_status json_u64(struct json *j, uint64_t *out);
rsd_status json_number(struct json *j, double *value, int64_t *integer, bool *whole);
rsd_status json_skip(struct json *j);
rsd_status json_end(struct json *j);

/* Adds a string with its quotes, escaped. */
void json_add_string(struct text *text, const char *string, size_t nbytes);
/* Adds the shortest number that reads as the same value, or the text "nan", "inf" or "-inf". */
void json_add_float(struct text *text, double value);
bool json_is_utf8(const char *text, size_t nbytes);

#endif
