/* test_move.c - moves in one process equal the oracle: the cases of PyTorch's own tests, every
 * dtype, every arrangement of memory, and random layouts. */
#include "oracle.h"
#include "random.h"
#include "tap.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* Moves a problem and checks the result; strides as arranged on each side. */
static bool move(const char *problem, rsd_pool *pool, enum arrangement from, enum arrangement to)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    if (!CHECK(rsd_problem_parse(problem, &a, &b) == RSD_OK, "%s: %s", problem, rsd_error()))
        return false;
    bool fine = CHECK(rsd_plan_new(a, b, NULL, &plan) == RSD_OK, "%s: %s", problem, rsd_error());
    if (fine) {
        int64_t *src_strides = oracle_strides(a, from), *dst_strides = oracle_strides(b, to);
        rsd_bind_options options = {sizeof options, src_strides, dst_strides, 0, 0};
        struct memory src = oracle_memory(a, src_strides), dst = oracle_memory(b, dst_strides);
        const rsd_plan *plans[] = {plan};
        oracle_fill(a, src_strides, &src);
        fine = CHECK(rsd_bind_threads_many(1, plans, &options, pool, &exec) == RSD_OK, "%s: %s",
                     problem, rsd_error());
        if (fine) {
            fine = OK(rsd_run(exec, (const void *const *)src.array, dst.array)) &&
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

static void every_pair(const char *tensor, const char *mesh, const char *const *from,
                       const char *const *to)
{
    char problem[512];
    for (const char *const *a = from; *a; a++)
        for (const char *const *b = to; *b; b++) {
            snprintf(problem, sizeof problem, "%s : %s:%s -> %s:%s", tensor, mesh, *a, mesh, *b);
            move(problem, NULL, ROWS, ROWS);
        }
}

/* ---- as PyTorch's tests ---- */

static void sharded_tensor_reshard(void)
{
    CASE("ShardedTensor.reshard: the four cases of PyTorch's test");
    static const char *const sizes[] = {"[13,21]", "[14,23]", "[15,26]", "[12,24]"};
    static const char *const cases[][4] = {{"0", "0,1,3,2", "0", "2,3,1,0"},
                                           {"0", "2,3,0,1", "1", "1,0,3,2"},
                                           {"1", "1,0,2,3", "0", "3,2,0,1"},
                                           {"1", "3,2,1,0", "1", "0,1,2,3"}};
    char problem[256];
    for (int s = 0; s < 4; s++)
        for (int c = 0; c < 4; c++) {
            snprintf(problem, sizeof problem, "f32%s : 4 ranks=%s:S%s -> 4 ranks=%s:S%s", sizes[s],
                     cases[c][1], cases[c][0], cases[c][3], cases[c][2]);
            move(problem, NULL, ROWS, ROWS);
        }

    CASE("ShardedTensor.reshard: every permutation of four ranks, 3- and 4-cycles among them");
    for (int code = 0; code < 256; code++) {
        int r[4] = {code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6 & 3};
        if ((1 << r[0] | 1 << r[1] | 1 << r[2] | 1 << r[3]) != 15)
            continue;
        snprintf(problem, sizeof problem, "i64[13,5] : 4:S0 -> 4 ranks=%d,%d,%d,%d:S0", r[0], r[1],
                 r[2], r[3]);
        move(problem, NULL, ROWS, ROWS);
        snprintf(problem, sizeof problem, "i64[13,5] : 4 ranks=%d,%d,%d,%d:S1 -> 4:S0", r[0], r[1],
                 r[2], r[3]);
        move(problem, NULL, ROWS, ROWS);
    }
}

static void redistribute_one_dim(void)
{
    static const char *const all[] = {"S0", "S1", "R", "P", NULL};
    static const char *const full[] = {"S0", "S1", "R", "S(-1)", NULL};
    CASE("redistribute: all pairs on a mesh of 4, sizes of PyTorch's tests");
    static const char *const sizes[] = {
        "f32[12,3]", "f32[13,3]", "f32[14,3]", "f32[3,12]", "f32[3,13]", "f32[3,14]", "c64[12,3]",
        "c64[5,8]",  "f32[2,8]",  "f32[1,3]",  "f32[8,8]",  "f32[5,5]",  "f32[0,3]"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        every_pair(sizes[i], "4", all, full);
    every_pair("f32[8,8,8]", "4", all, full);
}

/* All products of placements of n axes, as text. */
static const char **products(const char *const *one, int n)
{
    int count = 0, total = 1;
    while (one[count])
        count++;
    for (int i = 0; i < n; i++)
        total *= count;
    char(*texts)[64] = calloc((size_t)total, sizeof *texts);
    const char **list = calloc((size_t)total + 1, sizeof *list);
    for (int i = 0; i < total; i++) {
        int rest = i;
        for (int a = 0; a < n; a++) {
            snprintf(texts[i] + strlen(texts[i]), sizeof *texts - strlen(texts[i]), "%s%s",
                     a ? "," : "", one[rest % count]);
            rest /= count;
        }
        list[i] = texts[i];
    }
    return list;
}

static void free_products(const char **list)
{
    free((void *)(uintptr_t)list[0]);
    free(list);
}

static void redistribute_many_dims(void)
{
    static const char *const from[] = {"R", "S0", "S1", "P", NULL};
    static const char *const to[] = {"R", "S0", "S1", NULL};
    static const struct {
        const char *mesh, *tensor;
        int naxes;
    } cases[] = {{"8", "i32[16,24]", 1},   {"4x2", "i32[16,24]", 2}, {"2x2x2", "i32[16,24]", 3},
                 {"8", "f32[10,7]", 1},    {"4x2", "f32[9,5]", 2},   {"2x2x2", "f32[5,13]", 3},
                 {"2x2", "bf16[10,5]", 2}, {"2x2", "f16[3,5]", 2},   {"2x2", "f64[1,3]", 2},
                 {"2x3", "i64[4]", 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool flat = strstr(cases[i].tensor, "[4]") != NULL;
        static const char *const flat_from[] = {"R", "S0", "P", NULL};
        static const char *const flat_to[] = {"R", "S0", NULL};
        CASE("redistribute: {R,S0,S1,P} to {R,S0,S1} on every axis of %s, %s", cases[i].mesh,
             cases[i].tensor);
        const char **a = products(flat ? flat_from : from, cases[i].naxes);
        const char **b = products(flat ? flat_to : to, cases[i].naxes);
        every_pair(cases[i].tensor, cases[i].mesh, a, b);
        free_products(a);
        free_products(b);
    }
    CASE("redistribute: dims of a three-dimensional tensor on 2x2x2");
    static const char *const three[] = {"S0,S0,S0", "S1,S1,S1", "S0,S1,S0", "S1,S0,S0", "S0,S1,S2",
                                        "S2,S1,S0", "R,S0,S0",  "S1,R,S0",  "S0,S0,S1", NULL};
    every_pair("f32[8,8,8]", "2x2x2", three, three);
    every_pair("f32[7,3,5]", "2x2x2", three, three);
    CASE("redistribute: every order of three axes on one dim");
    static const char *const orders[] = {"[0.1.2, -]", "[0.2.1, -]", "[1.0.2, -]", "[1.2.0, -]",
                                         "[2.0.1, -]", "[2.1.0, -]", "[1.0, 2]",   "[2, 1.0]",
                                         "[-, 2.0]",   NULL};
    every_pair("f32[17,5]", "2x2x2", orders, orders);
    every_pair("f32[16,8]", "2x2x2", orders, orders);
    every_pair("f32[33,16]", "2x2x2", orders, orders);
    CASE("redistribute: partial by every reduction");
    static const char *const ops[] = {"P(sum)",  "P(avg)", "P(min)",  "P(max)", "P(product)",
                                      "P(band)", "P(bor)", "P(bxor)", NULL};
    every_pair("i32[7,6]", "4", ops, to);
    every_pair("u8[7,6]", "4", ops, to);
}

static void strided_and_nested(void)
{
    CASE("uneven strided shards: what PyTorch gets wrong");
    static const char *const problems[] = {
        "i32[7] : 3x2:_S(0,2),S(0) -> 6:R",
        "i32[9,2] : 4x2:_S(0,2),S(0) -> 8:S0",
        "i32[13] : 3x2:_S(0,2),S(0) -> 6:S0",
        "i32[13] : 6:S0 -> 3x2:_S(0,2),S(0)",
        "i32[16,13] : 8:_S(0,2) -> 8:S1",
        "i32[24,8] : 4x2:_S(0,3),R -> 4x2:S1,S0",
        "i32[8,4] : 4x2:_S(-2,2),S(-2) -> 4x2:[1.0, -]",
        "i32[31,13,11] : 2x2x2:_S(0,2),S0,S1 -> 2x2x2:S2,_S(0,3),R",
        "i32[7] : 3x2:_S(0,2),S(0) -> 3x2:[1.0]"};
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        move(problems[i], NULL, ROWS, ROWS);
    CASE("nested uneven shards: pieces are cut from the local extent");
    move("i32[5,5] : 2x2:S1,S1 -> 4:S1", NULL, ROWS, ROWS);
    move("i32[4] : 2x3:S0,S0 -> 6:R", NULL, ROWS, ROWS);
    move("i32[10] : 2x3:S0,S0 -> 3x2:S0,S0", NULL, ROWS, ROWS);
    CASE("fused tensors: segments are sharded each by itself");
    move("f32[16,4] : 4:S(0;8,4,4) -> 2:S(0;8,4,4)", NULL, ROWS, ROWS);
    move("f32[17,4] : 4:S(0;8,4,5) -> 3x2:S(0;8,4,5),S(0;8,4,5)", NULL, ROWS, ROWS);
    move("f32[12,4] : 2x2:S(0;6,3,3),S0 -> 4:S1", NULL, ROWS, ROWS);
    CASE("block-cyclic, as ScaLAPACK");
    move("f64[37,29] : 2x2:C(0,4),C(1,3) -> 4x1:C(0,8),C(1,5)", NULL, COLUMNS, COLUMNS);
    move("f64[16,16] : 2x2:C(0,1),C(1,1) -> 4:S0", NULL, ROWS, COLUMNS);
}

static void other_meshes(void)
{
    CASE("other meshes: disjoint, overlapping, larger, smaller; scatter and gather");
    static const char *const problems[] = {
        "f32[10,6] : 4:S0 -> 4 ranks=4-7:S1",
        "f32[10,6] : 2x2:S0,R -> 3 ranks=3-5:S1",
        "f32[10,6] : 4:R -> 8:S0",
        "f32[10,6] : 8:S0 -> 3:S0",
        "f32[10,6] : 1 ranks=2:R -> 4:S0",
        "f32[10,6] : 4:S1 -> 1 ranks=3:R",
        "f32[10,6] : 2x4:R,S0 -> 4 ranks=0-3:S1",
        "f32[10,6] : 6:P -> 2 ranks=7,8:R",
        "f32[10,6] : 2x2:P,S0 -> 3 ranks=1-3:R",
        "f32[10,6] : 2x3:P,R -> 6:R",
        "f32[10,6] : 4:P -> 4 ranks=3,2,1,0:S0",
        "i32[10,6] : 2x2 ranks=3,1,0,2:P,P -> 4:S1",
        "f32[] : 4:R -> 8:R",
        "f32[] : 4:P -> 8:R",
        "f32[] : { : | } -> { | : ; : }",
        "f32[0,5] : 4:S0 -> { 0:0 | :,2:4 }",
        "f32[10,20] : { 0:5 ; 5:10 } -> { 0:2 | 2:3,0:20; 3:6 | 6:9 | 9:10 }",
        "f32[16,1] : { 0:4 | 4:7 | 7:11 | 11:16 } -> { 0:2 | 2:6 | 6:12 | 12:16 }",
        "f32[16,1] : { 0:4 | 4:7 | 7:11 | 11:16 } -> { 0:6 | 6:8 | 8:9 | 9:16 }",
        "f32[9,9] : { 0:6 | 3:9 } -> 3:S0",
        "f32[9,9] : { 0:6,0:6; 3:9 | :,4:9 } -> 3:S1",
        "i32[6,4] : 2x2:S0,P -> { 0:3 | 0:3 | 3:6,1:4 | 3:6,0:1; 0:6 }"};
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        move(problems[i], NULL, ROWS, ROWS);
    CASE("many dims");
    move("u8[2,1,3,2,1,2,3,2] : 2x2:S0,S7 -> 4:S6", NULL, PADDED, COLUMNS);
    move("u8[1,2,1,2,1,2,1,2,1,2,1,2,1,2,1,2] : 2x2x2:S1,S3,S15 -> 2x2x2:S5,S7,R", NULL, ROWS,
         PADDED);
}

/* ---- dtypes and arrangements ---- */

static void dtypes_and_strides(rsd_pool *pool)
{
    static const char *const moved[] = {
        "f64",  "f32",        "f16",        "bf16",   "f8e4m3", "f8e5m2", "i64",  "i32",
        "i16",  "i8",         "u64",        "u32",    "u16",    "u8",     "bool", "c64",
        "c128", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0", "f4x2",   "c32"};
    char problem[128];
    CASE("every dtype, in every arrangement of memory");
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i++)
        for (int from = ROWS; from <= PADDED; from++)
            for (int to = ROWS; to <= PADDED; to++) {
                snprintf(problem, sizeof problem, "%s[9,10,11] : 2x2:S0,S1 -> 4:S2", moved[i]);
                move(problem, NULL, (enum arrangement)from, (enum arrangement)to);
            }
    CASE("every dtype that has reductions, by every reduction it has");
    static const char *const floats[] = {"f64", "f32", "f16", "bf16"};
    static const char *const integers[] = {"i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"};
    static const char *const ops[] = {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"};
    for (int o = 0; o < 8; o++) {
        for (int i = 0; i < 4 && o < 5; i++) {
            snprintf(problem, sizeof problem, "%s[9,10] : 6:P(%s) -> 2x3:S1,R", floats[i], ops[o]);
            move(problem, NULL, PADDED, COLUMNS);
        }
        for (int i = 0; i < 8; i++) {
            snprintf(problem, sizeof problem, "%s[9,10] : 6:P(%s) -> 2x3:S1,R", integers[i],
                     ops[o]);
            move(problem, NULL, COLUMNS, ROWS);
        }
        if (o != 1) {
            snprintf(problem, sizeof problem, "bool[9,10] : 6:P(%s) -> 2x3:S1,R", ops[o]);
            move(problem, NULL, ROWS, ROWS);
        }
        if (o < 2 || o == 4)
            for (int i = 0; i < 2; i++) {
                snprintf(problem, sizeof problem, "%s[9,10] : 6:P(%s) -> 2x3:S1,R",
                         i ? "c64" : "c128", ops[o]);
                move(problem, NULL, ROWS, PADDED);
            }
    }
    CASE("large enough for threads and for stores past the cache");
    move("f32[1024,1500] : 4:S0 -> 4:S1", pool, ROWS, ROWS);
    move("u8[3000,2003] : 4:S1 -> 3:S0", pool, ROWS, ROWS);
    move("u8[5000011] : 4:S0 -> 3:S0", pool, ROWS, ROWS);
    move("u8[3,1000003] : 2:R -> 3:S0", pool, ROWS, ROWS);
    move("u8[2,1500001] : 2:S0 -> { 0:2,0:1500001 }", pool, ROWS, PADDED);
    move("u8[2,1500001] : { :,0:1000001 | :,1000001:1500001 } -> 1:R", pool, ROWS, ROWS);
    move("f64[800,900] : 2x2:S0,S1 -> 4:S0", pool, COLUMNS, ROWS);
    move("f32[700,1200] : 4:P -> 4:R", pool, ROWS, ROWS);
    move("f32[1400,1200] : 4:P -> 2x2:S1,R", pool, COLUMNS, ROWS);
    move("f32[1400,2] : 4:P -> 2:R", pool, ROWS, PADDED);
    move("f64[1024,1024] : 2x2:C(0,1),C(1,1) -> 4:S1", pool, ROWS, ROWS);
    move("f32[512,2048] : 2x2:C(0,64),C(1,64) -> 4x1:C(0,128),C(1,128)", pool, ROWS, ROWS);
}

/* ---- many tensors, twice, in halves ---- */

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
    CASE("many tensors in one exec, run twice and in halves");
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
        rsd_plan_free(plans[i]); /* an exec stands on its own */
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++)
            for (int64_t k = 0; k < dst[i].narrays; k++)
                if (dst[i].nbytes[k])
                    memset(dst[i].array[k], 0xa5, dst[i].nbytes[k]);
        if (round < 2) {
            OK(rsd_run(exec, from, to));
        } else {
            FAILS(RSD_EINVAL, "nothing was started", rsd_wait(exec));
            OK(rsd_start(exec, from, to));
            FAILS(RSD_EINVAL, "in flight", rsd_start(exec, from, to));
            FAILS(RSD_EINVAL, "in flight", rsd_run(exec, from, to));
            OK(rsd_wait(exec));
        }
        for (int i = 0; i < N; i++)
            CHECK(oracle_check(a[i], b[i], NULL, &dst[i]), "%s", problems[i]);
    }
    const void *missing = from[0];
    from[0] = NULL;
    FAILS(RSD_EINVAL, "source array 0", rsd_run(exec, from, to));
    from[0] = missing;
    OK(rsd_start(exec, from, to));
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
    CASE("destination strides that let elements share a place are refused");
    OK(rsd_problem_parse("f32[4,4] : 1:R -> 1:R", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    const rsd_plan *plans[] = {plan};
    const int64_t broadcast[] = {0, 1}, negative[] = {-4, 1}, overlapping[] = {2, 1},
                  far[] = {INT64_MAX / 8, 1};
    rsd_bind_options options = {.struct_nbytes = sizeof options};
    options.dst_strides = broadcast;
    FAILS(RSD_EINVAL, "share a place", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
    options.dst_strides = overlapping;
    FAILS(RSD_EINVAL, "share a place", rsd_bind_threads_many(1, plans, &options, NULL, &exec));
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
                             &exec)); /* reading one place often is fine */
    float from[4] = {1, 2, 3, 4}, to[16];
    const void *src[] = {from};
    void *dst[] = {to};
    OK(rsd_run(exec, src, dst));
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
    OK(rsd_run(exec, (const void *const *)src.array, dst.array));
    CHECK(oracle_check(a, b, NULL, &dst));
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    oracle_memory_free(&src);
    oracle_memory_free(&dst);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* A child after fork has none of the threads: it does what was started by itself. */
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
    OK(rsd_start(exec, (const void *const *)src.array, dst.array));
    pid_t child = fork();
    rsd_status status = rsd_wait(exec);
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

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 20000;
    rsd_pool *pool;
    CASE("a pool");
    OK(rsd_pool_new(3, &pool));
    sharded_tensor_reshard();
    redistribute_one_dim();
    redistribute_many_dims();
    strided_and_nested();
    other_meshes();
    dtypes_and_strides(pool);
    many_tensors(pool);
    many_tensors(NULL);
    one_call();
    wrong_strides();
    pool_outlived();
    forked(pool);
    random_problems(pool, count);
    rsd_pool_free(pool);
    return tap_end();
}
