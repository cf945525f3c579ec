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

/* Four parts of 2 or 4 bytes, of which `first` and `second` have two each. */
DEVICE void gpu_split_words(gpu_u32 dtype, gpu_u64 first, gpu_u64 second, gpu_u64 *parts)
{
    gpu_u32 nbits = 8 * gpu_nbytes(dtype);
    gpu_u64 mask = ((gpu_u64)1 << nbits) - 1;
    parts[0] = gpu_part_of(dtype, first & mask);
    parts[1] = gpu_part_of(dtype, first >> nbits & mask);
    parts[2] = gpu_part_of(dtype, second & mask);
    parts[3] = gpu_part_of(dtype, second >> nbits & mask);
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
    const gpu_u64 *bases; /* of the first terms, and at last of the result: `arrays` may be in host memory */
    gpu_i64 inner;        /* the index of the innermost loop */
    gpu_i64 inner_offset; /* its offset where neighbours are contiguous */
    gpu_i64 *outer;       /* those of the others */
};

enum { GPU_NBASES = 255 };

DEVICE gpu_u64 gpu_term_base(const struct gpu_element *element, gpu_u32 number)
{
    const struct gpu_term *term = &element->terms[element->sum->first_term + number];
    return element->arrays[term->src] + (gpu_u64)term->offset;
}

/* What bases[number] is, for terms and for GPU_NBASES. */
DEVICE gpu_u64 gpu_base_of(const struct gpu_element *element, gpu_u32 number)
{
    if (number == GPU_NBASES)
        return element->arrays[element->sum->dst] + (gpu_u64)element->sum->dst_offset;
    return number < element->sum->nterms ? gpu_term_base(element, number) : 0;
}

DEVICE gpu_i64 gpu_quotient(gpu_i64 value, gpu_i64 divisor)
{
    if ((value | divisor) <= 0xffffffffll)
        return (gpu_u32)value / (gpu_u32)divisor;
    return value / divisor;
}

/* Sets the indices of an element. */
DEVICE void gpu_element_index(struct gpu_element *element, gpu_i64 number)
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
        element->outer[i] = number - next * loops[i].count;
        number = next;
    }
}

DEVICE void gpu_element_start(struct gpu_element *element, gpu_i64 number)
{
    gpu_element_index(element, number);
    element->inner_offset = element->inner * gpu_nbytes(element->sum->dtype);
}

/* The sum of n products; called, not compiled into each caller, as what is rare. */
CALLED gpu_u64 gpu_outer_offset(const gpu_i64 *outer, const gpu_i64 *strides, gpu_u32 n)
{
    gpu_u64 at = 0;
    for (gpu_u32 i = 0; i < n; i++)
        at += (gpu_u64)(outer[i] * strides[i]);
    return at;
}

DEVICE const char *gpu_element_term(const struct gpu_element *element, gpu_u32 number)
{
    const struct gpu_sum *sum = element->sum;
    gpu_u64 at = number < GPU_NBASES ? element->bases[number] : gpu_term_base(element, number);
    if (sum->nloops == 0)
        return (const char *)at;
    if (sum->nloops == 1 && sum->neighbours > 1) /* without a look at the tables */
        return (const char *)(at + (gpu_u64)element->inner_offset);
    const gpu_i64 *strides = element->strides + element->terms[sum->first_term + number].first_stride;
    at += (gpu_u64)(element->inner * strides[sum->nloops - 1]);
    if (sum->nloops > 1)
        at += gpu_outer_offset(element->outer, strides, sum->nloops - 1);
    return (const char *)at;
}

DEVICE char *gpu_element_result(const struct gpu_element *element)
{
    const struct gpu_loop *loops = element->loops + element->sum->first_loop;
    gpu_u32 n = element->sum->nloops;
    gpu_u64 at = element->bases[GPU_NBASES];
    if (n > 0)
        at += (gpu_u64)(element->inner * loops[n - 1].dst_stride);
    for (gpu_u32 i = 0; i + 1 < n; i++)
        at += (gpu_u64)(element->outer[i] * loops[i].dst_stride);
    return (char *)at;
}

/* Combines the terms of neighbouring elements, or of one, in their order. The arguments are values, so that those
 * of the caller stay in registers. */
CALLED void gpu_reduce_parts(struct gpu_element given, struct gpu_sum given_sum)
{
    const struct gpu_element *element = &given;
    const struct gpu_sum *sum = given.sum = &given_sum;
    gpu_u32 dtype = gpu_part_dtype(sum->dtype);
    gpu_u32 nbytes = gpu_nbytes(dtype);
    gpu_u32 nparts = dtype == sum->dtype ? sum->neighbours : 2;
    int multiplies = dtype != sum->dtype && sum->reduce == GPU_PRODUCT;
    gpu_u64 result[GPU_MAX_PARTS];
    gpu_u64 parts[GPU_MAX_PARTS];
    for (gpu_u32 t = 0; t < sum->nterms; t++) {
        const char *term = gpu_element_term(element, t);
        for (gpu_u32 i = 0; i < nparts; i++) {
            parts[i] = gpu_part_of(dtype, gpu_load_bits(term + i * nbytes, nbytes));
            if (t == 0)
                result[i] = parts[i];
            else if (!multiplies)
                result[i] = gpu_combine_part(dtype, sum->reduce, result[i], parts[i]);
        }
        if (t > 0 && multiplies)
            gpu_multiply_complex(dtype, result, parts);
    }
    char *out = gpu_element_result(element);
    gpu_u32 to = gpu_part_dtype(sum->to);
    gpu_u32 to_nbytes = gpu_nbytes(to);
    for (gpu_u32 i = 0; i < nparts; i++) {
        gpu_u64 bits = gpu_reduced_part(dtype, sum->divisor, result[i]);
        if (to != dtype)
            bits = gpu_cast(to, dtype, bits & ~(gpu_u64)0 >> (64 - 8 * nbytes));
        gpu_store_bits(out + i * to_nbytes, to_nbytes, bits);
    }
}

/* Whether four neighbours of 2 or 4 bytes are whole words of 8 bytes in the result and in all terms. */
DEVICE int gpu_has_words(const struct gpu_element *element)
{
    gpu_u64 bits = (gpu_u64)gpu_element_result(element);
    for (gpu_u32 t = 0; t < element->sum->nterms; t++)
        bits |= (gpu_u64)gpu_element_term(element, t);
    return element->sum->neighbours == GPU_MAX_PARTS && (bits & 7) == 0;
}

/* The same as gpu_reduce_parts for sums and averages of such neighbours, with several loads at once. The dtype is a
 * constant of each call, so that its code is short. */
DEVICE void gpu_reduce_words(const struct gpu_element *element, gpu_u32 dtype)
{
    const struct gpu_sum *sum = element->sum;
    int two = gpu_nbytes(dtype) == 4;
    float result[GPU_MAX_PARTS];
    gpu_u64 parts[GPU_MAX_PARTS];
    gpu_u64 first[GPU_TERMS_AT_ONCE];
    gpu_u64 second[GPU_TERMS_AT_ONCE];
    for (gpu_u32 base = 0; base < sum->nterms; base += GPU_TERMS_AT_ONCE) {
        for (gpu_u32 t = 0; t < GPU_TERMS_AT_ONCE; t++)
            if (base + t < sum->nterms) {
                const gpu_u64 *words = (const gpu_u64 *)gpu_element_term(element, base + t);
                first[t] = words[0];
                second[t] = two ? words[1] : first[t] >> 32;
            }
        for (gpu_u32 t = 0; t < GPU_TERMS_AT_ONCE; t++)
            if (base + t < sum->nterms) {
                gpu_split_words(dtype, first[t], second[t], parts);
                for (int i = 0; i < GPU_MAX_PARTS; i++) {
                    float part = gpu_float_of((gpu_u32)parts[i]);
                    result[i] = base + t == 0 ? part : result[i] + part;
                }
            }
    }
    gpu_u32 nbits = 8 * gpu_nbytes(dtype);
    gpu_u64 *out = (gpu_u64 *)gpu_element_result(element);
    for (int i = 0; i < GPU_MAX_PARTS; i++)
        parts[i] = gpu_reduced_part(dtype, sum->divisor, gpu_float_bits(result[i]));
    gpu_u64 low = parts[0] | parts[1] << nbits;
    gpu_u64 high = parts[2] | parts[3] << nbits;
    out[0] = two ? low : low | high << 32;
    if (two)
        out[1] = high;
}

DEVICE void gpu_reduce_element(const struct gpu_element *element)
{
    gpu_u32 dtype = element->sum->dtype;
    int wide = (dtype == GPU_F32 || dtype == GPU_BF16) && element->sum->to == dtype &&
               element->sum->reduce <= GPU_AVG && gpu_has_words(element);
    if (wide && dtype == GPU_F32)
        gpu_reduce_words(element, GPU_F32);
    else if (wide)
        gpu_reduce_words(element, GPU_BF16);
    else
        gpu_reduce_parts(*element, *element->sum);
}

)
/* clang-format on */
