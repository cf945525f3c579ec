#!/bin/sh
# Plans between processes, under mpirun: every case on 1 to 8 ranks. The programs are in $MPI_TESTS. Skipped if MPI is
# not installed.
set -u
if [ -z "${MPI_TESTS:-}" ] || ! command -v mpirun >/dev/null 2>&1; then
    echo "1..0 # SKIP no MPI here (apt-get install libopenmpi-dev openmpi-bin)"
    exit 0
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_mpi_yield_when_idle=1 ASAN_OPTIONS=detect_leaks=0
number=0 failed=0
out=$(mktemp)
trap 'rm -f "$out"' EXIT

# report NAME: prints the result of the previous command
report() {
    status=$?
    number=$((number + 1))
    if [ $status = 0 ]; then
        echo "ok $number - $1"
    else
        sed 's/^/# /' "$out"
        echo "not ok $number - $1"
        failed=1
    fi
}

for n in 1 2 3 4 7 8; do
    timeout 300 mpirun -np $n "$MPI_TESTS/test_mpi" >"$out" 2>&1 && ! grep -q '^not ok' "$out"
    report "every case on $n processes"
done

for n in 1 3; do # of three devices, two can access each other
    timeout 300 mpirun -np $n "$MPI_TESTS/test_mpi" gpu >"$out" 2>&1 && ! grep -q '^not ok' "$out"
    report "every case on $n processes with arrays on a GPU"
done

timeout 300 mpirun -np 3 "$MPI_TESTS/test_mpi" device >"$out" 2>&1 && ! grep -q '^not ok' "$out"
report "every case on 3 processes over a transport that takes device memory"

for n in 1 2 3 4 7 8; do
    timeout 300 mpirun -np $n "$MPI_TESTS/test_mpi_stash" >"$out" 2>&1 && ! grep -q '^not ok' "$out"
    report "stashes on $n processes"
done

timeout 300 mpirun -np 2 "$MPI_TESTS/test_mpi_large" >"$out" 2>&1 && ! grep -q '^not ok' "$out"
report "pieces of more than 2^31 bytes"
echo "1..$number"
exit $failed
