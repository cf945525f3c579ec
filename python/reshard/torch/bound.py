"""A cache of plans that are bound to process groups.

All ranks of a group make the same calls in the same order. Which plans are cached, and which are removed, depends only
on these calls, so all ranks have the same plans. The cache of a group is freed with the group.
"""
from __future__ import annotations

import atexit
import ctypes as C
import math
import threading
import weakref
from collections import OrderedDict
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from .. import _c, dtypes
from ..carry import bind
from ..errors import Error, InvalidError, MismatchError, UnsupportedError
from ..memory import is_direct
from ..plan import Plan
from .layouts import mesh_ranks
from .group import Group, check_initialized, forget_groups, has_host, has_nccl, is_made, made_group, ranks_of
from .results import empty, free_kept

MAX_PLANS = 256
MAX_NBYTES = 1 << 29  # buffers for messages, of all plans of one group
MESSAGE_NBYTES = 1 << 25  # of one plan


def waited(local: torch.Tensor) -> torch.Tensor:
    """Returns a local tensor in memory of the host or of a CUDA device, after pending collectives, and without lazy
    conjugation."""
    local = local.detach()
    if hasattr(local, "wait") and not callable(getattr(local, "local_shards", None)):
        local = local.wait()  # collectives of torch may return a tensor that is not complete yet
    if hasattr(local, "local_shards"):
        raise UnsupportedError("the local tensor has several shards (LocalShardsWrapper); placements "
                               "require one")
    if local.is_meta or local.layout != torch.strided:
        raise UnsupportedError(f"the tensor is on {local.device} with layout {local.layout}; only strided tensors in "
                               "memory are supported")
    local = local.resolve_conj().resolve_neg()
    return local if is_direct(local) else local.cpu()


class Bound:
    """A plan that is bound to a group, and the arrays of this rank. A plan in which no rank sends anything needs no
    group."""

    def __init__(self, plan: Plan, rank: int, transport: Optional[Group]) -> None:
        self.plan = plan
        self.src, self.dst = plan.src.arrays(rank), plan.dst.arrays(rank)
        self.dtype = dtypes.torch_dtype(dtypes.dtype(plan.src.dtype))
        self.pieces = list(plan.pieces(rank)) if transport is None else []
        self.exec = None if transport is None else bind(plan, transport=transport, max_nbytes=MESSAGE_NBYTES)
        nbytes = dtypes.dtype(plan.src.dtype).nbytes * math.prod(plan.src.shape)
        self.nbytes = 0 if transport is None else min(MESSAGE_NBYTES, nbytes)

    def new_arrays(self, devices: "Devices") -> List[torch.Tensor]:
        """Returns new arrays of this rank, on a device, or each on its own one."""
        if devices is None or isinstance(devices, torch.device):
            devices = [devices] * len(self.dst)
        return [empty(one.shape, self.dtype, device) for one, device in zip(self.dst, devices)]

    def run(self, src: Sequence[torch.Tensor], dst: List[torch.Tensor]) -> None:
        """Runs the plan."""
        if self.exec is None:
            self._copy(self._checked(src), dst)
        else:
            self._exchange(src, dst)

    def _checked(self, src: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        if len(src) != len(self.src):
            raise MismatchError(f"got {len(src)} local tensors, but the layout has {len(self.src)} on this rank: "
                                f"{self.plan.src}")
        src = [waited(one) for one in src]
        for one, about in zip(src, self.src):
            if tuple(one.shape) != about.shape or one.dtype != self.dtype:
                raise MismatchError(f"the local tensor is {one.dtype} {list(one.shape)}; the layout has "
                                    f"{self.dtype} {list(about.shape)} on this rank: {self.plan.src}")
        return [one.contiguous() for one in src]

    def _exchange(self, src: Sequence[torch.Tensor], dst: List[torch.Tensor]) -> None:
        """Runs between ranks. A mistake of this rank fails on all ranks."""
        assert self.exec is not None
        try:
            given = self._checked(src)
        except Error:
            # Passing NULL makes the run fail on the other ranks too.
            nothing = [_c.pointers([None] * len(one)) for one in (self.src, self.dst)]
            try:
                _c.lib.rsd_exec_run(self.exec.handle, *nothing)
            except Error:
                pass
            raise
        self.exec.run_tensors(given, dst)

    def _copy(self, src: Sequence[torch.Tensor], dst: List[torch.Tensor]) -> None:
        from_first = self.src[0].number if self.src else 0
        to_first = self.dst[0].number if self.dst else 0
        for one in self.pieces:
            given = src[one.from_array - from_first] if not one.from_destination else dst[one.from_array - to_first]
            box_of(dst[one.to_array - to_first], one.to_at, one.len).copy_(box_of(given, one.from_at, one.len))


def box_of(tensor: torch.Tensor, at: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Returns the part of a tensor with `lengths` from the index `at` on, not a copy."""
    for dim, (start, length) in enumerate(zip(at, lengths)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


class Pending:
    """A run in a thread. Its arrays are in use until `wait` returns."""

    def __init__(self, work: Callable[[], None], stream: Any) -> None:
        self._work, self._stream = work, stream
        self._error: Optional[BaseException] = None
        self._thread: Optional[threading.Thread] = threading.Thread(target=self._run, name="reshard-run", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream is None:
                self._work()
            else:
                with torch.cuda.stream(self._stream):  # the current stream is one of each thread
                    self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Waits until the run is complete. Raises its error, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def is_cuda(devices: "Devices") -> bool:
    """Returns whether all results of all ranks are on CUDA devices, which one device says for all ranks."""
    return isinstance(devices, torch.device) and devices.type == "cuda"


class Home:
    """The cache of one group. The group is opened when a plan sends something, or ranks compare something. `devices` is
    a group of the same ranks that may have NCCL."""

    def __init__(self, ranks: Sequence[int], open_group: Callable[[], Any], origin: Any = None,
                 devices: Any = None) -> None:
        self.ranks: Tuple[int, ...] = tuple(ranks)
        self.numbers: Dict[int, int] = {rank: number for number, rank in enumerate(self.ranks)}
        self.rank = self.numbers[dist.get_rank()]
        self.origin = None if origin is None else weakref.ref(origin)
        self.bound: "OrderedDict[Hashable, Bound]" = OrderedDict()
        self.alone: "OrderedDict[Hashable, Bound]" = OrderedDict()  # separate: failures of one rank only
        self.nbytes = 0
        self.readings: Dict[Hashable, Any] = {}  # of strided shards
        self._open_group = open_group
        self._transport: Optional[Group] = None
        self._devices = None if devices is None else weakref.ref(devices)
        self._device_transport: Optional[Group] = None
        self._nodes: Optional[List[int]] = None
        self._pending: Optional[Pending] = None

    @property
    def nranks(self) -> int:
        """The number of ranks of the group."""
        return len(self.ranks)

    @property
    def transport(self) -> Group:
        """Collective the first time. The group, after a run in progress is complete."""
        self.finish()
        if self._transport is None:
            self._transport = Group(self._open_group())
            found = _c.ints([0] * self.nranks, _c.Int32)
            with self._transport.kept:
                _c.lib.rsd_transport_nodes(C.byref(self._transport.table), found)
            self._nodes = list(found) if len(set(found)) > 1 else None
        return self._transport

    @property
    def nodes(self) -> Optional[List[int]]:
        """Collective the first time. The host of each rank, or None if all are on one host."""
        self.transport
        return self._nodes

    def transport_for(self, devices: "Devices") -> Group:
        """Collective the first time. The transport of plans whose results are on these devices: between hosts that of
        NCCL, if the group has it. NCCL refuses ranks of one device, so ranks of one host never use it."""
        transport, group = self.transport, None if self._devices is None else self._devices()
        if self._nodes is None or not is_cuda(devices) or group is None or not has_nccl(group):
            return transport
        if self._device_transport is None:
            self._device_transport = Group(self._open_group(), devices=group)
        return self._device_transport

    @property
    def is_lost(self) -> bool:
        """Whether the group was destroyed, also if torch still has a reference to it."""
        group = None if self.origin is None else self.origin()
        if self.origin is None:
            return False
        return group is None or (isinstance(group, dist.ProcessGroup)
                                 and group not in dist.distributed_c10d._world.pg_map)

    def _bind(self, plan: Plan, devices: "Devices") -> Bound:
        """Collective if ranks send something. The plan has the numbers of ranks of this group."""
        if plan.totals["nbytes_moved"] == 0 and plan.reduction.nterms == 1:
            return Bound(plan, self.rank, None)
        if self.nodes is not None:
            plan = Plan(plan.src, plan.dst, nodes=self.nodes)
        return Bound(plan, self.rank, self.transport_for(devices))

    def _found(self, key: Hashable, make: Callable[[], Plan], devices: "Devices") -> Bound:
        kept = self.alone if key in self.alone else self.bound
        found = kept.get(key)
        if found is None:
            found = self._bind(make(), devices)
            kept = self.alone if found.exec is None else self.bound
            kept[key] = found
            self.nbytes += found.nbytes
            while len(kept) > MAX_PLANS or (self.nbytes > MAX_NBYTES and len(self.bound) > 1):
                self._drop(kept if len(kept) > MAX_PLANS else self.bound)
        else:
            kept.move_to_end(key)
        return found

    def run(self, key: Hashable, make: Callable[[], Plan], src: Sequence[torch.Tensor],
            devices: "Devices" = None) -> List[torch.Tensor]:
        """Collective if ranks send something. Runs the plan that is cached under the key, or a new one that `make`
        returns. The results are on a device, or each on its own one."""
        self.finish()
        key = (key, is_cuda(devices))
        found = self._found(key, make, devices)
        made = found.new_arrays(devices)
        self._run(key, found, src, made)
        return made

    def start(self, key: Hashable, make: Callable[[], Plan], src: Sequence[torch.Tensor],
              devices: "Devices" = None) -> Tuple[List[torch.Tensor], Optional[Pending]]:
        """As `run`, but returns at once if ranks send something. Then the results are complete after `wait`."""
        self.finish()
        key = (key, is_cuda(devices))
        found = self._found(key, make, devices)
        made = found.new_arrays(devices)
        if found.exec is None:
            self._run(key, found, src, made)
            return made, None
        on_device = next((one.device for one in (*src, *made) if one.device.type == "cuda"), None)
        stream = None if on_device is None else torch.cuda.current_stream(on_device)
        self._pending = Pending(lambda: self._run(key, found, src, made), stream)
        return made, self._pending

    def finish(self) -> None:
        """Waits for a run in progress. Its error is raised by its own `wait`."""
        pending, self._pending = self._pending, None
        if pending is not None and pending._thread is not None:
            pending._thread.join()

    def _run(self, key: Hashable, found: Bound, src: Sequence[torch.Tensor], made: List[torch.Tensor]) -> None:
        try:
            found.run(src, made)
        except BaseException:
            self._drop(self.alone if found.exec is None else self.bound, key)  # some can only be freed
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
        self.finish()
        while self.bound:
            self._drop(self.bound)
        self.alone.clear()


Devices = Union[torch.device, Sequence[torch.device], None]

_homes: Dict[Hashable, Home] = {}  # by the id of the group, or by the ranks of a group that is made for them
_of_ranks: Dict[Tuple[int, ...], Hashable] = {}
_world: Optional["weakref.ref[Any]"] = None


def _sweep() -> None:
    """Frees the caches of groups that were destroyed, also if torch still has a reference to the group."""
    global _world
    check_initialized()
    now = dist.group.WORLD
    if _world is None or _world() is not now:
        release()
        _world = weakref.ref(now)
    for key, home in list(_homes.items()):
        if home.is_lost:
            _leave(key)


def home_of(group: Optional[Any] = None) -> Home:
    """Returns the cache of a group, by default that of the world."""
    _sweep()
    return _homes[_key_of(group)]


def _key_of(group: Optional[Any]) -> Hashable:
    """Returns the key of a process group in the list of homes, where it is added at first."""
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidError("this rank is not in the process group")
    if not is_made(group) and not has_host(group):
        return _key_of_ranks(tuple(sorted(dist.get_process_group_ranks(group))), group)
    key = id(group)
    if key not in _homes:
        weak = weakref.ref(group)
        _homes[key] = Home(ranks_of(group), weak, group, group)
        weakref.finalize(group, _leave, key)
    return key


def _key_of_ranks(ranks: Tuple[int, ...], devices: Any = None) -> Hashable:
    if ranks not in _homes:
        _homes[ranks] = Home(ranks, lambda: made_group(ranks), devices=devices)
    return ranks


def _leave(key: Hashable) -> None:
    found = _homes.pop(key, None)
    if found is not None:
        found.close()


def release() -> None:
    """Frees everything that is cached between calls: bound plans, groups that were created for them, and memory of
    results. Local, but all ranks must call it. After a process group is destroyed, its cache is freed without this
    call."""
    for key in list(_homes):
        _leave(key)
    _of_ranks.clear()
    forget_groups()
    free_kept()


atexit.register(release)


def home_of_ranks(ranks: Tuple[int, ...], meshes: Sequence[Any] = ()) -> Home:
    """Returns the cache of the group of exactly these ranks of the world, ascending: that of the world, of a mesh, or
    one that is made when ranks send something."""
    _sweep()
    found = _of_ranks.get(ranks)
    if found is None or found not in _homes:
        found = _of_ranks[ranks] = _find_key(ranks, meshes)
    return _homes[found]


def _find_key(ranks: Tuple[int, ...], meshes: Sequence[Any]) -> Hashable:
    if ranks == tuple(range(dist.get_world_size())):
        return _key_of(None)
    for mesh in meshes:
        if mesh.ndim == 1 and tuple(sorted(mesh_ranks(mesh))) == ranks:
            return _key_of(mesh.get_group())
    return _key_of_ranks(ranks)
