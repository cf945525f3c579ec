#!/bin/sh
# Builds the reference, installs to an empty directory, builds programs against what is there, checks the documents and the
# manual pages, and uninstalls.
tree=$(cd "$(dirname "$0")/.." && pwd) build=${BUILD_DIR:?where is the build?}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n=0 failed=0
check() {
    n=$((n + 1))
    if [ "$1" = "$2" ]; then
        echo "ok $n - $3"
    else
        echo "not ok $n - $3"
        printf '%s\n' "expected: $2" "found:    $1" | sed 's/^/# /'
        failed=1
    fi
}
skip() {
    n=$((n + 1))
    echo "ok $n - $1 # SKIP $2"
}
has() { command -v "$1" > /dev/null; }
make_quietly() { make -C "$tree" "$@" > "$work/log" 2>&1 || sed 's/^/# /' "$work/log"; }

# ---- packages: a program apt-get that only records its calls, and a user who is root ----

mkdir "$work/fake"
printf '#!/bin/sh\necho called >> "%s/calls"\nexit 1\n' "$work" > "$work/fake/apt-get"
printf '#!/bin/sh\necho 0\n' > "$work/fake/id"
chmod +x "$work/fake/apt-get" "$work/fake/id"
try_make() {
    rm -f "$work/calls"
    env -u MAY_INSTALL PATH="$work/fake:$PATH" \
        make -C "$tree" BUILD="$work/build" CC=no-such-compiler "$@" > "$work/log" 2>&1
    grep -q 'apt-get install --no-install-recommends gcc$' "$work/log" && echo says
    [ ! -e "$work/calls" ] || echo installs
}
check "$(try_make)" says "make as root prints the packages that are missing"
check "$(try_make install DESTDIR="$work/nowhere")" says "make install as root prints them too"
check "$(try_make demo)" installs "make demo as root installs them"

# ---- the installed files ----

if has doxygen; then
    MAKEFLAGS= make -C "$tree" docs > "$work/log" 2>&1 # the jobs of another make would be a warning
    check "$? $(grep -c warning: "$work/log")" "0 0" "make docs, without warnings"
else
    skip "make docs" "doxygen is not installed"
fi

prefix=$work/usr lib=$work/usr/lib/$(${CC:-cc} -print-multiarch)
make_quietly install PREFIX="$prefix" LIBDIR="$lib"
check "$("$prefix/bin/reshard" --version)" "reshard $(sed -n 's/^#define RSD_VERSION  *"\(.*\)"/\1/p' "$tree/include/reshard.h")" \
    "the command is installed"
for page in reshard.1 reshard-mpi.1; do
    [ -e "$prefix/share/man/man1/$page" ] || [ ! -e "$build/reshard-mpi" ] || check missing present "man page $page"
    if has man; then
        check "$(man -l --warnings -Tutf8 "$tree/man/$page" 2>&1 > /dev/null)" "" "$page has no mistake"
    fi
done
check "$(python3 "$tree/tests/install/links.py" "$prefix/share/doc/reshard")" "" "every link in the installed documents works"

# Prints the functions of the headers whose manual page does not exist or does not describe anything.
undocumented() {
    for library in "$build"/libreshard.so "$build"/libreshard_mpi.so; do
        [ ! -e "$library" ] || nm -D --defined-only "$library" | sed -n 's/.* \(rsd_[a-z0-9_]*\)@.*/\1/p'
    done | while read -r name; do
        page=$prefix/share/man/man3/$name.3
        linked=$(sed -n '1s|^[.]so man3/||p' "$page" 2> /dev/null)
        sed -n '/^[.]SH "Detailed Description"/,/^[.]SH "[^D]/p' "$prefix/share/man/man3/${linked:-$name.3}" 2> /dev/null |
            grep -q '^[^.]' || echo "$name"
    done
}
if has doxygen; then
    check "$(undocumented)" "" "every public function has a manual page with a description"
    check "$(grep -l '<pre class="fragment">[*]\|^[*] ' "$prefix"/share/doc/reshard/html/*.html | head -n 3)" "" \
        "examples in the HTML have no asterisks of comments"
    check "$(ls "$prefix"/share/man/man3/rsd_*.3 | wc -l | awk '{ print ($1 > 150) }')" 1 "they are many"
    html=$prefix/share/doc/reshard/html
    check "$(grep -c init_search "$html/index.html") $(grep -lq rsd_plan_new "$html"/search/*.js && echo found)" \
        "1 found" "the HTML has a search box that knows the functions"
fi

statuses=$(sed -n 's/^    RSD_\(E[A-Z]*\) = .*/## \1/p' "$tree/include/reshard.h")
check "$(grep -x '## E[A-Z]*' "$tree/docs/errors.md" | sort)" "$(echo "$statuses" | sort)" "errors.md describes every status"

run_app() { LD_LIBRARY_PATH=$lib "$work/app" "$@" 2>&1; }
problem='f32[8,6] : 4:S0 -> 2x2:S0,S1'
moved="48 elements on 4 ranks -> 48 elements on 4 ranks: 0 are wrong"
planned="rank 1 before: [2,6], 48 bytes"
if has pkg-config; then
    export PKG_CONFIG_PATH="$lib/pkgconfig"
    # shellcheck disable=SC2046
    {
        ${CC:-cc} "$tree/examples/move.c" $(pkg-config --cflags --libs reshard) -o "$work/app"
        check "$(run_app "$problem")" "$moved" "a C program, with pkg-config"
        check "$(ldd "$work/app" | grep -c 'libreshard[.]so[.]1 ')" 1 "it is linked to the shared library"
        ${CC:-cc} -DNDEBUG "$tree/examples/move.c" $(pkg-config --cflags reshard) "$lib/libreshard.a" \
            $(pkg-config --libs-only-l --static reshard | sed 's/-lreshard//') -o "$work/app"
        check "$(run_app "$problem")" "$moved" "a C program with the static library, with pkg-config"
        if has c++; then
            c++ -std=c++17 "$tree/examples/plan.cpp" $(pkg-config --cflags --libs reshard) -o "$work/app"
            check "$(run_app "$problem" 1 | head -1)" "$planned" "a C++17 program, with pkg-config"
        else
            skip "a C++17 program, with pkg-config" "no C++ compiler found"
        fi
        if [ -e "$build/reshard-mpi" ]; then
            mpicc "$tree/examples/mlp_mpi.c" $(pkg-config --cflags --libs reshard_mpi reshard) -o "$work/app" -lm
            check $? 0 "a program with MPI, with pkg-config"
        else
            skip "a program with MPI, with pkg-config" "MPI is not installed"
        fi
    }
else
    skip "programs with pkg-config" "pkg-config is not installed"
fi

# build_with_cmake LANGUAGE SOURCE LIBRARY [COMPONENTS]
build_with_cmake() {
    rm -rf "$work/cmake" "$work/app"
    cmake -S "$tree/tests/install" -B "$work/cmake" -DLANGUAGE="$1" -DSOURCE="$tree/examples/$2" -DLIBRARY="$3" \
        -DWANTED="$wanted" -DCOMPONENTS="${4-}" -DCMAKE_PREFIX_PATH="$prefix" > "$work/log" 2>&1 &&
        cmake --build "$work/cmake" >> "$work/log" 2>&1 && mv "$work/cmake/app" "$work/app" || sed 's/^/# /' "$work/log"
}
wanted=$(sed -n 's/^#define RSD_VERSION  *"\([0-9]*[.][0-9]*\)[.].*/\1/p' "$tree/include/reshard.h")
if has cmake; then
    build_with_cmake C move.c reshard::reshard reshard
    check "$(run_app "$problem")" "$moved" "a C program, with CMake"
    build_with_cmake C move.c reshard::static static
    check "$(run_app "$problem")" "$moved" "a C program with the static library, with CMake"
    if has c++; then
        build_with_cmake CXX plan.cpp reshard::reshard
        check "$(run_app "$problem" 1 | head -1)" "$planned" "a C++17 program, with CMake"
    else
        skip "a C++17 program, with CMake" "no C++ compiler found"
    fi
    if [ -e "$build/reshard-mpi" ]; then
        build_with_cmake C redistribute_mpi.c reshard::mpi
        check "$([ -x "$work/app" ] && echo built)" built "a program with MPI, with CMake"
    else
        skip "a program with MPI, with CMake" "MPI is not installed"
    fi
    build_with_cmake C move.c reshard::reshard wrong > /dev/null
    check "$(grep -c 'unknown component wrong' "$work/log")" 1 "CMake: an unknown component is refused"
    wanted=${wanted%.*}.$((${wanted#*.} - 1))
    build_with_cmake C move.c reshard::reshard > /dev/null
    check "$(grep -c "compatible with requested version \"$wanted\"" "$work/log")" 1 "CMake: another minor version is refused"
else
    skip "programs with CMake" "cmake is not installed"
fi

make_quietly uninstall PREFIX="$prefix" LIBDIR="$lib"
check "$(find "$prefix" ! -type d | sed "s|$prefix/||")" "" "make uninstall leaves no file"
check "$(find "$prefix" -name '*reshard*')" "" "and no directory of reshard"

make_quietly install PREFIX=/opt/reshard DESTDIR="$work/staged" MPI=no
check "$(sed -n 's/^prefix=//p' "$work/staged/opt/reshard/lib/pkgconfig/reshard.pc") $(ls "$work/staged")" "/opt/reshard opt" \
    "DESTDIR is not part of the paths in the files"

echo "1..$n"
exit $failed
