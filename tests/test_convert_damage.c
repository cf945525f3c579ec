/* test_convert_damage.c - damaged bytes are detected by every conversion, and an output that its check refuses is not
 * put at its path. */
#include "folder.h"
#include "tap.h"
#include "truth.h"

#include <stdlib.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

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

static bool no_part(const char *out)
{
    char part[512];
    snprintf(part, sizeof part, "%s.reshard-part", out);
    return !is_there(part);
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

static rsd_status cut_rows(void *context, const rsd_tensor_info *tensor, rsd_tensor_target *target)
{
    char text[128];
    const char *placement = context;
    if (!placement || tensor->ndim != 2)
        return RSD_OK;
    snprintf(text, sizeof text, "f32[%lld,%lld] @ 3 : %s", (long long)tensor->shape[0],
             (long long)tensor->shape[1], placement);
    return rsd_layout_parse(text, &target->layout);
}

/* Flips a bit in the middle of the largest box of a checkpoint. */
static void damage_largest(const char *path)
{
    rsd_checkpoint *checkpoint;
    rsd_extent largest = {.struct_nbytes = sizeof largest};
    char name[600];
    OK(rsd_checkpoint_open(path, NULL, &checkpoint));
    for (int64_t t = 0; t < rsd_checkpoint_ntensors(checkpoint); t++) {
        rsd_extent extent = {.struct_nbytes = sizeof extent};
        OK(rsd_checkpoint_box(checkpoint, t, 0, &extent));
        if (extent.nbytes > largest.nbytes)
            largest = extent;
    }
    snprintf(name, sizeof name, "%s/%s", path, rsd_checkpoint_file(checkpoint, largest.file));
    rsd_checkpoint_close(checkpoint);
    flip_bit(name, (long)(largest.offset + largest.nbytes / 2));
}

static rsd_status refuse_output(void *context, rsd_checkpoint *output)
{
    int *ncalls = context;
    ++*ncalls;
    CHECK(rsd_checkpoint_ntensors(output) == 6);
    return rsd_set_error(RSD_EFORMAT, "refused by the test");
}

static void checked_before_the_end(void)
{
    static const char *const outs[] = {"target", "target.safetensors"};
    CASE("an output that its check refuses is not put at its path");
    make_checkpoint(in_folder("source"), 2);
    for (int over = 0; over < 2; over++)
        for (int one = 0; one < 2; one++) {
            int ncalls = 0;
            rsd_convert_options options = {.struct_nbytes = sizeof options,
                                           .format = one ? RSD_FORMAT_SAFETENSORS : RSD_FORMAT_DCP,
                                           .overwrite = over};
            if (over)
                OK(convert(in_folder("source"), in_folder(outs[one]), &options));
            options.check = refuse_output;
            options.check_context = &ncalls;
            FAILS(RSD_EFORMAT, "refused by the test",
                  convert(in_folder("source"), in_folder(outs[one]), &options));
            CHECK(ncalls == 1 && no_part(in_folder(outs[one])));
            CHECK(is_there(in_folder(outs[one])) == over);
            if (over)
                check_same(in_folder("source"), in_folder(outs[one]), NULL);
            folder_remove(in_folder("target"));
            remove(in_folder("target.safetensors"));
        }
}

static void damage_is_not_hidden(void)
{
    static const char *const placements[] = {NULL, "S(0)", "S(1)", "R"};
    for (int from = 0; from < 2; from++)
        for (int to = 0; to < 3; to++) {
            CASE("no conversion adds a fresh CRC-32 to damaged bytes (%d, %d)", from, to);
            rsd_convert_options make = {.struct_nbytes = sizeof make,
                                        .format = RSD_FORMAT_DCP,
                                        .compress = from,
                                        .overwrite = 1};
            make_checkpoint(in_folder("plain"), 2);
            OK(convert(in_folder("plain"), in_folder("damaged"), &make));
            damage_largest(in_folder("damaged"));
            for (size_t i = 0; i < sizeof placements / sizeof *placements; i++) {
                rsd_convert_options options = {.struct_nbytes = sizeof options,
                                               .format = to == 2 ? RSD_FORMAT_SAFETENSORS
                                                                 : RSD_FORMAT_DCP,
                                               .compress = to == 1,
                                               .map = cut_rows,
                                               .map_context = (void *)(uintptr_t)placements[i]};
                rsd_status status = convert(in_folder("damaged"), in_folder("target"), &options);
                CHECK(status == RSD_EFORMAT, "%s: %s", placements[i], rsd_status_name(status));
                CHECK(!is_there(in_folder("target")) && no_part(in_folder("target")));
                folder_remove(in_folder("target"));
            }
        }
    folder_remove(in_folder("damaged"));
    folder_remove(in_folder("plain"));
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("convert_damage"));
    damage();
    damage_is_not_hidden();
    checked_before_the_end();
    folder_remove(folder);
    return tap_end();
}
