"""What can go wrong, by who can fix it. Each error carries the library's one line, with the values in it,
and is also the builtin exception that fits."""
from __future__ import annotations

from typing import Dict, Type


class Error(Exception):
    """An error of the library. `status` is its code as text: "EMISMATCH"."""

    status = ""

    def __init__(self, message: str = "", status: str = "") -> None:
        super().__init__(message)
        self.message = message
        if status:
            self.status = status

    def __str__(self) -> str:
        return self.message

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return type(self), (self.message, self.status)


class InvalidError(Error, ValueError):
    """An argument that makes no sense by itself."""

    status = "EINVAL"


class MismatchError(Error, ValueError):
    """Two things that do not fit each other: shapes that differ, data that is missing."""

    status = "EMISMATCH"


class MissingError(MismatchError, KeyError):
    """A tensor that is not there."""


class LimitError(Error, OverflowError):
    """More than fits."""

    status = "ELIMIT"


class ExistsError(Error, FileExistsError):
    """An output that is already there."""

    status = "EEXIST"


class CancelledError(Error):
    """A stop that was asked for."""

    status = "ECANCELLED"


class OutOfMemoryError(Error, MemoryError):
    """The machine has no memory left."""

    status = "ENOMEM"


class FileError(Error, OSError):
    """A file could not be read or written."""

    status = "EIO"


class MissingFileError(FileError, FileNotFoundError):
    """A file that does not exist."""

    status = "ENOENT"


class FormatError(Error, ValueError):
    """A file that breaks its format."""

    status = "EFORMAT"


class UnsupportedError(Error, NotImplementedError):
    """Well formed, but nothing here can do it."""

    status = "EUNSUPPORTED"


class PeerError(Error, ConnectionError):
    """Another rank failed."""

    status = "EPEER"


class TimedOutError(Error, TimeoutError):
    """Another rank was late."""

    status = "ETIMEOUT"


_BY_STATUS: Dict[str, Type[Error]] = {
    kind.status: kind
    for kind in (InvalidError, MismatchError, LimitError, ExistsError, CancelledError, OutOfMemoryError,
                 FileError, MissingFileError, FormatError, UnsupportedError, PeerError, TimedOutError)}


def made(status: int, message: str) -> Error:
    """The exception for a status of the library."""
    from . import _c
    name = _c.lib.rsd_status_name(status).decode()
    return _BY_STATUS.get(name, Error)(message, name)


def number_of(error: BaseException) -> int:
    """The status for an exception: what a callback that failed with it returns to C."""
    from . import _c
    if isinstance(error, Error) and error.status:
        return _c.header.constants[error.status]
    if isinstance(error, MemoryError):
        return _c.header.constants["ENOMEM"]
    if isinstance(error, TimeoutError):
        return _c.header.constants["ETIMEOUT"]
    if isinstance(error, FileNotFoundError):
        return _c.header.constants["ENOENT"]
    if isinstance(error, OSError):
        return _c.header.constants["EIO"]
    return _c.header.constants["EINVAL" if isinstance(error, (TypeError, ValueError)) else "ECANCELLED"]
