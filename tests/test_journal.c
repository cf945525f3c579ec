/* test_journal.c - a journal that is damaged or wrong never makes a resumed run write a wrong output: what it cannot say
 * for certain is written again. */
#include "conversions.h"
#include "folder.h"
#include "tap.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

enum kind { SAFETENSORS, DCP, ZSTD };
static const char *const kinds[] = {"safetensors", "dcp", "zstd"};

static int stop_late(void *context, const rsd_progress *progress)
{
    (void)context;
    return progress->nbytes_done >= progress->nbytes_total / 10 * 7 &&
           progress->nbytes_done < progress->nbytes_total;
}

static rsd_status run_to(const char *to, enum kind kind, bool whole, bool resume)
{
    rsd_io io = {.struct_nbytes = sizeof io, .on_progress = whole ? NULL : stop_late};
    rsd_convert_options options = {.struct_nbytes = sizeof options,
                                   .io = &io,
                                   .resume = resume,
                                   .format = kind ? RSD_FORMAT_DCP : RSD_FORMAT_SAFETENSORS,
                                   .max_shard_nbytes = kind ? 0 : 900000,
                                   .compress = kind == ZSTD,
                                   .map = kind ? conversion_choose_columns : NULL};
    return conversion_run(in_folder("source"), in_folder(to), &options);
}

static rsd_status run(enum kind kind, bool resume)
{
    return run_to("target", kind, resume, resume);
}

/* Leaves a run that was stopped. Returns its journal with a NUL behind it, which the caller frees. */
static char *stop(enum kind kind)
{
    size_t n;
    CHECK(run(kind, false) == RSD_ECANCELLED, "%s", rsd_error());
    char *journal = read_whole(in_folder("target.reshard-part/reshard-journal"), &n);
    if (CHECK(journal != NULL))
        journal[n] = '\0'; /* read_whole leaves place for it */
    return journal;
}

/* Writes to the journal, with "wb" all of it and with "ab" more of it. */
static void write_journal(const char *mode, const char *chars, size_t n)
{
    FILE *file = fopen(in_folder("target.reshard-part/reshard-journal"), mode);
    if (!CHECK(file != NULL))
        return;
    CHECK(fwrite(chars, 1, n, file) == n);
    CHECK(fclose(file) == 0);
}

/* Resumes, and compares all tensors. */
static void resume(enum kind kind)
{
    OK(run(kind, true));
    CHECK(conversion_left_nothing(in_folder("target")));
    conversion_check_same(in_folder("source"), in_folder("target"), NULL);
    folder_remove(in_folder("target"));
}

/* Extends the files of a stopped run to the lengths that they have when they are complete: only the journal then says which
 * items are missing. */
static void extend_files(void)
{
    static const char *const names[] = {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct stat whole;
        if (CHECK(stat(path_in(in_folder("whole"), names[i]), &whole) == 0))
            CHECK(truncate(path_in(in_folder("target.reshard-part"), names[i]), whole.st_size) ==
                  0);
    }
}

struct chars {
    const char *data;
    size_t n;
};

/* Adds the lines BEFORE 1 AFTER, BEFORE 2 AFTER, ... */
static void add_lines(const char *before, struct chars after)
{
    for (int i = 0; i < 20; i++) {
        char line[80];
        int n = snprintf(line, sizeof line, "%s%d", before, i);
        memcpy(line + n, after.data, after.n);
        line[(size_t)n + after.n] = '\n';
        write_journal("ab", line, (size_t)n + after.n + 1);
    }
}

#define TEXT(literal)                                                                              \
    {                                                                                              \
        literal, sizeof literal - 1                                                                \
    }

static void lines_of_other_forms(void)
{
    static const struct {
        const char *before;
        struct chars after;
    } forms[] = {{"done ", TEXT("x")},  {"done +", TEXT("")},    {"done  ", TEXT("")},
                 {" done ", TEXT("")},  {"done 0", TEXT("")},    {"done ", TEXT(" ")},
                 {"Done ", TEXT("")},   {"done\t", TEXT("")},    {"done ", TEXT("\r")},
                 {"done ", TEXT("\0")}, {"done ", TEXT("\0\0")}, {"done ", TEXT(" 1")}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        CASE("a line that was not written like that is ignored, form %zu", i);
        free(stop(DCP));
        extend_files();
        add_lines(forms[i].before, forms[i].after);
        resume(DCP);
    }
    CASE("a number that is too large is ignored");
    free(stop(DCP));
    extend_files();
    for (int item = 0; item < 20; item++) {
        char line[60];
        int n = snprintf(line, sizeof line, "done 184467440737095516%02d\n", 16 + item);
        write_journal("ab", line, (size_t)n);
    }
    resume(DCP);
}

static void entries_of_other_outputs(void)
{
    static const struct {
        const char *before;
        struct chars after;
    } entries[] = {
        {"item ", TEXT(" 0 64")}, {"value ", TEXT(" 0 64")},      {"file ", TEXT(" 100")},
        {"file ", TEXT(" 0")},    {"file 4294967296 ", TEXT("")}, {"redo ", TEXT("")},
        {"redo 77", TEXT("")},    {"done 99999", TEXT("")},       {"value 99", TEXT(" 0 64")}};
    for (enum kind kind = SAFETENSORS; kind <= ZSTD; kind++)
        for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
            CASE("%s: entries that do not fit the output do no harm: %s", kinds[kind],
                 entries[i].before);
            free(stop(kind));
            add_lines(entries[i].before, entries[i].after);
            resume(kind);
        }
    CASE("zstd: single items are never complete");
    free(stop(ZSTD));
    add_lines("done ", (struct chars)TEXT(""));
    resume(ZSTD);
}

static void shorter_file(void)
{
    CASE("a file with another length than the output needs is written again, whatever the journal "
         "says");
    for (enum kind kind = SAFETENSORS; kind <= DCP; kind++) {
        char *journal = stop(kind);
        const char *name = kind ? "target.reshard-part/__0_0.distcp"
                                : "target.reshard-part/model-00001-of-00006.safetensors.part";
        if (CHECK(is_there(in_folder(name)), "%s", name))
            CHECK(truncate(in_folder(name), 100) == 0);
        write_journal("ab", "file 0 100\n", 11);
        resume(kind);
        free(journal);
    }
}

/* Changes each digit of the lines of compressed items, and leaves lines out. */
static void compressed_offsets(void)
{
    char *journal = stop(ZSTD), *first = journal ? strstr(journal, "item ") : NULL;
    if (!CHECK(first && strstr(journal, "file ")))
        return;
    size_t n = strlen(journal);
    folder_remove(in_folder("target.reshard-part"));
    CASE("zstd: offsets and lengths that do not fill the file are not believed");
    for (char *at = first; at < journal + n; at++) {
        if (*at < '0' || *at > '9' || (at - first) % 5)
            continue;
        free(stop(ZSTD));
        char was = *at;
        *at = was == '9' ? '1' : (char)(was + 1);
        write_journal("wb", journal, n);
        *at = was;
        resume(ZSTD);
    }
    CASE("zstd: a file with an item that the journal has lost is written again");
    for (char *at = first; at < journal + n; at = strchr(at, '\n') + 1) {
        free(stop(ZSTD));
        char was = *at;
        *at = 'x';
        write_journal("wb", journal, n);
        *at = was;
        resume(ZSTD);
    }
    free(journal);
}

static void long_journal(void)
{
    CASE("a journal of gigabytes is refused, and not read");
    free(stop(DCP));
    CHECK(truncate(in_folder("target.reshard-part/reshard-journal"), 2000000000) == 0);
    FAILS(RSD_EIO, "reshard-journal is longer", run(DCP, true));
    folder_remove(in_folder("target.reshard-part"));
    CASE("so is that of another rank");
    free(stop(DCP));
    FILE *file = fopen(in_folder("target.reshard-part/reshard-journal.1"), "wb");
    if (CHECK(file != NULL))
        fclose(file);
    CHECK(truncate(in_folder("target.reshard-part/reshard-journal.1"), 2000000000) == 0);
    FAILS(RSD_EIO, "reshard-journal.1 is longer", run(DCP, true));
    CHECK(unlink(in_folder("target.reshard-part/reshard-journal.1")) == 0);
    resume(DCP);
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("journal"));
    conversion_make_large(in_folder("source"), 4, 901);
    OK(run_to("whole", DCP, true, false));
    lines_of_other_forms();
    entries_of_other_outputs();
    shorter_file();
    compressed_offsets();
    long_journal();
    folder_remove(folder);
    return tap_end();
}
