/* test_collective.c - many ranks convert, digest, compare and verify: files and findings are those of one process. */
#include "collective.h"

#include <stdlib.h>

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
    task.convert = (rsd_convert_options){.every_replica = 1, .map = choose_copies};
    convert_and_compare(task, "a file a rank");
}

static void golden_converts(void)
{
    static const char *const some[] = {"fsdp2_tp_adamw", "zstd",   "transposed",  "hf_sharded",
                                       "dtypes",         "values", "empty_shards"};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        CASE("%s: converted by many ranks, with all options", some[i]);
        char in[300];
        snprintf(in, sizeof in, "%s", golden_path(some[i], "ckpt"));
        convert_every_way(in);
    }
}

/* ---- verify, digest, diff ---- */

static rsd_status note_finding(void *context, const char *text)
{
    worker_add_line(context, text);
    return RSD_OK;
}

static rsd_status note_difference(void *context, const char *name, rsd_difference difference,
                                  const char *text)
{
    char line[1000];
    snprintf(line, sizeof line, "%s %d %s", name, (int)difference, text);
    worker_add_line(context, line);
    return RSD_OK;
}

static rsd_status prove_as(const struct task *task, const rsd_transport *transport,
                           struct worker *worker)
{
    rsd_checkpoint *a = NULL, *b = NULL;
    rsd_io io = {.struct_nbytes = sizeof io, .transport = transport};
    rsd_diff_options options = {.struct_nbytes = sizeof options, .io = &io};
    int64_t ndiffer = 0, nfindings = 0;
    rsd_status status = rsd_checkpoint_open(task->in, NULL, &a);
    if (!status)
        status = rsd_checkpoint_open(task->other, NULL, &b);
    if (!status)
        status = rsd_verify(a, &io, note_finding, worker, &nfindings, &worker->report);
    size_t n = status ? 0 : (size_t)rsd_checkpoint_ntensors(b);
    char(*digests)[RSD_DIGEST_NCHARS] = malloc((n + 1) * sizeof *digests);
    if (!status)
        status = rsd_digest(b, 0, NULL, &io, digests, NULL);
    for (size_t i = 0; i < n && !status; i++)
        worker_add_line(worker, digests[i]);
    if (!status && nfindings == 0)
        status = rsd_diff(a, b, &options, note_difference, worker, &ndiffer, NULL);
    worker->found = nfindings;
    worker->number = ndiffer;
    free(digests);
    rsd_checkpoint_close(a);
    rsd_checkpoint_close(b);
    return status;
}

static rsd_status prove_as_rank(struct worker *worker)
{
    return prove_as(worker->task, &worker->transport, worker);
}

static void prove_and_compare(const struct task *task, int64_t nfindings, int64_t ndiffer)
{
    struct workers workers;
    struct worker alone = {.task = task};
    alone.report.struct_nbytes = sizeof alone.report;
    OK(prove_as(task, NULL, &alone));
    CHECK(alone.found == nfindings && alone.number == ndiffer, "%lld findings, %lld differ",
          (long long)alone.found, (long long)alone.number);
    for (int i = 0; i < NCREWS; i++) {
        workers_run(&workers, next_nworkers(), prove_as_rank, task, 0);
        check_all(&workers, RSD_OK, "");
        check_reports(&workers, &alone.report);
        for (int32_t r = 0; r < workers.n; r++) {
            const struct worker *worker = &workers.list[r];
            CHECK(worker->nchars == alone.nchars && worker->lines && alone.lines &&
                      memcmp(worker->lines, alone.lines, worker->nchars) == 0,
                  "rank %d of %d was lines\n%s\nand a process alone\n%s", (int)r, (int)workers.n,
                  worker->lines ? worker->lines : "", alone.lines ? alone.lines : "");
            CHECK(worker->found == alone.found && worker->number == alone.number);
        }
        workers_free(&workers);
    }
    free(alone.lines);
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

/* ---- tensors that are split ---- */

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
    rsd_tensor locals[3] = {{.struct_nbytes = sizeof(rsd_tensor),
                             .name = "embedding",
                             .layout = large,
                             .rank = RSD_EVERY_RANK,
                             .arrays = arrays},
                            {.struct_nbytes = sizeof(rsd_tensor),
                             .name = "a.bias",
                             .layout = small,
                             .rank = RSD_EVERY_RANK,
                             .arrays = &seven},
                            {.struct_nbytes = sizeof(rsd_tensor),
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

static rsd_status choose_rows(void *context, const rsd_tensor_info *tensor,
                              rsd_tensor_target *choice)
{
    (void)context;
    if (tensor->ndim < 2)
        return RSD_OK;
    return rsd_layout_parse("f32[3000,4001] @ 4 : S(0)", &choice->layout);
}

static void large_is_split(void)
{
    char in[300], out[300];
    struct workers workers;
    rsd_report alone;
    snprintf(in, sizeof in, "%s/large", folder);
    snprintf(out, sizeof out, "%s/plain.safetensors", folder);
    make_large(in);
    struct task task = {.in = in};
    CASE("a tensor larger than all others is split, and all files are the same");
    convert_and_compare(task, "one file");
    task.convert = (rsd_convert_options){.format = RSD_FORMAT_DCP, .map = choose_rows};
    convert_and_compare(task, "dcp by rows");
    task.convert.compress = 1;
    convert_and_compare(task, "zstd by rows");
    CASE("and it is verified in parts");
    task = (struct task){.in = in, .out = out, .other = out};
    OK(convert_alone(&task, &alone));
    prove_and_compare(&task, 0, 0);
    task.in = out;
    task.other = in;
    prove_and_compare(&task, 0, 0);
    CASE("one element that differs is found at any position");
    damage(out, 30000000, 4);
    damage(out, 9000000, 4);
    prove_and_compare(&task, 0, 1);
    CASE("one flipped bit is found by the combined CRC of all parts");
    char file[300];
    snprintf(file, sizeof file, "%s/large/__1_0.distcp", folder);
    damage(file, 9000000, 4);
    task = (struct task){.in = in, .other = out};
    prove_and_compare(&task, 1, 0);
    snprintf(out, sizeof out, "%s/never", folder);
    task.out = out;
    workers_run(&workers, 5, convert_as_rank, &task, 0);
    check_all(&workers, RSD_EFORMAT, "__1_0.distcp: embedding: bytes");
    CHECK(!is_there(out) && !is_there(in_folder("never.reshard-part")), "something was left");
    folder_remove(in);
    folder_remove(in_folder("plain.safetensors"));
}

/* ---- options ---- */

static rsd_status accept_output(void *context, rsd_checkpoint *output)
{
    (void)context;
    return output ? RSD_OK : RSD_EINVAL;
}

/* Only rank 1 checks the output. */
static rsd_status convert_checked_by_one(struct worker *worker)
{
    struct task task = *(const struct task *)worker->task;
    task.convert.check = worker->transport.rank == 1 ? accept_output : NULL;
    return convert_as(&task, &worker->transport, worker);
}

static void ranks_agree_on_check(void)
{
    CASE("a check that only some ranks make is refused before anything is written");
    char in[300], out[300];
    struct workers workers;
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(out, sizeof out, "%s/checked", folder);
    struct task task = {.in = in, .out = out, .timeout = 10};
    workers_run(&workers, 2, convert_checked_by_one, &task, 0);
    check_all(&workers, RSD_EMISMATCH, "rank 1 passed different arguments");
    CHECK(!is_there(out), "something was written");
    workers_free(&workers);
}

enum { NSMALL = 50 };

/* Writes small tensors, which are never shared, and behind them one that has as many bytes. */
static void make_uneven(const char *path)
{
    rsd_layout *small = layout_of("f32[1000] @ 1 : R"), *large = layout_of("f32[50000] @ 1 : R");
    void *array = calloc(50000, 4);
    rsd_tensor locals[NSMALL + 1] = {{0}};
    char names[NSMALL + 1][16];
    for (int i = 0; i <= NSMALL; i++) {
        snprintf(names[i], sizeof names[i], "%c%02d", i < NSMALL ? 'a' : 'z', i);
        locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                 .name = names[i],
                                 .layout = i < NSMALL ? small : large,
                                 .rank = RSD_EVERY_RANK,
                                 .arrays = &array};
    }
    OK(rsd_save(path, NSMALL + 1, locals, NULL, NULL));
    free(array);
    rsd_layout_free(small);
    rsd_layout_free(large);
}

static void ranks_share_alike(void)
{
    CASE("every rank shares blocks with the input as the options say");
    char in[300], one[300], many[300];
    struct workers workers;
    rsd_report alone;
    snprintf(in, sizeof in, "%s/uneven", folder);
    snprintf(one, sizeof one, "%s/shared-alone", folder);
    snprintf(many, sizeof many, "%s/shared", folder);
    make_uneven(in);
    struct task task = {
        .in = in, .out = one, .convert = {.format = RSD_FORMAT_DCP, .reflink = RSD_REFLINK_ALWAYS}};
    rsd_status status = convert_alone(&task, &alone); /* file systems differ */
    CHECK(status == RSD_OK || status == RSD_EUNSUPPORTED, "%s", rsd_error());
    task.out = many;
    workers_run(&workers, 2, convert_as_rank, &task, 0); /* rank 1 has the large tensor */
    check_all(&workers, status, "");
    if (!status)
        CHECK(workers.list[0].report.nbytes_shared == alone.nbytes_shared);
    workers_free(&workers);
    folder_remove(in);
    folder_remove(one);
    folder_remove(many);
}

/* ---- messages ---- */

/* The first payload that each rank sends to rank 0. */
static struct {
    char bytes[256];
    size_t nbytes;
} first_payloads[MOST_WORKERS];

static rsd_status record_send(void *context, int32_t to, int32_t tag, const void *data,
                              size_t nbytes, void **request)
{
    const rsd_transport *real = context;
    int32_t rank = real->rank;
    if (tag == 61 && first_payloads[rank].nbytes == 0 &&
        nbytes <= sizeof first_payloads[rank].bytes) {
        memcpy(first_payloads[rank].bytes, data, nbytes);
        first_payloads[rank].nbytes = nbytes;
    }
    return real->send(real->context, to, tag, data, nbytes, request);
}

static rsd_status record_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                              void **request)
{
    const rsd_transport *real = context;
    return real->recv(real->context, from, tag, data, nbytes, request);
}

static rsd_status record_test(void *context, void *request, int32_t *done)
{
    const rsd_transport *real = context;
    return real->test(real->context, request, done);
}

static int32_t record_cancel(void *context, void *request)
{
    const rsd_transport *real = context;
    return real->cancel(real->context, request);
}

static rsd_status digest_recorded(struct worker *worker)
{
    rsd_transport real = worker->transport, recording = real;
    recording.context = &real;
    recording.send = record_send;
    recording.recv = record_recv;
    recording.test = record_test;
    recording.cancel = record_cancel;
    return prove_as(worker->task, &recording, worker);
}

/* Ranks that make the same call send the same bytes: no addresses, and nothing that was not set. */
static void no_addresses_are_sent(void)
{
    CASE("ranks that make the same call send the same hash to rank 0");
    struct workers workers;
    char in[300];
    snprintf(in, sizeof in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    struct task task = {.in = in, .other = in};
    workers_run(&workers, 3, digest_recorded, &task, 0);
    check_all(&workers, RSD_OK, "");
    CHECK(first_payloads[1].nbytes > 0 && first_payloads[1].nbytes == first_payloads[2].nbytes &&
              memcmp(first_payloads[1].bytes, first_payloads[2].bytes, first_payloads[1].nbytes) ==
                  0,
          "ranks 1 and 2 sent different bytes");
    workers_free(&workers);
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("collective"));
    golden_converts();
    golden_is_proved();
    large_is_split();
    ranks_agree_on_check();
    ranks_share_alike();
    no_addresses_are_sent();
    folder_remove(folder);
    return tap_end();
}
