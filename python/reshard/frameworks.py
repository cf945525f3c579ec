"""New arrays for results, in the framework that is asked for. None of them is imported before that.

    "numpy"         NumPy arrays; dtypes that NumPy does not have need ml_dtypes, or are refused
    "torch"         torch tensors on the CPU
    "raw"           NumPy arrays, dtypes that NumPy does not have as unsigned integers of the same bits
    "memoryview"    memoryviews of bytearrays, without any package; complex numbers and the like as bits
"""
from __future__ import annotations

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
        return _view(shape, one)
    import numpy
    return numpy.empty(tuple(shape), dtypes.numpy_dtype(one, raw=like == "raw"))


def _view(shape: Sequence[int], one: dtypes.Dtype) -> memoryview:
    nbytes = one.nbytes
    for extent in shape:
        nbytes *= extent
    letter, extents = one.format, list(shape)
    if len(letter) > 1:  # memoryviews have no complex numbers: a pair of halves is one more dim
        letter, extents = letter[1:], extents + [2]
    flat = memoryview(bytearray(nbytes))
    if 0 in extents:  # cannot be cast to a shape with a 0 in it
        return flat.cast(letter)
    return flat.cast(letter) if extents == [nbytes // flat.cast(letter).itemsize] else flat.cast(letter, extents)


def selected(array: Any, index: Tuple[Any, ...], like: str) -> Any:
    """array[index] of an array that `empty` made, for slices with steps of either sign and new axes."""
    if like == "memoryview":
        raise InvalidError('a memoryview cannot be sliced with steps in several dims: ask for like="numpy"')
    if like == "torch":
        flips = [dim for dim, one in enumerate(index) if isinstance(one, slice) and (one.step or 1) < 0]
        forward = tuple(slice(None, None, -one.step) if isinstance(one, slice) and (one.step or 1) < 0 else one
                        for one in index)
        return array.flip(flips)[forward] if flips else array[forward]
    return array[index]
