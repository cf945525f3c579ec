"""Rules: how the tensors of a checkpoint are cut, chosen, renamed and cast by a conversion.

They are those of the command (docs/rules.md): an expression matches a whole name, the first that matches
decides, optimizer state goes with its parameter, and a tensor without dims is replicated. Expressions are
Python's.
"""
from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import dtypes
from .checkpoint import Checkpoint, LazyTensor
from .errors import InvalidError, MismatchError
from .layout import Layout, Mesh, Placement

Places = Union[str, Sequence[Placement]]
Place = Union[Places, Mapping[str, Places], Callable[[LazyTensor], Union[None, Places, Layout]]]
Names = Union[str, Sequence[str], Callable[[LazyTensor], bool]]
Rename = Union[Mapping[str, str], Callable[[str], str]]
Cast = Union[str, Mapping[str, Any], Callable[[LazyTensor], Any]]

PRESETS = ("fsdp", "hsdp", "llama-tp", "replicate")
_WORDS = {"colwise": "S(0)", "rowwise": "S(1)", "replicate": "R"}
_FLOATS = ("f64", "f32", "f16", "bf16")


class Choice:
    """What becomes of a tensor: its new name, dtype and layout (None: whole)."""

    def __init__(self, name: str, dtype: dtypes.Dtype, layout: Optional[Layout]) -> None:
        self.name, self.dtype, self.layout = name.encode(), dtype, layout


def choose(checkpoint: Checkpoint, *, mesh: Union[str, Mesh, None], place: Optional[Place],
           preset: Optional[str], default: Optional[Places], only: Optional[Names], exclude: Optional[Names],
           rename: Optional[Rename], cast: Optional[Cast]) -> Dict[str, Choice]:
    """What becomes of every tensor that is kept, by its name. All that cannot be is told at once."""
    mesh = Mesh(mesh) if isinstance(mesh, (str, int)) else mesh
    kept = [tensor for tensor in map(checkpoint.__getitem__, checkpoint)
            if (only is None or found(only, tensor)) and not (exclude is not None and found(exclude, tensor))]
    if not kept:
        raise MismatchError("no tensor is left to write")
    cutter = _Cutter(checkpoint, mesh, place, preset, default)
    chosen, problems = {}, []
    for tensor in kept:
        try:
            chosen[tensor.name] = Choice(renamed(rename, tensor.name), _cast(cast, tensor),
                                         cutter.layout(tensor))
        except ValueError as error:
            problems.append(f"{tensor.name}: {error}")
    if problems:
        told = "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
        raise MismatchError(f"{len(problems)} of {len(kept)} tensors cannot be mapped: {told}")
    cutter.check_used()
    return chosen


def found(which: Names, tensor: LazyTensor) -> bool:
    """Whether a tensor is one of those that are asked for."""
    if callable(which):
        return bool(which(tensor))
    return any(re.search(one, tensor.name) for one in ([which] if isinstance(which, str) else which))


def renamed(rename: Optional[Rename], name: str) -> str:
    """The new name of a tensor."""
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    for pattern, replacement in rename.items():
        name = re.sub(pattern, replacement, name, count=1)
    return name


def _cast(cast: Optional[Cast], tensor: LazyTensor) -> dtypes.Dtype:
    own, wish = dtypes.dtype(tensor.dtype), None
    if callable(cast) and not isinstance(cast, type):
        wish = cast(tensor)
    elif isinstance(cast, Mapping):
        wish = next((one for pattern, one in cast.items() if re.fullmatch(pattern, tensor.name)), None)
    elif cast is not None and tensor.dtype in _FLOATS:
        wish = cast
    return own if wish is None else dtypes.dtype(wish)


class _Cutter:
    """Finds the layout of each tensor."""

    def __init__(self, checkpoint: Checkpoint, mesh: Optional[Mesh], place: Optional[Place],
                 preset: Optional[str], default: Optional[Places]) -> None:
        self.checkpoint, self.mesh, self.default = checkpoint, mesh, default
        self.function = place if callable(place) else None
        if place is None or callable(place):
            place = {}
        elif not isinstance(place, Mapping):
            place = {".*": place}
        if mesh is None and (place or self.function or preset or default):
            raise InvalidError("how tensors are cut is said of a mesh: mesh='dp=2,tp=4'")
        self.places = [(re.compile(pattern), places) for pattern, places in place.items()]
        self.preset = [] if preset is None or mesh is None else _preset(preset, mesh)
        self.used = [False] * len(self.places)
        self.ends: Dict[str, List[str]] = {}
        if self.places or self.preset:
            for name in checkpoint:
                for end in _ends(name):
                    self.ends.setdefault(end, []).append(name)

    def layout(self, tensor: LazyTensor) -> Optional[Layout]:
        if self.mesh is None:
            return None
        if self.function is not None:
            wish = self.function(tensor)
            if wish is None or isinstance(wish, Layout):
                return wish
        else:
            wish = self._places(tensor)
        if not tensor.shape:
            wish = ",".join(["R"] * self.mesh.naxes)
        if wish is None:
            raise InvalidError("no rule for it, and no default")
        return Layout.on(tensor.dtype, tensor.shape, self.mesh, _spelled(wish))

    def _places(self, tensor: LazyTensor) -> Optional[Places]:
        wish = self._match(tensor.name, self.places)
        if wish is not None:
            return wish
        parameter = self._parameter(tensor)
        for name in ([parameter] if parameter else []) + [tensor.name]:
            wish = self._match(name, self.places) or self._match(name, self.preset)
            if wish is not None:
                return wish
        return self.default

    def _match(self, name: str, rules: List[Tuple[Any, Places]]) -> Optional[Places]:
        for i, (pattern, places) in enumerate(rules):
            if pattern.fullmatch(name):
                if rules is self.places:
                    self.used[i] = True
                return places
        return None

    def _parameter(self, tensor: LazyTensor) -> Optional[str]:
        """The parameter that optimizer state ANY.state.FQN.SLOT belongs to, if it has the same shape."""
        state = re.match(r"(?:state\.|.*?\.state\.)(.+)\.[^.]*$", tensor.name, re.S)
        names = self.ends.get(state.group(1), []) if state else []
        if len(names) != 1 or self.checkpoint[names[0]].shape != tensor.shape:
            return None
        return names[0]

    def check_used(self) -> None:
        for (pattern, _), used in zip(self.places, self.used):
            if not used and not any(pattern.fullmatch(name) for name in self.checkpoint):
                raise MismatchError(f"the rule {pattern.pattern!r} matches no tensor")


def _ends(name: str) -> List[str]:
    """A name, and what follows each of its dots."""
    return [name] + [name[at.end():] for at in re.finditer(r"\.", name)]


def _spelled(places: Places) -> Places:
    """Placements with the words that stand for them."""
    if not isinstance(places, str):
        return places
    return re.sub(r"\b(colwise|rowwise|replicate)\b", lambda found: _WORDS[found.group(1)], places)


def _preset(name: str, mesh: Mesh) -> List[Tuple[Any, Places]]:
    n = mesh.naxes
    if name not in PRESETS:
        raise InvalidError(f"no preset is called {name!r}: there are {' '.join(PRESETS)}")
    if name == "hsdp" and n != 2:
        raise InvalidError("preset hsdp needs a mesh of two axes, replicas first: dp_replicate=2,dp_shard=4")
    tp = mesh.names.index("tp") if "tp" in mesh.names else n - 1
    replicated = ",".join(["R"] * n)

    def cut(axis: int, one: str) -> str:
        return ",".join(one if i == axis else "R" for i in range(n))

    rules = {
        "fsdp": [(".*", ",".join(["S(0)"] * n))], "replicate": [(".*", replicated)],
        "hsdp": [(".*", cut(1, "S(0)"))],
        "llama-tp": [
            (r"(.*[.])?(q_proj|k_proj|v_proj|gate_proj|up_proj)[.](weight|bias)", cut(tp, "S(0)")),
            (r"(.*[.])?(o_proj|down_proj)[.]weight", cut(tp, "S(1)")),
            (r"(.*[.])?(embed_tokens|lm_head)[.]weight", cut(tp, "S(0)")),
            (r"(.*[.])?(o_proj|down_proj)[.]bias", replicated),
            (r"(.*[.])?[A-Za-z_]*(norm|layernorm)[.](weight|bias)", replicated),
            (r"(.*[.])?rotary_emb[.]inv_freq", replicated)]}
    return [(re.compile(pattern), places) for pattern, places in rules[name]]
