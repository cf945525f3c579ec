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

/* Takes the shape that a file states. It is that of the whole parameter. */
static rsd_status take_stated_shape(struct zero_reader *reader, struct torch_file *file,
                                    pickle_node tensor, struct zero_param *param)
{
    struct torch_view view;
    TRY(torch_view_read(&file->tree, tensor, &view));
    TRY(GROW(reader->trained.shapes, reader->trained.shapes_capacity,
             reader->trained.nshapes + (size_t)view.ndim + 1));
    param->ndim = view.ndim;
    param->shape = reader->trained.nshapes;
    param->numel = box_volume(view.ndim, view.shape);
    copy_i64s(reader->trained.shapes + reader->trained.nshapes, view.shape, view.ndim);
    reader->trained.nshapes += (size_t)view.ndim;
    return RSD_OK;
}

/* Adds the fp32 tensor of a parameter; *index is the number of the parameter. */
static rsd_status add_universal_master(struct zero_reader *reader, struct torch_file *file,
                                       uint32_t index, const char *name, size_t *number)
{
    bool shaped;
    pickle_node tensor = find_param_tensor(file, &shaped);
    struct slice text = {name, strlen(name)};
    if (!torch_view_is_tensor(&file->tree, tensor))
        return fail(RSD_EFORMAT, "file has no tensor 'param'");
    if (!string_map_find(&reader->trained.by_name, text, number)) {
        if (!shaped)
            return fail(RSD_EFORMAT, "tensor has no shape, and the model file lists none");
        TRY(add_unlisted_param(reader, file, tensor, name));
        *number = reader->trained.n - 1;
    } else if (shaped) {
        TRY(take_stated_shape(reader, file, tensor, &reader->trained.params[*number]));
    }
    struct zero_param *param = &reader->trained.params[*number];
    param->vector = (uint32_t)*number;
    TRY(flat_set_add_run(&reader->trained.set, 0, param->vector, 0, file, index, tensor));
    int64_t count = reader->trained.set.runs[reader->trained.set.nruns - 1].count;
    if (count != param->numel)
        return fail(RSD_EFORMAT, "tensor has %lld elements; param_shapes says %lld",
                    (long long)count, (long long)param->numel);
    return RSD_OK;
}

/* Adds one state of a parameter, which must have as many elements. */
static rsd_status add_universal_state(struct zero_reader *reader, struct torch_file *file,
                                      uint32_t index, const char *base, size_t number)
{
    bool shaped;
    pickle_node tensor = find_param_tensor(file, &shaped);
    struct slice key = {base, strlen(base) - strlen(".pt")};
    size_t before = reader->trained.set.nruns;
    TRY(flat_set_add_state(&reader->trained.set, key, (uint32_t)number, 0, file, index, tensor));
    if (reader->trained.set.nruns > before &&
        reader->trained.set.runs[before].count != reader->trained.params[number].numel)
        return fail(RSD_EFORMAT, "tensor has %lld elements; its parameter has %lld",
                    (long long)reader->trained.set.runs[before].count,
                    (long long)reader->trained.params[number].numel);
    return RSD_OK;
}

/* Opens a file of a parameter, and adds what is in it. base is fp32.pt, or another name for a state. */
static rsd_status add_universal_file(struct zero_reader *reader, const char *directory,
                                     const char *base, const char *name, size_t *number)
{
    struct torch_file file;
    uint32_t index;
    char path[MAX_PATH_NBYTES];
    int n = snprintf(path, sizeof path, "%s/%s", directory, base);
    if (n >= (int)sizeof path)
        return fail(RSD_ELIMIT, "%s/%.300s/%s: path exceeds %d bytes", reader->store->path,
                    directory, base, (int)sizeof path);
    TRY(store_add_file(reader->store, (struct slice){path, (size_t)n}, &index));
    rsd_status status = torch_file_open(&file, reader->store, index);
    if (!status) {
        status = name ? add_universal_master(reader, &file, index, name, number)
                      : add_universal_state(reader, &file, index, base, *number);
        torch_file_close(&file);
    }
    return status ? store_fail_in(reader->store, index, status) : RSD_OK;
}

/* Adds a parameter and its states, from the files in its directory. */
static rsd_status add_universal_param(struct zero_reader *reader, const struct store_entry *entry)
{
    struct store_listing listing;
    size_t number = 0;
    rsd_status status = store_list(reader->store, entry->name, &listing);
    if (status)
        return fail_in(status, "%s/%s: ", reader->store->path, entry->name);
    status = add_universal_file(reader, entry->name, "fp32.pt", entry->base, &number);
    for (size_t i = 0; i < listing.n && !status; i++) {
        const char *base = listing.entries[i].base;
        if (!listing.entries[i].directory && has_suffix(base, ".pt") &&
            strcmp(base, "fp32.pt") != 0)
            status = add_universal_file(reader, entry->name, base, NULL, &number);
    }
    store_listing_drop(&listing);
    return status;
}

/* Returns whether a directory has a copy of what the model file has as it is. */
static bool is_model_copy(const struct zero_reader *reader, const char *name)
{
    struct slice text = {name, strlen(name)};
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
    TRY(flat_set_find_state(&reader->trained.set, (struct slice){"", 0}, &master));
    snprintf(path, sizeof path, "%s%szero", directory, *directory ? "/" : "");
    rsd_status status = store_list(reader->store, path, &listing);
    if (status)
        return fail_in(status, "%s/%s: ", reader->store->path, path);
    for (size_t i = 0; i < listing.n && !status; i++)
        if (strcmp(listing.entries[i].base, "optimizer_state.pt") == 0)
            status = store_add_file(
                reader->store,
                (struct slice){listing.entries[i].name, strlen(listing.entries[i].name)},
                &reader->files.optimizer_state);
        else if (listing.entries[i].directory && !is_model_copy(reader, listing.entries[i].base))
            status = add_universal_param(reader, &listing.entries[i]);
    store_listing_drop(&listing);
    if (!status)
        status = flat_set_finish(&reader->trained.set);
    if (!status)
        status = check_directories(reader);
    return status;
}
