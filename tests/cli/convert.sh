# From 8 ranks to 6 and back: nothing is lost.
in=$GOLDEN/fsdp2_adamw/ckpt
try convert "$in" eight --mesh 8 --preset fsdp
try convert eight six --mesh dp_shard=6 --preset fsdp -q --verify
try convert six back --mesh 8 --place '.*=S0' -q --max-memory 4KiB --threads 1
ls -A six
reshard digest eight > a
reshard digest six | cmp - a
reshard digest back | cmp - a
wc -l < a
for name in .metadata __0_0.distcp __7_0.distcp; do cmp eight/$name back/$name; done
try diff "$in" six
try diff "$in" back
reshard inspect "$in" | grep 'param_groups\|^step' | sort > a
reshard inspect back | grep 'param_groups\|^step' | sort | diff a -
echo "# to safetensors and back: shards as torch names them, replicas once"
try convert six st --format safetensors --mesh 4 --preset fsdp -q
ls -A st
try diff "$in" st
try verify st
try convert st whole.safetensors -q
try diff "$in" whole.safetensors
try convert "$in" parts --format safetensors --max-shard-size 10KB -q
ls parts
try diff "$in" parts
echo "# every format that torch wrote, to every other"
for name in cols_uneven dtypes empty_shards hf_sharded many_files mesh_2d mesh_3d no_collectives replicated rows_1d safetensors_items sharded_tensor torch113 torch24 transposed two_threads values; do
    reshard convert "$GOLDEN/$name/ckpt" x --format dcp --mesh 3 --preset fsdp -q
    reshard convert x y.safetensors -q
    try diff "$GOLDEN/$name/ckpt" y.safetensors
    try diff x "$GOLDEN/$name/truth.safetensors" -q
    rm -r x y.safetensors
done
echo "# names and dtypes"
try convert "$in" r --only '^model' --exclude 'bias$' --strip-prefix model. --rename 's/\.weight$/.w/' --rename 's|(u)(p)|<\2\1&>|g' --rename 's/o/0/' -q
try digest r
try convert "$in" bf --cast bf16 -q --only up
try inspect bf
try convert bf f32 --cast f32 -q --verify
echo "# reports"
reshard convert "$in" j --mesh 2 --preset fsdp --json --verify | tee got.json
json < got.json
try convert "$in" d --mesh 2 --preset fsdp --dry-run
try convert "$in" d --mesh 2 --preset fsdp --dry-run -q --json
echo "# what cannot be done"
try convert "$in" six
try convert "$in" six --resume
try convert "$in" x --compress zstd --format safetensors
try convert "$in" x --compress gzip
try convert "$in" x --compress zstd:99
try convert "$in" x --max-shard-size 5GB --format dcp
try convert "$in" x --max-shard-size 5GB --format safetensors --mesh 2 --preset fsdp
try convert "$in" x --format pt
try convert "$in" x --all
try convert "$in" x --config-from .
try convert "$in" x --mesh 3 --preset fsdp --format safetensors.x
try convert "$in" x.safetensors --mesh 2 --preset fsdp
try convert
try convert "$in"
ls -A
