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

/* Where the terms of one element lie. */
struct gpu_element {
    const struct gpu_sum *sum;
    const struct gpu_loop *loops;
    const struct gpu_term *terms;
    const gpu_i64 *strides;
    const gpu_u64 *arrays;
    gpu_i64 index[GPU_MAX_LOOPS];
};

DEVICE void gpu_element_start(struct gpu_element *element, gpu_i64 number)
{
    const struct gpu_loop *loops = element->loops + element->sum->first_loop;
    for (gpu_u32 i = element->sum->nloops; i-- > 0;) {
        gpu_i64 next = number / loops[i].count;
        element->index[i] = number - next * loops[i].count;
        number = next;
    }
}

DEVICE const char *gpu_element_term(const struct gpu_element *element, gpu_u32 number)
{
    const struct gpu_term *term = &element->terms[element->sum->first_term + number];
    const gpu_i64 *strides = element->strides + term->first_stride;
    gpu_i64 at = term->offset;
    for (gpu_u32 i = 0; i < element->sum->nloops; i++)
        at += element->index[i] * strides[i];
    return (const char *)(element->arrays[term->src] + (gpu_u64)at);
}

DEVICE char *gpu_element_result(const struct gpu_element *element)
{
    const struct gpu_loop *loops = element->loops + element->sum->first_loop;
    gpu_i64 at = element->sum->dst_offset;
    for (gpu_u32 i = 0; i < element->sum->nloops; i++)
        at += element->index[i] * loops[i].dst_stride;
    return (char *)(element->arrays[element->sum->dst] + (gpu_u64)at);
}

DEVICE void gpu_reduce_small_float(const struct gpu_element *element)
{
    const struct gpu_sum *sum = element->sum;
    gpu_u32 nbytes = gpu_nbytes(sum->dtype);
    float result = gpu_small_float(sum->dtype, gpu_load_bits(gpu_element_term(element, 0), nbytes));
    for (gpu_u32 i = 1; i < sum->nterms; i++)
        result = gpu_combine_float(
            sum->reduce, result,
            gpu_small_float(sum->dtype, gpu_load_bits(gpu_element_term(element, i), nbytes)));
    if (sum->divisor > 1)
        result /= (float)sum->divisor;
    result = gpu_quiet_float(result);
    gpu_store_bits(gpu_element_result(element), nbytes,
                   sum->dtype == GPU_F16    ? gpu_to_f16(result)
                   : sum->dtype == GPU_BF16 ? gpu_to_bf16(result)
                                            : gpu_float_bits(result));
}

DEVICE void gpu_reduce_double(const struct gpu_element *element)
{
    const struct gpu_sum *sum = element->sum;
    double result = gpu_double_of(gpu_load_bits(gpu_element_term(element, 0), 8));
    for (gpu_u32 i = 1; i < sum->nterms; i++)
        result = gpu_combine_double(sum->reduce, result,
                                    gpu_double_of(gpu_load_bits(gpu_element_term(element, i), 8)));
    if (sum->divisor > 1)
        result /= (double)sum->divisor;
    gpu_store_bits(gpu_element_result(element), 8, gpu_double_bits(gpu_quiet_double(result)));
}

DEVICE gpu_u64 gpu_load_integer(gpu_u32 dtype, const char *at)
{
    gpu_u32 nbytes = gpu_nbytes(dtype);
    gpu_u64 bits = gpu_load_bits(at, nbytes);
    if (dtype == GPU_BOOL)
        return bits != 0;
    if (gpu_class(dtype) == 2 && nbytes < 8 && bits >> (8 * nbytes - 1))
        bits |= ~(gpu_u64)0 << 8 * nbytes;
    return bits;
}

DEVICE void gpu_reduce_integer(const struct gpu_element *element)
{
    const struct gpu_sum *sum = element->sum;
    int is_signed = gpu_class(sum->dtype) == 2;
    gpu_u32 reduce = sum->dtype == GPU_BOOL && sum->reduce == GPU_SUM ? GPU_BOR : sum->reduce;
    gpu_u64 result = gpu_load_integer(sum->dtype, gpu_element_term(element, 0));
    for (gpu_u32 i = 1; i < sum->nterms; i++)
        result = gpu_combine_integer(reduce, is_signed, result,
                                     gpu_load_integer(sum->dtype, gpu_element_term(element, i)));
    if (sum->divisor > 1)
        result = is_signed ? (gpu_u64)((gpu_i64)result / sum->divisor) : result / (gpu_u64)sum->divisor;
    gpu_store_bits(gpu_element_result(element), gpu_nbytes(sum->dtype), result);
}

DEVICE void gpu_reduce_complex_float(const struct gpu_element *element)
{
    const struct gpu_sum *sum = element->sum;
    const char *term = gpu_element_term(element, 0);
    float re = gpu_float_of((gpu_u32)gpu_load_bits(term, 4));
    float im = gpu_float_of((gpu_u32)gpu_load_bits(term + 4, 4));
    for (gpu_u32 i = 1; i < sum->nterms; i++) {
        term = gpu_element_term(element, i);
        float a = gpu_float_of((gpu_u32)gpu_load_bits(term, 4));
        float b = gpu_float_of((gpu_u32)gpu_load_bits(term + 4, 4));
        float c = re;
        re = sum->reduce == GPU_PRODUCT ? c * a - im * b : c + a;
        im = sum->reduce == GPU_PRODUCT ? c * b + im * a : im + b;
    }
    if (sum->divisor > 1) {
        re /= (float)sum->divisor;
        im /= (float)sum->divisor;
    }
    char *out = gpu_element_result(element);
    gpu_store_bits(out, 4, gpu_float_bits(gpu_quiet_float(re)));
    gpu_store_bits(out + 4, 4, gpu_float_bits(gpu_quiet_float(im)));
}

DEVICE void gpu_reduce_complex_double(const struct gpu_element *element)
{
    const struct gpu_sum *sum = element->sum;
    const char *term = gpu_element_term(element, 0);
    double re = gpu_double_of(gpu_load_bits(term, 8));
    double im = gpu_double_of(gpu_load_bits(term + 8, 8));
    for (gpu_u32 i = 1; i < sum->nterms; i++) {
        term = gpu_element_term(element, i);
        double a = gpu_double_of(gpu_load_bits(term, 8));
        double b = gpu_double_of(gpu_load_bits(term + 8, 8));
        double c = re;
        re = sum->reduce == GPU_PRODUCT ? c * a - im * b : c + a;
        im = sum->reduce == GPU_PRODUCT ? c * b + im * a : im + b;
    }
    if (sum->divisor > 1) {
        re /= (double)sum->divisor;
        im /= (double)sum->divisor;
    }
    char *out = gpu_element_result(element);
    gpu_store_bits(out, 8, gpu_double_bits(gpu_quiet_double(re)));
    gpu_store_bits(out + 8, 8, gpu_double_bits(gpu_quiet_double(im)));
}

DEVICE void gpu_reduce_element(const struct gpu_element *element)
{
    switch (element->sum->dtype) {
    case GPU_F64:
        gpu_reduce_double(element);
        return;
    case GPU_F32:
    case GPU_F16:
    case GPU_BF16:
        gpu_reduce_small_float(element);
        return;
    case GPU_C64:
        gpu_reduce_complex_float(element);
        return;
    case GPU_C128:
        gpu_reduce_complex_double(element);
        return;
    default:
        gpu_reduce_integer(element);
    }
}

)
/* clang-format on */
