/* test_convert.c - conversions keep all tensors: every golden checkpoint to safetensors, to DCP of any layout and
 * back; casts, names and selection; runs that are stopped, killed and resumed. */
#include "conversions.h"
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
        OK(conversion_run(ckpt, in_folder("one.safetensors"), &safe));
        conversion_check_same(truth, in_folder("one.safetensors"), pool);
        safe.max_shard_nbytes = 1000;
        OK(conversion_run(ckpt, in_folder("several"), &safe));
        conversion_check_same(truth, in_folder("several"), NULL);
        safe.format = RSD_FORMAT_TORCH_SAVE;
        OK(conversion_run(ckpt, in_folder("files"), &safe));
        conversion_check_same(truth, in_folder("files"), pool);
        safe.max_shard_nbytes = 0;
        OK(conversion_run(in_folder("files"), in_folder("one.pt"), &safe));
        conversion_check_same(truth, in_folder("one.pt"), NULL);
        safe.format = RSD_FORMAT_SAFETENSORS;
        folder_remove(in_folder("files"));
        OK(conversion_run(ckpt, in_folder("dcp"), &dcp));
        conversion_check_same(truth, in_folder("dcp"), pool);
        dcp.compress = 3;
        OK(conversion_run(in_folder("dcp"), in_folder("zstd"), &dcp));
        conversion_check_same(truth, in_folder("zstd"), pool);
        safe.max_shard_nbytes = 0;
        OK(conversion_run(in_folder("zstd"), in_folder("back"), &safe));
        conversion_check_same(truth, in_folder("back"), pool);
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
    conversion_make_large(in_folder("source"), 4, 1001);
    for (int threads = 1; threads <= 4; threads += 3) {
        struct heard_progress heard = {.least_step = INT64_MAX};
        rsd_io io = {.struct_nbytes = sizeof io,
                     .max_nbytes = 100000,
                     .on_progress = note_progress,
                     .context = &heard};
        rsd_convert_options options = {.struct_nbytes = sizeof options, .io = &io};
        OK(rsd_pool_new(threads, &io.pool));
        OK(conversion_run(in_folder("source"), in_folder("target"), &options));
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

static void cancelled_and_resumed(void)
{
    CASE("a cancelled run is resumed, and reports only its own work");
    conversion_make_large(in_folder("source"), 4, 901);
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
                                           .map = kind ? conversion_choose_columns : NULL};
            rsd_status status = conversion_run(in_folder("source"), in_folder("target"), &options);
            CHECK(status == RSD_OK || status == RSD_ECANCELLED, "%s", rsd_error());
            if (status == RSD_ECANCELLED) {
                rsd_checkpoint *none;
                CHECK(!is_there(in_folder("target")));
                FAILS(RSD_EFORMAT, "not finished",
                      rsd_checkpoint_open(in_folder("target.reshard-part"), NULL, &none));
                FAILS(RSD_EEXIST, "resume",
                      conversion_run(in_folder("source"), in_folder("target"), &options));
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
            CHECK(conversion_left_nothing(in_folder("target")));
            conversion_check_same(in_folder("source"), in_folder("target"), NULL);
            folder_remove(in_folder("target"));
        }
}

static void changed_sources(void)
{
    CASE("a resumed run refuses other sources and other targets");
    conversion_make(in_folder("source"), 4);
    struct stopping stopping = {.after = 600000};
    rsd_io io = {.struct_nbytes = sizeof io, .on_progress = stop_after, .context = &stopping};
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .max_shard_nbytes = 400000, .io = &io};
    CHECK(conversion_run(in_folder("source"), in_folder("target"), &options) == RSD_ECANCELLED);
    options.resume = 1;
    options.max_shard_nbytes = 1000000;
    FAILS(RSD_EMISMATCH, "something else",
          conversion_run(in_folder("source"), in_folder("target"), &options));
    options.max_shard_nbytes = 400000;
    conversion_make(in_folder("source"), 4);
    FAILS(RSD_EMISMATCH, "changed",
          conversion_run(in_folder("source"), in_folder("target"), &options));
    CHECK(!conversion_left_nothing(in_folder("target")));
    folder_remove(in_folder("target.reshard-part"));
    io.on_progress = NULL;
    OK(conversion_run(in_folder("source"), in_folder("target"), &options));
    folder_remove(in_folder("target"));
}

static void killed_and_resumed(void)
{
    CASE("a run that was killed at any moment is resumed, also over an older checkpoint");
    struct random random = {5};
    conversion_make(in_folder("source"), 4);
    conversion_make(in_folder("older"), 2);
    for (int round = 0; round < 60; round++) {
        int kind = round % 3, kills = 0, outcome = 0;
        bool over = round % 2;
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .format = kind ? RSD_FORMAT_DCP : RSD_FORMAT_SAFETENSORS,
                                       .max_shard_nbytes = kind ? 0 : 500000,
                                       .compress = kind == 2,
                                       .overwrite = over,
                                       .resume = 1,
                                       .map = kind ? conversion_choose_columns : NULL};
        if (over) {
            conversion_make(in_folder("target"), 2);
            FILE *notes = fopen(in_folder("target/notes.txt"), "w");
            if (CHECK(notes != NULL))
                fclose(notes);
        }
        do {
            fflush(stdout);
            pid_t child = fork();
            if (child == 0)
                _exit(conversion_run(in_folder("source"), in_folder("target"), &options) ? 1 : 0);
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
                conversion_check_same(in_folder("source"), in_folder("target"), NULL);
            if (!over && is_there(in_folder("target")))
                break;
        } while (WIFSIGNALED(outcome));
        CHECK(WIFSIGNALED(outcome) || WEXITSTATUS(outcome) == 0, "round %d ended with %d", round,
              WEXITSTATUS(outcome));
        if (!WIFSIGNALED(outcome)) {
            CHECK(!over || is_there(in_folder("target/notes.txt")),
                  "round %d lost somebody's notes", round);
            CHECK(conversion_left_nothing(in_folder("target")));
            conversion_check_same(in_folder("source"), in_folder("target"), NULL);
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
    conversion_make(in_folder("source"), 3);
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
    options = (rsd_convert_options){.struct_nbytes = sizeof options, .format = RSD_FORMAT_ORBAX};
    FAILS(RSD_EUNSUPPORTED, "cannot be written",
          rsd_convert(in, in_folder("doubled"), &options, NULL));
    options = (rsd_convert_options){.struct_nbytes = sizeof options, .compress = 3};
    FAILS(RSD_EINVAL, "compressed", rsd_convert(in, in_folder("doubled"), &options, NULL));
    options = (rsd_convert_options){.struct_nbytes = sizeof options, .dry = 1};
    OK(rsd_convert(in, in_folder("doubled"), &options, &report));
    CHECK(!is_there(in_folder("doubled")) && conversion_left_nothing(in_folder("doubled")));
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
    conversion_make(in_folder("source"), 3);
    for (int way = 0; way < 3; way++) {
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .map = choose_packed,
                                       .map_context = &way,
                                       .every_replica = way != 1,
                                       .overwrite = 1};
        OK(conversion_run(in_folder("source"), in_folder("packed"), &options));
        conversion_check_same(in_folder("source"), in_folder("packed"), NULL);
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
    conversion_make(in_folder("source"), 3);
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .map = conversion_choose_columns, .overwrite = 1};
    OK(conversion_run(in_folder("source"), in_folder("shards"), &options));
    CHECK(is_there(in_folder("shards/shard-00003-model-00001-of-00001.safetensors")));
    conversion_check_same(in_folder("source"), in_folder("shards"), NULL);
    options.every_replica = 1;
    OK(conversion_run(in_folder("shards"), in_folder("ranks"), &options));
    CHECK(is_there(in_folder("ranks/rank-00002-of-00003.safetensors")));
    conversion_check_same(in_folder("source"), in_folder("ranks"), NULL);
}

static void side_files(void)
{
    CASE("a side file must exist and be a regular file");
    conversion_make(in_folder("source"), 3);
    char directory[512], missing[512];
    snprintf(directory, sizeof directory, "%s", in_folder("source"));
    snprintf(missing, sizeof missing, "%s", in_folder("nosuch.json"));
    const char *side = directory;
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .nside_files = 1, .side_files = &side};
    errno = ENOENT; /* of an earlier call */
    FAILS(RSD_EIO, "regular file",
          conversion_run(in_folder("source"), in_folder("with_side_files"), &options));
    side = missing;
    FAILS(RSD_ENOENT, "nosuch.json: No such file",
          conversion_run(in_folder("source"), in_folder("with_side_files"), &options));
    CHECK(!is_there(in_folder("with_side_files")) &&
          conversion_left_nothing(in_folder("with_side_files")));
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
    folder_remove(folder);
    return tap_end();
}
