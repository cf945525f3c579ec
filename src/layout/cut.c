/* cut.c - how mesh axes cut one dim: which coordinate holds an index, and which indices a rank holds.
 *
 * The first axis cuts the dim itself. Every further axis cuts what the axes before it left, as a list
 * [0, n) of positions:
 *
 *     level 0   0 1 2 3 4 5 6 7 8 9       the dim
 *     S over 2  0 0 0 0 0 1 1 1 1 1       coordinate on the first axis
 *     level 1   0 1 2 3 4 0 1 2 3 4       position in the list of that coordinate
 *     S over 2  0 0 0 1 1 0 0 0 1 1       coordinate on the second axis
 *     level 2   0 1 2 0 1 0 1 2 0 1       position in the array of the rank
 *
 * Each kind of cut has three functions in closed form; chains of cuts are built from them:
 *   KIND_below   how many positions before p does coordinate c hold?
 *   KIND_at      which coordinate holds position p, and in which run of consecutive positions?
 *   KIND_of      which run contains entry number `place` of coordinate c's list?
 * Everywhere, n is the extent of the list that is cut, m the number of coordinates, c one of them, and p a position.
 *
 * Invariants:
 *   (1) Every position belongs to exactly one coordinate, and lists ascend.
 *   (2) Extents are at most MAX_EXTENT and counts below 2^31, so chunk * count does not overflow.
 */
#include "layout.h"

#include <assert.h>

/* The coordinate on each axis, and the extent of each level. */
struct cut_path {
    const struct cuts *cuts;
    int64_t coord[RSD_MAX_AXES];
    int64_t extent[RSD_MAX_AXES + 1];
};

/* Consecutive positions that one coordinate holds. */
struct cut_run {
    int64_t coord;  /* that holds it */
    int64_t lo, hi; /* positions [lo, hi) */
    int64_t place;  /* of lo in the list of the coordinate */
};

static int64_t any_below(const struct cut_path *path, int32_t level, int64_t coord, int64_t p);

/* ---- S: chunks of ceil(n / m) ---- */

static int64_t shard_below(int64_t n, int64_t m, int64_t c, int64_t p)
{
    int64_t chunk = ceil_div(n, m);
    return clamp_i64(p - c * chunk, 0, chunk);
}

static struct cut_run shard_at(int64_t n, int64_t m, int64_t p)
{
    assert(n > 0);
    int64_t chunk = ceil_div(n, m), c = p / chunk, lo = c * chunk;
    return (struct cut_run){c, lo, min_i64(lo + chunk, n), 0};
}

static struct cut_run shard_of(int64_t n, int64_t m, int64_t c)
{
    int64_t chunk = ceil_div(n, m), lo = c * chunk;
    return (struct cut_run){c, lo, min_i64(lo + chunk, n), 0};
}

/* ---- B: lengths that differ by at most one, the longer ones first ---- */

static int64_t balanced_start(int64_t n, int64_t m, int64_t c)
{
    return c * (n / m) + min_i64(c, n % m);
}

static int64_t balanced_below(int64_t n, int64_t m, int64_t c, int64_t p)
{
    int64_t lo = balanced_start(n, m, c);
    return clamp_i64(p - lo, 0, balanced_start(n, m, c + 1) - lo);
}

static struct cut_run balanced_of(int64_t n, int64_t m, int64_t c)
{
    return (struct cut_run){c, balanced_start(n, m, c), balanced_start(n, m, c + 1), 0};
}

static struct cut_run balanced_at(int64_t n, int64_t m, int64_t p)
{
    int64_t shorter = n / m, longer_end = n % m * (shorter + 1);
    if (p < longer_end)
        return balanced_of(n, m, p / (shorter + 1));
    assert(shorter > 0);
    return balanced_of(n, m, n % m + (p - longer_end) / shorter);
}

/* ---- _S: cut into f pieces, each of which is cut over the axis ----
 *
 *     |---- piece 0 ----|---- piece 1 ----|-- last --|      all pieces but the last are full
 *     |  c0  |  c1  | c2|  c0  |  c1  | c2| c0| c1|c2|      c holds its part of each; of the last
 *                                                           piece it may hold more than of a full one
 */

static int64_t strided_part(int64_t piece, int64_t m, int64_t c)
{
    int64_t chunk = ceil_div(piece, m);
    return clamp_i64(piece - c * chunk, 0, chunk);
}

static int64_t strided_below(int64_t n, int64_t m, int64_t f, int64_t c, int64_t p)
{
    if (n == 0)
        return 0;
    int64_t full = ceil_div(n, f), j = p / full, start = j * full;
    int64_t piece = min_i64(full, n - start);
    int64_t inside = piece ? shard_below(piece, m, c, p - start) : 0;
    return j * strided_part(full, m, c) + inside;
}

static struct cut_run strided_in_piece(int64_t n, int64_t m, int64_t full, int64_t j, int64_t c)
{
    int64_t start = j * full, piece = min_i64(full, n - start);
    struct cut_run run = shard_of(piece, m, c);
    return (struct cut_run){c, start + run.lo, start + run.hi, j * strided_part(full, m, c)};
}

static struct cut_run strided_at(int64_t n, int64_t m, int64_t f, int64_t p)
{
    assert(n > 0);
    int64_t full = ceil_div(n, f), j = p / full, piece = min_i64(full, n - j * full);
    assert(piece > 0);
    return strided_in_piece(n, m, full, j, (p - j * full) / ceil_div(piece, m));
}

static struct cut_run strided_of(int64_t n, int64_t m, int64_t f, int64_t c, int64_t place)
{
    assert(n > 0);
    int64_t full = ceil_div(n, f), part = strided_part(full, m, c), last = n / full;
    return strided_in_piece(n, m, full, part ? min_i64(place / part, last) : last, c);
}

/* ---- C: blocks of fixed length, assigned to the coordinates in turn ---- */

static int64_t cyclic_below(int64_t m, int64_t block, int64_t c, int64_t p)
{
    int64_t whole = p / block, turn = whole % m;
    return whole / m * block + (turn > c ? block : turn == c ? p % block : 0);
}

static struct cut_run cyclic_block(int64_t n, int64_t m, int64_t block, int64_t number)
{
    int64_t lo = number * block;
    return (struct cut_run){number % m, lo, min_i64(n, lo + block), number / m * block};
}

/* ---- S(d;...): each segment of the global dim is cut separately ----
 *
 * Below the first level, a segment is what the cuts before left of it: its ends are mapped through them.
 */

static int64_t segment_start(const struct cut_path *path, int32_t level, int32_t segment)
{
    const struct cut *cut = &path->cuts->cut[level];
    int64_t start = segment ? cut->ends[segment - 1] : 0;
    for (int32_t k = 0; k < level; k++) /* coordinates of these levels are known */
        /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage) */
        start = any_below(path, k, path->coord[k], start);
    return start;
}

/* KIND_below, for a dim that consists of segments. */
static int64_t segmented_below(const struct cut_path *path, int32_t level, int64_t c, int64_t p)
{
    const struct cut *cut = &path->cuts->cut[level];
    int64_t count = 0, start = 0;
    for (int32_t s = 0; s < cut->nsegments && start < p; s++) {
        int64_t end = segment_start(path, level, s + 1);
        if (end > start)
            count += shard_below(end - start, cut->count, c, min_i64(p, end) - start);
        start = end;
    }
    return count;
}

static struct cut_run segmented_run(const struct cut_path *path, int32_t level, int64_t start,
                                    int64_t end, int64_t c)
{
    struct cut_run run = shard_of(end - start, path->cuts->cut[level].count, c);
    int64_t place = segmented_below(path, level, c, start);
    return (struct cut_run){c, start + run.lo, start + run.hi, place};
}

static struct cut_run segmented_at(const struct cut_path *path, int32_t level, int64_t p)
{
    int32_t s = 0;
    int64_t start = 0, end = segment_start(path, level, 1);
    while (end <= p) {
        start = end;
        end = segment_start(path, level, ++s + 1);
    }
    int64_t chunk = ceil_div(end - start, path->cuts->cut[level].count);
    return segmented_run(path, level, start, end, (p - start) / chunk);
}

/* KIND_of, for a dim that consists of segments. */
static struct cut_run segmented_of(const struct cut_path *path, int32_t level, int64_t c,
                                   int64_t place)
{
    int64_t start = 0, count = 0;
    for (int32_t s = 0;; s++) {
        int64_t end = segment_start(path, level, s + 1);
        count += strided_part(end - start, path->cuts->cut[level].count, c);
        if (place < count)
            return segmented_run(path, level, start, end, c);
        start = end;
    }
}

/* ---- any kind ---- */

/* Returns how many positions before p coordinate c holds, for any kind of cut. */
static int64_t any_below(const struct cut_path *path, int32_t level, int64_t c, int64_t p)
{
    const struct cut *cut = &path->cuts->cut[level];
    int64_t n = path->extent[level];
    switch (cut->kind) {
    case RSD_BALANCED:
        return balanced_below(n, cut->count, c, p);
    case RSD_STRIDED:
        return strided_below(n, cut->count, cut->factor, c, p);
    case RSD_CYCLIC:
        return cyclic_below(cut->count, cut->factor, c, p);
    case RSD_SEGMENTED:
        return segmented_below(path, level, c, p);
    default:
        return shard_below(n, cut->count, c, p);
    }
}

/* Returns the run that contains position p, for any kind of cut. */
static struct cut_run cut_run_at(const struct cut_path *path, int32_t level, int64_t p)
{
    const struct cut *cut = &path->cuts->cut[level];
    int64_t n = path->extent[level];
    switch (cut->kind) {
    case RSD_BALANCED:
        return balanced_at(n, cut->count, p);
    case RSD_STRIDED:
        return strided_at(n, cut->count, cut->factor, p);
    case RSD_CYCLIC:
        return cyclic_block(n, cut->count, cut->factor, p / cut->factor);
    case RSD_SEGMENTED:
        return segmented_at(path, level, p);
    default:
        return shard_at(n, cut->count, p);
    }
}

/* Returns the run that contains entry `place` of coordinate c's list, for any kind of cut. */
static struct cut_run cut_run_of(const struct cut_path *path, int32_t level, int64_t c,
                                 int64_t place)
{
    const struct cut *cut = &path->cuts->cut[level];
    int64_t n = path->extent[level];
    switch (cut->kind) {
    case RSD_BALANCED:
        return balanced_of(n, cut->count, c);
    case RSD_STRIDED:
        return strided_of(n, cut->count, cut->factor, c, place);
    case RSD_CYCLIC:
        return cyclic_block(n, cut->count, cut->factor, place / cut->factor * cut->count + c);
    case RSD_SEGMENTED:
        return segmented_of(path, level, c, place);
    default:
        return shard_of(n, cut->count, c);
    }
}

/* ---- all axes of a dim ---- */

/* Finds the coordinates and extents on all levels of a mesh position. */
static void descend_levels(struct cut_path *path, const struct cuts *cuts, int64_t position)
{
    path->cuts = cuts;
    path->extent[0] = cuts->extent;
    for (int32_t k = 0; k < cuts->ncuts; k++) {
        const struct cut *cut = &cuts->cut[k];
        path->coord[k] = position / cut->stride % cut->count;
        path->extent[k + 1] = any_below(path, k, path->coord[k], path->extent[k]);
    }
}

int64_t cuts_extent_of(const struct cuts *cuts, int64_t position)
{
    struct cut_path path;
    descend_levels(&path, cuts, position);
    return path.extent[cuts->ncuts];
}

struct span cuts_span_at(const struct cuts *cuts, int64_t index)
{
    struct cut_path path;
    struct span span = {.lo = index, .len = cuts->extent - index};
    int64_t p = index;
    path.cuts = cuts;
    path.extent[0] = cuts->extent;
    for (int32_t k = 0; k < cuts->ncuts; k++) {
        struct cut_run run = cut_run_at(&path, k, p);
        span.len = min_i64(span.len, run.hi - p);
        span.pos += run.coord * cuts->cut[k].stride;
        path.coord[k] = run.coord;
        if (k + 1 < cuts->ncuts)
            path.extent[k + 1] = any_below(&path, k, run.coord, path.extent[k]);
        p = run.place + (p - run.lo);
    }
    span.at = p;
    return span;
}

struct span cuts_span_of(const struct cuts *cuts, int64_t position, int64_t at)
{
    struct cut_path path = {0};
    descend_levels(&path, cuts, position);
    struct span span = {.len = path.extent[cuts->ncuts] - at, .at = at};
    int64_t p = at;
    for (int32_t k = cuts->ncuts - 1; k >= 0; k--) {
        struct cut_run run = cut_run_of(&path, k, path.coord[k], p);
        p = run.lo + (p - run.place);
        span.len = min_i64(span.len, run.hi - p);
        span.pos += path.coord[k] * cuts->cut[k].stride;
    }
    span.lo = p;
    return span;
}

int64_t cuts_part_of(const struct cuts *cuts, int64_t position)
{
    int64_t part = 0;
    for (int32_t k = 0; k < cuts->ncuts; k++)
        part += position / cuts->cut[k].stride % cuts->cut[k].count * cuts->cut[k].stride;
    return part;
}

int64_t cuts_nspans_bound(const struct cuts *cuts)
{
    int64_t bound = 1;
    for (int32_t k = 0; k < cuts->ncuts; k++) {
        const struct cut *cut = &cuts->cut[k];
        int64_t runs = cut->count;
        if (cut->kind == RSD_CYCLIC)
            runs = cuts->extent / cut->factor + cut->count;
        else if (cut->kind == RSD_STRIDED && !mul_i64(runs, cut->factor, &runs))
            runs = cuts->extent;
        else if (cut->kind == RSD_SEGMENTED)
            runs *= cut->nsegments;
        if (!mul_i64(bound, runs, &bound) || bound > cuts->extent)
            return cuts->extent;
    }
    return bound;
}
