/* cases.c - see cases.h. */
#include "cases.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((format(printf, 2, 3))) static void group(const struct cases *to_each,
                                                        const char *format, ...)
{
    char name[256];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    to_each->group(to_each->context, name);
}

static void one(const struct cases *to_each, const char *problem, enum arrangement from,
                enum arrangement to)
{
    to_each->one(to_each->context, problem, from, to);
}

static void every_pair(const struct cases *to_each, const char *tensor, const char *mesh,
                       const char *const *from, const char *const *to)
{
    char problem[512];
    for (const char *const *a = from; *a; a++)
        for (const char *const *b = to; *b; b++) {
            snprintf(problem, sizeof problem, "%s : %s:%s -> %s:%s", tensor, mesh, *a, mesh, *b);
            one(to_each, problem, ROWS, ROWS);
        }
}

/* ---- cases of PyTorch's tests ---- */

static void sharded_tensor_reshard(const struct cases *to_each)
{
    group(to_each, "ShardedTensor.reshard: the four cases of PyTorch's test");
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
            one(to_each, problem, ROWS, ROWS);
        }

    group(to_each,
          "ShardedTensor.reshard: every permutation of four ranks, 3- and 4-cycles among them");
    for (int code = 0; code < 256; code++) {
        int r[4] = {code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6 & 3};
        if ((1 << r[0] | 1 << r[1] | 1 << r[2] | 1 << r[3]) != 15)
            continue;
        snprintf(problem, sizeof problem, "i64[13,5] : 4:S0 -> 4 ranks=%d,%d,%d,%d:S0", r[0], r[1],
                 r[2], r[3]);
        one(to_each, problem, ROWS, ROWS);
        snprintf(problem, sizeof problem, "i64[13,5] : 4 ranks=%d,%d,%d,%d:S1 -> 4:S0", r[0], r[1],
                 r[2], r[3]);
        one(to_each, problem, ROWS, ROWS);
    }
}

static void redistribute_one_dim(const struct cases *to_each)
{
    static const char *const all[] = {"S0", "S1", "R", "P", NULL};
    static const char *const full[] = {"S0", "S1", "R", "S(-1)", NULL};
    group(to_each, "redistribute: all pairs on a mesh of 4, sizes of PyTorch's tests");
    static const char *const sizes[] = {
        "f32[12,3]", "f32[13,3]", "f32[14,3]", "f32[3,12]", "f32[3,13]", "f32[3,14]", "c64[12,3]",
        "c64[5,8]",  "f32[2,8]",  "f32[1,3]",  "f32[8,8]",  "f32[5,5]",  "f32[0,3]"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        every_pair(to_each, sizes[i], "4", all, full);
    every_pair(to_each, "f32[8,8,8]", "4", all, full);
}

/* All combinations of placements of n axes, as text. */
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

static void redistribute_many_dims(const struct cases *to_each)
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
        group(to_each, "redistribute: {R,S0,S1,P} to {R,S0,S1} on every axis of %s, %s",
              cases[i].mesh, cases[i].tensor);
        const char **a = products(flat ? flat_from : from, cases[i].naxes);
        const char **b = products(flat ? flat_to : to, cases[i].naxes);
        every_pair(to_each, cases[i].tensor, cases[i].mesh, a, b);
        free_products(a);
        free_products(b);
    }
    group(to_each, "redistribute: dims of a three-dimensional tensor on 2x2x2");
    static const char *const three[] = {"S0,S0,S0", "S1,S1,S1", "S0,S1,S0", "S1,S0,S0", "S0,S1,S2",
                                        "S2,S1,S0", "R,S0,S0",  "S1,R,S0",  "S0,S0,S1", NULL};
    every_pair(to_each, "f32[8,8,8]", "2x2x2", three, three);
    every_pair(to_each, "f32[7,3,5]", "2x2x2", three, three);
    group(to_each, "redistribute: every order of three axes on one dim");
    static const char *const orders[] = {"[0.1.2, -]", "[0.2.1, -]", "[1.0.2, -]", "[1.2.0, -]",
                                         "[2.0.1, -]", "[2.1.0, -]", "[1.0, 2]",   "[2, 1.0]",
                                         "[-, 2.0]",   NULL};
    every_pair(to_each, "f32[17,5]", "2x2x2", orders, orders);
    every_pair(to_each, "f32[16,8]", "2x2x2", orders, orders);
    every_pair(to_each, "f32[33,16]", "2x2x2", orders, orders);
    group(to_each, "redistribute: partial by every reduction");
    static const char *const ops[] = {"P(sum)",  "P(avg)", "P(min)",  "P(max)", "P(product)",
                                      "P(band)", "P(bor)", "P(bxor)", NULL};
    every_pair(to_each, "i32[7,6]", "4", ops, to);
    every_pair(to_each, "u8[7,6]", "4", ops, to);
}

static void strided_and_nested(const struct cases *to_each)
{
    group(to_each, "uneven strided shards, where PyTorch has errors");
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
        one(to_each, problems[i], ROWS, ROWS);
    group(to_each, "nested uneven shards: pieces are cut from the local extent");
    one(to_each, "i32[5,5] : 2x2:S1,S1 -> 4:S1", ROWS, ROWS);
    one(to_each, "i32[4] : 2x3:S0,S0 -> 6:R", ROWS, ROWS);
    one(to_each, "i32[10] : 2x3:S0,S0 -> 3x2:S0,S0", ROWS, ROWS);
    group(to_each, "fused tensors: each segment is sharded separately");
    one(to_each, "f32[16,4] : 4:S(0;8,4,4) -> 2:S(0;8,4,4)", ROWS, ROWS);
    one(to_each, "f32[17,4] : 4:S(0;8,4,5) -> 3x2:S(0;8,4,5),S(0;8,4,5)", ROWS, ROWS);
    one(to_each, "f32[12,4] : 2x2:S(0;6,3,3),S0 -> 4:S1", ROWS, ROWS);
    group(to_each, "block-cyclic, as ScaLAPACK");
    one(to_each, "f64[37,29] : 2x2:C(0,4),C(1,3) -> 4x1:C(0,8),C(1,5)", COLUMNS, COLUMNS);
    one(to_each, "f64[16,16] : 2x2:C(0,1),C(1,1) -> 4:S0", ROWS, COLUMNS);
}

static void other_meshes(const struct cases *to_each)
{
    group(to_each, "other meshes: disjoint, overlapping, larger, smaller; scatter and gather");
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
        one(to_each, problems[i], ROWS, ROWS);
    group(to_each, "many dims");
    one(to_each, "u8[2,1,3,2,1,2,3,2] : 2x2:S0,S7 -> 4:S6", PADDED, COLUMNS);
    one(to_each, "u8[1,2,1,2,1,2,1,2,1,2,1,2,1,2,1,2] : 2x2x2:S1,S3,S15 -> 2x2x2:S5,S7,R", ROWS,
        PADDED);
}

/* ---- dtypes and arrangements ---- */

static void dtypes_and_strides(const struct cases *to_each)
{
    static const char *const moved[] = {
        "f64",  "f32",        "f16",        "bf16",   "f8e4m3", "f8e5m2", "i64",  "i32",
        "i16",  "i8",         "u64",        "u32",    "u16",    "u8",     "bool", "c64",
        "c128", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0", "f4x2",   "c32"};
    char problem[128];
    group(to_each, "every dtype, in every arrangement of memory");
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i++)
        for (int from = ROWS; from <= PADDED; from++)
            for (int to = ROWS; to <= PADDED; to++) {
                snprintf(problem, sizeof problem, "%s[9,10,11] : 2x2:S0,S1 -> 4:S2", moved[i]);
                one(to_each, problem, (enum arrangement)from, (enum arrangement)to);
            }
    group(to_each, "every dtype with every reduction that it has");
    static const char *const floats[] = {"f64", "f32", "f16", "bf16"};
    static const char *const integers[] = {"i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"};
    static const char *const ops[] = {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"};
    for (int o = 0; o < 8; o++) {
        for (int i = 0; i < 4 && o < 5; i++) {
            snprintf(problem, sizeof problem, "%s[9,10] : 6:P(%s) -> 2x3:S1,R", floats[i], ops[o]);
            one(to_each, problem, PADDED, COLUMNS);
        }
        for (int i = 0; i < 8; i++) {
            snprintf(problem, sizeof problem, "%s[9,10] : 6:P(%s) -> 2x3:S1,R", integers[i],
                     ops[o]);
            one(to_each, problem, COLUMNS, ROWS);
        }
        if (o != 1) {
            snprintf(problem, sizeof problem, "bool[9,10] : 6:P(%s) -> 2x3:S1,R", ops[o]);
            one(to_each, problem, ROWS, ROWS);
        }
        if (o < 2 || o == 4)
            for (int i = 0; i < 2; i++) {
                snprintf(problem, sizeof problem, "%s[9,10] : 6:P(%s) -> 2x3:S1,R",
                         i ? "c64" : "c128", ops[o]);
                one(to_each, problem, ROWS, PADDED);
            }
    }
    group(to_each, "large enough for threads and for stores that bypass the cache");
    one(to_each, "f32[1024,1500] : 4:S0 -> 4:S1", ROWS, ROWS);
    one(to_each, "u8[3000,2003] : 4:S1 -> 3:S0", ROWS, ROWS);
    one(to_each, "u8[5000011] : 4:S0 -> 3:S0", ROWS, ROWS);
    one(to_each, "u8[3,1000003] : 2:R -> 3:S0", ROWS, ROWS);
    one(to_each, "u8[2,1500001] : 2:S0 -> { 0:2,0:1500001 }", ROWS, PADDED);
    one(to_each, "u8[2,1500001] : { :,0:1000001 | :,1000001:1500001 } -> 1:R", ROWS, ROWS);
    one(to_each, "f64[800,900] : 2x2:S0,S1 -> 4:S0", COLUMNS, ROWS);
    one(to_each, "f32[700,1200] : 4:P -> 4:R", ROWS, ROWS);
    one(to_each, "f32[1400,1200] : 4:P -> 2x2:S1,R", COLUMNS, ROWS);
    one(to_each, "f32[1400,2] : 4:P -> 2:R", ROWS, PADDED);
    one(to_each, "f64[1024,1024] : 2x2:C(0,1),C(1,1) -> 4:S1", ROWS, ROWS);
    one(to_each, "f32[512,2048] : 2x2:C(0,64),C(1,64) -> 4x1:C(0,128),C(1,128)", ROWS, ROWS);
}

/* ---- casts ---- */

static void cast_pairs(const struct cases *to_each)
{
    static const char *const numbers[] = {"f64", "f32", "f16", "bf16", "i64", "i32", "i16",
                                          "i8",  "u64", "u32", "u16",  "u8",  "bool"};
    static const char *const some[][2] = {{"f32", "bf16"}, {"bf16", "f32"}, {"f16", "f32"},
                                          {"c64", "c128"}, {"c128", "c64"}, {"i64", "u8"}};
    enum { N = sizeof numbers / sizeof *numbers };
    char problem[128];
    group(to_each, "every number converted to every other");
    for (int i = 0; i < N * N; i++) {
        snprintf(problem, sizeof problem, "%s[9,10] : 2x2:S0,S1 -> %s 4:S1", numbers[i / N],
                 numbers[i % N]);
        one(to_each, problem, (enum arrangement)(i % 3), (enum arrangement)(i / 3 % 3));
    }
    group(to_each, "casts in every arrangement of memory");
    for (int i = 0; i < 6 * 9; i++) {
        snprintf(problem, sizeof problem, "%s[9,10,11] : 2x2:S0,S1 -> %s 4:S2", some[i / 9][0],
                 some[i / 9][1]);
        one(to_each, problem, (enum arrangement)(i % 3), (enum arrangement)(i / 3 % 3));
    }
    group(to_each, "casts with every reduction: terms are combined before the result is converted");
    static const char *const ops[] = {"sum", "avg", "min", "max", "product", "bxor"};
    for (int i = 0; i < 6 * 6; i++) {
        const char *from = some[i / 6][0], *op = ops[i % 6];
        if ((from[0] == 'c' && (i % 6 == 2 || i % 6 == 3)) || (from[0] != 'i' && i % 6 == 5))
            continue;
        for (int to = 0; to < 2; to++) {
            snprintf(problem, sizeof problem, "%s[9,10] : 4:P(%s) -> %s 2x2:S1,%s", from, op,
                     some[i / 6][1], to ? "R" : "S0");
            one(to_each, problem, (enum arrangement)(i % 3), (enum arrangement)((i + to) % 3));
        }
    }
}

static void casts(const struct cases *to_each)
{
    static const char *const problems[] = {
        "f32[10,6] : 4:S0 -> bf16 4 ranks=4-7:S1",
        "bf16[10,6] : 2x2:S0,R -> f32 3 ranks=3-5:S1",
        "f16[10,6] : 4:R -> f32 8:S0",
        "f32[10,6] : 1 ranks=2:R -> f16 4:S0",
        "bf16[10,6] : 6:P -> f32 2 ranks=7,8:R",
        "f32[10,6] : 2x3:P,R -> bf16 6:R",
        "u8[10,6] : 4:P -> f32 4:R",
        "i8[10,6] : 4:P(product) -> f32 { 0:6 | 3:10 }",
        "bool[10,6] : 3:P -> f32 3:R",
        "f32[] : 4:P -> bf16 8:R",
        "f32[0,5] : 4:S0 -> bf16 { 0:0 | :,2:4 }",
        "f32[10,20] : { 0:5 ; 5:10 } -> bf16 { 0:2 | 2:3,0:20; 3:6 | 6:9 | 9:10 }",
        "f32[17,4] : 4:S(0;8,4,5) -> f16 3x2:S(0;8,4,5),S(0;8,4,5)",
        "f32[13] : 3x2:_S(0,2),S(0) -> bf16 6:S0",
        "c64[31,13] : 2x2:C(0,4),C(1,3) -> c128 4x1:C(0,8),C(1,5)",
        "f64[16,16] : 2x2:C(0,1),C(1,1) -> bf16 4:S0",
        "f8e4m3[9,9] : 3:S0 -> 3:S1"};
    cast_pairs(to_each);
    group(to_each, "casts between meshes and boxes of all kinds");
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        one(to_each, problems[i], (enum arrangement)(i % 3), (enum arrangement)(i / 3 % 3));
    group(to_each, "casts that are large enough for threads");
    one(to_each, "f32[1024,1500] : 4:S0 -> bf16 4:S1", ROWS, ROWS);
    one(to_each, "bf16[3000,1003] : 4:S1 -> f32 3:S0", ROWS, ROWS);
    one(to_each, "f32[2000011] : 4:S0 -> bf16 3:S0", ROWS, ROWS);
    one(to_each, "c64[600,500] : 2x2:S0,S1 -> c128 4:S0", COLUMNS, ROWS);
    one(to_each, "f32[700,1200] : 4:P -> bf16 4:R", ROWS, ROWS);
    one(to_each, "bf16[1400,1200] : 4:P -> f32 2x2:S1,R", COLUMNS, ROWS);
    one(to_each, "f64[512,1024] : 2x2:C(0,1),C(1,1) -> f32 4:S1", ROWS, ROWS);
}

const rsd_plan_options case_options = {.struct_nbytes = sizeof case_options, .cast = 1};

void every_case(const struct cases *to_each)
{
    sharded_tensor_reshard(to_each);
    redistribute_one_dim(to_each);
    redistribute_many_dims(to_each);
    strided_and_nested(to_each);
    other_meshes(to_each);
    dtypes_and_strides(to_each);
    casts(to_each);
}
