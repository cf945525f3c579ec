/* operation.c - one call, many ranks: its steps, what ranks must agree on, progress and reports. */
#include "checkpoint.h"

#include <stdatomic.h>

/* ---- opening ---- */

rsd_status operation_open(struct operation *operation, const rsd_transport *given, double timeout,
                          rsd_on_progress *on_progress, void *context)
{
    *operation = (struct operation){.transport.nranks = 1,
                                    .nranks = 1,
                                    .timeout = timeout,
                                    .on_progress = on_progress,
                                    .context = context};
    operation->began = seconds_now();
    if (!given)
        return RSD_OK;
    TRY(peer_check_transport(given, &operation->transport));
    operation->rank = operation->transport.rank;
    operation->nranks = operation->transport.nranks;
    return RSD_OK;
}

/* Progress of one rank, from any of its threads. */
static int follow(void *context, const rsd_progress *progress)
{
    struct operation *operation = context;
    atomic_store(&operation->step->nbytes_total, progress->nbytes_total);
    atomic_store(&operation->step->nbytes_done, progress->nbytes_done);
    return atomic_load(&operation->step->stop);
}

void operation_follow(struct operation *operation, struct batch *batch)
{
    bool alone = operation->nranks == 1;
    batch->on_progress = alone ? operation->on_progress : follow;
    batch->progress_context = alone ? operation->context : operation;
}

/* ---- steps ---- */

rsd_status operation_step(struct operation *operation, struct peer_step *step)
{
    operation->step = step;
    if (!step->lead) {
        step->on_progress = operation->on_progress;
        step->progress_context = operation->context;
    }
    return peer_step(&operation->transport, operation->timeout, step);
}

static rsd_status hear_first(void *context, const struct payload *all, struct payload *result)
{
    (void)context;
    return payload_put(result, all[0].bytes, all[0].n);
}

rsd_status operation_lead_step(struct operation *operation, struct peer_step *step)
{
    step->work = operation->rank == 0 ? step->work : NULL;
    step->merge = hear_first;
    step->lead = true;
    return operation_step(operation, step);
}

rsd_status operation_lead(struct operation *operation, rsd_status (*work)(void *context),
                          void *context)
{
    struct peer_step step = {.work = operation->rank == 0 ? work : NULL, .context = context};
    step.lead = true;
    rsd_status status = operation_step(operation, &step);
    payload_drop(&step.own);
    payload_drop(&step.result);
    return status;
}

/* What each rank sends: no pointers, which other ranks could not use. */
struct called {
    struct hash what;
    uint64_t tile_limit;
};

struct comparison {
    const struct operation *operation;
    struct called own;
};

static rsd_status merge_calls(void *context, const struct payload *all, struct payload *result)
{
    const struct comparison *comparison = context;
    const struct called *own = &comparison->own;
    uint64_t least = own->tile_limit;
    for (int32_t rank = 0; rank < comparison->operation->nranks; rank++) {
        struct called other;
        size_t at = 0;
        TRY(payload_take(&all[rank], &at, &other, sizeof other));
        if (other.what.a != own->what.a || other.what.b != own->what.b)
            return fail(RSD_EMISMATCH,
                        "rank %d passed different arguments than rank 0, or reads a different "
                        "checkpoint",
                        (int)rank);
        least = other.tile_limit < least ? other.tile_limit : least;
    }
    return payload_put(result, &least, sizeof least);
}

rsd_status operation_agree(struct operation *operation, rsd_status status, struct hash what,
                           uint64_t *tile_limit)
{
    if (operation->nranks == 1)
        return status;
    struct comparison comparison = {
        .operation = operation, .own = {.what = what, .tile_limit = tile_limit ? *tile_limit : 0}};
    struct peer_step step = {.already = status, .merge = merge_calls, .context = &comparison};
    step.lead = true; /* nothing to follow; what fails everywhere is said once */
    if (!status)
        step.already = payload_put(&step.own, &comparison.own, sizeof comparison.own);
    status = operation_step(operation, &step);
    size_t at = 0;
    if (!status && tile_limit)
        status = payload_take(&step.result, &at, tile_limit, sizeof *tile_limit);
    payload_drop(&step.own);
    payload_drop(&step.result);
    return status;
}

void catalog_hash(const struct catalog *catalog, struct hash *hash)
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

/* ---- what ranks say ---- */

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
        return fail(RSD_EPEER, "a rank says a list that is longer than all it said");
    TRY(mem_grow(list_pointer, capacity, *n + (size_t)count, element_nbytes));
    char *list = *(char **)list_pointer;
    TRY(payload_take(payload, at, list + *n * element_nbytes, (size_t)count * element_nbytes));
    *n += (size_t)count;
    return RSD_OK;
}

rsd_status payload_put_report(const struct operation *operation, struct payload *payload,
                              rsd_report *report)
{
    report->seconds = seconds_now() - operation->began;
    return payload_put(payload, report, sizeof *report);
}

rsd_status payload_take_report(const struct payload *payload, size_t *at, rsd_report *sum)
{
    rsd_report one;
    TRY(payload_take(payload, at, &one, sizeof one));
    sum->ntensors = max_i64(sum->ntensors, one.ntensors);
    sum->nbytes_needed += one.nbytes_needed;
    sum->nbytes_read += one.nbytes_read;
    sum->nbytes_decoded_again += one.nbytes_decoded_again;
    sum->nbytes_unchecked += one.nbytes_unchecked;
    sum->nbytes_written += one.nbytes_written;
    sum->nfiles_written += one.nfiles_written;
    sum->nbytes_memory = max_i64(sum->nbytes_memory, one.nbytes_memory);
    sum->nleft_out = max_i64(sum->nleft_out, one.nleft_out);
    sum->nbytes_shared += one.nbytes_shared;
    sum->seconds = one.seconds > sum->seconds ? one.seconds : sum->seconds;
    return RSD_OK;
}

rsd_status payload_take_extent(const struct payload *payload, size_t *at, struct catalog *catalog)
{
    struct extent_update one;
    TRY(payload_take(payload, at, &one, sizeof one));
    if (one.index >= (one.value ? catalog->nvalues : catalog->nextents))
        return fail(RSD_EPEER, "a rank wrote item %llu of %zu", (unsigned long long)one.index,
                    catalog->nextents);
    struct extent *extent =
        one.value ? &catalog->values[one.index].extent : &catalog->extents[one.index];
    extent->offset = one.offset;
    extent->nbytes = one.nbytes;
    return RSD_OK;
}

rsd_status merge_reports(const struct operation *operation, const struct payload *all,
                         struct payload *result)
{
    rsd_report sum = {0};
    for (int32_t rank = 0; rank < operation->nranks; rank++) {
        size_t at = 0;
        TRY(payload_take_report(&all[rank], &at, &sum));
    }
    return payload_put(result, &sum, sizeof sum);
}
