/* save.c - from memory into a DCP checkpoint.
 *
 *     all ranks   make the same manifest, and agree on it                    save_prepare
 *     rank 0      opens the output                                           open_save_output
 *     all ranks   write their own files; a process alone those of all ranks  write_own_files
 *     rank 0      writes the metadata, and commits                           commit_save
 *
 * If one rank fails, all fail, the staging directory is removed, and the old checkpoint stays. A background save
 * copies the arrays first, and a thread does the third step.
 */
#include "checkpoint.h"

#include <string.h>

struct rsd_async_save {
    struct operation operation;
    char *path;
    bool overwrite, committed;
    struct memory_manifest items;
    char *copies; /* of all arrays, in the background */
    struct store_output *dest;
    struct writer writer;
    pthread_t thread;
    bool threaded;
    rsd_status status; /* of the thread, with its message */
    char *message;
    const rsd_report *report; /* of rsd_save_wait */
};

/* ---- writing ---- */

struct memory_batch {
    struct operation *operation;
    const struct memory_manifest *items;
    struct writer *writer;
};

/* Opens the transfer of a box: from its memory to its item. */
static rsd_status save_open_job(void *context, const struct batch_job *job,
                                struct transfer *transfer)
{
    struct memory_batch *b = context;
    const struct catalog *catalog = &b->items->manifest.catalog;
    const struct extent_memory *memory = &b->items->memory[job->id];
    struct sink sink;
    TRY(writer_begin_item(b->writer, job->id, &sink));
    TRY(transfer_start(transfer, catalog, tensor_of_extent(catalog, job->id), 1));
    transfer_add_sink(transfer, &sink);
    transfer->in_order = b->items->manifest.compress != 0;
    return transfer_open_memory(transfer, memory->memory, memory->strides,
                                b->operation->tile_limit);
}

static rsd_status save_close_job(void *context, const struct batch_job *job,
                                 struct transfer *transfer)
{
    struct memory_batch *b = context;
    (void)transfer;
    return writer_end_item(b->writer, job->id);
}

/* Returns how many threads may write; 0: as many as there are. Where one thread at a time writes to a file, a second one
 * prepares the next block. More threads would only take cache from each other. */
static int32_t count_save_threads(const struct writer *writer)
{
    int64_t nfiles = 0;
    if (!writer->store->one_writer)
        return 0;
    for (uint32_t file = 0; file < writer->manifest->nfiles; file++)
        nfiles += writer_wants_file(writer, file);
    return (int32_t)clamp_i64(2 * nfiles, 1, INT32_MAX);
}

rsd_status save_write_files(struct operation *operation, const struct memory_manifest *items,
                            struct writer *writer)
{
    const struct catalog *catalog = &items->manifest.catalog;
    rsd_report *report = &operation->report;
    struct memory_batch context = {operation, items, writer};
    struct batch batch = {.nqueues = items->manifest.nfiles,
                          .one_per_queue = items->manifest.compress != 0,
                          .max_threads = count_save_threads(writer),
                          .open = save_open_job,
                          .close = save_close_job,
                          .context = &context};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < catalog->nextents && !status; i++) {
        int64_t nbytes = (int64_t)extent_find_box(catalog, i).nbytes;
        struct batch_job job = {.id = i, .queue = catalog->extents[i].file, .of = nbytes};
        if (writer_wants_item(writer, i))
            status = job_list_add(&batch.jobs, job);
    }
    TRY(operation_run_batch(operation, &batch, status));
    TRY(writer_finish(writer));
    report->ntensors = (int64_t)catalog->ntensors;
    report->nbytes_needed = batch.nbytes_total;
    writer_report(writer, report);
    report->seconds = seconds_now() - operation->began;
    return RSD_OK;
}

/* ---- the steps ---- */

static rsd_status open_save_output(void *context)
{
    rsd_async_save *save = context;
    struct output_options options = {.mode = OUTPUT_REPLACE,
                                     .overwrite = save->overwrite,
                                     .journal = JOURNAL_NAME,
                                     .list_owned = checkpoint_list_owned,
                                     .storage = save->operation.io.storage};
    return store_open_output(save->path, &options, &save->dest);
}

static rsd_status write_own_files(void *context)
{
    rsd_async_save *save = context;
    struct output_options join = {.mode = OUTPUT_JOIN, .storage = save->operation.io.storage};
    if (save->operation.rank > 0)
        TRY(store_open_output(save->path, &join, &save->dest));
    TRY(writer_open(&save->writer, &save->items.manifest, save->dest, NULL, save->items.only));
    return save_write_files(&save->operation, &save->items, &save->writer);
}

static rsd_status put_own_files(void *context, struct payload *own)
{
    const rsd_async_save *save = context;
    return writer_put_files(&save->writer, true, own);
}

static rsd_status take_own_files(void *context, const struct payload *sent, size_t *at)
{
    rsd_async_save *save = context;
    return writer_take_files(&save->writer, sent, at);
}

static rsd_status commit_save(void *context)
{
    rsd_async_save *save = context;
    struct manifest *manifest = &save->items.manifest;
    TRY(manifest->format->writer->finish(manifest, save->writer.store));
    return store_commit(save->dest);
}

/* Ends a save, and removes its output unless it was committed. Returns operation_close. */
static rsd_status drop_save(rsd_async_save *save, rsd_status status, rsd_report *report)
{
    writer_close(&save->writer);
    store_close_output(save->dest, save->operation.rank > 0 || save->committed);
    memory_manifest_drop(&save->items);
    mem_free(save->path);
    mem_free(save->copies);
    mem_free(save->message);
    rsd_pool_free(save->operation.io.pool);
    status = operation_close(&save->operation, status, report);
    mem_free(save);
    return status;
}

/* Does the work, which writes the files of this rank or waits for them, then commits and frees the save. */
static rsd_status end_save(rsd_async_save *save, rsd_status (*work)(void *save), rsd_report *report)
{
    struct operation_call call = {
        .work = work, .put = put_own_files, .take = take_own_files, .context = save};
    rsd_status status = operation_run(&save->operation, &call);
    if (!status)
        status = operation_lead(&save->operation, commit_save, save, NULL);
    save->committed = !status;
    return drop_save(save, status, report);
}

/* ---- starting ---- */

/* Copies the array of an extent, and makes the copy its memory. Adds its bytes to *at. */
static rsd_status copy_array(struct memory_manifest *items, struct scratch *scratch, size_t extent,
                             char *copies, size_t *at)
{
    struct extent_box box = extent_find_box(&items->manifest.catalog, extent);
    struct extent_memory *memory = &items->memory[extent];
    int32_t ndim = box.tensor->ndim;
    size_t element_nbytes = rsd_dtype_nbytes(box.tensor->dtype);
    int64_t dense[RSD_MAX_DIMS] = {0};
    char *to = copies + *at;
    struct memory_device *device;
    box_packed_strides(ndim, box.len, element_nbytes, dense);
    TRY(memory_find_device(memory->memory, &device));
    if (device)
        TRY(tile_device_read_array(scratch, device, ndim, box.len, element_nbytes, memory->memory,
                                   memory->strides, to));
    else
        box_copy(&scratch->copier, true, ndim, box.len, element_nbytes, memory->memory,
                 memory->strides, to, dense);
    memory->memory = to;
    copy_i64s(memory->strides, dense, ndim);
    *at += (size_t)box.nbytes;
    return RSD_OK;
}

/* Copies all arrays that are written, so that the caller may change them. */
static rsd_status copy_arrays(rsd_async_save *save)
{
    struct memory_manifest *items = &save->items;
    const struct catalog *catalog = &items->manifest.catalog;
    struct scratch scratch = {.copier = copier_best(), .stream = save->operation.io.stream};
    size_t at = 0, all = 0;
    for (size_t i = 0; i < catalog->nextents; i++)
        if (items->memory[i].memory)
            all += (size_t)extent_find_box(catalog, i).nbytes;
    save->copies = mem_new(all, 1);
    if (!save->copies)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < catalog->nextents && !status; i++)
        if (items->memory[i].memory)
            status = copy_array(items, &scratch, i, save->copies, &at);
    scratch_drop(&scratch);
    return status;
}

/* What the caller saves, and where. */
struct save_request {
    const char *path;
    int64_t ntensors;
    const rsd_tensor *tensors;
    rsd_save_options options;
    bool background;
};

/* Lists what is saved, and for a save in the background copies it. */
static rsd_status prepare_save(rsd_async_save *save, struct save_request *request)
{
    const struct operation *operation = &save->operation;
    rsd_save_options *options = &request->options;
    save->overwrite = options->overwrite != 0;
    save->path = text_copy(request->path);
    if (!save->path)
        return RSD_ENOMEM;
    save->items.only = operation->nranks > 1 ? operation->rank : -1;
    if (operation->nranks > 1 && options->nranks && options->nranks != operation->nranks)
        return fail(RSD_EINVAL, "nranks is %lld, but %d ranks save", (long long)options->nranks,
                    (int)operation->nranks);
    if (operation->nranks > 1)
        options->nranks = operation->nranks;
    TRY(save_prepare(&save->items, request->ntensors, request->tensors, options));
    return request->background ? copy_arrays(save) : RSD_OK;
}

/* Collective. Makes a save, up to its open output. `report` is the caller's: its size is checked. */
static rsd_status begin_save(struct save_request *request, const rsd_save_options *options,
                             const rsd_report *report, rsd_async_save **out)
{
    struct hash arguments = {0};
    TRY(options_copy("rsd_save_options", options, &request->options, sizeof request->options));
    rsd_async_save *save = mem_new(1, sizeof *save);
    if (!save)
        return RSD_ENOMEM;
    rsd_status status = operation_open(&save->operation, request->options.io, report);
    if (status) {
        mem_free(save);
        return status;
    }
    save->operation.io.pool = pool_share(save->operation.io.pool);
    status = prepare_save(save, request);
    if (!status) {
        manifest_hash(&save->items.manifest, &arguments);
        hash_string(&arguments, save->path);
        hash_i64(&arguments, save->overwrite);
    }
    status = operation_agree(&save->operation, status, arguments);
    if (!status)
        status = operation_lead(&save->operation, open_save_output, save, NULL);
    if (status) {
        drop_save(save, status, NULL);
        return status;
    }
    *out = save;
    return RSD_OK;
}

rsd_status rsd_save(const char *path, int64_t ntensors, const rsd_tensor *tensors,
                    const rsd_save_options *options, rsd_report *report)
{
    struct save_request request = {.path = path, .ntensors = ntensors, .tensors = tensors};
    rsd_async_save *save;
    TRY(begin_save(&request, options, report, &save));
    return end_save(save, write_own_files, report);
}

/* ---- in the background ---- */

static void *run_save_thread(void *context)
{
    rsd_async_save *save = context;
    save->status = write_own_files(save);
    if (save->status)
        save->message = text_copy(rsd_error());
    return NULL;
}

rsd_status rsd_save_start(const char *path, int64_t ntensors, const rsd_tensor *tensors,
                          const rsd_save_options *options, rsd_async_save **out)
{
    struct save_request request = {
        .path = path, .ntensors = ntensors, .tensors = tensors, .background = true};
    rsd_async_save *save;
    TRY(begin_save(&request, options, NULL, &save));
    save->threaded = pthread_create(&save->thread, NULL, run_save_thread, save) == 0;
    if (!save->threaded)
        run_save_thread(save);
    *out = save;
    return RSD_OK;
}

/* Waits for the thread. A report of the wrong size fails before anything is published. */
static rsd_status join_save_thread(void *context)
{
    rsd_async_save *save = context;
    if (save->threaded)
        pthread_join(save->thread, NULL);
    if (save->status)
        return fail(save->status, "%s", save->message ? save->message : "no memory for a message");
    return save->report ? report_check("rsd_report", save->report) : RSD_OK;
}

rsd_status rsd_save_wait(rsd_async_save *save, rsd_report *report)
{
    save->report = report;
    return end_save(save, join_save_thread, report);
}
