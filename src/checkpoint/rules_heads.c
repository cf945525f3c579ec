/* rules_heads.c - presets for tensor parallelism do not cut attention heads.
 *
 * The config.json of a model has the numbers of its heads, or the caller says them. A query, key or value parameter can be cut over as many
 * ranks as divide its heads. With more ranks than KV heads, several ranks may have a copy of one.
 */
#include "rules.h"

#include "json.h"

#include <errno.h>
#include <stdio.h>

enum { MAX_CONFIG_NBYTES = 1 << 24 };

/* ---- the config ---- */

/* Reads a file of at most MAX_CONFIG_NBYTES. ENOENT: it does not exist. */
static rsd_status read_config_file(const char *path, struct bytes *out)
{
    char block[4096];
    FILE *file = fopen(path, "r");
    if (!file)
        return fail(errno == ENOENT ? RSD_ENOENT : RSD_EIO, "%s: %s", path, strerror(errno));
    for (size_t n; (n = fread(block, 1, sizeof block, file)) > 0 && out->n < MAX_CONFIG_NBYTES;)
        bytes_put(out, block, n);
    rsd_status status = ferror(file) ? fail(RSD_EIO, "%s: %s", path, strerror(errno)) : RSD_OK;
    fclose(file);
    return status ? status : out->failed ? RSD_ENOMEM : RSD_OK;
}

static rsd_status read_head_count(struct json *json, int64_t *count)
{
    double value;
    bool whole;
    char next = json_peek(json);
    if (next != '-' && (next < '0' || next > '9'))
        return json_skip(json); /* null: as many as query heads */
    return json_number(json, &value, count, &whole);
}

/* Reads the head counts of an object, and of the model of text in it. Those of the outer object are kept. */
static rsd_status read_config_object(struct json *json, rsd_rules *rules, int depth)
{
    struct slice key;
    bool more;
    int64_t nheads = 0, nkv_heads = 0;
    TRY(json_enter(json, '{'));
    for (;;) {
        TRY(json_next_key(json, &key, &more));
        if (!more)
            break;
        if (slice_is(key, "num_attention_heads") || slice_is(key, "n_head"))
            TRY(read_head_count(json, &nheads));
        else if (slice_is(key, "num_key_value_heads"))
            TRY(read_head_count(json, &nkv_heads));
        else if (depth == 0 && slice_is(key, "text_config") && json_peek(json) == '{')
            TRY(read_config_object(json, rules, depth + 1));
        else
            TRY(json_skip(json));
    }
    if (nheads > 0)
        rules->nheads = nheads;
    if (nkv_heads > 0 || nheads > 0)
        rules->nkv_heads = nkv_heads > 0 ? nkv_heads : nheads;
    return RSD_OK;
}

rsd_status heads_read_config(rsd_rules *rules, const char *path)
{
    struct bytes content = {0};
    struct json json = {0};
    bool is_text = *path == '{'; /* the config itself, which may come from a bucket */
    if (rules->has_heads)
        return RSD_OK;
    rsd_status status = RSD_OK;
    if (is_text)
        bytes_put(&content, path, strlen(path));
    else
        status = read_config_file(path, &content);
    if (!status && content.failed)
        status = fail(RSD_ENOMEM, "out of memory");
    rules->nheads = rules->nkv_heads = 0;
    if (!status) {
        json_start(&json, (const char *)content.data, content.n);
        status = read_config_object(&json, rules, 0);
        json_drop(&json);
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
    rules->nheads = nheads;
    rules->nkv_heads = nkv_heads;
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
    int64_t extent = tensor->shape[0] / rules->nkv_heads, coords[RSD_MAX_AXES] = {0};
    size_t ndim = (size_t)tensor->ndim, n = (size_t)nranks * ndim;
    int32_t *ranks = mem_new((size_t)nranks, sizeof *ranks);
    int64_t *lo = mem_new(n, sizeof *lo), *len = mem_new(n, sizeof *len);
    rsd_status status = ranks && lo && len ? RSD_OK : RSD_ENOMEM;
    for (int64_t i = 0; i < nranks && !status; i++) {
        status = rsd_mesh_rank(mesh, coords, &ranks[i]);
        copy_i64s(len + (size_t)i * ndim, tensor->shape, tensor->ndim);
        lo[(size_t)i * ndim] = coords[rule->axis] * rules->nkv_heads / count * extent;
        len[(size_t)i * ndim] = extent;
        for (int32_t a = rsd_mesh_naxes(mesh) - 1; a >= 0; a--) {
            if (++coords[a] < rsd_mesh_count(mesh, a))
                break;
            coords[a] = 0;
        }
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
    int64_t nheads = kv ? rules->nkv_heads : rules->nheads;
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
