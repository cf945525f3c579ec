/* wrong_file.c - says what a file is that cannot be read as a checkpoint: a pointer of Git LFS, the start of a file
 * whose rest is missing, an archive of TorchScript or NumPy, or the files of a save that did not finish. */
#include "format.h"

#include <stdio.h>
#include <string.h>

enum { START_NBYTES = 64, END_NBYTES = 1 << 16, MOST_LOOKED_AT = 64 };

static const char lfs_start[] = "version https://git-lfs.github.com/spec/";

/* Returns whether bytes begin with a text. */
static bool begins_with(const char *bytes, size_t n, const char *text, size_t length)
{
    return n >= length && memcmp(bytes, text, length) == 0;
}

/* Says what a ZIP archive is, by the names at its end. NULL: what torch.save writes, as it seems. */
static const char *explain_archive(struct store *store, uint32_t file, uint64_t nbytes)
{
    const char *cause = NULL;
    size_t n = nbytes < END_NBYTES ? (size_t)nbytes : END_NBYTES;
    char *end = mem_new(n + 1, 1);
    if (end && store_read(store, file, nbytes - n, end, n) == RSD_OK) {
        if (!memmem(end, n, "PK\5\6", 4))
            cause = "the file is cut short: it begins as a torch.save file and has no end; copy or "
                    "download it again";
        else if (memmem(end, n, "constants.pkl", 13))
            cause =
                "this is a TorchScript archive, which contains a program; save the state_dict of "
                "the module with torch.save";
        else if (memmem(end, n, ".npy", 4))
            cause = "this is an archive of NumPy, not a checkpoint";
    }
    mem_free(end);
    return cause;
}

/* Returns what a file is instead of a part of a checkpoint; NULL: not known. */
static const char *explain_file(struct store *store, uint32_t file)
{
    char start[START_NBYTES];
    uint64_t nbytes, header = 0;
    if (store_stat(store, file, &nbytes, NULL))
        return NULL;
    size_t n = nbytes < sizeof start ? (size_t)nbytes : sizeof start;
    if (n == 0) /* a rank may have nothing to write */
        return store->names.n == 1 ? "the file is empty" : NULL;
    if (store_read(store, file, 0, start, n))
        return NULL;
    if (begins_with(start, n, lfs_start, sizeof lfs_start - 1))
        return "this is a pointer of Git LFS, not the file itself; run 'git lfs pull' in its "
               "directory";
    if (begins_with(start, n, "\x93NUMPY", 6))
        return "this is an array of NumPy, not a checkpoint";
    if (begins_with(start, n, "PK\3\4", 4))
        return explain_archive(store, file, nbytes);
    for (size_t i = 8; i-- > 0 && n > 8;)
        header = header << 8 | (unsigned char)start[i];
    if (n > 8 && start[8] == '{' && header <= 100000000 && header > nbytes - 8)
        return "the file is cut short: it ends inside its header; copy or download it again";
    return NULL;
}

rsd_status format_explain_failure(struct store *store, rsd_status status)
{
    char error[2048];
    if (status != RSD_EFORMAT && status != RSD_EUNSUPPORTED)
        return status;
    snprintf(error, sizeof error, "%s", rsd_error()); /* explaining may fail too */
    for (uint32_t file = 0; file < store->names.n && file < MOST_LOOKED_AT; file++) {
        const char *cause = explain_file(store, file);
        if (cause)
            return store_fail_in(store, file, fail(status, "%s", cause));
    }
    return fail(status, "%s", error);
}

/* Whether a name is that of a data file of DCP, such as __3_0.distcp. */
static bool is_data_file(const char *name)
{
    size_t n = strlen(name);
    return n > 7 && strcmp(name + n - 7, ".distcp") == 0;
}

rsd_status format_fail_without_metadata(const struct store *store,
                                        const struct store_listing *listing)
{
    size_t n = 0;
    for (size_t i = 0; i < listing->n; i++)
        n += !listing->entries[i].directory && is_data_file(listing->entries[i].base);
    return n == 0 ? RSD_OK
                  : fail(RSD_EFORMAT,
                         "%s has %zu .distcp file%s and no .metadata: the save did not finish, or "
                         ".metadata was not copied",
                         store->path, n, n == 1 ? "" : "s");
}
