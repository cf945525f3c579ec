"""Rules: how a conversion selects, renames, casts and shards the tensors of a checkpoint.

They are the rules of the library and of the command (docs/rules.md), with regular expressions of Python. Functions may
replace rules.
"""
from __future__ import annotations

import ctypes as C
import re
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import _c, dtypes
from .checkpoint import Checkpoint, LazyTensor
from .errors import Error, InvalidError, MismatchError
from .layout import AnyMesh, Layout, Mesh, Placement

Places = Union[str, Sequence[Placement]]
Place = Union[Places, Mapping[str, Places], Callable[[LazyTensor], Union[None, Places, Layout]]]
Names = Union[str, Sequence[str], Callable[[LazyTensor], bool]]
Rename = Union[str, Sequence[str], Mapping[str, str], Callable[[str], str]]
Cast = Union[str, Mapping[str, Any], Callable[[LazyTensor], Any]]
Heads = Union[int, Tuple[int, int]]  # attention heads, or a pair with those of keys and values


class Rules(_c.Handle):
    """Rules for one checkpoint. `kept` has exceptions of their functions."""

    _free = "rsd_rules_free"

    def __init__(self, checkpoint: Checkpoint, *, mesh: AnyMesh = None, place: Optional[Place] = None, file: Any = None,
                 preset: Optional[str] = None, default: Optional[Places] = None, only: Optional[Names] = None,
                 exclude: Optional[Names] = None, rename: Optional[Rename] = None,
                 strip_prefix: Union[str, Sequence[str]] = (), cast: Optional[Cast] = None,
                 part: Optional[str] = "", config: Any = None, heads: Heads = 0, replicate_kv_heads: bool = False,
                 adapter: bool = False) -> None:
        if mesh is None and not (place is None and file is None and preset is None and default is None):
            raise InvalidError("place, rules, preset and default need a mesh, such as mesh='dp=2,tp=4'")
        if heads and preset is None:
            raise InvalidError("heads needs a preset, whose rules do not cut them")
        # Texts such as "s/A/B/" are rules of the library, as in the command.
        texts = [rename] if isinstance(rename, str) else [] if rename is None or callable(rename) or isinstance(
            rename, Mapping) else list(rename)
        self.checkpoint, self.kept = checkpoint, _c.Kept()
        self._rename = None if texts else rename
        self._mesh: Any = None if mesh is None else Mesh.of_any(mesh)
        # Functions are called by _decide; everything else is a rule of the library.
        self._only, self._exclude, self._place, self._cast = functions = [
            one if callable(one) and not isinstance(one, type) else None for one in (only, exclude, place, cast)]
        self._decided: Dict[str, Tuple[bool, bytes, Optional[int], Optional[Layout]]] = {}
        options = _c.RulesOptions(match=self.kept.callback(_c.MatchName, _match))
        if self._rename is not None or any(functions):
            options.decide = self.kept.callback(_c.MapTensor, self._decide)
        handle = _c.Address()
        _c.lib.rsd_rules_new(C.byref(options), C.byref(handle))
        self._handle = handle.value
        if self._mesh is not None and not self._place:
            _c.lib.rsd_rules_set_mesh(self.handle, self._mesh.handle)
            if preset is not None:
                _c.lib.rsd_rules_set_preset(self.handle, _c.text_bytes(preset, "preset"))
                self._set_heads(heads, config, replicate_kv_heads)
            for pattern, places in _pairs(place, ".*"):
                self._add(_c.RULE_PLACE, f"{pattern}={_text(places)}")
            if file is not None:
                _c.lib.rsd_rules_add_file(self.handle, _c.path_bytes(file))
            for _, places in _pairs(default):
                self._add(_c.RULE_DEFAULT, _text(places))
        for pattern, dtype in [] if self._cast else _pairs(cast):
            self._add(_c.RULE_CAST, f"{pattern}={dtypes.dtype(dtype).name}".lstrip("="))
        for kind, names in ((_c.RULE_ONLY, only), (_c.RULE_EXCLUDE, exclude)):
            for name in [names] if isinstance(names, str) else [] if names is None or callable(names) else names:
                self._add(kind, name)
        for text in texts:
            self._add(_c.RULE_RENAME, text)
        for text in [strip_prefix] if isinstance(strip_prefix, str) else strip_prefix:
            self._add(_c.RULE_STRIP_PREFIX, text)
        if adapter and part is None:
            self._add(_c.RULE_RENAME, r"s/[.](lora_[A-Za-z_]+)[.]default/.\1/")  # as PEFT names them in files
        if part is None:
            self._add(_c.RULE_MODEL, "")
        elif part:
            self._add(_c.RULE_PART, part)

    def _set_heads(self, heads: Heads, config: Any, replicate_kv_heads: bool) -> None:
        """Takes the numbers of attention heads, else those of a config.json. Presets do not cut heads."""
        if heads:
            self._add(_c.RULE_HEADS, str(heads) if isinstance(heads, int) else ",".join(map(str, heads)))
        if config is not None:
            try:
                _c.lib.rsd_rules_add(self.handle, _c.RULE_CONFIG, _c.path_bytes(config))
            except Error as error:
                warnings.warn(f"the number of heads is not known: {error}", stacklevel=5)
        if replicate_kv_heads:
            self._add(_c.RULE_KV_HEADS, "replicate")

    def _add(self, kind: int, text: str) -> None:
        _c.lib.rsd_rules_add(self.handle, kind, _c.text_bytes(text, "rule"))

    def check(self) -> None:
        """Raises an error with all problems of the rules for this checkpoint."""
        problems: List[str] = []
        told = self.kept.callback(_c.OnRuleMessage, lambda _, is_problem, text:
                                  problems.append(text.decode(errors="replace")) if is_problem else None)
        with self.kept:
            _c.lib.rsd_rules_check(self.handle, self.checkpoint.handle, told, None, None)
        if problems:
            raise MismatchError("; ".join(problems))

    def compare(self, io: Any) -> Callable[[Any, Any], Optional[int]]:
        """Returns a function that verifies an output and compares it with the checkpoint, before it is published."""
        def check(_: Any, out: Any) -> Optional[int]:
            found: List[str] = []
            told = self.kept.callback(_c.OnFinding, lambda _, text: found.append(text.decode(errors="replace")))
            differs = self.kept.callback(_c.OnDifference, lambda _, name, kind, text: found.append(
                f"the output differs from the source: {name.decode()}: {text.decode(errors='replace')}"))
            _c.lib.rsd_verify(out, io, told, None, C.byref(_c.Int64()), None)
            _c.lib.rsd_diff(self.checkpoint.handle, out, C.byref(self.diff_options(io)), differs, None,
                            C.byref(_c.Int64()), None)
            if not found:
                return None
            more = f" and {len(found) - 1} more findings" if len(found) > 1 else ""
            return int(_c.lib.rsd_set_error(_c.EFORMAT, f"{found[0]}{more}".encode()))
        return check

    def diff_options(self, io: Any, **options: Any) -> Any:
        """Returns the options of a comparison of the checkpoint with what the rules make of it."""
        return _c.DiffOptions(map=C.cast(_c.lib.rsd_rules_map, _c.MapTensor), map_context=self.handle, io=io, **options)

    def _decide(self, _: Any, tensor: Any, target: Any) -> Optional[int]:
        """Fills in the target of a tensor; the map function of the library."""
        name, made = tensor.contents.name.decode(), target.contents
        if name not in self._decided:  # the library maps each tensor twice: for the check and for the conversion
            try:
                self._decided[name] = self._ask(self.checkpoint[name], tensor, made.name.decode())
            except ValueError as error:
                return int(_c.lib.rsd_set_error(_c.EINVAL, str(error).encode()))
        made.keep, made.name, dtype, layout = self._decided[name]
        if dtype is not None:
            made.dtype = dtype
        if layout is not None:
            made.layout = _c.lib.rsd_layout_share(layout.handle)  # which takes ownership
        return None

    def _ask(self, tensor: LazyTensor, about: Any, name: str) -> Tuple[bool, bytes, Optional[int], Optional[Layout]]:
        """Calls the functions for a tensor. Returns whether to keep it, its new name (so far `name`), dtype and
        layout; None: the rules decide."""
        if (self._only and not self._only(tensor)) or (self._exclude and self._exclude(tensor)):
            return False, b"", None, None
        name = self._rename(name) if callable(self._rename) else name
        for pattern, replacement in [] if callable(self._rename) else _pairs(self._rename):
            name = _compiled(pattern).sub(replacement, name, count=1)
        dtype = self._cast(tensor) if self._cast else None
        layout: Any = self._place(tensor) if self._place else None
        if layout is not None and not isinstance(layout, Layout):
            handle = _c.Address()
            _c.lib.rsd_rules_layout(self._mesh.handle, about, _text(layout).encode(), C.byref(handle))
            layout = Layout._of(handle)
        return True, name.encode(), None if dtype is None else dtypes.dtype(dtype).number, layout


def _compiled(expression: str) -> "re.Pattern[str]":
    """Returns a regular expression, or raises an error that names it."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise InvalidError(f"invalid regular expression {expression!r}: {error}") from None


def searched(expression: str, name: str) -> bool:
    """Returns whether a name contains a match of an expression."""
    return _compiled(expression).search(name) is not None


def _match(_: Any, expression: bytes, whole: int, name: bytes, matches: Any) -> None:
    compiled = _compiled(expression.decode())
    matches[0] = (compiled.fullmatch if whole else compiled.search)(name.decode()) is not None


def _pairs(given: Any, pattern: str = "") -> Any:
    """Returns the patterns and values of a dict. A single value has the pattern `pattern`; None has none."""
    return given.items() if isinstance(given, Mapping) else [] if given is None else [(pattern, given)]


def _text(places: Places) -> str:
    """Returns placements in the notation."""
    if isinstance(places, str):
        return places
    if not isinstance(places, Sequence) or not all(isinstance(one, Placement) for one in places):
        raise TypeError(f"placements are text such as 'S(0),R' or a list of Shard(0) and so on, not {places!r}")
    return ",".join(map(str, places))
