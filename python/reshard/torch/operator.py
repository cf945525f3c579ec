"""Moves of local tensors as an operator of torch, for torch.compile, FakeTensor and LocalTensor modes.

    torch.ops.reshard.redistribute(local, move)       the local tensor of this rank in another layout

A move is a text with the ranks and both layouts. So a compiled graph has everything that the operator needs, also if it
comes from a cache of another process.
"""
from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import library
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import dtypes
from ..layout import Layout
from ..memory import is_direct
from ..plan import Plan
from .bound import home_of_ranks

try:
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
except ImportError:  # an older torch
    LocalTensor = None  # type: ignore[assignment,misc]

OUTSIDE = (0,)  # the shape of the local tensor of a rank without a part, as in torch


class Move(NamedTuple):
    """A move between layouts whose ranks are the numbers of `ranks`, which are those of the world. Its gradient moves
    as `backward_dtype`, by default as its own dtype."""

    ranks: Tuple[int, ...]
    src: Layout
    dst: Layout
    backward_dtype: Optional[str] = None

    def text(self) -> str:
        """Returns the move as an argument of the operator."""
        return json.dumps([list(self.ranks), str(self.src), str(self.dst), self.backward_dtype])


@lru_cache(maxsize=256)
def move_of(text: str) -> Move:
    """Returns the move of a text."""
    ranks, src, dst, backward_dtype = json.loads(text)
    return Move(tuple(ranks), Layout(src), Layout(dst), backward_dtype)


@lru_cache(maxsize=256)
def _shape_of(text: str, rank: int) -> Tuple[int, ...]:
    """Returns the shape of the result on a rank of the world."""
    move = move_of(text)
    arrays = move.dst.arrays(move.ranks.index(rank)) if rank in move.ranks else []
    return arrays[0].shape if arrays else OUTSIDE


@lru_cache(maxsize=256)
def _backward_of(text: str) -> str:
    """Returns the move of the gradient: back to the source, where Partial becomes Replicate. Its own gradient moves as
    the dtype of the first move."""
    move = move_of(text)
    src, dst = move.dst, Plan(move.src, move.dst).backward(move.dst).dst
    dtype = move.backward_dtype or src.dtype
    return Move(move.ranks, src.of_dtype(dtype), dst.of_dtype(dtype), src.dtype).text()


def _redistribute(local: torch.Tensor, move: str) -> torch.Tensor:
    """Collective in the ranks of the move."""
    about = move_of(move)
    if dist.get_rank() not in about.ranks:
        return local.new_empty(OUTSIDE)
    home = home_of_ranks(about.ranks)
    own = [local] if about.src.arrays(home.rank) else []
    made = home.run(("operator", move), lambda: Plan(about.src, about.dst), own,
                    local.device if is_direct(local) else None)
    return made[0].to(local.device) if made else local.new_empty(OUTSIDE)


def _fake(local: torch.Tensor, move: str) -> torch.Tensor:
    return local.new_empty(_shape_of(move, dist.get_rank()))


def _keep_move(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    ctx.move = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Any, None]:
    back = _backward_of(ctx.move)
    dtype = dtypes.torch_dtype(dtypes.dtype(move_of(back).src.dtype))
    return operator(gradient.to(dtype), back).to(gradient.dtype), None


if hasattr(library, "custom_op"):
    operator: Any = library.custom_op("reshard::redistribute", mutates_args=())(_redistribute)
    operator.register_fake(_fake)
    operator.register_autograd(_backward, setup_context=_keep_move)
else:  # before 2.4
    operator = _redistribute


def is_traced(local: torch.Tensor) -> bool:
    """Returns whether a tensor has no data: it is on meta, or a graph or shapes are computed."""
    return local.is_meta or isinstance(local, (FakeTensor, FunctionalTensor)) or torch.compiler.is_compiling()


def is_simulated(local: torch.Tensor) -> bool:
    """Returns whether one tensor stands for those of all ranks, in one process."""
    return LocalTensor is not None and isinstance(local, LocalTensor)


def redistribute_simulated(local: Any, move: Move) -> Any:
    """Returns the local tensors of all ranks in another layout. Nothing is communicated."""
    with maybe_disable_local_tensor_mode():
        given = {rank: one.detach() for rank, one in local._local_tensors.items()}
        src: List[torch.Tensor] = [given[move.ranks[one.rank]].contiguous() for one in move.src.arrays()]
        made = Plan(move.src, move.dst).run(src, like="torch")
        results = dict(zip((move.ranks[one.rank] for one in move.dst.arrays()), made))
        return LocalTensor({rank: results.get(rank, one.new_empty(OUTSIDE)) for rank, one in given.items()})


def union(*lists: Sequence[int]) -> Tuple[int, ...]:
    """Returns all ranks of some lists, ascending."""
    return tuple(sorted({rank for one in lists for rank in one}))
