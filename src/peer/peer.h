/* peer.h - communication between ranks, except tensor data.
 *
 * There are two protocols. Rounds are for votes and small gathers, by messages or, on one host, through shared memory.
 * Steps are for long work: rank 0 collects the results while every rank sends heartbeats.
 */
#ifndef PEER_H
#define PEER_H

#include "memory.h"

enum { DEFAULT_TIMEOUT = 300 }; /* seconds */

/* The tags of all messages; a transport has 64. A peer adds its first tag to those below TAG_STASH. */
enum peer_tag {
    TAG_DATA = 0,   /* plus the stage */
    TAG_REDUCE = 4, /* reductions are in stage 0 only */
    TAG_VOTE = 5,
    TAG_ALIVE = 6,
    TAG_NEXT = 7,   /* the number of tags of a peer */
    TAG_STASH = 16, /* the first tag of a stash */
    TAG_STEP = 60,  /* the first of four */
    TAG_END = 64
};
enum { MAX_STAGES = TAG_REDUCE - TAG_DATA };

/* ---- peer.c: a group of ranks, and messages between them ---- */

struct peer;

/* Copies and checks a transport. EINVAL: the rank is out of range, or a function is missing. */
rsd_status peer_check_transport(const rsd_transport *given, rsd_transport *transport);

/* Local. Requires a checked transport, whose functions must outlive the peer. A timeout of 0 or less means
 * DEFAULT_TIMEOUT. ENOMEM: this rank cannot notify the others, which time out. */
rsd_status peer_open(const rsd_transport *transport, double timeout, int32_t first_tag,
                     struct peer **peer);
/* Cancels messages in progress. Memory that the transport may still use is never freed. Accepts NULL. */
void peer_close(struct peer *peer);

int32_t peer_rank(const struct peer *peer);
int32_t peer_nranks(const struct peer *peer);

/* A message in progress. Initialize with {0}. */
struct peer_request {
    void *request;
    bool active;
};
rsd_status peer_send(const struct peer *peer, int32_t to, int32_t tag, const void *data,
                     size_t nbytes, struct peer_request *request);
rsd_status peer_recv(const struct peer *peer, int32_t from, int32_t tag, void *data, size_t nbytes,
                     struct peer_request *request);
/* Whether the transport takes memory of CUDA devices, and the device that all its messages lie on; -1: any. */
bool peer_takes_device(const struct peer *peer);
int peer_device(const struct peer *peer);
/* Starts to send and receive messages on a device, with one request. Their tags are changed to those of the peer. */
rsd_status peer_exchange(const struct peer *peer, size_t n, rsd_device_message *messages,
                         struct peer_request *request);
/* Sets *moved if an active request is done, which makes it inactive. On failure it stays active. */
rsd_status peer_test(const struct peer *peer, struct peer_request *request, bool *moved);
/* Makes a request inactive. Returns false if the transport may still use its memory. */
bool peer_cancel(const struct peer *peer, struct peer_request *request);

/* Cancels messages in progress, after a failure that ranks have not agreed on. Only peer_close may follow. */
void peer_break(struct peer *peer);
/* Returns EINVAL if the peer is broken. */
rsd_status peer_check_usable(const struct peer *peer);

/* ---- gather.c: votes and small gathers ---- */

enum { CALL_NAME_NCHARS = 48 };

/* A call and its arguments, which must be the same on all ranks of a vote. */
struct peer_call {
    char name[CALL_NAME_NCHARS]; /* for errors: "rsd_stash_get of buffer 3"; filled with zeros */
    struct hash arguments;
};
struct peer_call peer_call_named(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Collective. Returns the same on every rank: the status of the lowest rank that failed, or EMISMATCH if the call of a
 * rank differs from that of rank 0. The error names the rank. A failure that ranks have not agreed on (EPEER, ETIMEOUT
 * or one of the transport) breaks the peer. With one rank, returns `status` at once. */
rsd_status peer_vote(struct peer *peer, rsd_status status, const struct peer_call *call);

/* Collective. Votes, and then gathers nbytes of every rank into `all`, in the order of ranks. */
rsd_status peer_gather(struct peer *peer, rsd_status status, const struct peer_call *call,
                       const void *own, size_t nbytes, void *all);

/* A vote in two parts, which neither wait nor allocate. If peer_vote_poll fails with *done set, all ranks return the
 * same status. If it fails with *done not set, the caller must call peer_break. */
void peer_vote_start(struct peer *peer, rsd_status status, const struct peer_call *call);
rsd_status peer_vote_poll(struct peer *peer, bool *moved, bool *done);

/* ---- host_group.c: ranks of one host, which share memory ---- */

/* Collective. Lets ranks with the same number in host_of share memory. If these are all ranks, votes and gathers need
 * no messages. If memory cannot be shared, messages are used, and the call succeeds. Does nothing the second time. */
rsd_status peer_share_host(struct peer *peer, const int64_t *host_of);
/* Returns whether any two ranks are on one host. The result is the same on all ranks. */
bool peer_any_host_shared(const struct peer *peer);

/* The group of ranks that share memory, including this rank, in ascending order. Return their number (0 if no memory
 * is shared), the rank at an index, and the index of a rank (-1 if it is not in the group). */
int32_t peer_host_nranks(const struct peer *peer);
int32_t peer_host_rank(const struct peer *peer, int32_t index);
int32_t peer_host_index(const struct peer *peer, int32_t rank);
/* Returns why memory is not shared. */
const char *peer_host_note(const struct peer *peer);

/* ---- liveness.c: ranks that are late or dead ---- */

/* Returns whether this rank waits for a message from or to `rank`. If so, writes a description to `what`. */
typedef bool peer_waits_for(void *context, int32_t rank, char *what, size_t n);

/* Called before a loop that waits, in it when something has moved, and after it. */
void peer_wait_start(struct peer *peer);
void peer_moved(struct peer *peer);
void peer_wait_end(struct peer *peer);

/* Called in such a loop when nothing has moved. Yields the CPU. EPEER: a process of this host terminated, or another
 * rank reports that one did. ETIMEOUT: nothing moved for the time-out. Both name the rank. */
rsd_status peer_idle(struct peer *peer, peer_waits_for *waits_for, void *context);

/* ---- packing.c ---- */

/* Bytes that a rank sends or receives in a step. Initialize with {0}. */
struct payload {
    char *bytes;
    size_t n, capacity;
};
rsd_status payload_put(struct payload *payload, const void *bytes, size_t n);
/* Copies n bytes from *at on, and advances *at. EPEER: the payload has fewer. */
rsd_status payload_take(const struct payload *payload, size_t *at, void *out, size_t n);
void payload_drop(struct payload *payload);

/* ---- step.c ---- */

/* A collective step, as one rank sees it. The work runs in a separate thread, unless there is one rank only. It may
 * return ECANCELLED once `stop` is set. Its counts of bytes are sent to the other ranks. */
struct peer_step {
    rsd_status (*work)(
        void *context); /* NULL: the work is done, with the status `already` and rsd_error */
    rsd_status already;
    rsd_status (*merge)(void *context, const struct payload *all,
                        struct payload *result); /* on rank 0; NULL: the result is empty */
    void *context;
    bool lead;          /* only rank 0 works: errors do not name it, and no progress is reported */
    struct payload own; /* set by the work */
    struct payload result;        /* what rank 0 merged. The caller drops both payloads */
    rsd_on_progress *on_progress; /* called by the calling thread, for all ranks together */
    void *progress_context;
    _Atomic bool stop;
    _Atomic int64_t nbytes_done, nbytes_total; /* of this rank */
};

/* Collective. Returns the same on all ranks: RSD_OK, or the status of the first rank that failed by itself. A rank is
 * lost if it sends no heartbeat for `timeout` seconds (0: DEFAULT_TIMEOUT). If a rank is lost (ETIMEOUT) or the
 * transport fails (EPEER), the transport must not be used again. With one rank (transport->nranks is
 * 1) the work runs in the calling thread, and the functions of the transport may be NULL. */
rsd_status peer_step(const rsd_transport *transport, double timeout, struct peer_step *step);

#endif
