/* test_stash_faults.c - every allocation of one rank fails once: it says so, the others hear of it or do not
 * need to, nobody hangs and nothing leaks.
 *
 * The linker sends the library's allocations here, so that the library needs no hook of its own.
 */
#include "ranks.h"

void *__real_calloc(size_t count, size_t nbytes);
void *__real_realloc(void *memory, size_t nbytes);
void *__wrap_calloc(size_t count, size_t nbytes);
void *__wrap_realloc(void *memory, size_t nbytes);

static _Thread_local long until_failure = -1; /* allocations that still succeed; negative: all */
static _Thread_local bool failed;

static bool fails_now(void)
{
    if (until_failure < 0 || until_failure-- > 0)
        return false;
    failed = true;
    return true;
}

void *__wrap_calloc(size_t count, size_t nbytes)
{
    return fails_now() ? NULL : __real_calloc(count, nbytes);
}

void *__wrap_realloc(void *memory, size_t nbytes)
{
    return fails_now() ? NULL : __real_realloc(memory, nbytes);
}

enum { NRANKS = 3, ODD = 1, NUMEL = 35 };

/* What each rank came to. */
struct outcome {
    long nth;
    int check;
    bool failed;
    rsd_status status[NRANKS];
    char message[NRANKS][200];
};

/* The first one counts. */
static void keep_message(rsd_status status, char *said)
{
    if (status && !said[0])
        snprintf(said, 200, "%s", rsd_error());
}

/* Puts two buffers and gets them again; ids are in step, so a rank goes on where a put failed. */
static rsd_status use_all(const rsd_transport *transport, int check, bool *right, char *said)
{
    static const int64_t shape[] = {5, 7};
    rsd_stash_options options = {.struct_nbytes = sizeof options, .check = check, .timeout = 0.5};
    rsd_stash_buffer buffer = {
        .struct_nbytes = sizeof buffer, .dtype = RSD_F32, .ndim = 2, .shape = shape};
    float data[NUMEL], out[2][NUMEL] = {{0}};
    rsd_stash *stash;
    rsd_status first = rsd_stash_new(transport, &options, &stash);
    keep_message(first, said);
    if (first)
        return first;
    for (int i = 0; i < NUMEL; i++)
        data[i] = (float)i;
    for (int i = 0; i < 2; i++) {
        int64_t id;
        buffer.dim = i ? RSD_STASH_ANY_DIM : 0;
        rsd_status status = rsd_stash_put(stash, &buffer, data, &id);
        keep_message(status, said);
        first = first ? first : status;
    }
    rsd_status status = rsd_stash_prefetch(stash, 0, NULL, out[0]);
    for (int i = 0; i < 2 && !status; i++)
        status = rsd_stash_get(stash, i, NULL, out[i]);
    keep_message(status, said);
    *right = memcmp(out[0], data, sizeof data) == 0 && memcmp(out[1], data, sizeof data) == 0;
    rsd_stash_free(stash);
    return first ? first : status;
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
        long n = 0, nnamed = 0;
        for (; outcome.failed; n++) {
            outcome = (struct outcome){.nth = n, .check = check};
            on_ranks(NRANKS, one_rank, &outcome);
            bool fine =
                outcome.status[ODD] == RSD_OK; /* it did without, as without shared memory */
            CHECK(fine || (outcome.failed && outcome.status[ODD] == RSD_ENOMEM),
                  "allocation %ld: %s, %s", n, rsd_status_name(outcome.status[ODD]),
                  outcome.message[ODD]);
            for (int i = 0; i < NRANKS; i++) {
                rsd_status status = outcome.status[i];
                bool named = strstr(outcome.message[i], "rank 1") != NULL;
                if (i == ODD || (status == RSD_OK && fine))
                    continue;
                CHECK((status == RSD_EPEER || status == RSD_ETIMEOUT) && named,
                      "allocation %ld: rank %d: %s, %s", n, i, rsd_status_name(status),
                      outcome.message[i]);
                nnamed += status == RSD_EPEER;
            }
        }
        CHECK(n > 20 && nnamed > 20, "only %ld allocations, %ld named", n, nnamed);
        printf("# %ld allocations, %ld told at once\n", n - 1, nnamed);
    }
    return tap_end();
}
