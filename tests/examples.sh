#!/bin/sh
# Runs the examples, built with sanitizers as the tests are, and compares their output.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
reshard=${RESHARD:?where is the command?} examples=${EXAMPLES:?where are the examples?}
n=0 failed=0
check() {
    n=$((n + 1))
    if [ "$1" = "$2" ]; then
        echo "ok $n - $3"
    else
        echo "not ok $n - $3"
        echo "# '$1' is not '$2'"
        failed=1
    fi
}

got=$("$examples/move" 'f32[97,31] : 4:S0 -> 2x3:S1,S0' 2>&1)
check "$got" "3007 elements on 4 ranks -> 3007 elements on 6 ranks: 0 are wrong" "move"

got=$("$examples/move" 'f32[9,4] : { 0:9,0:1 | 0:9,1:2 ; 0:9,2:4 } -> 3 ranks=5,1,3:S0' 2>&1)
check "$got" "36 elements on 2 ranks -> 36 elements on 3 ranks: 0 are wrong" "move, with ranks that have two arrays, or none"

got=$("$examples/sockets" 'f32[301,47] : 4:S0 -> 2x2:S1,S0' 2>&1)
check "$got" "4 processes: 0 elements are wrong" "sockets"

if [ -n "${CPP_EXAMPLE-}" ]; then
    got=$("$CPP_EXAMPLE" 'f32[8,6] : 4:S0 -> 2x2:S0,S1' 1 2>&1)
    check "$got" "rank 1 before: [2,6], 48 bytes
rank 1 after: [4,3], 48 bytes
96 bytes move in 4 messages
24 bytes from rank 0
24 bytes from rank 1" "plan, in C++"
    got=$("$CPP_EXAMPLE" 'f32[8] : 2:S0 -> { 0:2; 4:8 | 2:4 }' 0 2>&1 > /dev/null)
    check "$got" "EINVAL: rank 0 has 2 arrays in the layout; use rsd_layout_arrays_of and rsd_layout_array" "plan, in C++, of a rank with two arrays"
else
    n=$((n + 1))
    echo "ok $n - plan, in C++ # SKIP no C++ compiler found"
fi

got=$("$examples/make_checkpoint" ckpt 2>&1)
check "$got" "ckpt: 156 tensors, 11359233 bytes in 8 files of 8 ranks" "make_checkpoint"
got=$("$examples/make_checkpoint" --help 2>&1)
check "$got" "usage: make_checkpoint [--fused] PATH [MESH [PLACEMENTS]]" "an unknown option is not taken for a path"
"$reshard" verify -q ckpt
check $? 0 "verify finds no damage in its output"

"$examples/make_checkpoint" other dp=2,tp=3 'R,S(0)' > /dev/null
"$reshard" diff -q ckpt other
check $? 0 "the tensors are the same on another mesh"

"$examples/make_checkpoint" --fused fused > /dev/null
got=$("$examples/load_slice" ckpt model.lm_head.weight 'tp=4 : S(0)' 1 2>&1)
check "${got%, digest*}" "rank 1 has bf16[250,128]: 64000 bytes, 64000 read" "load_slice"
same=$("$examples/load_slice" other model.lm_head.weight '4 : S(0)' 1 2>&1)
check "${got#*digest}" "${same#*digest}" "load_slice from another layout"
got=$("$examples/load_slice" fused model.model.layers.0.self_attn.qkv_proj.weight \
    'tp=4 : S(0;128,64,64)' 3 2>&1)
check "${got%, digest*}" "rank 3 has bf16[64,128]: 16384 bytes, 16384 read" "load_slice of a fused weight"

got=$("$examples/export_weights" ckpt served 4 2>&1)
check "$got" "39 tensors, 2010096 bytes in 4 files, 119 left out" "export_weights"
"$reshard" merge -q ckpt model --cast bf16 2> /dev/null
"$reshard" diff -q served model
check $? 0 "its output has the tensors of merge"
got=$("$examples/export_weights" ckpt served 4 2>&1)
check "$got" "EEXIST: served already exists; set overwrite to replace it" "export_weights to a path that exists"

"$examples/mlp" > output 2>&1
check $? 0 "mlp"
got=$(sed -n '2,$p' output)
check "$got" "activations that all ranks have: 49152 bytes on each without the stash, 12288 with it
losses and gradients with and without it: the same, to the last bit" "with a quarter of the activations on each of 4 ranks"
got=$("$examples/mlp" 3 2>&1 | tail -1)
check "$got" "losses and gradients with and without it: the same, to the last bit" "on 3 ranks, which do not divide them"

if [ -n "${MPI_EXAMPLES-}" ] && command -v mpirun > /dev/null; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
        OMPI_MCA_mpi_yield_when_idle=1
    mpirun -np 4 "$MPI_EXAMPLES/mlp_mpi" > mpi_output 2> mpi_warnings
    check "$(cat mpi_output)" "$(cat output)" "mlp_mpi prints the same"
    got=$(mpirun -np 6 "$MPI_EXAMPLES/redistribute_mpi" 'f64[24,30,8] : 2x3:S0,S1 -> 4:S2' 2> /dev/null)
    check "$got" "5760 elements, 38400 bytes between ranks: 0 elements are wrong" "redistribute_mpi, 6 ranks to 4"
    got=$(mpirun -np 6 "$MPI_EXAMPLES/scalapack_mpi" 37 53  2 3 4 5  3 1 1 7 2> /dev/null)
    check "$got" "37x53 elements on a grid of 3x1: 0 are wrong" "scalapack_mpi, 2x3 processes to 3x1"
else
    n=$((n + 1))
    echo "ok $n - examples with MPI # SKIP MPI is not installed"
fi

echo "1..$n"
exit $failed
