/* exchange.h - an exec between ranks. Private to exec.
 *
 *     exchange_compile.c   what this rank sends and receives: messages of packed boxes, and combined boxes
 *     host_data.c          arrays and ring buffers that the ranks of a host export to each other
 *     channel.c            one message under way: by a transport or through shared memory
 *     exchange_bind.c      binding
 *     exchange.c           running
 */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "program.h"

/* A piece in an array of this rank, or of one on its host. */
struct array_box {
    int64_t array, offset; /* offset in bytes */
    int32_t plan;
    bool from_destination;
    struct packed_box packed; /* its loops are those of the exchange from first_loop on */
    size_t first_loop;
};

/* The pieces of one stage to or from one rank, packed one after the other. */
struct message {
    int32_t peer, stage;
    bool reduce; /* each piece by itself, since the receiver combines it with others */
    size_t first_box, nboxes;
    uint64_t nbytes;
};

/* A box that is combined from terms, in the order of the plan. */
struct combined_box {
    struct reduction reduction;
    struct array_box to;
    size_t first_term, nterms;
};
struct combined_term {
    int32_t peer;
    struct array_box box;    /* in an array of this rank or, when it is known, of one on its host */
    struct channel *channel; /* NULL: of this rank */
};

/* A place in a message. */
struct position {
    size_t box;
    uint64_t at;   /* bytes of the box before it */
    uint64_t left; /* bytes of the message after it */
};

/* At most two chunks of a message are under way: one is filled while the other travels. */
enum { NBUFFERS = 2 };

/* In shared memory: where the chunks of one message lie, and how many were written and read. The counters only
 * grow, so that nothing is reset between runs. */
struct ring {
    _Alignas(64) _Atomic uint64_t written;
    int32_t to, stage, reduce, direct;
    uint64_t buffers; /* the offset of the first */
    _Alignas(64) _Atomic uint64_t read;
};

struct channel {
    const struct message *message;
    bool sending;
    struct position here;   /* packed or unpacked up to here */
    struct position posted; /* receives were started up to here */
    uint64_t first, end;    /* chunks under way; chunk i is in buffer i modulo NBUFFERS */
    struct chunk_buffer {
        char *data;
        size_t nbytes;
        struct peer_request request;
    } buffers[NBUFFERS];
    uint64_t chunk;         /* bytes of a buffer */
    struct host_rank *host; /* NULL: by messages */
    struct ring *ring;
    uint64_t before; /* chunks that the ring had counted before this run */
    bool opened, direct;
    size_t first_direct, ndirect; /* copies of the program */
};

/* The combined box that is computed now. */
struct reducer {
    size_t box;
    uint64_t at;        /* bytes of it that are done */
    char *own, *result; /* one chunk each */
    const char **terms;
};

struct exchange {
    rsd_exec exec;
    struct peer *peer;
    bool owns_peer;
    rsd_transport transport; /* to be released; {0}: it has another owner */
    int32_t rank, nranks;
    struct peer_call call; /* what its runs vote on */
    uint64_t chunk;        /* bytes of one message at most, the same on all ranks */
    bool by_columns;       /* boxes are packed by columns: so are the arrays of all ranks */
    int32_t nstages;
    int64_t nplans;
    char **labels; /* of the plans, for errors */
    struct array_box *boxes;
    struct loop *loops; /* src_stride: packed side; dst_stride: array side */
    struct message *sends, *receives;
    struct program
        program; /* copies from arrays of this rank and of ranks on its host, by rank and stage */
    struct combined_box *combined;
    struct combined_term *terms;
    int64_t
        *strides; /* of the arrays of this rank, in bytes: plan by plan, sources and destinations */
    size_t nboxes, boxes_capacity, nloops, loops_capacity, nsends, sends_capacity, nreceives,
        receives_capacity, ncombined, combined_capacity, nterms, terms_capacity, nstrides,
        strides_capacity;
    struct run_arrays arrays;
    struct copier copier;
    bool stream;
    struct host_data *host; /* NULL: no data goes through shared memory */
    struct channel *channels;
    size_t nchannels;
    char *buffers; /* of all channels */
    struct reducer reducer;
    int32_t stage;    /* -1: voting */
    bool refused;     /* the vote failed, on all ranks */
    rsd_status early; /* a failure before rsd_exec_wait, which returns it */
    char error[240];
    bool lost; /* the transport may still use the buffers */
    char note[240];
};

/* ---- exchange.c ---- */

extern const struct backend exchange_backend;

/* What the next runs vote on, instead of the plans. */
void exchange_set_call(struct exchange *x, const struct peer_call *call);

/* ---- exchange_bind.c ---- */

/* Collective. Binds over a peer that has another owner. A status other than RSD_OK makes it fail on all ranks. */
rsd_status exchange_bind(struct peer *peer, rsd_status status, int64_t nplans,
                         const rsd_plan *const *plans, const rsd_bind_options *bind,
                         const rsd_exchange_options *options, struct exchange **exchange);

/* ---- exchange_compile.c ---- */

/* Whether the arrays of this rank are best packed by columns. */
bool compile_prefers_columns(int64_t nplans, const rsd_plan *const *plans,
                             const rsd_bind_options *bind, int32_t rank);

/* Finds what this rank sends and receives in all plans. */
rsd_status compile_plans(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                         const rsd_bind_options *bind);
void compile_drop(struct exchange *x);

/* Adds what can be copied directly from arrays of ranks on this host, once their strides are known. */
rsd_status compile_host_copies(struct exchange *x, int64_t nplans, const rsd_plan *const *plans);

/* Bytes [at, at + n) of a packed box: out of the array at base, or into its destination array. */
void array_box_pack(const struct exchange *x, const struct array_box *box, const char *base,
                    uint64_t at, size_t n, char *out);
void array_box_unpack(const struct exchange *x, const struct array_box *box, uint64_t at, size_t n,
                      const char *in);

/* ---- host_data.c ---- */

/* What another rank of the host exports. It is checked before it is used. */
struct host_rank {
    int32_t rank;
    struct shared_segment segment, arena;
    const int64_t *strides;   /* of its arrays, as this rank lists its own; a copy */
    _Atomic int64_t *offsets; /* of its arrays of this run in its arena; -1: not there */
    struct ring *rings;
    uint64_t nstrides, noffsets, nrings;
    struct run_arrays arrays; /* how far they reach */
    /* while plans are compiled: of the current plan */
    size_t next_stride;
    int64_t src_base, dst_base;
};

struct host_data {
    struct shared_segment segment; /* of this rank */
    _Atomic int64_t *offsets;
    struct ring *rings; /* one for each of its sends */
    const struct shared_segment *arena;
    struct host_rank *ranks; /* by their index in the peer; that of this rank is empty */
    int32_t n;
};

/* Makes and exports the segment of this rank. Requires ranks that share memory. */
rsd_status host_data_make(struct exchange *x, const rsd_arena *arena);
struct host_data_names {
    struct shared_segment_name segment, arena;
};
struct host_data_names host_data_export(const struct exchange *x);
/* Opens and checks what a rank exports. */
rsd_status host_data_open(struct exchange *x, int32_t index, const struct host_data_names *names,
                          int64_t nplans, const rsd_plan *const *plans);
void host_data_drop(struct exchange *x);

/* NULL: the rank exports nothing to this one. */
struct host_rank *host_data_rank(const struct exchange *x, int32_t rank);
struct ring *host_data_ring(const struct exchange *x, const struct host_rank *host,
                            const struct message *message);
/* The buffer of a chunk; NULL if it lies outside of the segment. */
char *ring_buffer(const struct shared_segment *segment, const struct ring *ring, uint64_t chunk,
                  uint64_t nbytes);

/* At the start of a run: where the arrays of this rank are. */
void host_data_publish(struct exchange *x);
/* Whether all that a message sends lies in the arena. */
bool host_data_is_direct(const struct exchange *x, const struct message *message);
/* The array of a rank, or NULL with EPEER set. */
const char *host_rank_array(const struct host_rank *host, int64_t array, bool from_destination);

/* ---- channel.c ---- */

uint64_t reduce_chunk_nbytes(const struct exchange *x);
uint64_t channel_chunk_nbytes(const struct exchange *x, const struct message *message, bool shared);
void channel_rewind(const struct exchange *x, struct channel *channel);
bool channel_is_finished(const struct channel *channel);
/* Does what can be done without waiting. */
rsd_status channel_progress(struct exchange *x, struct channel *channel, bool *moved);
void channel_cancel(struct exchange *x, struct channel *channel);

/* Of a reduction: the next n bytes of a term, or NULL if they have not arrived; and moves on past them. */
rsd_status channel_peek(struct exchange *x, struct channel *channel, const struct array_box *box,
                        uint64_t at, size_t n, const char **data);
void channel_advance(struct exchange *x, struct channel *channel, size_t n);

#endif
