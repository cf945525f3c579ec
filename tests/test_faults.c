/* test_faults.c - every allocation fails once: the status is ENOMEM, nothing leaks, no output is written.
 *
 * alloc_faults.h lets them fail.
 */
#include "alloc_faults.h"
#include "reshard.h"
#include "tap.h"

#include <stdlib.h>

/* Calls everything that allocates, for one problem. */
static rsd_status use_all(const char *problem, const int32_t *node_of)
{
    rsd_layout *a = NULL, *b = NULL;
    rsd_plan *plan = NULL;
    rsd_exec *exec = NULL;
    rsd_cursor *cursor = NULL;
    rsd_pool *pool = NULL;
    rsd_coverage check = {.struct_nbytes = sizeof check};
    rsd_shard *boxes;
    int64_t nboxes;
    char *text;
    static char arrays[64][8192];
    const void *src[64];
    void *dst[64];
    const rsd_piece *piece;
    for (int i = 0; i < 64; i++) {
        src[i] = arrays[i % 32];
        dst[i] = arrays[32 + i % 32];
    }
    rsd_plan_options options = {sizeof options, 64, node_of, 1};
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    rsd_rank_totals part = {.struct_nbytes = sizeof part};
    rsd_status status = rsd_problem_parse(problem, &a, &b);
    if (!status)
        status = rsd_layout_coverage(a, &check);
    if (!status && !(status = rsd_layout_boxes(b, 1, &boxes, &nboxes)))
        rsd_free(boxes);
    if (!status)
        status = rsd_plan_new(a, b, &options, &plan);
    if (!status)
        status = rsd_plan_totals(plan, &totals);
    if (!status)
        status = rsd_plan_rank_totals(plan, 1, &part);
    if (!status && !(status = rsd_plan_explain(plan, 7, &text)))
        rsd_free(text);
    for (int side = RSD_RECEIVES; side <= RSD_SENDS && !status; side++) {
        status = rsd_plan_walk(plan, RSD_EVERY_RANK, (rsd_side)side, &cursor);
        while (!status && !(status = rsd_cursor_next(cursor, &piece)) && piece)
            continue;
        rsd_cursor_free(cursor);
        cursor = NULL;
    }
    if (!status)
        status = rsd_pool_new(2, &pool);
    if (!status)
        status = rsd_bind_threads(plan, pool, &exec);
    if (!status)
        status = rsd_exec_run(exec, src, dst);
    rsd_exec_free(exec);
    rsd_pool_free(pool);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    return status;
}

int main(void)
{
    static const int32_t nodes[64] = {0, 0, 1, 1, 2, 2, 3, 3, 0, 1};
    static const struct {
        const char *problem;
        const int32_t *node_of;
    } cases[] = {
        {"f32[12,9] : 4:S0 -> 2x2:S1,R", NULL},
        {"f32[12,9] : dp=2,tp=2 ranks=3,1,0,2 : C(0,2),S(1;3,6) -> 4:[-, 0]", NULL},
        {"f32[12,9] : { 0:5 | 4:12,0:5 | 4:12,3:9; 11:12 } -> { 0:7 | 0:7 | 6:12 }", NULL},
        {"f32[12,9] : 2x4:S0,R -> 8:R", nodes},
        {"f32[12,9] : 4:P -> 2x4:R,S0", nodes},
        {"f32[12,9] : 4:P -> { 0:7 | 0:7; 3:12 }", nodes},
        {"f32[12,9] : 4:P -> bf16 2x4:R,S0", nodes},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CASE("every allocation of %s fails once", cases[i].problem);
        OK(use_all(cases[i].problem, cases[i].node_of));
        long n = 0;
        for (failed = true; failed; n++) {
            failed = false;
            until_failure = n;
            rsd_status status = use_all(cases[i].problem, cases[i].node_of);
            CHECK(status == (failed ? RSD_ENOMEM : RSD_OK), "allocation %ld: %s", n,
                  rsd_status_name(status));
            CHECK(!failed || strstr(rsd_error(), "out of memory") != NULL, "'%s'", rsd_error());
        }
        until_failure = -1;
        CHECK(n > 20, "only %ld allocations", n);
        printf("# %ld allocations\n", n - 1);
    }
    return tap_end();
}
