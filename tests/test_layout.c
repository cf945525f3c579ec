/* test_layout.c - layouts: from the notation and from C, queries and coverage. Every element must be where the
 * oracle has it. */
#include "oracle.h"
#include "plans.h"
#include "random.h"
#include "tap.h"

#include <stdlib.h>

/* ---- arrays and boxes ---- */

static void boxes_equal_indices(const rsd_layout *layout, int64_t array, const char *text)
{
    struct indices indices;
    rsd_array info;
    rsd_shard *boxes;
    int64_t nboxes, volume = 1, in_boxes = 0, first, count;
    rsd_layout_array(layout, array, &info);
    rsd_layout_arrays_of(layout, info.rank, &first, &count);
    oracle_indices(layout, array, &indices);
    for (int32_t d = 0; d < indices.ndim; d++) {
        CHECK(info.shape[d] == indices.n[d], "%s: array %lld", text, (long long)array);
        volume *= indices.n[d];
    }
    CHECK(info.nbytes == (size_t)volume * rsd_dtype_nbytes(rsd_layout_dtype(layout)));
    OK(rsd_layout_boxes(layout, info.rank, &boxes, &nboxes));
    /* Boxes of a mesh together are the product of the lists: same volume, every corner listed. */
    for (int64_t i = 0; i < nboxes && rsd_layout_mesh(layout); i++) {
        int64_t box_volume = 1;
        for (int32_t d = 0; d < indices.ndim; d++) {
            const rsd_box *box = &boxes[i].box;
            box_volume *= box->len[d];
            int64_t at = 0;
            while (at < indices.n[d] && indices.list[d][at] != box->lo[d])
                at++;
            for (int64_t k = 0; k < box->len[d] && box->len[d] <= indices.n[d]; k++)
                CHECK(volume == 0 ||
                          (at + k < indices.n[d] && indices.list[d][at + k] == box->lo[d] + k),
                      "%s: rank %d, box %lld", text, (int)info.rank, (long long)i);
            CHECK(volume == 0 || boxes[i].at[d] == at, "%s: rank %d, box %lld lies at %lld", text,
                  (int)info.rank, (long long)i, (long long)boxes[i].at[d]);
            CHECK(boxes[i].array == array);
            CHECK(indices.n[d] || box->lo[d] == rsd_layout_shape(layout)[d], "%s: empty box", text);
        }
        in_boxes += box_volume;
    }
    CHECK(!rsd_layout_mesh(layout) || in_boxes == volume, "%s: rank %d holds %lld, not %lld", text,
          (int)info.rank, (long long)in_boxes, (long long)volume);
    CHECK(rsd_layout_mesh(layout) ? volume > 0 || nboxes == 1 : nboxes == count);
    rsd_free(boxes);
    oracle_indices_free(&indices);
}

static void random_boxes(int count)
{
    struct random r = {99};
    CASE("arrays and boxes of %d random layouts equal those of the oracle", count);
    for (int i = 0; i < count; i++) {
        char side[2048], text[2300];
        struct random_tensor t = random_tensor(&r, "i16");
        random_side(&r, &t, NULL, side, sizeof side);
        snprintf(text, sizeof text, "%s @ %s", t.text, side);
        rsd_layout *layout = parsed(text);
        if (!layout)
            return;
        for (int64_t k = 0; k < rsd_layout_narrays(layout); k++)
            boxes_equal_indices(layout, k, text);
        rsd_layout_free(layout);
    }
}

static void box_is(const char *text, int32_t rank, int64_t lo, int64_t len)
{
    rsd_layout *layout = parsed(text);
    rsd_shard *boxes;
    int64_t nboxes;
    if (!layout || !OK(rsd_layout_boxes(layout, rank, &boxes, &nboxes)))
        return;
    CHECK(nboxes == 1 && boxes[0].box.lo[0] == lo && boxes[0].box.len[0] == len,
          "%s, rank %d: %lld+%lld", text, (int)rank, (long long)boxes[0].box.lo[0],
          (long long)boxes[0].box.len[0]);
    rsd_free(boxes);
    rsd_layout_free(layout);
}

static void cutting_rules(void)
{
    CASE("shards equal torch.chunk: the last may be short or empty");
    static const int64_t five[][2] = {{0, 2}, {2, 2}, {4, 1}, {5, 0}};
    static const int64_t nested[][2] = {{0, 2}, {2, 1}, {3, 1}, {4, 1}};
    static const int64_t balanced[][2] = {{0, 2}, {2, 1}, {3, 1}, {4, 1}};
    static const int64_t strided[][2] = {{0, 2}, {4, 2}, {2, 2}, {6, 2}};
    for (int32_t rank = 0; rank < 4; rank++) {
        box_is("f32[5] @ 4:S0", rank, five[rank][0], five[rank][1]);
        box_is("f32[1] @ 4:S0", rank, rank > 0, rank == 0);
        box_is("f32[5] @ 2x2:S0,S0", rank, nested[rank][0], nested[rank][1]);
        box_is("f32[5] @ 4:B0", rank, balanced[rank][0], balanced[rank][1]);
        box_is("f32[8] @ 2x2:_S(0,2),S0", rank, strided[rank][0], strided[rank][1]);
        box_is("f32[8] @ 2x2:[1.0]", rank, strided[rank][0], strided[rank][1]);
        box_is("f32[0] @ 4:S0", rank, 0, 0);
    }
    CASE("a strided shard that is not one box is several boxes");
    rsd_layout *layout = parsed("f32[13] @ 3x2:_S(0,2),S0");
    rsd_shard *boxes;
    int64_t nboxes;
    OK(rsd_layout_boxes(layout, 4, &boxes, &nboxes));
    CHECK(nboxes == 2 && boxes[0].box.lo[0] == 6 && boxes[0].box.len[0] == 1 &&
          boxes[1].box.lo[0] == 11 && boxes[1].box.len[0] == 1);
    rsd_free(boxes);
    OK(rsd_layout_boxes(layout, 77, &boxes, &nboxes));
    CHECK(nboxes == 0);
    rsd_free(boxes);
    rsd_layout_free(layout);
    CASE("extents beyond 2^31 and volumes up to 2^62");
    box_is("u8[4611686018427387904] @ 3:S0", 2, 3074457345618258604, 1537228672809129300);
    box_is("u8[4611686018427387904] @ 2147483647:S0", 2147483646, 4611686018427387900, 4);
    box_is("u8[1099511627776,4194304] @ 100000:B0", 99999, 1099500632660, 10995116);
}

/* ---- from C ---- */

static void same_as(rsd_layout *layout, const char *text)
{
    rsd_layout *other = parsed(text);
    prints_as(layout, text);
    CHECK(other && rsd_layout_equal(layout, other), "%s", text);
    rsd_layout_free(other);
    rsd_layout_free(layout);
}

static void from_c(void)
{
    const int64_t shape[] = {16, 6}, counts[] = {2, 4}, segments[] = {8, 4, 4};
    const char *const names[] = {"dp", "tp"};
    rsd_mesh *mesh;
    rsd_layout *layout = NULL;
    CASE("mesh and placements from C");
    OK(rsd_mesh_new(2, counts, names, NULL, &mesh));
    rsd_placement placements[] = {
        {.kind = RSD_SHARD, .dim = -1},
        {.kind = RSD_SEGMENTED, .dim = 0, .nsegments = 3, .segments = segments}};
    OK(rsd_layout_new(RSD_F16, 2, shape, mesh, placements, &layout));
    same_as(layout, "f16[16,6] @ dp=2,tp=4 : S(1),S(0;8,4,4)");
    const int32_t naxes[] = {2, 0}, axes[] = {1, 0}, twice[] = {1, 1};
    OK(rsd_layout_new_by_dim(RSD_F16, 2, shape, mesh, naxes, axes, &layout));
    same_as(layout, "f16[16,6] @ dp=2,tp=4 : [tp.dp, -]");
    FAILS(RSD_EINVAL, "mesh axis 1 is used twice",
          rsd_layout_new_by_dim(RSD_F16, 2, shape, mesh, naxes, twice, &layout));
    placements[0].dim = 2;
    FAILS(RSD_EINVAL, "dim 2", rsd_layout_new(RSD_F16, 2, shape, mesh, placements, &layout));
    placements[0] = (rsd_placement){.kind = (rsd_kind)42};
    FAILS(RSD_EINVAL, "42", rsd_layout_new(RSD_F16, 2, shape, mesh, placements, &layout));
    placements[0] = (rsd_placement){.kind = RSD_PARTIAL, .reduce = (rsd_reduce)42};
    FAILS(RSD_EINVAL, "42", rsd_layout_new(RSD_F16, 2, shape, mesh, placements, &layout));
    int64_t coords[2];
    int32_t rank;
    OK(rsd_mesh_coords(mesh, 6, coords));
    CHECK(coords[0] == 1 && coords[1] == 2);
    OK(rsd_mesh_rank(mesh, coords, &rank));
    CHECK(rank == 6 && rsd_mesh_nranks(mesh) == 8 && rsd_mesh_count(mesh, 1) == 4);
    CHECK(strcmp(rsd_mesh_name(mesh, 0), "dp") == 0 && !rsd_mesh_name(mesh, 7));
    FAILS(RSD_EINVAL, "rank 8", rsd_mesh_coords(mesh, 8, coords));
    coords[1] = 4;
    FAILS(RSD_EINVAL, "coordinate 4", rsd_mesh_rank(mesh, coords, &rank));
    rsd_mesh_free(mesh);
    OK(rsd_mesh_parse("2x2 ranks=7,5,3,1", &mesh));
    OK(rsd_mesh_coords(mesh, 3, coords));
    CHECK(coords[0] == 1 && coords[1] == 0);
    char *text;
    OK(rsd_mesh_print(mesh, &text));
    CHECK(strcmp(text, "2x2 ranks=7,5,3,1") == 0, "%s", text);
    rsd_free(text);
    OK(rsd_layout_parse_on(RSD_I8, 2, shape, mesh, " S1, R", &layout));
    same_as(layout, "i8[16,6] @ 2x2 ranks=7,5,3,1 : S(1),R");
    OK(rsd_layout_parse_on(RSD_I8, 2, shape, mesh, "[1.0, -]", &layout));
    same_as(layout, "i8[16,6] @ 2x2 ranks=7,5,3,1 : [1.0, -]");
    FAILS(RSD_EINVAL, "column 5: dim 2 out of range: the tensor has 2 dims",
          rsd_layout_parse_on(RSD_I8, 2, shape, mesh, "S1,S2", &layout));
    FAILS(RSD_EINVAL, "column 5: expected the end",
          rsd_layout_parse_on(RSD_I8, 2, shape, mesh, "R,R x", &layout));
    rsd_mesh_free(mesh);
    FAILS(RSD_EINVAL, "column 4", rsd_mesh_parse("2x2:S0", &mesh));

    CASE("explicit boxes from C, several per rank, in any order");
    const int32_t ranks[] = {3, 0, 3, 1};
    const int64_t lo[] = {8, 0, 0, 0, 12, 0, 4, 0}, len[] = {4, 6, 4, 6, 4, 6, 4, 6};
    OK(rsd_layout_new_boxes(RSD_I8, 2, shape, 4, ranks, lo, len, &layout));
    int64_t position, first, count;
    OK(rsd_layout_position(layout, 3, &position));
    CHECK(position == 0 && rsd_layout_nplaces(layout) == 4);
    OK(rsd_layout_rank_at(layout, 3, &rank));
    CHECK(rank == 1);
    rsd_layout_arrays_of(layout, 3, &first, &count);
    CHECK(first == 2 && count == 2 && rsd_layout_world(layout) == 4);
    CHECK(rsd_layout_nranks(layout) == 3);
    rsd_array array;
    OK(rsd_layout_array(layout, 3, &array)); /* the third box of the caller */
    CHECK(array.rank == 3 && array.place == 2);
    same_as(layout, "i8[16,6] @ { 0:4 | 4:8 | | 8:12; 12:16 }");
    OK(rsd_layout_new_enumerable(RSD_I8, 2, shape, 4, ranks, lo, len, &layout));
    rsd_layout_free(layout);
    FAILS(RSD_EMISMATCH, "[4:8, 0:6] is in no box",
          rsd_layout_new_enumerable(RSD_I8, 2, shape, 3, ranks, lo, len, &layout));
    const int64_t doubled[] = {8, 0, 0, 0, 12, 0, 3, 0}, longer[] = {4, 6, 4, 6, 4, 6, 5, 6};
    FAILS(RSD_EINVAL, "[3:4, 0:6] is in more than one box",
          rsd_layout_new_enumerable(RSD_I8, 2, shape, 4, ranks, doubled, longer, &layout));
    const int64_t outside[] = {8, 1};
    FAILS(RSD_EINVAL, "box [8:24, 1:7] of rank 3 lies outside of the tensor of shape",
          rsd_layout_new_boxes(RSD_I8, 2, shape, 1, ranks, outside, shape, &layout));
    const int64_t negative[] = {-1, 0};
    FAILS(RSD_EINVAL, "has lo -1 and len",
          rsd_layout_new_boxes(RSD_I8, 2, shape, 1, ranks, negative, shape, &layout));
}

/* As PyTorch's get_idx_from_placements and build_reshard_metadata. */
static void local_arrays(void)
{
    rsd_array array = {.rank = -1};
    CASE("the array of one rank");
    rsd_layout *layout = parsed("f32[10,6] @ 2x2 ranks=4-7 : S0,S1");
    OK(rsd_layout_local(layout, 6, &array));
    CHECK(array.rank == 6 && array.ndim == 2 && array.shape[0] == 5 && array.shape[1] == 3 &&
          array.nbytes == 60 && array.place == 2);
    array.rank = -1;
    FAILS(RSD_EINVAL, "rank 3 has no array", rsd_layout_local(layout, 3, &array));
    CHECK(array.rank == -1, "output written on failure");
    rsd_layout_free(layout);
    layout = parsed("f32[8] @ { 0:2; 6:8 | 2:6 | }");
    CHECK(rsd_layout_local(layout, 1, &array) == RSD_OK && array.nbytes == 16);
    FAILS(RSD_EINVAL, "rank 0 has 2 arrays in the layout; use rsd_layout_arrays_of",
          rsd_layout_local(layout, 0, &array));
    FAILS(RSD_EINVAL, "rank 2 has no array", rsd_layout_local(layout, 2, &array));
    rsd_layout_free(layout);
    layout = parsed("f32[2] @ 4:S0");
    CHECK(rsd_layout_local(layout, 3, &array) == RSD_OK && array.nbytes == 0, "an empty array");
    rsd_layout_free(layout);
}

static void chunk_specs(void)
{
    const int64_t shape[] = {13, 3};
    const int32_t ranks[] = {2, 3, 1, 0}, twice[] = {0, 1, 1, 0};
    rsd_layout *layout;
    int64_t position;
    int32_t rank;
    CASE("a chunk spec: ranks in placement order, and the box of every rank");
    OK(rsd_layout_new_chunks(RSD_F32, 2, shape, -2, 4, ranks, &layout));
    for (int32_t i = 0; i < 4; i++) {
        rsd_shard *boxes;
        int64_t nboxes;
        OK(rsd_layout_rank_at(layout, i, &rank));
        OK(rsd_layout_position(layout, ranks[i], &position));
        CHECK(rank == ranks[i] && position == i);
        OK(rsd_layout_boxes(layout, rank, &boxes, &nboxes));
        CHECK(nboxes == 1 && boxes[0].box.lo[0] == 4 * i && boxes[0].box.len[0] == (i < 3 ? 4 : 1));
        rsd_free(boxes);
    }
    FAILS(RSD_EINVAL, "rank 4 is not in the layout", rsd_layout_position(layout, 4, &position));
    FAILS(RSD_EINVAL, "position 4", rsd_layout_rank_at(layout, 4, &rank));
    same_as(layout, "f32[13,3] @ 4 ranks=2,3,1,0 : S(0)");
    CASE("a rank that occurs twice in a chunk spec has two boxes");
    OK(rsd_layout_new_chunks(RSD_F32, 2, shape, 0, 4, twice, &layout));
    OK(rsd_layout_position(layout, 1, &position));
    CHECK(position == 1 && rsd_layout_nplaces(layout) == 4);
    same_as(layout, "f32[13,3] @ { 0:4; 12:13 | 4:8; 8:12 }");
    FAILS(RSD_EINVAL, "dim 2", rsd_layout_new_chunks(RSD_F32, 2, shape, 2, 4, ranks, &layout));
    FAILS(RSD_EINVAL, "number of chunks 0",
          rsd_layout_new_chunks(RSD_F32, 2, shape, 0, 0, ranks, &layout));
    const int64_t small[] = {5, 1};
    const int32_t eight[] = {0, 1, 2, 3, 0, 1, 2, 3};
    OK(rsd_layout_new_chunks(RSD_F32, 2, small, 0, 8, eight, &layout));
    same_as(layout, "f32[5,1] @ { 0:1; 4:5 | 1:2; 5:5 | 2:3; 5:5 | 3:4; 5:5 }");
}

/* ---- coverage ---- */

static void covers(const char *text, rsd_coverage_kind kind, int64_t copies, const char *box)
{
    rsd_layout *layout = parsed(text);
    rsd_coverage check = {.struct_nbytes = sizeof check};
    char found[256] = "";
    if (!layout || !OK(rsd_layout_coverage(layout, &check)))
        return;
    CHECK(check.kind == kind && check.copies == copies, "%s: kind %d, copies %lld", text,
          (int)check.kind, (long long)check.copies);
    for (int32_t d = 0; box && d < check.box.ndim; d++)
        snprintf(found + strlen(found), sizeof found - strlen(found), "%s%lld:%lld", d ? "," : "",
                 (long long)check.box.lo[d], (long long)(check.box.lo[d] + check.box.len[d]));
    CHECK(!box || strcmp(found, box) == 0, "%s: box %s, should be %s", text, found, box);
    rsd_layout_free(layout);
}

static void coverages(void)
{
    CASE("whether a layout covers its tensor");
    covers("f32[8,8] @ 4:S0", RSD_COVERS_ONCE, 1, NULL);
    covers("f32[8,8] @ 2x3:S0,R", RSD_COVERS_EVENLY, 3, NULL);
    covers("f32[8,8] @ 2x3:S0,P", RSD_COVERS_ONCE, 1, NULL);
    covers("f32[8,8] @ { 0:4 | 4:8 }", RSD_COVERS_ONCE, 1, NULL);
    covers("f32[8,8] @ { 0:4 | 4:8 | 4:8; 0:4 }", RSD_COVERS_EVENLY, 2, NULL);
    covers("f32[8,8] @ { 0:4; 4:8 | :,0:3 | :,3:8 }", RSD_COVERS_EVENLY, 2, NULL);
    covers("f32[8,8] @ { 0:4 | 3:8 }", RSD_COVERS_UNEVENLY, 0, "3:4,0:8");
    covers("f32[8,8] @ { 0:4 | 4:8 | 4:8 }", RSD_COVERS_UNEVENLY, 0, "4:8,0:8");
    covers("f32[8,8] @ { 0:4 | 5:8 }", RSD_MISSES, 0, "4:5,0:8");
    covers("f32[8,8] @ { 0:4 | 4:8,0:3 | 4:8,5:8 }", RSD_MISSES, 0, "4:8,3:5");
    covers("f32[8,8] @ { }", RSD_MISSES, 0, "0:8,0:8");
    covers("f32[] @ { : }", RSD_COVERS_ONCE, 1, NULL);
    covers("f32[] @ { | }", RSD_MISSES, 0, "");
    covers("f32[0,8] @ { | }", RSD_COVERS_ONCE, 1, NULL);
    covers("f32[9,9,9] @ { 0:9,0:4,0:9 | 0:3,4:9,0:9; 3:9,4:9,0:2 | 3:9,4:9,2:9 }", RSD_COVERS_ONCE,
           1, NULL);
    covers("f32[9,9,9] @ { 0:9,0:4,0:9 | 0:3,4:9,0:9; 3:9,4:9,0:2 | 3:9,4:9,3:9 }", RSD_MISSES, 0,
           "3:9,4:9,2:3");
}

/* Counts holders element by element. */
static void random_coverages(int count)
{
    struct random r = {4711};
    CASE("the coverage of %d random explicit layouts equals counting", count);
    for (int i = 0; i < count; i++) {
        struct random_tensor t = {.ndim = 1 + (int32_t)random_below(&r, 3)};
        int64_t lo[12 * 3], len[12 * 3], n = 1 + random_below(&r, 12), volume = 1;
        int32_t ranks[12];
        int holders[8 * 8 * 8] = {0}, least = 99, most = 0;
        for (int32_t d = 0; d < t.ndim; d++)
            volume *= t.shape[d] = 1 + random_below(&r, 8);
        for (int64_t b = 0; b < n; b++) {
            ranks[b] = (int32_t)random_below(&r, 4);
            for (int32_t d = 0; d < t.ndim; d++) {
                lo[b * t.ndim + d] = random_below(&r, 3) ? 0 : random_below(&r, t.shape[d]);
                int64_t rest = t.shape[d] - lo[b * t.ndim + d];
                len[b * t.ndim + d] = random_below(&r, 3) ? rest : random_below(&r, rest + 1);
            }
        }
        rsd_layout *layout;
        rsd_coverage check = {.struct_nbytes = sizeof check};
        OK(rsd_layout_new_boxes(RSD_U8, t.ndim, t.shape, n, ranks, lo, len, &layout));
        OK(rsd_layout_coverage(layout, &check));
        for (int64_t e = 0; e < volume; e++) {
            int64_t index[3], rest = e;
            for (int32_t d = t.ndim - 1; d >= 0; d--) {
                index[d] = rest % t.shape[d];
                rest /= t.shape[d];
            }
            for (int64_t b = 0; b < n; b++) {
                bool inside = true;
                for (int32_t d = 0; d < t.ndim; d++)
                    inside = inside && index[d] >= lo[b * t.ndim + d] &&
                             index[d] < lo[b * t.ndim + d] + len[b * t.ndim + d];
                holders[e] += inside;
            }
            least = holders[e] < least ? holders[e] : least;
            most = holders[e] > most ? holders[e] : most;
        }
        rsd_coverage_kind expected = least == 0     ? RSD_MISSES
                                     : least < most ? RSD_COVERS_UNEVENLY
                                     : most > 1     ? RSD_COVERS_EVENLY
                                                    : RSD_COVERS_ONCE;
        char *text;
        OK(rsd_layout_print(layout, &text));
        CHECK(check.kind == expected, "%s: %d, should be %d", text, (int)check.kind, (int)expected);
        bool named = expected == RSD_MISSES || expected == RSD_COVERS_UNEVENLY;
        for (int64_t e = 0; named && e < volume;
             e++) { /* every element of the box is as the kind says */
            int64_t rest = e;
            bool inside = true;
            for (int32_t d = t.ndim - 1; d >= 0; d--) {
                int64_t x = rest % t.shape[d];
                rest /= t.shape[d];
                inside = inside && x >= check.box.lo[d] && x < check.box.lo[d] + check.box.len[d];
            }
            CHECK(!inside || holders[e] == (expected == RSD_MISSES ? 0 : most), "%s", text);
        }
        rsd_free(text);
        rsd_layout_free(layout);
    }
}

/* ---- boxes ---- */

static void box_overlaps(void)
{
    CASE("overlap of boxes: disjoint, empty, without dims");
    rsd_box a = {2, {0, 4}, {8, 4}}, b = {2, {6, 0}, {6, 6}}, c = {2, {8, 0}, {2, 9}},
            empty = {2, {2, 5}, {0, 2}}, none = {.ndim = 0};
    rsd_region region;
    CHECK(rsd_box_overlaps(&a, &b) && rsd_box_overlaps(&b, &a) && !rsd_box_overlaps(&a, &c));
    CHECK(!rsd_box_overlaps(&a, &empty) && !rsd_box_overlaps(&empty, &empty));
    CHECK(rsd_box_overlaps(&none, &none) && !rsd_box_overlaps(&a, &none));
    OK(rsd_box_overlap(&a, &b, &region));
    CHECK(region.ndim == 2 && region.len[0] == 2 && region.len[1] == 2);
    CHECK(region.in_saved[0] == 6 && region.in_saved[1] == 0);
    CHECK(region.in_wanted[0] == 0 && region.in_wanted[1] == 4);
    OK(rsd_box_overlap(&a, &c, &region));
    CHECK(region.len[0] == 0 && region.in_saved[0] == 8 && region.in_wanted[0] == 0);
    OK(rsd_box_overlap(&a, &empty, &region));
    CHECK(region.len[0] == 0 && region.len[1] == 2);
    OK(rsd_box_overlap(&none, &none, &region));
    CHECK(region.ndim == 0);
    FAILS(RSD_EINVAL, "saved box 2, wanted box 0", rsd_box_overlap(&a, &none, &region));
    a.len[0] = -1;
    FAILS(RSD_EINVAL, "lo and len 0 to 2^62", rsd_box_overlap(&a, &b, &region));
    a.lo[0] = a.len[0] = (int64_t)1 << 62;
    FAILS(RSD_EINVAL, "lo and len 0 to 2^62", rsd_box_overlap(&a, &b, &region));
    CHECK(!rsd_box_overlaps(&a, &b));

    CASE("the read items of PyTorch's planner tests");
    rsd_box saved = {1, {30}, {30}}, wanted = {1, {40}, {40}};
    OK(rsd_box_overlap(&saved, &wanted, &region));
    CHECK(region.in_wanted[0] == 0 && region.len[0] == 20 && region.in_saved[0] == 10);
    saved.lo[0] = 60;
    OK(rsd_box_overlap(&saved, &wanted, &region));
    CHECK(region.in_wanted[0] == 20 && region.len[0] == 20 && region.in_saved[0] == 0);
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 3000;
    random_boxes(count);
    cutting_rules();
    from_c();
    local_arrays();
    chunk_specs();
    coverages();
    random_coverages(count);
    box_overlaps();
    return tap_end();
}
