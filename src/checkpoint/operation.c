/* operation.c - one call, on one rank or on many: its options, its steps, progress and reports. */
#include "checkpoint.h"

#include <stdatomic.h>

/* ---- opening and closing ---- */

rsd_status operation_open(struct operation *operation, const rsd_io *given,
                          const rsd_report *report)
{
    *operation = (struct operation){.transport.nranks = 1, .nranks = 1, .began = seconds_now()};
    rsd_io *io = &operation->io;
    if (report)
        TRY(report_check("rsd_report", report));
    TRY(options_copy("rsd_io", given, io, sizeof *io));
    operation->tile_limit = batch_tile_limit(io->max_nbytes, io->pool);
    if (io->transport) {
        TRY(peer_check_transport(io->transport, &operation->transport));
        operation->rank = operation->transport.rank;
        operation->nranks = operation->transport.nranks;
    }
    partial_crcs_open(&operation->partial_crcs);
    record_set_open(&operation->records);
    return RSD_OK;
}

rsd_status operation_close(struct operation *operation, rsd_status status, rsd_report *report)
{
    partial_crcs_close(&operation->partial_crcs);
    record_set_close(&operation->records);
    if (!status && report)
        report_copy(report, &operation->report, sizeof operation->report);
    return status;
}

/* ---- steps ---- */

static rsd_status take_step(struct operation *operation, struct peer_step *step)
{
    if (!step->lead) {
        step->on_progress = operation->io.on_progress;
        step->progress_context = operation->io.context;
    }
    atomic_store(&operation->step, step);
    rsd_status status = peer_step(&operation->transport, operation->io.timeout, step);
    atomic_store(&operation->step, NULL);
    return status;
}

static void drop_payloads(struct peer_step *step)
{
    payload_drop(&step->own);
    payload_drop(&step->result);
}

/* What each rank sends to agree: no pointers, which other ranks could not use. */
struct call_arguments {
    struct hash arguments;
    uint64_t tile_limit;
};

struct comparison {
    struct call_arguments own;
    int32_t nranks;
};

/* On rank 0: compares the arguments of all ranks. The result is the smallest tile limit. */
static rsd_status compare_arguments(void *context, const struct payload *all,
                                    struct payload *result)
{
    const struct comparison *comparison = context;
    const struct hash *own = &comparison->own.arguments;
    uint64_t least = comparison->own.tile_limit;
    for (int32_t rank = 0; rank < comparison->nranks; rank++) {
        struct call_arguments other;
        size_t at = 0;
        TRY(payload_take(&all[rank], &at, &other, sizeof other));
        if (other.arguments.a != own->a || other.arguments.b != own->b)
            return fail(RSD_EMISMATCH,
                        "rank %d passed different arguments than rank 0, or reads a different "
                        "checkpoint",
                        (int)rank);
        least = other.tile_limit < least ? other.tile_limit : least;
    }
    return payload_put(result, &least, sizeof least);
}

rsd_status operation_agree(struct operation *operation, rsd_status status, struct hash arguments)
{
    if (operation->nranks == 1)
        return status;
    struct comparison comparison = {.own = {arguments, operation->tile_limit},
                                    .nranks = operation->nranks};
    struct peer_step step = {.already = status, .merge = compare_arguments, .context = &comparison};
    step.lead = true; /* no progress; an error of all ranks is reported once */
    if (!status)
        step.already = payload_put(&step.own, &comparison.own, sizeof comparison.own);
    status = take_step(operation, &step);
    size_t at = 0;
    uint64_t least = 0;
    if (!status)
        status = payload_take(&step.result, &at, &least, sizeof least);
    if (!status && (least == 0 || least > operation->tile_limit))
        status = fail(RSD_EPEER, "tiles of %llu bytes (1 to %llu are possible)",
                      (unsigned long long)least, (unsigned long long)operation->tile_limit);
    if (!status)
        operation->tile_limit = least;
    drop_payloads(&step);
    return status;
}

void hash_catalog(struct hash *hash, const struct catalog *catalog)
{
    for (size_t i = 0; i < catalog->ntensors; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[i];
        hash_string(hash, tensor->name);
        hash_i64(hash, tensor->dtype);
        hash_i64s(hash, tensor_shape(catalog, tensor), (size_t)tensor->ndim);
        hash_i64s(hash, catalog->coordinates + tensor->boxes,
                  2 * (size_t)tensor->ndim * tensor->nboxes);
        for (size_t box = 0; box < tensor->nboxes; box++) {
            const struct extent *extent = &catalog->extents[tensor->first_extent + box];
            hash_i64(hash, extent->file);
            hash_i64(hash, (int64_t)extent->offset);
            hash_i64(hash, (int64_t)extent->nbytes);
        }
    }
}

/* ---- work of all ranks ---- */

/* A call in progress. */
struct call_run {
    struct operation *operation;
    const struct operation_call *call;
    struct peer_step step;
};

/* Each rank: works, and puts its report, its partial CRCs and its results into its payload. */
static rsd_status work_and_put(void *context)
{
    struct call_run *run = context;
    struct operation *operation = run->operation;
    const struct operation_call *call = run->call;
    struct payload *own = &run->step.own;
    TRY(call->work(call->context));
    if (operation->report.seconds == 0) /* a background save has set it */
        operation->report.seconds = seconds_now() - operation->began;
    TRY(payload_put(own, &operation->report, sizeof operation->report));
    TRY(payload_put_list(own, operation->partial_crcs.list, operation->partial_crcs.n,
                         sizeof *operation->partial_crcs.list));
    return call->put ? call->put(call->context, own) : RSD_OK;
}

/* Reads a report that a rank sent. Counts of this rank can be added to it. */
static rsd_status read_report(const struct payload *payload, size_t *at, rsd_report *report)
{
    TRY(payload_take(payload, at, report, sizeof *report));
    int64_t *const sums[] = {&report->nbytes_needed,    &report->nbytes_read,
                             &report->nbytes_unchecked, &report->nbytes_decoded_again,
                             &report->nbytes_written,   &report->nfiles_written,
                             &report->nbytes_shared};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        *sums[i] = clamp_i64(*sums[i], 0, INT64_MAX / 2);
    return RSD_OK;
}

/* Adds counts that ranks sent. A sum that does not fit is wrong in any case. */
static int64_t add_counts(int64_t sum, int64_t count)
{
    return add_i64(sum, count, &sum) ? sum : INT64_MAX;
}

/* Adds the report of a rank to the sum. */
static rsd_status take_report(const struct payload *payload, size_t *at, rsd_report *sum)
{
    rsd_report one;
    TRY(read_report(payload, at, &one));
    sum->ntensors = max_i64(sum->ntensors, one.ntensors);
    sum->nbytes_needed = add_counts(sum->nbytes_needed, one.nbytes_needed);
    sum->nbytes_read = add_counts(sum->nbytes_read, one.nbytes_read);
    sum->nbytes_decoded_again = add_counts(sum->nbytes_decoded_again, one.nbytes_decoded_again);
    sum->nbytes_unchecked = add_counts(sum->nbytes_unchecked, one.nbytes_unchecked);
    sum->nbytes_written = add_counts(sum->nbytes_written, one.nbytes_written);
    sum->nfiles_written = add_counts(sum->nfiles_written, one.nfiles_written);
    sum->nbytes_memory = max_i64(sum->nbytes_memory, one.nbytes_memory);
    sum->nleft_out = max_i64(sum->nleft_out, one.nleft_out);
    sum->nbytes_shared = add_counts(sum->nbytes_shared, one.nbytes_shared);
    sum->seconds = one.seconds > sum->seconds ? one.seconds : sum->seconds;
    return RSD_OK;
}

/* Takes what each rank sent. What rank 0 put itself, it has. */
static rsd_status take_payloads(struct call_run *run, const struct payload *all, rsd_report *sum,
                                struct partial_crc_list *crcs)
{
    const struct operation_call *call = run->call;
    for (int32_t rank = 0; rank < run->operation->nranks; rank++) {
        size_t at = 0;
        TRY(take_report(&all[rank], &at, sum));
        TRY(payload_take_list(&all[rank], &at, &crcs->list, &crcs->n, &crcs->capacity,
                              sizeof *crcs->list));
        if (call->take && rank > 0)
            TRY(call->take(call->context, &all[rank], &at));
    }
    return RSD_OK;
}

/* On rank 0: names the tensor of a record whose CRC-32 is wrong. Another rank may have sent any numbers. */
static rsd_status report_damage(void *context, const struct partial_crc *crc, rsd_status status)
{
    const struct operation_call *call = ((struct call_run *)context)->call;
    const rsd_checkpoint *from = call->from[crc->side != 0];
    if (!from || crc->tensor >= from->catalog.ntensors || crc->file < 0 ||
        crc->file >= rsd_checkpoint_nfiles(from))
        return fail(RSD_EPEER, "a rank sent the CRC of tensor %zu in file %lld, which do not exist",
                    crc->tensor, (long long)crc->file);
    const char *name = from->catalog.tensors[crc->tensor].name;
    status = checkpoint_fail_in(from, (uint32_t)crc->file, name, status);
    return call->damaged ? call->damaged(call->context, crc->job) : status;
}

/* On rank 0: merges the payloads of all ranks, checks CRCs of split records, and puts the result for all ranks. */
static rsd_status merge_call(void *context, const struct payload *all, struct payload *result)
{
    struct call_run *run = context;
    const struct operation_call *call = run->call;
    rsd_report sum = {0};
    struct partial_crc_list crcs = {0};
    struct io_stats stats = {0};
    rsd_status status = take_payloads(run, all, &sum, &crcs);
    if (!status)
        status = partial_crcs_check(&crcs, &stats, report_damage, run);
    mem_free(crcs.list);
    TRY(status);
    sum.nbytes_unchecked = add_counts(sum.nbytes_unchecked, (int64_t)stats.nbytes_unchecked);
    TRY(payload_put(result, &sum, sizeof sum));
    return call->put_result ? call->put_result(call->context, result) : RSD_OK;
}

rsd_status operation_run(struct operation *operation, const struct operation_call *call)
{
    struct call_run run = {.operation = operation, .call = call};
    size_t at = 0;
    run.step.work = work_and_put;
    run.step.merge = merge_call;
    run.step.context = &run;
    rsd_status status = take_step(operation, &run.step);
    if (!status)
        status = read_report(&run.step.result, &at, &operation->report);
    if (!status && call->take_result)
        status = call->take_result(call->context, &run.step.result, &at);
    drop_payloads(&run.step);
    return status;
}

/* Passes the progress of this rank, from any of its threads, to the step. A background save has no step until the
 * caller waits for it. */
static int note_progress(void *context, const rsd_progress *progress)
{
    struct operation *operation = context;
    struct peer_step *step = atomic_load(&operation->step);
    if (!step)
        return 0;
    atomic_store(&step->nbytes_total, progress->nbytes_total);
    atomic_store(&step->nbytes_done, progress->nbytes_done);
    return atomic_load(&step->stop);
}

rsd_status operation_run_part(struct operation *operation, struct batch *batch, rsd_status status)
{
    job_list_partition(&batch->jobs, operation->rank, operation->nranks);
    return operation_run_batch(operation, batch, status);
}

rsd_status operation_run_batch(struct operation *operation, struct batch *batch, rsd_status status)
{
    bool alone = operation->nranks == 1;
    rsd_report *report = &operation->report;
    batch->pool = operation->io.pool;
    batch->stream = operation->io.stream;
    batch->partial_crcs = &operation->partial_crcs;
    batch->records = &operation->records;
    batch->max_stream_nbytes = batch_stream_limit(operation->io.max_nbytes);
    batch->on_progress = alone ? operation->io.on_progress : note_progress;
    batch->progress_context = alone ? operation->io.context : operation;
    if (!status)
        status = batch_run(batch);
    job_list_drop(&batch->jobs);
    report->nbytes_read += (int64_t)batch->stats.nbytes_read;
    report->nbytes_unchecked += (int64_t)batch->stats.nbytes_unchecked;
    report->nbytes_decoded_again += (int64_t)batch->stats.nbytes_decoded_again;
    report->nbytes_memory = max_i64(report->nbytes_memory, batch->stats.nbytes_memory);
    return status;
}

/* ---- work of rank 0 ---- */

struct lead_run {
    struct operation *operation;
    rsd_status (*work)(void *context);
    void *context;
    struct payload *state;
    struct peer_step step;
};

static rsd_status lead_and_put(void *context)
{
    struct lead_run *run = context;
    struct payload *own = &run->step.own;
    TRY(run->work(run->context));
    TRY(payload_put(own, &run->operation->report, sizeof run->operation->report));
    return run->state ? payload_put(own, run->state->bytes, run->state->n) : RSD_OK;
}

static rsd_status pass_payload(void *context, const struct payload *all, struct payload *result)
{
    (void)context;
    return payload_put(result, all[0].bytes, all[0].n);
}

rsd_status operation_lead(struct operation *operation, rsd_status (*work)(void *context),
                          void *context, struct payload *state)
{
    struct lead_run run = {operation, work, context, state, {.merge = pass_payload}};
    size_t at = 0;
    run.step.work = operation->rank == 0 ? lead_and_put : NULL;
    run.step.context = &run;
    run.step.lead = true;
    rsd_status status = take_step(operation, &run.step);
    if (!status)
        status = read_report(&run.step.result, &at, &operation->report);
    if (!status && state && operation->rank > 0)
        status = payload_put(state, run.step.result.bytes + at, run.step.result.n - at);
    drop_payloads(&run.step);
    return status;
}

/* ---- payloads ---- */

rsd_status payload_put_list(struct payload *payload, const void *list, size_t n,
                            size_t element_nbytes)
{
    uint64_t count = n;
    TRY(payload_put(payload, &count, sizeof count));
    return payload_put(payload, list, n * element_nbytes);
}

rsd_status payload_take_list(const struct payload *payload, size_t *at, void *list_pointer,
                             size_t *n, size_t *capacity, size_t element_nbytes)
{
    uint64_t count;
    TRY(payload_take(payload, at, &count, sizeof count));
    if (count > (payload->n - *at) / element_nbytes)
        return fail(RSD_EPEER, "a rank sent a list that is longer than its message");
    TRY(mem_grow(list_pointer, capacity, *n + (size_t)count, element_nbytes));
    char *list = *(char **)list_pointer;
    TRY(payload_take(payload, at, list + *n * element_nbytes, (size_t)count * element_nbytes));
    *n += (size_t)count;
    return RSD_OK;
}
