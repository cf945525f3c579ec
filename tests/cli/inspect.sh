# A checkpoint as text, as a tree and as JSON, and one tensor of it.
in=$GOLDEN/fsdp2_adamw/ckpt
try inspect "$in"
try inspect --tree "$GOLDEN/fsdp2_tp_adamw/ckpt"
for name in cols_uneven dtypes empty_shards hf_sharded many_files mesh_2d mesh_3d no_collectives replicated rows_1d safetensors_items sharded_tensor torch113 torch24 transposed two_threads values; do
    try inspect "$GOLDEN/$name/ckpt"
done
reshard inspect --json "$GOLDEN/values/ckpt" | tee got.json
json < got.json
reshard inspect --json "$GOLDEN/hf_sharded/ckpt"
echo "# one tensor"
try inspect "$in" model.up.weight
try inspect "$in" model.up.bias
try inspect "$in" optim.state.up.weight.step
try inspect "$GOLDEN/mesh_2d/ckpt" s1s0
try inspect "$GOLDEN/empty_shards/ckpt" "$(reshard inspect --json "$GOLDEN/empty_shards/ckpt" | sed -n 's/.*"name": "\([^"]*\)".*/\1/p' | head -n 1)"
reshard inspect "$in" --json model.up.bias | tee got.json
json < got.json
try inspect "$in" model.up.bias --svg one.svg --html one.html --json
ls
echo "# selected tensors and values"
try inspect "$in" --only 'up[.]weight' --only lr
try inspect "$in" --tree --only up
reshard inspect "$in" --only 'up[.]bias$' --json
try inspect "$in" --only params
echo "# long names stay in columns"
long=$(printf 'a%.0s' 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30)
reshard convert "$in" long -q --only model --rename "s/up/$long.up/" --rename "s/down/$long.$long.$long.$long.down/" --format dcp
try inspect long
try inspect long --tree
rm -r long
echo "# what cannot be done"
try inspect "$in" --only nosuch
try inspect "$in" --only '('
try inspect "$in" model.up.bias --only up
try inspect
try inspect a b c
try inspect "$in" nosuch
try inspect "$in" nosuch --json
try inspect nosuch
try inspect nosuch --json
try inspect .
try inspect /dev/null
try inspect "$in" --svg x.svg --only up
try inspect "$in" --tree --json
try inspect "$in" --tree model.up.bias
try inspect "$in" --frob
try inspect "$in" model.up.bias --svg nosuch/x.svg
try inspect "$in" model.up.bias --svg
ls
