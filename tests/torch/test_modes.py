"""redistribute where torch traces, simulates or waits later: torch.compile, FakeTensor and LocalTensor modes, simulated
process groups, asynchronous results, and moves that need no other rank."""
import os
import threading
import time
import traceback
import unittest

import torch
import torch.distributed as dist
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import reshard
import reshard.torch as rt
import tap
import worlds
from moves import mesh_over, number
from reshard.torch import bound, group

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def compiled():
    mesh, value = init_device_mesh("cpu", (2, 2)), number((7, 5), 1)
    cases = ([S0, S1], [S1, R]), ([R, S0], [S0, S0]), ([S0, R], [R, R])
    for before, after in cases:
        torch._dynamo.reset()

        def work(x):
            return rt.redistribute(x * 2, mesh, after) + 1

        for backend in ("eager", "aot_eager"):
            x = distribute_tensor(value.clone(), mesh, before).requires_grad_()
            y = torch.compile(work, backend=backend, fullgraph=True)(x)
            assert y.placements == tuple(after)
            assert torch.equal(y.full_tensor(), 2 * value + 1), (before, after, backend)
            y.to_local().sum().backward()
            right = distribute_tensor(value.clone(), mesh, before).requires_grad_()
            work(right).to_local().sum().backward()
            assert torch.equal(x.grad.full_tensor(), right.grad.full_tensor()), (before, after, backend)
    local = value if dist.get_rank() == 0 else torch.zeros_like(value)
    x = DTensor.from_local(local, mesh, [P, P])
    y = torch.compile(lambda x: rt.redistribute(x, mesh, [S0, R], forward_dtype=torch.float64), backend="aot_eager",
                      fullgraph=True)(x)
    assert torch.equal(y.full_tensor(), value.double())


def compiled_gradient():
    """backward_dtype: the gradient moves as bfloat16, as without torch.compile."""
    mesh, value = init_device_mesh("cpu", (2,)), torch.rand(4, 6)

    def work(x):
        return rt.redistribute(x, mesh, [S1], backward_dtype=torch.bfloat16)

    for function in (work, torch.compile(work, backend="aot_eager", fullgraph=True)):
        x = distribute_tensor(value, mesh, [S0]).requires_grad_()
        (function(x) ** 2).sum().backward()
        assert x.grad.dtype == torch.float32
        assert torch.equal(x.grad.full_tensor(), (2 * x.full_tensor()).bfloat16().float()), function


def operator():
    """The operator by itself: torch's own checks of the schema, the fake implementation and the gradient."""
    mesh = init_device_mesh("cpu", (2,))
    from reshard.torch.moving import _move_of
    text = _move_of(torch.float32, (4, 6), mesh, [S0], mesh, [S1]).text()
    local = number((2, 6), dist.get_rank()).requires_grad_()
    library.opcheck(torch.ops.reshard.redistribute.default, (local, text),
                          test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def faked():
    mesh = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        x = DTensor.from_local(torch.empty(4, 5), mesh, [S0])
        y = rt.redistribute(x, mesh, [S1])
        assert y.shape == (8, 5) and y.to_local().shape == (8, 3 - dist.get_rank()), y.to_local().shape
        assert type(y.to_local()).__name__ == "FakeTensor"


def on_meta():
    """Tensors without elements, as models are made before their weights are loaded."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    for after in ([S1, S0], [R, S1], [S0, S0]):
        x = distribute_tensor(torch.empty(7, 5, device="meta"), mesh, [S0, S1]).requires_grad_()
        ours, theirs = rt.redistribute(x, mesh, after), x.redistribute(mesh, after)
        assert ours._spec == theirs._spec and ours.to_local().shape == theirs.to_local().shape, after
        assert ours.to_local().is_meta and ours.requires_grad
    x = rt.distribute_tensor(torch.empty(7, 5, device="meta"), mesh, [S0, S1], src_data_rank=None)
    assert x.to_local().is_meta and x.to_local().shape == (4 - rank // 2, 3 - rank % 2), x.to_local().shape
    for work, words in ((lambda: rt.distribute_tensor(torch.empty(7, 5, device="meta"), mesh, [S0, S1]), "meta"),
                        (lambda: rt.distribute_tensor(number((7, 5), 1).to_sparse() if rank == 0 else number((7, 5), 1),
                                                      mesh, [S0, S1]), "sparse")):
        try:
            work()
        except reshard.UnsupportedError as error:
            assert rank == 0 and words in str(error), error
        except reshard.InvalidError as error:  # the other ranks do not wait for it
            assert rank > 0 and "rank 0" in str(error), error
        else:
            raise AssertionError("it went through")


def simulated():
    """All ranks in one process, without any communication."""
    from torch.distributed._local_tensor import LocalTensorMode
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with LocalTensorMode(4):
            mesh, value = init_device_mesh("cpu", (2, 2)), number((7, 5), 2)
            for before, after in (([S0, S1], [S1, S0]), ([S0, S0], [R, S1]), ([R, S0], [R, R])):
                x = distribute_tensor(value, mesh, before)
                got, right = rt.redistribute(x, mesh, after), x.redistribute(mesh, after)
                for rank in range(4):
                    ours, theirs = (one._local_tensor._local_tensors[rank] for one in (got, right))
                    assert torch.equal(ours, theirs), (before, after, rank)
    finally:
        dist.destroy_process_group()


def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.ones(2, 8), mesh, [S0])
        try:
            rt.redistribute(x, mesh, [S1])
            raise AssertionError("a fake group sent something")
        except reshard.UnsupportedError as error:
            assert "'fake', which sends nothing" in str(error), error
    finally:
        dist.destroy_process_group()


def threads():
    """Each rank is a thread of this process."""
    from torch.testing._internal.distributed import multi_threaded_pg
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, raised = dist.HashStore(), []

    def work(rank):
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        x = DTensor.from_local(torch.ones(2, 8), init_device_mesh("cpu", (2,)), [S0])
        try:
            rt.redistribute(x, x.device_mesh, [S1])
        except reshard.UnsupportedError as error:
            raised.append(str(error))

    ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    multi_threaded_pg._uninstall_threaded_pg()
    assert len(raised) == 2 and all("'threaded', which has threads" in one for one in raised), raised


def later():
    mesh, value = init_device_mesh("cpu", (2,)), number((6, 4), 3)
    x = distribute_tensor(value, mesh, [S0])
    for _ in range(3):
        y, z = (rt.redistribute(x, mesh, [one], async_op=True) for one in (S1, R))
        assert isinstance(y._local_tensor, AsyncCollectiveTensor) and isinstance(z._local_tensor, AsyncCollectiveTensor)
        if dist.get_rank():
            dist.barrier()  # it does not need this rank to wait
        assert torch.equal(z.to_local() + 0, value)
        assert torch.equal(y.to_local() * 2, 2 * value.chunk(2, 1)[dist.get_rank()])
        if not dist.get_rank():
            dist.barrier()
    leaf = distribute_tensor(value, mesh, [S0]).requires_grad_()
    (rt.redistribute(leaf, mesh, [S1], async_op=True) * 3).to_local().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.full((6, 4), 3.0))
    same = rt.redistribute(distribute_tensor(value, mesh, [R]), mesh, [S0], async_op=True)
    assert torch.equal(same.to_local() + 0, value.chunk(2)[dist.get_rank()])


def masked():
    """The output of a sharded embedding, as torch reduces it; also twice with one plan."""
    mesh = init_device_mesh("cpu", (2,))
    table, ids = number((8, 3), 4), torch.tensor([0, 5, 7, 2, 1, 1])
    for after in ([R], [S0], [S1], [S0]):
        weight = distribute_tensor(table, mesh, [S0]).requires_grad_()
        y = torch.nn.functional.embedding(distribute_tensor(ids, mesh, [R]), weight)
        assert type(y.placements[0]).__name__ == "_MaskPartial", y.placements
        z = rt.redistribute(y, mesh, after)
        assert torch.equal(z.full_tensor(), table[ids]), after
        z.to_local().sum().backward()
        expected = torch.zeros(8, 3).index_add_(0, ids, torch.ones(6, 3))
        assert torch.equal(weight.grad.full_tensor(), expected), after
        full = rt.full_tensor(torch.nn.functional.embedding(distribute_tensor(ids, mesh, [R]), weight), dst_rank=1)
        assert torch.equal(full, table[ids]) if dist.get_rank() == 1 else full is None
    # Three there, from two of them back, and one to rank 1: the mask is not a part of a plan.
    assert len(bound.home_of().bound) == 6


def outside():
    mesh = mesh_over([1, 2])
    x = distribute_tensor(number((4, 4), 1), mesh, [S0])
    ours = [rt.redistribute(x, mesh, [S1]), rt.distribute_tensor(number((4, 4), 1), mesh, [R])]
    theirs = [x.redistribute(mesh, [S1]), distribute_tensor(number((4, 4), 1), mesh, [R])]
    for one, other in zip(ours, theirs):
        assert one.to_local().shape == other.to_local().shape, (one.to_local().shape, other.to_local().shape)


def alone(nobody):
    """One rank makes the call, and the others do not."""
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(number((4, 4), 1), mesh, [R])
    if dist.get_rank() == nobody:
        time.sleep(0.2)
        return
    got = rt.redistribute(whole, mesh, [S0])
    assert torch.equal(got.to_local(), number((4, 4), 1).chunk(2)[dist.get_rank()])
    assert not group._made and threading.active_count() == 1


def in_child(work):
    """Runs it in a process of its own, since torch keeps what it registers."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


class Modes(unittest.TestCase):
    def test_compiled(self):
        """torch.compile without graph breaks, and gradients"""
        worlds.run(4, compiled)

    def test_operator(self):
        """torch's checks of the operator"""
        worlds.run(2, operator)

    def test_faked(self):
        """FakeTensor mode has the shapes of this rank"""
        worlds.run(2, faked)

    def test_compiled_gradient(self):
        """the gradient of a compiled move has the dtype that is asked for on its way"""
        worlds.run(2, compiled_gradient)

    def test_on_meta(self):
        """tensors on meta, and a source without elements, which is an error on every rank"""
        worlds.run(4, on_meta)

    def test_simulated(self):
        """LocalTensor mode: the ranks of one process, as torch moves them"""
        in_child(simulated)

    def test_fake_group(self):
        """a fake process group is refused, and so is one whose ranks are threads"""
        in_child(fake_group)
        in_child(threads)

    def test_later(self):
        """async_op=True: a tensor that is waited for at its first use, in any order, and gradients"""
        worlds.run(2, later)

    def test_masked(self):
        """the output of a sharded embedding"""
        worlds.run(2, masked)

    def test_outside(self):
        """a rank outside of the mesh has the local tensor that torch has"""
        worlds.run(3, outside)

    def test_alone(self):
        """a move in which no rank sends anything communicates nothing, at its first use too"""
        for nobody in (0, 1):
            worlds.run(2, alone, nobody)


if __name__ == "__main__":
    tap.main()
