/* convert_manifest.c - what a conversion writes: which tensors, under which names, in which boxes and files. All that
 * can be refused is refused here, before anything is written. */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

/* ---- targets ---- */

struct target_list {
    struct target *list;
    size_t n;
    struct string_map known; /* names that are taken */
    struct catalog names;    /* only for its names */
    bool whole;              /* no layout was given for any tensor */
};

/* Adds a target, and takes its layout over. */
static rsd_status add_target(struct target_list *targets, const rsd_tensor_info *tensor,
                             size_t source, rsd_tensor_target *given)
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct target target = {.source = source, .dtype = given->dtype};
    struct slice name = {given->name ? given->name : "", 0};
    size_t other;
    name.nbytes = strlen(name.bytes);
    if (!name.nbytes)
        return fail(RSD_EINVAL, "the new name is empty");
    if (!dtype_casts(tensor->dtype, given->dtype))
        return fail(RSD_EUNSUPPORTED, "%s cannot be converted to %s", rsd_dtype_name(tensor->dtype),
                    rsd_dtype_name(given->dtype) ? rsd_dtype_name(given->dtype)
                                                 : "an invalid dtype");
    if (string_map_find(&targets->known, name, &other))
        return fail(RSD_EINVAL, "two tensors would be called %s", name.bytes);
    TRY(catalog_add_name(&targets->names, name, &target.name));
    TRY(string_map_add(&targets->known, (struct slice){target.name, name.nbytes}, targets->n));
    if (given->layout)
        TRY(layout_check_shape(given->layout, tensor->ndim, tensor->shape));
    targets->whole = targets->whole && !given->layout;
    if (!given->layout)
        TRY(catalog_boxes_layout(given->dtype, tensor->ndim, tensor->shape, 1, origin,
                                 tensor->shape, &given->layout));
    bool renamed = strcmp(target.name, tensor->name) != 0;
    target.path = renamed ? NULL : tensor->path;
    target.layout = given->layout;
    given->layout = NULL;
    targets->list[targets->n++] = target;
    return RSD_OK;
}

/* Adds the target of one tensor of the input, as the map function of the caller chooses it. */
static rsd_status map_tensor(struct conversion_run *c, struct target_list *targets, size_t index)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    TRY(rsd_checkpoint_tensor(c->in, (int64_t)index, &tensor));
    rsd_tensor_target target = {
        .struct_nbytes = sizeof target, .keep = 1, .dtype = tensor.dtype, .name = tensor.name};
    rsd_status status = RSD_OK;
    if (c->options.map)
        status = c->options.map(c->options.map_context, &tensor, &target);
    if (!status && target.keep) {
        status = add_target(targets, &tensor, index, &target);
        if (status)
            status = fail_in(status, "%s: ", tensor.name);
    }
    c->nleft_out += !target.keep;
    rsd_layout_free(target.layout);
    return status;
}

/* Fails if a tensor is wanted that cannot be read. Its name alone is known. */
static rsd_status check_refused(struct conversion_run *c, const struct stored_value *value)
{
    const rsd_tensor_info tensor = {
        .struct_nbytes = sizeof tensor, .name = value->name, .path = value->path};
    rsd_tensor_target target = {.struct_nbytes = sizeof target, .keep = 1, .name = value->name};
    rsd_status status =
        c->options.map ? c->options.map(c->options.map_context, &tensor, &target) : RSD_OK;
    rsd_layout_free(target.layout);
    return status || target.keep
               ? fail(RSD_EUNSUPPORTED, "%s: %s; leave it out to convert the others", value->name,
                      value->refused)
               : RSD_OK;
}

static void drop_targets(struct target_list *targets)
{
    for (size_t i = 0; i < targets->n; i++)
        rsd_layout_free(without_const(targets->list[i].layout));
    mem_free(targets->list);
    string_map_drop(&targets->known);
    catalog_drop(&targets->names);
}

/* Lists the tensors that the map function keeps. EUNSUPPORTED: it keeps one that cannot be read. */
static rsd_status list_targets(struct conversion_run *c, struct target_list *targets)
{
    size_t n = c->in->catalog.ntensors;
    targets->whole = true;
    targets->list = mem_new(n, sizeof *targets->list);
    if (!targets->list)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++)
        TRY(map_tensor(c, targets, i));
    for (size_t i = 0; i < c->in->catalog.nvalues; i++)
        if (c->in->catalog.values[i].refused)
            TRY(check_refused(c, &c->in->catalog.values[i]));
    return RSD_OK;
}

/* ---- files of whole tensors ---- */

/* Whole tensors fill one file after the other. Only a file of a single tensor may exceed the limit. Returns the
 * number of files. */
static size_t fill_files(struct target_list *targets, int64_t max_shard_nbytes)
{
    uint64_t most = max_shard_nbytes > 0 ? (uint64_t)max_shard_nbytes : UINT64_MAX, used = 0;
    size_t file = 0;
    for (size_t i = 0; i < targets->n; i++) {
        struct target *target = &targets->list[i];
        uint64_t nbytes = (uint64_t)target->layout->volume * rsd_dtype_nbytes(target->dtype);
        if (used > 0 && (used > most || nbytes > most - used)) {
            file++;
            used = 0;
        }
        target->file = file;
        used += nbytes;
    }
    return file + 1;
}

/* The order of the safetensors library: wide elements first, so that all are aligned; then by name. */
static int by_width_and_name(const void *a, const void *b)
{
    const struct target *x = a, *y = b;
    size_t width = rsd_dtype_nbytes(x->dtype), other = rsd_dtype_nbytes(y->dtype);
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    if (width != other)
        return width > other ? -1 : 1;
    return strcmp(x->name, y->name);
}

static rsd_status add_whole_tensors(struct manifest *manifest, const struct target_list *targets)
{
    static const int64_t origin[RSD_MAX_DIMS];
    for (size_t i = 0; i < targets->n; i++) {
        const struct target *target = &targets->list[i];
        struct extent extent = {.kind = EXTENT_DENSE, .file = (uint32_t)target->file};
        TRY(target_add_tensor(target, manifest));
        TRY(catalog_add_box(&manifest->catalog, origin, target->layout->shape, extent));
    }
    return RSD_OK;
}

/* ---- values ---- */

/* Makes the plain pickle of a JSON value. */
static rsd_status pickle_json_value(const char *json, struct bytes *out)
{
    struct bytes bytes = {0};
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    bool plain;
    rsd_status status = pickle_write_json(json, &bytes);
    if (!status) {
        status = pickle_read_memory(bytes.data, bytes.n, &tree, &root, &used);
        if (!status)
            status = pickle_to_plain_pickle(&tree, root, out, &plain);
        pickle_tree_drop(&tree);
    }
    bytes_drop(&bytes);
    return status;
}

/* Makes the item of a value for a format that holds plain pickles only. */
static rsd_status make_plain_value(struct conversion_run *c, const struct stored_value *value,
                                   struct manifest_value *out, bool *writable)
{
    const struct format_writer *writer = c->manifest.format->writer;
    struct bytes pickle = {0};
    char *json = NULL;
    *writable = writer->holds_value(&c->manifest, value->name);
    if (!*writable)
        return RSD_OK;
    if (value->extent.kind == EXTENT_NONE) {
        *writable = value->pickle.n > 0;
        return *writable ? writer->make_value(&value->pickle, &out->item) : RSD_OK;
    }
    rsd_status status = value_read_json(c->in, value, &json);
    *writable = json != NULL;
    if (!status && json)
        status = pickle_json_value(json, &pickle);
    if (!status && json)
        status = writer->make_value(&pickle, &out->item);
    bytes_drop(&pickle);
    rsd_free(json);
    return status;
}

/* Makes the item of a value, or sets where to copy it from. *writable is false for an object that is not plain. */
static rsd_status make_value(struct conversion_run *c, const struct stored_value *value,
                             struct manifest_value *out, bool *writable)
{
    if (c->manifest.format->writer->holds_value)
        return make_plain_value(c, value, out, writable);
    *writable = true;
    if (value->extent.kind == EXTENT_NONE) {
        *writable = value->pickle.n > 0;
        return *writable ? c->manifest.format->writer->make_value(&value->pickle, &out->item)
                         : RSD_OK;
    }
    TRY(catalog_check_transforms(&c->in->catalog, &value->extent));
    if (value->extent.nzstd && !c->manifest.compress)
        return value_read_item(c->in, value, &out->item);
    out->from = value;
    return RSD_OK;
}

/* Adds the values of the input to the manifest. Objects that the format cannot hold are left out. */
static rsd_status copy_values(struct conversion_run *c, const int32_t *ranks)
{
    const struct catalog *in = &c->in->catalog;
    struct catalog *catalog = &c->manifest.catalog;
    c->manifest.values = mem_new(in->nvalues, sizeof *c->manifest.values);
    if (!c->manifest.values)
        return RSD_ENOMEM;
    for (size_t i = 0; i < in->nvalues; i++) {
        const struct stored_value *value = &in->values[i];
        size_t next = catalog->nvalues;
        struct manifest_value *out = &c->manifest.values[next];
        struct extent extent = {.kind = EXTENT_ITEM, .file = (uint32_t)ranks[next]};
        bool writable;
        if (value->beside)
            continue;
        rsd_status status = make_value(c, value, out, &writable);
        if (status) {
            bytes_drop(&out->item); /* it does not belong to a value yet */
            return value->extent.kind == EXTENT_NONE
                       ? fail_in(status, "%s: ", value->name)
                       : checkpoint_fail_in(c->in, value->extent.file, value->name, status);
        }
        c->nleft_out += !writable;
        if (!writable)
            continue;
        status = catalog_add_value(catalog, (struct slice){value->name, strlen(value->name)},
                                   extent, NULL);
        if (status) {
            bytes_drop(&out->item);
            return status;
        }
        TRY(catalog_copy_text(catalog, value->path, &catalog->values[next].path));
    }
    return RSD_OK;
}

/* ---- the manifest ---- */

/* Adds all tensors and values, with the rank that writes each of them. */
static rsd_status add_tensors_and_values(struct conversion_run *c,
                                         const struct target_list *targets, int64_t nranks)
{
    struct dedup_input input = {
        .targets = targets->list,
        .ntargets = targets->n,
        .nvalues = c->manifest.format->writer->make_value ? c->in->catalog.nvalues : 0,
        .nranks = nranks,
        .mode = c->options.every_replica ? DEDUP_KEEP_ALL : DEDUP_EVENLY};
    int32_t *value_ranks;
    TRY(dedup_add_tensors(&c->manifest, &input, &value_ranks));
    rsd_status status = input.nvalues ? copy_values(c, value_ranks) : RSD_OK;
    mem_free(value_ranks);
    return status;
}

/* Keeps the layouts of all targets, which the format states. */
static rsd_status keep_layouts(struct manifest *manifest, const struct target_list *targets)
{
    manifest->layouts = mem_new(targets->n, sizeof(rsd_layout *));
    if (!manifest->layouts)
        return RSD_ENOMEM;
    for (size_t i = 0; i < manifest->catalog.ntensors; i++)
        manifest->layouts[i] = rsd_layout_share(targets->list[i].layout);
    return RSD_OK;
}

/* Adds the targets to the manifest: how many files there are, and what is in which file. */
static rsd_status add_targets(struct conversion_run *c, struct target_list *targets)
{
    const struct format_writer *writer = c->manifest.format->writer;
    bool whole = targets->whole && writer->fills_files && !c->options.every_replica;
    int64_t nranks = c->options.nranks;
    TRY(dedup_count_ranks(targets->n, targets->list, &nranks));
    c->manifest.files_of = whole                      ? FILES_OF_TENSORS
                           : c->options.every_replica ? FILES_OF_HOLDERS
                                                      : FILES_OF_RANKS;
    c->source_of = mem_new(targets->n, sizeof *c->source_of);
    if (!c->source_of)
        return RSD_ENOMEM;
    int64_t max_shard_nbytes = c->options.adapter ? 0 : c->options.max_shard_nbytes;
    size_t nfiles = whole ? fill_files(targets, max_shard_nbytes) : (size_t)nranks;
    TRY(manifest_add_files(&c->manifest, nfiles));
    if (writer->wide_first && targets->n > 1)
        qsort(targets->list, targets->n, sizeof *targets->list, by_width_and_name);
    for (size_t i = 0; i < targets->n; i++)
        c->source_of[i] = targets->list[i].source;
    c->manifest.nranks = nranks;
    TRY(whole ? add_whole_tensors(&c->manifest, targets)
              : add_tensors_and_values(c, targets, nranks));
    if (writer->every_rank)
        TRY(keep_layouts(&c->manifest, targets));
    if (c->one_file && nfiles > 1)
        return fail(RSD_EINVAL, "output needs %zu files, but %s names one file; pass a directory",
                    nfiles, c->out);
    if (!writer->make_value)
        c->nleft_out += (int64_t)c->in->catalog.nvalues;
    return RSD_OK;
}

/* ---- side files ---- */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

rsd_status convert_open_side_file(const struct conversion_run *c, const char *path,
                                  struct store **store, uint32_t *file)
{
    const char *name;
    uint64_t nbytes;
    TRY(store_open(path, c->operation.io.storage, store, &name));
    rsd_status status = RSD_OK;
    (*store)->links_checked = true; /* side files are found in a directory, not named by the user */
    (*store)->follow_links = c->in->store->follow_links;
    if (!name)
        status = fail(RSD_EIO, "%s is not a regular file", path);
    else
        status = store_add_file(*store, (struct slice){name, strlen(name)}, file);
    if (!status) {
        status = store_stat(*store, *file, &nbytes, NULL);
        if (status)
            store_fail_in(*store, *file, status);
    }
    if (status)
        store_close(*store);
    return status;
}

/* Checks that a side file exists, and that its name is not taken. */
static rsd_status check_side_file(const struct conversion_run *c, int64_t index)
{
    const char *path = c->options.side_files[index], *name = base_name(path);
    struct store *store;
    uint32_t file;
    TRY(convert_open_side_file(c, path, &store, &file));
    store_close(store);
    if (format_is_marker(name) || strcmp(name, JOURNAL_NAME) == 0)
        return fail(RSD_EINVAL, "side file %s: the checkpoint has a file of this name", path);
    for (size_t i = 0; i < c->manifest.nfiles; i++)
        if (strcmp(name, c->manifest.files[i].name) == 0)
            return fail(RSD_EINVAL, "side file %s: the checkpoint has a file of this name", path);
    for (int64_t i = 0; i < index; i++)
        if (strcmp(name, base_name(c->options.side_files[i])) == 0)
            return fail(RSD_EINVAL, "two side files are called %s", name);
    return RSD_OK;
}

static rsd_status check_side_files(const struct conversion_run *c)
{
    if (c->one_file && c->options.nside_files > 0)
        return fail(RSD_EINVAL, "side files need a directory, but %s names one file", c->out);
    for (int64_t i = 0; i < c->options.nside_files; i++)
        TRY(check_side_file(c, i));
    return RSD_OK;
}

/* ---- the input ---- */

rsd_status convert_find_read_files(const struct conversion_run *c, bool **read_files)
{
    const struct catalog *in = &c->in->catalog;
    bool *files = mem_new(c->in->store->names.n, sizeof *files);
    if (!files)
        return RSD_ENOMEM;
    for (size_t i = 0; i < c->manifest.catalog.ntensors; i++) {
        const struct stored_tensor *tensor = &in->tensors[c->source_of[i]];
        for (size_t box = 0; box < tensor->nboxes; box++) {
            const struct extent *extent = &in->extents[tensor->first_extent + box];
            if (extent->kind != EXTENT_NONE)
                files[extent->file] = true;
        }
    }
    for (size_t i = 0; i < in->nvalues && c->manifest.format->writer->make_value; i++)
        if (in->values[i].extent.kind != EXTENT_NONE)
            files[in->values[i].extent.file] = true;
    *read_files = files;
    return RSD_OK;
}

/* Checks that every element exists, and that every file that is read exists and is long enough. */
static rsd_status check_input(const struct conversion_run *c)
{
    bool *read_files = NULL;
    uint64_t *ends;
    for (size_t i = 0; i < c->manifest.catalog.ntensors; i++)
        TRY(tensor_check_coverage(&c->in->catalog, c->source_of[i]));
    TRY(format_find_ends(c->in, &ends));
    rsd_status status = convert_find_read_files(c, &read_files);
    for (uint32_t i = 0; !status && i < c->in->store->names.n; i++)
        status = read_files[i] ? format_check_file(c->in, i, ends[i]) : RSD_OK;
    mem_free(read_files);
    mem_free(ends);
    return status;
}

rsd_status convert_prepare(struct conversion_run *c)
{
    struct target_list targets = {0};
    TRY(format_check_claims(c->in));
    TRY(manifest_start(&c->manifest, c->options.format, c->options.compress));
    c->manifest.aligned = !c->options.torch_places;
    c->manifest.adapter = c->options.adapter != 0;
    TRY(c->manifest.format->writer->check(&c->options));
    TRY(format_check_output_name(c->manifest.format, c->out));
    if (c->manifest.format->writer->every_rank)
        c->options.every_replica = 1;
    rsd_status status = list_targets(c, &targets);
    if (!status)
        status = add_targets(c, &targets);
    drop_targets(&targets);
    TRY(status);
    TRY(check_input(c));
    TRY(check_side_files(c));
    TRY(manifest_check(&c->manifest));
    return manifest_place(&c->manifest);
}
