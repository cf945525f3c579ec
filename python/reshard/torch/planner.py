"""Planners for torch.distributed.checkpoint that use plans of the library:

    dcp.load(state, storage_reader=Reader(path), planner=reshard.torch.LoadPlanner())
    dcp.save(state, storage_writer=Writer(path), planner=reshard.torch.SavePlanner())

The load planner of torch compares every stored box of a tensor with every requested box. Here the time depends on the
number of boxes that overlap. Both planners support uneven strided shards.
"""
from __future__ import annotations

import dataclasses
import io
from typing import Any, List, Optional

import torch

from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items, _create_write_items

from ..errors import MismatchError, UnsupportedError
from .boxes import DTensor, is_strided, parts, read_items


class LoadPlanner(DefaultLoadPlanner):
    """As DefaultLoadPlanner of torch, for any number of stored boxes. It also works with readers of torch. A part of a
    tensor that no file has is an error, with any reader. The `args` and `keywords` are torch's:
    flatten_state_dict, flatten_sharded_tensors, and allow_partial_load, with which entries that the checkpoint lacks
    stay unchanged.

    `weights_only` is that of torch.load, for entries that are not tensors: True refuses objects whose pickle would run
    code. Torch's planners, and by default this one, unpickle all."""

    fills_all = True  # so a reader need not check it

    def __init__(self, *args: Any, weights_only: bool = False, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts an entry that is not a tensor into the state."""
        if not self.weights_only:
            super().load_bytes(read_item, value)
            return
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:  # an invalid file can raise almost any exception
            raise UnsupportedError(f"{name}: not loaded with weights_only=True: {error}") from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found

    def create_local_plan(self) -> LoadPlan:
        """Returns the reads of this rank."""
        assert self.metadata is not None, "set_up_planner comes first"
        self._flatten_as_saved()
        items: List[ReadItem] = []
        for name, obj in self.state_dict.items():
            about = self.metadata.state_dict_metadata.get(name)
            if about is None:
                if getattr(self, "allow_partial_load", False):
                    continue
                raise RuntimeError(f"Missing key in checkpoint state_dict: {name}.")
            if not isinstance(about, TensorStorageMetadata):
                items += _create_read_items(name, about, obj)
                continue
            if getattr(obj, "size", None) is not None and about.size != obj.size():
                raise MismatchError(f"Size mismatch between saved {about.size} and current: {obj.size()} for "
                                    f"{name}")
            try:
                wanted = parts(name, obj)
            except ValueError as error:
                raise MismatchError(f"{name} is a tensor in the checkpoint, but a {type(obj).__name__} in the state: "
                                    f"{error}") from None
            items += read_items(name, about, wanted)
        return LoadPlan(items)

    def _flatten_as_saved(self) -> None:
        """Torch before 2.4 saved dicts without tensors as one value. If a checkpoint has such a name and the state
        does not, its old names are used."""
        if not self.flatten_state_dict or not hasattr(_version, "_derived_version"):
            return
        assert self.metadata is not None
        absent = set(self.metadata.state_dict_metadata) - set(self.state_dict)
        if not absent:
            return
        _version._derived_version = "2_3"
        try:
            state, mappings = flatten_state_dict(self.original_state_dict)
        finally:
            _version._derived_version = None
        if absent & set(state):
            self.state_dict, self.mappings = state, mappings


class SavePlanner(DefaultSavePlanner):
    """As DefaultSavePlanner of torch. DTensors with uneven strided shards are saved as the rows that they hold, in
    several boxes if needed. The keywords are torch's: flatten_state_dict, flatten_sharded_tensors,
    dedup_replicated_tensors, dedup_save_to_lowest_rank, enable_plan_caching."""

    def create_local_plan(self) -> SavePlan:
        """Returns the items that this rank can write."""
        plan = super().create_local_plan()
        strided = {name: obj for name, obj in self.state_dict.items() if isinstance(obj, DTensor)
                   and obj.device_mesh.get_coordinate() is not None and is_strided(obj)}
        if not strided or not getattr(plan, "usable", True):
            return plan
        items: List[WriteItem] = []
        for item in plan.items:
            obj = strided.get(item.index.fqn)
            items += [item] if obj is None else self._items_of(item.index.fqn, obj)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    @staticmethod
    def _items_of(name: str, tensor: DTensor) -> List[WriteItem]:
        made = []
        for item in _create_write_items(name, tensor):
            assert item.tensor_data is not None
            for part in parts(name, tensor):
                chunk = ChunkStorageMetadata(torch.Size(part.lo), torch.Size(part.len))
                made.append(dataclasses.replace(
                    item, index=MetadataIndex(name, part.lo),
                    tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk)))
        return made

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the tensor to save for an index: for a strided shard, the box that begins there."""
        obj = self.state_dict.get(index.fqn)
        found = super().lookup_object(index)
        if not isinstance(obj, DTensor) or not is_strided(obj):
            return found
        part: Optional[Any] = next((one for one in parts(index.fqn, obj) if one.index == index), None)
        if part is None:
            raise MismatchError(f"{index.fqn}: no box of this rank begins at {list(index.offset or ())}")
        return found[tuple(slice(at, at + extent) for at, extent in zip(part.at, part.len))]
