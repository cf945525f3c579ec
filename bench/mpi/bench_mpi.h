/* bench_mpi.h - timing over ranks: the time of the slowest rank, the best of several rounds. Alternatives are measured
 * in turns. */
#ifndef BENCH_MPI_H
#define BENCH_MPI_H

#include "reshard_mpi.h"

#include "bench.h"

static int rank, nranks;

typedef void ranks_work(void *context);

static inline void best_of_ranks(int rounds, int n, ranks_work *const *works, void *context,
                                 double *seconds)
{
    for (int i = 0; i < n; i++)
        seconds[i] = 1e99;
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < n; i++) {
            double took, slowest;
            MPI_Barrier(MPI_COMM_WORLD);
            took = MPI_Wtime();
            works[i](context);
            took = MPI_Wtime() - took;
            MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (slowest < seconds[i])
                seconds[i] = slowest;
        }
}

/* Returns this rank's array of a layout of mesh and placements. */
static inline rsd_array own_array(const rsd_layout *layout)
{
    rsd_array array = {0};
    int64_t first, n;
    rsd_layout_arrays_of(layout, rank, &first, &n);
    must(n == 1 ? rsd_layout_array(layout, first, &array) : RSD_EINVAL);
    return array;
}

static inline size_t array_nbytes(const rsd_layout *layout)
{
    rsd_array array = own_array(layout);
    size_t nbytes = rsd_dtype_nbytes(rsd_layout_dtype(layout));
    for (int32_t d = 0; d < rsd_layout_ndim(layout); d++)
        nbytes *= (size_t)array.shape[d];
    return nbytes;
}

#endif
