/* megatron_rules.c - the rules by which Megatron's tensor-parallel ranks cut parameters.
 *
 * A rule applies to names that end in it, from the start of a part on. The first rule that applies wins. A new
 * model needs new lines here and nothing else. A caller can add rules too.
 */
#include "megatron.h"

struct table_rule {
    const char *end;
    struct megatron_rule rule;
};

static const struct table_rule table[] = {
    /* Megatron-Core: GPT, Llama, Mixtral, DeepSeek and others */
    {"word_embeddings.weight", {JOIN_PARTS, 0}},
    {"position_embeddings.weight", {JOIN_COPIES, 0}},
    {"tokentype_embeddings.weight", {JOIN_COPIES, 0}},
    {"output_layer.weight", {JOIN_PARTS, 0}},
    {"output_layer.bias", {JOIN_PARTS, 0}},
    {"linear_qkv.weight", {JOIN_PARTS, 0}}, /* whole query groups; no group is cut */
    {"linear_qkv.bias", {JOIN_PARTS, 0}},
    {"linear_q.weight", {JOIN_PARTS, 0}},
    {"linear_q.bias", {JOIN_PARTS, 0}},
    {"linear_kv.weight", {JOIN_PARTS, 0}},
    {"linear_kv.bias", {JOIN_PARTS, 0}},
    {"linear_q_proj.weight", {JOIN_PARTS, 0}}, /* latent attention */
    {"linear_q_down_proj.weight", {JOIN_COPIES, 0}},
    {"linear_kv_down_proj.weight", {JOIN_COPIES, 0}},
    {"linear_q_up_proj.weight", {JOIN_PARTS, 0}},
    {"linear_kv_up_proj.weight", {JOIN_PARTS, 0}},
    {"linear_proj.weight", {JOIN_PARTS, 1}},
    {"linear_proj.bias", {JOIN_COPIES, 0}},
    {"linear_fc1.weight", {JOIN_GATED, 0}},
    {"linear_fc1.bias", {JOIN_GATED, 0}},
    {"linear_fc2.weight", {JOIN_PARTS, 1}},
    {"linear_fc2.bias", {JOIN_COPIES, 0}},
    {"layer_norm_weight", {JOIN_COPIES, 0}},
    {"layer_norm_bias", {JOIN_COPIES, 0}},
    {"layernorm.weight", {JOIN_COPIES, 0}},
    {"layernorm.bias", {JOIN_COPIES, 0}},
    {"router.weight", {JOIN_COPIES, 0}},
    {"router.expert_bias", {JOIN_COPIES, 0}},
    /* before Megatron-Core */
    {"word_embeddings_for_head.weight", {JOIN_PARTS, 0}},
    {"lm_head.bias", {JOIN_PARTS, 0}},
    {"query_key_value.weight", {JOIN_PARTS, 0}},
    {"query_key_value.bias", {JOIN_PARTS, 0}},
    {"query.weight", {JOIN_PARTS, 0}},
    {"query.bias", {JOIN_PARTS, 0}},
    {"key_value.weight", {JOIN_PARTS, 0}},
    {"key_value.bias", {JOIN_PARTS, 0}},
    {"dense_h_to_4h.weight", {JOIN_GATED, 0}},
    {"dense_h_to_4h.bias", {JOIN_GATED, 0}},
    {"dense_4h_to_h.weight", {JOIN_PARTS, 1}},
    {"dense_4h_to_h.bias", {JOIN_COPIES, 0}},
    {"attention.dense.weight", {JOIN_PARTS, 1}},
    {"attention.dense.bias", {JOIN_COPIES, 0}},
};

/* A rule of the caller. */
struct user_rule {
    regex_t regex;
    struct megatron_rule rule;
};

/* Parses S(1), R, gated or gated(1), or the words of PyTorch. */
static bool parse_rule(const char *text, struct megatron_rule *rule)
{
    int64_t dim = 0;
    *rule = (struct megatron_rule){.join = JOIN_COPIES};
    if (strcmp(text, "R") == 0 || strcmp(text, "Replicate()") == 0)
        return true;
    bool gated = strcmp(text, "gated") == 0 || name_has_form(text, "gated(#)", &dim);
    if (!gated && !name_has_form(text, "S(#)", &dim) && !name_has_form(text, "Shard(#)", &dim) &&
        !name_has_form(text, "Shard(dim=#)", &dim))
        return false;
    *rule = (struct megatron_rule){gated ? JOIN_GATED : JOIN_PARTS, (int32_t)dim};
    return dim < RSD_MAX_DIMS;
}

/* Compiles a rule of the user: RE=S(0), RE=S(1), RE=R or RE=gated. */
static rsd_status compile_rule(const char *text, struct user_rule *rule)
{
    const char *equals = text_find_equals(text);
    struct text pattern = {0};
    char *chars;
    if (!equals || equals == text || !parse_rule(equals + 1, &rule->rule))
        return fail(RSD_EINVAL,
                    "rule '%.300s' is invalid; expected RE=S(0), RE=S(1), RE=R or RE=gated", text);
    text_add(&pattern, "^(%.*s)$", (int)(equals - text), text);
    TRY(text_take(&pattern, &chars));
    rsd_status status = regex_compile(chars, REG_NOSUB, &rule->regex);
    rsd_free(chars);
    return status ? fail_in(status, "rule '%.300s' ", text) : RSD_OK;
}

rsd_status megatron_rules_open(struct megatron_rules *rules, const rsd_open_options *options)
{
    if (options->nfrom_rules < 0)
        return fail(RSD_EINVAL, "nfrom_rules is %lld; expected at least 0",
                    (long long)options->nfrom_rules);
    rules->list = mem_new((size_t)options->nfrom_rules, sizeof *rules->list);
    if (!rules->list)
        return RSD_ENOMEM;
    for (; rules->n < (size_t)options->nfrom_rules; rules->n++)
        TRY(compile_rule(options->from_rules[rules->n], &rules->list[rules->n]));
    return RSD_OK;
}

void megatron_rules_close(struct megatron_rules *rules)
{
    for (size_t i = 0; i < rules->n; i++)
        regfree(&rules->list[i].regex);
    mem_free(rules->list);
    *rules = (struct megatron_rules){0};
}

/* Returns whether a name is the text, or ends in it behind a dot or an underscore. */
static bool ends_at_part(struct slice name, const char *end)
{
    size_t n = strlen(end);
    if (name.nbytes < n || memcmp(name.bytes + name.nbytes - n, end, n) != 0)
        return false;
    return name.nbytes == n || name.bytes[name.nbytes - n - 1] == '.' ||
           name.bytes[name.nbytes - n - 1] == '_';
}

struct megatron_rule megatron_rules_find(const struct megatron_rules *rules, const char *name)
{
    for (size_t i = 0; i < rules->n; i++)
        if (regexec(&rules->list[i].regex, name, 0, NULL, 0) == 0)
            return rules->list[i].rule;
    /* Experts that are computed together number their weights: linear_fc1.weight3. */
    struct slice text = slice_of(name);
    size_t n = text.nbytes;
    while (n > 0 && name[n - 1] >= '0' && name[n - 1] <= '9')
        n--;
    if (n > 0 && name[n - 1] != '.')
        text.nbytes = n;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (ends_at_part(text, table[i].end))
            return table[i].rule;
    return (struct megatron_rule){.join = JOIN_UNKNOWN};
}
