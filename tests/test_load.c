/* test_load.c - checkpoints that torch wrote are opened, listed and loaded into any layout. */
#include "folder.h"
#include "oracle.h"
#include "random.h"
#include "tap.h"
#include "truth.h"

#include <stdlib.h>

/* Loads one tensor into a layout, all ranks at once or one after the other, and compares. */
static void load_into(rsd_checkpoint *checkpoint, const char *name, const rsd_layout *layout,
                      const void *whole, rsd_pool *pool, enum arrangement arrangement, bool by_rank)
{
    struct memory expected = oracle_memory(layout, NULL), got = oracle_memory(layout, NULL);
    int64_t *strides = arrangement == COLUMNS ? oracle_strides(layout, COLUMNS) : NULL;
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
    rsd_load_options options = {.struct_nbytes = sizeof options, .io = &io};
    rsd_report report = {.struct_nbytes = sizeof report};
    truth_cut(layout, whole, expected.array);
    if (!by_rank) {
        rsd_tensor local = {.struct_nbytes = sizeof local,
                            .name = name,
                            .layout = layout,
                            .rank = RSD_EVERY_RANK,
                            .column_major = arrangement == COLUMNS,
                            .arrays = got.array};
        CHECK(rsd_load(checkpoint, 1, &local, &options, &report) == RSD_OK, "%s: %s", name,
              rsd_error());
        CHECK(report.nbytes_read <= report.nbytes_needed + report.nbytes_needed / 20 + 64,
              "%s: %lld read for %lld", name, (long long)report.nbytes_read,
              (long long)report.nbytes_needed);
    }
    for (int64_t rank = 0; by_rank && rank < rsd_layout_world(layout); rank++) {
        int64_t first, count;
        rsd_layout_arrays_of(layout, (int32_t)rank, &first, &count);
        rsd_tensor local = {.struct_nbytes = sizeof local,
                            .name = name,
                            .layout = layout,
                            .rank = (int32_t)rank,
                            .column_major = arrangement == COLUMNS,
                            .arrays = got.array + first};
        CHECK(rsd_load(checkpoint, 1, &local, &options, &report) == RSD_OK, "%s: %s", name,
              rsd_error());
    }
    int32_t ndim = rsd_layout_ndim(layout);
    size_t each = rsd_dtype_nbytes(rsd_layout_dtype(layout));
    for (int64_t a = 0; a < got.narrays; a++) {
        rsd_array array;
        OK(rsd_layout_array(layout, a, &array));
        int64_t at[RSD_MAX_DIMS] = {0}, n = (int64_t)(array.nbytes / each);
        for (int64_t i = 0; i < n; i++) {
            int64_t place = i;
            if (strides) {
                place = 0;
                for (int32_t d = 0; d < ndim; d++)
                    place += at[d] * strides[a * ndim + d];
            }
            if (!CHECK(memcmp((char *)expected.array[a] + (size_t)i * each,
                              (char *)got.array[a] + (size_t)place * each, each) == 0,
                       "%s: array %lld element %lld", name, (long long)a, (long long)i))
                break;
            for (int32_t d = ndim - 1; d >= 0 && ++at[d] == array.shape[d]; d--)
                at[d] = 0;
        }
    }
    free(strides);
    oracle_memory_free(&expected);
    oracle_memory_free(&got);
}

static void load_tensor(rsd_checkpoint *checkpoint, const rsd_tensor_info *about, const void *whole,
                        struct random *random, rsd_pool *pool)
{
    struct random_tensor tensor = known_tensor(about);
    for (int i = 0; i < 6; i++) {
        char side[4096] = "1:R", text[4400];
        rsd_layout *layout;
        if (i > 0)
            random_side(random, &tensor, NULL, side, sizeof side);
        snprintf(text, sizeof text, "%s @ %s", tensor.text, side);
        if (!CHECK(rsd_layout_parse(text, &layout) == RSD_OK, "%s: %s", text, rsd_error()))
            continue;
        load_into(checkpoint, about->name, layout, whole, i % 2 ? pool : NULL,
                  i % 3 == 2 ? COLUMNS : ROWS, i > 3);
        rsd_layout_free(layout);
    }
}

static void golden_loads(void)
{
    struct random random = {1};
    rsd_pool *pool;
    OK(rsd_pool_new(3, &pool));
    for (const char *const *name = golden; *name; name++) {
        CASE("%s: every tensor is loaded into any layout", *name);
        rsd_checkpoint *checkpoint = NULL, *truth = NULL;
        const char *truth_path = golden_path(*name, "truth.safetensors");
        if (OK(rsd_checkpoint_open(golden_path(*name, "ckpt"), NULL, &checkpoint)) &&
            OK(rsd_checkpoint_open(truth_path, NULL, &truth)))
            for (int64_t i = 0; i < rsd_checkpoint_ntensors(truth); i++) {
                rsd_tensor_info about = {.struct_nbytes = sizeof about}, found = about;
                int64_t index;
                OK(rsd_checkpoint_tensor(truth, i, &about));
                void *whole = truth_bytes(truth, truth_path, about.name, &about);
                if (CHECK(whole != NULL) &&
                    OK(rsd_checkpoint_find(checkpoint, about.name, &index)) &&
                    OK(rsd_checkpoint_tensor(checkpoint, index, &found)))
                    if (CHECK(found.ndim == about.ndim && found.nbytes == about.nbytes &&
                                  memcmp(found.shape, about.shape, sizeof found.shape) == 0,
                              "%s", about.name) &&
                        CHECK(found.dtype == about.dtype, "%s: %s is not %s", about.name,
                              rsd_dtype_name(found.dtype), rsd_dtype_name(about.dtype)))
                        load_tensor(checkpoint, &found, whole, &random, pool);
                free(whole);
            }
        rsd_checkpoint_close(checkpoint);
        rsd_checkpoint_close(truth);
    }
    rsd_pool_free(pool);
}

/* ---- rsd_read ---- */

static void read_boxes(rsd_checkpoint *checkpoint, struct random *random)
{
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        OK(rsd_checkpoint_tensor(checkpoint, i, &tensor));
        size_t each = rsd_dtype_nbytes(tensor.dtype), nbytes = (size_t)tensor.nbytes;
        char *whole = calloc(nbytes + 1, 1), *part = calloc(nbytes + 1, 1);
        OK(rsd_read(checkpoint, tensor.name, NULL, 0, whole, nbytes));
        rsd_box box = {.ndim = tensor.ndim};
        size_t volume = 1;
        for (int32_t d = 0; d < tensor.ndim; d++) {
            box.lo[d] = random_below(random, tensor.shape[d] + 1);
            box.len[d] = random_below(random, tensor.shape[d] - box.lo[d] + 1);
            volume *= (size_t)box.len[d];
        }
        OK(rsd_read(checkpoint, tensor.name, &box, tensor.dtype, part, volume * each));
        int64_t at[RSD_MAX_DIMS] = {0};
        for (size_t k = 0; k < volume; k++) {
            int64_t from = 0;
            for (int32_t d = 0; d < tensor.ndim; d++)
                from = from * tensor.shape[d] + box.lo[d] + at[d];
            if (!CHECK(memcmp(part + k * each, whole + (size_t)from * each, each) == 0, "%s: %zu",
                       tensor.name, k))
                break;
            for (int32_t d = tensor.ndim - 1; d >= 0 && ++at[d] == box.len[d]; d--)
                at[d] = 0;
        }
        free(whole);
        free(part);
    }
}

static void reads(void)
{
    CASE("rsd_read: a box, a whole tensor, another dtype, and what is refused");
    struct random random = {3};
    rsd_checkpoint *checkpoint = NULL;
    for (const char *const *name = golden; *name; name++)
        if (OK(rsd_checkpoint_open(golden_path(*name, "ckpt"), NULL, &checkpoint))) {
            read_boxes(checkpoint, &random);
            rsd_checkpoint_close(checkpoint);
        }
    char path[256];
    snprintf(path, sizeof path, "%s/read", folder_new("load"));
    rsd_layout *layout;
    float saved[2][3] = {{1, 2, 3}, {4, 5, 6}};
    double got[2] = {0};
    void *array = saved;
    OK(rsd_layout_parse("f32[2,3] @ 1:R", &layout));
    rsd_tensor tensor = {
        .struct_nbytes = sizeof tensor, .name = "w", .layout = layout, .arrays = &array};
    rsd_save_options over = {.struct_nbytes = sizeof over, .overwrite = 1};
    OK(rsd_save(path, 1, &tensor, &over, NULL));
    OK(rsd_checkpoint_open(path, NULL, &checkpoint));
    rsd_box column = {.ndim = 2, .lo = {0, 1}, .len = {2, 1}};
    OK(rsd_read(checkpoint, "w", &column, RSD_F64, got, sizeof got));
    CHECK(got[0] == 2 && got[1] == 5, "%g %g", got[0], got[1]);
    FAILS(RSD_EMISMATCH, "no such tensor", rsd_read(checkpoint, "v", NULL, 0, got, sizeof got));
    rsd_tensor missing[5];
    static const char *const names[5] = {"w", "model.w", "x", "y", "z"};
    for (int i = 0; i < 5; i++) {
        missing[i] = tensor;
        missing[i].name = names[i];
    }
    FAILS(RSD_EMISMATCH,
          "4 tensors are missing in the checkpoint: model.w, x, y, ...; names here lack model.",
          rsd_load(checkpoint, 5, missing, NULL, NULL));
    FAILS(RSD_EMISMATCH, "model.w: the checkpoint has no such tensor; names here lack model.",
          rsd_load(checkpoint, 2, missing, NULL, NULL));
    FAILS(RSD_EINVAL, "8 are needed", rsd_read(checkpoint, "w", &column, 0, got, sizeof got));
    FAILS(RSD_EINVAL, "dtype", rsd_read(checkpoint, "w", &column, (rsd_dtype)99, got, 16));
    FAILS(RSD_EUNSUPPORTED, "f8e4m3", rsd_read(checkpoint, "w", &column, RSD_F8E4M3, got, 2));
    column.lo[1] = 3;
    FAILS(RSD_EINVAL, "not inside", rsd_read(checkpoint, "w", &column, 0, got, 8));
    column.lo[1] = INT64_MAX;
    FAILS(RSD_EINVAL, "not inside", rsd_read(checkpoint, "w", &column, 0, got, 8));
    column.ndim = 1;
    FAILS(RSD_EINVAL, "1 dims", rsd_read(checkpoint, "w", &column, 0, got, 8));
    rsd_checkpoint_close(checkpoint);
    rsd_layout_free(layout);
    *strrchr(path, '/') = '\0';
    folder_remove(path);
}

int main(void)
{
    golden_loads();
    reads();
    return tap_end();
}
