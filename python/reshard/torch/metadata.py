"""The metadata of checkpoints as torch's classes.

A .metadata file is a pickle, and torch loads it as one: whoever wrote it can run what he likes, or change the
classes of torch for the whole process. Here the library reads it as data, and the objects are made from that.
"""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata,
                                                   MetadataIndex, StorageMeta, TensorProperties,
                                                   TensorStorageMetadata)

from .. import dtypes, states
from ..checkpoint import Checkpoint, Stored


def _place(stored: Stored) -> _StorageInfo:
    """Where an item is. Versions of torch without extensions do not have the last field."""
    if not stored.transforms:
        return _StorageInfo(stored.file or "", stored.offset, stored.nbytes)
    return _StorageInfo(stored.file or "", stored.offset, stored.nbytes, list(stored.transforms))


def of_checkpoint(checkpoint: Checkpoint) -> Metadata:
    """The metadata of a checkpoint in any format, as if torch had saved it."""
    checkpoint.check_claims()  # planners of torch allocate what the metadata says
    dcp = checkpoint.format == "dcp"
    tensors: Dict[str, Any] = {}
    places: Dict[MetadataIndex, Any] = {}
    paths: Dict[str, Tuple[Any, ...]] = {}

    def add_path(name: str, path: Optional[Tuple[Any, ...]]) -> None:
        if path is not None or not dcp:
            paths[name] = path or (name,)

    for name in checkpoint:
        one = checkpoint[name]
        chunks: List[ChunkStorageMetadata] = []
        for number, box in enumerate(one.boxes):
            offsets = torch.Size(box.lo)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.len)))
            places[MetadataIndex(name, offsets, number)] = _place(box)
        properties = TensorProperties(dtype=dtypes.torch_dtype(dtypes.dtype(one.dtype)))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(one.shape), chunks)
        add_path(name, one.path)
    for name in checkpoint.plain_values:
        tensors[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _place(checkpoint.plain_values.stored(name))
        add_path(name, checkpoint.plain_values.path(name))
    states.check_places(paths, checkpoint.path)
    nested = dcp or any(len(path) > 1 for path in paths.values())
    made = Metadata(state_dict_metadata=tensors, planner_data=paths if nested and paths else None,
                    storage_data=places)
    made.storage_meta = StorageMeta(checkpoint_id=checkpoint.path, save_id=checkpoint.save_id)
    return made
