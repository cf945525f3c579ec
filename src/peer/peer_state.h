/* peer_state.h - the state of a peer, which the files of this module share. */
#ifndef PEER_STATE_H
#define PEER_STATE_H

#include "peer.h"

enum { ERROR_TEXT_NCHARS = 120 };

/* The result of a vote over some of the ranks. Merging depends only on the set of ranks, so a rank may be merged
 * twice. A ballot is sent as bytes, so all of its bytes are set. */
struct ballot {
    int32_t failed, status; /* the lowest rank that failed, and its status; RSD_OK: none */
    char message[ERROR_TEXT_NCHARS];
    int32_t lowest,
        differs; /* the lowest rank; the lowest rank whose call differs from its call, -1: none */
    struct peer_call call, other_call; /* of these two */
};

struct peer {
    rsd_transport transport;
    double timeout;
    int32_t first_tag;
    bool broken;
    bool lost; /* the transport may still use this struct and its buffers */

    uint64_t call; /* the number of the current call, or of the last one */
    bool voting;
    struct ballot result, out, in;
    int64_t distance; /* of the current round */
    struct peer_request send, recv;

    struct host_group *host; /* NULL: no memory is shared */
    bool hosts_known, any_host_shared;
    char host_note[ERROR_TEXT_NCHARS + 40];

    double since;    /* when something last moved, or waiting began */
    double checked;  /* when processes were last checked */
    int32_t suspect; /* a rank whose process did not exist then; -1: none */
    struct liveness_check *liveness_check;
};

/* ---- peer.c ---- */

/* Returns the status with a number that another rank sent, or EPEER if the number is invalid. */
rsd_status status_received(int64_t number);

/* ---- packing.c ---- */

/* A payload that is sent or received in chunks. Initialize with its data, if it is sent, and its nbytes. */
struct chunked_payload {
    char *data;
    size_t nbytes, done, chunk;
    struct peer_request request;
};
/* Sends or receives at most one chunk, without waiting. Memory is allocated for chunks that are received, not for the
 * length that another rank announced. */
rsd_status payload_send_chunk(const struct peer *peer, int32_t to, int32_t tag,
                              struct chunked_payload *payload, bool *moved);
rsd_status payload_recv_chunk(const struct peer *peer, int32_t from, int32_t tag,
                              struct chunked_payload *payload, struct payload *received,
                              bool *moved);

/* ---- gather.c ---- */

void ballot_merge(struct ballot *ballot, const struct ballot *other);
/* Returns whether merging two ballots finds no failure and no difference. */
bool ballot_agrees(const struct ballot *ballot, const struct ballot *other);

/* ---- host_group.c ---- */

enum { HOST_PIECE_NBYTES = 256 }; /* most bytes of a rank in one gather */

/* Returns whether all ranks share memory. */
bool host_has_all(const struct peer *peer);
/* Publishes this rank's ballot for the current call, and bytes beside it. */
void host_enter(struct peer *peer, const void *data, size_t n);
bool host_has_entered(const struct peer *peer, int32_t index);
/* Returns whether all ranks have entered the call. If so, peer->result is the result of all. */
bool host_poll(struct peer *peer);
void host_read(const struct peer *peer, int32_t index, void *data, size_t n);
int32_t host_pid(const struct peer *peer, int32_t index);
void host_close(struct peer *peer);

/* ---- liveness.c ---- */

/* Returns the rank that the current round receives from. */
int32_t round_source(const struct peer *peer);

#endif
