/* crc.c - remainders of bytes as polynomials: the CRC-32 of zip records, the CRC-32C of storage formats, and
 * two CRC-64s for digests.
 *
 * All are raw (no inversion before or after), which makes them linear: the remainder of two strings one
 * after the other is that of the first, multiplied by a power of x, plus that of the second. So threads may
 * read parts of a string in any order, and the parts are joined.
 *
 * Bits are reflected: the lowest bit of a word stands for the highest power. Long strings are folded: 16
 * bytes are multiplied by the power of x that is their distance to 16 bytes ahead, and added to those. The
 * last 16 bytes have the same remainder as the string.
 *
 *     |----|----|----|----|----|----|----|----|          four vectors at once, each folded 64 bytes
 *       a    b    c    d  ->a  ->b  ->c  ->d             ahead; then the vectors into one
 *
 * The product of two reflected 64-bit words comes out one power too high, so constants for a distance
 * of D bits are x^(D+63) for the first word and x^(D-1) for the second.
 */
#include "crc.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_CLMUL 1
#else
#define HAVE_CLMUL 0
#endif

struct crc {
    uint64_t polynomial;
    uint64_t fold_512[2], fold_128[2]; /* 64 bytes ahead, 16 bytes ahead */
    uint64_t fold_2048[2];             /* 256 bytes ahead */
    uint64_t table[256];
};

/* A table is linear too: entry i is the sum of the entries of its bits. */
#define BIT(i, k, entry) ((i) >> (k)&1 ? (entry) : 0)
#define ENTRY(i, a, b, c, d, e, f, g, h)                                                           \
    (BIT(i, 0, a) ^ BIT(i, 1, b) ^ BIT(i, 2, c) ^ BIT(i, 3, d) ^ BIT(i, 4, e) ^ BIT(i, 5, f) ^     \
     BIT(i, 6, g) ^ BIT(i, 7, h))
#define ROW4(i, ...)                                                                               \
    ENTRY(i, __VA_ARGS__), ENTRY((i) + 1, __VA_ARGS__), ENTRY((i) + 2, __VA_ARGS__),               \
        ENTRY((i) + 3, __VA_ARGS__)
#define ROW16(i, ...)                                                                              \
    ROW4(i, __VA_ARGS__), ROW4((i) + 4, __VA_ARGS__), ROW4((i) + 8, __VA_ARGS__),                  \
        ROW4((i) + 12, __VA_ARGS__)
#define ROW64(i, ...)                                                                              \
    ROW16(i, __VA_ARGS__), ROW16((i) + 16, __VA_ARGS__), ROW16((i) + 32, __VA_ARGS__),             \
        ROW16((i) + 48, __VA_ARGS__)
#define TABLE(...)                                                                                 \
    {                                                                                              \
        ROW64(0, __VA_ARGS__), ROW64(64, __VA_ARGS__), ROW64(128, __VA_ARGS__),                    \
            ROW64(192, __VA_ARGS__)                                                                \
    }

static const struct crc kinds[] = {
    [CRC_ZIP] = {0xedb88320u,
                 {0x653d982200000000u, 0xcad38e8f00000000u},
                 {0x65673b4600000000u, 0x9ba54c6f00000000u},
                 {0x7cc8e1e700000000u, 0x03f9f86300000000u},
                 TABLE(0x77073096u, 0xee0e612cu, 0x076dc419u, 0x0edb8832u, 0x1db71064u, 0x3b6e20c8u,
                       0x76dc4190u, 0xedb88320u)},
    [CRC_CASTAGNOLI] = {0x82f63b78u,
                        {0x1c19243b00000000u, 0x75bba45b00000000u},
                        {0x3743f7bd00000000u, 0x3171d43000000000u},
                        {0xe9a5d8be00000000u, 0x1426a81500000000u},
                        TABLE(0xf26b8303u, 0xe13b70f7u, 0xc79a971fu, 0x8ad958cfu, 0x105ec76fu,
                              0x20bd8edeu, 0x417b1dbcu, 0x82f63b78u)},
    [CRC_ECMA] = {0xc96c5795d7870f42u,
                  {0x6ae3efbb9dd441f3u, 0x081f6054a7842df4u},
                  {0xe05dd497ca393ae4u, 0xdabe95afc7875f40u},
                  {0x8260adf2381ad81cu, 0xf31fd9271e228b79u},
                  TABLE(0xb32e4cbe03a75f6fu, 0xf4843657a840a05bu, 0x7bd0c384ff8f5e33u,
                        0xf7a18709ff1ebc66u, 0x7d9ba13851336649u, 0xfb374270a266cc92u,
                        0x64b62bcaebc387a1u, 0xc96c5795d7870f42u)},
    [CRC_JONES] = {0x95ac9329ac4bc9b5u,
                   {0xaf86efb16d9ab4fbu, 0xf49784a634f014e4u},
                   {0xd9d7be7d505da32cu, 0x381d0015c96f4444u},
                   {0x9a8908341a6d6d52u, 0x9471a5389095fe44u},
                   TABLE(0x7ad870c830358979u, 0xf5b0e190606b12f2u, 0xc038e5739841b68fu,
                         0xab28ecb46814fe75u, 0x7d08ff3b88be6f81u, 0xfa11fe77117cdf02u,
                         0xdf7adabd7a6e2d6fu, 0x95ac9329ac4bc9b5u)},
};

/* ---- byte by byte ---- */

static uint64_t by_table(const struct crc *crc, uint64_t state, const unsigned char *data, size_t n)
{
    for (size_t i = 0; i < n; i++)
        state = crc->table[(state ^ data[i]) & 255] ^ state >> 8;
    return state;
}

/* ---- folded ---- */

#if HAVE_CLMUL

#define UNROLLED _Pragma("GCC unroll 4") /* so that vectors stay in registers */

__attribute__((target("pclmul"))) static __m128i fold_vector(__m128i vector, __m128i constants)
{
    return _mm_xor_si128(_mm_clmulepi64_si128(vector, constants, 0x00),
                         _mm_clmulepi64_si128(vector, constants, 0x11));
}

static __m128i load_vector(const unsigned char *data)
{
    return _mm_loadu_si128((const __m128i *)(const void *)data);
}

static __m128i load_constants(const uint64_t constants[2])
{
    return _mm_set_epi64x((long long)constants[1], (long long)constants[0]);
}

/* Joins four vectors, folds on by 16 bytes, and uses the table for the rest. */
__attribute__((target("pclmul"))) static uint64_t
finish_vectors(const struct crc *crc, const __m128i vectors[4], const unsigned char *data, size_t n)
{
    __m128i by_16 = load_constants(crc->fold_128), vector = vectors[0];
    for (int i = 1; i < 4; i++)
        vector = _mm_xor_si128(fold_vector(vector, by_16), vectors[i]);
    for (; n >= 16; data += 16, n -= 16)
        vector = _mm_xor_si128(fold_vector(vector, by_16), load_vector(data));
    unsigned char left[16];
    memcpy(left, &vector, sizeof left);
    return by_table(crc, by_table(crc, 0, left, sizeof left), data, n);
}

__attribute__((target("pclmul"))) static uint64_t
by_vectors_of_16(const struct crc *crc, uint64_t state, const unsigned char *data, size_t n)
{
    __m128i by_64 = load_constants(crc->fold_512), vectors[4];
    for (int i = 0; i < 4; i++)
        vectors[i] = load_vector(data + 16 * i);
    vectors[0] = _mm_xor_si128(vectors[0], _mm_set_epi64x(0, (long long)state));
    for (data += 64, n -= 64; n >= 64; data += 64, n -= 64)
        UNROLLED for (int i = 0; i < 4; i++) vectors[i] =
            _mm_xor_si128(fold_vector(vectors[i], by_64), load_vector(data + 16 * i));
    return finish_vectors(crc, vectors, data, n);
}

#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul")))

WIDE static __m512i fold_wide(__m512i vector, __m512i constants, __m512i next)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(vector, constants, 0x00),
                                     _mm512_clmulepi64_epi128(vector, constants, 0x11), next, 0x96);
}

/* The same with vectors of 64 bytes, of which the last is then split. */
WIDE static uint64_t by_vectors_of_64(const struct crc *crc, uint64_t state,
                                      const unsigned char *data, size_t n)
{
    __m512i by_256 = _mm512_broadcast_i32x4(load_constants(crc->fold_2048)), wide[4];
    __m512i by_64 = _mm512_broadcast_i32x4(load_constants(crc->fold_512));
    for (int i = 0; i < 4; i++)
        wide[i] = _mm512_loadu_si512(data + 64 * i);
    wide[0] =
        _mm512_xor_si512(wide[0], _mm512_zextsi128_si512(_mm_set_epi64x(0, (long long)state)));
    for (data += 256, n -= 256; n >= 256; data += 256, n -= 256)
        UNROLLED for (int i = 0; i < 4; i++) wide[i] =
            fold_wide(wide[i], by_256, _mm512_loadu_si512(data + 64 * i));
    for (int i = 1; i < 4; i++)
        wide[0] = fold_wide(wide[0], by_64, wide[i]);
    for (; n >= 64; data += 64, n -= 64)
        wide[0] = fold_wide(wide[0], by_64, _mm512_loadu_si512(data));
    __m128i vectors[4] = {
        _mm512_extracti32x4_epi32(wide[0], 0), _mm512_extracti32x4_epi32(wide[0], 1),
        _mm512_extracti32x4_epi32(wide[0], 2), _mm512_extracti32x4_epi32(wide[0], 3)};
    _mm256_zeroupper(); /* else later instructions on 16 bytes take twice as long */
    return finish_vectors(crc, vectors, data, n);
}

#endif

int crc_nlevels(void)
{
#if HAVE_CLMUL
    if (__builtin_cpu_supports("pclmul"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") ? 3 : 2;
#endif
    return 1;
}

uint64_t crc_at_level(int level, enum crc_kind kind, uint64_t state, const void *data, size_t n)
{
#if HAVE_CLMUL
    if (level >= 2 && n >= 512)
        return by_vectors_of_64(&kinds[kind], state, data, n);
    if (level >= 1 && n >= 64)
        return by_vectors_of_16(&kinds[kind], state, data, n);
#else
    (void)level;
#endif
    return by_table(&kinds[kind], state, data, n);
}

uint64_t crc_update(enum crc_kind kind, uint64_t state, const void *data, size_t n)
{
    return crc_at_level(crc_nlevels() - 1, kind, state, data, n);
}

/* ---- joining ---- */

/* The word of x^0: its highest bit, since the bits are reflected. */
static uint64_t word_of_one(enum crc_kind kind)
{
    return kind <= CRC_CASTAGNOLI ? (uint64_t)1 << 31 : (uint64_t)1 << 63;
}

static uint64_t multiply_words(enum crc_kind kind, uint64_t a, uint64_t b)
{
    uint64_t product = 0;
    for (uint64_t power = word_of_one(kind); b; power >>= 1) {
        if (b & power)
            product ^= a;
        b &= ~power;
        a = (a & 1 ? kinds[kind].polynomial : 0) ^ a >> 1;
    }
    return product;
}

uint64_t crc_shift(enum crc_kind kind, uint64_t state, uint64_t nbytes)
{
    if (state == 0)
        return 0;
    uint64_t square = word_of_one(kind) >> 8; /* x^8, then its squares */
    for (; nbytes; nbytes >>= 1) {
        if (nbytes & 1)
            state = multiply_words(kind, state, square);
        square = multiply_words(kind, square, square);
    }
    return state;
}

uint32_t crc32_of(const void *data, size_t n)
{
    return (uint32_t)(crc_update(CRC_ZIP, 0xffffffffu, data, n) ^ 0xffffffffu);
}

uint32_t crc32c_of(const void *data, size_t n)
{
    return (uint32_t)(crc_update(CRC_CASTAGNOLI, 0xffffffffu, data, n) ^ 0xffffffffu);
}

uint32_t crc32_from_raw(uint64_t raw, uint64_t nbytes)
{
    return (uint32_t)(raw ^ crc_shift(CRC_ZIP, 0xffffffffu, nbytes) ^ 0xffffffffu);
}
