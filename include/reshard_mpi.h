/* reshard_mpi.h - plans, stashes and checkpoints over MPI. Its own library: -lreshard_mpi -lreshard, or
 * `pkg-config --cflags --libs reshard_mpi` with mpicc.
 *
 *     rsd_plan_new(a, b, NULL, &plan);
 *     rsd_bind_mpi(plan, MPI_COMM_WORLD, NULL, &exec);
 *     rsd_exec_run(exec, src, dst);                          // as often as you like; or rsd_exec_start ... rsd_exec_wait
 *     rsd_exec_free(exec);
 *
 * A rank of a layout is a rank of the communicator. src and dst are the arrays of this rank alone: a layout
 * of mesh and placements has one, explicit boxes have one a box. A rank that holds nothing passes NULL.
 *
 * Each comment begins with Collective (every rank of the communicator calls it, in the same order) or Local.
 * What one rank notices is agreed on, and all return it; a rank that does not come is named after the
 * time-out. MPI must be initialised; one thread at a time may be inside (MPI_THREAD_FUNNELED is enough).
 */
#ifndef RESHARD_MPI_H
#define RESHARD_MPI_H

#include "reshard.h"

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Collective. One plan, as above. options (NULL: defaults) are those of rsd_bind_transport. */
rsd_status rsd_bind_mpi(const rsd_plan *plan, MPI_Comm comm, const rsd_exchange_options *options,
                        rsd_exec **exec);

/* Collective. Many plans in one: a whole model, whose small tensors share messages. See rsd_bind_transport. */
rsd_status rsd_bind_mpi_many(int64_t nplans, const rsd_plan *const *plans,
                             const rsd_bind_options *bind, MPI_Comm comm,
                             const rsd_exchange_options *options, rsd_exec **exec);

/* Collective. The communicator as a transport (the caller has set struct_nbytes), for every call that takes
 * one: rsd_stash_new, rsd_save, rsd_load, rsd_convert and so on. Two transports of one communicator never mix
 * up their messages. The communicator itself is used for nothing but making a hidden duplicate, in the first call
 * on it, which waits for all ranks as long as options say (here 300 s); it may be freed at once. After a time-out
 * in that call another communicator is needed. */
rsd_status rsd_mpi_transport(MPI_Comm comm, rsd_transport *transport);

/* Collective. The same for a communicator as Fortran has it (and mpi4py: comm.py2f()). */
rsd_status rsd_mpi_transport_f(int32_t fortran_comm, rsd_transport *transport);

/* Local. When nothing uses it any more. */
void rsd_mpi_transport_free(rsd_transport *transport);

#ifdef __cplusplus
}
#endif

#endif
