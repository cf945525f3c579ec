/* test_stash_wrong.c - buffers that are not what the others have, ranks that fail, ask for something else or
 * do not come: all ranks return, and the one that it is about is named. */
#include "ranks.h"

enum { NRANKS = 4, ODD = 2, ROWS = 6, COLS = 10, NUMEL = ROWS * COLS };

static const int64_t shape[] = {ROWS, COLS};

static const rsd_stash_buffer plain = {
    .struct_nbytes = sizeof plain, .dtype = RSD_F32, .ndim = 2, .shape = shape};

static rsd_stash *stash_new(struct rank *rank, int32_t check, int32_t keep, double timeout)
{
    rsd_stash *stash = NULL;
    rsd_stash_options options = {.struct_nbytes = sizeof options,
                                 .check = check,
                                 .keep_differing = keep,
                                 .timeout = timeout};
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

static void come_back(struct rank *rank, rsd_stash *stash, int64_t id, float first)
{
    float out[NUMEL] = {0};
    NEED_OK(rank, rsd_stash_get(stash, id, NULL, out));
    NEED(rank, is_filled(out, first), "buffer %lld came back with other values", (long long)id);
}

/* ---- what a caller says ---- */

static void refused(struct rank *rank, void *context)
{
    rsd_stash *stash = stash_new(rank, context != NULL, 0, 60);
    float data[NUMEL], out[2 * NUMEL];
    int64_t id = -1, minus[] = {-10, 1}, doubled[] = {10, 0};
    rsd_stash_buffer buffer = plain;
    fill(data, 0);
    buffer.dim = 2;
    NEED_FAILS(rank, RSD_EINVAL, "dim 2 of a buffer with 2 dims",
               rsd_stash_put(stash, &buffer, data, &id));
    buffer.dim = -3;
    NEED_FAILS(rank, RSD_EINVAL, "dim -3 of a buffer with 2 dims",
               rsd_stash_put(stash, &buffer, data, &id));
    buffer = plain;
    buffer.dtype = (rsd_dtype)99;
    NEED_FAILS(rank, RSD_EINVAL, "99", rsd_stash_put(stash, &buffer, data, &id));
    buffer = plain;
    buffer.strides = minus;
    NEED_FAILS(rank, RSD_EINVAL, "stride -10", rsd_stash_put(stash, &buffer, data, &id));
    NEED_FAILS(rank, RSD_EINVAL, "NULL", rsd_stash_put(stash, &plain, NULL, &id));
    buffer.struct_nbytes = 0;
    NEED_FAILS(rank, RSD_EINVAL, "struct_nbytes", rsd_stash_put(stash, &buffer, data, &id));
    NEED(rank, id == -1, "written by a put that failed");

    NEED_OK(rank, rsd_stash_put(stash, &plain, data, &id));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer 77", rsd_stash_get(stash, 77, NULL, out));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer -1", rsd_stash_prefetch(stash, -1, NULL, out));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer 77", rsd_stash_drop(stash, 77));
    NEED_FAILS(rank, RSD_EINVAL, "to one address", rsd_stash_get(stash, id, doubled, out));
    NEED_FAILS(rank, RSD_EINVAL, "out is NULL", rsd_stash_get(stash, id, NULL, NULL));
    NEED_OK(rank, rsd_stash_prefetch(stash, id, NULL, out));
    NEED_FAILS(rank, RSD_EINVAL, "was asked for before", rsd_stash_prefetch(stash, id, NULL, out));
    NEED_FAILS(rank, RSD_EINVAL, "prefetched to another place",
               rsd_stash_get(stash, id, NULL, out + NUMEL));
    come_back(rank, stash, id, 0); /* none of that does it any harm */
    NEED_OK(rank, rsd_stash_drop(stash, id));
    NEED_FAILS(rank, RSD_EINVAL, "no buffer", rsd_stash_get(stash, id, NULL, out));
    rsd_stash_free(stash);
}

/* What differs by right, and a dim that is left to the stash. */
static void shards(struct rank *rank, void *context)
{
    rsd_stash *stash = stash_new(rank, context != NULL, 0, 60);
    float data[NUMEL];
    int64_t id, bias_id, own = 3 + rank->rank, bias_shape[] = {NRANKS + 1};
    rsd_stash_buffer buffer = plain, bias = plain;
    fill(data, (float)rank->rank);
    buffer.whole = 1;
    NEED_OK(rank, rsd_stash_put(stash, &buffer, data, &id));
    buffer.ndim = 1;
    buffer.shape = &own; /* and may have other shapes, if nobody compares */
    buffer.dim = 5;
    if (!context)
        NEED_OK(rank, rsd_stash_put(stash, &buffer, data, &bias_id));
    fill(data, -1);
    come_back(rank, stash, id, (float)rank->rank);
    bias.ndim = 1;
    bias.shape = bias_shape;
    bias.dim = RSD_STASH_ANY_DIM;
    NEED_OK(rank, rsd_stash_put(stash, &bias, data, &bias_id));
    float out[NRANKS + 1] = {0};
    NEED_OK(rank, rsd_stash_get(stash, bias_id, NULL, out));
    NEED(rank, memcmp(out, data, sizeof out) == 0, "a bias came back with other values");
    rsd_stash_free(stash);
}

/* ---- buffers that differ ---- */

static void differing(struct rank *rank, void *context)
{
    rsd_stash *stash = stash_new(rank, 1, context != NULL, 60);
    float data[NUMEL];
    int64_t id = -1, wider[] = {COLS + 1, 1}, transposed[] = {1, ROWS};
    rsd_stashed kept = {.struct_nbytes = sizeof kept};
    fill(data, 0);
    if (rank->rank == ODD)
        data[NUMEL - 1] = -1; /* one element */
    rsd_status status = rsd_stash_put(stash, &plain, data, &id);
    if (context) {
        NEED(rank, status == RSD_OK, "%s", rsd_error());
        NEED_OK(rank, rsd_stash_look(stash, id, &kept));
        NEED(rank, kept.whole && kept.nbytes_held == (int64_t)sizeof data, "not kept whole");
        float out[NUMEL];
        NEED_OK(rank, rsd_stash_get(stash, id, NULL, out));
        NEED(rank, memcmp(out, data, sizeof data) == 0, "another rank's values came back");
    } else {
        NEED(rank, status == RSD_EMISMATCH && id == -1, "%s", rsd_status_name(status));
        NEED(rank, strstr(rsd_error(), "rank 2 has other values than rank 0"), "%s", rsd_error());
    }
    /* Rank 0 is the odd one here, and the others are many. */
    fill(data, rank->rank == 0 ? 1 : 0);
    status = rsd_stash_put(stash, &plain, data, &id);
    NEED(rank, context || (status == RSD_EMISMATCH && strstr(rsd_error(), "rank 0 has other")),
         "%s", rsd_error());
    /* Other shapes. */
    rsd_stash_buffer buffer = plain;
    int64_t other[] = {COLS, ROWS};
    buffer.shape = rank->rank == ODD ? other : shape;
    fill(data, 5);
    status = rsd_stash_put(stash, &buffer, data, &id);
    NEED(rank, context ? status == RSD_OK : status == RSD_EMISMATCH, "%s", rsd_error());
    NEED(rank, context || strstr(rsd_error(), "rank 2 has another dtype, shape"), "%s",
         rsd_error());
    if (context)
        come_back(rank, stash, id, 5);
    /* The same values that lie in another way are the same. */
    float room[ROWS * (COLS + 1)];
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < COLS; k++)
            room[rank->rank % 2 ? i * (COLS + 1) + k : i + k * ROWS] = (float)(i * COLS + k);
    buffer = plain;
    buffer.strides = rank->rank % 2 ? wider : transposed;
    NEED_OK(rank, rsd_stash_put(stash, &buffer, room, &id));
    NEED_OK(rank, rsd_stash_look(stash, id, &kept));
    NEED(rank, !kept.whole && kept.nbytes_held < (int64_t)sizeof data, "kept whole");
    come_back(rank, stash, id, 0);
    rsd_stash_free(stash);
}

static void other_options(struct rank *rank, void *context)
{
    rsd_stash *stash = NULL;
    rsd_stash_options options = {.struct_nbytes = sizeof options, .check = rank->rank == ODD};
    (void)context;
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 2 makes a stash with other options",
               rsd_stash_new(&rank->transport, &options, &stash));
    NEED(rank, stash == NULL, "written by a call that failed");
    options = (rsd_stash_options){.struct_nbytes = sizeof options,
                                  .max_nbytes = rank->rank == ODD ? 1 << 20 : 16 << 20};
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 2 makes a stash with other options",
               rsd_stash_new(&rank->transport, &options, &stash));
    options.max_nbytes = rank->rank == ODD ? 0 : 16 << 20; /* which is what 0 says */
    NEED_OK(rank, rsd_stash_new(&rank->transport, &options, &stash));
    rsd_stash_free(stash);
}

/* ---- ranks that fail ---- */

enum way { UNKNOWN, OTHER, STRIDES, MISSING, SHAPE, NWAYS };

/* One rank's get is not like that of the others, after so many that were. */
static void one_fails(struct rank *rank, void *context)
{
    enum way way = (enum way)((uintptr_t)context % NWAYS);
    bool bound = (uintptr_t)context / NWAYS % 2, prefetched = (uintptr_t)context / NWAYS / 2;
    rsd_stash *stash = stash_new(rank, 0, 0, way == MISSING ? 0.3 : 60);
    bool odd = rank->rank == ODD;
    float data[NUMEL], out[2 * NUMEL], more[NUMEL];
    int64_t ids[3], wider[] = {COLS + 1, 1}, other[] = {COLS, ROWS};
    for (int i = 0; i < 3; i++) {
        rsd_stash_buffer buffer = plain;
        if (way == SHAPE && odd && i == 1)
            buffer.shape = other;
        fill(data, (float)i);
        NEED_OK(rank, rsd_stash_put(stash, &buffer, data, &ids[i]));
    }
    if (bound)
        come_back(rank, stash, ids[0], 0);
    if (prefetched)
        NEED_OK(rank, rsd_stash_prefetch(stash, ids[2], NULL, more));
    int64_t id = odd && way == UNKNOWN ? 99 : odd && way == OTHER ? ids[0] : ids[1];
    rsd_status status = RSD_OK;
    if (!odd || way != MISSING)
        status = rsd_stash_get(stash, id, odd && way == STRIDES ? wider : NULL, out);
    rsd_status expected = way == UNKNOWN   ? (odd ? RSD_EINVAL : RSD_EPEER)
                          : way != MISSING ? RSD_EMISMATCH
                          : odd            ? RSD_OK
                                           : RSD_ETIMEOUT;
    NEED(rank, status == expected, "way %d: %s: %s", (int)way, rsd_status_name(status),
         rsd_error());
    NEED(rank, !status || odd || strstr(rsd_error(), "rank 2"), "%s", rsd_error());
    if (status) {
        NEED_FAILS(rank, RSD_EINVAL, "can only be freed", rsd_stash_get(stash, ids[0], NULL, out));
        NEED_OK(rank, rsd_stash_drop(stash, ids[0]));
    }
    rsd_stash_free(stash);
}

/* ---- transports ---- */

static void refused_transports(void)
{
    rsd_stash *stash = NULL;
    rsd_transport none = {.struct_nbytes = sizeof none, .nranks = 1};
    FAILS(RSD_EINVAL, "without all of its functions", rsd_stash_new(&none, NULL, &stash));
    none.rank = 1;
    FAILS(RSD_EINVAL, "rank 1 of 1", rsd_stash_new(&none, NULL, &stash));
    rsd_stash_free(NULL);
}

int main(void)
{
    CASE("what makes no sense is refused on all ranks, and does no harm");
    refused_transports();
    on_ranks(NRANKS, refused, NULL);
    on_ranks(NRANKS, refused, "check");
    CASE("buffers that are shards stay what they are, and any dim will do");
    on_ranks(NRANKS, shards, NULL);
    on_ranks(NRANKS, shards, "check");
    CASE("buffers that differ between ranks are found, and the rank is named");
    on_ranks(NRANKS, differing, NULL);
    CASE("or kept whole, if that is asked for");
    on_ranks(NRANKS, differing, "keep");
    CASE("ranks with other options are named");
    on_ranks(NRANKS, other_options, NULL);
    CASE("a rank whose get fails, is about something else, or does not come is named to all");
    for (uintptr_t way = 0; way < 4 * NWAYS; way++)
        on_ranks(NRANKS, one_fails, (void *)way);
    return tap_end();
}
