"""Communicators of mpi4py as transports.

    from mpi4py import MPI
    import reshard, reshard.mpi

    transport = reshard.mpi.transport(MPI.COMM_WORLD)
    bound = reshard.bind(plan, transport=transport)
    bound.run(src, dst)                                  the arrays of this rank

The library for MPI is libreshard_mpi, which make builds and `make install` installs where mpicc is found. No wheel has
it, since it belongs to one MPI. RESHARD_MPI_LIB names it, or its directory. Without that variable it is searched in
the source tree of this file, where the system searches (LD_LIBRARY_PATH, ldconfig), in lib of the environment of
this Python, and in /usr/local/lib.
"""
from __future__ import annotations

import ctypes as C
import os
import re
import sys
from typing import Any, List, Optional

from . import _c
from .transport import AnyTransport

__all__ = ["MPITransport", "transport"]

_NAME = "libreshard_mpi.so.1"
_functions: Optional[_c.Functions] = None


def _candidates() -> List[str]:
    """Returns the paths that may be the library, in the order in which they are tried."""
    named = os.environ.get("RESHARD_MPI_LIB")
    if named:
        return [os.path.join(named, _NAME) if os.path.isdir(named) else named]
    try:
        return [_c.shared_object("libreshard_mpi", "RESHARD_MPI_LIB")]
    except ImportError:
        return [_NAME, *(os.path.join(place, _NAME) for place in
                         (os.path.join(sys.prefix, "lib"), "/usr/local/lib", "/usr/local/lib64"))]


def _load() -> _c.Functions:
    """Returns the library, which is loaded when it is first needed, after MPI."""
    global _functions
    if _functions is None:
        text = _c.read(os.path.join(os.path.dirname(_c.header_paths[0]), "reshard_mpi.h"))
        # Functions that take an MPI_Comm cannot be called from Python.
        _c.header.add(re.sub(r"^\w+ rsd_\w+\([^;]*MPI_Comm[^;]*\);", "", text, flags=re.M))
        errors: List[str] = []
        for path in _candidates():
            try:
                _functions = _c.Functions(path, _c.header)
                break
            except OSError as error:
                errors.append(str(error))
        else:
            raise ImportError(f"reshard.mpi: {'; '.join(errors)}: build and install the C library where mpicc is "
                              "found, or set RESHARD_MPI_LIB to the path of libreshard_mpi.so")
    return _functions


class MPITransport(AnyTransport):
    """The communicator `comm` of mpi4py as a transport. A rank of a layout is a rank of the communicator. It must not
    be used by two threads at the same time."""

    def __init__(self, comm: Any) -> None:
        self._mpi = _load()
        table = _c.Transport()
        self._mpi.rsd_mpi_transport_f(comm.py2f(), C.byref(table))
        super().__init__(table)
        self.comm = comm

    def __del__(self) -> None:
        if getattr(self, "table", None) is not None:
            self._mpi.rsd_mpi_transport_free(C.byref(self.table))


def transport(comm: Any) -> MPITransport:
    """Collective. Returns `comm`, a communicator of mpi4py, as a transport."""
    if not hasattr(comm, "py2f"):
        raise TypeError(f"a {type(comm).__name__} is not a communicator of mpi4py")
    return MPITransport(comm)
