/* opening.c - opens checkpoints, and sees to it that the files they name are there before work begins. */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int open_checkpoint(const char *verb, const char *path, rsd_checkpoint **checkpoint)
{
    return complain_status(verb, rsd_checkpoint_open(path, NULL, checkpoint));
}

bool every_tensor(const void *context, const rsd_tensor_info *tensor, const rsd_extent *extent)
{
    (void)context;
    (void)extent;
    return tensor->nbytes > 0;
}

/* Which files hold an extent that is needed. */
static bool *mark_files(const rsd_checkpoint *checkpoint, is_needed *needed, const void *context)
{
    size_t nfiles = (size_t)rsd_checkpoint_nfiles(checkpoint);
    bool *marks = need_memory(calloc(nfiles + 1, 1));
    memset(marks, !needed, nfiles);
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint) && needed; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        rsd_extent stored = {.struct_nbytes = sizeof stored};
        if (rsd_checkpoint_tensor(checkpoint, i, &tensor))
            continue;
        for (int64_t k = 0; k < tensor.nboxes; k++)
            if (rsd_checkpoint_box(checkpoint, i, k, &stored) == RSD_OK && stored.file >= 0 &&
                needed(context, &tensor, &stored))
                marks[stored.file] = true;
    }
    return marks;
}

/* The folder that file names are of, with its slash. */
static char *folder_of(const char *path)
{
    struct stat about;
    const char *slash = strrchr(path, '/');
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode))
        return need_text("%s%s", path, slash && !slash[1] ? "" : "/");
    return need_text("%.*s", slash ? (int)(slash - path) + 1 : 0, path);
}

int need_files(const char *verb, const char *path, const rsd_checkpoint *checkpoint,
               is_needed *needed, const void *context)
{
    enum { MOST_TOLD = 20 };
    bool *marks = mark_files(checkpoint, needed, context);
    char *folder = folder_of(path);
    int64_t nmissing = 0;
    int code = EXIT_YES;
    for (int64_t i = 0; i < rsd_checkpoint_nfiles(checkpoint); i++) {
        char *file =
            marks[i] ? need_text("%s%s", folder, rsd_checkpoint_file(checkpoint, i)) : NULL;
        if (file && access(file, R_OK) != 0) {
            code = errno == ENOENT ? EXIT_UNREADABLE : EXIT_IO;
            if (nmissing++ < MOST_TOLD)
                complain(verb, code, "%s: %s", file, strerror(errno));
        }
        free(file);
    }
    if (nmissing > MOST_TOLD)
        complain(verb, code, "and %lld more files", (long long)nmissing - MOST_TOLD);
    free(folder);
    free(marks);
    return code;
}
