"""A process group as a transport: messages really travel through it, also if they go wrong."""
import os
import time
import unittest

import torch
import torch.distributed as dist

import reshard
import reshard.torch as rt
import tap
import worlds
from moves import mesh_over, number
from reshard.torch import bound, group
from tensors import R, S0, S1, cut, same

NO_SHARED_MEMORY = -1


def run(problem, given, transport, timeout=30, **options):
    plan = reshard.Plan(problem)
    found = reshard.bind(plan, transport=transport, node=NO_SHARED_MEMORY, timeout=timeout,
                         **options)
    made = [torch.empty(one.shape, dtype=given.dtype) for one in plan.dst.arrays(transport.rank)]
    for _ in range(3):
        found.run([given], made)
    return made[0]


def messages():
    transport = rt.Group()
    me, value = dist.get_rank(), number((64, 48), 1)
    own = cut(value, ((4,), [S0]))[me]
    assert same(run("f32[64,48] : 4:S0 -> 4:S1", own, transport), cut(value, ((4,), [S1]))[me])
    assert same(run("f32[64,48] : 4:S0 -> 4:R", own, transport, max_nbytes=4096), value)  # many rounds
    terms = [number((64, 48), seed) for seed in range(4)]
    assert same(run("f32[64,48] : 4:P -> 4:S1", terms[me], transport),
                cut(sum(terms), ((4,), [S1]))[me])
    # Tags of others do not get in the way.
    other = torch.full((3,), float(me))
    for tag in (0, 7):
        got = torch.empty(3)
        sent = dist.isend(other, (me + 1) % 4, tag=tag)
        assert same(run("f32[64,48] : 4:S0 -> 4:S1", own, transport), cut(value, ((4,), [S1]))[me])
        dist.recv(got, (me - 1) % 4, tag=tag)
        sent.wait()
        assert got[0] == (me - 1) % 4


def of_some_ranks():
    """Ranks are numbered as in the group."""
    dist_group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        transport = rt.Group(dist_group)
        assert transport.ranks == [1, 3] and transport.nranks == 2
        value = number((6, 4), 2)
        own = cut(value, ((2,), [S0]))[transport.rank]
        assert same(run("f32[6,4] : 2:S0 -> 2:S1", own, transport), cut(value, ((2,), [S1]))[transport.rank])
    else:
        try:
            rt.Group(dist_group)
            raise AssertionError("this rank is not in it")
        except ValueError as error:
            assert "not in the process group" in str(error)
    made = group.made_group((0, 2, 3)) if dist.get_rank() != 1 else None
    if made is not None:
        transport = rt.Group(made)
        assert transport.ranks == [0, 2, 3]
        own = torch.full((4,), float(transport.rank))
        assert run("f32[4] : 3:P -> 3:R", own, transport).tolist() == [3.0] * 4
        assert group.made_group((0, 2, 3)) is made


def a_rank_dies(folder):
    transport = rt.Group()
    plan = reshard.Plan("f32[1024] : 3:S0 -> 3:R")
    found = reshard.bind(plan, transport=transport, node=NO_SHARED_MEMORY, timeout=5)
    dist.barrier()
    if dist.get_rank() == 2:
        os._exit(0)
    made = torch.empty(1024)
    began = time.monotonic()
    try:
        found.run([torch.zeros(plan.src.arrays(transport.rank)[0].shape)], [made])
        message = "nothing"
    except reshard.Error as error:
        message = f"{type(error).__name__} {error}"
    with open(folder(f"error{dist.get_rank()}"), "w") as file:
        file.write(f"{time.monotonic() - began:.1f} {message}")
    os._exit(0)


def a_callback_fails():
    class Failing(rt.Group):
        def send(self, to, tag, data):
            raise ZeroDivisionError("here")

    transport = (Failing if dist.get_rank() == 1 else rt.Group)()
    try:
        run("f32[64] : 2:S0 -> 2:R", torch.zeros(32), transport, timeout=2)
        raise AssertionError("it went through")
    except ZeroDivisionError:
        assert dist.get_rank() == 1
    except (reshard.PeerError, reshard.TimedOutError):
        assert dist.get_rank() == 0


def layouts():
    """Between torch's words and the library's, both ways."""
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.placement_types import _StridedShard
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements, text in (([S0, S1], "S(0),S(1)"), ([R, Partial("max")], "R,P(max)"),
                             ([_StridedShard(0, split_factor=2), S0], "_S(0,2),S(0)")):
        layout = rt.layout_on(torch.bfloat16, (6, 4), mesh, placements)
        assert str(layout) == f"bf16[6,4] @ dp=2,tp=2 : {text}", layout
        assert rt.placements(layout) == tuple(placements)
    assert rt.device_mesh(layout) == mesh
    odd = mesh_over([3, 1, 0, 2])
    layout = rt.layout_on(torch.float32, (6, 4), odd, [S1])
    assert str(layout) == "f32[6,4] @ 4 ranks=3,1,0,2 : S(1)" and rt.device_mesh(layout) == odd
    swapped = reshard.Layout("f32[8,4] @ dp=2,tp=2 : [tp.dp, -]")
    assert rt.placements(swapped) == (_StridedShard(0, split_factor=2), S0)
    for wrong in ([S0], [S0, dist.tensor.Shard(2)]):
        try:
            rt.layout_on(torch.float32, (6, 4), mesh, wrong)
            raise AssertionError(wrong)
        except ValueError:
            pass
    for wrong in ("f32[4] @ 2 : C(0,1)", "f32[4] @ 2 : B(0)"):
        try:
            rt.placements(reshard.Layout(wrong))
            raise AssertionError(wrong)
        except NotImplementedError as error:
            assert "torch has no placement" in str(error)


def a_group_without_the_host():
    """One that moves only the memory of other devices gets a gloo group beside it."""
    saved, group.has_host = group.has_host, lambda one: False
    try:
        value = number((6, 4), 2)
        home = bound.home_of()
        assert home.transport.group is not dist.group.WORLD and home.ranks == (0, 1)
        assert home.gathered(dist.get_rank()) == [0, 1]
    finally:
        group.has_host = saved
    del value


def on_devices():
    """Messages on devices, with memory of the host in their place: gloo is given what NCCL would be."""
    me, other = dist.get_rank(), 1 - dist.get_rank()
    saved = group.opened_device, group.device_tensor, bound.has_nccl
    group.opened_device = lambda one: 3
    group.device_tensor = lambda address, nbytes: torch.frombuffer(reshard.transport.bytes_at(address, nbytes),
                                                                   dtype=torch.uint8)
    bound.has_nccl = lambda one: True
    try:
        transport = rt.Group(devices=dist.group.WORLD)
        assert transport.table.exchange and transport.table.device == 3
        for nbytes in (1, 5000, 1 << 20):
            out = [torch.full((nbytes,), 10 * k + me, dtype=torch.uint8) for k in range(2)]
            into = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
            message = reshard.transport.DeviceMessage
            request = transport.exchange([message(other, 4 * k, sends, one.data_ptr(), nbytes)
                                          for sends, list_ in ((False, into), (True, out))
                                          for k, one in enumerate(list_)])
            assert not transport.test(request) and not transport.cancel(request)  # gloo is complete after a wait
            for work in request.works:
                work.wait()
            request.works = []
            assert transport.test(request)
            assert [one.unique().tolist() for one in into] == [[other], [10 + other]]
            assert transport.cancel(request)
        assert not rt.Group().table.exchange
        # Ranks of several hosts use it for tensors on CUDA devices, and nothing else does.
        home = bound.home_of()
        cuda = torch.device("cuda", 0)
        assert home.transport_for(cuda) is home.transport
        home._nodes = [0, 1]
        assert home.transport_for(cuda) is not home.transport and home.transport_for(cuda).table.exchange
        for devices in (None, torch.device("cpu"), [cuda]):
            assert home.transport_for(devices) is home.transport
    finally:
        group.opened_device, group.device_tensor, bound.has_nccl = saved


class Groups(unittest.TestCase):
    def test_messages(self):
        """chunks travel as messages, in rounds, beside those of the program"""
        worlds.run(4, messages)

    def test_some_ranks(self):
        """groups of some ranks, registered and made"""
        worlds.run(4, of_some_ranks)

    def test_death(self):
        """a rank that dies is an error on the others, soon"""
        with worlds.Folder() as folder:
            try:
                worlds.run(3, a_rank_dies, folder)
            except FileNotFoundError:
                pass  # they leave no answers
            for rank in (0, 1):
                seconds, message = open(folder(f"error{rank}")).read().split(" ", 1)
                self.assertRegex(message, "PeerError|TimedOutError")
                self.assertLess(float(seconds), 60)

    def test_exception(self):
        """an exception in a callback is raised where it happened, and the others fail"""
        worlds.run(2, a_callback_fails)

    def test_layouts(self):
        """meshes and placements become layouts, and layouts meshes and placements"""
        worlds.run(4, layouts)

    def test_devices(self):
        """a group that sends memory of devices"""
        worlds.run(2, on_devices)

    def test_no_host(self):
        """a group that cannot move memory of the host"""
        worlds.run(2, a_group_without_the_host)


if __name__ == "__main__":
    tap.main()
