"""New arrays for results, in the framework that is asked for. None of them is imported before that.

    "numpy"         NumPy arrays; dtypes that NumPy does not have need ml_dtypes, or are refused
    "torch"         torch tensors on the CPU
    "raw"           NumPy arrays, dtypes that NumPy does not have as unsigned integers of the same bits
    "memoryview"    memoryviews of bytearrays, without any package; complex numbers and the like as bits
"""
from __future__ import annotations

import itertools
import math
import sys
from typing import Any, Mapping, Sequence, Tuple

from . import dtypes
from .errors import InvalidError

LIKES = ("numpy", "torch", "raw", "memoryview")


def check(like: str) -> str:
    """The name of a framework; InvalidError if it is none."""
    if like not in LIKES:
        raise InvalidError(f"no arrays are like {like!r}: there are {' '.join(LIKES)}")
    return like


def like_of(arrays: Any) -> str:
    """The framework of the first of some arrays."""
    if isinstance(arrays, Mapping):
        arrays = list(arrays.values())
    while isinstance(arrays, (list, tuple)):
        arrays = next((one for one in arrays if one is not None), None)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(arrays, torch.Tensor):
        return "torch"
    if numpy is not None and isinstance(arrays, numpy.ndarray):
        return "numpy"
    return "memoryview" if isinstance(arrays, (memoryview, bytes, bytearray)) else "numpy"


def empty(shape: Sequence[int], dtype: Any, like: str) -> Any:
    """A new dense array whose values are not set."""
    one = dtypes.dtype(dtype)
    if check(like) == "torch":
        import torch
        return torch.empty(tuple(shape), dtype=dtypes.torch_dtype(one))
    if like == "memoryview":
        return _cast(memoryview(bytearray(one.nbytes * math.prod(shape))), shape, one)
    import numpy
    return numpy.empty(tuple(shape), dtypes.numpy_dtype(one, raw=like == "raw"))


def over(flat: memoryview, shape: Sequence[int], dtype: Any, like: str) -> Any:
    """An array over memory that is there, as many bytes as it needs."""
    one = dtypes.dtype(dtype)
    if check(like) == "memoryview":
        return _cast(flat, shape, one)
    if not flat.nbytes:
        return empty(shape, dtype, like)
    if like == "torch":
        import torch
        return torch.frombuffer(flat, dtype=dtypes.torch_dtype(one)).reshape(tuple(shape))
    import numpy
    return numpy.frombuffer(flat, dtypes.numpy_dtype(one, raw=like == "raw")).reshape(tuple(shape))


def _cast(flat: memoryview, shape: Sequence[int], one: dtypes.Dtype) -> memoryview:
    letter: Any = one.format
    extents = list(shape)
    if len(letter) > 1:  # memoryviews have no complex numbers: a pair of halves is one more dim
        letter, extents = letter[1:], extents + [2]
    if 0 in extents or len(extents) == 1:  # with a 0 in it a shape cannot be cast to
        return flat.cast(letter)
    return flat.cast(letter, extents)


def finished(array: Any, whole: Sequence[int], index: Tuple[slice, ...], shape: Sequence[int], dtype: Any,
             like: str) -> Any:
    """array[index] as a dense array of a shape, for slices with steps of either sign. `whole` is the shape of
    the array."""
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
    """The bytes of array[index], row by row: memoryviews have steps in one dim only."""
    letter: Any = one.format[-1]
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
