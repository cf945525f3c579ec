#!/bin/sh
# need.sh COMMAND:PACKAGE ...   exits 0 if the commands exist. If some do not, prints their Debian packages, and installs
# them if MAY_INSTALL is set and the user is root. Otherwise prints the command to run and exits 1. A COMMAND with a slash
# is a file that must exist.
set -eu
missing=
for pair in "$@"; do
    what=${pair%%:*} package=${pair#*:}
    case $what in
    */*) [ -e "$what" ] || missing="$missing $package" ;;
    *) command -v "$what" >/dev/null 2>&1 || missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0
if [ -z "${MAY_INSTALL-}" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "packages are missing; run: apt-get install --no-install-recommends$missing" >&2
    exit 1
fi
echo "installing Debian packages:$missing"
export DEBIAN_FRONTEND=noninteractive
# Targets of one make install at the same time, and apt-get refuses to wait for another one.
exec 9<"$0"
flock 9
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null
