"""Transports written in Python.

A subclass of Transport sends and receives bytes with four methods. `bind(plan, transport=...)` uses it to run plans
between processes.

    class OverSockets(Transport):
        def __init__(self, ...):
            super().__init__(rank, nranks)
        def send(self, to, tag, data): ...          returns a request
        def recv(self, origin, tag, data): ...      returns a request
        def test(self, request): ...                returns whether it is done
        def cancel(self, request): ...              returns whether its memory is not used any more

A transport that takes memory of CUDA devices also has `exchange`, and passes the number of its device.

All calls come from the thread that calls the library. If a method raises an exception, that call fails and raises it.
include/reshard_transport.h states the rules.
"""
from __future__ import annotations

import ctypes as C
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from . import _c, errors
from .errors import InvalidError


class DeviceMessage(NamedTuple):
    """A message in memory of a CUDA device: to `peer`, or from it."""

    peer: int
    tag: int
    sends: bool
    address: int
    nbytes: int


class AnyTransport:
    """The transport of one process: an rsd_transport `table`, and exceptions of its methods. `rank` and `nranks` are
    those of the layouts. It must not be used by two threads at the same time."""

    def __init__(self, table: Any) -> None:
        self.table, self.kept = table, _c.Kept()
        self.rank: int = table.rank
        self.nranks: int = table.nranks

    @staticmethod
    def checked(transport: Any) -> Any:
        """Returns an argument `transport`, which is a transport or None."""
        if transport is not None and not isinstance(transport, AnyTransport):
            raise TypeError("transport must be a reshard.Transport, reshard.mpi.transport(comm) or "
                            f"reshard.torch.Group(), not {type(transport).__name__}: {transport!r}")
        return transport

    def gather(self, own: Any, timeout: float = 0.0) -> List[bytes]:
        """Collective. Returns the bytes `own` of every rank, in the order of ranks. All ranks pass the same number of
        bytes. It is for small data. `timeout`: seconds without progress; 0: 300."""
        given = bytes(own)
        found = C.create_string_buffer(max(1, len(given) * self.nranks))
        with self.kept:
            _c.lib.rsd_gather(C.byref(self.table), given, len(given), found, timeout)
        return [found.raw[i * len(given):(i + 1) * len(given)] for i in range(self.nranks)]

    def nodes(self) -> List[int]:
        """Collective. Returns a number for the host of every rank: the `nodes` of a plan, with which replicas cross
        between hosts once."""
        found = (_c.Int32 * self.nranks)()
        with self.kept:
            _c.lib.rsd_transport_nodes(C.byref(self.table), found)
        return list(found)


class Transport(AnyTransport):
    """A transport whose functions are methods of a subclass, for rank `rank` of `nranks`. With `device`, the number of
    a CUDA device, tensors are sent from memory of that device, by `exchange`. -1: of any device, and `send` and `recv`
    match it."""

    def __init__(self, rank: int, nranks: int, *, device: Optional[int] = None) -> None:
        if not 0 <= rank < nranks:
            raise InvalidError(f"rank {rank} out of range: the transport has {nranks} ranks")
        super().__init__(_c.Transport(rank=rank, nranks=nranks))
        self._requests: Dict[int, Any] = {}
        self._next = 1
        kinds = dict(type(self.table)._fields_)
        for name in ("send", "recv", "test"):
            setattr(self.table, name, self._guarded(kinds[name], getattr(self, "_" + name)))
        self.table.cancel = self.kept.callback(kinds["cancel"], self._cancel, lambda error: 0, ends=True)
        if device is not None:
            self.table.exchange = self._guarded(kinds["exchange"], self._exchange)
            self.table.device = device

    # -- methods of a subclass --

    def send(self, to: int, tag: int, data: memoryview) -> Any:
        """Starts to send `data` to the rank `to` with a `tag`, and returns a request. The memory does not change until
        `test` returns True. Messages from one rank to another with one tag arrive in order. Tags are 0 to 63."""
        raise NotImplementedError

    def recv(self, origin: int, tag: int, data: memoryview) -> Any:
        """Starts to receive exactly as many bytes as `data` has from the rank `origin`, with a `tag`, and returns a
        request."""
        raise NotImplementedError

    def exchange(self, messages: Sequence[DeviceMessage]) -> Any:
        """Starts to send and receive `messages` on the device, all at once, and returns one request. The messages
        between two ranks in one call are those in one call of the other, in the same order. Several between two ranks
        have the same order on both."""
        raise NotImplementedError

    def test(self, request: Any) -> bool:
        """Returns whether a `request` is done, which ends it. It is called repeatedly, and must not wait."""
        raise NotImplementedError

    def cancel(self, request: Any) -> Optional[bool]:
        """Ends a `request` after a failure. Returns True if its memory is no longer used. Otherwise the library never
        frees that memory."""
        return False

    # -- functions that the library calls --

    def _guarded(self, kind: Any, function: Any) -> Any:
        """Returns a callback of a ctypes kind, which keeps exceptions for the call of the library."""
        return self.kept.callback(kind, function, lambda error: _c.lib.rsd_set_error(
            errors.number_of(error), f"{type(error).__name__}: {error}".encode(errors="replace")))

    def _keep(self, request: Any, out: Any) -> None:
        number, self._next = self._next, self._next + 1
        self._requests[number] = request
        out[0] = number

    def _send(self, _: Any, to: int, tag: int, data: int, nbytes: int, out: Any) -> None:
        self._keep(self.send(to, tag, bytes_at(data, nbytes)), out)

    def _recv(self, _: Any, origin: int, tag: int, data: int, nbytes: int, out: Any) -> None:
        self._keep(self.recv(origin, tag, bytes_at(data, nbytes)), out)

    def _exchange(self, _: Any, n: int, messages: Any, out: Any) -> None:
        given = [DeviceMessage(one.peer, one.tag, bool(one.sends), one.data, one.nbytes) for one in messages[:n]]
        self._keep(self.exchange(given), out)

    def _test(self, _: Any, number: int, done: Any) -> None:
        done[0] = 0
        if self.test(self._requests[number]):
            del self._requests[number]
            done[0] = 1

    def _cancel(self, _: Any, number: int) -> int:
        return 1 if self.cancel(self._requests.pop(number)) else 0


def bytes_at(address: Optional[int], nbytes: int) -> memoryview:
    """Returns memory of the library, not a copy."""
    return memoryview((C.c_char * nbytes).from_address(address or 0)).cast("B")
