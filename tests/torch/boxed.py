"""Tensors that a rank holds as any number of boxes, in the three ways that torch can checkpoint them.

A plan is, for each rank, a list of boxes, each a list of (lo, hi) per dim.
"""
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, MetadataIndex,
                                                   TensorProperties)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper


def starts(box):
    return torch.Size(lo for lo, _ in box)


def extents(box):
    return torch.Size(hi - lo for lo, hi in box)


class Checkpointable(torch.Tensor):
    """A tensor of the whole shape that has only boxes, and says so by torch's protocol."""

    @staticmethod
    def __new__(cls, shape, dtype, plan, parts):
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        self.plan, self.parts = plan, parts
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(starts(box), extents(box)) for box in self.plan]

    def __create_write_items__(self, fqn, _):
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(
                              chunk=chunk, properties=TensorProperties(dtype=self.dtype),
                              size=self.size()))
                for chunk in self.__create_chunk_list__()]

    def __get_tensor_shard__(self, index):
        return self.parts[[starts(box) for box in self.plan].index(index.offset)]


def checkpointable(shape, dtype, boxes, parts):
    return Checkpointable(shape, dtype, boxes, parts)


def wrapped(device_mesh, shape, boxes, parts):
    """A DTensor whose local tensor is a LocalShardsWrapper."""
    wrapper = LocalShardsWrapper(parts, [tuple(starts(box)) for box in boxes])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(wrapper, device_mesh, [Shard(0)], run_check=False,
                              shape=torch.Size(shape), stride=stride)


def enumerable(shape, plan, whole=None):
    """A ShardedTensor of explicit boxes, filled from the whole."""
    spec = EnumerableShardingSpec([
        ShardMetadata(shard_offsets=list(starts(box)), shard_sizes=list(extents(box)),
                      placement=f"rank:{rank}/cpu")
        for rank, boxes in enumerate(plan) for box in boxes])
    return fill(sharded_tensor.empty(spec, *shape), whole)


def fill(tensor, whole):
    for shard in tensor.local_shards() if whole is not None else ():
        lo, len_ = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(whole[tuple(slice(a, a + n) for a, n in zip(lo, len_))])
    return tensor


def mine(plan):
    return plan[dist.get_rank()]
