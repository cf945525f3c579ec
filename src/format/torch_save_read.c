/* torch_save_read.c - opens torch.save files: one, or those that an index names. */
#include "dtensor.h"
#include "rows.h"

#include <string.h>

/* ---- files of one rank ---- */

/* Forms of the names of files that have one rank's part, if there are others of the form. */
static const char *const rank_forms[] = {"model_world_size_#_rank_#.pt",
                                         "optim_world_size_#_rank_#.pt",
                                         "extra_state_world_size_#_rank_#.pt",
                                         "consolidated.#.pth",
                                         "mp_rank_#_model_states.pt",
                                         "layer_#-model_#-model_states.pt",
                                         "*zero_pp_rank_#_mp_rank_#_optim_states.pt",
                                         "*zero_pp_rank_#_mp_rank_#_model_states.pt",
                                         "*rank_#.pt",
                                         "*rank_#.pth",
                                         "*rank_#.bin",
                                         "*rank#.pt",
                                         "*rank-#.pt",
                                         "*.rank#.pth",
                                         NULL};

/* Returns whether two names differ in their numbers only. */
static bool differ_in_numbers(const char *a, const char *b)
{
    if (strcmp(a, b) == 0)
        return false;
    while (*a || *b) {
        bool digits = *a >= '0' && *a <= '9';
        if (digits != (*b >= '0' && *b <= '9') || (!digits && *a != *b))
            return false;
        a += digits ? strspn(a, "0123456789") : 1;
        b += digits ? strspn(b, "0123456789") : 1;
    }
    return true;
}

/* Returns the form of a name, if another file of the listing has the form too; NULL: none does. */
static const char *find_rank_form(const struct store_listing *listing, const char *name,
                                  const char **other)
{
    for (const char *const *form = rank_forms; *form; form++) {
        int64_t numbers[4] = {0};
        if (!name_has_form(name, *form, numbers))
            continue;
        for (size_t i = 0; i < listing->n; i++) {
            const struct store_entry *entry = &listing->entries[i];
            *other = entry->base;
            if (!entry->directory && differ_in_numbers(entry->base, name))
                return *form;
        }
    }
    return NULL;
}

/* Refuses a file that is named alone and has one rank's part of something. */
static rsd_status check_alone(struct store *store)
{
    const char *name = store_file_name(store, 0), *other;
    struct store_listing listing;
    int64_t numbers[2];
    TRY(store_list(store, "", &listing));
    rsd_status status = RSD_OK;
    if (find_rank_form(&listing, name, &other))
        status = fail(RSD_EUNSUPPORTED,
                      "%s/%s has one rank's part, as %s beside it; open %s, or set as_is (--as-is) "
                      "to read the part alone",
                      store->path, name, other, store->path);
    else if (name_has_form(name, rank_forms[0], numbers) && numbers[0] > 1)
        status = fail(RSD_EUNSUPPORTED,
                      "%s/%s has the part of rank %lld of %lld, and the others are missing; set "
                      "as_is (--as-is) to read the part alone",
                      store->path, name, (long long)numbers[1], (long long)numbers[0]);
    store_listing_drop(&listing);
    return status;
}

/* Refuses what Megatron wrote for one of several ranks of a model. */
static rsd_status check_model_parallel(const struct torch_file *file)
{
    static const char *const sizes[] = {"tensor_model_parallel_size",
                                        "pipeline_model_parallel_size", NULL};
    const struct pickle_tree *tree = &file->tree;
    pickle_node args = pickle_find(tree, file->root, "args");
    for (const char *const *size = sizes; *size; size++) {
        int64_t n;
        if (pickle_as_i64(tree, pickle_attribute(tree, args, *size), &n) && n > 1)
            return fail(RSD_EUNSUPPORTED,
                        "file has one rank's part: %s is %lld; open the directory above, or set "
                        "as_is (--as-is) to read the part alone",
                        *size, (long long)n);
    }
    return RSD_OK;
}

/* ---- files ---- */

/* Adds a tensor. A distributed one must be whole in this file, unless the part was asked for. */
static rsd_status add_file_tensor(struct torch_visit *visit, pickle_node c)
{
    const rsd_open_options *options = visit->context;
    const struct pickle_tree *tree = &visit->file->tree;
    char part[SHAPE_TEXT_NCHARS], whole[SHAPE_TEXT_NCHARS];
    int64_t shape[RSD_MAX_DIMS];
    int32_t ndim;
    struct torch_view view;
    if (!torch_is_sharded(tree, c))
        return torch_visit_add_tensor(visit, c);
    rsd_status status = dtensor_find_local(tree, c, &c, &ndim, shape);
    if (!status)
        status = torch_view_read(tree, c, &view);
    if (status == RSD_EUNSUPPORTED)
        return torch_visit_add_refused(visit);
    TRY(status);
    if (!options->as_is &&
        (view.ndim != ndim || memcmp(view.shape, shape, (size_t)ndim * sizeof *shape) != 0))
        return fail(RSD_EUNSUPPORTED,
                    "file has one rank's part, %s of %s; open all ranks' files together, or set "
                    "as_is (--as-is) to read the part alone",
                    shape_text(view.ndim, view.shape, part), shape_text(ndim, shape, whole));
    return torch_visit_add_tensor(visit, c);
}

/* Adds all tensors and values of a file. */
static rsd_status add_torch_file(struct torch_visit *visit)
{
    const rsd_open_options *options = visit->context;
    if (!options->as_is)
        TRY(check_model_parallel(visit->file));
    return torch_visit_run(visit, visit->file->root);
}

/* ---- the row ---- */

static bool is_torch_index(const char *name)
{
    return has_suffix(name, ".bin.index.json");
}

/* An archive or pickle may be a file of safetensors, which has a brace at byte 8. */
static int torch_save_probe(const struct store_listing *listing, const struct store_entry *entry,
                            struct slice start)
{
    (void)listing;
    const char *name = entry->base, *bytes = start.bytes;
    bool named = has_suffix(name, ".pt") || has_suffix(name, ".pth") || has_suffix(name, ".bin");
    if (entry->directory)
        return NOT_SURE;
    if (is_torch_index(name))
        return SURE_OF_TORCH_INDEX;
    if (!bytes)
        return named ? SURE_OF_TORCH_FILE : NOT_SURE;
    bool archive = start.nbytes >= 4 && memcmp(bytes, "PK\3\4", 4) == 0;
    bool safetensors = start.nbytes > 8 && bytes[8] == '{';
    bool pickle = start.nbytes >= 2 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5;
    if (archive || (pickle && !safetensors))
        return SURE_OF_BYTES;
    return named ? SURE_OF_SUFFIX : NOT_SURE;
}

/* Says what to do about a directory with several files. One rank's part must not look like the whole. */
static rsd_status fail_several(struct store *store, size_t n)
{
    struct store_listing listing;
    const char *name = store_file_name(store, 0), *other;
    TRY(store_list(store, "", &listing));
    const char *form = find_rank_form(&listing, name, &other);
    rsd_status status =
        form ? fail(RSD_EUNSUPPORTED,
                    "%s: found %zu torch.save files with one rank's part each, as %s and %s; no "
                    "file says how they are put together. Set from (--from-mesh) to say it, or "
                    "name one "
                    "file and set as_is (--as-is) to read that part alone",
                    store->path, n, name, other)
             : fail(RSD_EFORMAT, "%s: found %zu torch.save files and no index; name one of them",
                    store->path, n);
    store_listing_drop(&listing);
    return status;
}

/* Reads the one file of the store, or those that its index names. */
static rsd_status torch_save_open(struct store *store, struct catalog *catalog,
                                  const rsd_open_options *options)
{
    size_t n = store->names.n;
    bool index = is_torch_index(store_file_name(store, 0));
    if (n > 1 && index)
        return fail(RSD_EFORMAT, "%s: found %zu index files; name one of them", store->path, n);
    if (n > 1)
        return fail_several(store, n);
    if (index)
        TRY(index_add_files(store, 0));
    else if (!options->as_is)
        TRY(check_alone(store));
    for (uint32_t file = index ? 1 : 0; file < store->names.n; file++) {
        struct torch_visit visit = {
            .catalog = catalog, .on_tensor = add_file_tensor, .context = without_const(options)};
        TRY(torch_visit_file(&visit, store, file, add_torch_file));
    }
    return RSD_OK;
}

const struct format format_torch_save = {.id = RSD_FORMAT_TORCH_SAVE,
                                         .name = "torch.save",
                                         .probe = torch_save_probe,
                                         .open = torch_save_open,
                                         .locate = catalog_locate,
                                         .writer = &torch_save_writer};
