/* transfer.c - many hauls on many threads.
 *
 *     lane 0   haul haul haul ...        a lane is what should be worked through in order, best by one
 *     lane 1   haul haul ...             thread: the hauls into one output file
 *     ...
 *
 * A thread takes the lane with the fewest threads at it and claims tile after tile until the lane is
 * done. Two threads that write to one file wait for each other in the kernel, so they share a lane only
 * when there are more of them than lanes. A haul is opened by whoever needs its first tile and closed by
 * whoever did its last one, so few are open at a time, however many there are.
 *
 * The first failure ends it all: threads look at it before each tile, and its message is carried over to
 * the caller's thread.
 */
#include "transfer.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_NBYTES ((int64_t)1 << 20) /* between two reports of progress */

struct running {
    struct transfer transfer;
    size_t job;
    int64_t next, end;    /* tiles to be claimed */
    _Atomic bool failed;  /* and was forgiven: the rest of it is left out */
    _Atomic int64_t left; /* tiles not done */
};

struct lane_state {
    pthread_mutex_t lock;
    size_t next, end;  /* jobs */
    size_t prefetched; /* jobs before it are */
    struct running *current;
    int32_t nworkers; /* under the transfer's lock, like done */
    bool done;
};

struct state {
    struct batch *batch;
    struct lane_state *lanes;
    pthread_mutex_t lock;
    rsd_status status;
    char *message;
    _Atomic bool stopped;
    _Atomic int64_t nbytes_done;
    _Atomic int64_t nbytes_reported; /* of the last report of progress */
    int64_t nbytes_memory;
};

uint64_t tile_limit(int64_t max_nbytes, const rsd_pool *pool)
{
    /* Each thread has what it reads, what it writes and, perhaps, a cast of that and a kept record. */
    int64_t all = max_nbytes > 0 ? max_nbytes : (int64_t)256 << 20;
    return (uint64_t)max_i64(all / pool_nthreads(pool) / 5, 1);
}

void report_add_stats(rsd_report *report, const struct io_stats *stats)
{
    report->nbytes_read += (int64_t)stats->nbytes_read;
    report->nbytes_unchecked += (int64_t)stats->nbytes_unchecked;
    report->nbytes_decoded_again += (int64_t)stats->again;
    report->nbytes_memory = max_i64(report->nbytes_memory, stats->nbytes_memory);
}

/* ---- failing ---- */

static void note_failure(struct state *s, rsd_status status)
{
    pthread_mutex_lock(&s->lock);
    if (!s->status) {
        s->status = status;
        s->message = mem_copy(rsd_error(), strlen(rsd_error()) + 1, 1);
    }
    pthread_mutex_unlock(&s->lock);
    atomic_store(&s->stopped, true);
}

/* A failure of one job, which may be forgiven. */
static void job_failed(struct state *s, struct running *running, rsd_status status)
{
    const struct batch *t = s->batch;
    pthread_mutex_lock(&s->lock);
    bool forgiven = t->forgive &&
                    (atomic_load(&running->failed) || t->forgive(t->context, running->job, status));
    pthread_mutex_unlock(&s->lock);
    if (forgiven)
        atomic_store(&running->failed, true);
    else
        note_failure(s, status);
}

/* Whether so much was done since the last report that another one is due. */
static bool is_report_due(struct state *s)
{
    int64_t done = atomic_load(&s->nbytes_done);
    return done < s->batch->nbytes_total &&
           done - atomic_load(&s->nbytes_reported) >= PROGRESS_NBYTES;
}

/* Calls on_progress, at most once per megabyte and at the end. */
static void report_progress(struct state *s, bool at_end)
{
    const struct batch *t = s->batch;
    if (!t->on_progress || (!at_end && !is_report_due(s)))
        return;
    rsd_progress progress = {.struct_nbytes = sizeof progress, .nbytes_total = t->nbytes_total};
    int answer = 0;
    pthread_mutex_lock(&s->lock);
    if (at_end || is_report_due(s)) { /* another thread may have reported it */
        progress.nbytes_done = min_i64(atomic_load(&s->nbytes_done), t->nbytes_total);
        atomic_store(&s->nbytes_reported, progress.nbytes_done);
        answer = t->on_progress(t->progress_context, &progress);
    }
    pthread_mutex_unlock(&s->lock);
    if (answer)
        note_failure(s, fail(RSD_ECANCELLED, "stopped after %lld of %lld bytes",
                             (long long)progress.nbytes_done, (long long)progress.nbytes_total));
}

/* ---- hauls ---- */

static rsd_status check_sources(struct transfer *transfer, struct io_stats *stats)
{
    for (size_t i = 0; i < transfer->nsources; i++) {
        struct source *source = &transfer->sources[i];
        if (source->memory || !source->wanted)
            continue;
        rsd_status status = source_check(source, stats);
        if (status)
            return store_fail_in(source->checkpoint->store, source->file,
                                 fail_in(status, "%.300s: ", transfer->name));
    }
    return RSD_OK;
}

/* Sources of which this rank reads a portion are checked when all ranks have read theirs. */
static rsd_status check_portion(const struct batch *t, struct running *running,
                                struct io_stats *stats)
{
    const struct job_part *part = t->parts ? &t->parts[running->job] : NULL;
    return part && !job_part_is_whole(part) ? partial_crcs_add(t->seen, part, 0, &running->transfer)
                                            : check_sources(&running->transfer, stats);
}

static void drop_running(struct running *running)
{
    transfer_drop(&running->transfer);
    mem_free(running);
}

static void close_haul(struct state *s, struct running *running, struct io_stats *stats)
{
    const struct batch *t = s->batch;
    if (!atomic_load(&s->stopped) && !atomic_load(&running->failed)) {
        rsd_status status = check_portion(t, running, stats);
        if (!status)
            status = t->close(t->context, running->job, &running->transfer);
        if (status)
            job_failed(s, running, status);
    }
    drop_running(running);
}

/* Opens the next haul of a lane that has tiles, with the lane locked. */
static rsd_status open_next(struct state *s, struct lane_state *lane, struct io_stats *stats)
{
    const struct batch *t = s->batch;
    while (!lane->current && lane->next < lane->end) {
        if (atomic_load(&s->stopped)) /* by one without tiles, which was closed here */
            return RSD_ECANCELLED;
        struct running *running = mem_new(1, sizeof *running);
        if (!running)
            return RSD_ENOMEM;
        running->job = lane->next++;
        prefetch_jobs(t, running->job, lane->end, &lane->prefetched);
        rsd_status status = t->open(t->context, running->job, &running->transfer);
        if (status) {
            job_failed(s, running, status);
            drop_running(running);
            if (atomic_load(&s->stopped))
                return status;
            continue;
        }
        running->end = running->transfer.ntiles;
        if (t->parts && !job_part_is_whole(&t->parts[running->job])) {
            const struct job_part *part = &t->parts[running->job];
            running->next = partition_tile(part, part->from, running->transfer.ntiles);
            running->end = partition_tile(part, part->to, running->transfer.ntiles);
        }
        prefetch_tiles(&running->transfer, running->next, running->end);
        atomic_init(&running->left, running->end - running->next);
        if (running->next == running->end)
            close_haul(s, running, stats);
        else
            lane->current = running;
    }
    return RSD_OK;
}

/* Tiles [first, end) of a haul; false when the lane has none left. */
static bool claim(struct state *s, struct lane_state *lane, struct io_stats *stats,
                  struct running **running, int64_t *first, int64_t *end)
{
    pthread_mutex_lock(&lane->lock);
    rsd_status status = atomic_load(&s->stopped) ? RSD_ECANCELLED : open_next(s, lane, stats);
    struct running *r = lane->current;
    if (!status && r) {
        *running = r;
        *first = r->next;
        *end = r->next = r->transfer.in_order ? r->end : r->next + 1;
        if (r->next == r->end)
            lane->current = NULL;
    }
    pthread_mutex_unlock(&lane->lock);
    if (status && !atomic_load(&s->stopped))
        note_failure(s, status);
    return !status && r;
}

/* ---- threads ---- */

static struct lane_state *choose_lane(struct state *s)
{
    struct lane_state *best = NULL;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->batch->nlanes; i++) {
        struct lane_state *lane = &s->lanes[i];
        if (lane->done || (s->batch->one_per_lane && lane->nworkers > 0))
            continue;
        if (!best || lane->nworkers < best->nworkers)
            best = lane;
    }
    if (best)
        best->nworkers++;
    pthread_mutex_unlock(&s->lock);
    return best;
}

static void leave_lane(struct state *s, struct lane_state *lane)
{
    pthread_mutex_lock(&s->lock);
    lane->nworkers--;
    lane->done = true;
    pthread_mutex_unlock(&s->lock);
}

static int64_t tile_share(const struct transfer *transfer, int64_t tile)
{
    return transfer->nbytes / transfer->ntiles +
           (tile == 0 ? transfer->nbytes % transfer->ntiles : 0);
}

static void work_lane(struct state *s, struct lane_state *lane, struct scratch *scratch,
                      struct io_stats *stats)
{
    struct running *running;
    int64_t first, end;
    while (claim(s, lane, stats, &running, &first, &end)) {
        for (int64_t i = first; i < end; i++) {
            bool skip = atomic_load(&s->stopped) || atomic_load(&running->failed);
            rsd_status status =
                skip ? RSD_OK : transfer_run_tile(&running->transfer, i, scratch, stats);
            if (status)
                job_failed(s, running, status);
            atomic_fetch_add(&s->nbytes_done, tile_share(&running->transfer, i));
            report_progress(s, false);
        }
        if (atomic_fetch_sub(&running->left, end - first) == end - first)
            close_haul(s, running, stats);
    }
}

static void work(void *context, int64_t thread)
{
    struct state *s = context;
    struct scratch scratch = {.copier = copier_best()};
    struct io_stats stats = {0};
    (void)thread;
    for (struct lane_state *lane; (lane = choose_lane(s));) {
        work_lane(s, lane, &scratch, &stats);
        leave_lane(s, lane);
    }
    pthread_mutex_lock(&s->lock);
    struct io_stats *sum = &s->batch->stats;
    sum->nbytes_read += stats.nbytes_read;
    sum->nbytes_unchecked += stats.nbytes_unchecked;
    sum->again += stats.again;
    s->nbytes_memory +=
        (int64_t)(scratch.in_capacity + scratch.out_capacity + scratch.cast_capacity);
    pthread_mutex_unlock(&s->lock);
    scratch_drop(&scratch);
}

rsd_status batch_run(struct batch *t)
{
    struct state s = {.batch = t};
    s.lanes = mem_new(t->nlanes, sizeof *s.lanes);
    if (!s.lanes)
        return RSD_ENOMEM;
    pthread_mutex_init(&s.lock, NULL);
    for (size_t i = 0; i < t->nlanes; i++) {
        s.lanes[i].next = t->first_job[i];
        s.lanes[i].end = t->first_job[i + 1];
        pthread_mutex_init(&s.lanes[i].lock, NULL);
    }
    pool_run(t->pool, pool_nthreads(t->pool), work, &s);
    for (size_t i = 0; i < t->nlanes; i++) {
        if (s.lanes[i].current)
            drop_running(s.lanes[i].current); /* stopped between its tiles */
        pthread_mutex_destroy(&s.lanes[i].lock);
    }
    if (!s.status) {
        atomic_store(&s.nbytes_done, t->nbytes_total); /* portions are rounded to tiles */
        report_progress(&s, true);
    }
    t->stats.nbytes_memory = s.nbytes_memory;
    if (s.status)
        error_set("%s", s.message ? s.message : "no memory for a message");
    mem_free(s.message);
    mem_free(s.lanes);
    pthread_mutex_destroy(&s.lock);
    return s.status;
}

/* Runs of jobs in a row, of about as many bytes each. */
static void split_lanes(const int64_t *nbytes, size_t njobs, size_t nlanes, size_t *first_job)
{
    int64_t all = 0, sum = 0;
    size_t lane = 0;
    for (size_t i = 0; i < njobs; i++)
        all += nbytes[i];
    first_job[0] = 0;
    for (size_t i = 0; i < njobs; i++) {
        while (lane + 1 < nlanes && sum >= all / (int64_t)nlanes * (int64_t)(lane + 1))
            first_job[++lane] = i;
        sum += nbytes[i];
    }
    while (lane < nlanes)
        first_job[++lane] = njobs;
}

rsd_status batch_run_evenly(struct batch *t, const int64_t *nbytes, size_t njobs)
{
    t->nlanes = (size_t)pool_nthreads(t->pool);
    size_t *first_job = mem_new(t->nlanes + 1, sizeof *first_job);
    if (!first_job)
        return RSD_ENOMEM;
    split_lanes(nbytes, njobs, t->nlanes, first_job);
    for (size_t i = 0; i < njobs; i++)
        t->nbytes_total += nbytes[i];
    t->first_job = first_job;
    rsd_status status = batch_run(t);
    mem_free(first_job);
    t->first_job = NULL;
    return status;
}
