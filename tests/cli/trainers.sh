# Checkpoints of DeepSpeed and Megatron: what is shown, read and refused.
try inspect $GOLDEN/ds_z3/ckpt
try merge $GOLDEN/ds_z1/ckpt fp32
try merge $GOLDEN/ds_z1/ckpt/global_step3 model --dtype model -q
try diff fp32 model
try diff $GOLDEN/ds_z1/ckpt $GOLDEN/ds_z1/truth.safetensors
try verify $GOLDEN/ds_universal_z3/ckpt
try inspect $GOLDEN/ds_z3/ckpt --dtype model
try inspect $GOLDEN/ds_z3/ckpt --dtype f16
cp -r $GOLDEN/ds_z3/ckpt broken && rm broken/global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt
try inspect broken
try inspect $GOLDEN/mcore_legacy_tp_pp/ckpt decoder.layers.3.mlp.linear_fc1.weight
try merge $GOLDEN/mcore_legacy_tp_pp/ckpt merged --vocab-size 29
try inspect merged embedding.word_embeddings.weight
try merge $GOLDEN/mcore_legacy_tp_pp/ckpt none --vocab-size 33
try merge $GOLDEN/mcore_legacy_tp_pp/ckpt none --vocab-size many
try merge $GOLDEN/mcore_dist_tp_pp/ckpt unstacked --unstack --vocab-size 29 -q
try inspect unstacked
try convert $GOLDEN/mcore_dist_tp_pp/ckpt dcp --format dcp -q
ls -A dcp
mkdir root && cp -r dcp root/iter_0000005 && echo 5 > root/latest_checkpointed_iteration.txt
try diff root $GOLDEN/mcore_dist_tp_pp/ckpt
try digest $GOLDEN/ds_z0/ckpt --only count
try names
try names fused-llama
try names none
try names a b
printf '%s\n' 'decoder.layers.*.self_attention.linear_qkv.weight h.*.{q,k,v}.weight qkv' '** **' > mine
try inspect $GOLDEN/mcore_legacy_tp/ckpt h.1.k.weight --names mine --heads 4,2
try merge $GOLDEN/mcore_legacy_tp/ckpt named --names mine --heads 4,2 --verify -q
try extract named h.1.k.weight k.npy
try inspect $GOLDEN/mcore_legacy_tp/ckpt h.1.k.weight --names mine
try inspect $GOLDEN/mcore_legacy_tp/ckpt --names mine --heads 2,4
try inspect $GOLDEN/mcore_legacy_tp/ckpt --names megatron-llama
try inspect $GOLDEN/mcore_legacy_tp/ckpt --names missing
try inspect $GOLDEN/ds_z1/ckpt --unstack
try inspect $GOLDEN/ds_z1/ckpt --from '.*=S(0)'
try inspect $GOLDEN/ds_z1/ckpt --vocab-size 3
try convert $GOLDEN/ds_z1/ckpt ranks --format fsdp --mesh 3 --default 'S(0)' --exclude '^optimizer|scale|count' --verify -q
ls -A ranks
try diff ranks fp32 --only 'layers.0.up'
try convert $GOLDEN/ds_z1/ckpt both --format fsdp --mesh fsdp=2,tp=2 --default 'S(0),R' --place '.*up.weight=_S(0,2),S(0)' --verify -q
ls -A both
try diff both ranks --only '^layers.0.up'
try convert both ranks --format fsdp --mesh 2 --default 'S(0)' --overwrite -q
ls -A ranks
try convert $GOLDEN/ds_z1/ckpt none --format fsdp --mesh 3 --default 'C(0,1)'
try convert $GOLDEN/ds_z1/ckpt none --format fsdp --mesh 3 --default 'S(0)' --exclude '^embed'

# the heads of the model of text in a config of several models
try inspect named decoder.layers.1.self_attention.linear_qkv.weight --names mine
echo '{"text_config": {"num_attention_heads": 4, "num_key_value_heads": 2}}' > named/config.json
try inspect named decoder.layers.1.self_attention.linear_qkv.weight --names mine
