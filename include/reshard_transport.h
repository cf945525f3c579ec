/* reshard_transport.h - plans between processes. Included by reshard.h, whose conventions hold here.
 *
 * Each comment begins with Collective (every rank makes the call, in the same order) or Local. */
#ifndef RESHARD_TRANSPORT_H
#define RESHARD_TRANSPORT_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A message of rsd_transport.exchange, which lies in the memory of a CUDA device. Since 0.2. */
typedef struct rsd_device_message {
    int32_t peer, tag;
    int32_t sends; /* 1: to peer; 0: from peer */
    void *data;
    size_t nbytes;
} rsd_device_message;

/* A transport sends bytes between the ranks of a group: MPI (reshard_mpi.h), threads of one process (below), sockets
 * or the process group of a framework. Each process is one rank and has only its own arrays. A transport is a table
 * of four functions, and one more if it takes memory of CUDA devices. One thread.
 *
 * The library obeys these rules, so a transport may rely on them:
 *   - It calls the functions of one transport from one thread at a time: the thread that calls the library.
 *   - A message has 1 to 2^30 bytes and a tag from 0 to 63: no message is empty. data is never NULL.
 *   - No rank sends to itself.
 *   - Every send has a receive with the same tag and the same number of bytes.
 *   - A request ends when test sets *done to 1, or with cancel. The library does not use it afterwards.
 *   - The memory of a message is not freed, moved or changed until its request ends. It is memory of the library,
 *     never an array of the caller.
 *
 * The functions return RSD_OK or another status, which the call of the library then returns; they may set a message
 * with rsd_set_error. No function may wait for another rank.
 *
 * Execs and rsd_gather use tags below 8, a stash 16 to 31, checkpoint calls 60 to 63. Calls that use the same tags
 * must not overlap in time on one transport. All ranks make them in the same order. */
typedef struct rsd_transport {
    size_t struct_nbytes; /* use RSD_INIT */
    void *context;        /* the first argument of each function */
    int32_t rank, nranks;

    /* Starts to send a message. Messages from one rank to another with one tag arrive in the order of the sends. A
     * send may be done before or after the receive has started. *request may be set to any value, also to NULL. */
    rsd_status (*send)(void *context, int32_t to, int32_t tag, const void *data, size_t nbytes,
                       void **request);

    /* Starts to receive a message. Receives from one rank with one tag complete in the order they were started. */
    rsd_status (*recv)(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                       void **request);

    /* Sets *done to 1 if the request is done, which ends it, and else to 0. The library calls it repeatedly. On
     * failure the request does not end: the library then cancels it. EPEER: the other rank terminated, or its message
     * has another length. */
    rsd_status (*test)(void *context, void *request, int32_t *done);

    /* Ends a request after a failure. Returns 1 if the transport no longer uses the memory of the message. Returns 0
     * if it may still use it: then the library never frees nor reuses that memory. */
    int32_t (*cancel)(void *context, void *request);

    /* NULL, or called when the object that was created with this table (an exec, a stash) is freed. Not called if
     * creating the object failed. */
    void (*release)(void *context);

    /* NULL, or a function for transports that take memory of CUDA devices, such as NCCL or an MPI that is CUDA-aware.
     * Execs then send arrays on a device from buffers on the device, and never through host memory. It starts to send
     * and receive n messages at once, and sets *request to one request for all of them. The calls of two ranks match:
     * the messages between them in the k-th call of one that has any are those in the k-th such call of the other, in
     * the same order.
     * Everything that was queued on the device to write the messages is done. Since 0.2. */
    rsd_status (*exchange)(void *context, size_t n, const rsd_device_message *messages,
                           void **request);

    /* With exchange: the CUDA device whose memory it takes. Then every run of every rank uses it. -1: it takes memory of
     * any device, and its messages are matched with those of send and recv, which ranks without a device use. */
    int32_t device;
} rsd_transport;

/* Local. Sets the message that rsd_error returns, and returns status. For the functions of a transport. Since 0.2. */
rsd_status rsd_set_error(rsd_status status, const char *message);

/* Collective. Gathers nbytes of every rank into `all`, which has space for nranks * nbytes, in the order of ranks. It
 * is for small data, since every rank receives all of it. If nbytes is 0, own and all may be NULL, and the call is a
 * barrier. The call fails after `timeout` seconds without progress (0: 300). EMISMATCH on all ranks: a rank passed
 * another nbytes. ETIMEOUT: a rank did not make the call. Both name the rank. Since 0.2. */
rsd_status rsd_gather(const rsd_transport *transport, const void *own, size_t nbytes, void *all,
                      double timeout);

/* Collective. Writes the number of the host of each rank to node_of[nranks]: the node map of rsd_plan_options, with
 * which replicas cross between hosts once. */
rsd_status rsd_transport_nodes(const rsd_transport *transport, int32_t *node_of);

/* Memory that the ranks of one host share. A receiver copies directly from an array in an arena; any other array is
 * packed into shared memory first. An arena needs no space in /dev/shm. All its pages are allocated at once. One
 * thread; its memory may be used by any number of threads. */
typedef struct rsd_arena rsd_arena;

/* Local. Allocates shared memory for arrays that other ranks of the host copy from. ENOMEM: the machine, or a cgroup
 * (version 2) of this process, has too little memory left. */
rsd_status rsd_arena_new(int64_t nbytes, rsd_arena **arena);

/* Local. Returns memory for an array, aligned to 64 bytes. It takes a multiple of 64 bytes. ENOMEM: the arena is full.
 * rsd_arena_clear frees all arrays at once. */
rsd_status rsd_arena_alloc(rsd_arena *arena, int64_t nbytes, void **memory);
void rsd_arena_clear(rsd_arena *arena);

/* Local. Frees an arena and its memory. Requires that all execs that were bound with it are freed. Accepts NULL. */
void rsd_arena_free(rsd_arena *arena);

typedef struct rsd_exchange_options {
    size_t struct_nbytes; /* use RSD_INIT */
    int64_t
        max_nbytes; /* of buffers for messages, on this rank; 0: 256 MB. The smallest of all ranks is used */
    double timeout;         /* seconds without progress after which a call fails; 0: 300 */
    const rsd_arena *arena; /* of this rank; NULL: none */
    int64_t node; /* ranks with equal numbers share memory; 0: detected; -1: shares none */
    const char *const *names; /* of the tensors, one per plan, for errors; NULL: none */
} rsd_exchange_options;

/* Collective. Binds nplans plans, as rsd_bind_threads_many does. Strides, and the arrays of a run, are only those of
 * this rank: of the first plan, then of the second, and so on. bind and options may be NULL.
 *
 * All ranks bind the same plans in the same order. EMISMATCH on all ranks: a plan differs; the error names the rank
 * and the plan. If binding fails on one rank, it fails on all ranks with the same status, and the error names that
 * rank.
 *
 * rsd_exec_run and rsd_exec_wait on all ranks:
 *   - Before data moves, each rank checks its arrays. If one rank passes NULL, or a destination that overlaps a
 *     source where the library detects it, every rank returns EINVAL, and the error names that rank. If ranks run
 *     different plans, every rank returns EMISMATCH. The exec can be used again.
 *   - If a rank does not make the call, or stops, the others return ETIMEOUT. If a process of the same host
 *     terminates, they return EPEER. The error names that rank and a tensor. If the transport fails on a rank, that
 *     rank returns its status. In these cases ranks may return different statuses, the destinations are unspecified,
 *     the exec can only be freed, and messages may remain in the transport: other calls on it may fail.
 *   - rsd_exec_start fails only if a run is in progress, or if an earlier run failed as above.
 *
 * A run has no thread of its own: it progresses in rsd_exec_start, rsd_exec_progress and rsd_exec_wait. Several execs
 * of different transports may run at the same time if every rank waits for them in the same order, because
 * rsd_exec_wait progresses one exec only.
 *
 * max_nbytes is divided among buffers, two for each rank that this one sends to or receives from. A buffer has at
 * least 4096 bytes, or as many as are sent: with many ranks and a small max_nbytes, more is used. */
rsd_status rsd_bind_transport(int64_t nplans, const rsd_plan *const *plans,
                              const rsd_bind_options *bind, const rsd_transport *transport,
                              const rsd_exchange_options *options, rsd_exec **exec);

/* Local. Describes in one line how an exec between processes moves data: which ranks share memory, or why they do not.
 * The text is valid as long as the exec. Returns "" for other execs. Since 0.2. */
const char *rsd_exec_describe(const rsd_exec *exec);

/* A transport between threads of one process, each of which is a rank. It is for tests, and for programs whose workers
 * are threads. A message is copied once, from the memory of the sender to that of the receiver.
 *
 *     rsd_thread_group_new(4, &group);
 *     ... in the thread of each rank:
 *     rsd_transport transport = RSD_INIT(rsd_transport);
 *     rsd_thread_group_transport(group, rank, &transport);
 *
 * Shared; the transport of one rank is for one thread. The group must be freed after everything that uses it. Since
 * 0.2. */
typedef struct rsd_thread_group rsd_thread_group;

/* Create a group of nranks ranks; set the transport of one rank, which the caller initialized with RSD_INIT; and free
 * the group, which accepts NULL. EINVAL: a number is out of range. */
rsd_status rsd_thread_group_new(int32_t nranks, rsd_thread_group **group);
rsd_status rsd_thread_group_transport(rsd_thread_group *group, int32_t rank,
                                      rsd_transport *transport);
void rsd_thread_group_free(rsd_thread_group *group);

#ifdef __cplusplus
}
#endif

#endif
