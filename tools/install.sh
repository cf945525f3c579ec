#!/bin/sh
# install.sh install|uninstall   installs what make built, or removes it. Both walk the same list, so that uninstall removes
# what install wrote. The Makefile sets DESTDIR, PREFIX, LIBDIR, BUILD, VERSION, SOVERSION, LIBS, HEADERS and MPI_FOUND.
set -eu
verb=$1
share=$PREFIX/share docs=$PREFIX/share/doc/reshard

# put MODE DIRECTORY FILE ...: installs files in a directory.
put() {
    mode=$1 directory=$DESTDIR$2
    shift 2
    if [ "$verb" = install ]; then
        echo "  install $directory"
        install -d "$directory"
        install -m "$mode" "$@" "$directory/"
    else
        for file; do rm -f "$directory/${file##*/}"; done
    fi
}

# put_link TARGET DIRECTORY NAME
put_link() {
    if [ "$verb" = install ]; then ln -sf "$1" "$DESTDIR$2/$3"; else rm -f "$DESTDIR$2/$3"; fi
}

# fill TEMPLATE FILE: writes a file whose words in @ are replaced.
fill() {
    case $LIBDIR in
    "$PREFIX"/*) libdir="\${prefix}/${LIBDIR#"$PREFIX"/}" ;;
    *) libdir=$LIBDIR ;;
    esac
    sed "s|@PREFIX@|$PREFIX|; s|@LIBDIR@|$libdir|; s|@VERSION@|$VERSION|; s|@SOVERSION@|$SOVERSION|; s|@LIBS@|$LIBS|
         s|@LIBS_LIST@|$(echo "$LIBS" | tr ' ' ';')|
         s|@INCLUDE@|$(realpath -ms --relative-to="$LIBDIR/cmake/reshard" "$PREFIX/include")|" "$1" > "$2"
}

put_library() {
    put 644 "$LIBDIR" "$BUILD/$1.a"
    put 755 "$LIBDIR" "$BUILD/$1.so.$VERSION"
    put_link "$1.so.$VERSION" "$LIBDIR" "$1.so.$SOVERSION"
    put_link "$1.so.$SOVERSION" "$LIBDIR" "$1.so"
}

# shellcheck disable=SC2086
put 644 "$PREFIX/include" $HEADERS
put 755 "$PREFIX/bin" "$BUILD/reshard"
put_library libreshard
mkdir -p "$BUILD/install"
fill tools/reshard.pc.in "$BUILD/install/reshard.pc"
fill tools/reshardConfig.cmake.in "$BUILD/install/reshardConfig.cmake"
fill tools/reshardConfigVersion.cmake.in "$BUILD/install/reshardConfigVersion.cmake"
put 644 "$LIBDIR/pkgconfig" "$BUILD/install/reshard.pc"
put 644 "$LIBDIR/cmake/reshard" "$BUILD/install/reshardConfig.cmake" "$BUILD/install/reshardConfigVersion.cmake"
put 644 "$share/man/man1" man/reshard.1
put 644 "$share/zsh/site-functions" completion/_reshard
cp completion/reshard.bash "$BUILD/install/reshard"
put 644 "$share/bash-completion/completions" "$BUILD/install/reshard"

if [ -n "$MPI_FOUND" ] || [ "$verb" = uninstall ]; then
    put 644 "$PREFIX/include" include/reshard_mpi.h
    put 755 "$PREFIX/bin" "$BUILD/reshard-mpi"
    put_library libreshard_mpi
    fill tools/reshard_mpi.pc.in "$BUILD/install/reshard_mpi.pc"
    put 644 "$LIBDIR/pkgconfig" "$BUILD/install/reshard_mpi.pc"
    put 644 "$share/man/man1" man/reshard-mpi.1
fi

# The documents keep their directories, so that links between them work.
put 644 "$docs" README.md LICENSE CHANGELOG.md CONTRIBUTING.md
put 644 "$docs/docs" docs/*.md
put 644 "$docs/examples" examples/*.*
put 644 "$docs/examples/python" examples/python/*.py

# The reference, if make docs has built it.
if [ "$verb" = install ] && [ -d "$BUILD/docs" ]; then
    put 644 "$share/man/man3" "$BUILD"/docs/man/man3/rsd_*.3 "$BUILD"/docs/man/man3/reshard*.3
    rm -rf "$DESTDIR$docs/html"
    (cd "$BUILD/docs" && find html -type d) | while read -r directory; do
        find "$BUILD/docs/$directory" -maxdepth 1 -type f | {
            set --
            while read -r file; do set -- "$@" "$file"; done
            [ $# = 0 ] || put 644 "$docs/$directory" "$@"
        }
    done
elif [ "$verb" = uninstall ]; then
    rm -f "$DESTDIR$share"/man/man3/rsd_*.3 "$DESTDIR$share"/man/man3/reshard*.3
    rm -rf "$DESTDIR$docs/html"
    for directory in "$docs/examples/python" "$docs/examples" "$docs/docs" "$docs" "$LIBDIR/cmake/reshard"; do
        [ ! -d "$DESTDIR$directory" ] || rmdir "$DESTDIR$directory" || true
    done
fi
if [ -z "$DESTDIR" ] && [ "$(id -u)" = 0 ] && command -v ldconfig > /dev/null; then ldconfig; fi
