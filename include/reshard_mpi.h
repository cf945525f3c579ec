/* reshard_mpi.h - plans, stashes and checkpoints over MPI. Compile with mpicc and
 * `pkg-config --cflags --libs reshard_mpi`, or link with -lreshard_mpi -lreshard.
 *
 *     rsd_plan_new(a, b, NULL, &plan);
 *     rsd_bind_mpi(plan, MPI_COMM_WORLD, NULL, &exec);
 *     rsd_exec_run(exec, src, dst);                      any number of times; or rsd_exec_start ... rsd_exec_wait
 *     rsd_exec_free(exec);
 *
 * A rank of a layout is a rank of the communicator. src and dst are only the arrays of this rank: one for a layout of
 * mesh and placements, one per box for explicit boxes. A rank without arrays passes NULL.
 *
 * Each comment begins with Collective (every rank of the communicator makes the call, in the same order) or Local. If
 * a collective call fails on one rank, it fails on all ranks with the same status, and the error names that rank.
 * After a time-out, or if a process terminates, ranks may return different statuses; see rsd_bind_transport.
 *
 * If MPI is CUDA-aware (MPIX_Query_cuda_support), arrays on a CUDA device are sent from buffers on the device.
 *
 * MPI must be initialized; MPI_THREAD_FUNNELED is enough. These functions, and functions that use such a transport,
 * must not be called by two threads at the same time.
 */
#ifndef RESHARD_MPI_H
#define RESHARD_MPI_H

#include "reshard.h"

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Collective. Binds one plan. options are those of rsd_bind_transport, and may be NULL. */
rsd_status rsd_bind_mpi(const rsd_plan *plan, MPI_Comm comm, const rsd_exchange_options *options,
                        rsd_exec **exec);

/* Collective. Binds many plans, such as those of a model: small tensors then share messages. See rsd_bind_transport. */
rsd_status rsd_bind_mpi_many(int64_t nplans, const rsd_plan *const *plans,
                             const rsd_bind_options *bind, MPI_Comm comm,
                             const rsd_exchange_options *options, rsd_exec **exec);

/* Collective. Creates a transport for a communicator. The caller initializes *transport with RSD_INIT. Every call that
 * takes a transport accepts it: rsd_gather, rsd_save, rsd_load, rsd_convert and so on. Messages of two transports of
 * one communicator never mix.
 *
 * The first call on a communicator creates a hidden duplicate of it, which all calls use. That call waits for all
 * ranks, up to the time-out in options (here 300 s). After ETIMEOUT in that call, use another communicator. The
 * communicator may be freed at any time. */
rsd_status rsd_mpi_transport(MPI_Comm comm, rsd_transport *transport);

/* Collective. The same for a Fortran handle of a communicator (mpi4py: comm.py2f()). */
rsd_status rsd_mpi_transport_f(int32_t fortran_comm, rsd_transport *transport);

/* Local. Frees a transport. Requires that nothing uses it any more. Accepts NULL. */
void rsd_mpi_transport_free(rsd_transport *transport);

#ifdef __cplusplus
}
#endif

#endif
