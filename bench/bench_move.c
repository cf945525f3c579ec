/* bench_move.c - moves in one process beside hand-written loops over the same bytes. */
#include "bench.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- hand-written rows, the limit ---- */

typedef void row_fn(char *dst, const char *src, size_t n);

static void row_memcpy(char *dst, const char *src, size_t n)
{
    memcpy(dst, src, n);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void row_512(char *dst, const char *src, size_t n)
{
    for (size_t i = 0; i < n; i += 64)
        _mm512_stream_si512((void *)(dst + i), _mm512_loadu_si512(src + i));
}

__attribute__((target("avx2"))) static void row_256(char *dst, const char *src, size_t n)
{
    for (size_t i = 0; i < n; i += 32)
        _mm256_stream_si256((__m256i *)(void *)(dst + i),
                            _mm256_loadu_si256((const __m256i *)(const void *)(src + i)));
}

static row_fn *row_past_cache(void)
{
    return __builtin_cpu_supports("avx512f") ? row_512
           : __builtin_cpu_supports("avx2")  ? row_256
                                             : row_memcpy;
}
#else
static row_fn *row_past_cache(void)
{
    return row_memcpy;
}
#endif

/* Rows of `run` bytes, copied between two pitches by nthreads threads. */
struct rows {
    char *dst;
    const char *src;
    size_t run, dst_pitch, src_pitch;
    int64_t count;
    row_fn *row;
};

static void *do_rows(void *context)
{
    struct rows *r = context;
    size_t run = r->run;
    if (r->row == row_memcpy && run == 64) /* a constant size is the fastest for a compiler */
        for (int64_t i = 0; i < r->count; i++)
            memcpy(r->dst + (size_t)i * r->dst_pitch, r->src + (size_t)i * r->src_pitch, 64);
    else
        for (int64_t i = 0; i < r->count; i++)
            r->row(r->dst + (size_t)i * r->dst_pitch, r->src + (size_t)i * r->src_pitch, run);
    return NULL;
}

static void rows_on_threads(struct rows all, int nthreads)
{
    pthread_t threads[16];
    struct rows parts[16];
    int64_t each = all.count / nthreads;
    for (int t = 0; t < nthreads; t++) {
        parts[t] = all;
        parts[t].dst += (size_t)(each * t) * all.dst_pitch;
        parts[t].src += (size_t)(each * t) * all.src_pitch;
        parts[t].count = t == nthreads - 1 ? all.count - each * t : each;
        if (t > 0)
            pthread_create(&threads[t], NULL, do_rows, &parts[t]);
    }
    do_rows(&parts[0]);
    for (int t = 1; t < nthreads; t++)
        pthread_join(threads[t], NULL);
}

/* ---- row blocks to column blocks ---- */

enum { RANKS = 4 };

struct blocks {
    rsd_exec *exec;
    const void *src[RANKS];
    void *dst[RANKS];
    int64_t n;
    size_t each;
    int nthreads;
    row_fn *row;
    int repeat;
};

static void ours(void *context)
{
    struct blocks *b = context;
    for (int i = 0; i < b->repeat; i++)
        must(rsd_exec_run(b->exec, b->src, b->dst));
}

/* Each thread fills its own destinations, source by source. */
struct filler {
    struct blocks *b;
    int first;
};

static void *fill_destinations(void *context)
{
    struct filler *f = context;
    struct blocks *b = f->b;
    int64_t rows = b->n / RANKS;
    size_t run = (size_t)rows * b->each, pitch = (size_t)b->n * b->each;
    for (int q = f->first; q < RANKS; q += b->nthreads)
        for (int p = 0; p < RANKS; p++) {
            struct rows r = {(char *)b->dst[q] + (size_t)(rows * p) * run,
                             (const char *)b->src[p] + (size_t)q * run,
                             run,
                             run,
                             pitch,
                             rows,
                             b->row};
            do_rows(&r);
        }
    return NULL;
}

static void by_hand(struct blocks *b, row_fn *row)
{
    b->row = row;
    for (int i = 0; i < b->repeat; i++) {
        pthread_t thread;
        struct filler f[2] = {{b, 0}, {b, 1}};
        if (b->nthreads > 1)
            pthread_create(&thread, NULL, fill_destinations, &f[1]);
        fill_destinations(&f[0]);
        if (b->nthreads > 1)
            pthread_join(thread, NULL);
    }
}

static void hand_memcpy(void *context)
{
    by_hand(context, row_memcpy);
}

static void hand_past_cache(void *context)
{
    by_hand(context, row_past_cache());
}

static void rows_to_columns(const char *dtype, size_t each, int64_t n, int nthreads, int rounds,
                            int repeat, rsd_pool *pool)
{
    char problem[128];
    rsd_layout *a, *b;
    rsd_plan *plan;
    struct blocks blocks = {.n = n, .each = each, .nthreads = nthreads, .repeat = repeat};
    snprintf(problem, sizeof problem, "%s[%lld,%lld] : 4:S0 -> 4:S1", dtype, (long long)n,
             (long long)n);
    must(rsd_problem_parse(problem, &a, &b));
    must(rsd_plan_new(a, b, NULL, &plan));
    must(rsd_bind_threads(plan, pool, &blocks.exec));
    size_t nbytes = (size_t)(n * n) * each / RANKS;
    for (int r = 0; r < RANKS; r++) {
        blocks.src[r] = touched(nbytes);
        blocks.dst[r] = touched(nbytes);
    }
    bool large = (size_t)(n * n) * each >= (size_t)4 << 20;
    work_fn *const works[] = {ours, hand_memcpy,
                              hand_past_cache}; /* the last copies whole cache lines only */
    double seconds[3];
    best_of(rounds, large ? 3 : 2, works, &blocks, seconds);
    double scale = 1e3 / repeat;
    snprintf(problem + strlen(problem), sizeof problem - strlen(problem), ", %d thread%s", nthreads,
             nthreads > 1 ? "s" : "");
    if (large)
        bench_row(problem, seconds[0] * scale, seconds[2] * scale, "ms",
                  "stores past the cache, by hand");
    bench_row(problem, seconds[0] * scale, seconds[1] * scale, "ms", "memcpy rows, by hand");
    for (int r = 0; r < RANKS; r++) {
        free((void *)(uintptr_t)blocks.src[r]);
        free(blocks.dst[r]);
    }
    rsd_exec_free(blocks.exec);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* ---- pack and unpack ---- */

struct packing {
    rsd_exec *exec;
    struct rows rows;
    int nthreads;
};

static void pack_ours(void *context)
{
    struct packing *p = context;
    const void *src[] = {p->rows.src};
    void *dst[] = {p->rows.dst};
    must(rsd_exec_run(p->exec, src, dst));
}

static void pack_memcpy(void *context)
{
    struct packing *p = context;
    p->rows.row = row_memcpy;
    rows_on_threads(p->rows, p->nthreads);
}

static void pack_past_cache(void *context)
{
    struct packing *p = context;
    p->rows.row = row_past_cache();
    rows_on_threads(p->rows, p->nthreads);
}

/* Rows of `run` bytes with a pitch of four times that on one side, dense on the other. */
static void pack(size_t run, int unpack, int nthreads, rsd_pool *pool, char *small, char *large)
{
    enum { PAYLOAD = 256 << 20 };
    char problem[128];
    rsd_layout *a;
    rsd_plan *plan;
    struct packing p = {.nthreads = nthreads};
    int64_t count = PAYLOAD / (int64_t)run, pitched[2] = {4 * (int64_t)run, 1};
    p.rows = (struct rows){unpack ? large : small,
                           unpack ? small : large,
                           run,
                           unpack ? 4 * run : run,
                           unpack ? run : 4 * run,
                           count,
                           NULL};
    snprintf(problem, sizeof problem, "u8[%lld,%zu] @ 1:R", (long long)count, run);
    must(rsd_layout_parse(problem, &a));
    must(rsd_plan_new(a, a, NULL, &plan));
    rsd_bind_options options = {.struct_nbytes = sizeof options};
    *(unpack ? &options.dst_strides : &options.src_strides) = pitched;
    const rsd_plan *plans[] = {plan};
    must(rsd_bind_threads_many(1, plans, &options, pool, &p.exec));
    work_fn *const works[] = {pack_ours, pack_memcpy, pack_past_cache};
    double seconds[3];
    best_of(7, run % 64 ? 2 : 3, works, &p, seconds);
    bool past_cache = run % 64 == 0 && seconds[2] < seconds[1];
    double limit = seconds[past_cache ? 2 : 1];
    snprintf(problem, sizeof problem, "%s runs of %zu B, %d thread%s", unpack ? "unpack" : "pack",
             run, nthreads, nthreads > 1 ? "s" : "");
    bench_row(problem, PAYLOAD / seconds[0] / 1e9, PAYLOAD / limit / 1e9, "GB/s",
              past_cache ? "stores past the cache, by hand" : "memcpy rows, by hand");
    rsd_exec_free(p.exec);
    rsd_plan_free(plan);
    rsd_layout_free(a);
}

int main(int argc, char **argv)
{
    rsd_pool *pool;
    bench_open(argc, argv);
    must(rsd_pool_new(2, &pool));
    bench_title("row blocks to column blocks, data in memory");
    rows_to_columns("f64", 8, 8192, 2, 12, 1, pool);
    rows_to_columns("f64", 8, 8192, 1, 6, 1, NULL);
    rows_to_columns("bf16", 2, 8192, 2, 12, 1, pool);
    bench_title("small tensors");
    rows_to_columns("f32", 4, 16, 1, 20, 20000, NULL);
    rows_to_columns("f32", 4, 64, 1, 20, 5000, NULL);
    rows_to_columns("f32", 4, 256, 1, 20, 500, NULL);
    rows_to_columns("f32", 4, 508, 1, 20, 100, NULL);
    bench_title("strided rows, 268 MB payload, pitch four times the run");
    char *small = touched((size_t)256 << 20), *large = touched((size_t)1 << 30);
    static const size_t runs[] = {8, 16, 64, 256, 1024, 4096, 16384, 65536};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        for (int unpack = 0; unpack < 2; unpack++)
            for (int nthreads = 1; nthreads <= 2; nthreads++)
                pack(runs[i], unpack, nthreads, nthreads > 1 ? pool : NULL, small, large);
    free(small);
    free(large);
    rsd_pool_free(pool);
    return 0;
}
