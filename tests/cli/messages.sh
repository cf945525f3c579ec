# Errors name the cause: what a file is, what is missing, and what to do.
in=$GOLDEN/fsdp2_adamw/ckpt
echo "# Git LFS"
mkdir lfs
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n' > lfs/model.safetensors
cp lfs/model.safetensors lfs.bin
try inspect lfs
try verify lfs.bin
echo "# cut short"
reshard convert "$in" whole.pt -q --only up
reshard convert "$in" whole.safetensors -q --only up
head -c 2000 whole.pt > cut.pt
head -c 4000 whole.safetensors > cut.safetensors
head -c 30 whole.safetensors > head.safetensors
: > empty.pt
for file in cut.pt cut.safetensors head.safetensors empty.pt; do try inspect $file; done
cp -r "$in" cut
truncate -s 5000 cut/__1_0.distcp
by_cause() {
    try verify cut --threads 1
    try merge cut x
    try plan cut --mesh 2 --preset fsdp
    try digest cut --threads 1
    try diff cut "$in" --threads 1
    try extract cut model.up.weight x.npy
    try extract cut model.up.weight '--slice=[0]' x.npy
    rm x.npy
}
by_cause
echo "# a pointer of Git LFS, and a file that is missing, among the data files"
cp lfs.bin cut/__1_0.distcp
by_cause
rm cut/__1_0.distcp
by_cause
reshard verify cut --json | grep -c '__1_0.distcp: No such file'
echo "# other archives"
reshard extract "$in" model.up.bias model.pos a.npz
reshard extract "$in" model.up.bias b.npy
{ printf 'PK\003\004'; head -c 100 /dev/zero; printf 'archive/constants.pklPK\005\006'; head -c 18 /dev/zero; } > script.pt
for file in a.npz b.npy script.pt; do try inspect $file; done
echo "# a save that did not finish"
rm cut/.metadata
try convert cut x
echo "# names"
try extract "$in" up.bias x.npy
reshard convert "$in" plain -q --only '^model' --strip-prefix model.
try extract plain model.up.bias x.npy
try extract plain nosuch x.npy
try extract plain up.bais x.npy
try convert plain x --mesh dp=2,tp=2 --default R -q
try convert "$in" nosuch/deep/x
echo "# misspelled verbs, options and words"
try mrege a b
try frobnicate
try merge a b --vreify
try merge a b --max 3GB
try convert a b --mesh tp=4 --prest llama-tp
try convert a b --mesh tp=4 --preset lama-tp
try plan 'f32[8,8] : 4:S0 -> 4:S1' --pices
try diff a b --rotl 1
try inspect a --regoin x
try plan 'flaot32[8,8] : 4:S0 -> 4:S1'
try inspect "$in" --names megatron-lama
echo "# heads"
try merge "$in" x --heads 6
try inspect "$in" --heads 6
try convert "$in" x --mesh 2 --preset llama-tp --heads 4,6
echo "# options for URLs"
try inspect . --endpoint-url
try inspect . --no-sign-request=1
try inspect --region=x -- --region
echo "# an empty path, as of a variable that is not set"
try convert '' x
try diff "$GOLDEN/fsdp2_adamw/ckpt" ''
echo "# --to is a mesh, and a third argument is named"
try convert "$GOLDEN/fsdp2_adamw/ckpt" nothing --to dp_shard=6 --preset fsdp --dry-run
try convert "$GOLDEN/fsdp2_adamw/ckpt" x y
try merge "$GOLDEN/fsdp2_adamw/ckpt"
