/* test_load.c - checkpoints that torch wrote are opened, listed and loaded into any layout. */
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
    rsd_load_options options = {.struct_nbytes = sizeof options, .pool = pool};
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

int main(void)
{
    golden_loads();
    return tap_end();
}
