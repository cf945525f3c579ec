/* test_exchange.c - plans between ranks that have only their own arrays, over a transport between threads: the results
 * have the same bits with every budget. */
#include "oracle.h"
#include "random.h"
#include "tap.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

struct rank {
    pthread_t thread;
    rsd_thread_group *group;
    int32_t rank;
    int64_t nplans;
    const rsd_plan *const *plans;
    const void *const *src;
    void *const *dst;
    int64_t budget, node;
    double timeout;
    int nruns;
    bool columns;  /* the arrays are column-major */
    bool in_arena; /* the arrays are copied into one, and the result out of it */
    const size_t *src_nbytes, *dst_nbytes;
    int64_t nsrc, ndst;
    const char *expected_note;
    rsd_status status;
    char message[300];
};

/* Copies the arrays of a rank into an arena. */
static void **move_in(rsd_arena *arena, int64_t n, const void *const *arrays, const size_t *nbytes)
{
    void **copies = calloc((size_t)n + 1, sizeof *copies);
    for (int64_t i = 0; i < n; i++) {
        rsd_arena_alloc(arena, (int64_t)nbytes[i] + 1, &copies[i]);
        if (nbytes[i])
            memcpy(copies[i], arrays[i], nbytes[i]);
    }
    return copies;
}

static void run_in_arena(struct rank *rank, rsd_exec *exec, rsd_arena *arena)
{
    void **src = move_in(arena, rank->nsrc, rank->src, rank->src_nbytes);
    void **dst = move_in(arena, rank->ndst, (const void *const *)rank->dst, rank->dst_nbytes);
    for (int i = 0; i < rank->nruns && !rank->status; i++) {
        rank->status = rsd_exec_start(exec, (const void *const *)src, dst);
        for (int k = 0; k < 5 && !rank->status; k++)
            rank->status = rsd_exec_progress(exec);
        if (!rank->status)
            rank->status = rsd_exec_wait(exec);
    }
    for (int64_t i = 0; i < rank->ndst; i++)
        if (rank->dst_nbytes[i])
            memcpy(rank->dst[i], dst[i], rank->dst_nbytes[i]);
    free(src);
    free(dst);
}

static void *run_rank(void *context)
{
    struct rank *rank = context;
    rsd_arena *arena = NULL;
    if (rank->in_arena && rsd_arena_new(1 << 20, &arena))
        arena = NULL;
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    rsd_exchange_options options = {.struct_nbytes = sizeof options,
                                    .max_nbytes = rank->budget,
                                    .timeout = rank->timeout,
                                    .node = rank->node};
    rsd_bind_options columns = {
        .struct_nbytes = sizeof columns, .src_column_major = 1, .dst_column_major = 1};
    rsd_exec *exec = NULL;
    options.arena = arena;
    rank->status = rsd_thread_group_transport(rank->group, rank->rank, &transport);
    if (!rank->status)
        rank->status =
            rsd_bind_transport(rank->nplans, rank->plans, rank->columns ? &columns : NULL,
                               &transport, &options, &exec);
    if (!rank->status && rank->expected_note &&
        !strstr(rsd_exec_describe(exec), rank->expected_note))
        rank->status = rsd_set_error(RSD_EINVAL, rsd_exec_describe(exec));
    if (!rank->status && arena)
        run_in_arena(rank, exec, arena);
    for (int i = 0; i < rank->nruns && !rank->status && !arena; i++)
        rank->status = rsd_exec_run(exec, rank->src, rank->dst);
    snprintf(rank->message, sizeof rank->message, "%s", rank->status ? rsd_error() : "");
    rsd_exec_free(exec);
    rsd_arena_free(arena);
    return NULL;
}

/* How data moves. */
enum way { MESSAGES, STAGED, DIRECT };

/* Moves a tensor. Every rank is a thread that has only its own arrays. */
static bool move_arranged(const char *problem, int64_t budget, enum way way,
                          enum arrangement arrangement)
{
    rsd_layout *a, *b;
    rsd_plan *plan = NULL;
    if (!CHECK(rsd_problem_parse(problem, &a, &b) == RSD_OK, "%s: %s", problem, rsd_error()))
        return false;
    int32_t node_of[64];
    for (int32_t i = 0; i < 64; i++)
        node_of[i] = i / 2;
    rsd_plan_options plan_options = {.struct_nbytes = sizeof plan_options, .cast = 1};
    if (budget < 0) { /* with a node map */
        plan_options.node_of = node_of;
        plan_options.nranks = 64;
        budget = 1;
    }
    bool fine =
        CHECK(rsd_plan_new(a, b, &plan_options, &plan) == RSD_OK, "%s: %s", problem, rsd_error());
    int64_t world =
        rsd_layout_world(a) > rsd_layout_world(b) ? rsd_layout_world(a) : rsd_layout_world(b);
    int64_t *src_strides = oracle_strides(a, arrangement);
    int64_t *dst_strides = oracle_strides(b, arrangement);
    struct memory src = oracle_memory(a, src_strides), dst = oracle_memory(b, dst_strides);
    oracle_fill(a, src_strides, &src);
    rsd_thread_group *group = NULL;
    OK(rsd_thread_group_new((int32_t)world, &group));
    struct rank *ranks = calloc((size_t)world, sizeof *ranks);
    const rsd_plan *plans[] = {plan};
    for (int32_t i = 0; i < world && fine; i++) {
        int64_t first_src, first_dst, nsrc, ndst;
        rsd_layout_arrays_of(a, i, &first_src, &nsrc);
        rsd_layout_arrays_of(b, i, &first_dst, &ndst);
        ranks[i] =
            (struct rank){.group = group,
                          .rank = i,
                          .nplans = 1,
                          .plans = plans,
                          .src = (const void *const *)(src.array + first_src),
                          .dst = dst.array + first_dst,
                          .budget = budget,
                          .columns = arrangement == COLUMNS,
                          .node = way == MESSAGES ? -1 : 0,
                          .in_arena = way == DIRECT,
                          .src_nbytes = src.nbytes + first_src,
                          .dst_nbytes = dst.nbytes + first_dst,
                          .nsrc = nsrc,
                          .ndst = ndst,
                          .expected_note = world == 1 || way == MESSAGES ? "messages" : "shared",
                          .timeout = 60,
                          .nruns = 2};
        pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]);
    }
    for (int32_t i = 0; i < world && fine; i++) {
        pthread_join(ranks[i].thread, NULL);
        CHECK(ranks[i].status == RSD_OK, "%s: rank %d: %s", problem, (int)i, ranks[i].message);
    }
    fine = fine && CHECK(oracle_check(a, b, dst_strides, &dst), "%s", problem);
    free(src_strides);
    free(dst_strides);
    rsd_thread_group_free(group);
    free(ranks);
    oracle_memory_free(&src);
    oracle_memory_free(&dst);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    return fine;
}

static bool move_rows(const char *problem, int64_t budget, enum way way)
{
    return move_arranged(problem, budget, way, ROWS);
}

static void known_moves(void)
{
    static const char *const problems[] = {
        "f32[13,21] : 4:S0 -> 4:S1",
        "f64[16,16] : 2x2:S0,S1 -> 4:R",
        "f32[100,70] : 4:P -> 4:S0",
        "bf16[64,33] : 2x2:P,S1 -> 4:S0",
        "i32[40,40] : 4:P(max) -> 4:R",
        "f32[30] : 3 ranks=0-2 : S0 -> 2 ranks=3,4 : S0",
        "u8[257] : 4:C(0,16) -> 3:S0",
        "f32[8,8] : 2x2:P(avg),P(avg) -> 4:S1",
        "f32[6,7] : 3:S0 -> 1:R",
        "f32[6,7] : 1:R -> 3:S1",
        "f32[] : 4:R -> 4:R",
        "f32[0,5] : 2:S0 -> 3:S1",
        "f32[13,21] : 4:S0 -> bf16 4:S1",
        "bf16[64,33] : 2x2:S0,S1 -> f32 4:R",
        "f32[100,70] : 4:P -> bf16 4:R",
        "u8[257] : 4:P -> f32 4:R",
        "c128[37,29] : 2x2:C(0,4),C(1,3) -> c64 4x1:C(0,8),C(1,5)",
        "i8[40,41] : 4:P(max) -> f64 4:S1",
        "bool[30] : 3 ranks=0-2 : S0 -> f16 2 ranks=3,4 : S0",
    };
    static const char *const names[] = {"by messages", "through shared memory", "from arenas"};
    for (int way = MESSAGES; way <= DIRECT; way++) {
        const char *how = names[way];
        CASE("results of runs between ranks equal the oracle, %s", how);
        for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
            move_rows(problems[i], 0, (enum way)way);
        CASE("the same in many messages, with the smallest budget, %s", how);
        for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
            move_rows(problems[i], 1, (enum way)way);
        move_rows("f64[200,300] : 4:S0 -> 4:S1", 1, (enum way)way);
        move_rows("f32[200,300] : 4:P -> 2x2:S0,S1", 1, (enum way)way);
        move_rows("f32[200,300] : 3:P -> 3:R", 1, (enum way)way);
        move_rows("f64[200,301] : 4:S0 -> bf16 4:S1", 1, (enum way)way);
        move_rows("bf16[200,301] : 4:S0 -> f64 4:S1", 1, (enum way)way);
        move_rows("f32[200,301] : 4:P -> bf16 4:R", 1, (enum way)way);
        CASE("with a node map, %s", how);
        move_rows("f32[40,301] : 4:S0 -> 8:R", -1, (enum way)way);
        move_rows("f32[40,301] : 4:S0 -> bf16 8:R", -1, (enum way)way);
        move_rows("bf16[40,301] : 2:S0 -> f32 2x4:S1,R", -1, (enum way)way);
        move_rows("u8[40,301] : 4:P -> f32 8:R", -1, (enum way)way);
        CASE("column-major on all ranks, %s", how);
        for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
            move_arranged(problems[i], (int64_t)i % 2, (enum way)way, COLUMNS);
        move_arranged("f64[37,29] : 2x2:C(0,4),C(1,3) -> 4x1:C(0,8),C(1,5)", 0, (enum way)way,
                      COLUMNS);
    }
}

static void random_moves(void)
{
    CASE("random layouts");
    struct random random = {11};
    int rounds =
        getenv("TSAN_OPTIONS") ? 25 : 150; /* threads are slow under the thread sanitizer */
    for (int i = 0; i < rounds; i++) {
        static const char *const dtypes[] = {"f32", "i64", "bf16", "u8"};
        const char *dtype = dtypes[random_below(&random, 4)],
                   *other = i % 2 ? dtypes[random_below(&random, 4)] : "";
        struct random_tensor tensor = random_tensor(&random, dtype);
        char from[4096], to[4096], problem[9000];
        random_side(&random, &tensor, i % 3 == 0 ? "sum" : NULL, from, sizeof from);
        random_side(&random, &tensor, NULL, to, sizeof to);
        snprintf(problem, sizeof problem, "%s : %s -> %s %s", tensor.text, from, other, to);
        rsd_layout *a, *b;
        rsd_plan *plan;
        rsd_plan_options options = {.struct_nbytes = sizeof options, .cast = 1};
        if (rsd_problem_parse(problem, &a, &b))
            continue;
        bool possible = rsd_plan_new(a, b, &options, &plan) == RSD_OK;
        if (possible)
            rsd_plan_free(plan);
        rsd_layout_free(a);
        rsd_layout_free(b);
        if (possible && !move_rows(problem, i % 2, (enum way)(i / 2 % 3)))
            break;
    }
}

int main(void)
{
    known_moves();
    random_moves();
    return tap_end();
}
