/* half.h - the two 16-bit floats, to and from f32: exact one way, rounded to nearest even the
 * other.
 *
 *     f16    s eeeee mmmmmmmmmm         bias 15, with subnormals
 *     bf16   s eeeeeeee mmmmmmm         the upper half of an f32
 */
#ifndef HALF_H
#define HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f32_from_bf16(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

static inline uint16_t bf16_from_f32(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0; /* as torch: one NaN */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static inline float f32_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00)
        return float_of(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    if (rest >= 0x0400)
        return float_of(sign | ((rest << 13) + 0x38000000u));
    float subnormal = (float)rest * 0x1p-24f;
    return float_of(sign | bits_of(subnormal));
}

static inline uint16_t f16_from_f32(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00); /* rounds beyond the largest */
    if (magnitude >= 0x38800000u)
        return (uint16_t)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
    /* A subnormal is a multiple of 2^-24: adding 0.5 puts that at the last bit of an f32. */
    return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
}

#endif
