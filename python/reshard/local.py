"""Tensors in memory, progress and reports, for all calls on checkpoints."""
from __future__ import annotations

import contextlib
import ctypes as C
import json
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from . import _c, dtypes, memory
from .carry import AnyPool, Pool, flat_strides, in_order, see_all
from .errors import InvalidError
from .layout import Layout
from .transport import AnyTransport

# Called with the bytes that are done and those there are. An exception in it stops the work and is raised.
Progress = Callable[[int, int], Any]

Size = Union[str, int, None]  # bytes: a number, or a text such as "256MB"


def either(one: str, a: Any, other: str, b: Any) -> Any:
    """Returns the value of two keywords that have one meaning. InvalidError if both are passed."""
    if a and b and a != b:
        raise InvalidError(f"{one} and {other} have one meaning: pass one of them")
    return b if not a and b is not None else a


class Report:
    """The report of a call, made of a `struct` of the library."""

    ntensors: int  #: that were read or written
    nbytes_needed: int  #: of tensors, in what was read
    nbytes_read: int  #: for them
    nbytes_decoded_again: int  #: of compressed items, decoded more than once
    nbytes_unchecked: int  #: read in part only, or stored without a CRC-32
    nbytes_written: int  #: to files
    nfiles_written: int  #: without those that a resumed run found complete
    nbytes_memory: int  #: most buffers at one time
    nleft_out: int  #: tensors and values of the source that the target does not have
    seconds: float
    nbytes_shared: int  #: not written, but shared with the source

    def __init__(self, struct: Any) -> None:
        self.__dict__.update(struct.as_dict())

    def as_dict(self) -> Dict[str, Any]:
        """The fields by name."""
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name}={value}' for name, value in self.__dict__.items())})"


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class Call:
    """One call on checkpoints: its rsd_io, and exceptions of its callbacks.

        call = Call(progress, pool, max_nbytes, transport)
        report = call(_c.lib.rsd_load, checkpoint, n, locals, C.byref(_c.LoadOptions(io=call.io)))
    """

    def __init__(self, progress: Optional[Progress] = None, pool: AnyPool = None, max_nbytes: Size = 0,
                 transport: Optional[AnyTransport] = None, timeout: float = 0.0,
                 stream: Optional[int] = None) -> None:
        self.kept = _c.Kept()
        self._pool, self._transport = Pool.of(pool), AnyTransport.checked(transport)
        io = _c.Io(pool=self._pool.handle, max_nbytes=size(max_nbytes), timeout=timeout,
                   stream=stream or None)
        if transport is not None:
            io.transport = C.addressof(transport.table)
        # The main thread is called also without `progress`, since Python handles Ctrl-C between two bytecodes.
        if progress is not None or _is_main():
            def report_progress(_: Any, about: Any) -> Optional[int]:
                if progress is not None:
                    progress(about.contents.nbytes_done, about.contents.nbytes_total)
                return None
            io.on_progress = self.kept.callback(_c.OnProgress, report_progress)
        self.io = C.pointer(io)

    def run(self, function: Any, *args: Any) -> None:
        """Makes a call. Raises the exception of a callback or the transport, else that of the status."""
        with contextlib.nullcontext() if self._transport is None else self._transport.kept, self.kept:
            function(*args)

    def __call__(self, function: Any, *args: Any) -> Report:
        report = _c.Report()
        self.run(function, *args, C.byref(report))
        return Report(report)


class Local:
    """A tensor in memory with a `name` and a `layout`: the arrays of one rank, or of every rank.

    `arrays` are those of `rank`, or of all ranks if it is None, in the order of `layout.arrays(rank)`: a list, a
    dict from ranks to arrays, or a single array. `path` is the path of the tensor in a nested state dict. `load`
    and `save` take lists of these, also several of one tensor."""

    def __init__(self, name: str, layout: Union[str, Layout], arrays: Any, rank: Optional[int] = None, *,
                 path: Optional[Sequence[Union[str, int]]] = None) -> None:
        self.name, self.arrays, self.rank, self.path = name, arrays, rank, path
        self.layout = Layout.of_any(layout)

    @classmethod
    def whole(cls, name: str, array: Any, *, path: Optional[Sequence[Union[str, int]]] = None) -> "Local":
        """Returns a whole tensor with a `name`, and the dtype and shape of one `array`. `path` is its path in a nested
        state dict."""
        seen = memory.see(array, name)
        return cls(name, Layout.whole(seen.dtype, seen.shape), [seen], 0, path=path)

    def struct(self, *, writable: bool, cast: bool = False) -> Any:
        """Returns the rsd_tensor, after its memory is checked, and keeps alive what it points to. With `writable` it
        must be. With `cast` the arrays may have another dtype than the layout, which is the same for all."""
        layout, wanted = self.layout, self.layout.arrays(self.rank)
        given = in_order(self.arrays, wanted, self.name)
        seen = see_all(given, wanted, layout.dtype, self.name, writable, cast)
        own = next((one.dtype for one in seen if one is not None), dtypes.dtype(layout.dtype))
        if own.name != layout.dtype:
            layout = layout.of_dtype(own)
            seen = see_all(given, wanted, own, self.name, writable)
        strides, dense = flat_strides(seen, wanted)
        made = _c.Tensor(name=self.name.encode(), layout=layout.handle,
                        rank=_c.EVERY_RANK if self.rank is None else self.rank,
                        arrays=_c.pointers([None if one is None else one.address for one in seen]),
                        strides=None if dense else _c.ints(strides),
                        path=None if self.path is None else json.dumps(list(self.path)).encode())
        made.kept = (layout, seen)
        made.devices = [one.device for one in seen if one is not None]
        return made


def listed(state: Any) -> List[Local]:
    """Returns a list of `Local` that is passed instead of a state dict."""
    found = list(state) if isinstance(state, (list, tuple)) else [state]
    for one in found:
        if not isinstance(one, Local):
            raise TypeError(f"expected a state dict or a list of Local, not {type(one).__name__}: {one!r}")
    return found


def size(text: Size) -> int:
    """Returns bytes from a number, or a text such as "256MB", "5GB", "1GiB"; 0 for None. A small number without a unit
    is refused, as in the command: more is meant."""
    if not text:
        return 0
    words = str(text).strip().upper()
    if words.isdecimal() and 0 < int(words) < 1000:
        raise InvalidError(f"a size of {text} means {words} bytes; add a unit: '{text}GB', or '{text}B' if that is "
                           "meant")
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units.update({f"{letter}B": 1000 ** power, f"{letter}IB": 1024 ** power, letter: 1000 ** power})
    number = words.rstrip("KMGTIB ")
    try:
        found = (int(number) if number.isdecimal() else float(number)) * units[words[len(number):].strip()]
        if 0 <= found < 1 << 63:
            return int(found)
    except (ValueError, KeyError):
        pass
    raise InvalidError(f"{text!r} is not a number of bytes, such as 256MB, 5GB or 1GiB")
