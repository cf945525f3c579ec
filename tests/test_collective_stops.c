/* test_collective_stops.c - many ranks convert, and one fails, is cancelled or is lost, or all are killed: all ranks
 * return the same, no incomplete output is a checkpoint, and any number of ranks can resume. */
#include "collective.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the disk fails, or all ranks are killed, at the nth write ---- */

static _Atomic long writes_left = -1;
static bool kill_instead;

ssize_t __real_pwrite(int fd, const void *from, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *from, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *from, size_t n, off_t at)
{
    if (atomic_load(&writes_left) >= 0 && atomic_fetch_sub(&writes_left, 1) == 0) {
        if (kill_instead)
            kill(getpid(), SIGKILL);
        errno = ENOSPC;
        return -1;
    }
    return __real_pwrite(fd, from, n, at);
}

/* ---- failures ---- */

static void one_rank_is_wrong(void)
{
    struct workers workers;
    char in[300], out[300], other[300];
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(out, sizeof out, "%s/out", folder);
    snprintf(other, sizeof other, "%s/elsewhere", folder);
    struct task task = {.in = in, .out = out, .out_of_one = other};
    CASE("a rank with another path is named, and nothing is written");
    workers_run(&workers, 3, convert_as_rank, &task, 0);
    check_all(&workers, RSD_EMISMATCH, "rank 1 passed different arguments");
    CHECK(!is_there(out) && !is_there(other) && !is_there(in_folder("out.reshard-part")));
    CASE("all ranks report an error that only rank 0 detects");
    task.out_of_one = NULL;
    OK(convert_alone(&task, &(rsd_report){0}));
    workers_run(&workers, 3, convert_as_rank, &task, 0);
    check_all(&workers, RSD_EEXIST, "out already exists");
    CHECK(strncmp(workers.list[2].message, folder, strlen(folder)) == 0, "%s",
          workers.list[2].message);
    CASE("many ranks replace a checkpoint");
    task.convert.overwrite = 1;
    workers_run(&workers, 3, convert_as_rank, &task, 0);
    check_all(&workers, RSD_OK, "");
    CASE("a dry run votes, and writes nothing");
    task.convert.dry = 1;
    task.out = other;
    workers_run(&workers, 3, convert_as_rank, &task, 0);
    check_all(&workers, RSD_OK, "");
    CHECK(!is_there(other));
    folder_remove(out);
}

static void one_rank_is_lost(void)
{
    struct workers workers;
    char in[300], out[300];
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(out, sizeof out, "%s/lost", folder);
    struct task task = {.in = in, .out = out, .timeout = 1.5};
    for (int32_t lost = 0; lost < 2; lost++) {
        CASE("rank %d never makes the call, and the others return", (int)lost);
        workers_run(&workers, 3, convert_as_rank, &task, 1u << lost);
        for (int32_t i = 0; i < 3; i++)
            CHECK(i == lost || (workers.list[i].status == RSD_ETIMEOUT &&
                                strstr(workers.list[i].message, lost ? "rank 1" : "rank 0")),
                  "rank %d: %s", (int)i, workers.list[i].message);
    }
}

/* The formats in which work is resumed. */
static struct task task_to_resume(int kind, const char *in, const char *out)
{
    struct task task = {.in = in, .out = out};
    task.any_layout = kind > 0;
    task.convert.format = kind > 0 ? RSD_FORMAT_DCP : RSD_FORMAT_SAFETENSORS;
    task.convert.max_shard_nbytes = kind > 0 ? 0 : 3000;
    task.convert.compress = kind == 2;
    return task;
}
static const char *const kinds[] = {"safetensors", "dcp", "zstd"};

static void resume_and_compare(struct task task, const char *whole, int32_t nranks, long n)
{
    struct workers workers;
    rsd_report alone;
    task.convert.resume = 1;
    task.cancels = 0;
    if (nranks == 1) {
        OK(convert_alone(&task, &alone));
    } else {
        workers_run(&workers, nranks, convert_as_rank, &task, 0);
        check_all(&workers, RSD_OK, "");
    }
    CHECK(same_folders(whole, task.out), "stopped at write %ld, resumed by %d", n, (int)nranks);
    CHECK(!is_there(in_folder("stopped.reshard-part")));
    folder_remove(task.out);
}

static void stopped_and_resumed(void)
{
    char in[300], out[300], whole[300];
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(out, sizeof out, "%s/stopped", folder);
    snprintf(whole, sizeof whole, "%s/whole", folder);
    for (int kind = 0; kind < 3; kind++) {
        struct workers workers;
        rsd_report alone;
        struct task task = task_to_resume(kind, in, whole);
        OK(convert_alone(&task, &alone));
        task.out = out;
        CASE("%s: a rank that cannot write stops all ranks, and another number of ranks resumes",
             kinds[kind]);
        for (long n = 0, failed = 1; failed; n += 1 + n / 3) {
            atomic_store(&writes_left, n);
            workers_run(&workers, 3, convert_as_rank, &task, 0);
            failed = atomic_exchange(&writes_left, -1) < 0;
            check_all(&workers, failed ? RSD_EIO : RSD_OK, failed ? "No space left" : "");
            CHECK(is_there(out) == !failed);
            if (failed)
                resume_and_compare(task, whole, (int32_t[]){1, 2, 5, 3}[n % 4], n);
        }
        folder_remove(out);
        CASE("%s: cancelled on one rank, resumed by another number of ranks", kinds[kind]);
        for (int32_t rank = 0; rank < 3; rank++) {
            task.cancels = rank + 1;
            workers_run(&workers, 3, convert_as_rank, &task, 0);
            check_all(&workers, RSD_ECANCELLED, "stopped");
            CHECK(!is_there(out) && is_there(in_folder("stopped.reshard-part")));
            resume_and_compare(task, whole, rank + 1, -1);
        }
        task.cancels = 0;
        folder_remove(whole);
    }
}

static void killed_and_resumed(void)
{
    char in[300], out[300], whole[300];
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(out, sizeof out, "%s/stopped", folder);
    snprintf(whole, sizeof whole, "%s/whole", folder);
    for (int kind = 0; kind < 3; kind++) {
        rsd_report alone;
        struct task task = task_to_resume(kind, in, whole);
        CASE("%s: killed in the middle, resumed by another number of ranks", kinds[kind]);
        OK(convert_alone(&task, &alone));
        task.out = out;
        for (long n = 0, killed = 1; killed; n += 1 + n / 2) {
            int status = 0;
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) {
                struct workers workers;
                kill_instead = true;
                atomic_store(&writes_left, n);
                workers_run(&workers, 3, convert_as_rank, &task, 0);
                _exit(0);
            }
            waitpid(child, &status, 0);
            killed = WIFSIGNALED(status);
            if (killed)
                resume_and_compare(task, whole, (int32_t[]){2, 1, 5}[n % 3], n);
        }
        folder_remove(out);
        folder_remove(whole);
    }
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("collective_stops"));
    killed_and_resumed(); /* first, because it forks, and later tests have started threads */
    one_rank_is_wrong();
    one_rank_is_lost();
    stopped_and_resumed();
    folder_remove(folder);
    return tap_end();
}
