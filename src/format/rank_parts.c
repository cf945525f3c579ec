/* rank_parts.c - puts tensors together from the files of several ranks.
 *
 * Every rank adds its boxes of a tensor. Boxes that several ranks have are copies, which must be equal: the
 * catalog has the one of the lowest rank. All other boxes must be disjoint.
 *
 *     rank 0   w [0:4]   b [all]          the catalog: w [0:4] of rank 0, w [4:8] of rank 1, b of rank 0
 *     rank 1   w [4:8]   b [all]
 */
#include "rank_parts.h"

#include <stdlib.h>
#include <string.h>

enum { SORT_STEPS = 32 }; /* to sort one box among many */

static rsd_status add_joint_coordinates(struct rank_parts *parts, const int64_t *values, int32_t n)
{
    TRY(GROW(parts->coordinates, parts->coordinates_capacity, parts->ncoordinates + (size_t)n + 1));
    copy_i64s(parts->coordinates + parts->ncoordinates, values, n);
    parts->ncoordinates += (size_t)n;
    return RSD_OK;
}

/* ---- adding ---- */

/* Adds a tensor that no rank had before. */
static rsd_status add_joint_tensor(struct rank_parts *parts, struct slice name, const char *path,
                                   int64_t rank, const struct rank_tensor *tensor, size_t *index)
{
    struct joint_tensor joint = {.dtype = tensor->dtype,
                                 .ndim = tensor->ndim,
                                 .sharded = tensor->sharded,
                                 .unruled = tensor->unruled,
                                 .first_rank = rank,
                                 .shape = parts->ncoordinates};
    TRY(catalog_add_name(parts->catalog, name, &joint.name.bytes));
    joint.name.nbytes = name.nbytes;
    TRY(catalog_copy_text(parts->catalog, path, &joint.path));
    TRY(add_joint_coordinates(parts, tensor->shape, tensor->ndim));
    TRY(GROW(parts->tensors, parts->tensors_capacity, parts->ntensors + 1));
    TRY(string_map_add(&parts->names, joint.name, parts->ntensors));
    *index = parts->ntensors;
    parts->tensors[parts->ntensors++] = joint;
    return RSD_OK;
}

static rsd_status fail_unruled(const struct joint_tensor *joint, int32_t ndim, const int64_t *shape)
{
    char text[SHAPE_TEXT_NCHARS];
    return fail(RSD_EUNSUPPORTED,
                "tensor-parallel ranks have different parts %s, and no rule says which dim is cut; "
                "add the rule '%.300s=S(0)' to from_rules (--from), or one with S(1), gated or R",
                shape_text(ndim, shape, text), joint->name.bytes);
}

/* Checks that a rank has the tensor with the dtype and shape of the ranks before it. */
static rsd_status check_same_tensor(const struct rank_parts *parts,
                                    const struct joint_tensor *joint, int64_t rank,
                                    const struct rank_tensor *tensor)
{
    char a[SHAPE_TEXT_NCHARS], b[SHAPE_TEXT_NCHARS];
    const int64_t *shape = parts->coordinates + joint->shape;
    if (tensor->sharded != joint->sharded)
        return fail(RSD_EMISMATCH, "tensor is distributed on rank %lld and whole on rank %lld",
                    (long long)(tensor->sharded ? rank : joint->first_rank),
                    (long long)(tensor->sharded ? joint->first_rank : rank));
    if (tensor->dtype != joint->dtype || tensor->ndim != joint->ndim ||
        memcmp(shape, tensor->shape, (size_t)joint->ndim * sizeof *shape) != 0) {
        if (joint->unruled)
            return fail_unruled(joint, tensor->ndim, tensor->shape);
        return fail(RSD_EMISMATCH, "tensor is %s%s on rank %lld and %s%s on rank %lld",
                    rsd_dtype_name(joint->dtype), shape_text(joint->ndim, shape, a),
                    (long long)joint->first_rank, rsd_dtype_name(tensor->dtype),
                    shape_text(tensor->ndim, tensor->shape, b), (long long)rank);
    }
    return RSD_OK;
}

rsd_status rank_parts_add(struct rank_parts *parts, struct slice name, const char *path,
                          int64_t rank, uint32_t file, const struct rank_tensor *tensor)
{
    size_t index;
    if (!string_map_find(&parts->names, name, &index))
        TRY(add_joint_tensor(parts, name, path, rank, tensor, &index));
    struct joint_tensor *joint = &parts->tensors[index];
    if (joint->nranks && joint->last_rank == rank)
        return fail(RSD_EFORMAT, "two tensors of rank %lld have this name", (long long)rank);
    if (joint->nranks && parts->take_rank_0 && !joint->sharded && !joint->unruled)
        return RSD_OK;
    TRY(check_same_tensor(parts, joint, rank, tensor));
    joint->last_rank = rank;
    joint->nranks++;
    for (size_t i = 0; i < tensor->nboxes; i++) {
        const struct rank_box *box = &tensor->boxes[i];
        if (!budget_take_memory(sizeof *parts->boxes +
                                2 * (size_t)tensor->ndim * sizeof *parts->coordinates))
            return budget_fail();
        TRY(GROW(parts->boxes, parts->boxes_capacity, parts->nboxes + 1));
        parts->boxes[parts->nboxes] = (struct joint_box){.tensor = index,
                                                         .rank = (int32_t)rank,
                                                         .file = file,
                                                         .coordinates = parts->ncoordinates,
                                                         .array = box->array};
        TRY(add_joint_coordinates(parts, box->lo, tensor->ndim));
        TRY(add_joint_coordinates(parts, box->len, tensor->ndim));
        parts->nboxes++;
    }
    return RSD_OK;
}

/* ---- copies ---- */

static int order_boxes(const struct rank_parts *parts, const struct joint_box *a,
                       const struct joint_box *b)
{
    int32_t n = 2 * parts->tensors[a->tensor].ndim;
    const int64_t *x = parts->coordinates + a->coordinates,
                  *y = parts->coordinates + b->coordinates;
    for (int32_t i = 0; i < n; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

static int by_tensor_and_box(const void *a, const void *b, void *context)
{
    const struct joint_box *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    int order = order_boxes(context, x, y);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

/* Compares a box with that of a lower rank. */
static rsd_status compare_box_copies(const struct rank_parts *parts, const struct joint_box *first,
                                     const struct joint_box *copy)
{
    const struct joint_tensor *tensor = &parts->tensors[first->tensor];
    const int64_t *lo = parts->coordinates + first->coordinates, *len = lo + tensor->ndim;
    const uint32_t files[2] = {first->file, copy->file};
    char text[BOX_TEXT_NCHARS];
    bool equal;
    if (parts->take_rank_0 && !tensor->unruled)
        return RSD_OK;
    TRY(copies_compare(parts->store, tensor->dtype, tensor->ndim, len, files, &first->array,
                       &copy->array, &equal));
    if (equal)
        return RSD_OK;
    if (tensor->unruled)
        return fail_unruled(tensor, tensor->ndim, len);
    return fail(RSD_EMISMATCH,
                "copies of %s on ranks %d and %d differ; set take_rank_0 (--take-rank-0) to take "
                "that of rank %d",
                tensor->sharded ? box_text(tensor->ndim, lo, len, text) : "the tensor", first->rank,
                copy->rank, first->rank);
}

/* ---- coverage ---- */

/* Checks that the last tensor of the catalog has each element in one box. */
static rsd_status check_joint_coverage(const struct rank_parts *parts, bool *covered,
                                       char box[BOX_TEXT_NCHARS])
{
    const struct stored_tensor *tensor = &parts->catalog->tensors[parts->catalog->ntensors - 1];
    rsd_coverage coverage = {.struct_nbytes = sizeof coverage};
    rsd_layout *layout;
    char text[BOX_TEXT_NCHARS];
    TRY(catalog_tensor_layout(parts->catalog, tensor, false, &layout));
    rsd_status status = rsd_layout_coverage(layout, &coverage);
    rsd_layout_free(layout);
    TRY(status);
    *covered = coverage.kind != RSD_MISSES;
    if (coverage.kind == RSD_MISSES)
        box_text(tensor->ndim, coverage.box.lo, coverage.box.len, box);
    else if (coverage.kind != RSD_COVERS_ONCE)
        return fail(RSD_EFORMAT, "parts of different ranks overlap%s%s",
                    coverage.kind == RSD_COVERS_UNEVENLY ? " in " : "",
                    coverage.kind == RSD_COVERS_UNEVENLY
                        ? box_text(tensor->ndim, coverage.box.lo, coverage.box.len, text)
                        : "");
    return RSD_OK;
}

/* Adds one tensor to the catalog, with n boxes of it in order. */
static rsd_status finish_joint_tensor(struct rank_parts *parts, size_t index,
                                      const struct joint_box *boxes, size_t n, bool *covered,
                                      char hole[BOX_TEXT_NCHARS])
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct catalog *catalog = parts->catalog;
    const struct joint_tensor *tensor = &parts->tensors[index];
    const int64_t *shape = parts->coordinates + tensor->shape;
    const struct joint_box *last = NULL;
    TRY(catalog_add_tensor(catalog, tensor->name, tensor->dtype, tensor->ndim, shape));
    catalog->tensors[catalog->ntensors - 1].path = tensor->path;
    *covered = true;
    if (box_is_empty(tensor->ndim, shape)) {
        struct stored_array nothing = {0};
        return catalog_add_array(catalog, origin, shape, 0, &nothing);
    }
    for (size_t i = 0; i < n; i++) {
        const int64_t *lo = parts->coordinates + boxes[i].coordinates;
        if (last && order_boxes(parts, last, &boxes[i]) == 0) {
            TRY(compare_box_copies(parts, last, &boxes[i]));
            continue;
        }
        last = &boxes[i];
        TRY(catalog_add_array(catalog, lo, lo + tensor->ndim, last->file, &last->array));
    }
    return check_joint_coverage(parts, covered, hole);
}

rsd_status rank_parts_finish(struct rank_parts *parts, size_t *hole, char box[BOX_TEXT_NCHARS])
{
    *hole = SIZE_MAX;
    if (!budget_take(parts->nboxes * SORT_STEPS))
        return budget_fail();
    if (parts->nboxes > 1)
        qsort_r(parts->boxes, parts->nboxes, sizeof *parts->boxes, by_tensor_and_box, parts);
    for (size_t i = 0, at = 0; i < parts->ntensors; i++) {
        size_t n = 0;
        bool covered;
        char text[BOX_TEXT_NCHARS];
        while (at + n < parts->nboxes && parts->boxes[at + n].tensor == i)
            n++;
        rsd_status status =
            finish_joint_tensor(parts, i, n ? parts->boxes + at : NULL, n, &covered, text);
        if (status)
            return fail_in(status, "%.300s: ", parts->tensors[i].name.bytes);
        if (!covered && *hole == SIZE_MAX) {
            *hole = i;
            memcpy(box, text, sizeof text);
        }
        at += n;
    }
    return RSD_OK;
}

void rank_parts_drop(struct rank_parts *parts)
{
    string_map_drop(&parts->names);
    mem_free(parts->tensors);
    mem_free(parts->boxes);
    mem_free(parts->coordinates);
    parts->tensors = NULL;
    parts->boxes = NULL;
    parts->coordinates = NULL;
}
