/* test_convert.c - conversions keep all tensors: every golden checkpoint to safetensors, to DCP of any layout and
 * back; casts, names and selection; runs that are stopped, killed and resumed. */
#include "folder.h"
#include "random.h"
#include "tap.h"
#include "truth.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

/* ---- comparing ---- */

static rsd_status tell(void *context, const char *name, rsd_difference difference, const char *text)
{
    (void)context, (void)difference;
    printf("# %s: %s\n", name, text);
    return RSD_OK;
}

static void check_same(const char *a_path, const char *b_path, rsd_pool *pool)
{
    rsd_checkpoint *a = NULL, *b = NULL;
    int64_t n = -1, nfindings = -1;
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
    rsd_report report = {.struct_nbytes = sizeof report};
    if (OK(rsd_checkpoint_open(a_path, NULL, &a)) && OK(rsd_checkpoint_open(b_path, NULL, &b))) {
        if (OK(rsd_diff(a, b, &io, tell, NULL, &n, &report)))
            CHECK(n == 0, "%s and %s: %lld tensors differ", a_path, b_path, (long long)n);
        if (OK(rsd_verify(b, &io, NULL, NULL, &nfindings, &report)))
            CHECK(nfindings == 0, "%s: %lld findings, %s", b_path, (long long)nfindings,
                  rsd_error());
        size_t na = (size_t)rsd_checkpoint_ntensors(a), nb = (size_t)rsd_checkpoint_ntensors(b);
        char(*of_a)[RSD_DIGEST_NCHARS] = malloc(na * sizeof *of_a + 1);
        char(*of_b)[RSD_DIGEST_NCHARS] = malloc(nb * sizeof *of_b + 1);
        if (OK(rsd_digest(a, 0, NULL, &io, of_a, NULL)) &&
            OK(rsd_digest(b, 0, NULL, NULL, of_b, NULL)))
            for (size_t i = 0; i < na; i++) {
                rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
                int64_t other;
                OK(rsd_checkpoint_tensor(a, (int64_t)i, &tensor));
                if (OK(rsd_checkpoint_find(b, tensor.name, &other)))
                    CHECK(strcmp(of_a[i], of_b[other]) == 0, "digests of %s", tensor.name);
            }
        free(of_a);
        free(of_b);
    }
    rsd_checkpoint_close(a);
    rsd_checkpoint_close(b);
}

static rsd_status convert(const char *from, const char *to, const rsd_convert_options *options)
{
    rsd_checkpoint *in;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_status status = rsd_checkpoint_open(from, NULL, &in);
    if (status)
        return status;
    status = rsd_convert(in, to, options, &report);
    rsd_checkpoint_close(in);
    return status;
}

static void golden_converts(void)
{
    rsd_pool *pool;
    struct random random = {3};
    OK(rsd_pool_new(2, &pool));
    for (const char *const *name = golden; *name; name++) {
        CASE("%s: to safetensors, to DCP, and back", *name);
        char ckpt[256], truth[256];
        snprintf(ckpt, sizeof ckpt, "%s", golden_path(*name, "ckpt"));
        snprintf(truth, sizeof truth, "%s", golden_path(*name, "truth.safetensors"));
        rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
        rsd_convert_options safe = {.struct_nbytes = sizeof safe, .io = &io, .overwrite = 1};
        rsd_convert_options dcp = {.struct_nbytes = sizeof dcp,
                                   .format = RSD_FORMAT_DCP,
                                   .io = &io,
                                   .overwrite = 1,
                                   .map = random_choice,
                                   .map_context = &random};
        OK(convert(ckpt, in_folder("one.safetensors"), &safe));
        check_same(truth, in_folder("one.safetensors"), pool);
        safe.max_shard_nbytes = 1000;
        OK(convert(ckpt, in_folder("several"), &safe));
        check_same(truth, in_folder("several"), NULL);
        OK(convert(ckpt, in_folder("dcp"), &dcp));
        check_same(truth, in_folder("dcp"), pool);
        dcp.compress = 3;
        OK(convert(in_folder("dcp"), in_folder("zstd"), &dcp));
        check_same(truth, in_folder("zstd"), pool);
        safe.max_shard_nbytes = 0;
        OK(convert(in_folder("zstd"), in_folder("back"), &safe));
        check_same(truth, in_folder("back"), pool);
        CHECK(same_files(in_folder("one.safetensors"), in_folder("back/model.safetensors")),
              "the way there and back changed the file");
        folder_remove(in_folder("dcp"));
        folder_remove(in_folder("zstd"));
        folder_remove(in_folder("several"));
        folder_remove(in_folder("back"));
    }
    rsd_pool_free(pool);
}

/* ---- a checkpoint of some size ---- */

/* Six tensors of about 1200 bytes times `rows` each. */
static void make_large_checkpoint(const char *path, int nfiles, int rows)
{
    enum { NTENSORS = 6 };
    rsd_tensor locals[NTENSORS];
    char names[NTENSORS][32], text[128];
    rsd_layout *layouts[NTENSORS];
    void **arrays[NTENSORS];
    rsd_value value = {.struct_nbytes = sizeof value, .name = "step", .json = "17"};
    rsd_save_options options = {
        .struct_nbytes = sizeof options, .overwrite = 1, .nvalues = 1, .values = &value};
    for (int i = 0; i < NTENSORS; i++) {
        snprintf(names[i], sizeof names[i], "layer.%d", i);
        snprintf(text, sizeof text, "f32[%d,300] @ %d : S(%d)", rows + 7 * i, nfiles, i % 2);
        OK(rsd_layout_parse(text, &layouts[i]));
        arrays[i] = malloc((size_t)nfiles * sizeof *arrays[i]);
        for (int a = 0; a < nfiles; a++) {
            rsd_array about;
            OK(rsd_layout_array(layouts[i], a, &about));
            float *numbers = malloc(about.nbytes + 1);
            for (size_t k = 0; k < about.nbytes / sizeof *numbers; k++)
                numbers[k] = (float)(k * 31 + (size_t)(a * 7 + i)) / 3;
            arrays[i][a] = numbers;
        }
        locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                 .name = names[i],
                                 .layout = layouts[i],
                                 .rank = RSD_EVERY_RANK,
                                 .arrays = arrays[i]};
    }
    OK(rsd_save(path, NTENSORS, locals, &options, NULL));
    for (int i = 0; i < NTENSORS; i++) {
        for (int a = 0; a < nfiles; a++)
            free(arrays[i][a]);
        free(arrays[i]);
        rsd_layout_free(layouts[i]);
    }
}

static void make_checkpoint(const char *path, int nfiles)
{
    make_large_checkpoint(path, nfiles, 301);
}

/* ---- progress ---- */

struct heard_progress {
    int64_t ncalls, nbytes_done, nbytes_total, least_step;
};

static int note_progress(void *context, const rsd_progress *progress)
{
    struct heard_progress *heard = context;
    int64_t step = progress->nbytes_done - heard->nbytes_done;
    if (progress->nbytes_done < progress->nbytes_total && step < heard->least_step)
        heard->least_step = step;
    heard->ncalls++;
    heard->nbytes_done = progress->nbytes_done;
    heard->nbytes_total = progress->nbytes_total;
    return 0;
}

static void progress_calls(void)
{
    CASE("progress is reported after every megabyte, and at the end");
    make_large_checkpoint(in_folder("source"), 4, 1001);
    for (int threads = 1; threads <= 4; threads += 3) {
        struct heard_progress heard = {.least_step = INT64_MAX};
        rsd_io io = {.struct_nbytes = sizeof io,
                     .max_nbytes = 100000,
                     .on_progress = note_progress,
                     .context = &heard};
        rsd_convert_options options = {.struct_nbytes = sizeof options, .io = &io};
        OK(rsd_pool_new(threads, &io.pool));
        OK(convert(in_folder("source"), in_folder("target"), &options));
        CHECK(heard.nbytes_done == heard.nbytes_total && heard.nbytes_total > 7000000);
        CHECK(heard.least_step >= 1 << 20, "a call after %lld bytes", (long long)heard.least_step);
        CHECK(heard.ncalls >= 5 && heard.ncalls <= 8, "%lld calls", (long long)heard.ncalls);
        rsd_pool_free(io.pool);
        folder_remove(in_folder("target"));
    }
}

/* ---- stopped and resumed ---- */

struct stopping {
    struct random random;
    int64_t after;
};

static int stop_after(void *context, const rsd_progress *progress)
{
    const struct stopping *stopping = context;
    return progress->nbytes_done >= stopping->after &&
           progress->nbytes_done < progress->nbytes_total;
}

static rsd_status choose_columns(void *context, const rsd_tensor_info *tensor,
                                 rsd_tensor_target *choice)
{
    char text[128];
    (void)context;
    snprintf(text, sizeof text, "f32[%lld,%lld] @ 3 : S(1)", (long long)tensor->shape[0],
             (long long)tensor->shape[1]);
    return rsd_layout_parse(text, &choice->layout);
}

static bool no_part(const char *out)
{
    char part[512];
    snprintf(part, sizeof part, "%s.reshard-part", out);
    return !is_there(part);
}

static void cancelled_and_resumed(void)
{
    CASE("a cancelled run is resumed, and reports only its own work");
    make_large_checkpoint(in_folder("source"), 4, 901);
    for (int kind = 0; kind < 3; kind++)
        for (int64_t after = 0; after < 6000000; after += 1100000) {
            struct stopping stopping = {.after = after};
            rsd_io io = {
                .struct_nbytes = sizeof io, .on_progress = stop_after, .context = &stopping};
            rsd_convert_options options = {.struct_nbytes = sizeof options,
                                           .io = &io,
                                           .format = kind ? RSD_FORMAT_DCP : RSD_FORMAT_SAFETENSORS,
                                           .max_shard_nbytes = kind ? 0 : 2500000,
                                           .compress = kind == 2,
                                           .map = kind ? choose_columns : NULL};
            rsd_status status = convert(in_folder("source"), in_folder("target"), &options);
            CHECK(status == RSD_OK || status == RSD_ECANCELLED, "%s", rsd_error());
            if (status == RSD_ECANCELLED) {
                rsd_checkpoint *none;
                CHECK(!is_there(in_folder("target")));
                FAILS(RSD_EFORMAT, "not finished",
                      rsd_checkpoint_open(in_folder("target.reshard-part"), NULL, &none));
                FAILS(RSD_EEXIST, "resume",
                      convert(in_folder("source"), in_folder("target"), &options));
                options.resume = 1;
                io.on_progress = NULL;
                rsd_checkpoint *in;
                rsd_report report = {.struct_nbytes = sizeof report};
                OK(rsd_checkpoint_open(in_folder("source"), NULL, &in));
                OK(rsd_convert(in, in_folder("target"), &options, &report));
                rsd_checkpoint_close(in);
                if (kind < 2 && after > 3000000)
                    CHECK(report.nbytes_needed < 4500000, "%lld bytes were read again",
                          (long long)report.nbytes_needed);
                CHECK(report.nbytes_written <= report.nbytes_needed + 50000,
                      "%lld bytes written of %lld", (long long)report.nbytes_written,
                      (long long)report.nbytes_needed);
            }
            CHECK(no_part(in_folder("target")));
            check_same(in_folder("source"), in_folder("target"), NULL);
            folder_remove(in_folder("target"));
        }
}

static void changed_sources(void)
{
    CASE("a resumed run refuses other sources and other targets");
    make_checkpoint(in_folder("source"), 4);
    struct stopping stopping = {.after = 600000};
    rsd_io io = {.struct_nbytes = sizeof io, .on_progress = stop_after, .context = &stopping};
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .max_shard_nbytes = 400000, .io = &io};
    CHECK(convert(in_folder("source"), in_folder("target"), &options) == RSD_ECANCELLED);
    options.resume = 1;
    options.max_shard_nbytes = 1000000;
    FAILS(RSD_EMISMATCH, "something else",
          convert(in_folder("source"), in_folder("target"), &options));
    options.max_shard_nbytes = 400000;
    make_checkpoint(in_folder("source"), 4);
    FAILS(RSD_EMISMATCH, "changed", convert(in_folder("source"), in_folder("target"), &options));
    CHECK(!no_part(in_folder("target")));
    folder_remove(in_folder("target.reshard-part"));
    io.on_progress = NULL;
    OK(convert(in_folder("source"), in_folder("target"), &options));
    folder_remove(in_folder("target"));
}

static void killed_and_resumed(void)
{
    CASE("a run that was killed at any moment is resumed, also over an older checkpoint");
    struct random random = {5};
    make_checkpoint(in_folder("source"), 4);
    make_checkpoint(in_folder("older"), 2);
    for (int round = 0; round < 60; round++) {
        int kind = round % 3, kills = 0, outcome = 0;
        bool over = round % 2;
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .format = kind ? RSD_FORMAT_DCP : RSD_FORMAT_SAFETENSORS,
                                       .max_shard_nbytes = kind ? 0 : 500000,
                                       .compress = kind == 2,
                                       .overwrite = over,
                                       .resume = 1,
                                       .map = kind ? choose_columns : NULL};
        if (over) {
            make_checkpoint(in_folder("target"), 2);
            FILE *notes = fopen(in_folder("target/notes.txt"), "w");
            if (CHECK(notes != NULL))
                fclose(notes);
        }
        do {
            fflush(stdout);
            pid_t child = fork();
            if (child == 0)
                _exit(convert(in_folder("source"), in_folder("target"), &options) ? 1 : 0);
            if (kills < 4) {
                usleep((useconds_t)random_below(&random, 40000));
                kill(child, SIGKILL);
                kills++;
            }
            waitpid(child, &outcome, 0);
            if (over && WIFSIGNALED(outcome)) { /* the old one or the new one */
                rsd_checkpoint *there;
                if (OK(rsd_checkpoint_open(in_folder("target"), NULL, &there)))
                    rsd_checkpoint_close(there);
            }
            if (!over && is_there(in_folder("target")))
                check_same(in_folder("source"), in_folder("target"), NULL);
            if (!over && is_there(in_folder("target")))
                break;
        } while (WIFSIGNALED(outcome));
        CHECK(WIFSIGNALED(outcome) || WEXITSTATUS(outcome) == 0, "round %d ended with %d", round,
              WEXITSTATUS(outcome));
        if (!WIFSIGNALED(outcome)) {
            CHECK(!over || is_there(in_folder("target/notes.txt")),
                  "round %d lost somebody's notes", round);
            CHECK(no_part(in_folder("target")));
            check_same(in_folder("source"), in_folder("target"), NULL);
        }
        folder_remove(in_folder("target"));
        folder_remove(in_folder("target.reshard-part"));
    }
}

/* ---- choices ---- */

static rsd_status choose_some(void *context, const rsd_tensor_info *tensor,
                              rsd_tensor_target *choice)
{
    (void)context;
    static char name[64];
    snprintf(name, sizeof name, "renamed.%s", tensor->name);
    choice->name = name;
    choice->keep = strcmp(tensor->name, "layer.3") != 0;
    choice->dtype = strcmp(tensor->name, "layer.1") == 0 ? RSD_BF16 : tensor->dtype;
    return RSD_OK;
}

static rsd_status choose_one_name(void *context, const rsd_tensor_info *tensor,
                                  rsd_tensor_target *choice)
{
    (void)context, (void)tensor;
    choice->name = "the same";
    return RSD_OK;
}

static void choices(void)
{
    CASE("tensors are left out, renamed and cast");
    make_checkpoint(in_folder("source"), 3);
    rsd_convert_options options = {.struct_nbytes = sizeof options, .map = choose_some};
    rsd_checkpoint *in, *out;
    rsd_report report = {.struct_nbytes = sizeof report};
    OK(rsd_checkpoint_open(in_folder("source"), NULL, &in));
    OK(rsd_convert(in, in_folder("chosen"), &options, &report));
    CHECK(report.ntensors == 5 && report.nleft_out == 2, "%lld %lld", (long long)report.ntensors,
          (long long)report.nleft_out);
    if (OK(rsd_checkpoint_open(in_folder("chosen"), NULL, &out))) {
        int64_t index;
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        OK(rsd_checkpoint_find(out, "renamed.layer.1", &index));
        OK(rsd_checkpoint_tensor(out, index, &tensor));
        CHECK(tensor.dtype == RSD_BF16);
        CHECK(rsd_checkpoint_find(out, "renamed.layer.3", &index) == RSD_EMISMATCH);
        rsd_checkpoint_close(out);
    }
    options.map = choose_one_name;
    FAILS(RSD_EINVAL, "two tensors", rsd_convert(in, in_folder("doubled"), &options, NULL));
    options =
        (rsd_convert_options){.struct_nbytes = sizeof options, .format = RSD_FORMAT_TORCH_SAVE};
    FAILS(RSD_EUNSUPPORTED, "cannot be written",
          rsd_convert(in, in_folder("doubled"), &options, NULL));
    options = (rsd_convert_options){.struct_nbytes = sizeof options, .compress = 3};
    FAILS(RSD_EINVAL, "compressed", rsd_convert(in, in_folder("doubled"), &options, NULL));
    options = (rsd_convert_options){.struct_nbytes = sizeof options, .dry = 1};
    OK(rsd_convert(in, in_folder("doubled"), &options, &report));
    CHECK(!is_there(in_folder("doubled")) && no_part(in_folder("doubled")));
    options = (rsd_convert_options){.struct_nbytes = sizeof options, .max_shard_nbytes = 10};
    FAILS(RSD_EINVAL, "pass a directory",
          rsd_convert(in, in_folder("x.safetensors"), &options, NULL));
    rsd_checkpoint_close(in);
}

/* Arrays that are packed from several boxes: segments, and block-cyclic along both dims. */
static rsd_status choose_packed(void *context, const rsd_tensor_info *tensor,
                                rsd_tensor_target *choice)
{
    char text[256];
    long long rows = (long long)tensor->shape[0], columns = (long long)tensor->shape[1];
    const int *way = context;
    if (*way == 0)
        snprintf(text, sizeof text, "f32[%lld,%lld] @ 3 : S(0;%lld,%lld)", rows, columns, rows - 90,
                 90LL);
    else if (*way == 1)
        snprintf(text, sizeof text, "f32[%lld,%lld] @ 3 : S(1;%lld,%lld)", rows, columns,
                 columns - 61, 61LL);
    else
        snprintf(text, sizeof text, "f32[%lld,%lld] @ 2x2 : C(0,32),C(1,16)", rows, columns);
    return rsd_layout_parse(text, &choice->layout);
}

static void packed_shards(void)
{
    CASE("the boxes of a rank are packed into one array, and read back");
    make_checkpoint(in_folder("source"), 3);
    for (int way = 0; way < 3; way++) {
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .map = choose_packed,
                                       .map_context = &way,
                                       .every_replica = way != 1,
                                       .overwrite = 1};
        OK(convert(in_folder("source"), in_folder("packed"), &options));
        check_same(in_folder("source"), in_folder("packed"), NULL);
        rsd_checkpoint *packed;
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        if (OK(rsd_checkpoint_open(in_folder("packed"), NULL, &packed))) {
            OK(rsd_checkpoint_tensor(packed, 0, &tensor));
            CHECK(tensor.nboxes > 3, "%lld boxes", (long long)tensor.nboxes);
            rsd_checkpoint_close(packed);
        }
    }
}

static void shards(void)
{
    CASE("safetensors shards: each box once, or all boxes of every rank");
    make_checkpoint(in_folder("source"), 3);
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .map = choose_columns, .overwrite = 1};
    OK(convert(in_folder("source"), in_folder("shards"), &options));
    CHECK(is_there(in_folder("shards/shard-00003-model-00001-of-00001.safetensors")));
    check_same(in_folder("source"), in_folder("shards"), NULL);
    options.every_replica = 1;
    OK(convert(in_folder("shards"), in_folder("ranks"), &options));
    CHECK(is_there(in_folder("ranks/rank-00002-of-00003.safetensors")));
    check_same(in_folder("source"), in_folder("ranks"), NULL);
}

static void side_files(void)
{
    CASE("a side file must exist and be a regular file");
    make_checkpoint(in_folder("source"), 3);
    char directory[512], missing[512];
    snprintf(directory, sizeof directory, "%s", in_folder("source"));
    snprintf(missing, sizeof missing, "%s", in_folder("nosuch.json"));
    const char *side = directory;
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .nside_files = 1, .side_files = &side};
    errno = ENOENT; /* of an earlier call */
    FAILS(RSD_EIO, "regular file",
          convert(in_folder("source"), in_folder("with_side_files"), &options));
    side = missing;
    FAILS(RSD_ENOENT, "nosuch.json: No such file",
          convert(in_folder("source"), in_folder("with_side_files"), &options));
    CHECK(!is_there(in_folder("with_side_files")) && no_part(in_folder("with_side_files")));
}

/* ---- damage ---- */

static void flip_bit(const char *path, long at)
{
    FILE *file = fopen(path, "r+b");
    if (!CHECK(file != NULL))
        return;
    fseek(file, at, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(byte ^ 4, file);
    fclose(file);
}

static rsd_status note_finding(void *context, const char *text)
{
    snprintf(context, 512, "%s", text);
    return RSD_OK;
}

static void damage(void)
{
    CASE("one flipped bit is detected, with its position");
    make_checkpoint(in_folder("source"), 3);
    make_checkpoint(in_folder("damaged"), 3);
    rsd_checkpoint *good, *bad;
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    char finding[512] = "", difference[512] = "";
    int64_t n;
    OK(rsd_checkpoint_open(in_folder("source"), NULL, &good));
    OK(rsd_checkpoint_box(good, 2, 1, &stored));
    flip_bit(in_folder("damaged/__1_0.distcp"), (long)(stored.offset + 704 + 4 * 301));
    OK(rsd_checkpoint_open(in_folder("damaged"), NULL, &bad));
    OK(rsd_verify(bad, NULL, note_finding, finding, &n, NULL));
    CHECK(n == 1 && strstr(finding, "__1_0.distcp") && strstr(finding, "layer.2") &&
              strstr(finding, "CRC-32"),
          "%lld findings, %s", (long long)n, finding);
    rsd_convert_options options = {.struct_nbytes = sizeof options};
    FAILS(RSD_EFORMAT, "layer.2", rsd_convert(bad, in_folder("from_damaged"), &options, NULL));
    CHECK(!is_there(in_folder("from_damaged")) && no_part(in_folder("from_damaged")));
    FAILS(RSD_EFORMAT, "damaged", rsd_diff(good, bad, NULL, NULL, difference, &n, NULL));
    rsd_checkpoint_close(bad);

    OK(convert(in_folder("source"), in_folder("flipped.safetensors"), &options));
    OK(rsd_checkpoint_open(in_folder("flipped.safetensors"), NULL, &bad));
    int64_t index;
    OK(rsd_checkpoint_find(bad, "layer.2", &index));
    OK(rsd_checkpoint_box(bad, index, 0, &stored));
    rsd_checkpoint_close(bad);
    flip_bit(in_folder("flipped.safetensors"), (long)stored.offset + 4 * (300 * 7 + 5) + 1);
    OK(rsd_checkpoint_open(in_folder("flipped.safetensors"), NULL, &bad));
    OK(rsd_diff(good, bad, NULL, tell, NULL, &n, NULL));
    CHECK(n == 1, "%lld", (long long)n);
    rsd_checkpoint_close(good);
    rsd_checkpoint_close(bad);
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("convert"));
    golden_converts();
    progress_calls();
    cancelled_and_resumed();
    changed_sources();
    killed_and_resumed();
    choices();
    shards();
    packed_shards();
    side_files();
    damage();
    folder_remove(folder);
    return tap_end();
}
