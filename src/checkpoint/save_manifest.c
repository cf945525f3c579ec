/* save_manifest.c - what a save writes: the tensors of the caller, each box assigned to one rank, with its offset in a
 * file and the memory that it comes from. */
#include "checkpoint.h"

#include <string.h>

/* ---- tensors ---- */

/* The tensors of a save: each name once, in order. */
struct saved_tensors {
    rsd_tensor *given;
    size_t *of_given; /* the target of each struct of the caller */
    struct target *targets;
    size_t ngiven, n;
};

/* Finds or adds the target of a tensor of the caller. EMISMATCH: it was passed before with another layout. */
static rsd_status add_saved_tensor(struct saved_tensors *tensors, struct string_map *known,
                                   const rsd_tensor *tensor, size_t *number)
{
    struct slice name = {tensor->name, strlen(tensor->name)};
    const rsd_layout *layout = tensor->layout;
    if (string_map_find(known, name, number)) {
        const struct target *target = &tensors->targets[*number];
        if (rsd_layout_equal(target->layout, layout) && target->dtype == layout->dtype)
            return RSD_OK;
        return fail(RSD_EMISMATCH, "%s has two different layouts", tensor->name);
    }
    *number = tensors->n++;
    tensors->targets[*number] = (struct target){
        .name = tensor->name, .path = tensor->path, .dtype = layout->dtype, .layout = layout};
    return string_map_add(known, name, *number);
}

/* Lists the tensors of the caller, and the target of each. */
static rsd_status list_saved_tensors(struct saved_tensors *tensors, int64_t given_n,
                                     const rsd_tensor *given)
{
    struct string_map known = {0};
    if (given_n < 0)
        return fail(RSD_EINVAL, "invalid number of tensors %lld", (long long)given_n);
    size_t n = tensors->ngiven = (size_t)given_n;
    tensors->given = mem_new(n, sizeof *tensors->given);
    tensors->of_given = mem_new(n, sizeof *tensors->of_given);
    tensors->targets = mem_new(n, sizeof *tensors->targets);
    if (!tensors->given || !tensors->of_given || !tensors->targets)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < n && !status; i++) {
        status = arrays_take_tensor(given, (int64_t)i, &tensors->given[i]);
        if (!status)
            status = add_saved_tensor(tensors, &known, &tensors->given[i], &tensors->of_given[i]);
    }
    string_map_drop(&known);
    return status;
}

static void drop_saved_tensors(struct saved_tensors *tensors)
{
    mem_free(tensors->given);
    mem_free(tensors->of_given);
    mem_free(tensors->targets);
}

/* ---- the manifest ---- */

/* Adds a value to the file of a rank. */
static rsd_status add_value(struct manifest *manifest, const rsd_value *value, int32_t rank)
{
    struct catalog *catalog = &manifest->catalog;
    size_t i = catalog->nvalues;
    struct extent extent = {.file = (uint32_t)rank, .kind = EXTENT_ITEM};
    struct bytes pickle = {0};
    TRY(catalog_add_value(catalog, (struct slice){value->name, strlen(value->name)}, extent, NULL));
    TRY(catalog_copy_text(catalog, value->path, &catalog->values[i].path));
    rsd_status status = pickle_write_json(value->json, &pickle);
    if (!status)
        status = manifest->format->writer->make_value(&pickle, &manifest->values[i].item);
    bytes_drop(&pickle);
    return status == RSD_EFORMAT ? RSD_EINVAL : status;
}

/* Adds the values of the caller, in the files of the given ranks. */
static rsd_status add_saved_values(struct manifest *manifest, const rsd_save_options *options,
                                   const int32_t *ranks)
{
    const char *at = (const char *)options->values;
    manifest->values = mem_new((size_t)options->nvalues, sizeof *manifest->values);
    if (!manifest->values)
        return RSD_ENOMEM;
    for (int64_t i = 0; i < options->nvalues; i++) {
        rsd_value value;
        TRY(options_copy("rsd_value", at, &value, sizeof value));
        at += options->values->struct_nbytes;
        if (!value.name || !value.json)
            return fail(RSD_EINVAL, "value %lld has no %s", (long long)i,
                        value.name ? "json" : "name");
        rsd_status status = add_value(manifest, &value, ranks[i]);
        if (status)
            return fail_in(status, "%s: ", value.name);
    }
    return RSD_OK;
}

/* Makes the manifest of a save: which rank writes which box and value, and where. */
static rsd_status make_saved_manifest(struct manifest *manifest,
                                      const struct saved_tensors *tensors,
                                      const rsd_save_options *options)
{
    struct dedup_input input = {.targets = tensors->targets,
                                .ntargets = tensors->n,
                                .nvalues = (size_t)options->nvalues,
                                .nranks = options->nranks,
                                .mode = options->to_lowest_rank ? DEDUP_TO_LOWEST : DEDUP_EVENLY};
    int32_t *value_ranks;
    if (options->nvalues < 0)
        return fail(RSD_EINVAL, "invalid number of values %lld", (long long)options->nvalues);
    TRY(manifest_start(manifest, RSD_FORMAT_DCP, options->compress));
    manifest->aligned = !options->torch_places;
    TRY(dedup_count_ranks(input.ntargets, input.targets, &input.nranks));
    TRY(manifest_add_files(manifest, (size_t)input.nranks));
    TRY(dedup_add_tensors(manifest, &input, &value_ranks));
    rsd_status status = add_saved_values(manifest, options, value_ranks);
    mem_free(value_ranks);
    TRY(status);
    TRY(manifest_check(manifest));
    return manifest_place(manifest);
}

/* ---- where the bytes come from ---- */

/* Returns the extent that is written from a box of an array: extents are by rank, then by box. SIZE_MAX: another
 * rank writes it. */
static size_t find_extent(const struct catalog *catalog, const struct stored_tensor *tensor,
                          const struct array_slice *box)
{
    size_t low = tensor->first_extent, end = low + tensor->nboxes, high = end;
    uint32_t rank = (uint32_t)box->rank;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct extent *extent = &catalog->extents[middle];
        bool before = extent->file != rank ? extent->file < rank : extent->detail < box->order;
        if (before)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < end && catalog->extents[low].file == rank &&
                 catalog->extents[low].detail == box->order;
    return found ? low : SIZE_MAX;
}

/* Sets the memory of the boxes of one tensor of the caller. */
static rsd_status find_memory(struct memory_manifest *items, const struct saved_tensors *tensors,
                              size_t given)
{
    const struct catalog *catalog = &items->manifest.catalog;
    const struct stored_tensor *tensor = &catalog->tensors[tensors->of_given[given]];
    struct array_slices boxes = {0};
    rsd_status status = arrays_list_slices(&tensors->given[given], false, &boxes);
    for (size_t i = 0; i < boxes.n && !status; i++) {
        size_t extent = find_extent(catalog, tensor, &boxes.list[i]);
        if (extent == SIZE_MAX || (items->only >= 0 && boxes.list[i].rank != items->only))
            continue;
        items->memory[extent].memory = boxes.list[i].memory;
        copy_i64s(items->memory[extent].strides, boxes.list[i].strides, tensor->ndim);
    }
    arrays_drop_slices(&boxes);
    return status ? fail_in(status, "%s: ", tensor->name) : RSD_OK;
}

/* Everything that this process writes must be in memory. */
static rsd_status check_memory(const struct memory_manifest *items)
{
    const struct catalog *catalog = &items->manifest.catalog;
    char text[BOX_TEXT_NCHARS];
    for (size_t i = 0; i < catalog->nextents; i++) {
        struct extent_box box = extent_find_box(catalog, i);
        uint32_t file = catalog->extents[i].file;
        bool written = items->only < 0 || file == (uint32_t)items->only;
        if (written && !items->memory[i].memory && box.nbytes > 0)
            return fail(RSD_EMISMATCH, "%s: no array was passed for rank %d with box %s",
                        box.tensor->name, (int)file,
                        box_text(box.tensor->ndim, box.lo, box.len, text));
    }
    return RSD_OK;
}

rsd_status save_prepare(struct memory_manifest *items, int64_t ntensors, const rsd_tensor *given,
                        const rsd_save_options *options)
{
    struct saved_tensors tensors = {0};
    rsd_status status = list_saved_tensors(&tensors, ntensors, given);
    if (!status)
        status = make_saved_manifest(&items->manifest, &tensors, options);
    if (!status) {
        items->memory = mem_new(items->manifest.catalog.nextents, sizeof *items->memory);
        status = items->memory ? RSD_OK : RSD_ENOMEM;
    }
    for (size_t i = 0; i < tensors.ngiven && !status; i++)
        status = find_memory(items, &tensors, i);
    if (!status)
        status = check_memory(items);
    drop_saved_tensors(&tensors);
    return status;
}

void memory_manifest_drop(struct memory_manifest *items)
{
    manifest_drop(&items->manifest);
    mem_free(items->memory);
    items->memory = NULL;
}
