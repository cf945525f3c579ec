"""A torch process group as a transport.

    exec = reshard.bind(plan, transport=reshard.torch.Group())         of the world
    exec = reshard.bind(plan, transport=reshard.torch.Group(mesh.get_group("tp")))

Bytes are sent from host memory. For a group without a backend for host memory (NCCL only), a gloo group of the same
ranks is created. Ranks of one host share memory, also that of CUDA devices, and use the group only to bind. Between
hosts, `devices` sends tensors from memory of CUDA devices:

    Group(group, devices=group)                                        a group of NCCL; gloo sends only small messages
"""
from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from ..errors import InvalidError, PeerError, UnsupportedError
from ..transport import DeviceMessage, Transport, bytes_at

# Tags of these messages: far from the tags of programs, and below the limit of MPI.
TAG = 30000
NTAGS = 64


def has_host(group: Any) -> bool:
    """Returns whether a group has a backend for host memory."""
    try:
        group._get_backend(torch.device("cpu"))
        return True
    except RuntimeError:
        return False


def has_nccl(group: Any) -> bool:
    """Returns whether a group sends memory of CUDA devices by NCCL."""
    try:
        return str(group._get_backend(torch.device("cuda")).name()) == "nccl"
    except (AttributeError, RuntimeError):
        return False


_made: Dict[Tuple[int, ...], Any] = {}
_nmade: Dict[Tuple[int, ...], int] = {}
_age = 0  # of the groups in _made


def made_group(ranks: Tuple[int, ...]) -> Any:
    """Collective in these ranks of the world, ascending. Returns a gloo group of these ranks, which is created
    once. It is not registered in torch.distributed: new_group requires every rank of the world, or names the
    group differently on ranks that belong to different numbers of groups."""
    if ranks not in _made:
        _check_processes(dist.group.WORLD)
        if not _made:
            weakref.finalize(dist.group.WORLD, forget_groups, _age)
        _nmade[ranks] = _nmade.get(ranks, 0) + 1
        name = f"reshard/{'_'.join(map(str, ranks))}/{_nmade[ranks]}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        _made[ranks] = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks),
                                             timeout=dist.distributed_c10d.default_pg_timeout)
    return _made[ranks]


def forget_groups(age: Optional[int] = None) -> None:
    """Local. Forgets groups of an earlier world, which was destroyed."""
    global _age
    if age is None or age == _age:
        _age += 1
        _made.clear()


def ranks_of(group: Any) -> List[int]:
    """Returns the ranks of a group in the world."""
    for ranks, one in _made.items():
        if one is group:
            return list(ranks)
    return list(dist.get_process_group_ranks(group))


def is_made(group: Any) -> bool:
    """Returns whether made_group returned it."""
    return any(one is group for one in _made.values())


def check_initialized() -> None:
    """Raises InvalidError without a process group of the world."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidError("no process group exists; call torch.distributed.init_process_group first")


_SIMULATED = {"fake": "sends nothing", "threaded": "has threads of one process as its ranks"}


def _check_processes(group: Any) -> None:
    """Raises UnsupportedError if the ranks of a group are not processes."""
    name = dist.get_backend(group)
    if name in _SIMULATED:
        raise UnsupportedError(f"the backend of the process group is {name!r}, which {_SIMULATED[name]}; ranks must be "
                               "processes, such as with gloo or nccl")


def host_group(group: Optional[Any] = None) -> Any:
    """Collective the first time. Returns the group, or one of the same ranks if it has no backend for host memory."""
    check_initialized()
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidError("this rank is not in the process group")
    if is_made(group):
        return group
    _check_processes(group)
    if has_host(group):
        return group
    return made_group(tuple(sorted(dist.get_process_group_ranks(group))))


def _backend(group: Any) -> str:
    """Returns the name of the backend for host memory."""
    return str((group._get_backend(torch.device("cpu")) if hasattr(group, "_get_backend") else group).name())


class _Waiter(threading.Thread):
    """A thread that waits for one request after the other. With gloo, a request completes only in a thread that
    waits for it, and a wait that times out breaks the connection."""

    def __init__(self, idle: Deque["_Waiter"]) -> None:
        super().__init__(name="reshard-wait", daemon=True)
        self.idle, self.ready = idle, threading.Semaphore(0)
        self.request: Any = None
        self.start()

    def run(self) -> None:
        while True:
            self.ready.acquire()
            request, self.request = self.request, None
            try:
                request.work.wait()
            except BaseException as error:
                request.error = error
            request.done = True
            del request
            self.idle.append(self)


class _Request:
    """A message in progress, in its own memory, since the library may free its memory after a failure."""

    def __init__(self, tensor: torch.Tensor, into: Optional[memoryview]) -> None:
        self.tensor, self.into = tensor, into
        self.work: Any = None
        self.done = False
        self.error: Optional[BaseException] = None


class _Batch:
    """Messages on a device in progress. The tensors are views of memory of the library."""

    def __init__(self, works: List[Any], tensors: List[torch.Tensor]) -> None:
        self.works, self.tensors = works, tensors


class _Span:
    """Memory of a CUDA device, as torch.as_tensor takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def device_tensor(address: int, nbytes: int) -> torch.Tensor:
    """Returns memory of a CUDA device as a tensor, not a copy."""
    return torch.as_tensor(_Span(address, nbytes), device="cuda")


def opened_device(group: Any) -> int:
    """Collective. Connects the ranks of a group of NCCL, which else waits for all of them in its first messages.
    Returns the current device."""
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return torch.cuda.current_device()


class Group(Transport):
    """A process group as the transport of one process. Ranks are numbered as in the group. It does not keep the group
    alive. Transports that use one group at the same time need different `tags`. `devices` is a group of the same ranks
    that sends memory of CUDA devices; then this is collective, and ranks must be on different devices."""

    def __init__(self, group: Optional[Any] = None, *, tags: int = 0, devices: Optional[Any] = None) -> None:
        group = host_group(group)
        super().__init__(group.rank(), group.size(), device=None if devices is None else opened_device(devices))
        self.ranks: List[int] = ranks_of(group)  # in the world
        self._group = weakref.ref(group)
        self._devices = None if devices is None else weakref.ref(devices)
        self._tag = TAG + NTAGS * tags
        self._asks = "gloo" not in _backend(group)
        self._idle: Deque[_Waiter] = deque()

    @property
    def group(self) -> Any:
        """The group that sends the bytes."""
        group = self._group()
        if group is None:
            raise InvalidError("the process group has been destroyed")
        return group

    def _sent(self, request: _Request) -> _Request:
        if not self._asks:
            try:
                waiter = self._idle.pop()
            except IndexError:
                waiter = _Waiter(self._idle)
            waiter.request = request
            waiter.ready.release()
        return request

    def send(self, to: int, tag: int, data: memoryview) -> _Request:
        request = _Request(_tensor(data), None)
        request.work = self.group.send([request.tensor], to, self._tag + tag)
        return self._sent(request)

    def recv(self, origin: int, tag: int, data: memoryview) -> _Request:
        request = _Request(torch.empty(data.nbytes, dtype=torch.uint8), data)
        request.work = self.group.recv([request.tensor], origin, self._tag + tag)
        return self._sent(request)

    def exchange(self, messages: Sequence[DeviceMessage]) -> _Batch:
        group = None if self._devices is None else self._devices()
        if group is None:
            raise InvalidError("the process group has been destroyed")
        tensors = [device_tensor(one.address, one.nbytes) for one in messages]
        batch = [dist.P2POp(dist.isend if one.sends else dist.irecv, tensor, self.ranks[one.peer], group,
                            self._tag + one.tag) for one, tensor in zip(messages, tensors)]
        return _Batch(dist.batch_isend_irecv(batch), tensors)

    def _test_batch(self, batch: _Batch) -> bool:
        if not all(one.is_completed() for one in batch.works):
            return False
        try:
            for one in batch.works:
                one.wait()  # raises the error
        except RuntimeError as error:
            raise PeerError(f"the process group: {error}") from error
        return True

    def test(self, request: Union[_Request, _Batch]) -> bool:
        if isinstance(request, _Batch):
            return self._test_batch(request)
        if not (request.work.is_completed() if self._asks else request.done):
            return False
        if self._asks:
            request.work.wait()  # raises the error
        if request.error is not None:
            raise PeerError(f"the process group: {request.error}")
        if request.into is not None:
            request.into[:] = _bytes_of(request.tensor)
            request.into = None
        return True

    def cancel(self, request: Union[_Request, _Batch]) -> bool:
        if isinstance(request, _Batch):
            return all(one.is_completed() for one in request.works)  # the device may still use the memory
        request.into = None  # a message that arrives later is ignored
        return True

    def gather(self, own: Any, timeout: float = 0.0) -> List[bytes]:
        """Collective. Returns the bytes `own` of every rank, as gather of every transport, but by one operation of the
        group. The group has its own time-out, so `timeout` has no effect."""
        mine = _tensor(memoryview(bytearray(own)))
        found = [torch.empty_like(mine) for _ in range(self.nranks)]
        self.group.allgather([found], [mine]).wait()
        return [bytes(_bytes_of(one)) for one in found]


def _tensor(data: memoryview) -> torch.Tensor:
    """Returns a copy of memory of the library."""
    made = torch.empty(data.nbytes, dtype=torch.uint8)
    if data.nbytes:
        made.copy_(torch.frombuffer(data, dtype=torch.uint8))
    return made


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return bytes_at(tensor.data_ptr(), tensor.numel())
