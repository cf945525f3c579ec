/* joined_read.c - opens the files of several ranks that do not say how their tensors are cut.
 *
 * The caller knows the mesh and the placements. File r has the parts of rank r, in the order of the numbers in
 * the names. Extents of a dim that is cut add up to that of the whole tensor, and every part must have the shape
 * that mesh and placements demand. Tensors that are not cut must be equal in all files. Values are those of the
 * first file.
 */
#include "rank_parts.h"

#include <string.h>

/* One file as a checkpoint of its own. */
struct part_file {
    rsd_checkpoint checkpoint;
    uint32_t file; /* in the store of the whole */
};

struct joined_reader {
    struct store *store;
    rsd_storage *storage;
    const rsd_mesh *mesh;
    struct part_file *files;
    size_t nfiles;
    struct rank_parts parts;
};

/* ---- the files ---- */

/* Opens one file by itself, as a checkpoint of its own. Only its catalog is needed later, so that hundreds of files
 * are not open at a time. */
static rsd_status open_part(struct joined_reader *reader, const char *path, const char *name)
{
    struct part_file *part = &reader->files[reader->nfiles++];
    struct store_listing listing = {0};
    const char *file;
    rsd_open_options options = {.struct_nbytes = sizeof options, .as_is = 1};
    TRY(store_add_file(reader->store, slice_of(name), &part->file));
    TRY(store_open(path, reader->storage, &part->checkpoint.store, &file));
    rsd_status status = store_listing_add(&listing, "", name, false);
    if (!status)
        status = format_open(&part->checkpoint, path, &listing, true, &options);
    store_listing_drop(&listing);
    store_close(part->checkpoint.store);
    part->checkpoint.store = NULL;
    return status;
}

/* Opens all files with one of the suffixes. */
static rsd_status open_parts(struct joined_reader *reader, const struct store_listing *listing)
{
    static const char *const suffixes[] = {".safetensors", ".pth", ".pt", ".bin", NULL};
    const char *const *suffix = suffixes;
    int64_t nranks = rsd_mesh_nranks(reader->mesh);
    size_t n = 0;
    for (; *suffix && n == 0; suffix++)
        for (size_t i = 0; i < listing->n; i++)
            n += !listing->entries[i].directory && has_suffix(listing->entries[i].name, *suffix);
    if (n == 0 || (int64_t)n != nranks)
        return fail(RSD_EINVAL, "%s: found %zu files of ranks; the mesh has %lld ranks",
                    reader->store->path, n, (long long)nranks);
    suffix--;
    reader->files = mem_new(n, sizeof *reader->files);
    if (!reader->files)
        return RSD_ENOMEM;
    for (size_t i = 0; i < listing->n; i++) {
        const struct store_entry *entry = &listing->entries[i];
        if (!entry->directory && has_suffix(entry->name, *suffix))
            TRY(open_part(reader, reader->store->path, entry->name));
    }
    return RSD_OK;
}

/* ---- tensors ---- */

static const struct stored_tensor *find_part(const struct joined_reader *reader, size_t file,
                                             const char *name)
{
    const struct catalog *catalog = &reader->files[file].checkpoint.catalog;
    size_t index = catalog_find_tensor(catalog, name);
    return index == SIZE_MAX ? NULL : &catalog->tensors[index];
}

/* Finds the shape of the whole: along a dim that is cut, the extents of all parts in a row add up. */
static rsd_status add_up_shape(const struct joined_reader *reader,
                               const struct stored_tensor *first, const rsd_placement *placements,
                               int64_t *shape)
{
    const rsd_mesh *mesh = reader->mesh;
    memset(shape, 0, sizeof(int64_t) * RSD_MAX_DIMS);
    for (size_t r = 0; r < reader->nfiles; r++) {
        const struct stored_tensor *part = find_part(reader, r, first->name);
        if (!part || part->ndim != first->ndim || part->dtype != first->dtype)
            return fail(RSD_EMISMATCH, "%s has no such tensor, or one of another dtype",
                        store_file_name(reader->store, reader->files[r].file));
        for (int32_t d = 0; d < first->ndim; d++) {
            bool in_row =
                true; /* the part is the first one along all axes that do not cut the dim */
            for (int32_t a = 0; a < mesh->naxes; a++) {
                bool cuts = placements[a].kind != RSD_REPLICATE && placements[a].dim == d;
                in_row = in_row && (cuts || mesh_coord(mesh, (int64_t)r, a) == 0);
            }
            const struct catalog *catalog = &reader->files[r].checkpoint.catalog;
            if (in_row && !add_i64(shape[d], tensor_shape(catalog, part)[d], &shape[d]))
                return fail(RSD_ELIMIT, "extents of the parts add up to 2^63 or more");
        }
    }
    return RSD_OK;
}

/* Adds the boxes of one rank. */
static rsd_status add_joined_part(struct joined_reader *reader, const struct stored_tensor *first,
                                  const rsd_layout *layout, size_t rank, bool cut)
{
    const struct part_file *file = &reader->files[rank];
    const struct catalog *catalog = &file->checkpoint.catalog;
    size_t index = catalog_find_tensor(catalog, first->name);
    const int64_t *local = tensor_shape(catalog, &catalog->tensors[index]);
    int64_t expected[RSD_MAX_DIMS];
    char a[SHAPE_TEXT_NCHARS], b[SHAPE_TEXT_NCHARS];
    struct rank_tensor tensor = {.dtype = first->dtype, .ndim = first->ndim, .sharded = cut};
    struct stored_array array;
    copy_i64s(tensor.shape, layout->shape, layout->ndim);
    layout_array_shape(layout, (int64_t)rank, expected);
    if (memcmp(local, expected, (size_t)layout->ndim * sizeof *local) != 0)
        return fail(RSD_EMISMATCH, "part of rank %zu has the shape %s; the placements demand %s",
                    rank, shape_text(layout->ndim, local, a),
                    shape_text(layout->ndim, expected, b));
    TRY(format_locate(&file->checkpoint, index, 0, &array));
    rsd_status status = rank_tensor_add_boxes(&tensor, layout, (int64_t)rank, &array);
    if (!status)
        status = rank_parts_add(&reader->parts, slice_of(first->name), first->path, (int64_t)rank,
                                file->file, &tensor);
    rank_tensor_drop(&tensor);
    return status;
}

/* Adds the tensor that the parts of all files make up under these placements. */
static rsd_status join_rank_tensor(struct joined_reader *reader, size_t index,
                                   const rsd_placement *placements)
{
    const struct stored_tensor *first = &reader->files[0].checkpoint.catalog.tensors[index];
    int64_t shape[RSD_MAX_DIMS];
    rsd_layout *layout;
    bool cut = false;
    for (int32_t a = 0; a < reader->mesh->naxes; a++) {
        cut = cut || placements[a].kind != RSD_REPLICATE;
        if (placements[a].kind != RSD_REPLICATE && placements[a].kind != RSD_SHARD)
            return fail(RSD_EUNSUPPORTED, "parts can be placed by S(dim) and R only");
    }
    TRY(add_up_shape(reader, first, placements, shape));
    TRY(rsd_layout_new(first->dtype, first->ndim, shape, reader->mesh, placements, &layout));
    rsd_status status = RSD_OK;
    for (size_t rank = 0; rank < reader->nfiles && !status; rank++)
        status = add_joined_part(reader, first, layout, rank, cut);
    rsd_layout_free(layout);
    return status;
}

/* Joins all tensors. `places` chooses the placements of each. EMISMATCH: a file has a tensor that file 0 lacks. */
static rsd_status join_rank_tensors(struct joined_reader *reader, joined_places *places,
                                    void *context)
{
    const struct catalog *first = &reader->files[0].checkpoint.catalog;
    rsd_placement placements[RSD_MAX_AXES];
    for (size_t r = 1; r < reader->nfiles; r++)
        for (size_t i = 0; i < reader->files[r].checkpoint.catalog.ntensors; i++) {
            const char *name = reader->files[r].checkpoint.catalog.tensors[i].name;
            if (catalog_find_tensor(first, name) == SIZE_MAX)
                return fail(RSD_EMISMATCH, "%s: %s has no such tensor", name,
                            store_file_name(reader->store, reader->files[0].file));
        }
    TRY(places(context, &reader->files[0].checkpoint, SIZE_MAX, placements));
    for (size_t i = 0; i < first->ntensors; i++) {
        rsd_status status = places(context, &reader->files[0].checkpoint, i, placements);
        if (!status)
            status = join_rank_tensor(reader, i, placements);
        if (status)
            return fail_in(status, "%.300s: ", first->tensors[i].name);
    }
    return RSD_OK;
}

/* ---- values ---- */

/* Adds a note if a file has a value that file 0 lacks or has with other content. */
static rsd_status note_different_value(struct joined_reader *reader, size_t file)
{
    const struct catalog *first = &reader->files[0].checkpoint.catalog;
    const struct catalog *other = &reader->files[file].checkpoint.catalog;
    for (size_t i = 0; i < other->nvalues; i++) {
        const struct stored_value *value = &other->values[i];
        size_t index = catalog_find_value(first, value->name);
        const char *json = index == SIZE_MAX ? NULL : first->values[index].json;
        if (index != SIZE_MAX && (!json || !value->json || strcmp(json, value->json) == 0))
            continue;
        return catalog_add_note(reader->parts.catalog,
                                "%s has another value %.300s than %s, whose values are read",
                                store_file_name(reader->store, reader->files[file].file),
                                value->name, store_file_name(reader->store, reader->files[0].file));
    }
    return RSD_OK;
}

/* Moves the values of file 0 to the catalog of the whole. */
static rsd_status move_values(struct joined_reader *reader)
{
    struct catalog *first = &reader->files[0].checkpoint.catalog, *whole = reader->parts.catalog;
    for (size_t r = 1; r < reader->nfiles; r++)
        TRY(note_different_value(reader, r));
    for (size_t i = 0; i < first->nvalues; i++) {
        struct stored_value *from = &first->values[i];
        TRY(catalog_add_value(whole, slice_of(from->name), from->extent, from->json));
        struct stored_value *value = &whole->values[whole->nvalues - 1];
        value->pickle = from->pickle;
        from->json = NULL;
        from->pickle = (struct bytes){0};
        TRY(catalog_copy_text(whole, from->path, &value->path));
        TRY(catalog_copy_text(whole, from->refused, &value->refused));
    }
    return RSD_OK;
}

/* ---- opening ---- */

static rsd_status read_joined(struct joined_reader *reader, const struct store_listing *listing,
                              joined_places *places, void *context)
{
    size_t hole;
    char box[BOX_TEXT_NCHARS];
    TRY(open_parts(reader, listing));
    rsd_status status = join_rank_tensors(reader, places, context);
    if (!status)
        status = rank_parts_finish(&reader->parts, &hole, box);
    if (!status)
        status = move_values(reader);
    return status ? fail_in(status, "%s: ", reader->store->path) : RSD_OK;
}

rsd_status format_open_joined(rsd_checkpoint *checkpoint, const struct store_listing *listing,
                              const rsd_open_options *options, const rsd_mesh *mesh,
                              joined_places *places, void *context)
{
    struct joined_reader reader = {.store = checkpoint->store,
                                   .storage = options->storage,
                                   .mesh = mesh,
                                   .parts = {.catalog = &checkpoint->catalog,
                                             .store = checkpoint->store,
                                             .take_rank_0 = options->take_rank_0 != 0}};
    rsd_status status = read_joined(&reader, listing, places, context);
    if (!status) {
        checkpoint->format = reader.files[0].checkpoint.format;
        status = catalog_finish(&checkpoint->catalog);
    }
    for (size_t i = 0; i < reader.nfiles; i++)
        catalog_drop(&reader.files[i].checkpoint.catalog);
    mem_free(reader.files);
    rank_parts_drop(&reader.parts);
    return status;
}
