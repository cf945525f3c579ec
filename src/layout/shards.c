/* shards.c - the boxes that a rank holds, and where they begin in its arrays.
 *
 * A rank of a mesh holds all combinations of its spans along each dim, in one array:
 *
 *     dim 0  |a|  |b|      dim 1  |x|  |y|        a.x  a.y  b.x  b.y: four boxes, one array
 */
#include "layout.h"

#include <assert.h>

/* Lists explicit boxes, each of which is an array of its own. */
static rsd_status list_explicit_shards(const rsd_layout *layout, int64_t first, int64_t count,
                                       rsd_shard **shards)
{
    rsd_shard *list = mem_new((size_t)count, sizeof *list);
    if (!list)
        return RSD_ENOMEM;
    for (int64_t i = 0; i < count; i++) {
        list[i].array = first + i;
        box_set(&list[i].box, layout->ndim, layout_box_lo(layout, first + i),
                layout_box_len(layout, first + i));
    }
    *shards = list;
    return RSD_OK;
}

/* Returns the number of spans at a mesh position along a dim, after joining consecutive ones. */
static int64_t count_spans(const struct cuts *cuts, int64_t position, int64_t extent)
{
    int64_t count = 0;
    for (int64_t at = 0, end = -1; at < extent && count <= INT32_MAX;) {
        struct span span = cuts_span_of(cuts, position, at);
        count += span.lo != end;
        end = span.lo + span.len;
        at += span.len;
    }
    return count;
}

static rsd_box make_empty_box(const rsd_layout *layout, int64_t position, const int64_t *shape)
{
    rsd_box box = {.ndim = layout->ndim};
    for (int32_t d = 0; d < layout->ndim; d++) {
        box.len[d] = shape[d];
        box.lo[d] = shape[d] ? cuts_span_of(&layout->cuts[d], position, 0).lo : layout->shape[d];
    }
    return box;
}

/* Sets dim d of a list of boxes that is the product of the spans of all dims. Each span repeats for every
 * combination of later dims, and the whole list for every combination of earlier dims. */
static void set_dim_of_shards(const struct cuts *cuts, int64_t position, int64_t extent, int32_t d,
                              rsd_shard *shards, int64_t nshards, int64_t nspans, int64_t later)
{
    struct span span = {0};
    int64_t index = -1;
    for (int64_t at = 0; at < extent; at += span.len) {
        int64_t end = span.lo + span.len;
        span = cuts_span_of(cuts, position, at);
        bool joins = index >= 0 && span.lo == end;
        index += !joins;
        for (int64_t before = index * later; before < nshards; before += nspans * later)
            for (int64_t i = before; i < before + later; i++) {
                shards[i].box.len[d] += span.len;
                if (joins)
                    continue;
                shards[i].box.lo[d] = span.lo;
                shards[i].at[d] = span.at;
            }
    }
}

/* Lists the boxes of an array of a mesh: all combinations of its spans, or one empty box. */
static rsd_status list_mesh_shards(const rsd_layout *layout, int64_t array, rsd_shard **shards,
                                   int64_t *nshards)
{
    int64_t position = mesh_position_of_array(layout->mesh, array);
    int64_t shape[RSD_MAX_DIMS] = {0}, nspans[RSD_MAX_DIMS] = {0}, count = 1;
    bool empty = false;
    for (int32_t d = 0; d < layout->ndim; d++) {
        shape[d] = cuts_extent_of(&layout->cuts[d], position);
        empty = empty || shape[d] == 0;
    }
    for (int32_t d = 0; d < layout->ndim && !empty; d++) {
        nspans[d] = count_spans(&layout->cuts[d], position, shape[d]);
        if (!mul_i64(count, nspans[d], &count) || count > INT32_MAX)
            return fail(RSD_ELIMIT, "rank %d holds more than 2^31 - 1 boxes",
                        (int)layout_array_rank(layout, array));
    }
    rsd_shard *list = mem_new((size_t)count, sizeof *list);
    if (!list)
        return RSD_ENOMEM;
    if (empty)
        list[0].box = make_empty_box(layout, position, shape);
    int64_t later = count;
    for (int32_t d = 0; d < layout->ndim && !empty; d++) {
        assert(nspans[d] > 0);
        later /= nspans[d];
        set_dim_of_shards(&layout->cuts[d], position, shape[d], d, list, count, nspans[d], later);
    }
    for (int64_t i = 0; i < count; i++) {
        list[i].box.ndim = layout->ndim;
        list[i].array = array;
    }
    *shards = list;
    *nshards = count;
    return RSD_OK;
}

rsd_status rsd_layout_boxes(const rsd_layout *layout, int32_t rank, rsd_shard **shards,
                            int64_t *nshards)
{
    int64_t first, count;
    rsd_layout_arrays_of(layout, rank, &first, &count);
    if (layout->mesh && count)
        return list_mesh_shards(layout, first, shards, nshards);
    TRY(list_explicit_shards(layout, first, count, shards));
    *nshards = count;
    return RSD_OK;
}
