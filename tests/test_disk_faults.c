/* test_disk_faults.c - the nth allocation, open, read, write, flush or rename fails, for every n. The call returns a
 * status, nothing leaks, no reader accepts an incomplete output, and a second run completes it.
 *
 * The linker redirects these calls to this file (--wrap), so the library needs no hook. */
#include "folder.h"
#include "tap.h"
#include "truth.h"

#include "reshard_experimental.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum kind { ALLOCATE, OPEN, READ, WRITE, FLUSH, RENAME, NKINDS };
static const char *const kind_names[] = {"allocation", "open", "read", "write", "flush", "rename"};
static int failing = -1; /* which kind */
static long left;        /* calls of it until one fails */

static bool fails(enum kind kind)
{
    if ((int)kind != failing || left < 0)
        return false;
    return left-- == 0;
}

void *__real_calloc(size_t n, size_t each);
void *__wrap_calloc(size_t n, size_t each);
void *__wrap_calloc(size_t n, size_t each)
{
    return fails(ALLOCATE) ? NULL : __real_calloc(n, each);
}

void *__real_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n)
{
    return fails(ALLOCATE) ? NULL : __real_realloc(old, n);
}

int __real_openat(int folder, const char *name, int flags, ...);
int __wrap_openat(int folder, const char *name, int flags, ...);
int __wrap_openat(int folder, const char *name, int flags, ...)
{
    mode_t mode = 0;
    va_list args;
    va_start(args, flags);
    if (flags & O_CREAT)
        mode = va_arg(args, mode_t);
    va_end(args);
    if (fails(OPEN)) {
        errno = EACCES; /* not EMFILE, after which the library closes files and goes on */
        return -1;
    }
    return __real_openat(folder, name, flags, mode);
}

ssize_t __real_pread(int fd, void *to, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t at)
{
    if (fails(READ)) {
        errno = EIO;
        return -1;
    }
    return __real_pread(fd, to, n > 5 ? n / 2 : n, at); /* short reads are fine too */
}

ssize_t __real_pwrite(int fd, const void *from, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *from, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *from, size_t n, off_t at)
{
    if (fails(WRITE)) {
        errno = ENOSPC;
        return -1;
    }
    return __real_pwrite(fd, from, n > 5 ? n / 2 : n, at);
}

int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    (void)fd;
    if (fails(FLUSH)) {
        errno = EIO;
        return -1;
    }
    return 0; /* power failures are not tested */
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to)
{
    if (fails(RENAME)) {
        errno = EIO;
        return -1;
    }
    return __real_rename(from, to);
}

int __real_renameat(int a, const char *from, int b, const char *to);
int __wrap_renameat(int a, const char *from, int b, const char *to);
int __wrap_renameat(int a, const char *from, int b, const char *to)
{
    if (fails(RENAME)) {
        errno = EIO;
        return -1;
    }
    return __real_renameat(a, from, b, to);
}

int __real_renameat2(int a, const char *from, int b, const char *to, unsigned flags);
int __wrap_renameat2(int a, const char *from, int b, const char *to, unsigned flags);
int __wrap_renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    if (fails(RENAME)) {
        errno = EIO;
        return -1;
    }
    return __real_renameat2(a, from, b, to, flags);
}

/* ---- what is tried ---- */

static char source[256], target[300], part[300], names[300];
static rsd_convert_options options;

static rsd_status choose_rows(void *context, const rsd_tensor_info *tensor,
                              rsd_tensor_target *choice)
{
    char text[256] = "";
    (void)context;
    if (tensor->ndim == 0)
        return RSD_OK;
    size_t at = (size_t)snprintf(text, sizeof text, "%s[", rsd_dtype_name(tensor->dtype));
    for (int32_t d = 0; d < tensor->ndim; d++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%lld", d ? "," : "",
                               (long long)tensor->shape[d]);
    snprintf(text + at, sizeof text - at, "] @ 2 : S(0)");
    return rsd_layout_parse(text, &choice->layout);
}

static rsd_status convert(void)
{
    rsd_checkpoint *in;
    rsd_status status = rsd_checkpoint_open(source, NULL, &in);
    if (status)
        return status;
    status = rsd_convert(in, target, &options, NULL);
    rsd_checkpoint_close(in);
    return status;
}

static rsd_status prove(void)
{
    rsd_checkpoint *a, *b = NULL;
    int64_t n = 0, nfindings = 0;
    rsd_status status = rsd_checkpoint_open(source, NULL, &a);
    if (status)
        return status;
    status = rsd_checkpoint_open(source, NULL, &b);
    if (!status)
        status = rsd_diff(a, b, NULL, NULL, NULL, &n, NULL);
    if (!status)
        status = rsd_verify(a, NULL, NULL, NULL, &nfindings, NULL);
    rsd_checkpoint_close(a);
    rsd_checkpoint_close(b);
    return !status && n + nfindings ? RSD_EIO : status;
}

/* Opens a checkpoint that needs many files, and reads nothing else. */
static rsd_status open_only(void)
{
    rsd_checkpoint *checkpoint;
    bool megatron = strstr(source, "mcore") != NULL;
    const rsd_open_options all = {.struct_nbytes = sizeof all,
                                  .unstack = megatron,
                                  .vocab_size = megatron ? 3 : 0,
                                  .names = megatron ? names : NULL,
                                  .nheads = megatron ? 4 : 0,
                                  .nkv_heads = megatron ? 2 : 0};
    rsd_status status = rsd_checkpoint_open(source, &all, &checkpoint);
    if (!status)
        rsd_checkpoint_close(checkpoint);
    return status;
}

static bool target_is_whole(void)
{
    rsd_checkpoint *a = NULL, *b = NULL;
    int64_t n = -1;
    bool whole = rsd_checkpoint_open(source, NULL, &a) == RSD_OK &&
                 rsd_checkpoint_open(target, NULL, &b) == RSD_OK &&
                 rsd_diff(a, b, NULL, NULL, NULL, &n, NULL) == RSD_OK && n == 0;
    rsd_checkpoint_close(a);
    rsd_checkpoint_close(b);
    return whole;
}

/* Writes a map of names that splits a tensor. */
static void write_names(const char *folder)
{
    snprintf(names, sizeof names, "%s/names", folder);
    FILE *file = fopen(names, "w");
    CHECK(file &&
          fputs("decoder.layers.*.self_attention.linear_qkv.weight h.*.{q,k,v} qkv\n** **\n",
                file) >= 0);
    if (file)
        fclose(file);
}

/* Returns how many files the journal of a stopped run lists as complete. */
static int count_journal_files(void)
{
    char line[200];
    int n = 0;
    FILE *journal = fopen(path_in(part, "reshard-journal"), "r");
    while (journal && fgets(line, sizeof line, journal))
        n += strncmp(line, "file ", 5) == 0;
    if (journal)
        fclose(journal);
    return n;
}

/* Fails the nth call of a kind until none fails. */
static void every_failure(enum kind kind, rsd_status (*what)(void), bool over)
{
    bool kept = false;
    for (long n = 0; n < 20000; n++) {
        if (!over)
            folder_remove(target);
        else if (!is_there(target))
            OK(convert());
        options.resume = 0;
        failing = (int)kind;
        left = n;
        rsd_status status = what();
        bool used = left < 0;
        failing = -1;
        if (!used) {
            CHECK(status == RSD_OK, "%s", rsd_error());
            break;
        }
        if (status)
            CHECK((kind == ALLOCATE) == (status == RSD_ENOMEM) || status == RSD_EEXIST,
                  "%s %ld: %s, %s", kind_names[kind], n, rsd_status_name(status), rsd_error());
        CHECK(strlen(rsd_error()) > 0 || !status);
        if (over || is_there(target))
            CHECK(target_is_whole(), "%s %ld left something else", kind_names[kind], n);
        if (what == convert && kind == ALLOCATE && n % 8) /* thousands fail: some are resumed */
            folder_remove(part);
        if (what == convert && is_there(part)) {
            options.resume = 1;
            rsd_checkpoint *none;
            rsd_status opened = rsd_checkpoint_open(part, NULL, &none);
            kept = kept || count_journal_files() > 0;
            if (!opened) { /* the output was complete, except for its name */
                rsd_checkpoint_close(none);
            }
            OK(convert());
            CHECK(target_is_whole() && !is_there(part), "%s %ld could not be resumed",
                  kind_names[kind], n);
        }
        if (tap.failed)
            break;
    }
    if (what == convert && kind == ALLOCATE)
        CHECK(kept, "a run that lacks memory leaves nothing to resume");
    folder_remove(target);
    folder_remove(part);
}

/* ---- the journal ---- */

static void journal_in_short_reads(void)
{
    CASE("a journal that is read piece by piece is read to its end");
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_checkpoint *in = NULL;
    snprintf(source, sizeof source, "%s", golden_path("fsdp2_adamw", "ckpt"));
    options = (rsd_convert_options){.struct_nbytes = sizeof options, .max_shard_nbytes = 1};
    OK(rsd_checkpoint_open(source, NULL, &in));
    OK(rsd_convert(in, target, &options, &report));
    int nfiles = (int)report.nfiles_written, ncomplete = 0;
    folder_remove(target);
    for (long n = 0; ncomplete < nfiles - 1 && n < 1000; n++) { /* until all but one are complete */
        folder_remove(part);
        failing = WRITE;
        left = n;
        rsd_status status = rsd_convert(in, target, &options, NULL);
        failing = -1;
        ncomplete = count_journal_files();
        if (!CHECK(status == RSD_EIO, "%s", rsd_status_name(status)))
            break;
    }
    options.resume = 1;
    CHECK(nfiles > 3, "%d files", nfiles);
    OK(rsd_convert(in, target, &options, &report));
    CHECK(report.nfiles_written == nfiles - ncomplete, "%lld files were written again, not %d",
          (long long)report.nfiles_written, nfiles - ncomplete);
    CHECK(target_is_whole());
    rsd_checkpoint_close(in);
    folder_remove(target);
}

/* ---- items that another planner assigned ---- */

static int32_t items_compress;

static rsd_status write_items(void)
{
    static const float numbers[6] = {1, 2, 3, 4, 5, 6};
    static const int64_t shape[2] = {3, 2}, strides[2] = {1, 3};
    uint64_t places[4];
    rsd_item items[2] = {{.struct_nbytes = sizeof(rsd_item), .data = "bytes", .nbytes = 5},
                         {.struct_nbytes = sizeof(rsd_item),
                          .dtype = RSD_F32,
                          .ndim = 2,
                          .shape = shape,
                          .strides = strides,
                          .data = numbers}};
    rsd_items_options how = {.struct_nbytes = sizeof how, .compress = items_compress, .sync = 1};
    return rsd_dcp_write_items(target, 2, items, &how, places, NULL);
}

static void every_failure_of_items(enum kind kind)
{
    for (long n = 0;; n++) {
        failing = (int)kind;
        left = n;
        rsd_status status = write_items();
        bool failed = left < 0;
        failing = -1;
        if (!CHECK((status != RSD_OK) == failed, "%s %ld: %s", kind_names[kind], n, rsd_error()) ||
            !failed)
            break;
    }
    CHECK(write_items() == RSD_OK);
    unlink(target);
}

int main(void)
{
    char folder[256];
    static const char *const sources[] = {"values/ckpt",
                                          "zstd/ckpt",
                                          "hf_sharded/ckpt",
                                          "verl_model_only/ckpt",
                                          "../bad/good_ocdbt_inner",
                                          "../bad/zarr_zstd_good",
                                          "torch113/ckpt"};
    static const rsd_format formats[] = {
        RSD_FORMAT_DCP,         RSD_FORMAT_SAFETENSORS, RSD_FORMAT_DCP, RSD_FORMAT_TORCH_SAVE,
        RSD_FORMAT_SAFETENSORS, RSD_FORMAT_DCP,         RSD_FORMAT_FSDP};
    snprintf(folder, sizeof folder, "%s", folder_new("faults"));
    snprintf(target, sizeof target, "%s/target", folder);
    snprintf(part, sizeof part, "%s/target.reshard-part", folder);
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++)
        for (int kind = 0; kind < NKINDS; kind++) {
            snprintf(source, sizeof source, "%s", golden_path(sources[i], ""));
            CASE("%s: every %s fails once", sources[i], kind_names[kind]);
            options = (rsd_convert_options){
                .struct_nbytes = sizeof options,
                .format = formats[i],
                .compress = i == 2 ? 1 : 0,
                .overwrite = 1,
                .map = formats[i] == RSD_FORMAT_DCP || formats[i] == RSD_FORMAT_FSDP ? choose_rows
                                                                                     : NULL};
            every_failure((enum kind)kind, convert, false);
            if (i == 0)
                every_failure((enum kind)kind, convert, true);
            if (kind < WRITE)
                every_failure((enum kind)kind, prove, false);
        }
    journal_in_short_reads();
    write_names(folder);
    static const char *const opened[] = {"ds_z1", "ds_z3",         "ds_universal_z3",
                                         "ds_z0", "mcore_dist_tp", "mcore_legacy_tp_pp"};
    for (size_t i = 0; i < sizeof opened / sizeof *opened; i++)
        for (int kind = 0; kind < WRITE; kind++) {
            snprintf(source, sizeof source, "%s", golden_path(opened[i], "ckpt"));
            CASE("%s: every %s fails once", opened[i], kind_names[kind]);
            every_failure((enum kind)kind, open_only, false);
        }
    for (int kind = 0; kind < NKINDS; kind++) {
        CASE("items: every %s fails once", kind_names[kind]);
        for (items_compress = 0; items_compress < 2; items_compress++)
            every_failure_of_items((enum kind)kind);
    }
    folder_remove(folder);
    return tap_end();
}
