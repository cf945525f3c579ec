/* test_items.c - items that another planner assigned to a file have the same bytes as those of a save. */
#include "folder.h"
#include "tap.h"

#include "reshard_experimental.h"

#include <stdlib.h>
#include <sys/stat.h>

enum { ROWS = 300, COLUMNS = 70, NITEMS = 5 };

static const char *folder;
static float plain[ROWS][COLUMNS], across[COLUMNS][ROWS], one = 3;
static unsigned char lines[2 * ROWS];
static const int64_t shape[2] = {ROWS, COLUMNS}, length[1] = {ROWS}, nothing[2] = {0, 7};

static void fill(void)
{
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++)
            plain[i][j] = across[j][i] = (float)(i * 1000 + j);
    for (int i = 0; i < 2 * ROWS; i++)
        lines[i] = (unsigned char)(i * 7);
}

/* The same tensors, saved as a checkpoint of one rank. */
static void save(const char *path, int compress)
{
    static const char *const layouts[NITEMS - 1] = {"f32[300,70] @ 1:R", "u8[300] @ 1:R",
                                                    "f32[] @ 1:R", "f32[0,7] @ 1:R"};
    static const char *const names[NITEMS - 1] = {"plain", "bytes", "one", "nothing"};
    void *arrays[NITEMS - 1] = {plain, lines, &one, plain};
    rsd_tensor locals[NITEMS - 1];
    rsd_layout *made[NITEMS - 1] = {0};
    for (int i = 0; i < NITEMS - 1; i++) {
        OK(rsd_layout_parse(layouts[i], &made[i]));
        locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                 .name = names[i],
                                 .layout = made[i],
                                 .arrays = &arrays[i]};
    }
    static const int64_t two[1] = {2};
    locals[1].strides = two; /* every other byte */
    rsd_value value = {.struct_nbytes = sizeof value, .name = "step", .json = "7"};
    rsd_save_options options = {
        .struct_nbytes = sizeof options, .compress = compress, .nvalues = 1, .values = &value};
    OK(rsd_save(path, NITEMS - 1, locals, &options, NULL));
    for (int i = 0; i < NITEMS - 1; i++)
        rsd_layout_free(made[i]);
}

/* The item of its value, as the checkpoint has it. */
static void *value_item(const char *path, size_t *n)
{
    rsd_checkpoint *checkpoint = NULL;
    void *item = NULL;
    if (OK(rsd_checkpoint_open(path, NULL, &checkpoint)))
        OK(rsd_checkpoint_value_item(checkpoint, 0, &item, n));
    CHECK(rsd_checkpoint_value_item(checkpoint, 1, &item, n) == RSD_EINVAL);
    rsd_checkpoint_close(checkpoint);
    return item;
}

static void list_items(rsd_item items[NITEMS], const void *value, size_t nvalue)
{
    static const int64_t two[1] = {2};
    items[0] = (rsd_item){.name = "step", .data = value, .nbytes = nvalue};
    items[1] = (rsd_item){.dtype = RSD_F32, .ndim = 2, .shape = shape, .data = plain};
    items[2] =
        (rsd_item){.dtype = RSD_U8, .ndim = 1, .shape = length, .strides = two, .data = lines};
    items[3] = (rsd_item){.dtype = RSD_F32, .shape = shape, .data = &one};
    items[4] = (rsd_item){.dtype = RSD_F32, .ndim = 2, .shape = nothing, .data = NULL};
    for (int i = 0; i < NITEMS; i++)
        items[i].struct_nbytes = sizeof(rsd_item);
}

static void as_saved(int compress, rsd_pool *pool)
{
    char path[512], file[512];
    size_t nvalue;
    rsd_item items[NITEMS];
    uint64_t places[2 * NITEMS], again[2 * NITEMS];
    snprintf(path, sizeof path, "%s", path_in(folder, compress ? "zstd" : "saved"));
    snprintf(file, sizeof file, "%s", path_in(folder, "items"));
    save(path, compress);
    void *value = value_item(path, &nvalue);
    list_items(items, value, nvalue);
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
    rsd_items_options options = {
        .struct_nbytes = sizeof options, .io = &io, .compress = compress, .sync = 1};
    rsd_report report = {.struct_nbytes = sizeof report};
    OK(rsd_dcp_write_items(file, NITEMS, items, &options, places, &report));
    CHECK(same_files(file, path_in(path, "__0_0.distcp")));
    CHECK(places[0] == 0);
    for (int i = 1; i < NITEMS; i++)
        CHECK(places[2 * i] == places[2 * i - 2] + places[2 * i - 1], "item %d", i);
    CHECK(report.nbytes_written == (int64_t)(places[2 * NITEMS - 2] + places[2 * NITEMS - 1]));

    /* In two calls, over a longer file. */
    options.sync = 0;
    OK(rsd_dcp_write_items(file, 2, items, &options, again, NULL));
    options.offset = again[2] + again[3];
    OK(rsd_dcp_write_items(file, NITEMS - 2, items + 2, &options, again + 4, NULL));
    CHECK(memcmp(places, again, sizeof places) == 0);
    CHECK(same_files(file, path_in(path, "__0_0.distcp")));
    rsd_free(value);
}

/* A transposed array is stored in the order of its memory, with its strides. */
static void kept_strides(void)
{
    static const int64_t turned[2] = {1, ROWS};
    uint64_t places[2];
    size_t n = 0;
    rsd_item item = {.struct_nbytes = sizeof item,
                     .dtype = RSD_F32,
                     .ndim = 2,
                     .shape = shape,
                     .strides = turned,
                     .data = across};
    OK(rsd_dcp_write_items(path_in(folder, "turned"), 1, &item, NULL, places, NULL));
    char *bytes = read_whole(path_in(folder, "turned"), &n);
    bool found = false;
    for (size_t at = 0; bytes && at + sizeof across <= n && !found; at += 64)
        found = memcmp(bytes + at, across, sizeof across) == 0;
    CHECK(found, "the array in its own order");
    CHECK(bytes && memmem(bytes, 512, "K\x46\x86q\x06K\x01M\x2c\x01\x86", 10), "its strides");
    free(bytes);

    /* Columns of a wider array are not dense, so they are gathered. */
    static const int64_t apart[2] = {2 * COLUMNS, 2};
    float *both = calloc(ROWS, 2 * COLUMNS * sizeof *both);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++)
            both[(size_t)i * 2 * COLUMNS + 2 * (size_t)j] = plain[i][j];
    item.strides = apart;
    item.data = both;
    OK(rsd_dcp_write_items(path_in(folder, "apart"), 1, &item, NULL, places, NULL));
    item.strides = NULL;
    item.data = plain;
    OK(rsd_dcp_write_items(path_in(folder, "dense"), 1, &item, NULL, places, NULL));
    CHECK(same_files(path_in(folder, "apart"), path_in(folder, "dense")));
    free(both);
}

/* A plain item is its elements, row-major, behind bytes of the caller. */
static void plain_elements(void)
{
    static const int64_t turned[2] = {1, ROWS};
    uint64_t places[6];
    size_t n = 0;
    rsd_item items[3] = {{.struct_nbytes = sizeof *items, .data = "header", .nbytes = 6},
                         {.struct_nbytes = sizeof *items,
                          .dtype = RSD_F32,
                          .ndim = 2,
                          .shape = shape,
                          .strides = turned,
                          .data = across},
                         {.struct_nbytes = sizeof *items,
                          .dtype = RSD_U8,
                          .ndim = 1,
                          .shape = length,
                          .data = lines}};
    rsd_items_options options = {.struct_nbytes = sizeof options, .plain = 1};
    OK(rsd_dcp_write_items(path_in(folder, "plain"), 3, items, &options, places, NULL));
    CHECK(!is_there(path_in(folder, "plain")), "a file that is not complete");
    char *bytes = read_whole(path_in(folder, "plain.part"), &n);
    CHECK(n == 6 + sizeof plain + ROWS && places[2] == 6 && places[4] == 6 + sizeof plain);
    CHECK(bytes && memcmp(bytes, "header", 6) == 0);
    CHECK(bytes && memcmp(bytes + 6, plain, sizeof plain) == 0, "the order of its dims");
    CHECK(bytes && memcmp(bytes + 6 + sizeof plain, lines, ROWS) == 0);
    free(bytes);
    options.compress = 3;
    CHECK(rsd_dcp_write_items(path_in(folder, "plain"), 3, items, &options, places, NULL) ==
          RSD_EINVAL);
}

static void refused(void)
{
    static const int64_t negative[2] = {3, -1};
    uint64_t places[2];
    rsd_item good = {
        .struct_nbytes = sizeof good, .dtype = RSD_F32, .ndim = 2, .shape = shape, .data = plain};
    const char *file = path_in(folder, "refused");
    rsd_item bad = good;
    bad.dtype = 99;
    CHECK(rsd_dcp_write_items(file, 1, &bad, NULL, places, NULL) == RSD_EINVAL);
    bad = good;
    bad.shape = negative;
    CHECK(rsd_dcp_write_items(file, 1, &bad, NULL, places, NULL) == RSD_EINVAL);
    bad = good;
    bad.strides = negative;
    CHECK(rsd_dcp_write_items(file, 1, &bad, NULL, places, NULL) == RSD_EINVAL);
    static const int64_t far[2] = {INT64_MAX / 2, 1};
    bad.strides = far;
    CHECK(rsd_dcp_write_items(file, 1, &bad, NULL, places, NULL) == RSD_ELIMIT);
    CHECK(strstr(rsd_error(), "of dim 0 is 2^63 bytes or more"), "%s", rsd_error());
    bad = good;
    bad.data = NULL;
    CHECK(rsd_dcp_write_items(file, 1, &bad, NULL, places, NULL) == RSD_EINVAL);
    bad = good;
    bad.ndim = RSD_MAX_DIMS + 1;
    CHECK(rsd_dcp_write_items(file, 1, &bad, NULL, places, NULL) == RSD_EINVAL);
    rsd_items_options options = {.struct_nbytes = sizeof options, .compress = 100};
    CHECK(rsd_dcp_write_items(file, 1, &good, &options, places, NULL) == RSD_EINVAL);
    CHECK(rsd_dcp_write_items(file, -1, &good, NULL, places, NULL) == RSD_EINVAL);
    CHECK(!is_there(file));
    options = (rsd_items_options){.struct_nbytes = sizeof options, .offset = 100};
    CHECK(rsd_dcp_write_items(file, 1, &good, &options, places, NULL) == RSD_EIO);
    OK(rsd_dcp_write_items(file, 0, NULL, NULL, places, NULL));
    CHECK(rsd_dcp_write_items(file, 1, &good, &options, places, NULL) == RSD_EMISMATCH);
    CHECK(strstr(rsd_error(), "0 bytes, fewer than the 100"), "%s", rsd_error());
    CHECK(rsd_dcp_write_items(path_in(folder, "not/there"), 1, &good, NULL, places, NULL) ==
          RSD_EIO);
}

static rsd_status count_name(void *context, const char *name)
{
    int *counts = context;
    counts[0]++;
    counts[1] += strcmp(name, "kept") == 0;
    return counts[0] == 100 ? RSD_ECANCELLED : RSD_OK;
}

/* The files of a directory are listed without directories, and removed by name. */
static void listed_files(void)
{
    static const char *const names[] = {"gone", "never there"}, *const outside[] = {"../x"};
    char path[512], below[512];
    int counts[2] = {0};
    uint64_t places[2];
    rsd_item item = {.struct_nbytes = sizeof item, .data = "x", .nbytes = 1};
    snprintf(path, sizeof path, "%s", path_in(folder, "listed"));
    OK(rsd_dcp_list_files(path, NULL, count_name, counts));
    CHECK(counts[0] == 0, "a directory that does not exist");
    snprintf(below, sizeof below, "%s", path_in(path, "below"));
    CHECK(mkdir(path, 0777) == 0 && mkdir(below, 0777) == 0);
    OK(rsd_dcp_write_items(path_in(path, "kept"), 1, &item, NULL, places, NULL));
    OK(rsd_dcp_write_items(path_in(path, "gone"), 1, &item, NULL, places, NULL));
    OK(rsd_dcp_remove_files(path, NULL, 2, names));
    OK(rsd_dcp_list_files(path, NULL, count_name, counts));
    CHECK(counts[0] == 1 && counts[1] == 1);
    CHECK(rsd_dcp_remove_files(path, NULL, 1, outside) != RSD_OK);
    counts[0] = 99;
    CHECK(rsd_dcp_list_files(path, NULL, count_name, counts) == RSD_ECANCELLED);
    CHECK(rsd_dcp_list_files(path_in(path, "kept"), NULL, count_name, counts) == RSD_EINVAL);
}

static void one_metadata(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s", path_in(folder, "ranks"));
    save(path, 0);
    rsd_checkpoint *checkpoint = NULL;
    rsd_open_options options = {.struct_nbytes = sizeof options, .metadata = ".metadata"};
    if (OK(rsd_checkpoint_open(path, &options, &checkpoint)))
        CHECK(rsd_checkpoint_ntensors(checkpoint) == NITEMS - 1);
    rsd_checkpoint_close(checkpoint);
    options.metadata = "__3.metadata";
    CHECK(rsd_checkpoint_open(path, &options, &checkpoint) == RSD_ENOENT, "%s", rsd_error());
    options.metadata = "../ranks/.metadata";
    CHECK(rsd_checkpoint_open(path, &options, &checkpoint) == RSD_EINVAL, "%s", rsd_error());
}

int main(void)
{
    char name[512];
    rsd_pool *pool = NULL;
    snprintf(name, sizeof name, "%s", folder_new("items"));
    folder = name;
    fill();
    OK(rsd_pool_new(3, &pool));
    CASE("the bytes equal those of a save, in one call and in two");
    as_saved(0, NULL);
    folder_remove(path_in(folder, "saved"));
    as_saved(0, pool);
    CASE("compressed items");
    as_saved(3, pool);
    CASE("an array with dims in another order is written without a copy");
    kept_strides();
    CASE("plain items are elements in the order of dims");
    plain_elements();
    CASE("invalid arguments are refused");
    refused();
    CASE("files of a directory are listed and removed");
    listed_files();
    CASE("one metadata file selects the content of a directory");
    one_metadata();
    rsd_pool_free(pool);
    folder_remove(folder);
    return tap_end();
}
