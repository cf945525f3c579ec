"""A writer of checkpoints for torch.distributed.checkpoint:

    dcp.save(state, storage_writer=reshard.torch.Writer(path))
    dcp.async_save(state, storage_writer=reshard.torch.Writer(path))

The library writes what the planner assigned to a rank, with several threads. The files have the same bytes as those of
FileSystemWriter of torch. An older checkpoint at the path stays readable until the new one is complete: new data files
have other names, and .metadata is replaced in one step.
"""
from __future__ import annotations

import contextlib
import ctypes as C
import inspect
import io
import math
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import _c, dtypes, local, memory, states
from ..carry import AnyPool, Pool
from ..checkpoint import Checkpoint
from ..errors import Error, InvalidError, MismatchError, UnsupportedError
from ..memory import is_direct
from ..saving import compress_level
from ..storage import Storage, handle_for, is_url
from .places import UrlPaths, check_file_system, list_files, open_here, open_regular, remove_files
from .staging import Stage
from .threads import pool_of

# Tensors that the library does not write in place are copied first, at most this number of bytes at a time.
STAGED_NBYTES = 1 << 30
_DATA_FILE = re.compile(r"__(\d+)_(?:(\d+)-)?\d+\.distcp$")  # a rank, and the number of a save
_NUMBERED = re.compile(rb"__\d+_(\d{1,18})-\d+\.distcp")  # the same in a pickle
_RANK_METADATA = re.compile(r"__\d+\.metadata$")


class Data(NamedTuple):
    """An item to write: a tensor in memory, or bytes."""

    item: WriteItem
    tensor: Optional[torch.Tensor]
    data: Optional[bytes]


def _global_nbytes(item: WriteItem) -> int:
    """Returns the bytes of the whole tensor of an item, by which torch assigns items to files."""
    assert item.tensor_data is not None
    element_nbytes: int = torch._utils._element_size(item.tensor_data.properties.dtype)  # type: ignore[attr-defined]
    return element_nbytes * math.prod(item.tensor_data.size)


def _buckets(count: int, items: Sequence[WriteItem]) -> List[List[WriteItem]]:
    """Returns one list of items per file, assigned as in torch: bytes in turn, and tensors from the largest to the
    file with the fewest bytes."""
    if count == 1:
        return [list(items)]
    made: List[List[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for number, item in enumerate(one for one in items if one.type == WriteItemType.BYTE_IO):
        made[number % count].append(item)
    tensors = [one for one in items if one.type != WriteItemType.BYTE_IO]
    for item in sorted(tensors, key=_global_nbytes, reverse=True):
        least = min(range(count), key=filled.__getitem__)
        made[least].append(item)
        filled[least] += _global_nbytes(item)
    return made


def _has_other_devices() -> bool:
    """Returns whether tensors may be on another device, from which they must be copied."""
    backend = torch._C._get_privateuse1_backend_name()
    other = getattr(torch, backend, None)
    return torch.cuda.is_available() or bool(other and other.is_available())


def _saved(what: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(what, stream)
    return stream.getvalue()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as torch stores it: on the CPU, detached, with only the memory of its own elements."""
    return _alone(tensor.detach().cpu())


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with only the memory of its own elements, in the same order."""
    if tensor.layout != torch.strided or tensor.untyped_storage().size() == tensor.nbytes:
        return tensor
    return tensor.clone()


def _check_size(item: WriteItem, tensor: torch.Tensor) -> None:
    """Raises an error if the plan does not match the tensor: the checkpoint could not be read."""
    chunk = getattr(item.tensor_data, "chunk", None)
    if chunk is not None and tuple(chunk.sizes) != tuple(tensor.shape):
        raise MismatchError(f"{item.index.fqn}: the plan has {list(chunk.sizes)} at {list(chunk.offsets)}, but "
                            f"the tensor is {list(tensor.shape)}; uneven strided shards "
                            "need reshard.torch.SavePlanner")


def _known(tensor: torch.Tensor) -> Optional[dtypes.Dtype]:
    """Returns the dtype of the library, or None if torch must write the tensor."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    try:
        return dtypes.dtype(tensor.dtype)
    except Error:
        return None


def item_struct(one: Data) -> Any:
    """Returns an item for the library, which keeps its memory."""
    name = one.item.index.fqn.encode()
    if one.tensor is None:
        return bytes_struct(name, one.data or b"")
    known = _known(one.tensor)
    assert known is not None
    made = _c.Item(name=name, dtype=known.number, ndim=one.tensor.ndim, shape=_c.ints(one.tensor.shape),
                   strides=_c.ints(one.tensor.stride()), data=one.tensor.data_ptr() or None)
    made.kept = one.tensor
    return made


def bytes_struct(name: bytes, data: bytes) -> Any:
    """Returns an item that is written as it is."""
    kept = C.create_string_buffer(data, len(data) or 1)
    made = _c.Item(name=name, data=C.cast(kept, C.c_void_p), nbytes=len(data))
    made.kept = kept
    return made


def write_items(path: str, items: Sequence[Any], pool: AnyPool, stream: Any, storage: Optional[Storage],
                **options: Any) -> List[Tuple[int, int]]:
    """Writes items to a file, one behind the other. Returns their offsets and lengths."""
    call, places = local.Call(pool=pool, stream=stream), (C.c_uint64 * max(1, 2 * len(items)))()
    call.io.contents.storage = handle_for(path, storage)
    call(_c.lib.rsd_dcp_write_items, _c.path_bytes(path), len(items), _c.packed(_c.Item, items),
         C.byref(_c.ItemsOptions(io=call.io, **options)), places)
    return [(places[2 * i], places[2 * i + 1]) for i in range(len(items))]


class Writer(UrlPaths, FileSystemWriter):
    """Writes a checkpoint to `path` for dcp.save and dcp.async_save.

    It has the keywords of FileSystemWriter of torch: single_file_per_rank, sync_files, thread_count,
    per_thread_copy_ahead, cache_staged_state_dict, overwrite, _extensions, serialization_format. `compress` is "zstd"
    or "zstd:LEVEL", which needs no other package, and is equal to `_extensions=[ZStandard()]`. `pool` is a number of
    threads, or a reshard.Pool; `thread_count` is the number of files, which are written at the same time. An older
    checkpoint stays readable until the new one is complete. Then its files are removed.

    The path may be s3://BUCKET/PREFIX. `storage` has its credentials and limits; default: those of the environment.
    Another file system in `fs` is refused, because the library writes the files."""

    def __init__(self, path: Any, single_file_per_rank: bool = True, sync_files: bool = True,
                 thread_count: int = 1, per_thread_copy_ahead: int = 10_000_000,
                 cache_staged_state_dict: bool = False, overwrite: bool = True, _extensions: Any = None,
                 serialization_format: Any = None, *, compress: Union[str, int, bool, None] = None,
                 pool: AnyPool = None, storage: Optional[Storage] = None) -> None:
        options: Dict[str, Any] = dict(
            single_file_per_rank=single_file_per_rank, sync_files=sync_files, thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead, cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite)
        if _extensions is not None:
            options["_extensions"] = _extensions
        if serialization_format is not None:
            options["serialization_format"] = serialization_format
        taken = inspect.signature(FileSystemWriter.__init__).parameters
        strange = [name for name in ("_extensions", "serialization_format") if name in options
                   and name not in taken]
        if strange:
            raise UnsupportedError(f"torch {torch.__version__} has no {strange[0]}")
        super().__init__(path, **{name: value for name, value in options.items() if name in taken})
        self._pool, self._storage = pool, storage
        self._take_path(path)
        self._names = [one.get_descriptor() for one in reversed(_extensions or ())]
        self._level = compress_level(compress)
        self._safetensors = getattr(serialization_format, "value", "torch_save") == "safetensors"
        if self._level and self._names:
            raise InvalidError("compress and _extensions exclude each other: pass one of them")
        if self._level and self._safetensors:
            raise InvalidError("compress does not apply to safetensors; "
                               "_extensions=[ZStandard()] compresses both")
        if self._names == ["stream.zstd/1"]:
            self._level = 3
        elif self._level:
            self._names = ["stream.zstd/1"]
        self._stage = Stage(keep=cache_staged_state_dict)
        self._by_library = not self._safetensors and (self._level > 0 or not self._names)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Returns whether a path can be written to."""
        return (is_url(checkpoint_id) and checkpoint_id.startswith("s3:")) or \
            FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def stage(self, state_dict: Any) -> Any:
        """Returns a copy of a state dict for async_save, including CPU tensors, DTensors and ShardedTensors."""
        self.per_thread_copy_ahead = 0  # everything is copied then
        return self._stage.copied(state_dict)

    # -- planning --

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the directory."""
        check_file_system(self)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[List[WriteResult]]":
        """Writes the items that a plan assigns to this rank."""
        for item in plan.items:
            states.check_name(item.index.fqn)  # other readers refuse the whole checkpoint because of one
        prefix = self._free_prefix(plan.storage_data.prefix)
        if self.single_file_per_rank:
            buckets = _buckets(self.thread_count, plan.items)
        else:
            buckets = [[item] for item in plan.items]
        names = [f"{prefix}{number}.distcp" for number in range(len(buckets))]
        count = min(self.thread_count, len(buckets))
        pool = pool_of(self._pool) if self._by_library else None
        if count > 1:
            results = self._write_files(planner, pool, names, buckets, count)
        else:
            results = [one for job in zip(names, buckets) for one in self._write(planner, pool, *job)]
        done: "Future[List[WriteResult]]" = Future()
        done.set_result(results)
        return done

    def _write_files(self, planner: SavePlanner, pool: Optional[Pool], names: Sequence[str],
                     buckets: Sequence[Sequence[WriteItem]], count: int) -> List[WriteResult]:
        """Writes `count` files at a time, since a file system lets one thread at a time write to a file. Each has an
        equal part of the threads of the pool."""
        def written(first: int) -> List[WriteResult]:
            part = Pool(max(1, pool.nthreads // count)) if pool else None
            return [one for job in zip(names[first::count], buckets[first::count])
                    for one in self._write(planner, part, *job)]

        with ThreadPoolExecutor(count) as threads:
            return [one for found in threads.map(written, range(count)) for one in found]

    def _metadata_name(self) -> str:
        """Returns the metadata file that this save replaces: that of all ranks, or of one that saves without
        collectives."""
        alone = not getattr(self, "use_collectives", True) and self.rank is not None
        return f"__{self.rank}.metadata" if alone else ".metadata"

    def _free_prefix(self, prefix: str) -> str:
        """Returns a prefix for data files that no existing checkpoint has, nor had one that a reader may still have
        open. Saves are numbered: one more than the save that they replace, which is the same on all ranks."""
        names = list_files(os.fspath(self.path), self._storage)
        if ".metadata" not in names and not any(map(_RANK_METADATA.match, names)):
            return prefix
        numbers = [int(found.group(2) or 0) for found in map(_DATA_FILE.match, names)
                   if found and found.string.startswith(prefix)]
        if self._metadata_name() in names and is_url(self.path):
            before = self._files_of(os.fspath(self.path), self._metadata_name())
            numbers += [0, *(int(found.group(2) or 0) for found in map(_DATA_FILE.match, before) if found)]
        elif self._metadata_name() in names:
            with open_regular(os.path.join(self.path, self._metadata_name()), os.fspath(self.path)) as file:
                numbers += [0, *(int(found.group(1)) for found in _NUMBERED.finditer(file.read()))]
        return f"{prefix}{max(numbers) + 1}-" if numbers else prefix

    def _ordered(self, items: Sequence[WriteItem]) -> List[WriteItem]:
        """Returns the items in the order of the file: bytes, then tensors, by size if torch overlaps copies with
        writes."""
        tensors = [one for one in items if one.type != WriteItemType.BYTE_IO]
        if self.thread_count == 1 and self.per_thread_copy_ahead > 0 and _has_other_devices():
            tensors.sort(key=_global_nbytes)
        return [one for one in items if one.type == WriteItemType.BYTE_IO] + tensors

    # -- writing --

    def _write(self, planner: SavePlanner, pool: Optional[Pool], name: str,
               items: Sequence[WriteItem]) -> List[WriteResult]:
        """Writes the items of one file, by the library or through the streams of extensions."""
        path = os.path.join(self.path, name)
        if pool is None:
            return self._write_streams(planner, name, path, self._ordered(items))
        results: List[WriteResult] = []
        offset = 0
        for batch, last in self._batches(planner, self._ordered(items)):
            for one, (at, nbytes) in zip(batch, self._write_batch(pool, path, batch, offset, last)):
                results.append(self._result(one.item, name, at, nbytes))
                offset = at + nbytes
        return results

    def _batches(self, planner: SavePlanner, items: Sequence[WriteItem]) -> Iterator[Tuple[List[Data], bool]]:
        """Yields batches of items, and whether it is the last one: all at once, unless tensors must be copied."""
        batch: List[Data] = []
        nbytes = 0
        for number, item in enumerate(items):
            one, copied = self._resolved(planner, item)
            batch.append(one)
            nbytes += copied
            # An object is written in one call.
            if nbytes >= STAGED_NBYTES // self.thread_count and number < len(items) - 1 and not is_url(self.path):
                yield batch, False
                batch, nbytes = [], 0
        yield batch, True

    @staticmethod
    def _resolved(planner: SavePlanner, item: WriteItem) -> Tuple[Data, int]:
        """Returns the data of an item, and the number of bytes that were copied for it."""
        found = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(found, io.BytesIO):
                raise InvalidError(f"{item.index.fqn}: the planner returned a {type(found).__name__}, not bytes")
            return Data(item, None, found.getvalue()), 0
        if not isinstance(found, torch.Tensor):
            raise InvalidError(f"{item.index.fqn}: the planner returned a {type(found).__name__}, not a tensor")
        _check_size(item, found)
        tensor = found.detach()
        if not is_direct(tensor) or not _known(tensor):
            tensor = tensor.cpu()
        if not (_known(tensor) and tensor.is_contiguous() and tensor.numel()):
            tensor = _alone(tensor)  # else it is contiguous, and is written without a copy
        if not _known(tensor):
            return Data(item, None, _saved(tensor)), 0
        return Data(item, tensor, None), 0 if tensor.data_ptr() == found.data_ptr() else tensor.nbytes

    def _write_batch(self, pool: Pool, path: str, data: Sequence[Data], offset: int,
                     last: bool) -> List[Tuple[int, int]]:
        stream = memory.ordered(memory.cuda_device(one.tensor) for one in data if one.tensor is not None)
        return write_items(path, [item_struct(one) for one in data], pool, stream, self._storage,
                           offset=offset, compress=self._level, sync=is_url(path) or (self.sync_files and last))

    def _write_streams(self, planner: SavePlanner, name: str, path: str,
                       items: Sequence[WriteItem]) -> List[WriteResult]:
        """Writes items through extensions, or as safetensors, one after the other, in Python."""
        results = []
        with self._new_file(path) as file:
            for item in items:
                found, offset = planner.resolve_data(item), file.tell()
                stream: Any = file
                if self._names:
                    stream, _ = self.transforms.transform_save_stream(item, file)  # type: ignore[arg-type]
                if isinstance(found, torch.Tensor):
                    _check_size(item, found)
                if isinstance(found, io.BytesIO):
                    stream.write(found.getbuffer())
                elif self._safetensors:
                    stream.write(_as_safetensors(item, _on_cpu(found)))
                else:
                    torch.save(_on_cpu(found), stream)
                if stream is not file:
                    stream.close()
                results.append(self._result(item, name, offset, file.tell() - offset))
        return results

    @contextlib.contextmanager
    def _new_file(self, path: str) -> Iterator[Any]:
        """Yields a new file to write to. An object is kept in memory until it is complete."""
        if is_url(path):
            made = io.BytesIO()
            yield made
            write_items(path, [bytes_struct(b"file", made.getvalue())], None, None, self._storage, sync=1)
            return
        with open(path, "wb", opener=open_here) as file:
            yield file
            if self.sync_files:
                file.flush()
                os.fsync(file.fileno())

    def _result(self, item: WriteItem, name: str, offset: int, nbytes: int) -> WriteResult:
        place = _StorageInfo(name, offset, nbytes)
        if self._names:
            place.transform_descriptors = list(self._names)
        return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=place)

    # -- the end --

    def finish(self, metadata: Metadata, results: List[List[WriteResult]]) -> None:
        """Replaces the metadata in one step. Then removes the files of the older checkpoint."""
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for ranks in results for one in ranks}
        metadata.storage_meta = self.storage_meta()
        name, folder = self._metadata_name(), os.fspath(self.path)
        before = self._files_of(folder, name)
        if is_url(folder):  # an object is replaced in one step
            with self._new_file(os.path.join(folder, name)) as file:
                pickle.dump(metadata, file)
        else:
            partial = os.path.join(folder, name + ".tmp")
            with self._new_file(partial) as file:
                pickle.dump(metadata, file)
            self._sync_folder(folder)
            os.replace(partial, os.path.join(folder, name))
        self._sync_folder(folder)
        self._remove_old(folder, name, before, metadata)

    def _sync_folder(self, folder: str) -> None:
        if self.sync_files and not is_url(folder):
            number = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)

    def _files_of(self, folder: str, name: str) -> List[str]:
        """Returns the data files of an existing checkpoint, or none if its metadata cannot be read."""
        if not is_url(folder) and not os.path.exists(os.path.join(folder, name)):
            return []
        try:
            with Checkpoint(folder, metadata=name, storage=self._storage) as found:
                return [one for one in found.files if one != name]
        except (Error, OSError):
            return []

    def _remove_old(self, folder: str, name: str, before: Sequence[str], metadata: Metadata) -> None:
        """Removes the data files of the replaced checkpoint, and those that a stopped save left. Files that other
        metadata may refer to stay."""
        names = list_files(folder, self._storage)
        others = [one for one in names if one != name and (one == ".metadata" or _RANK_METADATA.match(one))]
        old = set(before)
        if not others:
            old |= set(names)
        kept = {place.relative_path for place in metadata.storage_data.values()}
        for other in others:
            kept |= set(self._files_of(folder, other))
        rank = name[2:-len(".metadata")] if name != ".metadata" else None
        matches = [(one, _DATA_FILE.match(one)) for one in sorted(old - kept) if one in names]
        remove_files(folder, self._storage, [one for one, match in matches
                                             if match and (rank is None or match.group(1) == rank)])


def _as_safetensors(item: WriteItem, tensor: torch.Tensor) -> bytes:
    """Writes one blob per item, so that several parts of one tensor do not conflict."""
    from safetensors.torch import save
    return save({item.index.fqn: tensor.contiguous()})
