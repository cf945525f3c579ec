"""The metadata of checkpoints as classes of torch, without executing code of a file.

A .metadata file is a pickle. Torch unpickles it, so its author can execute any code. Here only the classes that torch
writes are constructed. Everything else becomes an empty object that does nothing.
"""
from __future__ import annotations

import collections
import importlib
import os
import pathlib
import pickle
from typing import Any, Dict, List, Tuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata,
                                                   MetadataIndex, StorageMeta, TensorProperties,
                                                   TensorStorageMetadata)

from .. import dtypes
from ..checkpoint import Checkpoint
from ..errors import FormatError

# The modules of these classes in all versions of torch, and where they are now.
_HERE = "torch.distributed.checkpoint."
_MODULES = {
    "torch.distributed.checkpoint.metadata": _HERE + "metadata",
    "torch.distributed._shard.checkpoint.metadata": _HERE + "metadata",
    "torch.distributed.checkpoint.filesystem": _HERE + "filesystem",
    "torch.distributed._shard.checkpoint.filesystem": _HERE + "filesystem",
    "torch.distributed._shard.sharded_tensor.metadata": "torch.distributed._shard.sharded_tensor.metadata",
}
_NAMES = {"Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
          "BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING",
          "MEM_FORMAT_ENCODING"}
_PLAIN = {"set": set, "frozenset": frozenset, "complex": complex, "dict": dict, "list": list, "tuple": tuple}


class _Inert:
    """Stands for an object that is not needed. It accepts all operations of a pickle, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "_Inert":
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, *_: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    def __reduce__(self) -> Tuple[Any, ...]:
        return _Inert, ()


def _path(*parts: Any) -> Any:
    return pathlib.Path(*[str(one) for one in parts])


def _member(kind: Any, name: str) -> Any:
    """Returns a member of torch's enum of memory formats, which some versions of Python pickle by name."""
    named = getattr(kind, "__members__", {})
    return named[name] if name in named else _Inert()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name in _NAMES:
            found = getattr(importlib.import_module(_MODULES[module]), name, None)
            return _Inert if found is None else found
        if module == "torch":
            found = getattr(torch, name, None)
            return found if isinstance(found, torch.dtype) or found is torch.Size else _Inert
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module.split(".")[0] == "pathlib":
            return _path
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "builtins":
            return _PLAIN.get(name, _Inert)
        return collections.OrderedDict if (module, name) == ("collections", "OrderedDict") else _Inert

    def persistent_load(self, _: Any) -> Any:
        return _Inert()


def read(path: "os.PathLike[str]") -> Metadata:
    """Returns the metadata in a file. FormatError if the file is not metadata, or lacks what a reader needs."""
    with open(path, "rb") as file:
        try:
            found = _Unpickler(file).load()
        except (OSError, MemoryError):
            raise
        except Exception as error:  # an invalid pickle can raise almost any exception
            raise FormatError(f"{os.fspath(path)}: not a pickle of metadata: {error}") from None
    if not isinstance(found, Metadata):
        raise FormatError(f"{os.fspath(path)}: not the metadata of a checkpoint")
    _check(found, os.fspath(path))
    return found


def _check(found: Metadata, path: str) -> None:
    tensors, places = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        missing = "storage_data" if isinstance(tensors, dict) else "state_dict_metadata"
        raise FormatError(f"{path}: metadata lacks {missing}")
    for name, about in tensors.items():
        if not isinstance(name, str) or not isinstance(about, (TensorStorageMetadata, BytesStorageMetadata)):
            raise FormatError(f"{path}: {name} is neither a tensor nor bytes")
    for index, place in places.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, _StorageInfo):
            raise FormatError(f"{path}: entry of storage_data is invalid")
    if not hasattr(found, "planner_data"):
        found.planner_data = None
    if getattr(found, "storage_meta", None) is None:
        found.storage_meta = StorageMeta()


def of_checkpoint(checkpoint: Checkpoint) -> Metadata:
    """Returns the metadata of a checkpoint in any format, as if torch had saved it."""
    tensors: Dict[str, Any] = {}
    places: Dict[MetadataIndex, Any] = {}
    paths: Dict[str, Tuple[Any, ...]] = {}
    for name in checkpoint:
        one = checkpoint[name]
        chunks: List[ChunkStorageMetadata] = []
        for number, box in enumerate(one.boxes):
            offsets = torch.Size(box.lo)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.len)))
            places[MetadataIndex(name, offsets, number)] = _StorageInfo(box.file or "", box.offset, box.nbytes)
        properties = TensorProperties(dtype=dtypes.torch_dtype(dtypes.dtype(one.dtype)))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(one.shape), chunks)
        paths[name] = one.path or (name,)
    for name in checkpoint.plain_values:
        tensors[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo("", 0, 0)
        paths[name] = checkpoint.plain_values.path(name) or (name,)
    nested = any(len(path) > 1 for path in paths.values())
    made = Metadata(state_dict_metadata=tensors, planner_data=paths if nested else None, storage_data=places)
    made.storage_meta = StorageMeta()
    return made
