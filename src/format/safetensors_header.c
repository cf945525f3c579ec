/* safetensors_header.c - the header of a safetensors file, or of a blob in another file.
 *
 *     | u64 length of the header | header, JSON | bytes of all tensors |
 *
 *     {"__metadata__": {"format": "pt", ...},
 *      "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *
 * The tensors must cover the bytes exactly, without holes or overlaps. Shards have the offsets of their
 * boxes in __metadata__.
 */
#include "safetensors.h"

#include "json.h"
#include "torch_item.h"

#include <stdlib.h>

/* ---- one header ---- */

/* Takes the next extent of a list; *more is false at its end. */
static rsd_status take_extent(struct json *j, int64_t *extent, bool *more)
{
    uint64_t value;
    TRY(json_next_item(j, more));
    if (!*more)
        return RSD_OK;
    TRY(json_u64(j, &value));
    if (value > (uint64_t)MAX_EXTENT)
        return json_fail(j, "extent exceeds 2^62");
    *extent = (int64_t)value;
    return RSD_OK;
}

/* Reads a list of extents, of a shape or of data_offsets. */
static rsd_status take_extents_list(struct json *j, int64_t *out, int32_t *n)
{
    int64_t extent = 0;
    bool more;
    TRY(json_enter(j, '['));
    for (*n = 0;; out[(*n)++] = extent) {
        TRY(take_extent(j, &extent, &more));
        if (!more)
            return RSD_OK;
        if (*n == RSD_MAX_DIMS)
            return fail(RSD_EUNSUPPORTED, "byte %zu: tensor has more than %d dims", j->at,
                        (int)RSD_MAX_DIMS);
    }
}

static rsd_status take_header_dtype(struct json *j, struct header_tensor *tensor)
{
    struct slice dtype;
    TRY(json_string(j, &dtype));
    tensor->dtype = dtype_from_safetensors(dtype);
    if (!tensor->dtype)
        return fail(RSD_EUNSUPPORTED, "byte %zu: dtype %.*s is not supported", j->at,
                    slice_width(dtype, 40), dtype.bytes);
    return RSD_OK;
}

enum tensor_key { UNKNOWN = 0, DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };

static enum tensor_key header_key(struct slice key)
{
    return slice_is(key, "dtype")          ? DTYPE
           : slice_is(key, "shape")        ? SHAPE
           : slice_is(key, "data_offsets") ? OFFSETS
                                           : UNKNOWN;
}

/* Reads the entry of a tensor in a header. */
static rsd_status take_header_tensor(struct json *j, struct header_tensor *tensor)
{
    int64_t offsets[RSD_MAX_DIMS] = {0};
    int32_t noffsets = 0;
    bool more;
    unsigned keys = 0;
    TRY(json_enter(j, '{'));
    for (;;) {
        struct slice name;
        TRY(json_next_key(j, &name, &more));
        if (!more)
            break;
        enum tensor_key key = header_key(name);
        if (key == UNKNOWN)
            return json_fail(j, "unknown key of a tensor");
        if (keys & key)
            return json_fail(j, "key is not unique");
        keys |= key;
        if (key == DTYPE)
            TRY(take_header_dtype(j, tensor));
        else if (key == SHAPE)
            TRY(take_extents_list(j, tensor->shape, &tensor->ndim));
        else
            TRY(take_extents_list(j, offsets, &noffsets));
    }
    if (keys != ALL || noffsets != 2)
        return json_fail(j, "tensor lacks dtype, shape or two data_offsets");
    if (offsets[0] > offsets[1])
        return json_fail(j, "data_offsets end before they begin");
    if (tensor->dtype == RSD_F4X2) { /* two elements a byte; in this library, extents count bytes */
        if (tensor->ndim == 0 || tensor->shape[tensor->ndim - 1] % 2)
            return json_fail(j, "last dim has an odd number of 4-bit elements");
        tensor->shape[tensor->ndim - 1] /= 2;
    }
    tensor->begin = (uint64_t)offsets[0];
    tensor->end = (uint64_t)offsets[1];
    return RSD_OK;
}

/* Adds a tensor of a file. Tensors of several files with one name have one ordinal. */
static rsd_status add_to_set(struct header_set *set, struct slice name, struct header_tensor tensor)
{
    bool known = set->places && string_map_find(&set->names, name, &tensor.ordinal);
    if (known && set->list[set->places[tensor.ordinal]].file == tensor.file)
        return fail(RSD_EFORMAT, "name is not unique in the file");
    TRY(budget_use_memory(sizeof tensor));
    TRY(catalog_add_name(set->catalog, name, &tensor.name));
    if (!known) {
        tensor.ordinal = set->names.n;
        TRY(GROW(set->places, set->places_capacity, tensor.ordinal + 1));
        TRY(string_map_add(&set->names, (struct slice){tensor.name, name.nbytes}, tensor.ordinal));
    }
    TRY(GROW(set->list, set->capacity, set->n + 1));
    set->places[tensor.ordinal] = set->n;
    set->list[set->n++] = tensor;
    return RSD_OK;
}

/* Returns the tensor of the current file with a name, or NULL. Tensors of this file begin at `first`. */
static struct header_tensor *find_in_file(struct header_set *set, size_t first, struct slice name)
{
    size_t ordinal;
    if (!set->places || !string_map_find(&set->names, name, &ordinal) ||
        set->places[ordinal] < first)
        return NULL;
    return &set->list[set->places[ordinal]];
}

/* ---- offsets of shards ---- */

/* Takes the boxes that an array is packed from: lo, len and offset in the array of each, in one list. */
static rsd_status take_pieces(struct header_set *set, struct json *j, struct header_tensor *tensor)
{
    bool more;
    size_t first = set->npieces;
    TRY(json_enter(j, '['));
    for (;; set->npieces++) {
        TRY(GROW(set->pieces, set->pieces_capacity, set->npieces + 1));
        TRY(take_extent(j, &set->pieces[set->npieces], &more));
        if (!more)
            break;
    }
    if (!tensor)
        return RSD_OK;
    size_t width = 3 * (size_t)tensor->ndim, n = set->npieces - first;
    if (width == 0 || n == 0 || n % width)
        return json_fail(j, "number of pieces is invalid");
    for (const int64_t *lo = set->pieces + first; lo < set->pieces + set->npieces; lo += width)
        for (int32_t d = 0; d < tensor->ndim; d++) {
            int64_t len = lo[tensor->ndim + d], at = lo[2 * tensor->ndim + d];
            if (at > tensor->shape[d] || len > tensor->shape[d] - at)
                return json_fail(j, "piece reaches beyond its array");
        }
    tensor->first_piece = first;
    tensor->npieces = n / width;
    tensor->placed = true;
    return RSD_OK;
}

/* Takes {"saved_offsets": [...]} of PyTorch, or {"lo": [...], "shape": [...]} of this library, which may
 * have pieces instead of lo. */
static rsd_status take_place(struct header_set *set, struct json *j, struct header_tensor *tensor)
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
            TRY(take_pieces(set, j, tensor));
            continue;
        }
        if (!lo && !slice_is(key, "shape")) {
            TRY(json_skip(j));
            continue;
        }
        TRY(take_extents_list(j, list, &n));
        if (!tensor)
            continue;
        if (n != tensor->ndim)
            return json_fail(j, "offsets and tensor have different numbers of dims");
        copy_i64s(lo ? tensor->lo : tensor->whole, list, n);
        tensor->placed = tensor->placed || lo;
        tensor->whole_known = tensor->whole_known || !lo;
    }
}

/* Takes an object that maps names to the positions of shards. Tensors of this file begin at `first`. */
static rsd_status take_places(struct header_set *set, size_t first, struct json *j)
{
    struct slice name;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &name, &more));
        if (!more)
            return RSD_OK;
        TRY(take_place(set, j, find_in_file(set, first, name)));
    }
}

/* Takes the text of a metadata entry, which is JSON itself. */
static rsd_status take_sharding(struct header_set *set, size_t first, const struct bytes *text,
                                bool ours)
{
    struct json j;
    struct slice key;
    bool more;
    json_start(&j, (const char *)text->data, text->n);
    rsd_status status = ours ? json_enter(&j, '{') : take_places(set, first, &j);
    while (ours && !status && !(status = json_next_key(&j, &key, &more)) && more)
        status = slice_is(key, "tensors") ? take_places(set, first, &j) : json_skip(&j);
    if (!status)
        status = json_end(&j);
    json_drop(&j);
    return status ? fail_in(status, "%s: ", ours ? "reshard" : "DCP_SHARDING_INFO") : RSD_OK;
}

struct header_metadata {
    struct bytes sharding, ours; /* offsets of shards, as PyTorch and this library write them */
    bool present;
};

/* Reads __metadata__, of which two keys are used. */
static rsd_status take_metadata(struct json *j, struct header_metadata *metadata)
{
    struct slice key, value;
    bool more;
    if (metadata->present)
        return json_fail(j, "key is not unique");
    metadata->present = true;
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

static int by_first_byte(const void *a, const void *b)
{
    const struct header_tensor *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

rsd_status header_tensor_check(const struct header_tensor *tensor)
{
    rsd_layout *checked; /* only its checks are needed */
    TRY(layout_start(tensor->dtype, tensor->ndim, tensor->shape, &checked));
    uint64_t need = (uint64_t)checked->volume * rsd_dtype_nbytes(tensor->dtype);
    rsd_layout_free(checked);
    if (tensor->end - tensor->begin != need)
        return fail(RSD_EFORMAT, "data_offsets have %llu bytes; shape and dtype need %llu",
                    (unsigned long long)(tensor->end - tensor->begin), (unsigned long long)need);
    return RSD_OK;
}

/* Sorts the tensors of a file, and checks that they cover its bytes exactly. */
static rsd_status check_header_coverage(struct header_set *set, size_t first, uint64_t nbytes)
{
    uint64_t at = 0;
    if (set->n > first)
        qsort(set->list + first, set->n - first, sizeof *set->list, by_first_byte);
    for (size_t i = first; i < set->n; i++) {
        const struct header_tensor *tensor = &set->list[i];
        rsd_status status = header_tensor_check(tensor);
        if (status)
            return fail_in(status, "%.300s: ", tensor->name);
        if (tensor->begin != at)
            return fail(RSD_EFORMAT, "%s: bytes begin at %llu; those before them end at %llu",
                        tensor->name, (unsigned long long)tensor->begin, (unsigned long long)at);
        at = tensor->end;
    }
    if (at != nbytes)
        return fail(RSD_EFORMAT, "tensors have %llu bytes; the file has %llu for them%s",
                    (unsigned long long)at, (unsigned long long)nbytes,
                    nbytes < at ? "; it is cut short" : "");
    return RSD_OK;
}

/* Reads a whole header. */
static rsd_status take_header(struct header_set *set, struct json *j, uint32_t file,
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
        char *copy = slice_copy(name); /* the next string overwrites the name */
        if (!copy)
            return RSD_ENOMEM;
        struct header_tensor tensor = {.file = file};
        rsd_status status = take_header_tensor(j, &tensor);
        if (!status)
            status = add_to_set(set, (struct slice){copy, name.nbytes}, tensor);
        if (status)
            status = fail_in(status, "%.300s: ", copy);
        mem_free(copy);
        TRY(status);
    }
}

/* Loads the header of a file, or of a blob at an offset, behind which other bytes may follow. */
static rsd_status load_header(struct store *store, uint32_t file, uint64_t at, uint64_t nbytes,
                              char **text, size_t *n)
{
    unsigned char length[8];
    if (nbytes < sizeof length)
        return fail(RSD_EFORMAT, "file is too short for safetensors");
    TRY(store_read(store, file, at, length, sizeof length));
    uint64_t header = little_endian(length, sizeof length);
    if (header > MAX_HEADER_NBYTES)
        return fail(RSD_EFORMAT, "byte 0: header of %llu bytes exceeds the limit of %d bytes",
                    (unsigned long long)header, (int)MAX_HEADER_NBYTES);
    if (header > nbytes - sizeof length)
        return fail(RSD_EFORMAT, "byte 0: header of %llu bytes exceeds the file of %llu bytes",
                    (unsigned long long)header, (unsigned long long)nbytes);
    *text = mem_new((size_t)header + 1, 1);
    if (!*text)
        return RSD_ENOMEM;
    *n = (size_t)header;
    return store_read(store, file, at + sizeof length, *text, (size_t)header);
}

/* Adds the tensors of a header to the set, and sets *n to its length. */
static rsd_status read_header(struct header_set *set, uint32_t file, uint64_t at, uint64_t nbytes,
                              size_t *n, struct header_metadata *metadata)
{
    char *text = NULL;
    struct json j;
    rsd_status status = load_header(set->store, file, at, nbytes, &text, n);
    if (!status) {
        json_start(&j, text, *n);
        status = take_header(set, &j, file, metadata);
        if (status == RSD_EFORMAT || status == RSD_EUNSUPPORTED)
            status = fail_in(status, "header, ");
        json_drop(&j);
    }
    mem_free(text);
    return status;
}

rsd_status header_set_add_file(struct header_set *set, uint32_t file)
{
    uint64_t nbytes;
    size_t n = 0, first = set->n;
    struct header_metadata metadata = {0};
    rsd_status status = store_stat(set->store, file, &nbytes, NULL);
    if (!status)
        status = read_header(set, file, 0, nbytes, &n, &metadata);
    if (!status)
        status = check_header_coverage(set, first, nbytes - 8 - n);
    for (size_t i = first; i < set->n && !status; i++) {
        set->list[i].begin += 8 + n;
        set->list[i].end += 8 + n;
        set->places[set->list[i].ordinal] = i; /* they were sorted */
    }
    if (!status && metadata.ours.data)
        status = take_sharding(set, first, &metadata.ours, true);
    else if (!status && metadata.sharding.data)
        status = take_sharding(set, first, &metadata.sharding, false);
    bytes_drop(&metadata.sharding);
    bytes_drop(&metadata.ours);
    return status ? store_fail_in(set->store, file, status) : RSD_OK;
}

void header_set_drop(struct header_set *set)
{
    mem_free(set->list);
    mem_free(set->pieces);
    mem_free(set->places);
    string_map_drop(&set->names);
}

/* ---- blobs in other files ---- */

rsd_status header_set_add_blob(struct header_set *set, uint32_t file, uint64_t at, uint64_t *data)
{
    uint64_t nbytes;
    size_t n = 0;
    struct header_metadata metadata = {0};
    TRY(store_check_range(set->store, file, at, sizeof nbytes));
    TRY(store_stat(set->store, file, &nbytes, NULL));
    rsd_status status = read_header(set, file, at, nbytes - at, &n, &metadata);
    if (status == RSD_EFORMAT)
        status = fail_in(status, "blob at byte %llu, ", (unsigned long long)at);
    bytes_drop(&metadata.sharding);
    bytes_drop(&metadata.ours);
    *data = at + sizeof nbytes + n;
    return status;
}

const struct header_tensor *header_set_find(struct header_set *set, const char *name)
{
    return find_in_file(set, 0, slice_of(name));
}
