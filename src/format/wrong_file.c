/* wrong_file.c - says what a file is that cannot be read as a checkpoint: a pointer of Git LFS, the start of a file
 * whose rest is missing, an archive of TorchScript or NumPy, or the files of a save that did not finish.
 *
 * Some of it shows when a checkpoint is opened. Files that only the catalog names are checked before they are read:
 * where their last extent ends, they must have that many bytes.
 */
#include "safetensors.h"

#include <stdio.h>
#include <string.h>

enum { START_NBYTES = 64, END_NBYTES = 1 << 16, MOST_LOOKED_AT = 64 };

static const char lfs_cause[] = "this is a pointer of Git LFS, not the file itself; run 'git lfs "
                                "pull' in its directory";

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
    char bytes[START_NBYTES];
    uint64_t nbytes;
    if (store_stat(store, file, &nbytes, NULL))
        return NULL;
    struct slice start = {bytes, nbytes < sizeof bytes ? (size_t)nbytes : sizeof bytes};
    if (nbytes == 0) /* a rank may have nothing to write */
        return store->names.n == 1 ? "the file is empty" : NULL;
    if (store_read(store, file, 0, bytes, start.nbytes))
        return NULL;
    if (slice_begins(start, "version https://git-lfs.github.com/spec/"))
        return lfs_cause;
    if (slice_begins(start, "\x93NUMPY"))
        return "this is an array of NumPy, not a checkpoint";
    if (slice_begins(start, "PK\3\4"))
        return explain_archive(store, file, nbytes);
    uint64_t header = start.nbytes > 8 && bytes[8] == '{' ? little_endian(bytes, 8) : 0;
    if (header <= MAX_HEADER_NBYTES && header > nbytes - 8)
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

/* ---- files that the catalog names ---- */

/* Returns the catalog of what is in the files. */
static const struct catalog *stored_catalog(const rsd_checkpoint *checkpoint)
{
    return checkpoint->derivation ? derive_stored(checkpoint) : &checkpoint->catalog;
}

uint64_t extent_end(const struct extent *extent)
{
    bool known = extent->kind == EXTENT_DENSE || extent->kind == EXTENT_ITEM;
    return known && extent->nbytes <= UINT64_MAX - extent->offset ? extent->offset + extent->nbytes
                                                                  : 0;
}

static void add_end(uint64_t *ends, const struct extent *extent)
{
    uint64_t end = extent_end(extent);
    if (end > ends[extent->file])
        ends[extent->file] = end;
}

rsd_status format_find_ends(const rsd_checkpoint *checkpoint, uint64_t **ends)
{
    const struct catalog *stored = stored_catalog(checkpoint), *catalog = &checkpoint->catalog;
    uint64_t *found = mem_new((size_t)checkpoint->store->names.n + 1, sizeof *found);
    if (!found)
        return RSD_ENOMEM;
    for (size_t i = 0; i < stored->nextents; i++)
        if (stored->extents[i].kind != EXTENT_NONE)
            add_end(found, &stored->extents[i]);
    for (size_t i = 0; i < catalog->nvalues; i++)
        if (catalog->values[i].extent.kind != EXTENT_NONE)
            add_end(found, &catalog->values[i].extent);
    *ends = found;
    return RSD_OK;
}

/* The first names of what a file should have and does not. */
struct lost_names {
    struct text names;
    size_t n;
};

static void add_lost_name(struct lost_names *lost, const char *name)
{
    enum { MOST_LOST = 3 };
    if (lost->n++ < MOST_LOST)
        text_add(&lost->names, "%s%.300s", lost->n > 1 ? ", " : "", name);
    else if (lost->n == MOST_LOST + 1)
        text_add(&lost->names, ", ...");
}

/* Returns whether bytes of an extent are behind the end of the file, which has nbytes. */
static bool is_behind_end(const struct extent *extent, uint32_t file, uint64_t nbytes)
{
    return extent->kind != EXTENT_NONE && extent->file == file && extent_end(extent) > nbytes;
}

/* Lists the tensors and values of a file that lie behind its end. */
static void list_lost(const rsd_checkpoint *checkpoint, uint32_t file, uint64_t nbytes,
                      struct lost_names *lost)
{
    const struct catalog *stored = stored_catalog(checkpoint), *catalog = &checkpoint->catalog;
    for (size_t t = 0; t < stored->ntensors; t++) {
        const struct stored_tensor *tensor = &stored->tensors[t];
        size_t box = 0;
        while (box < tensor->nboxes &&
               !is_behind_end(&stored->extents[tensor->first_extent + box], file, nbytes))
            box++;
        if (box < tensor->nboxes)
            add_lost_name(lost, tensor->name);
    }
    for (size_t i = 0; i < catalog->nvalues; i++)
        if (is_behind_end(&catalog->values[i].extent, file, nbytes))
            add_lost_name(lost, catalog->values[i].name);
}

rsd_status format_check_file(const rsd_checkpoint *checkpoint, uint32_t file, uint64_t end)
{
    struct store *store = checkpoint->store;
    uint64_t nbytes = 0;
    struct lost_names lost = {0};
    struct text cause = {0};
    rsd_status status = store_stat(store, file, &nbytes, NULL);
    if (!status && nbytes >= end)
        return RSD_OK;
    if (status)
        text_add(&cause, "%s", rsd_error());
    else if (explain_file(store, file) == lfs_cause)
        text_add(&cause, "%s", lfs_cause);
    else
        text_add(&cause,
                 "the file is cut short, at %llu of at least %llu bytes; copy or download it again",
                 (unsigned long long)nbytes, (unsigned long long)end);
    list_lost(checkpoint, file, status ? 0 : nbytes, &lost);
    if (cause.failed || lost.names.failed)
        status = fail(RSD_ENOMEM, "no memory for a message");
    else
        status = fail(status ? status : RSD_EFORMAT, "%s; %zu tensor%s cannot be read: %s",
                      cause.chars, lost.n, lost.n == 1 ? " or value" : "s and values",
                      lost.n ? lost.names.chars : "none");
    text_drop(&cause);
    text_drop(&lost.names);
    return store_fail_in(store, file, status);
}

/* ---- directories ---- */

rsd_status format_fail_without_metadata(const struct store *store,
                                        const struct store_listing *listing)
{
    size_t n = 0;
    for (size_t i = 0; i < listing->n; i++)
        n += !listing->entries[i].directory && has_suffix(listing->entries[i].base, ".distcp");
    return n == 0 ? RSD_OK
                  : fail(RSD_EFORMAT,
                         "%s has %zu .distcp file%s and no .metadata: the save did not finish, or "
                         ".metadata was not copied",
                         store->path, n, n == 1 ? "" : "s");
}
