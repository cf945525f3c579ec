#!/bin/sh
# The same programs on MPICH, with two ranks. MPICH ends the job when one rank ends, so if ranks wait for a late one,
# only the first of them is sure to print its result.
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
    for pair in other_plan:2 bad_argument:2 no_memory:2 late:1 late_at_bind:1 late_at_first:1 slow_callers:2 \
        freed_communicator:2; do
        out=$(timeout 120 mpirun.mpich -np 2 "$MPI_TESTS/test_mpi_faults" "${pair%:*}" $how 2>&1)
        [ "$(echo "$out" | grep -c '^good')" -ge "${pair#*:}" ]
        report $? "${pair%:*}, $how"
    done
done
echo "1..$number"
exit $failed
