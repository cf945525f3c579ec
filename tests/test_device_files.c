/* test_device_files.c - checkpoints of arrays on a GPU: the files are those of arrays in host memory, to the byte,
 * and they are loaded into memory of any kind, with any strides, and converted to the bits of the CPU. */
#include "folder.h"
#include "gpu.h"
#include "random.h"
#include "tap.h"
#include "workers.h"

#include "reshard_experimental.h"

#include <stdlib.h>
#include <string.h>

static struct random dice = {5};
static const char *folder;

/* Of any device. */
static enum gpu_kind any_kind(void *context)
{
    (void)context;
    gpu_use_device((int)random_below(&dice, gpu_ndevices()));
    return (enum gpu_kind)random_below(&dice, NGPU_KINDS);
}

struct problem {
    const char *saved, *loaded; /* layouts */
    rsd_layout *from, *to;
    struct memory memory;
    rsd_tensor tensor;
};

static const struct problem some_problems[] = {
    {.saved = "f32[61,47] @ 4:S0", .loaded = "f32[61,47] @ 2x2:S1,S0"},
    {.saved = "bf16[300,700] @ 2:S1", .loaded = "f32[300,700] @ 3:S0"},
    {.saved = "f64[40,5,9] @ 2x2:R,S2", .loaded = "f16[40,5,9] @ 4:S0"},
    {.saved = "i64[1000] @ 4:C(0,7)", .loaded = "i32[1000] @ 2:S0"},
    {.saved = "f8e4m3[33,65] @ 4:S0", .loaded = "f8e4m3[33,65] @ 4:S1"},
    {.saved = "c64[19,21] @ 2:S0", .loaded = "c128[19,21] @ 2:S1"},
    {.saved = "u8[] @ 2:R", .loaded = "u8[] @ 1:R"},
    {.saved = "f32[0,4] @ 2:S0", .loaded = "f32[0,4] @ 1:R"},
};
enum { NPROBLEMS = sizeof some_problems / sizeof *some_problems };

static void make_problems(struct problem *problems)
{
    for (int i = 0; i < NPROBLEMS; i++) {
        struct problem *problem = &problems[i];
        static char names[NPROBLEMS][32];
        *problem = some_problems[i];
        OK(rsd_layout_parse(problem->saved, &problem->from));
        OK(rsd_layout_parse(problem->loaded, &problem->to));
        problem->memory = oracle_memory(problem->from, NULL);
        oracle_fill(problem->from, NULL, &problem->memory);
        snprintf(names[i], sizeof names[i], "tensor.%d", i);
        problem->tensor = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                       .name = names[i],
                                       .layout = problem->from,
                                       .rank = RSD_EVERY_RANK,
                                       .arrays = problem->memory.array};
    }
}

static void drop_problems(struct problem *problems)
{
    for (int i = 0; i < NPROBLEMS; i++) {
        oracle_memory_free(&problems[i].memory);
        rsd_layout_free(problems[i].from);
        rsd_layout_free(problems[i].to);
    }
}

/* ---- saving ---- */

static void save_kinds(struct problem *problems, const char *expected, bool background,
                       int32_t compress, rsd_pool *pool)
{
    rsd_tensor tensors[NPROBLEMS];
    struct gpu_memory there[NPROBLEMS];
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool, .max_nbytes = 1 << 16};
    rsd_save_options options = {
        .struct_nbytes = sizeof options, .overwrite = 1, .compress = compress, .io = &io};
    char path[300];
    rsd_async_save *save;
    snprintf(path, sizeof path, "%s", path_in(folder, "from_gpu"));
    for (int i = 0; i < NPROBLEMS; i++) {
        there[i] = gpu_memory_of(&problems[i].memory, any_kind, NULL);
        gpu_memory_put(&there[i], &problems[i].memory);
        tensors[i] = problems[i].tensor;
        tensors[i].arrays = there[i].array;
    }
    if (!background) {
        OK(rsd_save(path, NPROBLEMS, tensors, &options, NULL));
    } else if (OK(rsd_save_start(path, NPROBLEMS, tensors, &options, &save))) {
        for (int i = 0; i < NPROBLEMS; i++) /* the arrays were copied */
            for (int64_t k = 0; k < there[i].narrays; k++)
                if (there[i].nbytes[k] && there[i].kinds[k] == ON_GPU) {
                    gpu_use_device(there[i].devices[k]);
                    gpu_fill_async(there[i].array[k], 0x5a, there[i].nbytes[k], NULL);
                }
        OK(rsd_save_wait(save, NULL));
    }
    CHECK(same_folders(path, expected), "background %d, compress %d", background, compress);
    for (int i = 0; i < NPROBLEMS; i++)
        gpu_memory_free(&there[i]);
}

/* Plain items have the elements of an array in any memory, also if its dims have another order there. */
static void write_plain_items(rsd_pool *pool)
{
    enum { NROWS = 210, NCOLUMNS = 130 };
    static const int64_t shape[2] = {NROWS, NCOLUMNS}, turned[2] = {1, NROWS};
    static float rows[NROWS][NCOLUMNS], columns[NCOLUMNS][NROWS];
    for (int i = 0; i < NROWS; i++)
        for (int k = 0; k < NCOLUMNS; k++)
            rows[i][k] = columns[k][i] = (float)(i * 1000 + k);
    for (int kind = 0; kind < NGPU_KINDS; kind++) {
        char *memory = gpu_new((enum gpu_kind)kind, sizeof columns);
        rsd_io io = {.struct_nbytes = sizeof io, .pool = pool, .max_nbytes = 1 << 16};
        rsd_items_options options = {.struct_nbytes = sizeof options, .plain = 1, .io = &io};
        rsd_item items[2] = {{.struct_nbytes = sizeof *items, .data = "head", .nbytes = 4},
                             {.struct_nbytes = sizeof *items,
                              .dtype = RSD_F32,
                              .ndim = 2,
                              .shape = shape,
                              .strides = turned,
                              .data = memory}};
        uint64_t places[4];
        size_t n = 0;
        gpu_put((enum gpu_kind)kind, memory, columns, sizeof columns);
        OK(rsd_dcp_write_items(path_in(folder, "plain"), 2, items, &options, places, NULL));
        char *bytes = read_whole(path_in(folder, "plain.part"), &n);
        CHECK(bytes && n == 4 + sizeof rows && memcmp(bytes + 4, rows, sizeof rows) == 0, "kind %d",
              kind);
        free(bytes);
        gpu_free((enum gpu_kind)kind, memory);
    }
}

/* ---- loading ---- */

/* Returns a stream of any device, which writes to the arrays of that device if they have no padding. */
static void *busy_stream(const struct gpu_memory *there, enum arrangement arrangement)
{
    static void *streams[8];
    int device = (int)random_below(&dice, gpu_ndevices() < 8 ? gpu_ndevices() : 8);
    gpu_use_device(device);
    if (!streams[device])
        streams[device] = gpu_stream_new();
    for (int64_t i = 0; i < there->narrays; i++)
        if (arrangement != PADDED && there->nbytes[i] && there->kinds[i] == ON_GPU &&
            there->devices[i] == device)
            gpu_fill_async(there->array[i], 0x5a, there->nbytes[i], streams[device]);
    return streams[device];
}

/* Loads a tensor into memory of any kind, and compares with a load into host memory. */
static void load_kinds(rsd_checkpoint *checkpoint, const struct problem *problem, rsd_pool *pool,
                       enum arrangement arrangement)
{
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool, .max_nbytes = 1 << 16};
    rsd_load_options options = {.struct_nbytes = sizeof options, .allow_cast = 1, .io = &io};
    int64_t *strides = oracle_strides(problem->to, arrangement);
    struct memory expected = oracle_memory(problem->to, strides),
                  got = oracle_memory(problem->to, strides);
    struct gpu_memory there = gpu_memory_of(&got, any_kind, NULL);
    rsd_tensor tensor = problem->tensor;
    tensor.layout = problem->to;
    tensor.strides = strides;
    tensor.arrays = expected.array;
    OK(rsd_load(checkpoint, 1, &tensor, &options, NULL));
    gpu_memory_put(&there, &got);
    tensor.arrays = there.array;
    io.stream = busy_stream(&there, arrangement);
    OK(rsd_load(checkpoint, 1, &tensor, &options, NULL));
    gpu_memory_get(&got, &there);
    for (int64_t i = 0; i < got.narrays; i++)
        CHECK(!got.nbytes[i] || memcmp(got.array[i], expected.array[i], got.nbytes[i]) == 0,
              "%s to %s, array %lld", problem->saved, problem->loaded, (long long)i);
    gpu_memory_free(&there);
    oracle_memory_free(&expected);
    oracle_memory_free(&got);
    free(strides);
}

/* ---- digests ---- */

/* Ranks that are threads, each with its arrays in memory of any kind. */
static rsd_status digest_rank(struct worker *worker)
{
    const struct problem *problems = worker->task;
    rsd_tensor tensors[NPROBLEMS];
    char digests[NPROBLEMS][RSD_DIGEST_NCHARS];
    rsd_io io = {.struct_nbytes = sizeof io, .transport = &worker->transport};
    for (int i = 0; i < NPROBLEMS; i++) {
        int64_t first, n;
        tensors[i] = problems[i].tensor;
        rsd_layout_arrays_of(problems[i].from, worker->transport.rank, &first, &n);
        tensors[i].rank = worker->transport.rank;
        tensors[i].arrays += first;
    }
    rsd_status status = rsd_digest_tensors(NPROBLEMS, tensors, &io, digests);
    for (int i = 0; i < NPROBLEMS && !status; i++)
        worker_add_line(worker, digests[i]);
    return status;
}

static void digest_kinds(struct problem *problems, rsd_checkpoint *checkpoint)
{
    char stored[NPROBLEMS][RSD_DIGEST_NCHARS], digests[NPROBLEMS][RSD_DIGEST_NCHARS],
        all[4096] = "";
    rsd_tensor tensors[NPROBLEMS];
    struct gpu_memory there[NPROBLEMS];
    struct problem on_gpu[NPROBLEMS];
    OK(rsd_digest(checkpoint, 0, NULL, NULL, stored, NULL));
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < NPROBLEMS; i++) {
            there[i] = gpu_memory_of(&problems[i].memory, any_kind, NULL);
            gpu_memory_put(&there[i], &problems[i].memory);
            on_gpu[i] = problems[i];
            on_gpu[i].tensor.arrays = there[i].array;
            tensors[i] = round == 0 ? problems[i].tensor : on_gpu[i].tensor;
        }
        OK(rsd_digest_tensors(NPROBLEMS, tensors, NULL, digests));
        all[0] = '\0';
        for (int i = 0; i < NPROBLEMS; i++) {
            int64_t index = -1;
            OK(rsd_checkpoint_find(checkpoint, problems[i].tensor.name, &index));
            CHECK(strcmp(digests[i], stored[index]) == 0, "%s: %s, stored %s", problems[i].saved,
                  digests[i], stored[index]);
            snprintf(all + strlen(all), sizeof all - strlen(all), "%s\n", digests[i]);
        }
        struct workers workers;
        workers_run(&workers, 4, digest_rank, on_gpu, 0);
        for (int32_t rank = 0; rank < workers.n; rank++)
            CHECK(!workers.list[rank].status && strcmp(workers.list[rank].lines, all) == 0,
                  "rank %d: %s", (int)rank, workers.list[rank].message);
        workers_free(&workers);
        for (int i = 0; i < NPROBLEMS; i++)
            gpu_memory_free(&there[i]);
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    if (!gpu_open(argv)) {
        puts("1..0 # SKIP libcuda.so.1 cannot be loaded");
        return 0;
    }
    gpu_start();
    struct problem problems[NPROBLEMS];
    rsd_tensor tensors[NPROBLEMS];
    rsd_pool *pool;
    static char name[256];
    snprintf(name, sizeof name, "%s", folder_new("device_files"));
    folder = name;
    make_problems(problems);
    OK(rsd_pool_new(3, &pool));
    for (int i = 0; i < NPROBLEMS; i++)
        tensors[i] = problems[i].tensor;
    for (int32_t compress = 0; compress < 2; compress++) {
        rsd_save_options options = {
            .struct_nbytes = sizeof options, .overwrite = 1, .compress = compress};
        rsd_checkpoint *checkpoint = NULL;
        char path[300];
        snprintf(path, sizeof path, "%s", path_in(folder, "from_host"));
        CASE("arrays of any memory are saved to the same bytes%s", compress ? ", compressed" : "");
        if (rsd_save(path, NPROBLEMS, tensors, &options, NULL) == RSD_EUNSUPPORTED && compress)
            break; /* built without zstd */
        for (int round = 0; round < 6; round++)
            save_kinds(problems, path, round % 3 == 2, compress, round % 2 ? pool : NULL);
        CASE("and are loaded into any memory, with any strides%s", compress ? ", compressed" : "");
        OK(rsd_checkpoint_open(path, NULL, &checkpoint));
        for (int round = 0; round < 9; round++)
            for (int i = 0; i < NPROBLEMS; i++)
                load_kinds(checkpoint, &problems[i], round % 2 ? pool : NULL,
                           (enum arrangement)(round % 3));
        CASE("digests of any memory are those of the checkpoint%s", compress ? ", compressed" : "");
        digest_kinds(problems, checkpoint);
        rsd_checkpoint_close(checkpoint);
    }
    CASE("plain items of any memory");
    write_plain_items(NULL);
    write_plain_items(pool);
    drop_problems(problems);
    rsd_pool_free(pool);
    folder_remove(folder);
    return tap_end();
}
