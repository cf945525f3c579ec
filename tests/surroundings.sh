#!/bin/sh
# Disks that are full or may not be written, and folders with ten thousand files.
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
        sed 's/^/# /' said 2> /dev/null
        failed=1
    fi
}
skip() { n=$((n + 1)) && echo "ok $n - $1 # SKIP $2"; }
exits() { # code, arguments: what is said is in `said`, what is printed in `printed`
    code=$1
    shift
    "$reshard" "$@" > printed 2> said
    [ $? = "$code" ]
}
says() { grep -qF -- "$1" said; }
nothing() { ! [ -s "$1" ]; }
gone() { ! [ -e "$1" ]; }
convert_to() { exits "$1" convert "$golden" "$2" --mesh 6 --preset fsdp "$3"; }

mkdir disk
if mount -t tmpfs -o size=128k tmpfs disk 2> /dev/null; then
    mounted=1
    check "a full disk exits with 5" convert_to 5 disk/out --json
    check "and says so" says "No space left on device"
    check "and how to go on" says "disk/out.reshard-part; continue with --resume"
    check "and prints nothing" nothing printed
    check "and there is no result" gone disk/out
    mount -o remount,size=2m disk
    check "with more space --resume finishes" convert_to 0 disk/out --resume
    check "and the result is the same" exits 0 diff "$golden" disk/out
    mount -o remount,size=1100k disk
    head -c 2000000 /dev/zero > disk/fill 2> /dev/null
    check "a tensor does not fit either" exits 5 extract "$golden" model.up.weight disk/x.npy
    check "and no part of it is left" gone disk/x.npy.reshard-part
    check "nor a picture" exits 5 inspect "$golden" model.up.weight --svg disk/x.svg
    check "and no part of it is left" gone disk/x.svg.reshard-part
    mount -o remount,ro disk
    check "a disk that may not be written exits with 5" convert_to 5 disk/new -q
    check "and says so" says "Read-only file system"
    umount disk && mounted=
else
    skip "a full disk" "only root can make a small one"
fi
check "no folder to write into exits with 5" convert_to 5 nosuch/deep/out -q
check "and makes none" gone nosuch

# Ten thousand files take their time on a disk, which waits for each of them.
if [ -w /dev/shm ] && many=$(mktemp -d -p /dev/shm); then
    cat > shape <<'EOF'
{"w":{"dtype":"U8","shape":[10000,3],"data_offsets":[0,30000]}}
EOF
    { printf '\100\0\0\0\0\0\0\0' && cat shape && head -c 30000 "$reshard"; } > w.safetensors
    check "ten thousand ranks" exits 0 convert w.safetensors "$many/out" --format dcp --mesh 10000 --preset fsdp -q
    check "have a file each" [ "$(find "$many/out" -name '*.distcp' | wc -l)" = 10000 ]
    check "all of which are right" exits 0 verify "$many/out"
    check "and are listed" exits 0 inspect "$many/out" --json
    check "and hold what was there" exits 0 diff w.safetensors "$many/out"
    rm "$many/out/__77_0.distcp"
    check "one that is missing is found" exits 1 verify "$many/out"
    check "and named" grep -q '__77_0.distcp: w' printed
    check "and nothing can be made of it" exits 4 merge "$many/out" x
else
    skip "ten thousand files" "no /dev/shm to put them into"
fi
echo "1..$n"
exit $failed
