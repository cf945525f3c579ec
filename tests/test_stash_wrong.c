/* test_stash_wrong.c - buffers that differ between ranks, and ranks that fail, get another buffer or do not make the
 * call: all ranks return, and the error names that rank. */
#include "ranks.h"
#include "reshard_experimental.h"

enum { NRANKS = 4, ODD = 2, NUMEL = 60 };

static rsd_stash *stash_new(struct rank *rank, int32_t check, double timeout)
{
    rsd_stash *stash = NULL;
    rsd_stash_options options = {
        .struct_nbytes = sizeof options, .check = check, .timeout = timeout};
    NEED_OK(rank, rsd_stash_new(&rank->transport, &options, &stash));
    return stash;
}

static void fill(float *data, float first)
{
    for (int i = 0; i < NUMEL; i++)
        data[i] = first + (float)i;
}

static bool is_filled(const float *data, float first)
{
    for (int i = 0; i < NUMEL; i++)
        if (data[i] != first + (float)i)
            return false;
    return true;
}

static void comes_back(struct rank *rank, rsd_stash *stash, int64_t id, float first)
{
    float out[NUMEL] = {0};
    NEED_OK(rank, rsd_stash_get(stash, id, out));
    NEED(rank, is_filled(out, first), "buffer %lld came back with other values", (long long)id);
}

/* ---- wrong arguments on all ranks ---- */

static void refused(struct rank *rank, void *context)
{
    rsd_stash *stash = stash_new(rank, context != NULL, 60);
    float data[NUMEL], out[2 * NUMEL];
    int64_t id = -1;
    fill(data, 0);
    NEED_FAILS(rank, RSD_EINVAL, "data is NULL", rsd_stash_put(stash, NULL, sizeof data, &id));
    NEED_FAILS(rank, RSD_ELIMIT, "too many", rsd_stash_put(stash, data, SIZE_MAX, &id));
    NEED(rank, id == -1, "written by a put that failed");

    NEED_OK(rank, rsd_stash_put(stash, data, sizeof data, &id));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer 77", rsd_stash_get(stash, 77, out));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer -1", rsd_stash_prefetch(stash, -1, out));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer 77", rsd_stash_drop(stash, 77));
    NEED_FAILS(rank, RSD_EINVAL, "out is NULL", rsd_stash_get(stash, id, NULL));
    NEED_OK(rank, rsd_stash_prefetch(stash, id, out));
    NEED_FAILS(rank, RSD_EINVAL, "was prefetched already", rsd_stash_prefetch(stash, id, out));
    NEED_FAILS(rank, RSD_EINVAL, "prefetched to another address",
               rsd_stash_get(stash, id, out + NUMEL));
    NEED(rank, is_filled(out, 0), "the prefetch did not complete");
    comes_back(rank, stash, id, 0); /* the stash can be used again */
    NEED_OK(rank, rsd_stash_drop(stash, id));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer", rsd_stash_get(stash, id, out));
    rsd_stash_usage usage = {.struct_nbytes = 1};
    NEED_FAILS(rank, RSD_EINVAL, "struct_nbytes", rsd_stash_stats(stash, &usage));
    rsd_stash_free(stash);
}

/* ---- buffers that differ ---- */

static void differing(struct rank *rank, void *context)
{
    rsd_stash *stash = stash_new(rank, 1, 60);
    float data[NUMEL], more[NUMEL];
    int64_t id = -1, first;
    bool odd = rank->rank == ODD;
    (void)context;
    fill(data, 3);
    NEED_OK(rank, rsd_stash_put(stash, data, sizeof data, &first));
    NEED_OK(rank, rsd_stash_prefetch(stash, first, more)); /* in progress while puts vote */
    fill(data, 0);
    if (odd)
        data[NUMEL - 1] = -1; /* one element */
    NEED_FAILS(rank, RSD_EMISMATCH,
               "rank 2 passed different arguments than rank 0 to rsd_stash_put of buffer 1",
               rsd_stash_put(stash, data, sizeof data, &id));
    fill(data, 5);
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 2 passed different arguments",
               rsd_stash_put(stash, data, odd ? sizeof data - 4 : sizeof data, &id));
    NEED_FAILS(rank, RSD_EINVAL, "rank 2: data is NULL",
               rsd_stash_put(stash, odd ? NULL : data, sizeof data, &id));
    NEED(rank, id == -1, "written by a put that failed");
    NEED_OK(rank, rsd_stash_put(stash, data, sizeof data, &id));
    NEED(rank, id == 4, "ids are not equal: %lld", (long long)id);
    comes_back(rank, stash, id, 5);
    NEED_OK(rank, rsd_stash_get(stash, first, NULL));
    NEED(rank, is_filled(more, 3), "the prefetch did not complete");
    rsd_stash_free(stash);
}

static void other_options(struct rank *rank, void *context)
{
    rsd_stash *stash = NULL;
    rsd_stash_options options = {.struct_nbytes = sizeof options, .check = rank->rank == ODD};
    (void)context;
    NEED_FAILS(rank, RSD_EMISMATCH,
               "rank 2 passed different arguments than rank 0 to rsd_stash_new",
               rsd_stash_new(&rank->transport, &options, &stash));
    NEED(rank, stash == NULL, "written by a call that failed");
    options = (rsd_stash_options){.struct_nbytes = sizeof options,
                                  .max_nbytes = rank->rank == ODD ? 1 << 20 : 16 << 20};
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 2 passed different arguments",
               rsd_stash_new(&rank->transport, &options, &stash));
    options.struct_nbytes = rank->rank == ODD ? 3 : sizeof options;
    NEED_FAILS(rank, RSD_EINVAL, "rank 2: rsd_stash_options.struct_nbytes is 3",
               rsd_stash_new(&rank->transport, &options, &stash));
    options.struct_nbytes = sizeof options;
    options.max_nbytes = rank->rank == ODD ? 0 : 16 << 20; /* the default */
    NEED_OK(rank, rsd_stash_new(&rank->transport, &options, &stash));
    rsd_stash_free(stash);
}

/* ---- ranks that fail ---- */

enum way { UNKNOWN, OTHER, NOWHERE, SIZE, DIFFERENT_CALL, MISSING, NWAYS };

static rsd_status get_wrongly(rsd_stash *stash, enum way way, const int64_t *ids, float *out)
{
    int64_t id;
    switch (way) {
    case UNKNOWN:
        return rsd_stash_get(stash, 99, out);
    case OTHER:
        return rsd_stash_get(stash, ids[0], out);
    case NOWHERE:
        return rsd_stash_get(stash, ids[1], NULL);
    case DIFFERENT_CALL:
        return rsd_stash_put(stash, out, sizeof *out, &id);
    default:
        return rsd_stash_get(stash, ids[1], out);
    }
}

static const struct {
    rsd_status status;
    const char *text;
} expected[NWAYS] = {
    [UNKNOWN] = {RSD_EINVAL, "rank 2: the stash has no buffer 99"},
    [OTHER] = {RSD_EMISMATCH,
               "rank 2 called rsd_stash_get of buffer 0, rank 0 called rsd_stash_get of buffer 1"},
    [NOWHERE] = {RSD_EINVAL, "rank 2: buffer 1: out is NULL"},
    [SIZE] = {RSD_EMISMATCH, "rank 2 passed different arguments than rank 0 to rsd_stash_get of "
                             "buffer 1"},
    [DIFFERENT_CALL] = {RSD_EMISMATCH,
                        "rank 2 called rsd_stash_put of buffer 3, rank 0 called rsd_stash_get of "
                        "buffer 1"},
    [MISSING] = {RSD_ETIMEOUT, "rank 2 has not entered the call"},
};

/* The get of one rank differs: before the first bind or after it, with or without a get in progress. */
static void one_fails(struct rank *rank, void *context)
{
    enum way way = (enum way)((uintptr_t)context % NWAYS);
    bool bound = (uintptr_t)context / NWAYS % 2, prefetched = (uintptr_t)context / NWAYS / 2;
    rsd_stash *stash = stash_new(rank, way == DIFFERENT_CALL, way == MISSING ? 2 : 60);
    bool odd = rank->rank == ODD;
    float data[NUMEL], out[NUMEL], more[NUMEL] = {0};
    int64_t ids[3];
    for (int i = 0; i < 3; i++) {
        size_t nbytes = way == SIZE && odd && i == 1 ? sizeof data - 4 : sizeof data;
        fill(data, (float)i);
        NEED_OK(rank, rsd_stash_put(stash, data, nbytes, &ids[i]));
    }
    if (bound)
        comes_back(rank, stash, ids[0], 0);
    if (prefetched)
        NEED_OK(rank, rsd_stash_prefetch(stash, ids[2], more));
    if (way == MISSING && odd) {
        rsd_stash_free(stash);
        return;
    }
    rsd_status status = odd ? get_wrongly(stash, way, ids, out) : rsd_stash_get(stash, ids[1], out);
    NEED(rank, status == expected[way].status && strstr(rsd_error(), expected[way].text),
         "way %d: %s: %s", (int)way, rsd_status_name(status), rsd_error());
    if (way == MISSING) {
        NEED_FAILS(rank, RSD_EINVAL, "can only be freed", rsd_stash_get(stash, ids[0], out));
    } else {
        comes_back(rank, stash, ids[0], 0); /* the ranks agreed: the stash can be used again */
        if (prefetched)
            NEED_OK(rank, rsd_stash_get(stash, ids[2], more));
        NEED(rank, !prefetched || is_filled(more, 2), "the prefetch did not complete");
    }
    NEED_OK(rank, rsd_stash_drop(stash, ids[0]));
    rsd_stash_free(stash);
}

/* ---- transports ---- */

static void refused_transports(void)
{
    rsd_stash *stash = NULL;
    rsd_transport none = {.struct_nbytes = sizeof none, .nranks = 1};
    FAILS(RSD_EINVAL, "transport lacks send, recv, test or cancel",
          rsd_stash_new(&none, NULL, &stash));
    none.rank = 1;
    FAILS(RSD_EINVAL, "rank 1 is out of range", rsd_stash_new(&none, NULL, &stash));
    rsd_stash_free(NULL);
}

int main(void)
{
    CASE("wrong arguments are refused on all ranks, and the stash can be used again");
    refused_transports();
    on_ranks(1, refused, NULL);
    on_ranks(NRANKS, refused, NULL);
    on_ranks(NRANKS, refused, "check");
    CASE("with check, a buffer that differs is refused, and the error names the rank");
    on_ranks(NRANKS, differing, NULL);
    CASE("the error names a rank with other options");
    on_ranks(NRANKS, other_options, NULL);
    CASE("all ranks name a rank whose get fails, differs or is missing");
    for (uintptr_t way = 0; way < 4 * NWAYS; way++)
        on_ranks(NRANKS, one_fails, (void *)way);
    return tap_end();
}
