# Orbax checkpoints are read as any other: a tree, a step, the directory of a manager.
in=$GOLDEN/orbax_ocdbt_zarr3/ckpt
try inspect "$in"
try inspect "$in" params.dense.kernel
reshard inspect "$GOLDEN/orbax_manager/ckpt" --json > list.json
json < list.json
try inspect "$GOLDEN/orbax_manager/ckpt/3"
try inspect "$GOLDEN/orbax_manager/ckpt/3/state/manifest.ocdbt" | tail -n 3
echo "# the same tensors, however they are stored"
for name in chunked chunked_zarr2 manager ocdbt_deep ocdbt_zarr2 plain_zarr2 plain_zarr3 two_processes; do
    reshard diff "$GOLDEN/orbax_$name/ckpt" "$GOLDEN/orbax_$name/truth.safetensors"
done
try verify "$GOLDEN/orbax_plain_zarr3/ckpt"
try merge "$GOLDEN/orbax_manager/ckpt" hf --only '^params\.' --strip-prefix params. --verify
ls hf
try convert "$in" dcp --format dcp --mesh tp=2 --place '.*kernel=S0' --place '.*=R'
try diff "$in" dcp
try extract "$in" params.norm.scale scale.npy
echo "# damage"
copy() { rm -rf bad && cp -r "$GOLDEN/orbax_$1/ckpt" bad; }
copy two_processes
rm -r bad/ocdbt.process_1
try inspect bad | sed 's|d/[0-9a-f]*|d/FILE|'
copy two_processes
rm bad/manifest.ocdbt
try inspect bad
copy plain_zarr2
rm -r bad/opt.count
try inspect bad
copy plain_zarr2
rm bad/params.dense.bias/3
try verify bad
try merge bad lost --all
sed -i 's/"store_array_data_equal_to_fill_value": true/"store_array_data_equal_to_fill_value": false/' bad/_METADATA
try diff "$GOLDEN/orbax_plain_zarr2/ckpt" bad
copy plain_zarr3
printf x | dd of=bad/params.dense.bias/c/3 bs=1 seek=45 conv=notrunc 2> /dev/null
try verify bad
copy ocdbt_zarr2
mv bad 7.orbax-checkpoint-tmp
try inspect 7.orbax-checkpoint-tmp
