/* digest.c - what a tensor is, in 128 bits that do not depend on how it is stored.
 *
 * The row-major little-endian bytes of the tensor are one long polynomial over GF(2); the digest keeps its
 * remainders by two polynomials of degree 64, which are CRC-64s. That is linear: any run of bytes adds its
 * own remainder, shifted by what comes after it, in any order and from any thread. dtype and shape are
 * mixed in at the end. It finds accidents, not malice: who wants to can make two tensors that agree.
 */
#include "checkpoint.h"

struct digest {
    _Atomic uint64_t ecma, jones;
};

struct digesting {
    rsd_checkpoint *checkpoint;
    const int64_t *tensors; /* NULL: all */
    size_t n;
    struct digest *digests;
    uint64_t tile_limit;
    rsd_pool *pool;
    struct operation operation;
    struct peer_step step;
    struct partition mine; /* what this rank reads */
    struct partial_crc_list seen;
    rsd_report report;
};

static void add_run(struct digest *digest, const char *run, size_t n, uint64_t after)
{
    digest->ecma ^= crc_shift(CRC_ECMA, crc_update(CRC_ECMA, 0, run, n), after);
    digest->jones ^= crc_shift(CRC_JONES, crc_update(CRC_JONES, 0, run, n), after);
}

static void finish(const struct digest *digest, rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                   char text[RSD_DIGEST_NCHARS])
{
    struct hash hash;
    hash_start(&hash, "tensor 1");
    hash_i64(&hash, dtype);
    hash_i64(&hash, ndim);
    hash_i64s(&hash, shape, (size_t)ndim);
    hash_i64(&hash, (int64_t)digest->ecma);
    hash_i64(&hash, (int64_t)digest->jones);
    hash_text(hash, text);
}

rsd_status rsd_digest_array(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const void *array,
                            char text[RSD_DIGEST_NCHARS])
{
    enum { BLOCK = 1 << 20 }; /* both remainders while it is in the cache */
    struct digest digest = {0};
    rsd_layout *checked;
    TRY(layout_start(dtype, ndim, shape, &checked));
    uint64_t all = (uint64_t)checked->volume * rsd_dtype_nbytes(dtype);
    rsd_layout_free(checked);
    for (uint64_t at = 0; at < all; at += BLOCK) {
        size_t n = all - at < BLOCK ? (size_t)(all - at) : BLOCK;
        add_run(&digest, (const char *)array + at, n, all - at - n);
    }
    finish(&digest, dtype, ndim, shape, text);
    return RSD_OK;
}

/* ---- of a checkpoint ---- */

static rsd_status take_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                             const int64_t *len, const char *block)
{
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype);
    size_t nbytes = (size_t)box_volume(sink->ndim, len) * element_nbytes;
    uint64_t all = (uint64_t)box_volume(sink->ndim, sink->len) * element_nbytes;
    (void)scratch;
    add_run(sink->context, block, nbytes, all - offset_in_box(sink, lo) - nbytes);
    return RSD_OK;
}

static size_t tensor_of(const struct digesting *d, size_t job)
{
    return d->tensors ? (size_t)d->tensors[job] : job;
}

static rsd_status open_job(void *context, size_t job, struct transfer *transfer)
{
    struct digesting *d = context;
    size_t index = d->mine.list[job].job;
    return transfer_whole(transfer, d->checkpoint, tensor_of(d, index), take_block,
                          &d->digests[index], d->tile_limit);
}

static size_t whole_digest_tensor(void *context, size_t job)
{
    const struct digesting *d = context;
    return tensor_of(d, d->mine.list[job].job);
}

static rsd_status close_job(void *context, size_t job, struct transfer *transfer)
{
    (void)context, (void)job, (void)transfer;
    return RSD_OK;
}

/* ---- together ---- */

/* The part of one rank in a digest. */
struct digest_part {
    uint64_t index, ecma, jones;
};

static rsd_status say_parts(struct digesting *d)
{
    struct payload *own = &d->step.own;
    TRY(payload_put_report(&d->operation, own, &d->report));
    TRY(payload_put_list(own, d->seen.list, d->seen.n, sizeof *d->seen.list));
    for (size_t i = 0; i < d->mine.n; i++) {
        size_t index = d->mine.list[i].job;
        struct digest_part part = {index, d->digests[index].ecma, d->digests[index].jones};
        TRY(payload_put(own, &part, sizeof part));
    }
    return RSD_OK;
}

static rsd_status share_tensors(struct digesting *d)
{
    const struct catalog *catalog = &d->checkpoint->catalog;
    int64_t *nbytes = mem_new(d->n, sizeof *nbytes);
    bool *splits = mem_new(d->n, sizeof *splits);
    rsd_status status = nbytes && splits ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < d->n && !status; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[tensor_of(d, i)];
        nbytes[i] = tensor_nbytes(catalog, tensor);
        splits[i] = partition_can_split(catalog, tensor);
    }
    if (!status)
        status =
            partition_jobs(d->operation.rank, d->operation.nranks, nbytes, splits, d->n, &d->mine);
    mem_free(nbytes);
    mem_free(splits);
    return status;
}

static rsd_status run(void *context)
{
    struct digesting *d = context;
    struct batch batch = {.pool = d->pool,
                          .from = d->checkpoint,
                          .whole_tensor = whole_digest_tensor,
                          .open = open_job,
                          .close = close_job,
                          .context = d,
                          .seen = &d->seen};
    TRY(share_tensors(d));
    batch.parts = d->mine.list;
    operation_follow(&d->operation, &batch);
    TRY(batch_run_evenly(&batch, d->mine.nbytes, d->mine.n));
    report_add_stats(&d->report, &batch.stats);
    d->report.ntensors = (int64_t)d->n;
    d->report.nbytes_needed = batch.nbytes_total;
    return say_parts(d);
}

static rsd_status damaged(void *context, const struct partial_crc *seen, rsd_status status)
{
    const struct digesting *d = context;
    const struct stored_tensor *tensor = &d->checkpoint->catalog.tensors[tensor_of(d, seen->job)];
    return store_fail_in(d->checkpoint->store, (uint32_t)seen->file,
                         fail_in(status, "%.300s: ", tensor->name));
}

/* Adds up the parts of all ranks. */
static rsd_status merge(void *context, const struct payload *all, struct payload *result)
{
    struct digesting *d = context;
    struct digest_part part, *sums = mem_new(d->n, sizeof *sums);
    struct partial_crc *seen = NULL;
    size_t nseen = 0, capacity = 0;
    rsd_report report = {0};
    rsd_status status = sums ? RSD_OK : RSD_ENOMEM;
    for (int32_t rank = 0; rank < d->operation.nranks && !status; rank++) {
        size_t at = 0;
        status = payload_take_report(&all[rank], &at, &report);
        if (!status)
            status = payload_take_list(&all[rank], &at, &seen, &nseen, &capacity, sizeof *seen);
        while (!status && at < all[rank].n) {
            status = payload_take(&all[rank], &at, &part, sizeof part);
            if (status || part.index >= d->n)
                break;
            sums[part.index].ecma ^= part.ecma;
            sums[part.index].jones ^= part.jones;
        }
    }
    if (!status)
        status = partial_crcs_check(seen, nseen, &report, damaged, d);
    if (!status)
        status = payload_put(result, &report, sizeof report);
    if (!status)
        status = payload_put(result, sums, d->n * sizeof *sums);
    mem_free(sums);
    mem_free(seen);
    return status;
}

static rsd_status hear(struct digesting *d)
{
    size_t at = 0;
    TRY(payload_take(&d->step.result, &at, &d->report, sizeof d->report));
    for (size_t i = 0; i < d->n; i++) {
        struct digest_part sum;
        TRY(payload_take(&d->step.result, &at, &sum, sizeof sum));
        d->digests[i] = (struct digest){sum.ecma, sum.jones};
    }
    return RSD_OK;
}

/* What all ranks have to agree on. */
static rsd_status meet(struct digesting *d, rsd_status status)
{
    struct hash what;
    hash_start(&what, "digest");
    if (!status) {
        catalog_hash(&d->checkpoint->catalog, &what);
        hash_i64s(&what, d->tensors, d->tensors ? d->n : 0);
    }
    return operation_agree(&d->operation, status, what, &d->tile_limit);
}

static rsd_status check_tensors(const struct digesting *d)
{
    size_t all = d->checkpoint->catalog.ntensors;
    for (size_t i = 0; i < d->n; i++)
        if (d->tensors && (d->tensors[i] < 0 || (uint64_t)d->tensors[i] >= all))
            return fail(RSD_EINVAL, "tensor %lld of a checkpoint with %zu",
                        (long long)d->tensors[i], all);
    return d->digests ? RSD_OK : RSD_ENOMEM;
}

rsd_status rsd_digest(rsd_checkpoint *checkpoint, int64_t ntensors, const int64_t *tensors,
                      const rsd_prove_options *given, char (*digests)[RSD_DIGEST_NCHARS],
                      rsd_report *report)
{
    rsd_prove_options options;
    const struct catalog *catalog = &checkpoint->catalog;
    TRY(options_copy("rsd_prove_options", given, &options, sizeof options));
    if (report)
        TRY(report_check("rsd_report", report));
    struct digesting d = {.checkpoint = checkpoint,
                          .tensors = tensors,
                          .n = tensors ? (size_t)max_i64(ntensors, 0) : catalog->ntensors,
                          .pool = options.pool,
                          .tile_limit = tile_limit(options.max_nbytes, options.pool)};
    TRY(operation_open(&d.operation, options.transport, options.timeout, options.on_progress,
                       options.context));
    partial_crcs_open(&d.seen);
    d.step.work = run;
    d.step.merge = merge;
    d.step.context = &d;
    d.digests = mem_new(d.n, sizeof *d.digests);
    rsd_status status = meet(&d, check_tensors(&d));
    if (!status)
        status = operation_step(&d.operation, &d.step);
    if (!status)
        status = hear(&d);
    for (size_t i = 0; i < d.n && !status; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[tensor_of(&d, i)];
        finish(&d.digests[i], tensor->dtype, tensor->ndim, tensor_shape(catalog, tensor),
               digests[i]);
    }
    mem_free(d.digests);
    partition_drop(&d.mine);
    partial_crcs_close(&d.seen);
    payload_drop(&d.step.own);
    payload_drop(&d.step.result);
    if (!status && report)
        report_copy(report, &d.report, sizeof d.report);
    return status;
}
