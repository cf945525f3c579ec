/* test_limits.c - what a process runs out of, and what a file only claims: open files, memory inside zstd, space on the
 * disk, records of which a part is read, names that hide what they are.
 *
 * The linker redirects some calls to this file (--wrap), so the library needs no hook. */
#include "conversions.h"
#include "truth.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <unistd.h>
#include <zstd.h>
#include <zstd_errors.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    static char paths[4][400];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* ---- calls that are redirected ---- */

static uint64_t nreserved; /* bytes */
static bool zstd_fails;

int __wrap_fallocate(int fd, int mode, off_t offset, off_t n);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t n)
{
    (void)fd, (void)mode, (void)offset;
    nreserved += (uint64_t)n;
    return 0;
}

/* Nothing is in memory: there, no space is reserved. */
int __wrap_fstatfs(int fd, struct statfs *about);
int __wrap_fstatfs(int fd, struct statfs *about)
{
    (void)fd;
    *about = (struct statfs){.f_type = EXT4_SUPER_MAGIC};
    return 0;
}

size_t __real_ZSTD_decompressStream(ZSTD_DStream *stream, ZSTD_outBuffer *to, ZSTD_inBuffer *from);
size_t __wrap_ZSTD_decompressStream(ZSTD_DStream *stream, ZSTD_outBuffer *to, ZSTD_inBuffer *from);
size_t __wrap_ZSTD_decompressStream(ZSTD_DStream *stream, ZSTD_outBuffer *to, ZSTD_inBuffer *from)
{
    return zstd_fails ? (size_t)-ZSTD_error_memory_allocation
                      : __real_ZSTD_decompressStream(stream, to, from);
}

/* ---- the cases ---- */

static void few_open_files(void)
{
    enum { NTAKEN = 22 };
    CASE("hundreds of files are read and written where 40 may be open, also if others are");
    struct rlimit before, few;
    rsd_convert_options options = {.struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP};
    int taken[NTAKEN];
    conversion_make_large(in_folder("many"), 300, 300);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    few = before;
    few.rlim_cur = 40;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (int ntaken = 0; ntaken <= NTAKEN; ntaken += NTAKEN) {
        for (int i = 0; i < ntaken; i++)
            taken[i] = dup(2);
        OK(conversion_run(in_folder("many"), in_folder("out"), &options));
        conversion_check_same(in_folder("many"), in_folder("out"), NULL);
        for (int i = 0; i < ntaken; i++)
            close(taken[i]);
        folder_remove(in_folder("out"));
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    folder_remove(in_folder("many"));
}

static void memory_of_zstd(void)
{
    CASE("an allocation that fails inside zstd is ENOMEM, not a damaged file");
    rsd_checkpoint *checkpoint;
    char digests[64][RSD_DIGEST_NCHARS];
    if (!OK(rsd_checkpoint_open(golden_path("zstd", "ckpt"), NULL, &checkpoint)))
        return;
    zstd_fails = true;
    FAILS(RSD_ENOMEM, "zstd stream", rsd_digest(checkpoint, 0, NULL, NULL, digests, NULL));
    zstd_fails = false;
    OK(rsd_digest(checkpoint, 0, NULL, NULL, digests, NULL));
    rsd_checkpoint_close(checkpoint);
}

static void parts_of_records(void)
{
    CASE("diff checks the records of which it compares a part, on both sides; so do verify and "
         "digest");
    rsd_checkpoint *good = NULL, *bad = NULL;
    char digests[1][RSD_DIGEST_NCHARS];
    int64_t ndiffer, nfindings;
    if (OK(rsd_checkpoint_open("tests/bad/good_part.pt", NULL, &good)) &&
        OK(rsd_checkpoint_open("tests/bad/part_damaged.pt", NULL, &bad))) {
        OK(rsd_diff(good, good, NULL, NULL, NULL, &ndiffer, NULL));
        FAILS(RSD_EFORMAT, "CRC-32", rsd_diff(good, bad, NULL, NULL, NULL, &ndiffer, NULL));
        FAILS(RSD_EFORMAT, "CRC-32", rsd_diff(bad, good, NULL, NULL, NULL, &ndiffer, NULL));
        FAILS(RSD_EFORMAT, "CRC-32", rsd_digest(bad, 0, NULL, NULL, digests, NULL));
        OK(rsd_verify(bad, NULL, NULL, NULL, &nfindings, NULL));
        CHECK(nfindings == 1, "%lld findings", (long long)nfindings);
    }
    rsd_checkpoint_close(good);
    rsd_checkpoint_close(bad);
}

/* How many findings have some words. */
struct search {
    const char *words;
    int n;
};

static rsd_status count_findings(void *context, const char *text)
{
    struct search *search = context;
    search->n += strstr(text, search->words) != NULL;
    return RSD_OK;
}

static void boxes_and_elements(void)
{
    CASE("verify finds elements that no box has, and boxes that overlap with different bytes");
    static const struct {
        const char *path, *words;
    } cases[] = {
        {"tests/bad/dcp_box_hole", "w: no file has [1:2, 0:4]"},
        {"tests/bad/dcp_box_overlap_differs", "overlap with different bytes"}, /* in part */
        {"tests/bad/dcp_box_copies_differ", "overlap with different bytes"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct search search = {.words = cases[i].words};
        rsd_checkpoint *checkpoint;
        int64_t nfindings;
        if (!OK(rsd_checkpoint_open(cases[i].path, NULL, &checkpoint)))
            continue;
        OK(rsd_verify(checkpoint, NULL, count_findings, &search, &nfindings, NULL));
        CHECK(search.n == 1, "%s: %d of %lld findings", cases[i].path, search.n,
              (long long)nfindings);
        rsd_checkpoint_close(checkpoint);
    }
}

static void memory_of_buffers(void)
{
    CASE("the buffers of all threads stay below the limit");
    rsd_pool *pool;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_checkpoint *in = NULL;
    OK(rsd_pool_new(8, &pool));
    conversion_make_large(in_folder("plain"), 4, 900);
    OK(rsd_checkpoint_open(in_folder("plain"), NULL, &in));
    for (int64_t limit = 64 << 10; limit <= 1 << 20; limit *= 4) {
        rsd_io io = {.struct_nbytes = sizeof io, .pool = pool, .max_nbytes = limit};
        rsd_convert_options options = {
            .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .overwrite = 1, .io = &io};
        OK(rsd_convert(in, in_folder("out"), &options, &report));
        CHECK(report.nbytes_memory > 0 && report.nbytes_memory <= limit, "%lld of %lld bytes",
              (long long)report.nbytes_memory, (long long)limit);
    }
    rsd_checkpoint_close(in);
    rsd_pool_free(pool);
    folder_remove(in_folder("out"));
    folder_remove(in_folder("plain"));
}

static void make_zeros(const char *path, const char *layout_text)
{
    static char zeros[1 << 20];
    void *arrays[] = {zeros};
    rsd_layout *layout;
    rsd_save_options options = {.struct_nbytes = sizeof options};
    OK(rsd_layout_parse(layout_text, &layout));
    rsd_tensor tensor = {
        .struct_nbytes = sizeof tensor, .name = "w", .layout = layout, .arrays = arrays};
    OK(rsd_save(path, 1, &tensor, &options, NULL));
    rsd_layout_free(layout);
}

static rsd_status choose_bf16(void *context, const rsd_tensor_info *tensor,
                              rsd_tensor_target *target)
{
    (void)context, (void)tensor;
    target->dtype = RSD_BF16;
    return RSD_OK;
}

static void buffers_of_a_cast(void)
{
    CASE("a thread that reads, casts and writes leaves a fifth of the limit for kept records");
    enum { TILE_NBYTES = 1 << 16, LIMIT = 5 * TILE_NBYTES };
    rsd_pool *pool;
    rsd_checkpoint *a = NULL, *b = NULL;
    rsd_report report = {.struct_nbytes = sizeof report};
    int64_t ndiffer = -1;
    OK(rsd_pool_new(1, &pool));
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool, .max_nbytes = LIMIT};
    rsd_convert_options convert = {
        .struct_nbytes = sizeof convert, .format = RSD_FORMAT_DCP, .map = choose_bf16, .io = &io};
    rsd_diff_options diff = {.struct_nbytes = sizeof diff, .map = choose_bf16, .io = &io};
    make_zeros(in_folder("a"), "f16[524288] @ 1 : R");
    OK(rsd_checkpoint_open(in_folder("a"), NULL, &a));
    OK(rsd_convert(a, in_folder("b"), &convert, &report));
    CHECK(report.nbytes_memory > 2 * TILE_NBYTES && report.nbytes_memory <= 4 * TILE_NBYTES,
          "convert: %lld of %d bytes", (long long)report.nbytes_memory, LIMIT);
    OK(rsd_checkpoint_open(in_folder("b"), NULL, &b));
    OK(rsd_diff(a, b, &diff, NULL, NULL, &ndiffer, &report)); /* which has buffers for both */
    CHECK(report.nbytes_memory > 2 * TILE_NBYTES && report.nbytes_memory <= 4 * TILE_NBYTES,
          "diff: %lld of %d bytes", (long long)report.nbytes_memory, LIMIT);
    CHECK(ndiffer == 0);
    rsd_checkpoint_close(a);
    rsd_checkpoint_close(b);
    rsd_pool_free(pool);
    folder_remove(in_folder("a"));
    folder_remove(in_folder("b"));
}

/* Tensors of zeros, cut by columns and compressed. */
static void make_columns(const char *path, int ntensors, int ncolumns, int nrows)
{
    rsd_tensor locals[4];
    char names[4][16], text[64];
    rsd_layout *layout;
    char *zeros = calloc((size_t)nrows, sizeof(float));
    void **arrays = malloc((size_t)ncolumns * sizeof *arrays);
    rsd_save_options options = {.struct_nbytes = sizeof options, .compress = 3};
    snprintf(text, sizeof text, "f32[%d,%d] @ %d : S(1)", nrows, ncolumns, ncolumns);
    OK(rsd_layout_parse(text, &layout));
    for (int i = 0; i < ncolumns; i++)
        arrays[i] = zeros;
    for (int i = 0; i < ntensors; i++) {
        snprintf(names[i], sizeof names[i], "w%d", i);
        locals[i] = (rsd_tensor){.struct_nbytes = sizeof *locals,
                                 .name = names[i],
                                 .layout = layout,
                                 .rank = RSD_EVERY_RANK,
                                 .arrays = arrays};
    }
    OK(rsd_save(path, ntensors, locals, &options, NULL));
    rsd_layout_free(layout);
    free(arrays);
    free(zeros);
}

/* Overwrites the second half of a file, so that its compressed item says how long it is, and then ends. */
static void spoil_half(const char *path)
{
    size_t n = 0;
    char *bytes = read_whole(path, &n);
    FILE *file = fopen(path, "wb");
    CHECK(bytes && file && n > 100);
    memset(bytes + n / 2, 0xff, n - n / 2);
    CHECK(fwrite(bytes, 1, n, file) == n);
    fclose(file);
    free(bytes);
}

static void space_on_disk(void)
{
    CASE("space is reserved for items that were found, not for those that are claimed");
    rsd_convert_options options = {.struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP};
    make_columns(in_folder("zeros"), 1, 1, 1 << 17);
    nreserved = 0;
    OK(conversion_run(in_folder("zeros"), in_folder("out"), &options));
    CHECK(nreserved >= 1 << 19, "%llu bytes were reserved", (unsigned long long)nreserved);
    folder_remove(in_folder("out"));
    spoil_half(in_folder("zeros/__0_0.distcp"));
    nreserved = 0;
    FAILS(RSD_EFORMAT, "zstd stream",
          conversion_run(in_folder("zeros"), in_folder("out"), &options));
    CHECK(nreserved == 0, "%llu bytes were reserved", (unsigned long long)nreserved);
    CHECK(!is_there(in_folder("out")) && conversion_left_nothing(in_folder("out")));
    folder_remove(in_folder("zeros"));
}

static void memory_of_streams(void)
{
    CASE("the windows of all streams of all threads stay below the limit");
    enum { NTENSORS = 3 };
    rsd_pool *pool;
    rsd_checkpoint *checkpoint = NULL;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_io io = {.struct_nbytes = sizeof io, .max_nbytes = 64 << 20};
    char digests[NTENSORS][RSD_DIGEST_NCHARS];
    OK(rsd_pool_new(8, &pool));
    io.pool = pool;
    make_columns(in_folder("columns"), NTENSORS, 40, 1 << 18);
    OK(rsd_checkpoint_open(in_folder("columns"), NULL, &checkpoint));
    FAILS(RSD_ELIMIT, ": 40 compressed boxes have to be read at a time", /* of any tensor */
          rsd_digest(checkpoint, 0, NULL, &io, digests, NULL));
    io.max_nbytes = 120 << 20; /* enough for one tensor at a time */
    OK(rsd_digest(checkpoint, 0, NULL, &io, digests, &report));
    CHECK(report.nbytes_memory > 40 << 20 && report.nbytes_memory <= io.max_nbytes, "%lld bytes",
          (long long)report.nbytes_memory);
    io.max_nbytes = 0; /* the default, enough for two */
    OK(rsd_digest(checkpoint, 0, NULL, &io, digests, &report));
    CHECK(report.nbytes_memory <= 256 << 20, "%lld bytes", (long long)report.nbytes_memory);
    rsd_checkpoint_close(checkpoint);
    rsd_pool_free(pool);
    folder_remove(in_folder("columns"));
}

static void loads_of_claims(void)
{
    CASE("what a file only claims is not loaded, in one call or in several");
    const size_t nbytes = (size_t)40 << 20;
    void *array = malloc(nbytes);
    rsd_checkpoint *checkpoint;
    if (!OK(rsd_checkpoint_open("tests/bad/view_rows_repeated.pt", NULL, &checkpoint)))
        return;
    OK(rsd_read(checkpoint, "a", NULL, 0, array, nbytes));
    FAILS(RSD_EFORMAT,
          "tests/bad/view_rows_repeated.pt: tensors claim 83886112 bytes, in items of 0 bytes "
          "with 0 layers of compression, and the files have ",
          rsd_read(checkpoint, "b", NULL, 0, array, nbytes));
    rsd_checkpoint_close(checkpoint);
    free(array);
}

/* Saves a fused tensor of queries, keys and values for so many heads, compressed. */
static void save_fused(const char *path, int nheads, int ncolumns, float *elements)
{
    char text[64];
    rsd_layout *layout;
    void *arrays[] = {elements};
    rsd_save_options options = {.struct_nbytes = sizeof options, .compress = 3};
    snprintf(text, sizeof text, "f32[%d,%d] @ 1 : R", 3 * nheads, ncolumns);
    OK(rsd_layout_parse(text, &layout));
    rsd_tensor fused = {.struct_nbytes = sizeof fused,
                        .name = "decoder.layers.0.self_attention.linear_qkv.weight",
                        .layout = layout,
                        .rank = RSD_EVERY_RANK,
                        .arrays = arrays};
    OK(rsd_save(path, 1, &fused, &options, NULL));
    rsd_layout_free(layout);
}

static void regions_of_items(void)
{
    CASE("a compressed tensor is split into those of all heads, but not if little is decoded "
         "thousands of times");
    enum { NHEADS = 64, MANY = 1024, NCOLUMNS = 1024 };
    char digests[3][RSD_DIGEST_NCHARS];
    float *elements = calloc((size_t)3 * MANY * NCOLUMNS, sizeof *elements);
    for (uint32_t i = 0; i < 3 * NHEADS * NCOLUMNS; i++)
        elements[i] = (float)(i * 2654435761u);
    for (int many = 0; many < 2; many++) {
        int nheads = many ? MANY : NHEADS;
        rsd_open_options options = {.struct_nbytes = sizeof options,
                                    .names = "megatron-llama",
                                    .nheads = nheads,
                                    .nkv_heads = nheads};
        rsd_checkpoint *checkpoint = NULL;
        if (many)
            memset(elements, 0, (size_t)3 * NHEADS * NCOLUMNS * sizeof *elements);
        save_fused(in_folder("fused"), nheads, NCOLUMNS, elements);
        OK(rsd_checkpoint_open(in_folder("fused"), &options, &checkpoint));
        if (many)
            FAILS(RSD_EFORMAT, "tensors claim",
                  rsd_digest(checkpoint, 0, NULL, NULL, digests, NULL));
        else
            OK(rsd_digest(checkpoint, 0, NULL, NULL, digests, NULL));
        rsd_checkpoint_close(checkpoint);
        folder_remove(in_folder("fused"));
    }
    free(elements);
}

static void value_named_twice(void)
{
    CASE("of a value that is named twice the last one counts, as in torch");
    rsd_checkpoint *checkpoint;
    char *json = NULL;
    if (!OK(rsd_checkpoint_open("tests/bad/dcp_value_twice", NULL, &checkpoint)))
        return;
    OK(rsd_checkpoint_value(checkpoint, 0, &json));
    CHECK(json && strcmp(json, "2") == 0, "%s", json ? json : "NULL");
    CHECK(rsd_checkpoint_nvalues(checkpoint) == 1);
    rsd_free(json);
    rsd_checkpoint_close(checkpoint);
}

static void hidden_characters(void)
{
    CASE("characters that hide, turn or control text, and bytes that are not UTF-8, are escaped");
    static const char *const hidden[] = {
        "\x1b[31m",     "\xe2\x80\xae", "\xe2\x80\x8b", "\xe2\x80\x8f", "\xe2\x81\xa6",
        "\xef\xbb\xbf", "\xc2\xad",     "\xe1\xa0\x8e", "\xef\xb8\x8f", "\xf3\xa0\x81\x81",
        "\xd8\x9c",     "\xc2\x9b",     "\n",           "\x7f"};
    rsd_checkpoint *checkpoint;
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) {
        char path[300];
        snprintf(path, sizeof path, "%s/a%sb", folder, hidden[i]);
        CHECK(rsd_checkpoint_open(path, NULL, &checkpoint) == RSD_ENOENT);
        CHECK(!strstr(rsd_error(), hidden[i]) && strstr(rsd_error(), "/a\\") &&
                  strchr(rsd_error(), 'b'),
              "%zu: %s", i, rsd_error());
    }
    CHECK(rsd_checkpoint_open("a\xe9z", NULL, &checkpoint) == RSD_ENOENT);
    CHECK(strstr(rsd_error(), "a\\xe9z") != NULL, "%s", rsd_error());
    CHECK(rsd_checkpoint_open("\xc3\xa9\xf0\x9f\x98\x80", NULL, &checkpoint) == RSD_ENOENT);
    CHECK(strstr(rsd_error(), "\xc3\xa9\xf0\x9f\x98\x80") != NULL, "%s", rsd_error());
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("limits"));
    few_open_files();
    memory_of_zstd();
    space_on_disk();
    parts_of_records();
    boxes_and_elements();
    memory_of_buffers();
    buffers_of_a_cast();
    memory_of_streams();
    loads_of_claims();
    regions_of_items();
    value_named_twice();
    hidden_characters();
    folder_remove(folder);
    return tap_end();
}
