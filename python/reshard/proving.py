"""Verification: digests of tensors, differences between two checkpoints, and damage.

With a `transport` a call is collective: each rank reads a part, and all ranks return the same."""
from __future__ import annotations

import contextlib
import ctypes as C
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

from . import _c, local, memory
from ._c import Int64, Pathlike
from .carry import AnyPool, run
from .checkpoint import Checkpoint, LazyTensor, open as open_checkpoint
from .layout import Layout
from .local import Progress, Size
from .plan import Plan
from .rules import Cast, Names, Rename, Rules, searched
from .storage import Storage
from .transport import AnyTransport

Source = Union[Pathlike, Checkpoint]


@contextlib.contextmanager
def opened(source: Source, storage: Optional[Storage] = None) -> Iterator[Checkpoint]:
    """Yields an open checkpoint, or opens one for the duration of the call."""
    if isinstance(source, Checkpoint):
        with source.in_use():
            yield source
    else:
        with open_checkpoint(source, storage=storage) as checkpoint:
            yield checkpoint


class Difference(NamedTuple):
    """A difference of the tensor `name`. `kind` is "only_in_a", "only_in_b", "dtype", "shape" or "element". `text`
    describes it in one line; for an element it has the index of the first one in row-major order, and both values."""

    name: str
    kind: str
    text: str


def _call(progress: Optional[Progress], pool: AnyPool, threads: Optional[int], max_nbytes: Size, max_memory: Size,
          transport: Optional[AnyTransport], timeout: float) -> local.Call:
    return local.Call(progress, local.either("pool", pool, "threads", threads),
                      local.either("max_nbytes", max_nbytes, "max_memory", max_memory), transport, timeout)


def digest(source: Source, names: Union[str, Sequence[str], None] = None, *, only: Optional[str] = None,
           pool: AnyPool = None, threads: Optional[int] = None, max_nbytes: Union[str, int] = 0,
           max_memory: Union[str, int] = 0, progress: Optional[Progress] = None,
           transport: Optional[AnyTransport] = None, timeout: float = 0.0,
           storage: Optional[Storage] = None) -> Dict[str, str]:
    """Returns the digests of tensors of `source`, 32 hexadecimal digits each. They do not depend on layout, format and
    byte order. They detect accidental changes, not attacks.

    source      a path, or an open Checkpoint
    names       a tensor, or several. Default: all
    only        an expression: only tensors whose name contains a match
    pool, threads   a Pool or a number of threads. Default: one thread per CPU of the process
    max_nbytes, max_memory  limit of the buffers; two words for one option. Default: 256 MB
    progress    called with the bytes done and the bytes in total; an exception stops the work
    transport   the ranks that read together: each reads a part, and all return the same
    timeout     seconds without a heartbeat after which a rank counts as lost. Default: 300
    storage     credentials and limits of s3:// and https:// paths. Default: those of the environment"""
    with opened(source, storage) as checkpoint:
        chosen = [names] if isinstance(names, str) else list(checkpoint if names is None else names)
        chosen = [name for name in chosen if only is None or searched(only, name)]
        call = _call(progress, pool, threads, max_nbytes, max_memory, transport, timeout)
        n = _c.DIGEST_NCHARS
        indices = _c.ints([checkpoint[name]._index for name in chosen])
        block = C.create_string_buffer(n * max(1, len(chosen)))
        if chosen:
            call(_c.lib.rsd_digest, checkpoint.handle, len(chosen), indices, call.io, block)
        return {name: block.raw[n * i:n * i + n - 1].decode() for i, name in enumerate(chosen)}


def digest_array(array: Any) -> str:
    """Returns the digest of an `array` in memory. The digest of a dense array on a CUDA device is computed there, after
    the work in the current stream of torch."""
    seen = memory.see(array, "the array")
    stream = memory.ordered([seen.device])
    if stream:
        sys.modules["torch"].cuda.current_stream(seen.device).synchronize()
    if not seen.dense:
        layout = Layout.whole(seen.dtype, seen.shape)
        seen = memory.see(run(Plan(layout, layout), [seen], [bytearray(seen.nbytes)])[0], "its copy").fits(
            seen.dtype, seen.shape, "its copy")
    text = C.create_string_buffer(_c.DIGEST_NCHARS)
    _c.lib.rsd_digest_array(seen.dtype.number, len(seen.shape), _c.ints(seen.shape), seen.address, text)
    return text.value.decode()


def _matches(names: Names, tensor: LazyTensor) -> bool:
    """Returns whether `only` or `exclude` of a conversion matches a tensor."""
    if callable(names):
        return bool(names(tensor))
    return any(searched(one, tensor.name) for one in ([names] if isinstance(names, str) else names))


def diff(a: Source, b: Source, *, rtol: float = 0.0, atol: float = 0.0, only: Optional[Names] = None,
         exclude: Optional[Names] = None, rename: Optional[Rename] = None, cast: Optional[Cast] = None,
         pool: AnyPool = None, threads: Optional[int] = None, max_nbytes: Union[str, int] = 0,
         max_memory: Union[str, int] = 0, progress: Optional[Progress] = None,
         transport: Optional[AnyTransport] = None, timeout: float = 0.0,
         storage: Optional[Storage] = None) -> List[Difference]:
    """Compares all tensors of two checkpoints `a` and `b`, in any formats. Returns an empty list if all are the same.

    With `rtol` or `atol`, floating-point and complex elements are the same if |a - b| <= atol + rtol * |b|, also
    between dtypes. Else elements are compared bit by bit.

    `only`, `exclude`, `rename` and `cast` are those of `convert`, and apply to `a` before it is compared:
    {r"^model\\.": ""} compares model.w of `a` with w of `b`. The other keywords are those of `digest`: pool, threads,
    max_nbytes, max_memory, progress, transport, timeout, storage."""
    words = {_c.ONLY_IN_A: "only_in_a", _c.ONLY_IN_B: "only_in_b", _c.OTHER_DTYPE: "dtype",
             _c.OTHER_SHAPE: "shape", _c.OTHER_ELEMENT: "element"}
    found: List[Difference] = []

    def told(_: Any, name: bytes, kind: int, text: bytes) -> None:
        found.append(Difference(name.decode(), words[kind], text.decode(errors="replace")))

    with opened(a, storage) as one, opened(b, storage) as other:
        call, count = _call(progress, pool, threads, max_nbytes, max_memory, transport, timeout), Int64()
        rules = Rules(one, only=only, exclude=exclude, rename=rename, cast=cast)
        options = rules.diff_options(call.io, rtol=rtol, atol=atol)
        with rules.kept:
            call(_c.lib.rsd_diff, one.handle, other.handle, C.byref(options),
                 call.kept.callback(_c.OnDifference, told), None, C.byref(count))
        return [one for one in found if one.kind != "only_in_b" or (only is None or _matches(only, other[one.name]))
                and not (exclude is not None and _matches(exclude, other[one.name]))]


def verify(source: Source, *, pool: AnyPool = None, threads: Optional[int] = None,
           max_nbytes: Union[str, int] = 0, max_memory: Union[str, int] = 0, progress: Optional[Progress] = None,
           transport: Optional[AnyTransport] = None, timeout: float = 0.0,
           storage: Optional[Storage] = None) -> List[str]:
    """Reads all of `source`, a path or an open Checkpoint, and checks sizes, offsets, coverage and CRCs. Each finding
    is one line with the file, the tensor and, if known, the byte. Returns an empty list if there is no damage. The
    keywords are those of `digest`: pool, threads, max_nbytes, max_memory, progress, transport, timeout, storage."""
    found: List[str] = []

    def told(_: Any, text: bytes) -> None:
        found.append(text.decode(errors="replace"))

    with opened(source, storage) as checkpoint:
        call, count = _call(progress, pool, threads, max_nbytes, max_memory, transport, timeout), Int64()
        call(_c.lib.rsd_verify, checkpoint.handle, call.io, call.kept.callback(_c.OnFinding, told), None,
             C.byref(count))
    return found
