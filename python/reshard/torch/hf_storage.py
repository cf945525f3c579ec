"""Checkpoints of safetensors for torch.distributed.checkpoint, as its Hugging Face reader and writer have them:

    dcp.save(state, storage_writer=reshard.torch.HuggingFaceStorageWriter(path, save_distributed=True))
    dcp.load(state, storage_reader=reshard.torch.HuggingFaceStorageReader(path))

Names of files, headers and keywords are those of torch: each side reads what the other wrote. Files are
model-00001-of-00003.safetensors with an index, or shard-00002-model-00001-of-00003.safetensors for rank 1 of a
distributed save, whose header has the offsets of the shards.
"""
from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import memory, states
from ..carry import AnyPool
from ..checkpoint import Checkpoint
from ..converting import convert
from ..errors import ExistsError, FormatError, InvalidError, MissingError, MissingFileError, UnsupportedError
from ..storage import Storage, is_url
from .places import check_file_system, open_here, open_regular
from .reader import Reader
from .threads import pool_of
from .writer import Data, Writer, bytes_struct, item_struct, write_items

INDEX = "model.safetensors.index.json"
PART = ".part"  # of the name of a file until the checkpoint is complete
# Names of dtypes in safetensors. A file has the tensors of the last ones first, as the safetensors library writes it.
_DTYPES = {"bool": "BOOL", "float4_e2m1fn_x2": "F4", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2",
           "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
           "float8_e5m2fnuz": "F8_E5M2FNUZ", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
           "int32": "I32", "uint32": "U32", "float32": "F32", "complex64": "C64", "float64": "F64", "int64": "I64",
           "uint64": "U64"}
_ORDER = {word: number for number, word in enumerate(_DTYPES.values())}
_WHOLE = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors$")
_SHARD = re.compile(r"shard-(\d{5,})-model-\d{5,}-of-\d{5,}(?:-\d+)?\.safetensors$")


def _file_name(index: int, count: int, shard: Optional[int] = None, copy: int = 1) -> str:
    """Returns the name of file `index` of `count`. A file has a name once, so further boxes of a tensor are in
    files with another number `copy`."""
    name = f"model-{index:05d}-of-{count:05d}"
    name = name if shard is None else f"shard-{shard:05d}-{name}"
    return name + (f"-{copy}" if copy > 1 else "") + ".safetensors"


class _Array(NamedTuple):
    """A tensor in a safetensors file: its data, its dtype there, and where it begins in the whole tensor."""

    data: Data
    dtype: str
    offsets: List[int]


def _header(arrays: Sequence[_Array]) -> bytes:
    """Returns the header of a file, as torch writes it."""
    names = [one.data.item.index.fqn for one in arrays]
    offsets = {name: {"saved_offsets": one.offsets} for name, one in zip(names, arrays)}
    header: Dict[str, Any] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0",
                                               "format": "pt"}}
    at = 0
    for name, one in zip(names, arrays):
        assert one.data.tensor is not None
        shape = list(one.data.tensor.shape)
        if one.dtype == "F4" and shape:
            shape[-1] *= 2  # two elements a byte; in the file, extents count elements
        header[name] = {"dtype": one.dtype, "shape": shape, "data_offsets": [at, at + one.data.tensor.nbytes]}
        at += one.data.tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _listing(path: str) -> List[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _files_of_index(path: str) -> List[str]:
    """Returns the files of an existing checkpoint that a save of whole tensors replaces."""
    try:
        with open_regular(os.path.join(path, INDEX), path) as file:
            names = set(json.load(file)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, FormatError):
        return []
    return [name for name in names if isinstance(name, str) and _WHOLE.match(name)]


class HuggingFaceStorageWriter(Writer):
    """Writes safetensors for dcp.save and dcp.async_save, with the keywords of torch's HuggingFaceStorageWriter.

    path                        directory to write to
    fqn_to_index_mapping        from names of tensors to the number of their file, from 1. Default: one file
    thread_count                number of threads that write
    save_distributed            every rank writes its own shards. Default: rank 0 has all tensors and writes them
    enable_consolidation        after a distributed save in path/sharded, whole tensors are written to path
    thread_count_consolidation  number of threads that write whole tensors
    pool                        a reshard.Pool, or a number of threads, instead of thread_count
    overwrite                   False: an existing checkpoint of the same kind is an error. Default: it is replaced

    In contrast to torch, several boxes of one tensor on a rank are all written, and a value that is not a tensor is an
    error. Names of files end in .part until all ranks have written. Then older files of the same kind are removed."""

    def __init__(self, path: Any, fqn_to_index_mapping: Optional[Mapping[str, int]] = None, thread_count: int = 1,
                 save_distributed: bool = False, enable_consolidation: bool = False,
                 thread_count_consolidation: int = 1, *, pool: AnyPool = None, overwrite: bool = True) -> None:
        super().__init__(path, thread_count=thread_count, overwrite=overwrite,
                         pool=thread_count if pool is None else pool)
        self.fqn_to_index_mapping = None if fqn_to_index_mapping is None else dict(fqn_to_index_mapping)
        wrong = [name for name, index in (self.fqn_to_index_mapping or {}).items() if index < 1]
        if wrong:
            raise InvalidError(f"fqn_to_index_mapping: files are numbered from 1, but {wrong[0]} is in file "
                               f"{fqn_to_index_mapping[wrong[0]] if fqn_to_index_mapping else 0}")
        self.save_distributed, self.enable_consolidation = save_distributed, enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        self.consolidated_output_path: Optional[str] = None
        self._consolidate_below()

    def _consolidate_below(self) -> None:
        """Sets the directory of the shards, if whole tensors are written too."""
        if self.enable_consolidation:
            self.consolidated_output_path = os.fspath(self.path)
            self.path = self.fs.concat_path(self.path, "sharded")

    def reset(self, checkpoint_id: Any = None) -> None:
        """Starts another save, in another directory if `checkpoint_id` names one."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._consolidate_below()

    @property
    def metadata_path(self) -> str:
        """The name of the index."""
        return INDEX

    # -- planning --

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the directory. ExistsError if a reader would take other files in it for a part of this save."""
        check_file_system(self)
        if is_url(self.consolidated_output_path or self.path):
            raise UnsupportedError(f"{self.path}: Hugging Face storage is written to directories only; for a bucket, "
                                   "use Writer and then reshard.merge")
        self.fs.mkdir(self.path)
        self._check_directory(os.fspath(self.path), _SHARD if self.save_distributed else _WHOLE)
        if self.consolidated_output_path is not None and self.save_distributed:
            self._check_directory(self.consolidated_output_path, _WHOLE)
        return plan

    def _check_directory(self, path: str, own: "re.Pattern[str]") -> None:
        names = _listing(path)
        others = sorted(name for name in names if name.endswith(".safetensors") and not own.match(name))
        if own is _SHARD and INDEX in names:
            others.append(INDEX)
        if others:
            raise ExistsError(f"{path} has {others[0]} of another checkpoint, which readers would mix with this one; "
                              "choose another directory")
        if not self.overwrite and any(map(own.match, names)):
            raise ExistsError(f"{path} has a checkpoint already; set overwrite to replace it")

    def prepare_global_plan(self, plans: List[SavePlan]) -> List[SavePlan]:
        """Numbers the ranks, whose files have these numbers."""
        alone = not getattr(self, "use_collectives", True)
        if alone and self.enable_consolidation and self.save_distributed:
            raise UnsupportedError("enable_consolidation needs the shards of all ranks: save with use_collectives=True")
        writers = [rank for rank, plan in enumerate(plans) if plan.items]
        if not self.save_distributed and len(writers) > 1:
            raise InvalidError(f"ranks {writers[0]} and {writers[1]} both have tensors to write: pass "
                               "save_distributed=True, or save the full state on rank 0")
        first = (self.rank or 0) + 1 if alone else 1
        return [dataclasses.replace(plan, storage_data=number) for number, plan in enumerate(plans, first)]

    # -- writing --

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[List[WriteResult]]":
        """Writes the tensors that a plan assigns to this rank."""
        count = max((self.fqn_to_index_mapping or {"": 1}).values(), default=1)
        shard = plan.storage_data if self.save_distributed else None
        results: List[WriteResult] = []
        for (index, copy), items in self._files(plan.items).items():
            results += self._write_file(_file_name(index, count, shard, copy), items, planner)
        done: "Future[List[WriteResult]]" = Future()
        done.set_result(results)
        return done

    def _files(self, items: Sequence[WriteItem]) -> Dict[Tuple[int, int], List[WriteItem]]:
        """Returns the items of each file."""
        found: Dict[Tuple[int, int], List[WriteItem]] = {}
        copies: Dict[str, int] = {}
        for item in items:
            name = item.index.fqn
            states.check_name(name)
            if name == "__metadata__":
                raise InvalidError(f"{name}: safetensors reserves this name")
            if item.type == WriteItemType.BYTE_IO:
                raise UnsupportedError(f"{name} is not a tensor, and safetensors has tensors only; save it elsewhere")
            if self.fqn_to_index_mapping is not None and name not in self.fqn_to_index_mapping:
                raise MissingError(f"fqn_to_index_mapping lacks {name}")
            copies[name] = copies.get(name, 0) + 1
            index = 1 if self.fqn_to_index_mapping is None else self.fqn_to_index_mapping[name]
            found.setdefault((index, copies[name]), []).append(item)
        return found

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> List[WriteResult]:
        """Writes one safetensors file, with its tensors in the order of the safetensors library."""
        arrays = [self._array(planner, item) for item in items]
        arrays.sort(key=lambda one: one.data.item.index.fqn)
        arrays.sort(key=lambda one: _ORDER[one.dtype], reverse=True)
        stream = memory.ordered(memory.cuda_device(one.data.tensor) for one in arrays if one.data.tensor is not None)
        structs = [bytes_struct(b"header", _header(arrays)), *(item_struct(one.data) for one in arrays)]
        places = write_items(os.path.join(self.path, name), structs, pool_of(self._pool), stream, None, plain=1,
                             sync=self.sync_files)
        made = {id(one.data.item): WriteResult(index=one.data.item.index, size_in_bytes=nbytes,
                                               storage_data=_StorageInfo(name, at, nbytes))
                for one, (at, nbytes) in zip(arrays, places[1:])}
        return [made[id(item)] for item in items]

    def _array(self, planner: SavePlanner, item: WriteItem) -> _Array:
        data, _ = self._resolved(planner, item)
        word = None if data.tensor is None else _DTYPES.get(str(data.tensor.dtype).rpartition(".")[2])
        if word is None:
            what = item.tensor_data.properties.dtype if item.tensor_data is not None else "this kind"
            raise UnsupportedError(f"{item.index.fqn}: safetensors has no tensors of {what}")
        chunk = getattr(item.tensor_data, "chunk", None)
        return _Array(data, word, [] if chunk is None else list(chunk.offsets))

    # -- the end --

    def finish(self, metadata: Metadata, results: List[List[WriteResult]]) -> None:
        """Makes the files visible, then writes whole tensors or the index, and removes older files."""
        path = os.fspath(self.path)
        written = {one.storage_data.relative_path for ranks in results for one in ranks}
        for name in sorted(written):
            if not os.path.exists(os.path.join(path, name + PART)):
                raise MissingFileError(f"{os.path.join(path, name + PART)}: no such file on the rank that completes "
                                       "the save; all ranks must write to one shared directory")
        old = _files_of_index(path)
        if self.save_distributed:
            alone = not getattr(self, "use_collectives", True)
            old = [one for one in map(_SHARD.match, _listing(path))
                   if one and (not alone or int(one.group(1)) == (self.rank or 0) + 1)]
            old = [one.string for one in old]
        for name in sorted(written):
            os.replace(os.path.join(path, name + PART), os.path.join(path, name))
        if not self.save_distributed:
            self._write_index(path, {one.index.fqn: (one.storage_data.relative_path, one.storage_data.length)
                                     for ranks in results for one in ranks})
        self._sync_folder(path)
        self._remove(path, old, written)
        if self.save_distributed and self.enable_consolidation:
            self._consolidate()

    def _write_index(self, path: str, tensors: Mapping[str, Tuple[str, int]]) -> None:
        """Replaces the index in one step."""
        index = {"metadata": {"total_size": sum(nbytes for _, nbytes in tensors.values())},
                 "weight_map": {name: file for name, (file, _) in tensors.items()}}
        with open(os.path.join(path, INDEX + ".tmp"), "w", encoding="utf-8", opener=open_here) as file:
            json.dump(index, file, indent=2)
            if self.sync_files:
                file.flush()
                os.fsync(file.fileno())
        os.replace(os.path.join(path, INDEX + ".tmp"), os.path.join(path, INDEX))

    @staticmethod
    def _remove(path: str, old: Sequence[str], kept: Any) -> None:
        for name in set(old) - set(kept):
            if os.path.exists(os.path.join(path, name)):
                os.unlink(os.path.join(path, name))

    def _consolidate(self) -> None:
        """Writes whole tensors beside the directory of the shards. They become visible when all are written."""
        path = self.consolidated_output_path or ""
        hidden = os.path.join(path, ".consolidated" + PART)
        shutil.rmtree(hidden, ignore_errors=True)
        os.makedirs(hidden)
        with Checkpoint(os.fspath(self.path), format="safetensors") as shards:
            index_of = {name: (self.fqn_to_index_mapping or {}).get(name, 1) for name in shards}
            count = max((self.fqn_to_index_mapping or index_of).values(), default=1)
            files = {index: _file_name(index, count) for index in sorted(set(index_of.values()))}
            for index, name in files.items():
                convert(shards, os.path.join(hidden, name), format="safetensors", pool=self.thread_count_consolidation,
                        only=lambda tensor, own=index: index_of[tensor.name] == own)  # type: ignore[misc]
            tensors = {name: (files[index_of[name]], shards[name].nbytes) for name in shards}
        old = _files_of_index(path)
        for name in files.values():
            os.replace(os.path.join(hidden, name), os.path.join(path, name))
        self._write_index(path, tensors)
        os.rmdir(hidden)
        self._sync_folder(path)
        self._remove(path, old, files.values())


class HuggingFaceStorageReader(Reader):
    """Reads safetensors for dcp.load, with the keywords of torch's HuggingFaceStorageReader: `path` is a directory of
    whole tensors or of shards, or a URL, and `thread_count` the number of threads. `pool` is a reshard.Pool, or a
    number of threads, instead of thread_count. `storage` has the credentials and limits of a URL; default: those of the
    environment.

    In contrast to torch, the files of an index are read and no others, and a part of a tensor that no file has is an
    error."""

    def __init__(self, path: Any, thread_count: int = 1, *, pool: AnyPool = None,
                 storage: Optional[Storage] = None) -> None:
        super().__init__(path, pool=thread_count if pool is None else pool, storage=storage)
        self.thread_count = thread_count

    def _open_checkpoint(self) -> Checkpoint:
        return Checkpoint(self.path, format="safetensors", storage=self._storage)
