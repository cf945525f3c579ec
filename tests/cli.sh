#!/bin/sh
# Tests of the command: each tests/cli/NAME.sh runs in an empty directory, and its output on both streams must be
# NAME.out. RECORD=1 writes these files again; review the difference before it is committed. Times, memory and
# free space, which differ from run to run, are removed from the output.
#
# A script has checkpoints that torch wrote in $GOLDEN, and two commands: `try ARGS` runs reshard and prints its
# exit code, `json` reads JSON from standard input and prints what is wrong with it. With arguments, only those
# scripts run.
cd "$(dirname "$0")/cli" || exit 1
here=$PWD bin=$(mktemp -d) GOLDEN=$(cd ../golden && pwd)
trap 'rm -rf "$bin"' EXIT
ln -s "${RESHARD:?where is the command?}" "$bin/reshard"
cat > "$bin/try" <<'EOF'
#!/bin/sh
reshard "$@"
echo "exit $?"
EOF
cat > "$bin/json" <<'EOF'
#!/bin/sh
if command -v python3 > /dev/null; then python3 -c 'import json, sys; json.load(sys.stdin)'; else cat > /dev/null; fi
EOF
chmod +x "$bin/try" "$bin/json"
PATH=$bin:$PATH LC_ALL=C.UTF-8
export PATH LC_ALL GOLDEN
n=0 failed=0
[ $# -gt 0 ] || set -- *.sh
for script; do
    name=$(basename "$script" .sh) n=$((n + 1)) work=$(mktemp -d)
    (cd "$work" && sh "$here/$name.sh") 2>&1 |
        sed -e '/^time  /d' -e '/^space  /d' -e '/^memory   buffers of [0-9]/d' -e 's/, "seconds": [0-9.]*//' -e 's/, "free": [0-9]*//' -e 's/"memory": [0-9]*/"memory": N/' \
            -e "s|$GOLDEN|GOLDEN|g" > "$bin/got"
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
