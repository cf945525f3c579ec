/* test_input_links.c - files of an input that change while they are read, links that lead out of its directory, and
 * what is not a regular file.
 *
 * The linker redirects fstat to this file (--wrap), so that one number of a file can change, and nothing else. */
#include "folder.h"
#include "reshard.h"
#include "tap.h"
#include "truth.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

enum change { SAME, OTHER_SIZE, OTHER_MTIME, OTHER_CTIME, NCHANGES };

static enum change changed;

int __real_fstat(int fd, struct stat *about);
int __wrap_fstat(int fd, struct stat *about);
int __wrap_fstat(int fd, struct stat *about)
{
    int result = __real_fstat(fd, about);
    about->st_size += changed == OTHER_SIZE;
    about->st_mtim.tv_sec += changed == OTHER_MTIME;
    about->st_ctim.tv_sec += changed == OTHER_CTIME;
    return result;
}

static void copy_golden(const char *to)
{
    char command[1200];
    snprintf(command, sizeof command, "rm -rf '%s' && cp -r '%s' '%s'", to,
             golden_path("values", "ckpt"), to);
    CHECK(system(command) == 0);
}

static void input_that_changes(void)
{
    CASE("an input that changes while it is read is an error");
    char name[400];
    rsd_checkpoint *in;
    copy_golden(in_folder("source"));
    snprintf(name, sizeof name, "%s", in_folder("source/__0_0.distcp"));
    OK(rsd_checkpoint_open(in_folder("source"), NULL, &in));
    char(*digests)[RSD_DIGEST_NCHARS] =
        calloc((size_t)rsd_checkpoint_ntensors(in), sizeof *digests);
    OK(rsd_digest(in, 0, NULL, NULL, digests, NULL));
    for (enum change change = OTHER_SIZE; change < NCHANGES; change++) { /* one, and nothing else */
        changed = change;
        FAILS(RSD_EIO, "changed while it was read", rsd_digest(in, 0, NULL, NULL, digests, NULL));
        changed = SAME;
    }
    OK(rsd_digest(in, 0, NULL, NULL, digests, NULL));
    CHECK(chmod(name, 0640) == 0);
    FAILS(RSD_EIO, "changed while it was read", rsd_digest(in, 0, NULL, NULL, digests, NULL));
    free(digests);
    rsd_checkpoint_close(in);
}

static int stop_at_once(void *context, const rsd_progress *progress)
{
    (void)context, (void)progress;
    return 1;
}

static rsd_status convert_source(bool resume)
{
    rsd_io io = {.struct_nbytes = sizeof io, .on_progress = resume ? NULL : stop_at_once};
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .resume = resume, .io = &io};
    rsd_checkpoint *in;
    rsd_status status = rsd_checkpoint_open(in_folder("source"), NULL, &in);
    if (!status)
        status = rsd_convert(in, in_folder("out"), &options, NULL);
    rsd_checkpoint_close(in);
    return status;
}

static void input_that_changed_before_resume(void)
{
    CASE("a run is not resumed with an input that changed, although its size and mtime are the "
         "same");
    char name[400];
    struct stat before;
    copy_golden(in_folder("source"));
    snprintf(name, sizeof name, "%s", in_folder("source/__0_0.distcp"));
    CHECK(convert_source(false) == RSD_ECANCELLED);
    CHECK(stat(name, &before) == 0);
    int fd = open(name, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, "x", 1, before.st_size - 1) == 1);
    CHECK(futimens(fd, (struct timespec[2]){before.st_atim, before.st_mtim}) == 0);
    close(fd);
    FAILS(RSD_EMISMATCH, "they were changed since", convert_source(true));
    folder_remove(in_folder("out.reshard-part"));
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
    static const char *const elsewhere[] = {
        "mkdir c/refs && cp c/blobs/b__0_0.distcp c/refs/f && ln -sf ../../refs/f "
        "c/snapshots/r/__0_0.distcp",
        "mkdir c/blobs/d && mv c/refs/f c/blobs/d && ln -sf ../../blobs/d/f "
        "c/snapshots/r/__0_0.distcp",
        "ln -sf ../../blobs/b__0_0.distcp c/snapshots/r/__0_0.distcp && mv c/blobs elsewhere && "
        "ln -s ../elsewhere c/blobs"};
    for (size_t i = 0; i < sizeof elsewhere / sizeof *elsewhere; i++) {
        snprintf(command, sizeof command, "cd '%s' && %s", folder, elsewhere[i]);
        CHECK(system(command) == 0);
        FAILS(RSD_EFORMAT, "leads out of the checkpoint",
              open_and_digest(in_folder("c/snapshots/r"), 0));
    }
}

static void directories_of_inputs(void)
{
    CASE("a directory inside of an input may be a link within it only");
    char command[2000];
    snprintf(command, sizeof command,
             "mkdir '%s/index' '%s/outside' && cp tests/bad/good.safetensors '%s/outside/a' && cd "
             "'%s/index' && ln -s ../outside d && "
             "echo '{\"weight_map\":{\"w\":\"d/a\"}}' > model.safetensors.index.json",
             folder, folder, folder, folder);
    CHECK(system(command) == 0);
    FAILS(RSD_EFORMAT, "leads out of the checkpoint", open_and_digest(in_folder("index"), 0));
    OK(open_and_digest(in_folder("index"), 1));
    CHECK(rename(in_folder("outside"), in_folder("index/inside")) == 0 &&
          unlink(in_folder("index/d")) == 0 && symlink("inside", in_folder("index/d")) == 0);
    OK(open_and_digest(in_folder("index"), 0));
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("input_links"));
    input_that_changes();
    input_that_changed_before_resume();
    links_of_inputs();
    directories_of_inputs();
    folder_remove(folder);
    return tap_end();
}
