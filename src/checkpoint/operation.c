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

rsd_status spread_open(struct spread *spread, const rsd_transport *given, double timeout,
                       rsd_on_progress *on_progress, void *context)
{
    *spread = (struct spread){
        .nranks = 1, .timeout = timeout, .on_progress = on_progress, .context = context};
    spread->began = seconds_now();
    if (!given)
        return RSD_OK;
    rsd_transport *t = &spread->transport;
    TRY(take_options("rsd_transport", given, t, sizeof *t));
    if (t->rank < 0 || t->rank >= t->nranks)
        return fail(RSD_EINVAL, "rank %d of %d", (int)t->rank, (int)t->nranks);
    if (!t->send || !t->recv || !t->test || !t->cancel)
        return fail(RSD_EINVAL, "a transport without all of its functions");
    spread->rank = t->rank;
    spread->nranks = t->nranks;
    return RSD_OK;
}

/* Progress of one rank, from any of its threads. */
static int follow(void *context, const rsd_progress *progress)
{
    struct spread *spread = context;
    atomic_store(&spread->step->nbytes_total, progress->nbytes_total);
    atomic_store(&spread->step->nbytes_done, progress->nbytes_done);
    return atomic_load(&spread->step->stop);
}

void spread_follow(struct spread *spread, struct transfer *transfer)
{
    bool alone = spread->nranks == 1;
    transfer->on_progress = alone ? spread->on_progress : follow;
    transfer->progress_context = alone ? spread->context : spread;
}

/* ---- steps ---- */

rsd_status spread_step(struct spread *spread, struct joint_step *step)
{
    rsd_status status;
    spread->step = step;
    if (spread->nranks > 1) {
        if (!step->lead) {
            step->on_progress = spread->on_progress;
            step->progress_context = spread->context;
        }
        return agree_on(&spread->transport, spread->timeout, step);
    }
    status = step->work ? step->work(step->context) : step->already;
    if (!status && step->merge)
        status = step->merge(step->context, &step->own, &step->heard);
    return status;
}

static rsd_status hear_first(void *context, const struct said *all, struct said *heard)
{
    (void)context;
    return said_add(heard, all[0].bytes, all[0].n);
}

rsd_status spread_lead_step(struct spread *spread, struct joint_step *step)
{
    step->work = spread->rank == 0 ? step->work : NULL;
    step->merge = hear_first;
    step->lead = true;
    return spread_step(spread, step);
}

rsd_status spread_lead(struct spread *spread, rsd_status (*work)(void *context), void *context)
{
    struct joint_step step = {.work = spread->rank == 0 ? work : NULL, .context = context};
    step.lead = true;
    rsd_status status = spread_step(spread, &step);
    said_drop(&step.own);
    said_drop(&step.heard);
    return status;
}

struct called {
    struct spread *spread;
    struct hash what;
    uint64_t tile_limit;
};

static rsd_status merge_calls(void *context, const struct said *all, struct said *heard)
{
    const struct called *own = context;
    uint64_t least = own->tile_limit;
    for (int32_t rank = 0; rank < own->spread->nranks; rank++) {
        struct called other;
        size_t at = 0;
        TRY(said_take(&all[rank], &at, &other, sizeof other));
        if (other.what.a != own->what.a || other.what.b != own->what.b)
            return fail(RSD_EMISMATCH,
                        "rank %d calls for something else than rank 0, or sees another checkpoint",
                        (int)rank);
        least = other.tile_limit < least ? other.tile_limit : least;
    }
    return said_add(heard, &least, sizeof least);
}

rsd_status spread_meet(struct spread *spread, rsd_status status, struct hash what,
                       uint64_t *tile_limit)
{
    if (spread->nranks == 1)
        return status;
    struct called own;
    memset(&own, 0, sizeof own); /* all bytes travel */
    own.spread = spread;
    own.what = what;
    own.tile_limit = tile_limit ? *tile_limit : 0;
    struct joint_step step = {.already = status, .merge = merge_calls, .context = &own};
    step.lead = true; /* nothing to follow; what fails everywhere is said once */
    if (!status)
        step.already = said_add(&step.own, &own, sizeof own);
    status = spread_step(spread, &step);
    size_t at = 0;
    if (!status && tile_limit)
        status = said_take(&step.heard, &at, tile_limit, sizeof *tile_limit);
    said_drop(&step.own);
    said_drop(&step.heard);
    return status;
}

void hash_contents(const struct contents *contents, struct hash *hash)
{
    for (size_t i = 0; i < contents->ntensors; i++) {
        const struct tensor *tensor = &contents->tensors[i];
        hash_string(hash, tensor->name);
        hash_i64(hash, tensor->dtype);
        hash_i64s(hash, tensor_shape(contents, tensor), (size_t)tensor->ndim);
        hash_i64s(hash, contents->coordinates + tensor->boxes,
                  2 * (size_t)tensor->ndim * tensor->nboxes);
        for (size_t box = 0; box < tensor->nboxes; box++) {
            const struct extent *extent = &contents->extents[tensor->first_extent + box];
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

static rsd_status add_portion(struct portions *mine, struct portion portion)
{
    TRY(GROW(mine->list, mine->room, mine->n + 1));
    TRY(GROW(mine->nbytes, mine->room_nbytes, mine->n + 1));
    mine->nbytes[mine->n] = portion.to - portion.from;
    mine->list[mine->n++] = portion;
    return RSD_OK;
}

rsd_status share_out(const struct spread *spread, const int64_t *nbytes, const bool *splits,
                     size_t njobs, struct portions *mine)
{
    int64_t all = 0, at = 0;
    for (size_t i = 0; i < njobs; i++)
        all += nbytes[i];
    int64_t lo = border(all, spread->rank, spread->nranks),
            hi = border(all, spread->rank + 1, spread->nranks);
    bool last = spread->rank == spread->nranks - 1;
    for (size_t i = 0; i < njobs; at += nbytes[i++]) {
        struct portion portion = {.job = i, .to = nbytes[i], .of = nbytes[i]};
        int64_t middle = at + nbytes[i] / 2;
        bool whole = !splits || !splits[i] || nbytes[i] < SPLIT_NBYTES;
        if (whole && (middle < lo || (middle >= hi && !last)))
            continue;
        if (!whole) {
            portion.from = clamp_i64(lo - at, 0, nbytes[i]);
            portion.to = clamp_i64(hi - at, 0, nbytes[i]);
            if (portion.from == portion.to)
                continue;
        }
        TRY(add_portion(mine, portion));
    }
    return RSD_OK;
}

void portions_drop(struct portions *portions)
{
    mem_free(portions->list);
    mem_free(portions->nbytes);
    *portions = (struct portions){0};
}

/* Neighbours come to the same tile. */
int64_t portion_tile(const struct portion *portion, int64_t at, int64_t ntiles)
{
    if (at == portion->of)
        return ntiles;
    return (int64_t)((double)ntiles * ((double)at / (double)portion->of));
}

bool can_split(const struct contents *contents, const struct tensor *tensor)
{
    for (size_t box = 0; box < tensor->nboxes; box++)
        if (contents->extents[tensor->first_extent + box].nzstd)
            return false; /* a stream is read from its beginning */
    return true;
}

/* ---- sources that several ranks read ---- */

void seen_open(struct seen_list *seen)
{
    *seen = (struct seen_list){0};
    pthread_mutex_init(&seen->lock, NULL);
}

void seen_close(struct seen_list *seen)
{
    mem_free(seen->list);
    pthread_mutex_destroy(&seen->lock);
}

rsd_status seen_add(struct seen_list *seen, const struct portion *portion, int64_t side,
                    struct haul *haul)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&seen->lock);
    for (size_t i = 0; i < haul->nsources && !status; i++) {
        const struct source *source = &haul->sources[i];
        if (!source->wanted || (source->seen == 0 && portion->from > 0))
            continue;
        status = GROW(seen->list, seen->room, seen->n + 1);
        if (!status)
            seen->list[seen->n++] = (struct seen){.job = portion->job,
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
    const struct seen *x = a, *y = b;
    if (x->job != y->job)
        return x->job < y->job ? -1 : 1;
    if (x->side != y->side)
        return x->side < y->side ? -1 : 1;
    return (x->source > y->source) - (x->source < y->source);
}

/* One that was read whole by some rank has been checked by the sum of that rank. */
static void add_up(struct seen *sum, const struct seen *more)
{
    if (sum->seen == sum->nbytes)
        return;
    if (more->seen == more->nbytes)
        sum->sum = sum->seen = 0;
    sum->sum ^= more->sum;
    sum->seen += more->seen;
}

rsd_status seen_check(struct seen *list, size_t n, rsd_report *report, seen_damaged *damaged,
                      void *context)
{
    if (n > 1)
        qsort(list, n, sizeof *list, by_source);
    for (size_t i = 0, next; i < n; i = next) {
        struct seen sum = list[i];
        struct tally tally = {0};
        for (next = i + 1; next < n && by_source(&list[i], &list[next]) == 0; next++)
            add_up(&sum, &list[next]);
        struct source source = {.checkable = sum.checkable != 0,
                                .crc = sum.crc,
                                .wanted = sum.wanted,
                                .nbytes = sum.nbytes,
                                .data = sum.data,
                                .crc_sum = sum.sum,
                                .seen = sum.seen};
        rsd_status status = source_check(&source, &tally);
        if (sum.side == 0) /* the other side of a comparison is not counted */
            report_tally(report, &tally);
        if (status)
            TRY(damaged(context, &sum, status));
    }
    return RSD_OK;
}

/* ---- what ranks say ---- */

rsd_status say_list(struct said *said, const void *list, size_t n, size_t nbytes_each)
{
    uint64_t count = n;
    TRY(said_add(said, &count, sizeof count));
    return said_add(said, list, n * nbytes_each);
}

rsd_status hear_list(const struct said *said, size_t *at, void *list_pointer, size_t *n,
                     size_t *room, size_t nbytes_each)
{
    uint64_t count;
    TRY(said_take(said, at, &count, sizeof count));
    if (count > (said->n - *at) / nbytes_each)
        return fail(RSD_EPEER, "a rank says a list that is longer than all it said");
    TRY(mem_grow(list_pointer, room, *n + (size_t)count, nbytes_each));
    char *list = *(char **)list_pointer;
    TRY(said_take(said, at, list + *n * nbytes_each, (size_t)count * nbytes_each));
    *n += (size_t)count;
    return RSD_OK;
}

rsd_status say_report(const struct spread *spread, struct said *said, rsd_report *report)
{
    report->seconds = seconds_now() - spread->began;
    return said_add(said, report, sizeof *report);
}

rsd_status hear_report(const struct said *said, size_t *at, rsd_report *sum)
{
    rsd_report one;
    TRY(said_take(said, at, &one, sizeof one));
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

rsd_status hear_extent(const struct said *said, size_t *at, struct contents *contents)
{
    struct extent_said one;
    TRY(said_take(said, at, &one, sizeof one));
    if (one.index >= (one.value ? contents->nvalues : contents->nextents))
        return fail(RSD_EPEER, "a rank wrote item %llu of %zu", (unsigned long long)one.index,
                    contents->nextents);
    struct extent *extent =
        one.value ? &contents->values[one.index].extent : &contents->extents[one.index];
    extent->offset = one.offset;
    extent->nbytes = one.nbytes;
    return RSD_OK;
}

rsd_status merge_reports(const struct spread *spread, const struct said *all, struct said *heard)
{
    rsd_report sum = {0};
    for (int32_t rank = 0; rank < spread->nranks; rank++) {
        size_t at = 0;
        TRY(hear_report(&all[rank], &at, &sum));
    }
    return said_add(heard, &sum, sizeof sum);
}
