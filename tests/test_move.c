/* test_move.c - moves in one process equal the oracle: the cases of PyTorch's own tests, every
 * dtype, every arrangement of memory, and random layouts. */
#include "cases.h"
#include "oracle.h"
#include "random.h"
#include "tap.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* Moves a tensor and checks the result, with the given arrangement of memory on each side. */
static bool move_with(const char *problem, const rsd_plan_options *plan_options, rsd_pool *pool,
                      enum arrangement from, enum arrangement to)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    if (!CHECK(rsd_problem_parse(problem, &a, &b) == RSD_OK, "%s: %s", problem, rsd_error()))
        return false;
    bool fine =
        CHECK(rsd_plan_new(a, b, plan_options, &plan) == RSD_OK, "%s: %s", problem, rsd_error());
    if (fine) {
        int64_t *src_strides = oracle_strides(a, from), *dst_strides = oracle_strides(b, to);
        rsd_bind_options options = {sizeof options, src_strides, dst_strides, 0, 0};
        struct memory src = oracle_memory(a, src_strides), dst = oracle_memory(b, dst_strides);
        const rsd_plan *plans[] = {plan};
        oracle_fill(a, src_strides, &src);
        fine = CHECK(rsd_bind_threads_many(1, plans, &options, pool, &exec) == RSD_OK, "%s: %s",
                     problem, rsd_error());
        if (fine) {
            fine = OK(rsd_exec_run(exec, (const void *const *)src.array, dst.array)) &&
                   CHECK(oracle_check(a, b, dst_strides, &dst), "%s", problem);
            rsd_exec_free(exec);
        }
        oracle_memory_free(&src);
        oracle_memory_free(&dst);
        free(src_strides);
        free(dst_strides);
        rsd_plan_free(plan);
    }
    rsd_layout_free(a);
    rsd_layout_free(b);
    return fine;
}

static bool move(const char *problem, rsd_pool *pool, enum arrangement from, enum arrangement to)
{
    return move_with(problem, &case_options, pool, from, to);
}

static void begin(void *context, const char *name)
{
    (void)context;
    CASE("%s", name);
}

static void move_one(void *context, const char *problem, enum arrangement from, enum arrangement to)
{
    move(problem, context, from, to);
}

/* ---- many tensors ---- */

static void many_tensors(rsd_pool *pool)
{
    enum { N = 3 };
    static const char *const problems[N] = {"f32[64,64] : 4:S0 -> 2x2:S1,R",
                                            "bf16[600,1000] : 4:S0 -> 4:S1",
                                            "i64[5] : { 0:3 | 2:5 } -> 4:S0"};
    rsd_layout *a[N], *b[N];
    rsd_plan *plans[N];
    struct memory src[N], dst[N];
    const void *from[32];
    void *to[32];
    int64_t nfrom = 0, nto = 0;
    rsd_exec *exec;
    CASE("many tensors in one exec, run twice, also with start and wait");
    for (int i = 0; i < N; i++) {
        OK(rsd_problem_parse(problems[i], &a[i], &b[i]));
        OK(rsd_plan_new(a[i], b[i], NULL, &plans[i]));
        src[i] = oracle_memory(a[i], NULL);
        dst[i] = oracle_memory(b[i], NULL);
        oracle_fill(a[i], NULL, &src[i]);
        for (int64_t k = 0; k < src[i].narrays; k++)
            from[nfrom++] = src[i].array[k];
        for (int64_t k = 0; k < dst[i].narrays; k++)
            to[nto++] = dst[i].array[k];
    }
    OK(rsd_bind_threads_many(N, (const rsd_plan *const *)plans, NULL, pool, &exec));
    for (int i = 0; i < N; i++)
        rsd_plan_free(plans[i]); /* an exec does not need its plan */
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++)
            for (int64_t k = 0; k < dst[i].narrays; k++)
                if (dst[i].nbytes[k])
                    memset(dst[i].array[k], 0xa5, dst[i].nbytes[k]);
        if (round < 2) {
            OK(rsd_exec_run(exec, from, to));
        } else {
            FAILS(RSD_EINVAL, "no run in progress", rsd_exec_wait(exec));
            FAILS(RSD_EINVAL, "no run in progress", rsd_exec_progress(exec));
            OK(rsd_exec_start(exec, from, to));
            FAILS(RSD_EINVAL, "a run is in progress", rsd_exec_start(exec, from, to));
            FAILS(RSD_EINVAL, "a run is in progress", rsd_exec_run(exec, from, to));
            OK(rsd_exec_progress(exec));
            OK(rsd_exec_wait(exec));
        }
        for (int i = 0; i < N; i++)
            CHECK(oracle_check(a[i], b[i], NULL, &dst[i]), "%s", problems[i]);
    }
    const void *missing = from[0];
    from[0] = NULL;
    FAILS(RSD_EINVAL, "source array 0", rsd_exec_run(exec, from, to));
    from[0] = to[0];
    FAILS(RSD_EINVAL, "overlaps a", rsd_exec_run(exec, from, to));
    from[0] = missing;
    from[1] = from[2]; /* sources may be the same */
    OK(rsd_exec_run(exec, from, to));
    OK(rsd_exec_start(exec, from, to));
    rsd_exec_free(exec); /* waits */
    for (int i = 0; i < N; i++) {
        oracle_memory_free(&src[i]);
        oracle_memory_free(&dst[i]);
        rsd_layout_free(a[i]);
        rsd_layout_free(b[i]);
    }
}

static void one_call(void)
{
    rsd_layout *a, *b;
    CASE("rsd_reshard in one call");
    OK(rsd_problem_parse("f32[40,30] : 4:S0 -> 2x2:S0,S1", &a, &b));
    struct memory src = oracle_memory(a, NULL), dst = oracle_memory(b, NULL);
    oracle_fill(a, NULL, &src);
    OK(rsd_reshard(a, b, (const void *const *)src.array, dst.array));
    CHECK(oracle_check(a, b, NULL, &dst));
    oracle_memory_free(&src);
    oracle_memory_free(&dst);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static void wrong_strides(void)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec = NULL;
    CASE("destination strides that map two elements to one address are refused");
    OK(rsd_problem_parse("f32[4,4] : 1:R -> 1:R", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    const rsd_plan *plans[] = {plan};
    const int64_t broadcast[] = {0, 1}, negative[] = {-4, 1}, overlapping[] = {2, 1},
                  far[] = {INT64_MAX / 8, 1};
    rsd_bind_options options = {.struct_nbytes = sizeof options};
    options.dst_strides = broadcast;
    FAILS(RSD_EINVAL, "to one address", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
    options.dst_strides = overlapping;
    FAILS(RSD_EINVAL, "to one address", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
    options.dst_strides = negative;
    FAILS(RSD_EINVAL, "stride -4", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
    options.dst_strides = far;
    FAILS(RSD_ELIMIT, "2^63", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
    options = (rsd_bind_options){.struct_nbytes = 3};
    FAILS(RSD_EINVAL, "struct_nbytes", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
    options = (rsd_bind_options){
        .struct_nbytes = sizeof options, .src_strides = broadcast, .src_column_major = 1};
    FAILS(RSD_EINVAL, "column_major", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
    options = (rsd_bind_options){.struct_nbytes = sizeof options, .src_strides = broadcast};
    OK(rsd_bind_threads_many(1, plans, &options, NULL,
                             &exec)); /* source elements may have the same address */
    float from[4] = {1, 2, 3, 4}, to[16];
    const void *src[] = {from};
    void *dst[] = {to};
    OK(rsd_exec_run(exec, src, dst));
    CHECK(to[0] == 1 && to[7] == 4 && to[14] == 3);
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* ---- random layouts ---- */

/* A pool may be freed before the execs that use it. */
static void pool_outlived(void)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_pool *pool;
    rsd_exec *exec;
    CASE("an exec keeps its pool");
    OK(rsd_problem_parse("f32[400,300] : 4:S0 -> 2x2:S0,S1", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    OK(rsd_pool_new(2, &pool));
    OK(rsd_bind_threads(plan, pool, &exec));
    rsd_pool_free(pool);
    struct memory src = oracle_memory(a, NULL), dst = oracle_memory(b, NULL);
    oracle_fill(a, NULL, &src);
    OK(rsd_exec_run(exec, (const void *const *)src.array, dst.array));
    CHECK(oracle_check(a, b, NULL, &dst));
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    oracle_memory_free(&src);
    oracle_memory_free(&dst);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* After a fork the child has no threads of the pool: the calling thread does the work. */
static void forked(rsd_pool *pool)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    CASE("a run started before a fork ends in both processes");
    OK(rsd_problem_parse("f32[1200,1500] : 4:P -> 2x2:R,S1", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    OK(rsd_bind_threads(plan, pool, &exec));
    struct memory src = oracle_memory(a, NULL), dst = oracle_memory(b, NULL);
    oracle_fill(a, NULL, &src);
    OK(rsd_exec_start(exec, (const void *const *)src.array, dst.array));
    pid_t child = fork();
    rsd_status status = rsd_exec_wait(exec);
    bool right = status == RSD_OK && oracle_check(a, b, NULL, &dst);
    if (child == 0)
        _exit(right ? 0 : 1);
    int code = -1;
    waitpid(child, &code, 0);
    CHECK(right && code == 0, "the child ended with %d", code);
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    oracle_memory_free(&src);
    oracle_memory_free(&dst);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* Copies that one rank of a node receives, and forwards. */
static void nodes(rsd_pool *pool)
{
    static const int32_t node_of[] = {0, 0, 1, 1, 2, 2, 3, 3};
    static const char *const problems[] = {
        "f32[40,30] : 4:S0 -> 8:R", "f32[40,30] : 4:S0 -> bf16 8:R",
        "bf16[40,30] : 2:S1 -> f32 2x4:S0,R", "u8[40,30] : 4:P -> f32 8:R"};
    rsd_plan_options options = {sizeof options, 8, node_of, 1};
    CASE("with a node map");
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        move_with(problems[i], &options, pool, ROWS, PADDED);
}

static const char *any_number(struct random *r)
{
    static const char *const numbers[] = {"f64", "f32", "f16", "bf16", "i64", "i32",
                                          "i16", "i8",  "u32", "u16",  "u8",  "bool"};
    return numbers[random_below(r, sizeof numbers / sizeof *numbers)];
}

static void random_casts(rsd_pool *pool, int count)
{
    struct random r = {20251117};
    CASE("%d random problems with casts", count);
    for (int i = 0; i < count; i++) {
        char a[2048], b[2048], problem[4400];
        const char *from = any_number(&r), *to = any_number(&r);
        struct random_tensor t = random_tensor(&r, from);
        random_side(&r, &t, i % 4 == 3 ? "max" : NULL, a, sizeof a);
        random_side(&r, &t, NULL, b, sizeof b);
        snprintf(problem, sizeof problem, "%s : %s -> %s %s", t.text, a, to, b);
        enum arrangement from_as = (enum arrangement)random_below(&r, 3);
        enum arrangement to_as = (enum arrangement)random_below(&r, 3);
        if (!move(problem, i % 2 ? pool : NULL, from_as, to_as))
            return;
    }
}

static void random_problems(rsd_pool *pool, int count)
{
    static const char *const dtypes[] = {"f32", "u8", "c128", "bf16", "i64", "f8e4m3"};
    static const char *const ops[] = {"sum", "max", "bxor", "min"};
    struct random r = {20250614};
    CASE("%d random problems", count);
    for (int i = 0; i < count; i++) {
        char a[2048], b[2048], problem[4400];
        bool partial = i % 4 == 3;
        const char *op = partial ? ops[i / 4 % 4] : NULL;
        struct random_tensor t = random_tensor(&r, partial ? "i32" : dtypes[i % 6]);
        random_side(&r, &t, op, a, sizeof a);
        random_side(&r, &t, NULL, b, sizeof b);
        snprintf(problem, sizeof problem, "%s : %s -> %s", t.text, a, b);
        enum arrangement from = (enum arrangement)random_below(&r, 3);
        enum arrangement to = (enum arrangement)random_below(&r, 3);
        if (!move(problem, i % 2 ? pool : NULL, from, to))
            return;
    }
}

/* The library calls dlopen through this. */
static int ndlopen;
void *__real_dlopen(const char *file, int mode);
void *__wrap_dlopen(const char *file, int mode);
void *__wrap_dlopen(const char *file, int mode)
{
    ndlopen++;
    return __real_dlopen(file, mode);
}

/* A small move takes less than a microsecond, and a search for a library that is not there takes thirty. */
static void search_once(void)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    float src[4] = {1, 2, 3, 4}, dst[4] = {0};
    CASE("runs do not search for CUDA each time");
    OK(rsd_problem_parse("f32[4] : 1:R -> 1:S0", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    OK(rsd_bind_threads(plan, NULL, &exec));
    OK(rsd_exec_run(exec, (const void *[]){src}, (void *[]){dst}));
    ndlopen = 0;
    for (int i = 0; i < 10; i++)
        OK(rsd_exec_run(exec, (const void *[]){src}, (void *[]){dst}));
    CHECK(ndlopen == 0 && dst[3] == 4);
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 20000;
    rsd_pool *pool;
    CASE("a pool");
    OK(rsd_pool_new(3, &pool));
    every_case(&(struct cases){begin, move_one, pool});
    many_tensors(pool);
    many_tensors(NULL);
    one_call();
    search_once();
    wrong_strides();
    pool_outlived();
    forked(pool);
    nodes(pool);
    random_problems(pool, count);
    random_casts(pool, count / 4);
    rsd_pool_free(pool);
    return tap_end();
}
