"""Runs plans: in one process on a pool of threads, or between processes over a transport.

    dst = reshard(src_layout, dst_layout, src)             plan, bind and run, once

    exec = bind(plan, src=src, dst=dst)                    bound once, for arrays with these strides
    exec.run(src, dst)                                     run many times
    exec.start(src, dst); ...; exec.wait()                 the same in two calls

    exec = bind(plan, transport=transport)                 each process has the arrays of its own rank
"""
from __future__ import annotations

import ctypes as C
import math
import operator
import os
import threading
from typing import Any, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from . import _c, dtypes, frameworks, memory
from ._c import Address
from .errors import InvalidError, MismatchError
from .layout import Array, Layout
from .memory import Memory
from .plan import Plan
from .transport import AnyTransport


class Pool(_c.Handle):
    """A pool of `nthreads` threads, by default one per CPU that the process may use. Arguments named `pool` also accept
    a number of threads, and None for a pool of the process with the default number."""

    _free = "rsd_pool_free"

    def __init__(self, nthreads: Optional[int] = None) -> None:
        handle = Address()
        self.nthreads = len(os.sched_getaffinity(0)) if nthreads is None else operator.index(nthreads)
        _c.lib.rsd_pool_new(self.nthreads, C.byref(handle))
        self._handle = handle.value

    @staticmethod
    def of(pool: Union["Pool", int, None]) -> "Pool":
        """Returns the pool for an argument `pool`."""
        global _shared
        if pool is not None:
            return pool if isinstance(pool, Pool) else Pool(pool)
        with _lock:
            if _shared is None:
                _shared = Pool()
            return _shared


_lock = threading.Lock()
_shared: Optional[Pool] = None


def _forked() -> None:
    """Makes a new lock and pool in a forked child, where the threads do not exist and the lock may be locked."""
    global _lock, _shared
    _lock, _shared = threading.Lock(), None


os.register_at_fork(after_in_child=_forked)

AnyPool = Union[Pool, int, None]


class Arena(_c.Handle):
    """Memory of `nbytes` that the ranks of one host share. A receiver copies directly from an array in an arena. It is
    freed after its arrays and execs. It must not be used by two threads at the same time."""

    _free = "rsd_arena_free"

    def __init__(self, nbytes: int) -> None:
        handle = Address()
        _c.lib.rsd_arena_new(operator.index(nbytes), C.byref(handle))
        self._handle, self.nbytes = handle.value, nbytes

    def alloc(self, nbytes: int) -> memoryview:
        """Returns `nbytes` of the arena, aligned to 64 bytes."""
        found = Address()
        _c.lib.rsd_arena_alloc(self.handle, nbytes, C.byref(found))
        block = (C.c_char * nbytes).from_address(found.value or 0)
        block.arena = self  # type: ignore[attr-defined]
        return memoryview(block).cast("B")

    def empty(self, shape: Sequence[int], dtype: Any, *, like: str = "numpy") -> Any:
        """Returns a new array in the arena with a `shape` and a `dtype`, of the kind `like`: "numpy", "torch", "raw" or
        "memoryview". Its values are unspecified."""
        one = dtypes.dtype(dtype)
        return frameworks.over(self.alloc(one.nbytes * math.prod(shape)), shape, one, like)

    def clear(self) -> None:
        """Frees all arrays of the arena, which must not be used any more."""
        _c.lib.rsd_arena_clear(self.handle)


def in_order(arrays: Any, wanted: Sequence[Array], side: str) -> List[Any]:
    """Returns arrays in the order of the layout. The argument is a list, a dict from ranks to arrays, or a single
    array. An array may be None if it is empty."""
    if isinstance(arrays, Mapping):
        given: List[Any] = []
        ranks = sorted({one.rank for one in wanted})
        for rank in ranks:
            if rank not in arrays:
                raise MismatchError(f"{side}: arrays of rank {rank} are missing")
            own = arrays[rank]
            given.extend(own if isinstance(own, (list, tuple)) else [own])
        strange = sorted(set(arrays) - set(ranks))
        if strange:
            raise MismatchError(f"{side}: rank {strange[0]} is not in the layout")
    else:
        given = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    if len(given) != len(wanted):
        raise MismatchError(f"{side}: got {len(given)} arrays, but the layout has {len(wanted)}")
    return given


def see_all(arrays: Sequence[Any], wanted: Sequence[Array], dtype: Any, side: str, writable: bool,
            cast: bool = False) -> List[Optional[Memory]]:
    """Returns the memory of arrays, and checks their shapes and dtypes. With `cast` they may have another dtype,
    which is the same for all."""
    seen: List[Optional[Memory]] = []
    for one, about in zip(arrays, wanted):
        name = f"{side}, array {about.number} of rank {about.rank}"
        if one is None:
            if about.nbytes:
                raise MismatchError(f"{name} is None; expected {dtypes.dtype(dtype).name}{list(about.shape)}")
            seen.append(None)
        else:
            seen.append(memory.see(one, name, writable).fits(dtypes.dtype(dtype), about.shape, name, cast))
    return seen


def flat_strides(seen: Iterable[Optional[Memory]], wanted: Iterable[Array]) -> Tuple[Tuple[int, ...], bool]:
    """Returns the strides of all arrays in one list, and whether all arrays are dense."""
    strides: List[int] = []
    dense = True
    for one, about in zip(seen, wanted):
        if one is None or not one.nbytes:
            strides += memory.dense_strides(about.shape)
        elif one.dense:
            strides += memory.dense_strides(one.shape)
        else:
            strides += one.strides
            dense = False
    return tuple(strides), dense


class _Side:
    """One side of a plan: the arrays of a run, and their strides."""

    def __init__(self, layout: Layout, rank: Optional[int], side: str) -> None:
        self.side, self.dtype = side, dtypes.dtype(layout.dtype)
        self.wanted = layout.arrays(rank)
        self.strides, self.dense = flat_strides([None] * len(self.wanted), self.wanted)

    def lies_like(self, arrays: Any, writable: bool) -> None:
        seen = see_all(in_order(arrays, self.wanted, self.side), self.wanted, self.dtype, self.side, writable)
        self.strides, self.dense = flat_strides(seen, self.wanted)

    def seen(self, arrays: Any, writable: bool) -> List[Optional[Memory]]:
        seen = see_all(in_order(arrays, self.wanted, self.side), self.wanted, self.dtype, self.side, writable)
        if flat_strides(seen, self.wanted)[0] != self.strides:
            raise MismatchError(f"{self.side}: strides differ from those of the bound arrays, which are "
                                f"{'dense' if self.dense else 'strided'}")
        return seen


def _devices(*seen: Sequence[Optional[Memory]]) -> Iterator[Optional[int]]:
    """Iterates over the CUDA devices of arrays; None: memory of the host."""
    return (one.device for list_ in seen for one in list_ if one is not None)


class Exec(_c.Handle):
    """Plans that are bound to threads or to a transport. `bind` makes one, and describes its arguments: plans, src,
    dst, pool, transport, arena, and the other `options` of a transport. It must not be used by two threads at the
    same time."""

    _free = "rsd_exec_free"

    def __init__(self, plans: Sequence[Plan], src: Any, dst: Any, pool: AnyPool,
                 transport: Optional[AnyTransport], options: Any, arena: Optional[Arena]) -> None:
        self._arena = arena
        self.plans, self._transport = list(plans), transport
        self._flight: Any = None
        rank = None if transport is None else transport.rank
        self._src = [_Side(plan.src, rank, self._label("src", i)) for i, plan in enumerate(plans)]
        self._dst = [_Side(plan.dst, rank, self._label("dst", i)) for i, plan in enumerate(plans)]
        for sides, arrays, writable in ((self._src, src, False), (self._dst, dst, True)):
            if arrays is not None:
                for side, own in zip(sides, self._per_plan(arrays)):
                    side.lies_like(own, writable)
        binds = _c.packed(_c.BindOptions, [
            _c.BindOptions(src_strides=None if s.dense else _c.ints(s.strides),
                           dst_strides=None if d.dense else _c.ints(d.strides))
            for s, d in zip(self._src, self._dst)])
        handles, handle = _c.pointers([plan.handle for plan in plans]), Address()
        if transport is None:
            self.pool: Optional[Pool] = Pool.of(pool)
            _c.lib.rsd_bind_threads_many(len(plans), handles, binds, self.pool.handle, C.byref(handle))
        else:
            self.pool = None
            with transport.kept:
                _c.lib.rsd_bind_transport(len(plans), handles, binds, C.byref(transport.table),
                                          C.byref(options), C.byref(handle))
        self._handle = handle.value

    def _label(self, side: str, i: int) -> str:
        return side if len(self.plans) == 1 else f"{side} of plan {i}"

    def _per_plan(self, arrays: Any) -> List[Any]:
        if len(self.plans) == 1:
            return [arrays]
        if len(arrays) != len(self.plans):
            raise MismatchError(f"got arrays of {len(arrays)} plans, but {len(self.plans)} are bound")
        return list(arrays)

    def _order(self, devices: Iterable[Optional[int]]) -> None:
        """Orders the next run in the current stream, if an array is on a CUDA device."""
        stream = memory.ordered(devices)
        if stream is not None:
            _c.lib.rsd_exec_set_stream(self.handle, stream or None)

    def _addresses(self, sides: Sequence[_Side], arrays: Any, writable: bool) -> Tuple[Any, List[Any]]:
        seen = [one for side, own in zip(sides, self._per_plan(arrays)) for one in side.seen(own, writable)]
        return _c.pointers([None if one is None or not one.nbytes else one.address for one in seen]), seen

    def run(self, src: Any, dst: Any) -> None:
        """Runs the plans. `src` and `dst` are the arrays of the layouts; between processes, those of this rank.
        With several plans they are lists with one entry per plan.

        With arrays on a CUDA device, the run follows the work in the current stream of torch. In one process it
        returns when it is queued there; with arrays on several devices, and between processes, when it is complete."""
        src, kept_src = self._addresses(self._src, src, False)
        dst, kept_dst = self._addresses(self._dst, dst, True)
        devices = {one for one in _devices(kept_src, kept_dst) if one is not None}
        self._order(devices)
        if len(devices) > 1:  # the streams of the others would not follow that of the run
            self._call(_c.lib.rsd_exec_start, self.handle, src, dst)
            self._call(_c.lib.rsd_exec_wait, self.handle)
            return
        self._call(_c.lib.rsd_exec_run, self.handle, src, dst)
        if devices and self._transport is None:
            memory.record([*kept_src, *kept_dst])

    def run_tensors(self, src: Sequence[Any], dst: Sequence[Any]) -> None:
        """As `run` between processes. `src` and `dst` are dense torch tensors of the right shapes and dtypes, in the
        order of the layouts. None of that is checked, since the check takes longer than a small run."""
        self._order(memory.cuda_device(one) for one in (*src, *dst))
        self._call(_c.lib.rsd_exec_run, self.handle, *(_c.pointers([one.data_ptr() or None for one in side])
                                                       for side in (src, dst)))

    def start(self, src: Any, dst: Any) -> None:
        """Starts a run of the arrays `src` and `dst`, as in `run`. They are in use until `wait` returns."""
        src, kept_src = self._addresses(self._src, src, False)
        dst, kept_dst = self._addresses(self._dst, dst, True)
        self._order(_devices(kept_src, kept_dst))
        self._call(_c.lib.rsd_exec_start, self.handle, src, dst)
        self._flight = (kept_src, kept_dst)

    def progress(self) -> None:
        """Progresses a run between processes as far as possible without waiting."""
        self._call(_c.lib.rsd_exec_progress, self.handle)

    def wait(self) -> None:
        """Waits until the run is complete."""
        try:
            self._call(_c.lib.rsd_exec_wait, self.handle)
        finally:
            self._flight = None

    def _call(self, function: Any, *args: Any) -> None:
        if self._transport is None:
            function(*args)
        else:
            with self._transport.kept:
                function(*args)

    def describe(self) -> str:
        """Describes how data moves between processes: which ranks share memory, or why they do not."""
        return _c.lib.rsd_exec_describe(self.handle).decode()

    def close(self) -> None:
        """Frees the exec, after a run in progress is complete."""
        self._close()


def bind(plans: Union[Plan, Sequence[Plan]], *, src: Any = None, dst: Any = None,
         pool: AnyPool = None, transport: Optional[AnyTransport] = None, max_nbytes: int = 0,
         timeout: float = 0.0, arena: Optional[Arena] = None, node: int = 0,
         names: Optional[Sequence[str]] = None) -> Exec:
    """Binds `plans`, one Plan or several, to threads, or to a `transport` between processes.

    src and dst are arrays with the same strides as those of the runs. Without them, arrays are dense. `pool` is a Pool
    or a number of threads; by default one thread per CPU of the process. With a transport the call is collective, and
    has these options:

    max_nbytes  of buffers for messages; 0: 256 MB
    timeout     seconds without progress after which a call fails; 0: 300
    arena       of this rank, for its arrays
    node        ranks with equal numbers share memory; 0: detected, -1: shares none
    names       of the tensors, one per plan, for errors"""
    plans = [plans] if isinstance(plans, Plan) else list(plans)
    for plan in plans:
        if not isinstance(plan, Plan):
            raise TypeError(f"bind takes a Plan or several, not {type(plan).__name__}: {plan!r}")
    transport = AnyTransport.checked(transport)
    if transport is None and (max_nbytes or timeout or arena or node or names):
        raise InvalidError("max_nbytes, timeout, arena, node and names need a transport")
    if names is not None and len(names) != len(plans):
        raise InvalidError(f"got {len(names)} names for {len(plans)} plans")
    if transport is not None and pool is not None:
        raise InvalidError("pool and transport exclude each other: pass one of them")
    options = _c.ExchangeOptions(max_nbytes=max_nbytes, timeout=timeout, node=node,
                                 arena=None if arena is None else arena.handle)
    if names is not None:
        options.names = (_c.Text * max(1, len(names)))(*[_c.text_bytes(name, "name of a tensor") for name in names])
    return Exec(plans, src, dst, pool, transport, options, arena)


def run(plan: Plan, src: Any, dst: Any = None, *, pool: AnyPool = None,
        like: Optional[str] = None) -> Any:
    """Runs a plan once in this process. Returns `dst`, or new arrays if it is None."""
    if dst is None:
        if like is None:
            like = frameworks.like_of(src)
        device = frameworks.device_of(src)
        dst = [frameworks.empty(one.shape, plan.dst.dtype, like, device) for one in plan.dst.arrays()]
    exec_ = bind(plan, src=src, dst=dst, pool=pool)
    exec_.run(src, dst)
    return dst


def reshard(src_layout: Union[str, Layout], dst_layout: Union[str, Layout], src: Any, dst: Any = None, *,
            cast: bool = False, pool: AnyPool = None, like: Optional[str] = None) -> Any:
    """Moves a tensor from `src_layout` to `dst_layout`. The arrays of all ranks are in this process. With `cast`, the
    layouts may have different dtypes: elements are converted on the way.

    `src` lists them in the order of `src_layout.arrays()` (by ascending rank), or is a dict from ranks to arrays.
    `dst` has the same form; it is written and returned. Without `dst`, new arrays are returned, of the same kind as
    the first of `src`, or of the kind `like`: "auto", "numpy", "torch", "raw" or "memoryview". `pool` is a Pool or a
    number of threads."""
    return run(Plan(src_layout, dst_layout, cast=cast), src, dst, pool=pool, like=like)
