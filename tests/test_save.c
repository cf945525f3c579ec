/* test_save.c - tensors of any layout are saved, and loaded into any other: by one call for all ranks, by one call per
 * rank, compressed, in the background, and over an older checkpoint. */
#include "folder.h"
#include "oracle.h"
#include "random.h"
#include "tap.h"
#include "workers.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *folder;

/* Some tensors with their layouts and memory. */
enum { MOST_TENSORS = 4 };
struct tensors {
    int n;
    struct random_tensor about[MOST_TENSORS];
    rsd_layout *layout[MOST_TENSORS];
    struct memory memory[MOST_TENSORS];
    rsd_tensor local[MOST_TENSORS];
    char name[MOST_TENSORS][32];
};

static rsd_layout *random_layout(struct random *random, const struct random_tensor *about)
{
    char side[4096], text[4400];
    rsd_layout *layout = NULL;
    random_side(random, about, NULL, side, sizeof side);
    snprintf(text, sizeof text, "%s @ %s", about->text, side);
    CHECK(rsd_layout_parse(text, &layout) == RSD_OK, "%s: %s", text, rsd_error());
    return layout;
}

/* Boxes that overlap and begin at the same index cannot be stored. Some random layouts have them. */
static bool can_be_saved(const rsd_layout *layout)
{
    rsd_coverage check = {.struct_nbytes = sizeof check};
    return rsd_layout_coverage(layout, &check) == RSD_OK && check.kind <= RSD_COVERS_EVENLY;
}

static void make_tensors(struct random *random, struct tensors *tensors)
{
    static const char *const dtypes[] = {"f32", "bf16", "i64", "u8", "f8e4m3", "c64"};
    tensors->n = 1 + (int)random_below(random, MOST_TENSORS);
    for (int i = 0; i < tensors->n; i++) {
        tensors->about[i] = random_tensor(random, dtypes[random_below(random, 6)]);
        while (!can_be_saved(tensors->layout[i] = random_layout(random, &tensors->about[i])))
            rsd_layout_free(tensors->layout[i]);
        tensors->memory[i] = oracle_memory(tensors->layout[i], NULL);
        oracle_fill(tensors->layout[i], NULL, &tensors->memory[i]);
        snprintf(tensors->name[i], sizeof tensors->name[i], "layers.%d.weight", i);
        tensors->local[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                         .name = tensors->name[i],
                                         .layout = tensors->layout[i],
                                         .rank = RSD_EVERY_RANK,
                                         .arrays = tensors->memory[i].array};
    }
}

static void drop_tensors(struct tensors *tensors)
{
    for (int i = 0; i < tensors->n; i++) {
        oracle_memory_free(&tensors->memory[i]);
        rsd_layout_free(tensors->layout[i]);
    }
}

/* Loads every tensor into a random layout, and compares. */
static void check_saved(struct random *random, const char *path, const struct tensors *tensors)
{
    rsd_checkpoint *checkpoint = NULL;
    if (!OK(rsd_checkpoint_open(path, NULL, &checkpoint)))
        return;
    CHECK(rsd_checkpoint_ntensors(checkpoint) == tensors->n);
    for (int i = 0; i < tensors->n; i++) {
        rsd_layout *layout = random_layout(random, &tensors->about[i]);
        struct memory memory = oracle_memory(layout, NULL);
        rsd_tensor local = {.struct_nbytes = sizeof local,
                            .name = tensors->name[i],
                            .layout = layout,
                            .rank = RSD_EVERY_RANK,
                            .arrays = memory.array};
        rsd_report report = {.struct_nbytes = sizeof report};
        if (OK(rsd_load(checkpoint, 1, &local, NULL, &report)))
            CHECK(oracle_check(tensors->layout[i], layout, NULL, &memory), "%s into another layout",
                  tensors->about[i].text);
        oracle_memory_free(&memory);
        rsd_layout_free(layout);
    }
    rsd_checkpoint_close(checkpoint);
}

static int64_t world_of(const struct tensors *tensors)
{
    int64_t world = 1;
    for (int i = 0; i < tensors->n; i++)
        if (rsd_layout_world(tensors->layout[i]) > world)
            world = rsd_layout_world(tensors->layout[i]);
    return world;
}

/* ---- kinds of saves ---- */

static void save_at_once(void)
{
    CASE("any layout is saved by one call, and loaded into any other");
    struct random random = {7};
    rsd_pool *pool;
    OK(rsd_pool_new(3, &pool));
    for (int i = 0; i < 150; i++) {
        struct tensors tensors;
        make_tensors(&random, &tensors);
        rsd_io io = {.struct_nbytes = sizeof io, .pool = i % 2 ? pool : NULL};
        rsd_save_options options = {.struct_nbytes = sizeof options,
                                    .io = &io,
                                    .overwrite = 1,
                                    .compress = i % 5 == 4 ? 1 : 0,
                                    .to_lowest_rank = i % 3 == 0};
        rsd_report report = {.struct_nbytes = sizeof report};
        const char *path = path_in(folder, "at_once");
        if (OK(rsd_save(path, tensors.n, tensors.local, &options, &report))) {
            CHECK(report.nfiles_written == world_of(&tensors), "%lld files",
                  (long long)report.nfiles_written);
            CHECK(count_entries(path) == world_of(&tensors) + 1, "%d entries", count_entries(path));
            check_saved(&random, path, &tensors);
        }
        drop_tensors(&tensors);
    }
    rsd_pool_free(pool);
}

/* A save by ranks that are threads: the files are those of one process. */
struct by_rank {
    struct tensors tensors;
    const char *path;
    int32_t compress;
};

static rsd_status save_rank(struct worker *worker)
{
    const struct by_rank *task = worker->task;
    rsd_tensor local[MOST_TENSORS];
    for (int k = 0; k < task->tensors.n; k++) {
        int64_t first, count;
        rsd_layout_arrays_of(task->tensors.layout[k], worker->transport.rank, &first, &count);
        local[k] = task->tensors.local[k];
        local[k].rank = worker->transport.rank;
        local[k].arrays = task->tensors.memory[k].array + first;
    }
    rsd_io io = {.struct_nbytes = sizeof io, .transport = &worker->transport};
    rsd_save_options options = {
        .struct_nbytes = sizeof options, .overwrite = 1, .compress = task->compress, .io = &io};
    return rsd_save(task->path, task->tensors.n, local, &options, &worker->report);
}

static void save_by_rank(void)
{
    CASE("every rank saves its own arrays of any layout");
    struct random random = {8};
    for (int i = 0; i < 60; i++) {
        struct by_rank task = {.compress = i % 4 == 3};
        struct workers workers;
        char path[256], once[256];
        make_tensors(&random, &task.tensors);
        int64_t world = world_of(&task.tensors);
        snprintf(path, sizeof path, "%s/by_rank", folder);
        snprintf(once, sizeof once, "%s/by_all", folder);
        rsd_save_options options = {
            .struct_nbytes = sizeof options, .overwrite = 1, .compress = task.compress};
        task.path = path;
        if (world <= MOST_WORKERS) {
            workers_run(&workers, (int32_t)world, save_rank, &task, 0);
            for (int32_t rank = 0; rank < workers.n; rank++)
                CHECK(workers.list[rank].status == RSD_OK, "%s", workers.list[rank].message);
            check_saved(&random, path, &task.tensors);
            OK(rsd_save(once, task.tensors.n, task.tensors.local, &options, NULL));
            CHECK(same_folders(path, once));
            workers_free(&workers);
        }
        drop_tensors(&task.tensors);
    }
}

static void save_in_background(void)
{
    CASE("a save in the background writes the data of its start");
    struct random random = {9};
    rsd_pool *pool;
    OK(rsd_pool_new(2, &pool));
    for (int i = 0; i < 30; i++) {
        struct tensors tensors;
        make_tensors(&random, &tensors);
        rsd_io io = {.struct_nbytes = sizeof io, .pool = i % 2 ? pool : NULL};
        rsd_save_options options = {.struct_nbytes = sizeof options, .io = &io, .overwrite = 1};
        rsd_async_save *saving;
        rsd_report report = {.struct_nbytes = sizeof report};
        const char *path = path_in(folder, "background");
        if (OK(rsd_save_start(path, tensors.n, tensors.local, &options, &saving))) {
            for (int k = 0; k < tensors.n; k++)
                for (int64_t a = 0; a < tensors.memory[k].narrays; a++)
                    if (tensors.memory[k].nbytes[a])
                        memset(tensors.memory[k].array[a], 0x77, tensors.memory[k].nbytes[a]);
            OK(rsd_save_wait(saving, &report));
            check_saved(&random, path, &tensors);
        }
        drop_tensors(&tensors);
    }
    rsd_pool_free(pool);
}

static void wrong_report(void)
{
    CASE("a report of the wrong size fails before anything is published");
    rsd_layout *layout;
    float numbers[4] = {1, 2, 3, 4};
    void *arrays[] = {numbers};
    rsd_async_save *saving;
    rsd_report report = {.struct_nbytes = 3};
    const char *path = path_in(folder, "wrong_report");
    OK(rsd_layout_parse("f32[4] @ 1:R", &layout));
    rsd_tensor tensor = {
        .struct_nbytes = sizeof tensor, .name = "w", .layout = layout, .arrays = arrays};
    FAILS(RSD_EINVAL, "rsd_report", rsd_save(path, 1, &tensor, NULL, &report));
    CHECK(!is_there(path));
    if (OK(rsd_save_start(path, 1, &tensor, NULL, &saving)))
        FAILS(RSD_EINVAL, "rsd_report", rsd_save_wait(saving, &report));
    CHECK(!is_there(path), "the checkpoint was published");
    CHECK(!is_there(path_in(folder, "wrong_report.reshard-part")));
    rsd_layout_free(layout);
}

/* ---- existing files ---- */

static rsd_status save_one(const char *path, const char *text, int overwrite)
{
    rsd_layout *layout;
    OK(rsd_layout_parse(text, &layout));
    struct memory memory = oracle_memory(layout, NULL);
    rsd_tensor local = {.struct_nbytes = sizeof local,
                        .name = "w",
                        .layout = layout,
                        .rank = RSD_EVERY_RANK,
                        .arrays = memory.array};
    rsd_save_options options = {.struct_nbytes = sizeof options, .overwrite = overwrite};
    rsd_status status = rsd_save(path, 1, &local, &options, NULL);
    oracle_memory_free(&memory);
    rsd_layout_free(layout);
    return status;
}

static void write_note(const char *path)
{
    FILE *file = fopen(path, "w");
    if (CHECK(file != NULL)) {
        fputs("a note\n", file);
        fclose(file);
    }
}

static void existing(void)
{
    CASE("an existing checkpoint is kept, or replaced if requested; other files stay");
    const char *path = path_in(folder, "existing");
    char text[256];
    OK(save_one(path, "f32[8] @ 4 : S(0)", 0));
    FAILS(RSD_EEXIST, "already", save_one(path, "f32[8] @ 2 : S(0)", 0));
    write_note(path_in(path, "notes.txt"));
    OK(save_one(path, "f32[8] @ 2 : S(0)", 1));
    CHECK(is_there(path_in(path, "notes.txt")));
    CHECK(!is_there(path_in(path, "__2_0.distcp")));
    CHECK(count_entries(path) == 4, "%d", count_entries(path));
    snprintf(text, sizeof text, "%s.reshard-part", path);
    CHECK(!is_there(text));

    const char *other = path_in(folder, "other");
    mkdir(other, 0777);
    OK(save_one(other, "f32[8] @ 2 : S(0)", 0)); /* an empty directory is replaced */
    folder_remove(other);
    mkdir(other, 0777);
    write_note(path_in(other, "notes.txt"));
    FAILS(RSD_EEXIST, "not a checkpoint", save_one(other, "f32[8] @ 2 : S(0)", 1));
    CHECK(is_there(path_in(other, "notes.txt")));
    const char *link = path_in(folder, "link");
    CHECK(symlink("existing", link) == 0);
    FAILS(RSD_EEXIST, "not a directory", save_one(link, "f32[8] @ 2 : S(0)", 1));
}

static void refused(void)
{
    CASE("invalid saves are refused before a file is created");
    const char *path = path_in(folder, "refused");
    FAILS(RSD_EINVAL, "Partial", save_one(path, "f32[8] @ 2 : P", 0));
    CHECK(!is_there(path) && !is_there("refused.reshard-part"));
    rsd_layout *layout;
    float array[8] = {0};
    void *arrays[] = {array, NULL};
    OK(rsd_layout_parse("f32[8] @ 2 : S(0)", &layout));
    rsd_tensor local = {.struct_nbytes = sizeof local,
                        .name = "w",
                        .layout = layout,
                        .rank = RSD_EVERY_RANK,
                        .arrays = arrays};
    FAILS(RSD_EINVAL, "rank 1 is NULL", rsd_save(path, 1, &local, NULL, NULL));
    local.rank = 0;
    FAILS(RSD_EMISMATCH, "rank 1 with box [4:8]", rsd_save(path, 1, &local, NULL, NULL));
    rsd_save_options options = {.struct_nbytes = sizeof options, .nranks = 1};
    FAILS(RSD_EINVAL, "layouts name 2", rsd_save(path, 1, &local, &options, NULL));
    options.nranks = (1 << 17) + 1;
    FAILS(RSD_ELIMIT, "131073 ranks need as many files; at most 131072",
          rsd_save(path, 1, &local, &options, NULL));
    rsd_value value = {.struct_nbytes = sizeof value, .name = "step", .json = "{broken"};
    options = (rsd_save_options){.struct_nbytes = sizeof options, .nvalues = 1, .values = &value};
    FAILS(RSD_EINVAL, "step", rsd_save(path, 1, &local, &options, NULL));
    CHECK(!is_there(path));
    rsd_layout_free(layout);
}

static void values_survive(void)
{
    CASE("values and nested names are restored");
    static const char json[] =
        "{\"lr\":0.125,\"steps\":[1,-2,3000000000,null,true],\"name\":\"\\u00e9\"}";
    const char *path = path_in(folder, "values");
    rsd_layout *layout;
    float array[8] = {0};
    void *arrays[] = {array};
    rsd_value values[] = {{.struct_nbytes = sizeof values[0], .name = "config", .json = json},
                          {.struct_nbytes = sizeof values[0],
                           .name = "opt.0.step",
                           .json = "7",
                           .path = "[\"opt\",0,\"step\"]"}};
    rsd_save_options options = {.struct_nbytes = sizeof options, .nvalues = 2, .values = values};
    OK(rsd_layout_parse("f32[8] @ 1 : R", &layout));
    rsd_tensor local = {.struct_nbytes = sizeof local,
                        .name = "model.w",
                        .path = "[\"model\",\"w\"]",
                        .layout = layout,
                        .rank = 0,
                        .arrays = arrays};
    OK(rsd_save(path, 1, &local, &options, NULL));
    rsd_checkpoint *checkpoint;
    if (OK(rsd_checkpoint_open(path, NULL, &checkpoint))) {
        CHECK(rsd_checkpoint_nvalues(checkpoint) == 2);
        char *text = NULL;
        if (OK(rsd_checkpoint_value(checkpoint, 0, &text)) && CHECK(text != NULL))
            CHECK(strcmp(text,
                         "{\"lr\": 0.125, \"steps\": [1, -2, 3000000000, null, true], \"name\": "
                         "\"é\"}") == 0,
                  "%s", text);
        rsd_free(text);
        text = NULL;
        if (OK(rsd_checkpoint_value(checkpoint, 1, &text)) && CHECK(text != NULL))
            CHECK(strcmp(text, "7") == 0, "%s", text);
        rsd_free(text);
        const char *way = rsd_checkpoint_value_path(checkpoint, 1);
        CHECK(way && strcmp(way, "[\"opt\", 0, \"step\"]") == 0, "%s", way);
        CHECK(!rsd_checkpoint_value_path(checkpoint, 2) &&
              !rsd_checkpoint_value_path(checkpoint, -1));
        rsd_checkpoint_close(checkpoint);
    }
    rsd_layout_free(layout);
}

/* Rows of one file that are far apart are read separately. */
static void rows_apart(void)
{
    enum { NROWS = 8000, WIDTH = 32, NWANTED = 4 };
    static float whole[NROWS][WIDTH], rows[NWANTED][WIDTH];
    static const int32_t ranks[NWANTED] = {0};
    static const int64_t lo[2 * NWANTED] = {7000, 0, 3, 0, 4, 0, 2500, 0},
                                shape[2] = {NROWS, WIDTH},
                                len[2 * NWANTED] = {1, WIDTH, 1, WIDTH, 1, WIDTH, 1, WIDTH};
    void *all = whole, *wanted[NWANTED] = {rows[0], rows[1], rows[2], rows[3]};
    rsd_layout *one = NULL, *some = NULL;
    rsd_checkpoint *checkpoint = NULL;
    rsd_report report = {.struct_nbytes = sizeof report};
    CASE("rows that are far apart are read separately");
    for (int i = 0; i < NROWS; i++)
        for (int j = 0; j < WIDTH; j++)
            whole[i][j] = (float)(i * WIDTH + j);
    OK(rsd_layout_parse("f32[8000,32] @ 1:R", &one));
    OK(rsd_layout_new_boxes(RSD_F32, 2, shape, NWANTED, ranks, lo, len, &some));
    rsd_tensor local = {.struct_nbytes = sizeof local, .name = "w", .layout = one, .arrays = &all};
    OK(rsd_save(path_in(folder, "apart"), 1, &local, NULL, NULL));
    local.layout = some;
    local.arrays = wanted;
    if (OK(rsd_checkpoint_open(path_in(folder, "apart"), NULL, &checkpoint)))
        OK(rsd_load(checkpoint, 1, &local, NULL, &report));
    CHECK(
        report.nbytes_read == report.nbytes_needed && report.nbytes_needed == (int64_t)sizeof rows,
        "%lld bytes read for %lld", (long long)report.nbytes_read, (long long)report.nbytes_needed);
    for (size_t i = 0; i < NWANTED; i++)
        CHECK(memcmp(rows[i], whole[lo[2 * i]], sizeof rows[i]) == 0, "row %lld",
              (long long)lo[2 * i]);
    rsd_checkpoint_close(checkpoint);
    rsd_layout_free(one);
    rsd_layout_free(some);
}

int main(void)
{
    static char name[256];
    snprintf(name, sizeof name, "%s", folder_new("save"));
    folder = name;
    save_at_once();
    save_by_rank();
    save_in_background();
    wrong_report();
    existing();
    refused();
    values_survive();
    rows_apart();
    folder_remove(folder);
    return tap_end();
}
