/* test_stash_faults.c - every allocation of one rank fails once: the call fails on all ranks or on none, no rank
 * hangs, and nothing leaks.
 */
#define FAULTS_OF _Thread_local
#include "alloc_faults.h"
#include "ranks.h"
#include "reshard_experimental.h"

enum { NRANKS = 3, ODD = 1, NUMEL = 35 };

/* The result of each rank. */
struct outcome {
    long nth;
    int check;
    bool failed;
    rsd_status status[NRANKS];
    char message[NRANKS][200];
};

/* Keeps the first failure and its message. */
static rsd_status keep_first(rsd_status first, rsd_status status, char *message)
{
    if (status && !first)
        snprintf(message, 200, "%s", rsd_error());
    return first ? first : status;
}

/* Puts two buffers and gets them. Ids stay equal on all ranks, so a rank continues after a put that failed. */
static rsd_status use_all(const rsd_transport *transport, int check, bool *right, char *message)
{
    rsd_stash_options options = {.struct_nbytes = sizeof options, .check = check, .timeout = 0.5};
    float data[NUMEL], out[2][NUMEL] = {{0}};
    size_t nbytes[] = {sizeof data, sizeof data - 8};
    int64_t id;
    rsd_stash *stash;
    rsd_status first = keep_first(RSD_OK, rsd_stash_new(transport, &options, &stash), message);
    if (first)
        return first;
    for (int i = 0; i < NUMEL; i++)
        data[i] = (float)i;
    for (int i = 0; i < 2; i++)
        first = keep_first(first, rsd_stash_put(stash, data, nbytes[i], &id), message);
    first = keep_first(first, rsd_stash_prefetch(stash, 0, out[0]), message);
    for (int i = 0; i < 2; i++)
        first = keep_first(first, rsd_stash_get(stash, i, i ? out[i] : NULL), message);
    *right = memcmp(out[0], data, nbytes[0]) == 0 && memcmp(out[1], data, nbytes[1]) == 0;
    rsd_stash_free(stash);
    return first;
}

static void one_rank(struct rank *rank, void *context)
{
    struct outcome *outcome = context;
    bool right = false;
    if (rank->rank == ODD)
        until_failure = outcome->nth;
    rsd_status status =
        use_all(&rank->transport, outcome->check, &right, outcome->message[rank->rank]);
    outcome->status[rank->rank] = status;
    if (rank->rank == ODD)
        outcome->failed = failed;
    NEED(rank, status || right, "no failure, and other values");
}

int main(void)
{
    for (int check = 0; check < 2; check++) {
        CASE("every allocation of one rank fails once%s", check ? ", with check" : "");
        struct outcome outcome = {.failed = true, .check = check};
        long n = 0, nagreed = 0;
        for (; outcome.failed; n++) {
            outcome = (struct outcome){.nth = n, .check = check};
            on_ranks(NRANKS, one_rank, &outcome);
            bool fine = outcome.status[ODD] == RSD_OK; /* shared memory is optional */
            CHECK(fine || (outcome.failed && outcome.status[ODD] == RSD_ENOMEM),
                  "allocation %ld: %s, %s", n, rsd_status_name(outcome.status[ODD]),
                  outcome.message[ODD]);
            for (int i = 0; i < NRANKS; i++) {
                rsd_status status = outcome.status[i];
                bool named = strstr(outcome.message[i], "rank 1") != NULL;
                if (i == ODD || (status == RSD_OK && fine))
                    continue;
                /* If a put without check fails on one rank, the get of that buffer fails on all ranks. */
                CHECK((status == RSD_ENOMEM || status == RSD_EINVAL || status == RSD_ETIMEOUT) &&
                          named,
                      "allocation %ld: rank %d: %s, %s", n, i, rsd_status_name(status),
                      outcome.message[i]);
                nagreed += status != RSD_ETIMEOUT;
            }
        }
        CHECK(n > 20 && nagreed > 20, "only %ld allocations, %ld agreed", n, nagreed);
        printf("# %ld allocations, %ld failures were agreed on\n", n - 1, nagreed);
    }
    return tap_end();
}
