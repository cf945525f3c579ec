/* launch.c - the entry point of the command under mpirun. */
#include "cli.h"
#include "reshard_mpi.h"

int main(int argc, char **argv)
{
    int provided;
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    if (MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return cli_fail(NULL, EXIT_IO, "MPI_Init_thread failed");
    rsd_status status =
        provided < MPI_THREAD_FUNNELED
            ? rsd_set_error(RSD_EUNSUPPORTED, "this MPI does not support MPI_THREAD_FUNNELED")
            : rsd_mpi_transport(MPI_COMM_WORLD, &transport);
    if (status) {
        int code = cli_fail_status(NULL, status);
        MPI_Abort(MPI_COMM_WORLD, code);
        return code;
    }
    int code = command_main(argc, argv, &transport);
    if (ranks_have_lost()) /* a lost rank would block MPI_Finalize */
        MPI_Abort(MPI_COMM_WORLD, code);
    rsd_mpi_transport_free(&transport);
    MPI_Finalize();
    return code;
}
