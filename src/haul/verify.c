/* verify.c - reads everything a checkpoint has, and tells what is wrong with it.
 *
 * Each stored box is read by itself, from its first byte to its last, so that every CRC-32 is checked. What
 * is found does not end it: the rest is looked at too.
 */
#include "haul.h"

#include <string.h>

struct verifying {
    rsd_checkpoint *checkpoint;
    size_t *tensor_of; /* by job, which is an extent */
    uint64_t tile_limit;
    rsd_on_finding *on_finding;
    void *context;
    int64_t nfindings;
    rsd_status stopped; /* what the one who is told answered */
};

/* Tells of the last error. */
static void tell(struct verifying *v)
{
    v->nfindings++;
    if (v->on_finding && !v->stopped)
        v->stopped = v->on_finding(v->context, rsd_error());
}

/* ---- coverage ---- */

static rsd_status check_coverage(struct verifying *v, const struct tensor *tensor)
{
    rsd_layout *layout;
    rsd_check check = {.struct_nbytes = sizeof check};
    char text[BOX_TEXT_NCHARS];
    TRY(tensor_layout(&v->checkpoint->contents, tensor, true, &layout));
    rsd_status status = rsd_layout_check(layout, &check);
    rsd_layout_free(layout);
    TRY(status);
    if (check.cover == RSD_MISSES) {
        set_error("%s: %s: no file has %s", v->checkpoint->files.folder, tensor->name,
                  box_text(check.box.ndim, check.box.lo, check.box.len, text));
        tell(v);
    }
    return RSD_OK;
}

/* ---- bytes ---- */

static rsd_status open_job(void *context, size_t job, struct haul *haul)
{
    struct verifying *v = context;
    const struct contents *contents = &v->checkpoint->contents;
    const struct tensor *tensor = &contents->tensors[v->tensor_of[job]];
    size_t box = job - tensor->first_extent;
    struct sink sink = {.kind = SINK_DISCARD, .dtype = tensor->dtype, .ndim = tensor->ndim};
    copy_i64s(sink.lo, tensor_box_lo(contents, tensor, box), tensor->ndim);
    copy_i64s(sink.len, tensor_box_len(contents, tensor, box), tensor->ndim);
    TRY(haul_start(haul, contents, v->tensor_of[job], 1));
    haul_add_sink(haul, &sink);
    return haul_from_box(haul, v->checkpoint, v->tensor_of[job], box, v->tile_limit);
}

static rsd_status close_job(void *context, size_t job, struct haul *haul)
{
    (void)context, (void)job, (void)haul;
    return RSD_OK;
}

static bool forgive(void *context, size_t job, rsd_status status)
{
    struct verifying *v = context;
    (void)job;
    if (status == RSD_ENOMEM || status == RSD_ECANCELLED)
        return false;
    tell(v);
    return !v->stopped;
}

static rsd_status read_boxes(struct verifying *v, const rsd_prove_options *options,
                             rsd_report *report)
{
    const struct contents *contents = &v->checkpoint->contents;
    int64_t *nbytes = mem_new(contents->nextents, sizeof *nbytes);
    struct transfer transfer = {.pool = options->pool,
                                .open = open_job,
                                .close = close_job,
                                .forgive = forgive,
                                .context = v,
                                .on_progress = options->on_progress,
                                .progress_context = options->context};
    v->tensor_of = mem_new(contents->nextents, sizeof *v->tensor_of);
    rsd_status status = v->tensor_of && nbytes ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < contents->ntensors && !status; t++)
        for (size_t box = 0; box < contents->tensors[t].nboxes; box++) {
            size_t extent = contents->tensors[t].first_extent + box;
            v->tensor_of[extent] = t;
            nbytes[extent] = (int64_t)box_nbytes(contents, &contents->tensors[t], box);
        }
    if (!status)
        status = transfer_run_evenly(&transfer, nbytes, contents->nextents);
    mem_free(nbytes);
    TRY(status);
    report_tally(report, &transfer.tally);
    report->nbytes_needed = transfer.nbytes_total;
    return RSD_OK;
}

static rsd_status read_values(struct verifying *v)
{
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(v->checkpoint); i++) {
        char *json;
        rsd_status status = rsd_checkpoint_value(v->checkpoint, i, &json);
        if (status == RSD_ENOMEM)
            return status;
        if (status)
            tell(v);
        else
            rsd_free(json);
    }
    return v->stopped;
}

rsd_status rsd_verify(rsd_checkpoint *checkpoint, const rsd_prove_options *given,
                      rsd_on_finding *on_finding, void *context, int64_t *nfindings,
                      rsd_report *report)
{
    rsd_prove_options options;
    rsd_report result = {0};
    double began = seconds_now();
    TRY(take_options("rsd_prove_options", given, &options, sizeof options));
    if (report)
        TRY(check_report("rsd_report", report));
    struct verifying v = {.checkpoint = checkpoint,
                          .on_finding = on_finding,
                          .context = context,
                          .tile_limit = tile_limit(options.max_nbytes, options.pool)};
    rsd_status status = RSD_OK;
    for (size_t t = 0; t < checkpoint->contents.ntensors && !status && !v.stopped; t++)
        status = check_coverage(&v, &checkpoint->contents.tensors[t]);
    if (!status && !v.stopped)
        status = read_boxes(&v, &options, &result);
    if (!status && !v.stopped)
        status = read_values(&v);
    mem_free(v.tensor_of);
    if (v.stopped)
        return v.stopped; /* as the one who was told wanted */
    if (status)
        return status;
    *nfindings = v.nfindings;
    result.ntensors = (int64_t)checkpoint->contents.ntensors;
    result.seconds = seconds_now() - began;
    if (report)
        give_report(report, &result, sizeof result);
    return RSD_OK;
}
