#!/bin/sh
# faults.sh [ROUNDS]   runs every scenario in which one rank fails, under mpirun with 4 ranks. Prints TAP for one round.
# With ROUNDS, repeats them, and stops at the first round that differs; its output is in $FAULTS_OUT.
# The programs are in $MPI_TESTS. Skipped if MPI is not installed.
set -u
if [ -z "${MPI_TESTS:-}" ] || ! command -v mpirun >/dev/null 2>&1; then
    echo "1..0 # SKIP no MPI here (apt-get install libopenmpi-dev openmpi-bin)"
    exit 0
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_mpi_yield_when_idle=1 ASAN_OPTIONS=detect_leaks=0
out=${FAULTS_OUT:-$(mktemp -d)}
mkdir -p "$out"
[ -n "${FAULTS_OUT:-}" ] || trap 'rm -rf "$out"' EXIT
export out

# One line per mpirun, the longest first. After a scenario in which a rank dies, or breaks MPI or CUDA, nothing follows.
cat >"$out/runs" <<'END'
messages other_plan bad_argument no_memory late stalled late_at_bind freed_communicator slow_callers late_at_first
shared other_plan bad_argument no_memory late stalled late_at_bind freed_communicator
gpu moved ordered transport no_memory sticky
hosts late stalled
gpu killed
messages killed
messages leaving
shared killed
shared leaving
hosts killed
END

# Runs all lines, two at a time, and prints the results.
run_round() {
    number=0 failed=0
    # shellcheck disable=SC2016
    xargs -P2 -L1 sh -c 'how=$1 && shift && case $how in gpu) program=test_mpi_gpu ;; *) program="test_mpi_faults $how" ;; esac
        timeout 300 mpirun --enable-recovery -np 4 "$MPI_TESTS"/$program "$@" >"$out/$how-$1" 2>&1' x <"$out/runs"
    while read -r how first rest; do
        for scenario in $first $rest; do
            number=$((number + 1))
            if [ "$(grep -c "^good $scenario " "$out/$how-$first")" = 4 ]; then
                echo "ok $number - $scenario, $how"
            else
                sed 's/^/# /' "$out/$how-$first"
                echo "not ok $number - $scenario, $how"
                failed=1
            fi
        done
    done <"$out/runs"
    echo "1..$number"
    return $failed
}

if [ $# = 0 ]; then
    run_round
    exit
fi
for round in $(seq "$1"); do
    if ! run_round >"$out/result"; then
        cat "$out/result"
        echo "round $round differs; the output is in $out"
        exit 1
    fi
    echo "round $round of $1: $(grep -c '^ok' "$out/result") scenarios as expected"
done
