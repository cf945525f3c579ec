/* digest.c - the digest of a tensor: 128 bits that do not depend on how it is stored.
 *
 * The row-major little-endian bytes of the tensor are one long polynomial over GF(2). The digest has its
 * remainders by two polynomials of degree 64, which are CRC-64s. They are linear: any run of bytes adds its
 * own remainder, shifted by the bytes behind it, in any order and from any thread. dtype and shape are added
 * at the end. A digest detects accidents, not attacks.
 */
#include "checkpoint.h"

struct digesting {
    struct digest_list digests;
    struct operation operation;
    rsd_checkpoint *checkpoint;
    const int64_t *tensors; /* NULL: all */
};

void digest_add_bytes(struct digest *digest, const char *bytes, size_t n, uint64_t after)
{
    digest->ecma ^= crc_shift(CRC_ECMA, crc_update(CRC_ECMA, 0, bytes, n), after);
    digest->jones ^= crc_shift(CRC_JONES, crc_update(CRC_JONES, 0, bytes, n), after);
}

void digest_format(const struct digest *digest, rsd_dtype dtype, int32_t ndim, const int64_t *shape,
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
    enum { BLOCK = 1 << 20 }; /* both remainders while the block is in the cache */
    struct digest digest = {0};
    rsd_layout *checked;
    TRY(layout_start(dtype, ndim, shape, &checked));
    uint64_t all = (uint64_t)checked->volume * rsd_dtype_nbytes(dtype);
    struct memory_device *device = NULL;
    rsd_layout_free(checked);
    if (all > 0)
        TRY(memory_find_device(array, &device));
    if (device) {
        struct digest_rows rows = {.address = array, .run = (int64_t)all};
        TRY(digest_add_device_rows(device, NULL, &rows, 1, &(struct digest_list){&digest, 1}));
        all = 0;
    }
    for (uint64_t at = 0; at < all; at += BLOCK) {
        size_t n = all - at < BLOCK ? (size_t)(all - at) : BLOCK;
        digest_add_bytes(&digest, (const char *)array + at, n, all - at - n);
    }
    digest_format(&digest, dtype, ndim, shape, text);
    return RSD_OK;
}

rsd_status digest_add_device_rows(struct memory_device *device, void *stream,
                                  const struct digest_rows *rows, size_t n,
                                  struct digest_list *digests)
{
    struct memory_queue *queue;
    uint64_t(*sums)[2] = mem_new(digests->n, sizeof *sums);
    rsd_status status = sums ? device->kind->queue_new(device, &queue) : RSD_ENOMEM;
    if (!status) {
        status = device->kind->follow_stream(queue, stream);
        if (!status)
            status = device->kind->digest(queue, rows, n, sums, digests->n);
        memory_queue_free(queue);
    }
    for (size_t i = 0; i < digests->n && !status; i++) {
        digests->list[i].ecma ^= sums[i][0];
        digests->list[i].jones ^= sums[i][1];
    }
    mem_free(sums);
    return status;
}

/* ---- tensors of a checkpoint ---- */

static size_t digest_tensor(const struct digesting *d, size_t job)
{
    return d->tensors ? (size_t)d->tensors[job] : job;
}

static rsd_status digest_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                               const int64_t *len, const char *block)
{
    uint64_t nbytes = sink_nbytes(sink, len), all = sink_nbytes(sink, sink->len);
    (void)scratch;
    digest_add_bytes(sink->context, block, (size_t)nbytes, all - sink_offset(sink, lo) - nbytes);
    return RSD_OK;
}

static rsd_status digest_open_job(void *context, const struct batch_job *job,
                                  struct transfer *transfer)
{
    struct digesting *d = context;
    size_t tensor = digest_tensor(d, job->id);
    struct sink sink = {.dtype = d->checkpoint->catalog.tensors[tensor].dtype,
                        .take = digest_block,
                        .context = &d->digests.list[job->id]};
    return transfer_open_whole(transfer, d->checkpoint, tensor, sink, d->operation.tile_limit);
}

/* Each rank: reads its part of the tensors, and adds the remainders of its bytes. */
static rsd_status digest_jobs(void *context)
{
    struct digesting *d = context;
    const struct catalog *catalog = &d->checkpoint->catalog;
    struct batch batch = {
        .from = d->checkpoint, .open = digest_open_job, .check_records = true, .context = d};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < d->digests.n && !status; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[digest_tensor(d, i)];
        status = job_list_add(&batch.jobs,
                              (struct batch_job){.id = i,
                                                 .of = tensor_nbytes(catalog, tensor),
                                                 .can_split = tensor_can_split(catalog, tensor),
                                                 .whole = tensor});
    }
    status = operation_run_part(&d->operation, &batch, status);
    d->operation.report.ntensors = (int64_t)d->digests.n;
    d->operation.report.nbytes_needed = batch.nbytes_total;
    return status;
}

/* ---- between ranks ---- */

/* What one rank adds to a digest. */
struct digest_part {
    uint64_t index, ecma, jones;
};

rsd_status digest_list_put(void *context, struct payload *payload)
{
    const struct digest_list *digests = context;
    for (size_t i = 0; i < digests->n; i++) {
        struct digest_part part = {i, digests->list[i].ecma, digests->list[i].jones};
        if (part.ecma || part.jones)
            TRY(payload_put(payload, &part, sizeof part));
    }
    return RSD_OK;
}

rsd_status digest_list_add(void *context, const struct payload *sent, size_t *at)
{
    struct digest_list *digests = context;
    while (*at < sent->n) {
        struct digest_part part;
        TRY(payload_take(sent, at, &part, sizeof part));
        if (part.index >= digests->n)
            return fail(RSD_EPEER, "a rank sent digest %llu of %zu", (unsigned long long)part.index,
                        digests->n);
        digests->list[part.index].ecma ^= part.ecma;
        digests->list[part.index].jones ^= part.jones;
    }
    return RSD_OK;
}

rsd_status digest_list_replace(void *context, const struct payload *result, size_t *at)
{
    struct digest_list *digests = context;
    for (size_t i = 0; i < digests->n; i++)
        digests->list[i] = (struct digest){0};
    return digest_list_add(digests, result, at);
}

/* ---- the call ---- */

/* Checks the tensors of the call, hashes its arguments, and makes the digests. */
static rsd_status check_tensors(struct digesting *d, struct hash *arguments)
{
    size_t all = d->checkpoint->catalog.ntensors;
    hash_start(arguments, "digest");
    hash_catalog(arguments, &d->checkpoint->catalog);
    hash_i64s(arguments, d->tensors, d->tensors ? d->digests.n : 0);
    for (size_t i = 0; i < d->digests.n; i++)
        if (d->tensors && (d->tensors[i] < 0 || (uint64_t)d->tensors[i] >= all))
            return fail(RSD_EINVAL, "invalid tensor %lld: the checkpoint has %zu",
                        (long long)d->tensors[i], all);
    TRY(format_check_claims(d->checkpoint));
    d->digests.list = mem_new(d->digests.n, sizeof *d->digests.list);
    return d->digests.list ? RSD_OK : RSD_ENOMEM;
}

rsd_status rsd_digest(rsd_checkpoint *checkpoint, int64_t ntensors, const int64_t *tensors,
                      const rsd_io *io, char (*digests)[RSD_DIGEST_NCHARS], rsd_report *report)
{
    const struct catalog *catalog = &checkpoint->catalog;
    struct digesting d = {.checkpoint = checkpoint,
                          .tensors = tensors,
                          .digests.n = tensors ? (size_t)max_i64(ntensors, 0) : catalog->ntensors};
    struct operation_call call = {.from = {checkpoint},
                                  .work = digest_jobs,
                                  .put = digest_list_put,
                                  .take = digest_list_add,
                                  .put_result = digest_list_put,
                                  .take_result = digest_list_replace,
                                  .context = &d};
    struct hash arguments;
    TRY(operation_open(&d.operation, io, report));
    rsd_status status = check_tensors(&d, &arguments);
    status = operation_agree(&d.operation, status, arguments);
    if (!status)
        status = operation_run(&d.operation, &call);
    for (size_t i = 0; i < d.digests.n && !status; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[digest_tensor(&d, i)];
        digest_format(&d.digests.list[i], tensor->dtype, tensor->ndim,
                      tensor_shape(catalog, tensor), digests[i]);
    }
    mem_free(d.digests.list);
    return operation_close(&d.operation, status, report);
}
