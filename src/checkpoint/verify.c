/* verify.c - reads everything that a checkpoint has, and reports what is wrong with it.
 *
 * Each stored box is read by itself, from its first byte to its last, so that every CRC-32 is checked. A finding
 * does not end the call.
 *
 * One process reports a finding at once. Many ranks keep them until all ranks are done, and then report them in
 * order: files that are missing or too short, elements that no file has, boxes, values.
 */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

/* What comparing boxes that overlap may cost: pairs besides one for each box, and bytes besides some times all of
 * them. */
enum { OVERLAPPING_PAIRS = 1 << 13, OVERLAPPING_NBYTES = 1 << 26, OVERLAPPING_READS = 4 };

enum finding_kind { FINDING_FILE, FINDING_COVERAGE, FINDING_BOX, FINDING_VALUE };

struct finding {
    uint64_t kind, index; /* of the file, tensor, extent or value */
    uint64_t text, ntext; /* in the texts */
};

struct verifying {
    struct operation operation;
    rsd_checkpoint *checkpoint;
    rsd_on_finding *on_finding;
    void *context;
    uint64_t *nbytes; /* of each file, 0 if it does not exist; UINT64_MAX: it is long enough */
    int64_t nfindings;
    rsd_status stopped;       /* the status that on_finding returned */
    struct finding *findings; /* of many ranks */
    size_t n, capacity;
    struct payload texts;
};

/* ---- findings ---- */

static void report_finding(struct verifying *v, const char *text)
{
    v->nfindings++;
    if (v->on_finding && !v->stopped)
        v->stopped = v->on_finding(v->context, text);
}

static rsd_status keep_finding(struct verifying *v, uint64_t kind, uint64_t index)
{
    size_t n = strlen(rsd_error());
    TRY(GROW(v->findings, v->capacity, v->n + 1));
    v->findings[v->n++] = (struct finding){kind, index, v->texts.n, n};
    return payload_put(&v->texts, rsd_error(), n);
}

/* Adds the last error to the findings. */
static rsd_status add_finding(struct verifying *v, uint64_t kind, uint64_t index)
{
    if (v->operation.nranks > 1)
        return keep_finding(v, kind, index);
    report_finding(v, rsd_error());
    return RSD_OK;
}

/* ---- reading ---- */

/* Finds files that are missing or too short. Each is one finding; what lies behind its end is not read. */
static rsd_status find_short_files(struct verifying *v)
{
    struct store *store = v->checkpoint->store;
    uint64_t *ends;
    TRY(format_find_ends(v->checkpoint, &ends));
    rsd_status status = RSD_OK;
    v->nbytes = mem_new((size_t)store->names.n + 1, sizeof *v->nbytes);
    for (uint32_t i = 0; v->nbytes && i < store->names.n && !status && !v->stopped; i++) {
        v->nbytes[i] = UINT64_MAX;
        if (!ends[i])
            continue;
        status = format_check_file(v->checkpoint, i, ends[i]);
        if (!status || status == RSD_ENOMEM)
            continue;
        status = add_finding(v, FINDING_FILE, i);
        if (store_stat(store, i, &v->nbytes[i], NULL))
            v->nbytes[i] = 0;
    }
    mem_free(ends);
    return v->stopped ? v->stopped : v->nbytes ? status : RSD_ENOMEM;
}

/* Returns whether an extent lies behind the end of its file. */
static bool is_lost(const struct verifying *v, const struct extent *extent)
{
    return extent->kind != EXTENT_NONE && extent_end(extent) > v->nbytes[extent->file];
}

/* Reports tensors that boxes do not cover, and boxes that overlap with different bytes. */
static rsd_status find_holes(struct verifying *v)
{
    const struct catalog *catalog = &v->checkpoint->catalog;
    for (size_t i = 0; i < catalog->ntensors && !v->stopped; i++) {
        rsd_status status = tensor_check_coverage(catalog, i);
        if (status == RSD_EMISMATCH || status == RSD_ELIMIT) {
            error_add_context("%s: ", v->checkpoint->store->path);
            TRY(add_finding(v, FINDING_COVERAGE, i));
        } else {
            TRY(status);
        }
    }
    return v->stopped;
}

static struct overlap_budget start_overlaps(const struct catalog *catalog)
{
    struct overlap_budget budget = {OVERLAPPING_PAIRS + catalog->nextents, OVERLAPPING_NBYTES};
    for (size_t i = 0; i < catalog->nextents; i++)
        if (catalog->extents[i].kind != EXTENT_NONE)
            budget.nbytes += OVERLAPPING_READS * extent_find_box(catalog, i).nbytes;
    return budget;
}

/* Compares boxes that overlap. Requires that the boxes do not claim more bytes than there can be. */
static rsd_status find_overlaps(struct verifying *v)
{
    const struct catalog *catalog = &v->checkpoint->catalog;
    struct overlap_budget budget = start_overlaps(catalog);
    for (size_t i = 0; i < catalog->ntensors && !v->stopped; i++) {
        rsd_status status = overlaps_check(v->checkpoint, i, v->operation.tile_limit, &budget);
        TRY(status == RSD_EFORMAT ? add_finding(v, FINDING_COVERAGE, i) : status);
    }
    return v->stopped;
}

/* Opens the transfer of a stored box, whose bytes are read, checked and discarded. */
static rsd_status verify_open_job(void *context, const struct batch_job *job,
                                  struct transfer *transfer)
{
    struct verifying *v = context;
    const struct catalog *catalog = &v->checkpoint->catalog;
    struct extent_box box = extent_find_box(catalog, job->id);
    int32_t ndim = box.tensor->ndim;
    struct sink sink = {.kind = SINK_DISCARD, .dtype = box.tensor->dtype, .ndim = ndim};
    copy_i64s(sink.lo, box.lo, ndim);
    copy_i64s(sink.len, box.len, ndim);
    TRY(transfer_start(transfer, catalog, box.index, 1));
    transfer_add_sink(transfer, &sink);
    return transfer_open_box(transfer, v->checkpoint, box.box, v->operation.tile_limit);
}

static bool verify_forgive(void *context, const struct batch_job *job, rsd_status status)
{
    struct verifying *v = context;
    if (status == RSD_ENOMEM || status == RSD_ECANCELLED)
        return false;
    return add_finding(v, FINDING_BOX, job->id) == RSD_OK && !v->stopped;
}

/* Reads every stored box, and adds findings for those that cannot be read or are damaged. */
static rsd_status read_boxes(struct verifying *v)
{
    const struct catalog *catalog = &v->checkpoint->catalog;
    struct batch batch = {.from = v->checkpoint,
                          .open = verify_open_job,
                          .forgive = verify_forgive,
                          .check_records = true,
                          .context = v};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < catalog->nextents && !status; i++) {
        const struct extent *extent = &catalog->extents[i];
        struct extent_box box = extent_find_box(catalog, i);
        struct batch_job job = {.id = i,
                                .of = extent->kind != EXTENT_NONE ? (int64_t)box.nbytes : 0,
                                .can_split = !extent->nzstd};
        if (box.box == 0 && v->operation.nranks == 1) /* its other boxes follow */
            job.whole = box.tensor;
        if (!is_lost(v, extent))
            status = job_list_add(&batch.jobs, job);
    }
    status = operation_run_part(&v->operation, &batch, status);
    v->operation.report.nbytes_needed = batch.nbytes_total;
    return v->stopped ? v->stopped : status;
}

/* Reads every value, and adds findings for those that cannot be read. */
static rsd_status read_values(struct verifying *v)
{
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(v->checkpoint); i++) {
        char *json;
        if (is_lost(v, &v->checkpoint->catalog.values[i].extent))
            continue;
        rsd_status status = rsd_checkpoint_value(v->checkpoint, i, &json);
        if (!status) {
            rsd_free(json);
            status = checkpoint_check_value(v->checkpoint, &v->checkpoint->catalog.values[i]);
        }
        if (status == RSD_ENOMEM)
            return status;
        if (status)
            TRY(add_finding(v, FINDING_VALUE, (uint64_t)i));
    }
    return v->stopped;
}

/* Compares boxes that overlap, on rank 0, and reads all boxes. If they claim far more bytes than there are, that is one
 * finding, and they are not read. */
static rsd_status read_plausible_boxes(struct verifying *v)
{
    bool leads = v->operation.rank == 0;
    rsd_status status = format_check_claims(v->checkpoint);
    if (status == RSD_EFORMAT || status == RSD_ENOENT)
        return leads ? add_finding(v, FINDING_COVERAGE, v->checkpoint->catalog.ntensors) : RSD_OK;
    TRY(status);
    if (leads)
        TRY(find_overlaps(v));
    return read_boxes(v);
}

/* Rank 0 checks coverage and values, which are small. */
static rsd_status verify_jobs(void *context)
{
    struct verifying *v = context;
    v->operation.report.ntensors = (int64_t)v->checkpoint->catalog.ntensors;
    TRY(find_short_files(v));
    if (v->operation.rank == 0)
        TRY(find_holes(v));
    TRY(read_plausible_boxes(v));
    return v->operation.rank == 0 && !v->stopped ? read_values(v) : v->stopped;
}

/* ---- between ranks ---- */

static rsd_status put_findings(void *context, struct payload *own)
{
    const struct verifying *v = context;
    TRY(payload_put_list(own, v->findings, v->n, sizeof *v->findings));
    return payload_put(own, v->texts.bytes, v->texts.n);
}

/* On rank 0: adds the findings of another rank. */
static rsd_status take_findings(void *context, const struct payload *sent, size_t *at)
{
    struct verifying *v = context;
    size_t first = v->n, base = v->texts.n;
    TRY(payload_take_list(sent, at, &v->findings, &v->n, &v->capacity, sizeof *v->findings));
    for (size_t i = first; i < v->n; i++) {
        struct finding *finding = &v->findings[i];
        if (finding->text > sent->n - *at || finding->ntext > sent->n - *at - finding->text)
            return fail(RSD_EPEER, "a rank sent a finding that is longer than its message");
        finding->text += base;
    }
    TRY(payload_put(&v->texts, sent->bytes + *at, sent->n - *at));
    *at = sent->n;
    return RSD_OK;
}

static rsd_status verify_damaged(void *context, size_t job)
{
    return keep_finding(context, FINDING_BOX, job);
}

static int by_kind_and_index(const void *a, const void *b)
{
    const struct finding *x = a, *y = b;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    if (x->index != y->index)
        return x->index < y->index ? -1 : 1;
    return (x->text > y->text) - (x->text < y->text);
}

/* A file that several ranks found too short is reported once, and so is a box that several ranks read a part of. */
static rsd_status put_sorted_findings(void *context, struct payload *result)
{
    struct verifying *v = context;
    if (v->n > 1)
        qsort(v->findings, v->n, sizeof *v->findings, by_kind_and_index);
    for (size_t i = 0; i < v->n; i++) {
        const struct finding *one = &v->findings[i];
        bool once = one->kind == FINDING_FILE || one->kind == FINDING_BOX;
        if (i > 0 && once && one->kind == one[-1].kind && one->index == one[-1].index)
            continue;
        TRY(payload_put_list(result, v->texts.bytes + one->text, (size_t)one->ntext, 1));
    }
    return RSD_OK;
}

/* Passes the findings of all ranks to the caller, in the order of the checkpoint. */
static rsd_status report_findings(void *context, const struct payload *result, size_t *at)
{
    struct verifying *v = context;
    while (*at < result->n && !v->stopped) {
        char *text = NULL;
        size_t n = 0, capacity = 0;
        rsd_status status = payload_take_list(result, at, &text, &n, &capacity, 1);
        if (!status)
            status = GROW(text, capacity, n + 1);
        if (!status) {
            text[n] = '\0';
            report_finding(v, text);
        }
        mem_free(text);
        TRY(status);
    }
    return v->stopped;
}

/* ---- the call ---- */

rsd_status rsd_verify(rsd_checkpoint *checkpoint, const rsd_io *io, rsd_on_finding *on_finding,
                      void *context, int64_t *nfindings, rsd_report *report)
{
    struct verifying v = {.checkpoint = checkpoint, .on_finding = on_finding, .context = context};
    struct operation_call call = {.from = {checkpoint},
                                  .work = verify_jobs,
                                  .put = put_findings,
                                  .take = take_findings,
                                  .damaged = verify_damaged,
                                  .put_result = put_sorted_findings,
                                  .take_result = report_findings,
                                  .context = &v};
    struct hash arguments;
    TRY(operation_open(&v.operation, io, report));
    hash_start(&arguments, "verify");
    hash_catalog(&arguments, &checkpoint->catalog);
    rsd_status status = operation_agree(&v.operation, RSD_OK, arguments);
    if (!status)
        status = operation_run(&v.operation, &call);
    mem_free(v.findings);
    mem_free(v.nbytes);
    payload_drop(&v.texts);
    if (!status)
        *nfindings = v.nfindings;
    return operation_close(&v.operation, status, report);
}
