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
#include "torch_archive.h"

#include <string.h>

enum { ITEM_NRECORDS = 7 };

/* ---- the pickle of a tensor ---- */

static void memoize_item(struct bytes *out, int *memo)
{
    pickle_write_op(out, "q");
    bytes_put_number(out, (uint64_t)(*memo)++, 1);
}

static void put_pickle_text(struct bytes *out, const char *text, int *memo)
{
    pickle_write_text(out, (struct slice){text, strlen(text)});
    memoize_item(out, memo);
}

static void put_pickle_global(struct bytes *out, const char *module, const char *name, int *memo)
{
    pickle_write_global(out, module, name);
    memoize_item(out, memo);
}

static void put_pickle_tuple(struct bytes *out, int32_t n, const int64_t *values, int *memo)
{
    static const char *const close[] = {")", "\x85", "\x86", "\x87"};
    if (n > 3)
        pickle_write_op(out, "(");
    for (int32_t i = 0; i < n; i++)
        pickle_write_int(out, values[i]);
    pickle_write_op(out, n > 3 ? "t" : close[n]);
    if (n > 0)
        memoize_item(out, memo);
}

/* Adds the pickle that torch.save writes for a dense tensor, or one with the given strides. */
static void put_pickle_tensor(struct bytes *out, rsd_dtype dtype, int32_t ndim,
                              const int64_t *shape, const int64_t *strides)
{
    int64_t dense[RSD_MAX_DIMS], stride = 1, volume = box_volume(ndim, shape);
    int memo = 0;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        dense[d] = stride;
        stride *= max_i64(shape[d], 1);
    }
    bool typed = dtype_to_storage(dtype) != NULL;
    bytes_put(out, "\x80\x02", 2);
    put_pickle_global(out, "torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3",
                      &memo);
    pickle_write_op(out, "((");
    put_pickle_text(out, "storage", &memo);
    if (typed)
        put_pickle_global(out, "torch", dtype_to_storage(dtype), &memo);
    else
        put_pickle_global(out, "torch.storage", "UntypedStorage", &memo);
    put_pickle_text(out, "0", &memo);
    put_pickle_text(out, "cpu", &memo);
    pickle_write_int(out, typed ? volume : volume * (int64_t)rsd_dtype_nbytes(dtype));
    pickle_write_op(out, "t");
    memoize_item(out, &memo);
    bytes_put(out, "QK\0", 3);
    put_pickle_tuple(out, ndim, shape, &memo);
    put_pickle_tuple(out, ndim, strides ? strides : dense, &memo);
    pickle_write_op(out, "\x89");
    put_pickle_global(out, "collections", "OrderedDict", &memo);
    pickle_write_op(out, ")R");
    memoize_item(out, &memo);
    if (!typed)
        put_pickle_global(out, "torch", dtype_to_torch(dtype), &memo);
    pickle_write_op(out, "t");
    memoize_item(out, &memo);
    pickle_write_op(out, "R");
    memoize_item(out, &memo);
    pickle_write_op(out, ".");
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
    put_pickle_tensor(&pickle, dtype, ndim, shape, strides);
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
