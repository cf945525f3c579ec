/* fuzz_plan.c - any small problem: every destination element is written exactly once, ranks send what others receive,
 * totals agree, a plan between equal layouts moves nothing, and the inverse restores the source. */
#include "reshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { MOST_ARRAYS = 64, MOST_NBYTES = 1 << 14 };

struct arrays {
    int64_t n;
    void *pointer[MOST_ARRAYS];
    size_t nbytes[MOST_ARRAYS];
};

static int small_enough(const rsd_layout *layout)
{
    int64_t n = rsd_layout_narrays(layout), sum = 0;
    if (n > MOST_ARRAYS || rsd_layout_world(layout) > 1 << 20)
        return 0;
    for (int64_t i = 0; i < n; i++) {
        rsd_array array;
        if (rsd_layout_array(layout, i, &array) || array.nbytes > MOST_NBYTES)
            return 0;
        sum += (int64_t)array.nbytes;
    }
    return sum <= MOST_NBYTES;
}

static struct arrays arrays_of(const rsd_layout *layout)
{
    struct arrays arrays = {.n = rsd_layout_narrays(layout)};
    for (int64_t i = 0; i < arrays.n; i++) {
        rsd_array array;
        rsd_layout_array(layout, i, &array);
        arrays.nbytes[i] = array.nbytes;
        arrays.pointer[i] = calloc(array.nbytes + 1, 1);
    }
    return arrays;
}

static void free_arrays(struct arrays *arrays)
{
    for (int64_t i = 0; i < arrays->n; i++)
        free(arrays->pointer[i]);
}

struct sum {
    uint64_t hash;
    int64_t pieces, nbytes, moved;
};

static struct sum walk(const rsd_plan *plan, rsd_side side)
{
    struct sum sum = {0};
    rsd_cursor *cursor;
    const rsd_piece *p;
    if (rsd_plan_walk(plan, RSD_EVERY_RANK, side, &cursor))
        return sum;
    while (!rsd_cursor_next(cursor, &p) && p) {
        uint64_t h = 1;
        const int64_t values[] = {p->from, p->to, p->stage, p->from_array, p->to_array, p->nbytes};
        for (size_t i = 0; i < sizeof values / sizeof *values; i++)
            h = (h ^ (uint64_t)values[i]) * 0x9fb21c651e98df25u;
        for (int32_t d = 0; d < p->box.ndim; d++)
            h = (h ^ (uint64_t)p->box.lo[d] ^ (uint64_t)p->box.len[d] << 32) * 0x9fb21c651e98df25u;
        sum.hash += h ^ h >> 32;
        sum.pieces++;
        sum.nbytes += p->nbytes;
        sum.moved += p->from != p->to ? p->nbytes : 0;
    }
    rsd_cursor_free(cursor);
    return sum;
}

static void check_plan(const rsd_plan *plan)
{
    struct sum got = walk(plan, RSD_RECEIVES), given = walk(plan, RSD_SENDS);
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    if (got.hash != given.hash || got.pieces != given.pieces)
        abort();
    if (rsd_plan_totals(plan, &totals) == RSD_OK)
        if (totals.npieces != got.pieces || totals.nbytes_moved != got.moved ||
            totals.nbytes_moved < totals.nbytes_least)
            abort();
}

static int is_partial(const rsd_layout *layout)
{
    const rsd_mesh *mesh = rsd_layout_mesh(layout);
    rsd_placement placement;
    for (int32_t a = 0; mesh && a < rsd_mesh_naxes(mesh); a++)
        if (!rsd_layout_placement(layout, a, &placement) && placement.kind == RSD_PARTIAL)
            return 1;
    return 0;
}

/* Random bytes are made consistent by a move through a layout that holds every element once. A move to the destination
 * and back must restore them. */
static void check_move(const rsd_layout *src, const rsd_layout *dst)
{
    char *text;
    rsd_layout *whole;
    if (rsd_layout_print(src, &text))
        return;
    char *side = strchr(text, '@'), one[256];
    snprintf(one, sizeof one, "%.*s@ 1:R", (int)(side - text < 200 ? side - text : 200), text);
    rsd_free(text);
    if (rsd_layout_parse(one, &whole))
        return;
    if (!small_enough(whole)) {
        rsd_layout_free(whole);
        return;
    }
    struct arrays w = arrays_of(whole), a = arrays_of(src), b = arrays_of(dst),
                  back = arrays_of(whole);
    for (size_t i = 0; i < w.nbytes[0]; i++)
        ((unsigned char *)w.pointer[0])[i] = (unsigned char)(i * 131 + i / 7);
    if (rsd_reshard(whole, src, (const void *const *)w.pointer, a.pointer) == RSD_OK &&
        rsd_reshard(src, dst, (const void *const *)a.pointer, b.pointer) == RSD_OK &&
        rsd_reshard(dst, whole, (const void *const *)b.pointer, back.pointer) == RSD_OK)
        if (memcmp(w.pointer[0], back.pointer[0], w.nbytes[0]) != 0)
            abort();
    free_arrays(&w);
    free_arrays(&a);
    free_arrays(&b);
    free_arrays(&back);
    rsd_layout_free(whole);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char text[2048];
    rsd_layout *src, *dst;
    rsd_plan *plan;
    if (n >= sizeof text)
        return 0;
    memcpy(text, data, n);
    text[n] = '\0';
    if (rsd_problem_parse(text, &src, &dst))
        return 0;
    if (small_enough(src) && small_enough(dst)) {
        rsd_plan_options options = {.struct_nbytes = sizeof options, .cast = 1};
        if (!rsd_plan_new(src, dst, &options, &plan)) {
            check_plan(plan);
            rsd_plan_free(plan);
            if (!is_partial(src) && !is_partial(dst))
                check_move(src, dst);
        }
        if (!is_partial(src) && !rsd_plan_new(src, src, NULL, &plan)) {
            if (walk(plan, RSD_RECEIVES).moved != 0)
                abort(); /* an identity moves nothing */
            rsd_plan_free(plan);
        }
    }
    rsd_layout_free(src);
    rsd_layout_free(dst);
    return 0;
}
