/* test_bad.c - every checkpoint in tests/bad violates one rule, and is refused for it: with the right status, a
 * message that names the file, the tensor and the byte, and memory that is proportional to the file.
 * tests/make_bad.py creates the checkpoints. tests/bad.txt has the expected results: a name, the step that fails,
 * the status, and the message after the path. RECORD=1 writes it again.
 *
 * A valid checkpoint with any bit flipped, or truncated anywhere, is refused too, or has the same values.
 */
#include "folder.h"
#include "reshard.h"
#include "tap.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- memory ---- */

/* Of the address sanitizer; not every compiler comes with its header. */
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));
size_t __sanitizer_get_allocated_size(const volatile void *memory);
const char *__asan_default_options(void);

/* Huge allocations fail, so that the test receives ENOMEM. */
const char *__asan_default_options(void)
{
    return "max_allocation_size_mb=64:allocator_may_return_null=1";
}

static size_t held, most_held;

static void on_malloc(const volatile void *memory, size_t nbytes)
{
    (void)memory;
    held += nbytes;
    most_held = held > most_held ? held : most_held;
}

static void on_free(const volatile void *memory)
{
    held -= memory ? __sanitizer_get_allocated_size(memory) : 0;
}

/* ---- one checkpoint ---- */

/* The first few elements of w, or all of them; those of a good checkpoint count from 0. */
static rsd_status load_w(rsd_checkpoint *checkpoint, bool *counts)
{
    static const int64_t origin[RSD_MAX_DIMS];
    int64_t index, len[RSD_MAX_DIMS], volume = 1;
    rsd_tensor_info about = {.struct_nbytes = sizeof about};
    rsd_layout *layout, *stored;
    float values[1024];
    void *array = values;
    const int32_t rank = 0;
    rsd_status status = rsd_checkpoint_find(checkpoint, "w", &index);
    if (!status)
        status = rsd_checkpoint_tensor(checkpoint, index, &about);
    if (!status)
        status = rsd_checkpoint_layout(checkpoint, index, &stored);
    if (status)
        return status;
    rsd_layout_free(stored);
    for (int32_t d = 0; d < about.ndim; d++) {
        len[d] = about.shape[d] < 4 ? about.shape[d] : 4;
        volume *= len[d];
    }
    status =
        rsd_layout_new_boxes(about.dtype, about.ndim, about.shape, 1, &rank, origin, len, &layout);
    if (status)
        return status;
    rsd_tensor local = {sizeof local, about.name, layout, 0, 0, &array, NULL, NULL};
    status = rsd_load(checkpoint, 1, &local, NULL, NULL);
    rsd_layout_free(layout);
    *counts = about.dtype == RSD_F32;
    for (int64_t i = 0; !status && i < volume && *counts; i++)
        *counts = values[i] == (float)i;
    return status;
}

/* The value v, in a checkpoint without w; -1: it has w. */
static int64_t find_v(const rsd_checkpoint *checkpoint)
{
    int64_t w;
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(checkpoint); i++)
        if (strcmp(rsd_checkpoint_value_name(checkpoint, i), "v") == 0 &&
            rsd_checkpoint_find(checkpoint, "w", &w))
            return i;
    return -1;
}

static size_t nbytes_of(const char *path)
{
    struct stat found;
    size_t sum = 0;
    DIR *folder = opendir(path);
    if (!folder)
        return stat(path, &found) == 0 ? (size_t)found.st_size : 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char inner[1024];
        snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        if (stat(inner, &found) == 0 && S_ISREG(found.st_mode))
            sum += (size_t)found.st_size;
    }
    closedir(folder);
    return sum;
}

/* ---- the rules ---- */

enum { MOST_BADS = 1000 };

/* One line of bad.txt. The step that fails: opening the checkpoint, loading its tensor w, or reading its value v. If
 * none fails, the line has the value as JSON. */
struct bad {
    char name[80], how_far[16], status[16], message[1100];
};

static struct bad bads[MOST_BADS];
static size_t nbads;

static void read_expectations(void)
{
    FILE *file = fopen("tests/bad.txt", "r");
    char line[1400];
    CASE("tests/bad.txt can be read");
    CHECK(file != NULL);
    while (file && nbads < MOST_BADS && fgets(line, sizeof line, file)) {
        struct bad *bad = &bads[nbads++];
        int at = 0;
        line[strcspn(line, "\n")] = '\0';
        CHECK(sscanf(line, "%79s %15s %15s %n", bad->name, bad->how_far, bad->status, &at) == 3,
              "%s", line);
        snprintf(bad->message, sizeof bad->message, "%s", line + at);
    }
    if (file)
        fclose(file);
}

/* A checkpoint that opens can be verified, and errors in tensors and values are findings. */
static void verify_all(rsd_checkpoint *checkpoint, const char *name)
{
    int64_t nfindings;
    rsd_status status =
        checkpoint ? rsd_verify(checkpoint, NULL, NULL, NULL, &nfindings, NULL) : RSD_OK;
    CHECK(!status, "%s: verify: %s: %s", name, rsd_status_name(status), rsd_error());
}

/* Returns the result for a checkpoint, as such a line. */
static void look_at(const char *name, struct bad *out)
{
    char path[512], *json = NULL;
    bool counts = true;
    rsd_checkpoint *checkpoint = NULL;
    snprintf(path, sizeof path, "tests/bad/%s", name);
    size_t before = most_held = held, nbytes = nbytes_of(path);
    rsd_status status = rsd_checkpoint_open(path, NULL, &checkpoint);
    const char *how_far = "open";
    if (!status) {
        bool value = find_v(checkpoint) >= 0;
        how_far = value ? "read" : "load";
        status = value ? rsd_checkpoint_value(checkpoint, find_v(checkpoint), &json)
                       : load_w(checkpoint, &counts);
        CHECK(counts || status, "%s: other values", name);
    }
    const char *said = status ? rsd_error() : json ? json : "";
    said += strncmp(said, path, strlen(path)) == 0 ? strlen(path) : 0;
    snprintf(out->name, sizeof out->name, "%s", name);
    snprintf(out->how_far, sizeof out->how_far, "%s", how_far);
    snprintf(out->status, sizeof out->status, "%s", rsd_status_name(status));
    snprintf(out->message, sizeof out->message, "%s", said);
    rsd_free(json);
    verify_all(checkpoint, name);
    rsd_checkpoint_close(checkpoint);
    CHECK(most_held - before <= (1 << 20) + 4096 * nbytes, "%s: %zu bytes for files of %zu", name,
          most_held - before, nbytes);
}

static void check_bad(const struct bad *bad)
{
    struct bad found;
    CASE("%s", bad->name);
    look_at(bad->name, &found);
    CHECK(strcmp(found.how_far, bad->how_far) == 0 && strcmp(found.status, bad->status) == 0 &&
              strncmp(found.message, bad->message, strlen(bad->message)) == 0,
          "%s %s %s", found.how_far, found.status, found.message);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct bad *)a)->name, ((const struct bad *)b)->name);
}

/* Every file in the directory has an expected result, and every result has a file. */
static void check_folder(bool record)
{
    static struct bad found[MOST_BADS];
    size_t n = 0;
    DIR *folder = opendir("tests/bad");
    CASE("every file of tests/bad has an expectation");
    for (struct dirent *entry; folder && n < MOST_BADS && (entry = readdir(folder));)
        if (entry->d_name[0] != '.')
            snprintf(found[n++].name, sizeof found->name, "%.79s", entry->d_name);
    if (folder)
        closedir(folder);
    qsort(found, n, sizeof *found, by_name);
    FILE *file = record ? fopen("tests/bad.txt", "w") : NULL;
    for (size_t i = 0; i < n && file; i++) {
        struct bad said;
        look_at(found[i].name, &said);
        fprintf(file, "%-28s %s %-*s%s\n", said.name, said.how_far, *said.message ? 13 : 0,
                said.status, said.message);
    }
    if (file)
        fclose(file);
    for (size_t i = 0; i < n && !record; i++)
        CHECK(i < nbads && strcmp(found[i].name, bads[i].name) == 0, "%s", found[i].name);
    CHECK(record || n == nbads, "%zu files for %zu expectations", n, nbads);
}

/* ---- any damage ---- */

/* A directory or file to damage. One file of it is written again each time. */
struct victim {
    const char *name; /* in tests/bad */
    const char *file, *beside;
    bool unchecked; /* without a CRC-32, changes of values are not detected */
};

static void try_damaged(const char *path, bool unchecked, const char *what, size_t at)
{
    rsd_checkpoint *checkpoint;
    bool counts = true;
    rsd_status status = rsd_checkpoint_open(path, NULL, &checkpoint);
    if (status == RSD_OK) {
        status = load_w(checkpoint, &counts);
        rsd_checkpoint_close(checkpoint);
    }
    CHECK(status || counts || unchecked, "%s %zu: other values, and no error", what, at);
    CHECK(status != RSD_ENOMEM && status != RSD_EINVAL, "%s %zu: %s: %s", what, at,
          rsd_status_name(status), rsd_error());
}

/* Returns the bytes of a file of tests/bad, and copies it to another directory. */
static char *copy_of(const char *folder, const char *name, const char *file, size_t *n)
{
    char from[256];
    snprintf(from, sizeof from, "tests/bad/%s%s%s", name, file ? "/" : "", file ? file : "");
    char *bytes = read_whole(from, n);
    for (const char *slash = file ? file : ""; (slash = strchr(slash, '/')); slash++) {
        char inner[256];
        snprintf(inner, sizeof inner, "%.*s", (int)(slash - file), file);
        mkdir(path_in(folder, inner), 0777);
    }
    FILE *copy = fopen(path_in(folder, file ? file : name), "wb");
    CHECK(bytes && copy && fwrite(bytes, 1, *n, copy) == *n, "%s", from);
    if (copy)
        fclose(copy);
    return bytes;
}

static void damage(const struct victim *victim)
{
    size_t n = 0, nbeside;
    const char *folder = folder_new("damaged");
    CASE("%s %s: any bit flipped, or truncated anywhere", victim->name,
         victim->file ? victim->file : "");
    if (victim->beside)
        free(copy_of(folder, victim->name, victim->beside, &nbeside));
    char *bytes = copy_of(folder, victim->name, victim->file, &n);
    const char *path = path_in(folder, victim->file ? victim->file : victim->name);
    const char *opened = victim->file ? folder : path;
    int fd = open(path, O_WRONLY);
    for (size_t bit = 0; bit < 8 * n; bit++) {
        const char *byte = &bytes[bit / 8], flipped = (char)(*byte ^ 1 << bit % 8);
        CHECK(pwrite(fd, &flipped, 1, (off_t)(bit / 8)) == 1);
        try_damaged(opened, victim->unchecked, "bit", bit);
        CHECK(pwrite(fd, byte, 1, (off_t)(bit / 8)) == 1);
    }
    for (size_t cut = n; cut-- > 0;) {
        CHECK(ftruncate(fd, (off_t)cut) == 0);
        try_damaged(opened, false, "cut to", cut);
    }
    close(fd);
    free(bytes);
    folder_remove(folder);
}

int main(void)
{
    static const struct victim victims[] = {{"good_dcp", ".metadata", "__0_0.distcp", false},
                                            {"good_dcp", "__0_0.distcp", ".metadata", false},
                                            {"good_zstd", "__0_0.distcp", ".metadata", false},
                                            {"good.pt", NULL, NULL, false},
                                            {"good_legacy.pt", NULL, NULL, true},
                                            {"good.safetensors", NULL, NULL, true},
                                            {"good_ocdbt", "manifest.ocdbt", "d/0", false},
                                            {"good_ocdbt", "d/0", "manifest.ocdbt", true},
                                            {"good_ocdbt_shard", "d/0", "manifest.ocdbt", true}};
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
    read_expectations();
    check_folder(getenv("RECORD") != NULL);
    for (size_t i = 0; i < nbads; i++)
        check_bad(&bads[i]);
    for (size_t i = 0; i < sizeof victims / sizeof *victims; i++)
        damage(&victims[i]);
    CASE("no code that a file names was executed");
    CHECK(access("this_must_never_run", F_OK) != 0);
    return tap_end();
}
