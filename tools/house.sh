#!/bin/sh
# The rules of the source tree: which module may use which, names, and the length of files.
set -u
bad=0
complain() { echo "house: $*"; bad=1; }

# The modules whose headers a module may include, besides its own and the public ones.
may_use() {
    case $1 in
    base) echo ;;
    cuda) echo base layout memory ;;
    layout) echo base ;;
    plan) echo base layout ;;
    memory) echo base layout ;;
    peer) echo base layout memory ;;
    exec) echo base layout plan memory peer cuda ;;
    codec) echo base ;;
    store) echo base ;;
    format) echo base layout codec store ;;
    transfer) echo base layout plan memory cuda codec store format ;;
    checkpoint) echo base layout plan memory cuda peer codec store format transfer ;;
    mpi) echo cli ;;
    cli) echo ;;
    esac
}

for file in src/*/*.c src/*/*.h; do
    module=$(basename "$(dirname "$file")")
    for header in $(sed -n 's/^#include "\(.*\)"/\1/p' "$file"); do
        case $header in reshard.h | reshard_cuda.h | reshard_mpi.h | reshard_experimental.h) continue ;; esac
        [ -e "src/$module/$header" ] && continue
        used=$(basename "$(dirname "$(ls src/*/"$header")")")
        case " $(may_use "$module") " in
        *" $used "*) ;;
        *) complain "$file includes $header of $used" ;;
        esac
        # A private header is one that is not named after its module; codec has one header per codec.
        [ "$used" = codec ] || [ "$header" = "$used.h" ] || complain "$file includes $header, which is private to $used"
    done
    case $file in src/mpi/*) ;; *)
        grep -q '^#include <mpi.h>' "$file" && complain "$file uses MPI" ;;
    esac
done

# One name, one file.
git ls-files -co --exclude-standard --deduplicate 'src/*' 'tests/*.[ch]' 'fuzz/*.[ch]' 'bench/*.[ch]' 'examples/*' |
    while read -r file; do [ -e "$file" ] && basename "$file"; done |
    sort | uniq -d | while read -r name; do echo "house: two files are called $name"; done |
    grep . && bad=1

for file in $(git ls-files -co --exclude-standard --deduplicate '*.c' '*.h' '*.py' '*.sh'); do
    [ -e "$file" ] || continue
    lines=$(wc -l < "$file")
    [ "$lines" -le 600 ] || complain "$file has $lines lines"
    case $file in *utils* | *common*) complain "$file: what is in it?" ;; esac
done
# Names of functions and structs; tools/names.py lists the modules that are finished.
python3 tools/names.py || complain "names"
grep -nE 'TODO|FIXME|XXX|#if 0' $(git ls-files -co --exclude-standard '*.c' '*.h' '*.py') && complain "unfinished"
grep -nP '[^\x00-\x7F]' $(git ls-files -co --exclude-standard 'src/*' 'include/*') && complain "not ASCII"
exit $bad
