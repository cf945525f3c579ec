#!/bin/sh
# Prints the functions that the public headers declare, one per line. The library exports exactly these.
set -eu
cat "$@" | tr '\n' ' ' | sed 's|/\*[^*]*\*\+\([^/*][^*]*\*\+\)*/| |g' |
    grep -o 'rsd_[a-z0-9_]* *(' | tr -d ' (' | sort -u
