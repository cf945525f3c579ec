"""Communicators of mpi4py as transports.

    from mpi4py import MPI
    import reshard, reshard.mpi

    transport = reshard.mpi.transport(MPI.COMM_WORLD)
    bound = reshard.bind(plan, transport=transport)
    bound.run(src, dst)                                  the arrays of this rank

The library for MPI is libreshard_mpi, which make builds and installs where mpicc is found. It is searched in
RESHARD_MPI_LIB, beside this file, in the tree of this file, and where the system searches.
"""
from __future__ import annotations

import ctypes as C
import os
import re
from typing import Any, Optional

from . import _c
from .transport import AnyTransport

_functions: Optional[_c.Functions] = None


def _load() -> _c.Functions:
    """Returns the library, which is loaded when it is first needed, after MPI."""
    global _functions
    if _functions is None:
        text = _c.read(os.path.join(os.path.dirname(_c.header_paths[0]), "reshard_mpi.h"))
        # Functions that take an MPI_Comm cannot be called from Python.
        _c.header.add(re.sub(r"^\w+ rsd_\w+\([^;]*MPI_Comm[^;]*\);", "", text, flags=re.M))
        try:
            path = _c.shared_object("libreshard_mpi", "RESHARD_MPI_LIB")
        except ImportError:
            path = "libreshard_mpi.so.1"
        try:
            _functions = _c.Functions(path, _c.header)
        except OSError as error:
            raise ImportError(f"reshard.mpi: {error}: build it with make where mpicc is found, or set "
                              "RESHARD_MPI_LIB to its path") from None
    return _functions


class MPITransport(AnyTransport):
    """A communicator of MPI as a transport. A rank of a layout is a rank of the communicator. It must not be used by
    two threads at the same time."""

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
    """Collective. Returns a communicator of mpi4py as a transport."""
    if not hasattr(comm, "py2f"):
        raise TypeError(f"a {type(comm).__name__} is not a communicator of mpi4py")
    return MPITransport(comm)
