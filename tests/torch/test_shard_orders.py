"""Axes that cut a dim in any order, and torch's strided shards, which say such orders and more."""
import itertools
import random
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import reshard
import reshard.torch as rt
import tap
import worlds
from moves import P, Problem, check, number
from tensors import R, S0, S1, S2, Meshes, cut, dtensor, same, sharded

SHAPES = [(16, 8), (8, 16, 32), (17, 5), (13, 2, 13), (33, 16, 8, 1)]


def orders(ndim, naxes=3):
    """Per dim the axes that cut it, in every order."""
    found = set()
    for cuts in itertools.product(range(-1, ndim), repeat=naxes):
        for order in itertools.permutations(range(naxes)):
            found.add(tuple(tuple(axis for axis in order if cuts[axis] == dim) for dim in range(ndim)))
    return sorted(found)


class Ordered:
    """A layout of axes in an order, on (2, 2, 2)."""

    def __init__(self, shape, order):
        self.layout = reshard.Layout.by_dim("f32", shape, "2x2x2", order)
        self.placements = rt.placements(self.layout)

    def part(self, value):
        """Returns this rank's part of a value. For an order of axes it is one box."""
        held, = self.layout.boxes(dist.get_rank())
        return value[tuple(slice(lo, lo + length) for lo, length in zip(held.lo, held.len))].contiguous()

    def tensor(self, value, mesh):
        return dtensor(self.part(value), value.shape, mesh, self.placements)

    def check(self, got, value, what):
        assert tuple(got.placements) == self.placements, what
        assert same(got.to_local(), self.part(value)), (what, got.to_local().shape)


def chain():
    """From order to order, there and on."""
    mesh, chance = Meshes()[(2, 2, 2)], random.Random(5)
    for shape in SHAPES:
        value, every = number(shape, 8), orders(len(shape))
        last = Ordered(shape, every[0]).tensor(value, mesh)
        for order in chance.sample(every, 8):
            last = rt.redistribute(last, mesh, Ordered(shape, order).placements)
            Ordered(shape, order).check(last, value, (shape, order))
            assert same(rt.full_tensor(last), value), (shape, order)


def stated(value, mesh, order):
    """A DTensor of plain shards whose spec says apart from them in which order the axes cut."""
    made = Ordered(value.shape, order)
    placements = [R, R, R]
    for dim, axes in enumerate(order):
        for axis in axes:
            placements[axis] = dist.tensor.Shard(dim)
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(value.shape, value.stride(), value.dtype),
                       shard_order=tuple(ShardOrderEntry(*one) for one in enumerate(order) if one[1]))
    return DTensor(made.part(value), spec, requires_grad=False)


def by_spec(folder):
    """Orders that are in the spec alone, as torch's own planner of redistributions leaves them."""
    mesh, chance = Meshes()[(2, 2, 2)], random.Random(7)
    for shape in SHAPES:
        value, every = number(shape, 8), orders(len(shape))
        for order in chance.sample(every, 6) + [((2, 1, 0), *[()] * (len(shape) - 1))]:
            x, made = stated(value, mesh, order), Ordered(shape, order)
            assert rt.placements(rt.layout(x)) == made.placements, (shape, order)
            assert same(rt.full_tensor(x), value), (shape, order)
            whole = rt.full_tensor(x, dst_rank=3)
            assert dist.get_rank() != 3 or same(whole, value), (shape, order)
            for other in (x.placements, [S1, R, S0]):
                check(rt.redistribute(x, mesh, other), value, mesh, other, (shape, order, other))
            made.check(rt.redistribute(x, mesh, made.placements), value, (shape, order))
            state = {"x": x}
            dcp.save(state, storage_writer=rt.Writer(folder()), planner=rt.SavePlanner())
            state = {"x": torch.zeros(shape)}
            dcp.load(state, storage_reader=rt.Reader(folder()), planner=rt.LoadPlanner())
            assert same(state["x"], value), (shape, order)


def named():
    """The changes that torch traces step by step."""
    mesh, value = Meshes()[(2, 2, 2)], number((8, 8, 8), 3)
    cases = [([(0, 1, 2), (), ()], [(1, 2), (), ()]), ([(1, 0, 2), (), ()], [(1, 2), (), ()]),
             ([(1, 0, 2), (), ()], [(0, 1), (), ()]), ([(0, 1), (), ()], [(2,), (1,), ()]),
             ([(0, 1, 2), (), ()], [(), (0, 1, 2), ()])]
    for src, dst in cases:
        got = rt.redistribute(Ordered((8, 8, 8), src).tensor(value, mesh), mesh, Ordered((8, 8, 8), dst).placements)
        Ordered((8, 8, 8), dst).check(got, value, (src, dst))


def from_partial():
    """Partial sums and minima with shards become any order of axes."""
    mesh, chance = Meshes()[(2, 2, 2)], random.Random(6)
    for shape in SHAPES:
        kinds = [S0, S1, P, Partial("min"), R] + ([S2] if len(shape) > 2 else [])
        sources = [one for one in itertools.combinations(kinds, 3)
                   if len({str(kind) for kind in one if kind.is_partial()}) < 2]
        for src in chance.sample(sources, 4):
            problem, order = Problem(shape, (2, 2, 2), src), chance.choice(orders(len(shape)))
            got = rt.redistribute(problem.tensor(mesh), mesh, Ordered(shape, order).placements)
            Ordered(shape, order).check(got, problem.value, (shape, src, order))


def strided():
    """Strided shards that are not an order of axes, to and from all layouts."""
    line, grid = Meshes()[(8,)], Meshes()[(4, 2)]
    cases = [((16, 13), line, [_StridedShard(0, split_factor=2)]),
             ((24, 8), grid, [_StridedShard(0, split_factor=3), R]),
             ((24, 8), grid, [_StridedShard(1, split_factor=3), S0]),
             ((31, 13), line, [_StridedShard(1, split_factor=3)])]
    for shape, mesh, placements in cases:
        value, counts = number(shape, 4), tuple(mesh.mesh.shape)
        x = sharded(value, (counts, placements), mesh)
        assert same(rt.full_tensor(x), value), (shape, placements)
        for other in ([S0, S1], [R, R], [S1, S0]):
            other = other[:mesh.ndim]
            check(rt.redistribute(x, mesh, other), value, mesh, other, (shape, placements, other))
            there = rt.redistribute(sharded(value, (counts, other), mesh), mesh, placements)
            assert same(there.to_local(), x.to_local()), (shape, placements, other)
        problem = Problem(shape, counts, [P, R][:mesh.ndim])
        got = rt.redistribute(problem.tensor(mesh), mesh, placements)
        wanted = cut(problem.value, (counts, placements))[dist.get_rank()]
        assert same(got.to_local(), wanted), (shape, placements)
        try:
            rt.redistribute(x, mesh, [P, R][:mesh.ndim])
            raise AssertionError("a strided shard became partial")
        except ValueError:
            pass
    # Torch's own name for "by the second axis first", on a dim that is counted from the end.
    value, placements = number((8, 4), 5), [_StridedShard(-2, split_factor=2), dist.tensor.Shard(-2)]
    got = rt.redistribute(sharded(value, ((4, 2), [R, R]), grid), grid, placements)
    order = reshard.Layout.by_dim("f32", (8, 4), "4x2", [[1, 0], []])
    held, = order.boxes(dist.get_rank())
    assert same(got.to_local(), value[held.lo[0]:held.lo[0] + held.len[0]]) and got.placements == rt.placements(order)


def flattened():
    """Nested shards and reductions where torch would take a flattened mesh."""
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    mesh._flatten("a_b")
    for shape in ((4,), (10,), (7, 5)):
        for src, dst in (([S0, S0], [R, R]), ([P, P], [S0, S0]), ([P, P], [R, R]), ([P, R], [S0, S0]),
                         ([Partial("avg"), P], [S0, R])):
            problem = Problem(shape, (2, 3), src)
            check(rt.redistribute(problem.tensor(mesh), mesh, dst), problem.value, mesh, dst, (shape, src, dst))
    got = rt.redistribute(Problem((4,), (2, 3), [P, P]).tensor(mesh), mesh, [S0, S0])
    return got.to_local().numel()


class ShardOrders(unittest.TestCase):
    def test_chain(self):
        """from any order of axes to any other, evenly and not"""
        worlds.run(8, chain)

    def test_by_spec(self):
        """orders that the spec of a DTensor says apart from its placements"""
        with worlds.Folder() as folder:
            worlds.run(8, by_spec, folder)

    def test_named(self):
        """the changes of order that torch traces"""
        worlds.run(8, named)

    def test_partial(self):
        """partial values to any order of axes"""
        worlds.run(8, from_partial)

    def test_strided(self):
        """strided shards that no order of axes says"""
        worlds.run(8, strided)

    def test_flattened(self):
        """nested uneven shards with a flattened mesh at hand"""
        self.assertEqual(worlds.run(6, flattened), [1, 1, 0, 1, 1, 0])


if __name__ == "__main__":
    tap.main()
