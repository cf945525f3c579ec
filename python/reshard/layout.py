"""Layouts: which rank holds which elements of a tensor.

    Layout("f32[4096,4096] @ dp=2,tp=4 : S(0),S(1)")                      in the notation
    Layout.on("f32", (4096, 4096), Mesh("dp=2,tp=4"), [Shard(0), Shard(1)])
    Layout.from_boxes("f32", (16, 1), [Box(0, (0, 0), (4, 1)), ...])      explicit boxes

Layouts are immutable. Any number of threads may use them.
"""
from __future__ import annotations

import ctypes as C
import math
import operator
from typing import Any, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from . import _c, dtypes, pictures
from ._c import Int32, Int64, Address
from .errors import InvalidError


class Mesh(_c.Handle):
    """An n-dimensional array of ranks with named axes. `text` is the mesh in the notation, or a number of ranks:
    Mesh("dp=2,tp=4"), Mesh("2x2 ranks=4-7"), Mesh(8)."""

    _free = "rsd_mesh_free"

    def __init__(self, text: Union[str, int]) -> None:
        handle = Address()
        words = text if isinstance(text, str) else str(operator.index(text))
        _c.lib.rsd_mesh_parse(_c.text_bytes(words, "mesh"), C.byref(handle))
        self._handle = handle.value

    @classmethod
    def of_any(cls, mesh: "Union[Mesh, str, int, Sequence[int], Mapping[str, int]]") -> "Mesh":
        """Returns the mesh for an argument `mesh`: a Mesh, 8, "2x4", (2, 4), "dp=2,tp=4" or {"dp": 2, "tp": 4}."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return cls.of(list(mesh.values()), list(mesh))
        return cls.of(list(mesh)) if isinstance(mesh, Iterable) and not isinstance(mesh, str) else cls(mesh)

    @classmethod
    def of(cls, counts: Sequence[int], names: Optional[Sequence[Optional[str]]] = None,
           ranks: Optional[Sequence[int]] = None) -> "Mesh":
        """Creates a mesh with `counts[a]` ranks along axis a, which has the name `names[a]` or None. `ranks` lists the
        rank at each position, row-major: the last axis changes fastest. None: 0, 1, 2, ..."""
        handle = Address()
        total = math.prod(counts)
        if ranks is not None and len(ranks) != total:
            raise InvalidError(f"got {len(ranks)} ranks for a mesh of {total}")
        if names is not None and len(names) != len(counts):
            raise InvalidError(f"got {len(names)} names for a mesh of {len(counts)} axes")
        words = None if names is None else (_c.Text * max(1, len(names)))(
            *[None if name is None else _c.text_bytes(name, "name of a mesh axis") for name in names])
        _c.lib.rsd_mesh_new(len(counts), _c.ints(counts), words,
                            None if ranks is None else _c.ints(ranks, Int32), C.byref(handle))
        return cls._of(handle)

    def __str__(self) -> str:
        text = Address()
        _c.lib.rsd_mesh_print(self.handle, C.byref(text))
        return _c.taken(text) or ""

    def __repr__(self) -> str:
        return f"Mesh({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> Any:
        return Mesh, (str(self),)

    @property
    def naxes(self) -> int:
        """The number of axes."""
        return _c.lib.rsd_mesh_naxes(self.handle)

    @property
    def counts(self) -> Tuple[int, ...]:
        """The number of ranks along each axis."""
        return tuple(_c.lib.rsd_mesh_count(self.handle, axis) for axis in range(self.naxes))

    @property
    def names(self) -> Tuple[Optional[str], ...]:
        """The name of each axis, or None."""
        found = (_c.lib.rsd_mesh_name(self.handle, axis) for axis in range(self.naxes))
        return tuple(None if name is None else name.decode() for name in found)

    @property
    def nranks(self) -> int:
        """The number of ranks."""
        return _c.lib.rsd_mesh_nranks(self.handle)

    def coords(self, rank: int) -> Tuple[int, ...]:
        """Returns the coordinates of a rank, one per axis."""
        found = (Int64 * _c.MAX_AXES)()
        _c.lib.rsd_mesh_coords(self.handle, rank, found)
        return tuple(found[:self.naxes])

    def rank(self, *coords: int) -> int:
        """Returns the rank at `coords`, one coordinate per axis."""
        if len(coords) != self.naxes:
            raise InvalidError(f"got {len(coords)} coordinates for a mesh of {self.naxes} axes")
        found = Int32()
        _c.lib.rsd_mesh_rank(self.handle, _c.ints(coords), C.byref(found))
        return found.value


AnyMesh = Union[Mesh, str, int, Sequence[int], Mapping[str, int], None]


class Placement(NamedTuple):
    """What one mesh axis does to a tensor. Created by Shard, Replicate, Partial, Strided, Balanced, Segmented and
    Cyclic. `kind` is the number of one of these, `dim` the dim, `reduce` the number of the reduction, `segments` the
    lengths of segments, and `factor` the split factor or the length of a block."""

    kind: int
    dim: int = 0
    reduce: int = 0
    segments: Tuple[int, ...] = ()
    factor: int = 0

    def __str__(self) -> str:
        if self.kind == _c.REPLICATE:
            return "R"
        if self.kind == _c.PARTIAL:
            return f"P({_c.lib.rsd_reduce_name(self.reduce).decode()})"
        if self.kind == _c.SEGMENTED:
            return f"S({self.dim};{','.join(map(str, self.segments))})"
        if self.kind in (_c.STRIDED, _c.CYCLIC):
            return f"{'_S' if self.kind == _c.STRIDED else 'C'}({self.dim},{self.factor})"
        return f"{'S' if self.kind == _c.SHARD else 'B'}({self.dim})"


def Shard(dim: int) -> Placement:  # noqa: N802 (named as DTensor's)
    """S(dim): shards `dim` in chunks of ceil(n/m), as torch.chunk."""
    return Placement(_c.SHARD, dim)


def Replicate() -> Placement:  # noqa: N802
    """R: every rank holds the whole."""
    return Placement(_c.REPLICATE)


def Partial(reduce: str = "sum") -> Placement:  # noqa: N802
    """P(reduce): the value is the reduction over the axis: "sum", "avg" or "mean", "min", "max", "product", "band",
    "bor", "bxor"."""
    number = C.c_int()
    _c.lib.rsd_reduce_parse(_c.text_bytes(reduce, "reduction"), C.byref(number))
    return Placement(_c.PARTIAL, 0, number.value)


def Balanced(dim: int) -> Placement:  # noqa: N802
    """B(dim): lengths differ by at most 1."""
    return Placement(_c.BALANCED, dim)


def Segmented(dim: int, segments: Sequence[int]) -> Placement:  # noqa: N802
    """S(dim;4,2,2): dim consists of segments (fused QKV, gate-up), each sharded separately."""
    return Placement(_c.SEGMENTED, dim, 0, tuple(segments))


def Strided(dim: int, factor: int) -> Placement:  # noqa: N802
    """_S(dim,factor): torch's strided shard with split factor `factor`."""
    return Placement(_c.STRIDED, dim, 0, (), factor)


def Cyclic(dim: int, block: int) -> Placement:  # noqa: N802
    """C(dim,block): blocks assigned to the ranks in turn, as ScaLAPACK."""
    return Placement(_c.CYCLIC, dim, 0, (), block)


class Box(NamedTuple):
    """A box of elements of `rank`: `lo[d] <= index[d] < lo[d] + len[d]`."""

    rank: int
    lo: Tuple[int, ...]
    len: Tuple[int, ...]


class Array(NamedTuple):
    """An array of a layout. Its `number` counts all arrays by ascending `rank`. `place` is the position in placement
    order, `shape` the shape on this rank, `nbytes` the size of a dense array."""

    number: int
    rank: int
    place: int
    shape: Tuple[int, ...]
    nbytes: int


class LocalBox(NamedTuple):
    """A box that a rank holds: elements with `lo[d] <= index[d] < lo[d] + len[d]` of the tensor. They are in the array
    with the number `array`, from the index `at` on."""

    lo: Tuple[int, ...]
    len: Tuple[int, ...]
    array: int
    at: Tuple[int, ...]


class Check(NamedTuple):
    """How a layout covers its tensor. `cover` is "once", "evenly", "unevenly" or "misses", `copies` the number of
    copies, `box` a box with more copies than others, or a missing one."""

    cover: str
    copies: int
    box: Optional[Tuple[Tuple[int, ...], Tuple[int, ...]]]


Placements = Union[str, Placement, Sequence[Placement]]


class Layout(_c.Handle):
    """A dtype, a global shape and, for each rank, the boxes that it holds. `text` is the layout in the notation, such
    as "f32[8,8] @ dp=2,tp=4 : S(0),R"."""

    _free = "rsd_layout_free"

    def __init__(self, text: str) -> None:
        handle = Address()
        _c.lib.rsd_layout_parse(_c.text_bytes(text, "layout"), C.byref(handle))
        self._handle = handle.value

    # -- creation --

    @classmethod
    def of_any(cls, layout: "Union[Layout, str]") -> "Layout":
        """Returns the layout for an argument `layout`: a Layout, or text in the notation."""
        return layout if isinstance(layout, Layout) else cls(layout)

    @classmethod
    def on(cls, dtype: Any, shape: Sequence[int],
           mesh: Union[Mesh, str, int, Sequence[int], Mapping[str, int]], placements: Placements) -> "Layout":
        """Creates the layout of a tensor with a dtype and a global shape on a mesh.

        dtype       a dtype in the notation ("f32"), of NumPy or of torch
        shape       the global shape
        mesh        a Mesh, 8, "2x4", (2, 4), "dp=2,tp=4" or {"dp": 2, "tp": 4}
        placements  one placement per mesh axis, applied left to right, or text: "S0,R" or "[tp.dp, -]"; for a mesh of
                    one axis also a single placement"""
        mesh = Mesh.of_any(mesh)
        handle, number = Address(), dtypes.dtype(dtype).number
        if isinstance(placements, str):
            _c.lib.rsd_layout_parse_on(number, len(shape), _c.ints(shape), mesh.handle,
                                       _c.text_bytes(placements, "placements"), C.byref(handle))
            return cls._of(handle)
        placements = [placements] if isinstance(placements, Placement) else list(placements)
        for one in placements:
            if not isinstance(one, Placement):
                raise TypeError(f"a placement is Shard(0), Replicate() and so on, not {type(one).__name__}: {one!r}")
        if len(placements) != mesh.naxes:
            raise InvalidError(f"got {len(placements)} placements for a mesh of {mesh.naxes} axes ({mesh})")
        block = _c.packed(_c.Placement, [
            _c.Placement(kind=one.kind, dim=one.dim, reduce=one.reduce, nsegments=len(one.segments),
                         segments=_c.ints(one.segments), factor=one.factor) for one in placements])
        _c.lib.rsd_layout_new(number, len(shape), _c.ints(shape), mesh.handle, block, C.byref(handle))
        return cls._of(handle)

    @classmethod
    def by_dim(cls, dtype: Any, shape: Sequence[int],
               mesh: Union[Mesh, str, int, Sequence[int], Mapping[str, int]],
               axes: Sequence[Sequence[Union[int, str]]]) -> "Layout":
        """Creates a layout as in JAX: `axes[d]` lists the axes of `mesh` that cut dim d, in order, as numbers or names.
        `dtype`, `shape` and `mesh` are those of `on`."""
        mesh = Mesh.of_any(mesh)
        if len(axes) != len(shape):
            raise InvalidError(f"got axes for {len(axes)} dims, but the tensor has {len(shape)}")
        names, flat = mesh.names, []
        for one in (axis for dim in axes for axis in dim):
            if isinstance(one, str) and one not in names:
                raise InvalidError(f"the mesh {mesh} has no axis {one!r}")
            flat.append(names.index(one) if isinstance(one, str) else one)
        handle = Address()
        _c.lib.rsd_layout_new_by_dim(dtypes.dtype(dtype).number, len(shape), _c.ints(shape), mesh.handle,
                                     _c.ints([len(dim) for dim in axes], Int32), _c.ints(flat, Int32),
                                     C.byref(handle))
        return cls._of(handle)

    @classmethod
    def from_boxes(cls, dtype: Any, shape: Sequence[int], boxes: Iterable[Union[Box, Tuple[Any, ...]]],
                   enumerable: bool = False) -> "Layout":
        """Creates a layout of explicit `boxes` (rank, lo, len), with one array each, of a tensor with a `dtype` and a
        global `shape`. With `enumerable`, boxes must cover the tensor without overlaps, as in torch's
        EnumerableShardingSpec."""
        made = [Box(*one) for one in boxes]
        for one in made:
            if len(one.lo) != len(shape) or len(one.len) != len(shape):
                raise InvalidError(f"box {tuple(one)} does not have the {len(shape)} dims of the tensor")
        handle = Address()
        make = _c.lib.rsd_layout_new_enumerable if enumerable else _c.lib.rsd_layout_new_boxes
        make(dtypes.dtype(dtype).number, len(shape), _c.ints(shape), len(made),
             _c.ints([one.rank for one in made], Int32), _c.ints([n for one in made for n in one.lo]),
             _c.ints([n for one in made for n in one.len]), C.byref(handle))
        return cls._of(handle)

    @classmethod
    def from_chunks(cls, dtype: Any, shape: Sequence[int], dim: int, ranks: Sequence[int]) -> "Layout":
        """Creates the layout of torch's ChunkShardingSpec for a tensor with a `dtype` and a global `shape`: cuts `dim`
        into len(ranks) chunks; chunk i belongs to ranks[i]."""
        handle = Address()
        _c.lib.rsd_layout_new_chunks(dtypes.dtype(dtype).number, len(shape), _c.ints(shape), dim, len(ranks),
                                     _c.ints(ranks, Int32), C.byref(handle))
        return cls._of(handle)

    @classmethod
    def whole(cls, dtype: Any, shape: Sequence[int], rank: int = 0) -> "Layout":
        """Creates the layout of a tensor with a `dtype` and a `shape` that is whole on one `rank`."""
        return cls.from_boxes(dtype, shape, [Box(rank, (0,) * len(shape), tuple(shape))])

    @classmethod
    def borrowed(cls, handle: Any) -> "Layout":
        """Returns a layout with a new reference to a `handle` that another object owns."""
        return cls._of(_c.lib.rsd_layout_share(handle))

    # -- queries --

    def __str__(self) -> str:
        text = Address()
        _c.lib.rsd_layout_print(self.handle, C.byref(text))
        return _c.taken(text) or ""

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and bool(_c.lib.rsd_layout_equal(self.handle, other.handle))

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.nranks, self.world))

    def __reduce__(self) -> Any:
        return Layout, (str(self),)

    @property
    def dtype(self) -> str:
        """The name in the notation: "f32"."""
        return dtypes.by_number(_c.lib.rsd_layout_dtype(self.handle)).name

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return _c.lib.rsd_layout_ndim(self.handle)

    @property
    def shape(self) -> Tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(_c.lib.rsd_layout_shape(self.handle)[:self.ndim])

    @property
    def world(self) -> int:
        """The highest rank, plus 1."""
        return _c.lib.rsd_layout_world(self.handle)

    @property
    def nranks(self) -> int:
        """The number of different ranks."""
        return _c.lib.rsd_layout_nranks(self.handle)

    @property
    def mesh(self) -> Optional[Mesh]:
        """The mesh, or None for explicit boxes."""
        found = _c.lib.rsd_layout_mesh(self.handle)
        return Mesh._of(_c.lib.rsd_mesh_share(found)) if found else None

    @property
    def placements(self) -> Optional[Tuple[Placement, ...]]:
        """The placements, one per mesh axis, or None for explicit boxes. `axes` has the order of several axes on
        one dim."""
        mesh = self.mesh
        if mesh is None:
            return None
        made, found = _c.Placement(), []
        for axis in range(mesh.naxes):
            _c.lib.rsd_layout_placement(self.handle, axis, C.byref(made))
            segments = tuple(made.segments[:made.nsegments]) if made.kind == _c.SEGMENTED else ()
            found.append(Placement(made.kind, made.dim, made.reduce, segments, made.factor))
        return tuple(found)

    def axes(self, dim: int) -> Tuple[int, ...]:
        """Returns the mesh axes that cut a dim, in order."""
        found = (Int32 * _c.MAX_AXES)()
        return tuple(found[:_c.lib.rsd_layout_axes(self.handle, dim, found)])

    @property
    def narrays(self) -> int:
        """The number of arrays of all ranks."""
        return _c.lib.rsd_layout_narrays(self.handle)

    def array(self, index: int) -> Array:
        """Returns the array with the number `index`, from 0 to `narrays` - 1."""
        found = _c.Array()
        _c.lib.rsd_layout_array(self.handle, index, C.byref(found))
        return Array(index, found.rank, found.place, tuple(found.shape[:found.ndim]), found.nbytes)

    def arrays(self, rank: Optional[int] = None) -> List[Array]:
        """Returns the arrays of a rank, or of all ranks, in the order of the arguments of a run."""
        if rank is None:
            return [self.array(index) for index in range(self.narrays)]
        first, count = Int64(), Int64()
        _c.lib.rsd_layout_arrays_of(self.handle, rank, C.byref(first), C.byref(count))
        return [self.array(index) for index in range(first.value, first.value + count.value)]

    def boxes(self, rank: int) -> List[LocalBox]:
        """Returns all boxes of a rank, array by array. A strided, segmented or cyclic shard has several."""
        found, count, n = C.POINTER(_c.Shard)(), Int64(), self.ndim
        _c.lib.rsd_layout_boxes(self.handle, rank, C.byref(found), C.byref(count))
        made = [LocalBox(tuple(one.box.lo[:n]), tuple(one.box.len[:n]), one.array, tuple(one.at[:n]))
                for one in found[:count.value]]
        _c.lib.rsd_free(C.cast(found, Address))
        return made

    def ranks(self) -> Iterator[int]:
        """Returns all ranks, ascending."""
        last = None
        for index in range(self.narrays):
            rank = self.array(index).rank
            if rank != last:
                yield rank
            last = rank

    def rank_at(self, position: int) -> int:
        """Returns the rank at a position in placement order."""
        found = Int32()
        _c.lib.rsd_layout_rank_at(self.handle, position, C.byref(found))
        return found.value

    def position(self, rank: int) -> int:
        """Returns the first position of a rank in placement order."""
        found = Int64()
        _c.lib.rsd_layout_position(self.handle, rank, C.byref(found))
        return found.value

    @property
    def nplaces(self) -> int:
        """The number of places: one per rank of a mesh, or one per explicit box."""
        return _c.lib.rsd_layout_nplaces(self.handle)

    def check(self) -> Check:
        """Returns how the layout covers its tensor."""
        found, n = _c.Coverage(), self.ndim
        _c.lib.rsd_layout_coverage(self.handle, C.byref(found))
        word = {_c.COVERS_ONCE: "once", _c.COVERS_EVENLY: "evenly", _c.COVERS_UNEVENLY: "unevenly",
                _c.MISSES: "misses"}[found.kind]
        box = (tuple(found.box.lo[:n]), tuple(found.box.len[:n])) if word in ("unevenly", "misses") else None
        return Check(word, found.copies, box)

    def _repr_svg_(self) -> Optional[str]:
        """A picture for notebooks: which ranks hold which elements. None for more than 4096 arrays."""
        return pictures.of_layout(self)

    def of_dtype(self, dtype: Any) -> "Layout":
        """Returns the same layout with another dtype."""
        made = dtypes.dtype(dtype)
        text = str(self)
        return Layout(made.name + text[text.index("["):])


def problem(text: str) -> Tuple[Layout, Layout]:
    """Returns both layouts of a problem. `text` is in the notation, such as "f32[8,8] : 4:S0 -> 2x2:S0,S1"."""
    src, dst = Address(), Address()
    _c.lib.rsd_problem_parse(_c.text_bytes(text, "problem"), C.byref(src), C.byref(dst))
    return Layout._of(src), Layout._of(dst)
