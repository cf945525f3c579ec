/* test_devices.c - several devices: streams and arrays of one process, and ranks that are threads with a device each. Runs
 * on GPUs with RESHARD_GPU=1, if there are two or more, else on the emulator, which has three: 0 and 1 can access each
 * other's memory, 2 is alone. */
#include "gpu.h"
#include "reshard_cuda.h"
#include "tap.h"
#include "workers.h"

#include <stdlib.h>
#include <string.h>

/* ---- one process ---- */

static rsd_exec *bind_problem(const char *problem, rsd_layout **a, rsd_layout **b, rsd_plan **plan)
{
    rsd_exec *exec = NULL;
    OK(rsd_problem_parse(problem, a, b));
    OK(rsd_plan_new(*a, *b, NULL, plan));
    OK(rsd_bind_threads(*plan, NULL, &exec));
    return exec;
}

static void free_problem(rsd_exec *exec, rsd_layout *a, rsd_layout *b, rsd_plan *plan)
{
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static bool has_bytes(const void *there, unsigned char value, size_t nbytes)
{
    unsigned char *bytes = malloc(nbytes);
    bool same = bytes != NULL;
    gpu_get(ON_GPU, bytes, there, nbytes);
    for (size_t i = 0; i < nbytes && same; i++)
        same = bytes[i] == value;
    free(bytes);
    return same;
}

/* The stream is of the device of the second array. Kernels must be those of the stream's device. */
static void in_stream_of(int device)
{
    enum { N = 1 << 14 };
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec = bind_problem("u8[32768] : 2:S0 -> 2:C(0,16)", &a, &b, &plan);
    char *src[2], *dst[2];
    CASE("a run in a stream of device %d, with arrays of devices 0 and 1", device);
    for (int i = 0; i < 2; i++) {
        gpu_use_device(i);
        src[i] = gpu_new(ON_GPU, N);
        dst[i] = gpu_new(i ? ON_GPU : ON_BLOCKS, N);
    }
    gpu_use_device(device);
    void *stream = gpu_stream_new();
    OK(rsd_exec_set_stream(exec, stream));
    gpu_fill_async(src[device], 0x21, N, stream);
    gpu_use_device(1 - device);
    gpu_fill_async(src[1 - device], 0x21, N, NULL);
    gpu_stream_wait(NULL);
    OK(rsd_exec_run(exec, (const void *[]){src[0], src[1]}, (void *[]){dst[0], dst[1]}));
    gpu_use_device(device);
    gpu_fill_async(src[device], 0x77, N, stream); /* after the run */
    gpu_stream_wait(stream);
    CHECK(has_bytes(dst[0], 0x21, N) && has_bytes(dst[1], 0x21, N), "device %d", device);
    free_problem(exec, a, b, plan);
    for (int i = 0; i < 2; i++) {
        gpu_free(ON_GPU, src[i]);
        gpu_free(i ? ON_GPU : ON_BLOCKS, dst[i]);
    }
    gpu_use_device(0);
}

/* Only the emulator has such a device for certain. */
static void without_access(void)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec = bind_problem("f32[64] : 1:R -> 1:R", &a, &b, &plan);
    CASE("devices that cannot access each other are refused by name");
    gpu_use_device(2);
    char *src = gpu_new(ON_GPU, 256);
    gpu_use_device(0);
    char *dst = gpu_new(ON_GPU, 256);
    FAILS(RSD_EUNSUPPORTED, "CUDA device 2 cannot access the memory of device 0",
          rsd_exec_run(exec, (const void *[]){src}, (void *[]){dst}));
    free_problem(exec, a, b, plan);
    gpu_free(ON_GPU, src);
    gpu_free(ON_GPU, dst);
}

/* ---- ranks that are threads ---- */

struct move {
    rsd_layout *from, *to;
    rsd_plan *plan;
    struct memory src, dst;
    enum gpu_kind kind;
};

/* Each rank has its arrays on a device of its own, as the ranks of torchrun have. */
static rsd_status move_rank(struct worker *worker)
{
    const struct move *move = worker->task;
    int32_t rank = worker->transport.rank;
    rsd_exchange_options options = {.struct_nbytes = sizeof options, .timeout = 20};
    rsd_exec *exec = NULL;
    gpu_use_device(rank % gpu_ndevices());
    void *src = gpu_new(move->kind, move->src.nbytes[rank]),
         *dst = gpu_new(move->kind, move->dst.nbytes[rank]);
    rsd_status status = rsd_bind_transport(1, (const rsd_plan *const *)&move->plan, NULL,
                                           &worker->transport, &options, &exec);
    for (int run = 0; run < 2 && !status; run++) {
        gpu_put(move->kind, src, move->src.array[rank], move->src.nbytes[rank]);
        gpu_put(move->kind, dst, move->dst.array[rank], move->dst.nbytes[rank]);
        status = rsd_exec_run(exec, (const void *[]){src}, &dst);
    }
    if (!status) {
        gpu_get(move->kind, move->dst.array[rank], dst, move->dst.nbytes[rank]);
        worker_add_line(worker, rsd_exec_describe(exec));
    }
    rsd_exec_free(exec);
    gpu_free(move->kind, src);
    gpu_free(move->kind, dst);
    return status;
}

/* Moves a tensor between 4 ranks. Ranks 0, 1 and 3 can read each other's memory on the emulator, rank 2 that of none. */
static void between_ranks(const char *problem, enum gpu_kind kind)
{
    struct move move = {.kind = kind};
    struct workers workers;
    OK(rsd_problem_parse(problem, &move.from, &move.to));
    OK(rsd_plan_new(move.from, move.to, NULL, &move.plan));
    move.src = oracle_memory(move.from, NULL);
    move.dst = oracle_memory(move.to, NULL);
    oracle_fill(move.from, NULL, &move.src);
    workers_run(&workers, 4, move_rank, &move, 0);
    for (int32_t rank = 0; rank < workers.n; rank++) {
        const struct worker *worker = &workers.list[rank];
        CHECK(!worker->status, "%s, rank %d: %s", problem, (int)rank, worker->message);
        if (!worker->status && gpu_is_emulated())
            CHECK(strstr(worker->lines, rank == 2 ? " 0 messages read from device memory"
                                                  : " 2 messages read from device memory"),
                  "%s, rank %d: %s", problem, (int)rank, worker->lines);
    }
    CHECK(oracle_check(move.from, move.to, NULL, &move.dst), "%s", problem);
    workers_free(&workers);
    oracle_memory_free(&move.src);
    oracle_memory_free(&move.dst);
    rsd_plan_free(move.plan);
    rsd_layout_free(move.from);
    rsd_layout_free(move.to);
}

int main(int argc, char **argv)
{
    (void)argc;
    if (!gpu_open(argv)) {
        puts("1..0 # SKIP libcuda.so.1 cannot be loaded");
        return 0;
    }
    gpu_start();
    if (gpu_ndevices() < 2) {
        puts("1..0 # SKIP one device only");
        return 0;
    }
    in_stream_of(0);
    in_stream_of(1);
    if (gpu_is_emulated())
        without_access();
    CASE("ranks that are threads, with a device each");
    between_ranks("f32[64,60] : 4:S0 -> 4:S1", ON_GPU);
    between_ranks("f32[64,60] : 4:S0 -> 4:S1", ON_BLOCKS);
    between_ranks("bf16[100,36] : 4:S1 -> 4:S0", ON_GPU);
    return tap_end();
}
