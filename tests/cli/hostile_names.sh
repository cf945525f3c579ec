# Names with control characters are escaped in text, and JSON is valid with any name.
header='{"a\u001b[31mred":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'\
'"b\nline":{"dtype":"F32","shape":[],"data_offsets":[8,12]},'\
'"c<&>\"'"'"'":{"dtype":"U8","shape":[2,2],"data_offsets":[12,16]},'\
'"d\u009b31m":{"dtype":"U8","shape":[2],"data_offsets":[16,18]},'\
'"e \u00e9\ud83d\ude00":{"dtype":"U8","shape":[2],"data_offsets":[18,20]}}'
header=$header$(printf '%*s' $(((8 - ${#header} % 8) % 8)) '')
printf "\\$(printf %03o $((${#header} % 256)))\\$(printf %03o $((${#header} / 256)))\0\0\0\0\0\0%s" "$header" > x.safetensors
head -c 20 /dev/zero >> x.safetensors
try inspect x.safetensors
try inspect --tree x.safetensors
try digest x.safetensors
try convert x.safetensors out --mesh 2 --place 'e.*=S0'
reshard inspect --json x.safetensors | tee got.json
json < got.json
reshard convert x.safetensors "$(printf 'bad\377')" --json > got.json
json < got.json
cat got.json
# A conversion keeps the names.
try convert x.safetensors dcp --format dcp -q
try diff x.safetensors dcp
echo "# what has no width, or turns text, is escaped on the terminal too"
header='{"f\u202eabc":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"g\u200bh\u2066i\ufeffj":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
header=$header$(printf '%*s' $(((8 - ${#header} % 8) % 8)) '')
printf "\\$(printf %03o $((${#header} % 256)))\\$(printf %03o $((${#header} / 256)))\0\0\0\0\0\0%s12" "$header" > y.safetensors
try inspect y.safetensors
try inspect --tree y.safetensors
try extract y.safetensors "$(printf 'no\342\200\256such')" z.npy
reshard inspect --json y.safetensors | tee got.json
json < got.json
header='{"k\u180el":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"m\udb40\udc41n\ufe0f":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
header=$header$(printf '%*s' $(((8 - ${#header} % 8) % 8)) '')
printf "\\$(printf %03o $((${#header} % 256)))\\$(printf %03o $((${#header} / 256)))\0\0\0\0\0\0%s12" "$header" > z.safetensors
try inspect z.safetensors
reshard inspect --json z.safetensors | tee got.json
json < got.json
reshard inspect z.safetensors --html z.html > /dev/null
grep -c "$(printf '\341\240\216')" z.html
