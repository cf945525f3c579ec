"""Which elements an index selects, by the rules of NumPy, and which boxes to read for it.

    w[10:20, ::-3, 5, None]

Integers, slices, `...` and None are supported; arrays of indices are not.
"""
from __future__ import annotations

import itertools
import operator
from typing import Any, List, NamedTuple, Sequence, Tuple

# Bytes between two selected elements are read and dropped if they are less than a page, or if there would be more boxes
# than this.
GAP_NBYTES = 4096
MOST_BOXES = 4096


class Cut(NamedTuple):
    """The selection of one dim: `many` elements from `start`, `step` apart. `drop`: the result does not have the
    dim."""

    start: int
    many: int
    step: int
    drop: bool

    @property
    def low(self) -> int:
        """The lowest selected index."""
        return self.start if self.step > 0 else self.start + (self.many - 1) * self.step

    @property
    def span(self) -> int:
        """The number of indices from the lowest to the highest."""
        return (self.many - 1) * abs(self.step) + 1 if self.many else 0


class Selection:
    """An index, applied to a shape. `shape` is that of the result, `new` lists its dims that None added."""

    def __init__(self, index: Any, shape: Sequence[int]) -> None:
        index = index if isinstance(index, tuple) else (index,)
        cuts: List[Cut] = []
        taken = sum(1 for one in index if one is not None and one is not Ellipsis)
        if sum(1 for one in index if one is Ellipsis) > 1:
            raise IndexError("an index can only have a single ellipsis ('...')")
        if taken > len(shape):
            raise IndexError(f"too many indices: the tensor has {len(shape)} dims, but {taken} were indexed")
        if not any(one is Ellipsis for one in index):
            index = index + (Ellipsis,)
        out: List[int] = []
        new: List[bool] = []
        for one in index:
            if one is None:
                out.append(1)
                new.append(True)
            elif one is Ellipsis:
                for _ in range(len(shape) - taken):
                    cuts.append(Cut(0, shape[len(cuts)], 1, False))
                    out.append(cuts[-1].many)
                    new.append(False)
            else:
                cuts.append(_cut(one, shape[len(cuts)], len(cuts)))
                if not cuts[-1].drop:
                    out.append(cuts[-1].many)
                    new.append(False)
        self.cuts, self.shape, self.new = tuple(cuts), tuple(out), tuple(new)

    @property
    def empty(self) -> bool:
        return any(cut.many == 0 for cut in self.cuts)

    @property
    def plain(self) -> bool:
        """Whether the selection is one box, without steps."""
        return all(cut.step == 1 or cut.many <= 1 for cut in self.cuts)

    def reading(self, nbytes: int) -> "Reading":
        """Returns the boxes to read, for elements of `nbytes` bytes."""
        split, inner, boxes = [False] * len(self.cuts), nbytes, 1
        # Starts with the last dim, so that the bytes of one step are known.
        for dim in reversed(range(len(self.cuts))):
            cut = self.cuts[dim]
            if cut.many > 1 and cut.step != 1:
                split[dim] = (abs(cut.step) - 1) * inner >= GAP_NBYTES and boxes * cut.many <= MOST_BOXES
            if split[dim]:
                boxes *= cut.many
            inner *= max(1, cut.span)
        return Reading(self.cuts, split)


class Reading:
    """The reads of a selection: the box (lo, len) is read into an array of `shape`, at position `at`. `after` is
    the index that selects the result from that array, without the dims that are dropped."""

    def __init__(self, cuts: Sequence[Cut], split: Sequence[bool]) -> None:
        self.shape = tuple(cut.many if one else cut.span for cut, one in zip(cuts, split))
        self.after = tuple(slice(None) if one or cut.many <= 1 else slice(None, None, cut.step)
                           for cut, one in zip(cuts, split))
        self.boxes: List[Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, ...]]] = []
        choices = [[(cut.start + i * cut.step, 1, i) for i in range(cut.many)] if one
                   else [(cut.low, cut.span, 0)] for cut, one in zip(cuts, split)]
        for chosen in itertools.product(*choices):
            self.boxes.append((tuple(c[0] for c in chosen), tuple(c[1] for c in chosen),
                               tuple(c[2] for c in chosen)))


def _cut(one: Any, extent: int, dim: int) -> Cut:
    """Returns the part of one dim that an integer or a slice selects."""
    if isinstance(one, slice):
        start, stop, step = one.indices(extent)
        return Cut(start, len(range(start, stop, step)), step, False)
    if isinstance(one, bool) or type(one).__name__ in ("bool_", "bool"):
        raise TypeError("a tensor of a checkpoint cannot be indexed by booleans; read it first: tensor[...]")
    try:
        at = operator.index(one)
    except TypeError:
        raise TypeError(f"a tensor of a checkpoint can be indexed by integers, slices, ... and None, not by "
                        f"a {type(one).__name__}; read it first: tensor[...]") from None
    if not -extent <= at < extent:
        raise IndexError(f"index {at} is out of bounds for dim {dim} with {extent} elements")
    return Cut(at % extent, 1, 1, True)
