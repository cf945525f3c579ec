/* batch.c - many transfers on many threads.
 *
 *     queue 0   job job job ...        jobs that should be done in order, preferably by one thread:
 *     queue 1   job job ...            those that write to one file
 *     ...
 *
 * A thread chooses the queue with the fewest threads, and claims tile after tile until the queue is empty. Two
 * threads that write to one file wait for each other in the kernel, so they share a queue only if there are
 * more threads than queues. The thread that needs the first tile of a job opens its transfer, and the thread that
 * did the last one closes it, so few are open at a time.
 *
 * The first failure ends the batch: threads check for it before each tile, and its message is copied to the
 * thread of the caller.
 */
#include "transfer.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_NBYTES ((int64_t)1 << 20) /* between two reports of progress */

/* Streams may take one part in so many of the memory limit, and two streams with the largest windows in any case. */
enum { STREAMS_PART = 2, STREAMS_LEAST = 34 << 20 };

/* A transfer that was opened. */
struct open_transfer {
    struct transfer transfer;
    const struct batch_job *job;
    int64_t next, end;       /* tiles to be claimed */
    _Atomic bool failed;     /* and was forgiven: its other tiles are skipped */
    _Atomic int64_t left;    /* tiles not done */
    uint64_t streams_nbytes; /* that it took of the memory for streams */
};

struct job_queue {
    pthread_mutex_t lock;
    size_t next, end;  /* jobs */
    size_t prefetched; /* jobs before it are */
    struct open_transfer *current;
    int32_t nworkers; /* under the lock of the batch, like done */
    bool done;
};

struct batch_state {
    struct batch *batch;
    struct job_queue *queues;
    size_t nqueues;
    pthread_mutex_t lock;
    rsd_status status;
    char *message;
    _Atomic bool stopped;
    _Atomic int64_t nbytes_done;
    _Atomic int64_t nbytes_reported; /* in the last report of progress */
    pthread_mutex_t reporting;
    pthread_cond_t returned; /* under the lock, like the next line: memory of streams was */
    uint64_t streams_nbytes, most_streams; /* that is in use now, and was at most */
};

uint64_t batch_tile_limit(int64_t max_nbytes, const rsd_pool *pool)
{
    /* Each thread has buffers for what it reads, what it writes, and perhaps a cast and a kept record. */
    int64_t all = max_nbytes > 0 ? max_nbytes : DEFAULT_MAX_NBYTES;
    return (uint64_t)max_i64(all / pool_nthreads(pool) / 5, 1);
}

uint64_t batch_stream_limit(int64_t max_nbytes)
{
    uint64_t all = (uint64_t)(max_nbytes > 0 ? max_nbytes : DEFAULT_MAX_NBYTES) / STREAMS_PART;
    return all > STREAMS_LEAST ? all : STREAMS_LEAST;
}

/* ---- failures ---- */

static void stop_batch(struct batch_state *s, rsd_status status)
{
    pthread_mutex_lock(&s->lock);
    if (!s->status) {
        s->status = status;
        s->message = text_copy(rsd_error());
    }
    atomic_store(&s->stopped, true);
    pthread_cond_broadcast(&s->returned);
    pthread_mutex_unlock(&s->lock);
}

/* Stops the batch, unless the failure of this job is forgiven. */
static void fail_job(struct batch_state *s, struct open_transfer *open, rsd_status status)
{
    const struct batch *batch = s->batch;
    pthread_mutex_lock(&s->lock);
    bool forgiven = batch->forgive && (atomic_load(&open->failed) ||
                                       batch->forgive(batch->context, open->job, status));
    pthread_mutex_unlock(&s->lock);
    if (forgiven)
        atomic_store(&open->failed, true);
    else
        stop_batch(s, status);
}

/* ---- progress ---- */

/* Returns whether so much was done since the last report that another one is due. */
static bool is_report_due(struct batch_state *s)
{
    int64_t done = atomic_load(&s->nbytes_done);
    return done < s->batch->nbytes_total &&
           done - atomic_load(&s->nbytes_reported) >= PROGRESS_NBYTES;
}

/* Calls on_progress, at most once per megabyte and at the end. A thread does not wait for the report of another
 * one, which may take longer than a tile: it reports after its next tile. */
static void report_batch_progress(struct batch_state *s, bool at_end)
{
    const struct batch *batch = s->batch;
    if (!batch->on_progress || (!at_end && !is_report_due(s)))
        return;
    rsd_progress progress = {.struct_nbytes = sizeof progress, .nbytes_total = batch->nbytes_total};
    int answer = 0;
    if (pthread_mutex_trylock(&s->reporting))
        return;
    if (at_end || is_report_due(s)) { /* another thread may have reported it */
        progress.nbytes_done = min_i64(atomic_load(&s->nbytes_done), batch->nbytes_total);
        atomic_store(&s->nbytes_reported, progress.nbytes_done);
        answer = batch->on_progress(batch->progress_context, &progress);
    }
    pthread_mutex_unlock(&s->reporting);
    if (answer)
        stop_batch(s, fail(RSD_ECANCELLED, "stopped after %lld of %lld bytes",
                           (long long)progress.nbytes_done, (long long)progress.nbytes_total));
}

static int64_t tile_nbytes(const struct transfer *transfer, int64_t tile)
{
    return transfer->nbytes / transfer->ntiles +
           (tile == 0 ? transfer->nbytes % transfer->ntiles : 0);
}

/* ---- memory of streams ---- */

/* Waits until there is memory for the streams of a transfer, which its thread then reads from start to end. So
 * fewer threads work if many streams are open. */
static rsd_status take_streams(struct batch_state *s, struct open_transfer *open)
{
    const struct transfer *transfer = &open->transfer;
    uint64_t need = transfer->stream_nbytes, most = s->batch->max_stream_nbytes;
    if (need > most)
        return fail(RSD_ELIMIT,
                    "%.300s: %zu compressed boxes have to be read at a time, which takes %llu "
                    "bytes; raise the memory limit to %llu bytes",
                    transfer->name, transfer->nstreams, (unsigned long long)need,
                    (unsigned long long)(need * STREAMS_PART));
    pthread_mutex_lock(&s->lock);
    while (need > most - s->streams_nbytes && !atomic_load(&s->stopped))
        pthread_cond_wait(&s->returned, &s->lock);
    s->streams_nbytes += open->streams_nbytes = atomic_load(&s->stopped) ? 0 : need;
    s->most_streams = s->streams_nbytes > s->most_streams ? s->streams_nbytes : s->most_streams;
    pthread_mutex_unlock(&s->lock);
    return RSD_OK;
}

static void return_streams(struct batch_state *s, const struct open_transfer *open)
{
    if (!open->streams_nbytes)
        return;
    pthread_mutex_lock(&s->lock);
    s->streams_nbytes -= open->streams_nbytes;
    pthread_cond_broadcast(&s->returned);
    pthread_mutex_unlock(&s->lock);
}

/* ---- transfers ---- */

static void drop_open_transfer(struct batch_state *s, struct open_transfer *open)
{
    transfer_drop(&open->transfer);
    return_streams(s, open);
    mem_free(open);
}

/* Sources of which this rank reads a part are checked when all ranks have read theirs. */
static rsd_status end_transfer(const struct batch *batch, struct open_transfer *open,
                               struct io_stats *stats)
{
    if (batch->check_records)
        TRY(transfer_check_records(&open->transfer, batch->records, batch_job_is_whole(open->job)));
    TRY(batch_job_is_whole(open->job)
            ? transfer_check_sources(&open->transfer, stats)
            : partial_crcs_add(batch->partial_crcs, open->job, 0, &open->transfer));
    return batch->close ? batch->close(batch->context, open->job, &open->transfer) : RSD_OK;
}

static void close_transfer(struct batch_state *s, struct open_transfer *open,
                           struct io_stats *stats)
{
    if (!atomic_load(&s->stopped) && !atomic_load(&open->failed)) {
        rsd_status status = end_transfer(s->batch, open, stats);
        if (status)
            fail_job(s, open, status);
    }
    drop_open_transfer(s, open);
}

/* Opens the transfer of a job, and limits it to this rank's tiles of the job. */
static rsd_status open_transfer(struct batch_state *s, struct open_transfer *open)
{
    const struct batch *batch = s->batch;
    const struct batch_job *job = open->job;
    struct transfer *transfer = &open->transfer;
    TRY(batch->open(batch->context, job, transfer));
    TRY(take_streams(s, open));
    open->end = transfer->ntiles;
    if (!batch_job_is_whole(job)) {
        open->next = batch_job_tile(job, job->from, transfer->ntiles);
        open->end = batch_job_tile(job, job->to, transfer->ntiles);
    }
    prefetch_tiles(transfer, open->next, open->end);
    atomic_init(&open->left, open->end - open->next);
    return RSD_OK;
}

/* Opens the next transfer of a queue that has tiles. Requires the lock of the queue. */
static rsd_status open_next_transfer(struct batch_state *s, struct job_queue *queue,
                                     struct io_stats *stats)
{
    while (!queue->current && queue->next < queue->end) {
        if (atomic_load(&s->stopped)) /* by a transfer without tiles, which was closed here */
            return RSD_ECANCELLED;
        struct open_transfer *open = mem_new(1, sizeof *open);
        if (!open)
            return RSD_ENOMEM;
        prefetch_jobs(s->batch, queue->next, queue->end, &queue->prefetched);
        open->job = &s->batch->jobs.list[queue->next++];
        rsd_status status = open_transfer(s, open);
        if (status) {
            fail_job(s, open, status);
            drop_open_transfer(s, open);
            if (atomic_load(&s->stopped))
                return status;
        } else if (open->next == open->end) {
            close_transfer(s, open, stats);
        } else {
            queue->current = open;
        }
    }
    return RSD_OK;
}

/* Tiles [first, end) of a transfer, which one thread does. */
struct tile_claim {
    struct open_transfer *open;
    int64_t first, end;
};

/* Claims the next tile of a queue, or all of a transfer whose tiles must be done in order. Returns false when the queue
 * has none left. */
static bool claim_tiles(struct batch_state *s, struct job_queue *queue, struct io_stats *stats,
                        struct tile_claim *claim)
{
    pthread_mutex_lock(&queue->lock);
    rsd_status status =
        atomic_load(&s->stopped) ? RSD_ECANCELLED : open_next_transfer(s, queue, stats);
    struct open_transfer *open = queue->current;
    if (!status && open) {
        int64_t end = open->transfer.in_order ? open->end : open->next + 1;
        *claim = (struct tile_claim){open, open->next, end};
        open->next = end;
        if (open->next == open->end)
            queue->current = NULL;
    }
    pthread_mutex_unlock(&queue->lock);
    if (status && !atomic_load(&s->stopped))
        stop_batch(s, status);
    return !status && open;
}

/* ---- threads ---- */

/* Returns the queue with jobs that has the fewest threads, and joins it. NULL: no queue has jobs. */
static struct job_queue *enter_queue(struct batch_state *s)
{
    struct job_queue *best = NULL;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->nqueues; i++) {
        struct job_queue *queue = &s->queues[i];
        if (queue->done || (s->batch->one_per_queue && queue->nworkers > 0))
            continue;
        if (!best || queue->nworkers < best->nworkers)
            best = queue;
    }
    if (best)
        best->nworkers++;
    pthread_mutex_unlock(&s->lock);
    return best;
}

static void leave_queue(struct batch_state *s, struct job_queue *queue)
{
    pthread_mutex_lock(&s->lock);
    queue->nworkers--;
    queue->done = true;
    pthread_mutex_unlock(&s->lock);
}

/* Claims and runs tiles of a queue until it is empty. Closes a transfer after its last tile. */
static void run_queue(struct batch_state *s, struct job_queue *queue, struct scratch *scratch,
                      struct io_stats *stats)
{
    struct tile_claim claim;
    while (claim_tiles(s, queue, stats, &claim)) {
        struct open_transfer *open = claim.open;
        for (int64_t i = claim.first; i < claim.end; i++) {
            bool skip = atomic_load(&s->stopped) || atomic_load(&open->failed);
            rsd_status status =
                skip ? RSD_OK : transfer_run_tile(&open->transfer, i, scratch, stats);
            if (status)
                fail_job(s, open, status);
            atomic_fetch_add(&s->nbytes_done, tile_nbytes(&open->transfer, i));
            report_batch_progress(s, false);
        }
        int64_t ndone = claim.end - claim.first;
        if (atomic_fetch_sub(&open->left, ndone) == ndone)
            close_transfer(s, open, stats);
    }
}

/* Runs one queue after the other, and adds what this thread read to the statistics. */
static void run_thread(void *context, int64_t thread)
{
    struct batch_state *s = context;
    struct scratch scratch = {.copier = copier_best(), .stream = s->batch->stream};
    struct io_stats stats = {0};
    (void)thread;
    for (struct job_queue *queue; (queue = enter_queue(s));) {
        run_queue(s, queue, &scratch, &stats);
        leave_queue(s, queue);
    }
    rsd_status status = tile_device_finish(&scratch);
    if (status)
        stop_batch(s, status);
    pthread_mutex_lock(&s->lock);
    struct io_stats *sum = &s->batch->stats;
    sum->nbytes_read += stats.nbytes_read;
    sum->nbytes_unchecked += stats.nbytes_unchecked;
    sum->nbytes_decoded_again += stats.nbytes_decoded_again;
    sum->nbytes_memory += (int64_t)(scratch.in_capacity + scratch.cast_capacity);
    pthread_mutex_unlock(&s->lock);
    scratch_drop(&scratch);
}

/* ---- queues ---- */

static int by_queue_and_id(const void *a, const void *b)
{
    const struct batch_job *x = a, *y = b;
    if (x->queue != y->queue)
        return x->queue < y->queue ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Puts runs of jobs with about as many bytes each into the queues. */
static void choose_queues(struct batch *batch, size_t nqueues)
{
    int64_t sum = 0;
    size_t queue = 0;
    for (size_t i = 0; i < batch->jobs.n; i++) {
        struct batch_job *job = &batch->jobs.list[i];
        while (queue + 1 < nqueues &&
               sum >= batch->nbytes_total / (int64_t)nqueues * (int64_t)(queue + 1))
            queue++;
        job->queue = queue;
        sum += job->to - job->from;
    }
}

/* Sorts the jobs into queues. */
static rsd_status open_queues(struct batch_state *s)
{
    struct batch *batch = s->batch;
    struct job_list *jobs = &batch->jobs;
    s->nqueues = batch->nqueues ? batch->nqueues : (size_t)pool_nthreads(batch->pool);
    s->queues = mem_new(s->nqueues, sizeof *s->queues);
    if (!s->queues)
        return RSD_ENOMEM;
    batch->nbytes_total = 0;
    for (size_t i = 0; i < jobs->n; i++)
        batch->nbytes_total += jobs->list[i].to - jobs->list[i].from;
    if (!batch->nqueues)
        choose_queues(batch, s->nqueues);
    if (jobs->n > 1)
        qsort(jobs->list, jobs->n, sizeof *jobs->list, by_queue_and_id);
    for (size_t i = 0, job = 0; i < s->nqueues; i++) {
        struct job_queue *queue = &s->queues[i];
        pthread_mutex_init(&queue->lock, NULL);
        queue->next = job;
        while (job < jobs->n && jobs->list[job].queue == i)
            job++;
        queue->end = job;
    }
    return RSD_OK;
}

static void close_queues(struct batch_state *s)
{
    for (size_t i = 0; i < s->nqueues; i++) {
        if (s->queues[i].current)
            drop_open_transfer(s, s->queues[i].current); /* stopped between its tiles */
        pthread_mutex_destroy(&s->queues[i].lock);
    }
    mem_free(s->queues);
}

rsd_status batch_run(struct batch *batch)
{
    struct batch_state s = {.batch = batch};
    TRY(open_queues(&s));
    pthread_mutex_init(&s.lock, NULL);
    pthread_mutex_init(&s.reporting, NULL);
    pthread_cond_init(&s.returned, NULL);
    int32_t nthreads = pool_nthreads(batch->pool);
    if (batch->max_threads > 0 && batch->max_threads < nthreads)
        nthreads = batch->max_threads;
    pool_run(batch->pool, nthreads, run_thread, &s);
    close_queues(&s);
    batch->stats.nbytes_memory += (int64_t)s.most_streams;
    if (!s.status) {
        atomic_store(&s.nbytes_done, batch->nbytes_total); /* parts are rounded to tiles */
        report_batch_progress(&s, true);
    }
    if (s.status)
        error_set("%s", s.message ? s.message : "no memory for a message");
    mem_free(s.message);
    pthread_cond_destroy(&s.returned);
    pthread_mutex_destroy(&s.reporting);
    pthread_mutex_destroy(&s.lock);
    return s.status;
}
