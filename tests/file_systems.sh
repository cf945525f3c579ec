#!/bin/sh
# File systems that are full or read-only, and directories with ten thousand files.
golden=$(cd "$(dirname "$0")/golden" && pwd)/fsdp2_adamw/ckpt
reshard=${RESHARD:?where is the command?}
work=$(mktemp -d) n=0 failed=0 mounted=
trap 'cd /; [ -z "$mounted" ] || umount "$work/disk"; rm -rf "$work" "$many"' EXIT
cd "$work" || exit 1

check() { # name, command...
    n=$((n + 1)) name=$1
    shift
    if "$@"; then
        echo "ok $n - $name"
    else
        echo "not ok $n - $name"
        sed 's/^/# /' errors 2> /dev/null
        failed=1
    fi
}
skip() { n=$((n + 1)) && echo "ok $n - $1 # SKIP $2"; }
exits() { # code, arguments: runs reshard, with its standard output in `printed` and its errors in `errors`
    code=$1
    shift
    "$reshard" "$@" > printed 2> errors
    [ $? = "$code" ]
}
reports() { grep -qF -- "$1" errors; }
nothing() { ! [ -s "$1" ]; }
gone() { ! [ -e "$1" ]; }
convert_to() { exits "$1" convert "$golden" "$2" --mesh 6 --preset fsdp "$3"; }

mkdir disk
if mount -t tmpfs -o size=128k tmpfs disk 2> /dev/null; then
    mounted=1
    check "too little space exits with 3" convert_to 3 disk/out --json
    check "the error names the space" reports "but its file system has 131072 free"
    check "nothing was begun" gone disk/out.reshard-part
    check "standard output is empty" nothing printed
    check "a dry run with too little space exits with 3" convert_to 3 disk/out --dry-run
    check "its error names the space" reports "but its file system has 131 kB free"
    mount -o remount,size=44k disk
    check "a disk that fills up exits with 5" convert_to 5 disk/out --compress=zstd
    check "the error names the cause" reports "No space left on device"
    check "a note says how to continue" reports "disk/out.reshard-part; continue with --resume"
    check "the output does not exist" gone disk/out
    mount -o remount,size=2m disk
    check "with more space --resume completes it" exits 0 convert "$golden" disk/out --mesh 6 --preset fsdp --compress zstd --resume
    check "the tensors are the same" exits 0 diff "$golden" disk/out
    mount -o remount,size=1100k disk
    head -c 2000000 /dev/zero > disk/fill 2> /dev/null
    check "extract to a full disk exits with 3" exits 3 extract "$golden" model.up.weight disk/x.npy
    check "its error names the space" reports "disk/x.npy needs 5.12 kB, but its file system has 0 B free"
    check "extract begins no file" gone disk/x.npy.reshard-part
    check "extract of several tensors to a full disk exits with 3" exits 3 extract "$golden" disk/many --only up
    check "and creates no directory" gone disk/many
    check "a picture on a full disk exits with 5" exits 5 inspect "$golden" model.up.weight --svg disk/x.svg
    check "inspect leaves no file" gone disk/x.svg.reshard-part
    mount -o remount,ro disk
    check "a read-only file system exits with 5" convert_to 5 disk/new -q
    check "the error names the cause" reports "Read-only file system"
    umount disk && mounted=
else
    skip "a full disk" "only root can mount a small one"
fi
check "an output in a missing directory exits with 5" convert_to 5 nosuch/deep/out -q
check "the missing directory is not created" gone nosuch

# In memory, because every file is flushed, which is slow on a disk.
if [ -w /dev/shm ] && many=$(mktemp -d -p /dev/shm); then
    cat > shape <<'EOF'
{"w":{"dtype":"U8","shape":[10000,3],"data_offsets":[0,30000]}}
EOF
    { printf '\100\0\0\0\0\0\0\0' && cat shape && head -c 30000 "$reshard"; } > w.safetensors
    check "convert to ten thousand ranks" exits 0 convert w.safetensors "$many/out" --format dcp --mesh 10000 --preset fsdp -q
    check "every rank has a file" [ "$(find "$many/out" -name '*.distcp' | wc -l)" = 10000 ]
    check "verify finds no damage" exits 0 verify "$many/out"
    check "inspect lists the files" exits 0 inspect "$many/out" --json
    check "the tensors are the same" exits 0 diff w.safetensors "$many/out"
    rm "$many/out/__77_0.distcp"
    check "verify finds a missing file" exits 1 verify "$many/out"
    check "verify names it" grep -q '__77_0.distcp: No such file.*: w$' printed
    check "merge refuses a checkpoint with a missing file" exits 4 merge "$many/out" x
else
    skip "ten thousand files" "no /dev/shm"
fi
echo "1..$n"
exit $failed
