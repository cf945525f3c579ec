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

/* A message while it is hashed: the instructions keep the state as two vectors, ABEF and CDGH. */
struct sha_state {
    __m128i abef, cdgh, abef_before, cdgh_before, w[4];
};

#define SHA_NI __attribute__((target("sha,sse4.1"), always_inline)) static inline

SHA_NI void load_sha_state(struct sha_state *sha, const uint32_t state[8])
{
    __m128i low = _mm_loadu_si128((const __m128i *)(const void *)state);
    __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(state + 4));
    low = _mm_shuffle_epi32(low, 0xb1);
    high = _mm_shuffle_epi32(high, 0x1b);
    sha->abef = _mm_alignr_epi8(low, high, 8);
    sha->cdgh = _mm_blend_epi16(high, low, 0xf0);
}

SHA_NI void store_sha_state(const struct sha_state *sha, uint32_t state[8])
{
    __m128i low = _mm_shuffle_epi32(sha->abef, 0x1b);
    __m128i high = _mm_shuffle_epi32(sha->cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(high, low, 8));
}

SHA_NI void begin_sha_block(struct sha_state *sha, const unsigned char *p)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    sha->abef_before = sha->abef;
    sha->cdgh_before = sha->cdgh;
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) sha->w[i] =
        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)), swap);
}

/* Does rounds 4i to 4i + 3, and computes the words of the four rounds that come 16 rounds later. */
SHA_NI void run_sha_rounds(struct sha_state *sha, int i)
{
    __m128i k = _mm_loadu_si128((const __m128i *)(const void *)(round_constants + 4 * i));
    __m128i *w = sha->w, sum = _mm_add_epi32(w[i & 3], k);
    sha->cdgh = _mm_sha256rnds2_epu32(sha->cdgh, sha->abef, sum);
    if (i < 12) {
        __m128i next = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
        w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
    }
    sha->abef = _mm_sha256rnds2_epu32(sha->abef, sha->cdgh, _mm_shuffle_epi32(sum, 0x0e));
}

SHA_NI void end_sha_block(struct sha_state *sha)
{
    sha->abef = _mm_add_epi32(sha->abef, sha->abef_before);
    sha->cdgh = _mm_add_epi32(sha->cdgh, sha->cdgh_before);
}

__attribute__((target("sha,sse4.1"))) static void
hash_blocks_sha_ni(uint32_t state[8], const unsigned char *p, size_t nblocks)
{
    struct sha_state sha;
    load_sha_state(&sha, state);
    for (; nblocks > 0; nblocks--, p += 64) {
        begin_sha_block(&sha, p);
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) run_sha_rounds(&sha, i);
        end_sha_block(&sha);
    }
    store_sha_state(&sha, state);
}

/* A round waits for the one before it, so two messages take little longer than one. */
__attribute__((target("sha,sse4.1"))) static void
hash_block_pairs_sha_ni(uint32_t states[2][8], const unsigned char *const p[2], size_t nblocks)
{
    struct sha_state shas[2];
    load_sha_state(&shas[0], states[0]);
    load_sha_state(&shas[1], states[1]);
    for (size_t at = 0; at < 64 * nblocks; at += 64) {
        begin_sha_block(&shas[0], p[0] + at);
        begin_sha_block(&shas[1], p[1] + at);
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
        {
            run_sha_rounds(&shas[0], i);
            run_sha_rounds(&shas[1], i);
        }
        end_sha_block(&shas[0]);
        end_sha_block(&shas[1]);
    }
    store_sha_state(&shas[0], states[0]);
    store_sha_state(&shas[1], states[1]);
}

/* Compilers differ in whether they can test for these instructions by name; the processor can be asked, which
 * takes long in a virtual machine. */
static bool has_sha_ni(void)
{
    static _Atomic int known; /* 0: not asked yet */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == 0) {
        unsigned a = 7, b, c = 0, d;
        __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        (void)d;
        answer = (b >> 29 & 1) && __builtin_cpu_supports("sse4.1") ? 1 : -1;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer > 0;
}

/* While the upper halves of vectors are in use, as a copy of the C library leaves them, instructions on 16 bytes
 * take twice as long. */
__attribute__((target("avx"))) static void zero_upper(void)
{
    _mm256_zeroupper();
}

static void clear_upper_halves(void)
{
    if (__builtin_cpu_supports("avx"))
        zero_upper();
}
#endif

static void hash_blocks(uint32_t state[8], const unsigned char *p, size_t nblocks, bool plain)
{
#if defined(__x86_64__)
    if (!plain && has_sha_ni()) {
        clear_upper_halves();
        hash_blocks_sha_ni(state, p, nblocks);
        return;
    }
#endif
    (void)plain;
    hash_blocks_plain(state, p, nblocks);
}

static void hash_block_pairs(uint32_t states[2][8], const unsigned char *const p[2], size_t nblocks)
{
#if defined(__x86_64__)
    if (has_sha_ni()) {
        clear_upper_halves();
        hash_block_pairs_sha_ni(states, p, nblocks);
        return;
    }
#endif
    for (int i = 0; i < 2; i++)
        hash_blocks_plain(states[i], p[i], nblocks);
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

void sha256_of_pair(const void *const data[2], const size_t n[2], unsigned char *const digests[2])
{
    uint32_t states[2][8];
    const unsigned char *const bytes[2] = {data[0], data[1]};
    size_t nblocks = (n[0] < n[1] ? n[0] : n[1]) / 64;
    for (int i = 0; i < 2; i++)
        start_state(states[i]);
    hash_block_pairs(states, bytes, nblocks);
    for (int i = 0; i < 2; i++) {
        hash_blocks(states[i], bytes[i] + 64 * nblocks, n[i] / 64 - nblocks, false);
        end_state(states[i], bytes[i] + (n[i] - n[i] % 64), n[i] % 64, n[i], false, digests[i]);
    }
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
