/* test_mpi_stash.c - stashes between processes: the same cases as between threads. */
#include "reshard_mpi.h"

#include "stash_cases.h"

int main(int argc, char **argv)
{
    struct rank rank = {.transport.struct_nbytes = sizeof rank.transport};
    MPI_Init(&argc, &argv);
    OK(rsd_mpi_transport(MPI_COMM_WORLD, &rank.transport));
    rank.rank = rank.transport.rank;
    rank.nranks = rank.transport.nranks;
    int nwrong = 0;
    for (int i = 0; i < nstash_cases; i++) {
        stash_cases[i].work(&rank, (void *)(uintptr_t)rank.nranks); /* a seed */
        int own = rank.wrong[0] != 0;
        if (own)
            printf("# rank %d: %s\n", (int)rank.rank, rank.wrong);
        fflush(stdout);
        MPI_Allreduce(&own, &nwrong, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (rank.rank == 0)
            printf("%sok %d - %s\n", nwrong ? "not " : "", i + 1, stash_cases[i].name);
        if (nwrong)
            break;
    }
    if (rank.rank == 0)
        printf("1..%d\n", nstash_cases);
    rsd_mpi_transport_free(&rank.transport);
    MPI_Finalize();
    return nwrong != 0;
}
