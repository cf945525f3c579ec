/* truth.c - see truth.h. */
#include "truth.h"

#include "oracle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const golden[] = {"cols_uneven",
                              "dtypes",
                              "empty_shards",
                              "fsdp2_adamw",
                              "fsdp2_tp_adamw",
                              "hf_sharded",
                              "hsdp_adamw",
                              "many_files",
                              "mesh_2d",
                              "mesh_3d",
                              "no_collectives",
                              "orbax_chunked",
                              "orbax_chunked_zarr2",
                              "orbax_manager",
                              "orbax_ocdbt_deep",
                              "orbax_ocdbt_zarr2",
                              "orbax_ocdbt_zarr3",
                              "orbax_plain_zarr2",
                              "orbax_plain_zarr3",
                              "orbax_two_processes",
                              "orbax_variants",
                              "replicated",
                              "rows_1d",
                              "safetensors_items",
                              "sharded_tensor",
                              "torch113",
                              "torch24",
                              "transposed",
                              "two_threads",
                              "values",
                              "zstd",
                              "ds_universal_z2",
                              "ds_universal_z3",
                              "ds_z0",
                              "ds_z1",
                              "ds_z1_bf16_optimizer",
                              "ds_z1_elastic",
                              "ds_z1_one_rank",
                              "ds_z2",
                              "ds_z2_aligned",
                              "ds_z2_fp32",
                              "ds_z2_no_frozen",
                              "ds_z2_round_robin",
                              "ds_z3",
                              "ds_z3_fp32",
                              "ds_z3_subgroups",
                              "mcore_dist_bias",
                              "mcore_dist_tp",
                              "mcore_dist_tp_pp",
                              "mcore_legacy_pp_bias",
                              "mcore_legacy_tp",
                              "mcore_legacy_tp_pp",
                              "verl_fsdp2_tp",
                              "verl_fsdp2_tp_t28",
                              "verl_placements_t26",
                              "verl_placements_t210",
                              "verl_groups",
                              "verl_fsdp1_hsdp",
                              "fsdp1_sharded_tensor",
                              "verl_model_only",
                              NULL};

const char *golden_path(const char *name, const char *what)
{
    static char paths[4][256];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "tests/golden/%s/%s", name, what);
    return path;
}

void *truth_bytes(rsd_checkpoint *truth, const char *truth_path, const char *name,
                  rsd_tensor_info *about)
{
    int64_t index;
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    about->struct_nbytes = sizeof *about;
    if (rsd_checkpoint_find(truth, name, &index) || rsd_checkpoint_tensor(truth, index, about) ||
        rsd_checkpoint_box(truth, index, 0, &stored))
        return NULL;
    FILE *file = fopen(truth_path, "rb");
    char *bytes = malloc((size_t)about->nbytes + 1);
    if (!file || !bytes || fseek(file, (long)stored.offset, SEEK_SET) ||
        fread(bytes, 1, (size_t)about->nbytes, file) != (size_t)about->nbytes) {
        free(bytes);
        bytes = NULL;
    }
    if (file)
        fclose(file);
    return bytes;
}

void truth_cut(const rsd_layout *layout, const void *whole, void *const *arrays)
{
    const int64_t *shape = rsd_layout_shape(layout);
    int32_t ndim = rsd_layout_ndim(layout);
    size_t each = rsd_dtype_nbytes(rsd_layout_dtype(layout));
    for (int64_t a = 0; a < rsd_layout_narrays(layout); a++) {
        struct indices indices;
        int64_t at[RSD_MAX_DIMS] = {0}, volume = 1;
        oracle_indices(layout, a, &indices);
        for (int32_t d = 0; d < ndim; d++)
            volume *= indices.n[d];
        for (int64_t i = 0; i < volume; i++) {
            int64_t from = 0;
            for (int32_t d = 0; d < ndim; d++)
                from = from * shape[d] + indices.list[d][at[d]];
            memcpy((char *)arrays[a] + (size_t)i * each, (const char *)whole + (size_t)from * each,
                   each);
            for (int32_t d = ndim - 1; d >= 0 && ++at[d] == indices.n[d]; d--)
                at[d] = 0;
        }
        oracle_indices_free(&indices);
    }
}
