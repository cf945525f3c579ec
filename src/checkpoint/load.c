/* load.c - from files into memory.
 *
 * Everything is checked before the first byte of a tensor is read: that the tensors exist and match, and that some
 * file has every element. All arrays of one tensor are one job, so that bytes that several of them need are
 * read once. The job keeps the pieces of the plan that checked it.
 */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

/* A tensor of the caller, and its tensor in the checkpoint. */
struct load_target {
    size_t stored, given;
};

struct loading {
    struct operation operation;
    rsd_checkpoint *checkpoint;
    rsd_load_options options;
    rsd_tensor *given;
    struct load_target *targets;
    size_t ntargets;
    struct transfer *transfers; /* by job */
    struct job_list jobs;
};

/* ---- what is loaded ---- */

/* Checks that a stored tensor can be loaded into a layout. */
static rsd_status check_target(const struct loading *loading, const struct stored_tensor *tensor,
                               const rsd_layout *layout)
{
    TRY(layout_check_shape(layout, tensor->ndim,
                           tensor_shape(&loading->checkpoint->catalog, tensor)));
    if (layout->dtype != tensor->dtype && !loading->options.allow_cast)
        return fail(RSD_EMISMATCH, "dtype differs: checkpoint %s, layout %s",
                    rsd_dtype_name(tensor->dtype), rsd_dtype_name(layout->dtype));
    if (!dtype_casts(tensor->dtype, layout->dtype))
        return fail(RSD_EUNSUPPORTED, "%s cannot be converted to %s", rsd_dtype_name(tensor->dtype),
                    rsd_dtype_name(layout->dtype));
    if (layout->terms.ndigits > 0)
        return fail(RSD_EINVAL, "cannot load into a Partial layout");
    return RSD_OK;
}

/* Fails with the number and the first names of all tensors that the checkpoint lacks. */
static rsd_status fail_missing(const struct catalog *catalog, const rsd_tensor *given, size_t n)
{
    enum { MOST_MISSING = 3 };
    struct text names = {0};
    const char *first = "";
    size_t nmissing = 0;
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < n && !status; i++) {
        rsd_tensor tensor;
        status = arrays_take_tensor(given, (int64_t)i, &tensor);
        if (status || catalog_find_tensor(catalog, tensor.name) != SIZE_MAX)
            continue;
        first = nmissing ? first : tensor.name;
        if (nmissing++ < MOST_MISSING)
            text_add(&names, "%s%s", nmissing > 1 ? ", " : "", tensor.name);
    }
    if (!status && names.failed)
        status = fail(RSD_ENOMEM, "no memory for a message");
    if (status) {
        text_drop(&names);
        return status;
    }
    if (nmissing == 1)
        error_set("%s: the checkpoint has no such tensor", first);
    else
        error_set("%zu tensors are missing in the checkpoint: %s%s", nmissing, names.chars,
                  nmissing > MOST_MISSING ? ", ..." : "");
    text_drop(&names);
    return catalog_explain_missing(catalog, first);
}

/* Finds the stored tensor of each tensor of the caller, and checks it. */
static rsd_status find_targets(struct loading *loading, const rsd_tensor *given, size_t n)
{
    const struct catalog *catalog = &loading->checkpoint->catalog;
    for (size_t i = 0; i < n; i++) {
        rsd_tensor *tensor = &loading->given[i];
        TRY(arrays_take_tensor(given, (int64_t)i, tensor));
        size_t stored = catalog_find_tensor(catalog, tensor->name);
        if (stored == SIZE_MAX && loading->options.allow_missing)
            continue;
        if (stored == SIZE_MAX)
            return fail_missing(catalog, given, n);
        rsd_status status = check_target(loading, &catalog->tensors[stored], tensor->layout);
        if (status)
            return fail_in(status, "%s: ", tensor->name);
        loading->targets[loading->ntargets++] = (struct load_target){stored, i};
    }
    return RSD_OK;
}

static int by_stored_tensor(const void *a, const void *b)
{
    const struct load_target *x = a, *y = b;
    if (x->stored != y->stored)
        return x->stored < y->stored ? -1 : 1;
    return (x->given > y->given) - (x->given < y->given);
}

/* ---- jobs ---- */

/* Starts the transfer of targets [first, end), which are of one tensor, and adds their arrays as sinks. */
static rsd_status start_transfer(const struct loading *loading, size_t first, size_t end,
                                 struct transfer *transfer)
{
    struct array_slices boxes = {0};
    rsd_status status = RSD_OK;
    for (size_t i = first; i < end && !status; i++)
        status = arrays_list_slices(&loading->given[loading->targets[i].given], true, &boxes);
    if (!status)
        status = transfer_start(transfer, &loading->checkpoint->catalog,
                                loading->targets[first].stored, boxes.n);
    for (size_t i = 0; i < boxes.n && !status; i++) {
        const struct array_slice *box = &boxes.list[i];
        struct sink sink = {.kind = SINK_MEMORY, .dtype = box->dtype, .memory = box->memory};
        copy_i64s(sink.lo, box->box.lo, transfer->ndim);
        copy_i64s(sink.len, box->box.len, transfer->ndim);
        copy_i64s(sink.strides, box->strides, transfer->ndim);
        status = memory_find_device(box->memory, &sink.device);
        if (box->memory && !status)
            transfer_add_sink(transfer, &sink);
    }
    arrays_drop_slices(&boxes);
    return status;
}

/* Adds the job of one stored tensor, for targets [first, end). Plans it, which checks that files have every
 * element. */
static rsd_status add_load_job(struct loading *loading, size_t first, size_t end)
{
    const struct catalog *catalog = &loading->checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[loading->targets[first].stored];
    struct transfer *transfer = &loading->transfers[loading->jobs.n];
    rsd_status status = start_transfer(loading, first, end, transfer);
    if (!status)
        status = transfer_plan(transfer, catalog);
    if (status)
        return fail_in(status, "%s: ", tensor->name);
    TRY(format_check_loaded(loading->checkpoint, tensor, (uint64_t)transfer->nbytes));
    transfer->stream = transfer->nbytes >= STREAM_MIN_TOTAL;
    bool whole = transfer->nbytes >= tensor_nbytes(catalog, tensor);
    return job_list_add(&loading->jobs, (struct batch_job){.id = loading->jobs.n,
                                                           .of = transfer->nbytes,
                                                           .whole = whole ? tensor : NULL});
}

/* Lists one job for each stored tensor, with all arrays that are loaded from it. */
static rsd_status list_load_jobs(struct loading *loading, int64_t n, const rsd_tensor *given)
{
    if (n < 0)
        return fail(RSD_EINVAL, "invalid number of tensors %lld", (long long)n);
    struct load_target *targets = loading->targets = mem_new((size_t)n, sizeof *targets);
    loading->given = mem_new((size_t)n, sizeof *loading->given);
    loading->transfers = mem_new((size_t)n, sizeof *loading->transfers);
    if (!targets || !loading->given || !loading->transfers)
        return RSD_ENOMEM;
    TRY(find_targets(loading, given, (size_t)n));
    if (loading->ntargets > 1)
        qsort(targets, loading->ntargets, sizeof *targets, by_stored_tensor);
    for (size_t first = 0, end; first < loading->ntargets; first = end) {
        for (end = first + 1; end < loading->ntargets; end++)
            if (targets[end].stored != targets[first].stored)
                break;
        TRY(add_load_job(loading, first, end));
    }
    return RSD_OK;
}

static rsd_status load_open_job(void *context, const struct batch_job *job,
                                struct transfer *transfer)
{
    struct loading *loading = context;
    *transfer = loading->transfers[job->id];
    loading->transfers[job->id] = (struct transfer){0};
    TRY(transfer_open_files(transfer, loading->checkpoint, loading->operation.tile_limit));
    for (size_t i = 0; i < transfer->nsources; i++) /* nothing is read that is not needed */
        transfer->sources[i].scattered = false;
    return RSD_OK;
}

/* Runs the jobs of this rank. They keep the plans that list_load_jobs made. */
static rsd_status load_jobs(void *context)
{
    struct loading *loading = context;
    rsd_report *report = &loading->operation.report;
    struct batch batch = {.jobs = loading->jobs,
                          .from = loading->checkpoint,
                          .open = load_open_job,
                          .context = loading};
    report->ntensors = (int64_t)loading->jobs.n;
    loading->jobs = (struct job_list){0};
    TRY(operation_run_batch(&loading->operation, &batch, RSD_OK));
    report->nbytes_needed = batch.nbytes_total;
    return RSD_OK;
}

static void drop_loading(struct loading *loading, size_t n)
{
    for (size_t i = 0; loading->transfers && i < n; i++)
        transfer_drop(&loading->transfers[i]);
    job_list_drop(&loading->jobs);
    mem_free(loading->transfers);
    mem_free(loading->targets);
    mem_free(loading->given);
}

rsd_status rsd_load(rsd_checkpoint *checkpoint, int64_t n, const rsd_tensor *tensors,
                    const rsd_load_options *options, rsd_report *report)
{
    struct loading loading = {.checkpoint = checkpoint};
    struct operation_call call = {.work = load_jobs, .context = &loading};
    struct hash arguments;
    TRY(options_copy("rsd_load_options", options, &loading.options, sizeof loading.options));
    TRY(operation_open(&loading.operation, loading.options.io, report));
    hash_start(&arguments, "load");
    /* Each rank has arrays of its own. One rank may read n tensors with n calls, which must not take n * n steps. */
    if (loading.operation.nranks > 1)
        hash_catalog(&arguments, &checkpoint->catalog);
    rsd_status status = list_load_jobs(&loading, n, tensors);
    status = operation_agree(&loading.operation, status, arguments);
    if (!status)
        status = operation_run(&loading.operation, &call);
    drop_loading(&loading, (size_t)max_i64(n, 0));
    return operation_close(&loading.operation, status, report);
}

/* ---- one box ---- */

/* Checks that a box lies inside of a tensor. */
static rsd_status check_read_box(const rsd_tensor_info *tensor, const rsd_box *box)
{
    char text[BOX_TEXT_NCHARS], shape[SHAPE_TEXT_NCHARS];
    if (box->ndim != tensor->ndim)
        return fail(RSD_EINVAL, "%s: box has %d dims, tensor has %d", tensor->name, (int)box->ndim,
                    (int)tensor->ndim);
    for (int32_t d = 0; d < box->ndim; d++)
        if (box->lo[d] < 0 || box->len[d] < 0 || box->lo[d] > tensor->shape[d] ||
            box->len[d] > tensor->shape[d] - box->lo[d])
            return fail(RSD_EINVAL, "%s: box %s is not inside shape %s", tensor->name,
                        box_text(box->ndim, box->lo, box->len, text),
                        shape_text(tensor->ndim, tensor->shape, shape));
    return RSD_OK;
}

/* Loads a box into a dense array, as a layout of one explicit box. */
static rsd_status read_box(rsd_checkpoint *checkpoint, const rsd_tensor_info *tensor,
                           const rsd_box *box, rsd_dtype dtype, void *out, size_t nbytes)
{
    rsd_layout *layout;
    rsd_load_options options = {.struct_nbytes = sizeof options, .allow_cast = 1};
    rsd_tensor array = {.struct_nbytes = sizeof array, .name = tensor->name, .arrays = &out};
    TRY(check_read_box(tensor, box));
    TRY(catalog_boxes_layout(dtype, tensor->ndim, tensor->shape, 1, box->lo, box->len, &layout));
    size_t expected = (size_t)box_volume(box->ndim, box->len) * rsd_dtype_nbytes(dtype);
    array.layout = layout;
    rsd_status status = RSD_OK;
    if (nbytes != expected)
        status = fail(RSD_EINVAL, "%s: array has %zu bytes, and %zu are needed", tensor->name,
                      nbytes, expected);
    else
        status = rsd_load(checkpoint, 1, &array, &options, NULL);
    rsd_layout_free(layout);
    return status;
}

rsd_status rsd_read(rsd_checkpoint *checkpoint, const char *name, const rsd_box *box,
                    rsd_dtype dtype, void *out, size_t nbytes)
{
    int64_t index;
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_box whole = {0};
    TRY(rsd_checkpoint_find(checkpoint, name, &index));
    TRY(rsd_checkpoint_tensor(checkpoint, index, &tensor));
    box_set(&whole, tensor.ndim, whole.lo, tensor.shape);
    return read_box(checkpoint, &tensor, box ? box : &whole, dtype ? dtype : tensor.dtype, out,
                    nbytes);
}
