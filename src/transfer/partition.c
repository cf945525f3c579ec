/* partition.c - which rank does what of many jobs, and the CRC-32s of what several ranks read.
 *
 *     jobs     |  a  | b |        c         | d | e |        in a row, by their bytes
 *     ranks    |     0     |     1     |     2     |         equal parts of the row
 *
 * A large job that lies across a border is split there, between two tiles; any other is done by the rank in
 * which its middle lies. So each rank reads and writes things that lie together.
 *
 * The CRC-32 of a source that several ranks read in part is the sum of theirs: each sends its partial CRCs
 * to rank 0, which adds them up and compares.
 */
#include "transfer.h"

#include <stdlib.h>

#define SPLIT_NBYTES ((int64_t)8 << 20) /* less is not worth opening it twice */

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

rsd_status partition_jobs(int32_t rank, int32_t nranks, const int64_t *nbytes, const bool *splits,
                          size_t njobs, struct partition *mine)
{
    int64_t all = 0, at = 0;
    for (size_t i = 0; i < njobs; i++)
        all += nbytes[i];
    int64_t lo = border(all, rank, nranks), hi = border(all, rank + 1, nranks);
    bool last = rank == nranks - 1;
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

/* Two ranks compute the border between them separately, so it is computed with integers. */
int64_t partition_tile(const struct job_part *part, int64_t at, int64_t ntiles)
{
    return at == part->of ? ntiles : mul_div_i64(ntiles, at, part->of);
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
                                                         .file = source->file,
                                                         .checkable = source->checkable,
                                                         .crc = source->array.crc,
                                                         .wanted = source->wanted,
                                                         .nbytes = source->array.nbytes,
                                                         .data = source->array.offset,
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
                                .array = {.offset = sum.data, .nbytes = sum.nbytes, .crc = sum.crc},
                                .wanted = sum.wanted,
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
