/* hash.c - a hash of 128 bits, for digests of plans and for comparing what ranks passed to a call.
 *
 * The state is two words; each value is multiplied into both. Values are hashed as numbers, so the result
 * does not depend on the byte order of the machine. The hash is not keyed and not cryptographic.
 */
#include "base.h"

#include <stdio.h>

__extension__ typedef unsigned __int128 u128;

static uint64_t fold_product(uint64_t x, uint64_t y)
{
    u128 product = (u128)x * y;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

void hash_i64(struct hash *hash, int64_t value)
{
    uint64_t word = (uint64_t)value;
    hash->a = fold_product(hash->a ^ word ^ 0x9e3779b97f4a7c15u, 0xd6e8feb86659fd93u) + hash->b;
    hash->b =
        fold_product(hash->b ^ (word + 0x2545f4914f6cdd1du), 0xa0761d6478bd642fu) ^ (hash->a >> 17);
}

void hash_i64s(struct hash *hash, const int64_t *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash_i64(hash, values[i]);
}

void hash_i32s(struct hash *hash, const int32_t *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash_i64(hash, values[i]);
}

void hash_bytes(struct hash *hash, const void *bytes, size_t n)
{
    const char *at = bytes;
    hash_i64(hash, (int64_t)n);
    for (size_t some; n > 0; at += some, n -= some) {
        int64_t word = 0;
        some = n < sizeof word ? n : sizeof word;
        memcpy(&word, at, some);
        hash_i64(hash, word);
    }
}

void hash_string(struct hash *hash, const char *string)
{
    for (; *string; string++)
        hash_i64(hash, (unsigned char)*string);
    hash_i64(hash, -1);
}

void hash_start(struct hash *hash, const char *label)
{
    *hash = (struct hash){0x243f6a8885a308d3u, 0x13198a2e03707344u};
    for (; *label; label++)
        hash_i64(hash, (unsigned char)*label);
}

void hash_text(struct hash hash, char hex[RSD_DIGEST_NCHARS])
{
    for (int round = 0; round < 4; round++)
        hash_i64(&hash, round);
    snprintf(hex, RSD_DIGEST_NCHARS, "%016llx%016llx", (unsigned long long)hash.a,
             (unsigned long long)hash.b);
}
