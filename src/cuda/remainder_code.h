/* remainder_code.h - the digests of device memory. index_code.h says how it is compiled. */
/* clang-format off */

CODE(

/* ---- digests ----
 *
 * Remainders of bytes by two polynomials of degree 64 over GF(2), as in codec/crc.c: reflected, raw and
 * therefore linear. A run of bytes adds its own remainder times x^(8 * bytes that follow it). */

enum { GPU_ECMA, GPU_JONES, GPU_NCRC };
enum { GPU_DIGEST_SEGMENT = 65536, GPU_DIGEST_ROWS = 1024, GPU_SHORT_RUN = 512 };

/* Rows of `run` bytes of an array in memory. A loop's dst_stride is that of its rows in the bytes of the
 * whole tensor, row-major; `after` bytes follow the first row there. Short rows go in groups of the
 * innermost loop. */
struct gpu_digest {
    gpu_i64 first_tile;
    gpu_i64 offset, run, nrows, after;
    gpu_u32 array, first_loop, nloops, result;
};

DEVICE gpu_u64 gpu_polynomial(int crc)
{
    return crc == GPU_ECMA ? 0xc96c5795d7870f42ull : 0x95ac9329ac4bc9b5ull;
}

/* The product of two remainders; the highest bit of each is x^0. */
DEVICE gpu_u64 gpu_times(int crc, gpu_u64 a, gpu_u64 b)
{
    gpu_u64 polynomial = gpu_polynomial(crc);
    gpu_u64 product = 0;
    for (int i = 63; i >= 0; i--) {
        product ^= a & ((gpu_u64)0 - (b >> i & 1));
        a = (a >> 1) ^ (polynomial & ((gpu_u64)0 - (a & 1)));
    }
    return product;
}

/* The remainder of n bytes that follow those of `state`. */
DEVICE gpu_u64 gpu_crc_bytes(int crc, gpu_u64 state, const char *at, gpu_u32 n)
{
    gpu_u64 polynomial = gpu_polynomial(crc);
    for (gpu_u32 i = 0; i < n; i++) {
        state ^= (unsigned char)at[i];
        for (int bit = 0; bit < 8; bit++)
            state = (state >> 1) ^ (polynomial & ((gpu_u64)0 - (state & 1)));
    }
    return state;
}

/* powers[(crc * 8 + k) * 256 + b] is x^(8 * b * 256^k). */
DEVICE gpu_u64 gpu_shift(int crc, const gpu_u64 *powers, gpu_u64 state, gpu_u64 nbytes)
{
    for (int k = 0; nbytes; k++) {
        if (nbytes & 255)
            state = gpu_times(crc, state, powers[(crc * 8 + k) * 256 + (int)(nbytes & 255)]);
        nbytes >>= 8;
    }
    return state;
}

/* Tiles of a digest: segments of rows, or groups of short rows of the innermost loop. */
DEVICE gpu_i64 gpu_digest_inner(const struct gpu_digest *digest, const struct gpu_loop *loops)
{
    return digest->nloops ? loops[digest->first_loop + digest->nloops - 1].count : 1;
}

DEVICE gpu_i64 gpu_digest_ntiles(const struct gpu_digest *digest, const struct gpu_loop *loops)
{
    gpu_i64 inner = gpu_digest_inner(digest, loops);
    if (digest->run >= GPU_SHORT_RUN)
        return digest->nrows * ((digest->run + GPU_DIGEST_SEGMENT - 1) / GPU_DIGEST_SEGMENT);
    return digest->nrows / inner * ((inner + GPU_DIGEST_ROWS - 1) / GPU_DIGEST_ROWS);
}

/* Where a row lies in memory, and how many bytes of the tensor follow it. */
DEVICE void gpu_digest_row(const struct gpu_digest *digest, const struct gpu_loop *loops, gpu_i64 row,
                           gpu_i64 *at, gpu_i64 *after)
{
    *at = digest->offset;
    *after = digest->after;
    for (gpu_u32 i = digest->nloops; i-- > 0;) {
        const struct gpu_loop *loop = &loops[digest->first_loop + i];
        gpu_i64 next = row / loop->count;
        gpu_i64 index = row - next * loop->count;
        *at += index * loop->src_stride;
        *after -= index * loop->dst_stride;
        row = next;
    }
}

)
/* clang-format on */
