"""ShardedTensors from any spec to any other, and what ShardedTensor.reshard makes of the same."""
import copy
import itertools
import unittest

import torch
import torch.distributed as dist
from torch.distributed._shard import _shard_tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, TensorProperties
from torch.distributed._shard.sharding_spec import (ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata)

import reshard.torch as rt
import tap
import worlds
from moves import agrees, number
from tensors import same

# The cases of the upstream test: all its permutations are their own inverses.
UPSTREAM = [((0, [0, 1, 3, 2]), (0, [2, 3, 1, 0])), ((0, [2, 3, 0, 1]), (1, [1, 0, 3, 2])),
            ((1, [1, 0, 2, 3]), (0, [3, 2, 0, 1])), ((1, [3, 2, 1, 0]), (1, [0, 1, 2, 3]))]
# Those that are not: three ranks in a ring, and four.
RINGS = [((0, [0, 1, 2, 3]), (0, [1, 2, 0, 3])), ((1, [0, 1, 2, 3]), (1, [1, 2, 3, 0])),
         ((0, [2, 0, 3, 1]), (0, [0, 1, 2, 3])), ((0, [0, 1, 2, 3]), (1, [1, 2, 3, 0]))]
SIZES = [(13, 21), (14, 23), (15, 26), (12, 24), (2, 3)]


def chunks(dim, ranks, device="cpu"):
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/{device}" for rank in ranks])


def boxes(*shards, device="cpu"):
    return EnumerableShardingSpec([ShardMetadata(shard_offsets=list(lo), shard_sizes=list(size),
                                                 placement=f"rank:{rank}/{device}")
                                   for rank, lo, size in shards])


def made(value, spec, group=None):
    """A ShardedTensor of any spec, from local shards."""
    metadata = spec.build_metadata(value.shape, TensorProperties(dtype=value.dtype))
    for one in metadata.shards_metadata:  # an empty one at the end of a chunk spec is beyond the tensor
        one.shard_offsets = [min(lo, size) for lo, size in zip(one.shard_offsets, value.shape)]
    local = [Shard(tensor=part(value, one), metadata=one) for one in metadata.shards_metadata
             if one.placement.rank() == dist.get_rank()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, sharded_tensor_metadata=metadata, sharding_spec=spec, process_group=group)


def part(value, shard):
    return value[tuple(slice(lo, lo + size) for lo, size in zip(shard.shard_offsets, shard.shard_sizes))
                 ].contiguous()


def check(st, value, spec, what=""):
    """That every local shard is where the metadata says, and has its values."""
    assert st.sharding_spec() is spec and st.size() == value.shape, what
    own = [one for one in st.metadata().shards_metadata if one.placement.rank() == dist.get_rank()]
    assert [one.metadata for one in st.local_shards()] == own, what
    for one in st.local_shards():
        assert same(one.tensor, part(value, one.metadata)), (what, one)


def upstream():
    for (a, b), size in itertools.product(UPSTREAM + RINGS, SIZES):
        value = number(size, 1)
        spec = chunks(*b)
        if size == (2, 3):  # upstream's own sharding does not take empty shards
            check(rt.reshard(made(value, chunks(*a)), spec), value, spec, (a, b, size))
            continue
        st, fresh = _shard_tensor(value, chunks(*a)), _shard_tensor(value, chunks(*b))
        assert rt.reshard(st, spec) is st
        check(st, value, spec, (a, b, size))
        assert same(st.local_tensor(), fresh.local_tensor())
        assert st.local_shards()[0].metadata == fresh.local_shards()[0].metadata
        assert st.metadata().shards_metadata == sorted(fresh.metadata().shards_metadata,
                                                       key=lambda one: one.placement.rank())


def any_spec():
    """Chunks over some ranks, a rank twice, explicit boxes, several on a rank and none on another."""
    specs = [chunks(0, [0, 1, 2, 3]), chunks(-1, [3, 1]), chunks(0, [0, 1, 1, 0]), chunks(1, [2]),
             boxes((0, (0, 0), (4, 20)), (1, (4, 0), (6, 10)), (0, (4, 10), (6, 10))),
             boxes((3, (0, 0), (10, 3)), (3, (0, 3), (2, 17)), (2, (2, 3), (8, 17))),
             boxes(*[(row % 4, (row, 0), (1, 20)) for row in range(10)])]
    value = number((10, 20), 2)
    for a, b in itertools.permutations(specs, 2):
        if isinstance(a, ChunkShardingSpec) and isinstance(a.dim, int) and a.dim < 0:
            a = chunks(a.dim % 2, [one.rank() for one in a.placements])  # upstream builds only these
        st = made(value, a)
        rt.reshard(st, resharding_spec=b)
        check(st, value, b, (a, b))
        rt.reshard(st, a)
        check(st, value, a, (b, a))


def gradients():
    value, gradient = number((13, 21), 1), number((13, 21), 2)
    cases = [(chunks(*a), chunks(*b)) for a, b in UPSTREAM + RINGS]
    cases += [(chunks(0, [0, 1]), chunks(1, [2, 3, 0, 1])),
              (boxes((0, (0, 0), (4, 21)), (1, (4, 0), (9, 10)), (0, (4, 10), (9, 11))), chunks(0, [1, 2, 3, 0]))]
    for a, b in cases:
        st = made(value, a)
        before = [one.tensor.requires_grad_() for one in st.local_shards()]
        where = [one.metadata for one in st.local_shards()]
        rt.reshard(st, b)
        after = [one.tensor for one in st.local_shards()]
        torch.autograd.backward(after, [part(gradient, one.metadata) for one in st.local_shards()])
        for tensor, one in zip(before, where):
            assert same(tensor.grad, part(gradient, one)), (a, b)
    st = made(value, chunks(0, [0, 1]))
    for one in st.local_shards():
        one.tensor.requires_grad_()
    try:
        rt.reshard(st, chunks(0, [1, 2]))
        raise AssertionError("there is nothing on rank 0 to begin backward at")
    except ValueError as error:
        assert "rank 0 is left without a shard" in str(error)
    with torch.no_grad():
        rt.reshard(st, chunks(0, [1, 2]))


def devices_are_kept():
    value = number((8, 6), 1)
    st = made(value, chunks(0, [0, 1]))
    spec = ChunkShardingSpec(dim=1, placements=["rank:1/cuda:1", "rank:0/cuda:0"])
    if not torch.cuda.is_available():
        try:
            rt.reshard(st, spec)
            raise AssertionError("there is no such device")
        except NotImplementedError as error:
            assert "cuda" in str(error), error
    spec = ChunkShardingSpec(dim=1, placements=["rank:1", "rank:0/cpu"])
    rt.reshard(st, spec)
    assert [str(one.placement) for one in st.metadata().shards_metadata] == ["rank:0/cpu", "rank:1/cpu"]
    spec = ChunkShardingSpec(dim=1, placements=["rank:1/cuda:1", "rank:0/cuda:0"])
    layout = rt.layout(st)
    assert str(layout) == "f32[8,6] @ { :,3:6 | :,0:3 }", layout
    back = rt.sharding_spec(layout, like=spec)
    assert isinstance(back, ChunkShardingSpec) and back.dim == 1
    assert [str(one) for one in back.placements] == ["rank:1/cuda:1", "rank:0/cuda:0"]
    ragged = boxes((0, (0, 0), (5, 6)), (1, (5, 0), (3, 6)), device="cuda:0")
    back = rt.sharding_spec(rt.layout_of_spec(ragged, torch.float32, (8, 6)), like=ragged)
    assert [str(one.placement) for one in back.shards] == ["rank:0/cuda:0", "rank:1/cuda:0"]
    assert [one.shard_sizes for one in back.shards] == [[5, 6], [3, 6]]


def in_a_group():
    """Ranks of placements are those of the world, whatever they are in the group."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        value = number((7, 5), 1)
        st, spec = made(value, chunks(0, [3, 1]), group), chunks(1, [1, 3])
        check(rt.reshard(st, resharding_spec=spec, process_group=group), value, spec)
        try:
            rt.reshard(st, chunks(0, [0, 1]))
            raise AssertionError("rank 0 is not in it")
        except ValueError as error:
            assert "rank 0 is not in the process group" in str(error), error


def wrong_specs():
    st = made(number((4, 4), 1), chunks(0, [0, 1]))
    before = copy.copy(st.local_shards())
    for spec, kind in ((chunks(2, [0, 1]), ValueError), (object(), NotImplementedError),
                       (boxes((0, (0, 0), (4, 3)), (1, (0, 3), (2, 1))), ValueError)):
        try:
            rt.reshard(st, spec)
            raise AssertionError(spec)
        except kind:
            assert st.local_shards() == before


def upstream_ring(pair):
    value = number((13, 21), 1)
    st = _shard_tensor(value, chunks(*pair[0]))
    st.reshard(chunks(*pair[1]))
    return same(st.local_tensor(), _shard_tensor(value, chunks(*pair[1])).local_tensor())


def upstream_limits():
    """What ShardedTensor.reshard says where this package does it."""
    value = number((8, 6), 1)
    for before, after in ((chunks(0, [0, 1]), boxes((0, (0, 0), (5, 6)), (1, (5, 0), (3, 6)))),
                          (chunks(0, [0, 1, 1, 0]), chunks(1, [0, 1]))):
        try:
            made(value, before).reshard(after)
            raise AssertionError("upstream has learnt it")
        except NotImplementedError:
            check(rt.reshard(made(value, before), after), value, after)


def upstream_negative():
    value = number((8, 6), 1)
    st = _shard_tensor(value, chunks(1, [0, 1]))
    st.reshard(chunks(-1, [1, 0]))
    return same(st.local_tensor(), _shard_tensor(value, chunks(1, [1, 0])).local_tensor())


class ReshardTest(unittest.TestCase):
    def test_upstream(self):
        """the upstream cases and sizes, and rings of three and four ranks, equal a fresh tensor"""
        worlds.run(4, upstream)

    def test_any_spec(self):
        """chunk and enumerable specs, ranks with several shards and with none, there and back"""
        worlds.run(4, any_spec)

    def test_gradients(self):
        """gradients go back the way the shards came"""
        worlds.run(4, gradients)

    def test_devices(self):
        """device strings stay as they are, and come back from layouts"""
        worlds.run(2, devices_are_kept)

    def test_group(self):
        """a group whose ranks are not those of the world"""
        worlds.run(4, in_a_group)

    def test_wrong(self):
        """specs that make no sense change nothing"""
        worlds.run(2, wrong_specs)

    def test_upstream_ring(self):
        """2.13 moves shards in a ring to the wrong rank or fails: the place they come from is taken for
        the one they go to"""
        self.assertFalse(agrees(4, upstream_ring, RINGS[0]))
        self.assertTrue(all(worlds.run(4, upstream_ring, UPSTREAM[0])))

    def test_upstream_limits(self):
        """2.13 refuses enumerable specs and several local shards"""
        worlds.run(2, upstream_limits)

    def test_upstream_negative(self):
        """2.13 takes dim -1 for another dim than 1"""
        self.assertFalse(agrees(2, upstream_negative))


if __name__ == "__main__":
    tap.main()
