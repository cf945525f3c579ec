/* partition.c - which rank does what of many jobs, and the CRC-32s of what several ranks read.
 *
 *     jobs     |  a  | b |        c         | d | e |        in a row, by their bytes
 *     ranks    |     0     |     1     |     2     |         equal parts of the row
 *
 * A large job that lies across a border is split there, between two tiles. Any other job belongs to the rank in
 * which its middle lies. So each rank reads and writes bytes that lie together.
 *
 * The CRC-32 of a source that several ranks read in part is the sum of theirs: each sends its partial CRCs
 * to rank 0, which adds them up and compares.
 */
#include "transfer.h"

#include <stdlib.h>

#define SPLIT_NBYTES ((int64_t)8 << 20) /* a smaller job is not worth opening twice */

/* ---- jobs ---- */

rsd_status job_list_add(struct job_list *jobs, struct batch_job job)
{
    TRY(GROW(jobs->list, jobs->capacity, jobs->n + 1));
    job.to = job.of;
    jobs->list[jobs->n++] = job;
    return RSD_OK;
}

void job_list_drop(struct job_list *jobs)
{
    mem_free(jobs->list);
    *jobs = (struct job_list){0};
}

/* Borders between ranks are at equal distances in the row of all jobs. */
static int64_t rank_border(int64_t all, int32_t rank, int32_t nranks)
{
    return all / nranks * rank + min_i64(rank, all % nranks);
}

void job_list_partition(struct job_list *jobs, int32_t rank, int32_t nranks)
{
    int64_t all = 0, at = 0;
    size_t kept = 0;
    for (size_t i = 0; i < jobs->n; i++)
        all += jobs->list[i].of;
    int64_t lo = rank_border(all, rank, nranks), hi = rank_border(all, rank + 1, nranks);
    for (size_t i = 0; i < jobs->n; i++) {
        struct batch_job job = jobs->list[i];
        int64_t middle = at + job.of / 2;
        bool mine = middle >= lo && (middle < hi || rank == nranks - 1);
        if (job.can_split && job.of >= SPLIT_NBYTES) {
            job.from = clamp_i64(lo - at, 0, job.of);
            job.to = clamp_i64(hi - at, 0, job.of);
            mine = job.from < job.to;
        }
        at += job.of;
        if (mine)
            jobs->list[kept++] = job;
    }
    jobs->n = kept;
}

/* Two ranks compute the border between them separately, so it is computed with integers. */
int64_t batch_job_tile(const struct batch_job *job, int64_t at, int64_t ntiles)
{
    return at == job->of ? ntiles : mul_div_i64(ntiles, at, job->of);
}

bool tensor_can_split(const struct catalog *catalog, const struct stored_tensor *tensor)
{
    for (size_t box = 0; box < tensor->nboxes; box++)
        if (catalog->extents[tensor->first_extent + box].nzstd)
            return false; /* a stream is read from its start */
    return true;
}

/* ---- sources that several ranks read ---- */

void partial_crcs_open(struct partial_crc_list *crcs)
{
    *crcs = (struct partial_crc_list){0};
    pthread_mutex_init(&crcs->lock, NULL);
}

void partial_crcs_close(struct partial_crc_list *crcs)
{
    mem_free(crcs->list);
    pthread_mutex_destroy(&crcs->lock);
}

rsd_status partial_crcs_add(struct partial_crc_list *crcs, const struct batch_job *job,
                            int64_t side, const struct transfer *transfer)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&crcs->lock);
    for (size_t i = 0; i < transfer->nsources && !status; i++) {
        const struct source *source = &transfer->sources[i];
        if (!source->wanted || source->checked || (source->crc_nbytes == 0 && job->from > 0))
            continue;
        status = GROW(crcs->list, crcs->capacity, crcs->n + 1);
        if (!status)
            crcs->list[crcs->n++] = (struct partial_crc){.job = job->id,
                                                         .tensor = transfer->tensor,
                                                         .side = side,
                                                         .source = (int64_t)i,
                                                         .file = source->file,
                                                         .checkable = source->checkable,
                                                         .crc = source->array.crc,
                                                         .wanted = source->wanted,
                                                         .nbytes = source->array.nbytes,
                                                         .offset = source->array.offset,
                                                         .crc_sum = source->crc_sum,
                                                         .crc_nbytes = source->crc_nbytes};
    }
    pthread_mutex_unlock(&crcs->lock);
    return status;
}

static int by_job_and_source(const void *a, const void *b)
{
    const struct partial_crc *x = a, *y = b;
    if (x->job != y->job)
        return x->job < y->job ? -1 : 1;
    if (x->side != y->side)
        return x->side < y->side ? -1 : 1;
    return (x->source > y->source) - (x->source < y->source);
}

/* If one rank has read all bytes, its sum alone counts. */
static void add_partial_crc(struct partial_crc *sum, const struct partial_crc *more)
{
    if (sum->crc_nbytes == sum->nbytes)
        return;
    if (more->crc_nbytes == more->nbytes)
        sum->crc_sum = sum->crc_nbytes = 0;
    sum->crc_sum ^= more->crc_sum;
    sum->crc_nbytes += more->crc_nbytes;
}

rsd_status partial_crcs_check(struct partial_crc_list *crcs, struct io_stats *stats,
                              partial_crc_damaged *damaged, void *context)
{
    const struct partial_crc *list = crcs->list;
    if (crcs->n > 1)
        qsort(crcs->list, crcs->n, sizeof *crcs->list, by_job_and_source);
    for (size_t i = 0, next; i < crcs->n; i = next) {
        struct partial_crc sum = list[i];
        struct io_stats other = {0};
        for (next = i + 1; next < crcs->n && by_job_and_source(&list[i], &list[next]) == 0; next++)
            add_partial_crc(&sum, &list[next]);
        struct source source = {
            .checkable = sum.checkable != 0,
            .array = {.offset = sum.offset, .nbytes = sum.nbytes, .crc = sum.crc},
            .wanted = sum.wanted,
            .crc_sum = sum.crc_sum,
            .crc_nbytes = sum.crc_nbytes};
        /* The other side of a comparison is not counted. */
        rsd_status status = source_compare_crc(&source, sum.side == 0 ? stats : &other);
        if (status)
            TRY(damaged(context, &sum, status));
    }
    return RSD_OK;
}
