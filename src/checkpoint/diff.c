/* diff.c - compares two checkpoints bit by bit, whatever their layouts and formats.
 *
 * Each tile of one is read from the other too, and compared while both are in the cache. Of a tensor that
 * differs, the first element in row-major order is reported, whichever thread found a difference first.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

/* A tensor of both checkpoints, or of one. */
struct compared {
    const char *name;
    size_t a, b; /* tensors; SIZE_MAX: not in this checkpoint */
    rsd_difference difference;
    struct transfer other; /* of b, while a is transferred */
    pthread_mutex_t lock;
    uint64_t first; /* element that differs; UINT64_MAX: none so far */
    unsigned char in_a[16], in_b[16];
};

struct comparing {
    struct operation operation;
    rsd_checkpoint *a, *b;
    struct compared *list;
    size_t n;
    pthread_mutex_t lock;
    struct scratch *scratches; /* for b, not in use */
    size_t nscratches, scratches_capacity;
    struct io_stats other_stats; /* of b */
};

/* ---- blocks ---- */

struct block_of_a {
    const char *bytes;
    struct compared *compared;
    uint64_t at; /* in the tensor */
};

/* Compares a block of b with the same block of a, and keeps the first element that differs. */
static rsd_status compare_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                                const int64_t *len, const char *block)
{
    const struct block_of_a *a = scratch->user;
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype), at = 0;
    (void)lo;
    if (memcmp(a->bytes, block, (size_t)sink_nbytes(sink, len)) == 0)
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

static struct scratch take_scratch(struct comparing *c)
{
    struct scratch scratch = {.copier = copier_best()};
    pthread_mutex_lock(&c->lock);
    if (c->nscratches > 0)
        scratch = c->scratches[--c->nscratches];
    pthread_mutex_unlock(&c->lock);
    return scratch;
}

static void return_scratch(struct comparing *c, struct scratch *scratch,
                           const struct io_stats *stats)
{
    pthread_mutex_lock(&c->lock);
    c->other_stats.nbytes_read += stats->nbytes_read;
    c->other_stats.nbytes_decoded_again += stats->nbytes_decoded_again;
    bool kept = GROW(c->scratches, c->scratches_capacity, c->nscratches + 1) == RSD_OK;
    if (kept)
        c->scratches[c->nscratches++] = *scratch;
    pthread_mutex_unlock(&c->lock);
    if (!kept)
        scratch_drop(scratch);
}

/* Takes a block of a, and compares it with the same block of b. */
static rsd_status read_other_block(const struct sink *sink, struct scratch *scratch,
                                   const int64_t *lo, const int64_t *len, const char *block)
{
    struct comparing *c = sink->context;
    struct compared *compared = &c->list[sink->index];
    struct block_of_a a = {block, compared, sink_offset(sink, lo)};
    struct scratch other = take_scratch(c);
    struct io_stats stats = {0};
    (void)scratch;
    other.user = &a;
    rsd_status status = transfer_run_box(&compared->other, lo, len, &other, &stats);
    return_scratch(c, &other, &stats);
    return status;
}

/* ---- tensors ---- */

static rsd_status diff_open_job(void *context, const struct batch_job *job,
                                struct transfer *transfer)
{
    struct comparing *c = context;
    struct compared *compared = &c->list[job->id];
    uint64_t limit = c->operation.tile_limit;
    TRY(transfer_open_whole(&compared->other, c->b, compared->b, compare_block, NULL, limit));
    prefetch_tiles(&compared->other, 0, compared->other.ntiles);
    TRY(transfer_open_whole(transfer, c->a, compared->a, read_other_block, c, limit));
    transfer->sinks[0].index = job->id;
    transfer->in_order = transfer->in_order || compared->other.in_order;
    return RSD_OK;
}

static rsd_status diff_close_job(void *context, const struct batch_job *job,
                                 struct transfer *transfer)
{
    struct comparing *c = context;
    struct transfer *other = &c->list[job->id].other;
    struct io_stats stats = {0}; /* what could not be checked is counted once, for a */
    (void)transfer;
    TRY(batch_job_is_whole(job) ? transfer_check_sources(other, &stats)
                                : partial_crcs_add(&c->operation.partial_crcs, job, 1, other));
    transfer_drop(other);
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
    c->n++;
}

static rsd_status match_tensors(struct comparing *c)
{
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    TRY(format_check_claims(c->a));
    TRY(format_check_claims(c->b));
    c->list = mem_new(a->ntensors + b->ntensors, sizeof *c->list);
    if (!c->list)
        return RSD_ENOMEM;
    for (size_t i = 0; i < a->ntensors; i++)
        add_compared(c, a->tensors[i].name, i, catalog_find_tensor(b, a->tensors[i].name));
    for (size_t i = 0; i < b->ntensors; i++)
        if (catalog_find_tensor(a, b->tensors[i].name) == SIZE_MAX)
            add_compared(c, b->tensors[i].name, SIZE_MAX, i);
    return RSD_OK;
}

/* Each rank: compares its part of the tensors that both checkpoints have. */
static rsd_status diff_jobs(void *context)
{
    struct comparing *c = context;
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    rsd_report *report = &c->operation.report;
    struct batch batch = {.open = diff_open_job,
                          .close = diff_close_job,
                          .stream_nbytes = zstd_reader_memory(catalog_max_layers(&c->a->catalog)) +
                                           zstd_reader_memory(catalog_max_layers(&c->b->catalog)),
                          .context = c};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < c->n && !status; i++) {
        const struct compared *compared = &c->list[i];
        if (compared->difference != RSD_SAME)
            continue;
        const struct stored_tensor *tensor = &a->tensors[compared->a];
        int64_t nbytes = tensor_nbytes(a, tensor);
        bool can_split =
            tensor_can_split(a, tensor) && tensor_can_split(b, &b->tensors[compared->b]);
        status = job_list_add(
            &batch.jobs,
            (struct batch_job){.id = i, .to = nbytes, .of = nbytes, .can_split = can_split});
    }
    job_list_partition(&batch.jobs, c->operation.rank, c->operation.nranks);
    if (!status)
        status = operation_run_batch(&c->operation, &batch);
    job_list_drop(&batch.jobs);
    report->nbytes_read += (int64_t)c->other_stats.nbytes_read;
    report->nbytes_decoded_again += (int64_t)c->other_stats.nbytes_decoded_again;
    report->ntensors = (int64_t)c->n;
    report->nbytes_needed = 2 * batch.nbytes_total;
    return status;
}

/* ---- reporting differences ---- */

static void format_number(char *text, size_t capacity, rsd_dtype dtype, const unsigned char *bytes)
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
    } else { /* no number: its bits */
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
    format_number(in_a, sizeof in_a, tensor->dtype, compared->in_a);
    format_number(in_b, sizeof in_b, tensor->dtype, compared->in_b);
    bool bits = strcmp(in_a, in_b) == 0; /* NaNs, and zeros of both signs */
    text_add(out, "element %s is %s and %s", shape_text(tensor->ndim, index, where), in_a, in_b);
    if (bits)
        text_add(out, " in other bits");
}

static const char *stored_shape_text(const struct catalog *catalog, size_t index,
                                     char text[SHAPE_TEXT_NCHARS])
{
    const struct stored_tensor *tensor = &catalog->tensors[index];
    return shape_text(tensor->ndim, tensor_shape(catalog, tensor), text);
}

/* Adds the text of a difference. */
static rsd_status describe_difference(const struct comparing *c, const struct compared *compared,
                                      struct text *out)
{
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    char one[SHAPE_TEXT_NCHARS], other[SHAPE_TEXT_NCHARS];
    switch (compared->difference) {
    case RSD_ONLY_IN_A:
        text_add(out, "only in the first");
        break;
    case RSD_ONLY_IN_B:
        text_add(out, "only in the second");
        break;
    case RSD_OTHER_DTYPE:
        text_add(out, "dtype %s and %s", rsd_dtype_name(a->tensors[compared->a].dtype),
                 rsd_dtype_name(b->tensors[compared->b].dtype));
        break;
    case RSD_OTHER_SHAPE:
        text_add(out, "shape %s and %s", stored_shape_text(a, compared->a, one),
                 stored_shape_text(b, compared->b, other));
        break;
    default:
        describe_element(c, compared, out);
    }
    return out->failed ? fail(RSD_ENOMEM, "no memory for a message") : RSD_OK;
}

static rsd_status report_differences(struct comparing *c, rsd_on_difference *on_difference,
                                     void *context, int64_t *ndiffer)
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
        rsd_status status = describe_difference(c, compared, &text);
        if (!status && on_difference)
            status = on_difference(context, compared->name, compared->difference, text.chars);
        text_drop(&text);
        TRY(status);
    }
    return RSD_OK;
}

/* ---- between ranks ---- */

/* The first element that differs, of those that one rank compared. */
struct first_element {
    uint64_t index, first;
    unsigned char in_a[16], in_b[16];
};

/* Each rank: sends the first element that differs of each tensor that it compared. */
static rsd_status put_first_elements(void *context, struct payload *payload)
{
    const struct comparing *c = context;
    for (size_t i = 0; i < c->n; i++) {
        const struct compared *compared = &c->list[i];
        struct first_element one = {.index = i, .first = compared->first};
        if (compared->first == UINT64_MAX)
            continue;
        memcpy(one.in_a, compared->in_a, sizeof one.in_a);
        memcpy(one.in_b, compared->in_b, sizeof one.in_b);
        TRY(payload_put(payload, &one, sizeof one));
    }
    return RSD_OK;
}

/* On rank 0: keeps the first element that differs of all ranks. */
static rsd_status take_first_elements(void *context, const struct payload *sent, size_t *at)
{
    struct comparing *c = context;
    while (*at < sent->n) {
        struct first_element one;
        TRY(payload_take(sent, at, &one, sizeof one));
        if (one.index >= c->n)
            return fail(RSD_EPEER, "a rank compared tensor %llu of %zu",
                        (unsigned long long)one.index, c->n);
        struct compared *compared = &c->list[one.index];
        if (one.first >= compared->first)
            continue;
        compared->first = one.first;
        memcpy(compared->in_a, one.in_a, sizeof one.in_a);
        memcpy(compared->in_b, one.in_b, sizeof one.in_b);
    }
    return RSD_OK;
}

static rsd_status diff_damaged(void *context, const struct partial_crc *crc, rsd_status status)
{
    const struct comparing *c = context;
    return checkpoint_fail_in(crc->side ? c->b : c->a, (uint32_t)crc->file, c->list[crc->job].name,
                              status);
}

/* ---- the call ---- */

static void drop_comparing(struct comparing *c)
{
    for (size_t i = 0; i < c->n; i++) {
        transfer_drop(&c->list[i].other);
        pthread_mutex_destroy(&c->list[i].lock);
    }
    for (size_t i = 0; i < c->nscratches; i++)
        scratch_drop(&c->scratches[i]);
    mem_free(c->list);
    mem_free(c->scratches);
    pthread_mutex_destroy(&c->lock);
}

rsd_status rsd_diff(rsd_checkpoint *a, rsd_checkpoint *b, const rsd_io *io,
                    rsd_on_difference *on_difference, void *context, int64_t *ndiffer,
                    rsd_report *report)
{
    struct comparing c = {.a = a, .b = b};
    struct operation_call call = {.work = diff_jobs,
                                  .put = put_first_elements,
                                  .take = take_first_elements,
                                  .damaged = diff_damaged,
                                  .put_result = put_first_elements,
                                  .take_result = take_first_elements,
                                  .context = &c};
    struct hash arguments;
    int64_t n = 0;
    TRY(operation_open(&c.operation, io, report));
    c.operation.tile_limit = c.operation.tile_limit / 2 + 1; /* for both sides */
    pthread_mutex_init(&c.lock, NULL);
    hash_start(&arguments, "diff");
    hash_catalog(&arguments, &a->catalog);
    hash_catalog(&arguments, &b->catalog);
    rsd_status status = operation_agree(&c.operation, match_tensors(&c), arguments);
    if (!status)
        status = operation_run(&c.operation, &call);
    if (!status)
        status = report_differences(&c, on_difference, context, &n);
    drop_comparing(&c);
    if (!status)
        *ndiffer = n;
    return operation_close(&c.operation, status, report);
}
