"""Plans: which rank sends which box to which rank, so that one layout becomes another.

    plan = Plan("f32[4096,4096] : 4:S0 -> 2x2:S0,S1")
    print(plan.explain())
    dst = plan.run(src)                  the arrays of all ranks, in this process

Plans are immutable. Any number of threads may use them.
"""
from __future__ import annotations

import ctypes as C
import json
from html import escape
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple, Union

from . import _c, pictures
from ._c import Int32, Int64, Address
from .layout import Layout, problem


class Piece(NamedTuple):
    """One piece of a plan: the box `lo`, `len` of the global tensor, with `nbytes`. `from_rank` sends it from its array
    `from_array`, where it begins at the index `from_at`; `to_rank` receives it in its array `to_array` at `to_at`. With
    `from_destination` it is sent from the destination array of the sender, filled in an earlier `stage`. With `reduce`
    it is one of the partial values that are combined into the box."""

    from_rank: int
    to_rank: int
    stage: int
    from_destination: bool
    reduce: bool
    from_array: int
    to_array: int
    nbytes: int
    lo: Tuple[int, ...]
    len: Tuple[int, ...]
    from_at: Tuple[int, ...]
    to_at: Tuple[int, ...]


class Reduction(NamedTuple):
    """How partial values are combined: `nterms` values by `reduce`, and the result divided by `divisor`."""

    reduce: str
    nterms: int
    divisor: int


class Plan(_c.Handle):
    """A plan from the layout `src` to the layout `dst`, or of a problem: Plan("f32[8] : 2:S0 -> 4:S0").

    `nodes` lists a number for the host of each rank. A replicated destination then crosses each host boundary once,
    and is copied inside of the host. `cast` permits layouts of different dtypes: elements are converted while they are
    moved. A problem that names both dtypes permits it too: Plan("f32[8] : 2:S0 -> bf16 4:S0")."""

    _free = "rsd_plan_free"

    def __init__(self, src: Union[str, Layout], dst: Union[str, Layout, None] = None, *,
                 nodes: Optional[Sequence[int]] = None, cast: bool = False) -> None:
        if dst is None:
            cast = cast or isinstance(src, str)
            src, dst = problem(src) if isinstance(src, str) else (src, src)
        src, dst = Layout.of_any(src), Layout.of_any(dst)
        options = _c.PlanOptions(cast=int(cast))
        if nodes is not None:
            options.nranks, options.node_of = len(nodes), _c.ints(nodes, Int32)
        handle = Address()
        _c.lib.rsd_plan_new(src.handle, dst.handle, C.byref(options), C.byref(handle))
        self._handle = handle.value

    @property
    def src(self) -> Layout:
        """The source layout."""
        return Layout.borrowed(_c.lib.rsd_plan_src(self.handle))

    @property
    def dst(self) -> Layout:
        """The destination layout."""
        return Layout.borrowed(_c.lib.rsd_plan_dst(self.handle))

    def __str__(self) -> str:
        text = Address()
        _c.lib.rsd_problem_print(_c.lib.rsd_plan_src(self.handle), _c.lib.rsd_plan_dst(self.handle),
                                 C.byref(text))
        return _c.taken(text) or ""

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, which depend on layouts, options and the planner only."""
        text = C.create_string_buffer(_c.DIGEST_NCHARS)
        _c.lib.rsd_plan_digest(self.handle, text)
        return text.value.decode()

    def inverse(self) -> "Plan":
        """Returns the plan from the destination to the source."""
        handle = Address()
        _c.lib.rsd_plan_inverse(self.handle, C.byref(handle))
        return Plan._of(handle)

    def backward(self, gradient: Union[str, Layout]) -> "Plan":
        """Returns the plan of the backward pass: from `gradient`, the layout of the gradient, to that of the source,
        where Partial becomes Replicate."""
        gradient, handle = Layout.of_any(gradient), Address()
        _c.lib.rsd_plan_backward(self.handle, gradient.handle, C.byref(handle))
        return Plan._of(handle)

    @property
    def reduction(self) -> Reduction:
        """How partial values are combined. nterms is 1 if nothing is reduced."""
        reduce, nterms, divisor = C.c_int(), Int64(), Int64()
        _c.lib.rsd_plan_reduction(self.handle, C.byref(reduce), C.byref(nterms), C.byref(divisor))
        return Reduction(_c.lib.rsd_reduce_name(reduce.value).decode(), nterms.value, divisor.value)

    def nbytes(self, from_rank: int, to_rank: int) -> int:
        """Returns the bytes that `from_rank` sends to `to_rank`, or keeps if both are the same."""
        found = Int64()
        _c.lib.rsd_plan_nbytes(self.handle, from_rank, to_rank, C.byref(found))
        return found.value

    @property
    def totals(self) -> Dict[str, int]:
        """npieces, nmessages, nstages, nbytes_total, _kept, _moved, _least, _crossed, _crossed_least."""
        found = _c.Totals()
        _c.lib.rsd_plan_totals(self.handle, C.byref(found))
        return found.as_dict()

    def rank_totals(self, rank: int) -> Dict[str, int]:
        """Returns the totals of one rank: npieces_, nmessages_ and nbytes_ _received, _sent and _kept; nbytes_src,
        _dst."""
        found = _c.RankTotals()
        _c.lib.rsd_plan_rank_totals(self.handle, rank, C.byref(found))
        return found.as_dict()

    def pieces(self, rank: Optional[int] = None, *, sends: bool = False) -> Iterator[Piece]:
        """Iterates over the pieces that a rank receives, or with `sends` sends, by stage; or over those of every
        rank."""
        cursor, found, n = Address(), C.POINTER(_c.Piece)(), self.src.ndim
        _c.lib.rsd_plan_walk(self.handle, _c.EVERY_RANK if rank is None else rank,
                             _c.SENDS if sends else _c.RECEIVES, C.byref(cursor))
        try:
            while True:
                _c.lib.rsd_cursor_next(cursor, C.byref(found))
                if not found:
                    return
                one = found.contents
                yield Piece(getattr(one, "from"), one.to, one.stage, bool(one.from_destination), bool(one.reduce),
                            one.from_array, one.to_array, one.nbytes, tuple(one.box.lo[:n]),
                            tuple(one.box.len[:n]), tuple(one.from_at[:n]), tuple(one.to_at[:n]))
        finally:
            _c.lib.rsd_cursor_free(cursor)

    def explain(self, *, pairs: bool = False, ranks: bool = False) -> str:
        """Describes the plan as text: what moves, and the lower bound. With `pairs`, adds the bytes between every two
        ranks; with `ranks`, the totals of every rank."""
        return self._explain(0, pairs, ranks)

    def as_dict(self, *, pairs: bool = False, ranks: bool = False) -> Dict[str, Any]:
        """Returns the same as a dict, also with `pairs` and `ranks`. docs/json.md lists its keys."""
        found: Dict[str, Any] = json.loads(self._explain(_c.EXPLAIN_JSON, pairs, ranks))
        return found

    def _explain(self, flags: int, pairs: bool, ranks: bool) -> str:
        flags |= (_c.EXPLAIN_PAIRS if pairs else 0) | (_c.EXPLAIN_RANKS if ranks else 0)
        text = Address()
        _c.lib.rsd_plan_explain(self.handle, flags, C.byref(text))
        return _c.taken(text) or ""

    def _repr_svg_(self) -> Optional[str]:
        """A picture for notebooks: the bytes from each rank to each, as `reshard plan --svg` draws it."""
        return pictures.of_command("plan", str(self), "--no-picture")

    def _repr_html_(self) -> str:
        """The picture and the numbers, for notebooks."""
        return pictures.page(self._repr_svg_(), f"<pre>{escape(self.explain())}</pre>")

    def run(self, src: Any, dst: Any = None, *, pool: Any = None, like: Optional[str] = None) -> Any:
        """Moves `src`, the arrays of all ranks, which are in this process, to `dst` or to new arrays of the kind
        `like`; see `reshard.reshard`. `pool` is a Pool or a number of threads."""
        from .carry import run
        return run(self, src, dst, pool=pool, like=like)
