/* test_codec.c - CRCs, JSON, items of torch.save, names of dtypes, and casts. */
#include "crc.h"
#include "memory.h"
#include "random.h"
#include "tap.h"
#include "torch_item.h"

#include <math.h>
#include <stdlib.h>

/* ---- checksums ---- */

static const uint64_t polynomials[] = {[CRC_ZIP] = 0xedb88320u,
                                       [CRC_CASTAGNOLI] = 0x82f63b78u,
                                       [CRC_ECMA] = 0xc96c5795d7870f42u,
                                       [CRC_JONES] = 0x95ac9329ac4bc9b5u};

static uint64_t bit_by_bit(enum crc_kind kind, uint64_t state, const unsigned char *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        state ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            state = (state & 1 ? polynomials[kind] : 0) ^ state >> 1;
    }
    return state;
}

static void checksums(void)
{
    enum { N = 5000 };
    static unsigned char data[N + 64], zeros[N];
    struct random r = {1};
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)random_next(&r);
    CASE("every implementation of a CRC equals the definition, for any length and alignment");
    CHECK(crc32_of("123456789", 9) == 0xcbf43926u && crc32_of("", 0) == 0);
    CHECK(crc32c_of("123456789", 9) == 0xe3069283u && crc32c_of("", 0) == 0);
    for (enum crc_kind kind = CRC_ZIP; kind <= CRC_JONES; kind++)
        for (int i = 0; i < 1500; i++) {
            size_t n = (size_t)(i < 700 ? i : random_below(&r, N));
            const unsigned char *at = data + random_below(&r, 64);
            uint64_t state =
                random_next(&r) & (kind <= CRC_CASTAGNOLI ? 0xffffffffu : ~(uint64_t)0);
            uint64_t right = bit_by_bit(kind, state, at, n);
            for (int level = 0; level < crc_nlevels(); level++)
                CHECK(crc_at_level(level, kind, state, at, n) == right,
                      "kind %d, level %d, %zu bytes", (int)kind, level, n);
            CHECK(crc_update(kind, state, at, n) == right);
        }
    CASE("the CRC of a string is combined from its parts in any order");
    for (enum crc_kind kind = CRC_ZIP; kind <= CRC_JONES; kind++)
        for (int i = 0; i < 200; i++) {
            size_t n = (size_t)random_below(&r, N), cut = (size_t)random_below(&r, (int64_t)n + 1);
            uint64_t first = crc_update(kind, 0, data, cut);
            uint64_t second = crc_update(kind, 0, data + cut, n - cut);
            CHECK((crc_shift(kind, first, n - cut) ^ second) == crc_update(kind, 0, data, n));
            CHECK(crc_shift(kind, first, cut) == crc_update(kind, first, zeros, cut));
            uint64_t far = crc_shift(kind, crc_shift(kind, first, (uint64_t)1 << 40), 3);
            CHECK(far == crc_shift(kind, first, ((uint64_t)1 << 40) + 3));
            CHECK(crc32_from_raw(crc_update(CRC_ZIP, 0, data, n), n) == crc32_of(data, n));
        }
}

/* ---- JSON ---- */

static rsd_status json_whole(const char *text, size_t n)
{
    struct json j;
    json_start(&j, text, n);
    rsd_status status = json_skip(&j);
    if (!status)
        status = json_end(&j);
    json_drop(&j);
    return status;
}

static void json_texts(void)
{
    CASE("valid JSON is parsed");
    static const char *const right[] = {"{}",
                                        "[]",
                                        " [ ] \n",
                                        "null",
                                        "true",
                                        "false",
                                        "\"\"",
                                        "0",
                                        "-0",
                                        "-1",
                                        "12.5",
                                        "1e9",
                                        "-0.25E-3",
                                        "1E+2",
                                        "[1,2,[3,{\"a\":[{}]}]]",
                                        "{\"a\":1,\"a\":2}",
                                        "\"\\u0041\\n\\/\"",
                                        "\"\\ud83d\\ude00\"",
                                        "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"",
                                        "\t{\"k\" : [ null ] }\r\n"};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++)
        CHECK(json_whole(right[i], strlen(right[i])) == RSD_OK, "%s: %s", right[i], rsd_error());
    CASE("invalid JSON is refused, and the error names the byte");
    static const struct {
        const char *text, *message;
    } wrong[] = {{"", "byte 0: expected a value"},
                 {"{", "byte 1: expected a string"},
                 {"[", "byte 1: expected a value"},
                 {"[1", "byte 2: expected ',' or ']'"},
                 {"[1 2]", "byte 3: expected ',' or ']'"},
                 {"[,1]", "byte 1: expected a value"},
                 {"[1,]", "byte 3: unexpected ',' before the end"},
                 {"{\"a\":1,}", "byte 7: unexpected ',' before"},
                 {"{\"a\"}", "byte 4: expected ':'"},
                 {"{\"a\" 1}", "byte 5: expected ':'"},
                 {"{1:2}", "byte 1: expected a string"},
                 {"{\"a\":}", "byte 5: expected a value"},
                 {"[1]]", "byte 3: unexpected text behind the value"},
                 {"1 1", "byte 2: unexpected text behind"},
                 {"nul", "expected a value"},
                 {"True", "expected a value"},
                 {"NaN", "expected a value"},
                 {"-", "expected a value"},
                 {"+1", "expected a value"},
                 {"01", "leading zeros"},
                 {"1.", "number is incomplete"},
                 {".5", "expected a value"},
                 {"1e", "number is incomplete"},
                 {"1e+", "number is incomplete"},
                 {"1.2.3", "byte 3: unexpected text behind"},
                 {"--1", "expected a value"},
                 {"\"a", "string is not terminated"},
                 {"\"\\x\"", "invalid escape"},
                 {"\"\\", "byte 2: string is not terminated"},
                 {"\"\\u12g4\"", "four hex digits"},
                 {"\"\\u123", "four hex digits"},
                 {"\"\\ud800\"", "unpaired surrogate"},
                 {"\"\\ud800\\u0041\"", "unpaired surrogate"},
                 {"\"\\udc00\"", "unpaired surrogate"},
                 {"\"\\u0000\"", "contains NUL"},
                 {"\"\n\"", "invalid character"},
                 {"\"\xff\"", "invalid character"},
                 {"\"\xc0\x80\"", "invalid character"},
                 {"\"\xed\xa0\x80\"", "invalid character"},
                 {"\"\xf5\x80\x80\x80\"", "invalid character"},
                 {"\"\xc3\"", "invalid character"},
                 {"'a'", "expected a value"},
                 {"// c\n1", "expected a value"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(json_whole(wrong[i].text, strlen(wrong[i].text)) == RSD_EFORMAT &&
                  strstr(rsd_error(), wrong[i].message),
              "%s: '%s' is not in '%s'", wrong[i].text, wrong[i].message, rsd_error());
    CHECK(json_whole("1\0", 2) == RSD_EFORMAT && json_whole("\"a\0b\"", 5) == RSD_EFORMAT);
    CASE("JSON may have 64 levels, and not more");
    char deep[200];
    for (int depth = 63; depth <= 66; depth++) {
        memset(deep, '[', (size_t)depth);
        memset(deep + depth, ']', (size_t)depth);
        rsd_status status = json_whole(deep, 2 * (size_t)depth);
        CHECK(status == (depth <= 64 ? RSD_OK : RSD_EFORMAT), "%d: %s", depth, rsd_error());
    }
}

static void json_values(void)
{
    static const char text[] = "{\"n\": 18446744073709551615, \"list\": [0, 7], "
                               "\"s\": \"a\\u00e9\\\"b\", \"last\": \"plain\"}";
    struct json j;
    struct slice key, string;
    bool more;
    uint64_t n;
    CASE("numbers and strings of JSON have the right values");
    json_start(&j, text, sizeof text - 1);
    OK(json_enter(&j, '{'));
    CHECK(json_next_key(&j, &key, &more) == RSD_OK && more && slice_is(key, "n"));
    CHECK(json_u64(&j, &n) == RSD_OK && n == UINT64_MAX);
    CHECK(json_next_key(&j, &key, &more) == RSD_OK && slice_is(key, "list"));
    OK(json_enter(&j, '['));
    CHECK(json_next_item(&j, &more) == RSD_OK && more && json_u64(&j, &n) == RSD_OK && n == 0);
    CHECK(json_next_item(&j, &more) == RSD_OK && more && json_u64(&j, &n) == RSD_OK && n == 7);
    CHECK(json_next_item(&j, &more) == RSD_OK && !more);
    CHECK(json_next_key(&j, &key, &more) == RSD_OK && slice_is(key, "s"));
    CHECK(json_string(&j, &string) == RSD_OK && slice_is(string, "a\xc3\xa9\"b"));
    CHECK(json_next_key(&j, &key, &more) == RSD_OK && slice_is(key, "last"));
    CHECK(json_peek(&j) == '"' && json_string(&j, &string) == RSD_OK && slice_is(string, "plain"));
    CHECK(json_next_key(&j, &key, &more) == RSD_OK && !more);
    OK(json_end(&j));
    json_drop(&j);
    static const char *const no_numbers[] = {"18446744073709551616", "-1", "1.0", "1e3", "01", "x"};
    for (size_t i = 0; i < sizeof no_numbers / sizeof *no_numbers; i++) {
        json_start(&j, no_numbers[i], strlen(no_numbers[i]));
        CHECK(json_u64(&j, &n) == RSD_EFORMAT, "%s", no_numbers[i]);
    }
    struct text out = {0};
    json_add_string(&out, "a\"\\\n\x7f\xc3\xa9\xff", 8);
    CHECK(strcmp(out.chars, "\"a\\\"\\\\\\u000a\\u007f\xc3\xa9\\u00ff\"") == 0, "%s", out.chars);
    text_drop(&out);
}

/* ---- items ---- */

static char *golden_item(const char *name, size_t *n)
{
    char path[256];
    snprintf(path, sizeof path, "tests/golden/items/%s.emulated.zip", name);
    FILE *file = fopen(path, "rb");
    char *bytes = calloc(1, 1 << 16);
    *n = file && bytes ? fread(bytes, 1, 1 << 16, file) : 0;
    CHECK(*n > 0, "%s", path);
    if (file)
        fclose(file);
    return bytes;
}

static void same_item(const char *name, int32_t ndim, const int64_t *shape, const float *data)
{
    struct bytes head = {0}, tail = {0};
    size_t n, nbytes = (size_t)box_volume(ndim, shape) * sizeof *data;
    unsigned char first[8] = {0};
    char *golden = golden_item(name, &n);
    memcpy(first, data, nbytes < sizeof first ? nbytes : sizeof first);
    OK(torch_item_frame(RSD_F32, ndim, shape, NULL, crc32_of(data, nbytes), first, &head, &tail));
    if (CHECK(head.n + nbytes + tail.n == n, "%s: %zu bytes, not %zu", name,
              head.n + nbytes + tail.n, n)) {
        CHECK(memcmp(golden, head.data, head.n) == 0, "%s: head", name);
        CHECK(memcmp(golden + head.n, data, nbytes) == 0, "%s: data", name);
        CHECK(memcmp(golden + head.n + nbytes, tail.data, tail.n) == 0, "%s: tail", name);
    }
    bytes_drop(&head);
    bytes_drop(&tail);
    free(golden);
}

static rsd_status read_bytes(void *context, uint64_t at, void *out, size_t n)
{
    const struct bytes *bytes = context;
    if (at > bytes->n || n > bytes->n - at)
        return fail(RSD_EFORMAT, "beyond the end");
    memcpy(out, bytes->data + at, n);
    return RSD_OK;
}

/* The reader finds the tensor in an item that the writer made. */
static void item_comes_back(rsd_dtype dtype, int32_t ndim)
{
    int64_t shape[RSD_MAX_DIMS];
    struct bytes item = {0}, tail = {0};
    struct zip zip;
    struct zip_record *record;
    struct pickle_tree tree;
    struct torch_view view;
    pickle_node root;
    uint64_t used;
    for (int32_t d = 0; d < ndim; d++)
        shape[d] = d % 3 ? 1 : 2 + d % 2;
    size_t nbytes = (size_t)box_volume(ndim, shape) * rsd_dtype_nbytes(dtype);
    unsigned char *data = calloc(nbytes + 8, 1);
    memcpy(data, "PK\7\x08 like a descriptor", nbytes < 22 ? nbytes : 22);
    OK(torch_item_frame(dtype, ndim, shape, NULL, crc32_of(data, nbytes), data, &item, &tail));
    bytes_put(&item, data, nbytes);
    bytes_put(&item, tail.data, tail.n);
    if (OK(zip_open(&zip, read_bytes, &item, item.n))) {
        CHECK(OK(zip_find(&zip, "data/0", &record)) && record && record->data % 64 == 0 &&
              record->nbytes == nbytes && record->crc == crc32_of(data, nbytes));
        CHECK(OK(zip_find(&zip, "version", &record)) && record);
        CHECK(OK(zip_find(&zip, "data/1", &record)) && !record);
        if (CHECK(OK(zip_find(&zip, "data.pkl", &record)) && record) &&
            OK(pickle_read_memory(item.data + record->data, (size_t)record->nbytes, &tree, &root,
                                  &used))) {
            CHECK(used == record->nbytes);
            OK(torch_view_read(&tree, root, &view));
            OK(torch_view_check(&view, nbytes));
            CHECK(view.dtype == dtype && view.ndim == ndim && slice_is(view.key, "0") &&
                  memcmp(view.shape, shape, (size_t)ndim * sizeof *shape) == 0);
            pickle_tree_drop(&tree);
        }
        zip_close(&zip);
    }
    bytes_drop(&item);
    bytes_drop(&tail);
    free(data);
}

static void items(void)
{
    static const int64_t matrix[] = {2, 4}, nothing[] = {0};
    static const float arange[] = {0, 1, 2, 3, 4, 5, 6, 7};
    CASE("items have the same bytes as torch.save writes");
    same_item("item_f32_2x4_arange8", 2, matrix, arange);
    same_item("item_f32_empty", 1, nothing, arange);
    size_t n;
    char *golden = golden_item("item_int1", &n);
    struct bytes pickle = {0}, item = {0};
    bytes_put(&pickle, "\x80\x02K\x01.", 5);
    OK(torch_item_from_pickle(&pickle, &item));
    CHECK(item.n == n && memcmp(item.data, golden, n) == 0);
    bytes_drop(&pickle);
    bytes_drop(&item);
    free(golden);
    CASE("items of every dtype and number of dims are read back");
    for (rsd_dtype dtype = RSD_F64; dtype <= RSD_C32; dtype++)
        for (int32_t ndim = 0; ndim <= RSD_MAX_DIMS; ndim++)
            item_comes_back(dtype, ndim);
}

/* ---- names of dtypes ---- */

static void dtype_names(void)
{
    CASE("names of dtypes in torch and safetensors, both ways");
    for (rsd_dtype dtype = RSD_F64; dtype <= RSD_C32; dtype++) {
        const char *storage = dtype_to_storage(dtype), *safe = dtype_to_safetensors(dtype);
        CHECK(dtype_from_torch(slice_of(dtype_to_torch(dtype))) == dtype);
        CHECK(!storage || dtype_from_storage(slice_of(storage)) == dtype);
        CHECK(!safe || dtype_from_safetensors(slice_of(safe)) == dtype);
    }
    static const struct {
        const char *ours, *torch, *storage, *safetensors;
    } known[] = {{"f64", "float64", "DoubleStorage", "F64"},
                 {"f32", "float32", "FloatStorage", "F32"},
                 {"f16", "float16", "HalfStorage", "F16"},
                 {"bf16", "bfloat16", "BFloat16Storage", "BF16"},
                 {"i64", "int64", "LongStorage", "I64"},
                 {"i32", "int32", "IntStorage", "I32"},
                 {"i16", "int16", "ShortStorage", "I16"},
                 {"i8", "int8", "CharStorage", "I8"},
                 {"u8", "uint8", "ByteStorage", "U8"},
                 {"bool", "bool", "BoolStorage", "BOOL"},
                 {"c64", "complex64", "ComplexFloatStorage", "C64"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        rsd_dtype dtype;
        OK(rsd_dtype_parse(known[i].ours, &dtype));
        CHECK(strcmp(dtype_to_torch(dtype), known[i].torch) == 0, "%s", known[i].ours);
        CHECK(strcmp(dtype_to_storage(dtype), known[i].storage) == 0, "%s", known[i].ours);
        CHECK(strcmp(dtype_to_safetensors(dtype), known[i].safetensors) == 0, "%s", known[i].ours);
    }
    CHECK(dtype_to_storage(RSD_U16) == NULL && dtype_to_safetensors(RSD_C128) == NULL);
    static const char *const unknown[] = {"", "float", "Float32", "float32 ", "qint8", "F", "f32"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        CHECK(!dtype_from_torch(slice_of(unknown[i])) &&
              !dtype_from_storage(slice_of(unknown[i])) &&
              !dtype_from_safetensors(slice_of(unknown[i])));
}

/* ---- casts ---- */

static const rsd_dtype numbers[] = {RSD_F64, RSD_F32, RSD_F16, RSD_BF16, RSD_I64, RSD_I32, RSD_I16,
                                    RSD_I8,  RSD_U64, RSD_U32, RSD_U16,  RSD_U8,  RSD_BOOL};
enum { NNUMBERS = sizeof numbers / sizeof *numbers };

union any_number {
    unsigned char bytes[16];
    double f64;
    float f32;
    int64_t i64;
    int32_t i32;
    int16_t i16;
    int8_t i8;
    uint64_t u64;
    uint32_t u32;
    uint16_t u16;
    uint8_t u8;
};

/* A type in which every number of every dtype is exact. */
static long double number_of(rsd_dtype dtype, union any_number e)
{
    switch (dtype) {
    case RSD_F64:
        return (long double)e.f64;
    case RSD_F32:
        return (long double)e.f32;
    case RSD_F16:
        return (long double)f32_from_f16(e.u16);
    case RSD_BF16:
        return (long double)f32_from_bf16(e.u16);
    case RSD_I64:
        return (long double)e.i64;
    case RSD_I32:
        return (long double)e.i32;
    case RSD_I16:
        return (long double)e.i16;
    case RSD_I8:
        return (long double)e.i8;
    case RSD_U64:
        return (long double)e.u64;
    case RSD_U32:
        return (long double)e.u32;
    case RSD_U16:
        return (long double)e.u16;
    case RSD_U8:
        return (long double)e.u8;
    default:
        return e.u8 != 0;
    }
}

static bool is_float(rsd_dtype dtype)
{
    return dtype <= RSD_BF16;
}

static uint64_t clamped(long double value, long double least, long double most)
{
    if (isnan(value))
        return 0;
    value = value < least ? least : value > most ? most : truncl(value);
    return value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
}

static union any_number right_cast(rsd_dtype to, rsd_dtype from, union any_number e)
{
    union any_number out = {{0}};
    long double value = number_of(from, e);
    int bits = 8 * (int)rsd_dtype_nbytes(to);
    bool is_signed = to >= RSD_I64 && to <= RSD_I8;
    if (to == RSD_F64)
        out.f64 = (double)value;
    else if (to == RSD_F32)
        out.f32 = (float)value;
    else if (to == RSD_F16)
        out.u16 = f16_from_f32((float)value);
    else if (to == RSD_BF16)
        out.u16 = bf16_from_f32((float)value);
    else if (to == RSD_BOOL)
        out.u8 = value != 0; /* NaN too */
    else if (is_float(from))
        out.u64 = clamped(value, is_signed ? -ldexpl(1, bits - 1) : 0,
                          ldexpl(1, is_signed ? bits - 1 : bits) - 1);
    else /* integers keep their low bits */
        out.u64 = value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
    for (size_t i = rsd_dtype_nbytes(to); i < sizeof out.bytes; i++)
        out.bytes[i] = 0;
    return out;
}

/* Numbers at the edges of every dtype, and any bits. */
static union any_number some_element(rsd_dtype dtype, int i, struct random *r)
{
    static const double edges[] = {
        0.0,       -0.0,       0.5,        -0.5,    0.99,     -1.0,      1.5,
        2.5,       127,        127.5,      128,     -128,     -128.9,    -129,
        255,       255.9,      256,        32767,   32768,    -32768,    -32769,
        65504,     65519,      65520,      65535,   65536,    0x1p31,    -0x1p31,
        0x1p32,    4294967295, 2147483647, 0x1p63,  -0x1p63,  0x1p64,    -0x1p64,
        1e300,     -1e300,     1e-300,     0x1p-24, 0x1p-25,  0x1p-149,  0x1.002p0,
        0x1.001p0, 0x1.003p0,  16777217,   3.39e38, INFINITY, -INFINITY, NAN};
    enum { NEDGES = sizeof edges / sizeof *edges };
    union any_number e = {{0}};
    if (i < NEDGES && is_float(dtype)) {
        e.f64 = edges[i];
        return right_cast(dtype, RSD_F64, e);
    }
    e.u64 = random_next(r);
    if (i % 3 == 0 && !is_float(dtype))
        e.u64 = ((uint64_t)1 << (random_next(r) & 63)) - (random_next(r) & 3);
    if (dtype == RSD_BOOL)
        e.u8 = (uint8_t)(e.u8 & 1);
    return e;
}

static bool same_number(rsd_dtype dtype, const union any_number *a, const union any_number *b)
{
    if (is_float(dtype) && isnan(number_of(dtype, *a)))
        return isnan(number_of(dtype, *b));
    return memcmp(a->bytes, b->bytes, rsd_dtype_nbytes(dtype)) == 0;
}

static void cast_all(rsd_dtype to, rsd_dtype from, struct random *r)
{
    enum { N = 300 };
    size_t each_in = rsd_dtype_nbytes(from), each_out = rsd_dtype_nbytes(to);
    static unsigned char in[N * 8 + 1], out[N * 8 + 2];
    union any_number given[N];
    for (int i = 0; i < N; i++) {
        given[i] = some_element(from, i, r);
        memcpy(in + 1 + (size_t)i * each_in, given[i].bytes, each_in);
    }
    out[1 + N * each_out] = 0xa5;
    cast_elements(to, out + 1, from, in + 1, N);
    CHECK(out[1 + N * each_out] == 0xa5, "%s to %s wrote too far", rsd_dtype_name(from),
          rsd_dtype_name(to));
    for (int i = 0; i < N; i++) {
        union any_number right = right_cast(to, from, given[i]), got = {{0}};
        memcpy(got.bytes, out + 1 + (size_t)i * each_out, each_out);
        CHECK(same_number(to, &right, &got), "%s %Lg to %s: %Lg, not %Lg", rsd_dtype_name(from),
              number_of(from, given[i]), rsd_dtype_name(to), number_of(to, got),
              number_of(to, right));
    }
}

/* Converts all numbers at once, and one by one: the two ways have the same bits, of NaNs too. */
static void cast_many(rsd_dtype to, rsd_dtype from, const void *in, int64_t n)
{
    size_t each_in = rsd_dtype_nbytes(from), each_out = rsd_dtype_nbytes(to);
    static unsigned char out[4 << 20];
    int64_t ndiffer = 0;
    cast_elements(to, out, from, in, n);
    for (int64_t i = 0; i < n; i++) {
        unsigned char one[8];
        cast_elements(to, one, from, (const char *)in + (size_t)i * each_in, 1);
        ndiffer += memcmp(one, out + (size_t)i * each_out, each_out) != 0;
    }
    CHECK(ndiffer == 0, "%s to %s: %lld of %lld differ", rsd_dtype_name(from), rsd_dtype_name(to),
          (long long)ndiffer, (long long)n);
}

/* Every f16, and f32s of every sign and exponent with bits around those that are rounded. */
static void cast_halves(void)
{
    enum { NHALVES = 1 << 16, NPATTERNS = 1 << 8, NSINGLES = 512 * 4 * NPATTERNS };
    static uint16_t halves[NHALVES];
    static uint32_t singles[NSINGLES];
    for (uint32_t i = 0; i < NHALVES; i++)
        halves[i] = (uint16_t)i;
    for (uint32_t i = 0; i < NSINGLES; i++) {
        static const uint32_t low[4] = {0, 1, 0xfff, 0x1001};
        uint32_t exponent = i / 4 / NPATTERNS, high = i / 4 % NPATTERNS;
        singles[i] = exponent << 23 | (high << 15 & 0x7fe000) | (high & 1) << 13 | low[i % 4];
    }
    CASE("many f16 and f32 have the same bits as one by one");
    cast_many(RSD_F32, RSD_F16, halves, NHALVES);
    cast_many(RSD_F16, RSD_F32, singles, NSINGLES);
}

static void casts(void)
{
    struct random r = {7};
    CASE("casts equal those of C, and those of torch at the limits of a dtype");
    for (int i = 0; i < NNUMBERS; i++)
        for (int k = 0; k < NNUMBERS; k++) {
            CHECK(dtype_casts(numbers[k], numbers[i]));
            cast_all(numbers[i], numbers[k], &r);
        }
    CASE("complex numbers are cast part by part; opaque dtypes are not cast");
    const float pair[4] = {1.5f, -2, INFINITY, 1e-30f};
    double wide[4];
    float back[4];
    cast_elements(RSD_C128, wide, RSD_C64, pair, 2);
    cast_elements(RSD_C64, back, RSD_C128, wide, 2);
    CHECK(wide[1] == -2 && isinf(wide[2]) && memcmp(pair, back, sizeof pair) == 0);
    CHECK(dtype_casts(RSD_F8E4M3, RSD_F8E4M3) && !dtype_casts(RSD_F8E4M3, RSD_F32));
    CHECK(!dtype_casts(RSD_F32, RSD_C64) && !dtype_casts(RSD_C64, RSD_F32) &&
          !dtype_casts(RSD_C32, RSD_C64));
}

int main(void)
{
    checksums();
    json_texts();
    json_values();
    items();
    dtype_names();
    casts();
    cast_halves();
    return tap_end();
}
