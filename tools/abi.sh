#!/bin/sh
# abi.sh check|record BUILD [DIRECTORY]   compares the interface of the built libraries with its description in a directory
# (tools/abi, that of the last release), or writes the description. Prints what breaks programs, and exits 1 if something
# does. New functions, new values of enums, and new fields at the end of a struct with struct_nbytes break none.
set -eu
cd "$(dirname "$0")/.."
verb=$1 build=$2 described=${3:-tools/abi}
libraries=libreshard
[ ! -e "$build/libreshard_mpi.so" ] || libreshard_mpi_built=yes
libraries="$libraries ${libreshard_mpi_built:+libreshard_mpi}"

if [ "$verb" = record ]; then
    mkdir -p "$described"
    for library in $libraries; do
        abidw --headers-dir include --drop-private-types --exported-interfaces-only --no-corpus-path --no-comp-dir-path \
            --no-show-locs --no-elf-needed --no-write-default-sizes --no-parameter-names --type-id-style hash \
            --out-file "$described/$library.abi" "$build/$library.so"
        echo "$described/$library.abi"
    done
    exit 0
fi

# The structs that may grow.
mkdir -p "$build/abi"
for name in $(grep -h -A1 '^typedef struct rsd_[a-z_]* {' include/*.h | grep -B1 'size_t struct_nbytes' |
    sed -n 's/^typedef struct \(.*\) {/\1/p'); do
    printf '[suppress_type]\ntype_kind = struct\nname = %s\nhas_data_member_inserted_at = end\n\n' "$name"
done > "$build/abi/grow.suppr"

bad=0
for library in $libraries; do
    machine=$(sed -n "1s/.*architecture='elf-\([^']*\)'.*/\1/p" "$described/$library.abi")
    [ "$machine" = "amd-$(uname -m)" ] || { echo "$library: described for $machine, not compared on $(uname -m)"; continue; }
    readelf -S "$build/$library.so" | grep -q '[.]debug_info' ||
        echo "$library: built without -g, only the names of functions are compared"
    if abidiff --no-added-syms --suppr "$build/abi/grow.suppr" \
        "$described/$library.abi" "$build/$library.so" > "$build/abi/$library.txt" 2>&1; then
        echo "$library: no program breaks"
    else
        echo "$library: programs that were built with the last release break:"
        cat "$build/abi/$library.txt"
        bad=1
    fi
done
exit $bad
