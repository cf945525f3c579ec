/* test_plan.c - plans: totals, replicas, digests, inverses, backward plans, and errors. */
#include "plans.h"

static void known_problems(void)
{
    CASE("known plans move the least bytes");
    static const struct {
        const char *problem;
        int64_t pieces, messages, moved, stages;
    } known[] = {
        {"f32[8,8] : 4:S0 -> 4:S0", 4, 0, 0, 1},
        {"f32[8,8] : 4:R -> 4:S0", 4, 0, 0, 1},
        {"f32[8,8] : 4:S0 -> 4:R", 16, 12, 768, 1},
        {"f32[8,8] : 4:S0 -> 4:S1", 16, 12, 192, 1},
        {"f32[8,8] : 4:P -> 4:S0", 16, 12, 768, 1},
        {"f32[8,8] : 4:P -> 4:R", 28, 12, 1536, 2},
        {"f32[8,8] : 2x4:P,R -> 2x4:R,R", 16 + 56, 8 + 48, 256 + 7 * 256, 2},
        {"f32[8,8] : 4:S0 -> 1 ranks=2:R", 4, 3, 192, 1},
        {"f32[8,8] : 1:R -> 4:S0", 4, 3, 192, 1},
        {"f32[8,8] : 2:S0 -> 2 ranks=2,3:S0", 2, 2, 256, 1},
        {"f32[0,8] : 4:S1 -> 4:R", 0, 0, 0, 0},
        {"f32[16384,16384] : 128x128:S0,S1 -> 16384:S0", 2097152, 2080768, 1065353216, 1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        rsd_plan *plan;
        if (!make(known[i].problem, NULL, &plan))
            continue;
        rsd_totals t = totals_of(plan);
        CHECK(t.npieces == known[i].pieces && t.nmessages == known[i].messages &&
                  t.nbytes_moved == known[i].moved && t.nstages == known[i].stages,
              "%s: %lld pieces, %lld messages, %lld bytes, %lld stages", known[i].problem,
              (long long)t.npieces, (long long)t.nmessages, (long long)t.nbytes_moved,
              (long long)t.nstages);
        CHECK(t.nbytes_least == t.nbytes_moved, "%s", known[i].problem);
        rsd_plan_free(plan);
    }
}

/* ---- replicas ---- */

static void check_messages(const char *problem, int32_t first, int32_t last, int64_t most_messages)
{
    rsd_plan *plan;
    if (!make(problem, NULL, &plan))
        return;
    for (int32_t rank = first; rank <= last; rank++) {
        rsd_rank_totals t = part_of(plan, rank);
        CHECK(t.nmessages_sent <= most_messages && t.nmessages_sent >= most_messages - 1,
              "%s: rank %d sends %lld messages", problem, (int)rank, (long long)t.nmessages_sent);
    }
    rsd_plan_free(plan);
}

static void replicas(void)
{
    CASE("holders of a replica send about as many messages each");
    check_messages("f32[8,8] : 2x4:R,S0 -> 8:R", 0, 7, 3);
    check_messages("f32[8,8] : 2x4:S0,R -> 8:R", 0, 7, 1);
    check_messages("f32[8,8] : 4:R -> 8:S0", 0, 3, 1);
    check_messages("f32[8,8] : 2x4:R,S0 -> 2x2 ranks=8-11:R,S0", 0, 7, 1);
    check_messages("f32[16,8] : 4:R -> 4x2 ranks=8-15:S0,S1", 0, 3, 2);
    check_messages("f32[8,8] : { : | : | : } -> 6 ranks=3-8:S0", 0, 2, 2);
    CASE("replicas of a mesh send to their own group");
    rsd_plan *plan;
    if (make("f32[8,8] : dp=2,tp=4:R,S0 -> dp=2,tp=4:R,S1", NULL, &plan)) {
        int64_t nbytes;
        for (int32_t from = 0; from < 8; from++)
            for (int32_t to = 0; to < 8; to++) {
                OK(rsd_plan_nbytes(plan, from, to, &nbytes));
                CHECK((nbytes > 0) == (from / 4 == to / 4), "%d -> %d", (int)from, (int)to);
            }
        rsd_plan_free(plan);
    }
}

/* ---- digests, inverses, backward ---- */

static void digest_of(const char *problem, const rsd_plan_options *options,
                      char digest[RSD_DIGEST_NCHARS])
{
    rsd_plan *plan;
    digest[0] = '\0';
    if (make(problem, options, &plan)) {
        rsd_plan_digest(plan, digest);
        CHECK(strlen(digest) == 32);
        rsd_plan_free(plan);
    }
}

static void digests(void)
{
    static const char *const different[] = {"f32[8,8] : 4:S0 -> 4:S1",
                                            "f32[8,8] : 4:S1 -> 4:S0",
                                            "f64[8,8] : 4:S0 -> 4:S1",
                                            "f32[8,9] : 4:S0 -> 4:S1",
                                            "f32[8,8] : 4:B0 -> 4:S1",
                                            "f32[8,8] : 4 ranks=1-4:S0 -> 4:S1",
                                            "f32[8,8] : 4 ranks=0,2,1,3:S0 -> 4:S1",
                                            "f32[8,8] : 2x2:S0,S0 -> 4:S1",
                                            "f32[8,8] : 2x2:[1.0, -] -> 4:S1",
                                            "f32[8,8] : { 0:4 | 4:8 } -> 4:S1",
                                            "f32[8,8] : { 0:4 | | 4:8 } -> 4:S1",
                                            "f32[8,8] : 4:C(0,1) -> 4:S1",
                                            "f32[8,8] : 4:C(0,2) -> 4:S1",
                                            "f32[8,8] : 4:P(max) -> 4:S1",
                                            "f32[8,8] : 4:P(sum) -> 4:S1",
                                            "f32[8,8] : 4:S(0;4,4) -> 4:S1",
                                            "f32[8,8] : 4:S(0;2,6) -> 4:S1"};
    enum { N = sizeof different / sizeof *different };
    char digest[N][RSD_DIGEST_NCHARS], again[RSD_DIGEST_NCHARS];
    CASE("the same problem has the same digest, another problem another");
    for (int i = 0; i < N; i++) {
        digest_of(different[i], NULL, digest[i]);
        digest_of(different[i], NULL, again);
        CHECK(strcmp(digest[i], again) == 0);
        for (int j = 0; j < i; j++)
            CHECK(strcmp(digest[i], digest[j]) != 0, "%s and %s", different[i], different[j]);
    }
    digest_of("f32 [8,8]: dp=4 : S(-2) -> 4 ranks=0-3 : S1", NULL, again);
    CHECK(strcmp(digest[0], again) == 0, "names of axes and spelling are not part of it");
    const int32_t nodes_of[] = {0, 0, 1, 1};
    rsd_plan_options options = {sizeof options, 4, nodes_of, 1};
    digest_of(different[0], &options, again);
    CHECK(strcmp(digest[0], again) != 0, "options are part of it");
    CHECK(strcmp(digest[0], "8f99f2cc7a857b01d505d235cba7c883") == 0, "it is %s", digest[0]);
}

static bool prints(const rsd_plan *plan, const char *text)
{
    char *printed;
    if (!OK(rsd_problem_print(rsd_plan_src(plan), rsd_plan_dst(plan), &printed)))
        return false;
    bool same = CHECK(strcmp(printed, text) == 0, "'%s' should be '%s'", printed, text);
    rsd_free(printed);
    return same;
}

static void inverses(void)
{
    rsd_plan *plan, *inverse, *backward;
    CASE("a plan without reductions has an inverse");
    if (make("f32[8,8] : 4:S0 -> 2x2:S1,R", NULL, &plan)) {
        OK(rsd_plan_inverse(plan, &inverse));
        prints(inverse, "f32[8,8] : 2x2 : S(1),R -> 4 : S(0)");
        rsd_plan_free(inverse);
        rsd_plan_free(plan);
    }
    if (make("f32[8,8] : 4:P -> 4:R", NULL, &plan)) {
        FAILS(RSD_EINVAL, "has no inverse", rsd_plan_inverse(plan, &inverse));
        rsd_plan_free(plan);
    }
    CASE("the backward plan: from the gradient to the source, with replicate in place of partial");
    if (make("f32[8,8] : 2x2:P,S0 -> 2x2:R,S1", NULL, &plan)) {
        rsd_layout *partial, *replicated, *other;
        OK(rsd_layout_parse("f32[8,8] @ 2x2:P,S1", &partial));
        OK(rsd_layout_parse("f32[8,8] @ 2x2:R,S1", &replicated));
        OK(rsd_layout_parse("f32[8,9] @ 2x2:R,S1", &other));
        OK(rsd_plan_backward(plan, partial, &backward));
        prints(backward, "f32[8,8] : 2x2 : P(sum),S(1) -> 2x2 : R,S(0)");
        rsd_plan_free(backward);
        OK(rsd_plan_backward(plan, replicated, &backward));
        prints(backward, "f32[8,8] : 2x2 : R,S(1) -> 2x2 : R,S(0)");
        rsd_plan_free(backward);
        FAILS(RSD_EMISMATCH, "shape differs in dim 1", rsd_plan_backward(plan, other, &backward));
        rsd_layout_free(partial);
        rsd_layout_free(replicated);
        rsd_layout_free(other);
        rsd_plan_free(plan);
    }
    const int32_t eight[8] = {0, 0, 0, 0, 1, 1, 1, 1};
    rsd_plan_options options = {sizeof options, 8, eight, 0};
    if (make("f32[8,8] : 4:S0 -> 4:S1", &options, &plan)) {
        rsd_layout *larger; /* the node map lists all ranks of this one too */
        OK(rsd_layout_parse("f32[8,8] @ 8:S0", &larger));
        OK(rsd_plan_backward(plan, larger, &backward));
        rsd_plan_free(backward);
        rsd_layout_free(larger);
        rsd_plan_free(plan);
    }
    if (make("f32[8,8] : 4:R -> 4:S0", NULL, &plan)) {
        /* a replicated gradient does not move */
        OK(rsd_plan_backward(plan, rsd_plan_src(plan), &backward));
        CHECK(totals_of(backward).nbytes_moved == 0);
        rsd_plan_free(backward);
        rsd_plan_free(plan);
    }
}

/* ---- casts ---- */

static void check_sent(const char *problem, int64_t total, int64_t kept, int64_t moved,
                       int64_t least)
{
    const rsd_plan_options options = {.struct_nbytes = sizeof options, .cast = 1};
    rsd_plan *plan;
    if (!make(problem, &options, &plan))
        return;
    rsd_totals t = totals_of(plan);
    CHECK(t.nbytes_total == total && t.nbytes_kept == kept && t.nbytes_moved == moved &&
              t.nbytes_least == least,
          "%s: total %lld, kept %lld, moved %lld, least %lld", problem, (long long)t.nbytes_total,
          (long long)t.nbytes_kept, (long long)t.nbytes_moved, (long long)t.nbytes_least);
    rsd_plan_free(plan);
}

static void casts(void)
{
    const rsd_plan_options options = {.struct_nbytes = sizeof options, .cast = 1};
    rsd_plan *plan, *other;
    rsd_layout *gradient, *a, *b;
    char digest[RSD_DIGEST_NCHARS], again[RSD_DIGEST_NCHARS], *text;
    CASE("elements that are converted are sent in the narrower dtype");
    check_sent("f32[8,8] : 2:S0 -> bf16 2:S1", 128, 64, 64, 64);
    check_sent("bf16[8,8] : 2:S0 -> f32 2:S1", 256, 64, 64, 64);
    check_sent("bf16[8,8] : 2:S0 -> f16 2:S1", 128, 64, 64, 64);
    check_sent("f32[8,8] : { 0:4 | 4:8 } -> bf16 2:S1", 128, 64, 64, 64);
    CASE("partial values are sent in the dtype of the source, and results in that of the "
         "destination");
    check_sent("f32[8,8] : 2:P -> bf16 2:S0", 128, 256, 256, 256);
    check_sent("f32[8,8] : 2:P -> bf16 2:R", 256, 256, 256 + 128, 256 + 128);
    check_sent("bf16[8,8] : 2:P -> f32 2:R", 512, 128, 128 + 256, 128 + 128);
    CASE("a cast is part of the digest, of the inverse and of the backward plan");
    digest_of("f32[8,8] : 4:S0 -> 4:S1", NULL, digest);
    digest_of("f32[8,8] : 4:S0 -> 4:S1", &options, again);
    CHECK(strcmp(digest, again) == 0, "the option alone changes nothing");
    digest_of("f32[8,8] : 4:S0 -> bf16 4:S1", &options, again);
    CHECK(strcmp(digest, again) != 0);
    if (make("f32[8,8] : 4:S0 -> bf16 4:S1", &options, &plan)) {
        prints(plan, "f32[8,8] : 4 : S(0) -> bf16 4 : S(1)");
        OK(rsd_plan_inverse(plan, &other));
        prints(other, "bf16[8,8] : 4 : S(1) -> f32 4 : S(0)");
        rsd_plan_free(other);
        OK(rsd_layout_parse("bf16[8,8] @ 4:P", &gradient));
        OK(rsd_plan_backward(plan, gradient, &other));
        prints(other, "bf16[8,8] : 4 : P(sum) -> f32 4 : S(0)");
        rsd_plan_free(other);
        rsd_layout_free(gradient);
        OK(rsd_plan_explain(plan, RSD_EXPLAIN_JSON, &text));
        CHECK(strstr(text, "\"dtype\": \"f32\", \"shape\": [8, 8], \"dst_dtype\": \"bf16\"") !=
                  NULL,
              "%s", text);
        rsd_free(text);
        OK(rsd_plan_explain(plan, 0, &text));
        CHECK(strstr(text, "\ncast     f32 to bf16\n") != NULL, "%s", text);
        rsd_free(text);
        rsd_plan_free(plan);
    }
    CASE("casts that do not exist, and those that were not asked for, are refused");
    OK(rsd_problem_parse("f8e4m3[8] : 2:S0 -> bf16 2:R", &a, &b));
    FAILS(RSD_EUNSUPPORTED, "f8e4m3 cannot be converted to bf16",
          rsd_plan_new(a, b, &options, &plan));
    FAILS(RSD_EMISMATCH, "source f8e4m3, destination bf16", rsd_plan_new(a, b, NULL, &plan));
    rsd_layout_free(a);
    rsd_layout_free(b);
    OK(rsd_problem_parse("c64[8] : 2:S0 -> f32 2:R", &a, &b));
    FAILS(RSD_EUNSUPPORTED, "c64 cannot be converted to f32", rsd_plan_new(a, b, &options, &plan));
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* ---- what cannot be planned ---- */

static void refuses(const char *problem, rsd_status expected, const char *message)
{
    rsd_layout *a, *b;
    rsd_plan *plan = NULL;
    if (!CHECK(rsd_problem_parse(problem, &a, &b) == RSD_OK, "%s: %s", problem, rsd_error()))
        return;
    rsd_status status = rsd_plan_new(a, b, NULL, &plan);
    CHECK(status == expected && strstr(rsd_error(), message), "%s: %s %s", problem,
          rsd_status_name(status), status ? rsd_error() : "");
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static void refusals(void)
{
    CASE("errors of rsd_plan_new have the values");
    refuses("f32[8,8] : { 0:4 | 5:8 } -> 2:S0", RSD_EMISMATCH,
            "the source does not hold [4:5, 0:8]");
    refuses("f32[8,8] : { 0:4,0:7 | 4:8 } -> { 0:4 }", RSD_EMISMATCH, "does not hold [0:4, 7:8]");
    refuses("f32[8,8] : { } -> 2:S0", RSD_EMISMATCH, "does not hold [0:8, 0:8]");
    refuses("f32[8,8] : 4:R -> 4:P", RSD_EINVAL, "P(sum) on mesh axis 0");
    refuses("f32[8,8] : 4:S0 -> 4:P", RSD_EINVAL, "P(sum) on mesh axis 0");
    refuses("f32[8,8] : 4:P(max) -> 4:P(min)", RSD_EINVAL, "P(min) on mesh axis 0");
    refuses("f32[8,8] : 2x2:S0,R -> 2x2:R,P", RSD_EINVAL, "P(sum) on mesh axis 1");
    refuses("f32[8,8] : 2x2:S0,P(product) -> 2x2:R,P", RSD_EINVAL, "P(sum) on mesh axis 1");
    refuses("f32[8,8] : 4:P(band) -> 4:R", RSD_EUNSUPPORTED, "dtype f32 has no reduction 'band'");
    refuses("c64[8,8] : 4:P(max) -> 4:R", RSD_EUNSUPPORTED, "dtype c64 has no reduction 'max'");
    refuses("f8e4m3[8,8] : 4:P -> 4:R", RSD_EUNSUPPORTED, "dtype f8e4m3 has no reduction");
    refuses("bool[8,8] : 4:P(avg) -> 4:R", RSD_EUNSUPPORTED, "dtype bool has no reduction 'avg'");
    refuses("u8[1099511627776] : 4:C(0,1) -> 4:S0", RSD_ELIMIT, "dim 0 is cut into about");
    rsd_layout *a, *b;
    rsd_plan *plan;
    OK(rsd_layout_parse("f32[8,8] @ 4:S0", &a));
    OK(rsd_layout_parse("f64[8,8] @ 4:S0", &b));
    FAILS(RSD_EMISMATCH, "dtype differs: source f32, destination f64",
          rsd_plan_new(a, b, NULL, &plan));
    rsd_layout_free(b);
    OK(rsd_layout_parse("f32[8] @ 4:S0", &b));
    FAILS(RSD_EMISMATCH, "number of dims differs: source 2", rsd_plan_new(a, b, NULL, &plan));
    rsd_layout_free(b);
    OK(rsd_layout_parse("f32[8,7] @ 4:S0", &b));
    FAILS(RSD_EMISMATCH, "shape differs in dim 1: source 8, destination 7",
          rsd_plan_new(a, b, NULL, &plan));
    rsd_layout_free(b);
    rsd_layout_free(a);
}

static void explanations(void)
{
    rsd_plan *plan;
    char *text;
    CASE("the description of a plan, as text and JSON");
    if (!make("f32[4096,4096] : 2x4:S0,S1 -> 8:S1", NULL, &plan))
        return;
    OK(rsd_plan_explain(plan, RSD_EXPLAIN_JSON | RSD_EXPLAIN_PAIRS | RSD_EXPLAIN_RANKS, &text));
    CHECK(strstr(text, "{\"problem\": \"f32[4096,4096] : 2x4 : S(0),S(1) -> 8 : S(1)\"") == text);
    CHECK(strstr(text, "\"pieces\": 16, \"messages\": 14,") != NULL);
    CHECK(strstr(text, "\"bytes\": {\"total\": 67108864, \"kept\": 8388608, \"moved\": 58720256, "
                       "\"lower_bound\": 58720256}") != NULL);
    CHECK(strstr(text, "{\"from\": 4, \"to\": 0, \"bytes\": 4194304}") != NULL);
    CHECK(
        strstr(text, "{\"rank\": 7, \"sent\": 4194304, \"received\": 4194304, \"kept\": 4194304") !=
        NULL);
    rsd_free(text);
    FAILS(RSD_EINVAL, "flags", rsd_plan_explain(plan, 64, &text));
    OK(rsd_plan_explain(plan, 0, &text));
    CHECK(strstr(text, "moved    58.7 MB in 14 messages;") != NULL, "%s", text);
    rsd_free(text);
    rsd_plan_free(plan);
}

/* Callers of other versions have larger or smaller structs. */
static void structs_that_grow(void)
{
    struct {
        rsd_totals ours;
        int64_t more[4];
    } newer = {.ours = {.struct_nbytes = sizeof newer}, .more = {7, 7, 7, 7}};
    struct {
        size_t struct_nbytes;
        int64_t npieces, nmessages, beyond;
    } older = {.struct_nbytes = 3 * sizeof(int64_t), .beyond = 7};
    struct {
        rsd_plan_options ours;
        int64_t more;
    } options = {.ours = {.struct_nbytes = sizeof options}};
    rsd_layout *a, *b;
    rsd_plan *plan;
    CASE("structs of other versions of the library");
    OK(rsd_problem_parse("f32[8,8] : 4:S0 -> 4:S1", &a, &b));
    OK(rsd_plan_new(a, b, &options.ours, &plan));
    OK(rsd_plan_totals(plan, &newer.ours));
    CHECK(newer.ours.npieces == 16 && newer.ours.struct_nbytes == sizeof newer &&
          newer.more[0] == 7);
    OK(rsd_plan_totals(plan, (rsd_totals *)(void *)&older));
    CHECK(older.npieces == 16 && older.nmessages == 12 && older.beyond == 7);
    rsd_plan_free(plan);
    options.more = 1;
    FAILS(RSD_EUNSUPPORTED, "sets options that library version",
          rsd_plan_new(a, b, &options.ours, &plan));
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static void reductions(void)
{
    rsd_plan *plan;
    rsd_reduce reduce;
    int64_t nterms, divisor;
    CASE("how partial values are combined");
    if (make("f32[8] : 2x3:P(sum),P(avg) -> 6:R", NULL, &plan)) {
        rsd_plan_reduction(plan, &reduce, &nterms, &divisor);
        CHECK(reduce == RSD_REDUCE_SUM && nterms == 6 && divisor == 3);
        rsd_plan_free(plan);
    }
    if (make("f32[8] : 2x3:P(max),P(max) -> 2x3:P(max),R", NULL, &plan)) {
        rsd_plan_reduction(plan, &reduce, &nterms, &divisor);
        CHECK(reduce == RSD_REDUCE_MAX && nterms == 3 && divisor == 1);
        rsd_plan_free(plan);
    }
    if (make("f32[8] : 2:S0 -> 2:R", NULL, &plan)) {
        rsd_plan_reduction(plan, &reduce, &nterms, &divisor);
        CHECK(nterms == 1 && divisor == 1);
        rsd_plan_free(plan);
    }
}

static void wrong_walks(void)
{
    rsd_plan *plan;
    rsd_cursor *cursor;
    const rsd_piece *piece;
    CASE("walks of ranks without pieces are empty, and cursors may outlive their plan");
    if (!make("f32[8,8] : 4:S0 -> 4:S1", NULL, &plan))
        return;
    OK(rsd_plan_walk(plan, 17, RSD_RECEIVES, &cursor));
    OK(rsd_cursor_next(cursor, &piece));
    CHECK(!piece);
    OK(rsd_cursor_next(cursor, &piece));
    CHECK(!piece);
    rsd_cursor_free(cursor);
    FAILS(RSD_EINVAL, "rank -2", rsd_plan_walk(plan, -2, RSD_RECEIVES, &cursor));
    FAILS(RSD_EINVAL, "side", rsd_plan_walk(plan, 0, (rsd_side)9, &cursor));
    OK(rsd_plan_walk(plan, 1, RSD_SENDS, &cursor));
    rsd_plan_free(plan);
    int n = 0;
    while (OK(rsd_cursor_next(cursor, &piece)) && piece)
        n++;
    CHECK(n == 4);
    rsd_cursor_free(cursor);
}

/* The loop that the header shows, with a rank that exists and with an invalid one. */
static void header_loop(void)
{
    static const struct {
        int32_t rank;
        rsd_status status;
        int npieces;
    } walks[] = {{1, RSD_OK, 4}, {-2, RSD_EINVAL, 0}};
    rsd_plan *plan = NULL;
    CASE("the loop over pieces that the header shows, also where the walk cannot start");
    if (!make("f32[8,8] : 4:S0 -> 4:S1", NULL, &plan))
        return;
    for (size_t i = 0; i < sizeof walks / sizeof *walks; i++) {
        int n = 0;
        rsd_cursor *cursor = NULL;
        const rsd_piece *piece = NULL;
        rsd_status status = rsd_plan_walk(plan, walks[i].rank, RSD_RECEIVES, &cursor);
        while (!status && !(status = rsd_cursor_next(cursor, &piece)) && piece)
            n++;
        rsd_cursor_free(cursor);
        CHECK(status == walks[i].status && n == walks[i].npieces, "rank %d: %s, %d pieces",
              (int)walks[i].rank, rsd_status_name(status), n);
    }
    rsd_plan_free(plan);
}

/* A partial axis that can stay on its own number does, also if an axis before it would match. */
static void kept_axes(void)
{
    CASE("partial axes that stay, stay on their own axis");
    rsd_plan *plan;
    if (!make("f32[8] : 2x2x2 : R,P,P -> 2x2x2 : P,P,R", NULL, &plan))
        return;
    rsd_totals totals = totals_of(plan);
    CHECK(totals.nbytes_moved == totals.nbytes_least && totals.nbytes_kept == 4 * 32,
          "kept %lld, moved %lld", (long long)totals.nbytes_kept, (long long)totals.nbytes_moved);
    rsd_plan_free(plan);
}

int main(void)
{
    kept_axes();
    known_problems();
    replicas();
    digests();
    inverses();
    casts();
    refusals();
    explanations();
    structs_that_grow();
    reductions();
    wrong_walks();
    header_loop();
    return tap_end();
}
