/* torch_item_read.c - finds the bytes of a tensor in what torch.save wrote for it.
 *
 * A tensor is pickled as a view of a storage, with shape, strides and offset:
 *
 *     _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks [, metadata])
 *     _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype [, metadata])
 *     storage = persistent id ('storage', class, key, location, number of elements)
 *
 * v3 is for dtypes without a storage class: its class is UntypedStorage, and its elements are bytes. A
 * Parameter wraps a view once more, and so does _rebuild_from_type_v2, which adds attributes or a subclass.
 * Expanded tensors have stride 0. Quantized, sparse and conjugated tensors are refused, and the error names what they are made by.
 *
 * An item in a file is an archive, read from its directory. A compressed item is read from its start, since
 * its directory is at its end. The pickle ends where it stops, the records before the tensor have a few
 * bytes each, and the length of the tensor is in its pickle. Its CRC-32 follows it.
 */
#include "torch_item.h"

#include "crc.h"
#include "zstd_stream.h"

#include <stdio.h>
#include <string.h>

enum {
    WINDOW_NBYTES = 4096,
    MAX_START_NBYTES = 1 << 16,
    HEADER_NBYTES = 30,
    MAX_WRAPPED = 8,
    MAX_EXPANDED_NBYTES = 1 << 30
};

/* ---- a pickled tensor ---- */

static rsd_status fail_view(const char *what)
{
    return fail(RSD_EFORMAT, "tensor %s", what);
}

static rsd_status fail_unknown(const struct pickle_tree *tree, const char *what, pickle_node global)
{
    char text[GLOBAL_TEXT_NCHARS];
    return fail(RSD_EUNSUPPORTED, "%s %s is not supported", what,
                pickle_global_text(tree, global, text));
}

static rsd_status take_view_extents(const struct pickle_tree *tree, pickle_node tuple,
                                    int32_t *ndim, int64_t *out)
{
    uint32_t n = pickle_count(tree, tuple);
    if (pickle_kind(tree, tuple) != NODE_TUPLE)
        return fail_view("has a shape or strides that are not a tuple");
    if (n > RSD_MAX_DIMS)
        return fail(RSD_EUNSUPPORTED, "tensor has %u dims; the limit is %d", n, (int)RSD_MAX_DIMS);
    for (uint32_t d = 0; d < n; d++)
        if (!pickle_as_i64(tree, pickle_item(tree, tuple, d), &out[d]) || out[d] < 0 ||
            out[d] > MAX_EXTENT)
            return fail_view("has an extent or stride that is not an integer from 0 to 2^62");
    *ndim = (int32_t)n;
    return RSD_OK;
}

/* Reads the reference to a storage: its key, its class and its number of elements. */
static rsd_status take_view_storage(const struct pickle_tree *tree, pickle_node persistent,
                                    struct torch_view *view, pickle_node *class)
{
    if (pickle_kind(tree, persistent) != NODE_PERSISTENT)
        return fail_view("has no storage");
    pickle_node id = pickle_part(tree, persistent, NODE_WHAT);
    int64_t count;
    if (pickle_kind(tree, id) != NODE_TUPLE || pickle_count(tree, id) < 5 ||
        !slice_is(pickle_text(tree, pickle_item(tree, id, 0)), "storage") ||
        !pickle_as_i64(tree, pickle_item(tree, id, 4), &count) || count < 0)
        return fail_view("has an invalid storage");
    view->key = pickle_text(tree, pickle_item(tree, id, 2));
    view->storage_count = (uint64_t)count;
    *class = pickle_item(tree, id, 1);
    return RSD_OK;
}

/* Takes the dtype: of v2 from the class of its storage, of v3 from an argument. */
static rsd_status take_view_dtype(const struct pickle_tree *tree, pickle_node global, bool v3,
                                  struct torch_view *view)
{
    enum known known = pickle_known(tree, global);
    struct slice name = {"", 0};
    if (known == (v3 ? KNOWN_TORCH_NAME : KNOWN_STORAGE_CLASS))
        name = pickle_text(tree, pickle_part(tree, global, NODE_ARGS));
    view->untyped = v3;
    view->dtype = v3 ? dtype_from_torch(name) : dtype_from_storage(name);
    if (view->dtype)
        return RSD_OK;
    return fail_unknown(tree, v3 ? "dtype" : "storage class", global);
}

/* Refuses a lazily conjugated or negated tensor, whose values are not those in the storage. */
static rsd_status refuse_lazy(const struct pickle_tree *tree, pickle_node metadata)
{
    if (pickle_kind(tree, metadata) == NODE_DICT &&
        (pickle_find(tree, metadata, "conj") == PICKLE_TRUE ||
         pickle_find(tree, metadata, "neg") == PICKLE_TRUE))
        return fail(RSD_EUNSUPPORTED, "lazily conjugated or negated tensors are not supported");
    return RSD_OK;
}

/* Reads the arguments of _rebuild_tensor_v2 or _v3. */
static rsd_status take_view_args(const struct pickle_tree *tree, pickle_node args, bool v3,
                                 struct torch_view *view)
{
    uint32_t n = pickle_count(tree, args), least = v3 ? 7 : 6;
    int32_t nstrides;
    pickle_node class;
    if (n < least || n > least + 1)
        return fail_view("has a wrong number of arguments");
    TRY(take_view_storage(tree, pickle_item(tree, args, 0), view, &class));
    if (!pickle_as_i64(tree, pickle_item(tree, args, 1), &view->offset) || view->offset < 0)
        return fail_view("has an invalid offset");
    TRY(take_view_extents(tree, pickle_item(tree, args, 2), &view->ndim, view->shape));
    TRY(take_view_extents(tree, pickle_item(tree, args, 3), &nstrides, view->strides));
    if (nstrides != view->ndim)
        return fail_view("has different numbers of strides and dims");
    TRY(take_view_dtype(tree, v3 ? pickle_item(tree, args, 6) : class, v3, view));
    return n > least ? refuse_lazy(tree, pickle_item(tree, args, least)) : RSD_OK;
}

static rsd_status fail_not_tensor(const struct pickle_tree *tree, pickle_node c)
{
    if (pickle_kind(tree, c) == NODE_PERSISTENT)
        return fail(RSD_EUNSUPPORTED, "storages without a tensor are not supported");
    if (pickle_kind(tree, c) != NODE_CALL)
        return fail(RSD_EFORMAT, "item is not a tensor");
    char text[GLOBAL_TEXT_NCHARS];
    return fail(RSD_EUNSUPPORTED, "tensors made by %s are not supported",
                pickle_global_text(tree, pickle_part(tree, c, NODE_WHAT), text));
}

/* Steps from a tensor to what it wraps: the data of a Parameter, or the call that makes a tensor with
 * attributes. *what and *args are those of the innermost call. Returns false for any other value. */
static bool unwrap_tensor(const struct pickle_tree *tree, pickle_node c, pickle_node *what,
                          pickle_node *args)
{
    if (pickle_kind(tree, c) != NODE_CALL)
        return false;
    *what = pickle_part(tree, c, NODE_WHAT);
    *args = pickle_part(tree, c, NODE_ARGS);
    for (int depth = 0; depth < MAX_WRAPPED; depth++) {
        enum known known = pickle_known(tree, *what);
        uint32_t n = pickle_count(tree, *args);
        pickle_node first = n > 0 ? pickle_item(tree, *args, 0) : PICKLE_NONE;
        if (known == KNOWN_REBUILD_PARAMETER && pickle_kind(tree, first) == NODE_CALL) {
            *what = pickle_part(tree, first, NODE_WHAT);
            *args = pickle_part(tree, first, NODE_ARGS);
        } else if (known == KNOWN_REBUILD_FROM_TYPE && n >= 3 &&
                   pickle_kind(tree, pickle_item(tree, *args, 2)) == NODE_TUPLE) {
            *what = first;
            *args = pickle_item(tree, *args, 2);
        } else {
            return true;
        }
    }
    return false;
}

bool torch_view_is_tensor(const struct pickle_tree *tree, pickle_node c)
{
    pickle_node what, args;
    if (!unwrap_tensor(tree, c, &what, &args))
        return false;
    enum known known = pickle_known(tree, what);
    return known == KNOWN_REBUILD_TENSOR_V2 || known == KNOWN_REBUILD_TENSOR_V3 ||
           known == KNOWN_REBUILD_PARAMETER;
}

bool torch_is_odd_tensor(const struct pickle_tree *tree, pickle_node c)
{
    pickle_node what, args;
    if (pickle_kind(tree, c) == NODE_PERSISTENT)
        return true;
    if (!unwrap_tensor(tree, c, &what, &args) || pickle_kind(tree, what) != NODE_GLOBAL)
        return false;
    struct slice module = pickle_text(tree, pickle_part(tree, what, NODE_WHAT)),
                 name = pickle_text(tree, pickle_part(tree, what, NODE_ARGS));
    return slice_is(module, "torch._utils") && name.nbytes > 8 &&
           memcmp(name.bytes, "_rebuild", 8) == 0;
}

bool torch_is_sharded(const struct pickle_tree *tree, pickle_node c)
{
    pickle_node what, args;
    return unwrap_tensor(tree, c, &what, &args) &&
           pickle_known(tree, what) == KNOWN_REBUILD_WRAPPER;
}

rsd_status torch_view_read(const struct pickle_tree *tree, pickle_node c, struct torch_view *out)
{
    struct torch_view view = {0};
    pickle_node what, args;
    if (!torch_view_is_tensor(tree, c) || !unwrap_tensor(tree, c, &what, &args))
        return fail_not_tensor(tree, c);
    enum known known = pickle_known(tree, what);
    if (known == KNOWN_REBUILD_PARAMETER)
        return fail_view("is a Parameter without data");
    TRY(take_view_args(tree, args, known == KNOWN_REBUILD_TENSOR_V3, &view));
    *out = view;
    return RSD_OK;
}

/* Elements of an expanded tensor share bytes. What a few bytes may stand for is limited. */
static rsd_status check_expanded(const struct torch_view *view)
{
    int64_t n = (int64_t)rsd_dtype_nbytes(view->dtype);
    if (!strides_overlap(view->ndim, view->shape, view->strides))
        return RSD_OK;
    for (int32_t d = 0; d < view->ndim; d++)
        if (!mul_i64(n, view->shape[d], &n) || n > MAX_EXPANDED_NBYTES)
            return fail(RSD_EUNSUPPORTED,
                        "tensor whose elements share bytes exceeds the limit of %d bytes",
                        (int)MAX_EXPANDED_NBYTES);
    return RSD_OK;
}

rsd_status torch_view_check(const struct torch_view *view, uint64_t record_nbytes)
{
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(view->dtype), last = view->offset, step,
            nbytes;
    bool empty = false;
    if (!mul_i64((int64_t)view->storage_count, view->untyped ? 1 : element_nbytes, &nbytes) ||
        (uint64_t)nbytes != record_nbytes)
        return fail(RSD_EFORMAT, "storage of %llu elements does not match its record of %llu bytes",
                    (unsigned long long)view->storage_count, (unsigned long long)record_nbytes);
    for (int32_t d = 0; d < view->ndim; d++)
        empty = empty || view->shape[d] == 0;
    if (empty)
        return RSD_OK;
    for (int32_t d = 0; d < view->ndim; d++)
        if (!mul_i64(view->shape[d] - 1, view->strides[d], &step) || !add_i64(last, step, &last))
            return fail_view("reaches beyond its storage");
    if (last >= nbytes / element_nbytes)
        return fail(RSD_EFORMAT, "tensor reaches element %lld of a storage of %lld elements",
                    (long long)last, (long long)(nbytes / element_nbytes));
    return check_expanded(view);
}

void torch_view_set_array(const struct torch_view *view, struct stored_array *array)
{
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(view->dtype);
    if (box_is_empty(view->ndim, view->shape)) /* its offset and strides may be any number */
        return;
    array->base = view->offset * element_nbytes;
    if (strides_overlap(view->ndim, view->shape, view->strides))
        array->has_crc = false;              /* no byte of the record is read exactly once */
    for (int32_t d = 0; d < view->ndim; d++) /* so may the stride of a single index */
        array->strides[d] = view->shape[d] > 1 ? view->strides[d] * element_nbytes : 0;
}

/* ---- an archive in a file ---- */

/* The first and last bytes of an item, which have everything but the tensor. */
struct item_windows {
    struct store *store;
    uint32_t file;
    uint64_t offset, nbytes;
    uint64_t tail; /* offset of the last bytes */
    size_t nhead, ntail;
    unsigned char head_bytes[WINDOW_NBYTES], tail_bytes[WINDOW_NBYTES];
};

/* Reads from the start or the end of an item in memory, or else from the file. */
static rsd_status read_windows(void *context, uint64_t at, void *out, size_t n)
{
    const struct item_windows *item = context;
    if (at > item->nbytes || n > item->nbytes - at)
        return fail(RSD_EFORMAT, "byte %llu of the archive: archive ends before it",
                    (unsigned long long)at);
    if (at + n <= item->nhead)
        memcpy(out, item->head_bytes + at, n);
    else if (at >= item->tail)
        memcpy(out, item->tail_bytes + (at - item->tail), n);
    else
        return store_read(item->store, item->file, item->offset + at, out, n);
    return RSD_OK;
}

static rsd_status load_windows(struct item_windows *item)
{
    item->nhead = item->nbytes < WINDOW_NBYTES ? (size_t)item->nbytes : WINDOW_NBYTES;
    TRY(store_read(item->store, item->file, item->offset, item->head_bytes, item->nhead));
    item->ntail = item->nbytes - item->nhead < WINDOW_NBYTES ? (size_t)(item->nbytes - item->nhead)
                                                             : WINDOW_NBYTES;
    item->tail = item->nbytes - item->ntail;
    return store_read(item->store, item->file, item->offset + item->tail, item->tail_bytes,
                      item->ntail);
}

static rsd_status load_item_pickle(struct zip *zip, struct pickle_tree *tree, pickle_node *root)
{
    struct zip_record *record;
    TRY(zip_find(zip, "data.pkl", &record));
    if (!record)
        return fail(RSD_EFORMAT, "record data.pkl is missing; not a torch.save archive");
    return zip_read_pickle(zip, record, tree, root);
}

static rsd_status take_byteorder(struct slice text, bool *big_endian)
{
    *big_endian = slice_is(text, "big");
    if (!*big_endian && !slice_is(text, "little"))
        return fail(RSD_EFORMAT, "record byteorder has '%.*s'; expected little or big",
                    (int)(text.nbytes < 8 ? text.nbytes : 8), text.bytes);
    return RSD_OK;
}

rsd_status torch_read_byteorder(struct zip *zip, bool *big_endian)
{
    struct zip_record *record;
    char text[8] = "";
    *big_endian = false;
    TRY(zip_find(zip, "byteorder", &record));
    if (!record)
        return RSD_OK;
    size_t n = record->nbytes < sizeof text - 1 ? (size_t)record->nbytes : sizeof text - 1;
    TRY(zip->read(zip->context, record->data, text, n));
    return take_byteorder((struct slice){text, strlen(text)}, big_endian);
}

/* Finds the only tensor of an archive: its view, and where its bytes are. */
static rsd_status find_item_tensor(struct zip *zip, struct torch_view *view,
                                   struct stored_array *out)
{
    struct pickle_tree tree;
    struct zip_record *record = NULL;
    char name[300];
    pickle_node root;
    TRY(torch_read_byteorder(zip, &out->big_endian));
    TRY(load_item_pickle(zip, &tree, &root));
    rsd_status status = torch_view_read(&tree, root, view);
    if (!status) {
        struct slice key = view->key;
        snprintf(name, sizeof name, "data/%.*s", (int)(key.nbytes < 200 ? key.nbytes : 200),
                 key.bytes);
        view->key = (struct slice){"", 0};
        status = zip_find(zip, name, &record);
    }
    pickle_tree_drop(&tree);
    TRY(status);
    if (!record)
        return fail(RSD_EFORMAT, "record %s is missing", name);
    out->offset = record->data;
    out->nbytes = record->nbytes;
    out->crc = record->crc;
    out->has_crc = record->crc != 0 || record->nbytes == 0; /* 0: torch did not compute it */
    TRY(torch_view_check(view, record->nbytes));
    torch_view_set_array(view, out);
    return RSD_OK;
}

rsd_status torch_item_locate(struct store *store, const struct extent *extent,
                             struct torch_view *view, struct stored_array *array)
{
    struct item_windows *item = mem_new(1, sizeof *item);
    struct zip zip;
    if (!item)
        return RSD_ENOMEM;
    *item = (struct item_windows){
        .store = store, .file = extent->file, .offset = extent->offset, .nbytes = extent->nbytes};
    *array = (struct stored_array){0};
    rsd_status status = load_windows(item);
    if (!status && !(status = zip_open(&zip, read_windows, item, item->nbytes))) {
        status = find_item_tensor(&zip, view, array);
        zip_close(&zip);
    }
    array->offset += extent->offset;
    mem_free(item);
    return status;
}

/* ---- a compressed archive ---- */

/* A compressed archive. The bytes behind `at` were produced and not used yet. */
struct archive_stream {
    struct stored_stream base;
    struct store_range range;
    struct zstd_reader *zstd;
    size_t n, at;
    unsigned char bytes[MAX_START_NBYTES];
};

static rsd_status produce_start(struct archive_stream *start, size_t n)
{
    if (n > MAX_START_NBYTES)
        return fail(RSD_EFORMAT, "more than %d bytes precede the tensor", (int)MAX_START_NBYTES);
    if (n > start->n) {
        TRY(zstd_reader_read(start->zstd, start->bytes + start->n, n - start->n));
        start->n = n;
    }
    return RSD_OK;
}

static uint32_t little_16(const unsigned char *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8;
}

static uint32_t little_32(const unsigned char *bytes)
{
    return little_16(bytes) | little_16(bytes + 2) << 16;
}

/* Steps over a header, to the first byte of its record. *name is without its directory. */
static rsd_status step_header(struct archive_stream *start, struct slice *name)
{
    TRY(produce_start(start, start->at + HEADER_NBYTES));
    const unsigned char *header = start->bytes + start->at;
    if (memcmp(header, "PK\3\4", 4) != 0)
        return fail(RSD_EFORMAT, "byte %zu of the compressed archive: not a record header",
                    start->at);
    if (little_16(header + 6) & 1 || little_16(header + 8) != 0)
        return fail(RSD_EUNSUPPORTED,
                    "byte %zu of the compressed archive: record is compressed or encrypted",
                    start->at);
    size_t nname = little_16(header + 26), nextra = little_16(header + 28);
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
        if (memcmp(end, "PK\7\x08", 4) == 0 && little_16(end + 12) == n) {
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
    uint32_t crc = crc32_of(start->bytes + start->at, n), expected = little_32(end + 4);
    if (memcmp(end, "PK\7\x08", 4) != 0 || little_32(end + 12) != n)
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

static bool same_slice(struct slice a, struct slice b)
{
    return a.nbytes == b.nbytes && memcmp(a.bytes, b.bytes, a.nbytes) == 0;
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
        } else if (name.nbytes > 5 && memcmp(name.bytes, "data/", 5) == 0) {
            const struct slice key = {name.bytes + 5, name.nbytes - 5};
            if (!pickled)
                status = fail(RSD_EFORMAT, "storage precedes its pickle");
            else if (!same_slice(key, view->key))
                status = fail(RSD_EFORMAT, "first storage belongs to another tensor");
            break;
        } else {
            bool order = slice_is(name, "byteorder");
            status = step_small(start, &content);
            if (!status && order)
                status = take_byteorder(content, &array->big_endian);
        }
    }
    pickle_tree_drop(&tree);
    view->key = (struct slice){"", 0};
    return status;
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
    *crc = little_32(descriptor + 4);
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
    stream->base = (struct stored_stream){read_archive, end_archive, close_archive};
    stream->range = (struct store_range){store, extent->file, extent->offset};
    rsd_status status = start_stream(stream, extent, view, array);
    if (status)
        close_archive(&stream->base);
    else
        *out = &stream->base;
    return status;
}
