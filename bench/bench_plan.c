/* bench_plan.c - time and memory of large plans, beside writing as many pieces into a list. */
#include "bench.h"

#include <malloc.h>
#include <stdbool.h>

static int64_t walk(const rsd_plan *plan, int32_t rank, rsd_side side)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    int64_t npieces = 0;
    must(rsd_plan_walk(plan, rank, side, &cursor));
    for (;;) {
        must(rsd_cursor_next(cursor, &piece));
        if (!piece)
            break;
        npieces++;
    }
    rsd_cursor_free(cursor);
    return npieces;
}

/* Returns the seconds to write n pieces of a 2-d plan into memory that was touched before. */
static double listing(int64_t n)
{
    struct small {
        int64_t from, to, lo[2], len[2];
    };
    struct small *list = touched((size_t)n * sizeof *list);
    double best = 1e99;
    for (int round = 0; round < 3; round++) {
        double start = now();
        for (int64_t i = 0; i < n; i++)
            list[i] = (struct small){i, n - i, {i, i}, {1, 1}};
        double took = now() - start;
        best = took < best ? took : best;
    }
    free(list);
    return best;
}

/* ---- two large formulas ---- */

static void large_grid(void)
{
    static const char problem[] = "f32[16384,16384] : 128x128:S0,S1 -> 16384:S0";
    double counted = 1e99, walked = 1e99, command = 1e99;
    int64_t npieces = 0;
    for (int round = 0; round < 5; round++) {
        rsd_layout *a, *b;
        rsd_plan *plan;
        rsd_totals totals = {.struct_nbytes = sizeof totals};
        double start = now();
        must(rsd_problem_parse(problem, &a, &b));
        must(rsd_plan_new(a, b, NULL, &plan));
        must(rsd_plan_totals(plan, &totals));
        double middle = now();
        npieces = walk(plan, RSD_EVERY_RANK, RSD_RECEIVES);
        double end = now();
        if (npieces != totals.npieces)
            exit(1);
        counted = middle - start < counted ? middle - start : counted;
        walked = end - start < walked ? end - start : walked;
        rsd_plan_free(plan);
        rsd_layout_free(a);
        rsd_layout_free(b);
        start = now();
        if (system("build/reshard plan --json 'f32[16384,16384] : 128x128:S0,S1 -> 16384:S0' "
                   ">/dev/null"))
            exit(1);
        command = now() - start < command ? now() - start : command;
    }
    double limit = listing(npieces);
    bench_row("plan and totals, 128x128:S0,S1 -> 16384:S0 (2,097,152 pieces)", counted * 1e3,
              limit * 1e3, "ms", "writing a list of as many pieces");
    bench_row("plan and every piece walked, the same", walked * 1e3, limit * 1e3, "ms",
              "writing a list of as many pieces");
    bench_row("the whole command: reshard plan --json, the same", command * 1e3, limit * 1e3, "ms",
              "writing a list of as many pieces");
}

/* ---- many tensors, many ranks ---- */

/* 1,024 tensors, each cut over 1,024 ranks as explicit boxes, as a checkpoint describes them. */
static void many_chunks(void)
{
    enum { TENSORS = 1024, RANKS = 1024, ROWS = 4096, COLUMNS = 1024 };
    int32_t *ranks = touched(RANKS * sizeof *ranks);
    int64_t *lo = touched(RANKS * 2 * sizeof *lo), *len = touched(RANKS * 2 * sizeof *len);
    const int64_t shape[2] = {ROWS, COLUMNS};
    for (int32_t r = 0; r < RANKS; r++) {
        ranks[r] = r;
        lo[2 * r] = r * (ROWS / RANKS);
        len[2 * r] = ROWS / RANKS;
        lo[2 * r + 1] = 0;
        len[2 * r + 1] = COLUMNS;
    }
    int64_t npieces = 0;
    double start = now();
    for (int t = 0; t < TENSORS; t++) {
        rsd_layout *a, *b;
        rsd_plan *plan;
        rsd_coverage check = {.struct_nbytes = sizeof check};
        must(rsd_layout_new_boxes(RSD_F32, 2, shape, RANKS, ranks, lo, len, &a));
        must(rsd_layout_parse("f32[4096,1024] @ 512:S0", &b));
        must(rsd_layout_coverage(a, &check));
        if (check.kind != RSD_COVERS_ONCE)
            exit(1);
        must(rsd_plan_new(a, b, NULL, &plan));
        npieces += walk(plan, RSD_EVERY_RANK, RSD_RECEIVES);
        rsd_plan_free(plan);
        rsd_layout_free(a);
        rsd_layout_free(b);
    }
    double took = now() - start;
    bench_row("check, plan and walk 1,024 tensors of 1,024 explicit boxes", took * 1e3,
              listing(npieces) * 1e3, "ms", "writing a list of as many pieces");
    free(ranks);
    free(lo);
    free(len);
}

/* ---- one rank's part of a large model ---- */

static void one_part(void)
{
    static const char *const shapes[] = {"[16384,16384]", "[16384,1024]", "[53248,16384]",
                                         "[16384,53248]", "[16384]",      "[128256,16384]"};
    enum { TENSORS = 1000 };
    static rsd_plan *plans[TENSORS];
    int64_t pieces = 0;
    double best = 1e99;
    size_t most = 0;
    for (int round = 0; round < 5; round++) {
        size_t before = mallinfo2().uordblks;
        double start = now();
        pieces = 0;
        for (int t = 0; t < TENSORS; t++) {
            char problem[160];
            rsd_layout *a, *b;
            rsd_rank_totals part = {.struct_nbytes = sizeof part};
            snprintf(problem, sizeof problem, "bf16%s : 16384:S0 -> dp=2048,tp=8:R,S0",
                     shapes[t % 6]);
            must(rsd_problem_parse(problem, &a, &b));
            must(rsd_plan_new(a, b, NULL, &plans[t]));
            must(rsd_plan_rank_totals(plans[t], 4711, &part));
            pieces += part.npieces_received + part.npieces_kept;
            rsd_layout_free(a);
            rsd_layout_free(b);
        }
        double took = now() - start;
        size_t held = mallinfo2().uordblks - before;
        best = took < best ? took : best;
        most = held > most ? held : most;
        for (int t = 0; t < TENSORS; t++)
            rsd_plan_free(plans[t]);
    }
    char row[128];
    snprintf(row, sizeof row, "one rank of 16,384, 1,000 tensors, FSDP -> TP8 x DP2,048");
    bench_row(row, best * 1e3, listing(pieces) * 1e3, "ms", "writing a list of as many pieces");
    printf("    %lld pieces to get, kept as %.1f MB of plans\n", (long long)pieces,
           (double)most / 1e6);
}

/* ---- arbitrary boxes ---- */

static uint64_t random_state;

static uint64_t random_next(void)
{
    uint64_t x = random_state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int by_number(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Returns the seconds to sort n numbers: the reference for code that should be near-linear. */
static double sorting(int64_t n)
{
    int64_t *numbers = touched((size_t)n * sizeof *numbers);
    for (int64_t i = 0; i < n; i++)
        numbers[i] = (int64_t)(random_next() >> 1);
    double start = now();
    qsort(numbers, (size_t)n, sizeof *numbers, by_number);
    double took = now() - start;
    free(numbers);
    return took;
}

struct tiling {
    int64_t n;
    int64_t *lo, *len;
};

/* Cuts a box at a random position of its longer side, recursively, into n boxes. */
static void split(struct tiling *tiling, int64_t y, int64_t x, int64_t h, int64_t w, int64_t n)
{
    if (n == 1) {
        int64_t *lo = tiling->lo + 2 * tiling->n, *len = tiling->len + 2 * tiling->n;
        lo[0] = y;
        lo[1] = x;
        len[0] = h;
        len[1] = w;
        tiling->n++;
        return;
    }
    int64_t half = n / 2, longer = h > w ? h : w;
    int64_t at = longer / 2 + (int64_t)(random_next() % (uint64_t)(longer / 4 + 1)) - longer / 8;
    if (h > w) {
        split(tiling, y, x, at, w, half);
        split(tiling, y + at, x, h - at, w, n - half);
    } else {
        split(tiling, y, x, h, at, half);
        split(tiling, y, x + at, h, w - at, n - half);
    }
}

static rsd_layout *random_tiling(int64_t n, uint64_t seed)
{
    enum { EXTENT = 1 << 20 };
    const int64_t shape[2] = {EXTENT, EXTENT};
    struct tiling tiling = {0};
    int32_t *ranks = touched((size_t)n * sizeof *ranks);
    tiling.lo = touched((size_t)n * 2 * sizeof(int64_t));
    tiling.len = touched((size_t)n * 2 * sizeof(int64_t));
    random_state = seed;
    split(&tiling, 0, 0, EXTENT, EXTENT, n);
    for (int64_t i = 0; i < n; i++)
        ranks[i] = (int32_t)(i * 1024 / n);
    rsd_layout *layout;
    must(rsd_layout_new_boxes(RSD_U8, 2, shape, n, ranks, tiling.lo, tiling.len, &layout));
    free(ranks);
    free(tiling.lo);
    free(tiling.len);
    return layout;
}

static void arbitrary_boxes(void)
{
    bench_title("arbitrary boxes, two random tilings on 1,024 ranks: plan and walk every piece");
    for (int64_t n = 64; n <= (int64_t)16 << 20; n *= 8) {
        rsd_layout *a = random_tiling(n, 1), *b = random_tiling(n, 2);
        rsd_plan *plan;
        char row[128];
        double start = now();
        must(rsd_plan_new(a, b, NULL, &plan));
        int64_t npieces = walk(plan, RSD_EVERY_RANK, RSD_RECEIVES);
        double took = now() - start;
        snprintf(row, sizeof row, "%lld boxes on each side, %lld pieces: %.0f ns a box",
                 (long long)n, (long long)npieces, took / (double)n * 1e9);
        bench_row(row, took, sorting(npieces), "s", "qsort of as many numbers");
        rsd_plan_free(plan);
        rsd_layout_free(a);
        rsd_layout_free(b);
    }
}

int main(int argc, char **argv)
{
    bench_open(argc, argv);
    bench_title("planning on one core");
    large_grid();
    many_chunks();
    one_part();
    arbitrary_boxes();
    return 0;
}
