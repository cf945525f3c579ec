"""Boxes of tensors for planners of torch: which boxes a rank has, and whether files have them.

A DTensor is one box, unless it has a strided shard. FSDP2 over tensor parallelism cuts one dim twice, the later mesh
axis first. If that is uneven, torch computes rows that differ from those of the local tensor. Here the rows are those
of FSDP2 and of full_tensor.
"""
from __future__ import annotations

import math
from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple

import torch

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

try:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # torch 2.3 and 2.4
    from torch.distributed._tensor import DTensor  # type: ignore[no-redef]
    from torch.distributed._tensor.placement_types import _StridedShard  # type: ignore[no-redef]

from .. import dtypes
from ..errors import MismatchError
from ..layout import Layout
from ..plan import Plan
from .layouts import layout_on, ordered_layout_on, placements_of


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


def _strided_parts(name: str, tensor: DTensor) -> List[Part]:
    tensor._raise_if_contains_partial_placements()
    given = torch.uint8, tensor.shape, tensor.device_mesh, placements_of(tensor)  # boxes do not depend on the dtype
    layout, rank = ordered_layout_on(*given) or layout_on(*given), tensor.device_mesh.get_rank()
    shape, own = layout.arrays(rank)[0].shape, tuple(tensor._local_tensor.shape)
    if shape != own:
        raise MismatchError(f"{name}: the local tensor is {list(own)}, but {list(tensor.placements)} of "
                            f"{list(tensor.shape)} on a mesh of {list(tensor.device_mesh.shape)} is "
                            f"{list(shape)} on this rank, as in FSDP2")
    if not math.prod(tensor.shape):  # one empty box, so that the checkpoint has the tensor
        start = (0,) * tensor.ndim
        return [Part(start, own, MetadataIndex(name, start, 0), start)]
    return [Part(one.lo, one.len, MetadataIndex(name, one.lo, number), one.at)
            for number, one in enumerate(layout.boxes(rank)) if math.prod(one.len)]


def check_strided(name: str, tensor: DTensor) -> None:
    """Raises MismatchError if the rows that torch computes differ from those of the local tensor."""
    computed = [(tuple(one.offsets), tuple(one.sizes)) for one in _create_chunk_list(tensor)]
    own = [(one.lo, one.len) for one in parts(name, tensor) if math.prod(one.len)]
    if [one for one in computed if math.prod(one[1])] != own:
        raise MismatchError(f"{name}: with {list(tensor.placements)} this rank has {own}, but the planner of torch "
                            f"computes {computed}; use reshard.torch.LoadPlanner and SavePlanner")


# ---- reads ----


def _layout(dtype: Any, shape: Sequence[int], boxes: Sequence[Tuple[Any, Any]]) -> Layout:
    return Layout.from_boxes(dtype, shape, [(rank, lo, length) for rank, (lo, length) in enumerate(boxes)])


def read_items(name: str, about: TensorStorageMetadata, wanted: Sequence[Part]) -> Iterator[ReadItem]:
    """Returns the reads that fill all boxes, each element once. MismatchError names a box that no file has."""
    wanted = [one for one in wanted if math.prod(one.len)]
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
    if not math.prod(about.size):
        return True
    boxes = [(one.offsets, one.sizes) for one in about.chunks]
    return bool(about.chunks) and _layout(dtypes.DTYPES["u8"], about.size, boxes).check().cover != "misses"
