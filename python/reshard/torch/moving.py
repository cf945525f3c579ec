"""Moves DTensors from any layout to any other, on one mesh or between meshes.

    redistribute(x, mesh, [Shard(1)])              as x.redistribute(mesh, [Shard(1)])
    distribute_tensor(tensor, mesh, [Shard(0)])    as in torch, from any rank
    full_tensor(x), full_tensor(x, dst_rank=0)     as x.full_tensor(), or on one rank only

Every rank of the meshes makes the same call. Other ranks may make it too, without effect.
"""
from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .. import dtypes
from ..errors import InvalidError, MismatchError
from ..layout import Layout
from ..plan import Plan
from .bound import MAX_PLANS, Home, home_of_ranks
from .layouts import (DTensor, _MaskPartial, _StridedShard, dt, layout_on, mesh_key, mesh_ranks, normalized,
                      ordered_layout_on, placements_of, same_places, without_masks)
from .operator import (OUTSIDE, Move, is_simulated, is_traced, operator, redistribute_simulated, union)
from .pending import later


def direct_device(device: torch.device) -> torch.device:
    """Returns the device on which results for a device are made: itself, or the CPU if the library does not use its
    memory."""
    return device if device.type == "cuda" and torch.version.cuda is not None else torch.device("cpu")


def _mesh_and_placements(mesh: Any, placements: Optional[Sequence[Any]], ndim: int) -> Tuple[Any, ...]:
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"a mesh is a DeviceMesh, not a {type(mesh).__name__}: {mesh!r}")
    if placements is None:
        placements = [dt.Replicate()] * mesh.ndim
    return normalized(placements, mesh, ndim)


# ---- strided shards ----


def _readings(dtype: Any, shape: Sequence[int], mesh: Any, placements: Sequence[Any],
              home: Home) -> Tuple[Layout, Optional[Layout]]:
    """Returns the layout, and the other meaning of its strided shards if it differs."""
    key = (dtype, tuple(shape), mesh_key(mesh), tuple(placements))
    if key not in home.readings:
        if len(home.readings) >= MAX_PLANS:
            home.readings.clear()
        home.readings[key] = _read(dtype, shape, mesh, placements, home)
    found: Tuple[Layout, Optional[Layout]] = home.readings[key]
    return found


def _read(dtype: Any, shape: Sequence[int], mesh: Any, placements: Sequence[Any],
          home: Home) -> Tuple[Layout, Optional[Layout]]:
    plain = layout_on(dtype, shape, mesh, placements, home.numbers)
    ordered = ordered_layout_on(dtype, shape, mesh, placements, home.numbers)
    if ordered is not None and same_places(plain, ordered, [home.numbers[one] for one in mesh_ranks(mesh)]):
        ordered = None
    return plain, ordered


_FITS_PLAIN, _FITS_ORDERED = 1, 2


def _ordered(x: Any, local: Optional[torch.Tensor], readings: Tuple[Layout, Optional[Layout]],
             home: Home) -> bool:
    """Collective if strided shards have two meanings. Torch creates both kinds, mostly without a mark. The shapes
    of the local tensors of all ranks decide."""
    plain, ordered = readings
    if ordered is None:
        return False
    if placements_of(x) != tuple(x.placements):
        return True  # the spec has an order of axes
    fits = 0
    for bit, one in ((_FITS_PLAIN, plain), (_FITS_ORDERED, ordered)):
        arrays = one.arrays(home.rank)
        if not arrays or (local is not None and tuple(local.shape) == arrays[0].shape):
            fits |= bit
    everybody = _FITS_PLAIN | _FITS_ORDERED
    for bits in home.gathered(fits):
        everybody &= bits
    if not everybody:
        raise MismatchError(f"the local tensors match neither {plain} nor {ordered}")
    return not everybody & _FITS_PLAIN


# ---- redistribute ----


def _nothing(ndim: int, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """Returns the local tensor of a rank without a part, for from_local. Without dims it has one element, because
    torch ignores an empty shape and uses that of this tensor."""
    return torch.empty((0,) * ndim, dtype=dtype, device=device)


def _outside(x: Any, needs_grad: bool = False) -> Any:
    """Replaces the local tensor of a rank outside of the mesh by an empty one, as in torch. If it needs a gradient it
    has the dims of the DTensor, since the backward of to_local requires them; without dims it has one element."""
    if x.device_mesh.get_coordinate() is None:
        x._local_tensor = x._local_tensor.new_zeros((0,) * x.ndim if needs_grad else OUTSIDE)
    return x


def _terms_of(x: Any, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """Returns the local terms of a DTensor. Those of a sharded embedding are masked: rows that other ranks have count
    as 0 when they are combined."""
    local: torch.Tensor = x._local_tensor
    masks = [one.mask_buffer for axis, one in enumerate(x.placements) if isinstance(one, _MaskPartial)
             and not (mesh == x.device_mesh and placements[axis] == one)]
    if masks:
        local = local.clone()
    for mask in masks:
        mask.apply_mask(local)
        mask.release_mask()
    return local


class _Moving:
    """One redistribution of x: to placements on a mesh, or whole to one rank."""

    def __init__(self, x: Any, mesh: Any, placements: Tuple[Any, ...], dtype: torch.dtype, to_plain: bool = False,
                 dst_rank: Optional[int] = None) -> None:
        self.x, self.mesh, self.dtype, self.to_plain, self.dst_rank = x, mesh, dtype, to_plain, dst_rank
        self.src_mesh, self.shape = x.device_mesh, tuple(map(int, x.shape))
        self.src_placements, self.placements = without_masks(placements_of(x)), without_masks(placements)
        self.ranks = union(mesh_ranks(self.src_mesh), mesh_ranks(mesh) if dst_rank is None else [dst_rank])
        self.local = _terms_of(x, mesh, placements)

    @property
    def _is_strided(self) -> bool:
        return any(isinstance(one, _StridedShard) for one in (*self.src_placements, *self.placements))

    def run(self, async_op: bool = False) -> Tuple[Optional[torch.Tensor], bool]:
        """Collective. Returns this rank's part in the other layout, or None if it has none, and whether the strided
        shards of the source are cut left to right. With `to_plain`, those of the result are."""
        x, mesh, dtype, shape = self.x, self.mesh, self.dtype, self.shape
        home = home_of_ranks(self.ranks, (self.src_mesh, mesh))
        inside = self.src_mesh.get_coordinate() is not None
        local = self.local.to(dtype) if inside else None
        src, dst = None, None
        plain = False
        if self._is_strided:
            readings = _readings(dtype, shape, self.src_mesh, self.src_placements, home)
            ordered = _ordered(x, local, readings, home)
            src, plain = readings[int(ordered)], readings[1] is not None and not ordered
            # Torch reads strided shards that it creates itself as an order of axes.
            left_to_right, other = _readings(dtype, shape, mesh, self.placements, home)
            dst = left_to_right if self.to_plain else other or left_to_right
        key = ("redistribute", mesh_key(self.src_mesh), self.src_placements, mesh_key(mesh), self.placements, shape,
               dtype, plain, self.to_plain, self.dst_rank)

        def make() -> Plan:
            whole = None if self.dst_rank is None else Layout.whole(dtype, shape, home.numbers[self.dst_rank])
            return Plan(src or layout_on(dtype, shape, self.src_mesh, self.src_placements, home.numbers),
                        whole or dst or layout_on(dtype, shape, mesh, self.placements, home.numbers))

        own = [] if local is None else [local]
        device = direct_device(_device(mesh, x._local_tensor.device))
        if not async_op:
            made = home.run(key, make, own, device)
            return made[0] if made else None, plain
        made, pending = home.start(key, make, own, device)
        return later(made[0], pending) if made else None, plain

    def move(self) -> Move:
        """Returns the move of the operator."""
        return _move_of(self.dtype, self.shape, self.src_mesh, self.src_placements, self.mesh, self.placements)


def _move_of(dtype: torch.dtype, shape: Sequence[int], src_mesh: Any, src_placements: Sequence[Any], mesh: Any,
             placements: Sequence[Any]) -> Move:
    """Returns a move. Strided shards are read as an order of axes where that is possible."""
    ranks = union(mesh_ranks(src_mesh), mesh_ranks(mesh))
    numbers = {rank: number for number, rank in enumerate(ranks)}
    src, dst = (ordered_layout_on(dtype, shape, one, found, numbers) or layout_on(dtype, shape, one, found, numbers)
                for one, found in ((src_mesh, src_placements), (mesh, placements)))
    return Move(ranks, src, dst)


def _moved(x: Any, mesh: Any, placements: Tuple[Any, ...], dtype: torch.dtype, to_plain: bool,
           async_op: bool) -> Tuple[torch.Tensor, bool]:
    """Returns the local tensor in another layout, and whether the strided shards of x are cut left to right."""
    moving = _Moving(x, mesh, placements, dtype, to_plain)
    if is_simulated(x._local_tensor):
        return redistribute_simulated(moving.local.to(dtype), moving.move()), False
    if is_traced(x._local_tensor):
        return operator(moving.local.to(dtype), moving.move().text()), False
    made, plain = moving.run(async_op) if dist.get_rank() in moving.ranks else (None, False)
    return _nothing(x.ndim, dtype, x._local_tensor.device) if made is None else made, plain


class _Redistribute(torch.autograd.Function):
    """Moves a tensor from one layout to another. Backward moves the gradient from its layout to that of the input,
    where Partial becomes Replicate."""

    @staticmethod
    def forward(ctx: Any, x: Any, mesh: Any, placements: Tuple[Any, ...], dtype: torch.dtype,
                out_dtype: torch.dtype, backward_dtype: Optional[torch.dtype], to_plain: bool, async_op: bool) -> Any:
        ctx.mesh, ctx.placements, ctx.dtype = x.device_mesh, placements_of(x), x._local_tensor.dtype
        ctx.backward_dtype, ctx.forward_dtype, ctx.plain, ctx.async_op = backward_dtype, dtype, False, async_op
        device = x._local_tensor.device
        if mesh == x.device_mesh and placements == ctx.placements:
            local = x._local_tensor.to(dtype).to(out_dtype)
        else:
            local, ctx.plain = _moved(x, mesh, placements, dtype, to_plain, async_op)
            where = local.device if local.is_meta else _device(mesh, device)
            if local.dtype != out_dtype or local.device != where:
                local = local.to(where, out_dtype)
        # Not from_local, which is a second function of autograd and takes as long as all the rest.
        about = x._spec.tensor_meta._replace(dtype=out_dtype)
        made = DTensor(local, type(x._spec)(mesh, placements, tensor_meta=about), requires_grad=False)
        return made if is_simulated(local) else _outside(made, ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        same = gradient.device_mesh == ctx.mesh
        placements = []
        for axis, one in enumerate(ctx.placements):
            kept = one.is_partial() and same and gradient.placements[axis] == one
            placements.append(one if kept or not one.is_partial() else dt.Replicate())
        made = _Redistribute.apply(gradient, ctx.mesh, tuple(placements), ctx.backward_dtype or ctx.dtype,
                                   ctx.dtype, ctx.forward_dtype, ctx.plain, ctx.async_op)
        return made, None, None, None, None, None, None, None


def _device(mesh: Any, device: torch.device) -> torch.device:
    """Returns the device of results on a mesh: that of the input, if its type is that of the mesh."""
    if device.type == mesh.device_type:
        return device
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, getattr(torch, mesh.device_type).current_device())


class PartialTargetError(InvalidError, RuntimeError):
    """Raised for a target that is Partial where the input is not. Torch raises RuntimeError."""


def _check_partials(src_mesh: Any, src_placements: Sequence[Any], mesh: Any, placements: Sequence[Any]) -> None:
    for axis, one in enumerate(placements):
        if one.is_partial() and (mesh != src_mesh or src_placements[axis] != one):
            now = src_placements[axis] if mesh == src_mesh else "another mesh"
            raise PartialTargetError(f"Can not redistribute from {now} to {one}: which rank holds "
                                     "which term is not defined")


def _check_type(x: Any) -> None:
    if not isinstance(x, DTensor):
        raise InvalidError(f"a {type(x).__name__} is not a DTensor")


def redistribute(x: Any, device_mesh: Optional[Any] = None, placements: Optional[Sequence[Any]] = None, *,
                 async_op: bool = False, forward_dtype: Optional[torch.dtype] = None,
                 backward_dtype: Optional[torch.dtype] = None) -> Any:
    """Collective in the ranks of both meshes. Returns `x` with `placements` on `device_mesh`, by default that of `x`:
    as `x.redistribute` with the same arguments, but between any two layouts and meshes. Differentiable, for any
    placements of the gradient. With `async_op` the local tensor of the result is waited for at its first use, as in
    torch. `forward_dtype` and `backward_dtype` are those of the result and of its gradient.

    Tensors in memory of CUDA devices are moved there, in the order of the current stream. Without `async_op` the
    call returns when all data has arrived. It also works under torch.compile, and in FakeTensor and LocalTensor modes.

    InvalidError, which is a RuntimeError as in torch: a target that is Partial where `x` is not."""
    _check_type(x)
    mesh = x.device_mesh if device_mesh is None else device_mesh
    if torch.compiler.is_dynamo_compiling():
        return _compiled(x, mesh, placements, forward_dtype, backward_dtype)
    made = _mesh_and_placements(mesh, placements, x.ndim)
    _check_partials(x.device_mesh, x.placements, mesh, made)
    if mesh != x.device_mesh and torch.is_grad_enabled():
        x = _with_grad(x, mesh)
    dtype = forward_dtype or x._local_tensor.dtype
    return _Redistribute.apply(x, mesh, made, dtype, dtype, backward_dtype, False, async_op)


# ---- torch.compile ----


def _constant(function: Any) -> Any:
    """Marks a function whose result torch.compile takes as a constant, as torch._dynamo.assume_constant_result, which
    takes seconds to import."""
    function._dynamo_marked_constant = True
    return function


@_constant
def _targets(mesh: Any, placements: Optional[Sequence[Any]], src_mesh: Any, src_placements: Sequence[Any],
             ndim: int) -> Tuple[Any, ...]:
    made = _mesh_and_placements(mesh, placements, ndim)
    _check_partials(src_mesh, src_placements, mesh, made)
    return made


@_constant
def _text(dtype: torch.dtype, shape: Tuple[int, ...], src_mesh: Any, src_placements: Sequence[Any], mesh: Any,
          placements: Sequence[Any], backward_dtype: Optional[torch.dtype]) -> str:
    move = _move_of(dtype, shape, src_mesh, src_placements, mesh, placements)
    return move._replace(backward_dtype=None if backward_dtype is None else dtypes.dtype(backward_dtype).name).text()


def _compiled(x: Any, mesh: Any, placements: Optional[Sequence[Any]], dtype: Optional[torch.dtype],
              backward_dtype: Optional[torch.dtype]) -> Any:
    """The same in terms that torch.compile understands: the local tensors, and the operator between them."""
    src_mesh, before, shape = x.device_mesh, x.placements, tuple(x.shape)
    made = _targets(mesh, placements, src_mesh, before, x.ndim)
    if any(isinstance(one, _MaskPartial) for one in before):
        # The mask is a buffer that torch fills.
        return x.redistribute(mesh, made, forward_dtype=dtype, backward_dtype=backward_dtype)
    local = x.to_local(grad_placements=[dt.Replicate() if one.is_partial() else one for one in before])
    if dtype is not None:
        local = local.to(dtype)
    if mesh != src_mesh or made != tuple(before):
        local = operator(local, _text(local.dtype, shape, src_mesh, before, mesh, made, backward_dtype))
    return DTensor.from_local(local, mesh, made, run_check=False, shape=x.shape, stride=x.stride())


def _with_grad(x: Any, mesh: Any) -> Any:
    """Collective if the meshes have different ranks. A rank without a part of x takes part in backward if the
    others do."""
    before, after = mesh_ranks(x.device_mesh), mesh_ranks(mesh)
    ranks = union(before, after)
    if tuple(sorted(before)) == ranks or dist.get_rank() not in ranks:
        return x
    needed = any(home_of_ranks(ranks, (x.device_mesh, mesh)).gathered(int(x.requires_grad)))
    return x.detach().requires_grad_() if needed and not x.requires_grad else x


# ---- from one rank, and to one ----


def distribute_tensor(tensor: torch.Tensor, device_mesh: Any, placements: Optional[Sequence[Any]] = None,
                      src_rank: Optional[int] = None, *, src_data_rank: Optional[int] = 0) -> Any:
    """Collective in the ranks of the mesh and of the source, whose tensor becomes a DTensor. The others pass a tensor
    of the same shape and dtype whose values are ignored, such as torch.empty(..., device="meta").

    device_mesh     the mesh of the result
    placements      one per mesh axis. Default: replicated
    src_rank        the source as a rank of the world, also outside of the mesh. Default: see src_data_rank
    src_data_rank   the source as in torch: the rank that has this coordinate on every mesh axis. Default: 0, the first
                    rank of the mesh. None: every rank of the mesh takes its part of its own tensor

    A Partial placement gets its terms as in torch: a sum is divided among the ranks, and average, minimum
    and maximum have the value itself."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor takes a tensor, not a {type(tensor).__name__}")
    made = _mesh_and_placements(device_mesh, placements, tensor.ndim)
    if isinstance(tensor, DTensor):
        if (device_mesh, made) == (tensor.device_mesh, tensor.placements):
            return tensor
        raise InvalidError("the tensor is a DTensor with another mesh or other placements; use redistribute")
    if not tensor.is_leaf:
        raise InvalidError("distribute_tensor needs a leaf tensor")
    ranks, me = mesh_ranks(device_mesh), dist.get_rank()
    origin = _origin(device_mesh, src_rank, src_data_rank)
    whole = tuple(dt.Replicate() if one.is_partial() else one for one in made)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    local = _nothing(tensor.ndim, dtype, device_mesh.device_type)
    everybody = ranks if origin is None else union(ranks, [origin])
    if me in everybody:
        home = home_of_ranks(everybody, (device_mesh,))
        key = ("distribute", origin, mesh_key(device_mesh), whole, shape, dtype)

        def make() -> Plan:
            source = Layout.whole(dtype, shape, home.numbers[me if origin is None else origin])
            if origin is None:  # all ranks have it
                everywhere = [dt.Replicate()] * device_mesh.ndim
                source = layout_on(dtype, shape, device_mesh, everywhere, home.numbers)
            return Plan(source, layout_on(dtype, shape, device_mesh, whole, home.numbers))

        device = _device(device_mesh, tensor.device)
        if origin is None and tensor.is_meta:
            arrays = layout_on(dtype, shape, device_mesh, whole, home.numbers).arrays(home.rank)
            device, found = tensor.device, [tensor.new_empty(one.shape) for one in arrays]
        else:
            found = home.run(key, make, [tensor] if origin in (me, None) else [], direct_device(device))
        if found:
            local = _terms(found[0], made, device_mesh).to(device)
    x = _outside(DTensor.from_local(local, device_mesh, made, run_check=False, shape=tensor.shape,
                                    stride=_dense(tensor.shape)))
    return x.requires_grad_(tensor.requires_grad)


def _origin(mesh: Any, src_rank: Optional[int], src_data_rank: Optional[int]) -> Optional[int]:
    """Returns the rank of the world that has the tensor to distribute, or None if each rank has it."""
    if src_rank is not None:
        if src_data_rank != 0:
            raise InvalidError("src_rank and src_data_rank exclude each other: pass one of them")
        if not 0 <= src_rank < dist.get_world_size():
            raise InvalidError(f"src_rank {src_rank} out of range: the world has {dist.get_world_size()} ranks")
        return src_rank
    if src_data_rank is None:
        return None
    if not all(0 <= src_data_rank < count for count in mesh.shape):
        raise InvalidError(f"src_data_rank {src_data_rank} out of range: the mesh has the axes {list(mesh.shape)}")
    return int(mesh.mesh[(src_data_rank,) * mesh.ndim])


def _dense(shape: Sequence[int]) -> Tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _terms(local: torch.Tensor, placements: Sequence[Any], mesh: Any) -> torch.Tensor:
    for axis, one in enumerate(placements):
        if one.is_partial():
            if one.reduce_op == "sum":
                local = local / mesh.size(axis)
            elif one.reduce_op not in ("avg", "min", "max"):
                raise InvalidError(f"{one} is not supported, as in torch")
    return local


def full_tensor(x: Any, dst_rank: Optional[int] = None, *,
                grad_placements: Optional[Sequence[Any]] = None) -> Optional[torch.Tensor]:
    """Collective in the ranks of the mesh. Returns the whole tensor on every rank of the mesh, as
    `x.full_tensor()`, which is differentiable. With `dst_rank`, a rank of the world, returns it on that rank
    only, and None on the others, which is not differentiable. `grad_placements` are those of the gradient, as in
    torch."""
    _check_type(x)
    mesh, whole = x.device_mesh, (dt.Replicate(),) * x.device_mesh.ndim
    if dst_rank is None:
        gathered: torch.Tensor = redistribute(x, mesh, whole).to_local(grad_placements=grad_placements)
        return gathered
    if grad_placements is not None:
        raise InvalidError("grad_placements and dst_rank exclude each other: a tensor on one rank has no gradient")
    if not 0 <= dst_rank < dist.get_world_size():
        raise InvalidError(f"dst_rank {dst_rank} out of range: the world has {dist.get_world_size()} ranks")
    moving = _Moving(x, mesh, whole, x._local_tensor.dtype, dst_rank=dst_rank)
    made = moving.run()[0] if dist.get_rank() in moving.ranks else None
    return None if made is None else made.to(x._local_tensor.device)
