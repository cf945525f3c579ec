/* peer.h - what ranks tell each other besides tensor data. */
#ifndef PEER_H
#define PEER_H

#include "memory.h"

enum { DEFAULT_TIMEOUT = 300 }; /* seconds */

/* ---- agree.c: steps that all ranks take together ---- */

/* Bytes that a rank says, or hears. Starts as {0}. */
struct payload {
    char *bytes;
    size_t n, capacity;
};
rsd_status payload_put(struct payload *payload, const void *bytes, size_t n);
rsd_status payload_take(const struct payload *payload, size_t *at, void *out,
                        size_t n); /* moves *at on */
void payload_drop(struct payload *payload);

/* One step of this rank. The work is done by a thread of its own, and may end early with ECANCELLED once
 * stop is set; what it counts is told to others. */
struct peer_step {
    rsd_status (*work)(
        void *context); /* NULL: it is done already, with this status and rsd_error */
    rsd_status already;
    rsd_status (*merge)(void *context, const struct payload *all,
                        struct payload *result); /* on rank 0 */
    void *context;
    bool lead;                    /* only rank 0 works: its failure is nobody's in particular */
    struct payload own;           /* what this rank says, set by the work */
    struct payload result;        /* what rank 0 made of what all said: the caller drops both */
    rsd_on_progress *on_progress; /* from the calling thread, of all ranks together */
    void *progress_context;
    _Atomic bool stop;
    _Atomic int64_t nbytes_done, nbytes_total; /* of this rank */
};

/* Collective: does the work and returns the same on all ranks: RSD_OK if no rank failed, else what the
 * first that failed said. timeout: seconds without a word of some rank that mean it is lost; 0: 300. After
 * ETIMEOUT or EPEER that no work returned, the transport may not be used again. */
rsd_status peer_step(const rsd_transport *transport, double timeout, struct peer_step *step);

#endif
