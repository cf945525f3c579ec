/* slicing.c - what each rank keeps of a buffer: along a dim, through its elements, or all of it.
 *
 *     dim 0 of 4 ranks          through the elements of [3,5]
 *     +-----+                   0 0 0 0 1
 *     |  0  |                   1 1 1 2 2       what a rank has of them in row-major order
 *     |  1  |                   2 2 3 3 3       is at most 2 * ndim - 1 boxes
 *     |  2  |
 *     |  3  |
 *     +-----+
 */
#include "stash.h"

enum { SLICINGS_KEPT = 64 };

/* ---- what to cut ---- */

/* The first dim that is cut without a rest: its slices are as good as any, and the boxes are fewest. */
static int32_t even_dim(const struct description *d, int32_t nranks)
{
    for (int32_t i = 0; i < d->ndim; i++)
        if (d->shape[i] % nranks == 0)
            return i;
    return FLAT;
}

rsd_status describe(const rsd_stash_buffer *buffer, int32_t nranks, int64_t keep_nbytes,
                    struct description *description)
{
    struct description d = {buffer->dtype, buffer->ndim, buffer->dim, buffer->shape};
    rsd_layout *checked;
    TRY(layout_start(d.dtype, d.ndim, d.shape, &checked));
    int64_t volume = checked->volume, nbytes = volume * (int64_t)rsd_dtype_nbytes(d.dtype);
    rsd_layout_free(checked);
    int32_t dim = d.dim < 0 ? d.dim + d.ndim : d.dim;
    if (buffer->dim == RSD_STASH_ANY_DIM)
        dim = FLAT;
    else if (dim < 0 || dim >= d.ndim)
        dim = WHOLE;
    if (dim == WHOLE && !buffer->whole && d.ndim > 0)
        return fail(RSD_EINVAL, "dim %d of a buffer with %d dims", (int)buffer->dim, (int)d.ndim);
    if (buffer->whole || volume < nranks || nbytes <= keep_nbytes || nranks == 1)
        dim = WHOLE;
    else if (dim == FLAT)
        dim = even_dim(&d, nranks);
    d.dim = dim;
    *description = d;
    return RSD_OK;
}

/* ---- boxes ---- */

/* The boxes that elements lo to hi of row-major order are: each as far out as it can be. */
static int64_t boxes_of_range(const struct description *d, int64_t lo, int64_t hi, rsd_box *boxes)
{
    int64_t strides[RSD_MAX_DIMS] = {1}, n = 0, stride = 1;
    for (int32_t i = d->ndim; i-- > 0;) {
        strides[i] = stride;
        stride *= d->shape[i];
    }
    while (lo < hi) {
        rsd_box *box = &boxes[n++];
        int32_t at = 0;
        while (at + 1 < d->ndim && (lo % strides[at] != 0 || hi - lo < strides[at]))
            at++;
        int64_t index = lo / strides[at] % d->shape[at];
        int64_t len = min_i64((hi - lo) / strides[at], d->shape[at] - index);
        *box = (rsd_box){.ndim = d->ndim};
        for (int32_t i = 0; i < d->ndim; i++) {
            box->lo[i] = i <= at ? lo / strides[i] % d->shape[i] : 0;
            box->len[i] = i < at ? 1 : i == at ? len : d->shape[i];
        }
        lo += len * strides[at];
    }
    return n;
}

static rsd_status flat_layout(const struct description *d, int32_t nranks, rsd_layout **layout)
{
    size_t most = (size_t)nranks * 2 * RSD_MAX_DIMS, ndim = (size_t)d->ndim;
    int32_t *ranks = mem_new(most, sizeof *ranks);
    int64_t *lo = mem_new(most * ndim, sizeof *lo), *len = mem_new(most * ndim, sizeof *len);
    rsd_status status = ranks && lo && len ? RSD_OK : RSD_ENOMEM;
    int64_t n = 0, at = 0, volume = box_volume(d->ndim, d->shape);
    for (int32_t rank = 0; rank < nranks && !status; rank++) {
        rsd_box boxes[2 * RSD_MAX_DIMS];
        int64_t end = at + volume / nranks + (rank < volume % nranks);
        int64_t nboxes = boxes_of_range(d, at, end, boxes);
        for (int64_t i = 0; i < nboxes; i++, n++) {
            ranks[n] = rank;
            copy_i64s(lo + n * d->ndim, boxes[i].lo, d->ndim);
            copy_i64s(len + n * d->ndim, boxes[i].len, d->ndim);
        }
        at = end;
    }
    if (!status)
        status = rsd_layout_new_boxes(d->dtype, d->ndim, d->shape, n, ranks, lo, len, layout);
    mem_free(ranks);
    mem_free(lo);
    mem_free(len);
    return status;
}

/* Whole or along a dim. */
static rsd_status mesh_layout(const struct description *d, int32_t nranks, rsd_kind kind,
                              rsd_layout **layout)
{
    int64_t count = nranks;
    rsd_mesh *mesh;
    rsd_placement placement = {.kind = kind, .dim = d->dim};
    TRY(rsd_mesh_new(1, &count, NULL, NULL, &mesh));
    rsd_status status = rsd_layout_new(d->dtype, d->ndim, d->shape, mesh, &placement, layout);
    rsd_mesh_free(mesh);
    return status;
}

/* ---- a slicing ---- */

static void slicing_free(struct slicing *slicing)
{
    rsd_plan_free(slicing->plan);
    rsd_layout_free(slicing->sliced);
    rsd_layout_free(slicing->whole);
    mem_free(slicing->boxes);
    mem_free(slicing);
}

static size_t box_nbytes(const struct slicing *slicing, const rsd_box *box)
{
    return (size_t)box_volume(box->ndim, box->len) * rsd_dtype_nbytes(slicing->whole->dtype);
}

static rsd_status find_boxes(struct slicing *slicing, int32_t rank)
{
    rsd_shard *held;
    TRY(rsd_layout_boxes(slicing->sliced ? slicing->sliced : slicing->whole, rank, &held,
                         &slicing->nboxes));
    slicing->boxes = mem_new((size_t)slicing->nboxes, sizeof *slicing->boxes);
    for (int64_t i = 0; i < slicing->nboxes && slicing->boxes; i++) {
        slicing->boxes[i] = held[i].box;
        slicing->nbytes += box_nbytes(slicing, &held[i].box);
    }
    rsd_free(held);
    return slicing->boxes ? RSD_OK : RSD_ENOMEM;
}

static rsd_status slicing_make(struct slicing *slicing, const struct description *d, int32_t rank,
                               int32_t nranks)
{
    slicing->dim = d->dim;
    TRY(mesh_layout(d, nranks, RSD_REPLICATE, &slicing->whole));
    slicing->nbytes_whole = (size_t)slicing->whole->volume * rsd_dtype_nbytes(d->dtype);
    if (d->dim == FLAT)
        TRY(flat_layout(d, nranks, &slicing->sliced));
    else if (d->dim >= 0)
        TRY(mesh_layout(d, nranks, RSD_BALANCED, &slicing->sliced));
    if (slicing->sliced)
        TRY(rsd_plan_new(slicing->sliced, slicing->whole, NULL, &slicing->plan));
    return find_boxes(slicing, rank);
}

static bool is_of(const struct slicing *slicing, const struct description *d)
{
    if (slicing->dim != d->dim || slicing->whole->dtype != d->dtype ||
        slicing->whole->ndim != d->ndim)
        return false;
    for (int32_t i = 0; i < d->ndim; i++)
        if (slicing->whole->shape[i] != d->shape[i])
            return false;
    return true;
}

/* Forgets cuts that nobody needs, from the one that was not asked for longest. */
static void forget_some(struct slicings *made)
{
    while (made->n > SLICINGS_KEPT) {
        struct slicing **last = NULL;
        for (struct slicing **at = &made->first; *at; at = &(*at)->next)
            if ((*at)->references == 0)
                last = at;
        if (!last)
            return;
        struct slicing *slicing = *last;
        *last = slicing->next;
        made->n--;
        slicing_free(slicing);
    }
}

rsd_status slicing_find(struct slicings *made, const struct description *d, int32_t rank,
                        int32_t nranks, struct slicing **slicing)
{
    struct slicing **at = &made->first;
    while (*at && !is_of(*at, d))
        at = &(*at)->next;
    struct slicing *found = *at;
    if (found) {
        *at = found->next;
    } else {
        found = mem_new(1, sizeof *found);
        rsd_status status = found ? slicing_make(found, d, rank, nranks) : RSD_ENOMEM;
        if (status && found)
            slicing_free(found);
        TRY(status);
        made->n++;
    }
    found->next = made->first;
    made->first = found;
    found->references++;
    forget_some(made);
    *slicing = found;
    return RSD_OK;
}

void slicing_release(struct slicings *made, struct slicing *slicing)
{
    slicing->references--;
    forget_some(made);
}

void slicings_drop(struct slicings *made)
{
    while (made->first) {
        struct slicing *slicing = made->first;
        made->first = slicing->next;
        slicing_free(slicing);
    }
    made->n = 0;
}

/* ---- elements ---- */

rsd_status slicing_strides(const struct slicing *slicing, const int64_t *given, bool written,
                           int64_t *strides)
{
    const rsd_layout *whole = slicing->whole;
    TRY(array_strides(whole, 0, given, false, written, strides));
    for (int32_t d = 0; d < whole->ndim; d++)
        if (whole->shape[d] <= 1 || whole->volume == 0)
            strides[d] = 0;
    return RSD_OK;
}

/* One box between a buffer and the next dense place of a slice. */
static void copy_box(const struct slicing *slicing, const rsd_box *box, const int64_t *strides,
                     const char *from, char *to, bool take)
{
    struct loops loops = {0};
    size_t element_nbytes = rsd_dtype_nbytes(slicing->whole->dtype);
    int64_t dense = (int64_t)element_nbytes, offset = 0;
    for (int32_t d = box->ndim; d-- > 0;) {
        loops_add(&loops, box->len[d], take ? strides[d] : dense, take ? dense : strides[d]);
        dense *= box->len[d];
        offset += box->lo[d] * strides[d];
    }
    loops_finish(&loops, element_nbytes);
    struct copier copier = copier_best();
    copy_loops(&copier, false, &loops, take ? from + offset : from, take ? to : to + offset);
}

void slicing_take(const struct slicing *slicing, const char *whole, const int64_t *strides,
                  char *slice)
{
    for (int64_t i = 0; i < slicing->nboxes; i++) {
        size_t nbytes = box_nbytes(slicing, &slicing->boxes[i]);
        if (nbytes > 0)
            copy_box(slicing, &slicing->boxes[i], strides, whole, slice, true);
        slice += nbytes;
    }
}

void slicing_give(const struct slicing *slicing, const char *slice, char *whole,
                  const int64_t *strides)
{
    for (int64_t i = 0; i < slicing->nboxes; i++) {
        size_t nbytes = box_nbytes(slicing, &slicing->boxes[i]);
        if (nbytes > 0)
            copy_box(slicing, &slicing->boxes[i], strides, slice, whole, false);
        slice += nbytes;
    }
}

/* ---- hashes ---- */

void slicing_hash(const struct slicing *slicing, struct hash *hash)
{
    hash_start(hash, "stash 1");
    hash_i64(hash, slicing->dim);
    hash_i64(hash, slicing->whole->dtype);
    hash_i64(hash, slicing->whole->ndim);
    hash_i64s(hash, slicing->whole->shape, (size_t)slicing->whole->ndim);
}

/* Bytes on their way into a hash, some words at a time. */
struct hashing {
    struct hash *hash;
    int64_t words[512];
    size_t nbytes; /* of words that are there */
};

static void hash_words(struct hashing *hashing)
{
    size_t rest = hashing->nbytes % sizeof(int64_t);
    if (rest)
        memset((char *)hashing->words + hashing->nbytes, 0, sizeof(int64_t) - rest);
    hash_i64s(hashing->hash, hashing->words, (hashing->nbytes + 7) / sizeof(int64_t));
    hashing->nbytes = 0;
}

static void hash_more(struct hashing *hashing, const char *bytes, size_t n)
{
    while (n > 0) {
        size_t capacity = sizeof hashing->words - hashing->nbytes,
               some = n < capacity ? n : capacity;
        memcpy((char *)hashing->words + hashing->nbytes, bytes, some);
        hashing->nbytes += some;
        bytes += some;
        n -= some;
        if (hashing->nbytes == sizeof hashing->words)
            hash_words(hashing);
    }
}

/* In row-major order, so that strides do not matter. */
void slicing_hash_values(const struct slicing *slicing, const char *whole, const int64_t *strides,
                         struct hash *hash)
{
    const rsd_layout *layout = slicing->whole;
    struct hashing hashing = {.hash = hash};
    int64_t index[RSD_MAX_DIMS] = {0}, run = (int64_t)rsd_dtype_nbytes(layout->dtype);
    int32_t outer = layout->ndim;
    hash_start(hash, "values 1");
    if (layout->volume == 0)
        return;
    while (outer > 0 && (strides[outer - 1] == run || layout->shape[outer - 1] == 1))
        run *= layout->shape[--outer];
    for (;;) {
        hash_more(&hashing, whole, (size_t)run);
        int32_t d = outer - 1;
        for (; d >= 0; d--) {
            whole += strides[d];
            if (++index[d] < layout->shape[d])
                break;
            whole -= layout->shape[d] * strides[d];
            index[d] = 0;
        }
        if (d < 0)
            break;
    }
    hash_words(&hashing);
}
