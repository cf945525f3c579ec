/* Times of the kernels (temporary). */
#include "crc.h"
#include "queue.h"
#include "tables.h"
#include <stdio.h>
#include <stdlib.h>

static const struct driver *cu;
static struct cuda_device *dev;
static struct cuda_queue *q;
#define DIE(x) do { rsd_status s_ = (x); if (s_) { printf("%s: %s\n", #x, rsd_error()); exit(1); } } while (0)
static char *alloc(size_t n) { cu_address a; DIE(device_enter(dev)); if (cu->cuMemAlloc(&a, n)) { printf("alloc\n"); exit(1);} device_leave(dev); return (char *)(uintptr_t)a; }
static double best_ms(struct cuda_program *p, const void *const *arrays) {
    double best = 1e9;
    for (int i = 0; i < 10; i++) { DIE(cuda_queue_wait(q)); double t = seconds_now(); for (int k = 0; k < 10; k++) DIE(cuda_program_run(p, q, arrays)); DIE(cuda_queue_wait(q)); t = (seconds_now() - t) / 10 * 1e3; if (t < best) best = t; }
    return best;
}
static uint32_t align_of(int64_t b) { uint32_t p = 16; while (b & (p - 1)) p /= 2; return p; }
static struct gpu_copy copies[4000]; static struct gpu_loop loops[4000]; static size_t n;
static void add(int src, int64_t so, int dst, int64_t d0, int64_t rows, int64_t run, int64_t sp, int64_t dp) {
    loops[n] = (struct gpu_loop){rows, sp, dp};
    copies[n] = (struct gpu_copy){.src_offset = so, .dst_offset = d0, .run = run, .end = rows * run, .src = (gpu_u32)src, .dst = (gpu_u32)dst, .first_loop = (gpu_u32)n, .nloops = 1, .align = align_of(so | d0 | run | sp | dp)}; n++;
}
static double go(const void *const *arrays, size_t narrays) {
    struct cuda_program *p; struct cuda_tables t = {.copies = copies, .ncopies = n, .loops = loops, .nloops = n, .arrays = arrays, .narrays = narrays};
    DIE(cuda_program_new(dev, &t, &p)); double ms = best_ms(p, arrays); cuda_program_free(p); n = 0; return ms;
}
int main(void) {
    double t0 = seconds_now();
    DIE(driver_open(&cu)); DIE(cuda_open_device(0, &dev)); DIE(cuda_queue_new(dev, &q)); printf("open %.3f s\n", seconds_now() - t0);
    cu_function f; DIE(device_enter(dev));
    for (int k = 0; k < NKERNELS; k++) { t0 = seconds_now(); DIE(device_kernel(dev, (enum kernel_id)k, &f)); printf("compile %s %.3f s\n", kernels[k].name, seconds_now() - t0); }
    device_leave(dev);
    size_t N = 512u << 20; char *a = alloc(N), *b = alloc(N); const void *arrays[] = {a, b};
    for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) add(0, i * 2048ll * 8192 * 8 + j * 2048ll * 8, 1, j * 8192ll * 2048 * 8 + i * 2048ll * 2048 * 8, 2048, 2048 * 8, 8192 * 8, 2048 * 8);
    printf("f64 8192^2 S0->S1: %.3f ms (hand 0.305)\n", go(arrays, 2));
    add(0, 0, 1, 0, 1, (int64_t)N, 0, 0); printf("one run of 512 MiB: %.3f ms (D2D 0.256)\n", go(arrays, 2));
    for (int64_t run = 2; run <= 65536; run *= run < 16 ? 2 : 4) {
        int64_t rows = (int64_t)(N / 4) / run;
        add(0, 0, 1, 0, rows, run, run * 4, run); double k1 = go(arrays, 2);
        add(0, 0, 1, 0, rows, run, run, run * 4); double k2 = go(arrays, 2);
        printf("runs of %lld B: pack %.0f unpack %.0f GB/s\n", (long long)run, 2.0 * (double)(rows * run) / k1 / 1e6, 2.0 * (double)(rows * run) / k2 / 1e6);
    }
    { /* a transposition of f32 8192^2 */
        loops[0] = (struct gpu_loop){8192, 4, 8192 * 4}; loops[1] = (struct gpu_loop){8192, 8192 * 4, 4};
        copies[0] = (struct gpu_copy){.run = 4, .end = 8192ll * 8192 * 4, .src = 0, .dst = 1, .nloops = 2, .align = 4}; n = 2;
        struct cuda_program *p; struct cuda_tables t = {.copies = copies, .ncopies = 1, .loops = loops, .nloops = 2, .arrays = arrays, .narrays = 2};
        DIE(cuda_program_new(dev, &t, &p)); printf("transpose f32 8192^2: %.3f ms\n", best_ms(p, arrays)); cuda_program_free(p); n = 0;
    }
    /* digests */
    char *h = malloc(N); for (size_t i = 0; i < N; i++) h[i] = (char)(i * 2654435761u >> 13); DIE(device_enter(dev)); cu->cuMemcpyHtoD((cu_address)(uintptr_t)a, h, N); device_leave(dev);
    size_t sizes[] = {1, 7, 8, 100, 511, 512, 1000, 65536, 65543, 1000003, N};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) for (int off = 0; off < 2; off++) {
        size_t len = sizes[i] - (off && sizes[i] == N ? 3 : 0); struct gpu_digest d = {.offset = off ? 3 : 0, .run = (int64_t)len, .nrows = 1, .after = 5}; uint64_t r[1][2] = {{0, 0}};
        double t = 0, best = 1e9; for (int k = 0; k < (len > 1e8 ? 5 : 1); k++) { r[0][0] = r[0][1] = 0; t = seconds_now(); DIE(cuda_digest(q, &d, 1, NULL, 0, arrays, 1, r, 1)); t = seconds_now() - t; if (t < best) best = t; }
        bool ok = r[0][0] == crc_shift(CRC_ECMA, crc_update(CRC_ECMA, 0, h + d.offset, len), 5) && r[0][1] == crc_shift(CRC_JONES, crc_update(CRC_JONES, 0, h + d.offset, len), 5);
        printf("digest of %zu: %s %.3f ms %.0f GB/s\n", len, ok ? "right" : "WRONG", best * 1e3, (double)len / best / 1e9);
    }
    for (int64_t run = 4; run <= 4096; run *= 4) { /* columns of a matrix of pitch 4 * run */
        int64_t rows = (int64_t)(N / 4) / run; struct gpu_loop l = {rows, 4 * run, 4 * run}; struct gpu_digest d = {.run = run, .nrows = rows, .after = (rows - 1) * 4 * run + 3 * run, .nloops = 1}; uint64_t r[1][2] = {{0, 0}}, want[2] = {0, 0};
        double t = seconds_now(); DIE(cuda_digest(q, &d, 1, &l, 1, arrays, 1, r, 1)); t = seconds_now() - t;
        char *zero = calloc(1, N); for (int64_t i = 0; i < rows; i++) memcpy(zero + i * 4 * run, h + i * 4 * run, (size_t)run);
        want[0] = crc_update(CRC_ECMA, 0, zero, (size_t)(4 * run * rows)); want[1] = crc_update(CRC_JONES, 0, zero, (size_t)(4 * run * rows)); free(zero);
        printf("digest of rows of %lld: %s %.2f ms %.0f GB/s\n", (long long)run, r[0][0] == want[0] && r[0][1] == want[1] ? "right" : "WRONG", t * 1e3, (double)(rows * run) / t / 1e9);
    }
    return 0;
}
