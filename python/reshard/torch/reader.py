"""A reader of checkpoints for torch.distributed.checkpoint:

    dcp.load(state, storage_reader=reshard.torch.Reader(path))

The library reads what the planner requests: only the bytes that are needed, with several threads, and checks their
CRC-32. Reader replaces FileSystemReader of torch. It also reads directories of safetensors and files of torch.save.
"""
from __future__ import annotations

import io
import os
import zipfile
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .. import _c, dtypes
from ..carry import AnyPool
from ..checkpoint import Checkpoint
from ..errors import FormatError, LimitError, MismatchError, MissingFileError, UnsupportedError
from ..layout import Layout
from ..memory import cuda_device, is_direct
from ..states import OPAQUE
from ..storage import Storage, is_url
from . import metadata as metadata_
from .bound import box_of
from .boxes import check_filled
from .places import UrlPaths, check_file_system, open_regular
from .threads import pool_of

# An item may be this many times as long after its extensions are undone, and have these bytes in any case.
GROWTH, GROWN_NBYTES = 1024, 1 << 20
# Tensors that cannot be read in place are read into buffers of at most this size.
STAGED_NBYTES = 1 << 29
_DTYPES = {getattr(torch, one.torch) for one in dtypes.DTYPES.values() if hasattr(torch, one.torch)}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class _Wanted(NamedTuple):
    """A tensor item that is being read: its destination, and the buffer that it is read into, if that differs."""

    item: ReadItem
    target: torch.Tensor
    staged: Optional[torch.Tensor]


def _in_place(target: torch.Tensor, stored: torch.dtype) -> bool:
    """Returns whether the library can fill a tensor: it is in memory of the host or of a CUDA device, and its dtype is
    one that the library converts to as torch does."""
    if target.is_meta or not is_direct(target) or target.layout != torch.strided or target.is_quantized:
        return False
    if target.is_conj() or target.is_neg() or type(target) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if any(stride == 0 and extent > 1 for stride, extent in zip(target.stride(), target.shape)):
        return False
    return target.dtype == stored or (target.dtype in _FLOATS and stored in _FLOATS)


def resolved(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """Returns the tensor that an item is read into. MismatchError if it has another shape."""
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise MismatchError(f"{item.storage_index.fqn}: a read of {list(item.lengths)} elements into a tensor of "
                            f"{list(target.size())}")
    return target


class Reader(UrlPaths, FileSystemReader):
    """Reads a checkpoint for dcp.load: a directory that torch or this package saved, safetensors, or a file of
    torch.save. The path may be s3://BUCKET/PREFIX or https://HOST/PATH.

    `path` and `_extension_registry` are those of FileSystemReader of torch. In contrast to it, a part of a tensor
    that no file has is an error, and so is a wrong CRC-32. Nothing in .metadata is executed. Several extensions are
    undone in the reverse order of the writer. `pool` is a number of threads, or a reshard.Pool. `storage` has the
    credentials and limits of a URL; default: those of the environment. Another file system in `fs` is refused, because
    the library opens the files."""

    def __init__(self, path: Any, _extension_registry: Any = None, *, pool: AnyPool = None,
                 storage: Optional[Storage] = None) -> None:
        if _extension_registry is None:
            super().__init__(path)
        else:
            super().__init__(path, _extension_registry)
        self._pool, self._storage = pool, storage
        self._take_path(path)
        self._metadata: Optional[Metadata] = None
        self._opened: Optional[Checkpoint] = None
        self._of_rank: Optional[int] = None  # the rank whose metadata is used; None: that of all

    def reset(self, checkpoint_id: Any = None) -> None:
        """Starts another load, from another path if `checkpoint_id` is one."""
        super().reset(checkpoint_id)
        self._metadata, self._opened, self._of_rank = None, None, None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Returns whether a path can be read from."""
        return is_url(checkpoint_id) or FileSystemReader.validate_checkpoint_id(checkpoint_id)

    def __getstate__(self) -> Dict[str, Any]:
        return dict(super().__getstate__(), _opened=None)

    # -- metadata --

    def _metadata_name(self, rank: Optional[int]) -> str:
        return ".metadata" if rank is None else f"__{rank}.metadata"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of all ranks, or with rank=R that of one rank that saved without collectives."""
        self._of_rank, self._opened = kwargs.get("rank"), None
        found = metadata_.of_checkpoint(self._checkpoint())
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def _open_checkpoint(self) -> Checkpoint:
        """Opens a checkpoint of DCP with its metadata, or one in another format."""
        name = self._metadata_name(self._of_rank)
        if is_url(self.path):
            return Checkpoint(self.path, metadata=None if self._of_rank is None else name, storage=self._storage)
        path = os.path.join(self.path, name)
        if os.path.lexists(path):
            return Checkpoint(self.path, metadata=name)
        if self._of_rank is None and os.path.exists(self.path):
            opened = Checkpoint(self.path)
            if opened.format != "dcp":
                return opened
        raise MissingFileError(f"{path}: no such file")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any,
                              **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            check_file_system(self)
            self._opened = self._open_checkpoint()
        return self._opened

    # -- reading --

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Reads everything that a plan requests."""
        assert self._metadata is not None, "set_up_storage_reader comes first"
        check_filled(self._metadata, planner)
        tensors: List[ReadItem] = []
        transformed: Dict[Any, List[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._value(item.storage_index, place)))
            elif self._is_ours(place) and self._stored_dtype(item) in _DTYPES:
                tensors.append(item)
            else:
                transformed.setdefault(item.storage_index, []).append(item)
        for batch in self._batches(tensors, planner):
            left = self._load(batch)
            for one in left:
                transformed.setdefault(one.item.storage_index, []).append(one.item)
            done_elsewhere = {id(one) for one in left}
            for one in (one for one in batch if id(one) not in done_elsewhere):
                if one.staged is not None:
                    one.target.copy_(one.staged)
                planner.commit_tensor(one.item, one.target)
        for index, items in transformed.items():
            self._load_transformed(index, items, planner)
        done: "Future[None]" = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _is_ours(place: Any) -> bool:
        """Returns whether the library can undo all extensions of an item."""
        words = getattr(place, "transform_descriptors", None) or ()
        return all(word.partition("/")[0] == "stream.zstd" for word in words)

    def _batches(self, items: Sequence[ReadItem], planner: LoadPlanner) -> Iterable[List[_Wanted]]:
        """Yields the reads in batches whose buffers have at most STAGED_NBYTES."""
        batch: List[_Wanted] = []
        staged_nbytes = 0
        for item in items:
            target = resolved(planner, item)
            staged, stored = None, self._stored_dtype(item)
            if not _in_place(target, stored):
                staged = torch.empty(tuple(item.lengths), dtype=stored)
                staged_nbytes += staged.nbytes
            batch.append(_Wanted(item, target, staged))
            if staged_nbytes >= STAGED_NBYTES:
                yield batch
                batch, staged_nbytes = [], 0
        if batch:
            yield batch

    def _about(self, name: str) -> Any:
        assert self._metadata is not None
        about = self._metadata.state_dict_metadata.get(name)
        if about is None or isinstance(about, BytesStorageMetadata):
            raise MismatchError(f"the checkpoint has no tensor {name}")
        return about

    def _stored_dtype(self, item: ReadItem) -> torch.dtype:
        return self._about(item.storage_index.fqn).properties.dtype

    def _load(self, batch: Sequence[_Wanted]) -> List[_Wanted]:
        """Reads items. Those of one tensor and dtype are boxes of one layout. Returns the items that torch must
        read, such as lazily conjugated ones."""
        groups: Dict[Tuple[str, torch.dtype], List[_Wanted]] = {}
        for one in batch:
            into = one.target if one.staged is None else one.staged
            if into.numel():
                groups.setdefault((one.item.storage_index.fqn, into.dtype), []).append(one)
        made = {key: self._local(*key, members) for key, members in groups.items()}
        left: List[_Wanted] = []
        if not made:
            return left
        try:
            self._checkpoint()._load(list(made.values()), pool_of(self._pool), cast=True)
        except (FormatError, UnsupportedError):
            for key, one in made.items():
                try:
                    self._checkpoint()._load([one], pool_of(self._pool), cast=True)
                except UnsupportedError:
                    left += groups[key]
                except FormatError:
                    if not self._is_of_others(groups[key]):
                        raise
                    left += groups[key]
        return left

    def _is_of_others(self, members: Sequence[_Wanted]) -> bool:
        """Returns whether only torch can read these items, and they are valid: a planner saved elements of another
        dtype than its metadata states, or safetensors went through an extension. If not, the error of the
        library is right."""
        for index in {one.item.storage_index for one in members}:
            try:
                data, about = self._decoded(index), self._about(index.fqn)
                stored = self._tensor(index, data)
            except UnsupportedError:
                raise  # valid, but their reader is not installed
            except Exception:  # an invalid file can raise almost any exception
                return False
            sizes = [one.sizes for one in about.chunks if one.offsets == index.offset]
            ours = stored.dtype == about.properties.dtype and not _is_safetensors(data)
            if ours or stored.size() not in sizes:
                return False
        return True

    def _local(self, name: str, dtype: torch.dtype, members: Sequence[_Wanted]) -> Any:
        """Returns the rsd_tensor of all reads of one tensor in a batch."""
        boxes, strides, addresses = [], [], []
        for item, target, staged in members:
            into = target if staged is None else staged
            start = item.storage_index.offset or (0,) * into.ndim
            boxes.append((0, [a + b for a, b in zip(start, item.storage_offsets)], list(item.lengths)))
            strides += into.stride()
            addresses.append(into.data_ptr())
        layout = Layout.from_boxes(dtypes.dtype(dtype), self._about(name).size, boxes)
        made = _c.Tensor(name=name.encode(), layout=layout.handle, arrays=_c.pointers(addresses),
                        strides=_c.ints(strides))
        made.kept = layout
        made.devices = [cuda_device(target) for _, target, staged in members if staged is None]
        return made

    # -- items that the library does not read --

    def _value(self, index: Any, place: Any) -> bytes:
        """Returns the bytes that torch.save wrote for an object."""
        if self._opened is not None and self._opened.format != "dcp":
            return self._plain_value(self._opened, index.fqn)
        if is_url(self.path) or getattr(place, "transform_descriptors", None) and self._is_ours(place):
            try:
                return self._checkpoint().plain_values.item(index.fqn) or b""
            except LimitError:
                if is_url(self.path):
                    raise
                # objects with tensors in them are larger than values
        return self._decoded(index)

    @staticmethod
    def _plain_value(opened: Checkpoint, name: str) -> bytes:
        value, stream = opened.plain_values[name], io.BytesIO()
        if value is OPAQUE:
            raise UnsupportedError(f"{name}: an object, which is not read from a {opened.format} checkpoint")
        torch.save(value, stream)
        return stream.getvalue()

    def _where(self, index: Any) -> str:
        """Returns the file and position of an item, for messages."""
        place = self.storage_data[index]
        return f"{os.path.join(self.path, place.relative_path)}: {index.fqn}, the item at byte {place.offset}"

    def _decoded(self, index: Any) -> bytes:
        """Returns the bytes of an item, after its extensions are undone, the last one first."""
        data, place = self._slice(index), self.storage_data[index]
        words = list(getattr(place, "transform_descriptors", None) or ())
        if words:
            stream: Any = io.BytesIO(data)
            try:
                extensions = self.transforms.extension_registry.from_descriptor_list(words)
                for one in reversed(extensions):
                    stream = one.transform_from(stream)
                data = _read_limited(stream, GROWN_NBYTES + GROWTH * len(data), self._where(index))
            except (ImportError, MemoryError, LimitError):
                raise  # the file is valid
            except Exception as error:  # every extension has its own exceptions
                raise FormatError(f"{self._where(index)}: {error}") from error
        _check_crcs(data, self._where(index))
        return data

    def _slice(self, index: Any) -> bytes:
        """Returns the bytes of an item, which torch decodes."""
        place = self.storage_data[index]
        name = os.fspath(place.relative_path)
        if is_url(self.path):
            raise UnsupportedError(f"{self.path}: {index.fqn} was written through an extension, or as an object that "
                                   "only torch reads; copy the checkpoint to a directory first")
        if os.path.isabs(name) or any(part in ("", ".", "..") for part in name.split("/")):
            raise FormatError(f"{self.path}: {name!r} leads out of the directory")
        path = os.path.join(self.path, name)
        with open_regular(path, os.fspath(self.path)) as file:
            present = os.fstat(file.fileno()).st_size >= place.offset + place.length
            file.seek(place.offset if present else 0)
            data = file.read(place.length) if present else b""
        if len(data) != place.length:
            raise FormatError(f"{path}: the file ends before byte {place.offset + place.length}, where "
                              f"{index.fqn} does")
        return data

    def _tensor(self, index: Any, data: bytes) -> torch.Tensor:
        """Returns the tensor of an item from its bytes."""
        where = self._where(index)
        try:
            found = _from_safetensors(data) if _is_safetensors(data) else torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True)
        except ImportError as error:
            raise UnsupportedError(f"{where}: safetensors that went through an extension: {error}") from None
        except MemoryError:
            raise
        except Exception as error:  # an invalid file can raise almost any exception
            raise FormatError(f"{where}: {error}") from error
        if not isinstance(found, torch.Tensor):
            raise FormatError(f"{where}: not a tensor")
        return found

    def _load_transformed(self, index: Any, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Reads items that went through an unknown extension: decodes them once, and slices them as torch does."""
        stored = self._tensor(index, self._decoded(index))
        for item in items:
            target = resolved(planner, item)
            target.copy_(box_of(stored, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)


def _read_limited(stream: Any, most: int, where: str) -> bytes:
    """Returns all bytes of a stream, which has at most `most`."""
    parts: List[bytes] = []
    nbytes = 0
    while part := stream.read(1 << 20):
        parts.append(part)
        nbytes += len(part)
        if nbytes > most:
            raise LimitError(f"{where}: more than {most} bytes after its extensions are undone")
    return b"".join(parts)


def _is_safetensors(data: bytes) -> bool:
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8


def _from_safetensors(data: bytes) -> Optional[torch.Tensor]:
    """Returns the tensor of an item that is a safetensors file with one tensor."""
    from safetensors.torch import load
    found = list(load(data).values())
    return found[0] if len(found) == 1 else None


def _check_crcs(data: bytes, where: str) -> None:
    """Checks the CRCs of the records in an item of torch.save, which torch does not. 0: it was not computed."""
    if data[:4] != b"PK\3\4":
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"record {record.filename} is compressed, which torch.save never does")
                if record.CRC:
                    archive.read(record)
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
        raise FormatError(f"{where}: {error}") from None
