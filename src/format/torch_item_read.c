/* saved.c - finds the bytes of one tensor in what torch.save wrote for it.
 *
 * An item on disk is an archive, read from its directory. A compressed item has no end that could be
 * reached, so its records are gone through from the start: the pickle ends where it stops, the records
 * before the tensor are a few bytes each, and the tensor is as long as its pickle says. Its CRC-32 then
 * follows it.
 */
#include "format.h"

#include <stdio.h>
#include <string.h>

enum { WINDOW = 4096, MOST_START = 1 << 16, HEADER = 30 };

/* ---- an archive on disk ---- */

/* The start and the end of an item, which is where everything but the tensor is. */
struct item {
    struct files *files;
    uint32_t file;
    uint64_t offset, nbytes;
    uint64_t tail; /* where the window at the end begins */
    size_t nhead, ntail;
    unsigned char head_bytes[WINDOW], tail_bytes[WINDOW];
};

static rsd_status item_read(void *context, uint64_t at, void *out, size_t n)
{
    const struct item *item = context;
    if (at > item->nbytes || n > item->nbytes - at)
        return fail(RSD_EFORMAT, "byte %llu of an archive: it ends before that",
                    (unsigned long long)at);
    if (at + n <= item->nhead)
        memcpy(out, item->head_bytes + at, n);
    else if (at >= item->tail)
        memcpy(out, item->tail_bytes + (at - item->tail), n);
    else
        return file_read(item->files, item->file, item->offset + at, out, n);
    return RSD_OK;
}

static rsd_status load_windows(struct item *item)
{
    item->nhead = item->nbytes < WINDOW ? (size_t)item->nbytes : WINDOW;
    TRY(file_read(item->files, item->file, item->offset, item->head_bytes, item->nhead));
    item->ntail =
        item->nbytes - item->nhead < WINDOW ? (size_t)(item->nbytes - item->nhead) : WINDOW;
    item->tail = item->nbytes - item->ntail;
    return file_read(item->files, item->file, item->offset + item->tail, item->tail_bytes,
                     item->ntail);
}

static rsd_status load_pickle(struct zip *zip, struct pickle_tree *tree, pickle_node *root)
{
    struct zip_record *record;
    TRY(zip_find(zip, "data.pkl", &record));
    if (!record)
        return fail(RSD_EFORMAT, "no record data.pkl: not what torch.save writes");
    return zip_read_pickle(zip, record, tree, root);
}

static rsd_status read_byteorder(struct zip *zip, bool *big_endian)
{
    struct zip_record *record;
    char text[8] = "";
    *big_endian = false;
    TRY(zip_find(zip, "byteorder", &record));
    if (!record)
        return RSD_OK;
    size_t n = record->nbytes < sizeof text - 1 ? (size_t)record->nbytes : sizeof text - 1;
    TRY(zip->read(zip->context, record->data, text, n));
    *big_endian = strcmp(text, "big") == 0;
    if (!*big_endian && strcmp(text, "little") != 0)
        return fail(RSD_EFORMAT, "record byteorder says '%s'", text);
    return RSD_OK;
}

static rsd_status find_tensor(struct zip *zip, struct stored_view *out)
{
    struct pickle_tree tree;
    struct zip_record *record = NULL;
    char name[300];
    pickle_node root;
    TRY(read_byteorder(zip, &out->big_endian));
    TRY(load_pickle(zip, &tree, &root));
    rsd_status status = torch_view_read(&tree, root, &out->view);
    if (!status) {
        struct slice key = out->view.key;
        snprintf(name, sizeof name, "data/%.*s", (int)(key.nbytes < 200 ? key.nbytes : 200),
                 key.bytes);
        out->view.key = (struct slice){"", 0};
        status = zip_find(zip, name, &record);
    }
    pickle_tree_drop(&tree);
    TRY(status);
    if (!record)
        return fail(RSD_EFORMAT, "record %s is missing", name);
    out->data = record->data;
    out->nbytes = record->nbytes;
    out->crc = record->crc;
    out->has_crc =
        record->crc != 0 || record->nbytes == 0; /* torch can be told not to compute it */
    return torch_view_check(&out->view, record->nbytes);
}

rsd_status torch_item_locate(struct files *files, const struct extent *extent,
                             struct stored_view *out)
{
    struct item *item = mem_new(1, sizeof *item);
    struct zip zip;
    if (!item)
        return RSD_ENOMEM;
    *item = (struct item){
        .files = files, .file = extent->file, .offset = extent->offset, .nbytes = extent->nbytes};
    *out = (struct stored_view){0};
    rsd_status status = load_windows(item);
    if (!status && !(status = zip_open(&zip, item_read, item, item->nbytes))) {
        status = find_tensor(&zip, out);
        zip_close(&zip);
    }
    out->data += extent->offset;
    mem_free(item);
    return status;
}

/* ---- a compressed archive ---- */

/* The start of the stream, as far as it was produced. */
struct start {
    struct zstd_reader *zstd;
    unsigned char *bytes;
    size_t n, at;
};

static rsd_status want(struct start *start, size_t n)
{
    if (n > MOST_START)
        return fail(RSD_EFORMAT, "more than %d bytes before the tensor", (int)MOST_START);
    if (n > start->n) {
        TRY(zstd_reader_read(start->zstd, start->bytes + start->n, n - start->n));
        start->n = n;
    }
    return RSD_OK;
}

static uint32_t get16(const unsigned char *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8;
}

static uint32_t get32(const unsigned char *bytes)
{
    return get16(bytes) | get16(bytes + 2) << 16;
}

/* Steps over a header, to the first byte of its record; the name without its folder. */
static rsd_status step_header(struct start *start, struct slice *name)
{
    TRY(want(start, start->at + HEADER));
    const unsigned char *header = start->bytes + start->at;
    if (memcmp(header, "PK\3\4", 4) != 0)
        return fail(RSD_EFORMAT, "byte %zu of a compressed archive: no header of a record",
                    start->at);
    if (get16(header + 6) & 1 || get16(header + 8) != 0)
        return fail(RSD_EUNSUPPORTED,
                    "byte %zu of a compressed archive: a record that is not stored as it is",
                    start->at);
    size_t nname = get16(header + 26), nextra = get16(header + 28);
    TRY(want(start, start->at + HEADER + nname + nextra));
    *name = (struct slice){(const char *)start->bytes + start->at + HEADER, nname};
    const char *slash = memchr(name->bytes, '/', name->nbytes);
    if (slash) {
        name->nbytes -= (size_t)(slash + 1 - name->bytes);
        name->bytes = slash + 1;
    }
    start->at += HEADER + nname + nextra;
    return RSD_OK;
}

/* Steps over the descriptor behind a record of n bytes; they end where one with that length begins. */
static rsd_status step_small(struct start *start, struct slice *content)
{
    size_t first = start->at;
    for (size_t n = 0; n < 256; n++) {
        TRY(want(start, first + n + 16));
        const unsigned char *end = start->bytes + first + n;
        if (memcmp(end, "PK\7\x08", 4) == 0 && get16(end + 12) == n) {
            *content = (struct slice){(const char *)start->bytes + first, n};
            start->at = first + n + 16;
            return RSD_OK;
        }
    }
    return fail(RSD_EFORMAT, "byte %zu of a compressed archive: a record without end", first);
}

static rsd_status read_start(void *context, uint64_t at, void *out, size_t n)
{
    struct start *start = context;
    TRY(want(start, start->at + (size_t)at + n));
    memcpy(out, start->bytes + start->at + at, n);
    return RSD_OK;
}

/* Steps over a pickle of n bytes and its descriptor. */
static rsd_status step_checked(struct start *start, size_t n)
{
    TRY(want(start, start->at + n + 16));
    const unsigned char *end = start->bytes + start->at + n;
    uint32_t crc = crc32_of(start->bytes + start->at, n), said = get32(end + 4);
    if (memcmp(end, "PK\7\x08", 4) != 0 || get32(end + 12) != n)
        return fail(RSD_EFORMAT, "byte %zu of a compressed archive: no descriptor of a record",
                    start->at + n);
    if (said != 0 && said != crc)
        return fail(RSD_EFORMAT,
                    "byte %zu of a compressed archive: data.pkl has CRC-32 %08x, should have "
                    "%08x: it is damaged",
                    start->at, crc, said);
    start->at += n + 16;
    return RSD_OK;
}

/* Pickles are read ahead; here, one byte at a time would be too many calls, and more than the pickle may
 * not be there. So it is tried with ever more bytes. */
static rsd_status step_pickle(struct start *start, struct pickle_tree *tree, pickle_node *root)
{
    for (size_t n = 512;; n *= 2) {
        uint64_t used;
        rsd_status status = want(start, start->at + n);
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
        if (status != RSD_EFORMAT || n > MOST_START / 4)
            return status;
    }
}

static bool same_slice(struct slice a, struct slice b)
{
    return a.nbytes == b.nbytes && memcmp(a.bytes, b.bytes, a.nbytes) == 0;
}

static rsd_status go_to_tensor(struct start *start, struct stored_view *out)
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
                status = torch_view_read(&tree, root, &out->view);
        } else if (name.nbytes > 5 && memcmp(name.bytes, "data/", 5) == 0) {
            const struct slice key = {name.bytes + 5, name.nbytes - 5};
            if (!pickled)
                status = fail(RSD_EFORMAT, "a storage before its pickle");
            else if (!same_slice(key, out->view.key))
                status = fail(RSD_EFORMAT, "the storage of another tensor comes first");
            break;
        } else {
            bool order = slice_is(name, "byteorder");
            status = step_small(start, &content);
            if (!status && order)
                out->big_endian = slice_is(content, "big");
        }
    }
    pickle_tree_drop(&tree);
    out->view.key = (struct slice){"", 0};
    return status;
}

rsd_status torch_item_locate_stream(struct zstd_reader *zstd, struct stored_view *out,
                                    unsigned char **rest, size_t *nrest)
{
    struct start start = {.zstd = zstd, .bytes = mem_new(MOST_START, 1)};
    if (!start.bytes)
        return RSD_ENOMEM;
    *out = (struct stored_view){.has_crc = true}; /* behind the bytes */
    rsd_status status = go_to_tensor(&start, out);
    if (!status) {
        const struct torch_view *view = &out->view;
        out->nbytes = view->storage_count * (view->untyped ? 1 : rsd_dtype_nbytes(view->dtype));
        status = torch_view_check(view, out->nbytes);
    }
    if (status) {
        mem_free(start.bytes);
        return status;
    }
    *nrest = start.n - start.at;
    memmove(start.bytes, start.bytes + start.at, *nrest);
    *rest = start.bytes;
    return RSD_OK;
}
