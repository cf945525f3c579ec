/* plan.c - creates plans, and checks what must hold between two layouts.
 *
 * Invariants of a plan:
 *   (1) Both layouts describe the same tensor, and the source holds everything that the destination needs:
 *       every overlap has a sender.
 *   (2) A plan does not change, and does not depend on the rank that creates it: all ranks compute the same.
 */
#include "plan.h"

#include <string.h>

/* Part of the digest. It changes whenever the same layouts would have other pieces. */
enum { PLANNER_VERSION = 2 };

/* ---- partial axes ---- */

static bool is_partial(const rsd_layout *layout, int32_t axis)
{
    return layout->mesh && axis < layout->mesh->naxes && layout->mesh->counts[axis] > 1 &&
           layout->placements[axis].kind == RSD_PARTIAL;
}

static bool can_stay_partial(const rsd_layout *src, int32_t axis, const rsd_layout *dst,
                             int32_t dst_axis)
{
    return is_partial(src, axis) && src->mesh->counts[axis] == dst->mesh->counts[dst_axis] &&
           src->placements[axis].reduce == dst->placements[dst_axis].reduce;
}

/* Returns the source axis whose terms stay on destination axis b: axis b if it can, else the first that is
 * not taken. Returns RSD_MAX_AXES if no axis does. */
static int32_t find_kept_axis(const rsd_layout *src, const rsd_layout *dst, int32_t b,
                              const bool taken[RSD_MAX_AXES])
{
    if (can_stay_partial(src, b, dst, b))
        return b;
    int32_t a = 0;
    while (a < RSD_MAX_AXES && (taken[a] || !can_stay_partial(src, a, dst, b)))
        a++;
    return a;
}

/* A destination axis may be partial only if a source axis is partial in the same way. Each term is then
 * copied separately. */
static rsd_status match_kept_terms(rsd_plan *plan, bool taken[RSD_MAX_AXES])
{
    const rsd_layout *src = plan->src, *dst = plan->dst;
    int32_t naxes = dst->mesh ? dst->mesh->naxes : 0;
    for (int32_t b = 0; b < naxes; b++)
        taken[b] = is_partial(dst, b) && can_stay_partial(src, b, dst, b);
    for (int32_t b = 0; b < naxes; b++) {
        if (!is_partial(dst, b))
            continue;
        int32_t a = find_kept_axis(src, dst, b, taken);
        if (a == RSD_MAX_AXES)
            return fail(RSD_EINVAL,
                        "the destination is P(%s) on mesh axis %d, but no source axis is partial "
                        "with as many ranks and the same reduction",
                        rsd_reduce_name(dst->placements[b].reduce), (int)b);
        taken[a] = true;
        int32_t n = plan->kept.n++;
        plan->kept.count[n] = src->mesh->counts[a];
        plan->kept.src_stride[n] = src->mesh->strides[a];
        plan->kept.dst_stride[n] = dst->mesh->strides[b];
    }
    return RSD_OK;
}

/* Collects the partial source axes that do not stay partial: their terms are combined. */
static rsd_status find_reduced_terms(rsd_plan *plan, const bool kept[RSD_MAX_AXES])
{
    const rsd_layout *src = plan->src;
    plan->reduced.total = plan->divisor = 1;
    for (int32_t a = 0; a < RSD_MAX_AXES; a++) {
        if (!is_partial(src, a) || kept[a])
            continue;
        rsd_reduce reduce = src->placements[a].reduce;
        if (!dtype_reduces(src->dtype, reduce))
            return fail(RSD_EUNSUPPORTED, "dtype %s has no reduction '%s'",
                        rsd_dtype_name(src->dtype), rsd_reduce_name(reduce));
        digits_add(&plan->reduced, src->mesh->counts[a], src->mesh->strides[a]);
        if (reduce == RSD_REDUCE_AVG)
            plan->divisor *= src->mesh->counts[a];
        plan->reduce = reduce == RSD_REDUCE_AVG ? RSD_REDUCE_SUM : reduce;
    }
    return RSD_OK;
}

/* ---- explicit boxes ---- */

/* Lists the groups of each source array: counts them, then fills the list. */
static rsd_status index_src_groups(rsd_plan *plan)
{
    const struct box_groups *groups = &plan->src_groups;
    int64_t narrays = plan->src->nboxes;
    size_t total = (size_t)(groups->ngroups ? groups->first_holder[groups->ngroups] : 0);
    int64_t *first = plan->first_src_group = mem_new((size_t)narrays + 2, sizeof *first);
    plan->src_group_of = mem_new(total, sizeof *plan->src_group_of);
    if (!first || !plan->src_group_of)
        return RSD_ENOMEM;
    for (size_t i = 0; i < total; i++)
        first[groups->holders[i] + 2]++;
    for (int64_t a = 0; a < narrays; a++)
        first[a + 2] += first[a + 1];
    for (int64_t c = 0; c < groups->ngroups; c++)
        for (int64_t i = groups->first_holder[c]; i < groups->first_holder[c + 1]; i++)
            plan->src_group_of[first[groups->holders[i] + 1]++] = c;
    return RSD_OK;
}

/* Sets the group of each destination array. */
static rsd_status index_dst_groups(rsd_plan *plan)
{
    const struct box_groups *groups = &plan->dst_groups;
    size_t narrays = (size_t)plan->dst->nboxes;
    plan->dst_group_of = mem_new(narrays, sizeof *plan->dst_group_of);
    if (!plan->dst_group_of)
        return RSD_ENOMEM;
    for (size_t a = 0; a < narrays; a++)
        plan->dst_group_of[a] = -1;
    for (int64_t c = 0; c < groups->ngroups; c++)
        for (int64_t i = groups->first_holder[c]; i < groups->first_holder[c + 1]; i++)
            plan->dst_group_of[groups->holders[i]] = c;
    return RSD_OK;
}

static rsd_status check_region(const rsd_plan *plan, const int64_t *lo, const int64_t *len)
{
    int64_t hole_lo[RSD_MAX_DIMS], hole_len[RSD_MAX_DIMS];
    char text[BOX_TEXT_NCHARS];
    if (!box_groups_find_hole(&plan->src_groups, lo, len, hole_lo, hole_len))
        return RSD_OK;
    return fail(RSD_EMISMATCH, "the source does not hold %s",
                box_text(plan->src->ndim, hole_lo, hole_len, text));
}

/* A mesh always covers its tensor; explicit boxes may not. */
static rsd_status check_coverage(const rsd_plan *plan)
{
    static const int64_t origin[RSD_MAX_DIMS];
    if (plan->src->mesh || plan->src->volume == 0)
        return RSD_OK;
    if (plan->dst->mesh)
        return check_region(plan, origin, plan->dst->shape);
    const struct box_groups *groups = &plan->dst_groups;
    for (int64_t c = 0; c < groups->ngroups; c++)
        TRY(check_region(plan, groups->lo + c * groups->ndim, groups->len + c * groups->ndim));
    return RSD_OK;
}

/* ---- options ---- */

static int64_t world_size(const rsd_plan *plan)
{
    return max_i64(rsd_layout_world(plan->src), rsd_layout_world(plan->dst));
}

/* Copies the node map of the options. EINVAL: it does not list all ranks. */
static rsd_status set_nodes(rsd_plan *plan, const rsd_plan_options *options)
{
    if (!options->node_of)
        return RSD_OK;
    if (options->nranks < world_size(plan))
        return fail(RSD_EINVAL, "node_of lists %lld ranks, but the layouts have rank %lld",
                    (long long)options->nranks, (long long)world_size(plan) - 1);
    plan->node_of = mem_copy(options->node_of, (size_t)options->nranks, sizeof *options->node_of);
    plan->nranks = options->nranks;
    return plan->node_of ? RSD_OK : RSD_ENOMEM;
}

/* Sets the dtypes of the plan. EMISMATCH: they differ, and the options do not permit it. EUNSUPPORTED: there is no such
 * cast. */
static rsd_status set_cast(rsd_plan *plan, const rsd_plan_options *options)
{
    rsd_dtype from = plan->src->dtype, to = plan->dst->dtype;
    plan->cast = options->cast != 0;
    plan->narrower = rsd_dtype_nbytes(to) < rsd_dtype_nbytes(from) ? to : from;
    if (from != to && !plan->cast)
        return fail(
            RSD_EMISMATCH,
            "dtype differs: source %s, destination %s (a plan with the option cast converts)",
            rsd_dtype_name(from), rsd_dtype_name(to));
    if (!dtype_casts(from, to))
        return fail(RSD_EUNSUPPORTED, "%s cannot be converted to %s", rsd_dtype_name(from),
                    rsd_dtype_name(to));
    return RSD_OK;
}

/* ---- plans ---- */

static rsd_status check_spans(const rsd_layout *layout)
{
    for (int32_t d = 0; layout->mesh && d < layout->ndim; d++)
        TRY(overlap_check_nspans(&layout->cuts[d], d));
    return RSD_OK;
}

/* Checks the layouts and fills in the plan. */
static rsd_status build_plan(rsd_plan *plan, const rsd_plan_options *given)
{
    bool kept[RSD_MAX_AXES] = {false};
    rsd_plan_options options;
    TRY(options_copy("rsd_plan_options", given, &options, sizeof options));
    TRY(set_cast(plan, &options));
    TRY(layout_same_shape(plan->src, plan->dst));
    TRY(check_spans(plan->src));
    TRY(check_spans(plan->dst));
    TRY(set_nodes(plan, &options));
    TRY(match_kept_terms(plan, kept));
    TRY(find_reduced_terms(plan, kept));
    if (!plan->src->mesh) {
        TRY(box_groups_build(&plan->src_groups, plan->src, true));
        TRY(index_src_groups(plan));
    }
    if (!plan->dst->mesh) {
        TRY(box_groups_build(&plan->dst_groups, plan->dst, false));
        TRY(index_dst_groups(plan));
    }
    return check_coverage(plan);
}

rsd_status rsd_plan_new(const rsd_layout *src, const rsd_layout *dst,
                        const rsd_plan_options *options, rsd_plan **out)
{
    rsd_plan *plan = mem_new(1, sizeof *plan);
    if (!plan)
        return RSD_ENOMEM;
    atomic_init(&plan->references, 1);
    plan->src = rsd_layout_share(src);
    plan->dst = rsd_layout_share(dst);
    rsd_status status = build_plan(plan, options);
    if (status)
        rsd_plan_free(plan);
    else
        *out = plan;
    return status;
}

rsd_plan *rsd_plan_share(const rsd_plan *plan)
{
    rsd_plan *shared = without_const(plan);
    atomic_fetch_add(&shared->references, 1);
    return shared;
}

void rsd_plan_free(rsd_plan *plan)
{
    if (!plan || atomic_fetch_sub(&plan->references, 1) > 1)
        return;
    box_groups_drop(&plan->src_groups);
    box_groups_drop(&plan->dst_groups);
    mem_free(plan->first_src_group);
    mem_free(plan->src_group_of);
    mem_free(plan->dst_group_of);
    mem_free(plan->node_of);
    rsd_layout_free(plan->src);
    rsd_layout_free(plan->dst);
    mem_free(plan);
}

const rsd_layout *rsd_plan_src(const rsd_plan *plan)
{
    return plan->src;
}

const rsd_layout *rsd_plan_dst(const rsd_plan *plan)
{
    return plan->dst;
}

static rsd_status plan_with_options_of(const rsd_plan *plan, const rsd_layout *src,
                                       const rsd_layout *dst, rsd_plan **out)
{
    rsd_plan_options options = {.struct_nbytes = sizeof options,
                                .nranks = plan->nranks,
                                .node_of = plan->node_of,
                                .cast = plan->cast};
    return rsd_plan_new(src, dst, &options, out);
}

rsd_status rsd_plan_inverse(const rsd_plan *plan, rsd_plan **inverse)
{
    if (plan->reduced.total > 1)
        return fail(RSD_EINVAL, "the plan reduces partial values and has no inverse");
    return plan_with_options_of(plan, plan->dst, plan->src, inverse);
}

rsd_status rsd_plan_backward(const rsd_plan *plan, const rsd_layout *gradient, rsd_plan **backward)
{
    rsd_layout *target;
    TRY(layout_without_partial(plan->src, &target));
    rsd_status status = plan_with_options_of(plan, gradient, target, backward);
    rsd_layout_free(target);
    return status;
}

void rsd_plan_reduction(const rsd_plan *plan, rsd_reduce *reduce, int64_t *nterms, int64_t *divisor)
{
    *reduce = plan->reduce;
    *nterms = plan->reduced.total;
    *divisor = plan->divisor;
}

void rsd_plan_digest(const rsd_plan *plan, char digest[RSD_DIGEST_NCHARS])
{
    struct hash hash;
    hash_start(&hash, "reshard plan");
    hash_i64(&hash, PLANNER_VERSION);
    layout_hash(plan->src, &hash);
    layout_hash(plan->dst, &hash);
    hash_i64(&hash, plan->node_of != NULL);
    hash_i32s(&hash, plan->node_of, plan->node_of ? (size_t)world_size(plan) : 0);
    hash_text(hash, digest);
}
