/* conversions.h - checkpoints to convert, conversions, and comparisons of their results. Functions are inline, because
 * the checks of a test are counted in its own file (tap.h). */
#ifndef CONVERSIONS_H
#define CONVERSIONS_H

#include "folder.h"
#include "reshard.h"
#include "tap.h"

#include <stdlib.h>

/* For rsd_diff: prints each difference. */
static inline rsd_status conversion_print_difference(void *context, const char *name,
                                                     rsd_difference difference, const char *text)
{
    (void)context, (void)difference;
    printf("# %s: %s\n", name, text);
    return RSD_OK;
}

/* Checks that two checkpoints are equal by diff and by digests, and that the second one is valid. */
static inline void conversion_check_same(const char *a_path, const char *b_path, rsd_pool *pool)
{
    rsd_checkpoint *a = NULL, *b = NULL;
    int64_t n = -1, nfindings = -1;
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
    rsd_diff_options options = {.struct_nbytes = sizeof options, .io = &io};
    rsd_report report = {.struct_nbytes = sizeof report};
    if (OK(rsd_checkpoint_open(a_path, NULL, &a)) && OK(rsd_checkpoint_open(b_path, NULL, &b))) {
        if (OK(rsd_diff(a, b, &options, conversion_print_difference, NULL, &n, &report)))
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
static inline void conversion_make_large(const char *path, int nfiles, int rows)
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

static inline void conversion_make(const char *path, int nfiles)
{
    conversion_make_large(path, nfiles, 301);
}

/* Flips a bit of the byte at a place of a file. */
static inline void conversion_flip_bit(const char *path, long at)
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

/* Returns whether no staging directory is left of an output. */
static inline bool conversion_left_nothing(const char *out)
{
    char part[512];
    snprintf(part, sizeof part, "%s.reshard-part", out);
    return !is_there(part);
}

/* For rsd_convert: divides the columns of each tensor over three files. */
static inline rsd_status conversion_choose_columns(void *context, const rsd_tensor_info *tensor,
                                                   rsd_tensor_target *choice)
{
    char text[128];
    (void)context;
    snprintf(text, sizeof text, "f32[%lld,%lld] @ 3 : S(1)", (long long)tensor->shape[0],
             (long long)tensor->shape[1]);
    return rsd_layout_parse(text, &choice->layout);
}

static inline rsd_status conversion_run(const char *from, const char *to,
                                        const rsd_convert_options *options)
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

#endif
