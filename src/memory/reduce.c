/* reduce.c - partial values combined: the one place that looks at values, and switches on the
 * dtype.
 *
 * Elements go in batches: the first term is loaded into accumulators, each further term is combined
 * with them in the order given, and the result is stored. So the same terms in the same order give
 * the same bits whoever carries them.
 *
 *     f64              in f64               i8 .. i64    in i64, so a sum wraps only in the end
 *     f32, f16, bf16   in f32, rounded once  u8 .. u64    in u64
 *     c128, c64        as two f64, f32      bool         sum and max are or, product and min are
 * and
 *
 * A NaN among floats makes their minimum and maximum a NaN. Averages divide last; those of integers
 * drop the fraction.
 */
#include "memory.h"

#include <string.h>

typedef void load_fn(void *to, const char *from, int64_t stride, int64_t n);
typedef void store_fn(char *to, int64_t stride, const void *from, int64_t n);
typedef void combine_fn(rsd_reduce reduce, void *accumulated, const void *values, int64_t n);
typedef void divide_fn(void *accumulated, int64_t divisor, int64_t n);

/* ---- in and out ---- */

#define LOAD(name, stored, held, convert)                                                          \
    static void load_##name(void *to, const char *from, int64_t stride, int64_t n)                 \
    {                                                                                              \
        held *out = to;                                                                            \
        for (int64_t i = 0; i < n; i++, from += stride) {                                          \
            stored x;                                                                              \
            memcpy(&x, from, sizeof x);                                                            \
            out[i] = (held)convert(x);                                                             \
        }                                                                                          \
    }

#define STORE(name, stored, held, convert)                                                         \
    static void store_##name(char *to, int64_t stride, const void *from, int64_t n)                \
    {                                                                                              \
        const held *in = from;                                                                     \
        for (int64_t i = 0; i < n; i++, to += stride) {                                            \
            stored x = (stored)convert(in[i]);                                                     \
            memcpy(to, &x, sizeof x);                                                              \
        }                                                                                          \
    }

#define IN_AND_OUT(name, stored, held, load_as, store_as)                                          \
    LOAD(name, stored, held, load_as)                                                              \
    STORE(name, stored, held, store_as)

#define AS_IT_IS(x) (x)
#define AS_TRUTH(x) ((x) != 0)

IN_AND_OUT(f64, double, double, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(f32, float, float, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(f16, uint16_t, float, f32_from_f16, f16_from_f32)
IN_AND_OUT(bf16, uint16_t, float, f32_from_bf16, bf16_from_f32)
IN_AND_OUT(i64, int64_t, int64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(i32, int32_t, int64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(i16, int16_t, int64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(i8, int8_t, int64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(u64, uint64_t, uint64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(u32, uint32_t, uint64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(u16, uint16_t, uint64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(u8, uint8_t, uint64_t, AS_IT_IS, AS_IT_IS)
IN_AND_OUT(truth, uint8_t, uint64_t, AS_TRUTH, AS_IT_IS)

#define COMPLEX_IN_AND_OUT(name, part)                                                             \
    static void load_##name(void *to, const char *from, int64_t stride, int64_t n)                 \
    {                                                                                              \
        part *out = to;                                                                            \
        for (int64_t i = 0; i < n; i++, from += stride)                                            \
            memcpy(out + 2 * i, from, 2 * sizeof *out);                                            \
    }                                                                                              \
    static void store_##name(char *to, int64_t stride, const void *from, int64_t n)                \
    {                                                                                              \
        const part *in = from;                                                                     \
        for (int64_t i = 0; i < n; i++, to += stride)                                              \
            memcpy(to, in + 2 * i, 2 * sizeof *in);                                                \
    }

COMPLEX_IN_AND_OUT(c64, float)
COMPLEX_IN_AND_OUT(c128, double)

/* ---- combining ---- */

#define EACH(statement)                                                                            \
    for (int64_t i = 0; i < n; i++) {                                                              \
        statement;                                                                                 \
    }                                                                                              \
    return

#define COMBINE_FLOATS(name, held)                                                                 \
    static void combine_##name(rsd_reduce reduce, void *accumulated, const void *values,           \
                               int64_t n)                                                          \
    {                                                                                              \
        held *a = accumulated;                                                                     \
        const held *v = values;                                                                    \
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
        held *a = accumulated;                                                                     \
        EACH(a[i] /= (held)divisor);                                                               \
    }

COMBINE_FLOATS(f32, float)
COMBINE_FLOATS(f64, double)

/* Sums and products of integers wrap, so they are formed without sign. */
#define COMBINE_INTEGERS(name, held)                                                               \
    static void combine_##name(rsd_reduce reduce, void *accumulated, const void *values,           \
                               int64_t n)                                                          \
    {                                                                                              \
        held *a = accumulated;                                                                     \
        const held *v = values;                                                                    \
        switch (reduce) {                                                                          \
        case RSD_REDUCE_PRODUCT:                                                                   \
            EACH(a[i] = (held)((uint64_t)a[i] * (uint64_t)v[i]));                                  \
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
            EACH(a[i] = (held)((uint64_t)a[i] + (uint64_t)v[i]));                                  \
        }                                                                                          \
    }                                                                                              \
    static void divide_##name(void *accumulated, int64_t divisor, int64_t n)                       \
    {                                                                                              \
        held *a = accumulated;                                                                     \
        EACH(a[i] /= (held)divisor);                                                               \
    }

COMBINE_INTEGERS(i64, int64_t)
COMBINE_INTEGERS(u64, uint64_t)

static void combine_truth(rsd_reduce reduce, void *accumulated, const void *values, int64_t n)
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
    [RSD_BOOL] = {load_truth, combine_truth, divide_u64, store_truth},
    [RSD_C64] = {load_c64, combine_c64, divide_c64, store_c64},
    [RSD_C128] = {load_c128, combine_c128, divide_c128, store_c128},
};

void reduce_first(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  const char *term, int64_t stride)
{
    arithmetic[reduction->dtype].load(sums->capacity, term, stride, n);
}

void reduce_next(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                 const char *term, int64_t stride)
{
    struct accumulators values;
    arithmetic[reduction->dtype].load(values.capacity, term, stride, n);
    arithmetic[reduction->dtype].combine(reduction->reduce, sums->capacity, values.capacity, n);
}

void reduce_store(const struct reduction *reduction, struct accumulators *sums, int64_t n,
                  char *dst, int64_t stride)
{
    if (reduction->divisor > 1)
        arithmetic[reduction->dtype].divide(sums->capacity, reduction->divisor, n);
    arithmetic[reduction->dtype].store(dst, stride, sums->capacity, n);
}
