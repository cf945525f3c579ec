/* convert_draft.c - what a conversion writes: the tensors that were chosen, under which names, cut how, and
 * in which files. Whatever cannot be done is found out here, before anything is written. */
#include "checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 1 << 26 };

/* ---- choosing ---- */

static rsd_status whole_layout(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                               rsd_layout **out)
{
    static const int64_t origin[RSD_MAX_DIMS];
    return catalog_boxes_layout(dtype, ndim, shape, 1, origin, shape, out);
}

/* The layout of the target's dtype: a choice says how to cut, not what. */
static rsd_status check_layout(const rsd_tensor_info *tensor, const rsd_tensor_target *choice)
{
    const rsd_layout *layout = choice->layout;
    char one[SHAPE_TEXT_NCHARS], other[SHAPE_TEXT_NCHARS];
    bool same = layout->ndim == tensor->ndim;
    for (int32_t d = 0; d < tensor->ndim && same; d++)
        same = layout->shape[d] == tensor->shape[d];
    if (!same)
        return fail(RSD_EMISMATCH, "its shape is %s, that of its layout %s",
                    shape_text(tensor->ndim, tensor->shape, one),
                    shape_text(layout->ndim, layout->shape, other));
    return RSD_OK;
}

static rsd_status add_choice(struct converting *c, struct string_map *known, size_t source,
                             const rsd_tensor_info *tensor, rsd_tensor_target *choice)
{
    struct chosen *chosen = &c->chosen[c->nchosen];
    struct slice name = {choice->name ? choice->name : "", 0};
    size_t other;
    name.nbytes = strlen(name.bytes);
    *chosen = (struct chosen){.source = source, .dtype = choice->dtype};
    if (!name.nbytes)
        return fail(RSD_EINVAL, "it is given no name");
    if (!cast_supported(choice->dtype, tensor->dtype))
        return fail(RSD_EUNSUPPORTED, "%s cannot become %s", rsd_dtype_name(tensor->dtype),
                    rsd_dtype_name(choice->dtype) ? rsd_dtype_name(choice->dtype) : "no dtype");
    if (string_map_find(known, name, &other))
        return fail(RSD_EINVAL, "two tensors would be called %s", name.bytes);
    if (choice->layout)
        TRY(check_layout(tensor, choice));
    TRY(catalog_add_name(&c->names, name, &chosen->name));
    TRY(string_map_add(known, (struct slice){chosen->name, name.nbytes}, c->nchosen));
    c->whole = c->whole && !choice->layout;
    if (!choice->layout)
        TRY(whole_layout(choice->dtype, tensor->ndim, tensor->shape, &choice->layout));
    chosen->layout = choice->layout;
    choice->layout = NULL;
    c->nchosen++;
    return RSD_OK;
}

static rsd_status choose_one(struct converting *c, struct string_map *known, size_t index)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    TRY(rsd_checkpoint_tensor(c->in, (int64_t)index, &tensor));
    rsd_tensor_target choice = {
        .struct_nbytes = sizeof choice, .keep = 1, .dtype = tensor.dtype, .name = tensor.name};
    rsd_status status =
        c->options.choose ? c->options.choose(c->options.choose_context, &tensor, &choice) : RSD_OK;
    if (!status && choice.keep) {
        status = add_choice(c, known, index, &tensor, &choice);
        if (status)
            status = fail_in(status, "%s: ", tensor.name);
    }
    c->nleft_out += !choice.keep;
    rsd_layout_free(choice.layout);
    return status;
}

static rsd_status choose_all(struct converting *c)
{
    struct string_map known = {0};
    rsd_status status = RSD_OK;
    c->whole = true;
    c->chosen = mem_new(c->in->catalog.ntensors, sizeof *c->chosen);
    if (!c->chosen)
        return RSD_ENOMEM;
    for (size_t i = 0; i < c->in->catalog.ntensors && !status; i++)
        status = choose_one(c, &known, i);
    string_map_drop(&known);
    return status;
}

/* ---- files ---- */

static uint64_t chosen_nbytes(const struct chosen *chosen)
{
    return (uint64_t)chosen->layout->volume * rsd_dtype_nbytes(chosen->dtype);
}

/* Whole tensors fill one file after the other, none beyond its limit but by a single tensor. */
static size_t fill_files(struct converting *c)
{
    uint64_t most =
        c->options.max_shard_nbytes > 0 ? (uint64_t)c->options.max_shard_nbytes : UINT64_MAX;
    uint64_t used = 0;
    size_t file = 0;
    for (size_t i = 0; i < c->nchosen; i++) {
        uint64_t nbytes = chosen_nbytes(&c->chosen[i]);
        if (used > 0 && (used > most || nbytes > most - used)) {
            file++;
            used = 0;
        }
        c->chosen[i].file = file;
        used += nbytes;
    }
    return file + 1;
}

/* As the safetensors library orders them: wide elements first, so that all are aligned; then by name. */
static int by_width(const void *a, const void *b)
{
    const struct chosen *x = a, *y = b;
    size_t width = rsd_dtype_nbytes(x->dtype), other = rsd_dtype_nbytes(y->dtype);
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    if (width != other)
        return width > other ? -1 : 1;
    return strcmp(x->name, y->name);
}

static rsd_status count_ranks(struct converting *c, int64_t *nranks)
{
    int64_t world = 1;
    for (size_t i = 0; i < c->nchosen; i++)
        world = max_i64(world, rsd_layout_world(c->chosen[i].layout));
    *nranks = c->options.nranks ? c->options.nranks : world;
    if (*nranks < world || *nranks > MOST_RANKS)
        return fail(RSD_EINVAL, "%lld ranks, and layouts name %lld", (long long)*nranks,
                    (long long)world);
    return RSD_OK;
}

/* ---- values ---- */

/* The item of a value: copied as it is, or made. False if it cannot be written. */
static rsd_status make_value(struct converting *c, const struct stored_value *value,
                             struct manifest_value *out, bool *carried)
{
    *carried = true;
    if (value->extent.kind == EXTENT_NONE) {
        *carried = value->pickle.n > 0;
        return *carried ? c->manifest.format->writer->make_value(&value->pickle, &out->item)
                        : RSD_OK;
    }
    TRY(catalog_check_transforms(&c->in->catalog, &value->extent));
    if (value->extent.nzstd && !c->manifest.compress)
        return c->in->format->read_item(c->in, value, &out->item);
    out->from = value;
    return RSD_OK;
}

static rsd_status add_values(struct converting *c, const struct dedup *dedup)
{
    const struct catalog *in = &c->in->catalog;
    struct catalog *catalog = &c->manifest.catalog;
    c->manifest.values = mem_new(in->nvalues, sizeof *c->manifest.values);
    if (!c->manifest.values)
        return RSD_ENOMEM;
    for (size_t i = 0; i < in->nvalues; i++) {
        const struct stored_value *value = &in->values[i];
        struct manifest_value *out = &c->manifest.values[catalog->nvalues];
        struct extent extent = {.kind = EXTENT_ITEM,
                                .file = (uint32_t)dedup->value_ranks[catalog->nvalues]};
        bool carried;
        rsd_status status = make_value(c, value, out, &carried);
        if (status)
            return fail_in(status, "%s: ", value->name);
        c->nleft_out += !carried;
        if (!carried)
            continue;
        rsd_status added = catalog_add_value(
            catalog, (struct slice){value->name, strlen(value->name)}, extent, NULL);
        if (added) {
            bytes_drop(&out->item);
            return added;
        }
        TRY(catalog_copy_text(catalog, value->path, &catalog->values[catalog->nvalues - 1].path));
    }
    return RSD_OK;
}

/* ---- the draft ---- */

static rsd_status add_tensor(struct converting *c, size_t i)
{
    const struct chosen *chosen = &c->chosen[i];
    const struct stored_tensor *source = &c->in->catalog.tensors[chosen->source];
    struct catalog *catalog = &c->manifest.catalog;
    TRY(catalog_add_tensor(catalog, (struct slice){chosen->name, strlen(chosen->name)},
                           chosen->dtype, chosen->layout->ndim, chosen->layout->shape));
    c->source_of[i] = chosen->source;
    bool renamed = strcmp(chosen->name, source->name) != 0;
    return catalog_copy_text(catalog, renamed ? NULL : source->path, &catalog->tensors[i].path);
}

static rsd_status add_whole_boxes(struct converting *c)
{
    static const int64_t origin[RSD_MAX_DIMS];
    for (size_t i = 0; i < c->nchosen; i++) {
        struct extent extent = {.kind = EXTENT_DENSE, .file = (uint32_t)c->chosen[i].file};
        TRY(add_tensor(c, i));
        TRY(catalog_add_box(&c->manifest.catalog, origin, c->chosen[i].layout->shape, extent));
    }
    return RSD_OK;
}

static rsd_status add_dealt_boxes(struct converting *c, int64_t nranks)
{
    struct dedup dedup = {0};
    size_t next = 0, nvalues = c->manifest.format->writer->make_value ? c->in->catalog.nvalues : 0;
    const char **names = mem_new(c->nchosen, sizeof(char *));
    const rsd_layout **layouts = mem_new(c->nchosen, sizeof(rsd_layout *));
    size_t *widths = mem_new(c->nchosen, sizeof *widths);
    rsd_status status = names && layouts && widths ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < c->nchosen && !status; i++) {
        names[i] = c->chosen[i].name;
        layouts[i] = c->chosen[i].layout;
        widths[i] = rsd_dtype_nbytes(c->chosen[i].dtype);
    }
    if (!status)
        status = dedup_assign(&dedup, c->nchosen, layouts, widths, names, nranks, nvalues,
                              c->options.every_replica ? DEDUP_KEEP_ALL : DEDUP_EVENLY);
    for (size_t i = 0; i < c->nchosen && !status; i++) {
        status = add_tensor(c, i);
        if (!status)
            status = dedup_add_boxes(&dedup, i, &next, &c->manifest);
    }
    if (!status && nvalues)
        status = add_values(c, &dedup);
    dedup_drop(&dedup);
    mem_free(names);
    mem_free(layouts);
    mem_free(widths);
    return status;
}

/* Is everything there that will be wanted? */
static rsd_status check_coverage(const struct converting *c)
{
    const struct catalog *catalog = &c->manifest.catalog;
    for (size_t i = 0; i < catalog->ntensors; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[i];
        const struct stored_tensor *source = &c->in->catalog.tensors[c->source_of[i]];
        static const int64_t origin[RSD_MAX_DIMS];
        rsd_plan *plan;
        rsd_status status =
            transfer_plan(&c->in->catalog, source, 1, origin, tensor_shape(catalog, tensor), &plan);
        if (status)
            return fail_in(status, "%s: ", source->name);
        rsd_plan_free(plan);
    }
    return RSD_OK;
}

/* ---- side files ---- */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

rsd_status convert_open_side_file(const char *path, rsd_storage *storage, struct store **store,
                                  uint32_t *file)
{
    const char *name;
    uint64_t nbytes;
    TRY(store_open(path, storage, store, &name));
    rsd_status status = RSD_OK;
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

static rsd_status check_side_file(const struct converting *c, int64_t index)
{
    const char *path = c->options.side_files[index], *name = base_name(path);
    struct store *store;
    uint32_t file;
    TRY(convert_open_side_file(path, c->options.storage, &store, &file));
    store_close(store);
    if (format_is_marker(name) || strcmp(name, JOURNAL_NAME) == 0)
        return fail(RSD_EINVAL, "%s: the checkpoint has a file of this name", path);
    for (size_t i = 0; i < c->manifest.nfiles; i++)
        if (strcmp(name, c->manifest.files[i].name) == 0)
            return fail(RSD_EINVAL, "%s: the checkpoint has a file of this name", path);
    for (int64_t i = 0; i < index; i++)
        if (strcmp(name, base_name(c->options.side_files[i])) == 0)
            return fail(RSD_EINVAL, "two side files are called %s", name);
    return RSD_OK;
}

static rsd_status check_side_files(const struct converting *c, bool one_file)
{
    if (one_file && c->options.nside_files > 0)
        return fail(RSD_EINVAL, "side files, and the path is that of one file");
    for (int64_t i = 0; i < c->options.nside_files; i++)
        TRY(check_side_file(c, i));
    return RSD_OK;
}

/* Which files of the source will be read. */
static rsd_status find_read_files(struct converting *c)
{
    const struct catalog *in = &c->in->catalog;
    c->read_files = mem_new(c->in->store->names.n, sizeof *c->read_files);
    if (!c->read_files)
        return RSD_ENOMEM;
    for (size_t i = 0; i < c->nchosen; i++) {
        const struct stored_tensor *tensor = &in->tensors[c->chosen[i].source];
        for (size_t box = 0; box < tensor->nboxes; box++) {
            const struct extent *extent = &in->extents[tensor->first_extent + box];
            if (extent->kind != EXTENT_NONE)
                c->read_files[extent->file] = true;
        }
    }
    for (size_t i = 0; i < in->nvalues && c->manifest.format->writer->make_value; i++)
        if (in->values[i].extent.kind != EXTENT_NONE)
            c->read_files[in->values[i].extent.file] = true;
    return RSD_OK;
}

/* They are there. */
static rsd_status check_sources(struct converting *c)
{
    TRY(find_read_files(c));
    for (uint32_t i = 0; i < c->in->store->names.n; i++) {
        uint64_t nbytes;
        rsd_status status = c->read_files[i] ? store_stat(c->in->store, i, &nbytes, NULL) : RSD_OK;
        if (status)
            return store_fail_in(c->in->store, i, status);
    }
    return RSD_OK;
}

static rsd_status check_options(struct converting *c, bool one_file)
{
    rsd_format format = c->options.format ? c->options.format : RSD_FORMAT_SAFETENSORS;
    TRY(manifest_start(&c->manifest, format, c->options.compress));
    c->manifest.aligned = !c->options.torch_places;
    return c->manifest.format->writer->check(&c->options, one_file);
}

rsd_status convert_prepare(struct converting *c, bool one_file)
{
    int64_t nranks = 1;
    TRY(check_options(c, one_file));
    TRY(choose_all(c));
    TRY(count_ranks(c, &nranks));
    const struct format_writer *writer = c->manifest.format->writer;
    c->whole = c->whole && writer->fills_files && !c->options.every_replica;
    c->manifest.files_of = c->whole                   ? FILES_OF_TENSORS
                           : c->options.every_replica ? FILES_OF_HOLDERS
                                                      : FILES_OF_RANKS;
    c->source_of = mem_new(c->nchosen, sizeof *c->source_of);
    if (!c->source_of)
        return RSD_ENOMEM;
    TRY(manifest_add_files(&c->manifest, c->whole ? fill_files(c) : (size_t)nranks));
    if (writer->wide_first && c->nchosen > 1)
        qsort(c->chosen, c->nchosen, sizeof *c->chosen, by_width);
    TRY(c->whole ? add_whole_boxes(c) : add_dealt_boxes(c, nranks));
    if (one_file && c->manifest.nfiles > 1)
        return fail(RSD_EINVAL, "%zu files are needed, and the path is that of one",
                    c->manifest.nfiles);
    if (!writer->make_value)
        c->nleft_out += (int64_t)c->in->catalog.nvalues;
    TRY(check_coverage(c));
    TRY(check_sources(c));
    TRY(check_side_files(c, one_file));
    TRY(manifest_check(&c->manifest));
    return manifest_place(&c->manifest);
}

static void drop_step(struct peer_step *step)
{
    payload_drop(&step->own);
    payload_drop(&step->result);
}

void convert_drop(struct converting *c)
{
    for (size_t i = 0; i < c->nchosen; i++)
        rsd_layout_free(c->chosen[i].layout);
    mem_free(c->chosen);
    catalog_drop(&c->names);
    manifest_drop(&c->manifest);
    mem_free(c->source_of);
    mem_free(c->read_files);
    mem_free(c->jobs);
    mem_free(c->parts);
    mem_free(c->first_job);
    mem_free(c->split);
    partial_crcs_close(&c->seen);
    drop_step(&c->open);
    drop_step(&c->transfer);
    drop_step(&c->finish);
}
