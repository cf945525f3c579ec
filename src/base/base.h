/* base.h - what every module uses: errors, checked arithmetic, allocation, text, hashes, dtypes,
 * the thread pool and a map of names. Base does not know about tensors.
 */
#ifndef BASE_H
#define BASE_H

#include "reshard.h"

#include <regex.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* ---- error.c ---- */

/* fail(status, format, ...) sets the error text of this thread and evaluates to the status. It is called
 * once, where the failure is detected; callers return the status unchanged.
 *
 * fail_in(status, format, ...) puts context in front of the error text: "w1: " + "shape differs ...".
 *
 * They are macros so that static analysis sees which status is returned. */
#define fail(status, ...)    (error_set(__VA_ARGS__), (status))
#define fail_in(status, ...) (error_add_context(__VA_ARGS__), (status))
void error_set(const char *format, ...) __attribute__((format(printf, 1, 2)));
void error_add_context(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Copies an options struct that begins with its size. Fields that the caller's struct does not have are 0.
 * `given` may be NULL: all fields are 0. Returns EINVAL if the size is invalid, EUNSUPPORTED if the struct
 * of a newer caller sets a field that this version does not have. */
rsd_status options_copy(const char *name, const void *given, void *ours, size_t ours_nbytes);

/* The same for structs that the library fills. report_check returns EINVAL if the size is invalid;
 * report_copy fills as many fields as the caller's struct has, and leaves struct_nbytes as it is. */
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

/* Returns n / m rounded up. Requires n >= 0 and m >= 1. */
static inline int64_t ceil_div(int64_t n, int64_t m)
{
    return n / m + (n % m != 0);
}

/* Returns a * b / c rounded down, exactly. Requires a, b >= 0, c >= 1, and that the result fits. */
static inline int64_t mul_div_i64(int64_t a, int64_t b, int64_t c)
{
    __extension__ typedef unsigned __int128 wide;
    return (int64_t)((wide)a * (wide)b / (wide)c);
}

static inline void copy_i64s(int64_t *to, const int64_t *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i];
}

/* Returns a little-endian number of at most 8 bytes. */
static inline uint64_t little_endian(const void *bytes, int nbytes)
{
    uint64_t value = 0;
    for (int i = nbytes - 1; i >= 0; i--)
        value = value << 8 | ((const unsigned char *)bytes)[i];
    return value;
}

/* Removes const, for the owner of an object: reference counts, memory about to be freed. */
static inline void *without_const(const void *owned)
{
    return (void *)(uintptr_t)owned;
}

/* Returns the time of a clock that is never set back. */
static inline double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- alloc.c ---- */

/* The limit of the buffers of a call whose caller names none. */
enum { DEFAULT_MAX_NBYTES = 256000000 };

/* Returns zeroed memory for count elements, also if count is 0. On failure returns NULL and sets the error
 * text. */
void *mem_new(size_t count, size_t element_nbytes);

/* A large buffer, on large pages where that is possible. Its bytes are not set. */
void *mem_new_buffer(size_t nbytes);
void mem_free_buffer(void *buffer, size_t nbytes); /* of this length; accepts NULL */

/* Grows a list of `capacity` elements to at least `need`, by doubling. On failure the list is unchanged. */
#define GROW(list, capacity, need) mem_grow(&(list), &(capacity), (need), sizeof *(list))
rsd_status mem_grow(void *list, size_t *capacity, size_t need, size_t element_nbytes);

/* Returns a copy of count elements, or NULL as mem_new. */
void *mem_copy(const void *from, size_t count, size_t element_nbytes);

void mem_free(void *memory);

/* ---- text.c ---- */

/* Text that grows. Initialize with {0}. After a failure further additions do nothing, so it is enough to
 * check the status of text_take. Numbers have a decimal point in every locale of the program. */
struct text {
    char *chars;
    size_t length, capacity;
    bool failed;
};

void text_add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same as vsnprintf, with a decimal point whatever the locale of the program is, as text_add writes it. */
int text_format(char *chars, size_t capacity, const char *format, va_list args);

/* Moves the text to the caller, to be freed with rsd_free, and leaves `text` empty. */
rsd_status text_take(struct text *text, char **chars);
void text_drop(struct text *text);

/* Bytes that belong to something else. */
struct slice {
    const char *bytes;
    size_t nbytes;
};
static inline struct slice slice_of(const char *text) /* without its NUL */
{
    return (struct slice){text, strlen(text)};
}
bool slice_is(struct slice slice, const char *text);
bool slice_begins(struct slice slice, const char *text); /* with the text */
bool slice_equal(struct slice a, struct slice b);

/* Returns how many bytes of a slice "%.*s" prints in a message: at most `most`. */
static inline int slice_width(struct slice slice, int most)
{
    return slice.nbytes < (size_t)most ? (int)slice.nbytes : most;
}

/* Return a copy with a NUL behind it, or NULL as mem_new. */
char *text_copy(const char *text);
char *slice_copy(struct slice slice);

/* Returns EINVAL: the error names what is unknown, and the word that was probably meant, or else all words. A word
 * was probably meant if at most a third of its characters differ, ignoring case. */
rsd_status text_unknown(const char *what, const char *text, size_t nwords,
                        const char *const *words);

/* Returns the last equals sign that is not in parentheses, as in "EXPRESSION=Shard(dim=0)", or NULL. */
const char *text_find_equals(const char *text);

/* Bytes that grow. Initialize with {0}. After a failure `failed` is set, and further additions do nothing. */
struct bytes {
    unsigned char *data;
    size_t n, capacity;
    bool failed;
};
void bytes_put(struct bytes *out, const void *data, size_t n);
void bytes_put_text(struct bytes *out, const char *text); /* without its NUL */
void bytes_put_number(struct bytes *out, uint64_t value,
                      int nbytes); /* little-endian, at most 8 bytes */
void bytes_drop(struct bytes *bytes);

/* Reads n bytes from an offset on, all of them or none. Codecs read through one, so that they need not know
 * where the bytes are. */
typedef rsd_status read_at(void *context, uint64_t offset, void *out, size_t n);

/* ---- regex.c ---- */

/* Compiles a POSIX extended expression. EINVAL: it is invalid. ELIMIT: it is too large. The caller adds its text to the
 * error: "is not a regular expression: ...". */
rsd_status regex_compile(const char *text, int flags, regex_t *regex);

/* ---- budget.c ---- */

/* The work that a file may still cause. */
struct budget {
    int64_t steps, memory; /* that are left; a step is some ten nanoseconds, memory is in bytes */
    int64_t spare;         /* steps at the start */
    int64_t input_left;    /* bytes that may still be read and add to it, if of_files */
    bool of_files; /* a file adds to it as often as twice its length, however often it is read */
    bool exceeded, reported; /* reported: budget_fail has set the error */
    struct budget *outer;
};

enum { START_STEPS = 1 << 22, STEP_NBYTES = 16 }; /* one step copies or compares so many bytes */

/* Starts a budget for this thread, in place of any other until its end. spare_steps may be taken besides
 * those for the bytes that are read. With of_files, bytes count that are in files which budget_add_file
 * has announced, and twice at most. */
void budget_begin(struct budget *budget, int64_t spare_steps, bool of_files);

/* Ends the budget. Returns EFORMAT if it was exceeded, else the status. *spare_steps, if not NULL, is what
 * is left of the spare steps. */
rsd_status budget_end(struct budget *budget, rsd_status status, int64_t *spare_steps);

void budget_add_input(uint64_t nbytes); /* says that bytes of a file are read in one call */
void budget_add_file(uint64_t nbytes);  /* says that a file of this length is read */
bool budget_counts_files(void);         /* whether the budget of this thread wants to know */

/* Take from the budget of this thread. Return false if too little is left, true if no budget was
 * started. A caller that gets false may stop with any result. */
bool budget_take(uint64_t nsteps);
bool budget_take_memory(uint64_t nbytes);
void budget_return_memory(uint64_t nbytes); /* that was taken, and is freed */

static inline bool budget_take_text(size_t nbytes)
{
    return budget_take(1 + nbytes / STEP_NBYTES);
}

rsd_status budget_fail(void); /* sets the error of a budget that is exceeded */

/* The same as a status: EFORMAT if too little is left. */
rsd_status budget_use(uint64_t nsteps);
rsd_status budget_use_memory(uint64_t nbytes);

/* ---- hash.c ---- */

/* 128 bits that tell plans, catalogs and calls apart. They protect against accidents, not against attacks. */
struct hash {
    uint64_t a, b;
};

/* Starts a hash. `label` separates the hashes of different kinds of objects. */
void hash_start(struct hash *hash, const char *label);
void hash_i64(struct hash *hash, int64_t value);
void hash_string(struct hash *hash, const char *string);
void hash_bytes(struct hash *hash, const void *bytes, size_t n);
void hash_i64s(struct hash *hash, const int64_t *values, size_t count);
void hash_i32s(struct hash *hash, const int32_t *values, size_t count);
void hash_text(struct hash hash, char hex[RSD_DIGEST_NCHARS]);

/* ---- dtype.c ---- */

/* What the elements of a dtype are. Those of CLASS_OPAQUE are only copied. */
enum dtype_class {
    CLASS_OPAQUE,
    CLASS_FLOAT,
    CLASS_SIGNED,
    CLASS_UNSIGNED,
    CLASS_BOOL,
    CLASS_COMPLEX
};
enum dtype_class dtype_class(rsd_dtype dtype); /* CLASS_OPAQUE for an invalid dtype */

/* Returns whether values of the dtype can be combined by the reduction. */
bool dtype_reduces(rsd_dtype dtype, rsd_reduce reduce);

/* Returns whether elements of one dtype can be converted to another. */
bool dtype_casts(rsd_dtype from, rsd_dtype to);

/* The names in torch, such as "float32". They return NULL for an invalid dtype, and 0 for an unknown name. */
const char *dtype_to_torch(rsd_dtype dtype);
rsd_dtype dtype_from_torch(struct slice name);

/* ---- 16-bit floats: conversion to f32 is exact, conversion from f32 rounds to nearest even ----
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
        return 0x7fc0; /* torch too maps every NaN to this one */
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
        return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (magnitude >= 0x38800000u)
        return (uint16_t)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
    /* A subnormal is a multiple of 2^-24. Adding 0.5 moves 2^-24 to the last bit of an f32. */
    return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
}

/* ---- pool.c ---- */

/* Called once for every index in [0, count), in any order and by several threads at once. */
typedef void pool_work(void *context, int64_t index);

/* Runs work for all indices on the calling thread and on threads of the pool. Returns when all calls have
 * returned. If pool is NULL, the calling thread does all the work. */
void pool_run(rsd_pool *pool, int64_t count, pool_work *work, void *context);

/* A job that was started and not yet waited for. The caller owns it, and may reuse it after pool_wait. */
struct pool_job {
    pool_work *work;
    void *context;
    int64_t count;
    _Atomic int64_t next; /* the next index that a thread takes */
    int32_t nfree;        /* how many more threads may join; from here on: under the pool's lock */
    int32_t nattached;    /* threads that work on it */
    bool queued;          /* in the queue of the pool */
    bool done_by_caller;  /* the pool has no threads: pool_start did all the work */
    struct pool_job *next_job; /* in the queue */
};
/* Starts work for all indices on the threads of the pool. Without threads it does all the work itself. */
void pool_start(rsd_pool *pool, struct pool_job *job, int64_t count, pool_work *work,
                void *context);
/* Returns when all calls have returned. Returns false if the process has forked since pool_start: the
 * threads that took the job belong to the parent process. */
bool pool_wait(rsd_pool *pool, struct pool_job *job);

/* Adds a reference, which rsd_pool_free removes. Returns its argument, which may be NULL. */
rsd_pool *pool_share(rsd_pool *pool);

/* Returns how many threads a job of this pool may use; 1 for NULL. */
int32_t pool_nthreads(const rsd_pool *pool);

/* ---- string_map.c ---- */

struct string_map_entry {
    struct slice name; /* owned by the caller; must outlive the map */
    uint64_t hash;
    size_t number;
};

/* A map from names to numbers. Initialize with {0}. */
struct string_map {
    struct string_map_entry *slots;
    size_t n, capacity;
    uint64_t key[2]; /* of the hash: random, so that names cannot be chosen to collide */
};

/* Returns whether the map has the name, and if so its number. */
bool string_map_find(const struct string_map *map, struct slice name, size_t *number);

/* Adds a name, or changes the number of a name that the map has. */
rsd_status string_map_add(struct string_map *map, struct slice name, size_t number);
void string_map_drop(struct string_map *map);

#endif
