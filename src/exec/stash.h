/* stash.h - the door of stash: keep a slice, give back the whole.
 *
 *     buffer --cut--> slice ... slices --gather--> buffer
 *
 * What is kept is cut by a layout (slicing.c), and gathered by a plan from that layout to one that replicates
 * (gather.c), once all ranks have said that they are about the same buffer (notice.c).
 */
#ifndef STASH_H
#define STASH_H

#include "exec.h"

/* ---- slicing.c: what each rank keeps of buffers of one dtype and shape ---- */

enum { FLAT = -1, WHOLE = -2 };

struct slicing {
    int64_t references;
    int32_t dim;                /* or FLAT, WHOLE */
    rsd_layout *whole, *sliced; /* sliced: NULL if it is kept whole */
    rsd_plan *plan;             /* from slices to the whole; NULL likewise */
    int64_t nboxes;             /* of this rank: dense, one after the other in its slice */
    rsd_box *boxes;
    size_t nbytes, nbytes_whole;
    struct slicing *next;
};

/* What a caller says of a buffer, checked. */
struct description {
    rsd_dtype dtype;
    int32_t ndim, dim; /* dim: as in a slicing */
    const int64_t *shape;
};

/* Those that were made lately, the last one first: a training loop makes each once. */
struct slicings {
    struct slicing *first;
    int64_t n;
};

rsd_status describe(const rsd_stash_buffer *buffer, int32_t nranks, int64_t keep_nbytes,
                    struct description *description);
rsd_status slicing_find(struct slicings *made, const struct description *description, int32_t rank,
                        int32_t nranks, struct slicing **slicing);
void slicing_release(struct slicings *made, struct slicing *slicing);
void slicings_drop(struct slicings *made);

/* Between a whole buffer with strides in bytes and a slice. */
void slicing_take(const struct slicing *slicing, const char *whole, const int64_t *strides,
                  char *slice);
void slicing_give(const struct slicing *slicing, const char *slice, char *whole,
                  const int64_t *strides);

/* The strides of a whole buffer in bytes, 0 where they do not matter. */
rsd_status slicing_strides(const struct slicing *slicing, const int64_t *given, bool written,
                           int64_t *strides);

void slicing_hash(const struct slicing *slicing, struct hash *hash);
void slicing_hash_values(const struct slicing *slicing, const char *whole, const int64_t *strides,
                         struct hash *hash);

/* ---- notice.c: what ranks tell each other before they do something together ---- */

enum notice_kind { NOTICE_PUT = 1, NOTICE_GET = 2, NOTICE_BIND = 3 };

struct notice {
    int32_t status, kind;
    int64_t id;
    struct hash about, values; /* the dtype, shape and cut; with check, the elements */
};

/* One notice to and from every other rank. */
struct notices {
    struct notice own, *all; /* ours among them */
    void **requests;         /* from each rank, then to each rank; NULL: done */
    int32_t nmoving;
    bool fine; /* heard and compared */
    struct notices *next;
};

/* The transport that a stash has, and one over it with other tags for the execs. */
struct channel {
    rsd_transport transport, for_execs;
    double timeout;
    struct notices *moving; /* posted and not ended, in that order */
    struct notices *spare;  /* at least one, so that a lack of memory can be told */
    rsd_status broken;      /* what went wrong for good: nothing is gathered any more */
    char why[240];
};

rsd_status channel_open(struct channel *channel, const rsd_transport *transport, double timeout);
void channel_close(struct channel *channel);
/* Keeps a failure, with what was said, and returns it. */
rsd_status channel_break(struct channel *channel, rsd_status status);

/* Starts to tell. Without memory what is told is ENOMEM, which is then in own.status. */
rsd_status notices_post(struct channel *channel, const struct notice *own,
                        struct notices **notices);
/* Until all are told and heard. */
rsd_status notices_wait(struct channel *channel, struct notices *notices);
/* What they come to: the failure of another rank, or that ranks are about different things; values are
 * compared only if asked for. All ranks come to the same, but for the one that failed. */
rsd_status notices_compare(const struct channel *channel, const struct notices *notices,
                           bool with_values);
/* Whether all ranks do the same to the same id, whatever it is there. */
bool notices_same_id(const struct channel *channel, const struct notices *notices);
/* Whether there are failures, and not on all ranks. */
bool notices_split(const struct channel *channel, const struct notices *notices);
void notices_end(struct channel *channel, struct notices *notices);
/* For execs, which listen: whether there are bad news. */
rsd_status notices_hear(void *channel);

/* ---- gather.c: slices become whole again, one buffer after the other ---- */

/* Bytes for messages of each gather, so not many. */
static inline int64_t gather_budget(const rsd_stash_options *options)
{
    return options->max_nbytes > 0 ? options->max_nbytes : 16 << 20;
}

/* A plan bound for one slicing and the strides of what it fills. */
struct gather {
    struct slicing *slicing;
    int64_t strides[RSD_MAX_DIMS]; /* bytes */
    rsd_exec *exec;
    int64_t last_used; /* by which fetch */
};

/* A buffer that is asked for. */
struct fetch {
    int64_t id;
    const struct entry *entry;
    char *out;
    int64_t strides[RSD_MAX_DIMS]; /* bytes */
    struct notices *notices;
    rsd_exec *exec; /* that is at it */
    bool done;
    rsd_status status;
    char message[240];
    struct fetch *next;
};

struct entry {
    int64_t id;
    struct slicing *slicing;
    char *slice;
    struct fetch *fetch; /* since a prefetch, until the get */
};

struct rsd_stash {
    rsd_stash_options options;
    struct channel channel;
    struct slicings slicings;
    struct entry **entries; /* by id */
    size_t nentries, entries_capacity;
    int64_t next_id;
    struct gather *gathers;
    size_t ngathers;
    int64_t nstarted;            /* fetches, so far */
    struct fetch *first, **last; /* in the order they were asked for; the first one is at work */
    rsd_stash_report report;
};

rsd_status gathers_open(rsd_stash *stash);
void gathers_close(rsd_stash *stash);

/* Tells the others that a buffer is wanted, and starts; or with a status that it cannot be, and returns
 * that. Strides in bytes; entry and strides do not matter if there is a status. */
rsd_status fetch_start(rsd_stash *stash, rsd_status status, int64_t id, const struct entry *entry,
                       const int64_t *strides, char *out, struct fetch **fetch);
/* Does what can be done for the first one without waiting. */
void fetch_poke(rsd_stash *stash);
/* Waits until it is done, with all that were asked for before it, and frees it. */
rsd_status fetch_finish(rsd_stash *stash, struct fetch *fetch);

#endif
