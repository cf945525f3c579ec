#!/bin/sh
# Checks the source tree: which module includes which, one name per file, the length of files, and the
# words and names in them (tools/names.py). Prints one line per finding and exits 1 if there is one.
set -u
bad=0
complain() { echo "check_tree: $*"; bad=1; }

# The modules that a module builds on directly. It may include their headers and those that they build on.
builds_on() {
    case $1 in
    layout | codec | store) echo base ;;
    plan | memory) echo layout ;;
    peer | cuda) echo memory ;;
    exec) echo plan memory peer ;;
    format) echo memory codec store ;;
    transfer) echo plan memory format ;;
    checkpoint) echo transfer peer ;;
    mpi) echo cli ;;
    esac
}
may_include() {
    for below in $(builds_on "$1"); do
        echo "$below"
        may_include "$below"
    done
}

for module in $(ls src); do
    allowed=" $(may_include "$module" | tr '\n' ' ')"
    for file in src/"$module"/*.[ch]; do
        for header in $(sed -n 's/^#include "\(.*\)"/\1/p' "$file"); do
            [ -e "src/$module/$header" ] || [ -e "include/$header" ] && continue
            used=$(basename "$(dirname "$(ls src/*/"$header")")")
            case "$allowed" in
            *" $used "*) ;;
            *) complain "$file includes $header of $used" ;;
            esac
            # A private header is one that is not named after its module; codec has one header per codec.
            [ "$used" = codec ] || [ "$header" = "$used.h" ] ||
                complain "$file includes $header, which is private to $used"
        done
        case $module in mpi) ;; *)
            grep -q '^#include <mpi.h>' "$file" && complain "$file includes mpi.h" ;;
        esac
    done
done

# Only the table of memory kinds and the kind itself know CUDA. reshard_cuda.h is public.
grep -rniE cuda src/exec src/transfer src/checkpoint src/memory |
    grep -vE '#include "reshard_cuda.h"|^src/memory/(kinds.c:.*cuda_kind|memory.h:.*"CUDA device 0")' |
    sed 's/^/check_tree: names CUDA: /' | grep . && bad=1

# One name, one file.
git ls-files -co --exclude-standard --deduplicate 'src/*' 'tests/*.[ch]' 'fuzz/*.[ch]' 'bench/*.[ch]' 'examples/*' |
    while read -r file; do [ -e "$file" ] && basename "$file"; done |
    sort | uniq -d | while read -r name; do echo "check_tree: two files are named $name"; done |
    grep . && bad=1

for file in $(git ls-files -co --exclude-standard --deduplicate '*.c' '*.h' '*.py' '*.sh'); do
    [ -e "$file" ] || continue
    lines=$(wc -l < "$file")
    [ "$lines" -le 600 ] || complain "$file has $lines lines; the limit is 600"
    case $file in *utils* | *common*) complain "$file: name it after its contents" ;; esac
done
# Inputs that end a fuzz program belong in fuzz/corpus, under another name.
git ls-files | grep -E '(^|/)(crash|leak|oom|slow-unit|timeout)-[^/]*$' && complain "files that a fuzz program left"
python3 tools/names.py || complain "tools/names.py found errors"
grep -nE 'TODO|FIXME|XXX|#if 0' $(git ls-files -co --exclude-standard '*.c' '*.h' '*.py') && complain "unfinished"
grep -nP '[^\x00-\x7F]' $(git ls-files -co --exclude-standard 'src/*' 'include/*') && complain "not ASCII"
exit $bad
