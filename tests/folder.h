/* folder.h - a temporary directory of a test, and its files. */
#ifndef FOLDER_H
#define FOLDER_H

#include <stdbool.h>
#include <stddef.h>

/* Creates an empty directory for this process. */
const char *folder_new(const char *name);

/* Returns "DIRECTORY/NAME", which is valid until eight more calls. */
const char *path_in(const char *folder, const char *name);

void folder_remove(const char *path);
bool is_there(const char *path);
char *read_whole(const char *path, size_t *n); /* NULL: cannot be read. The caller frees it */
bool same_files(const char *a, const char *b);
int count_entries(const char *folder); /* -1: not a directory */

#endif
