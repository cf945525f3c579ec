/* local.h - directories of this machine. Private to store. */
#ifndef LOCAL_H
#define LOCAL_H

#include "store.h"

/* ---- local_file.c ---- */

extern const struct store_ops local_store;

/* Opens the directory at a path of n bytes; an empty path is the current directory. */
rsd_status local_open_directory(const char *path, size_t n, struct store **out);

/* ---- local_output.c ---- */

rsd_status local_open_output(const char *path, const struct output_options *options,
                             struct store_output **output);
rsd_status local_check_output(const char *path, const struct output_options *options);
rsd_status local_commit(struct store_output *output);
void local_close_output(struct store_output *output, bool keep);

#endif
