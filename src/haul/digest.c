/* digest.c - what a tensor is, in 128 bits that do not depend on how it is stored.
 *
 * The row-major little-endian bytes of the tensor are one long polynomial over GF(2); the digest keeps its
 * remainders by two polynomials of degree 64, which are CRC-64s. That is linear: any run of bytes adds its
 * own remainder, shifted by what comes after it, in any order and from any thread. dtype and shape are
 * mixed in at the end. It finds accidents, not malice: who wants to can make two tensors that agree.
 */
#include "haul.h"

struct digest {
    _Atomic uint64_t ecma, jones;
};

struct digesting {
    rsd_checkpoint *checkpoint;
    const int64_t *tensors; /* NULL: all */
    size_t n;
    struct digest *digests;
    uint64_t tile_limit;
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
    size_t each = rsd_dtype_nbytes(sink->dtype);
    size_t nbytes = (size_t)box_volume(sink->ndim, len) * each;
    uint64_t all = (uint64_t)box_volume(sink->ndim, sink->len) * each;
    (void)scratch;
    add_run(sink->context, block, nbytes, all - offset_in_box(sink, lo) - nbytes);
    return RSD_OK;
}

static size_t tensor_of(const struct digesting *d, size_t job)
{
    return d->tensors ? (size_t)d->tensors[job] : job;
}

static rsd_status open_job(void *context, size_t job, struct haul *haul)
{
    struct digesting *d = context;
    return haul_whole(haul, d->checkpoint, tensor_of(d, job), take_block, &d->digests[job],
                      d->tile_limit);
}

static rsd_status close_job(void *context, size_t job, struct haul *haul)
{
    (void)context, (void)job, (void)haul;
    return RSD_OK;
}

static rsd_status run(struct digesting *d, const rsd_prove_options *options, rsd_report *report)
{
    const struct contents *contents = &d->checkpoint->contents;
    int64_t *nbytes = mem_new(d->n, sizeof *nbytes);
    struct transfer transfer = {.pool = options->pool,
                                .open = open_job,
                                .close = close_job,
                                .context = d,
                                .on_progress = options->on_progress,
                                .progress_context = options->context};
    if (!nbytes)
        return RSD_ENOMEM;
    for (size_t i = 0; i < d->n; i++)
        nbytes[i] = tensor_nbytes(contents, &contents->tensors[tensor_of(d, i)]);
    rsd_status status = transfer_run_evenly(&transfer, nbytes, d->n);
    mem_free(nbytes);
    TRY(status);
    report_tally(report, &transfer.tally);
    report->ntensors = (int64_t)d->n;
    report->nbytes_needed = transfer.nbytes_total;
    return RSD_OK;
}

rsd_status rsd_digest(rsd_checkpoint *checkpoint, int64_t ntensors, const int64_t *tensors,
                      const rsd_prove_options *given, char (*digests)[RSD_DIGEST_NCHARS],
                      rsd_report *report)
{
    rsd_prove_options options;
    rsd_report result = {0};
    double began = seconds_now();
    const struct contents *contents = &checkpoint->contents;
    TRY(take_options("rsd_prove_options", given, &options, sizeof options));
    if (report)
        TRY(check_report("rsd_report", report));
    struct digesting d = {.checkpoint = checkpoint,
                          .tensors = tensors,
                          .n = tensors ? (size_t)max_i64(ntensors, 0) : contents->ntensors,
                          .tile_limit = tile_limit(options.max_nbytes, options.pool)};
    for (size_t i = 0; i < d.n; i++)
        if (tensors && (tensors[i] < 0 || (uint64_t)tensors[i] >= contents->ntensors))
            return fail(RSD_EINVAL, "tensor %lld of a checkpoint with %zu", (long long)tensors[i],
                        contents->ntensors);
    d.digests = mem_new(d.n, sizeof *d.digests);
    rsd_status status = d.digests ? run(&d, &options, &result) : RSD_ENOMEM;
    for (size_t i = 0; i < d.n && !status; i++) {
        const struct tensor *tensor = &contents->tensors[tensor_of(&d, i)];
        finish(&d.digests[i], tensor->dtype, tensor->ndim, tensor_shape(contents, tensor),
               digests[i]);
    }
    mem_free(d.digests);
    result.seconds = seconds_now() - began;
    if (!status && report)
        give_report(report, &result, sizeof result);
    return status;
}
