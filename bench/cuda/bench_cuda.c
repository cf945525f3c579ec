/* bench_cuda.c - moves on a GPU beside copies of as many bytes by the driver. Over MPI with the argument "ranks". */
#include "bench.h"
#include "gpu.h"
#include "reshard_cuda.h"
#include "reshard_mpi.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { ROUNDS = 12, REPEATS = 5 };

static int rank;

static void report(const char *name, double seconds, double limit)
{
    if (rank == 0)
        bench_row(name, 1e3 * seconds, 1e3 * limit, "ms", "a copy of as many bytes on the device");
}

/* Seconds of one run of an exec, the best of several, with several queued at once. */
static double time_exec(rsd_exec *exec, const void *const *src, void *const *dst)
{
    double best = 1e99;
    for (int round = 0; round < ROUNDS; round++) {
        gpu_stream_wait(NULL);
        double start = now();
        for (int i = 0; i < REPEATS; i++)
            must(rsd_exec_run(exec, src, dst));
        gpu_stream_wait(NULL);
        double took = (now() - start) / REPEATS;
        best = took < best ? took : best;
    }
    return best;
}

/* Seconds to copy n bytes on the device. */
static double time_copy(size_t nbytes)
{
    char *from = gpu_new(ON_GPU, nbytes), *to = gpu_new(ON_GPU, nbytes);
    double best = 1e99;
    for (int round = 0; round < ROUNDS; round++) {
        gpu_stream_wait(NULL);
        double start = now();
        for (int i = 0; i < REPEATS; i++)
            gpu_copy_async(to, from, nbytes, NULL);
        gpu_stream_wait(NULL);
        double took = (now() - start) / REPEATS;
        best = took < best ? took : best;
    }
    gpu_free(ON_GPU, from);
    gpu_free(ON_GPU, to);
    return best;
}

/* ---- one process ---- */

/* n tensors of one problem in one exec. */
static void bench_problem(const char *name, const char *problem, int64_t n)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    must(rsd_problem_parse(problem, &a, &b));
    must(rsd_plan_new(a, b, NULL, &plan));
    int64_t nsrc = rsd_layout_narrays(a), ndst = rsd_layout_narrays(b), nbytes = 0;
    const rsd_plan **plans = calloc((size_t)n, sizeof *plans);
    const void **src = calloc((size_t)(n * nsrc), sizeof *src);
    void **dst = calloc((size_t)(n * ndst), sizeof *dst);
    for (int64_t i = 0; i < n; i++) {
        plans[i] = plan;
        for (int64_t k = 0; k < nsrc + ndst; k++) {
            rsd_array array;
            must(rsd_layout_array(k < nsrc ? a : b, k < nsrc ? k : k - nsrc, &array));
            void *memory = gpu_new(ON_GPU, (size_t)array.nbytes);
            gpu_fill_async(memory, 1, (size_t)array.nbytes, NULL);
            if (k < nsrc)
                src[i * nsrc + k] = memory;
            else
                dst[i * ndst + k - nsrc] = memory;
            nbytes += k < nsrc ? 0 : (int64_t)array.nbytes;
        }
    }
    double start = now();
    must(rsd_bind_threads_many(n, plans, NULL, NULL, &exec));
    must(rsd_exec_set_stream(exec, NULL));
    must(rsd_exec_run(exec, src, dst));
    gpu_stream_wait(NULL);
    double first = now() - start, best = time_exec(exec, src, dst);
    start = now();
    must(rsd_exec_run(exec, src, dst));
    double queued = now() - start;
    gpu_stream_wait(NULL);
    report(name, best, time_copy((size_t)nbytes));
    printf("    bind and first run %.1f ms, a run is queued in %.1f us\n", 1e3 * first,
           1e6 * queued);
    rsd_exec_free(exec);
    for (int64_t i = 0; i < n * nsrc; i++)
        gpu_free(ON_GPU, (void *)(uintptr_t)src[i]);
    for (int64_t i = 0; i < n * ndst; i++)
        gpu_free(ON_GPU, dst[i]);
    free(plans);
    free(src);
    free(dst);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* A kernel by hand for rows of one pitch: 16-byte words, or 8-byte ones, four of them in flight. */
static const char rows_source[] =
    "template <class Word> static __device__ void move(const char *src, char *dst, unsigned "
    "per_run,\n"
    "                                                  long long src_pitch, long long dst_pitch)\n"
    "{\n"
    "    const unsigned tile = 65536 / sizeof(Word);\n"
    "    for (unsigned i = 0; i < tile; i += 1024) {\n"
    "        Word words[4];\n"
    "        unsigned first = blockIdx.x * tile + i + threadIdx.x;\n"
    "        for (unsigned u = 0; u < 4; u++) {\n"
    "            unsigned at = first + 256 * u, row = at / per_run, in = at - row * per_run;\n"
    "            words[u] = *(const Word *)(src + row * src_pitch + in * sizeof(Word));\n"
    "        }\n"
    "        for (unsigned u = 0; u < 4; u++) {\n"
    "            unsigned at = first + 256 * u, row = at / per_run, in = at - row * per_run;\n"
    "            *(Word *)(dst + row * dst_pitch + in * sizeof(Word)) = words[u];\n"
    "        }\n"
    "    }\n"
    "}\n"
    "extern \"C\" __global__ void __launch_bounds__(256) rows8(const char *src, char *dst, "
    "unsigned n,\n"
    "                                                         long long from, long long to)\n"
    "{ move<unsigned long long>(src, dst, n, from, to); }\n"
    "extern \"C\" __global__ void __launch_bounds__(256) rows16(const char *src, char *dst, "
    "unsigned n,\n"
    "                                                          long long from, long long to)\n"
    "{ move<uint4>(src, dst, n, from, to); }\n";

static double time_rows(const char *src, char *dst, int64_t run, int64_t from, int64_t to,
                        size_t nbytes)
{
    static void *kernels[2];
    int64_t word = run % 16 ? 8 : 16;
    unsigned per_run = (unsigned)(run / word);
    void *parameters[] = {&src, &dst, &per_run, &from, &to}, **kernel = &kernels[word == 16];
    double best = 1e99;
    if (!*kernel)
        *kernel = gpu_kernel_new(rows_source, word == 16 ? "rows16" : "rows8");
    for (int round = 0; round < ROUNDS; round++) {
        gpu_stream_wait(NULL);
        double start = now();
        for (int i = 0; i < REPEATS; i++)
            gpu_launch(*kernel, (unsigned)(nbytes / 65536), parameters, NULL);
        gpu_stream_wait(NULL);
        double took = (now() - start) / REPEATS;
        best = took < best ? took : best;
    }
    return best;
}

/* Rows of a matrix that is four times as wide. */
static void bench_rows(int64_t run)
{
    enum { NBYTES = 128 << 20 };
    int64_t wide[] = {4 * run, 1}, rows = NBYTES / run;
    char problem[80], name[80], *large = gpu_new(ON_GPU, (size_t)4 * NBYTES),
                                *small = gpu_new(ON_GPU, NBYTES);
    gpu_fill_async(large, 1, (size_t)4 * NBYTES, NULL);
    snprintf(problem, sizeof problem, "u8[%lld,%lld] : 1:R -> 1:R", (long long)rows,
             (long long)run);
    for (int packs = 1; packs >= 0; packs--) {
        rsd_layout *a, *b;
        rsd_plan *plan;
        rsd_exec *exec;
        rsd_bind_options options = {.struct_nbytes = sizeof options,
                                    .src_strides = packs ? wide : NULL,
                                    .dst_strides = packs ? NULL : wide};
        must(rsd_problem_parse(problem, &a, &b));
        must(rsd_plan_new(a, b, NULL, &plan));
        must(rsd_bind_threads_many(1, (const rsd_plan *const *)&plan, &options, NULL, &exec));
        must(rsd_exec_set_stream(exec, NULL));
        const void *src[] = {packs ? large : small};
        void *dst[] = {packs ? small : large};
        snprintf(name, sizeof name, "rows of %lld B, %s", (long long)run,
                 packs ? "packed" : "unpacked");
        double ours = time_exec(exec, src, dst),
               hand = time_rows(src[0], dst[0], run, packs ? 4 * run : run, packs ? run : 4 * run,
                                NBYTES);
        bench_row(name, 2e-9 * NBYTES / ours, 2e-9 * NBYTES / hand, "GB/s", "a kernel by hand");
        rsd_exec_free(exec);
        rsd_plan_free(plan);
        rsd_layout_free(a);
        rsd_layout_free(b);
    }
    gpu_free(ON_GPU, large);
    gpu_free(ON_GPU, small);
}

/* ---- processes ---- */

static void bench_ranks(const char *name, const char *problem, enum gpu_kind kind)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    rsd_array from, to;
    must(rsd_problem_parse(problem, &a, &b));
    must(rsd_plan_new(a, b, NULL, &plan));
    must(rsd_layout_local(a, rank, &from));
    must(rsd_layout_local(b, rank, &to));
    void *src = gpu_new(kind, (size_t)from.nbytes), *dst = gpu_new(kind, (size_t)to.nbytes);
    const void *sources[] = {src};
    double best = 1e99;
    must(rsd_bind_mpi(plan, MPI_COMM_WORLD, NULL, &exec));
    for (int round = 0; round < 3 * ROUNDS; round++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = now(), took, slowest;
        must(rsd_exec_run(exec, sources, &dst));
        took = now() - start;
        MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        best = slowest < best ? slowest : best;
    }
    if (rank == 0)
        printf("    %s\n", rsd_exec_describe(exec));
    MPI_Barrier(MPI_COMM_WORLD);
    int64_t nbytes = (int64_t)to.nbytes, all;
    MPI_Allreduce(&nbytes, &all, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    double limit = rank == 0 ? time_copy((size_t)all) : 0;
    report(name, best, limit);
    MPI_Barrier(MPI_COMM_WORLD);
    rsd_exec_free(exec);
    gpu_free(kind, src);
    gpu_free(kind, dst);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* ---- files ---- */

enum { NTENSORS = 40, FILE_CHUNK = 4 << 20 };
#define TENSOR_NBYTES ((size_t)128 << 20)

/* By hand: each thread reads chunks into pinned memory, and copies them to the device. */
struct by_hand {
    int fd;
    size_t nbytes;
    char *device;
    _Atomic size_t next;
};

static void *read_by_hand(void *context)
{
    struct by_hand *all = context;
    gpu_start();
    char *pinned[2] = {gpu_new(PINNED, FILE_CHUNK), gpu_new(PINNED, FILE_CHUNK)};
    void *streams[2] = {gpu_stream_new(), gpu_stream_new()};
    for (size_t i = 0, at; (at = atomic_fetch_add(&all->next, FILE_CHUNK)) < all->nbytes; i++) {
        gpu_stream_wait(streams[i % 2]);
        if (pread(all->fd, pinned[i % 2], FILE_CHUNK, (off_t)at) <= 0)
            break;
        gpu_copy_async(all->device + at % TENSOR_NBYTES, pinned[i % 2], FILE_CHUNK, streams[i % 2]);
    }
    for (int k = 0; k < 2; k++) {
        gpu_stream_wait(streams[k]);
        gpu_free(PINNED, pinned[k]);
    }
    return NULL;
}

static double time_by_hand(const char *file, int nthreads, char *device)
{
    pthread_t threads[64];
    struct by_hand all = {.fd = open(file, O_RDONLY), .device = device};
    all.nbytes = (size_t)lseek(all.fd, 0, SEEK_END) / FILE_CHUNK * FILE_CHUNK;
    double start = now();
    for (int i = 0; i < nthreads; i++)
        pthread_create(&threads[i], NULL, read_by_hand, &all);
    for (int i = 0; i < nthreads; i++)
        pthread_join(threads[i], NULL);
    close(all.fd);
    return now() - start;
}

/* Tensors of 128 MiB in bf16, to a checkpoint in memory and back. */
static void bench_files(const char *directory)
{
    static const int counts[] = {1, 8, 16};
    rsd_layout *layout;
    rsd_tensor tensors[NTENSORS];
    void *arrays[NTENSORS];
    char names[NTENSORS][16], path[300], file[400], name[80];
    must(rsd_layout_parse("bf16[8192,8192] @ 1:R", &layout));
    snprintf(path, sizeof path, "%s/bench_cuda", directory);
    snprintf(file, sizeof file, "%s/__0_0.distcp", path);
    for (int i = 0; i < NTENSORS; i++) {
        arrays[i] = gpu_new(ON_GPU, TENSOR_NBYTES);
        gpu_fill_async(arrays[i], i, TENSOR_NBYTES, NULL);
        snprintf(names[i], sizeof names[i], "t%d", i);
        tensors[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                  .name = names[i],
                                  .layout = layout,
                                  .arrays = &arrays[i]};
    }
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        rsd_pool *pool;
        must(rsd_pool_new(counts[k], &pool));
        rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
        rsd_save_options save = {.struct_nbytes = sizeof save, .overwrite = 1, .io = &io};
        rsd_load_options load = {.struct_nbytes = sizeof load, .io = &io};
        rsd_checkpoint *checkpoint;
        double saved = 1e99, loaded = 1e99, hand = 1e99;
        for (int round = 0; round < 3; round++) {
            double start = now();
            must(rsd_save(path, NTENSORS, tensors, &save, NULL));
            saved = now() - start < saved ? now() - start : saved;
        }
        for (int round = 0; round < 4; round++) { /* the first reads of new pages are slower */
            must(rsd_checkpoint_open(path, NULL, &checkpoint));
            double start = now();
            must(rsd_load(checkpoint, NTENSORS, tensors, &load, NULL));
            loaded = now() - start < loaded ? now() - start : loaded;
            rsd_checkpoint_close(checkpoint);
            double took = time_by_hand(file, counts[k], arrays[0]);
            hand = took < hand ? took : hand;
        }
        double gigabytes = NTENSORS * (double)TENSOR_NBYTES / 1e9;
        snprintf(name, sizeof name, "load %d x bf16 8192^2, %d threads", NTENSORS, counts[k]);
        bench_row(name, gigabytes / loaded, gigabytes / hand, "GB/s", "pread and copies by hand");
        snprintf(name, sizeof name, "save %d x bf16 8192^2, %d threads", NTENSORS, counts[k]);
        bench_row(name, gigabytes / saved, gigabytes / hand, "GB/s", "the same");
        rsd_pool_free(pool);
    }
    char digests[NTENSORS][RSD_DIGEST_NCHARS];
    double best = 1e99;
    for (int round = 0; round < 3; round++) {
        double start = now();
        must(rsd_digest_tensors(NTENSORS, tensors, NULL, digests));
        best = now() - start < best ? now() - start : best;
    }
    bench_row("digest of 40 x 128 MiB", NTENSORS * (double)TENSOR_NBYTES / 1e9 / best, 400, "GB/s",
              "400 GB/s");
    for (int i = 0; i < NTENSORS; i++)
        gpu_free(ON_GPU, arrays[i]);
    rsd_layout_free(layout);
}

int main(int argc, char **argv)
{
    bool ranks = argc > 2 && strcmp(argv[2], "ranks") == 0; /* else the directory of files */
    if (!gpu_open(argv)) {
        puts("no GPU here: libcuda.so.1 cannot be loaded");
        return 0;
    }
    if (ranks) {
        MPI_Init(&argc, &argv);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    }
    gpu_start();
    bench_open(rank ? 0 : argc, argv);
    if (rank == 0)
        bench_title("on a GPU");
    if (!ranks) {
        bench_problem("f64 8192^2 S0 -> S1, 4 ranks in one process",
                      "f64[8192,8192] : 4:S0 -> 4:S1", 1);
        bench_problem("224 bf16 4096^2, 4:S0 -> 2:S1", "bf16[4096,4096] : 4:S0 -> 2:S1", 224);
        bench_problem("f32 256^2 S0 -> S1", "f32[256,256] : 4:S0 -> 4:S1", 1);
        bench_problem("f32 8192^2 4:P -> 4:S0", "f32[8192,8192] : 4:P -> 4:S0", 1);
        bench_problem("f64 8192^2 block-cyclic", "f64[8192,8192] : 2x2:C(0,64),C(1,64) -> 4:S0", 1);
        for (int64_t run = 8; run <= 65536; run *= run < 16 ? 2 : 4)
            bench_rows(run);
        if (argc > 2)
            bench_files(argv[2]);
    } else {
        bench_ranks("f64 8192^2 S0 -> S1, 4 processes", "f64[8192,8192] : 4:S0 -> 4:S1", ON_GPU);
        bench_ranks("the same, expandable segments", "f64[8192,8192] : 4:S0 -> 4:S1", ON_BLOCKS);
        bench_ranks("f32 256^2 S0 -> S1, 4 processes", "f32[256,256] : 4:S0 -> 4:S1", ON_GPU);
        bench_ranks("f64 4096^2 S0 -> R, 4 processes", "f64[4096,4096] : 4:S0 -> 4:R", ON_GPU);
        bench_ranks("f32 4096^2 P -> S0, 4 processes", "f32[4096,4096] : 4:P -> 4:S0", ON_GPU);
    }
    if (ranks)
        MPI_Finalize();
    return 0;
}
