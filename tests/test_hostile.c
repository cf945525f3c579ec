/* test_hostile.c - huge and contradictory arguments: a status and a message with the values, never a crash or an
 * overflow. */
#include "random.h"
#include "reshard.h"
#include "tap.h"

#include <stdlib.h>

static void absurd_sizes(void)
{
    CASE("huge sizes are refused or planned, without overflow");
    static const struct {
        const char *text;
        rsd_status status;
        const char *message;
    } layouts[] = {
        {"f32[4611686018427387904] @ 2:S0", RSD_ELIMIT, "2^63 bytes or more"},
        {"u8[4611686018427387905] @ 2:S0", RSD_ELIMIT, "exceeds 2^62"},
        {"u8[4294967296,4294967296] @ 2:S0", RSD_ELIMIT, "2^63 bytes or more"},
        {"c128[4294967296,134217728] @ 2:S0", RSD_ELIMIT, "2^63 bytes or more"},
        {"u8[9223372036854775807] @ 2:S0", RSD_ELIMIT, "exceeds 2^62"},
        {"u8[65536,65536,65536,65536] @ 2:S0", RSD_ELIMIT, "2^63 bytes or more"},
        {"f32[4] @ 65536x65536:S0,S0", RSD_ELIMIT, "more than 2^31 - 1 ranks"},
        {"f32[4] @ 2 ranks=2147483647-2147483648:S0", RSD_EINVAL,
         "range of ranks 2147483647-2147483648"},
        {"f32[4] @ 1000000000 ranks=0,2-1000000000:S0", RSD_ELIMIT,
         "ranks= lists 1000000000 ranks"},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        rsd_layout *layout = NULL;
        rsd_status status = rsd_layout_parse(layouts[i].text, &layout);
        CHECK(status == layouts[i].status && strstr(rsd_error(), layouts[i].message), "%s: %s: %s",
              layouts[i].text, rsd_status_name(status), rsd_error());
        rsd_layout_free(layout);
    }
    static const char *const fine[] = {
        "u8[4611686018427387904] : 4:S0 -> 3:S0",
        "u8[4611686018427387904] : 1048576:S0 -> 2:S0",
        "u8[0,4611686018427387904,4611686018427387904] : 4:S1 -> 4:S2",
        "u8[1,4611686018427387904] : { :,0:4611686018427387903 | "
        ":,4611686018427387903:4611686018427387904 } "
        "-> 2:S1",
        "u8[4611686018427387904] : 4:C(0,4611686018427387904) -> 4:S0",
        "u8[4611686018427387904] : 4:_S(0,4) -> 4:S0",
        "u8[10] : 4:_S(0,4611686018427387904) -> 4:C(0,9000000000000000000)",
        "u8[10] : 2147483647:S0 -> 4:S0",
        "u8[1099511627776,1048576] : 1000x1000:S0,S1 -> 1000000:S1",
    };
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) {
        rsd_layout *a, *b;
        rsd_plan *plan;
        rsd_totals totals = {.struct_nbytes = sizeof totals};
        if (!CHECK(rsd_problem_parse(fine[i], &a, &b) == RSD_OK, "%s: %s", fine[i], rsd_error()))
            continue;
        if (CHECK(rsd_plan_new(a, b, NULL, &plan) == RSD_OK, "%s: %s", fine[i], rsd_error())) {
            CHECK(rsd_plan_totals(plan, &totals) == RSD_OK, "%s: %s", fine[i], rsd_error());
            CHECK(totals.nbytes_kept + totals.nbytes_moved == totals.nbytes_total, "%s", fine[i]);
            rsd_plan_free(plan);
        }
        rsd_layout_free(a);
        rsd_layout_free(b);
    }
    CASE("totals that exceed 63 bits are an error");
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_rank_totals part = {.struct_nbytes = sizeof part};
    int64_t nbytes;
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    OK(rsd_problem_parse("u8[4611686018427387904] : 4:S0 -> 4:R", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    FAILS(RSD_ELIMIT, "exceeds 2^63 - 1", rsd_plan_totals(plan, &totals));
    OK(rsd_plan_rank_totals(plan, 0, &part));
    CHECK(part.nbytes_sent == 3 * ((int64_t)1 << 60));
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    OK(rsd_problem_parse("u8[4611686018427387904] : 1:R -> 4:R", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    FAILS(RSD_ELIMIT, "exceeds 2^63 - 1", rsd_plan_rank_totals(plan, 0, &part));
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    OK(rsd_problem_parse("u8[4611686018427387904] : { : } -> { : ; : }", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    FAILS(RSD_ELIMIT, "exceeds 2^63 - 1", rsd_plan_nbytes(plan, 0, 0, &nbytes));
    FAILS(RSD_ELIMIT, "exceeds 2^63 - 1", rsd_plan_rank_totals(plan, 0, &part));
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    CASE("an empty tensor with huge extents has totals of 0");
    OK(rsd_problem_parse("u8[4611686018427387904,4611686018427387904,0] : 2:R -> 2:R", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    OK(rsd_plan_nbytes(plan, 0, 0, &nbytes));
    CHECK(nbytes == 0);
    OK(rsd_plan_totals(plan, &totals));
    OK(rsd_plan_rank_totals(plan, 0, &part));
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    CASE("more spans than the limit are an error");
    OK(rsd_problem_parse("u8[4611686018427387904] : 2147483647:S0 -> 2:S0", &a, &b));
    FAILS(RSD_ELIMIT, "cut into about 2147483647 spans", rsd_plan_new(a, b, NULL, &plan));
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static void wrong_arguments(void)
{
    const int64_t shape[2] = {4, 4}, negative[2] = {4, -1}, counts[2] = {2, 2}, zero[1] = {0};
    const int32_t twice[4] = {0, 1, 1, 2}, below[4] = {0, -1, 2, 3};
    const char *const names[2] = {"a", "a"}, *const bad[2] = {"1a", "b"},
                      *const space[2] = {"a b", "c"};
    rsd_mesh *mesh = NULL;
    rsd_layout *layout = NULL;
    rsd_pool *pool = NULL;
    CASE("invalid arguments");
    FAILS(RSD_EINVAL, "mesh axes 0", rsd_mesh_new(0, counts, NULL, NULL, &mesh));
    FAILS(RSD_EINVAL, "mesh axes 17", rsd_mesh_new(17, counts, NULL, NULL, &mesh));
    FAILS(RSD_EINVAL, "0 ranks", rsd_mesh_new(1, zero, NULL, NULL, &mesh));
    FAILS(RSD_EINVAL, "mesh has rank 1 twice", rsd_mesh_new(2, counts, NULL, twice, &mesh));
    FAILS(RSD_EINVAL, "rank -1", rsd_mesh_new(2, counts, NULL, below, &mesh));
    FAILS(RSD_EINVAL, "the name 'a'", rsd_mesh_new(2, counts, names, NULL, &mesh));
    FAILS(RSD_EINVAL, "'1a'", rsd_mesh_new(2, counts, bad, NULL, &mesh));
    FAILS(RSD_EINVAL, "'a b'", rsd_mesh_new(2, counts, space, NULL, &mesh));
    CHECK(mesh == NULL);
    OK(rsd_mesh_new(2, counts, NULL, NULL, &mesh));
    const rsd_placement replicate[2] = {{.kind = RSD_REPLICATE}, {.kind = RSD_REPLICATE}};
    FAILS(RSD_EINVAL, "invalid dtype 0",
          rsd_layout_new((rsd_dtype)0, 2, shape, mesh, replicate, &layout));
    FAILS(RSD_EINVAL, "number of dims 17",
          rsd_layout_new(RSD_F32, 17, shape, mesh, replicate, &layout));
    FAILS(RSD_EINVAL, "number of dims -1",
          rsd_layout_new(RSD_F32, -1, shape, mesh, replicate, &layout));
    FAILS(RSD_EINVAL, "extent -1", rsd_layout_new(RSD_F32, 2, negative, mesh, replicate, &layout));
    FAILS(RSD_EINVAL, "number of dims -1",
          rsd_layout_new_by_dim(RSD_F32, -1, shape, mesh, twice, twice, &layout));
    const rsd_placement segmented[2] = {{.kind = RSD_SEGMENTED}, {.kind = RSD_REPLICATE}};
    FAILS(RSD_EINVAL, "has no segments",
          rsd_layout_new(RSD_F32, 2, shape, mesh, segmented, &layout));
    const rsd_placement strided[2] = {{.kind = RSD_STRIDED, .factor = -3}, {.kind = RSD_REPLICATE}};
    FAILS(RSD_EINVAL, "split factor is -3",
          rsd_layout_new(RSD_F32, 2, shape, mesh, strided, &layout));
    FAILS(RSD_EINVAL, "number of boxes -5",
          rsd_layout_new_boxes(RSD_F32, 2, shape, -5, twice, shape, shape, &layout));
    const int64_t far_lo[2] = {INT64_MAX, 0}, far_len[2] = {INT64_MAX, 1};
    FAILS(RSD_EINVAL, "lies outside of the tensor",
          rsd_layout_new_boxes(RSD_F32, 2, shape, 1, twice, far_lo, far_len, &layout));
    CHECK(layout == NULL);
    FAILS(RSD_EINVAL, "number of threads 0", rsd_pool_new(0, &pool));
    FAILS(RSD_EINVAL, "number of threads 100000", rsd_pool_new(100000, &pool));
    rsd_mesh_free(mesh);
    OK(rsd_layout_parse("f32[4] @ 2:S0", &layout));
    rsd_array array;
    FAILS(RSD_EINVAL, "array 2", rsd_layout_array(layout, 2, &array));
    FAILS(RSD_EINVAL, "array -1", rsd_layout_array(layout, -1, &array));
    rsd_placement placement;
    FAILS(RSD_EINVAL, "axis 1", rsd_layout_placement(layout, 1, &placement));
    rsd_layout_free(layout);
    rsd_layout_free(NULL);
    rsd_mesh_free(NULL);
    rsd_plan_free(NULL);
    rsd_cursor_free(NULL);
    rsd_exec_free(NULL);
    rsd_pool_free(NULL);
    rsd_free(NULL);
    CHECK(strcmp(rsd_status_name((rsd_status)77), "unknown status") == 0);
}

/* Nested boxes: no two groups have the same holders, and all groups together have too many. */
static void nested_boxes(void)
{
    CASE("boxes that overlap in too many ways are refused quickly");
    enum { N = 5000 };
    static int32_t ranks[N];
    static int64_t lo[N], len[N];
    const int64_t shape = 2 * N;
    rsd_layout *layout;
    rsd_coverage check = {.struct_nbytes = sizeof check};
    for (int64_t i = 0; i < N; i++) {
        ranks[i] = (int32_t)i;
        lo[i] = i;
        len[i] = 2 * (N - i);
    }
    OK(rsd_layout_new_boxes(RSD_U8, 1, &shape, N, ranks, lo, len, &layout));
    FAILS(RSD_ELIMIT, "overlap in too many ways", rsd_layout_coverage(layout, &check));
    rsd_layout_free(layout);
    FAILS(RSD_EINVAL, "is in more than one box",
          rsd_layout_new_enumerable(RSD_U8, 1, &shape, N, ranks, lo, len, &layout));
}

/* High ranks cost no memory. */
static void far_ranks(void)
{
    CASE("the highest possible rank");
    rsd_layout *a, *b;
    rsd_plan *plan;
    char *text;
    OK(rsd_problem_parse("u8[4] : 2 ranks=2147483647,0 : S0 -> 2:S0", &a, &b));
    OK(rsd_problem_print(a, b, &text));
    CHECK(strstr(text, "ranks=2147483647,0"), "%s", text);
    rsd_free(text);
    OK(rsd_plan_new(a, b, NULL, &plan));
    OK(rsd_plan_explain(plan, RSD_EXPLAIN_RANKS | RSD_EXPLAIN_PAIRS, &text));
    CHECK(strstr(text, "rank 2147483647"), "%s", text);
    rsd_free(text);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* A valid problem with some bytes changed must parse or fail, and a plan of it likewise. */
static void mangled_texts(int count)
{
    static const char alphabet[] = "0123456789SRPBC_[]{}():;,|.-> xdtf32ranks=";
    struct random r = {1};
    int planned = 0;
    CASE("%d problems with random changes", count);
    for (int i = 0; i < count; i++) {
        char a[2048], b[2048], problem[4400];
        struct random_tensor t = random_tensor(&r, "f32");
        random_side(&r, &t, i % 3 ? NULL : "sum", a, sizeof a);
        random_side(&r, &t, NULL, b, sizeof b);
        snprintf(problem, sizeof problem, "%s : %s -> %s", t.text, a, b);
        for (int64_t n = 1 + random_below(&r, 3); n > 0; n--)
            problem[random_below(&r, (int64_t)strlen(problem))] =
                alphabet[random_below(&r, (int64_t)sizeof alphabet - 1)];
        rsd_layout *src, *dst;
        rsd_plan *plan;
        if (rsd_problem_parse(problem, &src, &dst)) {
            CHECK(strstr(rsd_error(), "column ") != NULL, "%s: %s", problem, rsd_error());
            continue;
        }
        if (!rsd_plan_new(src, dst, NULL, &plan)) {
            planned++;
            rsd_plan_free(plan);
        }
        rsd_layout_free(src);
        rsd_layout_free(dst);
    }
    CHECK(planned > count / 100, "only %d could be planned", planned);
}

int main(int argc, char **argv)
{
    absurd_sizes();
    wrong_arguments();
    nested_boxes();
    far_ranks();
    mangled_texts(argc > 1 ? atoi(argv[1]) : 20000);
    return tap_end();
}
