#!/bin/sh
# The house rules: doors open rightward only, base names are unique, files can be read in a sitting.
set -u
bad=0
complain() { echo "house: $*"; bad=1; }

# Which rooms' doors each room may open, besides its own and the public headers.
may_open() {
    case $1 in
    base) echo base ;;
    layout) echo base layout ;;
    plan) echo base layout plan ;;
    move) echo base layout plan move ;;
    stash) echo base layout plan move stash ;;
    codec) echo base layout codec ;;
    store) echo base layout plan move codec store ;;
    haul) echo base layout plan move codec store haul ;;
    mpi) echo cli ;;
    cli) echo cli ;;
    esac
}

for file in src/*/*.c src/*/*.h; do
    room=$(basename "$(dirname "$file")")
    for header in $(sed -n 's/^#include "\(.*\)"/\1/p' "$file"); do
        case $header in reshard.h | reshard_mpi.h) continue ;; esac
        door=${header%.h}
        case " $(may_open "$room") " in
        *" $door "*) ;;
        *) complain "$file opens the door $header" ;;
        esac
    done
    case $file in src/mpi/*) ;; *)
        grep -q '^#include <mpi.h>' "$file" && complain "$file has heard of MPI" ;;
    esac
done
for header in src/*/*.h; do
    [ "$(basename "$header" .h)" = "$(basename "$(dirname "$header")")" ] ||
        complain "$header is a second door of its room"
done

# One name, one file (a door and its room's main source share theirs).
git ls-files -co --exclude-standard 'src/*' 'tests/*.[ch]' 'fuzz/*.[ch]' 'bench/*.[ch]' 'examples/*' |
    xargs -n1 basename | sort | uniq -d | while read -r name; do echo "house: two files are called $name"; done |
    grep . && bad=1

for file in $(git ls-files -co --exclude-standard '*.c' '*.h' '*.py' '*.sh'); do
    lines=$(wc -l < "$file")
    [ "$lines" -le 600 ] || complain "$file has $lines lines"
    case $file in *utils* | *common*) complain "$file: what is in it?" ;; esac
done
grep -nE 'TODO|FIXME|XXX|#if 0' $(git ls-files -co --exclude-standard '*.c' '*.h' '*.py') && complain "unfinished"
grep -nP '[^\x00-\x7F]' $(git ls-files -co --exclude-standard 'src/*' 'include/*') && complain "not ASCII"
exit $bad
