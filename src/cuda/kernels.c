/* kernels.c - the source of the kernels, as text for NVRTC.
 *
 * A block of threads takes one tile after the other: thread 0 finds the copy that the tile belongs to
 * and where it begins, then each thread moves every 256th unit, four of them in flight.
 */
#include "kernels.h"

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Woverlength-strings"
#endif

#define CODE(...) #__VA_ARGS__ "\n"

static const char prelude[] = "#define DEVICE static __device__ __forceinline__\n"
                              "#define CALLED static __device__ __noinline__\n";

static const char index_text[] =
#include "index_code.h"
    ;
static const char value_text[] =
#include "value_code.h"
    ;
static const char sum_text[] =
#include "sum_code.h"
    ;
static const char remainder_text[] =
#include "remainder_code.h"
    ;

/* clang-format off */
static const char copy_text[] = CODE(

template <class Word>
static __device__ __forceinline__ void move_words(const char *const *from, char *const *to, int n)
{
    Word words[4];
    for (int u = 0; u < 4; u++)
        if (u < n)
            words[u] = *(const Word *)from[u];
    for (int u = 0; u < 4; u++)
        if (u < n)
            *(Word *)to[u] = words[u];
}

/* Words of one size: the arithmetic is compiled once for all sizes, which halves the time to compile. */
static __device__ __forceinline__ void move_any(gpu_u32 word, const char *const *from, char *const *to, int n)
{
    if (word == 16)
        move_words<uint4>(from, to, n);
    else if (word == 8)
        move_words<gpu_u64>(from, to, n);
    else if (word == 4)
        move_words<gpu_u32>(from, to, n);
    else if (word == 2)
        move_words<gpu_u16>(from, to, n);
    else
        move_words<unsigned char>(from, to, n);
}

static __device__ __forceinline__ void copy_tile(const gpu_tile &tile, const gpu_loop *loops, const char *src,
                                                 char *dst)
{
    const unsigned step = blockDim.x;
    for (unsigned k = threadIdx.x; k < tile.nunits; k += 4 * step) {
        const char *from[4];
        char *to[4];
        int n = (int)((tile.nunits - k + step - 1) / step);
        for (int u = 0; u < 4; u++) {
            gpu_i64 src_at;
            gpu_i64 dst_at;
            gpu_tile_unit(&tile, loops, k + u * step, &src_at, &dst_at);
            from[u] = src + src_at;
            to[u] = dst + dst_at;
        }
        move_any(tile.src_unit, from, to, n);
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) rsd_copy(const gpu_copy *copies, gpu_u32 ncopies,
                                                           const gpu_loop *all_loops,
                                                           const gpu_u64 *arrays, gpu_i64 ntiles)
{
    __shared__ gpu_tile tile;
    __shared__ gpu_copy copy;
    for (gpu_i64 number = blockIdx.x; number < ntiles; number += gridDim.x) {
        if (threadIdx.x == 0) {
            copy = copies[gpu_find_entry(copies, sizeof *copies, ncopies, number)];
            gpu_u32 word = gpu_word(arrays[copy.src], arrays[copy.dst], copy.align);
            gpu_copy_tile(&copy, all_loops, number - copy.first_tile, word, word, &tile);
        }
        __syncthreads();
        const char *src = (const char *)arrays[copy.src];
        char *dst = (char *)arrays[copy.dst];
        const gpu_loop *loops = all_loops + copy.first_loop;
        copy_tile(tile, loops, src, dst);
        __syncthreads();
    }
}

);

static const char cast_text[] = CODE(

static __device__ void cast_elements(const gpu_tile &tile, const gpu_loop *loops, const gpu_copy &copy,
                                     const char *src, char *dst)
{
    const unsigned step = blockDim.x;
    for (unsigned k = threadIdx.x; k < tile.nunits; k += 4 * step) {
        gpu_u64 bits[4];
        gpu_i64 to[4];
        for (int u = 0; u < 4; u++)
            if (k + u * step < tile.nunits) {
                gpu_i64 from;
                gpu_tile_unit(&tile, loops, k + u * step, &from, &to[u]);
                bits[u] = gpu_load_bits(src + from, tile.src_unit);
            }
        for (int u = 0; u < 4; u++)
            if (k + u * step < tile.nunits)
                gpu_store_bits(dst + to[u], tile.dst_unit, gpu_cast(copy.to, copy.from, bits[u]));
    }
}

extern "C" __global__ void __launch_bounds__(256) rsd_cast(const gpu_copy *copies, gpu_u32 ncopies,
                                                           const gpu_loop *all_loops,
                                                           const gpu_u64 *arrays, gpu_i64 ntiles)
{
    __shared__ gpu_tile tile;
    __shared__ gpu_copy copy;
    for (gpu_i64 number = blockIdx.x; number < ntiles; number += gridDim.x) {
        if (threadIdx.x == 0) {
            copy = copies[gpu_find_entry(copies, sizeof *copies, ncopies, number)];
            gpu_copy_tile(&copy, all_loops, number - copy.first_tile, gpu_nbytes(copy.from),
                          gpu_nbytes(copy.to), &tile);
        }
        __syncthreads();
        cast_elements(tile, all_loops + copy.first_loop, copy, (const char *)arrays[copy.src],
                      (char *)arrays[copy.dst]);
        __syncthreads();
    }
}

);

static const char reduce_text[] = CODE(

extern "C" __global__ void __launch_bounds__(256) rsd_reduce(const gpu_sum *sums, gpu_u32 nsums,
                                                             const gpu_loop *loops,
                                                             const gpu_term *terms,
                                                             const gpu_i64 *strides,
                                                             const gpu_u64 *arrays, gpu_i64 ntiles)
{
    __shared__ gpu_u64 bases[GPU_NBASES + 1];
    gpu_i64 outer[GPU_MAX_LOOPS];
    for (gpu_i64 number = blockIdx.x; number < ntiles; number += gridDim.x) {
        const gpu_sum sum = sums[gpu_find_entry(sums, sizeof *sums, nsums, number)];
        gpu_element element;
        element.sum = &sum;
        element.loops = loops;
        element.terms = terms;
        element.strides = strides;
        element.arrays = arrays;
        element.bases = bases;
        element.outer = outer;
        for (gpu_u32 i = threadIdx.x; i <= GPU_NBASES; i += blockDim.x)
            bases[i] = gpu_base_of(&element, i);
        __syncthreads();
        gpu_i64 first = sum.begin + (number - sum.first_tile) * GPU_SUM_TILE;
        gpu_i64 end = first + GPU_SUM_TILE < sum.end ? first + GPU_SUM_TILE : sum.end;
        for (gpu_i64 i = first + threadIdx.x * sum.neighbours; i < end; i += blockDim.x * sum.neighbours) {
            gpu_element_start(&element, i);
            gpu_reduce_element(&element);
        }
        __syncthreads();
    }
}

);
/* Each thread keeps the remainders of every 32nd word, so that a step multiplies by x^2048. That product is
 * the sum of 16 table entries, one for each nibble. Every thread has a copy of the tables in its own banks
 * of shared memory. */
static const char digest_text[] = CODE(

extern "C" __shared__ gpu_u64 nibbles[];  /* [crc][nibble][value][thread] */

template <int Crc> static __device__ __forceinline__ gpu_u64 step_words(gpu_u64 state, unsigned thread)
{
    gpu_u64 product = 0;
    for (int j = 0; j < 16; j++)
        product ^= nibbles[((Crc * 16 + j) * 16 + (int)(state >> 4 * j & 15)) * 32 + thread];
    return product;
}

static __device__ gpu_u64 sum_threads(gpu_u64 value)
{
    for (int step = 16; step > 0; step /= 2)
        value ^= __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

static __device__ void add_result(gpu_u64 *results, gpu_u32 result, int crc, gpu_u64 value)
{
    atomicXor(&results[result * GPU_NCRC + crc], value);
}

/* n bytes that `after` bytes follow, by the threads of a warp. */
static __device__ void add_segment(const char *at, gpu_i64 n, gpu_u64 after, gpu_u32 result,
                                   const gpu_u64 *powers, gpu_u64 *results)
{
    const unsigned thread = threadIdx.x % 32;
    gpu_i64 head = (gpu_i64)((8 - ((gpu_u64)at & 7)) & 7);
    if (head > n)
        head = n;
    gpu_i64 nwords = (n - head) / 8;
    gpu_i64 tail = n - head - 8 * nwords;
    const gpu_u64 *words = (const gpu_u64 *)(at + head);
    gpu_u64 ecma = 0;
    gpu_u64 jones = 0;
    /* Zeros before the first word change nothing, so that the last word is thread 31's. */
    gpu_i64 i = (gpu_i64)thread - (32 - nwords % 32) % 32;
    for (; i < nwords; i += 32) {
        gpu_u64 word = i < 0 ? 0 : words[i];
        ecma = step_words<GPU_ECMA>(ecma, thread) ^ word;
        jones = step_words<GPU_JONES>(jones, thread) ^ word;
    }
    /* A word has been added, not yet reduced: it counts as followed by its own 8 bytes of zeros. */
    gpu_u64 thread_after = 8 * (31 - thread) + 8;
    ecma = sum_threads(gpu_shift(GPU_ECMA, powers, ecma, thread_after));
    jones = sum_threads(gpu_shift(GPU_JONES, powers, jones, thread_after));
    if (thread < GPU_NCRC) {
        int crc = (int)thread;
        gpu_u64 body = crc == GPU_ECMA ? ecma : jones;
        gpu_u64 sum = gpu_crc_bytes(crc, 0, at, (gpu_u32)head);
        sum = gpu_shift(crc, powers, sum, 8 * nwords) ^ body;
        sum = gpu_crc_bytes(crc, sum, at + head + 8 * nwords, (gpu_u32)tail);
        add_result(results, result, crc, gpu_shift(crc, powers, sum, after));
    }
}

/* Short rows of the innermost loop: each thread takes every 32nd. */
static __device__ void add_rows(const gpu_digest &digest, const gpu_loop *loops, gpu_i64 first, gpu_i64 nrows,
                                const char *array, const gpu_u64 *powers, gpu_u64 *results)
{
    const unsigned thread = threadIdx.x % 32;
    gpu_i64 stride = digest.nloops ? loops[digest.first_loop + digest.nloops - 1].dst_stride : 0;
    for (int crc = 0; crc < GPU_NCRC; crc++) {
        gpu_u64 step = gpu_shift(crc, powers, 1ull << 63, (gpu_u64)(32 * stride));
        gpu_u64 sum = 0;
        gpu_i64 at;
        gpu_i64 after = 0;
        for (gpu_i64 i = thread; i < nrows; i += 32) {
            gpu_digest_row(&digest, loops, first + i, &at, &after);
            sum = gpu_times(crc, sum, step) ^ gpu_crc_bytes(crc, 0, array + at, (gpu_u32)digest.run);
        }
        if (sum)
            add_result(results, digest.result, crc, gpu_shift(crc, powers, sum, (gpu_u64)after));
    }
}

extern "C" __global__ void __launch_bounds__(1024) rsd_digest(const gpu_digest *digests, gpu_u32 ndigests,
                                                              const gpu_loop *loops, const gpu_u64 *arrays,
                                                              const gpu_u64 *powers, const gpu_u64 *tables,
                                                              gpu_u64 *results, gpu_i64 ntiles)
{
    for (unsigned i = threadIdx.x; i < GPU_NCRC * 16 * 16 * 32; i += blockDim.x)
        nibbles[i] = tables[i / 32];
    __syncthreads();
    gpu_i64 nwarps = (gpu_i64)gridDim.x * (blockDim.x / 32);
    for (gpu_i64 tile = blockIdx.x + (gpu_i64)(threadIdx.x / 32) * gridDim.x; tile < ntiles; tile += nwarps) {
        const gpu_digest &digest = digests[gpu_find_entry(digests, sizeof *digests, ndigests, tile)];
        const char *array = (const char *)arrays[digest.array];
        gpu_i64 number = tile - digest.first_tile;
        gpu_i64 at;
        gpu_i64 after;
        if (digest.run >= GPU_SHORT_RUN) {
            gpu_i64 nsegments = (digest.run + GPU_DIGEST_SEGMENT - 1) / GPU_DIGEST_SEGMENT;
            gpu_i64 begin = number % nsegments * GPU_DIGEST_SEGMENT;
            gpu_i64 end = begin + GPU_DIGEST_SEGMENT < digest.run ? begin + GPU_DIGEST_SEGMENT : digest.run;
            gpu_digest_row(&digest, loops, number / nsegments, &at, &after);
            add_segment(array + at + begin, end - begin, (gpu_u64)(after + digest.run - end), digest.result,
                        powers, results);
        } else {
            gpu_i64 inner = gpu_digest_inner(&digest, loops);
            gpu_i64 ngroups = (inner + GPU_DIGEST_ROWS - 1) / GPU_DIGEST_ROWS;
            gpu_i64 begin = number % ngroups * GPU_DIGEST_ROWS;
            gpu_i64 end = begin + GPU_DIGEST_ROWS < inner ? begin + GPU_DIGEST_ROWS : inner;
            add_rows(digest, loops, number / ngroups * inner + begin, end - begin, array, powers, results);
        }
    }
}

);
/* clang-format on */

static const char *const copy_source[] = {prelude, index_text, copy_text, NULL};
static const char *const cast_source[] = {prelude, index_text, value_text, cast_text, NULL};
static const char *const reduce_source[] = {prelude,  index_text,  value_text,
                                            sum_text, reduce_text, NULL};
static const char *const digest_source[] = {prelude, index_text, remainder_text, digest_text, NULL};

const struct kernel kernels[] = {
    [KERNEL_COPY] = {"rsd_copy", copy_source},
    [KERNEL_CAST] = {"rsd_cast", cast_source},
    [KERNEL_REDUCE] = {"rsd_reduce", reduce_source},
    [KERNEL_DIGEST] = {"rsd_digest", digest_source},
};
