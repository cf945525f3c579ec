"""Communicators of mpi4py as transports, under mpiexec."""
import os
import shutil
import subprocess
import sys
import unittest

import tap

WORK = """
import numpy as np
import reshard, reshard.mpi
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.rank
transport = reshard.mpi.transport(comm)
assert (transport.rank, transport.nranks) == (rank, 4)
assert len(set(transport.nodes())) == 1
whole = np.arange(96, dtype="f4").reshape(12, 8)
plan = reshard.Plan("f32[12,8] : 4:S0 -> 2x2:S0,S1")
src, right = whole[3 * rank:3 * rank + 3], whole[6 * (rank // 2):][:6, 4 * (rank % 2):][:, :4]
for node in (0, -1):
    bound, out = reshard.bind(plan, transport=transport, node=node, timeout=60), np.zeros((6, 4), "f4")
    for i in range(3):
        bound.run(src + i, out)
        assert (out == right + i).all()
    bound.start(src, out)
    bound.wait()
    assert (out == right).all()
arena = reshard.Arena(1 << 16)
mine = arena.empty((3, 8), "f32")
mine[...] = src
reshard.bind(plan, transport=transport, arena=arena).run(mine, out)
assert (out == right).all()
half = comm.Split(rank % 2)
pair, got = reshard.mpi.transport(half), np.zeros(4)
reshard.bind(reshard.Plan("f64[4] : 2:S0 -> 2:R"), transport=pair).run(np.full(2, float(rank)), got)
assert got.tolist() == [rank % 2, rank % 2, rank % 2 + 2, rank % 2 + 2], got
try:
    reshard.bind(reshard.Plan(f"f32[{8 + (rank == 2)}] : 4:S0 -> 4:R"), transport=transport)
    raise SystemExit("another plan was not noticed")
except reshard.MismatchError as error:
    assert "rank 2" in str(error), error
for wrong, kind in ((None, TypeError), (MPI.COMM_NULL, reshard.InvalidError)):
    try:
        reshard.mpi.transport(wrong)
        raise SystemExit("not refused")
    except kind:
        pass
comm.Barrier()
print("fine")
"""


def missing():
    """Returns why it cannot be tested here, or None."""
    try:
        import mpi4py
    except ImportError:
        return "mpi4py is not installed"
    if not shutil.which("mpiexec"):
        return "mpiexec is not installed"
    del mpi4py
    try:
        import reshard._c
        reshard._c.shared_object("libreshard_mpi", "RESHARD_MPI_LIB")
    except ImportError:
        return "libreshard_mpi was not built"
    return None


class MPI4Py(unittest.TestCase):
    @unittest.skipIf(missing(), missing())
    def test_communicators(self):
        """plans over a communicator and its parts, through shared memory and through messages"""
        env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
        done = subprocess.run(["mpiexec", "-n", "4", sys.executable, "-c", WORK], env=env, timeout=240,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = done.stdout.decode()
        self.assertEqual((done.returncode, said.count("fine")), (0, 4), said)


if __name__ == "__main__":
    tap.main()
