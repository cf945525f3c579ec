/* pool.c - threads that wait for jobs. A job is a range of indices, which threads take one by one.
 *
 *     queue:  job -> job -> job     A thread joins the first job that may have more threads, takes
 *              ^                    indices until none is left, removes the job from the queue if
 *              threads              it is still there, and detaches from it.
 *
 * Invariants:
 *   (1) A job is queued or has attached threads only between its start and the end of its wait, so its
 *       memory may be on the caller's stack.
 *   (2) A job is done when it is neither queued nor attached: a job that was removed from the queue has no
 *       index left, and a thread detaches only after finishing the indices it took.
 *   (3) At most nthreads threads work on one job; the caller of pool_run is one of them.
 *   (4) In a child process after fork the threads do not exist, and the lock may be locked forever. The
 *       child never uses the lock: it does all the work in the calling thread.
 */
#include "base.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { MAX_THREADS = 4096 };

struct rsd_pool {
    atomic_int references;
    pthread_mutex_t lock;
    pthread_cond_t job_queued, job_done;
    struct pool_job *first, **last;
    bool closing;
    pid_t owner;
    int32_t nthreads; /* started */
    pthread_t *threads;
};

static void run_indices(struct pool_job *job)
{
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (index >= job->count)
            return;
        job->work(job->context, index);
    }
}

static void enqueue_job(rsd_pool *pool, struct pool_job *job)
{
    job->next_job = NULL;
    job->queued = true;
    *pool->last = job;
    pool->last = &job->next_job;
}

/* Removes a job from the queue, if it is there. Requires the lock. */
static void dequeue_job(rsd_pool *pool, struct pool_job *job)
{
    if (!job->queued)
        return;
    struct pool_job **link = &pool->first;
    while (*link != job)
        link = &(*link)->next_job;
    *link = job->next_job;
    if (pool->last == &job->next_job)
        pool->last = link;
    job->queued = false;
}

static struct pool_job *find_open_job(rsd_pool *pool)
{
    for (struct pool_job *job = pool->first; job; job = job->next_job)
        if (job->nfree > 0)
            return job;
    return NULL;
}

/* A thread of the pool: works on one job after the other, until the pool is closed. */
static void *thread_main(void *context)
{
    rsd_pool *pool = context;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct pool_job *job = find_open_job(pool);
        if (!job) {
            if (pool->closing)
                break;
            pthread_cond_wait(&pool->job_queued, &pool->lock);
            continue;
        }
        job->nfree--;
        job->nattached++;
        pthread_mutex_unlock(&pool->lock);
        run_indices(job);
        pthread_mutex_lock(&pool->lock);
        dequeue_job(pool, job);
        if (--job->nattached == 0)
            pthread_cond_broadcast(&pool->job_done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Ends all threads of the pool and waits for them. */
static void close_pool(rsd_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->job_queued);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->nthreads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->job_done);
    pthread_cond_destroy(&pool->job_queued);
    pthread_mutex_destroy(&pool->lock);
}

static void release_pool(rsd_pool *pool)
{
    mem_free(pool->threads);
    mem_free(pool);
}

/* Signals are blocked in the threads of the pool, so that the caller's threads handle them. */
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
        return fail(RSD_EINVAL, "invalid number of threads %d (1 to %d)", (int)nthreads,
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
    pthread_cond_init(&pool->job_queued, NULL);
    pthread_cond_init(&pool->job_done, NULL);
    int error = start_threads(pool, nthreads);
    if (error) {
        rsd_status status = fail(RSD_ENOMEM, "cannot start thread %d of %d: %s",
                                 (int)pool->nthreads + 1, (int)nthreads, strerror(error));
        close_pool(pool);
        release_pool(pool);
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
    release_pool(pool);
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
    while (job->queued || job->nattached > 0)
        pthread_cond_wait(&pool->job_done, &pool->lock);
}

static void post_job(rsd_pool *pool, struct pool_job *job, int32_t nthreads)
{
    job->nfree = (int32_t)min_i64(nthreads, job->count);
    pthread_mutex_lock(&pool->lock);
    enqueue_job(pool, job);
    if (job->nfree == 1)
        pthread_cond_signal(&pool->job_queued);
    else
        pthread_cond_broadcast(&pool->job_queued);
    pthread_mutex_unlock(&pool->lock);
}

void pool_run(rsd_pool *pool, int64_t count, pool_work *work, void *context)
{
    struct pool_job job = {.work = work, .context = context, .count = count};
    if (count < 2 || !has_threads(pool) || pool->nthreads < 2) {
        run_indices(&job);
        return;
    }
    post_job(pool, &job, pool->nthreads - 1);
    run_indices(&job);
    pthread_mutex_lock(&pool->lock);
    dequeue_job(pool, &job);
    wait_until_done(pool, &job);
    pthread_mutex_unlock(&pool->lock);
}

void pool_start(rsd_pool *pool, struct pool_job *job, int64_t count, pool_work *work, void *context)
{
    *job = (struct pool_job){.work = work, .context = context, .count = count};
    job->done_by_caller = count < 1 || !has_threads(pool);
    if (job->done_by_caller)
        run_indices(job);
    else
        post_job(pool, job, pool->nthreads);
}

bool pool_wait(rsd_pool *pool, struct pool_job *job)
{
    if (job->done_by_caller || !has_threads(pool))
        return job->done_by_caller;
    pthread_mutex_lock(&pool->lock);
    wait_until_done(pool, job);
    pthread_mutex_unlock(&pool->lock);
    return true;
}
