#!/bin/sh
# What this project is for, on a fresh machine.
set -eu
build=$1
problem='f32[4096,4096] : dp=2,tp=4 : S(0),S(1) -> 6 : S(1)'
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] && [ -z "${NO_COLOR-}" ] || say() { printf '\n%s\n' "$*"; }

say "A tensor lies on a mesh of 2 x 4 ranks, and is needed on 6 ranks, cut another way:"
echo "\$ reshard plan '$problem'"
"$build/reshard" plan "$problem"

say "The same move, done in this process; every element holds a value made from its own index:"
echo "\$ examples/move '$problem'"
"$build/examples/move" "$problem"
