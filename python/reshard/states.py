"""State dicts: nested dicts and lists of tensors and plain values, flattened as in torch.

    {"model": {"w": tensor}, "step": 7}   ->   model.w at ["model", "w"], step at ["step"]

Dicts are always entered. Lists are entered if they contain a tensor, a dict or such a list. All else is a value.
"""
from __future__ import annotations

import json
import re
import sys
from typing import (Any, Container, Dict, Iterator, List, Mapping, MutableMapping, NamedTuple, Optional, Tuple,
                    Union)

from .errors import FormatError, InvalidError, UnsupportedError

Path = Tuple[Union[str, int], ...]


class Leaf(NamedTuple):
    """A leaf of a state dict: its path, its value, and the dict or list that contains it, with its key."""

    path: Path
    what: Any
    holder: Any
    key: Any


def is_tensor(what: Any) -> bool:
    """Returns whether an object is an array and not a plain value. Scalars and bytes of NumPy are values."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(what, torch.Tensor):
        return True
    if numpy is not None and isinstance(what, numpy.generic):
        return False
    if hasattr(what, "__array_interface__") or hasattr(what, "__dlpack__"):
        return True
    return isinstance(what, (memoryview, bytearray)) or type(what).__module__ == "array"


def is_name(name: str) -> bool:
    """Returns whether a tensor or value can have a name. C would end the name at a NUL."""
    try:
        return bool(name.encode()) and "\0" not in name
    except UnicodeEncodeError:
        return False


def check_name(name: str) -> None:
    """InvalidError if the name of a tensor or value is invalid."""
    if not is_name(name):
        raise InvalidError(f"{name!r} is not a valid name of a tensor or value: names are text, not empty, without NUL")


def flatten(state: Mapping[str, Any], whole: Container[str] = ()) -> Dict[str, Leaf]:
    """Returns the leaves by their dotted names. Names in `whole` are always leaves."""
    found: Dict[str, Leaf] = {}
    try:
        for path, what, holder, key in _walk((), state, None, None, whole):
            name = ".".join(map(str, path))
            if name in found:
                raise InvalidError(f"two entries of the state have the name {name}")
            found[name] = Leaf(path, what, holder, key)
    except RecursionError:
        raise InvalidError("the state contains itself, or is nested too deeply") from None
    return found


def _goes_into(what: Any) -> bool:
    if isinstance(what, Mapping):
        return True
    return isinstance(what, list) and any(is_tensor(one) or _goes_into(one) for one in what)


def _walk(path: Path, what: Any, holder: Any, key: Any, whole: Container[str]) -> Iterator[Tuple[Any, ...]]:
    """Yields the leaves below a value, each as (path, leaf, what contains it, its key there)."""
    if path and ".".join(map(str, path)) in whole:
        yield path, what, holder, key
    elif isinstance(what, Mapping):
        for inner, one in what.items():
            yield from _walk(path + (str(inner),), one, what, inner, whole)
    elif _goes_into(what):
        for index, one in enumerate(what):
            yield from _walk(path + (index,), one, what, index, whole)
    else:
        yield path, what, holder, key


def put(leaf: Leaf, name: str, value: Any) -> None:
    """Replaces the value of a leaf. Numbers that JSON lacks are text; they become numbers again if the leaf is a
    float."""
    if type(leaf.what) is float and value in ("nan", "inf", "-inf"):
        value = float(value)
    if not isinstance(leaf.holder, (MutableMapping, list)):
        raise InvalidError(f"{name}: a {type(leaf.holder).__name__} cannot be changed")
    leaf.holder[leaf.key] = value


_ODD = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')  # floats that JSON lacks, and the text before and after them
_INFINITE = {"Infinity": "1e999", "-Infinity": "-1e999"}  # numbers that are read as infinity


def to_json(name: str, value: Any) -> bytes:
    """Returns a plain value as JSON for the library: None, booleans, numbers, text, lists and dicts of them. Tuples
    become lists."""
    numpy = sys.modules.get("numpy")

    def plain(one: Any) -> Any:
        if numpy is not None and isinstance(one, numpy.generic):
            return one.item()
        raise UnsupportedError(f"{name}: a {type(one).__name__} is not a plain value and cannot be saved")

    def spelled(found: "re.Match[str]") -> str:
        if found.group() == "NaN":
            raise UnsupportedError(f"{name}: {value!r} cannot be saved: NaN is not supported")
        return _INFINITE.get(found.group(), found.group())

    try:
        return _ODD.sub(spelled, json.dumps(value, default=plain)).encode()
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"{name}: a {type(value).__name__} that cannot be saved: {error}") from None


class _Opaque:
    """Stands for a value of a checkpoint that is not plain data: an object of a class."""

    def __repr__(self) -> str:
        return "OPAQUE"

    def __reduce__(self) -> str:  # copies and pickles are the same object
        return "OPAQUE"


OPAQUE = _Opaque()


def from_json(text: Union[str, None]) -> Any:
    """Returns the value of a JSON text of the library, where bytes are {"bytes": "hex digits"}."""
    if text is None:
        return OPAQUE
    return json.loads(text, object_hook=_bytes_again)


def _bytes_again(found: Dict[str, Any]) -> Any:
    if list(found) == ["bytes"] and isinstance(found["bytes"], str):
        try:
            return bytes.fromhex(found["bytes"])
        except ValueError:
            pass
    return found


# Places of lists in a state dict, besides one for each entry: what was empty is not in a checkpoint.
SPARE_PLACES = 1 << 20


def check_places(paths: Mapping[str, Optional[Path]], where: str) -> None:
    """FormatError, which begins with `where`, if the lists of a nested dict with these paths would have far more places
    than there are entries."""
    left = SPARE_PLACES + len(paths)
    whole: Dict[Any, Any] = {}
    extents: Dict[int, int] = {}  # of the lists, by the id of their dict in `whole`
    for name, path in paths.items():
        inside = whole
        for step in path or ():
            if isinstance(step, int):
                left -= max(0, step + 1 - extents.get(id(inside), 0))
                extents[id(inside)] = max(step + 1, extents.get(id(inside), 0))
            if left < 0:
                raise FormatError(f"{where}: {name}: its path {_shown(path)} is in a list of far more places than the "
                                  f"checkpoint has entries ({len(paths)})")
            inside = inside.setdefault(step, {})


def _shown(path: Any) -> str:
    text = str(list(path))
    return text if len(text) <= 200 else text[:200] + "..."


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Optional[Path]],
              where: str = "state") -> Dict[str, Any]:
    """Returns the nested dict of values at paths. A value without a path is under its name. FormatError, which begins
    with `where`, if paths contradict each other."""
    check_places(paths, where)
    state: Dict[str, Any] = {}
    made = {id(state)}  # what may have entries put into it, unlike dicts and lists that are values
    for name, what in leaves.items():
        path: List[Any] = list(paths.get(name) or (name,))
        holder: Any = state
        for step, following in zip(path, path[1:] + [None]):
            if isinstance(holder, list):
                if not isinstance(step, int):
                    raise FormatError(f"{where}: {name}: its path {_shown(path)} has a key where others have an index")
                holder.extend([None] * (step + 1 - len(holder)))
            inner = holder[step] if isinstance(holder, list) else holder.get(step)
            if inner is not None and (following is None or id(inner) not in made):
                raise FormatError(f"{where}: {name}: another entry is at its path {_shown(path)}, or in front of it")
            if following is None:
                inner = what
            elif inner is None:
                inner = [] if isinstance(following, int) else {}
                made.add(id(inner))
            holder[step] = inner
            holder = inner
    return state
