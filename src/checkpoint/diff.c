/* diff.c - are two checkpoints the same, bit by bit, whatever their layouts and formats?
 *
 * Each tile of one is read from the other too, and compared while both are in the cache. Of a tensor that
 * differs, the first element in row-major order is told, whichever thread came upon one first.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

struct compared {
    const char *name;
    size_t a, b; /* tensors; SIZE_MAX: not there */
    rsd_difference difference;
    struct transfer other;
    bool other_open;
    pthread_mutex_t lock;
    uint64_t first; /* element that differs; UINT64_MAX: none so far */
    unsigned char in_a[16], in_b[16];
};

struct comparing {
    rsd_checkpoint *a, *b;
    struct compared *list;
    size_t n;
    size_t *jobs; /* those whose elements are compared */
    size_t njobs;
    uint64_t tile_limit;
    rsd_pool *pool;
    pthread_mutex_t lock;
    struct scratch *free; /* of the other side, to be used again */
    size_t nfree, free_capacity;
    struct io_stats other_tally;
    struct operation operation;
    struct peer_step step;
    struct partition mine; /* of the jobs */
    struct partial_crc_list seen;
    rsd_report report;
};

/* ---- blocks ---- */

struct block_of_a {
    const char *bytes;
    struct compared *compared;
    uint64_t at; /* in the tensor */
};

static rsd_status compare_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                                const int64_t *len, const char *block)
{
    const struct block_of_a *a = scratch->user;
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype), at = 0;
    size_t nbytes = (size_t)box_volume(sink->ndim, len) * element_nbytes;
    (void)lo;
    if (memcmp(a->bytes, block, nbytes) == 0)
        return RSD_OK;
    while (a->bytes[at] == block[at])
        at++;
    uint64_t element = (a->at + at) / element_nbytes;
    at -= at % element_nbytes;
    struct compared *compared = a->compared;
    pthread_mutex_lock(&compared->lock);
    if (element < compared->first) {
        compared->first = element;
        memcpy(compared->in_a, a->bytes + at, element_nbytes);
        memcpy(compared->in_b, block + at, element_nbytes);
    }
    pthread_mutex_unlock(&compared->lock);
    return RSD_OK;
}

static void borrow(struct comparing *c, struct scratch *out)
{
    pthread_mutex_lock(&c->lock);
    if (c->nfree > 0)
        *out = c->free[--c->nfree];
    else
        *out = (struct scratch){.copier = copier_best()};
    pthread_mutex_unlock(&c->lock);
}

static void give_back(struct comparing *c, struct scratch *scratch, const struct io_stats *stats)
{
    pthread_mutex_lock(&c->lock);
    c->other_tally.nbytes_read += stats->nbytes_read;
    c->other_tally.again += stats->again;
    bool kept = GROW(c->free, c->free_capacity, c->nfree + 1) == RSD_OK;
    if (kept)
        c->free[c->nfree++] = *scratch;
    pthread_mutex_unlock(&c->lock);
    if (!kept)
        scratch_drop(scratch);
}

static rsd_status take_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                             const int64_t *len, const char *block)
{
    struct comparing *c = sink->context;
    struct compared *compared = &c->list[sink->index];
    struct block_of_a a = {block, compared, offset_in_box(sink, lo)};
    struct scratch other;
    struct io_stats stats = {0};
    (void)scratch;
    borrow(c, &other);
    other.user = &a;
    rsd_status status = transfer_run_box(&compared->other, lo, len, &other, &stats);
    give_back(c, &other, &stats);
    return status;
}

/* ---- tensors ---- */

static rsd_status open_job(void *context, size_t job, struct transfer *transfer)
{
    struct comparing *c = context;
    size_t index = c->jobs[c->mine.list[job].job];
    struct compared *compared = &c->list[index];
    compared->other_open = true;
    TRY(transfer_whole(&compared->other, c->b, compared->b, compare_block, NULL, c->tile_limit));
    prefetch_tiles(&compared->other, 0, compared->other.ntiles);
    TRY(transfer_whole(transfer, c->a, compared->a, take_block, c, c->tile_limit));
    transfer->sinks[0].index = index;
    transfer->in_order = transfer->in_order || compared->other.in_order;
    return RSD_OK;
}

static rsd_status close_job(void *context, size_t job, struct transfer *transfer)
{
    struct comparing *c = context;
    const struct job_part *part = &c->mine.list[job];
    struct compared *compared = &c->list[c->jobs[part->job]];
    bool whole = job_part_is_whole(part);
    (void)transfer;
    if (!whole)
        TRY(partial_crcs_add(&c->seen, part, 1, &compared->other));
    for (size_t i = 0; i < compared->other.nsources && whole; i++) {
        struct source *source = &compared->other.sources[i];
        struct io_stats stats = {0};
        rsd_status status = source_check(source, &stats);
        if (status)
            return store_fail_in(source->checkpoint->store, source->file,
                                 fail_in(status, "%.300s: ", compared->name));
    }
    transfer_drop(&compared->other);
    compared->other_open = false;
    return RSD_OK;
}

static rsd_difference compare_shapes(const struct comparing *c, const struct compared *compared)
{
    const struct stored_tensor *a = &c->a->catalog.tensors[compared->a];
    const struct stored_tensor *b = &c->b->catalog.tensors[compared->b];
    const int64_t *shape = tensor_shape(&c->a->catalog, a),
                  *other = tensor_shape(&c->b->catalog, b);
    bool same = a->ndim == b->ndim;
    for (int32_t d = 0; d < a->ndim && same; d++)
        same = shape[d] == other[d];
    if (!same)
        return RSD_OTHER_SHAPE;
    return a->dtype == b->dtype ? RSD_SAME : RSD_OTHER_DTYPE;
}

static void add_compared(struct comparing *c, const char *name, size_t a, size_t b)
{
    struct compared *compared = &c->list[c->n];
    *compared = (struct compared){.name = name, .a = a, .b = b, .first = UINT64_MAX};
    pthread_mutex_init(&compared->lock, NULL);
    if (a == SIZE_MAX || b == SIZE_MAX)
        compared->difference = a == SIZE_MAX ? RSD_ONLY_IN_B : RSD_ONLY_IN_A;
    else
        compared->difference = compare_shapes(c, compared);
    if (compared->difference == RSD_SAME)
        c->jobs[c->njobs++] = c->n;
    c->n++;
}

static rsd_status pair_up(struct comparing *c)
{
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    c->list = mem_new(a->ntensors + b->ntensors, sizeof *c->list);
    c->jobs = mem_new(a->ntensors, sizeof *c->jobs);
    if (!c->list || !c->jobs)
        return RSD_ENOMEM;
    for (size_t i = 0; i < a->ntensors; i++)
        add_compared(c, a->tensors[i].name, i, catalog_find_tensor(b, a->tensors[i].name));
    for (size_t i = 0; i < b->ntensors; i++)
        if (catalog_find_tensor(a, b->tensors[i].name) == SIZE_MAX)
            add_compared(c, b->tensors[i].name, SIZE_MAX, i);
    return RSD_OK;
}

/* ---- what is told ---- */

static void add_number(char *text, size_t capacity, rsd_dtype dtype, const unsigned char *bytes)
{
    size_t n = rsd_dtype_nbytes(dtype), at = 0;
    double value;
    int64_t integer;
    uint64_t natural;
    if (dtype == RSD_C64 || dtype == RSD_C128) {
        double parts[2];
        cast_elements(RSD_C128, parts, dtype, bytes, 1);
        snprintf(text, capacity, "%.17g%+.17gi", parts[0], parts[1]);
    } else if (dtype == RSD_F64 || dtype == RSD_F32 || dtype == RSD_F16 || dtype == RSD_BF16) {
        cast_elements(RSD_F64, &value, dtype, bytes, 1);
        snprintf(text, capacity, dtype == RSD_F64 ? "%.17g" : "%.9g", value);
    } else if (dtype == RSD_I64 || dtype == RSD_I32 || dtype == RSD_I16 || dtype == RSD_I8) {
        cast_elements(RSD_I64, &integer, dtype, bytes, 1);
        snprintf(text, capacity, "%lld", (long long)integer);
    } else if (cast_supported(RSD_U64, dtype)) {
        cast_elements(RSD_U64, &natural, dtype, bytes, 1);
        snprintf(text, capacity, "%llu", (unsigned long long)natural);
    } else { /* opaque: its bits */
        at = (size_t)snprintf(text, capacity, "0x");
        for (size_t i = n; i-- > 0;)
            at += (size_t)snprintf(text + at, capacity - at, "%02x", bytes[i]);
    }
}

static void describe_element(const struct comparing *c, const struct compared *compared,
                             struct text *out)
{
    const struct stored_tensor *tensor = &c->a->catalog.tensors[compared->a];
    const int64_t *shape = tensor_shape(&c->a->catalog, tensor);
    int64_t index[RSD_MAX_DIMS] = {0}, rest = (int64_t)compared->first;
    char where[SHAPE_TEXT_NCHARS], in_a[80], in_b[80];
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        index[d] = rest % shape[d];
        rest /= shape[d];
    }
    add_number(in_a, sizeof in_a, tensor->dtype, compared->in_a);
    add_number(in_b, sizeof in_b, tensor->dtype, compared->in_b);
    bool bits = strcmp(in_a, in_b) == 0; /* NaNs, and zeros of both signs */
    text_add(out, "element %s is %s and %s", shape_text(tensor->ndim, index, where), in_a, in_b);
    if (bits)
        text_add(out, " in other bits");
}

static rsd_status describe(const struct comparing *c, const struct compared *compared,
                           struct text *out)
{
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    char one[SHAPE_TEXT_NCHARS], other[SHAPE_TEXT_NCHARS];
    const struct stored_tensor *in_a = &a->tensors[compared->a == SIZE_MAX ? 0 : compared->a];
    const struct stored_tensor *in_b = &b->tensors[compared->b == SIZE_MAX ? 0 : compared->b];
    switch (compared->difference) {
    case RSD_ONLY_IN_A:
        text_add(out, "only in the first");
        break;
    case RSD_ONLY_IN_B:
        text_add(out, "only in the second");
        break;
    case RSD_OTHER_DTYPE:
        text_add(out, "dtype %s and %s", rsd_dtype_name(in_a->dtype), rsd_dtype_name(in_b->dtype));
        break;
    case RSD_OTHER_SHAPE:
        text_add(out, "shape %s and %s", shape_text(in_a->ndim, tensor_shape(a, in_a), one),
                 shape_text(in_b->ndim, tensor_shape(b, in_b), other));
        break;
    default:
        describe_element(c, compared, out);
    }
    return out->failed ? fail(RSD_ENOMEM, "no memory for a message") : RSD_OK;
}

static rsd_status tell_all(struct comparing *c, rsd_on_difference *on_difference, void *context,
                           int64_t *ndiffer)
{
    *ndiffer = 0;
    for (size_t i = 0; i < c->n; i++) {
        struct compared *compared = &c->list[i];
        struct text text = {0};
        if (compared->first != UINT64_MAX)
            compared->difference = RSD_OTHER_ELEMENT;
        if (compared->difference == RSD_SAME)
            continue;
        ++*ndiffer;
        rsd_status status = describe(c, compared, &text);
        if (!status && on_difference)
            status = on_difference(context, compared->name, compared->difference, text.chars);
        text_drop(&text);
        TRY(status);
    }
    return RSD_OK;
}

/* ---- together ---- */

/* The first element that differs, of those that one rank compared. */
struct first_element {
    uint64_t index, first;
    unsigned char in_a[16], in_b[16];
};

static rsd_status say_differences(struct comparing *c)
{
    struct payload *own = &c->step.own;
    TRY(payload_put_report(&c->operation, own, &c->report));
    TRY(payload_put_list(own, c->seen.list, c->seen.n, sizeof *c->seen.list));
    for (size_t i = 0; i < c->n; i++) {
        const struct compared *compared = &c->list[i];
        struct first_element one = {.index = i, .first = compared->first};
        if (compared->first == UINT64_MAX)
            continue;
        memcpy(one.in_a, compared->in_a, sizeof one.in_a);
        memcpy(one.in_b, compared->in_b, sizeof one.in_b);
        TRY(payload_put(own, &one, sizeof one));
    }
    return RSD_OK;
}

static rsd_status share_pairs(struct comparing *c)
{
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    int64_t *nbytes = mem_new(c->njobs, sizeof *nbytes);
    bool *splits = mem_new(c->njobs, sizeof *splits);
    rsd_status status = nbytes && splits ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < c->njobs && !status; i++) {
        const struct compared *compared = &c->list[c->jobs[i]];
        nbytes[i] = tensor_nbytes(a, &a->tensors[compared->a]);
        splits[i] = partition_can_split(a, &a->tensors[compared->a]) &&
                    partition_can_split(b, &b->tensors[compared->b]);
    }
    if (!status)
        status = partition_jobs(c->operation.rank, c->operation.nranks, nbytes, splits, c->njobs,
                                &c->mine);
    mem_free(nbytes);
    mem_free(splits);
    return status;
}

static rsd_status run(void *context)
{
    struct comparing *c = context;
    struct batch batch = {
        .pool = c->pool, .open = open_job, .close = close_job, .context = c, .seen = &c->seen};
    TRY(share_pairs(c));
    batch.parts = c->mine.list;
    operation_follow(&c->operation, &batch);
    TRY(batch_run_evenly(&batch, c->mine.nbytes, c->mine.n));
    report_add_stats(&c->report, &batch.stats);
    report_add_stats(&c->report, &c->other_tally);
    c->report.ntensors = (int64_t)c->n;
    c->report.nbytes_needed = 2 * batch.nbytes_total;
    return say_differences(c);
}

static rsd_status damaged(void *context, const struct partial_crc *seen, rsd_status status)
{
    const struct comparing *c = context;
    const struct store *store = seen->side ? c->b->store : c->a->store;
    return store_fail_in(store, (uint32_t)seen->file,
                         fail_in(status, "%.300s: ", c->list[c->jobs[seen->job]].name));
}

static void note_first(struct comparing *c, const struct first_element *one)
{
    struct compared *compared = &c->list[one->index];
    if (one->first >= compared->first)
        return;
    compared->first = one->first;
    memcpy(compared->in_a, one->in_a, sizeof one->in_a);
    memcpy(compared->in_b, one->in_b, sizeof one->in_b);
}

/* All say what they found, and all hear all of it. */
static rsd_status merge(void *context, const struct payload *all, struct payload *result)
{
    struct comparing *c = context;
    struct partial_crc *seen = NULL;
    size_t nseen = 0, capacity = 0;
    rsd_report report = {0};
    struct payload firsts = {0};
    rsd_status status = RSD_OK;
    for (int32_t rank = 0; rank < c->operation.nranks && !status; rank++) {
        size_t at = 0;
        status = payload_take_report(&all[rank], &at, &report);
        if (!status)
            status = payload_take_list(&all[rank], &at, &seen, &nseen, &capacity, sizeof *seen);
        if (!status)
            status = payload_put(&firsts, all[rank].bytes + at, all[rank].n - at);
    }
    if (!status)
        status = partial_crcs_check(seen, nseen, &report, damaged, c);
    if (!status)
        status = payload_put(result, &report, sizeof report);
    if (!status)
        status = payload_put(result, firsts.bytes, firsts.n);
    payload_drop(&firsts);
    mem_free(seen);
    return status;
}

static rsd_status hear(struct comparing *c)
{
    const struct payload *result = &c->step.result;
    size_t at = 0;
    TRY(payload_take(result, &at, &c->report, sizeof c->report));
    while (at < result->n) {
        struct first_element one;
        TRY(payload_take(result, &at, &one, sizeof one));
        if (one.index < c->n)
            note_first(c, &one);
    }
    return RSD_OK;
}

/* ---- all of it ---- */

static rsd_status compare(struct comparing *c)
{
    struct hash what;
    hash_start(&what, "diff");
    catalog_hash(&c->a->catalog, &what);
    catalog_hash(&c->b->catalog, &what);
    TRY(operation_agree(&c->operation, pair_up(c), what, &c->tile_limit));
    TRY(operation_step(&c->operation, &c->step));
    return hear(c);
}

static void drop(struct comparing *c)
{
    for (size_t i = 0; i < c->n; i++) {
        if (c->list[i].other_open)
            transfer_drop(&c->list[i].other);
        pthread_mutex_destroy(&c->list[i].lock);
    }
    for (size_t i = 0; i < c->nfree; i++)
        scratch_drop(&c->free[i]);
    mem_free(c->list);
    mem_free(c->jobs);
    mem_free(c->free);
    partition_drop(&c->mine);
    partial_crcs_close(&c->seen);
    payload_drop(&c->step.own);
    payload_drop(&c->step.result);
    pthread_mutex_destroy(&c->lock);
}

rsd_status rsd_diff(rsd_checkpoint *a, rsd_checkpoint *b, const rsd_prove_options *given,
                    rsd_on_difference *on_difference, void *context, int64_t *ndiffer,
                    rsd_report *report)
{
    rsd_prove_options options;
    int64_t n = 0;
    TRY(options_copy("rsd_prove_options", given, &options, sizeof options));
    if (report)
        TRY(report_check("rsd_report", report));
    struct comparing c = {.a = a,
                          .b = b,
                          .pool = options.pool,
                          .tile_limit = tile_limit(options.max_nbytes, options.pool) / 2 + 1};
    TRY(operation_open(&c.operation, options.transport, options.timeout, options.on_progress,
                       options.context));
    pthread_mutex_init(&c.lock, NULL);
    partial_crcs_open(&c.seen);
    c.step.work = run;
    c.step.merge = merge;
    c.step.context = &c;
    rsd_status status = compare(&c);
    if (!status)
        status = tell_all(&c, on_difference, context, &n);
    drop(&c);
    if (status)
        return status;
    *ndiffer = n;
    if (report)
        report_copy(report, &c.report, sizeof c.report);
    return RSD_OK;
}
