/* value_code.h - dtypes on the device, and casts between them. index_code.h says how it is compiled. */
/* clang-format off */

CODE(

/* ---- values ----
 *
 * Dtypes are numbered as rsd_dtype. Conversions have the bits of memory/cast.c on the CPU,
 * those of a NaN included, which is why a NaN is never converted by the hardware. */

enum {
    GPU_F64 = 1, GPU_F32, GPU_F16, GPU_BF16, GPU_I64 = 7, GPU_I32, GPU_I16, GPU_I8, GPU_U64, GPU_U32,
    GPU_U16, GPU_U8, GPU_BOOL, GPU_C64, GPU_C128
};

union gpu_float {
    float value;
    gpu_u32 bits;
};

union gpu_double {
    double value;
    gpu_u64 bits;
};

DEVICE float gpu_float_of(gpu_u32 bits)
{
    union gpu_float both;
    both.bits = bits;
    return both.value;
}

DEVICE gpu_u32 gpu_float_bits(float value)
{
    union gpu_float both;
    both.value = value;
    return both.bits;
}

DEVICE double gpu_double_of(gpu_u64 bits)
{
    union gpu_double both;
    both.bits = bits;
    return both.value;
}

DEVICE gpu_u64 gpu_double_bits(double value)
{
    union gpu_double both;
    both.value = value;
    return both.bits;
}

DEVICE float gpu_from_bf16(gpu_u16 half)
{
    return gpu_float_of((gpu_u32)half << 16);
}

DEVICE gpu_u16 gpu_to_bf16(float value)
{
    gpu_u32 bits = gpu_float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0;
    return (gpu_u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

DEVICE float gpu_from_f16(gpu_u16 half)
{
    gpu_u32 sign = (gpu_u32)(half & 0x8000) << 16;
    gpu_u32 rest = half & 0x7fffu;
    if (rest >= 0x7c00)
        return gpu_float_of(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    if (rest >= 0x0400)
        return gpu_float_of(sign | ((rest << 13) + 0x38000000u));
    float subnormal = (float)rest * 5.9604644775390625e-08f;
    return gpu_float_of(sign | gpu_float_bits(subnormal));
}

DEVICE gpu_u16 gpu_to_f16(float value)
{
    gpu_u32 bits = gpu_float_bits(value);
    gpu_u32 magnitude = bits & 0x7fffffffu;
    gpu_u16 sign = (gpu_u16)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000u)
        return (gpu_u16)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000u)
        return (gpu_u16)(sign | 0x7c00);
    if (magnitude >= 0x38800000u)
        return (gpu_u16)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
    return (gpu_u16)(sign | (gpu_float_bits(gpu_float_of(magnitude) + 0.5f) - gpu_float_bits(0.5f)));
}

DEVICE double gpu_widen(float value)
{
    gpu_u32 bits = gpu_float_bits(value);
    if ((bits & 0x7fffffffu) <= 0x7f800000u)
        return (double)value;
    return gpu_double_of((gpu_u64)(bits >> 31) << 63 | 0x7ff8000000000000ull |
                         (gpu_u64)(bits & 0x3fffffu) << 29);
}

DEVICE float gpu_narrow(double value)
{
    gpu_u64 bits = gpu_double_bits(value);
    if ((bits & 0x7fffffffffffffffull) <= 0x7ff0000000000000ull)
        return (float)value;
    return gpu_float_of((gpu_u32)(bits >> 63) << 31 | 0x7fc00000u | (gpu_u32)(bits >> 29 & 0x3fffffu));
}

/* 1 float, 2 signed, 3 unsigned or bool; 0 for what cannot be cast element by element. */
DEVICE int gpu_class(gpu_u32 dtype)
{
    if (dtype <= GPU_BF16)
        return 1;
    if (dtype >= GPU_I64 && dtype <= GPU_I8)
        return 2;
    return dtype >= GPU_U64 && dtype <= GPU_BOOL ? 3 : 0;
}

DEVICE gpu_u32 gpu_nbytes(gpu_u32 dtype)
{
    switch (dtype) {
    case GPU_C128:
        return 16;
    case GPU_F64:
    case GPU_I64:
    case GPU_U64:
    case GPU_C64:
        return 8;
    case GPU_F32:
    case GPU_I32:
    case GPU_U32:
        return 4;
    case GPU_F16:
    case GPU_BF16:
    case GPU_I16:
    case GPU_U16:
        return 2;
    default:
        return 1;
    }
}

/* The bytes of an element, in the low bits. Elements need not be aligned. */
DEVICE gpu_u64 gpu_load_bits(const char *at, gpu_u32 nbytes)
{
    gpu_u64 bits = 0;
    if (((gpu_u64)at & (nbytes - 1)) == 0) {
        switch (nbytes) {
        case 8:
            return *(const gpu_u64 *)at;
        case 4:
            return *(const gpu_u32 *)at;
        case 2:
            return *(const gpu_u16 *)at;
        default:
            return *(const unsigned char *)at;
        }
    }
    for (gpu_u32 i = 0; i < nbytes; i++)
        bits |= (gpu_u64)(unsigned char)at[i] << 8 * i;
    return bits;
}

DEVICE void gpu_store_bits(char *at, gpu_u32 nbytes, gpu_u64 bits)
{
    if (((gpu_u64)at & (nbytes - 1)) == 0) {
        switch (nbytes) {
        case 8:
            *(gpu_u64 *)at = bits;
            return;
        case 4:
            *(gpu_u32 *)at = (gpu_u32)bits;
            return;
        case 2:
            *(gpu_u16 *)at = (gpu_u16)bits;
            return;
        default:
            *(unsigned char *)at = (unsigned char)bits;
            return;
        }
    }
    for (gpu_u32 i = 0; i < nbytes; i++)
        at[i] = (char)(bits >> 8 * i);
}

DEVICE float gpu_small_float(gpu_u32 dtype, gpu_u64 bits)
{
    return dtype == GPU_F16    ? gpu_from_f16((gpu_u16)bits)
           : dtype == GPU_BF16 ? gpu_from_bf16((gpu_u16)bits)
                               : gpu_float_of((gpu_u32)bits);
}

DEVICE gpu_u64 gpu_float_to_integer(double value, gpu_u32 to)
{
    int is_signed = gpu_class(to) == 2;
    gpu_u32 nbits = 8 * gpu_nbytes(to);
    if (to == GPU_BOOL)
        return value != 0;
    if (value != value)
        return 0;
    gpu_u64 half = (gpu_u64)1 << (nbits - 1);
    double beyond = is_signed ? (double)half : 2 * (double)half;
    double least = is_signed ? -(double)half : 0;
    if (value <= least)
        return is_signed ? (gpu_u64)0 - half : 0;
    if (value >= beyond)
        return is_signed ? half - 1 : half - 1 + half;
    return is_signed ? (gpu_u64)(gpu_i64)value : (gpu_u64)value;
}

/* The bits of an element of dtype `from` as an element of dtype `to`; not of complex numbers. */
DEVICE gpu_u64 gpu_cast(gpu_u32 to, gpu_u32 from, gpu_u64 bits)
{
    int from_class = gpu_class(from);
    if (from == GPU_BF16 && to == GPU_F32)
        return bits << 16;
    if (from == GPU_F32 && to == GPU_BF16)
        return gpu_to_bf16(gpu_float_of((gpu_u32)bits));
    if (from == GPU_BOOL)
        bits = bits != 0;
    if (from_class == 2 && gpu_nbytes(from) < 8 && bits >> (8 * gpu_nbytes(from) - 1))
        bits |= ~(gpu_u64)0 << 8 * gpu_nbytes(from);
    if (gpu_class(to) == 1) {
        double wide;
        float narrow;
        if (from_class == 1) {
            wide = from == GPU_F64 ? gpu_double_of(bits) : gpu_widen(gpu_small_float(from, bits));
            narrow = gpu_narrow(wide);
        } else {
            wide = from_class == 2 ? (double)(gpu_i64)bits : (double)bits;
            narrow = from_class == 2 ? (float)(gpu_i64)bits : (float)bits;
        }
        return to == GPU_F64    ? gpu_double_bits(wide)
               : to == GPU_F32  ? gpu_float_bits(narrow)
               : to == GPU_F16  ? gpu_to_f16(narrow)
                                : gpu_to_bf16(narrow);
    }
    if (from_class == 1)
        return gpu_float_to_integer(
            from == GPU_F64 ? gpu_double_of(bits) : gpu_widen(gpu_small_float(from, bits)), to);
    return to == GPU_BOOL ? bits != 0 : bits;
}

)
/* clang-format on */
