"""Updates of the weights of an inference engine from a trainer.

    sync = reshard.torch.WeightSync(trainer.state_dict(), engine_tensors, fuse={"*.qkv": ["*.q", "*.k", "*.v"]})
    sync.update()                                 as often as wanted
    sync.verify()                                 both sides have the same elements

Each rank reads the memory of the ranks of its host directly, also that of CUDA devices. All tensors are moved in one
run, which converts those that have another dtype on the other side. No copy of a tensor is made.
"""
from __future__ import annotations

import hashlib
import math
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from .. import _c, dtypes, memory
from ..carry import Exec, bind, reshard
from ..errors import Error, InvalidError, MismatchError, made as error_made, number_of
from ..layout import Layout
from ..local import size
from ..plan import Plan
from ..proving import digest_array
from .bound import Home, box_of, home_of
from .weight_names import (Layouts, Matching, Part, Rename, Tensors, address_of, checked, combined, described,
                           exchanged, local_tensor, matched, renamed)

DEFAULT_NBYTES = 256_000_000
_FLOATS = {"f64", "f32", "f16", "bf16"}
Box = Tuple[Tuple[int, ...], Tuple[int, ...]]  # lo and len


class _Cut(NamedTuple):
    """A box of a layout as a layout of its own, and the views of this rank's array."""

    layout: Layout
    views: List[torch.Tensor]


class _Job(NamedTuple):
    """One part of the update: a box of a source, and where it goes."""

    part: Part
    src: _Cut
    dst: _Cut

    def plan(self, nodes: Optional[Sequence[int]] = None) -> Plan:
        """Returns the plan of this part, which converts elements of another dtype."""
        return Plan(self.src.layout, self.dst.layout, nodes=nodes, cast=True)


def _cut(layout: Layout, box: Box, tensor: Optional[torch.Tensor], rank: int) -> _Cut:
    """Returns a box of a layout. `tensor` is this rank's array, or None."""
    lo, extents = box
    if extents == layout.shape:
        return _Cut(layout, [] if tensor is None or not layout.arrays(rank) else [tensor])
    boxes, views = [], []
    for owner in layout.ranks():
        for one in layout.boxes(owner):
            first = [max(a, b) for a, b in zip(one.lo, lo)]
            end = [min(a + n, b + m) for a, n, b, m in zip(one.lo, one.len, lo, extents)]
            length = [b - a for a, b in zip(first, end)]
            if min(length, default=1) <= 0:
                continue
            boxes.append((owner, [a - b for a, b in zip(first, lo)], length))
            if owner == rank:
                assert tensor is not None
                views.append(box_of(tensor, [at + a - b for at, a, b in zip(one.at, first, one.lo)], length))
    return _Cut(Layout.from_boxes(layout.dtype, extents, boxes), views)


def _converted(view: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns a dense tensor with the elements that an update makes of those of a view."""
    kind = dtypes.torch_dtype(dtypes.dtype(dtype))
    if view.dtype == kind:
        return view.contiguous()
    made = torch.empty(view.shape, dtype=kind, device=view.device)
    shape = ",".join(str(one) for one in view.shape)
    reshard(f"{dtypes.dtype(view.dtype).name}[{shape}] @ 1:R", f"{dtype}[{shape}] @ 1:R", [view], [made], cast=True)
    return made


class _Update:
    """All jobs, bound to the memory of their tensors."""

    def __init__(self, jobs: Sequence[_Job], home: Home, max_nbytes: int, timeout: float,
                 device: Optional[torch.device]) -> None:
        self._home, self._transport = home, home.transport_for(device)
        plans = [job.plan(home.nodes) for job in jobs]
        src, dst = [job.src.views for job in jobs], [job.dst.views for job in jobs]
        single = len(plans) == 1
        self._exec: Exec = bind(plans, src=src[0] if single else src, dst=dst[0] if single else dst,
                                transport=self._transport, max_nbytes=max_nbytes, timeout=timeout,
                                names=[job.part.target for job in jobs])
        self._arrays = [[one for list_ in side for one in list_] for side in (src, dst)]
        self._pointers = [_c.pointers([one.data_ptr() if one.numel() else None for one in side])
                          for side in self._arrays]
        self._devices = {memory.cuda_device(one) for side in self._arrays for one in side}

    def run(self) -> None:
        stream = memory.ordered(self._devices)
        if stream is not None:
            _c.lib.rsd_exec_set_stream(self._exec.handle, stream or None)
        self._home.finish()
        with self._transport.kept:
            _c.lib.rsd_exec_run(self._exec.handle, *self._pointers)

    def fail(self) -> None:
        """Makes the run fail on the other ranks too, which passing NULL does."""
        try:
            with self._transport.kept:
                _c.lib.rsd_exec_run(self._exec.handle, *[_c.pointers([None] * len(side)) for side in self._arrays])
        except Error:
            pass

    def describe(self) -> str:
        return self._exec.describe()

    def close(self) -> None:
        self._exec.close()


class WeightSync:
    """Copies the tensors of a source into those of a target, as often as wanted. Collective in the ranks of the group,
    by default all; every method is.

    `source` and `target` are the named tensors that this rank has on each side, or None: DTensors, plain tensors with a
    layout in `source_layouts` or `target_layouts` (ranks are those of the group), or plain tensors that every rank
    that has them has whole. Ranks may have both sides, one, or none.

    rename          new names of sources: a dict, or a function. None leaves a source out
    fuse            the sources of a target, which are its slices along dim 0, or `Fuse(names, dim)`. In names, * stands
                    for any text. Of a target that is sharded along that dim, each rank has its shard of each source
    cast            permits sources of another floating-point dtype
    allow_missing   leaves targets without a source unchanged
    allow_unused    ignores sources without a target
    allow_tied      permits names of one side that share memory
    max_nbytes      limit of the memory of this rank for messages, and of that for digests, such as "1GB"; 256 MB by
                    default
    timeout         seconds without progress after which a call fails; 0: 300"""

    def __init__(self, source: Optional[Tensors], target: Optional[Tensors], *, group: Optional[Any] = None,
                 source_layouts: Optional[Layouts] = None, target_layouts: Optional[Layouts] = None,
                 rename: Rename = None, fuse: Optional[Mapping[str, Any]] = None, cast: bool = False,
                 allow_missing: bool = False, allow_unused: bool = False, allow_tied: bool = False,
                 max_nbytes: Union[str, int] = DEFAULT_NBYTES, timeout: float = 0.0) -> None:
        self._home = home_of(group)
        self._rank, self._closed = self._home.rank, False
        self._source: Dict[str, Any] = {}
        self._target: Dict[str, Any] = {}
        self._max_nbytes, fuses, failure = DEFAULT_NBYTES, {}, None
        own: Dict[str, Any] = {}
        try:
            self._max_nbytes, fuses = size(max_nbytes) or DEFAULT_NBYTES, checked(fuse)
            own["options"] = [bool(cast), bool(allow_missing), bool(allow_unused), bool(allow_tied), self._max_nbytes,
                              fuses]
            self._source, self._target = renamed(source, rename), renamed(target, None)
            for side, tensors, layouts in (("source", self._source, source_layouts),
                                           ("target", self._target, target_layouts)):
                own[side] = described(tensors, layouts or {}, self._home.numbers, self._rank)
            own["on_cuda"] = all(local_tensor(one).device.type == "cuda" for tensors in (self._source, self._target)
                                 for one in tensors.values())
        except Exception as error:  # also those of a function that renames: all ranks must learn of it
            failure = error
            own["error"] = [number_of(error), str(error) if isinstance(error, Error) else repr(error)]
        stated = exchanged(self._home.transport, own)
        self._check(stated, failure)
        matching = matched(combined(stated, "source"), combined(stated, "target"), fuses, allow_missing,
                           allow_unused, allow_tied)
        self._jobs = list(self._split(matching, combined(stated, "source").layouts, cast))
        self._bound = self._addresses()
        written = {job.part.target for job in self._jobs}
        self._versions = [local_tensor(tensor) for name, tensor in self._target.items() if name in written
                          and hasattr(torch.autograd.graph, "increment_version") and not tensor.is_inference()]
        device = torch.device("cuda") if all(one["on_cuda"] for one in stated) else None
        self._update = _Update(self._jobs, self._home, self._max_nbytes, timeout, device) if self._jobs else None

    def _check(self, stated: Sequence[Any], failure: Optional[Exception]) -> None:
        """Raises the error of the first rank that has one, on that rank itself `failure`."""
        for rank, one in enumerate(stated):
            if "error" in one:
                status, text = one["error"]
                raise failure if failure and rank == self._rank else error_made(status, f"rank {rank}: {text}")
        for rank, one in enumerate(stated):
            if one["options"] != stated[0]["options"]:
                raise MismatchError(f"rank {rank} passes other options than rank 0: all ranks must pass the same")

    # -- jobs --

    def _split(self, matching: Matching, sources: Mapping[str, Layout], cast: bool) -> Iterator[_Job]:
        for part in matching.parts:
            src, dst = sources[part.source], matching.targets[part.target]
            if src.dtype != dst.dtype and not (cast and {src.dtype, dst.dtype} <= _FLOATS):
                why = "only floating-point numbers are converted" if cast else "cast=True converts"
                raise MismatchError(f"{part.target} is {dst.dtype}, but its source {part.source} is {src.dtype}; "
                                    f"{why}")
            if not math.prod(src.shape):
                continue
            whole, there = ((0,) * src.ndim, src.shape), (tuple(part.at), src.shape)
            yield _Job(part, _cut(src, whole, self._local(self._source, part.source), self._rank),
                       _cut(dst, there, self._local(self._target, part.target), self._rank))

    @staticmethod
    def _local(tensors: Mapping[str, Any], name: str) -> Optional[torch.Tensor]:
        return local_tensor(tensors[name]) if name in tensors else None

    # -- running --

    def _addresses(self) -> List[Tuple[str, Any, int]]:
        return [(name, tensor, address_of(tensor)) for side in (self._source, self._target)
                for name, tensor in side.items()]

    def _check_memory(self) -> None:
        """Raises InvalidError if a tensor has other memory than when it was bound."""
        if self._closed:
            raise InvalidError("this WeightSync is closed")
        for name, tensor, address in self._bound:
            if address_of(tensor) != address:
                raise InvalidError(f"{name} has other memory than when it was bound; create another WeightSync")

    def update(self) -> None:
        """Copies all sources into their targets. Returns when they have arrived."""
        try:
            self._check_memory()
        except InvalidError:
            if self._update:
                self._update.fail()
            raise
        if self._update:
            self._update.run()
        for tensor in self._versions:  # so that autograd notices the change
            torch.autograd.graph.increment_version(tensor)

    def describe(self) -> str:
        """Describes how data moves between ranks, which is known after the first update."""
        return self._update.describe() if self._update else ""

    def verify(self) -> None:
        """Compares the elements of both sides by digests. MismatchError names the first target that differs, and the
        lowest rank that has it. No tensor is sent."""
        own = ""
        try:
            self._check_memory()
        except InvalidError as error:
            own = str(error)
        for rank, one in enumerate(exchanged(self._home.transport, own)):
            if one:
                raise InvalidError(one if rank == self._rank else f"rank {rank}: {one}")
        sent, received = (torch.zeros(len(self._jobs), self._home.nranks, 2, dtype=torch.int64) for _ in range(2))
        for number, job in enumerate(self._jobs):
            plan = job.plan()
            for side, cut, table in (("from", job.src, sent), ("to", job.dst, received)):
                arrays = (plan.src if side == "from" else plan.dst).arrays(self._rank)
                if not arrays:
                    continue
                for piece in plan.pieces(self._rank, sends=side == "from"):
                    at = piece.from_at if side == "from" else piece.to_at
                    array = (piece.from_array if side == "from" else piece.to_array) - arrays[0].number
                    box = box_of(cut.views[array], at, piece.len)
                    table[number, piece.to_rank] += self._digest(box, piece.lo, job.dst.layout.dtype)
        self._home.transport.group.allreduce([sent]).wait()
        differing = (sent[:, self._rank] != received[:, self._rank]).any(dim=1).nonzero().flatten().tolist()
        first = differing[0] if differing else len(self._jobs)
        found = [int.from_bytes(one, "little") for one in self._home.transport.gather(first.to_bytes(8, "little"))]
        first = min(found)
        if first < len(self._jobs):
            job = self._jobs[first]
            raise MismatchError(f"{job.part.target} differs from its source {job.part.source} on rank "
                                f"{found.index(first)}")

    def _digest(self, box: torch.Tensor, lo: Sequence[int], dtype: str) -> torch.Tensor:
        """Returns the sum of the digests of the parts of a box that are at most as large as the limit of memory."""
        total = torch.zeros(2, dtype=torch.int64)
        for at, part in _parts(box, (0,) * box.ndim, max(1, self._max_nbytes // dtypes.dtype(dtype).nbytes // 2)):
            text = f"{[a + b for a, b in zip(lo, at)]} {digest_array(_converted(part, dtype))}"
            data = hashlib.blake2b(text.encode(), digest_size=16).digest()
            total += torch.frombuffer(bytearray(data), dtype=torch.int64)
        return total

    def close(self) -> None:
        """Frees what was bound. The tensors stay as they are."""
        self._closed = True
        if self._update:
            self._update.close()
        self._update = None

    def __enter__(self) -> "WeightSync":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _parts(box: torch.Tensor, at: Tuple[int, ...], limit: int) -> Iterator[Tuple[Tuple[int, ...], torch.Tensor]]:
    """Yields a box in halves of halves with at most `limit` elements, and where they begin."""
    if box.numel() <= limit or box.numel() <= 1:
        yield at, box
        return
    dim = max(range(box.ndim), key=lambda one: box.shape[one])
    half = box.shape[dim] // 2
    for start, length in ((0, half), (half, box.shape[dim] - half)):
        begin = tuple(a + start * (d == dim) for d, a in enumerate(at))
        yield from _parts(box.narrow(dim, start, length), begin, limit)
