/* test_output_links.c - what is at the path of an output, or comes there during the run: links, FIFOs, files
 * with two names, and another run. Nothing but the output is written or removed.
 *
 * The linker redirects some calls to this file (--wrap), so that another process can come in between. */
#include "../src/cli/cli.h"
#include "folder.h"
#include "reshard.h"
#include "store.h"
#include "tap.h"
#include "truth.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

/* ---- calls that are redirected ---- */

static void (*before_flock)(void); /* each is called once, by the next such call */
static void (*before_exchange)(void);

static void call_once(void (**function)(void))
{
    void (*called)(void) = *function;
    *function = NULL;
    if (called)
        called();
}

int __real_flock(int fd, int operation);
int __wrap_flock(int fd, int operation);
int __wrap_flock(int fd, int operation)
{
    call_once(&before_flock);
    return __real_flock(fd, operation);
}

int __real_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
int __wrap_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
int __wrap_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    if (flags & RENAME_EXCHANGE)
        call_once(&before_exchange);
    return __real_renameat2(from_fd, from, to_fd, to, flags);
}

/* ---- conversions ---- */

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
    CASE("what is at the path of an output of one file, or beside it, stays");
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
    put_in_the_way(in_folder("x.safetensors"), PLAIN_FILE);
    options.overwrite = 0;
    FAILS(RSD_EEXIST, "already exists", convert(in_folder("x.safetensors"), &options));
    CHECK(unlink(in_folder("x.safetensors")) == 0);
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
        FAILS(RSD_EEXIST, "belongs to another user", convert(in_folder("all/out"), NULL));
        CHECK(chown(in_folder(names[i]), 0, 0) == 0 && rmdir(in_folder(names[i])) == 0);
    }
    CHECK(mkdir(in_folder(names[0]), 0777) == 0);
    OK(convert(in_folder("all/out"), NULL));
    CHECK(chmod(in_folder(""), 0711) == 0);
    setfsuid(1); /* as on a server that takes root for another user */
    OK(rsd_save(in_folder("all/squashed"), 0, NULL, NULL, NULL));
    setfsuid(0);
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

/* Puts something in the place of a file of which the other name is kept. */
static void replace_file(const char *path, const char *other, int kind)
{
    unlink(path);
    CHECK((kind == 0   ? symlink(other, path)
           : kind == 1 ? link(other, path)
                       : mkfifo(path, 0600)) == 0);
}

static void files_swapped_during_the_run(void)
{
    CASE("a file that is swapped after it was created is not opened again");
    const struct output_options options = {.mode = OUTPUT_IN_PLACE};
    for (int kind = 0; kind < 3; kind++) {
        char path[300], victim[300];
        struct store_output *output = NULL;
        uint32_t file;
        size_t n = 0;
        copy_golden(in_folder("victim"));
        mkdir(in_folder("out"), 0700);
        snprintf(path, sizeof path, "%s", in_folder("out/data"));
        snprintf(victim, sizeof victim, "%s", in_folder("victim/.metadata"));
        char *before = read_whole(victim, &n), *after;
        if (!OK(store_open_output(in_folder("out"), &options, &output)))
            return;
        OK(store_add_file(output->store, slice_of("data"), &file));
        OK(store_create(output->store, file, 0, 100));
        replace_file(path, victim, kind);
        CHECK(store_write(output->store, file, 0, "changed", 7) == RSD_EIO, "kind %d", kind);
        CHECK(store_create(output->store, file, 3, 100) == RSD_EIO, "kind %d", kind);
        CHECK(store_reserve(output->store, file, 0, 1 << 20) == RSD_EIO, "kind %d", kind);
        after = read_whole(victim, &n);
        CHECK(before && after && memcmp(before, after, n) == 0, "kind %d", kind);
        OK(store_create(output->store, file, 0, 100)); /* made anew */
        OK(store_write(output->store, file, 0, "changed", 7));
        free(after);
        after = read_whole(victim, &n);
        CHECK(before && after && memcmp(before, after, n) == 0, "kind %d", kind);
        free(before);
        free(after);
        store_close_output(output, true);
        folder_remove(in_folder("out"));
    }
}

/* ---- during the run ---- */

enum swap { LINK_TO_VICTIM, LINK_TO_ITSELF, EMPTY_DIRECTORY, NSWAPS };

struct swapping {
    enum swap how;
    bool done;
};

static void swap_once(struct swapping *swapping)
{
    const char *part = in_folder("out.reshard-part");
    if (swapping->done)
        return;
    swapping->done = true;
    CHECK(rename(part, in_folder("moved")) == 0);
    CHECK((swapping->how == EMPTY_DIRECTORY
               ? mkdir(part, 0700)
               : symlink(in_folder(swapping->how == LINK_TO_ITSELF ? "moved" : "victim"), part)) ==
          0);
}

static int swap_paths(void *context, const rsd_progress *progress)
{
    (void)progress;
    swap_once(context);
    return 0;
}

static rsd_status swap_and_refuse(void *context, rsd_checkpoint *output)
{
    (void)output;
    swap_once(context);
    return rsd_set_error(RSD_EFORMAT, "refused by the test");
}

static void swapped_during_the_run(void)
{
    for (int how = 0; how < NSWAPS; how++)
        for (int over = 0; over < 3; over++) {
            CASE("the staging directory is swapped during the run (%d, %d)", how, over);
            struct swapping swapping = {.how = (enum swap)how};
            rsd_io io = {.struct_nbytes = sizeof io, .context = &swapping};
            rsd_convert_options options = {.struct_nbytes = sizeof options,
                                           .format = RSD_FORMAT_DCP,
                                           .overwrite = over > 0,
                                           .io = &io,
                                           .check = over == 2 ? swap_and_refuse : NULL,
                                           .check_context = &swapping};
            struct stat found;
            io.on_progress = over == 2 ? NULL : swap_paths;
            copy_golden(in_folder("victim"));
            if (over)
                copy_golden(in_folder("out"));
            if (over == 2)
                FAILS(RSD_EFORMAT, "refused by the test", convert(in_folder("out"), &options));
            else
                FAILS(RSD_EIO, "moved or replaced by another process",
                      convert(in_folder("out"), &options));
            CHECK(swapping.done && is_intact(in_folder("victim")));
            CHECK(over ? is_intact(in_folder("out")) : !is_there(in_folder("out")));
            CHECK(lstat(in_folder("out.reshard-part"), &found) == 0, "not ours, and removed");
            unlink(in_folder("out.reshard-part"));
            folder_remove(in_folder("out.reshard-part"));
            folder_remove(in_folder("moved"));
            folder_remove(in_folder("out"));
        }
}

static void put_another(void)
{
    CHECK(rename(in_folder("out"), in_folder("moved")) == 0);
    copy_golden(in_folder("out"));
}

static void replaced_during_the_run(void)
{
    CASE("what comes to the path of the output during the run is kept");
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .overwrite = 1};
    copy_golden(in_folder("out"));
    before_exchange = put_another;
    FAILS(RSD_EIO, "was replaced by another process", convert(in_folder("out"), &options));
    CHECK(is_intact(in_folder("moved")));
    CHECK(is_intact(in_folder("out.reshard-part"))); /* the other one */
    folder_remove(in_folder("out.reshard-part"));
    folder_remove(in_folder("moved"));
    folder_remove(in_folder("out"));
}

static int come_first(void *context, const rsd_progress *progress)
{
    (void)progress;
    copy_golden(context);
    return 0;
}

static void created_during_the_run(void)
{
    static const char *const names[] = {"out", "x.safetensors"};
    CASE("an output that another process created during the run is not replaced");
    for (int one = 0; one < 2; one++) {
        char path[300];
        snprintf(path, sizeof path, "%s", in_folder(names[one]));
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .format = one ? RSD_FORMAT_SAFETENSORS : RSD_FORMAT_DCP,
                                       .io = &(rsd_io){.struct_nbytes = sizeof(rsd_io),
                                                       .on_progress = come_first,
                                                       .context = path}};
        rsd_status status = convert(path, &options);
        CHECK(status == (one ? RSD_EIO : RSD_EEXIST), "%s", rsd_status_name(status));
        CHECK(is_intact(path));
        folder_remove(path);
        strcat(path, ".reshard-part");
        folder_remove(path);
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

static void take_away_journal(void)
{
    CHECK(unlink(in_folder("out.reshard-part/reshard-journal")) == 0);
}

static void run_that_ends(void)
{
    CASE("a run that ends while a second one locks its journal is not resumed");
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .resume = 1};
    leave_a_part();
    before_flock = take_away_journal;
    FAILS(RSD_EEXIST, "still running", convert(in_folder("out"), &options));
    folder_remove(in_folder("out.reshard-part"));
}

static void finish_other_run(void)
{
    CHECK(rename(in_folder("out.reshard-part"), in_folder("out")) == 0);
    put_file(in_folder("out/of_the_other"));
}

static void run_that_is_put_into_place(void)
{
    CASE("a run that is complete while a second one locks its journal is not emptied");
    char journal[300];
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .resume = 1};
    leave_a_part();
    snprintf(journal, sizeof journal, "%s", in_folder("out.reshard-part/reshard-journal"));
    CHECK(truncate(journal, 0) == 0); /* as the one that is made anew */
    before_flock = finish_other_run;
    FAILS(RSD_EIO, "moved or replaced by another process", convert(in_folder("out"), &options));
    CHECK(is_there(in_folder("out/of_the_other")) && !is_there(in_folder("out/reshard-journal")));
    folder_remove(in_folder("out"));
}

/* ---- files that the command writes ---- */

static void files_of_the_command(void)
{
    struct out_file file;
    struct stat found;
    copy_golden(in_folder("victim"));
    for (int kind = 0; kind < NKINDS; kind++) {
        CASE("what is at the path of a file that the command writes stays (%d)", kind);
        CHECK(out_file_open(&file, in_folder("x"), false));
        put_in_the_way(in_folder("x"), (enum kind)kind);
        CHECK(!out_file_close(&file, true) && errno == EEXIST);
        CHECK(!is_there(in_folder("x.reshard-part")));
        put_file(in_folder("x.reshard-part")); /* which stays if nothing is begun */
        CHECK(!out_file_open(&file, in_folder("x"), false) && errno == EEXIST);
        CHECK(!out_file_close(&file, false) && is_there(in_folder("x.reshard-part")));
        CHECK(lstat(in_folder("x"), &found) == 0 && unlink(in_folder("x.reshard-part")) == 0);
        take_away(in_folder("x"), (enum kind)kind);
    }
    CASE("the command replaces a link that leads to a directory, and leaves the directory");
    put_in_the_way(in_folder("x"), LINK_TO_CHECKPOINT);
    CHECK(out_file_open(&file, in_folder("x"), true) && out_file_close(&file, true));
    CHECK(lstat(in_folder("x"), &found) == 0 && S_ISREG(found.st_mode));
    CHECK(is_intact(in_folder("victim")));
}

static void temporary_file_that_is_locked(void)
{
    CASE("a temporary file that another process locks is neither removed nor written");
    struct out_file file, second;
    put_file(in_folder("x.reshard-part"));
    int fd = open(in_folder("x.reshard-part"), O_RDONLY);
    CHECK(flock(fd, LOCK_EX) == 0);
    CHECK(!out_file_open(&file, in_folder("x"), true) && errno == EWOULDBLOCK);
    CHECK(!out_file_close(&file, false) && is_there(in_folder("x.reshard-part")));
    close(fd);
    CHECK(out_file_open(&file, in_folder("x"), true)); /* what a killed run left */
    CHECK(!out_file_open(&second, in_folder("x"), true) && errno == EWOULDBLOCK);
    CHECK(!out_file_close(&second, false) && out_file_close(&file, true));
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
    files_swapped_during_the_run();
    swapped_during_the_run();
    output_that_is_swapped();
    replaced_during_the_run();
    created_during_the_run();
    two_runs_at_once();
    run_that_ends();
    run_that_is_put_into_place();
    files_of_the_command();
    temporary_file_that_is_locked();
    folder_remove(folder);
    return tap_end();
}
