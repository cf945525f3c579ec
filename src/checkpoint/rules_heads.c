/* rules_heads.c - presets for tensor parallelism do not cut attention heads.
 *
 * The config.json of a model has the numbers of its heads, or the caller says them. A query, key or value parameter can be cut over as many
 * ranks as divide its heads. With more ranks than KV heads, several ranks may have a copy of one.
 */
#include "rules.h"

#include <stdio.h>

/* ---- the config ---- */

rsd_status heads_read_config(rsd_rules *rules, const char *path)
{
    struct bytes content = {0};
    bool is_text = *path == '{'; /* the config itself, which may come from a bucket */
    if (rules->has_heads)
        return RSD_OK;
    rules->heads = (struct head_counts){0};
    rsd_status status = is_text ? RSD_OK : rules_read_file(path, &content);
    if (!status) {
        const char *text = is_text ? path : (const char *)content.data;
        status = head_counts_parse(&rules->heads, text, strlen(text));
        if (status)
            status = fail_in(status, "%s: ", is_text ? "config.json" : path);
    }
    bytes_drop(&content);
    return status;
}

rsd_status heads_parse_counts(rsd_rules *rules, const char *text)
{
    long long nheads = 0, nkv_heads = 0;
    int end = 0, n = sscanf(text, "%lld%n,%lld%n", &nheads, &end, &nkv_heads, &end);
    if (n == 1)
        nkv_heads = nheads;
    if (n < 1 || text[end] || nkv_heads < 1 || nheads < nkv_heads || nheads > INT32_MAX)
        return fail(RSD_EINVAL, "heads '%s' must be N or N,K, such as 32,8", text);
    rules->heads = (struct head_counts){nheads, nkv_heads};
    rules->has_heads = true;
    return RSD_OK;
}

/* ---- layouts ---- */

/* Makes explicit boxes: the rank at coordinate i of the axis has head i * nheads / nranks of the first dim. */
static rsd_status share_heads(const rsd_rules *rules, const struct rule *rule,
                              const rsd_tensor_info *tensor, rsd_layout **layout)
{
    const rsd_mesh *mesh = rules->mesh;
    int64_t nranks = rsd_mesh_nranks(mesh), count = rsd_mesh_count(mesh, rule->axis);
    int64_t extent = tensor->shape[0] / rules->heads.keys;
    size_t ndim = (size_t)tensor->ndim, n = (size_t)nranks * ndim;
    int32_t *ranks = mem_new((size_t)nranks, sizeof *ranks);
    int64_t *lo = mem_new(n, sizeof *lo), *len = mem_new(n, sizeof *len);
    rsd_status status = ranks && lo && len ? RSD_OK : RSD_ENOMEM;
    for (int64_t i = 0; i < nranks && !status; i++) {
        int64_t head = mesh_coord(mesh, i, rule->axis) * rules->heads.keys / count;
        ranks[i] = mesh_rank_at(mesh, i);
        copy_i64s(len + (size_t)i * ndim, tensor->shape, tensor->ndim);
        lo[(size_t)i * ndim] = head * extent;
        len[(size_t)i * ndim] = extent;
    }
    if (!status)
        status = rsd_layout_new_boxes(tensor->dtype, tensor->ndim, tensor->shape, nranks, ranks, lo,
                                      len, layout);
    mem_free(ranks);
    mem_free(lo);
    mem_free(len);
    return status;
}

rsd_status heads_make_layout(const rsd_rules *rules, const struct rule *rule,
                             const rsd_tensor_info *tensor, rsd_layout **layout)
{
    bool kv = rule->whole == KV_HEADS;
    int64_t nheads = kv ? rules->heads.keys : rules->heads.all;
    int64_t count = rule->axis < 0 ? 1 : rsd_mesh_count(rules->mesh, rule->axis);
    if (nheads <= 0 || nheads % count == 0 || tensor->ndim == 0)
        return RSD_OK;
    bool can_share = kv && nheads < count && count % nheads == 0 &&
                     tensor->shape[0] % nheads == 0 && !rules->with_fsdp;
    if (can_share && rules->replicate_kv)
        return share_heads(rules, rule, tensor, layout);
    const char *kind = kv ? "KV heads" : "attention heads";
    return fail(RSD_EINVAL,
                "%lld %s cannot be divided among %lld ranks; choose a number that divides them%s",
                (long long)nheads, kind, (long long)count,
                can_share ? ", or replicate KV heads (--replicate-kv-heads)" : "");
}

rsd_status heads_expand_segments(const char *placements, const rsd_tensor_info *tensor,
                                 char **expanded)
{
    struct text text = {0};
    const char *at = placements;
    for (const char *equal; (equal = strstr(at, ";="));) {
        int dim = equal > placements ? equal[-1] - '0' : 0, n = equal[2] - '0';
        text_add(&text, "%.*s", (int)(equal - at), at);
        if (dim >= tensor->ndim || tensor->shape[dim] % n != 0) {
            text_drop(&text);
            return fail(RSD_EINVAL, "dim %d must consist of %d equal parts", dim, n);
        }
        for (int i = 0; i < n; i++)
            text_add(&text, "%s%lld", i ? "," : ";", (long long)(tensor->shape[dim] / n));
        at = equal + 3;
    }
    text_add(&text, "%s", at);
    return text_take(&text, expanded);
}
