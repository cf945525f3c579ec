#!/bin/sh
# Compares the libraries with the interface of the last release, and checks that a break is found: the description of that
# release is changed, so that the libraries differ from it.
tree=$(cd "$(dirname "$0")/.." && pwd) build=${BUILD_DIR:?where is the build?}
if ! command -v abidiff > /dev/null || ! command -v python3 > /dev/null; then
    echo "1..0 # SKIP abidiff is not installed (apt-get install abigail-tools)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n=0 failed=0
report() {
    n=$((n + 1))
    if [ "$1" = "$2" ]; then
        echo "ok $n - $3"
    else
        echo "not ok $n - $3"
        sed 's/^/# /' "$work/log"
        failed=1
    fi
}

# try_change STATUS TITLE PATTERN REPLACEMENT: replaces the first match in the description.
try_change() {
    cp "$tree"/tools/abi/*.abi "$work/"
    python3 - "$work/libreshard.abi" "$3" "$4" << 'END' || { echo "Bail out! $2: the pattern is not in the description"; exit 1; }
import re, sys
path, pattern, new = sys.argv[1:]
with open(path) as file:
    text, changes = re.subn(pattern, new, file.read(), count=1, flags=re.S)
with open(path, "w") as file:
    file.write(text)
sys.exit(changes != 1)
END
    "$tree/tools/abi.sh" check "$build" "$work" > "$work/log" 2>&1
    report $? "$1" "$2"
}

# without_last_field STRUCT: prints a pattern: what is before the size of a struct, what is between the size and the last
# field, the offset of the last field, and what is behind it.
without_last_field() {
    printf '%s' "(<class-decl name='$1' size-in-bits=')[0-9]+('(?:(?!</class-decl>).)*)" \
        "<data-member access='public' layout-offset-in-bits='([0-9]+)'>(?:(?!<data-member).)*</data-member>(\s*</class-decl>)"
}

"$tree/tools/abi.sh" check "$build" > "$work/log" 2>&1
report $? 0 "no program breaks that was built with the last release"
report "$(grep -c 'no program breaks' "$work/log")" "$(ls "$build/libreshard.so" "$build/libreshard_mpi.so" 2> /dev/null | wc -l)" \
    "every library is compared"
try_change 1 "a function that was removed is found" "name='rsd_version'" "name='rsd_removed'"
try_change 1 "another parameter is found" \
    "(<function-decl name='rsd_free'.*?)<parameter type-id='[^']*'/>" "\\1<parameter type-id='type-id-none'/>"
try_change 1 "a field at another offset is found" \
    "(<class-decl name='rsd_io'.*?layout-offset-in-bits=')384('.*?<var-decl name=')timeout" "\\g<1>352\\2before"
try_change 1 "a struct without struct_nbytes that grew is found" "$(without_last_field rsd_region)" "\\g<1>\\3\\2\\4"
try_change 1 "another value of an enum is found" "(<enumerator name='RSD_EPEER' value=')30" "\\g<1>29"
try_change 0 "a struct with struct_nbytes may grow" "$(without_last_field rsd_io)" "\\g<1>\\3\\2\\4"
try_change 0 "an enum may have another value at its end" "\\s*<enumerator name='RSD_ETIMEOUT' value='31'/>" ""

echo "1..$n"
exit $failed
