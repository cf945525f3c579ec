"""Pictures of layouts, plans, tensors and checkpoints for notebooks, which show the last value of a cell.

The command draws plans and checkpoints: a picture is the one of `reshard plan --svg` and `reshard inspect --svg`.
Layouts are drawn here. A picture that cannot be made is None, and the notebook shows the text instead.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from html import escape
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ._command import find

MOST_BOXES = 4096
MOST_ROWS = 100  # of a table
SECONDS = 60.0  # for one picture
_LEFT, _TOP, _WIDTH, _LEAST, _MOST = 64, 56, 560, 90, 560  # pixels


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


def _ranges(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as text: "0-3, 8"."""
    found: List[List[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _shown_dims(shape: Sequence[int], boxes: Sequence[Tuple[Tuple[int, ...], Tuple[int, ...]]]) -> Tuple[int, ...]:
    """Returns one or two dims to show: those that are cut, then the last ones."""
    cut = [dim for dim in range(len(shape)) if any(length[dim] != shape[dim] for _, length in boxes)]
    others = [dim for dim in reversed(range(len(shape))) if dim not in cut]
    return tuple(sorted((cut + others)[:2]))


def of_layout(layout: Any) -> Optional[str]:
    """Draws which ranks hold which elements of a layout, as SVG."""
    shape = layout.shape
    if layout.narrays > MOST_BOXES or 0 in shape:
        return None
    holders: Dict[Tuple[Tuple[int, ...], Tuple[int, ...]], List[int]] = {}
    for rank in layout.ranks():
        for box in layout.boxes(rank):
            ranks = holders.setdefault((box.lo, box.len), [])
            if 0 not in box.len and rank not in ranks:
                ranks.append(rank)
    holders = {box: ranks for box, ranks in holders.items() if ranks}
    if len(holders) > MOST_BOXES:
        return None
    dims = _shown_dims(shape, list(holders))
    across = dims[-1] if dims else None
    down = dims[0] if len(dims) == 2 else None
    ratio = shape[down] / shape[across] if down is not None and across is not None else 0
    height = int(min(_MOST, max(_LEAST, _WIDTH * ratio)))
    hidden = f"; dims {dims[0]} and {dims[1]} of {len(shape)} are shown" if len(shape) > 2 else ""
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 24} {_TOP + height + 48}" '
             f'width="{_LEFT + _WIDTH + 24}" height="{_TOP + height + 48}" font-family="sans-serif" font-size="12">',
             '<rect width="100%" height="100%" fill="#fff"/>',
             f'<text x="16" y="22" font-size="14" font-weight="bold">{escape(str(layout))}</text>',
             f'<text x="16" y="42">{layout.nranks} ranks, each box with the ranks that hold it{hidden}</text>']
    for (lo, length), ranks in holders.items():
        parts.append(_box(shape, lo, length, ranks, across, down, height))
    if across is not None:
        parts.append(f'<text x="{_LEFT + _WIDTH / 2:.0f}" y="{_TOP + height + 32}" text-anchor="middle">'
                     f'dim {across}: {shape[across]}</text>')
    if down is not None:
        parts.append(f'<text transform="translate(40 {_TOP + height / 2:.0f}) rotate(-90)" text-anchor="middle">'
                     f'dim {down}: {shape[down]}</text>')
    return "\n".join([*parts, "</svg>"])


def _box(shape: Sequence[int], lo: Sequence[int], length: Sequence[int], ranks: Sequence[int],
         across: Optional[int], down: Optional[int], height: int) -> str:
    x, y, wide, high = float(_LEFT), float(_TOP), float(_WIDTH), float(height)
    if across is not None:
        x, wide = x + wide * lo[across] / shape[across], wide * length[across] / shape[across]
    if down is not None:
        y, high = y + high * lo[down] / shape[down], high * length[down] / shape[down]
    text, hue = _ranges(ranks), (210 + ranks[0] * 137) % 360
    where = ", ".join(f"{a}:{a + n}" for a, n in zip(lo, length))
    label = f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" fill="#222" text-anchor="middle" ' \
            f'pointer-events="none">{text}</text>' if 7 * len(text) + 8 < wide and high > 14 else ""
    return (f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}" fill="hsl({hue},60%,72%)" '
            f'fill-opacity="0.85" stroke="#444" stroke-width="0.5"><title>[{where}] on {text}</title></rect>{label}')
