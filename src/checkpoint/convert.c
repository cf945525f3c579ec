/* convert.c - from files into files.
 *
 *     all ranks   make the same manifest, and agree on it                     convert_prepare
 *     rank 0      opens the output, and reads the journal of an earlier run   open_convert_output
 *     all ranks   read and write the tensors that are not complete            convert_jobs
 *     rank 0      completes the files, and writes the metadata                complete_files
 *     all ranks   check the output, if the caller wants it                    check_output
 *     rank 0      puts the output at its path                                 commit_conversion
 *
 * The journal has the files and items that are complete, so a run that was stopped can be resumed.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

enum { MAX_SIDE_FILE_NBYTES = 1 << 30 };

/* ---- jobs ---- */

/* The items of a job: extents [next, end) of a tensor of the output. */
struct job_items {
    size_t tensor, next, end;
};

/* Lists the items of a job: one, or all of a tensor. */
static struct job_items list_items_of(const struct conversion_run *c, const struct batch_job *job)
{
    const struct catalog *catalog = &c->manifest.catalog;
    if (c->item_jobs)
        return (struct job_items){tensor_of_extent(catalog, job->id), job->id, job->id + 1};
    size_t first = catalog->tensors[job->id].first_extent;
    return (struct job_items){job->id, first, first + catalog->tensors[job->id].nboxes};
}

/* Moves to the next item that is not complete. Returns false after the last. */
static bool next_item(const struct conversion_run *c, struct job_items *items, size_t *item)
{
    while (items->next < items->end) {
        *item = items->next++;
        if (writer_wants_item(&c->writer, *item))
            return true;
    }
    return false;
}

/* Opens the transfer of a job: from the files of the input to the items that are not complete. */
static rsd_status convert_open_job(void *context, const struct batch_job *job,
                                   struct transfer *transfer)
{
    struct conversion_run *c = context;
    struct job_items items = list_items_of(c, job);
    TRY(transfer_start(transfer, &c->in->catalog, c->source_of[items.tensor],
                       items.end - items.next));
    for (size_t item; next_item(c, &items, &item);) {
        struct sink sink;
        TRY(writer_begin_item(&c->writer, item, &sink));
        transfer_add_sink(transfer, &sink);
    }
    TRY(transfer_plan(transfer, &c->in->catalog));
    TRY(transfer_open_files(transfer, c->in, c->operation.tile_limit));
    if (batch_job_is_whole(job))
        TRY(reflink_share(&c->writer, transfer));
    transfer->in_order = transfer->in_order || c->manifest.compress;
    return RSD_OK;
}

/* Keeps what rank 0 needs to end an item of which this rank wrote a part. */
static rsd_status add_split_item(struct conversion_run *c, size_t extent)
{
    struct manifest_item *item = &c->manifest.items[extent];
    struct split_item part = {.extent = extent, .crc = item->crc};
    memcpy(part.first, item->first, sizeof part.first);
    pthread_mutex_lock(&c->operation.partial_crcs.lock);
    item->split = true;
    rsd_status status = GROW(c->split, c->split_capacity, c->nsplit + 1);
    if (!status)
        c->split[c->nsplit++] = part;
    pthread_mutex_unlock(&c->operation.partial_crcs.lock);
    return status;
}

/* Ends the items of a job, or keeps what rank 0 needs to end an item that several ranks wrote. */
static rsd_status convert_close_job(void *context, const struct batch_job *job,
                                    struct transfer *transfer)
{
    struct conversion_run *c = context;
    const struct catalog *in = &c->in->catalog;
    struct job_items items = list_items_of(c, job);
    if (job->from == 0) /* the first rank of a split job counts it */
        c->nbytes_needed +=
            min_i64(transfer->nbytes, tensor_nbytes(in, &in->tensors[transfer->tensor]));
    for (size_t item; next_item(c, &items, &item);)
        TRY(batch_job_is_whole(job) ? writer_end_item(&c->writer, item) : add_split_item(c, item));
    return RSD_OK;
}

/* Returns how many threads may compress; 0: as many as there are. Compression is not slowed down unless memory is
 * limited. */
static int32_t count_writers(const struct conversion_run *c)
{
    int64_t nbytes = (int64_t)zstd_writer_memory(c->manifest.compress);
    int64_t most = c->operation.io.max_nbytes;
    return nbytes > 0 && most > 0 ? (int32_t)clamp_i64(most / nbytes, 1, INT32_MAX) : 0;
}

/* Returns whether what was written can be resumed after a failure. */
static bool can_resume(const struct conversion_run *c, rsd_status status)
{
    return status == RSD_EIO || status == RSD_ENOENT || status == RSD_ECANCELLED ||
           status == RSD_EEXIST || status == RSD_ETIMEOUT || status == RSD_EPEER ||
           status == RSD_ENOMEM || (status == RSD_EMISMATCH && c->dest && c->dest->resumed);
}

/* Runs the jobs of this rank. A run that is stopped writes its complete items to the journal. */
static rsd_status run_jobs(struct conversion_run *c)
{
    struct batch batch = {.from = c->in,
                          .open = convert_open_job,
                          .close = convert_close_job,
                          .check_records = true,
                          .max_threads = count_writers(c),
                          .context = c};
    rsd_status status = convert_list_jobs(c, &batch);
    status = operation_run_batch(&c->operation, &batch, status);
    if (can_resume(c, status)) {
        char *message = text_copy(rsd_error());
        writer_save_items(&c->writer); /* if this fails, more is written again */
        error_set("%s", message ? message : "no memory for a message");
        mem_free(message);
    }
    return status;
}

/* ---- the journal ---- */

/* Hashes the names, sizes and versions of the files that are read. */
static rsd_status hash_source(const struct conversion_run *c, struct hash *hash)
{
    struct store *store = c->in->store;
    bool *read_files;
    TRY(convert_find_read_files(c, &read_files));
    rsd_status status = RSD_OK;
    hash_start(hash, "source 1");
    for (uint32_t i = 0; i < store->names.n && !status; i++) {
        uint64_t nbytes;
        int64_t version;
        if (!read_files[i])
            continue;
        status = store_stat(store, i, &nbytes, &version);
        if (status) {
            store_fail_in(store, i, status);
            break;
        }
        hash_string(hash, store_file_name(store, i));
        hash_i64(hash, (int64_t)nbytes);
        hash_i64(hash, version);
    }
    mem_free(read_files);
    return status;
}

/* Hashes what is written, and from which tensors. */
static void hash_target(const struct conversion_run *c, struct hash *hash)
{
    manifest_hash(&c->manifest, hash);
    for (size_t i = 0; i < c->manifest.catalog.ntensors; i++)
        hash_string(hash, c->in->catalog.tensors[c->source_of[i]].name);
}

/* Starts the journal, or reads that of an earlier run of the same input and output. */
static rsd_status start_journal(struct conversion_run *c)
{
    struct hash source, target;
    char source_text[RSD_DIGEST_NCHARS], target_text[RSD_DIGEST_NCHARS];
    TRY(hash_source(c, &source));
    hash_target(c, &target);
    hash_text(source, source_text);
    hash_text(target, target_text);
    return c->dest->resumed ? journal_resume(c->dest, source_text, target_text, &c->writer)
                            : journal_start(c->dest, source_text, target_text);
}

/* ---- the end ---- */

/* Removes .part from the names, when all files are complete. */
static rsd_status rename_files(struct conversion_run *c)
{
    struct store *store = c->writer.store;
    for (uint32_t i = 0; i < c->manifest.nfiles; i++) {
        const char *from = store_file_name(store, i), *to = c->manifest.files[i].name;
        if (strcmp(from, to) != 0)
            TRY(store_rename(store, from, to));
    }
    return store_sync_names(store);
}

/* Copies a file into the directory, under its own name. */
static rsd_status copy_side_file(const struct conversion_run *c, const char *path)
{
    struct store *store;
    char *bytes = NULL;
    uint32_t file;
    size_t n;
    TRY(convert_open_side_file(c, path, &store, &file));
    rsd_status status = store_load(store, file, MAX_SIDE_FILE_NBYTES, &bytes, &n);
    if (status)
        store_fail_in(store, file, status);
    else
        status = store_put(c->writer.store, store_file_name(store, file), bytes, n);
    mem_free(bytes);
    store_close(store);
    return status;
}

/* ---- the steps ---- */

/* Returns the bytes that the files need; 0: that is not known before they are compressed. */
static uint64_t count_output_nbytes(const struct conversion_run *c)
{
    uint64_t nbytes = 0;
    for (size_t i = 0; i < c->manifest.nfiles && !c->manifest.compress; i++)
        nbytes = nbytes > UINT64_MAX - c->manifest.files[i].nbytes
                     ? UINT64_MAX
                     : nbytes + c->manifest.files[i].nbytes;
    return nbytes;
}

static struct output_options make_output_options(const struct conversion_run *c)
{
    return (struct output_options){.mode = c->options.resume ? OUTPUT_RESUME : OUTPUT_NEW,
                                   .overwrite = c->options.overwrite != 0,
                                   .one_file = c->one_file,
                                   .journal = JOURNAL_NAME,
                                   .list_owned = checkpoint_list_owned,
                                   .storage = c->operation.io.storage,
                                   .nbytes = count_output_nbytes(c),
                                   .may_share = c->options.reflink != RSD_REFLINK_NEVER};
}

/* Opens the writer of this rank. */
static rsd_status open_convert_writer(struct conversion_run *c)
{
    TRY(writer_open(&c->writer, &c->manifest, c->dest, c->in, -1));
    c->writer.journal = true;
    c->writer.shared =
        c->operation.nranks > 1 && !c->manifest.compress && c->dest->store->ops->random_write;
    return writer_start_cloning(&c->writer, c->options.reflink, c->options.unchecked != 0);
}

/* Rank 0: creates the output, or finds what an earlier run left in it. */
static rsd_status open_convert_output(void *context)
{
    struct conversion_run *c = context;
    struct output_options options = make_output_options(c);
    TRY(store_open_output(c->out, &options, &c->dest));
    TRY(open_convert_writer(c));
    TRY(start_journal(c));
    if (c->writer.shared)
        TRY(writer_create_files(&c->writer));
    return c->operation.nranks > 1 ? convert_put_state(c) : RSD_OK;
}

/* The other ranks: join the output. */
static rsd_status join_convert_output(struct conversion_run *c)
{
    snprintf(c->journal_name, sizeof c->journal_name, JOURNAL_NAME ".%d", (int)c->operation.rank);
    struct output_options options = {
        .mode = OUTPUT_JOIN, .journal = c->journal_name, .storage = c->operation.io.storage};
    TRY(store_open_output(c->out, &options, &c->dest));
    TRY(open_convert_writer(c));
    return convert_take_state(c);
}

/* Each rank: reads and writes its jobs, and fills in its report. */
static rsd_status convert_jobs(void *context)
{
    struct conversion_run *c = context;
    if (c->operation.rank > 0)
        TRY(join_convert_output(c));
    TRY(run_jobs(c));
    if (c->operation.nranks > 1)
        TRY(writer_flush(&c->writer));
    c->operation.report.nbytes_needed = c->nbytes_needed;
    writer_report(&c->writer, &c->operation.report);
    return RSD_OK;
}

/* Rank 0: completes the files. */
static rsd_status complete_files(void *context)
{
    struct conversion_run *c = context;
    if (c->writer.shared)
        TRY(writer_end_split_items(&c->writer));
    TRY(writer_finish(&c->writer));
    if (c->operation.nranks > 1)
        TRY(journal_clear(c->dest));
    TRY(rename_files(c));
    for (int64_t i = 0; i < c->options.nside_files; i++)
        TRY(copy_side_file(c, c->options.side_files[i]));
    TRY(c->manifest.format->writer->finish(&c->manifest, c->writer.store));
    writer_report(&c->writer, &c->operation.report);
    writer_close(&c->writer);
    return RSD_OK;
}

/* Returns whether the files of the output can be read before it is at its path. */
static bool is_staged(const struct conversion_run *c)
{
    return c->dest->store->ops->random_write;
}

/* Lets the caller check the output. All ranks then have one status. */
static rsd_status check_output(struct conversion_run *c)
{
    rsd_checkpoint *output = NULL;
    struct hash none = {0};
    const char *file = c->one_file && c->manifest.nfiles ? c->manifest.files[0].name : NULL;
    const rsd_open_options options = {.struct_nbytes = sizeof options,
                                      .storage = c->operation.io.storage};
    rsd_status status = is_staged(c) ? checkpoint_open_staged(c->dest, file, &output)
                                     : rsd_checkpoint_open(c->out, &options, &output);
    status = operation_agree(&c->operation, status, none);
    if (!status)
        status = c->options.check(c->options.check_context, output);
    rsd_checkpoint_close(output);
    return operation_agree(&c->operation, status, none);
}

/* Rank 0: puts the output at its path. */
static rsd_status commit_conversion(void *context)
{
    struct conversion_run *c = context;
    TRY(store_commit(c->dest));
    c->operation.report.seconds = seconds_now() - c->operation.began;
    return RSD_OK;
}

/* Collective. Opens the output, converts, and commits. After a failure, keeps what can be resumed and removes the
 * rest. */
static rsd_status write_conversion(struct conversion_run *c)
{
    struct operation_call call = {.from = {c->in},
                                  .work = convert_jobs,
                                  .put = convert_put_written,
                                  .take = convert_take_written,
                                  .context = c};
    rsd_status status = operation_lead(&c->operation, open_convert_output, c, &c->state);
    if (!status)
        status = operation_run(&c->operation, &call);
    if (!status)
        status = operation_lead(&c->operation, complete_files, c, NULL);
    if (!status && c->options.check && is_staged(c))
        status = check_output(c);
    if (!status)
        status = operation_lead(&c->operation, commit_conversion, c, NULL);
    bool committed = !status;
    if (!status && c->options.check && !is_staged(c))
        status = check_output(c);
    writer_close(&c->writer);
    bool removed = status && c->operation.rank == 0 && (committed || !can_resume(c, status));
    store_close_output(c->dest, !removed);
    return status;
}

/* ---- without writing ---- */

static rsd_status check_convert_output(void *context)
{
    const struct conversion_run *c = context;
    struct output_options options = make_output_options(c);
    return store_check_output(c->out, &options);
}

/* Reports what a run would do. Compressed items are counted with their uncompressed length. */
static rsd_status estimate_report(struct conversion_run *c)
{
    const struct catalog *in = &c->in->catalog;
    rsd_report *report = &c->operation.report;
    TRY(operation_lead(&c->operation, check_convert_output, c, NULL));
    for (size_t t = 0; t < c->manifest.catalog.ntensors; t++)
        report->nbytes_needed += tensor_nbytes(in, &in->tensors[c->source_of[t]]);
    report->nbytes_read = report->nbytes_needed;
    for (size_t i = 0; i < c->manifest.nfiles; i++)
        report->nbytes_written += (int64_t)c->manifest.files[i].nbytes;
    report->nfiles_written = (int64_t)c->manifest.nfiles;
    report->seconds = seconds_now() - c->operation.began;
    return RSD_OK;
}

/* ---- the call ---- */

/* Collective. Returns EMISMATCH if ranks passed different arguments. */
static rsd_status agree_on_conversion(struct conversion_run *c, rsd_status status)
{
    struct hash arguments = {0};
    if (!status) {
        hash_target(c, &arguments);
        hash_catalog(&arguments, &c->in->catalog);
        hash_string(&arguments, c->out);
        hash_i64(&arguments, c->options.overwrite);
        hash_i64(&arguments, c->options.resume);
        hash_i64(&arguments, c->options.dry);
        hash_i64(&arguments, c->options.nside_files);
        hash_i64(&arguments, c->options.check != NULL); /* which all ranks call, or none */
    }
    return operation_agree(&c->operation, status, arguments);
}

rsd_status rsd_convert(rsd_checkpoint *in, const char *out, const rsd_convert_options *options,
                       rsd_report *report)
{
    struct conversion_run c = {.in = in, .out = out};
    TRY(options_copy("rsd_convert_options", options, &c.options, sizeof c.options));
    c.options.format = c.options.format ? c.options.format : RSD_FORMAT_SAFETENSORS;
    c.one_file = format_names_file(c.options.format, out);
    TRY(operation_open(&c.operation, c.options.io, report));
    rsd_status status = agree_on_conversion(&c, convert_prepare(&c));
    if (!status)
        status = c.options.dry ? estimate_report(&c) : write_conversion(&c);
    c.operation.report.ntensors = (int64_t)c.manifest.catalog.ntensors;
    c.operation.report.nleft_out = c.nleft_out;
    manifest_drop(&c.manifest);
    mem_free(c.source_of);
    mem_free(c.split);
    payload_drop(&c.state);
    return operation_close(&c.operation, status, report);
}
