#!/bin/sh
# Shared extents, on an XFS and a btrfs that are made in files and mounted: what is shared, that the bytes are the
# same as without, and the message where nothing can be shared. The command is $RESHARD. Needs root.
cd "$(dirname "$0")" || exit 1
command=${RESHARD:?where is the command?} n=0 failed=0
work=$(mktemp -d)
trap 'for m in "$work"/*.mount; do umount "$m" 2>/dev/null; done; rm -rf "$work"' EXIT

check()
{
    n=$((n + 1))
    name=$1
    shift
    if "$@" > "$work/output" 2>&1; then
        echo "ok $n - $name"
    else
        echo "not ok $n - $name"
        sed 's/^/# /' "$work/output"
        failed=1
    fi
}

# shared REPORT LEAST: at least so many percent of the bytes are shared.
shared()
{
    sed 's/.*"needed": \([0-9]*\).*"shared": \([0-9]*\).*/\1 \2/; t; d' "$1" > "$work/numbers"
    read -r needed found < "$work/numbers" || { cat "$1"; return 1; }
    echo "$found of $needed bytes"
    [ $((found * 100)) -ge $((needed * $2)) ]
}

# A checkpoint of 4 tensors of 4 MiB, one of 200,008 bytes, and small ones: raw bytes as safetensors.
make_input()
{
    python3 - "$1" <<'EOF'
import json, os, random, struct, sys
random.seed(1)
sizes = {f"w{i}": [1024, 4096] for i in range(4)}
sizes.update({"odd": [200008], "bias": [77], "norm": [4096]})
header, at, data = {}, 0, []
for name, shape in sizes.items():
    n = shape[0] * (shape[1] if len(shape) > 1 else 1)
    header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + n]}
    data.append(random.randbytes(n))
    at += n
text = json.dumps(header).encode()
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + b"".join(data))
EOF
}

run()
{
    "$command" "$@" --json > "$work/report" || return 1
    cat "$work/report"
}

try_on()
{
    here=$work/$1.mount
    check "$1: a checkpoint of 8 ranks" run convert "$work/in.safetensors" "$here/ranks" --format dcp --mesh 8 --preset fsdp
    check "$1: merged" run merge "$here/ranks" "$here/hf"
    check "$1: 95 % is shared" shared "$work/report" 95
    check "$1: the CRCs are checked" grep -q '"unchecked": 0,' "$work/report"
    check "$1: merged without sharing" run merge "$here/ranks" "$here/copied" --reflink never
    check "$1: nothing is shared then" sh -c '! grep shared "$1"' sh "$work/report"
    check "$1: the bytes are the same" cmp "$here/hf/model.safetensors" "$here/copied/model.safetensors"
    check "$1: merged unchecked" run merge "$here/ranks" "$here/unchecked" --unchecked --reflink always
    check "$1: 95 % is shared then, too" shared "$work/report" 95
    check "$1: little is read" sh -c '! grep -q "\"read\": [0-9]\{8\}" "$1"' sh "$work/report"
    check "$1: the bytes are the same again" cmp "$here/hf/model.safetensors" "$here/unchecked/model.safetensors"
    check "$1: and back" run convert "$here/hf" "$here/back" --format dcp --mesh 8 --preset fsdp
    check "$1: 95 % is shared" shared "$work/report" 95
    check "$1: what came back is whole" "$command" verify "$here/back"
    check "$1: and the same" "$command" diff "$here/back" "$work/in.safetensors"
    check "$1: split" run split "$here/ranks" "$here/split" --mesh 2 --preset fsdp
    check "$1: 95 % is shared" shared "$work/report" 95
    check "$1: what was split is the same" "$command" diff "$here/split" "$work/in.safetensors"
    check "$1: as torch places it" run convert "$here/ranks" "$here/places" --torch-places --format dcp
    check "$1: it is the same so, too" "$command" diff "$here/places" "$work/in.safetensors"
}

make_input "$work/in.safetensors"
for system in xfs btrfs; do
    if ! command -v mkfs.$system > /dev/null; then
        n=$((n + 1)) && echo "ok $n - $system # SKIP mkfs.$system is not installed"
        continue
    fi
    mkdir "$work/$system.mount"
    truncate -s 400M "$work/$system.image"
    [ $system = xfs ] && options="-m reflink=1" || options=
    # shellcheck disable=SC2086
    if mkfs.$system -q $options "$work/$system.image" > /dev/null 2>&1 &&
        mount -o loop "$work/$system.image" "$work/$system.mount" 2> "$work/output"; then
        try_on $system
    else
        n=$((n + 1)) && echo "ok $n - $system # SKIP cannot be mounted: $(head -1 "$work/output")"
    fi
done

# Across file systems nothing can be shared; most test machines have no shared extents in TMPDIR either.
if [ -d "$work/xfs.mount/ranks" ]; then
    check "across file systems it is copied" run merge "$work/xfs.mount/ranks" "$work/elsewhere"
    check "or refused" sh -c '"$1" merge "$2" "$3" --reflink always; [ $? = 3 ]' sh "$command" "$work/xfs.mount/ranks" "$work/refused"
    check "and nothing is left" sh -c '! ls -d "$1"* 2>/dev/null' sh "$work/refused"
fi
echo "1..$n"
exit $failed
