/* base.h - the door of base: what every other line relies on.
 *
 * Statuses and the last error, checked arithmetic, the only malloc, text that grows, a hash, dtypes
 * and the thread pool. Base has never heard of tensors.
 */
#ifndef BASE_H
#define BASE_H

#include "reshard.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* ---- status.c ---- */

/* fail(status, format, ...) sets the last error of this thread and is the status: the place where a
 * failure is known says so once, everyone above returns the code unchanged.
 *
 * fail_in(status, format, ...) puts what a caller knows in front: "w1: " + "shape differs ...".
 *
 * They are macros so that compilers see which status is returned. */
#define fail(status, ...)    (error_set(__VA_ARGS__), (status))
#define fail_in(status, ...) (error_add_context(__VA_ARGS__), (status))
void error_set(const char *format, ...) __attribute__((format(printf, 1, 2)));
void error_add_context(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Options begin with their size, so that they can grow: copies what the caller's struct has of ours, and
 * leaves the rest 0. What a newer caller has beyond that must be 0, or EUNSUPPORTED. */
rsd_status options_copy(const char *name, const void *given, void *ours, size_t ours_nbytes);

/* Reports likewise: gives the caller as much as its struct has room for. */
rsd_status report_check(const char *name, const void *given);
void report_copy(void *given, const void *ours, size_t ours_nbytes);

#define TRY(call)                                                                                  \
    do {                                                                                           \
        rsd_status status_ = (call);                                                               \
        if (status_ != RSD_OK)                                                                     \
            return status_;                                                                        \
    } while (0)

/* ---- arithmetic ---- */

static inline bool add_i64(int64_t a, int64_t b, int64_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

static inline bool mul_i64(int64_t a, int64_t b, int64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

static inline int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t clamp_i64(int64_t value, int64_t lo, int64_t hi)
{
    return value < lo ? lo : value > hi ? hi : value;
}

/* Rounded up; n >= 0, m >= 1. */
static inline int64_t ceil_div(int64_t n, int64_t m)
{
    return n / m + (n % m != 0);
}

static inline void copy_i64s(int64_t *to, const int64_t *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i];
}

/* For what is const to everyone but its owner: reference counts, memory about to be freed. */
static inline void *without_const(const void *owned)
{
    return (void *)(uintptr_t)owned;
}

/* On a clock that only goes forward. */
static inline double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- memory.c: the only malloc ---- */

/* Zeroed memory for count elements; NULL with ENOMEM set. A count of 0 gives a valid pointer. */
void *mem_new(size_t count, size_t element_nbytes);

/* Makes room for at least `need` elements in a list whose room is `room`, by doubling. */
#define GROW(list, capacity, need) mem_grow(&(list), &(capacity), (need), sizeof *(list))
rsd_status mem_grow(void *list, size_t *capacity, size_t need, size_t element_nbytes);

/* A copy of count elements. */
void *mem_copy(const void *from, size_t count, size_t element_nbytes);

void mem_free(void *memory);

/* ---- text.c: text that grows ---- */

/* Starts as {0}. The first failure is kept, so a writer may check once, in text_take. */
struct text {
    char *chars;
    size_t length, capacity;
    bool failed;
};

void text_add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Hands the text to the caller, to be given back by rsd_free. */
rsd_status text_take(struct text *text, char **chars);
void text_drop(struct text *text);

struct slice {
    const char *bytes;
    size_t nbytes;
};
bool slice_is(struct slice slice, const char *text);

/* Starts as {0}. The first failure is kept. */
struct bytes {
    unsigned char *data;
    size_t n, capacity;
    bool failed;
};
void bytes_put(struct bytes *out, const void *data, size_t n);
void bytes_drop(struct bytes *bytes);

/* Reads n bytes from an offset on, all of them or none. Codecs read through one, so that they need not know
 * where the bytes are. */
typedef rsd_status read_at(void *context, uint64_t offset, void *out, size_t n);

/* ---- hash.c: 128 bits for telling things apart, not against malice ---- */

struct hash {
    uint64_t a, b;
};

void hash_start(struct hash *hash, const char *what);
void hash_i64(struct hash *hash, int64_t value);
void hash_string(struct hash *hash, const char *string);
void hash_bytes(struct hash *hash, const void *bytes, size_t n);
void hash_i64s(struct hash *hash, const int64_t *values, size_t count);
void hash_i32s(struct hash *hash, const int32_t *values, size_t count);
void hash_text(struct hash hash, char hex[RSD_DIGEST_NCHARS]);

/* ---- dtype.c ---- */

/* Whether values of a dtype can be combined by a reduction. */
bool dtype_reduces(rsd_dtype dtype, rsd_reduce reduce);

/* ---- the two 16-bit floats: exact to f32, rounded to nearest even from it ----
 *
 *     f16    s eeeee mmmmmmmmmm         bias 15, with subnormals
 *     bf16   s eeeeeeee mmmmmmm         the upper half of an f32
 */

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f32_from_bf16(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

static inline uint16_t bf16_from_f32(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0; /* as torch: one NaN */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static inline float f32_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00)
        return float_of(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    if (rest >= 0x0400)
        return float_of(sign | ((rest << 13) + 0x38000000u));
    float subnormal = (float)rest * 0x1p-24f;
    return float_of(sign | bits_of(subnormal));
}

static inline uint16_t f16_from_f32(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00); /* rounds beyond the largest */
    if (magnitude >= 0x38800000u)
        return (uint16_t)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
    /* A subnormal is a multiple of 2^-24: adding 0.5 puts that at the last bit of an f32. */
    return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
}

/* ---- pool.c ---- */

/* Called once for every index in [0, count), in any order, on several threads at once. */
typedef void pool_work(void *context, int64_t index);

/* Does all of it on the calling thread and on threads of the pool, and returns when it is done.
 * A NULL pool is the calling thread alone. */
void pool_run(rsd_pool *pool, int64_t count, pool_work *work, void *context);

/* The same in two halves: the pool works, the caller goes on. The job belongs to the caller and may
 * be used again once it has been waited for. */
struct pool_job {
    pool_work *work;
    void *context;
    int64_t count;
    _Atomic int64_t next; /* the next index to take */
    int32_t places;   /* how many more threads may join; this and below: under the pool's lock */
    int32_t attached; /* threads that are at it */
    bool queued;
    bool alone; /* done by the caller */
    struct pool_job *behind;
};
void pool_start(rsd_pool *pool, struct pool_job *job, int64_t count, pool_work *work,
                void *context);
/* False if a fork came between: the threads that had the job live in another process. */
bool pool_wait(rsd_pool *pool, struct pool_job *job);

/* One more reference, to be given back by rsd_pool_free. NULL gives NULL. */
rsd_pool *pool_share(rsd_pool *pool);

/* How many threads a job of this pool may use: 1 for NULL. */
int32_t pool_nthreads(const rsd_pool *pool);

/* ---- intern.c: names to numbers ---- */

struct string_map_entry {
    struct slice name; /* must stay where it is */
    size_t number;
};
struct string_map {
    struct string_map_entry *slots;
    size_t n, capacity;
};
bool string_map_find(const struct string_map *intern, struct slice name, size_t *number);
rsd_status string_map_add(struct string_map *intern, struct slice name, size_t number);
void string_map_drop(struct string_map *intern);

#endif
