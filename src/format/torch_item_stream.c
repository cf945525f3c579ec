/* torch_item_stream.c - finds the bytes of a tensor in what torch.save wrote for it, if that is compressed.
 *
 * A compressed item is read from its start, since its directory is at its end. The pickle ends where it stops, the
 * records before the tensor have a few bytes each, and the length of the tensor is in its pickle. Its CRC-32
 * follows it.
 */
#include "torch_item.h"

#include "crc.h"
#include "zstd_stream.h"

#include <string.h>

enum { MAX_START_NBYTES = 1 << 16, HEADER_NBYTES = 30 };

/* A tensor is saved with as much of its storage as it needs. More than so many bytes besides so many times the
 * tensor are not decoded for it. */
enum { START_STORAGE_NBYTES = 1 << 16, MAX_STORAGE_GROWTH = 2 };

/* A compressed archive. The bytes behind `at` were produced and not used yet. */
struct archive_stream {
    struct stored_stream base;
    struct store_range range;
    struct zstd_reader *zstd;
    size_t n, at;
    unsigned char bytes[MAX_START_NBYTES];
};

/* Produces the first n bytes of the archive. EFORMAT: it has fewer; those that it has are produced. */
static rsd_status produce_start(struct archive_stream *start, size_t n)
{
    if (n > MAX_START_NBYTES)
        return fail(RSD_EFORMAT, "more than %d bytes precede the tensor", (int)MAX_START_NBYTES);
    if (n <= start->n)
        return RSD_OK;
    size_t some = n - start->n;
    TRY(zstd_reader_read_some(start->zstd, start->bytes + start->n, &some));
    start->n += some;
    return start->n == n ? RSD_OK : fail(RSD_EFORMAT, "zstd stream ends early");
}

/* Steps over a header, to the first byte of its record. *name is without its directory. */
static rsd_status step_header(struct archive_stream *start, struct slice *name)
{
    TRY(produce_start(start, start->at + HEADER_NBYTES));
    const unsigned char *header = start->bytes + start->at;
    if (memcmp(header, "PK\3\4", 4) != 0)
        return fail(RSD_EFORMAT, "byte %zu of the compressed archive: not a record header",
                    start->at);
    if (little_endian(header + 6, 2) & 1 || little_endian(header + 8, 2) != 0)
        return fail(RSD_EUNSUPPORTED,
                    "byte %zu of the compressed archive: record is compressed or encrypted",
                    start->at);
    size_t nname = little_endian(header + 26, 2), nextra = little_endian(header + 28, 2);
    TRY(produce_start(start, start->at + HEADER_NBYTES + nname + nextra));
    *name = (struct slice){(const char *)start->bytes + start->at + HEADER_NBYTES, nname};
    const char *slash = memchr(name->bytes, '/', name->nbytes);
    if (slash) {
        name->nbytes -= (size_t)(slash + 1 - name->bytes);
        name->bytes = slash + 1;
    }
    start->at += HEADER_NBYTES + nname + nextra;
    return RSD_OK;
}

/* Steps over a small record. It ends where a descriptor with its length begins. */
static rsd_status step_small(struct archive_stream *start, struct slice *content)
{
    size_t first = start->at;
    for (size_t n = 0; n < 256; n++) {
        TRY(produce_start(start, first + n + 16));
        const unsigned char *end = start->bytes + first + n;
        if (memcmp(end, "PK\7\x08", 4) == 0 && little_endian(end + 12, 4) == n) {
            *content = (struct slice){(const char *)start->bytes + first, n};
            start->at = first + n + 16;
            return RSD_OK;
        }
    }
    return fail(RSD_EFORMAT, "byte %zu of the compressed archive: end of the record not found",
                first);
}

static rsd_status read_start(void *context, uint64_t at, void *out, size_t n)
{
    struct archive_stream *start = context;
    TRY(produce_start(start, start->at + (size_t)at + n));
    memcpy(out, start->bytes + start->at + at, n);
    return RSD_OK;
}

/* Steps over a pickle of n bytes and its descriptor. */
static rsd_status step_checked(struct archive_stream *start, size_t n)
{
    TRY(produce_start(start, start->at + n + 16));
    const unsigned char *end = start->bytes + start->at + n;
    uint32_t crc = crc32_of(start->bytes + start->at, n);
    uint32_t expected = (uint32_t)little_endian(end + 4, 4);
    if (memcmp(end, "PK\7\x08", 4) != 0 || little_endian(end + 12, 4) != n)
        return fail(RSD_EFORMAT, "byte %zu of the compressed archive: not a record descriptor",
                    start->at + n);
    if (expected != 0 && expected != crc)
        return fail(RSD_EFORMAT,
                    "byte %zu of the compressed archive: data.pkl is damaged: CRC-32 is %08x, "
                    "expected %08x",
                    start->at, crc, expected);
    start->at += n + 16;
    return RSD_OK;
}

/* Steps over the pickle. Its length is not known, and the stream may end soon behind it, so it is read with
 * twice as many bytes each time. */
static rsd_status step_pickle(struct archive_stream *start, struct pickle_tree *tree,
                              pickle_node *root)
{
    for (size_t n = 512;; n *= 2) {
        uint64_t used;
        rsd_status status = produce_start(start, start->at + n);
        if (status && n > 512)
            return status;
        size_t have = start->n - start->at;
        status = pickle_read(read_start, start, have < n ? have : n, tree, root, &used);
        if (!status) {
            status = step_checked(start, (size_t)used);
            if (status)
                pickle_tree_drop(tree);
            return status;
        }
        if (status != RSD_EFORMAT || n > MAX_START_NBYTES / 4)
            return status;
    }
}

/* Reads a stream up to the bytes of its tensor. Records before them are small. */
static rsd_status go_to_tensor(struct archive_stream *start, struct torch_view *view,
                               struct stored_array *array)
{
    struct pickle_tree tree = {0};
    bool pickled = false;
    rsd_status status = RSD_OK;
    while (!status) {
        struct slice name, content;
        pickle_node root;
        status = step_header(start, &name);
        if (status)
            break;
        if (slice_is(name, "data.pkl") && !pickled) {
            status = step_pickle(start, &tree, &root);
            pickled = !status;
            if (!status)
                status = torch_view_read(&tree, root, view);
        } else if (slice_begins(name, "data/")) {
            if (!pickled)
                status = fail(RSD_EFORMAT, "storage precedes its pickle");
            else if (!slice_equal((struct slice){name.bytes + 5, name.nbytes - 5}, view->key))
                status = fail(RSD_EFORMAT, "first storage belongs to another tensor");
            break;
        } else {
            bool order = slice_is(name, "byteorder");
            status = step_small(start, &content);
            if (!status && order)
                status = torch_take_byteorder(content, &array->big_endian);
        }
    }
    pickle_tree_drop(&tree);
    view->key = slice_of("");
    return status;
}

/* Checks that not far more must be decoded than the tensor has. */
static rsd_status check_storage(const struct torch_view *view, uint64_t nbytes)
{
    uint64_t needed = (uint64_t)box_volume(view->ndim, view->shape) * rsd_dtype_nbytes(view->dtype);
    if (nbytes <= START_STORAGE_NBYTES ||
        (nbytes - START_STORAGE_NBYTES) / MAX_STORAGE_GROWTH <= needed)
        return RSD_OK;
    return fail(RSD_EFORMAT,
                "tensor of %llu bytes is in a compressed storage of %llu bytes, more than %d times "
                "as many; not read",
                (unsigned long long)needed, (unsigned long long)nbytes, (int)MAX_STORAGE_GROWTH);
}

static rsd_status start_stream(struct archive_stream *stream, const struct extent *extent,
                               struct torch_view *view, struct stored_array *array)
{
    TRY(zstd_reader_open(store_range_read, &stream->range, extent->nbytes, extent->nzstd,
                         &stream->zstd));
    *array = (struct stored_array){.stream = true, .has_crc = true}; /* it follows */
    TRY(go_to_tensor(stream, view, array));
    array->nbytes = view->storage_count * (view->untyped ? 1 : rsd_dtype_nbytes(view->dtype));
    TRY(torch_view_check(view, array->nbytes));
    TRY(check_storage(view, array->nbytes));
    torch_view_set_array(view, array);
    array->stream_nbytes = sizeof *stream + zstd_reader_memory(stream->zstd, array->nbytes);
    return RSD_OK;
}

static struct archive_stream *archive_of(struct stored_stream *stream)
{
    return (struct archive_stream *)(void *)stream;
}

static void close_archive(struct stored_stream *stream)
{
    zstd_reader_close(archive_of(stream)->zstd);
    mem_free(stream);
}

static rsd_status read_archive(struct stored_stream *base, void *out, size_t n)
{
    struct archive_stream *stream = archive_of(base);
    size_t ready = stream->n - stream->at, first = ready < n ? ready : n;
    memcpy(out, stream->bytes + stream->at, first);
    stream->at += first;
    return first < n ? zstd_reader_read(stream->zstd, (char *)out + first, n - first) : RSD_OK;
}

static rsd_status end_archive(struct stored_stream *stream, bool *has_crc, uint32_t *crc)
{
    unsigned char descriptor[8];
    TRY(read_archive(stream, descriptor, sizeof descriptor));
    if (memcmp(descriptor, "PK\7\x08", 4) != 0)
        return fail(RSD_EFORMAT, "descriptor behind the bytes is missing");
    *crc = (uint32_t)little_endian(descriptor + 4, 4);
    *has_crc = *crc != 0; /* 0: torch did not compute it */
    return RSD_OK;
}

rsd_status torch_item_open_stream(struct store *store, const struct extent *extent,
                                  struct torch_view *view, struct stored_array *array,
                                  struct stored_stream **out)
{
    struct archive_stream *stream = mem_new(1, sizeof *stream);
    if (!stream)
        return RSD_ENOMEM;
    stream->base =
        (struct stored_stream){.read = read_archive, .end = end_archive, .close = close_archive};
    stream->range = (struct store_range){store, extent->file, extent->offset};
    rsd_status status = start_stream(stream, extent, view, array);
    if (status)
        close_archive(&stream->base);
    else
        *out = &stream->base;
    return status;
}
