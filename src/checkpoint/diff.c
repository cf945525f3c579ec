/* diff.c - compares two checkpoints bit by bit or within a tolerance, whatever their layouts and formats.
 *
 * Each tile of one is read from the other too, and compared while both are in the cache. Of a tensor that
 * differs, the first element in row-major order is reported, whichever thread found a difference first.
 */
#include "checkpoint.h"

#include <math.h>
#include <string.h>

/* The first element of a tensor that differs, and its bytes. Ranks send it to each other. */
struct first_element {
    uint64_t tensor; /* in the list of the call */
    uint64_t at;     /* UINT64_MAX: none differs so far */
    unsigned char in_a[16], in_b[16];
};

/* A tensor of both checkpoints, or of one. */
struct compared {
    const char *name;
    size_t a, b;     /* tensors; SIZE_MAX: not in this checkpoint */
    rsd_dtype dtype; /* in which both are compared */
    rsd_difference difference;
    struct transfer other; /* of b, while a is transferred */
    pthread_mutex_t lock;  /* protects the next line */
    struct first_element first;
};

struct comparing {
    struct operation operation;
    rsd_diff_options options;
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

static bool has_tolerance(const struct comparing *c)
{
    return c->options.rtol > 0 || c->options.atol > 0;
}

/* Returns whether two numbers, or parts of complex numbers, are equal within the tolerance. */
static bool is_close(const rsd_diff_options *options, double a, double b)
{
    return a == b || fabs(a - b) <= options->atol + options->rtol * fabs(b);
}

/* Returns the first element in which two blocks differ; n: none. Equal bits are equal. */
static size_t find_other_element(const struct comparing *c, rsd_dtype dtype, const char *a,
                                 const char *b, size_t n)
{
    size_t element_nbytes = rsd_dtype_nbytes(dtype), i = 0;
    int nparts = !has_tolerance(c) ? 0 : dtype == RSD_F64 ? 1 : dtype == RSD_C128 ? 2 : 0;
    for (; i < n; i++) {
        const char *x = a + i * element_nbytes, *y = b + i * element_nbytes;
        double in_a[2], in_b[2];
        if (memcmp(x, y, element_nbytes) == 0)
            continue;
        if (!nparts)
            return i;
        memcpy(in_a, x, element_nbytes);
        memcpy(in_b, y, element_nbytes);
        for (int part = 0; part < nparts; part++)
            if (!is_close(&c->options, in_a[part], in_b[part]))
                return i;
    }
    return i;
}

/* Compares a block of b with the same block of a, and keeps the first element that differs. */
static rsd_status compare_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                                const int64_t *len, const char *block)
{
    const struct block_of_a *a = scratch->user;
    const struct comparing *c = sink->context;
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype);
    size_t nbytes = (size_t)sink_nbytes(sink, len), n = nbytes / element_nbytes;
    (void)lo;
    if (memcmp(a->bytes, block, nbytes) == 0)
        return RSD_OK;
    size_t at = find_other_element(c, sink->dtype, a->bytes, block, n);
    if (at == n)
        return RSD_OK;
    uint64_t element = a->at / element_nbytes + at;
    struct compared *compared = a->compared;
    pthread_mutex_lock(&compared->lock);
    if (element < compared->first.at) {
        compared->first.at = element;
        memcpy(compared->first.in_a, a->bytes + at * element_nbytes, element_nbytes);
        memcpy(compared->first.in_b, block + at * element_nbytes, element_nbytes);
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

/* Keeps the buffers of a thread for the next block, and adds what it read. */
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

/* Opens both tensors of a pair. Blocks of a are read by the batch, and those of b when they are compared. */
static rsd_status diff_open_job(void *context, const struct batch_job *job,
                                struct transfer *transfer)
{
    struct comparing *c = context;
    struct compared *compared = &c->list[job->id];
    uint64_t limit = c->operation.tile_limit;
    struct sink of_b = {.dtype = compared->dtype, .take = compare_block, .context = c};
    struct sink of_a = {
        .dtype = compared->dtype, .take = read_other_block, .context = c, .index = job->id};
    TRY(transfer_open_whole(&compared->other, c->b, compared->b, of_b, limit));
    prefetch_tiles(&compared->other, 0, compared->other.ntiles);
    TRY(transfer_open_whole(transfer, c->a, compared->a, of_a, limit));
    transfer->in_order = transfer->in_order || compared->other.in_order;
    transfer->stream_nbytes += compared->other.stream_nbytes;
    transfer->nstreams += compared->other.nstreams;
    return RSD_OK;
}

/* Checks the CRCs of the tensor of b. The batch checks those of a. */
static rsd_status diff_close_job(void *context, const struct batch_job *job,
                                 struct transfer *transfer)
{
    struct comparing *c = context;
    struct transfer *other = &c->list[job->id].other;
    struct io_stats stats = {0}; /* what could not be checked is counted once, for a */
    (void)transfer;
    TRY(transfer_check_records(other, &c->operation.records, batch_job_is_whole(job)));
    TRY(batch_job_is_whole(job) ? transfer_check_sources(other, &stats)
                                : partial_crcs_add(&c->operation.partial_crcs, job, 1, other));
    transfer_drop(other);
    return RSD_OK;
}

/* Returns the widest dtype of its kind, in which numbers are compared within a tolerance; 0: of other kinds. */
static rsd_dtype widest_dtype(rsd_dtype dtype)
{
    switch (dtype) {
    case RSD_F64:
    case RSD_F32:
    case RSD_F16:
    case RSD_BF16:
        return RSD_F64;
    case RSD_C64:
    case RSD_C128:
        return RSD_C128;
    default:
        return 0;
    }
}

/* Compares shapes, and chooses the dtype in which both tensors are compared; a is first converted to a dtype. */
static rsd_difference compare_shapes(const struct comparing *c, struct compared *compared,
                                     rsd_dtype converted)
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
    rsd_dtype widest = has_tolerance(c) ? widest_dtype(a->dtype) : 0;
    bool close = widest && widest == widest_dtype(b->dtype);
    compared->dtype = close ? widest : b->dtype;
    return close || converted == b->dtype ? RSD_SAME : RSD_OTHER_DTYPE;
}

/* Adds a pair of tensors; SIZE_MAX: that side does not have it. */
static void add_compared(struct comparing *c, const char *name, size_t a, size_t b,
                         rsd_dtype converted)
{
    struct compared *compared = &c->list[c->n];
    *compared = (struct compared){
        .name = name, .a = a, .b = b, .first = {.tensor = c->n, .at = UINT64_MAX}};
    pthread_mutex_init(&compared->lock, NULL);
    if (a == SIZE_MAX || b == SIZE_MAX)
        compared->difference = a == SIZE_MAX ? RSD_ONLY_IN_B : RSD_ONLY_IN_A;
    else
        compared->difference = compare_shapes(c, compared, converted);
    c->n++;
}

/* Finds what a tensor of a is compared with, as the map function of the caller chooses it, and marks that. */
static rsd_status match_tensor(struct comparing *c, size_t index, bool *matched)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    TRY(rsd_checkpoint_tensor(c->a, (int64_t)index, &tensor));
    rsd_tensor_target target = {
        .struct_nbytes = sizeof target, .keep = 1, .dtype = tensor.dtype, .name = tensor.name};
    rsd_status status =
        c->options.map ? c->options.map(c->options.map_context, &tensor, &target) : RSD_OK;
    rsd_layout_free(target.layout);
    TRY(status);
    if (target.keep && !dtype_casts(tensor.dtype, target.dtype))
        return fail(RSD_EUNSUPPORTED, "%s: %s cannot be converted to %s", tensor.name,
                    rsd_dtype_name(tensor.dtype),
                    rsd_dtype_name(target.dtype) ? rsd_dtype_name(target.dtype)
                                                 : "an invalid dtype");
    size_t other = target.name ? catalog_find_tensor(&c->b->catalog, target.name) : SIZE_MAX;
    if (other != SIZE_MAX)
        matched[other] = true;
    if (target.keep)
        add_compared(c, c->a->catalog.tensors[index].name, index, other, target.dtype);
    return RSD_OK;
}

/* Lists all pairs of tensors of one name, and those that only one side has. */
static rsd_status match_tensors(struct comparing *c)
{
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    TRY(format_check_claims(c->a));
    TRY(format_check_claims(c->b));
    if (!(c->options.rtol >= 0 && c->options.atol >= 0))
        return fail(RSD_EINVAL, "rtol %g and atol %g must not be negative", c->options.rtol,
                    c->options.atol);
    c->list = mem_new(a->ntensors + b->ntensors, sizeof *c->list);
    bool *matched = mem_new(b->ntensors, sizeof *matched);
    rsd_status status = c->list && matched ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < a->ntensors && !status; i++)
        status = match_tensor(c, i, matched);
    for (size_t i = 0; i < b->ntensors && !status; i++)
        if (!matched[i])
            add_compared(c, b->tensors[i].name, SIZE_MAX, i, b->tensors[i].dtype);
    mem_free(matched);
    return status;
}

/* What all ranks must agree on. */
static struct hash hash_comparing(const struct comparing *c)
{
    struct hash hash;
    hash_start(&hash, "diff");
    hash_catalog(&hash, &c->a->catalog);
    hash_catalog(&hash, &c->b->catalog);
    hash_bytes(&hash, &c->options.rtol, sizeof c->options.rtol);
    hash_bytes(&hash, &c->options.atol, sizeof c->options.atol);
    for (size_t i = 0; i < c->n; i++) {
        hash_i64(&hash, (int64_t)c->list[i].a);
        hash_i64(&hash, (int64_t)c->list[i].b);
        hash_i64(&hash, c->list[i].dtype);
    }
    return hash;
}

/* Each rank: compares its part of the tensors that both checkpoints have. */
static rsd_status diff_jobs(void *context)
{
    struct comparing *c = context;
    const struct catalog *a = &c->a->catalog, *b = &c->b->catalog;
    rsd_report *report = &c->operation.report;
    struct batch batch = {
        .open = diff_open_job, .close = diff_close_job, .check_records = true, .context = c};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < c->n && !status; i++) {
        const struct compared *compared = &c->list[i];
        if (compared->difference != RSD_SAME)
            continue;
        const struct stored_tensor *tensor = &a->tensors[compared->a];
        struct batch_job job = {.id = i, .of = tensor_nbytes(a, tensor)};
        job.can_split =
            tensor_can_split(a, tensor) && tensor_can_split(b, &b->tensors[compared->b]);
        status = job_list_add(&batch.jobs, job);
    }
    status = operation_run_part(&c->operation, &batch, status);
    report->nbytes_read += (int64_t)c->other_stats.nbytes_read;
    report->nbytes_decoded_again += (int64_t)c->other_stats.nbytes_decoded_again;
    for (size_t i = 0; i < c->nscratches; i++) /* of b; the batch has those of a */
        report->nbytes_memory +=
            (int64_t)(c->scratches[i].in_capacity + c->scratches[i].cast_capacity);
    report->ntensors = (int64_t)c->n;
    report->nbytes_needed = 2 * batch.nbytes_total;
    return status;
}

/* ---- reporting differences ---- */

/* Adds an element as a number, or its bits if the dtype has no numbers. `exact`: with all digits of an f64. */
static void add_number(struct text *text, rsd_dtype dtype, const unsigned char *bytes, bool exact)
{
    enum dtype_class class = dtype_class(dtype);
    double parts[2];
    int64_t integer;
    uint64_t natural;
    if (class == CLASS_COMPLEX) {
        cast_elements(RSD_C128, parts, dtype, bytes, 1);
        text_add(text, "%.17g%+.17gi", parts[0], parts[1]);
    } else if (class == CLASS_FLOAT) {
        cast_elements(RSD_F64, parts, dtype, bytes, 1);
        text_add(text, dtype == RSD_F64 && exact ? "%.17g" : "%.9g", parts[0]);
    } else if (class == CLASS_SIGNED) {
        cast_elements(RSD_I64, &integer, dtype, bytes, 1);
        text_add(text, "%lld", (long long)integer);
    } else if (class != CLASS_OPAQUE) {
        cast_elements(RSD_U64, &natural, dtype, bytes, 1);
        text_add(text, "%llu", (unsigned long long)natural);
    } else { /* no number: its bits */
        text_add(text, "0x");
        for (size_t i = rsd_dtype_nbytes(dtype); i-- > 0;)
            text_add(text, "%02x", bytes[i]);
    }
}

/* Adds the first element that differs: its index, and its value in a and b. */
static void describe_element(const struct comparing *c, const struct compared *compared,
                             struct text *out)
{
    const struct stored_tensor *tensor = &c->a->catalog.tensors[compared->a];
    const int64_t *shape = tensor_shape(&c->a->catalog, tensor);
    int64_t index[RSD_MAX_DIMS] = {0}, rest = (int64_t)compared->first.at;
    char where[SHAPE_TEXT_NCHARS];
    struct text in_a = {0}, in_b = {0};
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        index[d] = rest % shape[d];
        rest /= shape[d];
    }
    bool exact = tensor->dtype == RSD_F64;
    add_number(&in_a, compared->dtype, compared->first.in_a, exact);
    add_number(&in_b, compared->dtype, compared->first.in_b, exact);
    out->failed = out->failed || in_a.failed || in_b.failed;
    if (!out->failed)
        text_add(out, "element %s is %s and %s%s", shape_text(tensor->ndim, index, where),
                 in_a.chars, in_b.chars,
                 strcmp(in_a.chars, in_b.chars) == 0 ? " in other bits" : ""); /* NaNs, -0.0 */
    text_drop(&in_a);
    text_drop(&in_b);
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

/* Calls on_difference for each tensor that differs, in order, and counts them. */
static rsd_status report_differences(struct comparing *c, rsd_on_difference *on_difference,
                                     void *context, int64_t *ndiffer)
{
    *ndiffer = 0;
    for (size_t i = 0; i < c->n; i++) {
        struct compared *compared = &c->list[i];
        struct text text = {0};
        if (compared->first.at != UINT64_MAX)
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

/* Each rank: sends the first element that differs of each tensor that it compared. */
static rsd_status put_first_elements(void *context, struct payload *payload)
{
    const struct comparing *c = context;
    for (size_t i = 0; i < c->n; i++)
        if (c->list[i].first.at != UINT64_MAX)
            TRY(payload_put(payload, &c->list[i].first, sizeof c->list[i].first));
    return RSD_OK;
}

/* On rank 0: keeps the first element that differs of all ranks. */
static rsd_status take_first_elements(void *context, const struct payload *sent, size_t *at)
{
    struct comparing *c = context;
    while (*at < sent->n) {
        struct first_element one;
        TRY(payload_take(sent, at, &one, sizeof one));
        if (one.tensor >= c->n)
            return fail(RSD_EPEER, "a rank compared tensor %llu of %zu",
                        (unsigned long long)one.tensor, c->n);
        if (one.at < c->list[one.tensor].first.at)
            c->list[one.tensor].first = one;
    }
    return RSD_OK;
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

rsd_status rsd_diff(rsd_checkpoint *a, rsd_checkpoint *b, const rsd_diff_options *options,
                    rsd_on_difference *on_difference, void *context, int64_t *ndiffer,
                    rsd_report *report)
{
    struct comparing c = {.a = a, .b = b};
    struct operation_call call = {.from = {a, b},
                                  .work = diff_jobs,
                                  .put = put_first_elements,
                                  .take = take_first_elements,
                                  .put_result = put_first_elements,
                                  .take_result = take_first_elements,
                                  .context = &c};
    int64_t n = 0;
    TRY(options_copy("rsd_diff_options", options, &c.options, sizeof c.options));
    TRY(operation_open(&c.operation, c.options.io, report));
    c.operation.tile_limit = c.operation.tile_limit / 2 + 1; /* for both sides */
    pthread_mutex_init(&c.lock, NULL);
    rsd_status status = match_tensors(&c);
    status = operation_agree(&c.operation, status, hash_comparing(&c));
    if (!status)
        status = operation_run(&c.operation, &call);
    if (!status)
        status = report_differences(&c, on_difference, context, &n);
    drop_comparing(&c);
    if (!status)
        *ndiffer = n;
    return operation_close(&c.operation, status, report);
}
