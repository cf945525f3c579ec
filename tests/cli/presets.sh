# Presets for the names of models, which do not cut attention heads.
# model CONFIG NAME:SHAPE...: a checkpoint of these tensors, f32, with a config.json.
model() {
    config=$1 header= at=0
    shift
    rm -rf m && mkdir m && echo "$config" > m/config.json
    for tensor; do
        n=4
        for dim in $(echo "${tensor#*:}" | tr , ' '); do n=$((n * dim)); done
        header="$header${header:+,}\"${tensor%%:*}\":{\"dtype\":\"F32\",\"shape\":[${tensor#*:}],\"data_offsets\":[$at,$((at + n))]}"
        at=$((at + n))
    done
    header="{$header}"
    header=$header$(printf '%*s' $(((8 - ${#header} % 8) % 8)) '')
    { printf "\\$(printf %03o $((${#header} % 256)))\\$(printf %03o $((${#header} / 256)))\0\0\0\0\0\0%s" "$header"
      head -c $at /dev/zero | tr '\0' 'x'; } > m/model.safetensors
}
boxes() { # what the ranks have, in the order of the ranks
    rm -rf out
    reshard split m out -q "$@" || { echo "exit $?"; return; }
    for tensor in $(reshard inspect out --json | sed -n 's/.*"name": "\([^"]*\)", "dtype".*/\1/p'); do
        echo "$tensor" "$(reshard inspect out "$tensor" | sed -n 's/^  \(\[.*\]\)  .*/\1/p' | tr '\n' ' ')"
    done
}
llama="model.embed_tokens.weight:8,24 l.q_proj.weight:24,24 l.k_proj.weight:8,24 l.v_proj.bias:8 l.o_proj.weight:24,24 l.up_proj.weight:16,24 l.down_proj.weight:24,16 l.q_norm.weight:4"
echo "# 6 heads cannot be cut over 4 ranks, nor 2 KV heads"
# shellcheck disable=SC2086
model '{"num_attention_heads": 6, "num_key_value_heads": 2}' $llama
try split m out --mesh tp=4 --preset llama-tp
try plan m --mesh tp=4 --preset llama-tp
boxes --mesh tp=2 --preset llama-tp
try split m out --mesh tp=6 --preset llama-tp
echo "# copies of KV heads"
boxes --mesh tp=6 --preset llama-tp --replicate-kv-heads
try verify out
try diff m out
try convert m dcp --format dcp --mesh dp=2,tp=6 --preset llama-tp --replicate-kv-heads -q --verify
try plan m --mesh tp=6 --preset llama-tp --replicate-kv-heads --ranks
try convert m out --mesh tp=5 --preset llama-tp --replicate-kv-heads
try convert m out --mesh dp=2,tp=6 --preset fsdp+llama-tp --replicate-kv-heads
echo "# other configs: none, of a model with several parts, with null, and damaged"
echo '{"text_config": {"num_attention_heads": 6}, "vision_config": {"num_attention_heads": 4}}' > m/config.json
try plan m --mesh tp=4 --preset llama-tp -q --only q_proj
echo '{"n_head": 6, "num_key_value_heads": null}' > m/config.json
try plan m --mesh tp=4 --preset llama-tp -q --only k_proj
echo '{"n_head": ' > m/config.json
try plan m --mesh tp=4 --preset llama-tp -q
try plan m --mesh tp=4 --preset llama-tp | head -n 2
rm m/config.json
try split m cut --mesh tp=4 --preset llama-tp -q
echo "# FSDP with tensor parallelism"
# shellcheck disable=SC2086
model '{}' $llama
boxes --mesh dp=2,tp=2 --preset fsdp+llama-tp
boxes --mesh dp_replicate=1,dp=2,tp=1 --preset fsdp+llama-tp --only 'norm|up'
try convert m x --mesh 4 --preset fsdp+llama-tp
try convert m x --mesh 2x2 --preset fsdp+fsdp
echo "# experts"
model '{}' b.experts.0.w1.weight:8,4 b.experts.0.w2.weight:4,8 b.gate.weight:2,4 b.mlp.experts.1.up_proj.weight:8,4 b.mlp.experts.gate_up_proj:4,2,2 b.mlp.shared_expert_gate.weight:1,4
boxes --mesh tp=2 --preset moe-tp
boxes --mesh ep=2,tp=2 --preset qwen-tp --only 'gate_up|w1'
echo "# experts that are tensors of their own, over an axis for experts"
owners() { # the ranks and boxes of each expert
    rm -rf out
    reshard split m out -q "$@" || { echo "exit $?"; return; }
    for tensor in $(reshard inspect out --json | sed -n 's/.*"name": "\([^"]*\)", "dtype".*/\1/p'); do
        echo "$tensor" "$(reshard inspect out "$tensor" | sed -n 's/^  \(\[.*\]\)  rank-0*\([0-9]*[0-9]\)-.*/\2\1/p' | tr '\n' ' ')"
    done
    try diff m out
}
model '{}' l.gate.weight:3,4 l.experts.0.w1.weight:8,4 l.experts.1.w1.weight:8,4 l.experts.2.w1.weight:8,4 l.experts.2.w2.weight:4,8 l.experts.1.down_proj.bias:4 l.shared_experts.0.up_proj.weight:8,4
owners --mesh ep=2 --preset moe-tp
owners --mesh ep=3,tp=2 --preset moe-tp
owners --mesh tp=2,EP=2 --preset qwen-tp --only w1
owners --mesh dp=2,ep=2 --preset fsdp+moe-tp
try convert m dcp-experts --format dcp --mesh dp=2,ep=3 --preset moe-tp -q --verify
try merge dcp-experts out --force -q
try diff m out
try plan m --mesh ep=2,tp=2 --preset moe-tp --ranks
try plan m --mesh dp=2,ep=2 --preset llama-tp
echo "# GPT-2 and BERT"
model '{"n_head": 2}' h.0.attn.c_attn.weight:4,12 h.0.attn.c_attn.bias:12 h.0.attn.c_proj.weight:4,4 h.0.attn.c_proj.bias:4 h.0.mlp.c_fc.weight:4,8 h.0.ln_1.bias:4 wte.weight:6,4 wpe.weight:4,4
boxes --mesh tp=2 --preset gpt2-tp
try split m out --mesh tp=4 --preset gpt2-tp --force
model '{}' h.0.attn.c_attn.bias:10
try split m out --mesh tp=2 --preset gpt2-tp --force
model '{"num_attention_heads": 2}' bert.encoder.layer.0.attention.self.query.weight:4,4 bert.encoder.layer.0.attention.output.dense.weight:4,4 bert.encoder.layer.0.attention.output.LayerNorm.weight:4 bert.encoder.layer.0.intermediate.dense.bias:8 bert.encoder.layer.0.output.dense.weight:4,8 bert.embeddings.word_embeddings.weight:6,4 bert.pooler.dense.weight:4,4 cls.predictions.bias:6
boxes --mesh tp=2 --preset bert-tp
echo "# presets that fit"
try convert m x --mesh 2
try convert m x --mesh 2 --place 'query=S(0)' --default R
try convert m x --mesh 2x2 --only query
# shellcheck disable=SC2086
model '{}' $llama
try convert m x --mesh dp=2,tp=2
model '{}' $llama l.gate.weight:2,4 l.experts.0.w1.weight:8,4
try convert m x --mesh tp=2 --preset llama-tp
model '{}' $llama extra.adapter.weight:8,4
try convert m x --mesh tp=2
try convert m x --dry-run
try convert m x --dry-run --only 'norm|extra'
try plan m --format dcp
try plan m --format fsdp
echo "# not where whole tensors are meant, nor where it would not help"
try convert m x --dry-run -q
try convert m x.safetensors --dry-run
try convert m x --dry-run --max-shard-size 5GB
try convert m x --dry-run --format torch.save
try convert m x --dry-run --mesh 2 --preset replicate
try merge m x --dry-run
model '{}' a.norm.weight:4
try convert m x --mesh tp=2
echo "# heads of the command line"
model '{"num_attention_heads": 6, "num_key_value_heads": 2}' l.q_proj.weight:24,24 l.k_proj.weight:8,24
try plan m --mesh tp=4 --preset llama-tp -q --heads 4
try plan m --mesh tp=4 --preset llama-tp -q --heads 8,2
try plan m --mesh tp=2 --preset llama-tp -q --heads 9,3
try plan m --mesh tp=2 --heads 9,3 --default R
