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
    struct spread spread;
    struct joint_step step;
    struct portions mine; /* of the extents */
    struct seen_list seen;
    struct finding *kept; /* of many ranks */
    size_t nkept, room_kept;
    struct said texts;
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
    if (v->spread.nranks == 1) {
        tell_one(v, rsd_error());
        return RSD_OK;
    }
    TRY(GROW(v->kept, v->room_kept, v->nkept + 1));
    v->kept[v->nkept++] = (struct finding){
        .about = about, .index = index, .rank = (uint64_t)v->spread.rank, .text = v->texts.n, n};
    return said_add(&v->texts, rsd_error(), n);
}

/* ---- coverage ---- */

static rsd_status check_coverage(struct verifying *v, size_t index)
{
    const struct tensor *tensor = &v->checkpoint->contents.tensors[index];
    rsd_layout *layout;
    rsd_check check = {.struct_nbytes = sizeof check};
    char text[BOX_TEXT_NCHARS];
    TRY(tensor_layout(&v->checkpoint->contents, tensor, true, &layout));
    rsd_status status = rsd_layout_check(layout, &check);
    rsd_layout_free(layout);
    TRY(status);
    if (check.cover != RSD_MISSES)
        return RSD_OK;
    set_error("%s: %s: no file has %s", v->checkpoint->files.folder, tensor->name,
              box_text(check.box.ndim, check.box.lo, check.box.len, text));
    return tell(v, ABOUT_COVERAGE, index);
}

/* ---- bytes ---- */

static rsd_status open_job(void *context, size_t job, struct haul *haul)
{
    struct verifying *v = context;
    const struct contents *contents = &v->checkpoint->contents;
    size_t extent = v->mine.list[job].job;
    const struct tensor *tensor = &contents->tensors[v->tensor_of[extent]];
    size_t box = extent - tensor->first_extent;
    struct sink sink = {.kind = SINK_DISCARD, .dtype = tensor->dtype, .ndim = tensor->ndim};
    copy_i64s(sink.lo, tensor_box_lo(contents, tensor, box), tensor->ndim);
    copy_i64s(sink.len, tensor_box_len(contents, tensor, box), tensor->ndim);
    TRY(haul_start(haul, contents, v->tensor_of[extent], 1));
    haul_add_sink(haul, &sink);
    return haul_from_box(haul, v->checkpoint, v->tensor_of[extent], box, v->tile_limit);
}

static rsd_status close_job(void *context, size_t job, struct haul *haul)
{
    (void)context, (void)job, (void)haul;
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
    const struct contents *contents = &v->checkpoint->contents;
    int64_t *nbytes = mem_new(contents->nextents, sizeof *nbytes);
    bool *splits = mem_new(contents->nextents, sizeof *splits);
    v->tensor_of = mem_new(contents->nextents, sizeof *v->tensor_of);
    rsd_status status = v->tensor_of && nbytes && splits ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < contents->ntensors && !status; t++)
        for (size_t box = 0; box < contents->tensors[t].nboxes; box++) {
            size_t extent = contents->tensors[t].first_extent + box;
            v->tensor_of[extent] = t;
            nbytes[extent] = (int64_t)box_nbytes(contents, &contents->tensors[t], box);
            splits[extent] = !contents->extents[extent].nzstd;
        }
    if (!status)
        status = share_out(&v->spread, nbytes, splits, contents->nextents, &v->mine);
    mem_free(nbytes);
    mem_free(splits);
    return status;
}

static rsd_status read_boxes(struct verifying *v)
{
    struct transfer transfer = {.pool = v->pool,
                                .open = open_job,
                                .close = close_job,
                                .forgive = forgive,
                                .context = v,
                                .seen = &v->seen};
    TRY(share_boxes(v));
    transfer.portions = v->mine.list;
    spread_follow(&v->spread, &transfer);
    TRY(transfer_run_evenly(&transfer, v->mine.nbytes, v->mine.n));
    report_tally(&v->report, &transfer.tally);
    v->report.nbytes_needed = transfer.nbytes_total;
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
    size_t ntensors = v->checkpoint->contents.ntensors;
    rsd_status status = RSD_OK;
    for (size_t t = 0; t < ntensors && v->spread.rank == 0 && !status && !v->stopped; t++)
        status = check_coverage(v, t);
    if (!status && !v->stopped)
        status = read_boxes(v);
    if (!status && !v->stopped && v->spread.rank == 0)
        status = read_values(v);
    v->report.ntensors = (int64_t)ntensors;
    TRY(v->stopped); /* as the one who was told wanted */
    TRY(status);
    struct said *own = &v->step.own;
    TRY(say_report(&v->spread, own, &v->report));
    TRY(say_list(own, v->seen.list, v->seen.n, sizeof *v->seen.list));
    TRY(say_list(own, v->kept, v->nkept, sizeof *v->kept));
    return said_add(own, v->texts.bytes, v->texts.n);
}

/* ---- together ---- */

/* What is heard of all ranks. */
struct findings {
    struct verifying *v;
    struct finding *list;
    size_t n, room;
    struct said texts;
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

static rsd_status damaged(void *context, const struct seen *seen, rsd_status status)
{
    struct findings *f = context;
    const struct verifying *v = f->v;
    const struct tensor *tensor = &v->checkpoint->contents.tensors[v->tensor_of[seen->job]];
    file_error(&v->checkpoint->files, (uint32_t)seen->file, fail_in(status, "%s: ", tensor->name));
    TRY(GROW(f->list, f->room, f->n + 1));
    f->list[f->n++] = (struct finding){
        .about = ABOUT_BOXES, .index = seen->job, .text = f->texts.n, .ntext = strlen(rsd_error())};
    return said_add(&f->texts, rsd_error(), strlen(rsd_error()));
}

/* A box that several ranks read a part of is damaged once. */
static rsd_status say_findings(struct findings *f, const rsd_report *report, struct said *heard)
{
    TRY(said_add(heard, report, sizeof *report));
    if (f->n > 1)
        qsort(f->list, f->n, sizeof *f->list, by_order);
    for (size_t i = 0; i < f->n; i++) {
        const struct finding *one = &f->list[i];
        uint64_t n = one->ntext;
        if (i > 0 && one->about == ABOUT_BOXES && one[-1].about == ABOUT_BOXES &&
            one->index == one[-1].index)
            continue;
        TRY(said_add(heard, &n, sizeof n));
        TRY(said_add(heard, f->texts.bytes + one->text, one->ntext));
    }
    return RSD_OK;
}

static rsd_status hear_findings(struct findings *f, const struct said *said, size_t *at)
{
    size_t first = f->n, base = f->texts.n;
    TRY(hear_list(said, at, &f->list, &f->n, &f->room, sizeof *f->list));
    for (size_t i = first; i < f->n; i++) {
        if (f->list[i].text > said->n - *at || f->list[i].ntext > said->n - *at - f->list[i].text)
            return fail(RSD_EPEER, "a rank tells of more findings than it said");
        f->list[i].text += base;
    }
    return said_add(&f->texts, said->bytes + *at, said->n - *at);
}

static rsd_status merge(void *context, const struct said *all, struct said *heard)
{
    struct verifying *v = context;
    struct findings f = {.v = v};
    struct seen *seen = NULL;
    size_t nseen = 0, room = 0;
    rsd_report report = {0};
    rsd_status status = RSD_OK;
    for (int32_t rank = 0; rank < v->spread.nranks && !status; rank++) {
        size_t at = 0;
        status = hear_report(&all[rank], &at, &report);
        if (!status)
            status = hear_list(&all[rank], &at, &seen, &nseen, &room, sizeof *seen);
        if (!status)
            status = hear_findings(&f, &all[rank], &at);
    }
    if (!status)
        status = seen_check(seen, nseen, &report, damaged, &f);
    if (!status)
        status = say_findings(&f, &report, heard);
    mem_free(seen);
    mem_free(f.list);
    said_drop(&f.texts);
    return status;
}

static rsd_status tell_heard(struct verifying *v)
{
    const struct said *heard = &v->step.heard;
    size_t at = 0;
    TRY(said_take(heard, &at, &v->report, sizeof v->report));
    while (at < heard->n && !v->stopped) {
        uint64_t n;
        TRY(said_take(heard, &at, &n, sizeof n));
        char *text = mem_new((size_t)n + 1, 1);
        if (!text)
            return RSD_ENOMEM;
        rsd_status status = said_take(heard, &at, text, (size_t)n);
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
    hash_contents(&v->checkpoint->contents, &what);
    TRY(spread_meet(&v->spread, RSD_OK, what, &v->tile_limit));
    TRY(spread_step(&v->spread, &v->step));
    return tell_heard(v);
}

rsd_status rsd_verify(rsd_checkpoint *checkpoint, const rsd_prove_options *given,
                      rsd_on_finding *on_finding, void *context, int64_t *nfindings,
                      rsd_report *report)
{
    rsd_prove_options options;
    TRY(take_options("rsd_prove_options", given, &options, sizeof options));
    if (report)
        TRY(check_report("rsd_report", report));
    struct verifying v = {.checkpoint = checkpoint,
                          .pool = options.pool,
                          .on_finding = on_finding,
                          .context = context,
                          .tile_limit = tile_limit(options.max_nbytes, options.pool)};
    TRY(spread_open(&v.spread, options.transport, options.timeout, options.on_progress,
                    options.context));
    seen_open(&v.seen);
    v.step.work = run;
    v.step.merge = merge;
    v.step.context = &v;
    rsd_status status = verify(&v);
    mem_free(v.tensor_of);
    mem_free(v.kept);
    portions_drop(&v.mine);
    seen_close(&v.seen);
    said_drop(&v.texts);
    said_drop(&v.step.own);
    said_drop(&v.step.heard);
    if (status)
        return status;
    *nfindings = v.nfindings;
    if (report)
        give_report(report, &v.report, sizeof v.report);
    return RSD_OK;
}
