/* reshard_stash.h - part 8 of reshard.h, which includes it: activations that wait for backward in slices. */
#ifndef RESHARD_STASH_H
#define RESHARD_STASH_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Under tensor parallelism every rank keeps the same activations from forward to backward. A stash keeps
 * one slice of each on every rank, 1/m of the memory, and gives it back whole when it is asked for:
 *
 *     rsd_stash_new(&transport, NULL, &stash);
 *     ...                                                forward
 *     int64_t shape[] = {batch, width};
 *     rsd_stash_buffer x = {.struct_nbytes = sizeof x, .dtype = RSD_BF16, .ndim = 2, .shape = shape};
 *     rsd_stash_put(stash, &x, activation, &id);         the caller's own may be freed now
 *     ...                                                backward
 *     rsd_stash_prefetch(stash, id, NULL, room);         if there is something to do meanwhile
 *     rsd_stash_get(stash, id, NULL, room);              room is as the activation was, bit by bit
 *     rsd_stash_drop(stash, id);
 *
 * All ranks of the transport make the same calls in the same order with buffers of the same dtype and
 * shape; each comment says whether a call is Collective (it waits for the other ranks, though not for
 * ever) or Local. A rank that fails in a collective call is named to the others, which return EPEER; one
 * that asks for something else, EMISMATCH; one that does not come, ETIMEOUT. A stash that got one of
 * these from get or prefetch can only be freed.
 *
 * A stash uses tags 16 to 31 of its transport, and execs those below: they can share one. Two stashes
 * cannot. A stash belongs to one thread at a time. docs/stash.md says what it costs.
 */
typedef struct rsd_stash rsd_stash;
struct rsd_transport; /* part 7 */

typedef struct rsd_stash_options {
    size_t struct_nbytes;   /* sizeof(rsd_stash_options) */
    int32_t check;          /* 1: every put compares digests, and so is Collective */
    int32_t keep_differing; /* 1: what differs is kept whole on each rank, and is no failure */
    int64_t keep_nbytes;    /* buffers of no more bytes are kept whole: not worth a message */
    int64_t max_nbytes;     /* for messages of a gather on their way; 0: 16 MiB */
    double timeout;         /* seconds without any progress; 0: 300 */
} rsd_stash_options;

/* Collective. options may be NULL; they are the same on all ranks (EMISMATCH), but for timeout. The
 * transport's functions are used until the stash is freed. */
rsd_status rsd_stash_new(const struct rsd_transport *transport, const rsd_stash_options *options,
                         rsd_stash **stash);

/* Waits for what is on its way, as rsd_stash_drop does. */
void rsd_stash_free(rsd_stash *stash);

/* Cut where it cuts evenly: along the first dim that the number of ranks divides, else through the elements
 * in row-major order, so that ranks hold one more or less. */
#define RSD_STASH_ANY_DIM (-2147483647 - 1)

typedef struct rsd_stash_buffer {
    size_t struct_nbytes; /* sizeof(rsd_stash_buffer) */
    rsd_dtype dtype;
    int32_t ndim;
    const int64_t *shape;
    const int64_t *strides; /* in elements, none negative; 0 repeats. NULL: dense, row-major */
    int32_t dim; /* the one that is cut, or RSD_STASH_ANY_DIM; a negative one counts from the end */
    int32_t whole; /* 1: ranks differ by right, as shards do: kept as it is, get is Local */
} rsd_stash_buffer;

/* Local; with options.check Collective. Copies this rank's slice, so that data may change or go. Slices along
 * a dim differ by one index at most, and may be empty. A buffer with fewer elements than there are ranks is
 * kept whole.
 * EINVAL: a dim that the buffer has not. With check: EMISMATCH on all ranks names the one whose buffer is
 * not like that of most. Where puts fail, ids stay in step. */
rsd_status rsd_stash_put(rsd_stash *stash, const rsd_stash_buffer *buffer, const void *data,
                         int64_t *id);

/* Collective, unless the buffer is kept whole. Gives the buffer back whole: out has the strides given (in
 * elements, the same on all ranks; NULL: dense, row-major), and they need not be those of the put. What is
 * between the elements is not touched. After a prefetch it waits for that, and goes by its strides; out is
 * then the same, or NULL. */
rsd_status rsd_stash_get(rsd_stash *stash, int64_t id, const int64_t *strides, void *out);

/* Collective, and waits only if buffers of this dtype, shape and strides are gathered for the first time.
 * Starts a get whose out stays in use until rsd_stash_get or rsd_stash_drop. Gathers are carried out one
 * after the other, in the order of these calls; they move on whenever a call into the stash is made.
 * EINVAL: it was started before. */
rsd_status rsd_stash_prefetch(rsd_stash *stash, int64_t id, const int64_t *strides, void *out);

/* Local; after a prefetch without a get Collective, since it waits for that. Forgets a buffer. */
rsd_status rsd_stash_drop(rsd_stash *stash, int64_t id);

/* What is kept of one buffer on this rank. */
typedef struct rsd_stashed {
    size_t struct_nbytes; /* sizeof(rsd_stashed), set by the caller */
    int32_t whole;        /* 1: all of it */
    int32_t dim;          /* else the dim that is cut; RSD_STASH_ANY_DIM: through the elements */
    int64_t nbytes_held, nbytes_whole;
} rsd_stashed;

/* Local. EINVAL: no such buffer. */
rsd_status rsd_stash_look(const rsd_stash *stash, int64_t id, rsd_stashed *stashed);

/* What is kept of all, on this rank. */
typedef struct rsd_stash_report {
    size_t struct_nbytes;      /* sizeof(rsd_stash_report), set by the caller */
    int64_t nbuffers, nwhole;  /* held now; kept whole among them */
    int64_t nbytes_held;       /* by slices, now */
    int64_t nbytes_whole;      /* that the same buffers have whole */
    int64_t nbytes_most_held;  /* at any time so far */
    int64_t nbytes_most_whole; /* at any time so far */
    int64_t nbytes_received;   /* from other ranks, by gets */
} rsd_stash_report;

/* Local. */
rsd_status rsd_stash_ask(const rsd_stash *stash, rsd_stash_report *report);

#ifdef __cplusplus
}
#endif

#endif
