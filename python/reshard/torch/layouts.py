"""Layouts of tensors of torch, and the reverse.

    layout(dtensor), layout(sharded_tensor)            of a tensor; ranks are those of the world
    layout_on(torch.float32, (8, 8), mesh, [Shard(0)]) of a DeviceMesh and placements
    layout_of_spec(spec, torch.float32, (8, 8))        of a ChunkShardingSpec or EnumerableShardingSpec
    placements(layout), device_mesh(layout)            the arguments of DTensor
    sharding_spec(layout, like=old_spec)               a spec, with the devices of another one
"""
from __future__ import annotations

import weakref
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.distributed._shard.sharding_spec import (ChunkShardingSpec, EnumerableShardingSpec,
                                                    ShardMetadata)
from torch.utils._python_dispatch import _disable_current_modes

try:
    from torch.distributed import tensor as dt
    from torch.distributed.tensor import DTensor as DTensor
except ImportError:  # before 2.5
    from torch.distributed import _tensor as dt  # type: ignore[no-redef]
    from torch.distributed._tensor import DTensor as DTensor  # type: ignore[no-redef]
try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:
    class _StridedShard:  # type: ignore[no-redef]
        """Stands for the class in versions without strided shards."""

try:
    from torch.distributed.tensor.placement_types import _MaskPartial
except ImportError:
    try:
        from torch.distributed.tensor._ops._embedding_ops import _MaskPartial  # type: ignore[no-redef]
    except ImportError:
        class _MaskPartial:  # type: ignore[no-redef]
            """Stands for the class in versions that have it elsewhere."""

from .. import _c
from ..errors import InvalidError, UnsupportedError
from ..layout import (Box, Layout, Mesh, Partial, Placement, Replicate, Shard, Strided)

_REDUCTIONS = {"prod": "product"}  # torch accepts this name until it reduces
Numbers = Optional[Mapping[int, int]]  # from ranks of the world to ranks of a group; None: unchanged


def is_sharded(tensor: Any) -> bool:
    """Returns whether this is a ShardedTensor, which is not a subclass of torch.Tensor in some versions."""
    return hasattr(tensor, "local_shards") and hasattr(tensor, "sharding_spec")


# ---- DTensor ----


_known: "weakref.WeakKeyDictionary[Any, Tuple[Tuple[int, ...], Tuple[int, ...]]]" = weakref.WeakKeyDictionary()


def mesh_key(mesh: Any) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """Returns the extents and the ranks of a DeviceMesh, row-major. They identify the mesh without a reference to
    its process groups."""
    found = _known.get(mesh)
    if found is None:
        with _disable_current_modes():  # the ranks are a tensor with data, also in FakeTensor mode
            found = _known[mesh] = (tuple(mesh.mesh.shape), tuple(map(int, mesh.mesh.flatten().tolist())))
    return found


def mesh_ranks(mesh: Any) -> Tuple[int, ...]:
    """Returns the ranks of a DeviceMesh, row-major."""
    return mesh_key(mesh)[1]


def mesh_of(mesh: Any, numbers: Numbers = None) -> Mesh:
    """Returns a DeviceMesh as a Mesh, with its names if they are valid in the notation."""
    ranks = [rank if numbers is None else numbers[rank] for rank in mesh_ranks(mesh)]
    names = mesh.mesh_dim_names
    try:
        return Mesh.of(mesh_key(mesh)[0], None if names is None else list(names), ranks)
    except InvalidError:
        return Mesh.of(mesh_key(mesh)[0], None, ranks)  # a name that is invalid in the notation


def placement_of(placement: Any, ndim: int) -> Placement:
    """Returns a placement of DTensor as a Placement."""
    if isinstance(placement, _StridedShard):
        return Strided(_dim(placement.dim, ndim), int(placement.split_factor))
    if placement.is_shard():
        return Shard(_dim(placement.dim, ndim))
    if placement.is_replicate():
        return Replicate()
    if type(placement) in (dt.Partial, _MaskPartial):
        return Partial(_REDUCTIONS.get(placement.reduce_op, str(placement.reduce_op)))
    raise UnsupportedError(f"placement {placement} is not supported")


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise InvalidError(f"Shard({dim}) out of range: the tensor has {ndim} dims")
    return dim % ndim


def without_masks(found: Sequence[Any]) -> Tuple[Any, ...]:
    """Returns placements where that of a sharded embedding is its Partial without the mask, which is a buffer."""
    return tuple(dt.Partial(one.reduce_op) if isinstance(one, _MaskPartial) else one for one in found)


def normalized(found: Sequence[Any], mesh: Any, ndim: int) -> Tuple[Any, ...]:
    """Returns placements without negative dims, one per axis of the mesh."""
    made = list(found)
    if len(made) != mesh.ndim:
        raise InvalidError(f"got {len(made)} placements for a mesh of {mesh.ndim} axes: "
                           f"{', '.join(map(str, made))}")
    for axis, one in enumerate(made):
        if not hasattr(one, "is_shard"):
            raise TypeError(f"a placement is Shard(0), Replicate() and so on, not a {type(one).__name__}: {one!r}")
        if isinstance(one, _StridedShard):
            made[axis] = _StridedShard(_dim(one.dim, ndim), split_factor=one.split_factor)
        elif one.is_shard():
            made[axis] = dt.Shard(_dim(one.dim, ndim))
    return tuple(made)


def placements_of(x: Any) -> Tuple[Any, ...]:
    """Returns the placements of a DTensor. If its spec has a separate order of axes that is not left to right, the
    result has strided shards for that order."""
    found = tuple(x.placements)
    stated = [one for one in getattr(x._spec, "shard_order", None) or ()
              if list(one.mesh_dims) != sorted(one.mesh_dims)]  # older versions have none
    if not stated or any(isinstance(one, _StridedShard) for one in found):
        return found
    made, counts = list(found), mesh_key(x.device_mesh)[0]
    for entry in stated:
        for at, axis in enumerate(entry.mesh_dims):
            factor = 1
            for other in entry.mesh_dims[:at]:
                factor *= counts[other] if other > axis else 1
            if factor > 1:
                made[axis] = _StridedShard(entry.tensor_dim, split_factor=factor)
    if tuple(made) != found and any(one.is_partial() for one in found):
        raise UnsupportedError("partial values with shards in another order than left to right are not supported: "
                               f"{x._spec}")
    return tuple(made)


def layout_on(dtype: Any, shape: Sequence[int], mesh: Any, found: Sequence[Any],
              numbers: Numbers = None) -> Layout:
    """Returns the layout of a tensor with a `dtype` and a global `shape` on `mesh`, a DeviceMesh. `found` are its
    placements, applied left to right. `numbers` maps ranks of the world to those of the layout; None: the same."""
    return Layout.on(dtype, tuple(shape), mesh_of(mesh, numbers),
                     [placement_of(one, len(shape)) for one in normalized(found, mesh, len(shape))])


def ordered_layout_on(dtype: Any, shape: Sequence[int], mesh: Any, found: Sequence[Any],
                      numbers: Numbers = None) -> Optional[Layout]:
    """Returns the layout of strided placements as an order of axes: [_StridedShard(0, split_factor=2), Shard(0)] on
    (dp, tp=2) cuts by tp, then by dp. FSDP2 cuts in this way, which differs from left to right for uneven dims.
    None if nothing is strided, or if there is no such order."""
    if not any(isinstance(one, _StridedShard) for one in found):
        return None
    if any(one.is_partial() for one in found):
        return None
    orders = axis_orders(normalized(found, mesh, len(shape)), mesh_key(mesh)[0], len(shape))
    if orders is None:
        return None
    return Layout.by_dim(dtype, tuple(shape), mesh_of(mesh, numbers), orders)


def axis_orders(found: Sequence[Any], counts: Sequence[int], ndim: int) -> Optional[List[List[int]]]:
    """Returns the axes that cut each dim, in order. A strided axis comes after axes whose numbers of ranks multiply
    to its split factor."""
    orders: List[List[int]] = [[] for _ in range(ndim)]
    for axis in reversed(range(len(found))):
        one = found[axis]
        strided = isinstance(one, _StridedShard)
        if not strided and not one.is_shard():
            continue
        order, npieces, at = orders[one.dim], 1, 0
        factor = one.split_factor if strided else 1
        while npieces != factor:
            if at == len(order):
                return None
            npieces *= counts[order[at]]
            at += 1
        order.insert(at, axis)
    return orders


def same_places(a: Layout, b: Layout, ranks: Sequence[int]) -> bool:
    """Returns whether every rank has the same elements in the same order in both layouts."""
    return all(_merged(a.boxes(rank)) == _merged(b.boxes(rank)) for rank in ranks)


def _merged(held: Sequence[Any]) -> List[Tuple[Any, ...]]:
    """Returns boxes in a canonical form: adjacent boxes along one dim are merged."""
    made: List[Tuple[List[int], List[int]]] = []
    for one in held:
        if 0 in one.len:
            continue
        lo, extent = list(one.lo), list(one.len)
        if made:
            differing = [d for d in range(len(lo)) if (made[-1][0][d], made[-1][1][d]) != (lo[d], extent[d])]
            if len(differing) == 1 and made[-1][0][differing[0]] + made[-1][1][differing[0]] == \
                    lo[differing[0]]:
                made[-1][1][differing[0]] += extent[differing[0]]
                continue
        made.append((lo, extent))
    return [(tuple(lo), tuple(extent)) for lo, extent in made]


def placements(found: Layout) -> Tuple[Any, ...]:
    """Returns the placements of DTensor for `found`, a layout of a mesh. An order of axes other than left to right
    becomes strided shards. UnsupportedError: torch does not have the kind of placement."""
    mesh = found.mesh
    made: List[Any] = []
    if mesh is None or found.placements is None:
        raise InvalidError(f"explicit boxes have no placements: {found}")
    for axis, one in enumerate(found.placements):
        if one.kind == _c.REPLICATE:
            made.append(dt.Replicate())
        elif one.kind == _c.PARTIAL:
            made.append(dt.Partial(_c.lib.rsd_reduce_name(one.reduce).decode()))
        elif one.kind == _c.STRIDED:
            made.append(_StridedShard(one.dim, split_factor=one.factor))
        elif one.kind == _c.SHARD:
            order, factor = found.axes(one.dim), 1
            for other in order[:order.index(axis)]:
                factor *= mesh.counts[other] if other > axis else 1
            made.append(dt.Shard(one.dim) if factor == 1 else _StridedShard(one.dim, split_factor=factor))
        else:
            raise UnsupportedError(f"torch has no placement like {one}")
    return tuple(made)


def device_mesh(found: Layout, device_type: str = "cpu") -> Any:
    """Collective in the world. Returns the DeviceMesh of `found`, a layout of a mesh, for devices of `device_type`."""
    from torch.distributed.device_mesh import DeviceMesh
    mesh = found.mesh
    if mesh is None:
        raise InvalidError(f"explicit boxes have no mesh: {found}")
    ranks = [found.rank_at(position) for position in range(mesh.nranks)]
    names = mesh.names
    return DeviceMesh(device_type, torch.tensor(ranks, dtype=torch.int).reshape(mesh.counts),
                      mesh_dim_names=None if None in names else tuple(map(str, names)))


# ---- ShardedTensor ----


def rank_of(placement: Any) -> int:
    """Returns the rank in a device such as "rank:0/cuda:0"."""
    rank = placement.rank() if hasattr(placement, "rank") else None
    if rank is None:
        raise UnsupportedError(f"placement {placement} has no rank")
    return int(rank)


def layout_of_spec(spec: Any, dtype: Any, shape: Sequence[int], numbers: Numbers = None) -> Layout:
    """Returns the layout of `spec`, a ChunkShardingSpec or an EnumerableShardingSpec, for a tensor with a `dtype` and a
    global `shape`. `numbers` maps ranks of the world to those of the layout; None: the same."""
    if isinstance(spec, ChunkShardingSpec):
        if not isinstance(spec.dim, int):
            raise UnsupportedError(f"ChunkShardingSpec of the named dim {spec.dim!r} is not supported")
        ranks = [rank_of(one) for one in spec.placements]
        return Layout.from_chunks(dtype, tuple(shape), _dim(spec.dim, len(shape)),
                                  ranks if numbers is None else [numbers[rank] for rank in ranks])
    if isinstance(spec, EnumerableShardingSpec):
        return layout_of_shards(spec.shards, dtype, shape, numbers, enumerable=True)
    raise UnsupportedError(f"a {type(spec).__name__} is not supported")


def layout_of_shards(shards: Sequence[Any], dtype: Any, shape: Sequence[int], numbers: Numbers = None,
                     enumerable: bool = False) -> Layout:
    """Returns the layout of a list of ShardMetadata."""
    boxes = []
    for one in shards:
        rank = rank_of(one.placement)
        boxes.append(Box(rank if numbers is None else numbers[rank], tuple(one.shard_offsets),
                         tuple(one.shard_sizes)))
    return Layout.from_boxes(dtype, tuple(shape), boxes, enumerable)


def layout(what: Any, numbers: Numbers = None) -> Layout:
    """Returns the layout of `what`, a DTensor, a ShardedTensor or its metadata. `numbers` maps ranks of the world to
    those of the layout; None: the same."""
    if isinstance(what, DTensor):
        found = placements_of(what)
        stated = None
        if found != tuple(what.placements):
            stated = ordered_layout_on(what.dtype, what.shape, what.device_mesh, found, numbers)
        return stated or layout_on(what.dtype, what.shape, what.device_mesh, found, numbers)
    if is_sharded(what):
        what = what.metadata()
    if hasattr(what, "shards_metadata") and hasattr(what, "tensor_properties"):
        return layout_of_shards(what.shards_metadata, what.tensor_properties.dtype, what.size, numbers)
    raise InvalidError(f"a {type(what).__name__} has no layout")


def _devices(like: Any) -> Dict[int, str]:
    """Returns the device of each rank in a spec, metadata or a mapping."""
    if like is None:
        return {}
    if isinstance(like, Mapping):
        return {int(rank): str(device) for rank, device in like.items()}
    if isinstance(like, ChunkShardingSpec):
        found: List[Any] = list(like.placements)
    else:
        shards = like.shards if isinstance(like, EnumerableShardingSpec) else like.shards_metadata
        found = [one.placement for one in shards]
    return {rank_of(one): str(one) for one in found}


def sharding_spec(found: Layout, like: Any = None) -> Any:
    """Returns the spec of the layout `found`: a ChunkShardingSpec if possible, else an EnumerableShardingSpec. `like`
    has the device of each rank: a spec, a ShardedTensorMetadata, or a dict such as {0: "rank:0/cuda:0"}. Other ranks
    have devices such as "rank:3/cpu"."""
    devices = _devices(like)

    def device(rank: int) -> str:
        return devices.get(rank, f"rank:{rank}/cpu")

    boxes: List[Tuple[int, Box]] = []
    for rank in found.ranks():
        places = {one.number: one.place for one in found.arrays(rank)}
        for held in found.boxes(rank):
            boxes.append((places[held.array], Box(rank, held.lo, held.len)))
    boxes.sort(key=lambda one: one[0])
    made = [box for _, box in boxes]
    for dim in range(found.ndim):
        ranks = [one.rank for one in sorted(made, key=lambda one: (one.lo[dim], not one.len[dim]))]
        if _is_chunks(found, dim, ranks, made):
            return ChunkShardingSpec(dim=dim, placements=[device(rank) for rank in ranks])
    return EnumerableShardingSpec([ShardMetadata(shard_offsets=list(one.lo), shard_sizes=list(one.len),
                                                 placement=device(one.rank)) for one in made])


def _is_chunks(found: Layout, dim: int, ranks: Sequence[int], boxes: Sequence[Box]) -> bool:
    chunks = Layout.from_chunks(found.dtype, found.shape, dim, ranks)
    wanted = sorted((rank, held.lo, held.len) for rank in set(ranks) for held in chunks.boxes(rank)
                    if 0 not in held.len)
    return wanted == sorted((one.rank, one.lo, one.len) for one in boxes if 0 not in one.len) and \
        len(boxes) == len(ranks)
