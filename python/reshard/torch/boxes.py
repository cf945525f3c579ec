"""Boxes of tensors that torch's planners plan for: which a rank wants, and whether files have them."""
from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from .. import dtypes
from ..errors import MismatchError
from ..layout import Layout
from ..plan import Plan


class Wanted(NamedTuple):
    """A box of a tensor that a rank wants. `index` finds the memory it is in, and `at` is where it begins
    there."""

    lo: Tuple[int, ...]
    len: Tuple[int, ...]
    index: MetadataIndex
    at: Tuple[int, ...]


def wanted_boxes(name: str, obj: Any) -> List[Wanted]:
    """The boxes of a tensor that this rank wants. ValueError if it is none."""
    if isinstance(obj, DTensor) and obj.device_mesh.get_coordinate() is None:
        return []
    return [Wanted(tuple(one.offsets), tuple(one.sizes), MetadataIndex(name, one.offsets, number),
                   (0,) * len(one.sizes)) for number, one in enumerate(_create_chunk_list(obj))]


def _layout(dtype: Any, shape: Sequence[int], boxes: Sequence[Tuple[Any, Any]]) -> Layout:
    return Layout.from_boxes(dtype, shape, [(rank, lo, length) for rank, (lo, length) in enumerate(boxes)])


def _volume(sizes: Sequence[int]) -> int:
    volume = 1
    for extent in sizes:
        volume *= extent
    return volume


def read_items(name: str, about: TensorStorageMetadata, wanted: Sequence[Wanted]) -> Iterator[ReadItem]:
    """What has to be read so that all boxes are filled, each element once. MismatchError names a box that
    no file has."""
    wanted = [one for one in wanted if _volume(one.len)]
    if not wanted:
        return
    chunks = about.chunks
    kind = dtypes.DTYPES["u8"]  # what a plan says does not depend on the dtype
    try:
        plan = Plan(_layout(kind, about.size, [(one.offsets, one.sizes) for one in chunks]),
                    _layout(kind, about.size, [(one.lo, one.len) for one in wanted]))
    except MismatchError as error:
        raise MismatchError(f"{name}: {error}") from None
    for piece in plan.pieces():
        source, target = chunks[piece.from_rank], wanted[piece.to_rank]
        yield ReadItem(
            type=LoadItemType.TENSOR, dest_index=target.index, lengths=_size(piece.len),
            dest_offsets=_size([a + b for a, b in zip(target.at, piece.to_at)]),
            storage_index=MetadataIndex(name, source.offsets, piece.from_rank),
            storage_offsets=_size(piece.from_at))


def _size(numbers: Sequence[int]) -> Any:
    import torch
    return torch.Size(numbers)


def check_filled(metadata: Metadata, plan: LoadPlan, planner: Any) -> None:
    """MismatchError if some part of a tensor that a planner loads is in no file: torch would leave it as it
    is, and say nothing. Planners that do not say what they load are believed."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict):
        return
    names = {item.dest_index.fqn for item in plan.items}
    for name, obj in state.items():
        about = metadata.state_dict_metadata.get(name)
        if not isinstance(about, TensorStorageMetadata) or _is_covered(about):
            continue
        if name not in names and not hasattr(obj, "size"):
            continue
        for _ in read_items(name, about, wanted_boxes(name, obj)):
            break


def _is_covered(about: TensorStorageMetadata) -> bool:
    """Whether the stored boxes are the whole tensor."""
    if len(about.chunks) == 1:
        return tuple(about.chunks[0].sizes) == tuple(about.size)
    if not _volume(about.size):
        return True
    boxes = [(one.offsets, one.sizes) for one in about.chunks]
    return bool(about.chunks) and _layout(dtypes.DTYPES["u8"], about.size, boxes).check().cover != "misses"
