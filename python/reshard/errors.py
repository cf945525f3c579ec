"""Exceptions. Each has the message of the library, which is one line, and is also a builtin exception."""
from __future__ import annotations

from typing import Dict, Type


class Error(Exception):
    """An error of the library. `status` is its name, such as "EMISMATCH"."""

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
    """An argument is invalid."""

    status = "EINVAL"


class MismatchError(Error, ValueError):
    """Arguments do not match each other, or data is missing."""

    status = "EMISMATCH"


class MissingError(MismatchError, KeyError):
    """A tensor does not exist."""


class LimitError(Error, OverflowError):
    """A value exceeds a limit."""

    status = "ELIMIT"


class ExistsError(Error, FileExistsError):
    """An output already exists."""

    status = "EEXIST"


class CancelledError(Error):
    """The call was cancelled."""

    status = "ECANCELLED"


class OutOfMemoryError(Error, MemoryError):
    """Memory could not be allocated."""

    status = "ENOMEM"


class FileError(Error, OSError):
    """A file cannot be read or written."""

    status = "EIO"


class MissingFileError(FileError, FileNotFoundError):
    """A file does not exist."""

    status = "ENOENT"


class FormatError(Error, ValueError):
    """A file violates its format."""

    status = "EFORMAT"


class UnsupportedError(Error, NotImplementedError):
    """The data is valid, but the library does not support it."""

    status = "EUNSUPPORTED"


class PeerError(Error, ConnectionError):
    """Another rank failed or terminated."""

    status = "EPEER"


class TimedOutError(Error, TimeoutError):
    """Another rank did not respond in time."""

    status = "ETIMEOUT"


_BY_STATUS: Dict[str, Type[Error]] = {
    kind.status: kind
    for kind in (InvalidError, MismatchError, LimitError, ExistsError, CancelledError, OutOfMemoryError,
                 FileError, MissingFileError, FormatError, UnsupportedError, PeerError, TimedOutError)}


def made(status: int, message: str) -> Error:
    """Returns the exception for a status of the library."""
    from . import _c
    name = _c.lib.rsd_status_name(status).decode()
    return _BY_STATUS.get(name, Error)(message, name)


def number_of(error: BaseException) -> int:
    """Returns the status for an exception, which a failed callback returns to C."""
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
