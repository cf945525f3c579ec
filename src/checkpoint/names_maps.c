/* names_maps.c - the built-in maps of names, as the text of files. */
#include "names.h"

#include <string.h>

static const struct {
    const char *name, *text;
} maps[] = {
    {"megatron-llama",
     "# megatron-llama: Megatron on the left, Hugging Face on the right, for Llama, Mistral, Qwen "
     "and\n"
     "# Mixtral. The line that is used is the first with the name of the tensor that is read.\n"
     "#\n"
     "#   *        any text without a dot, the same on both sides. ** may contain dots\n"
     "#   {a,b}    the tensor on the left consists of several on the right:\n"
     "#   rows       equal parts, one behind the other\n"
     "#   qkv        for each group of heads: its queries, its key, its value\n"
     "#   qkv-rows   all queries, then all keys, then all values\n"
     "#   vocab    rows may be padding, which --vocab-size cuts or adds\n"
     "#   -        leaves the tensor of the other side out\n"
     "\n"
     "embedding.word_embeddings.weight  model.embed_tokens.weight  vocab\n"
     "output_layer.weight  lm_head.weight  vocab\n"
     "decoder.final_layernorm.weight  model.norm.weight\n"
     "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight  "
     "model.layers.*.input_layernorm.weight\n"
     "decoder.layers.*.self_attention.linear_qkv.weight  "
     "model.layers.*.self_attn.{q,k,v}_proj.weight  qkv\n"
     "decoder.layers.*.self_attention.linear_qkv.bias  "
     "model.layers.*.self_attn.{q,k,v}_proj.bias  qkv\n"
     "decoder.layers.*.self_attention.q_layernorm.weight  model.layers.*.self_attn.q_norm.weight\n"
     "decoder.layers.*.self_attention.k_layernorm.weight  model.layers.*.self_attn.k_norm.weight\n"
     "decoder.layers.*.self_attention.linear_proj.weight  model.layers.*.self_attn.o_proj.weight\n"
     "decoder.layers.*.self_attention.linear_proj.bias  model.layers.*.self_attn.o_proj.bias\n"
     "decoder.layers.*.mlp.linear_fc1.layer_norm_weight  "
     "model.layers.*.post_attention_layernorm.weight\n"
     "decoder.layers.*.mlp.linear_fc1.weight  model.layers.*.mlp.{gate,up}_proj.weight  rows\n"
     "decoder.layers.*.mlp.linear_fc1.bias  model.layers.*.mlp.{gate,up}_proj.bias  rows\n"
     "decoder.layers.*.mlp.linear_fc2.weight  model.layers.*.mlp.down_proj.weight\n"
     "decoder.layers.*.mlp.linear_fc2.bias  model.layers.*.mlp.down_proj.bias\n"
     "-  model.layers.*.self_attn.rotary_emb.inv_freq\n"
     "rotary_pos_emb.inv_freq  -\n"
     "\n"
     "# Norms that are not fused into linear layers.\n"
     "decoder.layers.*.input_layernorm.weight  model.layers.*.input_layernorm.weight\n"
     "decoder.layers.*.pre_mlp_layernorm.weight  model.layers.*.post_attention_layernorm.weight\n"
     "\n"
     "# Mixtral's experts.\n"
     "decoder.layers.*.mlp.router.weight  model.layers.*.block_sparse_moe.gate.weight\n"
     "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight  "
     "model.layers.*.block_sparse_moe.experts.*.{w1,w3}.weight  rows\n"
     "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.weight  "
     "model.layers.*.block_sparse_moe.experts.*.w2.weight\n"
     "\n"
     "# Megatron before Megatron-Core, and Megatron-DeepSpeed.\n"
     "language_model.embedding.word_embeddings.weight  model.embed_tokens.weight  vocab\n"
     "language_model.output_layer.weight  lm_head.weight  vocab\n"
     "language_model.encoder.final_layernorm.weight  model.norm.weight\n"
     "language_model.encoder.final_norm.weight  model.norm.weight\n"
     "language_model.encoder.layers.*.input_layernorm.weight  "
     "model.layers.*.input_layernorm.weight\n"
     "language_model.encoder.layers.*.input_norm.weight  model.layers.*.input_layernorm.weight\n"
     "language_model.encoder.layers.*.self_attention.query_key_value.weight  "
     "model.layers.*.self_attn.{q,k,v}_proj.weight  qkv\n"
     "language_model.encoder.layers.*.self_attention.query_key_value.bias  "
     "model.layers.*.self_attn.{q,k,v}_proj.bias  qkv\n"
     "language_model.encoder.layers.*.self_attention.dense.weight  "
     "model.layers.*.self_attn.o_proj.weight\n"
     "language_model.encoder.layers.*.post_attention_layernorm.weight  "
     "model.layers.*.post_attention_layernorm.weight\n"
     "language_model.encoder.layers.*.post_attention_norm.weight  "
     "model.layers.*.post_attention_layernorm.weight\n"
     "language_model.encoder.layers.*.mlp.dense_h_to_4h.weight  "
     "model.layers.*.mlp.{gate,up}_proj.weight  rows\n"
     "language_model.encoder.layers.*.mlp.dense_4h_to_h.weight  "
     "model.layers.*.mlp.down_proj.weight\n"},
    {"fused-llama",
     "# fused-llama: qkv_proj and gate_up_proj on the left, as vLLM and Phi-3 have them, Llama's "
     "own\n"
     "# projections on the right.\n"
     "\n"
     "model.layers.*.self_attn.qkv_proj.weight  model.layers.*.self_attn.{q,k,v}_proj.weight  "
     "qkv-rows\n"
     "model.layers.*.self_attn.qkv_proj.bias  model.layers.*.self_attn.{q,k,v}_proj.bias  "
     "qkv-rows\n"
     "model.layers.*.mlp.gate_up_proj.weight  model.layers.*.mlp.{gate,up}_proj.weight  rows\n"
     "**  **\n"},
};

enum { NMAPS = sizeof maps / sizeof *maps };

const char *name_map_text(const char *name)
{
    for (size_t i = 0; i < NMAPS; i++)
        if (strcmp(maps[i].name, name) == 0)
            return maps[i].text;
    return NULL;
}

const char *rsd_name_map(int64_t index, const char **text)
{
    bool known = index >= 0 && index < NMAPS;
    if (known && text)
        *text = maps[index].text;
    return known ? maps[index].name : NULL;
}
