/* folder.h - a folder of a test's own, and what is in it. */
#ifndef FOLDER_H
#define FOLDER_H

#include <stdbool.h>
#include <stddef.h>

/* Makes an empty folder for this process. */
const char *folder_new(const char *name);

/* "FOLDER/NAME", valid until eight more calls. */
const char *path_in(const char *folder, const char *name);

void folder_remove(const char *path);
bool is_there(const char *path);
char *read_whole(const char *path, size_t *n); /* NULL: cannot be read. To be freed */
bool same_files(const char *a, const char *b);
int count_entries(const char *folder); /* -1: no folder */

#endif
