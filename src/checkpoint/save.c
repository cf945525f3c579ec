/* save.c - from memory into a DCP checkpoint.
 *
 *     locals --deal--> who writes what --draft--> files and places --hauls--> bytes --part--> published
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
                                saving->origins[extent].strides, saving->operation.tile_limit);
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
    struct batch batch = {.pool = saving->operation.io.pool,
                          .first_job = saving->first_job,
                          .nlanes = saving->manifest.nfiles,
                          .one_per_lane = saving->manifest.compress != 0,
                          .open = open_job,
                          .close = close_job,
                          .context = saving,
                          .on_progress = saving->operation.io.on_progress,
                          .progress_context = saving->operation.io.context,
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

static rsd_status write_and_finish(rsd_async_save *saving, struct store_output *dest)
{
    TRY(output_open(&saving->output, &saving->manifest, dest, NULL, -1));
    rsd_status status = save_write_files(saving);
    if (!status)
        status = saving->manifest.format->writer->finish(&saving->manifest, saving->output.store);
    output_close(&saving->output);
    return status;
}

rsd_status save_open_output(const char *path, enum output_mode mode, bool overwrite,
                            struct store_output **dest)
{
    struct output_options options = {.mode = mode,
                                     .overwrite = overwrite,
                                     .journal = JOURNAL_NAME,
                                     .list_owned = checkpoint_list_owned};
    return store_open_output(path, &options, dest);
}

static rsd_status save_prepared(rsd_async_save *saving)
{
    struct store_output *dest;
    double began = seconds_now();
    TRY(save_open_output(saving->path, OUTPUT_REPLACE, saving->options.overwrite != 0, &dest));
    rsd_status status = write_and_finish(saving, dest);
    if (!status)
        status = store_commit(dest);
    store_close_output(dest, !status);
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
    saving->path = mem_copy(path, strlen(path) + 1, 1);
    if (!saving->path)
        return RSD_ENOMEM;
    TRY(manifest_start(&saving->manifest, RSD_FORMAT_DCP, saving->options.compress));
    TRY(check_options(&saving->options));
    if (saving->operation.nranks > 1)
        TRY(save_check_ranks(saving));
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
    saving->only = -1;
    rsd_status status = operation_open(&saving->operation, options.io);
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
    saving->operation.io.pool = pool_share(saving->operation.io.pool);
    if (pthread_create(&saving->thread, NULL, save_in_thread, saving) == 0) {
        *out = saving;
        return RSD_OK;
    }
    if (saving->operation.nranks > 1) { /* the others go on: this rank says so when it waits */
        saving->threadless = true;
        *out = saving;
        return RSD_OK;
    }
    rsd_pool_free(saving->operation.io.pool);
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
    rsd_pool_free(saving->operation.io.pool);
    save_drop(saving);
    return status;
}
