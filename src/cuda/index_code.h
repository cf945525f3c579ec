/* index_code.h - the tables of the kernels and their index arithmetic, in C that is also CUDA C++.
 *
 * The text between the brackets is compiled twice: by the C compiler, which provides the structs of the
 * tables to the host and the arithmetic to the tests (tables.h), and by NVRTC as a part of the kernels (kernels.c).
 * It has no preprocessor directives. The other files called ..._code.h are of the same kind.
 *
 *     a copy      rows of `run` bytes at the addresses of nested loops; the units of all its rows are
 *                 numbered, and a tile is a range of these numbers
 *     a unit      one word of a copy, or one element of a cast or a reduction
 */
/* clang-format off */

CODE(

typedef long long gpu_i64;
typedef unsigned long long gpu_u64;
typedef unsigned int gpu_u32;
typedef unsigned short gpu_u16;

/* One of several nested loops, strides in bytes; innermost loops come last. */
struct gpu_loop {
    gpu_i64 count, src_stride, dst_stride;
};

/* Units [begin, end) of loops around a run. `from` and `to` are dtypes of a cast, 0 for a copy.
 * A copy counts bytes, and `align` is the largest power of two up to 16 that divides the run, the
 * strides, the offsets, begin and end. A cast counts elements. */
struct gpu_copy {
    gpu_i64 first_tile; /* in all tables the first member */
    gpu_i64 src_offset, dst_offset;
    gpu_i64 run, begin, end;
    gpu_u32 src, dst;
    gpu_u32 first_loop, nloops;
    gpu_u32 align, from, to, unused;
};

/* Elements [begin, end) of loops, each combined from nterms terms of `dtype` in their order, and converted to the dtype
 * `to`. `neighbours` elements of the innermost loop are contiguous in the result and in all terms; this number divides
 * the count of the loop. */
struct gpu_sum {
    gpu_i64 first_tile;
    gpu_i64 dst_offset, begin, end, divisor;
    gpu_u32 dst, first_loop, nloops, first_term, nterms;
    gpu_u32 dtype, to, reduce, neighbours, unused;
};

/* A term: an array, and the strides of its loops in a list of their own. */
struct gpu_term {
    gpu_i64 offset;
    gpu_u32 src, first_stride;
};

enum { GPU_COPY_TILE = 65536, GPU_CAST_TILE = 16384, GPU_SUM_TILE = 8192, GPU_MAX_LOOPS = 33 };

/* ---- index arithmetic ---- */

/* Where a tile of a copy begins: which unit of which row, and the index of every loop there. */
struct gpu_tile {
    gpu_i64 src, dst;       /* offsets of the first row's begin */
    gpu_i64 in_run, per_run; /* units: into the first row, and of a row */
    gpu_i64 index[GPU_MAX_LOOPS];
    gpu_u32 nunits, src_unit, dst_unit, nloops;
};

DEVICE void gpu_tile_start(struct gpu_tile *tile, gpu_i64 first, gpu_i64 per_run,
                           const struct gpu_loop *loops, gpu_u32 nloops)
{
    gpu_i64 row = first / per_run;
    tile->per_run = per_run;
    tile->in_run = first - row * per_run;
    tile->nloops = nloops;
    tile->src = tile->dst = 0;
    for (gpu_u32 i = nloops; i-- > 0;) {
        gpu_i64 next = row / loops[i].count;
        tile->index[i] = row - next * loops[i].count;
        tile->src += tile->index[i] * loops[i].src_stride;
        tile->dst += tile->index[i] * loops[i].dst_stride;
        row = next;
    }
}

/* value / divisor, for value < 2 * divisor or both below 2^32. */
DEVICE gpu_u32 gpu_short_quotient(gpu_i64 value, gpu_i64 divisor)
{
    if (value < divisor)
        return 0;
    if (value <= 0xffffffffll)
        return (gpu_u32)value / (gpu_u32)divisor;
    return 1;
}

/* Offsets of a unit of the tile, counted from the tile's first. Tiles have far fewer than 2^31 units,
 * so a loop of more rows than that wraps at most once. */
DEVICE void gpu_tile_unit(const struct gpu_tile *tile, const struct gpu_loop *loops, gpu_u32 unit,
                          gpu_i64 *src, gpu_i64 *dst)
{
    gpu_i64 at = tile->in_run + unit;
    gpu_u32 carry = gpu_short_quotient(at, tile->per_run);
    at -= (gpu_i64)carry * tile->per_run;
    gpu_i64 from = tile->src + at * tile->src_unit;
    gpu_i64 to = tile->dst + at * tile->dst_unit;
    for (gpu_u32 i = tile->nloops; carry && i-- > 0;) {
        gpu_i64 before = tile->index[i];
        gpu_i64 count = loops[i].count;
        gpu_i64 index = before + carry;
        carry = gpu_short_quotient(index, count);
        index -= (gpu_i64)carry * count;
        from += (index - before) * loops[i].src_stride;
        to += (index - before) * loops[i].dst_stride;
    }
    *src = from;
    *dst = to;
}

/* The last of n entries of a table whose first tile is at most `tile`. */
DEVICE gpu_u32 gpu_find_entry(const void *table, gpu_u64 entry_nbytes, gpu_u32 n, gpu_i64 tile)
{
    gpu_u32 lo = 0;
    gpu_u32 hi = n - 1;
    while (lo < hi) {
        gpu_u32 middle = lo + (hi - lo + 1) / 2;
        if (*(const gpu_i64 *)((const char *)table + middle * entry_nbytes) <= tile)
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo;
}

/* The widest word of a copy between two addresses. */
DEVICE gpu_u32 gpu_word(gpu_u64 src, gpu_u64 dst, gpu_u32 align)
{
    gpu_u64 bits = src | dst | align;
    gpu_u32 word = 16;
    while (bits & (word - 1))
        word /= 2;
    return word;
}

/* Prepares tile number `tile` (of this copy) for words of that many bytes, or for elements. */
DEVICE void gpu_copy_tile(const struct gpu_copy *copy, const struct gpu_loop *loops, gpu_i64 number,
                          gpu_u32 src_unit, gpu_u32 dst_unit, struct gpu_tile *tile)
{
    gpu_i64 per_tile = copy->from ? GPU_CAST_TILE : GPU_COPY_TILE / src_unit;
    gpu_i64 divisor = copy->from ? 1 : src_unit;
    gpu_i64 begin = copy->begin / divisor + number * per_tile;
    gpu_i64 left = copy->end / divisor - begin;
    gpu_tile_start(tile, begin, copy->run / divisor, loops + copy->first_loop, copy->nloops);
    tile->src += copy->src_offset;
    tile->dst += copy->dst_offset;
    tile->src_unit = src_unit;
    tile->dst_unit = dst_unit;
    tile->nunits = (gpu_u32)(left < per_tile ? left : per_tile);
}

/* The number of tiles of a copy. */
DEVICE gpu_i64 gpu_copy_ntiles(const struct gpu_copy *copy)
{
    gpu_i64 per_tile = copy->from ? GPU_CAST_TILE : GPU_COPY_TILE;
    return (copy->end - copy->begin + per_tile - 1) / per_tile;
}

)
/* clang-format on */
