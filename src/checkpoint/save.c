/* save.c - from memory into a DCP checkpoint.
 *
 *     locals --deal--> who writes what --draft--> files and places --hauls--> bytes --part--> published
 *
 * Every process of a save drafts all of it, from the layouts alone, and writes its own file; so they need
 * not talk to each other. Each then leaves the metadata of its part, in the form torch has for saves
 * without collectives, and the last step joins them.
 *
 * A save that goes on in the background is the same, after everything was copied.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

/* ---- hauls ---- */

static rsd_status open_job(void *context, size_t job, struct transfer *transfer)
{
    rsd_async_save *saving = context;
    size_t extent = saving->jobs[job], tensor = saving->tensor_of[extent];
    size_t box = extent - saving->manifest.catalog.tensors[tensor].first_extent;
    struct sink sink;
    TRY(output_begin(&saving->output, tensor, box));
    TRY(transfer_start(transfer, &saving->manifest.catalog, tensor, 1));
    output_sink(&saving->output, tensor, box, &sink);
    transfer_add_sink(transfer, &sink);
    transfer->in_order = saving->manifest.compress != 0;
    return transfer_from_memory(transfer, saving->origins[extent].memory,
                                saving->origins[extent].strides, saving->tile_limit);
}

static rsd_status close_job(void *context, size_t job, struct transfer *transfer)
{
    rsd_async_save *saving = context;
    size_t extent = saving->jobs[job], tensor = saving->tensor_of[extent];
    (void)transfer;
    return output_end(&saving->output, tensor,
                      extent - saving->manifest.catalog.tensors[tensor].first_extent);
}

rsd_status save_write_files(rsd_async_save *saving)
{
    const rsd_save_options *options = &saving->options;
    struct batch batch = {.pool = options->pool,
                          .first_job = saving->first_job,
                          .nlanes = saving->manifest.nfiles,
                          .one_per_lane = saving->manifest.compress != 0,
                          .open = open_job,
                          .close = close_job,
                          .context = saving,
                          .on_progress = options->on_progress,
                          .progress_context = options->context,
                          .nbytes_total = saving->nbytes};
    if (!saving->staged) /* in the background nobody talks */
        operation_follow(&saving->operation, &batch);
    TRY(batch_run(&batch));
    TRY(output_finish(&saving->output));
    saving->report.ntensors = (int64_t)saving->manifest.catalog.ntensors;
    saving->report.nbytes_needed = saving->nbytes;
    saving->report.nbytes_written = (int64_t)saving->output.nbytes_written;
    saving->report.nfiles_written = saving->output.nfiles_written;
    report_add_stats(&saving->report, &batch.stats);
    return RSD_OK;
}

/* ---- the whole of it ---- */

/* What this rank wrote: the same contents without what others have. */
static rsd_status own_part(const rsd_async_save *saving, struct catalog *own)
{
    const struct catalog *all = &saving->manifest.catalog;
    for (size_t t = 0; t < all->ntensors; t++) {
        const struct stored_tensor *tensor = &all->tensors[t];
        TRY(catalog_add_tensor(own, (struct slice){tensor->name, strlen(tensor->name)},
                               tensor->dtype, tensor->ndim, tensor_shape(all, tensor)));
        TRY(catalog_copy_text(own, tensor->path, &own->tensors[t].path));
        for (size_t box = 0; box < tensor->nboxes; box++)
            if (save_is_mine(saving, tensor->first_extent + box))
                TRY(catalog_add_box(own, tensor_box_lo(all, tensor, box),
                                    tensor_box_len(all, tensor, box),
                                    all->extents[tensor->first_extent + box]));
    }
    for (size_t i = 0; i < all->nvalues; i++) {
        const struct stored_value *value = &all->values[i];
        if (value->extent.file != (uint32_t)saving->options.rank)
            continue;
        TRY(catalog_add_value(own, (struct slice){value->name, strlen(value->name)}, value->extent,
                              NULL));
        TRY(catalog_copy_text(own, value->path, &own->values[own->nvalues - 1].path));
    }
    return RSD_OK;
}

/* Ranks that save together say so: all leave the same line. */
static void part_line(const rsd_async_save *saving, char line[64])
{
    char digest[RSD_DIGEST_NCHARS];
    hash_text(saving->drafted, digest);
    snprintf(line, 64, "%s %lld\n", digest, (long long)saving->options.nranks);
}

/* What an earlier save left of this rank does not count. */
static rsd_status forget_part(const rsd_async_save *saving, struct store *store)
{
    char name[64];
    snprintf(name, sizeof name, "__%d.metadata", (int)saving->options.rank);
    rsd_status status = store_remove(store, name);
    return !status || status == RSD_ENOENT ? store_sync_names(store) : status;
}

static rsd_status leave_part(rsd_async_save *saving)
{
    struct catalog own = {0};
    char name[64];
    rsd_status status = own_part(saving, &own);
    char line[64];
    part_line(saving, line);
    snprintf(name, sizeof name, "__%d.reshard", (int)saving->options.rank);
    if (!status)
        status = store_put(saving->output.store, name, line, strlen(line));
    snprintf(name, sizeof name, "__%d.metadata", (int)saving->options.rank);
    if (!status)
        status = dcp_write_metadata(&own, saving->output.store, name);
    catalog_drop(&own);
    return status;
}

static rsd_status write_and_publish(rsd_async_save *saving, struct store_output *dest)
{
    if (saving->options.one_rank)
        TRY(forget_part(saving, dest->store));
    TRY(output_open(&saving->output, &saving->manifest, dest, NULL,
                    saving->options.one_rank ? saving->options.rank : -1));
    rsd_status status = save_write_files(saving);
    if (!status && saving->options.one_rank)
        status = leave_part(saving);
    else if (!status)
        status = saving->manifest.format->writer->finish(&saving->manifest, saving->output.store);
    output_close(&saving->output);
    return status;
}

rsd_status save_open_output(const char *path, enum output_mode mode, bool overwrite,
                            rsd_storage *storage, struct store_output **dest)
{
    struct output_options options = {.mode = mode,
                                     .overwrite = overwrite,
                                     .journal = JOURNAL_NAME,
                                     .list_owned = checkpoint_list_owned,
                                     .storage = storage};
    return store_open_output(path, &options, dest);
}

static rsd_status save_prepared(rsd_async_save *saving)
{
    struct store_output *dest;
    double began = seconds_now();
    bool alone = !saving->options.one_rank;
    TRY(save_open_output(saving->path, alone ? OUTPUT_REPLACE : OUTPUT_SHARED,
                         saving->options.overwrite != 0, saving->options.storage, &dest));
    rsd_status status = write_and_publish(saving, dest);
    if (!status && alone)
        status = store_commit(dest);
    store_close_output(dest, !status || !alone);
    saving->report.seconds = seconds_now() - began;
    return status;
}

void save_drop(rsd_async_save *saving)
{
    if (!saving)
        return;
    if (saving->operation.nranks > 1)
        save_drop_together(saving);
    manifest_drop(&saving->manifest);
    mem_free(saving->path);
    mem_free(saving->origins);
    mem_free(saving->staged);
    mem_free(saving->jobs);
    mem_free(saving->tensor_of);
    mem_free(saving->first_job);
    mem_free(saving->message);
    mem_free(saving);
}

/* Copies everything, so that the arrays may change. */
static rsd_status stage(rsd_async_save *saving)
{
    const struct catalog *catalog = &saving->manifest.catalog;
    struct copier copier = copier_best();
    saving->staged = mem_new((size_t)saving->nbytes, 1);
    if (!saving->staged)
        return RSD_ENOMEM;
    char *to = saving->staged;
    for (size_t i = 0; i < saving->njobs; i++) {
        size_t extent = saving->jobs[i];
        const struct stored_tensor *tensor = &catalog->tensors[saving->tensor_of[extent]];
        const int64_t *len = tensor_box_len(catalog, tensor, extent - tensor->first_extent);
        struct origin *origin = &saving->origins[extent];
        size_t element_nbytes = rsd_dtype_nbytes(tensor->dtype);
        int64_t dense[RSD_MAX_DIMS] = {0}, volume = box_volume(tensor->ndim, len);
        if (volume == 0)
            continue;
        box_packed_strides(tensor->ndim, len, element_nbytes, dense);
        box_copy(&copier, true, tensor->ndim, len, element_nbytes, origin->memory, origin->strides,
                 to, dense);
        origin->memory = to;
        copy_i64s(origin->strides, dense, tensor->ndim);
        to += (size_t)volume * element_nbytes;
    }
    return RSD_OK;
}

static rsd_status check_options(const rsd_save_options *options)
{
    if (options->nvalues < 0)
        return fail(RSD_EINVAL, "%lld values", (long long)options->nvalues);
    return RSD_OK;
}

static rsd_status prepare(rsd_async_save *saving, const char *path, int64_t nlocals,
                          const rsd_tensor *locals, bool staged)
{
    saving->tile_limit = tile_limit(saving->options.max_nbytes, saving->options.pool);
    saving->path = mem_copy(path, strlen(path) + 1, 1);
    if (!saving->path)
        return RSD_ENOMEM;
    TRY(manifest_start(&saving->manifest, RSD_FORMAT_DCP, saving->options.compress));
    saving->manifest.aligned = !saving->options.torch_places && !saving->options.one_rank;
    TRY(check_options(&saving->options));
    if (saving->operation.nranks > 1)
        TRY(save_as_one_rank(saving));
    TRY(save_prepare(saving, nlocals, locals));
    manifest_hash(&saving->manifest, &saving->drafted);
    return staged ? stage(saving) : RSD_OK;
}

static rsd_status new_saving(const char *path, int64_t nlocals, const rsd_tensor *locals,
                             const rsd_save_options *given, bool staged, rsd_async_save **out)
{
    rsd_save_options options;
    TRY(options_copy("rsd_save_options", given, &options, sizeof options));
    rsd_async_save *saving = mem_new(1, sizeof *saving);
    if (!saving)
        return RSD_ENOMEM;
    saving->options = options;
    rsd_status status = operation_open(&saving->operation, options.transport, options.timeout,
                                       options.on_progress, options.context);
    if (!status) {
        status = prepare(saving, path, nlocals, locals, staged);
        if (saving->operation.nranks > 1)
            status = save_meet(saving, status);
    }
    if (status)
        save_drop(saving);
    else
        *out = saving;
    return status;
}

rsd_status rsd_save(const char *path, int64_t nlocals, const rsd_tensor *locals,
                    const rsd_save_options *options, rsd_report *report)
{
    rsd_async_save *saving;
    if (report)
        TRY(report_check("rsd_report", report));
    TRY(new_saving(path, nlocals, locals, options, false, &saving));
    rsd_status status =
        saving->operation.nranks > 1 ? save_together(saving, save_own_part) : save_prepared(saving);
    if (!status && report)
        report_copy(report, &saving->report, sizeof saving->report);
    save_drop(saving);
    return status;
}

/* ---- joining what every rank left ---- */

static rsd_status check_joined(rsd_checkpoint *joined)
{
    const struct catalog *catalog = &joined->catalog;
    for (size_t t = 0; t < catalog->ntensors; t++) {
        rsd_layout *layout;
        rsd_coverage check = {.struct_nbytes = sizeof check};
        char text[BOX_TEXT_NCHARS];
        TRY(catalog_tensor_layout(catalog, &catalog->tensors[t], true, &layout));
        rsd_status status = rsd_layout_coverage(layout, &check);
        rsd_layout_free(layout);
        TRY(status);
        if (check.kind == RSD_MISSES)
            return fail(RSD_EMISMATCH, "%s: no rank wrote %s", catalog->tensors[t].name,
                        box_text(check.box.ndim, check.box.lo, check.box.len, text));
    }
    for (size_t i = 0; i < catalog->nextents; i++) {
        const struct extent *extent = &catalog->extents[i];
        rsd_status status =
            store_check_range(joined->store, extent->file, extent->offset, extent->nbytes);
        if (status)
            return store_fail_in(joined->store, extent->file, status);
    }
    return RSD_OK;
}

static rsd_status open_joined(const char *path, int64_t nranks, rsd_checkpoint *joined)
{
    char name[64];
    const char *none;
    uint32_t file;
    rsd_status status = store_open(path, NULL, &joined->store, &none);
    for (int64_t rank = 0; rank < nranks && !status; rank++) {
        int n = snprintf(name, sizeof name, "__%lld.metadata", (long long)rank);
        status = store_add_file(joined->store, (struct slice){name, (size_t)n}, &file);
    }
    if (!status)
        status = joined->format->open(joined->store, &joined->catalog);
    if (!status)
        status = catalog_finish(&joined->catalog);
    return status;
}

/* All parts are of one save, of so many ranks. */
static rsd_status check_lines(struct store *store, int64_t nranks)
{
    char first[64] = "", name[64], expected[24];
    snprintf(expected, sizeof expected, " %lld\n", (long long)nranks);
    for (int64_t rank = 0; rank < nranks; rank++) {
        uint32_t index;
        char *line;
        size_t n;
        int length = snprintf(name, sizeof name, "__%lld.reshard", (long long)rank);
        TRY(store_add_file(store, (struct slice){name, (size_t)length}, &index));
        rsd_status status = store_load(store, index, sizeof first - 1, &line, &n);
        if (status)
            return store_fail_in(store, index, status);
        bool same = rank == 0 ? strstr(line, expected) != NULL : strcmp(line, first) == 0;
        if (rank == 0)
            snprintf(first, sizeof first, "%s", line);
        mem_free(line);
        if (!same)
            return fail(RSD_EMISMATCH,
                        "%s: rank %lld saved something else than rank 0, or for another number of "
                        "ranks",
                        store->path, (long long)rank);
    }
    return RSD_OK;
}

/* The notes of all ranks go, and so does what ranks beyond left that are not of this save. */
static rsd_status clear_notes(struct store *store, int64_t nranks)
{
    struct store_listing listing;
    rsd_status status = store_list(store, "", &listing);
    for (size_t i = 0; i < listing.n && !status; i++) {
        const char *name = listing.entries[i].name;
        long long rank;
        int end = 0;
        if (sscanf(name, "__%lld%n", &rank, &end) != 1)
            continue;
        bool note = strcmp(name + end, ".reshard") == 0 || strcmp(name + end, ".metadata") == 0;
        if (note || rank >= nranks)
            status = store_remove(store, name);
    }
    store_listing_drop(&listing);
    return status;
}

static rsd_status join_parts(const char *path, int64_t nranks)
{
    rsd_checkpoint joined = {.format = format_find(RSD_FORMAT_DCP)};
    rsd_status status = open_joined(path, nranks, &joined);
    if (!status)
        status = check_lines(joined.store, nranks);
    if (!status)
        status = check_joined(&joined);
    if (!status)
        status = dcp_write_metadata(&joined.catalog, joined.store, ".metadata");
    if (!status)
        status = clear_notes(joined.store, nranks);
    if (!status)
        status = store_sync_names(joined.store);
    store_close(joined.store);
    catalog_drop(&joined.catalog);
    return status;
}

rsd_status rsd_save_publish(const char *path, int64_t nranks, int32_t overwrite)
{
    struct store_output *dest;
    if (nranks < 1)
        return fail(RSD_EINVAL, "%lld ranks", (long long)nranks);
    TRY(save_open_output(path, OUTPUT_FINISH, overwrite != 0, NULL, &dest));
    rsd_status status = join_parts(dest->store->path, nranks);
    if (!status)
        status = store_commit(dest);
    store_close_output(dest, true);
    return status;
}

/* ---- in the background ---- */

static void *save_in_thread(void *context)
{
    rsd_async_save *saving = context;
    saving->status = saving->operation.nranks > 1 ? save_own_part(saving) : save_prepared(saving);
    if (saving->status)
        saving->message = mem_copy(rsd_error(), strlen(rsd_error()) + 1, 1);
    return NULL;
}

rsd_status rsd_save_start(const char *path, int64_t nlocals, const rsd_tensor *locals,
                          const rsd_save_options *options, rsd_async_save **out)
{
    rsd_async_save *saving;
    TRY(new_saving(path, nlocals, locals, options, true, &saving));
    saving->options.pool = pool_share(saving->options.pool);
    if (pthread_create(&saving->thread, NULL, save_in_thread, saving) == 0) {
        *out = saving;
        return RSD_OK;
    }
    if (saving->operation.nranks > 1) { /* the others go on: this rank says so when it waits */
        saving->threadless = true;
        *out = saving;
        return RSD_OK;
    }
    rsd_pool_free(saving->options.pool);
    save_drop(saving);
    return fail(RSD_ENOMEM, "no thread could be started");
}

/* Waits for the thread, and says how it went. */
static rsd_status join_thread(void *context)
{
    rsd_async_save *saving = context;
    if (saving->threadless)
        return fail(RSD_ENOMEM, "no thread could be started");
    pthread_join(saving->thread, NULL);
    if (saving->status)
        error_set("%s", saving->message ? saving->message : "no memory for a message");
    return saving->status;
}

rsd_status rsd_save_wait(rsd_async_save *saving, rsd_report *report)
{
    rsd_status status =
        saving->operation.nranks > 1 ? save_together(saving, join_thread) : join_thread(saving);
    if (!status && report)
        status = report_check("rsd_report", report);
    if (!status && report)
        report_copy(report, &saving->report, sizeof saving->report);
    rsd_pool_free(saving->options.pool);
    save_drop(saving);
    return status;
}
