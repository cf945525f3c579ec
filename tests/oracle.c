/* oracle.c - reshards element by element; see oracle.h. */
#include "oracle.h"
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- indices ---- */

static int64_t up(int64_t n, int64_t m)
{
    return (n + m - 1) / m;
}

/* Appends list[lo:hi], as far as it exists. */
static void take(const int64_t *list, int64_t n, int64_t lo, int64_t hi, int64_t *out,
                 int64_t *nout)
{
    for (int64_t i = lo; i < hi && i < n; i++)
        out[(*nout)++] = list[i];
}

static void take_chunk(const int64_t *list, int64_t n, int64_t m, int64_t c, int64_t *out,
                       int64_t *nout)
{
    take(list, n, up(n, m) * c, up(n, m) * (c + 1), out, nout);
}

/* Replaces the list by the part of coordinate c of m. */
static void cut(const rsd_placement *p, int64_t m, int64_t c, int64_t *list, int64_t *n)
{
    int64_t *out = malloc(sizeof *out * (size_t)(*n + 1)), nout = 0, start = 0, end = 0;
    switch (p->kind) {
    case RSD_SHARD:
        take_chunk(list, *n, m, c, out, &nout);
        break;
    case RSD_BALANCED:
        for (int64_t i = 0; i <= c; i++) {
            start = end;
            end += *n / m + (i < *n % m);
        }
        take(list, *n, start, end, out, &nout);
        break;
    case RSD_STRIDED:
        for (int64_t piece = up(*n, p->factor); start < *n; start += piece)
            take_chunk(list + start, start + piece < *n ? piece : *n - start, m, c, out, &nout);
        break;
    case RSD_CYCLIC:
        for (int64_t i = 0; i < *n; i++)
            if (i / p->factor % m == c)
                out[nout++] = list[i];
        break;
    case RSD_SEGMENTED:
        for (int32_t s = 0; s < p->nsegments; s++) {
            int64_t *segment = malloc(sizeof *segment * (size_t)(*n + 1)), nsegment = 0;
            for (int64_t i = 0; i < *n; i++)
                if (list[i] >= start && list[i] < start + p->segments[s])
                    segment[nsegment++] = list[i];
            take_chunk(segment, nsegment, m, c, out, &nout);
            start += p->segments[s];
            free(segment);
        }
        break;
    default:
        take(list, *n, 0, *n, out, &nout);
    }
    memcpy(list, out, sizeof *out * (size_t)nout);
    *n = nout;
    free(out);
}

static void on_mesh(const rsd_layout *layout, int32_t rank, struct indices *out)
{
    const rsd_mesh *mesh = rsd_layout_mesh(layout);
    int64_t coords[RSD_MAX_AXES];
    rsd_mesh_coords(mesh, rank, coords);
    for (int32_t d = 0; d < out->ndim; d++) {
        int64_t extent = rsd_layout_shape(layout)[d];
        int32_t axes[RSD_MAX_AXES], naxes = rsd_layout_axes(layout, d, axes);
        out->n[d] = extent;
        out->list[d] = malloc(sizeof(int64_t) * (size_t)(extent + 1));
        for (int64_t i = 0; i < extent; i++)
            out->list[d][i] = i;
        for (int32_t k = 0; k < naxes; k++) {
            rsd_placement placement;
            rsd_layout_placement(layout, axes[k], &placement);
            cut(&placement, rsd_mesh_count(mesh, axes[k]), coords[axes[k]], out->list[d],
                &out->n[d]);
        }
    }
    for (int32_t a = 0; a < rsd_mesh_naxes(mesh); a++) {
        rsd_placement placement;
        rsd_layout_placement(layout, a, &placement);
        if (placement.kind != RSD_PARTIAL)
            continue;
        out->term = out->term * rsd_mesh_count(mesh, a) + coords[a];
        out->nterms *= rsd_mesh_count(mesh, a);
    }
}

void oracle_indices(const rsd_layout *layout, int64_t array, struct indices *out)
{
    rsd_array info;
    int64_t first, count, nboxes;
    rsd_layout_array(layout, array, &info);
    *out = (struct indices){.ndim = rsd_layout_ndim(layout), .nterms = 1};
    if (rsd_layout_mesh(layout)) {
        on_mesh(layout, info.rank, out);
        return;
    }
    rsd_shard *boxes;
    rsd_layout_arrays_of(layout, info.rank, &first, &count);
    rsd_layout_boxes(layout, info.rank, &boxes, &nboxes);
    const rsd_box *box = &boxes[array - first].box;
    for (int32_t d = 0; d < out->ndim; d++) {
        out->n[d] = box->len[d];
        out->list[d] = malloc(sizeof(int64_t) * (size_t)(box->len[d] + 1));
        for (int64_t i = 0; i < box->len[d]; i++)
            out->list[d][i] = box->lo[d] + i;
    }
    rsd_free(boxes);
}

void oracle_indices_free(struct indices *indices)
{
    for (int32_t d = 0; d < indices->ndim; d++)
        free(indices->list[d]);
}

/* ---- memory ---- */

int64_t *oracle_strides(const rsd_layout *layout, enum arrangement arrangement)
{
    if (arrangement == ROWS)
        return NULL;
    int64_t narrays = rsd_layout_narrays(layout);
    int32_t ndim = rsd_layout_ndim(layout);
    int64_t *strides = calloc((size_t)(narrays * ndim) + 1, sizeof *strides);
    for (int64_t k = 0; k < narrays; k++) {
        rsd_array info;
        rsd_layout_array(layout, k, &info);
        int64_t stride = arrangement == PADDED ? 2 : 1;
        for (int32_t i = 0; i < ndim; i++) {
            int32_t d = arrangement == COLUMNS ? i : ndim - 1 - i;
            strides[k * ndim + d] = stride;
            stride *= info.shape[d] ? info.shape[d] : 1;
            stride += arrangement == PADDED;
        }
    }
    return strides;
}

static void own_strides(const rsd_layout *layout, const int64_t *strides, int64_t array,
                        const rsd_array *info, int64_t *out)
{
    int64_t stride = 1;
    for (int32_t d = info->ndim - 1; d >= 0; d--) {
        out[d] = strides ? strides[array * rsd_layout_ndim(layout) + d] : stride;
        stride *= info->shape[d];
    }
}

struct memory oracle_memory(const rsd_layout *layout, const int64_t *strides)
{
    struct memory memory = {.narrays = rsd_layout_narrays(layout)};
    size_t each = rsd_dtype_nbytes(rsd_layout_dtype(layout));
    memory.array = calloc((size_t)memory.narrays + 1, sizeof *memory.array);
    memory.nbytes = calloc((size_t)memory.narrays + 1, sizeof *memory.nbytes);
    for (int64_t k = 0; k < memory.narrays; k++) {
        rsd_array info;
        rsd_layout_array(layout, k, &info);
        if (info.nbytes == 0)
            continue;
        int64_t own[RSD_MAX_DIMS], last = 0;
        own_strides(layout, strides, k, &info, own);
        for (int32_t d = 0; d < info.ndim; d++)
            last += (info.shape[d] - 1) * own[d];
        memory.nbytes[k] = (size_t)(last + 1) * each;
        memory.array[k] = malloc(memory.nbytes[k]);
        memset(memory.array[k], 0xa5, memory.nbytes[k]);
    }
    return memory;
}

void oracle_memory_free(struct memory *memory)
{
    for (int64_t k = 0; k < memory->narrays; k++)
        free(memory->array[k]);
    free(memory->array);
    free(memory->nbytes);
}

/* ---- values ---- */

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Returns a small integer, such that reductions of up to eight are exact in every dtype. */
static int number(rsd_dtype dtype, rsd_reduce reduce, int64_t index, int64_t term)
{
    uint64_t random = mix((uint64_t)index * 64 + (uint64_t)term);
    if (dtype == RSD_BOOL)
        return (int)(random % 2);
    if (reduce == RSD_REDUCE_PRODUCT)
        return 1 + (int)(random % 2);
    return (1 + (int)(random % 3)) * (reduce == RSD_REDUCE_AVG ? 24 : 1);
}

static uint16_t bf16_of(int value)
{
    float f = (float)value;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16); /* exact for number() and its reductions */
}

static uint16_t f16_of(int value)
{
    int exponent = 0;
    if (value == 0)
        return 0;
    while (value >> (exponent + 1))
        exponent++;
    return (uint16_t)((exponent + 15) << 10 | (value << (10 - exponent) & 0x3ff));
}

static void put_number(rsd_dtype dtype, int64_t value, void *out)
{
    double f64 = (double)value, c128[2] = {(double)value, 0};
    float f32 = (float)value, c64[2] = {(float)value, 0};
    uint16_t half = dtype == RSD_BF16 ? bf16_of((int)value) : f16_of((int)value);
    uint8_t truth = value != 0;
    switch (dtype) {
    case RSD_F64:
        memcpy(out, &f64, 8);
        return;
    case RSD_F32:
        memcpy(out, &f32, 4);
        return;
    case RSD_F16:
    case RSD_BF16:
        memcpy(out, &half, 2);
        return;
    case RSD_C64:
        memcpy(out, c64, 8);
        return;
    case RSD_C128:
        memcpy(out, c128, 16);
        return;
    case RSD_BOOL:
        memcpy(out, &truth, 1);
        return;
    default:
        memcpy(out, &value, rsd_dtype_nbytes(dtype)); /* integers, little-endian */
    }
}

/* A plain element is the hash of its index, in all its bytes. */
static void put_bits(rsd_dtype dtype, int64_t index, void *out)
{
    uint64_t words[2] = {mix((uint64_t)index), mix(~(uint64_t)index)};
    memcpy(out, words, rsd_dtype_nbytes(dtype));
}

static int64_t combine(rsd_reduce reduce, int64_t a, int64_t b)
{
    switch (reduce) {
    case RSD_REDUCE_MIN:
        return a < b ? a : b;
    case RSD_REDUCE_MAX:
        return a > b ? a : b;
    case RSD_REDUCE_PRODUCT:
        return a * b;
    case RSD_REDUCE_BAND:
        return a & b;
    case RSD_REDUCE_BOR:
        return a | b;
    case RSD_REDUCE_BXOR:
        return a ^ b;
    default:
        return a + b;
    }
}

static bool is_partial(const rsd_layout *layout, rsd_reduce *reduce)
{
    const rsd_mesh *mesh = rsd_layout_mesh(layout);
    for (int32_t a = 0; mesh && a < rsd_mesh_naxes(mesh); a++) {
        rsd_placement placement;
        rsd_layout_placement(layout, a, &placement);
        if (placement.kind == RSD_PARTIAL) {
            *reduce = placement.reduce;
            return true;
        }
    }
    return false;
}

/* Computes the expected destination element: the bits, or all terms combined. */
static void expected(const rsd_layout *src, int64_t nterms, int64_t index, void *out)
{
    rsd_reduce reduce;
    rsd_dtype dtype = rsd_layout_dtype(src);
    if (!is_partial(src, &reduce)) {
        put_bits(dtype, index, out);
        return;
    }
    int64_t value = number(dtype, reduce, index, 0);
    for (int64_t term = 1; term < nterms; term++)
        value = combine(reduce, value, number(dtype, reduce, index, term));
    put_number(dtype, reduce == RSD_REDUCE_AVG ? value / nterms : value, out);
}

/* ---- all elements ---- */

typedef bool element_fn(void *context, int64_t index, int64_t term, char *place);

/* Calls fn for each element of an array with its global index and its place in memory. */
static bool for_each(const rsd_layout *layout, const int64_t *strides, int64_t array, char *base,
                     element_fn *fn, void *context)
{
    struct indices indices;
    rsd_array info;
    int64_t own[RSD_MAX_DIMS], at[RSD_MAX_DIMS] = {0};
    const int64_t *shape = rsd_layout_shape(layout);
    size_t each = rsd_dtype_nbytes(rsd_layout_dtype(layout));
    oracle_indices(layout, array, &indices);
    rsd_layout_array(layout, array, &info);
    own_strides(layout, strides, array, &info, own);
    bool fine = true;
    int64_t volume = 1;
    for (int32_t d = 0; d < indices.ndim; d++) {
        volume *= indices.n[d];
        if (indices.n[d] != info.shape[d]) {
            printf("# array %lld has extent %lld in dim %d, should have %lld\n", (long long)array,
                   (long long)info.shape[d], (int)d, (long long)indices.n[d]);
            fine = false;
        }
    }
    for (int64_t i = 0; i < volume && fine; i++) {
        int64_t index = 0, place = 0;
        for (int32_t d = 0; d < indices.ndim; d++) {
            index = index * shape[d] + indices.list[d][at[d]];
            place += at[d] * own[d];
        }
        fine = fn(context, index, indices.term, base + place * (int64_t)each);
        for (int32_t d = indices.ndim - 1; d >= 0 && ++at[d] == indices.n[d]; d--)
            at[d] = 0;
    }
    oracle_indices_free(&indices);
    return fine;
}

struct filling {
    rsd_dtype dtype;
    bool numbers;
    rsd_reduce reduce;
};

static bool fill_one(void *context, int64_t index, int64_t term, char *place)
{
    const struct filling *filling = context;
    if (filling->numbers)
        put_number(filling->dtype, number(filling->dtype, filling->reduce, index, term), place);
    else
        put_bits(filling->dtype, index, place);
    return true;
}

void oracle_fill(const rsd_layout *layout, const int64_t *strides, struct memory *memory)
{
    struct filling filling = {.dtype = rsd_layout_dtype(layout)};
    filling.numbers = is_partial(layout, &filling.reduce);
    for (int64_t k = 0; k < memory->narrays; k++)
        for_each(layout, strides, k, memory->array[k], fill_one, &filling);
}

struct checking {
    const rsd_layout *src, *dst;
    int64_t nterms, array;
    size_t each;
    unsigned char
        *unchecked; /* copy of the array in which checked elements are set to 0xa5, as gaps are */
    const char *base;
};

static bool check_one(void *context, int64_t index, int64_t term, char *place)
{
    struct checking *checking = context;
    unsigned char want[16], moved[16];
    (void)term;
    expected(checking->src, checking->nterms, index, moved);
    cast_elements(rsd_layout_dtype(checking->dst), want, rsd_layout_dtype(checking->src), moved, 1);
    memset(checking->unchecked + (place - checking->base), 0xa5, checking->each);
    if (memcmp(want, place, checking->each) == 0)
        return true;
    printf("# array %lld, element %lld: found", (long long)checking->array, (long long)index);
    for (size_t i = 0; i < checking->each; i++)
        printf(" %02x", (unsigned char)place[i]);
    printf(", should be");
    for (size_t i = 0; i < checking->each; i++)
        printf(" %02x", want[i]);
    printf("\n");
    return false;
}

static bool check_arrays(const rsd_layout *src, const rsd_layout *dst, const int64_t *strides,
                         const struct memory *memory, int64_t first, int64_t n)
{
    struct checking checking = {.src = src, .dst = dst, .nterms = 1};
    struct indices indices;
    if (rsd_layout_narrays(src) > 0) {
        oracle_indices(src, 0, &indices);
        checking.nterms = indices.nterms;
        oracle_indices_free(&indices);
    }
    checking.each = rsd_dtype_nbytes(rsd_layout_dtype(dst));
    bool fine = true;
    for (int64_t k = first; k < first + n && fine; k++) {
        checking.array = k;
        checking.base = memory->array[k];
        checking.unchecked = malloc(memory->nbytes[k] + 1);
        if (memory->nbytes[k])
            memcpy(checking.unchecked, memory->array[k], memory->nbytes[k]);
        fine = for_each(dst, strides, k, memory->array[k], check_one, &checking);
        for (size_t i = 0; i < memory->nbytes[k] && fine; i++)
            if (checking.unchecked[i] != 0xa5) {
                printf("# array %lld: byte %zu lies in a gap and was written\n", (long long)k, i);
                fine = false;
            }
        free(checking.unchecked);
    }
    return fine;
}

bool oracle_check(const rsd_layout *src, const rsd_layout *dst, const int64_t *strides,
                  const struct memory *memory)
{
    return check_arrays(src, dst, strides, memory, 0, memory->narrays);
}

bool oracle_check_of(const rsd_layout *src, const rsd_layout *dst, const int64_t *strides,
                     const struct memory *memory, int32_t rank)
{
    int64_t first, n;
    rsd_layout_arrays_of(dst, rank, &first, &n);
    return check_arrays(src, dst, strides, memory, first, n);
}
