/* ocdbt.h - the frames of an OCDBT database. Private to format. */
#ifndef OCDBT_H
#define OCDBT_H

#include "orbax.h"

enum { MAX_BODY_NBYTES = 1 << 30, MAX_BODY_GROWTH = 1000 };

/* The body of a frame, and what was not read of it yet. Starts as {0}. */
struct frame_body {
    struct bytes bytes;
    size_t at;
};

/* Checks a frame of n bytes, and puts its body into `body`, which the caller drops. */
rsd_status frame_open(unsigned char *frame, size_t n, uint32_t magic, struct frame_body *body);

rsd_status body_fail(const struct frame_body *body, const char *what); /* returns EFORMAT */
rsd_status body_take_slice(struct frame_body *body, uint64_t n, struct slice *out);
rsd_status body_take_byte(struct frame_body *body, unsigned *out);
rsd_status body_take_varint(struct frame_body *body, uint64_t *out);

/* Takes the number of entries, each of which has a byte or more in the body. */
rsd_status body_take_count(struct frame_body *body, size_t *out);
rsd_status body_take_column(struct frame_body *body, size_t n, uint64_t *out);
rsd_status body_skip_column(struct frame_body *body, size_t n);

/* The base of a path is its first part. */
struct table_path {
    size_t text, nbytes, base_nbytes;
};

/* Starts as {0}. */
struct file_table {
    struct table_path *paths;
    size_t n;
    struct bytes texts;
};
rsd_status file_table_take(struct frame_body *body, struct file_table *table);
void file_table_drop(struct file_table *table);

/* Adds bytes to a text. They may be NULL if they are none, from which memcpy must not copy. */
static inline void ocdbt_append_bytes(char *text, size_t *n, const void *more, size_t nbytes)
{
    if (nbytes)
        memcpy(text + *n, more, nbytes);
    *n += nbytes;
}

static inline struct slice bytes_slice(const struct bytes *bytes)
{
    return (struct slice){(const char *)bytes->data, bytes->n};
}

#endif
