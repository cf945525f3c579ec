# One tensor or a slice of it; only the files that are read must exist.
in=$GOLDEN/fsdp2_adamw/ckpt
dump() { od -An -v -tx1 "$@" | tr -d ' \n'; echo; }
try extract "$in" model.up.bias bias.npy
head -c 128 bias.npy | tr -d '\0-\11\166\223'
wc -c < bias.npy
try extract "$in" model.up.bias bias.bin
tail -c 320 bias.npy | cmp - bias.bin
try extract "$in" model.up.bias raw.npy --raw
cmp raw.npy bias.bin
reshard extract "$in" model.up.weight - --slice '[19:21, 3:5]' | dump
reshard extract "$in" model.up.weight - --slice '19:21,3:5' | dump
reshard extract "$in" model.up.weight - --slice '[ 19 , : 2 ]' | dump
reshard extract "$in" model.up.weight - --slice '[79:, 15]' | dump
reshard extract "$in" model.up.weight - --slice '[80:, :]' | dump
reshard extract "$in" model.up.weight - --slice '[0, 0]' --cast bf16 | dump
reshard extract "$in" optim.state.up.bias.step - | dump
reshard extract "$in" optim.state.up.bias.step - --slice '[]' | dump
reshard extract "$GOLDEN/hf_sharded/ckpt" v - --slice '[6, 3:5]' | dump
echo "# a file of another rank is not needed"
cp -r "$in" part
rm part/__3_0.distcp
try extract part model.pos pos.npy
try extract part model.up.weight x.npy --slice '[0:60, :]'
rm x.npy
try extract part model.up.weight x.npy --slice '[59:61, :]'
try extract part model.up.weight x.npy
echo "# slices as in NumPy"
slice() { reshard extract "$in" model.up.weight x.npy --slice "$1" --force && head -c 128 x.npy | grep -ao "'shape': ([^)]*)"; tail -c +129 x.npy | dump; }
slice '[-1, -2:]'
slice '[-1:, -2:]'
slice '[..., 15]' | head -c 64
echo
slice '[0, ...]' | head -c 64
echo
slice '[3]' | head -c 64
echo
slice '[-2:1000, :1]'
slice '[0:-79, -17:1]'
slice '[5:3, :]'
slice '[79:, ..., 14:]'
try extract "$in" model.up.weight x.npy --force --slice '[::2, :]'
try extract "$in" model.up.weight x.npy --force --slice '[..., 0, ...]'
try extract "$in" model.up.weight x.npy --force --slice '[..., 0, 0, 0]'
try extract "$in" model.up.weight x.npy --force --slice '[-81]'
try extract "$in" model.up.weight x.npy --force --slice '[1:2] x'
try extract "$in" model.up.weight x.npy --force --slice '[0,]'
rm x.npy
echo "# many tensors"
try extract "$in" model.up.bias model.pos two.npz
try extract "$in" all.npz --only model --slice '[0:2]'
try extract "$in" arrays --only '^model' --only step
ls arrays
tail -c 320 arrays/model.up.bias.npy | cmp - bias.bin
try extract "$in" bytes --only up.bias --raw
ls bytes
cmp bytes/model.up.bias.bin bias.bin
if command -v python3 > /dev/null; then python3 - << 'END'
import zipfile
with zipfile.ZipFile("two.npz") as file:
    assert file.namelist() == ["model.up.bias.npy", "model.pos.npy"], file.namelist()
    assert file.testzip() is None
    assert file.read("model.up.bias.npy") == open("bias.npy", "rb").read()
with zipfile.ZipFile("all.npz") as file:
    assert len(file.namelist()) == 7 and file.testzip() is None, file.namelist()
END
fi
reshard convert "$in" names -q --only model.pos --rename 's|model.pos|../up/%|'
try extract names names.dir --only .
find names.dir -type f
try extract "$GOLDEN/dtypes/ckpt" cast.npz --only 'float16|int8|int16$' --cast f32
try extract "$GOLDEN/dtypes/ckpt" cast.npz --only 'float16'
rm -r two.npz all.npz cast.npz arrays bytes names names.dir
try extract "$in" bytes --only nosuch
try extract "$in" - --only up.bias
try extract "$in" x.npy --only up.bias
try extract "$in" x.npz --only up.bias --raw
try extract "$in" model.pos x --only up.bias
try extract "$in" x --only '('
try extract "$in" model.pos nosuch y
try extract "$in" model.pos model.up.bias bias.npz --slice '[20]'
echo "# what cannot be done"
try extract "$in" model.up.bias bias.npy
try extract "$in" model.up.bias bias.npy --force
try extract "$in" model.up.bias nosuch/x
try extract "$in" nosuch x
try extract nosuch model.up.bias x
try extract "$in" model.up.bias
try extract "$in" model.up.bias x --slice '[81]'
try extract "$in" model.up.bias x --slice '[80]'
try extract "$in" model.up.bias x --slice '[0, 0]'
try extract "$in" model.up.bias x --slice '[0'
try extract "$in" model.up.bias x --slice 'x'
try extract "$in" model.up.bias x --slice 9223372036854775807
try extract "$in" model.up.bias x --cast frob
try extract "$in" model.up.bias x --cast i32
try extract "$GOLDEN/dtypes/ckpt" bfloat16 x.npy
try extract "$GOLDEN/dtypes/ckpt" bfloat16 x.npy --cast f32
try extract "$in" model.up.bias x --json
ls
