#!/bin/sh
# Four hosts made of network namespaces, two ranks each: right elements, and no more bytes on the wire than the
# plan needs. The launcher and the switch have a namespace of their own, and all vanish in the end.
set -u
skip() { echo "1..0 # SKIP $*"; exit 0; }
[ -n "${MPI_TESTS:-}" ] || skip "no MPI here (apt-get install libopenmpi-dev openmpi-bin)"
command -v ip >/dev/null 2>&1 || skip "no ip command here (apt-get install iproute2)"
command -v unshare >/dev/null 2>&1 || skip "no unshare command here"
[ "$(id -u)" = 0 ] || skip "network namespaces need root"

name=rsd$$
head=$name-head
work=$(mktemp -d)
down() {
    for i in 1 2 3 4; do ip netns del "$name-$i" 2>/dev/null; done
    ip netns del "$head" 2>/dev/null
    rm -rf "$work"
}
trap down EXIT INT TERM
ip netns add "$head" 2>/dev/null || skip "network namespaces are not allowed here"
{
    ip -n "$head" link set lo up
    ip -n "$head" link add switch type bridge
    ip -n "$head" addr add 10.77.0.254/24 dev switch
    ip -n "$head" link set switch up
    for i in 1 2 3 4; do
        ip netns add "$name-$i"
        ip -n "$head" link add "port$i" type veth peer name eth0 netns "$name-$i"
        ip -n "$head" link set "port$i" master switch up
        ip -n "$name-$i" addr add "10.77.0.$i/24" dev eth0
        ip -n "$name-$i" link set eth0 up
        ip -n "$name-$i" link set lo up
    done
} 2>"$work/errors" || skip "no bridge of namespaces here: $(head -n 1 "$work/errors")"

# How the launcher reaches a host: a name, a /dev/shm and IPC of its own.
cat >"$work/agent" <<'AGENT'
#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts --mount --ipc \
    sh -c 'hostname "$1"; mount -t tmpfs -o size=64m tmpfs /dev/shm; shift; eval "exec $*"' x "$host" "$@"
AGENT
chmod +x "$work/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ASAN_OPTIONS=detect_leaks=0
exec_in_hosts() {
    timeout 300 ip netns exec "$head" mpirun --host "$name-1:2,$name-2:2,$name-3:2,$name-4:2" -np 8 \
        --mca plm_rsh_agent "$work/agent" --mca oob_tcp_if_include 10.77.0.0/24 \
        --mca btl_tcp_if_include 10.77.0.0/24 --mca mpi_yield_when_idle 1 -x ASAN_OPTIONS \
        "$MPI_TESTS/$@" 2>"$work/errors"
}
exec_in_hosts test_hosts eth0
status=$?
[ $status = 0 ] || sed 's/^/# /' "$work/errors"
exit $status
