/* host_data.c - arrays and ring buffers that the ranks of a host export to each other.
 *
 * Every rank has a segment of shared memory. The other ranks of its host read it, and write only the number of chunks
 * that they have read:
 *
 *     | header | strides of its arrays | offsets of its arrays in its arena | rings | ring buffers ... |
 *
 * Everything that another rank exports is checked before it is used. A wrong stride or offset can make a run fail, but
 * never reads outside of that rank's arena.
 */
#include "exchange.h"

#include <stdatomic.h>

struct host_header {
    uint64_t nstrides, noffsets, nrings;
    uint64_t strides, offsets, rings; /* offsets in the segment */
    struct device_table_name exported;
};

static uint64_t align_up(uint64_t offset)
{
    return (offset + 63) / 64 * 64;
}

/* ---- the segment of this rank ---- */

static uint64_t ring_nbytes(const struct exchange *x, const struct message *message)
{
    return align_up(channel_chunk_nbytes(x, message, true)) * NBUFFERS;
}

/* Sets the offsets in the header. Returns the offset of the first ring buffer. */
static uint64_t lay_out_header(const struct exchange *x, struct host_header *header)
{
    header->nstrides = x->nstrides;
    header->noffsets = (uint64_t)x->arrays.n;
    header->nrings = x->nsends;
    header->strides = align_up(sizeof *header);
    header->offsets = align_up(header->strides + header->nstrides * sizeof(int64_t));
    header->rings = align_up(header->offsets + header->noffsets * sizeof(int64_t));
    return align_up(header->rings + header->nrings * sizeof(struct ring));
}

/* Writes the header, the strides and the rings of this rank into its segment. */
static void fill_segment(struct exchange *x, const struct host_header *header, uint64_t buffers)
{
    char *data = shared_segment_data(&x->host->segment);
    memcpy(data, header, sizeof *header);
    x->host->exported = &((struct host_header *)(void *)data)->exported;
    x->host->offsets = (void *)(data + header->offsets);
    x->host->rings = (void *)(data + header->rings);
    if (x->nstrides)
        memcpy(data + header->strides, x->strides, x->nstrides * sizeof *x->strides);
    for (size_t i = 0; i < x->nsends; i++) {
        const struct message *message = &x->sends[i];
        struct ring *ring = &x->host->rings[i];
        ring->to = message->peer;
        ring->stage = message->stage;
        ring->reduce = message->reduce;
        ring->buffers = buffers;
        if (peer_host_index(x->peer, message->peer) >= 0)
            buffers += ring_nbytes(x, message);
    }
}

rsd_status host_data_make(struct exchange *x, const rsd_arena *arena)
{
    struct host_header header = {0};
    uint64_t buffers = lay_out_header(x, &header), nbytes = buffers;
    x->host = mem_new(1, sizeof *x->host);
    if (!x->host)
        return RSD_ENOMEM;
    x->host->n = peer_host_nranks(x->peer);
    x->host->narrays = x->arrays.n;
    x->host->arena = arena ? arena_segment(arena) : NULL;
    x->host->ranks = mem_new((size_t)x->host->n, sizeof *x->host->ranks);
    if (!x->host->ranks)
        return RSD_ENOMEM;
    for (size_t i = 0; i < x->nsends; i++)
        if (peer_host_index(x->peer, x->sends[i].peer) >= 0)
            nbytes += ring_nbytes(x, &x->sends[i]);
    TRY(shared_segment_new((size_t)nbytes, &x->host->segment));
    fill_segment(x, &header, buffers);
    return RSD_OK;
}

struct host_data_names host_data_export(const struct exchange *x)
{
    struct host_data_names names;
    memset(&names, 0, sizeof names); /* all bytes are sent */
    names.segment = shared_segment_name(&x->host->segment);
    if (x->host->arena)
        names.arena = shared_segment_name(x->host->arena);
    return names;
}

void host_data_drop(struct exchange *x)
{
    struct host_data *data = x->host;
    if (!data)
        return;
    for (int32_t i = 0; data->ranks && i < data->n; i++) {
        struct host_rank *host = &data->ranks[i];
        shared_segment_drop(&host->segment);
        shared_segment_drop(&host->arena);
        mem_free(without_const(host->strides));
        run_arrays_drop(&host->arrays);
    }
    shared_segment_drop(&data->segment);
    mem_free(data->ranks);
    mem_free(data);
    x->host = NULL;
}

/* ---- the segments of other ranks ---- */

static bool fits_segment(const struct shared_segment *segment, uint64_t offset, uint64_t count,
                         uint64_t element_nbytes)
{
    uint64_t capacity = shared_segment_capacity(segment);
    return offset % 64 == 0 && offset <= capacity && count <= (capacity - offset) / element_nbytes;
}

/* Reads the header of another rank, and checks that everything lies in its segment. */
static rsd_status read_host_header(struct host_rank *host, const int64_t **strides)
{
    char *data = shared_segment_data(&host->segment);
    struct host_header header = {0};
    bool whole = shared_segment_capacity(&host->segment) >= sizeof header;
    if (whole)
        memcpy(&header, data, sizeof header); /* read once, because the other rank may change it */
    if (!whole || !fits_segment(&host->segment, header.strides, header.nstrides, sizeof(int64_t)) ||
        !fits_segment(&host->segment, header.offsets, header.noffsets, sizeof(int64_t)) ||
        !fits_segment(&host->segment, header.rings, header.nrings, sizeof(struct ring)))
        return fail(RSD_EPEER, "invalid shared memory header");
    *strides = (const void *)(data + header.strides);
    host->exported = &((const struct host_header *)(const void *)data)->exported;
    host->offsets = (void *)(data + header.offsets);
    host->rings = (void *)(data + header.rings);
    host->nstrides = header.nstrides;
    host->noffsets = header.noffsets;
    host->nrings = header.nrings;
    return RSD_OK;
}

/* Computes the extents of the arrays of a rank from its strides, which are not trusted. */
static rsd_status measure_plans(struct host_rank *host, const int64_t *exported,
                                const struct bind_request *request)
{
    uint64_t left = host->nstrides;
    int64_t *strides = mem_copy(exported, (size_t)host->nstrides, sizeof *strides);
    if (!strides)
        return RSD_ENOMEM;
    host->strides = strides; /* a copy that no other rank can change */
    struct plan_arrays arrays = {.strides = strides};
    for (int64_t i = 0; i < request->nplans; i++) {
        arrays = plan_arrays_next(&arrays, request->plans[i], host->rank);
        if (plan_arrays_nstrides(&arrays) > left)
            return fail(RSD_EPEER, "shared memory header does not match the plans");
        TRY(run_arrays_add(&host->arrays, request->plans[i], &arrays));
        left -= plan_arrays_nstrides(&arrays);
    }
    if (left != 0 || host->noffsets != (uint64_t)host->arrays.n)
        return fail(RSD_EPEER, "shared memory header does not match the plans");
    return RSD_OK;
}

rsd_status host_data_open(struct exchange *x, int32_t index, const struct host_data_names *names,
                          const struct bind_request *request)
{
    struct host_rank *host = &x->host->ranks[index];
    host->rank = peer_host_rank(x->peer, index);
    if (host->rank == x->rank)
        return RSD_OK;
    const int64_t *strides = NULL;
    rsd_status status = shared_segment_open(&names->segment, &host->segment);
    if (!status)
        status = read_host_header(host, &strides);
    if (!status && names->arena.nbytes)
        status = shared_segment_open(&names->arena, &host->arena);
    if (!status)
        status = measure_plans(host, strides, request);
    host->first_array = x->host->narrays;
    x->host->narrays += host->arrays.n;
    return status ? fail_in(status, "rank %d: ", (int)host->rank) : RSD_OK;
}

/* ---- runs ---- */

struct host_rank *host_data_rank(const struct exchange *x, int32_t rank)
{
    int32_t index = x->host && rank != x->rank ? peer_host_index(x->peer, rank) : -1;
    return index >= 0 ? &x->host->ranks[index] : NULL;
}

struct ring *host_data_ring(const struct exchange *x, const struct host_rank *host,
                            const struct message *message)
{
    for (uint64_t i = 0; i < host->nrings; i++) {
        struct ring *ring = &host->rings[i];
        if (ring->to == x->rank && ring->stage == message->stage &&
            ring->reduce == message->reduce &&
            fits_segment(&host->segment, ring->buffers, ring_nbytes(x, message), 1))
            return ring;
    }
    return NULL;
}

char *ring_buffer(const struct shared_segment *segment, const struct ring *ring, uint64_t chunk,
                  uint64_t nbytes)
{
    uint64_t at = ring->buffers + chunk % NBUFFERS * align_up(nbytes);
    return fits_segment(segment, at, nbytes, 1) ? shared_segment_data(segment) + at : NULL;
}

/* Returns the offset of an array in the arena, or -1 if it is not in it. */
static int64_t arena_offset(const struct shared_segment *arena, const char *array)
{
    if (!arena || !array)
        return -1;
    uintptr_t start = (uintptr_t)shared_segment_data(arena), at = (uintptr_t)array;
    return at >= start && at - start < shared_segment_capacity(arena) ? (int64_t)(at - start) : -1;
}

void host_data_publish(struct exchange *x)
{
    struct host_data *data = x->host;
    if (!data)
        return;
    for (int64_t i = 0; i < x->arrays.n; i++)
        atomic_store_explicit(&data->offsets[i], arena_offset(data->arena, x->arrays.addresses[i]),
                              memory_order_relaxed);
}

bool host_data_is_direct(const struct exchange *x, const struct message *message)
{
    for (size_t i = 0; i < message->nboxes; i++) {
        const struct array_box *box = &x->boxes[message->first_box + i];
        if (box->packed.nbytes &&
            atomic_load_explicit(&x->host->offsets[box->array], memory_order_relaxed) < 0)
            return false;
    }
    return x->host->arena != NULL;
}

static int64_t host_offset(const struct host_rank *host, int64_t number)
{
    return atomic_load_explicit(&host->offsets[number - host->first_array], memory_order_relaxed);
}

bool host_rank_has(const struct host_rank *host, int64_t number)
{
    return host_offset(host, number) >= 0;
}

const char *host_rank_array(const struct host_rank *host, int64_t number)
{
    const struct array_span *span = &host->arrays.spans[number - host->first_array];
    int64_t offset = host_offset(host, number);
    uint64_t capacity = shared_segment_capacity(&host->arena);
    if (offset < 0 || (uint64_t)offset > capacity || span->nbytes > capacity - (uint64_t)offset) {
        error_set("rank %d: array %lld lies outside of its arena", (int)host->rank,
                  (long long)span->index);
        return NULL;
    }
    return shared_segment_data(&host->arena) + offset;
}
