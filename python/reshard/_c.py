"""The C library: every function, struct and constant of its headers.

    _c.lib.rsd_layout_parse(b"f32[8,8] @ 4:S0", C.byref(handle))     raises an exception for a status
    _c.LoadOptions(allow_cast=1)                                     a struct rsd_load_options
    _c.FORMAT_DCP                                                    a constant RSD_FORMAT_DCP
    _c.OnProgress(function)                                          a callback rsd_on_progress

Calls release the GIL. The library is the one that RESHARD_LIB names, else the one installed with the package, else the
one that make built in the source tree of this file.
"""
from __future__ import annotations

import ctypes as C
import glob
import importlib
import operator
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Union

from . import errors
from ._header import INTEGERS, Header, Struct, fitting

_HERE = os.path.dirname(os.path.abspath(__file__))
_TREE = os.path.dirname(os.path.dirname(_HERE))

_signals: Any = importlib.import_module("_signal")  # `signal` makes enums, which takes longer than a small run
Int32, Int64, Text, Address = C.c_int32, C.c_int64, C.c_char_p, C.c_void_p


def _header_paths() -> List[str]:
    """Returns the headers of the package, else those of the source tree, without the one that needs MPI."""
    for folder in (os.path.join(_HERE, "include"), os.path.join(_TREE, "include")):
        paths = sorted(glob.glob(os.path.join(folder, "*.h")))
        if paths:
            return [path for path in paths if "mpi" not in os.path.basename(path)]
    raise ImportError(f"reshard: no headers in {_HERE}/include nor in {_TREE}/include")


def shared_object(name: str = "libreshard", variable: str = "RESHARD_LIB") -> str:
    """Returns the path of the shared library."""
    tried = [os.path.join(_HERE, name + ".so")]
    if os.path.exists(os.path.join(_TREE, "include", "reshard.h")):
        tried += [os.path.join(_TREE, "build", folder, name + ".so") for folder in ("", "python")]
    if os.environ.get(variable):
        return os.environ[variable]
    for path in tried:
        if os.path.exists(path):
            return path
    raise ImportError(f"reshard: no library at {' nor at '.join(tried)}: install the package, "
                      f"run make, or set {variable}")


class Functions:
    """The functions of the library by name. A status other than OK is raised as an exception."""

    def __init__(self, path: str, header: Header) -> None:
        self._header, self._path = header, path
        self._dll = C.CDLL(path)

    def __getattr__(self, name: str) -> Any:
        if name not in self._header.functions:
            raise AttributeError(f"the library has no function {name}")
        about = self._header.functions[name]
        try:
            function = self._dll[name]
        except AttributeError:
            raise AttributeError(f"{self._path} is older than the header: it has no {name}") from None
        function.restype = about.answer
        function.argtypes = [INTEGERS.get(kind, kind) for kind in about.takes]
        if about.fails and name != "rsd_set_error":  # it returns the status that it was passed
            function.errcheck = _raise_status  # type: ignore[assignment]
        setattr(self, name, function)  # so that the next lookup finds it directly
        return function


def _raise_status(status: int, function: Any, _: Any) -> int:
    if status:
        raise errors.made(status, lib.rsd_error().decode(errors="replace"))
    return status


def read(path: str) -> str:
    """The text of a header."""
    with open(path, encoding="ascii") as file:
        return file.read()


header_paths = _header_paths()
header = Header(map(read, header_paths))
try:
    lib = Functions(shared_object(), header)
except OSError as error:
    raise ImportError(f"reshard: {error}: install the package, run make, or set RESHARD_LIB") from None
if lib.rsd_version().decode() != header.version:
    raise ImportError(f"reshard: {shared_object()} is version {lib.rsd_version().decode()}, "
                      f"the package {header.version}")


def _python_name(name: str) -> str:
    return "".join(part.title() for part in name.split("_")[1:])


if TYPE_CHECKING:  # the names below are read from the headers
    def __getattr__(name: str) -> Any: ...

globals().update(header.constants)
globals().update({_python_name(name): kind for name, kind in header.structs.items()})
globals().update({_python_name(name): kind for name, kind in header.callbacks.items()})


def taken(pointer: C.c_void_p) -> Optional[str]:
    """Returns a text that the library allocated, and frees it."""
    if not pointer.value:
        return None
    text = (C.cast(pointer, Text).value or b"").decode()
    lib.rsd_free(pointer)
    return text


def ints(numbers: Sequence[int], kind: Any = Int64) -> Any:
    """Returns an array of numbers. It is never empty, so that it has an address. OverflowError: one does not fit."""
    found = list(map(operator.index, numbers))
    made = (kind * max(1, len(found)))(*found)
    if made[:len(found)] != found:
        for number in found:
            fitting(kind, number, "the number")
    return made


def pointers(addresses: Sequence[Optional[int]]) -> Any:
    """Returns an array of addresses."""
    return (Address * max(1, len(addresses)))(*addresses)


def packed(kind: Any, structs: Sequence[Struct]) -> Any:
    """Returns an array of structs. Objects that they point to are kept alive."""
    block = (kind * max(1, len(structs)))()
    for i, struct in enumerate(structs):
        block[i] = struct
    block.kept = list(structs)
    return block


Pathlike = Union[str, bytes, "os.PathLike[str]"]


def path_bytes(path: Pathlike) -> bytes:
    """Returns a path as bytes for the library. A NUL would end it there, so it is refused."""
    try:
        found = os.fsencode(path)
    except UnicodeEncodeError:
        raise errors.InvalidError(f"path is not text that can be encoded: {path!r}") from None
    if b"\0" in found:
        raise errors.InvalidError(f"path contains NUL: {found!r}")
    return found


def text_bytes(text: str, what: str) -> bytes:
    """Returns text as bytes for the library, which reads up to a NUL. `what` names the text in errors."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be text, not {type(text).__name__}: {text!r}")
    if "\0" in text:
        raise errors.InvalidError(f"{what} contains NUL: {text!r}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise errors.InvalidError(f"{what} is not text that can be encoded: {text!r}") from None


class Kept:
    """Callbacks from C. Exceptions cannot pass through C, so the first one is kept, the call of the library fails, and
    the exception is raised when the call returns.

        kept = Kept()
        told = kept.callback(_c.OnFinding, lambda context, text: found.append(text))
        with kept:
            _c.lib.rsd_verify(..., told, ...)

    Python runs the handler of Ctrl-C when a callback begins, before the callback can catch what the handler raises. So
    during a call in the main thread, exceptions of the handler are kept too, and the next callback fails.
    """

    def __init__(self) -> None:
        self.error: Optional[BaseException] = None
        self._callbacks: List[Any] = []
        self._before: Any = None  # the handler of Ctrl-C during a call, if it was replaced
        self._outer: Optional["Kept"] = None  # that keeps its exceptions, if a call has two of these
        self._pending: Optional[BaseException] = None  # of the handler, for the next callback
        self._code: Any = None  # of callbacks

    def callback(self, kind: Any, function: Callable[..., Any],
                 failed: Optional[Callable[[BaseException], int]] = None, *, ends: bool = False) -> Any:
        """Returns `function` as a callback. It returns None or a number for C. After an exception C receives what
        `failed` returns for it, by default ECANCELLED. `ends`: it is called after a failure, and Ctrl-C does not
        prevent it."""
        failed = failed or (lambda error: globals()["ECANCELLED"])

        def called(*args: Any) -> Any:
            try:
                keeper = self._outer or self
                if keeper._pending is not None and not ends:
                    pending, keeper._pending = keeper._pending, None
                    return failed(pending)
                return function(*args) or 0
            except BaseException as error:  # KeyboardInterrupt too
                if self.error is None:
                    self.error = error
                return failed(error)

        made = kind(called)
        self._callbacks.append(made)
        self._code = called.__code__
        return made

    def _interrupted(self, number: int, frame: Any) -> None:
        """Handles Ctrl-C during a call. What its handler raises is raised at once where a callback catches it, such as
        in a transport that waits."""
        try:
            self._before(number, frame)
        except BaseException as error:
            if self.error is None:
                self.error = error
            at = frame
            while at is not None and at.f_code is not self._code:
                at = at.f_back
            if at is not None and at is not frame:
                raise
            self._pending = error

    def __enter__(self) -> "Kept":
        if self._callbacks and threading.current_thread() is threading.main_thread():
            handler = _signals.getsignal(signal.SIGINT)
            keeper = getattr(handler, "__self__", None)
            if isinstance(keeper, Kept):
                self._outer = keeper
            elif callable(handler):
                self._before = handler
                _signals.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        before, self._before, self._outer, self._pending = self._before, None, None, None
        if before is not None:
            _signals.signal(signal.SIGINT, before)
        if self.error is not None:
            kept, self.error = self.error, None
            raise kept from kept.__cause__  # the status of the call was caused by it


class Handle:
    """An object of the library, which is freed when it is no longer used."""

    _free = ""  # the function that frees it
    _handle: Optional[int] = None

    @classmethod
    def _of(cls, handle: Any) -> Any:
        """Takes ownership of a handle."""
        made = cls.__new__(cls)
        made._handle = handle.value if isinstance(handle, C.c_void_p) else handle
        return made

    @property
    def handle(self) -> int:
        """Returns the address, for functions of `_c.lib`."""
        if self._handle is None:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._handle

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            getattr(lib, self._free)(handle)

    def __del__(self, lib: Any = lib) -> None:
        if getattr(self, "_handle", None) is not None:
            handle, self._handle = self._handle, None
            getattr(lib, self._free)(handle)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to this process and cannot be pickled")
