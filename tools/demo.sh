#!/bin/sh
# What this project is for, on a fresh machine: a checkpoint of 8 ranks, needed in other cuts.
set -eu
exec 2>&1
build=$(cd "$1" && pwd)
PATH=$build:$build/examples:$PATH
rm -rf "$build/demo"
mkdir -p "$build/demo"
cd "$build/demo"

bold='' dim='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR-}" ] && [ "${TERM-dumb}" != dumb ]; then
    bold=$(printf '\033[1m') dim=$(printf '\033[36m') plain=$(printf '\033[0m')
fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
# Shows a command as one would type it, and runs it.
try() {
    printf '%s$' "$dim"
    for word; do
        case $word in *[!A-Za-z0-9_=,./:-]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '%s\n' "$plain"
    "$@"
}
lines() { sed "$1q"; }

say "1  A tensor lies on a mesh of 2 x 4 ranks, and is needed on 8 ranks, cut another way."
try reshard plan 'f32[4096,4096] : dp=2,tp=4 : S(0),S(1) -> 8 : S(1)' --no-picture
say "   The same move, done in memory; every element holds a value made from its own index."
try move 'f32[4096,4096] : dp=2,tp=4 : S(0),S(1) -> 8 : S(1)'

say "2  Eight FSDP ranks save a small Llama and its optimizer, as PyTorch does."
try make_checkpoint step-1000
try reshard inspect step-1000 | lines 16
echo "..."
try reshard inspect step-1000 model.model.layers.0.mlp.down_proj.weight | lines 10

say "3  Tomorrow it is 2 x 4 ranks with tensor parallelism. What would that take?"
try reshard plan step-1000 --mesh dp=2,tp=4 --preset llama-tp
say "   Then do it. The optimizer's state goes with its parameters."
try reshard convert step-1000 step-1000-tp4 --mesh dp=2,tp=4 --preset llama-tp
try reshard inspect step-1000-tp4 model.model.layers.0.mlp.down_proj.weight

say "4  And for serving, one folder that transformers loads: the model alone, under its own names."
try reshard merge step-1000 hf --verify 2>/dev/null
try reshard inspect hf | lines 5
echo "..."

say "5  The proof. Every tensor of both layouts, and of all tensors in one file, bit by bit:"
try reshard merge step-1000 all.safetensors --all --quiet
try reshard diff step-1000 step-1000-tp4
try reshard diff step-1000 all.safetensors
try reshard diff step-1000-tp4 all.safetensors
say "   A digest depends on the values, the dtype and the shape, not on the layout:"
for checkpoint in step-1000 step-1000-tp4 all.safetensors; do
    try reshard digest "$checkpoint" --only lm_head.weight.exp_avg$
done
say "   And everything that was written is whole:"
for checkpoint in step-1000-tp4 hf; do
    try reshard verify "$checkpoint"
done
