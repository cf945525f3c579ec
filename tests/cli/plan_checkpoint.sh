# A plan reads no tensor data, and the conversion then does what the plan says.
cp -r "$GOLDEN/fsdp2_adamw/ckpt" in
numbers() { tr ',{}' '\n\n\n' | grep '"tensors"\|"files"\|"needed"\|"read"\|"written"\|"left_out"'; }
same() {
    reshard plan in "$@" --json | tee plan.json | numbers > planned
    reshard convert in out "$@" --json -q | numbers | diff planned -
    json < plan.json
    cat planned | tr '\n' ' '
    echo
    rm -r out
}
same
same --mesh 6 --preset fsdp
same --mesh 2x3 --preset hsdp
same --mesh 2 --preset replicate
same --format safetensors
same --format safetensors --max-shard-size 10KB
same --format safetensors --mesh 4 --place 'model.*=S0' --default R
same --only model --cast bf16
same --only '^model' --rename 's/^model/m/' --mesh 3 --default S0
# With empty data files, none of which is opened, the plan is the same.
reshard plan in --mesh 6 --preset fsdp > a
for file in in/*.distcp; do # zeros: reading them would fail
    nbytes=$(wc -c < "$file")
    : > "$file"
    truncate -s "$nbytes" "$file"
done
reshard plan in --mesh 6 --preset fsdp | cmp - a
reshard plan in --mesh 6 --preset fsdp --json | grep -c '"dry_run": true'
if command -v strace > /dev/null && strace -o trace -f -e trace=openat,open true 2> /dev/null; then
    # The address sanitizer and strace do not go together where ptrace is needed to look for leaks.
    ASAN_OPTIONS=detect_leaks=0 strace -o trace -f -e trace=openat,open reshard plan in --mesh 6 --preset fsdp > /dev/null
    grep distcp trace
    rm trace
fi
ls -A
try plan in --mesh 6
try plan in --mesh 6 --preset fsdp --pieces
try plan in in --mesh 6
try plan in --svg x.svg --html x.html --mesh 3 --preset fsdp
grep -o '<text[^>]*>[^<]*' x.svg | sed 's/<text[^>]*>//'
grep -o '<title>[^<]*' x.svg | head -n 3
rm x.svg x.html
try plan in --ranks --mesh 3 --preset fsdp --cast bf16
reshard plan in --ranks --mesh 3 --preset fsdp --json | tee plan.json
json < plan.json
try plan --rank 1 in --mesh 6
try plan --mesh=6 --preset fsdp --no_picture in
cp -r "$GOLDEN/fsdp2_adamw/ckpt" full
reshard plan full out --estimate | sed -n 's/estimate .* s: /estimate N s: /; s|[0-9.]* [kMG]B/s|RATE|g; /^estimate/p'
reshard plan full --estimate --json | grep -c '"estimate": {"seconds": [0-9.]*, "read_rate": [0-9]*, "write_rate": [0-9]*}}$'
try convert full out --estimate
try plan full nosuch/out --estimate
ls -A
