/* spread.c - one call, many ranks: who does what of it, and how the ends come together.
 *
 *     jobs     |  a  | b |        c         | d | e |        in a row, by their bytes
 *     ranks    |     0     |     1     |     2     |         equal parts of the row
 *
 * A large job that lies across a border is split there, between two tiles; any other is done by the rank in
 * which its middle lies. So each rank reads and writes things that lie together.
 *
 * The CRC-32 of a source that several ranks read in part is the sum of theirs: what each has seen is sent to
 * rank 0, which adds it up and looks.
 */
#include "checkpoint.h"

#include <stdatomic.h>
#include <stdlib.h>

#define SPLIT_NBYTES ((int64_t)8 << 20) /* less is not worth opening it twice */

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

/* ---- portions ---- */

/* Borders between ranks lie at equal distances in the row of all jobs. */
static int64_t border(int64_t all, int32_t rank, int32_t nranks)
{
    return all / nranks * rank + min_i64(rank, all % nranks);
}

static rsd_status add_portion(struct partition *mine, struct job_part part)
{
    TRY(GROW(mine->list, mine->capacity, mine->n + 1));
    TRY(GROW(mine->nbytes, mine->nbytes_capacity, mine->n + 1));
    mine->nbytes[mine->n] = part.to - part.from;
    mine->list[mine->n++] = part;
    return RSD_OK;
}

rsd_status partition_jobs(const struct operation *operation, const int64_t *nbytes,
                          const bool *splits, size_t njobs, struct partition *mine)
{
    int64_t all = 0, at = 0;
    for (size_t i = 0; i < njobs; i++)
        all += nbytes[i];
    int64_t lo = border(all, operation->rank, operation->nranks),
            hi = border(all, operation->rank + 1, operation->nranks);
    bool last = operation->rank == operation->nranks - 1;
    for (size_t i = 0; i < njobs; at += nbytes[i++]) {
        struct job_part part = {.job = i, .to = nbytes[i], .of = nbytes[i]};
        int64_t middle = at + nbytes[i] / 2;
        bool whole = !splits || !splits[i] || nbytes[i] < SPLIT_NBYTES;
        if (whole && (middle < lo || (middle >= hi && !last)))
            continue;
        if (!whole) {
            part.from = clamp_i64(lo - at, 0, nbytes[i]);
            part.to = clamp_i64(hi - at, 0, nbytes[i]);
            if (part.from == part.to)
                continue;
        }
        TRY(add_portion(mine, part));
    }
    return RSD_OK;
}

void partition_drop(struct partition *parts)
{
    mem_free(parts->list);
    mem_free(parts->nbytes);
    *parts = (struct partition){0};
}

/* Neighbours come to the same tile. */
int64_t partition_tile(const struct job_part *part, int64_t at, int64_t ntiles)
{
    if (at == part->of)
        return ntiles;
    return (int64_t)((double)ntiles * ((double)at / (double)part->of));
}

bool partition_can_split(const struct catalog *catalog, const struct stored_tensor *tensor)
{
    for (size_t box = 0; box < tensor->nboxes; box++)
        if (catalog->extents[tensor->first_extent + box].nzstd)
            return false; /* a stream is read from its beginning */
    return true;
}

/* ---- sources that several ranks read ---- */

void partial_crcs_open(struct partial_crc_list *seen)
{
    *seen = (struct partial_crc_list){0};
    pthread_mutex_init(&seen->lock, NULL);
}

void partial_crcs_close(struct partial_crc_list *seen)
{
    mem_free(seen->list);
    pthread_mutex_destroy(&seen->lock);
}

rsd_status partial_crcs_add(struct partial_crc_list *seen, const struct job_part *part,
                            int64_t side, struct transfer *transfer)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&seen->lock);
    for (size_t i = 0; i < transfer->nsources && !status; i++) {
        const struct source *source = &transfer->sources[i];
        if (!source->wanted || (source->seen == 0 && part->from > 0))
            continue;
        status = GROW(seen->list, seen->capacity, seen->n + 1);
        if (!status)
            seen->list[seen->n++] = (struct partial_crc){.job = part->job,
                                                         .side = side,
                                                         .source = (int64_t)i,
                                                         .file = source->extent.file,
                                                         .checkable = source->checkable,
                                                         .crc = source->crc,
                                                         .wanted = source->wanted,
                                                         .nbytes = source->nbytes,
                                                         .data = source->data,
                                                         .sum = source->crc_sum,
                                                         .seen = source->seen};
    }
    pthread_mutex_unlock(&seen->lock);
    return status;
}

static int by_source(const void *a, const void *b)
{
    const struct partial_crc *x = a, *y = b;
    if (x->job != y->job)
        return x->job < y->job ? -1 : 1;
    if (x->side != y->side)
        return x->side < y->side ? -1 : 1;
    return (x->source > y->source) - (x->source < y->source);
}

/* One that was read whole by some rank has been checked by the sum of that rank. */
static void add_up(struct partial_crc *sum, const struct partial_crc *more)
{
    if (sum->seen == sum->nbytes)
        return;
    if (more->seen == more->nbytes)
        sum->sum = sum->seen = 0;
    sum->sum ^= more->sum;
    sum->seen += more->seen;
}

rsd_status partial_crcs_check(struct partial_crc *list, size_t n, rsd_report *report,
                              partial_crc_damaged *damaged, void *context)
{
    if (n > 1)
        qsort(list, n, sizeof *list, by_source);
    for (size_t i = 0, next; i < n; i = next) {
        struct partial_crc sum = list[i];
        struct io_stats stats = {0};
        for (next = i + 1; next < n && by_source(&list[i], &list[next]) == 0; next++)
            add_up(&sum, &list[next]);
        struct source source = {.checkable = sum.checkable != 0,
                                .crc = sum.crc,
                                .wanted = sum.wanted,
                                .nbytes = sum.nbytes,
                                .data = sum.data,
                                .crc_sum = sum.sum,
                                .seen = sum.seen};
        rsd_status status = source_check(&source, &stats);
        if (sum.side == 0) /* the other side of a comparison is not counted */
            report_add_stats(report, &stats);
        if (status)
            TRY(damaged(context, &sum, status));
    }
    return RSD_OK;
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
