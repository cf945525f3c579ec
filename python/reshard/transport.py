"""Transports: how bytes get from one process to another, written in Python.

A subclass of Transport has five methods, and `bind(plan, transport=...)` does the rest: it packs, sends in
rounds under a budget, unpacks, reduces and watches the clock.

    class OverSockets(Transport):
        def __init__(self, ...):
            super().__init__(rank, nranks)
        def send(self, to, tag, data): ...          returns a request
        def recv(self, origin, tag, data): ...      returns a request
        def test(self, request): ...                returns whether it is done
        def cancel(self, request): ...
        def allgather(self, own): ...               returns the bytes of every rank, one after the other

All calls come from the thread that runs the exec. An exception in a method makes the call fail, and is then
raised by it.
"""
from __future__ import annotations

import ctypes as C
from typing import Any, Dict, List, Optional

from . import _c, errors
from .errors import InvalidError


class AnyTransport:
    """One process's end of a transport: an rsd_transport, and what was raised in it. `rank` and `nranks` are
    numbered as in the plans' layouts."""

    def __init__(self, table: Any) -> None:
        self.table, self.kept = table, _c.Kept()
        self.rank: int = table.rank
        self.nranks: int = table.nranks

    def nodes(self) -> List[int]:
        """Collective. A number for the host of every rank: the `nodes` that a plan takes, so that replicas
        cross between hosts once."""
        found = (_c.Int32 * self.nranks)()
        with self.kept:
            _c.lib.rsd_transport_nodes(C.byref(self.table), found)
        return list(found)


class Transport(AnyTransport):
    """A transport whose functions are methods of a subclass."""

    def __init__(self, rank: int, nranks: int) -> None:
        if not 0 <= rank < nranks:
            raise InvalidError(f"rank {rank} of {nranks}")
        super().__init__(_c.Transport(rank=rank, nranks=nranks))
        self._requests: Dict[int, Any] = {}
        self._next = 1
        kinds = dict(type(self.table)._fields_)
        for name in ("send", "recv", "test", "cancel", "allgather"):
            setattr(self.table, name, self._guarded(kinds[name], getattr(self, "_" + name)))

    # -- what a subclass does --

    def send(self, to: int, tag: int, data: memoryview) -> Any:
        """Starts to send `data` to a rank and returns a request. The memory stays as it is until `test` says
        that it is done. Messages with one tag from one rank to another arrive in order; tags are 0 to 63."""
        raise NotImplementedError

    def recv(self, origin: int, tag: int, data: memoryview) -> Any:
        """Starts to receive exactly as many bytes as `data` has from a rank and returns a request."""
        raise NotImplementedError

    def test(self, request: Any) -> bool:
        """Whether a request is done. Asked again and again, so it returns at once."""
        raise NotImplementedError

    def cancel(self, request: Any) -> None:
        """After a failure: nothing is touched for this request any more."""

    def allgather(self, own: memoryview) -> Any:
        """The bytes of every rank, which all give as many, in the order of ranks. Waits for all, as long as the
        transport does."""
        raise NotImplementedError

    # -- what the library calls --

    def _guarded(self, kind: Any, function: Any) -> Any:
        kept = self.kept

        def called(*args: Any) -> Optional[int]:
            try:
                function(*args)
                return 0
            except BaseException as error:  # nothing passes through C; the call raises it
                if kept.error is None:
                    kept.error = error
                return _c.lib.rsd_set_error(errors.number_of(error), f"{type(error).__name__}: {error}".encode())

        return kind(called)

    def _keep(self, request: Any, out: Any) -> None:
        number, self._next = self._next, self._next + 1
        self._requests[number] = request
        out[0] = number

    def _send(self, _: Any, to: int, tag: int, data: int, nbytes: int, out: Any) -> None:
        self._keep(self.send(to, tag, bytes_at(data, nbytes)), out)

    def _recv(self, _: Any, origin: int, tag: int, data: int, nbytes: int, out: Any) -> None:
        self._keep(self.recv(origin, tag, bytes_at(data, nbytes)), out)

    def _test(self, _: Any, number: int, done: Any) -> None:
        done[0] = 0
        if self.test(self._requests[number]):
            del self._requests[number]
            done[0] = 1

    def _cancel(self, _: Any, number: int) -> None:
        self.cancel(self._requests.pop(number))

    def _allgather(self, _: Any, own: int, nbytes: int, out: int, timeout: float) -> None:
        found = memoryview(self.allgather(bytes_at(own, nbytes))).cast("B")
        if found.nbytes != nbytes * self.nranks:
            raise InvalidError(f"allgather gave {found.nbytes} bytes for {self.nranks} ranks of {nbytes}")
        bytes_at(out, found.nbytes)[:] = found


def bytes_at(address: Optional[int], nbytes: int) -> memoryview:
    """Memory of the library's, as it is."""
    return memoryview((C.c_char * nbytes).from_address(address or 0)).cast("B")
