/* dtensor_write.c - writes the files that ranks save with FSDP, as verl reads them.
 *
 *     model_world_size_N_rank_R.pt         the state dict of rank R
 *     optim_world_size_N_rank_R.pt         the state of its optimizer, if there is one (optimizer_write.c)
 *     extra_state_world_size_N_rank_R.pt   the learning rate
 *     fsdp_config.json                     the version of FSDP and N
 *
 * A tensor that is replicated on every axis is a plain one. Any other is a DTensor, as torch 2.13 pickles it. Its mesh
 * is that of all ranks without the axes that shard other tensors only: FSDP2 leaves the parameters that tensor
 * parallelism does not touch on the mesh of FSDP, and those of HSDP on the whole mesh. The archives are those of
 * torch.save.
 */
#include "dtensor_write.h"

#include <stdio.h>
#include <string.h>

#define MESH_KEY "mesh" /* of the storage with the ranks of the mesh */

static const char spec_module[] = "torch.distributed.tensor._dtensor_spec";

/* Starts an object of a class, whose state follows. */
static void start_object(struct bytes *out, const char *module, const char *name)
{
    pickle_write_global(out, module, name);
    pickle_write_op(out, ")\x81}(");
}

/* Writes a key whose value is None. */
static void put_no_value(struct bytes *out, const char *key)
{
    pickle_write_string(out, key);
    pickle_write_op(out, "N");
}

/* ---- the mesh ---- */

static bool has_axis(uint32_t axes, int32_t axis)
{
    return axes >> axis & 1;
}

/* Writes the number of ranks of each axis, and the distance of neighbours in the list of ranks. */
static void put_mesh_layout(struct bytes *out, const rsd_mesh *mesh, uint32_t axes)
{
    static const char module[] = "torch.distributed._mesh_layout";
    start_object(out, module, "_MeshLayout");
    pickle_write_string(out, "axes");
    pickle_write_op(out, "(");
    for (int32_t a = 0; a < mesh->naxes; a++) {
        if (!has_axis(axes, a))
            continue;
        int32_t n = mesh->counts[a] > 1; /* an axis of one rank has neither */
        start_object(out, module, "_FlatLayout");
        pickle_write_string(out, "shape");
        saved_put_tuple(out, n, &mesh->counts[a], NULL);
        pickle_write_string(out, "stride");
        saved_put_tuple(out, n, &mesh->strides[a], NULL);
        pickle_write_op(out, "ub");
    }
    pickle_write_op(out, "tub");
}

/* Writes the names of the axes. One or two axes without names have those of verl. */
static void put_axis_names(struct bytes *out, const rsd_mesh *mesh, uint32_t axes)
{
    static const char *const usual[] = {"ddp", "fsdp"};
    bool named = true;
    for (int32_t a = 0; a < mesh->naxes; a++)
        named = named && mesh->names[a];
    pickle_write_string(out, "_mesh_dim_names");
    if (!named && mesh->naxes > 2) {
        pickle_write_op(out, "N");
        return;
    }
    pickle_write_op(out, "(");
    for (int32_t a = 0; a < mesh->naxes; a++)
        if (has_axis(axes, a))
            pickle_write_string(out, named ? mesh->names[a] : usual[2 - mesh->naxes + a]);
    pickle_write_op(out, "t");
}

/* Writes the rank of the file, and where it is in the mesh. */
static void put_coordinates(struct bytes *out, const rsd_mesh *mesh, uint32_t axes, int32_t rank)
{
    int64_t coordinates[RSD_MAX_AXES], position = mesh_position_of(mesh, rank);
    int32_t n = 0;
    for (int32_t a = 0; a < mesh->naxes; a++)
        if (has_axis(axes, a))
            coordinates[n++] = mesh_coord(mesh, position, a);
    pickle_write_string(out, "_rank");
    pickle_write_int(out, rank);
    pickle_write_string(out, "_coordinate_on_dim");
    saved_put_tuple(out, n, coordinates, NULL);
}

/* Writes the mesh of some axes, as the rank of this file has it. Later tensors of the file refer to it. */
static void put_mesh(struct dtensor_pickle *pickle, uint32_t axes)
{
    struct bytes *out = pickle->out;
    const rsd_mesh *mesh = pickle->mesh;
    uint32_t all = (uint32_t)((UINT64_C(1) << mesh->naxes) - 1);
    for (size_t i = 0; i < pickle->nmeshes; i++)
        if (pickle->meshes[i] == axes) {
            pickle_write_op(out, "h");
            bytes_put_number(out, i, 1);
            return;
        }
    start_object(out, "torch.distributed.device_mesh", "DeviceMesh");
    pickle_write_string(out, "_device_type");
    pickle_write_string(out, "cuda");
    pickle_write_string(out, "_layout");
    put_mesh_layout(out, mesh, axes);
    pickle_write_string(out, "_rank_map");
    saved_put_tensor(out, RSD_I32, 1, &mesh->nranks, NULL, MESH_KEY, NULL);
    put_axis_names(out, mesh, axes);
    if (axes == all) {
        put_no_value(out, "_root_mesh");
    } else {
        pickle_write_string(out, "_root_mesh");
        put_mesh(pickle, all);
    }
    put_no_value(out, "_thread_id");
    put_no_value(out, "_hash");
    pickle_write_string(out, "_flatten_mapping");
    pickle_write_op(out, "}");
    pickle_write_string(out, "_flatten_rank_map");
    pickle_write_op(out, "(");
    for (int64_t i = 0; i < mesh->nranks; i++)
        pickle_write_int(out, mesh_rank_at(mesh, i));
    pickle_write_op(out, "t");
    pickle_write_string(out, "_dim_group_names");
    pickle_write_op(out, "]");
    put_coordinates(out, mesh, axes, pickle->rank);
    pickle_write_op(out, "ub");
    if (pickle->nmeshes == MAX_PICKLED_MESHES)
        return;
    pickle_write_op(out, "q");
    bytes_put_number(out, pickle->nmeshes, 1);
    pickle->meshes[pickle->nmeshes++] = axes;
}

/* ---- placements ---- */

static bool is_sharded_on(const rsd_layout *layout, int32_t axis)
{
    return layout->placements[axis].kind != RSD_REPLICATE;
}

/* Returns the axes that shard a tensor; 0: it is a plain one. */
static uint32_t sharding_axes(const rsd_layout *layout)
{
    uint32_t axes = 0;
    for (int32_t a = 0; layout->mesh && a < layout->mesh->naxes; a++)
        axes |= (uint32_t)is_sharded_on(layout, a) << a;
    return axes;
}

/* Returns the axes of the mesh of a tensor: those that shard it, and those that shard no tensor. */
static uint32_t mesh_axes(const struct dtensor_pickle *pickle, const rsd_layout *layout)
{
    uint32_t all = (uint32_t)((UINT64_C(1) << layout->mesh->naxes) - 1);
    return sharding_axes(layout) | (all & ~pickle->sharding);
}

/* Returns the factor of a strided shard; 1: the shard is not strided. An axis that cuts a dim after later axes is
 * strided by the product of their counts, as FSDP2 has it over tensor parallelism. */
static int64_t split_factor(const rsd_layout *layout, int32_t axis)
{
    const rsd_placement *placement = &layout->placements[axis];
    int64_t factor = placement->kind == RSD_STRIDED ? placement->factor : 1;
    for (int32_t i = 0; layout->ordered && i < layout->naxes_of[placement->dim]; i++) {
        int32_t before = layout->axes_of[placement->dim][i];
        if (before == axis)
            break;
        if (before > axis)
            factor *= layout->mesh->counts[before];
    }
    return factor;
}

static bool is_strided(const rsd_layout *layout)
{
    bool strided = false;
    for (int32_t a = 0; a < layout->mesh->naxes; a++)
        strided = strided || layout->placements[a].kind == RSD_STRIDED ||
                  (is_sharded_on(layout, a) && split_factor(layout, a) > 1);
    return strided;
}

/* Writes the placement of a tensor on each axis of its mesh. */
static void put_placements(struct bytes *out, const rsd_layout *layout, uint32_t axes)
{
    static const char module[] = "torch.distributed.tensor.placement_types";
    pickle_write_string(out, "placements");
    pickle_write_op(out, "(");
    for (int32_t a = 0; a < layout->mesh->naxes; a++) {
        const rsd_placement *placement = &layout->placements[a];
        if (!has_axis(axes, a))
            continue;
        if (placement->kind == RSD_REPLICATE) {
            pickle_write_global(out, module, "Replicate");
            pickle_write_op(out, ")\x81}b");
            continue;
        }
        int64_t factor = split_factor(layout, a);
        bool strided = placement->kind == RSD_STRIDED || factor > 1;
        start_object(out, module, strided ? "_StridedShard" : "Shard");
        pickle_write_string(out, "dim");
        pickle_write_int(out, placement->dim);
        if (strided) {
            pickle_write_string(out, "split_factor");
            pickle_write_int(out, factor);
        }
        pickle_write_op(out, "ub");
    }
    pickle_write_op(out, "t");
}

/* Returns the number of an axis among the axes of a mesh. */
static int64_t axis_number(uint32_t axes, int32_t axis)
{
    return __builtin_popcount(axes & ((1u << axis) - 1));
}

/* Writes the axes that cut each dim, in the order of cutting. Strided shards say it themselves. */
static void put_shard_order(struct bytes *out, const rsd_layout *layout, uint32_t axes)
{
    bool strided = is_strided(layout);
    pickle_write_string(out, "shard_order");
    pickle_write_op(out, strided ? "N" : "(");
    for (int32_t d = 0; d < layout->ndim && !strided; d++) {
        int64_t order[RSD_MAX_AXES];
        int32_t n = 0;
        for (; n < layout->naxes_of[d]; n++)
            order[n] = axis_number(axes, layout->axes_of[d][n]);
        if (n == 0)
            continue;
        pickle_write_global(out, spec_module, "ShardOrderEntry");
        pickle_write_op(out, "(");
        pickle_write_int(out, d);
        saved_put_tuple(out, n, order, NULL);
        pickle_write_op(out, "t\x81");
    }
    pickle_write_op(out, strided ? "" : "t");
    pickle_write_string(out, "use_strided_shard_as_shard_order");
    pickle_write_op(out, strided ? "\x88" : "\x89");
}

/* ---- tensors ---- */

/* Writes mesh, placements, shape and dtype of a DTensor. */
static void put_spec(struct dtensor_pickle *pickle, const struct stored_tensor *tensor,
                     const rsd_layout *layout)
{
    struct bytes *out = pickle->out;
    uint32_t axes = mesh_axes(pickle, layout);
    pickle_write_string(out, "_spec");
    start_object(out, spec_module, "DTensorSpec");
    pickle_write_string(out, "mesh");
    put_mesh(pickle, axes);
    put_placements(out, layout, axes);
    pickle_write_string(out, "tensor_meta");
    pickle_write_global(out, spec_module, "TensorMeta");
    pickle_write_op(out, "(");
    pickle_write_global(out, "torch", "Size");
    pickle_write_op(out, "(");
    saved_put_tuple(out, tensor->ndim, layout->shape, NULL);
    pickle_write_op(out, "tR");
    saved_put_strides(out, tensor->ndim, layout->shape, NULL);
    pickle_write_global(out, "torch", dtype_to_torch(tensor->dtype));
    pickle_write_op(out, "t\x81");
    put_shard_order(out, layout, axes);
    put_no_value(out, "_hash");
    pickle_write_op(out, "ub");
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
    saved_put_tuple(out, tensor->ndim, shape, NULL);
    saved_put_strides(out, tensor->ndim, shape, NULL);
    pickle_write_int(out, 0);
    pickle_write_global(out, "torch.serialization", "_get_layout");
    pickle_write_op(out, "(");
    pickle_write_string(out, "torch.strided");
    pickle_write_op(out, "tR");
    pickle_write_global(out, "torch", "device");
    pickle_write_op(out, "(");
    pickle_write_string(out, "cpu");
    pickle_write_op(out, "tR\x89t");
}

void dtensor_put_tensor(struct dtensor_pickle *pickle, size_t index)
{
    const struct catalog *catalog = &pickle->manifest->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    const rsd_layout *layout = pickle->manifest->layouts[index];
    struct bytes *out = pickle->out;
    char key[24];
    snprintf(key, sizeof key, "%zu", index);
    if (!sharding_axes(layout)) {
        saved_put_tensor(out, tensor->dtype, tensor->ndim, layout->shape, NULL, key, NULL);
        return;
    }
    pickle_write_global(out, "torch._tensor", "_rebuild_from_type_v2");
    pickle_write_op(out, "(");
    put_wrapper(out, tensor, layout->shape);
    pickle_write_op(out, "(N}(");
    pickle_write_string(out, "_local_tensor");
    saved_put_tensor(out, tensor->dtype, tensor->ndim,
                     tensor_box_len(catalog, tensor, (size_t)pickle->rank), NULL, key, NULL);
    put_spec(pickle, tensor, layout);
    pickle_write_op(out, "uttR");
}

/* ---- files ---- */

/* Returns the mesh of the first tensor that has one, or NULL. */
static const rsd_mesh *find_mesh(const struct manifest *manifest)
{
    for (size_t t = 0; t < manifest->catalog.ntensors; t++)
        if (manifest->layouts[t]->mesh)
            return manifest->layouts[t]->mesh;
    return NULL;
}

rsd_status dtensor_put_dict(const struct manifest *manifest, size_t file, struct bytes *out)
{
    const struct catalog *catalog = &manifest->catalog;
    size_t nranks = (size_t)manifest->nranks;
    struct dtensor_pickle pickle = {.manifest = manifest,
                                    .mesh = find_mesh(manifest),
                                    .rank = (int32_t)(file % nranks),
                                    .out = out};
    for (size_t t = 0; t < catalog->ntensors; t++)
        pickle.sharding |= sharding_axes(manifest->layouts[t]);
    pickle_write_op(out, "\x80\x02");
    if (file >= nranks) {
        TRY(optimizer_put_dict(&pickle));
    } else {
        pickle_write_op(out, "}(");
        for (size_t t = 0; t < catalog->ntensors; t++) {
            if (optimizer_has_tensor(catalog->tensors[t].name))
                continue;
            pickle_write_string(out, catalog->tensors[t].name);
            dtensor_put_tensor(&pickle, t);
        }
        pickle_write_op(out, "u");
    }
    pickle_write_op(out, ".");
    return out->failed ? RSD_ENOMEM : RSD_OK;
}

rsd_status dtensor_add_mesh(const struct manifest *manifest, struct archive_writer *archive)
{
    struct bytes ranks = {0};
    const rsd_mesh *mesh = find_mesh(manifest);
    for (int64_t i = 0; mesh && i < mesh->nranks; i++)
        bytes_put_number(&ranks, (uint64_t)mesh_rank_at(mesh, i), 4);
    rsd_status status = ranks.failed ? RSD_ENOMEM : RSD_OK;
    if (!status)
        archive_add_record(archive, "archive/data/" MESH_KEY, ranks.data, ranks.n);
    bytes_drop(&ranks);
    return status;
}

/* ---- what can be written ---- */

static bool same_mesh(const rsd_mesh *a, const rsd_mesh *b)
{
    bool same = a->naxes == b->naxes && a->nranks == b->nranks;
    for (int32_t i = 0; same && i < a->naxes; i++)
        same = a->counts[i] == b->counts[i] && !a->names[i] == !b->names[i] &&
               (!a->names[i] || strcmp(a->names[i], b->names[i]) == 0);
    for (int64_t i = 0; same && i < a->nranks; i++)
        same = mesh_rank_at(a, i) == mesh_rank_at(b, i);
    return same;
}

/* Returns EUNSUPPORTED for a layout that files of FSDP cannot have. */
static rsd_status check_layout(const struct manifest *manifest, size_t index, const rsd_mesh *mesh)
{
    const struct catalog *catalog = &manifest->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    const rsd_layout *layout = manifest->layouts[index];
    if (manifest->nranks == 1 && !layout->mesh)
        return RSD_OK;
    if (!layout->mesh || layout->mesh->nranks != manifest->nranks)
        return fail(RSD_EUNSUPPORTED, "files of FSDP need placements on a mesh of all %lld ranks",
                    (long long)manifest->nranks);
    if (layout->mesh != mesh && (!mesh || !same_mesh(layout->mesh, mesh)))
        return fail(RSD_EUNSUPPORTED, "files of FSDP have one mesh for all tensors");
    for (int32_t a = 0; a < layout->mesh->naxes; a++) {
        rsd_kind kind = layout->placements[a].kind;
        if (kind != RSD_REPLICATE && kind != RSD_SHARD && kind != RSD_STRIDED)
            return fail(RSD_EUNSUPPORTED,
                        "placement on axis %d is not one of torch: R, S(dim) or _S(dim,factor)",
                        (int)a);
    }
    for (size_t i = 0; i < tensor->nboxes; i++)
        if (catalog->extents[tensor->first_extent + i].file != i)
            return fail(RSD_EUNSUPPORTED,
                        "rank %zu has several boxes of the tensor, and a file of FSDP has one "
                        "array; strided shards must be parts of those of a later axis",
                        i ? i - 1 : 0);
    return RSD_OK;
}

static rsd_status check_layouts(const struct manifest *manifest)
{
    const rsd_mesh *mesh = find_mesh(manifest);
    for (size_t t = 0; t < manifest->catalog.ntensors; t++) {
        rsd_status status = check_layout(manifest, t, mesh);
        if (status)
            return fail_in(status, "%.300s: ", manifest->catalog.tensors[t].name);
    }
    return RSD_OK;
}

/* ---- the writer ---- */

static rsd_status dtensor_check(const rsd_convert_options *options)
{
    return options->compress ? fail(RSD_EINVAL, "files of FSDP cannot be compressed") : RSD_OK;
}

static void dtensor_name_file(const struct manifest *manifest, size_t file, size_t nfiles,
                              char name[FILE_NAME_NCHARS])
{
    (void)manifest;
    snprintf(name, FILE_NAME_NCHARS, "model_world_size_%zu_rank_%zu.pt", nfiles, file);
}

/* Moves the tensors of the optimizer to files of their own. */
static rsd_status add_optimizer_files(struct manifest *manifest)
{
    struct catalog *catalog = &manifest->catalog;
    bool any = false;
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        bool own = optimizer_has_tensor(tensor->name);
        for (size_t i = 0; own && i < tensor->nboxes; i++)
            catalog->extents[tensor->first_extent + i].file += (uint32_t)manifest->nranks;
        any = any || own;
    }
    for (int64_t rank = 0; any && rank < manifest->nranks; rank++) {
        char name[FILE_NAME_NCHARS];
        snprintf(name, sizeof name, "optim_world_size_%lld_rank_%lld.pt",
                 (long long)manifest->nranks, (long long)rank);
        TRY(manifest_add_file(manifest, name));
    }
    return RSD_OK;
}

static rsd_status dtensor_place(struct manifest *manifest)
{
    TRY(check_layouts(manifest));
    TRY(add_optimizer_files(manifest));
    return saved_place_files(manifest);
}

static rsd_status dtensor_make_value(const struct bytes *pickle, struct bytes *item)
{
    bytes_put(item, pickle->data, pickle->n);
    return item->failed ? RSD_ENOMEM : RSD_OK;
}

static rsd_status dtensor_finish(const struct manifest *manifest, struct store *store)
{
    char text[80];
    int n = snprintf(text, sizeof text, "{\"FSDP_version\": 2, \"world_size\": %lld}",
                     (long long)manifest->nranks);
    TRY(saved_finish_files(manifest, store));
    TRY(optimizer_put_extra_files(manifest, store));
    return store_put(store, dtensor_writer.marker, text, (size_t)n);
}

const struct format_writer dtensor_writer = {.marker = "fsdp_config.json",
                                             .suffix_until_complete = "",
                                             .every_rank = true,
                                             .check = dtensor_check,
                                             .name_file = dtensor_name_file,
                                             .place = dtensor_place,
                                             .frame = saved_frame,
                                             .make_value = dtensor_make_value,
                                             .holds_value = optimizer_holds_value,
                                             .finish = dtensor_finish};
