/* cast.c - converts elements from one dtype to another, as Tensor.to of torch.
 *
 * Floats are rounded to nearest even; f64 and integers are converted to f16 and bf16 through f32. Floats that
 * are converted to integers lose their fraction; values out of range become the nearest integer in range, and
 * NaN becomes 0. Everything except 0 is true, including NaN. Complex numbers are converted to complex numbers
 * only.
 */
#include "memory.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

/* ---- loading one element, in the widest type of its class ---- */

union wide_number {
    double f;
    int64_t i;
    uint64_t u;
};

/* Returns the element at `in`. Its class says which member is set. */
static union wide_number load_number(rsd_dtype dtype, const unsigned char *in)
{
    union wide_number wide = {.u = 0};
    float f32;
    uint16_t half;
    size_t n = rsd_dtype_nbytes(dtype);
    switch (dtype) {
    case RSD_F64:
        memcpy(&wide.f, in, 8);
        break;
    case RSD_F32:
        memcpy(&f32, in, 4);
        wide.f = (double)f32;
        break;
    case RSD_F16:
    case RSD_BF16:
        memcpy(&half, in, 2);
        wide.f = (double)(dtype == RSD_F16 ? f32_from_f16(half) : f32_from_bf16(half));
        break;
    case RSD_BOOL:
        wide.u = in[0] != 0;
        break;
    default: /* integers, little-endian, sign-extended */
        for (size_t i = 0; i < n; i++)
            wide.u |= (uint64_t)in[i] << 8 * i;
        if (dtype_class(dtype) == CLASS_SIGNED && n < 8 && wide.u >> (8 * n - 1))
            wide.u |= ~(uint64_t)0 << 8 * n;
    }
    return wide;
}

/* ---- storing one element; floats are converted to floats below ---- */

/* Returns the bits of the integer that a float is converted to. */
static uint64_t float_to_integer(double value, rsd_dtype to)
{
    int bits = 8 * (int)rsd_dtype_nbytes(to);
    bool is_signed = dtype_class(to) == CLASS_SIGNED;
    if (to == RSD_BOOL)
        return value != 0; /* true for NaN */
    if (isnan(value))
        return 0;
    double least = is_signed ? -ldexp(1, bits - 1) : 0,
           beyond = ldexp(1, is_signed ? bits - 1 : bits);
    if (value <= least)
        return is_signed ? (uint64_t)(int64_t)least : 0;
    if (value >= beyond)
        return is_signed ? ((uint64_t)1 << (bits - 1)) - 1 : ~(uint64_t)0 >> (64 - bits);
    return is_signed ? (uint64_t)(int64_t)value : (uint64_t)value;
}

/* Writes a number of class `from` to `out` as an element of dtype `to`. */
static void store_number(rsd_dtype to, unsigned char *out, enum dtype_class from,
                         union wide_number wide)
{
    size_t n = rsd_dtype_nbytes(to);
    if (dtype_class(to) == CLASS_FLOAT) {
        double f64 = from == CLASS_SIGNED ? (double)wide.i : (double)wide.u;
        float f32 = from == CLASS_SIGNED ? (float)wide.i : (float)wide.u;
        uint16_t half = to == RSD_F16 ? f16_from_f32(f32) : bf16_from_f32(f32);
        memcpy(out, to == RSD_F64 ? (void *)&f64 : to == RSD_F32 ? (void *)&f32 : (void *)&half, n);
        return;
    }
    uint64_t bits = from == CLASS_FLOAT ? float_to_integer(wide.f, to)
                    : to == RSD_BOOL    ? wide.u != 0
                                        : wide.u;
    for (size_t i = 0; i < n; i++)
        out[i] = (unsigned char)(bits >> 8 * i);
}

/* ---- floats ---- */

/* Converts n numbers, each so many bytes after the one before it. */
typedef void cast_fn(char *dst, int64_t dst_stride, const char *src, int64_t src_stride, int64_t n);

/* Contiguous numbers are converted in batches of a fixed size, which the compiler turns into vectors. */
enum { CAST_BATCH = 16 };

#define CAST_FLOATS(name, in_type, out_type, convert)                                              \
    static void name(char *dst, int64_t dst_stride, const char *src, int64_t src_stride,           \
                     int64_t n)                                                                    \
    {                                                                                              \
        int64_t i = 0;                                                                             \
        in_type x[CAST_BATCH];                                                                     \
        out_type y[CAST_BATCH];                                                                    \
        if (src_stride == sizeof *x && dst_stride == sizeof *y)                                    \
            for (; i + CAST_BATCH <= n; i += CAST_BATCH) {                                         \
                memcpy(x, src + i * src_stride, sizeof x);                                         \
                for (int k = 0; k < CAST_BATCH; k++)                                               \
                    y[k] = (out_type)convert(x[k]);                                                \
                memcpy(dst + i * dst_stride, y, sizeof y);                                         \
            }                                                                                      \
        for (; i < n; i++) {                                                                       \
            memcpy(x, src + i * src_stride, sizeof *x);                                            \
            y[0] = (out_type)convert(x[0]);                                                        \
            memcpy(dst + i * dst_stride, y, sizeof *y);                                            \
        }                                                                                          \
    }

/* A NaN becomes a quiet one, as in every conversion of a float by the CPU. */
static float quiet_f32_from_f16(uint16_t half)
{
    float value = f32_from_f16(half);
    return isnan(value) ? float_of(bits_of(value) | 0x400000u) : value;
}

#define F16_FROM_BF16(x) f16_from_f32(f32_from_bf16(x))
#define BF16_FROM_F16(x) bf16_from_f32(f32_from_f16(x))
#define F16_FROM_F64(x)  f16_from_f32((float)(x))
#define BF16_FROM_F64(x) bf16_from_f32((float)(x))

CAST_FLOATS(cast_f64_to_f32, double, float, )
CAST_FLOATS(cast_f64_to_f16, double, uint16_t, F16_FROM_F64)
CAST_FLOATS(cast_f64_to_bf16, double, uint16_t, BF16_FROM_F64)
CAST_FLOATS(cast_f32_to_f64, float, double, )
CAST_FLOATS(cast_f32_to_f16, float, uint16_t, f16_from_f32)
CAST_FLOATS(cast_f32_to_bf16, float, uint16_t, bf16_from_f32)
CAST_FLOATS(cast_f16_to_f64, uint16_t, double, quiet_f32_from_f16)
CAST_FLOATS(cast_f16_to_f32, uint16_t, float, quiet_f32_from_f16)
CAST_FLOATS(cast_f16_to_bf16, uint16_t, uint16_t, BF16_FROM_F16)
CAST_FLOATS(cast_bf16_to_f64, uint16_t, double, f32_from_bf16)
CAST_FLOATS(cast_bf16_to_f32, uint16_t, float, f32_from_bf16)
CAST_FLOATS(cast_bf16_to_f16, uint16_t, uint16_t, F16_FROM_BF16)

enum { NFLOATS = RSD_BF16 + 1 };
static cast_fn *const float_casts[NFLOATS][NFLOATS] = {
    [RSD_F64] =
        {[RSD_F32] = cast_f64_to_f32, [RSD_F16] = cast_f64_to_f16, [RSD_BF16] = cast_f64_to_bf16},
    [RSD_F32] =
        {[RSD_F64] = cast_f32_to_f64, [RSD_F16] = cast_f32_to_f16, [RSD_BF16] = cast_f32_to_bf16},
    [RSD_F16] =
        {[RSD_F64] = cast_f16_to_f64, [RSD_F32] = cast_f16_to_f32, [RSD_BF16] = cast_f16_to_bf16},
    [RSD_BF16] =
        {[RSD_F64] = cast_bf16_to_f64, [RSD_F32] = cast_bf16_to_f32, [RSD_F16] = cast_bf16_to_f16},
};

/* ---- f16 and f32 by instructions of the CPU, which have the same bits as result ---- */

#if HAVE_X86

#define CAST_VECTORS(name, in_type, out_type, vector, rest)                                        \
    __attribute__((target("avx2,f16c"))) static void name(                                         \
        char *dst, int64_t dst_stride, const char *src, int64_t src_stride, int64_t n)             \
    {                                                                                              \
        int64_t i = 0;                                                                             \
        if (src_stride == sizeof(in_type) && dst_stride == sizeof(out_type))                       \
            for (; i + 8 <= n; i += 8) {                                                           \
                const char *from = src + i * src_stride;                                           \
                char *to = dst + i * dst_stride;                                                   \
                vector;                                                                            \
            }                                                                                      \
        rest(dst + i * dst_stride, dst_stride, src + i * src_stride, src_stride, n - i);           \
    }

CAST_VECTORS(cast_f16_to_f32_vectors, uint16_t, float,
             _mm256_storeu_ps((float *)(void *)to, _mm256_cvtph_ps(_mm_loadu_si128(
                                                       (const __m128i *)(const void *)from))),
             cast_f16_to_f32)
CAST_VECTORS(cast_f32_to_f16_vectors, float, uint16_t,
             _mm_storeu_si128((__m128i *)(void *)to,
                              _mm256_cvtps_ph(_mm256_loadu_ps((const float *)(const void *)from),
                                              _MM_FROUND_TO_NEAREST_INT)),
             cast_f32_to_f16)

#endif

/* Returns the fastest function of this CPU for floats. Every CPU with AVX2 has the conversions of f16. */
static cast_fn *find_float_cast(rsd_dtype from, rsd_dtype to)
{
#if HAVE_X86
    bool wide = from == RSD_F16 && to == RSD_F32, narrow = from == RSD_F32 && to == RSD_F16;
    if ((wide || narrow) && __builtin_cpu_supports("avx2"))
        return wide ? cast_f16_to_f32_vectors : cast_f32_to_f16_vectors;
#endif
    return float_casts[from][to];
}

/* ---- many elements ---- */

struct element element_of(rsd_dtype from, rsd_dtype to)
{
    if (from == to)
        return element_of_bytes(rsd_dtype_nbytes(from));
    struct element element = {.from = from, .to = to, .nunits = 1};
    if (dtype_class(from) == CLASS_COMPLEX) {
        element.from = from == RSD_C64 ? RSD_F32 : RSD_F64;
        element.to = to == RSD_C64 ? RSD_F32 : RSD_F64;
        element.nunits = 2;
    }
    element.src_unit = (int32_t)rsd_dtype_nbytes(element.from);
    element.dst_unit = (int32_t)rsd_dtype_nbytes(element.to);
    return element;
}

static void cast_numbers(struct element element, char *dst, int64_t dst_stride, const char *src,
                         int64_t src_stride, int64_t n)
{
    cast_fn *floats = element.from <= RSD_BF16 && element.to <= RSD_BF16
                          ? find_float_cast(element.from, element.to)
                          : NULL;
    if (floats) {
        floats(dst, dst_stride, src, src_stride, n);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        store_number(element.to, (unsigned char *)dst + i * dst_stride, dtype_class(element.from),
                     load_number(element.from, (const unsigned char *)src + i * src_stride));
}

void cast_rows(struct element element, char *dst, int64_t dst_stride, const char *src,
               int64_t src_stride, int64_t run, int64_t count)
{
    if (run == 1) {
        cast_numbers(element, dst, dst_stride, src, src_stride, count);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        cast_numbers(element, dst + i * dst_stride, element.dst_unit, src + i * src_stride,
                     element.src_unit, run);
}

void cast_elements(rsd_dtype to, void *out, rsd_dtype from, const void *in, int64_t n)
{
    struct element element = element_of(from, to);
    if (element.from)
        cast_rows(element, out, 0, in, 0, n * element.nunits, 1);
    else
        memcpy(out, in, (size_t)(n * element.nunits));
}
