/* The plain C part of the kernels, run on the CPU: which bytes each tile of a copy moves, the bits of
 * casts and of reductions. */
#include "memory.h"
#include "random.h"
#include "tables.h"
#include "tap.h"

#include <stdlib.h>

/* ---- copies ---- */

enum { MAX_NEST = 5, ARENA = 1 << 18 };

struct nest {
    int64_t run, nrows;
    struct gpu_loop loops[MAX_NEST];
    uint32_t nloops;
};

/* Loops around a run whose rows do not overlap on the destination side, in any order of strides. */
static struct nest random_nest(struct random *random)
{
    static const int64_t runs[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 64, 100, 1024};
    struct nest nest = {.run = runs[random_below(random, 13)], .nrows = 1};
    int64_t src = nest.run, dst = nest.run;
    nest.nloops = (uint32_t)random_below(random, MAX_NEST + 1);
    for (uint32_t i = 0; i < nest.nloops; i++) {
        int64_t most = ARENA / 4 / dst;
        int64_t count = 1 + random_below(random, most < 1 ? 1 : most < 9 ? most : 9);
        src += random_below(random, 3) * 4;
        dst += random_below(random, 3) * 4;
        nest.loops[i] = (struct gpu_loop){count, random_below(random, 4) ? src : 0, dst};
        nest.nrows *= count;
        src *= count;
        dst *= count;
        if (src > ARENA / 2 || dst > ARENA / 2) {
            nest.nloops = i + 1;
            break;
        }
    }
    return nest;
}

static int64_t row_offset(const struct nest *nest, int64_t row, bool dst)
{
    int64_t at = 0;
    for (uint32_t i = nest->nloops; i-- > 0;) {
        at += row % nest->loops[i].count *
              (dst ? nest->loops[i].dst_stride : nest->loops[i].src_stride);
        row /= nest->loops[i].count;
    }
    return at;
}

static uint32_t common_power(int64_t bits)
{
    uint32_t power = 16;
    while (bits & (power - 1))
        power /= 2;
    return power;
}

/* What the kernel does, thread by thread. */
static void run_copy(const struct gpu_copy *copy, const struct gpu_loop *loops, char *const *arrays)
{
    for (gpu_i64 number = 0; number < gpu_copy_ntiles(copy); number++) {
        struct gpu_tile tile;
        gpu_u32 word =
            gpu_word((gpu_u64)(uintptr_t)arrays[0], (gpu_u64)(uintptr_t)arrays[1], copy->align);
        gpu_copy_tile(copy, loops, number, word, word, &tile);
        for (gpu_u32 unit = 0; unit < tile.nunits; unit++) {
            gpu_i64 from, to;
            gpu_tile_unit(&tile, loops, unit, &from, &to);
            CHECK(((uintptr_t)(arrays[0] + from) & (word - 1)) == 0);
            memcpy(arrays[1] + to, arrays[0] + from, word);
        }
    }
}

static void check_nest(struct random *random)
{
    static _Alignas(16) char src[2 * ARENA], dst[2 * ARENA], expected[2 * ARENA];
    struct nest nest = random_nest(random);
    int64_t begin = 0, end = nest.run * nest.nrows, bits = nest.run;
    if (random_below(random, 2)) {
        begin = random_below(random, end + 1);
        end = begin + random_below(random, end - begin + 1);
    }
    for (uint32_t i = 0; i < nest.nloops; i++)
        bits |= nest.loops[i].src_stride | nest.loops[i].dst_stride;
    int64_t src_offset = 4 * random_below(random, 8), dst_offset = 4 * random_below(random, 8);
    bits |= src_offset | dst_offset | begin | end;
    struct gpu_copy copy = {.src_offset = src_offset,
                            .dst_offset = dst_offset,
                            .run = nest.run,
                            .begin = begin,
                            .end = end,
                            .nloops = nest.nloops,
                            .align = common_power(bits)};
    for (size_t i = 0; i < sizeof src; i++)
        src[i] = (char)random_next(random);
    memset(dst, 0x55, sizeof dst);
    memset(expected, 0x55, sizeof expected);
    for (int64_t at = begin; at < end; at++) {
        int64_t row = at / nest.run, in_row = at % nest.run;
        expected[dst_offset + row_offset(&nest, row, true) + in_row] =
            src[src_offset + row_offset(&nest, row, false) + in_row];
    }
    char *arrays[] = {src, dst};
    run_copy(&copy, nest.loops, arrays);
    CHECK(memcmp(dst, expected, sizeof dst) == 0, "run %lld, %u loops, bytes %lld to %lld",
          (long long)nest.run, nest.nloops, (long long)begin, (long long)end);
}

/* Loops and runs of more than 2^31 units, of which a tile sees a few. */
static void check_long_loops(void)
{
    struct gpu_loop loops[] = {{1ll << 33, 3ll << 40, 5}, {(1ll << 32) + 1, 1ll << 7, 1ll << 6}};
    gpu_i64 per_run = 3, row = ((1ll << 32) + 1) * 7 + (1ll << 32); /* the last of an inner loop */
    struct gpu_tile tile;
    gpu_tile_start(&tile, row * per_run + 1, per_run, loops, 2);
    tile.src_unit = tile.dst_unit = 16;
    gpu_i64 src, dst;
    gpu_tile_unit(&tile, loops, 0, &src, &dst);
    CHECK(src == 7 * loops[0].src_stride + (1ll << 32) * (1ll << 7) + 16);
    gpu_tile_unit(&tile, loops, 2, &src, &dst); /* two units on, both loops step */
    CHECK(src == 8 * loops[0].src_stride && dst == 8 * 5);
    gpu_tile_unit(&tile, loops, 3 * 5 + 2, &src, &dst);
    CHECK(src == 8 * loops[0].src_stride + 5 * (1ll << 7) && dst == 8 * 5 + 5 * (1ll << 6));
    struct gpu_loop one = {2, 1, 1ll << 50};
    gpu_tile_start(&tile, (1ll << 40) - 5, 1ll << 40, &one, 1);
    tile.src_unit = tile.dst_unit = 1;
    gpu_tile_unit(&tile, &one, 7, &src, &dst);
    CHECK(src == 1 + 2 && dst == (1ll << 50) + 2);
}

static void check_find(void)
{
    struct gpu_copy copies[9] = {0};
    for (int i = 0; i < 9; i++)
        copies[i].first_tile = 3 * i;
    for (int tile = 0; tile < 30; tile++)
        CHECK(gpu_find_entry(copies, sizeof *copies, 9, tile) ==
              (gpu_u32)(tile / 3 < 8 ? tile / 3 : 8));
}

/* ---- values ---- */

static void check_casts(struct random *random)
{
    static const rsd_dtype dtypes[] = {RSD_F64, RSD_F32, RSD_F16, RSD_BF16, RSD_I64,
                                       RSD_I32, RSD_I16, RSD_I8,  RSD_U64,  RSD_U32,
                                       RSD_U16, RSD_U8,  RSD_BOOL};
    for (size_t f = 0; f < 13; f++)
        for (size_t t = 0; t < 13; t++) {
            rsd_dtype from = dtypes[f], to = dtypes[t];
            size_t nin = rsd_dtype_nbytes(from), nout = rsd_dtype_nbytes(to);
            for (int i = 0; from != to && i < 70000; i++) {
                uint64_t bits = nin == 2 ? (uint64_t)i & 0xffff : random_next(random), out = 0;
                if (i % 3 == 0 && nin == 8 && from == RSD_F64) /* values of a common size */
                    bits = gpu_double_bits((double)(int64_t)random_next(random) * 0x1p-40);
                if (i % 3 == 0 && from == RSD_F32)
                    bits = gpu_float_bits((float)(int64_t)random_next(random) * 0x1p-40f);
                if (i % 7 == 0 && from == RSD_F64)
                    bits = 0x7ff0000000000000ull | random_next(random);
                if (i % 7 == 0 && from == RSD_F32)
                    bits = 0x7f800000u | (random_next(random) & 0xffffffffu);
                bits &= nin == 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * nin) - 1;
                cast_elements(to, &out, from, &bits, 1);
                uint64_t got = gpu_cast((gpu_u32)to, (gpu_u32)from, bits);
                got &= nout == 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * nout) - 1;
                if (!CHECK(got == out, "%s to %s: %llx is %llx, on the CPU %llx",
                           rsd_dtype_name(from), rsd_dtype_name(to), (unsigned long long)bits,
                           (unsigned long long)got, (unsigned long long)out))
                    break;
            }
        }
}

/* With several neighbours at once where a dtype has them, and arrays at any address. */
static void check_reduction(struct random *random, rsd_dtype dtype, rsd_dtype to, rsd_reduce reduce,
                            int turn)
{
    enum { N = 64, NTERMS = 5 };
    static _Alignas(16) char space[NTERMS + 1][N * 16 + 16], expected[N * 16];
    char *terms[NTERMS + 1], *got;
    size_t nbytes = rsd_dtype_nbytes(dtype), to_nbytes = rsd_dtype_nbytes(to);
    gpu_u32 neighbours = turn % 2 && dtype != RSD_C64 && dtype != RSD_C128 ? GPU_MAX_PARTS : 1;
    for (int t = 0; t <= NTERMS; t++) {
        terms[t] = space[t] + (turn % 4 < 2 ? 0 : random_next(random) % 16);
        for (size_t i = 0; i < sizeof space[t]; i++)
            space[t][i] = (char)random_next(random);
    }
    got = terms[NTERMS];
    struct reduction reduction = {dtype, to, reduce, reduce == RSD_REDUCE_AVG ? NTERMS : 1, NTERMS};
    struct accumulators sums;
    reduce_first(&reduction, &sums, N, terms[0], (int64_t)nbytes);
    for (int t = 1; t < NTERMS; t++)
        reduce_next(&reduction, &sums, N, terms[t], (int64_t)nbytes);
    reduce_store(&reduction, &sums, N, expected, (int64_t)to_nbytes);

    struct gpu_loop loop = {N, 0, (gpu_i64)to_nbytes};
    struct gpu_sum sum = {.end = N,
                          .divisor = reduction.divisor,
                          .dst = NTERMS,
                          .nloops = 1,
                          .nterms = NTERMS,
                          .dtype = (gpu_u32)dtype,
                          .to = (gpu_u32)to,
                          .reduce = (gpu_u32)reduce,
                          .neighbours = neighbours};
    gpu_i64 stride = (gpu_i64)nbytes;
    struct gpu_term list[NTERMS];
    gpu_u64 arrays[NTERMS + 1], bases[GPU_NBASES + 1];
    for (gpu_u32 t = 0; t < NTERMS; t++) {
        list[t] = (struct gpu_term){.src = t};
        arrays[t] = (gpu_u64)(uintptr_t)terms[t];
    }
    arrays[NTERMS] = (gpu_u64)(uintptr_t)got;
    struct gpu_element element = {.sum = &sum,
                                  .loops = &loop,
                                  .terms = list,
                                  .strides = &stride,
                                  .arrays = arrays,
                                  .bases = bases};
    for (gpu_u32 i = 0; i <= GPU_NBASES; i++)
        bases[i] = gpu_base_of(&element, i);
    for (int i = 0; i < N; i += (int)neighbours) {
        gpu_element_start(&element, i);
        gpu_reduce_element(&element);
    }
    CHECK(memcmp(got, expected, N * to_nbytes) == 0, "%s %s to %s, %u at once",
          rsd_dtype_name(dtype), rsd_reduce_name(reduce), rsd_dtype_name(to), neighbours);
}

int main(void)
{
    struct random random = {7};
    CASE("copies move the bytes of their loops");
    for (int i = 0; i < 400; i++)
        check_nest(&random);
    CASE("loops of more than 2^31 rows");
    check_long_loops();
    CASE("the copy of a tile");
    check_find();
    CASE("casts have the bits of the CPU");
    check_casts(&random);
    CASE("reductions have the bits of the CPU");
    for (rsd_dtype dtype = RSD_F64; dtype <= RSD_C128; dtype++)
        for (rsd_reduce reduce = RSD_REDUCE_SUM; reduce <= RSD_REDUCE_BXOR; reduce++)
            for (int i = 0; i < 20 && dtype_reduces(dtype, reduce); i++)
                check_reduction(&random, dtype, dtype, reduce, i);
    CASE("reductions whose result is converted, too");
    for (rsd_dtype dtype = RSD_F64; dtype <= RSD_C128; dtype++)
        for (rsd_dtype to = RSD_F64; to <= RSD_C128; to++)
            for (rsd_reduce reduce = RSD_REDUCE_SUM; reduce <= RSD_REDUCE_BXOR; reduce++)
                for (int i = 0; i < 4 && dtype_reduces(dtype, reduce) && dtype_casts(dtype, to);
                     i++)
                    check_reduction(&random, dtype, to, reduce, i);
    return tap_end();
}
