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

from ..errors import InvalidError, MismatchError, UnsupportedError
from ..layout import Layout
from ..plan import Plan
from .bound import MAX_PLANS, Home, home_of_ranks
from .layouts import (DTensor, _StridedShard, dt, layout_on, mesh_key, mesh_ranks, normalized,
                      ordered_layout_on, placements_of, same_places)


def waited(local: torch.Tensor) -> torch.Tensor:
    """Returns a local tensor in host memory, after pending collectives, and without lazy conjugation."""
    local = local.detach()
    if hasattr(local, "wait") and not callable(getattr(local, "local_shards", None)):
        local = local.wait()  # collectives of torch may return a tensor that is not complete yet
    if hasattr(local, "local_shards"):
        raise UnsupportedError("the local tensor has several shards (LocalShardsWrapper); placements "
                               "require one")
    if local.is_meta or local.layout != torch.strided:
        raise UnsupportedError(f"the local tensor is on {local.device} with layout {local.layout}; only "
                               "strided tensors in memory are supported")
    return local.resolve_conj().resolve_neg().cpu()


def _union(*lists: Sequence[int]) -> Tuple[int, ...]:
    return tuple(sorted({rank for one in lists for rank in one}))


def _mesh_and_placements(mesh: Any, placements: Optional[Sequence[Any]], ndim: int) -> Tuple[Any, ...]:
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
        arrays = one.arrays(home.transport.rank)
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


def _outside(x: Any) -> Any:
    """Returns the local tensor of a rank outside of the mesh: without elements, or without dims one element whose
    value is ignored."""
    if x.device_mesh.get_coordinate() is None:
        x._local_tensor = x._local_tensor.new_zeros((0,) * x.ndim)
    return x


def _moved(x: Any, mesh: Any, placements: Tuple[Any, ...], dtype: torch.dtype, home: Home,
           to_plain: bool) -> Tuple[torch.Tensor, bool]:
    """Returns this rank's part of x in another layout, and whether the strided shards of x are cut left to right. With
    `to_plain`, those of the result are."""
    src_mesh, src_placements, shape = x.device_mesh, placements_of(x), tuple(x.shape)
    inside = src_mesh.get_coordinate() is not None
    local = waited(x._local_tensor).to(dtype) if inside else None
    src, dst = None, None
    plain = False
    if any(isinstance(one, _StridedShard) for one in (*src_placements, *placements)):
        readings = _readings(dtype, shape, src_mesh, src_placements, home)
        ordered = _ordered(x, local, readings, home)
        src, plain = readings[int(ordered)], readings[1] is not None and not ordered
        # Torch reads strided shards that it creates itself as an order of axes.
        left_to_right, other = _readings(dtype, shape, mesh, placements, home)
        dst = left_to_right if to_plain else other or left_to_right
    key = ("redistribute", mesh_key(src_mesh), src_placements, mesh_key(mesh), placements, shape, dtype, plain,
           to_plain)

    def make() -> Plan:
        return home.plan(src or layout_on(dtype, shape, src_mesh, src_placements, home.numbers),
                         dst or layout_on(dtype, shape, mesh, placements, home.numbers))

    made = home.run(key, make, [] if local is None else [local])
    return made[0] if made else _nothing(x.ndim, dtype), plain


class _Redistribute(torch.autograd.Function):
    """Moves a tensor from one layout to another. Backward moves the gradient from its layout to that of the input,
    where Partial becomes Replicate."""

    @staticmethod
    def forward(ctx: Any, x: Any, mesh: Any, placements: Tuple[Any, ...], dtype: torch.dtype,
                out_dtype: torch.dtype, backward_dtype: Optional[torch.dtype], to_plain: bool) -> Any:
        ctx.mesh, ctx.placements, ctx.dtype = x.device_mesh, placements_of(x), x._local_tensor.dtype
        ctx.backward_dtype, ctx.forward_dtype, ctx.plain = backward_dtype, dtype, False
        device = x._local_tensor.device
        if mesh == x.device_mesh and placements == ctx.placements:
            local = x._local_tensor.to(dtype).to(out_dtype)
        else:
            ranks = _union(mesh_ranks(x.device_mesh), mesh_ranks(mesh))
            if dist.get_rank() in ranks:
                home = home_of_ranks(ranks, (x.device_mesh, mesh))
                local, ctx.plain = _moved(x, mesh, placements, dtype, home, to_plain)
                local = local.to(_device(mesh, device), out_dtype)
            else:
                local = _nothing(x.ndim, out_dtype, device)
        return _outside(DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape,
                                           stride=x.stride()))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        same = gradient.device_mesh == ctx.mesh
        placements = []
        for axis, one in enumerate(ctx.placements):
            kept = one.is_partial() and same and gradient.placements[axis] == one
            placements.append(one if kept or not one.is_partial() else dt.Replicate())
        made = _Redistribute.apply(gradient, ctx.mesh, tuple(placements), ctx.backward_dtype or ctx.dtype,
                                   ctx.dtype, ctx.forward_dtype, ctx.plain)
        return made, None, None, None, None, None, None


def _device(mesh: Any, device: torch.device) -> torch.device:
    """Returns the device of results on a mesh: that of the input, if its type is that of the mesh."""
    if device.type == mesh.device_type:
        return device
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, getattr(torch, mesh.device_type).current_device())


class PartialTargetError(InvalidError, RuntimeError):
    """Raised for a target that is Partial where the input is not. Torch raises RuntimeError."""


def _check_partial(x: Any, mesh: Any, placements: Sequence[Any]) -> None:
    for axis, one in enumerate(placements):
        if one.is_partial() and (mesh != x.device_mesh or x.placements[axis] != one):
            now = x.placements[axis] if mesh == x.device_mesh else "another mesh"
            raise PartialTargetError(f"Can not redistribute from {now} to {one}: which rank holds "
                                     "which term is not defined")


def redistribute(x: Any, device_mesh: Optional[Any] = None, placements: Optional[Sequence[Any]] = None, *,
                 async_op: bool = False, forward_dtype: Optional[torch.dtype] = None,
                 backward_dtype: Optional[torch.dtype] = None) -> Any:
    """Collective in the ranks of both meshes. Returns `x` in another layout, as `x.redistribute` with the same
    arguments, but between any two layouts and meshes. Differentiable, for any placements of the gradient. With
    `async_op` the result is complete too.

    InvalidError, which is a RuntimeError as in torch: a target that is Partial where `x` is not."""
    if not isinstance(x, DTensor):
        raise InvalidError(f"a {type(x).__name__} is not a DTensor")
    mesh = x.device_mesh if device_mesh is None else device_mesh
    made = _mesh_and_placements(mesh, placements, x.ndim)
    _check_partial(x, mesh, made)
    if mesh != x.device_mesh and torch.is_grad_enabled():
        x = _with_grad(x, mesh)
    dtype = forward_dtype or x._local_tensor.dtype
    return _Redistribute.apply(x, mesh, made, dtype, dtype, backward_dtype, False)


def _with_grad(x: Any, mesh: Any) -> Any:
    """Collective if the meshes have different ranks. A rank without a part of x takes part in backward if the
    others do."""
    before, after = mesh_ranks(x.device_mesh), mesh_ranks(mesh)
    ranks = _union(before, after)
    if tuple(sorted(before)) == ranks or dist.get_rank() not in ranks:
        return x
    needed = any(home_of_ranks(ranks, (x.device_mesh, mesh)).gathered(int(x.requires_grad)))
    return x.detach().requires_grad_() if needed and not x.requires_grad else x


# ---- from one rank, and to one ----


def distribute_tensor(tensor: torch.Tensor, device_mesh: Any, placements: Optional[Sequence[Any]] = None,
                      src_rank: Optional[int] = None) -> Any:
    """Collective in the ranks of the mesh and `src_rank`, a rank of the world: the tensor that this rank has
    becomes a DTensor. The first rank of the mesh is the one by default, as in torch. The others pass a
    tensor of the same shape and dtype whose values are ignored, such as torch.empty(..., device="meta").

    A Partial placement gets its terms as in torch: a sum is divided among the ranks, and average, minimum
    and maximum have the value itself."""
    if isinstance(tensor, DTensor):
        raise InvalidError("the tensor is a DTensor; use redistribute")
    if not tensor.is_leaf:
        raise InvalidError("distribute_tensor needs a leaf tensor")
    made = _mesh_and_placements(device_mesh, placements, tensor.ndim)
    ranks, me = mesh_ranks(device_mesh), dist.get_rank()
    origin = ranks[0] if src_rank is None else src_rank
    if not 0 <= origin < dist.get_world_size():
        raise InvalidError(f"src_rank {origin} out of range: the world has {dist.get_world_size()} ranks")
    whole = tuple(dt.Replicate() if one.is_partial() else one for one in made)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    local = _nothing(tensor.ndim, dtype, device_mesh.device_type)
    union = _union(ranks, [origin])
    if me in union:
        home = home_of_ranks(union, (device_mesh,))
        key = ("distribute", origin, mesh_key(device_mesh), whole, shape, dtype)

        def make() -> Plan:
            return home.plan(Layout.whole(dtype, shape, home.numbers[origin]),
                             layout_on(dtype, shape, device_mesh, whole, home.numbers))

        found = home.run(key, make, [waited(tensor)] if me == origin else [])
        if found:
            local = _terms(found[0], made, device_mesh).to(_device(device_mesh, tensor.device))
    x = _outside(DTensor.from_local(local, device_mesh, made, run_check=False, shape=tensor.shape,
                                    stride=_dense(tensor.shape)))
    return x.requires_grad_(tensor.requires_grad)


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
    only, and None on the others, which is not differentiable."""
    if dst_rank is None:
        whole = redistribute(x, x.device_mesh, [dt.Replicate()] * x.device_mesh.ndim)
        gathered: torch.Tensor = whole.to_local(grad_placements=grad_placements)
        return gathered
    if grad_placements is not None:
        raise InvalidError("grad_placements and dst_rank exclude each other: a tensor on one rank has no gradient")
    if not 0 <= dst_rank < dist.get_world_size():
        raise InvalidError(f"dst_rank {dst_rank} out of range: the world has {dist.get_world_size()} ranks")
    mesh, me = x.device_mesh, dist.get_rank()
    union = _union(mesh_ranks(mesh), [dst_rank])
    if me not in union:
        return None
    home, shape, dtype = home_of_ranks(union, (mesh,)), tuple(x.shape), x._local_tensor.dtype
    local = waited(x._local_tensor) if mesh.get_coordinate() is not None else None
    readings = _readings(dtype, shape, mesh, placements_of(x), home)
    ordered = _ordered(x, local, readings, home)
    key = ("full", dst_rank, mesh_key(mesh), placements_of(x), shape, dtype, ordered)

    def make() -> Plan:
        src = readings[1] if ordered else readings[0]
        assert src is not None
        return home.plan(src, Layout.whole(dtype, shape, home.numbers[dst_rank]))

    made = home.run(key, make, [] if local is None else [local])
    return made[0].to(x._local_tensor.device) if made else None
