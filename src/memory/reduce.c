/* reduce.c - combines partial values.
 *
 * Elements are combined in batches: the first term is loaded into accumulators, each further term is combined
 * with them in order, and the result is stored. So the same terms in the same order have a result of the same
 * bits, with any number of threads and ranks.
 *
 *     dtype            accumulated in
 *     f64              f64
 *     f32, f16, bf16   f32, rounded once
 *     c128, c64        two f64, two f32
 *     i8 .. i64        i64: a sum wraps only at the end
 *     u8 .. u64        u64
 *     bool             sum and max are "or", product and min are "and"
 *
 * The minimum and the maximum of floats are NaN if one of them is. Averages divide at the end; those of
 * integers drop the fraction. A NaN that is stored is the quiet one without a payload, since the CPU and GPUs
 * keep different payloads.
 */
#include "memory.h"

#include <math.h>
#include <string.h>

typedef void load_fn(void *to, const char *from, int64_t stride, int64_t n);
typedef void store_fn(char *to, int64_t stride, const void *from, int64_t n);
typedef void combine_fn(rsd_reduce reduce, void *accumulated, const void *values, int64_t n);
typedef void divide_fn(void *accumulated, int64_t divisor, int64_t n);

/* ---- loading and storing ---- */

#define LOAD(name, stored, wide, convert)                                                          \
    static void load_##name(void *to, const char *from, int64_t stride, int64_t n)                 \
    {                                                                                              \
        wide *out = to;                                                                            \
        for (int64_t i = 0; i < n; i++, from += stride) {                                          \
            stored x;                                                                              \
            memcpy(&x, from, sizeof x);                                                            \
            out[i] = (wide)convert(x);                                                             \
        }                                                                                          \
    }

#define STORE(name, stored, wide, convert)                                                         \
    static void store_##name(char *to, int64_t stride, const void *from, int64_t n)                \
    {                                                                                              \
        const wide *in = from;                                                                     \
        for (int64_t i = 0; i < n; i++, to += stride) {                                            \
            stored x = (stored)convert(in[i]);                                                     \
            memcpy(to, &x, sizeof x);                                                              \
        }                                                                                          \
    }

#define LOAD_AND_STORE(name, stored, wide, load_as, store_as)                                      \
    LOAD(name, stored, wide, load_as)                                                              \
    STORE(name, stored, wide, store_as)

#define UNCHANGED(x) (x)
#define QUIET(x)     ((x) != (x) ? NAN : (x))
#define TO_F16(x)    f16_from_f32(QUIET(x))
#define TO_BF16(x)   bf16_from_f32(QUIET(x))
#define TO_BOOL(x)   ((x) != 0)

LOAD_AND_STORE(f64, double, double, UNCHANGED, QUIET)
LOAD_AND_STORE(f32, float, float, UNCHANGED, QUIET)
LOAD_AND_STORE(f16, uint16_t, float, f32_from_f16, TO_F16)
LOAD_AND_STORE(bf16, uint16_t, float, f32_from_bf16, TO_BF16)
LOAD_AND_STORE(i64, int64_t, int64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(i32, int32_t, int64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(i16, int16_t, int64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(i8, int8_t, int64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(u64, uint64_t, uint64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(u32, uint32_t, uint64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(u16, uint16_t, uint64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(u8, uint8_t, uint64_t, UNCHANGED, UNCHANGED)
LOAD_AND_STORE(logical, uint8_t, uint64_t, TO_BOOL, UNCHANGED)

#define LOAD_AND_STORE_COMPLEX(name, part)                                                         \
    static void load_##name(void *to, const char *from, int64_t stride, int64_t n)                 \
    {                                                                                              \
        part *out = to;                                                                            \
        for (int64_t i = 0; i < n; i++, from += stride)                                            \
            memcpy(out + 2 * i, from, 2 * sizeof *out);                                            \
    }                                                                                              \
    static void store_##name(char *to, int64_t stride, const void *from, int64_t n)                \
    {                                                                                              \
        const part *in = from;                                                                     \
        for (int64_t i = 0; i < n; i++, to += stride) {                                            \
            part x[2] = {(part)QUIET(in[2 * i]), (part)QUIET(in[2 * i + 1])};                      \
            memcpy(to, x, sizeof x);                                                               \
        }                                                                                          \
    }

LOAD_AND_STORE_COMPLEX(c64, float)
LOAD_AND_STORE_COMPLEX(c128, double)

/* ---- combining ---- */

#define EACH(statement)                                                                            \
    for (int64_t i = 0; i < n; i++) {                                                              \
        statement;                                                                                 \
    }                                                                                              \
    return

#define COMBINE_FLOATS(name, wide)                                                                 \
    static void combine_##name(rsd_reduce reduce, void *accumulated, const void *values,           \
                               int64_t n)                                                          \
    {                                                                                              \
        wide *a = accumulated;                                                                     \
        const wide *v = values;                                                                    \
        switch (reduce) {                                                                          \
        case RSD_REDUCE_PRODUCT:                                                                   \
            EACH(a[i] *= v[i]);                                                                    \
        case RSD_REDUCE_MIN:                                                                       \
            EACH(a[i] = v[i] < a[i] || v[i] != v[i] ? v[i] : a[i]);                                \
        case RSD_REDUCE_MAX:                                                                       \
            EACH(a[i] = v[i] > a[i] || v[i] != v[i] ? v[i] : a[i]);                                \
        default:                                                                                   \
            EACH(a[i] += v[i]);                                                                    \
        }                                                                                          \
    }                                                                                              \
    static void divide_##name(void *accumulated, int64_t divisor, int64_t n)                       \
    {                                                                                              \
        wide *a = accumulated;                                                                     \
        EACH(a[i] /= (wide)divisor);                                                               \
    }

COMBINE_FLOATS(f32, float)
COMBINE_FLOATS(f64, double)

/* Sums and products of integers wrap, so they are computed as unsigned integers. */
#define COMBINE_INTEGERS(name, wide)                                                               \
    static void combine_##name(rsd_reduce reduce, void *accumulated, const void *values,           \
                               int64_t n)                                                          \
    {                                                                                              \
        wide *a = accumulated;                                                                     \
        const wide *v = values;                                                                    \
        switch (reduce) {                                                                          \
        case RSD_REDUCE_PRODUCT:                                                                   \
            EACH(a[i] = (wide)((uint64_t)a[i] * (uint64_t)v[i]));                                  \
        case RSD_REDUCE_MIN:                                                                       \
            EACH(a[i] = v[i] < a[i] ? v[i] : a[i]);                                                \
        case RSD_REDUCE_MAX:                                                                       \
            EACH(a[i] = v[i] > a[i] ? v[i] : a[i]);                                                \
        case RSD_REDUCE_BAND:                                                                      \
            EACH(a[i] &= v[i]);                                                                    \
        case RSD_REDUCE_BOR:                                                                       \
            EACH(a[i] |= v[i]);                                                                    \
        case RSD_REDUCE_BXOR:                                                                      \
            EACH(a[i] ^= v[i]);                                                                    \
        default:                                                                                   \
            EACH(a[i] = (wide)((uint64_t)a[i] + (uint64_t)v[i]));                                  \
        }                                                                                          \
    }                                                                                              \
    static void divide_##name(void *accumulated, int64_t divisor, int64_t n)                       \
    {                                                                                              \
        wide *a = accumulated;                                                                     \
        EACH(a[i] /= (wide)divisor);                                                               \
    }

COMBINE_INTEGERS(i64, int64_t)
COMBINE_INTEGERS(u64, uint64_t)

static void combine_logical(rsd_reduce reduce, void *accumulated, const void *values, int64_t n)
{
    if (reduce == RSD_REDUCE_SUM)
        reduce = RSD_REDUCE_BOR;
    combine_u64(reduce, accumulated, values, n);
}

#define COMBINE_COMPLEX(name, part)                                                                \
    static void combine_##name(rsd_reduce reduce, void *accumulated, const void *values,           \
                               int64_t n)                                                          \
    {                                                                                              \
        part *a = accumulated;                                                                     \
        const part *v = values;                                                                    \
        for (int64_t i = 0; i < 2 * n; i += 2) {                                                   \
            part re = a[i] + v[i], im = a[i + 1] + v[i + 1];                                       \
            if (reduce == RSD_REDUCE_PRODUCT) {                                                    \
                re = a[i] * v[i] - a[i + 1] * v[i + 1];                                            \
                im = a[i] * v[i + 1] + a[i + 1] * v[i];                                            \
            }                                                                                      \
            a[i] = re;                                                                             \
            a[i + 1] = im;                                                                         \
        }                                                                                          \
    }                                                                                              \
    static void divide_##name(void *accumulated, int64_t divisor, int64_t n)                       \
    {                                                                                              \
        part *a = accumulated;                                                                     \
        for (int64_t i = 0; i < 2 * n; i++)                                                        \
            a[i] /= (part)divisor;                                                                 \
    }

COMBINE_COMPLEX(c64, float)
COMBINE_COMPLEX(c128, double)

/* ---- by dtype ---- */

static const struct {
    load_fn *load;
    combine_fn *combine;
    divide_fn *divide;
    store_fn *store;
} arithmetic[] = {
    [RSD_F64] = {load_f64, combine_f64, divide_f64, store_f64},
    [RSD_F32] = {load_f32, combine_f32, divide_f32, store_f32},
    [RSD_F16] = {load_f16, combine_f32, divide_f32, store_f16},
    [RSD_BF16] = {load_bf16, combine_f32, divide_f32, store_bf16},
    [RSD_I64] = {load_i64, combine_i64, divide_i64, store_i64},
    [RSD_I32] = {load_i32, combine_i64, divide_i64, store_i32},
    [RSD_I16] = {load_i16, combine_i64, divide_i64, store_i16},
    [RSD_I8] = {load_i8, combine_i64, divide_i64, store_i8},
    [RSD_U64] = {load_u64, combine_u64, divide_u64, store_u64},
    [RSD_U32] = {load_u32, combine_u64, divide_u64, store_u32},
    [RSD_U16] = {load_u16, combine_u64, divide_u64, store_u16},
    [RSD_U8] = {load_u8, combine_u64, divide_u64, store_u8},
    [RSD_BOOL] = {load_logical, combine_logical, divide_u64, store_logical},
    [RSD_C64] = {load_c64, combine_c64, divide_c64, store_c64},
    [RSD_C128] = {load_c128, combine_c128, divide_c128, store_c128},
};

void reduce_first(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  const char *term, int64_t stride)
{
    arithmetic[reduction->dtype].load(sums->values, term, stride, n);
}

void reduce_next(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                 const char *term, int64_t stride)
{
    struct accumulators more;
    arithmetic[reduction->dtype].load(more.values, term, stride, n);
    arithmetic[reduction->dtype].combine(reduction->reduce, sums->values, more.values, n);
}

void reduce_store(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  char *dst, int64_t stride)
{
    if (reduction->divisor > 1)
        arithmetic[reduction->dtype].divide(sums->values, reduction->divisor, n);
    if (reduction->to == reduction->dtype) {
        arithmetic[reduction->dtype].store(dst, stride, sums->values, n);
        return;
    }
    struct accumulators rounded; /* to the dtype of the terms, before it is converted */
    struct element element = element_of(reduction->dtype, reduction->to);
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(reduction->dtype);
    arithmetic[reduction->dtype].store((char *)rounded.values, element_nbytes, sums->values, n);
    cast_rows(element, dst, stride, (const char *)rounded.values, element_nbytes, element.nunits,
              n);
}
