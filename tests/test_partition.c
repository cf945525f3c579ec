/* test_partition.c - how the bytes of a call are divided among ranks: every tile of every job belongs to exactly
 * one rank, and borders between ranks are exact. */
#include "random.h"
#include "tap.h"
#include "transfer.h"

#include <stdlib.h>

enum { NJOBS = 9, MAX_RANKS = 7 };

static void test_borders(void)
{
    static const struct {
        int64_t at, of, ntiles, tile;
    } borders[] = {
        {0, 10, 4, 0},
        {5, 10, 4, 2},
        {9, 10, 4, 3},
        {10, 10, 4, 4},
        {0, 0, 0, 0},
        /* Beyond 2^53, doubles round up to the end. */
        {((int64_t)1 << 62) - 1, (int64_t)1 << 62, 1000, 999},
        {((int64_t)1 << 60) - 1, (int64_t)1 << 60, (int64_t)1 << 40, ((int64_t)1 << 40) - 1},
        /* In doubles, 100 * (29 / 100) is below 29. */
        {29, 100, 100, 29},
        {57, 100, 100, 57},
        {58, 100, 100, 58},
    };
    CASE("borders between ranks are rounded down exactly");
    for (size_t i = 0; i < sizeof borders / sizeof *borders; i++) {
        struct batch_job job = {.to = borders[i].of, .of = borders[i].of};
        int64_t tile = batch_job_tile(&job, borders[i].at, borders[i].ntiles);
        CHECK(tile == borders[i].tile, "byte %lld of %lld is tile %lld of %lld, should be %lld",
              (long long)borders[i].at, (long long)borders[i].of, (long long)tile,
              (long long)borders[i].ntiles, (long long)borders[i].tile);
    }
}

static void test_partitions(void)
{
    struct random random = {5};
    CASE("every tile of every job belongs to one rank");
    for (int round = 0; round < 300; round++) {
        int64_t next[NJOBS] = {0}, ntiles[NJOBS];
        struct batch_job jobs[NJOBS] = {{0}};
        int32_t nranks = 1 + (int32_t)random_below(&random, MAX_RANKS);
        for (size_t i = 0; i < NJOBS; i++) {
            jobs[i].id = i;
            jobs[i].of = jobs[i].to =
                random_below(&random, random_below(&random, 2) ? 1000 : (int64_t)1 << 40);
            jobs[i].can_split = random_below(&random, 2);
            ntiles[i] = 1 + random_below(&random, 1000);
        }
        for (int32_t rank = 0; rank < nranks; rank++) {
            struct job_list mine = {0};
            for (size_t i = 0; i < NJOBS; i++)
                OK(job_list_add(&mine, jobs[i]));
            job_list_partition(&mine, rank, nranks);
            for (size_t i = 0; i < mine.n; i++) {
                const struct batch_job *job = &mine.list[i];
                int64_t first = batch_job_tile(job, job->from, ntiles[job->id]);
                CHECK(first == next[job->id], "job %zu: rank %d begins at tile %lld, not %lld",
                      job->id, (int)rank, (long long)first, (long long)next[job->id]);
                next[job->id] = batch_job_tile(job, job->to, ntiles[job->id]);
            }
            job_list_drop(&mine);
        }
        for (size_t i = 0; i < NJOBS; i++)
            CHECK(next[i] == ntiles[i], "job %zu: %lld of %lld tiles", i, (long long)next[i],
                  (long long)ntiles[i]);
    }
}

int main(void)
{
    test_borders();
    test_partitions();
    return tap_end();
}
