/* dtensor_read.c - opens the per-rank files of verl, SkyRL and other trainers that use FSDP.
 *
 *     model_world_size_N_rank_R.pt         the state dict of rank R
 *     optim_world_size_N_rank_R.pt         the state of its optimizer, with parameters by number
 *     extra_state_world_size_N_rank_R.pt   the learning rate, and the state of random numbers, which is not read
 *     fsdp_config.json                     the version of FSDP and N; older programs do not write it
 *
 * Names are those of the state dict, without the names of wrappers. Optimizer state is called
 * optimizer.state.PARAMETER.KEY; optimizer_names.c finds out which parameter has which number. Files are read
 * one after the other, and only their boxes are kept.
 */
#include "dtensor_read.h"

#include "json.h"

#include <stdio.h>
#include <string.h>

#define MODEL_FORM "model_world_size_#_rank_#.pt"
#define OPTIM_FORM "optim_world_size_#_rank_#.pt"
#define EXTRA_FORM "extra_state_world_size_#_rank_#.pt"

enum { MAX_CONFIG_NBYTES = 1 << 20, MOST_MISSING = 8 };

/* ---- the configuration ---- */

/* Reads the version of FSDP and the number of ranks. Other keys are ignored. */
static rsd_status parse_config(struct json *j, void *context)
{
    struct dtensor_reader *reader = context;
    struct slice key;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        uint64_t number;
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        bool version = slice_is(key, "FSDP_version"), world = slice_is(key, "world_size");
        if (!version && !world) {
            TRY(json_skip(j));
            continue;
        }
        TRY(json_u64(j, &number));
        if (number > INT32_MAX)
            return json_fail(j, "number exceeds 2^31");
        *(version ? &reader->fsdp_version : &reader->nranks) = (int64_t)number;
    }
}

/* Reads fsdp_config.json, if the directory has one. */
static rsd_status read_config(struct dtensor_reader *reader, const struct store_listing *listing)
{
    static const char name[] = "fsdp_config.json";
    uint32_t file;
    bool found = false;
    for (size_t i = 0; i < listing->n; i++)
        found = found || strcmp(listing->entries[i].name, name) == 0;
    if (!found)
        return RSD_OK;
    TRY(store_add_file(reader->store, slice_of(name), &file));
    return format_parse_json(reader->store, file, MAX_CONFIG_NBYTES, parse_config, reader);
}

/* Finds the number of ranks: that of the configuration, or the only one in the names of the files. */
static rsd_status find_nranks(struct dtensor_reader *reader, const struct store_listing *listing)
{
    int64_t numbers[2], only = 0;
    bool configured = reader->nranks > 0, found = false;
    for (size_t i = 0; i < listing->n; i++) {
        const struct store_entry *entry = &listing->entries[i];
        if (entry->directory || !name_has_form(entry->name, MODEL_FORM, numbers))
            continue;
        found = found || numbers[0] == reader->nranks;
        if (!configured && only && only != numbers[0])
            return fail(RSD_EFORMAT,
                        "%s: found files of %lld ranks and files of %lld ranks; keep those of one "
                        "checkpoint",
                        reader->store->path, (long long)only, (long long)numbers[0]);
        only = numbers[0];
    }
    if (configured && !found)
        return fail(RSD_EFORMAT, "%s: fsdp_config.json names %lld ranks, and the files %lld",
                    reader->store->path, (long long)reader->nranks, (long long)only);
    if (!configured)
        reader->nranks = only;
    return RSD_OK;
}

/* ---- names ---- */

/* Returns whether all keys of a state dict begin with "module.", as DistributedDataParallel leaves them. */
static bool has_module_prefix(const struct pickle_tree *tree, pickle_node root)
{
    struct pickle_walk walk = pickle_walk_dict(tree, root);
    pickle_node key, value;
    bool any = false;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        char name[64];
        struct slice text = pickle_text(tree, key);
        snprintf(name, sizeof name, "%.*s", slice_width(text, 63), text.bytes);
        torch_strip_wrappers(name);
        any = true;
        if (pickle_kind(tree, key) != NODE_STRING || strncmp(name, "module.", 7) != 0)
            return false;
    }
    return any;
}

/* ---- tensors of one rank ---- */

/* Adds the path of a tensor that is new; one whose name was changed has a path of one key. */
static rsd_status find_path(struct torch_visit *visit, const char *name, const char **path)
{
    if (strcmp(name, visit->name) == 0)
        return torch_visit_path(visit, path);
    struct text text = {0};
    char *json;
    text_add(&text, "[");
    json_add_string(&text, name, strlen(name));
    text_add(&text, "]");
    TRY(text_take(&text, &json));
    rsd_status status = catalog_copy_text(visit->catalog, json, path);
    rsd_free(json);
    return status;
}

/* Adds what this rank's file has of a tensor. The names of wrapping modules are removed. */
static rsd_status add_rank_tensor(struct torch_visit *visit, pickle_node c)
{
    struct dtensor_reader *reader = visit->context;
    struct rank_tensor tensor;
    struct slice full = torch_visit_name(visit);
    char name[TORCH_MAX_NAME_NBYTES];
    const char *path = NULL;
    size_t known;
    if (memchr(full.bytes, '\0', full.nbytes))
        return fail(RSD_EFORMAT, "name of a tensor or value is empty or contains NUL");
    memcpy(name, full.bytes, full.nbytes + 1);
    if (reader->in_model) {
        torch_strip_wrappers(name);
        if (reader->module_prefix && strncmp(name, "module.", 7) == 0)
            memmove(name, name + 7, strlen(name + 7) + 1);
    }
    struct slice short_name = slice_of(name);
    TRY(rank_tensor_read(visit->file, c, reader->rank, &reader->mesh, &tensor));
    rsd_status status = RSD_OK;
    if (!string_map_find(&reader->parts.names, short_name, &known))
        status = find_path(visit, name, &path);
    if (!status)
        status = rank_parts_add(&reader->parts, short_name, path, reader->rank, visit->file->index,
                                &tensor);
    if (!status && reader->in_model)
        status = optimizer_names_add(&reader->names, reader->parts.ntensors, &tensor);
    rank_tensor_drop(&tensor);
    return status;
}

/* Values are those of the lowest rank that has a file. */
static rsd_status add_rank_value(struct torch_visit *visit, pickle_node c)
{
    const struct dtensor_reader *reader = visit->context;
    if (!reader->first_file)
        return RSD_OK;
    return optimizer_has_names(reader, torch_visit_name(visit))
               ? optimizer_add_names(reader, visit, c)
               : torch_visit_add_value(visit, c);
}

/* ---- files ---- */

typedef rsd_status visit_file(struct torch_visit *visit);

static rsd_status visit_model(struct torch_visit *visit)
{
    struct dtensor_reader *reader = visit->context;
    struct torch_file *file = visit->file;
    if (reader->first_file)
        reader->module_prefix = has_module_prefix(&file->tree, file->root);
    return torch_visit_run(visit, file->root);
}

/* Visits the values of an extra_state file, but the states of random numbers. */
static rsd_status visit_extra(struct torch_visit *visit)
{
    const struct pickle_tree *tree = &visit->file->tree;
    struct pickle_walk walk = pickle_walk_dict(tree, visit->file->root);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        struct slice name = pickle_text(tree, key);
        if (slice_is(name, "rng") || pickle_kind(tree, key) != NODE_STRING)
            continue; /* each rank has its own */
        TRY(torch_visit_part(visit, name, value));
    }
    return RSD_OK;
}

/* Reads one file, and visits its tensors and values with `run`. */
static rsd_status read_rank_file(struct dtensor_reader *reader, uint32_t index, visit_file *run)
{
    struct torch_visit visit = {.catalog = reader->parts.catalog,
                                .on_tensor = add_rank_tensor,
                                .on_value = add_rank_value,
                                .context = reader};
    reader->mesh = (struct mesh_cache){0};
    return torch_visit_file(&visit, reader->store, index, run);
}

/* Reads the files of all ranks that have one. */
static rsd_status read_rank_files(struct dtensor_reader *reader, const struct rank_files *files,
                                  visit_file *run)
{
    reader->first_file = true;
    for (int64_t rank = 0; rank < files->nranks; rank++) {
        if (files->files[rank] == UINT32_MAX)
            continue;
        reader->rank = rank;
        TRY(read_rank_file(reader, files->files[rank], run));
        reader->first_file = false;
    }
    return RSD_OK;
}

/* ---- missing files ---- */

/* Lists the first ranks without a file. Returns how many ranks have none. */
static int64_t list_missing(const struct rank_files *files, char *text, size_t nbytes)
{
    int64_t n = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int64_t rank = 0; rank < files->nranks; rank++) {
        if (files->files[rank] != UINT32_MAX)
            continue;
        if (n < MOST_MISSING)
            used += (size_t)snprintf(text + used, nbytes - used, "%s%lld", n ? ", " : "",
                                     (long long)rank);
        else if (n == MOST_MISSING)
            snprintf(text + used, nbytes - used, ", ...");
        n++;
    }
    return n;
}

/* Adds which files are missing: "model_world_size_4_rank_2.pt is missing". */
static void add_missing(struct text *text, const struct rank_files *files, const char *kind)
{
    char ranks[MOST_MISSING * 24];
    int64_t n = list_missing(files, ranks, sizeof ranks);
    text_add(text, "%s_world_size_%lld_rank_%s.pt is missing", kind, (long long)files->nranks,
             n == 1 ? ranks : "R");
    if (n > 1)
        text_add(text, " for R = %s", ranks);
}

/* Ranks may lack a file if the mesh shows that they have copies only: others have all, and know of them. */
static rsd_status check_missing(struct dtensor_reader *reader, const struct rank_files *files,
                                const char *kind, size_t first, size_t end, size_t hole,
                                const char *box)
{
    char ranks[MOST_MISSING * 24], *message;
    int64_t missing = list_missing(files, ranks, sizeof ranks);
    bool sharded = false, everywhere = true, incomplete = hole >= first && hole < end;
    struct text text = {0};
    if (missing == files->nranks)
        return RSD_OK; /* no rank wrote this file */
    for (size_t i = first; i < end; i++) {
        sharded = sharded || reader->parts.tensors[i].sharded;
        everywhere = everywhere && reader->parts.tensors[i].nranks == files->nranks - missing;
    }
    if (!missing)
        return incomplete ? fail(RSD_EFORMAT, "%s: %s: no rank has %s", reader->store->path,
                                 reader->parts.tensors[hole].name.bytes, box)
                          : RSD_OK;
    add_missing(&text, files, kind);
    TRY(text_take(&text, &message));
    rsd_status status;
    if (incomplete || !sharded || (!everywhere && !reader->take_rank_0))
        status = fail(RSD_ENOENT, "%s: %s", reader->store->path, message);
    else
        status = catalog_add_note(reader->parts.catalog, "%s; other ranks have its tensors too",
                                  message);
    rsd_free(message);
    return status;
}

/* ---- the row ---- */

/* Reads the model, the optimizer and the extra state of all ranks, and checks that no part is missing. */
static rsd_status read_all_files(struct dtensor_reader *reader, struct rank_files files[3])
{
    size_t nmodel, hole;
    char box[BOX_TEXT_NCHARS];
    reader->in_model = true;
    TRY(read_rank_files(reader, &files[0], visit_model));
    reader->in_model = false;
    nmodel = reader->parts.ntensors;
    TRY(optimizer_names_finish(&reader->names, &reader->parts));
    TRY(read_rank_files(reader, &files[1], optimizer_visit_file));
    rsd_status status = rank_parts_finish(&reader->parts, &hole, box);
    if (status)
        return fail_in(status, "%s: ", reader->store->path);
    TRY(check_missing(reader, &files[0], "model", 0, nmodel, hole, box));
    if (!reader->optimizer_skipped)
        TRY(check_missing(reader, &files[1], "optim", nmodel, reader->parts.ntensors, hole, box));
    if (files[2].files[0] == UINT32_MAX)
        return RSD_OK;
    reader->first_file = true;
    return read_rank_file(reader, files[2].files[0], visit_extra);
}

static rsd_status read_directory(struct dtensor_reader *reader, const struct store_listing *listing)
{
    static const char *const forms[] = {MODEL_FORM, OPTIM_FORM, EXTRA_FORM};
    struct rank_files files[3] = {{0}};
    TRY(read_config(reader, listing));
    TRY(find_nranks(reader, listing));
    rsd_status status = RSD_OK;
    for (int i = 0; i < 3 && !status; i++)
        status = rank_files_add(&files[i], reader->store, listing, forms[i], reader->nranks);
    if (status)
        status = fail_in(status, "%s: ", reader->store->path);
    else
        status = read_all_files(reader, files);
    for (int i = 0; i < 3; i++)
        rank_files_drop(&files[i]);
    return status;
}

static rsd_status dtensor_open(struct store *store, struct catalog *catalog,
                               const rsd_open_options *options)
{
    struct dtensor_reader reader = {
        .store = store,
        .take_rank_0 = options->take_rank_0 != 0,
        .parts = {.catalog = catalog, .store = store, .take_rank_0 = options->take_rank_0 != 0}};
    struct store_listing listing;
    TRY(store_list(store, "", &listing));
    rsd_status status = read_directory(&reader, &listing);
    store_listing_drop(&listing);
    rank_parts_drop(&reader.parts);
    optimizer_names_drop(&reader.names);
    return status;
}

static int dtensor_probe(const struct store_listing *listing, const struct store_entry *entry,
                         struct slice start)
{
    int64_t numbers[2];
    (void)listing;
    bool file =
        !entry->directory && !start.bytes && name_has_form(entry->base, MODEL_FORM, numbers);
    return file ? SURE_OF_RANK_FILES : NOT_SURE;
}

static bool dtensor_owns(const char *name)
{
    int64_t numbers[2];
    return name_has_form(name, MODEL_FORM, numbers) || name_has_form(name, OPTIM_FORM, numbers) ||
           name_has_form(name, EXTRA_FORM, numbers);
}

const struct format format_dtensor = {.id = RSD_FORMAT_FSDP,
                                      .name = "fsdp",
                                      .probe = dtensor_probe,
                                      .open = dtensor_open,
                                      .locate = catalog_locate,
                                      .owns = dtensor_owns,
                                      .writer = &dtensor_writer};
