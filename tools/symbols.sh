#!/bin/sh
# The functions that public headers declare, one a line: exactly these are exported.
set -eu
cat "$@" | tr '\n' ' ' | sed 's|/\*[^*]*\*\+\([^/*][^*]*\*\+\)*/| |g' |
    grep -o 'rsd_[a-z0-9_]* *(' | tr -d ' (' | sort -u
