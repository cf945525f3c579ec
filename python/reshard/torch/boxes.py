"""Boxes of tensors for planners of torch: which boxes a rank has, and whether files have them.

A DTensor is one box, unless it has a strided shard. FSDP2 over tensor parallelism cuts one dim twice, the later mesh
axis first. If that is uneven, torch computes rows that differ from those of the local tensor. Here the rows are those
of FSDP2 and of full_tensor.
"""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

try:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # torch 2.3 and 2.4
    from torch.distributed._tensor import DTensor, Shard  # type: ignore[no-redef]
    from torch.distributed._tensor.placement_types import _StridedShard  # type: ignore[no-redef]

from .. import dtypes
from ..errors import MismatchError
from ..layout import Layout
from ..plan import Plan
from .layouts import placements_of


class Part(NamedTuple):
    """A box of a tensor that a rank has or requests. `index` identifies its memory, and `at` is where it begins
    there."""

    lo: Tuple[int, ...]
    len: Tuple[int, ...]
    index: MetadataIndex
    at: Tuple[int, ...]


def parts(name: str, obj: Any) -> List[Part]:
    """Returns the boxes of a tensor on this rank. ValueError if the object is not a tensor."""
    if isinstance(obj, DTensor):
        if obj.device_mesh.get_coordinate() is None:
            return []
        if is_strided(obj):
            return _strided_parts(name, obj)
    return [Part(tuple(one.offsets), tuple(one.sizes), MetadataIndex(name, one.offsets, number),
                 (0,) * len(one.sizes)) for number, one in enumerate(_create_chunk_list(obj))]


# ---- strided shards ----


def is_strided(tensor: DTensor) -> bool:
    """Returns whether the local tensor of a DTensor may have other rows than torch computes."""
    strided = any(isinstance(one, _StridedShard) for one in placements_of(tensor))
    return strided and type(tensor._local_tensor) is torch.Tensor


def _orders(tensor: DTensor) -> Optional[Dict[int, List[int]]]:
    """Returns the mesh axes that cut each dim, in order, or None if the strided shards are not an order of axes. A
    strided shard of factor f comes after later axes with f ranks in total."""
    orders: Dict[int, List[int]] = {}
    found = placements_of(tensor)
    for axis in reversed(range(tensor.device_mesh.ndim)):
        one = found[axis]
        if not isinstance(one, (Shard, _StridedShard)):
            continue
        order = orders.setdefault(one.dim % tensor.ndim, [])
        factor, before, at = getattr(one, "split_factor", 1), 1, 0
        while before < factor and at < len(order):
            before *= tensor.device_mesh.size(order[at])
            at += 1
        if before != factor:
            return None
        order.insert(at, axis)
    return orders


def _strided_layout(tensor: DTensor) -> Layout:
    mesh = tensor.device_mesh
    axes = ",".join(f"a{axis}={mesh.size(axis)}" for axis in range(mesh.ndim))
    orders = _orders(tensor)
    if orders is not None:
        words = [".".join(f"a{axis}" for axis in orders.get(dim, ())) or "-" for dim in range(tensor.ndim)]
        return Layout.on("u8", tensor.shape, axes, f"[{', '.join(words)}]")
    words = []
    for one in tensor.placements:
        if isinstance(one, _StridedShard):
            words.append(f"_S({one.dim % tensor.ndim},{one.split_factor})")
        else:
            words.append(f"S({one.dim % tensor.ndim})" if isinstance(one, Shard) else "R")
    return Layout.on("u8", tensor.shape, axes, ",".join(words))


def _strided_parts(name: str, tensor: DTensor) -> List[Part]:
    tensor._raise_if_contains_partial_placements()
    layout, rank = _strided_layout(tensor), 0
    for axis, at in enumerate(tensor.device_mesh.get_coordinate() or ()):
        rank = rank * tensor.device_mesh.size(axis) + at
    shape, own = layout.arrays(rank)[0].shape, tuple(tensor._local_tensor.shape)
    if shape != own:
        raise MismatchError(f"{name}: the local tensor is {list(own)}, but {list(tensor.placements)} of "
                            f"{list(tensor.shape)} on a mesh of {list(tensor.device_mesh.shape)} is "
                            f"{list(shape)} on this rank, as in FSDP2")
    if not volume(tensor.shape):  # one empty box, so that the checkpoint has the tensor
        start = (0,) * tensor.ndim
        return [Part(start, own, MetadataIndex(name, start, 0), start)]
    return [Part(one.lo, one.len, MetadataIndex(name, one.lo, number), one.at)
            for number, one in enumerate(layout.boxes(rank)) if volume(one.len)]


def check_strided(name: str, tensor: DTensor) -> None:
    """Raises MismatchError if the rows that torch computes differ from those of the local tensor."""
    computed = [(tuple(one.offsets), tuple(one.sizes)) for one in _create_chunk_list(tensor)]
    own = [(one.lo, one.len) for one in parts(name, tensor) if volume(one.len)]
    if [one for one in computed if volume(one[1])] != own:
        raise MismatchError(f"{name}: with {list(tensor.placements)} this rank has {own}, but the planner of torch "
                            f"computes {computed}; use reshard.torch.LoadPlanner and SavePlanner")


# ---- reads ----


def _layout(dtype: Any, shape: Sequence[int], boxes: Sequence[Tuple[Any, Any]]) -> Layout:
    return Layout.from_boxes(dtype, shape, [(rank, lo, length) for rank, (lo, length) in enumerate(boxes)])


def volume(sizes: Sequence[int]) -> int:
    """The number of elements."""
    count = 1
    for extent in sizes:
        count *= extent
    return count


def read_items(name: str, about: TensorStorageMetadata, wanted: Sequence[Part]) -> Iterator[ReadItem]:
    """Returns the reads that fill all boxes, each element once. MismatchError names a box that no file has."""
    wanted = [one for one in wanted if volume(one.len)]
    if not wanted:
        return
    chunks = about.chunks
    kind = dtypes.DTYPES["u8"]  # plans do not depend on the dtype
    try:
        plan = Plan(_layout(kind, about.size, [(one.offsets, one.sizes) for one in chunks]),
                    _layout(kind, about.size, [(one.lo, one.len) for one in wanted]))
    except MismatchError as error:
        raise MismatchError(f"{name}: {error}") from None
    for piece in plan.pieces():
        source, target = chunks[piece.from_rank], wanted[piece.to_rank]
        yield ReadItem(
            type=LoadItemType.TENSOR, dest_index=target.index, lengths=torch.Size(piece.len),
            dest_offsets=torch.Size([a + b for a, b in zip(target.at, piece.to_at)]),
            storage_index=MetadataIndex(name, source.offsets, piece.from_rank),
            storage_offsets=torch.Size(piece.from_at))


def check_filled(metadata: Metadata, planner: Any) -> None:
    """Raises MismatchError if a part of a tensor would stay unchanged without an error: no file has it, or the
    planner of torch computed other rows. Planners that do not list what they load are not checked."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict) or getattr(planner, "fills_all", False):
        return
    for name, obj in state.items():
        about = metadata.state_dict_metadata.get(name)
        if not isinstance(about, TensorStorageMetadata):
            continue
        if isinstance(obj, DTensor) and obj.device_mesh.get_coordinate() is not None and is_strided(obj):
            check_strided(name, obj)
        if not _is_covered(about):
            for _ in read_items(name, about, parts(name, obj)):
                break


def _is_covered(about: TensorStorageMetadata) -> bool:
    """Returns whether the stored boxes cover the whole tensor."""
    if len(about.chunks) == 1:
        return tuple(about.chunks[0].sizes) == tuple(about.size)
    if not volume(about.size):
        return True
    boxes = [(one.offsets, one.sizes) for one in about.chunks]
    return bool(about.chunks) and _layout(dtypes.DTYPES["u8"], about.size, boxes).check().cover != "misses"
