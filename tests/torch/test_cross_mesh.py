"""Tensors from one mesh to another, from one rank and to one, and what is kept between calls."""
import gc
import itertools
import time
import unittest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import reshard
import reshard.torch as rt
import tap
import worlds
from moves import P, Problem, check, expected, mesh_over, number
from reshard.torch import bound
from tensors import R, S0, S1, Meshes, dtensor, same, sharded


def across():
    meshes = [init_device_mesh("cpu", (6,)), init_device_mesh("cpu", (2, 3)), mesh_over([5, 3, 1, 0, 2, 4]),
              mesh_over([0, 1]), mesh_over([2, 3, 4, 5], (2, 2)), mesh_over([4, 1, 2]), mesh_over([3])]
    for shape in ((7, 5), (2, 3)):
        for (i, a), (k, b) in itertools.product(enumerate(meshes), enumerate(meshes)):
            src = [[S0, S1][: a.ndim], [P, S1][: a.ndim]][(i + k) % 2]
            dst = [[S1, S0][: b.ndim], [R, S0][: b.ndim], [S0, S0][: b.ndim]][(i + k) % 3]
            problem = Problem(shape, tuple(a.mesh.shape), src)
            got = rt.redistribute(problem.tensor(a), b, dst)
            check(got, problem.value, b, dst, (i, k, shape))


def across_gradients():
    a, b, c = mesh_over([0, 1]), mesh_over([2, 3]), init_device_mesh("cpu", (2, 2))
    gradient = number((5, 4), 2)
    for src, dst in ((a, b), (b, a), (a, c), (c, b)):
        before, after = [S0] * src.ndim, [S1] * dst.ndim
        x = Problem((5, 4), tuple(src.mesh.shape), before).tensor(src)
        if src.get_coordinate() is not None:
            x.requires_grad_()  # a rank that has nothing of it need not know
        y = rt.redistribute(x, dst, after)
        inside = dst.get_coordinate() is not None
        own = y.to_local()
        own.backward(expected(gradient, dst, after) if inside else torch.empty_like(own))
        if src.get_coordinate() is not None:
            check(x.grad, gradient, src, before, (src, dst))
    with torch.no_grad():
        assert not rt.redistribute(x, dst, after).requires_grad


def one_rank():
    world = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2)), mesh_over([1, 2])]
    for mesh, shape in itertools.product(meshes, ((6, 5), (1,), (3, 4, 2))):
        kinds = [R, S0] + ([S1] if len(shape) > 1 else [])
        for origin in range(world):
            placements = [kinds[(origin + axis) % len(kinds)] for axis in range(mesh.ndim)]
            value = number(shape, origin)
            given = value if dist.get_rank() == origin else torch.empty(shape, device="meta")
            x = rt.distribute_tensor(given, mesh, placements, src_rank=origin)
            check(x, value, mesh, placements, (shape, origin))
            full = rt.full_tensor(x, dst_rank=origin)
            assert (full is None) == (dist.get_rank() != origin)
            assert full is None or same(full, value)
        # As torch's: from the first rank of the mesh.
        value = number(shape, 50)
        mine = value if dist.get_rank() == int(mesh.mesh.flatten()[0]) else value + 1
        placements = [S0] * mesh.ndim
        ours, theirs = rt.distribute_tensor(mine, mesh, placements), distribute_tensor(mine, mesh, placements)
        if mesh.get_coordinate() is not None:
            assert same(ours.to_local(), theirs.to_local())
            assert same(rt.full_tensor(ours), theirs.full_tensor())
    # Torch's own keyword: a coordinate on every axis, or None for the parts of each rank's own tensor.
    for mesh, source in itertools.product(meshes, (0, 1, None)):
        mine, placements = number((6, 5), dist.get_rank()), [S0, S1][:mesh.ndim]
        ours = rt.distribute_tensor(mine, mesh, placements, src_data_rank=source)
        theirs = distribute_tensor(mine, mesh, placements, src_data_rank=source)
        if mesh.get_coordinate() is not None:
            assert same(ours.to_local(), theirs.to_local()), (mesh, source)
    for options in ({"src_data_rank": 2}, {"src_rank": 0, "src_data_rank": 1}, {"src_rank": 99}):
        try:
            rt.distribute_tensor(mine, meshes[1], [S0, S1], **options)
        except reshard.InvalidError:
            continue
        raise AssertionError(f"{options} is taken")
    mesh = meshes[1]
    for word in ("sum", "avg", "max"):
        placements = [Partial(word), S0]
        ours = rt.distribute_tensor(number((6, 5), 3), mesh, placements)
        theirs = distribute_tensor(number((6, 5), 3), mesh, placements)
        assert same(ours.to_local(), theirs.to_local()), word
        assert same(rt.full_tensor(ours), number((6, 5), 3)), word
    x = distribute_tensor(number((6, 5), 3), mesh, [S0, S1])
    assert rt.distribute_tensor(x, mesh, [S0, Shard(-1)]) is x  # as in torch
    for kind, work in ((ValueError, lambda: rt.distribute_tensor(x, mesh, [S0, R])),
                       (TypeError, lambda: rt.distribute_tensor([1.0], mesh, [S0, R])),
                       (TypeError, lambda: rt.redistribute(x, mesh, ["S(0)", "R"])),
                       (TypeError, lambda: rt.redistribute(x, "cpu", [S0, R])),
                       (ValueError, lambda: rt.full_tensor(x.to_local(), dst_rank=0))):
        try:
            work()
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    parameter = rt.distribute_tensor(torch.nn.Parameter(number((6, 5), 3)), mesh, [S0, R])
    assert parameter.requires_grad and parameter.is_leaf
    whole = rt.full_tensor(parameter)
    whole.sum().backward()
    check(parameter.grad, torch.ones(6, 5), mesh, [S0, R])


def submeshes():
    """Every rank on its own row of a mesh, and rows of three dims that no group was made for."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    for names in (("tp",), ("dp",), ("cp", "tp"), ("dp", "tp")):
        sub = mesh[names]
        value = number((5, 6), 20 + min(sub.mesh.flatten().tolist()))
        src, dst = [S0, S1][: sub.ndim], [S1, R][: sub.ndim]
        check(rt.redistribute(sharded_on(value, sub, src), sub, dst), value, sub, dst, names)
    assert all(set(home.ranks) <= set(range(8)) for home in bound._homes.values())


def sharded_on(value, mesh, placements):
    return dtensor(expected(value, mesh, placements), value.shape, mesh, placements)


def what_lies_otherwise():
    """Local tensors with strides, lazy signs and other dtypes."""
    mesh = Meshes()[(4,)]
    value = number((8, 6), 3, torch.complex64) * (1 + 2j)
    local = expected(value, mesh, [S0])
    for given in (local.t().contiguous().t(), local.conj().clone().conj(), torch.cat([local, local], 1)[:, :6]):
        assert not given.is_contiguous() or given.is_conj()
        check(rt.redistribute(dtensor(given, (8, 6), mesh, [S0]), mesh, [S1]), value, mesh, [S1])
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128):
        value = number((8, 6), 3).to(dtype)
        check(rt.redistribute(sharded(value, ((4,), [S0]), mesh), mesh, [S1]), value, mesh, [S1], dtype)
    scalar = sharded(torch.tensor(3.0), ((4,), [R]), mesh)
    assert rt.full_tensor(scalar).item() == 3.0
    assert same(rt.full_tensor(Problem((), (4,), [P]).tensor(mesh)), Problem((), (4,), [P]).value)


def scalars():
    """A tensor without dims to meshes that some ranks are not in, and back, with gradients; from any rank."""
    world, some, one = init_device_mesh("cpu", (4,)), mesh_over([3, 1]), mesh_over([2])
    value = torch.tensor(2.5)
    for a, b in itertools.permutations((world, some, one), 2):
        x = rt.distribute_tensor(value, a, [R], src_rank=2).requires_grad_(a.get_coordinate() is not None)
        check(x, value, a, [R])
        y = rt.redistribute(x, b, [R])
        check(y, value, b, [R], (a, b))
        check(rt.redistribute(y.detach(), a, [R]), value, a, [R], (b, a))
        if y.requires_grad:  # a rank of neither mesh has nothing to do with it
            (3 * y.to_local()).sum().backward()
        if a.get_coordinate() is not None:
            check(x.grad, torch.tensor(3.0), a, [R], (a, b))
        z = rt.redistribute(Problem((), (a.size(),), [P]).tensor(a), b, [R])
        check(z, Problem((), (a.size(),), [P]).value, b, [R], (a, b))
        last = rt.full_tensor(y, dst_rank=0)
        assert last is None if dist.get_rank() else same(last, value)


def strided():
    """Both things that a strided shard of an uneven dim can mean, told apart by the shapes of its parts."""
    dp, tp = 3, 2
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    placements = [_StridedShard(0, split_factor=tp), S0]
    me = mesh.get_coordinate()
    for n in (7, 9, 12, 13):
        value = torch.arange(2.0 * n).reshape(n, 2)
        plain = sharded(value, ((dp, tp), placements), mesh)
        parts = value.chunk(tp)[me[1]].chunk(dp) if me[1] < len(value.chunk(tp)) else ()
        own = parts[me[0]] if me[0] < len(parts) else value[:0]
        ordered = dtensor(own.contiguous(), value.shape, mesh, placements)
        for x in (plain, ordered):
            for dst in ([R, R], [S0, R], [S1, S0], placements):
                got = rt.redistribute(x, mesh, dst)
                if dst is placements:
                    assert x is not ordered or same(got.to_local(), own)
                else:
                    check(got, value, mesh, dst, n)
            x.requires_grad_()
            rt.redistribute(x, mesh, [S1, R]).backward(sharded(-value, ((dp, tp), [S1, R]), mesh))
            assert same(x.grad.to_local(), -x.to_local()), n  # in the place of what it is the gradient of
            x.requires_grad_(False)
            assert same(rt.full_tensor(x), value), n
            last = rt.full_tensor(x, dst_rank=5)
            assert last is None or same(last, value), n
    got = rt.redistribute(sharded(value, ((dp, tp), [S0, R]), mesh), mesh, placements)
    assert same(got.to_local(), own) and same(got.full_tensor(), value)  # as torch reads it


def made_by_fsdp():
    """Parameters that FSDP2 has cut after tensor parallelism, of as many rows as do not cut evenly."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    for rows in (7, 9, 13, 12):
        torch.manual_seed(rows)
        module = torch.nn.Linear(4, rows)
        weight = module.weight.detach().clone()
        parallelize_module(module, mesh["tp"], ColwiseParallel())
        fully_shard(module, mesh=mesh["dp"])
        x = module.weight
        assert isinstance(x.placements[0], _StridedShard), x.placements
        assert same(rt.full_tensor(x).detach(), weight), rows
        check(rt.redistribute(x.detach(), mesh, [S0, R]), weight, mesh, [S0, R], rows)
        back = rt.redistribute(sharded(weight, ((3, 2), [S1, S0]), mesh), mesh, x.placements)
        assert same(back.to_local(), x.to_local().detach()), rows


def wrong_local():
    """One rank's local tensor is not what the placements say: every rank hears of it, at once."""
    mesh = Meshes()[(4,)]
    value = number((8, 6), 3)
    local = expected(value, mesh, [S0])
    x = dtensor(local if dist.get_rank() != 2 else local[:1], (8, 6), mesh, [S0])
    began = time.monotonic()
    try:
        rt.redistribute(x, mesh, [S1])
        raise AssertionError("it went through")
    except rt.moving.MismatchError as error:
        assert dist.get_rank() == 2 and "[1, 6]" in str(error), error
    except (rt.moving.InvalidError, ConnectionError) as error:
        assert "2" in str(error), error
    assert time.monotonic() - began < 60
    check(rt.redistribute(sharded(value, ((4,), [S0]), mesh), mesh, [S1]), value, mesh, [S1])


def kept():
    mesh = Meshes()[(4,)]
    value = number((8, 6), 3)
    x = sharded(value, ((4,), [S0]), mesh)
    rt.redistribute(x, mesh, [S1])
    home = bound.home_of()
    first, = home.bound.values()
    for _ in range(3):
        rt.redistribute(x, mesh, [S1])
    assert list(home.bound.values()) == [first]  # bound once
    bound.MAX_PLANS = 5
    for n in range(1, 12):
        y = sharded(number((n, 6), 3), ((4,), [S0]), mesh)
        check(rt.redistribute(y, mesh, [S1]), number((n, 6), 3), mesh, [S1])
        check(rt.redistribute(x, mesh, [S1]), value, mesh, [S1])
    assert len(home.bound) == 5 and first in home.bound.values()  # the one in use stays
    bound.MAX_NBYTES = 1
    rt.redistribute(sharded(number((13, 6), 3), ((4,), [S0]), mesh), mesh, [S1])
    assert len(home.bound) == 1
    group = dist.new_group([0, 1, 2, 3])
    bound.home_of(group)
    assert len(bound._homes) == 2
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(bound._homes) == 1  # gone with its group
    transport = home.transport
    del home, mesh, x, y
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert not bound._homes
    refused = None
    try:
        transport.gather(b"x")
    except ValueError as error:
        refused = str(error)
    assert "destroyed" in refused
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def several_hosts():
    """Told that ranks are on different hosts, plans copy between them once, and in more stages."""
    home = bound.home_of()
    assert home.nodes is None  # they are on one
    home._nodes = [0, 0, 1, 1]
    mesh = Meshes()[(2, 2)]
    for src, dst in (([S0, S1], [R, R]), ([P, S0], [R, S0]), ([S0, R], [R, S1]), ([P, P], [R, R])):
        problem = Problem((9, 6), (2, 2), src)
        check(rt.redistribute(problem.tensor(mesh), mesh, dst), problem.value, mesh, dst, (src, dst))
    crossed = [one.plan.totals["nbytes_crossed"] for one in home.bound.values()]
    assert all(0 < n <= 2 * 9 * 6 * 4 for n in crossed[:1]), crossed


class CrossMesh(unittest.TestCase):
    def test_across(self):
        """from any mesh of some ranks to any other, overlapping or not"""
        worlds.run(6, across)

    def test_gradients(self):
        """gradients go back to the mesh they came from"""
        worlds.run(4, across_gradients)

    def test_one_rank(self):
        """distribute_tensor from each rank and full_tensor to each, in the mesh or not"""
        worlds.run(4, one_rank)

    def test_submeshes(self):
        """every rank on the part of a mesh that it is in"""
        worlds.run(8, submeshes)

    def test_otherwise(self):
        """strides, lazy signs, dtypes and scalars"""
        worlds.run(4, what_lies_otherwise)

    def test_scalars(self):
        """tensors without dims, to ranks that are in one mesh alone"""
        worlds.run(4, scalars)

    def test_strided(self):
        """strided shards of uneven dims, as distribute_tensor and as FSDP2 cuts them"""
        worlds.run(6, strided)

    def test_fsdp(self):
        """what FSDP2 over tensor parallelism makes, of uneven rows too"""
        worlds.run(6, made_by_fsdp)

    def test_wrong_local(self):
        """a local tensor that does not fit fails on all ranks, and the next call works"""
        worlds.run(4, wrong_local)

    def test_hosts(self):
        """ranks on several hosts"""
        worlds.run(4, several_hosts)

    def test_kept(self):
        """plans are bound once, few are kept, and they go with their process group"""
        worlds.run(4, kept)


if __name__ == "__main__":
    tap.main()
