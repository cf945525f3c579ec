"""A cache of plans that are bound to process groups.

All ranks of a group make the same calls in the same order. Which plans are cached, and which are removed, depends only
on these calls, so all ranks have the same plans. The cache of a group is freed with the group.
"""
from __future__ import annotations

import atexit
import ctypes as C
import weakref
from collections import OrderedDict
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .. import _c, dtypes
from ..carry import bind
from ..errors import Error, InvalidError, MismatchError
from ..layout import Layout
from ..plan import Plan
from .group import Group, forget_groups, host_group, made_group

MAX_PLANS = 256
MAX_NBYTES = 1 << 29  # buffers for messages, of all plans of one group
MESSAGE_NBYTES = 1 << 25  # of one plan


class Bound:
    """A plan that is bound to a group, and the arrays of this rank."""

    def __init__(self, plan: Plan, transport: Group) -> None:
        self.plan, rank = plan, transport.rank
        self.src, self.dst = plan.src.arrays(rank), plan.dst.arrays(rank)
        self.dtype = dtypes.torch_dtype(dtypes.dtype(plan.src.dtype))
        # A plan that sends nothing needs no communication.
        self.alone = plan.totals["nbytes_moved"] == 0 and plan.reduction.nterms == 1
        self.pieces = list(plan.pieces(rank)) if self.alone else []
        self.exec = None if self.alone else bind(plan, transport=transport, max_nbytes=MESSAGE_NBYTES)
        nbytes = dtypes.dtype(plan.src.dtype).nbytes
        for extent in plan.src.shape:
            nbytes *= extent
        self.nbytes = 0 if self.alone else min(MESSAGE_NBYTES, nbytes)

    def run(self, src: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Runs the plan. Returns the new arrays of this rank."""
        made = [empty(one.shape, self.dtype) for one in self.dst]
        if self.alone:
            self._copy(self._checked(src), made)
        else:
            self._carry(src, made)
        return made

    def _checked(self, src: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        if len(src) != len(self.src):
            raise MismatchError(f"got {len(src)} local tensors, but the layout has {len(self.src)} on this rank: "
                                f"{self.plan.src}")
        for one, about in zip(src, self.src):
            if tuple(one.shape) != about.shape or one.dtype != self.dtype:
                raise MismatchError(f"the local tensor is {one.dtype} {list(one.shape)}; the layout has "
                                    f"{self.dtype} {list(about.shape)} on this rank: {self.plan.src}")
        return [one.contiguous() for one in src]

    def _carry(self, src: Sequence[torch.Tensor], dst: List[torch.Tensor]) -> None:
        assert self.exec is not None
        try:
            given = self._checked(src)
        except MismatchError:
            # Passing NULL makes the run fail on the other ranks too.
            nothing = [_c.pointers([None] * len(one)) for one in (self.src, self.dst)]
            try:
                _c.lib.rsd_exec_run(self.exec.handle, *nothing)
            except Error:
                pass
            raise
        self.exec.run(given, dst)

    def _copy(self, src: Sequence[torch.Tensor], dst: List[torch.Tensor]) -> None:
        from_first = self.src[0].number if self.src else 0
        to_first = self.dst[0].number if self.dst else 0
        for one in self.pieces:
            given = src[one.from_array - from_first] if not one.from_destination else dst[one.from_array - to_first]
            _part(dst[one.to_array - to_first], one.to_at, one.len).copy_(_part(given, one.from_at, one.len))


_HUGE = 1 << 21
_MADV_HUGEPAGE = 14
_madvise = getattr(C.CDLL(None), "madvise", None)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a new tensor. A large one uses huge pages if possible, since allocating small pages takes longer than
    filling them."""
    made = torch.empty(tuple(shape), dtype=dtype)
    first = -(-made.data_ptr() // _HUGE) * _HUGE
    length = (made.data_ptr() + made.numel() * made.element_size() - first) // _HUGE * _HUGE
    if length > 0 and _madvise is not None:
        _madvise(C.c_void_p(first), C.c_size_t(length), _MADV_HUGEPAGE)  # advice: it may be ignored
    return made


def _part(tensor: torch.Tensor, at: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(at, lengths)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


class Home:
    """The cache of one group."""

    def __init__(self, group: Any) -> None:
        self.transport = Group(group)
        self.ranks: Tuple[int, ...] = tuple(self.transport.ranks)
        self.numbers: Dict[int, int] = {rank: number for number, rank in enumerate(self.ranks)}
        self.bound: "OrderedDict[Hashable, Bound]" = OrderedDict()
        self.alone: "OrderedDict[Hashable, Bound]" = OrderedDict()  # separate: failures of one rank only
        self.nbytes = 0
        self.readings: Dict[Hashable, Any] = {}  # of strided shards
        self.nodes = self._nodes()

    def _nodes(self) -> Optional[List[int]]:
        """Collective. Returns the host of each rank, or None if all are on one host."""
        found = _c.ints([0] * self.transport.nranks, _c.Int32)
        with self.transport.kept:
            _c.lib.rsd_transport_nodes(C.byref(self.transport.table), found)
        return list(found) if len(set(found)) > 1 else None

    def plan(self, src: Layout, dst: Layout) -> Plan:
        """Returns a plan between layouts whose ranks are those of the group."""
        return Plan(src, dst, nodes=self.nodes)

    def run(self, key: Hashable, make: Callable[[], Plan], src: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Collective. Runs the plan that is cached under the key, or a new one that `make` returns."""
        kept = self.alone if key in self.alone else self.bound
        found = kept.get(key)
        if found is None:
            found = Bound(make(), self.transport)
            kept = self.alone if found.alone else self.bound
            kept[key] = found
            self.nbytes += found.nbytes
            while len(kept) > MAX_PLANS or (self.nbytes > MAX_NBYTES and len(self.bound) > 1):
                self._drop(kept if len(kept) > MAX_PLANS else self.bound)
        else:
            kept.move_to_end(key)
        try:
            return found.run(src)
        except BaseException:
            self._drop(kept, key)  # after some failures it can only be freed
            raise

    def _drop(self, kept: "OrderedDict[Hashable, Bound]", key: Optional[Hashable] = None) -> None:
        found = kept.pop(next(iter(kept)) if key is None else key, None)
        if found is not None:
            self.nbytes -= found.nbytes
            if found.exec is not None:
                found.exec.close()

    def gathered(self, number: int) -> List[int]:
        """Collective. Gathers a number from 0 to 255 of each rank."""
        return [one[0] for one in self.transport.gather(bytes([number]))]

    def close(self) -> None:
        """Frees everything."""
        while self.bound:
            self._drop(self.bound)
        self.alone.clear()


_homes: Dict[int, Home] = {}  # by the id of the group
_of_ranks: Dict[Tuple[int, ...], "weakref.ref[Any]"] = {}
_world: Optional["weakref.ref[Any]"] = None


def _sweep() -> None:
    """Frees the caches of groups that were destroyed, also if torch still has a reference to the group."""
    global _world
    now = dist.group.WORLD
    if _world is None or _world() is not now:
        release()
        _world = None if now is None else weakref.ref(now)
    known = dist.distributed_c10d._world.pg_map
    for number, home in list(_homes.items()):
        group = home.transport._group()
        if group is None or (isinstance(group, dist.ProcessGroup) and group not in known):
            _leave(number)


def home_of(group: Optional[Any] = None) -> Home:
    """Collective the first time. Returns the cache of a group."""
    _sweep()
    group = host_group(group)
    found = _homes.get(id(group))
    if found is None:
        found = _homes[id(group)] = Home(group)
        weakref.finalize(group, _leave, id(group))
    return found


def _leave(number: int) -> None:
    found = _homes.pop(number, None)
    if found is not None:
        found.close()


def release() -> None:
    """Frees everything that is cached between calls: bound plans, and groups that were created for them. Local, but
    all ranks must call it. After a process group is destroyed, its cache is freed without this call."""
    for number in list(_homes):
        _leave(number)
    _of_ranks.clear()
    forget_groups()


atexit.register(release)


def home_of_ranks(ranks: Tuple[int, ...], meshes: Sequence[Any] = ()) -> Home:
    """Collective in these ranks of the world, ascending, the first time. Returns the group of exactly these ranks:
    that of the world, of a mesh, or a new one."""
    _sweep()
    found = _of_ranks.get(ranks)
    group = None if found is None else found()
    if group is None or id(group) not in _homes:
        group = _group_of(ranks, meshes)
        _of_ranks[ranks] = weakref.ref(group)
    return home_of(group)


def _group_of(ranks: Tuple[int, ...], meshes: Sequence[Any]) -> Any:
    if not dist.is_initialized():
        raise InvalidError("no process group exists; call torch.distributed.init_process_group first")
    if ranks == tuple(range(dist.get_world_size())):
        return host_group()
    for mesh in meshes:
        if mesh.ndim == 1 and tuple(sorted(mesh.mesh.tolist())) == ranks:
            return host_group(mesh.get_group())
    return made_group(ranks)
