# Damage of every kind is found, and the finding names the file.
in=$GOLDEN/fsdp2_adamw/ckpt
damage() { rm -rf bad && cp -r "$in" bad && echo "# $1"; }
found() { # how many findings, and which files they name
    reshard verify bad > findings
    echo "exit $? with $(grep -c . findings) findings in" $(grep -o '__[0-9]_[0-9].distcp' findings | sort -u)
    reshard verify bad --json > findings.json
    json < findings.json
    reshard diff "$in" bad > /dev/null 2>&1
    echo "diff exits $?"
    reshard convert bad out -q > /dev/null 2>&1
    echo "convert exits $?, and leaves" $(ls -d out* 2> /dev/null)
    rm -rf out*
}
try verify "$in"
try verify "$in" -q
try verify "$in" --json
damage "an empty file"; : > bad/__1_0.distcp; found
damage "a file that is cut short"; head -c 9000 "$in/__1_0.distcp" > bad/__1_0.distcp; found
damage "a file that is missing"; rm bad/__1_0.distcp; found
damage "two files that changed places"; cp "$in/__1_0.distcp" bad/__2_0.distcp; cp "$in/__2_0.distcp" bad/__1_0.distcp; found
damage "a file twice"; cp "$in/__2_0.distcp" bad/__1_0.distcp; found
damage "a bit"
offset=$(reshard inspect "$in" model.up.weight | sed -n 's/.*__1_0.distcp, byte \([0-9]*\),.*/\1/p')
printf '\125' | dd of=bad/__1_0.distcp bs=1 seek=$((offset + 1200)) conv=notrunc 2> /dev/null
found
try verify bad
try diff "$in" bad
damage "metadata that is cut short"; head -c 900 "$in/.metadata" > bad/.metadata
try verify bad
try verify bad --json
damage "no metadata"; rm bad/.metadata
try verify bad
echo "# the same of safetensors"
reshard merge "$in" st -q --max-shard-size 6KB
rm st/model-00002-of-00002.safetensors
try verify st
try diff "$in" st
reshard merge "$in" whole -q
size=$(wc -c < whole/model.safetensors)
head -c $((size - 4)) whole/model.safetensors > cut.safetensors
try verify cut.safetensors
echo "# a pickle that would run a command is read, not run"
mkdir evil
printf '\200\002cposix\nsystem\n(X\011\0\0\0touch rantR.' > evil/.metadata
try verify evil
try inspect evil
try merge evil x
ls -d ran x* 2> /dev/null
echo "# usage"
try verify
try verify a b
try verify "$in" --only x
try verify "$in" --max-memory 5Q
try verify "$in" --threads x
try verify nosuch
