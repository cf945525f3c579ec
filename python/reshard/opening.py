"""Options with which a checkpoint is opened, as the library and as the command take them, and names in errors."""
from __future__ import annotations

import contextlib
import ctypes as C
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence

from . import _c
from ._c import Address
from .layout import Mesh


@contextlib.contextmanager
def rank_rules(mesh: Mesh, rules: Sequence[bytes]) -> Iterator[Any]:
    """Yields the rules of a directory with one file per rank of a mesh. Tensors that no rule matches are copies."""
    handle = Address()
    _c.lib.rsd_rules_new(None, C.byref(handle))
    try:
        _c.lib.rsd_rules_set_mesh(handle, mesh.handle)
        for rule in rules:
            _c.lib.rsd_rules_add(handle, _c.RULE_PLACE, rule)
        _c.lib.rsd_rules_add(handle, _c.RULE_DEFAULT, ",".join("R" * mesh.naxes).encode())
        yield handle
    finally:
        _c.lib.rsd_rules_free(handle)


def fitting_presets(checkpoint: int, mesh: Optional[Mesh]) -> List[str]:
    """Returns the presets that fit an open checkpoint."""
    rules, text = Address(), Address()
    _c.lib.rsd_rules_new(None, C.byref(rules))
    try:
        if mesh is not None:
            _c.lib.rsd_rules_set_mesh(rules, mesh.handle)
        _c.lib.rsd_rules_presets(rules, checkpoint, C.byref(text))
    finally:
        _c.lib.rsd_rules_free(rules)
    return (_c.taken(text) or "").split(", ")


def other_prefix(missing: str, names: Iterable[str]) -> str:
    """Returns what to add to an error if a name is missing only for what it begins with."""
    for name in names:
        if name.endswith("." + missing):
            return f"; names here begin with {name[:-len(missing)]}"
        if missing.endswith("." + name):
            return f"; names here lack {missing[:-len(name)]}"
    return ""


def command_words(flags: Dict[str, bool], values: Dict[str, Any], rules: Sequence[str]) -> List[str]:
    """Returns options of the command: flags that are set, options whose value is not None, and rules of --from."""
    words = [word for word, is_set in flags.items() if is_set]
    words += [text for word, value in values.items() if value is not None for text in (word, str(value))]
    return words + [word for rule in rules for word in ("--from", rule)]
