/* stash_cases.c - see stash_cases.h. */
#include "stash_cases.h"

#include "random.h"

enum { GUARD = 16, GUARD_BYTE = 0xa5 };

/* ---- buffers ---- */

/* A buffer between two guards. */
struct buffer {
    size_t nbytes;
    uint64_t seed;
    unsigned char *memory, *bytes;
};

static struct buffer buffer_new(size_t nbytes, uint64_t seed)
{
    struct buffer b = {.nbytes = nbytes, .seed = seed};
    b.memory = malloc(nbytes + 2 * GUARD);
    memset(b.memory, GUARD_BYTE, nbytes + 2 * GUARD);
    b.bytes = b.memory + GUARD;
    return b;
}

static unsigned char byte_of(uint64_t seed, size_t index)
{
    uint64_t x = seed * 1000003 + index + 1;
    return (unsigned char)(((x ^ x >> 31) * 0x9e3779b97f4a7c15u) >> 40);
}

static void fill(struct buffer *b)
{
    for (size_t i = 0; i < b->nbytes; i++)
        b->bytes[i] = byte_of(b->seed, i);
}

/* Whether all bytes are right and the guards are untouched; clears it for the next time. */
static bool is_filled(struct buffer *b)
{
    bool right = true;
    for (size_t i = 0; i < b->nbytes; i++)
        right = right && b->bytes[i] == byte_of(b->seed, i);
    for (size_t i = 0; i < GUARD; i++)
        right = right && b->memory[i] == GUARD_BYTE && b->bytes[b->nbytes + i] == GUARD_BYTE;
    memset(b->bytes, GUARD_BYTE, b->nbytes);
    return right;
}

static rsd_stash *stash_new(struct rank *rank)
{
    rsd_stash *stash = NULL;
    rsd_stash_options options = {.struct_nbytes = sizeof options, .timeout = 60};
    NEED_OK(rank, rsd_stash_new(&rank->transport, &options, &stash));
    return stash;
}

static rsd_stash_usage usage_of(struct rank *rank, const rsd_stash *stash)
{
    rsd_stash_usage usage = {.struct_nbytes = sizeof usage};
    NEED_OK(rank, rsd_stash_stats(stash, &usage));
    return usage;
}

/* ---- one buffer at a time ---- */

static void put_and_get(struct rank *rank, rsd_stash *stash, size_t nbytes)
{
    struct buffer from = buffer_new(nbytes, 7 + nbytes), to = buffer_new(nbytes, 7 + nbytes);
    int64_t id = -1, n = (int64_t)nbytes, m = rank->nranks;
    fill(&from);
    NEED_OK(rank, rsd_stash_put(stash, from.bytes, nbytes, &id));
    memset(from.bytes, 0, nbytes);
    rsd_stash_usage usage = usage_of(rank, stash);
    NEED(rank, usage.nbytes_total == n, "%lld bytes in all", (long long)usage.nbytes_total);
    NEED(rank, usage.nbytes_kept >= n / m && usage.nbytes_kept <= (n + m - 1) / m,
         "holds %lld of %lld bytes", (long long)usage.nbytes_kept, (long long)n);
    for (int again = 0; again < 2; again++) {
        NEED_OK(rank, rsd_stash_get(stash, id, to.bytes));
        NEED(rank, is_filled(&to), "%zu bytes: other bytes came back", nbytes);
    }
    NEED_OK(rank, rsd_stash_drop(stash, id));
    free(from.memory);
    free(to.memory);
}

/* Fewer bytes than ranks, none, and numbers that the ranks do not divide. */
static void every_size(struct rank *rank, void *context)
{
    size_t m = (size_t)rank->nranks;
    size_t sizes[] = {0, 1, m - 1, m, m + 1, m * m - 1, 5 * m, 63, 64, 65, 1000, 4096 * m + 1};
    rsd_stash *stash = stash_new(rank);
    (void)context;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !rank->wrong[0]; i++)
        put_and_get(rank, stash, sizes[i]);
    rsd_stash_free(stash);
}

/* More sizes than plans are kept, twice. */
static void many_sizes(struct rank *rank, void *context)
{
    rsd_stash *stash = stash_new(rank);
    (void)context;
    for (size_t i = 0; i < 100 && !rank->wrong[0]; i++)
        put_and_get(rank, stash, 20 + i % 70);
    rsd_stash_free(stash);
}

/* In many chunks, with the least max_nbytes. */
static void large_buffers(struct rank *rank, void *context)
{
    rsd_stash *stash = NULL;
    rsd_stash_options options = {.struct_nbytes = sizeof options, .max_nbytes = 1, .timeout = 60};
    (void)context;
    NEED_OK(rank, rsd_stash_new(&rank->transport, &options, &stash));
    put_and_get(rank, stash, 1284677);
    rsd_stash_free(stash);
}

/* ---- many at a time ---- */

struct stashed {
    struct buffer from, to;
    int64_t id;
    bool there, prefetched;
};

/* Reductions of the ranks go over the same transport in between. */
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

static void put_one(struct rank *rank, rsd_stash *stash, struct random *random, struct stashed *s)
{
    size_t nbytes = 1 + (size_t)random_below(random, 200);
    uint64_t seed = random_next(random);
    *s = (struct stashed){
        .from = buffer_new(nbytes, seed), .to = buffer_new(nbytes, seed), .there = true};
    fill(&s->from);
    NEED_OK(rank, rsd_stash_put(stash, s->from.bytes, nbytes, &s->id));
    memset(s->from.bytes, 0, nbytes);
}

static void drop_one(struct rank *rank, rsd_stash *stash, struct stashed *s)
{
    NEED_OK(rank, rsd_stash_drop(stash, s->id));
    free(s->from.memory);
    free(s->to.memory);
    s->there = false;
}

static void in_any_order(struct rank *rank, void *context)
{
    enum { NSTASHED = 24 };
    struct stashed all[NSTASHED] = {{.there = false}};
    struct random random = {(uint64_t)(uintptr_t)context}; /* the same on all ranks */
    rsd_stash *stash = stash_new(rank);
    rsd_exec *sum = bind_sum(rank);
    for (int i = 0; i < 250 && !rank->wrong[0]; i++) {
        struct stashed *s = &all[random_below(&random, NSTASHED)];
        int64_t what = random_below(&random, 8);
        if (!s->there) {
            put_one(rank, stash, &random, s);
        } else if (what < 3 && !s->prefetched) {
            NEED_OK(rank, rsd_stash_prefetch(stash, s->id, s->to.bytes));
            s->prefetched = true;
        } else if (what < 6) {
            bool same = random_below(&random, 2) || !s->prefetched;
            NEED_OK(rank, rsd_stash_get(stash, s->id, same ? s->to.bytes : NULL));
            NEED(rank, is_filled(&s->to), "call %d: other bytes came back", i);
            s->prefetched = false;
        } else if (what == 6) {
            drop_one(rank, stash, s);
        } else {
            sum_up(rank, sum);
        }
    }
    int64_t n = 0;
    for (int i = 0; i < NSTASHED; i++)
        n += all[i].there;
    NEED(rank, usage_of(rank, stash).nbuffers == n, "not %lld buffers", (long long)n);
    rsd_stash_free(stash); /* with gets in progress */
    rsd_exec_free(sum);
    for (int i = 0; i < NSTASHED; i++)
        if (all[i].there) {
            NEED(rank, !all[i].prefetched || is_filled(&all[i].to),
                 "a get in progress was not completed");
            free(all[i].from.memory);
            free(all[i].to.memory);
        }
}

/* ---- memory ---- */

static void accounting(struct rank *rank, void *context)
{
    enum { NBYTES = 132001, N = 10 };
    rsd_stash *stash = stash_new(rank);
    struct buffer b = buffer_new(NBYTES, 1);
    int64_t ids[N], m = rank->nranks;
    (void)context;
    for (int i = 0; i < N; i++)
        NEED_OK(rank, rsd_stash_put(stash, b.bytes, NBYTES, &ids[i]));
    rsd_stash_usage full = usage_of(rank, stash);
    NEED(rank, full.nbuffers == N && full.nbytes_total == N * NBYTES, "%lld bytes in all",
         (long long)full.nbytes_total);
    NEED(rank, full.nbytes_kept / N == NBYTES / m || full.nbytes_kept / N == NBYTES / m + 1,
         "holds %lld bytes", (long long)full.nbytes_kept);
    NEED_OK(rank, rsd_stash_get(stash, ids[0], b.bytes));
    for (int i = 0; i < N; i++)
        NEED_OK(rank, rsd_stash_drop(stash, ids[i]));
    rsd_stash_usage empty = usage_of(rank, stash);
    NEED(rank, empty.nbuffers == 0 && empty.nbytes_kept == 0 && empty.nbytes_total == 0,
         "%lld bytes are left", (long long)empty.nbytes_kept);
    NEED(rank, empty.nbytes_kept_most == full.nbytes_kept && empty.nbytes_total_most == N * NBYTES,
         "%lld most", (long long)empty.nbytes_kept_most);
    NEED(rank, empty.nbytes_received == NBYTES - full.nbytes_kept / N, "%lld received",
         (long long)empty.nbytes_received);
    rsd_stash_free(stash);
    free(b.memory);
}

const struct stash_case stash_cases[] = {
    {"buffers of every size come back, and each rank keeps 1/m", every_size, 1},
    {"of more sizes than plans are kept", many_sizes, 1},
    {"in many chunks, with the least max_nbytes", large_buffers, 1},
    {"many at a time, prefetched, got and dropped in any order, with reductions in between",
     in_any_order, 3},
    {"kept bytes are counted", accounting, 1},
};
const int nstash_cases = sizeof stash_cases / sizeof *stash_cases;
