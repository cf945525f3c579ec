#!/bin/sh
# Command tests: each tests/cli/NAME.sh is run with `reshard` on its path, in an empty folder, and what
# it prints on both streams must be what stands beside it in NAME.out. RECORD=1 writes that file anew;
# look at the difference before it is committed.
cd "$(dirname "$0")/cli" || exit 1
here=$PWD bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
ln -s "${RESHARD:?where is the command?}" "$bin/reshard"
PATH=$bin:$PATH LC_ALL=C.UTF-8
export PATH LC_ALL
n=0 failed=0
for script in *.sh; do
    name=${script%.sh} n=$((n + 1)) work=$(mktemp -d)
    (cd "$work" && sh "$here/$script") > "$bin/got" 2>&1
    rm -rf "$work"
    [ -z "${RECORD-}" ] || cp "$bin/got" "$name.out"
    if diff "$name.out" "$bin/got" > "$bin/difference" 2>&1; then
        echo "ok $n - $name"
    else
        echo "not ok $n - $name"
        sed 's/^/# /' "$bin/difference"
        failed=1
    fi
done
echo "1..$n"
exit $failed
