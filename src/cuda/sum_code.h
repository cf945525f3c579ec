/* sum_code.h - reductions on the device. index_code.h says how it is compiled. */
/* clang-format off */

CODE(

/* ---- reductions: the operations of rsd_reduce, combined in the order of the terms ---- */

enum { GPU_SUM, GPU_AVG, GPU_MIN, GPU_MAX, GPU_PRODUCT, GPU_BAND, GPU_BOR, GPU_BXOR };

DEVICE float gpu_combine_float(gpu_u32 reduce, float a, float v)
{
    switch (reduce) {
    case GPU_PRODUCT:
        return a * v;
    case GPU_MIN:
        return v < a || v != v ? v : a;
    case GPU_MAX:
        return v > a || v != v ? v : a;
    default:
        return a + v;
    }
}

DEVICE double gpu_combine_double(gpu_u32 reduce, double a, double v)
{
    switch (reduce) {
    case GPU_PRODUCT:
        return a * v;
    case GPU_MIN:
        return v < a || v != v ? v : a;
    case GPU_MAX:
        return v > a || v != v ? v : a;
    default:
        return a + v;
    }
}

DEVICE gpu_u64 gpu_combine_integer(gpu_u32 reduce, int is_signed, gpu_u64 a, gpu_u64 v)
{
    int below = is_signed ? (gpu_i64)v < (gpu_i64)a : v < a;
    switch (reduce) {
    case GPU_PRODUCT:
        return a * v;
    case GPU_MIN:
        return below ? v : a;
    case GPU_MAX:
        return below ? a : v;
    case GPU_BAND:
        return a & v;
    case GPU_BOR:
        return a | v;
    case GPU_BXOR:
        return a ^ v;
    default:
        return a + v;
    }
}

/* A reduced NaN is the one quiet NaN, whatever made it. */
DEVICE float gpu_quiet_float(float value)
{
    return value != value ? gpu_float_of(0x7fc00000u) : value;
}

DEVICE double gpu_quiet_double(double value)
{
    return value != value ? gpu_double_of(0x7ff8000000000000ull) : value;
}

/* ---- parts ----
 *
 * A thread combines the parts of several elements at once, which are contiguous: of several neighbouring real
 * numbers, or the two of a complex one. While they are combined, a part of a small float is a float, and one of an
 * integer has 64 bits. */

enum { GPU_MAX_PARTS = 4, GPU_TERMS_AT_ONCE = 4 };

DEVICE gpu_u32 gpu_part_dtype(gpu_u32 dtype)
{
    return dtype == GPU_C64 ? GPU_F32 : dtype == GPU_C128 ? GPU_F64 : dtype;
}

DEVICE gpu_u64 gpu_part_of(gpu_u32 dtype, gpu_u64 bits)
{
    gpu_u32 nbytes = gpu_nbytes(dtype);
    if (gpu_class(dtype) == 1)
        return dtype == GPU_F64 ? bits : gpu_float_bits(gpu_small_float(dtype, bits));
    if (dtype == GPU_BOOL)
        return bits != 0;
    if (gpu_class(dtype) == 2 && nbytes < 8 && bits >> (8 * nbytes - 1))
        bits |= ~(gpu_u64)0 << 8 * nbytes;
    return bits;
}

/* Four parts of up to 4 bytes are loaded as words where their address allows it. */
DEVICE void gpu_load_parts(gpu_u32 dtype, gpu_u32 nparts, const char *at, gpu_u64 *parts)
{
    gpu_u32 nbytes = gpu_nbytes(dtype);
    gpu_u32 word = nbytes == 1 ? 4 : 8;
    gpu_u32 per_word = word / nbytes;
    int wide = nparts == GPU_MAX_PARTS && nbytes < 8 && ((gpu_u64)at & (word - 1)) == 0;
    gpu_u64 bits[GPU_MAX_PARTS] = {0};
    if (wide) {
        gpu_u64 mask = ((gpu_u64)1 << 8 * nbytes) - 1;
        gpu_u64 words[2];
        words[0] = gpu_load_bits(at, word);
        words[1] = nbytes == 4 ? gpu_load_bits(at + 8, 8) : 0;
        for (gpu_u32 i = 0; i < GPU_MAX_PARTS; i++)
            bits[i] = words[i / per_word] >> 8 * nbytes * (i % per_word) & mask;
    } else {
        for (gpu_u32 i = 0; i < GPU_MAX_PARTS; i++)
            if (i < nparts)
                bits[i] = gpu_load_bits(at + i * nbytes, nbytes);
    }
    for (gpu_u32 i = 0; i < GPU_MAX_PARTS; i++)
        parts[i] = gpu_part_of(dtype, bits[i]);
}

DEVICE gpu_u64 gpu_combine_part(gpu_u32 dtype, gpu_u32 reduce, gpu_u64 a, gpu_u64 v)
{
    if (dtype == GPU_F64)
        return gpu_double_bits(gpu_combine_double(reduce, gpu_double_of(a), gpu_double_of(v)));
    if (gpu_class(dtype) == 1)
        return gpu_float_bits(gpu_combine_float(reduce, gpu_float_of((gpu_u32)a), gpu_float_of((gpu_u32)v)));
    if (dtype == GPU_BOOL && reduce == GPU_SUM)
        reduce = GPU_BOR;
    return gpu_combine_integer(reduce, gpu_class(dtype) == 2, a, v);
}

DEVICE void gpu_multiply_complex(gpu_u32 dtype, gpu_u64 *a, const gpu_u64 *v)
{
    if (dtype == GPU_F64) {
        double re = gpu_double_of(a[0]);
        double im = gpu_double_of(a[1]);
        a[0] = gpu_double_bits(re * gpu_double_of(v[0]) - im * gpu_double_of(v[1]));
        a[1] = gpu_double_bits(re * gpu_double_of(v[1]) + im * gpu_double_of(v[0]));
    } else {
        float re = gpu_float_of((gpu_u32)a[0]);
        float im = gpu_float_of((gpu_u32)a[1]);
        a[0] = gpu_float_bits(re * gpu_float_of((gpu_u32)v[0]) - im * gpu_float_of((gpu_u32)v[1]));
        a[1] = gpu_float_bits(re * gpu_float_of((gpu_u32)v[1]) + im * gpu_float_of((gpu_u32)v[0]));
    }
}

/* The bits of the result of a part. */
DEVICE gpu_u64 gpu_reduced_part(gpu_u32 dtype, gpu_i64 divisor, gpu_u64 part)
{
    if (dtype == GPU_F64) {
        double value = gpu_double_of(part);
        return gpu_double_bits(gpu_quiet_double(divisor > 1 ? value / (double)divisor : value));
    }
    if (gpu_class(dtype) == 1) {
        float value = gpu_float_of((gpu_u32)part);
        value = gpu_quiet_float(divisor > 1 ? value / (float)divisor : value);
        return dtype == GPU_F16    ? gpu_to_f16(value)
               : dtype == GPU_BF16 ? gpu_to_bf16(value)
                                   : gpu_float_bits(value);
    }
    if (divisor <= 1)
        return part;
    return gpu_class(dtype) == 2 ? (gpu_u64)((gpu_i64)part / divisor) : part / (gpu_u64)divisor;
}

/* ---- elements ---- */

/* Where the terms of some neighbouring elements lie. */
struct gpu_element {
    const struct gpu_sum *sum;
    const struct gpu_loop *loops;
    const struct gpu_term *terms;
    const gpu_i64 *strides;
    const gpu_u64 *arrays;
    gpu_i64 inner; /* the index of the innermost loop, which is in a register */
    gpu_i64 index[GPU_MAX_LOOPS];
};

DEVICE gpu_i64 gpu_quotient(gpu_i64 value, gpu_i64 divisor)
{
    if ((value | divisor) <= 0xffffffffll)
        return (gpu_u32)value / (gpu_u32)divisor;
    return value / divisor;
}

DEVICE void gpu_element_start(struct gpu_element *element, gpu_i64 number)
{
    const struct gpu_loop *loops = element->loops + element->sum->first_loop;
    gpu_u32 n = element->sum->nloops;
    element->inner = number;
    if (n < 2)
        return;
    number = gpu_quotient(number, loops[n - 1].count);
    element->inner -= number * loops[n - 1].count;
    for (gpu_u32 i = n - 1; i-- > 0;) {
        gpu_i64 next = gpu_quotient(number, loops[i].count);
        element->index[i] = number - next * loops[i].count;
        number = next;
    }
}

DEVICE const char *gpu_element_term(const struct gpu_element *element, gpu_u32 number)
{
    const struct gpu_term *term = &element->terms[element->sum->first_term + number];
    const gpu_i64 *strides = element->strides + term->first_stride;
    gpu_u32 n = element->sum->nloops;
    gpu_i64 at = term->offset + (n > 0 ? element->inner * strides[n - 1] : 0);
    for (gpu_u32 i = 0; i + 1 < n; i++)
        at += element->index[i] * strides[i];
    return (const char *)(element->arrays[term->src] + (gpu_u64)at);
}

DEVICE char *gpu_element_result(const struct gpu_element *element)
{
    const struct gpu_loop *loops = element->loops + element->sum->first_loop;
    gpu_u32 n = element->sum->nloops;
    gpu_i64 at = element->sum->dst_offset + (n > 0 ? element->inner * loops[n - 1].dst_stride : 0);
    for (gpu_u32 i = 0; i + 1 < n; i++)
        at += element->index[i] * loops[i].dst_stride;
    return (char *)(element->arrays[element->sum->dst] + (gpu_u64)at);
}

/* Combines the terms of neighbouring elements in their order. Some terms are loaded at once. */
DEVICE void gpu_reduce_element(const struct gpu_element *element)
{
    const struct gpu_sum *sum = element->sum;
    gpu_u32 dtype = gpu_part_dtype(sum->dtype);
    gpu_u32 nbytes = gpu_nbytes(dtype);
    gpu_u32 nparts = dtype == sum->dtype ? sum->neighbours : 2;
    int multiplies = dtype != sum->dtype && sum->reduce == GPU_PRODUCT;
    gpu_u64 result[GPU_MAX_PARTS] = {0};
    gpu_u64 parts[GPU_TERMS_AT_ONCE][GPU_MAX_PARTS];
    for (gpu_u32 first = 0; first < sum->nterms; first += GPU_TERMS_AT_ONCE) {
        for (gpu_u32 t = 0; t < GPU_TERMS_AT_ONCE; t++)
            if (first + t < sum->nterms)
                gpu_load_parts(dtype, nparts, gpu_element_term(element, first + t), parts[t]);
        for (gpu_u32 t = 0; t < GPU_TERMS_AT_ONCE; t++) {
            if (first + t >= sum->nterms)
                continue;
            if (first + t > 0 && multiplies)
                gpu_multiply_complex(dtype, result, parts[t]);
            for (gpu_u32 i = 0; i < GPU_MAX_PARTS && !(first + t > 0 && multiplies); i++)
                result[i] = first + t == 0 ? parts[t][i]
                                           : gpu_combine_part(dtype, sum->reduce, result[i], parts[t][i]);
        }
    }
    char *out = gpu_element_result(element);
    for (gpu_u32 i = 0; i < GPU_MAX_PARTS; i++)
        if (i < nparts)
            gpu_store_bits(out + i * nbytes, nbytes, gpu_reduced_part(dtype, sum->divisor, result[i]));
}

)
/* clang-format on */
