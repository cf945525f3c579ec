/* zarr_fill.c - the fill value of a zarr array, which elements have that no chunk has.
 *
 *     0   1.5   true   null   "NaN"   "-Infinity"   "0x7fc0" (its bits)   [1.5, 0] (complex)
 */
#include "orbax.h"

#include <math.h>

static void put_little(unsigned char *out, uint64_t bits, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (unsigned char)(bits >> 8 * i);
}

/* Writes a float as the bytes of an element. Returns false if the dtype is not one of floats. */
static bool put_float(rsd_dtype dtype, double value, unsigned char *out)
{
    uint64_t bits;
    switch (dtype) {
    case RSD_F64:
    case RSD_C128:
        memcpy(&bits, &value, sizeof bits);
        put_little(out, bits, 8);
        return true;
    case RSD_F32:
    case RSD_C64:
        put_little(out, bits_of((float)value), 4);
        return true;
    case RSD_F16:
        put_little(out, f16_from_f32((float)value), 2);
        return true;
    case RSD_BF16:
        put_little(out, bf16_from_f32((float)value), 2);
        return true;
    default:
        return false;
    }
}

static bool is_integer(rsd_dtype dtype)
{
    return dtype >= RSD_I64 && dtype <= RSD_U8;
}

/* Returns whether an integer dtype has the value. */
static bool holds_integer(rsd_dtype dtype, int64_t value)
{
    int nbits = 8 * (int)rsd_dtype_nbytes(dtype);
    if (dtype >= RSD_U64)
        return value >= 0 && (nbits == 64 || value >> nbits == 0);
    return nbits == 64 || value >> (nbits - 1) == 0 || value >> (nbits - 1) == -1;
}

static bool put_integer(rsd_dtype dtype, int64_t value, unsigned char *out)
{
    size_t n = rsd_dtype_nbytes(dtype);
    if (value != 0 && !is_integer(dtype))
        return put_float(dtype, (double)value, out);
    if (value != 0 && !holds_integer(dtype, value))
        return false;
    put_little(out, (uint64_t)value, n < 8 ? n : 8);
    return true;
}

/* Takes the bits of an element: 0x7fc0. */
static bool put_hex(rsd_dtype dtype, struct slice text, unsigned char *out)
{
    uint64_t bits = 0;
    size_t n = rsd_dtype_nbytes(dtype);
    if (text.nbytes != 2 + 2 * n || n > 8 || memcmp(text.bytes, "0x", 2) != 0)
        return false;
    for (size_t i = 2; i < text.nbytes; i++) {
        static const char digits[] = "0123456789abcdef";
        const char *digit = strchr(digits, text.bytes[i] | 0x20);
        if (!text.bytes[i] || !digit)
            return false;
        bits = bits << 4 | (uint64_t)(digit - digits);
    }
    put_little(out, bits, n);
    return true;
}

static bool put_named_float(rsd_dtype dtype, struct slice text, unsigned char *out)
{
    if (slice_is(text, "NaN"))
        return put_float(dtype, (double)NAN, out);
    if (slice_is(text, "Infinity"))
        return put_float(dtype, (double)INFINITY, out);
    if (slice_is(text, "-Infinity"))
        return put_float(dtype, (double)-INFINITY, out);
    return put_hex(dtype, text, out);
}

/* Takes one number; of a complex one its two parts. */
static rsd_status take_fill(struct json *j, rsd_dtype dtype, unsigned char *out, bool *known)
{
    struct slice text;
    double value;
    int64_t integer;
    bool whole;
    char first = json_peek(j);
    if (first == '"') {
        TRY(json_string(j, &text));
        *known = put_named_float(dtype, text, out);
    } else if (first == 't' || first == 'f' || first == 'n') {
        *known = first != 't' || dtype == RSD_BOOL;
        out[0] = first == 't';
        return json_skip(j);
    } else if (dtype == RSD_U64 && first != '-') {
        uint64_t number;
        TRY(json_u64(j, &number));
        put_little(out, number, 8);
        *known = true;
    } else {
        TRY(json_number(j, &value, &integer, &whole));
        *known = whole ? put_integer(dtype, integer, out)
                       : !is_integer(dtype) && put_float(dtype, value, out);
    }
    return RSD_OK;
}

rsd_status zarr_take_fill_value(struct json *j, struct zarr_array *array)
{
    size_t half = rsd_dtype_nbytes(array->dtype) / 2;
    bool known[2] = {true, true}, more;
    memset(array->fill, 0, sizeof array->fill);
    if (json_peek(j) != '[') {
        TRY(take_fill(j, array->dtype, array->fill, &array->fill_known));
        return RSD_OK;
    }
    TRY(json_enter(j, '['));
    for (size_t i = 0;; i++) {
        TRY(json_next_item(j, &more));
        if (!more)
            break;
        if (i == 2 || (array->dtype != RSD_C64 && array->dtype != RSD_C128))
            return json_fail(j, "fill_value is not a number");
        TRY(take_fill(j, array->dtype, array->fill + i * half, &known[i]));
    }
    array->fill_known = known[0] && known[1];
    return RSD_OK;
}
