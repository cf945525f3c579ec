"""New arrays for results, of the requested framework. A framework is imported when it is needed.

    "auto"          "numpy" if NumPy or ml_dtypes has the dtype, else "torch" if torch is installed and has it, else
                    "raw"; "memoryview" without NumPy
    "numpy"         NumPy arrays; dtypes that NumPy does not have need ml_dtypes, or are refused
    "torch"         torch tensors, on the CPU unless a device is stated
    "raw"           NumPy arrays, dtypes that NumPy does not have as unsigned integers of the same bits
    "memoryview"    memoryviews, without any package; complex numbers and others as bits
"""
from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import mmap
import sys
from typing import Any, Mapping, Sequence, Tuple

from . import dtypes
from .errors import InvalidError, LimitError, OutOfMemoryError

LIKES = ("auto", "numpy", "torch", "raw", "memoryview")
LARGE_NBYTES = 1 << 20  # of memory that is requested from the system


def check(like: str) -> str:
    """Returns the name of a framework. InvalidError if it is unknown."""
    if like not in LIKES:
        raise InvalidError(f"unknown kind of array {like!r}; kinds are {' '.join(LIKES)}")
    return like


def usable(like: str, dtype: Any) -> str:
    """Returns the kind of arrays for a dtype: `like`, or what "auto" stands for."""
    if check(like) != "auto":
        return like
    one = dtypes.dtype(dtype)
    if not _is_installed("numpy"):
        return "memoryview"
    if one.numpy is not None or _is_installed("ml_dtypes") and hasattr(importlib.import_module("ml_dtypes"), one.torch):
        return "numpy"
    return "torch" if _is_installed("torch") and hasattr(importlib.import_module("torch"), one.torch) else "raw"


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def _first(arrays: Any) -> Any:
    if isinstance(arrays, Mapping):
        arrays = list(arrays.values())
    while isinstance(arrays, (list, tuple)):
        arrays = next((one for one in arrays if one is not None), None)
    return arrays


def device_of(arrays: Any) -> Any:
    """Returns the CUDA device of the first array if it is a torch tensor on one, else None."""
    first, torch = _first(arrays), sys.modules.get("torch")
    on_device = torch is not None and isinstance(first, torch.Tensor) and first.device.type == "cuda"
    return first.device if on_device else None


def like_of(arrays: Any) -> str:
    """Returns the framework of the first array."""
    arrays = _first(arrays)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(arrays, torch.Tensor):
        return "torch"
    if numpy is not None and isinstance(arrays, numpy.ndarray):
        return "numpy"
    return "memoryview" if isinstance(arrays, (memoryview, bytes, bytearray)) else "numpy"


def empty(shape: Sequence[int], dtype: Any, like: str, device: Any = None, *, name: str = "an array") -> Any:
    """Returns a new dense array with unspecified values. `device` is for torch. The array takes no memory before it is
    filled, so what a file claims costs nothing before it is proven. OutOfMemoryError, with the `name` of the tensor, if
    the system does not have so much. LimitError: the framework has no such shape."""
    one = dtypes.dtype(dtype)
    like = usable(like, one)
    try:
        if like == "torch":
            import torch
            return torch.empty(tuple(shape), dtype=dtypes.torch_dtype(one), device=device)
        if like == "memoryview":
            return _cast(_bytes(one.nbytes * math.prod(shape)), shape, one)
        import numpy
        return numpy.empty(tuple(shape), dtypes.numpy_dtype(one, raw=like == "raw"))
    except (MemoryError, OverflowError, ValueError, OSError, RuntimeError) as error:
        nbytes = one.nbytes * math.prod(shape)
        if nbytes == 0:
            raise LimitError(f"{name}: {like} has no arrays of {one.name}{list(shape)}: {error}") from error
        if nbytes < LARGE_NBYTES or device is not None:
            raise
        raise OutOfMemoryError(f"{name}: cannot allocate {nbytes} bytes for {one.name}{list(shape)}") from error


def _bytes(nbytes: int) -> memoryview:
    """Returns new memory. Python would fill a large bytearray with zeros, which the system does when pages are used.
    Like a bytearray, it is not shared with processes that fork."""
    if nbytes < LARGE_NBYTES:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def over(flat: memoryview, shape: Sequence[int], dtype: Any, like: str) -> Any:
    """Returns an array over existing memory of the right size."""
    one = dtypes.dtype(dtype)
    like = usable(like, one)
    if like == "memoryview":
        return _cast(flat, shape, one)
    if not flat.nbytes:
        return empty(shape, dtype, like)
    if like == "torch":
        import torch
        return torch.frombuffer(flat, dtype=dtypes.torch_dtype(one)).reshape(tuple(shape))
    import numpy
    return numpy.frombuffer(flat, dtypes.numpy_dtype(one, raw=like == "raw")).reshape(tuple(shape))


def _format(one: dtypes.Dtype) -> Any:
    """Returns the format of an element. Memoryviews have no f16 before Python 3.12, so it is its bits there."""
    return "H" if one.format == "e" and sys.version_info < (3, 12) else one.format


def _cast(flat: memoryview, shape: Sequence[int], one: dtypes.Dtype) -> memoryview:
    letter = _format(one)
    extents = list(shape)
    if len(letter) > 1:  # memoryviews have no complex numbers, so they have one more dim of two halves
        letter, extents = letter[1:], extents + [2]
    if 0 in extents or len(extents) == 1:  # memoryview.cast refuses shapes that contain 0
        return flat.cast(letter)
    return flat.cast(letter, extents)


def finished(array: Any, whole: Sequence[int], index: Tuple[slice, ...], shape: Sequence[int], dtype: Any,
             like: str) -> Any:
    """Returns array[index] as a dense array, for slices with positive or negative steps. `whole` is the shape of the
    array."""
    like = usable(like, dtype)
    stepped = any(one.step not in (None, 1) for one in index)
    if like == "memoryview":
        flat = _picked(array.cast("B"), whole, index, dtypes.dtype(dtype)) if stepped else array.cast("B")
        return _cast(flat, shape, dtypes.dtype(dtype))
    if like == "torch":
        if stepped:  # torch has no negative steps
            flips = [dim for dim, one in enumerate(index) if one.step is not None and one.step < 0]
            array = array.flip(flips) if flips else array
            array = array[tuple(slice(None, None, abs(one.step or 1)) for one in index)].contiguous()
        return array.reshape(tuple(shape))
    if stepped:
        array = array[index].copy()
    return array.reshape(tuple(shape))


def _picked(flat: memoryview, whole: Sequence[int], index: Tuple[slice, ...], one: dtypes.Dtype) -> memoryview:
    """Returns the bytes of array[index], row by row, since memoryviews support steps in one dim only."""
    letter = _format(one)[-1]
    parts = len(one.format)  # of an element: complex numbers are pairs
    taken = [range(extent)[cut] for extent, cut in zip(whole, index)]
    out = memoryview(bytearray(one.nbytes * math.prod(map(len, taken))))
    src, dst, row, at = flat.cast(letter), out.cast(letter), len(taken[-1]) * parts, 0
    for place in itertools.product(*taken[:-1]):
        first = 0
        for extent, number in zip(whole, place):
            first = first * extent + number
        line = src[first * whole[-1] * parts:(first + 1) * whole[-1] * parts]
        for part in range(parts):
            begin, step = taken[-1].start * parts + part, taken[-1].step * parts
            end = begin + len(taken[-1]) * step
            dst[at + part:at + row:parts] = line[begin:end if end >= 0 else None:step]
        at += row
    return out
