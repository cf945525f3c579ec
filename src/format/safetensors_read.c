/* safetensors.c - opens safetensors files: one, several with an index, or shards of the same tensors.
 *
 *     | u64 length of the header | header, JSON | bytes of all tensors |
 *
 *     {"__metadata__": {"format": "pt", ...},
 *      "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *
 * The tensors must cover the bytes exactly, without holes and without sharing any. Shards say in their
 * metadata where their boxes lie: PyTorch writes only offsets (DCP_SHARDING_INFO), so the extents of a
 * tensor are as far as its shards reach; this library writes the shapes too (reshard), and a shard that
 * is missing at the end is noticed.
 */
#include "format.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_HEADER = 100000000 };

/* A tensor as one file has it. */
struct found {
    size_t ordinal; /* of its name, by first appearance */
    uint32_t file;
    rsd_dtype dtype;
    int32_t ndim;
    uint64_t begin, end; /* of its bytes, in the file */
    int64_t shape[RSD_MAX_DIMS], lo[RSD_MAX_DIMS];
    int64_t whole[RSD_MAX_DIMS]; /* the shape of the whole tensor, if `placed` says so */
    bool placed, whole_known;
    size_t first_piece, npieces; /* an array that is several boxes: lo, len and at of each */
    const char *name;
};

struct gathering {
    struct catalog *catalog;
    struct store *store;
    struct string_map names;
    struct found *list;
    size_t *places; /* in the list, by ordinal: of the last file that has it */
    int64_t *pieces;
    size_t n, capacity, places_capacity, npieces, pieces_capacity;
};

/* ---- one header ---- */

static rsd_status take_list(struct json *j, int64_t *out, int32_t *n)
{
    bool more;
    *n = 0;
    TRY(json_enter(j, '['));
    for (;;) {
        uint64_t value;
        TRY(json_next_item(j, &more));
        if (!more)
            return RSD_OK;
        TRY(json_u64(j, &value));
        if (value > (uint64_t)MAX_EXTENT)
            return json_fail(j, "an extent beyond 2^62");
        if (*n == RSD_MAX_DIMS)
            return fail(RSD_EUNSUPPORTED, "byte %zu: more than %d dims", j->at, (int)RSD_MAX_DIMS);
        out[(*n)++] = (int64_t)value;
    }
}

static rsd_status take_dtype(struct json *j, struct found *found, bool *packed)
{
    struct slice dtype;
    TRY(json_string(j, &dtype));
    found->dtype = dtype_from_safetensors(dtype);
    *packed = slice_is(dtype, "F4");
    if (!found->dtype)
        return fail(RSD_EUNSUPPORTED, "byte %zu: dtype %.*s is not known here", j->at,
                    (int)(dtype.nbytes < 40 ? dtype.nbytes : 40), dtype.bytes);
    return RSD_OK;
}

enum tensor_key { UNKNOWN = 0, DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };

static enum tensor_key key_of(struct slice key)
{
    return slice_is(key, "dtype")          ? DTYPE
           : slice_is(key, "shape")        ? SHAPE
           : slice_is(key, "data_offsets") ? OFFSETS
                                           : UNKNOWN;
}

static rsd_status take_tensor(struct json *j, struct found *found)
{
    int64_t offsets[RSD_MAX_DIMS] = {0};
    int32_t noffsets = 0;
    bool more, packed = false;
    unsigned seen = 0;
    TRY(json_enter(j, '{'));
    for (;;) {
        struct slice name;
        TRY(json_next_key(j, &name, &more));
        if (!more)
            break;
        enum tensor_key key = key_of(name);
        if (key == UNKNOWN)
            return json_fail(j, "an unknown key in a tensor");
        if (seen & key)
            return json_fail(j, "a key that is there twice");
        seen |= key;
        if (key == DTYPE)
            TRY(take_dtype(j, found, &packed));
        else if (key == SHAPE)
            TRY(take_list(j, found->shape, &found->ndim));
        else
            TRY(take_list(j, offsets, &noffsets));
    }
    if (seen != ALL || noffsets != 2)
        return json_fail(j, "a tensor without dtype, shape and two offsets");
    if (offsets[0] > offsets[1])
        return json_fail(j, "data_offsets that end before they begin");
    if (packed) { /* two elements a byte; here, extents count bytes */
        if (found->ndim == 0 || found->shape[found->ndim - 1] % 2)
            return json_fail(j, "4-bit elements that do not fill bytes");
        found->shape[found->ndim - 1] /= 2;
    }
    found->begin = (uint64_t)offsets[0];
    found->end = (uint64_t)offsets[1];
    return RSD_OK;
}

static rsd_status add_found(struct gathering *g, struct slice name, struct found found)
{
    bool known = g->places && string_map_find(&g->names, name, &found.ordinal);
    if (known && g->list[g->places[found.ordinal]].file == found.file)
        return fail(RSD_EFORMAT, "the file has it twice");
    TRY(catalog_add_name(g->catalog, name, &found.name));
    if (!known) {
        found.ordinal = g->names.n;
        TRY(GROW(g->places, g->places_capacity, found.ordinal + 1));
        TRY(string_map_add(&g->names, (struct slice){found.name, name.nbytes}, found.ordinal));
    }
    TRY(GROW(g->list, g->capacity, g->n + 1));
    g->places[found.ordinal] = g->n;
    g->list[g->n++] = found;
    return RSD_OK;
}

static struct found *find_in_file(struct gathering *g, size_t first, struct slice name)
{
    size_t ordinal;
    if (!g->places || !string_map_find(&g->names, name, &ordinal) || g->places[ordinal] < first)
        return NULL;
    return &g->list[g->places[ordinal]];
}

/* ---- where shards lie ---- */

/* The boxes that an array is packed from: lo, len and where in the array, all in one list. */
static rsd_status take_pieces(struct gathering *g, struct json *j, struct found *found)
{
    bool more;
    size_t first = g->npieces;
    TRY(json_enter(j, '['));
    for (;;) {
        uint64_t value;
        TRY(json_next_item(j, &more));
        if (!more)
            break;
        TRY(json_u64(j, &value));
        if (value > (uint64_t)MAX_EXTENT)
            return json_fail(j, "an extent beyond 2^62");
        TRY(GROW(g->pieces, g->pieces_capacity, g->npieces + 1));
        g->pieces[g->npieces++] = (int64_t)value;
    }
    if (!found)
        return RSD_OK;
    size_t element_nbytes = 3 * (size_t)found->ndim, n = g->npieces - first;
    if (element_nbytes == 0 || n == 0 || n % element_nbytes)
        return json_fail(j, "pieces that are none");
    for (const int64_t *lo = g->pieces + first; lo < g->pieces + g->npieces; lo += element_nbytes)
        for (int32_t d = 0; d < found->ndim; d++) {
            int64_t len = lo[found->ndim + d], at = lo[2 * found->ndim + d];
            if (at > found->shape[d] || len > found->shape[d] - at)
                return json_fail(j, "a piece that reaches beyond its array");
        }
    found->first_piece = first;
    found->npieces = n / element_nbytes;
    found->placed = true;
    return RSD_OK;
}

/* {"saved_offsets": [...]} of PyTorch; {"lo": [...], "shape": [...]}, or pieces instead of lo, of ours. */
static rsd_status take_place(struct gathering *g, struct json *j, struct found *found)
{
    struct slice key;
    bool more;
    int32_t n;
    TRY(json_enter(j, '{'));
    for (;;) {
        int64_t list[RSD_MAX_DIMS] = {0};
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        bool lo = slice_is(key, "saved_offsets") || slice_is(key, "lo");
        if (slice_is(key, "pieces")) {
            TRY(take_pieces(g, j, found));
            continue;
        }
        if (!lo && !slice_is(key, "shape")) {
            TRY(json_skip(j));
            continue;
        }
        TRY(take_list(j, list, &n));
        if (!found)
            continue;
        if (n != found->ndim)
            return json_fail(j, "a box with another number of dims than its tensor");
        copy_i64s(lo ? found->lo : found->whole, list, n);
        found->placed = found->placed || lo;
        found->whole_known = found->whole_known || !lo;
    }
}

static rsd_status take_places(struct gathering *g, size_t first, struct json *j)
{
    struct slice name;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &name, &more));
        if (!more)
            return RSD_OK;
        TRY(take_place(g, j, find_in_file(g, first, name)));
    }
}

/* The text of a metadata entry is JSON of its own. */
static rsd_status take_sharding(struct gathering *g, size_t first, const struct bytes *text,
                                bool ours)
{
    struct json j;
    struct slice key;
    bool more;
    json_start(&j, (const char *)text->data, text->n);
    rsd_status status = ours ? json_enter(&j, '{') : take_places(g, first, &j);
    while (ours && !status && !(status = json_next_key(&j, &key, &more)) && more)
        status = slice_is(key, "tensors") ? take_places(g, first, &j) : json_skip(&j);
    if (!status)
        status = json_end(&j);
    json_drop(&j);
    return status ? fail_in(status, "%s: ", ours ? "reshard" : "DCP_SHARDING_INFO") : RSD_OK;
}

struct header_metadata {
    struct bytes sharding, ours; /* texts that say where shards lie */
    bool seen;
};

static void metadata_drop(struct header_metadata *metadata)
{
    bytes_drop(&metadata->sharding);
    bytes_drop(&metadata->ours);
}

static rsd_status take_metadata(struct json *j, struct header_metadata *metadata)
{
    struct slice key, value;
    bool more;
    if (metadata->seen)
        return json_fail(j, "a key that is there twice");
    metadata->seen = true;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        struct bytes *text = slice_is(key, "DCP_SHARDING_INFO") ? &metadata->sharding
                             : slice_is(key, "reshard")         ? &metadata->ours
                                                                : NULL;
        TRY(json_string(j, &value));
        if (!text)
            continue;
        text->n = 0;
        bytes_put(text, value.bytes, value.nbytes);
        if (text->failed)
            return RSD_ENOMEM;
    }
}

/* ---- one file ---- */

static int by_begin(const void *a, const void *b)
{
    const struct found *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* A tensor is as long as its shape says. */
static rsd_status check_nbytes(const struct found *found)
{
    rsd_layout *checked; /* for the shape alone */
    TRY(layout_start(found->dtype, found->ndim, found->shape, &checked));
    uint64_t need = (uint64_t)checked->volume * rsd_dtype_nbytes(found->dtype);
    rsd_layout_free(checked);
    if (found->end - found->begin != need)
        return fail(RSD_EFORMAT, "%llu bytes for a shape and dtype of %llu",
                    (unsigned long long)(found->end - found->begin), (unsigned long long)need);
    return RSD_OK;
}

/* Tensors cover the bytes exactly: each as long as its shape says, one after the other. */
static rsd_status check_cover(struct gathering *g, size_t first, uint64_t nbytes)
{
    uint64_t at = 0;
    qsort(g->list + first, g->n - first, sizeof *g->list, by_begin);
    for (size_t i = first; i < g->n; i++) {
        const struct found *found = &g->list[i];
        rsd_status status = check_nbytes(found);
        if (status)
            return fail_in(status, "%.300s: ", found->name);
        if (found->begin != at)
            return fail(RSD_EFORMAT, "%s: its bytes begin at %llu, those before it end at %llu",
                        found->name, (unsigned long long)found->begin, (unsigned long long)at);
        at = found->end;
    }
    if (at != nbytes)
        return fail(RSD_EFORMAT, "tensors of %llu bytes in a file with %llu bytes for them",
                    (unsigned long long)at, (unsigned long long)nbytes);
    return RSD_OK;
}

static rsd_status take_header(struct gathering *g, struct json *j, uint32_t file,
                              struct header_metadata *metadata)
{
    struct slice name;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &name, &more));
        if (!more)
            return json_end(j);
        if (slice_is(name, "__metadata__")) {
            TRY(take_metadata(j, metadata));
            continue;
        }
        char *copy = mem_new(name.nbytes + 1, 1); /* the next string overwrites it */
        if (!copy)
            return RSD_ENOMEM;
        memcpy(copy, name.bytes, name.nbytes);
        struct found found = {.file = file};
        rsd_status status = take_tensor(j, &found);
        if (!status)
            status = add_found(g, (struct slice){copy, name.nbytes}, found);
        if (status)
            status = fail_in(status, "%.300s: ", copy);
        mem_free(copy);
        TRY(status);
    }
}

/* The header of a file, or of a blob that begins at `at` and may be followed by something else. */
static rsd_status load_header(struct store *store, uint32_t file, uint64_t at, uint64_t nbytes,
                              char **text, size_t *n)
{
    unsigned char length[8];
    uint64_t header = 0;
    if (nbytes < sizeof length)
        return fail(RSD_EFORMAT, "too short for a safetensors file");
    TRY(store_read(store, file, at, length, sizeof length));
    for (int i = 7; i >= 0; i--)
        header = header << 8 | length[i];
    if (header > MOST_HEADER)
        return fail(RSD_EFORMAT, "byte 0: a header of %llu bytes, at most %d are allowed",
                    (unsigned long long)header, (int)MOST_HEADER);
    if (header > nbytes - sizeof length)
        return fail(RSD_EFORMAT, "byte 0: a header of %llu bytes in a file of %llu",
                    (unsigned long long)header, (unsigned long long)nbytes);
    *text = mem_new((size_t)header + 1, 1);
    if (!*text)
        return RSD_ENOMEM;
    *n = (size_t)header;
    return store_read(store, file, at + sizeof length, *text, (size_t)header);
}

/* Finds the tensors of a header of *n bytes. */
static rsd_status read_header(struct gathering *g, uint32_t file, uint64_t at, uint64_t nbytes,
                              size_t *n, struct header_metadata *metadata)
{
    char *text = NULL;
    struct json j;
    rsd_status status = load_header(g->store, file, at, nbytes, &text, n);
    if (!status) {
        json_start(&j, text, *n);
        status = take_header(g, &j, file, metadata);
        if (status == RSD_EFORMAT || status == RSD_EUNSUPPORTED)
            status = fail_in(status, "header, ");
        json_drop(&j);
    }
    mem_free(text);
    return status;
}

static rsd_status add_file(struct gathering *g, struct slice name)
{
    uint32_t file;
    uint64_t nbytes;
    size_t n = 0, first = g->n;
    struct header_metadata metadata = {0};
    TRY(store_add_file(g->store, name, &file));
    rsd_status status = store_stat(g->store, file, &nbytes, NULL);
    if (!status)
        status = read_header(g, file, 0, nbytes, &n, &metadata);
    if (!status)
        status = check_cover(g, first, nbytes - 8 - n);
    for (size_t i = first; i < g->n && !status; i++) {
        g->list[i].begin += 8 + n;
        g->list[i].end += 8 + n;
        g->places[g->list[i].ordinal] = i; /* they were sorted */
    }
    if (!status && metadata.ours.data)
        status = take_sharding(g, first, &metadata.ours, true);
    else if (!status && metadata.sharding.data)
        status = take_sharding(g, first, &metadata.sharding, false);
    metadata_drop(&metadata);
    return status ? store_fail_in(g->store, file, status) : RSD_OK;
}

/* ---- all files ---- */

static int by_ordinal_then_file(const void *a, const void *b)
{
    const struct found *x = a, *y = b;
    if (x->ordinal != y->ordinal)
        return x->ordinal < y->ordinal ? -1 : 1;
    return (x->file > y->file) - (x->file < y->file);
}

/* What the shards that know the whole shape say; NULL: none does. */
static rsd_status said_shape(const struct found *shards, size_t n, const int64_t **shape)
{
    *shape = NULL;
    for (size_t i = 0; i < n; i++) {
        if (!shards[i].whole_known)
            continue;
        for (int32_t d = 0; *shape && d < shards[i].ndim; d++)
            if (shards[i].whole[d] != (*shape)[d])
                return fail(RSD_EFORMAT, "the files do not agree on its shape");
        *shape = shards[i].whole;
    }
    return RSD_OK;
}

/* The shape of a tensor from its shards: as they say, or as far as they reach. */
static rsd_status whole_shape(const struct found *shards, size_t n, int64_t *shape)
{
    const int64_t *said;
    for (size_t i = 0; i < n; i++) {
        if (shards[i].dtype != shards[0].dtype || shards[i].ndim != shards[0].ndim)
            return fail(RSD_EFORMAT, "two files have it with another dtype or number of dims");
        if (n > 1 && !shards[i].placed)
            return fail(RSD_EFORMAT, "several files have it, and do not say which part");
    }
    TRY(said_shape(shards, n, &said));
    for (int32_t d = 0; d < shards[0].ndim; d++) {
        int64_t end, reach = 0;
        for (size_t i = 0; i < n; i++) {
            if (shards[i].npieces && !said)
                return fail(RSD_EFORMAT, "it comes in pieces, and nothing says its shape");
            if (shards[i].npieces)
                continue;
            if (!add_i64(shards[i].lo[d], shards[i].shape[d], &end) || end > MAX_EXTENT)
                return fail(RSD_EFORMAT, "a shard that reaches beyond 2^62");
            reach = max_i64(reach, end);
        }
        if (said && reach > said[d])
            return fail(RSD_EFORMAT, "a shard reaches beyond the tensor");
        shape[d] = said ? said[d] : reach;
    }
    return RSD_OK;
}

/* Each piece is a view of the array. */
static rsd_status add_pieces(struct gathering *g, const struct found *shard)
{
    struct catalog *catalog = g->catalog;
    size_t ndim = (size_t)shard->ndim;
    for (size_t i = 0; i < shard->npieces; i++) {
        const int64_t *lo = g->pieces + shard->first_piece + 3 * ndim * i;
        const int64_t *len = lo + ndim, *at = len + ndim;
        struct stored_view stored = {.view = {.dtype = shard->dtype, .ndim = shard->ndim},
                                     .data = shard->begin,
                                     .nbytes = shard->end - shard->begin};
        int64_t stride = 1; /* in an array without elements, strides could be any number */
        for (int32_t d = shard->ndim - 1; d >= 0 && stored.nbytes > 0; d--) {
            stored.view.shape[d] = len[d];
            stored.view.strides[d] = stride;
            stored.view.offset += at[d] * stride;
            stride *= max_i64(shard->shape[d], 1);
        }
        TRY(GROW(catalog->views, catalog->views_capacity, catalog->nviews + 1));
        catalog->views[catalog->nviews++] = stored;
        TRY(catalog_add_box(catalog, lo, len,
                            (struct extent){.kind = ITEM_VIEW,
                                            .file = shard->file,
                                            .offset = shard->begin,
                                            .nbytes = stored.nbytes,
                                            .detail = (uint32_t)(catalog->nviews - 1)}));
    }
    return RSD_OK;
}

static rsd_status add_shards(struct gathering *g, const struct found *shards, size_t n)
{
    int64_t shape[RSD_MAX_DIMS] = {0};
    TRY(whole_shape(shards, n, shape));
    TRY(catalog_add_tensor(g->catalog, (struct slice){shards[0].name, strlen(shards[0].name)},
                           shards[0].dtype, shards[0].ndim, shape));
    for (size_t i = 0; i < n; i++) {
        struct extent extent = {.kind = ITEM_PLAIN,
                                .file = shards[i].file,
                                .offset = shards[i].begin,
                                .nbytes = shards[i].end - shards[i].begin};
        if (shards[i].npieces)
            TRY(add_pieces(g, &shards[i]));
        else
            TRY(catalog_add_box(g->catalog, shards[i].lo, shards[i].shape, extent));
    }
    return RSD_OK;
}

static rsd_status add_tensors(struct gathering *g)
{
    if (g->n > 1)
        qsort(g->list, g->n, sizeof *g->list, by_ordinal_then_file);
    for (size_t i = 0, n; i < g->n; i += n) {
        const struct found *shards = &g->list[i];
        for (n = 1; i + n < g->n && shards[n].ordinal == shards[0].ordinal; n++)
            continue;
        rsd_status status = add_shards(g, shards, n);
        if (status)
            return store_fail_in(g->store, shards[n - 1].file,
                                 fail_in(status, "%.300s: ", shards[0].name));
    }
    return RSD_OK;
}

static void gathering_drop(struct gathering *g)
{
    mem_free(g->list);
    mem_free(g->pieces);
    mem_free(g->places);
    string_map_drop(&g->names);
}

rsd_status safetensors_open(rsd_checkpoint *checkpoint, const struct slice *names, size_t n)
{
    struct gathering g = {.catalog = &checkpoint->catalog, .store = checkpoint->store};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < n && !status; i++)
        status = add_file(&g, names[i]);
    if (!status)
        status = add_tensors(&g);
    gathering_drop(&g);
    return status;
}

/* ---- blobs in other files ---- */

rsd_status safetensors_find_tensor(struct store *store, uint32_t file, uint64_t at,
                                   const char *name, rsd_dtype *dtype, int32_t *ndim,
                                   int64_t *shape, uint64_t *begin)
{
    uint64_t nbytes, data = at + sizeof data;
    size_t n = 0;
    struct catalog catalog = {0};
    struct gathering g = {.catalog = &catalog, .store = store};
    struct header_metadata metadata = {0};
    TRY(store_check_range(store, file, at, sizeof data));
    TRY(store_stat(store, file, &nbytes, NULL));
    rsd_status status = read_header(&g, file, at, nbytes - at, &n, &metadata);
    if (status == RSD_EFORMAT)
        status = fail_in(status, "a blob at byte %llu, ", (unsigned long long)at);
    const struct found *found =
        status ? NULL : find_in_file(&g, 0, (struct slice){name, strlen(name)});
    if (!status && !found)
        status = fail(RSD_EFORMAT, "the blob at byte %llu has no tensor %s", (unsigned long long)at,
                      name);
    if (!status)
        status = check_nbytes(found);
    if (!status)
        status = store_check_range(store, file, data + n + found->begin, found->end - found->begin);
    if (!status) {
        *dtype = found->dtype;
        *ndim = found->ndim;
        copy_i64s(shape, found->shape, found->ndim);
        *begin = data + n + found->begin;
    }
    metadata_drop(&metadata);
    gathering_drop(&g);
    catalog_drop(&catalog);
    return status;
}
