/* npz.c - writes NumPy's array files: .npy, and .npz, which is a ZIP archive of them without compression.
 *
 * All records have 64-bit sizes, as those that NumPy writes, so that an archive of any size has one form.
 */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

const char *npy_dtype(rsd_dtype dtype)
{
    switch (dtype) {
    case RSD_F64:
        return "<f8";
    case RSD_F32:
        return "<f4";
    case RSD_F16:
        return "<f2";
    case RSD_I64:
        return "<i8";
    case RSD_I32:
        return "<i4";
    case RSD_I16:
        return "<i2";
    case RSD_I8:
        return "|i1";
    case RSD_U64:
        return "<u8";
    case RSD_U32:
        return "<u4";
    case RSD_U16:
        return "<u2";
    case RSD_U8:
        return "|u1";
    case RSD_BOOL:
        return "|b1";
    case RSD_C64:
        return "<c8";
    case RSD_C128:
        return "<c16";
    default:
        return NULL;
    }
}

/* Makes the header of an array: its length is a multiple of 64. */
static size_t make_npy_header(const struct npy_array *array, char header[NPY_HEADER_NBYTES])
{
    char shape[RSD_MAX_DIMS * 22 + 4] = "", text[NPY_HEADER_NBYTES - 64];
    size_t at = 0;
    for (int32_t d = 0; d < array->ndim; d++)
        at += (size_t)snprintf(shape + at, sizeof shape - at, "%lld, ", (long long)array->shape[d]);
    size_t n = (size_t)snprintf(text, sizeof text,
                                "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }",
                                npy_dtype(array->dtype), shape);
    size_t padded = (10 + n + 1 + 63) / 64 * 64 - 10;
    static const char magic[8] = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0};
    memcpy(header, magic, sizeof magic);
    header[8] = (char)(padded & 255);
    header[9] = (char)(padded >> 8);
    memset(header + 10, ' ', padded);
    memcpy(header + 10, text, n);
    header[10 + padded - 1] = '\n';
    return 10 + padded;
}

bool npy_write(FILE *out, const struct npy_array *array)
{
    char header[NPY_HEADER_NBYTES];
    size_t n = make_npy_header(array, header);
    return fwrite(header, 1, n, out) == n &&
           fwrite(array->bytes, 1, array->nbytes, out) == array->nbytes;
}

/* ---- archives ---- */

enum { CRC_SLICES = 8 };

/* The CRC-32 of ZIP, eight bytes at a time. Starts at 0. */
static uint32_t update_crc32(uint32_t crc, const void *bytes, size_t n)
{
    static uint32_t tables[CRC_SLICES][256];
    for (uint32_t i = 0; i < 256 && !tables[0][255]; i++) {
        tables[0][i] = i;
        for (int bit = 0; bit < 8; bit++)
            tables[0][i] = tables[0][i] >> 1 ^ (tables[0][i] & 1 ? 0xedb88320u : 0);
    }
    for (int t = 1; t < CRC_SLICES && !tables[t][255]; t++)
        for (int i = 0; i < 256; i++)
            tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
    const unsigned char *at = bytes;
    crc = ~crc;
    for (; n >= 8; at += 8, n -= 8) {
        crc ^= at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        crc = tables[7][crc & 255] ^ tables[6][crc >> 8 & 255] ^ tables[5][crc >> 16 & 255] ^
              tables[4][crc >> 24] ^ tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^
              tables[0][at[7]];
    }
    for (; n > 0; at++, n--)
        crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
    return ~crc;
}

static void put_number(FILE *out, int nbytes, uint64_t value)
{
    for (int i = 0; i < nbytes; i++)
        fputc((int)(value >> 8 * i & 255), out);
}

enum { ZIP_VERSION = 45, ZIP_UTF8 = 1 << 11, ZIP_DATE = 1 << 5 | 1 /* the first day of 1980 */ };

/* Writes what records in front of a file and in the directory have in common, up to the length of the name. */
static void put_record_start(FILE *out, const struct npz_member *member)
{
    put_number(out, 2, ZIP_VERSION);
    put_number(out, 2, ZIP_UTF8);
    put_number(out, 2, 0); /* no compression */
    put_number(out, 2, 0); /* midnight */
    put_number(out, 2, ZIP_DATE);
    put_number(out, 4, member->crc);
    put_number(out, 4, UINT32_MAX); /* both sizes are in the extra field */
    put_number(out, 4, UINT32_MAX);
    put_number(out, 2, strlen(member->name));
}

bool npz_add(struct npz *npz, FILE *out, const char *name, const struct npy_array *array)
{
    char header[NPY_HEADER_NBYTES];
    size_t n = make_npy_header(array, header);
    npz->members = cli_need_memory(realloc(npz->members, (npz->n + 1) * sizeof *npz->members));
    struct npz_member *member = &npz->members[npz->n++];
    *member = (struct npz_member){
        .name = cli_text("%s.npy", name), .offset = npz->nbytes, .nbytes = n + array->nbytes};
    member->crc = update_crc32(update_crc32(0, header, n), array->bytes, array->nbytes);
    put_number(out, 4, 0x04034b50);
    put_record_start(out, member);
    put_number(out, 2, 20);
    fputs(member->name, out);
    put_number(out, 2, 1);
    put_number(out, 2, 16);
    put_number(out, 8, member->nbytes);
    put_number(out, 8, member->nbytes);
    npz->nbytes += 30 + strlen(member->name) + 20 + member->nbytes;
    return fwrite(header, 1, n, out) == n &&
           fwrite(array->bytes, 1, array->nbytes, out) == array->nbytes;
}

void npz_finish(struct npz *npz, FILE *out)
{
    uint64_t start = npz->nbytes, nbytes = 0;
    for (size_t i = 0; i < npz->n; i++) {
        const struct npz_member *member = &npz->members[i];
        put_number(out, 4, 0x02014b50);
        put_number(out, 2, ZIP_VERSION);
        put_record_start(out, member);
        put_number(out, 2, 28);
        put_number(out, 2, 0); /* no comment, on disk 0, without attributes */
        put_number(out, 2, 0);
        put_number(out, 2, 0);
        put_number(out, 4, 0);
        put_number(out, 4, UINT32_MAX); /* the offset is in the extra field */
        fputs(member->name, out);
        put_number(out, 2, 1);
        put_number(out, 2, 24);
        put_number(out, 8, member->nbytes);
        put_number(out, 8, member->nbytes);
        put_number(out, 8, member->offset);
        nbytes += 46 + strlen(member->name) + 28;
    }
    put_number(out, 4, 0x06064b50); /* the end of the directory, in 64 bits */
    put_number(out, 8, 44);
    put_number(out, 2, ZIP_VERSION);
    put_number(out, 2, ZIP_VERSION);
    put_number(out, 8, 0);
    put_number(out, 8, npz->n);
    put_number(out, 8, npz->n);
    put_number(out, 8, nbytes);
    put_number(out, 8, start);
    put_number(out, 4, 0x07064b50); /* where that is */
    put_number(out, 4, 0);
    put_number(out, 8, start + nbytes);
    put_number(out, 4, 1);
    put_number(out, 4, 0x06054b50); /* the end in 32 bits, which refers to it */
    put_number(out, 4, 0);
    put_number(out, 2, UINT16_MAX);
    put_number(out, 2, UINT16_MAX);
    put_number(out, 4, UINT32_MAX);
    put_number(out, 4, UINT32_MAX);
    put_number(out, 2, 0);
}

void npz_drop(struct npz *npz)
{
    free(npz->members);
}
