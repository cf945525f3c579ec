#!/bin/sh
# Runs each command line with reshard in one process and with reshard-mpi on three ranks. Both must print the same,
# exit with the same code and write the same files.
#
# $RESHARD and $RESHARD_MPI are the two commands. Times and sizes of memory are removed from the output. MPI and mpirun
# may print to standard error too, so only lines that the one process prints, and errors of reshard, are compared.
cd "$(dirname "$0")/.." || exit 1
GOLDEN=$PWD/golden one=${RESHARD:-$PWD/../build/reshard} many=${RESHARD_MPI:-$PWD/../build/reshard-mpi}
[ -x "$many" ] || { echo "1..0 # SKIP no reshard-mpi was built: there is no mpicc"; exit 0; }
command -v mpirun > /dev/null || { echo "1..0 # SKIP there is no mpirun"; exit 0; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_base_warn_component_unused=0
export LC_ALL=C.UTF-8
work=$(mktemp -d) n=0 failed=0
trap 'rm -rf "$work"' EXIT
mkdir "$work/one" "$work/many"

# Lets every rank print a warning first, as MPI does in a container without /sys.
cat > "$work/noisy" << EOF
#!/bin/sh
echo "hwloc/linux: failed to find sysfs files (a warning that reshard did not print)" >&2
exec "$many" "\$@"
EOF
chmod +x "$work/noisy"
many=$work/noisy

plain() {
    sed -e '/^time  /d' -e '/^space  /d' -e '/^memory   buffers of [0-9]/d' \
        -e 's/, "seconds": [0-9.]*//' -e 's/"memory": [0-9]*/"memory": N/' -e 's/, "free": [0-9]*//' "$1"
}

# known EXPECTED: prints the lines of standard input that are in the file, or are errors of reshard.
known() {
    awk -v file="$1" 'BEGIN { while ((getline line < file) > 0) expected[line] } ($0 in expected) || /^reshard/'
}

# same CODE LABEL ARGS: runs both commands, which must exit with the code.
same() {
    echo "$1" > "$work/code"
    label=$2
    shift 2
    n=$((n + 1)) bad=
    (cd "$work/one" && "$one" "$@" > ../one.out 2> ../one.err < /dev/null; echo $? > ../one.code)
    (cd "$work/many" && mpirun -np 3 "$many" "$@" > ../many.out 2> ../many.err < /dev/null; echo $? > ../many.code)
    for what in out err; do
        plain "$work/one.$what" > "$work/expected"
        plain "$work/many.$what" > "$work/got"
        [ $what = out ] || { known "$work/expected" < "$work/got" > "$work/known"; mv "$work/known" "$work/got"; }
        diff "$work/expected" "$work/got" > "$work/difference" || { bad=1; sed "s/^/# $what: /" "$work/difference"; }
    done
    for who in one many; do
        diff "$work/code" "$work/$who.code" | sed "s/^/# code of $who: /" | grep . && bad=1
    done
    diff -r "$work/one" "$work/many" | sed 's/^/# files: /' | grep . && bad=1
    if [ -n "$bad" ]; then
        echo "not ok $n - $label"
        failed=1
    else
        echo "ok $n - $label"
    fi
}

# both COMMAND: runs a command in both directories.
both() {
    (cd "$work/one" && eval "$1")
    (cd "$work/many" && eval "$1")
}

fsdp=$GOLDEN/fsdp2_tp_adamw/ckpt
same 0 "convert to safetensors" convert "$fsdp" safe --format safetensors
same 0 "convert to DCP of another layout, verified" convert "$fsdp" dcp8 --format dcp --mesh 8 --default 'S(0)' --verify
same 0 "convert, compressed" convert "$fsdp" zstd --format dcp --mesh 4 --default 'S(0)' --compress zstd --json
same 0 "convert back" convert zstd back.safetensors
same 3 "already exists" convert "$fsdp" safe --format safetensors
same 0 "replaced with --force" convert "$fsdp" safe --format safetensors --force -q
same 0 "a dry run" convert "$fsdp" dry --format dcp --mesh 2 --default R --dry-run
same 0 "merge in shards" merge "$GOLDEN/fsdp2_adamw/ckpt" hf --max-shard-size 4kB --verify
same 0 "split" split hf tp --mesh tp=4 --default 'S(0)' --json
same 0 "digest" digest dcp8
same 0 "digest as JSON" digest zstd --json --only weight
same 0 "verify" verify dcp8
same 0 "diff of equal checkpoints" diff safe dcp8
both 'printf "\1" | dd of=safe/model.safetensors bs=1 seek=30000 conv=notrunc 2>/dev/null'
same 1 "diff of different checkpoints" diff safe dcp8
both 'head -c 300 /dev/zero | tr "\0" "\7" | dd of=dcp8/__1_0.distcp bs=1 seek=3200 conv=notrunc 2>/dev/null'
same 1 "verify finds damage" verify dcp8
same 1 "as JSON" verify dcp8 --json
same 4 "convert refuses damaged data" convert dcp8 never --format safetensors
same 4 "no such checkpoint" digest nothing
same 2 "no such option" verify --no-such-option dcp8
same 3 "a rule that nothing matches" convert "$fsdp" never --format dcp --mesh 2 --place 'nothing=S(0)'
same 0 "help" merge --help

n=$((n + 1))
mpirun -np 2 "$many" inspect "$fsdp" > "$work/out" 2> "$work/err"
if [ $? = 2 ] && grep -q 'runs in one process only: use '"'"'reshard inspect'"'"'' "$work/err"; then
    echo "ok $n - inspect is for one process"
else
    echo "not ok $n - inspect is for one process"
    failed=1
fi

# reports CODE LABEL TEXT FIRST : SECOND: runs two ranks with different arguments. The error is printed once, and both
# exit at once.
reports() {
    code=$1 label=$2 text=$3
    shift 3
    first=
    while [ "$1" != : ]; do
        first="$first $1"
        shift
    done
    shift
    n=$((n + 1))
    timeout 60 mpirun -np 1 "$many" $first : -np 1 "$many" "$@" > "$work/out" 2> "$work/err" < /dev/null
    got=$?
    if [ $got = "$code" ] && [ "$(grep -c "$text" "$work/err")" = 1 ] && [ ! -s "$work/out" ]; then
        echo "ok $n - $label"
    else
        echo "not ok $n - $label"
        echo "# exit code $got"
        sed 's/^/# /' "$work/out" "$work/err"
        failed=1
    fi
}

reports 4 "a rank without the checkpoint reports it once" 'rank 1: .*gone' digest "$fsdp" : digest "$work/gone"
reports 2 "rank 1 has an option that is none" 'digest: rank 1: .*--nope' digest "$fsdp" : digest --nope "$fsdp"
reports 2 "rank 0 has it" 'digest: .*--nope' digest --nope "$fsdp" : digest "$fsdp"
reports 2 "rank 1 has no verb" 'reshard: rank 1: a verb is needed' digest "$fsdp" :
reports 2 "rank 1 has a verb of one process" 'inspect: rank 1: runs in one' digest "$fsdp" : inspect "$fsdp"
reports 2 "rank 1 only prints its version" 'reshard digest: rank 1 was started' digest "$fsdp" : --version
reports 2 "rank 1 does not see the rules" 'convert: rank 1: .*gone.rules' \
    convert "$fsdp" "$work/never" --format dcp --mesh 2 --default R : \
    convert "$fsdp" "$work/never" --format dcp --mesh 2 --default R --rules "$work/gone.rules"
reports 3 "rank 1 looks for other names" "digest: rank 1: --only 'nothing'" digest "$fsdp" : digest --only nothing "$fsdp"
# In a program: save and load.
if [ -n "${MPI_TESTS:-}" ]; then
    n=$((n + 1))
    mkdir "$work/files"
    if ASAN_OPTIONS=detect_leaks=0 mpirun -np 3 "$MPI_TESTS/test_mpi_files" "$work/files" > "$work/out" 2>&1; then
        echo "ok $n - ranks save together and load in another layout"
    else
        echo "not ok $n - ranks save together and load in another layout"
        sed 's/^/# /' "$work/out"
        failed=1
    fi
fi
echo "1..$n"
exit $failed
