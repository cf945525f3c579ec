#!/bin/sh
# The same programs on MPICH, with two ranks. MPICH ends the job when one rank ends, so no rank ends early here.
set -u
export ASAN_OPTIONS=detect_leaks=0
number=0 failed=0
report() {
    number=$((number + 1))
    [ "$1" = 0 ] || { printf 'not '; failed=1; }
    echo "ok $number - $2"
}
out=$(timeout 300 mpirun.mpich -np 2 "$MPI_TESTS/test_mpi" 2>&1)
report $? "every case on 2 processes"
echo "$out" | grep '^#'
for how in messages shared; do
    scenarios="other_plan bad_argument no_memory late late_at_bind freed_communicator slow_callers late_at_first"
    # shellcheck disable=SC2086
    out=$(timeout 300 mpirun.mpich -np 2 "$MPI_TESTS/test_mpi_faults" $how $scenarios 2>&1)
    for scenario in $scenarios; do
        [ "$(echo "$out" | grep -c "^good $scenario ")" = 2 ]
        report $? "$scenario, $how"
    done
    echo "$out" | grep '^#'
done
echo "1..$number"
exit $failed
