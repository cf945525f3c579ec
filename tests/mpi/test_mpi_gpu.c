/* test_mpi_gpu.c - device memory of several processes that changes or fails between runs.
 *
 *     mpirun -np N test_mpi_gpu SCENARIO...
 *
 * Rank 1 is the one that fails. After killed and sticky, nothing else can run. Runs on a GPU with RESHARD_GPU=1, else
 * on the emulator. */
#include "reshard_cuda.h"

#include "device_transport.h"
#include "gpu.h"
#include "oracle.h"
#include "scenario.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static rsd_layout *from, *to;
static rsd_plan *plan;
static struct memory src, dst;
static void *gpu_src, *gpu_dst;
static enum gpu_kind kind = ON_GPU;

/* ---- arrays ---- */

/* The plan of what follows, and its arrays in host memory. */
static void use_problem(const char *problem)
{
    if (rsd_problem_parse(problem, &from, &to) || rsd_plan_new(from, to, NULL, &plan))
        exit(1);
    src = oracle_memory(from, NULL);
    dst = oracle_memory(to, NULL);
    oracle_fill(from, NULL, &src);
}

/* All ranks send to all. */
static void use_transpose(void)
{
    char problem[100];
    snprintf(problem, sizeof problem, "f32[%d,64] : %d:S0 -> %d:S1", 64 * nranks, nranks, nranks);
    use_problem(problem);
    kind = ON_GPU;
}

static void new_arrays(void)
{
    gpu_src = gpu_new(kind, src.nbytes[rank]);
    gpu_dst = gpu_new(kind, dst.nbytes[rank]);
    gpu_put(kind, gpu_src, src.array[rank], src.nbytes[rank]);
}

static void free_arrays(void)
{
    gpu_free(kind, gpu_src);
    gpu_free(kind, gpu_dst);
}

static rsd_status bind_plan(rsd_exec **exec)
{
    rsd_exchange_options options = {.struct_nbytes = sizeof options, .timeout = test_timeout};
    return rsd_bind_mpi(plan, scenario_comm, &options, exec);
}

/* Runs, and checks the result. */
static rsd_status run_plan(rsd_exec *exec)
{
    const void *sources[] = {gpu_src};
    memset(dst.array[rank], 0x55, dst.nbytes[rank]);
    gpu_put(kind, gpu_dst, dst.array[rank], dst.nbytes[rank]);
    rsd_status status = rsd_exec_run(exec, sources, &gpu_dst);
    if (status)
        return status;
    gpu_get(kind, dst.array[rank], gpu_dst, dst.nbytes[rank]);
    expect(oracle_check_of(from, to, NULL, &dst, rank), "wrong elements", status);
    return status;
}

/* The GPU can still be used by this process: a move inside of it. */
static void move_alone(void)
{
    rsd_layout *a, *b;
    rsd_plan *alone;
    rsd_exec *exec;
    if (rsd_problem_parse("f32[64,64] : 1:R -> 1:R", &a, &b) || rsd_plan_new(a, b, NULL, &alone))
        exit(1);
    const rsd_plan *plans[] = {alone};
    const void *sources[] = {gpu_new(ON_GPU, 16384)};
    void *results[] = {gpu_new(ON_GPU, 16384)};
    rsd_status status = rsd_bind_threads_many(1, plans, NULL, NULL, &exec);
    if (!status)
        status = rsd_exec_run(exec, sources, results);
    expect(status == RSD_OK, "a move of this rank alone", status);
}

static int count_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int n = 0;
    while (directory && readdir(directory))
        n++;
    closedir(directory);
    return n;
}

/* An MPI that is CUDA-aware, as far as the library can tell, if the scenario says so. The emulator's memory cannot be
 * used by MPI, so nothing is run then. */
static int is_aware;
int MPIX_Query_cuda_support(void);
int MPIX_Query_cuda_support(void)
{
    return is_aware;
}

/* ---- scenarios ---- */

/* Moves a tensor over a transport that takes device memory. */
static void move_over(const rsd_transport *transport, const char *problem)
{
    rsd_exchange_options options = {
        .struct_nbytes = sizeof options, .timeout = test_timeout, .node = -1, .max_nbytes = 1};
    rsd_exec *exec = NULL;
    use_problem(problem);
    new_arrays();
    rsd_status status =
        rsd_bind_transport(1, (const rsd_plan *const *)&plan, NULL, transport, &options, &exec);
    for (int i = 0; i < 2 && !status; i++)
        status = run_plan(exec);
    expect(status == RSD_OK, problem, status);
    expect(strstr(rsd_exec_describe(exec), " 0 packed through pinned memory"),
           rsd_exec_describe(exec), status);
    rsd_exec_free(exec);
    free_arrays();
}

/* Messages lie on the device: copies, and terms of sums. Then the transport of rank 1 fails. */
static void transport(void)
{
    rsd_transport base = {.struct_nbytes = sizeof base}, aware = base;
    struct device_transport wrapped;
    rsd_exec *exec = NULL;
    if (rsd_mpi_transport(scenario_comm, &base))
        exit(1);
    expect(!base.exchange, "an MPI that takes memory of the host", RSD_OK);
    is_aware = 1;
    expect(!rsd_mpi_transport(scenario_comm, &aware) && aware.exchange && aware.device == -1,
           "an MPI that is CUDA-aware", RSD_OK);
    is_aware = 0;
    for (int32_t device = -1; device <= 0; device++) {
        rsd_transport over = device_transport_of(&wrapped, &base, device);
        move_over(&over, "f32[256,64] : 4:S0 -> 4:S1");
        move_over(&over, "f32[256,64] : 4:P -> 4:S1");
        move_over(&over, "bf16[100,30] : 2x2:P,S0 -> 2x2:S1,R");
        move_over(&over, "f64[64,60] : 4:R -> 4:S0"); /* no messages */
        expect(wrapped.nmessages > 0, "messages on the device", RSD_OK);
    }
    rsd_transport over = device_transport_of(&wrapped, &base, 0);
    rsd_exchange_options options = {
        .struct_nbytes = sizeof options, .timeout = test_timeout, .node = -1};
    use_problem("f32[256,64] : 4:S0 -> 4:S1");
    new_arrays();
    rsd_status status =
        rsd_bind_transport(1, (const rsd_plan *const *)&plan, NULL, &over, &options, &exec);
    wrapped.fails = rank == BAD;
    if (!status)
        status = rsd_exec_run(exec, (const void *const *)&gpu_src, &gpu_dst);
    expect(rank == BAD ? status == RSD_EIO && says("exchange fails")
                       : (status == RSD_ETIMEOUT || status == RSD_EPEER) && says("rank 1"),
           "a transport that fails", status);
    rsd_exec_free(exec);
}

/* Arrays are freed and made again between runs: often at the same address, in another allocation. */
static void moved(void)
{
    rsd_exec *exec = NULL;
    int descriptors = 0;
    use_transpose();
    for (int k = 0; k < 2; k++) {
        kind = k ? ON_BLOCKS : ON_GPU;
        rsd_status status = bind_plan(&exec);
        expect(status == RSD_OK, "bind", status);
        for (int i = 0; i < 12 && !status; i++) {
            new_arrays();
            status = run_plan(exec);
            expect(status == RSD_OK, "a run with other arrays", status);
            meet_ranks();
            free_arrays();
            if (i == 6) /* mappings of the last arrays are kept */
                descriptors = count_descriptors();
        }
        expect(count_descriptors() <= descriptors, "descriptors are not closed", RSD_OK);
        rsd_exec_free(exec);
    }
}

/* Arrays are written by work that is still queued when the run starts: in the stream of the run, in the default stream,
 * or in a stream that the default stream waits for. */
static void ordered(void)
{
    enum { SLOW_NBYTES = 64 << 20 };
    rsd_exec *exec = NULL;
    use_transpose();
    void *own = gpu_stream_new(), *blocking = gpu_blocking_stream_new(),
         *slow = gpu_new(ON_GPU, SLOW_NBYTES);
    rsd_status status = bind_plan(&exec);
    size_t part = dst.nbytes[rank] / (size_t)nranks;
    new_arrays();
    for (int i = 0; i < 9 && !status; i++) {
        void *writer = i % 3 == 0 ? blocking : i % 3 == 1 ? own : NULL;
        const void *sources[] = {gpu_src};
        if (i >= 3) /* the first runs use the default stream of themselves */
            rsd_exec_set_stream(exec, i % 3 == 1 ? own : NULL);
        else if (writer == own)
            continue;
        for (int k = 0; k < (gpu_is_emulated() ? 1 : 100); k++)
            gpu_fill_async(slow, k, SLOW_NBYTES, writer);
        gpu_fill_async(gpu_src, 16 * i + rank, src.nbytes[rank], writer);
        status = rsd_exec_run(exec, sources, &gpu_dst);
        expect(status == RSD_OK, "a run behind queued work", status);
        gpu_get(kind, dst.array[rank], gpu_dst, dst.nbytes[rank]);
        for (size_t at = 0; at < dst.nbytes[rank]; at++)
            if (((unsigned char *)dst.array[rank])[at] != 16 * i + (int)(at / part)) {
                expect(false, "the run did not wait", RSD_OK);
                break;
            }
    }
    rsd_exec_free(exec);
    gpu_free(ON_GPU, slow);
}

/* Rank 1 terminates while the others read its memory. */
static void killed(void)
{
    rsd_exec *exec = NULL;
    use_transpose();
    new_arrays();
    rsd_status status = bind_plan(&exec);
    expect(status == RSD_OK && !run_plan(exec), "bind and run", status);
    if (rank == BAD) {
        const void *sources[] = {gpu_src};
        rsd_exec_start(exec, sources, &gpu_dst);
        scenario_leave();
        raise(SIGKILL);
    }
    for (int i = 0; i < 3 && !status; i++) /* the first run may have received everything */
        status = run_plan(exec);
    expect((status == RSD_ETIMEOUT || status == RSD_EPEER) && says("rank 1"), "killed", status);
    rsd_exec_free(exec);
    move_alone();
}

/* Rank 1 has no device memory for the tables of the exec. Others may have none either if all have one GPU. */
static void no_memory(void)
{
    rsd_exec *exec = NULL, *other = NULL;
    use_transpose();
    new_arrays();
    rsd_status status = bind_plan(&exec);
    meet_ranks();
    if (rank == BAD)
        gpu_take_memory();
    meet_ranks();
    rsd_status failed = run_plan(exec);
    expect(failed != RSD_OK && (rank == BAD || says("rank ") || failed == RSD_ENOMEM),
           "no device memory", failed);
    meet_ranks();
    if (rank == BAD)
        gpu_release_memory();
    rsd_exec_free(exec);
    meet_ranks();
    if (!status)
        status = bind_plan(&other);
    expect(status == RSD_OK && !run_plan(other), "the next exec", status);
    rsd_exec_free(other);
}

/* Makes every call of CUDA fail from now on, or from the next kernel on. */
static void break_gpu(void)
{
    if (gpu_is_emulated()) {
        setenv("EMULATED_LAUNCH_FAILS", "1", 1);
        return;
    }
    void *address = NULL, *parameters[] = {&address};
    gpu_launch(
        gpu_kernel_new("extern \"C\" __global__ void wrong(volatile int *p) { *p = 1; }", "wrong"),
        1, parameters, NULL);
}

/* A kernel of rank 1 fails, and every call of CUDA on that rank from then on. */
static void sticky(void)
{
    rsd_exec *exec = NULL;
    use_transpose();
    new_arrays();
    const void *sources[] = {gpu_src};
    rsd_status status = bind_plan(&exec);
    expect(status == RSD_OK && !run_plan(exec), "bind and run", status);
    if (rank == BAD)
        break_gpu();
    for (int i = 0; i < 3 && !status; i++)
        status = rsd_exec_run(exec, sources, &gpu_dst);
    expect(rank == BAD ? status == RSD_EIO && says("CUDA") : status != RSD_OK && says("rank 1"),
           "a kernel that fails", status);
    if (rank == BAD)
        expect(rsd_exec_run(exec, (const void *const *)&gpu_src, &gpu_dst) != RSD_OK, "once more",
               status);
    else
        move_alone();
}

int main(int argc, char **argv)
{
    static const struct scenario scenarios[] = {{"moved", moved},         {"ordered", ordered},
                                                {"transport", transport}, {"killed", killed},
                                                {"no_memory", no_memory}, {"sticky", sticky}};
    if (!gpu_open(argv))
        return 1;
    scenario_start(&argc, &argv);
    gpu_start();
    scenario_run_all(argv + 1, sizeof scenarios / sizeof *scenarios, scenarios);
}
