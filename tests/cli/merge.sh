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
try merge "$in" x --max-shard-size 5XB
try merge "$in" x --max-memory
try merge "$in" x --threads 0
try merge "$in" x --cast i32
try merge "$in" x --rename s/a
try merge "$in" x --only '*'
try merge "$in" x --ver --max-sh 5GB --dry --qui --onl pos
try merge "$in" x --max
ls
