/* pool.c - threads that wait for jobs; a job is a range of indices that threads take one by one.
 *
 *     queue:  job -> job -> job          a thread joins the first job that has a place for it,
 *              ^                         takes indices until none is left, unlinks the job if it
 *              threads                   is still queued, and leaves it
 *
 * Invariants:
 *   (1) A job is queued or has attached threads only between its start and the end of its wait, so
 *       its memory may be the caller's stack.
 *   (2) A job is done when it is neither queued nor attached: an unlinked job has no index left to
 *       take, and an attached thread leaves only after finishing the indices it took.
 *   (3) At most nthreads threads work on one job: the caller of pool_run is one of them.
 *   (4) In a child after fork the threads do not exist and the lock may be held by nobody who
 * lives: the child never touches it and works alone.
 */
#include "base.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <unistd.h>

enum { MAX_THREADS = 4096 };

struct rsd_pool {
    atomic_int references;
    pthread_mutex_t lock;
    pthread_cond_t work_came, job_left;
    struct pool_job *first, **last;
    bool closing;
    pid_t owner;
    int32_t nthreads; /* started */
    pthread_t *threads;
};

static void take_all(struct pool_job *job)
{
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (index >= job->count)
            return;
        job->work(job->context, index);
    }
}

static void enqueue(rsd_pool *pool, struct pool_job *job)
{
    job->behind = NULL;
    job->queued = true;
    *pool->last = job;
    pool->last = &job->behind;
}

static void unlink_job(rsd_pool *pool, struct pool_job *job)
{
    if (!job->queued)
        return;
    struct pool_job **link = &pool->first;
    while (*link != job)
        link = &(*link)->behind;
    *link = job->behind;
    if (pool->last == &job->behind)
        pool->last = link;
    job->queued = false;
}

static struct pool_job *job_with_place(rsd_pool *pool)
{
    for (struct pool_job *job = pool->first; job; job = job->behind)
        if (job->places > 0)
            return job;
    return NULL;
}

static void *thread_main(void *context)
{
    rsd_pool *pool = context;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct pool_job *job = job_with_place(pool);
        if (!job) {
            if (pool->closing)
                break;
            pthread_cond_wait(&pool->work_came, &pool->lock);
            continue;
        }
        job->places--;
        job->attached++;
        pthread_mutex_unlock(&pool->lock);
        take_all(job);
        pthread_mutex_lock(&pool->lock);
        unlink_job(pool, job);
        if (--job->attached == 0)
            pthread_cond_broadcast(&pool->job_left);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void close_pool(rsd_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->work_came);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->nthreads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->job_left);
    pthread_cond_destroy(&pool->work_came);
    pthread_mutex_destroy(&pool->lock);
}

static void release(rsd_pool *pool)
{
    mem_free(pool->threads);
    mem_free(pool);
}

/* Signals are for the threads of the caller, who may have handlers for them. */
static int start_threads(rsd_pool *pool, int32_t nthreads)
{
    sigset_t all, before;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->nthreads < nthreads && !error) {
        error = pthread_create(&pool->threads[pool->nthreads], NULL, thread_main, pool);
        pool->nthreads += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

rsd_status rsd_pool_new(int32_t nthreads, rsd_pool **out)
{
    if (nthreads < 1 || nthreads > MAX_THREADS)
        return fail(RSD_EINVAL, "a pool of %d threads: 1 to %d are possible", (int)nthreads,
                    (int)MAX_THREADS);
    rsd_pool *pool = mem_new(1, sizeof *pool);
    if (!pool)
        return RSD_ENOMEM;
    pool->threads = mem_new((size_t)nthreads, sizeof *pool->threads);
    if (!pool->threads) {
        mem_free(pool);
        return RSD_ENOMEM;
    }
    atomic_init(&pool->references, 1);
    pool->owner = getpid();
    pool->last = &pool->first;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work_came, NULL);
    pthread_cond_init(&pool->job_left, NULL);
    int error = start_threads(pool, nthreads);
    if (error) {
        rsd_status status = fail(RSD_ENOMEM, "thread %d of %d could not be started: error %d",
                                 (int)pool->nthreads + 1, (int)nthreads, error);
        close_pool(pool);
        release(pool);
        return status;
    }
    *out = pool;
    return RSD_OK;
}

rsd_pool *pool_share(rsd_pool *pool)
{
    if (pool)
        atomic_fetch_add(&pool->references, 1);
    return pool;
}

void rsd_pool_free(rsd_pool *pool)
{
    if (!pool || atomic_fetch_sub(&pool->references, 1) > 1)
        return;
    if (pool->owner == getpid())
        close_pool(pool);
    release(pool);
}

static bool has_threads(const rsd_pool *pool)
{
    return pool && pool->owner == getpid();
}

int32_t pool_nthreads(const rsd_pool *pool)
{
    return has_threads(pool) ? pool->nthreads : 1;
}

static void wait_until_done(rsd_pool *pool, struct pool_job *job)
{
    while (job->queued || job->attached > 0)
        pthread_cond_wait(&pool->job_left, &pool->lock);
}

static void post(rsd_pool *pool, struct pool_job *job, int32_t places)
{
    job->places = (int32_t)min_i64(places, job->count);
    pthread_mutex_lock(&pool->lock);
    enqueue(pool, job);
    if (job->places == 1)
        pthread_cond_signal(&pool->work_came);
    else
        pthread_cond_broadcast(&pool->work_came);
    pthread_mutex_unlock(&pool->lock);
}

void pool_run(rsd_pool *pool, int64_t count, pool_work *work, void *context)
{
    struct pool_job job = {.work = work, .context = context, .count = count};
    if (count < 2 || !has_threads(pool) || pool->nthreads < 2) {
        take_all(&job);
        return;
    }
    post(pool, &job, pool->nthreads - 1);
    take_all(&job);
    pthread_mutex_lock(&pool->lock);
    unlink_job(pool, &job);
    wait_until_done(pool, &job);
    pthread_mutex_unlock(&pool->lock);
}

void pool_start(rsd_pool *pool, struct pool_job *job, int64_t count, pool_work *work, void *context)
{
    *job = (struct pool_job){.work = work, .context = context, .count = count};
    job->alone = count < 1 || !has_threads(pool);
    if (job->alone)
        take_all(job);
    else
        post(pool, job, pool->nthreads);
}

bool pool_wait(rsd_pool *pool, struct pool_job *job)
{
    if (job->alone || !has_threads(pool))
        return job->alone;
    pthread_mutex_lock(&pool->lock);
    wait_until_done(pool, job);
    pthread_mutex_unlock(&pool->lock);
    return true;
}
