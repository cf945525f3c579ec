"""Proving: that two checkpoints hold the same, that one is whole, and what it holds in 128 bits a tensor."""
from __future__ import annotations

import contextlib
import ctypes as C
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

from . import _c, local, memory
from ._c import Int64
from .carry import AnyPool, Pool, run
from .checkpoint import Checkpoint, open as open_checkpoint
from .layout import Layout
from .local import Progress
from .plan import Plan
from .storage import Storage

Source = Union[str, "os.PathLike[str]", Checkpoint]


@contextlib.contextmanager
def opened(source: Source, storage: Optional[Storage] = None) -> Iterator[Checkpoint]:
    """A checkpoint that is open already, or is opened as long as it is needed."""
    if isinstance(source, Checkpoint):
        with source.in_use():
            yield source
    else:
        with open_checkpoint(source, storage=storage) as checkpoint:
            yield checkpoint


class Difference(NamedTuple):
    """How a tensor differs: `kind` is "only_in_a", "only_in_b", "dtype", "shape" or "element"; `text` is a
    line that says it, for an element the first one in row-major order with its index and both values."""

    name: str
    kind: str
    text: str


class _Proof:
    """The options of a proof, and what they point to."""

    def __init__(self, pool: AnyPool, max_nbytes: Union[str, int],
                 progress: Optional[Progress]) -> None:
        self.call, self.pool = local.Call(progress), Pool.of(pool)
        self.options = _c.ProveOptions(pool=self.pool.handle, max_nbytes=local.size(max_nbytes),
                                       **self.call.options)


def digest(source: Source, names: Optional[Sequence[str]] = None, *, pool: AnyPool = None,
           max_nbytes: Union[str, int] = 0, progress: Optional[Progress] = None) -> Dict[str, str]:
    """The digests of tensors, 32 hex digits each: the same whatever the layout, the format and the byte order
    of the file. They find accidents, not malice."""
    with opened(source) as checkpoint:
        chosen = list(checkpoint) if names is None else list(names)
        proof, n = _Proof(pool, max_nbytes, progress), _c.DIGEST_NCHARS
        indices = _c.ints([checkpoint[name]._index for name in chosen])
        block = C.create_string_buffer(n * max(1, len(chosen)))
        if chosen:
            proof.call(_c.lib.rsd_digest, checkpoint.handle, len(chosen), indices, C.byref(proof.options),
                       block)
        return {name: block.raw[n * i:n * i + n - 1].decode() for i, name in enumerate(chosen)}


def digest_array(array: Any) -> str:
    """The same of an array in memory."""
    seen = memory.see(array, "the array")
    if not seen.dense:
        layout = Layout.whole(seen.dtype, seen.shape)
        seen = memory.see(run(Plan(layout, layout), [seen], [bytearray(seen.nbytes)])[0], "its copy").fits(
            seen.dtype, seen.shape, "its copy")
    text = C.create_string_buffer(_c.DIGEST_NCHARS)
    _c.lib.rsd_digest_array(seen.dtype.number, len(seen.shape), _c.ints(seen.shape), seen.address, text)
    return text.value.decode()


def diff(a: Source, b: Source, *, pool: AnyPool = None, max_nbytes: Union[str, int] = 0,
         progress: Optional[Progress] = None) -> List[Difference]:
    """Compares all tensors of two checkpoints, bit by bit, whatever their formats. Empty: all the same."""
    words = {_c.ONLY_IN_A: "only_in_a", _c.ONLY_IN_B: "only_in_b", _c.OTHER_DTYPE: "dtype",
             _c.OTHER_SHAPE: "shape", _c.OTHER_ELEMENT: "element"}
    found: List[Difference] = []

    def told(_: Any, name: bytes, kind: int, text: bytes) -> None:
        found.append(Difference(name.decode(), words[kind], text.decode(errors="replace")))

    with opened(a) as one, opened(b) as other:
        proof, count = _Proof(pool, max_nbytes, progress), Int64()
        proof.call(_c.lib.rsd_diff, one.handle, other.handle, C.byref(proof.options),
                   proof.call.kept.callback(_c.OnDifference, told), None, C.byref(count))
    return found


def verify(source: Source, *, pool: AnyPool = None, max_nbytes: Union[str, int] = 0,
           progress: Optional[Progress] = None) -> List[str]:
    """Reads everything: sizes, places, coverage, CRCs. Each finding is a line that names the file, the
    tensor and, where it can be known, the byte. Empty: all is well."""
    found: List[str] = []

    def told(_: Any, text: bytes) -> None:
        found.append(text.decode(errors="replace"))

    with opened(source) as checkpoint:
        proof, count = _Proof(pool, max_nbytes, progress), Int64()
        proof.call(_c.lib.rsd_verify, checkpoint.handle, C.byref(proof.options),
                   proof.call.kept.callback(_c.OnFinding, told), None, C.byref(count))
    return found
