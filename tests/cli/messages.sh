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
reshard verify cut --threads 1 | sed 's/behind: .*/behind: .../'
rm cut/__1_0.distcp
try verify cut --threads 1
reshard verify cut --json | grep -c '__1_0.distcp: .*: No such file'
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
try convert "$in" nosuch/deep/x
