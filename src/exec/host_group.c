/* neighbours.c - ranks of one host, and what they show each other.
 *
 * Every rank has a segment that its neighbours can read, and of which they write only what they have taken:
 *
 *     | board | strides of its arrays | where its arrays are in its arena | berths | slots ... |
 *
 * A berth is where the chunks of one of its parcels lie. Counters only grow, so nothing has to be set back
 * between runs. What a neighbour says about itself is checked before it is believed: a wrong stride or place
 * may cost a run, never a read outside its arena.
 */
#include "exec.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

struct board {
    struct spoken {
        _Atomic uint64_t run; /* these are the words of */
        struct verdict verdict;
    } spoken[2];            /* of runs with even and odd numbers: nobody is two runs ahead */
    _Atomic uint64_t beats; /* goes up while it waits */
    uint64_t nstrides, nplaces, nberths;
    uint64_t strides, places, berths; /* offsets */
};

/* ---- our own segment ---- */

static uint64_t aligned(uint64_t offset)
{
    return (offset + 63) / 64 * 64;
}

static bool is_near(const struct exchange *x, int32_t rank)
{
    return rank != x->transport.rank && x->node_of[rank] == x->node_of[x->transport.rank];
}

static uint64_t lay_out(const struct exchange *x, struct board *board)
{
    board->nstrides = x->nstrides;
    board->nplaces = (uint64_t)(x->nsrc + x->ndst);
    board->nberths = x->nsends;
    board->strides = aligned(sizeof *board);
    board->places = aligned(board->strides + board->nstrides * sizeof(int64_t));
    board->berths = aligned(board->places + board->nplaces * sizeof(int64_t));
    return aligned(board->berths + board->nberths * sizeof(struct berth));
}

static void fill_board(struct exchange *x, struct board *laid, uint64_t slots)
{
    char *data = shared_segment_data(&x->near->own);
    x->near->board = (void *)data;
    x->near->places = (void *)(data + laid->places);
    x->near->berths = (void *)(data + laid->berths);
    *x->near->board = *laid;
    if (x->nstrides)
        memcpy(data + laid->strides, x->strides, x->nstrides * sizeof *x->strides);
    for (size_t i = 0; i < x->nsends; i++) {
        const struct parcel *parcel = &x->sends[i];
        struct berth *berth = &x->near->berths[i];
        berth->to = parcel->peer;
        berth->stage = parcel->stage;
        berth->reduce = parcel->reduce;
        berth->slots = slots;
        if (is_near(x, parcel->peer))
            slots += aligned(lane_chunk(x, parcel, true)) * NSLOTS;
    }
}

static rsd_status make_own(struct exchange *x, const rsd_arena *arena)
{
    struct board laid = {0};
    uint64_t slots = lay_out(x, &laid), nbytes = slots;
    for (size_t i = 0; i < x->nsends; i++)
        if (is_near(x, x->sends[i].peer))
            nbytes += aligned(lane_chunk(x, &x->sends[i], true)) * NSLOTS;
    TRY(shared_segment_new((size_t)nbytes, &x->near->own));
    fill_board(x, &laid, slots);
    x->near->arena = arena ? arena_segment(arena) : NULL;
    return RSD_OK;
}

/* ---- theirs ---- */

static bool holds(uint64_t capacity, uint64_t offset, uint64_t count, uint64_t element_nbytes)
{
    return offset % 64 == 0 && offset <= capacity && count <= (capacity - offset) / element_nbytes;
}

static rsd_status read_board(struct neighbour *near)
{
    const char *data = shared_segment_data(&near->segment);
    uint64_t capacity = shared_segment_capacity(&near->segment);
    near->board = (void *)without_const(data);
    if (capacity < sizeof *near->board)
        return fail(RSD_EPEER, "its shared memory is too short");
    struct board board = *near->board; /* read once: it may change */
    if (!holds(capacity, board.strides, board.nstrides, sizeof(int64_t)) ||
        !holds(capacity, board.places, board.nplaces, sizeof(int64_t)) ||
        !holds(capacity, board.berths, board.nberths, sizeof(struct berth)))
        return fail(RSD_EPEER, "its shared memory makes no sense");
    near->strides = (const void *)(data + board.strides);
    near->places = (void *)without_const(data + board.places);
    near->berths = (void *)without_const(data + board.berths);
    near->nstrides = board.nstrides;
    near->nplaces = board.nplaces;
    near->nberths = board.nberths;
    return RSD_OK;
}

/* How far the arrays of a layout reach, given strides that we do not trust. */
static rsd_status measure(const rsd_layout *layout, int32_t rank, const int64_t *strides,
                          int64_t *reach)
{
    int64_t first, n, element_nbytes = (int64_t)rsd_dtype_nbytes(layout->dtype);
    rsd_layout_arrays_of(layout, rank, &first, &n);
    for (int64_t i = 0; i < n; i++, strides += layout->ndim) {
        int64_t shape[RSD_MAX_DIMS], step;
        layout_array_shape(layout, first + i, shape);
        if (box_volume(layout->ndim, shape) == 0)
            continue;
        reach[i] = element_nbytes;
        for (int32_t d = 0; d < layout->ndim; d++)
            if (strides[d] < 0 || !mul_i64(shape[d] - 1, strides[d], &step) ||
                !add_i64(reach[i], step, &reach[i]))
                return fail(RSD_EPEER, "its strides make no sense");
    }
    return RSD_OK;
}

static rsd_status measure_all(struct neighbour *near, int64_t nplans, const rsd_plan *const *plans)
{
    int64_t first, nsrc, ndst, src_at = 0, dst_at = 0;
    uint64_t nstrides = 0;
    for (int64_t i = 0; i < nplans; i++) {
        rsd_layout_arrays_of(plans[i]->src, near->rank, &first, &nsrc);
        rsd_layout_arrays_of(plans[i]->dst, near->rank, &first, &ndst);
        nstrides += (uint64_t)((nsrc + ndst) * plans[i]->src->ndim);
        near->nsrc += nsrc;
        near->ndst += ndst;
    }
    if (near->nstrides != nstrides || near->nplaces != (uint64_t)(near->nsrc + near->ndst))
        return fail(RSD_EPEER, "it shows other arrays than it has");
    near->reach = mem_new((size_t)(near->nsrc + near->ndst), sizeof *near->reach);
    int64_t *strides =
        near->reach ? mem_copy(near->strides, (size_t)nstrides, sizeof *strides) : NULL;
    near->strides = strides; /* a copy of our own: nobody changes it under us */
    if (!strides)
        return RSD_ENOMEM;
    for (int64_t i = 0; i < nplans; i++) {
        int32_t ndim = plans[i]->src->ndim;
        rsd_layout_arrays_of(plans[i]->src, near->rank, &first, &nsrc);
        rsd_layout_arrays_of(plans[i]->dst, near->rank, &first, &ndst);
        TRY(measure(plans[i]->src, near->rank, strides, near->reach + src_at));
        strides += nsrc * ndim;
        TRY(measure(plans[i]->dst, near->rank, strides, near->reach + near->nsrc + dst_at));
        strides += ndst * ndim;
        src_at += nsrc;
        dst_at += ndst;
    }
    return RSD_OK;
}

/* What ranks of a host tell each other. */
struct offer {
    struct shared_segment_name segment, arena;
    int32_t status;
    char why[100];
};

static rsd_status open_neighbour(struct exchange *x, int32_t rank, const struct offer *offer,
                                 int64_t nplans, const rsd_plan *const *plans)
{
    struct neighbour *near = &x->near->list[x->near->n];
    *near = (struct neighbour){.rank = rank, .pid = offer->segment.pid};
    TRY(shared_segment_open(&offer->segment, &near->segment));
    x->near->n++;
    TRY(read_board(near));
    if (offer->arena.nbytes)
        TRY(shared_segment_open(&offer->arena, &near->arena));
    return measure_all(near, nplans, plans);
}

static rsd_status open_all(struct exchange *x, const struct offer *offers, int64_t nplans,
                           const rsd_plan *const *plans)
{
    x->near->list = mem_new((size_t)x->transport.nranks, sizeof *x->near->list);
    if (!x->near->list)
        return RSD_ENOMEM;
    for (int32_t i = 0; i < x->transport.nranks; i++) {
        if (!is_near(x, i))
            continue;
        rsd_status status = open_neighbour(x, i, &offers[i], nplans, plans);
        if (status)
            return fail_in(status, "rank %d: ", (int)i);
    }
    return RSD_OK;
}

void neighbours_drop(struct exchange *x)
{
    struct neighbours *all = x->near;
    if (!all)
        return;
    for (int32_t i = 0; i < all->n; i++) {
        struct neighbour *near = &all->list[i];
        shared_segment_drop(&near->segment);
        shared_segment_drop(&near->arena);
        if (near->reach)
            mem_free(without_const(near->strides));
        mem_free(near->reach);
    }
    shared_segment_drop(&all->own);
    mem_free(all->list);
    mem_free(all);
    x->near = NULL;
}

/* ---- meeting ---- */

/* Whether ranks of our host could not, and which says why. */
static bool somebody_failed(struct exchange *x, const struct offer *offers)
{
    for (int32_t i = 0; i < x->transport.nranks; i++)
        if (x->node_of[i] == x->node_of[x->transport.rank] && offers[i].status) {
            snprintf(x->note, sizeof x->note, "messages only: rank %d: %.*s", (int)i,
                     (int)sizeof offers[i].why, offers[i].why);
            return true;
        }
    return false;
}

static void report(struct offer *own, rsd_status status)
{
    own->status = (int32_t)status;
    snprintf(own->why, sizeof own->why, "%s", status ? rsd_error() : "");
}

static rsd_status share(struct exchange *x, struct offer *offers, int64_t nplans,
                        const rsd_plan *const *plans, const rsd_arena *arena)
{
    const rsd_transport *t = &x->transport;
    struct offer own;
    memset(&own, 0, sizeof own); /* all bytes travel */
    x->near = mem_new(1, sizeof *x->near);
    rsd_status status = x->near ? make_own(x, arena) : RSD_ENOMEM;
    report(&own, status);
    if (!status) {
        own.segment = shared_segment_name(&x->near->own);
        if (arena)
            own.arena = shared_segment_name(arena_segment(arena));
    }
    TRY(t->allgather(t->context, &own, sizeof own, offers, x->timeout));
    if (x->near && !somebody_failed(x, offers)) {
        status = open_all(x, offers, nplans, plans);
        if (!status)
            status = exchange_compile_near(x, nplans, plans);
        report(&own, status);
    }
    TRY(t->allgather(t->context, &own, sizeof own, offers, x->timeout));
    if (!x->near || somebody_failed(x, offers))
        neighbours_drop(x);
    else
        snprintf(x->note, sizeof x->note, "%d of %d ranks through shared memory",
                 (int)x->near->n + 1, (int)t->nranks);
    return RSD_OK;
}

static int by_node(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Every rank comes to the same answer. */
static rsd_status anyone_is_near(const struct exchange *x, bool *answer)
{
    size_t n = (size_t)x->transport.nranks;
    int64_t *sorted = mem_copy(x->node_of, n, sizeof *sorted);
    if (!sorted)
        return RSD_ENOMEM;
    qsort(sorted, n, sizeof *sorted, by_node);
    *answer = false;
    for (size_t i = 1; i < n; i++)
        *answer = *answer || sorted[i] == sorted[i - 1];
    mem_free(sorted);
    return RSD_OK;
}

rsd_status neighbours_meet(struct exchange *x, int64_t nplans, const rsd_plan *const *plans,
                           const rsd_arena *arena)
{
    bool answer = false;
    snprintf(x->note, sizeof x->note, "messages only: each rank is on a host of its own");
    struct offer *offers = mem_new((size_t)x->transport.nranks, sizeof *offers);
    rsd_status status = offers ? anyone_is_near(x, &answer) : RSD_ENOMEM;
    status = meet_again(x, status, 0, NULL);
    if (!status && answer)
        status = share(x, offers, nplans, plans, arena);
    mem_free(offers);
    return status;
}

/* ---- while it runs ---- */

struct neighbour *neighbour_of(const struct exchange *x, int32_t rank)
{
    int32_t lo = 0, hi = x->near ? x->near->n : 0;
    while (lo < hi) {
        int32_t middle = lo + (hi - lo) / 2;
        if (x->near->list[middle].rank == rank)
            return &x->near->list[middle];
        if (x->near->list[middle].rank < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return NULL;
}

bool all_are_near(const struct exchange *x)
{
    return x->near && x->near->n + 1 == x->transport.nranks;
}

struct berth *neighbour_berth(const struct exchange *x, const struct neighbour *near,
                              const struct parcel *parcel)
{
    for (uint64_t i = 0; i < near->nberths; i++) {
        struct berth *berth = &near->berths[i];
        uint64_t need = aligned(lane_chunk(x, parcel, true)) * NSLOTS;
        if (berth->to == x->transport.rank && berth->stage == parcel->stage &&
            berth->reduce == parcel->reduce &&
            holds(shared_segment_capacity(&near->segment), berth->slots, need, 1))
            return berth;
    }
    return NULL;
}

char *neighbour_slot(const struct neighbour *near, const struct berth *berth, uint64_t chunk,
                     uint64_t nbytes)
{
    uint64_t at = berth->slots + chunk % NSLOTS * aligned(nbytes);
    return holds(shared_segment_capacity(&near->segment), at, nbytes, 1)
               ? shared_segment_data(&near->segment) + at
               : NULL;
}

static int64_t place_of(const struct shared_segment *arena, const char *array)
{
    if (!arena || !array)
        return -1;
    uintptr_t start = (uintptr_t)shared_segment_data(arena), at = (uintptr_t)array;
    return at >= start && at - start < shared_segment_capacity(arena) ? (int64_t)(at - start) : -1;
}

void neighbours_enter(struct exchange *x, const struct verdict *verdict)
{
    struct neighbours *near = x->near;
    if (!near)
        return;
    for (int64_t i = 0; i < x->nsrc; i++)
        atomic_store_explicit(&near->places[i], place_of(near->arena, x->src[i]),
                              memory_order_relaxed);
    for (int64_t i = 0; i < x->ndst; i++)
        atomic_store_explicit(&near->places[x->nsrc + i], place_of(near->arena, x->dst[i]),
                              memory_order_relaxed);
    struct spoken *spoken = &near->board->spoken[x->run % 2];
    spoken->verdict = *verdict;
    atomic_store_explicit(&spoken->run, x->run, memory_order_release);
}

bool neighbour_has_come(const struct exchange *x, const struct neighbour *near)
{
    struct spoken *spoken = &near->board->spoken[x->run % 2];
    return atomic_load_explicit(&spoken->run, memory_order_acquire) == x->run;
}

void neighbours_beat(struct exchange *x, bool half_time)
{
    if (!x->near)
        return;
    atomic_fetch_add_explicit(&x->near->board->beats, 1, memory_order_relaxed);
    for (int32_t i = 0; half_time && i < x->near->n; i++)
        x->near->list[i].beats_before =
            atomic_load_explicit(&x->near->list[i].board->beats, memory_order_relaxed);
}

bool neighbour_is_silent(const struct neighbour *near)
{
    return atomic_load_explicit(&near->board->beats, memory_order_relaxed) == near->beats_before;
}

bool neighbours_heard(struct exchange *x, struct verdict *worst)
{
    for (int32_t i = 0; i < x->near->n; i++)
        if (!neighbour_has_come(x, &x->near->list[i]))
            return false;
    for (int32_t i = 0; i < x->near->n; i++) {
        const struct neighbour *near = &x->near->list[i];
        struct verdict heard = near->board->spoken[x->run % 2].verdict;
        if (heard.status && (!worst->status || near->rank < worst->rank))
            *worst = heard;
    }
    worst->message[sizeof worst->message - 1] = 0;
    return true;
}

/* Whether all that is given lies in the arena. */
bool parcel_is_direct(const struct exchange *x, const struct parcel *parcel)
{
    for (size_t i = 0; i < parcel->nops; i++) {
        const struct op *op = &x->ops[parcel->first_op + i];
        int64_t at = (op->from_destination ? x->nsrc : 0) + op->array;
        if (op->nbytes && atomic_load_explicit(&x->near->places[at], memory_order_relaxed) < 0)
            return false;
    }
    return x->near->arena != NULL;
}

const char *neighbour_array(const struct neighbour *near, int64_t array, bool from_destination)
{
    int64_t at = array + (from_destination ? near->nsrc : 0), end;
    int64_t place = atomic_load_explicit(&near->places[at], memory_order_relaxed);
    if (place < 0 || !add_i64(place, near->reach[at], &end) ||
        (uint64_t)end > shared_segment_capacity(&near->arena)) {
        error_set("rank %d: its array %lld is not in its arena", (int)near->rank, (long long)array);
        return NULL;
    }
    return shared_segment_data(&near->arena) + place;
}
