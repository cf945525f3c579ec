/* verify.c - reads everything a checkpoint has, and tells what is wrong with it.
 *
 * Each stored box is read by itself, from its first byte to its last, so that every CRC-32 is checked. What
 * is found does not end it: the rest is looked at too.
 *
 * A process alone tells what it finds as it finds it. Many ranks keep it until all is known, and then tell
 * it in order: what nobody has, what is wrong with a box, what is wrong with a value.
 */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

/* Where a finding stands among all. */
enum { ABOUT_COVERAGE, ABOUT_BOXES, ABOUT_VALUES };
struct finding {
    uint64_t about, index; /* tensor, extent or value */
    uint64_t rank;
    size_t text, ntext; /* in the texts of its rank */
};

struct verifying {
    rsd_checkpoint *checkpoint;
    rsd_pool *pool;
    size_t *tensor_of; /* by extent */
    uint64_t tile_limit;
    rsd_on_finding *on_finding;
    void *context;
    int64_t nfindings;
    rsd_status stopped; /* what the one who is told answered */
    struct operation operation;
    struct peer_step step;
    struct partition mine; /* of the extents */
    struct partial_crc_list seen;
    struct finding *kept; /* of many ranks */
    size_t nkept, kept_capacity;
    struct payload texts;
    rsd_report report;
};

static void tell_one(struct verifying *v, const char *text)
{
    v->nfindings++;
    if (v->on_finding && !v->stopped)
        v->stopped = v->on_finding(v->context, text);
}

/* Tells of the last error, or keeps it. */
static rsd_status tell(struct verifying *v, uint64_t about, uint64_t index)
{
    size_t n = strlen(rsd_error());
    if (v->operation.nranks == 1) {
        tell_one(v, rsd_error());
        return RSD_OK;
    }
    TRY(GROW(v->kept, v->kept_capacity, v->nkept + 1));
    v->kept[v->nkept++] = (struct finding){
        .about = about, .index = index, .rank = (uint64_t)v->operation.rank, .text = v->texts.n, n};
    return payload_put(&v->texts, rsd_error(), n);
}

/* ---- coverage ---- */

static rsd_status check_coverage(struct verifying *v, size_t index)
{
    const struct stored_tensor *tensor = &v->checkpoint->catalog.tensors[index];
    rsd_layout *layout;
    rsd_coverage check = {.struct_nbytes = sizeof check};
    char text[BOX_TEXT_NCHARS];
    TRY(catalog_tensor_layout(&v->checkpoint->catalog, tensor, true, &layout));
    rsd_status status = rsd_layout_coverage(layout, &check);
    rsd_layout_free(layout);
    TRY(status);
    if (check.kind != RSD_MISSES)
        return RSD_OK;
    error_set("%s: %s: no file has %s", v->checkpoint->store->path, tensor->name,
              box_text(check.box.ndim, check.box.lo, check.box.len, text));
    return tell(v, ABOUT_COVERAGE, index);
}

/* ---- bytes ---- */

static rsd_status open_job(void *context, size_t job, struct transfer *transfer)
{
    struct verifying *v = context;
    const struct catalog *catalog = &v->checkpoint->catalog;
    size_t extent = v->mine.list[job].job;
    const struct stored_tensor *tensor = &catalog->tensors[v->tensor_of[extent]];
    size_t box = extent - tensor->first_extent;
    struct sink sink = {.kind = SINK_DISCARD, .dtype = tensor->dtype, .ndim = tensor->ndim};
    copy_i64s(sink.lo, tensor_box_lo(catalog, tensor, box), tensor->ndim);
    copy_i64s(sink.len, tensor_box_len(catalog, tensor, box), tensor->ndim);
    TRY(transfer_start(transfer, catalog, v->tensor_of[extent], 1));
    transfer_add_sink(transfer, &sink);
    return transfer_from_box(transfer, v->checkpoint, v->tensor_of[extent], box, v->tile_limit);
}

/* The tensor of which a job reads the first box, for reading ahead: the others follow. */
static size_t whole_verified_tensor(void *context, size_t job)
{
    const struct verifying *v = context;
    size_t extent = v->mine.list[job].job, tensor = v->tensor_of[extent];
    bool first = extent == v->checkpoint->catalog.tensors[tensor].first_extent;
    return first && v->operation.nranks == 1 ? tensor : SIZE_MAX;
}

static rsd_status close_job(void *context, size_t job, struct transfer *transfer)
{
    (void)context, (void)job, (void)transfer;
    return RSD_OK;
}

static bool forgive(void *context, size_t job, rsd_status status)
{
    struct verifying *v = context;
    if (status == RSD_ENOMEM || status == RSD_ECANCELLED)
        return false;
    return tell(v, ABOUT_BOXES, v->mine.list[job].job) == RSD_OK && !v->stopped;
}

static rsd_status share_boxes(struct verifying *v)
{
    const struct catalog *catalog = &v->checkpoint->catalog;
    int64_t *nbytes = mem_new(catalog->nextents, sizeof *nbytes);
    bool *splits = mem_new(catalog->nextents, sizeof *splits);
    v->tensor_of = mem_new(catalog->nextents, sizeof *v->tensor_of);
    rsd_status status = v->tensor_of && nbytes && splits ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < catalog->ntensors && !status; t++)
        for (size_t box = 0; box < catalog->tensors[t].nboxes; box++) {
            size_t extent = catalog->tensors[t].first_extent + box;
            v->tensor_of[extent] = t;
            nbytes[extent] = (int64_t)box_nbytes(catalog, &catalog->tensors[t], box);
            splits[extent] = !catalog->extents[extent].nzstd;
        }
    if (!status)
        status = partition_jobs(v->operation.rank, v->operation.nranks, nbytes, splits,
                                catalog->nextents, &v->mine);
    mem_free(nbytes);
    mem_free(splits);
    return status;
}

static rsd_status read_boxes(struct verifying *v)
{
    struct batch batch = {.pool = v->pool,
                          .from = v->checkpoint,
                          .whole_tensor = whole_verified_tensor,
                          .open = open_job,
                          .close = close_job,
                          .forgive = forgive,
                          .context = v,
                          .seen = &v->seen};
    TRY(share_boxes(v));
    batch.parts = v->mine.list;
    operation_follow(&v->operation, &batch);
    TRY(batch_run_evenly(&batch, v->mine.nbytes, v->mine.n));
    report_add_stats(&v->report, &batch.stats);
    v->report.nbytes_needed = batch.nbytes_total;
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
            TRY(tell(v, ABOUT_VALUES, (uint64_t)i));
        else
            rsd_free(json);
    }
    return v->stopped;
}

/* Rank 0 looks at what is small: coverage and values. */
static rsd_status run(void *context)
{
    struct verifying *v = context;
    size_t ntensors = v->checkpoint->catalog.ntensors;
    rsd_status status = RSD_OK;
    for (size_t t = 0; t < ntensors && v->operation.rank == 0 && !status && !v->stopped; t++)
        status = check_coverage(v, t);
    if (!status && !v->stopped)
        status = read_boxes(v);
    if (!status && !v->stopped && v->operation.rank == 0)
        status = read_values(v);
    v->report.ntensors = (int64_t)ntensors;
    TRY(v->stopped); /* as the one who was told wanted */
    TRY(status);
    struct payload *own = &v->step.own;
    TRY(payload_put_report(&v->operation, own, &v->report));
    TRY(payload_put_list(own, v->seen.list, v->seen.n, sizeof *v->seen.list));
    TRY(payload_put_list(own, v->kept, v->nkept, sizeof *v->kept));
    return payload_put(own, v->texts.bytes, v->texts.n);
}

/* ---- together ---- */

/* What is heard of all ranks. */
struct findings {
    struct verifying *v;
    struct finding *list;
    size_t n, capacity;
    struct payload texts;
};

static int by_order(const void *a, const void *b)
{
    const struct finding *x = a, *y = b;
    if (x->about != y->about)
        return x->about < y->about ? -1 : 1;
    if (x->index != y->index)
        return x->index < y->index ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static rsd_status damaged(void *context, const struct partial_crc *seen, rsd_status status)
{
    struct findings *f = context;
    const struct verifying *v = f->v;
    const struct stored_tensor *tensor = &v->checkpoint->catalog.tensors[v->tensor_of[seen->job]];
    store_fail_in(v->checkpoint->store, (uint32_t)seen->file,
                  fail_in(status, "%.300s: ", tensor->name));
    TRY(GROW(f->list, f->capacity, f->n + 1));
    f->list[f->n++] = (struct finding){
        .about = ABOUT_BOXES, .index = seen->job, .text = f->texts.n, .ntext = strlen(rsd_error())};
    return payload_put(&f->texts, rsd_error(), strlen(rsd_error()));
}

/* A box that several ranks read a part of is damaged once. */
static rsd_status say_findings(struct findings *f, const rsd_report *report, struct payload *result)
{
    TRY(payload_put(result, report, sizeof *report));
    if (f->n > 1)
        qsort(f->list, f->n, sizeof *f->list, by_order);
    for (size_t i = 0; i < f->n; i++) {
        const struct finding *one = &f->list[i];
        uint64_t n = one->ntext;
        if (i > 0 && one->about == ABOUT_BOXES && one[-1].about == ABOUT_BOXES &&
            one->index == one[-1].index)
            continue;
        TRY(payload_put(result, &n, sizeof n));
        TRY(payload_put(result, f->texts.bytes + one->text, one->ntext));
    }
    return RSD_OK;
}

static rsd_status hear_findings(struct findings *f, const struct payload *payload, size_t *at)
{
    size_t first = f->n, base = f->texts.n;
    TRY(payload_take_list(payload, at, &f->list, &f->n, &f->capacity, sizeof *f->list));
    for (size_t i = first; i < f->n; i++) {
        if (f->list[i].text > payload->n - *at ||
            f->list[i].ntext > payload->n - *at - f->list[i].text)
            return fail(RSD_EPEER, "a rank tells of more findings than it said");
        f->list[i].text += base;
    }
    return payload_put(&f->texts, payload->bytes + *at, payload->n - *at);
}

static rsd_status merge(void *context, const struct payload *all, struct payload *result)
{
    struct verifying *v = context;
    struct findings f = {.v = v};
    struct partial_crc *seen = NULL;
    size_t nseen = 0, capacity = 0;
    rsd_report report = {0};
    rsd_status status = RSD_OK;
    for (int32_t rank = 0; rank < v->operation.nranks && !status; rank++) {
        size_t at = 0;
        status = payload_take_report(&all[rank], &at, &report);
        if (!status)
            status = payload_take_list(&all[rank], &at, &seen, &nseen, &capacity, sizeof *seen);
        if (!status)
            status = hear_findings(&f, &all[rank], &at);
    }
    if (!status)
        status = partial_crcs_check(seen, nseen, &report, damaged, &f);
    if (!status)
        status = say_findings(&f, &report, result);
    mem_free(seen);
    mem_free(f.list);
    payload_drop(&f.texts);
    return status;
}

static rsd_status tell_heard(struct verifying *v)
{
    const struct payload *result = &v->step.result;
    size_t at = 0;
    TRY(payload_take(result, &at, &v->report, sizeof v->report));
    while (at < result->n && !v->stopped) {
        uint64_t n;
        TRY(payload_take(result, &at, &n, sizeof n));
        char *text = mem_new((size_t)n + 1, 1);
        if (!text)
            return RSD_ENOMEM;
        rsd_status status = payload_take(result, &at, text, (size_t)n);
        if (!status)
            tell_one(v, text);
        mem_free(text);
        TRY(status);
    }
    return v->stopped;
}

static rsd_status verify(struct verifying *v)
{
    struct hash what;
    hash_start(&what, "verify");
    catalog_hash(&v->checkpoint->catalog, &what);
    TRY(operation_agree(&v->operation, RSD_OK, what, &v->tile_limit));
    TRY(operation_step(&v->operation, &v->step));
    return tell_heard(v);
}

rsd_status rsd_verify(rsd_checkpoint *checkpoint, const rsd_prove_options *given,
                      rsd_on_finding *on_finding, void *context, int64_t *nfindings,
                      rsd_report *report)
{
    rsd_prove_options options;
    TRY(options_copy("rsd_prove_options", given, &options, sizeof options));
    if (report)
        TRY(report_check("rsd_report", report));
    struct verifying v = {.checkpoint = checkpoint,
                          .pool = options.pool,
                          .on_finding = on_finding,
                          .context = context,
                          .tile_limit = tile_limit(options.max_nbytes, options.pool)};
    TRY(operation_open(&v.operation, options.transport, options.timeout, options.on_progress,
                       options.context));
    partial_crcs_open(&v.seen);
    v.step.work = run;
    v.step.merge = merge;
    v.step.context = &v;
    rsd_status status = verify(&v);
    mem_free(v.tensor_of);
    mem_free(v.kept);
    partition_drop(&v.mine);
    partial_crcs_close(&v.seen);
    payload_drop(&v.texts);
    payload_drop(&v.step.own);
    payload_drop(&v.step.result);
    if (status)
        return status;
    *nfindings = v.nfindings;
    if (report)
        report_copy(report, &v.report, sizeof v.report);
    return RSD_OK;
}
