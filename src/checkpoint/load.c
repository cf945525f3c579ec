/* load.c - from files into memory.
 *
 * Everything is checked before the first byte of a tensor is read: that the tensors are there, fit, and
 * that some file has every element that is wanted. All locals of one tensor are loaded together, so that
 * bytes which several of them want are read once.
 */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

struct wanted {
    size_t tensor; /* SIZE_MAX: not there, and that is allowed */
    size_t local;
};

struct loading {
    rsd_checkpoint *checkpoint;
    const rsd_tensor *locals;
    const rsd_load_options *options;
    struct wanted *wanted; /* by tensor */
    size_t nwanted;
    size_t *first; /* of each job in wanted; one more at the end */
    size_t njobs;
    int64_t *job_nbytes;
    uint64_t tile_limit;
    struct operation operation;
    struct peer_step step;
    rsd_report report;
};

/* ---- what is wanted ---- */

static rsd_status check_local(const struct loading *loading, const struct stored_tensor *tensor,
                              const rsd_tensor *local)
{
    const rsd_layout *layout = local->layout;
    const int64_t *shape = tensor_shape(&loading->checkpoint->catalog, tensor);
    char saved[SHAPE_TEXT_NCHARS], wanted[SHAPE_TEXT_NCHARS];
    bool same = layout->ndim == tensor->ndim;
    for (int32_t d = 0; d < layout->ndim && same; d++)
        same = layout->shape[d] == shape[d];
    if (!same)
        return fail(RSD_EMISMATCH, "saved with shape %s, wanted with %s",
                    shape_text(tensor->ndim, shape, saved),
                    shape_text(layout->ndim, layout->shape, wanted));
    if (layout->dtype != tensor->dtype && !loading->options->allow_cast)
        return fail(RSD_EMISMATCH, "saved as %s, wanted as %s", rsd_dtype_name(tensor->dtype),
                    rsd_dtype_name(layout->dtype));
    if (!cast_supported(layout->dtype, tensor->dtype))
        return fail(RSD_EUNSUPPORTED, "%s cannot become %s", rsd_dtype_name(tensor->dtype),
                    rsd_dtype_name(layout->dtype));
    if (layout->terms.ndigits > 0)
        return fail(RSD_EINVAL, "a Partial layout cannot be loaded into");
    return RSD_OK;
}

static rsd_status find_wanted(struct loading *loading, const rsd_tensor *given, int64_t n,
                              rsd_tensor *locals)
{
    const struct catalog *catalog = &loading->checkpoint->catalog;
    for (int64_t i = 0; i < n; i++) {
        TRY(take_local(given, i, &locals[i]));
        size_t tensor = catalog_find_tensor(catalog, locals[i].name);
        if (tensor == SIZE_MAX && loading->options->allow_missing)
            continue;
        rsd_status status = RSD_OK;
        if (tensor == SIZE_MAX)
            status = fail(RSD_EMISMATCH, "the checkpoint has no such tensor");
        else
            status = check_local(loading, &catalog->tensors[tensor], &locals[i]);
        if (status)
            return fail_in(status, "%s: ", locals[i].name);
        loading->wanted[loading->nwanted++] = (struct wanted){tensor, (size_t)i};
    }
    return RSD_OK;
}

static int by_tensor(const void *a, const void *b)
{
    const struct wanted *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return (x->local > y->local) - (x->local < y->local);
}

static void group_wanted(struct loading *loading)
{
    struct wanted *wanted = loading->wanted;
    if (loading->nwanted > 1)
        qsort(wanted, loading->nwanted, sizeof *wanted, by_tensor);
    for (size_t i = 0; i < loading->nwanted; i++)
        if (i == 0 || wanted[i].tensor != wanted[i - 1].tensor)
            loading->first[loading->njobs++] = i;
    loading->first[loading->njobs] = loading->nwanted;
}

/* ---- one tensor ---- */

static rsd_status collect(const struct loading *loading, size_t job, struct local_boxes *boxes)
{
    for (size_t i = loading->first[job]; i < loading->first[job + 1]; i++) {
        const rsd_tensor *local = &loading->locals[loading->wanted[i].local];
        size_t before = boxes->n, kept = before;
        TRY(local_boxes(local, true, boxes));
        for (size_t k = before; k < boxes->n; k++) /* without the empty ones */
            if (box_volume(boxes->list[k].box.ndim, boxes->list[k].box.len) > 0)
                boxes->list[kept++] = boxes->list[k];
        boxes->n = kept;
    }
    return RSD_OK;
}

static rsd_status open_job(void *context, size_t job, struct transfer *transfer)
{
    struct loading *loading = context;
    size_t tensor = loading->wanted[loading->first[job]].tensor;
    struct local_boxes boxes = {0};
    int64_t nbytes = 0;
    rsd_status status = collect(loading, job, &boxes);
    if (!status)
        status = transfer_start(transfer, &loading->checkpoint->catalog, tensor, boxes.n);
    for (size_t i = 0; i < boxes.n && !status; i++) {
        const struct local_box *box = &boxes.list[i];
        struct sink sink = {.kind = SINK_MEMORY, .dtype = box->dtype, .memory = box->memory};
        copy_i64s(sink.lo, box->box.lo, transfer->ndim);
        copy_i64s(sink.len, box->box.len, transfer->ndim);
        copy_i64s(sink.strides, box->strides, transfer->ndim);
        transfer_add_sink(transfer, &sink);
        nbytes += box_volume(transfer->ndim, sink.len) * (int64_t)rsd_dtype_nbytes(sink.dtype);
    }
    transfer->stream = nbytes >= STREAM_MIN_TOTAL;
    if (!status)
        status = transfer_from_files(transfer, loading->checkpoint, tensor, loading->tile_limit);
    local_boxes_drop(&boxes);
    return status;
}

/* A tensor of which all is loaded, for reading ahead. */
static size_t whole_loaded_tensor(void *context, size_t job)
{
    const struct loading *loading = context;
    const struct catalog *catalog = &loading->checkpoint->catalog;
    size_t tensor = loading->wanted[loading->first[job]].tensor;
    bool whole = loading->job_nbytes[job] >= tensor_nbytes(catalog, &catalog->tensors[tensor]);
    return whole ? tensor : SIZE_MAX;
}

static rsd_status close_job(void *context, size_t job, struct transfer *transfer)
{
    (void)context;
    (void)job;
    (void)transfer;
    return RSD_OK;
}

/* Is everything there? A plan says so, before any haul reads. */
static rsd_status check_job(struct loading *loading, size_t job)
{
    const struct catalog *catalog = &loading->checkpoint->catalog;
    const struct stored_tensor *tensor =
        &catalog->tensors[loading->wanted[loading->first[job]].tensor];
    size_t ndim = (size_t)tensor->ndim, element_nbytes = rsd_dtype_nbytes(tensor->dtype);
    struct local_boxes boxes = {0};
    rsd_plan *plan = NULL;
    rsd_status status = collect(loading, job, &boxes);
    int64_t *lo = mem_new(boxes.n * ndim, sizeof *lo), *len = mem_new(boxes.n * ndim, sizeof *len);
    if (!status && (!lo || !len))
        status = RSD_ENOMEM;
    for (size_t i = 0; i < boxes.n && !status; i++) {
        copy_i64s(lo + i * ndim, boxes.list[i].box.lo, tensor->ndim);
        copy_i64s(len + i * ndim, boxes.list[i].box.len, tensor->ndim);
        loading->job_nbytes[job] +=
            box_volume(tensor->ndim, len + i * ndim) * (int64_t)element_nbytes;
    }
    if (!status)
        status = transfer_plan(catalog, tensor, boxes.n, lo, len, &plan);
    rsd_plan_free(plan);
    mem_free(lo);
    mem_free(len);
    local_boxes_drop(&boxes);
    return status ? fail_in(status, "%s: ", tensor->name) : RSD_OK;
}

static rsd_status check_jobs(struct loading *loading)
{
    for (size_t job = 0; job < loading->njobs; job++)
        TRY(check_job(loading, job));
    return RSD_OK;
}

static rsd_status run(void *context)
{
    struct loading *loading = context;
    struct batch batch = {.pool = loading->options->pool,
                          .from = loading->checkpoint,
                          .whole_tensor = whole_loaded_tensor,
                          .open = open_job,
                          .close = close_job,
                          .context = loading};
    operation_follow(&loading->operation, &batch);
    TRY(batch_run_evenly(&batch, loading->job_nbytes, loading->njobs));
    report_add_stats(&loading->report, &batch.stats);
    loading->report.ntensors = (int64_t)loading->njobs;
    loading->report.nbytes_needed = batch.nbytes_total;
    return payload_put_report(&loading->operation, &loading->step.own, &loading->report);
}

static rsd_status merge(void *context, const struct payload *all, struct payload *result)
{
    const struct loading *loading = context;
    return merge_reports(&loading->operation, all, result);
}

/* Every rank has its own arrays; what they have in common is the checkpoint. */
static rsd_status load(struct loading *loading, const rsd_tensor *given, int64_t nlocals,
                       rsd_tensor *locals)
{
    struct hash what;
    rsd_status status = RSD_OK;
    size_t at = 0;
    if (!locals || !loading->wanted || !loading->first || !loading->job_nbytes)
        status = RSD_ENOMEM;
    if (!status && nlocals < 0)
        status = fail(RSD_EINVAL, "%lld locals", (long long)nlocals);
    if (!status)
        status = find_wanted(loading, given, nlocals, locals);
    if (!status) {
        group_wanted(loading);
        status = check_jobs(loading);
    }
    hash_start(&what, "load");
    catalog_hash(&loading->checkpoint->catalog, &what);
    TRY(operation_agree(&loading->operation, status, what, NULL));
    TRY(operation_step(&loading->operation, &loading->step));
    return payload_take(&loading->step.result, &at, &loading->report, sizeof loading->report);
}

rsd_status rsd_load(rsd_checkpoint *checkpoint, int64_t nlocals, const rsd_tensor *given,
                    const rsd_load_options *given_options, rsd_report *report)
{
    rsd_load_options options;
    TRY(options_copy("rsd_load_options", given_options, &options, sizeof options));
    if (report)
        TRY(report_check("rsd_report", report));
    size_t n = (size_t)max_i64(nlocals, 0);
    struct loading loading = {.checkpoint = checkpoint,
                              .options = &options,
                              .tile_limit = tile_limit(options.max_nbytes, options.pool)};
    TRY(operation_open(&loading.operation, options.transport, options.timeout, options.on_progress,
                       options.context));
    loading.step.work = run;
    loading.step.merge = merge;
    loading.step.context = &loading;
    rsd_tensor *locals = mem_new(n, sizeof *locals);
    loading.locals = locals;
    loading.wanted = mem_new(n, sizeof *loading.wanted);
    loading.first = mem_new(n + 1, sizeof *loading.first);
    loading.job_nbytes = mem_new(n, sizeof *loading.job_nbytes);
    rsd_status status = load(&loading, given, nlocals, locals);
    mem_free(locals);
    mem_free(loading.wanted);
    mem_free(loading.first);
    mem_free(loading.job_nbytes);
    payload_drop(&loading.step.own);
    payload_drop(&loading.step.result);
    if (!status && report)
        report_copy(report, &loading.report, sizeof loading.report);
    return status;
}
