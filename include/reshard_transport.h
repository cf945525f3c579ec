/* reshard_transport.h - part 7 of reshard.h, which includes it: plans between processes. */
#ifndef RESHARD_TRANSPORT_H
#define RESHARD_TRANSPORT_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each process is one rank and has only its own arrays. Whoever can send and receive bytes can carry a plan
 * (MPI, sockets, the process group of a framework): such a transport is given as this table. All calls come
 * from the thread that runs the exec. Execs use tags below 8, a stash 16 to 31, checkpoints 60 to 63: one of
 * each kind can be at work on one transport at a time. */
typedef struct rsd_transport {
    size_t struct_nbytes; /* sizeof(rsd_transport) */
    void *context;        /* first argument of each function */
    int32_t rank, nranks;

    /* Start to send or receive; *request is then handed to test again and again until that says it is
     * done, and the memory is left alone so long. Messages with one tag from one rank to another are
     * received in the order they were sent. nbytes is at most 2^30, tags are 0 to 63. */
    rsd_status (*send)(void *context, int32_t to, int32_t tag, const void *data, size_t nbytes,
                       void **request);
    rsd_status (*recv)(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                       void **request);
    rsd_status (*test)(void *context, void *request, int32_t *done);

    /* After a failure: nothing is touched for this request any more. */
    void (*cancel)(void *context, void *request);

    /* Every rank's nbytes, in the order of ranks. Waits for all, at most timeout seconds (then ETIMEOUT, which
     * names who did not come, and neither own nor all is touched any more); used at bind alone. */
    rsd_status (*allgather)(void *context, const void *own, size_t nbytes, void *all,
                            double timeout);

    /* NULL, or called when what was made with this table is freed; not if making it failed. */
    void (*release)(void *context);
} rsd_transport;

/* Local. For whoever writes a transport: makes message what rsd_error says, and returns status. */
rsd_status rsd_set_error(rsd_status status, const char *message);

/* Memory that the ranks of one host share: what is given from an array in here, the receiver takes out of it
 * directly, without a message. (Any other array works too: it is packed into shared memory first.) An arena
 * needs no room in /dev/shm; all its pages are allocated at once. ENOMEM: the machine, or a cgroup (version 2)
 * of this process, has not so much memory left. */
typedef struct rsd_arena rsd_arena;
rsd_status rsd_arena_new(int64_t nbytes, rsd_arena **arena);

/* Memory for an array, aligned to 64 bytes; each takes a multiple of 64. ENOMEM: the arena is full. It is given
 * back with all the others by rsd_arena_clear. */
rsd_status rsd_arena_alloc(rsd_arena *arena, int64_t nbytes, void **memory);
void rsd_arena_clear(rsd_arena *arena);

/* After the execs that were bound with it. */
void rsd_arena_free(rsd_arena *arena);

typedef struct rsd_exchange_options {
    size_t struct_nbytes;   /* sizeof(rsd_exchange_options) */
    int64_t max_nbytes;     /* of one rank, for what is on its way; 0: 256 MiB. The least counts */
    double timeout;         /* seconds without any progress after which a call fails; 0: 300 */
    const rsd_arena *arena; /* of this rank; NULL: none */
    int64_t node;           /* equal ones share memory; 0: found from the host's name; -1: none */
    const char *const *names; /* of the tensors, one a plan, for messages; NULL: none */
} rsd_exchange_options;

/* Collective. nplans plans as in rsd_bind_threads_many; strides are of this rank's arrays alone, and so are
 * the pointers of a run: those of the first plan, then those of the second, and so on. Every rank binds the
 * same plans in the same order: EMISMATCH on all ranks names the one that does not. bind and options may
 * be NULL.
 *
 * rsd_exec_run and rsd_exec_wait return the same on all ranks: a bad pointer on one rank is an error on each, before
 * anything moves. If a rank does not come, the others return ETIMEOUT, which names it and a tensor, and the
 * exec can only be freed. rsd_exec_start sends what can be sent without waiting; the rest happens in rsd_exec_progress
 * and rsd_exec_wait. Several execs may be in flight at once if every rank waits for them in the same order: who
 * waits for one moves no other, so ranks that wait for different ones may wait in vain, until ETIMEOUT.
 *
 * max_nbytes is shared out among buffers, two for each rank that something is sent to or received from. None
 * is smaller than 4096 bytes: with many ranks and little to share out, more is used. */
rsd_status rsd_bind_transport(int64_t nplans, const rsd_plan *const *plans,
                              const rsd_bind_options *bind, const rsd_transport *transport,
                              const rsd_exchange_options *options, rsd_exec **exec);

/* Local. How an exec between processes moves, in a line: which ranks share memory, or why they do not. Valid
 * as long as the exec; "" for other execs. */
const char *rsd_exec_describe(const rsd_exec *exec);

/* Collective. A number for the host of every rank, nranks of them: the node map that rsd_plan_options takes, so
 * that replicas cross between hosts once. */
rsd_status rsd_transport_nodes(const rsd_transport *transport, int32_t *node_of);

/* Ranks that are threads of one process: for tests, and for programs whose workers share their memory. Each
 * rank's thread takes its own transport, with struct_nbytes set by the caller. Bytes are copied once, from
 * where they are to where they go. The team is freed when no rank uses it any more.
 *
 *     rsd_thread_group_new(4, &team);
 *     ... in the thread of each rank:
 *     rsd_transport transport = {.struct_nbytes = sizeof transport};
 *     rsd_thread_group_transport(team, rank, &transport);
 */
typedef struct rsd_thread_group rsd_thread_group;

rsd_status rsd_thread_group_new(int32_t nranks, rsd_thread_group **team);
rsd_status rsd_thread_group_transport(rsd_thread_group *team, int32_t rank,
                                      rsd_transport *transport);
void rsd_thread_group_free(rsd_thread_group *team);

#ifdef __cplusplus
}
#endif

#endif
