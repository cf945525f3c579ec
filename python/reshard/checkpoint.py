"""Checkpoints: mappings of names to tensors, which are read when an index selects a part of them.

    with reshard.open("step-1000") as ckpt:
        ckpt["model.w"].shape
        rows = ckpt["model.w"][10:20]                   reads only these rows
        ckpt.load(model.state_dict())                   fills existing memory, in any layout
"""
from __future__ import annotations

import contextlib
import ctypes as C
import itertools
import json
import math
import os
import threading
from html import escape
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from . import _c, dtypes, frameworks, local, memory, opening, pictures, states
from ._c import Address, Int64, Pathlike
from .carry import AnyPool
from .errors import InvalidError, MismatchError, MissingError, UnsupportedError
from .layout import AnyMesh, Layout, Mesh
from .local import Local, Progress, Report
from .slicing import Reading, Selection
from .states import OPAQUE
from .storage import Storage, handle_for, is_url
from .transport import AnyTransport

FORMATS = {"dcp": _c.FORMAT_DCP, "safetensors": _c.FORMAT_SAFETENSORS, "torch.save": _c.FORMAT_TORCH_SAVE,
           "fsdp": _c.FORMAT_FSDP, "deepspeed": _c.FORMAT_DEEPSPEED, "megatron": _c.FORMAT_MEGATRON,
           "orbax": _c.FORMAT_ORBAX}


class Stored(NamedTuple):
    """One stored box of a tensor: elements with `lo[d] <= index[d] < lo[d] + len[d]`. `file` is a name in the
    directory, or None if it is not known. `offset` and `nbytes` are those of the item in the file, including its
    header. `transforms` are the names of what was done to the item, such as "stream.zstd/1"."""

    lo: Tuple[int, ...]
    len: Tuple[int, ...]
    file: Optional[str]
    offset: int
    nbytes: int
    transforms: Tuple[str, ...] = ()


def _transforms(stored: Any) -> Tuple[str, ...]:
    return () if stored.transforms is None else tuple(json.loads(stored.transforms))


class LazyTensor:
    """A tensor of a checkpoint: checkpoint["name"]. An index reads the part that it selects, by the rules of NumPy:
    integers, slices with any step, `...` and None."""

    def __init__(self, checkpoint: "Checkpoint", index: int) -> None:
        about = _c.TensorInfo()
        self._checkpoint, self._index = checkpoint, index
        with checkpoint.in_use() as handle:
            _c.lib.rsd_checkpoint_tensor(handle, index, C.byref(about))
            self.name: str = about.name.decode()
            self._path: Optional[bytes] = about.path
        self._dtype = dtypes.by_number(about.dtype)
        self.dtype: str = self._dtype.name
        self.shape: Tuple[int, ...] = tuple(about.shape[:about.ndim])
        self.nbytes: int = about.nbytes
        self.nboxes: int = about.nboxes

    @property
    def path(self) -> Optional[states.Path]:
        """The path in the nested state dict, or None if it is not known."""
        return None if self._path is None else tuple(json.loads(self._path))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dims")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype}{list(self.shape)} in {self.nboxes} boxes>"

    def _repr_svg_(self) -> Optional[str]:
        """A picture for notebooks: the file of each box, as `reshard inspect --svg` draws it."""
        return self._checkpoint._picture(self.name)

    @property
    def layout(self) -> Layout:
        """The layout in the files: explicit boxes, where the rank is the number of the file."""
        handle = Address()
        with self._checkpoint.in_use() as checkpoint:
            _c.lib.rsd_checkpoint_layout(checkpoint, self._index, C.byref(handle))
        return Layout._of(handle)

    @property
    def boxes(self) -> List[Stored]:
        """Its parts in the files."""
        stored, n, files = _c.Extent(), self.ndim, self._checkpoint.files
        found = []
        with self._checkpoint.in_use() as handle:
            for box in range(self.nboxes):
                _c.lib.rsd_checkpoint_box(handle, self._index, box, C.byref(stored))
                file = files[stored.file] if stored.file >= 0 else None
                found.append(Stored(tuple(stored.box.lo[:n]), tuple(stored.box.len[:n]), file, stored.offset,
                                    stored.nbytes, _transforms(stored)))
        return found

    def __getitem__(self, index: Any) -> Any:
        return self.read(index)

    def read(self, index: Any = ..., *, like: Optional[str] = None, dtype: Any = None, out: Any = None,
             pool: AnyPool = None) -> Any:
        """Returns the part that `index` selects, in a new array.

        like    kind of the array: "auto", "numpy", "torch", "raw" or "memoryview". Default: that of the checkpoint.
                "auto" is a NumPy array if NumPy or ml_dtypes has the dtype (bfloat16 and float8 need ml_dtypes), else a
                torch tensor if torch is installed, else "raw": unsigned integers with the same bits
        dtype   converts the elements to it
        out     reads into this array instead; the index must not have steps
        pool    a Pool or a number of threads. Default: one thread per CPU of the process"""
        self._checkpoint.handle  # a closed checkpoint is an error, also for an empty selection
        selection = Selection(index, self.shape)
        if out is not None:
            return self._read_into(out, selection, dtype, pool)
        like = frameworks.check(self._checkpoint.like if like is None else like)
        kind = self._dtype if dtype is None else dtypes.dtype(dtype)
        if selection.empty:
            return frameworks.empty(selection.shape, kind, like, name=self.name)
        reading = selection.reading(self._dtype.nbytes)
        if kind.nbytes * math.prod(reading.shape) >= frameworks.LARGE_NBYTES:
            self._checkpoint.check_claims()
        array = frameworks.empty(reading.shape, kind, like, name=self.name)
        seen = memory.see(array, self.name, True)
        self._read(reading, seen, memory.dense_strides(reading.shape), kind, pool)
        return frameworks.finished(array, reading.shape, reading.after, selection.shape, kind, like)

    def _read_into(self, out: Any, selection: Selection, dtype: Any, pool: AnyPool) -> Any:
        """Reads a selection into an array or tensor of the caller."""
        if not selection.plain:
            raise InvalidError(f"{self.name}: an index with steps cannot be read into `out`")
        kind = self._dtype if dtype is None else dtypes.dtype(dtype)
        seen = memory.see(out, self.name, True).fits(kind, selection.shape, self.name)
        if not selection.empty:
            # The dims of the tensor: without those that None added, with those that an integer removed.
            kept = iter([stride for stride, new in zip(seen.strides, selection.new) if not new])
            strides = [1 if cut.drop else next(kept) for cut in selection.cuts]
            self._read(selection.reading(self._dtype.nbytes), seen, strides, kind, pool)
        return out

    def _read(self, reading: Reading, seen: memory.Memory, strides: Sequence[int], kind: dtypes.Dtype,
              pool: AnyPool) -> None:
        """Reads boxes into memory with these strides."""
        layout = Layout.from_boxes(kind, self.shape, [(0, lo, length) for lo, length, _ in reading.boxes])
        base = seen.address or 0
        addresses = [base + kind.nbytes * sum(a * s for a, s in zip(at, strides))
                     for _, _, at in reading.boxes]
        made = _c.Tensor(name=self.name.encode(), layout=layout.handle, arrays=_c.pointers(addresses),
                        strides=_c.ints(list(strides) * len(addresses)))
        made.devices = [seen.device]
        self._checkpoint._load([made], pool, cast=kind is not self._dtype)

    def numpy(self) -> Any:
        """Returns the whole tensor as a NumPy array."""
        return self.read(like="numpy")

    def torch(self) -> Any:
        """Returns the whole tensor as a torch tensor."""
        return self.read(like="torch")

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        if copy is False:
            raise ValueError(f"{self.name} is in a file and must be read first")
        if dtype is not None and self._dtype.numpy is None:  # without NumPy's own dtype, it is converted
            return self.read(like="numpy", dtype=dtype)
        array = self.read(like="numpy")
        return array if dtype is None else array.astype(dtype, copy=False)


class _Values(Mapping[str, Any]):
    """Values that are not tensors, by name. They are read when they are accessed."""

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self._checkpoint = checkpoint
        with checkpoint.in_use() as handle:
            names = [_c.lib.rsd_checkpoint_value_name(handle, index)
                     for index in range(_c.lib.rsd_checkpoint_nvalues(handle))]
        self._index = {name.decode(): index for index, name in enumerate(names)}

    def __getitem__(self, name: str) -> Any:
        if name not in self._index:
            raise MissingError(f"the checkpoint has no value {name}")
        text = Address()
        with self._checkpoint.in_use() as handle:
            _c.lib.rsd_checkpoint_value(handle, self._index[name], C.byref(text))
        return states.from_json(_c.taken(text))

    def path(self, name: str) -> Optional[states.Path]:
        """Returns the path of a value in the nested state dict, or None if it is not known."""
        with self._checkpoint.in_use() as handle:
            found = _c.lib.rsd_checkpoint_value_path(handle, self._index[name])
        return None if found is None else tuple(json.loads(found))

    def stored(self, name: str) -> Stored:
        """Where the item of a value is."""
        found = _c.Extent()
        with self._checkpoint.in_use() as handle:
            _c.lib.rsd_checkpoint_value_extent(handle, self._index[name], C.byref(found))
        file = self._checkpoint.files[found.file] if found.file >= 0 else None
        return Stored((), (), file, found.offset, found.nbytes, _transforms(found))

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def item(self, name: str) -> Optional[bytes]:
        """Returns the bytes that torch.save wrote for a value, decompressed, or None if it has no item."""
        if name not in self._index:
            raise MissingError(f"the checkpoint has no value {name}")
        address, count = Address(), C.c_size_t()
        with self._checkpoint.in_use() as handle:
            _c.lib.rsd_checkpoint_value_item(handle, self._index[name], C.byref(address), C.byref(count))
        if not address.value:
            return None
        found = C.string_at(address, count.value)
        _c.lib.rsd_free(address)
        return found

    def __repr__(self) -> str:
        return f"<values: {', '.join(self)}>"


def _listed(names: Sequence[str]) -> str:
    """Returns a name, or the number of names and the first three of them."""
    if len(names) == 1:
        return names[0]
    return f"{len(names)} entries: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


class Checkpoint(_c.Handle, Mapping[str, LazyTensor]):
    """The tensors of a checkpoint by name, in the order of the file. Several threads may use one.

    `reshard.open` makes one and describes its arguments: path, like, format, metadata, as_is, take_rank_0, model_dtype,
    unstack, vocab_size, from_rules, from_mesh, names, heads, follow_links, storage."""

    _free = "rsd_checkpoint_close"

    def __init__(self, path: Pathlike, *, like: str = "auto",
                 format: Optional[str] = None, metadata: Optional[str] = None, as_is: bool = False,
                 take_rank_0: bool = False, model_dtype: bool = False, unstack: bool = False,
                 vocab_size: int = 0, from_rules: Sequence[str] = (), from_mesh: AnyMesh = None,
                 names: Optional[Pathlike] = None, heads: Union[int, Tuple[int, int]] = 0,
                 follow_links: bool = False, storage: Optional[Storage] = None) -> None:
        self.path, self.like = os.fsdecode(path), frameworks.check(like)
        if format is not None and format not in FORMATS:
            raise InvalidError(f"unknown format {format!r}; formats are {' '.join(FORMATS)}")
        handle = Address()
        nheads, nkv_heads = (heads, 0) if isinstance(heads, int) else heads
        rules = [_c.text_bytes(rule, "rule") for rule in from_rules]
        options = _c.OpenOptions(
            format=0 if format is None else FORMATS[format],
            metadata=None if metadata is None else _c.path_bytes(metadata), follow_links=follow_links, as_is=as_is,
            take_rank_0=take_rank_0, model_dtype=model_dtype, unstack=unstack, vocab_size=vocab_size,
            nheads=nheads, nkv_heads=nkv_heads, names=None if names is None else _c.path_bytes(names),
            storage=handle_for(self.path, storage))
        if from_mesh is None:
            options.nfrom_rules, options.from_rules = len(rules), (_c.Text * max(1, len(rules)))(*rules)
            _c.lib.rsd_checkpoint_open(_c.path_bytes(path), C.byref(options), C.byref(handle))
        else:
            with opening.rank_rules(Mesh.of_any(from_mesh), rules) as made:
                setattr(options, "from", made)
                _c.lib.rsd_checkpoint_open(_c.path_bytes(path), C.byref(options), C.byref(handle))
        self._handle = handle.value
        self._lock, self._nusers = threading.Lock(), 0
        self._later: Optional[int] = None
        self._names: Optional[List[str]] = None
        self._files: Optional[List[str]] = None
        self._values: Optional[_Values] = None
        self._words: Optional[List[str]] = None  # the same options for the command; None: it does not have them
        if format is None and metadata is None and storage is None:
            flags = {"--as-is": as_is, "--take-rank-0": take_rank_0, "--unstack": unstack,
                     "--follow-links": follow_links}
            values = {"--dtype": "model" if model_dtype else None, "--vocab-size": vocab_size or None,
                      "--from-mesh": None if from_mesh is None else Mesh.of_any(from_mesh),
                      "--names": None if names is None else os.fsdecode(names),
                      "--heads": f"{nheads},{nkv_heads}" if nkv_heads else nheads or None}
            self._words = opening.command_words(flags, values, from_rules)

    def close(self) -> None:
        """Closes the checkpoint, after reads of other threads are complete. Its tensors cannot be read any more."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None and self._nusers:
                self._later = handle
                return
        if handle is not None:
            _c.lib.rsd_checkpoint_close(handle)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[int]:
        """Yields the handle for a call. It stays valid during the call, also if the checkpoint is closed."""
        with self._lock:
            handle = self.handle
            self._nusers += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._nusers -= 1
                later, self._later = (None, self._later) if self._nusers else (self._later, None)
            if later is not None:
                _c.lib.rsd_checkpoint_close(later)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- queries --

    @property
    def format(self) -> str:
        """ "dcp", "safetensors", "torch.save", "fsdp", "deepspeed", "megatron" or "orbax"."""
        with self.in_use() as handle:
            return _c.lib.rsd_format_name(_c.lib.rsd_checkpoint_format(handle)).decode()

    @property
    def save_id(self) -> Optional[str]:
        """The id that torch assigned to the save."""
        with self.in_use() as handle:
            found = _c.lib.rsd_checkpoint_save_id(handle)
        return None if found is None else found.decode()

    @property
    def files(self) -> List[str]:
        """The files that contain tensors."""
        if self._files is None:
            with self.in_use() as handle:
                self._files = [os.fsdecode(_c.lib.rsd_checkpoint_file(handle, index))
                               for index in range(_c.lib.rsd_checkpoint_nfiles(handle))]
        return self._files

    @property
    def notes(self) -> List[str]:
        """What a user should know of the checkpoint and cannot see in it, such as files that were not read."""
        found: List[str] = []
        with self.in_use() as handle:
            while (note := _c.lib.rsd_checkpoint_note(handle, len(found))) is not None:
                found.append(note.decode(errors="replace"))
        return found

    def presets(self, mesh: AnyMesh = None) -> List[str]:
        """Returns the presets of `convert` and `split` that fit the names of the tensors and the `mesh`, such as
        ["llama-tp", "fsdp", "replicate"]. Of those for tensor parallelism, the best is the first."""
        with self.in_use() as handle:
            return opening.fitting_presets(handle, None if mesh is None else Mesh.of_any(mesh))

    @property
    def plain_values(self) -> "_Values":
        """Values that are not tensors (step counts, learning rates, names), by name. Tuples are lists, and a value
        that is not plain, such as an object of a class, is reshard.OPAQUE."""
        if self._values is None:
            self._values = _Values(self)
        return self._values

    def __getitem__(self, name: str) -> LazyTensor:
        if not isinstance(name, str):
            raise TypeError(f"name of a tensor must be text, not a {type(name).__name__}: {name!r}")
        return LazyTensor(self, self._find(name))

    def _find(self, name: str) -> int:
        index = Int64()
        if not states.is_name(name):
            raise MissingError(f"{self.path}: the checkpoint has no tensor {name!r}")
        try:
            with self.in_use() as handle:
                _c.lib.rsd_checkpoint_find(handle, name.encode(), C.byref(index))
        except MismatchError as error:
            raise MissingError(error.message) from None
        return index.value

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self._find(name) >= 0
        except KeyError:
            return False

    def __iter__(self) -> Iterator[str]:
        if self._names is None:
            about, names = _c.TensorInfo(), []
            with self.in_use() as handle:
                for index in range(_c.lib.rsd_checkpoint_ntensors(handle)):
                    _c.lib.rsd_checkpoint_tensor(handle, index, C.byref(about))
                    names.append(about.name.decode())
            self._names = names
        return iter(self._names)

    def __len__(self) -> int:
        with self.in_use() as handle:
            return _c.lib.rsd_checkpoint_ntensors(handle)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        if self._handle is None:
            return f"<checkpoint {self.path}, closed>"
        return f"<checkpoint {self.path}: {self.format}, {len(self)} tensors>"

    def _picture(self, *names: str) -> Optional[str]:
        """Returns the picture of the command for the checkpoint, or for a tensor."""
        if self._handle is None or self._words is None:
            return None
        return pictures.of_command("inspect", *self._words, "--", os.path.abspath(self.path)
                                   if not is_url(self.path) else self.path, *names)

    def _repr_svg_(self) -> Optional[str]:
        """A picture for notebooks: what each file contains, as `reshard inspect --svg` draws it."""
        return self._picture()

    def _repr_html_(self) -> str:
        """The picture and the tensors, for notebooks."""
        if self._handle is None:
            return pictures.page(None, f"<p>{escape(repr(self))}</p>")
        tensors = [self[name] for name in itertools.islice(self, pictures.MOST_ROWS)]
        rows = [(one.name, f"{one.dtype}{list(one.shape)}", one.nbytes, one.nboxes) for one in tensors]
        listed = pictures.table(("tensor", "dtype and shape", "bytes", "boxes"), rows, len(self))
        summary = f"<summary>{escape(repr(self)[1:-1])}</summary>"
        return pictures.page(self._repr_svg_(), f"<details>{summary}{listed}</details>")

    # -- loading --

    def load(self, state: Any, *, layouts: Optional[Mapping[str, Union[str, Layout]]] = None,
             rank: Optional[int] = None, strict: bool = True, cast: bool = False,
             pool: AnyPool = None, threads: Optional[int] = None, max_nbytes: Union[str, int] = 0,
             max_memory: Union[str, int] = 0, progress: Optional[Progress] = None,
             transport: Optional[AnyTransport] = None, timeout: float = 0.0) -> Report:
        """Fills the arrays of `state`, a state dict, nested or with dotted names, and replaces its values; or fills a
        list of `Local`.

        layouts     layouts of tensors that are not whole, by name
        rank        the rank whose arrays the state has. Default: all, or that of the transport
        strict      False: entries that the checkpoint lacks stay unchanged
        cast        True: elements are converted to the dtypes of the arrays
        pool, threads   a Pool or a number of threads. Default: one thread per CPU of the process
        max_nbytes, max_memory  limit of the buffers; two words for one option. Default: 256 MB
        progress    called with the bytes done and the bytes in total; an exception stops the work
        transport   the ranks that load together
        timeout     seconds without a heartbeat after which a rank counts as lost. Default: 300

        A tensor is whole, unless `layouts` has its name. Then the state has the list of the arrays of `rank` in
        that layout (of all ranks, if it is None), or a single array. The checkpoint must contain everything in the
        state, with the same dtypes, and values must be plain. With `strict=False`, other entries stay unchanged.
        With `cast=True`, elements are converted. Everything is checked before data is read.

        With a `transport` the call is collective: every rank passes its own arrays, `rank` is by default its rank
        in the transport. All ranks raise the same error."""
        if rank is None and transport is not None:
            rank = AnyTransport.checked(transport).rank
        values: Dict[str, states.Leaf] = {}
        if isinstance(state, Mapping):
            tensors, values = self._sorted(state, layouts, rank)
        elif layouts is not None or (rank is not None and transport is None):
            raise InvalidError("layouts and rank require a state dict")
        else:
            tensors = local.listed(state)
        missing = [one.name for one in tensors if one.name not in self]
        missing += [name for name in values if name not in self.plain_values]
        if missing and strict:
            raise MissingError(f"the checkpoint lacks {_listed(missing)}{opening.other_prefix(missing[0], self)}")
        found = {name: self.plain_values[name] for name in values if name in self.plain_values}
        opaque = [name for name, value in found.items() if value is OPAQUE]
        if opaque and strict:
            raise UnsupportedError(f"values that are not plain cannot be loaded: {_listed(opaque)}; "
                                   "strict=False leaves these entries unchanged")
        report = self._load([one.struct(writable=True, cast=cast) for one in tensors],
                            local.either("pool", pool, "threads", threads), missing=not strict, cast=cast,
                            max_nbytes=local.either("max_nbytes", max_nbytes, "max_memory", max_memory),
                            progress=progress, transport=transport, timeout=timeout)
        for name, value in found.items():
            if value is not OPAQUE:
                states.put(values[name], name, value)
        return report

    def _sorted(self, state: Any, layouts: Optional[Mapping[str, Union[str, Layout]]],
                rank: Optional[int]) -> Tuple[List[Local], Dict[str, states.Leaf]]:
        """Returns the tensors of a state dict, and its other entries."""
        leaves = states.flatten(state, layouts or {})
        tensors, values = [], {}
        for name in layouts or {}:
            if name not in leaves:
                raise MissingError(f"layouts has {name}, which is not in the state")
        for name, leaf in leaves.items():
            if layouts is not None and name in layouts:
                tensors.append(Local(name, layouts[name], leaf.what, rank))
            elif states.is_tensor(leaf.what):
                tensors.append(self._whole(name, leaf.what))
            else:
                values[name] = leaf
        return tensors, values

    def _whole(self, name: str, array: Any) -> Local:
        seen = memory.see(array, name, True)
        if (seen.raw or seen.dtype.name.startswith("u")) and name in self:
            stored = self[name]
            if seen.raw or stored._dtype.numpy is None and seen.dtype.name == f"u{8 * stored._dtype.nbytes}":
                seen = seen.fits(stored._dtype, stored.shape, name)
        return Local.whole(name, seen)

    def _load(self, locals_: Sequence[Any], pool: AnyPool, *, missing: bool = False,
              cast: bool = False, max_nbytes: Union[str, int] = 0,
              progress: Optional[Progress] = None, transport: Optional[AnyTransport] = None,
              timeout: float = 0.0) -> Report:
        stream = memory.ordered(device for one in locals_ for device in getattr(one, "devices", ()))
        call = local.Call(progress, pool, max_nbytes, transport, timeout, stream)
        options = _c.LoadOptions(allow_missing=missing, allow_cast=cast, io=call.io)
        with self.in_use() as handle:
            return call(_c.lib.rsd_load, handle, len(locals_), _c.packed(_c.Tensor, locals_), C.byref(options))

    def check_claims(self) -> None:
        """FormatError if tensors claim far more bytes than the files can have, so that no memory is allocated."""
        with self.in_use() as handle:
            _c.lib.rsd_checkpoint_check_claims(handle)

    def state_dict(self, *, like: Optional[str] = None, nested: bool = True,
                   pool: AnyPool = None) -> Dict[str, Any]:
        """Reads everything. Returns the state dict that was saved, nested if the paths are known. `like` is the kind of
        the arrays, by default that of the checkpoint; `nested=False` returns names with dots; `pool` is a Pool or a
        number of threads."""
        like = frameworks.check(self.like if like is None else like)
        tensors = {name: self[name] for name in self}
        self.check_claims()
        leaves: Dict[str, Any] = {name: frameworks.empty(one.shape, one.dtype, like, name=name)
                                  for name, one in tensors.items()}
        # New arrays are dense, for any dtype and shape of the framework.
        made = [Local(name, Layout.whole(one.dtype, one.shape),
                      [memory.Memory(memory.see(leaves[name], name).address, one._dtype, one.shape, None, True,
                                     leaves[name])], 0) for name, one in tensors.items()]
        self._load([one.struct(writable=True) for one in made], pool)
        values = _Values(self)
        leaves.update(values)
        if not nested:
            return leaves
        paths = {name: tensors[name].path if name in tensors else values.path(name) for name in leaves}
        return states.unflatten(leaves, paths, self.path)


def open(path: Pathlike, *, like: str = "auto",  # noqa: A001 (reshard.open)
         format: Optional[str] = None, metadata: Optional[str] = None, as_is: bool = False,
         take_rank_0: bool = False, model_dtype: bool = False, unstack: bool = False,
         vocab_size: int = 0, from_rules: Sequence[str] = (), from_mesh: AnyMesh = None,
         names: Optional[Pathlike] = None, heads: Union[int, Tuple[int, int]] = 0,
         follow_links: bool = False, storage: Optional[Storage] = None) -> Checkpoint:
    """Opens the checkpoint at `path`: a directory of DCP or safetensors, a torch.save file, the per-rank files of verl,
    SkyRL and FSDP, or a directory of DeepSpeed, Megatron or Orbax. Pickles are parsed as data, and nothing in a file is
    executed. `path` may be s3://BUCKET/PREFIX or https://HOST/PATH.

    like        kind of the arrays: "auto" (NumPy, ml_dtypes for bfloat16 and float8 if it is installed, else torch,
                else the bits), "numpy", "torch", "raw" or "memoryview"
    format      "dcp", "safetensors", "torch.save", "fsdp", "deepspeed", "megatron" or "orbax". Default: detected
    metadata    the metadata file to use, such as "__3.metadata" of a rank that saved without collectives
    as_is       open one rank's file of several by itself, with the parts that it has
    take_rank_0 take the lowest rank's copy where copies of a tensor differ, which is an error otherwise
    model_dtype read DeepSpeed's parameters as the model file has them, not in fp32
    unstack     read Megatron's stacked layers as one tensor per layer
    vocab_size  number of rows of Megatron's padded vocabulary. Default: all
    from_rules  rules "RE=S(1)" that say how tensor-parallel ranks of Megatron cut parameters that the library does not
                know, or with `from_mesh` how ranks cut tensors
    from_mesh   the mesh of a directory with one file per rank, which do not say how tensors are cut. Tensors that no
                rule matches are copies
    names       read tensors under other names: a map such as "megatron-llama", or the path of a file of one (see
                docs/names.md)
    heads       number of attention heads, or a pair with that of keys and values, if the checkpoint does not say
    follow_links    follow links that lead out of the directory
    storage     credentials and limits of a URL. Default: those of the environment
    """
    return Checkpoint(path, like=like, format=format, metadata=metadata, as_is=as_is, take_rank_0=take_rank_0,
                      model_dtype=model_dtype, unstack=unstack, vocab_size=vocab_size, from_rules=from_rules,
                      from_mesh=from_mesh, names=names, heads=heads, follow_links=follow_links, storage=storage)
