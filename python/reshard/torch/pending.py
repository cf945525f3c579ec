"""Tensors that are waited for at their first use, as the results of torch's asynchronous collectives."""
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist

from .bound import Pending

try:
    from torch._C._distributed_c10d import _register_work
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
except ImportError:  # an older torch
    _register_work = None  # type: ignore[assignment]

_Work: Any = getattr(dist, "Work", None) or getattr(dist, "_Work", object)


class _RunWork(_Work):  # type: ignore[misc]
    """A run in progress, as torch waits for it."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending

    def wait(self, timeout: Any = None) -> bool:
        self.pending.wait()
        return True


def later(tensor: torch.Tensor, pending: Optional[Pending]) -> torch.Tensor:
    """Returns a tensor that is waited for at its first use. A torch that has no such tensors waits now."""
    if pending is None:
        return tensor
    if _register_work is None or not tensor.numel():
        pending.wait()
        return tensor
    _register_work(tensor, _RunWork(pending))
    return AsyncCollectiveTensor(tensor)
