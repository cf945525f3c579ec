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

#include <stdatomic.h>
#include <string.h>

static const struct format *const formats[] = {
    &format_dcp,  &format_safetensors, &format_torch_save, &format_dtensor,
    &format_zero, &format_megatron,    &format_orbax,      NULL};

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

bool format_names_file(rsd_format id, const char *path)
{
    const struct format *format = format_find(id);
    const char *const *suffix = format && format->writer ? format->writer->file_suffixes : NULL;
    for (; suffix && *suffix; suffix++)
        if (has_suffix(path, *suffix))
            return true;
    return false;
}

rsd_status format_check_output_name(const struct format *format, const char *path)
{
    for (size_t i = 0; formats[i]; i++)
        if (formats[i] != format && format_names_file(formats[i]->id, path))
            return fail(RSD_EINVAL,
                        "%s is named like a %s file, but the output is %s; choose another name or "
                        "format",
                        path, formats[i]->name, format->name);
    return RSD_OK;
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
        if (!entry->directory && guess.sureness > 0 &&
            guess.format->probe(listing, entry, start) == guess.sureness)
            TRY(store_add_file(store, slice_of(entry->name), &file));
    }
    return RSD_OK;
}

/* Says which directory below this one is a checkpoint, if one is. */
static rsd_status fail_without_sign(struct store *store, const struct store_listing *listing)
{
    const char *path = store->path;
    TRY(format_fail_without_metadata(store, listing));
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
    return fail(
        RSD_EFORMAT,
        "%s is not a checkpoint: found no file of DCP, safetensors, torch.save, FSDP, DeepSpeed, "
        "Megatron or Orbax",
        path);
}

/* ---- opening ---- */

/* Finds the format of a directory by its files, and opens it. */
static rsd_status open_directory_files(rsd_checkpoint *checkpoint,
                                       const struct store_listing *listing,
                                       const rsd_open_options *options)
{
    struct slice none = {0};
    struct format_guess guess = guess_format(listing, none, options->format);
    if (!guess.format)
        guess.format = guess_format_below(checkpoint->store, listing, options->format);
    if (!guess.format)
        return fail_without_sign(checkpoint->store, listing);
    checkpoint->format = guess.format;
    TRY(add_files(checkpoint->store, listing, none, guess));
    return guess.format->open(checkpoint->store, &checkpoint->catalog, options);
}

/* Opens the one file that the user named, which is file 0 of the store. */
static rsd_status open_one_file(rsd_checkpoint *checkpoint, const char *path,
                                const struct store_listing *listing,
                                const rsd_open_options *options)
{
    rsd_format wanted = options->format;
    struct store *store = checkpoint->store;
    char bytes[9];
    uint64_t nbytes;
    uint32_t file;
    const char *name = listing->entries[0].name;
    TRY(store_add_file(store, slice_of(name), &file));
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
    return guess.format->open(store, &checkpoint->catalog, options);
}

/* Opens a directory of DCP by the one file that says what is in it. */
static rsd_status open_metadata(rsd_checkpoint *checkpoint, const rsd_open_options *options)
{
    const char *name = options->metadata;
    struct slice one = slice_of(name);
    uint32_t file;
    if (store_check_name(one))
        return fail(RSD_EINVAL, "'%s' is not the name of a file in %s", name,
                    checkpoint->store->path);
    TRY(store_add_file(checkpoint->store, one, &file));
    checkpoint->format = &format_dcp;
    return checkpoint->format->open(checkpoint->store, &checkpoint->catalog, options);
}

rsd_status format_open(rsd_checkpoint *checkpoint, const char *path,
                       const struct store_listing *listing, bool one_file,
                       const rsd_open_options *options)
{
    rsd_status status = RSD_OK;
    if (one_file)
        status = open_one_file(checkpoint, path, listing, options);
    else if (options->metadata)
        status = open_metadata(checkpoint, options);
    else
        status = open_directory_files(checkpoint, listing, options);
    TRY(format_explain_failure(checkpoint->store, status));
    status = catalog_finish(&checkpoint->catalog);
    return status ? fail_in(status, "%s: ", path) : RSD_OK;
}

rsd_status format_derive_tensors(rsd_checkpoint *checkpoint, const rsd_open_options *options)
{
    bool megatron = checkpoint->catalog.megatron;
    if (options->nfrom_rules && !options->from && checkpoint->format->id != RSD_FORMAT_MEGATRON)
        return fail(RSD_EINVAL,
                    "from_rules (--from) applies to per-rank files of Megatron, or with "
                    "a mesh (--from-mesh)");
    if (megatron && (options->unstack || options->vocab_size || options->names))
        return megatron_change_tensors(checkpoint, options);
    if (options->unstack)
        return fail(RSD_EINVAL, "unstack (--unstack) applies to checkpoints of Megatron only");
    if (options->vocab_size && !options->names)
        return fail(RSD_EINVAL, "vocab_size (--vocab-size) applies to checkpoints of Megatron, or "
                                "with names (--names)");
    return RSD_OK;
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
    return checkpoint->derivation ? derive_locate(checkpoint, index, box, array)
                                  : checkpoint->format->locate(checkpoint, index, box, array);
}

rsd_status format_open_stream(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                              struct stored_stream **stream)
{
    return checkpoint->derivation
               ? derive_open_stream(checkpoint, tensor, box, stream)
               : checkpoint->format->open_stream(checkpoint, tensor, box, stream);
}

/* ---- what is claimed ---- */

/* What boxes and items claim to be, for all bytes that are in the files: so many bytes, and so many times
 * their sizes. Only compression makes much of little. */
enum { MAX_COPIES = 64, MAX_COMPRESSION = 1024, MAX_ITEM_COPIES = 4 };
enum { MAX_REGIONS = 256 }; /* of derived tensors, in a compressed item */
enum {
    LAYER_NBYTES = 1 << 16
}; /* to open a layer of compression takes as long as to decode so many */
#define START_CLAIM      ((uint64_t)64 << 20)
#define START_COMPRESSED ((uint64_t)1 << 30)
#define START_ITEMS      ((uint64_t)16 << 20)
#define START_VALUES     ((uint64_t)1 << 20)
#define START_STREAMS    ((uint64_t)1 << 20)

struct claims {
    uint64_t boxes, compressed, items; /* bytes, added up without overflow */
    uint64_t tensors;                  /* of whole tensors */
    uint64_t streams;                  /* of items that are compressed */
    uint64_t nlayers;                  /* of compression, of all items */
    bool derived;                      /* boxes are regions of items */
    uint64_t stored;                   /* sizes of the files */
};

static uint64_t add_claim(uint64_t sum, uint64_t nbytes)
{
    return sum + nbytes < sum ? UINT64_MAX : sum + nbytes;
}

/* Adds an item. One that several boxes in a row refer to is parsed once or cheaply, and counts once, unless it is
 * compressed: it is decoded from its start for each of them. */
static void add_item_claim(struct claims *claims, const struct extent *extent,
                           const struct extent **last)
{
    const struct extent *before = last[extent->file];
    bool again = before && before->offset == extent->offset && before->nbytes == extent->nbytes;
    if (extent->kind == EXTENT_ITEM && extent->nzstd) {
        claims->streams = add_claim(claims->streams, extent->nbytes);
        claims->nlayers += extent->nzstd;
    } else if (extent->kind == EXTENT_ITEM && !again) {
        claims->items = add_claim(claims->items, extent->nbytes);
    }
    last[extent->file] = extent;
}

/* Returns how many bytes are read for a box. A compressed item or chunk is decoded as a whole, also where little of it
 * lies in the tensor. */
static uint64_t read_nbytes(const rsd_checkpoint *checkpoint, size_t index, size_t box)
{
    const struct stored_tensor *tensor = &checkpoint->catalog.tensors[index];
    const struct extent *extent = &checkpoint->catalog.extents[tensor->first_extent + box];
    if (!extent->nzstd)
        return box_nbytes(&checkpoint->catalog, tensor, box);
    const struct catalog *catalog = derive_find_stored(checkpoint, &index, &box);
    uint64_t n = box_nbytes(catalog, &catalog->tensors[index], box);
    bool chunk = extent->kind == EXTENT_ARRAY && extent->detail < catalog->narrays;
    return chunk && catalog->arrays[extent->detail].nbytes > n
               ? catalog->arrays[extent->detail].nbytes
               : n;
}

/* Adds up the bytes that all tensors and boxes claim to have. */
static void sum_claims(const rsd_checkpoint *checkpoint, const struct extent **last,
                       struct claims *claims)
{
    const struct catalog *catalog = &checkpoint->catalog;
    bool dense = checkpoint->format->id == RSD_FORMAT_DCP ||
                 checkpoint->format->id == RSD_FORMAT_SAFETENSORS ||
                 checkpoint->format->id == RSD_FORMAT_TORCH_SAVE;
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        claims->tensors = add_claim(claims->tensors, (uint64_t)tensor_nbytes(catalog, tensor));
        for (size_t box = 0; box < tensor->nboxes; box++) {
            const struct extent *extent = &catalog->extents[tensor->first_extent + box];
            if (extent->kind == EXTENT_NONE)
                continue;
            uint64_t *sum = dense && !extent->nzstd ? &claims->boxes : &claims->compressed;
            *sum = add_claim(*sum, read_nbytes(checkpoint, t, box));
            add_item_claim(claims, extent, last);
        }
    }
}

/* Returns how many bytes the files must have for a claim. */
static uint64_t claim_needs(uint64_t claim, uint64_t start, uint64_t factor)
{
    return claim <= start ? 0 : (claim - start - 1) / factor + 1;
}

/* Checks that the files have enough bytes. Adds their sizes only until they do, so that few files of a plausible
 * checkpoint are touched. *enough is false if they have fewer. On failure a file that cannot be found may have the
 * rest. If none can be found, that is reported where they are read. */
static rsd_status check_stored_nbytes(const rsd_checkpoint *checkpoint, uint64_t needed,
                                      uint64_t *stored, bool *enough)
{
    struct store *store = checkpoint->store;
    uint32_t nfiles = (uint32_t)store->names.n, nmissing = 0, missing = 0;
    uint64_t nbytes;
    *stored = 0;
    for (uint32_t file = 0; file < nfiles && *stored < needed; file++) {
        rsd_status status = store_stat_own(store, file, &nbytes);
        if (status == RSD_ENOMEM)
            return status;
        missing = status ? file : missing;
        nmissing += status != RSD_OK;
        *stored = add_claim(*stored, status ? 0 : nbytes);
    }
    *enough = *stored >= needed || nmissing == nfiles;
    rsd_status status = *enough || !nmissing ? RSD_OK : store_stat(store, missing, &nbytes, NULL);
    return status ? store_fail_in(store, missing, status) : RSD_OK;
}

/* Puts the path of the checkpoint in front of the last error. */
static rsd_status fail_in_checkpoint(const rsd_checkpoint *checkpoint, rsd_status status)
{
    const struct store *store = checkpoint->store;
    return store->names.n == 1 ? store_fail_in(store, 0, status)
                               : fail_in(status, "%s: ", store->path);
}

/* Returns how many bytes the files must have for all tensors and items. */
static uint64_t count_needed(const struct claims *claims)
{
    uint64_t boxes = claim_needs(claims->boxes, START_CLAIM, MAX_COPIES);
    uint64_t decoded = add_claim(claims->compressed, claims->nlayers * LAYER_NBYTES);
    uint64_t compressed = claim_needs(decoded, START_COMPRESSED, MAX_COMPRESSION);
    uint64_t items = claim_needs(claims->items, START_ITEMS, MAX_ITEM_COPIES);
    uint64_t streams = claim_needs(claims->streams, START_STREAMS,
                                   claims->derived ? MAX_REGIONS : MAX_ITEM_COPIES);
    uint64_t most = boxes > compressed ? boxes : compressed;
    most = most > items ? most : items;
    return most > streams ? most : streams;
}

rsd_status format_check_claims(rsd_checkpoint *checkpoint)
{
    struct claims claims = {.derived = checkpoint->derivation != NULL};
    bool enough;
    if (atomic_load(&checkpoint->claims_plausible))
        return RSD_OK;
    const struct extent **last = mem_new(checkpoint->store->names.n, sizeof(struct extent *));
    if (!last)
        return RSD_ENOMEM;
    sum_claims(checkpoint, last, &claims);
    mem_free(last);
    if (claims.tensors > (uint64_t)1 << 62)
        return fail_in_checkpoint(checkpoint,
                                  fail(RSD_EFORMAT, "tensors claim more than 2^62 bytes"));
    TRY(check_stored_nbytes(checkpoint, count_needed(&claims), &claims.stored, &enough));
    if (!enough)
        return fail_in_checkpoint(
            checkpoint,
            fail(
                RSD_EFORMAT,
                "tensors claim %llu bytes, in items of %llu bytes with %llu layers of compression, "
                "and the files have %llu; not read",
                (unsigned long long)add_claim(claims.boxes, claims.compressed),
                (unsigned long long)add_claim(claims.items, claims.streams),
                (unsigned long long)claims.nlayers, (unsigned long long)claims.stored));
    atomic_store(&checkpoint->claims_plausible, true);
    return RSD_OK;
}

rsd_status format_check_loaded(rsd_checkpoint *checkpoint, const struct stored_tensor *tensor,
                               uint64_t nbytes)
{
    const struct extent *extents = &checkpoint->catalog.extents[tensor->first_extent];
    if (atomic_load(&checkpoint->claims_plausible))
        return RSD_OK;
    nbytes = add_claim(nbytes, LAYER_NBYTES);
    for (size_t box = 0; box < tensor->nboxes; box++)
        nbytes = add_claim(nbytes, extents[box].nzstd ? extents[box].nbytes : 0);
    if (nbytes > START_CLAIM)
        return format_check_claims(checkpoint);
    uint64_t before = atomic_fetch_add(&checkpoint->nbytes_loaded, nbytes);
    return before + nbytes <= START_CLAIM ? RSD_OK : format_check_claims(checkpoint);
}

rsd_status format_check_values(rsd_checkpoint *checkpoint)
{
    const struct catalog *catalog = &checkpoint->catalog;
    uint64_t items = 0, stored;
    bool enough;
    if (atomic_load(&checkpoint->values_plausible))
        return RSD_OK;
    for (size_t i = 0; i < catalog->nvalues; i++)
        if (catalog->values[i].extent.kind != EXTENT_NONE)
            items = add_claim(items, catalog->values[i].extent.nbytes);
    uint64_t needed = claim_needs(items, START_VALUES, 1); /* each value has its own item */
    TRY(check_stored_nbytes(checkpoint, needed, &stored, &enough));
    if (!enough)
        return fail(RSD_EFORMAT, "items of values claim %llu bytes, and the files have %llu",
                    (unsigned long long)items, (unsigned long long)stored);
    atomic_store(&checkpoint->values_plausible, true);
    return RSD_OK;
}
