/* test_output_links.c - what is at the path of an output, or comes there during the run: links, FIFOs, files
 * with two names, and another run. Nothing but the output is written or removed. */
#include "folder.h"
#include "reshard.h"
#include "tap.h"
#include "truth.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

static void copy_golden(const char *to)
{
    char command[1200];
    snprintf(command, sizeof command, "rm -rf '%s' && cp -r '%s' '%s'", to,
             golden_path("values", "ckpt"), to);
    CHECK(system(command) == 0);
}

static bool is_intact(const char *path)
{
    return count_entries(path) == count_entries(golden_path("values", "ckpt"));
}

static rsd_status convert(const char *to, rsd_convert_options *options)
{
    rsd_checkpoint *in;
    rsd_status status = rsd_checkpoint_open(golden_path("values", "ckpt"), NULL, &in);
    if (status)
        return status;
    status = rsd_convert(in, to, options, NULL);
    rsd_checkpoint_close(in);
    return status;
}

enum kind { LINK_TO_CHECKPOINT, LINK_TO_NOTHING, FIFO, PLAIN_FILE, CHECKPOINT, NKINDS };

static void put_in_the_way(const char *path, enum kind kind)
{
    if (kind == LINK_TO_CHECKPOINT)
        CHECK(symlink(in_folder("victim"), path) == 0);
    else if (kind == LINK_TO_NOTHING)
        CHECK(symlink("nothing", path) == 0);
    else if (kind == FIFO)
        CHECK(mkfifo(path, 0600) == 0);
    else if (kind == PLAIN_FILE)
        close(open(path, O_CREAT | O_WRONLY, 0600));
    else
        copy_golden(path);
}

static void take_away(const char *path, enum kind kind)
{
    if (kind == CHECKPOINT)
        folder_remove(path);
    else
        unlink(path);
}

/* For each kind of thing, at each name, over each kind of output. */
static void in_the_way_before(void)
{
    static const char *const names[] = {"out.reshard-part", "out.reshard-old"};
    for (int kind = 0; kind < NKINDS; kind++)
        for (size_t name = 0; name < 2; name++) {
            CASE("something at %s (%d) is neither followed nor removed", names[name], kind);
            for (int over = 0; over < 3; over++) {
                rsd_convert_options options = {.struct_nbytes = sizeof options,
                                               .format = RSD_FORMAT_DCP,
                                               .overwrite = over == 2,
                                               .resume = over == 1};
                copy_golden(in_folder("victim"));
                if (over)
                    copy_golden(in_folder("out"));
                else
                    mkdir(in_folder("out"), 0700);
                put_in_the_way(in_folder(names[name]), (enum kind)kind);
                FAILS(RSD_EEXIST, "was not created by reshard",
                      convert(in_folder("out"), &options));
                CHECK(is_intact(in_folder("victim")));
                CHECK(!over || is_intact(in_folder("out")));
                struct stat found;
                CHECK(lstat(in_folder(names[name]), &found) == 0);
                CHECK(kind != CHECKPOINT || is_intact(in_folder(names[name])));
                take_away(in_folder(names[name]), (enum kind)kind);
                folder_remove(in_folder("out"));
            }
        }
}

static void of_one_file(void)
{
    CASE("a directory beside an output of one file is not emptied");
    rsd_convert_options options = {.struct_nbytes = sizeof options, .resume = 1};
    copy_golden(in_folder("x.safetensors.reshard-part"));
    FAILS(RSD_EEXIST, "was not created by reshard", convert(in_folder("x.safetensors"), &options));
    CHECK(is_intact(in_folder("x.safetensors.reshard-part")));
    folder_remove(in_folder("x.safetensors.reshard-part"));
    CHECK(symlink(in_folder("victim"), in_folder("x.safetensors")) == 0);
    copy_golden(in_folder("victim"));
    options.resume = 0;
    options.overwrite = 1;
    FAILS(RSD_EEXIST, "is not a regular file", convert(in_folder("x.safetensors"), &options));
    unlink(in_folder("x.safetensors"));
    CHECK(is_intact(in_folder("victim")));
}

/* ---- files of an interrupted run ---- */

static int stop_at_once(void *context, const rsd_progress *progress)
{
    (void)context, (void)progress;
    return 1;
}

static void leave_a_part(void)
{
    rsd_convert_options options = {
        .struct_nbytes = sizeof options,
        .format = RSD_FORMAT_DCP,
        .io = &(rsd_io){.struct_nbytes = sizeof(rsd_io), .on_progress = stop_at_once}};
    CHECK(convert(in_folder("out"), &options) == RSD_ECANCELLED);
    CHECK(is_there(in_folder("out.reshard-part/reshard-journal")));
}

static void marks_that_are_not_ours(void)
{
    CASE("a journal that is a link, a FIFO or has two names is not used");
    char journal[300];
    snprintf(journal, sizeof journal, "%s", in_folder("out.reshard-part/reshard-journal"));
    for (int kind = 0; kind < 3; kind++) {
        rsd_convert_options options = {
            .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .resume = 1};
        leave_a_part();
        CHECK(rename(journal, in_folder("kept")) == 0);
        if (kind == 0)
            CHECK(symlink(in_folder("kept"), journal) == 0);
        else if (kind == 1)
            CHECK(mkfifo(journal, 0600) == 0);
        else
            CHECK(link(in_folder("kept"), journal) == 0);
        FAILS(RSD_EEXIST, "was not created by reshard", convert(in_folder("out"), &options));
        CHECK(is_there(in_folder("kept")));
        folder_remove(in_folder("out.reshard-part"));
        unlink(in_folder("kept"));
    }
}

static void put_file(const char *path)
{
    close(open(path, O_CREAT | O_WRONLY, 0600));
    CHECK(is_there(path));
}

static void marks_that_came_with_files(void)
{
    CASE("a mark in a checkpoint that is replaced does not say that its files may be removed");
    static const char *const marks[] = {"out/reshard-retired", "out/reshard-replaced"};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        rsd_convert_options options = {
            .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .overwrite = 1};
        copy_golden(in_folder("out"));
        put_file(in_folder("out/README"));
        put_file(in_folder(marks[i]));
        FAILS(RSD_EEXIST, "was not created by reshard", convert(in_folder("out"), &options));
        CHECK(is_there(in_folder("out/README")) && !is_there(in_folder("out.reshard-part")));
        unlink(in_folder(marks[i]));
        OK(convert(in_folder("out"), &options));
        CHECK(is_there(in_folder("out/README")));
        folder_remove(in_folder("out"));
    }
}

static void directories_of_others(void)
{
    CASE("a staging directory of another user in a directory that is open to all is not used");
    if (geteuid() != 0)
        return; /* only root can make one */
    char path[300];
    snprintf(path, sizeof path, "%s", in_folder("all"));
    CHECK(mkdir(path, 0777) == 0 && chmod(path, 01777) == 0);
    static const char *const names[] = {"all/out.reshard-part", "all/out.reshard-old"};
    for (size_t i = 0; i < 2; i++) {
        CHECK(mkdir(in_folder(names[i]), 0777) == 0 && chown(in_folder(names[i]), 1, 1) == 0);
        FAILS(RSD_EEXIST, "was not created by reshard", convert(in_folder("all/out"), NULL));
        CHECK(chown(in_folder(names[i]), 0, 0) == 0 && rmdir(in_folder(names[i])) == 0);
    }
    CHECK(mkdir(in_folder(names[0]), 0777) == 0);
    OK(convert(in_folder("all/out"), NULL));
    folder_remove(path);
}

static void files_with_two_names(void)
{
    CASE("a data file that is a link or has another name is made anew, and the other one is kept");
    for (int kind = 0; kind < 2; kind++) {
        rsd_convert_options options = {
            .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .resume = 1};
        leave_a_part();
        copy_golden(in_folder("victim"));
        char data[300], victim[300];
        snprintf(data, sizeof data, "%s", in_folder("out.reshard-part/__0_0.distcp"));
        snprintf(victim, sizeof victim, "%s", in_folder("victim/.metadata"));
        unlink(data);
        CHECK((kind ? symlink(victim, data) : link(victim, data)) == 0);
        size_t before, after;
        char *bytes = read_whole(victim, &before);
        rsd_status status = convert(in_folder("out"), &options);
        CHECK(status == RSD_OK || status == RSD_EIO, "%s", rsd_error());
        char *again = read_whole(victim, &after);
        CHECK(bytes && again && before == after && memcmp(bytes, again, before) == 0);
        free(bytes);
        free(again);
        folder_remove(in_folder("out"));
        folder_remove(in_folder("out.reshard-part"));
    }
}

/* ---- during the run ---- */

static int swap_paths(void *context, const rsd_progress *progress)
{
    bool *swapped = context;
    (void)progress;
    if (!*swapped) {
        *swapped = true;
        CHECK(rename(in_folder("out.reshard-part"), in_folder("moved")) == 0);
        CHECK(symlink(in_folder("victim"), in_folder("out.reshard-part")) == 0);
    }
    return 0;
}

static void swapped_during_the_run(void)
{
    for (int over = 0; over < 2; over++) {
        CASE("the staging directory is swapped for a link during the run, %s",
             over ? "over" : "new");
        bool swapped = false;
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .format = RSD_FORMAT_DCP,
                                       .overwrite = over,
                                       .io = &(rsd_io){.struct_nbytes = sizeof(rsd_io),
                                                       .on_progress = swap_paths,
                                                       .context = &swapped}};
        copy_golden(in_folder("victim"));
        if (over)
            copy_golden(in_folder("out"));
        FAILS(RSD_EIO, "moved or replaced by another process", convert(in_folder("out"), &options));
        CHECK(swapped && is_intact(in_folder("victim")));
        CHECK(over ? is_intact(in_folder("out")) : !is_there(in_folder("out")));
        unlink(in_folder("out.reshard-part"));
        folder_remove(in_folder("moved"));
        folder_remove(in_folder("out"));
    }
}

static int swap_output(void *context, const rsd_progress *progress)
{
    bool *swapped = context;
    (void)progress;
    if (!*swapped) {
        *swapped = true;
        CHECK(rename(in_folder("out"), in_folder("moved")) == 0);
        CHECK(mkdir(in_folder("out"), 0700) == 0);
        put_file(in_folder("out/precious"));
    }
    return 0;
}

static void output_that_is_swapped(void)
{
    CASE("a directory that comes to the path during the run is replaced only if it may be");
    bool swapped = false;
    rsd_convert_options options = {.struct_nbytes = sizeof options,
                                   .format = RSD_FORMAT_DCP,
                                   .overwrite = 1,
                                   .io = &(rsd_io){.struct_nbytes = sizeof(rsd_io),
                                                   .on_progress = swap_output,
                                                   .context = &swapped}};
    copy_golden(in_folder("out"));
    FAILS(RSD_EEXIST, "is not a checkpoint", convert(in_folder("out"), &options));
    CHECK(swapped && is_there(in_folder("out/precious")) && is_intact(in_folder("moved")));
    unlink(in_folder("out/precious"));
    options.resume = 1;
    OK(convert(in_folder("out"), &options));
    CHECK(!is_there(in_folder("out.reshard-part")));
    folder_remove(in_folder("moved"));
    folder_remove(in_folder("out"));
}

static int run_again(void *context, const rsd_progress *progress)
{
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .resume = *(int *)context};
    (void)progress;
    FAILS(RSD_EEXIST, "still running", convert(in_folder("out"), &options));
    return 0;
}

static void two_runs_at_once(void)
{
    CASE("a second run is told that the first is alive");
    for (int resume = 0; resume < 2; resume++) {
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .format = RSD_FORMAT_DCP,
                                       .io = &(rsd_io){.struct_nbytes = sizeof(rsd_io),
                                                       .on_progress = run_again,
                                                       .context = &resume}};
        OK(convert(in_folder("out"), &options));
        CHECK(!is_there(in_folder("out.reshard-part")));
        folder_remove(in_folder("out"));
    }
}

/* ---- inputs ---- */

static int touch_input(void *context, const rsd_progress *progress)
{
    (void)progress;
    char *name = context;
    if (*name) {
        if (chmod(name, 0640) != 0) /* ctime changes, and nothing else does */
            return 1;
        *name = '\0';
    }
    return 0;
}

static void input_that_changes(void)
{
    CASE("an input that changes while it is read is an error");
    char name[400], source[300];
    rsd_checkpoint *in;
    copy_golden(in_folder("source"));
    snprintf(source, sizeof source, "%s", in_folder("source"));
    OK(rsd_checkpoint_open(source, NULL, &in));
    char(*digests)[RSD_DIGEST_NCHARS] =
        calloc((size_t)rsd_checkpoint_ntensors(in), sizeof *digests);
    OK(rsd_digest(in, 0, NULL, NULL, digests, NULL));
    snprintf(name, sizeof name, "%s/__0_0.distcp", source);
    touch_input(name, NULL);
    FAILS(RSD_EIO, "changed while it was read", rsd_digest(in, 0, NULL, NULL, digests, NULL));
    free(digests);
    rsd_checkpoint_close(in);
}

static rsd_status open_and_digest(const char *path, int32_t follow_links)
{
    rsd_checkpoint *in;
    rsd_open_options options = {.struct_nbytes = sizeof options, .follow_links = follow_links};
    rsd_status status = rsd_checkpoint_open(path, &options, &in);
    if (status)
        return status;
    char(*digests)[RSD_DIGEST_NCHARS] =
        calloc((size_t)rsd_checkpoint_ntensors(in) + 1, sizeof *digests);
    status = rsd_digest(in, 0, NULL, NULL, digests, NULL);
    free(digests);
    rsd_checkpoint_close(in);
    return status;
}

static void links_of_inputs(void)
{
    CASE("a link of an input leads outside only in a cache, or if the user allows it");
    char data[300];
    copy_golden(in_folder("victim"));
    copy_golden(in_folder("source"));
    snprintf(data, sizeof data, "%s", in_folder("source/__0_0.distcp"));
    unlink(data);
    CHECK(symlink(in_folder("victim/__0_0.distcp"), data) == 0);
    FAILS(RSD_EFORMAT, "leads out of the checkpoint", open_and_digest(in_folder("source"), 0));
    OK(open_and_digest(in_folder("source"), 1));
    unlink(data);
    CHECK(symlink("../victim/__0_0.distcp", data) == 0);
    FAILS(RSD_EFORMAT, "leads out of the checkpoint", open_and_digest(in_folder("source"), 0));
    CHECK(rename(data, in_folder("link")) == 0);
    copy_golden(in_folder("source"));
    CHECK(rename(data, in_folder("source/inside")) == 0 && symlink("inside", data) == 0);
    OK(open_and_digest(in_folder("source"), 0));
    unlink(data);
    CHECK(mkfifo(data, 0600) == 0);
    FAILS(RSD_EIO, "not a regular file", open_and_digest(in_folder("source"), 0));
    folder_remove(in_folder("source"));

    char command[2000];
    snprintf(command, sizeof command,
             "cd '%s' && mkdir -p c/snapshots/r c/blobs && for f in victim/* victim/.metadata; do "
             "cp $f c/blobs/b$(basename $f); ln -s ../../blobs/b$(basename $f) "
             "c/snapshots/r/$(basename $f); done",
             folder);
    CHECK(system(command) == 0);
    OK(open_and_digest(in_folder("c/snapshots/r"), 0));
    snprintf(command, sizeof command,
             "cd '%s' && mv c/blobs elsewhere && ln -s ../elsewhere c/blobs", folder);
    CHECK(system(command) == 0);
    FAILS(RSD_EFORMAT, "leads out of the checkpoint",
          open_and_digest(in_folder("c/snapshots/r"), 0));
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("links"));
    in_the_way_before();
    of_one_file();
    marks_that_are_not_ours();
    marks_that_came_with_files();
    directories_of_others();
    files_with_two_names();
    swapped_during_the_run();
    output_that_is_swapped();
    two_runs_at_once();
    input_that_changes();
    links_of_inputs();
    folder_remove(folder);
    return tap_end();
}
