/* formats.c - the table of formats: which one the files at a path have, and where their bytes are.
 *
 *     a file        by its first bytes: an archive or a pickle of torch.save, a safetensors file; an index
 *                   or metadata by its name
 *     a directory   by the best sign among the files in it, in the order of enum sureness
 *
 * A directory with no sign, but with a directory that has one, is an error that names the latter: users
 * point at the directory above often enough.
 */
#include "rows.h"

#include <string.h>

static const struct format *const formats[] = {&format_dcp, &format_safetensors, &format_torch_save,
                                               &format_orbax, NULL};

const struct format *format_find(rsd_format id)
{
    for (size_t i = 0; formats[i]; i++)
        if (formats[i]->id == id)
            return formats[i];
    return NULL;
}

const char *rsd_format_name(rsd_format id)
{
    const struct format *format = format_find(id);
    return format ? format->name : NULL;
}

bool format_is_marker(const char *name)
{
    for (size_t i = 0; formats[i]; i++)
        if (formats[i]->writer && strcmp(formats[i]->writer->marker, name) == 0)
            return true;
    return false;
}

/* ---- finding out ---- */

/* What the surest format says of the files in a directory. */
struct format_guess {
    const struct format *format; /* NULL: no format has a sign */
    int sureness;
};

/* Returns the format that is surest of a file in the listing. `wanted` 0: any format. */
static struct format_guess guess_format(const struct store_listing *listing, struct slice start,
                                        rsd_format wanted)
{
    struct format_guess best = {0};
    for (size_t i = 0; formats[i]; i++)
        for (size_t k = 0; k < listing->n && (!wanted || formats[i]->id == wanted); k++) {
            int sureness = formats[i]->probe(listing, &listing->entries[k], start);
            if (sureness > best.sureness)
                best = (struct format_guess){formats[i], sureness};
        }
    return best;
}

/* Returns the format of which directories below this one are a checkpoint, or NULL. */
static const struct format *
guess_format_below(struct store *store, const struct store_listing *listing, rsd_format wanted)
{
    for (size_t i = 0; formats[i]; i++)
        if (formats[i]->probe_below && (!wanted || formats[i]->id == wanted) &&
            formats[i]->probe_below(store, listing))
            return formats[i];
    return NULL;
}

/* Adds the files of which the format is as sure to the store. */
static rsd_status add_files(struct store *store, const struct store_listing *listing,
                            struct slice start, struct format_guess guess)
{
    uint32_t file;
    for (size_t i = 0; i < listing->n; i++) {
        const struct store_entry *entry = &listing->entries[i];
        if (guess.sureness > 0 && guess.format->probe(listing, entry, start) == guess.sureness)
            TRY(store_add_file(store, (struct slice){entry->name, strlen(entry->name)}, &file));
    }
    return RSD_OK;
}

/* Says which directory below this one is a checkpoint, if one is. */
static rsd_status fail_without_sign(struct store *store, const struct store_listing *listing)
{
    const char *path = store->path;
    for (size_t i = 0; i < listing->n; i++) {
        const struct store_entry *entry = &listing->entries[i];
        struct store_listing below;
        if (!entry->directory || entry->base[0] == '.' || store_list(store, entry->name, &below))
            continue;
        bool found = guess_format(&below, (struct slice){0}, 0).format != NULL;
        store_listing_drop(&below);
        if (found)
            return fail(RSD_EFORMAT, "%s is not a checkpoint, but %s/%s is one", path, path,
                        entry->name);
    }
    return fail(RSD_EFORMAT,
                "%s is not a checkpoint: found no .metadata, .safetensors or torch.save file",
                path);
}

/* ---- opening ---- */

static rsd_status open_directory_files(rsd_checkpoint *checkpoint,
                                       const struct store_listing *listing, rsd_format wanted)
{
    struct slice none = {0};
    struct format_guess guess = guess_format(listing, none, wanted);
    if (!guess.format)
        guess.format = guess_format_below(checkpoint->store, listing, wanted);
    if (!guess.format)
        return fail_without_sign(checkpoint->store, listing);
    checkpoint->format = guess.format;
    TRY(add_files(checkpoint->store, listing, none, guess));
    return guess.format->open(checkpoint->store, &checkpoint->catalog);
}

/* Opens the one file that the user named, which is file 0 of the store. */
static rsd_status open_one_file(rsd_checkpoint *checkpoint, const char *path,
                                const struct store_listing *listing, rsd_format wanted)
{
    struct store *store = checkpoint->store;
    char bytes[9];
    uint64_t nbytes;
    uint32_t file;
    const char *name = listing->entries[0].name;
    TRY(store_add_file(store, (struct slice){name, strlen(name)}, &file));
    rsd_status status = store_stat(store, file, &nbytes, NULL);
    struct slice start = {bytes, nbytes < sizeof bytes ? (size_t)nbytes : sizeof bytes};
    if (!status)
        status = store_read(store, file, 0, bytes, start.nbytes);
    if (status)
        return store_fail_in(store, file, status);
    struct format_guess guess = guess_format(listing, start, 0);
    if (!guess.format)
        return fail(RSD_EFORMAT,
                    "%s is not a checkpoint: neither safetensors nor a torch.save file", path);
    if (wanted && guess.format->id != wanted)
        return fail(RSD_EFORMAT, "%s has the format %s, not %s", path, guess.format->name,
                    rsd_format_name(wanted) ? rsd_format_name(wanted) : "a known one");
    checkpoint->format = guess.format;
    return guess.format->open(store, &checkpoint->catalog);
}

/* Opens a directory of DCP by the one file that says what is in it. */
static rsd_status open_metadata(rsd_checkpoint *checkpoint, const char *name)
{
    struct slice one = {name, strlen(name)};
    uint32_t file;
    if (store_check_name(one))
        return fail(RSD_EINVAL, "'%s' is not the name of a file in %s", name,
                    checkpoint->store->path);
    TRY(store_add_file(checkpoint->store, one, &file));
    checkpoint->format = &format_dcp;
    return checkpoint->format->open(checkpoint->store, &checkpoint->catalog);
}

rsd_status format_open(rsd_checkpoint *checkpoint, const char *path,
                       const struct store_listing *listing, bool one_file,
                       const rsd_open_options *options)
{
    rsd_status status = RSD_OK;
    if (one_file)
        status = open_one_file(checkpoint, path, listing, options->format);
    else if (options->metadata)
        status = open_metadata(checkpoint, options->metadata);
    else
        status = open_directory_files(checkpoint, listing, options->format);
    TRY(status);
    status = catalog_finish(&checkpoint->catalog);
    return status ? fail_in(status, "%s: ", path) : RSD_OK;
}

/* ---- where bytes are ---- */

rsd_status format_locate(const rsd_checkpoint *checkpoint, size_t index, size_t box,
                         struct stored_array *array)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    char text[BOX_TEXT_NCHARS];
    if (catalog->extents[tensor->first_extent + box].kind == EXTENT_NONE)
        return fail(RSD_EFORMAT, "no file is known to have the bytes of %s",
                    box_text(tensor->ndim, tensor_box_lo(catalog, tensor, box),
                             tensor_box_len(catalog, tensor, box), text));
    return checkpoint->format->locate(checkpoint, index, box, array);
}
