/* test_pieces.c - the pieces of plans: every element is written exactly once, plans move the least, and walks
 * of all ranks agree, with and without a node map. */
#include "oracle.h"
#include "plans.h"
#include "random.h"

#include <stdlib.h>

/* ---- properties of all plans ---- */

/* Counts of the pieces of a walk. */
struct piece_counts {
    int64_t npieces, kept, moved, crossed, stages;
    uint64_t sum;  /* does not depend on the order */
    int64_t *pair; /* bytes, world * world */
    int64_t *pair_pieces;
    int64_t world;
};

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9fb21c651e98df25u;
    return h ^ h >> 28;
}

static uint64_t hash_of(const rsd_piece *p)
{
    uint64_t h = mix(mix(mix(1, (uint64_t)p->from), (uint64_t)p->to), (uint64_t)p->stage);
    h = mix(mix(mix(h, (uint64_t)p->from_destination), (uint64_t)p->reduce),
            (uint64_t)p->from_array);
    h = mix(mix(h, (uint64_t)p->to_array), (uint64_t)p->nbytes);
    for (int32_t d = 0; d < p->box.ndim; d++) {
        h = mix(mix(h, (uint64_t)p->box.lo[d]), (uint64_t)p->box.len[d]);
        h = mix(mix(h, (uint64_t)p->from_at[d]), (uint64_t)p->to_at[d]);
    }
    return h;
}

/* Returns the position of a global index in a list of the oracle, or -1. */
static int64_t place_of(const struct indices *indices, int32_t d, int64_t index)
{
    for (int64_t i = 0; i < indices->n[d]; i++)
        if (indices->list[d][i] == index)
            return i;
    return -1;
}

/* Checks the offsets of a piece in both arrays. */
static bool piece_is_placed(const rsd_piece *p, const struct indices *from,
                            const struct indices *to)
{
    for (int32_t d = 0; d < p->box.ndim; d++)
        for (int64_t k = 0; k < p->box.len[d]; k++)
            if (place_of(from, d, p->box.lo[d] + k) != p->from_at[d] + k ||
                place_of(to, d, p->box.lo[d] + k) != p->to_at[d] + k)
                return false;
    return true;
}

struct truth {
    struct indices *src, *dst;
    int64_t nsrc, ndst;
    int32_t *written; /* per destination element, all arrays in a row: copies or terms so far */
    int64_t *first;   /* of each destination array */
};

static struct truth truth_of(const rsd_plan *plan)
{
    const rsd_layout *src = rsd_plan_src(plan), *dst = rsd_plan_dst(plan);
    struct truth t = {.nsrc = rsd_layout_narrays(src), .ndst = rsd_layout_narrays(dst)};
    t.src = calloc((size_t)t.nsrc + 1, sizeof *t.src);
    t.dst = calloc((size_t)t.ndst + 1, sizeof *t.dst);
    t.first = calloc((size_t)t.ndst + 1, sizeof *t.first);
    for (int64_t k = 0; k < t.nsrc; k++)
        oracle_indices(src, k, &t.src[k]);
    for (int64_t k = 0; k < t.ndst; k++) {
        oracle_indices(dst, k, &t.dst[k]);
        int64_t volume = 1;
        for (int32_t d = 0; d < t.dst[k].ndim; d++)
            volume *= t.dst[k].n[d];
        t.first[k + 1] = t.first[k] + volume;
    }
    t.written = calloc((size_t)t.first[t.ndst] + 1, sizeof *t.written);
    return t;
}

static void truth_free(struct truth *t)
{
    for (int64_t k = 0; k < t->nsrc; k++)
        oracle_indices_free(&t->src[k]);
    for (int64_t k = 0; k < t->ndst; k++)
        oracle_indices_free(&t->dst[k]);
    free(t->src);
    free(t->dst);
    free(t->first);
    free(t->written);
}

static void mark(struct truth *t, const rsd_piece *p)
{
    int64_t volume = 1, at[RSD_MAX_DIMS] = {0};
    for (int32_t d = 0; d < p->box.ndim; d++)
        volume *= p->box.len[d];
    for (int64_t i = 0; i < volume; i++) {
        int64_t place = 0;
        for (int32_t d = 0; d < p->box.ndim; d++)
            place = place * t->dst[p->to_array].n[d] + p->to_at[d] + at[d];
        t->written[t->first[p->to_array] + place]++;
        for (int32_t d = p->box.ndim - 1; d >= 0 && ++at[d] == p->box.len[d]; d--)
            at[d] = 0;
    }
}

static void walk(const rsd_plan *plan, int32_t rank, rsd_side side, const int32_t *node_of,
                 struct truth *truth, struct piece_counts *counts)
{
    rsd_cursor *cursor;
    const rsd_piece *p;
    if (!OK(rsd_plan_walk(plan, rank, side, &cursor)))
        return;
    while (OK(rsd_cursor_next(cursor, &p)) && p) {
        CHECK(rank < 0 || (side == RSD_SENDS ? p->from : p->to) == rank);
        counts->npieces++;
        counts->sum += hash_of(p);
        counts->pair[p->from * counts->world + p->to] += p->nbytes;
        counts->pair_pieces[p->from * counts->world + p->to]++;
        *(p->from == p->to ? &counts->kept : &counts->moved) += p->nbytes;
        if (node_of && node_of[p->from] != node_of[p->to])
            counts->crossed += p->nbytes;
        if (p->stage + 1 > counts->stages)
            counts->stages = p->stage + 1;
        CHECK(p->nbytes > 0 && (p->from_destination == 0 || p->stage > 0));
        if (!truth)
            continue;
        const struct indices *from =
            p->from_destination ? &truth->dst[p->from_array] : &truth->src[p->from_array];
        CHECK(piece_is_placed(p, from, &truth->dst[p->to_array]),
              "a piece from %d to %d is not where "
              "the piece has",
              (int)p->from, (int)p->to);
        mark(truth, p);
    }
    rsd_cursor_free(cursor);
}

static struct piece_counts seen_new(const rsd_plan *plan)
{
    int64_t a = rsd_layout_world(rsd_plan_src(plan)), b = rsd_layout_world(rsd_plan_dst(plan));
    struct piece_counts counts = {.world = a > b ? a : b};
    counts.pair = calloc((size_t)(counts.world * counts.world) + 1, sizeof *counts.pair);
    counts.pair_pieces =
        calloc((size_t)(counts.world * counts.world) + 1, sizeof *counts.pair_pieces);
    return counts;
}

static void free_counts(struct piece_counts *counts)
{
    free(counts->pair);
    free(counts->pair_pieces);
}

static int64_t nterms_reduced(const rsd_plan *plan, const struct truth *truth)
{
    (void)plan;
    int64_t before = truth->nsrc ? truth->src[0].nterms : 1,
            after = truth->ndst ? truth->dst[0].nterms : 1;
    return before / after;
}

/* An element is written either by nterms reduce pieces or by one copy (if a leader forwards it). */
static void check_written(const rsd_plan *plan, const struct truth *truth, const char *problem)
{
    int64_t nterms = nterms_reduced(plan, truth);
    for (int64_t i = 0; i < truth->first[truth->ndst]; i++)
        if (!CHECK(truth->written[i] == 1 || (nterms > 1 && truth->written[i] == nterms),
                   "%s: element %lld is written %d times", problem, (long long)i,
                   truth->written[i]))
            return;
}

static void check_totals(const rsd_plan *plan, const struct piece_counts *counts,
                         const int32_t *node_of, const char *problem)
{
    rsd_totals t = totals_of(plan);
    int64_t messages = 0;
    for (int64_t from = 0; from < counts->world; from++)
        for (int64_t to = 0; to < counts->world; to++) {
            int64_t nbytes;
            messages += from != to && counts->pair[from * counts->world + to] > 0;
            OK(rsd_plan_nbytes(plan, (int32_t)from, (int32_t)to, &nbytes));
            CHECK(nbytes == counts->pair[from * counts->world + to], "%s: %lld -> %lld", problem,
                  (long long)from, (long long)to);
        }
    CHECK(t.npieces == counts->npieces && t.nmessages == messages &&
              t.nbytes_kept == counts->kept && t.nbytes_moved == counts->moved,
          "%s: pieces %lld, %lld; messages %lld, %lld", problem, (long long)t.npieces,
          (long long)counts->npieces, (long long)t.nmessages, (long long)messages);
    CHECK(t.nstages == counts->stages, "%s: %lld stages, not %lld", problem, (long long)t.nstages,
          (long long)counts->stages);
    /* Explicit destination boxes that overlap on one rank may be received twice. What is forwarded may be wider than
     * the source. */
    bool mesh = rsd_layout_mesh(rsd_plan_dst(plan)) != NULL;
    bool wider = rsd_dtype_nbytes(rsd_layout_dtype(rsd_plan_dst(plan))) >
                 rsd_dtype_nbytes(rsd_layout_dtype(rsd_plan_src(plan)));
    CHECK(mesh && !(wider && counts->stages > 1) ? t.nbytes_least == t.nbytes_moved
                                                 : t.nbytes_least <= t.nbytes_moved,
          "%s: moves %lld, bound %lld", problem, (long long)t.nbytes_moved,
          (long long)t.nbytes_least);
    CHECK(!node_of || t.nbytes_crossed == counts->crossed, "%s: crossed", problem);
    CHECK(t.nbytes_crossed_least <= t.nbytes_crossed, "%s: crossed %lld, bound %lld", problem,
          (long long)t.nbytes_crossed, (long long)t.nbytes_crossed_least);
    CHECK(!node_of || !mesh || t.nbytes_crossed_least < 0 ||
              t.nbytes_crossed_least == t.nbytes_crossed,
          "%s: crossed %lld, bound %lld", problem, (long long)t.nbytes_crossed,
          (long long)t.nbytes_crossed_least);
}

static void check_parts(const rsd_plan *plan, const struct piece_counts *counts,
                        const char *problem)
{
    for (int64_t rank = 0; rank < counts->world; rank++) {
        rsd_rank_totals t = part_of(plan, (int32_t)rank), want = {0};
        for (int64_t peer = 0; peer < counts->world; peer++) {
            int64_t out = rank * counts->world + peer, in = peer * counts->world + rank;
            if (peer == rank) {
                want.nbytes_kept = counts->pair[out];
                want.npieces_kept = counts->pair_pieces[out];
                continue;
            }
            want.nbytes_sent += counts->pair[out];
            want.nbytes_received += counts->pair[in];
            want.npieces_sent += counts->pair_pieces[out];
            want.npieces_received += counts->pair_pieces[in];
            want.nmessages_sent += counts->pair[out] > 0;
            want.nmessages_received += counts->pair[in] > 0;
        }
        CHECK(t.nbytes_sent == want.nbytes_sent && t.nbytes_received == want.nbytes_received &&
                  t.nbytes_kept == want.nbytes_kept && t.npieces_sent == want.npieces_sent &&
                  t.npieces_received == want.npieces_received &&
                  t.npieces_kept == want.npieces_kept && t.nmessages_sent == want.nmessages_sent &&
                  t.nmessages_received == want.nmessages_received,
              "%s: the part of rank %lld", problem, (long long)rank);
    }
}

/* The pieces of one rank, in the order of the walk. */
struct listed {
    rsd_piece *list;
    size_t n;
};

static struct listed list_pieces(const rsd_plan *plan, int32_t rank, rsd_side side)
{
    struct listed listed = {malloc(sizeof(rsd_piece)), 0};
    rsd_cursor *cursor;
    const rsd_piece *p;
    OK(rsd_plan_walk(plan, rank, side, &cursor));
    while (OK(rsd_cursor_next(cursor, &p)) && p) {
        listed.list = realloc(listed.list, (listed.n + 1) * sizeof *p);
        listed.list[listed.n++] = *p;
    }
    rsd_cursor_free(cursor);
    return listed;
}

/* The rank that holds the first copy of what a rank of a mesh holds. */
static int32_t first_copy(const rsd_layout *layout, int32_t rank)
{
    const rsd_mesh *mesh = rsd_layout_mesh(layout);
    int64_t coords[RSD_MAX_AXES];
    OK(rsd_mesh_coords(mesh, rank, coords));
    for (int32_t a = 0; a < rsd_mesh_naxes(mesh); a++) {
        rsd_placement placement;
        OK(rsd_layout_placement(layout, a, &placement));
        if (placement.kind == RSD_REPLICATE)
            coords[a] = 0;
    }
    OK(rsd_mesh_rank(mesh, coords, &rank));
    return rank;
}

/* The order that the header documents: by stage; the same on both sides of a pair; the terms of a box
 * consecutive, in ascending rank of their first copies. */
static void check_order(const rsd_plan *plan, int64_t world, const char *problem)
{
    struct listed *sent = calloc((size_t)world + 1, sizeof *sent);
    size_t *at = calloc((size_t)world + 1, sizeof *at);
    rsd_reduce reduce;
    int64_t nterms, divisor;
    rsd_plan_reduction(plan, &reduce, &nterms, &divisor);
    for (int64_t rank = 0; rank < world; rank++)
        sent[rank] = list_pieces(plan, (int32_t)rank, RSD_SENDS);
    for (int64_t rank = 0; rank < world; rank++) {
        struct listed got = list_pieces(plan, (int32_t)rank, RSD_RECEIVES);
        memset(at, 0, (size_t)world * sizeof *at);
        for (size_t i = 0, term = 0; i < got.n; i++) {
            const rsd_piece *p = &got.list[i];
            CHECK(i == 0 || p->stage >= p[-1].stage, "%s: stages of rank %d", problem, (int)rank);
            const struct listed *sender = &sent[p->from];
            size_t *next = &at[p->from];
            while (*next < sender->n && sender->list[*next].to != rank)
                ++*next;
            CHECK(*next < sender->n && hash_of(&sender->list[*next]) == hash_of(p),
                  "%s: %d and %d disagree about the order", problem, (int)p->from, (int)rank);
            ++*next;
            if (!p->reduce)
                continue;
            CHECK(term == 0 || (first_copy(rsd_plan_src(plan), p->from) >
                                    first_copy(rsd_plan_src(plan), p[-1].from) &&
                                p->to_array == p[-1].to_array &&
                                memcmp(p->to_at, p[-1].to_at, (size_t)p->box.ndim * 8) == 0),
                  "%s: terms of rank %d", problem, (int)rank);
            term = (term + 1) % (size_t)nterms;
        }
        free(got.list);
    }
    for (int64_t rank = 0; rank < world; rank++)
        free(sent[rank].list);
    free(sent);
    free(at);
}

static bool holds(const char *problem, const int32_t *node_of, int64_t nranks)
{
    rsd_plan_options options = {sizeof options, nranks, node_of, 1};
    rsd_plan *plan;
    if (!make(problem, &options, &plan))
        return false;
    struct truth truth = truth_of(plan);
    struct piece_counts all = seen_new(plan), by_rank = seen_new(plan), sent = seen_new(plan),
                        sent_by_rank = seen_new(plan);
    walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, node_of, &truth, &all);
    check_written(plan, &truth, problem);
    walk(plan, RSD_EVERY_RANK, RSD_SENDS, node_of, NULL, &sent);
    for (int64_t rank = 0; rank < all.world; rank++) {
        walk(plan, (int32_t)rank, RSD_RECEIVES, node_of, NULL, &by_rank);
        walk(plan, (int32_t)rank, RSD_SENDS, node_of, NULL, &sent_by_rank);
    }
    CHECK(all.sum == by_rank.sum && all.npieces == by_rank.npieces, "%s: rank by rank", problem);
    CHECK(all.sum == sent.sum && all.npieces == sent.npieces,
          "%s: what is sent (%lld pieces) is not what is received (%lld)", problem,
          (long long)sent.npieces, (long long)all.npieces);
    CHECK(all.sum == sent_by_rank.sum, "%s: sent rank by rank", problem);
    check_totals(plan, &all, node_of, problem);
    check_parts(plan, &all, problem);
    check_order(plan, all.world, problem);
    truth_free(&truth);
    free_counts(&all);
    free_counts(&by_rank);
    free_counts(&sent);
    free_counts(&sent_by_rank);
    rsd_plan_free(plan);
    return !tap.failed;
}

static void random_problems(int count)
{
    struct random r = {31337};
    CASE("%d random plans: every element once, the least bytes, the same walks on all ranks",
         count);
    for (int i = 0; i < count; i++) {
        char a[2048], b[2048], problem[4400];
        int32_t node_of[64];
        struct random_tensor t = random_tensor(&r, "i32");
        random_side(&r, &t, i % 4 == 1 ? "sum" : NULL, a, sizeof a);
        random_side(&r, &t, NULL, b, sizeof b);
        for (int n = 0; n < 64; n++)
            node_of[n] = i % 2 ? n / 3 : (int32_t)random_below(&r, 3);
        snprintf(problem, sizeof problem, "%s : %s -> %s %s", t.text, a,
                 i % 5 == 0   ? "u8"
                 : i % 5 == 1 ? "f64"
                              : "",
                 b);
        if (!holds(problem, i % 3 == 2 ? node_of : NULL, 64))
            return;
    }
}

/* ---- nodes ---- */

static void nodes(void)
{
    CASE("with a node map, a replicated destination crosses into each node once");
    static const int32_t four[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    static const char *const problems[] = {
        "f32[64,8] : 4:S0 -> 16:R",     "f32[64,8] : 16:S0 -> 16:R",
        "f32[64,8] : 16:P -> 16:R",     "f32[64,8] : 2x8:S0,R -> 4x4:S1,R",
        "f32[64,8] : 1:R -> 16:R",      "f32[64,8] : 4:S0 -> 4x4:R,S1",
        "f32[3] : 1 ranks=5:R -> 16:R", "f32[64,8] : 8:S0 -> { : | : | : | : | : | : | : | : | : }",
        "f32[] : 1:R -> 16:R",          "f32[64,8] : 4x4:P,S0 -> 8 ranks=8-15:R"};
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        holds(problems[i], four, 16);
    rsd_plan_options options = {sizeof options, 16, four, 1};
    rsd_plan *plan;
    if (make("f32[64,8] : 4:S0 -> 16:R", &options, &plan)) {
        rsd_totals t = totals_of(plan);
        CHECK(t.nbytes_crossed == 3 * 2048 && t.nbytes_crossed_least == 3 * 2048 && t.nstages == 2);
        rsd_plan_free(plan);
    }
    options.nranks = 15;
    rsd_layout *a, *b;
    OK(rsd_problem_parse("f32[64,8] : 4:S0 -> 16:R", &a, &b));
    FAILS(RSD_EINVAL, "lists 15 ranks", rsd_plan_new(a, b, &options, &plan));
    options.struct_nbytes = 1;
    FAILS(RSD_EINVAL, "struct_nbytes", rsd_plan_new(a, b, &options, &plan));
    rsd_layout_free(a);
    rsd_layout_free(b);
}

/* ---- partial values that stay partial ---- */

static void staying_partial(void)
{
    CASE("partial values may stay partial: each term is copied separately");
    holds("i32[12,8] : 2x2:P,S0 -> 2x2:P,S0", NULL, 0);
    holds("i32[12,8] : 2x2:P,S0 -> 2x2:P,S1", NULL, 0);
    holds("i32[12,8] : 2x2:S0,P -> 2x2:R,P", NULL, 0);
    holds("i32[12,8] : 2x2:S0,P(product) -> 2x2:R,P(product)", NULL, 0);
    holds("i32[12,8] : 2x2:P,P -> 2x2:R,P", NULL, 0);
    holds("i32[12,8] : 2x3:S0,P -> 3x2 ranks=6-11:P,S1", NULL, 0);
    holds("i32[12,8] : 2x2x2:P,R,P -> 2x2x2:P,P,S1", NULL, 0);
    rsd_plan *plan;
    if (make("i32[12,8] : 2x2:P,P -> 2x2:R,P", NULL, &plan)) {
        const rsd_layout *a = rsd_plan_src(plan), *b = rsd_plan_dst(plan);
        int32_t from[4][96], to[4][96];
        const void *src[4];
        void *dst[4];
        for (int r = 0; r < 4; r++) {
            src[r] = from[r];
            dst[r] = to[r];
            for (int i = 0; i < 96; i++)
                from[r][i] = 1000 * i + (1 << r);
        }
        OK(rsd_reshard(a, b, src, dst));
        for (int r = 0; r < 4; r++) /* axis 0 is reduced, axis 1 stays partial */
            CHECK(to[r][5] == 10000 + (r % 2 ? 2 + 8 : 1 + 4), "rank %d: %d", r, (int)to[r][5]);
        rsd_plan_free(plan);
    }
}

int main(int argc, char **argv)
{
    random_problems(argc > 1 ? atoi(argv[1]) : 4000);
    nodes();
    staying_partial();
    return tap_end();
}
