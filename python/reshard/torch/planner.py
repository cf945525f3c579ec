"""A load planner for torch.distributed.checkpoint that plans as the library does:

    dcp.load(state, storage_reader=Reader(path), planner=reshard.torch.LoadPlanner())

torch's own compares every stored box of a tensor with every wanted one; here the time grows with the boxes
that meet. A part of a tensor that no file has is an error, with torch's reader too.
"""
from __future__ import annotations

from typing import List

from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from ..errors import MismatchError
from .boxes import read_items, wanted_boxes


class LoadPlanner(DefaultLoadPlanner):
    """As torch's DefaultLoadPlanner, with its keywords, for any number of stored boxes. Works with torch's
    readers too."""

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
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
                wanted = wanted_boxes(name, obj)
            except ValueError as error:
                raise MismatchError(f"{name}: a tensor in the checkpoint, and here a {type(obj).__name__}: "
                                    f"{error}") from None
            items += read_items(name, about, wanted)
        return LoadPlan(items)

    def _flatten_as_saved(self) -> None:
        """torch before 2.4 kept dicts without tensors as one value: a checkpoint that has such a name, where
        the state has none, is read with the names of then."""
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
