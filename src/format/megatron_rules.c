/* megatron_rules.c - the rules by which Megatron's tensor-parallel ranks cut parameters.
 *
 * A rule applies to names that end in it, from the start of a part on. The first rule that applies wins. A new
 * model needs new lines here and nothing else.
 */
#include "megatron.h"

struct join_rule {
    const char *end;
    enum megatron_join join;
};

static const struct join_rule rules[] = {
    /* Megatron-Core: GPT, Llama, Mixtral, DeepSeek and others */
    {"word_embeddings.weight", JOIN_ROWS},
    {"position_embeddings.weight", JOIN_COPIES},
    {"tokentype_embeddings.weight", JOIN_COPIES},
    {"output_layer.weight", JOIN_ROWS},
    {"output_layer.bias", JOIN_ROWS},
    {"linear_qkv.weight", JOIN_ROWS}, /* whole query groups; no group is cut */
    {"linear_qkv.bias", JOIN_ROWS},
    {"linear_q.weight", JOIN_ROWS},
    {"linear_q.bias", JOIN_ROWS},
    {"linear_kv.weight", JOIN_ROWS},
    {"linear_kv.bias", JOIN_ROWS},
    {"linear_q_proj.weight", JOIN_ROWS}, /* latent attention */
    {"linear_q_down_proj.weight", JOIN_COPIES},
    {"linear_kv_down_proj.weight", JOIN_COPIES},
    {"linear_q_up_proj.weight", JOIN_ROWS},
    {"linear_kv_up_proj.weight", JOIN_ROWS},
    {"linear_proj.weight", JOIN_COLUMNS},
    {"linear_proj.bias", JOIN_COPIES},
    {"linear_fc1.weight", JOIN_GATED},
    {"linear_fc1.bias", JOIN_GATED},
    {"linear_fc2.weight", JOIN_COLUMNS},
    {"linear_fc2.bias", JOIN_COPIES},
    {"layer_norm_weight", JOIN_COPIES},
    {"layer_norm_bias", JOIN_COPIES},
    {"layernorm.weight", JOIN_COPIES},
    {"layernorm.bias", JOIN_COPIES},
    {"router.weight", JOIN_COPIES},
    {"router.expert_bias", JOIN_COPIES},
    /* before Megatron-Core */
    {"word_embeddings_for_head.weight", JOIN_ROWS},
    {"lm_head.bias", JOIN_ROWS},
    {"query_key_value.weight", JOIN_ROWS},
    {"query_key_value.bias", JOIN_ROWS},
    {"query.weight", JOIN_ROWS},
    {"query.bias", JOIN_ROWS},
    {"key_value.weight", JOIN_ROWS},
    {"key_value.bias", JOIN_ROWS},
    {"dense_h_to_4h.weight", JOIN_GATED},
    {"dense_h_to_4h.bias", JOIN_GATED},
    {"dense_4h_to_h.weight", JOIN_COLUMNS},
    {"dense_4h_to_h.bias", JOIN_COPIES},
    {"attention.dense.weight", JOIN_COLUMNS},
    {"attention.dense.bias", JOIN_COPIES},
};

/* Returns whether a name is the text, or ends in it behind a dot or an underscore. */
static bool ends_at_part(struct slice name, const char *end)
{
    size_t n = strlen(end);
    if (name.nbytes < n || memcmp(name.bytes + name.nbytes - n, end, n) != 0)
        return false;
    return name.nbytes == n || name.bytes[name.nbytes - n - 1] == '.' ||
           name.bytes[name.nbytes - n - 1] == '_';
}

enum megatron_join megatron_find_rule(struct slice name)
{
    /* Experts that are computed together number their weights: linear_fc1.weight3. */
    size_t n = name.nbytes;
    while (n > 0 && name.bytes[n - 1] >= '0' && name.bytes[n - 1] <= '9')
        n--;
    if (n > 0 && name.bytes[n - 1] != '.')
        name.nbytes = n;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (ends_at_part(name, rules[i].end))
            return rules[i].join;
    return JOIN_UNKNOWN;
}
