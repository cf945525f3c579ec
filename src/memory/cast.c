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

enum number_class { NONE, FLOATS, SIGNED, UNSIGNED, COMPLEXES };

/* Returns what a number of this dtype is; NONE: elements of this dtype are not numbers that can be converted. */
static enum number_class class_of(rsd_dtype dtype)
{
    switch (dtype) {
    case RSD_F64:
    case RSD_F32:
    case RSD_F16:
    case RSD_BF16:
        return FLOATS;
    case RSD_I64:
    case RSD_I32:
    case RSD_I16:
    case RSD_I8:
        return SIGNED;
    case RSD_U64:
    case RSD_U32:
    case RSD_U16:
    case RSD_U8:
    case RSD_BOOL:
        return UNSIGNED;
    case RSD_C64:
    case RSD_C128:
        return COMPLEXES;
    default:
        return NONE;
    }
}

bool cast_supported(rsd_dtype to, rsd_dtype from)
{
    if (to == from)
        return true;
    return class_of(to) != NONE && class_of(from) != NONE &&
           (class_of(to) == COMPLEXES) == (class_of(from) == COMPLEXES);
}

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
        if (class_of(dtype) == SIGNED && n < 8 && wide.u >> (8 * n - 1))
            wide.u |= ~(uint64_t)0 << 8 * n;
    }
    return wide;
}

/* ---- storing one element ---- */

/* Returns the bits of the integer that a float is converted to. */
static uint64_t float_to_integer(double value, rsd_dtype to)
{
    int bits = 8 * (int)rsd_dtype_nbytes(to);
    bool is_signed = class_of(to) == SIGNED;
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
static void store_number(rsd_dtype to, unsigned char *out, enum number_class from,
                         union wide_number wide)
{
    size_t n = rsd_dtype_nbytes(to);
    if (class_of(to) == FLOATS) {
        double f64 = from == FLOATS ? wide.f : from == SIGNED ? (double)wide.i : (double)wide.u;
        float f32 = from == FLOATS ? (float)wide.f : from == SIGNED ? (float)wide.i : (float)wide.u;
        uint16_t half = to == RSD_F16 ? f16_from_f32(f32) : bf16_from_f32(f32);
        memcpy(out, to == RSD_F64 ? (void *)&f64 : to == RSD_F32 ? (void *)&f32 : (void *)&half, n);
        return;
    }
    uint64_t bits = from == FLOATS   ? float_to_integer(wide.f, to)
                    : to == RSD_BOOL ? wide.u != 0
                                     : wide.u;
    for (size_t i = 0; i < n; i++)
        out[i] = (unsigned char)(bits >> 8 * i);
}

/* ---- many elements ---- */

static void cast_f32_to_bf16(unsigned char *out, const unsigned char *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float f32;
        memcpy(&f32, in + 4 * i, 4);
        uint16_t half = bf16_from_f32(f32);
        memcpy(out + 2 * i, &half, 2);
    }
}

static void cast_bf16_to_f32(unsigned char *out, const unsigned char *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, in + 2 * i, 2);
        float f32 = f32_from_bf16(half);
        memcpy(out + 4 * i, &f32, 4);
    }
}

void cast_elements(rsd_dtype to, void *out, rsd_dtype from, const void *in, int64_t n)
{
    if (class_of(to) == COMPLEXES) {
        rsd_dtype part = RSD_F32, other = RSD_F64;
        cast_elements(to == RSD_C64 ? part : other, out, from == RSD_C64 ? part : other, in, 2 * n);
        return;
    }
    if (to == from) {
        memcpy(out, in, (size_t)n * rsd_dtype_nbytes(to));
    } else if (from == RSD_F32 &&
               to == RSD_BF16) { /* the most common casts have loops of their own */
        cast_f32_to_bf16(out, in, n);
    } else if (from == RSD_BF16 && to == RSD_F32) {
        cast_bf16_to_f32(out, in, n);
    } else {
        size_t in_nbytes = rsd_dtype_nbytes(from), out_nbytes = rsd_dtype_nbytes(to);
        for (int64_t i = 0; i < n; i++)
            store_number(to, (unsigned char *)out + (size_t)i * out_nbytes, class_of(from),
                         load_number(from, (const unsigned char *)in + (size_t)i * in_nbytes));
    }
}
