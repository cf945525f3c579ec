#!/bin/sh
# hosts.sh PROGRAM ARGUMENTS: runs an MPI program on four hosts made of network namespaces, with two ranks each. The
# launcher and the bridge have another namespace. All namespaces are removed at the end. If they cannot be created,
# prints the reason and exits 77.
set -u
skip() { echo "$*"; exit 77; }
command -v mpirun >/dev/null 2>&1 || skip "MPI is not installed (apt-get install libopenmpi-dev openmpi-bin)"
command -v ip >/dev/null 2>&1 || skip "ip is not installed (apt-get install iproute2)"
command -v unshare >/dev/null 2>&1 || skip "unshare is not installed"
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
} 2>"$work/errors" || skip "cannot create a bridge of namespaces: $(head -n 1 "$work/errors")"

# The launcher starts a process on a host with this script. A host has its own name, /dev/shm and IPC.
cat >"$work/agent" <<'AGENT'
#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts --mount --ipc \
    sh -c 'hostname "$1"; mount -t tmpfs -o size=64m tmpfs /dev/shm; shift; eval "exec $*"' x "$host" "$@"
AGENT
chmod +x "$work/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ASAN_OPTIONS=detect_leaks=0
timeout 300 ip netns exec "$head" mpirun --host "$name-1:2,$name-2:2,$name-3:2,$name-4:2" -np 8 \
    --mca plm_rsh_agent "$work/agent" --mca oob_tcp_if_include 10.77.0.0/24 \
    --mca btl_tcp_if_include 10.77.0.0/24 --mca mpi_yield_when_idle 1 -x ASAN_OPTIONS "$@" 2>"$work/errors"
status=$?
[ $status = 0 ] || cat "$work/errors" >&2
exit $status
