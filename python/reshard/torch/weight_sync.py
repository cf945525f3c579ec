"""Updates of the weights of an inference engine from a trainer.

    sync = reshard.torch.WeightSync(trainer.state_dict(), engine_tensors, fuse={"*.qkv": ["*.q", "*.k", "*.v"]})
    sync.update()                                 as often as wanted
    sync.verify()                                 both sides have the same elements

Each rank reads the memory of the ranks of its host directly, also that of CUDA devices. All tensors are moved in one
run. Only tensors that are converted to another dtype need memory, of which `max_nbytes` is the limit.
"""
from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from .. import _c, dtypes, memory
from ..carry import Exec, bind
from ..errors import Error, InvalidError, MismatchError, made as error_made, number_of
from ..layout import Layout
from ..local import size
from ..plan import Plan
from ..proving import digest_array
from .bound import Home, home_of
from .weight_names import (Layouts, Matching, Part, Rename, Tensors, address_of, combined, described, exchanged,
                           local_tensor, matched, renamed)

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

    @property
    def casts(self) -> bool:
        """Whether elements are converted."""
        return self.src.layout.dtype != self.dst.layout.dtype


def _nelements(extents: Sequence[int]) -> int:
    count = 1
    for extent in extents:
        count *= extent
    return count


def _view(tensor: torch.Tensor, at: Sequence[int], extents: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(at, extents)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


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
                views.append(_view(tensor, [at + a - b for at, a, b in zip(one.at, first, one.lo)], length))
    return _Cut(Layout.from_boxes(layout.dtype, extents, boxes), views)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16  # the widest word that kernels copy


def _staged_nbytes(layout: Layout, nbytes: int) -> int:
    """Returns the most memory that a rank needs for converted elements."""
    found: Dict[int, int] = {}
    for one in layout.arrays():
        found[one.rank] = found.get(one.rank, 0) + _aligned(_nelements(one.shape) * nbytes)
    return max(found.values(), default=0)


class _Staging:
    """Memory for converted elements, of each device. All rounds use it, one after the other."""

    def __init__(self, rounds: Sequence[Sequence[_Job]]) -> None:
        most: Dict[torch.device, int] = {}
        for jobs in rounds:
            needed: Dict[torch.device, int] = {}
            for job in jobs:
                for view in job.src.views if job.casts else ():
                    nbytes = _aligned(view.numel() * dtypes.dtype(job.dst.layout.dtype).nbytes)
                    needed[view.device] = needed.get(view.device, 0) + nbytes
            for device, nbytes in needed.items():
                most[device] = max(most.get(device, 0), nbytes)
        self.buffers = {device: torch.empty(nbytes, dtype=torch.uint8, device=device)
                        for device, nbytes in most.items()}
        self._used: Dict[torch.device, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.buffers.values())

    def start_round(self) -> None:
        self._used = {}

    def like(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a dense tensor of the shape of a view in memory that this round has not used."""
        first, nbytes = self._used.get(view.device, 0), view.numel() * dtype.itemsize
        self._used[view.device] = first + _aligned(nbytes)
        return self.buffers[view.device][first:first + nbytes].view(dtype).reshape(view.shape)


class _Round:
    """Jobs that run together. Elements that are converted are staged in one buffer."""

    def __init__(self, jobs: Sequence[_Job], home: Home, staging: _Staging, max_nbytes: int, timeout: float) -> None:
        self._home, self._casts = home, []  # type: Tuple[Home, List[Tuple[torch.Tensor, torch.Tensor]]]
        plans, src, dst = [], [], []
        for job in jobs:
            from_ = job.src.layout.of_dtype(job.dst.layout.dtype) if job.casts else job.src.layout
            plans.append(Plan(from_, job.dst.layout, nodes=home.nodes))
            src.append(self._staged(job, staging) if job.casts else job.src.views)
            dst.append(job.dst.views)
        single = len(plans) == 1
        self._exec: Exec = bind(plans, src=src[0] if single else src, dst=dst[0] if single else dst,
                                transport=home.transport, max_nbytes=max_nbytes, timeout=timeout,
                                names=[job.part.target for job in jobs])
        self._arrays = [[one for list_ in side for one in list_] for side in (src, dst)]
        self._pointers = [_c.pointers([one.data_ptr() if one.numel() else None for one in side])
                          for side in self._arrays]
        self._devices = {memory.cuda_device(one) for side in self._arrays for one in side}

    def _staged(self, job: _Job, staging: _Staging) -> List[torch.Tensor]:
        dtype = dtypes.torch_dtype(dtypes.dtype(job.dst.layout.dtype))
        made = [staging.like(view, dtype) for view in job.src.views]
        self._casts += zip(made, job.src.views)
        return made

    def run(self) -> None:
        for staged, view in self._casts:
            staged.copy_(view)
        stream = memory.ordered(self._devices)
        if stream is not None:
            _c.lib.rsd_exec_set_stream(self._exec.handle, stream or None)
        with self._home.transport.kept:
            _c.lib.rsd_exec_run(self._exec.handle, *self._pointers)

    def fail(self) -> None:
        """Makes the run fail on the other ranks too, which passing NULL does."""
        try:
            with self._home.transport.kept:
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
    max_nbytes      limit of the memory for converted elements, and of that for messages, of this rank, such as "1GB";
                    256 MB by default
    timeout         seconds without progress after which a call fails; 0: 300"""

    def __init__(self, source: Optional[Tensors], target: Optional[Tensors], *, group: Optional[Any] = None,
                 source_layouts: Optional[Layouts] = None, target_layouts: Optional[Layouts] = None,
                 rename: Rename = None, fuse: Optional[Mapping[str, Any]] = None, cast: bool = False,
                 allow_missing: bool = False, allow_unused: bool = False, allow_tied: bool = False,
                 max_nbytes: Union[str, int] = DEFAULT_NBYTES, timeout: float = 0.0) -> None:
        self._home = home_of(group)
        self._rank, self._closed = self._home.rank, False
        own: Dict[str, Any] = {"options": [bool(cast), bool(allow_missing), bool(allow_unused), bool(allow_tied),
                                           size(max_nbytes) or DEFAULT_NBYTES]}
        self._source: Dict[str, Any] = {}
        self._target: Dict[str, Any] = dict(target or {})
        try:
            self._source = renamed(source, rename)
            for side, tensors, layouts in (("source", self._source, source_layouts),
                                           ("target", self._target, target_layouts)):
                own[side] = described(tensors, layouts or {}, self._home.numbers, self._rank)
            own["fuse"] = {name: [list(getattr(one, "names", one)), getattr(one, "dim", 0)]
                           for name, one in (fuse or {}).items()}
        except Exception as error:  # also those of a function that renames: all ranks must learn of it
            own["error"] = [number_of(error), str(error)]
        stated = exchanged(self._home.transport, own)
        self._check(stated)
        self._max_nbytes: int = own["options"][-1]
        matching = matched(combined(stated, "source"), combined(stated, "target"), fuse or {}, allow_missing,
                           allow_unused, allow_tied)
        self._jobs = list(self._split(matching, combined(stated, "source").layouts, cast))
        self._bound = self._addresses()
        written = {job.part.target for job in self._jobs}
        self._versions = [local_tensor(tensor) for name, tensor in self._target.items() if name in written
                          and hasattr(torch.autograd.graph, "increment_version") and not tensor.is_inference()]
        self._rounds = self._bind(timeout)

    def _check(self, stated: Sequence[Any]) -> None:
        for rank, one in enumerate(stated):
            if "error" in one:
                status, text = one["error"]
                raise error_made(status, text if rank == self._rank else f"rank {rank}: {text}")
        for rank, one in enumerate(stated):
            if one["options"] != stated[0]["options"] or one["fuse"] != stated[0]["fuse"]:
                raise MismatchError(f"rank {rank} passes other options than rank 0: all ranks must pass the same")

    # -- jobs --

    def _split(self, matching: Matching, sources: Mapping[str, Layout], cast: bool) -> Iterator[_Job]:
        for part in matching.parts:
            src, dst = sources[part.source], matching.targets[part.target]
            if src.dtype != dst.dtype and not (cast and {src.dtype, dst.dtype} <= _FLOATS):
                why = "only floating-point numbers are converted" if cast else "cast=True converts"
                raise MismatchError(f"{part.target} is {dst.dtype}, but its source {part.source} is {src.dtype}; "
                                    f"{why}")
            if _nelements(src.shape):
                yield from self._boxes(part, src, dst, ((0,) * src.ndim, src.shape))

    def _boxes(self, part: Part, src: Layout, dst: Layout, box: Box) -> Iterator[_Job]:
        """Yields the job of a box. A box that is converted is halved until its memory is within the limit."""
        lo, extents = box
        from_ = _cut(src, box, self._local(self._source, part.source), self._rank)
        if src.dtype != dst.dtype and _nelements(extents) > 1 and \
                _staged_nbytes(from_.layout, dtypes.dtype(dst.dtype).nbytes) > self._max_nbytes:
            dim = max(range(len(extents)), key=lambda one: extents[one])
            half = extents[dim] // 2
            for start, length in ((0, half), (half, extents[dim] - half)):
                yield from self._boxes(part, src, dst, (
                    tuple(a + start * (d == dim) for d, a in enumerate(lo)),
                    tuple(length if d == dim else one for d, one in enumerate(extents))))
            return
        there = (tuple(a + b for a, b in zip(lo, part.at)), tuple(extents))
        yield _Job(part, from_, _cut(dst, there, self._local(self._target, part.target), self._rank))

    @staticmethod
    def _local(tensors: Mapping[str, Any], name: str) -> Optional[torch.Tensor]:
        return local_tensor(tensors[name]) if name in tensors else None

    def _bind(self, timeout: float) -> List[_Round]:
        """Returns the runs: one, unless more elements are converted than the limit permits at a time."""
        rounds: List[List[_Job]] = [[job for job in self._jobs if not job.casts]]
        staged = 0
        for job in (job for job in self._jobs if job.casts):
            nbytes = _staged_nbytes(job.src.layout, dtypes.dtype(job.dst.layout.dtype).nbytes)
            if staged and staged + nbytes > self._max_nbytes:
                rounds.append([])
                staged = 0
            rounds[-1].append(job)
            staged += nbytes
        self._staging = _Staging(rounds)
        made: List[_Round] = []
        for jobs in rounds:
            if jobs:
                self._staging.start_round()
                messages = max(1, self._max_nbytes // len(rounds))  # every run keeps its buffers
                made.append(_Round(jobs, self._home, self._staging, messages, timeout))
        return made

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
            for one in self._rounds:
                one.fail()
            raise
        for one in self._rounds:
            one.run()
        for tensor in self._versions:  # so that autograd notices the change
            torch.autograd.graph.increment_version(tensor)

    def describe(self) -> str:
        """Describes how data moves between ranks, which is known after the first update."""
        return "\n".join(one.describe() for one in self._rounds)

    @property
    def nbytes_staged(self) -> int:
        """The memory that this rank keeps for converted elements."""
        return self._staging.nbytes

    @property
    def nruns(self) -> int:
        """The number of runs of an update: one, unless converted tensors need more memory than the limit."""
        return len(self._rounds)

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
            plan = Plan(job.src.layout.of_dtype(job.dst.layout.dtype), job.dst.layout)
            for side, cut, table in (("from", job.src, sent), ("to", job.dst, received)):
                arrays = (plan.src if side == "from" else plan.dst).arrays(self._rank)
                if not arrays:
                    continue
                for piece in plan.pieces(self._rank, sends=side == "from"):
                    at = piece.from_at if side == "from" else piece.to_at
                    array = (piece.from_array if side == "from" else piece.to_array) - arrays[0].number
                    box = _view(cut.views[array], at, piece.len)
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
        kind = dtypes.torch_dtype(dtypes.dtype(dtype))
        for at, part in _parts(box, (0,) * box.ndim, max(1, self._max_nbytes // kind.itemsize // 2)):
            text = f"{[a + b for a, b in zip(lo, at)]} {digest_array(part.to(kind).contiguous())}"
            data = hashlib.blake2b(text.encode(), digest_size=16).digest()
            total += torch.frombuffer(bytearray(data), dtype=torch.int64)
        return total

    def close(self) -> None:
        """Frees what was bound. The tensors stay as they are."""
        self._closed = True
        for one in self._rounds:
            one.close()
        self._rounds = []

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
