/* test_convert_damage.c - damaged bytes are detected by every conversion, and an output that its check refuses is not
 * put at its path. */
#include "conversions.h"
#include "folder.h"
#include "tap.h"
#include "truth.h"

#include <stdlib.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    return path_in(folder, name);
}

/* ---- damage ---- */

static rsd_status note_finding(void *context, const char *text)
{
    snprintf(context, 512, "%s", text);
    return RSD_OK;
}

static void damage(void)
{
    CASE("one flipped bit is detected, with its position");
    conversion_make(in_folder("source"), 3);
    conversion_make(in_folder("damaged"), 3);
    rsd_checkpoint *good, *bad;
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    char finding[512] = "", difference[512] = "";
    int64_t n;
    OK(rsd_checkpoint_open(in_folder("source"), NULL, &good));
    OK(rsd_checkpoint_box(good, 2, 1, &stored));
    conversion_flip_bit(in_folder("damaged/__1_0.distcp"), (long)(stored.offset + 704 + 4 * 301));
    OK(rsd_checkpoint_open(in_folder("damaged"), NULL, &bad));
    OK(rsd_verify(bad, NULL, note_finding, finding, &n, NULL));
    CHECK(n == 1 && strstr(finding, "__1_0.distcp") && strstr(finding, "layer.2") &&
              strstr(finding, "CRC-32"),
          "%lld findings, %s", (long long)n, finding);
    rsd_convert_options options = {.struct_nbytes = sizeof options};
    FAILS(RSD_EFORMAT, "layer.2", rsd_convert(bad, in_folder("from_damaged"), &options, NULL));
    CHECK(!is_there(in_folder("from_damaged")) &&
          conversion_left_nothing(in_folder("from_damaged")));
    FAILS(RSD_EFORMAT, "damaged", rsd_diff(good, bad, NULL, NULL, difference, &n, NULL));
    rsd_checkpoint_close(bad);

    OK(conversion_run(in_folder("source"), in_folder("flipped.safetensors"), &options));
    OK(rsd_checkpoint_open(in_folder("flipped.safetensors"), NULL, &bad));
    int64_t index;
    OK(rsd_checkpoint_find(bad, "layer.2", &index));
    OK(rsd_checkpoint_box(bad, index, 0, &stored));
    rsd_checkpoint_close(bad);
    conversion_flip_bit(in_folder("flipped.safetensors"),
                        (long)stored.offset + 4 * (300 * 7 + 5) + 1);
    OK(rsd_checkpoint_open(in_folder("flipped.safetensors"), NULL, &bad));
    OK(rsd_diff(good, bad, NULL, conversion_print_difference, NULL, &n, NULL));
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
    conversion_flip_bit(name, (long)(largest.offset + largest.nbytes / 2));
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
    conversion_make(in_folder("source"), 2);
    for (int over = 0; over < 2; over++)
        for (int one = 0; one < 2; one++) {
            int ncalls = 0;
            rsd_convert_options options = {.struct_nbytes = sizeof options,
                                           .format = one ? RSD_FORMAT_SAFETENSORS : RSD_FORMAT_DCP,
                                           .overwrite = over};
            if (over)
                OK(conversion_run(in_folder("source"), in_folder(outs[one]), &options));
            options.check = refuse_output;
            options.check_context = &ncalls;
            FAILS(RSD_EFORMAT, "refused by the test",
                  conversion_run(in_folder("source"), in_folder(outs[one]), &options));
            CHECK(ncalls == 1 && conversion_left_nothing(in_folder(outs[one])));
            CHECK(is_there(in_folder(outs[one])) == over);
            if (over)
                conversion_check_same(in_folder("source"), in_folder(outs[one]), NULL);
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
            conversion_make(in_folder("plain"), 2);
            OK(conversion_run(in_folder("plain"), in_folder("damaged"), &make));
            damage_largest(in_folder("damaged"));
            for (size_t i = 0; i < sizeof placements / sizeof *placements; i++) {
                rsd_convert_options options = {.struct_nbytes = sizeof options,
                                               .format = to == 2 ? RSD_FORMAT_SAFETENSORS
                                                                 : RSD_FORMAT_DCP,
                                               .compress = to == 1,
                                               .map = cut_rows,
                                               .map_context = (void *)(uintptr_t)placements[i]};
                rsd_status status =
                    conversion_run(in_folder("damaged"), in_folder("target"), &options);
                CHECK(status == RSD_EFORMAT, "%s: %s", placements[i], rsd_status_name(status));
                CHECK(!is_there(in_folder("target")) &&
                      conversion_left_nothing(in_folder("target")));
                folder_remove(in_folder("target"));
            }
        }
    folder_remove(in_folder("damaged"));
    folder_remove(in_folder("plain"));
}

static void parts_of_streams(void)
{
    CASE("a compressed item of which each output needs a part is read to its end, and checked");
    for (int compress = 0; compress < 2; compress++) {
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .format = RSD_FORMAT_DCP,
                                       .compress = compress,
                                       .map = cut_rows,
                                       .map_context = (void *)(uintptr_t) "S(0)"};
        OK(conversion_run("tests/bad/good_zstd", in_folder("target"), &options));
        folder_remove(in_folder("target"));
        FAILS(RSD_EFORMAT, "w: bytes 0 to 32 are damaged: CRC-32",
              conversion_run("tests/bad/crc_zstd", in_folder("target"), &options));
        CHECK(!is_there(in_folder("target")) && conversion_left_nothing(in_folder("target")));
    }
}

static void damaged_values(void)
{
    CASE("a damaged value is found, and not copied: its pickle or another record of its archive");
    static const char *const paths[] = {"tests/bad/crc_value", "tests/bad/crc_value_zstd",
                                        "tests/bad/value_record_damaged"};
    for (int i = 0; i < 3; i++) {
        rsd_checkpoint *bad = NULL;
        void *item;
        size_t n;
        int64_t nfindings = 0;
        if (!OK(rsd_checkpoint_open(paths[i], NULL, &bad)))
            continue;
        OK(rsd_verify(bad, NULL, NULL, NULL, &nfindings, NULL));
        CHECK(nfindings == 1, "%s: %lld findings", paths[i], (long long)nfindings);
        FAILS(RSD_EFORMAT, "CRC-32", rsd_checkpoint_value_item(bad, 0, &item, &n));
        for (int compress = 0; compress < 2; compress++) {
            rsd_convert_options options = {
                .struct_nbytes = sizeof options, .format = RSD_FORMAT_DCP, .compress = compress};
            FAILS(RSD_EFORMAT, "CRC-32", rsd_convert(bad, in_folder("target"), &options, NULL));
            CHECK(!is_there(in_folder("target")) && conversion_left_nothing(in_folder("target")));
        }
        rsd_checkpoint_close(bad);
    }
}

int main(void)
{
    snprintf(folder, sizeof folder, "%s", folder_new("convert_damage"));
    damage();
    damage_is_not_hidden();
    parts_of_streams();
    damaged_values();
    checked_before_the_end();
    folder_remove(folder);
    return tap_end();
}
