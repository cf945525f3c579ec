/* exec.h - runs a plan between arrays in memory. */
#ifndef EXEC_H
#define EXEC_H

#include "memory.h"
#include "peer.h"
#include "plan.h"

/* ---- nests.c: a plan compiled for the arrays it will meet ---- */

/* A block that one array gives another. Arrays are numbered through all plans of an exec. */
struct nest {
    int64_t src, dst;               /* arrays; src is a destination array with from_destination */
    int64_t src_offset, dst_offset; /* bytes */
    size_t first_loop;              /* into nests.loops, which move while they grow */
    struct block block;
    int32_t stage;
    int32_t peer; /* between processes: the rank that has the source */
    bool from_destination;
};

/* A block that is combined from the terms of several arrays. Loops count elements of the
 * destination; each term has strides of its own. */
struct sum {
    int64_t dst, dst_offset;
    int64_t first_loop; /* into nests.loops; src_stride is not used */
    int64_t first_term; /* into nests.terms, reduction.nterms of them */
    int32_t nloops;
    struct reduction reduction;
};

struct term {
    int64_t src, offset;
    int64_t first_stride; /* into nests.strides: one per loop */
};

struct nests {
    struct nest *nests;
    struct sum *sums; /* all in stage 0 */
    struct loop *loops;
    struct term *terms;
    int64_t *strides;
    size_t nnests, nests_capacity, nsums, sums_capacity, nloops, loops_capacity, nterms,
        terms_capacity, nstrides, strides_capacity;
    int64_t nbytes; /* written in all */
};

/* Adds a plan whose first source and destination arrays have these numbers. */
rsd_status nests_add(struct nests *nests, const rsd_plan *plan, const rsd_bind_options *options,
                     int64_t first_src, int64_t first_dst);
void nests_drop(struct nests *nests);

/* Adds a piece that is copied, between two arrays with these strides and numbers. */
rsd_status nests_add_piece(struct nests *nests, const rsd_piece *piece, size_t element_nbytes,
                           const int64_t *from_strides, const int64_t *to_strides, int64_t src,
                           int64_t dst);

/* Once all plans are added, before anything is run. */
void nests_finish(struct nests *nests);

/* ---- exec.c: what every carrier's exec begins with ---- */

struct carrier {
    rsd_status (*start)(rsd_exec *exec, const void *const *src, void *const *dst);
    rsd_status (*wait)(rsd_exec *exec);
    rsd_status (*run)(rsd_exec *exec, const void *const *src, void *const *dst);
    void (*free)(rsd_exec *exec);
    void (*push)(rsd_exec *exec);              /* NULL: it moves on by itself */
    const char *(*note)(const rsd_exec *exec); /* NULL: nothing to say */
};

struct rsd_exec {
    const struct carrier *carrier;
    bool started;
};

/* ---- between processes ----
 *
 *     exchange_bind.c   what this rank gives and gets: parcels of ops, sums of terms
 *     meeting.c         agreeing, at bind and at the start of each run, and who is late
 *     neighbours.c      ranks of this host: what they show each other in shared memory
 *     lanes.c           one parcel on its way, by messages or through shared memory
 *     exchange.c        the carrier: everything moves on until all is done
 */

/* A piece in one of our arrays, as rows of bytes in the order of its box. */
struct op {
    int64_t array, offset; /* among our arrays; bytes */
    size_t first_loop; /* into the exchange's loops: outermost first, packed side and array side */
    int32_t nloops;
    int32_t plan;
    bool from_destination;
    size_t run;
    int64_t nrows;
    uint64_t nbytes;
};

/* Pieces that go to one peer, or come from it, in one stage: packed one after the other. */
struct parcel {
    int32_t peer, stage;
    bool reduce; /* each piece by itself, since the receiver combines it with others */
    size_t first_op, nops;
    uint64_t nbytes;
};

/* Tags of messages: copies and terms by stage, and what is said beside them. */
enum { COPY_TAG = 0, REDUCE_TAG = 4, MEET_TAG = 5, ROLL_TAG = 6 };

/* A box that is combined from terms, in the order of the plan. */
struct gathered_sum {
    struct reduction reduction;
    struct op to;
    size_t first_term, nterms;
};
struct gathered_term {
    int32_t peer;
    struct op op;      /* in our own array, or, once it is known, in that of a neighbour */
    struct lane *lane; /* NULL: our own */
};

/* How far a parcel has come. */
struct progress {
    size_t op;
    uint64_t at;   /* bytes of it that are done */
    uint64_t left; /* bytes of the parcel that are not */
};

/* Two chunks of a parcel are on their way at most: one is filled while the other travels. */
enum { NSLOTS = 2 };
struct slot {
    char *data;
    size_t nbytes;
    void *request;
};

struct lane {
    const struct parcel *parcel;
    bool sending;
    struct progress here;      /* packed, or unpacked */
    struct progress asked;     /* of receives: asked for */
    uint64_t first, end;       /* chunks on their way; chunk i is in slot i modulo NSLOTS */
    struct slot slots[NSLOTS]; /* of messages, and of what is given through shared memory */
    uint64_t chunk;
    struct neighbour *near; /* NULL: messages */
    struct berth *berth;
    uint64_t before; /* what the berth had counted when this run began */
    bool opened, direct;
    size_t first_direct, ndirect; /* into exchange.direct */
};

/* One part of a box that is combined. */
struct reducer {
    size_t sum;  /* at hand */
    uint64_t at; /* bytes of it that are done */
    size_t most_terms;
    char *own, *result; /* one chunk each */
    const char **terms;
};

/* What a rank has to say at the start of a run, and the worst that was heard. */
struct verdict {
    uint64_t run;
    int32_t rank, status;
    char message[112];
};

/* Agreeing by messages: in each round twice as far as before. */
struct meeting {
    struct verdict worst, out, in;
    int64_t distance;
    void *send, *recv;
    bool sending, receiving;
};

/* Who is there, asked when nothing moves: one number from each rank. */
struct rollcall {
    struct word {
        uint64_t run; /* that it is in */
        int64_t gone; /* a rank that it knows to be no more; -1: none */
    } own, last, *heard;
    void **sends, **recvs;
    bool *sending, *receiving, *present, *behind;
    int32_t gone, witness; /* of what we were told */
};

struct exchange {
    rsd_exec exec;
    rsd_transport transport;
    double timeout;
    uint64_t chunk; /* bytes of one message at most, the same on all ranks */
    bool columns;   /* pieces are packed by columns: so are the arrays of all ranks */
    int32_t nstages;
    int64_t nplans;
    char **labels; /* of the plans, for messages */
    struct op *ops;
    struct loop *loops; /* src_stride: packed side; dst_stride: array side */
    struct parcel *sends, *receives;
    struct nests
        nests;      /* what is copied from our own arrays or straight from those of neighbours */
    size_t *direct; /* these, by peer and stage */
    struct gathered_sum *sums;
    struct gathered_term *terms;
    int64_t *strides; /* of all our arrays, in bytes: plan by plan, sources and destinations */
    size_t nops, ops_capacity, nloops, loops_capacity, nsends, sends_capacity, nreceives,
        receives_capacity, nsums, sums_capacity, nterms, terms_capacity, nstrides, strides_capacity;
    int64_t nsrc, ndst;
    const char **src;
    char **dst;
    bool *src_used, *dst_used;
    struct copier copier;
    bool stream;
    struct neighbours *near; /* NULL: no memory is shared */
    int64_t *node_of;        /* of every rank */
    char *buffers;           /* all that is on its way by messages */
    struct lane *lanes;
    size_t nlanes;
    struct reducer reducer;
    struct meeting meeting;
    struct rollcall *rollcall;
    uint64_t run;                        /* the number of this run */
    int32_t stage;                       /* -1: agreeing */
    rsd_status (*listen)(void *context); /* NULL, or asked while nothing moves */
    void *listener;
    double since;                 /* when something last moved, or waiting began */
    bool half_time;               /* half of the time-out is over */
    const struct neighbour *gone; /* its process was not there when we last looked */
    rsd_status early;             /* of what rsd_exec_start did: told by rsd_exec_wait */
    bool refused;                 /* all agreed not to begin */
    bool broken, lost;            /* messages were given up: their buffers may still be read */
    char note[160];
};

/* ---- exchange.c ---- */

/* While a run of an exec of rsd_bind_transport waits, listen is asked: what it returns ends the run. */
void exchange_listen(rsd_exec *exec, rsd_status (*listen)(void *context), void *context);
/* Between rsd_exec_start and rsd_exec_wait: does what can be done without waiting. */
void exchange_poke(rsd_exec *exec);

/* ---- exchange_bind.c ---- */

/* Whether our arrays are best packed by columns. */
bool prefers_columns(int64_t nplans, const rsd_plan *const *plans, const rsd_bind_options *bind,
                     int32_t rank);

/* Finds what this rank gives and gets in all plans. */
rsd_status exchange_compile(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                            const rsd_bind_options *bind);

/* What neighbours' arrays are like is known later: adds what can be copied straight from them. */
rsd_status exchange_compile_near(struct exchange *x, int64_t nplans, const rsd_plan *const *plans);

/* Bytes [at, at + n) of a packed op, out of the array at base or into it. */
void op_pack(const struct exchange *x, const struct op *op, const char *base, uint64_t at, size_t n,
             char *out);
void op_unpack(const struct exchange *x, const struct op *op, uint64_t at, size_t n,
               const char *in);

rsd_status check_transport(const rsd_transport *transport);

/* ---- meeting.c ---- */

/* All of these are collective. meet_again finds the least of a number too. */
rsd_status meet_to_bind(struct exchange *x, rsd_status status, const rsd_transport *transport,
                        double timeout, int64_t nplans, const rsd_plan *const *plans, int64_t node,
                        bool columns);
rsd_status meet_again(const struct exchange *x, rsd_status status, int64_t own, int64_t *least);

void meeting_start(struct exchange *x, rsd_status status);
rsd_status meeting_push(struct exchange *x, bool *moved, bool *done);
void meeting_cancel(struct exchange *x);

/* When half of the time is over, and when all of it is: who is there? Push fails if somebody has found a rank to
 * be gone. */
void rollcall_start(struct exchange *x, int32_t gone);
rsd_status rollcall_push(struct exchange *x);
void rollcall_tell(struct exchange *x, int32_t gone);
void rollcall_drop(struct exchange *x);
rsd_status say_who_is_late(struct exchange *x);

/* ---- neighbours.c ---- */

/* Where chunks from one rank to another lie, and how many were put there and taken. */
struct berth {
    _Alignas(64) _Atomic uint64_t sent;
    int32_t to, stage, reduce, direct;
    uint64_t slots; /* offset of the first */
    _Alignas(64) _Atomic uint64_t taken;
};

/* Where a run's arrays of a neighbour lie in its arena; -1: not there. */
struct neighbour {
    int32_t rank, pid;
    struct shared_segment segment, arena;
    struct board *board;
    const int64_t *strides;
    _Atomic int64_t *places;
    struct berth *berths;
    uint64_t nstrides, nplaces, nberths; /* as they were when they were checked */
    int64_t *reach;                      /* bytes that an array spans at most */
    int64_t nsrc, ndst, src_base, dst_base;
    size_t next_stride;
    uint64_t beats_before;
};

struct neighbours {
    struct shared_segment own;
    struct board *board;
    _Atomic int64_t *places;
    struct berth *berths; /* one for each of our sends */
    const struct shared_segment *arena;
    struct neighbour *list; /* by rank, without us */
    int32_t n;
};

/* Collective: makes ranks with the same node neighbours, or x->note says why not. */
rsd_status neighbours_meet(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                           const rsd_arena *arena);
void neighbours_drop(struct exchange *x);

struct neighbour *neighbour_of(const struct exchange *x, int32_t rank);
struct berth *neighbour_berth(const struct exchange *x, const struct neighbour *near,
                              const struct parcel *parcel);
char *neighbour_slot(const struct neighbour *near, const struct berth *berth, uint64_t chunk,
                     uint64_t nbytes);
bool all_are_near(const struct exchange *x);

/* At the start of a run: where our arrays are, and what we have to say. */
void neighbours_enter(struct exchange *x, const struct verdict *verdict);
bool neighbours_heard(struct exchange *x, struct verdict *worst);
bool neighbour_has_come(const struct exchange *x, const struct neighbour *near);

/* Says that we wait; at half time remembers what the others said. Who has said nothing since is silent. */
void neighbours_beat(struct exchange *x, bool half_time);
bool neighbour_is_silent(const struct neighbour *near);
bool parcel_is_direct(const struct exchange *x, const struct parcel *parcel);

/* The array of a neighbour, or NULL with EPEER set. */
const char *neighbour_array(const struct neighbour *near, int64_t array, bool from_destination);

/* ---- lanes.c ---- */

uint64_t reduce_chunk(const struct exchange *x);
uint64_t lane_chunk(const struct exchange *x, const struct parcel *parcel, bool near);
void lane_rewind(const struct exchange *x, struct lane *lane);
bool lane_finished(const struct lane *lane);

/* Whether there is still something to exchange with a rank, up to a stage. */
bool lane_is_open(const struct exchange *x, int32_t rank, int32_t stage);
rsd_status lane_push(struct exchange *x, struct lane *lane, bool *moved);
void lane_cancel(struct exchange *x, struct lane *lane);

/* Of a reduction: the next n bytes of a term, or NULL if they are not there yet; then they are used up. */
rsd_status lane_front(struct exchange *x, struct lane *lane, const struct op *op, uint64_t at,
                      size_t n, const char **data);
void lane_pop(struct exchange *x, struct lane *lane, size_t n);

#endif
