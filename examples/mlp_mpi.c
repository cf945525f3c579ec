/* mlp_mpi.c - the tensor-parallel MLP of mlp.h over MPI.
 *
 *     mpirun -np 4 build/examples/mlp_mpi
 *
 * Introduces: rsd_mpi_transport.
 */
#include "mlp.h"
#include "reshard_mpi.h"

int main(int argc, char **argv)
{
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    MPI_Init(&argc, &argv);
    or_die(rsd_mpi_transport(MPI_COMM_WORLD, &transport));
    int failed = run_mlp(&transport);
    rsd_mpi_transport_free(&transport);
    MPI_Finalize();
    return failed || fflush(stdout) != 0;
}
