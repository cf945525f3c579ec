/* test_box_copy.c - boxes between strided arrays and their packed form equal a copy element by element, with
 * every copier of this machine, for random boxes, strides and ranges of bytes. */
#include "memory.h"
#include "random.h"
#include "tap.h"

#include <stdlib.h>

enum { MAX_NBYTES = 1 << 16, GUARD = 64, NROUNDS = 2000 };

/* An array with space around it that nothing may write to. */
struct array {
    char space[GUARD + MAX_NBYTES + GUARD];
    int64_t strides[RSD_MAX_DIMS];
};

struct box {
    int32_t ndim;
    int64_t len[RSD_MAX_DIMS];
    size_t element_nbytes, nbytes;
};

static char *first_element(struct array *array)
{
    return array->space + GUARD;
}

static void fill_array(struct array *array, struct random *random)
{
    for (size_t i = 0; i < sizeof array->space; i++)
        array->space[i] = (char)random_below(random, 256);
}

/* The offset of element `index` of the box in row-major order. */
static int64_t element_offset(const struct box *box, const int64_t *strides, int64_t index)
{
    int64_t offset = 0;
    for (int32_t d = box->ndim - 1; d >= 0; d--) {
        offset += index % box->len[d] * strides[d];
        index /= box->len[d];
    }
    return offset;
}

static void random_box(struct random *random, struct box *box)
{
    static const size_t sizes[] = {1, 2, 4, 8, 16};
    box->element_nbytes = sizes[random_below(random, 5)];
    box->ndim = (int32_t)random_below(random, 5);
    box->nbytes = box->element_nbytes;
    for (int32_t d = 0; d < box->ndim; d++) {
        box->len[d] = 1 + random_below(random, d == box->ndim - 1 ? 40 : 5);
        box->nbytes *= (size_t)box->len[d];
    }
}

/* Strides of an array that contains the box: dims in any order, with gaps or without. */
static void random_strides(struct random *random, const struct box *box, struct array *array)
{
    int32_t order[RSD_MAX_DIMS];
    int64_t stride = (int64_t)box->element_nbytes;
    bool gaps = random_below(random, 2), shuffled = random_below(random, 2);
    for (int32_t i = 0; i < box->ndim; i++)
        order[i] = box->ndim - 1 - i;
    for (int32_t i = box->ndim - 1; i > 0 && shuffled; i--) {
        int32_t k = (int32_t)random_below(random, i + 1), swapped = order[i];
        order[i] = order[k];
        order[k] = swapped;
    }
    for (int32_t i = 0; i < box->ndim; i++) {
        array->strides[order[i]] = stride;
        stride *= box->len[order[i]] + (gaps ? random_below(random, 2) : 0);
    }
}

static bool fits(const struct box *box, const struct array *array)
{
    int64_t last = 0;
    for (int32_t d = 0; d < box->ndim; d++)
        last += (box->len[d] - 1) * array->strides[d];
    return last + (int64_t)box->element_nbytes <= MAX_NBYTES;
}

static void copies(struct random *random)
{
    static struct array src, dst, expected;
    CASE("a box between two arrays");
    for (int round = 0; round < NROUNDS; round++) {
        struct copier copier = copier_level((int)random_below(random, copier_nlevels()));
        bool stream = random_below(random, 2);
        struct box box;
        random_box(random, &box);
        random_strides(random, &box, &src);
        random_strides(random, &box, &dst);
        if (!fits(&box, &src) || !fits(&box, &dst))
            continue;
        fill_array(&src, random);
        fill_array(&dst, random);
        memcpy(expected.space, dst.space, sizeof dst.space);
        for (size_t i = 0; i < box.nbytes / box.element_nbytes; i++)
            memcpy(first_element(&expected) + element_offset(&box, dst.strides, (int64_t)i),
                   first_element(&src) + element_offset(&box, src.strides, (int64_t)i),
                   box.element_nbytes);
        box_copy(&copier, stream, box.ndim, box.len, box.element_nbytes, first_element(&src),
                 src.strides, first_element(&dst), dst.strides);
        CHECK(memcmp(dst.space, expected.space, sizeof dst.space) == 0, "round %d", round);
    }
}

/* The packed form, element by element. */
static void pack_elements(const struct box *box, const int64_t *strides, const char *array,
                          bool column_major, char *packed)
{
    struct box turned = *box;
    int64_t turned_strides[RSD_MAX_DIMS];
    for (int32_t d = 0; d < box->ndim; d++) {
        int32_t from = column_major ? box->ndim - 1 - d : d;
        turned.len[d] = box->len[from];
        turned_strides[d] = strides[from];
    }
    for (size_t i = 0; i < box->nbytes / box->element_nbytes; i++)
        memcpy(packed + i * box->element_nbytes,
               array + element_offset(&turned, turned_strides, (int64_t)i), box->element_nbytes);
}

static void packs(struct random *random)
{
    static struct array array, before;
    static char packed[MAX_NBYTES], expected[MAX_NBYTES], again[MAX_NBYTES];
    CASE("any bytes of the packed form are packed and unpacked");
    for (int round = 0; round < NROUNDS; round++) {
        struct copier copier = copier_level((int)random_below(random, copier_nlevels()));
        bool column_major = random_below(random, 2), stream = random_below(random, 2);
        struct loop loops[RSD_MAX_DIMS];
        struct box box;
        random_box(random, &box);
        random_strides(random, &box, &array);
        if (!fits(&box, &array))
            continue;
        fill_array(&array, random);
        struct packed_box form = box_packed(box.ndim, box.len, element_of_bytes(box.element_nbytes),
                                            array.strides, column_major, loops);
        CHECK(form.nbytes == box.nbytes && form.nbytes % form.run == 0);

        pack_elements(&box, array.strides, first_element(&array), column_major, expected);
        uint64_t at = (uint64_t)random_below(random, (int64_t)form.nbytes);
        size_t n = (size_t)random_below(random, (int64_t)(form.nbytes - at) + 1);
        memset(packed, 1, sizeof packed);
        box_pack(&copier, &form, first_element(&array), at, n, packed + at);
        memset(expected, 1, (size_t)at);
        memset(expected + at + n, 1, sizeof expected - at - n);
        CHECK(memcmp(packed, expected, sizeof packed) == 0, "packed, round %d", round);

        /* After unpacking other bytes into the range, the packed form has them, and nothing else has changed. */
        pack_elements(&box, array.strides, first_element(&array), column_major, expected);
        for (size_t i = 0; i < n; i++)
            expected[at + i] = packed[at + i] = (char)random_below(random, 256);
        memcpy(before.space, array.space, sizeof array.space);
        box_unpack(&copier, stream, &form, packed + at, at, n, first_element(&array));
        pack_elements(&box, array.strides, first_element(&array), column_major, again);
        CHECK(memcmp(again, expected, box.nbytes) == 0, "unpacked, round %d", round);
        size_t changed = 0;
        for (size_t i = 0; i < sizeof array.space; i++)
            changed += array.space[i] != before.space[i];
        CHECK(changed <= n, "%zu bytes changed, %zu were unpacked", changed, n);
    }
}

/* A dtype of elements of some bytes, and one that they are converted to. */
static void cast_of(size_t element_nbytes, rsd_dtype *from, rsd_dtype *to)
{
    static const rsd_dtype casts[][2] = {{RSD_U8, RSD_I64},
                                         {RSD_BF16, RSD_F32},
                                         {RSD_F32, RSD_BF16},
                                         {RSD_C64, RSD_C128},
                                         {RSD_C128, RSD_C64}};
    for (size_t i = 0; i < sizeof casts / sizeof *casts; i++)
        if (rsd_dtype_nbytes(casts[i][0]) == element_nbytes) {
            *from = casts[i][0];
            *to = casts[i][1];
        }
}

static void converts(struct random *random)
{
    static struct array array;
    static char raw[MAX_NBYTES], again[MAX_NBYTES], packed[8 * MAX_NBYTES],
        expected[8 * MAX_NBYTES];
    CASE("any elements of a packed form of another dtype are packed and unpacked");
    for (int round = 0; round < NROUNDS; round++) {
        struct copier copier = copier_level((int)random_below(random, copier_nlevels()));
        bool column_major = random_below(random, 2);
        struct loop loops[RSD_MAX_DIMS];
        struct box box;
        rsd_dtype from = (rsd_dtype)0, to = (rsd_dtype)0;
        random_box(random, &box);
        random_strides(random, &box, &array);
        cast_of(box.element_nbytes, &from, &to);
        if (!fits(&box, &array) || !from)
            continue;
        fill_array(&array, random);
        struct packed_box form =
            box_packed(box.ndim, box.len, element_of(from, to), array.strides, column_major, loops);
        int64_t nelements = (int64_t)(box.nbytes / box.element_nbytes),
                first = random_below(random, nelements),
                count = random_below(random, nelements - first + 1);
        size_t wide = rsd_dtype_nbytes(to), at = (size_t)first * wide, n = (size_t)count * wide;
        CHECK(form.nbytes == (uint64_t)nelements * wide);
        pack_elements(&box, array.strides, first_element(&array), column_major, raw);
        memset(expected, 1, sizeof expected);
        cast_elements(to, expected + at, from, raw + (size_t)first * box.element_nbytes, count);
        memset(packed, 1, sizeof packed);
        box_pack(&copier, &form, first_element(&array), at, n, packed + at);
        CHECK(memcmp(packed, expected, sizeof packed) == 0, "packed, round %d", round);

        for (size_t i = 0; i < n; i++)
            packed[at + i] = (char)random_below(random, 256);
        cast_elements(from, raw + (size_t)first * box.element_nbytes, to, packed + at, count);
        box_unpack(&copier, false, &form, packed + at, at, n, first_element(&array));
        pack_elements(&box, array.strides, first_element(&array), column_major, again);
        CHECK(memcmp(again, raw, box.nbytes) == 0, "unpacked, round %d", round);
    }
}

static void runs(struct random *random)
{
    static struct array src, dst;
    CASE("loops visit every run of a box once");
    for (int round = 0; round < NROUNDS; round++) {
        struct box box;
        random_box(random, &box);
        random_strides(random, &box, &src);
        if (!fits(&box, &src))
            continue;
        box_packed_strides(box.ndim, box.len, box.element_nbytes, dst.strides);
        struct loops loops = box_loops(box.ndim, box.len, element_of_bytes(box.element_nbytes),
                                       src.strides, dst.strides);
        fill_array(&src, random);
        fill_array(&dst, random);
        int64_t index[MAX_LOOPS] = {0}, from = 0, to = 0, next = 0;
        do {
            CHECK(to == next, "runs of the packed side come in order");
            memcpy(first_element(&dst) + to, first_element(&src) + from, loops.run);
            next += (int64_t)loops.run;
        } while (loops_next(&loops, index, &from, &to));
        CHECK(next == (int64_t)box.nbytes && from == 0 && to == 0);
        for (size_t i = 0; i < box.nbytes / box.element_nbytes; i++)
            CHECK(memcmp(first_element(&dst) + i * box.element_nbytes,
                         first_element(&src) + element_offset(&box, src.strides, (int64_t)i),
                         box.element_nbytes) == 0);
    }
}

int main(void)
{
    struct random random = {12};
    copies(&random);
    packs(&random);
    converts(&random);
    runs(&random);
    return tap_end();
}
