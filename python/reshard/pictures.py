"""Pictures of layouts, plans, tensors and checkpoints for notebooks, which show the last value of a cell.

The command draws plans and checkpoints: a picture is the one of `reshard plan --svg` and `reshard inspect --svg`.
Layouts are drawn here. A picture that cannot be made is None, and the notebook shows the text instead.
"""
from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from html import escape
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import dtypes
from ._command import find

MOST_BOXES = 4096
MOST_ROWS = 100  # of a table
SECONDS = 60.0  # for one picture
MOST_LEGEND = 32  # groups of ranks
_LEFT, _TOP, _WIDTH, _LEAST, _MOST, _LINE = 76, 76, 560, 120, 560, 18  # pixels


def _command() -> Optional[str]:
    """Returns the command of the package, of the source tree, or of the PATH."""
    return find() or shutil.which("reshard")


def of_command(verb: str, *words: str) -> Optional[str]:
    """Returns the picture that a verb of the command draws as SVG, or None if it draws none."""
    command = _command()
    if command is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "picture.svg")
        try:
            done = subprocess.run([command, verb, "--svg", path, *words], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SECONDS)
            if done.returncode:
                return None
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except (OSError, subprocess.TimeoutExpired):
            return None


def page(svg: Optional[str], *below: str) -> str:
    """Returns a part of an HTML page: a picture, and what is below it."""
    return "<div>" + (svg or "") + "".join(below) + "</div>"


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]], count: int) -> str:
    """Returns a table in HTML, with the number of rows that are not shown."""
    lines = ["<tr>" + "".join(f"<th>{escape(one)}</th>" for one in titles) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(str(one))}</td>" for one in row) + "</tr>" for row in rows]
    more = f"<p>... and {count - len(rows)} more</p>" if count > len(rows) else ""
    return "<table>" + "".join(lines) + "</table>" + more


# ---- layouts ----

Corners = Tuple[Tuple[int, ...], Tuple[int, ...]]  # lo and len of a box


def size_text(nbytes: int) -> str:
    """Returns a size as the command prints it: "1.93 GB"."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _ranges(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as text: "0-3, 8"."""
    found: List[List[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most - 3]}..."


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{style and " "}{style}>{escape(text)}</text>'


def _shown_dims(shape: Sequence[int], boxes: Sequence[Corners]) -> Tuple[int, ...]:
    """Returns one or two dims to show: those that are cut, then the last ones."""
    cut = [dim for dim in range(len(shape)) if any(length[dim] != shape[dim] for _, length in boxes)]
    others = [dim for dim in reversed(range(len(shape))) if dim not in cut]
    return tuple(sorted((cut + others)[:2]))


def _holders(layout: Any) -> Dict[Tuple[int, ...], List[Corners]]:
    """Returns the boxes by the ranks that hold them, in the order of the ranks."""
    ranks: Dict[Corners, List[int]] = {}
    for rank in layout.ranks():
        for box in layout.boxes(rank):
            found = ranks.setdefault((box.lo, box.len), [])
            if 0 not in box.len and rank not in found:
                found.append(rank)
    groups: Dict[Tuple[int, ...], List[Corners]] = {}
    for box, found in ranks.items():
        if found:
            groups.setdefault(tuple(found), []).append(box)
    return dict(sorted(groups.items()))


def _totals(layout: Any) -> str:
    """Returns the bytes of the tensor and of its ranks, and how many ranks have each element."""
    element = dtypes.dtype(layout.dtype).nbytes
    own = [sum(array.nbytes for array in layout.arrays(rank)) for rank in layout.ranks()]
    each = size_text(min(own)) if min(own) == max(own) else f"{size_text(min(own))} to {size_text(max(own))}"
    check = layout.check()
    copies = {"once": "each element once", "evenly": f"each element {check.copies} times",
              "unevenly": "some elements more often than others", "misses": "some elements on no rank"}[check.cover]
    return (f"{size_text(math.prod(layout.shape) * element)} in all; "
            f"{'one rank' if layout.nranks == 1 else f'{layout.nranks} ranks, each'} with {each}; {copies}")


def _axis(x: float, y: float, length: float, extent: int, down: bool) -> List[str]:
    """Draws marks and numbers along an axis, at steps of 1, 2 or 5 times a power of ten."""
    steps = (step * 10 ** power for power in range(19) for step in (1, 2, 5))
    step, parts = next(one for one in steps if extent // one <= (10 if down else 8)), []
    for at in range(0, extent + 1, step):
        along = length * at / extent
        ends = (x - 5, y + along, x, y + along) if down else (x + along, y, x + along, y + 5)
        parts.append('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="#888"/>'.format(*ends))
        parts.append(_text(x - 8, y + along + 4, str(at), 'text-anchor="end"') if down else
                     _text(x + along, y + 18, str(at), 'text-anchor="middle"'))
    return parts


def _legend(groups: Dict[Tuple[int, ...], List[Corners]], element: int, x: float) -> List[str]:
    """Draws the colour of each group of ranks, with what each of them holds."""
    parts = []
    for i, (ranks, boxes) in enumerate(groups.items()):
        y = _TOP + _LINE * i
        if i == MOST_LEGEND:
            parts.append(_text(x, y + 11, f"... and {len(groups) - i} more"))
            break
        nbytes = sum(math.prod(length) for _, length in boxes) * element
        what = f"{size_text(nbytes)}{' each' if len(ranks) > 1 else ''}" + \
            (f" in {len(boxes)} boxes" if len(boxes) > 1 else "")
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="12" fill="{_colour(i)}"/>')
        who = f"{'ranks' if len(ranks) > 1 else 'rank'} {_cut(_ranges(ranks), 24)}"
        parts.append(_text(x + 20, y + 11, f"{who}: {what}"))
    return parts


def _colour(index: int) -> str:
    return f"hsl({(210 + index * 137) % 360},60%,72%)"


def of_layout(layout: Any) -> Optional[str]:
    """Draws which ranks hold which elements of a layout, as SVG."""
    shape = layout.shape
    if layout.narrays > MOST_BOXES or 0 in shape:
        return None
    groups = _holders(layout)
    boxes = [box for group in groups.values() for box in group]
    if len(boxes) > MOST_BOXES:
        return None
    dims = _shown_dims(shape, boxes)
    across, down = dims[-1] if dims else None, dims[0] if len(dims) == 2 else None
    ratio = shape[dims[0]] / shape[dims[1]] if len(dims) == 2 else 0
    height = int(min(_MOST, max(_LEAST, _WIDTH * ratio)))
    right, bottom = _LEFT + _WIDTH + 40, _TOP + max(height, _LINE * min(len(groups), MOST_LEGEND + 1))
    size = f'width="{right + 300}" height="{bottom + 48}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 300} {bottom + 48}" {size} '
             'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="#fff"/>',
             _text(16, 24, _cut(str(layout), 100), 'font-size="16" font-weight="bold"'), _text(16, 44, _totals(layout))]
    if len(shape) > 2:
        parts.append(_text(16, 62, f"dims {dims[0]} and {dims[1]} of {len(shape)} are shown; boxes that differ in "
                                   "others lie on each other"))
    for i, (ranks, own) in enumerate(groups.items()):
        parts += [_box(shape, box, _ranges(ranks), _colour(i), across, down, height) for box in own]
    if across is not None:
        parts += _axis(_LEFT, _TOP + height, _WIDTH, shape[across], False)
        parts.append(_text(_LEFT + _WIDTH / 2, _TOP + height + 36, f"dim {across}",
                           'text-anchor="middle" font-weight="bold"'))
    if down is not None:
        parts += _axis(_LEFT, _TOP, height, shape[down], True)
        parts.append(f'<text transform="translate(20 {_TOP + height / 2:.0f}) rotate(-90)" text-anchor="middle" '
                     f'font-weight="bold">dim {down}</text>')
    return "\n".join([*parts, *_legend(groups, dtypes.dtype(layout.dtype).nbytes, right), "</svg>"])


def _box(shape: Sequence[int], corners: Corners, ranks: str, colour: str, across: Optional[int], down: Optional[int],
         height: int) -> str:
    lo, length = corners
    x, y, wide, high = float(_LEFT), float(_TOP), float(_WIDTH), float(height)
    if across is not None:
        x, wide = x + wide * lo[across] / shape[across], wide * length[across] / shape[across]
    if down is not None:
        y, high = y + high * lo[down] / shape[down], high * length[down] / shape[down]
    where = ", ".join(f"{a}:{a + n}" for a, n in zip(lo, length))
    label = _text(x + wide / 2, y + high / 2 + 4, ranks, 'fill="#222" text-anchor="middle" pointer-events="none"') \
        if 7 * len(ranks) + 8 < wide and high > 14 else ""
    return (f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}" fill="{colour}" '
            f'fill-opacity="0.85" stroke="#444" stroke-width="0.5"><title>[{where}] on {ranks}</title></rect>{label}')
