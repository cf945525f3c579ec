/* test_collective_save.c - many ranks save and load, each with its own arrays: the files are those of one process that
 * has all arrays. If one rank fails, all fail, and the old checkpoint stays. */
#include "folder.h"
#include "oracle.h"
#include "tap.h"
#include "workers.h"

#include <stdlib.h>
#include <unistd.h>

enum { NTENSORS = 4 };
static const char *const names[NTENSORS] = {"w1", "w2", "bias", "count"};
static char folder[256];

struct task {
    char path[300];
    rsd_layout *layouts[NTENSORS];
    struct memory memory[NTENSORS];
    rsd_save_options options;
    bool background;
    int32_t without; /* the rank that passes NULL for an array, plus one */
    int32_t elsewhere;
    int32_t late;   /* the rank with another step value, plus one */
    int32_t nested; /* the rank with another path of the value, plus one */
    int32_t cancels;
};

static rsd_layout *layout_of(int tensor, int32_t n, const char *placement)
{
    static const char *const shapes[] = {"f32[37,12]", "bf16[5,64]", "f32[33]", "i64[3]"};
    char text[200];
    rsd_layout *layout = NULL;
    snprintf(text, sizeof text, "%s @ %d : %s", shapes[tensor], (int)n, placement);
    OK(rsd_layout_parse(text, &layout));
    return layout;
}

/* Layouts over n ranks: rows, columns and copies. */
static void make_task(struct task *task, const char *name, int32_t n)
{
    *task = (struct task){.options = {.struct_nbytes = sizeof(rsd_save_options)}};
    snprintf(task->path, sizeof task->path, "%s/%s", folder, name);
    static const char *const placements[] = {"S(0)", "S(1)", "R", "R"};
    for (int i = 0; i < NTENSORS; i++) {
        task->layouts[i] = layout_of(i, n, placements[i]);
        task->memory[i] = oracle_memory(task->layouts[i], NULL);
        oracle_fill(task->layouts[i], NULL, &task->memory[i]);
    }
}

static void free_task(struct task *task)
{
    for (int i = 0; i < NTENSORS; i++) {
        oracle_memory_free(&task->memory[i]);
        rsd_layout_free(task->layouts[i]);
    }
}

static const rsd_value step = {.struct_nbytes = sizeof step, .name = "step", .json = "1200"};

/* Fills in the tensors of one rank, or of all ranks. */
static void fill_locals(const struct task *task, int32_t rank, rsd_tensor *locals)
{
    for (int i = 0; i < NTENSORS; i++) {
        int64_t first = 0, count;
        if (rank != RSD_EVERY_RANK)
            rsd_layout_arrays_of(task->layouts[i], rank, &first, &count);
        locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                 .name = names[i],
                                 .layout = task->layouts[i],
                                 .rank = rank,
                                 .arrays = task->memory[i].array + first};
    }
}

static int on_progress(void *context, const rsd_progress *progress)
{
    const struct worker *worker = context;
    (void)progress;
    return ((const struct task *)worker->task)->cancels == worker->transport.rank + 1;
}

static rsd_status save_as_rank(struct worker *worker)
{
    const struct task *task = worker->task;
    rsd_tensor locals[NTENSORS];
    rsd_save_options options = task->options;
    rsd_value value = step;
    void *none[1] = {NULL};
    char path[320];
    rsd_async_save *saving;
    fill_locals(task, worker->transport.rank, locals);
    if (task->without == worker->transport.rank + 1)
        locals[1].arrays = none;
    rsd_io io = {.struct_nbytes = sizeof io,
                 .transport = &worker->transport,
                 .on_progress = task->cancels ? on_progress : NULL,
                 .context = worker};
    options.io = &io;
    if (task->late == worker->transport.rank + 1)
        value.json = "1199";
    if (task->nested == worker->transport.rank + 1)
        value.path = "[\"state\", \"step\"]";
    options.values = &value;
    options.nvalues = 1;
    snprintf(path, sizeof path, "%s%s", task->path,
             task->elsewhere == worker->transport.rank + 1 ? "-elsewhere" : "");
    if (!task->background)
        return rsd_save(path, NTENSORS, locals, &options, &worker->report);
    rsd_status status = rsd_save_start(path, NTENSORS, locals, &options, &saving);
    return status ? status : rsd_save_wait(saving, &worker->report);
}

static rsd_status save_alone(const struct task *task, const char *path)
{
    rsd_tensor locals[NTENSORS];
    rsd_save_options options = task->options;
    options.values = &step;
    options.nvalues = 1;
    fill_locals(task, RSD_EVERY_RANK, locals);
    return rsd_save(path, NTENSORS, locals, &options, NULL);
}

static void check_all(const struct workers *workers, rsd_status status, const char *text)
{
    for (int32_t i = 0; i < workers->n; i++) {
        CHECK(workers->list[i].status == status && strstr(workers->list[i].message, text),
              "rank %d of %d: %s, %s", (int)i, (int)workers->n,
              rsd_status_name(workers->list[i].status), workers->list[i].message);
        CHECK(memcmp(&workers->list[i].report, &workers->list[0].report, sizeof(rsd_report)) == 0,
              "rank %d reports otherwise", (int)i);
    }
}

/* ---- loading ---- */

struct load_task {
    const char *path;
    rsd_layout *layouts[NTENSORS];
    struct memory memory[NTENSORS];
    int32_t wrong; /* the rank that requests a missing tensor, plus one */
};

static rsd_status load_as_rank(struct worker *worker)
{
    const struct load_task *task = worker->task;
    rsd_checkpoint *checkpoint;
    rsd_tensor locals[NTENSORS];
    rsd_io io = {.struct_nbytes = sizeof io, .transport = &worker->transport};
    rsd_load_options options = {.struct_nbytes = sizeof options, .io = &io};
    rsd_status status = rsd_checkpoint_open(task->path, NULL, &checkpoint);
    if (status)
        return status;
    for (int i = 0; i < NTENSORS; i++) {
        int64_t first, count;
        rsd_layout_arrays_of(task->layouts[i], worker->transport.rank, &first, &count);
        locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                 .name = names[i],
                                 .layout = task->layouts[i],
                                 .rank = worker->transport.rank,
                                 .arrays = task->memory[i].array + first};
    }
    if (task->wrong == worker->transport.rank + 1)
        locals[2].name = "no such tensor";
    status = rsd_load(checkpoint, NTENSORS, locals, &options, &worker->report);
    rsd_checkpoint_close(checkpoint);
    return status;
}

static void load_and_check(const char *path, int32_t n)
{
    static const char *const placements[] = {"S(1)", "S(0)", "S(0)", "R"};
    struct load_task task = {.path = path};
    struct workers workers;
    for (int i = 0; i < NTENSORS; i++) {
        task.layouts[i] = layout_of(i, n, placements[i]);
        task.memory[i] = oracle_memory(task.layouts[i], NULL);
    }
    workers_run(&workers, n, load_as_rank, &task, 0);
    check_all(&workers, RSD_OK, "");
    for (int i = 0; i < NTENSORS; i++)
        CHECK(oracle_check(task.layouts[i], task.layouts[i], NULL, &task.memory[i]), "%s, %d ranks",
              names[i], (int)n);
    task.wrong = n;
    workers_run(&workers, n, load_as_rank, &task, 0);
    check_all(&workers, RSD_EMISMATCH, "no such tensor: the checkpoint has no such tensor");
    for (int i = 0; i < NTENSORS; i++) {
        oracle_memory_free(&task.memory[i]);
        rsd_layout_free(task.layouts[i]);
    }
}

/* ---- cases ---- */

static void saved_as_by_one(void)
{
    static const int32_t sizes[] = {2, 3, 5, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 4; kind++) {
            struct task task;
            struct workers workers;
            char alone[300];
            CASE("%d ranks save%s%s, and load in another layout", (int)sizes[i],
                 kind & 1 ? " compressed" : "", kind & 2 ? " in the background" : "");
            make_task(&task, "many", sizes[i]);
            snprintf(alone, sizeof alone, "%s/alone", folder);
            task.options.compress = kind & 1 ? 3 : 0;
            task.background = (kind & 2) != 0;
            OK(save_alone(&task, alone));
            workers_run(&workers, sizes[i], save_as_rank, &task, 0);
            check_all(&workers, RSD_OK, "");
            CHECK(workers.list[0].report.nfiles_written == sizes[i] &&
                      workers.list[0].report.ntensors == NTENSORS,
                  "%lld files", (long long)workers.list[0].report.nfiles_written);
            CHECK(same_folders(alone, task.path));
            load_and_check(task.path, sizes[i]);
            folder_remove(alone);
            folder_remove(task.path);
            free_task(&task);
        }
}

static void one_fails(void)
{
    for (int background = 0; background < 2; background++) {
        struct task task;
        struct workers workers;
        char old[300], part[340];
        make_task(&task, "kept", 3);
        task.background = background;
        snprintf(old, sizeof old, "%s/old", folder);
        snprintf(part, sizeof part, "%s.reshard-part", task.path);
        OK(save_alone(&task, old));
        OK(save_alone(&task, task.path));
        CASE("the path already exists%s", background ? ", in the background" : "");
        workers_run(&workers, 3, save_as_rank, &task, 0);
        check_all(&workers, RSD_EEXIST, "already exists");
        task.options.overwrite = 1;
        CASE("a rank without its array: nothing is replaced%s",
             background ? ", in the background" : "");
        for (int32_t rank = 0; rank < 3; rank++) {
            task.without = rank + 1;
            workers_run(&workers, 3, save_as_rank, &task, 0);
            check_all(&workers, RSD_EINVAL, "w2: array 0 of rank");
            CHECK(same_folders(old, task.path) && !is_there(part));
        }
        task.without = 0;
        CASE("a rank with another path%s", background ? ", in the background" : "");
        task.elsewhere = 2;
        workers_run(&workers, 3, save_as_rank, &task, 0);
        check_all(&workers, RSD_EMISMATCH, "rank 1 passed different arguments");
        CHECK(same_folders(old, task.path) && !is_there(part));
        task.elsewhere = 0;
        CASE("a rank with another value, or of another dict%s",
             background ? ", in the background" : "");
        for (int32_t rank = 1; rank < 3; rank++) {
            char text[64];
            snprintf(text, sizeof text, "rank %d passed different arguments", (int)rank);
            task.late = rank + 1;
            workers_run(&workers, 3, save_as_rank, &task, 0);
            check_all(&workers, RSD_EMISMATCH, text);
            task.late = 0;
            task.nested = rank + 1;
            workers_run(&workers, 3, save_as_rank, &task, 0);
            check_all(&workers, RSD_EMISMATCH, text);
            task.nested = 0;
        }
        CHECK(same_folders(old, task.path) && !is_there(part));
        CASE("cancelled on one rank%s", background ? ", in the background" : "");
        task.cancels = 3;
        workers_run(&workers, 3, save_as_rank, &task, 0);
        check_all(&workers, RSD_ECANCELLED, "stopped");
        CHECK(same_folders(old, task.path) && !is_there(part));
        CASE("and then it is replaced%s", background ? ", in the background" : "");
        task.cancels = 0;
        workers_run(&workers, 3, save_as_rank, &task, 0);
        check_all(&workers, RSD_OK, "");
        CHECK(same_folders(old, task.path) && !is_there(part));
        folder_remove(old);
        folder_remove(task.path);
        free_task(&task);
    }
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("collective_save"));
    saved_as_by_one();
    one_fails();
    folder_remove(folder);
    return tap_end();
}
