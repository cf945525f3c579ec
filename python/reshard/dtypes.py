"""Dtypes, with their names in the notation, NumPy, torch and the buffer protocol."""
from __future__ import annotations

import ctypes as C
import sys
from typing import Any, Dict, NamedTuple, Optional

from . import _c
from .errors import InvalidError, UnsupportedError


class Dtype(NamedTuple):
    """A dtype: `name` in the notation, `number` in the library, bytes of an element, its name in torch, its name in
    NumPy (None: NumPy does not have it), and its format in the struct module (of its bits, if there is none)."""

    name: str
    number: int
    nbytes: int
    torch: str
    numpy: Optional[str]
    format: str


_TABLE = [
    ("f64", "float64", "float64", "d"), ("f32", "float32", "float32", "f"),
    ("f16", "float16", "float16", "e"), ("bf16", "bfloat16", None, "H"),
    ("f8e4m3", "float8_e4m3fn", None, "B"),
    ("f8e5m2", "float8_e5m2", None, "B"), ("i64", "int64", "int64", "q"), ("i32", "int32", "int32", "i"),
    ("i16", "int16", "int16", "h"), ("i8", "int8", "int8", "b"), ("u64", "uint64", "uint64", "Q"),
    ("u32", "uint32", "uint32", "I"), ("u16", "uint16", "uint16", "H"), ("u8", "uint8", "uint8", "B"),
    ("bool", "bool", "bool", "?"), ("c64", "complex64", "complex64", "Zf"),
    ("c128", "complex128", "complex128", "Zd"), ("f8e4m3fnuz", "float8_e4m3fnuz", None, "B"),
    ("f8e5m2fnuz", "float8_e5m2fnuz", None, "B"), ("f8e8m0", "float8_e8m0fnu", None, "B"),
    ("f4x2", "float4_e2m1fn_x2", None, "B"), ("c32", "complex32", None, "I")]


def _made(name: str, torch: str, numpy: Optional[str], letter: str) -> Dtype:
    number = C.c_int()
    _c.lib.rsd_dtype_parse(name.encode(), C.byref(number))
    return Dtype(name, number.value, _c.lib.rsd_dtype_nbytes(number.value), torch, numpy, letter)


DTYPES: Dict[str, Dtype] = {row[0]: _made(*row) for row in _TABLE}
_BY_NUMBER = {one.number: one for one in DTYPES.values()}
_BY_WORD = {word: one for one in DTYPES.values() for word in (one.name, one.torch)}


def by_number(number: int) -> Dtype:
    """Returns the dtype with a number of the library."""
    return _BY_NUMBER[number]


def dtype(what: Any) -> Dtype:
    """Returns a dtype from "f32" or "float32", a torch.dtype, or anything that NumPy accepts as a dtype."""
    if isinstance(what, Dtype):
        return what
    try:
        return _FOUND[what]
    except (KeyError, TypeError):  # not in the cache, or not hashable
        pass
    found = _find(what)
    if not isinstance(what, (str, int)):
        _FOUND[what] = found
    return found


_FOUND: Dict[Any, Dtype] = {}


def _find(what: Any) -> Dtype:
    """Returns the dtype of a number, a name, or a dtype of torch or NumPy."""
    if isinstance(what, int) and what in _BY_NUMBER:
        return _BY_NUMBER[what]
    word = what if isinstance(what, str) else str(what)
    word = word[len("torch."):] if word.startswith("torch.") else word
    if word in _BY_WORD:
        return _BY_WORD[word]
    numpy = sys.modules.get("numpy")
    if numpy is not None and not isinstance(what, str):  # "i8" has another meaning in NumPy
        try:
            made = numpy.dtype(what)
        except TypeError:
            pass
        else:
            if made.isnative and made.name in _BY_WORD:
                return _BY_WORD[made.name]
            raise UnsupportedError(f"dtype {made.name} of NumPy is not supported"
                                   + ("" if made.isnative else " in the other byte order"))
    _c.lib.rsd_dtype_parse(word.encode(), C.byref(C.c_int()))  # which raises an error with the nearest name
    raise InvalidError(f"unknown dtype {word!r}")


def numpy_dtype(one: Dtype, raw: bool = False) -> Any:
    """Returns the dtype of NumPy, or of ml_dtypes if NumPy does not have it. With `raw`, returns the unsigned
    integer of the same width instead."""
    import numpy
    if one.numpy is not None:
        return numpy.dtype(one.numpy)
    if raw:
        return numpy.dtype(f"uint{8 * one.nbytes}")
    try:
        import ml_dtypes
        return numpy.dtype(getattr(ml_dtypes, one.torch))
    except (ImportError, AttributeError):
        raise UnsupportedError(f'NumPy has no dtype {one.name}: pass another dtype (dtype="f32"), like="torch", '
                               f'or like="raw" for the bits as integers') from None


def torch_dtype(one: Dtype) -> Any:
    """Returns the dtype of torch."""
    import torch
    made = getattr(torch, one.torch, None)
    if made is None:
        raise UnsupportedError(f"this version of torch has no dtype {one.torch}")
    return made
