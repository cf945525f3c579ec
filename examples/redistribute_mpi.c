/* redistribute_mpi.c - moves a tensor between any two layouts over MPI. Each process has the arrays of its own rank.
 *
 *     mpirun -np 6 build/examples/redistribute_mpi 'f64[512,512,64] : 2x3:S0,S1 -> 4:S2'
 *
 * The two sides may have different ranks: 6 ranks here send to 4 of them. Introduces: rsd_bind_mpi, rsd_exec_run,
 * rsd_plan_rank_totals.
 */
#include "elements.h"
#include "reshard_mpi.h"

int main(int argc, char **argv)
{
    const char *problem = argc > 1 ? argv[1] : "f64[512,512,64] : 2x3:S0,S1 -> 4:S2";
    int rank, nranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);

    /* Every rank computes the same plan, without messages. */
    rsd_layout *from, *to;
    rsd_plan *plan;
    or_die(rsd_problem_parse(problem, &from, &to));
    or_die(rsd_plan_new(from, to, NULL, &plan));
    if (rsd_layout_world(from) > nranks || rsd_layout_world(to) > nranks) {
        if (rank == 0)
            fprintf(stderr, "the layouts have more ranks than the %d of mpirun\n", nranks);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }

    /* A rank that is only on one side has no array on the other. */
    int64_t nsrc, ndst, counts[3] = {0}, sums[3];
    void **src = new_arrays(from, rank, &nsrc), **dst = new_arrays(to, rank, &ndst);
    put_elements(from, rank, src, 1, &counts[0]);

    /* Binding is collective, and is done once. The exec can be run many times. */
    rsd_exec *exec;
    or_die(rsd_bind_mpi(plan, MPI_COMM_WORLD, NULL, &exec));
    double began = MPI_Wtime();
    or_die(rsd_exec_run(exec, (const void *const *)src, dst));
    double seconds = MPI_Wtime() - began;

    rsd_rank_totals totals = RSD_INIT(rsd_rank_totals);
    or_die(rsd_plan_rank_totals(plan, rank, &totals));
    counts[1] = put_elements(to, rank, dst, 0, &(int64_t){0});
    counts[2] = totals.nbytes_sent;
    MPI_Reduce(counts, sums, 3, MPI_INT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("%lld elements, %lld bytes between ranks: %lld elements are wrong\n",
               (long long)sums[0], (long long)sums[2], (long long)sums[1]);
        fprintf(stderr, "%.1f ms; %s\n", 1e3 * seconds, rsd_exec_describe(exec));
    }

    rsd_exec_free(exec);
    rsd_plan_free(plan);
    free_arrays(src, nsrc);
    free_arrays(dst, ndst);
    rsd_layout_free(from);
    rsd_layout_free(to);
    MPI_Finalize();
    return rank == 0 && (sums[1] != 0 || fflush(stdout) != 0);
}
