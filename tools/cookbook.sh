#!/bin/sh
# Makes the inputs of docs/cookbook.md in the current directory, from step-1000 and from checkpoints of the tests. They
# stand for the directories of a user.
set -eu
golden=$(cd "$(dirname "$0")/../tests/golden" && pwd)

echo "base-model: configs of the model in step-1000"
mkdir base-model
cat > base-model/config.json <<'EOF'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 344,
 "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000}
EOF
echo '{"version": "1.0"}' > base-model/tokenizer.json

echo "downloaded: a file of torch.save"
mkdir downloaded
reshard merge step-1000 downloaded/pytorch_model.bin -q

echo "llama: files of two ranks under Meta's names: the first two layers of step-1000"
mkdir llama
for rank in 0 1; do
    reshard merge step-1000 llama/consolidated.0$rank.pth -q --only "layers[.]$rank[.](self_attn|mlp)" \
        --rename 's/model.layers.[0-9]/layers.0/' --rename 's/self_attn[.](.)_proj/attention.w\1/' \
        --rename 's/mlp[.]gate_proj/feed_forward.w1/' --rename 's/mlp[.]down_proj/feed_forward.w2/' \
        --rename 's/mlp[.]up_proj/feed_forward.w3/'
done

echo "hf-moe: a model with four experts in its first layer, which are the MLPs of the four layers of step-1000"
reshard merge step-1000 hf-moe -q --rename 's/layers[.]([0-9])[.]mlp[.]/layers.0.mlp.experts.\1./'

echo "checkpoints, global_step_100, checkpoint-500, megatron-out: what Orbax, verl, DeepSpeed and Megatron wrote"
mkdir global_step_100
cp -r "$golden/orbax_manager/ckpt" checkpoints
cp -r "$golden/verl_fsdp2_tp/ckpt" global_step_100/actor
cp -r "$golden/ds_z2/ckpt" checkpoint-500
cp -r "$golden/mcore_dist_tp/ckpt" megatron-out
