/* input.c - opens checkpoints, and checks that their files exist before the work starts. */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int input_open(const char *verb, const char *path, rsd_checkpoint **checkpoint)
{
    rsd_open_options options = {.struct_nbytes = sizeof options};
    rsd_status status = urls_open_storage(path, &options.storage);
    if (!status)
        status = rsd_checkpoint_open(path, &options, checkpoint);
    return cli_fail_status(verb, status);
}

/* Marks the files that have an extent which is needed. */
static bool *mark_files(const rsd_checkpoint *checkpoint, input_needs *needs, const void *context)
{
    size_t nfiles = (size_t)rsd_checkpoint_nfiles(checkpoint);
    bool *marks = cli_need_memory(calloc(nfiles + 1, 1));
    memset(marks, !needs, nfiles);
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint) && needs; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        rsd_extent extent = {.struct_nbytes = sizeof extent};
        if (rsd_checkpoint_tensor(checkpoint, i, &tensor))
            continue;
        for (int64_t k = 0; k < tensor.nboxes; k++)
            if (rsd_checkpoint_box(checkpoint, i, k, &extent) == RSD_OK && extent.file >= 0 &&
                needs(context, &tensor, &extent))
                marks[extent.file] = true;
    }
    return marks;
}

/* Returns the directory of the files, with a slash at its end. */
static char *find_input_directory(const char *path)
{
    struct stat about;
    const char *slash = strrchr(path, '/');
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode))
        return cli_new_text("%s%s", path, slash && !slash[1] ? "" : "/");
    return cli_new_text("%.*s", slash ? (int)(slash - path) + 1 : 0, path);
}

int input_check_files(const char *verb, const char *path, const rsd_checkpoint *checkpoint,
                      input_needs *needs, const void *context)
{
    if (urls_is_url(path)) /* a request for each would cost more than a late error */
        return EXIT_YES;
    bool *marks = mark_files(checkpoint, needs, context);
    char *directory = find_input_directory(path);
    struct name_sample bad = {0};
    int error = 0;
    for (int64_t i = 0; i < rsd_checkpoint_nfiles(checkpoint); i++) {
        char *file = cli_new_text("%s%s", directory, rsd_checkpoint_file(checkpoint, i));
        if (marks[i] && access(file, R_OK) != 0) {
            error = errno;
            name_sample_add(&bad, file);
        }
        free(file);
    }
    int code = !bad.n ? EXIT_YES : error == ENOENT ? EXIT_UNREADABLE : EXIT_IO;
    if (bad.n == 1)
        cli_fail(verb, code, "%s: %s", bad.names, strerror(error));
    else if (bad.n > 1)
        cli_fail(verb, code, "%lld files cannot be read: %s: %s", (long long)bad.n, bad.names,
                 strerror(error));
    free(bad.names);
    free(directory);
    free(marks);
    return code;
}
