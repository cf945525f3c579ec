#!/bin/sh
# Tests on a real GPU: every case in one process, and between processes. The address sanitizer leaves the gap of its
# shadow memory to CUDA.
set -u
export RESHARD_GPU=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    ASAN_OPTIONS=protect_shadow_gap=0:detect_leaks=0
build=${BUILD:-build}
if [ ! -e /dev/nvidiactl ]; then
    echo "1..0 # SKIP no GPU here"
    exit 0
fi
number=0 failed=0
out=$(mktemp)
trap 'rm -f "$out"' EXIT

# try NAME COMMAND...
try() {
    number=$((number + 1)) name=$1
    shift
    if "$@" >"$out" 2>&1 && ! grep -q '^not ok' "$out"; then
        echo "ok $number - $name"
    else
        grep -v '^ok' "$out" | head -40 | sed 's/^/# /'
        echo "not ok $number - $name"
        failed=1
    fi
}

try "every case in one process" "$build/asan/test_device"
try "checkpoints and digests" "$build/asan/test_device_files"
try "several devices" "$build/asan/test_devices"
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ] && [ -x "$build/test_device" ]; then
    for tool in memcheck racecheck; do
        try "every case in one process under $tool" timeout 300 "$sanitizer" --tool $tool --report-api-errors no \
            --target-processes application-only --error-exitcode 9 "$build/test_device"
    done
else
    echo "# compute-sanitizer is not installed, so it is not run"
fi
for n in 1 2 4; do
    [ -x "$build/asan/mpi/test_mpi" ] || break
    try "every case on $n processes" timeout 300 mpirun -np $n "$build/asan/mpi/test_mpi" gpu
done
[ ! -x "$build/asan/mpi/test_mpi" ] || try "every case on 4 processes over a transport that takes device memory" \
    timeout 300 mpirun -np 4 "$build/asan/mpi/test_mpi" device
# At least 3 of 4 ranks print "good": rank 1 is killed in one scenario.
good() {
    [ "$(timeout 120 mpirun --enable-recovery -np 4 "$build/asan/mpi/test_mpi_gpu" "$1" | tee /dev/stderr | grep -c '^good')" -ge "$2" ]
}
for scenario in moved:4 ordered:4 transport:4 killed:3 no_memory:4 sticky:4; do
    [ -x "$build/asan/mpi/test_mpi_gpu" ] || break
    try "device memory that is ${scenario%:*}" good "${scenario%:*}" "${scenario#*:}"
done
echo "1..$number"
exit $failed
