/* test_hosts.c - plans between hosts: the network interfaces count the bytes that the plan reports.
 *
 *     mpirun ... test_hosts INTERFACE       rank 0 prints one TAP line per problem
 */
#include "reshard_mpi.h"

#include "oracle.h"
#include "tap.h"

#include <stdlib.h>

static int rank, nranks;
static int32_t *node_of;
static const char *interface;

/* Returns the bytes that this host has sent, counted by one rank per host. */
static double sent_by_host(void)
{
    char path[200];
    double bytes = 0;
    snprintf(path, sizeof path, "/sys/class/net/%s/statistics/tx_bytes", interface);
    FILE *file = node_of[rank] == rank ? fopen(path, "r") : NULL;
    if (file) {
        if (fscanf(file, "%lf", &bytes) != 1)
            bytes = -1e18;
        fclose(file);
    } else if (node_of[rank] == rank) {
        bytes = -1e18;
    }
    return bytes;
}

static double sent_by_all(void)
{
    double own, all;
    MPI_Barrier(MPI_COMM_WORLD);
    own = sent_by_host();
    MPI_Allreduce(&own, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

static long worst(long own)
{
    long all;
    MPI_Allreduce(&own, &all, 1, MPI_LONG, MPI_MAX, MPI_COMM_WORLD);
    return all;
}

/* Moves a tensor, and compares the bytes sent with the plan. TCP, IP and Ethernet add headers and acknowledgements. */
static void move(const char *problem, bool in_arena)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec = NULL;
    rsd_plan_options with = {.struct_nbytes = sizeof with, .nranks = nranks, .node_of = node_of};
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    if (rsd_problem_parse(problem, &a, &b) || rsd_plan_new(a, b, &with, &plan) ||
        rsd_plan_totals(plan, &totals)) {
        CHECK(false, "%s: %s", problem, rsd_error());
        return;
    }
    struct memory src = oracle_memory(a, NULL), dst = oracle_memory(b, NULL);
    oracle_fill(a, NULL, &src);
    int64_t first_src, first_dst, n;
    rsd_layout_arrays_of(a, rank, &first_src, &n);
    rsd_layout_arrays_of(b, rank, &first_dst, &n);
    rsd_arena *arena = NULL;
    rsd_exchange_options options = {.struct_nbytes = sizeof options, .timeout = 60};
    void *from = src.array[first_src];
    if (in_arena && !rsd_arena_new((int64_t)src.nbytes[first_src] + 64, &arena) &&
        !rsd_arena_alloc(arena, (int64_t)src.nbytes[first_src], &from))
        memcpy(from, src.array[first_src], src.nbytes[first_src]);
    options.arena = arena;
    rsd_status status = rsd_bind_mpi(plan, MPI_COMM_WORLD, &options, &exec);
    if (!status)
        status =
            rsd_exec_run(exec, (const void *const *)&from, &dst.array[first_dst]); /* connects */
    double before = sent_by_all();
    for (int i = 0; i < 3 && !status; i++)
        status = rsd_exec_run(exec, (const void *const *)&from, &dst.array[first_dst]);
    double crossed = (sent_by_all() - before) / 3;
    int64_t least =
        totals.nbytes_crossed_least >= 0 ? totals.nbytes_crossed_least : totals.nbytes_crossed;
    bool right = !status && oracle_check_of(a, b, NULL, &dst, rank);
    if (!right)
        printf("# rank %d: %s: %s\n", rank, problem, status ? rsd_error() : "wrong elements");
    long bad = worst(!right);
    if (rank == 0) {
        CASE("%s%s", problem, in_arena ? ", from arenas" : "");
        printf("# crossed %.0f bytes, the least is %lld: %.4f; %s\n", crossed, (long long)least,
               crossed / (double)least, exec ? rsd_exec_describe(exec) : "");
        CHECK(!bad);
        CHECK(crossed >= (double)least, "less than there is to send was counted");
        CHECK(crossed <= 1.05 * (double)least, "%.0f bytes crossed, the least is %lld", crossed,
              (long long)least);
    }
    rsd_exec_free(exec);
    rsd_arena_free(arena);
    oracle_memory_free(&src);
    oracle_memory_free(&dst);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

int main(int argc, char **argv)
{
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    interface = argc > 1 ? argv[1] : "eth0";
    node_of = calloc((size_t)nranks, sizeof *node_of);
    if (rsd_mpi_transport(MPI_COMM_WORLD, &transport) || rsd_transport_nodes(&transport, node_of))
        printf("# %s\n", rsd_error());
    rsd_mpi_transport_free(&transport);
    if (rank == 0) {
        int nhosts = 0;
        for (int i = 0; i < nranks; i++)
            nhosts += node_of[i] == i;
        CASE("%d ranks on %d hosts", nranks, nhosts);
        CHECK(nhosts > 1 && nhosts < nranks, "%d hosts", nhosts);
    }
    static const char *const problems[] = {"f64[2048,2048] : 8:S0 -> 8:S1",
                                           "f32[1024,2048] : 8:S0 -> 8:R",
                                           "f32[2048,2048] : 4x2:S0,R -> 4x2:R,S1",
                                           "f32[3000,1001] : 4 ranks=0-3:S0 -> 4 ranks=4-7:S1",
                                           "f32[2000,1000] : 1:R -> 8:R",
                                           "f64[1000,1000] : 2x4:S1,S0 -> 8:S0",
                                           "f32[1000,1000] : 8:P -> 8:S0"};
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        move(problems[i], i % 2);
    int failed = rank == 0 ? tap_end() : 0;
    free(node_of);
    MPI_Finalize();
    return failed;
}
