"""Keeps activations in slices until backward: input_reshard, as in torch.

Under tensor parallelism every rank saves the same activations for backward. With input_reshard each of m ranks keeps
1/m of the elements, and backward gathers them.

    saved tensor --cut--> slice ... slices --gather--> tensor, with the same bits and strides
"""
from __future__ import annotations

import threading
import types
import weakref
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import dtypes, proving
from ..errors import Error
from ..layout import Layout, Mesh
from ..plan import Plan
from .bound import Home, home_of_ranks, waited
from .layouts import DTensor, mesh_ranks, placements_of
from .moving import direct_device

_live: "weakref.WeakSet[_Slice]" = weakref.WeakSet()


class Stashed(NamedTuple):
    """The memory of saved tensors on this rank: `nbytes_kept` of `nbytes_whole`. `nwhole` of the `nbuffers` are
    kept whole, because they differ between ranks or have too few elements."""

    nbuffers: int
    nwhole: int
    nbytes_kept: int
    nbytes_whole: int


def stashed() -> Stashed:
    """Returns the memory that all modules with input_reshard keep for backward. Parameters are not counted."""
    found = list(_live)
    return Stashed(len(found), sum(one.part is None for one in found), sum(one.nbytes_kept for one in found),
                   sum(one.nbytes for one in found))


class _Slice:
    """This rank's part of a flat list of elements, or the whole list if ranks have different ones."""

    def __init__(self, home: Home, flat: torch.Tensor, whole: bool) -> None:
        self.home, self.dtype, self.device, self.numel = home, flat.dtype, flat.device, flat.numel()
        self.nbytes = flat.numel() * flat.element_size()
        self.part: Optional[torch.Tensor] = None
        self.nbytes_kept = self.nbytes
        if not whole:
            rank, nranks = home.rank, home.nranks
            length, longer = divmod(self.numel, nranks)  # as B(0): the first ones have one more
            first = rank * length + min(rank, longer)
            self.part = flat[first:first + length + (rank < longer)].clone()
            self.nbytes_kept = self.part.numel() * self.part.element_size()
        _live.add(self)

    def gather(self) -> torch.Tensor:
        """Collective. Returns all elements."""
        assert self.part is not None
        found = self.home.run(("stash", self.numel, self.dtype), self._plan, [self.part],
                              direct_device(self.device))
        return found[0].to(self.device)

    def _plan(self) -> Plan:
        dtype, mesh = dtypes.dtype(self.dtype), Mesh.of([self.home.nranks])
        return Plan(Layout.on(dtype, (self.numel,), mesh, "B0"), Layout.on(dtype, (self.numel,), mesh, "R"))


class _Kept:
    """A saved tensor that is kept whole. As in autograd, a later change of the tensor is an error."""

    def __init__(self, tensor: torch.Tensor, counted: Optional[_Slice] = None) -> None:
        self.tensor, self.version, self.counted = tensor.detach(), tensor._version, counted

    def back(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(f"a tensor of shape {list(self.tensor.shape)} that backward needs has been "
                               f"modified by an inplace operation: it is at version {self.tensor._version}, "
                               f"and version {self.version} was saved")
        return self.tensor


class _Cut:
    """A saved tensor of which this rank keeps a slice."""

    def __init__(self, slice_: _Slice, view: "_View", wrapped: Optional[Any]) -> None:
        self.slice, self.view = slice_, view
        self.wrapped = None if wrapped is None else (
            wrapped.device_mesh, placements_of(wrapped), wrapped.shape, wrapped.stride())

    def back(self) -> torch.Tensor:
        local = self.view.of(self.slice.gather())
        if self.wrapped is None:
            return local
        mesh, placements, shape, stride = self.wrapped
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _View(NamedTuple):
    """The shape and strides of a tensor in a flat list of elements without gaps."""

    shape: Tuple[int, ...]
    strides: Tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in such a list."""
        return flat.as_strided(self.shape, self.strides)


def _flattened(tensor: torch.Tensor) -> Tuple[torch.Tensor, _View]:
    """Returns the elements of a tensor in memory order. Expanded dims are kept once. A tensor with gaps or overlaps
    is copied to a dense one first."""
    repeats = [stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape)]
    once, strides = tensor, tensor.stride()
    for dim, again in enumerate(repeats):
        once = once.narrow(dim, 0, 1) if again else once
    if not _is_run(once):
        once = once.contiguous()
        strides = tuple(0 if again else stride for again, stride in zip(repeats, once.stride()))
    flat = once.as_strided((once.numel(),), (1,), once.storage_offset())
    return flat, _View(tuple(tensor.shape), tuple(strides))


def _is_run(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


class _Forward:
    """One forward of a module, and the tensors that it has saved."""

    def __init__(self, owner: "_InputReshard", module: torch.nn.Module) -> None:
        self.owner = owner
        # Parameters and buffers are kept anyway: a slice would need more memory.
        self.own = {_storage(one) for one in (*module.parameters(), *module.buffers())} - {0}
        self.seen: Dict[Tuple[Any, ...], "_Known"] = {}
        self.hooks: Optional[Any] = None

    def enter(self) -> None:
        if not _in_checkpoint():
            hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda packed: packed.back())
            hooks.__enter__()
            self.hooks = hooks

    def leave(self) -> None:
        if self.hooks is not None:
            self.hooks.__exit__()
        self.seen.clear()

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns what autograd keeps instead of a tensor: a slice of it, or the tensor itself."""
        local: Any = tensor.detach()
        wrapped = local if isinstance(local, DTensor) else None
        if wrapped is not None:
            local = wrapped._local_tensor
        if type(local).__name__ == "AsyncCollectiveTensor":
            local = local.wait()
        if not _is_plain(local):
            return _Kept(tensor)
        own = _storage(local) in self.own or _is_parameter(tensor)
        local = local.resolve_conj().resolve_neg()
        flat, view = _flattened(local)
        known = self._known(flat, local._version)
        whole = wrapped is not None and not self.owner.replicates(wrapped)
        if not whole:
            whole = self._stays_whole(flat, own or not self.owner.takes(local), known)
        if own:
            return _Kept(tensor)
        slice_ = known.slices.get(whole)
        if slice_ is None:
            slice_ = known.slices[whole] = _Slice(self.owner.home(), flat, whole)
        return _Kept(tensor, slice_) if whole else _Cut(slice_, view, wrapped)

    def _known(self, flat: torch.Tensor, version: int) -> "_Known":
        """Returns the slice of these elements if they were saved before: x of three projections, or x and
        x.view(...)."""
        storage = StorageWeakRef(flat.untyped_storage())
        key = (storage.cdata, flat.storage_offset(), flat.numel(), flat.dtype, version)
        found = self.seen.get(key)
        if found is None or found.storage.expired():
            found = self.seen[key] = _Known(storage)
        return found

    def _stays_whole(self, flat: torch.Tensor, wanted: bool, known: "_Known") -> bool:
        """Returns whether a rank keeps the tensor whole, or ranks have different elements. With check Collective,
        on every call, since one rank may have nothing, or a view of a parameter, where others have a tensor."""
        if not self.owner.check:
            return wanted
        home = self.owner.home()
        if not wanted and known.digest is None:
            known.digest = proving.digest_array(waited(flat)).encode()
        said = b"-" * _DIGEST if wanted or known.digest is None else known.digest
        found = home.transport.gather(said)  # also if this rank keeps it whole
        return wanted or any(one != said for one in found)


_DIGEST = 32


class _Known:
    """Elements that were saved before, as long as their storage exists."""

    def __init__(self, storage: StorageWeakRef) -> None:
        self.storage = storage
        self.digest: Optional[bytes] = None
        self.slices: Dict[bool, _Slice] = {}  # sliced, and whole


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether it is a parameter or a view of one, also if the parameter was created during forward."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _is_plain(local: Any) -> bool:
    """Returns whether a tensor has memory that can be divided."""
    return type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout == torch.strided \
        and not local.is_meta and not local.is_quantized


def _storage(tensor: Any) -> int:
    """Returns the address of a tensor's memory, or 0."""
    while isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0  # sparse tensors and others


def _in_checkpoint() -> bool:
    """Returns whether activation checkpointing is active: saved tensors are then recomputed, and not kept."""
    try:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


class _InputReshard:
    """The hooks of one call of input_reshard."""

    def __init__(self, mesh: Any, check: bool) -> None:
        self.mesh, self.check = mesh, check
        self.ranks = tuple(sorted(mesh_ranks(mesh)))
        self._threads = threading.local()
        self._axes: Dict[Any, Optional[Tuple[int, ...]]] = {}

    def __deepcopy__(self, _: Any) -> "_InputReshard":
        return self  # copies of a module have the same ranks

    def home(self) -> Home:
        return home_of_ranks(self.ranks, (self.mesh,))

    def takes(self, local: torch.Tensor) -> bool:
        """Returns whether every rank would have a part, of a dtype that can be moved."""
        try:
            return local.numel() >= len(self.ranks) and dtypes.dtype(local.dtype) is not None
        except Error:
            return False

    def replicates(self, tensor: Any) -> bool:
        """Returns whether the ranks of the mesh have the same local tensor of a DTensor of any mesh."""
        mesh = tensor.device_mesh
        if mesh not in self._axes:
            self._axes[mesh] = self._differing(mesh)
        axes = self._axes[mesh]
        return axes is not None and all(tensor.placements[axis].is_replicate() for axis in axes)

    def _differing(self, mesh: Any) -> Optional[Tuple[int, ...]]:
        """Returns the axes of a mesh along which the ranks differ, or None if the mesh does not have all of them."""
        places: List[Sequence[int]] = []
        for rank in self.ranks:
            found = (mesh.mesh == rank).nonzero()
            if len(found) != 1:
                return None
            places.append(found[0].tolist())
        return tuple(axis for axis in range(mesh.ndim) if len({place[axis] for place in places}) > 1)

    # Forwards of one module can be nested, and can run in several threads.

    def before(self, module: torch.nn.Module, _: Any) -> None:
        stack = self._threads.__dict__.setdefault("stack", [])
        stack.append(_Forward(self, module))
        stack[-1].enter()

    def after(self, _: torch.nn.Module, __: Any, ___: Any) -> None:
        self.leave_to(self.depth() - 1)

    def depth(self) -> int:
        """Returns the number of forwards in progress in this thread."""
        return len(self._threads.__dict__.get("stack", ()))

    def leave_to(self, depth: int) -> None:
        """Ends forwards, the innermost first, until this number is left."""
        while self.depth() > max(0, depth):
            self._threads.stack.pop().leave()

    def guard(self, module: torch.nn.Module) -> None:
        """Ends forwards that a call left open: torch calls no hook after KeyboardInterrupt and other
        BaseExceptions, in forward or in another hook. A method, so that copies of the module have their own."""
        call = module._call_impl.__func__  # type: ignore[attr-defined]

        def guarded(called: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            depth = self.depth()
            try:
                return call(called, *args, **kwargs)
            finally:
                self.leave_to(depth)

        module._call_impl = types.MethodType(guarded, module)  # type: ignore[method-assign]


def input_reshard(module: torch.nn.Module, tp_device_mesh: Any, input_reshard_dim: Optional[int] = None, *,
                  check: bool = True) -> torch.nn.Module:
    """Keeps every tensor that autograd saves in the forward of `module` in slices, one on each rank of
    `tp_device_mesh`, until backward. Returns the module. Replaces torch.distributed.tensor.parallel.input_reshard. All
    ranks of the mesh run the same forward and backward.

    `input_reshard_dim` None turns it off. Any number has the same effect: elements are divided in memory order, so
    that all ranks have the same number for any shape.

    With `check`, ranks compare a digest of each tensor with one small message, and a tensor that differs is kept
    whole. Without it, plain tensors must be the same on all ranks. Parameters, and DTensors that are not replicated
    over these ranks, are always kept as they are."""
    if input_reshard_dim is None or tp_device_mesh.size() == 1:
        return module
    made = _InputReshard(tp_device_mesh, check)
    # The first pre-hook and the last hook, also when forward raises, so that they enclose all that is saved.
    module.register_forward_pre_hook(made.before, prepend=True)
    module.register_forward_hook(made.after, always_call=True)
    made.guard(module)
    return module
