/* local.h - directories of this machine. Private to store. */
#ifndef LOCAL_H
#define LOCAL_H

#include "store.h"

/* ---- local_file.c ---- */

extern const struct store_ops local_store;

/* Opens the directory at a path of n bytes; an empty path is the current directory. */
rsd_status local_open_directory(const char *path, size_t n, struct store **out);

/* Makes a store of an open directory; the path is for messages. The store owns fd, also on failure. */
rsd_status local_adopt_directory(int fd, const char *path, size_t n, struct store **out);

/* ---- local_link.c ---- */

/* Opens a name of a directory, and follows a link only if it does not lead out. Returns -1 and sets errno
 * on failure: EXDEV for a link that leads out. */
int local_open_inside(int directory_fd, const char *name, int flags);

/* ---- local_output.c ---- */

#define COMPLETE_NAME  "reshard-complete"
#define REPLACED_NAME  "reshard-replaced"
#define RETIRED_NAME   "reshard-retired"
#define STAGING_SUFFIX ".reshard-part"
#define OLD_SUFFIX     ".reshard-old"

struct local_output {
    struct store_output base;
    struct output_options options;
    int parent_fd;  /* of the directory that the output will be in; -1: not open */
    int staging_fd; /* likewise */
    char *staging;  /* path of the staging directory */
    size_t nparent; /* bytes of the path in front of the output's name */
    bool moved; /* the staging directory may be in place, or be the old checkpoint: it is kept */
};

/* Joins two texts and what is between them. Returns NULL if there is no memory. */
char *local_join(const char *a, const char *separator, const char *b);
rsd_status local_fail_at(const char *path); /* with the text of errno */
rsd_status local_fail_foreign(const char *path);

/* Return the names of the output and of its staging directory in their parent. */
const char *local_output_name(const struct local_output *output);
const char *local_staging_name(const struct local_output *output);

bool local_exists(int directory_fd, const char *name);

/* Opens a directory that is not a link. Returns -1 on failure. */
int local_open_real(int directory_fd, const char *name);

/* Calls a function for each entry of a directory. */
typedef rsd_status local_visit_entry(void *context, int directory_fd, const char *name);
rsd_status local_visit(int directory_fd, local_visit_entry *visit, void *context);
rsd_status local_note_entry(void *context, int directory_fd, const char *name); /* sets a bool */
rsd_status local_remove_entries(int directory_fd, const char *kept); /* kept may be NULL */

/* Opens a file that this library makes, and locks it. Fails if it is a link, or anything but a regular file
 * with one name. The flags may have O_CREAT. */
rsd_status local_open_mark(int directory_fd, const char *name, int flags, int lock,
                           const char *path, int *out);

/* Lists the files of the checkpoint in a directory that is open, wherever it is now. */
rsd_status local_list_owned(const struct local_output *output, int directory_fd,
                            struct name_list *owned);

rsd_status local_open_output(const char *path, const struct output_options *options,
                             struct store_output **output);
rsd_status local_check_output(const char *path, const struct output_options *options);
rsd_status local_commit(struct store_output *output);
void local_close_output(struct store_output *output, bool keep);

/* ---- local_recover.c ---- */

/* Marks an old checkpoint as replaced, takes the mark from the new one, and then removes the old one, which
 * has the name `name` now. The lock on the mark tells another process that this one is alive. */
rsd_status local_retire_old(const struct local_output *output, int old_fd, int new_fd,
                            const char *name);

/* Finishes what a killed run left between two renames. */
rsd_status local_recover(const struct local_output *output);

/* Returns how many files a store may have open. */
size_t local_max_open(void);

#endif
