/* copy.c - copies rows of bytes.
 *
 * Ordinary stores first read the destination into the cache, only to overwrite it. Stores that bypass the
 * cache avoid that read. They are up to twice as fast if the whole destination is larger than the cache, and
 * slower if it is small. The caller chooses.
 *
 * Rows of a few bytes are copied by loops of fixed size. In a transposition, source and destination are
 * contiguous along different loops. These two loops are copied in tiles, so that all bytes of a cache line are
 * used before the line is evicted.
 */
#include "memory.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

/* Returns whether all rows of the destination consist of whole cache lines. */
static bool rows_are_lines(const char *dst, int64_t dst_stride, size_t run)
{
    return (((uintptr_t)dst | (uintptr_t)dst_stride | run) & 63) == 0;
}

/* ---- ordinary stores ---- */

#define FIXED_ROWS(nbytes)                                                                         \
    for (int64_t i = 0; i < count; i++, dst += dst_stride, src += src_stride)                      \
    memcpy(dst, src, nbytes)

static void copy_rows_plain(char *dst, int64_t dst_stride, const char *src, int64_t src_stride,
                            size_t run, int64_t count)
{
    switch (run) {
    case 1:
        FIXED_ROWS(1);
        return;
    case 2:
        FIXED_ROWS(2);
        return;
    case 4:
        FIXED_ROWS(4);
        return;
    case 8:
        FIXED_ROWS(8);
        return;
    case 16:
        FIXED_ROWS(16);
        return;
    case 32:
        FIXED_ROWS(32);
        return;
    case 64:
        FIXED_ROWS(64);
        return;
    default:
        FIXED_ROWS(run);
    }
}

/* ---- stores that bypass the cache ---- */

#if HAVE_X86

/* Returns the bytes before dst reaches a multiple of 64, at most n. */
static size_t bytes_to_line(const char *dst, size_t n)
{
    size_t head = (size_t)(-(uintptr_t)dst & 63);
    return head < n ? head : n;
}

#define STREAM_ROWS(name, target_isa, move64)                                                      \
    __attribute__((target(target_isa))) static void name(char *dst, int64_t dst_stride,            \
                                                         const char *src, int64_t src_stride,      \
                                                         size_t run, int64_t count)                \
    {                                                                                              \
        if (rows_are_lines(dst, dst_stride, run)) {                                                \
            for (int64_t i = 0; i < count; i++, dst += dst_stride, src += src_stride)              \
                for (size_t at = 0; at < run; at += 64)                                            \
                    move64;                                                                        \
            return;                                                                                \
        }                                                                                          \
        for (int64_t i = 0; i < count; i++, dst += dst_stride, src += src_stride) {                \
            size_t at = bytes_to_line(dst, run);                                                   \
            memcpy(dst, src, at);                                                                  \
            for (; at + 64 <= run; at += 64)                                                       \
                move64;                                                                            \
            memcpy(dst + at, src + at, run - at);                                                  \
        }                                                                                          \
    }

#define MOVE128(k)                                                                                 \
    _mm_stream_si128((__m128i *)(void *)(dst + at + (k)),                                          \
                     _mm_loadu_si128((const __m128i *)(const void *)(src + at + (k))))
#define MOVE256(k)                                                                                 \
    _mm256_stream_si256((__m256i *)(void *)(dst + at + (k)),                                       \
                        _mm256_loadu_si256((const __m256i *)(const void *)(src + at + (k))))

STREAM_ROWS(copy_rows_stream128, "sse2", (MOVE128(0), MOVE128(16), MOVE128(32), MOVE128(48)))
STREAM_ROWS(copy_rows_stream256, "avx2", (MOVE256(0), MOVE256(32)))
STREAM_ROWS(copy_rows_stream512, "avx512f",
            _mm512_stream_si512((void *)(dst + at), _mm512_loadu_si512(src + at)))

int copier_nlevels(void)
{
    return __builtin_cpu_supports("avx512f") ? 4 : __builtin_cpu_supports("avx2") ? 3 : 2;
}

struct copier copier_level(int level)
{
    copy_rows_fn *const streams[] = {copy_rows_plain, copy_rows_stream128, copy_rows_stream256,
                                     copy_rows_stream512};
    return (struct copier){copy_rows_plain, streams[level]};
}

#else

int copier_nlevels(void)
{
    return 1;
}

struct copier copier_level(int level)
{
    (void)level;
    return (struct copier){copy_rows_plain, copy_rows_plain};
}

#endif

/* Stores that bypass the cache become visible to other threads in order with later stores. */
static void finish_stores(void)
{
#if HAVE_X86
    _mm_sfence();
#endif
}

struct copier copier_best(void)
{
    return copier_level(copier_nlevels() - 1);
}

/* ---- blocks ---- */

enum { TILE = 32, TILE_MAX_RUN = 16 };

struct block copy_block_of(size_t run, struct element element, int32_t nloops,
                           const struct loop *loops)
{
    struct block block = {
        .run = run, .element = element, .nrows = 1, .loops = loops, .nloops = nloops, .across = -1};
    int32_t inner = nloops - 1, along = inner;
    for (int32_t i = 0; i < nloops; i++) {
        block.nrows *= loops[i].count;
        if (loops[i].src_stride < loops[along].src_stride && loops[i].src_stride > 0)
            along = i;
    }
    if (run * (size_t)element.src_unit <= TILE_MAX_RUN && along < inner)
        block.across = along;
    return block;
}

/* Copies or converts `count` rows of a block. `rows` is NULL if elements are converted. */
static void move_rows(copy_rows_fn *rows, const struct block *block, char *dst, int64_t dst_stride,
                      const char *src, int64_t src_stride, int64_t count)
{
    if (rows)
        rows(dst, dst_stride, src, src_stride, block->run, count);
    else
        cast_rows(block->element, dst, dst_stride, src, src_stride, (int64_t)block->run, count);
}

static void copy_tiles(copy_rows_fn *rows, const struct block *block, const char *src, char *dst)
{
    const struct loop *outer = &block->loops[block->across],
                      *inner = &block->loops[block->nloops - 1];
    for (int64_t i = 0; i < outer->count; i += TILE)
        for (int64_t j = 0; j < inner->count; j += TILE)
            for (int64_t k = i; k < min_i64(i + TILE, outer->count); k++)
                move_rows(rows, block, dst + k * outer->dst_stride + j * inner->dst_stride,
                          inner->dst_stride, src + k * outer->src_stride + j * inner->src_stride,
                          inner->src_stride, min_i64(TILE, inner->count - j));
}

/* Copies all rows of a block, with tiles of its innermost loop and of the loop `across`. */
static void copy_rows_across(copy_rows_fn *rows, const struct block *block, const char *src,
                             char *dst)
{
    int64_t index[MAX_LOOPS] = {0};
    for (;;) {
        copy_tiles(rows, block, src, dst);
        int32_t i = block->nloops - 2;
        for (; i >= 0; i--) {
            const struct loop *loop = &block->loops[i];
            if (i == block->across)
                continue;
            src += loop->src_stride;
            dst += loop->dst_stride;
            if (++index[i] < loop->count)
                break;
            src -= loop->count * loop->src_stride;
            dst -= loop->count * loop->dst_stride;
            index[i] = 0;
        }
        if (i < 0)
            return;
    }
}

/* Copies rows [first, first + nrows) of a block, with one call of `rows` for each run of the innermost loop. */
static void copy_rows_in_order(copy_rows_fn *rows, const struct block *block, const char *src,
                               char *dst, int64_t first, int64_t nrows)
{
    int64_t index[MAX_LOOPS];
    int32_t inner = block->nloops - 1;
    for (int32_t i = inner; i >= 0; i--) {
        index[i] = first % block->loops[i].count;
        first /= block->loops[i].count;
        src += index[i] * block->loops[i].src_stride;
        dst += index[i] * block->loops[i].dst_stride;
    }
    while (nrows > 0) {
        const struct loop *loop = &block->loops[inner];
        int64_t n = min_i64(nrows, loop->count - index[inner]);
        move_rows(rows, block, dst, loop->dst_stride, src, loop->src_stride, n);
        nrows -= n;
        index[inner] += n;
        src += n * loop->src_stride;
        dst += n * loop->dst_stride;
        for (int32_t i = inner; i > 0 && index[i] == block->loops[i].count; i--) {
            src +=
                block->loops[i - 1].src_stride - block->loops[i].count * block->loops[i].src_stride;
            dst +=
                block->loops[i - 1].dst_stride - block->loops[i].count * block->loops[i].dst_stride;
            index[i] = 0;
            index[i - 1]++;
        }
    }
}

/* Bypassing the cache is faster for rows of whole cache lines, and for other rows if most of a row is whole
 * lines. Where rows are adjacent, both write to the line between them, so rows have to be longer. */
static bool worth_streaming(const struct block *block, const char *dst)
{
    int64_t stride = block->nloops ? block->loops[block->nloops - 1].dst_stride : 0;
    size_t least = rows_are_lines(dst, stride, block->run)          ? 64
                   : block->nloops && stride == (int64_t)block->run ? 256
                                                                    : 128;
    return block->run >= least;
}

void copy_block(const struct copier *copier, bool stream, const struct block *block,
                const char *src, char *dst, int64_t first_row, int64_t nrows)
{
    bool converts = block->element.from != 0;
    stream = stream && !converts && worth_streaming(block, dst);
    copy_rows_fn *rows = converts ? NULL : stream ? copier->stream : copier->rows;
    const struct loop *loop = block->loops;
    if (block->nloops <= 0)
        move_rows(rows, block, dst, 0, src, 0, 1);
    else if (block->nloops == 1)
        move_rows(rows, block, dst + first_row * loop->dst_stride, loop->dst_stride,
                  src + first_row * loop->src_stride, loop->src_stride, nrows);
    else if (block->across >= 0 && nrows == block->nrows)
        copy_rows_across(converts ? NULL : copier->rows, block, src, dst);
    else
        copy_rows_in_order(rows, block, src, dst, first_row, nrows);
    if (stream)
        finish_stores();
}

void copy_loops(const struct copier *copier, bool stream, const struct loops *loops,
                const char *src, char *dst)
{
    struct block block = copy_block_of(loops->run, loops->element, loops->n, loops->loop);
    copy_block(copier, stream, &block, src, dst, 0, block.nrows);
}
