"""A reader of quantized safetensors for torch.distributed.checkpoint, which loads the weights that they stand for:

    dcp.load(state, storage_reader=reshard.torch.QuantizedHuggingFaceStorageReader(path))

Two forms are known, those of torch's reader:

    NAME.weight [m, n]       with NAME.weight_scale_inv, one scale for each block of 128 x 128 (DeepSeek)
    NAME_blocks [..., G, B]  with NAME_scales [..., G], two numbers of 4 bits a byte and an exponent per group (MXFP4)
"""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..carry import AnyPool
from ..errors import InvalidError, MismatchError, UnsupportedError
from ..storage import Storage
from .boxes import check_filled
from .hf_storage import HuggingFaceStorageReader
from .reader import resolved
from .threads import pool_of

_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_PAIRS = ((".weight_scale_inv", ".weight"), ("_scales", "_blocks"))


def _scales(names: Sequence[str]) -> Dict[str, str]:
    """Returns the names of scales, by the names of quantized tensors."""
    present = set(names)
    pairs = ((name[:-len(scale)] + weight, name) for name in names for scale, weight in _PAIRS
             if name.endswith(scale))
    return {weight: scale for weight, scale in pairs if weight in present}


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads quantized safetensors for dcp.load, with the keywords of torch's QuantizedHuggingFaceStorageReader.

    path            directory of safetensors
    thread_count    number of threads
    target_dtype    dtype that weights are computed in. They are then converted to that of the state
    block_size      rows and columns of the blocks of NAME.weight that have a common scale
    pool            a reshard.Pool, or a number of threads, instead of thread_count
    storage         credentials and limits of a URL. Default: those of the environment

    In contrast to torch, no index is needed, weights and scales may be sharded, and scales that do not fit the weight
    are an error. MXFP4 tensors may have any number of dims before their groups."""

    def __init__(self, path: Any, thread_count: int = 1, target_dtype: torch.dtype = torch.float32,
                 block_size: int = 128, *, pool: AnyPool = None, storage: Optional[Storage] = None) -> None:
        super().__init__(path, thread_count, pool=pool, storage=storage)
        if block_size < 1:
            raise InvalidError(f"block_size={block_size} must be 1 or more")
        self.target_dtype, self.block_size = target_dtype, block_size
        self._scale_of: Dict[str, str] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata, with the dtype and shape of the weights that quantized tensors stand for."""
        found = super().read_metadata(*args, **kwargs)
        self._scale_of = _scales(list(found.state_dict_metadata))
        places: Any = found.storage_data
        indexes: Dict[str, List[MetadataIndex]] = {}
        for index in places:
            indexes.setdefault(index.fqn, []).append(index)
        for name in self._scale_of:
            about: Any = found.state_dict_metadata[name]
            about.properties.dtype = self.target_dtype
            if not name.endswith("_blocks"):
                continue
            if len(about.size) < 2:
                raise UnsupportedError(f"{name} has {len(about.size)} dims; MXFP4 needs groups and bytes, [..., G, B]")
            *outer, groups, nbytes = about.size
            about.size = torch.Size([*outer, groups * nbytes * 2])
            start = torch.Size([0] * len(about.size))
            about.chunks = [ChunkStorageMetadata(start, about.size)]
            place = [places.pop(index) for index in indexes[name]][0]
            places[MetadataIndex(name, start, 0)] = place
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Reads everything that a plan requests."""
        plain: List[ReadItem] = []
        assert self._metadata is not None, "set_up_storage_reader comes first"
        check_filled(self._metadata, planner)
        for item in plan.items:
            if item.storage_index.fqn in self._scale_of:
                self._read_quantized(item, planner)
            else:
                plain.append(item)
        return super().read_data(LoadPlan(plain), planner)

    def _read_quantized(self, item: ReadItem, planner: LoadPlanner) -> None:
        """Reads a box of a quantized tensor, dequantized."""
        name = item.storage_index.fqn
        start = item.storage_index.offset or (0,) * len(item.lengths)
        box = [(a + b, n) for a, b, n in zip(start, item.storage_offsets, item.lengths)]
        value = self._mxfp4(name, box) if name.endswith("_blocks") else self._scaled(name, box)
        target = resolved(planner, item)
        target.copy_(value)
        planner.commit_tensor(item, target)

    def _part(self, name: str, box: Sequence[Tuple[int, int]]) -> torch.Tensor:
        """Returns a part of a tensor in the files."""
        index = tuple(slice(at, at + n) for at, n in box)
        found: torch.Tensor = self._checkpoint()[name].read(index, like="torch", pool=pool_of(self._pool))
        return found

    def _scaled(self, name: str, box: Sequence[Tuple[int, int]]) -> torch.Tensor:
        """Returns a part of a weight with one scale per block."""
        shape, scales, size = self._checkpoint()[name].shape, self._checkpoint()[self._scale_of[name]].shape, \
            self.block_size
        if len(shape) != 2:
            raise UnsupportedError(f"{name} has {len(shape)} dims; only matrices have scales per block")
        if scales != tuple(-(-extent // size) for extent in shape):
            raise MismatchError(f"{self._scale_of[name]} has the shape {list(scales)}, which does not fit {name} of "
                                f"{list(shape)} in blocks of block_size={size}")
        weight = self._part(name, box).to(torch.float32)
        if not weight.numel():
            return weight.to(self.target_dtype)
        (row, rows), (column, columns) = box
        first = [at // size for at, _ in box]
        blocks = [(low, -(-(at + n) // size) - low) for low, (at, n) in zip(first, box)]
        scale = self._part(self._scale_of[name], blocks).to(torch.float32)
        in_columns = torch.arange(column, column + columns) // size - first[1]
        for number in range(blocks[0][1]):
            low = max((first[0] + number) * size - row, 0)
            high = min((first[0] + number + 1) * size - row, rows)
            weight[low:high] *= scale[number][in_columns]
        return weight.to(self.target_dtype)

    def _mxfp4(self, name: str, box: Sequence[Tuple[int, int]]) -> torch.Tensor:
        """Returns a part of a tensor of 4-bit numbers. The last dim of the box counts numbers."""
        shape, scales = self._checkpoint()[name].shape, self._checkpoint()[self._scale_of[name]].shape
        if scales != shape[:-1]:
            raise MismatchError(f"{self._scale_of[name]} has the shape {list(scales)}, which does not fit {name} of "
                                f"{list(shape)}")
        *outer, (at, n) = box
        per_group = 2 * shape[-1]
        if not n or not per_group:
            return torch.empty([extent for _, extent in box], dtype=self.target_dtype)
        first = at // per_group
        groups = (first, -(-(at + n) // per_group) - first)
        packed = self._part(name, [*outer, groups, (0, shape[-1])])
        exponents = self._part(self._scale_of[name], [*outer, groups]).to(torch.int32) - 127
        numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int32)
        values = torch.tensor(_FP4, dtype=self.target_dtype)[numbers]
        values = torch.ldexp(values, exponents.unsqueeze(-1)).to(self.target_dtype).flatten(-2)
        return values[..., at - first * per_group:at - first * per_group + n]
