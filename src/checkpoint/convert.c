/* convert.c - from files into files.
 *
 *     choose --> draft --> hauls, one a tensor --> files complete, one by one --> published
 *
 * A file that is complete is in the journal, so a run that was stopped goes on from there: a tensor is then
 * hauled only to the files that are not complete.
 */
#include "checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MOST_SIDE_FILE = 1 << 30 };

/* ---- hauls ---- */

/* The boxes of a job, one after the other. */
static bool next_box(const struct converting *c, const struct convert_job *job, size_t *box)
{
    const struct catalog *catalog = &c->manifest.catalog;
    const struct stored_tensor *tensor = &catalog->tensors[job->tensor];
    if (job->box != SIZE_MAX) {
        bool first = *box == SIZE_MAX;
        *box = job->box;
        return first;
    }
    while (++*box < tensor->nboxes)
        if (output_wants_item(&c->output, tensor->first_extent + *box))
            return true;
    return false;
}

static rsd_status open_job(void *context, size_t index, struct transfer *transfer)
{
    struct converting *c = context;
    const struct convert_job *job = &c->jobs[index];
    const struct stored_tensor *tensor = &c->manifest.catalog.tensors[job->tensor];
    size_t source = c->source_of[job->tensor];
    TRY(transfer_start(transfer, &c->in->catalog, source, tensor->nboxes));
    for (size_t box = SIZE_MAX; next_box(c, job, &box);) {
        struct sink sink;
        TRY(output_begin(&c->output, job->tensor, box));
        output_sink(&c->output, job->tensor, box, &sink);
        transfer_add_sink(transfer, &sink);
    }
    TRY(transfer_from_files(transfer, c->in, source, c->tile_limit));
    if (job_part_is_whole(&job->part))
        TRY(reflink_share(&c->output, transfer));
    transfer->in_order = transfer->in_order || c->manifest.compress;
    return RSD_OK;
}

/* What rank 0 has to know of an item that it ends. */
static rsd_status keep_part(struct converting *c, size_t tensor, size_t box)
{
    size_t extent = c->manifest.catalog.tensors[tensor].first_extent + box;
    const struct manifest_item *item = &c->manifest.items[extent];
    struct split_item part = {.extent = extent, .crc = item->crc};
    memcpy(part.first, item->first, sizeof part.first);
    pthread_mutex_lock(&c->seen.lock);
    rsd_status status = GROW(c->split, c->split_capacity, c->nsplit + 1);
    if (!status)
        c->split[c->nsplit++] = part;
    pthread_mutex_unlock(&c->seen.lock);
    return status;
}

static rsd_status close_job(void *context, size_t index, struct transfer *transfer)
{
    struct converting *c = context;
    const struct catalog *in = &c->in->catalog;
    const struct convert_job *job = &c->jobs[index];
    if (job->part.from == 0) /* the first of those that share it counts it */
        c->nbytes_needed +=
            min_i64(transfer->nbytes, tensor_nbytes(in, &in->tensors[c->source_of[job->tensor]]));
    for (size_t box = SIZE_MAX; next_box(c, job, &box);)
        TRY(job_part_is_whole(&job->part) ? output_end(&c->output, job->tensor, box)
                                          : keep_part(c, job->tensor, box));
    return RSD_OK;
}

/* The tensor that a job reads whole, for reading ahead. */
static size_t whole_tensor(void *context, size_t index)
{
    const struct converting *c = context;
    bool whole = c->jobs[index].box == SIZE_MAX && !c->dest->resumed;
    return whole ? c->source_of[c->jobs[index].tensor] : SIZE_MAX;
}

static rsd_status haul_all(struct converting *c)
{
    struct batch batch = {.pool = c->options.pool,
                          .nlanes = c->nlanes,
                          .first_job = c->first_job,
                          .one_per_lane = c->manifest.compress != 0,
                          .from = c->in,
                          .whole_tensor = whole_tensor,
                          .open = open_job,
                          .close = close_job,
                          .context = c,
                          .parts = c->parts,
                          .seen = &c->seen,
                          .nbytes_total = c->nbytes};
    operation_follow(&c->operation, &batch);
    rsd_status status = batch_run(&batch);
    if (status == RSD_ECANCELLED || status == RSD_EIO || status == RSD_ENOENT) {
        char *message = mem_copy(rsd_error(), strlen(rsd_error()) + 1, 1);
        output_note(&c->output); /* if even that fails, more is done again */
        error_set("%s", message ? message : "stopped");
        mem_free(message);
    }
    report_add_stats(&c->report, &batch.stats);
    return status;
}

/* ---- the source ---- */

/* What the files that are read look like from outside. */
static rsd_status hash_source(const struct converting *c, struct hash *hash)
{
    struct store *store = c->in->store;
    hash_start(hash, "source 1");
    for (uint32_t i = 0; i < store->names.n; i++) {
        if (!c->read_files[i])
            continue;
        uint64_t nbytes;
        int64_t version;
        rsd_status status = store_stat(store, i, &nbytes, &version);
        if (status)
            return store_fail_in(store, i, status);
        hash_string(hash, store_file_name(store, i));
        hash_i64(hash, (int64_t)nbytes);
        hash_i64(hash, version);
    }
    return RSD_OK;
}

/* What is written, and from what. */
static void hash_target(const struct converting *c, struct hash *hash)
{
    manifest_hash(&c->manifest, hash);
    for (size_t i = 0; i < c->manifest.catalog.ntensors; i++)
        hash_string(hash, c->in->catalog.tensors[c->source_of[i]].name);
}

static rsd_status begin(struct converting *c)
{
    struct hash source, target;
    char source_text[RSD_DIGEST_NCHARS], target_text[RSD_DIGEST_NCHARS];
    TRY(hash_source(c, &source));
    hash_target(c, &target);
    hash_text(source, source_text);
    hash_text(target, target_text);
    c->output.journal = true;
    c->output.reflink = c->options.reflink;
    c->output.unchecked = c->options.unchecked != 0;
    return c->dest->resumed ? journal_resume(c->dest, source_text, target_text, &c->output)
                            : journal_start(c->dest, source_text, target_text);
}

/* ---- the end ---- */

/* Names without .part, now that all files are complete. */
static rsd_status settle_names(struct converting *c)
{
    struct store *store = c->output.store;
    for (uint32_t i = 0; i < c->manifest.nfiles; i++) {
        const char *from = store_file_name(store, i), *to = c->manifest.files[i].name;
        if (strcmp(from, to) != 0)
            TRY(store_rename(store, from, to));
    }
    return store_sync_names(store);
}

/* Copies a file into the folder, under its own name. */
static rsd_status add_side_file(const struct converting *c, const char *path)
{
    struct store *store;
    char *bytes = NULL;
    uint32_t file;
    size_t n;
    TRY(convert_open_side_file(path, c->options.storage, &store, &file));
    rsd_status status = store_load(store, file, MOST_SIDE_FILE, &bytes, &n);
    if (status)
        store_fail_in(store, file, status);
    else
        status = store_put(c->output.store, store_file_name(store, file), bytes, n);
    mem_free(bytes);
    store_close(store);
    return status;
}

/* ---- the steps ---- */

static bool is_spread(const struct converting *c)
{
    return c->operation.nranks > 1;
}

static struct output_options convert_output_options(const struct converting *c)
{
    return (struct output_options){.mode = c->options.resume ? OUTPUT_RESUME : OUTPUT_NEW,
                                   .overwrite = c->options.overwrite != 0,
                                   .one_file = c->one_file,
                                   .journal = JOURNAL_NAME,
                                   .list_owned = checkpoint_list_owned,
                                   .storage = c->options.storage};
}

/* Rank 0 makes the folder, or finds what an earlier run left in it. */
static rsd_status open_all(void *context)
{
    struct converting *c = context;
    struct output_options options = convert_output_options(c);
    TRY(store_open_output(c->out, &options, &c->dest));
    TRY(output_open(&c->output, &c->manifest, c->dest, c->in, -1));
    TRY(begin(c));
    c->output.shared = is_spread(c) && !c->manifest.compress && c->dest->store->ops->random_write;
    if (c->output.shared)
        TRY(output_make_files(&c->output));
    return is_spread(c) ? convert_say_state(c) : RSD_OK;
}

/* Every rank writes its share. */
static rsd_status haul_own(void *context)
{
    struct converting *c = context;
    if (c->operation.rank > 0)
        TRY(convert_hear_state(c));
    TRY(convert_list_jobs(c));
    TRY(haul_all(c));
    if (is_spread(c))
        TRY(output_flush(&c->output));
    return convert_say_written(c);
}

/* Rank 0 ends it. */
static rsd_status finish_all(void *context)
{
    struct converting *c = context;
    if (c->output.shared)
        TRY(output_end_split(&c->output));
    TRY(output_finish(&c->output));
    if (is_spread(c))
        TRY(journal_clear(c->dest));
    TRY(settle_names(c));
    for (int64_t i = 0; i < c->options.nside_files; i++)
        TRY(add_side_file(c, c->options.side_files[i]));
    TRY(c->manifest.format->writer->finish(&c->manifest, c->output.store));
    c->report.nbytes_written += (int64_t)c->output.nbytes_written;
    c->report.nfiles_written += c->output.nfiles_written;
    c->report.nbytes_shared += (int64_t)c->output.nbytes_shared;
    output_close(&c->output);
    TRY(store_commit(c->dest));
    return payload_put_report(&c->operation, &c->finish.own, &c->report);
}

static rsd_status take_steps(struct converting *c)
{
    size_t at = 0;
    c->open.work = open_all;
    c->transfer.work = haul_own;
    c->transfer.merge = convert_merge;
    c->finish.work = finish_all;
    c->open.context = c->transfer.context = c->finish.context = c;
    TRY(operation_lead_step(&c->operation, &c->open));
    TRY(operation_step(&c->operation, &c->transfer));
    TRY(operation_lead_step(&c->operation, &c->finish));
    return payload_take(&c->finish.result, &at, &c->report, sizeof c->report);
}

/* Whether what there is can be resumed. */
static bool is_kept(const struct converting *c, rsd_status status)
{
    return status == RSD_EIO || status == RSD_ENOENT || status == RSD_ECANCELLED ||
           status == RSD_EEXIST || status == RSD_ETIMEOUT || status == RSD_EPEER ||
           (status == RSD_EMISMATCH && c->dest && c->dest->resumed);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

static rsd_status convert_to(struct converting *c)
{
    rsd_status status = take_steps(c);
    output_close(&c->output);
    bool removed = status && c->operation.rank == 0 && !is_kept(c, status);
    store_close_output(c->dest, !removed);
    return status;
}

static rsd_status check_place(void *context)
{
    const struct converting *c = context;
    struct output_options options = convert_output_options(c);
    return store_check_output(c->out, &options);
}

/* What a run would report. Compressed items are counted as if they were not. */
static void foresee(const struct converting *c, rsd_report *report)
{
    const struct catalog *in = &c->in->catalog;
    for (size_t t = 0; t < c->manifest.catalog.ntensors; t++)
        report->nbytes_needed += tensor_nbytes(in, &in->tensors[c->source_of[t]]);
    report->nbytes_read = report->nbytes_needed;
    for (size_t i = 0; i < c->manifest.nfiles; i++)
        report->nbytes_written += (int64_t)c->manifest.files[i].nbytes;
    report->nfiles_written = (int64_t)c->manifest.nfiles;
}

static rsd_status meet(struct converting *c, rsd_status status)
{
    struct hash what = {0};
    if (!status) {
        hash_target(c, &what);
        catalog_hash(&c->in->catalog, &what);
        hash_string(&what, c->out);
        hash_i64(&what, c->options.overwrite);
        hash_i64(&what, c->options.resume);
        hash_i64(&what, c->options.dry);
        hash_i64(&what, c->options.nside_files);
    }
    return operation_agree(&c->operation, status, what, &c->tile_limit);
}

rsd_status rsd_convert(rsd_checkpoint *in, const char *out, const rsd_convert_options *options,
                       rsd_report *report)
{
    struct converting c = {.in = in, .out = out, .one_file = ends_with(out, ".safetensors")};
    TRY(options_copy("rsd_convert_options", options, &c.options, sizeof c.options));
    if (report)
        TRY(report_check("rsd_report", report));
    TRY(operation_open(&c.operation, c.options.transport, c.options.timeout, c.options.on_progress,
                       c.options.context));
    partial_crcs_open(&c.seen);
    c.tile_limit = tile_limit(c.options.max_nbytes, c.options.pool);
    rsd_status status = meet(&c, convert_prepare(&c, c.one_file));
    if (!status && c.options.dry)
        status = operation_lead(&c.operation, check_place, &c);
    if (!status && c.options.dry)
        foresee(&c, &c.report);
    else if (!status)
        status = convert_to(&c);
    c.report.ntensors = (int64_t)c.nchosen;
    c.report.nleft_out = c.nleft_out;
    convert_drop(&c);
    if (status)
        return status;
    if (c.options.dry)
        c.report.seconds = seconds_now() - c.operation.began;
    if (report)
        report_copy(report, &c.report, sizeof c.report);
    return RSD_OK;
}
