/* test_together.c - many ranks convert, digest, compare and verify: the files are byte by byte those of one
 * process, and so is what is told. One rank fails, is cancelled or is lost; all of them are killed. Whatever
 * is left is resumed by any other number of ranks. */
#include "crew.h"
#include "folder.h"
#include "random.h"
#include "tap.h"
#include "truth.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[256];

/* Two crews for each conversion, others for the next one. */
static int32_t next_crew(void)
{
    static const int32_t crews[] = {2, 5, 3, 8};
    static unsigned turn;
    return crews[turn++ % 4];
}
enum { NCREWS = 2 };

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

/* ---- the disk fails, or everybody is killed, at the nth write ---- */

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

/* ---- tasks ---- */

struct task {
    const char *in, *other, *out;
    const char *out_of_one; /* of rank 1, if it is not that of all */
    rsd_convert_options convert;
    bool any_layout;
    int32_t cancels; /* this rank, plus one */
    double timeout;
    int64_t ndigests;
    char (*digests)[RSD_DIGEST_NCHARS]; /* what they must be */
};

struct chooser {
    struct random random;
};

/* The same on all ranks, which begin with the same random. */
static rsd_status choose_any(void *context, const rsd_tensor *tensor, rsd_choice *choice)
{
    struct chooser *chooser = context;
    struct random_tensor about = {.ndim = tensor->ndim};
    char side[4096], text[4400];
    size_t at =
        (size_t)snprintf(about.text, sizeof about.text, "%s[", rsd_dtype_name(tensor->dtype));
    for (int32_t d = 0; d < tensor->ndim; d++) {
        about.shape[d] = tensor->shape[d];
        at += (size_t)snprintf(about.text + at, sizeof about.text - at, "%s%lld", d ? "," : "",
                               (long long)tensor->shape[d]);
    }
    snprintf(about.text + at, sizeof about.text - at, "]");
    for (;;) {
        rsd_check check = {.struct_nbytes = sizeof check};
        random_side(&chooser->random, &about, NULL, side, sizeof side);
        snprintf(text, sizeof text, "%s @ %s", about.text, side);
        if (rsd_layout_parse(text, &choice->layout))
            return RSD_EINVAL;
        if (rsd_layout_check(choice->layout, &check) == RSD_OK && check.cover <= RSD_COVERS_EVENLY)
            return RSD_OK;
        rsd_layout_free(choice->layout);
        choice->layout = NULL;
    }
}

/* Rows over one axis of a mesh, copies over the other. */
static rsd_status choose_copies(void *context, const rsd_tensor *tensor, rsd_choice *choice)
{
    char text[300];
    size_t at = (size_t)snprintf(text, sizeof text, "%s[", rsd_dtype_name(tensor->dtype));
    (void)context;
    for (int32_t d = 0; d < tensor->ndim; d++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%lld", d ? "," : "",
                               (long long)tensor->shape[d]);
    snprintf(text + at, sizeof text - at, "] @ 2x2 : R, %s", tensor->ndim ? "S(0)" : "R");
    return rsd_layout_parse(text, &choice->layout);
}

static int on_progress(void *context, const rsd_progress *progress)
{
    const struct hand *hand = context;
    const struct task *task = hand->task;
    return progress->nbytes_done > progress->nbytes_total ||
           task->cancels == hand->transport.rank + 1;
}

static rsd_status convert_as(const struct task *task, const rsd_transport *transport,
                             struct hand *hand)
{
    rsd_checkpoint *in;
    struct chooser chooser = {{7}};
    rsd_convert_options options = task->convert;
    rsd_status status = rsd_checkpoint_open(task->in, NULL, &in);
    if (status)
        return status;
    options.struct_nbytes = sizeof options;
    options.transport = transport;
    options.timeout = task->timeout;
    if (task->any_layout) {
        options.choose = choose_any;
        options.choose_context = &chooser;
    }
    if (transport) {
        options.on_progress = on_progress;
        options.context = hand;
    }
    bool apart = transport && transport->rank == 1 && task->out_of_one;
    status = rsd_convert(in, apart ? task->out_of_one : task->out, &options, &hand->report);
    rsd_checkpoint_close(in);
    return status;
}

static rsd_status convert_hand(struct hand *hand)
{
    return convert_as(hand->task, &hand->transport, hand);
}

static rsd_status convert_alone(const struct task *task, rsd_report *report)
{
    struct hand hand = {.task = task};
    hand.report.struct_nbytes = sizeof hand.report;
    rsd_status status = convert_as(task, NULL, &hand);
    *report = hand.report;
    return status;
}

static void check_all(const struct crew *crew, rsd_status status, const char *text)
{
    for (int32_t i = 0; i < crew->n; i++)
        CHECK(crew->hands[i].status == status && strstr(crew->hands[i].message, text) &&
                  strcmp(crew->hands[i].message, crew->hands[0].message) == 0,
              "rank %d of %d: %s, %s; rank 0: %s", (int)i, (int)crew->n,
              rsd_status_name(crew->hands[i].status), crew->hands[i].message,
              crew->hands[0].message);
}

/* All ranks report the same: what one process does. */
static void check_reports(const struct crew *crew, const rsd_report *alone)
{
    for (int32_t i = 0; i < crew->n; i++) {
        const rsd_report *r = &crew->hands[i].report;
        CHECK(memcmp(r, &crew->hands[0].report, sizeof *r) == 0, "rank %d reports otherwise",
              (int)i);
        CHECK(r->ntensors == alone->ntensors && r->nbytes_needed == alone->nbytes_needed,
              "tensors %lld and %lld, needed %lld and %lld", (long long)r->ntensors,
              (long long)alone->ntensors, (long long)r->nbytes_needed,
              (long long)alone->nbytes_needed);
        CHECK(r->nbytes_read == alone->nbytes_read &&
                  r->nbytes_unchecked == alone->nbytes_unchecked,
              "read %lld and %lld, unchecked %lld and %lld", (long long)r->nbytes_read,
              (long long)alone->nbytes_read, (long long)r->nbytes_unchecked,
              (long long)alone->nbytes_unchecked);
        CHECK(r->nbytes_written == alone->nbytes_written &&
                  r->nfiles_written == alone->nfiles_written && r->nleft_out == alone->nleft_out,
              "written %lld and %lld in %lld and %lld files", (long long)r->nbytes_written,
              (long long)alone->nbytes_written, (long long)r->nfiles_written,
              (long long)alone->nfiles_written);
    }
}

static bool same_outputs(const char *a, const char *b)
{
    return count_entries(a) >= 0 ? same_folders(a, b) : same_files(a, b);
}

/* Converts with every crew, and compares with what a process alone makes. */
static void convert_and_compare(struct task task, const char *label)
{
    struct crew crew;
    rsd_report alone;
    char one[300], many[300];
    bool file = strstr(label, "one file") != NULL;
    snprintf(one, sizeof one, "%s/alone%s", folder, file ? ".safetensors" : "");
    snprintf(many, sizeof many, "%s/many%s", folder, file ? ".safetensors" : "");
    task.out = one;
    if (!OK(convert_alone(&task, &alone)))
        return;
    task.out = many;
    for (int i = 0; i < NCREWS; i++) {
        int32_t n = next_crew();
        crew_run(&crew, n, convert_hand, &task, 0);
        check_all(&crew, RSD_OK, "");
        check_reports(&crew, &alone);
        CHECK(same_outputs(one, many), "%s by %d ranks", label, (int)n);
        folder_remove(many);
    }
    folder_remove(one);
}

static void convert_every_way(const char *in)
{
    struct task task = {.in = in};
    convert_and_compare(task, "one file");
    convert_and_compare(task, "safetensors");
    task.convert.max_shard_nbytes = 1000;
    convert_and_compare(task, "safetensors in shards");
    task.convert = (rsd_convert_options){.format = RSD_FORMAT_DCP};
    convert_and_compare(task, "dcp, whole");
    task.any_layout = true;
    convert_and_compare(task, "dcp of any layout");
    task.convert.compress = 3;
    convert_and_compare(task, "zstd");
    task.any_layout = false;
    task.convert = (rsd_convert_options){.every_replica = 1, .choose = choose_copies};
    convert_and_compare(task, "a file a rank");
}

static void golden_converts(void)
{
    static const char *const some[] = {"fsdp2_tp_adamw", "zstd",   "transposed",  "hf_sharded",
                                       "dtypes",         "values", "empty_shards"};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        CASE("%s: converted by many ranks, every way", some[i]);
        char in[300];
        snprintf(in, sizeof in, "%s", golden_path(some[i], "ckpt"));
        convert_every_way(in);
    }
}

/* ---- proving ---- */

static rsd_status note_finding(void *context, const char *text)
{
    hand_tell(context, text);
    return RSD_OK;
}

static rsd_status note_difference(void *context, const char *name, rsd_difference difference,
                                  const char *text)
{
    char line[1000];
    snprintf(line, sizeof line, "%s %d %s", name, (int)difference, text);
    hand_tell(context, line);
    return RSD_OK;
}

static rsd_status prove_as(const struct task *task, const rsd_transport *transport,
                           struct hand *hand)
{
    rsd_checkpoint *a = NULL, *b = NULL;
    rsd_prove_options options = {.struct_nbytes = sizeof options, .transport = transport};
    int64_t ndiffer = 0, nfindings = 0;
    rsd_status status = rsd_checkpoint_open(task->in, NULL, &a);
    if (!status)
        status = rsd_checkpoint_open(task->other, NULL, &b);
    if (!status)
        status = rsd_verify(a, &options, note_finding, hand, &nfindings, &hand->report);
    size_t n = status ? 0 : (size_t)rsd_checkpoint_ntensors(b);
    char(*digests)[RSD_DIGEST_NCHARS] = malloc((n + 1) * sizeof *digests);
    if (!status)
        status = rsd_digest(b, 0, NULL, &options, digests, NULL);
    for (size_t i = 0; i < n && !status; i++)
        hand_tell(hand, digests[i]);
    if (!status && nfindings == 0)
        status = rsd_diff(a, b, &options, note_difference, hand, &ndiffer, NULL);
    hand->found = nfindings;
    hand->number = ndiffer;
    free(digests);
    rsd_checkpoint_close(a);
    rsd_checkpoint_close(b);
    return status;
}

static rsd_status prove_hand(struct hand *hand)
{
    return prove_as(hand->task, &hand->transport, hand);
}

static void prove_and_compare(const struct task *task, int64_t nfindings, int64_t ndiffer)
{
    struct crew crew;
    struct hand alone = {.task = task};
    alone.report.struct_nbytes = sizeof alone.report;
    OK(prove_as(task, NULL, &alone));
    CHECK(alone.found == nfindings && alone.number == ndiffer, "%lld findings, %lld differ",
          (long long)alone.found, (long long)alone.number);
    for (int i = 0; i < NCREWS; i++) {
        crew_run(&crew, next_crew(), prove_hand, task, 0);
        check_all(&crew, RSD_OK, "");
        check_reports(&crew, &alone.report);
        for (int32_t r = 0; r < crew.n; r++) {
            const struct hand *hand = &crew.hands[r];
            CHECK(hand->ntold == alone.ntold && hand->told && alone.told &&
                      memcmp(hand->told, alone.told, hand->ntold) == 0,
                  "rank %d of %d was told\n%s\nand a process alone\n%s", (int)r, (int)crew.n,
                  hand->told ? hand->told : "", alone.told ? alone.told : "");
            CHECK(hand->found == alone.found && hand->number == alone.number);
        }
        crew_free(&crew);
    }
    free(alone.told);
}

static void damage(const char *path, long at, char with)
{
    FILE *file = fopen(path, "r+b");
    if (!CHECK(file && fseek(file, at, SEEK_SET) == 0, "%s", path))
        return;
    int was = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(was ^ with, file);
    fclose(file);
}

static void golden_is_proved(void)
{
    static const char *const some[] = {"fsdp2_tp_adamw", "zstd", "transposed", "dtypes", "values"};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        CASE("%s: verified, digested and compared by many ranks", some[i]);
        char in[300], truth[300];
        snprintf(in, sizeof in, "%s", golden_path(some[i], "ckpt"));
        snprintf(truth, sizeof truth, "%s", golden_path(some[i], "truth.safetensors"));
        struct task task = {.in = in, .other = truth};
        prove_and_compare(&task, 0, 0);
    }
}

/* ---- tensors that are worth splitting ---- */

enum { ROWS = 3000, COLUMNS = 4001 }; /* 48 MB of f32 */

static rsd_layout *layout_of(const char *text)
{
    rsd_layout *layout = NULL;
    OK(rsd_layout_parse(text, &layout));
    return layout;
}

static void make_large(const char *path)
{
    rsd_layout *large = layout_of("f32[3000,4001] @ 3 : S(1)"),
               *small = layout_of("f32[7] @ 1 : R");
    void *arrays[3], *seven = calloc(7, 4);
    for (int64_t i = 0; i < 3; i++) {
        rsd_array about;
        OK(rsd_layout_array(large, i, &about));
        float *array = arrays[i] = malloc(about.nbytes);
        for (size_t k = 0; k < about.nbytes / 4; k++)
            array[k] = (float)(k * 2654435761u % 1000003) + (float)i;
    }
    rsd_local locals[3] = {{.struct_nbytes = sizeof(rsd_local),
                            .name = "embedding",
                            .layout = large,
                            .rank = RSD_EVERY_RANK,
                            .arrays = arrays},
                           {.struct_nbytes = sizeof(rsd_local),
                            .name = "a.bias",
                            .layout = small,
                            .rank = RSD_EVERY_RANK,
                            .arrays = &seven},
                           {.struct_nbytes = sizeof(rsd_local),
                            .name = "z.bias",
                            .layout = small,
                            .rank = RSD_EVERY_RANK,
                            .arrays = &seven}};
    OK(rsd_save(path, 3, locals, NULL, NULL));
    for (int i = 0; i < 3; i++)
        free(arrays[i]);
    free(seven);
    rsd_layout_free(large);
    rsd_layout_free(small);
}

static rsd_status choose_rows(void *context, const rsd_tensor *tensor, rsd_choice *choice)
{
    (void)context;
    if (tensor->ndim < 2)
        return RSD_OK;
    return rsd_layout_parse("f32[3000,4001] @ 4 : S(0)", &choice->layout);
}

static void large_is_split(void)
{
    char in[300], out[300];
    struct crew crew;
    rsd_report alone;
    snprintf(in, sizeof in, "%s/large", folder);
    snprintf(out, sizeof out, "%s/plain.safetensors", folder);
    make_large(in);
    struct task task = {.in = in};
    CASE("a tensor larger than all others is split, and all files are the same");
    convert_and_compare(task, "one file");
    task.convert = (rsd_convert_options){.format = RSD_FORMAT_DCP, .choose = choose_rows};
    convert_and_compare(task, "dcp by rows");
    task.convert.compress = 1;
    convert_and_compare(task, "zstd by rows");
    CASE("and proved in parts");
    task = (struct task){.in = in, .out = out, .other = out};
    OK(convert_alone(&task, &alone));
    prove_and_compare(&task, 0, 0);
    task.in = out;
    task.other = in;
    prove_and_compare(&task, 0, 0);
    CASE("one element that differs is found wherever it is");
    damage(out, 30000000, 4);
    damage(out, 9000000, 4);
    prove_and_compare(&task, 0, 1);
    CASE("one bit in a part is found by the sum of all parts");
    char file[300];
    snprintf(file, sizeof file, "%s/large/__1_0.distcp", folder);
    damage(file, 9000000, 4);
    task = (struct task){.in = in, .other = out};
    prove_and_compare(&task, 1, 0);
    snprintf(out, sizeof out, "%s/never", folder);
    task.out = out;
    crew_run(&crew, 5, convert_hand, &task, 0);
    check_all(&crew, RSD_EFORMAT, "__1_0.distcp: embedding: bytes");
    CHECK(!is_there(out) && !is_there(in_folder("never.reshard-part")), "something was left");
    folder_remove(in);
    folder_remove(in_folder("plain.safetensors"));
}

/* ---- what goes wrong ---- */

static void one_rank_is_wrong(void)
{
    struct crew crew;
    char in[300], out[300], other[300];
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(out, sizeof out, "%s/out", folder);
    snprintf(other, sizeof other, "%s/elsewhere", folder);
    struct task task = {.in = in, .out = out, .out_of_one = other};
    CASE("a rank with another path is named, and nothing is written");
    crew_run(&crew, 3, convert_hand, &task, 0);
    check_all(&crew, RSD_EMISMATCH, "rank 1 calls for something else");
    CHECK(!is_there(out) && !is_there(other) && !is_there(in_folder("out.reshard-part")));
    CASE("what only rank 0 can see is said by all");
    task.out_of_one = NULL;
    OK(convert_alone(&task, &(rsd_report){0}));
    crew_run(&crew, 3, convert_hand, &task, 0);
    check_all(&crew, RSD_EEXIST, "out: there is something already");
    CHECK(strncmp(crew.hands[2].message, folder, strlen(folder)) == 0, "%s", crew.hands[2].message);
    CASE("it is replaced by many ranks");
    task.convert.overwrite = 1;
    crew_run(&crew, 3, convert_hand, &task, 0);
    check_all(&crew, RSD_OK, "");
    CASE("a dry run agrees and writes nothing");
    task.convert.dry = 1;
    task.out = other;
    crew_run(&crew, 3, convert_hand, &task, 0);
    check_all(&crew, RSD_OK, "");
    CHECK(!is_there(other));
    folder_remove(out);
}

static void one_rank_is_lost(void)
{
    struct crew crew;
    char in[300], out[300];
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(out, sizeof out, "%s/lost", folder);
    struct task task = {.in = in, .out = out, .timeout = 1.5};
    for (int32_t lost = 0; lost < 2; lost++) {
        CASE("rank %d never comes, and the others return", (int)lost);
        crew_run(&crew, 3, convert_hand, &task, 1u << lost);
        for (int32_t i = 0; i < 3; i++)
            CHECK(i == lost || (crew.hands[i].status == RSD_ETIMEOUT &&
                                strstr(crew.hands[i].message, lost ? "rank 1" : "rank 0")),
                  "rank %d: %s", (int)i, crew.hands[i].message);
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
    struct crew crew;
    rsd_report alone;
    task.convert.resume = 1;
    task.cancels = 0;
    if (nranks == 1) {
        OK(convert_alone(&task, &alone));
    } else {
        crew_run(&crew, nranks, convert_hand, &task, 0);
        check_all(&crew, RSD_OK, "");
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
        struct crew crew;
        rsd_report alone;
        struct task task = task_to_resume(kind, in, whole);
        OK(convert_alone(&task, &alone));
        task.out = out;
        CASE("%s: a rank that cannot write stops all, and others resume it", kinds[kind]);
        for (long n = 0, failed = 1; failed; n += 1 + n / 3) {
            atomic_store(&writes_left, n);
            crew_run(&crew, 3, convert_hand, &task, 0);
            failed = atomic_exchange(&writes_left, -1) < 0;
            check_all(&crew, failed ? RSD_EIO : RSD_OK, failed ? "No space left" : "");
            CHECK(is_there(out) == !failed);
            if (failed)
                resume_and_compare(task, whole, (int32_t[]){1, 2, 5, 3}[n % 4], n);
        }
        folder_remove(out);
        CASE("%s: cancelled on one rank, resumed by another number", kinds[kind]);
        for (int32_t rank = 0; rank < 3; rank++) {
            task.cancels = rank + 1;
            crew_run(&crew, 3, convert_hand, &task, 0);
            check_all(&crew, RSD_ECANCELLED, "stopped");
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
        CASE("%s: killed in the middle, resumed by another number", kinds[kind]);
        OK(convert_alone(&task, &alone));
        task.out = out;
        for (long n = 0, killed = 1; killed; n += 1 + n / 2) {
            int status = 0;
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) {
                struct crew crew;
                kill_instead = true;
                atomic_store(&writes_left, n);
                crew_run(&crew, 3, convert_hand, &task, 0);
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
    snprintf(folder, sizeof folder, "%s", folder_new("together"));
    killed_and_resumed(); /* first: a child of many threads is no good to others */
    golden_converts();
    golden_is_proved();
    large_is_split();
    one_rank_is_wrong();
    one_rank_is_lost();
    stopped_and_resumed();
    folder_remove(folder);
    return tap_end();
}
