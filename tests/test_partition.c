/* test_partition.c - how the bytes of a call are divided among ranks: every tile of every job belongs to exactly
 * one rank, and borders between ranks are exact. */
#include "transfer.h"
#include "random.h"
#include "tap.h"

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
        struct job_part part = {.to = borders[i].of, .of = borders[i].of};
        int64_t tile = partition_tile(&part, borders[i].at, borders[i].ntiles);
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
        int64_t nbytes[NJOBS], next[NJOBS] = {0}, ntiles[NJOBS];
        bool splits[NJOBS];
        int32_t nranks = 1 + (int32_t)random_below(&random, MAX_RANKS);
        for (size_t i = 0; i < NJOBS; i++) {
            nbytes[i] = random_below(&random, random_below(&random, 2) ? 1000 : (int64_t)1 << 40);
            ntiles[i] = 1 + random_below(&random, 1000);
            splits[i] = random_below(&random, 2);
        }
        for (int32_t rank = 0; rank < nranks; rank++) {
            struct partition mine = {0};
            OK(partition_jobs(rank, nranks, nbytes, splits, NJOBS, &mine));
            for (size_t i = 0; i < mine.n; i++) {
                const struct job_part *part = &mine.list[i];
                int64_t first = partition_tile(part, part->from, ntiles[part->job]);
                CHECK(first == next[part->job], "job %zu: rank %d begins at tile %lld, not %lld",
                      part->job, (int)rank, (long long)first, (long long)next[part->job]);
                next[part->job] = partition_tile(part, part->to, ntiles[part->job]);
            }
            partition_drop(&mine);
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
