/* convert.c - from files into files.
 *
 *     choose --> draft --> hauls, one a tensor --> files complete, one by one --> published
 *
 * A file that is complete is in the journal, so a run that was stopped goes on from there: a tensor is then
 * hauled only to the files that are not complete.
 */
#include "haul.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_SIDE_FILE = 1 << 30 };

/* ---- jobs ---- */

static rsd_status add_job(struct converting *c, struct convert_job job)
{
    TRY(GROW(c->jobs, c->room_jobs, c->njobs + 1));
    c->jobs[c->njobs++] = job;
    return RSD_OK;
}

/* A compressed file is one stream after the other: a job an item, a lane a file. */
static rsd_status list_items(struct converting *c)
{
    const struct contents *contents = &c->draft.contents;
    c->nlanes = c->draft.nfiles;
    for (size_t t = 0; t < contents->ntensors; t++)
        for (size_t box = 0; box < contents->tensors[t].nboxes; box++) {
            size_t extent = contents->tensors[t].first_extent + box;
            uint32_t file = contents->extents[extent].file;
            if (output_wants_item(&c->output, extent))
                TRY(add_job(c, (struct convert_job){t, file, box}));
        }
    return RSD_OK;
}

static uint64_t wanted_nbytes(const struct converting *c, const struct tensor *tensor,
                              uint32_t *first_file)
{
    const struct contents *contents = &c->draft.contents;
    uint64_t nbytes = 0;
    bool any = false;
    for (size_t box = tensor->nboxes; box-- > 0;) {
        if (!output_wants_item(&c->output, tensor->first_extent + box))
            continue;
        *first_file = contents->extents[tensor->first_extent + box].file;
        any = true;
        nbytes += box_nbytes(contents, tensor, box);
    }
    return any ? nbytes : UINT64_MAX;
}

/* Otherwise a job a tensor. Those of one file make a lane, or, where tensors go to many files, lanes are
 * about equal. */
static rsd_status list_tensors(struct converting *c)
{
    const struct contents *contents = &c->draft.contents;
    c->nlanes = c->whole ? c->draft.nfiles : (size_t)pool_nthreads(c->options.pool);
    uint64_t *load = mem_new(c->nlanes, sizeof *load);
    rsd_status status = load ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < contents->ntensors && !status; t++) {
        uint32_t file = 0;
        uint64_t nbytes = wanted_nbytes(c, &contents->tensors[t], &file);
        size_t lane = c->whole ? file : 0;
        if (nbytes == UINT64_MAX)
            continue;
        for (size_t i = 1; i < c->nlanes && !c->whole; i++)
            lane = load[i] < load[lane] ? i : lane;
        load[lane] += nbytes;
        status = add_job(c, (struct convert_job){t, lane, SIZE_MAX});
    }
    mem_free(load);
    return status;
}

static int by_lane(const void *a, const void *b)
{
    const struct convert_job *x = a, *y = b;
    if (x->lane != y->lane)
        return x->lane < y->lane ? -1 : 1;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return (x->box > y->box) - (x->box < y->box);
}

static rsd_status list_jobs(struct converting *c)
{
    const struct contents *contents = &c->draft.contents;
    TRY(c->draft.compress ? list_items(c) : list_tensors(c));
    if (c->njobs > 1)
        qsort(c->jobs, c->njobs, sizeof *c->jobs, by_lane);
    c->first_job = mem_new(c->nlanes + 1, sizeof *c->first_job);
    if (!c->first_job)
        return RSD_ENOMEM;
    for (size_t i = 0; i < c->njobs; i++)
        c->first_job[c->jobs[i].lane + 1]++;
    for (size_t i = 0; i < c->nlanes; i++)
        c->first_job[i + 1] += c->first_job[i];
    for (size_t t = 0; t < contents->ntensors; t++)
        for (size_t box = 0; box < contents->tensors[t].nboxes; box++)
            if (output_wants_item(&c->output, contents->tensors[t].first_extent + box))
                c->nbytes +=
                    box_volume(contents->tensors[t].ndim,
                               tensor_box_len(contents, &contents->tensors[t], box)) *
                    (int64_t)rsd_dtype_nbytes(c->in->contents.tensors[c->source_of[t]].dtype);
    return RSD_OK;
}

/* ---- hauls ---- */

/* The boxes of a job, one after the other. */
static bool next_box(const struct converting *c, const struct convert_job *job, size_t *box)
{
    const struct contents *contents = &c->draft.contents;
    const struct tensor *tensor = &contents->tensors[job->tensor];
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

static rsd_status open_job(void *context, size_t index, struct haul *haul)
{
    struct converting *c = context;
    const struct convert_job *job = &c->jobs[index];
    const struct tensor *tensor = &c->draft.contents.tensors[job->tensor];
    size_t source = c->source_of[job->tensor];
    TRY(haul_start(haul, &c->in->contents, source, tensor->nboxes));
    for (size_t box = SIZE_MAX; next_box(c, job, &box);) {
        struct sink sink;
        TRY(output_begin(&c->output, job->tensor, box));
        output_sink(&c->output, job->tensor, box, &sink);
        haul_add_sink(haul, &sink);
    }
    TRY(haul_from_files(haul, c->in, source, c->tile_limit));
    haul->in_order = haul->in_order || c->draft.compress;
    return RSD_OK;
}

static rsd_status close_job(void *context, size_t index, struct haul *haul)
{
    struct converting *c = context;
    const struct contents *in = &c->in->contents;
    c->nbytes_needed +=
        min_i64(haul->nbytes, tensor_nbytes(in, &in->tensors[c->source_of[c->jobs[index].tensor]]));
    for (size_t box = SIZE_MAX; next_box(c, &c->jobs[index], &box);)
        TRY(output_end(&c->output, c->jobs[index].tensor, box));
    return RSD_OK;
}

static rsd_status haul_all(struct converting *c, rsd_report *report)
{
    struct transfer transfer = {.pool = c->options.pool,
                                .nlanes = c->nlanes,
                                .first_job = c->first_job,
                                .one_per_lane = c->draft.compress != 0,
                                .open = open_job,
                                .close = close_job,
                                .context = c,
                                .on_progress = c->options.on_progress,
                                .progress_context = c->options.context,
                                .nbytes_total = c->nbytes};
    rsd_status status = transfer_run(&transfer);
    if (status == RSD_ECANCELLED || status == RSD_EIO) {
        char *message = mem_copy(rsd_error(), strlen(rsd_error()) + 1, 1);
        output_note(&c->output); /* if even that fails, more is done again */
        set_error("%s", message ? message : "stopped");
        mem_free(message);
    }
    TRY(status);
    report_tally(report, &transfer.tally);
    return output_finish(&c->output);
}

/* ---- the source ---- */

/* What the files that are read look like from outside. */
static rsd_status hash_source(const struct converting *c, struct hash *hash)
{
    rsd_checkpoint *in = c->in;
    hash_start(hash, "source 1");
    for (uint32_t i = 0; i < in->files.n; i++) {
        if (!c->read_files[i])
            continue;
        const struct one_file *file = &in->files.list[i];
        uint64_t nbytes;
        TRY(file_nbytes(&in->files, i, &nbytes));
        hash_string(hash, file->name);
        hash_i64(hash, (int64_t)nbytes);
        hash_i64(hash, file->changed);
    }
    return RSD_OK;
}

static rsd_status begin(struct converting *c, struct part *part)
{
    struct hash source, target;
    char source_text[RSD_DIGEST_NCHARS], target_text[RSD_DIGEST_NCHARS];
    TRY(hash_source(c, &source));
    draft_hash(&c->draft, &target);
    for (size_t i = 0; i < c->draft.contents.ntensors; i++)
        hash_string(&target, c->in->contents.tensors[c->source_of[i]].name);
    hash_text(source, source_text);
    hash_text(target, target_text);
    c->output.journal = true;
    return part->resumed ? journal_resume(part, source_text, target_text, &c->output)
                         : journal_start(part, source_text, target_text);
}

/* ---- the end ---- */

/* Names without .part, now that all files are complete. */
static rsd_status settle_names(struct converting *c)
{
    int fd = c->output.files.folder_fd;
    for (size_t i = 0; i < c->draft.nfiles; i++) {
        const char *from = c->output.files.list[i].name, *to = c->draft.files[i].name;
        if (strcmp(from, to) != 0 && renameat(fd, from, fd, to) != 0)
            return fail(RSD_EIO, "%s/%s: %s", c->output.files.folder, from, strerror(errno));
    }
    return folder_sync(&c->output.files);
}

static rsd_status write_marker(struct converting *c, struct part *part)
{
    if (c->draft.format == RSD_FORMAT_DCP) {
        struct bytes pickle = {0};
        rsd_status status = dcp_metadata(&c->draft.contents, &c->output.files, &pickle);
        if (!status)
            status = part_write(part, ".metadata", pickle.data, pickle.n);
        bytes_drop(&pickle);
        return status;
    }
    if (!c->whole || c->draft.nfiles == 1)
        return RSD_OK;
    struct text text = {0};
    rsd_status status = safetensors_index(&c->draft, &text);
    if (!status)
        status = part_write(part, "model.safetensors.index.json", text.chars, text.length);
    text_drop(&text);
    return status;
}

/* Copies a file into the folder, under its own name. */
static rsd_status add_side_file(const struct part *part, const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *folder = mem_copy(path, strlen(path) + 1, 1), *bytes = NULL;
    struct files files;
    uint32_t index;
    size_t n;
    if (!folder)
        return RSD_ENOMEM;
    folder[slash ? slash - path + (slash == path) : 0] = '\0';
    rsd_status status = files_open(&files, folder);
    mem_free(folder);
    TRY(status);
    status = files_add(&files, (struct slice){name, strlen(name)}, &index);
    if (!status)
        status = file_load(&files, index, MOST_SIDE_FILE, &bytes, &n);
    if (!status)
        status = part_write(part, name, bytes, n);
    mem_free(bytes);
    files_close(&files);
    return status;
}

static rsd_status write_all(struct converting *c, struct part *part, rsd_report *report)
{
    TRY(output_open(&c->output, &c->draft, part, c->in, -1));
    rsd_status status = begin(c, part);
    if (!status)
        status = list_jobs(c);
    if (!status)
        status = haul_all(c, report);
    if (!status)
        status = settle_names(c);
    for (int64_t i = 0; i < c->options.nside_files && !status; i++)
        status = add_side_file(part, c->options.side_files[i]);
    if (!status)
        status = write_marker(c, part);
    report->nbytes_needed = c->nbytes_needed;
    report->nbytes_written = (int64_t)c->output.nbytes_written;
    report->nfiles_written = c->output.nfiles_written;
    output_close(&c->output);
    return status;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

static rsd_status convert_to(struct converting *c, const char *out, bool one_file,
                             rsd_report *report)
{
    struct part part;
    TRY(part_open(&part, out, c->options.resume ? PART_RESUME : PART_NEW, c->options.overwrite != 0,
                  one_file));
    rsd_status status = write_all(c, &part, report);
    if (!status)
        status = part_publish(&part);
    bool keep = status == RSD_EIO || status == RSD_ECANCELLED || status == RSD_EEXIST ||
                (status == RSD_EMISMATCH && part.resumed);
    if (status && !keep)
        part_remove(&part);
    else
        part_close(&part);
    return status;
}

/* What a run would report. Compressed items are counted as if they were not. */
static void foresee(const struct converting *c, rsd_report *report)
{
    const struct contents *in = &c->in->contents;
    for (size_t t = 0; t < c->draft.contents.ntensors; t++)
        report->nbytes_needed += tensor_nbytes(in, &in->tensors[c->source_of[t]]);
    report->nbytes_read = report->nbytes_needed;
    for (size_t i = 0; i < c->draft.nfiles; i++)
        report->nbytes_written += (int64_t)c->draft.files[i].nbytes;
    report->nfiles_written = (int64_t)c->draft.nfiles;
}

rsd_status rsd_convert(rsd_checkpoint *in, const char *out, const rsd_convert_options *options,
                       rsd_report *report)
{
    struct converting c = {.in = in};
    rsd_report result = {0};
    double began = seconds_now();
    bool one_file = ends_with(out, ".safetensors");
    TRY(take_options("rsd_convert_options", options, &c.options, sizeof c.options));
    if (report)
        TRY(check_report("rsd_report", report));
    c.tile_limit = tile_limit(c.options.max_nbytes, c.options.pool);
    rsd_status status = convert_prepare(&c, one_file);
    if (!status && c.options.dry)
        status = part_check(out, c.options.overwrite != 0, one_file);
    if (!status && c.options.dry)
        foresee(&c, &result);
    else if (!status)
        status = convert_to(&c, out, one_file, &result);
    result.ntensors = (int64_t)c.nchosen;
    result.nleft_out = c.nleft_out;
    convert_drop(&c);
    if (status)
        return status;
    result.seconds = seconds_now() - began;
    if (report)
        give_report(report, &result, sizeof result);
    return RSD_OK;
}
