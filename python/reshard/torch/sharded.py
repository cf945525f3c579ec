"""ShardedTensors from any spec to any other: reshard(sharded_tensor, spec), as sharded_tensor.reshard(spec)."""
from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec

from ..errors import InvalidError, UnsupportedError
from ..layout import Layout
from ..plan import Plan
from .bound import Home, home_of
from .layouts import is_sharded, layout_of_shards, rank_of
from .moving import direct_device


class _Reshard(torch.autograd.Function):
    """Moves the shards of this rank to another layout; backward moves the gradients back. A rank without shards has
    an empty tensor."""

    @staticmethod
    def forward(ctx: Any, home: Home, src: Layout, dst: Layout, devices: Tuple[torch.device, ...],
                *shards: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        ctx.home, ctx.src, ctx.dst = home, src, dst
        ctx.devices = tuple(one.device for one in shards)
        given = shards[:len(src.arrays(home.rank))]
        made = home.run(("reshard", str(src), str(dst)), lambda: Plan(src, dst), given,
                        [direct_device(one) for one in devices])
        return tuple(one.to(device) for one, device in zip(made, devices)) or (torch.empty(0),)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given = gradients[:len(ctx.dst.arrays(ctx.home.rank))]
        return (None, None, None, None,
                *_Reshard.apply(ctx.home, ctx.dst, ctx.src, ctx.devices, *given)[:len(ctx.devices)])


def new_metadata(spec: Any, size: Sequence[int], properties: Any) -> List[ShardMetadata]:
    """Returns the shards of a spec, with its devices. Those of a chunk spec are ordered by rank, as after
    ShardedTensor.reshard, and an empty last shard begins at the end of the tensor."""
    if isinstance(spec, EnumerableShardingSpec):
        return list(spec.build_metadata(torch.Size(size), properties).shards_metadata)
    if not isinstance(spec, ChunkShardingSpec):
        raise UnsupportedError(f"a {type(spec).__name__} is not supported; use ChunkShardingSpec or "
                               "EnumerableShardingSpec")
    if not isinstance(spec.dim, int):
        raise UnsupportedError(f"ChunkShardingSpec of the named dim {spec.dim!r} is not supported")
    if not -len(size) <= spec.dim < len(size):
        raise InvalidError(f"ChunkShardingSpec of dim {spec.dim} out of range: the tensor has {len(size)} dims")
    dim = spec.dim % len(size)
    length = -(-size[dim] // len(spec.placements))
    shards, at = [], 0
    for placement in spec.placements:
        sizes, offsets = list(size), [0] * len(size)
        sizes[dim], offsets[dim] = min(length, size[dim] - at), at
        at += sizes[dim]
        shards.append(ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=placement))
    return sorted(shards, key=lambda one: rank_of(one.placement))


def _device(shard: ShardMetadata) -> torch.device:
    """Returns the device of a shard, which must be that of its placement."""
    placement: Any = shard.placement
    device = torch.device(placement.device())
    if device.type != "cpu" and not getattr(torch, device.type).is_available():
        raise UnsupportedError(f"the shard at {list(shard.shard_offsets)} belongs on {placement}, but "
                               f"this process has no {device.type}")
    return device


def reshard(sharded_tensor: Any, resharding_spec: Any, process_group: Optional[Any] = None) -> Any:
    """Collective in `process_group`, by default that of the tensor. Moves the shards of `sharded_tensor` to
    `resharding_spec`, a ChunkShardingSpec or EnumerableShardingSpec, and returns the same ShardedTensor. A rank may
    have any number of shards before and after. Ranks are those of the world. Devices of the spec ("rank:0/cuda:0")
    stay unchanged. Differentiable in the local shards."""
    if not is_sharded(sharded_tensor):
        raise InvalidError(f"a {type(sharded_tensor).__name__} is not a ShardedTensor")
    st, metadata = sharded_tensor, sharded_tensor.metadata()
    group = process_group if process_group is not None else st._process_group
    home = home_of(group)
    shards = new_metadata(resharding_spec, metadata.size, metadata.tensor_properties)
    for one in (*metadata.shards_metadata, *shards):
        if rank_of(one.placement) not in home.numbers:
            raise InvalidError(f"the shard at {list(one.shard_offsets)} is on {one.placement}, but rank "
                               f"{rank_of(one.placement)} is not in the process group")
    dtype, rank = metadata.tensor_properties.dtype, home.ranks[home.rank]
    src = layout_of_shards(metadata.shards_metadata, dtype, metadata.size, home.numbers)
    dst = layout_of_shards(shards, dtype, metadata.size, home.numbers)
    local, own = _in_order(st, rank), [one for one in shards if rank_of(one.placement) == rank]
    made = _move(home, src, dst, local, own)
    st._local_shards = [Shard(tensor=tensor, metadata=one) for tensor, one in zip(made, own)]
    st._metadata.shards_metadata = shards
    st._sharding_spec = resharding_spec
    return st


def _in_order(st: Any, rank: int) -> List[torch.Tensor]:
    """Returns the local shards in the order of the metadata, which is that of the arrays of the layout. Versions of
    torch differ in the position of an empty shard."""
    found, left = [], list(st.local_shards())
    for one in st.metadata().shards_metadata:
        if rank_of(one.placement) != rank:
            continue
        sizes, offsets = list(one.shard_sizes), list(one.shard_offsets)
        own = [shard for shard in left if list(shard.metadata.shard_sizes) == sizes
               and (0 in sizes or list(shard.metadata.shard_offsets) == offsets)]
        if not own:
            raise InvalidError(f"the metadata has a shard of {sizes} at {offsets} on this rank, but the tensor "
                               "does not")
        left = [shard for shard in left if shard is not own[0]]
        found.append(own[0].tensor)
    return found


def _move(home: Home, src: Layout, dst: Layout, local: Sequence[torch.Tensor],
          own: Sequence[ShardMetadata]) -> List[torch.Tensor]:
    """Collective. Returns the shards of this rank in the other layout."""
    devices, given = tuple(_device(one) for one in own), list(local)
    everybody = range(home.nranks)
    senders, receivers = ([rank for rank in everybody if layout.arrays(rank)] for layout in (src, dst))
    if torch.is_grad_enabled() and not len(senders) == len(receivers) == len(everybody):
        # A rank without shards takes part in backward if the others do.
        needed = any(home.gathered(int(any(one.requires_grad for one in given))))
        if needed and len(receivers) < len(everybody):
            without = next(home.ranks[rank] for rank in everybody if rank not in receivers)
            raise InvalidError(f"rank {without} is left without a shard, which backward needs; "
                               "use torch.no_grad(), or a spec with a shard on every rank")
        if needed and not given:
            given = [torch.empty(0, requires_grad=True)]
    return list(_Reshard.apply(home, src, dst, devices, *given))[:len(own)]
