/* exchange.h - an exec between ranks. Private to exec.
 *
 *     exchange_compile.c   what this rank sends and receives: messages of packed boxes, and combined boxes
 *     host_data.c          arrays and ring buffers that the ranks of a host export to each other
 *     channel.c            one message in progress: over a transport or through shared memory
 *     exchange_device.c    the same for arrays on a device
 *     exchange_rounds.c    messages on a device, by a transport that takes them
 *     device_share.c       device memory that the ranks of a host export to each other
 *     exchange_bind.c      binding
 *     exchange.c           running
 */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "program.h"

/* A piece, and where it lies in an array of this rank or of another rank of its host. */
struct array_box {
    int64_t array, offset; /* offset in bytes */
    int32_t plan;
    struct packed_box packed; /* as it is sent; its loops are exchange.loops from first_loop on */
    size_t first_loop;
};

/* The pieces of one stage to or from one rank, packed one after the other. */
struct message {
    int32_t peer, stage;
    bool reduce; /* pieces are terms, which the receiver combines: no chunk has two of them */
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
    struct array_box box;    /* in an array of this rank, or of one on its host if it is exported */
    struct channel *channel; /* NULL: a term of this rank */
};

/* A byte of a message. */
struct position {
    size_t box;
    uint64_t at;   /* bytes of the box before it */
    uint64_t left; /* bytes of the message after it */
};

/* The chunks of a message that may be in progress: one is packed while the other is sent. */
enum { NBUFFERS = 2 };

/* How a receiver gets a message: packed, or out of the arrays of the sender. */
enum direct_way { PACKED, DIRECT_ARENA, DIRECT_DEVICE };

/* In shared memory: where the chunks of one message lie, and how many were written and read. The counters only
 * grow, so that nothing is reset between runs. */
struct ring {
    _Alignas(64) _Atomic uint64_t written;
    int32_t to, stage, reduce, direct; /* direct: enum direct_way */
    uint64_t buffers;                  /* the offset of the first */
    _Alignas(64) _Atomic uint64_t read;
    _Atomic uint64_t
        refused; /* the counter of a chunk that offered device memory, which cannot be read */
};

/* A message while it is sent or received. */
struct channel {
    const struct message *message;
    bool sending;
    struct position here;   /* packed or unpacked up to here */
    struct position posted; /* receives were started up to here */
    uint64_t first, end;    /* chunks in progress; chunk i is in buffer i modulo NBUFFERS */
    bool in_rounds;         /* it is sent and received by exchange_rounds.c */
    uint64_t arrived;       /* chunks that rounds have received */
    struct chunk_buffer {
        char *data;
        size_t nbytes;
        struct peer_request request;
    } buffers[NBUFFERS];
    uint64_t chunk; /* bytes of a buffer */
    struct host_rank
        *host; /* the other rank, if memory is shared with it; NULL: over the transport */
    struct ring *ring;
    uint64_t before; /* chunks that the ring had counted when this run began */
    bool opened;     /* in this run, the sender has announced how it sends */
    enum direct_way direct;
    bool offered;     /* device memory was offered: the receiver reads it, or refuses */
    bool was_refused; /* in an earlier run: it is not offered again */
    bool copying;     /* by a kernel, until mark */
    uint64_t mark;
    size_t first_direct, ndirect; /* copies of the program */
};

/* The combined box that is being computed. */
struct reducer {
    size_t box;
    uint64_t at;        /* bytes of it that are done */
    char *own, *result; /* one chunk each */
    char *own_memory;   /* of both; NULL: memory of the device */
    const char **terms;
};

/* What is bound: plans, their options (NULL: none), and the options of the exec. */
struct bind_request {
    int64_t nplans;
    const rsd_plan *const *plans;
    const rsd_bind_options *bind;
    const rsd_exchange_options *options;
};

struct exchange {
    rsd_exec exec;
    struct peer *peer;
    bool owns_peer;
    rsd_transport transport; /* released with the exec; {0}: the caller of exchange_bind owns it */
    int32_t rank, nranks;
    struct peer_call call; /* that the ranks compare at the start of a run */
    uint64_t chunk;        /* most bytes of one send, the same on all ranks */
    bool
        by_columns; /* boxes are packed in column-major order, because the arrays of all ranks are */
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
    int64_t *strides; /* of the arrays of this rank, in bytes */
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
    size_t buffers_nbytes;
    struct exchange_device *device; /* NULL: no run was done by a device yet */
    bool on_device;                 /* the current run; requires `device` */
    bool decided;                   /* how the receives of the current stage are done */
    bool sums_on_device;            /* the reductions of this run */
    bool terms_align;               /* on all ranks, each term of a box comes in the same round */
    struct reducer reducer;
    int32_t stage;    /* -2: the device is busy with work queued before; -1: voting */
    bool refused;     /* the vote failed, on all ranks */
    rsd_status early; /* a failure that rsd_exec_wait returns, with `error` */
    char error[240];
    bool lost; /* the transport may still use the buffers */
    char note[240];
};

/* ---- exchange.c ---- */

extern const struct backend exchange_backend;

/* Sets the call that ranks compare at the start of the next runs, instead of the plans. */
void exchange_set_call(struct exchange *x, const struct peer_call *call);

/* ---- exchange_bind.c ---- */

/* Collective. Binds plans over a peer of the caller. A status other than RSD_OK makes it fail on all ranks. */
rsd_status exchange_bind(struct peer *peer, rsd_status status, const struct bind_request *request,
                         struct exchange **exchange);

/* ---- exchange_compile.c ---- */

/* Returns whether each rank that sends terms has one of every combined box, so that the terms of a box arrive
 * together. */
bool compile_terms_align(const struct exchange *x);
/* Returns whether the arrays of this rank are column-major, so that boxes are best packed by columns. */
bool compile_prefers_columns(const struct bind_request *request, int32_t rank);

/* Fills in boxes, messages, combined boxes and own copies of this rank for all plans. */
rsd_status compile_plans(struct exchange *x, const struct bind_request *request);
void compile_drop(struct exchange *x);

/* Adds the copies directly from arrays of other ranks of this host. Requires host_data_open. */
rsd_status compile_host_copies(struct exchange *x, const struct bind_request *request);

/* Copy bytes [at, at + n) of the packed form of a box: from the array at base, or to its destination array. */
void array_box_pack(const struct exchange *x, const struct array_box *box, const char *base,
                    uint64_t at, size_t n, char *out);
void array_box_unpack(const struct exchange *x, const struct array_box *box, uint64_t at, size_t n,
                      const char *in);

/* ---- host_data.c ---- */

/* Where a rank lists its arrays on a device (device_share.c). */
struct device_table_name {
    struct shared_segment_name segment;
    _Atomic uint64_t version; /* 0: nothing was exported yet */
};

/* What another rank of the host exports. It is checked before it is used. */
struct host_rank {
    int32_t rank;
    const struct device_table_name *exported;
    struct shared_segment segment, arena;
    const int64_t *strides;   /* a copy of the strides of its arrays */
    _Atomic int64_t *offsets; /* of its arrays of this run in its arena; -1: not in the arena */
    struct ring *rings;
    uint64_t nstrides, noffsets, nrings;
    struct run_arrays arrays;   /* their extents in bytes */
    int64_t first_array;        /* the number of its first one on this rank */
    struct plan_arrays current; /* only while plans are compiled */
};

struct host_data {
    struct shared_segment segment; /* of this rank */
    _Atomic int64_t *offsets;
    struct device_table_name *exported;
    struct ring *rings; /* one for each of its sends */
    const struct shared_segment *arena;
    struct host_rank *ranks; /* by their index in the peer; the entry of this rank is empty */
    int32_t n;
    int64_t narrays; /* of this rank, and then of the others: numbers of arrays are below it */
};

/* Creates the segment of this rank. Requires that this rank shares memory with others. host_data_export returns its
 * name, and that of the arena. */
rsd_status host_data_make(struct exchange *x, const rsd_arena *arena);
struct host_data_names {
    struct shared_segment_name segment, arena;
};
struct host_data_names host_data_export(const struct exchange *x);
/* Opens and checks the segment and the arena of another rank. */
rsd_status host_data_open(struct exchange *x, int32_t index, const struct host_data_names *names,
                          const struct bind_request *request);
void host_data_drop(struct exchange *x);

/* Return NULL if the rank exports nothing, or no ring for this message. */
struct host_rank *host_data_rank(const struct exchange *x, int32_t rank);
struct ring *host_data_ring(const struct exchange *x, const struct host_rank *host,
                            const struct message *message);
/* Returns the buffer of a chunk, or NULL if it lies outside of the segment. */
char *ring_buffer(const struct shared_segment *segment, const struct ring *ring, uint64_t chunk,
                  uint64_t nbytes);

/* Exports the positions of the arrays of this rank, at the start of a run. */
void host_data_publish(struct exchange *x);
/* Returns whether all arrays of a message lie in the arena of this rank. */
bool host_data_is_direct(const struct exchange *x, const struct message *message);
/* Whether an array of another rank lies in its arena, as that rank says; and the array, or NULL with EPEER set. */
bool host_rank_has(const struct host_rank *host, int64_t number);
const char *host_rank_array(const struct host_rank *host, int64_t number);

/* ---- exchange_device.c ---- */

/* At the start of a run: sets on_device if kernels must do the run of this rank, and exports its arrays. */
rsd_status exchange_device_prepare(struct exchange *x);
/* Whether the work that was queued before the run is done. */
rsd_status exchange_device_ready(struct exchange *x, bool *ready);
/* After a run. */
void exchange_device_end(struct exchange *x, rsd_status status);
const char *exchange_device_note(const struct exchange *x);
void exchange_device_drop(struct exchange *x);

/* Queues the copies of a stage: those that stay on this rank, or all of them with the sums. The latter requires
 * that all receives of the stage are direct and open. Then whether they are done. */
rsd_status exchange_device_copy_own(struct exchange *x, int32_t stage);
rsd_status exchange_device_copy_all(struct exchange *x, int32_t stage);
rsd_status exchange_device_stage_done(struct exchange *x, bool *done);

/* Messages in rounds: at the start of a stage, and to do what can be done without waiting. */
void exchange_device_begin_stage(struct exchange *x);
rsd_status exchange_device_progress(struct exchange *x, bool *moved);
/* After a failure. Sets x->lost if the transport may still use buffers. */
void exchange_device_cancel(struct exchange *x);

/* Packs boxes or unpacks them: begin, add, queue, and test the mark. */
void exchange_device_begin_boxes(struct exchange *x);
rsd_status exchange_device_add_box(struct exchange *x, const struct array_box *box, bool sending,
                                   uint64_t at, size_t n, const char *packed);
rsd_status exchange_device_queue_boxes(struct exchange *x, uint64_t *mark);
rsd_status exchange_device_test(struct exchange *x, uint64_t mark, bool *done);
/* Queues the packing of a term of this rank for the reducer. */
rsd_status exchange_device_pack_term(struct exchange *x, const struct array_box *box, uint64_t at,
                                     size_t n);
/* Combines the terms of the reducer, stores the result in its destination array, and waits. */
rsd_status exchange_device_combine(struct exchange *x, const struct combined_box *box, size_t n);

/* Whether all that a message sends is exported. */
bool exchange_device_exports(const struct exchange *x, const struct message *message);
void exchange_device_count_packed(struct exchange *x);
/* Makes the arrays of a sender usable by kernels of this rank; then queues the copies from them. */
rsd_status exchange_device_open(struct exchange *x, const struct channel *channel);
rsd_status exchange_device_copy_direct(struct exchange *x, struct channel *channel);

/* ---- channel.c ---- */

/* Return the most bytes of a chunk of a term, and of any chunk of a message. */
uint64_t reduce_chunk_nbytes(const struct exchange *x);
uint64_t channel_chunk_nbytes(const struct exchange *x, const struct message *message, bool shared);
/* Prepares a channel for the next run. */
void channel_rewind(const struct exchange *x, struct channel *channel);
/* Returns whether all of the message is sent, or received and copied to its arrays. */
bool channel_is_finished(const struct channel *channel);
/* Decides whether the receives of a stage are done by one launch: all are direct, and this rank can read what the
 * senders export. Returns false until every sender has announced how it sends. */
bool channels_decide(struct exchange *x, int32_t stage, bool *together);
/* Returns the bytes of the chunk at a position: as many as fit, and of a reduction at most the rest of one box. */
size_t channel_next_chunk(const struct exchange *x, const struct channel *channel,
                          const struct position *position);
/* Skips n bytes. A position is never at the end of a box, except behind the last one. */
void channel_move_position(const struct exchange *x, struct position *position, size_t n);
/* Packs the next n bytes, or unpacks them. On a device, adds them to what exchange_device_queue_boxes does. */
rsd_status channel_copy_boxes(struct exchange *x, struct channel *channel, char *packed, size_t n);
/* Returns the chunk in a buffer as a message of a transport that takes device memory. */
rsd_device_message channel_device_message(const struct channel *channel,
                                          const struct chunk_buffer *buffer);
/* Does what can be done without waiting. */
rsd_status channel_progress(struct exchange *x, struct channel *channel, bool *moved);
/* After a failure. Sets x->lost if the transport may still use buffers. */
void channel_cancel(struct exchange *x, struct channel *channel);

/* For reductions: returns the next n bytes of a term, or NULL if they have not arrived. channel_advance skips them. */
rsd_status channel_peek(struct exchange *x, struct channel *channel, const struct array_box *box,
                        uint64_t at, size_t n, const char **data);
void channel_advance(struct exchange *x, struct channel *channel, size_t n);

#endif
