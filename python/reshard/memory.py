"""The memory of NumPy arrays, torch tensors, and objects with DLPack or the buffer protocol, without copies.

    view = memory.see(array, writable=True)
    view.address, view.dtype, view.shape, view.strides          strides in elements

A view keeps its object alive. Memory is that of the host, or of a CUDA device. Raw bytes (bytes, bytearray, mmap: one
dim of "B") stand for a dense array of any dtype and shape with the same number of bytes. Unsigned integers stand for a
dtype of the same width that NumPy does not have.
"""
from __future__ import annotations

import ctypes as C
import math
import sys
from typing import Any, Iterable, List, Optional, Sequence, Tuple

from . import dtypes
from .dtypes import Dtype
from .errors import InvalidError, MismatchError, UnsupportedError


class Memory:
    """The memory of an object. `raw` is true for plain bytes, which have no dtype. `device` is the number of the CUDA
    device, or None for memory of the host."""

    __slots__ = ("address", "dtype", "shape", "strides", "writable", "raw", "nbytes", "kept", "device")

    def __init__(self, address: Optional[int], dtype: Dtype, shape: Sequence[int],
                 strides: Optional[Sequence[int]], writable: bool, kept: Any, raw: bool = False,
                 device: Optional[int] = None) -> None:
        self.address, self.device = address or None, device
        self.dtype, self.shape, self.writable, self.kept, self.raw = dtype, tuple(shape), writable, kept, raw
        self.strides = dense_strides(self.shape) if strides is None else tuple(strides)
        self.nbytes = dtype.nbytes * math.prod(self.shape)

    @property
    def dense(self) -> bool:
        """Whether the elements are contiguous in row-major order."""
        return self.nbytes == 0 or all(
            extent == 1 or mine == right
            for extent, mine, right in zip(self.shape, self.strides, dense_strides(self.shape)))

    def fits(self, dtype: Dtype, shape: Sequence[int], what: str, cast: bool = False) -> "Memory":
        """Returns the same memory as an array of a dtype and shape. MismatchError if they differ. With `cast`,
        another dtype is accepted."""
        shape = tuple(shape)
        if self.raw:
            nbytes = dtype.nbytes * math.prod(shape)
            if self.nbytes != nbytes:
                raise MismatchError(f"{what} has {self.nbytes} bytes; {dtype.name}{list(shape)} has {nbytes}")
            return Memory(self.address, dtype, shape, None, self.writable, self.kept)
        if self.shape != shape:
            raise MismatchError(f"{what} has shape {list(self.shape)}; expected {list(shape)}")
        if self.dtype is dtype or cast:
            return self
        if dtype.numpy is None and self.dtype.name == f"u{8 * dtype.nbytes}":
            return Memory(self.address, dtype, shape, self.strides, self.writable, self.kept, device=self.device)
        raise MismatchError(f"{what} has dtype {self.dtype.name}; expected {dtype.name}")


def dense_strides(shape: Sequence[int]) -> Tuple[int, ...]:
    """Returns the strides of a dense row-major array, in elements."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def see(what: Any, name: str, writable: bool = False) -> Memory:
    """Returns the memory of an object. Errors call the object `name`. InvalidError: it is read-only but must be
    writable, or has strides that the library does not support. UnsupportedError: it is in memory of another device
    than a CPU or a CUDA device."""
    torch = sys.modules.get("torch")
    if isinstance(what, Memory):
        view = what
    elif torch is not None and isinstance(what, torch.Tensor):
        view = _see_torch(what, name, torch)
    elif hasattr(what, "__array_interface__"):
        view = _see_numpy(what, name)
    elif hasattr(what, "__dlpack__"):
        view = _see_dlpack(what, name)
    else:
        view = _see_buffer(what, name)
    if writable and not view.writable:
        raise InvalidError(f"{name}: the {type(what).__name__} is read-only")
    if view.nbytes and any(stride < 0 for stride, extent in zip(view.strides, view.shape) if extent > 1):
        raise InvalidError(f"{name} has negative strides {list(view.strides)}; pass a copy")
    return view


def _see_torch(tensor: Any, name: str, torch: Any) -> Memory:
    """Returns the memory of a torch tensor."""
    if hasattr(tensor, "_local_tensor") or hasattr(tensor, "local_shards"):
        raise InvalidError(f"{name} is a {type(tensor).__name__}; pass its local tensor")
    if not is_direct(tensor):
        raise UnsupportedError(f"{name} is on {tensor.device}; only memory of the CPU and of CUDA devices is "
                               "supported, such as tensor.cpu()")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"{name} has the layout {tensor.layout}; only strided tensors are supported")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(f"{name} is lazily conjugated or negated; pass resolve_conj() or resolve_neg() "
                               "of it")
    found = dtypes.dtype(tensor.dtype)
    return Memory(tensor.data_ptr(), found, tensor.shape, tensor.stride(), True, tensor,
                  device=cuda_device(tensor))


# ---- CUDA devices ----


def is_direct(tensor: Any) -> bool:
    """Returns whether the library uses the memory of a torch tensor: that of the CPU, or of a CUDA device."""
    kind = tensor.device.type
    return kind == "cpu" or (kind == "cuda" and sys.modules["torch"].version.cuda is not None)


def cuda_device(tensor: Any) -> Optional[int]:
    """Returns the number of the CUDA device of a torch tensor, or None."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def stream_of(device: int) -> int:
    """Returns the current stream of a CUDA device: that of torch, if torch uses CUDA, else the default stream."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def ordered(devices: Iterable[Optional[int]]) -> Optional[int]:
    """Returns the stream for a call on arrays of these devices, or None if all are in memory of the host. A call takes
    one stream, so with several devices this waits for their current streams."""
    found = sorted({one for one in devices if one is not None})
    if not found:
        return None
    torch = sys.modules.get("torch")
    for one in found if len(found) > 1 else ():
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.current_stream(one).synchronize()
    return stream_of(found[0])


def record(seen: Iterable[Optional[Memory]]) -> None:
    """Tells the allocator of torch that queued work of the current streams uses this memory."""
    for one in seen:
        if one is not None and one.device is not None and hasattr(one.kept, "record_stream"):
            torch = sys.modules["torch"]
            one.kept.record_stream(torch.cuda.current_stream(one.device))


def _see_numpy(array: Any, name: str) -> Memory:
    """Returns the memory of a NumPy array."""
    about = array.__array_interface__
    address, readonly = about["data"]
    try:
        found = dtypes.dtype(array.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None
    shape = about["shape"]
    strides = None
    if about.get("strides") is not None:
        strides = _in_elements(about["strides"], shape, found.nbytes, name)
    return Memory(address, found, shape, strides, not readonly, array)


def _in_elements(strides: Sequence[int], shape: Sequence[int], nbytes: int, name: str) -> List[int]:
    made = []
    for stride, extent in zip(strides, shape):
        if stride % nbytes and extent > 1:
            raise UnsupportedError(f"{name} has strides of {list(strides)} bytes, which are not multiples of its "
                                   f"{nbytes} bytes per element; pass a copy")
        made.append(stride // nbytes if extent > 1 else 1)
    return made


# ---- DLPack ----


class _DLTensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("device_type", C.c_int32), ("device_id", C.c_int32),
                ("ndim", C.c_int32), ("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16),
                ("shape", C.POINTER(C.c_int64)), ("strides", C.POINTER(C.c_int64)),
                ("byte_offset", C.c_uint64)]


class _DLVersioned(C.Structure):
    _fields_ = [("major", C.c_uint32), ("minor", C.c_uint32), ("manager", C.c_void_p),
                ("deleter", C.c_void_p), ("flags", C.c_uint64), ("tensor", _DLTensor)]


_DL_CODES = {0: "i", 1: "u", 2: "f", 4: "bf", 5: "c", 6: "bool", 10: "f8e4m3", 11: "f8e4m3fnuz",
             12: "f8e5m2", 13: "f8e5m2fnuz", 14: "f8e8m0"}
_DL_HOST, _DL_CUDA, _DL_READ_ONLY = (1, 3), (2, 13), 1  # the CPU and pinned memory; a GPU and managed memory
_capsule_pointer = C.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = C.c_void_p, [C.py_object, C.c_char_p]
_capsule_is = C.pythonapi.PyCapsule_IsValid
_capsule_is.restype, _capsule_is.argtypes = C.c_int, [C.py_object, C.c_char_p]


def _see_dlpack(what: Any, name: str) -> Memory:
    """Returns the memory of an object that has __dlpack__."""
    kind, device = map(int, what.__dlpack_device__())
    if kind not in (*_DL_HOST, *_DL_CUDA):
        raise UnsupportedError(f"{name} is on the DLPack device {(kind, device)}; only memory of the CPU and of CUDA "
                               "devices is supported")
    # The object is ready in this stream then. 1 is the default stream.
    options = {"stream": stream_of(device) or 1} if kind in _DL_CUDA else {}
    try:
        capsule = what.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # an older version without this argument
        capsule = what.__dlpack__(**options)
    # The capsule keeps its ownership, and frees the memory when it is deleted.
    writable = True
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _DLVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        writable, about = not versioned.flags & _DL_READ_ONLY, versioned.tensor
    else:
        about = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    word = _DL_CODES.get(about.code, "?")
    word += str(about.bits) if word in ("i", "u", "f", "bf", "c") else ""
    if word not in dtypes.DTYPES or about.lanes != 1:
        raise UnsupportedError(f"{name}: DLPack type code {about.code} with {about.bits} bits and {about.lanes} lanes "
                               "is not supported")
    strides = about.strides[:about.ndim] if about.strides else None
    return Memory((about.data or 0) + about.byte_offset, dtypes.DTYPES[word], about.shape[:about.ndim],
                  strides, writable, (what, capsule), device=device if kind in _DL_CUDA else None)


# ---- the buffer protocol ----


class _PyBuffer(C.Structure):
    _fields_ = [("buf", C.c_void_p), ("obj", C.py_object), ("len", C.c_ssize_t), ("itemsize", C.c_ssize_t),
                ("readonly", C.c_int), ("ndim", C.c_int), ("format", C.c_char_p),
                ("shape", C.POINTER(C.c_ssize_t)), ("strides", C.POINTER(C.c_ssize_t)),
                ("suboffsets", C.POINTER(C.c_ssize_t)), ("internal", C.c_void_p)]

    def __del__(self) -> None:
        if self.buf is not None or self.itemsize:
            _release_buffer(C.byref(self))


_FULL_READ_ONLY = 0x11C  # PyBUF_FULL_RO
_get_buffer = C.pythonapi.PyObject_GetBuffer
_get_buffer.restype, _get_buffer.argtypes = C.c_int, [C.py_object, C.POINTER(_PyBuffer), C.c_int]
_release_buffer = C.pythonapi.PyBuffer_Release
_release_buffer.restype, _release_buffer.argtypes = None, [C.POINTER(_PyBuffer)]
_LETTERS = {"d": "f64", "f": "f32", "e": "f16", "b": "i8", "B": "u8", "h": "i16", "H": "u16", "i": "i32",
            "I": "u32", "q": "i64", "Q": "u64", "?": "bool", "Zf": "c64", "Zd": "c128", "c": "u8",
            "l": f"i{8 * C.sizeof(C.c_long)}", "L": f"u{8 * C.sizeof(C.c_long)}"}


def _see_buffer(what: Any, name: str) -> Memory:
    """Returns the memory of an object with the buffer protocol."""
    buffer = _PyBuffer()
    try:
        _get_buffer(what, C.byref(buffer), _FULL_READ_ONLY)
    except (TypeError, BufferError) as error:
        raise TypeError(f"{name}: a {type(what).__name__} is not an array: "
                        f"{error}") from None
    letters = (buffer.format or b"B").decode()
    if letters[0] in "@=" or (letters[0] == "<" and sys.byteorder == "little"):
        letters = letters[1:]
    if letters not in _LETTERS or buffer.suboffsets:
        raise UnsupportedError(f"{name}: buffer format {letters!r} is not supported")
    found = dtypes.DTYPES[_LETTERS[letters]]
    shape = buffer.shape[:buffer.ndim]
    strides = None
    if buffer.strides:
        strides = _in_elements(buffer.strides[:buffer.ndim], shape, found.nbytes, name)
    view = Memory(buffer.buf, found, shape, strides, not buffer.readonly, (what, buffer))
    view.raw = letters in "Bc" and len(shape) == 1 and view.dense
    return view
