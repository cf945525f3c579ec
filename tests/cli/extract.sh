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
echo "# what cannot be done"
try extract "$in" model.up.bias bias.npy
try extract "$in" model.up.bias bias.npy --force
try extract "$in" model.up.bias nosuch/x
try extract "$in" nosuch x
try extract nosuch model.up.bias x
try extract "$in" model.up.bias
try extract "$in" model.up.bias x --slice '[81]'
try extract "$in" model.up.bias x --slice '[80]'
try extract "$in" model.up.bias x --slice '[5:3]'
try extract "$in" model.up.bias x --slice '[-1]'
try extract "$in" model.up.bias x --slice '[0, 0]'
try extract "$in" model.up.bias x --slice '[0'
try extract "$in" model.up.bias x --slice '[]'
try extract "$in" model.up.bias x --slice 'x'
try extract "$in" model.up.bias x --slice 9223372036854775807
try extract "$in" model.up.bias x --slice 0:99999999999999999999
try extract "$in" model.up.bias x --cast frob
try extract "$in" model.up.bias x --cast i32
try extract "$GOLDEN/dtypes/ckpt" bfloat16 x.npy
try extract "$GOLDEN/dtypes/ckpt" bfloat16 x.npy --cast f32
try extract "$in" model.up.bias x --json
ls
