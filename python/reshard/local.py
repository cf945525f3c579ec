"""What loading, saving, converting and proving share: tensors in memory, progress and reports."""
from __future__ import annotations

import ctypes as C
import json
import threading
from typing import Any, Callable, Dict, Optional, Sequence, Union

from . import _c, dtypes, memory
from .carry import flat_strides, in_order, see_all
from .layout import Layout

# Called with the bytes that are done and those there are. An exception in it stops the work and is raised.
Progress = Callable[[int, int], Any]


class Report:
    """What was done."""

    ntensors: int  #: that were read or written
    nbytes_needed: int  #: of tensors, in what was read
    nbytes_read: int  #: for them
    nbytes_decoded_again: int  #: of compressed items that had to be entered more than once
    nbytes_unchecked: int  #: read in part only, or stored without a CRC-32
    nbytes_written: int  #: to files
    nfiles_written: int  #: those that a resumed run found complete not counted
    nbytes_memory: int  #: most buffers at one time
    nleft_out: int  #: tensors and values of the source that the target has not
    seconds: float
    nbytes_shared: int  #: not written, but shared with the source

    def __init__(self, struct: Any) -> None:
        self.__dict__.update(struct.as_dict())

    def as_dict(self) -> Dict[str, Any]:
        """The fields by name."""
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name}={value}' for name, value in self.__dict__.items())})"


class Call:
    """One call that tells how far it is: its callbacks, and what they raised.

        call = Call(progress)
        options = _c.LoadOptions(**call.options)
        report = call(_c.lib.rsd_load, checkpoint, n, locals, options)
    """

    def __init__(self, progress: Optional[Progress] = None) -> None:
        self.kept = _c.Kept()
        self.options: Dict[str, Any] = {}
        # The main thread is told even if nobody asked: between two bytecodes is where Ctrl-C is noticed.
        if progress is not None or threading.current_thread() is threading.main_thread():
            def told(_: Any, about: Any) -> None:
                if progress is not None:
                    progress(about.contents.nbytes_done, about.contents.nbytes_total)
            self.options["on_progress"] = self.kept.callback(_c.OnProgress, told)

    def __call__(self, function: Any, *args: Any) -> Report:
        report = _c.Report()
        with self.kept:
            function(*args, C.byref(report))
        return Report(report)


class Local:
    """A tensor in memory: what one rank has of it, or every rank.

    `arrays` are those of `rank`, or of all ranks if it is None, in the order of `layout.arrays(rank)`: a
    list, a dict of those of each rank, or just the array if there is one. `path` is where the tensor is in
    a nested state dict that is saved. Lists of these are loaded and saved, several of one tensor too."""

    def __init__(self, name: str, layout: Union[str, Layout], arrays: Any, rank: Optional[int] = None, *,
                 path: Optional[Sequence[Union[str, int]]] = None) -> None:
        self.name, self.arrays, self.rank, self.path = name, arrays, rank, path
        self.layout = Layout(layout) if isinstance(layout, str) else layout

    @classmethod
    def whole(cls, name: str, array: Any, *, path: Optional[Sequence[Union[str, int]]] = None) -> "Local":
        """A whole tensor that is one array, of the array's dtype and shape."""
        seen = memory.see(array, name)
        return cls(name, Layout.whole(seen.dtype, seen.shape), [seen], 0, path=path)

    def struct(self, *, writable: bool, cast: bool = False) -> Any:
        """The rsd_tensor, whose memory has been checked. What it points to lives as long as it does. With
        `cast` the arrays may be of another dtype than the layout, all of one."""
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
        return made


def size(text: Union[str, int, None]) -> int:
    """Bytes: a number, or a text such as "256MB", "5GB", "1GiB"; None is 0."""
    if text is None or isinstance(text, int):
        return text or 0
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units.update({f"{letter}B": 1000 ** power, f"{letter}IB": 1024 ** power, letter: 1000 ** power})
    number = text.strip().rstrip("kKmMgGtTiIbB ")
    unit = text.strip()[len(number):].strip().upper()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no number of bytes: 256MB, 5GB, 1GiB") from None
