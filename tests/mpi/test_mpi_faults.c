/* test_mpi_faults.c - failures of one rank, which all other ranks must report within the time-out.
 *
 *     mpirun -np N test_mpi_faults SCENARIO messages|shared|hosts
 *
 * Rank 1 is the one that fails. Every other rank prints "good" if its results were as expected. */
#include "reshard_mpi.h"

#include "expect.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BAD = 1 };
static rsd_exchange_options options = {.struct_nbytes = sizeof options, .timeout = 2};
static const char *const names[] = {"layers.0.weight", "layers.0.bias"};
static rsd_layout *src_layout[2], *dst_layout[2];
static rsd_plan *plans[2];
static int64_t memory[2][2][1 << 16];
static const void *src[] = {memory[0][0], memory[0][1]};
static void *dst[] = {memory[1][0], memory[1][1]};

/* ---- an allocation that fails ---- */

static long allocations, failing = -1;
void *__real_calloc(size_t count, size_t nbytes);
void *__wrap_calloc(size_t count, size_t nbytes);
void *__real_realloc(void *old, size_t nbytes);
void *__wrap_realloc(void *old, size_t nbytes);

void *__wrap_calloc(size_t count, size_t nbytes)
{
    return allocations++ == failing ? NULL : __real_calloc(count, nbytes);
}

void *__wrap_realloc(void *old, size_t nbytes)
{
    return allocations++ == failing ? NULL : __real_realloc(old, nbytes);
}

/* ---- plans ---- */

static void make_plans(const char *dtype, const char *from)
{
    char problem[2][100];
    snprintf(problem[0], sizeof problem[0], "%s[64,64] : %d:%s -> %d:S1", dtype, nranks, from,
             nranks);
    snprintf(problem[1], sizeof problem[1], "f32[%d] : %d:S0 -> %d:R", nranks * 100, nranks,
             nranks);
    for (int i = 0; i < 2; i++)
        if (rsd_problem_parse(problem[i], &src_layout[i], &dst_layout[i]) ||
            rsd_plan_new(src_layout[i], dst_layout[i], NULL, &plans[i]))
            expect(false, "a plan", RSD_EINVAL);
}

static rsd_status bind_plans(rsd_exec **exec)
{
    return rsd_bind_mpi_many(2, (const rsd_plan *const *)plans, NULL, MPI_COMM_WORLD, &options,
                             exec);
}

/* Returns an exec after a successful run. */
static rsd_exec *bound(void)
{
    rsd_exec *exec = NULL;
    make_plans("f32", "S0");
    rsd_status status = bind_plans(&exec);
    expect(status == RSD_OK && !rsd_exec_run(exec, src, dst), "bind and run", status);
    if (!exec) {
        fflush(stdout);
        _exit(1);
    }
    return exec;
}

/* ---- scenarios ---- */

static void other_plan(void)
{
    rsd_exec *exec = NULL;
    make_plans(rank == BAD ? "f64" : "f32", "S0");
    rsd_status status = bind_plans(&exec);
    expect(status == RSD_EMISMATCH && says("plan 0 differs: rank 0 has f32[64,64]") &&
               says("rank 1 has f64[64,64]"),
           "another plan", status);
    make_plans("f32", "S0");
    status = rsd_bind_mpi_many(rank == BAD ? 1 : 2, (const rsd_plan *const *)plans, NULL,
                               MPI_COMM_WORLD, &options, &exec);
    expect(status == RSD_EMISMATCH && says("rank 1 has 1 plans, rank 0 has 2"), "fewer plans",
           status);
    status = bind_plans(&exec); /* the transport can still be used */
    expect(status == RSD_OK && !rsd_exec_run(exec, src, dst), "the right plans", status);
    rsd_exec_free(exec);
}

static void bad_argument(void)
{
    rsd_exec *exec = NULL;
    make_plans("f32", "S0");
    rsd_status status = bind_plans(&exec);
    expect(status == RSD_OK, "bind", status);
    for (int i = 0; i < 3; i++) {
        const void *wrong[] = {src[0], i == 1 && rank == BAD ? NULL : src[1]};
        status = rsd_exec_run(exec, wrong, dst);
        if (i != 1)
            expect(status == RSD_OK, "a good run", status);
        else
            expect(status == RSD_EINVAL && says("rank 1: source array 1 is NULL"),
                   "the mistake of rank 1", status);
    }
    for (int i = 0; i < 2; i++) {
        const void *same[] = {rank == BAD ? dst[0] : src[0], src[1]};
        status = rsd_exec_run(exec, i ? src : same, dst);
        if (i)
            expect(status == RSD_OK, "a good run", status);
        else
            expect(status == RSD_EINVAL && says("rank 1: ") && says("array 0 overlaps a"),
                   "overlapping arrays of rank 1", status);
    }
    rsd_exec_free(exec);
}

/* Every allocation of a bind fails once. Without shared memory, messages are used, and the bind succeeds. */
static void no_memory(void)
{
    make_plans("f32", "P");
    for (int n = 0, more = 1; more; n++) {
        rsd_exec *exec = NULL;
        allocations = 0;
        failing = rank == BAD ? n : -1;
        rsd_status status = bind_plans(&exec);
        failing = -1;
        int failed = status != RSD_OK, somebody, everybody;
        MPI_Allreduce(&failed, &somebody, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
        MPI_Allreduce(&failed, &everybody, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        expect(somebody == everybody, "some ranks bound and some did not", status);
        if (failed)
            expect(status == RSD_ENOMEM ||
                       (status == RSD_ETIMEOUT && rank != BAD && says("rank 1")),
                   "no memory on rank 1", status);
        else
            expect(!rsd_exec_run(exec, src, dst), "a run", status);
        rsd_exec_free(exec);
        more = allocations > n;
        MPI_Bcast(&more, 1, MPI_INT, BAD, MPI_COMM_WORLD);
        if (!more)
            expect(!failed, "at last", status);
    }
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void late(void)
{
    rsd_exec *exec = NULL;
    make_plans("f32", "S0");
    options.names = names;
    rsd_status status = bind_plans(&exec);
    expect(status == RSD_OK && !rsd_exec_run(exec, src, dst), "bind and run", status);
    if (rank == BAD)
        sleep(6);
    double start = now();
    status = rsd_exec_run(exec, src, dst);
    if (rank != BAD)
        expect(status == RSD_ETIMEOUT && says("rank 1 has not entered the call") &&
                   says("layers.0"),
               "late", status);
    else
        expect(status == RSD_ETIMEOUT || status == RSD_EPEER, "alone", status);
    expect(now() - start < 30, "it took too long", status);
    if (status)
        expect(rsd_exec_run(exec, src, dst) == RSD_EINVAL && says("can only be freed"),
               "after that", status);
    rsd_exec_free(exec);
}

/* Rank 1 stops in the middle of a run. Ranks that have received everything continue with the next run. */
static void stalled(void)
{
    rsd_status status = RSD_OK;
    rsd_exec *exec = bound();
    if (rank == BAD) {
        rsd_exec_start(exec, src, dst);
        sleep(6);
        return;
    }
    for (int i = 0; i < 3 && !status; i++)
        status = rsd_exec_run(exec, src, dst);
    expect(status == RSD_ETIMEOUT && says("rank 1"), "stalled", status);
}

static void killed(void)
{
    rsd_status status = RSD_OK;
    rsd_exec *exec = bound();
    if (rank == BAD) {
        rsd_exec_start(exec, src, dst);
        raise(SIGKILL);
    }
    for (int i = 0; i < 3 && !status; i++) /* the first run may have received everything */
        status = rsd_exec_run(exec, src, dst);
    expect((status == RSD_ETIMEOUT || status == RSD_EPEER) && says("rank 1"), "killed", status);
}

/* Messages of a call that has returned must not be written to its variables on the stack. */
static void keep_stack(void)
{
    volatile unsigned char stack[1 << 16];
    int found, wrong = 0;
    for (size_t i = 0; i < sizeof stack; i++)
        stack[i] = 0xab;
    for (double since = MPI_Wtime(); MPI_Wtime() - since < 3; usleep(1000))
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
    for (size_t i = 0; i < sizeof stack; i++)
        wrong += stack[i] != 0xab;
    expect(wrong == 0, "memory that was freed is written to", RSD_OK);
}

static void late_at_bind(void)
{
    rsd_exec *exec = NULL;
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    make_plans("f32", "S0");
    rsd_status status = rsd_mpi_transport(MPI_COMM_WORLD, &transport);
    expect(status == RSD_OK, "a transport", status);
    sleep(rank == BAD ? 3 : 0);
    status = bind_plans(&exec);
    if (rank != BAD)
        expect(status == RSD_ETIMEOUT && says("rank 1"), "late at bind", status);
    keep_stack();
}

/* The first call on a communicator. Its time-out is also used from options of an older version, which are shorter. */
static void late_at_first(void)
{
    rsd_exec *exec = NULL;
    options.struct_nbytes = offsetof(rsd_exchange_options, arena);
    make_plans("f32", "S0");
    sleep(rank == BAD ? 3 : 0);
    rsd_status status = bind_plans(&exec);
    if (rank == BAD)
        return;
    expect(status == RSD_ETIMEOUT && says("rank 1 has not entered the call"), "late at first",
           status);
    status = bind_plans(&exec);
    expect(status == RSD_EPEER && says("use another communicator"), "once more", status);
}

/* The time between start and wait does not count for the time-out. */
static void slow_callers(void)
{
    rsd_exec *exec = NULL;
    make_plans("f32", "S0");
    rsd_status status = bind_plans(&exec);
    expect(status == RSD_OK && !rsd_exec_start(exec, src, dst), "bind and start", status);
    usleep(rank == BAD ? 3000000 : 2500000);
    status = rsd_exec_wait(exec);
    expect(status == RSD_OK, "after a while", status);
    rsd_exec_free(exec);
}

/* Rank 0 receives from ranks 1 and 2. Rank 1 ends after its send, rank 2 is slow. */
static void leaving(void)
{
    rsd_exec *exec = NULL;
    if (rsd_problem_parse("f32[2,100] : 2 ranks=1-2:S0 -> 1:R", &src_layout[0], &dst_layout[0]) ||
        rsd_plan_new(src_layout[0], dst_layout[0], NULL, &plans[0]))
        expect(false, "a plan", RSD_EINVAL);
    rsd_status status = rsd_bind_mpi(plans[0], MPI_COMM_WORLD, &options, &exec);
    expect(status == RSD_OK, "bind", status);
    rsd_exec_start(exec, src, dst);
    usleep(rank == 2 ? 1500000 : 0);
    status = rsd_exec_wait(exec);
    expect(status == RSD_OK, "a run whose sender has ended", status);
    if (rank == 1) {
        printf("good 1\n");
        fflush(stdout);
        _exit(0);
    }
}

/* The communicator may be freed after the bind. */
static void freed_communicator(void)
{
    MPI_Comm passing, other;
    rsd_exec *exec = NULL;
    make_plans("f32", "S0");
    MPI_Comm_dup(MPI_COMM_WORLD, &passing);
    rsd_status status = rsd_bind_mpi(plans[0], passing, &options, &exec);
    MPI_Comm_free(&passing);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &other); /* may take its place */
    for (int i = 0; i < 3 && !status; i++)
        status = rsd_exec_run(exec, src, dst);
    expect(status == RSD_OK, "a run", status);
    rsd_exec_free(exec);
    MPI_Comm_free(&other);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } scenarios[] = {{"other_plan", other_plan},
                     {"bad_argument", bad_argument},
                     {"no_memory", no_memory},
                     {"late", late},
                     {"killed", killed},
                     {"stalled", stalled},
                     {"late_at_bind", late_at_bind},
                     {"late_at_first", late_at_first},
                     {"slow_callers", slow_callers},
                     {"leaving", leaving},
                     {"freed_communicator", freed_communicator}};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    bool found = false;
    if (argc > 2 && strcmp(argv[2], "messages") == 0)
        options.node = -1;
    if (argc > 2 && strcmp(argv[2], "hosts") == 0) /* as if two ranks were on each host */
        options.node = 1 + rank / 2;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (argc > 1 && strcmp(argv[1], scenarios[i].name) == 0) {
            scenarios[i].run();
            found = true;
        }
    if (good && found)
        printf("good %d\n", rank);
    fflush(stdout);
    sleep(3); /* a rank that ends earlier would be reported instead of rank 1 */
    _exit(0); /* with a dead rank MPI_Finalize would wait */
}
