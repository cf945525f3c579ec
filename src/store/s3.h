/* s3.h - buckets of S3. Private to store. */
#ifndef S3_H
#define S3_H

#include "remote.h"

/* ---- s3.c ---- */

extern const struct remote_kind s3_kind;

/* Opens what is below a path of n bytes. */
rsd_status s3_open_prefix(const char *path, size_t n, rsd_storage *storage,
                          struct remote_store **out);

/* Prepares a request for a key ("": the bucket), with a query that is encoded and sorted. */
rsd_status s3_set_request(struct remote_store *store, const char *key, const char *query,
                          struct http_request *request);
rsd_status s3_key(const struct remote_store *store, const char *name,
                  char **key); /* for rsd_free */

/* Called for each element that is entered or left, with its text when it is left. */
typedef rsd_status s3_take_element(void *context, const char *name, bool entered, const char *text);

/* Reads a document whose root has this name, of the bucket. It is checked whole before anything is taken. */
rsd_status s3_load_document(struct remote_store *store, const char *query, const char *root,
                            s3_take_element *take, void *context);
rsd_status s3_parse_document(const struct bytes *document, const char *root, s3_take_element *take,
                             void *context);

rsd_status s3_list(struct store *store, const char *directory, struct store_listing *out);

#endif
