/* dtensor_write.c - writes the files that ranks save with FSDP, as verl reads them: model_world_size_N_rank_R.pt.
 *
 * A tensor that all ranks have is a plain one. Any other is a DTensor, sharded along one dim of a mesh of all ranks,
 * as torch 2.13 pickles it. The archives are those of torch.save.
 */
#include "torch_saved.h"

#include <stdio.h>
#include <string.h>

#define MESH_KEY "mesh" /* of the storage with the ranks of the mesh */

static void put_dtensor_text(struct bytes *out, const char *text)
{
    pickle_write_text(out, (struct slice){text, strlen(text)});
}

/* Starts an object of a class, whose state follows. */
static void start_object(struct bytes *out, const char *module, const char *name)
{
    pickle_write_global(out, module, name);
    pickle_write_op(out, ")\x81}(");
}

/* ---- the mesh ---- */

/* Writes the axes of a mesh of one dim. */
static void put_mesh_axes(struct bytes *out, int64_t nranks)
{
    static const char module[] = "torch.distributed._mesh_layout";
    start_object(out, module, "_MeshLayout");
    put_dtensor_text(out, "axes");
    pickle_write_op(out, "(");
    start_object(out, module, "_FlatLayout");
    put_dtensor_text(out, "shape");
    saved_put_tuple(out, 1, &nranks);
    put_dtensor_text(out, "stride");
    saved_put_tuple(out, 1, &(int64_t){1});
    pickle_write_op(out, "ubtub");
}

/* Writes the mesh of all ranks, as the rank of this file has it. Later tensors of the file refer to it. */
static void put_mesh(struct bytes *out, int64_t rank, int64_t nranks)
{
    static const char *const absent[] = {"_root_mesh", "_thread_id", "_hash"};
    start_object(out, "torch.distributed.device_mesh", "DeviceMesh");
    put_dtensor_text(out, "_device_type");
    put_dtensor_text(out, "cuda");
    put_dtensor_text(out, "_layout");
    put_mesh_axes(out, nranks);
    put_dtensor_text(out, "_rank_map");
    saved_put_tensor(out, RSD_I32, 1, &nranks, MESH_KEY);
    put_dtensor_text(out, "_mesh_dim_names");
    pickle_write_op(out, "(");
    put_dtensor_text(out, "fsdp");
    pickle_write_op(out, "t");
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        put_dtensor_text(out, absent[i]);
        pickle_write_op(out, "N");
    }
    put_dtensor_text(out, "_flatten_mapping");
    pickle_write_op(out, "}");
    put_dtensor_text(out, "_flatten_rank_map");
    pickle_write_op(out, "(");
    for (int64_t i = 0; i < nranks; i++)
        pickle_write_int(out, i);
    pickle_write_op(out, "t");
    put_dtensor_text(out, "_dim_group_names");
    pickle_write_op(out, "]");
    put_dtensor_text(out, "_rank");
    pickle_write_int(out, rank);
    put_dtensor_text(out, "_coordinate_on_dim");
    saved_put_tuple(out, 1, &rank);
    pickle_write_op(out, "ub");
}

/* ---- tensors ---- */

static const char spec_module[] = "torch.distributed.tensor._dtensor_spec";

static void put_strides(struct bytes *out, int32_t ndim, const int64_t *shape)
{
    int64_t strides[RSD_MAX_DIMS], stride = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= max_i64(shape[d], 1);
    }
    saved_put_tuple(out, ndim, strides);
}

static void put_placement(struct bytes *out, int64_t dim)
{
    put_dtensor_text(out, "placements");
    pickle_write_op(out, "(");
    start_object(out, "torch.distributed.tensor.placement_types", "Shard");
    put_dtensor_text(out, "dim");
    pickle_write_int(out, dim);
    pickle_write_op(out, "ubt");
}

/* Writes the DTensorSpec of a tensor that is sharded along a dim, behind its mesh. */
static void put_spec(struct bytes *out, const struct stored_tensor *tensor, const int64_t *shape,
                     int64_t dim)
{
    put_dtensor_text(out, "tensor_meta");
    pickle_write_global(out, spec_module, "TensorMeta");
    pickle_write_op(out, "(");
    pickle_write_global(out, "torch", "Size");
    pickle_write_op(out, "(");
    saved_put_tuple(out, tensor->ndim, shape);
    pickle_write_op(out, "tR");
    put_strides(out, tensor->ndim, shape);
    pickle_write_global(out, "torch", dtype_to_torch(tensor->dtype));
    pickle_write_op(out, "t\x81");
    put_placement(out, dim);
    put_dtensor_text(out, "shard_order");
    pickle_write_op(out, "(");
    pickle_write_global(out, spec_module, "ShardOrderEntry");
    pickle_write_op(out, "(");
    pickle_write_int(out, dim);
    saved_put_tuple(out, 1, &(int64_t){0});
    pickle_write_op(out, "t\x81t");
    put_dtensor_text(out, "use_strided_shard_as_shard_order");
    pickle_write_op(out, "\x89");
    put_dtensor_text(out, "_hash");
    pickle_write_op(out, "N");
}

/* Writes the arguments with which torch makes the wrapper around a local tensor. */
static void put_wrapper(struct bytes *out, const struct stored_tensor *tensor, const int64_t *shape)
{
    static const char module[] = "torch.distributed.tensor";
    pickle_write_global(out, "torch._utils", "_rebuild_wrapper_subclass");
    pickle_write_global(out, module, "DTensor");
    pickle_write_op(out, "(");
    pickle_write_global(out, module, "DTensor");
    pickle_write_global(out, "torch", dtype_to_torch(tensor->dtype));
    saved_put_tuple(out, tensor->ndim, shape);
    put_strides(out, tensor->ndim, shape);
    pickle_write_int(out, 0);
    pickle_write_global(out, "torch.serialization", "_get_layout");
    pickle_write_op(out, "(");
    put_dtensor_text(out, "torch.strided");
    pickle_write_op(out, "tR");
    pickle_write_global(out, "torch", "device");
    pickle_write_op(out, "(");
    put_dtensor_text(out, "cpu");
    pickle_write_op(out, "tR\x89t");
}

/* Returns the dim along which all ranks have equal parts of a tensor, in the order of the ranks; -1: all ranks have
 * the whole tensor; -2: neither. */
static int64_t find_shard_dim(const struct manifest *manifest, const struct stored_tensor *tensor)
{
    const struct catalog *catalog = &manifest->catalog;
    const int64_t *shape = tensor_shape(catalog, tensor);
    int64_t nranks = (int64_t)manifest->nfiles;
    if ((int64_t)tensor->nboxes != nranks)
        return -2;
    for (int64_t dim = -1; dim < tensor->ndim; dim++) {
        bool fits = true;
        for (int64_t r = 0; r < nranks && fits; r++) {
            const int64_t *lo = tensor_box_lo(catalog, tensor, (size_t)r), *len = lo + tensor->ndim;
            fits = catalog->extents[tensor->first_extent + (size_t)r].file == (uint32_t)r;
            for (int32_t d = 0; d < tensor->ndim && fits; d++) {
                int64_t part = d == dim ? shape[d] / nranks + (shape[d] % nranks != 0) : shape[d];
                int64_t begin = d == dim ? min_i64(r * part, shape[d]) : 0;
                int64_t n = min_i64(part, shape[d] - begin);
                fits = len[d] == n && (lo[d] == begin || n == 0);
            }
        }
        if (fits)
            return dim;
    }
    return -2;
}

rsd_status dtensor_put_dict(const struct manifest *manifest, size_t file, struct bytes *out)
{
    const struct catalog *catalog = &manifest->catalog;
    bool has_mesh = false;
    pickle_write_op(out, "\x80\x02}(");
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        int64_t dim = find_shard_dim(manifest, tensor);
        char key[24];
        if (strncmp(tensor->name, "optimizer.", 10) == 0)
            return fail(
                RSD_EUNSUPPORTED,
                "%.300s: files of FSDP are written with the model only; leave the optimizer "
                "out (--exclude '^optimizer')",
                tensor->name);
        if (dim < -1)
            return fail(
                RSD_EUNSUPPORTED,
                "%.300s: files of FSDP have a mesh of one axis, on which each tensor is S(dim) "
                "or R",
                tensor->name);
        snprintf(key, sizeof key, "%zu", t);
        put_dtensor_text(out, tensor->name);
        if (dim < 0) {
            saved_put_tensor(out, tensor->dtype, tensor->ndim, tensor_shape(catalog, tensor), key);
            continue;
        }
        pickle_write_global(out, "torch._tensor", "_rebuild_from_type_v2");
        pickle_write_op(out, "(");
        put_wrapper(out, tensor, tensor_shape(catalog, tensor));
        pickle_write_op(out, "(N}(");
        put_dtensor_text(out, "_local_tensor");
        saved_put_tensor(out, tensor->dtype, tensor->ndim, tensor_box_len(catalog, tensor, file),
                         key);
        put_dtensor_text(out, "_spec");
        start_object(out, spec_module, "DTensorSpec");
        put_dtensor_text(out, "mesh");
        if (has_mesh) {
            bytes_put(out, "h\0", 2);
        } else {
            put_mesh(out, (int64_t)file, (int64_t)manifest->nfiles);
            bytes_put(out, "q\0", 2);
        }
        has_mesh = true;
        put_spec(out, tensor, tensor_shape(catalog, tensor), dim);
        pickle_write_op(out, "ubuttR");
    }
    pickle_write_op(out, "u.");
    return out->failed ? RSD_ENOMEM : RSD_OK;
}

rsd_status dtensor_add_mesh(const struct manifest *manifest, struct archive_writer *archive)
{
    struct bytes ranks = {0};
    for (size_t i = 0; i < manifest->nfiles; i++)
        bytes_put_number(&ranks, i, 4);
    rsd_status status = ranks.failed ? RSD_ENOMEM : RSD_OK;
    if (!status)
        archive_add_record(archive, "archive/data/" MESH_KEY, ranks.data, ranks.n);
    bytes_drop(&ranks);
    return status;
}

/* ---- the writer ---- */

static rsd_status dtensor_check(const rsd_convert_options *options, bool one_file)
{
    (void)one_file;
    return options->compress ? fail(RSD_EINVAL, "files of FSDP cannot be compressed") : RSD_OK;
}

static void dtensor_name_file(const struct manifest *manifest, size_t file, size_t nfiles,
                              char name[FILE_NAME_NCHARS])
{
    (void)manifest;
    snprintf(name, FILE_NAME_NCHARS, "model_world_size_%zu_rank_%zu.pt", nfiles, file);
}

static rsd_status dtensor_finish(const struct manifest *manifest, struct store *store)
{
    char text[80];
    int n =
        snprintf(text, sizeof text, "{\"FSDP_version\": 2, \"world_size\": %zu}", manifest->nfiles);
    TRY(saved_finish_files(manifest, store));
    return store_put(store, dtensor_writer.marker, text, (size_t)n);
}

const struct format_writer dtensor_writer = {.marker = "fsdp_config.json",
                                             .suffix_until_complete = "",
                                             .every_rank = true,
                                             .check = dtensor_check,
                                             .name_file = dtensor_name_file,
                                             .place = saved_place_files,
                                             .frame = saved_frame,
                                             .finish = dtensor_finish};
