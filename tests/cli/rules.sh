# Placements come from --place, then the file of rules, then the preset, then the default.
in=$GOLDEN/fsdp2_adamw/ckpt
cuts() { # what became of some tensors: their boxes
    reshard convert "$in" out -q "$@" || { echo "exit $?"; return; }
    for tensor in model.up.bias model.up.weight model.down.weight optim.state.up.weight.exp_avg optim.state.up.weight.step model.norm.bias; do
        echo "$tensor" "$(reshard inspect out $tensor | sed -n 's/^  \(\[.*\]\)  .*/\1/p' | tr '\n' ' ')"
    done
    rm -rf out
}
echo "# one placement for all; a tensor without dims is replicated, optimizer state goes with its parameter"
cuts --mesh 4 --place '.*=S(0)'
cuts --mesh 2x2 --place 'model[.]up[.]weight=S0,S1' --default R,R
cuts --mesh dp=2,tp=2 --place '.*weight=[dp, -]' --place '.*=[tp]' --exclude norm
cuts --mesh dp=2,tp=2 --place '.*weight=[tp.dp, -]' --default '[-]' --exclude norm.weight --only 'model[.]|up.weight'
cuts --mesh tp=2 --place '.*up.weight=colwise' --place '.*down.weight=rowwise' --default replicate
cuts --mesh tp=2 --place '.*up.weight=Shard(0)' --place '.*down.weight=[Shard(dim=1)]' --default 'Replicate()'
cuts --mesh x=2,max=1 --default 'R,R'
echo "# --place is asked before the file, wherever it stands; the first line that matches wins"
cat > rules <<'EOF'
# comment
  .*up[.]weight   S(1)     # and another
.*weight S(0)

[a-z.]*.exp_avg C(0,2)
.* R
EOF
cuts --mesh 2 --rules rules
cuts --mesh 2 --rules rules --place '.*down[.]weight=B(1)'
cuts --mesh 2 --place 'optim.state.up.weight.exp_avg=S(1;8,8)' --rules rules
echo "# presets"
cuts --mesh 3 --preset fsdp
cuts --mesh 2x2 --preset hsdp
cuts --mesh 2 --preset replicate
reshard convert "$in" llama -q --rename 's/[.](up|down)[.]/.\1_proj./' --exclude 'pos'
reshard convert llama out -q --mesh tp=2,dp=1 --preset llama-tp
for tensor in up_proj.weight up_proj.bias down_proj.weight down_proj.bias norm.weight; do
    reshard inspect out model.$tensor | sed -n 's/^  \(\[.*\]\)  .*/\1/p'
done
rm -r out
try plan llama --mesh 3x1 --preset llama-tp --exclude norm -q
try plan "$in" --mesh 2 --preset llama-tp --only 'model[.](norm|up)'
echo "# what is wrong with them"
try convert "$in" out --mesh 2 --place 'model[.]up.*=S0' --only 'model[.](up|down|pos)'
try convert "$in" out --mesh 2 --place '.*=S1' --only model
try convert "$in" out --mesh 2 --place '.*=S0,S0' --only model.up
try convert "$in" out --mesh 2 --place '.*=frob' --only model.pos
try convert "$in" out --mesh 2 --place '.*=P' --only model.pos
try convert "$in" out --mesh 2 --place 'model[.]nosuch=S0' --default R
try convert "$in" out --mesh 2 --place 'nosuch' --default R
try convert "$in" out --mesh 2 --place '=S0' --default R
try convert "$in" out --mesh 2 --place '(=S0' --default R
try convert "$in" out --mesh 2 --place 'a\d=S0' --default R
try convert "$in" out --mesh 2 --place '\w+=S0' --default R
try convert "$in" out --mesh 2 --place '(?:a)=S0' --default R
try convert "$in" out --mesh bogus --place '.*=S0'
try convert "$in" out --mesh 0 --place '.*=S0'
try convert "$in" out --mesh 2x2 --preset frob
try convert "$in" out --mesh 2 --preset hsdp
try convert "$in" out --preset fsdp
try convert "$in" out --place '.*=S0'
try convert "$in" out --default S0
try convert "$in" out --rules rules
try convert "$in" out --rules nosuch --mesh 2
try convert "$in" out --rules . --mesh 2
echo 'lonely' > bad; try convert "$in" out --rules bad --mesh 2
echo '[ S0' > bad; try convert "$in" out --rules bad --mesh 2
try split "$in" out
try split "$in" out --preset fsdp
ls -A
echo "# what is not used: of a file a note, of --place that something else decided before too"
echo 'nosuch S0' >> rules
try convert "$in" out --rules rules --mesh 2 -q
rm -r out
try plan "$in" --rules rules --mesh 2
try plan "$in" --mesh 2 --place '.*=S0' --place 'model.*=R'
try plan "$in" --mesh 2 --preset fsdp --place 'optim.state.up.weight.step=S0'
echo "# a file for each rank"
try convert "$GOLDEN/fsdp2_adamw/ckpt" x --mesh 1000000 --preset fsdp
try split "$GOLDEN/fsdp2_adamw/ckpt" x --mesh 1000x1000 --preset replicate --dry-run
echo "# files of rules and names that are not texts, or without end"
printf 'a\0b S(0)\n' > zero.rules
try convert "$GOLDEN/rows_1d/ckpt" x --format dcp --mesh 2 --rules zero.rules
yes 'w S(0)' | head -n 50001 > many.rules
try convert "$GOLDEN/rows_1d/ckpt" x --format dcp --mesh 2 --rules many.rules
try inspect "$GOLDEN/rows_1d/ckpt" --names zero.rules 2>&1 | sed 's/^.*ckpt: //'
try inspect "$GOLDEN/rows_1d/ckpt" --names /dev/zero 2>&1 | sed 's/^.*ckpt: //'
mkfifo endless.names
yes 'w v' > endless.names 2> /dev/null &
try inspect "$GOLDEN/rows_1d/ckpt" --names endless.names 2>&1 | sed 's/^.*ckpt: //'
