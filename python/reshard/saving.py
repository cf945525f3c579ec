"""Saving: state dicts as PyTorch's distributed checkpoints, by one process or by every rank.

    save("step-2000", {"model": {"w": w}, "step": 2000})                       whole tensors
    save("step-2000", {"w": parts}, layouts={"w": "f32[8,8] @ 4:S0"})          the arrays of all ranks
    save("step-2000", {"w": mine}, layouts={...}, transport=transport)         every rank passes its own arrays
"""
from __future__ import annotations

import ctypes as C
import os
import re
from collections.abc import Mapping as MappingBase
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

from . import _c, local, memory, states
from ._c import Address, Pathlike
from .carry import AnyPool
from .errors import InvalidError, MissingError
from .layout import Layout
from .local import Local, Progress, Report
from .storage import Storage, handle_for
from .transport import AnyTransport

Layouts = Mapping[str, Union[str, Layout]]
_HIGHEST = 19  # highest level of zstd


def compress_level(compress: Union[str, int, bool, None]) -> int:
    """Returns the level of zstd, 1 to 19, for 3, "zstd" or "zstd:3"; 0 for None, False and 0."""
    if compress is None or isinstance(compress, bool):
        return 3 if compress else 0
    if isinstance(compress, str):
        found = re.fullmatch(r"zstd(?::([0-9]{1,2}))?", compress)
        level = int(found.group(1) or 3) if found else 0
    else:
        level = int(compress)
        if level == 0:
            return 0
    if not 1 <= level <= _HIGHEST:
        raise InvalidError(f"compress={compress!r} must be zstd, or zstd:1 to zstd:{_HIGHEST}")
    return level


def _sorted(state: Any, layouts: Optional[Layouts],
            transport: Optional[AnyTransport]) -> Tuple[List[Local], List[Tuple[Any, ...]]]:
    """Returns the tensors of a state dict, and its values as (name, value, path)."""
    rank = None if transport is None else transport.rank
    leaves = states.flatten(state, layouts or {})
    for name in layouts or {}:
        if name not in leaves:
            raise MissingError(f"layouts has {name}, which is not in the state")
    tensors: List[Local] = []
    values: List[Tuple[Any, ...]] = []
    for name, leaf in leaves.items():
        path = None if leaf.path == (name,) else leaf.path
        if layouts is not None and name in layouts:
            tensors.append(Local(name, layouts[name], leaf.what, rank, path=path))
        elif not states.is_tensor(leaf.what):
            values.append((name, leaf.what, path))
        elif transport is None:
            tensors.append(Local.whole(name, leaf.what, path=path))
        else:  # every rank has the whole tensor
            seen = memory.see(leaf.what, name)
            everywhere = Layout.on(seen.dtype, seen.shape, str(transport.nranks), "R")
            tensors.append(Local(name, everywhere, [seen], rank, path=path))
    return tensors, values


def _value(name: str, value: Any, path: Optional[Sequence[Union[str, int]]] = None) -> Any:
    return _c.Value(name=name.encode(), json=states.to_json(name, value),
                    path=None if path is None else states.to_json(name, list(path)))


class _Request:
    """The arguments of a save, and the objects that they point to."""

    def __init__(self, path: Pathlike, state: Any, layouts: Optional[Layouts], nranks: int, overwrite: bool,
                 compress: Union[str, int, bool, None], to_lowest_rank: bool, pool: AnyPool,
                 max_nbytes: Union[str, int], progress: Optional[Progress], values: Sequence[Tuple[Any, ...]],
                 transport: Optional[AnyTransport], timeout: float, storage: Optional[Storage],
                 torch_places: bool) -> None:
        if isinstance(state, MappingBase):
            tensors, found = _sorted(state, layouts, transport)
        elif layouts is not None:
            raise InvalidError("layouts require a state dict")
        else:
            tensors, found = local.listed(state), []
        for name in [one.name for one in tensors] + [str(one[0]) for one in (*found, *values)]:
            states.check_name(name)
        locals_ = [one.struct(writable=False) for one in tensors]
        stream = memory.ordered(device for one in locals_ for device in one.devices)
        self.call, self.storage = local.Call(progress, pool, max_nbytes, transport, timeout, stream), storage
        self.call.io.contents.storage = handle_for(os.fsdecode(path), storage)
        pairs = [_value(*one) for one in [*found, *values]]
        self.options = _c.SaveOptions(
            nranks=nranks, overwrite=overwrite, to_lowest_rank=to_lowest_rank, compress=compress_level(compress),
            nvalues=len(pairs), values=_c.packed(_c.Value, pairs), torch_places=torch_places, io=self.call.io)
        self.args: Tuple[Any, ...] = (_c.path_bytes(path), len(locals_), _c.packed(_c.Tensor, locals_),
                                      C.byref(self.options))


def save(path: Pathlike, state: Any, *, layouts: Optional[Layouts] = None, nranks: int = 0, overwrite: bool = False,
         force: bool = False, compress: Union[str, int, bool, None] = None, to_lowest_rank: bool = False,
         pool: AnyPool = None, threads: Optional[int] = None, max_nbytes: Union[str, int] = 0,
         max_memory: Union[str, int] = 0, progress: Optional[Progress] = None,
         values: Sequence[Tuple[Any, ...]] = (), transport: Optional[AnyTransport] = None, timeout: float = 0.0,
         storage: Optional[Storage] = None, torch_places: bool = False) -> Report:
    """Saves `state`, a state dict, nested or with dotted names, or a list of `Local`, as torch saves it: `path` becomes
    a directory with .metadata and __R_0.distcp for each rank R.

    A tensor is whole, on rank 0, unless `layouts` has its name: then the state has the list of all its arrays in
    that layout. All that is not a tensor must be plain: None, booleans, numbers, text, lists of these.

    With a `transport` the call is collective: every rank passes its own arrays. A tensor without a layout is whole
    on every rank. Rank 0 publishes when all have written; if one rank fails, all raise its error and nothing is
    published.

    layouts     layouts of tensors that are not whole, by name
    nranks      number of ranks to write files for. Default: as many as the layouts name
    overwrite, force    replace an existing checkpoint, which stays readable until the new one is complete; in a
                bucket, until all of the new one is uploaded. Two words for one option
    compress    "zstd" or "zstd:LEVEL". Default: none
    to_lowest_rank  the lowest rank writes what several ranks have. Default: it is divided among them
    pool, threads   a Pool or a number of threads. Default: one thread per CPU of the process
    max_nbytes, max_memory  limit of the buffers; two words for one option. Default: 256 MB
    progress    called with the bytes done and the bytes in total; an exception stops the work
    values      more of what is not a tensor, as (name, value) or (name, value, path in a nested dict)
    transport   the ranks that save together. Default: this process alone
    timeout     seconds without a heartbeat after which a rank counts as lost. Default: 300
    storage     credentials and limits of an s3:// path. Default: those of the environment
    torch_places    data files are torch's to the byte. Default: large tensors begin at multiples of 4096 bytes, so that
                later conversions can share them
    """
    request = _Request(path, state, layouts, nranks, overwrite or force, compress, to_lowest_rank,
                       local.either("pool", pool, "threads", threads),
                       local.either("max_nbytes", max_nbytes, "max_memory", max_memory), progress, values, transport,
                       timeout, storage, torch_places)
    return request.call(_c.lib.rsd_save, *request.args)


class Saving:
    """A save in the background, of a `request` that `save_start` makes. `wait` must be called."""

    def __init__(self, request: _Request) -> None:
        handle = Address()
        request.call.run(_c.lib.rsd_save_start, *request.args, C.byref(handle))
        self._request: Optional[_Request] = request
        self._handle = handle
        # The arrays are copied, so they may change or be freed.
        request.args = ()

    def wait(self) -> Report:
        """Waits until the checkpoint is complete, and returns the report."""
        if self._request is None:
            raise ValueError("wait was called already")
        request, self._request = self._request, None
        return request.call(_c.lib.rsd_save_wait, self._handle)

    def __del__(self) -> None:
        if getattr(self, "_request", None) is not None:
            try:
                self.wait()
            except Exception:  # wait was not called
                pass


def save_start(path: Pathlike, state: Any, *, layouts: Optional[Layouts] = None, nranks: int = 0,
               overwrite: bool = False, force: bool = False, compress: Union[str, int, bool, None] = None,
               to_lowest_rank: bool = False, pool: AnyPool = None, threads: Optional[int] = None,
               max_nbytes: Union[str, int] = 0, max_memory: Union[str, int] = 0,
               progress: Optional[Progress] = None, values: Sequence[Tuple[Any, ...]] = (),
               transport: Optional[AnyTransport] = None, timeout: float = 0.0, storage: Optional[Storage] = None,
               torch_places: bool = False) -> Saving:
    """The same as `save` in two parts: returns when everything in `state` is copied, and the arrays may change again.
    `wait` of the result publishes it at `path`. With a `transport`, all ranks call `wait` too.

    The keywords are those of `save`: layouts, nranks, overwrite, force, compress, to_lowest_rank, pool, threads,
    max_nbytes, max_memory, progress, values, transport, timeout, storage, torch_places."""
    request = _Request(path, state, layouts, nranks, overwrite or force, compress, to_lowest_rank,
                       local.either("pool", pool, "threads", threads),
                       local.either("max_nbytes", max_nbytes, "max_memory", max_memory), progress, values, transport,
                       timeout, storage, torch_places)
    return Saving(request)
