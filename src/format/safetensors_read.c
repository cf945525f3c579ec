/* safetensors_read.c - opens safetensors files: one, several with an index, or shards of the same tensors.
 *
 * PyTorch writes only the offsets of shards (DCP_SHARDING_INFO), so the shape of a tensor is as far as its
 * shards reach. This library writes the shape too (reshard), so that a missing last shard is noticed.
 */
#include "safetensors.h"

#include <stdlib.h>

/* ---- all files ---- */

static int by_ordinal_and_file(const void *a, const void *b)
{
    const struct header_tensor *x = a, *y = b;
    if (x->ordinal != y->ordinal)
        return x->ordinal < y->ordinal ? -1 : 1;
    return (x->file > y->file) - (x->file < y->file);
}

/* Finds the shape that shards state for the whole tensor; *shape is NULL if none does. */
static rsd_status find_stated_shape(const struct header_tensor *shards, size_t n,
                                    const int64_t **shape)
{
    *shape = NULL;
    for (size_t i = 0; i < n; i++) {
        if (!shards[i].whole_known)
            continue;
        for (int32_t d = 0; *shape && d < shards[i].ndim; d++)
            if (shards[i].whole[d] != (*shape)[d])
                return fail(RSD_EFORMAT, "files disagree on the shape");
        *shape = shards[i].whole;
    }
    return RSD_OK;
}

/* Finds the shape of a tensor: as its shards state it, or as far as they reach. */
static rsd_status find_whole_shape(const struct header_tensor *shards, size_t n, int64_t *shape)
{
    const int64_t *stated;
    for (size_t i = 0; i < n; i++) {
        if (shards[i].dtype != shards[0].dtype || shards[i].ndim != shards[0].ndim)
            return fail(RSD_EFORMAT, "files disagree on the dtype or the number of dims");
        if (n > 1 && !shards[i].placed)
            return fail(RSD_EFORMAT,
                        "several files have this tensor, without the offsets of their parts");
    }
    TRY(find_stated_shape(shards, n, &stated));
    for (int32_t d = 0; d < shards[0].ndim; d++) {
        int64_t end, reach = 0;
        for (size_t i = 0; i < n; i++) {
            if (shards[i].npieces && !stated)
                return fail(RSD_EFORMAT, "tensor is in pieces, and no file states its shape");
            if (shards[i].npieces)
                continue;
            if (!add_i64(shards[i].lo[d], shards[i].shape[d], &end) || end > MAX_EXTENT)
                return fail(RSD_EFORMAT, "shard reaches beyond 2^62");
            reach = max_i64(reach, end);
        }
        if (stated && reach > stated[d])
            return fail(RSD_EFORMAT, "shard reaches beyond the tensor");
        shape[d] = stated ? stated[d] : reach;
    }
    return RSD_OK;
}

/* Adds each piece as a view of the array. */
static rsd_status add_shard_pieces(struct header_set *set, const struct header_tensor *shard)
{
    size_t ndim = (size_t)shard->ndim;
    for (size_t i = 0; i < shard->npieces; i++) {
        const int64_t *lo = set->pieces + shard->first_piece + 3 * ndim * i;
        const int64_t *len = lo + ndim, *at = len + ndim;
        struct stored_array array;
        stored_array_set_dense(&array, shard->dtype, shard->ndim, shard->shape, shard->begin);
        for (int32_t d = 0; d < shard->ndim; d++)
            array.base += at[d] * array.strides[d];
        TRY(catalog_add_array(set->catalog, lo, len, shard->file, &array));
    }
    return RSD_OK;
}

/* Adds a tensor with all of its shards to the catalog. */
static rsd_status add_tensor_shards(struct header_set *set, const struct header_tensor *shards,
                                    size_t n)
{
    int64_t shape[RSD_MAX_DIMS] = {0};
    TRY(find_whole_shape(shards, n, shape));
    TRY(catalog_add_tensor(set->catalog, slice_of(shards[0].name), shards[0].dtype, shards[0].ndim,
                           shape));
    for (size_t i = 0; i < n; i++) {
        struct extent extent = {.kind = EXTENT_DENSE,
                                .file = shards[i].file,
                                .offset = shards[i].begin,
                                .nbytes = shards[i].end - shards[i].begin};
        if (shards[i].npieces)
            TRY(add_shard_pieces(set, &shards[i]));
        else
            TRY(catalog_add_box(set->catalog, shards[i].lo, shards[i].shape, extent));
    }
    return RSD_OK;
}

/* Adds each tensor with the shards that all files have of it. */
static rsd_status add_all_shards(struct header_set *set)
{
    if (set->n > 1)
        qsort(set->list, set->n, sizeof *set->list, by_ordinal_and_file);
    for (size_t i = 0, n; i < set->n; i += n) {
        const struct header_tensor *shards = &set->list[i];
        for (n = 1; i + n < set->n && shards[n].ordinal == shards[0].ordinal; n++)
            continue;
        rsd_status status = add_tensor_shards(set, shards, n);
        if (status)
            return store_fail_in(set->store, shards[n - 1].file,
                                 fail_in(status, "%.300s: ", shards[0].name));
    }
    return RSD_OK;
}

/* ---- the row ---- */

static bool is_safetensors_index(const char *name)
{
    return has_suffix(name, ".safetensors.index.json");
}

static int safetensors_probe(const struct store_listing *listing, const struct store_entry *entry,
                             struct slice start)
{
    (void)listing;
    bool named = has_suffix(entry->base, ".safetensors");
    if (entry->directory)
        return NOT_SURE;
    if (is_safetensors_index(entry->base))
        return SURE_OF_SAFETENSORS_INDEX;
    if (!start.bytes)
        return named ? SURE_OF_SAFETENSORS : NOT_SURE;
    if (start.nbytes > 8 && start.bytes[8] == '{' && memcmp(start.bytes, "PK\3\4", 4) != 0)
        return SURE_OF_BYTES;
    return named ? SURE_OF_SUFFIX : NOT_SURE;
}

/* Reads the headers of the files of the store, or of those that its index names. */
static rsd_status safetensors_open(struct store *store, struct catalog *catalog,
                                   const rsd_open_options *options)
{
    (void)options;
    struct header_set set = {.catalog = catalog, .store = store};
    rsd_status status = RSD_OK;
    uint32_t first = 0;
    if (is_safetensors_index(store_file_name(store, 0))) {
        if (store->names.n > 1)
            return fail(RSD_EFORMAT, "%s: found %zu index files; name one of them", store->path,
                        store->names.n);
        TRY(index_add_files(store, 0));
        first = 1;
    }
    for (uint32_t file = first; file < store->names.n && !status; file++)
        status = header_set_add_file(&set, file);
    if (!status)
        status = add_all_shards(&set);
    header_set_drop(&set);
    return status;
}

const struct format format_safetensors = {.id = RSD_FORMAT_SAFETENSORS,
                                          .name = "safetensors",
                                          .probe = safetensors_probe,
                                          .open = safetensors_open,
                                          .locate = catalog_locate,
                                          .writer = &safetensors_writer};
