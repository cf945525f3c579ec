"""Saving: state dicts as PyTorch's distributed checkpoints, by one process or by every rank.

    save("step-2000", {"model": {"w": w}, "step": 2000})                       whole tensors
    save("step-2000", {"w": parts}, layouts={"w": "f32[8,8] @ 4:S0"})          all ranks' arrays
    save("step-2000", {"w": mine}, layouts={...}, rank=r, nranks=4)            every rank's process calls it,
    publish("step-2000", 4)                                                    and then one of them this
"""
from __future__ import annotations

import ctypes as C
import os
import re
from collections.abc import Mapping as MappingBase
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import _c, local, memory, states
from ._c import Address
from .carry import AnyPool, Pool
from .errors import InvalidError, MissingError
from .layout import Layout
from .local import Local, Progress, Report
from .storage import Storage, handle_for

Layouts = Mapping[str, Union[str, Layout]]
Pathlike = Union[str, "os.PathLike[str]"]
_HIGHEST = 19  # level of zstd that the library takes


def compress_level(compress: Union[str, int, bool, None]) -> int:
    """0, or the level of zstd, 1 to 19: None, False and 0; 3, "zstd", "zstd:3"."""
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
        raise InvalidError(f"compress={compress!r}: there is zstd, and zstd:1 to zstd:{_HIGHEST}")
    return level


def _sorted(state: Any, layouts: Optional[Layouts], rank: Optional[int],
            nranks: int) -> Tuple[List[Local], List[Tuple[Any, ...]]]:
    """The tensors of a state dict, and its values as (name, value, path)."""
    leaves = states.flatten(state, layouts or {})
    for name in layouts or {}:
        if name not in leaves:
            raise MissingError(f"a layout for {name}, which is not in the state")
    tensors: List[Local] = []
    values: List[Tuple[Any, ...]] = []
    for name, leaf in leaves.items():
        path = None if leaf.path == (name,) else leaf.path
        if layouts is not None and name in layouts:
            tensors.append(Local(name, layouts[name], leaf.what, rank, path=path))
        elif not states.is_tensor(leaf.what):
            values.append((name, leaf.what, path))
        elif rank is None:
            tensors.append(Local.whole(name, leaf.what, path=path))
        elif not nranks:
            raise InvalidError(f"{name} has no layout: nranks says how many ranks save it together")
        else:  # every rank has all of it
            seen = memory.see(leaf.what, name)
            everywhere = Layout.on(seen.dtype, seen.shape, str(nranks), "R")
            tensors.append(Local(name, everywhere, [seen], rank, path=path))
    return tensors, values


def _value(name: str, value: Any, path: Optional[Sequence[Union[str, int]]] = None) -> Any:
    return _c.Value(name=name.encode(), json=states.to_json(name, value),
                    path=None if path is None else states.to_json(name, list(path)))


class _Request:
    """The arguments of a save, and what they point to."""

    def __init__(self, path: Pathlike, state: Any, layouts: Optional[Layouts], rank: Optional[int],
                 nranks: int, overwrite: bool, compress: Union[str, int, bool, None], to_lowest_rank: bool,
                 pool: AnyPool, max_nbytes: Union[str, int], progress: Optional[Progress],
                 values: Sequence[Tuple[Any, ...]], storage: Optional[Storage], torch_places: bool) -> None:
        if rank is not None and (rank < 0 or 0 < nranks <= rank):
            raise InvalidError(f"rank {rank} of {nranks}")
        self.call, self.pool = local.Call(progress), Pool.of(pool)
        if isinstance(state, MappingBase):
            tensors, found = _sorted(state, layouts, rank, nranks)
        elif layouts is not None:
            raise InvalidError("layouts are for a state dict")
        else:
            tensors, found = list(state), []
        for name in [one.name for one in tensors] + [str(one[0]) for one in (*found, *values)]:
            states.check_name(name)
        locals_ = [one.struct(writable=False) for one in tensors]
        pairs = [_value(*one) for one in [*found, *values]]
        self.options = _c.SaveOptions(
            pool=self.pool.handle, nranks=nranks, max_nbytes=local.size(max_nbytes), overwrite=overwrite,
            to_lowest_rank=to_lowest_rank, compress=compress_level(compress), one_rank=rank is not None,
            rank=rank or 0, nvalues=len(pairs), values=_c.packed(_c.Value, pairs),
            storage=handle_for(os.fspath(path), storage), torch_places=torch_places, **self.call.options)
        self.storage = storage
        self.args: Tuple[Any, ...] = (_c.path_bytes(path), len(locals_), _c.packed(_c.Tensor, locals_),
                                      C.byref(self.options))


def save(path: Pathlike, state: Any, *, layouts: Optional[Layouts] = None, rank: Optional[int] = None,
         nranks: int = 0, overwrite: bool = False, compress: Union[str, int, bool, None] = None,
         to_lowest_rank: bool = False, pool: AnyPool = None, max_nbytes: Union[str, int] = 0,
         progress: Optional[Progress] = None, values: Sequence[Tuple[Any, ...]] = (),
         storage: Optional[Storage] = None, torch_places: bool = False) -> Report:
    """Saves a state dict, nested or with dotted names, or a list of `Local`, as torch saves it: a folder with
    .metadata and __R_0.distcp for each rank R.

    A tensor is whole, on rank 0, unless `layouts` has its name: then there is the list of all its arrays in
    that layout. What is no tensor has to be plain: None, booleans, numbers, text, lists of these.

    With `rank` and `nranks` every rank's process makes the same call, each with its own arrays (what has no
    layout is whole on every rank), and when all have returned, one of them calls `publish`.

    `values` are more of what is no tensor, as (name, value) or (name, value, path in a nested dict).
    `compress` is "zstd" or "zstd:LEVEL"; `overwrite` replaces a checkpoint that is there, which stays
    readable until the new one is complete; in a bucket, until it is about to be completed. `storage` is for
    s3://BUCKET/PREFIX. Default: the credentials of the environment. With `torch_places`, data files are torch's to the
    byte; else large tensors begin at multiples of 4 KiB, so that later conversions can share them."""
    request = _Request(path, state, layouts, rank, nranks, overwrite, compress, to_lowest_rank, pool,
                       max_nbytes, progress, values, storage, torch_places)
    return request.call(_c.lib.rsd_save, *request.args)


def publish(path: Pathlike, nranks: int, *, overwrite: bool = False) -> None:
    """Ends a save that every rank made its part of."""
    _c.lib.rsd_save_publish(_c.path_bytes(path), nranks, overwrite)


class Saving:
    """A save that goes on in the background. `wait` ends it, and has to be called."""

    def __init__(self, request: _Request) -> None:
        handle = Address()
        with request.call.kept:
            _c.lib.rsd_save_start(*request.args, C.byref(handle))
        self._request: Optional[_Request] = request
        self._handle = handle
        # The arrays are copied: they may change, and go.
        request.args = ()

    def wait(self) -> Report:
        """Waits for the files, publishes them, and says what was done."""
        if self._request is None:
            raise ValueError("this save has been waited for")
        request, self._request = self._request, None
        return request.call(_c.lib.rsd_save_wait, self._handle)

    def __del__(self) -> None:
        if getattr(self, "_request", None) is not None:
            try:
                self.wait()
            except Exception:  # nobody asked how it went
                pass


def save_start(path: Pathlike, state: Any, **options: Any) -> Saving:
    """The same as `save` in two halves: returns when everything is copied, and the arrays may change again.
    A relative path is looked up later."""
    every: Dict[str, Any] = dict(layouts=None, rank=None, nranks=0, overwrite=False, compress=None,
                                 to_lowest_rank=False, pool=None, max_nbytes=0, progress=None, values=(), storage=None,
                                 torch_places=False)
    strange = [name for name in options if name not in every]
    if strange:
        raise TypeError(f"save_start() got an unexpected keyword argument {strange[0]!r}")
    return Saving(_Request(path, state, **{**every, **options}))
