#!/bin/sh
# Checks format, static analysis and the rules of the source tree. Prints findings and exits 1 if there are any.
set -u
cd "$(dirname "$0")/.." || exit 1
bad=0
git rev-parse --git-dir >/dev/null || { echo "lint: run it in the git repository"; exit 1; }
modules=$(printf -- '-iquote %s ' src/*/)
flags="-std=c11 -Iinclude $modules -Itests -Ibench -D_GNU_SOURCE"
sources=$(git ls-files -co --exclude-standard 'src/*.c')
checked=$(git ls-files -co --exclude-standard '*.c')
if mpi=$(mpicc -showme:incdirs 2>/dev/null); then
    for dir in $mpi; do flags="$flags -isystem $dir"; done
else
    echo "lint: OpenMPI is not installed; files that include mpi.h are not checked"
    with_mpi=$( (echo "$checked" | grep /mpi/; grep -lE '^#include [<"](reshard_)?mpi.h' $checked) | paste -sd'|')
    sources=$(echo "$sources" | grep -vxE "$with_mpi")
    checked=$(echo "$checked" | grep -vxE "$with_mpi")
fi
all=$(git ls-files -co --exclude-standard '*.c' '*.h' '*.cpp')

echo "== rules of the source tree"
tools/check_tree.sh || bad=1
echo "== Python"
git ls-files -co --exclude-standard '*.py' | xargs python3 tools/lint_python.py || bad=1
echo "== clang-format"
# shellcheck disable=SC2086
clang-format --dry-run --Werror $all || bad=1
echo "== warnings"
warnings="-Wall -Wextra -Wshadow -Wconversion -Wpedantic -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wcast-qual"
for compiler in gcc clang; do
    # shellcheck disable=SC2086
    echo "$checked" |
        xargs -P2 -I{} $compiler $flags -O2 $warnings -Werror -fsyntax-only {} || bad=1
done
echo "== each public header compiles alone, in C and in C++"
for header in include/*.h; do
    case $header in *mpi*) continue ;; esac
    echo "#include \"$header\"" | gcc -std=c99 -Wall -Wextra -Wpedantic -Werror -I. -Iinclude -fsyntax-only -xc - || bad=1
    echo "#include \"$header\"" | g++ -Wall -Wextra -Werror -I. -Iinclude -fsyntax-only -xc++ - || bad=1
done
echo "== RSD_INIT, without warnings in every language standard"
for each in gcc:c99 gcc:c11 clang:c99 clang:c11 g++:c++11 g++:c++17 clang++:c++11 clang++:c++17; do
    ${each%:*} -std="${each#*:}" -Wall -Wextra -Wpedantic -Wshadow -Werror -Iinclude -fsyntax-only \
        -x "$(case $each in *++:*) echo c++ ;; *) echo c ;; esac)" tools/init_check.h || bad=1
done
echo "== gcc -fanalyzer"
# shellcheck disable=SC2086
echo $sources | tr ' ' '\n' | xargs -P2 -I{} gcc $flags -O1 -fanalyzer -Wno-analyzer-too-complex -Werror -c -o /dev/null {} || bad=1
echo "== cppcheck"
# shellcheck disable=SC2086
cppcheck -q -j2 --std=c11 --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
    --suppress=missingIncludeSystem -Iinclude $(printf -- '-I%s ' src/*/) -D_GNU_SOURCE $sources || bad=1
echo "== clang-tidy"
# shellcheck disable=SC2086
echo $sources | tr ' ' '\n' | xargs -P2 -n1 sh -c 'clang-tidy --quiet "$@" -- '"$flags"' 2>/dev/null' x || bad=1
[ $bad = 0 ] && echo "lint: no findings"
exit $bad
