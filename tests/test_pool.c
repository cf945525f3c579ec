/* test_pool.c - the thread pool: every index once, several jobs at the same time, and a fork during a job. */
#include "base.h"
#include "tap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 100000 };

static void count_one(void *context, int64_t index)
{
    atomic_fetch_add((atomic_int *)context + index, 1);
}

static bool each_once(atomic_int *counts, int64_t n, int times)
{
    for (int64_t i = 0; i < n; i++)
        if (atomic_load(&counts[i]) != times)
            return false;
    return true;
}

static void *run_many(void *context)
{
    static _Thread_local atomic_int counts[64];
    for (int round = 1; round <= 200; round++) {
        pool_run(context, 64, count_one, counts);
        if (!each_once(counts, 64, round))
            return context;
    }
    return NULL;
}

int main(void)
{
    static atomic_int counts[MOST];
    rsd_pool *pool;
    struct pool_job job;
    CASE("the function is called once for every index");
    OK(rsd_pool_new(4, &pool));
    CHECK(pool_nthreads(pool) == 4 && pool_nthreads(NULL) == 1);
    pool_run(pool, MOST, count_one, counts);
    CHECK(each_once(counts, MOST, 1));
    pool_run(NULL, MOST, count_one, counts);
    CHECK(each_once(counts, MOST, 2));
    pool_run(pool, 0, count_one, counts);
    pool_run(pool, 1, count_one, counts);
    CHECK(atomic_load(&counts[0]) == 3);
    CASE("start and wait, many times");
    for (int round = 0; round < 300; round++) {
        pool_start(pool, &job, 100, count_one, counts + 1);
        pool_wait(pool, &job);
    }
    CHECK(each_once(counts + 1, 100, 302));
    CASE("several callers at once");
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, run_many, pool);
    for (int i = 0; i < 3; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        CHECK(wrong == NULL);
    }
    CASE("after a fork, the calling thread of the child does all the work");
    pid_t child = fork();
    if (child == 0) {
        static atomic_int own[50];
        pool_run(pool, 50, count_one, own);
        pool_start(pool, &job, 50, count_one, own);
        pool_wait(pool, &job);
        rsd_pool_free(pool);
        _exit(each_once(own, 50, 2) ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
          WEXITSTATUS(status) == 0);
    rsd_pool_free(pool);
    return tap_end();
}
