#!/bin/sh
# A merge that shares extents beside cp, on an XFS in a file, in turns. Needs root.
#
#     make bench-reflink [GB=4]
#
# The checkpoint of 8 ranks was just written, so it is in memory, for cp as well. The merge is on disk when it returns,
# which cp is not: the time of cp and sync is printed too. On the file system of build/ nothing is shared if it cannot.
set -eu
command=${RESHARD:?where is the command?} gigabytes=${GB:-4}
work=$(mktemp -d "${BUILD:-build}/bench-reflink.XXXXXX")
trap 'umount "$work/xfs" 2>/dev/null; rm -rf "$work"' EXIT

# Llama-like layers in bfloat16, as one file of safetensors.
make_input()
{
    python3 - "$1" "$gigabytes" <<'END'
import json, os, struct, sys
header, at = {}, 0
for layer in range(max(1, round(float(sys.argv[2]) * 1e9 / 436e6))):
    for name, *shape in (("q", 4096, 4096), ("k", 1024, 4096), ("v", 1024, 4096), ("o", 4096, 4096), ("norm", 4096),
                         ("gate", 14336, 4096), ("up", 14336, 4096), ("down", 4096, 14336)):
        n = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"layers.{layer}.{name}"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
        at += n
text = json.dumps(header).encode()
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    block = os.urandom(1 << 24)
    for _ in range(at >> 24):
        file.write(block)
    file.write(block[:at & ((1 << 24) - 1)])
END
}

# seconds COMMAND: how long it takes.
seconds()
{
    begin=$(date +%s%N)
    "$@" > /dev/null
    echo $((($(date +%s%N) - begin) / 1000000))
}

# least FILE: the smallest number.
least()
{
    sort -n "$1" | head -1
}

# compare DIRECTORY: merges and copies what is there, in turns.
compare()
{
    for _ in 1 2 3; do
        rm -rf "$1/hf" "$1/unchecked" "$1/never" "$1/copy"
        sync -f "$1"
        cat "$1"/ranks/* > /dev/null
        seconds "$command" merge "$1/ranks" "$1/hf" --quiet >> "$1/merge.ms"
        seconds "$command" merge "$1/ranks" "$1/unchecked" --quiet --unchecked >> "$1/unchecked.ms"
        seconds "$command" merge "$1/ranks" "$1/never" --quiet --reflink never >> "$1/never.ms"
        rm -rf "$1/never"
        sync -f "$1"
        seconds cp -r --reflink=never "$1/ranks" "$1/copy" >> "$1/cp.ms"
        seconds sh -c 'sync -f "$1"' sh "$1/copy" >> "$1/sync.ms"
    done
    cp=$(least "$1/cp.ms") both=$(paste -d+ "$1/cp.ms" "$1/sync.ms" | bc | sort -n | head -1)
    for what in merge unchecked never; do
        n=$(least "$1/$what.ms")
        echo "$2 $what: $n ms, $(echo "scale=3; $n / $cp" | bc) x cp ($cp ms), $(echo "scale=3; $n / $both" | bc) x cp and sync ($both ms)"
    done
}

mkdir "$work/xfs" "$work/here"
truncate -s "$((gigabytes * 5))G" "$work/image"
mkfs.xfs -q -m reflink=1 "$work/image"
mount -o loop "$work/image" "$work/xfs"
for place in xfs here; do
    make_input "$work/$place/in.safetensors"
    "$command" convert "$work/$place/in.safetensors" "$work/$place/ranks" --format dcp --mesh 8 --preset fsdp --quiet
    rm "$work/$place/in.safetensors"
    compare "$work/$place" "$place"
    rm -rf "$work/${place:?}"/*
done
