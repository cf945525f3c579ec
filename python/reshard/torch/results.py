"""Memory of results on the host.

The kernel clears every page of new memory, which takes longer than a move into it. So memory of large results is kept
when they are deleted, up to MAX_KEPT bytes, and used for later results.
"""
from __future__ import annotations

import ctypes as C
import weakref
from typing import Dict, Optional, Sequence

import torch

MIN_NBYTES = 4 << 20  # of a result whose memory is kept: the C library keeps smaller ones itself
MAX_KEPT = 512 << 20

_HUGE = 1 << 21
_MADV_HUGEPAGE = 14
_madvise = getattr(C.CDLL(None), "madvise", None)
_kept: Dict[int, torch.Tensor] = {}  # by address, the latest last; without a lock, since any thread deletes results


def new_memory(nbytes: int) -> torch.Tensor:
    """Returns new memory of the host, with huge pages if possible, since allocating small pages takes longer than
    filling them."""
    made = torch.empty(nbytes, dtype=torch.uint8)
    first = -(-made.data_ptr() // _HUGE) * _HUGE
    length = (made.data_ptr() + nbytes - first) // _HUGE * _HUGE
    if length > 0 and _madvise is not None:
        _madvise(C.c_void_p(first), C.c_size_t(length), _MADV_HUGEPAGE)  # advice: it may be ignored
    return made


def _keep(block: torch.Tensor) -> None:
    """Keeps memory that no result uses any longer, and frees the oldest if that is too much."""
    _kept[block.data_ptr()] = block
    for address in list(_kept):
        if sum(one.numel() for one in list(_kept.values())) <= MAX_KEPT:
            return
        _kept.pop(address, None)


def _take(nbytes: int) -> torch.Tensor:
    """Returns memory of `nbytes` or up to a quarter more: the latest that is kept, or new memory."""
    for address, one in reversed(list(_kept.items())):
        if nbytes <= one.numel() <= nbytes + nbytes // 4 and _kept.pop(address, None) is not None:
            return one
    return new_memory(nbytes)


def free_kept() -> None:
    """Frees the memory that is kept."""
    _kept.clear()


def empty(shape: Sequence[int], dtype: torch.dtype, device: Optional[torch.device] = None) -> torch.Tensor:
    """Returns a tensor for a result, whose values are undefined."""
    shape = torch.Size(shape)
    made = torch.empty(0, dtype=dtype)
    nbytes = shape.numel() * made.element_size()
    if nbytes < MIN_NBYTES or (device is not None and device.type != "cpu"):
        return torch.empty(shape, dtype=dtype, device=device)
    block = _take(nbytes)
    memory = (C.c_char * nbytes).from_address(block.data_ptr())
    weakref.finalize(memory, _keep, block).atexit = False  # torch has a reference to `memory`
    flat = torch.frombuffer(memory, dtype=dtype)
    return made.set_(flat.untyped_storage(), 0, shape)  # type: ignore[call-overload,no-any-return]
