# Paths with blanks, leading dashes and trailing slashes.
cp -r "$GOLDEN/fsdp2_adamw/ckpt" 'in put é'
try merge 'in put é/' 'out put ü//' -q
ls 'out put ü'
try verify 'out put ü/'
try diff 'in put é' 'in put é/.metadata'
try merge 'in put é' ./-x -q
try verify -- -x
echo "# into the directory that is read, and over it"
mv 'in put é' in
try convert in in/out -q --mesh 2 --preset fsdp
try diff in in/out
try convert in in -q
try convert in in/ -q --force --mesh 2 --preset fsdp --verify
try convert in in/ -q --force --mesh 2 --preset fsdp
ls -A in in/out
try diff in in/out
try convert in/out in -q --force
try diff in in/out
try convert in . -q --force
try convert in in/.metadata -q --force
ln -s in link
try convert link other -q
try diff link other
try convert in link -q --force
ls -A
echo "# the directory above, and directories whose names look like files"
mkdir -p above/.hidden above/model.pt/sub above/run.safetensors
try inspect above
cp -r in above/step
try inspect above
cp "in/.metadata" above/
mkdir above/.metadata.d
try inspect above --json | head -1
