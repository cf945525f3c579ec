"""Copies of state dicts in host memory, for saves in the background. That of torch cannot copy a DTensor on the CPU
whose local tensor is a view."""
from __future__ import annotations

import copy
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from ..errors import UnsupportedError
from .boxes import DTensor

try:
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
except ImportError:  # an older torch
    LocalShardsWrapper = None  # type: ignore[assignment,misc]


class Stage:
    """Memory for copies of state dicts. With `keep`, the next copy reuses it for tensors of the same shape and
    dtype. The caller must wait until the last save is complete."""

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._kept: Dict[Tuple[Any, ...], torch.Tensor] = {}

    def copied(self, state: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns a copy of a state dict, with the same structure. A tensor that occurs twice is copied once."""
        return self._copied((), state, {})  # type: ignore[no-any-return]

    def _copied(self, path: Tuple[Any, ...], what: Any, seen: Dict[int, Any]) -> Any:
        if isinstance(what, Mapping):
            return {key: self._copied(path + (key,), one, seen) for key, one in what.items()}
        if type(what) in (list, tuple):
            return type(what)(self._copied(path + (i,), one, seen) for i, one in enumerate(what))
        if isinstance(what, (int, float, str, bytes, type(None), torch.dtype)):
            return what
        if id(what) not in seen:
            seen[id(what)] = self._copied_leaf(path, what)
        return seen[id(what)]

    def _copied_leaf(self, path: Tuple[Any, ...], what: Any) -> Any:
        """Returns a copy of a leaf of the state dict in memory of the CPU."""
        if isinstance(what, DTensor):
            return self._copied_dtensor(path, what)
        if isinstance(what, ShardedTensor):
            shards = [Shard(self._copied_tensor(path + (i,), one.tensor), one.metadata)
                      for i, one in enumerate(what.local_shards())]
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                shards, sharded_tensor_metadata=what.metadata(), process_group=what._process_group,
                init_rrefs=what._init_rrefs)
        if type(what) in (torch.Tensor, torch.nn.Parameter):
            return self._copied_tensor(path, what)
        try:
            return copy.deepcopy(what)
        except Exception as error:
            name = ".".join(map(str, path))
            raise UnsupportedError(f"{name}: a {type(what).__name__} cannot be copied for a save in the "
                                   f"background: {error}") from error

    def _copied_dtensor(self, path: Tuple[Any, ...], tensor: DTensor) -> DTensor:
        own: Any = tensor._local_tensor
        if LocalShardsWrapper is not None and isinstance(own, LocalShardsWrapper):
            shards: List[torch.Tensor] = [self._copied_tensor(path + (i,), one)
                                          for i, one in enumerate(own.local_shards())]
            own = LocalShardsWrapper(shards, own.local_offsets())
        else:
            own = self._copied_tensor(path, own)
        # The device of the mesh is not checked, since the copy is only saved.
        return DTensor(own, tensor._spec, requires_grad=False)

    def _copied_tensor(self, path: Tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor on the CPU, in the memory of an earlier copy if that is kept."""
        tensor = tensor.detach()
        kept: Optional[torch.Tensor] = self._kept.get(path)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept.copy_(tensor)
        if tensor.device.type == "cpu":
            made = tensor.clone()
        elif self._keep and tensor.is_cuda:  # pinning takes longer than one copy, but not than many
            made = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        else:
            made = tensor.to("cpu")
        if self._keep:
            self._kept[path] = made
        return made
