"""What PyTorch 2.13 gets wrong or refuses in moving DTensors, and what is right here. Two things that older
ones got wrong 2.13 does right: gathers of uneven shards are contiguous, and strided shards whose factor is not an
order of axes can be gathered."""
import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import reshard.torch as rt
import tap
import worlds
from moves import agrees, expected, mesh_over, position_of
from tensors import R, S0, S1, dtensor, same, sharded


class Upstream:
    """The calls that are compared, as torch has them."""

    @staticmethod
    def redistribute(x, mesh, placements):
        return x.redistribute(mesh, placements)

    @staticmethod
    def full_tensor(x):
        return x.full_tensor()

    @staticmethod
    def distribute_tensor(tensor, mesh, placements):
        return distribute_tensor(tensor, mesh, placements)


def other_mesh_same_placements(calls):
    """The other mesh is not looked at."""
    value, mesh, other = torch.arange(8.0), init_device_mesh("cpu", (4,)), mesh_over([3, 2, 1, 0])
    got = calls.redistribute(sharded(value, ((4,), [S0]), mesh), other, [S0])
    return got.device_mesh == other and same(got.to_local(), expected(value, other, [S0]))


def other_mesh(calls):
    """There is no way to another mesh."""
    value, mesh = torch.arange(8.0), init_device_mesh("cpu", (4,))
    other = init_device_mesh("cpu", (2, 2))
    got = calls.redistribute(sharded(value, ((4,), [S0]), mesh), other, [R, S0])
    return same(got.to_local(), expected(value, other, [R, S0]))


def flattened_gather(calls):
    """Nested shards of an uneven dim are gathered in one step, by sizes that are not theirs."""
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    mesh._flatten("a_b")
    value = torch.arange(4.0)
    return same(calls.full_tensor(sharded(value, ((2, 3), [S0, S0]), mesh)), value)


def uneven_strided_scatter(calls):
    """Pieces of a strided shard are not padded, and the scatter wants them alike."""
    mesh, value = init_device_mesh("cpu", (4,)), torch.arange(7.0)
    placements = [_StridedShard(0, split_factor=2)]
    got = calls.distribute_tensor(value, mesh, placements)
    return same(got.to_local(), expected(value, mesh, placements))


def uneven_strided_gather(calls):
    """A strided shard is read as an order of axes, which it is not where the dim does not cut evenly."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    value = torch.arange(7.0)
    x = sharded(value, ((3, 2), [_StridedShard(0, split_factor=2), S0]), mesh)
    return same(calls.full_tensor(x), value)


def uneven_contiguous(calls):
    mesh = init_device_mesh("cpu", (4,))
    value = torch.arange(15.0).reshape(3, 5)
    got = calls.redistribute(sharded(value, ((4,), [S1]), mesh), mesh, [R]).to_local()
    return got.is_contiguous() and same(got, value)


def strided_without_order(calls):
    value = torch.arange(12.0)
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    cases = [(line, [_StridedShard(0, split_factor=2)]), (grid, [_StridedShard(0, split_factor=3), R])]
    return all(same(calls.full_tensor(sharded(value, (tuple(mesh.mesh.shape), placements), mesh)), value)
               for mesh, placements in cases)


def groups_of_some_ranks():
    """A group that only its own ranks make: torch names it after how many groups each of them is in."""
    for ranks in ([0, 1], [0, 2]):
        dist.new_group(ranks)
    if dist.get_rank() != 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.barrier(group)
    return True


def our_groups_of_some_ranks():
    a, b = mesh_over([0, 1]), mesh_over([2])
    value = torch.arange(6.0)
    mesh_over([0, 2])
    local = expected(value, a, [S0]) if a.get_coordinate() is not None else torch.empty(0)
    got = rt.redistribute(dtensor(local, (6,), a, [S0]), b, [R])
    c = mesh_over([0, 2])
    got = rt.redistribute(got, c, [S0])
    return c.get_coordinate() is None or same(got.to_local(), value[3 * position_of(c):][:3])


class UpstreamMoves(unittest.TestCase):
    def check(self, nranks, work):
        self.assertTrue(all(worlds.run(nranks, work, rt)), work.__doc__)
        self.assertFalse(agrees(nranks, work, Upstream), f"2.13 has learnt it: {work.__doc__}")

    def test_meshes(self):
        """to another mesh: 2.13 ignores it or refuses"""
        self.check(4, other_mesh_same_placements)
        self.check(4, other_mesh)

    def test_flattened(self):
        """nested uneven shards and a flattened mesh: 2.13 gathers padding and loses data"""
        self.check(6, flattened_gather)

    def test_strided(self):
        """strided shards of uneven dims: 2.13 fails, or never ends"""
        self.check(4, uneven_strided_scatter)
        self.check(6, uneven_strided_gather)

    def test_groups(self):
        """groups of some ranks that the others know nothing of: 2.13 waits for ever"""
        self.assertTrue(all(worlds.run(3, our_groups_of_some_ranks)))
        self.assertFalse(agrees(3, groups_of_some_ranks))

    def test_mended(self):
        """what older versions got wrong and 2.13 does right"""
        for work in (uneven_contiguous, strided_without_order):
            self.assertTrue(all(worlds.run(4, work, rt)))
            self.assertTrue(all(worlds.run(4, work, Upstream)))


if __name__ == "__main__":
    tap.main()
