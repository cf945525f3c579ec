"""Which sources a weight update puts into which targets, from what all ranks state about their tensors.

Every rank describes its own tensors as JSON. All ranks receive all descriptions, and compute the same parts from them.
"""
from __future__ import annotations

import json
import re
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from .. import _c, dtypes
from ..errors import Error, InvalidError, MismatchError, PeerError, UnsupportedError
from ..layout import Layout, Mesh, Segmented
from .layouts import DTensor, is_sharded, layout_on, ordered_layout_on, placements_of, same_places

Tensors = Mapping[str, Any]
Layouts = Mapping[str, Union[str, Layout]]
Rename = Union[Mapping[str, Optional[str]], Callable[[str], Optional[str]], None]


class Fuse(NamedTuple):
    """The sources of one target, in order along `dim`. A text with * stands for all names that match."""

    names: Sequence[str]
    dim: int = 0


class Part(NamedTuple):
    """A source, and where its first element is in its target."""

    source: str
    target: str
    at: Tuple[int, ...]


class Side(NamedTuple):
    """The tensors of all ranks on one side: layouts by name, and names that share memory."""

    layouts: Dict[str, Layout]
    tied: List[List[str]]


def local_tensor(tensor: Any) -> torch.Tensor:
    """Returns the tensor of this rank, in memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach()  # type: ignore[no-any-return]


def address_of(tensor: Any) -> int:
    """Returns the address of the tensor of this rank."""
    return int((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr())


def renamed(tensors: Optional[Tensors], rename: Rename) -> Dict[str, Any]:
    """Returns tensors by their new names. Those that are renamed to None are left out."""
    made: Dict[str, Any] = {}
    if tensors is not None and not isinstance(tensors, Mapping):
        raise TypeError(f"source and target are dicts of named tensors, not a {type(tensors).__name__}")
    for name, tensor in (tensors or {}).items():
        new = rename(name) if callable(rename) else (rename or {}).get(name, name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"{name} is renamed to a {type(new).__name__}, not to text: {new!r}")
        if new in made:
            raise InvalidError(f"{name} is renamed to {new}, which another source has")
        made[new] = tensor
    return made


# ---- descriptions ----


def described(tensors: Mapping[str, Any], layouts: Layouts, numbers: Mapping[int, int], rank: int) -> Dict[str, Any]:
    """Returns what this rank states about its tensors: for each name the layouts that fit, or the dtype and shape of a
    whole tensor."""
    found: Dict[str, Any] = {}
    memory: Dict[Tuple[Any, ...], List[str]] = {}
    for name in layouts:
        if name not in tensors and Layout(str(layouts[name])).arrays(rank):
            raise InvalidError(f"{name}: its layout has arrays on this rank, but the tensor is missing")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or is_sharded(tensor):
            raise InvalidError(f"{name}: a {type(tensor).__name__} is neither a tensor nor a DTensor")
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue
        try:
            found[name] = _stated(name, tensor, layouts.get(name), numbers, rank)
        except Error as error:
            raise type(error)(f"{name}: {error}") from None
        local = local_tensor(tensor)
        if local.numel():
            memory.setdefault((local.data_ptr(), local.shape, local.stride(), local.dtype), []).append(name)
    return {"layouts": found, "tied": [names for names in memory.values() if len(names) > 1]}


def _stated(name: str, tensor: Any, given: Union[str, Layout, None], numbers: Mapping[int, int],
            rank: int) -> Dict[str, Any]:
    """Returns what this rank states about one tensor: its dtype and shape, or the layouts that fit it."""
    local = local_tensor(tensor)
    if local.layout != torch.strided or local.is_meta or local.is_quantized or local.is_conj() or local.is_neg():
        raise UnsupportedError("only strided tensors in memory are supported")
    if isinstance(tensor, DTensor):
        if given is not None:
            raise InvalidError("a DTensor has its own layout, so none must be stated")
        fitting = _layouts_of(tensor, numbers, rank)
    elif given is None:
        return {"dtype": dtypes.dtype(tensor.dtype).name, "shape": list(tensor.shape)}
    else:
        fitting = [Layout.of_any(given)]
    shape, dtype = tuple(local.shape), dtypes.dtype(local.dtype).name
    kept = [one for one in fitting if [array.shape for array in one.arrays(rank)] == [shape] and one.dtype == dtype]
    if not kept:
        raise MismatchError(f"the tensor of this rank is {dtype}{list(shape)}, which is not that of {fitting[0]}")
    if kept[0].placements and any(one.kind == _c.PARTIAL for one in kept[0].placements):
        raise UnsupportedError(f"partial values are not weights: {kept[0]}")
    return {"fits": [str(one) for one in kept]}


def _layouts_of(tensor: Any, numbers: Mapping[int, int], rank: int) -> List[Layout]:
    """Returns the layouts that a DTensor may have: strided shards have two meanings."""
    placements, mesh, shape = placements_of(tensor), tensor.device_mesh, tuple(tensor.shape)
    ordered = ordered_layout_on(tensor.dtype, shape, mesh, placements, numbers)
    if ordered is not None and placements != tuple(tensor.placements):
        return [ordered]  # its spec has an order of axes
    plain = layout_on(tensor.dtype, shape, mesh, placements, numbers)
    if ordered is None or same_places(plain, ordered, list(plain.ranks())):
        return [plain]
    return [plain, ordered]


def combined(stated: Sequence[Dict[str, Any]], side: str) -> Side:
    """Returns the tensors of all ranks from what each of them states. MismatchError if two ranks contradict."""
    whole: Dict[str, Tuple[Any, List[int]]] = {}
    fits: Dict[str, Tuple[List[str], int]] = {}
    tied: Dict[str, List[str]] = {}
    for rank, one in enumerate(stated):
        for name, about in one[side]["layouts"].items():
            if "fits" not in about:
                kind = (about["dtype"], tuple(about["shape"]))
                first, ranks = whole.setdefault(name, (kind, []))
                ranks.append(rank)
                if kind != first:
                    raise MismatchError(f"{name} is {_word(first)} on rank {ranks[0]} of the {side}, and "
                                        f"{_word(kind)} on rank {rank}")
            else:
                texts, first_rank = fits.setdefault(name, (about["fits"], rank))
                common = [text for text in texts if text in about["fits"]]
                if not common:
                    raise MismatchError(f"{name} is {texts[0]} on rank {first_rank} of the {side}, and "
                                        f"{about['fits'][0]} on rank {rank}")
                fits[name] = (common, first_rank)
            if name in whole and name in fits:
                raise MismatchError(f"{name} is a whole tensor on rank {whole[name][1][0]} of the {side}, and has a "
                                    f"layout on rank {fits[name][1]}")
        for names in one[side]["tied"]:
            tied[names[0]] = names
    layouts = {name: Layout(texts[0]) for name, (texts, _) in fits.items()}
    for name, ((dtype, shape), ranks) in whole.items():
        layouts[name] = Layout.on(dtype, shape, Mesh.of([len(ranks)], None, ranks), "R")
    return Side(dict(sorted(layouts.items())), list(tied.values()))


def _word(kind: Tuple[str, Tuple[int, ...]]) -> str:
    return f"{kind[0]}{list(kind[1])}"


# ---- names ----


def _matches(pattern: str, name: str) -> Optional[List[str]]:
    """Returns the texts that the * of a pattern stand for, or None."""
    found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    return None if found is None else list(found.groups())


def _filled(pattern: str, texts: Sequence[str]) -> str:
    parts = pattern.split("*")
    if len(parts) - 1 != len(texts):
        raise InvalidError(f"{pattern} must have as many * as the name of the target, which has {len(texts)}")
    return parts[0] + "".join(text + part for text, part in zip(texts, parts[1:]))


def checked(fuse: Optional[Mapping[str, Any]]) -> Dict[str, Fuse]:
    """Returns the argument `fuse` with a Fuse for each target."""
    made = {name: one if isinstance(one, Fuse) else Fuse(one) for name, one in (fuse or {}).items()}
    for name, one in made.items():
        if isinstance(one.names, str):
            raise TypeError(f"the sources of {name} are a list of names, not text: {one.names!r}")
    return {name: Fuse(list(one.names), one.dim) for name, one in made.items()}


def fused(target: str, fuse: Mapping[str, Fuse]) -> Optional[Fuse]:
    """Returns the sources of a fused target, or None if it has one of its own name."""
    for pattern, about in fuse.items():
        texts = _matches(pattern, target)
        if texts is not None:
            return Fuse([_filled(one, texts) for one in about.names], about.dim)
    return None


def _fused_layout(target: str, layout: Layout, dim: int, lengths: Sequence[int]) -> Layout:
    """Returns the layout of a fused target. Each rank has its shard of each source, in order, as inference engines keep
    them."""
    placements, mesh = layout.placements, layout.mesh
    if placements is None or mesh is None:
        return layout
    cuts = [axis for axis, one in enumerate(placements) if one.kind != _c.REPLICATE and one.dim == dim]
    if not cuts or placements[cuts[0]].kind == _c.SEGMENTED:
        return layout
    if len(cuts) > 1 or placements[cuts[0]].kind != _c.SHARD:
        raise UnsupportedError(f"{target} is fused along dim {dim}, which must be cut by one axis, as "
                               f"S({dim}): {layout}")
    made = list(placements)
    made[cuts[0]] = Segmented(dim, lengths)
    segmented = Layout.on(layout.dtype, layout.shape, mesh, made)
    if [one.shape for one in segmented.arrays()] != [one.shape for one in layout.arrays()]:
        raise MismatchError(f"{target}: with sources of {list(lengths)} along dim {dim}, the layout {segmented} has "
                            f"arrays of other shapes than {layout}")
    return segmented


class Matching(NamedTuple):
    """The parts of an update, and the layouts of the targets, of which fused ones are segmented."""

    parts: List[Part]
    targets: Dict[str, Layout]


def matched(source: Side, target: Side, fuse: Mapping[str, Fuse], allow_missing: bool, allow_unused: bool,
            allow_tied: bool) -> Matching:
    """Returns which source goes where. MismatchError lists names that are missing, left over or tied."""
    for side, one in (("source", source), ("target", target)):
        if one.tied and not allow_tied:
            raise MismatchError(f"the {side} has names that share memory: {_listed(one.tied[0])}; allow_tied permits "
                                "it")
    parts: List[Part] = []
    targets = dict(target.layouts)
    missing: List[str] = []
    for name, layout in target.layouts.items():
        about = fused(name, fuse) or Fuse([name])
        absent = [one for one in about.names if one not in source.layouts]
        if absent:
            missing.append(name if about.names == [name] else f"{name} (of {', '.join(absent)})")
            continue
        found = [source.layouts[one] for one in about.names]
        _check_shapes(name, layout, about, found)
        dim = about.dim % max(1, layout.ndim)
        if len(found) > 1:
            targets[name] = _fused_layout(name, layout, dim, [one.shape[dim] for one in found])
        at = 0
        for one, its in zip(about.names, found):
            parts.append(Part(one, name, tuple(at if d == dim else 0 for d in range(layout.ndim))))
            at += its.shape[dim] if layout.ndim else 0
    parts, missing = _without_ties(parts, missing, source.tied, target.tied)
    if missing and not allow_missing:
        raise MismatchError(f"the source lacks {_listed(missing)}; allow_missing leaves these targets unchanged")
    used = {one.source for one in parts}
    for names in source.tied:
        used |= set(names) if used & set(names) else set()
    unused = [name for name in source.layouts if name not in used]
    if unused and not allow_unused:
        raise MismatchError(f"the target lacks {_listed(unused)}; allow_unused ignores these sources")
    return Matching(parts, targets)


def _check_shapes(name: str, layout: Layout, about: Fuse, found: Sequence[Layout]) -> None:
    """Raises MismatchError if the sources do not make up the target."""
    shapes = [one.shape for one in found]
    if len(found) > 1 and not -layout.ndim <= about.dim < layout.ndim:
        raise InvalidError(f"{name} is fused along dim {about.dim}, but has {layout.ndim} dims")
    if len(found) == 1:
        right = shapes[0] == layout.shape
    else:
        dim = about.dim % max(1, layout.ndim)
        others = {one[:dim] + one[dim + 1:] for one in (*shapes, layout.shape)}
        right = len(others) == 1 and layout.ndim > 0 and sum(one[dim] for one in shapes) == layout.shape[dim]
    if not right:
        raise MismatchError(f"{name} is {list(layout.shape)} in the target; its source is "
                            f"{' and '.join(f'{one} {list(shape)}' for one, shape in zip(about.names, shapes))}")


def _without_ties(parts: List[Part], missing: List[str], source: Sequence[Sequence[str]],
                  target: Sequence[Sequence[str]]) -> Tuple[List[Part], List[str]]:
    """Leaves one of several targets that share memory. Their sources must be the same, or share memory too."""
    same = {name: names[0] for names in source for name in names}
    for names in target:
        covered = [name for name in names if any(one.target == name for one in parts)]
        origins = {name: [(same.get(one.source, one.source), one.at) for one in parts if one.target == name]
                   for name in covered}
        for name in covered[1:]:
            if origins[name] != origins[covered[0]]:
                raise MismatchError(f"{covered[0]} and {name} share memory in the target, but not in the source")
        parts = [one for one in parts if one.target not in covered[1:]]
        if covered:
            missing = [name for name in missing if name not in names]
    return parts, missing


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


MOST_STATED = 1 << 28  # bytes of names and layouts of one rank


def exchanged(transport: Any, own: Any) -> List[Any]:
    """Collective. Returns what each rank states. PeerError if that is too long or not JSON."""
    data = json.dumps(own).encode()
    sizes = [int.from_bytes(one, "little") for one in transport.gather(len(data).to_bytes(8, "little"))]
    for rank, size in enumerate(sizes):
        if size > MOST_STATED:
            raise PeerError(f"rank {rank} states {size} bytes of names, more than {MOST_STATED}")
    found = transport.gather(data.ljust(max(sizes)))
    stated = []
    for rank, (one, size) in enumerate(zip(found, sizes)):
        try:
            stated.append(json.loads(one[:size]))
        except (ValueError, RecursionError) as error:
            raise PeerError(f"rank {rank} states names that are not JSON: {error}") from None
    return stated
