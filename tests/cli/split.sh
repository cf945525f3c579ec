# One file per rank, each with everything that the rank needs.
in=$GOLDEN/fsdp2_adamw/ckpt
try split "$in" tp --mesh tp=4 --place 'model.up.*=colwise' --place 'model.down.weight=rowwise' --default R --only '^model' --strip-prefix model.
ls tp
try verify tp
try inspect tp
# In all files together, sharded tensors are stored once and replicas four times.
cat tp/* | wc -c
for rank in 0 1 2 3; do
    mkdir alone
    cp tp/rank-0000$rank-of-00004.safetensors alone
    head -c 3000 alone/* | tr '{}' '\n\n' | grep -c '"data_offsets"'
    try verify alone
    rm -r alone
done
cp -r "$in" hf
echo '{}' > hf/config.json
try split hf with_config --mesh 2 --preset fsdp -q
ls with_config
try split "$in" from_config --mesh 2 --preset fsdp -q --config-from hf
ls from_config
rm -r hf with_config from_config
try merge tp whole -q
try convert "$in" model -q --only '^model' --strip-prefix model. --format safetensors
try diff model whole
try diff model tp
echo "# not all bytes, or an error"
rm tp/rank-00002-of-00004.safetensors
try verify tp
try merge tp x
try convert tp x --mesh tp=2 --default R
try split "$in" x
try split "$in" x --mesh 2
try split "$in" x --mesh 2 --default R --format dcp
try split "$in" x.safetensors --mesh 2 --default R
reshard split "$in" j --mesh 2 --default S0 -q --json --verify | tee got.json
json < got.json
ls
