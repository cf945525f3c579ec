/* sha256.c - SHA-256 and the HMAC of it (FIPS 180-4, RFC 2104), for signatures and checksums of S3. */
#include "remote.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate_right(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static uint32_t load_big_endian(const unsigned char *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void hash_blocks_plain(uint32_t state[8], const unsigned char *p, size_t nblocks)
{
    for (; nblocks > 0; nblocks--, p += 64) {
        uint32_t w[64], s[8];
        memcpy(s, state, sizeof s);
        for (int i = 0; i < 16; i++)
            w[i] = load_big_endian(p + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (rotate_right(a, 7) ^ rotate_right(a, 18) ^ a >> 3) + w[i - 7] +
                   (rotate_right(b, 17) ^ rotate_right(b, 19) ^ b >> 10);
        }
        for (int i = 0; i < 64; i++) {
            uint32_t e = s[4], a = s[0];
            uint32_t t1 = s[7] + (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) +
                          ((e & s[5]) ^ (~e & s[6])) + round_constants[i] + w[i];
            uint32_t t2 = (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) +
                          ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof *s);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++)
            state[i] += s[i];
    }
}

#if defined(__x86_64__)

/* The instructions keep the state as two vectors, ABEF and CDGH, and do two rounds at a time. */
__attribute__((target("sha,sse4.1"))) static void
hash_blocks_sha_ni(uint32_t state[8], const unsigned char *p, size_t nblocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low = _mm_loadu_si128((const __m128i *)(const void *)state);
    __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(state + 4));
    low = _mm_shuffle_epi32(low, 0xb1);
    high = _mm_shuffle_epi32(high, 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
    for (; nblocks > 0; nblocks--, p += 64) {
        __m128i abef_before = abef, cdgh_before = cdgh, w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)),
                                    swap);
        for (int i = 0; i < 16; i++) {
            __m128i k = _mm_loadu_si128((const __m128i *)(const void *)(round_constants + 4 * i));
            __m128i sum = _mm_add_epi32(w[i & 3], k);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            /* The words of four rounds that come 16 rounds later. */
            __m128i next = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
            next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
            w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1b);
    high = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(high, low, 8));
}

/* Compilers differ in whether they can test for these instructions by name; the processor can be asked. */
static bool has_sha_ni(void)
{
    unsigned a = 7, b, c = 0, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    (void)d;
    return (b >> 29 & 1) && __builtin_cpu_supports("sse4.1");
}
#endif

static void hash_blocks(uint32_t state[8], const unsigned char *p, size_t nblocks, bool plain)
{
#if defined(__x86_64__)
    if (!plain && has_sha_ni()) {
        hash_blocks_sha_ni(state, p, nblocks);
        return;
    }
#endif
    (void)plain;
    hash_blocks_plain(state, p, nblocks);
}

static void start_state(uint32_t state[8])
{
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(state, first, sizeof first);
}

/* Hashes what is left of a message of `all` bytes, with the padding. */
static void end_state(uint32_t state[8], const unsigned char *rest, size_t n, uint64_t all,
                      bool plain, unsigned char digest[SHA256_NBYTES])
{
    unsigned char last[128] = {0};
    size_t nblocks = n < 56 ? 1 : 2;
    memcpy(last, rest, n);
    last[n] = 0x80;
    for (int i = 0; i < 8; i++)
        last[64 * nblocks - 1 - (size_t)i] = (unsigned char)(all * 8 >> 8 * i);
    hash_blocks(state, last, nblocks, plain);
    for (int i = 0; i < 32; i++)
        digest[i] = (unsigned char)(state[i / 4] >> (24 - 8 * (i % 4)));
}

void sha256_at_level(int level, const void *data, size_t n, unsigned char digest[SHA256_NBYTES])
{
    uint32_t state[8];
    const unsigned char *bytes = data;
    start_state(state);
    hash_blocks(state, bytes, n / 64, level == 0);
    end_state(state, n % 64 ? bytes + (n - n % 64) : (const unsigned char *)"", n % 64, n,
              level == 0, digest);
}

void sha256_of(const void *data, size_t n, unsigned char digest[SHA256_NBYTES])
{
    sha256_at_level(1, data, n, digest);
}

void sha256_hmac(const void *key, size_t nkey, const void *data, size_t n,
                 unsigned char mac[SHA256_NBYTES])
{
    unsigned char block[64] = {0}, outer[64 + SHA256_NBYTES];
    uint32_t state[8];
    const unsigned char *bytes = data;
    if (nkey > sizeof block)
        sha256_of(key, nkey, block);
    else
        memcpy(block, key, nkey);
    for (size_t i = 0; i < sizeof block; i++) {
        outer[i] = block[i] ^ 0x5c;
        block[i] ^= 0x36;
    }
    start_state(state);
    hash_blocks(state, block, 1, false);
    hash_blocks(state, bytes, n / 64, false);
    end_state(state, n % 64 ? bytes + (n - n % 64) : (const unsigned char *)"", n % 64, n + 64,
              false, outer + 64);
    sha256_of(outer, sizeof outer, mac);
}
