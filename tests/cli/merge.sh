# The shards of a run become a directory that transformers loads.
in=$GOLDEN/fsdp2_adamw/ckpt
try merge "$in" one/
try merge "$in" one.safetensors -q
try digest one.safetensors
try diff one one.safetensors
echo "# too much for one file: several, and an index that is complete"
cp -r "$in" run
echo '{"architectures": []}' > run/config.json
echo hello > run/tokenizer.model
echo hello > run/notes.md
try merge run several --max-shard-size 6KB -q --verify
ls several
tr ',' '\n' < several/model.safetensors.index.json
try verify several
try diff one several -q
try merge run all --all -q --max_shard_size 1GB
try diff "$in" all
reshard merge run json --json -q --verify | tee got.json
json < got.json
ls json
echo "# side files from elsewhere"
mkdir hf && echo '{}' > hf/generation_config.json
try merge run elsewhere -q --config-from hf
ls elsewhere
try merge run x -q --config-from nosuch
try merge run x.safetensors -q --config-from hf
echo "# with the files of a model: README, subdirectories, but no other weights"
mkdir -p hf/1_Pooling/deep/er hf/.cache
echo '{}' > hf/config.json
echo '{}' > hf/1_Pooling/config.json
echo '{}' > hf/1_Pooling/deep/merges.txt
echo '{}' > hf/1_Pooling/deep/er/config.json
echo weights > hf/1_Pooling/model.safetensors
echo '{}' > hf/.cache/x.json
echo '# Model' > hf/README.md
echo free > hf/LICENSE
try merge run card -q --config-from hf
find card -type f | sort
try merge run card2 -q --config-from hf --json --dry-run
echo "# a config beside IN"
mkdir -p steps/5
cp -r "$in/." steps/5
echo '{}' > steps/config.json
echo 'print()' > steps/train.py
try merge steps/5 beside
ls beside
try merge steps/5/ beside2 -q
ls beside2
rm steps/config.json
mkdir steps/huggingface
echo '{}' > steps/huggingface/config.json
try merge steps/5 beside3 -q
ls beside3
try merge steps/5 bare
ls bare
echo "# an adapter of PEFT"
mkdir adapter
reshard convert "$in" adapter/adapter_model.safetensors -q --only '^model.up' --rename 's/model[.]up[.]/base_model.model.q.lora_A./'
echo '{"peft_type": "LORA"}' > adapter/adapter_config.json
try merge adapter adapter2 --cast bf16
ls adapter2
try inspect adapter2
reshard convert "$in" lora -q --only '^model.up' --rename 's/model[.]up[.]/base_model.model.q.lora_A.default./'
try merge lora adapter3 --config-from adapter --max-shard-size 1KB -q --verify
ls adapter3
try inspect adapter3
echo "# what a cast leaves, and the values that it wrote"
try merge "$in" cast --cast bf16 --verify
try merge "$in" cast2 --cast bf16 --only up -q --verify
rm -r hf/1_Pooling adapter adapter2 adapter3 lora bare beside beside2 beside3 card cast cast2 steps
echo "# what is there is kept, unless it is to be replaced"
try merge "$in" one
try merge "$in" one --json
echo mine > one/notes.md
try merge "$in" one --force -q --cast bf16
ls one
try inspect one/model.safetensors
try merge "$in" hf --force
try merge "$in" one --overwrite --everything --max-nbytes 1MB -q
try verify one --max-nbytes 1MB -q
echo "# nothing is written if it cannot be whole"
rm run/__2_0.distcp
try merge run x
try merge run x --json
try merge run x --dry-run
try merge "$GOLDEN/fsdp2_adamw/nosuch" x
try merge hf x
try merge "$in" x --only nosuch
try merge "$in" nosuch/x
try merge "$in" ""
try merge "$in" x --rename 's/.*/x/'
try merge "$in" x --rename 's/.*//'
truncate -s 9000 run/__1_0.distcp
cp "$in/__2_0.distcp" run
try merge run x
rm run/.metadata
try merge run x
echo "# usage"
try merge
try merge "$in"
try merge "$in" x y
try merge "$in" x --mesh 2
try merge "$in" x --format dcp
try merge "$in" x --max-shard-size 0
try merge "$in" x --max-shard-size 5
try merge "$in" x --max-memory 1
try merge "$in" x --max-memory 0x10
try merge "$in" x --max-memory 1e0x
try merge "$in" -
try merge "$in" x.pt -q
rm x.pt
try convert "$in" x.pt --format dcp
try convert "$in" x.bin --format safetensors
try convert "$in" x.safetensors --format torch.save
try split "$in" x.pt --mesh 2 --preset fsdp
try merge "$in" x --max-shard-size 5XB
try merge "$in" x --max-memory
try merge "$in" x --threads 0
try merge "$in" x --cast i32
try merge "$in" x --rename s/a
try merge "$in" x --only '*'
try merge "$in" x --ver --max-sh 5GB --dry --qui --onl pos
try merge "$in" x --max
ls
echo "# a directory of configs that is a link, and a config that is one"
mkdir secrets
echo '{"num_attention_heads": 2}' > secrets/config.json
cp -r "$GOLDEN/rows_1d/ckpt" linked
chmod -R u+w linked
ln -s ../secrets linked/huggingface
try merge linked linked.out
try merge linked linked.out --follow-links -q
ls linked.out
rm linked/huggingface
ln -s ../secrets/config.json linked/config.json
try convert linked linked.dcp --format dcp --mesh 2 --place '.*=S(0)' 2>&1 | grep -v '^read\|^wrote\|^memory'
