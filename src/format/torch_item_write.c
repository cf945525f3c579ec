/* torch_item_write.c - one tensor or value as torch.save writes it: a small archive around the bytes.
 *
 *     head | bytes of the tensor | tail
 *
 * The head depends on dtype and shape alone. The tail has the CRC-32 of the bytes. So the bytes may be
 * written first, in any order and by several threads. The result is what torch 2.7 and later write for a
 * dense tensor on the CPU, byte for byte.
 *
 * The last record is an id that torch makes from names and CRCs (torch_archive.c).
 */
#include "torch_saved.h"

#include <string.h>

enum { ITEM_NRECORDS = 7 };

/* ---- the pickle of a tensor ---- */

/* Stores the last value in the memo; NULL: there is none. */
static void memoize_value(struct bytes *out, uint32_t *memo)
{
    if (memo)
        pickle_write_memo(out, (*memo)++);
}

static void put_string(struct bytes *out, const char *string, uint32_t *memo)
{
    pickle_write_string(out, string);
    memoize_value(out, memo);
}

static void put_global(struct bytes *out, const char *module, const char *name, uint32_t *memo)
{
    pickle_write_global(out, module, name);
    memoize_value(out, memo);
}

void saved_put_tuple(struct bytes *out, int32_t n, const int64_t *values, uint32_t *memo)
{
    static const char *const close[] = {")", "\x85", "\x86", "\x87"};
    bool marked = !memo || n > 3;
    pickle_write_op(out, marked ? "(" : "");
    for (int32_t i = 0; i < n; i++)
        pickle_write_int(out, values[i]);
    pickle_write_op(out, marked ? "t" : close[n]);
    if (n > 0)
        memoize_value(out, memo);
}

void saved_put_strides(struct bytes *out, int32_t ndim, const int64_t *shape, uint32_t *memo)
{
    int64_t strides[RSD_MAX_DIMS], stride = 1, next;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        if (mul_i64(stride, max_i64(shape[d], 1), &next)) /* else empty: any stride will do */
            stride = next;
    }
    saved_put_tuple(out, ndim, strides, memo);
}

void saved_put_tensor(struct bytes *out, rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                      const int64_t *strides, const char *key, uint32_t *memo)
{
    const char *storage = dtype_to_storage(dtype);
    int64_t volume = box_volume(ndim, shape);
    put_global(out, "torch._utils", storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3", memo);
    pickle_write_op(out, "((");
    put_string(out, "storage", memo);
    put_global(out, storage ? "torch" : "torch.storage", storage ? storage : "UntypedStorage",
               memo);
    put_string(out, key, memo);
    put_string(out, "cpu", memo);
    pickle_write_int(out, storage ? volume : volume * (int64_t)rsd_dtype_nbytes(dtype));
    pickle_write_op(out, "t");
    memoize_value(out, memo);
    pickle_write_op(out, "Q");
    pickle_write_int(out, 0);
    saved_put_tuple(out, ndim, shape, memo);
    if (strides)
        saved_put_tuple(out, ndim, strides, memo);
    else
        saved_put_strides(out, ndim, shape, memo);
    pickle_write_op(out, "\x89");
    put_global(out, "collections", "OrderedDict", memo);
    pickle_write_op(out, ")R");
    memoize_value(out, memo);
    if (!storage)
        put_global(out, "torch", dtype_to_torch(dtype), memo);
    pickle_write_op(out, "t");
    memoize_value(out, memo);
    pickle_write_op(out, "R");
    memoize_value(out, memo);
}

/* ---- items ---- */

/* Does as torch, which takes the first bytes of a record for a descriptor if they look like one. */
static void fold_lookalike(struct archive_writer *archive, const unsigned char *first,
                           uint64_t nbytes)
{
    if (nbytes >= 8 && memcmp(first, "PK\7\x08", 4) == 0)
        archive_fold_id(archive, little_endian(first + 4, 4));
}

static rsd_status fail_item(struct bytes *out)
{
    bytes_drop(out);
    return fail(RSD_ENOMEM, "no memory for an item");
}

rsd_status torch_item_frame(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                            const int64_t *strides, uint32_t crc, const unsigned char first[8],
                            struct bytes *head, struct bytes *tail)
{
    uint64_t nbytes = (uint64_t)box_volume(ndim, shape) * rsd_dtype_nbytes(dtype);
    struct bytes pickle = {0};
    struct archive_entry entries[ITEM_NRECORDS];
    struct archive_writer archive = {.out = head, .entries = entries};
    uint32_t memo = 0;
    bytes_put_text(&pickle, "\x80\x02");
    saved_put_tensor(&pickle, dtype, ndim, shape, strides, "0", &memo);
    bytes_put_text(&pickle, ".");
    if (!pickle.failed)
        archive_add_first(&archive, &pickle);
    head->failed = head->failed || pickle.failed;
    bytes_drop(&pickle);
    archive_add_header(&archive, "archive/data/0", nbytes);
    archive.base = head->n + nbytes;
    archive.out = tail;
    fold_lookalike(&archive, first, nbytes);
    archive_add_descriptor(&archive, crc);
    archive_add_last(&archive, "15728199511854643026");
    if (!head->failed && !tail->failed)
        return RSD_OK;
    bytes_drop(head);
    return fail_item(tail);
}

rsd_status torch_item_from_pickle(const struct bytes *pickle, struct bytes *out)
{
    struct archive_entry entries[ITEM_NRECORDS];
    struct archive_writer archive = {.out = out, .entries = entries};
    archive_add_first(&archive, pickle);
    archive_add_last(&archive, "02908468677762923104");
    return out->failed ? fail_item(out) : RSD_OK;
}
