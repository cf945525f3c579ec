/* zero_universal.c - DeepSpeed's universal checkpoints, which have a directory for each parameter.
 *
 *     zero/NAME/fp32.pt, exp_avg.pt, ...   {param: tensor}, or the elements of the tensor without a shape
 *     zero/NAME/step.pt                    a number
 *     zero/optimizer_state.pt              what belongs to no parameter
 *
 * They are read as flat vectors of one rank, one for each parameter. Directories of buffers and frozen
 * parameters have copies in fp32; the model file has these as they are.
 */
#include "zero.h"

#include <stdio.h>
#include <string.h>

enum { MAX_PATH_NBYTES = 4096 };

/* Finds the tensor of a file, and whether its shape is that of the parameter. */
static pickle_node find_param_tensor(const struct torch_file *file, bool *shaped)
{
    pickle_node param = pickle_find(&file->tree, file->root, "param");
    *shaped = param != PICKLE_ABSENT;
    return *shaped ? param : file->root;
}

/* Adds a parameter that only its directory names. */
static rsd_status add_unlisted_param(struct zero_reader *reader, struct torch_file *file,
                                     pickle_node tensor, const char *name)
{
    struct torch_view view;
    struct slice owned = {NULL, strlen(name)};
    TRY(torch_view_read(&file->tree, tensor, &view));
    TRY(catalog_add_name(reader->catalog, (struct slice){name, owned.nbytes}, &owned.bytes));
    return zero_list_add(&reader->trained, owned, view.ndim, view.shape, reader->ngroups);
}

/* Takes the shape that a file states. It is that of the whole parameter: along one dim, param_shapes may have a part of
 * it, or rows of padding. */
static rsd_status take_stated_shape(struct zero_reader *reader, struct torch_file *file,
                                    pickle_node tensor, struct zero_param *param)
{
    const int64_t *listed = reader->trained.shapes + param->shape;
    char a[SHAPE_TEXT_NCHARS], b[SHAPE_TEXT_NCHARS];
    struct torch_view view;
    TRY(torch_view_read(&file->tree, tensor, &view));
    int32_t ndiffer = view.ndim == param->ndim ? 0 : 2;
    for (int32_t d = 0; d < view.ndim && ndiffer < 2; d++)
        ndiffer += view.shape[d] != listed[d];
    if (ndiffer > 1)
        return fail(RSD_EFORMAT, "tensor has the shape %s; param_shapes says %s",
                    shape_text(view.ndim, view.shape, a), shape_text(param->ndim, listed, b));
    TRY(GROW(reader->trained.shapes, reader->trained.shapes_capacity,
             reader->trained.nshapes + (size_t)view.ndim + 1));
    param->ndim = view.ndim;
    param->shape = reader->trained.nshapes;
    param->numel = box_volume(view.ndim, view.shape);
    copy_i64s(reader->trained.shapes + reader->trained.nshapes, view.shape, view.ndim);
    reader->trained.nshapes += (size_t)view.ndim;
    return RSD_OK;
}

/* The directory of a parameter, while its files are read. */
struct universal_param {
    struct zero_reader *reader;
    const char *name; /* of the parameter */
    size_t number;    /* in the list, once fp32.pt was read */
    const char *base; /* of the file that is read */
};

/* Adds the fp32 tensor of a parameter, and finds its number. */
static rsd_status add_universal_master(struct torch_visit *visit)
{
    struct universal_param *from = visit->context;
    struct zero_reader *reader = from->reader;
    struct torch_file *file = visit->file;
    bool shaped;
    pickle_node tensor = find_param_tensor(file, &shaped);
    if (!torch_view_is_tensor(&file->tree, tensor))
        return fail(RSD_EFORMAT, "file has no tensor 'param'");
    if (!string_map_find(&reader->trained.by_name, slice_of(from->name), &from->number)) {
        if (!shaped)
            return fail(RSD_EFORMAT, "tensor has no shape, and the model file lists none");
        TRY(add_unlisted_param(reader, file, tensor, from->name));
        from->number = reader->trained.n - 1;
    } else if (shaped) {
        TRY(take_stated_shape(reader, file, tensor, &reader->trained.params[from->number]));
    }
    struct zero_param *param = &reader->trained.params[from->number];
    param->vector = (uint32_t)from->number;
    TRY(flat_set_add_run(&reader->trained.set, 0, param->vector, 0, file, tensor));
    int64_t count = reader->trained.set.runs[reader->trained.set.nruns - 1].count;
    if (count != param->numel)
        return fail(RSD_EFORMAT, "tensor has %lld elements; param_shapes says %lld",
                    (long long)count, (long long)param->numel);
    return RSD_OK;
}

/* Adds one state of a parameter, which must have as many elements. */
static rsd_status add_universal_state(struct torch_visit *visit)
{
    const struct universal_param *from = visit->context;
    struct zero_list *list = &from->reader->trained;
    struct slice key = {from->base, strlen(from->base) - strlen(".pt")};
    size_t before = list->set.nruns;
    bool shaped;
    pickle_node tensor = find_param_tensor(visit->file, &shaped);
    TRY(flat_set_add_state(&list->set, key, (uint32_t)from->number, 0, visit->file, tensor));
    if (list->set.nruns > before &&
        list->set.runs[before].count != list->params[from->number].numel)
        return fail(RSD_EFORMAT, "tensor has %lld elements; its parameter has %lld",
                    (long long)list->set.runs[before].count,
                    (long long)list->params[from->number].numel);
    return RSD_OK;
}

/* Adds what a file of a parameter has: its fp32 tensor, or one of its states. */
static rsd_status add_universal_file(struct universal_param *from, const char *directory,
                                     const char *base)
{
    struct store *store = from->reader->store;
    struct torch_visit visit = {.context = from};
    uint32_t index;
    from->base = base;
    TRY(format_add_file(store, directory, slice_of(base), &index));
    return torch_visit_file(&visit, store, index,
                            strcmp(base, "fp32.pt") == 0 ? add_universal_master
                                                         : add_universal_state);
}

/* Adds a parameter and its states, from the files in its directory. */
static rsd_status add_universal_param(struct zero_reader *reader, const struct store_entry *entry)
{
    struct universal_param from = {.reader = reader, .name = entry->base};
    struct store_listing listing;
    rsd_status status = store_list(reader->store, entry->name, &listing);
    if (status)
        return fail_in(status, "%s/%s: ", reader->store->path, entry->name);
    status = add_universal_file(&from, entry->name, "fp32.pt");
    for (size_t i = 0; i < listing.n && !status; i++) {
        const char *base = listing.entries[i].base;
        if (!listing.entries[i].directory && has_suffix(base, ".pt") &&
            strcmp(base, "fp32.pt") != 0)
            status = add_universal_file(&from, entry->name, base);
    }
    store_listing_drop(&listing);
    return status;
}

/* Returns whether a directory has a copy of what the model file has as it is. */
static bool is_model_copy(const struct zero_reader *reader, const char *name)
{
    struct slice text = slice_of(name);
    size_t number;
    return !string_map_find(&reader->trained.by_name, text, &number) &&
           string_map_find(&reader->entries_by_name, text, &number);
}

/* Checks that every parameter has a directory with its elements. */
static rsd_status check_directories(const struct zero_reader *reader)
{
    for (size_t i = 0; i < reader->trained.n; i++) {
        size_t n;
        const struct slice name = reader->trained.params[i].name;
        flat_set_find_runs(&reader->trained.set, 0, (uint32_t)i, &n);
        if (n == 0)
            return fail(RSD_ENOENT, "%s/%s%szero/%.*s/fp32.pt is missing", reader->store->path,
                        reader->files.directory, *reader->files.directory ? "/" : "",
                        slice_width(name, 300), name.bytes);
    }
    return RSD_OK;
}

rsd_status zero_read_universal(struct zero_reader *reader)
{
    char path[MAX_PATH_NBYTES];
    const char *directory = reader->files.directory;
    struct store_listing listing;
    uint32_t master;
    reader->trained.set.nranks = 1;
    reader->trained.max_padding = 1;
    TRY(flat_set_find_state(&reader->trained.set, slice_of(""), &master));
    snprintf(path, sizeof path, "%s%szero", directory, *directory ? "/" : "");
    rsd_status status = store_list(reader->store, path, &listing);
    if (status)
        return fail_in(status, "%s/%s: ", reader->store->path, path);
    for (size_t i = 0; i < listing.n && !status; i++)
        if (strcmp(listing.entries[i].base, "optimizer_state.pt") == 0)
            status = store_add_file(reader->store, slice_of(listing.entries[i].name),
                                    &reader->files.optimizer_state);
        else if (listing.entries[i].directory && !is_model_copy(reader, listing.entries[i].base))
            status = add_universal_param(reader, &listing.entries[i]);
    store_listing_drop(&listing);
    if (!status)
        status = zero_fail_in(reader, flat_set_finish(&reader->trained.set));
    if (!status)
        status = check_directories(reader);
    return status;
}
