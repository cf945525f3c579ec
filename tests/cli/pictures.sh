# Pictures are valid XML, and name what they show: titles, totals, axes, ranks in order and files.
cp -r "$GOLDEN/fsdp2_adamw/ckpt" ckpt
in=ckpt
texts() { grep -o '<text[^>]*>[^<]*' "$1" | sed 's/<text[^>]*>//'; }
valid() {
    command -v python3 > /dev/null || return 0
    for file; do python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$file"; done
}
reshard plan 'f32[64,64] : 2x2:S0,S1 -> 4:S1' --svg ranks.svg --html ranks.html --no-picture > /dev/null
texts ranks.svg
grep -o '<title>[^<]*' ranks.svg
grep -c '<svg' ranks.html
echo "# many ranks"
reshard plan 'f32[640,640] : 200:S0 -> 100:S1' --svg many.svg --no-picture > /dev/null
texts many.svg | head -n 12
echo "# a tensor"
reshard inspect "$in" model.up.weight --svg tensor.svg --html tensor.html > /dev/null
texts tensor.svg
grep -o '<title>[^<]*' tensor.svg
grep -o '<tr>.*</tr>' tensor.html | sed 's/<[^>]*>/ /g'
reshard inspect "$in" optim.state.up.weight.step --svg scalar.svg > /dev/null
texts scalar.svg
reshard inspect "$GOLDEN/empty_shards/ckpt" "$(reshard inspect --json "$GOLDEN/empty_shards/ckpt" | sed -n 's/.*"name": "\([^"]*\)".*/\1/p' | head -n 1)" --svg empty.svg > /dev/null
echo "# a checkpoint"
reshard inspect "$in" --svg files.svg --html files.html > /dev/null
texts files.svg
grep -c '<tr>' files.html
echo "# text from files is escaped"
header='{"a<script>&\u001b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
header=$header$(printf '%*s' $(((8 - ${#header} % 8) % 8)) '')
printf "\\$(printf %03o ${#header})\0\0\0\0\0\0\0%s12345678" "$header" > 'x<&>.safetensors'
reshard inspect 'x<&>.safetensors' --svg names.svg --html names.html > /dev/null
texts names.svg
valid ./*.svg
