/* save_draft.c - what a save writes: the tensors that were given, dealt out to their holders, each with its
 * place in a file and the memory it comes from. */
#include "checkpoint.h"

#include <string.h>

enum { MOST_RANKS = 1 << 26 };

/* ---- what is saved ---- */

/* The tensors of a save: each name once, in order, with all its locals. */
struct saved_tensors {
    rsd_tensor *locals;
    size_t nlocals;
    const char **names;
    const rsd_layout **layouts;
    size_t *of_local; /* the tensor of each local */
    const char **paths;
    size_t n;
};

static rsd_status list_tensors(struct saved_tensors *tensors, const rsd_tensor *given, size_t n)
{
    struct string_map known = {0};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < n && !status; i++) {
        rsd_tensor *local = &tensors->locals[i];
        size_t *number = &tensors->of_local[i];
        status = take_local(given, (int64_t)i, local);
        if (status)
            break;
        struct slice name = {local->name, strlen(local->name)};
        if (string_map_find(&known, name, number)) {
            if (!rsd_layout_equal(tensors->layouts[*number], local->layout) ||
                tensors->layouts[*number]->dtype != local->layout->dtype)
                status = fail(RSD_EMISMATCH, "%s: given with two different layouts", local->name);
            continue;
        }
        *number = tensors->n;
        status = string_map_add(&known, name, *number);
        tensors->names[tensors->n] = local->name;
        tensors->layouts[tensors->n] = local->layout;
        tensors->paths[tensors->n++] = local->path;
    }
    string_map_drop(&known);
    return status;
}

static rsd_status take_tensors(struct saved_tensors *tensors, const rsd_tensor *given, int64_t n)
{
    if (n < 0)
        return fail(RSD_EINVAL, "%lld locals", (long long)n);
    tensors->nlocals = (size_t)n;
    tensors->locals = mem_new((size_t)n, sizeof *tensors->locals);
    tensors->names = mem_new((size_t)n, sizeof(char *));
    tensors->layouts = mem_new((size_t)n, sizeof(rsd_layout *));
    tensors->of_local = mem_new((size_t)n, sizeof *tensors->of_local);
    tensors->paths = mem_new((size_t)n, sizeof(char *));
    if (!tensors->locals || !tensors->names || !tensors->layouts || !tensors->of_local ||
        !tensors->paths)
        return RSD_ENOMEM;
    return list_tensors(tensors, given, (size_t)n);
}

static void drop_tensors(struct saved_tensors *tensors)
{
    mem_free(tensors->locals);
    mem_free(tensors->names);
    mem_free(tensors->layouts);
    mem_free(tensors->of_local);
    mem_free(tensors->paths);
}

/* ---- the draft ---- */

static rsd_status draft_values(rsd_async_save *saving, const struct dedup *dedup)
{
    struct manifest *manifest = &saving->manifest;
    const char *at = (const char *)saving->options.values;
    size_t n = (size_t)saving->options.nvalues;
    manifest->values = mem_new(n, sizeof *manifest->values);
    if (!manifest->values)
        return RSD_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        rsd_value value;
        struct bytes pickle = {0};
        TRY(options_copy("rsd_value", at, &value, sizeof value));
        at += saving->options.values->struct_nbytes;
        if (!value.name || !value.json)
            return fail(RSD_EINVAL, "value %zu has no %s", i, value.name ? "json" : "name");
        struct extent extent = {.file = (uint32_t)dedup->value_ranks[i], .kind = EXTENT_ITEM};
        TRY(catalog_add_value(&manifest->catalog, (struct slice){value.name, strlen(value.name)},
                              extent, NULL));
        TRY(catalog_copy_text(&manifest->catalog, value.path, &manifest->catalog.values[i].path));
        rsd_status status = pickle_write_json(value.json, &pickle);
        if (status == RSD_EFORMAT)
            status = RSD_EINVAL;
        if (!status)
            status = manifest->format->writer->make_value(&pickle, &manifest->values[i].item);
        bytes_drop(&pickle);
        if (status)
            return fail_in(status, "%s: ", value.name);
    }
    return RSD_OK;
}

static rsd_status draft_tensors(rsd_async_save *saving, const struct saved_tensors *tensors,
                                const struct dedup *dedup)
{
    struct manifest *manifest = &saving->manifest;
    size_t next = 0;
    for (size_t i = 0; i < tensors->n; i++) {
        const rsd_layout *layout = tensors->layouts[i];
        TRY(catalog_add_tensor(&manifest->catalog,
                               (struct slice){tensors->names[i], strlen(tensors->names[i])},
                               layout->dtype, layout->ndim, layout->shape));
        TRY(catalog_copy_text(&manifest->catalog, tensors->paths[i],
                              &manifest->catalog.tensors[i].path));
        TRY(dedup_add_boxes(dedup, i, &next, manifest));
    }
    return draft_values(saving, dedup);
}

static rsd_status count_ranks(rsd_async_save *saving, const struct saved_tensors *tensors)
{
    int64_t world = 1;
    for (size_t i = 0; i < tensors->n; i++)
        world = max_i64(world, rsd_layout_world(tensors->layouts[i]));
    if (saving->options.nranks == 0)
        saving->options.nranks = world;
    if (saving->options.nranks < world || saving->options.nranks > MOST_RANKS)
        return fail(RSD_EINVAL, "%lld ranks, and layouts name %lld",
                    (long long)saving->options.nranks, (long long)world);
    return RSD_OK;
}

/* ---- where the bytes come from ---- */

/* The extent that is written from a rank's box: they are by rank, then by box. SIZE_MAX: another rank
 * writes it. */
static size_t find_extent(const struct catalog *catalog, const struct stored_tensor *tensor,
                          const struct local_box *box)
{
    size_t low = tensor->first_extent, end = low + tensor->nboxes, high = end;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct extent *extent = &catalog->extents[middle];
        bool before = extent->file != (uint32_t)box->rank ? extent->file < (uint32_t)box->rank
                                                          : extent->detail < box->order;
        if (before)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < end && catalog->extents[low].file == (uint32_t)box->rank &&
                 catalog->extents[low].detail == box->order;
    return found ? low : SIZE_MAX;
}

static void match_boxes(rsd_async_save *saving, size_t index, const struct local_boxes *boxes)
{
    const struct catalog *catalog = &saving->manifest.catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    for (size_t i = 0; i < boxes->n; i++) {
        size_t extent = find_extent(catalog, tensor, &boxes->list[i]);
        if (extent == SIZE_MAX)
            continue;
        saving->origins[extent].memory = boxes->list[i].memory;
        copy_i64s(saving->origins[extent].strides, boxes->list[i].strides, tensor->ndim);
    }
}

static rsd_status check_origins(const rsd_async_save *saving)
{
    const struct catalog *catalog = &saving->manifest.catalog;
    char text[BOX_TEXT_NCHARS];
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        for (size_t box = 0; box < tensor->nboxes; box++) {
            size_t extent = tensor->first_extent + box;
            if (save_is_mine(saving, extent) && !saving->origins[extent].memory &&
                box_nbytes(catalog, tensor, box) > 0)
                return fail(RSD_EMISMATCH, "%s: the array of rank %d with box %s was not given",
                            tensor->name, (int)catalog->extents[extent].file,
                            box_text(tensor->ndim, tensor_box_lo(catalog, tensor, box),
                                     tensor_box_len(catalog, tensor, box), text));
        }
    }
    return RSD_OK;
}

static rsd_status find_origins(rsd_async_save *saving, const struct saved_tensors *tensors)
{
    saving->origins = mem_new(saving->manifest.catalog.nextents, sizeof *saving->origins);
    if (!saving->origins)
        return RSD_ENOMEM;
    for (size_t i = 0; i < tensors->nlocals; i++) {
        struct local_boxes boxes = {0};
        rsd_status status = local_boxes(&tensors->locals[i], false, &boxes);
        if (!status)
            match_boxes(saving, tensors->of_local[i], &boxes);
        local_boxes_drop(&boxes);
        if (status)
            return fail_in(status, "%s: ", tensors->locals[i].name);
    }
    return check_origins(saving);
}

/* One job an extent, file by file. */
rsd_status save_list_jobs(rsd_async_save *saving)
{
    const struct catalog *catalog = &saving->manifest.catalog;
    size_t nfiles = saving->manifest.nfiles;
    saving->jobs = mem_new(catalog->nextents, sizeof *saving->jobs);
    saving->tensor_of = mem_new(catalog->nextents, sizeof *saving->tensor_of);
    saving->first_job = mem_new(nfiles + 1, sizeof *saving->first_job);
    if (!saving->jobs || !saving->tensor_of || !saving->first_job)
        return RSD_ENOMEM;
    size_t *count = saving->first_job + 1;
    for (size_t i = 0; i < catalog->nextents; i++)
        count[catalog->extents[i].file] += save_is_mine(saving, i);
    for (size_t file = 0; file < nfiles; file++)
        saving->first_job[file + 1] += saving->first_job[file];
    saving->njobs = saving->first_job[nfiles];
    for (size_t t = catalog->ntensors; t-- > 0;) /* from behind, so that starts become firsts */
        for (size_t box = catalog->tensors[t].nboxes; box-- > 0;) {
            size_t extent = catalog->tensors[t].first_extent + box;
            saving->tensor_of[extent] = t;
            if (!save_is_mine(saving, extent))
                continue;
            saving->jobs[--count[catalog->extents[extent].file]] = extent;
            saving->nbytes += (int64_t)box_nbytes(catalog, &catalog->tensors[t], box);
        }
    for (size_t file = 0; file < nfiles; file++)
        saving->first_job[file] = count[file];
    saving->first_job[nfiles] = saving->njobs;
    return RSD_OK;
}

rsd_status save_prepare(rsd_async_save *saving, int64_t nlocals, const rsd_tensor *locals)
{
    struct saved_tensors tensors = {0};
    struct dedup dedup = {0};
    rsd_status status = take_tensors(&tensors, locals, nlocals);
    if (!status)
        status = count_ranks(saving, &tensors);
    if (!status)
        status = dedup_assign(&dedup, tensors.n, tensors.layouts, NULL, tensors.names,
                              saving->options.nranks, (size_t)saving->options.nvalues,
                              saving->options.to_lowest_rank ? DEDUP_TO_LOWEST : DEDUP_EVENLY);
    if (!status)
        status = manifest_add_files(&saving->manifest, (size_t)saving->options.nranks);
    if (!status)
        status = draft_tensors(saving, &tensors, &dedup);
    if (!status)
        status = manifest_check(&saving->manifest);
    if (!status)
        status = manifest_place(&saving->manifest);
    if (!status)
        status = find_origins(saving, &tensors);
    if (!status)
        status = save_list_jobs(saving);
    dedup_drop(&dedup);
    drop_tensors(&tensors);
    return status;
}
