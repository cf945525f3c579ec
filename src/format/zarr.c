/* zarr.c - reads what .zarray (version 2) and zarr.json (version 3) of zarr say of an array.
 *
 *     v2   {"shape": [8, 4], "chunks": [4, 4], "dtype": "<f4", "compressor": {"id": "zstd"}, "order": "C", ...}
 *     v3   {"shape": [8, 4], "data_type": "float32", "chunk_grid": {...}, "codecs": [...], ...}
 *
 * Codecs are supported as far as Orbax uses them: bytes, zstd, crc32c and sharding_indexed. What is not
 * supported is noted, and the array is refused when it is read. So a checkpoint with one such array can be
 * listed.
 */
#include "orbax.h"

#include <stdio.h>

static void note_refused(struct zarr_array *array, const char *what, struct slice name)
{
    if (!*array->refused)
        snprintf(array->refused, sizeof array->refused, "%s%s%.*s", what, name.nbytes ? " " : "",
                 slice_width(name, 40), name.bytes);
}

/* ---- dtypes ---- */

/* Returns the dtype of a code of NumPy; 0: it is not known. */
static rsd_dtype find_numpy_dtype(struct slice code)
{
    static const struct {
        const char *code;
        rsd_dtype dtype;
    } codes[] = {{"f8", RSD_F64}, {"f4", RSD_F32},  {"f2", RSD_F16}, {"i8", RSD_I64},
                 {"i4", RSD_I32}, {"i2", RSD_I16},  {"i1", RSD_I8},  {"u8", RSD_U64},
                 {"u4", RSD_U32}, {"u2", RSD_U16},  {"u1", RSD_U8},  {"b1", RSD_BOOL},
                 {"c8", RSD_C64}, {"c16", RSD_C128}};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (slice_is(code, codes[i].code))
            return codes[i].dtype;
    return 0;
}

/* Takes a dtype: "<f4" of NumPy, or the name of a type, which is that of torch. */
static rsd_status take_dtype(struct json *j, bool v3, struct zarr_array *array)
{
    struct slice name;
    if (json_peek(j) != '"') { /* a list of fields, or a type with settings */
        note_refused(array, "structured dtype", slice_of(""));
        array->dtype = RSD_U8;
        return json_skip(j);
    }
    TRY(json_string(j, &name));
    if (!v3 && name.nbytes > 1 && strchr("<>|", name.bytes[0])) {
        array->big_endian = name.bytes[0] == '>';
        array->dtype = find_numpy_dtype((struct slice){name.bytes + 1, name.nbytes - 1});
    } else {
        array->dtype = dtype_from_torch(name);
    }
    if (!array->dtype) {
        note_refused(array, "dtype", name);
        array->dtype = RSD_U8;
    }
    return RSD_OK;
}

/* ---- shapes ---- */

static rsd_status take_extents(struct json *j, int64_t *out, int32_t *ndim)
{
    bool more;
    uint64_t extent;
    TRY(json_enter(j, '['));
    for (*ndim = 0;; ++*ndim) {
        TRY(json_next_item(j, &more));
        if (!more)
            return RSD_OK;
        if (*ndim == RSD_MAX_DIMS)
            return fail(RSD_EUNSUPPORTED, "array has more than %d dims", (int)RSD_MAX_DIMS);
        TRY(json_u64(j, &extent));
        if (extent > (uint64_t)MAX_EXTENT)
            return json_fail(j, "extent exceeds 2^62");
        out[*ndim] = (int64_t)extent;
    }
}

/* The members of an array that were read. */
struct zarr_members {
    int32_t nshape, nchunk, ninner; /* dims; -1: not there */
    size_t fill_at;                 /* of the fill value, in the text; 0: not there */
    bool typed;
    uint32_t present; /* bits of the members that were there, by their place in a list */
};

/* Refuses a member that is there twice: readers do not agree on which one counts. inside: it is one of a shard. */
static rsd_status check_member_once(struct json *j, struct slice key, bool inside,
                                    struct zarr_members *members)
{
    static const char *const names[] = {"shape",         "chunks",      "dtype",
                                        "compressor",    "order",       "dimension_separator",
                                        "filters",       "fill_value",  "node_type",
                                        "data_type",     "chunk_grid",  "chunk_key_encoding",
                                        "codecs",        "chunk_shape", "index_codecs",
                                        "index_location"};
    for (uint32_t i = 0; i < sizeof names / sizeof *names; i++) {
        uint32_t bit = 1u << (i + (inside ? 16 : 0));
        if (!slice_is(key, names[i]))
            continue;
        if (members->present & bit)
            return fail(RSD_EFORMAT, "byte %zu: member '%s' is there twice", j->at, names[i]);
        members->present |= bit;
    }
    return RSD_OK;
}

static rsd_status check_chunk(const struct zarr_array *array, const int64_t *chunk)
{
    int64_t nbytes = (int64_t)rsd_dtype_nbytes(array->dtype);
    for (int32_t d = 0; d < array->ndim; d++)
        if (chunk[d] < 1 || !mul_i64(nbytes, chunk[d], &nbytes) || nbytes > MAX_EXTENT)
            return fail(RSD_EFORMAT, "shape of the chunks has an extent of 0, or exceeds 2^62");
    return RSD_OK;
}

/* Checks the shape and the chunks of an array. */
static rsd_status check_members(const struct zarr_members *members, struct zarr_array *array)
{
    if (!members->typed || members->nshape < 0 || members->nchunk < 0)
        return fail(RSD_EFORMAT, "shape, dtype or shape of the chunks is missing");
    if (members->nchunk != members->nshape ||
        (array->sharded && members->ninner != members->nshape))
        return fail(RSD_EFORMAT, "shape and chunks have different numbers of dims");
    array->ndim = members->nshape;
    TRY(check_chunk(array, array->chunk));
    if (!array->sharded)
        copy_i64s(array->inner, array->chunk, array->ndim);
    TRY(check_chunk(array, array->inner));
    for (int32_t d = 0; d < array->ndim; d++)
        if (array->chunk[d] % array->inner[d] != 0)
            return fail(RSD_EFORMAT, "chunks of a shard do not fill the shard in dim %d", (int)d);
    return RSD_OK;
}

/* ---- version 2 ---- */

/* Reads the compressor of version 2. One that is not supported is refused when the array is read. */
static rsd_status take_compressor(struct json *j, struct zarr_array *array)
{
    struct slice key, id = {0};
    bool more;
    if (json_peek(j) != '{') /* null */
        return json_skip(j);
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            break;
        if (!slice_is(key, "id")) {
            TRY(json_skip(j));
            continue;
        }
        TRY(json_string(j, &id));
        array->zstd = slice_is(id, "zstd");
        if (!array->zstd)
            note_refused(array, "compressor", id);
    }
    return id.bytes ? RSD_OK : json_fail(j, "compressor has no id");
}

static rsd_status take_zarr_word(struct json *j, const char *a, const char *b, bool *is_b)
{
    struct slice text;
    TRY(json_string(j, &text));
    *is_b = slice_is(text, b);
    return *is_b || slice_is(text, a) ? RSD_OK : json_fail(j, "unknown text");
}

/* Reads a member of .zarray. */
static rsd_status take_v2_member(struct json *j, struct slice key, struct zarr_members *members,
                                 struct zarr_array *array)
{
    bool slash;
    if (slice_is(key, "shape"))
        return take_extents(j, array->shape, &members->nshape);
    if (slice_is(key, "chunks"))
        return take_extents(j, array->chunk, &members->nchunk);
    if (slice_is(key, "dtype")) {
        members->typed = true;
        return take_dtype(j, false, array);
    }
    if (slice_is(key, "compressor"))
        return take_compressor(j, array);
    if (slice_is(key, "order"))
        return take_zarr_word(j, "C", "F", &array->column_major);
    if (slice_is(key, "dimension_separator")) {
        TRY(take_zarr_word(j, ".", "/", &slash));
        array->separator = slash ? '/' : '.';
        return RSD_OK;
    }
    if (slice_is(key, "filters") && json_peek(j) == '[')
        note_refused(array, "list of filters", slice_of(""));
    return json_skip(j);
}

/* ---- codecs of version 3 ---- */

/* Where in the list of codecs the next one is. */
struct codec_chain {
    bool ended_array; /* the bytes codec, or a shard, was there */
    bool index;       /* it is the chain of the index of a shard */
};

static rsd_status take_codecs(struct json *j, struct codec_chain *chain, bool inside,
                              struct zarr_array *array, struct zarr_members *members);

static rsd_status take_sharding_member(struct json *j, struct slice key, struct zarr_array *array,
                                       struct zarr_members *members)
{
    if (!*array->refused) /* a shard in a shard was */
        TRY(check_member_once(j, key, true, members));
    if (slice_is(key, "chunk_shape"))
        return take_extents(j, array->inner, &members->ninner);
    if (slice_is(key, "codecs"))
        return take_codecs(j, &(struct codec_chain){0}, true, array, members);
    if (slice_is(key, "index_codecs")) {
        array->index_has_crc = false;
        return take_codecs(j, &(struct codec_chain){.index = true}, true, array, members);
    }
    if (slice_is(key, "index_location"))
        return take_zarr_word(j, "end", "start", &array->index_first);
    return json_skip(j);
}

static rsd_status take_codec_settings(struct json *j, struct slice name, struct codec_chain *chain,
                                      struct zarr_array *array, struct zarr_members *members)
{
    struct slice key;
    bool more, big;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        if (slice_is(name, "bytes") && slice_is(key, "endian")) {
            TRY(take_zarr_word(j, "little", "big", &big));
            *(chain->index ? &array->index_big_endian : &array->big_endian) = big;
        } else if (slice_is(name, "sharding_indexed")) {
            TRY(take_sharding_member(j, key, array, members));
        } else {
            TRY(json_skip(j));
        }
    }
}

/* Notes what a codec does to the bytes. */
static void add_codec(struct slice name, struct codec_chain *chain, bool inside,
                      struct zarr_array *array)
{
    bool shard = slice_is(name, "sharding_indexed"), crc = slice_is(name, "crc32c");
    if (slice_is(name, "bytes") && !chain->ended_array) {
        chain->ended_array = true;
    } else if (shard && !chain->ended_array && !inside) {
        chain->ended_array = array->sharded = true;
    } else if (!chain->ended_array || (array->sharded && !inside)) {
        note_refused(array, "codec", name);
    } else if (chain->index) {
        if (!crc || array->index_has_crc)
            note_refused(array, "codec of the index", name);
        array->index_has_crc = true;
    } else if (slice_is(name, "zstd") && !array->zstd && !array->crc_outside) {
        array->zstd = true;
    } else if (crc && !array->zstd && !array->crc_inside) {
        array->crc_inside = true;
    } else if (crc && array->zstd && !array->crc_outside) {
        array->crc_outside = true;
    } else {
        note_refused(array, "codec", name);
    }
}

/* A codec is an object, or a name alone. Its name may come behind its settings. */
static rsd_status take_codec(struct json *j, struct codec_chain *chain, bool inside,
                             struct zarr_array *array, struct zarr_members *members)
{
    struct slice key, text;
    char name[40] = "";
    bool more;
    size_t settings = 0, depth = (size_t)j->depth;
    if (json_peek(j) == '"') {
        TRY(json_string(j, &text));
        add_codec(text, chain, inside, array);
        return RSD_OK;
    }
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            break;
        if (slice_is(key, "name")) {
            TRY(json_string(j, &text));
            snprintf(name, sizeof name, "%.*s", slice_width(text, 39), text.bytes);
            continue;
        }
        if (slice_is(key, "configuration")) {
            json_peek(j);
            settings = j->at;
        }
        TRY(json_skip(j));
    }
    struct slice known = slice_of(name);
    add_codec(known, chain, inside, array);
    if (!settings)
        return RSD_OK;
    struct json again = {
        .text = j->text, .nbytes = j->nbytes, .at = settings, .depth = (int)depth + 1};
    rsd_status status = take_codec_settings(&again, known, chain, array, members);
    json_drop(&again);
    return status;
}

/* Reads a chain of codecs. `inside`: it is that of the chunks of a shard, or of its index. */
static rsd_status take_codecs(struct json *j, struct codec_chain *chain, bool inside,
                              struct zarr_array *array, struct zarr_members *members)
{
    bool more;
    TRY(json_enter(j, '['));
    for (;;) {
        TRY(json_next_item(j, &more));
        if (!more)
            break;
        TRY(take_codec(j, chain, inside, array, members));
    }
    return chain->ended_array || *array->refused ? RSD_OK
                                                 : json_fail(j, "codecs have no bytes codec");
}

/* ---- version 3 ---- */

/* Reads an object with a name and a configuration, of which one member is wanted. */
static rsd_status take_named(struct json *j, char name[40], const char *wanted, int64_t *extents,
                             int32_t *ndim, char *character)
{
    struct slice key, text;
    bool more, inner;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        if (slice_is(key, "name")) {
            TRY(json_string(j, &text));
            snprintf(name, 40, "%.*s", slice_width(text, 39), text.bytes);
            continue;
        }
        if (!slice_is(key, "configuration")) {
            TRY(json_skip(j));
            continue;
        }
        TRY(json_enter(j, '{'));
        for (;;) {
            TRY(json_next_key(j, &key, &inner));
            if (!inner)
                break;
            if (!slice_is(key, wanted)) {
                TRY(json_skip(j));
            } else if (extents) {
                TRY(take_extents(j, extents, ndim));
            } else {
                bool slash;
                TRY(take_zarr_word(j, ".", "/", &slash));
                *character = slash ? '/' : '.';
            }
        }
    }
}

static rsd_status take_grid(struct json *j, struct zarr_array *array, struct zarr_members *members)
{
    char name[40] = "";
    TRY(take_named(j, name, "chunk_shape", array->chunk, &members->nchunk, NULL));
    if (strcmp(name, "regular") != 0)
        return fail(RSD_EUNSUPPORTED, "chunk grid '%s' is not supported", name);
    return RSD_OK;
}

/* Reads how the keys of chunks are made from their indices. */
static rsd_status take_key_encoding(struct json *j, struct zarr_array *array)
{
    char name[40] = "";
    array->separator = '\0';
    TRY(take_named(j, name, "separator", NULL, NULL, &array->separator));
    array->prefixed = strcmp(name, "default") == 0;
    if (!array->prefixed && strcmp(name, "v2") != 0)
        return fail(RSD_EUNSUPPORTED, "chunk key encoding '%s' is not supported", name);
    if (!array->separator)
        array->separator = array->prefixed ? '/' : '.';
    return RSD_OK;
}

/* Reads a member that is not known. Its object says whether it may be ignored. */
static rsd_status take_extension(struct json *j, struct slice key, struct zarr_array *array)
{
    bool more, may_ignore = false;
    char name[40];
    snprintf(name, sizeof name, "%.*s", slice_width(key, 39), key.bytes);
    if (json_peek(j) != '{') {
        note_refused(array, "member", slice_of(name));
        return json_skip(j);
    }
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            break;
        if (slice_is(key, "must_understand"))
            may_ignore = json_peek(j) == 'f';
        TRY(json_skip(j));
    }
    if (!may_ignore)
        note_refused(array, "member", slice_of(name));
    return RSD_OK;
}

/* Reads a member of zarr.json. */
static rsd_status take_v3_member(struct json *j, struct slice key, struct zarr_members *members,
                                 struct zarr_array *array)
{
    if (slice_is(key, "shape"))
        return take_extents(j, array->shape, &members->nshape);
    if (slice_is(key, "chunk_grid"))
        return take_grid(j, array, members);
    if (slice_is(key, "data_type")) {
        members->typed = true;
        return take_dtype(j, true, array);
    }
    if (slice_is(key, "chunk_key_encoding"))
        return take_key_encoding(j, array);
    if (slice_is(key, "codecs"))
        return take_codecs(j, &(struct codec_chain){0}, false, array, members);
    static const char *const ignored[] = {"attributes", "dimension_names", "storage_transformers",
                                          "consolidated_metadata"};
    bool known = false;
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        known = known || slice_is(key, ignored[i]);
    if (!known) /* a reader must refuse what it does not know, unless it may be ignored */
        return take_extension(j, key, array);
    if (slice_is(key, "storage_transformers") && json_peek(j) == '[') {
        bool more;
        TRY(json_enter(j, '['));
        TRY(json_next_item(j, &more));
        if (!more)
            return RSD_OK;
        return fail(RSD_EUNSUPPORTED, "storage transformers are not supported");
    }
    return json_skip(j);
}

/* ---- both ---- */

/* Reads all members. The fill value is only located, since it depends on the dtype. */
static rsd_status take_members(struct json *j, bool v3, struct zarr_members *members,
                               struct zarr_array *array, bool *is_array)
{
    struct slice key, text;
    bool more, any = false;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return json_end(j);
        TRY(check_member_once(j, key, false, members));
        if (slice_is(key, "fill_value")) {
            json_peek(j);
            members->fill_at = j->at;
            TRY(json_skip(j));
        } else if (slice_is(key, "zarr_format")) {
            uint64_t format;
            TRY(json_u64(j, &format));
            if (format != (v3 ? 3 : 2))
                return fail(RSD_EFORMAT, "zarr_format is %llu, expected %d",
                            (unsigned long long)format, v3 ? 3 : 2);
        } else if (slice_is(key, "node_type")) {
            TRY(json_string(j, &text));
            any = any || !slice_is(text, "array");
            *is_array = !any;
        } else {
            TRY(v3 ? take_v3_member(j, key, members, array)
                   : take_v2_member(j, key, members, array));
        }
    }
}

rsd_status zarr_read(const char *text, size_t nbytes, bool v3, struct zarr_array *out,
                     bool *is_array)
{
    struct zarr_members members = {.nshape = -1, .nchunk = -1, .ninner = -1};
    struct zarr_array array = {.prefixed = v3, .separator = v3 ? '/' : '.', .fill_known = true};
    struct json j;
    *is_array = true;
    json_start(&j, text, nbytes);
    rsd_status status = take_members(&j, v3, &members, &array, is_array);
    json_drop(&j);
    if (status || !*is_array)
        return status;
    TRY(check_members(&members, &array));
    if (members.fill_at && !*array.refused) {
        json_start(&j, text + members.fill_at, nbytes - members.fill_at);
        status = zarr_take_fill_value(&j, &array);
        json_drop(&j);
    }
    if (!status)
        *out = array;
    return status;
}
