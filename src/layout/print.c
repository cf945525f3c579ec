/* print.c - writes the canonical text of a layout, from which parse.c makes an equal layout. */
#include "layout.h"

enum { MAX_PRINTED_RANKS = 1 << 24 };

static void print_tensor(struct text *text, const rsd_layout *layout)
{
    text_add(text, "%s[", rsd_dtype_name(layout->dtype));
    for (int32_t d = 0; d < layout->ndim; d++)
        text_add(text, "%s%lld", d ? "," : "", (long long)layout->shape[d]);
    text_add(text, "]");
}

/* Writes the ranks of a mesh, as ranges, unless they are 0, 1, 2 and so on. */
static void print_ranks(struct text *text, const rsd_mesh *mesh)
{
    if (!mesh->ranks && mesh->base == 0)
        return;
    text_add(text, " ranks=");
    for (int64_t first = 0; first < mesh->nranks;) {
        int64_t last = mesh->ranks ? first : mesh->nranks - 1;
        while (mesh->ranks && last + 1 < mesh->nranks &&
               mesh->ranks[last + 1] == (int64_t)mesh->ranks[last] + 1)
            last++;
        if (last == first + 1) /* "3,4" instead of "3-4" */
            last = first;
        text_add(text, "%s%d", first ? "," : "", (int)mesh_rank_at(mesh, first));
        if (last > first)
            text_add(text, "-%d", (int)mesh_rank_at(mesh, last));
        first = last + 1;
    }
}

/* Writes the axes of a mesh, and its ranks unless they are 0, 1, 2 and so on. */
static void print_mesh(struct text *text, const rsd_mesh *mesh)
{
    bool named = false;
    for (int32_t a = 0; a < mesh->naxes; a++)
        named = named || mesh->names[a];
    for (int32_t a = 0; a < mesh->naxes; a++) {
        text_add(text, "%s", !a ? "" : named ? "," : "x");
        if (mesh->names[a])
            text_add(text, "%s=", mesh->names[a]);
        text_add(text, "%lld", (long long)mesh->counts[a]);
    }
    print_ranks(text, mesh);
}

rsd_status rsd_mesh_print(const rsd_mesh *mesh, char **out)
{
    struct text text = {0};
    print_mesh(&text, mesh);
    return text_take(&text, out);
}

/* Writes a placement in its letters. */
static void print_placement(struct text *text, const rsd_placement *placement)
{
    int dim = (int)placement->dim;
    switch (placement->kind) {
    case RSD_REPLICATE:
        text_add(text, "R");
        return;
    case RSD_PARTIAL:
        text_add(text, "P(%s)", rsd_reduce_name(placement->reduce));
        return;
    case RSD_SHARD:
        text_add(text, "S(%d)", dim);
        return;
    case RSD_BALANCED:
        text_add(text, "B(%d)", dim);
        return;
    case RSD_STRIDED:
        text_add(text, "_S(%d,%lld)", dim, (long long)placement->factor);
        return;
    case RSD_CYCLIC:
        text_add(text, "C(%d,%lld)", dim, (long long)placement->factor);
        return;
    case RSD_SEGMENTED:
        text_add(text, "S(%d;", dim);
        for (int32_t s = 0; s < placement->nsegments; s++)
            text_add(text, "%s%lld", s ? "," : "", (long long)placement->segments[s]);
        text_add(text, ")");
    }
}

/* Writes the mesh axes that cut each dim: [dp.tp, -]. */
static void print_axes_per_dim(struct text *text, const rsd_layout *layout)
{
    for (int32_t d = 0; d < layout->ndim; d++) {
        text_add(text, "%s", d ? ", " : "[");
        if (layout->naxes_of[d] == 0)
            text_add(text, "-");
        for (int32_t k = 0; k < layout->naxes_of[d]; k++) {
            int32_t axis = layout->axes_of[d][k];
            if (layout->mesh->names[axis])
                text_add(text, "%s%s", k ? "." : "", layout->mesh->names[axis]);
            else
                text_add(text, "%s%d", k ? "." : "", (int)axis);
        }
    }
    text_add(text, "]");
}

/* Whole dims at the end are left out, except the first dim. */
static void print_explicit_box(struct text *text, const rsd_layout *layout, int64_t box)
{
    const int64_t *lo = layout_box_lo(layout, box), *len = layout_box_len(layout, box);
    int32_t shown = layout->ndim;
    while (shown > 1 && lo[shown - 1] == 0 && len[shown - 1] == layout->shape[shown - 1])
        shown--;
    if (shown == 0)
        text_add(text, ":");
    for (int32_t d = 0; d < shown; d++)
        if (lo[d] == 0 && len[d] == layout->shape[d])
            text_add(text, "%s:", d ? "," : "");
        else
            text_add(text, "%s%lld:%lld", d ? "," : "", (long long)lo[d],
                     (long long)(lo[d] + len[d]));
}

/* Writes the boxes of all ranks: { 0:4 ; 6:8 | 4:6 }. */
static void print_explicit_boxes(struct text *text, const rsd_layout *layout)
{
    int64_t box = 0, world = rsd_layout_world(layout);
    text_add(text, "{");
    for (int64_t rank = 0; rank < world; rank++) {
        text_add(text, "%s", rank ? " |" : "");
        for (bool first = true; box < layout->nboxes && layout->box_ranks[box] == rank; box++) {
            text_add(text, "%s", first ? " " : "; ");
            print_explicit_box(text, layout, box);
            first = false;
        }
    }
    text_add(text, " }");
}

/* Writes a layout without its dtype and shape. */
static rsd_status print_layout_side(struct text *text, const rsd_layout *layout)
{
    if (!layout->mesh) {
        if (rsd_layout_world(layout) > MAX_PRINTED_RANKS)
            return fail(
                RSD_ELIMIT,
                "cannot print explicit boxes of rank %lld: the notation lists ranks 0 to %d",
                (long long)rsd_layout_world(layout) - 1, (int)MAX_PRINTED_RANKS - 1);
        print_explicit_boxes(text, layout);
        return RSD_OK;
    }
    print_mesh(text, layout->mesh);
    text_add(text, " : ");
    if (layout->ordered) {
        print_axes_per_dim(text, layout);
        return RSD_OK;
    }
    for (int32_t a = 0; a < layout->mesh->naxes; a++) {
        text_add(text, "%s", a ? "," : "");
        print_placement(text, &layout->placements[a]);
    }
    return RSD_OK;
}

rsd_status rsd_layout_print(const rsd_layout *layout, char **out)
{
    struct text text = {0};
    print_tensor(&text, layout);
    text_add(&text, " @ ");
    rsd_status status = print_layout_side(&text, layout);
    if (!status)
        return text_take(&text, out);
    text_drop(&text);
    return status;
}

rsd_status rsd_problem_print(const rsd_layout *src, const rsd_layout *dst, char **out)
{
    TRY(layout_same_shape(src, dst));
    struct text text = {0};
    print_tensor(&text, src);
    text_add(&text, " : ");
    rsd_status status = print_layout_side(&text, src);
    text_add(&text, " -> ");
    if (dst->dtype != src->dtype)
        text_add(&text, "%s ", rsd_dtype_name(dst->dtype));
    if (!status)
        status = print_layout_side(&text, dst);
    if (!status)
        return text_take(&text, out);
    text_drop(&text);
    return status;
}
