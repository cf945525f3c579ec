/* test_mpi_faults.c - failures of one rank, which all other ranks must report within the time-out.
 *
 *     mpirun -np N test_mpi_faults messages|shared|hosts SCENARIO...
 *
 * Rank 1 is the one that fails. After late_at_first, leaving and killed, nothing else can run. */
#include "scenario.h"

#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static rsd_exchange_options options;
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
    return rsd_bind_mpi_many(2, (const rsd_plan *const *)plans, NULL, scenario_comm, &options,
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
                               scenario_comm, &options, &exec);
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
        meet_ranks();
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

static void late(void)
{
    rsd_exec *exec = NULL;
    make_plans("f32", "S0");
    options.names = names;
    rsd_status status = bind_plans(&exec);
    expect(status == RSD_OK && !rsd_exec_run(exec, src, dst), "bind and run", status);
    if (rank == BAD)
        await_others();
    status = rsd_exec_run(exec, src, dst);
    if (rank != BAD)
        expect(status == RSD_ETIMEOUT && says("rank 1 has not entered the call") &&
                   says("layers.0"),
               "late", status);
    else
        expect(status == RSD_ETIMEOUT || status == RSD_EPEER, "alone", status);
    set_done();
    if (status)
        expect(rsd_exec_run(exec, src, dst) == RSD_EINVAL && says("can only be freed"),
               "after that", status);
    meet_ranks(); /* rank 1 uses the shared memory of the others */
    rsd_exec_free(exec);
}

/* Rank 1 stops in the middle of a run. Ranks that have received everything continue with the next run. */
static void stalled(void)
{
    rsd_status status = RSD_OK;
    rsd_exec *exec = bound();
    if (rank == BAD) {
        rsd_exec_start(exec, src, dst);
        await_others();
        return;
    }
    for (int i = 0; i < 3 && !status; i++)
        status = rsd_exec_run(exec, src, dst);
    expect(status == RSD_ETIMEOUT && says("rank 1"), "stalled", status);
    set_done();
}

static void killed(void)
{
    rsd_status status = RSD_OK;
    rsd_exec *exec = bound();
    if (rank == BAD) {
        rsd_exec_start(exec, src, dst);
        scenario_leave();
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
    int wrong = 0;
    for (size_t i = 0; i < sizeof stack; i++)
        stack[i] = 0xab;
    for (int more = 500; more > 0; more -= is_done(BAD))
        pause_rank();
    for (size_t i = 0; i < sizeof stack; i++)
        wrong += stack[i] != 0xab;
    expect(wrong == 0, "memory that was freed is written to", RSD_OK);
}

static void late_at_bind(void)
{
    rsd_exec *exec = NULL;
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    make_plans("f32", "S0");
    rsd_status status = rsd_mpi_transport(scenario_comm, &transport);
    expect(status == RSD_OK, "a transport", status);
    if (rank == BAD)
        await_others();
    status = bind_plans(&exec);
    if (rank != BAD)
        expect(status == RSD_ETIMEOUT && says("rank 1"), "late at bind", status);
    take_no_part(); /* rank 1 waits alone */
    set_done();
    keep_stack();
}

/* The first call on a communicator. Its time-out is also used from options of an older version, which are shorter. */
static void late_at_first(void)
{
    rsd_exec *exec = NULL;
    options.struct_nbytes = offsetof(rsd_exchange_options, arena);
    make_plans("f32", "S0");
    if (rank == BAD)
        await_others();
    rsd_status status = bind_plans(&exec);
    if (rank == BAD)
        return;
    expect(status == RSD_ETIMEOUT && says("rank 1 has not entered the call"), "late at first",
           status);
    status = bind_plans(&exec);
    expect(status == RSD_EPEER && says("use another communicator"), "once more", status);
    set_done();
}

/* The time between start and wait does not count for the time-out, and ranks wait less than that for rank 1. */
static void slow_callers(void)
{
    rsd_exec *exec = NULL;
    make_plans("f32", "S0");
    rsd_status status = bind_plans(&exec);
    expect(status == RSD_OK, "bind", status);
    if (rank != BAD)
        rsd_exec_start(exec, src, dst);
    meet_ranks();
    clock_skip(2 * test_timeout);
    meet_ranks();
    if (rank == BAD) {
        let_others_wait(0.3);
        rsd_exec_start(exec, src, dst);
    }
    status = rsd_exec_wait(exec);
    expect(status == RSD_OK, "after a while", status);
    rsd_exec_free(exec);
}

/* Rank 0 receives from ranks 1 and 2. Rank 1 ends after its send. Rank 2 waits until rank 0 has looked for the process
 * of rank 1 twice. */
static void leaving(void)
{
    rsd_exec *exec = NULL;
    int pid = getpid();
    MPI_Bcast(&pid, 1, MPI_INT, 1, MPI_COMM_WORLD);
    if (rsd_problem_parse("f32[2,100] : 2 ranks=1-2:S0 -> 1:R", &src_layout[0], &dst_layout[0]) ||
        rsd_plan_new(src_layout[0], dst_layout[0], NULL, &plans[0]))
        expect(false, "a plan", RSD_EINVAL);
    rsd_status status = rsd_bind_mpi(plans[0], scenario_comm, &options, &exec);
    expect(status == RSD_OK, "bind", status);
    rsd_exec_start(exec, src, dst);
    if (rank == 2) {
        while (kill(pid, 0) == 0)
            pause_rank();
        let_others_wait(0.6);
    }
    status = rsd_exec_wait(exec);
    expect(status == RSD_OK, "a run whose sender has ended", status);
    if (rank != BAD)
        return;
    scenario_leave();
    _exit(0);
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
    static const struct scenario scenarios[] = {{"other_plan", other_plan},
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
    scenario_start(&argc, &argv);
    options = (rsd_exchange_options){.struct_nbytes = sizeof options, .timeout = test_timeout};
    if (argc > 1 && strcmp(argv[1], "messages") == 0)
        options.node = -1;
    if (argc > 1 && strcmp(argv[1], "hosts") == 0) /* as if two ranks were on each host */
        options.node = 1 + rank / 2;
    scenario_run_all(argv + (argc > 1 ? 2 : 1), sizeof scenarios / sizeof *scenarios, scenarios);
}
