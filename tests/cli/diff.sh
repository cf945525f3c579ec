# Equal or not, in any layout and format.
in=$GOLDEN/fsdp2_adamw/ckpt
reshard convert "$in" a --mesh 8 --preset fsdp -q
reshard convert "$in" b --format safetensors -q
try diff a b
try diff a b -q
try diff a b --json
try diff a b --only up
try diff a b --only up --json
reshard digest a > a.digests
for ckpt in b "$in"; do
    reshard digest $ckpt --threads 1 --max-memory 1KB | cmp - a.digests
    reshard digest $ckpt --threads 3 | cmp - a.digests
done
wc -l < a.digests
try digest a --only step --json
echo "# one is other"
# The last byte of a safetensors file is of the last tensor.
size=$(wc -c < b/model.safetensors)
mkdir c
{ head -c $((size - 1)) b/model.safetensors; printf '\001'; } > c/model.safetensors
try diff a c
try diff c a
reshard diff a c --json | tee got.json
json < got.json
try diff a c --only up
reshard convert "$in" d -q --exclude '^optim' --cast bf16 --rename 's/pos/position/'
try diff a d --only '^model'
reshard extract a model.up.bias bias.npy
try diff a d --json --only pos
echo "# tolerances and names"
reshard convert "$in" e -q --cast bf16 --only '^model' --rename 's/^model[.]/m./'
try diff a e --only '^model' --rename 's/^model[.]/m./' --rtol 0.01
try diff a e --only '^model' --rename 's/^model[.]/m./' --atol 1e-2 --json
try diff a e --only '^model' --rename 's/^model[.]/m./' --rtol 1e-4
try diff a e --only up.bias --rename 's/^model[.]/m./'
try diff e a --only up.bias --rename 's/^m[.]/model./' --rtol 1
try diff a c --rtol 1e30
try diff a b --rtol 0
try diff a b --rtol -1
try diff a b --atol x
try diff a b --rename x
try digest a --rtol 1
try verify a --rename 's/a/b/'
echo "# what cannot be compared"
try diff a b --only nosuch
try digest a --only nosuch
try diff a nosuch
try diff a a.digests
mkdir empty
try diff a empty
try diff a
try digest
try digest a b
try digest a --only '('
try diff a b --frob
rm a/__3_0.distcp a/__5_0.distcp
try diff a b
try digest a
try digest a --json
