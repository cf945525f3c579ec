/* test_values.c - the exact results of reductions: order, rounding, NaN, and the 16-bit floats. */
#include "base.h"
#include "tap.h"

#include <math.h>
#include <stdlib.h>

/* ---- 16-bit floats against arithmetic in f64 ---- */

static double value_of_f16(uint16_t half)
{
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                   : exponent == 0 ? ldexp(mantissa, -24)
                                   : ldexp(1024 + mantissa, exponent - 25);
    return half & 0x8000 ? -value : value;
}

/* Returns the f16 that is nearest to a finite value, by comparing all; ties to even. */
static uint16_t nearest_f16(double value)
{
    uint16_t best = 0;
    double magnitude = fabs(value), least = INFINITY;
    if (magnitude >= 65520)
        return (uint16_t)((signbit(value) ? 0x8000 : 0) | 0x7c00);
    for (uint32_t half = 0; half < 0x7c00; half++) {
        double distance = fabs(value_of_f16((uint16_t)half) - magnitude);
        if (distance < least || (distance == least && !(half & 1))) {
            least = distance;
            best = (uint16_t)half;
        }
    }
    return (uint16_t)(best | (signbit(value) ? 0x8000 : 0));
}

static void halves(void)
{
    CASE("every f16 and bf16 is converted to f32 exactly, and back");
    for (uint32_t half = 0; half < 0x10000; half++) {
        float wide = f32_from_f16((uint16_t)half);
        double value = value_of_f16((uint16_t)half);
        CHECK(isnan(value) ? isnan(wide)
                           : (double)wide == value && !signbit(wide) == !signbit(value),
              "f16 %04x", half);
        CHECK(isnan(wide) || f16_from_f32(wide) == half, "f16 %04x", half);
        CHECK(!isnan(wide) || isnan(f32_from_f16(f16_from_f32(wide))), "f16 NaN %04x", half);
        float b = f32_from_bf16((uint16_t)half);
        CHECK(bits_of(b) == half << 16);
        CHECK(isnan(b) ? isnan(f32_from_bf16(bf16_from_f32(b))) : bf16_from_f32(b) == half);
    }
    CASE("f32 is rounded to the nearest f16, ties to even");
    uint32_t random = 1;
    for (int i = 0; i < 3000; i++) {
        random = random * 1664525u + 1013904223u;
        float value = float_of((random & 0x8fffffffu) | (0x30u + random % 24)
                                                            << 23); /* about the range of f16 */
        CHECK(f16_from_f32(value) == nearest_f16(value), "%a becomes %04x, not %04x", (double)value,
              f16_from_f32(value), nearest_f16(value));
    }
    for (uint32_t half = 0; half < 0x7bff;
         half += 37) { /* halfway between neighbours, and beside it */
        double middle = (value_of_f16((uint16_t)half) + value_of_f16((uint16_t)(half + 1))) / 2;
        float at = (float)middle;
        CHECK(f16_from_f32(at) == half + (half & 1), "tie at %04x", half);
        CHECK(f16_from_f32(nextafterf(at, 0)) == half);
        CHECK(f16_from_f32(nextafterf(at, INFINITY)) == half + 1);
    }
    CHECK(f16_from_f32(65519.996f) == 0x7bff && f16_from_f32(65520.0f) == 0x7c00);
    CHECK(f16_from_f32(1e-10f) == 0 && f16_from_f32(-1e-10f) == 0x8000);
    CHECK(f16_from_f32(INFINITY) == 0x7c00 && f16_from_f32(-INFINITY) == 0xfc00);
    CHECK(bf16_from_f32(float_of(0x3f808000)) == 0x3f80 &&
          bf16_from_f32(float_of(0x3f818000)) == 0x3f82);
    CHECK(bf16_from_f32(float_of(0x3f808001)) == 0x3f81 &&
          bf16_from_f32(float_of(0x7f7fffff)) == 0x7f80);
    CHECK(bf16_from_f32(float_of(0x7f800001)) == 0x7fc0, "a NaN must not round to infinity");
}

/* ---- reductions ---- */

/* Reduces n terms of one element each, given as bytes. */
static void reduced(const char *problem, const void *terms, void *result, size_t each)
{
    rsd_layout *a, *b;
    const void *src[64];
    void *dst[64];
    char room[64][16] = {{0}};
    if (!CHECK(rsd_problem_parse(problem, &a, &b) == RSD_OK, "%s: %s", problem, rsd_error()))
        return;
    for (int i = 0; i < 64; i++) {
        src[i] = (const char *)terms + (size_t)i * each;
        dst[i] = room[i];
    }
    OK(rsd_reshard(a, b, src, dst));
    memcpy(result, room[0], each);
    for (int64_t k = 1; k < rsd_layout_narrays(b); k++) {
        rsd_array info;
        rsd_layout_array(b, k, &info);
        CHECK(info.nbytes == 0 || memcmp(room[0], room[k], each) == 0, "%s: copies differ",
              problem);
    }
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static void order_and_rounding(void)
{
    float f32[8] = {1e8f, 1.25f, -1e8f, 3e-3f, 7.7f, -2.2e7f, 0.3f, 2.2e7f}, sum = 0, got;
    CASE("terms are combined in ascending rank, for any order of the mesh");
    for (int i = 0; i < 8; i++)
        sum = i ? sum + f32[i] : f32[i];
    reduced("f32[1] : 8:P -> 8:R", f32, &got, 4);
    CHECK(bits_of(got) == bits_of(sum), "%a, should be %a", (double)got, (double)sum);
    reduced("f32[1] : 8 ranks=7,2,5,0,1,6,3,4:P -> 8:R", f32, &got, 4);
    CHECK(bits_of(got) == bits_of(sum));
    reduced("f32[1] : 2x4:P,P -> 1:R", f32, &got, 4);
    CHECK(bits_of(got) == bits_of(sum));
    reduced("f32[1] : 2x2x2:P,P,P -> 2x4:S0,R", f32, &got, 4);
    CHECK(bits_of(got) == bits_of(sum));
    reduced("f32[1] : 8:P(avg) -> 8:R", f32, &got, 4);
    CHECK(bits_of(got) == bits_of(sum / 8));
    reduced("f32[1] : 2x4:P(sum),P(avg) -> 8:R", f32, &got, 4);
    CHECK(bits_of(got) == bits_of(sum / 4), "an average among sums divides by its own ranks");
    CASE("f16 and bf16 accumulate in f32 and round once");
    uint16_t half[8], result;
    float exact = 0;
    for (int i = 0; i < 8; i++) {
        half[i] = f16_from_f32(i ? 0.6f : 2048.0f); /* 2048 + 0.6 is 2048 when rounded each time */
        exact += f32_from_f16(half[i]);
    }
    reduced("f16[1] : 8:P -> 8:R", half, &result, 2);
    CHECK(result == f16_from_f32(exact) && result == f16_from_f32(2052.2f));
    exact = 0;
    for (int i = 0; i < 8; i++) {
        half[i] = bf16_from_f32(i ? 0.7f : 256.0f);
        exact += f32_from_bf16(half[i]);
    }
    reduced("bf16[1] : 8:P -> 8:R", half, &result, 2);
    CHECK(result == bf16_from_f32(exact) && f32_from_bf16(result) > 256);
    CASE("the minimum and maximum with NaN are NaN");
    float with_nan[4] = {3, NAN, -5, 8};
    reduced("f32[1] : 4:P(min) -> 4:R", with_nan, &got, 4);
    CHECK(isnan(got));
    reduced("f32[1] : 4:P(max) -> 4:R", with_nan, &got, 4);
    CHECK(isnan(got));
    with_nan[1] = -0.5f;
    reduced("f32[1] : 4:P(max) -> 4:R", with_nan, &got, 4);
    CHECK(got == 8);
    reduced("f32[1] : 4:P(min) -> 4:R", with_nan, &got, 4);
    CHECK(got == -5);
}

static void integers(void)
{
    CASE("integers wrap once at the end, averages drop the fraction");
    int8_t i8[4] = {100, 100, 100, -3}, r8;
    reduced("i8[1] : 4:P -> 4:R", i8, &r8, 1);
    CHECK(r8 == (int8_t)297);
    reduced("i8[1] : 4:P(avg) -> 4:R", i8, &r8, 1);
    CHECK(r8 == 74);
    int8_t low[4] = {-100, -100, -100, -1};
    reduced("i8[1] : 4:P(avg) -> 4:R", low, &r8, 1);
    CHECK(r8 == -75);
    uint64_t big[3] = {UINT64_MAX, 2, 5}, rbig;
    reduced("u64[1] : 3:P -> 3:R", big, &rbig, 8);
    CHECK(rbig == 6);
    reduced("u64[1] : 3:P(max) -> 3:R", big, &rbig, 8);
    CHECK(rbig == UINT64_MAX);
    int64_t lowest[2] = {INT64_MIN, -1}, rlow;
    reduced("i64[1] : 2:P -> 2:R", lowest, &rlow, 8);
    CHECK(rlow == INT64_MAX);
    reduced("i64[1] : 2:P(product) -> 2:R", lowest, &rlow, 8);
    CHECK(rlow == INT64_MIN);
    uint8_t truth[3] = {0, 7, 0}, rtruth;
    reduced("bool[1] : 3:P -> 3:R", truth, &rtruth, 1);
    CHECK(rtruth == 1);
    reduced("bool[1] : 3:P(product) -> 3:R", truth, &rtruth, 1);
    CHECK(rtruth == 0);
    reduced("bool[1] : 3:P(bxor) -> 3:R", truth, &rtruth, 1);
    CHECK(rtruth == 1);
    CASE("complex numbers add and multiply");
    float c64[6] = {1, 2, 3, -1, 0, 1}, rc[2];
    reduced("c64[1] : 3:P -> 3:R", c64, rc, 8);
    CHECK(rc[0] == 4 && rc[1] == 2);
    reduced("c64[1] : 3:P(product) -> 3:R", c64, rc, 8);
    CHECK(rc[0] == -5 && rc[1] == 5); /* (1+2i)(3-i) = 5+5i, times i */
}

/* The same partial values have the same result in plans of different shapes. */
static void same_bits(void)
{
    CASE("the same terms have the same result on any destination");
    enum { N = 1000, RANKS = 8 };
    static float terms[RANKS][N], whole[N], parts[RANKS][N];
    const void *src[RANKS];
    void *dst[RANKS];
    rsd_layout *a, *b;
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < N; i++)
            terms[r][i] = (float)sin(r * 1000 + i) * powf(10, (float)((r * 7 + i) % 9));
    for (int r = 0; r < RANKS; r++) {
        src[r] = terms[r];
        dst[r] = parts[r];
    }
    dst[0] = whole;
    OK(rsd_problem_parse("f32[1000] : 8:P -> 1:R", &a, &b));
    OK(rsd_reshard(a, b, src, dst));
    rsd_layout_free(a);
    rsd_layout_free(b);
    dst[0] = parts[0];
    OK(rsd_problem_parse("f32[1000] : 8:P -> 8:S0", &a, &b));
    OK(rsd_reshard(a, b, src, dst));
    for (int i = 0; i < N; i++)
        CHECK(bits_of(parts[i / 125][i % 125]) == bits_of(whole[i]));
    rsd_layout_free(a);
    rsd_layout_free(b);
    OK(rsd_problem_parse("f32[1000] : 8:P -> 8:R", &a, &b));
    OK(rsd_reshard(a, b, src, dst));
    for (int r = 0; r < RANKS; r++)
        CHECK(memcmp(parts[r], whole, sizeof whole) == 0, "rank %d", r);
    rsd_layout_free(a);
    rsd_layout_free(b);

    CASE("and from any copies of the terms");
    /* Two copies of four terms, whose ranks ascend in different orders. */
    OK(rsd_problem_parse("f32[1000] : 4x2 ranks=0,7,1,6,2,5,3,4 : P,R -> 8:R", &a, &b));
    for (int r = 0; r < RANKS; r++)
        src[r] = terms[r < 4 ? r : 7 - r];
    OK(rsd_reshard(a, b, src, dst));
    for (int r = 1; r < RANKS; r++)
        CHECK(memcmp(parts[r], parts[0], sizeof whole) == 0, "rank %d", r);
    rsd_layout_free(a);
    rsd_layout_free(b);
    OK(rsd_problem_parse("f32[1000] : 4x2 ranks=0,7,1,6,2,5,3,4 : P,R -> 8:S0", &a, &b));
    memcpy(whole, parts[0], sizeof whole);
    OK(rsd_reshard(a, b, src, dst));
    for (int i = 0; i < N; i++)
        CHECK(bits_of(parts[i / 125][i % 125]) == bits_of(whole[i]));
    rsd_layout_free(a);
    rsd_layout_free(b);
}

int main(void)
{
    halves();
    order_and_rounding();
    integers();
    same_bits();
    return tap_end();
}
