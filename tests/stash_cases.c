/* stash_cases.c - see stash_cases.h. */
#include "stash_cases.h"

#include "random.h"

enum { MOST_DIMS = 4, GAP = 0xa5 };

/* ---- buffers ---- */

/* What lies between elements is GAP. */
struct buffer {
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[MOST_DIMS], strides[MOST_DIMS];
    int64_t numel;
    size_t nbytes;
    unsigned char *bytes;
};

enum arrangement { ROWS, COLUMNS, PADDED, REPEATED };

static struct buffer buffer_new(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                                enum arrangement arrangement)
{
    struct buffer b = {.dtype = dtype, .ndim = ndim, .numel = 1};
    int64_t stride = 1, reach = 1;
    for (int32_t i = 0; i < ndim; i++) {
        int32_t d = arrangement == COLUMNS ? i : ndim - 1 - i;
        b.shape[d] = shape[d];
        b.strides[d] = arrangement == PADDED ? stride + 1 : stride;
        if (arrangement == REPEATED && d == 0)
            b.strides[d] = 0;
        stride = b.strides[d] * (shape[d] ? shape[d] : 1) + (arrangement == PADDED);
        reach += shape[d] ? (shape[d] - 1) * b.strides[d] : 0;
        b.numel *= shape[d];
    }
    b.nbytes = (size_t)reach * rsd_dtype_nbytes(dtype);
    b.bytes = malloc(b.nbytes);
    memset(b.bytes, GAP, b.nbytes);
    return b;
}

static unsigned char *element(const struct buffer *b, int64_t index)
{
    int64_t at = 0;
    for (int32_t d = b->ndim; d-- > 0; index /= b->shape[d])
        at += index % b->shape[d] * b->strides[d];
    return b->bytes + (size_t)at * rsd_dtype_nbytes(b->dtype);
}

/* The bytes of an element are made from its index, or from that of the row it repeats. */
static void value_of(const struct buffer *b, uint64_t seed, int64_t index, bool repeated,
                     unsigned char *value)
{
    if (repeated && b->ndim > 0)
        index %= b->numel / b->shape[0];
    for (size_t k = 0; k < rsd_dtype_nbytes(b->dtype); k++) {
        uint64_t x = (seed * 1000003 + (uint64_t)index) * 16 + k + 1;
        x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
        value[k] = (unsigned char)(x >> 40);
    }
}

static void fill(struct buffer *b, uint64_t seed, bool repeated)
{
    for (int64_t i = 0; i < b->numel; i++)
        value_of(b, seed, i, repeated, element(b, i));
}

/* Whether every element is there and nothing else was touched; all is GAP again afterwards. */
static bool is_filled(struct buffer *b, uint64_t seed, bool repeated)
{
    size_t each = rsd_dtype_nbytes(b->dtype);
    bool fine = true;
    for (int64_t i = 0; i < b->numel; i++) {
        unsigned char value[16];
        value_of(b, seed, i, repeated, value);
        fine = fine && memcmp(element(b, i), value, each) == 0;
        memset(element(b, i), GAP, each);
    }
    for (size_t i = 0; i < b->nbytes; i++)
        fine = fine && b->bytes[i] == GAP;
    return fine;
}

static rsd_status put(rsd_stash *stash, const struct buffer *b, int32_t dim, int64_t *id)
{
    rsd_stash_buffer as = {.struct_nbytes = sizeof as,
                           .dtype = b->dtype,
                           .ndim = b->ndim,
                           .shape = b->shape,
                           .strides = b->strides,
                           .dim = dim};
    return rsd_stash_put(stash, &as, b->bytes, id);
}

static rsd_stash *stash_new(struct rank *rank)
{
    rsd_stash *stash = NULL;
    rsd_stash_options options = {.struct_nbytes = sizeof options, .timeout = 60};
    NEED_OK(rank, rsd_stash_new(&rank->transport, &options, &stash));
    return stash;
}

/* ---- one buffer at a time ---- */

/* The most that a rank may keep: its share of a dim, or of the elements, rounded up. */
static int64_t share(const struct buffer *b, int32_t dim, int32_t nranks)
{
    int64_t each = (int64_t)rsd_dtype_nbytes(b->dtype);
    if (dim == RSD_STASH_ANY_DIM)
        return (b->numel + nranks - 1) / nranks * each;
    dim = dim < 0 ? dim + b->ndim : dim;
    return (b->shape[dim] + nranks - 1) / nranks * (b->numel / b->shape[dim]) * each;
}

/* In one way of lying in memory, out into another. */
static void there_and_back(struct rank *rank, rsd_stash *stash, rsd_dtype dtype, int32_t ndim,
                           const int64_t *shape, int32_t dim, enum arrangement in,
                           enum arrangement out)
{
    struct buffer from = buffer_new(dtype, ndim, shape, in);
    struct buffer to = buffer_new(dtype, ndim, shape, out);
    int64_t id = -1, nbytes = from.numel * (int64_t)rsd_dtype_nbytes(dtype);
    rsd_stashed kept = {.struct_nbytes = sizeof kept};
    fill(&from, 7, in == REPEATED);
    NEED_OK(rank, put(stash, &from, dim, &id));
    memset(from.bytes, 0, from.nbytes);
    NEED_OK(rank, rsd_stash_look(stash, id, &kept));
    NEED(rank, kept.nbytes_whole == nbytes, "%lld bytes", (long long)kept.nbytes_whole);
    bool whole = from.numel < rank->nranks || rank->nranks == 1;
    NEED(rank, kept.whole == whole, "%lld elements kept whole: %d", (long long)from.numel,
         (int)kept.whole);
    int64_t most = whole ? nbytes : share(&from, dim, rank->nranks);
    NEED(rank, kept.nbytes_held <= most, "holds %lld bytes, its share is %lld",
         (long long)kept.nbytes_held, (long long)most);
    for (int again = 0; again < 2; again++) {
        NEED_OK(rank, rsd_stash_get(stash, id, to.strides, to.bytes));
        NEED(rank, is_filled(&to, 7, in == REPEATED), "%s, dim %d of %d, %d to %d: other bytes",
             rsd_dtype_name(dtype), (int)dim, (int)ndim, (int)in, (int)out);
    }
    NEED_OK(rank, rsd_stash_drop(stash, id));
    free(from.bytes);
    free(to.bytes);
}

/* Less than ranks, between m and m^2, uneven, empty, with dims of one. */
static void every_shape(struct rank *rank, void *context)
{
    static const rsd_dtype dtypes[] = {RSD_U8, RSD_BF16, RSD_F32, RSD_I64, RSD_C128};
    int64_t m = rank->nranks;
    const struct {
        int32_t ndim;
        int64_t shape[MOST_DIMS];
    } tensors[] = {
        {0, {0}},           {1, {0}},          {1, {1}},           {1, {m - 1}}, {1, {m}},
        {1, {m + 1}},       {1, {m * m - 1}},  {1, {5 * m}},       {2, {3, 5}},  {2, {1, 17}},
        {2, {17, 1}},       {2, {2 * m, 3}},   {2, {3, 2 * m}},    {2, {0, 4}},  {3, {3, 5, 7}},
        {3, {2, m + 3, 1}}, {4, {2, 3, 1, 5}}, {4, {1, 1, 11, 1}},
    };
    rsd_stash *stash = stash_new(rank);
    (void)context;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors && !rank->wrong[0]; i++) {
        int32_t ndim = tensors[i].ndim;
        for (int32_t dim = ndim ? -1 : 0; dim < ndim && !rank->wrong[0]; dim++)
            there_and_back(rank, stash, dtypes[(i + (size_t)(dim + 1)) % 5], ndim, tensors[i].shape,
                           dim, ROWS, ROWS);
        there_and_back(rank, stash, dtypes[i % 5], ndim, tensors[i].shape, RSD_STASH_ANY_DIM, ROWS,
                       ROWS);
    }
    rsd_stash_free(stash);
}

static void every_dtype(struct rank *rank, void *context)
{
    static const int64_t shape[] = {5, 6};
    rsd_stash *stash = stash_new(rank);
    (void)context;
    for (int dtype = RSD_F64; dtype <= RSD_C32 && !rank->wrong[0]; dtype++)
        there_and_back(rank, stash, (rsd_dtype)dtype, 2, shape, dtype % 2, ROWS, ROWS);
    rsd_stash_free(stash);
}

static void every_arrangement(struct rank *rank, void *context)
{
    static const int64_t flat[] = {23}, matrix[] = {9, 14}, cube[] = {4, 5, 6};
    static const enum arrangement ways[][2] = {{ROWS, COLUMNS}, {COLUMNS, ROWS},  {COLUMNS, PADDED},
                                               {PADDED, ROWS},  {PADDED, PADDED}, {REPEATED, ROWS}};
    rsd_stash *stash = stash_new(rank);
    (void)context;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        for (int32_t dim = 0; dim < 4 && !rank->wrong[0]; dim++) {
            int32_t which = dim < 3 ? dim : RSD_STASH_ANY_DIM;
            if (dim < 1 || dim == 3)
                there_and_back(rank, stash, RSD_F32, 1, flat, which, ways[i][0], ways[i][1]);
            if (dim < 2 || dim == 3)
                there_and_back(rank, stash, RSD_BF16, 2, matrix, which, ways[i][0], ways[i][1]);
            there_and_back(rank, stash, RSD_I64, 3, cube, which, ways[i][0], ways[i][1]);
        }
    rsd_stash_free(stash);
}

/* More shapes than are remembered, twice. */
static void many_shapes(struct rank *rank, void *context)
{
    rsd_stash *stash = stash_new(rank);
    (void)context;
    for (int64_t i = 0; i < 100 && !rank->wrong[0]; i++) {
        int64_t shape[] = {20 + i % 70, 3};
        there_and_back(rank, stash, RSD_U8, 2, shape, 0, ROWS, ROWS);
    }
    rsd_stash_free(stash);
}

/* In rounds, under the least budget, and of some megabytes. */
static void large_ones(struct rank *rank, void *context)
{
    static const int64_t shape[] = {301, 97, 11};
    rsd_stash *stash = NULL;
    rsd_stash_options options = {.struct_nbytes = sizeof options, .max_nbytes = 1, .timeout = 60};
    (void)context;
    NEED_OK(rank, rsd_stash_new(&rank->transport, &options, &stash));
    there_and_back(rank, stash, RSD_F32, 3, shape, 0, ROWS, ROWS);
    there_and_back(rank, stash, RSD_F32, 3, shape, 1, ROWS, PADDED);
    there_and_back(rank, stash, RSD_F32, 3, shape, RSD_STASH_ANY_DIM, COLUMNS, ROWS);
    rsd_stash_free(stash);
}

/* ---- many at a time ---- */

struct flying {
    struct buffer from, to;
    int64_t id;
    uint64_t seed;
    bool there, asked;
};

/* The ranks' own sums go over the same transport in between. */
static rsd_exec *bind_sum(struct rank *rank)
{
    rsd_layout *a = NULL, *b = NULL;
    rsd_plan *plan = NULL;
    rsd_exec *exec = NULL;
    char problem[64];
    snprintf(problem, sizeof problem, "f32[100] : %d:P -> %d:R", (int)rank->nranks,
             (int)rank->nranks);
    NEED_OK(rank, rsd_problem_parse(problem, &a, &b));
    NEED_OK(rank, rsd_plan_new(a, b, NULL, &plan));
    const rsd_plan *plans[] = {plan};
    NEED_OK(rank, rsd_bind_transport(1, plans, NULL, &rank->transport, NULL, &exec));
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    return exec;
}

static void sum_up(struct rank *rank, rsd_exec *exec)
{
    float terms[100], sums[100];
    const void *src = terms;
    void *dst = sums;
    for (int i = 0; i < 100; i++)
        terms[i] = (float)(i + rank->rank);
    NEED_OK(rank, rsd_exec_run(exec, &src, &dst));
    for (int i = 0; i < 100; i++)
        NEED(rank, sums[i] == (float)(rank->nranks * i + rank->nranks * (rank->nranks - 1) / 2),
             "sum %d is %g", i, (double)sums[i]);
}

static void put_one(struct rank *rank, rsd_stash *stash, struct random *random, struct flying *f)
{
    int64_t shape[] = {1 + random_below(random, 5), 1 + random_below(random, 9)};
    bool any = random_below(random, 2) == 0;
    f->from = buffer_new(RSD_I32, 2, shape, ROWS);
    f->to = buffer_new(RSD_I32, 2, shape, random_below(random, 2) ? PADDED : ROWS);
    f->seed = random_next(random);
    f->there = true;
    f->asked = false;
    fill(&f->from, f->seed, false);
    int32_t dim = any ? RSD_STASH_ANY_DIM : (int32_t)random_below(random, 2);
    NEED_OK(rank, put(stash, &f->from, dim, &f->id));
    memset(f->from.bytes, 0, f->from.nbytes);
}

static void drop_one(struct rank *rank, rsd_stash *stash, struct flying *f)
{
    NEED_OK(rank, rsd_stash_drop(stash, f->id));
    free(f->from.bytes);
    free(f->to.bytes);
    f->there = false;
}

static void in_any_order(struct rank *rank, void *context)
{
    enum { NFLYING = 24 };
    struct flying flying[NFLYING] = {{.there = false}};
    struct random random = {(uint64_t)(uintptr_t)context}; /* the same on all ranks */
    rsd_stash *stash = stash_new(rank);
    rsd_exec *sum = bind_sum(rank);
    for (int i = 0; i < 250 && !rank->wrong[0]; i++) {
        struct flying *f = &flying[random_below(&random, NFLYING)];
        int64_t what = random_below(&random, 8);
        if (!f->there) {
            put_one(rank, stash, &random, f);
        } else if (what < 3 && !f->asked) {
            NEED_OK(rank, rsd_stash_prefetch(stash, f->id, f->to.strides, f->to.bytes));
            f->asked = true;
        } else if (what < 6) {
            bool same = random_below(&random, 2) || !f->asked;
            NEED_OK(rank, rsd_stash_get(stash, f->id, f->to.strides, same ? f->to.bytes : NULL));
            NEED(rank, is_filled(&f->to, f->seed, false), "step %d: other bytes", i);
            f->asked = false;
        } else if (what == 6) {
            drop_one(rank, stash, f);
        } else {
            sum_up(rank, sum);
        }
    }
    rsd_stash_report report = {.struct_nbytes = sizeof report};
    int64_t n = 0;
    for (int i = 0; i < NFLYING; i++)
        n += flying[i].there;
    NEED_OK(rank, rsd_stash_ask(stash, &report));
    NEED(rank, report.nbuffers == n, "%lld buffers", (long long)report.nbuffers);
    rsd_stash_free(stash); /* with some on their way */
    rsd_exec_free(sum);
    for (int i = 0; i < NFLYING; i++)
        if (flying[i].there) {
            NEED(rank, !flying[i].asked || is_filled(&flying[i].to, flying[i].seed, false),
                 "what was on its way did not arrive");
            free(flying[i].from.bytes);
            free(flying[i].to.bytes);
        }
}

/* ---- memory ---- */

static void accounting(struct rank *rank, void *context)
{
    static const int64_t shape[] = {1000, 33}, tiny[] = {3};
    rsd_stash *stash = stash_new(rank);
    struct buffer b = buffer_new(RSD_F32, 2, shape, ROWS),
                  small = buffer_new(RSD_U8, 1, tiny, ROWS);
    rsd_stash_report report = {.struct_nbytes = sizeof report};
    int64_t ids[10], each = 1000 * 33 * 4, m = rank->nranks;
    (void)context;
    for (int i = 0; i < 10; i++)
        NEED_OK(rank, put(stash, &b, i % 2 ? 0 : RSD_STASH_ANY_DIM, &ids[i]));
    NEED_OK(rank, rsd_stash_ask(stash, &report));
    NEED(rank, report.nbuffers == 10 && report.nbytes_whole == 10 * each, "%lld bytes whole",
         (long long)report.nbytes_whole);
    NEED(rank, report.nwhole == (m == 1 ? 10 : 0), "%lld whole", (long long)report.nwhole);
    NEED(rank,
         report.nbytes_held * m >= 98 * each / 10 && report.nbytes_held * m <= 102 * each / 10,
         "holds %lld bytes of %lld", (long long)report.nbytes_held, (long long)(10 * each));
    NEED_OK(rank, rsd_stash_get(stash, ids[0], NULL, b.bytes));
    for (int i = 0; i < 10; i++)
        NEED_OK(rank, rsd_stash_drop(stash, ids[i]));
    int64_t held = report.nbytes_held, id;
    NEED_OK(rank, put(stash, &small, 0, &id));
    NEED_OK(rank, rsd_stash_ask(stash, &report));
    NEED(rank, report.nbuffers == 1 && report.nwhole == (m == 1 || m > 3), "%lld kept whole",
         (long long)report.nwhole);
    NEED(rank, report.nbytes_most_held == held && report.nbytes_most_whole == 10 * each,
         "%lld most", (long long)report.nbytes_most_held);
    NEED(rank, report.nbytes_received >= each - each / m - 300 && report.nbytes_received < each,
         "%lld received", (long long)report.nbytes_received);
    rsd_stash_free(stash);
    free(b.bytes);
    free(small.bytes);
}

const struct stash_case stash_cases[] = {
    {"buffers of every shape come back, each rank keeping its share", every_shape, 1},
    {"of every dtype", every_dtype, 1},
    {"however they lie in memory, before and after, and nothing else is touched", every_arrangement,
     1},
    {"of more shapes than are remembered", many_shapes, 1},
    {"in many rounds, under the least budget", large_ones, 1},
    {"many at a time, prefetched, fetched and dropped in any order, with sums in between",
     in_any_order, 3},
    {"what is held is counted, and is near 1/m", accounting, 1},
};
const int nstash_cases = sizeof stash_cases / sizeof *stash_cases;
