/* test_device.c - moves in one process between arrays in pageable, pinned, managed and device memory, in any
 * combination, equal the oracle; streams order them. Runs on a GPU with RESHARD_GPU=1, else on the emulator. */
#include "cases.h"
#include "gpu.h"
#include "random.h"
#include "reshard_cuda.h"
#include "tap.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static struct random dice = {11};

/* Of any device that device 0 can access. */
static enum gpu_kind any_kind(void *context)
{
    (void)context;
    gpu_use_device(gpu_ndevices() > 1 ? (int)random_below(&dice, 2) : 0);
    return (enum gpu_kind)random_below(&dice, NGPU_KINDS);
}

static enum gpu_kind this_kind(void *context)
{
    return *(enum gpu_kind *)context;
}

/* Moves a tensor between arrays of these kinds; NULL: each array is of any kind. */
static void move_kinds(const char *problem, enum arrangement from, enum arrangement to,
                       enum gpu_kind *src_kind, enum gpu_kind *dst_kind)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    if (!CHECK(rsd_problem_parse(problem, &a, &b) == RSD_OK, "%s: %s", problem, rsd_error()))
        return;
    if (CHECK(rsd_plan_new(a, b, &case_options, &plan) == RSD_OK, "%s: %s", problem, rsd_error())) {
        int64_t *src_strides = oracle_strides(a, from), *dst_strides = oracle_strides(b, to);
        rsd_bind_options options = {sizeof options, src_strides, dst_strides, 0, 0};
        struct memory src = oracle_memory(a, src_strides), dst = oracle_memory(b, dst_strides);
        struct gpu_memory src_there =
                              gpu_memory_of(&src, src_kind ? this_kind : any_kind, src_kind),
                          dst_there =
                              gpu_memory_of(&dst, dst_kind ? this_kind : any_kind, dst_kind);
        const rsd_plan *plans[] = {plan};
        oracle_fill(a, src_strides, &src);
        gpu_memory_put(&src_there, &src);
        gpu_memory_put(&dst_there, &dst);
        if (CHECK(rsd_bind_threads_many(1, plans, &options, NULL, &exec) == RSD_OK, "%s: %s",
                  problem, rsd_error())) {
            OK(rsd_exec_run(exec, (const void *const *)src_there.array, dst_there.array));
            gpu_memory_get(&dst, &dst_there);
            CHECK(oracle_check(a, b, dst_strides, &dst), "%s", problem);
            rsd_exec_free(exec);
        }
        gpu_memory_free(&src_there);
        gpu_memory_free(&dst_there);
        oracle_memory_free(&src);
        oracle_memory_free(&dst);
        free(src_strides);
        free(dst_strides);
        rsd_plan_free(plan);
    }
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static void begin_group(void *context, const char *name)
{
    (void)context;
    CASE("%s", name);
}

static void move_any(void *context, const char *problem, enum arrangement from, enum arrangement to)
{
    enum gpu_kind on_gpu = ON_GPU;
    (void)context;
    move_kinds(problem, from, to, &on_gpu, &on_gpu);
    move_kinds(problem, from, to, NULL, NULL);
}

static void every_pair(void)
{
    CASE("every kind of memory to every other");
    for (enum gpu_kind from = PAGEABLE; from < NGPU_KINDS; from++)
        for (enum gpu_kind to = PAGEABLE; to < NGPU_KINDS; to++) {
            move_kinds("f32[37,41] : 4:S0 -> 2x2:S1,S0", ROWS, PADDED, &from, &to);
            move_kinds("bf16[300,1100] : 4:P -> 4:S1", COLUMNS, ROWS, &from, &to);
            move_kinds("f32[37,41] : 4:S0 -> bf16 2x2:S1,S0", ROWS, PADDED, &from, &to);
        }
}

/* ---- streams ---- */

static void in_streams(void)
{
    enum { N = 1 << 16 };
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    static unsigned char got[N];
    char *src = gpu_new(ON_GPU, N), *dst = gpu_new(ON_GPU, N);
    void *streams[] = {gpu_stream_new(), gpu_stream_new()};
    CASE("runs are ordered in the stream of the caller");
    OK(rsd_problem_parse("u8[65536] : 2:S0 -> 2:C(0,16)", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    OK(rsd_bind_threads(plan, NULL, &exec));
    const void *from[] = {src, src + N / 2};
    void *to[] = {dst, dst + N / 2};
    for (int round = 0; round < 6; round++) {
        void *stream = streams[round % 2];
        OK(rsd_exec_set_stream(exec, stream));
        gpu_fill_async(dst, 0xee, N, stream);
        gpu_fill_async(src, 0x10 + round, N, stream);
        if (round < 4) {
            OK(rsd_exec_run(exec, from, to));
        } else {
            OK(rsd_exec_start(exec, from, to));
            FAILS(RSD_EINVAL, "in progress", rsd_exec_set_stream(exec, NULL));
            OK(rsd_exec_wait(exec));
        }
        gpu_fill_async(src, 0x77, N, stream); /* after the run */
        gpu_stream_wait(stream);
        gpu_get(ON_GPU, got, dst, N);
        bool right = true;
        for (int i = 0; i < N; i++)
            right = right && got[i] == 0x10 + round;
        CHECK(right, "round %d", round);
    }
    OK(rsd_exec_run(exec, from, to));
    rsd_exec_free(exec); /* while its work is queued */
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    gpu_free(ON_GPU, src);
    gpu_free(ON_GPU, dst);
}

struct thread_run {
    rsd_exec *exec;
    char *src, *dst;
    bool queues; /* fills src in the stream behind the run, and waits; else leaves the run queued */
    int device;
};

enum { THREAD_NBYTES = 1 << 16, THREAD_HANDLE = 2 };

/* Runs an exec in a thread that has no current context. */
static void *run_in_thread(void *context)
{
    const struct thread_run *run = context;
    const char *src = run->src;
    char *dst = run->dst;
    OK(rsd_exec_run(run->exec, (const void *[]){src, src + THREAD_NBYTES / 2},
                    (void *[]){dst, dst + THREAD_NBYTES / 2}));
    gpu_use_device(run->device);
    if (run->queues) {
        gpu_fill_async(run->src, 0x77, THREAD_NBYTES, (void *)THREAD_HANDLE);
        gpu_stream_wait((void *)THREAD_HANDLE);
    }
    return NULL;
}

static void run_thread_to_end(struct thread_run *run)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_in_thread, run))
        CHECK(false, "pthread_create");
    else
        pthread_join(thread, NULL);
}

/* The handles cudaStreamLegacy and cudaStreamPerThread, with arrays of the last device. */
static void in_handles(void)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    struct thread_run run = {.queues = true, .device = gpu_ndevices() - 1};
    static unsigned char got[THREAD_NBYTES];
    gpu_use_device(run.device);
    char *first = gpu_new(ON_GPU, THREAD_NBYTES), *second = gpu_new(ON_GPU, THREAD_NBYTES);
    run.dst = gpu_new(ON_GPU, THREAD_NBYTES);
    OK(rsd_problem_parse("u8[65536] : 2:S0 -> 2:C(0,16)", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    OK(rsd_bind_threads(plan, NULL, &run.exec));
    for (uintptr_t handle = 1; handle <= THREAD_HANDLE; handle++) {
        CASE("runs in the stream of handle %d, in a thread without a context", (int)handle);
        OK(rsd_exec_set_stream(run.exec, (void *)handle));
        for (int round = 0; round < 2; round++) {
            gpu_fill_async(first, 0x10 + round, THREAD_NBYTES, NULL);
            run.src = first;
            run_thread_to_end(&run);
            gpu_stream_wait(NULL);
            gpu_get(ON_GPU, got, run.dst, THREAD_NBYTES);
            CHECK(got[0] == 0x10 + round && got[THREAD_NBYTES - 1] == 0x10 + round, "round %d: %d",
                  round, got[0]);
        }
    }
    CASE("runs of two threads in cudaStreamPerThread are ordered");
    gpu_fill_async(first, 0x51, THREAD_NBYTES, NULL);
    gpu_fill_async(second, 0x52, THREAD_NBYTES, NULL);
    gpu_stream_wait(NULL);
    run.src = first;
    run.queues = false;
    run_thread_to_end(&run);
    run.src = second;
    run.queues = true;
    run_thread_to_end(&run);
    gpu_stream_wait(NULL);
    gpu_get(ON_GPU, got, run.dst, THREAD_NBYTES);
    CHECK(got[0] == 0x52 && got[THREAD_NBYTES - 1] == 0x52, "%d", got[0]);
    rsd_exec_free(run.exec);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    gpu_free(ON_GPU, first);
    gpu_free(ON_GPU, second);
    gpu_free(ON_GPU, run.dst);
    gpu_use_device(0);
}

/* ---- what cannot work ---- */

static void refused(void)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec;
    OK(rsd_problem_parse("f32[64] : 1:R -> 1:R", &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    char *memory = gpu_new(ON_GPU, 1024);
    const void *from[] = {memory};
    void *to[] = {memory + 256}, *inside[] = {memory + 128};
    CASE("overlap on the device is refused");
    OK(rsd_bind_threads(plan, NULL, &exec));
    OK(rsd_exec_run(exec, from, to));
    FAILS(RSD_EINVAL, "overlaps", rsd_exec_run(exec, from, inside));
    rsd_exec_free(exec);

    CASE("without device memory a run fails, and the next exec works");
    OK(rsd_bind_threads(plan, NULL, &exec));
    gpu_take_memory();
    rsd_status status = rsd_exec_run(exec, from, to);
    gpu_release_memory();
    CHECK(status == RSD_ENOMEM && strstr(rsd_error(), "cuMemAlloc"), "%s: %s",
          rsd_status_name(status), rsd_error());
    rsd_exec_free(exec);
    OK(rsd_bind_threads(plan, NULL, &exec));
    OK(rsd_exec_run(exec, from, to));
    rsd_exec_free(exec);

    CASE("a forked process is refused");
    pid_t child = fork();
    if (child == 0) {
        status = rsd_bind_threads(plan, NULL, &exec);
        if (!status)
            status = rsd_exec_run(exec, from, to);
        _exit(status == RSD_EUNSUPPORTED && strstr(rsd_error(), "fork") ? 0 : 1);
    }
    int ended = 0;
    waitpid(child, &ended, 0);
    CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "status %d", ended);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    gpu_free(ON_GPU, memory);
}

int main(int argc, char **argv)
{
    (void)argc;
    if (!gpu_open(argv)) {
        puts("1..0 # SKIP libcuda.so.1 cannot be loaded");
        return 0;
    }
    gpu_start();
    struct cases cases = {begin_group, move_any, NULL};
    every_case(&cases);
    every_pair();
    in_streams();
    in_handles();
    refused();
    return tap_end();
}
