#!/bin/sh
# Shows the main use of reshard: a checkpoint of 8 ranks is converted to other layouts.
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
# Prints a command as a user would type it, and runs it.
try() {
    printf '%s$' "$dim"
    for word; do
        case $word in *[!A-Za-z0-9_=,./:-]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '%s\n' "$plain"
    "$@"
}
lines() { sed "$1q"; }

say "1  A tensor is sharded over a mesh of 2 x 4 ranks, and is needed on 8 ranks in another layout."
try reshard plan 'f32[4096,4096] : dp=2,tp=4 : S(0),S(1) -> 8 : S(1)' --no-picture
say "   The same move in memory. Every element is computed from its index."
try move 'f32[4096,4096] : dp=2,tp=4 : S(0),S(1) -> 8 : S(1)'

say "2  Eight FSDP ranks save a small Llama and its optimizer, as PyTorch does."
try make_checkpoint step-1000
try reshard inspect step-1000 | lines 16
echo "..."
try reshard inspect step-1000 model.model.layers.0.mlp.down_proj.weight | lines 10

say "3  The next run has 2 x 4 ranks with tensor parallelism. What would a conversion read and write?"
try reshard plan step-1000 --mesh dp=2,tp=4 --preset llama-tp
say "   Convert it. Optimizer state is sharded as its parameters."
try reshard convert step-1000 step-1000-tp4 --mesh dp=2,tp=4 --preset llama-tp
try reshard inspect step-1000-tp4 model.model.layers.0.mlp.down_proj.weight

say "4  For serving, a directory that transformers loads: the model only, under its own names."
try reshard merge step-1000 hf --verify 2>/dev/null
try reshard inspect hf | lines 5
echo "..."

say "5  Compare all tensors of both layouts, and of one file with everything, bit by bit:"
try reshard merge step-1000 all.safetensors --all --quiet
try reshard diff step-1000 step-1000-tp4
try reshard diff step-1000 all.safetensors
try reshard diff step-1000-tp4 all.safetensors
say "   A digest depends on values, dtype and shape, not on the layout:"
for checkpoint in step-1000 step-1000-tp4 all.safetensors; do
    try reshard digest "$checkpoint" --only lm_head.weight.exp_avg$
done
say "   Verify what was written:"
for checkpoint in step-1000-tp4 hf; do
    try reshard verify "$checkpoint"
done
